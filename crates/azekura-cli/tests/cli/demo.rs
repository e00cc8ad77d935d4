//! The demo, on a small directory with small memtables.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::program::Program;

const SMALL: &str = "--memtable-bytes 262144";

fn make_files(p: &Program) {
    for n in 0..200 {
        let dir = p.path(format!("in/{}", n % 7));
        std::fs::create_dir_all(&dir).unwrap();
        let content: Vec<u8> = (0..n * 37u32).flat_map(|i| (i / 3).to_le_bytes()).collect();
        std::fs::write(dir.join(format!("file{n}@v{n}")), content).unwrap();
    }
}

#[test]
fn everything_holds_and_nothing_is_left_behind() {
    let p = Program::new();
    make_files(&p);
    let told = p.json(&format!("demo in {SMALL}"));
    assert_eq!(told["held"], true, "{told}");
    assert_eq!((told["files"].as_u64(), told["left_out"]["count"].as_u64()), (Some(200), Some(0)), "{told}");
    let claims: Vec<_> = told["checks"].as_array().unwrap().iter().map(|c| c["claim"].as_str().unwrap()).collect();
    for word in ["SIGKILL", "survived", "two levels", "byte for byte", "in order", "snapshot"] {
        assert!(claims.iter().any(|claim| claim.contains(word)), "{word}: {claims:?}");
    }
    assert!(told["flushes"].as_u64() > Some(0) && told["acknowledged_before_the_kill"].as_u64() > Some(0), "{told}");
    p.assert_cleaned_up();
}

#[test]
fn the_database_is_kept_on_request_and_holds_the_files() {
    let p = Program::new();
    make_files(&p);
    let text = p.ok(&format!("demo in --db kept {SMALL}"));
    for word in ["200 files", "compression ratio", "write amplification", "recovery time", "All of it held.", "kept"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    let file = std::fs::read(p.path("in/3/file199@v199")).unwrap();
    assert_eq!(p.run("get --db kept 3/file199@v199").out, file);
    p.ok("verify --db kept");
    let again = p.run(&format!("demo in --db kept {SMALL}"));
    assert_eq!(again.code, Some(3), "a directory in use is refused");
    p.assert_cleaned_up();
}

#[test]
fn a_directory_without_files_gets_some() {
    let p = Program::new();
    std::fs::create_dir(p.path("empty")).unwrap();
    let told = p.json(&format!("demo empty {SMALL}"));
    assert_eq!((told["held"].as_bool(), told["files"].as_u64()), (Some(true), Some(300)), "{told}");
    p.assert_cleaned_up();
}

#[test]
fn what_cannot_be_stored_is_reported() {
    let p = Program::new();
    make_files(&p);
    let large = std::fs::File::create(p.path("in/large")).unwrap();
    large.set_len(65 << 20).unwrap();
    let told = p.json(&format!("demo in {SMALL}"));
    assert_eq!((told["held"].as_bool(), told["left_out"]["count"].as_u64()), (Some(true), Some(1)), "{told}");
    assert!(told["left_out"]["first"][0].as_str().unwrap().contains("in/large"), "{told}");
    assert_eq!(p.run("demo nowhere").code, Some(3));
}

#[test]
fn an_interrupt_cleans_up() {
    let p = Program::new();
    make_files(&p);
    // With memtables of the usual size there is time to interrupt.
    let mut child = p.command(["demo", "in"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    let working =
        || std::fs::read_dir(p.path("tmp")).unwrap().flatten().any(|dir| dir.path().join("db/MANIFEST").exists());
    while !working() {
        assert!(started.elapsed() < Duration::from_secs(20), "the demo does not start");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let status = child.wait().unwrap();
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(status.code(), Some(130), "{err}");
    p.assert_cleaned_up();
}

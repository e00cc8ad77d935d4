//! The demo with a small directory and small memtables.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::fixture::CliFixture;

const SMALL: &str = "--memtable-bytes 262144";

fn make_files(p: &CliFixture) {
    for n in 0..200 {
        let dir = p.path(format!("in/{}", n % 7));
        std::fs::create_dir_all(&dir).unwrap();
        let content: Vec<u8> = (0..n * 37u32).flat_map(|i| (i / 3).to_le_bytes()).collect();
        std::fs::write(dir.join(format!("file{n}@v{n}")), content).unwrap();
    }
}

#[test]
fn demo_passes_and_cleans_up() {
    let p = CliFixture::new();
    make_files(&p);
    let json = p.json(&format!("demo in {SMALL}"));
    assert_eq!(json["held"], true, "{json}");
    assert_eq!((json["files"].as_u64(), json["left_out"]["count"].as_u64()), (Some(200), Some(0)), "{json}");
    let claims: Vec<_> = json["checks"].as_array().unwrap().iter().map(|c| c["claim"].as_str().unwrap()).collect();
    for word in ["SIGKILL", "survived", "byte for byte", "in order", "snapshot", "blob GC", "every byte"] {
        assert!(claims.iter().any(|claim| claim.contains(word)), "{word}: {claims:?}");
    }
    assert!(json["flushes"].as_u64() > Some(0) && json["acknowledged_before_the_kill"].as_u64() > Some(0), "{json}");
    assert!(json["blob_bytes"].as_u64() > Some(0), "large values are in blob files: {json}");
    assert!(json["blob_gc"]["space_amp_after"].as_f64() <= json["blob_gc"]["space_amp_before"].as_f64(), "{json}");
    assert!(json["data_block_index_types"]["BinaryAndHash"].as_u64() > Some(0), "{json}");
    p.assert_cleaned_up();
}

#[test]
fn demo_keeps_database_when_asked() {
    let p = CliFixture::new();
    make_files(&p);
    let text = p.ok(&format!("demo in --db kept {SMALL}"));
    for word in ["200 files", "space amplification", "write amplification", "recovery", "All checks passed", "kept"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    let file = std::fs::read(p.path("in/3/file199@v199")).unwrap();
    assert_eq!(p.run("get --db kept 3/file199@v199").out, file);
    p.ok("verify --db kept");
    let again = p.run(&format!("demo in --db kept {SMALL}"));
    assert_eq!(again.code, Some(3), "a directory that is not empty is refused");
    p.assert_cleaned_up();
}

#[test]
fn demo_generates_files_for_empty_directory() {
    let p = CliFixture::new();
    std::fs::create_dir(p.path("empty")).unwrap();
    let json = p.json(&format!("demo empty {SMALL}"));
    assert_eq!((json["held"].as_bool(), json["files"].as_u64()), (Some(true), Some(300)), "{json}");
    p.assert_cleaned_up();
}

#[test]
fn demo_reports_files_it_cannot_store() {
    let p = CliFixture::new();
    make_files(&p);
    let large = std::fs::File::create(p.path("in/large")).unwrap();
    large.set_len(65 << 20).unwrap();
    let json = p.json(&format!("demo in {SMALL}"));
    assert_eq!((json["held"].as_bool(), json["left_out"]["count"].as_u64()), (Some(true), Some(1)), "{json}");
    assert!(json["left_out"]["first"][0].as_str().unwrap().contains("in/large"), "{json}");
    assert_eq!(p.run("demo nowhere").code, Some(3));
}

#[test]
fn demo_reports_error_of_its_writer_process() {
    let p = CliFixture::new();
    make_files(&p);
    let ran = p.run("demo in --memtable-bytes 1 --json");
    assert_eq!(ran.code, Some(3), "{ran:?}");
    let error = ran.error();
    assert_eq!(error["kind"], "writer");
    assert!(error["message"].as_str().unwrap().contains("memtable"), "{error}");
    p.assert_cleaned_up();
}

#[test]
fn interrupted_demo_cleans_up() {
    let p = CliFixture::new();
    make_files(&p);
    // With memtables of the default size the demo writes for long enough to be interrupted.
    let mut child = p.command(["demo", "in"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let working =
        || std::fs::read_dir(p.path("tmp")).unwrap().flatten().any(|dir| dir.path().join("db/MANIFEST").exists());
    while !working() {
        assert!(child.try_wait().unwrap().is_none(), "the demo ended before it had a database");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let status = child.wait().unwrap();
    let mut err = String::new();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(status.code(), Some(130), "{err}");
    p.assert_cleaned_up();
}

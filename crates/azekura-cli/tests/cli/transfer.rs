//! import and export, byte for byte in both directions.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::fixture::CliFixture;

/// Files with unusual names and contents.
fn make_files(root: &Path) {
    std::fs::create_dir_all(root.join("a/deep er/below")).unwrap();
    let every_byte: Vec<u8> = (0..=255).cycle().take(70_000).collect();
    let large: Vec<u8> =
        (0..5_000_000u32).flat_map(|n| (n.wrapping_mul(2_654_435_761) >> 7).to_le_bytes()).take(5_000_000).collect();
    let files: [(&[u8], &[u8]); 7] = [
        (b"plain.txt", b"hello\n"),
        (b"empty", b""),
        (b"a/deep er/below/binary", &every_byte),
        (b"a/large", &large),
        ("a/f\u{fc}r".as_bytes(), "\u{e9}\"\\".as_bytes()),
        (b"a/not\xffutf8", b"\xff\xfe"),
        (b"a/-n", b"dash"),
    ];
    for (name, content) in files {
        std::fs::write(root.join(OsStr::from_bytes(name)), content).unwrap();
    }
}

fn contents(root: &Path) -> BTreeMap<std::path::PathBuf, Vec<u8>> {
    let files = walkdir::WalkDir::new(root).into_iter().map(Result::unwrap).filter(|entry| entry.file_type().is_file());
    files.map(|f| (f.path().strip_prefix(root).unwrap().to_path_buf(), std::fs::read(f.path()).unwrap())).collect()
}

#[test]
fn directory_round_trips() {
    let p = CliFixture::new();
    make_files(&p.path("in"));
    let stored = p.json("import --db d in");
    assert_eq!(stored["entries"], 7);
    assert_eq!(p.json("export --db d out")["entries"], 7);
    let (before, after) = (contents(&p.path("in")), contents(&p.path("out")));
    assert_eq!(before.len(), 7);
    assert!(before == after, "the copy differs");
    assert_eq!(p.run("get --db d plain.txt").out, b"hello\n");
    let again = p.run("export --db d out");
    assert_eq!(again.code, Some(3), "a directory that is not empty is refused");
}

#[test]
fn json_lines_round_trip() {
    let p = CliFixture::new();
    make_files(&p.path("in"));
    p.ok("import --db d in");
    p.ok("put --create --db d --hex 00 0001ff");
    assert_eq!(p.json("export --db d all.jsonl")["entries"], 8);
    let lines = std::fs::read(p.path("all.jsonl")).unwrap();
    for line in lines.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
        assert!(serde_json::from_slice::<serde_json::Value>(line).unwrap().is_object());
    }
    assert!(p.run("export --db d -").out == lines, "a file and standard output get equal bytes");
    assert!(p.run("scan --db d --json").out == lines, "scan prints what import reads");
    assert_eq!(p.json("import --db e all.jsonl")["entries"], 8);
    let piped = p.run_with_input(["import", "--db", "f", "-"], &lines);
    assert_eq!(piped.code, Some(0), "{piped:?}");
    for copy in ["e", "f"] {
        assert!(p.run(&format!("export --db {copy} -")).out == lines, "{copy} differs");
    }
    assert_eq!(p.ok("get --db e --hex 00"), "0001ff\n");
}

#[test]
fn bad_json_line_is_reported_with_number() {
    let p = CliFixture::new();
    for (bad, why) in [
        ("nonsense", "line 3"),
        ("[1]", "not a JSON object"),
        ("{\"key\":\"a\"}", "\"value\""),
        ("{\"key\":1,\"value\":\"\"}", "must be a string"),
        ("{\"key_hex\":\"0\",\"value\":\"\"}", "not hexadecimal"),
    ] {
        let input = format!("{{\"key\":\"good\",\"value\":\"1\"}}\n\n{bad}\n");
        let ran = p.run_with_input(["import", "--db", "d", "-"], input.as_bytes());
        assert_eq!(ran.code, Some(3), "{bad}: {ran:?}");
        assert!(ran.err.contains("line 3") && ran.err.contains(why), "{bad}: {ran:?}");
        assert_eq!(p.ok("count --db d"), "1\n");
    }
}

#[test]
fn export_skips_unsafe_path_keys() {
    let p = CliFixture::new();
    for key in ["fine", "../escape", "/absolute", "a//b", "dir", "dir/file"] {
        p.ok(&format!("put --create --db d {key} x"));
    }
    let ran = p.run("export --db d out --json");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let json: serde_json::Value = serde_json::from_slice(&ran.out).unwrap();
    // "dir" cannot be both a file and a directory; the first key is exported.
    assert_eq!((json["entries"].as_u64(), json["left_out"].as_array().map(Vec::len)), (Some(2), Some(4)), "{json}");
    assert!(!p.path("escape").exists());
    assert_eq!(contents(&p.path("out")).len(), 2);
}

#[test]
fn import_skips_and_reports_unreadable_input() {
    let p = CliFixture::new();
    make_files(&p.path("in"));
    std::os::unix::fs::symlink("nowhere", p.path("in/link")).unwrap();
    assert_eq!(p.json("import --db d in")["left_out"], serde_json::json!([]), "links are not files");
    assert_eq!(p.run("import --db d nowhere").code, Some(3));
    let long = format!("{{\"key\":\"{}\",\"value\":\"\"}}\n{{\"key\":\"short\",\"value\":\"\"}}\n", "k".repeat(70_000));
    let ran = p.run_with_input(["import", "--db", "e", "-", "--json"], long.as_bytes());
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let json: serde_json::Value = serde_json::from_slice(&ran.out).unwrap();
    assert_eq!((json["entries"].as_u64(), &json["left_out"][0]["name"]), (Some(1), &"line 1".into()), "{json}");
}

#[test]
fn import_skips_the_database_directory() {
    let p = CliFixture::new();
    std::fs::create_dir(p.path("in")).unwrap();
    std::fs::write(p.path("in/file"), "x").unwrap();
    for _ in 0..2 {
        assert_eq!(p.json("import --db in/db in")["entries"], 1);
    }
}

/// The partition was created before the input was parsed.
#[test]
fn failed_import_leaves_no_partition() {
    let p = CliFixture::new();
    let long = format!("{{\"key\":\"{}\",\"value\":\"\"}}\n", "k".repeat(70_000));
    for (input, code) in [("nonsense\n", 3), (&*long, 1), ("{}", 3)] {
        assert_eq!(p.run_with_input(["import", "--db", "none", "-"], b"nonsense").code, Some(3));
        assert!(!p.path("none").exists());
        p.ok("put --create --db d --partition old k v");
        let ran = p.run_with_input(["import", "--db", "d", "--partition", "new", "-"], input.as_bytes());
        assert_eq!(ran.code, Some(code), "{ran:?}");
        let ran = p.run_args(["put", "--create", "--db", "d", "--partition", "new", &"k".repeat(70_000), "v"]);
        assert_eq!(ran.code, Some(3), "{ran:?}");
        assert_eq!(p.ok("partitions --db d list"), "old\n", "{input:.20}");
    }
    assert_eq!(p.run_with_input(["import", "--db", "d", "--partition", "new", "-"], b"").code, Some(0));
    assert_eq!(p.ok("partitions --db d list"), "new\nold\n", "empty input is valid");
}

/// After a damaged table or a full disk, a truncated file remained, which looked complete.
#[test]
fn failed_export_leaves_no_file() {
    let p = CliFixture::new();
    let line = |n: u32| format!("{{\"key\":\"{n:06}\",\"value\":\"{}\"}}\n", "v".repeat(200));
    let lines: String = (0..20_000).map(line).collect();
    assert_eq!(p.run_with_input(["import", "--db", "d", "-"], lines.as_bytes()).code, Some(0));
    p.ok("compact --db d");
    let tables = || std::fs::read_dir(p.path("d")).unwrap().map(|entry| entry.unwrap().path());
    let table = tables().find(|path| path.extension().is_some_and(|e| e == "sst")).unwrap();
    let mut bytes = std::fs::read(&table).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&table, bytes).unwrap();
    assert_eq!(p.run("export --db d all.jsonl").code, Some(5));
    assert!(!p.path("all.jsonl").exists());
    std::fs::write(p.path("mine.jsonl"), "mine").unwrap();
    assert_eq!(p.run("export --db d mine.jsonl").code, Some(3));
    assert_eq!(std::fs::read(p.path("mine.jsonl")).unwrap(), b"mine");
}

/// A killed export left a file of its final name that was cut off behind a whole row, and `import` took it.
#[cfg(unix)]
#[test]
fn interrupted_export_leaves_no_file() {
    use nix::sys::signal::{Signal, kill};
    let p = CliFixture::new();
    let line = |n: u32| format!("{{\"key\":\"k{n:06}\",\"value\":\"{}\"}}\n", "v".repeat(1000));
    let lines: String = (0..20_000).map(line).collect();
    assert_eq!(p.run_with_input(["import", "--db", "d", "-"], lines.as_bytes()).code, Some(0));
    std::fs::create_dir(p.path("to")).unwrap();
    let names = || std::fs::read_dir(p.path("to")).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    for (signal, target) in [
        (Signal::SIGTERM, "to/x.jsonl"),
        (Signal::SIGKILL, "to/x.csv"),
        (Signal::SIGTERM, "to/x.azk"),
        (Signal::SIGTERM, "to/x"),
    ] {
        let mut child = p.command(["export", "--db", "d", target]).stdout(std::process::Stdio::null()).spawn().unwrap();
        while names().is_empty() && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        let _ = kill(nix::unistd::Pid::from_raw(child.id() as i32), signal);
        let ended = child.wait().unwrap();
        if ended.success() {
            // The signal was late.
            p.ok(&format!("import --db {target}-new {target}"));
            assert_eq!(p.ok(&format!("count --db {target}-new")), "20000\n");
        } else if signal == Signal::SIGTERM {
            assert_eq!(ended.code(), Some(130), "{target}");
            let left = names();
            assert!(
                left.is_empty() || left == ["x"] && p.path(target).read_dir().unwrap().next().is_none(),
                "{left:?}"
            );
        } else {
            assert!(!p.path(target).exists());
        }
        std::fs::remove_dir_all(p.path("to")).unwrap();
        std::fs::create_dir(p.path("to")).unwrap();
    }
}

#[cfg(unix)]
#[test]
fn exported_file_has_ordinary_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let p = CliFixture::new();
    p.ok("put --create --db d key value");
    p.ok("export --db d x.csv");
    std::fs::write(p.path("ordinary"), "").unwrap();
    let mode = |name: &str| p.path(name).metadata().unwrap().permissions().mode();
    assert_eq!(mode("x.csv"), mode("ordinary"));
    let again = p.run("export --db d x.csv");
    assert!(again.code == Some(3) && again.err.contains("exists"), "{again:?}");
}

/// A batch needs more space in a pool than its entries one by one, so the export of a full pool could not be imported,
/// and `repair` ended at it.
#[test]
fn full_pool_can_be_imported_and_repaired() {
    let p = CliFixture::new();
    p.ok("partitions create --db d cache --engine pmem --pool-max-size 1MiB");
    p.ok("put --create --db d --partition users alice 1");
    let db = azekura::Config::new(p.path("d")).open().unwrap();
    let cache = db.partition("cache").unwrap();
    let put = |n: u32| cache.insert(format!("key{:08}", n * 7919 % 200_000), format!("value{n:020}"));
    let stored = (0..200_000).take_while(|n| put(*n).is_ok()).count();
    drop(cache);
    db.close().unwrap();
    p.ok("export --db d x.azk");
    p.ok("import --db new x.azk");
    p.ok("repair d --out out");
    for db in ["new", "out"] {
        assert_eq!(p.ok(&format!("count --db {db} --partition cache")), format!("{stored}\n"));
        assert_eq!(p.ok(&format!("count --db {db} --partition users")), "1\n");
    }
}

/// The entries that a pool has no space for are reported, and the partitions behind it are stored.
#[test]
fn entries_beyond_a_pool_are_skipped() {
    let p = CliFixture::new();
    p.ok("partitions create --db d cache --engine pmem --pool-max-size 1MiB");
    let lines: String =
        (0..3).map(|n| format!("{{\"key\":\"{n}\",\"value\":\"{}\"}}\n", "v".repeat(600_000))).collect();
    let ran = p.run_with_input(["import", "--db", "d", "--partition", "cache", "-"], lines.as_bytes());
    assert!(ran.code == Some(1) && ran.err.contains("skipped 1: "), "{ran:?}");
    assert_eq!(ran.text(), "1 entry, 585.9 KiB stored\n");
}

/// The budget was that of new databases, so an entry of more than 256 MiB was exported and skipped by the import.
#[test]
fn large_entries_are_stored_with_enough_memory() {
    let p = CliFixture::new();
    let value = vec![b'v'; 270_000_000];
    std::fs::write(p.path("value"), &value).unwrap();
    p.ok("put --create --db d large --file value");
    p.ok("export --db d x.azk");
    for line in ["import --db new x.azk", "repair d --out out"] {
        p.ok(line);
    }
    for db in ["new", "out"] {
        assert_eq!(p.ok(&format!("scan --db {db} --sizes")), "large\t270000000\n");
    }
}

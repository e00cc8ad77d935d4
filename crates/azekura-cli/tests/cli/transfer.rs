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

/// The import created the partition before it parsed the input.
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

/// An export of a database without partitions was refused.
#[test]
fn database_without_partitions_is_transferred() {
    let p = CliFixture::new();
    p.ok("put --create --db d k v");
    p.ok("partitions --db d drop default --yes");
    assert_eq!(p.json("export --db d all.azk")["entries"], 0);
    assert_eq!(p.json("import --db checked --dry-run all.azk")["entries"], 0);
    assert!(!p.path("checked").exists());
    assert_eq!(p.json("import --db copy all.azk")["entries"], 0);
    assert_eq!(p.ok("partitions --db copy list"), p.ok("partitions --db d list"));
    let input = std::fs::read(p.path("all.azk")).unwrap();
    assert_eq!(p.run_with_input(["import", "--db", "piped", "-"], &input).code, Some(0));
    assert_eq!(p.ok("partitions --db piped list"), p.ok("partitions --db d list"));
    assert_eq!(p.run("import --db other --partition x all.azk").code, Some(3), "the file has no such partition");
    assert!(!p.path("other").exists());
}

/// After an error of a damaged table or a full disk, the export had written a truncated file that looked complete.
#[test]
fn failed_export_leaves_no_file() {
    let p = CliFixture::new();
    let line = |n: u32| format!("{{\"key\":\"{n:06}\",\"value\":\"{}\"}}\n", "v".repeat(200));
    let lines: String = (0..20_000).map(line).collect();
    assert_eq!(p.run_with_input(["import", "--db", "d", "-"], lines.as_bytes()).code, Some(0));
    p.ok("compact --db d");
    let table = p.files("d", "sst").pop().unwrap();
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

/// A killed export had written a file with its final name, cut off after a whole row. `import` accepted it.
#[cfg(unix)]
#[test]
fn killed_export_leaves_no_complete_name() {
    let p = CliFixture::new();
    let line = |n: u32| format!("{{\"key\":\"k{n:06}\",\"value\":\"{}\"}}\n", "v".repeat(1000));
    let lines: String = (0..2_000).map(line).collect();
    assert_eq!(p.run_with_input(["import", "--db", "d", "-"], lines.as_bytes()).code, Some(0));
    std::fs::write(p.path("large"), vec![b'v'; 1 << 20]).unwrap();
    p.ok("put --db d large --file large");
    for name in ["x.jsonl", "x.csv", "x.azk", "x"] {
        std::fs::create_dir(p.path("to")).unwrap();
        // A file that exceeds the limit of 512 KiB ends the process with a signal, as SIGKILL does.
        let command = format!("ulimit -c 0; ulimit -f 1024; exec \"$0\" export --db d to/{name}");
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", &command, env!("CARGO_BIN_EXE_azekura")]).current_dir(p.dir.path());
        let ended = shell.stdout(std::process::Stdio::null()).status().unwrap();
        assert_eq!(ended.code(), None, "{name}: {ended:?}");
        // A directory has the temporary one in it.
        let is_left =
            |path: &Path| path.components().any(|part| part.as_os_str().as_bytes().starts_with(b".azekura-export-"));
        let files = contents(&p.path("to"));
        assert!(!files.is_empty() && files.keys().all(|path| is_left(path)), "{name}: {:?}", files.keys());
        let ran = p.run("import --db new to");
        assert!(ran.code == Some(1) && ran.text().starts_with("0 entries"), "{name}: {ran:?}");
        std::fs::remove_dir_all(p.path("to")).unwrap();
    }
}

/// After Ctrl-C there are no files of the export. The test repeats the export if it ended before the signal.
#[cfg(unix)]
#[test]
fn interrupted_export_leaves_no_file() {
    use nix::sys::signal::{Signal, kill};
    let p = CliFixture::new();
    let line = |n: u32| format!("{{\"key\":\"k{n:06}\",\"value\":\"{}\"}}\n", "v".repeat(1000));
    let lines: String = (0..20_000).map(line).collect();
    assert_eq!(p.run_with_input(["import", "--db", "d", "-"], lines.as_bytes()).code, Some(0));
    let names = || std::fs::read_dir(p.path("to")).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    for target in ["to/x.jsonl", "to/x.csv", "to/x.azk", "to/x"] {
        let mut was_interrupted = false;
        for _ in 0..50 {
            std::fs::create_dir(p.path("to")).unwrap();
            let mut command = p.command(["export", "--db", "d", target]);
            let mut child = command.stdout(std::process::Stdio::null()).spawn().unwrap();
            while names().is_empty() && child.try_wait().unwrap().is_none() {
                std::thread::yield_now();
            }
            let _ = kill(nix::unistd::Pid::from_raw(child.id() as i32), Signal::SIGTERM);
            was_interrupted = !child.wait().unwrap().success();
            if was_interrupted {
                let found = names();
                let is_empty = || p.path(target).read_dir().unwrap().next().is_none();
                assert!(found.is_empty() || found == ["x"] && is_empty(), "{target}: {found:?}");
                std::fs::remove_dir_all(p.path("to")).unwrap();
                break;
            }
            std::fs::remove_dir_all(p.path("to")).unwrap();
        }
        assert!(was_interrupted, "{target}: no signal was in time");
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

/// A batch needs more space in a pool than its entries one by one. So the export of a full pool could not be imported,
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

/// The import skipped every entry after the first one that did not fit, as if it were damaged.
#[test]
fn full_pool_ends_an_import() {
    let p = CliFixture::new();
    p.ok("partitions create --db d cache --engine pmem --pool-max-size 1MiB");
    let lines: String =
        (0..3).map(|n| format!("{{\"key\":\"{n}\",\"value\":\"{}\"}}\n", "v".repeat(600_000))).collect();
    let ran = p.run_with_input(["import", "--db", "d", "--partition", "cache", "-"], lines.as_bytes());
    assert_eq!(ran.code, Some(3), "{ran:?}");
    assert!(ran.err.contains("the pool of partition \"cache\" is full"), "{ran:?}");
    assert!(ran.err.contains("1 entry before it was stored") && !ran.err.contains("skipped"), "{ran:?}");
    assert_eq!(p.ok("count --db d --partition cache"), "1\n");
    // Smaller entries than the batch are stored one by one before the error.
    let lines: String =
        (0..900).map(|n| format!("{{\"key\":\"k{n}\",\"value\":\"{}\"}}\n", "v".repeat(1000))).collect();
    let ran = p.run_with_input(["import", "--db", "d", "--partition", "cache", "-"], lines.as_bytes());
    let stored: u32 = p.ok("count --db d --partition cache").trim().parse().unwrap();
    assert!(ran.code == Some(3) && (300..500).contains(&stored), "{stored}: {ran:?}");
    assert!(ran.err.contains(&format!("{} entries before it were stored", stored - 1)), "{stored}: {ran:?}");
}

/// `max_size` may be lower than the size of the records that a pool has. `repair` ended at a partition that did not fit
/// into its pool.
#[test]
fn full_pool_does_not_end_a_repair() {
    let p = CliFixture::new();
    let db = azekura::Config::new(p.path("d")).open().unwrap();
    let pool = |size| {
        let pool = azekura::EngineType::Pmem(azekura::PmemOptions::default().max_size(size));
        azekura::PartitionCreateOptions::default().engine(pool)
    };
    let cache = db.open_partition("cache", pool(8 << 20)).unwrap();
    (0..2000u32).for_each(|n| cache.insert(n.to_be_bytes(), [7; 1000]).unwrap());
    cache.set_options(pool(1 << 20)).unwrap();
    drop(cache);
    db.close().unwrap();
    p.ok("put --create --db d --partition users alice 1");
    let ran = p.run("repair d --out out --json");
    assert_eq!(ran.code, Some(1), "{ran:?}");
    let report: serde_json::Value = serde_json::from_slice(&ran.out).unwrap();
    let cache = &report["partitions"][0];
    assert!(cache["unstored"].as_str().is_some_and(|why| why.contains("is full")), "{report}");
    assert_eq!(p.ok("count --db out --partition cache"), format!("{}\n", cache["entries"]));
    assert_eq!(p.ok("count --db out --partition users"), "1\n");
}

/// The import stored the names of all skipped entries in memory.
#[test]
fn skipped_entries_are_named_up_to_a_limit() {
    let p = CliFixture::new();
    let lines: String = (0..1500).map(|n| format!("{{\"key\":\"../{n}\",\"value\":\"\"}}\n")).collect();
    assert_eq!(p.run_with_input(["import", "--db", "d", "-"], lines.as_bytes()).code, Some(0));
    let ran = p.run("export --db d out --json");
    let report: serde_json::Value = serde_json::from_slice(&ran.out).unwrap();
    let named = report["left_out"].as_array().unwrap().len();
    assert_eq!((ran.code, named, report["left_out_more"].as_u64()), (Some(1), 1000, Some(500)), "{named}");
    let ran = p.run("export --db d other --all-errors");
    assert!(ran.err.contains("skipped 500 more"), "{ran:?}");
}

/// Files of a killed export became entries of a later import of the directory.
#[test]
fn import_skips_files_of_a_killed_export() {
    let p = CliFixture::new();
    std::fs::create_dir_all(p.path("in/.azekura-export-Ab12Cd.tmp")).unwrap();
    for name in ["in/.azekura-export-Ab12Cd.tmp/key", "in/.azekura-export-Xy34Zw.tmp", "in/a", "in/.azekura-export-b"] {
        std::fs::write(p.path(name), "value").unwrap();
    }
    let ran = p.run("import --db d in");
    assert_eq!((ran.code, ran.text().as_str()), (Some(1), "2 entries, 28 B stored\n"), "{ran:?}");
    assert!(ran.err.contains("Ab12Cd.tmp: an interrupted export has left it") && ran.err.contains("Xy34Zw"), "{ran:?}");
    assert_eq!(p.ok("scan --db d --keys-only"), ".azekura-export-b\na\n");
}

/// Native exports and `repair` lost expiry times.
#[test]
fn expiry_times_are_imported() {
    let p = CliFixture::new();
    let hour = std::time::Duration::from_secs(3600);
    let expiry = |db: &str, name: &str| -> Vec<Option<u64>> {
        let db = azekura::Config::new(p.path(db)).open_read_only().unwrap();
        db.partition(name).unwrap().entries().map(|entry| entry.unwrap().expiry_ms()).collect()
    };
    let db = azekura::Config::new(p.path("d")).open().unwrap();
    let pool = azekura::EngineType::Pmem(azekura::PmemOptions::default());
    let separated = azekura::PartitionCreateOptions::default().with_kv_separation(Default::default());
    let names = ["default", "memory", "separated"];
    for (name, options) in
        names.into_iter().zip([Default::default(), azekura::PartitionCreateOptions::default().engine(pool), separated])
    {
        let partition = db.open_partition(name, options.default_ttl(2 * hour)).unwrap();
        let mut batch = db.batch();
        for n in 0..100u8 {
            let value = vec![n; if n % 10 == 0 { 5000 } else { 10 }];
            match n % 3 {
                0 => batch.insert_with_ttl(&partition, [n], value, hour),
                1 => batch.insert_with_expiry(&partition, [n], value, None),
                _ => batch.insert(&partition, [n], value),
            }
        }
        batch.commit().unwrap();
    }
    db.close().unwrap();
    p.ok("export --db d x.azk");
    p.ok("import --db imported x.azk");
    p.ok("repair d --out repaired");
    for name in names {
        let original = expiry("d", name);
        assert_eq!(original.iter().filter(|expiry| expiry.is_none()).count(), 33, "{name}");
        for db in ["imported", "repaired"] {
            assert_eq!(expiry(db, name), original, "{db} {name}");
        }
    }
    // A file of version 1 has no expiry times.
    p.ok("put --create --db plain key value");
    p.ok("export --db plain y.azk");
    let mut bytes = std::fs::read(p.path("y.azk")).unwrap();
    assert_eq!(bytes[8], 2);
    bytes[8] = 1;
    std::fs::write(p.path("y.azk"), bytes).unwrap();
    p.ok("import --db old y.azk");
    assert_eq!(p.ok("scan --db old"), "key\tvalue\n");
}

/// One entry of a native file had the time 2^64 - 1. The import failed for all entries of its batch.
#[test]
fn expiry_beyond_the_highest_skips_one_entry() {
    let p = CliFixture::new();
    let hour = std::time::Duration::from_secs(3600);
    let db = azekura::Config::new(p.path("d")).open().unwrap();
    let options = azekura::PartitionCreateOptions::default().default_ttl(hour);
    let partition = db.open_partition("default", options).unwrap();
    ["a", "b", "c"].iter().for_each(|key| partition.insert(key, "value").unwrap());
    drop(partition);
    db.close().unwrap();
    p.ok("export --db d x.azk");
    let mut bytes = std::fs::read(p.path("x.azk")).unwrap();
    let length = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let mut frame = 12;
    while bytes[frame] != b'X' {
        frame += 9 + length(&bytes, frame + 1) + 8;
    }
    let end = frame + 9 + length(&bytes, frame + 1);
    bytes[frame + 9 + 8..][..8].fill(255);
    let checksum = xxhash_rust::xxh3::xxh3_64(&bytes[frame..end]);
    bytes[end..end + 8].copy_from_slice(&checksum.to_le_bytes());
    std::fs::write(p.path("x.azk"), bytes).unwrap();
    for line in ["import --db new x.azk", "import --db new x.azk --dry-run"] {
        let ran = p.run(line);
        assert_eq!(ran.code, Some(1), "{line}: {ran:?}");
        assert!(ran.err.contains("a: it would expire 2^64 ms or more after 1970"), "{line}: {ran:?}");
    }
    assert_eq!(p.ok("scan --db new --keys-only"), "b\nc\n");
}

/// The import used the memory budget of new databases. So an entry of more than 256 MiB was exported, and the import
/// skipped it.
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

//! Entries of the sources, and what every importer must do.

use std::collections::BTreeMap;
use std::path::Path;

use azekura::Config;
use serde_json::Value;

use crate::fixture::CliFixture;

pub(crate) type Entries = BTreeMap<Vec<u8>, Vec<u8>>;

/// The entries `first..last` of `golden/make_golden.c`.
pub(crate) fn numbered(first: u32, last: u32) -> Entries {
    let entry = |n: u32| {
        let value = if n % 11 == 5 { "new".into() } else { format!("value {n} ").repeat(n as usize % 50 + 1) };
        (format!("key{n:05}").into_bytes(), value.into_bytes())
    };
    (first..last).filter(|n| n % 7 != 3 || n % 11 == 5).map(entry).collect()
}

/// The entries with unusual bytes of `golden/make_golden.c`.
#[cfg(any(feature = "import-leveldb", feature = "import-rocksdb"))]
pub(crate) fn special() -> Entries {
    let all: Vec<u8> = (0..=255).collect();
    let entries: [(&[u8], &[u8]); 3] = [(b"", b"empty key"), (b"\x00\xff", &all), (b"zz empty value", b"")];
    entries.map(|(key, value)| (key.to_vec(), value.to_vec())).into()
}

/// The entries of a partition.
pub(crate) fn stored(p: &CliFixture, db: &str, partition: &str) -> Entries {
    let db = Config::new(p.path(db)).open_read_only().unwrap();
    let partition = db.partition(partition).unwrap();
    partition.iter().map(Result::unwrap).map(|(key, value)| (key.to_vec(), value.to_vec())).collect()
}

/// All files below `path` with their contents, without the lock file of LMDB, which lists readers.
pub(crate) fn files(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let is_data = |e: &walkdir::DirEntry| e.file_type().is_file() && e.file_name() != "lock.mdb";
    let entries = walkdir::WalkDir::new(path).into_iter().map(Result::unwrap).filter(is_data);
    entries.map(|e| (e.path().display().to_string(), std::fs::read(e.path()).unwrap())).collect()
}

/// Imports all tables of `source` to the new database `db`, and compares all entries. The source does not change.
pub(crate) fn assert_imported(p: &CliFixture, engine: &str, source: &str, db: &str, expected: &[(&str, Entries)]) {
    let before = files(&p.path(source));
    let count: usize = expected.iter().map(|(_, entries)| entries.len()).sum();
    let checked = p.json(&format!("import --db {db} --from {engine} --dry-run {source}"));
    assert_eq!(checked["entries"], count, "{engine}: {checked}");
    assert!(!p.path(db).exists(), "{engine}: a dry run opens no database");
    let report = p.json(&format!("import --db {db} --from {engine} {source}"));
    assert_eq!(report, checked, "{engine}");
    let names: String = expected.iter().map(|(name, _)| format!("{name}\n")).collect();
    assert_eq!(p.ok(&format!("partitions --db {db} list")), names, "{engine}");
    for (name, entries) in expected {
        assert!(stored(p, db, name) == *entries, "{engine}: partition {name} differs");
    }
    assert!(files(&p.path(source)) == before, "{engine}: the source changed");
    p.assert_cleaned_up();
}

/// Runs an import that must fail with `code`, and returns its error object. The target keeps its only partition "old".
pub(crate) fn assert_refused(p: &CliFixture, line: &str, code: i32) -> Value {
    p.ok("put --create --db target --partition old k v");
    let mut error = Value::Null;
    for flag in ["--dry-run", ""] {
        let ran = p.run(&format!("import --db target --json {flag} {line}"));
        assert_eq!(ran.code, Some(code), "{line}: {ran:?}");
        error = ran.error();
        let message = error["message"].as_str().unwrap();
        assert!(message.ends_with("; nothing was stored"), "{line}: {message}");
        assert!(!message.trim_end_matches("; nothing was stored").contains("nothing was stored"), "{message}");
    }
    assert_eq!(p.ok("partitions --db target list"), "old\n", "{line}");
    p.assert_cleaned_up();
    error
}

/// Checks that a missing source, and a foreign one, are refused.
pub(crate) fn assert_foreign_sources_refused(p: &CliFixture, engine: &str) {
    std::fs::create_dir_all(p.path("foreign")).unwrap();
    std::fs::write(p.path("foreign/notes.txt"), "no database").unwrap();
    for source in ["missing", "foreign", "foreign/notes.txt"] {
        let error = assert_refused(p, &format!("--from {engine} {source}"), 3);
        assert!(error["file"].as_str().unwrap().ends_with(source), "{engine} {source}: {error}");
    }
    assert_eq!(files(&p.path("foreign")).len(), 1, "{engine}: nothing was created");
}

/// Imports the source once for each of `count` places in each of its files, with a byte changed there. Returns the
/// number of imports that were refused.
///
/// `check` gets the entries of each import that succeeded.
pub(crate) fn count_refused_damage(
    p: &CliFixture,
    engine: &str,
    source: &str,
    count: usize,
    check: impl Fn(&CliFixture, &str),
) -> usize {
    p.ok("put --create --db target --partition old k v");
    let mut refused = 0;
    for (file, content) in files(&p.path(source)).into_iter().filter(|(_, content)| !content.is_empty()) {
        for i in 0..count {
            let place = (content.len() - 1) * i / (count - 1).max(1);
            let mut damaged = content.clone();
            damaged[place] ^= 0x41;
            std::fs::write(&file, damaged).unwrap();
            let ran = p.run(&format!("import --db target --from {engine} {source}"));
            match ran.code {
                Some(0) => check(p, &format!("{file} at {place}")),
                Some(3) => {
                    assert!(ran.err.contains("nothing was stored"), "{file} at {place}: {ran:?}");
                    assert_eq!(p.ok("partitions --db target list"), "old\n", "{file} at {place}");
                    refused += 1;
                }
                _ => panic!("{file} at {place}: {ran:?}"),
            }
            std::fs::remove_dir_all(p.path("target")).unwrap();
            p.ok("put --create --db target --partition old k v");
        }
        std::fs::write(&file, content).unwrap();
    }
    p.assert_cleaned_up();
    refused
}

/// Copies a database below `golden` to `name`.
#[cfg(any(feature = "import-leveldb", feature = "import-rocksdb"))]
pub(crate) fn copy_golden(p: &CliFixture, golden: &str, name: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli/peers/golden").join(golden);
    std::fs::create_dir_all(p.path(name)).unwrap();
    for (path, content) in files(&root) {
        std::fs::write(p.path(name).join(Path::new(&path).file_name().unwrap()), content).unwrap();
    }
}

/// Whether the library of `engine` is installed. If AZEKURA_REQUIRE_LIBRARIES is set, it must be.
#[cfg(any(feature = "import-leveldb", feature = "import-rocksdb"))]
pub(crate) fn has_library(p: &CliFixture, engine: &str, source: &str) -> bool {
    let ran = p.run(&format!("import --db none --dry-run --json --from {engine} {source}"));
    let missing = ran.code != Some(0) && ran.error()["kind"] == "unsupported";
    assert!(!missing || std::env::var_os("AZEKURA_REQUIRE_LIBRARIES").is_none(), "{ran:?}");
    if missing {
        eprintln!("skipped: the library of {engine} is not installed");
    }
    !missing
}

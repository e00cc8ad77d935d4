//! Databases of LevelDB's C++ library: see `golden/make_golden.c`.

use super::source::{
    Entries, assert_foreign_sources_refused, assert_imported, assert_refused, copy_golden, count_refused_damage,
    has_library, numbered, special, stored,
};
use crate::fixture::CliFixture;

fn entries() -> Entries {
    numbered(0, 300).into_iter().chain(special()).collect()
}

#[test]
fn entries_of_tables_and_log_are_imported() {
    let p = CliFixture::new();
    copy_golden(&p, "leveldb/entries", "s");
    if has_library(&p, "leveldb", "s") {
        assert_imported(&p, "leveldb", "s", "d", &[("default", entries())]);
        p.ok("import --db e --from leveldb s --partition chain");
        assert!(stored(&p, "e", "chain") == entries());
    }
}

#[test]
fn missing_library_names_the_package() {
    let p = CliFixture::new();
    copy_golden(&p, "leveldb/entries", "s");
    std::fs::write(p.path("lib.so"), "no library").unwrap();
    let mut command = p.command(["import", "--db", "d", "--from", "leveldb", "s"]);
    let output = command.env("AZEKURA_LEVELDB_LIBRARY", p.path("lib.so")).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{message}");
    assert!(message.contains("libleveldb1d") && message.contains("AZEKURA_LEVELDB_LIBRARY"), "{message}");
    assert!(!p.path("d").exists());
}

#[test]
fn empty_foreign_and_locked_sources() {
    let p = CliFixture::new();
    copy_golden(&p, "leveldb/empty", "s");
    if has_library(&p, "leveldb", "s") {
        assert_imported(&p, "leveldb", "s", "d", &[("default", Entries::new())]);
        assert_foreign_sources_refused(&p, "leveldb");
        let lock = std::fs::File::create(p.path("s/LOCK")).unwrap();
        rustix::fs::fcntl_lock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
        assert_refused(&p, "--from leveldb s", 4);
    }
}

/// LevelDB ignores an incomplete record at the end of the log. If a byte of the log is changed, the import refuses it
/// or treats it as such a record.
#[test]
fn damage_is_refused_and_changes_nothing() {
    let p = CliFixture::new();
    copy_golden(&p, "leveldb/entries", "s");
    if has_library(&p, "leveldb", "s") {
        let all = |p: &CliFixture, place: &str| {
            assert!(place.contains(".log") || stored(p, "target", "default") == entries(), "{place}");
        };
        let refused = count_refused_damage(&p, "leveldb", "s", 10, all);
        assert!(refused >= 20, "{refused}");
        std::fs::remove_file(p.path("s/000005.ldb")).unwrap();
        assert_refused(&p, "--from leveldb s", 3);
    }
}

#[test]
fn long_key_is_named_and_changes_nothing() {
    let p = CliFixture::new();
    copy_golden(&p, "leveldb/long_key", "s");
    if has_library(&p, "leveldb", "s") {
        let error = assert_refused(&p, "--from leveldb s", 3);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("table \"default\", key kkkk") && message.contains("70000 bytes"), "{message}");
    }
}

//! Databases of RocksDB's C++ library: see `golden/make_golden.c`.

use super::source::{
    Entries, assert_foreign_sources_refused, assert_imported, assert_refused, copy_golden, count_refused_damage,
    has_library, numbered, special, stored,
};
use crate::fixture::CliFixture;

fn families() -> [(&'static str, Entries); 3] {
    let default = numbered(0, 100).into_iter().chain(special()).collect();
    [("default", default), ("pages", numbered(100, 200)), ("users", numbered(200, 300))]
}

#[test]
fn column_families_are_imported() {
    let p = CliFixture::new();
    copy_golden(&p, "rocksdb/families", "s");
    if has_library(&p, "rocksdb", "s") {
        assert_imported(&p, "rocksdb", "s", "d", &families());
        p.ok("import --db e --from rocksdb s --table users --partition people");
        assert!(stored(&p, "e", "people") == numbered(200, 300));
    }
}

#[test]
fn missing_library_names_the_package() {
    let p = CliFixture::new();
    copy_golden(&p, "rocksdb/families", "s");
    let mut command = p.command(["import", "--db", "d", "--from", "rocksdb", "s"]);
    let output = command.env("AZEKURA_ROCKSDB_LIBRARY", p.path("none.so")).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{message}");
    assert!(message.contains("librocksdb7.8") && message.contains("AZEKURA_ROCKSDB_LIBRARY"), "{message}");
    assert!(!p.path("d").exists());
}

#[test]
fn empty_foreign_and_locked_sources() {
    let p = CliFixture::new();
    copy_golden(&p, "rocksdb/empty", "s");
    if has_library(&p, "rocksdb", "s") {
        assert_imported(&p, "rocksdb", "s", "d", &[("default", Entries::new())]);
        assert_foreign_sources_refused(&p, "rocksdb");
        let lock = std::fs::File::create(p.path("s/LOCK")).unwrap();
        rustix::fs::fcntl_lock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
        assert_refused(&p, "--from rocksdb s", 4);
    }
}

/// An incomplete record at the end of the log is ignored.
#[test]
fn damage_is_refused_and_changes_nothing() {
    let p = CliFixture::new();
    copy_golden(&p, "rocksdb/families", "s");
    if has_library(&p, "rocksdb", "s") {
        let all = |p: &CliFixture, place: &str| {
            for (name, entries) in families() {
                assert!(place.contains(".log") || stored(p, "target", name) == entries, "{place}: {name}");
            }
        };
        let refused = count_refused_damage(&p, "rocksdb", "s", 8, all);
        assert!(refused >= 20, "{refused}");
        std::fs::remove_file(p.path("s/000013.sst")).unwrap();
        assert_refused(&p, "--from rocksdb s", 3);
    }
}

#[test]
fn long_key_is_named_and_changes_nothing() {
    let p = CliFixture::new();
    copy_golden(&p, "rocksdb/long_key", "s");
    if has_library(&p, "rocksdb", "s") {
        let error = assert_refused(&p, "--from rocksdb s", 3);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("table \"default\", key kkkk") && message.contains("70000 bytes"), "{message}");
    }
}

/// The log of a database with the option `wal_dir` is in another directory. The import ignored it without a message.
#[test]
fn log_in_another_directory_is_refused() {
    let p = CliFixture::new();
    copy_golden(&p, "rocksdb/families", "s");
    let options = format!("[DBOptions]\n  wal_dir={}\n", p.path("logs").display());
    std::fs::write(p.path("s/OPTIONS-000017"), &options).unwrap();
    std::fs::write(p.path("s/OPTIONS-000009"), "[DBOptions]\n  wal_dir=\n").unwrap();
    if has_library(&p, "rocksdb", "s") {
        p.ok("import --db d --from rocksdb s");
    }
    std::fs::create_dir(p.path("logs")).unwrap();
    std::fs::rename(p.path("s/000012.log"), p.path("logs/000012.log")).unwrap();
    let error = assert_refused(&p, "--from rocksdb s", 3);
    assert!(error["message"].as_str().unwrap().contains("wal_dir"), "{error}");
}

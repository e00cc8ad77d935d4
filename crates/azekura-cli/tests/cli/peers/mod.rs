//! `import --from`: databases that the other engines wrote. The tests of an engine are behind the feature
//! of its importer.

#[cfg(feature = "import-fjall")]
mod fjall;
#[cfg(feature = "import-leveldb")]
mod leveldb;
#[cfg(feature = "import-lmdb")]
mod lmdb;
#[cfg(feature = "import-redb")]
mod redb;
#[cfg(feature = "import-rocksdb")]
mod rocksdb;
#[cfg(feature = "import-sled")]
mod sled;
#[cfg(feature = "_peer")]
mod source;

use super::fixture::CliFixture;

#[cfg(not(feature = "import-redb"))]
#[test]
fn missing_importer_names_its_feature() {
    let p = CliFixture::new();
    std::fs::write(p.path("old.redb"), "").unwrap();
    let ran = p.run("import --db d --from redb old.redb");
    assert_eq!(ran.code, Some(3), "{ran:?}");
    assert!(ran.err.contains("cargo install azekura-cli --features import-redb"), "{ran:?}");
    assert!(!p.path("d").exists());
    assert_eq!(p.run("import --db d --from redb old.redb --json").error()["kind"], "unsupported");
}

#[test]
fn options_of_files_are_refused_with_from() {
    let p = CliFixture::new();
    for line in [
        "import --db d --table t in.csv",
        "import --db d --from redb in.redb --format csv",
        "import --db d --from redb in.redb --key-encoding hex",
        "import --db d --from redb in.redb --ignore-options",
        "import --db d --from berkeley in.db",
    ] {
        assert_eq!(p.run(line).code, Some(2), "{line}");
    }
    assert!(!p.path("d").exists());
}

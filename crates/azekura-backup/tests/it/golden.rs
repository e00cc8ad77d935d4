//! Objects of this version are read by every later one. `UPDATE=1` writes those of a new version.

use crate::support::{Place, content_at, create, filled, restore, sync};
use azekura_backup::testing::{FuzzDecoder, decode};
use azekura_backup::{CreateOptions, RestoreOptions, VerifyOptions, WatchStep};
use std::path::PathBuf;

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata/golden/v1")
}

#[test]
fn golden_store_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    if std::env::var_os("UPDATE").is_some() {
        write_golden(dir.path());
    }
    let place = Place::new();
    for folder in ["", "backups", "files", "holds", "log", "parts"] {
        for entry in golden().join(folder).read_dir().unwrap().map(|entry| entry.unwrap()) {
            if entry.file_type().unwrap().is_file() {
                let name = format!("{folder}/{}", entry.file_name().to_str().unwrap());
                place.put(name.trim_start_matches('/'), std::fs::read(entry.path()).unwrap());
            }
        }
    }
    let store = place.open();
    assert!(store.verify(&VerifyOptions::default(), &mut |_| true).unwrap().problems.is_empty());
    let report = restore(&store, &dir.path().join("copy"), RestoreOptions::default()).unwrap();
    assert_eq!(report.applied_commits, 2);
    let content = content_at(&dir.path().join("copy"));
    assert_eq!(
        content["plain"],
        [(b"apple".to_vec(), b"red".to_vec(), None), (b"pear".to_vec(), b"x,y".to_vec(), None)]
    );
    assert_eq!(content["blobs"][0].1, vec![7; 5000]);
    assert_eq!(content["pool"], [(b"plum".to_vec(), b"blue".to_vec(), None)]);
}

/// Writes a backup and a log object.
fn write_golden(dir: &std::path::Path) {
    let db = crate::support::open(&dir.join("db"));
    let part = |name| db.partition(name).unwrap();
    part("plain").insert("apple", "red").unwrap();
    part("blobs").insert("large", vec![7; 5000]).unwrap();
    part("pool").insert("plum", "blue").unwrap();
    part("plain").flush().unwrap();
    part("blobs").flush().unwrap();
    drop(std::fs::remove_dir_all(golden()));
    let store = azekura_backup::BackupStore::open(golden().to_str().unwrap(), []).unwrap();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    watcher.step(&mut |_| true).unwrap();
    let mut batch = db.batch();
    batch.insert(&part("plain"), "zoo", "1");
    batch.merge(&part("plain"), "pear", "x");
    batch.insert_with_expiry(&part("plain"), "late", "1", Some(4_000_000_000_000));
    batch.commit().unwrap();
    let mut batch = db.batch();
    batch.remove(&part("plain"), "late");
    batch.remove_range(&part("plain"), "z"..);
    batch.merge(&part("plain"), "pear", "y");
    batch.commit().unwrap();
    sync(&db);
    assert!(matches!(watcher.step(&mut |_| true).unwrap(), WatchStep::Shipped { commits: 2, .. }));
}

#[test]
fn decoders_read_what_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 61));
    create(&place.open(), &db).unwrap();
    for (name, decoder) in [("azekura-backup.json", FuzzDecoder::Store), ("backups/", FuzzDecoder::Backup)] {
        let name = place.lens().into_keys().find(|of| of.starts_with(name)).unwrap();
        decode(decoder, &place.bytes(&name)).unwrap();
    }
}

//! Defects that a review found.

use crate::logs::{copy_directory, flip_byte_of, open_with_clock, reason, restored, step};
use crate::support::{FaultStore, Place, content, content_at, create, edit_manifest, filled, open, restore, sync};
use azekura::{Config, Database, EngineType, PartitionCreateOptions, PmemOptions, RecoveryMode};
use azekura_backup::{CreateOptions, PruneOptions, RestoreOptions, Until, VerifyOptions, WatchStep};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Commits three values, of which [`lossy`] damages one.
fn three_commits(db: &Database, name: &str) {
    for i in 0..3 {
        db.partition("plain").unwrap().insert(format!("lost {name} {i}"), format!("damage {name} {i}")).unwrap();
    }
    sync(db);
}

/// The database after a crash and a recovery that loses the commit with this text and all later ones.
fn lossy(db: Database, path: &Path, text: &str) -> Database {
    copy_directory(db.path(), path);
    db.close().unwrap();
    flip_byte_of(path, text.as_bytes());
    drop(Config::new(path).workers(0).recovery_mode(RecoveryMode::PointInTime).open().unwrap());
    open(path)
}

fn six_commits(db: &Database) {
    for i in 0..6 {
        db.partition("plain").unwrap().insert(format!("new {i}"), "1").unwrap();
    }
    sync(db);
}

fn follower(db: &Database) -> Database {
    Config::new(db.path()).follow_interval(None).open_follower().unwrap()
}

/// The checkpoint of a follower has what the writer has committed, but the table of partitions was an older one.
#[test]
fn backup_of_a_follower_has_new_partitions() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 65));
    let follower = follower(&db);
    db.open_partition("new", PartitionCreateOptions::default()).unwrap().insert("a", "1").unwrap();
    sync(&db);
    let report = create(&place.open(), &follower).unwrap();
    assert_eq!(report.backup.partitions, ["blobs", "new", "plain", "pool"]);
}

/// A position that a follower had not reached yet was taken for one of another history.
#[test]
fn follower_that_is_behind_the_store_catches_up() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 66));
    let (store, plain) = (place.open(), db.partition("plain").unwrap());
    let commit = |key: &str| {
        plain.insert(key, "1").unwrap();
        sync(&db);
    };
    sync(&db);
    let (first, second) = (follower(&db), follower(&db));
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    let mut behind = store.watch(&first, CreateOptions::default()).unwrap();
    commit("a");
    first.catch_up().unwrap();
    commit("b");
    assert!(matches!(step(&mut watcher), WatchStep::Shipped { commits: 2, .. }));
    let sequence = db.change_position().unwrap().sequence_number();
    assert_eq!(step(&mut behind), WatchStep::ShippedByOther { sequence });
    assert_eq!(step(&mut behind), WatchStep::Idle);
    // One that has not read the first commit, too.
    let mut behind = store.watch(&second, CreateOptions::default()).unwrap();
    assert_eq!(step(&mut behind), WatchStep::Idle);
    commit("c");
    create(&store, &db).unwrap();
    create(&store, &second).unwrap();
}

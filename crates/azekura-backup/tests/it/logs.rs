//! The shipped log, and restores to a time.

use crate::support::{Content, Place, commit, content, content_at, create, filled, restore, stride, sync};
use azekura::testing::SeededRng;
use azekura::{ChangePosition, Config, Database, PartitionCreateOptions};
use azekura_backup::{BackupStore, CreateOptions, RestoreOptions, Until, VerifyOptions, WatchStep, Watcher};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

fn step(watcher: &mut Watcher<'_>) -> WatchStep {
    watcher.step(&mut |_| true).unwrap()
}

/// The reason of the backup that a step makes.
fn reason(watcher: &mut Watcher<'_>) -> String {
    match step(watcher) {
        WatchStep::BackedUp { reason, .. } => reason,
        other => panic!("{other:?}"),
    }
}

fn restored(store: &BackupStore, path: &Path, until: Until) -> Content {
    restore(store, path, RestoreOptions::default().until(until)).unwrap();
    content_at(path)
}

fn number(db: &Database) -> u64 {
    db.change_position().unwrap().sequence_number()
}

/// A place whose clock stands until it is set.
fn open_with_clock(place: &Place) -> (BackupStore, Arc<AtomicU64>) {
    let clock = Arc::new(AtomicU64::new(1_000_000));
    let read = Arc::clone(&clock);
    (place.open().clock(move || read.load(Ordering::Relaxed)), clock)
}

#[test]
fn every_shipped_boundary_can_be_restored() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 31));
    let (store, clock) = open_with_clock(&place);
    let mut rng = SeededRng::with_stream(31, 1);
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    // The state behind every commit, and when it was shipped.
    let mut states = vec![(number(&db), clock.load(Ordering::Relaxed), content(&db))];
    for round in 1..=6u64 {
        let first = states.len();
        for _ in 0..5 {
            commit(&db, &mut rng);
            states.push((number(&db), 0, content(&db)));
        }
        if round == 3 {
            db.partition("blobs").unwrap().flush().unwrap();
        }
        sync(&db);
        let time = clock.fetch_add(1000, Ordering::Relaxed) + 1000;
        assert!(matches!(step(&mut watcher), WatchStep::Shipped { commits: 5, .. }));
        assert_eq!(step(&mut watcher), WatchStep::Idle);
        states[first..].iter_mut().for_each(|state| state.1 = time);
        if round == 4 {
            create(&store, &db).unwrap();
        }
    }
    for (i, (sequence, time, expected)) in states.iter().enumerate().step_by(stride()) {
        let to = restored(&store, &dir.path().join(format!("s{i}")), Until::Sequence(*sequence));
        assert_eq!(&to, expected, "commit {sequence}");
        // At the time of a log object its last commit is there, and one millisecond before its first is not.
        let last = states.iter().rfind(|state| state.1 <= *time).unwrap();
        assert_eq!(restored(&store, &dir.path().join(format!("t{i}")), Until::TimeMs(*time)), last.2, "time {time}");
        if let Some(before) = states.iter().rfind(|state| state.1 < *time) {
            assert_eq!(restored(&store, &dir.path().join(format!("b{i}")), Until::TimeMs(time - 1)), before.2);
        }
    }
    let too_early = restore(&store, &dir.path().join("x"), RestoreOptions::default().until(Until::TimeMs(999)));
    assert_eq!(too_early.unwrap_err().kind(), "no_backup");
    assert!(store.verify(&VerifyOptions::default(), &mut |_| true).unwrap().problems.is_empty());
}

#[test]
fn only_durable_commits_are_shipped() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 32));
    let store = place.open();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    db.partition("plain").unwrap().insert("a", "1").unwrap();
    assert_eq!(step(&mut watcher), WatchStep::Idle);
    sync(&db);
    assert!(matches!(step(&mut watcher), WatchStep::Shipped { commits: 1, .. }));
    // Also by the watcher of the next process.
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    db.partition("plain").unwrap().insert("a", "2").unwrap();
    assert_eq!(step(&mut watcher), WatchStep::Idle);
}

#[test]
fn merges_are_applied_once() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 33));
    let (store, plain) = (place.open(), db.partition("plain").unwrap());
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    for i in 0..20u32 {
        plain.merge("list", i.to_string()).unwrap();
        // Backups in the middle of the log contain a part of the operands.
        if i % 7 == 3 {
            create(&store, &db).unwrap();
        }
        if i % 3 == 0 {
            sync(&db);
            step(&mut watcher);
        }
    }
    sync(&db);
    step(&mut watcher);
    assert_eq!(restored(&store, &dir.path().join("copy"), Until::End), content(&db));
}

#[test]
fn what_the_log_cannot_say_makes_a_backup() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 34));
    let store = place.open();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    let check = |watcher: &mut Watcher<'_>, expected: &str| {
        sync(&db);
        let reason = reason(watcher);
        assert!(reason.contains(expected), "{reason:?}");
        // The log goes on behind it.
        db.partition("plain").unwrap().insert("after", expected).unwrap();
        sync(&db);
        assert!(matches!(step(watcher), WatchStep::Shipped { .. }));
        let target = dir.path().join(expected.replace(' ', "-"));
        assert_eq!(restored(&store, &target, Until::End), content(&db));
    };
    db.partition("plain").unwrap().ingest([("ingested", "1")]).unwrap();
    check(&mut watcher, "ingested");
    db.open_partition("new", PartitionCreateOptions::default()).unwrap().insert("a", "1").unwrap();
    check(&mut watcher, "created");
    // Created again under its name: the old entries must not come back.
    db.delete_partition_by_name("new").unwrap();
    db.open_partition("new", PartitionCreateOptions::default()).unwrap().insert("b", "1").unwrap();
    check(&mut watcher, "created or deleted");
    db.delete_partition_by_name("new").unwrap();
    check(&mut watcher, "deleted");
    assert!(store.verify(&VerifyOptions::default(), &mut |_| true).unwrap().problems.is_empty());
}

#[test]
fn recycled_log_makes_a_backup() {
    let dir = tempfile::tempdir().unwrap();
    let small = || Config::new(dir.path().join("db")).workers(0).wal_segment_size(64 << 10).max_retained_wal_size(0);
    let db = small().open().unwrap();
    let plain = db.open_partition("plain", PartitionCreateOptions::default()).unwrap();
    let (place, mut rng) = (Place::new(), SeededRng::with_stream(35, 0));
    let store = place.open();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    drop(watcher);
    for i in 0..2000u32 {
        plain.insert(i.to_be_bytes(), vec![rng.below(256) as u8; 500]).unwrap();
        if i % 200 == 199 {
            plain.flush().unwrap();
        }
    }
    sync(&db);
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    assert!(reason(&mut watcher).contains("log"), "the feed is stale");
    let copy = dir.path().join("copy");
    store.restore(&copy, &RestoreOptions::default(), &mut |_| true).unwrap();
    assert_eq!(Config::new(copy).open().unwrap().partition("plain").unwrap().len().unwrap(), 2000);
}

#[test]
fn watch_goes_on_where_another_process_ended() {
    let dir = tempfile::tempdir().unwrap();
    let (place, mut db) = (Place::new(), filled(&dir.path().join("db"), 36));
    let store = place.open();
    for round in 0..4 {
        let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
        if round == 0 {
            reason(&mut watcher);
        }
        db.partition("plain").unwrap().insert("round", [round]).unwrap();
        sync(&db);
        assert!(matches!(step(&mut watcher), WatchStep::Shipped { commits: 1, .. }), "{round}");
        drop(watcher);
        db.close().unwrap();
        db = crate::support::open(&dir.path().join("db"));
    }
    assert_eq!(store.list().unwrap().len(), 1, "no further backup was needed");
    assert_eq!(restored(&store, &dir.path().join("copy"), Until::End), content(&db));
}

#[test]
fn two_watchers_write_one_log() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 37));
    let (first, second) = (place.open(), place.open());
    let mut watchers = vec![first.watch(&db, CreateOptions::default()).unwrap()];
    reason(&mut watchers[0]);
    watchers.push(second.watch(&db, CreateOptions::default()).unwrap());
    let mut rng = SeededRng::with_stream(37, 1);
    for _ in 0..30 {
        commit(&db, &mut rng);
        sync(&db);
        step(&mut watchers[rng.below(2) as usize]);
    }
    for watcher in &mut watchers {
        while step(watcher) != WatchStep::Idle {}
    }
    assert_eq!(restored(&first, &dir.path().join("copy"), Until::End), content(&db));
    assert!(first.verify(&VerifyOptions::default(), &mut |_| true).unwrap().problems.is_empty());
}

#[test]
fn gap_in_the_log_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 38));
    let store = place.open();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    for i in 0..3u8 {
        db.partition("plain").unwrap().insert("i", [i]).unwrap();
        sync(&db);
        step(&mut watcher);
    }
    let names: Vec<String> = place.lens().into_keys().filter(|name| name.starts_with("log/")).collect();
    let bytes = place.bytes(&names[1]);
    place.remove(&names[1]);
    let error = restore(&store, &dir.path().join("copy"), RestoreOptions::default()).unwrap_err();
    assert_eq!(error.kind(), "gap", "{error}");
    assert_eq!(store.verify(&VerifyOptions::default(), &mut |_| true).unwrap().problems[0].kind(), "gap");
    // Flipped bytes are an error too, wherever they are.
    for at in (0..bytes.len()).step_by(7) {
        let mut flipped = bytes.to_vec();
        flipped[at] ^= 1;
        place.put(&names[1], flipped);
        let error = restore(&store, &dir.path().join("copy"), RestoreOptions::default()).unwrap_err();
        assert!(["corruption", "newer_version", "other_database"].contains(&error.kind()), "{at}: {error}");
    }
    place.put(&names[1], bytes);
    assert_eq!(restored(&store, &dir.path().join("copy"), Until::End), content(&db));
}

#[test]
fn database_of_older_files_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 39));
    let store = place.open();
    // A copy of the closed directory keeps the id of the database.
    db.close().unwrap();
    copy_directory(&dir.path().join("db"), &dir.path().join("old"));
    let db = crate::support::open(&dir.path().join("db"));
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    db.partition("plain").unwrap().insert("a", "1").unwrap();
    sync(&db);
    step(&mut watcher);
    create(&store, &db).unwrap();
    let old = crate::support::open(&dir.path().join("old"));
    assert_eq!(create(&store, &old).unwrap_err().kind(), "other_history");
    assert_eq!(store.watch(&old, CreateOptions::default()).unwrap_err().kind(), "other_history");
    let _: ChangePosition = db.change_position().unwrap();
}

fn copy_directory(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in from.read_dir().unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn pool_without_the_log_has_no_feed() {
    let dir = match tempfile::tempdir_in("/dev/shm") {
        Ok(dir) => dir,
        Err(_) => return,
    };
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 40));
    let store = place.open();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    let error = watcher.step(&mut |_| true).unwrap_err();
    assert_eq!(error.kind(), "no_feed", "{error}");
    drop(watcher);
    // Backups work.
    create(&store, &db).unwrap();
    assert_eq!(restored(&store, &dir.path().join("copy"), Until::End), content(&db));
}

/// Regression: the feed went on behind the ingest, and the next object claimed to continue what was before it.
#[test]
fn failed_backup_of_a_watcher_loses_no_commit() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 41));
    let (store, plain) = (place.open(), db.partition("plain").unwrap());
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    plain.insert("before", "1").unwrap();
    plain.ingest([("ingested", "1")]).unwrap();
    plain.insert("after", "1").unwrap();
    sync(&db);
    assert_eq!(watcher.step(&mut |_| false).unwrap_err().kind(), "interrupted");
    assert!(reason(&mut watcher).contains("ingested"));
    assert_eq!(restored(&store, &dir.path().join("copy"), Until::End), content(&db));
}

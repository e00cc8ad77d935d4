//! The shipped log, and restores to a time.

use crate::support::{
    Content, Place, commit, content, content_at, create, edit_manifest, filled, restore, stride, sync,
};
use azekura::testing::SeededRng;
use azekura::{ChangePosition, Config, Database, PartitionCreateOptions, RecoveryMode};
use azekura_backup::{BackupStore, CreateOptions, RestoreOptions, Until, VerifyOptions, WatchStep, Watcher};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) fn step(watcher: &mut Watcher<'_>) -> WatchStep {
    watcher.step(&mut |_| true).unwrap()
}

/// The reason of the backup that a step makes.
pub(crate) fn reason(watcher: &mut Watcher<'_>) -> String {
    match step(watcher) {
        WatchStep::BackedUp { reason, .. } => reason,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn restored(store: &BackupStore, path: &Path, until: Until) -> Content {
    restore(store, path, RestoreOptions::default().until(until)).unwrap();
    content_at(path)
}

fn number(db: &Database) -> u64 {
    db.change_position().unwrap().sequence_number()
}

/// A place whose clock stands until it is set.
pub(crate) fn open_with_clock(place: &Place) -> (BackupStore, Arc<AtomicU64>) {
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

pub(crate) fn copy_directory(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
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

/// Regression: the log of the commits that a recovery has lost was applied to a backup from after the recovery.
#[test]
fn log_of_lost_commits_is_not_applied() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 42));
    let (store, clock) = open_with_clock(&place);
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    for i in 0..4 {
        db.partition("plain").unwrap().insert(format!("lost {i}"), format!("by damage {i}")).unwrap();
    }
    sync(&db);
    step(&mut watcher);
    let before = (clock.fetch_add(1000, Ordering::Relaxed), content(&db));
    drop(watcher);
    // The directory after a crash and with damage to the log.
    let crashed = dir.path().join("crashed");
    copy_directory(db.path(), &crashed);
    db.close().unwrap();
    flip_byte_of(&crashed, b"by damage 1");
    drop(Config::new(&crashed).workers(0).recovery_mode(RecoveryMode::PointInTime).open().unwrap());
    let db = crate::support::open(&crashed);
    assert!(content(&db) != before.1);

    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    for i in 0..6 {
        while step(&mut watcher) != WatchStep::Idle {}
        assert_eq!(restored(&store, &dir.path().join(i.to_string()), Until::End), content(&db), "{i}");
        db.partition("plain").unwrap().insert(format!("new {i}"), "1").unwrap();
        sync(&db);
    }
    // A time before the recovery gives what was lost.
    assert_eq!(restored(&store, &dir.path().join("before"), Until::TimeMs(before.0)), before.1);
}

/// Flips a byte of the file of the directory that has this text.
pub(crate) fn flip_byte_of(dir: &Path, text: &[u8]) {
    for entry in dir.read_dir().unwrap() {
        let path = entry.unwrap().path();
        let mut bytes = std::fs::read(&path).unwrap();
        if let Some(at) = bytes.windows(text.len()).position(|window| window == text) {
            bytes[at] ^= 1;
            return std::fs::write(path, bytes).unwrap();
        }
    }
    panic!("no file has the text");
}

/// Regression: the earlier time of a later object made a gap before it.
#[test]
fn clock_that_is_set_back_makes_no_gap() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 43));
    let (store, clock) = open_with_clock(&place);
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    let mut states = vec![content(&db)];
    for time in [1_002_000, 1_001_000, 1_003_000] {
        clock.store(time, Ordering::Relaxed);
        db.partition("plain").unwrap().insert("time", time.to_string()).unwrap();
        sync(&db);
        step(&mut watcher);
        states.push(content(&db));
    }
    for (time, state) in [(1_001_500, 0), (1_002_500, 2), (1_003_000, 3)] {
        assert_eq!(restored(&store, &dir.path().join(time.to_string()), Until::TimeMs(time)), states[state]);
    }
}

/// Regression: a watcher went on behind a gap, so that no restore to the end was possible any more.
#[test]
fn watcher_makes_a_backup_behind_a_gap() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 44));
    let store = place.open();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    for i in 0..2u8 {
        db.partition("plain").unwrap().insert("i", [i]).unwrap();
        sync(&db);
        step(&mut watcher);
    }
    let names: Vec<String> = place.lens().into_keys().filter(|name| name.starts_with("log/")).collect();
    let last = place.bytes(&names[1]).slice(..names.len() + 110);
    place.put(&names[1], last);
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    assert!(reason(&mut watcher).contains("damaged"));
    place.remove(&names[0]);
    db.partition("plain").unwrap().insert("i", "2").unwrap();
    sync(&db);
    assert!(matches!(step(&mut watcher), WatchStep::Shipped { .. }));
    assert_eq!(restored(&store, &dir.path().join("copy"), Until::End), content(&db));
    let newest = store.list().unwrap().pop().unwrap().id;
    place.remove(&place.lens().into_keys().find(|name| name.contains(&newest)).unwrap());
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    assert!(reason(&mut watcher).contains("gap"));
    assert_eq!(restored(&store, &dir.path().join("again"), Until::End), content(&db));
}

/// Regression: `prune` removed the only backup that the log continues, and then nothing could be restored.
#[test]
fn prune_keeps_the_backup_that_the_log_continues() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 45));
    let store = place.open();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    let id = create(&store, &db).unwrap().backup.id;
    edit_manifest(&place, &id, |text| text.replace("\"is_durable\": true", "\"is_durable\": false"));
    store.prune(&azekura_backup::PruneOptions::keep(1)).unwrap();
    db.partition("plain").unwrap().insert("i", "1").unwrap();
    sync(&db);
    step(&mut watcher);
    assert_eq!(restored(&store, &dir.path().join("copy"), Until::End), content(&db));
}

/// Regression: a backup of commits that power loss had removed counted as newer than later backups of other commits.
#[test]
fn backup_of_lost_commits_is_not_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 46));
    let store = place.open();
    let lost = create(&store, &db).unwrap().backup.id;
    let higher = |text: String| text.replace("\"sequence\": ", "\"sequence\": 9");
    edit_manifest(&place, &lost, |text| higher(text).replace("\"is_durable\": true", "\"is_durable\": false"));
    db.close().unwrap();
    let db = crate::support::open(&dir.path().join("db"));
    db.partition("plain").unwrap().insert("i", "1").unwrap();
    create(&store, &db).unwrap();
    assert_eq!(restored(&store, &dir.path().join("copy"), Until::End), content(&db));
    assert_eq!(store.prune(&azekura_backup::PruneOptions::keep(1)).unwrap().removed_backups, [lost]);
}

/// Regression: no backup could be restored, also those that do not need the object, and `prune` failed.
#[test]
fn damaged_log_before_a_backup_does_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 47));
    let store = place.open();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    for i in 0..4u8 {
        if i == 2 {
            create(&store, &db).unwrap();
        }
        db.partition("plain").unwrap().insert("i", [i]).unwrap();
        sync(&db);
        step(&mut watcher);
    }
    let names: Vec<String> = place.lens().into_keys().filter(|name| name.starts_with("log/")).collect();
    place.put(&names[0], "damaged");
    assert_eq!(store.verify(&VerifyOptions::default(), &mut |_| true).unwrap().problems[0].kind(), "corruption");
    assert_eq!(restored(&store, &dir.path().join("copy"), Until::End), content(&db));
    let old = place.open().later(std::time::Duration::from_secs(25 * 60 * 60));
    old.prune(&azekura_backup::PruneOptions::keep(1)).unwrap();
    assert!(!place.lens().contains_key(&names[0]));
    // One that a restore needs is an error, also if it is the last.
    place.put(&names[3], "damaged");
    assert_eq!(restore(&store, &dir.path().join("x"), RestoreOptions::default()).unwrap_err().kind(), "corruption");
    // Behind it, a watcher begins with a backup.
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    assert!(reason(&mut watcher).contains("damaged"));
    db.partition("plain").unwrap().insert("i", "4").unwrap();
    sync(&db);
    step(&mut watcher);
    assert_eq!(restored(&store, &dir.path().join("again"), Until::End), content(&db));
}

/// Regression: the watcher failed for ever, because the name of its next object was not free.
#[test]
fn damaged_object_of_another_watcher_makes_a_backup() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 48));
    let store = place.open();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    place.put(&format!("log/{:020}.log", watcher.shipped_sequence().unwrap()), "damaged");
    for i in 0..2u8 {
        db.partition("plain").unwrap().insert("i", [i]).unwrap();
        sync(&db);
        match i {
            0 => assert!(reason(&mut watcher).contains("damaged")),
            _ => assert!(matches!(step(&mut watcher), WatchStep::Shipped { .. })),
        }
    }
    assert_eq!(restored(&store, &dir.path().join("copy"), Until::End), content(&db));
}

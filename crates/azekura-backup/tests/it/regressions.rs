//! Defects that a review found.

use crate::logs::{copy_directory, flip_byte_of, open_with_clock, reason, restored, step};
use crate::support::{FaultStore, Place, content, content_at, create, edit_manifest, filled, open, restore, sync};
use azekura::{Config, Database, EngineType, ErrorKind, PartitionCreateOptions, PmemOptions, RecoveryMode};
use azekura_backup::{
    BackupError, CreateOptions, CreateReport, PruneOptions, RestoreOptions, Stage, Until, VerifyOptions, WatchStep,
};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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
    recovered(db, path, text, RecoveryMode::PointInTime)
}

fn recovered(db: Database, path: &Path, text: &str, mode: RecoveryMode) -> Database {
    copy_directory(db.path(), path);
    db.close().unwrap();
    flip_byte_of(path, text.as_bytes());
    drop(Config::new(path).workers(0).recovery_mode(mode).open().unwrap());
    open(path)
}

/// Commits until the database ends with this sequence number.
fn commit_up_to(db: &Database, sequence: u64) {
    while db.change_position().unwrap().sequence_number() < sequence {
        db.partition("plain").unwrap().insert("other", "history").unwrap();
    }
    sync(db);
}

fn six_commits(db: &Database) {
    for i in 0..6 {
        db.partition("plain").unwrap().insert(format!("new {i}"), "1").unwrap();
    }
    sync(db);
}

/// A database that keeps its log.
fn retaining(path: &Path) -> Config {
    Config::new(path).workers(0).sync_interval(None).wal_retention(Duration::from_secs(3600))
}

/// A database that keeps its log, with one record, and as many further opens with a commit each.
fn reopened(path: &Path, opens: u32) -> Database {
    let mut db = retaining(path).open().unwrap();
    db.open_partition("plain", PartitionCreateOptions::default()).unwrap().insert("kept", "1").unwrap();
    for n in 0..opens {
        db.close().unwrap();
        db = retaining(path).open().unwrap();
        db.partition("plain").unwrap().insert(n.to_be_bytes(), "1").unwrap();
    }
    db
}

/// Numbers of opens before which the manifest has forgotten no end of the log, and some.
const OPENS: [u32; 2] = [0, 66];

fn follower(db: &Database) -> Database {
    Config::new(db.path()).follow_interval(None).open_follower().unwrap()
}

/// The position of a backup is before its end if commits are made meanwhile. Only the position was checked against the
/// history, so that new commits with the numbers of lost ones were taken for stored. Later, a backup was made.
#[test]
fn backup_that_lost_its_end_is_not_continued() {
    let dir = tempfile::tempdir().unwrap();
    let (place, crashed) = (Place::new(), dir.path().join("crashed"));
    let db = retaining(&dir.path().join("db")).open().unwrap();
    db.open_partition("plain", PartitionCreateOptions::default()).unwrap().insert("kept", "1").unwrap();
    let (store, early) = (place.open(), db.change_position().unwrap());
    three_commits(&db, "a");
    let late = db.change_position().unwrap();
    let id = create(&store, &db).unwrap().backup.id;
    edit_manifest(&place, &id, |text| text.replace(&late.to_string(), &early.to_string()));
    copy_directory(db.path(), &crashed);
    db.close().unwrap();
    flip_byte_of(&crashed, b"damage a 1");
    let db = retaining(&crashed).recovery_mode(RecoveryMode::PointInTime).open().unwrap();
    six_commits(&db);
    assert!(db.changes_since(early).is_ok(), "the position alone does not tell");
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    assert_eq!(watcher.step(&mut |_| true).unwrap_err().kind(), "other_history");
}

/// Nothing is lost within one epoch, nor by a restart that the manifest records, so no further backup is made.
/// Regression: each restart of the writer cost one, later only after more than 64 opens.
#[test]
fn backup_with_an_early_position_is_continued() {
    for (restarts, opens) in [(false, 0), (true, 0), (true, 66)] {
        let dir = tempfile::tempdir().unwrap();
        let (place, path) = (Place::new(), dir.path().join("db"));
        let mut db = reopened(&path, opens);
        let (store, early) = (place.open(), db.change_position().unwrap());
        three_commits(&db, "a");
        let late = db.change_position().unwrap();
        let id = create(&store, &db).unwrap().backup.id;
        edit_manifest(&place, &id, |text| text.replace(&late.to_string(), &early.to_string()));
        if restarts {
            db.close().unwrap();
            db = retaining(&path).open().unwrap();
        }
        six_commits(&db);
        let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
        assert!(matches!(step(&mut watcher), WatchStep::Shipped { commits: 6, .. }), "{restarts}, {opens}");
        let report = restore(&store, &dir.path().join("copy"), RestoreOptions::default()).unwrap();
        assert_eq!(report.sequence, db.change_position().unwrap().sequence_number());
    }
}

/// Regression: the database had forgotten ends of the log, and a recovery had removed others, so that the backup had as
/// few as if none was forgotten.
#[test]
fn backup_tells_which_ends_are_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let (place, path) = (Place::new(), dir.path().join("db"));
    let mut db = reopened(&path, 70);
    three_commits(&db, "a");
    for n in 0..10 {
        let crashed = dir.path().join(format!("crashed {n}"));
        copy_directory(db.path(), &crashed);
        db = retaining(&crashed).open().unwrap();
        three_commits(&db, "later");
    }
    let db = lossy(db, &dir.path().join("lossy"), "damage a 1");
    let store = place.open();
    let id = create(&store, &db).unwrap().backup.id;
    for (forgotten, listed) in [(2, Ok(1)), (1_000_000, Err("corruption"))] {
        edit_manifest(&place, &id, |text| {
            let (before, rest) = text.split_once("\"forgotten_ends\"").unwrap();
            let ends = before.split_once("\"wal_ends\"").unwrap().1.matches('[').count() - 1;
            assert!((40..64).contains(&ends), "{ends} ends");
            format!("{before}\"forgotten_ends\": {forgotten},{}", rest.split_once(',').unwrap().1)
        });
        assert_eq!(store.list().map(|backups| backups.len()).map_err(|error| error.kind()), listed);
    }
}

/// The search for log objects up to a time ended at an object of the next epoch, before others of the lost commits.
#[test]
fn time_before_a_recovery_has_all_lost_commits() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 62));
    let (store, clock) = open_with_clock(&place);
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    let mut states = vec![(clock.load(Ordering::Relaxed), content(&db))];
    for name in ["a", "b", "c"] {
        three_commits(&db, name);
        clock.fetch_add(1000, Ordering::Relaxed);
        assert!(matches!(step(&mut watcher), WatchStep::Shipped { commits: 3, .. }));
        states.push((clock.load(Ordering::Relaxed), content(&db)));
    }
    drop(watcher);
    let db = lossy(db, &dir.path().join("crashed"), "damage a 1");
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    for i in 0..3 {
        clock.fetch_add(1000, Ordering::Relaxed);
        match i {
            0 => drop(reason(&mut watcher)),
            _ => {
                db.partition("plain").unwrap().insert("new", [i]).unwrap();
                sync(&db);
                assert!(matches!(step(&mut watcher), WatchStep::Shipped { commits: 1, .. }));
            }
        }
        states.push((clock.load(Ordering::Relaxed), content(&db)));
    }
    for (time, expected) in &states {
        let found = restored(&store, &dir.path().join(time.to_string()), Until::TimeMs(*time));
        assert!(&found == expected, "{time}");
    }
    // A damaged object at the end may have lost commits only if none of them is known to be beyond the time.
    place.put(&format!("log/{:020}.log", 1u64 << 40), "damaged");
    let until = |i: usize| {
        let options = RestoreOptions::default().until(Until::TimeMs(states[i].0));
        restore(&store, &dir.path().join(format!("damaged {i}")), options).map_err(|error| error.kind())
    };
    assert_eq!((until(3).err(), until(6).err()), (Some("corruption"), Some("corruption")));
    until(2).unwrap();
    until(5).unwrap();
}

/// Without the backup from after a recovery, a restore to a time applied new commits to lost ones.
#[test]
fn histories_are_not_mixed_without_a_backup() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 63));
    let store = place.open();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    let first = store.list().unwrap()[0].id.clone();
    three_commits(&db, "a");
    step(&mut watcher);
    drop(watcher);
    let db = lossy(db, &dir.path().join("crashed"), "damage a 1");
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    six_commits(&db);
    assert!(matches!(step(&mut watcher), WatchStep::Shipped { commits: 6, .. }));
    let to_end = || RestoreOptions::default().backup(first.clone()).until(Until::End);
    let kind = || restore(&store, &dir.path().join("x"), to_end()).unwrap_err().kind();
    let newest = store.list().unwrap().pop().unwrap().id;
    assert_ne!(newest, first);
    let newest = place.lens().into_keys().find(|name| name.contains(&newest)).unwrap();
    place.put(&newest, "damaged");
    assert_eq!(kind(), "corruption");
    // Without the log it is not needed.
    restore(&store, &dir.path().join("copy"), RestoreOptions::default().backup(first.clone())).unwrap();
    place.remove(&newest);
    assert_eq!(kind(), "gap");
}

/// The clients of some clouds show their credentials in their debug texts.
#[test]
fn debug_text_of_a_store_is_its_name() {
    let place = Place::new();
    let text = format!("{:?}", place.open_through(FaultStore::new(place.objects()), 1));
    assert!(text.contains("FaultStore(") && !text.contains("state"), "{text}");
}

/// No range of an empty object can be read, and that error ended every call.
#[test]
fn empty_log_object_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 64));
    let store = place.open();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    place.put(&format!("log/{:020}.log", watcher.shipped_sequence().unwrap()), "");
    assert_eq!(store.verify(&VerifyOptions::default(), &mut |_| true).unwrap().problems[0].kind(), "corruption");
    assert_eq!(restore(&store, &dir.path().join("x"), RestoreOptions::default()).unwrap_err().kind(), "corruption");
    store.prune(&PruneOptions::keep(1)).unwrap();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    assert!(reason(&mut watcher).contains("damaged"));
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

/// The options of a backup bounded a pool whose limit was raised before the log was written.
#[test]
fn log_may_exceed_a_limit_that_was_raised() {
    let dir = tempfile::tempdir().unwrap();
    let db = Config::new(dir.path().join("db")).workers(0).open().unwrap();
    let options = |len| {
        let pool = PmemOptions::default().max_size(len).growth_step(256 << 10);
        PartitionCreateOptions::default().engine(EngineType::Pmem(pool))
    };
    let pool = db.open_partition("pool", options(1 << 20)).unwrap();
    let (place, mut next) = (Place::new(), 0u32..);
    let store = place.open();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    pool.set_options(options(2 << 20)).unwrap();
    for key in next.by_ref().take(1200) {
        pool.insert(key.to_be_bytes(), [7; 1000]).unwrap();
    }
    sync(&db);
    while step(&mut watcher) != WatchStep::Idle {}
    let copy = dir.path().join("copy");
    restore(&store, &copy, RestoreOptions::default()).unwrap();
    let copy = Config::new(copy).open().unwrap();
    let restored = copy.partition("pool").unwrap();
    assert_eq!(restored.len().unwrap(), 1200);
    assert_eq!(restored.options(), options(1 << 20), "the options are those of the backup");
    restored.set_options(pool.options()).unwrap();
    restored.insert("more", "1").unwrap();
}

/// A limit that was raised once allowed too little memory for old versions of small records.
#[test]
fn log_may_remove_many_records_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let db = Config::new(dir.path().join("db")).workers(0).open().unwrap();
    let options =
        |len| PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default().max_size(len)));
    let pool = db.open_partition("pool", options(1 << 20)).unwrap();
    (0..12_000u64).for_each(|key| pool.insert(key.to_be_bytes(), "").unwrap());
    let place = Place::new();
    let store = place.open();
    reason(&mut store.watch(&db, CreateOptions::default()).unwrap());
    pool.set_options(options(64 << 20)).unwrap();
    drop(pool);
    db.close().unwrap();
    let db = Config::new(dir.path().join("db")).workers(0).open().unwrap();
    let pool = db.partition("pool").unwrap();
    let mut batch = db.batch();
    (0..12_000u64).for_each(|key| batch.remove(&pool, key.to_be_bytes()));
    batch.commit().unwrap();
    sync(&db);
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    assert!(matches!(step(&mut watcher), WatchStep::Shipped { commits: 1, .. }));
    let copy = dir.path().join("copy");
    restore(&store, &copy, RestoreOptions::default()).unwrap();
    let restored = Config::new(copy).open().unwrap().partition("pool").unwrap();
    assert_eq!((restored.len().unwrap(), restored.options()), (0, options(1 << 20)));
}

/// Each step beside a writer that never syncs stored a backup that was not durable, and then failed.
#[test]
fn watch_stores_nothing_that_is_not_durable() {
    let dir = tempfile::tempdir().unwrap();
    let db = filled(&dir.path().join("db"), 69);
    db.partition("plain").unwrap().insert("not synced", "1").unwrap();
    let follower = follower(&db);
    let store = Place::new().open();
    let mut watcher = store.watch(&follower, CreateOptions::default().durable_wait(Duration::ZERO)).unwrap();
    for _ in 0..2 {
        assert_eq!(watcher.step(&mut |_| true).unwrap_err().kind(), "no_feed");
    }
    assert!(store.list().unwrap().is_empty());
}

/// The instance id was drawn once, for the checkpoint of the backup.
#[test]
fn two_restores_are_two_databases() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 67));
    let store = place.open();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    three_commits(&db, "a");
    step(&mut watcher);
    let first = store.list().unwrap()[0].id.clone();
    let options = [RestoreOptions::default(), RestoreOptions::default(), RestoreOptions::default().backup(first)];
    let paths = ["1", "2", "3"].map(|name| dir.path().join(name));
    for (path, options) in paths.iter().zip(options) {
        restore(&store, path, options).unwrap();
    }
    assert!(content_at(&paths[0]) == content(&db));
    let copies = paths.map(|path| open(&path));
    let mut ids: Vec<_> = copies.iter().map(|copy| copy.change_position().unwrap().database_id()).collect();
    ids.push(db.change_position().unwrap().database_id());
    ids.sort_unstable();
    assert!(ids.windows(2).all(|two| two[0] != two[1]), "{ids:?}");
    let other = Place::new().open();
    create(&other, &copies[0]).unwrap();
    assert_eq!(create(&other, &copies[1]).unwrap_err().kind(), "other_database");
}

#[test]
fn recovery_below_a_backup_is_named_in_the_error() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 68));
    three_commits(&db, "a");
    create(&place.open(), &db).unwrap();
    let db = lossy(db, &dir.path().join("crashed"), "damage a 1");
    let error = create(&place.open(), &db).unwrap_err();
    assert_eq!(error.kind(), "other_history");
    assert!(error.to_string().contains("recovery") && error.to_string().contains("another prefix"), "{error}");
}

/// The whole backup was downloaded before the rename to the mount point failed.
#[cfg(target_os = "linux")]
#[test]
fn mount_point_is_refused_as_a_target() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 69));
    create(&place.open(), &db).unwrap();
    let error = restore(&place.open(), Path::new("/proc"), RestoreOptions::default()).unwrap_err();
    assert!(error.kind() == "invalid" && error.to_string().contains("mount point"), "{error}");
    restore(&place.open(), &dir.path().join("new/and/deep"), RestoreOptions::default()).unwrap();
    assert!(content_at(&dir.path().join("new/and/deep")) == content(&db));
}

/// A manifest that was removed long after its hold was written left writers without protection.
#[test]
fn prune_that_pauses_removes_no_backup() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 70));
    for i in 0..4u8 {
        db.partition("plain").unwrap().insert("i", [i]).unwrap();
        create(&place.open(), &db).unwrap();
    }
    let ms = Arc::new(AtomicU64::new(1_000_000));
    let now = Arc::clone(&ms);
    let slow = FaultStore::hooked(place.objects(), move |request, path| {
        let is_slow = request == "delete" && path.as_ref().contains("backups");
        ms.fetch_add(u64::from(is_slow) * 7 * 3_600_000, Ordering::Relaxed);
    });
    let slow = place.open_through(slow, 1).clock(move || now.load(Ordering::Relaxed));
    assert_eq!(slow.prune(&PruneOptions::keep(1)).unwrap_err().kind(), "too_slow");
    // The pause came with the first of three removals.
    assert_eq!(place.open().list().unwrap().len(), 3);
    assert!(place.open().verify(&VerifyOptions::default(), &mut |_| true).unwrap().problems.is_empty());
    assert_eq!(place.open().prune(&PruneOptions::keep(1)).unwrap().removed_backups.len(), 2);
}

/// Only sequence numbers were compared. So a backup of the new history was stored as soon as it had as many commits as
/// the lost one; after a salvage, which keeps the last sequence number, at once.
#[test]
fn history_that_lost_a_backup_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (name, mode) in [("point", RecoveryMode::PointInTime), ("salvage", RecoveryMode::Salvage)] {
        let (place, db) = (Place::new(), filled(&dir.path().join(name), 71));
        let store = place.open();
        reason(&mut store.watch(&db, CreateOptions::default()).unwrap());
        three_commits(&db, "a");
        let id = create(&store, &db).unwrap().backup;
        let db = recovered(db, &dir.path().join(format!("{name} crashed")), "damage a 1", mode);
        let is_shorter = db.change_position().unwrap().sequence_number() < id.sequence;
        assert_eq!(is_shorter, mode == RecoveryMode::PointInTime);
        for more in [0, 1, 100] {
            commit_up_to(&db, id.sequence + more);
            let error = create(&store, &db).unwrap_err();
            assert_eq!(error.kind(), "other_history", "{name} {more}: {error}");
            let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
            assert_eq!(watcher.step(&mut |_| true).unwrap_err().kind(), "other_history", "{name} {more}");
        }
        // Beside a writer too.
        assert_eq!(create(&store, &follower(&db)).unwrap_err().kind(), "other_history");
        assert_eq!(store.list().unwrap().len(), 2);
    }
}

/// A log of lost commits was continued by one that begins with the sequence number at which it ends, or before.
#[test]
fn lost_log_is_not_continued_at_its_end() {
    let dir = tempfile::tempdir().unwrap();
    for more in [0, 2] {
        let path = |name: &str| dir.path().join(format!("{name} {more}"));
        let (place, db) = (Place::new(), filled(&path("db"), 72));
        let (store, clock) = open_with_clock(&place);
        let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
        reason(&mut watcher);
        let first = store.list().unwrap()[0].id.clone();
        three_commits(&db, "a");
        step(&mut watcher);
        let lost = (watcher.shipped_sequence().unwrap(), clock.fetch_add(1000, Ordering::Relaxed), content(&db));
        drop(watcher);
        let db = lossy(db, &path("crashed"), "damage a 1");
        commit_up_to(&db, lost.0 + more);
        let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
        reason(&mut watcher);
        six_commits(&db);
        assert!(matches!(step(&mut watcher), WatchStep::Shipped { commits: 6, .. }));
        assert!(restored(&store, &path("end"), Until::End) == content(&db));
        let from_first = |until| RestoreOptions::default().backup(first.clone()).until(until);
        assert_eq!(restore(&store, &path("x"), from_first(Until::End)).unwrap_err().kind(), "gap");
        assert!(restored(&store, &path("lost"), Until::TimeMs(lost.1)) == lost.2);
    }
}

/// Of two backups with the same last sequence number, the one with the later time was the newest.
#[test]
fn clock_that_is_set_back_keeps_the_order() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 73));
    let (store, clock) = open_with_clock(&place);
    sync(&db);
    let mut ids = vec![create(&store, &db).unwrap().backup.id];
    db.close().unwrap();
    clock.store(500_000, Ordering::Relaxed);
    ids.push(create(&store, &open(&dir.path().join("db"))).unwrap().backup.id);
    let listed: Vec<String> = store.list().unwrap().into_iter().map(|of| of.id).collect();
    assert_eq!(listed, ids);
}

/// More ends of the log than a manifest has, and no commit is lost.
#[test]
fn many_opens_are_the_same_history() {
    let dir = tempfile::tempdir().unwrap();
    let (place, mut db) = (Place::new(), filled(&dir.path().join("db"), 74));
    let store = place.open();
    for i in 0..150u32 {
        if i < 5 || i % 74 == 0 {
            create(&store, &db).unwrap();
        }
        for _ in 0..i % 3 {
            db.partition("plain").unwrap().insert(i.to_be_bytes(), "1").unwrap();
        }
        if i % 5 == 4 {
            db.partition("plain").unwrap().flush().unwrap();
        }
        db.close().unwrap();
        db = open(&dir.path().join("db"));
    }
    create(&store, &db).unwrap();
    assert!(restored(&store, &dir.path().join("copy"), Until::End) == content(&db));
}

/// Commits a value of `b_len` bytes and then `later`, which a watcher stores as one log object. After another open, a
/// watcher of another place stores log from before `b_len` on. The place gets an object of it, as if that watcher had
/// not noticed the open. Returns the sequence numbers after the commits.
fn overlapping_logs(dir: &Path, place: &Place, b_len: usize, later: &[usize]) -> (Database, Vec<u64>) {
    let (path, other) = (dir.join("db"), Place::new());
    let (store, other_store) = (place.open(), other.open());
    let db = filled(&path, 75);
    let commit = |db: &Database, len: usize| {
        db.partition("plain").unwrap().insert(format!("{len}"), vec![7; len]).unwrap();
        sync(db);
        db.change_position().unwrap().sequence_number()
    };
    sync(&db);
    let followed = follower(&db);
    let mut late = other_store.watch(&followed, CreateOptions::default()).unwrap();
    reason(&mut late);
    commit(&db, 2);
    followed.catch_up().unwrap();
    assert!(matches!(step(&mut late), WatchStep::Shipped { commits: 1, .. }));
    let mut ends = vec![commit(&db, b_len)];
    create(&store, &db).unwrap();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    ends.extend(later.iter().map(|len| commit(&db, *len)));
    let WatchStep::Shipped { commits, .. } = step(&mut watcher) else { panic!("nothing was stored") };
    assert_eq!(commits, later.len());
    drop(watcher);
    db.close().unwrap();
    let db = open(&path);
    followed.catch_up().unwrap();
    assert!(matches!(step(&mut late), WatchStep::Shipped { .. }));
    let name = other.lens().into_keys().rfind(|name| name.starts_with("log/")).unwrap();
    place.put(&name, other.bytes(&name));
    (db, ends)
}

/// A watcher that was behind stored an object of a later open, which begins before the end of the log of another. That
/// log was taken for lost, and a restore ended before its commits. Later, the next backup, which tells, was not asked
/// for a time before it.
#[test]
fn log_that_may_be_lost_is_a_gap() {
    let dir = tempfile::tempdir().unwrap();
    let place = Place::new();
    let (db, ends) = overlapping_logs(dir.path(), &place, 9 << 20, &[1]);
    let (store, before) = (place.open(), content(&db));
    let to = |name: &str, until| restore(&store, &dir.path().join(name), RestoreOptions::default().until(until));
    assert_eq!(to("x", Until::End).unwrap_err().kind(), "gap");
    assert_eq!(to("x", Until::Sequence(ends[1])).unwrap_err().kind(), "gap");
    db.partition("plain").unwrap().insert("later", "1").unwrap();
    sync(&db);
    // The ends of the log in the next backup tell.
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    assert!(reason(&mut watcher).contains("gap"));
    assert!(restored(&store, &dir.path().join("copy"), Until::End) == content(&db));
    assert!(restored(&store, &dir.path().join("before"), Until::Sequence(ends[1])) == before);
}

/// Log of which it is not known whether it is lost was a gap also if the rest has all commits that are wanted.
#[test]
fn gap_behind_the_limit_does_not_count() {
    let dir = tempfile::tempdir().unwrap();
    let place = Place::new();
    let (_, ends) = overlapping_logs(dir.path(), &place, 5 << 20, &[(5 << 20) + 1, 1]);
    let to = |name: &str, until| restore(&place.open(), &dir.path().join(name), RestoreOptions::default().until(until));
    assert_eq!(to("x", Until::Sequence(ends[2])).unwrap_err().kind(), "gap");
    assert_eq!(to("copy", Until::Sequence(ends[1])).unwrap().sequence, ends[1]);
}

/// A log with damage before the first commit that was needed lost no commit, but all backups counted as lost.
#[test]
fn skipped_damage_loses_no_backup() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 76));
    let store = place.open();
    db.partition("plain").unwrap().insert("flushed", "damage this").unwrap();
    sync(&db);
    db.list_partitions().iter().for_each(|name| db.partition(name).unwrap().flush().unwrap());
    six_commits(&db);
    create(&store, &db).unwrap();
    let expected = content(&db);
    let db = recovered(db, &dir.path().join("crashed"), "damage this", RecoveryMode::Strict);
    assert!(content(&db) == expected);
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    six_commits(&db);
    assert!(matches!(step(&mut watcher), WatchStep::Shipped { commits: 6, .. }));
    create(&store, &db).unwrap();
}

/// A watcher of a follower that cannot follow any more stored nothing, and returned no error.
#[test]
fn follower_that_is_stuck_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 77));
    sync(&db);
    let (store, followed) = (place.open(), follower(&db));
    let mut watcher = store.watch(&followed, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    assert!(matches!(step(&mut watcher), WatchStep::Idle));
    six_commits(&db);
    db.partition("plain").unwrap().flush().unwrap();
    std::fs::rename(db.path().join("MANIFEST"), db.path().join("elsewhere")).unwrap();
    assert_eq!(watcher.step(&mut |_| true).unwrap_err().kind(), "database");
}

/// An object that another watcher stored late ended a restore to a time before the objects that it overlaps.
#[test]
fn late_log_object_is_no_limit() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 80));
    let (store, clock) = open_with_clock(&place);
    let commit = |key: &str| {
        db.partition("plain").unwrap().insert(key, "1").unwrap();
        sync(&db);
    };
    let mut late = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut late);
    commit("a");
    create(&store, &db).unwrap();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    let mut states = Vec::new();
    for key in ["b", "c", "d"] {
        commit(key);
        let time = clock.fetch_add(1000, Ordering::Relaxed) + 1000;
        assert!(matches!(step(&mut watcher), WatchStep::Shipped { commits: 1, .. }));
        states.push((time, content(&db)));
        if key == "c" {
            clock.store(time + 100_000, Ordering::Relaxed);
            assert!(matches!(step(&mut late), WatchStep::Shipped { commits: 3, .. }));
            clock.store(time, Ordering::Relaxed);
        }
    }
    for (time, expected) in &states {
        let found = restored(&store, &dir.path().join(time.to_string()), Until::TimeMs(*time));
        assert!(&found == expected, "{time}");
    }
    // A damaged object that the late one overlaps may be within the limit.
    let last = place.lens().into_keys().rfind(|name| name.starts_with("log/")).unwrap();
    place.put(&last, "damaged");
    let to_end = RestoreOptions::default().until(Until::TimeMs(states[2].0));
    assert_eq!(restore(&store, &dir.path().join("x"), to_end).unwrap_err().kind(), "corruption");
}

/// A call of `prune` that removed the backup and its log, between the listings of a restore, made the restore shorter.
#[test]
fn prune_between_listings_shortens_no_restore() {
    let dir = tempfile::tempdir().unwrap();
    for listing in 0..2 {
        let path = |name: &str| dir.path().join(format!("{name} {listing}"));
        let (place, db) = (Arc::new(Place::new()), filled(&path("db"), 81));
        let (store, clock) = open_with_clock(&place);
        reason(&mut store.watch(&db, CreateOptions::default()).unwrap());
        three_commits(&db, "a");
        assert!(matches!(step(&mut store.watch(&db, CreateOptions::default()).unwrap()), WatchStep::Shipped { .. }));
        let time = clock.fetch_add(1000, Ordering::Relaxed);
        create(&store, &db).unwrap();
        let (pruning, listed) = (Arc::clone(&place), AtomicU64::new(0));
        let hooked = FaultStore::hooked(place.objects(), move |request, path| {
            let is_counted = request == "list" && ["log", "backups"].iter().any(|end| path.as_ref().ends_with(end));
            if is_counted && listed.fetch_add(1, Ordering::Relaxed) == listing {
                let work = || pruning.open().later(Duration::from_secs(25 * 60 * 60)).prune(&PruneOptions::keep(1));
                let report = std::thread::scope(|scope| scope.spawn(work).join().unwrap()).unwrap();
                assert_eq!(report.removed_backups.len(), 1);
            }
        });
        let to_time = RestoreOptions::default().until(Until::TimeMs(time));
        assert_eq!(restore(&place.open_through(hooked, 1), &path("copy"), to_time).unwrap_err().kind(), "no_backup");
    }
}

/// A backup that was not durable was left out because of log of the next open, which did not reach its end.
#[test]
fn backup_left_out_that_may_be_kept_is_a_gap() {
    let dir = tempfile::tempdir().unwrap();
    let (place, path) = (Place::new(), dir.path().join("db"));
    let (store, db) = (place.open(), retaining(&path).open().unwrap());
    let plain = db.open_partition("plain", PartitionCreateOptions::default()).unwrap();
    reason(&mut store.watch(&db, CreateOptions::default()).unwrap());
    plain.insert("large", vec![7; 9 << 20]).unwrap();
    let sequence = db.change_position().unwrap().sequence_number();
    three_commits(&db, "a");
    let backup = create(&store, &db).unwrap().backup;
    edit_manifest(&place, &backup.id, |text| text.replace("\"is_durable\": true", "\"is_durable\": false"));
    drop(plain);
    db.close().unwrap();
    let db = retaining(&path).open().unwrap();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    assert!(matches!(step(&mut watcher), WatchStep::Shipped { commits: 1, .. }));
    let to = |name: &str, until| restore(&store, &dir.path().join(name), RestoreOptions::default().until(until));
    assert_eq!(to("x", Until::End).unwrap_err().kind(), "gap");
    assert_eq!(to("first", Until::Sequence(sequence)).unwrap().sequence, sequence);
    assert!(matches!(step(&mut watcher), WatchStep::Shipped { commits: 3, .. }));
    assert_eq!(to("all", Until::End).unwrap().sequence, backup.sequence);
}

/// A watcher that was behind went on past a durable backup of another process, which a recovery had lost. A restore
/// applied the log of the new history to that backup.
#[test]
fn watcher_notices_that_a_backup_was_lost() {
    let dir = tempfile::tempdir().unwrap();
    let (place, crashed) = (Place::new(), dir.path().join("crashed"));
    let (store, db) = (place.open(), retaining(&dir.path().join("db")).open().unwrap());
    db.open_partition("plain", PartitionCreateOptions::default()).unwrap().insert("kept", "1").unwrap();
    sync(&db);
    copy_directory(db.path(), &crashed);
    let followed = Config::new(&crashed).follow_interval(None).open_follower().unwrap();
    let mut watcher = store.watch(&followed, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    three_commits(&db, "a");
    create(&store, &db).unwrap();
    // The followed directory after these commits, a crash, and damage to the log.
    copy_directory(db.path(), &crashed);
    flip_byte_of(&crashed, b"damage a 1");
    let db = retaining(&crashed).recovery_mode(RecoveryMode::PointInTime).open().unwrap();
    six_commits(&db);
    followed.catch_up().unwrap();
    for _ in 0..2 {
        assert_eq!(watcher.step(&mut |_| true).unwrap_err().kind(), "other_history");
    }
    assert!(!place.lens().into_keys().any(|name| name.starts_with("log/")));
}

/// The manifest of another database, which was copied into the store, was restored.
#[test]
fn manifest_of_another_database_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 83));
    let store = place.open();
    let id = create(&store, &db).unwrap().backup.id;
    let database: String = db.change_position().unwrap().database_id().iter().map(|of| format!("{of:02x}")).collect();
    let field = |id: &str| format!("\"database\": \"{id}\"");
    edit_manifest(&place, &id, |text| text.replace(&field(&database), &field(&"7".repeat(32))));
    let restored = restore(&store, &dir.path().join("copy"), RestoreOptions::default());
    assert_eq!(restored.unwrap_err().kind(), "other_database");
    assert_eq!(create(&store, &db).unwrap_err().kind(), "other_database");
}

/// A recovery of the writer lost commits of a backup of a follower during its upload, and the backup was published,
/// later only after more than 64 opens.
#[test]
fn backup_lost_during_its_upload_is_an_error() {
    for opens in OPENS {
        let dir = tempfile::tempdir().unwrap();
        let (place, crashed) = (Place::new(), dir.path().join("crashed"));
        let db = reopened(&dir.path().join("db"), opens);
        three_commits(&db, "a");
        copy_directory(db.path(), &crashed);
        let followed = Config::new(&crashed).follow_interval(None).open_follower().unwrap();
        let mut is_recovered = false;
        let created = place.open().create(&followed, &CreateOptions::default(), &mut |of| {
            if of.stage == Stage::Uploading && !std::mem::replace(&mut is_recovered, true) {
                flip_byte_of(&crashed, b"damage a 1");
                drop(retaining(&crashed).recovery_mode(RecoveryMode::PointInTime).open().unwrap());
            }
            true
        });
        assert!(matches!(created, Err(BackupError::Database(error)) if error.kind() == ErrorKind::Stale));
        assert!(is_recovered && place.open().list().unwrap().is_empty());
    }
}

/// Regression: where the directory of a follower had another database, its watcher was idle for good, and a backup had
/// the files of that database with the identity of the first one.
#[test]
fn follower_of_a_replaced_directory_makes_no_backup() {
    let dir = tempfile::tempdir().unwrap();
    let (place, path) = (Place::new(), dir.path().join("db"));
    let db = reopened(&path, 0);
    six_commits(&db);
    let (store, followed) = (place.open(), follower(&db));
    let mut watcher = store.watch(&followed, CreateOptions::default()).unwrap();
    assert!(matches!(step(&mut watcher), WatchStep::BackedUp { .. }));
    db.close().unwrap();
    std::fs::rename(&path, dir.path().join("old")).unwrap();
    restore(&store, &path, RestoreOptions::default()).unwrap();
    let db = retaining(&path).open().unwrap();
    for _ in 0..2 {
        let failed = create(&store, &followed).unwrap_err();
        assert!(matches!(failed, BackupError::Database(error) if error.kind() == ErrorKind::Invalid));
        assert_eq!(followed.checkpoint(dir.path().join("copy")).unwrap_err().kind(), ErrorKind::Invalid);
        assert!(watcher.step(&mut |_| true).is_err());
        six_commits(&db);
    }
}

/// Regression: a partition that was created before the checkpoint of a backup and deleted behind it was in the backup,
/// but not in its list. The log was applied on top of it, so that the restored database had it for good.
#[test]
fn backup_lists_the_partitions_of_its_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), reopened(&dir.path().join("db"), 0));
    sync(&db);
    let (store, followed) = (place.open(), follower(&db));
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in (0..2_000).take_while(|_| !is_done.load(Ordering::Relaxed)) {
                let short = db.open_partition("short", PartitionCreateOptions::default()).unwrap();
                short.insert("k", "1").unwrap();
                sync(&db);
                std::thread::sleep(Duration::from_micros(n * 7919 % 4000));
                db.delete_partition(short).unwrap();
                std::thread::sleep(Duration::from_micros(n * 104_729 % 4000));
            }
        });
        let mut made = 0;
        for n in 0..20 {
            // The writer may remove files faster than they can be copied.
            let Ok(CreateReport { backup, .. }) = create(&store, &followed) else { continue };
            made += 1;
            let copy = dir.path().join(format!("copy{n}"));
            restore(&store, &copy, RestoreOptions::default().backup(&backup.id)).unwrap();
            let found = Config::new(&copy).open_read_only().unwrap().list_partitions();
            is_done.store(found != backup.partitions, Ordering::Relaxed);
            assert_eq!(found, backup.partitions, "backup {n}");
        }
        is_done.store(true, Ordering::Relaxed);
        assert!(made > 0);
    });
}

//! `prune`, beside writers that use old objects again.

use crate::logs::{reason, step};
use crate::support::{FaultStore, Place, commit, content, content_at, create, filled, restore, sync, with_large_table};
use azekura::testing::SeededRng;
use azekura_backup::{
    BackupStore, CreateOptions, PruneOptions, RestoreOptions, Stage, Until, VerifyOptions, WatchStep,
};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

const HOUR: Duration = Duration::from_secs(60 * 60);

fn assert_whole(store: &BackupStore) {
    let report = store.verify(&VerifyOptions::default(), &mut |_| true).unwrap();
    assert!(report.problems.is_empty(), "{report:?}");
}

#[test]
fn removed_backups_free_space_after_grace_time() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 21));
    let store = place.open();
    let first = create(&store, &db).unwrap().backup.id;
    db.partition("plain").unwrap().major_compact().unwrap();
    db.partition("plain").unwrap().insert("new", "1").unwrap();
    create(&store, &db).unwrap();
    let data = |place: &Place| place.lens().keys().filter(|name| name.starts_with("files/")).count();
    let before = data(&place);

    let planned = store.prune(&PruneOptions::keep(1).dry_run(true)).unwrap();
    assert_eq!(planned.removed_backups, std::slice::from_ref(&first));
    assert_eq!(store.list().unwrap().len(), 2, "a dry run changes nothing");
    let report = store.prune(&PruneOptions::keep(1)).unwrap();
    assert_eq!((report.removed_backups, report.deleted_objects), (vec![first], 0));
    // Within the grace time nothing is deleted, after it what only the first backup needed.
    let report = place.open().later(23 * HOUR).prune(&PruneOptions::keep(1)).unwrap();
    assert_eq!((report.deleted_objects, data(&place)), (0, before));
    let report = place.open().later(25 * HOUR).prune(&PruneOptions::keep(1)).unwrap();
    assert!(report.deleted_objects > 0 && data(&place) < before, "{report:?}");
    assert_whole(&store);
    restore(&store, &dir.path().join("copy"), RestoreOptions::default()).unwrap();
    assert_eq!(content_at(&dir.path().join("copy")), content(&db));
    place.open().later(49 * HOUR).prune(&PruneOptions::keep(1)).unwrap();
    assert!(place.lens().keys().filter(|name| name.starts_with("holds/")).count() <= 1, "{:?}", place.lens());
}

#[test]
fn removed_backups_hold_their_objects() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 27));
    create(&place.open(), &db).unwrap();
    // Old objects, of which a writer that has listed the first backup may use some again.
    let old = place.open_through(FaultStore::aged(&place), 1);
    db.partition("plain").unwrap().major_compact().unwrap();
    create(&old, &db).unwrap();
    let report = old.prune(&PruneOptions::keep(1)).unwrap();
    assert_eq!((report.removed_backups.len(), report.deleted_objects), (1, 0));
    let report = old.later(25 * HOUR).prune(&PruneOptions::keep(1)).unwrap();
    assert!(report.deleted_objects > 0);
    assert_whole(&place.open());
}

#[test]
fn prune_during_an_upload_deletes_nothing_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 22));
    let (writer, pruner) = (place.open(), place.open().later(23 * HOUR));
    create(&writer, &db).unwrap();
    let mut rng = SeededRng::with_stream(22, 1);
    for round in 0..8 {
        (0..20).for_each(|_| commit(&db, &mut rng));
        db.partition("plain").unwrap().flush().unwrap();
        // Another backup that removes all earlier ones, at each point of this upload.
        let mut point = 0;
        let report = writer.create(&db, &Default::default(), &mut |_| {
            point += 1;
            if point == 1 + round * 2 {
                let prune = || pruner.prune(&PruneOptions::keep(1));
                std::thread::scope(|scope| scope.spawn(prune).join().unwrap()).unwrap();
            }
            true
        });
        report.unwrap();
        pruner.prune(&PruneOptions::keep(1)).unwrap();
        assert_whole(&pruner);
    }
    restore(&writer, &dir.path().join("copy"), RestoreOptions::default()).unwrap();
    assert_eq!(content_at(&dir.path().join("copy")), content(&db));
}

#[test]
fn old_unused_objects_are_not_used_again() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 23));
    // An upload that is interrupted before its manifest.
    let stopped =
        place.open().create(&db, &Default::default(), &mut |of| of.stage != Stage::Uploading || of.done < of.total);
    assert_eq!(stopped.unwrap_err().kind(), "interrupted");
    let old = place.lens();
    let young = place.open().later(5 * HOUR).create(&db, &Default::default(), &mut |_| false);
    assert_eq!(young.unwrap_err().kind(), "interrupted");
    // A call of prune that has listed the objects deletes them while the next backup is uploaded.
    let report = create(&place.open().later(25 * HOUR), &db).unwrap();
    assert_eq!(report.reused_bytes, 0);
    old.keys()
        .filter(|name| name.starts_with("files/") || name.starts_with("parts/"))
        .for_each(|name| place.remove(name));
    assert_whole(&place.open());
}

#[test]
fn writer_gives_up_when_its_hold_ends() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 26));
    let error = create(&place.open().grace(Duration::ZERO), &db).unwrap_err();
    assert_eq!(error.kind(), "too_slow", "{error}");
    assert!(place.open().list().unwrap().is_empty());
}

#[test]
fn random_backups_and_prunes_keep_the_rest_whole() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 24));
    let store = place.open();
    let mut rng = SeededRng::with_stream(24, 1);
    create(&store, &db).unwrap();
    for _ in 0..30 {
        (0..rng.below(10)).for_each(|_| commit(&db, &mut rng));
        match rng.below(5) {
            0 => db.partition("plain").unwrap().major_compact().unwrap(),
            1 => db.partition("blobs").unwrap().flush().unwrap(),
            2 | 3 => drop(create(&store, &db).unwrap()),
            _ => {
                let later = HOUR * u32::try_from(rng.below(60)).unwrap();
                place.open().later(later).prune(&PruneOptions::keep(1 + rng.below(3) as usize)).unwrap();
            }
        }
        assert_whole(&store);
    }
}

#[test]
fn prune_must_keep_a_backup() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 25));
    create(&place.open(), &db).unwrap();
    assert_eq!(place.open().prune(&PruneOptions::keep(0)).unwrap_err().kind(), "invalid");
    assert_eq!(place.open().list().unwrap().len(), 1);
}

/// Regression: the first call deleted by name what the second had deleted and the writer had uploaded again.
#[test]
fn two_prunes_delete_nothing_of_a_new_backup() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Arc::new(Place::new()), filled(&dir.path().join("db"), 28));
    // An upload that is interrupted before its manifest.
    let stop =
        place.open().create(&db, &Default::default(), &mut |of| of.stage == Stage::Reading || of.done < of.total);
    assert_eq!(stop.unwrap_err().kind(), "interrupted");
    let (second, once) = (Arc::clone(&place), Once::new());
    let first = FaultStore::hooked(place.objects(), move |request, _| {
        if request == "delete" {
            let work = || {
                second.open().later(25 * HOUR).prune(&PruneOptions::keep(1)).unwrap();
                create(&second.open(), &db).unwrap();
            };
            once.call_once(|| std::thread::scope(|scope| scope.spawn(work).join().unwrap()));
        }
    });
    let report = place.open_through(first, 1).later(25 * HOUR).prune(&PruneOptions::keep(1)).unwrap();
    assert!(report.deleted_objects > 5, "{report:?}");
    assert_eq!(place.open().list().unwrap().len(), 1);
    assert_whole(&place.open());
}

/// Regression: the log of a removed backup was deleted at once, so that a restore or a check that was running ended
/// with `Missing`.
#[test]
fn removed_backups_hold_their_log() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 29));
    let store = place.open();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    reason(&mut watcher);
    db.partition("plain").unwrap().insert("shipped", "1").unwrap();
    sync(&db);
    assert!(matches!(step(&mut watcher), WatchStep::Shipped { .. }));
    let (expected, end) = (content(&db), db.change_position().unwrap().sequence_number());
    db.partition("plain").unwrap().insert("later", "1").unwrap();
    create(&store, &db).unwrap();
    let logs = |place: &Place| place.lens().keys().filter(|name| name.starts_with("log/")).count();
    assert_eq!(logs(&place), 1);

    let old = place.open_through(FaultStore::aged(&place), 1);
    let until = RestoreOptions::default().until(Until::Sequence(end));
    let restored = store.restore(&dir.path().join("copy"), &until, &mut |_| {
        let prune = || old.prune(&PruneOptions::keep(1)).unwrap();
        std::thread::scope(|scope| _ = scope.spawn(prune).join().unwrap());
        true
    });
    assert_eq!(restored.unwrap().sequence, end);
    assert_eq!(content_at(&dir.path().join("copy")), expected);
    assert_eq!((store.list().unwrap().len(), logs(&place)), (1, 1));
    // A check that has listed the log is not disturbed when nothing needs it any more.
    let old = old.later(25 * HOUR);
    let report = store.verify(&VerifyOptions::default(), &mut |_| {
        let prune = || old.prune(&PruneOptions::keep(1)).unwrap();
        std::thread::scope(|scope| _ = scope.spawn(prune).join().unwrap());
        true
    });
    let report = report.unwrap();
    assert_eq!((report.log_objects, report.problems.len(), logs(&place)), (1, 0, 0), "{report:?}");
    assert_whole(&store);
}

/// A store at which `hook` moves the clock of the writer by this many hours.
fn with_slow(place: &Place, request: &'static str, folder: &'static str, hours: u64) -> (Arc<FaultStore>, BackupStore) {
    let ms = Arc::new(AtomicU64::new(1_000_000));
    let now = Arc::clone(&ms);
    let slow = FaultStore::hooked(place.objects(), move |of, path| {
        let is_slow = of == request && path.as_ref().contains(folder);
        ms.fetch_add(u64::from(is_slow) * hours * 3_600_000, Ordering::Relaxed);
    });
    let store = place.open_through(Arc::clone(&slow) as _, 1).clock(move || now.load(Ordering::Relaxed));
    (slow, store)
}

/// Regression: holds were renewed between two objects only, so no backup with such an object ended.
#[test]
fn hold_is_renewed_during_a_large_upload() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), with_large_table(&dir.path().join("db"), 17 << 20));
    create(&with_slow(&place, "part", "files", 7).1, &db).unwrap();
    assert_whole(&place.open());
}

/// Regression: the manifest was left although its objects might be gone.
#[test]
fn manifest_that_is_too_late_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 29));
    assert_eq!(create(&with_slow(&place, "put", "backups", 19).1, &db).unwrap_err().kind(), "too_slow");
    assert!(place.open().list().unwrap().is_empty());
}

/// Regression: the other uploads were dropped with their parts, which a cloud store keeps.
#[test]
fn failed_backup_aborts_uploads_in_parts() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), with_large_table(&dir.path().join("db"), 17 << 20));
    let has_begun = Arc::new(AtomicBool::new(false));
    let begun = Arc::clone(&has_begun);
    let counted = FaultStore::hooked(place.objects(), move |of, _| {
        begun.fetch_or(of == "part", Ordering::Relaxed);
    });
    let store = place.open_through(Arc::clone(&counted) as _, 1).concurrency(9);
    let is_other = |object: &str| has_begun.load(Ordering::Relaxed) && !object.starts_with("files/");
    let stop = store.create(&db, &Default::default(), &mut |of| of.stage == Stage::Reading || !is_other(of.object));
    assert_eq!(stop.unwrap_err().kind(), "interrupted");
    assert_eq!(counted.open_uploads(), 0);
}

//! Object stores that fail, and processes that end, at every request.

use crate::support::{Fault, FaultStore, Place, content, content_at, create, filled, restore, stride, sync};
use azekura_backup::{BackupError, CreateOptions, PruneOptions, RestoreOptions, WatchStep};
use std::sync::Arc;
use std::time::Duration;

const FAULTS: [Fault; 3] = [Fault::Refused, Fault::AnswerLost, Fault::HalfWritten];

#[test]
fn create_goes_on_after_a_kill_at_any_request() {
    let dir = tempfile::tempdir().unwrap();
    let db = filled(&dir.path().join("db"), 11);
    let expected = content(&db);
    let count = {
        let (place, whole) = (Place::new(), FaultStore::new(Place::new().objects()));
        create(&place.open_through(Arc::clone(&whole) as _, 1), &db).unwrap();
        whole.requests()
    };
    assert!(count > 20, "{count}");
    let mut kills = 0;
    for k in (1..=count).step_by(stride()) {
        for fault in FAULTS {
            let place = Place::new();
            let killed = FaultStore::killed_at(place.objects(), k, fault);
            let outcome = create(&place.open_through(killed, 1), &db);
            kills += u64::from(outcome.is_err());
            let report = create(&place.open(), &db);
            let report = match report {
                // Half of a record or of a manifest. Object stores write objects whole, so a person has to look at it.
                Err(BackupError::WrongContent { .. } | BackupError::NotABackupStore { .. })
                    if fault == Fault::HalfWritten =>
                {
                    continue;
                }
                other => other.unwrap_or_else(|error| panic!("{k} {fault:?}: {error}")),
            };
            assert!(report.backup.bytes > 0);
            if k % 5 == 0 {
                let target = dir.path().join(format!("{k}{fault:?}"));
                restore(&place.open(), &target, RestoreOptions::default()).unwrap();
                assert_eq!(content_at(&target), expected, "{k} {fault:?}");
            }
        }
    }
    assert!(kills >= count / stride() as u64, "{kills} of {count}");
}

#[test]
fn killed_create_uploads_no_object_twice() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 12));
    let whole = FaultStore::new(Place::new().objects());
    let first = create(&place.open_through(Arc::clone(&whole) as _, 1), &db).unwrap();
    // The last request but one writes the manifest.
    let place = Place::new();
    let killed = FaultStore::killed_at(place.objects(), whole.requests() - 1, Fault::Refused);
    create(&place.open_through(killed, 1), &db).unwrap_err();
    let second = create(&place.open(), &db).unwrap();
    // The manifest of the checkpoint has another random id.
    assert!(second.uploaded_objects <= 1, "{second:?}");
    assert!(second.uploaded_bytes < first.uploaded_bytes / 2);
}

#[test]
fn restore_goes_on_after_a_kill_at_any_request() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 13));
    create(&place.open(), &db).unwrap();
    let expected = content(&db);
    for k in (1..).step_by(stride()) {
        let killed = FaultStore::killed_at(place.objects(), k, Fault::Refused);
        let target = dir.path().join(format!("copy{k}"));
        if restore(&place.open_through(killed, 1), &target, RestoreOptions::default()).is_ok() {
            assert!(k > 5);
            break;
        }
        assert!(!target.exists(), "{k}");
        restore(&place.open(), &target, RestoreOptions::default()).unwrap();
        assert_eq!(content_at(&target), expected, "{k}");
    }
}

#[test]
fn throttled_store_is_asked_again() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 14));
    for n in 2..5 {
        let slow = FaultStore::throttled(place.objects(), n);
        let store = place.open_through(slow, 4);
        create(&store, &db).unwrap();
        let target = dir.path().join(format!("copy{n}"));
        restore(&store, &target, RestoreOptions::default()).unwrap();
        assert_eq!(content_at(&target), content(&db));
    }
}

#[test]
fn full_store_is_a_typed_error() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 15));
    create(&place.open(), &db).unwrap();
    let full = FaultStore::full(place.objects());
    let error = create(&place.open_through(full, 4), &db).unwrap_err();
    assert_eq!(error.kind(), "out_of_space", "{error}");
    restore(&place.open(), &dir.path().join("copy"), RestoreOptions::default()).unwrap();
}

#[test]
fn stale_listings_lose_no_backup() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 16));
    create(&place.open(), &db).unwrap();
    let store = place.open_through(FaultStore::with_stale_listings(place.objects()), 1);
    for i in 0..3 {
        db.partition("plain").unwrap().insert("new", [i]).unwrap();
        create(&store, &db).unwrap();
        store.prune(&PruneOptions::keep(1)).unwrap();
    }
    restore(&place.open(), &dir.path().join("copy"), RestoreOptions::default()).unwrap();
    assert_eq!(content_at(&dir.path().join("copy")), content(&db));
}

#[test]
fn watch_goes_on_after_a_failure_at_any_request() {
    let dir = tempfile::tempdir().unwrap();
    let db = filled(&dir.path().join("db"), 17);
    let plain = db.partition("plain").unwrap();
    for fault in [Fault::Refused, Fault::AnswerLost] {
        for k in 1..6 {
            let place = Place::new();
            let base = place.open();
            let mut watcher = base.watch(&db, CreateOptions::default()).unwrap();
            watcher.step(&mut |_| true).unwrap();
            drop(watcher);
            // The watcher of a process that ends while it ships, and that of the next one.
            let killed = place.open_through(FaultStore::killed_at(place.objects(), 6 + k, fault), 1);
            plain.insert("last", format!("{fault:?} {k}")).unwrap();
            sync(&db);
            if let Ok(mut watcher) = killed.watch(&db, CreateOptions::default()) {
                drop(watcher.step(&mut |_| true));
            }
            plain.insert("very last", format!("{fault:?} {k}")).unwrap();
            sync(&db);
            let mut watcher = base.watch(&db, CreateOptions::default()).unwrap();
            while watcher.step(&mut |_| true).unwrap() != WatchStep::Idle {}
            let target = dir.path().join(format!("{fault:?}{k}"));
            restore(&base, &target, RestoreOptions::default()).unwrap();
            assert_eq!(content_at(&target), content(&db), "{fault:?} {k}");
        }
    }
}

#[test]
fn prune_may_end_at_any_request() {
    let dir = tempfile::tempdir().unwrap();
    let db = filled(&dir.path().join("db"), 18);
    for k in (1..60).step_by(stride()) {
        let place = Place::new();
        for i in 0..3u8 {
            db.partition("plain").unwrap().insert("new", [i, k as u8]).unwrap();
            db.partition("plain").unwrap().flush().unwrap();
            create(&place.open(), &db).unwrap();
        }
        let killed = FaultStore::killed_at(place.objects(), k, Fault::AnswerLost);
        let killed = place.open_through(killed, 1).later(Duration::from_secs(30 * 60 * 60));
        let ended = killed.prune(&PruneOptions::keep(1)).is_ok();
        let report = place.open().verify(&Default::default(), &mut |_| true).unwrap();
        assert!(report.problems.is_empty(), "{k}: {report:?}");
        if ended {
            assert!(k > 10);
            break;
        }
    }
}

/// Regression: one of two watchers overwrote the log of the other, which then had a gap.
#[test]
fn store_that_overwrites_is_refused_by_watch() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 19));
    let store = place.open_through(FaultStore::overwriting(place.objects()), 1);
    create(&store, &db).unwrap();
    let error = store.watch(&db, CreateOptions::default()).unwrap_err();
    assert_eq!(error.kind(), "invalid", "{error}");
    place.open().watch(&db, CreateOptions::default()).unwrap();
}

/// Regression: a part of a manifest stayed under its name, and every later call failed.
#[test]
fn truncated_object_is_noticed_and_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let db = filled(&dir.path().join("db"), 20);
    let mut truncated = 0;
    for k in (1..80).step_by(stride()) {
        let place = Place::new();
        let faulty = place.open_through(FaultStore::fault_at(place.objects(), k, Fault::Truncated), 1);
        if let Err(error) = create(&faulty, &db) {
            assert_eq!(error.kind(), "corruption", "{k}: {error}");
            truncated += 1;
        }
        create(&place.open(), &db).unwrap_or_else(|error| panic!("{k}: {error}"));
        assert!(place.open().verify(&Default::default(), &mut |_| true).unwrap().problems.is_empty(), "{k}");
    }
    assert!(truncated > 5 || stride() > 1, "{truncated}");
}

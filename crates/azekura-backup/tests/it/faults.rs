//! Object stores that fail, and processes that end, at every request.

use crate::support::{
    Fault, FaultStore, Place, content, content_at, create, filled, restore, stride, sync, with_large_table,
};
use azekura::Database;
use azekura_backup::{BackupError, CreateOptions, Progress, PruneOptions, RestoreOptions, Stage, WatchStep};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const FAULTS: [Fault; 3] = [Fault::Refused, Fault::AnswerLost, Fault::HalfDone];
const ALL_FAULTS: [Fault; 6] =
    [Fault::Refused, Fault::AnswerLost, Fault::HalfDone, Fault::Truncated, Fault::Hangs, Fault::HangsLater];

/// A store with a backup and the log of two commits after it.
fn with_log(dir: &Path, seed: u64) -> (Place, Database) {
    let (place, db) = (Place::new(), filled(&dir.join("db"), seed));
    let store = place.open();
    let mut watcher = store.watch(&db, CreateOptions::default()).unwrap();
    for i in 0..3u8 {
        assert_ne!(watcher.step(&mut |_| true).unwrap(), WatchStep::Idle);
        db.partition("plain").unwrap().insert("after the backup", [i]).unwrap();
        db.partition("pool").unwrap().insert("after the backup", [i]).unwrap();
        sync(&db);
    }
    assert_ne!(watcher.step(&mut |_| true).unwrap(), WatchStep::Idle);
    drop(watcher);
    (place, db)
}

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
                    if fault == Fault::HalfDone =>
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
fn upload_in_parts_may_end_at_any_request() {
    let dir = tempfile::tempdir().unwrap();
    let db = with_large_table(&dir.path().join("db"), 17 << 20);
    let whole = FaultStore::new(Place::new().objects());
    create(&Place::new().open_through(Arc::clone(&whole) as _, 1), &db).unwrap();
    // The begin, three parts, and the end.
    let requests = whole.upload_requests();
    assert_eq!(requests.len(), 5, "{requests:?}");
    for k in requests.into_iter().step_by(stride().min(2)) {
        for fault in ALL_FAULTS.into_iter().step_by(stride().min(2)) {
            for is_killed in [true, false] {
                let place = Place::new();
                let faulty = match is_killed {
                    true => FaultStore::killed_at(place.objects(), k, fault),
                    false => FaultStore::fault_at(place.objects(), k, fault),
                };
                let outcome = create(&place.open_through(Arc::clone(&faulty) as _, 1), &db);
                assert!(faulty.requests() >= k);
                if let Err(error) = outcome {
                    assert!(matches!(error.kind(), "store" | "corruption"), "{k} {fault:?}: {error}");
                    assert!(is_killed || faulty.open_uploads() == 0, "{k} {fault:?}: the upload was not aborted");
                } else {
                    assert!(!is_killed && fault == Fault::Truncated, "{k} {fault:?}");
                }
                create(&place.open(), &db).unwrap();
                let report = place.open().verify(&Default::default(), &mut |_| true).unwrap();
                assert!(report.problems.is_empty(), "{k} {fault:?}: {report:?}");
            }
        }
    }
}

/// Regression: the clients of cloud stores alone repeated a part, and the limit of the time of a request ended them.
#[test]
fn upload_in_parts_is_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let db = with_large_table(&dir.path().join("db"), 17 << 20);
    let whole = FaultStore::new(Place::new().objects());
    create(&Place::new().open_through(Arc::clone(&whole) as _, 1), &db).unwrap();
    for k in whole.upload_requests().into_iter().step_by(stride().min(2)) {
        for fault in ALL_FAULTS.into_iter().filter(|fault| *fault != Fault::Truncated) {
            let place = Place::new();
            let faulty = FaultStore::fault_at(place.objects(), k, fault);
            let mut ends = 0;
            let mut progress = |of: &Progress<'_>| {
                ends += u32::from(of.stage == Stage::Uploading && of.done == of.total);
                true
            };
            let store = place.open_through(Arc::clone(&faulty) as _, 2);
            let outcome = store.create(&db, &CreateOptions::default(), &mut progress);
            outcome.unwrap_or_else(|error| panic!("{k} {fault:?}: {error}"));
            assert_eq!((ends, faulty.open_uploads()), (1, 0), "{k} {fault:?}");
            let report = place.open().verify(&Default::default(), &mut |_| true).unwrap();
            assert!(report.problems.is_empty(), "{k} {fault:?}: {report:?}");
        }
    }
}

#[test]
fn restore_goes_on_after_a_kill_at_any_request() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = with_log(dir.path(), 13);
    let expected = content(&db);
    for fault in [Fault::Refused, Fault::HalfDone, Fault::Truncated] {
        let mut failed = 0;
        for k in (1..).step_by(stride()) {
            let killed = FaultStore::killed_at(place.objects(), k, fault);
            let target = dir.path().join(format!("{fault:?}{k}"));
            let outcome = restore(&place.open_through(Arc::clone(&killed) as _, 1), &target, RestoreOptions::default());
            if let Err(error) = outcome {
                failed += 1;
                // The last is that of half a record.
                let kinds = ["store", "corruption", "not_a_backup_store"];
                assert!(kinds.contains(&error.kind()), "{k} {fault:?}: {error}");
                assert!(!target.exists(), "{k} {fault:?}");
                restore(&place.open(), &target, RestoreOptions::default()).unwrap();
            }
            assert_eq!(content_at(&target), expected, "{k} {fault:?}");
            if killed.requests() < k {
                break;
            }
        }
        assert!(failed > 10 || stride() > 1, "{fault:?}: {failed}");
    }
}

#[test]
fn body_that_breaks_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = with_log(dir.path(), 21);
    for k in (1..).step_by(stride()) {
        let faulty = FaultStore::fault_at(place.objects(), k, Fault::HalfDone);
        let target = dir.path().join(format!("copy{k}"));
        restore(&place.open_through(Arc::clone(&faulty) as _, 2), &target, RestoreOptions::default()).unwrap();
        assert_eq!(content_at(&target), content(&db), "{k}");
        if faulty.requests() < k {
            assert!(k > 10);
            break;
        }
    }
}

/// In virtual time: the clock goes on to the next timer while a request hangs.
#[test]
fn store_that_never_answers_is_asked_again() {
    let dir = tempfile::tempdir().unwrap();
    let (full, db) = with_log(dir.path(), 22);
    for fault in [Fault::Hangs, Fault::HangsLater] {
        for k in (1..).step_by(stride()) {
            let place = Place::new();
            let faulty = FaultStore::fault_at(place.objects(), k, fault);
            create(&place.open_through(Arc::clone(&faulty) as _, 2), &db).unwrap();
            if faulty.requests() < k {
                assert!(k > 20);
                break;
            }
        }
        for k in (1..).step_by(stride()) {
            let faulty = FaultStore::fault_at(full.objects(), k, fault);
            let target = dir.path().join(format!("{fault:?}{k}"));
            restore(&full.open_through(Arc::clone(&faulty) as _, 2), &target, RestoreOptions::default()).unwrap();
            if faulty.requests() < k {
                assert!(k > 10);
                break;
            }
            assert_eq!(content_at(&target), content(&db), "{k} {fault:?}");
        }
    }
}

#[test]
fn hanging_request_fails_after_the_timeout() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 23));
    for timeout in [Duration::from_millis(5), Duration::from_secs(24 * 60 * 60)] {
        let faulty = FaultStore::fault_at(place.objects(), 1, Fault::Hangs);
        let error = create(&place.open_through(faulty, 1).timeout(timeout), &db).unwrap_err();
        assert_eq!(error.kind(), "store");
        assert!(error.to_string().contains(&format!("no answer for {timeout:?}")), "{error}");
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

/// From the record of the store over the backup to the second log object.
#[test]
fn watch_goes_on_after_a_kill_at_any_request() {
    let dir = tempfile::tempdir().unwrap();
    let db = filled(&dir.path().join("db"), 17);
    let plain = db.partition("plain").unwrap();
    let put = |value: String| {
        plain.insert("last", value).unwrap();
        sync(&db);
    };
    for fault in FAULTS {
        let mut kills = 0;
        for k in (1..).step_by(stride()) {
            let place = Place::new();
            let killed = FaultStore::killed_at(place.objects(), k, fault);
            let store = place.open_through(Arc::clone(&killed) as _, 1);
            let outcome = store.watch(&db, CreateOptions::default()).and_then(|mut watcher| {
                for i in 0..3 {
                    watcher.step(&mut |_| true)?;
                    put(format!("{fault:?} {k} {i}"));
                }
                Ok(())
            });
            kills += u64::from(outcome.is_err());
            put(format!("{fault:?} {k} at last"));
            // The watcher of the next process.
            let base = place.open();
            let next = base.watch(&db, CreateOptions::default()).and_then(|mut watcher| {
                while watcher.step(&mut |_| true)? != WatchStep::Idle {}
                Ok(())
            });
            match next {
                Err(BackupError::WrongContent { .. } | BackupError::NotABackupStore { .. })
                    if fault == Fault::HalfDone =>
                {
                    // Half of the record or of the manifest, as in the test of `create`.
                    assert!(!place.lens().keys().any(|name| name.starts_with("log/")), "{k}");
                    continue;
                }
                other => other.unwrap_or_else(|error| panic!("{k} {fault:?}: {error}")),
            }
            let report = base.verify(&Default::default(), &mut |_| true).unwrap();
            let gaps = report.problems.iter().filter(|of| of.kind() == "gap").count();
            assert_eq!(gaps, 0, "{k} {fault:?}: {report:?}");
            if k % 3 == fault as u64 {
                let target = dir.path().join(format!("{fault:?}{k}"));
                restore(&base, &target, RestoreOptions::default()).unwrap();
                assert_eq!(content_at(&target), content(&db), "{k} {fault:?}");
            }
            if killed.requests() < k {
                break;
            }
        }
        assert!(kills > 30 || stride() > 1, "{fault:?}: {kills}");
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
            assert!(matches!(error.kind(), "corruption" | "not_a_backup_store"), "{k}: {error}");
            truncated += 1;
        }
        create(&place.open(), &db).unwrap_or_else(|error| panic!("{k}: {error}"));
        assert!(place.open().verify(&Default::default(), &mut |_| true).unwrap().problems.is_empty(), "{k}");
    }
    assert!(truncated > 5 || stride() > 1, "{truncated}");
}

//! Backups and restores of whole databases.

use crate::support::{Place, content, content_at, create, filled, open, restore, stride, sync};
use azekura::testing::SeededRng;
use azekura::{Config, PartitionCreateOptions};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use azekura_backup::{BackupError, BackupStore, CreateOptions, RestoreOptions, Stage, VerifyOptions};

#[test]
fn restored_database_equals_the_source() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 1));
    let store = place.open();
    let report = create(&store, &db).unwrap();
    assert_eq!(report.reused_bytes, 0);
    assert_eq!(report.backup.partitions, ["blobs", "plain", "pool"]);
    let restored = restore(&store, &dir.path().join("copy"), RestoreOptions::default()).unwrap();
    assert_eq!(restored.downloaded_bytes, report.backup.bytes);
    assert_eq!(content_at(&dir.path().join("copy")), content(&db));
    // The scratch directory and that of the restore are gone.
    let mut names: Vec<_> = dir.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["copy", "db"]);
}

#[test]
fn directories_hold_backups_too() {
    let dir = tempfile::tempdir().unwrap();
    let db = filled(&dir.path().join("db"), 2);
    let url = url::Url::from_directory_path(dir.path().join("backups")).unwrap();
    create(&BackupStore::open(dir.path().join("backups").to_str().unwrap(), []).unwrap(), &db).unwrap();
    let store = BackupStore::open(url.as_str(), []).unwrap();
    let again = create(&store, &db).unwrap();
    assert!(again.reused_bytes > again.uploaded_bytes);
    assert_eq!(store.list().unwrap().len(), 2);
    restore(&store, &dir.path().join("copy"), RestoreOptions::default()).unwrap();
    assert_eq!(content_at(&dir.path().join("copy")), content(&db));
}

#[test]
fn second_backup_uploads_only_changes() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 3));
    let store = place.open();
    let first = create(&store, &db).unwrap();
    let before = place.lens();
    db.partition("plain").unwrap().insert("new", vec![7; 500]).unwrap();
    db.partition("plain").unwrap().flush().unwrap();
    let second = create(&store, &db).unwrap();
    let new: Vec<_> = place.lens().into_iter().filter(|(name, _)| !before.contains_key(name)).collect();
    let data: u64 =
        new.iter().filter(|(name, _)| !name.starts_with("b") && !name.starts_with("h")).map(|(_, len)| len).sum();
    assert_eq!(data, second.uploaded_bytes);
    // One new table, the manifest, and the segments of the log.
    assert_eq!(new.iter().filter(|(name, _)| name.starts_with("files/")).count(), 1);
    assert!(second.uploaded_bytes < first.uploaded_bytes / 2, "{second:?} after {first:?}");
    // Both can be restored.
    let how = RestoreOptions::default().backup(&first.backup.id);
    restore(&store, &dir.path().join("first"), how).unwrap();
    assert!(open(&dir.path().join("first")).partition("plain").unwrap().get("new").unwrap().is_none());
    restore(&store, &dir.path().join("second"), RestoreOptions::default()).unwrap();
    assert_eq!(content_at(&dir.path().join("second")), content(&db));
}

#[test]
fn large_files_are_uploaded_in_pieces() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), open(&dir.path().join("db")));
    let plain = db.partition("plain").unwrap();
    let mut rng = azekura::testing::SeededRng::with_stream(4, 0);
    let mut batch = db.batch();
    for i in 0..20_000u32 {
        let value: Vec<u8> = (0..1000).map(|_| rng.below(256) as u8).collect();
        batch.insert(&plain, i.to_be_bytes(), value);
        if i % 1000 == 999 {
            batch.commit().unwrap();
            batch = db.batch();
        }
    }
    plain.flush().unwrap();
    plain.major_compact().unwrap();
    let store = place.open();
    let mut stages = Vec::new();
    let report = store.create(&db, &CreateOptions::default(), &mut |progress| {
        assert!(progress.done <= progress.total);
        stages.push((progress.stage, progress.done == progress.total));
        true
    });
    assert!(place.lens().iter().any(|(name, len)| name.starts_with("files/") && *len > 8 << 20), "{report:?}");
    assert!(stages.contains(&(Stage::Reading, true)) && stages.contains(&(Stage::Uploading, true)));
    restore(&store, &dir.path().join("copy"), RestoreOptions::default()).unwrap();
    assert_eq!(content_at(&dir.path().join("copy")), content(&db));
}

#[test]
fn verify_names_what_is_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 5));
    let store = place.open();
    create(&store, &db).unwrap();
    let verify = |how: VerifyOptions| store.verify(&how, &mut |_| true).unwrap();
    let clean = verify(VerifyOptions::default());
    assert!(clean.problems.is_empty() && clean.backups == 1 && clean.objects > 3, "{clean:?}");
    let lens = place.lens();
    let data: Vec<&String> =
        lens.keys().filter(|name| name.starts_with("files/") || name.starts_with("parts/")).collect();
    let flipped = data[0];
    let mut bytes = place.bytes(flipped).to_vec();
    *bytes.last_mut().unwrap() ^= 1;
    place.put(flipped, bytes);
    assert!(verify(VerifyOptions::default().quick(true)).problems.is_empty());
    let report = verify(VerifyOptions::default());
    assert!(matches!(&report.problems[..], [BackupError::WrongContent { object, .. }] if object == flipped));
    place.put(flipped, "short");
    place.remove(data[1]);
    for quick in [false, true] {
        let problems = verify(VerifyOptions::default().quick(quick)).problems;
        assert!(
            matches!(&problems[..], [BackupError::WrongContent { .. }, BackupError::Missing { .. }]),
            "{problems:?}"
        );
    }
    let failed = restore(&store, &dir.path().join("copy"), RestoreOptions::default()).unwrap_err();
    assert!(matches!(failed, BackupError::WrongContent { .. } | BackupError::Missing { .. }), "{failed}");
    assert!(!dir.path().join("copy").exists());
}

#[test]
fn damaged_file_is_uploaded_again() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 6));
    let store = place.open();
    create(&store, &db).unwrap();
    let name = place.lens().into_keys().find(|name| name.starts_with("files/")).unwrap();
    place.put(&name, "short");
    let report = create(&store, &db).unwrap();
    assert!(report.uploaded_objects > 0);
    restore(&store, &dir.path().join("copy"), RestoreOptions::default()).unwrap();
    assert_eq!(content_at(&dir.path().join("copy")), content(&db));
}

#[test]
fn interrupted_call_stops_and_can_be_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 7));
    let store = place.open();
    let mut uploads = 0;
    // The first object is the manifest of the checkpoint, which has another id in the next one.
    let stop = store.create(&db, &CreateOptions::default(), &mut |of| {
        uploads += u32::from(of.stage == Stage::Uploading);
        uploads < 3
    });
    let stop = stop.unwrap_err();
    assert_eq!(stop.kind(), "interrupted");
    assert!(store.list().unwrap().is_empty());
    let report = create(&store, &db).unwrap();
    assert!(report.reused_bytes > 0, "an object before the interruption is stored");
    let target = dir.path().join("copy");
    let stop = store.restore(&target, &RestoreOptions::default(), &mut |_| false).unwrap_err();
    assert_eq!(stop.kind(), "interrupted");
    restore(&store, &target, RestoreOptions::default()).unwrap();
    assert_eq!(content_at(&target), content(&db));
}

#[test]
fn scratch_left_by_a_killed_process_goes() {
    let dir = tempfile::tempdir().unwrap();
    let db = filled(&dir.path().join("db"), 8);
    let old = dir.path().join("db.azekura-backup-00000000.tmp");
    std::fs::create_dir_all(old.join("checkpoint")).unwrap();
    std::fs::write(old.join("LOCK"), "").unwrap();
    let other = dir.path().join("db.azekura-backup-00000001.tmp");
    std::fs::create_dir_all(&other).unwrap();
    let lock = std::fs::File::create(other.join("LOCK")).unwrap();
    lock.lock().unwrap();
    create(&Place::new().open(), &db).unwrap();
    assert!(!old.exists() && other.exists());
    let scratch = dir.path().join("elsewhere");
    std::fs::create_dir(&scratch).unwrap();
    let how = CreateOptions::default().scratch(&scratch);
    Place::new().open().create(&db, &how, &mut |_| true).unwrap();
    assert_eq!(scratch.read_dir().unwrap().count(), 0);
}

#[test]
fn follower_of_an_empty_database_is_backed_up() {
    let dir = tempfile::tempdir().unwrap();
    let writer = Config::new(dir.path().join("db")).workers(0).open().unwrap();
    let follower = Config::new(dir.path().join("db")).open_follower().unwrap();
    let store = Place::new().open();
    assert!(create(&store, &follower).unwrap().backup.is_durable);
    restore(&store, &dir.path().join("copy"), RestoreOptions::default()).unwrap();
    assert!(Config::new(dir.path().join("copy")).open().unwrap().list_partitions().is_empty());
    drop(writer);
}

/// Regression: if the backup had no commit after those that the follower had read, they counted as durable.
#[test]
fn unsynced_backup_beside_a_writer_is_not_durable() {
    let dir = tempfile::tempdir().unwrap();
    let db = Config::new(dir.path().join("db")).workers(0).sync_interval(None).open().unwrap();
    let plain = db.open_partition("plain", PartitionCreateOptions::default()).unwrap();
    plain.insert("a", "1").unwrap();
    let follower = Config::new(dir.path().join("db")).open_follower().unwrap();
    let (store, how) = (Place::new().open(), CreateOptions::default().durable_wait(Duration::ZERO));
    let create = |how| store.create(&follower, how, &mut |_| true).unwrap().backup.is_durable;
    assert!(!create(&how));
    plain.insert("a", "2").unwrap();
    sync(&db);
    assert!(create(&how));
}

#[test]
fn empty_database_can_be_restored() {
    let dir = tempfile::tempdir().unwrap();
    let db = Config::new(dir.path().join("db")).workers(0).open().unwrap();
    let store = Place::new().open();
    create(&store, &db).unwrap();
    std::fs::create_dir(dir.path().join("copy")).unwrap();
    restore(&store, &dir.path().join("copy"), RestoreOptions::default()).unwrap();
    let copy = Config::new(dir.path().join("copy")).open().unwrap();
    assert!(copy.list_partitions().is_empty());
    copy.open_partition("new", PartitionCreateOptions::default()).unwrap();
    sync(&copy);
}

/// Restores until the download of object `n` begins. Returns the bytes of the objects before it, or those of all if
/// the restore ends before.
fn restore_up_to_object(store: &BackupStore, target: &Path, n: usize) -> Result<u64, u64> {
    let (mut objects, mut current, mut done, mut complete) = (0, String::new(), 0, 0);
    let outcome = store.restore(target, &RestoreOptions::default(), &mut |of| {
        if of.stage == Stage::Downloading && of.object != current {
            (objects, complete) = (objects + 1, done);
            current = of.object.to_owned();
        }
        done = of.done;
        objects < n
    });
    match outcome {
        Ok(report) => Err(report.downloaded_bytes),
        Err(error) => {
            assert_eq!(error.kind(), "interrupted");
            Ok(complete)
        }
    }
}

#[test]
fn second_restore_downloads_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 9));
    let store = place.open();
    let whole = create(&store, &db).unwrap().backup.bytes;
    for n in (1..).step_by(stride()) {
        let target = dir.path().join(format!("copy{n}"));
        let Ok(complete) = restore_up_to_object(&store, &target, n) else {
            assert!(n > 5);
            break;
        };
        let report = restore(&store, &target, RestoreOptions::default()).unwrap();
        assert_eq!(report.downloaded_bytes, whole - complete, "{n}");
        assert_eq!(content_at(&target), content(&db), "{n}");
    }
}

#[test]
fn second_restore_keeps_parts_of_files() {
    const PART: u64 = 8 << 20;
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), open(&dir.path().join("db")));
    let (plain, mut rng) = (db.partition("plain").unwrap(), SeededRng::with_stream(10, 0));
    for i in 0..5u8 {
        let value: Vec<u8> = (0..4 << 20).map(|_| rng.below(256) as u8).collect();
        plain.insert([i], value).unwrap();
    }
    let store = place.open();
    let whole = create(&store, &db).unwrap().backup.bytes;
    let whole_parts = place.lens().iter().filter(|(name, len)| name.starts_with("parts/") && **len == PART).count();
    assert!(whole_parts >= 2, "the log has several parts: {:?}", place.lens());
    let mut after_parts = 0;
    for n in 1.. {
        let target = dir.path().join(format!("copy{n}"));
        let Ok(complete) = restore_up_to_object(&store, &target, n) else { break };
        // Bytes of a file that are not those of the backup, in the second part.
        let mut damaged = 0;
        for entry in dir.path().join(format!("copy{n}.azekura-restore.tmp")).read_dir().unwrap() {
            let mut file = File::options().read(true).write(true).open(entry.unwrap().path()).unwrap();
            if file.metadata().unwrap().len() >= 2 * PART {
                after_parts += 1;
                file.seek(SeekFrom::Start(PART + 100)).unwrap();
                file.write_all(&[1, 2, 3]).unwrap();
                damaged = PART;
            }
        }
        let report = restore(&store, &target, RestoreOptions::default()).unwrap();
        assert_eq!(report.downloaded_bytes, whole - complete + damaged, "{n}");
        assert!(content_at(&target) == content(&db), "{n}");
        std::fs::remove_dir_all(&target).unwrap();
    }
    assert!(after_parts >= 1);
}

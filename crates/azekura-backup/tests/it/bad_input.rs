//! Stores that are not those of a database, and other wrong arguments.

use crate::support::{Place, content_at, create, filled, restore};
use azekura::ErrorKind;
use azekura_backup::{BackupError, BackupStore, PruneOptions, RestoreOptions, VerifyOptions};

#[test]
fn foreign_objects_are_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 51));
    place.put("holiday.jpg", "a picture");
    let store = place.open();
    assert_eq!(create(&store, &db).unwrap_err().kind(), "not_a_backup_store");
    assert_eq!(store.list().unwrap_err().kind(), "not_a_backup_store");
    assert_eq!(place.lens().len(), 1);
    place.put("azekura-backup.json", "{\"format\": \"another program\", \"version\": 1}");
    assert_eq!(create(&store, &db).unwrap_err().kind(), "not_a_backup_store");
}

/// Regression: such a file ended all backups, and `prune` deleted it from the folders of objects.
#[test]
fn files_of_the_desktop_do_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 58));
    create(&place.open(), &db).unwrap();
    for folder in ["backups", "files", "holds", "log", "parts"] {
        place.put(&format!("{folder}/.DS_Store"), "view");
    }
    let store = place.open_through(crate::support::FaultStore::aged(&place), 1);
    create(&store, &db).unwrap();
    store.prune(&PruneOptions::keep(1)).unwrap();
    assert_eq!(store.list().unwrap().len(), 1);
    assert_eq!(place.lens().keys().filter(|name| name.ends_with("Store")).count(), 5);
    assert!(store.verify(&VerifyOptions::default(), &mut |_| true).unwrap().problems.is_empty());
}

/// Regression: sums of such numbers overflowed.
#[test]
fn huge_numbers_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 59));
    let store = place.open();
    let id = create(&store, &db).unwrap().backup.id;
    let record = String::from_utf8(place.bytes("azekura-backup.json").to_vec()).unwrap();
    place.put("azekura-backup.json", record.replace("86400", &u64::MAX.to_string()));
    store.prune(&PruneOptions::keep(1)).unwrap();
    create(&store, &db).unwrap();
    crate::support::edit_manifest(&place, &id, |text| {
        let begin = text.find("\"files\"").unwrap();
        let mut lines: Vec<String> = text[begin..].lines().map(str::to_owned).collect();
        for line in lines.iter_mut().filter(|line| line.contains("\"bytes\": ")) {
            *line = format!("{}{},", &line[..line.find(": ").unwrap() + 2], u64::MAX / 2);
        }
        // Files of one part.
        text[..begin].to_owned() + &lines.join("\n")
    });
    assert_eq!(store.list().unwrap_err().kind(), "corruption");
}

#[test]
fn wrong_ends_of_the_log_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 60));
    db.close().unwrap();
    let store = place.open();
    let id = create(&store, &crate::support::open(&dir.path().join("db"))).unwrap().backup.id;
    let edit = |ends: &str| {
        crate::support::edit_manifest(&place, &id, |text| {
            let (begin, rest) = text.split_once("\"wal_ends\"").unwrap();
            let end = rest.find("\"partitions\"").unwrap();
            format!("{begin}\"wal_ends\": [{ends}], {}", &rest[end..])
        });
        store.list().map(drop).map_err(|error| error.kind())
    };
    for ends in ["", "[0, 5]", "[0, null], [1, 5]"] {
        assert_eq!(edit(ends), Ok(()), "{ends}");
    }
    // Beyond the epoch or the commits of the backup, not rising, and no pairs.
    for ends in ["[9, 5]", "[0, 999999]", "[0, 5], [0, 6]", "[0, 5], [1, 5]", "[0, 5], [1, null]", "5"] {
        assert_eq!(edit(ends), Err("corruption"), "{ends}");
    }
}

#[test]
fn empty_store_has_no_backup() {
    let dir = tempfile::tempdir().unwrap();
    let (store, target) = (Place::new().open(), dir.path().join("copy"));
    assert_eq!(store.list().unwrap_err().kind(), "no_backup");
    assert_eq!(restore(&store, &target, RestoreOptions::default()).unwrap_err().kind(), "no_backup");
    assert!(!target.exists());
}

#[test]
fn other_database_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 52));
    let store = place.open();
    create(&store, &db).unwrap();
    let other = filled(&dir.path().join("other"), 52);
    let before = place.lens();
    assert_eq!(create(&store, &other).unwrap_err().kind(), "other_database");
    assert_eq!(store.watch(&other, Default::default()).unwrap_err().kind(), "other_database");
    // A restored copy is another database too.
    restore(&store, &dir.path().join("copy"), RestoreOptions::default()).unwrap();
    let copy = crate::support::open(&dir.path().join("copy"));
    assert_eq!(create(&store, &copy).unwrap_err().kind(), "other_database");
    assert_eq!(place.lens(), before);
}

#[test]
fn newer_versions_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 53));
    create(&place.open(), &db).unwrap();
    let record = String::from_utf8(place.bytes("azekura-backup.json").to_vec()).unwrap();
    place.put("azekura-backup.json", record.replace("\"version\": 1", "\"version\": 2"));
    assert_eq!(place.open().list().unwrap_err().kind(), "newer_version");
    assert_eq!(create(&place.open(), &db).unwrap_err().kind(), "newer_version");
}

#[test]
fn changed_manifest_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 54));
    let store = place.open();
    let good = create(&store, &db).unwrap().backup.id;
    let first = place.lens();
    create(&store, &db).unwrap();
    let is_new = |name: &String| name.starts_with("backups/") && !first.contains_key(name);
    let name = place.lens().into_keys().find(is_new).unwrap();
    let text = String::from_utf8(place.bytes(&name).to_vec()).unwrap();
    place.put(&name, text.replace("\"MANIFEST\"", "\"MANIFESS\""));
    assert_eq!(store.list().unwrap_err().kind(), "corruption");
    assert_eq!(create(&store, &db).unwrap_err().kind(), "corruption");
    assert_eq!(store.prune(&PruneOptions::keep(1)).unwrap_err().kind(), "corruption");
    let report = store.verify(&VerifyOptions::default(), &mut |_| true).unwrap();
    assert_eq!(report.problems.iter().map(|of| of.kind()).collect::<Vec<_>>(), ["corruption"]);
    // The newest backup may be the damaged one; another can be restored by its id.
    let target = dir.path().join("copy");
    assert_eq!(restore(&store, &target, RestoreOptions::default()).unwrap_err().kind(), "corruption");
    restore(&store, &target, RestoreOptions::default().backup(good)).unwrap();
}

#[test]
fn target_with_files_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 55));
    let store = place.open();
    create(&store, &db).unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "text").unwrap();
    for target in [db.path(), &file] {
        assert_eq!(restore(&store, target, RestoreOptions::default()).unwrap_err().kind(), "invalid");
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"text");
    let missing = RestoreOptions::default().backup("0000000000000-00000000");
    assert_eq!(restore(&store, &dir.path().join("copy"), missing).unwrap_err().kind(), "no_backup");
    // Something else in the directory of an earlier, interrupted restore.
    let tmp = dir.path().join("copy.azekura-restore.tmp");
    std::fs::create_dir_all(tmp.join("folder")).unwrap();
    std::fs::write(tmp.join("MANIFEST"), "old").unwrap();
    restore(&store, &dir.path().join("copy"), RestoreOptions::default()).unwrap();
    assert!(!tmp.exists());
    content_at(&dir.path().join("copy"));
}

/// Regression: both calls wrote to one directory. The second removed files of the first, which was published without.
#[test]
fn second_restore_to_a_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 56));
    let (store, second) = (place.open(), place.open());
    create(&store, &db).unwrap();
    db.partition("plain").unwrap().major_compact().unwrap();
    let other = create(&store, &db).unwrap().backup.id;
    let target = dir.path().join("copy");
    let mut refused = Vec::new();
    let report = store.restore(&target, &RestoreOptions::default(), &mut |_| {
        let how = || RestoreOptions::default().backup(&other);
        let restore = || second.restore(&target, &how(), &mut |_| false);
        refused.extend(std::thread::scope(|scope| scope.spawn(restore).join().unwrap()).err());
        true
    });
    report.unwrap();
    assert!(matches!(&refused[0], BackupError::Database(error) if error.kind() == ErrorKind::Locked), "{refused:?}");
    assert_eq!(content_at(&target), crate::support::content(&db));
    assert_eq!(dir.path().read_dir().unwrap().count(), 2, "the lock is gone");
}

/// Regression: the files of the other directory were removed.
#[cfg(unix)]
#[test]
fn links_to_other_directories_are_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let (place, db) = (Place::new(), filled(&dir.path().join("db"), 57));
    create(&place.open(), &db).unwrap();
    let home = dir.path().join("home");
    std::fs::create_dir(&home).unwrap();
    std::fs::write(home.join("letter"), "text").unwrap();
    std::os::unix::fs::symlink(&home, dir.path().join("copy.azekura-restore.tmp")).unwrap();
    let error = restore(&place.open(), &dir.path().join("copy"), RestoreOptions::default()).unwrap_err();
    assert_eq!(error.kind(), "io", "{error}");
    assert_eq!(std::fs::read(home.join("letter")).unwrap(), b"text");
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    std::os::unix::fs::symlink("empty", dir.path().join("link")).unwrap();
    let error = restore(&place.open(), &dir.path().join("link"), RestoreOptions::default()).unwrap_err();
    assert_eq!(error.kind(), "invalid", "{error}");
}

#[test]
fn unknown_places_are_refused() {
    for place in ["ftp://host/path", "nothing://x", "s3://"] {
        assert_eq!(BackupStore::open(place, []).unwrap_err().kind(), "invalid", "{place}");
    }
    BackupStore::open("memory:///", []).unwrap();
    let secret = BackupStore::open("s3://key:secret@bucket/path", []).unwrap_err();
    assert!(secret.kind() == "invalid" && !secret.to_string().contains("secret"), "{secret}");
}

//! Directories that cannot be opened: each gives a typed error that names the file and says what to do, and the
//! directory is unchanged afterwards.
//!
//! Modules, in reading order: `locks` (a directory that is open already), `readers` (opening read-only).

mod locks;
mod readers;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use azekura::{Config, Database, Error, ErrorKind, Result};
use xxhash_rust::xxh3::xxh3_64;

/// A database on the disk without worker threads.
fn config(dir: &Path) -> Config {
    Config::new(dir).workers(0)
}

fn expect_error<T>(result: Result<T>) -> Error {
    result.err().expect("an error")
}

/// The mode, length, modification time and bytes of every file below a directory.
fn snapshot_dir(dir: &Path) -> BTreeMap<PathBuf, (u32, u64, i64, Vec<u8>)> {
    let mut found = BTreeMap::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let about = fs::symlink_metadata(&path).unwrap();
            if about.is_dir() {
                open.push(path.clone());
            }
            let bytes = if about.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
            found.insert(path, (about.mode(), about.len(), about.mtime_nsec(), bytes));
        }
    }
    found
}

/// Checks that opens of every kind fail with this kind, name this file, and change nothing.
fn assert_open_refused(dir: &Path, kind: ErrorKind, file: &Path) -> String {
    let before = dir.exists().then(|| snapshot_dir(dir));
    let errors = [config(dir).open(), config(dir).open_read_only(), config(dir).open_follower()].map(expect_error);
    for error in &errors {
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(error.file(), Some(file), "{error}");
    }
    assert!(before == dir.exists().then(|| snapshot_dir(dir)), "a failed open changed {}", dir.display());
    errors[0].message().to_owned()
}

/// A database with tables, and with records in the WAL only, as a killed process leaves it.
fn create_sample(dir: &Path) {
    let db: Database = config(dir).open().unwrap();
    let p = db.open_partition("p", Default::default()).unwrap();
    (0..100u8).for_each(|n| p.insert([n], [n; 50]).unwrap());
    p.flush().unwrap();
    (100..120u8).for_each(|n| p.insert([n], [n; 50]).unwrap());
    // The copy is the state after a crash; no process holds its lock.
    let copy = dir.with_extension("copy");
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    drop((p, db));
    fs::remove_dir_all(dir).unwrap();
    fs::rename(copy, dir).unwrap();
}

fn files_ending_with(dir: &Path, ending: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.to_string_lossy().ends_with(ending));
    files.sort();
    files
}

#[test]
fn directory_without_database_is_not_changed() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("photos");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("cat.jpg"), b"meow").unwrap();
    let message = assert_open_refused(&dir, ErrorKind::Invalid, &dir);
    assert!(message.contains("cat.jpg") && message.contains("choose"), "{message}");
    let file = temporary.path().join("file");
    fs::write(&file, b"not a directory").unwrap();
    for opened in [config(&file).open(), config(&file).open_read_only(), config(&file).open_follower()] {
        assert_eq!(expect_error(opened).file(), Some(&*file));
    }
    assert_eq!(fs::read(&file).unwrap(), b"not a directory");
    let (missing, empty) = (temporary.path().join("missing"), temporary.path().join("empty"));
    fs::create_dir(&empty).unwrap();
    for dir in [&missing, &empty] {
        for opened in [config(dir).open_read_only(), config(dir).open_follower()] {
            let error = expect_error(opened);
            assert_eq!((error.kind(), error.file()), (ErrorKind::NotFound, Some(&**dir)), "{error}");
        }
    }
    assert!(!missing.exists(), "opening for reading creates nothing");
    assert!(snapshot_dir(&empty).is_empty());
    config(&empty).open().unwrap();
}

#[test]
fn missing_and_truncated_files_are_named() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("db");
    create_sample(&dir);
    let names = [files_ending_with(&dir, ".sst"), files_ending_with(&dir, ".wal"), vec![dir.join("MANIFEST")]].concat();
    assert!(names.len() >= 3);
    for path in names {
        let bytes = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let message = assert_open_refused(&dir, ErrorKind::Corruption, &path);
        assert!(message.contains("missing"), "{message}");
        for keep in [0, 1, 63, 100] {
            fs::write(&path, &bytes[..keep]).unwrap();
            assert_open_refused(&dir, ErrorKind::Corruption, &path);
        }
        fs::write(&path, &bytes).unwrap();
    }
    let db = config(&dir).open().unwrap();
    assert_eq!(db.metrics().replayed_records, 20);
    assert_eq!(db.open_partition("p", Default::default()).unwrap().len().unwrap(), 120);
}

#[test]
fn newer_format_is_unsupported() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("db");
    create_sample(&dir);
    let names = [files_ending_with(&dir, ".sst"), files_ending_with(&dir, ".wal"), vec![dir.join("MANIFEST")]].concat();
    for path in names {
        let bytes = fs::read(&path).unwrap();
        // Format version, incompatible features, encryption context: see docs/format/file_header.md.
        for (at, what) in [(8, "version"), (20, "feature"), (40, "encrypt")] {
            let mut newer = bytes.clone();
            newer[at] = newer[at].wrapping_add(1);
            let sum = xxh3_64(&newer[..56]);
            newer[56..64].copy_from_slice(&sum.to_le_bytes());
            fs::write(&path, &newer).unwrap();
            if path.extension().is_some_and(|e| e == "sst") {
                // Tables are opened when they are first needed, but those of a follower before it is open.
                let db = config(&dir).open_read_only().unwrap();
                let before = snapshot_dir(&dir);
                let of_reader = expect_error(db.open_partition("p", Default::default()).unwrap().get([1]));
                for found in [of_reader, expect_error(config(&dir).open_follower())] {
                    assert_eq!((found.kind(), found.file()), (ErrorKind::Unsupported, Some(&*path)), "{found}");
                }
                assert!(before == snapshot_dir(&dir), "a failed open changed {}", dir.display());
            } else {
                let message = assert_open_refused(&dir, ErrorKind::Unsupported, &path);
                assert!(message.contains(what), "{message}");
            }
        }
        // Unknown compatible features are ignored.
        let mut newer = bytes.clone();
        newer[12] = 1;
        let sum = xxh3_64(&newer[..56]);
        newer[56..64].copy_from_slice(&sum.to_le_bytes());
        fs::write(&path, &newer).unwrap();
        for opened in [config(&dir).open_read_only(), config(&dir).open_follower()] {
            assert_eq!(opened.unwrap().partition("p").unwrap().len().unwrap(), 120);
        }
        fs::write(&path, &bytes).unwrap();
    }
    config(&dir).open().unwrap();
}

#[test]
fn symlinks_to_files_are_not_followed() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("db");
    create_sample(&dir);
    for path in [files_ending_with(&dir, ".wal"), vec![dir.join("MANIFEST")]].concat() {
        let elsewhere = temporary.path().join("elsewhere");
        fs::rename(&path, &elsewhere).unwrap();
        symlink(&elsewhere, &path).unwrap();
        let before = fs::read(&elsewhere).unwrap();
        for opened in [config(&dir).open(), config(&dir).open_read_only(), config(&dir).open_follower()] {
            assert_eq!(expect_error(opened).file(), Some(&*path));
        }
        assert!(fs::read(&elsewhere).unwrap() == before && fs::symlink_metadata(&path).unwrap().is_symlink());
        fs::remove_file(&path).unwrap();
        fs::rename(&elsewhere, &path).unwrap();
    }
    config(&dir).open().unwrap();
}

#[test]
fn files_and_directories_are_their_owners() {
    let temporary = tempfile::tempdir().unwrap();
    let db = config(&temporary.path().join("above/db")).open().unwrap();
    let p = db.open_partition("p", Default::default()).unwrap();
    p.insert("k", "v").unwrap();
    p.flush().unwrap();
    db.checkpoint(temporary.path().join("copy")).unwrap();
    let modes = snapshot_dir(temporary.path());
    assert!(modes.len() > 8);
    for (path, (mode, ..)) in modes {
        let wanted = if path.is_dir() { 0o700 } else { 0o600 };
        assert_eq!(mode & 0o777, wanted, "{}", path.display());
    }
}

#[test]
fn a_directory_that_may_not_be_written_is_named() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("db");
    create_sample(&dir);
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o500)).unwrap();
    // The superuser may write to any file.
    let is_superuser = fs::write(dir.join("probe"), b"").is_ok();
    if is_superuser {
        fs::remove_file(dir.join("probe")).unwrap();
    } else {
        let refused = expect_error(config(&dir).open());
        assert!(
            refused.kind() == ErrorKind::Io && refused.file().is_some_and(|file| file.starts_with(&dir)),
            "{refused}"
        );
    }
    config(&dir).open_read_only().unwrap();
    config(&dir).open_follower().unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).unwrap();
}

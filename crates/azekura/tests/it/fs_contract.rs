//! The contract of a file system, run as one script on all implementations, and the losses that the simulated one
//! permits.

// The only file outside of `vfs` that needs std's file functions: to create files that the engine never creates.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use azekura::fs::{DiskFs, File, Fs, LockMode, OpenMode, SystemEnv};
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, Survival, TestEnv};
use azekura::{Error, ErrorKind, Result};

use crate::testkit::test_dir::{file_bytes, read_file};

fn os_error_kind<T: Debug>(result: Result<T>) -> io::ErrorKind {
    result.unwrap_err().os_kind().expect("an error of the system")
}

fn error_kind<T>(result: Result<T>) -> ErrorKind {
    result.err().expect("an error").kind()
}

/// Creates a file with that content.
fn create_file(fs: &dyn Fs, path: &Path, content: &[u8]) -> Arc<dyn File> {
    let file = fs.open(path, OpenMode::Create).unwrap();
    file.write_at(content, 0).unwrap();
    file
}

fn list_dir(fs: &dyn Fs, dir: &Path) -> Vec<(String, u64, bool)> {
    let mut list: Vec<_> = fs.read_dir(dir).unwrap().into_iter().map(|e| (e.name, e.len, e.is_file)).collect();
    list.sort();
    list
}

/// The script. `root` is a directory that exists and is empty.
fn check_contract(fs: &dyn Fs, root: &Path) {
    check_files(fs, &root.join("files"));
    check_lengths(fs, &root.join("lengths"));
    check_mappings(fs, &root.join("mappings"));
    check_names(fs, &root.join("names"));
    check_errors(fs, &root.join("refusals"));
    check_locks(fs, &root.join("locks"));
    let mut dirs = ["files", "lengths", "locks", "mappings", "names", "refusals"].map(|d| (d.to_owned(), 0, false));
    dirs.sort();
    assert_eq!(list_dir(fs, root), dirs);
    for (name, ..) in dirs {
        fs.remove_dir_all(&root.join(name)).unwrap();
    }
    fs.sync_dir(root).unwrap();
    assert_eq!(list_dir(fs, root), []);
}

fn check_files(fs: &dyn Fs, dir: &Path) {
    let path = dir.join("f");
    assert_eq!(os_error_kind(fs.open(&path, OpenMode::Create)), io::ErrorKind::NotFound, "no directory yet");
    fs.create_dir_all(dir).unwrap();
    fs.create_dir_all(dir).unwrap();
    assert_eq!(os_error_kind(fs.open(&path, OpenMode::Read)), io::ErrorKind::NotFound);
    assert_eq!(os_error_kind(fs.open(&path, OpenMode::Write)), io::ErrorKind::NotFound);
    assert!(!fs.exists(&path).unwrap());

    let file = create_file(fs, &path, b"hello world");
    assert!(fs.exists(&path).unwrap());
    assert_eq!(os_error_kind(fs.open(&path, OpenMode::Create)), io::ErrorKind::AlreadyExists);
    let mut buf = [b'.'; 8];
    assert_eq!(file.read_at(&mut buf, 6).unwrap(), 5, "a read at the end of a file is short");
    assert_eq!(&buf, b"world...");
    assert_eq!((file.read_at(&mut buf, 11).unwrap(), file.read_at(&mut buf, u64::MAX).unwrap()), (0, 0));
    assert_eq!(file.read_at(&mut [], 0).unwrap(), 0);
    let early = file.read_exact_at(&mut buf, 6).unwrap_err();
    assert_eq!((early.kind(), early.offset(), early.file()), (ErrorKind::Corruption, Some(6), Some(&*path)));

    file.write_at(b"", 500).unwrap();
    assert_eq!(file.length().unwrap(), 11, "an empty write changes no length");
    file.write_at(b"!", 5_000).unwrap();
    file.sync_data().unwrap();
    file.sync_all().unwrap();
    let all = read_file(fs, &path);
    assert!(all.len() == 5_001 && &all[..11] == b"hello world" && all[11..5_000].iter().all(|b| *b == 0));

    let reader = fs.open(&path, OpenMode::Read).unwrap();
    fs.open(&path, OpenMode::Write).unwrap().write_at(b"HELLO", 0).unwrap();
    reader.read_exact_at(&mut buf[..5], 0).unwrap();
    assert_eq!(&buf[..5], b"HELLO", "handles share the file");
    let refused = [reader.write_at(b"x", 0), reader.set_length(1), reader.allocate(9_999), reader.map(10).map(|_| ())];
    assert!(refused.iter().all(|r| r.as_ref().is_err_and(|e| e.kind() == ErrorKind::Io && e.file().is_some())));
    assert_eq!(error_kind(file.write_at(b"x", u64::MAX)), ErrorKind::OutOfSpace);
    assert_eq!(file.length().unwrap(), 5_001);
}

fn check_lengths(fs: &dyn Fs, dir: &Path) {
    fs.create_dir_all(&dir.join("deep/er")).unwrap();
    let file = create_file(fs, &dir.join("f"), &[7; 10_000]);
    file.set_length(5_000).unwrap();
    file.set_length(6_000).unwrap();
    let now = file_bytes(&*file);
    assert!(now[..5_000] == [7; 5_000] && now[5_000..] == [0; 1_000], "truncated bytes stay zero");
    file.allocate(0).unwrap();
    file.allocate(100).unwrap();
    assert_eq!(file.length().unwrap(), 6_000, "allocate never truncates");
    file.allocate(300_000).unwrap();
    let now = file_bytes(&*file);
    assert!(now.len() == 300_000 && now[5_000..].iter().all(|b| *b == 0));
    file.allocate_from(300_000, 310_000).unwrap();
    file.allocate_from(310_000, 310_000).unwrap();
    file.allocate_from(310_000, 7).unwrap();
    let now = file_bytes(&*file);
    assert!(now.len() == 310_000 && now[5_000..].iter().all(|b| *b == 0));
    file.set_length(0).unwrap();
    assert_eq!(file_bytes(&*file), b"");
    assert_eq!(list_dir(fs, dir), [("deep".to_owned(), 0, false), ("f".to_owned(), 0, true)]);
}

fn check_mappings(fs: &dyn Fs, dir: &Path) {
    fs.create_dir_all(dir).unwrap();
    let file = fs.open(&dir.join("f"), OpenMode::Create).unwrap();
    assert_eq!(error_kind(file.map(0)), ErrorKind::Invalid);
    file.allocate(10_000).unwrap();
    let Some(mapping) = file.map(100_000).unwrap() else { panic!("every implementation here has mappings") };
    assert_eq!(error_kind(mapping.populate(99_999, 2)), ErrorKind::Invalid);
    match mapping.populate(0, 10_000) {
        Err(e) if e.kind() == ErrorKind::Unsupported => return, // A kernel before 5.14.
        populated => populated.unwrap(),
    }
    mapping.populate(10_000, 0).unwrap();
    assert_eq!(error_kind(mapping.populate(0, 100_000)), ErrorKind::Io, "behind the end of the file");
    mapping.write_at(b"stored", 4_093);
    mapping.write_at(b"", 100_000);
    let mut buf = [0; 8];
    file.read_exact_at(&mut buf, 4_092).unwrap();
    assert_eq!(&buf, b"\0stored\0");
    file.write_at(b"written", 4_090).unwrap();
    mapping.write_at(b"T", 4_093);
    file.sync_data().unwrap();
    file.allocate(50_000).unwrap();
    mapping.populate(40_000, 10_000).unwrap();
    mapping.write_at(b"end", 49_997);
    for len in [10_000, 50_000] {
        let mapped = file.map_for_reading(len).unwrap().expect("every implementation here has mappings");
        let bytes = mapped.to_vec();
        assert_eq!((bytes.len() as u64, &bytes[4_090..4_099]), (len, &b"wriTtened"[..]));
    }
    assert_eq!(error_kind(file.map_for_reading(50_001)), ErrorKind::Corruption, "the file is shorter");
    let mapped = file.map_for_reading(50_000).unwrap().unwrap();
    drop(file);
    assert_eq!(mapped.to_vec()[49_997..], *b"end", "a mapping outlives the handle");
    let all = read_file(fs, &dir.join("f"));
    assert_eq!((&all[4_090..4_099], &all[49_997..]), (&b"wriTtened"[..], &b"end"[..]));
}

fn check_names(fs: &dyn Fs, dir: &Path) {
    fs.create_dir_all(dir).unwrap();
    let at = |name: &str| dir.join(name);
    let old = create_file(fs, &at("old"), b"old");
    create_file(fs, &at("new"), b"newer");
    fs.rename(&at("new"), &at("old")).unwrap();
    assert_eq!(
        (read_file(fs, &at("old")), file_bytes(&*old)),
        (b"newer".to_vec(), b"old".to_vec()),
        "open files remain readable"
    );
    fs.rename(&at("old"), &at("old")).unwrap();

    fs.hard_link(&at("old"), &at("link")).unwrap();
    fs.rename(&at("old"), &at("link")).unwrap();
    assert!(fs.exists(&at("old")).unwrap(), "renaming one link to another of the same file does nothing");
    fs.open(&at("link"), OpenMode::Write).unwrap().write_at(b"N", 0).unwrap();
    assert_eq!(read_file(fs, &at("old")), b"Newer");
    fs.remove_file(&at("old")).unwrap();
    assert_eq!(read_file(fs, &at("link")), b"Newer");
    let open = fs.open(&at("link"), OpenMode::Write).unwrap();
    fs.remove_file(&at("link")).unwrap();
    open.write_at(b"still", 0).unwrap();
    open.sync_all().unwrap();
    assert_eq!((file_bytes(&*open), fs.exists(&at("link")).unwrap()), (b"still".to_vec(), false));

    fs.create_dir_all(&at("d/sub")).unwrap();
    create_file(fs, &at("d/sub/f"), b"inside");
    fs.create_dir_all(&at("empty")).unwrap();
    fs.rename(&at("d"), &at("empty")).unwrap();
    assert_eq!(read_file(fs, &at("empty/sub/f")), b"inside");
    fs.sync_dir(&at("empty/sub")).unwrap();
    fs.sync_dir(dir).unwrap();
    assert_eq!(list_dir(fs, dir), [("empty".to_owned(), 0, false)]);
    assert_eq!(list_dir(fs, &at("empty/sub")), [("f".to_owned(), 6, true)]);
}

fn check_errors(fs: &dyn Fs, dir: &Path) {
    fs.create_dir_all(&dir.join("full/d")).unwrap();
    let at = |name: &str| dir.join(name);
    create_file(fs, &at("f"), b"");
    for mode in [OpenMode::Read, OpenMode::Write] {
        assert_eq!(os_error_kind(fs.open(&at("full"), mode)), io::ErrorKind::IsADirectory);
    }
    assert_eq!(os_error_kind(fs.open(&at("full"), OpenMode::Create)), io::ErrorKind::AlreadyExists);
    assert_eq!(os_error_kind(fs.open(&at("f/g"), OpenMode::Read)), io::ErrorKind::NotADirectory);
    assert!(!fs.exists(&at("f/g")).unwrap());
    assert_eq!(os_error_kind(fs.create_dir_all(&at("f"))), io::ErrorKind::AlreadyExists);
    assert_eq!(os_error_kind(fs.read_dir(&at("none"))), io::ErrorKind::NotFound);
    assert_eq!(os_error_kind(fs.read_dir(&at("f"))), io::ErrorKind::NotADirectory);
    assert_eq!(os_error_kind(fs.sync_dir(&at("none"))), io::ErrorKind::NotFound);
    assert_eq!(os_error_kind(fs.sync_dir(&at("f"))), io::ErrorKind::NotADirectory);
    assert_eq!(os_error_kind(fs.rename(&at("none"), &at("x"))), io::ErrorKind::NotFound);
    assert_eq!(os_error_kind(fs.rename(&at("f"), &at("none/x"))), io::ErrorKind::NotFound);
    assert_eq!(os_error_kind(fs.rename(&at("f"), &at("full"))), io::ErrorKind::IsADirectory);
    assert_eq!(os_error_kind(fs.rename(&at("full"), &at("f"))), io::ErrorKind::NotADirectory);
    fs.create_dir_all(&at("other")).unwrap();
    let not_empty = os_error_kind(fs.rename(&at("other"), &at("full")));
    assert!(
        matches!(not_empty, io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists),
        "XFS says the latter"
    );
    assert_eq!(os_error_kind(fs.rename(&at("full"), &at("full/d/x"))), io::ErrorKind::InvalidInput);
    for existing in ["f", "full", "other"] {
        assert_eq!(os_error_kind(fs.create_dir(&at(existing))), io::ErrorKind::AlreadyExists, "{existing}");
        assert_eq!(
            os_error_kind(fs.rename_noreplace(&at("full"), &at(existing))),
            io::ErrorKind::AlreadyExists,
            "{existing}"
        );
    }
    assert_eq!(os_error_kind(fs.create_dir(&at("none/x"))), io::ErrorKind::NotFound);
    assert_eq!(os_error_kind(fs.rename_noreplace(&at("none"), &at("x"))), io::ErrorKind::NotFound);
    fs.create_dir(&at("made")).unwrap();
    fs.rename_noreplace(&at("made"), &at("renamed")).unwrap();
    assert!(fs.exists(&at("renamed")).unwrap() && !fs.exists(&at("made")).unwrap());
    assert_eq!(fs.absolute(dir).unwrap(), dir);
    assert!(
        fs.absolute(Path::new("")).unwrap().is_absolute() && fs.absolute(Path::new("a/../b")).unwrap().is_absolute()
    );
    assert_eq!(os_error_kind(fs.remove_file(&at("none"))), io::ErrorKind::NotFound);
    assert_eq!(os_error_kind(fs.remove_file(&at("full"))), io::ErrorKind::IsADirectory);
    assert_eq!(os_error_kind(fs.remove_dir_all(&at("none"))), io::ErrorKind::NotFound);
    assert_eq!(os_error_kind(fs.hard_link(&at("none"), &at("x"))), io::ErrorKind::NotFound);
    assert_eq!(os_error_kind(fs.hard_link(&at("f"), &at("full"))), io::ErrorKind::AlreadyExists);
    assert_eq!(error_kind(fs.hard_link(&at("full"), &at("x"))), ErrorKind::Unsupported);
    assert_eq!(fs.open(&at("none"), OpenMode::Read).unwrap_err().file(), Some(&*at("none")), "errors name the file");
}

fn check_locks(fs: &dyn Fs, dir: &Path) {
    let path = dir.join("LOCK");
    assert_eq!(error_kind(fs.lock(&path, LockMode::Exclusive)), ErrorKind::Io, "no directory");
    fs.create_dir_all(&dir.join("d")).unwrap();
    assert_eq!(error_kind(fs.lock(&dir.join("d"), LockMode::Shared)), ErrorKind::Io, "not a file");
    let alone = fs.lock(&path, LockMode::Exclusive).unwrap();
    let again = fs.lock(&path, LockMode::Exclusive).expect_err("locked twice");
    assert_eq!((again.kind(), again.file()), (ErrorKind::Locked, Some(&*path)));
    assert_eq!(error_kind(fs.lock(&path, LockMode::Shared)), ErrorKind::Locked);
    drop(alone);
    let (one, two) = (fs.lock(&path, LockMode::Shared).unwrap(), fs.lock(&path, LockMode::Shared).unwrap());
    drop(one);
    assert_eq!(error_kind(fs.lock(&path, LockMode::Exclusive)), ErrorKind::Locked);
    drop(two);
    fs.lock(&path, LockMode::Exclusive).unwrap();
    assert_eq!(list_dir(fs, dir), [("LOCK".to_owned(), 0, true), ("d".to_owned(), 0, false)]);
    check_directory_locks(fs, dir);
}

fn check_directory_locks(fs: &dyn Fs, dir: &Path) {
    let path = dir.join("LOCK");
    assert_eq!(error_kind(fs.lock_dir(&dir.join("none"), LockMode::Shared)), ErrorKind::Io);
    let alone = fs.lock_dir(dir, LockMode::Exclusive).unwrap();
    let refused = || {
        assert_eq!(error_kind(fs.lock_dir(dir, LockMode::Exclusive)), ErrorKind::Locked);
        assert_eq!(error_kind(fs.lock_dir(dir, LockMode::Shared)), ErrorKind::Locked);
    };
    assert_eq!(error_kind(fs.lock(&path, LockMode::Shared)), ErrorKind::Locked, "older versions lock the file only");
    refused();
    fs.remove_file(&path).unwrap();
    refused();
    drop(alone);
    let (one, two) = (fs.lock_dir(dir, LockMode::Shared).unwrap(), fs.lock_dir(dir, LockMode::Shared).unwrap());
    fs.remove_file(&path).unwrap();
    drop(one);
    assert_eq!(error_kind(fs.lock_dir(dir, LockMode::Exclusive)), ErrorKind::Locked);
    drop(two);
    drop(fs.lock(&path, LockMode::Exclusive).unwrap());
    fs.lock_dir(dir, LockMode::Exclusive).unwrap();
}

#[test]
fn disk_fs_meets_the_contract() {
    let root = tempfile::tempdir().unwrap();
    check_contract(&DiskFs::new(), root.path());
}

#[test]
fn mem_fs_meets_the_contract() {
    let fs = MemFs::new();
    check_contract(&fs, Path::new("/"));
    fs.create_dir_all(Path::new("/below/here")).unwrap();
    check_contract(&fs, Path::new("/below/here"));
}

#[test]
fn fault_fs_without_faults_meets_the_contract() {
    let root = tempfile::tempdir().unwrap();
    for (inner, root) in [(Arc::new(MemFs::new()) as Arc<dyn Fs>, Path::new("/")), (Arc::new(DiskFs), root.path())] {
        let fs = FaultFs::new(inner);
        fs.inject(FaultPlan::new(OpKind::Any, u64::MAX, Fault::Short));
        check_contract(&fs, root);
        assert_eq!(fs.fault_count(), 0);
    }
}

#[test]
fn disk_fs_refuses_symlinks_to_files() {
    let root = tempfile::tempdir().unwrap();
    let (real, link) = (root.path().join("real"), root.path().join("link"));
    create_file(&DiskFs, &real, b"secret");
    std::os::unix::fs::symlink(&real, &link).unwrap();
    for mode in [OpenMode::Read, OpenMode::Write, OpenMode::Create] {
        assert_eq!(error_kind(DiskFs.open(&link, mode)), ErrorKind::Io);
    }
    assert_eq!(error_kind(DiskFs.lock(&link, LockMode::Exclusive)), ErrorKind::Io);
    DiskFs.remove_file(&link).unwrap();
    assert_eq!(read_file(&DiskFs, &real), b"secret", "the link was removed, not its target");
}

#[test]
fn environments_can_be_shared_between_threads() {
    fn assert_send_sync<T: Send + Sync + 'static>(_: &T) {}
    assert_send_sync(&SystemEnv::new());
    assert_send_sync(&TestEnv::new(1));
    assert_send_sync(&MemFs::new());
    assert_send_sync(&FaultFs::new(Arc::new(DiskFs)));
}

// The changes that a power failure may and may not lose.

const MODES: [Survival; 5] =
    [Survival::Nothing, Survival::Everything, Survival::Random, Survival::DataOnly, Survival::MetadataOnly];

fn root() -> &'static Path {
    Path::new("/")
}

/// A file whose bytes and name are durable.
fn put_durably(fs: &dyn Fs, path: &str, content: &[u8]) -> Arc<dyn File> {
    let file = create_file(fs, Path::new(path), content);
    file.sync_data().unwrap();
    fs.sync_dir(root()).unwrap();
    file
}

fn after_crash(fs: &MemFs, survival: Survival, seed: u64) -> MemFs {
    let fork = fs.fork();
    fork.crash(survival, seed);
    fork
}

fn read_file_if_exists(fs: &dyn Fs, path: &str) -> Option<Vec<u8>> {
    match fs.open(Path::new(path), OpenMode::Read) {
        Ok(file) => Some(file_bytes(&*file)),
        Err(e) if e.os_kind() == Some(io::ErrorKind::NotFound) => None,
        Err(e) => panic!("{e}"),
    }
}

#[test]
fn synced_data_survives_every_crash() {
    let fs = MemFs::new();
    fs.create_dir_all(Path::new("/d")).unwrap();
    fs.sync_dir(root()).unwrap();
    let synced = vec![3; 20_000];
    let touched = put_durably(&fs, "/touched", &synced);
    put_durably(&fs, "/still", &synced);
    let inside = create_file(&fs, Path::new("/d/inside"), b"x");
    inside.sync_all().unwrap();
    fs.sync_dir(Path::new("/d")).unwrap();
    touched.write_at(&[4; 3_000], 5_000).unwrap();
    touched.write_at(&[5; 3_000], 30_000).unwrap();
    create_file(&fs, Path::new("/d/unsynced"), &[6; 100]);
    for mode in MODES {
        for seed in 0..100 {
            let fs = after_crash(&fs, mode, seed);
            assert_eq!(read_file_if_exists(&fs, "/still").as_deref(), Some(&synced[..]));
            assert_eq!(read_file_if_exists(&fs, "/d/inside").as_deref(), Some(&b"x"[..]));
            let touched = read_file_if_exists(&fs, "/touched").unwrap();
            assert!(touched.len() == 20_000 || touched.len() == 33_000);
            assert!(touched[..5_000] == synced[..5_000] && touched[8_000..20_000] == synced[8_000..]);
            assert!(touched[5_000..8_000].iter().all(|b| [3, 4].contains(b)));
        }
    }
}

/// A state with six independent unsynced changes.
fn six_unsynced_changes() -> MemFs {
    let fs = MemFs::new();
    put_durably(&fs, "/overwritten", b"old");
    put_durably(&fs, "/grown", b"");
    put_durably(&fs, "/removed", b"back");
    put_durably(&fs, "/from", b"moved");
    let mapped = put_durably(&fs, "/mapped", b"old");
    fs.open(Path::new("/overwritten"), OpenMode::Write).unwrap().write_at(b"new", 0).unwrap();
    fs.open(Path::new("/grown"), OpenMode::Write).unwrap().set_length(9).unwrap();
    fs.remove_file(Path::new("/removed")).unwrap();
    fs.rename(Path::new("/from"), Path::new("/to")).unwrap();
    let mapping = mapped.map(3).unwrap().unwrap();
    mapping.populate(0, 3).unwrap();
    mapping.write_at(b"new", 0);
    fs
}

/// For each of the six changes, whether it survived.
fn surviving_changes(fs: &MemFs) -> [bool; 6] {
    let exists = |path: &str| fs.exists(Path::new(path)).unwrap();
    let first = |path: &str| read_file_if_exists(fs, path).unwrap().first() == Some(&b'n');
    let grown = read_file_if_exists(fs, "/grown").unwrap().len() == 9;
    [first("/overwritten"), grown, !exists("/removed"), !exists("/from"), exists("/to"), first("/mapped")]
}

#[test]
fn any_subset_of_unsynced_changes_may_survive() {
    let fs = six_unsynced_changes();
    let seen: BTreeSet<_> =
        (0..6_000).map(|seed| surviving_changes(&after_crash(&fs, Survival::Random, seed))).collect();
    assert_eq!(seen.len(), 64, "some subset never survives");
}

#[test]
fn survival_modes_keep_documented_state() {
    let fs = six_unsynced_changes();
    for seed in 0..20 {
        let surviving = |mode| surviving_changes(&after_crash(&fs, mode, seed));
        assert_eq!(surviving(Survival::Nothing), [false; 6]);
        assert_eq!(surviving(Survival::Everything), [true; 6]);
        assert_eq!(surviving(Survival::DataOnly), [true, false, false, false, false, true]);
        assert_eq!(surviving(Survival::MetadataOnly), [false, true, true, true, true, false]);
    }
    let fs = after_crash(&fs, Survival::Nothing, 0);
    assert_eq!(
        read_file_if_exists(&fs, "/removed").as_deref(),
        Some(&b"back"[..]),
        "a removal that was lost restores the bytes"
    );
}

#[test]
fn synced_directory_keeps_renames_and_removals() {
    let fs = six_unsynced_changes();
    fs.sync_dir(root()).unwrap();
    for mode in MODES {
        for seed in 0..50 {
            let fs = after_crash(&fs, mode, seed);
            assert_eq!(surviving_changes(&fs)[2..5], [true; 3], "{mode:?} {seed}");
            assert_eq!(read_file_if_exists(&fs, "/to").as_deref(), Some(&b"moved"[..]));
        }
    }
}

#[test]
fn crash_state_is_determined_by_the_seed() {
    let surviving = |seed| surviving_changes(&after_crash(&six_unsynced_changes(), Survival::Random, seed));
    assert!((0..50).all(|seed| surviving(seed) == surviving(seed)));
    assert!((0..50).map(surviving).collect::<BTreeSet<_>>().len() > 10);
}

#[test]
fn handles_of_before_a_crash_are_dead() {
    let fs = MemFs::new();
    let file = put_durably(&fs, "/f", &[0; 5_000]);
    let mapping = file.map(5_000).unwrap().unwrap();
    mapping.populate(0, 5_000).unwrap();
    let lock = fs.lock(Path::new("/LOCK"), LockMode::Exclusive).unwrap();
    fs.crash(Survival::Everything, 0);
    let dead: Vec<Result<()>> = vec![
        file.read_at(&mut [0], 0).map(|_| ()),
        file.write_at(b"x", 0),
        file.length().map(|_| ()),
        file.set_length(0),
        file.allocate(9_000),
        file.sync_data(),
        file.sync_all(),
        file.map(1).map(|_| ()),
        mapping.populate(0, 1),
    ];
    assert!(dead.into_iter().all(|result| error_kind(result) == ErrorKind::Io));
    mapping.write_at(b"nothing", 0);
    fs.lock(Path::new("/LOCK"), LockMode::Exclusive).expect("a crash releases the lock");
    drop((file, mapping, lock));
    assert!(read_file_if_exists(&fs, "/f").unwrap().iter().all(|b| *b == 0));
}

/// Replaces the content of a file; without `careful` it does not sync the bytes before the name.
fn replace_file(fs: &dyn Fs, content: &[u8], careful: bool) -> Result<()> {
    let (tmp, name) = (PathBuf::from("/name.tmp"), PathBuf::from("/name"));
    match fs.remove_file(&tmp) {
        Err(e) if e.os_kind() != Some(io::ErrorKind::NotFound) => return Err(e),
        _ => {}
    }
    let file = fs.open(&tmp, OpenMode::Create)?;
    file.write_at(content, 0)?;
    if careful {
        file.sync_data()?;
    }
    fs.rename(&tmp, &name)?;
    fs.sync_dir(root())
}

/// Crashes a replacement after each of its operations. Returns the number of states that are neither the old nor the
/// new content.
fn count_broken_states(careful: bool) -> usize {
    let fs = MemFs::new();
    replace_file(&fs, b"first", true).unwrap();
    let whole = fs.fork();
    replace_file(&whole, b"second", careful).unwrap();
    let mut broken = 0;
    for ops in 0..=whole.op_count() - fs.op_count() {
        let frozen = fs.fork();
        frozen.freeze_after(Some(ops));
        let done: Result<(), Error> = replace_file(&frozen, b"second", careful);
        assert!(done.is_ok() == (ops == whole.op_count() - fs.op_count()));
        for (mode, seed) in MODES.into_iter().flat_map(|mode| (0..40).map(move |seed| (mode, seed))) {
            let content = read_file_if_exists(&after_crash(&frozen, mode, seed), "/name");
            let fine = content.as_deref() == Some(b"second") || done.is_err() && content.as_deref() == Some(b"first");
            broken += usize::from(!fine);
        }
    }
    broken
}

#[test]
fn crash_search_finds_missing_sync() {
    assert_eq!(count_broken_states(true), 0);
    assert!(count_broken_states(false) > 0, "a missing sync was not noticed");
}

//! The contract of a file system, run as one script on all of them, and what the simulated one may lose.

// The one place outside of `vfs` that needs std's file functions: to plant what the engine never makes.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use azekura::fs::{
    DiskFs, Fault, FaultFs, FaultPlan, File, Fs, LockMode, MemFs, OpKind, OpenMode, Survival, SystemEnv, TestEnv,
};
use azekura::{Error, ErrorKind, Result};

fn os<T: Debug>(result: Result<T>) -> io::ErrorKind {
    result.unwrap_err().os_kind().expect("an error of the system")
}

fn kind<T>(result: Result<T>) -> ErrorKind {
    result.err().expect("an error").kind()
}

fn bytes(file: &dyn File) -> Vec<u8> {
    let mut bytes = vec![0; file.length().unwrap() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn content(fs: &dyn Fs, path: &Path) -> Vec<u8> {
    bytes(&*fs.open(path, OpenMode::Read).unwrap())
}

/// Creates a file with that content.
fn put(fs: &dyn Fs, path: &Path, content: &[u8]) -> Arc<dyn File> {
    let file = fs.open(path, OpenMode::Create).unwrap();
    file.write_at(content, 0).unwrap();
    file
}

fn listing(fs: &dyn Fs, dir: &Path) -> Vec<(String, u64, bool)> {
    let mut list: Vec<_> = fs.read_dir(dir).unwrap().into_iter().map(|e| (e.name, e.len, e.is_file)).collect();
    list.sort();
    list
}

/// The script. `root` is a directory that exists and is empty.
fn script(fs: &dyn Fs, root: &Path) {
    files(fs, &root.join("files"));
    lengths(fs, &root.join("lengths"));
    mappings(fs, &root.join("mappings"));
    names(fs, &root.join("names"));
    refusals(fs, &root.join("refusals"));
    locks(fs, &root.join("locks"));
    let mut dirs = ["files", "lengths", "locks", "mappings", "names", "refusals"].map(|d| (d.to_owned(), 0, false));
    dirs.sort();
    assert_eq!(listing(fs, root), dirs);
    for (name, ..) in dirs {
        fs.remove_dir_all(&root.join(name)).unwrap();
    }
    fs.sync_dir(root).unwrap();
    assert_eq!(listing(fs, root), []);
}

fn files(fs: &dyn Fs, dir: &Path) {
    let path = dir.join("f");
    assert_eq!(os(fs.open(&path, OpenMode::Create)), io::ErrorKind::NotFound, "no directory yet");
    fs.create_dir_all(dir).unwrap();
    fs.create_dir_all(dir).unwrap();
    assert_eq!(os(fs.open(&path, OpenMode::Read)), io::ErrorKind::NotFound);
    assert_eq!(os(fs.open(&path, OpenMode::Write)), io::ErrorKind::NotFound);
    assert!(!fs.exists(&path).unwrap());

    let file = put(fs, &path, b"hello world");
    assert!(fs.exists(&path).unwrap());
    assert_eq!(os(fs.open(&path, OpenMode::Create)), io::ErrorKind::AlreadyExists);
    let mut buf = [b'.'; 8];
    assert_eq!(file.read_at(&mut buf, 6).unwrap(), 5, "a short file gives what it has");
    assert_eq!(&buf, b"world...");
    assert_eq!((file.read_at(&mut buf, 11).unwrap(), file.read_at(&mut buf, u64::MAX).unwrap()), (0, 0));
    assert_eq!(file.read_at(&mut [], 0).unwrap(), 0);
    let early = file.read_exact_at(&mut buf, 6).unwrap_err();
    assert_eq!((early.kind(), early.offset(), early.file()), (ErrorKind::Corruption, Some(6), Some(&*path)));

    file.write_at(b"", 500).unwrap();
    assert_eq!(file.length().unwrap(), 11, "writing nothing grows nothing");
    file.write_at(b"!", 5_000).unwrap();
    file.sync_data().unwrap();
    file.sync_all().unwrap();
    let all = content(fs, &path);
    assert!(all.len() == 5_001 && &all[..11] == b"hello world" && all[11..5_000].iter().all(|b| *b == 0));

    let reader = fs.open(&path, OpenMode::Read).unwrap();
    fs.open(&path, OpenMode::Write).unwrap().write_at(b"HELLO", 0).unwrap();
    reader.read_exact_at(&mut buf[..5], 0).unwrap();
    assert_eq!(&buf[..5], b"HELLO", "handles share the file");
    let refused = [reader.write_at(b"x", 0), reader.set_length(1), reader.allocate(9_999), reader.map(10).map(|_| ())];
    assert!(refused.iter().all(|r| r.as_ref().is_err_and(|e| e.kind() == ErrorKind::Io && e.file().is_some())));
    assert_eq!(kind(file.write_at(b"x", u64::MAX)), ErrorKind::OutOfSpace);
    assert_eq!(file.length().unwrap(), 5_001);
}

fn lengths(fs: &dyn Fs, dir: &Path) {
    fs.create_dir_all(&dir.join("deep/er")).unwrap();
    let file = put(fs, &dir.join("f"), &[7; 10_000]);
    file.set_length(5_000).unwrap();
    file.set_length(6_000).unwrap();
    let now = bytes(&*file);
    assert!(now[..5_000] == [7; 5_000] && now[5_000..] == [0; 1_000], "what was cut stays cut");
    file.allocate(0).unwrap();
    file.allocate(100).unwrap();
    assert_eq!(file.length().unwrap(), 6_000, "allocating never cuts");
    file.allocate(300_000).unwrap();
    let now = bytes(&*file);
    assert!(now.len() == 300_000 && now[5_000..].iter().all(|b| *b == 0));
    file.allocate_from(300_000, 310_000).unwrap();
    file.allocate_from(310_000, 310_000).unwrap();
    file.allocate_from(310_000, 7).unwrap();
    let now = bytes(&*file);
    assert!(now.len() == 310_000 && now[5_000..].iter().all(|b| *b == 0));
    file.set_length(0).unwrap();
    assert_eq!(bytes(&*file), b"");
    assert_eq!(listing(fs, dir), [("deep".to_owned(), 0, false), ("f".to_owned(), 0, true)]);
}

fn mappings(fs: &dyn Fs, dir: &Path) {
    fs.create_dir_all(dir).unwrap();
    let file = fs.open(&dir.join("f"), OpenMode::Create).unwrap();
    assert_eq!(kind(file.map(0)), ErrorKind::Invalid);
    file.allocate(10_000).unwrap();
    let Some(mapping) = file.map(100_000).unwrap() else { panic!("all of these offer mappings") };
    assert_eq!(kind(mapping.populate(99_999, 2)), ErrorKind::Invalid);
    match mapping.populate(0, 10_000) {
        Err(e) if e.kind() == ErrorKind::Unsupported => return, // A kernel before 5.14.
        populated => populated.unwrap(),
    }
    mapping.populate(10_000, 0).unwrap();
    assert_eq!(kind(mapping.populate(0, 100_000)), ErrorKind::Io, "behind the end of the file");
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
    drop(file);
    let all = content(fs, &dir.join("f"));
    assert_eq!((&all[4_090..4_099], &all[49_997..]), (&b"wriTtened"[..], &b"end"[..]));
}

fn names(fs: &dyn Fs, dir: &Path) {
    fs.create_dir_all(dir).unwrap();
    let at = |name: &str| dir.join(name);
    let old = put(fs, &at("old"), b"old");
    put(fs, &at("new"), b"newer");
    fs.rename(&at("new"), &at("old")).unwrap();
    assert_eq!((content(fs, &at("old")), bytes(&*old)), (b"newer".to_vec(), b"old".to_vec()), "open files live on");
    fs.rename(&at("old"), &at("old")).unwrap();

    fs.hard_link(&at("old"), &at("link")).unwrap();
    fs.rename(&at("old"), &at("link")).unwrap();
    assert!(fs.exists(&at("old")).unwrap(), "renaming one link to another of the same file does nothing");
    fs.open(&at("link"), OpenMode::Write).unwrap().write_at(b"N", 0).unwrap();
    assert_eq!(content(fs, &at("old")), b"Newer");
    fs.remove_file(&at("old")).unwrap();
    assert_eq!(content(fs, &at("link")), b"Newer");
    let open = fs.open(&at("link"), OpenMode::Write).unwrap();
    fs.remove_file(&at("link")).unwrap();
    open.write_at(b"still", 0).unwrap();
    open.sync_all().unwrap();
    assert_eq!((bytes(&*open), fs.exists(&at("link")).unwrap()), (b"still".to_vec(), false));

    fs.create_dir_all(&at("d/sub")).unwrap();
    put(fs, &at("d/sub/f"), b"inside");
    fs.create_dir_all(&at("empty")).unwrap();
    fs.rename(&at("d"), &at("empty")).unwrap();
    assert_eq!(content(fs, &at("empty/sub/f")), b"inside");
    fs.sync_dir(&at("empty/sub")).unwrap();
    fs.sync_dir(dir).unwrap();
    assert_eq!(listing(fs, dir), [("empty".to_owned(), 0, false)]);
    assert_eq!(listing(fs, &at("empty/sub")), [("f".to_owned(), 6, true)]);
}

fn refusals(fs: &dyn Fs, dir: &Path) {
    fs.create_dir_all(&dir.join("full/d")).unwrap();
    let at = |name: &str| dir.join(name);
    put(fs, &at("f"), b"");
    for mode in [OpenMode::Read, OpenMode::Write] {
        assert_eq!(os(fs.open(&at("full"), mode)), io::ErrorKind::IsADirectory);
    }
    assert_eq!(os(fs.open(&at("full"), OpenMode::Create)), io::ErrorKind::AlreadyExists);
    assert_eq!(os(fs.open(&at("f/g"), OpenMode::Read)), io::ErrorKind::NotADirectory);
    assert!(!fs.exists(&at("f/g")).unwrap());
    assert_eq!(os(fs.create_dir_all(&at("f"))), io::ErrorKind::AlreadyExists);
    assert_eq!(os(fs.read_dir(&at("none"))), io::ErrorKind::NotFound);
    assert_eq!(os(fs.read_dir(&at("f"))), io::ErrorKind::NotADirectory);
    assert_eq!(os(fs.sync_dir(&at("none"))), io::ErrorKind::NotFound);
    assert_eq!(os(fs.sync_dir(&at("f"))), io::ErrorKind::NotADirectory);
    assert_eq!(os(fs.rename(&at("none"), &at("x"))), io::ErrorKind::NotFound);
    assert_eq!(os(fs.rename(&at("f"), &at("none/x"))), io::ErrorKind::NotFound);
    assert_eq!(os(fs.rename(&at("f"), &at("full"))), io::ErrorKind::IsADirectory);
    assert_eq!(os(fs.rename(&at("full"), &at("f"))), io::ErrorKind::NotADirectory);
    fs.create_dir_all(&at("other")).unwrap();
    let not_empty = os(fs.rename(&at("other"), &at("full")));
    assert!(
        matches!(not_empty, io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists),
        "XFS says the latter"
    );
    assert_eq!(os(fs.rename(&at("full"), &at("full/d/x"))), io::ErrorKind::InvalidInput);
    for taken in ["f", "full", "other"] {
        assert_eq!(os(fs.create_dir(&at(taken))), io::ErrorKind::AlreadyExists, "{taken}");
        assert_eq!(os(fs.rename_new(&at("full"), &at(taken))), io::ErrorKind::AlreadyExists, "{taken}");
    }
    assert_eq!(os(fs.create_dir(&at("none/x"))), io::ErrorKind::NotFound);
    assert_eq!(os(fs.rename_new(&at("none"), &at("x"))), io::ErrorKind::NotFound);
    fs.create_dir(&at("made")).unwrap();
    fs.rename_new(&at("made"), &at("renamed")).unwrap();
    assert!(fs.exists(&at("renamed")).unwrap() && !fs.exists(&at("made")).unwrap());
    assert_eq!(fs.absolute(dir).unwrap(), dir);
    assert!(
        fs.absolute(Path::new("")).unwrap().is_absolute() && fs.absolute(Path::new("a/../b")).unwrap().is_absolute()
    );
    assert_eq!(os(fs.remove_file(&at("none"))), io::ErrorKind::NotFound);
    assert_eq!(os(fs.remove_file(&at("full"))), io::ErrorKind::IsADirectory);
    assert_eq!(os(fs.remove_dir_all(&at("none"))), io::ErrorKind::NotFound);
    assert_eq!(os(fs.hard_link(&at("none"), &at("x"))), io::ErrorKind::NotFound);
    assert_eq!(os(fs.hard_link(&at("f"), &at("full"))), io::ErrorKind::AlreadyExists);
    assert_eq!(kind(fs.hard_link(&at("full"), &at("x"))), ErrorKind::Unsupported);
    assert_eq!(fs.open(&at("none"), OpenMode::Read).unwrap_err().file(), Some(&*at("none")), "errors name the file");
}

fn locks(fs: &dyn Fs, dir: &Path) {
    let path = dir.join("LOCK");
    assert_eq!(kind(fs.lock(&path, LockMode::Exclusive)), ErrorKind::Io, "no directory");
    fs.create_dir_all(&dir.join("d")).unwrap();
    assert_eq!(kind(fs.lock(&dir.join("d"), LockMode::Shared)), ErrorKind::Io, "not a file");
    let alone = fs.lock(&path, LockMode::Exclusive).unwrap();
    let again = fs.lock(&path, LockMode::Exclusive).expect_err("locked twice");
    assert_eq!((again.kind(), again.file()), (ErrorKind::Locked, Some(&*path)));
    assert_eq!(kind(fs.lock(&path, LockMode::Shared)), ErrorKind::Locked);
    drop(alone);
    let (one, two) = (fs.lock(&path, LockMode::Shared).unwrap(), fs.lock(&path, LockMode::Shared).unwrap());
    drop(one);
    assert_eq!(kind(fs.lock(&path, LockMode::Exclusive)), ErrorKind::Locked);
    drop(two);
    fs.lock(&path, LockMode::Exclusive).unwrap();
    assert_eq!(listing(fs, dir), [("LOCK".to_owned(), 0, true), ("d".to_owned(), 0, false)]);
    lock_directories(fs, dir);
}

fn lock_directories(fs: &dyn Fs, dir: &Path) {
    let path = dir.join("LOCK");
    assert_eq!(kind(fs.lock_dir(&dir.join("none"), LockMode::Shared)), ErrorKind::Io);
    let alone = fs.lock_dir(dir, LockMode::Exclusive).unwrap();
    let refused = || {
        assert_eq!(kind(fs.lock_dir(dir, LockMode::Exclusive)), ErrorKind::Locked);
        assert_eq!(kind(fs.lock_dir(dir, LockMode::Shared)), ErrorKind::Locked);
    };
    assert_eq!(kind(fs.lock(&path, LockMode::Shared)), ErrorKind::Locked, "as versions see it that lock the file only");
    refused();
    fs.remove_file(&path).unwrap();
    refused();
    drop(alone);
    let (one, two) = (fs.lock_dir(dir, LockMode::Shared).unwrap(), fs.lock_dir(dir, LockMode::Shared).unwrap());
    fs.remove_file(&path).unwrap();
    drop(one);
    assert_eq!(kind(fs.lock_dir(dir, LockMode::Exclusive)), ErrorKind::Locked);
    drop(two);
    drop(fs.lock(&path, LockMode::Exclusive).unwrap());
    fs.lock_dir(dir, LockMode::Exclusive).unwrap();
}

#[test]
fn disk_keeps_the_contract() {
    let root = tempfile::tempdir().unwrap();
    script(&DiskFs::new(), root.path());
}

#[test]
fn memory_keeps_the_contract() {
    let fs = MemFs::new();
    script(&fs, Path::new("/"));
    fs.create_dir_all(Path::new("/below/here")).unwrap();
    script(&fs, Path::new("/below/here"));
}

#[test]
fn faults_that_never_come_keep_the_contract() {
    let root = tempfile::tempdir().unwrap();
    for (inner, root) in [(Arc::new(MemFs::new()) as Arc<dyn Fs>, Path::new("/")), (Arc::new(DiskFs), root.path())] {
        let fs = FaultFs::new(inner);
        fs.fail(FaultPlan::new(OpKind::Any, u64::MAX, Fault::Short));
        script(&fs, root);
        assert_eq!(fs.struck(), 0);
    }
}

#[test]
fn disk_refuses_links_in_the_place_of_files() {
    let root = tempfile::tempdir().unwrap();
    let (real, link) = (root.path().join("real"), root.path().join("link"));
    put(&DiskFs, &real, b"secret");
    std::os::unix::fs::symlink(&real, &link).unwrap();
    for mode in [OpenMode::Read, OpenMode::Write, OpenMode::Create] {
        assert_eq!(kind(DiskFs.open(&link, mode)), ErrorKind::Io);
    }
    assert_eq!(kind(DiskFs.lock(&link, LockMode::Exclusive)), ErrorKind::Io);
    DiskFs.remove_file(&link).unwrap();
    assert_eq!(content(&DiskFs, &real), b"secret", "the link was removed and not what it names");
}

#[test]
fn environments_can_be_shared_between_threads() {
    fn shared<T: Send + Sync + 'static>(_: &T) {}
    shared(&SystemEnv::new());
    shared(&TestEnv::new(1));
    shared(&MemFs::new());
    shared(&FaultFs::new(Arc::new(DiskFs)));
}

// What a power failure may and may not take.

const MODES: [Survival; 5] =
    [Survival::Nothing, Survival::Everything, Survival::Random, Survival::DataOnly, Survival::MetadataOnly];

fn root() -> &'static Path {
    Path::new("/")
}

/// A file whose bytes and name are durable.
fn put_durably(fs: &dyn Fs, path: &str, content: &[u8]) -> Arc<dyn File> {
    let file = put(fs, Path::new(path), content);
    file.sync_data().unwrap();
    fs.sync_dir(root()).unwrap();
    file
}

fn after(fs: &MemFs, survival: Survival, seed: u64) -> MemFs {
    let fork = fs.fork();
    fork.crash(survival, seed);
    fork
}

fn content_if_there(fs: &dyn Fs, path: &str) -> Option<Vec<u8>> {
    match fs.open(Path::new(path), OpenMode::Read) {
        Ok(file) => Some(bytes(&*file)),
        Err(e) if e.os_kind() == Some(io::ErrorKind::NotFound) => None,
        Err(e) => panic!("{e}"),
    }
}

#[test]
fn what_is_synced_always_survives() {
    let fs = MemFs::new();
    fs.create_dir_all(Path::new("/d")).unwrap();
    fs.sync_dir(root()).unwrap();
    let synced = vec![3; 20_000];
    let touched = put_durably(&fs, "/touched", &synced);
    put_durably(&fs, "/still", &synced);
    let inside = put(&fs, Path::new("/d/inside"), b"x");
    inside.sync_all().unwrap();
    fs.sync_dir(Path::new("/d")).unwrap();
    touched.write_at(&[4; 3_000], 5_000).unwrap();
    touched.write_at(&[5; 3_000], 30_000).unwrap();
    put(&fs, Path::new("/d/unsynced"), &[6; 100]);
    for mode in MODES {
        for seed in 0..100 {
            let fs = after(&fs, mode, seed);
            assert_eq!(content_if_there(&fs, "/still").as_deref(), Some(&synced[..]));
            assert_eq!(content_if_there(&fs, "/d/inside").as_deref(), Some(&b"x"[..]));
            let touched = content_if_there(&fs, "/touched").unwrap();
            assert!(touched.len() == 20_000 || touched.len() == 33_000);
            assert!(touched[..5_000] == synced[..5_000] && touched[8_000..20_000] == synced[8_000..]);
            assert!(touched[5_000..8_000].iter().all(|b| [3, 4].contains(b)));
        }
    }
}

/// A state with six unsynced changes that do not hang together.
fn unsynced_choices() -> MemFs {
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

/// Which of the six are there.
fn choices(fs: &MemFs) -> [bool; 6] {
    let there = |path: &str| fs.exists(Path::new(path)).unwrap();
    let first = |path: &str| content_if_there(fs, path).unwrap().first() == Some(&b'n');
    let grown = content_if_there(fs, "/grown").unwrap().len() == 9;
    [first("/overwritten"), grown, !there("/removed"), !there("/from"), there("/to"), first("/mapped")]
}

#[test]
fn every_combination_of_what_is_not_synced_can_survive() {
    let fs = unsynced_choices();
    let seen: BTreeSet<_> = (0..6_000).map(|seed| choices(&after(&fs, Survival::Random, seed))).collect();
    assert_eq!(seen.len(), 64, "some subset never survives");
}

#[test]
fn the_other_modes_leave_what_they_say() {
    let fs = unsynced_choices();
    for seed in 0..20 {
        let left = |mode| choices(&after(&fs, mode, seed));
        assert_eq!(left(Survival::Nothing), [false; 6]);
        assert_eq!(left(Survival::Everything), [true; 6]);
        assert_eq!(left(Survival::DataOnly), [true, false, false, false, false, true]);
        assert_eq!(left(Survival::MetadataOnly), [false, true, true, true, true, false]);
    }
    let fs = after(&fs, Survival::Nothing, 0);
    assert_eq!(content_if_there(&fs, "/removed").as_deref(), Some(&b"back"[..]), "an undone removal has its bytes");
}

#[test]
fn a_synced_directory_has_its_renames_and_removals() {
    let fs = unsynced_choices();
    fs.sync_dir(root()).unwrap();
    for mode in MODES {
        for seed in 0..50 {
            let fs = after(&fs, mode, seed);
            assert_eq!(choices(&fs)[2..5], [true; 3], "{mode:?} {seed}");
            assert_eq!(content_if_there(&fs, "/to").as_deref(), Some(&b"moved"[..]));
        }
    }
}

#[test]
fn the_same_seed_leaves_the_same_state_and_others_do_not() {
    let left = |seed| choices(&after(&unsynced_choices(), Survival::Random, seed));
    assert!((0..50).all(|seed| left(seed) == left(seed)));
    assert!((0..50).map(left).collect::<BTreeSet<_>>().len() > 10);
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
    assert!(dead.into_iter().all(|result| kind(result) == ErrorKind::Io));
    mapping.write_at(b"nothing", 0);
    fs.lock(Path::new("/LOCK"), LockMode::Exclusive).expect("the lock died too");
    drop((file, mapping, lock));
    assert!(content_if_there(&fs, "/f").unwrap().iter().all(|b| *b == 0));
}

/// Replaces the content of a file; without `careful` it forgets to sync the bytes before the name.
fn replace(fs: &dyn Fs, content: &[u8], careful: bool) -> Result<()> {
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

/// Crashes a replacement after each of its operations; how many states are neither before nor after it.
fn broken_replacements(careful: bool) -> usize {
    let fs = MemFs::new();
    replace(&fs, b"first", true).unwrap();
    let whole = fs.fork();
    replace(&whole, b"second", careful).unwrap();
    let mut broken = 0;
    for ops in 0..=whole.op_count() - fs.op_count() {
        let frozen = fs.fork();
        frozen.freeze_after(Some(ops));
        let done: Result<(), Error> = replace(&frozen, b"second", careful);
        assert!(done.is_ok() == (ops == whole.op_count() - fs.op_count()));
        for (mode, seed) in MODES.into_iter().flat_map(|mode| (0..40).map(move |seed| (mode, seed))) {
            let left = content_if_there(&after(&frozen, mode, seed), "/name");
            let fine = left.as_deref() == Some(b"second") || done.is_err() && left.as_deref() == Some(b"first");
            broken += usize::from(!fine);
        }
    }
    broken
}

#[test]
fn crashing_at_every_operation_tells_a_careful_program_from_a_careless_one() {
    assert_eq!(broken_replacements(true), 0);
    assert!(broken_replacements(false) > 0, "a missing sync was not noticed");
}

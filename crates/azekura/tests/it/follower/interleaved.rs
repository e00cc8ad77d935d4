//! A writer that works whenever the follower opens, lists or reads files.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use azekura::fs::{DirEntry, File, FileLock, Fs, LockMode, Mapping, OpenMode};
use azekura::testing::{MemFs, SeededRng, TestEnv};
use azekura::{
    CompressionType, Database, EngineType, Gc, KvSeparationOptions, PartitionCreateOptions, PmemOptions, RecoveryMode,
    Result,
};

use super::faults::{config, open_writer, partition, text};
use crate::testkit::seeds::test_seeds;
use crate::testkit::{FailureReport, env_u64};

/// A call of the file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FsCall {
    OpenOrList,
    Read,
}

type Hook = Box<dyn FnMut(FsCall) + Send>;

/// The file system of a follower, which calls a hook before each open, each listing and each read of a file.
#[derive(Clone)]
struct HookFs {
    inner: MemFs,
    hook: Arc<Mutex<Option<Hook>>>,
}

impl std::fmt::Debug for HookFs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HookFs")
    }
}

impl HookFs {
    fn new(inner: MemFs) -> Arc<HookFs> {
        Arc::new(HookFs { inner, hook: Arc::default() })
    }

    fn call(&self, call: FsCall) {
        let hook = self.hook.lock().unwrap().take();
        if let Some(mut hook) = hook {
            hook(call);
            *self.hook.lock().unwrap() = Some(hook);
        }
    }
}

struct HookFile {
    inner: Arc<dyn File>,
    fs: HookFs,
}

impl std::fmt::Debug for HookFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HookFile({:?})", self.inner)
    }
}

impl File for HookFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.fs.call(FsCall::Read);
        self.inner.read_at(buf, offset)
    }
    fn write_at(&self, _: &[u8], _: u64) -> Result<()> {
        panic!("{self:?}")
    }
    fn length(&self) -> Result<u64> {
        self.inner.length()
    }
    fn set_length(&self, _: u64) -> Result<()> {
        panic!("{self:?}")
    }
    fn allocate(&self, _: u64) -> Result<()> {
        panic!("{self:?}")
    }
    fn sync_data(&self) -> Result<()> {
        panic!("{self:?}")
    }
    fn sync_all(&self) -> Result<()> {
        panic!("{self:?}")
    }
    fn map(&self, _: u64) -> Result<Option<Box<dyn Mapping>>> {
        Ok(None) // so that every byte is read by a call
    }
}

impl Fs for HookFs {
    fn open(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        self.call(FsCall::OpenOrList);
        assert_eq!(mode, OpenMode::Read, "{path:?}");
        Ok(Arc::new(HookFile { inner: self.inner.open(path, mode)?, fs: self.clone() }))
    }
    fn create_dir_all(&self, path: &Path) -> Result<()> {
        panic!("{path:?}")
    }
    fn absolute(&self, path: &Path) -> Result<PathBuf> {
        self.inner.absolute(path)
    }
    fn read_dir(&self, path: &Path) -> Result<Vec<DirEntry>> {
        self.call(FsCall::OpenOrList);
        let listed = self.inner.read_dir(path);
        self.call(FsCall::OpenOrList);
        listed
    }
    fn exists(&self, path: &Path) -> Result<bool> {
        self.inner.exists(path)
    }
    fn rename(&self, from: &Path, _: &Path) -> Result<()> {
        panic!("{from:?}")
    }
    fn remove_file(&self, path: &Path) -> Result<()> {
        panic!("{path:?}")
    }
    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        panic!("{path:?}")
    }
    fn hard_link(&self, from: &Path, _: &Path) -> Result<()> {
        panic!("{from:?}")
    }
    fn sync_dir(&self, path: &Path) -> Result<()> {
        panic!("{path:?}")
    }
    fn lock(&self, path: &Path, _: LockMode) -> Result<Box<dyn FileLock>> {
        panic!("{path:?}")
    }
    fn overwrites_in_place(&self, dir: &Path) -> bool {
        self.inner.overwrites_in_place(dir)
    }
}

/// The value of `k` in `a`, `b`, `c` and the pool, that of `i` in `a`, and that of `k` in `d`, if it exists.
type Numbers = (u64, u64, Option<u64>);

/// Length in bytes of the segments of the WAL.
const SEGMENT_LEN: u64 = 64 << 10;

struct Writing {
    machine: MemFs,
    db: Option<Database>,
    rng: SeededRng,
    history: Vec<Numbers>,
    has_d: bool,
}

pub(super) fn separated() -> PartitionCreateOptions {
    let separation = KvSeparationOptions::default().separation_threshold(100).blob_file_target_size(4 << 10);
    let separation = separation.compression(CompressionType::None).automatic_gc(None).direct_write_threshold(500);
    PartitionCreateOptions::default().with_kv_separation(separation)
}

pub(super) fn padded(n: u64, len: usize) -> Vec<u8> {
    let mut value = format!("{n} ").into_bytes();
    value.resize(len, b'.');
    value
}

fn number(value: Option<impl AsRef<[u8]>>) -> u64 {
    value.map_or(0, |value| {
        let value = String::from_utf8(value.as_ref().to_vec()).unwrap();
        value.split(' ').next().unwrap().parse().unwrap()
    })
}

impl Writing {
    fn open(machine: &MemFs) -> Database {
        let db = config(Arc::new(machine.clone())).wal_segment_size(SEGMENT_LEN).open().unwrap();
        for name in ["a", "b", "c"] {
            let options = if name == "c" { separated() } else { Default::default() };
            db.open_partition(name, options.clone()).unwrap().set_options(options).unwrap();
        }
        let pool = EngineType::Pmem(PmemOptions::default().max_size(32 << 20));
        db.open_partition("pool", PartitionCreateOptions::default().engine(pool)).unwrap();
        db
    }

    fn new(machine: &MemFs, seed: u64) -> Writing {
        let db = Some(Writing::open(machine));
        Writing { machine: machine.clone(), db, rng: SeededRng::new(seed), history: vec![(0, 0, None)], has_d: false }
    }

    /// A commit over all partitions.
    fn commit(&mut self) {
        let db = self.db.as_ref().unwrap();
        let (n, i, d) = *self.history.last().unwrap();
        let mut batch = db.batch();
        let ranges = self.rng.chance_one_in(4);
        for (name, len) in [("a", 10), ("b", 5_000), ("c", 800), ("pool", 20)] {
            let part = db.partition(name).unwrap();
            if ranges {
                batch.remove_range(&part, "k"..="k");
            }
            batch.insert(&part, "k", padded(n + 1, len));
        }
        if self.has_d {
            batch.insert(&partition(db, "d"), "k", padded(n + 1, 10));
        }
        batch.commit().unwrap();
        self.history.push((n + 1, i, if self.has_d { Some(n + 1) } else { d }));
    }

    /// Fills segments of the WAL and frees them, twice: the second time, those of the first are written again.
    fn recycle(&mut self) {
        for _ in 0..2 {
            (0..SEGMENT_LEN / 5_000).for_each(|_| self.commit());
            let db = self.db.as_ref().unwrap();
            db.list_partitions().iter().for_each(|name| db.partition(name).unwrap().flush().unwrap());
            while db.step().unwrap() {}
        }
    }

    fn step(&mut self) {
        let db = self.db.as_ref().unwrap();
        let parts = ["a", "b", "c", "pool"].map(|name| db.partition(name).unwrap());
        let (n, i, d) = *self.history.last().unwrap();
        match self.rng.below(24) {
            0..=7 => self.commit(),
            8..=10 => {
                parts[0].ingest([("i", padded(i + 1, 20))]).unwrap();
                self.history.push((n, i + 1, d));
            }
            11..=14 => parts[usize::try_from(n % 3).unwrap()].flush().unwrap(),
            15 | 16 => parts[usize::try_from(i % 3).unwrap()].major_compact().unwrap(),
            17 => _ = parts[2].gc_with_space_amp_target(1.0).unwrap(),
            18 => parts.iter().take(3).for_each(|part| part.flush().unwrap()),
            19 if !self.has_d && self.history.len() > 10 => {
                partition(db, "d");
                self.has_d = true;
            }
            20 => {
                drop(parts);
                self.db.take().unwrap().close().unwrap();
                self.db = Some(Writing::open(&self.machine));
            }
            21 => {
                drop(parts);
                self.machine.freeze_after(Some(0));
                self.db = None;
                self.machine.freeze_after(None);
                self.db = Some(Writing::open(&self.machine));
            }
            _ => _ = db.step().unwrap(),
        }
    }
}

/// Reads the state of a follower, which must be in the history, and not before `seen`.
fn check_prefix(db: &Database, history: &[Numbers], seen: &mut usize) {
    let parts = ["a", "b", "c", "pool"].map(|name| db.partition(name).unwrap());
    let snapshot = db.snapshot();
    let latest = parts.clone().map(|part| number(part.get("k").unwrap()));
    let found = parts.clone().map(|part| number(snapshot.get(&part, "k").unwrap()));
    let i = number(snapshot.get(&parts[0], "i").unwrap());
    assert!(found.iter().all(|n| *n == found[0]), "{found:?}");
    assert!(latest.is_sorted() && latest[0] >= found[0], "{latest:?} {found:?}");
    let d = db.partition("d").ok().map(|d| number(snapshot.get(&d, "k").unwrap())).filter(|n| *n > 0);
    let at = history.iter().position(|state| *state == (found[0], i, d));
    let at = at.unwrap_or_else(|| panic!("{:?} is not in the history", (found[0], i, d)));
    assert!(at >= *seen, "the follower went back from {seen} to {at}");
    *seen = at;
}

/// The writer works whenever the follower opens, lists or reads files. Returns how often it recycled the WAL before a
/// read.
fn check_interleaved(seed: u64) -> u64 {
    let _report = FailureReport::new("follower::", seed);
    let machine = MemFs::new();
    let writing = Arc::new(Mutex::new(Writing::new(&machine, seed)));
    (0..5).for_each(|_| writing.lock().unwrap().step());
    let fs = HookFs::new(machine);
    // Without real pauses between two attempts to read files that change.
    let env = Arc::new(TestEnv::new(seed));
    let follower = config(Arc::clone(&fs) as _).env(env).open_follower().unwrap();
    let recycled = Arc::new(AtomicU64::new(0));
    let seen = Arc::new(Mutex::new(0));
    let mut rng = SeededRng::new(seed ^ 77);
    let mut errors = 0;
    for round in 0..40 {
        let (rare, rare_read) = (1 + rng.below(12), 1 + rng.below(40));
        let (mut left, mut recyclings_left) = (30, 2);
        let (writing_in, follower_in, seen_in) = (Arc::clone(&writing), follower.clone(), Arc::clone(&seen));
        let recycled = Arc::clone(&recycled);
        let mut hook_rng = SeededRng::new(seed ^ (round << 20));
        *fs.hook.lock().unwrap() = Some(Box::new(move |call| {
            let (writing, follower, seen) = (&writing_in, &follower_in, &seen_in);
            let is_read = call == FsCall::Read;
            let acts = left > 0 && hook_rng.below(if is_read { rare_read } else { rare }) == 0;
            let steps = if acts { 1 + hook_rng.below(3) } else { 0 };
            let recycles = is_read && acts && recyclings_left > 0 && hook_rng.chance_one_in(4);
            left -= steps.min(left);
            recyclings_left -= i32::from(recycles);
            recycled.fetch_add(recycles.into(), Ordering::Relaxed);
            if is_read && !acts {
                return;
            }
            std::thread::scope(|scope| {
                let work = scope.spawn(move || {
                    // During a read, the follower may hold locks that its readers need.
                    if !is_read {
                        check_prefix(follower, &writing.lock().unwrap().history, &mut seen.lock().unwrap());
                    }
                    let mut writing = writing.lock().unwrap();
                    (0..steps).for_each(|_| writing.step());
                    if recycles {
                        writing.recycle();
                    }
                });
                work.join().unwrap();
            });
        }));
        let done = follower.catch_up();
        *fs.hook.lock().unwrap() = None;
        check_prefix(&follower, &writing.lock().unwrap().history, &mut seen.lock().unwrap());
        if let Err(error) = done {
            errors += 1;
            assert!(errors < 10, "{error}");
        }
        (0..rng.below(4)).for_each(|_| writing.lock().unwrap().step());
        if rng.chance_one_in(3) {
            follower.catch_up().unwrap();
            let writing = writing.lock().unwrap();
            let mut seen = seen.lock().unwrap();
            check_prefix(&follower, &writing.history, &mut seen);
            assert_eq!(writing.history[*seen], *writing.history.last().unwrap(), "all commits");
        }
    }
    recycled.load(Ordering::Relaxed)
}

#[test]
fn a_follower_shows_whole_commits_meanwhile() {
    let seeds = test_seeds(env_u64("AZEKURA_FOLLOWER_RUNS", 8));
    let recycled: u64 = seeds.iter().map(|seed| check_interleaved(*seed)).sum();
    println!("{} runs: the WAL was recycled before {recycled} reads", seeds.len());
    assert!(seeds.len() == 1 || recycled > 0, "the log was never recycled during a read");
}

/// A partition is created, and gets a commit, at any file operation of the open of a follower that skips damage.
#[test]
fn salvage_skips_nothing_that_is_being_written() {
    for nth in 0.. {
        let machine = MemFs::new();
        let writer = open_writer(&machine);
        partition(&writer, "p").insert("k", "0").unwrap();
        let fs = HookFs::new(machine);
        let (calls, writing) = (Arc::new(AtomicU64::new(0)), writer.clone());
        let counted = Arc::clone(&calls);
        *fs.hook.lock().unwrap() = Some(Box::new(move |_| {
            if counted.fetch_add(1, Ordering::Relaxed) == nth {
                partition(&writing, "n").insert("k", "1").unwrap();
                partition(&writing, "p").insert("k", "2").unwrap();
            }
        }));
        let follower = config(Arc::clone(&fs) as _).recovery_mode(RecoveryMode::Salvage).open_follower().unwrap();
        *fs.hook.lock().unwrap() = None;
        follower.catch_up().unwrap();
        if text(&follower.partition("p").unwrap(), "k").as_deref() == Some("2") {
            assert_eq!(text(&follower.partition("n").unwrap(), "k").as_deref(), Some("1"), "operation {nth}");
        }
        if calls.load(Ordering::Relaxed) <= nth {
            assert!(nth > 15, "the open has {nth} file operations");
            break;
        }
    }
}

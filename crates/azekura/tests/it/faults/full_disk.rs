//! Small disks: a workload fills the disk, is killed or loses power there, and the database is opened while the disk
//! is still full. No acknowledged write is lost, a refused write changes nothing, removals are accepted, every open
//! succeeds, and writing continues once there is space.
//!
//! - `AZEKURA_CRASH_POINTS`: a 64th of it is the number of workloads.
//! - `AZEKURA_SEED`: the workload of this seed only.

use std::fmt::Write as _;
use std::io;
use std::path::Path;
use std::sync::Arc;

use azekura::fs::Fs;
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, SeededRng, Survival, TestEnv};
use azekura::{
    Config, Database, EngineType, ErrorKind, GarbageCollection, KvSeparationOptions, Partition, PartitionCreateOptions,
    PersistMode, PmemOptions, Result,
};

use crate::testkit::seeds::test_seeds;
use crate::testkit::watchdog::wait_until;
use crate::testkit::{FailureReport, Map, env_u64};

const RESERVE: u64 = 1 << 20;
const KEYS: u64 = 20_000;
/// Number of removals that are accepted at once on a full disk.
const REMOVALS: u64 = 100;

/// The kind of database.
#[derive(Clone, Copy, Debug)]
struct FullDiskConfig {
    mapped: bool,
    pool: bool,
    separated: bool,
    /// Whether the machine loses power; otherwise the process is killed.
    loses_power: bool,
    reserve: u64,
}

struct FullDiskRun {
    style: FullDiskConfig,
    machine: MemFs,
    db: Option<(Database, Partition)>,
    acknowledged: Map,
    /// A write that was in progress when the machine stopped: it may exist or not.
    unacknowledged: Vec<(Vec<u8>, Option<Vec<u8>>)>,
    rng: SeededRng,
    crashes: u64,
    /// The steps so far, for the message of a failure.
    log: String,
    /// Counts of opens, refused writes and resumed writes on a full disk.
    outcome_counts: [u64; 3],
}

fn is_out_of_space<T>(result: &Result<T>) -> bool {
    matches!(result, Err(error) if error.kind() == ErrorKind::OutOfSpace)
}

impl FullDiskRun {
    fn new(seed: u64, style: FullDiskConfig) -> FullDiskRun {
        let mut rng = SeededRng::new(seed);
        let machine = MemFs::new();
        machine.set_capacity(Some((3 << 20) + rng.below(2 << 20)));
        let (map, maybe, story) = (Map::new(), Vec::new(), String::new());
        FullDiskRun {
            style,
            machine,
            db: None,
            acknowledged: map,
            unacknowledged: maybe,
            rng,
            crashes: 0,
            log: story,
            outcome_counts: [0; 3],
        }
    }

    fn open(&mut self) {
        self.crashes += 1;
        let fs: Arc<dyn Fs> = Arc::new(self.machine.clone());
        let config = Config::new("/db").fs(fs).env(Arc::new(TestEnv::new(self.crashes))).workers(0);
        let config = config.mapped_wal(self.style.mapped).wal_segment_size(256 << 10).max_wal_size(1 << 20);
        let opened = config.cache_size(64 << 10).disk_reserve(self.style.reserve).open();
        let db = opened.unwrap_or_else(|error| panic!("open after crash {} failed: {error}", self.crashes));
        let separation = KvSeparationOptions::default().separation_threshold(500).blob_file_target_size(128 << 10);
        let options = PartitionCreateOptions::default().max_memtable_size(256 << 10).block_size(1024);
        let options = match (self.style.pool, self.style.separated) {
            (true, _) => options.engine(EngineType::Pmem(PmemOptions::default().max_size(64 << 20))),
            (_, true) => options.with_kv_separation(separation.direct_write_threshold(5_000)),
            _ => options,
        };
        let p = db.open_partition("p", options).unwrap_or_else(|error| panic!("life {}: {error}", self.crashes));
        self.db = Some((db, p));
        self.check();
    }

    fn partition(&self) -> &Partition {
        &self.db.as_ref().unwrap().1
    }

    fn key(&mut self) -> Vec<u8> {
        format!("{:05}", self.rng.below(KEYS)).into_bytes()
    }

    /// The database has all acknowledged writes, and all or nothing of a write that was in progress.
    fn check(&mut self) {
        let pairs = self.partition().iter().map(|pair| pair.map(|(k, v)| (k.to_vec(), v.to_vec())));
        let found: Map = pairs.collect::<Result<_>>().unwrap();
        let mut with = self.acknowledged.clone();
        for (key, value) in std::mem::take(&mut self.unacknowledged) {
            match value {
                Some(value) => _ = with.insert(key, value),
                None => _ = with.remove(&key),
            }
        }
        assert!(
            found == self.acknowledged || found == with,
            "{} keys found, {} sure",
            found.len(),
            self.acknowledged.len()
        );
        self.acknowledged = found;
    }

    /// One commit; returns false if it was refused.
    fn write(&mut self, writes: Vec<(Vec<u8>, Option<Vec<u8>>)>) -> bool {
        let (db, p) = self.db.as_ref().unwrap();
        let mode = if self.style.loses_power { PersistMode::SyncData } else { PersistMode::Buffer };
        let mut batch = db.batch();
        batch.durability(mode);
        for (key, value) in &writes {
            match value {
                Some(value) => batch.insert(p, key, value),
                None => batch.remove(p, key),
            }
        }
        let done = batch.commit();
        // A store into a mapping does not report that the machine has stopped.
        if self.machine.is_frozen() || done.is_err() && !is_out_of_space(&done) {
            assert!(self.machine.is_frozen(), "{done:?}");
            if self.unacknowledged.is_empty() {
                self.unacknowledged = writes;
            }
            return false;
        }
        if done.is_ok() {
            for (key, value) in writes {
                match value {
                    Some(value) => _ = self.acknowledged.insert(key, value),
                    None => _ = self.acknowledged.remove(&key),
                }
            }
        }
        done.is_ok()
    }

    fn insert(&mut self) -> bool {
        let key = self.key();
        let len = [300, 1_000, 2_500, 6_000][self.rng.below(4)];
        let value = self.rng.random_bytes(len);
        self.write(vec![(key, Some(value))])
    }

    /// Removes this number of keys, one by one or several at a time. Returns the number removed before the first
    /// refusal.
    fn remove(&mut self, count: u64) -> u64 {
        let keys: Vec<Vec<u8>> = self.acknowledged.keys().take(count as usize).cloned().collect();
        let at_once = [1, 10][self.rng.below(2)];
        let mut removed = 0;
        for some in keys.chunks(at_once) {
            if !self.write(some.iter().map(|key| (key.clone(), None)).collect()) {
                return removed;
            }
            removed += some.len() as u64;
        }
        count
    }

    /// Inserts until a write is refused; returns whether any was accepted.
    fn fill(&mut self) -> bool {
        for accepted in 0..20_000 {
            if !self.insert() {
                let _ = writeln!(self.log, "full after {accepted}");
                self.outcome_counts[1] += 1;
                return accepted > 0;
            }
            if self.rng.chance_one_in(50) {
                let _ = self.db.as_ref().unwrap().0.step();
            }
        }
        panic!("the disk never becomes full");
    }

    fn work(&mut self) {
        let which = self.rng.below(5);
        let (db, p) = self.db.as_ref().unwrap();
        let done = match which {
            0 => p.flush(),
            1 => p.major_compact(),
            2 if self.style.separated && !self.style.pool => p.gc_with_space_amp_target(1.2).map(drop),
            _ => db.step().map(drop),
        };
        let _ = writeln!(self.log, "work {which}: {:?}", done.as_ref().map_err(|e| e.kind()));
        assert!(done.is_ok() || is_out_of_space(&done) || self.machine.is_frozen(), "{which}: {done:?}");
    }

    /// The machine stops at some operation of the next steps, and restarts.
    fn crash_at_random_op(&mut self) {
        let ops = self.rng.below(60);
        self.machine.freeze_after(Some(ops));
        for _ in 0..30 {
            match self.rng.below(4) {
                0 => self.work(),
                1 => drop(self.remove(3)),
                _ => drop(self.insert()),
            }
            if self.machine.is_frozen() {
                break;
            }
        }
        self.machine.freeze_after(Some(0));
        let old = self.db.take();
        let survival = if self.style.loses_power { Survival::Random } else { Survival::Everything };
        // The old handles are dropped on the stopped file system.
        drop(old);
        self.machine.crash(survival, self.rng.next_u64());
        self.machine.freeze_after(None);
        if self.machine.used_space() > self.capacity() {
            // Names and lengths were restored; a real file system would not have reallocated their space yet.
            self.machine.set_capacity(Some(self.machine.used_space()));
        }
        let _ = writeln!(self.log, "stopped after {ops} operations, {} bytes used", self.machine.used_space());
        self.open();
        self.outcome_counts[0] += 1;
    }

    fn capacity(&self) -> u64 {
        self.machine.capacity().unwrap()
    }

    /// Removes and compacts everything: the space is freed without allocating another byte of disk.
    fn remove_everything_and_compact(&mut self) {
        let all = self.acknowledged.len() as u64;
        if self.remove(all) < all || self.style.pool {
            return;
        }
        let p = self.partition().clone();
        p.flush().unwrap();
        p.major_compact().unwrap();
        if self.style.separated {
            p.gc_drop_stale_segments().unwrap();
        }
        // A read of another test may keep the replaced files for a moment.
        wait_until("the freed space is used", || {
            let inserted = self.insert();
            if !inserted {
                let _ = self.db.as_ref().unwrap().0.step();
            }
            inserted
        });
        self.outcome_counts[2] += 1;
    }

    fn run_full_disk_test(&mut self) {
        self.open();
        for round in 0..4 {
            let accepted = self.fill();
            if accepted {
                let removed = self.remove(REMOVALS);
                let wanted = REMOVALS.min(self.acknowledged.len() as u64 + removed);
                assert!(removed >= wanted, "round {round}: {removed} removals of {wanted}");
            }
            for _ in 0..self.rng.below(4) {
                self.work();
            }
            for _ in 0..self.rng.below(4) {
                self.crash_at_random_op();
            }
            match self.rng.below(3) {
                0 => self.remove_everything_and_compact(),
                1 => {
                    self.machine.set_capacity(Some(self.capacity() + (1 << 20) + self.rng.below(2 << 20)));
                    assert!(self.insert(), "there is space");
                }
                _ => {}
            }
            self.check();
        }
        self.machine.set_capacity(None);
        assert!(self.insert(), "there is space");
        let (db, p) = self.db.take().unwrap();
        drop(p);
        db.close().unwrap();
        self.open();
        assert_eq!(self.db.as_ref().unwrap().0.metrics().replayed_records, 0);
    }
}

fn random_config(seed: u64, reserve: u64) -> FullDiskConfig {
    let bit = |n: u64| seed >> n & 1 == 1;
    FullDiskConfig { mapped: bit(0), loses_power: bit(1), pool: seed % 5 == 4, separated: bit(2), reserve }
}

/// The search can fail: without a reserve it finds a violation for every kind of database.
#[test]
fn search_fails_when_there_is_no_reserve() {
    let fails = |seed: u64| {
        let mut wall = FullDiskRun::new(seed, random_config(seed, 0));
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| wall.run_full_disk_test())).is_err()
    };
    assert!((0..6).all(fails));
}

#[test]
fn database_survives_full_disk() {
    let mut counts = [0; 3];
    for seed in test_seeds(env_u64("AZEKURA_CRASH_POINTS", 800) / 64) {
        let replay = FailureReport::new("database_survives_full_disk", seed);
        let style = random_config(seed, RESERVE);
        replay.set_progress(format_args!("{style:?}"));
        let mut wall = FullDiskRun::new(seed, style);
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| wall.run_full_disk_test()));
        if let Err(panic) = ran {
            println!("{style:?}\n{}", wall.log);
            std::panic::resume_unwind(panic);
        }
        (0..3).for_each(|i| counts[i] += wall.outcome_counts[i]);
    }
    println!("opened {}, refused {}, resumed {} times on a full disk", counts[0], counts[1], counts[2]);
    assert!(env_u64("AZEKURA_SEED", u64::MAX) != u64::MAX || counts.iter().all(|count| *count >= 3), "{counts:?}");
}

/// Regression: an open that had no space to sync the directory failed, although the reserve had some.
#[test]
fn open_syncs_the_directory_with_space_of_the_reserve() {
    let machine = MemFs::new();
    let open = |fs: Arc<dyn Fs>| {
        let config = Config::new("/db").fs(fs).env(Arc::new(TestEnv::new(1))).workers(0).disk_reserve(1 << 20);
        config.open()
    };
    let db = open(Arc::new(machine.clone())).unwrap();
    db.open_partition("p", Default::default()).unwrap().insert("k", "1").unwrap();
    db.close().unwrap();
    for nth in 1.. {
        let faults = FaultFs::new(Arc::new(machine.fork()));
        faults.inject(FaultPlan::new(OpKind::SyncDir, nth, Fault::Error(io::ErrorKind::StorageFull)));
        let opened = open(Arc::new(faults.clone()));
        if faults.fault_count() == 0 {
            assert!(nth > 2);
            break;
        }
        assert_eq!(opened.unwrap().partition("p").unwrap().get("k").unwrap().unwrap(), "1", "sync {nth}");
    }
}

/// The reserve is a file that readers do not need, and that `disk_reserve(0)` removes.
#[test]
fn no_reserve_file_exists_when_it_is_off() {
    let machine = MemFs::new();
    let open = |reserve: u64| {
        let fs: Arc<dyn Fs> = Arc::new(machine.clone());
        let config = Config::new("/db").fs(fs).env(Arc::new(TestEnv::new(reserve))).workers(0);
        config.disk_reserve(reserve).open().unwrap()
    };
    let reserve = Path::new("/db/RESERVE");
    open(1 << 20).close().unwrap();
    assert!(machine.exists(reserve).unwrap());
    let db = open(0);
    assert!(!machine.exists(reserve).unwrap());
    db.close().unwrap();
}

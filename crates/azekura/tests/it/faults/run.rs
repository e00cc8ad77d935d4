//! A workload in phases, run on a given file system: writes, flushes, blob GC, loads, closing and reopening.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use azekura::fs::{Fs, SystemEnv};
use azekura::testing::{MemFs, SeededRng, TestEnv, TestOrder};
use azekura::{
    Config, Database, EngineType, ErrorKind, Event, GarbageCollection, KvSeparationOptions, Listener, Partition,
    PartitionCreateOptions, PersistMode, PmemOptions, Result,
};

use crate::testkit::Map;
use crate::testkit::atomic_writes::AtomicWrites;
use crate::testkit::ordered_partitions::open_ordered;
use crate::testkit::test_dir::{read_file, write_file};

pub(super) const DIR: &str = "/data/db";
const CHECKPOINT_DIR: &str = "/copies/copy";
/// A file of the user, next to the checkpoint, in a directory that older versions removed.
const FOREIGN_FILE: &str = "/copies/copy.tmp/mine";

/// Writes the file of the user.
pub(super) fn put_foreign_file(machine: &MemFs) {
    machine.create_dir_all(Path::new(FOREIGN_FILE).parent().unwrap()).unwrap();
    write_file(machine, Path::new(FOREIGN_FILE), b"mine");
}
const PARTITION_NAMES: [&str; 2] = ["left", "right"];
/// A partition whose whole content is loaded, or cleared, at once.
const LOADED_PARTITION: &str = "loaded";
const LOADED_KEYS: u64 = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FaultPhase {
    Create,
    Write,
    Flush,
    Compact,
    Collect,
    Load,
    Checkpoint,
    Close,
    Reopen,
    Last,
}

pub(super) const PHASES: [FaultPhase; 10] = [
    FaultPhase::Create,
    FaultPhase::Write,
    FaultPhase::Flush,
    FaultPhase::Compact,
    FaultPhase::Collect,
    FaultPhase::Load,
    FaultPhase::Checkpoint,
    FaultPhase::Close,
    FaultPhase::Reopen,
    FaultPhase::Last,
];

/// Configuration of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct FaultRunConfig {
    pub(super) workers: usize,
    pub(super) mapped: bool,
    /// Size limit of blob files: each has one large value, or many.
    pub(super) blob_file_size: u64,
    /// Every n-th commit requests a sync.
    pub(super) commits_per_sync: u32,
    /// The partition `right` is a pool.
    pub(super) pool: bool,
    /// Order of the keys. Each key carries a checksum if the order requires it.
    pub(super) order: TestOrder,
    /// A listener uses the database at each event.
    pub(super) acts: bool,
}

impl FaultRunConfig {
    pub(super) fn new(workers: usize, mapped: bool) -> FaultRunConfig {
        FaultRunConfig {
            workers,
            mapped,
            blob_file_size: 8 << 10,
            commits_per_sync: 3,
            pool: false,
            order: TestOrder::Bytes,
            acts: false,
        }
    }

    fn nth_key(self, n: u64) -> Vec<u8> {
        self.order.valid_key(format!("key {n:02}").as_bytes())
    }
}

/// Uses the database at each event. Its calls may fail like those of other threads.
#[derive(Debug, Default)]
struct Acts(Mutex<Option<Database>>);

impl Acts {
    fn act(&self, db: &Database) -> Result<()> {
        let metrics = db.metrics();
        assert!(metrics.memtable_bytes >= metrics.active_memtable_bytes);
        let part = db.open_partition("listener", Default::default())?;
        part.insert("k", [0; 100])?;
        db.snapshot().get(&part, "k")?;
        part.flush()?;
        db.partition(PARTITION_NAMES[0])?.flush()
    }
}

impl Listener for Acts {
    fn on_event(&self, event: &Event) {
        // The lock is held during the calls: after `rest` the listener's thread has no handle that keeps the directory
        // locked.
        let db = self.0.lock().unwrap();
        // It does not react to a flush that it requested itself.
        let own = matches!(event, Event::Flushed { partition, .. } if partition == "listener");
        if let Some(db) = db.as_ref().filter(|_| !own) {
            let _may_fail = self.act(db);
        }
    }
}

/// One database and its recorded results. Both partitions get the same writes.
pub(super) struct FaultRun {
    config: FaultRunConfig,
    fs: Arc<dyn Fs>,
    db: Option<Database>,
    partitions: Vec<Partition>,
    /// For each key the last acknowledged value, and the values of later failed commits, which may be visible or not.
    acknowledged: Map,
    unacknowledged: BTreeMap<Vec<u8>, Vec<Option<Vec<u8>>>>,
    commits: u32,
    loads: u8,
    /// The loads that may be there, 0 if the partition may be empty: the last one that was acknowledged, and later ones
    /// that failed.
    possible_loads: Vec<u8>,
    pub(super) errors: Vec<(FaultPhase, azekura::Error)>,
    phase: FaultPhase,
    rng: SeededRng,
    acts: Arc<Acts>,
}

fn config(fs: Arc<dyn Fs>, style: FaultRunConfig, salt: u64) -> Config {
    let env: Arc<dyn azekura::fs::Env> =
        if style.workers == 0 { Arc::new(TestEnv::new(salt)) } else { Arc::new(SystemEnv::new()) };
    Config::new(Path::new(DIR))
        .fs(fs)
        .env(env)
        .workers(style.workers)
        .mapped_wal(style.mapped)
        .wal_segment_size(64 << 10)
        .max_open_files(8)
        .cache_size(4 << 10)
}

fn options(style: FaultRunConfig, name: &str) -> PartitionCreateOptions {
    if style.pool && (name == PARTITION_NAMES[1] || name == LOADED_PARTITION) {
        let sizes = PmemOptions::default().max_size(8 << 20).growth_step(4 << 10);
        return PartitionCreateOptions::default().engine(EngineType::Pmem(sizes));
    }
    let separation = KvSeparationOptions::default()
        .separation_threshold(60)
        .blob_file_target_size(style.blob_file_size)
        .direct_write_threshold(120);
    PartitionCreateOptions::default().block_size(256).max_memtable_size(16 << 10).with_kv_separation(separation)
}

fn open_part(db: &Database, style: FaultRunConfig, name: &str) -> Result<Partition> {
    open_ordered(style.order, db, name, options(style, name), None)
}

/// The load whose entries the partition has, which must be all of them; 0 if it is empty.
fn find_load(part: &Partition) -> Result<u8> {
    let values: Vec<_> = part.values().collect::<Result<_>>()?;
    let Some(first) = values.first() else { return Ok(0) };
    assert!(values.iter().all(|value| value[0] == first[0]), "entries of several loads");
    assert_eq!(values.len() as u64, LOADED_KEYS, "a part of load {}", first[0]);
    Ok(first[0])
}

impl FaultRun {
    pub(super) fn new(fs: Arc<dyn Fs>, style: FaultRunConfig) -> FaultRun {
        FaultRun {
            config: style,
            fs,
            db: None,
            partitions: Vec::new(),
            acknowledged: Map::new(),
            unacknowledged: BTreeMap::new(),
            commits: 0,
            loads: 0,
            possible_loads: vec![0],
            errors: Vec::new(),
            phase: FaultPhase::Create,
            rng: SeededRng::new(7),
            acts: Arc::default(),
        }
    }

    /// Records an error and returns `None`.
    fn record_error<T>(&mut self, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.errors.push((self.phase, error));
                None
            }
        }
    }

    /// Runs one phase. After a failure, the next phase continues.
    pub(super) fn run_phase(&mut self, phase: FaultPhase) {
        self.phase = phase;
        match phase {
            FaultPhase::Create => self.open(1),
            FaultPhase::Write => self.write(12),
            FaultPhase::Flush => {
                self.write(4);
                for part in self.partitions.clone() {
                    self.record_error(part.flush());
                }
                self.read();
            }
            FaultPhase::Compact => {
                self.write(6);
                for part in self.partitions.clone() {
                    self.record_error(part.flush());
                    self.record_error(part.major_compact());
                }
                self.work();
                self.write(3);
                self.read();
            }
            FaultPhase::Collect => {
                for part in self.partitions.clone() {
                    self.record_error(part.gc_with_space_amp_target(1.0));
                }
                self.write(3);
                for part in self.partitions.clone() {
                    self.record_error(part.flush());
                }
                self.read();
            }
            FaultPhase::Load => self.load(),
            FaultPhase::Checkpoint => {
                if let Some(db) = self.db.clone() {
                    self.record_error(db.checkpoint(CHECKPOINT_DIR));
                }
            }
            FaultPhase::Close => {
                self.write(2);
                self.partitions.clear();
                self.rest();
                if let Some(db) = self.db.take() {
                    self.record_error(db.close());
                }
            }
            FaultPhase::Reopen => self.open(2),
            FaultPhase::Last => {
                self.open(3);
                self.write(5);
                self.load();
                self.read();
                self.partitions.clear();
                self.rest();
                self.db = None;
            }
        }
    }

    /// Drops the handle of the listener.
    fn rest(&self) {
        let db = self.acts.0.lock().unwrap().take();
        // After the lock is released, because closing delivers events.
        drop(db);
    }

    fn open(&mut self, salt: u64) {
        if self.db.is_none() {
            let mut config = config(Arc::clone(&self.fs), self.config, salt);
            if self.config.acts {
                config = config.listener(self.acts.clone());
            }
            self.db = self.record_error(config.open());
            self.acts.0.lock().unwrap().clone_from(&self.db);
        }
        let Some(db) = self.db.clone() else { return };
        if self.partitions.len() < PARTITION_NAMES.len() {
            let style = self.config;
            let partitions = PARTITION_NAMES.iter().map(|name| open_part(&db, style, name));
            let partitions: Vec<Option<Partition>> = partitions.map(|part| self.record_error(part)).collect();
            self.partitions = partitions.into_iter().collect::<Option<Vec<_>>>().unwrap_or_default();
        }
    }

    fn work(&mut self) {
        for _ in 0..10 {
            let Some(db) = self.db.clone() else { return };
            if self.config.workers > 0 || self.record_error(db.step()) != Some(true) {
                return;
            }
        }
    }

    fn write(&mut self, commits: u32) {
        if self.partitions.is_empty() {
            self.open(u64::from(self.commits) + 100);
        }
        let Some(db) = self.db.clone() else { return };
        if self.partitions.is_empty() {
            return;
        }
        for _ in 0..commits {
            self.commits += 1;
            let asks = (self.commits + 1).is_multiple_of(self.config.commits_per_sync);
            let mode = if asks { PersistMode::SyncData } else { PersistMode::Buffer };
            let mut commit = AtomicWrites::begin(&db, u64::from(self.commits), mode);
            let mut writes = Map::new();
            for _ in 0..3 {
                let key = self.config.nth_key(self.rng.below(20));
                // Large values fill segments, so that the WAL starts new ones.
                let len = if self.rng.chance_one_in(4) { 12_000 } else { 30 };
                writes.insert(key, [self.commits.to_be_bytes().to_vec(), self.rng.random_bytes(len)].concat());
            }
            let removed = self.config.nth_key(self.rng.below(20));
            writes.remove(&removed);
            for part in &self.partitions {
                writes.iter().for_each(|(key, value)| commit.insert(part, key, value));
                match self.commits.is_multiple_of(3) {
                    true => commit.remove_range(part, &removed),
                    false => commit.remove(part, &removed),
                }
            }
            let done = self.record_error(commit.commit());
            let all = writes.into_iter().map(|(key, value)| (key, Some(value))).chain([(removed, None)]);
            all.for_each(|(key, value)| self.record(key, value, done.is_some()));
        }
    }

    /// Loads and clears the whole content of a partition.
    fn load(&mut self) {
        let Some(db) = self.db.clone() else { return };
        let Some(part) = self.record_error(open_part(&db, self.config, LOADED_PARTITION)) else { return };
        for step in 0..4 {
            self.loads += 1;
            let (load, order) = (self.loads, self.config.order);
            let mut entries: Vec<_> =
                (0..LOADED_KEYS).map(|n| (self.config.nth_key(n), vec![load; 5 * n as usize])).collect();
            entries.sort_by_key(|(key, _)| order.canonical(key));
            entries.iter_mut().for_each(|(_, value)| value.insert(0, load));
            let done = match step {
                1 => part.bulk(entries.into_iter().rev()).map(drop),
                2 => part.clear(),
                _ => part.ingest(entries).map(drop),
            };
            let load = if step == 2 { 0 } else { load };
            match self.record_error(done) {
                Some(()) => self.possible_loads = vec![load],
                None => self.possible_loads.push(load),
            }
            let found = find_load(&part);
            if let Some(found) = self.record_error(found) {
                self.compare_load(found);
            }
        }
    }

    fn compare_load(&self, found: u8) {
        let possible = &self.possible_loads;
        assert!(possible.contains(&found), "{:?}: load {found}, {possible:?} are possible", self.phase);
    }

    fn record(&mut self, key: Vec<u8>, value: Option<Vec<u8>>, acknowledged: bool) {
        if !acknowledged {
            self.unacknowledged.entry(key).or_default().push(value);
            return;
        }
        self.unacknowledged.remove(&key);
        match value {
            Some(value) => _ = self.acknowledged.insert(key, value),
            None => _ = self.acknowledged.remove(&key),
        }
    }

    /// Whether `found` is a permitted value of the key.
    fn is_possible_value(&self, key: &[u8], found: Option<&[u8]>) -> bool {
        let failed = self.unacknowledged.get(key).into_iter().flatten();
        failed
            .map(|value| value.as_deref())
            .chain([self.acknowledged.get(key).map(|value| &value[..])])
            .any(|v| v == found)
    }

    /// After any failure, reads return correct data or an error.
    fn read(&mut self) {
        for part in self.partitions.clone() {
            for n in 0..20 {
                let key = self.config.nth_key(n);
                if let Some(found) = self.record_error(part.get(&key)) {
                    assert!(
                        self.is_possible_value(&key, found.as_deref()),
                        "{:?}: {} in {}",
                        self.phase,
                        key.escape_ascii(),
                        part.name
                    );
                }
            }
            let pairs: Result<Vec<_>> = part.iter().collect();
            if let Some(pairs) = self.record_error(pairs) {
                self.compare(&pairs.into_iter().map(|(k, v)| (k.to_vec(), v.to_vec())).collect());
            }
        }
    }

    fn compare(&self, found: &Map) {
        for n in 0..20 {
            let key = self.config.nth_key(n);
            let value = found.get(&key);
            assert!(
                self.is_possible_value(&key, value.map(|v| &v[..])),
                "{:?}: {} holds {value:.9?}",
                self.phase,
                key.escape_ascii()
            );
        }
        assert!(found.len() <= 20);
    }

    /// The device works again: the database opens, and has all acknowledged writes and only whole batches.
    pub(super) fn check_after_repair(mut self, machine: &MemFs) {
        self.partitions.clear();
        self.rest();
        self.db = None;
        self.phase = FaultPhase::Last;
        let fs: Arc<dyn Fs> = Arc::new(machine.clone());
        let style = FaultRunConfig { workers: 0, ..self.config };
        let db = config(Arc::clone(&fs), style, 999).open().unwrap_or_else(|e| panic!("open: {e}"));
        let read = |name: &str| -> Map {
            let part = open_part(&db, style, name).unwrap();
            part.iter().map(|pair| pair.unwrap()).map(|(k, v)| (k.to_vec(), v.to_vec())).collect()
        };
        let (left, right) = (read(PARTITION_NAMES[0]), read(PARTITION_NAMES[1]));
        self.compare(&left);
        assert!(left == right, "half a batch");
        if db.partition_exists(LOADED_PARTITION) {
            self.compare_load(find_load(&open_part(&db, style, LOADED_PARTITION).unwrap()).unwrap());
        }
        db.batch().commit().unwrap();
        db.close().unwrap();
        assert_eq!(read_file(machine, Path::new(FOREIGN_FILE)), b"mine");
        if machine.exists(Path::new(CHECKPOINT_DIR)).unwrap() {
            let copy = Config::new(CHECKPOINT_DIR).fs(fs).env(Arc::new(TestEnv::new(5))).workers(0).open();
            copy.unwrap_or_else(|e| panic!("the checkpoint does not open: {e}"));
        }
    }

    /// Every error has the expected kind, and a poisoned database stays poisoned until it is reopened.
    pub(super) fn check_errors(&self) {
        for (phase, error) in &self.errors {
            let kinds =
                [ErrorKind::Io, ErrorKind::OutOfSpace, ErrorKind::Poisoned, ErrorKind::Locked, ErrorKind::Closed];
            // A short read looks like a truncated file, and a checkpoint may find an incomplete earlier one.
            let short = [ErrorKind::Corruption, ErrorKind::Invalid];
            assert!(kinds.contains(&error.kind()) || short.contains(&error.kind()), "{phase:?}: {error}");
            assert!(!error.message().is_empty());
        }
    }
}

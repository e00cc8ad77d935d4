//! A short life in phases, lived on whatever file system it is given.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use azekura::fs::{Fs, MemFs, SystemEnv, TestEnv};
use azekura::{
    Config, Database, EngineType, ErrorKind, Event, GarbageCollection, KvSeparationOptions, Listener, Partition,
    PartitionCreateOptions, PersistMode, PmemOptions, Result,
};

use crate::world::disk::{content, put};
use crate::world::order::Order;
use crate::world::{Dice, Map};

pub(super) const DIR: &str = "/data/db";
const COPY: &str = "/copies/copy";
/// A file of the user, in a directory beside the checkpoint that older versions took for their own.
const FOREIGN: &str = "/copies/copy.tmp/mine";

/// Puts the file of the user where it is to stay.
pub(super) fn put_foreign_file(machine: &MemFs) {
    machine.create_dir_all(Path::new(FOREIGN).parent().unwrap()).unwrap();
    put(machine, Path::new(FOREIGN), b"mine");
}
const PARTS: [&str; 2] = ["left", "right"];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Create,
    Write,
    Flush,
    Compact,
    Collect,
    Checkpoint,
    Close,
    Reopen,
    Last,
}

pub(super) const PHASES: [Phase; 9] = [
    Phase::Create,
    Phase::Write,
    Phase::Flush,
    Phase::Compact,
    Phase::Collect,
    Phase::Checkpoint,
    Phase::Close,
    Phase::Reopen,
    Phase::Last,
];

/// How a life is lived.
#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    pub(super) workers: usize,
    pub(super) mapped: bool,
    /// Bytes after which a blob file is full: one large value each, or many.
    pub(super) blob_file_size: u64,
    /// Every how many commits one asks for a sync.
    pub(super) sync_every: u32,
    /// The partition `right` is a pool.
    pub(super) pool: bool,
    /// Of the keys, which are sealed for it.
    pub(super) order: Order,
    /// A listener uses the database at each event.
    pub(super) acts: bool,
}

impl Style {
    pub(super) fn new(workers: usize, mapped: bool) -> Style {
        Style { workers, mapped, blob_file_size: 8 << 10, sync_every: 3, pool: false, order: Order::Bytes, acts: false }
    }

    fn key(self, n: u64) -> Vec<u8> {
        self.order.seal(format!("key {n:02}").as_bytes())
    }
}

/// Uses the database at each event. What it gets may be an error as well as what others get.
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
        db.partition(PARTS[0])?.flush()
    }
}

impl Listener for Acts {
    fn on_event(&self, event: &Event) {
        let db = self.0.lock().unwrap().clone();
        // A flush of its own is no reason for another one.
        let own = matches!(event, Event::Flushed { partition, .. } if partition == "listener");
        if let Some(db) = db.filter(|_| !own) {
            let _may_fail = self.act(&db);
        }
    }
}

/// One database with the record of what it said. Both partitions get the same writes.
pub(super) struct Life {
    style: Style,
    fs: Arc<dyn Fs>,
    db: Option<Database>,
    parts: Vec<Partition>,
    /// For each key the value that was acknowledged last, and those of failed commits since, which may be there or not.
    sure: Map,
    maybe: BTreeMap<Vec<u8>, Vec<Option<Vec<u8>>>>,
    commits: u32,
    pub(super) errors: Vec<(Phase, azekura::Error)>,
    phase: Phase,
    dice: Dice,
    acts: Arc<Acts>,
}

fn config(fs: Arc<dyn Fs>, style: Style, salt: u64) -> Config {
    let env: Arc<dyn azekura::fs::Env> =
        if style.workers == 0 { Arc::new(TestEnv::new(salt)) } else { Arc::new(SystemEnv::new()) };
    Config::new(Path::new(DIR))
        .fs(fs)
        .env(env)
        .workers(style.workers)
        .mapped_log(style.mapped)
        .log_segment_size(64 << 10)
        .max_open_files(8)
        .cache_size(4 << 10)
}

fn options(style: Style, name: &str) -> PartitionCreateOptions {
    if style.pool && name == PARTS[1] {
        let sizes = PmemOptions::default().max_size(8 << 20).growth_step(4 << 10);
        return PartitionCreateOptions::default().engine(EngineType::Pmem(sizes));
    }
    let apart = KvSeparationOptions::default()
        .separation_threshold(60)
        .blob_file_target_size(style.blob_file_size)
        .early_from(120);
    PartitionCreateOptions::default().block_size(256).max_memtable_size(16 << 10).with_kv_separation(apart)
}

fn open_part(db: &Database, style: Style, name: &str) -> Result<Partition> {
    let options = style.order.allows(options(style, name));
    match style.order.comparator() {
        None => db.open_partition(name, options),
        Some(comparator) => db.open_partition_with_comparator(name, options, comparator),
    }
}

impl Life {
    pub(super) fn new(fs: Arc<dyn Fs>, style: Style) -> Life {
        Life {
            style,
            fs,
            db: None,
            parts: Vec::new(),
            sure: Map::new(),
            maybe: BTreeMap::new(),
            commits: 0,
            errors: Vec::new(),
            phase: Phase::Create,
            dice: Dice::new(7),
            acts: Arc::default(),
        }
    }

    /// Notes an error and goes on.
    fn note<T>(&mut self, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.errors.push((self.phase, error));
                None
            }
        }
    }

    /// Lives through one phase. Whatever fails, the next phase tries to go on.
    pub(super) fn live(&mut self, phase: Phase) {
        self.phase = phase;
        match phase {
            Phase::Create => self.open(1),
            Phase::Write => self.write(12),
            Phase::Flush => {
                self.write(4);
                for part in self.parts.clone() {
                    self.note(part.flush());
                }
                self.read();
            }
            Phase::Compact => {
                self.write(6);
                for part in self.parts.clone() {
                    self.note(part.flush());
                    self.note(part.major_compact());
                }
                self.work();
                self.write(3);
                self.read();
            }
            Phase::Collect => {
                for part in self.parts.clone() {
                    self.note(part.gc_with_space_amp_target(1.0));
                }
                self.write(3);
                for part in self.parts.clone() {
                    self.note(part.flush());
                }
                self.read();
            }
            Phase::Checkpoint => {
                if let Some(db) = self.db.clone() {
                    self.note(db.checkpoint(COPY));
                }
            }
            Phase::Close => {
                self.write(2);
                self.parts.clear();
                self.rest();
                if let Some(db) = self.db.take() {
                    self.note(db.close());
                }
            }
            Phase::Reopen => self.open(2),
            Phase::Last => {
                self.open(3);
                self.write(5);
                self.read();
                self.parts.clear();
                self.rest();
                self.db = None;
            }
        }
    }

    /// The listener keeps the database open no longer.
    fn rest(&self) {
        drop(self.acts.0.lock().unwrap().take());
    }

    fn open(&mut self, salt: u64) {
        if self.db.is_none() {
            let mut config = config(Arc::clone(&self.fs), self.style, salt);
            if self.style.acts {
                config = config.listener(self.acts.clone());
            }
            self.db = self.note(config.open());
            self.acts.0.lock().unwrap().clone_from(&self.db);
        }
        let Some(db) = self.db.clone() else { return };
        if self.parts.len() < PARTS.len() {
            let style = self.style;
            let parts = PARTS.iter().map(|name| open_part(&db, style, name));
            let parts: Vec<Option<Partition>> = parts.map(|part| self.note(part)).collect();
            self.parts = parts.into_iter().collect::<Option<Vec<_>>>().unwrap_or_default();
        }
    }

    fn work(&mut self) {
        for _ in 0..10 {
            let Some(db) = self.db.clone() else { return };
            if self.style.workers > 0 || self.note(db.step()) != Some(true) {
                return;
            }
        }
    }

    fn write(&mut self, commits: u32) {
        if self.parts.is_empty() {
            self.open(u64::from(self.commits) + 100);
        }
        let Some(db) = self.db.clone() else { return };
        if self.parts.is_empty() {
            return;
        }
        for _ in 0..commits {
            self.commits += 1;
            let asks = (self.commits + 1).is_multiple_of(self.style.sync_every);
            let mode = if asks { PersistMode::SyncData } else { PersistMode::Buffer };
            let mut batch = db.batch().durability(mode);
            let mut writes = Map::new();
            for _ in 0..3 {
                let key = self.style.key(self.dice.below(20));
                // Large ones fill segments, so that the log moves on.
                let len = if self.dice.one_in(4) { 12_000 } else { 30 };
                writes.insert(key, [self.commits.to_be_bytes().to_vec(), self.dice.noise(len)].concat());
            }
            let removed = self.style.key(self.dice.below(20));
            writes.remove(&removed);
            for part in &self.parts {
                writes.iter().for_each(|(key, value)| batch.insert(part, key, value));
                batch.remove(part, &removed);
            }
            let done = self.note(batch.commit());
            let all = writes.into_iter().map(|(key, value)| (key, Some(value))).chain([(removed, None)]);
            all.for_each(|(key, value)| self.record(key, value, done.is_some()));
        }
    }

    fn record(&mut self, key: Vec<u8>, value: Option<Vec<u8>>, acknowledged: bool) {
        if !acknowledged {
            self.maybe.entry(key).or_default().push(value);
            return;
        }
        self.maybe.remove(&key);
        match value {
            Some(value) => _ = self.sure.insert(key, value),
            None => _ = self.sure.remove(&key),
        }
    }

    /// Whether `found` is what a key may hold.
    fn fits(&self, key: &[u8], found: Option<&[u8]>) -> bool {
        let failed = self.maybe.get(key).into_iter().flatten();
        failed.map(|value| value.as_deref()).chain([self.sure.get(key).map(|value| &value[..])]).any(|v| v == found)
    }

    /// Reads go on whatever has failed, or say what is in their way; they never tell an untruth.
    fn read(&mut self) {
        for part in self.parts.clone() {
            for n in 0..20 {
                let key = self.style.key(n);
                if let Some(found) = self.note(part.get(&key)) {
                    assert!(
                        self.fits(&key, found.as_deref()),
                        "{:?}: {} in {}",
                        self.phase,
                        key.escape_ascii(),
                        part.name
                    );
                }
            }
            let pairs: Result<Vec<_>> = part.iter().collect();
            if let Some(pairs) = self.note(pairs) {
                self.compare(&pairs.into_iter().map(|(k, v)| (k.to_vec(), v.to_vec())).collect());
            }
        }
    }

    fn compare(&self, found: &Map) {
        for n in 0..20 {
            let key = self.style.key(n);
            let value = found.get(&key);
            assert!(
                self.fits(&key, value.map(|v| &v[..])),
                "{:?}: {} holds {value:.9?}",
                self.phase,
                key.escape_ascii()
            );
        }
        assert!(found.len() <= 20);
    }

    /// The device is in order again: the database opens, has everything that was acknowledged, and half of nothing.
    pub(super) fn end(mut self, machine: &MemFs) {
        self.parts.clear();
        self.rest();
        self.db = None;
        self.phase = Phase::Last;
        let fs: Arc<dyn Fs> = Arc::new(machine.clone());
        let style = Style { workers: 0, ..self.style };
        let db = config(Arc::clone(&fs), style, 999).open().unwrap_or_else(|e| panic!("does not open: {e}"));
        let read = |name: &str| -> Map {
            let part = open_part(&db, style, name).unwrap();
            part.iter().map(|pair| pair.unwrap()).map(|(k, v)| (k.to_vec(), v.to_vec())).collect()
        };
        let (left, right) = (read(PARTS[0]), read(PARTS[1]));
        self.compare(&left);
        assert!(left == right, "half a batch");
        db.batch().commit().unwrap();
        db.close().unwrap();
        assert_eq!(content(machine, Path::new(FOREIGN)), b"mine");
        if machine.exists(Path::new(COPY)).unwrap() {
            let copy = Config::new(COPY).fs(fs).env(Arc::new(TestEnv::new(5))).workers(0).open();
            copy.unwrap_or_else(|e| panic!("the checkpoint does not open: {e}"));
        }
    }

    /// Every error has a kind that says what to do, and a poisoned database stays so until it is opened anew.
    pub(super) fn check_errors(&self) {
        for (phase, error) in &self.errors {
            let kinds =
                [ErrorKind::Io, ErrorKind::OutOfSpace, ErrorKind::Poisoned, ErrorKind::Locked, ErrorKind::Closed];
            // A read that is cut short looks like a file that ends too early, a checkpoint may find half of another.
            let short = [ErrorKind::Corruption, ErrorKind::Invalid];
            assert!(kinds.contains(&error.kind()) || short.contains(&error.kind()), "{phase:?}: {error}");
            assert!(!error.message().is_empty());
        }
    }
}

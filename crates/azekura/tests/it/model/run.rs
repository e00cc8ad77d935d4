//! A database and its model, side by side.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use azekura::testing::{SeededRng, TestEnv, TestOrder};
use azekura::{Config, Database, Iter, Partition, Snapshot};

use super::feed::FeedModel;
use super::followers::FollowerModel;
use super::partition_model::{KeyValue, PartitionModel};
use crate::testkit::RandomOptions;
use crate::testkit::ordered_partitions::open_ordered;
use crate::testkit::test_dir::TestDir;

/// The partitions of a run with their key orders.
pub(super) const PARTITIONS: [(&str, TestOrder); 9] = [
    ("one", TestOrder::Bytes),
    ("two/..\u{0}", TestOrder::Bytes),
    ("three \u{2713}", TestOrder::Bytes),
    ("reversed", TestOrder::Reversed),
    ("any case", TestOrder::AnyCase),
    ("any case, hashed", TestOrder::AnyCaseHashed),
    ("sealed", TestOrder::ChecksummedReversed),
    ("fixed", TestOrder::ChecksummedNumbers),
    ("fixed, hashed", TestOrder::ChecksummedNumbersHashed),
];

/// Counts of operations and of the engine's background work. A generator that never reaches a code path does not test
/// it.
#[derive(Debug, Default)]
pub(super) struct ModelCounters {
    pub(super) ops: BTreeMap<&'static str, u64>,
    pub(super) flushes: u64,
    pub(super) compactions: u64,
    pub(super) trivial_moves: u64,
    pub(super) levels: usize,
    pub(super) replayed: u64,
    /// Commits that the change feed returned, and how often a position was stale.
    pub(super) read_commits: u64,
    pub(super) stale_reads: u64,
}

impl ModelCounters {
    pub(super) fn add(&mut self, other: &ModelCounters) {
        other.ops.iter().for_each(|(op, count)| *self.ops.entry(op).or_default() += count);
        self.flushes += other.flushes;
        self.compactions += other.compactions;
        self.trivial_moves += other.trivial_moves;
        self.levels = self.levels.max(other.levels);
        self.replayed += other.replayed;
        self.read_commits += other.read_commits;
        self.stale_reads += other.stale_reads;
    }
}

/// A partition that is open, with its model.
#[derive(Clone)]
pub(super) struct OpenPartition {
    pub(super) part: Partition,
    pub(super) model: PartitionModel,
}

/// A snapshot with its expected content.
pub(super) struct SnapshotModel {
    pub(super) snapshot: Snapshot,
    pub(super) partitions: BTreeMap<&'static str, OpenPartition>,
}

/// A long-lived iterator, with the pairs that it has not returned yet.
pub(super) struct LongLivedIter {
    pub(super) iter: Iter,
    pub(super) expected: VecDeque<KeyValue>,
    pub(super) partition: &'static str,
}

pub(super) struct ModelRun {
    pub(super) test_dir: TestDir,
    pub(super) options: RandomOptions,
    pub(super) env: TestEnv,
    pub(super) db: Option<Database>,
    pub(super) partitions: BTreeMap<&'static str, OpenPartition>,
    pub(super) snapshots: Vec<SnapshotModel>,
    pub(super) iters: Vec<LongLivedIter>,
    pub(super) follower: Option<FollowerModel>,
    pub(super) feed: Option<FeedModel>,
    /// Whether the WAL is kept, so that no position of the change feed is stale.
    pub(super) keeps_wal: bool,
    pub(super) rng: SeededRng,
    pub(super) counters: ModelCounters,
    pub(super) checkpoints: u64,
    /// The wall clock, and its highest value, in hours since the start.
    pub(super) wall_hour: u64,
    pub(super) hour: u64,
}

impl ModelRun {
    pub(super) fn new(place: TestDir, seed: u64) -> ModelRun {
        let mut subject = ModelRun {
            test_dir: place,
            options: RandomOptions::new(seed),
            env: TestEnv::new(seed),
            db: None,
            partitions: BTreeMap::new(),
            snapshots: Vec::new(),
            iters: Vec::new(),
            follower: None,
            feed: None,
            keeps_wal: seed.is_multiple_of(3),
            rng: SeededRng::new(seed ^ 0x0DE1),
            counters: ModelCounters::default(),
            checkpoints: 0,
            wall_hour: 0,
            hour: 0,
        };
        subject.db = Some(subject.config().open().unwrap());
        subject.open_part(0);
        subject.open_part(3);
        subject.open_part(6 + (seed % 3) as usize);
        subject
    }

    pub(super) fn config(&self) -> Config {
        let config = self.options.config(&self.test_dir.dir, Arc::clone(&self.test_dir.fs), &self.env);
        let kept = Duration::from_secs(if self.keeps_wal { 1 << 30 } else { 0 });
        config.wal_retention(kept).max_retained_wal_size(1 << 40)
    }

    pub(super) fn db(&self) -> &Database {
        self.db.as_ref().expect("the database is open between two operations")
    }

    /// Opens or creates one of [`PARTITIONS`].
    pub(super) fn open_part(&mut self, index: usize) {
        let (name, order) = PARTITIONS[index];
        let part = open_with_order(self.db(), &self.options, name, order);
        self.partitions.entry(name).or_insert_with(|| OpenPartition { part, model: PartitionModel::new(order) });
    }

    /// One of the open partitions.
    pub(super) fn random_partition_name(&mut self) -> &'static str {
        let names: Vec<&'static str> = self.partitions.keys().copied().collect();
        self.rng.pick(&names)
    }

    /// A random key: of few letters, so that keys repeat, and sometimes an unusual one.
    pub(super) fn random_key(&mut self, name: &str) -> Vec<u8> {
        const LETTERS: &[u8] = b"aAbBz\0\xff";
        let bytes = match self.rng.below(16) {
            0 => Vec::new(),
            1..=5 => (0..1 + self.rng.below(5)).map(|_| self.rng.pick(LETTERS)).collect(),
            6 if self.rng.chance_one_in(8) => {
                let len = self.rng.pick(&[300, 5_000, 65_535]);
                vec![self.rng.pick(LETTERS); len]
            }
            _ => format!("key {:03}", self.rng.below(250)).into_bytes(),
        };
        self.partitions[name].model.order.valid_key(&bytes)
    }

    pub(super) fn random_value(&mut self) -> Vec<u8> {
        let len = match self.rng.below(64) {
            0 => 33_000 + self.rng.below(60_000),
            1..=4 => 1_000 + self.rng.below(3_000),
            5..=8 => 0,
            _ => self.rng.below(120),
        };
        let compressible = self.rng.chance_one_in(2);
        if compressible { vec![b'v'; len as usize] } else { self.rng.random_bytes(len as usize) }
    }

    /// Adds the metrics of the engine before a close.
    pub(super) fn record_metrics(&mut self) {
        let metrics = self.db().metrics();
        let levels = self.partitions.values().map(|half| half.part.metrics().levels.len()).max().unwrap_or(0);
        self.counters.flushes += metrics.flushes;
        self.counters.compactions += metrics.compactions;
        self.counters.trivial_moves += metrics.trivial_moves;
        self.counters.levels = self.counters.levels.max(levels);
    }
}

/// Opens a partition with its comparator.
pub(super) fn open_with_order(db: &Database, options: &RandomOptions, name: &str, order: TestOrder) -> Partition {
    open_ordered(order, db, name, options.partition_options(name), options.merge_operator(name)).unwrap()
}

//! The change feed: copies of all partitions that only read changes, from a position that is kept as text, equal the
//! model.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use azekura::{ChangePosition, CommittedBatch, Database, ErrorKind, Operation, Result};

use super::partition_model::{ModelBounds, PartitionModel};
use super::run::{ModelRun, OpenPartition, PARTITIONS};

/// The start of the test clock, in milliseconds since 1970, and an hour.
const START_MS: u64 = 1_700_000_000_000;
const HOUR_MS: u64 = 3_600_000;

/// Copies of the partitions as of a position.
pub(super) struct FeedModel {
    position: String,
    copies: BTreeMap<&'static str, PartitionModel>,
    commits: u64,
}

/// The changes of one read.
struct FeedReader<'a> {
    copies: &'a mut BTreeMap<&'static str, PartitionModel>,
    /// The present state. It contains all changes that are read.
    present: &'a BTreeMap<&'static str, OpenPartition>,
    /// Keys whose value was gone. A later change must set or remove them.
    unknown: BTreeSet<(&'static str, Vec<u8>)>,
    /// Whether present values were read, of an ingest or below an operand, which may contain later changes, so that
    /// operands may not be applied again.
    has_read_ahead: bool,
    is_pool: &'a dyn Fn(&str) -> bool,
}

fn owned(bound: Bound<&[u8]>) -> Bound<Vec<u8>> {
    bound.map(<[u8]>::to_vec)
}

impl FeedModel {
    fn of(run: &ModelRun) -> FeedModel {
        let copies = run.partitions.iter().map(|(name, half)| (*name, half.model.clone())).collect();
        FeedModel { position: run.db().change_position().unwrap().to_string(), copies, commits: 0 }
    }

    /// Applies all changes since the position.
    fn read(&mut self, db: &Database, mut reader: FeedReader<'_>) -> Result<()> {
        let mut last: ChangePosition = self.position.parse()?;
        let mut changes = db.changes_since(last)?;
        for commit in changes.by_ref() {
            let commit = commit?;
            assert!(commit.position() > last, "a commit is returned once");
            last = commit.position();
            reader.apply(&commit)?;
            self.commits += 1;
        }
        assert_eq!(changes.position(), db.change_position()?, "all commits are returned");
        self.position = changes.position().to_string();
        for (name, canonical) in reader.unknown {
            let is_expired = reader.present[name].model.get(&canonical).is_none();
            assert!(is_expired, "{name}: the value of {canonical:?} is gone, and no later change follows");
        }
        Ok(())
    }
}

impl FeedReader<'_> {
    fn apply(&mut self, commit: &CommittedBatch) -> Result<()> {
        for change in commit.changes() {
            let (name, order) = PARTITIONS.into_iter().find(|(name, _)| *name == change.partition).unwrap();
            let copy = self.copies.entry(name).or_insert_with(|| PartitionModel::new(order));
            let present = &self.present[name].model;
            let known = |key: &[u8]| (name, order.canonical(key));
            match change.operation {
                Operation::Insert { key, value, expires_ms } => {
                    self.unknown.remove(&known(key));
                    match (value.get()?, expires_ms) {
                        (Some(value), None) => copy.insert(key, &value),
                        (Some(value), Some(ms)) => copy.insert_until(key, &value, (ms - START_MS) / HOUR_MS + 1),
                        (None, _) => {
                            copy.remove(key);
                            self.unknown.insert(known(key));
                        }
                    }
                }
                Operation::Remove { key } => {
                    copy.remove(key);
                    self.unknown.remove(&known(key));
                }
                Operation::RemoveRange { start, end } => {
                    let bounds = (owned(start), owned(end));
                    copy.remove_range(&bounds);
                    self.unknown.retain(|(other, key)| *other != name || !copy.contains(&bounds, key));
                }
                // A pool computes the value at once, from one that may have expired since.
                Operation::Merge { key, .. }
                    if self.has_read_ahead || (self.is_pool)(name) || self.unknown.contains(&known(key)) =>
                {
                    self.has_read_ahead |= self.unknown.remove(&known(key));
                    copy.copy_key(present, key);
                }
                Operation::Merge { key, operand } => copy.merge(key, operand, false),
                Operation::Ingest { first, last } => {
                    let bounds: ModelBounds = (Bound::Included(first.to_vec()), Bound::Included(last.to_vec()));
                    copy.remove_range(&bounds);
                    present.range(&bounds).iter().for_each(|(key, _)| copy.copy_key(present, key));
                    self.unknown.retain(|(other, key)| *other != name || !copy.contains(&bounds, key));
                    self.has_read_ahead = true;
                }
                _ => panic!("an unknown change"),
            }
        }
        Ok(())
    }
}

impl ModelRun {
    /// Reads the changes since the last call, or begins with the present state.
    pub(super) fn read_changes(&mut self) {
        self.catch_up_clock();
        let Some(mut feed) = self.feed.take().filter(|_| !self.rng.chance_one_in(10)) else {
            self.feed = Some(FeedModel::of(self));
            return;
        };
        let is_pool = |name: &str| self.options.is_pool(name);
        let mut copies = std::mem::take(&mut feed.copies);
        let reader = FeedReader {
            copies: &mut copies,
            present: &self.partitions,
            unknown: BTreeSet::new(),
            has_read_ahead: false,
            is_pool: &is_pool,
        };
        let read = feed.read(self.db(), reader);
        self.counters.read_commits += std::mem::take(&mut feed.commits);
        if let Err(error) = read {
            assert!(error.kind() == ErrorKind::Stale && !self.keeps_wal, "{error}");
            self.counters.stale_reads += 1;
            self.feed = Some(FeedModel::of(self));
            return;
        }
        for (name, half) in &self.partitions {
            let copy = copies.entry(name).or_insert_with(|| PartitionModel::new(half.model.order));
            copy.expire(self.hour);
            assert!(copy.pairs() == half.model.pairs(), "{name}: the changes give another content");
        }
        self.feed = Some(FeedModel { copies, ..feed });
    }

    /// The changes of a partition that was deleted are left out from now on.
    pub(super) fn forget_copy(&mut self, name: &str) {
        if let Some(feed) = &mut self.feed {
            feed.copies.remove(name);
        }
    }
}

//! What a commit has acquired before it is queued: space in trees, and large values in blob files. Undone unless the
//! commit is applied.

use std::sync::Arc;

use crate::base::key_range::KeyRange;
use crate::base::version_edit::PartitionId;
use crate::base::{RecordKind, Result};
use crate::db::catalog::PartitionState;
use crate::db::commit::{CommitPath, CommitRequest};
use crate::db::state::partition_tree::PartitionTree;
use crate::engine::{BatchReservation, PlannedChange, RecordReservation};
use crate::lsm::direct_file::DirectBlobWrite;
use crate::vfs::fs::PersistenceLevel;
use crate::wal::format::WalRecordIter;

/// Space that trees reserved for a commit. If this is dropped before the commit is applied, the space is freed.
pub(crate) struct BatchReservations<'a> {
    per_tree: Vec<TreeReservation<'a>>,
    /// The space of each record with a value, in payload order.
    records: Vec<RecordReservation>,
    applied: bool,
}

/// The reservation of one tree.
struct TreeReservation<'a> {
    partition: PartitionId,
    tree: &'a PartitionTree,
    changes: Vec<PlannedChange<'a>>,
    /// Indexes of its records with values in [`BatchReservations::records`].
    indexes: Vec<usize>,
    batch: BatchReservation,
}

impl<'a> BatchReservations<'a> {
    /// Reserves the space that the trees of `commit` will need for it.
    ///
    /// # Errors
    /// `OutOfSpace` if a tree is full; then nothing is reserved.
    pub(crate) fn reserve(commit: &CommitRequest<'a>) -> Result<BatchReservations<'a>> {
        let mut planned: Vec<TreeReservation<'a>> = Vec::new();
        for partition in commit.partitions {
            if let Some(tree) = partition.tree_if_built().filter(|tree| tree.needs_preparation()) {
                let (changes, indexes) = (Vec::new(), Vec::new());
                let batch = BatchReservation::default();
                planned.push(TreeReservation { partition: partition.id, tree, changes, indexes, batch });
            }
        }
        // All batches reserve in this order, because a reservation may wait for other batches.
        planned.sort_by_key(|tree| tree.partition);
        let mut count = 0;
        for record in WalRecordIter::new(commit.payload) {
            let record = record?;
            let Some(tree) = planned.iter_mut().find(|tree| tree.partition == record.partition) else { continue };
            let value_len = record.kind.is_value().then_some(record.value.len());
            let range = match record.kind {
                RecordKind::RangeDelete => Some(KeyRange::decode(record.key, record.value)?),
                _ => None,
            };
            tree.changes.push(PlannedChange { key: record.key, value_len, range });
            if value_len.is_some() {
                tree.indexes.push(count);
                count += 1;
            }
        }
        let per_tree = Vec::with_capacity(planned.len());
        let mut reserved = BatchReservations { per_tree, records: vec![(0, 0); count], applied: false };
        for mut part in planned {
            let mut records = vec![(0, 0); part.indexes.len()];
            part.batch = part.tree.prepare(&part.changes, &mut records)?;
            for (index, record) in part.indexes.iter().zip(records) {
                reserved.records[*index] = record;
            }
            reserved.per_tree.push(part);
        }
        Ok(reserved)
    }

    /// How the commit becomes durable.
    pub(crate) fn commit_path(&self) -> CommitPath {
        match self.per_tree.iter().any(|part| part.tree.persistence_level() == PersistenceLevel::PowerLoss) {
            true => CommitPath::SyncBeforeApply,
            false => CommitPath::Logged,
        }
    }

    /// The space of each record with a value, in payload order.
    pub(crate) fn records(&self) -> &[RecordReservation] {
        &self.records
    }

    /// The commit is applied, or its state is unknown: the space of records is not freed.
    pub(crate) fn mark_applied(mut self) {
        self.applied = true;
    }
}

impl Drop for BatchReservations<'_> {
    fn drop(&mut self) {
        for part in &self.per_tree {
            if !self.applied {
                part.indexes.iter().for_each(|index| part.tree.free_reservation(self.records[*index]));
            }
            part.tree.release(part.batch);
        }
    }
}

/// The direct blob writes of a commit. Dropping them releases them, unless the commit was applied: no pointer refers to
/// the values, so their bytes are stale.
#[derive(Default)]
pub(crate) struct DirectBlobWrites {
    writes: Vec<(Arc<PartitionState>, DirectBlobWrite)>,
    bytes: u64,
}

impl DirectBlobWrites {
    pub(crate) fn add(&mut self, partition: &Arc<PartitionState>, write: DirectBlobWrite) {
        self.bytes += u64::from(write.pointer.value_len);
        self.writes.push((Arc::clone(partition), write));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.writes.len()
    }

    /// Releases all writes but the first `len`.
    pub(crate) fn truncate(&mut self, len: usize) {
        let released = DirectBlobWrites { writes: self.writes.split_off(len.min(self.writes.len())), bytes: 0 };
        self.bytes = self.writes.iter().map(|(_, write)| u64::from(write.pointer.value_len)).sum();
        drop(released);
    }

    /// Returns the sum of the value lengths in bytes, before compression.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes the values durable.
    ///
    /// # Errors
    /// `Poisoned` if values of other commits may be lost too. After any other error only this commit fails.
    pub(crate) fn sync(&self) -> Result<()> {
        let mut synced: Vec<&Arc<PartitionState>> = Vec::new();
        for (partition, _) in &self.writes {
            if synced.iter().any(|other| Arc::ptr_eq(other, partition)) {
                continue;
            }
            synced.push(partition);
            let writes = self.writes.iter().filter(|(other, _)| Arc::ptr_eq(other, partition));
            partition.lsm()?.sync_direct_writes(writes.map(|(_, write)| write))?;
        }
        Ok(())
    }

    /// Tells that the WAL may get the pointers to the values, whether they are durable or not.
    ///
    /// # Errors
    /// The error of a failed sync that has lost a value; then the commit must not be written.
    pub(crate) fn begin_commit(&self) -> Result<BegunCommit<'_>> {
        let mut begun = BegunCommit { writes: &self.writes[..0], may_be_in_wal: false };
        for (n, (_, write)) in self.writes.iter().enumerate() {
            write.begin_commit()?;
            begun.writes = &self.writes[..=n];
        }
        begun.may_be_in_wal = true;
        Ok(begun)
    }

    /// Keeps the values. Called when memtables contain pointers to them, or when the state of the commit is unknown.
    pub(crate) fn mark_applied(mut self) {
        self.writes.clear();
    }
}

/// The direct blob writes of a commit in progress. The WAL may have the commit, also after a panic, unless it
/// [was refused](BegunCommit::refuse).
#[derive(Default)]
pub(crate) struct BegunCommit<'a> {
    writes: &'a [(Arc<PartitionState>, DirectBlobWrite)],
    may_be_in_wal: bool,
}

impl BegunCommit<'_> {
    /// The WAL does not have the commit.
    pub(crate) fn refuse(&mut self) {
        self.may_be_in_wal = false;
    }
}

impl Drop for BegunCommit<'_> {
    fn drop(&mut self) {
        self.writes.iter().for_each(|(_, write)| write.end_commit(self.may_be_in_wal));
    }
}

impl Drop for DirectBlobWrites {
    fn drop(&mut self) {
        let is_forked = |partition: &PartitionState| {
            partition.lsm_if_built().is_some_and(|tree| tree.context.snapshots.is_forked())
        };
        if self.writes.first().is_some_and(|(partition, _)| is_forked(partition)) {
            return std::mem::forget(std::mem::take(&mut self.writes)); // the child may wait forever for a lock
        }
        for (partition, write) in self.writes.drain(..) {
            if let Some(tree) = partition.lsm_if_built() {
                tree.release_direct_write(&write);
            }
        }
    }
}

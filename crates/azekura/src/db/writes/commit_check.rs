//! Validation of a commit: which keys and ranges must not have changed since they were read.
//!
//! The committing thread validates its commit before it is queued, and the group-commit leader validates it again, when
//! all earlier commits are applied and no single change is in progress. The leader reads only what has changed in
//! between, which is in most cases nothing, or a few records of memtables and pools.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::key_range::KeyRange;
use crate::base::{Error, RecordKind, Result, SeqNo};
use crate::db::partition_state::PartitionState;
use crate::db::state::scanned_range::OwnedRange;
use crate::mem::slice::Slice;
use crate::wal::format::WalRecordIter;

/// Number of lost rounds after which a call that retries takes an exclusive turn.
pub(crate) const LOST_ROUNDS_MAX: usize = 3;

/// Memory of the counter beside a key that is not part of its [`Slice`], in bytes.
const KEY_OVERHEAD: usize = 24;

/// Memory of a key in bytes, without its `Slice`. A short key is part of its `Slice`.
pub(crate) fn key_bytes(key: &[u8]) -> usize {
    if key.len() < size_of::<Slice>() - 1 { 0 } else { key.len() + KEY_OVERHEAD }
}

/// The keys and ranges of one partition that must be unchanged.
pub(crate) struct ReadsOfPartition {
    pub(crate) partition: Arc<PartitionState>,
    pub(crate) keys: Vec<Slice>,
    pub(crate) ranges: Vec<OwnedRange>,
}

impl ReadsOfPartition {
    fn new(partition: &Arc<PartitionState>) -> ReadsOfPartition {
        ReadsOfPartition { partition: Arc::clone(partition), keys: Vec::new(), ranges: Vec::new() }
    }

    /// Returns the element of `partition` in `reads`; adds it if it is missing.
    pub(crate) fn of<'a>(
        reads: &'a mut Vec<ReadsOfPartition>,
        partition: &Arc<PartitionState>,
    ) -> &'a mut ReadsOfPartition {
        let known = reads.iter().position(|reads| reads.partition.id == partition.id);
        let at = known.unwrap_or_else(|| {
            reads.push(ReadsOfPartition::new(partition));
            reads.len() - 1
        });
        &mut reads[at]
    }
}

/// What must be unchanged since a registered snapshot for a commit to be written. The owner keeps the snapshot
/// registered until the commit has returned.
pub(crate) struct CommitCheck {
    reads: Vec<ReadsOfPartition>,
    /// Whether the keys that the commit writes must be unchanged too.
    includes_writes: bool,
    /// Whether the commit belongs to the exclusive turn.
    in_turn: bool,
    /// Another check of the same commit, which is made first.
    first: Option<Arc<CommitCheck>>,
    /// Nothing was changed after the snapshot through this sequence number.
    unchanged_through: AtomicU64,
}

impl CommitCheck {
    /// A check of reads at `read_seqno`.
    pub(crate) fn new(
        reads: Vec<ReadsOfPartition>,
        includes_writes: bool,
        in_turn: bool,
        read_seqno: SeqNo,
    ) -> CommitCheck {
        let unchanged_through = AtomicU64::new(read_seqno.0);
        CommitCheck { reads, includes_writes, in_turn, first: None, unchanged_through }
    }

    /// Adds the check `first`, if there is one.
    pub(crate) fn after(self, first: Option<&Arc<CommitCheck>>) -> CommitCheck {
        CommitCheck { first: first.cloned(), ..self }
    }

    pub(crate) fn is_in_turn(&self) -> bool {
        self.in_turn
    }

    /// Validates the commit of `payload` through `visible`, the last visible sequence number.
    ///
    /// # Errors
    /// `Conflict` names a key that was changed. `Closed` if a partition was deleted, `Io` and `Corruption` from
    /// reading, `Invalid` if a comparator panicked. No error poisons the database, because nothing was logged.
    pub(crate) fn validate(&self, payload: &[u8], partitions: &[Arc<PartitionState>], visible: SeqNo) -> Result<()> {
        if let Some(first) = &self.first {
            first.validate(payload, partitions, visible)?;
        }
        self.reads.iter().try_for_each(|reads| reads.partition.tree().map(drop))?;
        let since = SeqNo(self.unchanged_through.load(Ordering::Relaxed));
        if since >= visible {
            return Ok(());
        }
        let checked = catch_unwind(AssertUnwindSafe(|| {
            self.check_reads(since)?;
            if self.includes_writes { check_writes(payload, partitions, since) } else { Ok(()) }
        }));
        checked.unwrap_or_else(|_| Err(Error::invalid("a comparator panicked while a commit was validated")))?;
        self.unchanged_through.store(visible.0, Ordering::Relaxed);
        Ok(())
    }

    fn check_reads(&self, since: SeqNo) -> Result<()> {
        for reads in &self.reads {
            let tree = reads.partition.tree()?;
            for key in &reads.keys {
                if tree.changed_since(key, since)? {
                    return Err(conflict(&reads.partition, key));
                }
            }
            for (start, end) in &reads.ranges {
                if let Some(key) = tree.range_changed_since((start.as_ref(), end.as_ref()), since)? {
                    return Err(conflict(&reads.partition, &key));
                }
            }
        }
        Ok(())
    }
}

fn check_writes(payload: &[u8], partitions: &[Arc<PartitionState>], since: SeqNo) -> Result<()> {
    for record in WalRecordIter::new(payload) {
        let record = record?;
        let Some(partition) = partitions.iter().find(|partition| partition.id == record.partition) else { continue };
        let tree = partition.tree()?;
        if record.kind == RecordKind::RangeDelete {
            let (start, end) = KeyRange::decode(record.key, record.value)?.into_bounds();
            let (start, end) = (start.map(<[u8]>::to_vec), end.map(<[u8]>::to_vec));
            if let Some(key) = tree.range_changed_since((start.as_ref(), end.as_ref()), since)? {
                return Err(conflict(partition, &key));
            }
        } else if tree.changed_since(record.key, since)? {
            return Err(conflict(partition, record.key));
        }
    }
    Ok(())
}

/// The error for a key that was changed by another commit.
pub(crate) fn conflict(partition: &PartitionState, key: &[u8]) -> Error {
    Error::conflict(&partition.name, key)
}

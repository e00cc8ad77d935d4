//! What trees hold for the records of a commit until it is applied: large values in blob files, and space in pools.

use std::borrow::Cow;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::{EntryRef, Result, SeqNo};
use crate::db::partition_state::PartitionState;
use crate::db::state::list_growth::{list_bytes, reserve_more};
use crate::engine::{NumberedRecords, Staged};
use crate::wal::format::WalRecordIter;

/// The partitions of a commit, and what their trees have [staged](Staged) for its records.
#[derive(Default)]
pub(crate) struct StagedRecords<'a> {
    partitions: Cow<'a, [Arc<PartitionState>]>,
    records: Vec<StagedRecord>,
    is_applied: AtomicBool,
}

/// Owns [`StagedRecords`]. Dropping it releases them: they are undone unless the commit
/// [was applied](StagedRecords::mark_applied).
#[derive(Default)]
pub(crate) struct StagedGuard<'a>(StagedRecords<'a>);

/// What one tree has staged for one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StagedRecord {
    /// The index of the partition.
    partition: usize,
    /// The number of the record in the payload; `u32::MAX` if it was staged before the payload was complete, or is for
    /// all records of the partition.
    number: u32,
    staged: Staged,
}

impl StagedRecords<'_> {
    pub(crate) fn partitions(&self) -> &[Arc<PartitionState>] {
        &self.partitions
    }

    pub(crate) fn records(&self) -> &[StagedRecord] {
        &self.records
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The number of partitions and of staged records.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.partitions.len(), self.records.len())
    }

    /// Memory of the list with one more record in bytes, with the copy for the thread that applies the commit.
    pub(crate) fn list_bytes(&self) -> u64 {
        list_bytes(&self.records, 1) + size_of_val(&*self.records) as u64
    }

    /// Sum of the lengths of the staged values in bytes, before compression.
    pub(crate) fn value_bytes(&self) -> u64 {
        self.records.iter().filter_map(|record| record.staged.blob()).map(|pointer| u64::from(pointer.value_len)).sum()
    }

    /// Makes the staged values durable.
    ///
    /// # Errors
    /// `Poisoned` if values of other commits may be lost too. After any other error only this commit fails.
    pub(crate) fn sync(&self) -> Result<()> {
        for (at, partition) in self.partitions.iter().enumerate() {
            let mut staged =
                self.records.iter().filter(|record| record.partition == at).map(|record| record.staged).peekable();
            if staged.peek().is_some() {
                partition.tree()?.sync_staged(&mut staged)?;
            }
        }
        Ok(())
    }

    /// Tells that the WAL may get the pointers to the staged values, whether they are durable or not.
    ///
    /// # Errors
    /// The error of a failed sync that has lost a value; then the commit must not be written.
    pub(crate) fn begin_commit(&self) -> Result<BegunCommit<'_>> {
        let mut begun = BegunCommit { staged: self, count: 0, may_be_in_wal: false };
        for record in &self.records {
            self.partitions[record.partition].tree()?.begin_commit(record.staged)?;
            begun.count += 1;
        }
        begun.may_be_in_wal = true;
        Ok(begun)
    }

    /// The commit is applied, or its state is unknown.
    pub(crate) fn mark_applied(&self) {
        self.is_applied.store(true, Ordering::Relaxed);
    }

    /// A copy for a thread that applies the commit, while another one owns what is staged.
    pub(crate) fn to_owned(&self) -> StagedRecords<'static> {
        let partitions = Cow::Owned(self.partitions.to_vec());
        StagedRecords { partitions, records: self.records.clone(), is_applied: AtomicBool::new(false) }
    }
}

impl<'a> StagedGuard<'a> {
    /// Nothing is staged.
    pub(crate) fn of(partitions: &'a [Arc<PartitionState>]) -> StagedGuard<'a> {
        let partitions = Cow::Borrowed(partitions);
        StagedGuard(StagedRecords { partitions, records: Vec::new(), is_applied: AtomicBool::new(false) })
    }

    /// Adds a partition of the commit, if it is new. Returns its index.
    #[inline]
    pub(crate) fn add_partition(&mut self, partition: &Arc<PartitionState>) -> usize {
        let partitions = &mut self.0.partitions;
        let is_same = |known: &Arc<PartitionState>| known.id == partition.id;
        match partitions.last().is_some_and(is_same) {
            true => partitions.len() - 1,
            false => partitions.iter().position(is_same).unwrap_or_else(|| {
                partitions.to_mut().push(Arc::clone(partition));
                partitions.len() - 1
            }),
        }
    }

    /// Adds what the tree of `partition` has staged for a record.
    pub(crate) fn add(&mut self, partition: &Arc<PartitionState>, staged: Staged) {
        let partition = self.add_partition(partition);
        reserve_more(&mut self.0.records, 1);
        self.0.records.push(StagedRecord { partition, number: u32::MAX, staged });
    }

    /// Releases what was added since the [`counts`](StagedRecords::counts) were taken.
    pub(crate) fn truncate(&mut self, (partitions, records): (usize, usize)) {
        let StagedRecords { partitions: known, records: staged, .. } = &mut self.0;
        staged.drain(records.min(staged.len())..).for_each(|record| record.release(known, false));
        if partitions < known.len() {
            known.to_mut().truncate(partitions);
        }
    }

    /// Lets the trees of a commit reserve what they need to apply `payload`.
    ///
    /// # Errors
    /// `OutOfSpace` if a tree is full; `Closed`. Then dropping the guard releases what other trees have reserved.
    #[inline]
    pub(crate) fn prepare(&mut self, payload: &[u8]) -> Result<()> {
        if self.partitions.len() == 1 {
            return self.prepare_tree(0, payload);
        }
        // All commits reserve in this order, because a reservation may wait for other commits.
        let mut order: Vec<usize> = (0..self.partitions.len()).collect();
        order.sort_unstable_by_key(|at| self.partitions[*at].id);
        for at in order {
            self.prepare_tree(at, payload)?;
        }
        self.0.records.sort_by_key(|record| record.number);
        Ok(())
    }

    #[inline]
    fn prepare_tree(&mut self, at: usize, payload: &[u8]) -> Result<()> {
        let partition = &self.partitions[at];
        let staged = partition.tree()?.prepare(&|| records_of(partition, payload))?;
        if !staged.is_empty() {
            let records = staged.into_iter().map(|(number, staged)| StagedRecord { partition: at, number, staged });
            self.0.records.extend(records);
        }
        Ok(())
    }
}

impl<'a> Deref for StagedGuard<'a> {
    type Target = StagedRecords<'a>;

    fn deref(&self) -> &StagedRecords<'a> {
        &self.0
    }
}

impl Drop for StagedGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        let StagedRecords { partitions, records, is_applied } = &mut self.0;
        let is_applied = *is_applied.get_mut();
        records.iter().for_each(|record| record.release(partitions, is_applied));
    }
}

/// The staged values of a commit in progress. The WAL may have the commit, also after a panic, unless it
/// [was refused](BegunCommit::refuse).
pub(crate) struct BegunCommit<'a> {
    staged: &'a StagedRecords<'a>,
    /// Number of records whose trees know of the commit.
    count: usize,
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
        for record in &self.staged.records[..self.count] {
            if let Some(tree) = self.staged.partitions[record.partition].tree_if_built() {
                tree.end_commit(record.staged, self.may_be_in_wal);
            }
        }
    }
}

impl StagedRecord {
    fn release(&self, partitions: &[Arc<PartitionState>], is_applied: bool) {
        if let Some(tree) = partitions[self.partition].tree_if_built() {
            tree.release(self.staged, is_applied);
        }
    }
}

/// What trees have staged for the records of a payload, by ascending numbers.
#[derive(Clone, Copy)]
pub(crate) struct StagedByNumber<'a>(&'a [StagedRecord]);

impl<'a> StagedByNumber<'a> {
    pub(crate) fn new(records: &'a [StagedRecord]) -> StagedByNumber<'a> {
        debug_assert!(records.is_sorted_by_key(|record| record.number));
        StagedByNumber(records)
    }

    /// Returns what was staged for record `number`. The numbers rise from call to call.
    #[inline]
    pub(crate) fn take(&mut self, number: u32) -> Staged {
        match self.0.split_first() {
            Some((next, rest)) if next.number == number => {
                self.0 = rest;
                next.staged
            }
            _ => Staged::Nothing,
        }
    }
}

/// The records of `partition` in a payload, with their numbers.
fn records_of<'p>(partition: &PartitionState, payload: &'p [u8]) -> Result<NumberedRecords<'p>> {
    let mut records = Vec::new();
    for (record, number) in WalRecordIter::new(payload).zip(0..) {
        let record = record?;
        if record.partition == partition.id {
            let entry = EntryRef { user_key: record.key, seqno: SeqNo::ZERO, kind: record.kind, value: record.value };
            records.push((number, entry));
        }
    }
    Ok(records)
}

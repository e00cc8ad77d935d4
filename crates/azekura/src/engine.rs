//! The engine interface: what the database requires of a storage engine ([`Engine`]), and the sequence number state
//! that both share ([`SeqnoAllocator`], [`SnapshotList`]).
//!
//! `db` owns the sequence numbers, the WAL and the manifest; a tree owns the placement of its records. Long work has
//! two steps: the tree *chooses* a [`Task`] from plain values, and *runs* it when `db` calls it. Background threads
//! and a test that runs one task at a time therefore execute the same code.

mod seqno_allocator;
mod snapshot_list;

use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::version_edit::VersionEdit;
use crate::base::{EntryRef, Error, KeyOrder, RecordKind, Result, SeqNo};
use crate::iter::InternalIter;
use crate::iter::dead_ranges::DeadRangesView;
use crate::mem::slice::Slice;
use crate::vfs::fs::PersistenceLevel;

pub(crate) use seqno_allocator::SeqnoAllocator;
pub(crate) use snapshot_list::{
    ExpiryLimits, LastVisibleSeqno, PartitionReaders, ReadMoment, SnapshotGuard, SnapshotList,
};

/// The [`sealed_load`](Pressure::sealed_load) of a full memtable.
pub(crate) const FULL_MEMTABLE: u64 = 1000;

/// State of a tree from which `db` computes write stalls.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Pressure {
    /// Bytes of sealed memtables that wait for a flush.
    pub(crate) sealed_bytes: u64,
    /// Number of sealed memtables that wait for a flush.
    pub(crate) sealed_memtables: usize,
    /// The size of these in thousandths of a full memtable, each at most [`FULL_MEMTABLE`].
    pub(crate) sealed_load: u64,
    /// Bytes that compaction has to move until the tree is in its normal shape.
    pub(crate) compaction_debt: u64,
    /// Sorted runs on level 0 that a point lookup may have to search.
    pub(crate) l0_runs: usize,
}

/// Kind of a maintenance task that a tree requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    /// Write the oldest sealed memtables to tables.
    Flush,
    /// Compact tables, or move them to the next level.
    Compact,
    /// Copy live values out of stale blob files.
    BlobGc,
}

/// The sequence number at which a read runs.
///
/// A plain read must take the tree's state **first** and the visible sequence number **after** it. In the other
/// order, a flush in between could drop a version that the older sequence number still needs. The tree therefore
/// resolves `Latest` itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadSeqno {
    /// The newest published commit at the time the tree's state was taken, and the time at which a record that expires
    /// is found.
    Latest,
    /// What a registered snapshot reads.
    At(ReadMoment),
}

/// Services of `db` for a running task.
pub(crate) trait EngineHost: Send + Sync {
    /// Returns once every record up to `through` is durable in the WAL. An edit that makes records permanent may be
    /// committed only after this, because power loss could otherwise keep half of a commit.
    fn sync_wal_through(&self, through: SeqNo) -> Result<()>;

    /// Returns the last sequence number in the WAL; pools may have used later ones.
    fn wal_end(&self) -> SeqNo;

    /// Returns the sequence number through which the WAL is durable.
    fn wal_synced_through(&self) -> SeqNo {
        SeqNo::ZERO
    }

    /// Writes the edits to the manifest as one batch and syncs it. After any error but `Poisoned` the manifest does not
    /// have the edits, so the call may be repeated with the same edits or with others.
    fn commit_edits(&self, edits: &[VersionEdit]) -> Result<()>;

    /// Returns the sequence numbers that snapshots read at, ascending, ending with the last visible one. The task
    /// reads them before it decides on its output. A version may be dropped if it is neither the newest one at or
    /// below one of them nor above the last of them, because later readers choose a number at or above the last.
    fn snapshot_seqnos(&self) -> Vec<SeqNo>;

    /// Returns the wall-clock time in milliseconds since 1970.
    fn now_ms(&self) -> u64;

    /// Returns whether the task should stop soon, because the database is closing or more urgent work waits.
    fn should_yield(&self) -> bool;
}

/// Result of a task.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TaskReport {
    pub(crate) level: u8,
    pub(crate) tables: u64,
    pub(crate) bytes_read: u64,
    pub(crate) bytes_written: u64,
    /// Bytes of deleted blob files, minus bytes rewritten.
    pub(crate) bytes_freed: u64,
}

impl TaskReport {
    /// Returns true if the task did nothing: it yielded, or another thread already did the work.
    pub(crate) fn is_idle(&self) -> bool {
        self.tables == 0 && self.bytes_read == 0 && self.bytes_written == 0
    }
}

/// Bounds of the keys that a reader requests.
pub(crate) type KeyBounds<'a> = (Bound<&'a Vec<u8>>, Bound<&'a Vec<u8>>);

/// A fixed state of a tree, from which iterators can be made at any later time. It may also contain later writes,
/// with sequence numbers above the visible one at the time it was taken.
pub(crate) trait EngineView: Send + Sync {
    /// Returns an iterator over key versions: every version within `bounds` that a reader at `at` may need, and
    /// possibly others. `at` must stay registered while the iterator exists. The iterator owns its tables and
    /// memtables. A tree that skips keys by itself does so within `bounds` only.
    fn iter(&self, at: ReadMoment, bounds: KeyBounds<'_>) -> Result<Box<dyn InternalIter>>;

    /// The dead ranges that iterators over this state use and learn, if the tree has some.
    fn dead_ranges(&self) -> Option<DeadRangesView> {
        None
    }

    /// This state with operands of a merge operator instead of the values that they lead to, for a reader that merges
    /// them with later writes. `None` if the tree has no operands.
    fn unmerged(&self) -> Option<Arc<dyn EngineView>> {
        None
    }

    /// Returns a reader for the blob pointers of this state. It owns its files.
    fn blob_resolver(&self) -> Box<dyn BlobResolver>;
}

/// Resolves blob pointers to values. Keeps a read-ahead buffer for sequential callers.
pub(crate) trait BlobResolver: Send {
    /// Returns the value of a [`BlobPointer`](crate::base::RecordKind::BlobPointer) entry whose stored value is
    /// `pointer`.
    ///
    /// # Errors
    /// `Corruption` if the blob file has no such value; `Io` from reading it.
    fn resolve(&mut self, pointer: &[u8]) -> Result<Slice>;

    /// Whether a caller should [announce](BlobResolver::will_resolve) the values that it needs after that of `pointer`,
    /// because the last ones were each read from another place of a device.
    fn wants_announcements(&mut self, pointer: &[u8]) -> bool {
        let _ = pointer;
        false
    }

    /// Announces that the value of `pointer` will be resolved soon, so that the device reads it meanwhile. Only a hint.
    fn will_resolve(&mut self, pointer: &[u8]) {
        let _ = pointer;
    }
}

/// How a tree commits a single record, that is, a commit of one record to one partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SingleCommit {
    /// As any batch: the group-commit leader appends the record to the WAL and applies it.
    InGroup,
    /// The calling thread makes the change itself with [`Engine::write_single`], concurrently with other threads. The
    /// record is in the WAL if `logged`; otherwise the tree is durable without it.
    Concurrent { logged: bool },
}

/// Result of assigning a sequence number: none if no number may be assigned now.
pub(crate) type AssignedSeqno = Result<Option<SeqNo>>;

/// Assigns the sequence number of a change.
pub(crate) type AssignSeqnoFn<'a> = dyn FnMut() -> AssignedSeqno + 'a;

/// What a tree holds for a record of a commit, or for all of them, until the commit is applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Staged {
    #[default]
    Nothing,
    /// The value is in a blob file. The record has the pointer in place of the value.
    Blob(BlobPointer),
    /// Space in a pool for the record: offset and length in bytes.
    Buffer(u64, u64),
    /// What the records take besides their buffers: leaves for splits, and bytes of memory for replaced versions.
    SplitsAndVersions(usize, u64),
}

impl Staged {
    /// The pointer to a staged value.
    pub(crate) fn blob(self) -> Option<BlobPointer> {
        if let Staged::Blob(pointer) = self { Some(pointer) } else { None }
    }
}

/// The records of a batch for one tree, with the number of each in the batch.
pub(crate) type NumberedRecords<'a> = Vec<(u32, EntryRef<'a>)>;

/// A storage engine of one partition: the one contract that `db` has with its trees.
///
/// A batch is committed in four steps. [`stage`](Engine::stage) writes a large value to a blob file when it is added
/// to the batch. [`sync_staged`](Engine::sync_staged) and [`begin_commit`](Engine::begin_commit) precede its pointer in
/// the WAL. [`prepare`](Engine::prepare) reserves the space that the batch needs, so that `apply` does not fail for
/// lack of space. The leader appends the batch to the WAL. [`apply`](Engine::apply) makes the changes in memory.
/// [`release`](Engine::release) ends what `stage` and `prepare` have begun, and undoes it if the batch is not applied.
/// [`single_commit`](Engine::single_commit) says whether a single record takes these steps, or the one step of
/// [`write_single`](Engine::write_single). The default methods are those of a tree that stages and reserves nothing,
/// and is durable through the WAL only.
pub(crate) trait Engine: Send + Sync {
    fn key_order(&self) -> &KeyOrder;

    /// Which failures a change survives, without the WAL, once the call returns.
    fn persistence_level(&self) -> PersistenceLevel {
        PersistenceLevel::WalOnly
    }

    /// Returns how a single record is committed. Does not change while the tree is open.
    fn single_commit(&self) -> SingleCommit {
        SingleCommit::InGroup
    }

    /// Writes a value to a blob file if it is large, before the commit that will have the pointer. `synced`: whether
    /// that commit requests a sync.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file; `Closed` after [`discard`](Engine::discard). Nothing is staged.
    fn stage(&self, _value: &[u8], _synced: bool) -> Result<Staged> {
        Ok(Staged::Nothing)
    }

    /// Makes the values of [`Staged::Blob`] durable, before the WAL has the pointers.
    ///
    /// # Errors
    /// The error of the sync, if no other commit can have lost data; then the values must be released. Else `Poisoned`.
    fn sync_staged(&self, _staged: &mut dyn Iterator<Item = Staged>) -> Result<()> {
        Ok(())
    }

    /// Tells that the WAL may get the pointer to a staged value from now on, whether the value is durable or not, until
    /// [`end_commit`](Engine::end_commit).
    ///
    /// # Errors
    /// The error of a failed sync that has lost the value: then the WAL must not get the pointer.
    fn begin_commit(&self, _staged: Staged) -> Result<()> {
        Ok(())
    }

    /// Ends what [`begin_commit`](Engine::begin_commit) has begun. Unless the WAL may have the pointer, a later loss of
    /// the value concerns no commit.
    fn end_commit(&self, _staged: Staged, _may_be_in_wal: bool) {}

    /// Reserves space for the records of a batch, which `records` returns for this tree. Returns what it reserves for
    /// each record, with the number of the record, by ascending numbers, and behind them what it reserves for all,
    /// with the number `u32::MAX`. Waits for other batches that have reserved the needed memory. A caller with several
    /// trees calls them in the order of their partitions.
    ///
    /// # Errors
    /// `OutOfSpace`; then nothing was reserved.
    fn prepare<'a>(&self, _records: &dyn Fn() -> Result<NumberedRecords<'a>>) -> Result<Vec<(u32, Staged)>> {
        Ok(Vec::new())
    }

    /// Ends what is staged, when the batch is visible, or will not be applied.
    fn release(&self, _staged: Staged, _is_applied: bool) {}

    /// Applies one record of a batch in memory; returns true if a memtable is full and needs a flush. The caller holds
    /// the commit order: records arrive with ascending sequence numbers and become visible only when `db` publishes
    /// them. `staged` is what [`prepare`](Engine::prepare) reserved for the record.
    fn apply(&self, entry: EntryRef<'_>, staged: Staged) -> Result<bool>;

    /// Completes the range deletes that were applied since the last call. The leader calls it when the group with them
    /// is visible, and a follower behind each commit, before any other change is made. A record of kind
    /// [`RangeDelete`](RecordKind::RangeDelete) removes the records of its range with lower sequence numbers, and is
    /// always committed in a group.
    ///
    /// # Errors
    /// `Corruption` if the tree is damaged: the state is unknown.
    fn complete_range_deletes(&self) -> Result<()> {
        Ok(())
    }

    /// Makes one change that is not part of a batch. Several threads may call this at the same time. `assign_seqno`
    /// is called at most once, when nothing can refuse the change any more. It returns the sequence number of the
    /// change, or none if the change may not be made now; then the result is false. Changes of one key get their
    /// sequence numbers in the order in which they are made. When `assign_seqno` returns, the WAL contains the
    /// change, unless the tree is durable without the WAL.
    ///
    /// # Errors
    /// `OutOfSpace`, before `assign_seqno` is called, and the errors of `assign_seqno`: then nothing was changed.
    /// After any other error the state is unknown. `Unsupported` if the tree commits every record
    /// [in a group](SingleCommit::InGroup).
    fn write_single(
        &self,
        _kind: RecordKind,
        _key: &[u8],
        _value: &[u8],
        _assign_seqno: &mut AssignSeqnoFn<'_>,
    ) -> Result<bool> {
        Err(Error::unsupported("the engine commits every record in a group"))
    }

    /// Returns the value of `key` at `at`.
    fn get(&self, key: &[u8], at: ReadSeqno) -> Result<Option<Slice>>;

    /// Returns the values of `keys` at `at`, the moment of a registered snapshot, in the order of `keys`.
    fn multi_get(&self, keys: &[&[u8]], at: ReadMoment) -> Result<Vec<Option<Slice>>>;

    /// Returns the length in bytes of the value of `key` at `at`.
    fn size_of(&self, key: &[u8], at: ReadSeqno) -> Result<Option<u32>>;

    /// Returns whether the state of `key` may differ from its state at `since`: false only if both are equal. Takes
    /// also changes into account that are applied and not visible yet. A sequence number at or below `since` must be
    /// registered as a snapshot, the key must not have changed between the two, and every change up to `since` must be
    /// applied.
    fn changed_since(&self, key: &[u8], since: SeqNo) -> Result<bool>;

    /// Returns a key within `bounds` whose state may differ from its state at `since`, if there is one; otherwise as
    /// [`changed_since`](Engine::changed_since).
    fn range_changed_since(&self, bounds: KeyBounds<'_>, since: SeqNo) -> Result<Option<Vec<u8>>>;

    /// Returns the current state of the tree; its files and memtables are kept until the view is dropped.
    fn view(&self) -> Box<dyn EngineView>;

    /// Number of records less removals, approximate while other threads write. Every version of an overwritten key may
    /// count.
    fn approximate_len(&self) -> u64;

    /// Applies a record of the WAL again, at open. Size limits do not hold until [`end_replay`](Engine::end_replay),
    /// because every acknowledged record must fit. In a follower, a record may be replayed after it, beside readers of
    /// earlier moments.
    fn replay(&self, entry: EntryRef<'_>) -> Result<()>;

    /// Ends the replay of the WAL. From now on size limits hold.
    fn end_replay(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the sequence number through which all records were in permanent files at the last flush; replay skips
    /// these records.
    fn flushed_through(&self) -> SeqNo;

    /// Returns the lowest sequence number of the records that are only in memory and the WAL, if any.
    fn first_unflushed(&self) -> Option<SeqNo>;

    /// Seals the memtable, so that [`Task::Flush`] can write all records applied so far.
    fn seal(&self);

    /// Bytes of the active memtable.
    fn active_bytes(&self) -> u64 {
        0
    }

    /// Bytes of blob files that the records of the active memtable point to.
    fn active_blob_bytes(&self) -> u64 {
        0
    }

    /// Returns the most urgent task whose kind is not in `held`, if any; `forced` also allows compactions that only
    /// `major_compact` requests.
    fn next_task(&self, forced: bool, held: &[Task]) -> Option<Task>;

    /// Runs one task to completion.
    fn run(&self, task: Task, forced: bool, host: &dyn EngineHost) -> Result<TaskReport>;

    /// Returns the inputs of the write stall computation.
    fn pressure(&self) -> Pressure;

    /// Number of bytes that the next checkpoint of the tree needs beyond the current size of its files. Takes no lock.
    fn checkpoint_bytes(&self) -> u64 {
        0
    }

    /// Prevents checkpoints of the tree while the result is held. Waits for a running checkpoint. `None` if the tree
    /// writes no checkpoints.
    fn block_checkpoints(&self) -> Option<std::sync::MutexGuard<'_, ()>> {
        None
    }

    /// Copies the files that are overwritten in place, as of the last checkpoint, for a caller that [blocks
    /// checkpoints](Engine::block_checkpoints). The files of a tree that is durable without the WAL are copied as they
    /// are now, for a caller that prevents commits.
    fn copy_to(&self, _dir: &Path) -> Result<()> {
        Ok(())
    }

    /// Prepares the tree for the close of the database: no task runs any more. A concurrent single change completes if
    /// it has a sequence number, and otherwise returns `Closed`; when this returns, none is in progress.
    fn stop_writes(&self);

    /// Closes the tree. Called last at a successful close, when the WAL records the last sequence number.
    fn close(&self) {}

    /// Discards the tree of a deleted partition, after the edit that drops the partition. Waits until running tasks
    /// have ended. Its files are removed or become obsolete, those in use when their last reader releases them. The
    /// next open removes files whose removal failed.
    fn discard(&self);
}

//! What `db` asks of a pool.

use std::path::Path;
use std::sync::MutexGuard;

use crate::base::{EntryRef, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{Engine, RecordReservation};
use crate::pmem::options::PmemOptions;
use crate::pmem::persistence::PersistCounts;
use crate::pmem::reserve::{Planned, Promise};
use crate::pmem::write::AssignedSeqno;
use crate::vfs::fs::PersistenceLevel;

/// Gives a change its number.
pub(crate) type AssignSeqnoFn<'a> = dyn FnMut() -> AssignedSeqno + 'a;

/// What a pool asks of `db`, and tells it, beyond what any tree does.
pub(crate) trait PmemEngine: Engine {
    fn key_order(&self) -> &KeyOrder;

    /// Records in the tree.
    fn approximate_len(&self) -> u64;

    /// Sets aside what the records of a batch will need: fills `rooms` with one for each that is put. What it returns
    /// is given to [`release_leaf_reservation`](PmemEngine::release_leaf_reservation) when the batch is visible, or
    /// will not be applied. Waits for other batches that have what it needs: who asks several pools asks them in the
    /// order of their partitions.
    ///
    /// # Errors
    /// `OutOfSpace`; then nothing was set aside.
    fn reserve(&self, records: &[Planned<'_>], reservations: &mut [RecordReservation]) -> Result<Promise>;

    /// Gives back a room that was not used.
    fn free_reservation(&self, reservation: RecordReservation);

    fn release_leaf_reservation(&self, promise: Promise);

    /// What a change has survived when it returns, without the log.
    fn persistence_level(&self) -> PersistenceLevel;

    /// Makes one change that stands for itself; its thread need not be the only one. `turn` is called at most once,
    /// when nothing can refuse the change any more, and gives it its number or, if it may not be made now, none: false
    /// then. Changes of one key get their numbers in the order in which they are made. The log has it by then, unless
    /// the pool makes it durable by itself.
    ///
    /// # Errors
    /// Before `turn` is called, `OutOfSpace`; those of `turn`: nothing was changed. After any other nobody knows.
    fn write_single(
        &self,
        kind: RecordKind,
        key: &[u8],
        value: &[u8],
        assign_seqno: &mut AssignSeqnoFn<'_>,
    ) -> Result<bool>;

    /// Adds a record of the log again. `max_size` does not hold until [`end_replay`](PmemEngine::end_replay): what was
    /// acknowledged fits.
    fn replay(&self, entry: EntryRef<'_>) -> Result<()>;

    /// All of the log was added again: from now on `max_size` holds. A pool that holds more refuses puts until enough
    /// was removed.
    fn end_replay(&self) -> Result<()>;

    fn set_options(&self, options: &PmemOptions) -> Result<()>;

    /// The highest sequence number that its files may have held when it was opened.
    fn max_seqno_at_open(&self) -> SeqNo;

    /// Changes end. Those that have a number have been made; who is about to make space for one that has none gets
    /// `Closed`, and nobody is at the pool any more when this returns.
    fn stop_writes(&self);

    /// No change comes any more: the database has closed, and the log says where numbers go on.
    fn close(&self);

    /// Ends the tree of a deleted partition: waits for a checkpoint to give up.
    fn discard(&self);

    /// Removes the files of a tree that was discarded, as far as that can be done.
    fn remove_files(&self);

    fn pool_stats(&self) -> PoolStats;

    /// Space that the next checkpoint takes beyond what the files have, in bytes; takes no lock.
    fn checkpoint_bytes(&self) -> u64;

    /// Lets no checkpoint begin, for as long as what it returns is held; waits for the one under way.
    fn block_checkpoints(&self) -> MutexGuard<'_, ()>;

    /// Copies the files as the last checkpoint left them, for who [holds](PmemEngine::block_checkpoints) them; where
    /// the file is the memory, as it is now, for who lets nobody commit.
    fn copy_to(&self, dir: &Path) -> Result<()>;
}

/// Counts of one moment, in bytes unless said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolStats {
    pub(crate) level: PersistenceLevel,
    /// Records.
    pub(crate) record_count: u64,
    /// Leaves in use, and leaves that are cut out and free.
    pub(crate) leaf_count: u64,
    pub(crate) free_leaves: u64,
    /// The length of the pool, and what of it is free, without leaves.
    pub(crate) pool_bytes: u64,
    pub(crate) free_bytes: u64,
    /// Memory that leads to the leaves.
    pub(crate) index_bytes: u64,
    /// Memory that says what was replaced, for readers.
    pub(crate) retained_version_bytes: u64,
    /// Of its files.
    pub(crate) disk_bytes: u64,
    /// Checkpoints since it was opened, and what they have written.
    pub(crate) checkpoint_count: u64,
    pub(crate) checkpoint_written_bytes: u64,
    /// Leaves that were split since it was opened, and what that did.
    pub(crate) split_count: u64,
    pub(crate) split_persist_counts: PersistCounts,
}

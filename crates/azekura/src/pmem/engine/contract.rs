//! What `db` asks of a pool.

use std::path::Path;
use std::sync::MutexGuard;

use crate::base::{EntryRef, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{Engine, Room};
use crate::pmem::medium::Moved;
use crate::pmem::options::PmemOptions;
use crate::pmem::reserve::{Planned, Promise};
use crate::pmem::write::Taken;
use crate::vfs::fs::PersistenceLevel;

/// Gives a change its number.
pub(crate) type TakeNumber<'a> = dyn FnMut() -> Taken + 'a;

/// What a pool asks of `db`, and tells it, beyond what any tree does.
pub(crate) trait PmemTree: Engine {
    fn order(&self) -> &KeyOrder;

    /// Records in the tree.
    fn approximate_len(&self) -> u64;

    /// Sets aside what the records of a batch will need: fills `rooms` with one for each that is put. What it returns
    /// is given to [`end_promise`](PmemTree::end_promise) when the batch is visible, or will not be applied. Waits for
    /// other batches that have what it needs: who asks several pools asks them in the order of their partitions.
    ///
    /// # Errors
    /// `OutOfSpace`; then nothing was set aside.
    fn reserve(&self, records: &[Planned<'_>], rooms: &mut [Room]) -> Result<Promise>;

    /// Gives back a room that was not used.
    fn give_back(&self, room: Room);

    fn end_promise(&self, promise: Promise);

    /// What a change has survived when it returns, without the log.
    fn level(&self) -> PersistenceLevel;

    /// Makes one change that stands for itself; its thread need not be the only one. `turn` is called at most once,
    /// when nothing can refuse the change any more, and gives it its number or, if it may not be made now, none: false
    /// then. Changes of one key get their numbers in the order in which they are made. The log has it by then, unless
    /// the pool makes it durable by itself.
    ///
    /// # Errors
    /// Before `turn` is called, `OutOfSpace`; those of `turn`: nothing was changed. After any other nobody knows.
    fn change(&self, kind: RecordKind, key: &[u8], value: &[u8], turn: &mut TakeNumber<'_>) -> Result<bool>;

    /// Adds a record of the log again. `max_size` does not hold until [`end_replay`](PmemTree::end_replay): what was
    /// acknowledged fits.
    fn replay(&self, entry: EntryRef<'_>) -> Result<()>;

    /// All of the log was added again: from now on `max_size` holds. A pool that holds more refuses puts until enough
    /// was removed.
    fn end_replay(&self) -> Result<()>;

    fn set_options(&self, options: &PmemOptions) -> Result<()>;

    /// The highest sequence number that its files may have held when it was opened.
    fn highest_at_open(&self) -> SeqNo;

    /// Changes end. Those that have a number have been made; who is about to make space for one that has none gets
    /// `Closed`, and nobody is at the pool any more when this returns.
    fn end_changes(&self);

    /// No change comes any more: the database has closed, and the log says where numbers go on.
    fn close(&self);

    /// Ends the tree of a deleted partition: waits for a checkpoint to give up.
    fn discard(&self);

    /// Removes the files of a tree that was discarded, as far as that can be done.
    fn remove_files(&self);

    fn figures(&self) -> PoolFigures;

    /// Space that the next checkpoint takes beyond what the files have, in bytes; takes no lock.
    fn checkpoint_bytes(&self) -> u64;

    /// Lets no checkpoint begin, for as long as what it returns is held; waits for the one under way.
    fn hold(&self) -> MutexGuard<'_, ()>;

    /// Copies the files as the last checkpoint left them, for who [holds](PmemTree::hold) them; where the file is the
    /// memory, as it is now, for who lets nobody commit.
    fn copy_to(&self, dir: &Path) -> Result<()>;
}

/// Counts of one moment, in bytes unless said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolFigures {
    pub(crate) level: PersistenceLevel,
    /// Records.
    pub(crate) records: u64,
    /// Leaves in use, and leaves that are cut out and free.
    pub(crate) leaves: u64,
    pub(crate) leaves_free: u64,
    /// The length of the pool, and what of it is free, without leaves.
    pub(crate) len: u64,
    pub(crate) free: u64,
    /// Memory that leads to the leaves.
    pub(crate) index: u64,
    /// Memory that says what was replaced, for readers.
    pub(crate) kept: u64,
    /// Of its files.
    pub(crate) disk: u64,
    /// Checkpoints since it was opened, and what they have written.
    pub(crate) checkpoints: u64,
    pub(crate) written: u64,
    /// Leaves that were split since it was opened, and what that did.
    pub(crate) splits: u64,
    pub(crate) in_splits: Moved,
}

//! The engine of a pool: a tree, and the strategy that makes it durable.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::base::sync::lock;
use crate::base::{EntryRef, Error, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{
    BlobResolver, Engine, EngineHost, EngineView, KeyBounds, Pressure, ReadSeqno, RecordReservation, Task, TaskReport,
};
use crate::iter::InternalIter;
use crate::mem::slice::Slice;
use crate::pmem::options::PmemOptions;
use crate::pmem::persistence::{PersistCounts, PersistenceBackend};
use crate::pmem::reserve::{Planned, Promise};
use crate::pmem::tree::PoolTree;
use crate::pmem::write::AssignedSeqno;
use crate::vfs::fs::PersistenceLevel;

/// Gives a change its number.
pub(crate) type AssignSeqnoFn<'a> = dyn FnMut() -> AssignedSeqno + 'a;

/// What a pool asks of `db`, and tells it, beyond what any tree does.
pub(crate) trait PmemEngine: Engine {
    fn key_order(&self) -> &KeyOrder;

    /// Records in the tree.
    fn approximate_len(&self) -> u64;

    /// Reserves space for the records of a batch: fills `rooms` with one reservation for each put. The result is
    /// passed to [`release_leaf_reservation`](PmemEngine::release_leaf_reservation) when the batch is visible, or
    /// will not be applied. Waits for other batches that have the needed space; a caller with several pools calls
    /// them in the order of their partitions.
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
    /// Before `turn` is called, `OutOfSpace`; the errors of `turn`: nothing was changed. After any other error the
    /// state is unknown.
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

    /// Ends all changes. Changes with a sequence number are complete; a change without one gets `Closed`, and no
    /// thread uses the pool any more when this returns.
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

    /// Copies the files as of the last checkpoint, for a caller that [blocks
    /// checkpoints](PmemEngine::block_checkpoints); a mapped file is copied as it is now, for a caller that prevents
    /// commits.
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

/// What makes the records of a tree durable. Thread safe.
pub(crate) trait PoolDurability<M: PersistenceBackend>: Send + Sync {
    /// To be called before a record of the log goes into the tree. Others may do so at the same time.
    fn before_logged_write(&self, tree: &PoolTree<M>, kind: RecordKind, seqno: SeqNo) -> Result<()>;

    /// To be called before a record goes into the tree that the log does not get. Others may do so at the same time.
    fn before_unlogged_write(&self, tree: &PoolTree<M>, kind: RecordKind, seqno: SeqNo) -> Result<()>;

    /// All through this number was in the files when they were opened, and perhaps more, through the other one.
    fn seqnos_at_open(&self) -> (SeqNo, SeqNo);

    fn first_unflushed(&self) -> Option<SeqNo>;

    /// A checkpoint is wanted.
    fn request_checkpoint(&self);

    fn is_checkpoint_requested(&self) -> bool;

    /// One is under way.
    fn is_checkpoint_running(&self) -> bool;

    fn checkpoint(&self, tree: &PoolTree<M>, host: &dyn EngineHost) -> Result<TaskReport>;

    fn block_checkpoints(&self) -> MutexGuard<'_, ()>;

    fn copy_to(&self, tree: &PoolTree<M>, dir: &Path) -> Result<()>;

    fn close(&self, tree: &PoolTree<M>);

    fn discard(&self);

    fn is_discarded(&self) -> bool;

    fn remove_files(&self);

    /// Of its files, in bytes; checkpoints, and the bytes that they have written.
    fn file_stats(&self, tree: &PoolTree<M>) -> (u64, u64, u64);

    /// Space that the next checkpoint takes beyond what the files have, in bytes.
    fn checkpoint_bytes(&self, tree: &PoolTree<M>) -> u64;
}

/// A pool. Thread safe.
pub(crate) struct PoolEngine<M: PersistenceBackend, K> {
    tree: Arc<PoolTree<M>>,
    durability: K,
    options: Mutex<PmemOptions>,
}

impl<M: PersistenceBackend, K: PoolDurability<M>> PoolEngine<M, K> {
    /// A pool into which the log is replayed, until [`end_replay`](PmemEngine::end_replay).
    pub(crate) fn new(tree: PoolTree<M>, durability: K, options: &PmemOptions) -> PoolEngine<M, K> {
        tree.begin_replay();
        PoolEngine { tree: Arc::new(tree), durability, options: Mutex::new(options.clone()) }
    }
}

/// Puts or removes a record.
fn apply_entry<M: PersistenceBackend>(
    tree: &PoolTree<M>,
    entry: EntryRef<'_>,
    reservation: Option<RecordReservation>,
) -> Result<()> {
    match (entry.kind, reservation) {
        (RecordKind::Put, Some(reservation)) => tree.put_reserved(entry, reservation),
        (RecordKind::Put, None) => tree.put(entry.user_key, entry.seqno, entry.value),
        (RecordKind::Delete | RecordKind::SingleDelete, _) => tree.remove(entry.user_key, entry.seqno).map(drop),
        (kind, _) => Err(unsupported_kind_error(kind)),
    }
}

#[cold]
fn unsupported_kind_error(kind: RecordKind) -> Error {
    Error::corruption(format!("a record of kind {kind:?} does not stand in a pool"))
}

/// A pool, from which cursors can be made.
struct PoolView<M: PersistenceBackend>(Arc<PoolTree<M>>);

impl<M: PersistenceBackend> EngineView for PoolView<M> {
    fn iter(&self, at: SeqNo, bounds: KeyBounds<'_>) -> Result<Box<dyn InternalIter>> {
        Ok(Box::new(self.0.iter(at).with_bounds(bounds)))
    }

    fn blob_resolver(&self) -> Box<dyn BlobResolver> {
        Box::new(NoBlobResolver)
    }
}

/// All values stand with their keys.
struct NoBlobResolver;

impl BlobResolver for NoBlobResolver {
    fn resolve(&mut self, _pointer: &[u8]) -> Result<Slice> {
        Err(Error::corruption("a pool points to a blob file"))
    }
}

impl<M: PersistenceBackend, K: PoolDurability<M>> PmemEngine for PoolEngine<M, K> {
    fn key_order(&self) -> &KeyOrder {
        &self.tree.key_order
    }

    fn approximate_len(&self) -> u64 {
        self.tree.len()
    }

    fn reserve(&self, records: &[Planned<'_>], reservations: &mut [RecordReservation]) -> Result<Promise> {
        self.tree.reserve(records, reservations)
    }

    fn free_reservation(&self, reservation: RecordReservation) {
        self.tree.free_reservation(reservation);
    }

    fn release_leaf_reservation(&self, promise: Promise) {
        self.tree.release_leaf_reservation(promise);
    }

    fn persistence_level(&self) -> PersistenceLevel {
        self.tree.level()
    }

    fn write_single(
        &self,
        kind: RecordKind,
        key: &[u8],
        value: &[u8],
        assign_seqno: &mut AssignSeqnoFn<'_>,
    ) -> Result<bool> {
        let (tree, durability) = (&*self.tree, &self.durability);
        let take = || {
            let Some(seqno) = assign_seqno()? else { return Ok(None) };
            match tree.level() {
                PersistenceLevel::WalOnly => durability.before_logged_write(tree, kind, seqno)?,
                _ => durability.before_unlogged_write(tree, kind, seqno)?,
            }
            Ok(Some(seqno))
        };
        match kind {
            RecordKind::Put => tree.put_assigning_seqno(key, value, take),
            RecordKind::Delete | RecordKind::SingleDelete => tree.remove_assigning_seqno(key, take),
            kind => Err(unsupported_kind_error(kind)),
        }
    }

    fn replay(&self, entry: EntryRef<'_>) -> Result<()> {
        self.apply(entry, None).map(drop)
    }

    fn end_replay(&self) -> Result<()> {
        self.tree.end_replay()
    }

    fn set_options(&self, options: &PmemOptions) -> Result<()> {
        self.tree.lock_allocator()?.set_limit(options.max_size);
        *lock(&self.options) = options.clone();
        self.tree.versions.set_limit(options.max_size);
        Ok(())
    }

    fn max_seqno_at_open(&self) -> SeqNo {
        self.durability.seqnos_at_open().1
    }

    fn stop_writes(&self) {
        self.tree.stop_writes();
    }

    fn close(&self) {
        self.durability.close(&self.tree);
    }

    fn discard(&self) {
        self.durability.discard();
    }

    fn remove_files(&self) {
        self.durability.remove_files();
    }

    fn pool_stats(&self) -> PoolStats {
        let (usage, leaves) = self.tree.usage().unwrap_or_default();
        let (splits, in_splits) = self.tree.split_stats.totals();
        let (disk, checkpoints, written) = self.durability.file_stats(&self.tree);
        PoolStats {
            level: self.tree.level(),
            record_count: self.tree.len(),
            leaf_count: leaves,
            free_leaves: usage.free_leaves as u64,
            pool_bytes: usage.len,
            free_bytes: usage.free_bytes,
            index_bytes: self.tree.inner.memory_bytes() + self.tree.leaf_orders.bytes(),
            retained_version_bytes: self.tree.versions.memory_bytes(),
            disk_bytes: disk,
            checkpoint_count: checkpoints,
            checkpoint_written_bytes: written,
            split_count: splits,
            split_persist_counts: in_splits,
        }
    }

    fn checkpoint_bytes(&self) -> u64 {
        self.durability.checkpoint_bytes(&self.tree)
    }

    fn block_checkpoints(&self) -> MutexGuard<'_, ()> {
        self.durability.block_checkpoints()
    }

    fn copy_to(&self, dir: &Path) -> Result<()> {
        self.durability.copy_to(&self.tree, dir)
    }
}

impl<M: PersistenceBackend, K: PoolDurability<M>> Engine for PoolEngine<M, K> {
    #[inline]
    fn apply(&self, entry: EntryRef<'_>, reservation: Option<RecordReservation>) -> Result<bool> {
        self.durability.before_logged_write(&self.tree, entry.kind, entry.seqno)?;
        apply_entry(&self.tree, entry, reservation)?;
        Ok(false)
    }

    #[inline]
    fn get(&self, key: &[u8], at: ReadSeqno) -> Result<Option<Slice>> {
        match at {
            ReadSeqno::Latest => self.tree.get(key),
            ReadSeqno::At(seqno) => self.tree.get_at(key, seqno),
        }
    }

    fn size_of(&self, key: &[u8], at: ReadSeqno) -> Result<Option<u32>> {
        match at {
            ReadSeqno::Latest => self.tree.size_of(key),
            ReadSeqno::At(seqno) => self.tree.size_of_at(key, seqno),
        }
    }

    fn view(&self) -> Box<dyn EngineView> {
        Box::new(PoolView(Arc::clone(&self.tree)))
    }

    fn flushed_through(&self) -> SeqNo {
        self.durability.seqnos_at_open().0
    }

    fn first_unflushed(&self) -> Option<SeqNo> {
        self.durability.first_unflushed()
    }

    fn seal(&self) {
        self.durability.request_checkpoint();
    }

    fn next_task(&self, forced: bool, held: &[Task]) -> Option<Task> {
        if self.durability.is_discarded() || held.contains(&Task::Flush) {
            return None;
        }
        let wanted = self.durability.is_checkpoint_requested() && self.durability.first_unflushed().is_some();
        let next = if forced {
            wanted || self.durability.is_checkpoint_running()
        } else {
            wanted && !self.durability.is_checkpoint_running()
        };
        if next {
            return Some(Task::Flush);
        }
        // What the last of its readers let go of.
        let stale = !held.contains(&Task::Compact) && self.tree.versions.has_stale_tables();
        stale.then_some(Task::Compact)
    }

    fn run(&self, task: Task, _forced: bool, host: &dyn EngineHost) -> Result<TaskReport> {
        match task {
            Task::Flush => self.durability.checkpoint(&self.tree, host),
            Task::Compact => self.tree.drop_stale_versions().map(|()| TaskReport::default()),
            Task::BlobGc => Ok(TaskReport::default()),
        }
    }

    fn pressure(&self) -> Pressure {
        Pressure { sealed_memtables: usize::from(self.durability.is_checkpoint_requested()), ..Pressure::default() }
    }
}

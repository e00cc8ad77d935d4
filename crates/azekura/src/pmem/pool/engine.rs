//! The location of a pool, and its engine: a tree, and the implementation that makes it durable.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::base::sync::lock;
use crate::base::version_edit::PartitionId;
use crate::base::{EntryRef, Error, ErrorKind, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{
    AssignSeqnoFn, BlobResolver, Engine, EngineHost, EngineView, KeyBounds, LastVisibleSeqno, NumberedRecords,
    PartitionReaders, Pressure, ReadMoment, ReadSeqno, SingleCommit, SnapshotList, Staged, Task, TaskReport,
};
use crate::iter::InternalIter;
use crate::mem::persist;
use crate::mem::slice::Slice;
use crate::pmem::expiry::{FORCED_SWEEP_SHARE, SWEEP_SHARE};
use crate::pmem::options::PmemOptions;
use crate::pmem::persistence::{MappedPoolFile, PersistenceBackend};
use crate::pmem::pool::metrics::PoolMetrics;
use crate::pmem::pool::{PoolFileKind, pool_recovery};
use crate::pmem::tree::PoolTree;
use crate::vfs::fs::PersistenceLevel;
use crate::vfs::{Env, Fs, OpenMode};

/// The location of a pool, and the environment in which it is opened.
#[derive(Clone)]
pub(crate) struct PoolLocation {
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) env: Arc<dyn Env>,
    pub(crate) dir: PathBuf,
    pub(crate) partition: PartitionId,
    pub(crate) name: String,
    pub(crate) visible: LastVisibleSeqno,
    pub(crate) snapshots: Arc<SnapshotList>,
    pub(crate) read_only: bool,
    /// Number of bytes of the WAL that may be replayed into the pool.
    pub(crate) wal_bytes: u64,
}

impl PoolLocation {
    pub(crate) fn path(&self) -> PathBuf {
        self.dir.join(PoolFileKind::Pool.name(self.partition))
    }

    /// The readers that may read the pool.
    pub(crate) fn readers(&self) -> PartitionReaders {
        self.snapshots.readers_of(self.partition)
    }

    /// Creates the file of an empty mapped pool, under a temporary name that no partition uses.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no space, and those of the files. Then the file is removed, as far as possible.
    pub(crate) fn create_file(&self, options: &PmemOptions) -> Result<()> {
        let temporary = self.temporary_path();
        if self.fs.exists(&temporary)? {
            self.fs.remove_file(&temporary)?;
        }
        self.try_create_file(&temporary, options).inspect_err(|_| self.remove_created_file())
    }

    fn try_create_file(&self, temporary: &Path, options: &PmemOptions) -> Result<()> {
        let file = self.fs.open(temporary, OpenMode::Create)?;
        let backend = MappedPoolFile::new(Arc::clone(&file), options.reserved_address_len(0))?;
        let mut file_id = [0; 16];
        self.env.random(&mut file_id);
        let order = KeyOrder::bytewise(); // nothing is compared yet
        drop(pool_recovery::create(backend, file_id, order, &options.pool_options(), self.readers())?);
        file.sync_all()
    }

    /// Renames the file that [`create_file`](PoolLocation::create_file) made last to the name of this pool, durably.
    /// After an error it is removed, as far as possible.
    pub(crate) fn publish_file(&self) -> Result<()> {
        self.fs.rename(&self.temporary_path(), &self.path())?;
        self.fs.sync_dir(&self.dir).inspect_err(|_| self.remove_published_file())
    }

    /// Removes a file that was created and not renamed, as far as possible.
    pub(crate) fn remove_created_file(&self) {
        let _found_by_the_next_open = self.fs.remove_file(&self.temporary_path());
    }

    /// Removes the renamed file, as far as possible, because the partition could not be created.
    pub(crate) fn remove_published_file(&self) {
        let _found_by_the_next_open = self.fs.remove_file(&self.path());
    }

    /// The name of the shadow of partition 0. Partitions are numbered from 1 on, and created one at a time.
    fn temporary_path(&self) -> PathBuf {
        self.dir.join(PoolFileKind::Shadow.name(PartitionId(0)))
    }
}

/// Whether pools in `dir` are mapped files: the stores of this process into mapped files must survive what the level
/// of the file system states.
pub(crate) fn uses_mapped_pools(fs: &dyn Fs, dir: &Path) -> bool {
    match fs.persistence_level(dir) {
        PersistenceLevel::WalOnly => false,
        PersistenceLevel::ProcessCrash => true,
        PersistenceLevel::PowerLoss => persist::can_flush(),
    }
}

/// The interface between a pool and `db`, beyond that of every engine.
pub(crate) trait PmemEngine: Engine {
    fn set_options(&self, options: &PmemOptions) -> Result<()>;

    fn metrics(&self) -> PoolMetrics;

    /// Size of the files.
    fn disk_bytes(&self) -> u64;
}

/// Makes the records of a tree durable. Thread safe.
pub(crate) trait PoolDurability<M: PersistenceBackend>: Send + Sync {
    /// Called before a record of the WAL is applied to the tree. Several threads may call this at the same time.
    fn before_logged_write(&self, tree: &PoolTree<M>, kind: RecordKind, seqno: SeqNo) -> Result<()>;

    /// Called before a record that is not in the WAL is applied to the tree. Several threads may call this at the
    /// same time.
    fn before_unlogged_write(&self, tree: &PoolTree<M>, kind: RecordKind, seqno: SeqNo) -> Result<()>;

    /// The highest sequence number of a record of the WAL that was applied, or will be applied next.
    fn last_logged_seqno(&self) -> SeqNo;

    /// Called before records up to `visible` are removed without a sequence number. All records of the WAL up to
    /// `visible` were applied to the tree. None of them is replayed alone that is older than a removed record.
    fn before_sweep(&self, tree: &PoolTree<M>, visible: SeqNo);

    /// When the files were opened, they contained every record up to the first number, and perhaps records up to the
    /// second.
    fn seqnos_at_open(&self) -> (SeqNo, SeqNo);

    fn first_unflushed(&self) -> Option<SeqNo>;

    /// Requests a checkpoint.
    fn request_checkpoint(&self);

    fn is_checkpoint_requested(&self) -> bool;

    /// Whether a checkpoint is running or prevented.
    fn is_checkpoint_running(&self) -> bool;

    fn checkpoint(&self, tree: &PoolTree<M>, host: &dyn EngineHost) -> Result<TaskReport>;

    fn block_checkpoints(&self) -> Option<MutexGuard<'_, ()>>;

    fn copy_to(&self, tree: &PoolTree<M>, dir: &Path) -> Result<()>;

    fn close(&self, tree: &PoolTree<M>);

    /// Waits until a running checkpoint has ended, and removes the files.
    fn discard(&self);

    fn is_discarded(&self) -> bool;

    /// Size of the files in bytes.
    fn disk_bytes(&self, tree: &PoolTree<M>) -> u64;

    /// Number of checkpoints, and the bytes that they have written.
    fn checkpoint_stats(&self) -> (u64, u64);

    /// Number of bytes that the next checkpoint needs beyond the current size of the files.
    fn checkpoint_bytes(&self, tree: &PoolTree<M>) -> u64;
}

/// The engine of one pool. Thread safe.
pub(crate) struct PoolEngine<M: PersistenceBackend, K> {
    pub(crate) tree: Arc<PoolTree<M>>,
    durability: K,
    options: Mutex<PmemOptions>,
}

impl<M: PersistenceBackend, K: PoolDurability<M>> PoolEngine<M, K> {
    /// An engine that begins with the replay of the WAL, until [`end_replay`](Engine::end_replay).
    pub(crate) fn new(tree: PoolTree<M>, durability: K, options: &PmemOptions) -> PoolEngine<M, K> {
        tree.begin_replay();
        PoolEngine { tree: Arc::new(tree), durability, options: Mutex::new(options.clone()) }
    }
}

impl<M: PersistenceBackend, K: PoolDurability<M>> PoolEngine<M, K> {
    fn is_sweep_due(&self, forced: bool) -> bool {
        self.tree.is_sweep_due(if forced { FORCED_SWEEP_SHARE } else { SWEEP_SHARE })
    }

    /// Removes expired records from a bounded number of leaves. Returns their number, and whether the pass over all
    /// leaves has ended.
    fn sweep_expired(&self) -> Result<(u64, bool)> {
        let visible = self.tree.versions.readers().visible();
        let pin = self.tree.pin()?; // closing waits for it
        self.durability.before_sweep(&self.tree, visible);
        drop(pin);
        self.tree.sweep_expired(visible)
    }

    /// Runs an operation that allocates space. If the pool is full, removes expired records and tries again, until no
    /// expired record is left, unless `may_retry` returns false.
    fn retry_after_sweep<T>(
        &self,
        mut attempt: impl FnMut() -> Result<T>,
        may_retry: impl FnOnce() -> bool,
    ) -> Result<T> {
        let full = match attempt() {
            Err(error) if error.kind() == ErrorKind::OutOfSpace && may_retry() => error,
            done => return done,
        };
        // The first pass may have begun long before, and have passed leaves in which more has expired since.
        for _pass in 0..2 {
            let mut has_ended = !self.tree.is_sweep_due(u64::MAX);
            while !has_ended {
                let removed;
                (removed, has_ended) = self.sweep_expired()?;
                match if removed > 0 { attempt() } else { continue } {
                    Err(error) if error.kind() == ErrorKind::OutOfSpace => {}
                    done => return done,
                }
            }
        }
        Err(full)
    }
}

/// Applies a put, a removal, or a range delete.
fn apply_entry<M: PersistenceBackend>(tree: &PoolTree<M>, entry: EntryRef<'_>, staged: Staged) -> Result<()> {
    match (entry.kind, staged) {
        (RecordKind::Put | RecordKind::ExpiringPut, Staged::Buffer(at, len)) => tree.put_reserved(entry, (at, len)),
        (RecordKind::Put | RecordKind::ExpiringPut, _) => tree.put_entry(entry),
        (RecordKind::Delete | RecordKind::SingleDelete, _) => tree.remove(entry.user_key, entry.seqno).map(drop),
        (RecordKind::RangeDelete, _) => tree.add_range_delete(entry),
        (kind, _) => Err(unsupported_kind_error(kind)),
    }
}

#[cold]
fn unsupported_kind_error(kind: RecordKind) -> Error {
    Error::corruption(format!("a record of kind {kind:?} cannot be in a pool"))
}

/// A pool that creates iterators.
struct PoolView<M: PersistenceBackend>(Arc<PoolTree<M>>);

impl<M: PersistenceBackend> EngineView for PoolView<M> {
    fn iter(&self, at: ReadMoment, bounds: KeyBounds<'_>) -> Result<Box<dyn InternalIter>> {
        Ok(Box::new(self.0.iter(at).with_bounds(bounds)))
    }

    fn blob_resolver(&self) -> Box<dyn BlobResolver> {
        Box::new(NoBlobResolver)
    }
}

/// A pool has no blob files: all values are stored with their keys.
struct NoBlobResolver;

impl BlobResolver for NoBlobResolver {
    fn resolve(&mut self, _pointer: &[u8]) -> Result<Slice> {
        Err(Error::corruption("a pool points to a blob file"))
    }
}

impl<M: PersistenceBackend, K: PoolDurability<M>> PmemEngine for PoolEngine<M, K> {
    fn set_options(&self, options: &PmemOptions) -> Result<()> {
        self.tree.lock_allocator()?.set_limit(options.max_size);
        *lock(&self.options) = options.clone();
        self.tree.versions.set_limit(options.max_size);
        Ok(())
    }

    fn metrics(&self) -> PoolMetrics {
        let (usage, leaves) = self.tree.usage().unwrap_or_default();
        let (splits, in_splits) = self.tree.split_stats.totals();
        let (checkpoints, checkpoint_bytes) = self.durability.checkpoint_stats();
        PoolMetrics {
            persistence: self.tree.level(),
            records: self.tree.len(),
            leaves,
            free_leaves: usage.free_leaves as u64,
            bytes: usage.len,
            free_bytes: usage.free_bytes,
            index_bytes: self.tree.inner.memory_bytes() + self.tree.leaf_orders.bytes(),
            version_bytes: self.tree.versions.memory_bytes(),
            checkpoints,
            checkpoint_bytes,
            splits,
            split_bytes_written: in_splits.stored_bytes,
            split_flushed_lines: in_splits.flushed_lines,
            split_fences: in_splits.fences,
        }
    }

    fn disk_bytes(&self) -> u64 {
        self.durability.disk_bytes(&self.tree)
    }
}

impl<M: PersistenceBackend, K: PoolDurability<M>> Engine for PoolEngine<M, K> {
    fn key_order(&self) -> &KeyOrder {
        &self.tree.key_order
    }

    fn persistence_level(&self) -> PersistenceLevel {
        self.tree.level()
    }

    fn single_commit(&self) -> SingleCommit {
        SingleCommit::Concurrent { logged: self.tree.level() == PersistenceLevel::WalOnly }
    }

    fn prepare<'a>(&self, records: &dyn Fn() -> Result<NumberedRecords<'a>>) -> Result<Vec<(u32, Staged)>> {
        let records = records()?;
        self.retry_after_sweep(|| self.tree.reserve(&records), || true)
    }

    fn release(&self, staged: Staged, is_applied: bool) {
        self.tree.release(staged, is_applied);
    }

    #[inline]
    fn apply(&self, entry: EntryRef<'_>, staged: Staged) -> Result<bool> {
        self.durability.before_logged_write(&self.tree, entry.kind, entry.seqno)?;
        apply_entry(&self.tree, entry, staged)?;
        Ok(false)
    }

    fn complete_range_deletes(&self) -> Result<()> {
        self.tree.remove_covered(self.durability.last_logged_seqno())
    }

    fn write_single(
        &self,
        kind: RecordKind,
        key: &[u8],
        value: &[u8],
        assign_seqno: &mut AssignSeqnoFn<'_>,
    ) -> Result<bool> {
        let (tree, durability) = (&*self.tree, &self.durability);
        let was_asked = Cell::new(false);
        let mut take = || {
            was_asked.set(true);
            let Some(seqno) = assign_seqno()? else { return Ok(None) };
            match tree.level() {
                PersistenceLevel::WalOnly => durability.before_logged_write(tree, kind, seqno)?,
                _ => durability.before_unlogged_write(tree, kind, seqno)?,
            }
            Ok(Some(seqno))
        };
        match kind {
            RecordKind::Put | RecordKind::ExpiringPut => {
                self.retry_after_sweep(|| tree.put_assigning_seqno(kind, key, value, &mut take), || !was_asked.get())
            }
            RecordKind::Delete | RecordKind::SingleDelete => tree.remove_assigning_seqno(key, take),
            kind => Err(unsupported_kind_error(kind)),
        }
    }

    #[inline]
    fn get(&self, key: &[u8], at: ReadSeqno) -> Result<Option<Slice>> {
        match at {
            ReadSeqno::Latest => self.tree.get(key),
            ReadSeqno::At(moment) => self.tree.get_at(key, moment),
        }
    }

    fn multi_get(&self, keys: &[&[u8]], at: ReadMoment) -> Result<Vec<Option<Slice>>> {
        self.tree.get_many_at(keys, at)
    }

    fn size_of(&self, key: &[u8], at: ReadSeqno) -> Result<Option<u32>> {
        match at {
            ReadSeqno::Latest => self.tree.size_of(key),
            ReadSeqno::At(moment) => self.tree.size_of_at(key, moment),
        }
    }

    fn changed_since(&self, key: &[u8], since: SeqNo) -> Result<bool> {
        self.tree.changed_since(key, since)
    }

    fn range_changed_since(&self, bounds: KeyBounds<'_>, since: SeqNo) -> Result<Option<Vec<u8>>> {
        self.tree.range_changed_since(bounds, since)
    }

    fn view(&self) -> Box<dyn EngineView> {
        Box::new(PoolView(Arc::clone(&self.tree)))
    }

    fn approximate_len(&self) -> u64 {
        self.tree.len()
    }

    fn replay(&self, entry: EntryRef<'_>) -> Result<()> {
        self.apply(entry, Staged::Nothing)?;
        // At once, because the next record may put a covered key again. There are no readers, or the versions that they
        // need are retained.
        if entry.kind == RecordKind::RangeDelete { self.complete_range_deletes() } else { Ok(()) }
    }

    fn end_replay(&self) -> Result<()> {
        self.tree.end_replay()
    }

    fn flushed_through(&self) -> SeqNo {
        self.durability.seqnos_at_open().0
    }

    fn first_unflushed(&self) -> Option<SeqNo> {
        let pending = self.tree.range_deletes.first();
        let first = self.durability.first_unflushed().map_or(pending, |first| first.min(pending));
        (first <= SeqNo::MAX).then_some(first)
    }

    fn seal(&self) {
        self.durability.request_checkpoint();
    }

    fn next_task(&self, forced: bool, held: &[Task]) -> Option<Task> {
        if self.durability.is_discarded() {
            return None;
        }
        let wanted = self.durability.is_checkpoint_requested() && self.durability.first_unflushed().is_some();
        let next = if forced {
            wanted || self.durability.is_checkpoint_running()
        } else {
            wanted && !self.durability.is_checkpoint_running()
        };
        if next && !held.contains(&Task::Flush) {
            return Some(Task::Flush);
        }
        // Versions that became stale when their last reader ended, and expired records.
        let wanted =
            !held.contains(&Task::Compact) && (self.tree.versions.has_stale_tables() || self.is_sweep_due(forced));
        wanted.then_some(Task::Compact)
    }

    fn run(&self, task: Task, forced: bool, host: &dyn EngineHost) -> Result<TaskReport> {
        match task {
            Task::Flush => self.durability.checkpoint(&self.tree, host),
            Task::Compact => {
                self.tree.drop_stale_tables()?;
                if self.is_sweep_due(forced) {
                    self.sweep_expired()?;
                }
                Ok(TaskReport::default())
            }
            Task::BlobGc => Ok(TaskReport::default()),
        }
    }

    fn pressure(&self) -> Pressure {
        Pressure { sealed_memtables: usize::from(self.durability.is_checkpoint_requested()), ..Pressure::default() }
    }

    fn checkpoint_bytes(&self) -> u64 {
        self.durability.checkpoint_bytes(&self.tree)
    }

    fn block_checkpoints(&self) -> Option<MutexGuard<'_, ()>> {
        self.durability.block_checkpoints()
    }

    fn copy_to(&self, dir: &Path) -> Result<()> {
        self.durability.copy_to(&self.tree, dir)
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
}

//! Durability of a pool in memory: the WAL makes its records durable, and a checkpoint (the flush of this tree)
//! writes the image to its file.
//!
//! A checkpoint is a snapshot at one point in time. Its sequence number is the one that was visible when it began,
//! and the checkpoint contains every record up to it. It may contain records that were in progress at that time;
//! these stay in the WAL until the next checkpoint.
//!
//! A mapped pool has no checkpoints. When a call returns, its change survives the failures that the memory of the file
//! system survives. The WAL contains only batches. A single removal is not recorded in the WAL, so the replay of an
//! older put of the same key would restore the key. Therefore the pool stores, before the first removal behind a batch,
//! the sequence number up to which it contains all records of the WAL. It also stores an upper bound of its sequence
//! numbers: after a reopen, new sequence numbers must be above all used ones, and the WAL does not contain them.
//!
//! Neither a checkpoint nor that number of a mapped pool passes a range delete that is pending, that is, whose covered
//! records may still be in the pool ([`pending_range_deletes`](crate::pmem::pending_range_deletes)).

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::base::sync::{lock, try_lock};
use crate::base::version_edit::PartitionEdit;
use crate::base::{Error, ErrorKind, RecordKind, Result, SeqNo};
use crate::engine::{EngineHost, TaskReport};
use crate::mem::region::Region;
use crate::pmem::persistence::{PersistenceBackend, PoolImage};
use crate::pmem::pool::engine::{PoolDurability, PoolLocation};
use crate::pmem::pool::{ImageStore, PoolFileKind};
use crate::pmem::pool_header::PoolSeqnoField;
use crate::pmem::tree::{PoolTree, TreeStep};
use crate::vfs::{Fs, OpenMode};

/// Makes an image durable by checkpoints. Thread safe.
pub(crate) struct PoolCheckpointer {
    store: ImageStore,
    location: PoolLocation,
    /// The files contained every record up to the first number when they were opened, and perhaps records up to the
    /// second.
    seqnos_at_open: (SeqNo, SeqNo),
    /// The lowest sequence number that no checkpoint has begun to write, [`NO_SEQNO`] if there is none.
    min_dirty_seqno: AtomicU64,
    /// The highest sequence number that was applied to the tree.
    max_applied_seqno: AtomicU64,
    /// The lowest sequence number that the running checkpoint writes. Also locked while `min_dirty_seqno` is moved
    /// into it.
    min_flushing_seqno: Mutex<u64>,
    is_requested: AtomicBool,
    /// Held by a thread that makes a checkpoint, or that prevents checkpoints.
    checkpoint_lock: Mutex<()>,
    is_discarded: AtomicBool,
    count: AtomicU64,
    written_bytes: AtomicU64,
}

const NO_SEQNO: u64 = u64::MAX;

impl PoolCheckpointer {
    pub(crate) fn new(store: ImageStore, location: PoolLocation, at_open: (SeqNo, SeqNo)) -> PoolCheckpointer {
        PoolCheckpointer {
            store,
            location,
            seqnos_at_open: at_open,
            min_dirty_seqno: AtomicU64::new(NO_SEQNO),
            max_applied_seqno: AtomicU64::new(at_open.0.0),
            min_flushing_seqno: Mutex::new(NO_SEQNO),
            is_requested: AtomicBool::new(false),
            checkpoint_lock: Mutex::new(()),
            is_discarded: AtomicBool::new(false),
            count: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
        }
    }

    /// Begins a checkpoint, which will contain every record that is visible now. Returns the last visible sequence
    /// number.
    fn begin_snapshot(&self) -> SeqNo {
        let from = self.location.visible.get();
        let mut flushing_seqno = lock(&self.min_flushing_seqno);
        debug_assert_eq!(*flushing_seqno, NO_SEQNO, "one checkpoint at a time runs");
        *flushing_seqno = self.min_dirty_seqno.swap(NO_SEQNO, Ordering::SeqCst).min(*flushing_seqno);
        from
    }

    /// Called once the pages are copied. Returns the highest sequence number that they may contain. Records above
    /// `from` are left to the next checkpoint.
    fn end_snapshot(&self, from: SeqNo) -> SeqNo {
        let highest = SeqNo(self.max_applied_seqno.load(Ordering::SeqCst));
        if highest > from {
            self.min_dirty_seqno.fetch_min(from.0 + 1, Ordering::SeqCst);
        }
        highest.max(from)
    }

    /// Ends the checkpoint. If it failed (`done` is false), its records are dirty again, and another checkpoint is
    /// requested.
    fn finish_checkpoint(&self, done: bool) {
        let mut flushing_seqno = lock(&self.min_flushing_seqno);
        if !done {
            self.min_dirty_seqno.fetch_min(*flushing_seqno, Ordering::SeqCst);
            self.request_checkpoint();
        }
        *flushing_seqno = NO_SEQNO;
    }

    fn write_checkpoint(&self, tree: &PoolTree<PoolImage>, host: &dyn EngineHost) -> Result<u64> {
        let mut from = SeqNo::ZERO;
        // The number is not above the end of the WAL, although other pools may have used later numbers: the image and
        // the version edit prove through which number the WAL was durable. It is below every range delete that may be
        // visible and incomplete: the image may contain covered records, so replay must repeat the range delete. The
        // visible number is read first: if its range delete is not pending afterwards, it is complete in the image.
        let begin = &mut || {
            let visible = self.begin_snapshot().min(host.wal_end());
            let before_pending = SeqNo(tree.range_deletes.first().0 - 1);
            if before_pending < visible {
                // A flush that waits for a later number needs another checkpoint.
                self.request_checkpoint();
            }
            visible.min(before_pending)
        };
        let written = self.store.checkpoint(&tree.backend, begin, &mut |begun| {
            from = begun;
            let highest = self.end_snapshot(begun).max(self.seqnos_at_open.1);
            debug_assert!(
                highest >= begun,
                "an image contains the records up to the sequence number of its checkpoint"
            );
            host.sync_wal_through(highest)?;
            Ok(highest)
        })?;
        debug_assert!(from <= self.location.visible.get(), "a checkpoint contains only visible records");
        let partition = self.location.partition;
        let mut edits = vec![PartitionEdit::Flushed { through: from }.of(partition)];
        // The first checkpoint may have created the files.
        if self.count.load(Ordering::Relaxed) == 0 {
            edits.push(PartitionEdit::PoolFileId { file_id: tree.file_id }.of(partition));
        }
        host.commit_edits(&edits)?;
        Ok(written.bytes)
    }
}

impl PoolDurability<PoolImage> for PoolCheckpointer {
    #[inline]
    fn before_logged_write(&self, _tree: &PoolTree<PoolImage>, _kind: RecordKind, seqno: SeqNo) -> Result<()> {
        // Both steps are in one order with `begin_snapshot` and `end_snapshot`: either this thread finds that a
        // checkpoint has begun, or the checkpointing thread finds this record. Sequence numbers do not arrive in
        // order.
        self.max_applied_seqno.fetch_max(seqno.0, Ordering::SeqCst);
        if self.min_dirty_seqno.load(Ordering::SeqCst) > seqno.0 {
            self.min_dirty_seqno.fetch_min(seqno.0, Ordering::SeqCst);
        }
        Ok(())
    }

    fn before_unlogged_write(&self, tree: &PoolTree<PoolImage>, kind: RecordKind, seqno: SeqNo) -> Result<()> {
        debug_assert!(false, "an image is not durable by itself");
        self.before_logged_write(tree, kind, seqno)
    }

    fn last_logged_seqno(&self) -> SeqNo {
        SeqNo(self.max_applied_seqno.load(Ordering::SeqCst))
    }

    fn before_sweep(&self, _tree: &PoolTree<PoolImage>, _visible: SeqNo) {
        // The WAL has every record since the image that a crash leaves, the removed ones included.
    }

    fn seqnos_at_open(&self) -> (SeqNo, SeqNo) {
        self.seqnos_at_open
    }

    fn first_unflushed(&self) -> Option<SeqNo> {
        let flushing_seqno = lock(&self.min_flushing_seqno);
        let first = self.min_dirty_seqno.load(Ordering::SeqCst).min(*flushing_seqno);
        (first != NO_SEQNO).then_some(SeqNo(first))
    }

    fn request_checkpoint(&self) {
        self.is_requested.store(true, Ordering::Release);
    }

    fn is_checkpoint_requested(&self) -> bool {
        self.is_requested.load(Ordering::Acquire)
    }

    fn is_checkpoint_running(&self) -> bool {
        *lock(&self.min_flushing_seqno) != NO_SEQNO || try_lock(&self.checkpoint_lock).is_none()
    }

    fn checkpoint(&self, tree: &PoolTree<PoolImage>, host: &dyn EngineHost) -> Result<TaskReport> {
        let _turn = lock(&self.checkpoint_lock);
        if self.is_discarded() {
            return Err(Error::new(ErrorKind::Closed, format!("partition {} was deleted", self.location.name)));
        }
        self.is_requested.store(false, Ordering::Release);
        if self.first_unflushed().is_none() {
            return Ok(TaskReport::default());
        }
        tree.release_free_end()?;
        let written = self.write_checkpoint(tree, host);
        self.finish_checkpoint(written.is_ok());
        let bytes = written?;
        self.count.fetch_add(1, Ordering::Relaxed);
        self.written_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(TaskReport { tables: 1, bytes_written: bytes, ..TaskReport::default() })
    }

    fn block_checkpoints(&self) -> Option<MutexGuard<'_, ()>> {
        Some(lock(&self.checkpoint_lock))
    }

    fn copy_to(&self, _tree: &PoolTree<PoolImage>, dir: &Path) -> Result<()> {
        self.store.copy_to(dir)
    }

    fn close(&self, _tree: &PoolTree<PoolImage>) {}

    fn discard(&self) {
        self.is_discarded.store(true, Ordering::SeqCst);
        drop(lock(&self.checkpoint_lock));
        self.store.remove();
    }

    fn is_discarded(&self) -> bool {
        self.is_discarded.load(Ordering::SeqCst)
    }

    fn disk_bytes(&self, _tree: &PoolTree<PoolImage>) -> u64 {
        self.store.disk_bytes()
    }

    fn checkpoint_stats(&self) -> (u64, u64) {
        (self.count.load(Ordering::Relaxed), self.written_bytes.load(Ordering::Relaxed))
    }

    fn checkpoint_bytes(&self, tree: &PoolTree<PoolImage>) -> u64 {
        self.store.space_needed(tree.backend.region().len(), tree.backend.pages_to_write())
    }
}

/// Number of sequence numbers that are recorded ahead.
const SEQNOS_RESERVED_AHEAD: u64 = 1 << 20;

/// Bytes copied at a time.
const REGION_COPY_CHUNK_LEN: usize = 1 << 20;

/// Copies a region to a new file, and syncs it.
pub(crate) fn copy_region(fs: &dyn Fs, region: &Region, to: &Path) -> Result<()> {
    let target = fs.open(to, OpenMode::Create)?;
    let (len, mut at, mut piece) = (region.len(), 0, vec![0; REGION_COPY_CHUNK_LEN]);
    while at < len {
        let n = piece.len().min(usize::try_from(len - at).unwrap_or(usize::MAX));
        region.read(at, &mut piece[..n]);
        target.write_at(&piece[..n], at)?;
        at += n as u64;
    }
    target.sync_data()
}

/// Makes a mapped pool durable. Thread safe.
pub(crate) struct MappedPoolDurability {
    location: PoolLocation,
    path: PathBuf,
    seqnos_at_open: (SeqNo, SeqNo),
    /// No sequence number from here on was used. The header of the pool contains this bound.
    seqno_end: AtomicU64,
    /// The last sequence number from the WAL, and the one that the header of the pool contains.
    last_logged_seqno: AtomicU64,
    applied_through: AtomicU64,
    /// Held by the thread that writes the header.
    header_lock: Mutex<()>,
    is_discarded: AtomicBool,
}

impl MappedPoolDurability {
    /// The durability of a tree that was opened from the file at `path`, whose header contains the numbers `at_open`.
    pub(crate) fn new(location: PoolLocation, path: PathBuf, at_open: (SeqNo, SeqNo)) -> MappedPoolDurability {
        let (SeqNo(applied), SeqNo(last)) = at_open;
        MappedPoolDurability {
            location,
            path,
            seqnos_at_open: at_open,
            seqno_end: AtomicU64::new(last + 1),
            last_logged_seqno: AtomicU64::new(applied),
            applied_through: AtomicU64::new(applied),
            header_lock: Mutex::new(()),
            is_discarded: AtomicBool::new(false),
        }
    }

    /// Makes sure that the header allows `seqno` before it is used.
    #[inline]
    fn ensure_seqno_reserved<M: PersistenceBackend>(&self, tree: &PoolTree<M>, seqno: SeqNo) {
        if seqno.0 >= self.seqno_end.load(Ordering::Acquire) {
            self.write_seqno_end(tree, seqno);
        }
    }

    /// Raises the bound in the header far above `seqno`. The new bound is durable before other threads can read it
    /// here.
    #[cold]
    fn write_seqno_end<M: PersistenceBackend>(&self, tree: &PoolTree<M>, seqno: SeqNo) {
        let _noting = lock(&self.header_lock);
        if seqno.0 >= self.seqno_end.load(Ordering::Relaxed) {
            let end = SeqNo((seqno.0 + SEQNOS_RESERVED_AHEAD).min(SeqNo::MAX.0));
            tree.write_seqno_field(PoolSeqnoField::SeqnoEnd, end);
            self.seqno_end.store(end.0, Ordering::Release);
        }
    }

    /// Writes to the header that the pool contains every record of the WAL up to `logged`, or up to the first pending
    /// range delete: replay must repeat a range delete until all covered records are removed. Before a single removal
    /// no range delete is pending.
    #[cold]
    fn write_applied_through<M: PersistenceBackend>(&self, tree: &PoolTree<M>, logged: u64) {
        let below = tree.range_deletes.first().0 - 1;
        let logged = if tree.is_step_enabled(TreeStep::KeepBelowPending) { logged.min(below) } else { logged };
        let _noting = lock(&self.header_lock);
        if logged > self.applied_through.load(Ordering::Relaxed) {
            tree.write_seqno_field(PoolSeqnoField::AppliedThrough, SeqNo(logged));
            self.applied_through.store(logged, Ordering::Release);
        }
    }
}

impl<M: PersistenceBackend> PoolDurability<M> for MappedPoolDurability {
    /// Called only while no other thread changes the pool. When a single change is made, all of the WAL is applied.
    fn before_logged_write(&self, tree: &PoolTree<M>, kind: RecordKind, seqno: SeqNo) -> Result<()> {
        self.before_unlogged_write(tree, kind, seqno)?;
        self.last_logged_seqno.store(seqno.0, Ordering::Release);
        Ok(())
    }

    #[inline]
    fn before_unlogged_write(&self, tree: &PoolTree<M>, kind: RecordKind, seqno: SeqNo) -> Result<()> {
        self.ensure_seqno_reserved(tree, seqno);
        let logged = self.last_logged_seqno.load(Ordering::Acquire);
        // Otherwise a replay of the WAL would put a record again that this change removes.
        if !kind.is_value() && logged > self.applied_through.load(Ordering::Acquire) {
            self.write_applied_through(tree, logged);
        }
        Ok(())
    }

    fn last_logged_seqno(&self) -> SeqNo {
        SeqNo(self.last_logged_seqno.load(Ordering::Acquire))
    }

    fn before_sweep(&self, tree: &PoolTree<M>, visible: SeqNo) {
        // A removed record may not be in the WAL, but older records of its key may be.
        let applied = self.last_logged_seqno.load(Ordering::Acquire).min(visible.0);
        if applied > self.applied_through.load(Ordering::Acquire) {
            self.write_applied_through(tree, applied);
        }
    }

    fn seqnos_at_open(&self) -> (SeqNo, SeqNo) {
        self.seqnos_at_open
    }

    fn first_unflushed(&self) -> Option<SeqNo> {
        None
    }

    fn request_checkpoint(&self) {}

    fn is_checkpoint_requested(&self) -> bool {
        false
    }

    fn is_checkpoint_running(&self) -> bool {
        false
    }

    fn checkpoint(&self, _tree: &PoolTree<M>, _host: &dyn EngineHost) -> Result<TaskReport> {
        Ok(TaskReport::default())
    }

    fn block_checkpoints(&self) -> Option<MutexGuard<'_, ()>> {
        None
    }

    fn copy_to(&self, tree: &PoolTree<M>, dir: &Path) -> Result<()> {
        let name = PoolFileKind::Pool.name(self.location.partition);
        // Otherwise the copy may lack an expired record that is not in the WAL, and have the header from before its
        // removal: then the WAL would be replayed with an older record of its key.
        let _no_sweep = tree.block_sweeps();
        tree.with_structure_locked(|| copy_region(&*self.location.fs, tree.region(), &dir.join(name)))
    }

    fn close(&self, tree: &PoolTree<M>) {
        // The exact end is stored, so that sequence numbers continue without a gap. All used ones are visible by now.
        let end = SeqNo((self.location.visible.get().0 + 1).min(SeqNo::MAX.0));
        if end.0 < self.seqno_end.load(Ordering::Relaxed) {
            tree.write_seqno_field(PoolSeqnoField::SeqnoEnd, end);
        }
        tree.set_clean_shutdown_mark();
    }

    fn discard(&self) {
        self.is_discarded.store(true, Ordering::SeqCst);
        let _found_by_the_next_open = self.location.fs.remove_file(&self.path);
    }

    fn is_discarded(&self) -> bool {
        self.is_discarded.load(Ordering::SeqCst)
    }

    fn disk_bytes(&self, tree: &PoolTree<M>) -> u64 {
        tree.backend.region().len()
    }

    fn checkpoint_stats(&self) -> (u64, u64) {
        (0, 0)
    }

    fn checkpoint_bytes(&self, _tree: &PoolTree<M>) -> u64 {
        0
    }
}

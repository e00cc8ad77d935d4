//! Durability of a mapped pool: a change is durable when the call returns, as far as the memory of the file system
//! is. The WAL has only batches.
//!
//! A single removal leaves no trace in the WAL, so an older put of the same key in the WAL would restore the key at
//! replay. Therefore the pool stores the sequence number up to which it contains all of the WAL, before its first
//! single removal. It also stores a sequence number that it never exceeds: after a reopen, new sequence numbers must
//! be above all used ones, and the WAL does not have them.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::base::sync::lock;
use crate::base::{RecordKind, Result, SeqNo};
use crate::engine::{EngineHost, TaskReport};
use crate::pmem::persistence::{MappedPoolFile, PersistenceBackend};
use crate::pmem::pool::PoolFileKind;
use crate::pmem::pool::engine::PoolDurability;
use crate::pmem::pool::location::{PoolLocation, copy_region};
use crate::pmem::pool_header::PoolSeqnoField;
use crate::pmem::tree::PoolTree;

/// Number of sequence numbers that are recorded ahead.
const SEQNOS_RESERVED_AHEAD: u64 = 1 << 20;

/// Keeps a pool in a file that is used as memory. Thread safe.
pub(crate) struct MappedPoolDurability {
    location: PoolLocation,
    path: PathBuf,
    seqnos_at_open: (SeqNo, SeqNo),
    /// No number from here on was used; the pool says so.
    seqno_end: AtomicU64,
    /// The last number from the log, and the one that is noted.
    last_logged_seqno: AtomicU64,
    applied_through: AtomicU64,
    /// Held by the thread that writes the record.
    header_lock: Mutex<()>,
    is_discarded: AtomicBool,
    checkpoint_lock: Mutex<()>,
}

impl MappedPoolDurability {
    /// Keeps a tree, as it was opened from the file at `path`, which has the notes `seqnos_at_open`.
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
            checkpoint_lock: Mutex::new(()),
        }
    }

    /// A number is about to be used.
    #[inline]
    fn ensure_seqno_reserved(&self, tree: &PoolTree<MappedPoolFile>, seqno: SeqNo) {
        if seqno.0 >= self.seqno_end.load(Ordering::Acquire) {
            self.write_seqno_end(tree, seqno);
        }
    }

    /// Sequence numbers up to `seqno` and many more will be used. A caller that finds them recorded may rely on their
    /// durability.
    #[cold]
    fn write_seqno_end(&self, tree: &PoolTree<MappedPoolFile>, seqno: SeqNo) {
        let _noting = lock(&self.header_lock);
        if seqno.0 >= self.seqno_end.load(Ordering::Relaxed) {
            let end = SeqNo((seqno.0 + SEQNOS_RESERVED_AHEAD).min(SeqNo::MAX.0));
            tree.write_seqno_field(PoolSeqnoField::SeqnoEnd, end);
            self.seqno_end.store(end.0, Ordering::Release);
        }
    }

    /// All through `logged`, the last number that the log has for it, is in the pool.
    #[cold]
    fn write_applied_through(&self, tree: &PoolTree<MappedPoolFile>, logged: u64) {
        let _noting = lock(&self.header_lock);
        if logged > self.applied_through.load(Ordering::Relaxed) {
            tree.write_seqno_field(PoolSeqnoField::AppliedThrough, SeqNo(logged));
            self.applied_through.store(logged, Ordering::Release);
        }
    }
}

impl PoolDurability<MappedPoolFile> for MappedPoolDurability {
    /// Only by a thread without concurrent changes: when a single change is made, all of the WAL is applied.
    fn before_logged_write(&self, tree: &PoolTree<MappedPoolFile>, kind: RecordKind, seqno: SeqNo) -> Result<()> {
        self.ensure_seqno_reserved(tree, seqno);
        let logged = self.last_logged_seqno.load(Ordering::Acquire);
        // Or the log would add again what this removes, on top of what came into its place.
        if !kind.is_value() && logged > self.applied_through.load(Ordering::Acquire) {
            self.write_applied_through(tree, logged);
        }
        self.last_logged_seqno.store(seqno.0, Ordering::Release);
        Ok(())
    }

    #[inline]
    fn before_unlogged_write(&self, tree: &PoolTree<MappedPoolFile>, kind: RecordKind, seqno: SeqNo) -> Result<()> {
        self.ensure_seqno_reserved(tree, seqno);
        let logged = self.last_logged_seqno.load(Ordering::Acquire);
        if !kind.is_value() && logged > self.applied_through.load(Ordering::Acquire) {
            self.write_applied_through(tree, logged);
        }
        Ok(())
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

    fn checkpoint(&self, _tree: &PoolTree<MappedPoolFile>, _host: &dyn EngineHost) -> Result<TaskReport> {
        Ok(TaskReport::default())
    }

    fn block_checkpoints(&self) -> MutexGuard<'_, ()> {
        lock(&self.checkpoint_lock)
    }

    fn copy_to(&self, tree: &PoolTree<MappedPoolFile>, dir: &Path) -> Result<()> {
        let name = PoolFileKind::Pool.name(self.location.partition);
        tree.with_structure_locked(|| copy_region(&*self.location.fs, tree.region(), &dir.join(name)))
    }

    fn close(&self, tree: &PoolTree<MappedPoolFile>) {
        // Exactly, so that numbers go on without a gap: all that were used are visible.
        let end = SeqNo((self.location.visible.get().0 + 1).min(SeqNo::MAX.0));
        if end.0 < self.seqno_end.load(Ordering::Relaxed) {
            tree.write_seqno_field(PoolSeqnoField::SeqnoEnd, end);
        }
        tree.set_clean_shutdown_mark();
    }

    fn discard(&self) {
        self.is_discarded.store(true, Ordering::SeqCst);
    }

    fn is_discarded(&self) -> bool {
        self.is_discarded.load(Ordering::SeqCst)
    }

    fn remove_files(&self) {
        let _found_by_the_next_open = self.location.fs.remove_file(&self.path);
    }

    fn file_stats(&self, tree: &PoolTree<MappedPoolFile>) -> (u64, u64, u64) {
        (tree.backend.region().len(), 0, 0)
    }

    fn checkpoint_bytes(&self, _tree: &PoolTree<MappedPoolFile>) -> u64 {
        0
    }
}

//! Durability of a pool in memory: the WAL makes its records durable, and a checkpoint (the flush of this tree)
//! writes the image to its file.
//!
//! A checkpoint is a snapshot at one point in time. Its sequence number is the one that was visible when it began:
//! every record up to it is in the checkpoint. Records in progress at that time may be in it or not, and stay in the
//! WAL until the next checkpoint.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::base::sync::lock;
use crate::base::version_edit::VersionEdit;
use crate::base::{Error, ErrorKind, RecordKind, Result, SeqNo};
use crate::engine::{EngineHost, TaskReport};
use crate::pmem::persistence::{PersistenceBackend, PoolImage};
use crate::pmem::pool::ImageStore;
use crate::pmem::pool::engine::PoolDurability;
use crate::pmem::pool::location::PoolLocation;
use crate::pmem::tree::PoolTree;

/// Keeps an image by checkpoints. Thread safe.
pub(crate) struct PoolCheckpointer {
    store: ImageStore,
    location: PoolLocation,
    /// What the files held already when it was opened, and what may have been in them beyond it.
    seqnos_at_open: (SeqNo, SeqNo),
    /// The lowest number that no checkpoint has begun to take, [`NO_SEQNO`] if there is none.
    min_dirty_seqno: AtomicU64,
    /// The highest number that was given to the tree.
    max_applied_seqno: AtomicU64,
    /// The lowest number that the checkpoint under way takes. Locked also while `min_dirty_seqno` passes into it.
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

    /// A checkpoint begins: all that is visible now will be in it.
    fn begin_snapshot(&self) -> SeqNo {
        let from = self.location.visible.get();
        let mut taken = lock(&self.min_flushing_seqno);
        *taken = self.min_dirty_seqno.swap(NO_SEQNO, Ordering::SeqCst).min(*taken);
        from
    }

    /// The image was cut: the highest number that may be in it. What came meanwhile is left to the next checkpoint.
    fn end_snapshot(&self, from: SeqNo) -> SeqNo {
        let highest = SeqNo(self.max_applied_seqno.load(Ordering::SeqCst));
        if highest > from {
            self.min_dirty_seqno.fetch_min(from.0 + 1, Ordering::SeqCst);
        }
        highest.max(from)
    }

    /// Nothing waits for this checkpoint any more.
    fn finish_checkpoint(&self, done: bool) {
        let mut taken = lock(&self.min_flushing_seqno);
        if !done {
            self.min_dirty_seqno.fetch_min(*taken, Ordering::SeqCst);
            self.request_checkpoint();
        }
        *taken = NO_SEQNO;
    }

    fn write_checkpoint(&self, tree: &PoolTree<PoolImage>, host: &dyn EngineHost) -> Result<u64> {
        let mut from = SeqNo::ZERO;
        // Not beyond what the log has, though other pools may have used later numbers: the image and the edit prove how
        // far the log was durable.
        let begin = &mut || self.begin_snapshot().min(host.wal_end());
        let written = self.store.checkpoint(&tree.backend, begin, &mut |begun| {
            from = begun;
            let highest = self.end_snapshot(begun).max(self.seqnos_at_open.1);
            host.sync_wal_through(highest)?;
            Ok(highest)
        })?;
        let partition = self.location.partition;
        let mut edits = vec![VersionEdit::Flushed { partition, through: from }];
        // The first checkpoint may have made the files.
        if self.count.load(Ordering::Relaxed) == 0 {
            edits.push(VersionEdit::PoolFileId { partition, file_id: tree.file_id });
        }
        host.commit_edits(&edits)?;
        Ok(written.bytes)
    }
}

impl PoolDurability<PoolImage> for PoolCheckpointer {
    #[inline]
    fn before_logged_write(&self, _tree: &PoolTree<PoolImage>, _kind: RecordKind, seqno: SeqNo) -> Result<()> {
        // Both in one order with what `begin_snapshot` and `end_snapshot` do: either this finds that a checkpoint has
        // begun, or that finds this record. Numbers do not come in their order.
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

    fn seqnos_at_open(&self) -> (SeqNo, SeqNo) {
        self.seqnos_at_open
    }

    fn first_unflushed(&self) -> Option<SeqNo> {
        let taken = lock(&self.min_flushing_seqno);
        let first = self.min_dirty_seqno.load(Ordering::SeqCst).min(*taken);
        (first != NO_SEQNO).then_some(SeqNo(first))
    }

    fn request_checkpoint(&self) {
        self.is_requested.store(true, Ordering::Release);
    }

    fn is_checkpoint_requested(&self) -> bool {
        self.is_requested.load(Ordering::Acquire)
    }

    fn is_checkpoint_running(&self) -> bool {
        *lock(&self.min_flushing_seqno) != NO_SEQNO || self.checkpoint_lock.try_lock().is_err()
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
        let written = self.write_checkpoint(tree, host);
        self.finish_checkpoint(written.is_ok());
        let bytes = written?;
        self.count.fetch_add(1, Ordering::Relaxed);
        self.written_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(TaskReport { tables: 1, bytes_written: bytes, ..TaskReport::default() })
    }

    fn block_checkpoints(&self) -> MutexGuard<'_, ()> {
        lock(&self.checkpoint_lock)
    }

    fn copy_to(&self, _tree: &PoolTree<PoolImage>, dir: &Path) -> Result<()> {
        self.store.copy_to(dir)
    }

    fn close(&self, _tree: &PoolTree<PoolImage>) {}

    fn discard(&self) {
        self.is_discarded.store(true, Ordering::SeqCst);
        drop(lock(&self.checkpoint_lock));
    }

    fn is_discarded(&self) -> bool {
        self.is_discarded.load(Ordering::SeqCst)
    }

    fn remove_files(&self) {
        self.store.remove();
    }

    fn file_stats(&self, _tree: &PoolTree<PoolImage>) -> (u64, u64, u64) {
        (self.store.disk_bytes(), self.count.load(Ordering::Relaxed), self.written_bytes.load(Ordering::Relaxed))
    }

    fn checkpoint_bytes(&self, tree: &PoolTree<PoolImage>) -> u64 {
        self.store.space_needed(tree.backend.region().len(), tree.backend.pages_to_write())
    }
}

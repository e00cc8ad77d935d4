//! The image is in memory of this process; the log makes its records durable, and a checkpoint, which is this tree's
//! flush, brings the image to its file.
//!
//! What only the log holds: a checkpoint is of one moment, its cut. It says that all is in it up to the number that was
//! visible when it began; what was under way then may be in it or not, and stays in the log until the next one.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::base::edit::Edit;
use crate::base::sync::lock;
use crate::base::{Error, ErrorKind, RecordKind, Result, SeqNo};
use crate::engine::{Host, TaskReport};
use crate::pmem::engine::home::PoolHome;
use crate::pmem::engine::pool::Keeper;
use crate::pmem::medium::{Image, Medium};
use crate::pmem::store::ImageStore;
use crate::pmem::tree::Tree;

/// Keeps an image by checkpoints. Thread safe.
pub(crate) struct Checkpoints {
    store: ImageStore,
    home: PoolHome,
    /// What the files held already when it was opened, and what may have been in them beyond it.
    at_open: (SeqNo, SeqNo),
    /// The lowest number that no checkpoint has begun to take, [`NOTHING`] if there is none.
    dirty_from: AtomicU64,
    /// The highest number that was given to the tree.
    applied: AtomicU64,
    /// The lowest number that the checkpoint under way takes. Locked also while `dirty_from` passes into it.
    taken_from: Mutex<u64>,
    wanted: AtomicBool,
    /// Held by who makes a checkpoint, or lets nobody make one.
    turn: Mutex<()>,
    discarded: AtomicBool,
    count: AtomicU64,
    written: AtomicU64,
}

const NOTHING: u64 = u64::MAX;

impl Checkpoints {
    pub(crate) fn new(store: ImageStore, home: PoolHome, at_open: (SeqNo, SeqNo)) -> Checkpoints {
        Checkpoints {
            store,
            home,
            at_open,
            dirty_from: AtomicU64::new(NOTHING),
            applied: AtomicU64::new(at_open.0.0),
            taken_from: Mutex::new(NOTHING),
            wanted: AtomicBool::new(false),
            turn: Mutex::new(()),
            discarded: AtomicBool::new(false),
            count: AtomicU64::new(0),
            written: AtomicU64::new(0),
        }
    }

    /// A checkpoint begins: all that is visible now will be in it.
    fn begin_cut(&self) -> SeqNo {
        let from = self.home.visible.get();
        let mut taken = lock(&self.taken_from);
        *taken = self.dirty_from.swap(NOTHING, Ordering::SeqCst).min(*taken);
        from
    }

    /// The image was cut: the highest number that may be in it. What came meanwhile is left to the next checkpoint.
    fn end_cut(&self, from: SeqNo) -> SeqNo {
        let highest = SeqNo(self.applied.load(Ordering::SeqCst));
        if highest > from {
            self.dirty_from.fetch_min(from.0 + 1, Ordering::SeqCst);
        }
        highest.max(from)
    }

    /// Nothing waits for this checkpoint any more.
    fn finish_cut(&self, done: bool) {
        let mut taken = lock(&self.taken_from);
        if !done {
            self.dirty_from.fetch_min(*taken, Ordering::SeqCst);
            self.want();
        }
        *taken = NOTHING;
    }

    fn write(&self, tree: &Tree<Image>, host: &dyn Host) -> Result<u64> {
        let mut from = SeqNo::ZERO;
        // Not beyond what the log has, though other pools may have used later numbers: the image and the edit prove how
        // far the log was durable.
        let begin = &mut || self.begin_cut().min(host.log_end());
        let written = self.store.checkpoint(&tree.medium, begin, &mut |begun| {
            from = begun;
            let highest = self.end_cut(begun).max(self.at_open.1);
            host.make_log_durable(highest)?;
            Ok(highest)
        })?;
        let partition = self.home.partition;
        let mut edits = vec![Edit::Flushed { partition, through: from }];
        // The first checkpoint may have made the files.
        if self.count.load(Ordering::Relaxed) == 0 {
            edits.push(Edit::PoolFileId { partition, file_id: tree.file_id });
        }
        host.commit_edits(&edits)?;
        Ok(written.bytes)
    }
}

impl Keeper<Image> for Checkpoints {
    #[inline]
    fn before_logged(&self, _tree: &Tree<Image>, _kind: RecordKind, seqno: SeqNo) -> Result<()> {
        // Both in one order with what `begin_cut` and `end_cut` do: either this finds that a checkpoint has begun, or
        // that finds this record. Numbers do not come in their order.
        self.applied.fetch_max(seqno.0, Ordering::SeqCst);
        if self.dirty_from.load(Ordering::SeqCst) > seqno.0 {
            self.dirty_from.fetch_min(seqno.0, Ordering::SeqCst);
        }
        Ok(())
    }

    fn before_alone(&self, tree: &Tree<Image>, kind: RecordKind, seqno: SeqNo) -> Result<()> {
        debug_assert!(false, "an image is not durable by itself");
        self.before_logged(tree, kind, seqno)
    }

    fn at_open(&self) -> (SeqNo, SeqNo) {
        self.at_open
    }

    fn first_unflushed(&self) -> Option<SeqNo> {
        let taken = lock(&self.taken_from);
        let first = self.dirty_from.load(Ordering::SeqCst).min(*taken);
        (first != NOTHING).then_some(SeqNo(first))
    }

    fn want(&self) {
        self.wanted.store(true, Ordering::Release);
    }

    fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Acquire)
    }

    fn is_busy(&self) -> bool {
        *lock(&self.taken_from) != NOTHING || self.turn.try_lock().is_err()
    }

    fn checkpoint(&self, tree: &Tree<Image>, host: &dyn Host) -> Result<TaskReport> {
        let _turn = lock(&self.turn);
        if self.is_discarded() {
            return Err(Error::new(ErrorKind::Closed, format!("partition {} was deleted", self.home.name)));
        }
        self.wanted.store(false, Ordering::Release);
        if self.first_unflushed().is_none() {
            return Ok(TaskReport::default());
        }
        let written = self.write(tree, host);
        self.finish_cut(written.is_ok());
        let bytes = written?;
        self.count.fetch_add(1, Ordering::Relaxed);
        self.written.fetch_add(bytes, Ordering::Relaxed);
        Ok(TaskReport { tables: 1, bytes_written: bytes, ..TaskReport::default() })
    }

    fn hold(&self) -> MutexGuard<'_, ()> {
        lock(&self.turn)
    }

    fn copy_to(&self, _tree: &Tree<Image>, dir: &Path) -> Result<()> {
        self.store.copy_to(dir)
    }

    fn close(&self, _tree: &Tree<Image>) {}

    fn discard(&self) {
        self.discarded.store(true, Ordering::SeqCst);
        drop(lock(&self.turn));
    }

    fn is_discarded(&self) -> bool {
        self.discarded.load(Ordering::SeqCst)
    }

    fn remove_files(&self) {
        self.store.remove();
    }

    fn figures(&self, _tree: &Tree<Image>) -> (u64, u64, u64) {
        (self.store.disk_bytes(), self.count.load(Ordering::Relaxed), self.written.load(Ordering::Relaxed))
    }

    fn checkpoint_bytes(&self, tree: &Tree<Image>) -> u64 {
        self.store.space_needed(tree.medium.region().len(), tree.medium.pages_to_write())
    }
}

//! The file is the memory: a change is durable when it returns, as far as the file system's memory is. The log has only
//! what belongs together with other changes.
//!
//! What a single change that is not in the log may forget: a removal leaves no trace, and a put of the same key that
//! the log has from before would come back when it is added again. So the pool notes up to where all of the log is in
//! it before it removes anything alone. What it notes, too, is a number that it never goes beyond: whoever opens it has
//! to go on behind all numbers that were used, and the log does not have them.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::base::sync::lock;
use crate::base::{RecordKind, Result, SeqNo};
use crate::engine::{Host, TaskReport};
use crate::pmem::engine::home::{PoolHome, copy_region};
use crate::pmem::engine::pool::Keeper;
use crate::pmem::medium::{Medium, Shared};
use crate::pmem::notes::Note;
use crate::pmem::store::PoolFile;
use crate::pmem::tree::Tree;

/// So many numbers are noted ahead.
const AHEAD: u64 = 1 << 20;

/// Keeps a pool in a file that is used as memory. Thread safe.
pub(crate) struct Memory {
    home: PoolHome,
    path: PathBuf,
    at_open: (SeqNo, SeqNo),
    /// No number from here on was used; the pool says so.
    numbers_end: AtomicU64,
    /// The last number from the log, and the one that is noted.
    logged: AtomicU64,
    noted: AtomicU64,
    /// Held by who makes a note.
    noting: Mutex<()>,
    discarded: AtomicBool,
    turn: Mutex<()>,
}

impl Memory {
    /// Keeps a tree, as it was opened from the file at `path`, which has the notes `at_open`.
    pub(crate) fn new(home: PoolHome, path: PathBuf, at_open: (SeqNo, SeqNo)) -> Memory {
        let (SeqNo(applied), SeqNo(last)) = at_open;
        Memory {
            home,
            path,
            at_open,
            numbers_end: AtomicU64::new(last + 1),
            logged: AtomicU64::new(applied),
            noted: AtomicU64::new(applied),
            noting: Mutex::new(()),
            discarded: AtomicBool::new(false),
            turn: Mutex::new(()),
        }
    }

    /// A number is about to be used.
    #[inline]
    fn use_number(&self, tree: &Tree<Shared>, seqno: SeqNo) {
        if seqno.0 >= self.numbers_end.load(Ordering::Acquire) {
            self.note_numbers(tree, seqno);
        }
    }

    /// Numbers up to `seqno` and many more will be used. Who finds them noted finds the note durable.
    #[cold]
    fn note_numbers(&self, tree: &Tree<Shared>, seqno: SeqNo) {
        let _noting = lock(&self.noting);
        if seqno.0 >= self.numbers_end.load(Ordering::Relaxed) {
            let end = SeqNo((seqno.0 + AHEAD).min(SeqNo::MAX.0));
            tree.note(Note::NumbersEnd, end);
            self.numbers_end.store(end.0, Ordering::Release);
        }
    }

    /// All through `logged`, the last number that the log has for it, is in the pool.
    #[cold]
    fn note_applied(&self, tree: &Tree<Shared>, logged: u64) {
        let _noting = lock(&self.noting);
        if logged > self.noted.load(Ordering::Relaxed) {
            tree.note(Note::Applied, SeqNo(logged));
            self.noted.store(logged, Ordering::Release);
        }
    }
}

impl Keeper<Shared> for Memory {
    /// Only by who makes no changes beside others: when a single change is made, all that the log has is applied.
    fn before_logged(&self, tree: &Tree<Shared>, kind: RecordKind, seqno: SeqNo) -> Result<()> {
        self.use_number(tree, seqno);
        let logged = self.logged.load(Ordering::Acquire);
        // Or the log would add again what this removes, on top of what came into its place.
        if !kind.is_value() && logged > self.noted.load(Ordering::Acquire) {
            self.note_applied(tree, logged);
        }
        self.logged.store(seqno.0, Ordering::Release);
        Ok(())
    }

    #[inline]
    fn before_alone(&self, tree: &Tree<Shared>, kind: RecordKind, seqno: SeqNo) -> Result<()> {
        self.use_number(tree, seqno);
        let logged = self.logged.load(Ordering::Acquire);
        if !kind.is_value() && logged > self.noted.load(Ordering::Acquire) {
            self.note_applied(tree, logged);
        }
        Ok(())
    }

    fn at_open(&self) -> (SeqNo, SeqNo) {
        self.at_open
    }

    fn first_unflushed(&self) -> Option<SeqNo> {
        None
    }

    fn want(&self) {}

    fn is_wanted(&self) -> bool {
        false
    }

    fn is_busy(&self) -> bool {
        false
    }

    fn checkpoint(&self, _tree: &Tree<Shared>, _host: &dyn Host) -> Result<TaskReport> {
        Ok(TaskReport::default())
    }

    fn hold(&self) -> MutexGuard<'_, ()> {
        lock(&self.turn)
    }

    fn copy_to(&self, tree: &Tree<Shared>, dir: &Path) -> Result<()> {
        let name = PoolFile::Pool.name(self.home.partition);
        tree.while_still(|| copy_region(&*self.home.fs, tree.region(), &dir.join(name)))
    }

    fn close(&self, tree: &Tree<Shared>) {
        // Exactly, so that numbers go on without a gap: all that were used are visible.
        let end = SeqNo((self.home.visible.get().0 + 1).min(SeqNo::MAX.0));
        if end.0 < self.numbers_end.load(Ordering::Relaxed) {
            tree.note(Note::NumbersEnd, end);
        }
        tree.note_closed();
    }

    fn discard(&self) {
        self.discarded.store(true, Ordering::SeqCst);
    }

    fn is_discarded(&self) -> bool {
        self.discarded.load(Ordering::SeqCst)
    }

    fn remove_files(&self) {
        let _found_by_the_next_open = self.home.fs.remove_file(&self.path);
    }

    fn figures(&self, tree: &Tree<Shared>) -> (u64, u64, u64) {
        (tree.medium.region().len(), 0, 0)
    }

    fn checkpoint_bytes(&self, _tree: &Tree<Shared>) -> u64 {
        0
    }
}

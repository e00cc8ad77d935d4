//! How much memory the memtables of a database take.

use crate::mem::atomic::{AtomicU64, Ordering};

/// A sum over all memtables that charge to it, in bytes of the memory that they have allocated. A memtable adds to it
/// when it allocates, which is once in many insertions. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct MemtableMemory {
    /// Of memtables that take records.
    active: AtomicU64,
    /// Of all that exist: also of sealed ones, and of flushed ones that iterators hold.
    total: AtomicU64,
}

impl MemtableMemory {
    /// Bytes of memtables that take records.
    #[inline]
    pub(crate) fn active(&self) -> u64 {
        self.active.load(Ordering::Relaxed)
    }

    /// Bytes of all memtables that exist.
    pub(crate) fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    pub(in crate::memtable) fn grow(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
        self.active.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(in crate::memtable) fn seal(&self, bytes: u64) {
        self.active.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(in crate::memtable) fn free(&self, bytes: u64) {
        self.total.fetch_sub(bytes, Ordering::Relaxed);
    }
}

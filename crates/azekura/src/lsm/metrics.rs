//! What a tree says about itself.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::lsm::blobs::map::BlobFileUse;

/// One level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LevelMetrics {
    pub(crate) runs: u64,
    pub(crate) tables: u64,
    pub(crate) bytes: u64,
    /// Keys and values before compression.
    pub(crate) raw_bytes: u64,
    pub(crate) entries: u64,
    pub(crate) tombstones: u64,
}

/// A tree's state, and what it has done since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LsmMetrics {
    /// From level 0 down.
    pub(crate) levels: Vec<LevelMetrics>,
    pub(crate) memtable_bytes: u64,
    pub(crate) memtable_entries: u64,
    pub(crate) sealed_bytes: u64,
    pub(crate) sealed: u64,
    /// Bytes that open tables and blob files hold outside of the cache.
    pub(crate) pinned_bytes: u64,
    pub(crate) blob_files: Vec<BlobFileUse>,
    /// Early files that no edit names yet, as if all in them were referenced.
    pub(crate) early_files: Vec<BlobFileUse>,
    pub(crate) flushes: u64,
    pub(crate) flushed_bytes: u64,
    /// Merges; moves are not counted.
    pub(crate) compactions: u64,
    pub(crate) compacted_read: u64,
    pub(crate) compacted_written: u64,
    /// Tables that changed levels without being rewritten.
    pub(crate) moved_tables: u64,
    /// Collections of blob files.
    pub(crate) collections: u64,
}

/// The counting half of [`LsmMetrics`]. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) flushes: AtomicU64,
    pub(crate) flushed_bytes: AtomicU64,
    pub(crate) compactions: AtomicU64,
    pub(crate) compacted_read: AtomicU64,
    pub(crate) compacted_written: AtomicU64,
    pub(crate) moved_tables: AtomicU64,
    pub(crate) collections: AtomicU64,
}

impl LsmMetrics {
    /// Bytes in memtables, sealed ones included.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memtable_bytes + self.sealed_bytes
    }
}

impl Counters {
    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    /// Fills in what is counted.
    pub(crate) fn fill(&self, metrics: &mut LsmMetrics) {
        metrics.flushes = self.flushes.load(Ordering::Relaxed);
        metrics.flushed_bytes = self.flushed_bytes.load(Ordering::Relaxed);
        metrics.compactions = self.compactions.load(Ordering::Relaxed);
        metrics.compacted_read = self.compacted_read.load(Ordering::Relaxed);
        metrics.compacted_written = self.compacted_written.load(Ordering::Relaxed);
        metrics.moved_tables = self.moved_tables.load(Ordering::Relaxed);
        metrics.collections = self.collections.load(Ordering::Relaxed);
    }
}

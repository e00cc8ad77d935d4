//! What a tree says about itself.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::lsm::blob::map::BlobFileStats;

/// One level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LsmLevelMetrics {
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
    pub(crate) levels: Vec<LsmLevelMetrics>,
    pub(crate) memtable_bytes: u64,
    pub(crate) memtable_entries: u64,
    pub(crate) sealed_bytes: u64,
    pub(crate) sealed_memtables: u64,
    /// Bytes that open tables and blob files hold outside of the cache.
    pub(crate) pinned_bytes: u64,
    pub(crate) blob_files: Vec<BlobFileStats>,
    /// Early files that no edit names yet, as if all in them were referenced.
    pub(crate) direct_blob_files: Vec<BlobFileStats>,
    pub(crate) flushes: u64,
    pub(crate) flushed_bytes: u64,
    /// Merges; moves are not counted.
    pub(crate) compactions: u64,
    pub(crate) compaction_bytes_read: u64,
    pub(crate) compaction_bytes_written: u64,
    /// Tables that changed levels without being rewritten.
    pub(crate) trivial_moves: u64,
    /// Collections of blob files.
    pub(crate) blob_gc_runs: u64,
}

/// The counting half of [`LsmMetrics`]. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct LsmCounters {
    pub(crate) flushes: AtomicU64,
    pub(crate) flushed_bytes: AtomicU64,
    pub(crate) compactions: AtomicU64,
    pub(crate) compaction_bytes_read: AtomicU64,
    pub(crate) compaction_bytes_written: AtomicU64,
    pub(crate) trivial_moves: AtomicU64,
    pub(crate) blob_gc_runs: AtomicU64,
}

impl LsmMetrics {
    /// Bytes in memtables, sealed ones included.
    pub(crate) fn all_memtable_bytes(&self) -> u64 {
        self.memtable_bytes + self.sealed_bytes
    }
}

impl LsmCounters {
    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    /// Fills in what is counted.
    pub(crate) fn copy_to(&self, metrics: &mut LsmMetrics) {
        metrics.flushes = self.flushes.load(Ordering::Relaxed);
        metrics.flushed_bytes = self.flushed_bytes.load(Ordering::Relaxed);
        metrics.compactions = self.compactions.load(Ordering::Relaxed);
        metrics.compaction_bytes_read = self.compaction_bytes_read.load(Ordering::Relaxed);
        metrics.compaction_bytes_written = self.compaction_bytes_written.load(Ordering::Relaxed);
        metrics.trivial_moves = self.trivial_moves.load(Ordering::Relaxed);
        metrics.blob_gc_runs = self.blob_gc_runs.load(Ordering::Relaxed);
    }
}

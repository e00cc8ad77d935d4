//! Metrics of a tree.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::lsm::blob::map::BlobFileStats;

/// Metrics of one level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LsmLevelMetrics {
    pub(crate) runs: u64,
    pub(crate) tables: u64,
    pub(crate) bytes: u64,
    /// Bytes of keys and values before compression.
    pub(crate) raw_bytes: u64,
    pub(crate) entries: u64,
    pub(crate) tombstones: u64,
}

/// The state of a tree, and counters since it was opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LsmMetrics {
    /// By level, from level 0 on.
    pub(crate) levels: Vec<LsmLevelMetrics>,
    pub(crate) memtable_bytes: u64,
    pub(crate) memtable_entries: u64,
    pub(crate) sealed_bytes: u64,
    pub(crate) sealed_memtables: u64,
    /// Bytes of memory that open tables and blob files use outside of the cache.
    pub(crate) pinned_bytes: u64,
    pub(crate) blob_files: Vec<BlobFileStats>,
    /// Direct blob files that no edit names yet, as if every value were referenced.
    pub(crate) direct_blob_files: Vec<BlobFileStats>,
    pub(crate) flushes: u64,
    pub(crate) flushed_bytes: u64,
    /// Compactions, without trivial moves.
    pub(crate) compactions: u64,
    pub(crate) compaction_bytes_read: u64,
    pub(crate) compaction_bytes_written: u64,
    /// Tables that changed levels without being rewritten.
    pub(crate) trivial_moves: u64,
    /// Completed blob GC jobs.
    pub(crate) blob_gc_runs: u64,
}

/// The counters of [`LsmMetrics`]. Thread safe.
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
    /// Bytes of all memtables, including sealed ones.
    pub(crate) fn all_memtable_bytes(&self) -> u64 {
        self.memtable_bytes + self.sealed_bytes
    }
}

impl LsmCounters {
    pub(crate) fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    /// Copies the counters into `metrics`.
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

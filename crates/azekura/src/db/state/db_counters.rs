//! Counters of a database since it was opened, for its metrics.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::db::state::sharded_counter::ShardedCounter;
use crate::engine::{Task, TaskReport};

/// Counters since the database was opened. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct DbCounters {
    pub(crate) user_bytes: ShardedCounter,
    pub(crate) conflicts: AtomicU64,
    pub(crate) exclusive_turns: AtomicU64,
    pub(crate) direct_blob_bytes: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) flushed_bytes: AtomicU64,
    pub(crate) ingests: AtomicU64,
    pub(crate) ingested_bytes: AtomicU64,
    pub(crate) compactions: AtomicU64,
    pub(crate) trivial_moves: AtomicU64,
    pub(crate) compaction_bytes_read: AtomicU64,
    pub(crate) compaction_bytes_written: AtomicU64,
    pub(crate) blob_gc_runs: AtomicU64,
    pub(crate) blob_gc_bytes_read: AtomicU64,
    pub(crate) blob_gc_bytes_written: AtomicU64,
    pub(crate) blob_bytes_freed: AtomicU64,
}

fn add(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

impl DbCounters {
    /// Counts a task. A compaction or blob GC that did nothing does not count.
    pub(crate) fn record_task(&self, task: Task, report: &TaskReport) {
        match task {
            Task::Flush => {
                add(&self.flushes, 1);
                add(&self.flushed_bytes, report.bytes_written);
            }
            Task::Compact | Task::BlobGc if report.is_idle() => {}
            Task::Compact => {
                let moved = report.bytes_read == 0 && report.bytes_written == 0;
                add(if moved { &self.trivial_moves } else { &self.compactions }, 1);
                add(&self.compaction_bytes_read, report.bytes_read);
                add(&self.compaction_bytes_written, report.bytes_written);
                add(&self.blob_bytes_freed, report.bytes_freed);
            }
            Task::BlobGc => {
                add(&self.blob_gc_runs, 1);
                add(&self.blob_gc_bytes_read, report.bytes_read);
                add(&self.blob_gc_bytes_written, report.bytes_written);
                add(&self.blob_bytes_freed, report.bytes_freed);
            }
        }
    }

    /// Counts a commit that another one has interfered with.
    #[cold]
    pub(crate) fn record_conflict(&self) {
        add(&self.conflicts, 1);
    }

    /// Counts a turn in which all other commits wait.
    pub(crate) fn record_exclusive_turn(&self) {
        add(&self.exclusive_turns, 1);
    }

    /// Counts an ingest of entries with `user_bytes`.
    pub(crate) fn record_ingest(&self, user_bytes: u64, report: &TaskReport) {
        self.user_bytes.add(user_bytes);
        add(&self.ingests, 1);
        add(&self.ingested_bytes, report.bytes_written);
    }
}

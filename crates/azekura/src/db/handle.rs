//! Keeps a database open while a handle exists, and closes it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::base::event::Event;
use crate::base::sync::lock;
use crate::base::version_edit::VersionEdit;
use crate::base::{Error, ErrorKind, Result};
use crate::db::catalog::PartitionState;
use crate::db::inner::DbInner;
use crate::db::state::disk_reserve::ReserveUse;
use crate::db::state::shifts::is_at_work;
use crate::db::worker::{BackgroundThreads, flush_and_wait, retire_wal_segments};
use crate::engine::Engine;
use crate::mem::atomic::yield_now;
use crate::mem::epoch::RetireEpoch;
use crate::vfs::fs::PersistenceLevel;

/// Maximum number of threads that flush while a database closes.
const CLOSING_THREADS_MAX: usize = 8;
/// Maximum number of checks, while closing, whether the reads of pools have ended. Each check after the first
/// [`READER_SPIN_ROUNDS`] is followed by a sleep of 1 ms.
const READER_WAIT_ROUNDS: usize = 10_000;
const READER_SPIN_ROUNDS: usize = 100;

/// Held by every [`Database`](crate::Database), [`Partition`](crate::Partition), [`Snapshot`](crate::Snapshot) and
/// iterator. Dropping the last one closes the database as `close` does; errors are reported to the listener.
pub(crate) struct DbHandle {
    pub(crate) inner: Arc<DbInner>,
    threads: Mutex<BackgroundThreads>,
    closed: AtomicBool,
}

impl DbHandle {
    pub(crate) fn new(inner: Arc<DbInner>, threads: BackgroundThreads) -> Arc<DbHandle> {
        Arc::new(DbHandle { inner, threads: Mutex::new(threads), closed: AtomicBool::new(false) })
    }

    /// Stops the workers, flushes all memtables so that nothing has to be replayed, and releases the directory.
    ///
    /// The directory is released also when an error is returned; the WAL then contains every acknowledged commit.
    ///
    /// In a forked child nothing is done, and `Closed` is returned.
    pub(crate) fn close(&self) -> Result<()> {
        self.inner.check_process()?;
        self.inner.check_outside()?;
        if self.closed.swap(true, Ordering::AcqRel) { Ok(()) } else { self.close_once(false) }
    }

    /// Closes, as the first one to do so. With `tell` the listener gets the error, because no caller does.
    fn close_once(&self, tell: bool) -> Result<()> {
        let inner = &self.inner;
        // Most of the work is done while writers may still write; what they add after it is little.
        let mut flushed = if inner.writer.is_some() { self.flush_all() } else { Ok(()) };
        if let Some(writer) = &inner.writer {
            writer.committer.close();
            flushed = flushed.and_then(|()| self.flush_all());
        }
        inner.stop_work();
        let BackgroundThreads { workers, listener } = std::mem::take(&mut *lock(&self.threads));
        for thread in workers {
            // The last handle may be dropped on a worker (by a comparator); it ends by itself when it sees `closing`.
            if !thread.is_current() && !thread.join() {
                inner.poison.set(Error::new(ErrorKind::Poisoned, "a worker panicked"));
            }
        }
        if inner.writer.is_some() {
            // All work has ended. A table that is released from now on is removed by the next open.
            for tree in inner.catalog.all().iter().filter_map(|p| p.lsm_if_built()) {
                tree.abandon_paused();
                if tree.first_unflushed().is_none() {
                    tree.abandon_direct_blob_files();
                }
            }
            inner.obsolete_files().close();
        }
        let pools: Vec<_> = inner.catalog.all().iter().filter_map(|p| p.pool_if_built().cloned()).collect();
        if inner.writer.is_some() {
            // Runs before the directory is released, also after an error, because another process may open the files
            // then.
            pools.iter().for_each(|pool| pool.stop_writes());
            if pools.iter().any(|pool| pool.persistence_level() > PersistenceLevel::WalOnly) {
                self.wait_for_reads();
            }
        }
        let finished = flushed.and_then(|()| self.finish_wal());
        if finished.is_ok() && inner.writer.is_some() {
            // The WAL contains the next sequence number now.
            pools.iter().for_each(|pool| pool.close());
        }
        if let Some(writer) = &inner.writer {
            writer.wal.stop_writes();
        }
        inner.catalog.all().iter().for_each(|partition| partition.mark_closed());
        *lock(&inner.dir_lock) = None;
        if let Err(error) = &finished
            && tell
        {
            inner.emit(&Event::BackgroundError { error: error.clone() });
        }
        // Behind the lock on the directory: a listener may open it again.
        inner.emit(&Event::Closed);
        inner.poison.events().stop();
        // A listener that closes runs on that thread, which delivers what waits when the listener returns.
        let delivered = listener.is_none_or(|thread| thread.is_current() || thread.join());
        inner.poison.record_delivery(delivered && inner.poison.events().deliver_at_call_end());
        finished
    }

    /// Waits until the reads that are inside a pool have ended, because another process may write to its file once the
    /// directory is free. A read takes microseconds, unless a comparator waits for something; a read that outlasts the
    /// wait, or that called `close` itself from its comparator, finds the database closed when it has copied its value.
    fn wait_for_reads(&self) {
        let (moment, done) = (RetireEpoch::advance(), &self.inner.task_done);
        for looked in 0..READER_WAIT_ROUNDS {
            if moment.others_unpinned() {
                return;
            }
            match looked < READER_SPIN_ROUNDS {
                true => yield_now(),
                false => done.wait_past(done.generation(), 1),
            }
        }
    }

    /// A flush waits for the device several times. With many partitions several threads share the waiting, because the
    /// file system writes what they sync at the same time together; by hand there is one, so that tests are
    /// deterministic.
    fn flush_all(&self) -> Result<()> {
        let inner = &self.inner;
        inner.poison.check()?;
        // A partition whose comparator never came keeps its records in the log.
        let is_dirty = |p: &Arc<PartitionState>| p.tree_if_built().is_some() && p.first_unflushed().is_some();
        let dirty: Vec<_> = inner.catalog.all().into_iter().filter(is_dirty).collect();
        let threads = if inner.settings.workers == 0 { 1 } else { dirty.len().min(CLOSING_THREADS_MAX) };
        let queue = Arc::new(Mutex::new(dirty));
        let drain = |inner: &DbInner, queue: &Mutex<Vec<Arc<PartitionState>>>| {
            while let Some(partition) = { lock(queue).pop() } {
                let flushed = flush_and_wait(inner, &partition);
                // Of a partition that is deleted meanwhile nothing is flushed any more.
                flushed.or_else(|error| if partition.is_deleted() { inner.poison.check() } else { Err(error) })?;
            }
            Ok(())
        };
        let failed: Arc<Mutex<Result<()>>> = Arc::new(Mutex::new(Ok(())));
        let mut helpers = Vec::new();
        for i in 1..threads {
            let (inner, queue, failed) = (Arc::clone(inner), Arc::clone(&queue), Arc::clone(&failed));
            let body = move || {
                if let Err(error) = drain(&inner, &queue) {
                    *lock(&failed) = Err(error);
                }
            };
            // Without another thread this one does it all.
            helpers.extend(self.inner.env.spawn(&format!("azekura-close-{i}"), Box::new(body)));
        }
        let mut result = drain(inner, &queue);
        for helper in helpers {
            if !helper.join() {
                result = Err(inner.poison.set(Error::new(ErrorKind::Poisoned, "a flush panicked")));
            }
        }
        result.and_then(|()| lock(&failed).clone())
    }

    fn finish_wal(&self) -> Result<()> {
        let inner = &self.inner;
        let Some(writer) = &inner.writer else { return Ok(()) };
        // What is in tables leaves the log, the newest segment too: a database at rest is its tables and a short log.
        inner.with_reserve(ReserveUse::Flush, || writer.committer.append_seqno_gap())?;
        inner.with_reserve(ReserveUse::Flush, || writer.wal.seal())?;
        writer.wal.sync(inner.last_visible.get(), false)?;
        inner.with_reserve(ReserveUse::Flush, || retire_wal_segments(inner))?;
        writer.wal.release_space();
        let end = writer.wal.segments().last().map(|segment| segment.epoch);
        if let Some(epoch) = end {
            let edits = [VersionEdit::WalEnd { epoch, seqno: inner.last_visible.get() }];
            inner.with_reserve(ReserveUse::Flush, || writer.version_set.log_and_apply_durably(&edits))?;
        }
        inner.fill_reserve();
        writer.reserve.shrink(writer.version_set.manifest_bytes());
        writer.version_set.sync()
    }
}

impl Drop for DbHandle {
    fn drop(&mut self) {
        if self.inner.is_forked() {
            // Never dropped: the threads exist in the parent only, and locks may be held by them for ever.
            std::mem::forget(Arc::clone(&self.inner));
            let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
            return std::mem::forget(std::mem::take(threads));
        }
        if *self.closed.get_mut() {
            return;
        }
        let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Without workers it is work on another database: other threads that work on this one hold a handle meanwhile.
        if threads.workers.is_empty() || !is_at_work() {
            let _told = self.close_once(true);
            return;
        }
        // Closing waits for work of this database, which may wait for the work that this thread is in.
        let threads = std::mem::take(threads);
        let (inner, closed) = (Arc::clone(&self.inner), AtomicBool::new(true));
        let later = DbHandle { inner, threads: Mutex::new(threads), closed };
        *lock(&self.inner.left_to_close) = Some(Box::new(move || _ = later.close_once(true)));
        self.inner.work_available.notify_all();
    }
}

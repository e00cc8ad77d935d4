//! Keeps a database open while a handle exists, and closes it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::base::event::Event;
use crate::base::sync::lock;
use crate::base::version_edit::VersionEdit;
use crate::base::{Error, ErrorKind, Result};
use crate::db::inner::DbInner;
use crate::db::partition_state::PartitionState;
use crate::db::state::disk_reserve::ReserveUse;
use crate::db::state::work_tracker::is_at_work;
use crate::db::worker::{BackgroundThreads, flush_and_wait};
use crate::mem::atomic::yield_now;
use crate::mem::epoch::RetireEpoch;
use crate::vfs::env::Thread;

/// Maximum number of threads that flush while a database closes.
const CLOSING_THREADS_MAX: usize = 8;
/// Maximum number of checks, while closing, whether the reads of pools have ended. Each check after the first
/// [`READER_SPIN_ROUNDS`] is followed by a sleep of 1 ms.
const READER_WAIT_ROUNDS: usize = 10_000;
const READER_SPIN_ROUNDS: usize = 100;

/// Held by every [`Database`](crate::Database), [`Partition`](crate::Partition), [`Snapshot`](crate::Snapshot),
/// [`Batch`](crate::Batch), [`Transaction`](crate::Transaction), iterator and [`Entry`](crate::Entry). Dropping the
/// last one closes the database as `close` does; errors are reported to the listener.
pub(crate) struct DbHandle {
    pub(crate) inner: Arc<DbInner>,
    threads: Mutex<BackgroundThreads>,
    closed: AtomicBool,
}

impl DbHandle {
    pub(crate) fn new(inner: Arc<DbInner>, threads: BackgroundThreads) -> Arc<DbHandle> {
        Arc::new(DbHandle { inner, threads: Mutex::new(threads), closed: AtomicBool::new(false) })
    }

    /// Adds a thread that ends when the database closes.
    pub(crate) fn add_thread(&self, thread: Box<dyn Thread>) {
        lock(&self.threads).workers.push(thread);
    }

    /// Stops the workers, flushes all memtables so that nothing has to be replayed, and releases the directory.
    ///
    /// The directory is released also when an error is returned; the WAL then contains every acknowledged commit.
    ///
    /// A second call returns at once. A call in a forked child process does nothing and returns `Closed`.
    pub(crate) fn close(&self) -> Result<()> {
        self.inner.check_process()?;
        self.inner.check_outside()?;
        if self.closed.swap(true, Ordering::AcqRel) { Ok(()) } else { self.close_once(false) }
    }

    /// Closes the database. With `report_error` the listener gets the error, because no caller receives it.
    fn close_once(&self, report_error: bool) -> Result<()> {
        let inner = &self.inner;
        inner.background.begin_flushing_to_close();
        // The first flush runs while other threads may still commit, so the second one has little to flush.
        let mut flushed = if inner.writer.is_some() { self.flush_all() } else { Ok(()) };
        if let Some(writer) = &inner.writer {
            writer.committer.close();
            flushed = flushed.and_then(|()| self.flush_all());
        }
        inner.background.stop_and_wait();
        let BackgroundThreads { workers, listener } = std::mem::take(&mut *lock(&self.threads));
        for thread in workers {
            // A comparator may drop the last handle on a worker thread. That worker ends at its next step.
            if !thread.is_current() && !thread.join() {
                inner.poison.set(Error::new(ErrorKind::Poisoned, "a worker panicked"));
            }
        }
        let trees: Vec<_> = inner.catalog.all().iter().filter_map(|p| p.tree_if_built().cloned()).collect();
        if inner.writer.is_some() {
            // All work has ended. The next open removes tables that are released from now on. Runs before the directory
            // is released, also after an error, because another process may open the files then.
            trees.iter().for_each(|tree| tree.stop_writes());
            inner.obsolete_files().close();
            if !trees.iter().all(|tree| tree.needs_wal()) {
                self.wait_for_reads();
            }
        }
        let finished = flushed.and_then(|()| self.finish_wal());
        if finished.is_ok() && inner.writer.is_some() {
            // A tree closes only after the WAL durably records the last sequence number.
            trees.iter().for_each(|tree| tree.close());
        }
        if let Some(writer) = &inner.writer {
            writer.wal.stop_writes();
        }
        inner.write_buffers.close();
        inner.catalog.all().iter().for_each(|partition| partition.mark_closed());
        inner.release_dir_lock();
        if let Err(error) = &finished
            && report_error
        {
            inner.emit(&Event::BackgroundError { error: error.clone() });
        }
        // Sent after the directory lock is released, because the listener may open the database again.
        inner.emit(&Event::Closed);
        // The delivery thread ends after `Closed`. If the listener calls `close`, this code runs on that thread, and
        // the queued events are delivered when the listener returns.
        let delivered = listener.is_none_or(|thread| thread.is_current() || thread.join());
        inner.poison.record_delivery(delivered && inner.poison.events().deliver_at_call_end());
        finished
    }

    /// Waits until running reads of pools have ended, for about 10 seconds at most, because another process may write
    /// to the pool files once the directory is unlocked. A read takes microseconds, unless its comparator blocks. A
    /// read that outlasts the wait, or whose comparator called `close`, copies its value, and then fails with `Closed`.
    fn wait_for_reads(&self) {
        let (epoch, background) = (RetireEpoch::advance(), &self.inner.background);
        for round in 0..READER_WAIT_ROUNDS {
            if epoch.others_unpinned() {
                return;
            }
            match round < READER_SPIN_ROUNDS {
                true => yield_now(),
                false => background.wait_for_task_end(background.task_end_generation(), 1),
            }
        }
    }

    /// Flushes all partitions that have unflushed records.
    ///
    /// Each flush waits for several syncs. Up to [`CLOSING_THREADS_MAX`] threads flush different partitions in
    /// parallel, because the file system combines syncs that run at the same time. With `workers(0)` only the calling
    /// thread flushes, so that tests are deterministic.
    fn flush_all(&self) -> Result<()> {
        let inner = &self.inner;
        inner.poison.check()?;
        // The records of a partition whose comparator was not given since open stay in the WAL.
        let is_dirty = |p: &Arc<PartitionState>| p.tree_if_built().is_some() && p.first_unflushed().is_some();
        let dirty: Vec<_> = inner.catalog.all().into_iter().filter(is_dirty).collect();
        let threads = if inner.settings.workers == 0 { 1 } else { dirty.len().min(CLOSING_THREADS_MAX) };
        let queue = Arc::new(Mutex::new(dirty));
        let drain = |inner: &DbInner, queue: &Mutex<Vec<Arc<PartitionState>>>| {
            while let Some(partition) = { lock(queue).pop() } {
                let flushed = flush_and_wait(inner, &partition);
                // A flush of a partition that another thread deletes meanwhile may fail; nothing is lost then.
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
            // If no thread can be spawned, the calling thread flushes all partitions.
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

    /// Retires all WAL segments whose records are flushed, and records the end of the WAL in the manifest.
    fn finish_wal(&self) -> Result<()> {
        let inner = &self.inner;
        let Some(writer) = &inner.writer else { return Ok(()) };
        // The active segment is sealed, so that it can be retired too.
        inner.with_reserve(ReserveUse::Flush, || writer.committer.append_seqno_gap())?;
        inner.with_reserve(ReserveUse::Flush, || writer.wal.seal())?;
        writer.wal.sync(inner.last_visible.get(), false)?;
        debug_assert!(
            writer.wal.durable() >= inner.last_visible.get(),
            "the WAL has the last sequence number, durably"
        );
        inner.with_reserve(ReserveUse::Flush, || writer.wal_maintenance.retire_segments())?;
        writer.wal.release_space();
        let end = writer.wal.segments().last().map(|segment| segment.epoch);
        if let Some(epoch) = end {
            let edits = [VersionEdit::WalEnd { epoch, seqno: inner.last_visible.get() }];
            inner.with_reserve(ReserveUse::Flush, || writer.version_set.log_and_apply_durably(&edits))?;
        }
        writer.space.shrink_reserve();
        writer.version_set.sync()
    }
}

impl Drop for DbHandle {
    fn drop(&mut self) {
        if self.inner.is_forked() {
            // These objects must not be dropped in the child: their threads exist in the parent only, and may have held
            // locks at the fork, which are never released in the child.
            std::mem::forget(Arc::clone(&self.inner));
            let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
            return std::mem::forget(std::mem::take(threads));
        }
        if *self.closed.get_mut() {
            return;
        }
        let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Without workers the work of this thread belongs to another database, because every thread that works on this
        // database holds a handle.
        if threads.workers.is_empty() || !is_at_work() {
            let _reported_to_listener = self.close_once(true);
            return;
        }
        // Closing waits for the work of this database, which may wait for the work of the calling thread. So a worker
        // closes the database later.
        let threads = std::mem::take(threads);
        let (inner, closed) = (Arc::clone(&self.inner), AtomicBool::new(true));
        let later = DbHandle { inner, threads: Mutex::new(threads), closed };
        self.inner.background.defer_close(Box::new(move || _ = later.close_once(true)));
    }
}

/// Guard of the exclusive turn of a database, which ends when it is dropped, also by a panic. Reads are not affected.
/// Writes of other threads wait for the end of the turn, and end with an error if the database is closed or poisoned.
/// A write of the thread that holds the turn, other than by its transaction, returns `Invalid`.
pub(crate) struct ExclusiveTurn {
    handle: Arc<DbHandle>,
}

impl ExclusiveTurn {
    /// Begins a turn, and waits for the end of any other one.
    ///
    /// # Errors
    /// `Invalid` if this thread holds a turn, or the database is open for reading only; `Poisoned`, `Closed`.
    pub(crate) fn begin(handle: &Arc<DbHandle>) -> Result<ExclusiveTurn> {
        let writer = handle.inner.writer()?;
        handle.inner.check_outside()?;
        writer.committer.begin_turn()?;
        handle.inner.counters.record_exclusive_turn();
        Ok(ExclusiveTurn { handle: Arc::clone(handle) })
    }

    /// The turn belongs to the calling thread from now on.
    ///
    /// # Errors
    /// `Closed` in a forked child.
    pub(crate) fn move_to_this_thread(&self) -> Result<()> {
        self.handle.inner.check_process()?;
        match &self.handle.inner.writer {
            Some(writer) => writer.committer.move_turn_to_this_thread(),
            None => return Err(Error::invalid("the database is open for reading only")),
        }
        Ok(())
    }
}

impl Drop for ExclusiveTurn {
    fn drop(&mut self) {
        if let Some(writer) = self.handle.inner.writer.as_ref().filter(|_| !self.handle.inner.is_forked()) {
            writer.committer.end_turn();
        }
    }
}

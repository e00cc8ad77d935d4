//! What keeps a database open: the last handle closes it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::base::edit::Edit;
use crate::base::event::Event;
use crate::base::sync::lock;
use crate::base::{Error, ErrorKind, Result};
use crate::db::catalog::PartitionState;
use crate::db::shared::Shared;
use crate::db::state::reserve::Need;
use crate::db::state::shifts::is_at_work;
use crate::db::worker::{Threads, flush_and_wait, retire_log};
use crate::engine::Engine;
use crate::mem::atomic::yield_now;
use crate::mem::epoch::Moment;
use crate::vfs::fs::PersistenceLevel;

/// Threads that flush while a database with many partitions closes.
const CLOSING_THREADS_MAX: usize = 8;
/// Closing looks so many times whether reads of pools have ended, and sleeps for 1 ms after each look behind the first
/// [`READS_SPUN`].
const READS_WAITED: usize = 10_000;
const READS_SPUN: usize = 100;

/// Held by every [`Database`](crate::Database), [`Partition`](crate::Partition), [`Snapshot`](crate::Snapshot) and
/// iterator; dropping the last one closes the database as `close` does, with failures told to the listener.
pub(crate) struct Handle {
    pub(crate) shared: Arc<Shared>,
    threads: Mutex<Threads>,
    closed: AtomicBool,
}

impl Handle {
    pub(crate) fn new(shared: Arc<Shared>, threads: Threads) -> Arc<Handle> {
        Arc::new(Handle { shared, threads: Mutex::new(threads), closed: AtomicBool::new(false) })
    }

    /// Stops the workers, flushes everything, leaves nothing to replay, and gives the directory free.
    ///
    /// The directory is given free also when an error is returned: what was acknowledged is then in the log.
    ///
    /// In a forked child nothing is done, and `Closed` is returned.
    pub(crate) fn close(&self) -> Result<()> {
        self.shared.check_process()?;
        self.shared.check_outside()?;
        if self.closed.swap(true, Ordering::AcqRel) { Ok(()) } else { self.close_first(false) }
    }

    /// Closes, as the first one to do so. With `tell` the listener gets the error, because no caller does.
    fn close_first(&self, tell: bool) -> Result<()> {
        let shared = &self.shared;
        // Most of the work is done while writers may still write; what they add after it is little.
        let mut flushed = if shared.writer.is_some() { self.flush_all() } else { Ok(()) };
        if let Some(writer) = &shared.writer {
            writer.committer.close();
            flushed = flushed.and_then(|()| self.flush_all());
        }
        shared.end_work();
        let Threads { workers, listener } = std::mem::take(&mut *lock(&self.threads));
        for thread in workers {
            // The last handle may be dropped on a worker (by a comparator); it ends by itself when it sees `closing`.
            if !thread.is_current() && !thread.join() {
                shared.poison.set(Error::new(ErrorKind::Poisoned, "a worker panicked"));
            }
        }
        if shared.writer.is_some() {
            // Nobody works any more. Who lets go of a table from now on leaves its file to the next open.
            for tree in shared.catalog.all().iter().filter_map(|p| p.lsm_if_built()) {
                tree.give_up_paused();
                if tree.first_unflushed().is_none() {
                    tree.give_up_early();
                }
            }
            shared.graveyard().close();
        }
        let pools: Vec<_> = shared.catalog.all().iter().filter_map(|p| p.pool_if_built().cloned()).collect();
        if shared.writer.is_some() {
            // Before the directory is given free, however this ends: another process may open the files then.
            pools.iter().for_each(|pool| pool.end_changes());
            if pools.iter().any(|pool| pool.level() > PersistenceLevel::Logged) {
                self.wait_for_reads();
            }
        }
        let finished = flushed.and_then(|()| self.finish_log());
        if finished.is_ok() && shared.writer.is_some() {
            // The log says where numbers go on now.
            pools.iter().for_each(|pool| pool.close());
        }
        if let Some(writer) = &shared.writer {
            writer.wal.end();
        }
        shared.catalog.all().iter().for_each(|partition| partition.mark_closed());
        *lock(&shared.lock) = None;
        if let Err(error) = &finished
            && tell
        {
            shared.tell(&Event::BackgroundError { error: error.clone() });
        }
        // Behind the lock on the directory: a listener may open it again.
        shared.tell(&Event::Closed);
        shared.poison.events().end();
        // A listener that closes runs on that thread, which delivers what waits when the listener returns.
        let delivered = listener.is_none_or(|thread| thread.is_current() || thread.join());
        shared.poison.heard(delivered && shared.poison.events().end_of_call());
        finished
    }

    /// Waits until the reads that are inside a pool have ended, because another process may write to its file once the
    /// directory is free. A read takes microseconds, unless a comparator waits for something; a read that outlasts the
    /// wait, or that called `close` itself from its comparator, finds the database closed when it has copied its value.
    fn wait_for_reads(&self) {
        let (moment, done) = (Moment::now(), &self.shared.done);
        for looked in 0..READS_WAITED {
            if moment.passed_by_others() {
                return;
            }
            match looked < READS_SPUN {
                true => yield_now(),
                false => done.wait(done.count(), 1),
            }
        }
    }

    /// A flush waits for the device several times. With many partitions several threads share the waiting, because the
    /// file system writes what they sync at the same time together; by hand there is one, so that tests are
    /// deterministic.
    fn flush_all(&self) -> Result<()> {
        let shared = &self.shared;
        shared.poison.check()?;
        // A partition whose comparator never came keeps its records in the log.
        let is_dirty = |p: &Arc<PartitionState>| p.tree_if_built().is_some() && p.first_unflushed().is_some();
        let dirty: Vec<_> = shared.catalog.all().into_iter().filter(is_dirty).collect();
        let threads = if shared.settings.workers == 0 { 1 } else { dirty.len().min(CLOSING_THREADS_MAX) };
        let queue = Arc::new(Mutex::new(dirty));
        let drain = |shared: &Shared, queue: &Mutex<Vec<Arc<PartitionState>>>| {
            while let Some(partition) = { lock(queue).pop() } {
                let flushed = flush_and_wait(shared, &partition);
                // Of a partition that is deleted meanwhile nothing is flushed any more.
                flushed.or_else(|error| if partition.is_deleted() { shared.poison.check() } else { Err(error) })?;
            }
            Ok(())
        };
        let failed: Arc<Mutex<Result<()>>> = Arc::new(Mutex::new(Ok(())));
        let mut helpers = Vec::new();
        for i in 1..threads {
            let (shared, queue, failed) = (Arc::clone(shared), Arc::clone(&queue), Arc::clone(&failed));
            let body = move || {
                if let Err(error) = drain(&shared, &queue) {
                    *lock(&failed) = Err(error);
                }
            };
            // Without another thread this one does it all.
            helpers.extend(self.shared.env.spawn(&format!("azekura-close-{i}"), Box::new(body)));
        }
        let mut result = drain(shared, &queue);
        for helper in helpers {
            if !helper.join() {
                result = Err(shared.poison.set(Error::new(ErrorKind::Poisoned, "a flush panicked")));
            }
        }
        result.and_then(|()| lock(&failed).clone())
    }

    fn finish_log(&self) -> Result<()> {
        let shared = &self.shared;
        let Some(writer) = &shared.writer else { return Ok(()) };
        // What is in tables leaves the log, the newest segment too: a database at rest is its tables and a short log.
        shared.with_reserve(Need::Flush, || writer.committer.close_gap())?;
        shared.with_reserve(Need::Flush, || writer.wal.seal())?;
        writer.wal.sync(shared.visible.get(), false)?;
        shared.with_reserve(Need::Flush, || retire_log(shared))?;
        writer.wal.release_space();
        let end = writer.wal.segments().last().map(|segment| segment.epoch);
        if let Some(epoch) = end {
            let edits = [Edit::LogEnd { epoch, seqno: shared.visible.get() }];
            shared.with_reserve(Need::Flush, || writer.metadata.commit(&edits))?;
        }
        shared.fill_reserve();
        writer.reserve.shrink(writer.metadata.manifest_bytes());
        writer.metadata.sync()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.shared.is_forked() {
            // Never dropped: the threads exist in the parent only, and locks may be held by them for ever.
            std::mem::forget(Arc::clone(&self.shared));
            let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
            return std::mem::forget(std::mem::take(threads));
        }
        if *self.closed.get_mut() {
            return;
        }
        let threads = self.threads.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Without workers it is work on another database: other threads that work on this one hold a handle meanwhile.
        if threads.workers.is_empty() || !is_at_work() {
            let _told = self.close_first(true);
            return;
        }
        // Closing waits for work of this database, which may wait for the work that this thread is in.
        let threads = std::mem::take(threads);
        let (shared, closed) = (Arc::clone(&self.shared), AtomicBool::new(true));
        let later = Handle { shared, threads: Mutex::new(threads), closed };
        *lock(&self.shared.left_to_close) = Some(Box::new(move || _ = later.close_first(true)));
        self.shared.work.ring();
    }
}

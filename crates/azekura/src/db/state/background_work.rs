//! Background work of a database: the work that is running, the signals between workers and the threads that wait for
//! them, and the end of the work when the database closes.
//!
//! Closing has two phases. First the partitions are flushed ([`begin_flushing_to_close`]): work still begins, and the
//! workers rest, because each of them looks for tasks in all partitions. Then no work begins any more
//! ([`stop_and_wait`]), and the workers end.
//!
//! [`begin_flushing_to_close`]: BackgroundWork::begin_flushing_to_close
//! [`stop_and_wait`]: BackgroundWork::stop_and_wait

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex};

use crate::base::sync::{WakeSignal, lock};
use crate::db::state::work_tracker::{WorkGuard, WorkTracker};

/// A worker checks after this many milliseconds without a signal whether there is work.
const WORK_WAIT_MS: u64 = 1_000;

/// Closes a database.
type CloseFn = Box<dyn FnOnce() + Send>;

/// What a worker does next.
pub(crate) enum WorkerStep {
    /// It looks for a task. `seen` is the [generation](BackgroundWork::work_generation) to wait past if there is none.
    FindTask { seen: u64 },
    /// It closes the database, because the last handle was dropped inside work.
    Close(CloseFn),
    /// It ends, because the database closes.
    End,
}

/// Running work, its signals, and the state of closing. Thread safe.
pub(crate) struct BackgroundWork {
    /// Running work that changes files of the directory, in all threads. Closing waits for it.
    running: WorkTracker,
    /// Notified when there may be a new task.
    work_available: Arc<WakeSignal>,
    /// Notified when a task has ended.
    task_ended: WakeSignal,
    /// Notified when the database begins to close.
    close_requested: WakeSignal,
    is_closing: AtomicBool,
    is_flushing_to_close: AtomicBool,
    /// Closes the database if its last handle was dropped inside work. A worker calls it as soon as the worker is
    /// outside work.
    deferred_close: Mutex<Option<CloseFn>>,
}

impl BackgroundWork {
    pub(crate) fn new(work_available: Arc<WakeSignal>) -> BackgroundWork {
        BackgroundWork {
            running: WorkTracker::default(),
            work_available,
            task_ended: WakeSignal::default(),
            close_requested: WakeSignal::default(),
            is_closing: AtomicBool::new(false),
            is_flushing_to_close: AtomicBool::new(false),
            deferred_close: Mutex::new(None),
        }
    }

    /// Begins work; `None` once the database has stopped work.
    pub(crate) fn begin(&self) -> Option<WorkGuard<'_>> {
        self.running.begin()
    }

    /// Wakes all workers, because there may be a new task.
    pub(crate) fn wake_workers(&self) {
        self.work_available.notify_all();
    }

    /// Number of notifications of workers so far, also by parts of the database that have the signal. Read it before
    /// looking for a task.
    pub(crate) fn work_generation(&self) -> u64 {
        self.work_available.generation()
    }

    /// Waits until workers are woken after `seen`, at most `ms` milliseconds, or [`WORK_WAIT_MS`].
    pub(crate) fn wait_for_work(&self, seen: u64, ms: Option<u64>) {
        self.work_available.wait_past(seen, ms.unwrap_or(WORK_WAIT_MS).min(WORK_WAIT_MS));
    }

    /// Wakes all threads that wait for a task.
    pub(crate) fn notify_task_end(&self) {
        self.task_ended.notify_all();
    }

    /// Number of notifications that a task, a deletion or an ingest has ended, or that the database closes. Read it
    /// before the state that a task changes.
    pub(crate) fn task_end_generation(&self) -> u64 {
        self.task_ended.generation()
    }

    /// Waits until a task ends after `seen`, at most `ms` milliseconds.
    pub(crate) fn wait_for_task_end(&self, seen: u64, ms: u64) {
        self.task_ended.wait_past(seen, ms);
    }

    /// Chooses what a worker does next. Waits while the database is flushed to close it.
    pub(crate) fn next_worker_step(&self) -> WorkerStep {
        loop {
            if self.is_closing.load(Ordering::Acquire) {
                return WorkerStep::End;
            }
            let seen = self.work_generation();
            let close = lock(&self.deferred_close).take();
            if let Some(close) = close {
                return WorkerStep::Close(close);
            }
            if !self.is_flushing_to_close.load(Ordering::Acquire) {
                return WorkerStep::FindTask { seen };
            }
            self.wait_for_work(seen, None);
        }
    }

    /// Leaves closing to a worker, or to the thread of a follower, because the last handle was dropped inside work.
    pub(crate) fn defer_close(&self, close: CloseFn) {
        let earlier = lock(&self.deferred_close).replace(close);
        debug_assert!(earlier.is_none(), "a database has one last handle");
        self.wake_workers();
        self.close_requested.notify_all();
    }

    /// As [`next_worker_step`](Self::next_worker_step), for the thread of a follower. First waits `ms` milliseconds, or
    /// until the database closes or is to be closed.
    pub(crate) fn next_follower_step(&self, ms: u64) -> WorkerStep {
        let seen = self.close_requested.generation();
        if !self.is_closing.load(Ordering::Acquire) && lock(&self.deferred_close).is_none() {
            self.close_requested.wait_past(seen, ms);
        }
        self.next_worker_step()
    }

    /// The workers rest from now on, because closing flushes all partitions.
    pub(crate) fn begin_flushing_to_close(&self) {
        debug_assert!(!self.is_closing(), "the partitions are flushed before work stops");
        self.is_flushing_to_close.store(true, Ordering::Release);
    }

    pub(crate) fn is_flushing_to_close(&self) -> bool {
        self.is_flushing_to_close.load(Ordering::Relaxed)
    }

    /// Whether the database closes. A worker reads it with [`next_worker_step`](Self::next_worker_step).
    #[inline]
    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Relaxed)
    }

    /// Whether the database was open during all reads that ended before this call.
    #[inline]
    pub(crate) fn is_open_after_read(&self) -> bool {
        // The fence orders the data of the read before `is_closing`: if the read found a change made after the close,
        // then this load finds `is_closing` set.
        fence(Ordering::Acquire);
        !self.is_closing()
    }

    /// Waits at most `ms` milliseconds for the database to close; returns whether it closes.
    pub(crate) fn wait_for_closing(&self, ms: u64) -> bool {
        let seen = self.close_requested.generation();
        if !self.is_closing.load(Ordering::Acquire) {
            self.close_requested.wait_past(seen, ms);
        }
        self.is_closing.load(Ordering::Acquire)
    }

    /// Signals background threads and waiting writers to stop, and does not wait for them.
    pub(crate) fn begin_closing(&self) {
        self.is_closing.store(true, Ordering::Release);
        self.work_available.notify_all();
        self.task_ended.notify_all();
        self.close_requested.notify_all();
    }

    /// Prevents new work, and returns when all running work has ended.
    pub(crate) fn stop_and_wait(&self) {
        self.begin_closing();
        self.running.stop_and_wait();
        debug_assert!(self.begin().is_none(), "no work begins after it was stopped");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn background_work() -> BackgroundWork {
        BackgroundWork::new(Arc::default())
    }

    #[test]
    fn worker_ends_when_database_closes() {
        let background = background_work();
        background.wake_workers();
        assert!(matches!(background.next_worker_step(), WorkerStep::FindTask { seen: 1 }));
        assert!(!background.wait_for_closing(0) && background.is_open_after_read());
        background.begin_flushing_to_close();
        assert!(background.begin().is_some(), "flushes are work");
        background.stop_and_wait();
        assert!(background.begin().is_none());
        assert!(matches!(background.next_worker_step(), WorkerStep::End));
        assert!(background.wait_for_closing(60_000), "returns at once");
    }

    #[test]
    fn one_worker_gets_the_deferred_close() {
        let background = background_work();
        let closed = Arc::new(AtomicBool::new(false));
        let later = Arc::clone(&closed);
        background.defer_close(Box::new(move || later.store(true, Ordering::Relaxed)));
        let WorkerStep::Close(close) = background.next_worker_step() else { panic!("nothing closes the database") };
        assert!(matches!(background.next_worker_step(), WorkerStep::FindTask { seen: 1 }));
        close();
        assert!(closed.load(Ordering::Relaxed));
    }
}

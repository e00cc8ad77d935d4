//! Tracks running work on a database, which closing waits for.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Mutex;

use crate::base::sync::{WakeSignal, lock};

/// Counts running work. Thread safe.
///
/// A thread may begin work inside other work, and [`begin`](WorkTracker::begin) never waits. A read-write lock would
/// not do: while a closing thread waits for the write lock, a thread that takes a second read lock would wait for the
/// closing thread, which waits for its first read lock.
#[derive(Debug, Default)]
pub(crate) struct WorkTracker {
    state: Mutex<State>,
    all_done: WakeSignal,
}

#[derive(Debug, Default)]
struct State {
    running: usize,
    stopped: bool,
}

/// Marks work as running until dropped. Not `Send`, because the thread that began the work counts it.
#[derive(Debug)]
pub(crate) struct WorkGuard<'a>(&'a WorkTracker, PhantomData<*const ()>);

thread_local! {
    /// Running work and writes of the thread, on all databases of the process.
    static THREAD_WORK: Cell<usize> = const { Cell::new(0) };
}

/// Marks the calling thread as inside a write until dropped. A write may lead the group commit or hold locks of a pool
/// while it calls a comparator. Closing does not wait for it, so it costs no shared memory.
#[derive(Debug)]
pub(crate) struct WriteMark(PhantomData<*const ()>);

impl WriteMark {
    #[inline]
    pub(crate) fn new() -> WriteMark {
        THREAD_WORK.set(THREAD_WORK.get() + 1);
        WriteMark(PhantomData)
    }
}

impl Drop for WriteMark {
    fn drop(&mut self) {
        THREAD_WORK.set(THREAD_WORK.get() - 1);
    }
}

/// Returns whether the calling thread is inside work or a write on any database. Then a comparator has made the call,
/// or has dropped a handle, and the thread must not write or wait for work: it could wait for itself, or two threads
/// could wait for each other if the comparators of two databases call the other database.
#[inline]
pub(crate) fn is_at_work() -> bool {
    THREAD_WORK.get() > 0
}

impl WorkTracker {
    /// Begins work; `None` after [`stop_and_wait`](WorkTracker::stop_and_wait) was called.
    pub(crate) fn begin(&self) -> Option<WorkGuard<'_>> {
        let mut state = lock(&self.state);
        if state.stopped {
            return None;
        }
        state.running += 1;
        THREAD_WORK.set(THREAD_WORK.get() + 1);
        Some(WorkGuard(self, PhantomData))
    }

    /// Prevents new work, and returns when all running work has ended. The calling thread must not be inside work.
    pub(crate) fn stop_and_wait(&self) {
        lock(&self.state).stopped = true;
        loop {
            let seen = self.all_done.generation();
            if lock(&self.state).running == 0 {
                return;
            }
            self.all_done.wait_past(seen, 100);
        }
    }
}

impl Drop for WorkGuard<'_> {
    fn drop(&mut self) {
        THREAD_WORK.set(THREAD_WORK.get() - 1);
        let mut state = lock(&self.0.state);
        debug_assert!(state.running > 0, "work ends once");
        state.running -= 1;
        let is_last = state.stopped && state.running == 0;
        drop(state);
        if is_last {
            self.0.all_done.notify_all();
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the test uses scoped threads, which `Env` does not offer")]
mod tests {
    use super::*;

    /// Regression: `checkpoint` had begun work and waited for the DDL lock. `open_partition` had that lock and began
    /// work. `close` waited for the work of `checkpoint`. With a read-write lock, `open_partition` waited for `close`.
    #[test]
    fn work_is_refused_while_stop_waits() {
        let tracker = WorkTracker::default();
        let first = tracker.begin().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| tracker.stop_and_wait());
            while !lock(&tracker.state).stopped {
                std::thread::yield_now();
            }
            assert!(tracker.begin().is_none(), "work begins after stop");
            drop(first);
        });
        assert_eq!(lock(&tracker.state).running, 0);
    }

    #[test]
    fn work_belongs_to_the_thread_that_began_it() {
        let (first, second) = (WorkTracker::default(), WorkTracker::default());
        let (outer, inner) = (first.begin().unwrap(), second.begin().unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(!is_at_work()));
        });
        drop(outer);
        assert!(is_at_work());
        second.state.lock().unwrap().stopped = true;
        assert!(second.begin().is_none());
        drop(inner);
        assert!(!is_at_work());
    }
}

//! Work that changes files, which closing waits for.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Mutex;

use crate::base::sync::{WakeSignal, lock};

/// Counts the work under way. Thread safe. A thread may begin work while it has work under way, and never waits here:
/// with a lock for readers and a writer, a thread that wanted to begin work while another waited to close waited for
/// both.
#[derive(Debug, Default)]
pub(crate) struct WorkTracker {
    state: Mutex<State>,
    all_done: WakeSignal,
}

#[derive(Debug, Default)]
struct State {
    under_way: usize,
    stopped: bool,
}

/// Work under way, until dropped. It stays on the thread that began it.
#[derive(Debug)]
pub(crate) struct WorkGuard<'a>(&'a WorkTracker, PhantomData<*const ()>);

thread_local! {
    /// Work that the thread has under way, on all databases of the process.
    static OWN: Cell<usize> = const { Cell::new(0) };
}

/// Whether the calling thread has work under way on any database: a comparator has called, or dropped a handle. It must
/// not wait for work there. Of the same database it would wait for itself; and where the comparators of two databases
/// called each other, the work of each waited for that of the other.
pub(crate) fn is_at_work() -> bool {
    OWN.get() > 0
}

impl WorkTracker {
    /// Begins work; `None` once it has ended.
    pub(crate) fn begin(&self) -> Option<WorkGuard<'_>> {
        let mut state = lock(&self.state);
        if state.stopped {
            return None;
        }
        state.under_way += 1;
        OWN.set(OWN.get() + 1);
        Some(WorkGuard(self, PhantomData))
    }

    /// Lets no more work begin, and returns when all that is under way has ended. The caller has none under way.
    pub(crate) fn stop_and_wait(&self) {
        lock(&self.state).stopped = true;
        loop {
            let seen = self.all_done.generation();
            if lock(&self.state).under_way == 0 {
                return;
            }
            self.all_done.wait_past(seen, 100);
        }
    }
}

impl Drop for WorkGuard<'_> {
    fn drop(&mut self) {
        OWN.set(OWN.get() - 1);
        let mut state = lock(&self.0.state);
        state.under_way -= 1;
        let is_last = state.stopped && state.under_way == 0;
        drop(state);
        if is_last {
            self.0.all_done.notify_all();
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the test races threads, and in vfs none are scoped")]
mod tests {
    use super::*;

    /// `checkpoint` had work under way and waited for the lock on names; `open_partition` held that and began work;
    /// `close` waited for the first. With a lock for readers and a writer the second one waited for the third.
    #[test]
    fn work_is_refused_while_stop_waits() {
        let shifts = WorkTracker::default();
        let first = shifts.begin().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| shifts.stop_and_wait());
            while !lock(&shifts.state).stopped {
                std::thread::yield_now();
            }
            assert!(shifts.begin().is_none(), "and it does not wait");
            drop(first);
        });
        assert_eq!(lock(&shifts.state).under_way, 0);
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

//! Work that changes files, which closing waits for.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::sync::{Bell, lock};

/// Counts the work under way, for each thread. Thread safe. A thread may begin work while it has work under way, and
/// never waits here: with a lock for readers and a writer, a thread that wanted to begin work while another waited to
/// close waited for both.
#[derive(Debug, Default)]
pub(crate) struct Shifts {
    state: Mutex<State>,
    left: Bell,
}

#[derive(Debug, Default)]
struct State {
    /// The thread of each piece of work under way.
    threads: Vec<u64>,
    ended: bool,
}

/// Work under way, until dropped.
#[derive(Debug)]
pub(crate) struct Shift<'a>(&'a Shifts, u64);

/// A number that no other thread has. It can be asked for while the thread's destructors run, because it has none.
fn own_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static OWN: Cell<u64> = const { Cell::new(0) };
    }
    OWN.with(|own| {
        if own.get() == 0 {
            own.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        own.get()
    })
}

impl Shifts {
    /// Begins work; `None` once it has ended.
    pub(crate) fn begin(&self) -> Option<Shift<'_>> {
        let mut state = lock(&self.state);
        if state.ended {
            return None;
        }
        let own = own_number();
        state.threads.push(own);
        Some(Shift(self, own))
    }

    /// Whether the calling thread has work under way, inside of which it must not wait for the end of that work.
    pub(crate) fn is_at_work(&self) -> bool {
        lock(&self.state).threads.contains(&own_number())
    }

    /// Lets no more work begin, and returns when all that is under way has ended. The caller has none under way.
    pub(crate) fn end(&self) {
        lock(&self.state).ended = true;
        loop {
            let seen = self.left.count();
            if lock(&self.state).threads.is_empty() {
                return;
            }
            self.left.wait(seen, 100);
        }
    }
}

impl Drop for Shift<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        if let Some(at) = state.threads.iter().position(|thread| *thread == self.1) {
            state.threads.swap_remove(at);
        }
        let is_last = state.ended && state.threads.is_empty();
        drop(state);
        if is_last {
            self.0.left.ring();
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
    fn work_is_refused_while_the_end_waits() {
        let shifts = Shifts::default();
        let first = shifts.begin().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| shifts.end());
            while !lock(&shifts.state).ended {
                std::thread::yield_now();
            }
            assert!(shifts.begin().is_none(), "and it does not wait");
            drop(first);
        });
        assert!(lock(&shifts.state).threads.is_empty());
    }

    #[test]
    fn work_belongs_to_the_thread_that_began_it() {
        let shifts = Shifts::default();
        let (outer, inner) = (shifts.begin().unwrap(), shifts.begin().unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(!shifts.is_at_work()));
        });
        drop(outer);
        assert!(shifts.is_at_work());
        drop(inner);
        assert!(!shifts.is_at_work());
    }
}

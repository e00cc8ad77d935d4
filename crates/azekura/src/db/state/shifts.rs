//! Work that changes files, which closing waits for.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::base::sync::Bell;

/// Counts the work under way. Thread safe. A thread may begin work while it has work under way, and never waits here:
/// with a lock for readers and a writer, a thread that wanted to begin work while another waited to close waited for
/// both.
#[derive(Debug, Default)]
pub(crate) struct Shifts {
    count: AtomicUsize,
    ended: AtomicBool,
    left: Bell,
}

/// Work under way, until dropped.
#[derive(Debug)]
pub(crate) struct Shift<'a>(&'a Shifts);

impl Shifts {
    /// Begins work; `None` once it has ended.
    pub(crate) fn begin(&self) -> Option<Shift<'_>> {
        // SeqCst, as in `end`: either this sees the end, or that sees this.
        self.count.fetch_add(1, Ordering::SeqCst);
        let shift = Shift(self);
        (!self.ended.load(Ordering::SeqCst)).then_some(shift)
    }

    /// Lets no more work begin, and returns when all that is under way has ended. The caller has none under way.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        loop {
            let seen = self.left.count();
            if self.count.load(Ordering::SeqCst) == 0 {
                return;
            }
            self.left.wait(seen, 100);
        }
    }
}

impl Drop for Shift<'_> {
    fn drop(&mut self) {
        if self.0.count.fetch_sub(1, Ordering::SeqCst) == 1 && self.0.ended.load(Ordering::SeqCst) {
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
            while !shifts.ended.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            assert!(shifts.begin().is_none(), "and it does not wait");
            drop(first);
        });
        assert_eq!(shifts.count.load(Ordering::SeqCst), 0);
    }
}

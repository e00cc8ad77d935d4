//! The locks of a tree.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Takes a lock also after a panic under it: what the tree's locks guard is replaced whole, never half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Room for one task at a time. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct TaskLock {
    held: Mutex<bool>,
    released: Condvar,
}

/// Holds a [`TaskLock`] until dropped, by a panic too.
#[derive(Debug)]
pub(crate) struct TaskLockGuard<'a>(&'a TaskLock);

impl TaskLock {
    pub(crate) fn is_held(&self) -> bool {
        *lock(&self.held)
    }

    /// Takes the slot; if it is busy, waits for it or gives up.
    pub(crate) fn acquire(&self, wait: bool) -> Option<TaskLockGuard<'_>> {
        let mut busy = lock(&self.held);
        while *busy {
            if !wait {
                return None;
            }
            busy = self.released.wait(busy).unwrap_or_else(PoisonError::into_inner);
        }
        *busy = true;
        Some(TaskLockGuard(self))
    }
}

impl Drop for TaskLockGuard<'_> {
    fn drop(&mut self) {
        *lock(&self.0.held) = false;
        self.0.released.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time() {
        let slot = TaskLock::default();
        let occupied = slot.acquire(false).unwrap();
        assert!(slot.is_held());
        assert!(slot.acquire(false).is_none());
        drop(occupied);
        assert!(slot.acquire(true).is_some());
        assert!(!slot.is_held());
    }
}

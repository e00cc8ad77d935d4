//! The locks of a tree.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Takes a lock, also after a panic under it: the locks of a tree protect values that are replaced completely.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A lock that one task at a time holds. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct TaskLock {
    held: Mutex<bool>,
    released: Condvar,
}

/// Holds a [`TaskLock`] until it is dropped, also by a panic.
#[derive(Debug)]
pub(crate) struct TaskLockGuard<'a>(&'a TaskLock);

impl TaskLock {
    pub(crate) fn is_held(&self) -> bool {
        *lock(&self.held)
    }

    /// Takes the lock. If another task holds it, waits for it, or returns `None` if `wait` is false.
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
        let task_lock = TaskLock::default();
        let guard = task_lock.acquire(false).unwrap();
        assert!(task_lock.is_held());
        assert!(task_lock.acquire(false).is_none());
        drop(guard);
        assert!(task_lock.acquire(true).is_some());
        assert!(!task_lock.is_held());
    }
}

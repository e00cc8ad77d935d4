//! The locks of a tree.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Takes a lock also after a panic under it: what the tree's locks guard is replaced whole, never half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Room for one task at a time. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    busy: Mutex<bool>,
    free: Condvar,
}

/// Holds a [`Slot`] until dropped, by a panic too.
#[derive(Debug)]
pub(crate) struct Occupied<'a>(&'a Slot);

impl Slot {
    pub(crate) fn is_busy(&self) -> bool {
        *lock(&self.busy)
    }

    /// Takes the slot; if it is busy, waits for it or gives up.
    pub(crate) fn occupy(&self, wait: bool) -> Option<Occupied<'_>> {
        let mut busy = lock(&self.busy);
        while *busy {
            if !wait {
                return None;
            }
            busy = self.free.wait(busy).unwrap_or_else(PoisonError::into_inner);
        }
        *busy = true;
        Some(Occupied(self))
    }
}

impl Drop for Occupied<'_> {
    fn drop(&mut self) {
        *lock(&self.0.busy) = false;
        self.0.free.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time() {
        let slot = Slot::default();
        let occupied = slot.occupy(false).unwrap();
        assert!(slot.is_busy());
        assert!(slot.occupy(false).is_none());
        drop(occupied);
        assert!(slot.occupy(true).is_some());
        assert!(!slot.is_busy());
    }
}

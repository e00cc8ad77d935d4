//! Locks that ignore poisoning by a panic, a signal that wakes waiting threads, and per-thread stripes.
//!
//! A user's comparator or listener may panic while the engine holds one of its locks. The panic is caught at the
//! thread's boundary and poisons the *database*. The data under the lock is consistent at every point at which user
//! code runs, so the lock stays usable and no later caller panics.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{
    Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError, TryLockResult,
};

pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn read<T: ?Sized>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn write<T: ?Sized>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Locks `mutex` if no thread holds it, also after a panic of a thread that held it.
#[expect(clippy::disallowed_methods, reason = "all other code calls this function")]
pub(crate) fn try_lock<T: ?Sized>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    unless_held(mutex.try_lock())
}

/// As [`try_lock`], for a shared lock.
#[expect(clippy::disallowed_methods, reason = "all other code calls this function")]
pub(crate) fn try_read<T: ?Sized>(lock: &RwLock<T>) -> Option<RwLockReadGuard<'_, T>> {
    unless_held(lock.try_read())
}

fn unless_held<G>(tried: TryLockResult<G>) -> Option<G> {
    match tried {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// A value that many threads write, on two cache lines of its own, because processors fetch cache lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct CachePadded<T>(pub(crate) T);

/// Number of stripes for per-thread state (counters, allocator caches). Each thread uses one.
pub(crate) const STRIPE_COUNT: usize = 8;

static NEXT_STRIPE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The stripe of this thread; [`STRIPE_COUNT`] until it is chosen.
    static THREAD_STRIPE: Cell<usize> = const { Cell::new(STRIPE_COUNT) };
}

/// Index of this thread's stripe, below [`STRIPE_COUNT`]. Threads choose stripes in rotation. On a platform that
/// destroys thread-locals without destructors too, a thread that is ending uses stripe 0.
#[inline]
pub(crate) fn thread_stripe() -> usize {
    let own = THREAD_STRIPE.try_with(|own| {
        if own.get() == STRIPE_COUNT {
            own.set(NEXT_STRIPE.fetch_add(1, Ordering::Relaxed) % STRIPE_COUNT);
        }
        own.get()
    });
    own.unwrap_or(0)
}

/// Wakes workers, and threads that wait for workers. Thread safe. No other lock is taken under its lock, so it may be
/// notified at any place.
#[derive(Debug, Default)]
pub(crate) struct WakeSignal {
    generation: Mutex<u64>,
    condvar: Condvar,
}

impl WakeSignal {
    pub(crate) fn notify_all(&self) {
        *lock(&self.generation) += 1;
        self.condvar.notify_all();
    }

    /// Wakes one waiting thread.
    pub(crate) fn notify_one(&self) {
        *lock(&self.generation) += 1;
        self.condvar.notify_one();
    }

    /// Number of notifications so far. Read it before the state that a notification announces.
    pub(crate) fn generation(&self) -> u64 {
        *lock(&self.generation)
    }

    /// Waits for a notification after `seen`, at most `ms` milliseconds.
    #[expect(
        clippy::disallowed_methods,
        reason = "a timeout on a condition variable is a wait, and the clock is not read"
    )]
    pub(crate) fn wait_past(&self, seen: u64, ms: u64) {
        let generation = lock(&self.generation);
        let timeout = std::time::Duration::from_millis(ms);
        drop(self.condvar.wait_timeout_while(generation, timeout, |generation| *generation == seen));
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the test uses scoped threads, which `Env` does not offer")]
mod tests {
    use super::*;

    /// Regression: after a panic of a thread that had locked a mutex, every `Mutex::try_lock` fails. Callers assumed
    /// forever that another thread had locked it.
    #[test]
    fn try_lock_succeeds_after_a_holder_panicked() {
        let (mutex, shared) = (Mutex::new(1), RwLock::new(2));
        let panicked = std::thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _held = (lock(&mutex), write(&shared));
                panic!("while it holds both");
            });
            holder.join()
        });
        assert!(panicked.is_err() && mutex.is_poisoned() && shared.is_poisoned());
        assert_eq!((try_lock(&mutex).as_deref(), try_read(&shared).as_deref()), (Some(&1), Some(&2)));
        let _held = (lock(&mutex), write(&shared));
        assert!(try_lock(&mutex).is_none() && try_read(&shared).is_none());
    }
}

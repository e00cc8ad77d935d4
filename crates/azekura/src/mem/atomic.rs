//! Synchronization primitives: atomics, fences, locks, and the hints `spin_loop` and `yield_now`.
//!
//! They are re-exports of the standard library. In unit tests that are built with `--cfg azekura_explore`,
//! they are those of a schedule explorer. The explorer chooses at each operation which thread runs next,
//! so that a test runs thousands of schedules and a failing schedule can be replayed. See `explorer.rs`, and decision
//! record 0012 for the limits of the explorer.
//!
//! Folders with lock-free code use this module. `Arc`, `Weak` and `OnceLock` are always those of the standard library:
//! each of their operations is atomic, and the explorer runs it together with the operation before it. `region.rs` says
//! why the words of regions are, too.

#[cfg(not(all(test, azekura_explore)))]
mod chosen {
    pub(crate) use std::hint::spin_loop;
    pub(crate) use std::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
    };
    pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
    pub(crate) use std::thread::yield_now;
    pub(crate) use std::thread_local;

    /// Defines statics of the process. The explorer initializes them again for every schedule.
    macro_rules! process_wide {
        ($($(#[$doc:meta])* static $name:ident: $type:ty = $first:expr;)*) => {
            $($(#[$doc])* static $name: $type = $first;)*
        };
    }
    pub(crate) use process_wide;
}

#[cfg(all(test, azekura_explore))]
mod chosen {
    pub(crate) use shuttle::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
    };
    pub(crate) use shuttle::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
    pub(crate) use shuttle::thread::yield_now;
    pub(crate) use shuttle::thread_local;

    /// The explorer may switch threads here: a spinning thread must see the steps of the other threads.
    pub(crate) fn spin_loop() {
        AtomicBool::new(false).load(Ordering::SeqCst);
    }

    macro_rules! process_wide {
        ($($(#[$doc:meta])* static $name:ident: $type:ty = $first:expr;)*) => {
            shuttle::lazy_static! { $($(#[$doc])* static ref $name: $type = $first;)* }
        };
    }
    pub(crate) use process_wide;
}

pub(crate) use chosen::*;

/// Locks `mutex`, also after a panic of a thread that held it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks `mutex` if no thread holds it, also after a panic of a thread that held it.
#[expect(clippy::disallowed_methods, reason = "code that the explorer runs calls this function")]
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Subtracts an amount that was added to `counter` before.
#[track_caller]
pub(crate) fn subtract_counted(counter: &AtomicU64, amount: u64) {
    let before = counter.fetch_sub(amount, Ordering::Relaxed);
    debug_assert!(before >= amount, "a counter includes each amount until it is subtracted");
}

/// Whether the explorer or Miri explores thread schedules. Then capacities and retry limits are small, so that a
/// scenario of a few records reaches rare states.
pub(crate) const SCHEDULE_EXPLORATION: bool = cfg!(any(azekura_explore, miri));

//! Locks that ignore poisoning by a panic, a signal that wakes waiting threads, per-thread stripes, and mapped
//! memory.
//!
//! A user's comparator or listener may panic while the engine holds one of its locks. The panic is caught at the
//! thread's boundary and poisons the *database*; the data under the lock is kept consistent by its owner at every point
//! where foreign code runs, so the lock itself stays usable and no later caller panics in turn.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn read<T: ?Sized>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn write<T: ?Sized>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// What many threads write and others shall not lose by: alone on two cache lines, because processors fetch lines in
/// pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct CachePadded<T>(pub(crate) T);

/// Things that threads should not share are there so often; each thread has one of them.
pub(crate) const STRIPE_COUNT: usize = 8;

static NEXT_STRIPE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// [`STRIPE_COUNT`] = not chosen yet.
    static THREAD_STRIPE: Cell<usize> = const { Cell::new(STRIPE_COUNT) };
}

/// The number of this thread's part, below [`STRIPE_COUNT`]. Threads take turns at choosing one. On a platform that
/// destroys thread-locals without destructors too, a thread that ends uses part 0.
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

/// A piece of memory as atomic words, the same ones for as long as it lives.
///
/// The memory of a mapped file. An implementation must return the same words at every call, because callers keep
/// them.
pub trait MappedMemory: Send + Sync + fmt::Debug {
    /// All of them. Those that stand behind the end of the file must not be touched.
    fn atomic_words(&self) -> &[AtomicU64];

    /// Whether what was flushed from the processor's caches survives power loss, so that nothing else is needed.
    fn survives_power_loss(&self) -> bool;
}

/// Wakes workers, and threads that wait for workers. Thread safe. No other lock is taken under its lock, so it may be
/// signalled from anywhere.
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

    /// Rings so far; take it before looking at the state that a ring announces.
    pub(crate) fn generation(&self) -> u64 {
        *lock(&self.generation)
    }

    /// Waits for a ring after `seen`, at most for `ms`.
    #[expect(
        clippy::disallowed_methods,
        reason = "a timeout on a condition variable is a wait, not a clock that anybody reads"
    )]
    pub(crate) fn wait_past(&self, seen: u64, ms: u64) {
        let rings = lock(&self.generation);
        let timeout = std::time::Duration::from_millis(ms);
        drop(self.condvar.wait_timeout_while(rings, timeout, |rings| *rings == seen));
    }
}

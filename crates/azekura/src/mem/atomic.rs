//! What threads meet at: atomics, fences, locks, and the turn that a spinning thread gives away.
//!
//! They are the standard library's, by other names. Under `--cfg azekura_explore`, which only `cargo test --lib` can be
//! built with, they are those of a schedule explorer: it decides at each of them which thread goes on, so that a test
//! sees thousands of schedules, and a failure can be played again. See `explorer.rs`, and decision record 0012 for what
//! it does not see.
//!
//! Here for the folders that have code without locks. Counts (`Arc`, `Weak`), `OnceLock` and the lock of
//! `dirty_pages.rs` stay the standard library's: each step of theirs is whole, and belongs to the step before it.

#[cfg(not(azekura_explore))]
mod chosen {
    pub(crate) use std::hint::spin_loop;
    pub(crate) use std::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
    };
    pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
    pub(crate) use std::thread::yield_now;
    pub(crate) use std::thread_local;

    /// Statics of the process; the explorer has them begin anew with every schedule.
    macro_rules! process_wide {
        ($($(#[$doc:meta])* static $name:ident: $type:ty = $first:expr;)*) => {
            $($(#[$doc])* static $name: $type = $first;)*
        };
    }
    pub(crate) use process_wide;
}

#[cfg(azekura_explore)]
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

/// Whether schedules are explored, be it by Miri: then what fills up is small and patience is short, so that a scenario
/// of a few records comes to what is rare.
pub(crate) const SCHEDULE_EXPLORATION: bool = cfg!(any(azekura_explore, miri));

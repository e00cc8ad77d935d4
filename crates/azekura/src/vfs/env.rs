//! Time, randomness and threads.

use std::time::Duration;

use crate::base::Result;

/// A running thread.
pub trait Thread: Send + Sync {
    /// Waits for its end; true if it ended without a panic. Called at most once.
    fn join(self: Box<Self>) -> bool;

    /// Whether the caller runs on this thread.
    fn is_current(&self) -> bool;
}

/// The world beside files. Thread safe.
pub trait Env: Send + Sync {
    /// The wall clock, in milliseconds since 1970. May jump.
    fn now_ms(&self) -> u64;

    /// A clock that never goes back, in nanoseconds since some start.
    fn monotonic_ns(&self) -> u64;

    /// Fills `out` with random bytes, unpredictable in production.
    fn random(&self, out: &mut [u8]);

    /// Starts a thread.
    ///
    /// # Errors
    /// `Io` if the system has none to give.
    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Thread>>;

    /// Waits.
    fn sleep(&self, duration: Duration);
}

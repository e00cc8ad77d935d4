//! A deterministic environment.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::base::Result;
use crate::testing::seeded_rng::SeededRng;
use crate::vfs::env::{Env, Thread, spawn_thread};

/// Start of [`TestEnv`]'s wall clock in milliseconds since 1970: November 2023.
const TEST_START_MS: i64 = 1_700_000_000_000;

/// A virtual sleep up to this length only yields to other threads. A longer one also sleeps for [`REAL_SLEEP`], so
/// that a polling thread does not use a whole core.
const REAL_SLEEP_THRESHOLD: Duration = Duration::from_micros(100);
const REAL_SLEEP: Duration = Duration::from_micros(50);

/// An environment for tests: random bytes from a seed, clocks that only [`Env::sleep`] and [`TestEnv::advance`] move,
/// and real threads. A clone is the same environment.
///
/// ```
/// use azekura::fs::Env;
/// use azekura::testing::TestEnv;
/// use std::time::Duration;
/// let env = TestEnv::new(7);
/// let before = env.now_ms();
/// env.sleep(Duration::from_secs(3600)); // returns at once
/// assert_eq!(env.now_ms() - before, 3_600_000);
/// ```
#[derive(Clone)]
pub struct TestEnv(Arc<TestEnvState>);

struct TestEnvState {
    elapsed_ns: AtomicU64,
    wall_ms: AtomicI64,
    runs_backwards: AtomicBool,
    process: AtomicU64,
    rng: Mutex<SeededRng>,
}

impl TestEnv {
    /// An environment whose random bytes `seed` determines.
    pub fn new(seed: u64) -> TestEnv {
        TestEnv(Arc::new(TestEnvState {
            elapsed_ns: AtomicU64::new(0),
            wall_ms: AtomicI64::new(TEST_START_MS),
            runs_backwards: AtomicBool::new(false),
            process: AtomicU64::new(1),
            rng: Mutex::new(SeededRng::new(seed)),
        }))
    }

    /// Advances both clocks.
    pub fn advance(&self, duration: Duration) {
        self.0.elapsed_ns.fetch_add(duration.as_nanos() as u64, Ordering::SeqCst);
    }

    /// Lets the clocks go back from now on: each reading is 1 ms before the one before it.
    pub fn run_backwards(&self) {
        self.0.elapsed_ns.fetch_add(1 << 50, Ordering::SeqCst); // enough for a thousand million readings
        self.0.runs_backwards.store(true, Ordering::SeqCst);
    }

    /// Sets the [token](Env::process_token) of the process that the callers belong to from now on; 1 at first. So a
    /// test makes the calls of a forked child.
    pub fn set_process(&self, token: u64) {
        self.0.process.store(token, Ordering::SeqCst);
    }

    /// Changes the wall clock by `ms` milliseconds, which may be negative. The monotonic clock does not change.
    pub fn jump_wall_clock(&self, ms: i64) {
        self.0.wall_ms.fetch_add(ms, Ordering::SeqCst);
    }
}

impl Env for TestEnv {
    fn now_ms(&self) -> u64 {
        let elapsed = (self.monotonic_ns() / 1_000_000) as i64;
        self.0.wall_ms.load(Ordering::SeqCst).saturating_add(elapsed).max(0) as u64
    }

    fn monotonic_ns(&self) -> u64 {
        let step = if self.0.runs_backwards.load(Ordering::SeqCst) { 1_000_000 } else { 0 };
        self.0.elapsed_ns.fetch_sub(step, Ordering::SeqCst)
    }

    fn random(&self, out: &mut [u8]) {
        let mut rng = self.0.rng.lock().unwrap_or_else(PoisonError::into_inner);
        for chunk in out.chunks_mut(8) {
            chunk.copy_from_slice(&rng.next_u64().to_le_bytes()[..chunk.len()]);
        }
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce() + Send>) -> Result<Box<dyn Thread>> {
        spawn_thread(name, body)
    }

    fn process_token(&self) -> u64 {
        self.0.process.load(Ordering::SeqCst)
    }

    fn sleep(&self, duration: Duration) {
        self.advance(duration);
        if duration > REAL_SLEEP_THRESHOLD {
            thread::sleep(REAL_SLEEP);
        } else {
            thread::yield_now();
        }
    }
}

impl fmt::Debug for TestEnv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestEnv").field("now_ms", &self.now_ms()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_env_repeats_and_its_clock_is_virtual() {
        let draw = |seed| {
            let mut bytes = [0; 13];
            TestEnv::new(seed).random(&mut bytes);
            bytes
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        let env = TestEnv::new(1);
        let same = env.clone();
        env.sleep(Duration::from_secs(1));
        same.advance(Duration::from_secs(2));
        assert_eq!((env.monotonic_ns(), env.now_ms()), (3_000_000_000, TEST_START_MS as u64 + 3_000));
        env.jump_wall_clock(-5_000);
        assert_eq!((same.monotonic_ns(), same.now_ms()), (3_000_000_000, TEST_START_MS as u64 - 2_000));
        env.jump_wall_clock(i64::MIN / 2);
        assert_eq!(env.now_ms(), 0);
    }
}

//! Runs a scenario of a few threads under many schedules.
//!
//! `RUSTFLAGS="--cfg azekura_explore" cargo test -p azekura --lib schedules` explores: whatever is reached through
//! `atomic.rs` is a place where another thread may go on, and the explorer chooses. Half of the
//! schedules hold one thread back and change their mind twice, the other half choose anew at each step. One seed gives
//! the same schedules, and a schedule that fails is printed. Set in the environment:
//! - `AZEKURA_SCHEDULES`: how many schedules of each scenario;
//! - `AZEKURA_SEED`: another seed, other schedules;
//! - `AZEKURA_SCHEDULE`: plays the one that was printed again, and no other; name the one test that printed it.
//!
//! Built as usual the scenarios run with threads of the system a few times: then Miri can look at them, which knows the
//! orders of memory that the explorer does not.

#[cfg(not(azekura_explore))]
#[expect(clippy::disallowed_methods, reason = "scenarios are about threads, and in vfs none can be joined")]
mod chosen {
    use std::thread::JoinHandle;
    pub(crate) use std::thread::yield_now as turn;

    pub(crate) fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        std::thread::spawn(work)
    }

    pub(crate) fn explore(scenario: fn()) {
        for _ in 0..if cfg!(miri) { 1 } else { 100 } {
            scenario();
        }
    }
}

#[cfg(azekura_explore)]
#[expect(clippy::disallowed_methods, reason = "whoever runs the tests says by the environment what to explore")]
mod chosen {
    use std::sync::Arc;

    use shuttle::scheduler::{PctScheduler, RandomScheduler, ReplayScheduler};
    pub(crate) use shuttle::thread::spawn;
    use shuttle::{Config, MaxSteps, Runner};

    pub(crate) use crate::mem::atomic::spin_loop as turn;
    use crate::mem::atomic::{AtomicU64, Ordering};

    /// Schedules of the first kind change their mind once less than this.
    const DEPTH: usize = 3;

    fn number(name: &str, default: u64) -> u64 {
        let set = std::env::var(name).ok();
        set.map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is a number, not `{text}`")))
    }

    pub(crate) fn explore(scenario: fn()) {
        let mut config = Config::new();
        config.stack_size = 1 << 18;
        config.max_steps = MaxSteps::FailAfter(100_000);
        config.silence_warnings = true;
        config.ungraceful_shutdown_config.immediately_return_on_panic = true;
        if let Ok(schedule) = std::env::var("AZEKURA_SCHEDULE") {
            Runner::new(ReplayScheduler::new_from_encoded(schedule.trim()), config).run(scenario);
            return;
        }
        let (seed, half) = (number("AZEKURA_SEED", 1), number("AZEKURA_SCHEDULES", 2_000).div_ceil(2) as usize);
        Runner::new(PctScheduler::new_from_seed(seed, DEPTH, half), config.clone()).run(scenario);
        Runner::new(RandomScheduler::new_from_seed(seed, half), config).run(scenario);
    }

    /// Two threads that count without an atomic addition: an explorer that does not find the schedule with a lost
    /// count finds no fault at all.
    #[test]
    #[should_panic(expected = "an addition was lost")]
    fn schedules_that_lose_an_addition_are_found() {
        explore(|| {
            let sum = Arc::new(AtomicU64::new(0));
            let add = |sum: &AtomicU64| sum.store(sum.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
            let other = spawn({
                let sum = Arc::clone(&sum);
                move || add(&sum)
            });
            add(&sum);
            other.join().unwrap();
            assert_eq!(sum.load(Ordering::SeqCst), 2, "an addition was lost");
        });
    }
}

pub(crate) use chosen::*;

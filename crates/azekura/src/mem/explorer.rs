//! Runs a scenario of a few threads under many thread schedules.
//!
//! `RUSTFLAGS="--cfg azekura_explore" cargo test -p azekura --lib schedules` explores: each operation on a primitive
//! of `atomic.rs` is a point where the explorer may switch threads. Half of the schedules run threads by priority and
//! change the priorities twice (PCT); the other half choose a thread at random at each step. A seed always results in
//! the same schedules, and a failing schedule is printed. Environment variables:
//! - `AZEKURA_SCHEDULES`: number of schedules of each scenario;
//! - `AZEKURA_SEED`: seed of the schedules;
//! - `AZEKURA_SCHEDULE`: a printed schedule; only this one is run. Select the one test that printed it.
//!
//! In other builds the scenarios run a few times with threads of the operating system. Then Miri can check them, with
//! the memory orderings that the explorer does not model.

#[cfg(not(azekura_explore))]
#[expect(clippy::disallowed_methods, reason = "scenarios join threads, which vfs does not provide")]
mod chosen {
    use std::thread::JoinHandle;
    pub(crate) use std::thread::yield_now as yield_point;

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
#[expect(clippy::disallowed_methods, reason = "environment variables select the schedules")]
mod chosen {
    use std::sync::Arc;

    use shuttle::scheduler::{PctScheduler, RandomScheduler, ReplayScheduler};
    pub(crate) use shuttle::thread::spawn;
    use shuttle::{Config, MaxSteps, Runner};

    pub(crate) use crate::mem::atomic::spin_loop as yield_point;
    use crate::mem::atomic::{AtomicU64, Ordering};

    /// Bug depth of the PCT schedules: each of them changes priorities `DEPTH - 1` times.
    const DEPTH: usize = 3;

    fn number(name: &str, default: u64) -> u64 {
        let set = std::env::var(name).ok();
        set.map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not `{text}`")))
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

    /// Two threads increment a number without an atomic addition. An explorer that does not find the schedule with a
    /// lost increment would find no bugs at all.
    #[test]
    #[should_panic(expected = "an increment was lost")]
    fn schedule_with_lost_increment_is_found() {
        explore(|| {
            let sum = Arc::new(AtomicU64::new(0));
            let add = |sum: &AtomicU64| sum.store(sum.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
            let other = spawn({
                let sum = Arc::clone(&sum);
                move || add(&sum)
            });
            add(&sum);
            other.join().unwrap();
            assert_eq!(sum.load(Ordering::SeqCst), 2, "an increment was lost");
        });
    }
}

pub(crate) use chosen::*;

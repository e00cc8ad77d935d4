//! How much writers are slowed: a function of how far maintenance is behind.
//!
//! Choosing is pure ([`delay_ns_per_kib`], [`must_wait`]); the acting is a short sleep that grows with the debt, so
//! that throughput bends instead of breaking off.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::engine::Pressure;

/// Sleeps shorter than this are saved up.
const SLEEP_MIN_NS: u64 = 200_000;
/// No single write is held up longer than this by pacing.
const SLEEP_MAX_NS: u64 = 100_000_000;

/// Where slowing begins and where it ends in waiting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Limits {
    /// Sealed memtables of one tree from which on writers are slowed.
    pub(crate) sealed_slow: usize,
    /// Sealed memtables of one tree at which writers wait for a flush.
    pub(crate) sealed_wait: usize,
    /// Bytes in all memtables at which writers wait for a flush.
    pub(crate) memory_wait: u64,
    /// Young runs of one tree from which on writers are slowed.
    pub(crate) runs_slow: usize,
    /// Young runs at which the delay has its full weight.
    pub(crate) runs_full: usize,
    /// Compaction debt in bytes from which on writers are slowed, and at which the delay has its full weight.
    pub(crate) debt_slow: u64,
    pub(crate) debt_full: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            sealed_slow: 2,
            sealed_wait: 5,
            memory_wait: 512 << 20,
            runs_slow: 12,
            runs_full: 36,
            debt_slow: 4 << 30,
            debt_full: 32 << 30,
        }
    }
}

/// The delay at full weight: 1 MiB/s is left to each writer.
const FULL_DELAY_NS_PER_KIB: f64 = 1e9 / 1024.0;

/// How long a writer should be held up for each KiB it writes, in nanoseconds: nothing below the limits, then rising
/// with the cube of the distance, so that little debt costs next to nothing.
pub(crate) fn delay_ns_per_kib(pressure: &Pressure, limits: &Limits) -> u64 {
    let weight = |value: f64, slow: f64, full: f64| ((value - slow) / (full - slow)).clamp(0.0, 1.0);
    let sealed = weight(pressure.sealed as f64, limits.sealed_slow as f64, limits.sealed_wait as f64) * 0.5;
    let runs = weight(pressure.young_runs as f64, limits.runs_slow as f64, limits.runs_full as f64);
    let debt = weight(pressure.compaction_debt as f64, limits.debt_slow as f64, limits.debt_full as f64);
    let worst = sealed.max(runs).max(debt);
    (worst.powi(3) * FULL_DELAY_NS_PER_KIB) as u64
}

/// Whether a writer must wait until a flush has made room: the hard limit, of memory and not of speed. Memtables take
/// so many bytes of `memory`, those too that iterators hold; a writer never waits for an iterator, only for flushes.
pub(crate) fn must_wait(pressure: &Pressure, memory: u64, limits: &Limits) -> bool {
    pressure.sealed >= limits.sealed_wait || (pressure.sealed > 0 && memory >= limits.memory_wait)
}

/// Delays that are too short to sleep for, until they add up. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct DelayOwed(AtomicU64);

impl DelayOwed {
    /// Adds the delay of one write, and says how long its thread should sleep: for all that is owed, once that is worth
    /// it, or not at all. Whoever takes what is owed takes all of it, so it is paid for once.
    pub(crate) fn add(&self, ns: u64) -> u64 {
        match self.0.fetch_add(ns, Ordering::Relaxed).saturating_add(ns) {
            SLEEP_MIN_NS.. => self.0.swap(0, Ordering::Relaxed).min(SLEEP_MAX_NS),
            _ => 0,
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "one test races threads, and in vfs none are scoped")]
mod tests {
    use super::*;

    #[test]
    fn short_delays_are_saved_up() {
        let owed = DelayOwed::default();
        assert_eq!(owed.add(SLEEP_MIN_NS / 2), 0);
        assert_eq!(owed.add(SLEEP_MIN_NS), SLEEP_MIN_NS / 2 * 3);
        assert_eq!(owed.add(10 * SLEEP_MAX_NS), SLEEP_MAX_NS);
        assert_eq!(owed.add(1), 0, "what is beyond the longest sleep is forgiven");
    }

    /// Two writers that both saw enough to sleep for once both took it out of the sum, which fell below zero.
    #[test]
    fn what_is_owed_is_paid_for_once() {
        let owed = DelayOwed::default();
        let each = SLEEP_MIN_NS / 3;
        let adds = if cfg!(miri) { 100 } else { 100_000 };
        let slept: u64 = std::thread::scope(|scope| {
            let writers = [(); 4].map(|()| scope.spawn(|| (0..adds).map(|_| owed.add(each)).sum::<u64>()));
            writers.into_iter().map(|writer| writer.join().unwrap()).sum()
        });
        assert_eq!(slept + owed.0.into_inner(), 4 * adds * each);
    }

    #[test]
    fn delays_rise_without_a_cliff() {
        let limits = Limits::default();
        let at = |young_runs| delay_ns_per_kib(&Pressure { young_runs, ..Pressure::default() }, &limits);
        assert_eq!(at(0), 0);
        assert_eq!(at(limits.runs_slow), 0);
        let mut last = 0;
        for runs in limits.runs_slow + 1..=limits.runs_full {
            let now = at(runs);
            assert!(now > last && now - last < FULL_DELAY_NS_PER_KIB as u64 / 6, "{runs} runs: {last} to {now}");
            last = now;
        }
        assert_eq!(at(limits.runs_full), at(1000));
    }

    #[test]
    fn only_memory_makes_writers_wait() {
        let limits = Limits::default();
        let debt = Pressure { compaction_debt: u64::MAX, young_runs: 1000, ..Pressure::default() };
        assert!(!must_wait(&debt, 0, &limits));
        assert!(must_wait(&Pressure { sealed: 5, ..Pressure::default() }, 0, &limits));
        assert!(must_wait(&Pressure { sealed: 1, ..Pressure::default() }, 1 << 30, &limits));
        assert!(!must_wait(&Pressure { sealed: 0, ..Pressure::default() }, 1 << 30, &limits));
    }
}

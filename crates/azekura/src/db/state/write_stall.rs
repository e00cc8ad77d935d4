//! How much writers are slowed: a function of how far maintenance is behind.
//!
//! Choosing is pure ([`delay_ns_per_kib`], [`must_stop_writes`]); the acting is a short sleep that grows with the debt,
//! so that throughput bends instead of breaking off.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::engine::Pressure;

/// Sleeps shorter than this are saved up.
const SLEEP_MIN_NS: u64 = 200_000;
/// No single write is held up longer than this by pacing.
const SLEEP_MAX_NS: u64 = 100_000_000;

/// Where slowing begins and where it ends in waiting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct WriteStallLimits {
    /// Sealed memtables of one tree from which on writers are slowed.
    pub(crate) sealed_slowdown: usize,
    /// Sealed memtables of one tree at which writers wait for a flush.
    pub(crate) sealed_stop: usize,
    /// Bytes in all memtables at which writers wait for a flush.
    pub(crate) memory_stop: u64,
    /// Young runs of one tree from which on writers are slowed.
    pub(crate) l0_runs_slowdown: usize,
    /// Young runs at which the delay has its full weight.
    pub(crate) l0_runs_full_delay: usize,
    /// Compaction debt in bytes from which on writers are slowed, and at which the delay has its full weight.
    pub(crate) debt_slowdown: u64,
    pub(crate) debt_full_delay: u64,
}

impl Default for WriteStallLimits {
    fn default() -> WriteStallLimits {
        WriteStallLimits {
            sealed_slowdown: 2,
            sealed_stop: 5,
            memory_stop: 512 << 20,
            l0_runs_slowdown: 12,
            l0_runs_full_delay: 36,
            debt_slowdown: 4 << 30,
            debt_full_delay: 32 << 30,
        }
    }
}

/// The delay at full weight: 1 MiB/s is left to each writer.
const FULL_DELAY_NS_PER_KIB: f64 = 1e9 / 1024.0;

/// How long a writer should be held up for each KiB it writes, in nanoseconds: nothing below the limits, then rising
/// with the cube of the distance, so that little debt costs next to nothing.
pub(crate) fn delay_ns_per_kib(pressure: &Pressure, limits: &WriteStallLimits) -> u64 {
    let weight = |value: f64, slow: f64, full: f64| ((value - slow) / (full - slow)).clamp(0.0, 1.0);
    let sealed =
        weight(pressure.sealed_memtables as f64, limits.sealed_slowdown as f64, limits.sealed_stop as f64) * 0.5;
    let runs = weight(pressure.l0_runs as f64, limits.l0_runs_slowdown as f64, limits.l0_runs_full_delay as f64);
    let debt = weight(pressure.compaction_debt as f64, limits.debt_slowdown as f64, limits.debt_full_delay as f64);
    let worst = sealed.max(runs).max(debt);
    (worst.powi(3) * FULL_DELAY_NS_PER_KIB) as u64
}

/// Whether a writer must wait until a flush has freed memory: the hard limit. `memory` is the size of the memtables
/// in bytes, with those that only iterators hold; a writer never waits for an iterator, only for flushes.
pub(crate) fn must_stop_writes(pressure: &Pressure, memory: u64, limits: &WriteStallLimits) -> bool {
    pressure.sealed_memtables >= limits.sealed_stop || (pressure.sealed_memtables > 0 && memory >= limits.memory_stop)
}

/// Delays that are too short to sleep for, until they add up. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct AccruedDelay(AtomicU64);

impl AccruedDelay {
    /// Adds the delay of one write, and returns how long its thread should sleep: for the sum of all delays, once
    /// that is long enough, or not at all. The thread that sleeps takes the whole sum, so each delay is paid for
    /// once.
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
    fn short_delays_accumulate_until_slept() {
        let owed = AccruedDelay::default();
        assert_eq!(owed.add(SLEEP_MIN_NS / 2), 0);
        assert_eq!(owed.add(SLEEP_MIN_NS), SLEEP_MIN_NS / 2 * 3);
        assert_eq!(owed.add(10 * SLEEP_MAX_NS), SLEEP_MAX_NS);
        assert_eq!(owed.add(1), 0, "what is beyond the longest sleep is forgiven");
    }

    /// Two writers that both saw enough to sleep for once both took it out of the sum, which fell below zero.
    #[test]
    fn accrued_delay_is_slept_once() {
        let owed = AccruedDelay::default();
        let each = SLEEP_MIN_NS / 3;
        let adds = if cfg!(miri) { 100 } else { 100_000 };
        let slept: u64 = std::thread::scope(|scope| {
            let writers = [(); 4].map(|()| scope.spawn(|| (0..adds).map(|_| owed.add(each)).sum::<u64>()));
            writers.into_iter().map(|writer| writer.join().unwrap()).sum()
        });
        assert_eq!(slept + owed.0.into_inner(), 4 * adds * each);
    }

    #[test]
    fn delay_rises_smoothly_with_l0_runs() {
        let limits = WriteStallLimits::default();
        let at = |young_runs| delay_ns_per_kib(&Pressure { l0_runs: young_runs, ..Pressure::default() }, &limits);
        assert_eq!(at(0), 0);
        assert_eq!(at(limits.l0_runs_slowdown), 0);
        let mut last = 0;
        for runs in limits.l0_runs_slowdown + 1..=limits.l0_runs_full_delay {
            let now = at(runs);
            assert!(now > last && now - last < FULL_DELAY_NS_PER_KIB as u64 / 6, "{runs} runs: {last} to {now}");
            last = now;
        }
        assert_eq!(at(limits.l0_runs_full_delay), at(1000));
    }

    #[test]
    fn only_memory_stops_writers() {
        let limits = WriteStallLimits::default();
        let debt = Pressure { compaction_debt: u64::MAX, l0_runs: 1000, ..Pressure::default() };
        assert!(!must_stop_writes(&debt, 0, &limits));
        assert!(must_stop_writes(&Pressure { sealed_memtables: 5, ..Pressure::default() }, 0, &limits));
        assert!(must_stop_writes(&Pressure { sealed_memtables: 1, ..Pressure::default() }, 1 << 30, &limits));
        assert!(!must_stop_writes(&Pressure { sealed_memtables: 0, ..Pressure::default() }, 1 << 30, &limits));
    }
}

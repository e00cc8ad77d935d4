//! Write stalls: how much writers are delayed, or stopped, when flushes and compactions fall behind.
//!
//! The decisions are pure functions ([`delay_ns_per_kib`], [`must_stop_writes`]). The delay grows smoothly with the
//! debt, so that the write throughput declines smoothly too. The caller sleeps.
//!
//! They need the highest values of all trees. [`WorstPressure`] keeps the trees sorted by each value, so that a change
//! of one tree does not have to visit all others.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::version_edit::PartitionId;
use crate::engine::Pressure;

/// Minimum sleep in nanoseconds. Shorter delays accumulate until their sum reaches it.
const SLEEP_MIN_NS: u64 = 200_000;
/// Maximum sleep in nanoseconds for a delay. A stop is not limited by it.
const SLEEP_MAX_NS: u64 = 100_000_000;

/// Thresholds at which writers are delayed, and at which they stop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct WriteStallLimits {
    /// Sealed memtables of one tree above which writers are delayed.
    pub(crate) sealed_slowdown: usize,
    /// Sealed memtables of one tree at which writers wait for a flush.
    pub(crate) sealed_stop: usize,
    /// Bytes in all memtables at which writers wait for a flush.
    pub(crate) memory_stop: u64,
    /// Level 0 runs of one tree above which writers are delayed.
    pub(crate) l0_runs_slowdown: usize,
    /// Level 0 runs at which the delay is largest.
    pub(crate) l0_runs_full_delay: usize,
    /// Compaction debt in bytes above which writers are delayed.
    pub(crate) debt_slowdown: u64,
    /// Compaction debt in bytes at which the delay is largest.
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

/// The pressure of each tree, and the highest values of all trees.
#[derive(Debug, Default)]
pub(crate) struct WorstPressure {
    trees: BTreeMap<PartitionId, Pressure>,
    /// The trees with a value above 0, by that value: sealed memtables, level 0 runs, compaction debt.
    sorted: [BTreeSet<(u64, PartitionId)>; 3],
    /// Number of trees that were visited after tasks.
    #[cfg(test)]
    pub(crate) trees_visited: u64,
}

impl WorstPressure {
    fn values_of(pressure: &Pressure) -> [u64; 3] {
        [pressure.sealed_memtables as u64, pressure.l0_runs as u64, pressure.compaction_debt]
    }

    /// Sets the pressure of a tree; `None` if the tree is gone.
    pub(crate) fn set(&mut self, tree: PartitionId, pressure: Option<Pressure>) {
        #[cfg(test)]
        {
            self.trees_visited += 1;
        }
        let old = match pressure {
            Some(pressure) => self.trees.insert(tree, pressure),
            None => self.trees.remove(&tree),
        };
        let [old, new] = [old, pressure].map(|pressure| WorstPressure::values_of(&pressure.unwrap_or_default()));
        for (sorted, (old, new)) in self.sorted.iter_mut().zip(old.into_iter().zip(new)) {
            if old == new {
                continue;
            }
            sorted.remove(&(old, tree));
            if new > 0 {
                sorted.insert((new, tree));
            }
        }
    }

    /// The highest values. Those that no decision needs are 0.
    pub(crate) fn worst(&self) -> Pressure {
        let [sealed, runs, debt] = [0, 1, 2].map(|n: usize| self.sorted[n].last().map_or(0, |(value, _)| *value));
        Pressure {
            sealed_memtables: sealed as usize,
            l0_runs: runs as usize,
            compaction_debt: debt,
            ..Pressure::default()
        }
    }
}

/// The largest delay in nanoseconds per KiB: it limits each writer to 1 MiB/s.
const FULL_DELAY_NS_PER_KIB: f64 = 1e9 / 1024.0;

/// Returns the delay of a writer in nanoseconds for each KiB that it writes: 0 up to the slowdown thresholds, then
/// rising with the cube of the distance to them, so that a small debt causes almost no delay. Sealed memtables alone
/// cause at most an eighth of the largest delay.
pub(crate) fn delay_ns_per_kib(pressure: &Pressure, limits: &WriteStallLimits) -> u64 {
    let weight = |value: f64, slow: f64, full: f64| ((value - slow) / (full - slow)).clamp(0.0, 1.0);
    let sealed =
        weight(pressure.sealed_memtables as f64, limits.sealed_slowdown as f64, limits.sealed_stop as f64) * 0.5;
    let runs = weight(pressure.l0_runs as f64, limits.l0_runs_slowdown as f64, limits.l0_runs_full_delay as f64);
    let debt = weight(pressure.compaction_debt as f64, limits.debt_slowdown as f64, limits.debt_full_delay as f64);
    let worst = sealed.max(runs).max(debt);
    (worst.powi(3) * FULL_DELAY_NS_PER_KIB) as u64
}

/// Returns whether a writer must wait until a flush has freed memory. `memory` is the size in bytes of all memtables,
/// including those that only iterators hold. Without a sealed memtable no writer waits, because only a flush ends the
/// wait, and not an iterator.
pub(crate) fn must_stop_writes(pressure: &Pressure, memory: u64, limits: &WriteStallLimits) -> bool {
    pressure.sealed_memtables >= limits.sealed_stop || (pressure.sealed_memtables > 0 && memory >= limits.memory_stop)
}

/// Sum of delays that are too short for a sleep. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct AccruedDelay(AtomicU64);

impl AccruedDelay {
    /// Adds the delay of one write, and returns the nanoseconds that the calling thread must sleep: 0, or the sum of
    /// all delays once it is at least 0.2 ms, but at most 100 ms. That thread takes the whole sum, so each delay is
    /// slept at most once.
    pub(crate) fn add(&self, ns: u64) -> u64 {
        match self.0.fetch_add(ns, Ordering::Relaxed).saturating_add(ns) {
            SLEEP_MIN_NS.. => self.0.swap(0, Ordering::Relaxed).min(SLEEP_MAX_NS),
            _ => 0,
        }
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "a test uses scoped threads, which `Env` does not offer")]
mod tests {
    use super::*;
    use crate::testing::seeded_rng::SeededRng;

    #[test]
    fn short_delays_accumulate_until_slept() {
        let accrued = AccruedDelay::default();
        assert_eq!(accrued.add(SLEEP_MIN_NS / 2), 0);
        assert_eq!(accrued.add(SLEEP_MIN_NS), SLEEP_MIN_NS / 2 * 3);
        assert_eq!(accrued.add(10 * SLEEP_MAX_NS), SLEEP_MAX_NS);
        assert_eq!(accrued.add(1), 0, "the excess over the maximum sleep is dropped");
    }

    /// Regression: two writers that both found the sum large enough both subtracted it, and the sum fell below zero.
    #[test]
    fn accrued_delay_is_slept_once() {
        let accrued = AccruedDelay::default();
        let each = SLEEP_MIN_NS / 3;
        let adds = if cfg!(miri) { 100 } else { 100_000 };
        let slept: u64 = std::thread::scope(|scope| {
            let writers = [(); 4].map(|()| scope.spawn(|| (0..adds).map(|_| accrued.add(each)).sum::<u64>()));
            writers.into_iter().map(|writer| writer.join().unwrap()).sum()
        });
        assert_eq!(slept + accrued.0.into_inner(), 4 * adds * each);
    }

    #[test]
    fn delay_rises_smoothly_with_l0_runs() {
        let limits = WriteStallLimits::default();
        let at = |l0_runs| delay_ns_per_kib(&Pressure { l0_runs, ..Pressure::default() }, &limits);
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
    fn worst_pressure_equals_that_of_all_trees() {
        let (mut rng, mut kept) = (SeededRng::new(7, 0), WorstPressure::default());
        let mut trees = BTreeMap::new();
        for _ in 0..2_000 {
            let tree = PartitionId(rng.below(20) as u64);
            let pressure = (rng.below(4) > 0).then(|| Pressure {
                sealed_memtables: rng.below(3),
                l0_runs: rng.below(5),
                compaction_debt: rng.below(4) as u64,
                ..Pressure::default()
            });
            kept.set(tree, pressure);
            match pressure {
                Some(pressure) => drop(trees.insert(tree, pressure)),
                None => drop(trees.remove(&tree)),
            }
            let worst = kept.worst();
            assert_eq!(
                Some(worst.sealed_memtables),
                trees.values().map(|tree| tree.sealed_memtables).max().or(Some(0))
            );
            assert_eq!(Some(worst.l0_runs), trees.values().map(|tree| tree.l0_runs).max().or(Some(0)));
            assert_eq!(Some(worst.compaction_debt), trees.values().map(|tree| tree.compaction_debt).max().or(Some(0)));
        }
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

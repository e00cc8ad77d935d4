//! Write stalls: how much writers are delayed, or stopped, when flushes and compactions fall behind.
//!
//! The decisions are pure functions ([`delay_ns_per_kib`], [`must_stop_writes`]). The delay grows smoothly with the
//! debt, so that the write throughput declines smoothly too. [`WriteController`] keeps the last decision, so that a
//! writer reads it without a lock, and makes writers sleep.
//!
//! The decisions need the highest values of all trees. [`WorstPressure`] keeps the trees sorted by each value, so that
//! a change of one tree does not have to visit all others.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::base::sync::lock;
use crate::base::version_edit::PartitionId;
use crate::base::{Error, Result};
use crate::db::catalog::Catalog;
use crate::db::config::Settings;
use crate::db::limits::write_buffer_manager::WriteBufferManager;
use crate::db::partition_state::PartitionState;
use crate::db::state::background_work::BackgroundWork;
use crate::engine::{FULL_MEMTABLE, Pressure};
use crate::vfs::Env;

/// A stopped writer computes the write stalls again after this many milliseconds without the end of a task.
const STOP_CHECK_MS: u64 = 100;

/// Minimum sleep in nanoseconds. Shorter delays accumulate until their sum reaches it.
const SLEEP_MIN_NS: u64 = 200_000;
/// Maximum sleep in nanoseconds for a delay. A stop is not limited by it.
const SLEEP_MAX_NS: u64 = 100_000_000;

/// Delays or stops writers when flushes and compactions fall behind. Thread safe.
pub(crate) struct WriteController {
    env: Arc<dyn Env>,
    write_buffers: Arc<WriteBufferManager>,
    limits: WriteStallLimits,
    /// Without workers no writer is stopped, because a writer would wait for a flush that its own thread has to run.
    stops_writers: bool,
    worst_pressure: Mutex<WorstPressure>,
    delay_ns_per_kib: AtomicU64,
    accrued_delay: AccruedDelay,
    is_stopped: AtomicBool,
    /// Whether sealed memtables wait for a flush.
    flush_waiting: AtomicBool,
    /// The last failure of a flush, until one succeeds.
    flush_error: Mutex<Option<Error>>,
    /// Nanoseconds that writers have waited.
    stall_ns: AtomicU64,
}

impl WriteController {
    pub(crate) fn new(
        env: Arc<dyn Env>,
        write_buffers: Arc<WriteBufferManager>,
        settings: &Settings,
    ) -> WriteController {
        let limits = WriteStallLimits { memory_stop: settings.memory_budget, ..WriteStallLimits::default() };
        debug_assert!(limits.sealed_slowdown < limits.sealed_stop, "a writer is delayed before it is stopped");
        debug_assert!(limits.l0_runs_slowdown < limits.l0_runs_full_delay);
        debug_assert!(limits.debt_slowdown < limits.debt_full_delay);
        WriteController {
            env,
            write_buffers,
            limits,
            stops_writers: settings.workers > 0,
            worst_pressure: Mutex::default(),
            delay_ns_per_kib: AtomicU64::new(0),
            accrued_delay: AccruedDelay::default(),
            is_stopped: AtomicBool::new(false),
            flush_waiting: AtomicBool::new(false),
            flush_error: Mutex::new(None),
            stall_ns: AtomicU64::new(0),
        }
    }

    /// Delays the writer of `bytes` in proportion to the debt.
    #[inline]
    pub(crate) fn delay_write(&self, bytes: u64) {
        let rate = self.delay_ns_per_kib.load(Ordering::Relaxed);
        if rate > 0 {
            let sleep = self.accrued_delay.add(rate * (bytes + 64) / 1024);
            if sleep > 0 {
                self.env.sleep(Duration::from_nanos(sleep));
                self.stall_ns.fetch_add(sleep, Ordering::Relaxed);
            }
        }
    }

    /// Whether a writer must [wait until a flush has freed memory](Self::wait_for_memory).
    #[inline]
    pub(crate) fn must_wait(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed) && self.stops_writers
    }

    /// Waits until writers are no longer stopped.
    ///
    /// # Errors
    /// That of `check_writable`; the last error of a flush.
    #[cold]
    pub(crate) fn wait_for_memory(
        &self,
        catalog: &Catalog,
        background: &BackgroundWork,
        check_writable: impl Fn() -> Result<()>,
    ) -> Result<()> {
        debug_assert!(self.stops_writers, "a worker has to run the flush");
        let start = self.env.monotonic_ns();
        let ended = loop {
            let seen = background.task_end_generation();
            self.update_all(catalog);
            if !self.is_stopped.load(Ordering::Relaxed) {
                break Ok(());
            }
            let flush_error = || lock(&self.flush_error).clone().map_or(Ok(()), Err);
            let error = check_writable().and_then(|()| flush_error());
            if error.is_err() {
                break error;
            }
            background.wake_workers();
            background.wait_for_task_end(seen, STOP_CHECK_MS);
        };
        self.stall_ns.fetch_add(self.env.monotonic_ns().saturating_sub(start), Ordering::Relaxed);
        ended
    }

    /// Computes the write delay, and whether writes must stop, from the pressure of all trees.
    pub(crate) fn update_all(&self, catalog: &Catalog) {
        self.update(catalog.all().iter().map(|partition| &**partition));
    }

    /// As [`update_all`](Self::update_all), when only these partitions have changed.
    pub(crate) fn update<'a>(&self, changed: impl IntoIterator<Item = &'a PartitionState>) {
        let mut pressures = lock(&self.worst_pressure);
        for partition in changed {
            // Read and stored under the lock, so that the last update has the last state. A deletion calls this too.
            let tree = partition.tree_if_built().filter(|_| !partition.is_deleted());
            pressures.set(partition.id, tree.map(|tree| tree.pressure()));
        }
        let worst = pressures.worst();
        self.flush_waiting.store(worst.sealed_memtables > 0, Ordering::Relaxed);
        self.write_buffers.note_change();
        self.delay_ns_per_kib.store(delay_ns_per_kib(&worst, &self.limits), Ordering::Relaxed);
        let stops = must_stop_writes(&worst, self.write_buffers.memory_usage(), &self.limits);
        self.is_stopped.store(stops, Ordering::Relaxed);
        drop(pressures);
    }

    /// Whether sealed memtables wait for a flush.
    pub(crate) fn flush_waiting(&self) -> bool {
        self.flush_waiting.load(Ordering::Relaxed)
    }

    /// Records the result of a flush: stopped writers fail with its error until a flush succeeds.
    pub(crate) fn record_flush(&self, flushed: Result<(), &Error>) {
        *lock(&self.flush_error) = flushed.err().cloned();
    }

    /// Forgets the error of a flush that no writer waits for any more.
    pub(crate) fn clear_flush_error(&self) {
        *lock(&self.flush_error) = None;
    }

    /// Nanoseconds that writers have waited since the database was opened.
    pub(crate) fn stall_ns(&self) -> u64 {
        self.stall_ns.load(Ordering::Relaxed)
    }

    /// Number of trees whose pressure was read.
    #[cfg(test)]
    pub(crate) fn trees_visited(&self) -> u64 {
        lock(&self.worst_pressure).trees_visited
    }
}

/// Thresholds at which writers are delayed, and at which they stop.
#[derive(Clone, Copy, Debug, PartialEq)]
struct WriteStallLimits {
    /// Size of the sealed memtables of one tree above which writers are delayed, as
    /// [`sealed_load`](Pressure::sealed_load).
    sealed_slowdown: u64,
    /// The size at which writers wait for a flush.
    sealed_stop: u64,
    /// Bytes in all memtables at which writers wait for a flush.
    memory_stop: u64,
    /// Level 0 runs of one tree above which writers are delayed.
    l0_runs_slowdown: usize,
    /// Level 0 runs at which the delay is largest.
    l0_runs_full_delay: usize,
    /// Compaction debt in bytes above which writers are delayed.
    debt_slowdown: u64,
    /// Compaction debt in bytes at which the delay is largest.
    debt_full_delay: u64,
}

impl Default for WriteStallLimits {
    fn default() -> WriteStallLimits {
        WriteStallLimits {
            sealed_slowdown: 2 * FULL_MEMTABLE,
            sealed_stop: 5 * FULL_MEMTABLE,
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
struct WorstPressure {
    trees: BTreeMap<PartitionId, Pressure>,
    /// The trees with a value above 0, by that value: number and load of sealed memtables, level 0 runs, compaction
    /// debt.
    sorted: [BTreeSet<(u64, PartitionId)>; 4],
    /// Number of calls of [`set`](Self::set).
    #[cfg(test)]
    trees_visited: u64,
}

impl WorstPressure {
    fn values_of(pressure: &Pressure) -> [u64; 4] {
        let &Pressure { sealed_memtables, sealed_load, compaction_debt, l0_runs, .. } = pressure;
        [sealed_memtables as u64, sealed_load, l0_runs as u64, compaction_debt]
    }

    /// Sets the pressure of a tree; `None` if the tree is gone.
    fn set(&mut self, tree: PartitionId, pressure: Option<Pressure>) {
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
            let removed = sorted.remove(&(old, tree));
            debug_assert_eq!(removed, old > 0, "a tree is listed if its value is above 0");
            if new > 0 {
                sorted.insert((new, tree));
            }
        }
    }

    /// The highest values. Those that no decision needs are 0.
    fn worst(&self) -> Pressure {
        let [sealed, sealed_load, runs, debt] =
            [0, 1, 2, 3].map(|n: usize| self.sorted[n].last().map_or(0, |(value, _)| *value));
        Pressure {
            sealed_memtables: sealed as usize,
            sealed_load,
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
fn delay_ns_per_kib(pressure: &Pressure, limits: &WriteStallLimits) -> u64 {
    let weight = |value: f64, slow: f64, full: f64| ((value - slow) / (full - slow)).clamp(0.0, 1.0);
    let sealed = weight(pressure.sealed_load as f64, limits.sealed_slowdown as f64, limits.sealed_stop as f64) * 0.5;
    let runs = weight(pressure.l0_runs as f64, limits.l0_runs_slowdown as f64, limits.l0_runs_full_delay as f64);
    let debt = weight(pressure.compaction_debt as f64, limits.debt_slowdown as f64, limits.debt_full_delay as f64);
    let worst = sealed.max(runs).max(debt);
    (worst.powi(3) * FULL_DELAY_NS_PER_KIB) as u64
}

/// Returns whether a writer must wait until a flush has freed memory. `memory` is the size in bytes of all memtables,
/// including those that only iterators hold. Without a sealed memtable no writer waits, because only a flush ends the
/// wait, and not an iterator.
fn must_stop_writes(pressure: &Pressure, memory: u64, limits: &WriteStallLimits) -> bool {
    pressure.sealed_load >= limits.sealed_stop || (pressure.sealed_memtables > 0 && memory >= limits.memory_stop)
}

/// Sum of delays that are too short for a sleep. Thread safe.
#[derive(Debug, Default)]
struct AccruedDelay(AtomicU64);

impl AccruedDelay {
    /// Adds the delay of one write, and returns the nanoseconds that the calling thread must sleep: 0, or the sum of
    /// all delays once it is at least 0.2 ms, but at most 100 ms. That thread takes the whole sum, so each delay is
    /// slept at most once.
    fn add(&self, ns: u64) -> u64 {
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
    use crate::db::config::Config;
    use crate::db::options::PartitionCreateOptions;
    use crate::testing::MemFs;
    use crate::testing::seeded_rng::SeededRng;

    #[test]
    fn stopped_writer_waits_for_a_flush_or_its_error() {
        let db = Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).open().unwrap();
        let part = db.open_partition("p", PartitionCreateOptions::default().max_memtable_size(4 << 10)).unwrap();
        let inner = &db.handle.inner;
        let settings = Settings { workers: 1, ..inner.settings.clone() };
        let controller = WriteController::new(Arc::clone(&inner.env), Arc::clone(&inner.write_buffers), &settings);
        let wait = |check: Result<()>| controller.wait_for_memory(&inner.catalog, &inner.background, || check.clone());
        for n in 0..controller.limits.sealed_stop / FULL_MEMTABLE {
            assert!(!controller.must_wait(), "{n} sealed memtables");
            part.insert([n as u8], [7; 8 << 10]).unwrap();
            controller.update([&*part.state]);
        }
        assert!(controller.must_wait() && controller.flush_waiting());
        controller.record_flush(Err(&Error::invalid("flush")));
        assert_eq!(wait(Ok(())).unwrap_err().message(), "flush");
        assert_eq!(wait(Err(Error::invalid("closed"))).unwrap_err().message(), "closed");
        part.flush().unwrap();
        wait(Ok(())).unwrap();
        assert!(!controller.must_wait() && !controller.flush_waiting());
    }

    #[test]
    fn short_delays_accumulate_until_slept() {
        let accrued = AccruedDelay::default();
        assert_eq!(accrued.add(SLEEP_MIN_NS / 2), 0);
        assert_eq!(accrued.add(SLEEP_MIN_NS), SLEEP_MIN_NS / 2 * 3);
        assert_eq!(accrued.add(10 * SLEEP_MAX_NS), SLEEP_MAX_NS);
        assert_eq!(accrued.add(1), 0, "the excess over the maximum sleep is dropped");
    }

    /// Regression: two writers both found the sum large enough and both subtracted from it, so the sum fell below zero.
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
        let (mut rng, mut tracked) = (SeededRng::new(7), WorstPressure::default());
        let mut trees = BTreeMap::new();
        for _ in 0..2_000 {
            let tree = PartitionId(rng.below(20) as u64);
            let pressure = (rng.below(4) > 0).then(|| Pressure {
                sealed_memtables: rng.below(3),
                sealed_load: rng.below(3_000) as u64,
                l0_runs: rng.below(5),
                compaction_debt: rng.below(4) as u64,
                ..Pressure::default()
            });
            tracked.set(tree, pressure);
            match pressure {
                Some(pressure) => drop(trees.insert(tree, pressure)),
                None => drop(trees.remove(&tree)),
            }
            let worst = tracked.worst();
            assert_eq!(
                Some(worst.sealed_memtables),
                trees.values().map(|tree| tree.sealed_memtables).max().or(Some(0))
            );
            assert_eq!(Some(worst.sealed_load), trees.values().map(|tree| tree.sealed_load).max().or(Some(0)));
            assert_eq!(Some(worst.l0_runs), trees.values().map(|tree| tree.l0_runs).max().or(Some(0)));
            assert_eq!(Some(worst.compaction_debt), trees.values().map(|tree| tree.compaction_debt).max().or(Some(0)));
        }
    }

    #[test]
    fn only_memory_stops_writers() {
        let limits = WriteStallLimits::default();
        let debt = Pressure { compaction_debt: u64::MAX, l0_runs: 1000, ..Pressure::default() };
        assert!(!must_stop_writes(&debt, 0, &limits));
        assert!(must_stop_writes(&Pressure { sealed_load: 5 * FULL_MEMTABLE, ..Pressure::default() }, 0, &limits));
        assert!(must_stop_writes(&Pressure { sealed_memtables: 1, ..Pressure::default() }, 1 << 30, &limits));
        assert!(!must_stop_writes(&Pressure { sealed_memtables: 0, ..Pressure::default() }, 1 << 30, &limits));
    }
}

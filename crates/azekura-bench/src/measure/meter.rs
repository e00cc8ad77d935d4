//! Counts operations and records their latencies, one meter for each thread.

use hdrhistogram::Histogram;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest latency that the histogram distinguishes, in nanoseconds.
const LONGEST_NS: u64 = 1_000_000_000_000;

/// An empty histogram of nanoseconds with three significant digits.
pub(crate) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LONGEST_NS, 3).expect("the bounds are in order")
}

/// Microseconds at a percentile (0 to 100) of a histogram of nanoseconds.
pub(crate) fn percentile_us(latencies: &Histogram<u64>, percentile: f64) -> f64 {
    latencies.value_at_quantile(percentile / 100.0) as f64 / 1000.0
}

/// The median: the middle number, or the mean of the middle two; `None` of none.
pub(crate) fn median(mut numbers: Vec<f64>) -> Option<f64> {
    numbers.sort_by(f64::total_cmp);
    let (low, high) = (numbers.len().saturating_sub(1) / 2, numbers.len() / 2);
    Some(f64::midpoint(*numbers.get(low)?, *numbers.get(high)?))
}

/// `top / bottom`, if that is a number above 0.
pub(crate) fn ratio(top: f64, bottom: f64) -> Option<f64> {
    Some(top / bottom).filter(|ratio| ratio.is_finite() && *ratio > 0.0)
}

/// Progress of one thread, read by the sampling thread; on cache lines of its own to avoid false sharing.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Progress {
    pub(crate) done: AtomicU64,
    pub(crate) user_bytes: AtomicU64,
    pub(crate) live_bytes: AtomicI64,
}

/// Counts of one thread, or of all threads together.
#[derive(Clone, Debug, derive_more::AddAssign)]
pub(crate) struct OpStats {
    /// Nanoseconds for each operation.
    pub(crate) latencies: Histogram<u64>,
    pub(crate) ops: u64,
    /// Bytes of keys and values written.
    pub(crate) user_bytes: u64,
    /// Bytes of keys and values added to the data set, minus those removed.
    pub(crate) live_bytes: i64,
    /// Nanoseconds of the consuming half of `queue`.
    pub(crate) consumes: Histogram<u64>,
}

impl Default for OpStats {
    fn default() -> OpStats {
        OpStats { latencies: histogram(), ops: 0, user_bytes: 0, live_bytes: 0, consumes: histogram() }
    }
}

/// One thread's measurement. The clock is read once for each operation: the latency is the time since the previous
/// operation ended, so it contains making the key and checking the value.
pub(crate) struct Meter<'a> {
    progress: &'a Progress,
    quota: u64,
    deadline: Option<Instant>,
    stop: &'a AtomicBool,
    last: Instant,
    pub(crate) op_stats: OpStats,
}

impl<'a> Meter<'a> {
    /// Starts now; ends after `quota` operations, at `deadline`, or when `stop` becomes true.
    pub(crate) fn start(progress: &'a Progress, quota: u64, deadline: Option<Instant>, stop: &'a AtomicBool) -> Self {
        Meter { progress, quota, deadline, stop, last: Instant::now(), op_stats: OpStats::default() }
    }

    /// Starts the next operation now; the time since the previous one is not counted.
    pub(crate) fn begin(&mut self) {
        self.last = Instant::now();
    }

    /// Records the duration of one consuming step of `queue`.
    pub(crate) fn consumed(&mut self, took: Duration) {
        self.op_stats.consumes.saturating_record((took.as_nanos() as u64).max(1));
    }

    /// Ends `ops` operations, which share the time since the last call.
    pub(crate) fn done(&mut self, ops: u64) {
        if ops == 0 {
            return;
        }
        let now = Instant::now();
        let nanos = (now - self.last).as_nanos() as u64 / ops;
        self.last = now;
        self.op_stats.latencies.saturating_record_n(nanos.max(1), ops);
        self.op_stats.ops += ops;
        self.progress.user_bytes.store(self.op_stats.user_bytes, Ordering::Relaxed);
        self.progress.live_bytes.store(self.op_stats.live_bytes, Ordering::Relaxed);
        self.progress.done.store(self.op_stats.ops, Ordering::Relaxed);
    }

    /// Counts one written record; `new` if the data set has grown by it.
    pub(crate) fn wrote(&mut self, bytes: u64, new: bool) {
        self.op_stats.user_bytes += bytes;
        self.op_stats.live_bytes += if new { bytes as i64 } else { 0 };
    }

    /// Number of operations until the quota is reached.
    pub(crate) fn remaining(&self) -> u64 {
        self.quota.saturating_sub(self.op_stats.ops)
    }

    /// Whether the measurement has ended.
    pub(crate) fn over(&self) -> bool {
        let late = self.deadline.is_some_and(|deadline| self.last >= deadline);
        self.remaining() == 0 || late || self.stop.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::{Meter, OpStats, Progress, histogram, median, percentile_us};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Instant;

    #[test]
    fn percentiles_match_the_recorded_values() {
        let mut latencies = histogram();
        (1..=10_000u64).for_each(|micros| latencies.record(micros * 1000).unwrap());
        for (percentile, expected) in [(50.0, 5_000.0), (99.0, 9_900.0), (99.9, 9_990.0), (100.0, 10_000.0)] {
            let got = percentile_us(&latencies, percentile);
            assert!((got / expected - 1.0f64).abs() < 0.002, "p{percentile}: {got}");
        }
    }

    #[test]
    fn meter_counts_until_quota_deadline_or_stop() {
        let (progress, stop) = (Progress::default(), AtomicBool::new(false));
        let mut meter = Meter::start(&progress, 5, None, &stop);
        meter.done(0);
        assert_eq!((meter.remaining(), meter.over()), (5, false));
        meter.done(2);
        meter.wrote(10, false);
        meter.wrote(30, true);
        meter.done(3);
        assert!(meter.over());
        let mut all = OpStats::default();
        all += meter.op_stats.clone();
        all += meter.op_stats;
        assert_eq!((all.ops, all.user_bytes, all.live_bytes, all.latencies.len()), (10, 80, 60, 10));
        assert_eq!(progress.live_bytes.load(Ordering::Relaxed), 30);
        let mut late = Meter::start(&progress, u64::MAX, Some(Instant::now()), &stop);
        late.done(1);
        assert!(late.over());
        let stopped = Meter::start(&progress, u64::MAX, None, &stop);
        assert!(!stopped.over());
        stop.store(true, Ordering::Relaxed);
        assert!(stopped.over());
    }

    #[test]
    fn median_is_in_the_middle() {
        assert_eq!(median(vec![]), None);
        assert_eq!((median(vec![9.0, 1.0, 3.0]), median(vec![4.0, 1.0, 3.0, 9.0])), (Some(3.0), Some(3.5)));
    }
}

//! Counts operations and records their latencies, for one thread.

use hdrhistogram::Histogram;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Longest latency that is told apart from longer ones.
const LONGEST: Duration = Duration::from_secs(1000);

/// An empty histogram of nanoseconds, three digits exact.
pub(crate) fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LONGEST.as_nanos() as u64, 3).expect("the bounds are in order")
}

/// How far one thread is; on a cache line of its own, so that watching does not slow it down.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Progress(AtomicU64);

impl Progress {
    /// Operations done so far.
    pub(crate) fn done(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// One thread's measurement. The clock is read once per operation: an operation's latency is the time since the one
/// before, so it contains the making of the key and the check of the value.
pub(crate) struct Meter<'a> {
    progress: &'a Progress,
    quota: u64,
    deadline: Option<Instant>,
    last: Instant,
    /// What was counted.
    pub(crate) tally: Tally,
}

/// What one thread, or all of them together, counted.
#[derive(Clone, Debug)]
pub(crate) struct Tally {
    /// Nanoseconds per operation.
    pub(crate) latencies: Histogram<u64>,
    /// Operations.
    pub(crate) ops: u64,
    /// Bytes of keys and values written.
    pub(crate) user_bytes: u64,
    /// Records added to the data set.
    pub(crate) inserted: u64,
}

impl Tally {
    /// Nothing counted yet.
    pub(crate) fn new() -> Tally {
        Tally { latencies: histogram(), ops: 0, user_bytes: 0, inserted: 0 }
    }

    /// Adds what another thread counted.
    pub(crate) fn add(&mut self, other: &Tally) {
        self.latencies += &other.latencies;
        self.ops += other.ops;
        self.user_bytes += other.user_bytes;
        self.inserted += other.inserted;
    }
}

impl<'a> Meter<'a> {
    /// A meter that is over after `quota` operations or at `deadline`, and starts now.
    pub(crate) fn start(progress: &'a Progress, quota: u64, deadline: Option<Instant>) -> Meter<'a> {
        Meter { progress, quota, deadline, last: Instant::now(), tally: Tally::new() }
    }

    /// `ops` operations are done; they share the time since the last call.
    pub(crate) fn done(&mut self, ops: u64) {
        if ops == 0 {
            return;
        }
        let now = Instant::now();
        let nanos = (now - self.last).as_nanos() as u64 / ops;
        self.last = now;
        self.tally.latencies.saturating_record_n(nanos.max(1), ops);
        self.tally.ops += ops;
        self.progress.0.store(self.tally.ops, Ordering::Relaxed);
    }

    /// `bytes` of keys and values were written.
    pub(crate) fn wrote(&mut self, bytes: u64) {
        self.tally.user_bytes += bytes;
    }

    /// A record was added that was not there before.
    pub(crate) fn inserted(&mut self) {
        self.tally.inserted += 1;
    }

    /// Operations still to do.
    pub(crate) fn left(&self) -> u64 {
        self.quota.saturating_sub(self.tally.ops)
    }

    /// Whether there is nothing left to do.
    pub(crate) fn over(&self) -> bool {
        self.left() == 0 || self.deadline.is_some_and(|deadline| self.last >= deadline)
    }
}

/// Microseconds at a percentile (0 to 100) of a histogram of nanoseconds.
pub(crate) fn percentile_us(latencies: &Histogram<u64>, percentile: f64) -> f64 {
    latencies.value_at_quantile(percentile / 100.0) as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::{Meter, Progress, Tally, histogram, percentile_us};

    #[test]
    fn percentiles_are_those_of_the_values() {
        let mut latencies = histogram();
        for micros in 1..=10_000u64 {
            latencies.record(micros * 1000).unwrap();
        }
        for (percentile, expected) in [(50.0, 5_000.0), (99.0, 9_900.0), (99.9, 9_990.0), (100.0, 10_000.0)] {
            let got = percentile_us(&latencies, percentile);
            assert!((got / expected - 1.0f64).abs() < 0.002, "p{percentile}: {got}");
        }
    }

    #[test]
    fn meter_counts_and_ends() {
        let progress = Progress::default();
        let mut meter = Meter::start(&progress, 5, None);
        meter.done(0);
        assert_eq!((meter.left(), meter.over()), (5, false));
        meter.done(2);
        meter.wrote(10);
        meter.inserted();
        meter.done(3);
        assert!(meter.over());
        assert_eq!(progress.done(), 5);
        let mut all = Tally::new();
        all.add(&meter.tally);
        all.add(&meter.tally);
        assert_eq!((all.ops, all.user_bytes, all.inserted, all.latencies.len()), (10, 20, 2, 10));
    }

    #[test]
    fn meter_ends_at_its_deadline() {
        let progress = Progress::default();
        let mut meter = Meter::start(&progress, u64::MAX, Some(std::time::Instant::now()));
        meter.done(1);
        assert!(meter.over());
    }
}

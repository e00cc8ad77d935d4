//! Counts operations and records their latencies, for one thread.

use hdrhistogram::Histogram;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
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
pub(crate) struct Progress {
    done: AtomicU64,
    user_bytes: AtomicU64,
    live_bytes: AtomicI64,
}

impl Progress {
    /// Operations done so far.
    pub(crate) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Bytes of keys and values written so far.
    pub(crate) fn user_bytes(&self) -> u64 {
        self.user_bytes.load(Ordering::Relaxed)
    }

    /// Bytes by which the data set has grown.
    pub(crate) fn live_bytes(&self) -> i64 {
        self.live_bytes.load(Ordering::Relaxed)
    }
}

/// One thread's measurement. The clock is read once per operation: an operation's latency is the time since the one
/// before, so it contains the making of the key and the check of the value.
pub(crate) struct Meter<'a> {
    progress: &'a Progress,
    quota: u64,
    deadline: Option<Instant>,
    stop: Option<&'a AtomicBool>,
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
    /// Bytes of keys and values added to it, less those removed.
    pub(crate) live_bytes: i64,
    /// Nanoseconds of a part of the work that is told apart, where a workload has one.
    pub(crate) parts: Option<Histogram<u64>>,
}

impl Tally {
    /// Nothing counted yet.
    pub(crate) fn new() -> Tally {
        Tally { latencies: histogram(), ops: 0, user_bytes: 0, inserted: 0, live_bytes: 0, parts: None }
    }

    /// Adds what another thread counted.
    pub(crate) fn add(&mut self, other: &Tally) {
        self.latencies += &other.latencies;
        self.ops += other.ops;
        self.user_bytes += other.user_bytes;
        self.inserted += other.inserted;
        self.live_bytes += other.live_bytes;
        if let Some(parts) = &other.parts {
            *self.parts.get_or_insert_with(histogram) += parts;
        }
    }
}

impl<'a> Meter<'a> {
    /// A meter that is over after `quota` operations or at `deadline`, and starts now.
    pub(crate) fn start(progress: &'a Progress, quota: u64, deadline: Option<Instant>) -> Meter<'a> {
        Meter { progress, quota, deadline, stop: None, last: Instant::now(), tally: Tally::new() }
    }

    /// The same meter, also over as soon as `stop` is true.
    pub(crate) fn until(self, stop: &'a AtomicBool) -> Meter<'a> {
        Meter { stop: Some(stop), ..self }
    }

    /// An operation begins only now: the time since the last one is nobody's.
    pub(crate) fn begin(&mut self) {
        self.last = Instant::now();
    }

    /// A part of the work that is told apart took so long.
    pub(crate) fn part(&mut self, took: Duration) {
        let parts = self.tally.parts.get_or_insert_with(histogram);
        parts.saturating_record((took.as_nanos() as u64).max(1));
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
        self.progress.user_bytes.store(self.tally.user_bytes, Ordering::Relaxed);
        self.progress.live_bytes.store(self.tally.live_bytes, Ordering::Relaxed);
        self.progress.done.store(self.tally.ops, Ordering::Relaxed);
    }

    /// `bytes` of keys and values were written.
    pub(crate) fn wrote(&mut self, bytes: u64) {
        self.tally.user_bytes += bytes;
    }

    /// A record of so many bytes was added that was not there before.
    pub(crate) fn inserted(&mut self, bytes: u64) {
        self.tally.inserted += 1;
        self.tally.live_bytes += bytes as i64;
    }

    /// A record of so many bytes was removed.
    pub(crate) fn removed(&mut self, bytes: u64) {
        self.tally.live_bytes -= bytes as i64;
    }

    /// Operations still to do.
    pub(crate) fn left(&self) -> u64 {
        self.quota.saturating_sub(self.tally.ops)
    }

    /// Whether there is nothing left to do.
    pub(crate) fn over(&self) -> bool {
        self.left() == 0
            || self.deadline.is_some_and(|deadline| self.last >= deadline)
            || self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed))
    }
}

/// Microseconds at a percentile (0 to 100) of a histogram of nanoseconds.
pub(crate) fn percentile_us(latencies: &Histogram<u64>, percentile: f64) -> f64 {
    latencies.value_at_quantile(percentile / 100.0) as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use super::{Meter, Progress, Tally, histogram, percentile_us};
    use std::sync::atomic::{AtomicBool, Ordering};

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
        meter.inserted(30);
        meter.done(3);
        assert!(meter.over());
        assert_eq!(progress.done(), 5);
        let mut all = Tally::new();
        all.add(&meter.tally);
        all.add(&meter.tally);
        assert_eq!((all.ops, all.user_bytes, all.inserted, all.latencies.len()), (10, 20, 2, 10));
        assert_eq!((all.live_bytes, progress.live_bytes(), progress.user_bytes()), (60, 30, 10));
    }

    #[test]
    fn meter_ends_when_it_is_told_to() {
        let (progress, stop) = (Progress::default(), AtomicBool::new(false));
        let meter = Meter::start(&progress, u64::MAX, None).until(&stop);
        assert!(!meter.over());
        stop.store(true, Ordering::Relaxed);
        assert!(meter.over());
    }

    #[test]
    fn meter_ends_at_its_deadline() {
        let progress = Progress::default();
        let mut meter = Meter::start(&progress, u64::MAX, Some(std::time::Instant::now()));
        meter.done(1);
        assert!(meter.over());
    }
}

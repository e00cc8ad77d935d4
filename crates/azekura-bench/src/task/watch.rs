//! Looks on while threads work: operations in each second, and a series of samples. Runs on the thread that started
//! them and only reads their progress.

use crate::machine::disk;
use crate::machine::meter::Progress;
use crate::machine::process::{self, Usage};
use crate::report::measurement::Sample;
use crate::task::task::{Plan, Task};
use std::thread;
use std::time::{Duration, Instant};

/// Time between samples at first.
const FIRST_TICK: Duration = Duration::from_millis(50);
/// More samples than this are never kept: every second one is dropped, and the time between them doubles.
const MOST: usize = 200;
/// Looking at the directory takes at most one part in so many of the time.
const DISK_SHARE: u32 = 50;

/// What was seen.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    /// Operations per second in each whole second.
    pub(crate) intervals: Vec<f64>,
    /// The samples.
    pub(crate) series: Vec<Sample>,
    /// Largest anonymous memory.
    pub(crate) anonymous_rss_bytes: u64,
}

/// What is counted at one moment, since the start.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    seconds: f64,
    ops: u64,
    user_bytes: u64,
    written_bytes: u64,
    live_bytes: u64,
    disk_bytes: u64,
    rss_bytes: u64,
}

/// Counts at even distances, never more than [`MOST`].
#[derive(Debug)]
struct Series {
    tick: Duration,
    counts: Vec<Count>,
}

impl Series {
    fn new() -> Series {
        Series { tick: FIRST_TICK, counts: Vec::new() }
    }

    fn push(&mut self, count: Count) {
        self.counts.push(count);
        if self.counts.len() >= MOST {
            // The second of each pair stays: it ends the time of both.
            let mut index = 0;
            self.counts.retain(|_| {
                index += 1;
                index % 2 == 0
            });
            self.tick *= 2;
        }
    }

    /// The last count: it takes the place of one that was made just before.
    fn end(&mut self, count: Count) {
        let close = |last: &Count| count.seconds - last.seconds < self.tick.as_secs_f64() / 2.0;
        if self.counts.last().is_some_and(close) {
            self.counts.pop();
        }
        self.counts.push(count);
    }

    fn samples(&self) -> Vec<Sample> {
        let mut before = Count::default();
        let sample = |count: &Count| {
            let seconds = (count.seconds - before.seconds).max(1e-9);
            let ops_per_s = ((count.ops - before.ops) as f64 / seconds).round();
            before = *count;
            Sample {
                s: (count.seconds * 1e6).round() / 1e6,
                ops_per_s,
                write_amp: (count.user_bytes > 0).then(|| count.written_bytes as f64 / count.user_bytes as f64),
                space_amp: count.disk_bytes as f64 / count.live_bytes.max(1) as f64,
                rss_bytes: count.rss_bytes,
            }
        };
        self.counts.iter().map(sample).collect()
    }
}

/// Bytes allocated in a directory, looked up again only when that is cheap.
struct DiskBytes {
    bytes: u64,
    next: Instant,
}

impl DiskBytes {
    fn now(&mut self, task: &Task) -> u64 {
        let start = Instant::now();
        if start >= self.next {
            self.bytes = disk::usage(&task.dir).allocated;
            self.next = Instant::now() + start.elapsed() * DISK_SHARE;
        }
        self.bytes
    }
}

/// Watches a measurement that began at `start` until it is `finished`. `progress` is that of the counted threads and,
/// from `counted` on, of those beside them; `loaded_bytes` are those of the data set at the start.
pub(crate) fn watch(
    task: &Task,
    plan: &Plan,
    (progress, counted): (&[Progress], usize),
    (start, used): (Instant, Usage),
    loaded_bytes: u64,
    finished: &dyn Fn() -> bool,
) -> Watched {
    let mut disk_bytes = DiskBytes { bytes: 0, next: start };
    let mut count = |now: Instant| {
        let written = Usage::now() - used;
        let live: i64 = progress.iter().map(Progress::live_bytes).sum();
        Count {
            seconds: (now - start).as_secs_f64(),
            ops: progress.iter().take(counted).map(Progress::done).sum(),
            user_bytes: progress.iter().map(Progress::user_bytes).sum(),
            written_bytes: written.dirtied_bytes.max(written.syscall_write_bytes),
            live_bytes: loaded_bytes.saturating_add_signed(live),
            disk_bytes: disk_bytes.now(task),
            rss_bytes: process::rss_bytes(),
        }
    };
    let mut watched = Watched::default();
    let mut series = Series::new();
    let mut next_tick = start + series.tick;
    let mut last_second = (start, 0);
    while !finished() {
        let next = next_tick.min(last_second.0 + Duration::from_secs(1));
        // A worker unparks the watcher a moment before it counts as finished: never park for long.
        thread::park_timeout(next.saturating_duration_since(Instant::now()).min(Duration::from_millis(50)));
        let now = Instant::now();
        if now >= next_tick {
            series.push(count(now));
            next_tick = now + series.tick;
        }
        if now - last_second.0 >= Duration::from_secs(1) {
            let done: u64 = progress.iter().take(counted).map(Progress::done).sum();
            let rate = (done - last_second.1) as f64 / (now - last_second.0).as_secs_f64();
            watched.intervals.push(rate.round());
            say(task, plan, watched.intervals.len(), rate);
            watched.anonymous_rss_bytes = watched.anonymous_rss_bytes.max(process::anonymous_rss_bytes());
            if plan.cold {
                let _ = disk::evict(&task.dir); // files come and go meanwhile
            }
            last_second = (now, done);
        }
    }
    series.end(count(Instant::now()));
    watched.series = series.samples();
    watched
}

fn say(task: &Task, plan: &Plan, second: usize, rate: f64) {
    if plan.show_seconds {
        let name = plan.workload.name();
        eprintln!("{:>10} {name:>11} round {} second {second:>3}: {rate:>9.0} ops/s", task.engine, plan.round);
    }
}

#[cfg(test)]
mod tests {
    use super::{Count, FIRST_TICK, MOST, Series};

    #[test]
    fn a_series_keeps_its_length_and_its_totals() {
        let mut series = Series::new();
        for i in 1..=1000u64 {
            let seconds = i as f64 * 0.05;
            series.push(Count { seconds, ops: i * 5, user_bytes: 10, written_bytes: 30, ..Count::default() });
        }
        let samples = series.samples();
        assert!((MOST / 2 - 1..MOST).contains(&samples.len()), "{}", samples.len());
        assert!(series.tick > FIRST_TICK);
        // The last samples may lie as close as they came; none may be lost.
        let mut before = 0.0;
        let mut ops = 0.0;
        for sample in &samples {
            ops += sample.ops_per_s * (sample.s - before);
            before = sample.s;
            assert!((sample.ops_per_s - 100.0).abs() < 1.0, "{sample:?}");
            assert_eq!(sample.write_amp, Some(3.0));
        }
        assert!((ops / (before * 100.0) - 1.0).abs() < 0.01);
        assert!(before > 49.0, "{before}");
    }
}

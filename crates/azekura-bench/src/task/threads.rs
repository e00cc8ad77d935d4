//! Runs the threads of a measurement and samples their progress.

use crate::engine::Engine;
use crate::engine::registry::Settled;
use crate::error::{ErrorKind, Result, error_of};
use crate::measure::disk;
use crate::measure::meter::{Meter, Progress, Tally};
use crate::measure::process::{Usage, memory_bytes};
use crate::task::child::Task;
use crate::workload::Workload;
use crate::workload::worker::{Generations, Share, Shared, Worker};
use serde_json::{Map, Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Time between samples.
const SECOND: Duration = Duration::from_secs(1);
/// Longest time that the sampling thread sleeps before it looks for ended threads.
const LONGEST_PARK: Duration = Duration::from_millis(20);

/// The counts from which the figures of a measurement are computed.
#[derive(Default)]
pub(crate) struct Facts {
    /// Seconds from the first operation to the last.
    pub(crate) seconds: f64,
    pub(crate) tally: Tally,
    pub(crate) beside: Option<Tally>,
    /// A sample for each second, and one at the end.
    pub(crate) series: Vec<Value>,
    /// Largest anonymous memory seen.
    pub(crate) anonymous_rss_bytes: u64,
    /// Bytes of keys and values of the data set before the measurement.
    pub(crate) loaded_bytes: u64,
    /// Figures that only this workload has.
    pub(crate) extra: Map<String, Value>,
    pub(crate) used: Usage,
    pub(crate) used_settling: Usage,
    pub(crate) settled: Settled,
    pub(crate) disk_bytes: u64,
    pub(crate) peak_rss_bytes: u64,
    pub(crate) stats: Map<String, Value>,
}

impl Facts {
    /// Bytes of keys and values of a data set that has grown by `grown`.
    pub(crate) fn live_bytes(&self, grown: i64) -> f64 {
        self.loaded_bytes.saturating_add_signed(grown).max(1) as f64
    }
}

/// What the threads of a task share: the open database, its further partitions and its generations.
pub(crate) fn share<'a>(engine: &'a dyn Engine, task: &Task) -> Result<Shared<'a>> {
    let refused = |error| error_of(ErrorKind::Refused, format!("cannot open partitions: {error}"));
    let partitions = (0..task.workload.partitions).map(|i| engine.partition(&format!("part-{i:02}")));
    Ok(Shared {
        shape: task.shape,
        depth: task.settings.depth.unwrap_or(task.shape.n / 10).max(1),
        engine,
        partitions: partitions.collect::<Result<_>>().map_err(refused)?,
        generations: Generations::new(if task.workload.updates() { task.shape.n } else { 0 }),
    })
}

/// The threads of a measurement.
pub(crate) struct Workers<'a> {
    /// The counted ones, then the one that runs beside them until they end.
    workers: Vec<Worker<'a>>,
    counted: usize,
    warm_up: Option<Worker<'a>>,
    /// Bytes of the data set before the measurement.
    loaded_bytes: u64,
}

impl<'a> Workers<'a> {
    /// Makes the workers of `task` and their queues in the database.
    pub(crate) fn prepare(shared: &'a Shared<'a>, task: &Task) -> Result<Workers<'a>> {
        let Task { shape, settings, workload, threads, .. } = task;
        let worker = |workload: &Workload, thread, threads, seed| {
            Worker::new(workload, shared, Share { shape: *shape, thread, threads }, seed)
        };
        let one = |name: &String, seed| worker(&Workload::named(name), 0, 1, seed);
        let mut workers: Vec<_> = (0..*threads).map(|i| worker(workload, i, *threads, settings.seed)).collect();
        let mut loaded_bytes = if workload.loads { shape.total_bytes() } else { 0 };
        for worker in &mut workers {
            loaded_bytes += worker.prepare()?;
        }
        let counted = workers.len();
        workers.extend(workload.beside.as_ref().map(|name| one(name, settings.seed + 1).paced(settings.write_rate)));
        let warm_up = workload.warm_up.as_ref().map(|name| one(name, !settings.seed));
        Ok(Workers { workers, counted, warm_up, loaded_bytes })
    }

    /// Carries out uncounted operations with other choices than the measured ones. Returns whether there were any.
    pub(crate) fn warm_up(&mut self, ops: u64) -> Result<bool> {
        let (progress, never) = (Progress::default(), AtomicBool::new(false));
        let warm_up = self.warm_up.as_mut().map(|worker| worker.work(Meter::start(&progress, ops, None, &never)));
        Ok(warm_up.transpose()?.is_some())
    }

    /// Starts the threads and samples them. The first error ends them all.
    pub(crate) fn run(&mut self, task: &Task) -> Result<Facts> {
        let (counted, threads) = (self.counted, self.counted as u64);
        let progress: Vec<Progress> = self.workers.iter().map(|_| Progress::default()).collect();
        let (failed, done, watcher) = (AtomicBool::new(false), AtomicBool::new(false), thread::current());
        let begun = (Instant::now(), Usage::now());
        let deadline = task.settings.seconds.map(|seconds| begun.0 + Duration::from_secs_f64(seconds));
        let mut facts = Facts { loaded_bytes: self.loaded_bytes, ..Facts::default() };
        thread::scope(|scope| {
            let (failed, done, watcher) = (&failed, &done, &watcher);
            let mut running = Vec::new();
            for (i, (worker, progress)) in (0..).zip(self.workers.iter_mut().zip(&progress)) {
                let quota = task.ops / threads + u64::from(i < task.ops % threads);
                running.push(scope.spawn(move || {
                    let result = worker.work(if i < threads {
                        Meter::start(progress, quota, deadline, failed)
                    } else {
                        Meter::start(progress, u64::MAX, None, done)
                    });
                    failed.fetch_or(result.is_err(), Ordering::Relaxed);
                    let ended = Instant::now();
                    watcher.unpark();
                    result.map(|tally| (tally, ended))
                }));
            }
            let finished = || running[..counted].iter().all(|thread| thread.is_finished());
            watch(task, (&progress, counted), begun, &mut facts, finished);
            done.store(true, Ordering::Relaxed);
            for (i, thread) in running.into_iter().enumerate() {
                let (tally, ended) = thread.join().expect("a thread panicked")?;
                if i < counted {
                    facts.tally += tally;
                    facts.seconds = facts.seconds.max((ended - begun.0).as_secs_f64());
                } else {
                    facts.beside = Some(tally);
                }
            }
            Ok(facts)
        })
    }

    /// Lets each worker read its records back: about `most` records in all.
    pub(crate) fn verify(&mut self, most: u64) -> Result<()> {
        let each = (most / self.workers.len() as u64).max(1);
        self.workers.iter_mut().try_for_each(|worker| worker.verify(each))
    }
}

/// Samples a measurement until it has `finished`. Runs on the thread that started the others and only reads their
/// progress: that of the `counted` threads, then that of the thread beside them.
fn watch(
    task: &Task,
    (progress, counted): (&[Progress], usize),
    begun: (Instant, Usage),
    facts: &mut Facts,
    finished: impl Fn() -> bool,
) {
    let (mut last, mut done_before) = (begun.0, 0);
    loop {
        let next = last + SECOND;
        while !finished() && Instant::now() < next {
            // A worker unparks this thread just before it counts as finished: never park for long.
            thread::park_timeout(next.saturating_duration_since(Instant::now()).min(LONGEST_PARK));
        }
        let (ended, now) = (finished(), Instant::now());
        let done: u64 = progress[..counted].iter().map(|one| one.done.load(Ordering::Relaxed)).sum();
        let user_bytes: u64 = progress.iter().map(|one| one.user_bytes.load(Ordering::Relaxed)).sum();
        let grown = progress.iter().map(|one| one.live_bytes.load(Ordering::Relaxed)).sum();
        let written_bytes = (Usage::now() - begun.1).written_bytes();
        facts.series.push(json!({
            "s": (now - begun.0).as_secs_f64(),
            "ops_per_s": ((done - done_before) as f64 / (now - last).as_secs_f64()).round(),
            "write_amp": (user_bytes > 0).then(|| written_bytes as f64 / user_bytes as f64),
            "space_amp": disk::allocated_bytes(&task.dir) as f64 / facts.live_bytes(grown),
            "rss_bytes": memory_bytes(|own| own.vmrss),
        }));
        if ended {
            return;
        }
        facts.anonymous_rss_bytes = facts.anonymous_rss_bytes.max(memory_bytes(|own| own.rssanon));
        if task.settings.cold {
            let _ = disk::evict(&task.dir); // files are created and removed meanwhile
        }
        (last, done_before) = (now, done);
    }
}

//! Runs the threads of a measurement and samples their progress.

use crate::engine::Engine;
use crate::error::{ErrorKind, Result, error_of};
use crate::measure::disk;
use crate::measure::meter::{Meter, Progress, Tally};
use crate::measure::process::{Usage, memory_bytes};
use crate::task::child::{Plan, Task};
use crate::workload::Workload;
use crate::workload::worker::{Generations, Share, Worker};
use serde::Serialize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Time between samples.
const SECOND: Duration = Duration::from_secs(1);
/// Longest time that the sampling thread sleeps before it looks for ended threads.
const LONGEST_PARK: Duration = Duration::from_millis(20);

/// One sample of the `series` of a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Sample {
    /// Seconds since the measurement began.
    pub(crate) s: f64,
    /// Operations per second since the previous sample.
    pub(crate) ops_per_s: f64,
    /// Bytes written per byte of keys and values since the measurement began.
    pub(crate) write_amp: Option<f64>,
    /// Bytes allocated in the directory per byte of live keys and values.
    pub(crate) space_amp: f64,
    pub(crate) rss_bytes: u64,
}

/// The threads of a measurement and their shared state.
pub(crate) struct Workers {
    workers: Vec<Worker>,
    /// Runs beside the counted workers until they end.
    beside: Option<Worker>,
    warm_up: Option<Worker>,
    /// Bytes of the data set before the measurement.
    pub(crate) loaded_bytes: u64,
    pub(crate) partitions: Arc<Vec<Box<dyn Engine>>>,
}

/// Counts of the threads, and samples.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Seconds from the first operation to the last.
    pub(crate) seconds: f64,
    pub(crate) tally: Tally,
    pub(crate) beside: Option<Tally>,
    /// A sample for each second, and one at the end.
    pub(crate) series: Vec<Sample>,
    /// Largest anonymous memory seen.
    pub(crate) anonymous_rss_bytes: u64,
}

impl Workers {
    /// Makes the workers of `plan` and their partitions and queues in the database.
    pub(crate) fn prepare(engine: &dyn Engine, plan: &Plan) -> Result<Workers> {
        let refused = |error| error_of(ErrorKind::Refused, format!("cannot open partitions: {error}"));
        let partitions = (0..plan.workload.partitions).map(|i| engine.partition(&format!("part-{i:02}")));
        let partitions = Arc::new(partitions.collect::<Result<Vec<_>>>().map_err(refused)?);
        let generations = Arc::new(Generations::new(if plan.workload.updates() { plan.shape.n } else { 0 }));
        let (threads, settings) = (plan.threads.max(1), &plan.settings);
        let worker = |workload: &Workload, thread: u64, threads: u64, seed: u64| {
            let share = Share {
                shape: plan.shape,
                thread,
                threads,
                seed: seed.wrapping_mul(1 << 20).wrapping_add(thread),
                depth: plan.settings.depth.unwrap_or(plan.shape.n / 10).max(1),
                generations: Arc::clone(&generations),
                partitions: Arc::clone(&partitions),
            };
            Worker::new(workload.clone(), share)
        };
        let mut workers: Vec<Worker> =
            (0..threads).map(|i| worker(&plan.workload, i, threads, settings.seed)).collect();
        let mut loaded_bytes = if plan.workload.loads { plan.shape.total_bytes() } else { 0 };
        for worker in &mut workers {
            loaded_bytes += worker.prepare(engine)?;
        }
        let one = |name: &String, seed| worker(&Workload::named(name), 0, 1, seed);
        let beside = plan.workload.beside.as_ref();
        let beside = beside.map(|name| one(name, settings.seed + 1).paced(settings.write_rate));
        let warm_up = plan.workload.warm_up.as_ref().map(|name| one(name, !settings.seed));
        Ok(Workers { workers, beside, warm_up, loaded_bytes, partitions })
    }

    /// Carries out uncounted operations with other choices than the measured ones. Returns whether there were any.
    pub(crate) fn warm_up(&mut self, engine: &dyn Engine, ops: u64) -> Result<bool> {
        let (progress, never) = (Progress::default(), AtomicBool::new(false));
        let Some(worker) = &mut self.warm_up else { return Ok(false) };
        work(engine, worker, Meter::start(&progress, ops, None, &never))?;
        Ok(true)
    }

    /// Starts the threads and samples them. The first error ends them all.
    pub(crate) fn run(&mut self, engine: &dyn Engine, task: &Task, plan: &Plan) -> Result<Outcome> {
        let (counted, loaded_bytes) = (self.workers.len() as u64, self.loaded_bytes);
        let progress: Vec<Progress> = (0..=counted).map(|_| Progress::default()).collect();
        let (failed, done, watcher) = (AtomicBool::new(false), AtomicBool::new(false), thread::current());
        let (used, start) = (Usage::now(), Instant::now());
        let deadline = plan.settings.seconds.map(|seconds| start + Duration::from_secs_f64(seconds));
        thread::scope(|scope| {
            let (failed, done, watcher) = (&failed, &done, &watcher);
            let run = move |worker, progress, quota, deadline, stop| {
                let result = work(engine, worker, Meter::start(progress, quota, deadline, stop));
                failed.fetch_or(result.is_err(), Ordering::Relaxed);
                let ended = Instant::now();
                watcher.unpark();
                result.map(|tally| (tally, ended))
            };
            let mut running = Vec::new();
            for (i, (worker, progress)) in (0..counted).zip(self.workers.iter_mut().zip(&progress)) {
                let quota = plan.ops / counted + u64::from(i < plan.ops % counted);
                running.push(scope.spawn(move || run(worker, progress, quota, deadline, failed)));
            }
            let beside = self.beside.as_mut().zip(progress.last());
            let beside =
                beside.map(|(worker, progress)| scope.spawn(move || run(worker, progress, u64::MAX, None, done)));
            let watch = Sampler { task, plan, progress: &progress, start, used, loaded_bytes };
            let mut outcome = watch.until(|| running.iter().all(|thread| thread.is_finished()));
            done.store(true, Ordering::Relaxed);
            for thread in running {
                let (tally, ended) = thread.join().expect("a thread panicked")?;
                outcome.tally.add(&tally);
                outcome.seconds = outcome.seconds.max((ended - start).as_secs_f64());
            }
            if let Some(thread) = beside {
                outcome.beside = Some(thread.join().expect("a thread panicked")?.0);
            }
            Ok(outcome)
        })
    }

    /// Lets each worker read its records back: about `most` records in all.
    pub(crate) fn verify(&mut self, engine: &dyn Engine, most: u64) -> Result<()> {
        let each = (most / self.workers.len() as u64).max(1);
        self.workers.iter_mut().chain(&mut self.beside).try_for_each(|worker| worker.verify(engine, each))
    }
}

fn work(engine: &dyn Engine, worker: &mut Worker, mut meter: Meter<'_>) -> Result<Tally> {
    while !meter.over() {
        worker.step(engine, &mut meter)?;
    }
    worker.finish(engine)?;
    Ok(meter.tally)
}

/// Samples a measurement. Runs on the thread that started the others and only reads their progress.
struct Sampler<'a> {
    task: &'a Task,
    plan: &'a Plan,
    /// Progress of the counted threads, then of the thread beside them.
    progress: &'a [Progress],
    start: Instant,
    used: Usage,
    loaded_bytes: u64,
}

impl Sampler<'_> {
    fn until(&self, finished: impl Fn() -> bool) -> Outcome {
        let (mut outcome, mut last, mut done_before) = (Outcome::default(), self.start, 0);
        loop {
            let next = last + SECOND;
            while !finished() && Instant::now() < next {
                // A worker unparks this thread just before it counts as finished: never park for long.
                thread::park_timeout(next.saturating_duration_since(Instant::now()).min(LONGEST_PARK));
            }
            let (ended, now, done) = (finished(), Instant::now(), self.done());
            let rate = (done - done_before) as f64 / (now - last).as_secs_f64();
            outcome.series.push(self.sample(now, rate.round()));
            if ended {
                return outcome;
            }
            outcome.anonymous_rss_bytes = outcome.anonymous_rss_bytes.max(memory_bytes(|own| own.rssanon));
            if self.plan.settings.cold {
                let _ = disk::evict(&self.task.dir); // files are created and removed meanwhile
            }
            (last, done_before) = (now, done);
        }
    }

    fn done(&self) -> u64 {
        self.progress.iter().rev().skip(1).map(|progress| progress.done.load(Ordering::Relaxed)).sum()
    }

    fn sample(&self, now: Instant, ops_per_s: f64) -> Sample {
        let user_bytes: u64 = self.progress.iter().map(|one| one.user_bytes.load(Ordering::Relaxed)).sum();
        let grown: i64 = self.progress.iter().map(|one| one.live_bytes.load(Ordering::Relaxed)).sum();
        let written_bytes = (Usage::now() - self.used).written_bytes();
        let live_bytes = self.loaded_bytes.saturating_add_signed(grown).max(1);
        Sample {
            s: (now - self.start).as_secs_f64(),
            ops_per_s,
            write_amp: (user_bytes > 0).then(|| written_bytes as f64 / user_bytes as f64),
            space_amp: disk::allocated_bytes(&self.task.dir) as f64 / live_bytes as f64,
            rss_bytes: memory_bytes(|own| own.vmrss),
        }
    }
}

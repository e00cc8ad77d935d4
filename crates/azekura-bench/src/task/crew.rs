//! The threads of a measurement: those that are counted, and what runs beside them.

use crate::engine::Engine;
use crate::failure::{Result, refused};
use crate::machine::meter::{Meter, Progress, Tally};
use crate::machine::process::Usage;
use crate::task::task::{Plan, Task};
use crate::task::watch::{Watched, watch};
use crate::workload::fill::FIRST_GENERATION;
use crate::workload::generations::Generations;
use crate::workload::workload::{Partitions, Share};
use crate::workload::{Shape, Work, Workload};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// What the shares of all threads have in common.
pub(crate) struct Common {
    shape: Shape,
    threads: u64,
    seek_nexts: u64,
    write_rate: u64,
    depth: u64,
    /// The newest acknowledged generation of each record, if the workload changes any.
    pub(crate) generations: Arc<Generations>,
    /// More partitions of the database.
    pub(crate) partitions: Partitions,
}

impl Common {
    /// Makes what the workload of `plan` needs.
    ///
    /// # Errors
    /// The engine has no partitions, and the workload runs on some.
    pub(crate) fn new(engine: &dyn Engine, plan: &Plan) -> Result<Common> {
        let known = if plan.workload.updates() { plan.shape.n } else { 0 };
        let partitions = (0..plan.workload.partitions())
            .map(|i| engine.partition(&format!("part-{i:02}")))
            .collect::<Result<Vec<_>>>()
            .map_err(|failure| refused(format!("cannot open partitions: {failure}")))?;
        Ok(Common {
            shape: plan.shape,
            threads: plan.threads.max(1),
            seek_nexts: plan.seek_nexts,
            write_rate: plan.write_rate,
            depth: plan.depth.unwrap_or(plan.shape.n / 10).max(1),
            generations: Arc::new(Generations::new(known, FIRST_GENERATION as u32)),
            partitions: Arc::new(partitions),
        })
    }

    fn share(&self, seed: u64, thread: u64, threads: u64) -> Share {
        Share {
            shape: self.shape,
            thread,
            threads,
            seed: seed.wrapping_mul(1 << 20).wrapping_add(thread),
            seek_nexts: self.seek_nexts,
            write_rate: self.write_rate,
            depth: self.depth,
            generations: Arc::clone(&self.generations),
            partitions: Arc::clone(&self.partitions),
        }
    }

    /// Uncounted operations with other choices than the measured ones.
    pub(crate) fn warm(&self, engine: &dyn Engine, warm_up: Workload, ops: u64, seed: u64) -> Result<()> {
        let mut work = warm_up.share(self.share(!seed, 0, 1));
        let progress = Progress::default();
        let mut meter = Meter::start(&progress, ops, None);
        while !meter.over() {
            work.step(engine, &mut meter)?;
        }
        Ok(())
    }
}

/// The works of all threads, prepared.
pub(crate) struct Crew {
    works: Vec<Box<dyn Work>>,
    beside: Option<Box<dyn Work>>,
    prepared_bytes: u64,
}

/// What the threads counted, and what was seen while they ran.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Seconds from the first operation to the last.
    pub(crate) seconds: f64,
    /// What the counted threads counted.
    pub(crate) tally: Tally,
    /// What the thread beside them counted.
    pub(crate) beside: Option<Tally>,
    /// What was seen.
    pub(crate) watched: Watched,
}

impl Crew {
    /// Makes the works of `plan` and what they need in the database.
    pub(crate) fn prepare(engine: &dyn Engine, plan: &Plan, common: &Common) -> Result<Crew> {
        let threads = common.threads;
        let workload = plan.workload;
        let mut works: Vec<Box<dyn Work>> =
            (0..threads).map(|thread| workload.share(common.share(plan.seed, thread, threads))).collect();
        let mut prepared_bytes = 0;
        for work in &mut works {
            prepared_bytes += work.prepare(engine)?;
        }
        Ok(Crew { works, beside: workload.beside(common.share(plan.seed, threads, threads + 1)), prepared_bytes })
    }

    /// Bytes of the data set at the start.
    pub(crate) fn loaded_bytes(&self, plan: &Plan) -> u64 {
        self.prepared_bytes + if plan.workload.loads() { plan.shape.total_bytes() } else { 0 }
    }

    /// Starts the threads and watches them. The first failure ends them all.
    pub(crate) fn run(&mut self, engine: &dyn Engine, task: &Task, plan: &Plan) -> Result<Outcome> {
        let counted = self.works.len();
        let loaded_bytes = self.loaded_bytes(plan);
        let progress: Vec<Progress> = (0..=counted).map(|_| Progress::default()).collect();
        let (failed, done) = (AtomicBool::new(false), AtomicBool::new(false));
        let watcher = thread::current();
        let used = Usage::now();
        let start = Instant::now();
        let deadline = plan.seconds.map(|seconds| start + Duration::from_secs_f64(seconds));
        thread::scope(|scope| {
            let (threads, failed, done, watcher) = (counted as u64, &failed, &done, &watcher);
            let workers: Vec<_> = (self.works.iter_mut().zip(&progress).enumerate())
                .map(|(i, (work, progress))| {
                    let quota = plan.ops / threads + u64::from((i as u64) < plan.ops % threads);
                    scope.spawn(move || {
                        let meter = Meter::start(progress, quota, deadline).until(failed);
                        let result = work_off(engine, work.as_mut(), meter);
                        failed.fetch_or(result.is_err(), Ordering::Relaxed);
                        let ended = Instant::now();
                        watcher.unpark();
                        result.map(|tally| (tally, ended))
                    })
                })
                .collect();
            let beside = self.beside.as_mut().zip(progress.last()).map(|(work, progress)| {
                scope.spawn(move || {
                    let result = work_off(engine, work.as_mut(), Meter::start(progress, u64::MAX, None).until(done));
                    failed.fetch_or(result.is_err(), Ordering::Relaxed);
                    result
                })
            });
            let finished = || workers.iter().all(thread::ScopedJoinHandle::is_finished);
            let watched = watch(task, plan, (&progress, counted), (start, used), loaded_bytes, &finished);
            done.store(true, Ordering::Relaxed);
            let mut tally = Tally::new();
            let mut last = start;
            for worker in workers {
                let (own, ended) = worker.join().map_err(|_| "a thread panicked")??;
                tally.add(&own);
                last = last.max(ended);
            }
            let beside = match beside {
                Some(writer) => Some(writer.join().map_err(|_| "a thread panicked")??),
                None => None,
            };
            Ok(Outcome { seconds: (last - start).as_secs_f64(), tally, beside, watched })
        })
    }

    /// Lets each thread's work look at what it wrote: about `most` records in all.
    pub(crate) fn verify(&mut self, engine: &dyn Engine, most: u64) -> Result<()> {
        let each = (most / self.works.len().max(1) as u64).max(1);
        self.works.iter_mut().try_for_each(|work| work.verify(engine, each))
    }
}

fn work_off(engine: &dyn Engine, work: &mut dyn Work, mut meter: Meter<'_>) -> Result<Tally> {
    while !meter.over() {
        work.step(engine, &mut meter)?;
    }
    work.finish(engine)?;
    Ok(meter.tally)
}

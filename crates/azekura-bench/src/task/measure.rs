//! Runs one workload on one engine and measures it; in a child process.

use crate::engine::{Engine, Sync, registry};
use crate::failure::{Result, wrong};
use crate::machine::disk;
use crate::machine::meter::{Meter, Progress, Tally};
use crate::machine::process::{self, Usage};
use crate::machine::settle::{Settled, settle};
use crate::report::measurement::{Facts, Measurement};
use crate::task::task::{Plan, Task};
use crate::workload::fill::FIRST_GENERATION;
use crate::workload::generations::Generations;
use crate::workload::read::get_checked;
use crate::workload::rng::Rng;
use crate::workload::workload::Share;
use crate::workload::{Shape, Work, Workload};
use serde_json::{Value, json};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Records that are read back, uncounted, behind a workload that writes.
const VERIFIED: u64 = 20_000;

/// Fills a new database and brings it to rest; without syncs, whatever the run asks for.
pub(crate) fn load(task: &Task, shape: &Shape) -> Result<Value> {
    let options = crate::engine::Options { sync: Sync::None, ..task.options.clone() };
    let engine = registry::open(&task.engine, &task.dir, &options)?;
    let start = Instant::now();
    let share = share(shape, &Arc::new(Generations::new(0, 0)), 0, 1, 1, 0);
    let mut fill = Workload::FillRandom.share(share);
    let progress = Progress::default();
    let mut meter = Meter::start(&progress, shape.n, None);
    while !meter.over() {
        fill.step(engine.as_ref(), &mut meter)?;
    }
    let settled = settle(engine.as_ref())?;
    engine.sync()?;
    engine.close()?;
    Ok(json!({"seconds": start.elapsed().as_secs_f64(), "settled": settled.reached}))
}

/// Runs the workload of `plan` and measures it.
pub(crate) fn measure(task: &Task, plan: &Plan) -> Result<Measurement> {
    let engine = registry::open(&task.engine, &task.dir, &task.options)?;
    let known = if plan.workload.updates() { plan.shape.n } else { 0 };
    let generations = Arc::new(Generations::new(known, FIRST_GENERATION as u32));
    if let Some(warm_up) = plan.workload.warm_up() {
        warm(engine.as_ref(), plan, warm_up, &generations)?;
    }

    let before = Usage::now();
    let start = Instant::now();
    let outcome = run(engine.as_ref(), task, plan, &generations)?;
    let seconds = start.elapsed().as_secs_f64();
    let after = Usage::now();

    let settled =
        if plan.workload.writes() { settle(engine.as_ref())? } else { Settled { seconds: 0.0, reached: true } };
    let at_rest = Usage::now();
    let peak_rss_bytes = process::peak_rss_bytes();
    let anonymous = outcome.anonymous_rss_bytes.max(process::anonymous_rss_bytes());
    if plan.workload.writes() {
        verify(engine.as_ref(), plan, &generations, outcome.tally.ops)?;
    }
    let stats = engine.stats();
    let disk_bytes = disk::usage(&task.dir).allocated;
    engine.close()?;
    Ok(Measurement::new(
        task,
        plan,
        Facts {
            seconds,
            tally: outcome.tally,
            intervals: outcome.intervals,
            used: after - before,
            used_settling: at_rest - after,
            settled,
            disk_bytes,
            peak_rss_bytes,
            anonymous_rss_bytes: anonymous,
            stats,
        },
    ))
}

/// What the threads counted, and what was seen while they ran.
struct Outcome {
    tally: Tally,
    intervals: Vec<f64>,
    anonymous_rss_bytes: u64,
}

fn share(shape: &Shape, generations: &Arc<Generations>, thread: u64, threads: u64, nexts: u64, seed: u64) -> Share {
    let seed = seed.wrapping_mul(1 << 20).wrapping_add(thread);
    Share { shape: *shape, thread, threads, seed, seek_nexts: nexts, generations: Arc::clone(generations) }
}

/// Uncounted operations with other choices than the measured ones.
fn warm(engine: &dyn Engine, plan: &Plan, warm_up: Workload, generations: &Arc<Generations>) -> Result<()> {
    let mut work = warm_up.share(share(&plan.shape, generations, 0, 1, plan.seek_nexts, !plan.seed));
    let progress = Progress::default();
    let mut meter = Meter::start(&progress, plan.warm_ops, None);
    while !meter.over() {
        work.step(engine, &mut meter)?;
    }
    Ok(())
}

/// Starts the threads and watches them second by second.
fn run(engine: &dyn Engine, task: &Task, plan: &Plan, generations: &Arc<Generations>) -> Result<Outcome> {
    let threads = plan.threads.max(1);
    let mut works: Vec<Box<dyn Work>> = (0..threads)
        .map(|i| plan.workload.share(share(&plan.shape, generations, i, threads, plan.seek_nexts, plan.seed)))
        .collect();
    let progress: Vec<Progress> = (0..threads).map(|_| Progress::default()).collect();
    let deadline = plan.seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds));
    let watcher = thread::current();
    thread::scope(|scope| {
        let workers: Vec<_> = (works.iter_mut().zip(&progress).enumerate())
            .map(|(i, (work, progress))| {
                let quota = plan.ops / threads + u64::from((i as u64) < plan.ops % threads);
                let watcher = &watcher;
                scope.spawn(move || {
                    let result = work_off(engine, work.as_mut(), Meter::start(progress, quota, deadline));
                    watcher.unpark();
                    result
                })
            })
            .collect();
        let (intervals, anonymous_rss_bytes) =
            watch(task, plan, &progress, &|| workers.iter().all(thread::ScopedJoinHandle::is_finished));
        let mut tally = Tally::new();
        for worker in workers {
            tally.add(&worker.join().map_err(|_| "a thread panicked")??);
        }
        Ok(Outcome { tally, intervals, anonymous_rss_bytes })
    })
}

fn work_off(engine: &dyn Engine, work: &mut dyn Work, mut meter: Meter<'_>) -> Result<Tally> {
    while !meter.over() {
        work.step(engine, &mut meter)?;
    }
    Ok(meter.tally)
}

/// Operations per second in each whole second, and the largest anonymous memory seen, until `finished`.
fn watch(task: &Task, plan: &Plan, progress: &[Progress], finished: &dyn Fn() -> bool) -> (Vec<f64>, u64) {
    let mut intervals = Vec::new();
    let mut largest = 0;
    let mut last = (Instant::now(), 0);
    while !finished() {
        // A worker unparks the watcher a moment before it counts as finished: never park for long.
        thread::park_timeout(Duration::from_secs(1).saturating_sub(last.0.elapsed()).min(Duration::from_millis(50)));
        let now = Instant::now();
        if now - last.0 < Duration::from_secs(1) {
            continue;
        }
        let done: u64 = progress.iter().map(Progress::done).sum();
        let rate = (done - last.1) as f64 / (now - last.0).as_secs_f64();
        if plan.show_seconds {
            let name = plan.workload.name();
            eprintln!(
                "{:>10} {name:>11} round {} second {:>3}: {rate:>9.0} ops/s",
                task.engine,
                plan.round,
                intervals.len() + 1
            );
        }
        intervals.push(rate.round());
        largest = largest.max(process::anonymous_rss_bytes());
        last = (now, done);
    }
    (intervals, largest)
}

/// Reads some records back: each must have the generation that was acknowledged last.
fn verify(engine: &dyn Engine, plan: &Plan, generations: &Generations, ops: u64) -> Result<()> {
    let written = if plan.workload.loads() { plan.shape.n } else { ops.min(plan.shape.n) };
    let every_record_is_there = written == plan.shape.n;
    let mut rng = Rng::new(plan.seed ^ 0xfeed);
    let mut key = Vec::new();
    for _ in 0..if every_record_is_there { written.min(VERIFIED) } else { 0 } {
        let index = rng.below(written);
        let expected = if plan.workload.updates() { generations.acknowledged(index) } else { FIRST_GENERATION };
        let found = get_checked(engine, &plan.shape, index, &mut key)?;
        if found != expected {
            return Err(wrong(format!("record {index} has generation {found} at the end, not {expected}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{run, share, verify};
    use crate::engine::Engine;
    use crate::engine::memory::{Lie, Memory};
    use crate::failure::Result;
    use crate::machine::meter::{Meter, Progress};
    use crate::report::measurement::tests::sample_task;
    use crate::task::task::Plan;
    use crate::workload::Workload;
    use crate::workload::fill::FIRST_GENERATION;
    use crate::workload::generations::Generations;
    use clap::ValueEnum;
    use std::sync::Arc;

    const N: u64 = 3000;

    /// Loads (if need be), runs and verifies a workload on an engine with a lie; gives operations and insertions.
    fn try_out(workload: Workload, lie: Lie, threads: u64) -> Result<(u64, u64)> {
        let (task, mut plan) = sample_task("memory", 1);
        plan = Plan { workload, threads, ops: 4000, ..plan };
        plan.shape.n = N;
        plan.shape.order = workload.key_order();
        let engine = Memory::new(lie);
        let none = Arc::new(Generations::new(0, 0));
        if workload.loads() {
            let progress = Progress::default();
            let mut meter = Meter::start(&progress, N, None);
            let mut fill = Workload::FillRandom.share(share(&plan.shape, &none, 0, 1, 1, 0));
            while !meter.over() {
                fill.step(&engine, &mut meter)?;
            }
        } else {
            plan.ops = N;
        }
        let generations = Arc::new(Generations::new(N, FIRST_GENERATION as u32));
        let outcome = run(&engine as &dyn Engine, &task, &plan, &generations)?;
        if workload.writes() {
            verify(&engine, &plan, &generations, outcome.tally.ops)?;
        }
        Ok((outcome.tally.ops, outcome.tally.inserted))
    }

    #[test]
    fn every_workload_passes_on_a_right_engine() {
        for &workload in Workload::value_variants() {
            for threads in [1, 3] {
                let (ops, inserted) =
                    try_out(workload, Lie::None, threads).unwrap_or_else(|e| panic!("{workload:?}: {e}"));
                assert_eq!(ops, if workload.loads() { 4000 } else { N }, "{workload:?}");
                let inserts = !workload.loads() || matches!(workload, Workload::YcsbD | Workload::YcsbE);
                assert_eq!(inserted > 0, inserts, "{workload:?}");
            }
        }
    }

    #[test]
    fn every_lie_is_noticed() {
        use Workload::{FillRandom, FillSeq, Overwrite, ReadMissing, ReadRandom, ReadSeq, SeekRandom};
        use Workload::{YcsbA, YcsbB, YcsbC, YcsbD, YcsbE, YcsbF};
        let lies = [
            (Lie::Stale, vec![Overwrite, YcsbA, YcsbB, YcsbF]),
            (Lie::Forgets, vec![FillSeq, FillRandom, ReadRandom, ReadSeq, YcsbC, YcsbD, YcsbE]),
            (Lie::Flips, vec![FillSeq, FillRandom, Overwrite, ReadRandom, YcsbA, YcsbB, YcsbC, YcsbD, YcsbF]),
            (Lie::FindsAll, vec![ReadMissing]),
            (Lie::SkipsFirst, vec![ReadSeq, SeekRandom, YcsbE]),
            (Lie::Repeats, vec![ReadSeq, SeekRandom, YcsbE]),
        ];
        for (lie, workloads) in lies {
            for workload in workloads {
                assert!(try_out(workload, lie, 1).is_err(), "{lie:?} went unnoticed by {workload:?}");
            }
        }
    }
}

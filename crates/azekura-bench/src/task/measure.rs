//! Runs one workload on one engine and measures it; in a child process.

use crate::engine::{Engine, Sync, registry};
use crate::failure::{Result, wrong};
use crate::machine::disk;
use crate::machine::meter::percentile_us;
use crate::machine::process::{self, Usage};
use crate::machine::settle::{Settled, settle};
use crate::report::measurement::{Facts, Measurement};
use crate::task::crew::{Common, Crew, Outcome};
use crate::task::task::{Plan, Task};
use crate::workload::fill::{self, FIRST_GENERATION};
use crate::workload::generations::Generations;
use crate::workload::read::get_checked;
use crate::workload::rng::Rng;
use crate::workload::{Shape, Workload};
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

/// Records that are read back, uncounted, behind a workload that writes.
const VERIFIED: u64 = 20_000;
/// Bytes of records behind which that is enough.
const VERIFIED_BYTES: f64 = 1e9;

/// Fills a new database and brings it to rest; without syncs, whatever the run asks for.
pub(crate) fn load(task: &Task, shape: &Shape) -> Result<Value> {
    let options = crate::engine::Options { sync: Sync::None, ..task.options.clone() };
    let engine = registry::open(&task.engine, &task.dir, &options)?;
    let start = Instant::now();
    fill::load(engine.as_ref(), shape, 0..shape.n)?;
    let settled = settle(&[engine.as_ref()], start.elapsed())?;
    engine.sync()?;
    engine.close()?;
    Ok(json!({"seconds": start.elapsed().as_secs_f64(), "settled": settled.reached}))
}

/// Runs the workload of `plan` and measures it.
pub(crate) fn measure(task: &Task, plan: &Plan) -> Result<Measurement> {
    evict(task, plan)?;
    let engine = registry::open(&task.engine, &task.dir, &task.options)?;
    let common = Common::new(engine.as_ref(), plan)?;
    let mut crew = Crew::prepare(engine.as_ref(), plan, &common)?;
    if let Some(warm_up) = plan.workload.warm_up() {
        common.warm(engine.as_ref(), warm_up, plan.warm_ops, plan.seed)?;
        evict(task, plan)?;
    }
    let syncs_before = log_syncs(engine.as_ref());
    let before = Usage::now();
    let outcome = crew.run(engine.as_ref(), task, plan)?;
    let after = Usage::now();
    let extra = extra(plan, &outcome, syncs_before.zip(log_syncs(engine.as_ref())));

    let settled = if plan.workload.writes() {
        let all: Vec<&dyn Engine> =
            std::iter::once(engine.as_ref()).chain(common.partitions.iter().map(Box::as_ref)).collect();
        settle(&all, Duration::from_secs_f64(outcome.seconds))?
    } else {
        Settled { seconds: 0.0, reached: true }
    };
    let at_rest = Usage::now();
    let peak_rss_bytes = process::peak_rss_bytes();
    let anonymous = outcome.watched.anonymous_rss_bytes.max(process::anonymous_rss_bytes());
    let loaded_bytes = crew.loaded_bytes(plan);
    verify(engine.as_ref(), plan, &common.generations, &mut crew)?;
    let stats = engine.stats();
    let disk_bytes = disk::usage(&task.dir).allocated;
    drop((crew, common)); // they hold partitions
    engine.close()?;
    let facts = Facts {
        seconds: outcome.seconds,
        user_bytes_beside: outcome.beside.as_ref().map_or(0, |tally| tally.user_bytes),
        tally: outcome.tally,
        intervals: outcome.watched.intervals,
        series: outcome.watched.series,
        loaded_bytes,
        extra,
        used: after - before,
        used_settling: at_rest - after,
        settled,
        disk_bytes,
        peak_rss_bytes,
        anonymous_rss_bytes: anonymous,
        stats,
    };
    Ok(Measurement::new(task, plan, facts))
}

/// Puts the database out of the page cache, if the plan asks for that.
pub(crate) fn evict(task: &Task, plan: &Plan) -> Result<()> {
    if plan.cold && task.dir.exists() { disk::evict(&task.dir) } else { Ok(()) }
}

/// How often the engine has synced its log, if it tells.
fn log_syncs(engine: &dyn Engine) -> Option<u64> {
    engine.stats().get("log_syncs").and_then(Value::as_u64)
}

/// The figures that only this workload has.
fn extra(plan: &Plan, outcome: &Outcome, syncs: Option<(u64, u64)>) -> Map<String, Value> {
    let mut extra = Map::new();
    let mut add = |name: &str, value: Value| extra.insert(name.to_owned(), value);
    let seconds = outcome.seconds.max(1e-9);
    if plan.workload == Workload::FillSync {
        let ops = outcome.tally.ops as f64;
        let syncs = syncs.map(|(before, after)| after.saturating_sub(before)).filter(|&syncs| syncs > 0);
        add("commits_per_s", json!(ops / seconds));
        add("commits_per_sync", json!(syncs.map(|syncs| ops / syncs as f64)));
    }
    if let Some(writer) = &outcome.beside {
        add("writes_per_s", json!(writer.ops as f64 / seconds));
        add("write_p50_us", json!(percentile_us(&writer.latencies, 50.0)));
        add("write_p99_us", json!(percentile_us(&writer.latencies, 99.0)));
    }
    if let Some(parts) = &outcome.tally.parts {
        add("consume_p50_us", json!(percentile_us(parts, 50.0)));
        add("consume_p99_us", json!(percentile_us(parts, 99.0)));
        add("consume_max_us", json!(parts.max() as f64 / 1000.0));
    }
    extra
}

/// Reads some records back: each must have the generation that was acknowledged last.
fn verify(engine: &dyn Engine, plan: &Plan, generations: &Generations, crew: &mut Crew) -> Result<()> {
    let most = (VERIFIED as f64).min(VERIFIED_BYTES / plan.shape.mean_record_bytes()) as u64;
    crew.verify(engine, most.max(1))?;
    if !plan.workload.writes() || !plan.workload.loads() {
        return Ok(());
    }
    let mut rng = Rng::new(plan.seed ^ 0xfeed);
    let mut key = Vec::new();
    for _ in 0..most.min(plan.shape.n) {
        let index = rng.below(plan.shape.n);
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
    use super::{extra, verify};
    use crate::engine::memory::{Lie, Memory};
    use crate::failure::{Kind, Result, Told};
    use crate::report::measurement::tests::sample_task;
    use crate::task::crew::{Common, Crew, Outcome};
    use crate::task::task::Plan;
    use crate::workload::{Workload, fill};
    use clap::ValueEnum;

    /// No multiple of any number of threads.
    const N: u64 = 3001;

    /// Enough for every lie to show; enough time for the writer beside the readers to begin.
    fn ops_of(workload: Workload) -> u64 {
        match workload {
            Workload::ReadWhileWriting => 200_000,
            fill if fill.fills() => N,
            _ => 4000,
        }
    }

    /// Prepares, runs and verifies a workload on an engine with a lie.
    fn try_out(workload: Workload, lie: Lie, threads: u64) -> Result<Outcome> {
        let (task, mut plan) = sample_task("memory", 1);
        plan = Plan { workload, threads, ops: ops_of(workload), ..plan };
        plan.shape.n = N;
        plan.shape.order = workload.key_order();
        plan.depth = Some(200);
        plan.write_rate = 0;
        if workload.blobs() {
            (plan.shape.least_value, plan.shape.value_size) = (100, 3000);
        }
        let engine = Memory::new(lie);
        if workload.loads() {
            fill::load(&engine, &plan.shape, 0..N)?;
        }
        let common = Common::new(&engine, &plan)?;
        let mut crew = Crew::prepare(&engine, &plan, &common)?;
        let outcome = crew.run(&engine, &task, &plan)?;
        verify(&engine, &plan, &common.generations, &mut crew)?;
        Ok(outcome)
    }

    /// Those that are measured by threads at work.
    fn workloads() -> impl Iterator<Item = Workload> {
        let apart = [Workload::Recovery, Workload::Open];
        Workload::value_variants().iter().copied().filter(move |workload| !apart.contains(workload))
    }

    #[test]
    fn every_workload_passes_on_a_right_engine() {
        use Workload::{FillSync, Queue, ReadWhileWriting, YcsbD, YcsbE};
        for workload in workloads() {
            for threads in [1, 3] {
                let outcome = try_out(workload, Lie::None, threads).unwrap_or_else(|e| panic!("{workload:?}: {e}"));
                let tally = &outcome.tally;
                assert_eq!(tally.ops, ops_of(workload), "{workload:?}");
                assert_eq!(tally.latencies.len(), tally.ops, "{workload:?}");
                let inserts = !workload.loads() || matches!(workload, YcsbD | YcsbE);
                assert_eq!(tally.inserted > 0, inserts, "{workload:?}");
                assert_eq!(tally.live_bytes > 0, inserts && workload != Queue, "{workload:?}");
                assert_eq!(tally.user_bytes > 0, workload.writes() && workload != ReadWhileWriting, "{workload:?}");
                assert_eq!(outcome.beside.is_some(), workload == ReadWhileWriting);
                assert_eq!(tally.parts.is_some(), workload == Queue);
                let series = &outcome.watched.series;
                assert!(series.last().is_some_and(|last| last.s > 0.0), "{workload:?}: {series:?}");
                let names: Vec<String> = extra(&plan_of(workload), &outcome, Some((1, 11))).keys().cloned().collect();
                let expected: &[&str] = match workload {
                    FillSync => &["commits_per_s", "commits_per_sync"],
                    ReadWhileWriting => &["writes_per_s", "write_p50_us", "write_p99_us"],
                    Queue => &["consume_p50_us", "consume_p99_us", "consume_max_us"],
                    _ => &[],
                };
                assert_eq!(names, expected, "{workload:?}");
            }
        }
    }

    fn plan_of(workload: Workload) -> Plan {
        Plan { workload, ..sample_task("memory", 1).1 }
    }

    #[test]
    fn a_time_limit_ends_every_workload() {
        for workload in workloads() {
            let (task, plan) = sample_task("memory", 1);
            let mut plan = Plan { workload, seconds: Some(0.1), ops: u64::MAX, ..plan };
            // A full scan that begins anew where it was: more than one segment of it.
            plan.shape.n = if matches!(workload, Workload::ReadSeq | Workload::ReadReverse) { 150_000 } else { 10_000 };
            plan.shape.order = workload.key_order();
            let engine = Memory::new(Lie::None);
            if workload.loads() {
                fill::load(&engine, &plan.shape, 0..plan.shape.n).unwrap();
            }
            let common = Common::new(&engine, &plan).unwrap();
            let mut crew = Crew::prepare(&engine, &plan, &common).unwrap();
            let outcome = crew.run(&engine, &task, &plan).unwrap();
            assert!(outcome.tally.ops > 0 && outcome.seconds < 20.0, "{workload:?}: {}", outcome.seconds);
            verify(&engine, &plan, &common.generations, &mut crew).unwrap_or_else(|e| panic!("{workload:?}: {e}"));
        }
    }

    #[test]
    fn the_writer_beside_keeps_its_rate() {
        let (task, plan) = sample_task("memory", 1);
        let workload = Workload::ReadWhileWriting;
        let plan = Plan { workload, seconds: Some(0.5), ops: u64::MAX, write_rate: 1000, ..plan };
        let engine = Memory::new(Lie::None);
        fill::load(&engine, &plan.shape, 0..plan.shape.n).unwrap();
        let common = Common::new(&engine, &plan).unwrap();
        let mut crew = Crew::prepare(&engine, &plan, &common).unwrap();
        let outcome = crew.run(&engine, &task, &plan).unwrap();
        let rate = outcome.beside.unwrap().ops as f64 / outcome.seconds;
        assert!((100.0..=1100.0).contains(&rate), "{rate}"); // a loaded machine may hold it up, nothing speeds it up
    }

    #[test]
    fn every_lie_is_noticed() {
        use Workload::{BlobLoad, BlobOverwrite, BlobRead, BulkLoad, FillRandom, FillSeq, FillSync, Overwrite};
        use Workload::{
            Partitions64, Queue, ReadMissing, ReadRandom, ReadReverse, ReadSeq, ReadWhileWriting, ReadZipf,
        };
        use Workload::{Scan10, Scan10Reverse, Scan100, Scan100Reverse, SeekRandom};
        use Workload::{YcsbA, YcsbB, YcsbC, YcsbD, YcsbE, YcsbF};
        let ascending = [Scan10, Scan100, SeekRandom, ReadSeq];
        let descending = [Scan10Reverse, Scan100Reverse, ReadReverse];
        let scans = [&ascending[..], &descending[..]].concat();
        let fills = [FillSeq, FillRandom, FillSync, BulkLoad, BlobLoad];
        let gets = [ReadRandom, ReadZipf, BlobRead, YcsbC, YcsbD, Partitions64, ReadWhileWriting];
        let lies = [
            (Lie::Stale, vec![Overwrite, BlobOverwrite, ReadWhileWriting, YcsbA, YcsbB, YcsbF]),
            (Lie::Forgets, [&fills[..], &gets, &[ReadSeq, ReadReverse, Queue, YcsbE]].concat()),
            (Lie::Flips, [&fills[..], &gets, &[Overwrite, BlobOverwrite, YcsbA, YcsbB, YcsbF]].concat()),
            (Lie::FindsAll, vec![ReadMissing, Partitions64, Queue]),
            (Lie::SkipsFirst, [&scans[..], &[Queue, YcsbE]].concat()),
            (Lie::Repeats, [&scans[..], &[Queue, YcsbE]].concat()),
            (Lie::KeepsDeleted, vec![Queue]),
            (Lie::Disorders, [&scans[..], &[Queue, YcsbE]].concat()),
            (Lie::EndsEarly, [&scans[..], &[Queue]].concat()),
            (Lie::OnePartition, vec![Partitions64]),
        ];
        for (lie, workloads) in lies {
            for workload in workloads {
                match try_out(workload, lie, 1) {
                    Ok(_) => panic!("{lie:?} went unnoticed by {workload:?}"),
                    Err(failure) => assert_eq!(Told::of(&failure).kind, Kind::Wrong, "{workload:?}: {failure}"),
                }
            }
        }
    }
}

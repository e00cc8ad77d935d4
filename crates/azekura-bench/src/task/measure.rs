//! Loads a database, or runs one workload on it and measures it; in a child process. The names of the figures are those
//! of the JSON output, which scripts read.

use crate::engine::api::object;
use crate::engine::registry::{self, Settled, settle};
use crate::engine::{Engine, Options, Sync};
use crate::error::{KnownError, Result};
use crate::measure::disk;
use crate::measure::meter::{Meter, Progress, percentile_us};
use crate::measure::process::{Usage, memory_bytes};
use crate::task::plan::{Plan, Task};
use crate::task::threads::{Outcome, Workers};
use crate::workload::Shape;
use crate::workload::data::load;
use serde_json::{Map, Value, json};
use std::hint::black_box;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Records that are read back, uncounted, after a workload that writes, and bytes after which that is enough.
const VERIFIED: (f64, f64) = (20_000.0, 1e9);
/// Operations by which the cost of the bench itself is measured, and bytes after which that is enough.
const HARNESS: (f64, f64) = (400_000.0, 5e8);

/// The counts from which the figures of a measurement are computed.
#[derive(Default)]
pub(crate) struct Facts {
    pub(crate) outcome: Outcome,
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
    /// The figures, as one JSON object.
    pub(crate) fn figures(self, engine: &str, plan: &Plan, error: Option<&KnownError>) -> Value {
        let Facts { outcome, used, used_settling, settled, .. } = self;
        let (tally, latencies) = (&outcome.tally, &outcome.tally.latencies);
        let live_bytes = self.loaded_bytes.saturating_add_signed(tally.live_bytes).max(1) as f64;
        let user_bytes = tally.user_bytes + outcome.beside.map_or(0, |beside| beside.user_bytes);
        let cpu_s = used.cpu_s + used_settling.cpu_s;
        let dirtied = used.dirtied_bytes + used_settling.dirtied_bytes;
        let syscall = used.syscall_write_bytes + used_settling.syscall_write_bytes;
        let micros = |percentile| percentile_us(latencies, percentile);
        let mut figures = json!({
            "engine": engine, "workload": plan.workload.name, "round": plan.round, "threads": plan.threads,
            "n": plan.shape.n, "ops": tally.ops, "elapsed_s": outcome.seconds,
            "ops_per_s": tally.ops as f64 / outcome.seconds.max(1e-9),
            "settled_ops_per_s": tally.ops as f64 / (outcome.seconds + settled.seconds).max(1e-9),
            "mean_us": latencies.mean() / 1000.0, "p50_us": micros(50.0), "p90_us": micros(90.0),
            "p99_us": micros(99.0), "p999_us": micros(99.9), "max_us": latencies.max() as f64 / 1000.0,
            "cpu_s": used.cpu_s, "settle_cpu_s": used_settling.cpu_s,
            "cpu_us_per_op": cpu_s * 1e6 / tally.ops.max(1) as f64,
            "settle_s": settled.seconds, "settled": settled.reached, "user_bytes": user_bytes,
            "dirtied_bytes": dirtied, "syscall_write_bytes": syscall,
            "device_read_bytes": used.device_read_bytes + used_settling.device_read_bytes,
            "write_amp": (user_bytes > 0).then(|| dirtied.max(syscall) as f64 / user_bytes as f64),
            "disk_bytes": self.disk_bytes, "space_amp": self.disk_bytes as f64 / live_bytes,
            "peak_rss_bytes": self.peak_rss_bytes, "anonymous_rss_bytes": outcome.anonymous_rss_bytes,
            "intervals_ops_per_s": outcome.intervals, "series": outcome.series, "engine_stats": self.stats,
            "error": error.map(|known| &known.error), "error_kind": error.map(|known| known.kind),
        });
        for (name, value) in self.extra {
            figures[name] = value;
        }
        figures
    }
}

/// Fills a new database and settles it; without syncs, whatever the run asks for.
pub(crate) fn load_and_settle(task: &Task, shape: &Shape) -> Result<Value> {
    let options = Options { sync: Sync::None, ..task.options.clone() };
    let engine = registry::open(&task.engine, &task.dir, &options)?;
    let start = Instant::now();
    load(engine.as_ref(), shape, 0..shape.n)?;
    let settled = settle(&[engine.as_ref()], start.elapsed())?;
    engine.sync()?;
    engine.close()?;
    Ok(json!({"seconds": start.elapsed().as_secs_f64(), "settled": settled.reached}))
}

/// Runs the workload of `plan` and measures it.
pub(crate) fn measure(task: &Task, plan: &Plan) -> Result<Value> {
    evict(task, plan)?;
    let engine = registry::open(&task.engine, &task.dir, &task.options)?;
    let mut workers = Workers::prepare(engine.as_ref(), plan)?;
    if workers.warm_up(engine.as_ref(), plan.warm_ops)? {
        evict(task, plan)?;
    }
    let syncs_before = log_syncs(engine.as_ref());
    let before = Usage::now();
    let mut outcome = workers.run(engine.as_ref(), task, plan)?;
    let after = Usage::now();
    let syncs = syncs_before.zip(log_syncs(engine.as_ref())).map(|(before, after)| after.saturating_sub(before));
    let extra = extra(plan, &outcome, syncs);
    let mut settled = Settled { seconds: 0.0, reached: true };
    if plan.workload.writes() {
        let further = workers.partitions.iter().map(Box::as_ref);
        let all: Vec<&dyn Engine> = std::iter::once(engine.as_ref()).chain(further).collect();
        settled = settle(&all, Duration::from_secs_f64(outcome.seconds))?;
    }
    let used_settling = Usage::now() - after;
    let peak_rss_bytes = memory_bytes("VmHWM");
    outcome.anonymous_rss_bytes = outcome.anonymous_rss_bytes.max(memory_bytes("RssAnon"));
    let loaded_bytes = workers.loaded_bytes;
    workers.verify(engine.as_ref(), (VERIFIED.0).min(VERIFIED.1 / plan.shape.mean_record_bytes()).max(1.0) as u64)?;
    let stats = engine.stats();
    let disk_bytes = disk::allocated_bytes(&task.dir);
    drop(workers); // it holds partitions
    engine.close()?;
    let used = after - before;
    let facts = Facts { outcome, loaded_bytes, extra, used, used_settling, settled, disk_bytes, peak_rss_bytes, stats };
    Ok(facts.figures(&task.engine, plan, None))
}

/// Evicts the database from the page cache, if the plan asks for it.
pub(crate) fn evict(task: &Task, plan: &Plan) -> Result<()> {
    if plan.settings.cold && task.dir.exists() { disk::evict(&task.dir) } else { Ok(()) }
}

/// How often the engine has synced its log, if it reports that.
fn log_syncs(engine: &dyn Engine) -> Option<u64> {
    engine.stats().get("log_syncs").and_then(Value::as_u64)
}

/// The figures that only this workload has.
fn extra(plan: &Plan, outcome: &Outcome, syncs: Option<u64>) -> Map<String, Value> {
    let (seconds, ops) = (outcome.seconds.max(1e-9), outcome.tally.ops as f64);
    if let Some(writer) = &outcome.beside {
        let micros = |percentile| percentile_us(&writer.latencies, percentile);
        let rate = writer.ops as f64 / seconds;
        return object(json!({"writes_per_s": rate, "write_p50_us": micros(50.0), "write_p99_us": micros(99.0)}));
    }
    if let Some(consumes) = &outcome.tally.consumes {
        let micros = |percentile| percentile_us(consumes, percentile);
        let longest = consumes.max() as f64 / 1000.0;
        return object(
            json!({"consume_p50_us": micros(50.0), "consume_p99_us": micros(99.0), "consume_max_us": longest}),
        );
    }
    if plan.workload.name != "fillsync" {
        return Map::new();
    }
    let commits_per_sync = syncs.filter(|syncs| *syncs > 0).map(|syncs| ops / syncs as f64);
    object(json!({"commits_per_s": ops / seconds, "commits_per_sync": commits_per_sync}))
}

/// Nanoseconds of a put and a get without an engine: making the key, making or checking the value, reading the clock,
/// counting. They are included in the figures of every engine.
pub(crate) fn harness_cost(shape: &Shape) -> Value {
    let (progress, never) = (Progress::default(), AtomicBool::new(false));
    let count = HARNESS.0.min(HARNESS.1 / shape.mean_record_bytes()).max(100.0) as u64;
    let timed = |act: &mut dyn FnMut(u64)| {
        let (mut meter, start) = (Meter::start(&progress, count, None, &never), Instant::now());
        (0..count).for_each(|index| {
            act(index);
            meter.done(1);
        });
        start.elapsed().as_secs_f64() * 1e9 / count as f64
    };
    let (mut key, mut value) = (Vec::new(), Vec::new());
    let put_ns = timed(&mut |index| {
        shape.key(index, &mut key);
        shape.value(index, 1, &mut value);
        black_box((&key, &value));
    });
    // A record of about the mean size represents all records.
    let distance = |index: &u64| (shape.record_bytes(*index) as f64 - shape.mean_record_bytes()).abs();
    let typical = (0..1000).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(0);
    shape.value(typical, 1, &mut value);
    let get_ns = timed(&mut |index| {
        shape.key(index, &mut key);
        black_box((&key, shape.check(black_box(typical), black_box(&value))));
    });
    json!({"put_ns": put_ns, "get_ns": get_ns})
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{Facts, extra, harness_cost};
    use crate::engine::Options;
    use crate::engine::memory::{Lie, Memory};
    use crate::engine::registry::Settled;
    use crate::error::{ErrorKind, KnownError, Result};
    use crate::measure::process::Usage;
    use crate::task::plan::{Job, Plan, Settings, Task};
    use crate::task::threads::{Outcome, Workers};
    use crate::workload::data::{SMALL_RECORDS, load};
    use crate::workload::{Shape, Workload};
    use serde_json::{Value, json};

    /// Not a multiple of any number of threads.
    const N: u64 = 3001;

    pub(crate) fn workload(name: &str) -> Workload {
        Workload::try_from(name.to_owned()).unwrap()
    }

    /// A small measurement that is not run.
    pub(crate) fn sample_plan(name: &str) -> Plan {
        Plan {
            workload: workload(name),
            shape: Shape { n: 100, least_value: 84, value_size: 84, ..SMALL_RECORDS },
            ops: 100,
            warm_ops: 0,
            threads: 1,
            round: 1,
            settings: Settings {
                seconds: None,
                seek_nexts: 10,
                write_rate: 10_000,
                depth: None,
                cold: false,
                seed: 1,
                seconds_report: false,
            },
        }
    }

    pub(crate) fn sample_task(engine: &str, plan: &Plan) -> Task {
        Task {
            engine: engine.into(),
            dir: "d".into(),
            options: Options::cached(1 << 20),
            job: Job::Measure(plan.clone()),
        }
    }

    /// The figures of a measurement of 100 operations that took `seconds`.
    pub(crate) fn sample(engine: &str, round: u32, seconds: f64) -> Value {
        let mut outcome = Outcome { seconds, ..Outcome::default() };
        (outcome.tally.ops, outcome.tally.user_bytes, outcome.tally.live_bytes) = (100, 10_000, 10_000);
        outcome.intervals = vec![50.0, 50.0];
        let facts = Facts {
            outcome,
            extra: super::object(json!({"commits_per_s": 50.0})),
            used: Usage { cpu_s: 0.5, dirtied_bytes: 30_000, syscall_write_bytes: 10_000, ..Usage::default() },
            used_settling: Usage { cpu_s: 0.1, dirtied_bytes: 10_000, ..Usage::default() },
            settled: Settled { seconds, reached: true },
            disk_bytes: 15_000,
            ..Facts::default()
        };
        facts.figures(engine, &Plan { round, ..sample_plan("fillrandom") }, None)
    }

    /// The row of a measurement that failed.
    pub(crate) fn failed(engine: &str, kind: ErrorKind) -> Value {
        Facts::default().figures(engine, &sample_plan("fillrandom"), Some(&KnownError { kind, error: "why".into() }))
    }

    #[test]
    fn figures_follow_from_the_counts() {
        let figures = sample("azekura", 1, 2.0);
        for (field, expected) in [
            ("ops_per_s", json!(50.0)),
            ("settled_ops_per_s", json!(25.0)),
            ("write_amp", json!(4.0)),
            ("space_amp", json!(1.5)),
            ("cpu_us_per_op", json!(6000.0)),
            ("commits_per_s", json!(50.0)),
            ("workload", json!("fillrandom")),
            ("error", Value::Null),
        ] {
            assert_eq!(figures[field], expected, "{field}");
        }
        let failed = failed("fjall", ErrorKind::TimedOut);
        assert_eq!((&failed["error_kind"], &failed["ops_per_s"]), (&json!("timed_out"), &json!(0.0)));
        let names = |row: &Value| row.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&figures)[..names(&failed).len()], names(&failed));
    }

    #[test]
    fn harness_cost_is_positive() {
        let cost = harness_cost(&SMALL_RECORDS);
        assert!(cost["put_ns"].as_f64() > Some(1.0) && cost["get_ns"].as_f64() > Some(1.0), "{cost}");
    }

    /// Enough for every fault to show; enough time for the writer beside the readers to begin.
    fn ops_of(workload: Workload) -> u64 {
        if workload.beside.is_some() {
            200_000
        } else if workload.fills() {
            N
        } else {
            4000
        }
    }

    /// Prepares, runs and verifies a workload on an engine with a fault.
    fn run(plan: &Plan, lie: Lie) -> Result<Outcome> {
        let engine = Memory::new(lie);
        if plan.workload.loads {
            load(&engine, &plan.shape, 0..plan.shape.n)?;
        }
        let mut workers = Workers::prepare(&engine, plan)?;
        workers.warm_up(&engine, 10)?;
        let outcome = workers.run(&engine, &sample_task("memory", plan), plan)?;
        workers.verify(&engine, 20_000)?;
        Ok(outcome)
    }

    fn plan_of(workload: Workload, threads: u64) -> Plan {
        let mut plan = Plan { workload, threads, ops: ops_of(workload), ..sample_plan("fillrandom") };
        (plan.shape.n, plan.shape.sequential) = (N, workload.sequential);
        (plan.settings.depth, plan.settings.write_rate) = (Some(200), 0);
        if workload.blobs {
            (plan.shape.least_value, plan.shape.value_size) = (100, 3000);
        }
        plan
    }

    /// Those that are measured by threads.
    fn workloads() -> impl Iterator<Item = Workload> {
        Workload::all().filter(|workload| !workload.single_threaded)
    }

    #[test]
    fn every_workload_passes_on_a_correct_engine() {
        for workload in workloads() {
            for threads in [1, 3] {
                let plan = plan_of(workload, threads);
                let name = workload.name.as_str();
                let outcome = run(&plan, Lie::None).unwrap_or_else(|e| panic!("{name}: {e}"));
                let tally = &outcome.tally;
                assert_eq!((tally.ops, tally.latencies.len()), (ops_of(workload), ops_of(workload)), "{name}");
                let inserts = !workload.loads || ["ycsb-d", "ycsb-e"].contains(&name);
                assert_eq!(tally.live_bytes > 0, inserts && name != "queue", "{name}");
                assert_eq!(tally.user_bytes > 0, workload.writes() && workload.beside.is_none(), "{name}");
                assert!(outcome.series.last().is_some_and(|last| last.s > 0.0), "{name}");
                let names: Vec<String> = extra(&plan, &outcome, Some(10)).keys().cloned().collect();
                let expected: &[&str] = match name {
                    "fillsync" => &["commits_per_s", "commits_per_sync"],
                    "readwhilewriting" => &["writes_per_s", "write_p50_us", "write_p99_us"],
                    "queue" => &["consume_p50_us", "consume_p99_us", "consume_max_us"],
                    _ => &[],
                };
                assert_eq!(names, expected, "{name}");
            }
        }
    }

    #[test]
    fn time_limit_ends_every_workload() {
        for workload in workloads() {
            let mut plan = Plan { ops: u64::MAX, ..plan_of(workload, 1) };
            plan.settings.seconds = Some(0.05);
            // A full scan that resumes at its position: more than one segment.
            plan.shape.n = if workload.name.starts_with("readseq") { 150_000 } else { 10_000 };
            let outcome = run(&plan, Lie::None).unwrap_or_else(|e| panic!("{}: {e}", workload.name));
            assert!(outcome.tally.ops > 0 && outcome.seconds < 20.0, "{}", workload.name);
        }
    }

    #[test]
    fn paced_writer_stays_below_its_rate() {
        let mut plan = Plan { ops: u64::MAX, ..plan_of(workload("readwhilewriting"), 1) };
        (plan.settings.seconds, plan.settings.write_rate) = (Some(0.5), 1000);
        let outcome = run(&plan, Lie::None).unwrap();
        let rate = outcome.beside.unwrap().ops as f64 / outcome.seconds;
        assert!(rate > 0.0 && rate <= 1100.0, "{rate}");
    }

    #[test]
    fn every_fault_is_detected() {
        let scans = "scan10 scan100 seekrandom readseq scan10-reverse scan100-reverse readreverse";
        let fills = "fillseq fillrandom fillsync bulkload blobload";
        let gets = "readrandom readzipf blobread ycsb-c ycsb-d partitions64 readwhilewriting";
        let updates = "overwrite bloboverwrite ycsb-a ycsb-b ycsb-f";
        for (lie, names) in [
            (Lie::Stale, [updates, "readwhilewriting", ""]),
            (Lie::Forgets, [fills, gets, "readseq readreverse queue ycsb-e"]),
            (Lie::Flips, [fills, gets, updates]),
            (Lie::FindsAll, ["readmissing partitions64 queue", "", ""]),
            (Lie::SkipsFirst, [scans, "queue ycsb-e", ""]),
            (Lie::Repeats, [scans, "queue ycsb-e", ""]),
            (Lie::KeepsDeleted, ["queue", "", ""]),
            (Lie::Disorders, [scans, "queue ycsb-e", ""]),
            (Lie::EndsEarly, [scans, "queue", ""]),
            (Lie::OnePartition, ["partitions64", "", ""]),
        ] {
            for name in names.iter().flat_map(|names| names.split_whitespace()) {
                match run(&plan_of(workload(name), 1), lie) {
                    Ok(_) => panic!("{lie:?} was not detected by {name}"),
                    Err(error) => assert_eq!(KnownError::of(&error).kind, ErrorKind::Wrong, "{name}: {error}"),
                }
            }
        }
    }
}

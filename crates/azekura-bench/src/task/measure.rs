//! Loads a database, runs one workload on it and measures it, or opens it after a clean close or a kill; in a child
//! process. The names of the figures are those
//! of the JSON output, which scripts read.

use crate::engine::registry::{self, Settled, settle};
use crate::engine::{Engine, Options, Sync, object};
use crate::error::{KnownError, Result, wrong};
use crate::measure::disk;
use crate::measure::meter::{Meter, Progress, percentile_us};
use crate::measure::process::{Usage, memory_bytes, millis};
use crate::task::child::{Plan, Task};
use crate::task::threads::{Outcome, Workers};
use crate::workload::Shape;
use crate::workload::data::{FIRST_GENERATION, load};
use anyhow::{bail, ensure};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Records that are read back, uncounted, after a workload that writes, and bytes after which that is enough.
const VERIFIED: (f64, f64) = (20_000.0, 1e9);
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
        let whole_seconds = outcome.series.len().saturating_sub(1);
        let intervals = outcome.series.iter().take(whole_seconds).map(|sample| sample.ops_per_s);
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
            "intervals_ops_per_s": intervals.collect::<Vec<_>>(), "series": outcome.series, "engine_stats": self.stats,
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
    let peak_rss_bytes = memory_bytes(|own| own.vmhwm);
    outcome.anonymous_rss_bytes = outcome.anonymous_rss_bytes.max(memory_bytes(|own| own.rssanon));
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
fn evict(task: &Task, plan: &Plan) -> Result<()> {
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

/// Writes the records of `plan` in order, prints how many, and kills this process: nothing is flushed or closed.
pub(crate) fn write_and_die(task: &Task, plan: &Plan) -> Result<Value> {
    let engine = registry::open(&task.engine, &task.dir, &task.options)?;
    let deadline = plan.settings.seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds));
    let end = (0..plan.ops.min(plan.shape.n)).take_while(|_| deadline.is_none_or(|deadline| Instant::now() < deadline));
    let written = put(engine.as_ref(), &plan.shape, end)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", json!({"written": written}))?;
    out.flush()?;
    kill_process(getpid(), Signal::KILL)?;
    bail!("a process survived its own kill")
}

/// Puts records one by one; returns how many.
fn put(engine: &dyn Engine, shape: &Shape, indices: impl Iterator<Item = u64>) -> Result<u64> {
    let (mut key, mut value, mut count) = (Vec::new(), Vec::new(), 0);
    for index in indices {
        shape.key(index, &mut key);
        shape.value(index, FIRST_GENERATION, &mut value);
        engine.put(&key, &value)?;
        count += 1;
    }
    Ok(count)
}

/// Looks for `written` records. Returns how many are lost, how many of those precede a found record, and the bytes of
/// those that were found.
fn find_written(engine: &dyn Engine, shape: &Shape, written: u64) -> Result<(u64, u64, u64)> {
    let (mut lost, mut holes, mut bytes, mut key) = (0, 0, 0, Vec::new());
    for index in 0..written {
        match shape.find(engine, index, &mut key)? {
            None => lost += 1,
            Some(FIRST_GENERATION) => (holes, bytes) = (lost, bytes + shape.record_bytes(index)),
            Some(other) => return Err(wrong(format!("record {index} has generation {other}"))),
        }
    }
    Ok((lost, holes, bytes))
}

/// Opens the database and reads one record: one operation. `written`: records that were written before a kill, each of
/// which is looked for; otherwise the database was closed cleanly.
pub(crate) fn open_and_get(task: &Task, plan: &Plan, written: Option<u64>) -> Result<Value> {
    evict(task, plan)?;
    let (progress, never, before) = (Progress::default(), AtomicBool::new(false), Usage::now());
    let mut meter = Meter::start(&progress, 1, None, &never);
    let start = Instant::now();
    let engine = registry::open(&task.engine, &task.dir, &task.options)?;
    let open_ms = millis(start);
    let then = Instant::now();
    let first = if written.is_some() { 0 } else { plan.settings.seed % plan.shape.n };
    let found = plan.shape.find(engine.as_ref(), first, &mut Vec::new())?;
    let first_get_ms = millis(then);
    meter.done(1);
    ensure!(found.is_some() || written.is_some(), wrong(format!("record {first} was not found")));
    let mut facts = Facts { used: Usage::now() - before, ..Facts::default() };
    (facts.outcome.seconds, facts.outcome.tally) = (start.elapsed().as_secs_f64(), meter.tally);
    let mut losses = json!({});
    facts.loaded_bytes = match written {
        None => plan.shape.total_bytes(),
        Some(written) => {
            let (lost, holes, bytes) = find_written(engine.as_ref(), &plan.shape, written)?;
            losses = json!({"written_records": written, "lost_records": lost, "lost_holes": holes});
            bytes
        }
    };
    facts.peak_rss_bytes = memory_bytes(|own| own.vmhwm);
    facts.outcome.anonymous_rss_bytes = memory_bytes(|own| own.rssanon);
    (facts.stats, facts.settled) = (engine.stats(), Settled { seconds: 0.0, reached: true });
    let start = Instant::now();
    engine.close()?;
    facts.extra = object(json!({"open_ms": open_ms, "first_get_ms": first_get_ms, "close_ms": millis(start)}));
    facts.extra.extend(object(losses));
    facts.disk_bytes = disk::allocated_bytes(&task.dir);
    Ok(facts.figures(&task.engine, plan, None))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{Facts, extra, find_written, open_and_get, put};
    use crate::engine::Options;
    use crate::engine::memory::{Lie, Memory};
    use crate::engine::registry::{self, Settled};
    use crate::error::{ErrorKind, KnownError, Result};
    use crate::measure::process::Usage;
    use crate::task::child::{Job, Plan, Settings, Task};
    use crate::task::threads::{Outcome, Sample, Workers};
    use crate::workload::data::{SMALL_RECORDS, load};
    use crate::workload::spec::WORKLOADS;
    use crate::workload::{Shape, Workload};
    use serde_json::{Value, json};

    /// Not a multiple of any number of threads.
    const N: u64 = 3001;

    /// A small measurement that is not run.
    pub(crate) fn sample_plan(name: &str) -> Plan {
        Plan {
            workload: Workload::named(name),
            shape: Shape { n: 100, least_value: 84, value_size: 84, ..SMALL_RECORDS },
            ops: 100,
            warm_ops: 0,
            threads: 1,
            round: 1,
            settings: Settings { seconds: None, write_rate: 10_000, depth: None, cold: false, seed: 1 },
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
        outcome.series = vec![Sample { ops_per_s: 50.0, ..Sample::default() }; 3];
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

    /// Enough for every fault to show; enough time for the writer beside the readers to begin.
    fn ops_of(workload: &Workload) -> u64 {
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

    fn plan_of(workload: &Workload, threads: u64) -> Plan {
        let (ops, workload) = (ops_of(workload), workload.clone());
        let mut plan = Plan { workload: workload.clone(), threads, ops, ..sample_plan("fillrandom") };
        (plan.shape.n, plan.shape.sequential) = (N, workload.sequential);
        (plan.settings.depth, plan.settings.write_rate) = (Some(200), 0);
        if workload.blobs {
            (plan.shape.least_value, plan.shape.value_size) = (100, 3000);
        }
        plan
    }

    /// Those that are measured by threads.
    fn workloads() -> impl Iterator<Item = &'static Workload> {
        WORKLOADS.iter().filter(|workload| !workload.single_threaded)
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
        let mut plan = Plan { ops: u64::MAX, ..plan_of(&Workload::named("readwhilewriting"), 1) };
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
                match run(&plan_of(&Workload::named(name), 1), lie) {
                    Ok(_) => panic!("{lie:?} was not detected by {name}"),
                    Err(error) => assert_eq!(KnownError::of(&error).kind, ErrorKind::Wrong, "{name}: {error}"),
                }
            }
        }
    }

    #[test]
    fn lost_records_and_holes_are_counted() {
        let shape = Shape { n: 1000, ..sample_plan("recovery").shape };
        let filled = |lie| {
            let engine = Memory::new(lie);
            assert_eq!(put(&engine, &shape, 0..1000).unwrap(), 1000);
            engine
        };
        let all = shape.total_bytes();
        assert_eq!(find_written(&filled(Lie::None), &shape, 1000).unwrap(), (0, 0, all));
        // As if 30 more had been acknowledged: an end is lost.
        assert_eq!(find_written(&filled(Lie::None), &shape, 1030).unwrap(), (30, 0, all));
        let (lost, holes, _) = find_written(&filled(Lie::Forgets), &shape, 1000).unwrap();
        assert!(lost > 0 && holes > 0, "{lost} {holes}");
        let error = find_written(&filled(Lie::Flips), &shape, 1000).unwrap_err();
        assert_eq!(KnownError::of(&error).kind, ErrorKind::Wrong);
    }

    #[test]
    fn openings_have_figures() {
        let (dir, plan) = (tempfile::tempdir().unwrap(), sample_plan("open"));
        let task = Task { dir: dir.path().join("db"), ..sample_task("azekura", &plan) };
        let engine = registry::open("azekura", &task.dir, &task.options).unwrap();
        load(engine.as_ref(), &plan.shape, 0..plan.shape.n).unwrap();
        engine.close().unwrap();
        let opened = open_and_get(&task, &plan, None).unwrap();
        assert!(opened["open_ms"].as_f64().unwrap() > 0.0 && opened["ops"] == 1, "{opened}");
        let recovered = open_and_get(&task, &plan, Some(plan.shape.n + 5)).unwrap();
        let figures = ["lost_records", "lost_holes", "written_records"].map(|name| recovered[name].as_u64().unwrap());
        assert_eq!(figures, [5, 0, plan.shape.n + 5]);
        assert!(recovered["space_amp"].as_f64().unwrap() > 0.0);
    }
}

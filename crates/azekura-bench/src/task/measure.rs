//! Loads a database, runs the threads of one workload on it, samples and measures them, or opens it after a clean close
//! or a kill; in a child process. The names of the figures are those of the JSON output, which scripts read.

use crate::engine::registry::{Settled, settle};
use crate::engine::{Engine, object};
use crate::error::{ErrorKind, KnownError, Result, error_of, wrong};
use crate::measure::disk;
use crate::measure::meter::{Meter, OpStats, Progress, percentile_us};
use crate::measure::process::{Usage, memory_bytes, millis};
use crate::task::child::{Job, Task};
use crate::workload::data::{FIRST_GENERATION, load};
use crate::workload::worker::{Generations, SharedState, ThreadRecords, Worker};
use crate::workload::{Shape, Workload};
use anyhow::{bail, ensure};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// After a workload that writes, at most this many records are read back, uncounted.
const VERIFIED_RECORDS_MAX: f64 = 20_000.0;
/// At most about this many bytes are read back.
const VERIFIED_BYTES_MAX: f64 = 1e9;
/// Time between samples.
const SECOND: Duration = Duration::from_secs(1);
/// Longest time that the sampling thread sleeps before it looks for ended threads.
const LONGEST_PARK: Duration = Duration::from_millis(20);

/// The counts of one measurement, from which its figures are computed.
#[derive(Default)]
pub(crate) struct Measurement {
    /// Seconds from the first operation to the last.
    seconds: f64,
    op_stats: OpStats,
    /// Counts of the concurrent writer, if the workload has one.
    concurrent_writer: Option<OpStats>,
    /// A sample for each second, and one at the end.
    series: Vec<Value>,
    /// Largest anonymous memory seen.
    anonymous_rss_bytes: u64,
    /// Bytes of keys and values of the data set before the measurement.
    loaded_bytes: u64,
    /// Figures that only this workload has.
    extra: Map<String, Value>,
    used: Usage,
    used_settling: Usage,
    settled: Settled,
    disk_bytes: u64,
    peak_rss_bytes: u64,
    engine_stats: Map<String, Value>,
}

impl Measurement {
    /// Bytes of keys and values of a data set that has grown by `grown`.
    fn live_bytes(&self, grown: i64) -> f64 {
        self.loaded_bytes.saturating_add_signed(grown).max(1) as f64
    }
}

/// Carries out a task; called in the child process.
pub(crate) fn perform(task: &Task) -> Result<Value> {
    match task.job {
        Job::Load => load_and_settle(task),
        Job::Measure => measure(task),
        Job::WriteAndDie => write_and_die(task),
        Job::Recover(written) => open_and_get(task, Some(written)),
        Job::Open => open_and_get(task, None),
    }
}

/// The figures of a measurement, or of one that ended with an error, as one JSON object.
pub(crate) fn figures(measurement: Measurement, task: &Task, error: Option<&KnownError>) -> Value {
    let Measurement { op_stats, seconds, used, used_settling, settled, series, .. } = &measurement;
    let user_bytes = op_stats.user_bytes + measurement.concurrent_writer.as_ref().map_or(0, |writer| writer.user_bytes);
    let all = *used + *used_settling;
    let micros = |percentile| percentile_us(&op_stats.latencies, percentile);
    let intervals = series.iter().take(series.len().saturating_sub(1)).map(|sample| &sample["ops_per_s"]);
    let mut figures = json!({
        "engine": task.engine, "workload": task.workload.name, "round": task.round, "threads": task.threads,
        "n": task.shape.n, "ops": op_stats.ops, "elapsed_s": seconds,
        "ops_per_s": op_stats.ops as f64 / seconds.max(1e-9),
        "settled_ops_per_s": op_stats.ops as f64 / (seconds + settled.seconds).max(1e-9),
        "mean_us": op_stats.latencies.mean() / 1000.0, "p50_us": micros(50.0), "p90_us": micros(90.0),
        "p99_us": micros(99.0), "p999_us": micros(99.9), "max_us": op_stats.latencies.max() as f64 / 1000.0,
        "cpu_s": used.cpu_s, "settle_cpu_s": used_settling.cpu_s,
        "cpu_us_per_op": all.cpu_s * 1e6 / op_stats.ops.max(1) as f64,
        "settle_s": settled.seconds, "settled": settled.reached, "user_bytes": user_bytes,
        "dirtied_bytes": all.dirtied_bytes, "syscall_write_bytes": all.syscall_write_bytes,
        "device_read_bytes": all.device_read_bytes,
        "write_amp": (user_bytes > 0).then(|| all.written_bytes() as f64 / user_bytes as f64),
        "disk_bytes": measurement.disk_bytes,
        "space_amp": measurement.disk_bytes as f64 / measurement.live_bytes(op_stats.live_bytes),
        "peak_rss_bytes": measurement.peak_rss_bytes, "anonymous_rss_bytes": measurement.anonymous_rss_bytes,
        "intervals_ops_per_s": intervals.collect::<Vec<_>>(), "series": series,
        "engine_stats": measurement.engine_stats,
        "error": error.map(|known| &known.error), "error_kind": error.map(|known| known.kind),
    });
    for (name, value) in measurement.extra {
        figures[name] = value;
    }
    figures
}

/// Fills a new database and settles it.
fn load_and_settle(task: &Task) -> Result<Value> {
    let engine = task.open()?;
    let start = Instant::now();
    load(engine.as_ref(), &task.shape, 0..task.shape.n)?;
    let settled = settle(&[engine.as_ref()], start.elapsed())?;
    engine.sync()?;
    engine.close()?;
    Ok(json!({"seconds": start.elapsed().as_secs_f64(), "settled": settled.reached}))
}

/// Runs the workload of `task` and measures it.
fn measure(task: &Task) -> Result<Value> {
    evict(task)?;
    let opened = task.open()?;
    let engine = opened.as_ref();
    let shared = shared_state(engine, task)?;
    let mut workers = Workers::prepare(&shared, task)?;
    warm_up(&shared, task)?;
    let (syncs_before, before) = (log_syncs(engine), Usage::now());
    let mut measurement = workers.run(task)?;
    let after = Usage::now();
    let syncs = syncs_before.zip(log_syncs(engine)).map(|(before, after)| after.saturating_sub(before));
    measurement.used = after - before;
    measurement.extra = extra(task, &measurement, syncs);
    measurement.settled.reached = true;
    if task.workload.writes() {
        let all: Vec<&dyn Engine> = std::iter::once(engine).chain(shared.partitions.iter().map(Box::as_ref)).collect();
        measurement.settled = settle(&all, Duration::from_secs_f64(measurement.seconds))?;
    }
    measurement.used_settling = Usage::now() - after;
    measurement.peak_rss_bytes = memory_bytes(|own| own.vmhwm);
    measurement.anonymous_rss_bytes = measurement.anonymous_rss_bytes.max(memory_bytes(|own| own.rssanon));
    workers.verify(VERIFIED_RECORDS_MAX.min(VERIFIED_BYTES_MAX / task.shape.mean_record_bytes()).max(1.0) as u64)?;
    measurement.engine_stats = engine.stats();
    measurement.disk_bytes = disk::allocated_bytes(&task.dir);
    drop(workers);
    drop(shared); // it holds partitions
    opened.close()?;
    Ok(figures(measurement, task, None))
}

/// Carries out uncounted operations with other choices than the measured ones, if the workload has a warm-up.
fn warm_up(shared: &SharedState<'_>, task: &Task) -> Result<()> {
    let Some(name) = &task.workload.warm_up else { return Ok(()) };
    let (progress, never) = (Progress::default(), AtomicBool::new(false));
    let records = ThreadRecords { shape: task.shape, thread: 0, threads: 1 };
    let mut worker = Worker::new(&Workload::named(name), shared, records, !task.settings.seed);
    worker.work(Meter::start(&progress, task.warm_ops, None, &never))?;
    evict(task)
}

/// Evicts the database from the page cache, if the task asks for it.
fn evict(task: &Task) -> Result<()> {
    if task.settings.cold && task.dir.exists() { disk::evict(&task.dir) } else { Ok(()) }
}

/// How often the engine has synced its log, if it reports that.
fn log_syncs(engine: &dyn Engine) -> Option<u64> {
    engine.stats().get("log_syncs").and_then(Value::as_u64)
}

/// The figures that only this workload has.
fn extra(task: &Task, measurement: &Measurement, syncs: Option<u64>) -> Map<String, Value> {
    let (seconds, ops) = (measurement.seconds.max(1e-9), measurement.op_stats.ops as f64);
    let consumes = &measurement.op_stats.consumes;
    object(if let Some(writer) = &measurement.concurrent_writer {
        let micros = |percentile| percentile_us(&writer.latencies, percentile);
        let rate = writer.ops as f64 / seconds;
        json!({"writes_per_s": rate, "write_p50_us": micros(50.0), "write_p99_us": micros(99.0)})
    } else if !consumes.is_empty() {
        let [p50, p99, longest] = [50.0, 99.0, 100.0].map(|percentile| percentile_us(consumes, percentile));
        json!({"consume_p50_us": p50, "consume_p99_us": p99, "consume_max_us": longest})
    } else if task.workload.name == "fillsync" {
        let commits_per_sync = syncs.filter(|syncs| *syncs > 0).map(|syncs| ops / syncs as f64);
        json!({"commits_per_s": ops / seconds, "commits_per_sync": commits_per_sync})
    } else {
        json!({})
    })
}

/// Runs the workload of `task`, prints how many records it wrote, and kills this process: nothing is flushed or closed.
fn write_and_die(task: &Task) -> Result<Value> {
    let engine = task.open()?;
    let written = Workers::prepare(&shared_state(engine.as_ref(), task)?, task)?.run(task)?.op_stats.ops;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", json!({"written": written}))?;
    out.flush()?;
    kill_process(getpid(), Signal::KILL)?;
    bail!("a process survived its own kill")
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
fn open_and_get(task: &Task, written: Option<u64>) -> Result<Value> {
    evict(task)?;
    let (before, start) = (Usage::now(), Instant::now());
    let engine = task.open()?;
    let open_ms = millis(start);
    let then = Instant::now();
    let first = if written.is_some() { 0 } else { task.settings.seed % task.shape.n };
    let found = task.shape.find(engine.as_ref(), first, &mut Vec::new())?;
    let (first_get_ms, took) = (millis(then), start.elapsed());
    let mut measurement =
        Measurement { seconds: took.as_secs_f64(), used: Usage::now() - before, ..Measurement::default() };
    ensure!(found.is_some() || written.is_some(), wrong(format!("record {first} was not found")));
    measurement.op_stats.ops = 1;
    measurement.op_stats.latencies.saturating_record(took.as_nanos() as u64);
    measurement.loaded_bytes = task.shape.total_bytes();
    let mut losses = json!({});
    if let Some(written) = written {
        let (lost, holes, bytes) = find_written(engine.as_ref(), &task.shape, written)?;
        measurement.loaded_bytes = bytes;
        losses = json!({"written_records": written, "lost_records": lost, "lost_holes": holes});
    }
    measurement.peak_rss_bytes = memory_bytes(|own| own.vmhwm);
    measurement.anonymous_rss_bytes = memory_bytes(|own| own.rssanon);
    measurement.engine_stats = engine.stats();
    measurement.settled.reached = true;
    let start = Instant::now();
    engine.close()?;
    measurement.extra = object(json!({"open_ms": open_ms, "first_get_ms": first_get_ms, "close_ms": millis(start)}));
    measurement.extra.extend(object(losses));
    measurement.disk_bytes = disk::allocated_bytes(&task.dir);
    Ok(figures(measurement, task, None))
}

/// The state that the threads of a task have in common: the open database, its further partitions and its generations.
fn shared_state<'a>(engine: &'a dyn Engine, task: &Task) -> Result<SharedState<'a>> {
    let refused = |error| error_of(ErrorKind::Refused, format!("cannot open partitions: {error}"));
    let partitions = (0..task.workload.partitions).map(|i| engine.partition(&format!("part-{i:02}")));
    Ok(SharedState {
        shape: task.shape,
        depth: task.settings.depth.unwrap_or(task.shape.n / 10).max(1),
        engine,
        partitions: partitions.collect::<Result<_>>().map_err(refused)?,
        generations: Generations::new(if task.workload.updates() { task.shape.n } else { 0 }),
    })
}

/// The threads of a measurement.
struct Workers<'a> {
    /// The counted ones, then the concurrent writer, which runs until they end.
    workers: Vec<Worker<'a>>,
    counted: usize,
    /// Bytes of the data set before the measurement.
    loaded_bytes: u64,
}

impl<'a> Workers<'a> {
    /// Makes the workers of `task` and their queues in the database.
    fn prepare(shared: &'a SharedState<'a>, task: &Task) -> Result<Workers<'a>> {
        let Task { shape, settings, workload, threads, .. } = task;
        let worker = |workload: &Workload, thread, threads, seed| {
            Worker::new(workload, shared, ThreadRecords { shape: *shape, thread, threads }, seed)
        };
        let mut workers: Vec<_> = (0..*threads).map(|i| worker(workload, i, *threads, settings.seed)).collect();
        let mut loaded_bytes = if workload.loads { shape.total_bytes() } else { 0 };
        for worker in &mut workers {
            loaded_bytes += worker.prepare()?;
        }
        let counted = workers.len();
        if let Some(name) = &workload.concurrent_writer {
            workers.push(worker(&Workload::named(name), 0, 1, settings.seed + 1).paced(settings.write_rate));
        }
        Ok(Workers { workers, counted, loaded_bytes })
    }

    /// Starts the threads and samples them. The first error ends them all.
    fn run(&mut self, task: &Task) -> Result<Measurement> {
        let (counted, threads) = (self.counted, self.counted as u64);
        let progress: Vec<Progress> = self.workers.iter().map(|_| Progress::default()).collect();
        let (failed, done, watcher) = (AtomicBool::new(false), AtomicBool::new(false), thread::current());
        let begun = (Instant::now(), Usage::now());
        let deadline = task.settings.seconds.map(|seconds| begun.0 + Duration::from_secs_f64(seconds));
        let mut measurement = Measurement { loaded_bytes: self.loaded_bytes, ..Measurement::default() };
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
                    result.map(|op_stats| (op_stats, ended))
                }));
            }
            let finished = || running[..counted].iter().all(|thread| thread.is_finished());
            watch(task, (&progress, counted), begun, &mut measurement, finished);
            done.store(true, Ordering::Relaxed);
            for (i, thread) in running.into_iter().enumerate() {
                let (op_stats, ended) = thread.join().expect("a thread panicked")?;
                if i < counted {
                    measurement.op_stats += op_stats;
                    measurement.seconds = measurement.seconds.max((ended - begun.0).as_secs_f64());
                } else {
                    measurement.concurrent_writer = Some(op_stats);
                }
            }
            Ok(measurement)
        })
    }

    /// Lets each worker read its records back: about `max_records` in all.
    fn verify(&mut self, max_records: u64) -> Result<()> {
        let each = (max_records / self.workers.len() as u64).max(1);
        self.workers.iter_mut().try_for_each(|worker| worker.verify(each))
    }
}

/// Samples a measurement until it has `finished`. Runs on the thread that started the others and only reads their
/// progress: that of the `counted` threads, then that of the concurrent writer.
fn watch(
    task: &Task,
    (progress, counted): (&[Progress], usize),
    begun: (Instant, Usage),
    measurement: &mut Measurement,
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
        measurement.series.push(json!({
            "s": (now - begun.0).as_secs_f64(),
            "ops_per_s": ((done - done_before) as f64 / (now - last).as_secs_f64()).round(),
            "write_amp": (user_bytes > 0).then(|| written_bytes as f64 / user_bytes as f64),
            "space_amp": disk::allocated_bytes(&task.dir) as f64 / measurement.live_bytes(grown),
            "rss_bytes": memory_bytes(|own| own.vmrss),
        }));
        if ended {
            return;
        }
        measurement.anonymous_rss_bytes = measurement.anonymous_rss_bytes.max(memory_bytes(|own| own.rssanon));
        if task.settings.cold {
            let _ = disk::evict(&task.dir); // files are created and removed meanwhile
        }
        (last, done_before) = (now, done);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::{Measurement, Workers, extra, figures, find_written, open_and_get, shared_state, warm_up};
    use crate::engine::Options;
    use crate::engine::memory::{Lie, Memory};
    use crate::engine::registry::Settled;
    use crate::error::{ErrorKind, KnownError, Result};
    use crate::measure::process::Usage;
    use crate::task::child::{Job, Settings, Task};
    use crate::workload::data::{SMALL_RECORDS, load};
    use crate::workload::spec::WORKLOADS;
    use crate::workload::{Shape, Workload};
    use serde_json::{Value, json};

    /// Not a multiple of any number of threads.
    const N: u64 = 3001;

    /// A small measurement that is not run.
    pub(crate) fn sample_task(engine: &str, workload: &str) -> Task {
        Task {
            job: Job::Measure,
            engine: engine.into(),
            dir: "d".into(),
            options: Options::cached(1 << 20),
            workload: Workload::named(workload),
            shape: Shape { n: 100, least_value: 84, value_size: 84, ..SMALL_RECORDS },
            ops: 100,
            warm_ops: 10,
            threads: 1,
            round: 1,
            settings: Settings { seconds: None, write_rate: 10_000, depth: None, cold: false, seed: 1 },
        }
    }

    /// The figures of a measurement of 100 operations that took `seconds`.
    pub(crate) fn sample(engine: &str, round: u32, seconds: f64) -> Value {
        let mut measurement = Measurement {
            seconds,
            series: vec![json!({"ops_per_s": 50.0}); 3],
            extra: super::object(json!({"commits_per_s": 50.0})),
            used: Usage { cpu_s: 0.5, dirtied_bytes: 30_000, syscall_write_bytes: 10_000, ..Usage::default() },
            used_settling: Usage { cpu_s: 0.1, dirtied_bytes: 10_000, ..Usage::default() },
            settled: Settled { seconds, reached: true },
            disk_bytes: 15_000,
            ..Measurement::default()
        };
        (measurement.op_stats.ops, measurement.op_stats.user_bytes, measurement.op_stats.live_bytes) =
            (100, 10_000, 10_000);
        figures(measurement, &Task { round, ..sample_task(engine, "fillrandom") }, None)
    }

    /// The row of a measurement that failed.
    pub(crate) fn failed(engine: &str, kind: ErrorKind) -> Value {
        let known = KnownError { kind, error: "why".into() };
        figures(Measurement::default(), &sample_task(engine, "fillrandom"), Some(&known))
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

    /// Enough for every fault to show; enough time for the concurrent writer to begin.
    fn ops_of(workload: &Workload) -> u64 {
        if workload.concurrent_writer.is_some() {
            200_000
        } else if workload.fills() {
            N
        } else {
            4000
        }
    }

    /// Prepares, runs and verifies a workload on an engine with a fault.
    fn run(task: &Task, lie: Lie) -> Result<Measurement> {
        let engine = Memory::new(lie);
        if task.workload.loads {
            load(&engine, &task.shape, 0..task.shape.n)?;
        }
        let shared = shared_state(&engine, task)?;
        let mut workers = Workers::prepare(&shared, task)?;
        warm_up(&shared, task)?;
        let measurement = workers.run(task)?;
        workers.verify(20_000)?;
        Ok(measurement)
    }

    fn task_of(workload: &Workload, threads: u64) -> Task {
        let ops = ops_of(workload);
        let mut task = Task { threads, ops, ..sample_task("memory", &workload.name) };
        (task.shape.n, task.shape.sequential) = (N, workload.sequential);
        (task.settings.depth, task.settings.write_rate) = (Some(200), 0);
        if workload.blobs {
            (task.shape.least_value, task.shape.value_size) = (100, 3000);
        }
        task
    }

    /// Those that are measured by threads.
    fn workloads() -> impl Iterator<Item = &'static Workload> {
        WORKLOADS.iter().filter(|workload| !workload.single_threaded)
    }

    #[test]
    fn every_workload_passes_on_a_correct_engine() {
        for workload in workloads() {
            for threads in [1, 3] {
                let task = task_of(workload, threads);
                let name = workload.name.as_str();
                let measurement = run(&task, Lie::None).unwrap_or_else(|e| panic!("{name}: {e}"));
                let op_stats = &measurement.op_stats;
                assert_eq!((op_stats.ops, op_stats.latencies.len()), (ops_of(workload), ops_of(workload)), "{name}");
                let inserts = !workload.loads || ["ycsb-d", "ycsb-e"].contains(&name);
                assert_eq!(op_stats.live_bytes > 0, inserts && name != "queue", "{name}");
                assert_eq!(
                    op_stats.user_bytes > 0,
                    workload.writes() && workload.concurrent_writer.is_none(),
                    "{name}"
                );
                assert!(measurement.series.last().is_some_and(|last| last["s"].as_f64() > Some(0.0)), "{name}");
                let names: Vec<String> = extra(&task, &measurement, Some(10)).keys().cloned().collect();
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
            let mut task = Task { ops: u64::MAX, ..task_of(workload, 1) };
            task.settings.seconds = Some(0.05);
            // More than a full scan reads in that time.
            task.shape.n = if workload.name.starts_with("readseq") { 150_000 } else { 10_000 };
            let measurement = run(&task, Lie::None).unwrap_or_else(|e| panic!("{}: {e}", workload.name));
            assert!(measurement.op_stats.ops > 0 && measurement.seconds < 20.0, "{}", workload.name);
        }
    }

    #[test]
    fn paced_writer_stays_below_its_rate() {
        let mut task = Task { ops: u64::MAX, ..task_of(&Workload::named("readwhilewriting"), 1) };
        (task.settings.seconds, task.settings.write_rate) = (Some(0.5), 1000);
        let measurement = run(&task, Lie::None).unwrap();
        let rate = measurement.concurrent_writer.unwrap().ops as f64 / measurement.seconds;
        assert!(rate > 0.0 && rate <= 1100.0, "{rate}");
    }

    #[test]
    fn every_fault_is_detected() {
        let scans = "scan10 scan100 seekrandom readseq scan10-reverse scan100-reverse readreverse";
        let fills = "fillseq fillrandom fillsync bulkload blobload";
        let gets = "readrandom readzipf blobread ycsb-c ycsb-d partitions64 readwhilewriting";
        let updates = "overwrite bloboverwrite transactions ycsb-a ycsb-b ycsb-f";
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
                match run(&task_of(&Workload::named(name), 1), lie) {
                    Ok(_) => panic!("{lie:?} was not detected by {name}"),
                    Err(error) => assert_eq!(KnownError::of(&error).kind, ErrorKind::Wrong, "{name}: {error}"),
                }
            }
        }
    }

    #[test]
    fn lost_records_and_holes_are_counted() {
        let shape = Shape { n: 1000, ..sample_task("memory", "recovery").shape };
        let filled = |lie| {
            let engine = Memory::new(lie);
            load(&engine, &shape, 0..1000).unwrap();
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
        let dir = tempfile::tempdir().unwrap();
        let task = Task { dir: dir.path().join("db"), ..sample_task("azekura", "open") };
        let engine = task.open().unwrap();
        load(engine.as_ref(), &task.shape, 0..task.shape.n).unwrap();
        engine.close().unwrap();
        let opened = open_and_get(&task, None).unwrap();
        assert!(opened["open_ms"].as_f64().unwrap() > 0.0 && opened["ops"] == 1, "{opened}");
        let recovered = open_and_get(&task, Some(task.shape.n + 5)).unwrap();
        let figures = ["lost_records", "lost_holes", "written_records"].map(|name| recovered[name].as_u64().unwrap());
        assert_eq!(figures, [5, 0, task.shape.n + 5]);
        assert!(recovered["space_amp"].as_f64().unwrap() > 0.0);
    }
}

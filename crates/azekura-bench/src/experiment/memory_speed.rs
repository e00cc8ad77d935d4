//! `memory-speed`: a put, a get and a record of a scan of a pool, in memory without a log and with the shared one; its
//! opening, and its space.
//!
//! Records have 16 + 100 bytes, in random order, from one thread, one put each. Peers and the pool without a log use
//! the same file system in memory, the pool with a log uses the directory of the run. The cost of making keys and
//! values is measured and subtracted. Opening is from the first call to the open partition, after a clean close; the
//! sequential read that it is compared with takes a MiB at a time.

use crate::engine::map::MapEngine;
use crate::engine::registry::{self, OUR_POOLS};
use crate::engine::{Engine, Options, Scan, object};
use crate::error::{Result, wrong};
use crate::experiment::reads;
use crate::experiment::rounds::{Context, Question, Rounds};
use crate::measure::disk;
use crate::measure::meter::ratio;
use crate::measure::process::{memory_bytes, millis};
use crate::workload::data::{FIRST_GENERATION, SMALL_RECORDS};
use anyhow::ensure;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::hint::black_box;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The engines that are measured; peers only if they are in this build. The last one takes part in one round only,
/// because it needs most of the time.
const SUBJECTS: [&str; 5] = ["pool", "logged", "btreemap", "heed", "redb"];
const SLOW: &str = "redb";
const MEMTABLE_BYTES: u64 = 64 << 20;
/// Extension of the files of a pool.
const CHECKPOINT: &str = "pool";
/// Bytes of one sequential read.
const READ_BYTES: usize = 1 << 20;
/// The engines that can run here.
fn subjects() -> Vec<String> {
    let here = |name: &&str| !["heed", "redb"].contains(name) || registry::check(name).is_ok();
    SUBJECTS.into_iter().filter(here).map(str::to_owned).collect()
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct MemoryTask {
    subject: String,
    dir: PathBuf,
    n: u64,
    step: MemoryStep,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum MemoryStep {
    /// Puts, gets for this many seconds, scans.
    Live { seconds: f64 },
    /// Puts, and a clean close.
    Build,
    /// Opens; cold: with an empty page cache.
    Open { cold: bool },
    /// Reads the checkpoint from end to end.
    Read { cold: bool },
}

/// The steps whose times are compared; of a pool without a log only the first.
const OPENINGS: [(&str, MemoryStep); 4] = [
    ("open", MemoryStep::Open { cold: false }),
    ("read", MemoryStep::Read { cold: false }),
    ("open_cold", MemoryStep::Open { cold: true }),
    ("read_cold", MemoryStep::Read { cold: true }),
];

pub(crate) fn run(context: &Context<'_>) -> Result<Map<String, Value>> {
    let (n, opened, seconds, rounds) = context.size((200_000, 100_000, 0.3, 3), (5_000_000, 1_000_000, 3.0, 3));
    let memory = disk::scratch(context.memory_dir)?;
    let task = |subject: &str, name: String, n, step| {
        let dir = if subject == "logged" { context.scratch } else { memory.path() }.join(name);
        MemoryTask { subject: subject.to_owned(), dir, n, step }
    };
    let live = |name: String| (name.clone(), json!(task(&name, name.clone(), n, MemoryStep::Live { seconds })));
    let mut variants: Vec<_> = subjects().into_iter().map(live).collect();
    let mut all = context.interleave(&variants, 1)?;
    variants.retain(|(name, _)| name != SLOW);
    all.extend(context.interleave(&variants, rounds - 1)?);
    let mut steps = Vec::new();
    for (subject, openings) in [("pool", &OPENINGS[..1]), ("logged", &OPENINGS)] {
        let build = task(subject, format!("open-{subject}"), opened, MemoryStep::Build);
        context.child(&json!(build))?;
        let step = |&(name, step)| (format!("{name}_{subject}"), json!(MemoryTask { step, ..build.clone() }));
        steps.extend(openings.iter().map(step));
    }
    all.extend(context.interleave(&steps, context.size(5, 9))?);
    let mut answer = object(json!({"records": n, "records_opened": opened, "rounds": all.json()}));
    put(&mut answer, &all)?;
    Ok(answer)
}

pub(crate) fn variant(task: Value) -> Result<Map<String, Value>> {
    let task: MemoryTask = serde_json::from_value(task)?;
    if let MemoryStep::Open { cold: true } | MemoryStep::Read { cold: true } = task.step {
        disk::evict(&task.dir)?;
    }
    match task.step {
        MemoryStep::Live { seconds } => live(&task, seconds),
        MemoryStep::Build => {
            let engine = open(&task)?;
            fill(engine.as_ref(), task.n)?;
            engine.close()?;
            Ok(object(json!({"checkpoint_bytes": checkpoint_bytes(&task.dir)})))
        }
        MemoryStep::Open { .. } => {
            let start = Instant::now();
            let engine = open(&task)?;
            let (open_ms, start) = (millis(start), Instant::now());
            SMALL_RECORDS.get(engine.as_ref(), task.n / 2, &mut Vec::new())?;
            let first_get_ms = millis(start);
            engine.close()?;
            Ok(object(json!({"ms": open_ms, "first_get_ms": first_get_ms})))
        }
        MemoryStep::Read { .. } => read(&task.dir),
    }
}

fn open(task: &MemoryTask) -> Result<Box<dyn Engine>> {
    let data_bytes = task.n * SMALL_RECORDS.record_bytes(0);
    let options = Options { data_bytes, ..Options::cached(MEMTABLE_BYTES) };
    match task.subject.as_str() {
        "pool" | "logged" => registry::open(OUR_POOLS, &task.dir, &options),
        "btreemap" => Ok(Box::new(MapEngine::default())),
        peer => registry::open(peer, &task.dir, &options),
    }
}

/// Calls `act` with every record in an order that is random by key; returns nanoseconds for each.
fn with_records(n: u64, mut act: impl FnMut(&[u8], &[u8]) -> Result<()>) -> Result<f64> {
    let (mut key, mut value, start) = (Vec::new(), Vec::new(), Instant::now());
    for index in 0..n {
        SMALL_RECORDS.key(index, &mut key);
        SMALL_RECORDS.value(index, FIRST_GENERATION, &mut value);
        act(&key, &value)?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e9 / n as f64)
}

/// Puts all records; returns nanoseconds for making each, and for a put alone.
fn fill(engine: &dyn Engine, n: u64) -> Result<(f64, f64)> {
    let own = with_records(n.min(1_000_000), |key, value| {
        black_box((key, value));
        Ok(())
    })?;
    let all = with_records(n, |key, value| engine.put(key, value))?;
    Ok((own, all - own))
}

/// Fills a database of `n` records, reads and scans it.
fn live(task: &MemoryTask, seconds: f64) -> Result<Map<String, Value>> {
    disk::remove(&task.dir)?;
    let memory_before = memory_bytes(|own| own.rssanon);
    let engine = open(task)?;
    let (own, put_ns) = fill(engine.as_ref(), task.n)?;
    let stats = engine.stats();
    let held_bytes = memory_bytes(|own| own.rssanon).saturating_sub(memory_before);
    let mut answer = object(json!({
        "put_harness_ns": own, "put_ns": put_ns, "held_bytes": held_bytes, "stats": stats,
    }));
    for (name, present) in [("get", true), ("miss", false)] {
        let timed = reads::time(engine.as_ref(), task.n, present, seconds)?;
        answer.extend(["ns", "cpu_ns", "harness_ns"].map(|field| (format!("{name}_{field}"), timed[field].clone())));
    }
    for (name, ascends) in [("scan", true), ("scan_back", false)] {
        let (mut count, mut sum, start) = (0, 0u64, Instant::now());
        engine.scan(Scan { from: None, ascends }, &mut |key, value| {
            (count, sum) = (count + 1, sum + u64::from(key[0]) + u64::from(value[0]));
            true
        })?;
        let ns = start.elapsed().as_secs_f64() * 1e9 / task.n as f64;
        black_box(sum);
        ensure!(count == task.n, wrong(format!("a scan returned {count} records of {}", task.n)));
        answer.insert(format!("{name}_ns"), json!(ns));
    }
    engine.sync()?;
    engine.close()?;
    let checkpoint = checkpoint_bytes(&task.dir);
    answer.insert("disk_bytes".into(), json!(disk::allocated_bytes(&task.dir)));
    answer.insert("checkpoint_bytes".into(), json!(checkpoint));
    let pool = &answer["stats"]["pool"];
    let own = pool["bytes"].as_f64().zip(pool["index_bytes"].as_f64()).map(|(pool, index)| pool + index);
    // Files of peers are not memory of the process, however much it has mapped.
    let sizes = [("pool", own), ("held", Some(held_bytes as f64)), ("file", Some(checkpoint as f64))];
    for (what, bytes) in sizes {
        let each = bytes.map(|bytes| bytes / task.n as f64 - SMALL_RECORDS.record_bytes(0) as f64);
        answer.insert(format!("overhead_bytes_{what}"), json!(each.filter(|each| *each > 0.0)));
    }
    disk::remove(&task.dir)?;
    Ok(answer)
}

/// Bytes that the files of pools take.
fn checkpoint_bytes(dir: &Path) -> u64 {
    disk::by_extension(dir).get(CHECKPOINT).map_or(0, |(_, allocated)| *allocated)
}

/// Reads the files of pools from end to end.
fn read(dir: &Path) -> Result<Map<String, Value>> {
    let paths: Vec<PathBuf> = disk::files(dir).map(|(path, _)| path).collect();
    let (mut buffer, mut bytes, start) = (vec![0; READ_BYTES], 0u64, Instant::now());
    for path in paths.iter().filter(|path| path.extension().is_some_and(|end| end == CHECKPOINT)) {
        let mut file = File::open(path)?;
        while let got @ 1.. = file.read(&mut buffer)? {
            bytes += got as u64;
            black_box(&buffer);
        }
    }
    let ms = millis(start);
    ensure!(bytes > 0, "there is no checkpoint to read");
    Ok(object(json!({"ms": ms, "bytes": bytes})))
}

/// Ratios to the others and all figures. Where files are no memory there is a log, and the figures without it are null.
fn put(answer: &mut Map<String, Value>, all: &Rounds) -> Result<()> {
    Question::named("memory-speed")?.put_figures(all, answer);
    let level = all.json()["pool"][0]["stats"]["pool"]["level"].clone();
    if level == "Logged" {
        let without_log = ["get_us", "insert_us_without_log", "scan_ns_per_entry", "open_ms_in_memory"];
        answer.extend(without_log.map(|field| (field.to_owned(), Value::Null)));
    }
    let puts = all.median("logged", "put_ns").and_then(|ns| ratio(1e9, ns));
    answer.extend(object(json!({"pool_level": level, "buffer_puts_per_s": puts})));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{MemoryStep, MemoryTask, put, subjects, variant};
    use crate::engine::object;
    use crate::experiment::rounds::{Question, Rounds};
    use serde_json::{Map, Value, json};

    #[test]
    fn every_subject_has_figures() {
        let dir = tempfile::tempdir().unwrap();
        for subject in subjects() {
            let (dir, step) = (dir.path().join(&subject), MemoryStep::Live { seconds: 0.01 });
            let answer = variant(json!(MemoryTask { subject: subject.clone(), dir, n: 3000, step })).unwrap();
            for field in ["put_ns", "get_ns", "miss_ns", "scan_ns", "scan_back_ns"] {
                assert!(answer[field].as_f64().is_some_and(f64::is_finite), "{subject} {field}: {answer:?}");
            }
            let pool = subject == "pool" || subject == "logged";
            assert_eq!(answer["overhead_bytes_pool"].as_f64().is_some_and(|bytes| bytes > 0.0), pool, "{answer:?}");
        }
    }

    #[test]
    fn closed_pool_is_opened_and_its_checkpoint_read() {
        let dir = tempfile::tempdir().unwrap();
        let run = |step| {
            let task = MemoryTask { subject: "logged".into(), dir: dir.path().join("db"), n: 3000, step };
            variant(json!(task)).unwrap()
        };
        assert!(run(MemoryStep::Build)["checkpoint_bytes"].as_u64().unwrap() > 3000 * 116);
        for cold in [false, true] {
            assert!(run(MemoryStep::Open { cold })["ms"].as_f64().unwrap() > 0.0);
            assert!(run(MemoryStep::Read { cold })["bytes"].as_u64().unwrap() > 3000 * 116);
        }
    }

    #[test]
    fn bounds_and_ratios_follow_from_rounds() {
        let names = ["pool", "logged", "btreemap", "heed"].map(str::to_owned);
        let mut all = Rounds::default();
        for (name, ns) in names.iter().zip([500.0, 2000.0, 800.0, 1500.0]) {
            let round = json!({
                "put_ns": ns, "get_ns": ns, "scan_ns": ns / 10.0, "overhead_bytes_pool": 30.0,
                "overhead_bytes_file": 50.0,
            });
            all.add(name, object(round));
        }
        for (step, ms) in [("open_pool", 40.0), ("open_cold_logged", 300.0), ("read_cold_logged", 200.0)] {
            all.add(step, object(json!({"ms": ms})));
        }
        let mut answer = Map::new();
        put(&mut answer, &all).unwrap();
        for (field, expected) in [
            ("get_us", json!(0.5)),
            ("scan_ns_per_entry", json!(50.0)),
            ("buffer_puts_per_s", json!(500_000.0)),
            ("gets_vs_heed", json!(3.0)),
            ("buffer_puts_vs_heed", json!(0.75)),
            ("buffer_puts_vs_redb", Value::Null),
            ("open_vs_read", json!(1.5)),
            ("open_pool_ms", json!(40.0)),
            ("put_ns_heed", json!(1500.0)),
        ] {
            assert_eq!(answer.get(field), Some(&expected), "{field}");
        }
        Question::named("memory-speed").unwrap().put_targets(&mut answer);
        for (field, met) in
            [("get_us", true), ("gets_vs_heed", true), ("scan_ns_per_entry", false), ("open_vs_read", false)]
        {
            assert_eq!(answer["targets"][field]["met"], met, "{field}");
        }
        let mut logged = Rounds::default();
        logged.add("pool", object(json!({"get_ns": 500.0, "stats": {"pool": {"level": "Logged"}}})));
        put(&mut answer, &logged).unwrap();
        assert_eq!(answer["get_us"], Value::Null, "it had a log");
    }
}

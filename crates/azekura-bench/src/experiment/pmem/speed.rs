//! `memory-speed`: what a pool takes for a put, a get and a record of a scan, in memory without a log and with the
//! shared one; how soon it is open; how much room it takes.
//!
//! Records are those of every other measurement: 16 + 100 bytes, in random order, from one thread, one put each. Peers
//! and the pool without a log stand on the same file system in memory, the pool with a log on the directory of the run.
//! Making keys and values is measured by itself and taken off. Opening is from the first call to the open partition,
//! behind a clean close; the sequential read beside it takes a MiB at a time.

use crate::engine::map::MapEngine;
use crate::engine::registry::{self, OUR_POOLS};
use crate::engine::{Engine, Options, Scan};
use crate::experiment::experiment::{Context, Experiment};
use crate::experiment::pmem::speed_answer;
use crate::experiment::pmem::subject::object;
use crate::experiment::reads::{self, Choice, cached_options};
use crate::experiment::rounds::{Rounds, Variant, interleave};
use crate::failure::{Result, wrong};
use crate::machine::disk;
use crate::machine::process::anonymous_rss_bytes;
use crate::task::opening::{SMALL_RECORDS, millis};
use crate::workload::fill::FIRST_GENERATION;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fs::File;
use std::hint::black_box;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Engines that stand on the same memory, if they are in this build.
pub(super) const PEERS: [&str; 2] = ["heed", "redb"];
const MEMTABLE_BYTES: u64 = 64 << 20;
/// How the files of a pool end that hold what a checkpoint wrote.
const CHECKPOINT: &str = "pool";
/// Bytes of one read.
const PIECE: usize = 1 << 20;

/// See the module.
pub(crate) struct MemorySpeed;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Who {
    /// A pool in memory, without a log.
    Pool,
    /// A pool whose changes go to the log.
    Logged,
    BTreeMap,
    /// By its place among the peers.
    Peer(usize),
}

impl Who {
    /// As fields name it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Who::Pool => "pool",
            Who::Logged => "logged",
            Who::BTreeMap => "btreemap",
            Who::Peer(place) => PEERS[place],
        }
    }

    /// Whether one round has to do, so that the whole does not take most of its time.
    fn is_slow(self) -> bool {
        self == Who::Peer(1)
    }
}

/// Ours first.
fn all() -> Vec<Who> {
    let peers = (0..PEERS.len()).filter(|&place| registry::check(PEERS[place]).is_ok()).map(Who::Peer);
    [Who::Pool, Who::Logged, Who::BTreeMap].into_iter().chain(peers).collect()
}

/// What a child is asked to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Task {
    who: Who,
    dir: PathBuf,
    n: u64,
    step: Step,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Step {
    /// Puts, gets for so many seconds, scans; then it is gone.
    Live { seconds: f64 },
    /// Puts, and a clean close.
    Build,
    /// Opens; cold: with nothing in the cache of the system.
    Open { cold: bool },
    /// Reads the checkpoint from end to end.
    Read { cold: bool },
}

impl Experiment for MemorySpeed {
    fn name(&self) -> &'static str {
        "memory-speed"
    }

    fn about(&self) -> &'static str {
        "puts, gets, scans and opening of a pool in memory and of one with a log, beside LMDB, redb and BTreeMap"
    }

    fn run(&self, context: &Context<'_>) -> Result<Map<String, Value>> {
        let (n, opened, seconds, rounds) = context.size((200_000, 100_000, 0.3, 3), (5_000_000, 1_000_000, 3.0, 3));
        let memory = context.memory()?;
        let fresh = |who: Who, name: &str| match who {
            Who::Logged => context.fresh(name),
            _ => memory.fresh(name),
        };
        let (mut variants, mut again) = (Vec::new(), Vec::new());
        for who in all() {
            let task = Task { who, dir: fresh(who, who.name())?, n, step: Step::Live { seconds } };
            variants.push(Variant { name: who.name().into(), task: json!(task) });
            if !who.is_slow() {
                again.extend(variants.last().cloned());
            }
        }
        let mut rounds_of = interleave(context, &variants, 1)?;
        rounds_of.extend(interleave(context, &again, rounds - 1)?);
        rounds_of.extend(openings(context, &fresh, opened, context.size(5, 9))?);
        let mut answer = Map::new();
        answer.insert("records".into(), json!(n));
        answer.insert("records_opened".into(), json!(opened));
        speed_answer::put(&mut answer, &rounds_of, &all());
        answer.insert("rounds".into(), rounds_of.json());
        Ok(answer)
    }

    fn variant(&self, task: &Value) -> Result<Map<String, Value>> {
        let task: Task = serde_json::from_value(task.clone())?;
        match task.step {
            Step::Live { seconds } => live(&task, seconds),
            Step::Build => {
                disk::remove(&task.dir)?;
                let engine = open(&task)?;
                fill(engine.as_ref(), task.n)?;
                engine.close()?;
                Ok(object(json!({"checkpoint_bytes": checkpoint_bytes(&task.dir)})))
            }
            Step::Open { cold } => {
                if cold {
                    disk::evict(&task.dir)?;
                }
                let start = Instant::now();
                let engine = open(&task)?;
                let open_ms = millis(start);
                let start = Instant::now();
                let found = engine.get(&key_of(task.n / 2), &mut |value| _ = black_box(value[0]))?;
                let first_get_ms = millis(start);
                if !found {
                    return Err(wrong("a record is missing behind opening"));
                }
                engine.close()?;
                Ok(object(json!({"ms": open_ms, "first_get_ms": first_get_ms})))
            }
            Step::Read { cold } => read(&task.dir, cold),
        }
    }
}

/// Opens pools that were closed, in memory and on the device, and reads the checkpoint of the latter, in turns.
fn openings(
    context: &Context<'_>,
    fresh: &dyn Fn(Who, &str) -> Result<PathBuf>,
    n: u64,
    rounds: u32,
) -> Result<Rounds> {
    let mut steps = Vec::new();
    for who in [Who::Pool, Who::Logged] {
        let build = Task { who, dir: fresh(who, &format!("open-{}", who.name()))?, n, step: Step::Build };
        context.child(&json!(build))?;
        let mut add = |name: &str, step| {
            let task = Task { step, ..build.clone() };
            steps.push(Variant { name: format!("{name}_{}", who.name()), task: json!(task) });
        };
        add("open", Step::Open { cold: false });
        if who == Who::Logged {
            add("read", Step::Read { cold: false });
            add("open_cold", Step::Open { cold: true });
            add("read_cold", Step::Read { cold: true });
        }
    }
    interleave(context, &steps, rounds)
}

fn options(n: u64) -> Options {
    Options { data_bytes: n * SMALL_RECORDS.record_bytes(0), ..cached_options(MEMTABLE_BYTES) }
}

fn open(task: &Task) -> Result<Box<dyn Engine>> {
    match task.who {
        Who::Pool | Who::Logged => registry::open(OUR_POOLS, &task.dir, &options(task.n)),
        Who::BTreeMap => Ok(Box::new(MapEngine::default())),
        Who::Peer(place) => registry::open(PEERS[place], &task.dir, &options(task.n)),
    }
}

fn key_of(index: u64) -> Vec<u8> {
    let mut key = Vec::new();
    SMALL_RECORDS.keys().write(index, &mut key);
    key
}

/// Does something with every record, in an order that is random by key; gives nanoseconds for each.
fn with_records(n: u64, mut act: impl FnMut(&[u8], &[u8]) -> Result<()>) -> Result<f64> {
    let (mut key, mut value) = (Vec::new(), Vec::new());
    let start = Instant::now();
    for index in 0..n {
        SMALL_RECORDS.keys().write(index, &mut key);
        SMALL_RECORDS.values().write(index, FIRST_GENERATION, &mut value);
        act(&key, &value)?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e9 / n as f64)
}

/// Puts all records; gives nanoseconds for each, those of making it, and of a put alone.
fn fill(engine: &dyn Engine, n: u64) -> Result<(f64, f64)> {
    let harness = with_records(n.min(1_000_000), |key, value| {
        black_box((key, value));
        Ok(())
    })?;
    let all = with_records(n, |key, value| engine.put(key, value))?;
    Ok((harness, all - harness))
}

/// The whole life of a database of `n` records.
fn live(task: &Task, seconds: f64) -> Result<Map<String, Value>> {
    disk::remove(&task.dir)?;
    let held = anonymous_rss_bytes();
    let engine = open(task)?;
    let (harness_ns, put_ns) = fill(engine.as_ref(), task.n)?;
    let mut answer = object(json!({"put_harness_ns": harness_ns, "put_ns": put_ns}));
    let stats = engine.stats();
    answer.insert("held_bytes".into(), json!(anonymous_rss_bytes().saturating_sub(held)));
    for (name, choice) in [("get", Choice::Present), ("miss", Choice::Missing)] {
        let timed = reads::time(engine.as_ref(), task.n, choice, seconds)?;
        for (field, of) in [("ns", "ns"), ("cpu_ns", "cpu_ns"), ("harness_ns", "harness_ns")] {
            answer.insert(format!("{name}_{field}"), json!(timed.get(of)));
        }
    }
    for (name, scan) in [("scan", Scan::First), ("scan_back", Scan::Last)] {
        let mut sum = 0u64;
        let start = Instant::now();
        let count = engine.scan(scan, u64::MAX, &mut |key, value| sum += u64::from(key[0]) + u64::from(value[0]))?;
        let ns = start.elapsed().as_secs_f64() * 1e9 / task.n as f64;
        black_box(sum);
        if count != task.n {
            return Err(wrong(format!("a scan met {count} records of {}", task.n)));
        }
        answer.insert(format!("{name}_ns"), json!(ns));
    }
    answer.insert("stats".into(), json!(stats));
    engine.sync()?;
    engine.close()?;
    answer.insert("disk_bytes".into(), json!(disk::usage(&task.dir).allocated));
    answer.insert("checkpoint_bytes".into(), json!(checkpoint_bytes(&task.dir)));
    let user = SMALL_RECORDS.record_bytes(0) as f64;
    for (field, bytes) in overheads(&answer) {
        // Files of others are not memory of the process, however much it has mapped.
        let each = bytes.map(|bytes| bytes / task.n as f64 - user).filter(|each| *each > 0.0);
        answer.insert(field.into(), json!(each));
    }
    disk::remove(&task.dir)?;
    Ok(answer)
}

/// Bytes in all: of the pool with what leads to its leaves, as it counts itself; of what the process took beyond what
/// it held before; and of the files.
fn overheads(answer: &Map<String, Value>) -> [(&'static str, Option<f64>); 3] {
    let pool = answer.get("stats").map_or(&Value::Null, |stats| &stats["pool"]);
    let number = |field: &str| pool[field].as_f64();
    let own = number("bytes").zip(number("index_bytes")).map(|(pool, index)| pool + index);
    let of = |field: &str| answer.get(field).and_then(Value::as_f64).filter(|bytes| *bytes > 0.0);
    [
        ("overhead_bytes_pool", own),
        ("overhead_bytes_held", of("held_bytes")),
        ("overhead_bytes_file", of("checkpoint_bytes")),
    ]
}

/// Bytes that the files of pools take.
fn checkpoint_bytes(dir: &Path) -> u64 {
    disk::by_endings(dir).get(CHECKPOINT).map_or(0, |(_, allocated)| *allocated)
}

/// Reads the files of pools from end to end.
fn read(dir: &Path, cold: bool) -> Result<Map<String, Value>> {
    if cold {
        disk::evict(dir)?;
    }
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == CHECKPOINT) {
            paths.push(path);
        }
    }
    let (mut piece, mut bytes) = (vec![0; PIECE], 0u64);
    let start = Instant::now();
    for path in &paths {
        let mut file = File::open(path)?;
        loop {
            let got = file.read(&mut piece)?;
            if got == 0 {
                break;
            }
            bytes += got as u64;
            black_box(&piece);
        }
    }
    let ms = millis(start);
    if bytes == 0 {
        return Err("there is no checkpoint to read".into());
    }
    Ok(object(json!({"ms": ms, "bytes": bytes})))
}

#[cfg(test)]
mod tests {
    use super::{MemorySpeed, Step, Task, Who, all};
    use crate::experiment::experiment::Experiment;
    use serde_json::json;

    #[test]
    fn everybody_lives_through_it() {
        let dir = tempfile::tempdir().unwrap();
        for who in all() {
            let task = Task { who, dir: dir.path().join(who.name()), n: 3000, step: Step::Live { seconds: 0.01 } };
            let answer = MemorySpeed.variant(&json!(task)).unwrap();
            for field in ["put_ns", "get_ns", "miss_ns", "scan_ns", "scan_back_ns"] {
                assert!(answer[field].as_f64().is_some_and(f64::is_finite), "{who:?} {field}: {answer:?}");
            }
            let pool = matches!(who, Who::Pool | Who::Logged);
            assert_eq!(answer["overhead_bytes_pool"].as_f64().is_some_and(|bytes| bytes > 0.0), pool, "{answer:?}");
        }
    }

    #[test]
    fn what_was_closed_is_opened_and_its_checkpoint_read() {
        let dir = tempfile::tempdir().unwrap();
        let task = |step| json!(Task { who: Who::Logged, dir: dir.path().join("db"), n: 3000, step });
        let built = MemorySpeed.variant(&task(Step::Build)).unwrap();
        assert!(built["checkpoint_bytes"].as_u64().unwrap() > 3000 * 116, "{built:?}");
        for cold in [false, true] {
            let opened = MemorySpeed.variant(&task(Step::Open { cold })).unwrap();
            assert!(opened["ms"].as_f64().unwrap() > 0.0);
            let read = MemorySpeed.variant(&task(Step::Read { cold })).unwrap();
            assert!(read["bytes"].as_u64().unwrap() > 3000 * 116, "{read:?}");
        }
    }
}

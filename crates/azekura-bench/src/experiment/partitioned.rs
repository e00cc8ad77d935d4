//! `partitioned`: point reads of a database whose indexes and filters do not fit the cache that they share with its
//! data: one of each for a table, against index and filter partitions that are loaded on demand.
//!
//! Records of 8 and 8 bytes: metadata is 8 % of the data, four times a cache of 2 % and twelve times one of 0.67 %. The
//! tree has a bottom level, a level above it, and two runs of level 0, whose filters every read checks. Two devices:
//! - `hdd`: a simulated disk on a virtual clock ([`crate::experiment::watch_fs`]), with a cache of 1/150 of the data.
//!   Throughput is reads per second of that disk and of CPU together.
//! - `ssd`: the real device by direct I/O, with a cache of 1/50 and one of 1/150 of the data: the loss is that of
//!   throughput from the one to the other.
//!
//! If the baseline uses much memory in addition to its cache, the round is an error. The peer cannot run on the
//! simulated disk; its time there follows from the number and bytes of its reads.

use crate::engine::azekura::open_with;
use crate::engine::registry::{self, settle};
use crate::engine::{Engine, Options, object};
use crate::error::{Result, wrong};
use crate::experiment::rounds::{Context, Question, Rounds};
use crate::experiment::watch_fs::{DiskSpeed, SECTOR, Traffic, WatchFs};
use crate::measure::disk;
use crate::measure::process::{Usage, repeat};
use crate::workload::Shape;
use crate::workload::data::{BatchBuffer, FIRST_GENERATION, Zipfian, below, rng};
use anyhow::ensure;
use azekura::{CompactionStrategy, DirectIo, LeveledOptions};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Adjacent records that form one node.
const NODE: u64 = 100;
const HDD: DiskSpeed = DiskSpeed { seeks_per_s: 120.0, bytes_per_s: 100e6 };
/// Prefix of fields, whether the device is real, and the data per cache.
const PLACES: [(&str, bool, u64); 3] = [("hdd", false, 150), ("ssd-large", true, 50), ("ssd-small", true, 150)];
/// Suffixes of the fields of a choice of keys and a number of threads.
const SUFFIXES: [&str; 4] = ["", "_four_threads", "_uniform", "_uniform_four_threads"];
/// Kinds of blocks whose misses are reported.
const KINDS: [&str; 3] = ["data", "index", "filter"];
/// Reads between two readings of the clock.
const BUNDLE: u64 = 16;
const LOAD_CACHE_BYTES: u64 = 64 << 20;
const MANY_THREADS: u64 = 4;
/// In addition to its cache, the baseline may use one part in this many of the cache's size.
const UNCACHED_SHARE: u64 = 8;

/// Runs of level 0 that are merged, by the defaults of both engines.
const RUNS_MERGED: u64 = 4;
/// The records of each level, by their index.
const BOTTOM: fn(u64) -> bool = |index| !index.is_multiple_of(5);
const LEVEL_ABOVE: fn(u64) -> bool = |index| index % 10 == 5;
const LEVEL_0: [fn(u64) -> bool; 2] = [|index| index.is_multiple_of(20), |index| index % 20 == 10];
/// Longest time that a merge may take.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);

/// How index and filter are stored, and which of their blocks may be evicted. The baseline: they are cached whole.
const UNPARTITIONED: &str = "unpartitioned";
/// Partitions are cached, their top level is pinned.
const PARTITIONED: &str = "partitioned";
/// The same tables; the top level may be evicted too.
const TOP_IN_CACHE: &str = "top-in-cache";
/// The peer, unpartitioned.
const PEER: &str = "rocksdb-direct";
const LAYOUTS: [&str; 4] = [UNPARTITIONED, PARTITIONED, TOP_IN_CACHE, PEER];

#[derive(Clone, Debug, Serialize, Deserialize)]
struct PartitionedTask {
    /// One of [`LAYOUTS`].
    layout: String,
    dir: PathBuf,
    n: u64,
    table_bytes: u64,
    /// `None` loads.
    reading: Option<Reading>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Reading {
    real_device: bool,
    cache_bytes: u64,
    /// Seconds for each choice of keys, uncounted.
    warm_s: f64,
    /// Seconds for each choice of keys and number of threads.
    seconds: f64,
}

fn shape(n: u64) -> Shape {
    Shape { n, key_size: 8, least_value: 8, value_size: 8, sequential: true }
}

pub(crate) fn run(context: &Context<'_>) -> Result<Map<String, Value>> {
    // With fewer records tables are smaller, so that as many of their filters fit the cache.
    let (n, table_bytes) = context.size((1_500_000, 27 << 16), (60_000_000, 64 << 20));
    let (warm_s, seconds, rounds) = context.size((0.15, 0.2, 1), (1.5, 1.5, 2));
    let mut answer = object(json!({
        "records": n, "record_bytes": shape(1).total_bytes(), "table_bytes": table_bytes, "hdd": HDD,
    }));
    let peer =
        registry::check(PEER).inspect_err(|why| _ = answer.insert("no_peer_because".into(), json!(why.to_string())));
    let mut databases: Vec<PartitionedTask> = Vec::new();
    let mut data = 0;
    for layout in LAYOUTS.into_iter().filter(|layout| *layout != PEER || peer.is_ok()) {
        // Both partitioned layouts read the same tables.
        let is_stored = layout != TOP_IN_CACHE;
        let dir = context.scratch.join(if is_stored { layout } else { PARTITIONED });
        let task = PartitionedTask { layout: layout.into(), dir, n, table_bytes, reading: None };
        if is_stored {
            let loaded = context.child(&json!(task))?;
            eprintln!("{layout} loaded: {}", json!(loaded));
            if layout == UNPARTITIONED {
                let levels = loaded["levels"].as_array().into_iter().flatten();
                data = levels.filter_map(|level| level["bytes"].as_u64()).sum();
            }
            answer.insert(format!("loaded_{}", layout.replace('-', "_")), Value::Object(loaded));
        }
        databases.push(task);
    }
    ensure!(data > 0, "the database that was loaded has no tables");
    answer.insert("data_bytes".into(), json!(data));
    let mut variants = Vec::new();
    for (place, real_device, part) in PLACES {
        let reading = Reading { real_device, cache_bytes: data / part, warm_s, seconds };
        answer.insert(format!("{}_cache_bytes", place.replace('-', "_")), json!(reading.cache_bytes));
        for task in databases.iter().filter(|task| real_device || task.layout != PEER) {
            let timed = PartitionedTask { reading: Some(reading), ..task.clone() };
            variants.push((format!("{place}-{}", task.layout), json!(timed)));
        }
    }
    let all = context.interleave(&variants, rounds)?;
    put(&all, &mut answer)?;
    answer.insert("rounds".into(), all.json());
    Ok(answer)
}

pub(crate) fn variant(task: Value) -> Result<Map<String, Value>> {
    let task: PartitionedTask = serde_json::from_value(task)?;
    match &task.reading {
        None => load(&task),
        Some(reading) => read(&task, reading),
    }
}

/// Opens a database. `fs`: without background work, which would merge the runs of level 0 as soon as writes stop.
fn open(task: &PartitionedTask, cache_bytes: u64, evictable: bool, fs: Option<&WatchFs>) -> Result<Box<dyn Engine>> {
    let table_bytes = Some(task.table_bytes);
    // The memtable is flushed explicitly.
    let options = Options { cache_bytes, table_bytes, ..Options::cached(8 * task.table_bytes) };
    if task.layout == PEER {
        return registry::open(&task.layout, &task.dir, &options);
    }
    let leveled = LeveledOptions::default().target_file_size(task.table_bytes).base_level_size(4 * task.table_bytes);
    let configure = |config: azekura::Config| match fs {
        Some(fs) => config.workers(0).fs(Arc::new(fs.clone())).direct_io(DirectIo::Always),
        None => config,
    };
    open_with(&task.dir, &options, configure, |own| {
        own.compaction_strategy(CompactionStrategy::Leveled(leveled))
            .partition_index_and_filters(task.layout != UNPARTITIONED)
            .cache_index_and_filter_blocks(evictable)
            .pin_top_level(task.layout != TOP_IN_CACHE)
    })
}

/// Fills a new database. `held_bytes`: memory of its tables if nothing can be evicted.
fn load(task: &PartitionedTask) -> Result<Map<String, Value>> {
    let (shape, start) = (shape(task.n), Instant::now());
    let engine = open(task, LOAD_CACHE_BYTES, false, None)?;
    load_lower_levels(engine.as_ref(), &shape)?;
    let settled = settle(&[engine.as_ref()], start.elapsed())?;
    engine.close()?;
    let engine = open(task, LOAD_CACHE_BYTES, false, Some(&WatchFs::on_disk(false, false)))?;
    load_level_0(engine.as_ref(), &shape)?;
    let load_s = start.elapsed().as_secs_f64();
    engine.sync()?;
    let tables = disk::number_of_tables(&task.dir) as u64;
    let step = (task.n / (8 * tables.max(1))).max(1);
    for index in (0..task.n).step_by(usize::try_from(step)?) {
        shape.get(engine.as_ref(), index, &mut Vec::new())?;
    }
    let stats = engine.stats();
    engine.close()?;
    Ok(object(json!({
        "load_s": load_s, "settled": settled.reached, "tables": tables, "levels": stats.get("levels"),
        "held_bytes": stats.get("held_bytes"), "disk_bytes": disk::allocated_bytes(&task.dir),
    })))
}

/// Reads keys of both choices, with many threads and with one.
fn read(task: &PartitionedTask, reading: &Reading) -> Result<Map<String, Value>> {
    let fs = WatchFs::on_disk(reading.real_device, false);
    let engine = open(task, reading.cache_bytes, true, Some(&fs))?;
    let (mut answer, mut seed) = (Map::new(), 0); // a key that was just read is cached, so choices differ
    for (zipf, suffixes) in [(Some(Zipfian::new(task.n / NODE)), &SUFFIXES[..2]), (None, &SUFFIXES[2..])] {
        read_all(engine.as_ref(), task.n, zipf, MANY_THREADS, reading.warm_s, seed)?;
        for (threads, suffix) in [(MANY_THREADS, suffixes[1]), (1, suffixes[0])] {
            seed += 100;
            let (traffic, misses, used, start) =
                (fs.traffic(), cache_misses(engine.as_ref()), Usage::now(), Instant::now());
            let gets = read_all(engine.as_ref(), task.n, zipf, threads, reading.seconds, seed)? as f64;
            let (seconds, used) = (start.elapsed().as_secs_f64(), Usage::now() - used);
            // Of the peer's reads only their number is known: each counts as a seek.
            let counted = Traffic { reads: used.reads, seeks: used.reads, bytes: used.device_read_bytes };
            let traffic = if task.layout == PEER { counted } else { fs.traffic() - traffic };
            let simulated = traffic.seconds(HDD) + used.cpu_s;
            for (name, figure) in [
                ("ops_per_s", gets / if reading.real_device { seconds } else { simulated }),
                ("hdd_ops_per_s", gets / simulated),
                ("cpu_us_per_get", used.cpu_s * 1e6 / gets),
                ("bytes_per_get", traffic.bytes as f64 / gets),
                ("reads_per_get", traffic.reads as f64 / gets),
                ("seeks_per_get", traffic.seeks as f64 / gets),
            ] {
                answer.insert(format!("{name}{suffix}"), json!(figure));
            }
            for ((kind, after), before) in KINDS.iter().zip(cache_misses(engine.as_ref())).zip(misses) {
                let figure = after.zip(before).map(|(after, before)| (after - before) as f64 / gets);
                answer.insert(format!("{kind}_misses_per_get{suffix}"), json!(figure));
            }
        }
        seed += 100;
    }
    let stats = engine.stats();
    engine.close()?;
    let (held_bytes, cache_bytes) = (stats.get("held_bytes").and_then(Value::as_u64).unwrap_or(0), reading.cache_bytes);
    let fair = task.layout != UNPARTITIONED || held_bytes <= cache_bytes / UNCACHED_SHARE;
    ensure!(fair, "tables use {held_bytes} bytes in addition to a cache of {cache_bytes}: the baseline is flattered");
    let fields = "held_bytes cache_used_bytes data_hits data_misses index_hits index_misses filter_hits filter_misses";
    let own = fields.split(' ').map(|name| (name.to_owned(), stats.get(name).cloned().unwrap_or_default()));
    answer.extend(own);
    Ok(answer)
}

/// Misses of the cache so far, in the order of [`KINDS`].
fn cache_misses(engine: &dyn Engine) -> [Option<u64>; 3] {
    let stats = engine.stats();
    KINDS.map(|kind| stats.get(&format!("{kind}_misses")).and_then(Value::as_u64))
}

/// Lets threads read for a while; returns the number of gets.
fn read_all(engine: &dyn Engine, n: u64, zipf: Option<Zipfian>, threads: u64, seconds: f64, seed: u64) -> Result<u64> {
    let read = |thread| {
        let (mut rng, mut key) = (rng(seed + thread), Vec::new());
        let timed = repeat(seconds, BUNDLE, |_| {
            let index = match zipf {
                Some(zipf) => zipf.index(&mut rng) * NODE + below(&mut rng, NODE),
                None => below(&mut rng, n),
            };
            let generation = shape(n).get(engine, index, &mut key)?;
            ensure!(generation == FIRST_GENERATION, wrong(format!("record {index} was never written like this")));
            Ok(())
        });
        timed.map(|timed| timed.count)
    };
    thread::scope(|scope| {
        let readers: Vec<_> = (1..=threads).map(|thread| scope.spawn(move || read(thread))).collect();
        readers.into_iter().map(|reader| reader.join().expect("a thread panicked")).sum()
    })
}

/// The ratios and losses of all rounds.
fn put(all: &Rounds, answer: &mut Map<String, Value>) -> Result<()> {
    Question::named("partitioned")?.put_figures(all, answer);
    for suffix in SUFFIXES {
        let whole = all.median("hdd-unpartitioned", &format!("ops_per_s{suffix}"));
        answer.insert(format!("hdd_most_ratio{suffix}"), json!(whole.map(most_ratio)));
    }
    Ok(())
}

/// The throughput ratio on the simulated disk if the other side read only one block for each get, which spans two
/// sectors: no layout of index and filter is better while data is not cached.
fn most_ratio(baseline_ops_per_s: f64) -> f64 {
    1.0 / (baseline_ops_per_s * Traffic { reads: 1, seeks: 1, bytes: 2 * SECTOR }.seconds(HDD))
}

/// Writes all records except those of level 0: a full bottom level and a level of a tenth of it above. Each is written
/// in ascending order, so that little is rewritten, and spread over the key space.
fn load_lower_levels(engine: &dyn Engine, shape: &Shape) -> Result<()> {
    for (is_here, flushes) in [(BOTTOM, 16), (LEVEL_ABOVE, RUNS_MERGED)] {
        for part in 0..flushes {
            let indices = part * shape.n / flushes..(part + 1) * shape.n / flushes;
            put_all(engine, shape, indices.filter(|index| is_here(*index)))?;
            engine.flush()?;
            if (part + 1) % RUNS_MERGED == 0 {
                merge_level_0(engine, shape)?; // otherwise the number of runs depends on timing
            }
        }
    }
    settle(&[engine], Duration::from_secs(1)).map(|_| ())
}

/// Writes the remaining records as two runs of level 0, half of the number that is merged. An engine that merges them
/// when it is idle must be prevented from that.
fn load_level_0(engine: &dyn Engine, shape: &Shape) -> Result<()> {
    for is_here in LEVEL_0 {
        put_all(engine, shape, (0..shape.n).filter(|index| is_here(*index)))?;
        engine.flush()?;
    }
    Ok(())
}

/// Waits until the runs of level 0 are merged. If they are too few for a merge, two records are written once more in
/// runs of their own. A peer that does not report its runs is not merged further.
fn merge_level_0(engine: &dyn Engine, shape: &Shape) -> Result<()> {
    let start = Instant::now();
    loop {
        settle(&[engine], Duration::from_millis(200))?;
        match engine.stats().get("levels").and_then(|levels| levels[0]["runs"].as_u64()) {
            None | Some(0) => return Ok(()),
            Some(runs) => {
                ensure!(start.elapsed() < SETTLE_TIMEOUT, "{runs} runs are not merged");
                put_all(engine, shape, [1, shape.n - 1].into_iter())?;
                engine.flush()?;
            }
        }
    }
}

fn put_all(engine: &dyn Engine, shape: &Shape, indices: impl Iterator<Item = u64>) -> Result<()> {
    let (mut batch, mut indices) = (BatchBuffer::default(), indices.peekable());
    while indices.peek().is_some() {
        batch.put(engine, shape, indices.by_ref())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{
        HDD, PARTITIONED, PartitionedTask, Reading, SUFFIXES, TOP_IN_CACHE, UNPARTITIONED, load_level_0,
        load_lower_levels, most_ratio, put, shape, variant,
    };
    use crate::engine::azekura::open_with;
    use crate::engine::memory::{Lie, Memory, number_of_records};
    use crate::engine::{Options, object};
    use crate::error::Result;
    use crate::experiment::rounds::Rounds;
    use azekura::{CompactionStrategy, LeveledOptions};
    use serde_json::{Map, Value, json};
    use std::path::Path;

    /// Loads, or reads with a device and a cache.
    fn run(dir: &Path, layout: &str, reading: Option<(bool, u64)>) -> Result<Map<String, Value>> {
        let stored = if layout == TOP_IN_CACHE { PARTITIONED } else { layout };
        let of = |(real_device, cache_bytes)| Reading { real_device, cache_bytes, warm_s: 0.1, seconds: 0.05 };
        let (dir, reading) = (dir.join(stored), reading.map(of));
        variant(json!(PartitionedTask { layout: layout.into(), dir, n: 250_000, table_bytes: 280 << 10, reading }))
    }

    fn number(answer: &Map<String, Value>, field: &str) -> f64 {
        answer[field].as_f64().unwrap_or_else(|| panic!("no number {field}: {answer:?}"))
    }

    /// All that the experiment does, with little data: index and filters exceed the cache, each of them fits it.
    #[test]
    fn partitioned_layouts_read_fewer_bytes() {
        let (dir, cache) = (tempfile::tempdir().unwrap(), 160 << 10);
        let loaded = run(dir.path(), UNPARTITIONED, None).unwrap();
        assert!(number(&loaded, "tables") > 5.0 && number(&loaded, "held_bytes") > cache as f64, "{loaded:?}");
        run(dir.path(), PARTITIONED, None).unwrap();
        let layouts = [UNPARTITIONED, PARTITIONED, TOP_IN_CACHE];
        let [whole, partitions, top] = layouts.map(|layout| run(dir.path(), layout, Some((false, cache))).unwrap());
        for answer in [&whole, &partitions, &top] {
            for suffix in SUFFIXES {
                let [ops, reads, seeks, cpu] = ["ops_per_s", "reads_per_get", "seeks_per_get", "cpu_us_per_get"]
                    .map(|field| number(answer, &format!("{field}{suffix}")));
                assert!(seeks > 0.0 && seeks <= reads, "{answer:?}");
                let max_ops = 1.0 / (seeks / HDD.seeks_per_s + cpu / 1e6);
                assert!(ops > 0.0 && ops <= max_ops * 1.000_001, "the clock of the disk was not used: {answer:?}");
            }
            assert!(number(answer, "cache_used_bytes") <= cache as f64);
        }
        assert!(
            number(&whole, "bytes_per_get_uniform") > number(&partitions, "bytes_per_get_uniform"),
            "{whole:?} {partitions:?}"
        );
        assert!(number(&whole, "held_bytes") < cache as f64 / 8.0, "{whole:?}");
        assert!(number(&partitions, "held_bytes") > number(&top, "held_bytes"), "{partitions:?} {top:?}");
        let real = run(dir.path(), PARTITIONED, Some((true, cache))).unwrap();
        assert!(SUFFIXES.iter().all(|suffix| number(&real, &format!("ops_per_s{suffix}")) > 0.0));
        // With so small a cache tables hold their filters themselves, which flatters the baseline.
        let error = run(dir.path(), UNPARTITIONED, Some((false, 20 << 10))).unwrap_err();
        assert!(error.to_string().contains("in addition to a cache of 20480"), "{error}");
    }

    #[test]
    fn losses_and_ratios_follow_from_rounds() {
        let mut all = Rounds::default();
        for (name, rates) in [
            ("hdd-unpartitioned", [5.0, 5.0]),
            ("hdd-partitioned", [55.0, 60.0]),
            ("ssd-large-unpartitioned", [38.0, 38.0]),
            ("ssd-small-unpartitioned", [23.0, 19.0]),
            ("ssd-large-partitioned", [40.0, 40.0]),
            ("ssd-small-partitioned", [30.0, 30.0]),
            ("ssd-small-rocksdb-direct", [42.0, 42.0]),
        ] {
            for rate in rates {
                let bytes = 1000.0 / rate;
                let round =
                    json!({"ops_per_s": rate, "hdd_ops_per_s": rate / 100.0, "held_bytes": 7, "bytes_per_get": bytes});
                all.add(name, object(round));
            }
        }
        let mut answer = Map::new();
        put(&all, &mut answer).unwrap();
        for (field, wanted) in [
            ("hdd_throughput_ratio", 57.5 / 5.0),
            ("ssd_loss_unpartitioned", 1.0 - 21.0 / 38.0),
            ("ssd_loss_partitioned", 0.25),
            ("ssd_throughput_ratio", 30.0 / 21.0),
            ("baseline_vs_peer", 2.0),
            ("hdd_baseline_vs_peer", 2.0),
            ("top_level_pinned_held_bytes", 7.0),
        ] {
            assert!((number(&answer, field) - wanted).abs() < 1e-9, "{field}: {}", answer[field]);
        }
        let range = |i| answer["ranges"]["ssd_loss_unpartitioned"][i].as_f64().unwrap();
        assert!((range(0) - 15.0 / 38.0).abs() < 1e-9 && (range(1) - 0.5).abs() < 1e-9);
        for missing in ["ssd_loss_peer", "top_level_pinned_hdd_ratio", "hdd_throughput_ratio_uniform"] {
            assert_eq!(answer[missing], Value::Null, "{missing}");
        }
        // 2 MB and three seeks for each get, against a seek and 8 KiB.
        let seconds = 3.0 / 120.0 + 0.02;
        assert!((most_ratio(1.0 / seconds) - seconds / (1.0 / 120.0 + 8192.0 / 100e6)).abs() < 1e-9);
    }

    #[test]
    fn every_record_is_written() {
        for n in [20, 999, 20_001] {
            let memory = Memory::new(Lie::None);
            load_lower_levels(&memory, &shape(n)).unwrap();
            load_level_0(&memory, &shape(n)).unwrap();
            assert_eq!(number_of_records(&memory), n);
        }
    }

    #[test]
    fn tree_has_two_runs_above_two_levels() {
        let leveled = LeveledOptions::default().target_file_size(140 << 10).base_level_size(560 << 10);
        let (dir, shape) = (tempfile::tempdir().unwrap(), shape(125_000));
        let open = |workers: Option<usize>| {
            let strategy = CompactionStrategy::Leveled(leveled.clone());
            let configure = |config: azekura::Config| workers.map_or(config.clone(), |workers| config.workers(workers));
            open_with(dir.path(), &Options::cached(4 << 20), configure, |own| own.compaction_strategy(strategy))
                .unwrap()
        };
        let engine = open(None);
        load_lower_levels(engine.as_ref(), &shape).unwrap();
        engine.close().unwrap();
        let engine = open(Some(0));
        load_level_0(engine.as_ref(), &shape).unwrap();
        let stats = engine.stats();
        let runs: Vec<u64> = stats["levels"].as_array().unwrap().iter().filter_map(|l| l["runs"].as_u64()).collect();
        assert_eq!((runs[0], runs.iter().sum::<u64>()), (2, 4), "{stats:?}");
        assert_eq!(number_of_records(engine.as_ref()), 125_000);
    }
}

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
//! If the baseline holds much memory beside its cache, the round is an error. The peer cannot run on the simulated
//! disk; its time there follows from the number and bytes of its reads.

use crate::engine::api::object;
use crate::engine::azekura::open_with;
use crate::engine::registry::{self, settle};
use crate::engine::{Engine, Options};
use crate::error::{Error, Result, wrong};
use crate::experiment::rounds::{Context, Rounds, put_range};
use crate::experiment::tree;
use crate::experiment::watch_fs::{DiskSpeed, SECTOR, Traffic, WatchFs};
use crate::measure::clock::repeat;
use crate::measure::disk;
use crate::measure::process::Usage;
use crate::workload::Shape;
use crate::workload::data::{FIRST_GENERATION, Zipfian, below, rng};
use azekura::{CompactionStrategy, DirectIo, LeveledOptions};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

/// Adjacent records that form one node.
const NODE: u64 = 100;
const HDD: DiskSpeed = DiskSpeed { seeks_per_s: 120.0, bytes_per_s: 100e6 };
/// Prefix of fields, whether the device is real, and the data per cache.
const PLACES: [(&str, bool, u64); 3] = [("hdd", false, 150), ("ssd-large", true, 50), ("ssd-small", true, 150)];
/// Suffixes of the fields of a choice of keys and a number of threads.
const SUFFIXES: [&str; 4] = ["", "_four_threads", "_uniform", "_uniform_four_threads"];
/// Reads between two readings of the clock.
const BUNDLE: u64 = 16;
const LOAD_CACHE_BYTES: u64 = 64 << 20;
const MANY_THREADS: u64 = 4;
/// The baseline may hold this part of its cache's size beside it.
const HELD: u64 = 8;

/// How index and filter are stored, and which parts of them may be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum TableLayout {
    /// The baseline: index and filter are cached whole.
    Unpartitioned,
    /// Partitions are cached, their top level is pinned.
    Partitioned,
    /// The same tables; the top level may be evicted too.
    TopInCache,
    /// The peer, unpartitioned.
    Peer,
}

const LAYOUTS: [TableLayout; 4] =
    [TableLayout::Unpartitioned, TableLayout::Partitioned, TableLayout::TopInCache, TableLayout::Peer];

impl TableLayout {
    /// Its name in fields; that of the engine for the peer.
    fn name(self) -> &'static str {
        match self {
            TableLayout::Unpartitioned => "unpartitioned",
            TableLayout::Partitioned => "partitioned",
            TableLayout::TopInCache => "top-in-cache",
            TableLayout::Peer => "rocksdb-direct",
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct PartitionedTask {
    layout: TableLayout,
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

fn variant_name(place: &str, layout: TableLayout) -> String {
    format!("{place}-{}", layout.name())
}

pub(crate) fn run(context: &Context<'_>) -> Result<Map<String, Value>> {
    // With fewer records tables are smaller, so that as many of their filters fit the cache.
    let (n, table_bytes) = context.size((1_500_000, 27 << 16), (60_000_000, 64 << 20));
    let (warm_s, seconds, rounds) = context.size((0.15, 0.2, 1), (1.5, 1.5, 2));
    let choice = "nodes of 100 neighbouring records by a zipfian law, 0.99, scrambled; fields with _uniform: uniform";
    let mut answer = object(json!({
        "records": n, "record_bytes": shape(1).total_bytes(), "table_bytes": table_bytes, "hdd": HDD, "choice": choice,
    }));
    let mut databases = Vec::new();
    let mut data = 0;
    for layout in LAYOUTS {
        // Both partitioned layouts read the same tables.
        let stored = if layout == TableLayout::TopInCache { TableLayout::Partitioned } else { layout };
        let task = |dir| PartitionedTask { layout, dir, n, table_bytes, reading: None };
        if stored != layout {
            databases.push(task(context.scratch.path.join(stored.name())));
            continue;
        }
        if let Err(why) = if layout == TableLayout::Peer { registry::check(layout.name()) } else { Ok(()) } {
            answer.insert("no_peer_because".into(), json!(why.to_string()));
            continue;
        }
        databases.push(task(context.scratch.fresh(layout.name())?));
        let loaded = context.child(&json!(databases.last()))?;
        eprintln!("{} loaded: {}", layout.name(), json!(loaded));
        if layout == TableLayout::Unpartitioned {
            data = loaded["levels"].as_array().into_iter().flatten().filter_map(|level| level["bytes"].as_u64()).sum();
        }
        answer.insert(format!("loaded_{}", layout.name().replace('-', "_")), Value::Object(loaded));
    }
    if data == 0 {
        return Err("the database that was loaded has no tables".into());
    }
    answer.insert("data_bytes".into(), json!(data));
    let mut variants = Vec::new();
    for (place, real_device, part) in PLACES {
        let reading = Reading { real_device, cache_bytes: data / part, warm_s, seconds };
        answer.insert(format!("{}_cache_bytes", place.replace('-', "_")), json!(reading.cache_bytes));
        for task in databases.iter().filter(|task| real_device || task.layout != TableLayout::Peer) {
            let timed = PartitionedTask { reading: Some(reading), ..task.clone() };
            variants.push((variant_name(place, task.layout), json!(timed)));
        }
    }
    let all = context.interleave(&variants, rounds)?;
    put_ratios(&all, &mut answer);
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
    if task.layout == TableLayout::Peer {
        return registry::open(task.layout.name(), &task.dir, &options);
    }
    let leveled = LeveledOptions {
        target_file_size: task.table_bytes,
        base_level_size: 4 * task.table_bytes,
        ..LeveledOptions::default()
    };
    let configure = |config: azekura::Config| match fs {
        Some(fs) => config.workers(0).fs(Arc::new(fs.clone())).direct_io(DirectIo::Always),
        None => config,
    };
    open_with(&task.dir, &options, configure, |own| {
        own.compaction_strategy(CompactionStrategy::Leveled(leveled))
            .partition_index_and_filters(task.layout != TableLayout::Unpartitioned)
            .cache_index_and_filter_blocks(evictable)
            .pin_top_level(task.layout != TableLayout::TopInCache)
    })
}

/// Fills a new database. `held_bytes`: memory of its tables if nothing can be evicted.
fn load(task: &PartitionedTask) -> Result<Map<String, Value>> {
    let (shape, start) = (shape(task.n), Instant::now());
    let engine = open(task, LOAD_CACHE_BYTES, false, None)?;
    tree::load_lower_levels(engine.as_ref(), &shape)?;
    let settled = settle(&[engine.as_ref()], start.elapsed())?;
    engine.close()?;
    let engine = open(task, LOAD_CACHE_BYTES, false, Some(&WatchFs::on_disk(false, false)))?;
    tree::load_level_0(engine.as_ref(), &shape)?;
    let load_s = start.elapsed().as_secs_f64();
    engine.sync()?;
    let tables = engine.tables()?;
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
        let mut sample = |threads, seconds| {
            seed += 100;
            sample(engine.as_ref(), &fs, &shape(task.n), (zipf, threads), seconds, seed)
        };
        sample(MANY_THREADS, reading.warm_s)?;
        for (threads, suffix) in [(MANY_THREADS, suffixes[1]), (1, suffixes[0])] {
            let (gets, seconds, traffic, used) = sample(threads, reading.seconds)?;
            // Of the peer's reads only their number is known: each counts as a seek.
            let traffic = match task.layout {
                TableLayout::Peer => Traffic { reads: used.reads, seeks: used.reads, bytes: used.device_read_bytes },
                _ => traffic,
            };
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
        }
    }
    let stats = engine.stats();
    engine.close()?;
    let (held, cache) = (stats.get("held_bytes").and_then(Value::as_u64).unwrap_or(0), reading.cache_bytes);
    if task.layout == TableLayout::Unpartitioned && held > cache / HELD {
        return Err(format!("tables hold {held} bytes beside a cache of {cache}: the baseline is flattered").into());
    }
    let fields = "held_bytes cache_used_bytes data_hits data_misses index_hits index_misses filter_hits filter_misses";
    let own = fields.split(' ').map(|name| (name.to_owned(), stats.get(name).cloned().unwrap_or_default()));
    answer.extend(own);
    Ok(answer)
}

/// Lets threads read for a while; returns gets, seconds, traffic of the disk and usage of the process.
fn sample(
    engine: &dyn Engine,
    fs: &WatchFs,
    shape: &Shape,
    (zipf, threads): (Option<Zipfian>, u64),
    seconds: f64,
    seed: u64,
) -> Result<(f64, f64, Traffic, Usage)> {
    let (traffic, used, start) = (fs.traffic(), Usage::now(), Instant::now());
    let read = |thread| {
        let (mut rng, mut key) = (rng(seed + thread), Vec::new());
        let timed = repeat(seconds, BUNDLE, |_| {
            let index = match zipf {
                Some(zipf) => zipf.index(&mut rng) * NODE + below(&mut rng, NODE),
                None => below(&mut rng, shape.n),
            };
            match shape.get(engine, index, &mut key)? {
                FIRST_GENERATION => Ok(()),
                other => Err(wrong(format!("record {index} has generation {other}, which was never written"))),
            }
        });
        timed.map(|timed| timed.count)
    };
    let gets = thread::scope(|scope| {
        let readers: Vec<_> = (1..=threads).map(|thread| scope.spawn(move || read(thread))).collect();
        let join = |reader: thread::ScopedJoinHandle<'_, Result<u64>>| {
            reader.join().map_err(|_| Error::from("a thread panicked"))?
        };
        readers.into_iter().map(join).sum::<Result<u64>>()
    })?;
    Ok((gets as f64, start.elapsed().as_secs_f64(), fs.traffic() - traffic, Usage::now() - used))
}

/// The ratios and losses of all rounds.
fn put_ratios(all: &Rounds, answer: &mut Map<String, Value>) {
    let [whole, parts, top, _] = LAYOUTS.map(|layout| variant_name("hdd", layout));
    let small = LAYOUTS.map(|layout| variant_name("ssd-small", layout));
    let large = LAYOUTS.map(|layout| variant_name("ssd-large", layout));
    let losses = ["ssd_loss_unpartitioned", "ssd_loss_partitioned", "ssd_loss_top_in_cache", "ssd_loss_peer"];
    for suffix in SUFFIXES {
        let [ops, hdd_ops, bytes] =
            ["ops_per_s", "hdd_ops_per_s", "bytes_per_get"].map(|field| format!("{field}{suffix}"));
        for (name, field, over, under) in [
            ("hdd_throughput_ratio", &ops, &parts, &whole),
            ("bytes_per_read_ratio", &bytes, &whole, &parts),
            ("ssd_throughput_ratio", &ops, &small[1], &small[0]),
            ("top_level_pinned_hdd_ratio", &ops, &parts, &top),
            ("top_level_pinned_ssd_ratio", &ops, &small[1], &small[2]),
            // The ratio of times is that of rates inverted.
            ("baseline_vs_peer", &ops, &small[3], &small[0]),
            ("hdd_baseline_vs_peer", &hdd_ops, &small[3], &small[0]),
            ("hdd_throughput_ratio_to_peer", &hdd_ops, &small[1], &small[3]),
        ] {
            all.put(answer, &format!("{name}{suffix}"), field, over, under);
        }
        for (i, name) in losses.iter().enumerate() {
            let lost =
                all.ratio(&ops, &small[i], &large[i]).map(|[median, low, high]| [1.0 - median, 1.0 - high, 1.0 - low]);
            put_range(answer, &format!("{name}{suffix}"), lost);
        }
        answer.insert(format!("hdd_most_ratio{suffix}"), json!(all.median(&whole, &ops).map(most_ratio)));
    }
    let held = ["unpartitioned_held_bytes", "top_level_pinned_held_bytes", "top_level_cached_held_bytes"];
    for (name, variant) in held.iter().zip(&small) {
        answer.insert((*name).into(), json!(all.median(variant, "held_bytes")));
    }
}

/// The throughput ratio on the simulated disk if the other side read only one block for each get, which spans two
/// sectors: no layout of index and filter is better while data is not cached.
fn most_ratio(baseline_ops_per_s: f64) -> f64 {
    1.0 / (baseline_ops_per_s * Traffic { reads: 1, seeks: 1, bytes: 2 * SECTOR }.seconds(HDD))
}

#[cfg(test)]
mod tests {
    use super::{HDD, PartitionedTask, Reading, SUFFIXES, TableLayout, most_ratio, put_ratios, variant};
    use crate::engine::api::object;
    use crate::error::Result;
    use crate::experiment::rounds::Rounds;
    use serde_json::{Map, Value, json};
    use std::path::Path;

    /// Loads, or reads with a device and a cache.
    fn run(dir: &Path, layout: TableLayout, reading: Option<(bool, u64)>) -> Result<Map<String, Value>> {
        let stored = if layout == TableLayout::TopInCache { TableLayout::Partitioned } else { layout };
        let of = |(real_device, cache_bytes)| Reading { real_device, cache_bytes, warm_s: 0.1, seconds: 0.05 };
        let (dir, reading) = (dir.join(stored.name()), reading.map(of));
        variant(json!(PartitionedTask { layout, dir, n: 250_000, table_bytes: 280 << 10, reading }))
    }

    fn number(answer: &Map<String, Value>, field: &str) -> f64 {
        answer[field].as_f64().unwrap_or_else(|| panic!("no number {field}: {answer:?}"))
    }

    /// All that the experiment does, with little data: index and filters exceed the cache, each of them fits it.
    #[test]
    fn partitions_need_fewer_bytes_and_nothing_is_held() {
        let (dir, cache) = (tempfile::tempdir().unwrap(), 160 << 10);
        let loaded = run(dir.path(), TableLayout::Unpartitioned, None).unwrap();
        assert!(number(&loaded, "tables") > 5.0 && number(&loaded, "held_bytes") > cache as f64, "{loaded:?}");
        run(dir.path(), TableLayout::Partitioned, None).unwrap();
        let layouts = [TableLayout::Unpartitioned, TableLayout::Partitioned, TableLayout::TopInCache];
        let [whole, parts, top] = layouts.map(|layout| run(dir.path(), layout, Some((false, cache))).unwrap());
        for answer in [&whole, &parts, &top] {
            for suffix in SUFFIXES {
                let [ops, reads, seeks, cpu] = ["ops_per_s", "reads_per_get", "seeks_per_get", "cpu_us_per_get"]
                    .map(|field| number(answer, &format!("{field}{suffix}")));
                assert!(seeks > 0.0 && seeks <= reads, "{answer:?}");
                let most = 1.0 / (seeks / HDD.seeks_per_s + cpu / 1e6);
                assert!(ops > 0.0 && ops <= most * 1.000_001, "the clock of the disk was not used: {answer:?}");
            }
            assert!(number(answer, "cache_used_bytes") <= cache as f64);
        }
        assert!(
            number(&whole, "bytes_per_get_uniform") > number(&parts, "bytes_per_get_uniform"),
            "{whole:?} {parts:?}"
        );
        assert!(number(&whole, "held_bytes") < cache as f64 / 8.0, "{whole:?}");
        assert!(number(&parts, "held_bytes") > number(&top, "held_bytes"), "{parts:?} {top:?}");
        let real = run(dir.path(), TableLayout::Partitioned, Some((true, cache))).unwrap();
        assert!(SUFFIXES.iter().all(|suffix| number(&real, &format!("ops_per_s{suffix}")) > 0.0));
        // With so small a cache tables hold their filters themselves, which flatters the baseline.
        let error = run(dir.path(), TableLayout::Unpartitioned, Some((false, 20 << 10))).unwrap_err();
        assert!(error.to_string().contains("beside a cache of 20480"), "{error}");
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
        put_ratios(&all, &mut answer);
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
}

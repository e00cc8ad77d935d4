//! `partitioned`: point reads of a database whose indexes and filters do not fit the cache they share with its data:
//! whole ones, one of each for a table, against pieces that are loaded on demand.
//!
//! Records of 8 and 8 bytes, as of an index from number to number: a table of 64 MiB has a filter of 4 MB, and metadata
//! is 8 % of the data, so that it exceeds a cache of 2 % four times and one of 0.67 % twelve times. The tree has the
//! shape that trees have: a bottom, a level above it, and two young runs, each of whose filters a read asks. Two
//! devices:
//! - `hdd`: a simulated disk on a virtual clock ([`crate::experiment::fs::spindle`]), with a cache of 1/150 of the
//!   data. Throughput is reads per second of that disk and of CPU together. What the disk does not count comes from the
//!   cache of the system, so that a round need not last as long as it says.
//! - `ssd`: the real device, past the cache of the system, with a cache of 1/50 and one of 1/150 of the data: the loss
//!   is that of throughput from the one to the other.
//!
//! What tables hold beside the cache is measured; where the baseline holds much, the round is an error. The peer cannot
//! be opened on the simulated disk; what that disk would make of its reads follows from their number and bytes.

use crate::engine::azekura::open_on;
use crate::engine::{Engine, Options, registry};
use crate::experiment::experiment::{Context, Experiment};
use crate::experiment::fs::spindle::{SECTOR, Speed, SpindleFs, Traffic};
use crate::experiment::reads::cached_options;
use crate::experiment::rounds::{Rounds, Variant, interleave};
use crate::experiment::tree;
use crate::failure::{Failure, Result, wrong};
use crate::machine::disk;
use crate::machine::process::Usage;
use crate::machine::settle::settle;
use crate::workload::Shape;
use crate::workload::fill::FIRST_GENERATION;
use crate::workload::keys::KeyOrder;
use crate::workload::read::get_checked;
use crate::workload::rng::Rng;
use crate::workload::zipf::{THETA, Zipf};
use azekura::fs::DiskFs;
use azekura::{CompactionStrategy, DirectIo, LeveledOptions};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of a key, and of a value.
const HALF: usize = 8;
/// Records of one node lie together.
const NODE: u64 = 100;
/// A disk that turns.
const HDD: Speed = Speed { seeks_per_s: 120.0, bytes_per_s: 100e6 };
/// A device, and which part of the data its cache holds; what was measured there is named so.
const PLACES: [(&str, Device, u64); 3] =
    [("hdd", Device::Simulated, 150), ("ssd-large", Device::Real, 50), ("ssd-small", Device::Real, 150)];
/// How the fields of a choice of keys and of a number of threads end.
const SUFFIXES: [&str; 4] = ["", "_four_threads", "_uniform", "_uniform_four_threads"];
/// Reads between two looks at the clock.
const BUNDLE: u64 = 16;
/// While a database is loaded; it matters to nobody.
const LOAD_CACHE_BYTES: u64 = 64 << 20;
const MANY_THREADS: u64 = 4;
/// Tables may hold this part of the cache's size beside it, and the baseline still counts as one that is cached.
const HELD: u64 = 8;

/// See the module.
pub(crate) struct Partitioned;

/// How index and filter lie in tables, and what of them may be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Layout {
    /// The baseline: all that is cached comes and goes whole.
    Unpartitioned,
    /// Pieces come and go, their top level stays.
    Partitioned,
    /// The same tables; the top level comes and goes as well.
    TopInCache,
    /// The peer, unpartitioned.
    Peer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Device {
    Simulated,
    Real,
}

/// What a child is asked to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Task {
    layout: Layout,
    dir: PathBuf,
    n: u64,
    table_bytes: u64,
    /// It loads where nothing shall be read.
    reading: Option<Reading>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Reading {
    device: Device,
    cache_bytes: u64,
    /// Seconds for each choice of keys, uncounted.
    warm_s: f64,
    /// Seconds for each choice of keys and number of threads.
    seconds: f64,
}

/// Which keys are read; all of them exist.
enum Choice {
    /// Some nodes very often, without regard to where they lie; of a node, any record.
    Nodes(Zipf),
    /// Each as often as any other.
    Uniform,
}

/// What was counted while threads read.
struct Sample {
    gets: u64,
    seconds: f64,
    traffic: Traffic,
    used: Usage,
}

impl Layout {
    /// Also the name of the engine for a peer.
    fn name(self) -> &'static str {
        match self {
            Layout::Unpartitioned => "unpartitioned",
            Layout::Partitioned => "partitioned",
            Layout::TopInCache => "top-in-cache",
            Layout::Peer => "rocksdb-direct",
        }
    }
}

fn shape(n: u64) -> Shape {
    Shape { n, key_size: HALF, least_value: HALF, value_size: HALF, order: KeyOrder::Sequential }
}

impl Experiment for Partitioned {
    fn name(&self) -> &'static str {
        "partitioned"
    }

    fn about(&self) -> &'static str {
        "index and filters whole or in pieces, when they do not fit the cache; a simulated disk and the real device"
    }

    fn run(&self, context: &Context<'_>) -> Result<Map<String, Value>> {
        // The fewer the records, the smaller the tables, so that as many of their filters go into the cache.
        let (n, table_bytes) = context.size((1_500_000, 27 << 16), (60_000_000, 64 << 20));
        let (warm_s, seconds, rounds) = context.size((0.15, 0.2, 1), (1.5, 1.5, 2));
        let mut answer = Map::new();
        for (name, value) in [("records", n), ("record_bytes", shape(1).total_bytes()), ("table_bytes", table_bytes)] {
            answer.insert(name.into(), json!(value));
        }
        answer.insert("hdd".into(), json!({"seeks_per_s": HDD.seeks_per_s, "bytes_per_s": HDD.bytes_per_s}));
        let choice =
            "nodes of 100 neighbouring records by a zipfian law, 0.99, scrambled; fields with _uniform: uniform";
        answer.insert("choice".into(), json!(choice));
        let (databases, data) = load_all(context, n, table_bytes, &mut answer)?;
        answer.insert("data_bytes".into(), json!(data));
        let mut variants = Vec::new();
        for (place, device, part) in PLACES {
            let reading = Reading { device, cache_bytes: data / part, warm_s, seconds };
            answer.insert(format!("{}_cache_bytes", place.replace('-', "_")), json!(reading.cache_bytes));
            for (layout, dir) in &databases {
                if (*layout, device) != (Layout::Peer, Device::Simulated) {
                    let task = Task { layout: *layout, dir: dir.clone(), n, table_bytes, reading: Some(reading) };
                    variants.push(Variant { name: variant(place, *layout), task: json!(task) });
                }
            }
        }
        let all = interleave(context, &variants, rounds)?;
        put_answers(&all, &mut answer);
        answer.insert("rounds".into(), all.json());
        Ok(answer)
    }

    fn variant(&self, task: &Value) -> Result<Map<String, Value>> {
        let task: Task = serde_json::from_value(task.clone())?;
        match &task.reading {
            None => load(&task),
            Some(reading) => read(&task, reading),
        }
    }
}

fn variant(place: &str, layout: Layout) -> String {
    format!("{place}-{}", layout.name())
}

/// Loads a database for each layout that has tables of its own, and says how many bytes the tables of the baseline
/// have. A peer that cannot be had is left out, and the answer says why.
fn load_all(
    context: &Context<'_>,
    n: u64,
    table_bytes: u64,
    answer: &mut Map<String, Value>,
) -> Result<(Vec<(Layout, PathBuf)>, u64)> {
    let mut data = 0;
    let mut load = |layout: Layout| -> Result<PathBuf> {
        let dir = context.fresh(layout.name())?;
        let loaded = context.child(&json!(Task { layout, dir: dir.clone(), n, table_bytes, reading: None }))?;
        eprintln!("{} loaded: {}", layout.name(), Value::Object(loaded.clone()));
        if layout == Layout::Unpartitioned {
            let levels = loaded["levels"].as_array().into_iter().flatten();
            data = levels.filter_map(|level| level["bytes"].as_u64()).sum();
        }
        answer.insert(format!("loaded_{}", layout.name().replace('-', "_")), Value::Object(loaded));
        Ok(dir)
    };
    let (whole, pieces) = (load(Layout::Unpartitioned)?, load(Layout::Partitioned)?);
    let peer = registry::check(Layout::Peer.name()).and_then(|()| load(Layout::Peer));
    if data == 0 {
        return Err("the database that was loaded has no tables".into());
    }
    let mut databases = vec![
        (Layout::Unpartitioned, whole),
        (Layout::Partitioned, pieces.clone()),
        (Layout::TopInCache, pieces), // tables do not know whether their top will stay
    ];
    match peer {
        Ok(dir) => databases.push((Layout::Peer, dir)),
        Err(why) => {
            answer.insert("no_peer_because".into(), json!(why.to_string()));
        }
    }
    Ok((databases, data))
}

/// Opens a database; ours on `fs` if there is one, and without a hand to merge anything when it shall `stay` as it is:
/// it would else make one run of few as soon as nobody writes.
fn open(task: &Task, cache_bytes: u64, evictable: bool, stay: bool, fs: Option<&SpindleFs>) -> Result<Box<dyn Engine>> {
    let options = Options {
        cache_bytes,
        table_bytes: Some(task.table_bytes),
        ..cached_options(8 * task.table_bytes) // so that it is flushed when we say so
    };
    if task.layout == Layout::Peer {
        return registry::open(task.layout.name(), &task.dir, &options);
    }
    let leveled =
        LeveledOptions { table_size: task.table_bytes, base_size: 4 * task.table_bytes, ..LeveledOptions::default() };
    open_on(
        &task.dir,
        &options,
        |config| {
            let config = if stay { config.workers(0) } else { config };
            match fs {
                Some(fs) => config.fs(Arc::new(fs.clone())).direct_io(DirectIo::Always),
                None => config,
            }
        },
        |own| {
            own.compaction_strategy(CompactionStrategy::Leveled(leveled))
                .partition_index_and_filters(task.layout != Layout::Unpartitioned)
                .cache_index_and_filter_blocks(evictable)
                .pin_top_level(task.layout != Layout::TopInCache)
        },
    )
}

/// Fills a new database. What its tables would hold if nothing could be evicted is what index and filters take: all of
/// them in tables that have one of each, else the top levels.
fn load(task: &Task) -> Result<Map<String, Value>> {
    let engine = open(task, LOAD_CACHE_BYTES, false, false, None)?;
    let start = Instant::now();
    tree::sink(engine.as_ref(), &shape(task.n))?;
    let settled = settle(&[engine.as_ref()], start.elapsed())?;
    engine.close()?;
    let engine = open(task, LOAD_CACHE_BYTES, false, true, None)?;
    tree::add_young(engine.as_ref(), &shape(task.n))?;
    let load_s = start.elapsed().as_secs_f64();
    engine.sync()?;
    let tables = engine.tables()?;
    let step = (task.n / (8 * tables.max(1))).max(1);
    for index in (0..task.n).step_by(usize::try_from(step)?) {
        get_checked(engine.as_ref(), &shape(task.n), index, &mut Vec::new())?;
    }
    let mut answer = Map::new();
    answer.insert("load_s".into(), json!(load_s));
    answer.insert("settled".into(), json!(settled.reached));
    answer.insert("tables".into(), json!(tables));
    answer.insert("levels".into(), engine.stats().get("levels").cloned().unwrap_or_default());
    answer.insert("held_bytes".into(), engine.stats().get("held_bytes").cloned().unwrap_or_default());
    engine.close()?;
    answer.insert("disk_bytes".into(), json!(disk::usage(&task.dir).allocated));
    Ok(answer)
}

/// Reads keys of all choices, with many threads and with one.
fn read(task: &Task, reading: &Reading) -> Result<Map<String, Value>> {
    let fs = SpindleFs::new(Arc::new(DiskFs::new()), reading.device == Device::Real);
    let engine = open(task, reading.cache_bytes, true, true, Some(&fs))?;
    let reader = Reader { engine: engine.as_ref(), fs: &fs, shape: shape(task.n) };
    let mut answer = Map::new();
    let mut seed = 0; // no choice is made twice: what was just read is cached
    for (choice, suffixes) in [
        (Choice::Nodes(Zipf::new(task.n / NODE, THETA)), [SUFFIXES[0], SUFFIXES[1]]),
        (Choice::Uniform, [SUFFIXES[2], SUFFIXES[3]]),
    ] {
        reader.sample(&choice, MANY_THREADS, reading.warm_s, seed)?;
        for (threads, suffix) in [(MANY_THREADS, suffixes[1]), (1, suffixes[0])] {
            seed += 100;
            let sample = reader.sample(&choice, threads, reading.seconds, seed)?;
            for (name, figure) in sample.figures(task.layout, reading.device) {
                answer.insert(format!("{name}{suffix}"), json!(figure));
            }
        }
        seed += 100;
    }
    let stats = engine.stats();
    engine.close()?;
    let held = stats.get("held_bytes").and_then(Value::as_u64).unwrap_or(0);
    if task.layout == Layout::Unpartitioned && held > reading.cache_bytes / HELD {
        let cache = reading.cache_bytes;
        return Err(format!("tables hold {held} bytes beside a cache of {cache}: the baseline is flattered").into());
    }
    for name in [
        "held_bytes",
        "cache_used_bytes",
        "data_hits",
        "data_misses",
        "index_hits",
        "index_misses",
        "filter_hits",
        "filter_misses",
    ] {
        answer.insert(name.into(), stats.get(name).cloned().unwrap_or_default());
    }
    Ok(answer)
}

/// Reads one open database.
struct Reader<'a> {
    engine: &'a dyn Engine,
    fs: &'a SpindleFs,
    shape: Shape,
}

impl Reader<'_> {
    /// Lets threads read for a while.
    fn sample(&self, choice: &Choice, threads: u64, seconds: f64, seed: u64) -> Result<Sample> {
        let (traffic, used, start) = (self.fs.traffic(), Usage::now(), Instant::now());
        let deadline = start + Duration::try_from_secs_f64(seconds)?;
        let gets = thread::scope(|scope| -> Result<u64> {
            let readers: Vec<_> = (1..=threads)
                .map(|thread| scope.spawn(move || self.read_until(choice, deadline, Rng::new(seed + thread))))
                .collect();
            let mut gets = 0;
            for reader in readers {
                gets += reader.join().map_err(|_| Failure::from("a thread panicked"))??;
            }
            Ok(gets)
        })?;
        let seconds = start.elapsed().as_secs_f64();
        Ok(Sample { gets, seconds, traffic: self.fs.traffic() - traffic, used: Usage::now() - used })
    }

    fn read_until(&self, choice: &Choice, deadline: Instant, mut rng: Rng) -> Result<u64> {
        let (mut key, mut gets) = (Vec::new(), 0);
        while gets == 0 || Instant::now() < deadline {
            for _ in 0..BUNDLE {
                let index = match choice {
                    Choice::Nodes(zipf) => zipf.scrambled(&mut rng) * NODE + rng.below(NODE),
                    Choice::Uniform => rng.below(self.shape.n),
                };
                let generation = get_checked(self.engine, &self.shape, index, &mut key)?;
                if generation != FIRST_GENERATION {
                    return Err(wrong(format!("record {index} has generation {generation}, which was never written")));
                }
                gets += 1;
            }
        }
        Ok(gets)
    }
}

impl Sample {
    /// The figures of a variant, by name. Of the peer's reads only the kernel knows, and not how many continued the one
    /// before: each counts as a seek.
    fn figures(&self, layout: Layout, device: Device) -> Vec<(&'static str, f64)> {
        let Sample { gets, seconds, traffic, used } = self;
        let gets = *gets as f64;
        let traffic = match layout {
            Layout::Peer => Traffic { reads: used.reads, seeks: used.reads, bytes: used.device_read_bytes },
            _ => *traffic,
        };
        let simulated = traffic.seconds(HDD) + used.cpu_s;
        let seconds = if device == Device::Simulated { simulated } else { *seconds };
        vec![
            ("ops_per_s", gets / seconds),
            ("hdd_ops_per_s", gets / simulated),
            ("cpu_us_per_get", used.cpu_s * 1e6 / gets),
            ("bytes_per_get", traffic.bytes as f64 / gets),
            ("reads_per_get", traffic.reads as f64 / gets),
            ("seeks_per_get", traffic.seeks as f64 / gets),
        ]
    }
}

/// The ratios and losses of all rounds.
fn put_answers(all: &Rounds, answer: &mut Map<String, Value>) {
    let layouts = [Layout::Unpartitioned, Layout::Partitioned, Layout::TopInCache, Layout::Peer];
    let [whole, pieces, top, _] = layouts.map(|layout| variant("hdd", layout));
    let [small_whole, small_pieces, small_top, small_peer] = layouts.map(|layout| variant("ssd-small", layout));
    let losses = [
        ("ssd_loss_unpartitioned", Layout::Unpartitioned),
        ("ssd_loss_partitioned", Layout::Partitioned),
        ("ssd_loss_top_in_cache", Layout::TopInCache),
        ("ssd_loss_peer", Layout::Peer),
    ];
    for suffix in SUFFIXES {
        let [ops, hdd_ops, bytes] =
            ["ops_per_s", "hdd_ops_per_s", "bytes_per_get"].map(|field| format!("{field}{suffix}"));
        for (name, field, over, under) in [
            ("hdd_throughput_ratio", &ops, &pieces, &whole),
            ("bytes_per_read_ratio", &bytes, &whole, &pieces),
            ("ssd_throughput_ratio", &ops, &small_pieces, &small_whole),
            ("top_level_pinned_hdd_ratio", &ops, &pieces, &top),
            ("top_level_pinned_ssd_ratio", &ops, &small_pieces, &small_top),
            // Times are to each other as rates the other way.
            ("baseline_vs_peer", &ops, &small_peer, &small_whole),
            ("hdd_baseline_vs_peer", &hdd_ops, &small_peer, &small_whole),
            ("hdd_throughput_ratio_to_peer", &hdd_ops, &small_pieces, &small_peer),
        ] {
            all.put_ratio(answer, &format!("{name}{suffix}"), field, over, under);
        }
        for (name, layout) in losses {
            let (small, large) = (variant("ssd-small", layout), variant("ssd-large", layout));
            put_loss(all, answer, &format!("{name}{suffix}"), &ops, &small, &large);
        }
        let most = all.median(&whole, &ops).map(most_ratio);
        answer.insert(format!("hdd_most_ratio{suffix}"), json!(most));
    }
    for (name, layout) in [
        ("unpartitioned_held_bytes", Layout::Unpartitioned),
        ("top_level_pinned_held_bytes", Layout::Partitioned),
        ("top_level_cached_held_bytes", Layout::TopInCache),
    ] {
        answer.insert(name.into(), json!(all.median(&variant("ssd-small", layout), "held_bytes")));
    }
}

/// The throughput ratio on the simulated disk if the other side read one block for each get, which spans two sectors,
/// and nothing else: whatever a layout of index and filter does, it is not better than that while data is not cached.
fn most_ratio(baseline_ops_per_s: f64) -> f64 {
    let block = Traffic { reads: 1, seeks: 1, bytes: 2 * SECTOR };
    1.0 / (baseline_ops_per_s * block.seconds(HDD))
}

/// Which part of the throughput is gone with the smaller cache, and its range over rounds.
fn put_loss(all: &Rounds, answer: &mut Map<String, Value>, name: &str, field: &str, small: &str, large: &str) {
    let kept = all.ratio(field, small, large);
    answer.insert(name.to_owned(), json!(kept.map(|kept| 1.0 - kept.median)));
    let ranges = answer.entry("ranges").or_insert_with(|| json!({}));
    ranges[name] = json!(kept.map(|kept| [1.0 - kept.high, 1.0 - kept.low]));
}

#[cfg(test)]
mod tests {
    use super::{Device, HDD, Layout, Partitioned, Reading, SUFFIXES, Task, most_ratio, put_answers, shape};
    use crate::engine::registry;
    use crate::experiment::experiment::Experiment;
    use crate::experiment::rounds::Rounds;
    use serde_json::{Map, Value, json};
    use std::path::Path;

    const RECORDS: u64 = 250_000;

    fn task(dir: &Path, layout: Layout, reading: Option<Reading>) -> Task {
        let name = if layout == Layout::TopInCache { Layout::Partitioned.name() } else { layout.name() };
        Task { layout, dir: dir.join(name), n: RECORDS, table_bytes: 280 << 10, reading }
    }

    fn reading(device: Device, cache_bytes: u64) -> Option<Reading> {
        Some(Reading { device, cache_bytes, warm_s: 0.1, seconds: 0.05 })
    }

    fn run(task: &Task) -> Map<String, Value> {
        Partitioned.variant(&json!(task)).unwrap()
    }

    fn number(answer: &Map<String, Value>, field: &str) -> f64 {
        answer[field].as_f64().unwrap_or_else(|| panic!("no number {field}: {answer:?}"))
    }

    /// All that the experiment does, with little data: index and filters exceed the cache, and each is small enough for
    /// it.
    #[test]
    fn pieces_are_read_in_place_of_whole_filters_and_nothing_is_held_beside_the_cache() {
        let dir = tempfile::tempdir().unwrap();
        let cache = 160 << 10;
        let loaded = run(&task(dir.path(), Layout::Unpartitioned, None));
        assert!(number(&loaded, "tables") > 5.0, "{loaded:?}");
        assert!(number(&loaded, "held_bytes") > cache as f64, "all of index and filters: {loaded:?}");
        run(&task(dir.path(), Layout::Partitioned, None));
        let layouts = [Layout::Unpartitioned, Layout::Partitioned, Layout::TopInCache];
        let [whole, pieces, top] =
            layouts.map(|layout| run(&task(dir.path(), layout, reading(Device::Simulated, cache))));
        for answer in [&whole, &pieces, &top] {
            for suffix in SUFFIXES {
                let [ops, reads, seeks, cpu] = ["ops_per_s", "reads_per_get", "seeks_per_get", "cpu_us_per_get"]
                    .map(|field| number(answer, &format!("{field}{suffix}")));
                assert!(seeks > 0.0 && seeks <= reads, "{answer:?}");
                let most = 1.0 / (seeks / HDD.seeks_per_s + cpu / 1e6);
                assert!(ops > 0.0 && ops <= most * 1.000_001, "the clock of the disk was not asked: {answer:?}");
            }
            assert!(number(answer, "cache_used_bytes") <= cache as f64);
        }
        let bytes = |answer| number(answer, "bytes_per_get_uniform");
        assert!(bytes(&whole) > bytes(&pieces), "{whole:?} {pieces:?}");
        let held = |answer| number(answer, "held_bytes");
        assert!(held(&whole) < cache as f64 / 8.0, "{whole:?}");
        assert!(held(&pieces) > held(&top), "{pieces:?} {top:?}");
        let real = run(&task(dir.path(), Layout::Partitioned, reading(Device::Real, cache)));
        assert!(SUFFIXES.iter().all(|suffix| number(&real, &format!("ops_per_s{suffix}")) > 0.0));
        // With so small a cache tables hold their filters themselves, and the baseline would be flattered.
        let held = task(dir.path(), Layout::Unpartitioned, reading(Device::Simulated, 20 << 10));
        let failure = Partitioned.variant(&json!(held)).unwrap_err();
        assert!(failure.to_string().contains("beside a cache of 20480"), "{failure}");
    }

    #[test]
    fn the_peer_reads_its_files_past_the_cache_of_the_system() {
        if let Err(why) = registry::check(Layout::Peer.name()) {
            return eprintln!("not here: {why}");
        }
        let dir = tempfile::tempdir().unwrap();
        let loaded = run(&task(dir.path(), Layout::Peer, None));
        assert!(number(&loaded, "tables") > 1.0, "{loaded:?}");
        let read = run(&task(dir.path(), Layout::Peer, reading(Device::Real, 160 << 10)));
        for suffix in SUFFIXES {
            assert!(number(&read, &format!("ops_per_s{suffix}")) > 0.0);
            let bytes = number(&read, &format!("bytes_per_get{suffix}"));
            assert!(bytes > 100.0, "the device was not asked: {read:?}");
        }
    }

    #[test]
    fn losses_and_ratios_are_those_of_the_rounds() {
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
                let mut round = json!({"ops_per_s": rate, "hdd_ops_per_s": rate / 100.0, "held_bytes": 7});
                round["bytes_per_get"] = json!(1000.0 / rate);
                all.add(name, round.as_object().unwrap().clone());
            }
        }
        let mut answer = Map::new();
        put_answers(&all, &mut answer);
        let near = |field: &str, wanted: f64| {
            assert!((number(&answer, field) - wanted).abs() < 1e-9, "{field}: {}", answer[field]);
        };
        near("hdd_throughput_ratio", 57.5 / 5.0);
        near("ssd_loss_unpartitioned", 1.0 - 21.0 / 38.0);
        near("ssd_loss_partitioned", 0.25);
        near("ssd_throughput_ratio", 30.0 / 21.0);
        near("baseline_vs_peer", 2.0);
        near("top_level_pinned_held_bytes", 7.0);
        near("hdd_baseline_vs_peer", 2.0);
        let range = answer["ranges"]["ssd_loss_unpartitioned"].as_array().unwrap();
        let range: Vec<f64> = range.iter().filter_map(Value::as_f64).collect();
        assert!((range[0] - 15.0 / 38.0).abs() < 1e-9 && (range[1] - 0.5).abs() < 1e-9, "{range:?}");
        for missing in ["ssd_loss_peer", "top_level_pinned_hdd_ratio", "hdd_throughput_ratio_uniform"] {
            assert_eq!(answer[missing], Value::Null, "{missing}");
        }
    }

    #[test]
    fn the_most_that_can_be_gained_is_all_but_one_read_of_a_block() {
        // 2 MB and three seeks for each get, against a seek and 8 KiB.
        let seconds = 3.0 / 120.0 + 0.02;
        assert!((most_ratio(1.0 / seconds) - seconds / (1.0 / 120.0 + 8192.0 / 100e6)).abs() < 1e-9);
        assert_eq!(shape(10).total_bytes(), 160);
    }
}

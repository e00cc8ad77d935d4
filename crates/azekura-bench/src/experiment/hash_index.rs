//! `hash-index`: what a hash index in data blocks, or fingerprints, gain in cached point reads, and what they take in
//! space; against binary search with a whole key every 16 records.
//!
//! All variants hold the same records in tables of the same number and order: one memtable takes them all, so no
//! compaction makes a difference. Of the hash indexes that are no larger than [`SPACE_LIMIT`] allows, the one with the
//! least CPU inside of the block gives the answer its plain fields; all have fields of their own beside them. Whole
//! keys that stand closer help a binary search too: `same_interval_…` is what is left to the hash index itself.

use crate::engine::azekura::open_with;
use crate::engine::{Engine, Options, registry};
use crate::experiment::experiment::{Context, Experiment};
use crate::experiment::lookups;
use crate::experiment::reads::{self, Choice, cached_options};
use crate::experiment::rounds::{Rounds, Variant, interleave};
use crate::failure::Result;
use crate::report::figures::ratio;
use azekura::DataBlockIndexType;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::PathBuf;

/// The baseline has a whole key every so many records, as RocksDB has.
const BASE_INTERVAL: u8 = 16;
/// Entries for each bucket.
const UTIL_RATIOS: [f64; 3] = [1.0, 0.75, 0.5];
/// Sizes of data blocks, and how the names of fields for them end. The first is that of the question.
const BLOCKS: [(u32, &str); 2] = [(16 << 10, ""), (4 << 10, "_4k")];
/// What is asked of each size.
const FULL: [Plan; 2] =
    [Plan { intervals: &[BASE_INTERVAL, 4, 2], peer: true }, Plan { intervals: &[4, 2], peer: true }];
const QUICK: [Plan; 2] = [Plan { intervals: &[4], peer: true }, Plan { intervals: &[4], peer: false }];
/// A hash index may make tables so many times as large as the baseline's.
const SPACE_LIMIT: f64 = 1.046;
const PEER: &str = "rocksdb";
const MEMTABLE_BYTES: u64 = 1 << 30;

/// The ratios of a variant to the baseline, and the fields of its rounds that they are of.
const FIELDS: [(&str, &str); 4] = [
    ("seek_cpu_ratio", "seek_cpu_ns"),
    ("throughput_ratio", "gets_per_s"),
    ("get_cpu_ratio", "cpu_ns"),
    ("space_ratio", "table_bytes"),
];

/// See the module.
pub(crate) struct HashIndex;

/// What is asked of one size of blocks.
#[derive(Clone, Copy, Debug)]
struct Plan {
    /// Those of the hash indexes. One of 1 makes tables larger than [`SPACE_LIMIT`] allows.
    intervals: &'static [u8],
    /// Whether the peer is asked too.
    peer: bool,
}

/// How data blocks lead to their entries.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Layout {
    Search {
        interval: u8,
    },
    Hash {
        interval: u8,
        util_ratio: f64,
    },
    Fingerprint,
    /// The peer, by binary search or with its hash index.
    Peer {
        hashed: bool,
    },
}

/// One variant.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Blocks {
    layout: Layout,
    bytes: u32,
}

/// What a child is asked to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Task {
    dir: PathBuf,
    blocks: Blocks,
    n: u64,
    /// Seconds to read; it loads where there are none.
    seconds: Option<f64>,
}

impl Blocks {
    fn name(self) -> String {
        let size = format!("{}k", self.bytes >> 10);
        match self.layout {
            Layout::Search { interval } => format!("search_interval_{interval}_{size}"),
            Layout::Hash { interval, util_ratio } => {
                format!("hash_interval_{interval}_util_{:03.0}_{size}", util_ratio * 100.0)
            }
            Layout::Fingerprint => format!("fingerprint_{size}"),
            Layout::Peer { hashed: false } => format!("rocksdb_{size}"),
            Layout::Peer { hashed: true } => format!("rocksdb_hash_{size}"),
        }
    }

    /// The same without the hash index.
    fn search_alone(self) -> Option<Blocks> {
        match self.layout {
            Layout::Hash { interval, .. } => Some(Blocks { layout: Layout::Search { interval }, ..self }),
            _ => None,
        }
    }

    fn is_hash(self) -> bool {
        matches!(self.layout, Layout::Hash { .. })
    }

    fn is_peer(self) -> bool {
        matches!(self.layout, Layout::Peer { .. })
    }
}

/// The baseline.
const BASE: Layout = Layout::Search { interval: BASE_INTERVAL };

/// What is asked, in the order of a round.
fn variants(plans: &[Plan; 2], with_peer: bool) -> Vec<Blocks> {
    let mut all = Vec::new();
    for ((bytes, _), plan) in BLOCKS.into_iter().zip(plans) {
        let mut add = |layout| all.push(Blocks { layout, bytes });
        add(BASE);
        for interval in plan.intervals.iter().copied() {
            if interval != BASE_INTERVAL {
                add(Layout::Search { interval });
            }
            UTIL_RATIOS.into_iter().for_each(|util_ratio| add(Layout::Hash { interval, util_ratio }));
        }
        add(Layout::Fingerprint);
        if plan.peer && with_peer {
            [false, true].into_iter().for_each(|hashed| add(Layout::Peer { hashed }));
        }
    }
    all
}

impl Experiment for HashIndex {
    fn name(&self) -> &'static str {
        "hash-index"
    }

    fn about(&self) -> &'static str {
        "cached point reads, CPU inside of data blocks, and space with a hash index or fingerprints in them"
    }

    fn run(&self, context: &Context<'_>) -> Result<Map<String, Value>> {
        let (n, seconds, rounds) = context.size((60_000, 0.12, 5), (500_000, 0.8, 5));
        let asked = variants(context.size(&QUICK, &FULL), registry::check(PEER).is_ok());
        let mut timed = Vec::new();
        for blocks in &asked {
            let name = blocks.name();
            let task = Task { dir: context.fresh(&name)?, blocks: *blocks, n, seconds: None };
            context.child(&json!(task))?;
            timed.push(Variant { name, task: json!(Task { seconds: Some(seconds), ..task }) });
        }
        let all = interleave(context, &timed, rounds)?;
        let mut answer = answer(&all, &asked);
        answer.insert("records".into(), json!(n));
        answer.insert("rounds".into(), all.json());
        Ok(answer)
    }

    fn variant(&self, task: &Value) -> Result<Map<String, Value>> {
        let task: Task = serde_json::from_value(task.clone())?;
        let engine = open(&task, &cached_options(MEMTABLE_BYTES))?;
        let Some(seconds) = task.seconds else { return reads::load(engine, &task.dir, task.n) };
        let mut answer = reads::time(engine.as_ref(), task.n, Choice::Present, seconds)?;
        answer.insert("tables".into(), json!(engine.tables()?));
        answer.insert("table_bytes".into(), json!(table_bytes(&engine.stats())));
        engine.close()?;
        if !task.blocks.is_peer() {
            answer.extend(lookups::time(&task.dir, task.n, seconds / 2.0)?);
        }
        Ok(answer)
    }
}

fn open(task: &Task, options: &Options) -> Result<Box<dyn Engine>> {
    let (index_type, interval, util_ratio) = match task.blocks.layout {
        Layout::Peer { hashed } => return open_peer(task, options, hashed),
        Layout::Search { interval } => (DataBlockIndexType::BinarySearch, interval, None),
        Layout::Hash { interval, util_ratio } => (DataBlockIndexType::BinaryAndHash, interval, Some(util_ratio)),
        Layout::Fingerprint => (DataBlockIndexType::Fingerprint, BASE_INTERVAL, None),
    };
    open_with(&task.dir, options, |own| {
        let own = own.block_size(task.blocks.bytes).data_block_index_type(index_type).restart_interval(interval);
        match util_ratio {
            Some(ratio) => own.data_block_hash_table_util_ratio(ratio),
            None => own,
        }
    })
}

#[cfg(feature = "rocksdb")]
fn open_peer(task: &Task, options: &Options, hashed: bool) -> Result<Box<dyn Engine>> {
    std::fs::create_dir_all(&task.dir)?;
    crate::engine::rocksdb::engine::open_blocks(&task.dir, options, hashed, task.blocks.bytes)
}

#[cfg(not(feature = "rocksdb"))]
fn open_peer(_: &Task, _: &Options, _: bool) -> Result<Box<dyn Engine>> {
    registry::check(PEER)?;
    Err("the peer is not in this build".into())
}

/// Bytes of all tables, as the engine says.
fn table_bytes(stats: &Map<String, Value>) -> Option<u64> {
    if let Some(bytes) = stats.get("table_bytes") {
        return bytes.as_u64();
    }
    stats.get("levels")?.as_array()?.iter().map(|level| level["bytes"].as_u64()).sum()
}

fn answer(all: &Rounds, asked: &[Blocks]) -> Map<String, Value> {
    let mut answer = Map::new();
    answer.insert("seek_cpu_is".into(), json!(lookups::HOW));
    answer.insert("space_is".into(), json!("bytes of the tables, filter and index included"));
    let rule =
        format!("least seek_cpu_ratio, in these very rounds, of the hash indexes with space_ratio <= {SPACE_LIMIT}");
    answer.insert("best_is".into(), json!(rule));
    let share =
        "seek_cpu_ns by cpu_ns of a whole get, whose blocks share the processor's cache with all that leads to them";
    answer.insert("seek_share_is".into(), json!(share));
    let document = json!({"seek_cpu_ratio": 0.782, "throughput_ratio": 1.10, "space_ratio": 1.046});
    answer.insert("document".into(), document);
    for (bytes, suffix) in BLOCKS {
        let name = |layout| Blocks { layout, bytes }.name();
        let (base, fingerprint) = (name(BASE), name(Layout::Fingerprint));
        let (peer, hashed_peer) = (name(Layout::Peer { hashed: false }), name(Layout::Peer { hashed: true }));
        let hashes = asked.iter().filter(|blocks| blocks.bytes == bytes && blocks.is_hash());
        let best = best(all, hashes.copied(), &base);
        let same_interval = best.and_then(Blocks::search_alone).map(Blocks::name).unwrap_or_default();
        let best = best.map(Blocks::name);
        answer.insert(format!("best{suffix}"), json!(best));
        // No variant has no name, so there are no ratios where nothing is admissible.
        let best = best.unwrap_or_default();
        for (top, base, prefix) in
            [(&best, &base, ""), (&fingerprint, &base, "fingerprint_"), (&best, &same_interval, "same_interval_")]
        {
            put(&mut answer, all, (top, base), prefix, suffix);
        }
        for (variant, prefix) in [(&base, "baseline_"), (&best, ""), (&fingerprint, "fingerprint_")] {
            let share = all.median(variant, "seek_cpu_ns").zip(all.median(variant, "cpu_ns"));
            let share = share.and_then(|(seek, get)| ratio(seek, get));
            answer.insert(format!("{prefix}seek_share_of_get{suffix}"), json!(share));
        }
        let against_peer = [
            ("baseline_vs_peer", &base, &peer),
            ("hash_vs_peer", &best, &hashed_peer),
            ("fingerprint_vs_peer", &fingerprint, &peer),
        ];
        for (field, ours, theirs) in against_peer {
            all.put_ratio(&mut answer, &format!("{field}{suffix}"), "ns", ours, theirs);
        }
        for (field, of) in &FIELDS[1..] {
            all.put_ratio(&mut answer, &format!("rocksdb_hash_{field}{suffix}"), of, &hashed_peer, &peer);
        }
    }
    for blocks in asked.iter().filter(|blocks| blocks.layout != BASE && !blocks.is_peer()) {
        let base = Blocks { layout: BASE, ..*blocks }.name();
        let name = blocks.name();
        put(&mut answer, all, (&name, &base), &format!("{name}_"), "");
    }
    answer
}

/// The ratios of one variant to another.
fn put(answer: &mut Map<String, Value>, all: &Rounds, (top, base): (&str, &str), prefix: &str, suffix: &str) {
    for (field, of) in FIELDS {
        all.put_ratio(answer, &format!("{prefix}{field}{suffix}"), of, top, base);
    }
}

/// Of the variants that are small enough, the one with the least CPU inside of the block.
fn best(all: &Rounds, blocks: impl Iterator<Item = Blocks>, base: &str) -> Option<Blocks> {
    let ratio = |field: &str, blocks: Blocks| all.ratio(field, &blocks.name(), base).map(|ratio| ratio.median);
    blocks
        .filter(|blocks| ratio("table_bytes", *blocks).is_some_and(|space| space <= SPACE_LIMIT))
        .filter_map(|blocks| ratio("seek_cpu_ns", blocks).map(|cpu| (cpu, blocks)))
        .min_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, blocks)| blocks)
}

#[cfg(test)]
mod tests {
    use super::{
        BASE, BLOCKS, Blocks, FULL, HashIndex, Layout, PEER, Plan, QUICK, Task, answer, table_bytes, variants,
    };
    use crate::engine::registry;
    use crate::experiment::experiment::Experiment;
    use crate::experiment::rounds::Rounds;
    use serde_json::{Map, Value, json};
    use std::collections::BTreeSet;
    use std::path::Path;

    const N: u64 = 5000;

    fn hash(interval: u8, util_ratio: f64, bytes: u32) -> Blocks {
        Blocks { layout: Layout::Hash { interval, util_ratio }, bytes }
    }

    /// Rounds, all alike, of variants with their figures: nanoseconds in the block, gets in a second, bytes, ns of a
    /// get.
    fn rounds(figures: &[(Blocks, [f64; 4])]) -> Rounds {
        let mut all = Rounds::default();
        for (blocks, [seek, gets, bytes, ns]) in figures {
            let round = json!({
                "seek_cpu_ns": seek, "gets_per_s": gets, "table_bytes": bytes, "ns": ns, "cpu_ns": ns - 100.0,
            });
            (0..3).for_each(|_| all.add(&blocks.name(), round.as_object().unwrap().clone()));
        }
        all
    }

    #[test]
    fn variants_have_names_of_their_own() {
        let all = variants(&FULL, true);
        assert_eq!(all.len(), (1 + 3 * 3 + 2 + 1 + 2) + (1 + 2 * 4 + 1 + 2));
        let names: BTreeSet<String> = all.iter().map(|blocks| blocks.name()).collect();
        assert_eq!(names.len(), all.len(), "{names:?}");
        for name in ["hash_interval_2_util_075_16k", "search_interval_2_4k", "rocksdb_hash_4k"] {
            assert!(names.contains(name), "{names:?}");
        }
        assert!(variants(&FULL, false).iter().all(|blocks| !blocks.is_peer()));
        assert_eq!(variants(&QUICK, true).iter().filter(|blocks| blocks.is_peer()).count(), 2);
        for blocks in all.iter().copied() {
            assert_eq!(serde_json::from_value::<Blocks>(json!(blocks)).unwrap(), blocks);
            let alone = blocks.search_alone();
            assert_eq!(alone.is_some(), blocks.is_hash());
            assert!(alone.is_none_or(|alone| all.contains(&alone)), "{blocks:?} has nothing of its interval beside it");
        }
    }

    #[test]
    fn the_best_is_the_fastest_of_those_that_are_small_enough() {
        let large = BLOCKS[0].0;
        let asked = [
            Blocks { layout: BASE, bytes: large },
            hash(1, 0.75, large),
            Blocks { layout: Layout::Search { interval: 2 }, bytes: large },
            hash(2, 0.75, large),
            hash(2, 1.0, large),
            Blocks { layout: Layout::Fingerprint, bytes: large },
            Blocks { layout: Layout::Peer { hashed: false }, bytes: large },
            Blocks { layout: Layout::Peer { hashed: true }, bytes: large },
            Blocks { layout: BASE, bytes: BLOCKS[1].0 },
            hash(2, 0.5, BLOCKS[1].0),
        ];
        let figures = [
            [200.0, 1e6, 1000.0, 900.0],
            [50.0, 2e6, 1056.0, 400.0],
            [125.0, 1e6, 1024.0, 600.0],
            [100.0, 1.25e6, 1032.0, 600.0],
            [120.0, 1.5e6, 1029.0, 500.0],
            [40.0, 1.75e6, 1013.0, 450.0],
            [0.0, 0.5e6, 1100.0, 1800.0],
            [0.0, 0.75e6, 1155.0, 1200.0],
            [100.0, 1e6, 1000.0, 700.0],
            [80.0, 1e6, 1050.0, 700.0],
        ];
        let figures: Vec<(Blocks, [f64; 4])> = asked.into_iter().zip(figures).collect();
        let answer = answer(&rounds(&figures), &asked);
        assert_eq!(answer["best"], "hash_interval_2_util_075_16k", "the faster one is too large");
        for (field, expected) in [
            ("seek_cpu_ratio", json!(0.5)),
            ("throughput_ratio", json!(1.25)),
            ("get_cpu_ratio", json!(0.625)),
            ("space_ratio", json!(1.032)),
            ("fingerprint_seek_cpu_ratio", json!(0.2)),
            ("fingerprint_throughput_ratio", json!(1.75)),
            ("fingerprint_space_ratio", json!(1.013)),
            ("same_interval_seek_cpu_ratio", json!(0.8)),
            ("same_interval_throughput_ratio", json!(1.25)),
            ("same_interval_space_ratio", json!(1.0078125)),
            ("hash_interval_1_util_075_16k_seek_cpu_ratio", json!(0.25)),
            ("hash_interval_2_util_100_16k_throughput_ratio", json!(1.5)),
            ("search_interval_2_16k_seek_cpu_ratio", json!(0.625)),
            ("baseline_seek_share_of_get", json!(0.25)),
            ("seek_share_of_get", json!(0.2)),
            ("baseline_vs_peer", json!(0.5)),
            ("hash_vs_peer", json!(0.5)),
            ("fingerprint_vs_peer", json!(0.25)),
            ("rocksdb_hash_throughput_ratio", json!(1.5)),
            ("rocksdb_hash_space_ratio", json!(1.05)),
            // Nothing of 4 KiB is small enough, and no peer was asked.
            ("best_4k", Value::Null),
            ("seek_cpu_ratio_4k", Value::Null),
            ("same_interval_seek_cpu_ratio_4k", Value::Null),
            ("seek_share_of_get_4k", Value::Null),
            ("baseline_vs_peer_4k", Value::Null),
            ("hash_interval_2_util_050_4k_space_ratio", json!(1.05)),
        ] {
            assert_eq!(answer.get(field), Some(&expected), "{field}");
        }
        assert!(
            answer.keys().all(|field| !field.starts_with("rocksdb_16k") && !field.starts_with("search_interval_16"))
        );
    }

    #[test]
    fn bytes_of_tables_are_said_in_either_way() {
        let stats = |stats: Value| stats.as_object().unwrap().clone();
        assert_eq!(table_bytes(&stats(json!({"table_bytes": 7}))), Some(7));
        assert_eq!(table_bytes(&stats(json!({"levels": [{"bytes": 3}, {"bytes": 4}]}))), Some(7));
        for unknown in [json!({}), json!({"table_bytes": null}), json!({"levels": [{"bytes": 3}, {}]})] {
            assert_eq!(table_bytes(&stats(unknown)), None);
        }
    }

    fn load_and_time(dir: &Path, blocks: Blocks) -> Map<String, Value> {
        let load = Task { dir: dir.join(blocks.name()), blocks, n: N, seconds: None };
        HashIndex.variant(&json!(load)).unwrap();
        HashIndex.variant(&json!(Task { seconds: Some(0.01), ..load })).unwrap()
    }

    #[test]
    fn a_run_in_miniature_answers_for_every_variant() {
        let dir = tempfile::tempdir().unwrap();
        let plan = |peer| Plan { intervals: &[16, 1], peer };
        let asked = variants(&[plan(true), plan(false)], registry::check(PEER).is_ok());
        let mut all = Rounds::default();
        for blocks in &asked {
            all.add(&blocks.name(), load_and_time(dir.path(), *blocks));
        }
        for blocks in &asked {
            let figure = |field: &str| all.median(&blocks.name(), field);
            assert_eq!(figure("tables"), Some(1.0), "{blocks:?}");
            assert!(figure("table_bytes").unwrap() > (N * 100) as f64, "{blocks:?}");
            assert!(figure("gets").unwrap() >= 256.0, "{blocks:?}");
            assert_eq!(figure("seeks").is_some_and(|n| n > 0.0), !blocks.is_peer(), "{blocks:?}");
        }
        let answer = answer(&all, &asked);
        let space = |name: &str| answer[&format!("{name}_space_ratio")].as_f64().unwrap();
        for size in ["16k", "4k"] {
            let hashes = ["16_util_100", "16_util_075", "16_util_050", "1_util_050"];
            let sizes = hashes.map(|name| space(&format!("hash_interval_{name}_{size}")));
            assert!((1.0..sizes[3]).contains(&space(&format!("search_interval_1_{size}"))), "{sizes:?}");
            assert!(sizes[0] > 1.0 && sizes.is_sorted(), "more buckets, more keys, more room: {sizes:?}");
            assert!(answer[&format!("fingerprint_{size}_seek_cpu_ratio")].as_f64().unwrap() > 0.0);
        }
        assert_eq!(answer["baseline_vs_peer"].is_null(), registry::check(PEER).is_err());
        // Blocks of 16 KiB are fewer than those of 4 KiB, by about the factor.
        let blocks = |name: &str| all.median(name, "blocks").unwrap();
        let factor = blocks("search_interval_16_4k") / blocks("search_interval_16_16k");
        assert!((3.0..5.0).contains(&factor), "{factor}");
    }
}

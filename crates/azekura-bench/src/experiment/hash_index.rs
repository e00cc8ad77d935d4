//! `hash-index`: what a hash index in data blocks, or fingerprints, gain in cached point reads, and their cost in
//! space; against binary search with a restart point every 16 records.
//!
//! All variants hold the same records in the same number of tables: one memtable takes them all, so compaction makes no
//! difference. Of the hash indexes within [`SPACE_LIMIT`], the one with the least CPU inside the block gives the answer
//! its plain fields. A shorter restart interval helps binary search too: `same_interval_…` is the gain of the hash
//! index itself.

use crate::engine::azekura::open_with;
use crate::engine::{Engine, Options, object, registry};
use crate::error::Result;
use crate::experiment::reads;
use crate::experiment::rounds::{Context, Rounds};
use crate::measure::disk;
use crate::measure::meter::ratio;
use azekura::{DataBlockIndexType, PartitionCreateOptions};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Records between restart points of the baseline, as in RocksDB.
const BASE_INTERVAL: u8 = 16;
/// Entries for each bucket.
const UTIL_RATIOS: [f64; 3] = [1.0, 0.75, 0.5];
/// Bytes of data blocks and the suffix of their fields.
const BLOCKS: [(u32, &str); 2] = [(16 << 10, ""), (4 << 10, "_4k")];
/// The intervals of hash indexes for each size of blocks, and whether the peer takes part.
type VariantPlan = [(&'static [u8], bool); 2];
const FULL: VariantPlan = [(&[BASE_INTERVAL, 4, 2], true), (&[4, 2], true)];
const QUICK: VariantPlan = [(&[4], true), (&[4], false)];
/// Largest tables of a hash index, as a multiple of the baseline's.
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

/// How data blocks find their entries.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum Layout {
    Search { interval: u8 },
    Hash { interval: u8, util_ratio: f64 },
    Fingerprint,
    Peer { hashed: bool },
}

/// One variant.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Blocks {
    layout: Layout,
    bytes: u32,
}

/// Directory, variant, records, and seconds of reading; `None` loads.
type HashIndexTask = (PathBuf, Blocks, u64, Option<f64>);

const BASE: Layout = Layout::Search { interval: BASE_INTERVAL };

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

    fn is_peer(self) -> bool {
        matches!(self.layout, Layout::Peer { .. })
    }

    /// Binary search with the same interval as a hash index.
    fn search_alone(self) -> Option<Blocks> {
        match self.layout {
            Layout::Hash { interval, .. } => Some(Blocks { layout: Layout::Search { interval }, ..self }),
            _ => None,
        }
    }
}

/// The variants of a plan; the baseline of each size comes first.
fn variants(plan: &VariantPlan, with_peer: bool) -> Vec<Blocks> {
    let mut all = Vec::new();
    for ((bytes, _), (intervals, peer)) in BLOCKS.into_iter().zip(plan) {
        let mut layouts = vec![BASE];
        for &interval in *intervals {
            layouts.extend((interval != BASE_INTERVAL).then_some(Layout::Search { interval }));
            layouts.extend(UTIL_RATIOS.map(|util_ratio| Layout::Hash { interval, util_ratio }));
        }
        layouts.push(Layout::Fingerprint);
        if *peer && with_peer {
            layouts.extend([false, true].map(|hashed| Layout::Peer { hashed }));
        }
        all.extend(layouts.into_iter().map(|layout| Blocks { layout, bytes }));
    }
    all
}

pub(crate) fn run(context: &Context<'_>) -> Result<Map<String, Value>> {
    let (n, seconds, rounds) = context.size((60_000, 0.12, 5), (500_000, 0.8, 5));
    let asked = variants(context.size(&QUICK, &FULL), registry::check(PEER).is_ok());
    let mut timed = Vec::new();
    for &blocks in &asked {
        let dir = context.scratch.join(blocks.name());
        let task = |seconds: Option<f64>| json!((&dir, blocks, n, seconds));
        context.child(&task(None))?;
        timed.push((blocks.name(), task(Some(seconds))));
    }
    let all = context.interleave(&timed, rounds)?;
    let mut answer = answer(&all, &asked);
    answer.extend(object(json!({"records": n, "rounds": all.json()})));
    Ok(answer)
}

pub(crate) fn variant(task: Value) -> Result<Map<String, Value>> {
    let (dir, blocks, n, seconds): HashIndexTask = serde_json::from_value(task)?;
    let engine = open(&dir, blocks)?;
    let Some(seconds) = seconds else { return reads::fill(engine, &dir, n) };
    let mut answer = reads::time(engine.as_ref(), n, true, seconds)?;
    let (tables, bytes) = (disk::number_of_tables(&dir), table_bytes(&engine.stats()));
    answer.extend(object(json!({"tables": tables, "table_bytes": bytes})));
    engine.close()?;
    if !blocks.is_peer() {
        answer.extend(reads::time_blocks(&dir, n, seconds / 2.0)?);
    }
    Ok(answer)
}

fn open(dir: &Path, blocks: Blocks) -> Result<Box<dyn Engine>> {
    let options = Options { block_bytes: blocks.bytes, ..Options::cached(MEMTABLE_BYTES) };
    let (index_type, interval, util_ratio) = match blocks.layout {
        Layout::Peer { hashed: false } => return registry::open("rocksdb", dir, &options),
        Layout::Peer { hashed: true } => return registry::open("rocksdb-hash", dir, &options),
        Layout::Search { interval } => (DataBlockIndexType::BinarySearch, interval, UTIL_RATIOS[1]),
        Layout::Hash { interval, util_ratio } => (DataBlockIndexType::BinaryAndHash, interval, util_ratio),
        Layout::Fingerprint => (DataBlockIndexType::Fingerprint, BASE_INTERVAL, UTIL_RATIOS[1]),
    };
    let adjust = |own: PartitionCreateOptions| {
        own.data_block_index_type(index_type).restart_interval(interval).data_block_hash_table_util_ratio(util_ratio)
    };
    open_with(dir, &options, |config| config, adjust)
}

/// Bytes of all tables, as the engine reports them.
fn table_bytes(stats: &Map<String, Value>) -> Option<u64> {
    match stats.get("table_bytes") {
        Some(bytes) => bytes.as_u64(),
        None => stats.get("levels")?.as_array()?.iter().map(|level| level["bytes"].as_u64()).sum(),
    }
}

fn answer(all: &Rounds, asked: &[Blocks]) -> Map<String, Value> {
    let mut answer = Map::new();
    let put = |answer: &mut Map<String, Value>, (top, base): (&str, &str), prefix: &str, suffix: &str| {
        for (field, of) in FIELDS {
            all.put(answer, &format!("{prefix}{field}{suffix}"), of, top, base);
        }
    };
    for (bytes, suffix) in BLOCKS {
        let name = |layout| Blocks { layout, bytes }.name();
        let (base, fingerprint) = (name(BASE), name(Layout::Fingerprint));
        let (peer, hashed_peer) = (name(Layout::Peer { hashed: false }), name(Layout::Peer { hashed: true }));
        let best = best(all, asked.iter().copied().filter(|blocks| blocks.bytes == bytes), &base);
        let same_interval = best.and_then(Blocks::search_alone).map(Blocks::name).unwrap_or_default();
        answer.insert(format!("best{suffix}"), json!(best.map(Blocks::name)));
        let best = best.map(Blocks::name).unwrap_or_default(); // no variant has the empty name
        put(&mut answer, (&best, &base), "", suffix);
        put(&mut answer, (&fingerprint, &base), "fingerprint_", suffix);
        put(&mut answer, (&best, &same_interval), "same_interval_", suffix);
        for (variant, prefix) in [(&base, "baseline_"), (&best, ""), (&fingerprint, "fingerprint_")] {
            let share = all.median(variant, "seek_cpu_ns").zip(all.median(variant, "cpu_ns"));
            let share = share.and_then(|(seek, get)| ratio(seek, get));
            answer.insert(format!("{prefix}seek_share_of_get{suffix}"), json!(share));
        }
        all.put(&mut answer, &format!("baseline_vs_peer{suffix}"), "ns", &base, &peer);
        all.put(&mut answer, &format!("hash_vs_peer{suffix}"), "ns", &best, &hashed_peer);
        all.put(&mut answer, &format!("fingerprint_vs_peer{suffix}"), "ns", &fingerprint, &peer);
        for (field, of) in &FIELDS[1..] {
            all.put(&mut answer, &format!("rocksdb_hash_{field}{suffix}"), of, &hashed_peer, &peer);
        }
    }
    for blocks in asked.iter().filter(|blocks| blocks.layout != BASE && !blocks.is_peer()) {
        let (name, base) = (blocks.name(), Blocks { layout: BASE, ..*blocks }.name());
        put(&mut answer, (&name, &base), &format!("{name}_"), "");
    }
    answer
}

/// Of the hash indexes that are small enough, the one with the least CPU inside the block.
fn best(all: &Rounds, blocks: impl Iterator<Item = Blocks>, base: &str) -> Option<Blocks> {
    let ratio = |field: &str, blocks: Blocks| all.ratio(field, &blocks.name(), base).map(|[median, ..]| median);
    let small = blocks.filter(|one| {
        one.search_alone().is_some() && ratio("table_bytes", *one).is_some_and(|space| space <= SPACE_LIMIT)
    });
    let timed = small.filter_map(|one| Some((ratio("seek_cpu_ns", one)?, one)));
    timed.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, one)| one)
}

#[cfg(test)]
mod tests {
    use super::{BASE, BLOCKS, Blocks, FULL, Layout, PEER, QUICK, answer, variant, variants};
    use crate::engine::object;
    use crate::engine::registry;
    use crate::experiment::rounds::Rounds;
    use serde_json::{Value, json};
    use std::collections::BTreeSet;

    const N: u64 = 5000;

    #[test]
    fn variants_have_unique_names() {
        let all = variants(&FULL, true);
        let names: BTreeSet<String> = all.iter().map(|blocks| blocks.name()).collect();
        assert_eq!((all.len(), names.len()), (27, 27), "{names:?}");
        for name in ["hash_interval_2_util_075_16k", "search_interval_2_4k", "rocksdb_hash_4k"] {
            assert!(names.contains(name), "{names:?}");
        }
        assert!(variants(&FULL, false).iter().all(|blocks| !blocks.is_peer()));
        for blocks in all.iter().filter_map(|blocks| blocks.search_alone()) {
            assert!(all.contains(&blocks), "{blocks:?}");
        }
    }

    #[test]
    fn best_is_the_fastest_that_is_small_enough() {
        let hash = |interval, util_ratio| Layout::Hash { interval, util_ratio };
        let (large, small) = (BLOCKS[0].0, BLOCKS[1].0);
        let figures = [
            (BASE, large, [200.0, 1e6, 1000.0, 900.0]),
            (hash(1, 0.75), large, [50.0, 2e6, 1056.0, 400.0]),
            (Layout::Search { interval: 2 }, large, [125.0, 1e6, 1024.0, 600.0]),
            (hash(2, 0.75), large, [100.0, 1.25e6, 1032.0, 600.0]),
            (hash(2, 1.0), large, [120.0, 1.5e6, 1029.0, 500.0]),
            (Layout::Fingerprint, large, [40.0, 1.75e6, 1013.0, 450.0]),
            (Layout::Peer { hashed: false }, large, [0.0, 0.5e6, 1100.0, 1800.0]),
            (Layout::Peer { hashed: true }, large, [0.0, 0.75e6, 1155.0, 1200.0]),
            (BASE, small, [100.0, 1e6, 1000.0, 700.0]),
            (hash(2, 0.5), small, [80.0, 1e6, 1050.0, 700.0]),
        ];
        let mut all = Rounds::default();
        for (layout, bytes, [seek, gets, size, ns]) in figures {
            let round = json!({
                "seek_cpu_ns": seek, "gets_per_s": gets, "table_bytes": size, "ns": ns, "cpu_ns": ns - 100.0,
            });
            (0..3).for_each(|_| all.add(&Blocks { layout, bytes }.name(), object(round.clone())));
        }
        let asked = figures.map(|(layout, bytes, _)| Blocks { layout, bytes });
        let answer = answer(&all, &asked);
        for (field, expected) in [
            ("best", json!("hash_interval_2_util_075_16k")),
            ("seek_cpu_ratio", json!(0.5)),
            ("throughput_ratio", json!(1.25)),
            ("space_ratio", json!(1.032)),
            ("fingerprint_seek_cpu_ratio", json!(0.2)),
            ("same_interval_seek_cpu_ratio", json!(0.8)),
            ("hash_interval_2_util_100_16k_throughput_ratio", json!(1.5)),
            ("baseline_seek_share_of_get", json!(0.25)),
            ("baseline_vs_peer", json!(0.5)),
            ("hash_vs_peer", json!(0.5)),
            ("rocksdb_hash_space_ratio", json!(1.05)),
            ("best_4k", Value::Null),
            ("seek_cpu_ratio_4k", Value::Null),
            ("baseline_vs_peer_4k", Value::Null),
        ] {
            assert_eq!(answer.get(field), Some(&expected), "{field}");
        }
    }

    #[test]
    fn every_variant_of_a_small_run_has_figures() {
        let dir = tempfile::tempdir().unwrap();
        let asked = variants(&QUICK, registry::check(PEER).is_ok());
        let mut all = Rounds::default();
        for &blocks in &asked {
            let task = |seconds: Option<f64>| json!((dir.path().join(blocks.name()), blocks, N, seconds));
            variant(task(None)).unwrap();
            all.add(&blocks.name(), variant(task(Some(0.01))).unwrap());
            let figure = |field: &str| all.median(&blocks.name(), field);
            assert_eq!(figure("tables"), Some(1.0), "{blocks:?}");
            assert!(
                figure("table_bytes").unwrap() > (N * 100) as f64 && figure("gets").unwrap() >= 256.0,
                "{blocks:?}"
            );
            assert_eq!(figure("seeks").is_some_and(|n| n > 0.0), !blocks.is_peer(), "{blocks:?}");
        }
        let answer = answer(&all, &asked);
        let sizes =
            ["4_util_100", "4_util_075", "4_util_050"].map(|name| format!("hash_interval_{name}_16k_space_ratio"));
        assert!(sizes.map(|name| answer[&name].as_f64().unwrap()).is_sorted(), "more buckets take more space");
        assert_eq!(answer["baseline_vs_peer"].is_null(), registry::check(PEER).is_err());
    }
}

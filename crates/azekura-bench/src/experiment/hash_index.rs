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
use crate::experiment::rounds::{Context, Question, Rounds};
use crate::measure::disk;
use anyhow::Context as _;
use azekura::{DataBlockIndexType, PartitionCreateOptions};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Records between restart points of the baseline, as in RocksDB.
const BASE_INTERVAL: u8 = 16;
const BASE: &str = "search_interval_16";
/// Bytes of data blocks, the suffix of their variants and fields, and the restart intervals of their hash indexes.
const BLOCKS: [(u32, &str, &[u8]); 2] = [(16 << 10, "_16k", &[BASE_INTERVAL, 4, 2]), (4 << 10, "_4k", &[4, 2])];
/// The interval of a short run, which has a peer for the larger blocks only.
const QUICK_INTERVAL: u8 = 4;
/// Entries for each bucket.
const UTIL_RATIOS: [f64; 3] = [1.0, 0.75, 0.5];
/// Largest tables of a hash index, as a multiple of the baseline's.
const SPACE_LIMIT: f64 = 1.046;
const PEER: &str = "rocksdb";
const MEMTABLE_BYTES: u64 = 1 << 30;
/// The ratios of each variant to the baseline, and the fields of its rounds that they are of.
const FIELDS: [(&str, &str); 4] = [
    ("seek_cpu_ratio", "seek_cpu_ns"),
    ("throughput_ratio", "gets_per_s"),
    ("get_cpu_ratio", "cpu_ns"),
    ("space_ratio", "table_bytes"),
];

/// One variant: how data blocks of a size find their entries. The last three fields are not used by the peer.
#[derive(Clone, Debug)]
struct Blocks {
    name: String,
    bytes: u32,
    index_type: DataBlockIndexType,
    interval: u8,
    util_ratio: f64,
}

/// Directory, name of the variant, records, and seconds of reading; `None` loads.
type HashIndexTask = (PathBuf, String, u64, Option<f64>);

impl Blocks {
    fn is_peer(&self) -> bool {
        self.name.starts_with(PEER)
    }

    fn open(&self, dir: &Path) -> Result<Box<dyn Engine>> {
        let options = Options { block_bytes: self.bytes, ..Options::cached(MEMTABLE_BYTES) };
        if self.is_peer() {
            let hashed = self.name.contains("_hash_");
            return registry::open(if hashed { "rocksdb-hash" } else { PEER }, dir, &options);
        }
        let adjust = |own: PartitionCreateOptions| {
            let own = own.data_block_index_type(self.index_type).restart_interval(self.interval);
            own.data_block_hash_table_util_ratio(self.util_ratio)
        };
        open_with(dir, &options, |config| config, adjust)
    }
}

/// The variants; the baseline of each size comes first.
fn variants(quick: bool, with_peer: bool) -> Vec<Blocks> {
    use DataBlockIndexType::{BinaryAndHash, BinarySearch, Fingerprint};
    let mut all = Vec::new();
    for (bytes, suffix, intervals) in BLOCKS {
        let mut add = |name: &str, index_type, interval, util_ratio| {
            all.push(Blocks { name: format!("{name}{suffix}"), bytes, index_type, interval, util_ratio });
        };
        add(BASE, BinarySearch, BASE_INTERVAL, UTIL_RATIOS[1]);
        for &interval in intervals.iter().filter(|interval| !quick || **interval == QUICK_INTERVAL) {
            if interval != BASE_INTERVAL {
                add(&format!("search_interval_{interval}"), BinarySearch, interval, UTIL_RATIOS[1]);
            }
            for ratio in UTIL_RATIOS {
                let name = format!("hash_interval_{interval}_util_{:03.0}", ratio * 100.0);
                add(&name, BinaryAndHash, interval, ratio);
            }
        }
        add("fingerprint", Fingerprint, BASE_INTERVAL, UTIL_RATIOS[1]);
        if with_peer && (!quick || bytes == BLOCKS[0].0) {
            add(PEER, BinarySearch, BASE_INTERVAL, UTIL_RATIOS[1]);
            add("rocksdb_hash", BinarySearch, BASE_INTERVAL, UTIL_RATIOS[1]);
        }
    }
    all
}

pub(crate) fn run(context: &Context<'_>) -> Result<Map<String, Value>> {
    let (n, seconds, rounds) = context.size((60_000, 0.12, 5), (500_000, 0.8, 5));
    let asked = variants(context.quick, registry::check(PEER).is_ok());
    let mut timed = Vec::new();
    for Blocks { name, .. } in &asked {
        let task = |seconds: Option<f64>| json!((context.scratch.join(name), name, n, seconds));
        context.child(&task(None))?;
        timed.push((name.clone(), task(Some(seconds))));
    }
    let mut all = context.interleave(&timed, rounds)?;
    let mut answer = object(json!({"records": n, "rounds": all.json()}));
    put(&mut answer, &mut all, &asked)?;
    Ok(answer)
}

pub(crate) fn variant(task: Value) -> Result<Map<String, Value>> {
    let (dir, name, n, seconds): HashIndexTask = serde_json::from_value(task)?;
    let blocks = variants(false, true).into_iter().find(|blocks| blocks.name == name).context("an unknown variant")?;
    let engine = blocks.open(&dir)?;
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

/// Bytes of all tables, as the engine reports them.
fn table_bytes(stats: &Map<String, Value>) -> Option<u64> {
    match stats.get("table_bytes") {
        Some(bytes) => bytes.as_u64(),
        None => stats.get("levels")?.as_array()?.iter().map(|level| level["bytes"].as_u64()).sum(),
    }
}

/// The fields of the answer. In the list of ratios, `best` and `same_interval` with the suffix of a size are the best
/// hash index and binary search with its interval.
fn put(answer: &mut Map<String, Value>, all: &mut Rounds, asked: &[Blocks]) -> Result<()> {
    for ((_, suffix, _), field) in BLOCKS.into_iter().zip(["best", "best_4k"]) {
        let best = best(all, asked, suffix);
        answer.insert(field.into(), json!(best.map(|best| &best.name)));
        if let Some(best) = best {
            all.alias(format!("best{suffix}"), best.name.clone());
            all.alias(format!("same_interval{suffix}"), format!("search_interval_{}{suffix}", best.interval));
        }
        let ours = asked.iter().filter(|one| one.name.ends_with(suffix) && !one.is_peer());
        for Blocks { name, .. } in ours.filter(|one| !one.name.starts_with(BASE)) {
            for (field, of) in FIELDS {
                all.put(answer, &format!("{name}_{field}"), of, name, &format!("{BASE}{suffix}"));
            }
        }
    }
    Question::named("hash-index")?.put_figures(all, answer);
    Ok(())
}

/// Of the hash indexes that are small enough, the one with the least CPU inside the block.
fn best<'a>(all: &Rounds, asked: &'a [Blocks], suffix: &str) -> Option<&'a Blocks> {
    let ratio =
        |field, one: &Blocks| all.ratio(field, &one.name, &format!("{BASE}{suffix}")).map(|[median, ..]| median);
    let hashed = asked.iter().filter(|one| one.name.starts_with("hash_") && one.name.ends_with(suffix));
    let small = hashed.filter(|one| ratio("table_bytes", one).is_some_and(|space| space <= SPACE_LIMIT));
    let timed = small.filter_map(|one| Some((ratio("seek_cpu_ns", one)?, one)));
    timed.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, one)| one)
}

#[cfg(test)]
mod tests {
    use super::{Blocks, PEER, put, variant, variants};
    use crate::engine::object;
    use crate::engine::registry;
    use crate::experiment::rounds::Rounds;
    use serde_json::{Map, Value, json};
    use std::collections::BTreeSet;

    const N: u64 = 5000;

    #[test]
    fn variants_have_unique_names() {
        let all = variants(false, true);
        let names: BTreeSet<&str> = all.iter().map(|blocks| blocks.name.as_str()).collect();
        assert_eq!((all.len(), names.len()), (27, 27), "{names:?}");
        for name in ["hash_interval_2_util_075_16k", "search_interval_2_4k", "rocksdb_hash_4k"] {
            assert!(names.contains(name), "{names:?}");
        }
        assert!(variants(false, false).iter().all(|blocks| !blocks.is_peer()));
        for blocks in all.iter().filter(|blocks| blocks.name.starts_with("hash_")) {
            let suffix = blocks.name.rsplit('_').next().unwrap();
            let search = format!("search_interval_{}_{suffix}", blocks.interval);
            assert!(names.contains(search.as_str()), "{blocks:?}");
        }
    }

    #[test]
    fn best_is_the_fastest_that_is_small_enough() {
        let figures = [
            ("search_interval_16_16k", [200.0, 1e6, 1000.0, 900.0]),
            ("hash_interval_16_util_075_16k", [50.0, 2e6, 1056.0, 400.0]),
            ("search_interval_2_16k", [125.0, 1e6, 1024.0, 600.0]),
            ("hash_interval_2_util_075_16k", [100.0, 1.25e6, 1032.0, 600.0]),
            ("hash_interval_2_util_100_16k", [120.0, 1.5e6, 1029.0, 500.0]),
            ("fingerprint_16k", [40.0, 1.75e6, 1013.0, 450.0]),
            ("rocksdb_16k", [0.0, 0.5e6, 1100.0, 1800.0]),
            ("rocksdb_hash_16k", [0.0, 0.75e6, 1155.0, 1200.0]),
            ("search_interval_16_4k", [100.0, 1e6, 1000.0, 700.0]),
            ("hash_interval_2_util_050_4k", [80.0, 1e6, 1050.0, 700.0]),
        ];
        let mut all = Rounds::default();
        for (name, [seek, gets, size, ns]) in figures {
            let round = json!({
                "seek_cpu_ns": seek, "gets_per_s": gets, "table_bytes": size, "ns": ns, "cpu_ns": ns - 100.0,
            });
            (0..3).for_each(|_| all.add(name, object(round.clone())));
        }
        let is_asked = |blocks: &Blocks| figures.iter().any(|(name, _)| *name == blocks.name);
        let asked: Vec<Blocks> = variants(false, true).into_iter().filter(is_asked).collect();
        assert_eq!(asked.len(), figures.len());
        let mut answer = Map::new();
        put(&mut answer, &mut all, &asked).unwrap();
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
        let asked = variants(true, registry::check(PEER).is_ok());
        let mut all = Rounds::default();
        for blocks in &asked {
            let name = blocks.name.as_str();
            let task = |seconds: Option<f64>| json!((dir.path().join(name), name, N, seconds));
            variant(task(None)).unwrap();
            all.add(name, variant(task(Some(0.01))).unwrap());
            let figure = |field: &str| all.median(name, field);
            assert_eq!(figure("tables"), Some(1.0), "{name}");
            assert!(figure("table_bytes").unwrap() > (N * 100) as f64 && figure("gets").unwrap() >= 256.0, "{name}");
            assert_eq!(figure("seeks").is_some_and(|n| n > 0.0), !blocks.is_peer(), "{name}");
        }
        let mut answer = Map::new();
        put(&mut answer, &mut all, &asked).unwrap();
        let sizes =
            ["4_util_100", "4_util_075", "4_util_050"].map(|name| format!("hash_interval_{name}_16k_space_ratio"));
        assert!(sizes.map(|name| answer[&name].as_f64().unwrap()).is_sorted(), "more buckets take more space");
        assert_eq!(answer["baseline_vs_peer"].is_null(), registry::check(PEER).is_err());
    }
}

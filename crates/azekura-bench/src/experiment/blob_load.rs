//! `blob-load`: HTML pages loaded, each read back, and then read by a zipfian law; separated from the tree or not, with
//! each codec, and by peers.
//!
//! Pages come in a random order, one put each; only the end is synced. `load_seconds` ends when everything is in files
//! and synced; `write_amp` includes what the engine writes until it settles. Written bytes of azekura are counted at
//! the file system, those of `kernel_write_amp` by the kernel. Bytes on disk are those allocated after the database was
//! closed; logs that are allocated ahead are reported apart. Peers separate values and use LZ4 as far as they can.
//! Misses of the cache are served by the page cache; `…held_bytes` is the resident memory that opening and reading
//! adds. `cold` reads begin with an empty page cache and read each page once.

use crate::engine::azekura::open_with;
use crate::engine::registry::{self, settle};
use crate::engine::{Compression, Engine, Options, object};
use crate::error::{Result, wrong};
use crate::experiment::pages::{Pages, pack};
use crate::experiment::rounds::{Context, Question, Rounds};
use crate::experiment::watch_fs::WatchFs;
use crate::measure::disk;
use crate::measure::meter::{histogram, percentile_us};
use crate::measure::process::{Usage, memory_bytes};
use crate::workload::data::{Zipfian, below, rng};
use anyhow::Context as _;
use azekura::{CompressionType, KvSeparationOptions};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

const PEERS: [&str; 5] = ["fjall", "rocksdb", "heed", "redb", "surrealkv"];
/// Extensions of logs.
const LOGS: [&str; 3] = ["wal", "jnl", "log"];
/// Values of at least this size are separated.
const SEPARATE_FROM: u32 = 1 << 10;
/// The cache of the minute; that of other reads is the pages divided by [`CACHE_PART`].
const MINUTE_CACHE_BYTES: u64 = 64 << 20;
const CACHE_PART: u64 = 100;
const LOAD_CACHE_BYTES: u64 = 64 << 20;
/// Maximum number of bytes of pages in memory.
const PAGES_BYTES_MAX: u64 = 640 << 20;
/// A peer counts as frugal if it uses at most this many bytes in addition to its cache.
const FRUGAL_BYTES_MAX: u64 = 32 << 20;
const CODECS: [(&str, CompressionType); 4] = [
    ("none", CompressionType::None),
    ("lz4", CompressionType::Lz4),
    ("zlib_3", CompressionType::Miniz(3)),
    ("zlib_6", CompressionType::Miniz(6)),
];
/// As pages are stored by default.
const DEFAULT: &str = "separated_lz4";

/// The ways to store pages, which are suffixes of fields: `separated_` or `unseparated_` and a codec, and `peer_` and
/// the name of a peer that can run here.
fn cases() -> Vec<String> {
    let ours = ["separated", "unseparated"].into_iter();
    let ours = ours.flat_map(|kind| CODECS.map(|(codec, _)| format!("{kind}_{codec}")));
    let peers = PEERS.into_iter().filter(|name| registry::check(name).is_ok()).map(|name| format!("peer_{name}"));
    ours.chain(peers).collect()
}

fn is_peer(case: &str) -> bool {
    case.starts_with("peer_")
}

/// Whether it is read for the whole minute: peers, and azekura as it would be used.
fn is_compared(case: &str) -> bool {
    is_peer(case) || case == DEFAULT || case == "separated_none"
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct BlobLoadTask {
    case: String,
    dir: PathBuf,
    /// The packed pages.
    pages: PathBuf,
    memtable_bytes: u64,
    cache_bytes: u64,
    step: LoadStep,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum LoadStep {
    Load,
    /// Reads every page in the order of loading.
    ReadAll,
    /// Reads by a zipfian law: seconds of the warm-up, then seconds that are measured.
    Zipf(f64, f64),
    /// Reads this many pages, each once, with an empty page cache.
    Cold(u64),
}

pub(crate) fn run(context: &Context<'_>) -> Result<Map<String, Value>> {
    let (total_bytes, memtable_bytes) = context.size((20 << 20, 4 << 20), (PAGES_BYTES_MAX, 64 << 20));
    let (warm_s, zipf_s, rounds) = context.size((0.05, 0.15, 2), (0.5, 2.0, 3));
    let (minute_s, short_s, cold_reads) = context.size((0.3, 0.2, 400), (60.0, 10.0, 4000));
    let pages = context.scratch.join("pages");
    let mut answer = pack(context.pages, 0, total_bytes, &pages)?;
    let cache_bytes = answer["page_bytes"].as_u64().unwrap_or(0) / CACHE_PART;
    answer.extend(object(json!({
        "separated_from_bytes": SEPARATE_FROM, "memtable_bytes": memtable_bytes, "zipf_cache_bytes": cache_bytes,
        "minute_cache_bytes": MINUTE_CACHE_BYTES, "minute_seconds": {"compared": minute_s, "others": short_s},
    })));
    let (cases, mut all) = (cases(), Rounds::default());
    for (what, rounds, cache_bytes, step) in [
        ("load", 1, LOAD_CACHE_BYTES, LoadStep::Load),
        ("read_all", 1, cache_bytes, LoadStep::ReadAll),
        ("zipf", rounds, cache_bytes, LoadStep::Zipf(warm_s, zipf_s)),
        ("cold", rounds, cache_bytes, LoadStep::Cold(cold_reads)),
        ("minute", 1, MINUTE_CACHE_BYTES, LoadStep::Zipf(0.0, minute_s)),
    ] {
        let task = |case: &String| {
            let is_short = what == "minute" && !is_compared(case);
            let step = if is_short { LoadStep::Zipf(0.0, short_s) } else { step };
            let (dir, pages) = (context.scratch.join(case), pages.clone());
            let task = BlobLoadTask { case: case.clone(), dir, pages, memtable_bytes, cache_bytes, step };
            (format!("{what}_{case}"), json!(task))
        };
        all.extend(context.interleave(&cases.iter().map(task).collect::<Vec<_>>(), rounds)?);
    }
    answer.insert("rounds".into(), all.json());
    put(&mut answer, &mut all, &cases, cache_bytes)?;
    Ok(answer)
}

pub(crate) fn variant(task: Value) -> Result<Map<String, Value>> {
    let task: BlobLoadTask = serde_json::from_value(task)?;
    let pages = Pages::read(&task.pages)?;
    match task.step {
        LoadStep::Load => load(&task, &pages),
        LoadStep::ReadAll => {
            let (engine, start, mut key) = (open(&task, None)?, Instant::now(), Vec::new());
            (0..pages.count()).try_for_each(|index| read(engine.as_ref(), &pages, index, &mut key))?;
            let seconds = start.elapsed().as_secs_f64();
            engine.close()?;
            Ok(object(json!({"read_all_seconds": seconds})))
        }
        LoadStep::Zipf(warm_s, seconds) => {
            let (zipf, mut rng) = (Zipfian::new(pages.count()), rng(23));
            time(&task, &pages, || zipf.index(&mut rng), warm_s, seconds, u64::MAX)
        }
        LoadStep::Cold(reads) => {
            disk::evict(&task.dir)?;
            let (mut unread, mut rng): (Vec<u64>, _) = ((0..pages.count()).collect(), rng(29));
            let choose = || unread.swap_remove(below(&mut rng, unread.len() as u64) as usize);
            time(&task, &pages, choose, 0.0, f64::INFINITY, reads.min(pages.count()))
        }
    }
}

fn open(task: &BlobLoadTask, fs: Option<&WatchFs>) -> Result<Box<dyn Engine>> {
    let options = Options { cache_bytes: task.cache_bytes, ..Options::cached(task.memtable_bytes) };
    let (kind, name) = task.case.split_once('_').context("a case without a name")?;
    if kind == "peer" {
        let (compression, separate_from) = (Compression::Lz4, Some(u64::from(SEPARATE_FROM)));
        return registry::open(name, &task.dir, &Options { compression, separate_from, ..options });
    }
    let codec = CODECS.iter().find(|(codec, _)| *codec == name).context("an unknown codec")?.1;
    let configure = |config: azekura::Config| fs.map_or(config.clone(), |fs| config.fs(Arc::new(fs.clone())));
    open_with(&task.dir, &options, configure, |own| {
        let own = own.compression(codec);
        let separation = KvSeparationOptions::default().separation_threshold(SEPARATE_FROM).compression(codec);
        if kind == "separated" { own.with_kv_separation(separation) } else { own }
    })
}

/// Loads all pages, lets the engine settle, and closes it.
fn load(task: &BlobLoadTask, pages: &Pages) -> Result<Map<String, Value>> {
    let fs = WatchFs::on_disk(true, false);
    let engine = open(task, Some(&fs))?;
    let (before, start) = (Usage::now(), Instant::now());
    let (mut key, mut page, mut user_bytes) = (Vec::new(), Vec::new(), 0);
    for index in 0..pages.count() {
        pages.key(index, &mut key);
        pages.page(index, 0, &mut page);
        engine.put(&key, &page)?;
        user_bytes += (key.len() + page.len()) as u64;
    }
    engine.flush()?;
    engine.sync()?;
    let seconds = start.elapsed();
    let settled = settle(&[engine.as_ref()], seconds)?;
    let (written, stats) = (fs.written(), engine.stats());
    engine.close()?;
    let files = disk::by_extension(&task.dir);
    let logs: u64 = LOGS.into_iter().filter_map(|end| files.get(end)).map(|(_, allocated)| allocated).sum();
    let disk_bytes: u64 = files.values().map(|(_, allocated)| allocated).sum();
    let per_byte = |bytes: u64| bytes as f64 / user_bytes as f64;
    let mut answer = object(json!({
        "load_seconds": seconds.as_secs_f64(), "rest_seconds": settled.seconds, "settled": settled.reached,
        "user_bytes": user_bytes, "stats": stats, "disk_bytes": disk_bytes,
        "kernel_write_amp": per_byte((Usage::now() - before).dirtied_bytes),
        "disk_bytes_without_log": disk_bytes - logs,
        "files": files.iter().map(|(end, (len, _))| (end.clone(), json!(len))).collect::<Map<_, _>>(),
    }));
    if !is_peer(&task.case) {
        answer.extend(object(json!({
            "written": written, "write_amp": per_byte(written.without_log()),
            "write_amp_with_log": per_byte(written.without_log() + written.log),
        })));
    }
    Ok(answer)
}

/// Reads one page and compares it.
fn read(engine: &dyn Engine, pages: &Pages, index: u64, key: &mut Vec<u8>) -> Result<()> {
    pages.key(index, key);
    let mut checked = Ok(());
    let found = engine.get(key, &mut |page| checked = pages.check(index, 0, page))?;
    if found { checked } else { Err(wrong(format!("page {index} is missing"))) }
}

/// Opens the database and reads chosen pages, for `seconds` or until there were `max_reads`.
fn time(
    task: &BlobLoadTask,
    pages: &Pages,
    mut choose: impl FnMut() -> u64,
    warm_s: f64,
    seconds: f64,
    max_reads: u64,
) -> Result<Map<String, Value>> {
    let memory_before = memory_bytes(|own| own.vmrss);
    let engine = open(task, None)?;
    let (mut key, mut all, warm) = (Vec::new(), histogram(), Instant::now());
    while warm.elapsed().as_secs_f64() < warm_s {
        read(engine.as_ref(), pages, choose(), &mut key)?;
    }
    let (start, mut last) = (Instant::now(), Instant::now());
    while (last - start).as_secs_f64() < seconds && all.len() < max_reads {
        read(engine.as_ref(), pages, choose(), &mut key)?;
        let now = Instant::now();
        all.saturating_record(((now - last).as_nanos() as u64).max(1));
        last = now;
    }
    let (reads, seconds) = (all.len(), (last - start).as_secs_f64());
    let answer = object(json!({
        "reads": reads, "reads_per_s": reads as f64 / seconds, "mean_us": seconds * 1e6 / reads.max(1) as f64,
        "p50_us": percentile_us(&all, 50.0), "p99_us": percentile_us(&all, 99.0),
        "held_bytes": memory_bytes(|own| own.vmrss).saturating_sub(memory_before),
        "cache_used_bytes": engine.stats().get("cache_used_bytes"),
    }));
    engine.close()?;
    Ok(answer)
}

/// The fields of the answer. In the list of ratios, `best_case`, `best_peer` and `best_frugal_peer` behind a step, or
/// behind a kind of space, are the cases with the most reads per second or the fewest bytes.
fn put(answer: &mut Map<String, Value>, all: &mut Rounds, cases: &[String], cache_bytes: u64) -> Result<()> {
    let (peers, ours): (Vec<_>, Vec<_>) = cases.iter().partition(|case| is_peer(case));
    let held_bytes = |case: &str| all.median(&format!("zipf_{case}"), "held_bytes");
    let is_frugal =
        |case: &&String| held_bytes(case).is_some_and(|bytes| bytes <= (cache_bytes + FRUGAL_BYTES_MAX) as f64);
    let frugal: Vec<_> = peers.iter().copied().filter(is_frugal).collect();
    let groups = [("best_case", &ours), ("best_peer", &peers), ("best_frugal_peer", &frugal)];
    for (step, kind, prefix, field, sign, groups) in [
        ("load", "disk", "disk_", "disk_bytes", 1.0, &groups[..2]),
        ("load", "disk_without_log", "disk_without_log_", "disk_bytes_without_log", 1.0, &groups[..2]),
        ("zipf", "zipf", "reads_", "reads_per_s", -1.0, &groups),
        ("cold", "cold", "cold_reads_", "reads_per_s", -1.0, &groups),
        ("minute", "minute", "minute_reads_", "reads_per_s", -1.0, &groups),
    ] {
        for (name, cases) in groups {
            let figure =
                |case: &&String| Some((sign * all.median(&format!("{step}_{case}"), field)?, case.to_string()));
            let best = cases.iter().filter_map(figure).min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, case)| case);
            answer.insert(format!("{prefix}{name}"), json!(best));
            best.into_iter().for_each(|best| all.alias(format!("{kind}_{name}"), format!("{step}_{best}")));
        }
    }
    answer.insert("frugal_peers".into(), json!(frugal));
    Question::named("blob-load")?.put_figures(all, answer);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{BlobLoadTask, CODECS, LoadStep, cases, is_compared, is_peer, open, put, read, variant};
    use crate::engine::object;
    use crate::error::{ErrorKind, KnownError};
    use crate::experiment::pages::Pages;
    use crate::experiment::pages::tests::small_pack;
    use crate::experiment::rounds::{Question, Rounds};
    use serde_json::{Map, Value, json};
    use std::collections::BTreeSet;
    use std::path::Path;

    fn task(dir: &Path, case: &str, step: LoadStep) -> BlobLoadTask {
        let (pages, dir) = (dir.join("pages"), dir.join(case));
        BlobLoadTask { case: case.into(), dir, pages, memtable_bytes: 128 << 10, cache_bytes: 1 << 20, step }
    }

    #[test]
    fn every_case_loads_and_reads() {
        let dir = tempfile::tempdir().unwrap();
        small_pack(dir.path());
        let names: BTreeSet<String> = cases().into_iter().collect();
        assert!(names.len() == cases().len() && names.contains("separated_zlib_3"), "{names:?}");
        assert_eq!(cases().iter().filter(|case| !is_peer(case) && is_compared(case)).count(), 2);
        let act = |case: &str, step| variant(json!(task(dir.path(), case, step))).unwrap();
        let number = |map: &Map<String, Value>, field: &str| map[field].as_f64().unwrap();
        for case in &cases() {
            let loaded = act(case, LoadStep::Load);
            assert!(number(&loaded, "disk_bytes") > 50_000.0 && number(&loaded, "user_bytes") > 100_000.0, "{case:?}");
            assert_eq!(loaded.contains_key("write_amp"), !is_peer(case));
            assert!(number(&act(case, LoadStep::ReadAll), "read_all_seconds") > 0.0);
            let zipf = act(case, LoadStep::Zipf(0.001, 0.01));
            assert_eq!(number(&act(case, LoadStep::Cold(9)), "reads"), 9.0);
            assert!(number(&zipf, "reads") > 0.0 && number(&zipf, "p99_us") >= number(&zipf, "p50_us"), "{zipf:?}");
        }
    }

    #[test]
    fn separated_pages_are_compressed_once() {
        let dir = tempfile::tempdir().unwrap();
        small_pack(dir.path());
        let load = |case: &str| variant(json!(task(dir.path(), case, LoadStep::Load))).unwrap();
        let sizes: Vec<f64> = CODECS
            .iter()
            .map(|(codec, _)| {
                let loaded = load(&format!("separated_{codec}"));
                assert_eq!(loaded["written"]["blobs"], loaded["files"]["blob"], "{loaded:?}");
                loaded["written"]["blobs"].as_f64().unwrap() / loaded["user_bytes"].as_f64().unwrap()
            })
            .collect();
        assert!((0.9..1.05).contains(&sizes[0]) && sizes.is_sorted_by(|a, b| a > b), "{sizes:?}");
        assert_eq!(load("unseparated_none")["written"]["blobs"], 0);
    }

    #[test]
    fn missing_page_is_detected() {
        let dir = tempfile::tempdir().unwrap();
        let pages = Pages::read(&small_pack(dir.path())).unwrap();
        let engine = open(&task(dir.path(), "separated_lz4", LoadStep::Load), None).unwrap();
        let error = read(engine.as_ref(), &pages, 3, &mut Vec::new()).unwrap_err();
        assert_eq!(KnownError::of(&error).kind, ErrorKind::Wrong);
    }

    fn answer(with_peers: bool) -> Map<String, Value> {
        let names = ["separated_none", "separated_lz4", "peer_fjall", "peer_rocksdb"].map(str::to_owned);
        let cases = if with_peers { &names[..] } else { &names[..2] };
        let mut all = Rounds::default();
        all.add(
            "load_separated_none",
            object(json!({"write_amp": 1.25, "write_amp_with_log": 2.5, "disk_bytes": 400.0})),
        );
        for (case, figure) in cases.iter().zip([4.0, 2.0, 10.0, 3.0]) {
            let name = case;
            let (disk, own) = (figure * 100.0, figure * 100.0 - 100.0);
            let load = json!({"disk_bytes": disk, "disk_bytes_without_log": own, "load_seconds": figure});
            all.add(&format!("load_{name}"), object(load));
            for what in ["zipf", "cold", "minute"] {
                let (rate, mean, held_bytes) = (figure * 10.0, 1.0 / figure, figure * 5e6);
                let round = json!({"reads_per_s": rate, "mean_us": mean, "p50_us": figure, "held_bytes": held_bytes});
                all.add(&format!("{what}_{name}"), object(round));
            }
        }
        let mut answer = Map::new();
        put(&mut answer, &mut all, cases, 1 << 20).unwrap();
        Question::named("blob-load").unwrap().put_targets(&mut answer);
        answer
    }

    #[test]
    fn best_case_is_compared_with_the_best_peer() {
        let answer = answer(true);
        for (field, expected) in [
            ("write_amp", json!(1.25)),
            ("disk_best_peer", json!("peer_rocksdb")),
            ("disk_vs_best_peer", json!(2.0 / 3.0)),
            ("disk_best_case", json!("separated_lz4")),
            ("default_disk_without_log_vs_best_peer", json!(0.5)),
            ("reads_best_case", json!("separated_none")),
            ("reads_vs_best_peer", json!(0.4)),
            ("minute_default_reads_vs_best_peer", json!(0.2)),
            ("frugal_peers", json!(["peer_rocksdb"])),
            ("reads_vs_best_frugal_peer", json!(4.0 / 3.0)),
            ("baseline_vs_peer", json!(1.5)),
            ("disk_bytes_peer_fjall", json!(1000.0)),
            ("zipf_p50_us_separated_lz4", json!(2.0)),
        ] {
            assert_eq!(answer.get(field), Some(&expected), "{field}");
        }
        assert!(!answer.contains_key("write_amp_peer_fjall"));
        assert_eq!(answer["targets"]["write_amp"], json!({"at_most": 1.1, "is": 1.25, "met": false}));
    }

    #[test]
    fn nothing_is_compared_without_peers() {
        let answer = answer(false);
        for field in ["disk_vs_best_peer", "reads_vs_best_peer", "disk_best_peer", "baseline_vs_peer"] {
            assert_eq!(answer[field], Value::Null, "{field}");
        }
        assert_eq!(answer["targets"]["reads_vs_best_peer"], json!({"at_least": 1.0, "is": null, "met": null}));
    }
}

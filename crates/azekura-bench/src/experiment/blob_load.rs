//! `blob-load`: HTML pages loaded, each read back, and then read by a zipfian law; separated from the tree or not, with
//! each codec, and by peers.
//!
//! Pages come in a random order, one put each; only the end is synced. `load_seconds` ends when everything is in files
//! and synced; `write_amp` includes what the engine writes until it settles. Written bytes of azekura are counted at
//! the file system, those of `kernel_write_amp` by the kernel. Bytes on disk are those allocated after the database was
//! closed; logs that are allocated ahead are reported apart. Peers separate values and use LZ4 as far as they can.
//! Misses of the cache are served by the page cache; `…held_bytes` is the resident memory that opening and reading
//! adds. `cold` reads begin with an empty page cache and read each page once.

use crate::engine::api::object;
use crate::engine::azekura::open_with;
use crate::engine::registry::{self, settle};
use crate::engine::{Compression, Engine, Options};
use crate::error::{Result, wrong};
use crate::experiment::pages::{Pages, Wanted, pack};
use crate::experiment::rounds::{Context, Rounds, targets};
use crate::experiment::watch_fs::WatchFs;
use crate::measure::disk;
use crate::measure::meter::{histogram, percentile_us};
use crate::measure::process::{Usage, memory_bytes};
use crate::workload::data::{Zipfian, below, rng};
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
/// Most bytes of pages that are held in memory.
const MOST_BYTES: u64 = 640 << 20;
/// Memory beside its cache with which a peer still counts as frugal.
const BESIDE_CACHE: u64 = 32 << 20;
const CODECS: [(CompressionType, &str); 4] = [
    (CompressionType::None, "none"),
    (CompressionType::Lz4, "lz4"),
    (CompressionType::Miniz(3), "zlib_3"),
    (CompressionType::Miniz(6), "zlib_6"),
];
const UNCOMPRESSED: &str = "separated_none";
/// As pages are stored by default.
const DEFAULT: &str = "separated_lz4";
/// Figures of every case: step, prefix of the answer's fields, fields of the step's rounds.
const FIELDS: [(&str, &str, &[&str]); 5] = [
    (
        "load",
        "",
        &[
            "disk_bytes",
            "disk_bytes_without_log",
            "load_seconds",
            "write_amp",
            "write_amp_with_log",
            "kernel_write_amp",
        ],
    ),
    ("read_all", "", &["read_all_seconds"]),
    ("zipf", "zipf_", &["p50_us", "p99_us", "reads_per_s", "held_bytes"]),
    ("cold", "cold_", &["p50_us", "p99_us", "reads_per_s"]),
    ("minute", "minute_", &["p50_us", "p99_us", "reads_per_s", "held_bytes"]),
];

/// One way to store pages; both kinds by their place in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum PageStore {
    Ours { separated: bool, codec: usize },
    Peer(usize),
}

impl PageStore {
    /// Suffix of its fields.
    fn name(self) -> String {
        match self {
            PageStore::Ours { separated: true, codec } => format!("separated_{}", CODECS[codec].1),
            PageStore::Ours { separated: false, codec } => format!("unseparated_{}", CODECS[codec].1),
            PageStore::Peer(place) => format!("peer_{}", PEERS[place]),
        }
    }

    fn is_peer(self) -> bool {
        matches!(self, PageStore::Peer(_))
    }

    /// Whether it is read for the whole minute: peers, and azekura as it would be used.
    fn is_compared(self) -> bool {
        self.is_peer() || [UNCOMPRESSED, DEFAULT].contains(&self.name().as_str())
    }
}

/// The cases of azekura, then the peers that can run here.
fn cases() -> Vec<PageStore> {
    let ours = [true, false].into_iter();
    let ours = ours.flat_map(|separated| (0..CODECS.len()).map(move |codec| PageStore::Ours { separated, codec }));
    let peers = (0..PEERS.len()).filter(|&place| registry::check(PEERS[place]).is_ok()).map(PageStore::Peer);
    ours.chain(peers).collect()
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct BlobLoadTask {
    case: PageStore,
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
    /// Reads by a zipfian law; the first seconds are not counted.
    Zipf {
        warm_s: f64,
        seconds: f64,
    },
    /// Reads this many pages, each once, with an empty page cache.
    Cold {
        reads: u64,
    },
}

pub(crate) fn run(context: &Context<'_>) -> Result<Map<String, Value>> {
    let (total_bytes, memtable_bytes) = context.size((20 << 20, 4 << 20), (MOST_BYTES, 64 << 20));
    let (warm_s, zipf_s, rounds) = context.size((0.05, 0.15, 2), (0.5, 2.0, 3));
    let (minute_s, short_s, cold_reads) = context.size((0.3, 0.2, 400), (60.0, 10.0, 4000));
    let pages = context.scratch.fresh("pages")?;
    let mut answer = pack(context.pages, Wanted { least_bytes: 0, total_bytes, pages: u64::MAX }, &pages)?;
    let cache_bytes = answer["page_bytes"].as_u64().unwrap_or(0) / CACHE_PART;
    answer.extend(object(json!({
        "separated_from_bytes": SEPARATE_FROM, "memtable_bytes": memtable_bytes, "zipf_cache_bytes": cache_bytes,
        "minute_cache_bytes": MINUTE_CACHE_BYTES, "minute_seconds": {"compared": minute_s, "others": short_s},
    })));
    let (cases, mut all) = (cases(), Rounds::default());
    let mut steps = [("read_all", 1), ("zipf", rounds), ("cold", rounds), ("minute", 1)].map(|step| (step, Vec::new()));
    for case in cases.iter().copied() {
        let (name, dir) = (case.name(), context.scratch.fresh(&case.name())?);
        let task = |what: &str, cache_bytes, step| {
            let (dir, pages) = (dir.clone(), pages.clone());
            (format!("{what}_{name}"), json!(BlobLoadTask { case, dir, pages, memtable_bytes, cache_bytes, step }))
        };
        all.extend(context.interleave(&[task("load", 64 << 20, LoadStep::Load)], 1)?);
        let minute_s = if case.is_compared() { minute_s } else { short_s };
        let kinds = [
            (cache_bytes, LoadStep::ReadAll),
            (cache_bytes, LoadStep::Zipf { warm_s, seconds: zipf_s }),
            (cache_bytes, LoadStep::Cold { reads: cold_reads }),
            (MINUTE_CACHE_BYTES, LoadStep::Zipf { warm_s: 0.0, seconds: minute_s }),
        ];
        for (((what, _), variants), (cache_bytes, step)) in steps.iter_mut().zip(kinds) {
            variants.push(task(what, cache_bytes, step));
        }
    }
    for ((_, rounds), variants) in steps {
        all.extend(context.interleave(&variants, rounds)?);
    }
    put(&mut answer, &all, &cases, cache_bytes);
    answer.insert("rounds".into(), all.json());
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
        LoadStep::Zipf { warm_s, seconds } => {
            let (zipf, mut rng) = (Zipfian::new(pages.count()), rng(23));
            time(&task, &pages, || zipf.index(&mut rng), warm_s, seconds, u64::MAX)
        }
        LoadStep::Cold { reads } => {
            disk::evict(&task.dir)?;
            let (mut left, mut rng): (Vec<u64>, _) = ((0..pages.count()).collect(), rng(29));
            let choose = || left.swap_remove(below(&mut rng, left.len() as u64) as usize);
            time(&task, &pages, choose, 0.0, f64::INFINITY, reads.min(pages.count()))
        }
    }
}

fn open(task: &BlobLoadTask, fs: Option<&WatchFs>) -> Result<Box<dyn Engine>> {
    let (cache_bytes, options) = (task.cache_bytes, Options::cached(task.memtable_bytes));
    let (separated, codec) = match task.case {
        PageStore::Ours { separated, codec } => (separated, CODECS[codec].0),
        PageStore::Peer(place) => {
            let (compression, separate_from) = (Compression::Lz4, Some(u64::from(SEPARATE_FROM)));
            let options = Options { cache_bytes, compression, separate_from, ..options };
            return registry::open(PEERS[place], &task.dir, &options);
        }
    };
    let configure = |config: azekura::Config| fs.map_or(config.clone(), |fs| config.fs(Arc::new(fs.clone())));
    open_with(&task.dir, &Options { cache_bytes, ..options }, configure, |own| {
        let own = own.compression(codec);
        let separation = KvSeparationOptions::default().separation_threshold(SEPARATE_FROM).compression(codec);
        if separated { own.with_kv_separation(separation) } else { own }
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
    let mut answer = object(json!({
        "load_seconds": seconds.as_secs_f64(), "rest_seconds": settled.seconds, "settled": settled.reached,
        "user_bytes": user_bytes, "stats": stats,
    }));
    let per_byte = |bytes: u64| bytes as f64 / user_bytes as f64;
    if !task.case.is_peer() {
        answer.extend(object(json!({
            "written": written, "write_amp": per_byte(written.without_log()),
            "write_amp_with_log": per_byte(written.without_log() + written.log),
        })));
    }
    let files = disk::by_extension(&task.dir);
    let allocated = |wanted: &dyn Fn(&str) -> bool| -> u64 {
        files.iter().filter(|(end, _)| wanted(end)).map(|(_, (_, allocated))| allocated).sum()
    };
    answer.extend(object(json!({
        "kernel_write_amp": per_byte((Usage::now() - before).dirtied_bytes), "disk_bytes": allocated(&|_| true),
        "disk_bytes_without_log": allocated(&|end| !LOGS.contains(&end)),
        "files": files.iter().map(|(end, (len, _))| (end.clone(), json!(len))).collect::<Map<_, _>>(),
    })));
    Ok(answer)
}

/// Reads one page and compares it.
fn read(engine: &dyn Engine, pages: &Pages, index: u64, key: &mut Vec<u8>) -> Result<()> {
    pages.key(index, key);
    let mut checked = Ok(());
    let found = engine.get(key, &mut |page| checked = pages.check(index, 0, page))?;
    if found { checked } else { Err(wrong(format!("page {index} is missing"))) }
}

/// Opens the database and reads chosen pages, for `seconds` or until there were `most` reads.
fn time(
    task: &BlobLoadTask,
    pages: &Pages,
    mut choose: impl FnMut() -> u64,
    warm_s: f64,
    seconds: f64,
    most: u64,
) -> Result<Map<String, Value>> {
    let held = memory_bytes("VmRSS");
    let engine = open(task, None)?;
    let (mut key, mut all, warm) = (Vec::new(), histogram(), Instant::now());
    while warm.elapsed().as_secs_f64() < warm_s {
        read(engine.as_ref(), pages, choose(), &mut key)?;
    }
    let (start, mut last) = (Instant::now(), Instant::now());
    while (last - start).as_secs_f64() < seconds && all.len() < most {
        read(engine.as_ref(), pages, choose(), &mut key)?;
        let now = Instant::now();
        all.saturating_record(((now - last).as_nanos() as u64).max(1));
        last = now;
    }
    let (reads, seconds) = (all.len(), (last - start).as_secs_f64());
    let answer = object(json!({
        "reads": reads, "reads_per_s": reads as f64 / seconds, "mean_us": seconds * 1e6 / reads.max(1) as f64,
        "p50_us": percentile_us(&all, 50.0), "p99_us": percentile_us(&all, 99.0),
        "held_bytes": memory_bytes("VmRSS").saturating_sub(held),
        "cache_used_bytes": engine.stats().get("cache_used_bytes"),
    }));
    engine.close()?;
    Ok(answer)
}

/// The fields of the answer.
fn put(answer: &mut Map<String, Value>, all: &Rounds, cases: &[PageStore], cache_bytes: u64) {
    for field in ["write_amp", "write_amp_with_log"] {
        answer.insert(field.into(), json!(all.median(&format!("load_{UNCOMPRESSED}"), field)));
    }
    answer.insert("write_amp_is".into(), json!("bytes written to files per byte of keys and pages, until at rest"));
    let held = |case: &PageStore| all.median(&format!("zipf_{}", case.name()), "held_bytes");
    let is_frugal = |case: &PageStore| held(case).is_some_and(|held| held <= (cache_bytes + BESIDE_CACHE) as f64);
    let peers: Vec<PageStore> = cases.iter().copied().filter(|case| case.is_peer()).collect();
    let ours: Vec<PageStore> = cases.iter().copied().filter(|case| !case.is_peer()).collect();
    let frugal: Vec<PageStore> = peers.iter().copied().filter(is_frugal).collect();
    // The case with the least or the largest figure.
    let best = |cases: &[PageStore], what: &str, field: &str, sign: f64| {
        let figure =
            |case: &PageStore| Some((sign * all.median(&format!("{what}_{}", case.name()), field)?, case.name()));
        cases.iter().filter_map(figure).min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, name)| name)
    };
    let variant = |what: &str, name: &Option<String>| format!("{what}_{}", name.as_deref().unwrap_or_default());
    for (prefix, field) in [("disk", "disk_bytes"), ("disk_without_log", "disk_bytes_without_log")] {
        let (own, peer) = (best(&ours, "load", field, 1.0), best(&peers, "load", field, 1.0));
        answer.extend(object(json!({format!("{prefix}_best_case"): own, format!("{prefix}_best_peer"): peer})));
        let (own, peer) = (variant("load", &own), variant("load", &peer));
        all.put(answer, &format!("{prefix}_vs_best_peer"), field, &own, &peer);
        all.put(answer, &format!("default_{prefix}_vs_best_peer"), field, &format!("load_{DEFAULT}"), &peer);
    }
    for (prefix, what) in [("", "zipf"), ("cold_", "cold"), ("minute_", "minute")] {
        let [own, peer, thrifty] = [&ours, &peers, &frugal].map(|cases| best(cases, what, "reads_per_s", -1.0));
        answer.extend(object(json!({
            format!("{prefix}reads_best_case"): own, format!("{prefix}reads_best_peer"): peer,
            format!("{prefix}reads_best_frugal_peer"): thrifty,
        })));
        let [own, peer, thrifty] = [own, peer, thrifty].map(|name| variant(what, &name));
        let default = format!("{what}_{DEFAULT}");
        for (field, top, bottom) in [
            ("reads_vs_best_peer", &own, &peer),
            ("default_reads_vs_best_peer", &default, &peer),
            ("reads_vs_best_frugal_peer", &own, &thrifty),
            ("default_reads_vs_best_frugal_peer", &default, &thrifty),
        ] {
            all.put(answer, &format!("{prefix}{field}"), "reads_per_s", top, bottom);
        }
    }
    answer.insert("frugal_peers".into(), json!(frugal.iter().map(|case| case.name()).collect::<Vec<_>>()));
    // The peer with the same codec that separates values too.
    all.put(answer, "baseline_vs_peer", "mean_us", &format!("zipf_{DEFAULT}"), "zipf_peer_rocksdb");
    let wanted = [
        ("write_amp", "at_most", 1.1),
        ("disk_vs_best_peer", "at_most", 1.0),
        ("reads_vs_best_peer", "at_least", 1.0),
        ("cold_reads_vs_best_peer", "at_least", 1.0),
        ("minute_reads_vs_best_peer", "at_least", 1.0),
    ];
    answer.insert("targets".into(), targets(answer, &wanted).into());
    for ((step, prefix, fields), case) in FIELDS.iter().flat_map(|step| cases.iter().map(move |case| (step, case))) {
        for field in *fields {
            let figure = all.median(&format!("{step}_{}", case.name()), field);
            if figure.is_some() || !field.starts_with("write_amp") {
                answer.insert(format!("{prefix}{field}_{}", case.name()), json!(figure));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{BlobLoadTask, CODECS, LoadStep, PageStore, cases, open, put, read, variant};
    use crate::engine::api::object;
    use crate::error::{ErrorKind, KnownError};
    use crate::experiment::pages::Pages;
    use crate::experiment::pages::tests::small_pack;
    use crate::experiment::rounds::Rounds;
    use serde_json::{Map, Value, json};
    use std::collections::BTreeSet;
    use std::path::Path;

    fn task(dir: &Path, case: PageStore, step: LoadStep) -> BlobLoadTask {
        let (pages, dir) = (dir.join("pages"), dir.join(case.name()));
        BlobLoadTask { case, dir, pages, memtable_bytes: 128 << 10, cache_bytes: 1 << 20, step }
    }

    #[test]
    fn every_case_loads_and_reads() {
        let dir = tempfile::tempdir().unwrap();
        small_pack(dir.path());
        let names: BTreeSet<String> = cases().iter().map(|case| case.name()).collect();
        assert!(names.len() == cases().len() && names.contains("separated_zlib_3"), "{names:?}");
        assert_eq!(cases().iter().filter(|case| !case.is_peer() && case.is_compared()).count(), 2);
        let act = |case, step| variant(json!(task(dir.path(), case, step))).unwrap();
        let number = |map: &Map<String, Value>, field: &str| map[field].as_f64().unwrap();
        for case in cases() {
            let loaded = act(case, LoadStep::Load);
            assert!(number(&loaded, "disk_bytes") > 50_000.0 && number(&loaded, "user_bytes") > 100_000.0, "{case:?}");
            assert_eq!(loaded.contains_key("write_amp"), !case.is_peer());
            assert!(number(&act(case, LoadStep::ReadAll), "read_all_seconds") > 0.0);
            let zipf = act(case, LoadStep::Zipf { warm_s: 0.001, seconds: 0.01 });
            assert_eq!(number(&act(case, LoadStep::Cold { reads: 9 }), "reads"), 9.0);
            assert!(number(&zipf, "reads") > 0.0 && number(&zipf, "p99_us") >= number(&zipf, "p50_us"), "{zipf:?}");
        }
    }

    #[test]
    fn separated_pages_are_written_once_and_compressed() {
        let dir = tempfile::tempdir().unwrap();
        small_pack(dir.path());
        let load = |separated, codec| {
            variant(json!(task(dir.path(), PageStore::Ours { separated, codec }, LoadStep::Load))).unwrap()
        };
        let sizes: Vec<f64> = (0..CODECS.len())
            .map(|codec| {
                let loaded = load(true, codec);
                assert_eq!(loaded["written"]["blobs"], loaded["files"]["blob"], "{loaded:?}");
                loaded["written"]["blobs"].as_f64().unwrap() / loaded["user_bytes"].as_f64().unwrap()
            })
            .collect();
        assert!((0.9..1.05).contains(&sizes[0]) && sizes.is_sorted_by(|a, b| a > b), "{sizes:?}");
        assert_eq!(load(false, 0)["written"]["blobs"], 0);
    }

    #[test]
    fn missing_page_is_detected() {
        let dir = tempfile::tempdir().unwrap();
        let pages = Pages::read(&small_pack(dir.path())).unwrap();
        let engine =
            open(&task(dir.path(), PageStore::Ours { separated: true, codec: 1 }, LoadStep::Load), None).unwrap();
        let error = read(engine.as_ref(), &pages, 3, &mut Vec::new()).unwrap_err();
        assert_eq!(KnownError::of(&error).kind, ErrorKind::Wrong);
    }

    fn answer(with_peers: bool) -> Map<String, Value> {
        let mut cases =
            vec![PageStore::Ours { separated: true, codec: 0 }, PageStore::Ours { separated: true, codec: 1 }];
        cases.extend([PageStore::Peer(0), PageStore::Peer(1)].into_iter().filter(|_| with_peers));
        let mut all = Rounds::default();
        all.add(
            "load_separated_none",
            object(json!({"write_amp": 1.25, "write_amp_with_log": 2.5, "disk_bytes": 400.0})),
        );
        for (case, figure) in cases.iter().zip([4.0, 2.0, 10.0, 3.0]) {
            let name = case.name();
            let (disk, own) = (figure * 100.0, figure * 100.0 - 100.0);
            let load = json!({"disk_bytes": disk, "disk_bytes_without_log": own, "load_seconds": figure});
            all.add(&format!("load_{name}"), object(load));
            for what in ["zipf", "cold", "minute"] {
                let (rate, mean, held) = (figure * 10.0, 1.0 / figure, figure * 5e6);
                let round = json!({"reads_per_s": rate, "mean_us": mean, "p50_us": figure, "held_bytes": held});
                all.add(&format!("{what}_{name}"), object(round));
            }
        }
        let mut answer = Map::new();
        put(&mut answer, &all, &cases, 1 << 20);
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

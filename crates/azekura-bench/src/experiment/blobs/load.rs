//! `blob-load`: HTML pages loaded in bulk, each read back, and then read by a zipfian law; kept apart from the tree or
//! not, each with every codec, and by peers.
//!
//! Pages come in a random order, one put each, and nothing is synced but the end. `load_seconds` ends when everything
//! is in files and synced; `write_amp` also counts what the engine writes until it rests. Our own figures are counted
//! where files are written, those of `kernel_write_amp` by the kernel, which counts the log and whole pages of memory.
//! Bytes on disk are those allocated once the database is closed; some engines leave a log that is allocated ahead,
//! which is told apart. Peers have their values apart and LZ4 as far as they offer it. Caches are what the fields say;
//! what they miss comes from the cache of the system, for all alike. There are engines that keep more in memory than
//! the cache they are given, or map their files, and with that the cache of the system is theirs: `…held_bytes` is what
//! opening and reading adds to the resident memory of a process. Where reads are `cold`, that cache is emptied first,
//! and each page is read once.

use crate::engine::azekura::open_on;
use crate::engine::{Compression, Engine, Options, registry};
use crate::experiment::blobs::load_answer;
use crate::experiment::blobs::pages::{Pages, Wanted, pack};
use crate::experiment::experiment::{Context, Experiment};
use crate::experiment::fs::tally::TallyFs;
use crate::experiment::reads::cached_options;
use crate::experiment::rounds::{Rounds, Variant, interleave};
use crate::failure::{Result, wrong};
use crate::machine::meter::histogram;
use crate::machine::process::{Usage, rss_bytes};
use crate::machine::{disk, settle::settle};
use crate::workload::rng::Rng;
use crate::workload::zipf::{THETA, Zipf};
use azekura::{CompressionType, KvSeparationOptions};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

pub(super) const OURS: &str = "azekura";
const PEERS: [&str; 6] = ["fjall", "rocksdb", "heed", "redb", "sled", "surrealkv"];
/// How names of logs end.
const LOGS: [&str; 3] = ["wal", "jnl", "log"];
/// Values of at least so many bytes stand apart.
const SEPARATE_FROM: u32 = 1 << 10;
/// The cache of the minute.
const MINUTE_CACHE_BYTES: u64 = 64 << 20;
/// The cache of the other reads is this part of the pages.
const CACHE_PART: u64 = 100;
/// At most so many bytes of pages are held in memory.
const MOST_BYTES: u64 = 640 << 20;

/// See the module.
pub(crate) struct BlobLoad;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Codec {
    None,
    Lz4,
    Zlib3,
    Zlib6,
}

const CODECS: [(Codec, &str); 4] =
    [(Codec::None, "none"), (Codec::Lz4, "lz4"), (Codec::Zlib3, "zlib_3"), (Codec::Zlib6, "zlib_6")];

impl Codec {
    fn kind(self) -> CompressionType {
        match self {
            Codec::None => CompressionType::None,
            Codec::Lz4 => CompressionType::Lz4,
            Codec::Zlib3 => CompressionType::Miniz(3),
            Codec::Zlib6 => CompressionType::Miniz(6),
        }
    }
}

/// One way to keep pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Case {
    Ours {
        separated: bool,
        codec: Codec,
    },
    /// By its place among the peers.
    Peer(usize),
}

impl Case {
    /// As names of fields end.
    pub(super) fn name(self) -> String {
        match self {
            Case::Ours { separated, codec } => {
                let codec = CODECS.iter().find(|(one, _)| *one == codec).map_or("", |(_, name)| name);
                format!("{}_{codec}", if separated { "separated" } else { "unseparated" })
            }
            Case::Peer(place) => format!("peer_{}", PEERS[place]),
        }
    }

    pub(super) fn is_peer(self) -> bool {
        matches!(self, Case::Peer(_))
    }

    /// Whether it is asked for the whole minute: peers, and ours as they would be used.
    fn is_compared(self) -> bool {
        matches!(self, Case::Peer(_) | Case::Ours { separated: true, codec: Codec::None | Codec::Lz4 })
    }
}

/// Ours first, then the peers that are here.
fn cases() -> Vec<Case> {
    let ours = [true, false].into_iter();
    let ours = ours.flat_map(|separated| CODECS.map(|(codec, _)| Case::Ours { separated, codec }));
    let peers = (0..PEERS.len()).filter(|&place| registry::check(PEERS[place]).is_ok()).map(Case::Peer);
    ours.chain(peers).collect()
}

/// What a child is asked to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Task {
    case: Case,
    dir: PathBuf,
    /// The packed pages.
    pages: PathBuf,
    memtable_bytes: u64,
    cache_bytes: u64,
    step: Step,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Step {
    Load,
    /// Every page, in the order of loading.
    ReadAll,
    Zipf {
        /// Uncounted.
        warm_s: f64,
        seconds: f64,
    },
    /// So many pages, each once, none of which is in the cache of the system.
    Cold {
        reads: u64,
    },
}

impl Experiment for BlobLoad {
    fn name(&self) -> &'static str {
        "blob-load"
    }

    fn about(&self) -> &'static str {
        "HTML pages loaded and read, apart from the tree or in it, by codec and beside peers"
    }

    fn run(&self, context: &Context<'_>) -> Result<Map<String, Value>> {
        let (total_bytes, memtable_bytes) = context.size((20 << 20, 4 << 20), (MOST_BYTES, 64 << 20));
        let (warm_s, zipf_s, rounds) = context.size((0.05, 0.15, 2), (0.5, 2.0, 3));
        let (minute_s, short_s) = context.size((0.3, 0.2), (60.0, 10.0));
        let pages = context.fresh("pages")?;
        let packed = pack(context.pages, Wanted { least_bytes: 0, total_bytes, pages: u64::MAX }, &pages)?;
        let mut answer = Map::new();
        packed.put(&mut answer);
        let cache_bytes = packed.bytes / CACHE_PART;
        answer.insert("separated_from_bytes".into(), json!(SEPARATE_FROM));
        answer.insert("memtable_bytes".into(), json!(memtable_bytes));
        answer.insert("zipf_cache_bytes".into(), json!(cache_bytes));
        answer.insert("minute_cache_bytes".into(), json!(MINUTE_CACHE_BYTES));
        answer.insert("minute_seconds".into(), json!({"compared": minute_s, "others": short_s}));
        let cases = cases();
        let mut all = Rounds::default();
        let cold_reads = context.size(400, 4000);
        let (mut reads, mut zipf, mut minutes, mut cold) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for case in cases.iter().copied() {
            let (name, dir) = (case.name(), context.fresh(&case.name())?);
            let load =
                Task { case, dir, pages: pages.clone(), memtable_bytes, cache_bytes: 64 << 20, step: Step::Load };
            let variant = Variant { name: format!("load_{name}"), task: json!(load) };
            all.extend(interleave(context, &[variant], 1)?);
            let variant = |what: &str, cache_bytes, step| Variant {
                name: format!("{what}_{name}"),
                task: json!(Task { cache_bytes, step, ..load.clone() }),
            };
            reads.push(variant("read_all", cache_bytes, Step::ReadAll));
            zipf.push(variant("zipf", cache_bytes, Step::Zipf { warm_s, seconds: zipf_s }));
            cold.push(variant("cold", cache_bytes, Step::Cold { reads: cold_reads }));
            let seconds = if case.is_compared() { minute_s } else { short_s };
            minutes.push(variant("minute", MINUTE_CACHE_BYTES, Step::Zipf { warm_s: 0.0, seconds }));
        }
        all.extend(interleave(context, &reads, 1)?);
        all.extend(interleave(context, &zipf, rounds)?);
        all.extend(interleave(context, &cold, rounds)?);
        all.extend(interleave(context, &minutes, 1)?);
        load_answer::put(&mut answer, &all, &cases, cache_bytes);
        answer.insert("rounds".into(), all.json());
        Ok(answer)
    }

    fn variant(&self, task: &Value) -> Result<Map<String, Value>> {
        let task: Task = serde_json::from_value(task.clone())?;
        let pages = Pages::read(&task.pages)?;
        match task.step {
            Step::Load => load(&task, &pages),
            Step::ReadAll => read_all(open(&task, None)?, &pages),
            Step::Zipf { warm_s, seconds } => {
                let (zipf, mut rng) = (Zipf::new(pages.count(), THETA), Rng::new(23));
                let choose = || zipf.scrambled(&mut rng);
                time(&task, &pages, choose, warm_s, Until::Seconds(seconds))
            }
            Step::Cold { reads } => {
                disk::evict(&task.dir)?;
                let mut left: Vec<u64> = (0..pages.count()).collect();
                let mut rng = Rng::new(29);
                let reads = reads.min(pages.count());
                let choose = || left.swap_remove(rng.below(left.len() as u64) as usize);
                time(&task, &pages, choose, 0.0, Until::Reads(reads))
            }
        }
    }
}

fn open(task: &Task, fs: Option<&TallyFs>) -> Result<Box<dyn Engine>> {
    let options = Options {
        cache_bytes: task.cache_bytes,
        compression: Compression::Lz4,
        separate_from: Some(u64::from(SEPARATE_FROM)),
        ..cached_options(task.memtable_bytes)
    };
    let Case::Ours { separated, codec } = task.case else {
        return registry::open(engine_of(task.case), &task.dir, &options);
    };
    let options = Options { separate_from: None, ..options };
    open_on(
        &task.dir,
        &options,
        |config| match fs {
            Some(fs) => config.fs(Arc::new(fs.clone())),
            None => config,
        },
        |own| {
            let own = own.compression(codec.kind());
            let apart = KvSeparationOptions::default().separation_threshold(SEPARATE_FROM).compression(codec.kind());
            if separated { own.with_kv_separation(apart) } else { own }
        },
    )
}

fn engine_of(case: Case) -> &'static str {
    match case {
        Case::Ours { .. } => OURS,
        Case::Peer(place) => PEERS[place],
    }
}

/// Loads all pages, lets the engine come to rest, and closes it.
fn load(task: &Task, pages: &Pages) -> Result<Map<String, Value>> {
    let fs = TallyFs::counting();
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
    let written = fs.written();
    let mut answer = object(json!({
        "load_seconds": seconds.as_secs_f64(), "rest_seconds": settled.seconds, "settled": settled.reached,
        "user_bytes": user_bytes, "stats": engine.stats(),
    }));
    engine.close()?;
    let per_byte = |bytes: u64| bytes as f64 / user_bytes as f64;
    if !task.case.is_peer() {
        answer.insert("written".into(), json!(written));
        answer.insert("write_amp".into(), json!(per_byte(written.without_log())));
        answer.insert("write_amp_with_log".into(), json!(per_byte(written.without_log() + written.log)));
    }
    let kernel = (Usage::now() - before).dirtied_bytes;
    answer.insert("kernel_write_amp".into(), json!(per_byte(kernel)));
    let files = disk::by_endings(&task.dir);
    let allocated = |wanted: &dyn Fn(&str) -> bool| -> u64 {
        files.iter().filter(|(end, _)| wanted(end)).map(|(_, (_, allocated))| allocated).sum()
    };
    answer.insert("disk_bytes".into(), json!(allocated(&|_| true)));
    answer.insert("disk_bytes_without_log".into(), json!(allocated(&|end| !LOGS.contains(&end))));
    answer
        .insert("files".into(), json!(files.into_iter().map(|(end, (len, _))| (end, len)).collect::<BTreeMap<_, _>>()));
    Ok(answer)
}

/// Reads one page and compares it.
fn read(engine: &dyn Engine, pages: &Pages, index: u64, key: &mut Vec<u8>) -> Result<()> {
    pages.key(index, key);
    let mut checked = Ok(());
    match engine.get(key, &mut |page| checked = pages.check(index, 0, page))? {
        true => checked,
        false => Err(wrong(format!("page {index} is missing"))),
    }
}

fn read_all(engine: Box<dyn Engine>, pages: &Pages) -> Result<Map<String, Value>> {
    let (start, mut key) = (Instant::now(), Vec::new());
    for index in 0..pages.count() {
        read(engine.as_ref(), pages, index, &mut key)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    engine.close()?;
    Ok(object(json!({"read_all_seconds": seconds})))
}

/// When reading ends.
enum Until {
    Seconds(f64),
    Reads(u64),
}

/// Opens the database and reads chosen pages, a few of them uncounted.
fn time(
    task: &Task,
    pages: &Pages,
    mut choose: impl FnMut() -> u64,
    warm_s: f64,
    until: Until,
) -> Result<Map<String, Value>> {
    let held = rss_bytes();
    let engine = open(task, None)?;
    let (mut key, mut all) = (Vec::new(), histogram());
    let warm = Instant::now();
    while warm.elapsed().as_secs_f64() < warm_s {
        read(engine.as_ref(), pages, choose(), &mut key)?;
    }
    let start = Instant::now();
    let mut last = start;
    let goes_on = |now: Instant, reads: u64| match until {
        Until::Seconds(seconds) => (now - start).as_secs_f64() < seconds,
        Until::Reads(most) => reads < most,
    };
    while goes_on(last, all.len()) {
        read(engine.as_ref(), pages, choose(), &mut key)?;
        let now = Instant::now();
        all.saturating_record(((now - last).as_nanos() as u64).max(1));
        last = now;
    }
    let (reads, seconds) = (all.len(), (last - start).as_secs_f64());
    let micros = |ns: u64| ns as f64 / 1e3;
    let answer = object(json!({
        "reads": reads, "reads_per_s": reads as f64 / seconds, "mean_us": seconds * 1e6 / reads.max(1) as f64,
        "p50_us": micros(all.value_at_quantile(0.5)), "p99_us": micros(all.value_at_quantile(0.99)),
        "held_bytes": rss_bytes().saturating_sub(held), "cache_used_bytes": engine.stats().get("cache_used_bytes"),
    }));
    engine.close()?;
    Ok(answer)
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(object) => object,
        _ => Map::new(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::{BlobLoad, CODECS, Case, Codec, Step, Task, cases, open, read};
    use crate::experiment::blobs::pages::Pages;
    use crate::experiment::blobs::pages::tests::small_pack;
    use crate::experiment::experiment::Experiment;
    use crate::failure::{Kind, Told};
    use serde_json::{Map, Value, json};
    use std::collections::BTreeSet;
    use std::path::Path;

    fn task(dir: &Path, case: Case, step: Step) -> Task {
        let (pages, dir) = (dir.join("pages"), dir.join(case.name()));
        Task { case, dir, pages, memtable_bytes: 128 << 10, cache_bytes: 1 << 20, step }
    }

    fn act(dir: &Path, case: Case, step: Step) -> Map<String, Value> {
        BlobLoad.variant(&json!(task(dir, case, step))).unwrap()
    }

    #[test]
    fn cases_have_names_of_their_own() {
        let all = cases();
        assert!(all.len() >= 2 * CODECS.len());
        let names: BTreeSet<String> = all.iter().map(|case| case.name()).collect();
        assert_eq!(names.len(), all.len(), "{names:?}");
        assert!(names.contains("separated_zlib_3") && names.contains("unseparated_none"));
        assert_eq!(all.iter().filter(|case| !case.is_peer() && case.is_compared()).count(), 2);
    }

    #[test]
    fn every_case_loads_and_reads() {
        let dir = tempfile::tempdir().unwrap();
        small_pack(dir.path());
        let number = |map: &Map<String, Value>, field: &str| map[field].as_f64().unwrap();
        for case in cases() {
            let loaded = act(dir.path(), case, Step::Load);
            assert!(number(&loaded, "disk_bytes") > 50_000.0 && number(&loaded, "user_bytes") > 100_000.0, "{case:?}");
            assert_eq!(loaded.contains_key("write_amp"), !case.is_peer());
            assert!(number(&act(dir.path(), case, Step::ReadAll), "read_all_seconds") > 0.0);
            let zipf = act(dir.path(), case, Step::Zipf { warm_s: 0.001, seconds: 0.01 });
            let cold = act(dir.path(), case, Step::Cold { reads: 9 });
            assert_eq!(number(&cold, "reads"), 9.0);
            assert!(number(&zipf, "reads") > 0.0 && number(&zipf, "p99_us") >= number(&zipf, "p50_us"), "{zipf:?}");
        }
    }

    #[test]
    fn pages_apart_are_written_once_and_codecs_make_them_smaller() {
        let dir = tempfile::tempdir().unwrap();
        small_pack(dir.path());
        let blobs = |codec| {
            let loaded = act(dir.path(), Case::Ours { separated: true, codec }, Step::Load);
            let written = &loaded["written"];
            assert!(loaded["write_amp"].as_f64() < loaded["write_amp_with_log"].as_f64());
            assert_eq!(written["blobs"], loaded["files"]["blob"], "{loaded:?}");
            (written["blobs"].as_u64().unwrap(), loaded["user_bytes"].as_u64().unwrap())
        };
        let sizes = CODECS.map(|(codec, _)| blobs(codec));
        assert!((0.9..1.05).contains(&(sizes[0].0 as f64 / sizes[0].1 as f64)), "{sizes:?}");
        assert!(sizes.windows(2).all(|pair| pair[1].0 < pair[0].0), "{sizes:?}");
        let tree = act(dir.path(), Case::Ours { separated: false, codec: Codec::None }, Step::Load);
        assert_eq!(tree["written"]["blobs"], 0);
    }

    #[test]
    fn a_missing_page_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let pages = Pages::read(&small_pack(dir.path())).unwrap();
        let case = Case::Ours { separated: true, codec: Codec::Lz4 };
        let engine = open(&task(dir.path(), case, Step::Load), None).unwrap();
        let error = read(engine.as_ref(), &pages, 3, &mut Vec::new()).unwrap_err();
        assert_eq!(Told::of(&error).kind, Kind::Wrong);
    }
}

//! `blob-gc`: the cost of keeping the space of stale values small, in a history of versions of HTML pages.
//!
//! In each round as many random pages are written as there are pages, each version under its own key; then the oldest
//! versions of pages with more than five are removed. That is done without GC, with a call towards a target after each
//! truncation, with automatic GC, and with values in the tree. Nothing is compressed; the log is in no figure.
//!
//! - `…_write_amp`: bytes written to blob files (unseparated: to tables) per byte of values written.
//! - `…_max_space_amp`: bytes of blob files on disk (unseparated: of tables) and of memtables per byte of live
//!   values, the largest after a call, or at any time where there are no calls, as for `…_peak_space_amp`.
//!
//! Both are of the steady state, which begins after the first third of the rounds.

use crate::engine::object;
use crate::error::{Result, wrong};
use crate::experiment::pages::{Pages, pack};
use crate::experiment::rounds::{Context, Question, Rounds};
use crate::experiment::watch_fs::WatchFs;
use crate::measure::disk;
use crate::measure::meter::ratio;
use crate::workload::data::{below, rng};
use anyhow::{Context as _, ensure};
use azekura::{
    CompressionType, Config, Database, GarbageCollection, Iter, KvSeparationOptions, Partition, PartitionCreateOptions,
    Slice,
};
use rand::rngs::SmallRng;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Smaller pages would not be separated.
const LEAST_BYTES: u64 = 1 << 10;
/// Versions of a page that a truncation leaves.
const KEPT: usize = 5;
/// Samples while the pages of a round are written.
const SAMPLES: u64 = 8;
const CACHE_BYTES: u64 = 64 << 20;
/// An engine that has written nothing for this time has settled; automatic work begins earlier.
const QUIET: Duration = Duration::from_millis(2500);
/// Longest wait for that.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);

/// How stale values are collected.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum GcMode {
    /// Not at all; files that are stale as a whole are removed nevertheless.
    Never,
    /// By a call after each truncation.
    Target(f32),
    /// By the engine itself.
    Automatic(f32),
    /// Values are in the tree.
    Unseparated,
}

/// The modes and the prefixes of their fields.
const MODES: [(GcMode, &str); 7] = [
    (GcMode::Never, "no_gc"),
    (GcMode::Target(1.5), "target_1_5"),
    (GcMode::Target(2.0), "target_2_0"),
    (GcMode::Target(3.0), "target_3_0"),
    (GcMode::Automatic(1.5), "automatic"),
    (GcMode::Automatic(2.0), "automatic_2_0"),
    (GcMode::Unseparated, "unseparated"),
];

#[derive(Clone, Debug, Serialize, Deserialize)]
struct BlobGcTask {
    mode: GcMode,
    dir: PathBuf,
    /// The packed pages.
    pages: PathBuf,
    rounds: u64,
    memtable_bytes: u64,
    blob_file_bytes: u64,
}

/// When a sample is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Moment {
    #[default]
    Writing,
    /// After a truncation, before a call.
    Truncated,
    /// After a call.
    Collected,
    /// At the end, with empty memtables.
    Flushed,
    /// After the engine has settled.
    Rest,
}

/// One sample of a database. Written bytes are counted since it was opened; the log is in no figure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct GcSample {
    moment: Moment,
    round: u64,
    seconds: f64,
    /// Bytes of values that were written.
    value_bytes: u64,
    /// Bytes of values that exist.
    live_bytes: u64,
    /// Bytes of memtables.
    memory_bytes: u64,
    blob_disk_bytes: u64,
    table_disk_bytes: u64,
    /// Bytes of values that tables refer to, as the engine reports them.
    referenced_bytes: u64,
    blob_bytes_written: u64,
    table_bytes_written: u64,
    /// The space amplification that a scan reports after a call.
    reported_space_amp: Option<f64>,
}

/// The figures of one mode over `rounds`.
fn figures(mode: GcMode, samples: &[GcSample], rounds: u64) -> Map<String, Value> {
    let is_tree = mode == GcMode::Unseparated;
    let space_amp = |sample: &GcSample| {
        let on_disk = if is_tree { sample.table_disk_bytes } else { sample.blob_disk_bytes };
        ratio((on_disk + sample.memory_bytes) as f64, sample.live_bytes as f64)
    };
    let values_written = |one: &GcSample| if is_tree { one.table_bytes_written } else { one.blob_bytes_written };
    let files_written = |one: &GcSample| one.table_bytes_written + one.blob_bytes_written;
    let steady = || samples.iter().filter(|sample| sample.round >= rounds / 3 && sample.moment != Moment::Rest);
    let amps: Vec<f64> = steady().filter_map(space_amp).collect();
    let peak = amps.iter().copied().reduce(f64::max);
    let called = |sample: &&GcSample| sample.moment == Moment::Collected;
    let after_calls = steady().filter(called).filter_map(space_amp).reduce(f64::max);
    // The last sample before the steady state.
    let begin = samples.iter().rev().find(|sample| sample.round < rounds / 3).copied().unwrap_or_default();
    let end = samples.iter().rev().find(|sample| sample.moment == Moment::Flushed);
    // Bytes written from a sample to the end, for each byte of values that the user wrote.
    let write_amp = |written: &dyn Fn(&GcSample) -> u64, begin: &GcSample| {
        let end = end?;
        let values = end.value_bytes.saturating_sub(begin.value_bytes);
        (values > 0).then(|| written(end).saturating_sub(written(begin)) as f64 / values as f64)
    };
    object(json!({
        "max_space_amp": if samples.iter().any(|sample| called(&sample)) { after_calls } else { peak },
        "peak_space_amp": peak,
        "mean_space_amp": (!amps.is_empty()).then(|| amps.iter().sum::<f64>() / amps.len() as f64),
        "reported_max_space_amp": steady().filter_map(|sample| sample.reported_space_amp).reduce(f64::max),
        "rest_space_amp": samples.iter().find(|sample| sample.moment == Moment::Rest).and_then(space_amp),
        "end_space_amp": samples.last().and_then(space_amp), "write_amp": write_amp(&values_written, &begin),
        "files_write_amp": write_amp(&files_written, &begin),
        "whole_write_amp": write_amp(&values_written, &GcSample::default()),
    }))
}

pub(crate) fn run(context: &Context<'_>) -> Result<Map<String, Value>> {
    let (total_bytes, rounds) = context.size((8 << 20, 30), (100 << 20, 40));
    let (memtable_bytes, blob_file_bytes) = context.size((3 << 20, 1 << 20), (32 << 20, 16 << 20));
    let pages = context.scratch.join("pages");
    let mut answer = pack(context.pages, LEAST_BYTES, total_bytes, &pages)?;
    answer.extend(object(json!({
        "rounds_of_writes": rounds, "memtable_bytes": memtable_bytes, "blob_file_bytes": blob_file_bytes,
    })));
    let mut runs = json!({});
    for (mode, prefix) in MODES {
        let (dir, pages) = (context.scratch.join(prefix), pages.clone());
        let task = BlobGcTask { mode, dir, pages, rounds, memtable_bytes, blob_file_bytes };
        let run = context.child(&json!(task)).context(prefix)?;
        disk::remove(&task.dir)?;
        eprintln!("{prefix}: {}", run["figures"]);
        runs[prefix] = Value::Object(run);
    }
    put(&mut answer, &runs)?;
    answer.insert("runs".into(), runs);
    Ok(answer)
}

/// The fields of the answer.
fn put(answer: &mut Map<String, Value>, runs: &Value) -> Result<()> {
    let mut all = Rounds::default();
    MODES.iter().for_each(|(_, prefix)| all.add(prefix, object(runs[prefix]["figures"].clone())));
    Question::named("blob-gc")?.put_figures(&all, answer);
    let written = MODES.map(|(_, prefix)| (prefix.to_owned(), runs[prefix]["figures"]["files_write_amp"].clone()));
    answer.insert("files_write_amp".into(), Value::Object(written.into_iter().collect()));
    Ok(())
}

/// The versions of each page, the oldest first. The same pages have the same history.
struct History {
    rng: SmallRng,
    versions: Vec<VecDeque<u64>>,
    last: u64,
}

impl History {
    fn new(pages: u64) -> History {
        History { rng: rng(5), versions: vec![VecDeque::new(); pages as usize], last: 0 }
    }

    /// The page that is written next and the number of its version.
    fn write(&mut self) -> (u64, u64) {
        let page = below(&mut self.rng, self.versions.len() as u64);
        self.last += 1;
        self.versions[page as usize].push_back(self.last);
        (page, self.last)
    }

    /// The versions that a truncation removes from one page.
    fn truncate(&mut self, page: u64) -> Vec<u64> {
        let versions = &mut self.versions[page as usize];
        versions.drain(..versions.len().saturating_sub(KEPT)).collect()
    }
}

/// A run in progress.
struct GcRun {
    task: BlobGcTask,
    pages: Pages,
    history: History,
    fs: WatchFs,
    partition: Partition,
    database: Database,
    start: Instant,
    /// The figures that the bench counts itself; a sample adds the others.
    known: GcSample,
    samples: Vec<GcSample>,
    collecting: Duration,
}

pub(crate) fn variant(task: Value) -> Result<Map<String, Value>> {
    let mut run = GcRun::new(serde_json::from_value(task)?)?;
    for round in 0..run.task.rounds {
        run.known.round = round;
        run.write_round()?;
        run.truncate()?;
        run.sample(Moment::Truncated, None);
        if let GcMode::Target(target) = run.task.mode {
            let start = Instant::now();
            run.partition.gc_with_space_amp_target(target)?;
            run.collecting += start.elapsed();
            let report = run.partition.gc_scan()?;
            run.sample(Moment::Collected, Some(f64::from(report.space_amp())));
        }
    }
    run.finish()
}

impl GcRun {
    fn new(task: BlobGcTask) -> Result<GcRun> {
        let (pages, fs) = (Pages::read(&task.pages)?, WatchFs::on_disk(true, false));
        let database = Config::new(&task.dir).fs(Arc::new(fs.clone())).cache_size(CACHE_BYTES).open()?;
        let separation = KvSeparationOptions::default().compression(CompressionType::None);
        let separation = separation.blob_file_target_size(task.blob_file_bytes);
        let options = PartitionCreateOptions::default().max_memtable_size(task.memtable_bytes);
        let options = options.compression(CompressionType::None);
        let options = match task.mode {
            GcMode::Unseparated => options,
            GcMode::Automatic(target) => options.with_kv_separation(separation.automatic_gc(Some(target))),
            GcMode::Never | GcMode::Target(_) => options.with_kv_separation(separation.automatic_gc(None)),
        };
        let (history, partition) = (History::new(pages.count()), database.open_partition("pages", options)?);
        let (known, samples, collecting) = (GcSample::default(), Vec::new(), Duration::ZERO);
        let start = Instant::now();
        Ok(GcRun { task, pages, history, fs, partition, database, start, known, samples, collecting })
    }

    /// The key of a page; with a number, that of a version, so that the oldest comes first.
    fn key(&self, page: u64, number: Option<u64>) -> Vec<u8> {
        let mut key = Vec::new();
        self.pages.key(page, &mut key);
        key.push(b'#');
        key.extend(number.map(|number| format!("{number:012}")).unwrap_or_default().into_bytes());
        key
    }

    /// Writes as many versions as there are pages.
    fn write_round(&mut self) -> Result<()> {
        let (count, mut page) = (self.pages.count(), Vec::new());
        for i in 1..=count {
            let (index, number) = self.history.write();
            self.pages.page(index, number, &mut page);
            self.partition.insert(self.key(index, Some(number)), &page)?;
            self.known.value_bytes += page.len() as u64;
            self.known.live_bytes += page.len() as u64;
            if i % count.div_ceil(SAMPLES) == 0 {
                self.sample(Moment::Writing, None);
            }
        }
        Ok(())
    }

    /// Removes the oldest versions of each page that has too many, as a scan of its versions finds them.
    fn truncate(&mut self) -> Result<()> {
        for page in 0..self.pages.count() {
            let numbers = self.history.truncate(page);
            let mut found = self.partition.prefix(self.key(page, None));
            for number in numbers {
                let (key, value) = self.next(&mut found, page, number)?;
                self.partition.remove(&key)?;
                self.known.live_bytes -= value.len() as u64;
            }
        }
        Ok(())
    }

    /// The next record of a scan, which must be that version of a page.
    fn next(&self, found: &mut Iter, page: u64, number: u64) -> Result<(Slice, Slice)> {
        let missing = || wrong(format!("version {number} of page {page} is missing or misplaced"));
        let (key, value) = found.next().ok_or_else(missing)??;
        ensure!(*key == *self.key(page, Some(number)), missing());
        self.pages.check(page, number, &value)?;
        Ok((key, value))
    }

    fn sample(&mut self, moment: Moment, reported_space_amp: Option<f64>) {
        let (metrics, written) = (self.partition.metrics(), self.fs.written());
        let files = disk::by_extension(&self.task.dir);
        let on_disk = |end: &str| files.get(end).map_or(0, |(length, _)| *length);
        self.samples.push(GcSample {
            moment,
            seconds: self.start.elapsed().as_secs_f64(),
            memory_bytes: metrics.memtable_bytes,
            blob_disk_bytes: on_disk("blob"),
            table_disk_bytes: on_disk("sst"),
            referenced_bytes: metrics.referenced_blob_bytes(),
            blob_bytes_written: written.blobs,
            table_bytes_written: written.tables,
            reported_space_amp,
            ..self.known
        });
    }

    /// Flushes, so that no mode has an advantage from unflushed memtables, and compares all versions.
    fn finish(mut self) -> Result<Map<String, Value>> {
        self.partition.flush()?;
        self.sample(Moment::Flushed, None);
        let seconds = self.start.elapsed().as_secs_f64();
        if matches!(self.task.mode, GcMode::Automatic(_)) {
            self.settle()?;
            self.sample(Moment::Rest, None);
        }
        for (page, numbers) in (0..).zip(&self.history.versions) {
            let mut found = self.partition.prefix(self.key(page, None));
            numbers.iter().try_for_each(|number| self.next(&mut found, page, *number).map(drop))?;
            ensure!(found.next().is_none(), wrong("a removed version exists"));
        }
        let metrics = self.database.metrics();
        let answer = object(json!({
            "seconds": seconds, "collecting_seconds": self.collecting.as_secs_f64(),
            "stall_seconds": metrics.stall_time.as_secs_f64(), "flushes": metrics.flushes,
            "compactions": metrics.compactions, "collections": metrics.blob_gc_runs,
            "collection_bytes_read": metrics.blob_gc_bytes_read,
            "collection_bytes_written": metrics.blob_gc_bytes_written, "written": self.fs.written(),
            "figures": figures(self.task.mode, &self.samples, self.task.rounds), "samples": self.samples,
        }));
        drop(self.partition);
        self.database.close()?;
        Ok(answer)
    }

    fn settle(&self) -> Result<()> {
        let (start, mut quiet, mut last) = (Instant::now(), Instant::now(), self.fs.written());
        while quiet.elapsed() < QUIET {
            ensure!(start.elapsed() < SETTLE_TIMEOUT, "the engine does not settle");
            std::thread::sleep(Duration::from_millis(50));
            let now = self.fs.written();
            if now != last {
                (last, quiet) = (now, Instant::now());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{BlobGcTask, GcMode, GcSample, History, KEPT, MODES, Moment, figures, put, variant};
    use crate::experiment::pages::tests::small_pack;
    use crate::experiment::rounds::Question;
    use serde_json::{Map, Value, json};

    fn samples_of(mode: GcMode) -> Vec<GcSample> {
        let dir = tempfile::tempdir().unwrap();
        let (pages, rounds) = (small_pack(dir.path()), 9);
        let (memtable_bytes, blob_file_bytes) = (128 << 10, 32 << 10);
        let task = BlobGcTask { mode, dir: dir.path().join("db"), pages, rounds, memtable_bytes, blob_file_bytes };
        serde_json::from_value(variant(json!(task)).unwrap()["samples"].clone()).unwrap()
    }

    #[test]
    fn every_mode_has_the_same_history() {
        let modes = [GcMode::Never, GcMode::Target(1.2), GcMode::Automatic(1.5), GcMode::Unseparated];
        let mut collected = None;
        let ends = modes.map(|mode| {
            let samples = samples_of(mode);
            if let GcMode::Target(_) = mode {
                let calls: Vec<f64> = samples.iter().filter_map(|sample| sample.reported_space_amp).collect();
                assert!(calls.len() == 9 && calls.iter().all(|amp| *amp <= 1.2), "{calls:?}");
                collected = samples.iter().rev().find(|sample| sample.moment == Moment::Collected).copied();
            }
            *samples.iter().rev().find(|sample| sample.moment == Moment::Flushed).unwrap()
        });
        let [never, target, _, tree] = ends;
        for end in ends {
            assert!(end.live_bytes < end.value_bytes && end.memory_bytes < 64 << 10, "{end:?}");
            assert_eq!((end.value_bytes, end.live_bytes), (never.value_bytes, never.live_bytes));
        }
        assert!(never.blob_bytes_written >= never.value_bytes && never.referenced_bytes > 0, "{never:?}");
        assert!(target.blob_bytes_written > never.blob_bytes_written, "{target:?}");
        let collected = collected.unwrap();
        assert!(collected.blob_disk_bytes < never.blob_disk_bytes, "{collected:?} {never:?}");
        assert_eq!((tree.blob_bytes_written, tree.blob_disk_bytes), (0, 0));
        assert!(tree.table_bytes_written > tree.value_bytes, "{tree:?}");
    }

    #[test]
    fn history_removes_the_oldest_versions() {
        let mut history = History::new(10);
        let written: Vec<(u64, u64)> = (0..200).map(|_| history.write()).collect();
        for page in 0..10 {
            let here: Vec<u64> = written.iter().filter(|version| version.0 == page).map(|version| version.1).collect();
            assert_eq!(history.truncate(page), here[..here.len() - KEPT]);
            assert!(history.truncate(page).is_empty());
        }
        let mut again = History::new(10);
        assert!(written.iter().all(|version| again.write() == *version), "it is the same each time");
    }

    /// Rounds of 100 bytes of values each, of which 200 are live, with bytes on disk and written bytes for each.
    fn samples(rounds: &[(u64, u64)], moment: Moment) -> Vec<GcSample> {
        let mut all = Vec::new();
        for (round, &(disk, written)) in (0u64..).zip(rounds) {
            let sample = GcSample {
                round,
                seconds: round as f64,
                value_bytes: 100 * (round + 1),
                live_bytes: 200,
                blob_disk_bytes: disk + 100,
                blob_bytes_written: written,
                table_bytes_written: 10 * (round + 1),
                ..GcSample::default()
            };
            let reported_space_amp = Some(disk as f64 / 200.0);
            all.extend([sample, GcSample { moment, blob_disk_bytes: disk, reported_space_amp, ..sample }]);
        }
        let last = *all.last().unwrap();
        all.push(GcSample { moment: Moment::Flushed, ..last });
        all.push(GcSample { moment: Moment::Rest, blob_disk_bytes: 220, ..last });
        all
    }

    #[test]
    fn figures_are_of_the_steady_state() {
        let rounds = [(900, 100), (300, 200), (320, 400), (360, 600), (280, 800), (300, 1000)];
        let called = figures(GcMode::Target(1.5), &samples(&rounds, Moment::Collected), 6);
        for (field, expected) in [
            ("max_space_amp", json!(1.8)),
            ("reported_max_space_amp", json!(1.8)),
            ("peak_space_amp", json!(2.3)),
            ("rest_space_amp", json!(1.1)),
            ("write_amp", json!(2.0)),
            ("whole_write_amp", json!(1000.0 / 600.0)),
            ("files_write_amp", json!(2.1)),
        ] {
            assert_eq!(called[field], expected, "{field}");
        }
        let automatic = figures(GcMode::Automatic(1.5), &samples(&rounds, Moment::Truncated), 6);
        assert_eq!(automatic["max_space_amp"], json!(2.3), "at any time");
        assert!(figures(GcMode::Never, &[], 6).values().all(Value::is_null));
    }

    #[test]
    fn answer_follows_from_samples() {
        let course = |mode| {
            let moment = if matches!(mode, GcMode::Target(_)) { Moment::Collected } else { Moment::Truncated };
            figures(mode, &samples(&[(280, 100), (300, 250), (290, 400)], moment), 3)
        };
        let runs = MODES.map(|(mode, prefix)| (prefix.to_owned(), json!({"figures": course(mode)})));
        let mut answer = Map::new();
        put(&mut answer, &json!(runs.into_iter().collect::<Map<_, _>>())).unwrap();
        Question::named("blob-gc").unwrap().put_targets(&mut answer);
        for (field, expected) in [
            ("target_1_5_max_space_amp", json!(1.5)),
            ("target_1_5_peak_space_amp", json!(2.0)),
            ("target_1_5_write_amp", json!(1.5)),
            ("automatic_rest_space_amp", json!(1.1)),
            ("no_gc_space_amp", json!(1.1)),
        ] {
            assert_eq!(answer.get(field), Some(&expected), "{field}");
        }
        assert_eq!(answer["targets"]["target_1_5_write_amp"], json!({"at_most": 2.7, "is": 1.5, "met": true}));
        let mut empty = Map::new();
        put(&mut empty, &json!({})).unwrap();
        Question::named("blob-gc").unwrap().put_targets(&mut empty);
        assert!(empty["targets"].as_object().unwrap().values().all(|target| target["met"].is_null()));
    }
}

//! One way to collect, through the whole history; in a child process.

use crate::experiment::blobs::history::{History, Version};
use crate::experiment::blobs::pages::Pages;
use crate::experiment::blobs::series::{Moment, Sample};
use crate::experiment::fs::tally::TallyFs;
use crate::failure::{Result, wrong};
use crate::machine::disk;
use azekura::{
    CompressionType, Config, Database, GarbageCollection, KvSeparationOptions, Partition, PartitionCreateOptions,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Samples while the pages of a round are written.
const SAMPLES: u64 = 8;
const CACHE_BYTES: u64 = 64 << 20;
/// An engine that has written nothing for so long is at rest: what it does by itself begins earlier.
const QUIET: Duration = Duration::from_millis(2500);
/// So long it may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// How stale values are collected.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Way {
    /// Not at all; files that are stale as a whole go nevertheless.
    Never,
    /// By a call behind each truncation, and not otherwise.
    Target(f32),
    /// By the engine itself.
    Automatic(f32),
    /// Values are in the tree.
    Unseparated,
}

impl Way {
    pub(super) fn name(self) -> String {
        let number = |target: f32| format!("{target:.1}");
        match self {
            Way::Never => "no gc".into(),
            Way::Target(target) => format!("target {}", number(target)),
            Way::Automatic(target) => format!("automatic {}", number(target)),
            Way::Unseparated => "unseparated".into(),
        }
    }
}

/// What a child is asked to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Task {
    pub(super) way: Way,
    pub(super) dir: PathBuf,
    /// The packed pages.
    pub(super) pages: PathBuf,
    pub(super) rounds: u64,
    pub(super) memtable_bytes: u64,
    pub(super) blob_file_bytes: u64,
}

/// A run under way.
struct Run {
    task: Task,
    pages: Pages,
    history: History,
    fs: TallyFs,
    partition: Partition,
    database: Database,
    start: Instant,
    /// What the harness knows by itself; the rest is filled in where a sample is taken.
    known: Sample,
    samples: Vec<Sample>,
    collecting: Duration,
    key: Vec<u8>,
    page: Vec<u8>,
}

/// Carries a task out.
pub(super) fn run(task: Task) -> Result<Value> {
    let mut run = Run::new(task)?;
    for round in 0..run.task.rounds {
        run.known.round = round;
        run.write_round()?;
        run.truncate()?;
        run.sample(Moment::Truncated, None)?;
        if let Way::Target(target) = run.task.way {
            let start = Instant::now();
            run.partition.gc_with_space_amp_target(target)?;
            run.collecting += start.elapsed();
            let report = run.partition.gc_scan()?;
            run.sample(Moment::Collected, Some(f64::from(report.space_amp())))?;
        }
    }
    run.finish()
}

impl Run {
    fn new(task: Task) -> Result<Run> {
        let (pages, fs) = (Pages::read(&task.pages)?, TallyFs::counting());
        let database = Config::new(&task.dir).fs(Arc::new(fs.clone())).cache_size(CACHE_BYTES).open()?;
        let apart = KvSeparationOptions::default()
            .compression(CompressionType::None)
            .blob_file_target_size(task.blob_file_bytes);
        let options =
            PartitionCreateOptions::default().max_memtable_size(task.memtable_bytes).compression(CompressionType::None);
        let options = match task.way {
            Way::Unseparated => options,
            Way::Automatic(target) => options.with_kv_separation(apart.automatic_gc(Some(target))),
            Way::Never | Way::Target(_) => options.with_kv_separation(apart.automatic_gc(None)),
        };
        Ok(Run {
            history: History::new(pages.count()),
            partition: database.open_partition("pages", options)?,
            pages,
            task,
            fs,
            database,
            start: Instant::now(),
            known: Sample::default(),
            samples: Vec::new(),
            collecting: Duration::ZERO,
            key: Vec::new(),
            page: Vec::new(),
        })
    }

    /// The key of a version is that of its page, and behind it the number, so that the oldest comes first.
    fn key_of(&mut self, version: Version) {
        self.prefix_of(version.page);
        self.key.extend_from_slice(format!("{:012}", version.number).as_bytes());
    }

    fn prefix_of(&mut self, page: u64) {
        self.pages.key(page, &mut self.key);
        self.key.push(b'#');
    }

    /// As many versions as there are pages, of random pages.
    fn write_round(&mut self) -> Result<()> {
        let count = self.pages.count();
        for i in 1..=count {
            let version = self.history.write();
            self.key_of(version);
            self.pages.page(version.page, version.number, &mut self.page);
            self.partition.insert(&self.key, &self.page)?;
            self.known.operations += 1;
            self.known.value_bytes += self.page.len() as u64;
            self.known.live_bytes += self.page.len() as u64;
            if i % count.div_ceil(SAMPLES) == 0 {
                self.sample(Moment::Writing, None)?;
            }
        }
        Ok(())
    }

    /// Removes the oldest versions of each page that has too many, as a scan of its versions finds them.
    fn truncate(&mut self) -> Result<()> {
        for page in 0..self.pages.count() {
            let gone = self.history.truncate(page);
            if gone.is_empty() {
                continue;
            }
            self.prefix_of(page);
            let mut found = self.partition.prefix(&self.key);
            for version in gone {
                self.key_of(version);
                let (key, value) = found.next().ok_or_else(|| wrong(format!("{version:?} is missing")))??;
                if *key != *self.key {
                    return Err(wrong(format!("{version:?} is not where it should be")));
                }
                self.pages.check(page, version.number, &value)?;
                self.partition.remove(&key)?;
                self.known.operations += 1;
                self.known.live_bytes -= value.len() as u64;
            }
        }
        Ok(())
    }

    fn sample(&mut self, moment: Moment, reported_space_amp: Option<f64>) -> Result<()> {
        let (metrics, written) = (self.partition.metrics(), self.fs.written());
        let files = disk::by_endings(&self.task.dir);
        let on_disk = |end: &str| files.get(end).map_or(0, |(length, _)| *length);
        self.samples.push(Sample {
            moment,
            seconds: self.start.elapsed().as_secs_f64(),
            memory_bytes: metrics.memtable_bytes,
            blob_disk_bytes: on_disk("blob"),
            table_disk_bytes: on_disk("sst"),
            stored_bytes: metrics.blob_files.iter().map(|file| file.value_bytes).sum(),
            referenced_bytes: metrics.referenced_blob_bytes(),
            blob_bytes_written: written.blobs,
            table_bytes_written: written.tables,
            reported_space_amp,
            ..self.known
        });
        Ok(())
    }

    /// What is in memory is written too, so that nobody profits by it; all versions are compared.
    fn finish(mut self) -> Result<Value> {
        self.partition.flush()?;
        self.sample(Moment::Flushed, None)?;
        let seconds = self.start.elapsed().as_secs_f64();
        if matches!(self.task.way, Way::Automatic(_)) {
            self.come_to_rest()?;
            self.sample(Moment::Rest, None)?;
        }
        let mut expected = Vec::new();
        for page in 0..self.pages.count() {
            for version in self.history.of(page).collect::<Vec<_>>() {
                self.key_of(version);
                expected.push((self.key.clone(), version));
            }
        }
        expected.sort_by(|a, b| a.0.cmp(&b.0));
        let mut all = self.partition.iter();
        for (key, version) in expected {
            let (found, value) = all.lend().ok_or_else(|| wrong(format!("{version:?} is missing")))??;
            if *found != *key {
                return Err(wrong(format!("{version:?} is not where it should be")));
            }
            self.pages.check(version.page, version.number, value)?;
        }
        if all.lend().is_some() {
            return Err(wrong("a version is there that was removed"));
        }
        drop(all);
        let metrics = self.database.metrics();
        let answer = json!({
            "seconds": seconds, "collecting_seconds": self.collecting.as_secs_f64(),
            "stall_seconds": metrics.stall_ns as f64 / 1e9, "flushes": metrics.flushes,
            "compactions": metrics.compactions, "collections": metrics.collections,
            "collection_bytes_read": metrics.collection_bytes_read,
            "collection_bytes_written": metrics.collection_bytes_written, "written": self.fs.written(),
            "samples": self.samples,
        });
        drop(self.partition);
        self.database.close()?;
        Ok(answer)
    }

    fn come_to_rest(&self) -> Result<()> {
        let (start, mut quiet) = (Instant::now(), Instant::now());
        let mut last = self.fs.written();
        while quiet.elapsed() < QUIET {
            if start.elapsed() > PATIENCE {
                return Err("the engine does not come to rest".into());
            }
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
    use super::{Task, Way, run};
    use crate::experiment::blobs::pages::tests::small_pack;
    use crate::experiment::blobs::series::{Moment, Sample};

    fn samples(way: Way) -> Vec<Sample> {
        let dir = tempfile::tempdir().unwrap();
        let task = Task {
            way,
            dir: dir.path().join("db"),
            pages: small_pack(dir.path()),
            rounds: 9,
            memtable_bytes: 128 << 10,
            blob_file_bytes: 32 << 10,
        };
        let answer = run(task).unwrap();
        serde_json::from_value(answer["samples"].clone()).unwrap()
    }

    #[test]
    fn every_way_lives_through_the_same_history() {
        let ways = [Way::Never, Way::Target(1.5), Way::Automatic(1.5), Way::Unseparated];
        let all = ways.map(samples);
        let ends = all.each_ref().map(|samples| {
            let end = samples.iter().rev().find(|sample| sample.moment == Moment::Flushed).unwrap();
            assert!(end.live_bytes < end.value_bytes && end.memory_bytes < 64 << 10, "{end:?}");
            *end
        });
        assert!(ends.iter().all(|end| (end.value_bytes, end.live_bytes) == (ends[0].value_bytes, ends[0].live_bytes)));
        let [never, target, _, tree] = ends;
        assert!(never.blob_bytes_written >= never.value_bytes, "{never:?}");
        assert!(target.blob_bytes_written > never.blob_bytes_written, "{target:?}");
        assert!(target.blob_disk_bytes < never.blob_disk_bytes, "{target:?}");
        assert!(never.stored_bytes > never.referenced_bytes / 2 && never.referenced_bytes > 0, "{never:?}");
        assert_eq!((tree.blob_bytes_written, tree.blob_disk_bytes), (0, 0));
        assert!(tree.table_bytes_written > tree.value_bytes, "{tree:?}");
    }

    #[test]
    fn calls_reach_their_target() {
        let samples = samples(Way::Target(1.5));
        let collected: Vec<&Sample> = samples.iter().filter(|sample| sample.moment == Moment::Collected).collect();
        assert_eq!(collected.len(), 9);
        for sample in collected {
            assert!(sample.reported_space_amp.is_some_and(|amp| amp <= 1.5), "{sample:?}");
        }
    }
}

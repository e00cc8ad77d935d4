//! The parent's schedule: which child runs when. Engines take turns, A B A B, so that drift of the machine affects all
//! of them alike.

use crate::engine::{Options, Sync, bytes, registry};
use crate::error::{ErrorKind, KnownError, Result};
use crate::measure::disk;
use crate::task::child::{self, Job, Settings, Task};
use crate::task::measure::{Measurement, figures};
use crate::workload::{Shape, Workload};
use anyhow::{Context, ensure};
use clap::{Args, value_parser};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// Records of a data set, and the smallest and largest size of its values, by default.
const RECORDS: (u64, (u64, u64)) = (1_000_000, (100, 100));
/// The same of a data set of blobs.
const BLOBS: (u64, (u64, u64)) = (4_000, (4 << 10, 1 << 20));
/// The largest value.
const LARGEST: u64 = 1 << 31;
/// A measurement that ended so is not repeated in later rounds.
const GIVES_UP: [Option<&str>; 2] = [Some("timed_out"), Some("refused")];

/// Workloads, engines and rounds that are compared.
#[derive(Args, Clone, Debug)]
pub(crate) struct Comparison {
    /// Workloads, separated by commas.
    #[arg(long = "workload", value_parser = Workload::parser(), value_delimiter = ',', required = true)]
    pub(crate) workloads: Vec<Workload>,
    /// Engines, separated by commas; `all`: every one that runs here.
    #[arg(long = "engine", value_delimiter = ',', default_value = "azekura")]
    engines: Vec<String>,
    /// Rounds; engines take turns in each.
    #[arg(long, default_value_t = 3, value_parser = value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Threads; one comparison for each number of a list.
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = value_parser!(u64).range(1..=1024))]
    threads: Vec<u64>,
    /// Records of the data set; 1,000,000 by default, 4,000 of blobs.
    #[arg(long, value_parser = value_parser!(u64).range(1..1 << 40))]
    n: Option<u64>,
    /// Operations; n by default, n/10 for scans.
    #[arg(long)]
    ops: Option<u64>,
    /// Uncounted reads before a workload that reads; half its operations by default.
    #[arg(long)]
    warm_ops: Option<u64>,
    /// Bytes of each key.
    #[arg(long, default_value_t = 16, value_parser = value_parser!(u16).range(8..))]
    key_size: u16,
    /// Bytes of each value, half of them compressible: a number, or a range of sizes drawn log-uniformly. 100 by
    /// default, 4K-1M for blobs.
    #[arg(long, value_parser = sizes)]
    value_size: Option<(u64, u64)>,
    /// Seconds that one child process may take.
    #[arg(long, default_value_t = 600)]
    limit: u64,
    #[command(flatten)]
    pub(crate) options: Options,
    #[command(flatten)]
    pub(crate) settings: Settings,
}

/// Parses `100` or `4K-1M`.
fn sizes(text: &str) -> Result<(u64, u64), String> {
    let (min, max) = text.split_once('-').unwrap_or((text, text));
    match (bytes(min)?, bytes(max)?) {
        (min, max) if min > max => Err(format!("`{text}` begins above its end")),
        (min, max) if min < 8 || max > LARGEST => Err("the size of a value is 8 bytes to 2 GiB".into()),
        sizes => Ok(sizes),
    }
}

/// The rounds of one engine with one workload and one number of threads.
pub(crate) type Case = Vec<Value>;

/// The directory of a run, and the loaded databases in it by engine, data set and options.
pub(crate) struct Databases {
    pub(crate) scratch: TempDir,
    loaded: BTreeMap<String, Result<PathBuf, KnownError>>,
}

impl Databases {
    /// A new directory below `parent`; removed with its content when dropped.
    pub(crate) fn new(parent: &Path) -> Result<Databases> {
        Ok(Databases { scratch: disk::scratch(parent)?, loaded: BTreeMap::new() })
    }
}

impl Comparison {
    /// Returns an error if an engine cannot run here, or if the data set is too small for the threads.
    pub(crate) fn check(&self) -> Result<()> {
        registry::chosen(&self.engines)?;
        self.workloads.iter().try_for_each(|workload| self.shape(workload).map(drop))
    }

    /// Runs everything and returns the figures. An engine that cannot do something, or not in time, gets a row with an
    /// error; the others go on.
    pub(crate) fn run(&self, databases: &mut Databases) -> Result<Vec<Case>> {
        let (engines, mut all) = (registry::chosen(&self.engines)?, Vec::new());
        for workload in &self.workloads {
            let threads = if workload.single_threaded { &self.threads[..1] } else { &self.threads };
            let pairs = threads.iter().flat_map(|threads| engines.iter().map(move |engine| (*threads, engine)));
            let mut cases: Vec<_> = pairs.map(|pair| (pair, Case::new())).collect();
            for round in 1..=self.rounds {
                for ((threads, engine), case) in &mut cases {
                    let task = self.task(workload, engine, *threads, round)?;
                    let given_up = case.last().filter(|last| GIVES_UP.contains(&last["error_kind"].as_str()));
                    let mut row = given_up.cloned().unwrap_or_else(|| self.row(&task, databases));
                    row["round"] = json!(round);
                    case.push(row);
                }
            }
            all.extend(cases.into_iter().map(|(_, case)| case));
        }
        Ok(all)
    }

    /// The data set of a workload.
    pub(crate) fn shape(&self, workload: &Workload) -> Result<Shape> {
        Ok(Shape { sequential: workload.sequential, ..self.data_set(workload.blobs)? })
    }

    /// The data set of workloads of blobs, or that of the others.
    fn data_set(&self, blobs: bool) -> Result<Shape> {
        let (n, sizes) = if blobs { BLOBS } else { RECORDS };
        let (n, (min_size, max_size)) = (self.n.unwrap_or(n), self.value_size.unwrap_or(sizes));
        let enough = self.threads.iter().all(|threads| n >= *threads);
        ensure!(enough, "--n must be at least --threads: each thread writes records of its own");
        let (least_value, value_size) = (usize::try_from(min_size)?, usize::try_from(max_size)?);
        Ok(Shape { n, key_size: self.key_size.into(), least_value, value_size, sequential: false })
    }

    /// The settings as they are printed with each row.
    pub(crate) fn json(&self) -> Result<Value> {
        let (plain, blobs) = (self.data_set(false)?, self.data_set(true)?);
        let Settings { seconds, write_rate, depth, cold, .. } = &self.settings;
        Ok(json!({
            "options": self.options, "key_size": self.key_size, "value_size": plain.value_size,
            "value_sizes": [plain.least_value, plain.value_size], "blob_sizes": [blobs.least_value, blobs.value_size],
            "blobs": blobs.n, "seconds": seconds, "write_rate": write_rate, "depth": depth, "cold": cold,
        }))
    }

    /// A measurement in a directory that is chosen later.
    fn task(&self, workload: &Workload, engine: &str, threads: u64, round: u32) -> Result<Task> {
        let shape = self.shape(workload)?;
        let max_ops = if workload.fills() { shape.n } else { u64::MAX };
        let ops = self.ops.unwrap_or_else(|| workload.default_ops(shape.n)).min(max_ops);
        // A measurement that a time limit ends may have no last operation, but its warm-up has.
        let warm_ops = self.warm_ops.unwrap_or(ops.min(workload.default_ops(shape.n)) / 2);
        let settings = Settings { seed: self.settings.seed + u64::from(round), ..self.settings.clone() };
        let data_bytes = (shape.n as f64 * shape.mean_record_bytes()) as u64;
        let options = Options { data_bytes, ..workload.options(&self.options) };
        let (job, engine, workload) = (Job::Measure, engine.to_owned(), workload.clone());
        Ok(Task { job, engine, dir: PathBuf::new(), options, workload, shape, ops, warm_ops, threads, round, settings })
    }

    /// The figures of one measurement, or its error.
    fn row(&self, task: &Task, databases: &mut Databases) -> Value {
        eprintln!("{}: {} round {} of {}", task.engine, task.workload.name, task.round, self.rounds);
        self.measure(task, databases).unwrap_or_else(|error| {
            let known = KnownError::of(&error);
            eprintln!("{}: {}: {known}", task.engine, task.workload.name);
            figures(Measurement::default(), task, Some(&known))
        })
    }

    /// One measurement: on the loaded database itself if the workload only reads, on a copy of it or an empty directory
    /// otherwise.
    fn measure(&self, task: &Task, databases: &mut Databases) -> Result<Value> {
        let workload = &task.workload;
        let mut dir = databases.scratch.path().join(format!("{}-work", task.engine));
        if workload.loads {
            let base = self.base(task, databases)?;
            if workload.writes() {
                disk::copy_tree(&base, &dir)?;
            } else {
                dir = base;
            }
        }
        let ask = |job| self.ask(&Task { job, dir: dir.clone(), ..task.clone() });
        let recover = |answer: Value| ask(Job::Recover(answer["written"].as_u64().context("no number of records")?));
        let row = match workload.name.as_str() {
            "recovery" => ask(Job::WriteAndDie).and_then(recover),
            "open" => ask(Job::Open),
            _ => ask(Job::Measure),
        };
        if workload.writes() {
            disk::remove(&dir)?;
        }
        row
    }

    /// Has a child process carry out a task within the time limit.
    fn ask(&self, task: &Task) -> Result<Value> {
        let dies = task.job == Job::WriteAndDie;
        child::ask(&["child", &serde_json::to_string(task)?], dies, Duration::from_secs(self.limit))
    }

    /// The engine's loaded database, made when it is first needed, without syncs. Cache size, durability and workers do
    /// not affect it.
    fn base(&self, task: &Task, databases: &mut Databases) -> Result<PathBuf> {
        let options = Options { sync: Sync::None, ..task.options.clone() };
        let lasting = Options { cache_bytes: 0, workers: 0, ..options.clone() };
        let key = format!("{} {:?} {lasting:?}", task.engine, task.shape);
        if let Some(known) = databases.loaded.get(&key) {
            return Ok(known.clone()?);
        }
        let dir = databases.scratch.path().join(format!("{}-base-{}", task.engine, databases.loaded.len()));
        let loading = self.ask(&Task { job: Job::Load, dir: dir.clone(), options, ..task.clone() }).context("loading");
        let made = loading.map_err(|error| KnownError::of(&error)).map(|answer| {
            eprintln!("{}: loaded {} records: {answer}", task.engine, task.shape.n);
            dir
        });
        databases.loaded.insert(key, made.clone());
        Ok(made?)
    }
}

/// Returns an error if azekura has no figures for something or lost a record that its guarantee covers, or if any
/// engine gave a wrong answer.
pub(crate) fn verdict<'a>(rounds: impl IntoIterator<Item = &'a Value>) -> Result<()> {
    for row in rounds {
        let word = |field: &str| row[field].as_str().unwrap_or_default();
        let (engine, workload) = (word("engine"), word("workload"));
        let ours = registry::is_ours(engine);
        let lost = row["lost_records"].as_u64().unwrap_or(0);
        ensure!(!ours || lost == 0, "{engine}: {workload}: {lost} acknowledged records are lost");
        let passes = row["error"].is_null() || !(ours || row["error_kind"] == json!(ErrorKind::Wrong));
        ensure!(passes, "{engine}: {workload}: {}", word("error"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{Comparison, sizes, verdict};
    use crate::error::ErrorKind;
    use crate::task::measure::tests::{failed, sample};
    use crate::workload::Shape;
    use clap::Parser;

    #[test]
    fn run_fails_by_own_errors_or_wrong_answers() {
        let good = sample("azekura", 1, 1.0);
        assert!(verdict([&good]).is_ok());
        for (row, ends_well) in [
            (failed("fjall", ErrorKind::TimedOut), true),
            (failed("fjall", ErrorKind::Refused), true),
            (failed("fjall", ErrorKind::Failed), true),
            (failed("fjall", ErrorKind::Wrong), false),
            (failed("azekura", ErrorKind::TimedOut), false),
            (failed("azekura", ErrorKind::Failed), false),
            (failed("azekura-pmem", ErrorKind::TimedOut), false),
        ] {
            assert_eq!(verdict([&good, &row]).is_ok(), ends_well, "{row:?}");
        }
        for (engine, lost, ends_well) in
            [("azekura", 0, true), ("azekura", 1, false), ("azekura-pmem", 1, false), ("fjall", 1, true)]
        {
            let mut row = sample(engine, 1, 1.0);
            row["lost_records"] = lost.into();
            assert_eq!(verdict([&row]).is_ok(), ends_well, "{engine} lost {lost}");
        }
    }

    #[derive(clap::Parser)]
    struct CommandLine {
        #[command(flatten)]
        comparison: Comparison,
    }

    fn parse(arguments: &str) -> Comparison {
        CommandLine::try_parse_from(format!("run {arguments}").split_whitespace()).unwrap().comparison
    }

    /// The data set of the first workload.
    fn shape(arguments: &str) -> Shape {
        let comparison = parse(arguments);
        comparison.shape(&comparison.workloads[0]).unwrap()
    }

    #[test]
    fn lists_and_sizes_are_parsed() {
        let two = parse("--workload fillrandom,ycsb-a --value-size 4K --n 10 --sync data --threads 1,2,4 --limit 7");
        assert_eq!((two.workloads.len(), two.threads.as_slice(), two.limit), (2, &[1, 2, 4][..], 7));
        let task = two.task(&two.workloads[1], "fjall", 2, 3).unwrap();
        assert_eq!((task.shape.value_size, task.ops, task.settings.seed), (4096, 10, 4));
    }

    #[test]
    fn blobs_have_sizes_of_their_own() {
        let plain = shape("--workload blobload");
        assert_eq!((plain.n, plain.least_value, plain.value_size), (4000, 4 << 10, 1 << 20));
        let small = shape("--workload fillrandom");
        assert_eq!((small.n, small.value_size), (1_000_000, 100));
        let range = shape("--workload blobload --n 50 --value-size 1K-2K");
        assert_eq!((range.n, range.least_value, range.value_size), (50, 1024, 2048));
        assert_eq!(shape("--workload blobload --value-size 1K").value_size, 1024);
    }

    #[test]
    fn impossible_runs_are_refused() {
        let refused = parse("--workload overwrite --threads 8 --n 4");
        assert!(refused.check().is_err() && refused.shape(&refused.workloads[0]).is_err());
        assert!(parse("--workload overwrite --engine nosuchdb").check().is_err());
        for text in ["4", "4-16", "3G", "64-8", "12Q", "", "99999999999999999999", "18446744073709551615G"] {
            assert!(sizes(text).is_err(), "{text}");
        }
        for (text, size) in [("64", 64), ("64K", 65_536), ("512MiB", 512 << 20), ("4k", 4096), ("1G", 1 << 30)] {
            assert_eq!(sizes(text), Ok((size, size)), "{text}");
        }
    }
}

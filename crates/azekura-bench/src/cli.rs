//! The command line.

use crate::bytes::{Bytes, Sizes};
use crate::engine::{Compression, Options, Sync, registry};
use crate::failure::Result;
use crate::machine::disk::Scratch;
use crate::task::rounds::Comparison;
use crate::task::task::Plan;
use crate::workload::keys::KeyOrder;
use crate::workload::shape::mean_of_sizes;
use crate::workload::{Shape, Workload};
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use std::time::Duration;

/// Measures azekura, alone and beside its peers. What makes a comparison fair is written in the README of this crate.
#[derive(Debug, Parser)]
#[command(name = "azekura-bench", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run workloads on engines, interleaved, and compare them.
    Run(Run),
    /// Time the opening of a database of many tables.
    Open(Open),
    /// Time the creation and reopening of many partitions.
    Partitions(Partitions),
    /// Measure what the device below a directory can do.
    Device(Common),
    /// Run a preset and write a page, or make the page of an earlier run again.
    Report(Report),
    /// Measure one question, variants interleaved, and answer with ratios.
    Experiment(Experiment),
    /// One task, for a parent process.
    #[command(hide = true)]
    Child {
        /// The task as JSON.
        task: String,
    },
}

/// Where a command works.
#[derive(Debug, Args)]
pub(crate) struct Place {
    /// Directory to work below; a directory of this run's own is made in it and removed at the end.
    #[arg(long, default_value = "target/bench")]
    pub(crate) dir: PathBuf,
    /// Leave the databases there.
    #[arg(long)]
    pub(crate) keep: bool,
}

impl Place {
    /// The directory of this run's own.
    ///
    /// # Errors
    /// Those of creating it.
    pub(crate) fn scratch(&self) -> Result<Scratch> {
        Scratch::create(&self.dir, self.keep)
    }
}

/// What every command that measures takes.
#[derive(Debug, Args)]
pub(crate) struct Common {
    #[command(flatten)]
    pub(crate) place: Place,
    /// Print one JSON object per run instead of tables.
    #[arg(long)]
    pub(crate) json: bool,
    /// Seconds for each of the measurements of the device.
    #[arg(long, default_value_t = 0.5)]
    pub(crate) device_seconds: f64,
}

/// What every command that opens engines takes.
#[derive(Debug, Args)]
pub(crate) struct Engines {
    /// Engines, separated by commas; `all`: every one that runs here.
    #[arg(long, value_delimiter = ',', default_value = "azekura")]
    pub(crate) engine: Vec<String>,
    /// Rounds; engines take turns in each.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Background threads of each engine; as many as processors by default.
    #[arg(long)]
    pub(crate) workers: Option<usize>,
    /// Seconds that one child process may take; 20 times the median of what other engines took by default, at least
    /// 120.
    #[arg(long)]
    pub(crate) limit: Option<u64>,
    /// What a write must survive before it returns.
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) sync: Sync,
    /// Compression of every level.
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) compression: Compression,
    /// Block cache of each engine.
    #[arg(long, default_value = "512M")]
    pub(crate) cache_size: Bytes,
    /// Keep values of at least so many bytes apart from the tree, in engines that can.
    #[arg(long)]
    pub(crate) separate_from: Option<Bytes>,
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Workloads, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', required = true)]
    pub(crate) workload: Vec<Workload>,
    /// Records of the data set; 1,000,000 by default, 4,000 of blobs.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..1 << 40))]
    pub(crate) n: Option<u64>,
    /// Operations; n by default, n/10 for scans.
    #[arg(long)]
    pub(crate) ops: Option<u64>,
    /// End each measurement after so many seconds.
    #[arg(long)]
    pub(crate) seconds: Option<f64>,
    /// Bytes of each key.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(8..))]
    pub(crate) key_size: u16,
    /// Bytes of each value, half of them compressible: a number, or a range of sizes drawn log-uniformly. 100 by
    /// default; 4K-1M for blobs, where a number is the mean of a range that begins at 4K.
    #[arg(long)]
    pub(crate) value_size: Option<Sizes>,
    /// Threads; one comparison for each number of a list.
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub(crate) threads: Vec<u64>,
    /// Memtable of each engine.
    #[arg(long, default_value = "64M")]
    pub(crate) memtable_size: Bytes,
    /// Uncounted reads before a workload that reads; half its operations by default.
    #[arg(long)]
    pub(crate) warm_ops: Option<u64>,
    /// Records read behind each seek of seekrandom.
    #[arg(long, default_value_t = 10)]
    pub(crate) seek_nexts: u64,
    /// Records per second of the writer of readwhilewriting; 0 for as many as it can.
    #[arg(long, default_value_t = 10_000)]
    pub(crate) write_rate: u64,
    /// Records that a queue holds; n/10 by default.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..1 << 40))]
    pub(crate) depth: Option<u64>,
    /// Put the database's files out of the page cache before each measurement and once a second during it.
    #[arg(long)]
    pub(crate) cold: bool,
    /// Seed of every choice.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u32,
    /// Print the rate of every second while running.
    #[arg(long)]
    pub(crate) seconds_report: bool,
    #[command(flatten)]
    pub(crate) engines: Engines,
    #[command(flatten)]
    pub(crate) common: Common,
}

#[derive(Debug, Args)]
pub(crate) struct Open {
    /// Tables the database must have at least.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) tables: u64,
    /// Bytes of one table; a memtable is 64 times as large.
    #[arg(long, default_value = "64K")]
    pub(crate) table_size: Bytes,
    #[command(flatten)]
    pub(crate) engines: Engines,
    #[command(flatten)]
    pub(crate) common: Common,
}

#[derive(Debug, Args)]
pub(crate) struct Partitions {
    /// Partitions.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: u64,
    #[command(flatten)]
    pub(crate) engines: Engines,
    #[command(flatten)]
    pub(crate) common: Common,
}

#[derive(Debug, Args)]
pub(crate) struct Report {
    /// quick (5 minutes at most), full (an hour at most), or render: the page of an earlier run again.
    pub(crate) what: String,
    /// For render: the report.json of that run.
    pub(crate) file: Option<PathBuf>,
    /// Engines, separated by commas; all that run here by default.
    #[arg(long, value_delimiter = ',')]
    pub(crate) engine: Vec<String>,
    /// Directory to write to; docs/benchmarks of the workspace for full, else target/bench/report.
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) place: Place,
    /// Print the whole report as JSON too.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Experiment {
    /// Which one.
    #[arg(required_unless_present = "list")]
    pub(crate) name: Option<String>,
    /// Name all experiments.
    #[arg(long)]
    pub(crate) list: bool,
    /// Less data and shorter rounds.
    #[arg(long)]
    pub(crate) quick: bool,
    /// One variant, for a parent process.
    #[arg(long, hide = true)]
    pub(crate) variant: Option<String>,
    /// Directory whose HTML pages, and those below it, are stored by experiments that store pages; the Rust toolchain's
    /// documentation by default, or generated pages where there is none.
    #[arg(long)]
    pub(crate) pages: Option<PathBuf>,
    /// Directory for what an experiment has to show beside its answer, series and charts, and for the answer itself as
    /// JSON; series and charts go to target/bench/experiment by default.
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
    /// Directory in memory, for experiments that need one.
    #[arg(long, default_value = "/dev/shm")]
    pub(crate) memory_dir: PathBuf,
    #[command(flatten)]
    pub(crate) common: Common,
}

impl Report {
    /// Where the files go.
    pub(crate) fn target(&self) -> PathBuf {
        let full = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/benchmarks"));
        let other = || PathBuf::from("target/bench/report");
        self.out.clone().unwrap_or_else(|| if self.what == "full" { full() } else { other() })
    }
}

impl Engines {
    /// The options every engine is opened with.
    pub(crate) fn options(&self, memtable: Bytes, table: Option<Bytes>) -> Options {
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get());
        Options {
            cache_bytes: self.cache_size.0,
            memtable_bytes: memtable.0,
            table_bytes: table.map(|bytes| bytes.0),
            sync: self.sync,
            compression: self.compression,
            workers: self.workers.unwrap_or(processors).max(1),
            separate_from: self.separate_from.map(|bytes| bytes.0),
            data_bytes: 0,
        }
    }

    /// How long one child process may take, if that was said.
    pub(crate) fn limit(&self) -> Option<Duration> {
        self.limit.map(Duration::from_secs)
    }

    /// Refuses engines that this build does not have.
    pub(crate) fn check(&self) -> Result<()> {
        self.names().iter().try_for_each(|name| registry::check(name))
    }

    /// The engines, `all` spelt out.
    pub(crate) fn names(&self) -> Vec<String> {
        registry::chosen(&self.engine)
    }
}

/// Records of a data set, and of one of blobs, when none are asked for.
const RECORDS: u64 = 1_000_000;
const BLOBS: u64 = 4_000;
/// Sizes of values when none are asked for.
const VALUES: Sizes = Sizes { least: 100, most: 100 };
/// The same of blobs.
const BLOB_VALUES: Sizes = Sizes { least: 4 << 10, most: 1 << 20 };
/// The largest value.
const LARGEST: u64 = 1 << 31;

/// The sizes of blobs: a range as it is, a number as the mean of a range.
fn blob_sizes(asked: Option<Sizes>) -> Sizes {
    let Some(Sizes { least, most }) = asked else { return BLOB_VALUES };
    let (from, mean) = (BLOB_VALUES.least as f64, least as f64);
    if least != most || mean <= from {
        return Sizes { least, most };
    }
    // The mean grows with the end of the range: halve the stretch it must lie in.
    let (mut low, mut high) = (mean, LARGEST as f64);
    for _ in 0..60 {
        let middle = f64::midpoint(low, high);
        if mean_of_sizes(from, middle) < mean { low = middle } else { high = middle }
    }
    Sizes { least: BLOB_VALUES.least, most: low as u64 }
}

impl Run {
    fn shape(&self, n: u64, sizes: Sizes) -> Result<Shape> {
        if sizes.least < 8 || sizes.most > LARGEST {
            return Err(
                "--value-size must be 8 bytes to 2 GiB: the first 8 tell which generation of the record it is".into()
            );
        }
        Ok(Shape {
            n: self.n.unwrap_or(n),
            key_size: usize::from(self.key_size),
            least_value: sizes.least as usize,
            value_size: sizes.most as usize,
            order: KeyOrder::Scrambled,
        })
    }

    /// The comparison asked for.
    pub(crate) fn comparison(&self) -> Result<Comparison> {
        self.engines.check()?;
        let shape = self.shape(RECORDS, self.value_size.unwrap_or(VALUES))?;
        let blobs = self.shape(BLOBS, blob_sizes(self.value_size))?;
        if self.threads.iter().any(|&threads| shape.n.min(blobs.n) < threads) {
            return Err("--n must be at least --threads: each thread writes records of its own".into());
        }
        let plan = Plan {
            workload: Workload::FillRandom,
            shape,
            ops: 0,
            seconds: self.seconds,
            threads: 1,
            warm_ops: self.warm_ops.unwrap_or(0),
            seek_nexts: self.seek_nexts,
            write_rate: self.write_rate,
            depth: self.depth,
            cold: self.cold,
            seed: u64::from(self.seed),
            round: 0,
            show_seconds: self.seconds_report,
        };
        Ok(Comparison {
            workloads: self.workload.clone(),
            engines: self.engines.names(),
            rounds: self.engines.rounds,
            threads: self.threads.clone(),
            options: self.engines.options(self.memtable_size, None),
            blobs,
            plan,
            ops: self.ops,
            warm_ops: self.warm_ops,
            limit: self.engines.limit(),
            deadline: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Cli, Command};
    use clap::{CommandFactory, Parser};

    #[test]
    fn command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn lists_and_sizes_are_taken() {
        let line = "azekura-bench run --workload fillrandom,ycsb-a --engine azekura --value-size 4K --n 10 --sync data";
        let Command::Run(run) = Cli::parse_from(line.split(' ')).command else { panic!("not a run") };
        let comparison = run.comparison().unwrap();
        assert_eq!(comparison.workloads.len(), 2);
        assert_eq!(comparison.plan.shape.value_size, 4096);
    }

    #[test]
    fn thread_counts_come_in_lists() {
        let line = "b run --workload overwrite --threads 1,2,4 --limit 7";
        let Command::Run(run) = Cli::parse_from(line.split(' ')).command else { panic!("not a run") };
        let comparison = run.comparison().unwrap();
        assert_eq!((comparison.threads.as_slice(), comparison.limit.map(|l| l.as_secs())), (&[1, 2, 4][..], Some(7)));
    }

    #[test]
    fn blobs_have_sizes_of_their_own() {
        let asked = |text: &str| {
            let line = format!("b run --workload blobload {text}");
            let Command::Run(run) = Cli::parse_from(line.split_whitespace()).command else { panic!("not a run") };
            run.comparison().unwrap()
        };
        let plain = asked("");
        assert_eq!((plain.blobs.n, plain.blobs.least_value, plain.blobs.value_size), (4000, 4 << 10, 1 << 20));
        assert_eq!((plain.plan.shape.n, plain.plan.shape.value_size), (1_000_000, 100));
        let range = asked("--n 50 --value-size 1K-2K").blobs;
        assert_eq!((range.n, range.least_value, range.value_size), (50, 1024, 2048));
        let mean = asked("--value-size 64K").blobs;
        assert!((mean.mean_record_bytes() / f64::from(64 << 10) - 1.0).abs() < 0.01, "{mean:?}");
        assert_eq!(asked("--value-size 1K").blobs.value_size, 1024);
    }

    #[test]
    fn nonsense_is_refused() {
        for line in ["run --workload nothing", "run", "run --workload overwrite --n 0", "open --tables 0"] {
            assert!(Cli::try_parse_from(["azekura-bench"].into_iter().chain(line.split(' '))).is_err(), "{line}");
        }
        let parse = |line: &str| match Cli::parse_from(line.split(' ')).command {
            Command::Run(run) => run.comparison().is_err(),
            _ => false,
        };
        assert!(parse("b run --workload overwrite --value-size 4"));
        assert!(parse("b run --workload overwrite --value-size 4-16"));
        assert!(parse("b run --workload overwrite --threads 8 --n 4"));
        assert!(parse("b run --workload overwrite --engine nosuchdb"));
    }
}

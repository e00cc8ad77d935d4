//! The command line.

use crate::engine::{Compression, Options, Sync, registry};
use crate::error::Result;
use crate::measure::device::processors;
use crate::measure::disk::Scratch;
use crate::workload::Workload;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use std::time::Duration;

/// Measures azekura, alone and beside its peers. The README of this crate says what makes a comparison fair.
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
    /// Directory to work below; the run makes a directory of its own in it and removes it at the end.
    #[arg(long, default_value = "target/bench")]
    dir: PathBuf,
    /// Keep the databases.
    #[arg(long)]
    keep: bool,
}

impl Place {
    /// Creates the directory of this run.
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
    engine: Vec<String>,
    /// Rounds; engines take turns in each.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Background threads of each engine; as many as processors by default.
    #[arg(long)]
    workers: Option<usize>,
    /// Seconds that one child process may take; 20 times the median of what other engines took by default, at least
    /// 120.
    #[arg(long)]
    limit: Option<u64>,
    /// What a write must survive before it returns.
    #[arg(long, value_enum, default_value = "none")]
    sync: Sync,
    /// Compression of every level.
    #[arg(long, value_enum, default_value = "none")]
    compression: Compression,
    /// Block cache of each engine.
    #[arg(long, default_value = "512M", value_parser = bytes)]
    cache_size: u64,
    /// Store values of at least this size apart from the tree, in engines that can.
    #[arg(long, value_parser = bytes)]
    separate_from: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// Workloads, separated by commas.
    #[arg(long, value_parser = Workload::parser(), value_delimiter = ',', required = true)]
    pub(crate) workload: Vec<Workload>,
    /// Records of the data set; 1,000,000 by default, 4,000 of blobs.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..1 << 40))]
    pub(crate) n: Option<u64>,
    /// Operations; n by default, n/10 for scans.
    #[arg(long)]
    pub(crate) ops: Option<u64>,
    /// End each measurement after this many seconds.
    #[arg(long)]
    pub(crate) seconds: Option<f64>,
    /// Bytes of each key.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(8..))]
    pub(crate) key_size: u16,
    /// Bytes of each value, half of them compressible: a number, or a range of sizes drawn log-uniformly. 100 by
    /// default; 4K-1M for blobs, where a number is the mean of a range that begins at 4K.
    #[arg(long, value_parser = sizes)]
    pub(crate) value_size: Option<Sizes>,
    /// Threads; one comparison for each number of a list.
    #[arg(long, value_delimiter = ',', default_value = "1", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub(crate) threads: Vec<u64>,
    /// Memtable of each engine.
    #[arg(long, default_value = "64M", value_parser = bytes)]
    pub(crate) memtable_size: u64,
    /// Uncounted reads before a workload that reads; half its operations by default.
    #[arg(long)]
    pub(crate) warm_ops: Option<u64>,
    /// Records read after each seek of seekrandom.
    #[arg(long, default_value_t = 10)]
    pub(crate) seek_nexts: u64,
    /// Records per second of the writer of readwhilewriting; 0 for as many as it can.
    #[arg(long, default_value_t = 10_000)]
    pub(crate) write_rate: u64,
    /// Records that a queue holds; n/10 by default.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..1 << 40))]
    pub(crate) depth: Option<u64>,
    /// Evict the database from the page cache before each measurement and once a second during it.
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
    #[arg(long, default_value = "64K", value_parser = bytes)]
    pub(crate) table_size: u64,
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
    /// Directory to write to.
    #[arg(long, default_value = "target/bench/report")]
    pub(crate) out: PathBuf,
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
    /// List all experiments.
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
    /// Directory for series and charts, target/bench/experiment by default, and for the answer itself as JSON if it is
    /// given.
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
    /// Directory in memory, for experiments that need one.
    #[arg(long, default_value = "/dev/shm")]
    pub(crate) memory_dir: PathBuf,
    #[command(flatten)]
    pub(crate) common: Common,
}

impl Engines {
    /// The options that every engine is opened with.
    pub(crate) fn options(&self, memtable_bytes: u64, table_bytes: Option<u64>) -> Options {
        Options {
            cache_bytes: self.cache_size,
            table_bytes,
            sync: self.sync,
            compression: self.compression,
            workers: self.workers.unwrap_or_else(processors).max(1),
            separate_from: self.separate_from,
            ..Options::cached(memtable_bytes)
        }
    }

    /// The time limit of a child process, if one was given.
    pub(crate) fn limit(&self) -> Option<Duration> {
        self.limit.map(Duration::from_secs)
    }

    /// The engines, `all` expanded; an error if one cannot run here.
    pub(crate) fn names(&self) -> Result<Vec<String>> {
        let names = registry::chosen(&self.engine);
        names.iter().try_for_each(|name| registry::check(name))?;
        Ok(names)
    }
}

/// Parses `64`, `4K`, `512MiB`, `1G`: powers of 1024.
fn bytes(text: &str) -> Result<u64, String> {
    let parsed = parse_size::Config::new().with_binary().parse_size(text);
    parsed.map_err(|error| format!("`{text}` is not a size: {error}"))
}

/// The smallest and the largest of a range of sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub(crate) least: u64,
    pub(crate) most: u64,
}

/// Parses `100` or `4K-1M`.
fn sizes(text: &str) -> Result<Sizes, String> {
    let (least, most) = text.split_once('-').unwrap_or((text, text));
    let sizes = Sizes { least: bytes(least)?, most: bytes(most)? };
    if sizes.least > sizes.most { Err(format!("`{text}` begins above its end")) } else { Ok(sizes) }
}

#[cfg(test)]
mod tests {
    use super::{Cli, Sizes, bytes, sizes};
    use clap::{CommandFactory, Parser};

    #[test]
    fn command_line_is_well_formed() {
        Cli::command().debug_assert();
        for line in ["run --workload nothing", "run", "run --workload overwrite --n 0", "open --tables 0"] {
            assert!(Cli::try_parse_from(["azekura-bench"].into_iter().chain(line.split(' '))).is_err(), "{line}");
        }
    }

    #[test]
    fn sizes_are_parsed_in_powers_of_1024() {
        for (text, size) in [("64", 64), ("64K", 65_536), ("512MiB", 512 << 20), ("4k", 4096), ("1G", 1 << 30)] {
            assert_eq!(bytes(text), Ok(size), "{text}");
        }
        assert!(["12Q", "", "99999999999999999999", "18446744073709551615G"].iter().all(|text| bytes(text).is_err()));
        assert_eq!(sizes("100"), Ok(Sizes { least: 100, most: 100 }));
        assert_eq!(sizes("4K-1M"), Ok(Sizes { least: 4 << 10, most: 1 << 20 }));
        assert!(sizes("1M-4K").is_err() && sizes("4K-").is_err());
    }
}

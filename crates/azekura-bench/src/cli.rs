//! The command line.

use crate::error::Result;
use crate::measure::disk::Scratch;
use crate::task::comparison::Comparison;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

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
    /// Run a preset and write its results page, or write the page of an earlier run again.
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

/// The options of every command.
#[derive(Debug, Args)]
pub(crate) struct Common {
    /// Directory to work below; the run makes a directory of its own in it and removes it at the end.
    #[arg(long, default_value = "target/bench")]
    dir: PathBuf,
    /// Keep the databases.
    #[arg(long)]
    keep: bool,
    /// Print one JSON object per line instead of tables.
    #[arg(long)]
    pub(crate) json: bool,
    /// Seconds for each of the measurements of the device.
    #[arg(long, default_value_t = 0.5)]
    pub(crate) device_seconds: f64,
}

impl Common {
    /// Creates the directory of this run.
    pub(crate) fn scratch(&self) -> Result<Scratch> {
        Scratch::create(&self.dir, self.keep)
    }
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) comparison: Comparison,
    #[command(flatten)]
    pub(crate) common: Common,
}

#[derive(Debug, Args)]
pub(crate) struct Report {
    /// quick (about 5 minutes), full (about an hour), or the report.json of an earlier run.
    pub(crate) what: String,
    /// Engines, separated by commas.
    #[arg(long, default_value = "all")]
    pub(crate) engine: String,
    /// Directory for report.md, ratios.svg and report.json.
    #[arg(long, default_value = "target/bench/report")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) common: Common,
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
    /// Directory of HTML pages, for experiments that store pages; the Rust toolchain's documentation by default, or
    /// generated pages where there is none.
    #[arg(long)]
    pub(crate) pages: Option<PathBuf>,
    /// Directory for series and charts, target/bench/experiment by default, and for the answer as JSON if it is given.
    #[arg(long)]
    pub(crate) out: Option<PathBuf>,
    /// Directory in memory, for experiments that need one.
    #[arg(long, default_value = "/dev/shm")]
    pub(crate) memory_dir: PathBuf,
    #[command(flatten)]
    pub(crate) common: Common,
}

#[cfg(test)]
mod tests {
    use super::Cli;
    use clap::{CommandFactory, Parser};

    #[test]
    fn command_line_is_well_formed() {
        Cli::command().debug_assert();
        for line in ["run --workload nothing", "run", "run --workload overwrite --n 0", "report"] {
            assert!(Cli::try_parse_from(["azekura-bench"].into_iter().chain(line.split(' '))).is_err(), "{line}");
        }
    }
}

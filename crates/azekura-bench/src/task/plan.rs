//! The tasks that a parent passes to its child processes as JSON.

use crate::engine::Options;
use crate::workload::{Shape, Workload};
use clap::Args;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The settings that every measurement of a run shares.
#[derive(Args, Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// End each measurement after this many seconds.
    #[arg(long)]
    pub(crate) seconds: Option<f64>,
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
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(..1 << 32))]
    pub(crate) seed: u64,
    /// Print the rate of every second while running.
    #[arg(long)]
    pub(crate) seconds_report: bool,
}

/// One measurement of one workload.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) workload: Workload,
    /// The data set that it runs on or makes.
    pub(crate) shape: Shape,
    /// Operations of all threads together.
    pub(crate) ops: u64,
    /// Uncounted operations before a workload that reads.
    pub(crate) warm_ops: u64,
    pub(crate) threads: u64,
    /// Round, from 1.
    pub(crate) round: u32,
    pub(crate) settings: Settings,
}

/// One job on one database.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) engine: String,
    pub(crate) dir: PathBuf,
    pub(crate) options: Options,
    pub(crate) job: Job,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Job {
    /// Fill a new database, settle, close; not measured.
    Load(Shape),
    /// Run a workload and measure it.
    Measure(Plan),
    /// Write records and kill this process after the last one.
    WriteAndDie(Plan),
    /// Open a database with this many written records, look for each, and measure the opening.
    Recover(Plan, u64),
    /// Open, get one record and close, measured.
    Open(Plan),
}

//! What a child process is asked to do.

use crate::engine::Options;
use crate::workload::{Shape, Workload};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// One measurement of one workload.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) workload: Workload,
    /// The data set that it runs on or makes.
    pub(crate) shape: Shape,
    /// Operations of all threads together.
    pub(crate) ops: u64,
    /// Ends the measurement early.
    pub(crate) seconds: Option<f64>,
    pub(crate) threads: u64,
    /// Uncounted operations before a workload that reads.
    pub(crate) warm_ops: u64,
    pub(crate) seek_nexts: u64,
    /// Records per second of the writer of `readwhilewriting`; 0 for as many as possible.
    pub(crate) write_rate: u64,
    /// Depth of `queue`; n/10 when `None`.
    pub(crate) depth: Option<u64>,
    /// Whether the database is evicted from the page cache before the measurement and once a second during it.
    pub(crate) cold: bool,
    pub(crate) seed: u64,
    /// Round, from 1.
    pub(crate) round: u32,
    /// Whether the rate of each second is printed.
    pub(crate) show_seconds: bool,
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
    /// Fill a new database until it settles with at least this many tables.
    BuildTables(u64),
    /// Open it, read one record, close it.
    OpenTables,
    /// Create a new database with this many partitions, one record in each.
    CreatePartitions(u64),
    /// Open it and all of them, read each record.
    OpenPartitions(u64),
}

//! What a child process can be asked to do.

use crate::engine::Options;
use crate::failure::Result;
use crate::task::{measure, opening};
use crate::workload::{Shape, Workload};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// One job for one child process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Task {
    /// Engine by name.
    pub(crate) engine: String,
    /// Directory of its database.
    pub(crate) dir: PathBuf,
    /// How it is opened.
    pub(crate) options: Options,
    /// What to do.
    pub(crate) job: Job,
}

/// The jobs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Job {
    /// Fill a new database, settle, close; not measured.
    Load(Shape),
    /// Run a workload and measure it.
    Measure(Plan),
    /// Fill a new database until it settles with at least so many tables.
    BuildTables(u64),
    /// Open it, read one record, close it.
    OpenTables,
    /// Create a new database with so many partitions, one record in each.
    CreatePartitions(u64),
    /// Open it and all of them, read each record.
    OpenPartitions(u64),
}

/// One measurement of one workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// The workload.
    pub(crate) workload: Workload,
    /// The data set it runs on, or makes.
    pub(crate) shape: Shape,
    /// Operations of all threads together.
    pub(crate) ops: u64,
    /// Ends the measurement early.
    pub(crate) seconds: Option<f64>,
    /// Threads.
    pub(crate) threads: u64,
    /// Uncounted operations before a workload that reads.
    pub(crate) warm_ops: u64,
    /// Records read behind each seek.
    pub(crate) seek_nexts: u64,
    /// Seed of every choice.
    pub(crate) seed: u64,
    /// Round, from 1.
    pub(crate) round: u32,
    /// Whether to print each second's rate while running.
    pub(crate) show_seconds: bool,
}

impl Task {
    /// Does the task in a child process of this very program, and gives what it printed.
    ///
    /// # Errors
    /// The child failed; it has said why on standard error.
    pub(crate) fn in_child(&self) -> Result<Value> {
        let child = Command::new(std::env::current_exe()?)
            .arg("child")
            .arg(serde_json::to_string(self)?)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()?;
        if !child.status.success() {
            return Err(format!("{} failed ({}): {:?}", self.engine, child.status, self.job).into());
        }
        let text = String::from_utf8(child.stdout)?;
        let line = text.lines().last().ok_or("a child printed nothing")?;
        Ok(serde_json::from_str(line)?)
    }

    /// Does the task here and gives its result; what a child process calls.
    pub(crate) fn here(&self) -> Result<Value> {
        match &self.job {
            Job::Load(shape) => measure::load(self, shape),
            Job::Measure(plan) => Ok(serde_json::to_value(measure::measure(self, plan)?)?),
            Job::BuildTables(count) => opening::build_tables(self, *count),
            Job::OpenTables => opening::open_tables(self),
            Job::CreatePartitions(count) => opening::create_partitions(self, *count),
            Job::OpenPartitions(count) => opening::open_partitions(self, *count),
        }
    }
}

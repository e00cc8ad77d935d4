//! What a child process can be asked to do.

use crate::engine::Options;
use crate::failure::{Kind, Result, Told};
use crate::task::{child, measure, opening, recovery};
use crate::workload::{Shape, Workload};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

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
    /// Write records and be killed behind the last one.
    WriteAndDie(Plan),
    /// Open what was written so many records of, look for each, and measure it.
    Recover(Plan, u64),
    /// Open, get one record and close, measured.
    Open(Plan),
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
    /// Records per second of the writer of `readwhilewriting`; 0 for as many as possible.
    pub(crate) write_rate: u64,
    /// Depth of `queue`; n/10 when `None`.
    pub(crate) depth: Option<u64>,
    /// Whether the database's files are put out of the page cache before the measurement and each second during it.
    pub(crate) cold: bool,
    /// Seed of every choice.
    pub(crate) seed: u64,
    /// Round, from 1.
    pub(crate) round: u32,
    /// Whether to print each second's rate while running.
    pub(crate) show_seconds: bool,
}

impl Task {
    /// Does the task in a child process of this very program, in at most `limit`, and gives what it printed.
    ///
    /// # Errors
    /// What the child says is wrong, how it died, or that its time was up.
    pub(crate) fn in_child(&self, limit: Duration) -> Result<Value> {
        let ended = self.start(limit)?;
        let said: Option<Value> = ended.text.lines().last().and_then(|line| serde_json::from_str(line).ok());
        let as_planned = match self.job {
            Job::WriteAndDie(_) => ended.status.signal() == Some(Signal::KILL.as_raw()),
            _ => ended.status.success(),
        };
        if as_planned {
            return said.ok_or_else(|| "a child printed nothing".into());
        }
        if let Some(told) = said.and_then(|said| serde_json::from_value::<Told>(said).ok()) {
            return Err(Box::new(told));
        }
        let error = match ended.status.signal() {
            Some(signal) => format!("its process died of signal {signal}"),
            None => format!("its process ended with {}", ended.status),
        };
        Err(Box::new(Told { kind: Kind::Failed, error }))
    }

    fn start(&self, limit: Duration) -> Result<child::Ended> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("child").arg(serde_json::to_string(self)?);
        child::run(command, limit)
    }

    /// Does the task here and gives its result; what a child process calls.
    pub(crate) fn here(&self) -> Result<Value> {
        match &self.job {
            Job::Load(shape) => measure::load(self, shape),
            Job::Measure(plan) => Ok(serde_json::to_value(measure::measure(self, plan)?)?),
            Job::WriteAndDie(plan) => recovery::write_and_die(self, plan),
            Job::Recover(plan, written) => Ok(serde_json::to_value(recovery::recover(self, plan, *written)?)?),
            Job::Open(plan) => Ok(serde_json::to_value(recovery::open(self, plan)?)?),
            Job::BuildTables(count) => opening::build_tables(self, *count),
            Job::OpenTables => opening::open_tables(self),
            Job::CreatePartitions(count) => opening::create_partitions(self, *count),
            Job::OpenPartitions(count) => opening::open_partitions(self, *count),
        }
    }
}

//! Child processes with a time limit, and the tasks that a parent passes to them as JSON.
//!
//! A child leads a process group, which is killed as a whole when its time is up. The kernel kills it when its parent
//! ends, because a terminal interrupt does not reach another process group.

use crate::engine::{Engine, Options, registry};
use crate::error::{ErrorKind, KnownError, Result, error_of};
use crate::workload::{Shape, Workload};
use anyhow::Context;
use clap::Args;
use rustix::process::{Pid, Signal, kill_process_group, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io::{Read, Seek};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;
use wait_timeout::ChildExt;

/// Runs `command` for at most `limit`; its standard error is passed through. Returns its status and its output.
pub(crate) fn run(mut command: Command, limit: Duration) -> Result<(ExitStatus, String)> {
    let (mut output, mut text) = (tempfile::tempfile()?, String::new());
    let mut child = command.stdin(Stdio::null()).stdout(output.try_clone()?).process_group(0).spawn()?;
    let status = child.wait_timeout(limit)?;
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL); // it may have ended, with all its children
    }
    child.wait()?;
    let timed_out = || error_of(ErrorKind::TimedOut, format!("timed out after {:.0} s", limit.as_secs_f64()));
    let status = status.ok_or_else(timed_out)?;
    output.rewind()?;
    output.read_to_string(&mut text)?;
    Ok((status, text))
}

/// Runs this program with these arguments and returns the JSON in the last line of its output. `expects_kill`: the
/// child kills itself.
pub(crate) fn ask(arguments: &[&str], expects_kill: bool, limit: Duration) -> Result<Value> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(arguments);
    let (status, text) = run(command, limit)?;
    let answer: Option<Value> = text.lines().last().and_then(|line| serde_json::from_str(line).ok());
    if status.success() || (expects_kill && status.signal() == Some(Signal::KILL.as_raw())) {
        return answer.context("a child process printed no answer");
    }
    let ended = || KnownError { kind: ErrorKind::Failed, error: format!("its process ended with {status}") };
    Err(answer.and_then(|answer| serde_json::from_value(answer).ok()).unwrap_or_else(ended).into())
}

/// Carries out a task of [`ask`] in the child: prints its answer, or its error for the parent.
pub(crate) fn answer(act: impl FnOnce() -> Result<Value>) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let answer = act().inspect_err(|error| println!("{}", json!(KnownError::of(error))))?;
    println!("{answer}");
    Ok(())
}

/// The settings that every measurement of a run shares.
#[derive(Args, Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// End each measurement after this many seconds.
    #[arg(long)]
    pub(crate) seconds: Option<f64>,
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
}

/// One job on one database, for one measurement of one workload.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) job: Job,
    pub(crate) engine: String,
    pub(crate) dir: PathBuf,
    pub(crate) options: Options,
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

impl Task {
    /// Opens or creates the database.
    pub(crate) fn open(&self) -> Result<Box<dyn Engine>> {
        registry::open(&self.engine, &self.dir, &self.options)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Job {
    /// Fill a new database, settle, close; not measured.
    Load,
    /// Run the workload and measure it.
    Measure,
    /// Run the workload and kill this process after its last write.
    WriteAndDie,
    /// Open a database with this many written records, look for each, and measure the opening.
    Recover(u64),
    /// Open, get one record and close, measured.
    Open,
}

#[cfg(test)]
mod tests {
    use super::run;
    use crate::error::{ErrorKind, KnownError};
    use std::process::Command;
    use std::time::Duration;

    fn shell(script: &str, limit: Duration) -> crate::error::Result<(std::process::ExitStatus, String)> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        run(command, limit)
    }

    #[test]
    fn output_and_status_are_returned() {
        let (status, text) = shell("echo one; echo two; exit 3", Duration::from_secs(60)).unwrap();
        assert_eq!((text.as_str(), status.code()), ("one\ntwo\n", Some(3)));
    }

    #[test]
    fn child_that_hangs_is_killed_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let late = dir.path().join("late");
        for script in [format!("(sleep 2; touch {}) & sleep 1000", late.display()), "exec >&-; sleep 1000".into()] {
            let error = shell(&script, Duration::from_millis(300)).unwrap_err();
            assert_eq!(KnownError::of(&error).kind, ErrorKind::TimedOut);
            assert!(error.to_string().starts_with("timed out after"), "{error}");
        }
        std::thread::sleep(Duration::from_secs(3));
        assert!(!late.exists(), "a grandchild was not killed");
    }
}

//! Child processes with a time limit.
//!
//! A child leads a process group, which is killed as a whole when its time is up. The kernel kills it when its parent
//! ends, because a terminal interrupt does not reach another process group.

use crate::error::{ErrorKind, KnownError, Result, error_of};
use crate::measure::meter::median;
use rustix::process::{Pid, Signal, kill_process_group, set_parent_process_death_signal};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;
use wait_timeout::ChildExt;

/// Bounds of a child's time limit: the least, and the one that is used while no other engine's time is known.
const LIMITS: (Duration, Duration) = (Duration::from_secs(120), Duration::from_secs(600));
/// A child may take this many times the median of other engines.
const TIMES_MEDIAN: f64 = 20.0;
/// Longest output that is read.
const LONGEST_ANSWER: u64 = 64 << 20;

/// Runs `command` for at most `limit`; its standard error is passed through. Returns its status and its output.
pub(crate) fn run(mut command: Command, limit: Duration) -> Result<(ExitStatus, String)> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0).spawn()?;
    let pipe = child.stdout.take().ok_or("a child has no standard output")?;
    let reader = thread::spawn(move || {
        let mut text = String::new();
        pipe.take(LONGEST_ANSWER).read_to_string(&mut text).map(|_| text)
    });
    let status = child.wait_timeout(limit)?;
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL); // it may have ended, with all its children
    }
    let timed_out = || error_of(ErrorKind::TimedOut, format!("timed out after {:.0} s", limit.as_secs_f64()));
    let status = status.ok_or_else(timed_out);
    child.wait()?;
    let text = reader.join().map_err(|_| "a thread panicked")??;
    Ok((status?, text))
}

/// Runs this program with these arguments and returns the JSON in the last line of its output. `expects_kill`: the
/// child kills itself.
pub(crate) fn ask(arguments: &[&str], expects_kill: bool, limit: Duration) -> Result<Value> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(arguments);
    let (status, text) = run(command, limit)?;
    let answer: Option<Value> = text.lines().last().and_then(|line| serde_json::from_str(line).ok());
    if status.success() || (expects_kill && status.signal() == Some(Signal::KILL.as_raw())) {
        return answer.ok_or_else(|| "a child process printed no answer".into());
    }
    match answer.and_then(|answer| serde_json::from_value::<KnownError>(answer).ok()) {
        Some(known) => Err(Box::new(known)),
        None => Err(error_of(ErrorKind::Failed, format!("its process ended with {status}"))),
    }
}

/// Carries out a task of [`ask`] in the child: prints its answer, or its error for the parent.
pub(crate) fn answer(act: impl FnOnce() -> Result<Value>) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let answer = act().inspect_err(|error| println!("{}", json!(KnownError::of(error))))?;
    println!("{answer}");
    Ok(())
}

/// Time limits of children, by the time that other engines took for the same work.
#[derive(Clone, Debug, Default)]
pub(crate) struct Limits(BTreeMap<String, Vec<f64>>);

impl Limits {
    /// The limit for some work: `asked`, or 20 times the median so far, but at least two minutes.
    pub(crate) fn of(&self, work: &str, asked: Option<Duration>) -> Duration {
        let median = self.0.get(work).cloned().and_then(median);
        let by_others = median.map(|median| Duration::from_secs_f64(median * TIMES_MEDIAN).max(LIMITS.0));
        asked.or(by_others).unwrap_or(LIMITS.1)
    }

    /// Notes that an engine took `seconds` for some work.
    pub(crate) fn note(&mut self, work: &str, seconds: f64) {
        self.0.entry(work.to_owned()).or_default().push(seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::{LIMITS, Limits, run};
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

    #[test]
    fn limits_follow_the_times_of_others() {
        let mut limits = Limits::default();
        assert_eq!(limits.of("a", None), LIMITS.1);
        limits.note("a", 1.0);
        assert_eq!(limits.of("a", None), LIMITS.0);
        limits.note("a", 100.0);
        limits.note("a", 30.0);
        assert_eq!(limits.of("a", None), Duration::from_secs(600));
        assert_eq!(limits.of("a", Some(Duration::from_secs(5))), Duration::from_secs(5));
    }
}

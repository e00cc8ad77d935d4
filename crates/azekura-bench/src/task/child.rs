//! Child processes with a time limit: a peer that hangs must not block a run.
//!
//! A child leads a process group of its own, which is killed as a whole when its time is up; and it asks the kernel to
//! be killed when its parent dies, because a Ctrl-C at the terminal no longer reaches it.

use crate::failure::{Kind, Result, Told};
use rustix::process::{Pid, Signal, kill_process_group, set_parent_process_death_signal};
use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// The least time a child is given.
const LEAST: Duration = Duration::from_secs(120);
/// What a child is given while no engine's time at the same work is known.
const UNKNOWN: Duration = Duration::from_secs(600);
/// So many times the median of what others took.
const TIMES_MEDIAN: f64 = 20.0;
/// More than any answer has; what a child says beyond it is not read.
const LONGEST_ANSWER: u64 = 64 << 20;
/// So long a child that has closed its output may take to end, even if its time is up.
const ENDING: Duration = Duration::from_secs(2);
/// So long a killed child may take to be gone.
const DYING: Duration = Duration::from_secs(10);

/// What a child that ended by itself left behind.
#[derive(Debug)]
pub(crate) struct Ended {
    /// How it ended.
    pub(crate) status: ExitStatus,
    /// What it printed.
    pub(crate) text: String,
}

/// Runs `command` for at most `limit`; what it prints on standard error is shown as it comes.
///
/// # Errors
/// It cannot be started, or was killed because its time was up ([`Kind::TimedOut`]).
pub(crate) fn run(mut command: Command, limit: Duration) -> Result<Ended> {
    let deadline = Instant::now() + limit;
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).process_group(0).spawn()?;
    let pipe = child.stdout.take().ok_or("a child has no standard output")?;
    let (tell, hear) = mpsc::channel();
    // The thread ends with the pipe: when every process that holds it is gone.
    thread::spawn(move || {
        let mut text = String::new();
        let read = pipe.take(LONGEST_ANSWER).read_to_string(&mut text);
        let _ = tell.send(read.map(|_| text)); // nobody listens when the time was up
    });
    let answer = hear.recv_timeout(limit);
    let status = if answer.is_ok() { wait(&mut child, deadline.max(Instant::now() + ENDING))? } else { None };
    match (answer, status) {
        (Ok(text), Some(status)) => Ok(Ended { status, text: text? }),
        _ => {
            kill_group(&child);
            wait(&mut child, Instant::now() + DYING)?;
            let error = format!("timed out after {:.0} s", limit.as_secs_f64());
            Err(Box::new(Told { kind: Kind::TimedOut, error }))
        }
    }
}

fn kill_group(child: &Child) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process_group(group, Signal::KILL); // it may just have ended
    }
}

/// Waits until the child is gone; `None` if it is not by `deadline`.
fn wait(child: &mut Child, deadline: Instant) -> Result<Option<ExitStatus>> {
    let mut pause = Duration::from_micros(100);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Called by a child first of all: it dies with its parent.
pub(crate) fn die_with_parent() -> Result<()> {
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// How long children may take: what was asked for, or by what others took for the same work.
#[derive(Clone, Debug, Default)]
pub(crate) struct Limits {
    seen: BTreeMap<String, Vec<f64>>,
}

impl Limits {
    /// The limit for some work: `asked`, or 20 times the median so far, but no less than two minutes.
    pub(crate) fn of(&self, work: &str, asked: Option<Duration>) -> Duration {
        let by_others = || {
            let Some(seen) = self.seen.get(work) else { return UNKNOWN };
            let median = crate::report::summary::median(seen.clone());
            Duration::try_from_secs_f64(median * TIMES_MEDIAN).unwrap_or(UNKNOWN).max(LEAST)
        };
        asked.unwrap_or_else(by_others)
    }

    /// Somebody took `seconds` for some work.
    pub(crate) fn saw(&mut self, work: &str, seconds: f64) {
        self.seen.entry(work.to_owned()).or_default().push(seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::{LEAST, Limits, UNKNOWN, run};
    use crate::failure::{Kind, Told};
    use std::process::Command;
    use std::time::{Duration, Instant};

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn answers_come_back_with_how_the_child_ended() {
        let ended = run(shell("echo one; echo two; exit 3"), Duration::from_secs(60)).unwrap();
        assert_eq!((ended.text.as_str(), ended.status.code()), ("one\ntwo\n", Some(3)));
    }

    #[test]
    fn a_child_that_hangs_is_killed_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let late = dir.path().join("late");
        let script = format!("(sleep 3; touch {}) & sleep 1000", late.display());
        let start = Instant::now();
        let failure = run(shell(&script), Duration::from_millis(300)).unwrap_err();
        assert_eq!(Told::of(&failure).kind, Kind::TimedOut);
        assert!(failure.to_string().starts_with("timed out after"), "{failure}");
        assert!(start.elapsed() < Duration::from_secs(100), "{:?}", start.elapsed());
        std::thread::sleep(Duration::from_secs(4));
        assert!(!late.exists(), "a grandchild lived on");
    }

    #[test]
    fn a_child_that_closes_its_output_and_hangs_is_killed() {
        // What it said before is worth nothing: it did not end.
        let failure = run(shell("exec >&-; sleep 1000"), Duration::from_millis(300)).unwrap_err();
        assert_eq!(Told::of(&failure).kind, Kind::TimedOut);
    }

    #[test]
    fn limits_follow_what_others_took() {
        let mut limits = Limits::default();
        assert_eq!(limits.of("a", None), UNKNOWN);
        limits.saw("a", 1.0);
        assert_eq!(limits.of("a", None), LEAST);
        limits.saw("a", 100.0);
        limits.saw("a", 30.0);
        assert_eq!(limits.of("a", None), Duration::from_secs(600));
        assert_eq!(limits.of("a", Some(Duration::from_secs(5))), Duration::from_secs(5));
        assert_eq!(limits.of("b", None), UNKNOWN);
    }
}

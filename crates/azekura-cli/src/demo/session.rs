//! One run of a writer process, seen from its parent.

use std::io::BufReader;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use super::ledger::{Ledger, Line};
use super::message::{Counters, Message};
use super::plan::{LeftOut, Plan};
use super::scratch::go_on;
use crate::display;
use crate::failure::{Failure, Result};
use crate::progress::Progress;

/// What a writer is told to do.
#[derive(Debug)]
pub(crate) struct Session<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) db: &'a std::path::Path,
    pub(crate) memtable_bytes: u64,
    pub(crate) fill: bool,
    pub(crate) time: Duration,
    /// Kill the writer after the first flush, once the ledger holds this many bytes.
    pub(crate) kill_after: Option<u64>,
}

/// How it went.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) process: u32,
    pub(crate) counters: Counters,
    pub(crate) out_of_time: bool,
    /// Died of the signal we sent.
    pub(crate) killed: bool,
}

impl Session<'_> {
    /// Runs a writer to its end or to its death; everything it acknowledged is in the ledger then.
    pub(crate) fn run(&self, ledger: &mut Ledger, left_out: &mut LeftOut, progress: &Progress) -> Result<Outcome> {
        let mut child = Reaped(self.spawn(ledger.lines())?);
        let mut outcome = Outcome { process: child.0.id(), ..Outcome::default() };
        let pipe = child.0.stdout.take().expect("its standard output is a pipe, and nobody took it before");
        let mut pipe = BufReader::new(pipe);
        let failed = |e| Failure::os("hear the writer", "pipe", e);
        let mut finished = false;
        // Also after the kill: what the pipe still holds was acknowledged before.
        while let Some(message) = Message::receive(&mut pipe).map_err(failed)? {
            go_on()?;
            match message {
                Message::Stored { len, hash } => {
                    ledger.add(Line::Stored { len, hash })?;
                    progress.add(len);
                }
                Message::LeftOut(why) => {
                    if ledger.lines() < self.plan.files {
                        left_out.add(why);
                    }
                    ledger.add(Line::LeftOut)?;
                }
                Message::Counters(counters) => {
                    outcome.counters = counters;
                    progress.message(format!("{} in the tree", display::plural(counters.levels, "level")));
                }
                Message::Finished { out_of_time } => (finished, outcome.out_of_time) = (true, out_of_time),
                Message::Failed { code, kind, message } => return Err(Failure::Child { code, kind, message }),
            }
            let half = self.kill_after.is_some_and(|bytes| ledger.bytes >= bytes && outcome.counters.flushes > 0);
            if half || (finished && self.kill_after.is_some()) {
                child.0.kill().map_err(|e| Failure::os("kill the writer", "process", e))?;
            }
        }
        go_on()?;
        let status = child.0.wait().map_err(|e| Failure::os("wait for the writer", "process", e))?;
        outcome.killed = was_killed(status);
        if !(outcome.killed || finished && status.success()) {
            let message = format!("the writer ended without a word: {status}");
            return Err(Failure::Child { code: 3, kind: "io".into(), message });
        }
        Ok(outcome)
    }

    fn spawn(&self, start: u64) -> Result<Child> {
        let program = std::env::current_exe().map_err(|e| Failure::os("find this program", "azekura", e))?;
        let mut command = Command::new(&program);
        command.arg("demo-writer");
        command.arg("--db").arg(self.db).arg("--plan").arg(&self.plan.list).arg("--root").arg(&self.plan.root);
        command.arg("--marker").arg(&self.plan.marker).arg("--files").arg(self.plan.files.to_string());
        command.arg("--start").arg(start.to_string()).arg("--milliseconds").arg(self.time.as_millis().to_string());
        command.arg("--memtable-bytes").arg(self.memtable_bytes.to_string());
        if self.fill {
            command.arg("--fill");
        }
        if self.kill_after.is_some() {
            command.arg("--until-killed");
        }
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        spawned.map_err(|e| Failure::os("start the writer", program, e))
    }
}

/// A child that does not outlive its parent's interest, whatever way that ends.
struct Reaped(Child);

impl Drop for Reaped {
    fn drop(&mut self) {
        // Fails if it has ended already, which is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(unix)]
fn was_killed(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    const SIGKILL: i32 = 9;
    status.signal() == Some(SIGKILL)
}

#[cfg(not(unix))]
fn was_killed(status: ExitStatus) -> bool {
    !status.success()
}

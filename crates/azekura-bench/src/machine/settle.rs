//! Waits until an engine has nothing left to do in the background, the same way for every engine.

use crate::engine::Engine;
use crate::failure::Result;
use crate::machine::process::Usage;
use std::thread::sleep;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(25);
/// So long nothing may happen before the engine counts as settled, behind work that took a few seconds or more.
const QUIET: Duration = Duration::from_millis(400);
/// The same behind work that took next to no time.
const SHORT_QUIET: Duration = Duration::from_millis(50);
/// So long an engine may take.
const PATIENCE: Duration = Duration::from_secs(600);
/// CPU seconds per second below which nothing happens.
const IDLE_CPU: f64 = 0.15;

/// How an engine came to rest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settled {
    /// Seconds until the quiet began.
    pub(crate) seconds: f64,
    /// Whether it came to rest at all.
    pub(crate) reached: bool,
}

/// Flushes all partitions of a database, then waits until the engine says it is idle, writes nothing and uses no CPU
/// for a quarter of the time it was at work, but no more than [`QUIET`].
pub(crate) fn settle(partitions: &[&dyn Engine], worked: Duration) -> Result<Settled> {
    let start = Instant::now();
    for partition in partitions {
        partition.flush()?;
    }
    let quiet = (worked / 4).clamp(SHORT_QUIET, QUIET);
    let mut quiet_since = Instant::now();
    let mut last = (Instant::now(), Usage::now());
    while quiet_since.elapsed() < quiet {
        if start.elapsed() > PATIENCE {
            return Ok(Settled { seconds: start.elapsed().as_secs_f64(), reached: false });
        }
        sleep(POLL);
        let now = (Instant::now(), Usage::now());
        let used = now.1 - last.1;
        let cpu_share = used.cpu_s / (now.0 - last.0).as_secs_f64();
        let mut busy = false;
        for partition in partitions {
            busy |= partition.busy()?;
        }
        if busy || used.syscall_write_bytes > 0 || cpu_share > IDLE_CPU {
            quiet_since = now.0;
        }
        last = now;
    }
    Ok(Settled { seconds: (quiet_since - start).as_secs_f64(), reached: true })
}

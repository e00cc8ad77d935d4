//! Ctrl-C as a flag, so that a command can stop between two entries and clean up.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{CliError, Result};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Makes SIGINT and SIGTERM set a flag that [`check`] reads, so that destructors run.
pub(crate) fn catch() -> Result<()> {
    set_handler(|| INTERRUPTED.store(true, Ordering::Relaxed))
}

/// As [`catch`], but a signal that finds the flag set ends the process: not every command reads the flag.
pub(crate) fn catch_first() -> Result<()> {
    set_handler(|| {
        if INTERRUPTED.swap(true, Ordering::Relaxed) {
            std::process::exit(i32::from(CliError::interrupted().code()));
        }
    })
}

fn set_handler(handler: impl FnMut() + Send + 'static) -> Result<()> {
    ctrlc::set_handler(handler).map_err(|e| CliError::os("catch Ctrl-C", "signals", io::Error::other(e)))
}

/// Called in every loop over entries. Never fails if no function above was called.
///
/// # Errors
/// `Interrupted` after Ctrl-C.
pub(crate) fn check() -> Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) { Err(CliError::interrupted()) } else { Ok(()) }
}

/// Forgets an earlier Ctrl-C, before the next command.
pub(crate) fn clear() {
    INTERRUPTED.store(false, Ordering::Relaxed);
}

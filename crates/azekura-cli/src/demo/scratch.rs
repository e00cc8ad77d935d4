//! A temporary directory that removes itself, on Ctrl-C too.

use std::fs::{self, DirBuilder};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::failure::{Failure, Result, complain};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on Ctrl-C (and a polite kill) only sets a mark, which [`go_on`] sees; the way out then leads through
/// `Drop`.
pub(crate) fn catch_interrupts() -> Result<()> {
    ctrlc::set_handler(|| INTERRUPTED.store(true, Ordering::Relaxed))
        .map_err(|e| Failure::os("watch for Ctrl-C", "signals", io::Error::other(e)))
}

/// Called between steps of anything long.
///
/// # Errors
/// `Interrupted` after Ctrl-C.
pub(crate) fn go_on() -> Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) { Err(Failure::Interrupted) } else { Ok(()) }
}

/// The directory.
#[derive(Debug)]
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// A new directory that only this user can read.
    pub(crate) fn create() -> Result<Scratch> {
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.subsec_nanos());
        let path = std::env::temp_dir().join(format!("azekura-demo-{}-{nanos}", std::process::id()));
        let mut builder = DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&path).map_err(|e| Failure::os("create a temporary directory", &path, e))?;
        Ok(Scratch(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            complain(format_args!("azekura: cannot remove {}: {error}.", self.0.display()));
        }
    }
}

//! A temporary directory that is removed at the end of the demo, also after Ctrl-C.

use std::fs::{self, DirBuilder};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{CliError, Result, print_error};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Makes SIGINT and SIGTERM set a flag that [`check_interrupted`] reads, so that destructors run.
pub(super) fn catch_interrupts() -> Result<()> {
    ctrlc::set_handler(|| INTERRUPTED.store(true, Ordering::Relaxed))
        .map_err(|e| CliError::os("catch Ctrl-C", "signals", io::Error::other(e)))
}

/// Called in every loop of the demo.
///
/// # Errors
/// `Interrupted` after Ctrl-C.
pub(super) fn check_interrupted() -> Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) { Err(CliError::interrupted()) } else { Ok(()) }
}

#[cfg(unix)]
fn owner_only() -> DirBuilder {
    let mut builder = DirBuilder::new();
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder
}

/// On Windows the temporary directory belongs to the user.
#[cfg(not(unix))]
fn owner_only() -> DirBuilder {
    DirBuilder::new()
}

/// The directory.
#[derive(Debug)]
pub(super) struct TemporaryDirectory(PathBuf);

impl TemporaryDirectory {
    /// Creates a new directory that only this user can read.
    pub(super) fn create() -> Result<TemporaryDirectory> {
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.subsec_nanos());
        let path = std::env::temp_dir().join(format!("azekura-demo-{}-{nanos}", std::process::id()));
        owner_only().create(&path).map_err(|e| CliError::os("create a temporary directory", &path, e))?;
        Ok(TemporaryDirectory(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            print_error(format_args!("azekura: cannot remove {}: {error}.", self.0.display()));
        }
    }
}

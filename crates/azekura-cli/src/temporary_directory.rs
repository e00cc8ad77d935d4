//! A temporary directory that is removed at the end of the command, also after Ctrl-C.

use std::fs::{self, DirBuilder};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::{CliError, Result, print_error};

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
pub(crate) struct TemporaryDirectory(PathBuf);

impl TemporaryDirectory {
    /// Creates a new directory that only this user can read.
    pub(crate) fn create() -> Result<TemporaryDirectory> {
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.subsec_nanos());
        let path = std::env::temp_dir().join(format!("azekura-{}-{nanos}", std::process::id()));
        owner_only().create(&path).map_err(|e| CliError::os("create a temporary directory", &path, e))?;
        Ok(TemporaryDirectory(path))
    }

    pub(crate) fn path(&self) -> &Path {
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

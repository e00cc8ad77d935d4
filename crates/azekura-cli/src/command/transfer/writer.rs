//! The file or standard output that an export writes to.

use std::io::{self, BufWriter, Write};
use std::path::Path;

use tempfile::NamedTempFile;

use crate::error::{CliError, Result};
use crate::interrupt;
use crate::output::{self, CommandOutput};

/// Size of the buffer of a file, in bytes.
const BUFFER_BYTES: usize = 256 << 10;

/// Start and end of the names of exports that are not complete. `import` skips them.
pub(super) const UNFINISHED_PREFIX: &str = ".azekura-export-";
pub(super) const UNFINISHED_SUFFIX: &str = ".tmp";

/// Destination of an export.
pub(super) enum ExportWriter<'a> {
    /// A file in the directory of `path`. It gets this name when it is complete and synced, because a file that was cut
    /// off may look complete. It is removed if the export fails.
    File {
        out: BufWriter<NamedTempFile>,
        path: &'a Path,
    },
    Stdout(&'a mut CommandOutput),
}

impl<'a> ExportWriter<'a> {
    /// Standard output for "-", else a new file.
    pub(super) fn open(target: &'a Path, output: &'a mut CommandOutput) -> Result<ExportWriter<'a>> {
        if target == Path::new("-") {
            return Ok(ExportWriter::Stdout(output));
        }
        let create_error = |error| CliError::os("create the file", target, error);
        if target.symlink_metadata().is_ok() {
            return Err(create_error(io::ErrorKind::AlreadyExists.into()));
        }
        let mut builder = tempfile::Builder::new();
        builder.prefix(UNFINISHED_PREFIX).suffix(UNFINISHED_SUFFIX);
        with_default_permissions(&mut builder);
        let file = builder.tempfile_in(directory_of(target)).map_err(create_error)?;
        Ok(ExportWriter::File { out: BufWriter::with_capacity(BUFFER_BYTES, file), path: target })
    }

    /// Whether a progress bar would be mixed with the output.
    pub(super) fn is_terminal(&self) -> bool {
        matches!(self, ExportWriter::Stdout(output) if output.is_terminal())
    }

    /// Writes a part of the export.
    ///
    /// # Errors
    /// `Interrupted` after Ctrl-C.
    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<()> {
        interrupt::check()?;
        match self {
            ExportWriter::File { out, path } => out.write_all(bytes).map_err(|e| write_error(path, e)),
            ExportWriter::Stdout(output) => output.writer().write_all(bytes).map_err(output::write_error),
        }
    }

    /// Ends an export. A file is synced and gets its name, unless the `result` of the export is an error.
    pub(super) fn finish<T>(self, result: Result<T>) -> Result<T> {
        let ExportWriter::File { out, path } = self else { return result };
        let value = result?;
        let file = out.into_inner().map_err(|e| write_error(path, e.into_error()))?;
        file.as_file().sync_all().map_err(|e| write_error(path, e))?;
        file.persist_noclobber(path).map_err(|e| CliError::os("create the file", path, e.error))?;
        sync_directory(directory_of(path)).map_err(|e| CliError::os("sync the directory of the file", path, e))?;
        Ok(value)
    }
}

/// The directory that contains a path.
pub(super) fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Gives the file the permissions of every new file of this user. The default of the builder is the owner only.
#[cfg(unix)]
fn with_default_permissions(builder: &mut tempfile::Builder<'_, '_>) {
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
}

/// Elsewhere a file inherits the permissions of its directory.
#[cfg(not(unix))]
fn with_default_permissions(_: &mut tempfile::Builder<'_, '_>) {}

/// Makes the names of new files in a directory durable.
#[cfg(unix)]
pub(super) fn sync_directory(path: &Path) -> io::Result<()> {
    std::fs::File::open(path)?.sync_all()
}

/// Elsewhere the file system makes names durable by itself.
#[cfg(not(unix))]
pub(super) fn sync_directory(_: &Path) -> io::Result<()> {
    Ok(())
}

fn write_error(path: &Path, error: io::Error) -> CliError {
    CliError::os("write the file", path, error)
}

//! The file or standard output that an export writes to.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::error::{CliError, Result};
use crate::output::{self, CommandOutput};

/// Size of the buffer of a file, in bytes.
const BUFFER_BYTES: usize = 256 << 10;

/// Destination of an export.
pub(super) enum ExportWriter<'a> {
    File { out: BufWriter<File>, path: &'a Path },
    Stdout(&'a mut CommandOutput),
}

impl<'a> ExportWriter<'a> {
    /// Standard output for "-", else a new file.
    pub(super) fn open(target: &'a Path, output: &'a mut CommandOutput) -> Result<ExportWriter<'a>> {
        if target == Path::new("-") {
            return Ok(ExportWriter::Stdout(output));
        }
        let file = OpenOptions::new().write(true).create_new(true).open(target);
        let file = file.map_err(|e| CliError::os("create the file", target, e))?;
        Ok(ExportWriter::File { out: BufWriter::with_capacity(BUFFER_BYTES, file), path: target })
    }

    /// Whether a progress bar would be mixed with the output.
    pub(super) fn is_terminal(&self) -> bool {
        matches!(self, ExportWriter::Stdout(output) if output.is_terminal())
    }

    pub(super) fn put(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            ExportWriter::File { out, path } => out.write_all(bytes).map_err(|e| write_error(path, e)),
            ExportWriter::Stdout(output) => output.writer().write_all(bytes).map_err(output::write_error),
        }
    }

    /// Flushes the output of an export that ended with `result`. Removes the file after an error, because a truncated
    /// file may look complete.
    pub(super) fn finish<T>(self, result: Result<T>) -> Result<T> {
        let ExportWriter::File { mut out, path } = self else { return result };
        let flushed = result.and_then(|value| out.flush().map(|()| value).map_err(|e| write_error(path, e)));
        flushed.inspect_err(|_| drop(fs::remove_file(path)))
    }
}

fn write_error(path: &Path, error: io::Error) -> CliError {
    CliError::os("write the file", path, error)
}

//! A temporary copy of a source, for libraries that change every database that they open.

use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use walkdir::WalkDir;

use crate::error::{CliError, Result};
use crate::interrupt;
use crate::temporary_directory::TemporaryDirectory;

/// Size in bytes of the blocks in which files are compared.
const COMPARED_BYTES: usize = 256 << 10;

/// The copy, removed when it is dropped.
#[derive(Debug)]
pub(super) struct SourceCopy {
    directory: TemporaryDirectory,
}

impl SourceCopy {
    /// Copies all files of the directory `source`, but not a file `LOCK`, because closing it would release the record
    /// lock of this process. File systems that can share extents copy no data.
    pub(super) fn of(source: &Path) -> Result<SourceCopy> {
        let copy = SourceCopy { directory: TemporaryDirectory::create()? };
        for entry in WalkDir::new(source) {
            interrupt::check()?;
            let entry = entry.map_err(|e| CliError::os("read the directory", source, e.into()))?;
            let relative = entry.path().strip_prefix(source).expect("the walk began there");
            let target = copy.path().join(relative);
            if entry.file_type().is_dir() {
                fs::create_dir_all(&target).map_err(|e| CliError::os("create a temporary directory", &target, e))?;
            } else if entry.file_type().is_file() && entry.file_name() != "LOCK" {
                fs::copy(entry.path(), &target).map_err(|e| CliError::os("copy the file", entry.path(), e))?;
            }
        }
        Ok(copy)
    }

    /// Fails if the library overwrote or cut off bytes of these files of its log when it opened the copy.
    ///
    /// sled and Fjall report no damage: they end the log before the first record that is damaged or incomplete, and
    /// clear the rest.
    pub(super) fn check_log(&self, source: &Path, engine: &str, files: &[PathBuf]) -> Result<()> {
        let mut cleared = 0;
        for file in files {
            let read_error = |e| CliError::os("read the input", source.join(file), e);
            cleared += count_cleared(&source.join(file), &self.path().join(file)).map_err(read_error)?;
        }
        if cleared == 0 {
            return Ok(());
        }
        let message = format!(
            "{engine} ignores {cleared} bytes of its log: they are damaged, or were not written completely, or are \
             left of freed segments; if the program that uses this database finds all its entries, repeat the import \
             with --allow-torn-log"
        );
        Err(CliError::input(source, message))
    }

    pub(super) fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// The number of bytes that are not zero in `before` and that differ or are missing in `after`.
fn count_cleared(before: &Path, after: &Path) -> io::Result<u64> {
    let open = |path| File::open(path).map(|file| BufReader::with_capacity(COMPARED_BYTES, file));
    let (mut before, mut after) = (open(before)?, open(after)?);
    let (mut old, mut new) = (Vec::new(), Vec::new());
    let mut count = 0;
    loop {
        old.clear();
        new.clear();
        before.by_ref().take(COMPARED_BYTES as u64).read_to_end(&mut old)?;
        after.by_ref().take(COMPARED_BYTES as u64).read_to_end(&mut new)?;
        if old.is_empty() {
            return Ok(count);
        }
        new.resize(old.len(), 0);
        count += old.iter().zip(&new).filter(|(old, new)| **old != 0 && old != new).count() as u64;
    }
}

//! Open files of the machine's file system, through std.

use std::fmt;
use std::fs::File as StdFile;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::mapped_memory::{MappedBytes, MappedMemory};
use crate::base::{Error, Result};
use crate::vfs::fs::{File, Mapping, check_read_len};
use crate::vfs::platform::{extras, family, family::FileExt};

/// Length in bytes of one write that fills a file with zeros, on a file system without `fallocate`.
const FILL_STEP: usize = 64 * 1024;

/// The error of the operation `what` on the file `path`.
pub(super) fn io_error_at_path(what: &str, path: &Path, error: impl Into<io::Error>) -> Error {
    Error::io(what, &error.into()).in_file(path)
}

/// A regular file. Thread safe, because every call takes an explicit offset.
pub(super) struct DiskFile {
    pub(super) file: StdFile,
    pub(super) path: PathBuf,
}

impl DiskFile {
    /// Writes zeros from the end of the file up to `len`, for a file system that cannot reserve space. Holes before
    /// the end stay holes.
    fn fill(&self, len: u64) -> io::Result<()> {
        let zeros = vec![0; FILL_STEP];
        let mut end = self.file.metadata()?.len();
        while end < len {
            let step = (len - end).min(FILL_STEP as u64);
            self.file.write_all_at(&zeros[..step as usize], end)?;
            end += step;
        }
        Ok(())
    }
}

impl File for DiskFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        if offset > i64::MAX as u64 {
            return Ok(0);
        }
        let mut done = 0;
        while done < buf.len() {
            match self.file.read_at(&mut buf[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(io_error_at_path("read", &self.path, e).at_offset(offset + done as u64)),
            }
        }
        Ok(done)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        let got = self.read_at(buf, offset)?;
        check_read_len(got, buf.len(), offset).map_err(|e| e.in_file(&self.path))
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        let fits = offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= i64::MAX as u64);
        let written =
            if fits { self.file.write_all_at(bytes, offset) } else { Err(io::ErrorKind::FileTooLarge.into()) };
        written.map_err(|e| io_error_at_path("write", &self.path, e).at_offset(offset))
    }

    fn length(&self) -> Result<u64> {
        self.file.metadata().map(|m| m.len()).map_err(|e| io_error_at_path("read the length", &self.path, e))
    }

    fn set_length(&self, len: u64) -> Result<()> {
        self.file.set_len(len).map_err(|e| io_error_at_path("set the length", &self.path, e))
    }

    fn allocate(&self, len: u64) -> Result<()> {
        self.allocate_from(0, len)
    }

    fn allocate_from(&self, from: u64, len: u64) -> Result<()> {
        let Some(more) = len.checked_sub(from).filter(|more| *more > 0) else { return Ok(()) };
        let done = family::allocate(&self.file, from, more).and_then(|done| if done { Ok(()) } else { self.fill(len) });
        done.map_err(|e| io_error_at_path("allocate", &self.path, e))
    }

    fn sync_data(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| io_error_at_path("sync", &self.path, e))
    }

    fn sync_all(&self) -> Result<()> {
        self.file.sync_all().map_err(|e| io_error_at_path("sync", &self.path, e))
    }

    fn will_read(&self, offset: u64, len: u64) -> bool {
        extras::will_read(&self.file, offset, len)
    }

    fn is_in_memory(&self, offset: u64) -> bool {
        extras::is_in_memory(&self.file, offset)
    }

    fn map(&self, len: u64) -> Result<Option<Box<dyn Mapping>>> {
        extras::map(&self.file, len, &self.path)
    }

    fn map_memory(&self, len: u64) -> Result<Option<Box<dyn MappedMemory>>> {
        extras::map_memory(&self.file, len, &self.path)
    }

    fn map_for_reading(&self, len: u64) -> Result<Option<Arc<MappedBytes>>> {
        let length = self.length()?; // a read after the end of the file would raise a signal
        check_read_len(length.min(len) as usize, len as usize, 0).map_err(|e| e.in_file(&self.path))?;
        extras::map_for_reading(&self.file, len, &self.path)
    }
}

impl fmt::Debug for DiskFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DiskFile").field(&self.path).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_fill_matches_fallocate() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("f");
        let file = DiskFile { file: StdFile::create_new(&path).unwrap(), path };
        file.write_at(b"kept", 0).unwrap();
        file.fill(FILL_STEP as u64 + 7).unwrap();
        assert_eq!(file.length().unwrap(), FILL_STEP as u64 + 7);
        file.fill(10).unwrap();
        assert_eq!(file.length().unwrap(), FILL_STEP as u64 + 7, "fill never truncates");
        let mut buf = [1; 6];
        file.read_exact_at(&mut buf, 0).unwrap();
        assert_eq!(&buf, b"kept\0\0");
    }
}

//! The locks by which other programs keep a database to themselves.

use std::fs::{File, TryLockError};
use std::path::Path;

use crate::error::{CliError, Result};

/// Holds a lock on a file of the source while the source is read.
#[derive(Debug)]
pub(super) struct SourceLock {
    _file: File,
}

fn open(path: &Path) -> Result<Option<File>> {
    if !path.exists() {
        return Ok(None);
    }
    File::open(path).map(Some).map_err(|e| CliError::os("open the lock file", path, e))
}

/// Shares the lock that a program takes by `flock`, or fails if a program holds it. `None` if there is no such file.
#[cfg(any(feature = "import-sled", feature = "import-fjall"))]
pub(super) fn share_flock(path: &Path) -> Result<Option<SourceLock>> {
    let Some(file) = open(path)? else { return Ok(None) };
    match file.try_lock_shared() {
        Ok(()) => Ok(Some(SourceLock { _file: file })),
        Err(TryLockError::WouldBlock) => Err(CliError::source_in_use(path)),
        Err(TryLockError::Error(error)) => Err(CliError::os("lock the file", path, error)),
    }
}

/// Shares the lock that a program takes by `fcntl`, as LevelDB and RocksDB do.
#[cfg(all(unix, feature = "_peer-library"))]
pub(super) fn share_record_lock(path: &Path) -> Result<Option<SourceLock>> {
    use rustix::fs::{FlockOperation, fcntl_lock};
    use rustix::io::Errno;
    let Some(file) = open(path)? else { return Ok(None) };
    match fcntl_lock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(Some(SourceLock { _file: file })),
        Err(Errno::AGAIN | Errno::ACCESS) => Err(CliError::source_in_use(path)),
        Err(error) => Err(CliError::os("lock the file", path, error.into())),
    }
}

/// On Windows a program that has the database open denies reading its lock file.
#[cfg(all(not(unix), feature = "_peer-library"))]
pub(super) fn share_record_lock(path: &Path) -> Result<Option<SourceLock>> {
    Ok(open(path)?.map(|file| SourceLock { _file: file }))
}

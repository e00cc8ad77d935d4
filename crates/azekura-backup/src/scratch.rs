//! The directory for the checkpoint of a backup, which is removed after it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::error::{BackupError, Result};
use crate::layout::hex;

const MARK: &str = ".azekura-backup-";
const END: &str = ".tmp";
const LOCK: &str = "LOCK";

/// A new directory. It is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Scratch {
    dir: PathBuf,
    /// Locked while this process is alive, so that another one knows which directories are left over.
    _lock: File,
}

impl Scratch {
    /// Creates a directory beside the database, or in `parent`. Removes those that killed processes have left there.
    pub(crate) fn new(database: &Path, parent: Option<&Path>) -> Result<Scratch> {
        let stem = database.file_name().map_or_else(|| "db".into(), |name| name.to_string_lossy());
        let parent = match parent.or_else(|| database.parent()) {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        remove_left_over(parent, &format!("{stem}{MARK}"));
        let dir = parent.join(format!("{stem}{MARK}{}{END}", hex(&random::<4>()?)));
        let failed = |error| BackupError::io("create the scratch directory", &dir, error);
        fs::create_dir(&dir).map_err(failed)?;
        let locked = File::create_new(dir.join(LOCK)).and_then(|lock| {
            lock.lock()?;
            Ok(lock)
        });
        match locked {
            Ok(lock) => Ok(Scratch { dir, _lock: lock }),
            Err(error) => {
                drop(fs::remove_dir_all(&dir));
                Err(failed(error))
            }
        }
    }

    /// The path for a checkpoint.
    pub(crate) fn checkpoint(&self) -> PathBuf {
        self.dir.join("checkpoint")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.dir));
    }
}

/// Removes the directories of processes that have ended. One whose lock does not exist yet is left.
fn remove_left_over(parent: &Path, start: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_one = name.to_str().is_some_and(|name| name.starts_with(start) && name.ends_with(END));
        let Some(lock) = is_one.then(|| File::open(entry.path().join(LOCK)).ok()).flatten() else { continue };
        if lock.try_lock().is_ok() {
            drop(fs::remove_dir_all(entry.path()));
        }
    }
}

/// Random bytes of the operating system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    let failed = |error: getrandom::Error| BackupError::io("get random bytes", "", std::io::Error::other(error));
    getrandom::fill(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

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
        let start = format!("{stem}{MARK}");
        remove_left_over(parent, &start);
        loop {
            let scratch = Scratch::create(parent.join(format!("{start}{}{END}", hex(&random::<4>()?))))?;
            // Another call may have found the file before it was locked, and removed the directory.
            if scratch.dir.join(LOCK).exists() {
                return Ok(scratch);
            }
        }
    }

    fn create(dir: PathBuf) -> Result<Scratch> {
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
        remove(&self.dir);
    }
}

/// Removes the directory, its lock file last, so that a later call removes the rest if this process is killed.
fn remove(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten().filter(|entry| entry.file_name() != LOCK) {
        drop(fs::remove_dir_all(entry.path()));
    }
    drop(fs::remove_dir_all(dir));
}

/// Removes the directories of processes that have ended. One whose lock does not exist yet is left.
fn remove_left_over(parent: &Path, start: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_one = name.to_str().is_some_and(|name| name.starts_with(start) && name.ends_with(END));
        let Some(lock) = is_one.then(|| File::open(entry.path().join(LOCK)).ok()).flatten() else { continue };
        if lock.try_lock().is_ok() {
            remove(&entry.path());
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A backup that began removed the directory of another one between the creation of its file and its lock.
    #[test]
    fn directories_of_calls_at_the_same_time_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (start, ended) = (format!("db{MARK}"), AtomicBool::new(false));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !ended.load(Ordering::Relaxed) {
                        remove_left_over(dir.path(), &start);
                    }
                });
            }
            let is_kept = |scratch: Scratch| fs::create_dir(scratch.checkpoint()).is_ok();
            let kept = (0..2_000).all(|_| Scratch::new(Path::new("db"), Some(dir.path())).is_ok_and(is_kept));
            ended.store(true, Ordering::Relaxed);
            assert!(kept);
        });
    }
}

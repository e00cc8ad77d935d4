//! Opens files within the limits of the process and the machine on open files.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};

use crate::base::Result;
use crate::vfs::fs::{DirEntry, File, FileLock, Fs, LockMode, OpenMode, PersistenceLevel};
use crate::vfs::open_files::DataFiles;

/// How many handles to tables and blob files are cached where `wanted` are asked for and the process may open `left`
/// more files: at most half of those.
pub(crate) fn max_cached_handles(wanted: usize, left: Option<u64>) -> usize {
    left.map_or(wanted, |left| wanted.min(usize::try_from(left / 2).unwrap_or(usize::MAX)))
}

/// A file system that closes cached handles and tries again when no file can be opened because too many are open. All
/// files of a database are opened through one: tables, blob files, log segments, pools, the manifest, directories.
#[derive(Debug)]
pub(crate) struct HandleLimitFs {
    inner: Arc<dyn Fs>,
    data_files: OnceLock<Weak<DataFiles>>,
}

impl HandleLimitFs {
    /// Puts one in front of `fs`.
    pub(crate) fn wrap(fs: &mut Arc<dyn Fs>) -> Arc<HandleLimitFs> {
        let limited = Arc::new(HandleLimitFs { inner: Arc::clone(fs), data_files: OnceLock::new() });
        *fs = Arc::<HandleLimitFs>::clone(&limited);
        limited
    }

    /// Which files are closed, from now on. Only the first call has an effect.
    pub(crate) fn close_when_exhausted(&self, files: &Arc<DataFiles>) {
        let _only_the_first_counts = self.data_files.set(Arc::downgrade(files));
    }

    /// Runs `open` until it fails for another reason than too many open files, or no cached handle is left to close.
    fn retry_after_eviction<T>(&self, mut open: impl FnMut() -> Result<T>) -> Result<T> {
        loop {
            match open() {
                Err(error) if error.is_too_many_open_files() && self.evict_half() => {}
                other => return other,
            }
        }
    }

    fn evict_half(&self) -> bool {
        self.data_files.get().and_then(Weak::upgrade).is_some_and(|files| files.evict_half())
    }
}

impl Fs for HandleLimitFs {
    fn open(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        self.retry_after_eviction(|| self.inner.open(path, mode))
    }

    fn open_direct(&self, path: &Path, mode: OpenMode) -> Result<Arc<dyn File>> {
        self.retry_after_eviction(|| self.inner.open_direct(path, mode))
    }

    fn create_dir_all(&self, path: &Path) -> Result<()> {
        self.retry_after_eviction(|| self.inner.create_dir_all(path))
    }

    fn create_dir(&self, path: &Path) -> Result<()> {
        self.retry_after_eviction(|| self.inner.create_dir(path))
    }

    fn absolute(&self, path: &Path) -> Result<PathBuf> {
        self.inner.absolute(path)
    }

    fn read_dir(&self, path: &Path) -> Result<Vec<DirEntry>> {
        self.retry_after_eviction(|| self.inner.read_dir(path))
    }

    fn exists(&self, path: &Path) -> Result<bool> {
        self.retry_after_eviction(|| self.inner.exists(path))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.retry_after_eviction(|| self.inner.rename(from, to))
    }

    fn rename_noreplace(&self, from: &Path, to: &Path) -> Result<()> {
        self.retry_after_eviction(|| self.inner.rename_noreplace(from, to))
    }

    fn remove_file(&self, path: &Path) -> Result<()> {
        self.retry_after_eviction(|| self.inner.remove_file(path))
    }

    fn remove_dir_all(&self, path: &Path) -> Result<()> {
        self.retry_after_eviction(|| self.inner.remove_dir_all(path))
    }

    fn hard_link(&self, from: &Path, to: &Path) -> Result<()> {
        self.retry_after_eviction(|| self.inner.hard_link(from, to))
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        self.retry_after_eviction(|| self.inner.sync_dir(path))
    }

    fn lock(&self, path: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> {
        self.retry_after_eviction(|| self.inner.lock(path, mode))
    }

    fn lock_dir(&self, dir: &Path, mode: LockMode) -> Result<Box<dyn FileLock>> {
        self.retry_after_eviction(|| self.inner.lock_dir(dir, mode))
    }

    fn overwrites_in_place(&self, dir: &Path) -> bool {
        self.inner.overwrites_in_place(dir)
    }

    fn persistence_level(&self, dir: &Path) -> PersistenceLevel {
        self.inner.persistence_level(dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::version_edit::FileNumber;
    use crate::vfs::fault::FaultFs;
    use crate::vfs::mem::MemFs;
    use crate::vfs::open_files::DirectIoPolicy;

    #[test]
    fn cached_handles_close_when_limit_is_reached() {
        let faulty = FaultFs::new(Arc::new(MemFs::new()));
        let mut fs: Arc<dyn Fs> = Arc::new(faulty.clone());
        let limited = HandleLimitFs::wrap(&mut fs);
        fs.create_dir_all(Path::new("/db")).unwrap();
        let files = Arc::new(DataFiles::tables(Arc::clone(&fs), Path::new("/db"), 100, DirectIoPolicy::never()));
        (0..20).for_each(|id| drop(files.create(FileNumber(id)).unwrap()));
        limited.close_when_exhausted(&files);
        faulty.limit_open(Some(8));
        (0..20).for_each(|id| drop(files.get(FileNumber(id)).unwrap()));
        assert!((1..=8).contains(&files.open_file_count()), "{}", files.open_file_count());
        // Readers hold all there are: the error says so, and the next call succeeds.
        let held: Vec<_> = (0..8).map(|id| files.get(FileNumber(id)).unwrap()).collect();
        assert!(files.get(FileNumber(19)).unwrap_err().is_too_many_open_files());
        drop(held);
        files.get(FileNumber(19)).unwrap();
        fs.open(Path::new("/db/other"), OpenMode::Create).unwrap();
    }

    #[test]
    fn half_of_available_handles_are_cached() {
        assert_eq!((max_cached_handles(512, None), max_cached_handles(512, Some(4_000))), (512, 512));
        assert_eq!((max_cached_handles(512, Some(60)), max_cached_handles(8, Some(0))), (30, 0));
    }
}

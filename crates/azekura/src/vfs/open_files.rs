//! Cached open handles of tables and blob files, within the limits of the process and the machine on open files.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use crate::base::Result;
use crate::base::sync::lock;
use crate::base::version_edit::FileNumber;
use crate::vfs::fs::{DirEntry, File, FileLock, Fs, LockMode, OpenMode, PersistenceLevel};

/// Whether tables and blob files are read and written with direct I/O, which bypasses the page cache of the operating
/// system.
///
/// Direct I/O leaves the page cache and its memory to other files, and only the block cache decides which blocks stay
/// in memory. But a block that is not in the block cache then costs a device read instead of a copy from the page
/// cache. So direct I/O pays only if the files would not fit into the page cache anyway.
///
/// ```
/// use azekura::{Config, DirectIo};
/// assert_eq!(Config::new("db").settings().direct_io, DirectIo::Automatic);
/// let predictable = Config::new("db").direct_io(DirectIo::Always).cache_size(4 << 30); // memory use is bounded
/// # assert_eq!(predictable.settings().direct_io, DirectIo::Always);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum DirectIo {
    /// Never.
    Never,
    /// For files that are opened while the tables and blob files of the database exceed half of the memory that the
    /// process may use.
    #[default]
    Automatic,
    /// Wherever the file system supports it.
    Always,
}

/// Decides for each file whether to use direct I/O.
#[derive(Debug)]
pub(crate) struct DirectIoPolicy {
    mode: DirectIo,
    /// Total file length in bytes above which `Automatic` uses direct I/O.
    limit: u64,
}

impl DirectIoPolicy {
    /// `memory` returns the memory in bytes that the process may use, if known. It is called only if `mode` is
    /// `Automatic`.
    pub(crate) fn new(mode: DirectIo, memory: impl FnOnce() -> Option<u64>) -> DirectIoPolicy {
        let memory = if mode == DirectIo::Automatic { memory() } else { None };
        DirectIoPolicy { mode, limit: memory.map_or(u64::MAX, |memory| memory / 2) }
    }

    /// A policy without direct I/O, for callers that read single files.
    pub(crate) fn never() -> DirectIoPolicy {
        DirectIoPolicy::new(DirectIo::Never, || None)
    }

    fn applies(&self, held_bytes: u64) -> bool {
        match self.mode {
            DirectIo::Never => false,
            DirectIo::Automatic => held_bytes > self.limit,
            DirectIo::Always => true,
        }
    }
}

/// Kind of a numbered file, which the suffix of its name encodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DataFileKind {
    Table,
    Blob,
}

impl DataFileKind {
    fn suffix(self) -> &'static str {
        match self {
            DataFileKind::Table => "sst",
            DataFileKind::Blob => "blob",
        }
    }

    pub(crate) fn file_name(self, id: FileNumber) -> String {
        format!("{:06}.{}", id.0, self.suffix())
    }
}

/// Kind and number of the file called `name`. `None` if `name` is not the canonical name of a table or a blob file.
pub(crate) fn parse_data_file_name(name: &str) -> Option<(DataFileKind, FileNumber)> {
    let (number, suffix) = name.split_once('.')?;
    let kind = [DataFileKind::Table, DataFileKind::Blob].into_iter().find(|kind| kind.suffix() == suffix)?;
    let id = FileNumber(number.parse().ok()?);
    (kind.file_name(id) == name).then_some((kind, id))
}

/// Cache of open handles of one kind of file. Opens files on demand and closes the least recently used ones. Thread
/// safe.
///
/// A reader that holds a handle keeps its file open until it drops the handle, also beyond the bound on open handles.
#[derive(Clone)]
pub(crate) struct DataFiles {
    shared: Arc<DataFilePool>,
    kind: DataFileKind,
}

/// State that both kinds share: one bound on cached handles, and one policy for direct I/O.
struct DataFilePool {
    fs: Arc<dyn Fs>,
    dir: PathBuf,
    max_open: usize,
    direct: DirectIoPolicy,
    /// Total length in bytes of all live files.
    live_bytes: AtomicU64,
    open_files: Mutex<OpenFileTable>,
}

#[derive(Default)]
struct OpenFileTable {
    files: HashMap<(DataFileKind, FileNumber), OpenFileEntry>,
    /// Counts requests, to order the files by their last use.
    clock: u64,
}

struct OpenFileEntry {
    file: Arc<dyn File>,
    last_used: u64,
}

impl DataFiles {
    /// The cache for tables. Both kinds together keep at most `max_open` handles, or one if `max_open` is 0.
    pub(crate) fn tables(fs: Arc<dyn Fs>, dir: &Path, max_open: usize, direct: DirectIoPolicy) -> DataFiles {
        let (held_bytes, open) = (AtomicU64::new(0), Mutex::default());
        let pool = DataFilePool {
            fs,
            dir: dir.to_path_buf(),
            max_open: max_open.max(1),
            direct,
            live_bytes: held_bytes,
            open_files: open,
        };
        DataFiles { shared: Arc::new(pool), kind: DataFileKind::Table }
    }

    /// The cache for blob files in the same directory, under the same bound.
    pub(crate) fn blob_files(&self) -> DataFiles {
        DataFiles { shared: Arc::clone(&self.shared), kind: DataFileKind::Blob }
    }

    fn lock(&self) -> MutexGuard<'_, OpenFileTable> {
        lock(&self.shared.open_files)
    }

    /// Path of a file.
    pub(crate) fn path(&self, id: FileNumber) -> PathBuf {
        self.shared.dir.join(self.kind.file_name(id))
    }

    /// Returns a file that is open for reading.
    ///
    /// # Errors
    /// `Io` if it cannot be opened.
    pub(crate) fn get(&self, id: FileNumber) -> Result<Arc<dyn File>> {
        let key = (self.kind, id);
        if let Some(file) = self.lock().get(key) {
            return Ok(file);
        }
        // Opens the file without the lock, so that readers of other files do not wait. Two threads may open the same
        // file; the cache keeps one of the handles.
        let file = self.open(id, OpenMode::Read)?;
        let mut open = self.lock();
        let closed = open.evict_to_fit(self.shared.max_open);
        open.clock += 1;
        let used = open.clock;
        open.files.insert(key, OpenFileEntry { file: Arc::clone(&file), last_used: used });
        debug_assert!(open.files.len() <= self.shared.max_open, "the cache keeps its bound");
        drop(open);
        drop(closed);
        Ok(file)
    }

    /// Creates a file, which the caller writes sequentially.
    ///
    /// # Errors
    /// `Io` if it cannot be created.
    pub(crate) fn create(&self, id: FileNumber) -> Result<Arc<dyn File>> {
        self.open(id, OpenMode::Create)
    }

    /// Creates a file that other threads read while the caller writes it. Such a file never uses direct I/O.
    ///
    /// # Errors
    /// As for [`create`](DataFiles::create).
    pub(crate) fn create_shared(&self, id: FileNumber) -> Result<Arc<dyn File>> {
        self.shared.fs.open(&self.path(id), OpenMode::Create)
    }

    fn open(&self, id: FileNumber, mode: OpenMode) -> Result<Arc<dyn File>> {
        let (fs, path) = (&self.shared.fs, self.path(id));
        if self.uses_direct_io() { fs.open_direct(&path, mode) } else { fs.open(&path, mode) }
    }

    /// Whether a file that is opened now uses direct I/O.
    pub(crate) fn uses_direct_io(&self) -> bool {
        self.shared.direct.applies(self.shared.live_bytes.load(Ordering::Relaxed))
    }

    /// Adds a file of this length to the live files.
    pub(crate) fn add_live_bytes(&self, bytes: u64) {
        self.shared.live_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Removes a file of this length from the live files.
    pub(crate) fn remove_live_bytes(&self, bytes: u64) {
        let before = self.shared.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
        debug_assert!(before >= bytes, "a file was added before it is removed");
    }

    /// Closes half of the cached handles, the least recently used ones. Returns false if no handle is cached. A
    /// reader that holds one of them keeps its file open.
    pub(crate) fn evict_half(&self) -> bool {
        let mut open = self.lock();
        let keep_count = open.files.len() / 2;
        let closed = open.evict_to_fit(keep_count + 1);
        drop(open);
        !closed.is_empty()
    }

    /// Removes the handle of a file from the cache.
    pub(crate) fn close(&self, id: FileNumber) {
        let closed = self.lock().files.remove(&(self.kind, id));
        drop(closed);
    }

    /// Removes the handle of a file from the cache, and removes the file.
    ///
    /// # Errors
    /// `Io` if the file cannot be removed.
    pub(crate) fn remove(&self, id: FileNumber) -> Result<()> {
        self.close(id);
        self.shared.fs.remove_file(&self.path(id))
    }

    /// Number of cached handles.
    #[cfg(test)]
    pub(crate) fn open_file_count(&self) -> usize {
        self.lock().files.len()
    }
}

impl OpenFileTable {
    fn get(&mut self, key: (DataFileKind, FileNumber)) -> Option<Arc<dyn File>> {
        self.clock += 1;
        let open = self.files.get_mut(&key)?;
        open.last_used = self.clock;
        Some(Arc::clone(&open.file))
    }

    /// Removes the least recently used entries until one more fits. The caller drops them outside of the lock, which
    /// closes the files.
    fn evict_to_fit(&mut self, max_open: usize) -> Vec<OpenFileEntry> {
        debug_assert!(max_open > 0, "one more file must fit");
        let mut closed = Vec::new();
        while self.files.len() >= max_open {
            let oldest = self.files.iter().min_by_key(|(_, open)| open.last_used).map(|(key, _)| *key);
            closed.extend(oldest.and_then(|key| self.files.remove(&key)));
        }
        closed
    }
}

/// How many handles to tables and blob files to cache if `wanted` are configured and the process may open `left` more
/// files: at most half of `left`.
pub(crate) fn max_cached_handles(wanted: usize, left: Option<u64>) -> usize {
    left.map_or(wanted, |left| wanted.min(usize::try_from(left / 2).unwrap_or(usize::MAX)))
}

/// A file system that closes cached handles and retries if an operation fails because too many files are open. A
/// database opens all files through one `HandleLimitFs`: tables, blob files, WAL segments, pools, the manifest,
/// directories.
#[derive(Debug)]
pub(crate) struct HandleLimitFs {
    inner: Arc<dyn Fs>,
    data_files: OnceLock<Weak<DataFiles>>,
}

impl HandleLimitFs {
    /// Replaces `fs` by a file system that wraps it, and returns the wrapper.
    pub(crate) fn wrap(fs: &mut Arc<dyn Fs>) -> Arc<HandleLimitFs> {
        let limited = Arc::new(HandleLimitFs { inner: Arc::clone(fs), data_files: OnceLock::new() });
        *fs = Arc::<HandleLimitFs>::clone(&limited);
        limited
    }

    /// Sets the cache whose handles are closed. Only the first call has an effect.
    pub(crate) fn close_when_exhausted(&self, files: &Arc<DataFiles>) {
        let _only_the_first_counts = self.data_files.set(Arc::downgrade(files));
    }

    /// Calls `open` until it succeeds, fails for another reason than too many open files, or no cached handle is left
    /// to close.
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
    use crate::testing::MemFs;
    use crate::testing::fault_fs::FaultFs;
    use crate::vfs::open_files::DirectIoPolicy;

    #[test]
    fn file_names_round_trip_and_others_are_refused() {
        for (kind, name) in [(DataFileKind::Table, "000007.sst"), (DataFileKind::Blob, "1234567.blob")] {
            let (parsed, id) = parse_data_file_name(name).unwrap();
            assert_eq!((parsed, kind.file_name(id).as_str()), (kind, name));
        }
        for name in ["7.sst", "000007.wal", "000007", "000007.sst.blob", "+00007.blob", ".blob", "0000000.sst"] {
            assert_eq!(parse_data_file_name(name), None, "{name}");
        }
    }

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
        // The readers hold all 8 handles: the next open fails with the error of the system. It succeeds once they are
        // dropped.
        let handles: Vec<_> = (0..8).map(|id| files.get(FileNumber(id)).unwrap()).collect();
        assert!(files.get(FileNumber(19)).unwrap_err().is_too_many_open_files());
        drop(handles);
        files.get(FileNumber(19)).unwrap();
        fs.open(Path::new("/db/other"), OpenMode::Create).unwrap();
    }

    #[test]
    fn half_of_available_handles_are_cached() {
        assert_eq!((max_cached_handles(512, None), max_cached_handles(512, Some(4_000))), (512, 512));
        assert_eq!((max_cached_handles(512, Some(60)), max_cached_handles(8, Some(0))), (30, 0));
    }
}

//! Cached open handles of tables and blob files, within the limits of the process and the machine on open files.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use crate::base::Result;
use crate::base::mapped_memory::MappedBytes;
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

/// Length in bytes of the pages that the operating system reads; larger on some systems.
const PAGE_LEN: u64 = 4 << 10;

/// Decides how tables and blob files are read and written.
#[derive(Debug)]
pub(crate) struct FileAccess {
    direct_io: DirectIo,
    /// Total file length in bytes above which `Automatic` uses direct I/O.
    limit: u64,
    /// Whether finished files are mapped for reading.
    mapped_reads: bool,
}

impl FileAccess {
    /// `memory` returns the memory in bytes that the process may use, if known. It is called only if `direct_io` is
    /// `Automatic`. Mapped files use the page cache, so `Automatic` means `Never` with `mapped_reads`.
    pub(crate) fn new(direct_io: DirectIo, mapped_reads: bool, memory: impl FnOnce() -> Option<u64>) -> FileAccess {
        debug_assert!(!mapped_reads || direct_io != DirectIo::Always, "the options were checked");
        let automatic = direct_io == DirectIo::Automatic && !mapped_reads;
        let memory = if automatic { memory() } else { None };
        FileAccess { direct_io, limit: memory.map_or(u64::MAX, |memory| memory / 2), mapped_reads }
    }

    /// Without direct I/O and mappings, for callers that read single files.
    pub(crate) fn buffered() -> FileAccess {
        FileAccess::new(DirectIo::Never, false, || None)
    }

    fn uses_direct_io(&self, held_bytes: u64) -> bool {
        match self.direct_io {
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

/// Cache of open handles of one kind of file. Opens files on demand, and closes those that were not used lately. Thread
/// safe.
///
/// A reader that holds a handle keeps its file open until it drops the handle, also beyond the bound on open handles.
#[derive(Clone)]
pub(crate) struct DataFiles {
    shared: Arc<DataFilePool>,
    kind: DataFileKind,
}

/// State that both kinds share: one bound on cached handles, and one way of access.
struct DataFilePool {
    fs: Arc<dyn Fs>,
    dir: PathBuf,
    max_open: usize,
    access: FileAccess,
    /// Total length in bytes of all live files.
    live_bytes: AtomicU64,
    open_files: Mutex<OpenFileTable>,
}

/// A file and its cached handle. A reader of the file keeps it, so that a read needs no lookup and no lock that other
/// files share.
pub(crate) struct DataFile {
    files: DataFiles,
    slot: Arc<FileSlot>,
    /// The mapping of the file; `None` in it if the file cannot be mapped.
    mapped: OnceLock<Option<Arc<MappedBytes>>>,
}

/// The cached handle of one file. Locks are taken in this order: [`DataFilePool::open_files`], then a slot.
struct FileSlot {
    id: FileNumber,
    handle: Mutex<CachedHandle>,
    /// Whether a reader has used the cached handle since the clock hand passed the slot.
    was_used: AtomicBool,
}

/// Changed only under the lock of the pool, so that `open` counts the cached handles.
#[derive(Default)]
struct CachedHandle {
    file: Option<Arc<dyn File>>,
    /// Whether the clock contains the slot, with or without a handle.
    is_in_clock: bool,
    /// The file was removed from the directory. A reader that is left opens no handle that is cached.
    is_removed: bool,
}

#[derive(Default)]
struct OpenFileTable {
    /// The slot of each file that was opened and not removed.
    slots: HashMap<(DataFileKind, FileNumber), Arc<FileSlot>>,
    /// All slots with a handle, and some of which the handle was closed. The front is evicted next, unless it was used.
    clock: VecDeque<Arc<FileSlot>>,
    /// Number of cached handles.
    open: usize,
}

impl DataFiles {
    /// The cache for tables. Both kinds together keep at most `max_open` handles, or one if `max_open` is 0.
    pub(crate) fn tables(fs: Arc<dyn Fs>, dir: &Path, max_open: usize, access: FileAccess) -> DataFiles {
        let (held_bytes, open) = (AtomicU64::new(0), Mutex::default());
        let pool = DataFilePool {
            fs,
            dir: dir.to_path_buf(),
            max_open: max_open.max(1),
            access,
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

    /// Returns a file that is open for reading. A caller that reads often keeps the
    /// [`data_file`](DataFiles::data_file).
    ///
    /// # Errors
    /// `Io` if it cannot be opened.
    pub(crate) fn get(&self, id: FileNumber) -> Result<Arc<dyn File>> {
        self.get_in(&self.slot(id))
    }

    /// A file, whose handle is opened when it is needed.
    pub(crate) fn data_file(&self, id: FileNumber) -> DataFile {
        DataFile { files: self.clone(), slot: self.slot(id), mapped: OnceLock::new() }
    }

    fn slot(&self, id: FileNumber) -> Arc<FileSlot> {
        let mut open = self.lock();
        let new = || Arc::new(FileSlot { id, handle: Mutex::default(), was_used: AtomicBool::new(false) });
        Arc::clone(open.slots.entry((self.kind, id)).or_insert_with(new))
    }

    fn get_in(&self, slot: &Arc<FileSlot>) -> Result<Arc<dyn File>> {
        if let Some(file) = slot.cached() {
            return Ok(file);
        }
        // Opens the file without the lock, so that readers of other files do not wait. Two threads may open the same
        // file; the cache keeps one of the handles.
        let file = self.open(slot.id, OpenMode::Read)?;
        let mut open = self.lock();
        let closed = open.insert(slot, &file, self.shared.max_open);
        debug_assert!(open.open <= self.shared.max_open, "the cache keeps its bound");
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
        self.shared.access.uses_direct_io(self.shared.live_bytes.load(Ordering::Relaxed))
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

    /// Closes half of the cached handles, those that were not used lately. Returns false if no handle is cached. A
    /// reader that holds one of them keeps its file open.
    pub(crate) fn evict_half(&self) -> bool {
        let mut open = self.lock();
        let keep_count = open.open / 2;
        let closed = open.evict_to_fit(keep_count + 1);
        open.sweep();
        drop(open);
        !closed.is_empty()
    }

    /// Closes the cached handle of a file. The next reader opens the file again.
    pub(crate) fn close(&self, id: FileNumber) {
        let mut open = self.lock();
        let closed = open.slots.get(&(self.kind, id)).cloned().and_then(|slot| open.close(&slot));
        drop(open);
        drop(closed);
    }

    /// Closes the cached handle of a file, and removes the file.
    ///
    /// # Errors
    /// `Io` if the file cannot be removed.
    pub(crate) fn remove(&self, id: FileNumber) -> Result<()> {
        let mut open = self.lock();
        let slot = open.slots.remove(&(self.kind, id));
        let closed = slot.and_then(|slot| {
            slot.lock().is_removed = true;
            open.close(&slot)
        });
        drop(open);
        drop(closed);
        self.shared.fs.remove_file(&self.path(id))
    }

    /// Closes a file once its last [`DataFile`] is dropped. Others may have removed it from the directory.
    pub(crate) fn release(&self, id: FileNumber) {
        let mut open = self.lock();
        if let Some(slot) = open.slots.remove(&(self.kind, id)) {
            open.release(&slot);
        }
    }

    /// Number of cached handles.
    #[cfg(test)]
    pub(crate) fn open_file_count(&self) -> usize {
        let open = self.lock();
        open.check_invariants();
        open.open
    }
}

impl DataFile {
    /// The cache that opens the file.
    pub(crate) fn files(&self) -> &DataFiles {
        &self.files
    }

    /// Returns the file, open for reading.
    ///
    /// # Errors
    /// `Io` if it cannot be opened.
    pub(crate) fn get(&self) -> Result<Arc<dyn File>> {
        self.files.get_in(&self.slot)
    }

    /// The bytes of a finished file of `len` bytes, if files are mapped for reading. If the file cannot be mapped, for
    /// example because the process has too many mappings, it is read through its handle.
    #[inline]
    pub(crate) fn mapped(&self, len: u64) -> Option<&Arc<MappedBytes>> {
        if !self.files.shared.access.mapped_reads {
            return None;
        }
        match self.mapped.get() {
            Some(mapped) => mapped.as_ref(),
            None => self.map(len),
        }
    }

    /// The bytes of a file as [`mapped`](DataFile::mapped), for a caller that reads a range of them. A range of several
    /// pages is announced, because the system reads pages one by one when they are accessed.
    pub(crate) fn mapped_range(&self, offset: u64, len: u64, file_len: u64) -> Option<&Arc<MappedBytes>> {
        let file = self.mapped(file_len)?;
        let is_on_one_page = offset / PAGE_LEN == offset.saturating_add(len.saturating_sub(1)) / PAGE_LEN;
        if !is_on_one_page && let Ok(handle) = self.get() {
            handle.will_read(offset, len);
        }
        Some(file)
    }

    /// Two threads may map the file concurrently; one mapping is kept.
    #[cold]
    fn map(&self, len: u64) -> Option<&Arc<MappedBytes>> {
        let mapped = self.get().and_then(|file| file.map_for_reading(len)).ok().flatten();
        self.mapped.get_or_init(|| mapped).as_ref()
    }

    /// Path of the file.
    pub(crate) fn path(&self) -> PathBuf {
        self.files.path(self.slot.id)
    }
}

impl FileSlot {
    fn lock(&self) -> MutexGuard<'_, CachedHandle> {
        lock(&self.handle)
    }

    fn cached(&self) -> Option<Arc<dyn File>> {
        let file = self.lock().file.clone()?;
        if !self.was_used.load(Ordering::Relaxed) {
            self.was_used.store(true, Ordering::Relaxed);
        }
        Some(file)
    }
}

impl OpenFileTable {
    /// Caches the handle of a slot without one. Returns the handles that were closed for it, which the caller drops
    /// outside of the lock.
    fn insert(&mut self, slot: &Arc<FileSlot>, file: &Arc<dyn File>, max_open: usize) -> Vec<Arc<dyn File>> {
        let is_needed = {
            let handle = slot.lock();
            handle.file.is_none() && !handle.is_removed
        };
        if !is_needed {
            return Vec::new();
        }
        let closed = self.evict_to_fit(max_open);
        let mut handle = slot.lock();
        handle.file = Some(Arc::clone(file));
        self.open += 1;
        if !std::mem::replace(&mut handle.is_in_clock, true) {
            self.clock.push_back(Arc::clone(slot));
        }
        closed
    }

    /// Takes handles until one more fits: each that the hand finds unused since it passed last. Returns the handles,
    /// which the caller drops outside of the lock.
    fn evict_to_fit(&mut self, max_open: usize) -> Vec<Arc<dyn File>> {
        debug_assert!(max_open > 0, "one more file must fit");
        let mut closed = Vec::new();
        // Readers may use handles meanwhile. After two turns of the hand their use does not count any more.
        let mut turns = 2 * self.clock.len();
        while self.open >= max_open {
            let slot = self.clock.pop_front().expect("the clock contains every slot with a handle");
            let mut handle = slot.lock();
            debug_assert!(handle.is_in_clock, "the clock contains each slot once");
            turns = turns.saturating_sub(1);
            if handle.file.is_some() && slot.was_used.swap(false, Ordering::Relaxed) && turns > 0 {
                drop(handle);
                self.clock.push_back(slot);
                continue;
            }
            handle.is_in_clock = false;
            if let Some(file) = handle.file.take() {
                self.open -= 1;
                closed.push(file);
            }
        }
        closed
    }

    /// Takes the handle of a slot. The slot may stay in the clock, but at most half of the clock, and 16 slots, are
    /// without a handle.
    fn close(&mut self, slot: &FileSlot) -> Option<Arc<dyn File>> {
        let closed = slot.lock().file.take()?;
        self.open -= 1;
        self.sweep();
        if cfg!(debug_assertions) {
            self.check_invariants();
        }
        Some(closed)
    }

    /// Removes the slots without a handle from the clock if they are many.
    fn sweep(&mut self) {
        if self.clock.len() > 2 * self.open + 16 {
            self.clock.retain(|slot| {
                let mut handle = slot.lock();
                handle.is_in_clock = handle.file.is_some();
                handle.is_in_clock
            });
        }
    }

    /// Forgets a slot, whose handle stays open until the slot is dropped.
    fn release(&mut self, slot: &Arc<FileSlot>) {
        let mut handle = slot.lock();
        handle.is_removed = true;
        if handle.file.is_some() {
            self.open -= 1;
        }
        if std::mem::replace(&mut handle.is_in_clock, false) {
            self.clock.retain(|other| !Arc::ptr_eq(other, slot));
        }
    }

    /// Panics if `open` does not count the handles in the clock.
    fn check_invariants(&self) {
        let open = self.clock.iter().filter(|slot| slot.lock().file.is_some()).count();
        assert_eq!(open, self.open, "each cached handle is counted, and its slot is in the clock");
        assert!(self.clock.iter().all(|slot| slot.lock().is_in_clock), "slots in the clock know it");
        assert!(self.clock.len() <= 2 * self.open + 17, "few slots in the clock have no handle");
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
    use crate::vfs::open_files::FileAccess;

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
        let files = Arc::new(DataFiles::tables(Arc::clone(&fs), Path::new("/db"), 100, FileAccess::buffered()));
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

    fn numbered_files(count: u64, max_open: usize) -> DataFiles {
        let fs = MemFs::new();
        fs.create_dir_all(Path::new("/db")).unwrap();
        let files = DataFiles::tables(Arc::new(fs), Path::new("/db"), max_open, FileAccess::buffered());
        for id in 0..count {
            files.create(FileNumber(id)).unwrap().write_at(&[id as u8], 0).unwrap();
        }
        files
    }

    fn read_number(file: &DataFile) -> u8 {
        let mut byte = [99];
        file.get().unwrap().read_exact_at(&mut byte, 0).unwrap();
        byte[0]
    }

    #[test]
    fn used_handles_stay_open() {
        let files = numbered_files(40, 8);
        let all: Vec<DataFile> = (0..40).map(|id| files.data_file(FileNumber(id))).collect();
        assert_eq!(files.open_file_count(), 0, "files are opened when they are read");
        let kept = Arc::downgrade(&all[3].get().unwrap());
        for id in 0..40 {
            assert_eq!((read_number(&all[3]), read_number(&all[id])), (3, id as u8));
            assert!(files.open_file_count() <= 8);
        }
        assert!(kept.upgrade().is_some(), "the hand passes a handle that is used");
        for _ in 0..2 {
            (4..40).for_each(|id| assert_eq!(read_number(&all[id]), id as u8));
        }
        assert!(kept.upgrade().is_none(), "a handle that is not used is closed");
    }

    #[test]
    fn readers_of_removed_file_cache_no_handle() {
        let files = numbered_files(3, 8);
        let (first, second) = (files.data_file(FileNumber(1)), files.data_file(FileNumber(2)));
        read_number(&first);
        files.get(FileNumber(1)).unwrap();
        assert_eq!(files.open_file_count(), 1, "both use the same handle");
        files.close(FileNumber(1));
        assert_eq!((files.open_file_count(), read_number(&first), files.open_file_count()), (0, 1, 1));
        files.remove(FileNumber(1)).unwrap();
        assert_eq!(files.open_file_count(), 0);
        assert!(first.get().is_err() && files.get(FileNumber(1)).is_err());
        files.create(FileNumber(1)).unwrap().write_at(&[7], 0).unwrap();
        assert_eq!((read_number(&first), files.open_file_count()), (7, 0), "it is not cached any more");
        assert_eq!((read_number(&second), files.open_file_count()), (2, 1));
    }

    #[test]
    fn released_file_stays_open_for_its_readers() {
        let files = numbered_files(3, usize::MAX);
        let [first, second] = [files.data_file(FileNumber(1)), files.data_file(FileNumber(2))];
        assert_eq!((read_number(&first), read_number(&second)), (1, 2));
        files.release(FileNumber(1));
        assert_eq!(files.open_file_count(), 1, "it is not counted any more");
        let handle = Arc::downgrade(&first.get().unwrap());
        files.shared.fs.remove_file(&files.path(FileNumber(1))).unwrap();
        assert_eq!(read_number(&first), 1);
        assert!(files.data_file(FileNumber(1)).get().is_err(), "others do not find it");
        drop(first);
        assert!(handle.upgrade().is_none(), "the last reader closes it");
        files.release(FileNumber(1));
    }

    #[test]
    fn evicted_files_leave_the_clock() {
        let files = numbered_files(116, 200);
        (0..116).for_each(|id| _ = files.get(FileNumber(id)).unwrap());
        (50..116).for_each(|id| files.close(FileNumber(id)));
        assert_eq!((files.open_file_count(), files.evict_half(), files.open_file_count()), (50, true, 25));
    }

    #[test]
    fn closed_files_leave_the_clock() {
        let files = numbered_files(500, 8);
        for id in 0..500 {
            read_number(&files.data_file(FileNumber(id)));
            files.close(FileNumber(id));
            assert!(files.lock().clock.len() <= 18);
        }
        for id in 0..500 {
            files.get(FileNumber(id)).unwrap();
            files.remove(FileNumber(id)).unwrap();
        }
        assert_eq!((files.open_file_count(), files.lock().slots.len()), (0, 0));
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "the test races scoped threads")]
    fn threads_share_handles_within_the_bound() {
        let files = numbered_files(12, 4);
        let all: Vec<DataFile> = (0..12).map(|id| files.data_file(FileNumber(id))).collect();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (files, all) = (&files, &all);
                scope.spawn(move || {
                    let mut rng = crate::testing::seeded_rng::SeededRng::new(thread);
                    for round in 0..3_000 {
                        let id = rng.below(12);
                        assert_eq!(usize::from(read_number(&all[id])), id);
                        match round % 50 {
                            0 => files.close(FileNumber(id as u64)),
                            1 => drop(files.evict_half()),
                            _ => {}
                        }
                        assert!(files.lock().open <= 4);
                    }
                });
            }
        });
        assert!(files.open_file_count() <= 4);
    }

    #[test]
    fn half_of_available_handles_are_cached() {
        assert_eq!((max_cached_handles(512, None), max_cached_handles(512, Some(4_000))), (512, 512));
        assert_eq!((max_cached_handles(512, Some(60)), max_cached_handles(8, Some(0))), (30, 0));
    }
}

//! The numbered files that hold data, tables and blob files: a bounded set of open handles.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::Result;
use crate::base::version_edit::FileNumber;
use crate::vfs::{File, Fs, OpenMode};

/// Whether tables and blob files are read and written past the cache of the operating system.
///
/// Going past it leaves that cache, and its memory, to others, and the block cache decides alone what stays. But what
/// the block cache does not hold then costs a read of the device, where it was a copy from memory: it pays only if the
/// files would not fit the system's cache anyway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DirectIo {
    /// Never.
    Never,
    /// For files opened while tables and blob files of the database take more than half of the memory that the process
    /// can have.
    #[default]
    Automatic,
    /// Wherever the file system can.
    Always,
}

/// Decides file by file.
#[derive(Debug)]
pub(crate) struct DirectIoPolicy {
    mode: DirectIo,
    /// Bytes of files beyond which `Automatic` means yes.
    limit: u64,
}

impl DirectIoPolicy {
    /// `memory` tells what the process could have, if that is known; it is asked only where it matters.
    pub(crate) fn new(mode: DirectIo, memory: impl FnOnce() -> Option<u64>) -> DirectIoPolicy {
        let memory = if mode == DirectIo::Automatic { memory() } else { None };
        DirectIoPolicy { mode, limit: memory.map_or(u64::MAX, |memory| memory / 2) }
    }

    /// For those who look at single files.
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

/// What a numbered file holds; its name says so.
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

    fn file_name(self, id: FileNumber) -> String {
        format!("{:06}.{}", id.0, self.suffix())
    }
}

/// What the file called `name` holds, and its number, if it is one of these.
pub(crate) fn parse_data_file_name(name: &str) -> Option<(DataFileKind, FileNumber)> {
    let (number, suffix) = name.split_once('.')?;
    let kind = [DataFileKind::Table, DataFileKind::Blob].into_iter().find(|kind| kind.suffix() == suffix)?;
    let id = FileNumber(number.parse().ok()?);
    (kind.file_name(id) == name).then_some((kind, id))
}

/// Opens files of one kind when they are asked for and closes those that were not asked for longest. Thread safe.
///
/// A reader that holds a handle keeps its file open beyond the bound, for as long as the read takes.
#[derive(Clone)]
pub(crate) struct DataFiles {
    shared: Arc<DataFilePool>,
    kind: DataFileKind,
}

/// What the kinds share: one bound on handles, and one decision about direct I/O.
struct DataFilePool {
    fs: Arc<dyn Fs>,
    dir: PathBuf,
    max_open: usize,
    direct: DirectIoPolicy,
    /// Of all files that have a holder.
    live_bytes: AtomicU64,
    open_files: Mutex<OpenFileTable>,
}

#[derive(Default)]
struct OpenFileTable {
    files: HashMap<(DataFileKind, FileNumber), OpenFileEntry>,
    /// Counts requests, so that the file asked for longest ago is known.
    clock: u64,
}

struct OpenFileEntry {
    file: Arc<dyn File>,
    last_used: u64,
}

impl DataFiles {
    /// Tables; at most `max_open` handles are kept, at least one.
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

    /// The blob files beside, under the same bound.
    pub(crate) fn blob_files(&self) -> DataFiles {
        DataFiles { shared: Arc::clone(&self.shared), kind: DataFileKind::Blob }
    }

    fn lock(&self) -> MutexGuard<'_, OpenFileTable> {
        self.shared.open_files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a file is.
    pub(crate) fn path(&self, id: FileNumber) -> PathBuf {
        self.shared.dir.join(self.kind.file_name(id))
    }

    /// A file, open for reading.
    ///
    /// # Errors
    /// `Io` if it cannot be opened.
    pub(crate) fn get(&self, id: FileNumber) -> Result<Arc<dyn File>> {
        let key = (self.kind, id);
        if let Some(file) = self.lock().get(key) {
            return Ok(file);
        }
        // Not under the lock: readers of other files need not wait. Two threads may open the same file; one handle
        // stays.
        let file = self.open(id, OpenMode::Read)?;
        let mut open = self.lock();
        let closed = open.evict_to_fit(self.shared.max_open);
        open.clock += 1;
        let used = open.clock;
        open.files.insert(key, OpenFileEntry { file: Arc::clone(&file), last_used: used });
        drop(open);
        drop(closed);
        Ok(file)
    }

    /// A new file, to be written front to back.
    ///
    /// # Errors
    /// `Io` if it cannot be created.
    pub(crate) fn create(&self, id: FileNumber) -> Result<Arc<dyn File>> {
        self.open(id, OpenMode::Create)
    }

    /// The same for a file that others read while it is written: never past the cache of the system.
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

    /// Whether a file that is opened now goes past the cache of the system.
    pub(crate) fn uses_direct_io(&self) -> bool {
        self.shared.direct.applies(self.shared.live_bytes.load(Ordering::Relaxed))
    }

    /// A file of that size has a holder from now on.
    pub(crate) fn add_live_bytes(&self, bytes: u64) {
        self.shared.live_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The last holder of a file of that size is gone.
    pub(crate) fn remove_live_bytes(&self, bytes: u64) {
        self.shared.live_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Closes half of the cached handles, those that were not asked for longest first; false if none is cached. A
    /// reader that holds one of them keeps its file open.
    pub(crate) fn evict_half(&self) -> bool {
        let mut open = self.lock();
        let kept = open.files.len() / 2;
        let closed = open.evict_to_fit(kept + 1);
        drop(open);
        !closed.is_empty()
    }

    /// Closes a file.
    pub(crate) fn close(&self, id: FileNumber) {
        let closed = self.lock().files.remove(&(self.kind, id));
        drop(closed);
    }

    /// Closes a file and removes it.
    ///
    /// # Errors
    /// Those of removing.
    pub(crate) fn remove(&self, id: FileNumber) -> Result<()> {
        self.close(id);
        self.shared.fs.remove_file(&self.path(id))
    }

    /// Handles kept now.
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

    /// Takes out files until one more fits; they are closed by the caller, outside of the lock.
    fn evict_to_fit(&mut self, max_open: usize) -> Vec<OpenFileEntry> {
        let mut closed = Vec::new();
        while self.files.len() >= max_open {
            let oldest = self.files.iter().min_by_key(|(_, open)| open.last_used).map(|(key, _)| *key);
            closed.extend(oldest.and_then(|key| self.files.remove(&key)));
        }
        closed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}

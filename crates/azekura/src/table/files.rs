//! The open files of all tables: a bounded set of handles.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::Result;
use crate::base::edit::FileId;
use crate::vfs::{File, Fs, OpenMode};

/// Whether tables are read and written past the cache of the operating system.
///
/// Going past it leaves that cache, and its memory, to others, and the block cache decides alone what stays. But what
/// the block cache does not hold then costs a read of the device, where it was a copy from memory: it pays only if the
/// tables would not fit the system's cache anyway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DirectIo {
    /// Never.
    Never,
    /// For files opened while the tables of the database take more than half of the memory that the process can have.
    #[default]
    Automatic,
    /// Wherever the file system can.
    Always,
}

/// Decides file by file.
#[derive(Debug)]
pub(crate) struct DirectPolicy {
    mode: DirectIo,
    /// Bytes of tables beyond which `Automatic` means yes.
    limit: u64,
}

impl DirectPolicy {
    /// `memory` tells what the process could have, if that is known; it is asked only where it matters.
    pub(crate) fn new(mode: DirectIo, memory: impl FnOnce() -> Option<u64>) -> DirectPolicy {
        let memory = if mode == DirectIo::Automatic { memory() } else { None };
        DirectPolicy { mode, limit: memory.map_or(u64::MAX, |memory| memory / 2) }
    }

    /// For those who look at single tables.
    pub(crate) fn never() -> DirectPolicy {
        DirectPolicy::new(DirectIo::Never, || None)
    }

    fn applies(&self, table_bytes: u64) -> bool {
        match self.mode {
            DirectIo::Never => false,
            DirectIo::Automatic => table_bytes > self.limit,
            DirectIo::Always => true,
        }
    }
}

/// Opens tables' files when they are asked for and closes those that were not asked for longest. Thread safe.
///
/// A reader that holds a handle keeps its file open beyond the bound, for as long as the read takes.
pub(crate) struct TableFiles {
    fs: Arc<dyn Fs>,
    dir: PathBuf,
    max_open: usize,
    direct: DirectPolicy,
    /// Of all tables that have a holder.
    table_bytes: AtomicU64,
    open: Mutex<OpenFiles>,
}

/// The number of the table whose file is called `name`, if one is.
pub(crate) fn parse_name(name: &str) -> Option<FileId> {
    let id = FileId(name.strip_suffix(".sst")?.parse().ok()?);
    (file_name(id) == name).then_some(id)
}

fn file_name(id: FileId) -> String {
    format!("{:06}.sst", id.0)
}

#[derive(Default)]
struct OpenFiles {
    files: HashMap<FileId, OpenFile>,
    /// Counts requests, so that the file asked for longest ago is known.
    clock: u64,
}

struct OpenFile {
    file: Arc<dyn File>,
    used: u64,
}

impl TableFiles {
    /// At most `max_open` handles are kept, at least one.
    pub(crate) fn new(fs: Arc<dyn Fs>, dir: &Path, max_open: usize, direct: DirectPolicy) -> TableFiles {
        let (table_bytes, open) = (AtomicU64::new(0), Mutex::default());
        TableFiles { fs, dir: dir.to_path_buf(), max_open: max_open.max(1), direct, table_bytes, open }
    }

    fn lock(&self) -> MutexGuard<'_, OpenFiles> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the file of a table is.
    pub(crate) fn path(&self, id: FileId) -> PathBuf {
        self.dir.join(file_name(id))
    }

    /// The file of a table, open for reading.
    ///
    /// # Errors
    /// `Io` if it cannot be opened.
    pub(crate) fn file(&self, id: FileId) -> Result<Arc<dyn File>> {
        if let Some(file) = self.lock().get(id) {
            return Ok(file);
        }
        // Not under the lock: readers of other files need not wait. Two threads may open the same file; one handle
        // stays.
        let file = self.open(id, OpenMode::Read)?;
        let mut open = self.lock();
        let closed = open.make_room(self.max_open);
        open.clock += 1;
        let used = open.clock;
        open.files.insert(id, OpenFile { file: Arc::clone(&file), used });
        drop(open);
        drop(closed);
        Ok(file)
    }

    /// The new file of a table, to be written front to back.
    ///
    /// # Errors
    /// `Io` if it cannot be created.
    pub(crate) fn create(&self, id: FileId) -> Result<Arc<dyn File>> {
        self.open(id, OpenMode::Create)
    }

    fn open(&self, id: FileId, mode: OpenMode) -> Result<Arc<dyn File>> {
        let path = self.path(id);
        if self.goes_direct() { self.fs.open_direct(&path, mode) } else { self.fs.open(&path, mode) }
    }

    /// Whether a file that is opened now goes past the cache of the system.
    pub(crate) fn goes_direct(&self) -> bool {
        self.direct.applies(self.table_bytes.load(Ordering::Relaxed))
    }

    /// A table of that size has a holder from now on.
    pub(crate) fn add_table(&self, bytes: u64) {
        self.table_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The last holder of a table of that size is gone.
    pub(crate) fn drop_table(&self, bytes: u64) {
        self.table_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Closes the file of a table.
    pub(crate) fn forget(&self, id: FileId) {
        let closed = self.lock().files.remove(&id);
        drop(closed);
    }

    /// Closes the file of a table and removes it.
    ///
    /// # Errors
    /// Those of removing.
    pub(crate) fn remove(&self, id: FileId) -> Result<()> {
        self.forget(id);
        self.fs.remove_file(&self.path(id))
    }

    /// Handles kept now.
    #[cfg(test)]
    pub(crate) fn open_files(&self) -> usize {
        self.lock().files.len()
    }
}

impl OpenFiles {
    fn get(&mut self, id: FileId) -> Option<Arc<dyn File>> {
        self.clock += 1;
        let open = self.files.get_mut(&id)?;
        open.used = self.clock;
        Some(Arc::clone(&open.file))
    }

    /// Takes out files until one more fits; they are closed by the caller, outside of the lock.
    fn make_room(&mut self, max_open: usize) -> Vec<OpenFile> {
        let mut closed = Vec::new();
        while self.files.len() >= max_open {
            let oldest = self.files.iter().min_by_key(|(_, open)| open.used).map(|(id, _)| *id);
            closed.extend(oldest.and_then(|id| self.files.remove(&id)));
        }
        closed
    }
}

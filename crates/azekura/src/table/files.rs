//! The open files of all tables: a bounded set of handles.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base::Result;
use crate::base::edit::FileId;
use crate::vfs::{File, Fs, OpenMode};

/// Opens tables' files when they are asked for and closes those that were not asked for longest. Thread safe.
///
/// A reader that holds a handle keeps its file open beyond the bound, for as long as the read takes.
pub(crate) struct TableFiles {
    fs: Arc<dyn Fs>,
    dir: PathBuf,
    max_open: usize,
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
    pub(crate) fn new(fs: Arc<dyn Fs>, dir: &Path, max_open: usize) -> TableFiles {
        TableFiles { fs, dir: dir.to_path_buf(), max_open: max_open.max(1), open: Mutex::default() }
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
        let file = self.fs.open(&self.path(id), OpenMode::Read)?;
        let mut open = self.lock();
        let closed = open.make_room(self.max_open);
        open.clock += 1;
        let used = open.clock;
        open.files.insert(id, OpenFile { file: Arc::clone(&file), used });
        drop(open);
        drop(closed);
        Ok(file)
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

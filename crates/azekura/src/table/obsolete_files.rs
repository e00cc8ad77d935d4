//! Obsolete tables and blob files, until a thread of the database removes their files.
//!
//! The last holder of a file may be a reader, also of another database, or an iterator that outlives `close`. None of
//! these may use the directory, which may belong to another database by then, or wait for a file system: they add the
//! number here, and background work or a call that changes the database removes the file.

use std::sync::{Arc, Mutex};

use crate::base::sync::{WakeSignal, lock};
use crate::base::version_edit::FileNumber;
use crate::block::BlockCache;
use crate::vfs::open_files::{DataFileKind, DataFiles};

/// Files that are removed in one go: more urgent work does not wait for longer.
const REMOVAL_BATCH_MAX: usize = 16;

/// The files of one database that wait to be removed. Thread safe; its lock is not held while anything is removed.
pub(crate) struct ObsoleteFiles {
    files: Arc<DataFiles>,
    cache: Arc<BlockCache>,
    wakeup: Arc<WakeSignal>,
    queue: Mutex<ObsoleteFileQueue>,
}

#[derive(Default)]
struct ObsoleteFileQueue {
    /// Each file is here once at most, so there are no more than there are files.
    files: Vec<(DataFileKind, FileNumber)>,
    closed: bool,
}

impl ObsoleteFiles {
    /// Of the tables in `files`, and the blob files beside; `work` is rung when there is something to remove.
    pub(crate) fn new(files: Arc<DataFiles>, cache: Arc<BlockCache>, work: Arc<WakeSignal>) -> ObsoleteFiles {
        ObsoleteFiles { files, cache, wakeup: work, queue: Mutex::default() }
    }

    /// Adds a file that no edit names and no reader uses. Does no I/O. After closing it adds nothing: the next open
    /// removes files that no edit names.
    pub(crate) fn push(&self, kind: DataFileKind, file: FileNumber) {
        let first = {
            let mut waiting = lock(&self.queue);
            if waiting.closed {
                return;
            }
            waiting.files.push((kind, file));
            waiting.files.len() == 1
        };
        if first {
            self.wakeup.notify_all();
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.queue).files.is_empty()
    }

    /// Removes some files; false if there were none. Failing is harmless: the next open removes what no
    /// edit names.
    pub(crate) fn remove_batch(&self) -> bool {
        let batch = {
            let mut waiting = lock(&self.queue);
            let rest = waiting.files.len().saturating_sub(REMOVAL_BATCH_MAX);
            waiting.files.split_off(rest)
        };
        for &(kind, file) in &batch {
            self.cache.remove_file(file);
            let _ = match kind {
                DataFileKind::Table => self.files.remove(file),
                DataFileKind::Blob => self.files.blob_files().remove(file),
            };
        }
        !batch.is_empty()
    }

    /// Removes all files that wait.
    pub(crate) fn remove_all(&self) {
        while self.remove_batch() {}
    }

    /// Removes all files that wait, and lets none in any more.
    pub(crate) fn close(&self) {
        lock(&self.queue).closed = true;
        self.remove_all();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::vfs::mem::MemFs;
    use crate::vfs::open_files::DirectIoPolicy;
    use crate::vfs::{Fs, OpenMode};

    fn open_obsolete_files(tables: std::ops::Range<u64>) -> (MemFs, Arc<DataFiles>, Arc<WakeSignal>, ObsoleteFiles) {
        let fs = MemFs::new();
        fs.create_dir_all(Path::new("/db")).unwrap();
        let files = Arc::new(DataFiles::tables(Arc::new(fs.clone()), Path::new("/db"), 4, DirectIoPolicy::never()));
        for id in tables {
            drop(fs.open(&files.path(FileNumber(id)), OpenMode::Create).unwrap());
        }
        let work = Arc::new(WakeSignal::default());
        let obsolete_files =
            ObsoleteFiles::new(Arc::clone(&files), Arc::new(BlockCache::new(1 << 20)), Arc::clone(&work));
        (fs, files, work, obsolete_files)
    }

    fn file_count(fs: &MemFs) -> usize {
        fs.read_dir(Path::new("/db")).unwrap().len()
    }

    #[test]
    fn nothing_is_removed_before_somebody_asks() {
        let (fs, files, work, obsolete_files) = open_obsolete_files(0..40);
        assert!(obsolete_files.is_empty() && !obsolete_files.remove_batch());
        files.get(FileNumber(3)).unwrap();
        (0..39).for_each(|id| obsolete_files.push(DataFileKind::Table, FileNumber(id)));
        assert_eq!((file_count(&fs), work.generation()), (40, 1), "one ring calls for all of them");
        assert!(obsolete_files.remove_batch());
        assert_eq!(file_count(&fs), 40 - REMOVAL_BATCH_MAX);
        obsolete_files.remove_all();
        assert!(obsolete_files.is_empty());
        assert_eq!((file_count(&fs), files.open_file_count()), (1, 0));
        obsolete_files.push(DataFileKind::Table, FileNumber(7));
        assert_eq!(work.generation(), 2);
        assert!(obsolete_files.remove_batch(), "a file that is not there is no failure");
    }

    #[test]
    fn closed_list_ignores_later_files() {
        let (fs, _, work, obsolete_files) = open_obsolete_files(0..40);
        (0..30).for_each(|id| obsolete_files.push(DataFileKind::Table, FileNumber(id)));
        obsolete_files.close();
        assert_eq!(file_count(&fs), 10);
        obsolete_files.push(DataFileKind::Table, FileNumber(30));
        obsolete_files.remove_all();
        assert_eq!((file_count(&fs), work.generation()), (10, 1));
    }
}

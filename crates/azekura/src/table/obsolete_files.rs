//! Obsolete tables and blob files, until a thread of the database removes them.
//!
//! The last user of a file may be a reader, also one of another database, or an iterator that outlives `close`. Such
//! a user must not access the directory, which may belong to another database by then, and must not wait for a file
//! system. So it adds the file number here, and background work or a call that changes the database removes the file.

use std::sync::{Arc, Mutex};

use crate::base::sync::{WakeSignal, lock};
use crate::base::version_edit::FileNumber;
use crate::block::BlockCache;
use crate::vfs::open_files::{DataFileKind, DataFiles};

/// Maximum number of files that one call removes, so that more urgent work does not wait longer.
const REMOVAL_BATCH_MAX: usize = 16;

/// The obsolete files of one database. Thread safe. Its lock is not held while a file is removed.
pub(crate) struct ObsoleteFiles {
    files: Arc<DataFiles>,
    cache: Arc<BlockCache>,
    wakeup: Arc<WakeSignal>,
    /// False in a follower, to which the files do not belong: it only releases them.
    removes: bool,
    queue: Mutex<ObsoleteFileQueue>,
}

#[derive(Default)]
struct ObsoleteFileQueue {
    /// Contains each file at most once, so its length is bounded by the number of files.
    files: Vec<(DataFileKind, FileNumber)>,
    closed: bool,
}

impl ObsoleteFiles {
    /// Creates an empty list for the tables in `files` and the blob files beside them. `wakeup` is signalled when the
    /// list becomes non-empty.
    pub(crate) fn new(files: Arc<DataFiles>, cache: Arc<BlockCache>, wakeup: Arc<WakeSignal>) -> ObsoleteFiles {
        ObsoleteFiles { files, cache, wakeup, removes: true, queue: Mutex::default() }
    }

    /// As [`new`](ObsoleteFiles::new), for a follower: files of this list are released, and stay in the directory.
    pub(crate) fn of_follower(files: Arc<DataFiles>, cache: Arc<BlockCache>, wakeup: Arc<WakeSignal>) -> ObsoleteFiles {
        ObsoleteFiles { removes: false, ..ObsoleteFiles::new(files, cache, wakeup) }
    }

    /// Adds a file that no version edit names and no reader uses. Does no I/O. After `close` it does nothing: the
    /// next open removes files that no version edit names.
    pub(crate) fn push(&self, kind: DataFileKind, file: FileNumber) {
        let first = {
            let mut queue = lock(&self.queue);
            if queue.closed {
                return;
            }
            queue.files.push((kind, file));
            queue.files.len() == 1
        };
        if first {
            self.wakeup.notify_all();
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.queue).files.is_empty()
    }

    /// Removes some files, tables before blob files. Returns false if there are none. Errors are ignored, because the
    /// next open removes files that no version edit names.
    ///
    /// After a crash between two removals, a manifest that is rebuilt from the files may name an obsolete table. Its
    /// values are there.
    pub(crate) fn remove_batch(&self) -> bool {
        let batch: Vec<_> = {
            let mut queue = lock(&self.queue);
            queue.files.sort_by_key(|(kind, _)| *kind == DataFileKind::Blob);
            let count = queue.files.len().min(REMOVAL_BATCH_MAX);
            queue.files.drain(..count).collect()
        };
        for &(kind, file) in &batch {
            self.cache.remove_file(file);
            let files = match kind {
                DataFileKind::Table => DataFiles::clone(&self.files),
                DataFileKind::Blob => self.files.blob_files(),
            };
            match self.removes {
                true => drop(files.remove(file)),
                false => files.release(file),
            }
        }
        !batch.is_empty()
    }

    /// Removes all files of the list.
    pub(crate) fn remove_all(&self) {
        while self.remove_batch() {}
    }

    /// Removes all files of the list. Later calls of [`push`](ObsoleteFiles::push) do nothing.
    pub(crate) fn close(&self) {
        lock(&self.queue).closed = true;
        self.remove_all();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::testing::MemFs;
    use crate::vfs::open_files::FileAccess;
    use crate::vfs::{Fs, OpenMode};

    fn open_obsolete_files(tables: std::ops::Range<u64>) -> (MemFs, Arc<DataFiles>, Arc<WakeSignal>, ObsoleteFiles) {
        let fs = MemFs::new();
        fs.create_dir_all(Path::new("/db")).unwrap();
        let files = Arc::new(DataFiles::tables(Arc::new(fs.clone()), Path::new("/db"), 4, FileAccess::buffered()));
        for id in tables {
            drop(fs.open(&files.path(FileNumber(id)), OpenMode::Create).unwrap());
        }
        let wakeup = Arc::new(WakeSignal::default());
        let obsolete_files =
            ObsoleteFiles::new(Arc::clone(&files), Arc::new(BlockCache::new(1 << 20)), Arc::clone(&wakeup));
        (fs, files, wakeup, obsolete_files)
    }

    fn file_count(fs: &MemFs) -> usize {
        fs.read_dir(Path::new("/db")).unwrap().len()
    }

    #[test]
    fn files_are_removed_only_by_remove_calls() {
        let (fs, files, wakeup, obsolete_files) = open_obsolete_files(0..40);
        assert!(obsolete_files.is_empty() && !obsolete_files.remove_batch());
        files.get(FileNumber(3)).unwrap();
        (0..39).for_each(|id| obsolete_files.push(DataFileKind::Table, FileNumber(id)));
        assert_eq!((file_count(&fs), wakeup.generation()), (40, 1), "one signal for all files");
        assert!(obsolete_files.remove_batch());
        assert_eq!(file_count(&fs), 40 - REMOVAL_BATCH_MAX);
        obsolete_files.remove_all();
        assert!(obsolete_files.is_empty());
        assert_eq!((file_count(&fs), files.open_file_count()), (1, 0));
        obsolete_files.push(DataFileKind::Table, FileNumber(7));
        assert_eq!(wakeup.generation(), 2);
        assert!(obsolete_files.remove_batch(), "a missing file is not an error");
    }

    /// A compaction made a table and its 20 blob files obsolete. After one batch the table was still there, and 16 of
    /// the blob files were not. The manifest that was rebuilt then named the table.
    #[test]
    fn tables_are_removed_before_blob_files() {
        let (fs, files, _, obsolete_files) = open_obsolete_files(0..3);
        for id in 10..30 {
            drop(fs.open(&files.blob_files().path(FileNumber(id)), OpenMode::Create).unwrap());
            obsolete_files.push(DataFileKind::Blob, FileNumber(id));
        }
        (0..3).for_each(|id| obsolete_files.push(DataFileKind::Table, FileNumber(id)));
        assert!(obsolete_files.remove_batch());
        let left = fs.read_dir(Path::new("/db")).unwrap();
        assert_eq!(left.len(), 23 - REMOVAL_BATCH_MAX);
        assert!(left.iter().all(|entry| entry.name.ends_with(".blob")), "{left:?}");
    }

    #[test]
    fn closed_list_ignores_later_files() {
        let (fs, _, wakeup, obsolete_files) = open_obsolete_files(0..40);
        (0..30).for_each(|id| obsolete_files.push(DataFileKind::Table, FileNumber(id)));
        obsolete_files.close();
        assert_eq!(file_count(&fs), 10);
        obsolete_files.push(DataFileKind::Table, FileNumber(30));
        obsolete_files.remove_all();
        assert_eq!((file_count(&fs), wakeup.generation()), (10, 1));
    }
}

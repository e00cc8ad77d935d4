//! Tables and blob files that nobody needs any more, until somebody has the time to remove their files.
//!
//! The last to hold one may be a reader, even one of another database, or an iterator that outlives `close`. None
//! of them touches the directory, which may be another's by then, or waits for a file system: they leave the number
//! here, and whoever works for the database removes the file.

use std::sync::{Arc, Mutex};

use crate::base::edit::FileId;
use crate::base::sync::{Bell, lock};
use crate::block::BlockCache;
use crate::vfs::files::{DataFiles, DataKind};

/// Files that are removed in one go: more urgent work does not wait for longer.
const BATCH: usize = 16;

/// The files of one database that wait to be removed. Thread safe; its lock is not held while anything is removed.
pub(crate) struct Graveyard {
    files: Arc<DataFiles>,
    cache: Arc<BlockCache>,
    work: Arc<Bell>,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    /// Each file is here once at most, so there are no more than there are files.
    files: Vec<(DataKind, FileId)>,
    closed: bool,
}

impl Graveyard {
    /// Of the tables in `files`, and the blob files beside; `work` is rung when there is something to remove.
    pub(crate) fn new(files: Arc<DataFiles>, cache: Arc<BlockCache>, work: Arc<Bell>) -> Graveyard {
        Graveyard { files, cache, work, waiting: Mutex::default() }
    }

    /// Takes in a file that no edit names and nobody reads. Does no I/O. Once closed it takes in nothing: the next
    /// open removes what no edit names.
    pub(crate) fn push(&self, kind: DataKind, file: FileId) {
        let first = {
            let mut waiting = lock(&self.waiting);
            if waiting.closed {
                return;
            }
            waiting.files.push((kind, file));
            waiting.files.len() == 1
        };
        if first {
            self.work.ring();
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.waiting).files.is_empty()
    }

    /// Removes some files; false if there were none. Failing is harmless: the next open removes what no
    /// edit names.
    pub(crate) fn remove_some(&self) -> bool {
        let batch = {
            let mut waiting = lock(&self.waiting);
            let rest = waiting.files.len().saturating_sub(BATCH);
            waiting.files.split_off(rest)
        };
        for &(kind, file) in &batch {
            self.cache.remove_file(file);
            let _ = match kind {
                DataKind::Table => self.files.remove(file),
                DataKind::Blob => self.files.blobs().remove(file),
            };
        }
        !batch.is_empty()
    }

    /// Removes all files that wait.
    pub(crate) fn remove_all(&self) {
        while self.remove_some() {}
    }

    /// Removes all files that wait, and lets none in any more.
    pub(crate) fn close(&self) {
        lock(&self.waiting).closed = true;
        self.remove_all();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::vfs::files::DirectPolicy;
    use crate::vfs::mem::MemFs;
    use crate::vfs::{Fs, OpenMode};

    fn graveyard(tables: std::ops::Range<u64>) -> (MemFs, Arc<DataFiles>, Arc<Bell>, Graveyard) {
        let fs = MemFs::new();
        fs.create_dir_all(Path::new("/db")).unwrap();
        let files = Arc::new(DataFiles::tables(Arc::new(fs.clone()), Path::new("/db"), 4, DirectPolicy::never()));
        for id in tables {
            drop(fs.open(&files.path(FileId(id)), OpenMode::Create).unwrap());
        }
        let work = Arc::new(Bell::default());
        let graveyard = Graveyard::new(Arc::clone(&files), Arc::new(BlockCache::new(1 << 20)), Arc::clone(&work));
        (fs, files, work, graveyard)
    }

    fn count(fs: &MemFs) -> usize {
        fs.read_dir(Path::new("/db")).unwrap().len()
    }

    #[test]
    fn nothing_is_removed_before_somebody_asks() {
        let (fs, files, work, graveyard) = graveyard(0..40);
        assert!(graveyard.is_empty() && !graveyard.remove_some());
        files.file(FileId(3)).unwrap();
        (0..39).for_each(|id| graveyard.push(DataKind::Table, FileId(id)));
        assert_eq!((count(&fs), work.count()), (40, 1), "one ring calls for all of them");
        assert!(graveyard.remove_some());
        assert_eq!(count(&fs), 40 - BATCH);
        graveyard.remove_all();
        assert!(graveyard.is_empty());
        assert_eq!((count(&fs), files.open_files()), (1, 0));
        graveyard.push(DataKind::Table, FileId(7));
        assert_eq!(work.count(), 2);
        assert!(graveyard.remove_some(), "a file that is not there is no failure");
    }

    #[test]
    fn a_closed_one_leaves_what_comes_later() {
        let (fs, _, work, graveyard) = graveyard(0..40);
        (0..30).for_each(|id| graveyard.push(DataKind::Table, FileId(id)));
        graveyard.close();
        assert_eq!(count(&fs), 10);
        graveyard.push(DataKind::Table, FileId(30));
        graveyard.remove_all();
        assert_eq!((count(&fs), work.count()), (10, 1));
    }
}

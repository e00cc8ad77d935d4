//! Making durable what early files hold, before a sync of the log makes durable what points to it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::version_edit::FileNumber;
use crate::base::{Error, ErrorKind, Result};
use crate::lsm::task_lock::lock;
use crate::vfs::{File, Fs};

/// Early files of all trees with bytes that may not be durable yet. Thread safe; no lock that an appender takes is held
/// during a sync.
#[derive(Default)]
pub(crate) struct UnsyncedBlobFiles {
    files: Mutex<BTreeMap<FileNumber, Arc<BlobFileSyncState>>>,
}

impl UnsyncedBlobFiles {
    fn add(&self, id: FileNumber, tail: &Arc<BlobFileSyncState>) {
        lock(&self.files).entry(id).or_insert_with(|| Arc::clone(tail));
    }

    /// The file needs no sync any more: nothing will ever point to what it has beyond what is synced.
    pub(super) fn remove(&self, id: FileNumber) {
        lock(&self.files).remove(&id);
    }

    /// Makes everything durable that was noted before, whoever wrote it.
    ///
    /// # Errors
    /// `Io` if a sync fails, or failed before: whether the bytes are on the device will never be known; or if the
    /// process has too many open files: then a later call may succeed.
    pub(crate) fn sync_all(&self) -> Result<()> {
        let files: Vec<(FileNumber, Arc<BlobFileSyncState>)> = {
            let files = lock(&self.files);
            files.iter().map(|(id, tail)| (*id, Arc::clone(tail))).collect()
        };
        for (id, tail) in files {
            tail.sync()?;
            let mut files = lock(&self.files);
            if tail.is_synced() {
                files.remove(&id);
            }
        }
        Ok(())
    }
}

/// The end of an early file, as far as it is written and as far as it is durable. Thread safe.
pub(super) struct BlobFileSyncState {
    fs: Arc<dyn Fs>,
    file: Arc<dyn File>,
    path: PathBuf,
    written: AtomicU64,
    synced: AtomicU64,
    /// Held while the file is synced: of two syncs at the same time one would wrongly succeed.
    progress: Mutex<BlobFileSyncProgress>,
}

#[derive(Default)]
struct BlobFileSyncProgress {
    /// Whether the file's name is durable.
    dir_synced: bool,
    /// The first failure; no sync proves anything after it.
    failed: Option<Error>,
}

impl BlobFileSyncState {
    pub(super) fn new(fs: Arc<dyn Fs>, file: Arc<dyn File>, path: PathBuf) -> Arc<BlobFileSyncState> {
        let (written, synced, turn) = (AtomicU64::new(0), AtomicU64::new(0), Mutex::default());
        Arc::new(BlobFileSyncState { fs, file, path, written, synced, progress: turn })
    }

    /// The file is written up to `end` now. Among the `unsynced` it is from then on, so before any frame of the log
    /// says where it leads.
    pub(super) fn record_write(self: &Arc<Self>, end: u64, id: FileNumber, unsynced: &UnsyncedBlobFiles) {
        self.written.store(end, Ordering::SeqCst);
        unsynced.add(id, self);
    }

    pub(super) fn written(&self) -> u64 {
        self.written.load(Ordering::SeqCst)
    }

    /// Up to here the file is durable.
    pub(super) fn synced(&self) -> u64 {
        self.synced.load(Ordering::SeqCst)
    }

    fn is_synced(&self) -> bool {
        self.synced() >= self.written()
    }

    /// Whether a sync failed.
    pub(super) fn has_failed(&self) -> bool {
        lock(&self.progress).failed.is_some()
    }

    /// Makes what is written durable, and the name.
    fn sync(&self) -> Result<()> {
        let mut turn = lock(&self.progress);
        let written = self.written();
        if self.synced() >= written {
            return Ok(());
        }
        if let Some(error) = &turn.failed {
            return Err(error.clone());
        }
        let synced =
            self.file.sync_data().map_err(|error| error.in_file(&self.path)).and_then(|()| match turn.dir_synced {
                true => Ok(()),
                false => self.fs.sync_dir(self.path.parent().unwrap_or(&self.path)),
            });
        if let Err(error) = synced {
            if error.is_too_many_open_files() {
                return Err(error); // the directory was not opened, so no sync of it failed
            }
            turn.failed = Some(error.clone());
            return Err(error);
        }
        turn.dir_synced = true;
        self.synced.store(written, Ordering::SeqCst);
        Ok(())
    }

    /// The same for one of those who wrote, whose bytes nobody was told of yet; `own` says how many of them lie behind
    /// an offset. `close` sees to it that nobody writes any more.
    ///
    /// # Errors
    /// `Poisoned` if others' bytes may be lost with them, because those may be acknowledged; else as it failed, and
    /// the file is of no use beyond what was durable before, unless the process had too many open files.
    pub(super) fn sync_for_commit(&self, own: impl Fn(u64) -> u64, close: impl FnOnce()) -> Result<()> {
        self.sync().map_err(|error| {
            if error.is_too_many_open_files() {
                return error;
            }
            close();
            let synced = self.synced();
            match self.written() - synced == own(synced) {
                true => error,
                false => error.with_kind(ErrorKind::Poisoned),
            }
        })
    }
}

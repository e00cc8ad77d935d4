//! A consistent state of a tree for readers, which they reach without a lock.

use std::sync::{Arc, Mutex};

use crate::base::SeqNo;
use crate::base::version_edit::FileNumber;
use crate::lsm::blob::direct_file::DirectBlobFiles;
use crate::lsm::blob::handle::BlobHandle;
use crate::lsm::table_handle::TableHandle;
use crate::lsm::task_lock::lock;
use crate::lsm::version::Version;
use crate::mem::epoch::{EpochCell, Pin};
use crate::memtable::Memtable;

/// The memtables and the tables of a tree. A flush replaces its memtables by its tables in one step, so that every
/// record is found.
#[derive(Clone)]
pub(crate) struct SuperVersion {
    pub(crate) active: Arc<Memtable>,
    /// Newest first; none of them is empty.
    pub(crate) sealed: Arc<[Arc<Memtable>]>,
    pub(crate) version: Arc<Version<TableHandle>>,
    /// Blob files that memtables may point into and `version` does not have.
    pub(crate) direct_blobs: Arc<DirectBlobFiles>,
    /// Every record up to here is in the tables of `version`.
    pub(crate) flushed_through: SeqNo,
}

impl SuperVersion {
    /// The blob file that has the values of a logical file.
    pub(crate) fn blob_file(&self, logical: FileNumber) -> Option<&Arc<BlobHandle>> {
        self.version.blobs().handle(logical).or_else(|| self.direct_blobs.handle(logical))
    }
}

/// The current super version. Thread safe: readers never wait, and threads that replace it exclude each other.
pub(crate) struct SuperVersionCell {
    cell: EpochCell<SuperVersion>,
    replace_lock: Mutex<()>,
}

impl SuperVersionCell {
    pub(crate) fn new(first: SuperVersion) -> SuperVersionCell {
        SuperVersionCell { cell: EpochCell::new(Arc::new(first)), replace_lock: Mutex::new(()) }
    }

    /// Calls `read` with the current super version. The caller clones the parts that it needs later.
    pub(crate) fn with<R>(&self, read: impl FnOnce(&SuperVersion) -> R) -> R {
        read(&self.cell.load())
    }

    /// The same with the epoch pin, which keeps the super version and all blocks that child links point to.
    #[inline]
    pub(crate) fn with_pin<R>(&self, read: impl FnOnce(&SuperVersion, &Pin) -> R) -> R {
        let guard = self.cell.load();
        read(&guard, guard.pin())
    }

    /// Returns a copy that the caller may keep.
    pub(crate) fn get(&self) -> SuperVersion {
        self.with(SuperVersion::clone)
    }

    /// Replaces the current super version by `next(current)`. `next` must be fast, because it runs under the lock that
    /// sealing a memtable takes.
    pub(crate) fn replace(&self, next: impl FnOnce(&SuperVersion) -> SuperVersion) {
        let _turn = lock(&self.replace_lock);
        let next = self.with(next);
        self.cell.store(Arc::new(next));
    }
}

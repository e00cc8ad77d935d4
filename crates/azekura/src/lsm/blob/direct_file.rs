//! Blob files that memory may point into and no edit names yet.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::Result;
use crate::base::blob_pointer::BlobPointer;
use crate::base::version_edit::{BlobFileMeta, FileNumber};
use crate::blob::direct_writer::DirectBlobWriter;
use crate::block::frame::CompressedBlock;
use crate::lsm::blob::handle::BlobHandle;
use crate::lsm::blob::map::BlobFileStats;
use crate::lsm::blob::unsynced::BlobFileSyncState;
use crate::lsm::task_lock::lock;

/// The early files of a super version, by their numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct DirectBlobFiles {
    files: BTreeMap<FileNumber, Arc<DirectBlobFile>>,
}

impl DirectBlobFiles {
    /// The blob file that has the values of a logical file.
    pub(crate) fn handle(&self, logical: FileNumber) -> Option<&Arc<BlobHandle>> {
        self.get(logical).map(|file| &file.handle)
    }

    pub(super) fn get(&self, logical: FileNumber) -> Option<&Arc<DirectBlobFile>> {
        self.files.get(&logical)
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = &Arc<DirectBlobFile>> {
        self.files.values()
    }

    /// Those whose numbers are wanted.
    pub(crate) fn select(&self, wanted: &BTreeSet<FileNumber>) -> Vec<Arc<DirectBlobFile>> {
        wanted.iter().filter_map(|id| self.files.get(id)).map(Arc::clone).collect()
    }

    /// The same with these files.
    pub(crate) fn with_added(&self, added: impl IntoIterator<Item = Arc<DirectBlobFile>>) -> Arc<DirectBlobFiles> {
        let mut files = self.files.clone();
        files.extend(added.into_iter().map(|file| (file.id, file)));
        Arc::new(DirectBlobFiles { files })
    }

    /// The same without those.
    pub(crate) fn with_removed(self: &Arc<Self>, removed: &[Arc<DirectBlobFile>]) -> Arc<DirectBlobFiles> {
        if removed.is_empty() {
            return Arc::clone(self);
        }
        let mut files = self.files.clone();
        removed.iter().for_each(|file| drop(files.remove(&file.id)));
        Arc::new(DirectBlobFiles { files })
    }
}

/// A blob file that readers follow pointers into while it is written. Thread safe.
pub(crate) struct DirectBlobFile {
    pub(crate) id: FileNumber,
    pub(super) handle: Arc<BlobHandle>,
    /// Values, and bytes of their frames.
    values: AtomicU64,
    bytes: AtomicU64,
    /// `None` in a file of an earlier life, from which this one only reads.
    pub(super) append_state: Option<DirectBlobAppendState>,
}

pub(super) struct DirectBlobAppendState {
    pub(super) sync_state: Arc<BlobFileSyncState>,
    pub(super) state: Mutex<DirectBlobWriterState>,
}

pub(super) struct DirectBlobWriterState {
    pub(super) writer: DirectBlobWriter,
    /// What an edit is to say, once this file itself is finished and durable.
    pub(super) finished_meta: Option<BlobFileMeta>,
}

impl DirectBlobFile {
    /// One without values.
    pub(super) fn new_writable(
        handle: Arc<BlobHandle>,
        tail: Arc<BlobFileSyncState>,
        writer: DirectBlobWriter,
    ) -> Arc<DirectBlobFile> {
        let state = Mutex::new(DirectBlobWriterState { writer, finished_meta: None });
        DirectBlobFile::new(handle, 0, 0, Some(DirectBlobAppendState { sync_state: tail, state }))
    }

    /// One that an earlier life has left without its end, for one who may not write: `values` of `bytes` in it are
    /// pointed to.
    pub(super) fn new_read_only(handle: Arc<BlobHandle>, values: u64, bytes: u64) -> Arc<DirectBlobFile> {
        DirectBlobFile::new(handle, values, bytes, None)
    }

    fn new(
        handle: Arc<BlobHandle>,
        values: u64,
        bytes: u64,
        writing: Option<DirectBlobAppendState>,
    ) -> Arc<DirectBlobFile> {
        let (id, values, bytes) = (handle.meta().number, AtomicU64::new(values), AtomicU64::new(bytes));
        Arc::new(DirectBlobFile { id, handle, values, bytes, append_state: writing })
    }

    /// How full it is, as if everything in it were referenced: nobody knows better before a flush.
    pub(crate) fn stats(&self) -> BlobFileStats {
        let (values, bytes) = (self.values.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed));
        BlobFileStats {
            id: self.id,
            size: self.written(),
            values,
            bytes,
            referenced_values: values,
            referenced_bytes: bytes,
        }
    }

    pub(super) fn path(&self) -> PathBuf {
        self.handle.file().path()
    }

    /// Where the last value ends.
    pub(super) fn written(&self) -> u64 {
        self.handle.file().size()
    }

    /// Neither an edit nor anybody who reads from now on needs the file: the last holder gives it to the graveyard.
    pub(crate) fn mark_obsolete(&self) {
        self.handle.mark_obsolete();
    }

    /// Appends a value; its bytes stand in the file then. The caller sees to it that nobody else does.
    ///
    /// # Errors
    /// As [`DirectBlobWriter::append`].
    pub(super) fn append(&self, writing: &DirectBlobAppendState, value: &CompressedBlock<'_>) -> Result<BlobPointer> {
        let mut state = lock(&writing.state);
        let pointer = state.writer.append(&value.frame()).map_err(|error| error.in_file(self.path()))?;
        self.handle.file().grow_to(state.writer.end_offset());
        self.values.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(pointer.frame_len, Ordering::Relaxed);
        Ok(pointer)
    }
}

impl std::fmt::Debug for DirectBlobFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "early {:?}", self.handle)
    }
}

/// A value in an early file that no memtable points to yet.
#[derive(Debug)]
pub(crate) struct DirectBlobWrite {
    pub(super) file: Arc<DirectBlobFile>,
    pub(crate) pointer: BlobPointer,
}

/// What a tree knows of its early files beside the super version. Thread safe.
pub(crate) struct DirectBlobTracker {
    /// Values from here on are written ahead of their commit; `u64::MAX` for none.
    threshold: AtomicU64,
    /// The file that takes values. Held while one is written, so that each stands behind the one before.
    pub(super) open_file: Mutex<Option<Arc<DirectBlobFile>>>,
    /// How many pointers into each logical file are neither in tables nor given up.
    pointer_counts: Mutex<BTreeMap<FileNumber, u64>>,
}

impl DirectBlobTracker {
    pub(crate) fn new(from: u64) -> DirectBlobTracker {
        DirectBlobTracker {
            threshold: AtomicU64::new(from),
            open_file: Mutex::default(),
            pointer_counts: Mutex::default(),
        }
    }

    pub(super) fn threshold(&self) -> u64 {
        self.threshold.load(Ordering::Relaxed)
    }

    pub(crate) fn set_threshold(&self, from: u64) {
        self.threshold.store(from, Ordering::Relaxed);
    }

    /// Counts a pointer that is in memory, or will be.
    pub(crate) fn add_pointer(&self, logical: FileNumber) {
        *lock(&self.pointer_counts).entry(logical).or_default() += 1;
    }

    /// Takes pointers off the count; true if that was the last.
    pub(super) fn remove_pointers(&self, logical: FileNumber, by: u64) -> bool {
        let mut counts = lock(&self.pointer_counts);
        let Some(count) = counts.get_mut(&logical) else { return false };
        *count = count.saturating_sub(by);
        let last = *count == 0;
        if last {
            counts.remove(&logical);
        }
        last
    }

    pub(super) fn has_pointers(&self, logical: FileNumber) -> bool {
        lock(&self.pointer_counts).contains_key(&logical)
    }

    /// The logical files that memory points into, or may. Who takes this first and a version then knows of a logical
    /// file that is not here that all references to it are in the version. One that an edit names and that is gone from
    /// here never comes back.
    pub(crate) fn files_with_pointers(&self) -> BTreeSet<FileNumber> {
        lock(&self.pointer_counts).keys().copied().collect()
    }
}

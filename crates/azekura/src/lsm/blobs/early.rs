//! Blob files that memory may point into and no edit names yet.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::Result;
use crate::base::blob_ref::BlobRef;
use crate::base::edit::{BlobMeta, FileId};
use crate::blob::early::EarlyWriter;
use crate::block::frame::Packed;
use crate::lsm::blobs::handle::BlobHandle;
use crate::lsm::blobs::map::BlobFileUse;
use crate::lsm::blobs::unsynced::Tail;
use crate::lsm::slot::lock;

/// The early files of a super version, by their numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct EarlyMap {
    files: BTreeMap<FileId, Arc<EarlyFile>>,
}

impl EarlyMap {
    /// The blob file that has the values of a logical file.
    pub(crate) fn file(&self, logical: FileId) -> Option<&Arc<BlobHandle>> {
        self.get(logical).map(|file| &file.handle)
    }

    pub(super) fn get(&self, logical: FileId) -> Option<&Arc<EarlyFile>> {
        self.files.get(&logical)
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = &Arc<EarlyFile>> {
        self.files.values()
    }

    /// Those whose numbers are wanted.
    pub(crate) fn among(&self, wanted: &BTreeSet<FileId>) -> Vec<Arc<EarlyFile>> {
        wanted.iter().filter_map(|id| self.files.get(id)).map(Arc::clone).collect()
    }

    /// The same with these files.
    pub(crate) fn with(&self, added: impl IntoIterator<Item = Arc<EarlyFile>>) -> Arc<EarlyMap> {
        let mut files = self.files.clone();
        files.extend(added.into_iter().map(|file| (file.id, file)));
        Arc::new(EarlyMap { files })
    }

    /// The same without those.
    pub(crate) fn without(self: &Arc<Self>, removed: &[Arc<EarlyFile>]) -> Arc<EarlyMap> {
        if removed.is_empty() {
            return Arc::clone(self);
        }
        let mut files = self.files.clone();
        removed.iter().for_each(|file| drop(files.remove(&file.id)));
        Arc::new(EarlyMap { files })
    }
}

/// A blob file that readers follow pointers into while it is written. Thread safe.
pub(crate) struct EarlyFile {
    pub(crate) id: FileId,
    pub(super) handle: Arc<BlobHandle>,
    /// Values, and bytes of their frames.
    values: AtomicU64,
    bytes: AtomicU64,
    /// `None` in a file of an earlier life, from which this one only reads.
    pub(super) writing: Option<Writing>,
}

pub(super) struct Writing {
    pub(super) tail: Arc<Tail>,
    pub(super) state: Mutex<WriterState>,
}

pub(super) struct WriterState {
    pub(super) writer: EarlyWriter,
    /// What an edit is to say, once this file itself is finished and durable.
    pub(super) finished: Option<BlobMeta>,
}

impl EarlyFile {
    /// One without values.
    pub(super) fn begun(handle: Arc<BlobHandle>, tail: Arc<Tail>, writer: EarlyWriter) -> Arc<EarlyFile> {
        let state = Mutex::new(WriterState { writer, finished: None });
        EarlyFile::new(handle, 0, 0, Some(Writing { tail, state }))
    }

    /// One that an earlier life has left without its end, for one who may not write: `values` of `bytes` in it are
    /// pointed to.
    pub(super) fn of_earlier_life(handle: Arc<BlobHandle>, values: u64, bytes: u64) -> Arc<EarlyFile> {
        EarlyFile::new(handle, values, bytes, None)
    }

    fn new(handle: Arc<BlobHandle>, values: u64, bytes: u64, writing: Option<Writing>) -> Arc<EarlyFile> {
        let (id, values, bytes) = (handle.meta().id, AtomicU64::new(values), AtomicU64::new(bytes));
        Arc::new(EarlyFile { id, handle, values, bytes, writing })
    }

    /// How full it is, as if everything in it were referenced: nobody knows better before a flush.
    pub(crate) fn uses(&self) -> BlobFileUse {
        let (values, bytes) = (self.values.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed));
        BlobFileUse {
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
    pub(crate) fn doom(&self) {
        self.handle.doom();
    }

    /// Appends a value; its bytes stand in the file then. The caller sees to it that nobody else does.
    ///
    /// # Errors
    /// As [`EarlyWriter::append`].
    pub(super) fn append(&self, writing: &Writing, value: &Packed<'_>) -> Result<BlobRef> {
        let mut state = lock(&writing.state);
        let pointer = state.writer.append(&value.frame()).map_err(|error| error.in_file(self.path()))?;
        self.handle.file().grow_to(state.writer.end());
        self.values.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(pointer.stored, Ordering::Relaxed);
        Ok(pointer)
    }
}

impl std::fmt::Debug for EarlyFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "early {:?}", self.handle)
    }
}

/// A value in an early file that no memtable points to yet.
#[derive(Debug)]
pub(crate) struct Claim {
    pub(super) file: Arc<EarlyFile>,
    pub(crate) pointer: BlobRef,
}

/// What a tree knows of its early files beside the super version. Thread safe.
pub(crate) struct Early {
    /// Values from here on are written ahead of their commit; `u64::MAX` for none.
    from: AtomicU64,
    /// The file that takes values. Held while one is written, so that each stands behind the one before.
    pub(super) open: Mutex<Option<Arc<EarlyFile>>>,
    /// How many pointers into each logical file are neither in tables nor given up.
    counts: Mutex<BTreeMap<FileId, u64>>,
}

impl Early {
    pub(crate) fn new(from: u64) -> Early {
        Early { from: AtomicU64::new(from), open: Mutex::default(), counts: Mutex::default() }
    }

    pub(super) fn from(&self) -> u64 {
        self.from.load(Ordering::Relaxed)
    }

    pub(crate) fn set_from(&self, from: u64) {
        self.from.store(from, Ordering::Relaxed);
    }

    /// Counts a pointer that is in memory, or will be.
    pub(crate) fn count(&self, logical: FileId) {
        *lock(&self.counts).entry(logical).or_default() += 1;
    }

    /// Takes pointers off the count; true if that was the last.
    pub(super) fn uncount(&self, logical: FileId, by: u64) -> bool {
        let mut counts = lock(&self.counts);
        let Some(count) = counts.get_mut(&logical) else { return false };
        *count = count.saturating_sub(by);
        let last = *count == 0;
        if last {
            counts.remove(&logical);
        }
        last
    }

    pub(super) fn is_counted(&self, logical: FileId) -> bool {
        lock(&self.counts).contains_key(&logical)
    }

    /// The logical files that memory points into, or may. Who takes this first and a version then knows of a logical
    /// file that is not here that all references to it are in the version. One that an edit names and that is gone from
    /// here never comes back.
    pub(crate) fn counted(&self) -> BTreeSet<FileId> {
        lock(&self.counts).keys().copied().collect()
    }
}

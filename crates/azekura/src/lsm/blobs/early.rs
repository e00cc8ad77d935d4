//! Large values that stand in a blob file before the log points to them.
//!
//! A value is written once: by the thread that brings it, to the open *early* file of its tree, ahead of the commit.
//! Log, memtable and tables hold the pointer. A file takes values until it is full or a flush writes tables that refer
//! to it; then it is finished and named by an edit, and is a blob file like others.
//!
//! Invariants:
//! - the bytes of a value are in the file, and the file in the super version and among the unsynced, before the
//!   pointer leaves [`LsmTree::put_early`];
//! - every pointer that is handed out is counted until tables have it, or nobody ever will: a file with counted
//!   pointers is neither dropped nor collected;
//! - what commits that failed have left in a file is stale.
//!
//! Locks, in the order in which they are taken: `open`, then one of `counts` and the turn of the super version. Readers
//! take none of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::blob_ref::BlobRef;
use crate::base::edit::{BlobMeta, FileId};
use crate::base::file_header::FileHeader;
use crate::base::{Error, Result};
use crate::blob::early::EarlyWriter;
use crate::blob::format::VALUES_MAX;
use crate::block::BlockKind;
use crate::block::frame::Packed;
use crate::lsm::blobs::carry::{Carried, carry};
use crate::lsm::blobs::handle::BlobHandle;
use crate::lsm::blobs::map::BlobFileUse;
use crate::lsm::blobs::unsynced::Tail;
use crate::lsm::slot::lock;
use crate::lsm::super_version::SuperVersion;
use crate::lsm::tree::LsmTree;
use crate::lsm::written::Unnamed;
use crate::memtable::Memtable;
use crate::vfs::files::DataKind;

/// The early files that no edit names yet, by their numbers; part of a super version.
#[derive(Clone, Debug, Default)]
pub(crate) struct EarlyMap {
    files: BTreeMap<FileId, Arc<EarlyFile>>,
}

impl EarlyMap {
    pub(crate) fn file(&self, logical: FileId) -> Option<&Arc<BlobHandle>> {
        self.files.get(&logical).map(|file| &file.handle)
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = &Arc<EarlyFile>> {
        self.files.values()
    }

    /// Those whose numbers are wanted.
    pub(crate) fn among(&self, wanted: &BTreeSet<FileId>) -> Vec<Arc<EarlyFile>> {
        wanted.iter().filter_map(|id| self.files.get(id)).map(Arc::clone).collect()
    }

    /// The same with these files, and without those.
    fn with(&self, added: impl IntoIterator<Item = Arc<EarlyFile>>, removed: &[Arc<EarlyFile>]) -> Arc<EarlyMap> {
        let mut files = self.files.clone();
        files.extend(added.into_iter().map(|file| (file.id, file)));
        removed.iter().for_each(|file| drop(files.remove(&file.id)));
        Arc::new(EarlyMap { files })
    }
}

/// A blob file that readers follow pointers into while it is written.
pub(crate) struct EarlyFile {
    pub(crate) id: FileId,
    handle: Arc<BlobHandle>,
    /// Values, and bytes of their frames.
    values: AtomicU64,
    bytes: AtomicU64,
    /// `None` in a file of an earlier life, from which this one only reads.
    writing: Option<Writing>,
}

struct Writing {
    tail: Arc<Tail>,
    state: Mutex<WriterState>,
}

struct WriterState {
    writer: EarlyWriter,
    /// Once it is finished and durable.
    finished: Option<BlobMeta>,
}

impl EarlyFile {
    /// One that an earlier life has left without its end, for one who may not write: `values` of `bytes` in it are
    /// pointed to.
    pub(crate) fn of_earlier_life(handle: Arc<BlobHandle>, values: u64, bytes: u64) -> Arc<EarlyFile> {
        let (values, bytes) = (AtomicU64::new(values), AtomicU64::new(bytes));
        Arc::new(EarlyFile { id: handle.meta().id, handle, values, bytes, writing: None })
    }

    /// How full it is, as if everything in it were referenced: nobody knows better before a flush.
    pub(crate) fn uses(&self) -> BlobFileUse {
        let (values, bytes) = (self.values.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed));
        BlobFileUse {
            id: self.id,
            size: self.handle.file().size(),
            values,
            bytes,
            referenced_values: values,
            referenced_bytes: bytes,
        }
    }

    /// Neither an edit nor anybody who reads from now on needs the file: the last holder gives it to the graveyard.
    pub(crate) fn doom(&self) {
        self.handle.doom();
    }

    /// Appends a value; its bytes stand in the file then.
    fn append(&self, writing: &Writing, value: &Packed<'_>) -> Result<BlobRef> {
        let mut state = lock(&writing.state);
        let pointer = state.writer.append(&value.frame()).map_err(|error| error.in_file(writing.tail.path()))?;
        self.handle.file().grow_to(state.writer.end());
        self.values.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(pointer.stored, Ordering::Relaxed);
        Ok(pointer)
    }

    /// Ends the file, durably. Where a sync has failed, what was durable before is carried over to a new file instead.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`: it can be tried again. `Poisoned` if a sync failed that stood for acknowledged values.
    fn finish(&self, tree: &LsmTree, unnamed: &mut Unnamed, created_ms: u64) -> Result<BlobMeta> {
        let Some(writing) = &self.writing else {
            return Err(Error::invalid("a file of an earlier life is read only"));
        };
        let mut state = lock(&writing.state);
        if let Some(meta) = &state.finished {
            return Ok(meta.clone());
        }
        let tail = &writing.tail;
        let meta = if tail.has_failed() {
            let whole = state
                .writer
                .frames()?
                .into_iter()
                .filter(|(_, frame)| frame.end().is_ok_and(|end| end <= tail.synced()));
            let carried = [Carried { logical: self.id, file: self.handle.file(), frames: whole.collect() }];
            carry(unnamed, &carried, created_ms)?
        } else {
            let end = state.writer.end();
            let meta = state.writer.finish().map_err(|error| error.in_file(tail.path()))?;
            tail.wrote(meta.size, self.id, &tree.context.unsynced);
            let synced = tail.sync_own(|_| meta.size - end, || {});
            tree.context.unsynced.forget(self.id);
            synced?;
            meta
        };
        state.finished = Some(meta.clone());
        Ok(meta)
    }
}

impl std::fmt::Debug for EarlyFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "early {:?}", self.handle)
    }
}

/// What a tree knows of its early files beside the super version.
pub(crate) struct Early {
    /// Values from here on are written ahead of their commit; `u64::MAX` for none.
    from: AtomicU64,
    /// The file that takes values. Held while one is written, so that each stands behind the one before.
    open: Mutex<Option<Arc<EarlyFile>>>,
    /// How many pointers into each logical file are neither in tables nor given up.
    counts: Mutex<BTreeMap<FileId, u64>>,
}

impl Early {
    pub(crate) fn new(from: u64) -> Early {
        Early { from: AtomicU64::new(from), open: Mutex::default(), counts: Mutex::default() }
    }

    pub(crate) fn set_from(&self, from: u64) {
        self.from.store(from, Ordering::Relaxed);
    }

    /// Counts a pointer that is in memory.
    pub(crate) fn count(&self, logical: FileId) {
        *lock(&self.counts).entry(logical).or_default() += 1;
    }

    /// The logical files that memory points into, or may. What takes this and then a version knows of a logical file
    /// that is not here: all its references are in the version. What is gone from here never comes back.
    pub(crate) fn counted(&self) -> BTreeSet<FileId> {
        lock(&self.counts).keys().copied().collect()
    }
}

/// A value in an early file that no memtable points to yet.
#[derive(Debug)]
pub(crate) struct Claim {
    file: Arc<EarlyFile>,
    pub(crate) pointer: BlobRef,
}

/// Makes the values of some claims durable, all of them of one tree.
///
/// # Errors
/// As it failed, if nobody else can have lost anything; then the values must be given up. Else `Poisoned`.
pub(crate) fn sync_claims<'a>(tree: &LsmTree, claims: impl Iterator<Item = &'a Claim>) -> Result<()> {
    let mut files: BTreeMap<FileId, (&Arc<EarlyFile>, Vec<&BlobRef>)> = BTreeMap::new();
    for claim in claims {
        files.entry(claim.file.id).or_insert((&claim.file, Vec::new())).1.push(&claim.pointer);
    }
    for (id, (file, pointers)) in files {
        let Some(Writing { tail, .. }) = &file.writing else { continue };
        let own = |synced: u64| {
            let behind = pointers.iter().filter(|pointer| pointer.offset >= synced);
            // The header is nobody's.
            behind.map(|pointer| pointer.stored).sum::<u64>() + if synced == 0 { FileHeader::LEN as u64 } else { 0 }
        };
        tail.sync_own(own, || tree.close_early(id)).inspect_err(|_| tree.context.unsynced.forget(id))?;
    }
    Ok(())
}

impl LsmTree {
    /// Whether a value of that length is written ahead of its commit.
    #[inline]
    pub(crate) fn takes_early(&self, len: usize) -> bool {
        len as u64 >= self.early.from.load(Ordering::Relaxed)
    }

    /// Writes a value to the open early file. The claim on it is to be given back with
    /// [`release`](LsmTree::release) unless a memtable gets the pointer.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file; `Closed` after [`discard`](LsmTree::discard).
    pub(crate) fn put_early(&self, value: &[u8]) -> Result<Claim> {
        let apart = self.options().kv_separation.clone().unwrap_or_default();
        let packed = Packed::new(BlockKind::Blob, apart.compression, value);
        let mut open = lock(&self.early.open);
        self.check_open()?;
        let file = match &*open {
            Some(file) => Arc::clone(file),
            None => {
                let file = self.begin_early()?;
                *open = Some(Arc::clone(&file));
                file
            }
        };
        let Some(writing) = &file.writing else {
            return Err(Error::invalid("a file of an earlier life is read only"));
        };
        // Counted first: whoever looks finds the file in use from its first value on.
        self.early.count(file.id);
        let pointer = file.append(writing, &packed).inspect_err(|_| {
            self.early.uncount(file.id, 1); // the file stays: it takes values still
        })?;
        let end = file.handle.file().size();
        writing.tail.wrote(end, file.id, &self.context.unsynced);
        if end >= apart.target_size || u64::from(pointer.ordinal) + 1 >= VALUES_MAX {
            *open = None;
        }
        Ok(Claim { file, pointer })
    }

    /// Makes an early file and shows it to readers; the caller holds `open`.
    fn begin_early(&self) -> Result<Arc<EarlyFile>> {
        let context = &self.context;
        let (id, files) = (context.new_file_id(), context.files.blobs());
        let mut file_id = [0; 16];
        context.env.random(&mut file_id);
        let file = files.create_shared(id)?;
        let begun = EarlyWriter::create(Arc::clone(&file), file_id, id, context.env.now_ms());
        let writer = match begun {
            Ok(writer) => writer,
            Err(error) => {
                context.graveyard.push(DataKind::Blob, id);
                return Err(error.in_file(files.path(id)));
            }
        };
        let tail = Tail::new(Arc::clone(&context.fs), Arc::clone(&file), files.path(id));
        let handle = context.growing_handle(id, file, file_id, writer.end());
        let state = Mutex::new(WriterState { writer, finished: None });
        let (values, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let file = Arc::new(EarlyFile { id, handle, values, bytes, writing: Some(Writing { tail, state }) });
        self.show_early([Arc::clone(&file)]);
        Ok(file)
    }

    /// Number, place and length of each early file.
    pub(crate) fn early_extents(&self) -> Vec<(FileId, PathBuf, u64)> {
        let early = self.current.with(|now| Arc::clone(&now.early));
        early.files().map(|file| (file.id, file.handle.file().path(), file.handle.file().size())).collect()
    }

    /// Lets readers follow pointers into these files.
    pub(crate) fn show_early(&self, files: impl IntoIterator<Item = Arc<EarlyFile>>) {
        self.current.replace(|now| SuperVersion { early: now.early.with(files, &[]), ..now.clone() });
    }

    /// No value goes to that file any more; others may get one of their own.
    fn close_early(&self, id: FileId) {
        lock(&self.early.open).take_if(|open| open.id == id);
    }

    /// Ends an early file, durably; gives what an edit is to say of it.
    ///
    /// # Errors
    /// Those of [`EarlyFile::finish`]; it can be tried again.
    pub(crate) fn end_early(&self, file: &EarlyFile, unnamed: &mut Unnamed, created_ms: u64) -> Result<BlobMeta> {
        self.close_early(file.id);
        file.finish(self, unnamed, created_ms)
    }

    /// Takes the pointers of these memtables off the count; their flush is published.
    pub(crate) fn flushed_pointers(&self, memtables: &[Arc<Memtable>]) {
        for (logical, count) in memtables.iter().flat_map(|memtable| memtable.pointers()) {
            self.give_back(logical, count);
        }
    }

    /// Gives up a value: its commit failed.
    pub(crate) fn release(&self, claim: &Claim) {
        self.give_back(claim.file.id, 1);
    }

    fn give_back(&self, logical: FileId, count: u64) {
        if self.early.uncount(logical, count) {
            self.drop_early_if_dead(logical);
        }
    }

    /// Lets go of a file that nothing points to and no edit names, unless it takes values still.
    fn drop_early_if_dead(&self, id: FileId) {
        let open = lock(&self.early.open);
        if open.as_ref().is_some_and(|file| file.id == id) || lock(&self.early.counts).contains_key(&id) {
            return;
        }
        let dead = self.current.with(|now| now.early.files.get(&id).map(Arc::clone));
        if let Some(dead) = dead.filter(|file| file.writing.is_some()) {
            self.let_go(&[dead]);
        }
    }

    fn let_go(&self, dead: &[Arc<EarlyFile>]) {
        self.current.replace(|now| SuperVersion { early: now.early.with([], dead), ..now.clone() });
        for file in dead {
            self.context.unsynced.forget(file.id);
            file.doom();
        }
    }

    /// Lets go of all early files of which nothing will ever be read again: the partition was deleted, or the database
    /// has closed with nothing in memory. The files go to the graveyard with their last readers.
    pub(crate) fn give_up_early(&self) {
        let mut open = lock(&self.early.open);
        *open = None;
        let dead: Vec<Arc<EarlyFile>> = self.current.with(|now| now.early.files().map(Arc::clone).collect());
        let mine: Vec<Arc<EarlyFile>> = dead.into_iter().filter(|file| file.writing.is_some()).collect();
        self.let_go(&mine);
    }
}

impl Early {
    /// Takes pointers off the count; true if that was the last.
    fn uncount(&self, logical: FileId, by: u64) -> bool {
        let mut counts = lock(&self.counts);
        let Some(count) = counts.get_mut(&logical) else { return false };
        *count = count.saturating_sub(by);
        let last = *count == 0;
        if last {
            counts.remove(&logical);
        }
        last
    }
}

impl SuperVersion {
    /// The super version after a flush has ended these early files.
    pub(crate) fn early_without(&self, ended: &[Arc<EarlyFile>]) -> Arc<EarlyMap> {
        if ended.is_empty() { Arc::clone(&self.early) } else { self.early.with([], ended) }
    }
}

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

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::base::blob_ref::BlobRef;
use crate::base::edit::{BlobMeta, FileId};
use crate::base::file_header::FileHeader;
use crate::base::{Error, Result};
use crate::blob::early::EarlyWriter;
use crate::blob::format::VALUES_MAX;
use crate::block::BlockKind;
use crate::block::frame::Packed;
use crate::lsm::blobs::carry::{Carried, carry};
use crate::lsm::blobs::early::{Claim, EarlyFile, WriterState, Writing};
use crate::lsm::blobs::unsynced::Tail;
use crate::lsm::slot::lock;
use crate::lsm::super_version::SuperVersion;
use crate::lsm::tree::LsmTree;
use crate::lsm::written::Unnamed;
use crate::memtable::Memtable;
use crate::vfs::files::DataKind;

impl LsmTree {
    /// Whether a value of that length is written ahead of its commit.
    #[inline]
    pub(crate) fn takes_early(&self, len: usize) -> bool {
        len as u64 >= self.early.from()
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
        let writing = writing(&file)?;
        // Counted first: whoever looks finds the file in use from its first value on.
        self.early.count(file.id);
        let pointer = file.append(writing, &packed).inspect_err(|_| {
            self.early.uncount(file.id, 1); // the file stays: it takes values still
        })?;
        let end = file.written();
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
        let writer = EarlyWriter::create(Arc::clone(&file), file_id, id, context.env.now_ms()).map_err(|error| {
            context.graveyard.push(DataKind::Blob, id);
            error.in_file(files.path(id))
        })?;
        let tail = Tail::new(Arc::clone(&context.fs), Arc::clone(&file), files.path(id));
        let early = EarlyFile::begun(context.growing_handle(id, Some(file), file_id, writer.end()), tail, writer);
        self.show_early([Arc::clone(&early)]);
        Ok(early)
    }

    /// Lets readers follow pointers into these files.
    pub(crate) fn show_early(&self, files: impl IntoIterator<Item = Arc<EarlyFile>>) {
        self.current.replace(|now| SuperVersion { early: now.early.with(files), ..now.clone() });
    }

    /// Number, place and length of each early file.
    pub(crate) fn early_extents(&self) -> Vec<(FileId, PathBuf, u64)> {
        let early = self.current.with(|now| Arc::clone(&now.early));
        early.files().map(|file| (file.id, file.path(), file.written())).collect()
    }

    /// Makes the values of some claims durable.
    ///
    /// # Errors
    /// As it failed, if nobody else can have lost anything; then the values must be given up. Else `Poisoned`.
    pub(crate) fn sync_claims<'a>(&self, claims: impl IntoIterator<Item = &'a Claim>) -> Result<()> {
        let mut files: BTreeMap<FileId, (&Arc<EarlyFile>, Vec<&BlobRef>)> = BTreeMap::new();
        for claim in claims {
            files.entry(claim.file.id).or_insert((&claim.file, Vec::new())).1.push(&claim.pointer);
        }
        for (id, (file, pointers)) in files {
            let own = |synced: u64| {
                let behind = pointers.iter().filter(|pointer| pointer.offset >= synced);
                // The header is nobody's.
                behind.map(|pointer| pointer.stored).sum::<u64>() + if synced == 0 { FileHeader::LEN as u64 } else { 0 }
            };
            let synced = writing(file)?.tail.sync_own(own, || self.close_early(id));
            synced.inspect_err(|_| self.context.unsynced.forget(id))?;
        }
        Ok(())
    }

    /// No value goes to that file any more; others get one of their own.
    fn close_early(&self, id: FileId) {
        lock(&self.early.open).take_if(|open| open.id == id);
    }

    /// Ends an early file, durably; gives what an edit is to say of it. Where a sync has failed, what was durable
    /// before is carried over to a new file instead.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`: it can be tried again. `Poisoned` if a sync failed that stood for acknowledged values.
    pub(crate) fn end_early(&self, file: &EarlyFile, unnamed: &mut Unnamed, created_ms: u64) -> Result<BlobMeta> {
        self.close_early(file.id);
        let writing = writing(file)?;
        let mut state = lock(&writing.state);
        if let Some(meta) = &state.finished {
            return Ok(meta.clone());
        }
        if writing.tail.has_failed() {
            // The new file belongs to `unnamed`, which removes it if the flush fails: a later flush needs another one.
            return carry_over(file, &writing.tail, &state, unnamed, created_ms);
        }
        let meta = self.finish(file, &writing.tail, &mut state)?;
        state.finished = Some(meta.clone());
        Ok(meta)
    }

    fn finish(&self, file: &EarlyFile, tail: &Arc<Tail>, state: &mut WriterState) -> Result<BlobMeta> {
        let end = state.writer.end();
        let meta = state.writer.finish().map_err(|error| error.in_file(file.path()))?;
        tail.wrote(meta.size, file.id, &self.context.unsynced);
        let synced = tail.sync_own(|_| meta.size - end, || {});
        self.context.unsynced.forget(file.id);
        synced.map(|()| meta)
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
        if open.as_ref().is_some_and(|file| file.id == id) || self.early.is_counted(id) {
            return;
        }
        let dead = self.current.with(|now| now.early.get(id).map(Arc::clone));
        if let Some(dead) = dead.filter(|file| file.writing.is_some()) {
            self.let_go(&[dead]);
        }
    }

    fn let_go(&self, dead: &[Arc<EarlyFile>]) {
        self.current.replace(|now| SuperVersion { early: now.early.without(dead), ..now.clone() });
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
        let early = self.current.with(|now| Arc::clone(&now.early));
        let dead: Vec<_> = early.files().filter(|file| file.writing.is_some()).map(Arc::clone).collect();
        self.let_go(&dead);
    }
}

fn writing(file: &EarlyFile) -> Result<&Writing> {
    file.writing.as_ref().ok_or_else(|| Error::invalid("a blob file of an earlier life is only read"))
}

/// A new file with what was durable of one that can take no end.
fn carry_over(
    file: &EarlyFile,
    tail: &Tail,
    state: &WriterState,
    unnamed: &mut Unnamed,
    created_ms: u64,
) -> Result<BlobMeta> {
    let durable = tail.synced();
    let mut frames = state.writer.frames()?;
    frames.retain(|(_, frame)| frame.end().is_ok_and(|end| end <= durable));
    let meta = carry(unnamed, &[Carried { logical: file.id, file: file.handle.file(), frames }], created_ms)?;
    unnamed.sync_names()?;
    Ok(meta)
}

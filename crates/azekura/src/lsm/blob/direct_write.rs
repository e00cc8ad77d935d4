//! Large values that stand in a blob file before the log points to them.
//!
//! A value is written once: by the thread that brings it, to the open *early* file of its tree, ahead of the commit.
//! Log, memtable and tables hold the pointer. A file takes values until it is full or a flush writes tables that refer
//! to it; then it is finished and named by an edit, and is a blob file like others.
//!
//! Invariants:
//! - the bytes of a value are in the file, and the file in the super version and among the unsynced, before the
//!   pointer leaves [`LsmTree::write_blob_directly`];
//! - every pointer that is handed out is counted until tables have it, or nobody ever will: a file with counted
//!   pointers is neither dropped nor collected;
//! - what commits that failed have left in a file is stale.
//!
//! Locks, in the order in which they are taken: `open`, then one of `counts` and the turn of the super version. Readers
//! take none of them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::file_header::FileHeader;
use crate::base::version_edit::{BlobFileMeta, FileNumber};
use crate::base::{Error, Result};
use crate::blob::direct_writer::DirectBlobWriter;
use crate::blob::format::SECTION_VALUES_MAX;
use crate::block::BlockKind;
use crate::block::frame::CompressedBlock;
use crate::lsm::blob::carry::{BlobFramesToCopy, copy_blob_frames};
use crate::lsm::blob::direct_file::{DirectBlobAppendState, DirectBlobFile, DirectBlobWrite, DirectBlobWriterState};
use crate::lsm::blob::unsynced::BlobFileSyncState;
use crate::lsm::pending_outputs::PendingOutputs;
use crate::lsm::super_version::SuperVersion;
use crate::lsm::task_lock::lock;
use crate::lsm::tree::LsmTree;
use crate::memtable::Memtable;
use crate::vfs::open_files::DataFileKind;

impl LsmTree {
    /// Whether a value of that length is written ahead of its commit.
    #[inline]
    pub(crate) fn uses_direct_write(&self, len: usize) -> bool {
        len as u64 >= self.direct_blobs.threshold()
    }

    /// Writes a value to the open early file. The claim on it is to be given back with
    /// [`release`](LsmTree::release_direct_write) unless a memtable gets the pointer.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file; `Closed` after [`discard`](LsmTree::discard).
    pub(crate) fn write_blob_directly(&self, value: &[u8]) -> Result<DirectBlobWrite> {
        let separation = self.options().kv_separation.clone().unwrap_or_default();
        let packed = CompressedBlock::new(BlockKind::Blob, separation.compression, value);
        let mut open = lock(&self.direct_blobs.open_file);
        self.check_open()?;
        let file = match &*open {
            Some(file) => Arc::clone(file),
            None => {
                let file = self.create_direct_blob_file()?;
                *open = Some(Arc::clone(&file));
                file
            }
        };
        let writing = append_state_of(&file)?;
        // Counted first: whoever looks finds the file in use from its first value on.
        self.direct_blobs.add_pointer(file.id);
        let pointer = file.append(writing, &packed).inspect_err(|_| {
            self.direct_blobs.remove_pointers(file.id, 1); // the file stays: it takes values still
        })?;
        let end = file.written();
        writing.sync_state.record_write(end, file.id, &self.context.unsynced_blobs);
        if end >= separation.target_size || u64::from(pointer.ordinal) + 1 >= SECTION_VALUES_MAX {
            *open = None;
        }
        Ok(DirectBlobWrite { file, pointer })
    }

    /// Makes an early file and shows it to readers; the caller holds `open`.
    fn create_direct_blob_file(&self) -> Result<Arc<DirectBlobFile>> {
        let context = &self.context;
        let (id, files) = (context.new_file_id(), context.files.blob_files());
        let mut file_id = [0; 16];
        context.env.random(&mut file_id);
        let file = files.create_shared(id)?;
        let writer =
            DirectBlobWriter::create(Arc::clone(&file), file_id, id, context.env.now_ms()).map_err(|error| {
                context.obsolete_files.push(DataFileKind::Blob, id);
                error.in_file(files.path(id))
            })?;
        let tail = BlobFileSyncState::new(Arc::clone(&context.fs), Arc::clone(&file), files.path(id));
        let direct_blobs = DirectBlobFile::new_writable(
            context.growing_blob_handle(id, Some(file), file_id, writer.end_offset()),
            tail,
            writer,
        );
        self.add_direct_blob_files([Arc::clone(&direct_blobs)]);
        Ok(direct_blobs)
    }

    /// Lets readers follow pointers into these files.
    pub(crate) fn add_direct_blob_files(&self, files: impl IntoIterator<Item = Arc<DirectBlobFile>>) {
        self.current.replace(|now| SuperVersion { direct_blobs: now.direct_blobs.with_added(files), ..now.clone() });
    }

    /// Number, place and length of each early file.
    pub(crate) fn direct_blob_extents(&self) -> Vec<(FileNumber, PathBuf, u64)> {
        let direct_blobs = self.current.with(|now| Arc::clone(&now.direct_blobs));
        direct_blobs.files().map(|file| (file.id, file.path(), file.written())).collect()
    }

    /// Makes the values of some claims durable.
    ///
    /// # Errors
    /// As it failed, if nobody else can have lost anything; then the values must be given up. Else `Poisoned`.
    pub(crate) fn sync_direct_writes<'a>(&self, claims: impl IntoIterator<Item = &'a DirectBlobWrite>) -> Result<()> {
        let mut files: BTreeMap<FileNumber, (&Arc<DirectBlobFile>, Vec<&BlobPointer>)> = BTreeMap::new();
        for claim in claims {
            files.entry(claim.file.id).or_insert((&claim.file, Vec::new())).1.push(&claim.pointer);
        }
        for (id, (file, pointers)) in files {
            let own = |synced: u64| {
                let behind = pointers.iter().filter(|pointer| pointer.frame_offset >= synced);
                // The header is nobody's.
                behind.map(|pointer| pointer.frame_len).sum::<u64>()
                    + if synced == 0 { FileHeader::LEN as u64 } else { 0 }
            };
            let synced = append_state_of(file)?.sync_state.sync_for_commit(own, || self.close_direct_blob_file(id));
            synced.inspect_err(|_| self.context.unsynced_blobs.remove(id))?;
        }
        Ok(())
    }

    /// No value goes to that file any more; others get one of their own.
    fn close_direct_blob_file(&self, id: FileNumber) {
        lock(&self.direct_blobs.open_file).take_if(|open| open.id == id);
    }

    /// Ends an early file, durably; gives what an edit is to say of it. Where a sync has failed, what was durable
    /// before is carried over to a new file instead.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`: it can be tried again. `Poisoned` if a sync failed that stood for acknowledged values.
    pub(crate) fn finish_direct_blob_file(
        &self,
        file: &DirectBlobFile,
        pending: &mut PendingOutputs,
        created_ms: u64,
    ) -> Result<BlobFileMeta> {
        self.close_direct_blob_file(file.id);
        let writing = append_state_of(file)?;
        let mut state = lock(&writing.state);
        if let Some(meta) = &state.finished_meta {
            return Ok(meta.clone());
        }
        if writing.sync_state.has_failed() {
            // The new file belongs to `unnamed`, which removes it if the flush fails: a later flush needs another one.
            return copy_durable_frames(file, &writing.sync_state, &state, pending, created_ms);
        }
        let meta = self.write_direct_blob_footer(file, &writing.sync_state, &mut state)?;
        state.finished_meta = Some(meta.clone());
        Ok(meta)
    }

    fn write_direct_blob_footer(
        &self,
        file: &DirectBlobFile,
        tail: &Arc<BlobFileSyncState>,
        state: &mut DirectBlobWriterState,
    ) -> Result<BlobFileMeta> {
        let end = state.writer.end_offset();
        let meta = state.writer.finish().map_err(|error| error.in_file(file.path()))?;
        tail.record_write(meta.size, file.id, &self.context.unsynced_blobs);
        let synced = tail.sync_for_commit(|_| meta.size - end, || {});
        self.context.unsynced_blobs.remove(file.id);
        synced.map(|()| meta)
    }

    /// Takes the pointers of these memtables off the count; their flush is published.
    pub(crate) fn release_flushed_pointers(&self, memtables: &[Arc<Memtable>]) {
        for (logical, count) in memtables.iter().flat_map(|memtable| memtable.blob_pointer_counts()) {
            self.release_pointers(logical, count);
        }
    }

    /// Gives up a value: its commit failed.
    pub(crate) fn release_direct_write(&self, claim: &DirectBlobWrite) {
        self.release_pointers(claim.file.id, 1);
    }

    fn release_pointers(&self, logical: FileNumber, count: u64) {
        if self.direct_blobs.remove_pointers(logical, count) {
            self.drop_direct_blob_file_if_unused(logical);
        }
    }

    /// Lets go of a file that nothing points to and no edit names, unless it takes values still.
    fn drop_direct_blob_file_if_unused(&self, id: FileNumber) {
        let open = lock(&self.direct_blobs.open_file);
        if open.as_ref().is_some_and(|file| file.id == id) || self.direct_blobs.has_pointers(id) {
            return;
        }
        let dead = self.current.with(|now| now.direct_blobs.get(id).map(Arc::clone));
        if let Some(dead) = dead.filter(|file| file.append_state.is_some()) {
            self.drop_direct_blob_files(&[dead]);
        }
    }

    fn drop_direct_blob_files(&self, dead: &[Arc<DirectBlobFile>]) {
        self.current.replace(|now| SuperVersion { direct_blobs: now.direct_blobs.with_removed(dead), ..now.clone() });
        for file in dead {
            self.context.unsynced_blobs.remove(file.id);
            file.mark_obsolete();
        }
    }

    /// Lets go of all early files of which nothing will ever be read again: the partition was deleted, or the database
    /// has closed with nothing in memory. The files go to the graveyard with their last readers.
    pub(crate) fn abandon_direct_blob_files(&self) {
        let mut open = lock(&self.direct_blobs.open_file);
        *open = None;
        let direct_blobs = self.current.with(|now| Arc::clone(&now.direct_blobs));
        let dead: Vec<_> = direct_blobs.files().filter(|file| file.append_state.is_some()).map(Arc::clone).collect();
        self.drop_direct_blob_files(&dead);
    }
}

fn append_state_of(file: &DirectBlobFile) -> Result<&DirectBlobAppendState> {
    file.append_state.as_ref().ok_or_else(|| Error::invalid("a blob file of an earlier life is only read"))
}

/// A new file with what was durable of one that can take no end.
fn copy_durable_frames(
    file: &DirectBlobFile,
    tail: &BlobFileSyncState,
    state: &DirectBlobWriterState,
    pending: &mut PendingOutputs,
    created_ms: u64,
) -> Result<BlobFileMeta> {
    let durable = tail.synced();
    let mut frames = state.writer.frames()?;
    frames.retain(|(_, frame)| frame.end().is_ok_and(|end| end <= durable));
    let meta = copy_blob_frames(
        pending,
        &[BlobFramesToCopy { logical: file.id, file: file.handle.file(), frames }],
        created_ms,
    )?;
    pending.sync_dir()?;
    Ok(meta)
}

//! Direct blob writes: large values that are written to a blob file before the WAL points to them.
//!
//! The thread that commits a value writes it once, before the commit, to the open direct blob file of its tree. WAL,
//! memtable and tables contain the pointer. A file takes values until it is full or a flush writes tables that refer
//! to it. Then the file is finished and named by a version edit, and is an ordinary blob file.
//!
//! Invariants:
//! - Before [`LsmTree::write_blob_directly`] returns a pointer, the bytes of the value are in the file, and the file
//!   is in the super version and in the list of unsynced files.
//! - Every returned pointer is counted until tables contain it or no table will. A file with counted pointers is
//!   neither removed nor subject to blob GC.
//! - The values of failed commits are stale.
//!
//! Lock order: `open`, then one of `counts` and the lock of the super version. Readers take none of them.
//!
//! This file also carries the durable values of an unfinished file over to a new one, and adopts the direct blob
//! files of an earlier process at open.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::file_format::FileHeader;
use crate::base::manifest_state::ManifestState;
use crate::base::version_edit::{BlobFileMeta, FileNumber, PartitionId};
use crate::base::{Error, Result, SeqNo};
use crate::blob::format::SECTION_VALUES_MAX;
use crate::blob::reader::{BlobFile, BlobReadAhead};
use crate::blob::unfinished::{UnfinishedBlobFile, UnfinishedBlobFiles};
use crate::blob::writer::{BlobRewriteWriter, DirectBlobWriter};
use crate::block::frame::CompressedBlock;
use crate::block::{BlockCache, BlockHandle, BlockKind};
use crate::lsm::blob::direct_file::{
    BlobFileSyncState, DirectBlobAppendState, DirectBlobFile, DirectBlobWrite, DirectBlobWriterState,
};
use crate::lsm::blob::handle::BlobHandle;
use crate::lsm::pending_outputs::PendingOutputs;
use crate::lsm::super_version::SuperVersion;
use crate::lsm::table_handle::TreeContext;
use crate::lsm::task_lock::lock;
use crate::lsm::tree::LsmTree;
use crate::memtable::Memtable;
use crate::vfs::OpenMode;
use crate::vfs::open_files::{DataFileKind, DataFiles};

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
        // Counted first, so that the file counts as used from its first value on.
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
    /// The error of the sync, if no other commit can have lost data; then the values must be abandoned. Else
    /// `Poisoned`.
    pub(crate) fn sync_direct_writes<'a>(&self, claims: impl IntoIterator<Item = &'a DirectBlobWrite>) -> Result<()> {
        let mut files: BTreeMap<FileNumber, (&Arc<DirectBlobFile>, Vec<&BlobPointer>)> = BTreeMap::new();
        for claim in claims {
            files.entry(claim.file.id).or_insert((&claim.file, Vec::new())).1.push(&claim.pointer);
        }
        for (id, (file, pointers)) in files {
            let own = |synced: u64| {
                let behind = pointers.iter().filter(|pointer| pointer.frame_offset >= synced);
                // The header belongs to no value.
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

    /// Releases all direct blob files that will never be read again: the partition was deleted, or the database has
    /// closed with empty memtables. The files become obsolete with their last readers.
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

/// Values of a logical file that lies in `file`.
pub(crate) struct BlobFramesToCopy<'a> {
    pub(crate) logical: FileNumber,
    pub(crate) file: &'a BlobFile,
    /// By rising ordinals.
    pub(crate) frames: Vec<(u32, BlockHandle)>,
}

/// Copies values to a new file with a section for each logical file, durably but for its name.
///
/// # Errors
/// Those of reading and writing.
pub(crate) fn copy_blob_frames(
    pending: &mut PendingOutputs,
    from: &[BlobFramesToCopy<'_>],
    created_ms: u64,
) -> Result<BlobFileMeta> {
    let new = pending.create(DataFileKind::Blob)?;
    let mut writer = BlobRewriteWriter::create(Arc::clone(&new.file), new.file_id, created_ms);
    for BlobFramesToCopy { logical, file, frames } in from {
        writer.begin_section(*logical);
        let mut ahead = BlobReadAhead::adaptive();
        for &(ordinal, frame) in frames {
            file.with_frame(frame, &mut ahead, |frame| writer.copy_value(ordinal, frame))?;
        }
    }
    new.finish(|id| writer.finish(id))
}

/// A file with values carried over is finished at this size, in bytes.
const COPIED_FILE_TARGET_SIZE: u64 = 64 << 20;

/// The early files of an earlier life, as the log that is being read points to them.
pub(crate) struct RecoveredDirectBlobs {
    unsealed: UnfinishedBlobFiles,
}

impl RecoveredDirectBlobs {
    /// `files` are tables.
    pub(crate) fn new(
        manifest_state: &ManifestState,
        files: &DataFiles,
        cache: &Arc<BlockCache>,
    ) -> RecoveredDirectBlobs {
        RecoveredDirectBlobs {
            unsealed: UnfinishedBlobFiles::new(manifest_state, files.blob_files(), Arc::clone(cache)),
        }
    }

    /// See [`UnfinishedBlobFiles::check_commit`].
    ///
    /// # Errors
    /// Those of reading.
    pub(crate) fn check(&mut self, pointers: &[(PartitionId, SeqNo, BlobPointer)]) -> Result<Option<Error>> {
        self.unsealed.check_commit(pointers)
    }

    /// Whether the log points into that file.
    pub(crate) fn contains(&self, id: FileNumber) -> bool {
        self.unsealed.unfinished_files().any(|(found, _)| found == id)
    }

    /// See [`UnfinishedBlobFiles::next_file_number`].
    pub(crate) fn next_file(&self) -> u64 {
        self.unsealed.next_file_number()
    }

    /// Makes blob files like others of them, durably, for the manifest to name. What is whole is taken as it is;
    /// values of others are carried over to new files, because nothing is appended to a file of an earlier life.
    /// `context` is that of any tree.
    ///
    /// # Errors
    /// Those of reading and writing; nothing is named yet, so the next open begins again.
    pub(crate) fn adopt(
        &self,
        context: &Arc<TreeContext>,
        created_ms: u64,
    ) -> Result<Vec<(PartitionId, BlobFileMeta)>> {
        let (mut taken, mut unneeded) = (Vec::new(), Vec::new());
        let mut torn: BTreeMap<PartitionId, Vec<(FileNumber, &UnfinishedBlobFile)>> = BTreeMap::new();
        for (id, found) in self.unsealed.unfinished_files() {
            match complete_file_meta(context, id, found) {
                Some(meta) => {
                    context.fs.open(&found.file.path(), OpenMode::Write)?.sync_data()?;
                    taken.push((found.partition, meta));
                }
                None => {
                    unneeded.push(id);
                    torn.entry(found.partition).or_default().push((id, found));
                }
            }
        }
        let mut pending = PendingOutputs::new(Arc::clone(context));
        for (partition, files) in torn {
            let mut group: Vec<BlobFramesToCopy<'_>> = Vec::new();
            let mut bytes = 0u64;
            for (logical, found) in files {
                if bytes >= COPIED_FILE_TARGET_SIZE {
                    taken.push((partition, copy_blob_frames(&mut pending, &std::mem::take(&mut group), created_ms)?));
                    bytes = 0;
                }
                let frames: Vec<(u32, BlockHandle)> = found.frames.iter().map(|(at, frame)| (*at, *frame)).collect();
                group.push(BlobFramesToCopy { logical, file: &found.file, frames });
                bytes = bytes.saturating_add(found.referenced_bytes());
            }
            taken.push((partition, copy_blob_frames(&mut pending, &group, created_ms)?));
        }
        if !taken.is_empty() {
            pending.sync_dir()?;
        }
        pending.release();
        // They are removed as soon as the manifest is written; one that is open would keep its space.
        unneeded.into_iter().for_each(|id| context.files.blob_files().close(id));
        Ok(taken)
    }

    /// The files unchanged, for a read-only open.
    pub(crate) fn open_read_only(&self, context: &TreeContext) -> Vec<(PartitionId, Arc<DirectBlobFile>)> {
        let direct_blobs = self.unsealed.unfinished_files().map(|(id, found)| {
            let (values, bytes) = (found.frames.len() as u64, found.referenced_bytes());
            let handle = context.growing_blob_handle(id, None, found.file_id, found.file.size());
            (found.partition, DirectBlobFile::new_read_only(handle, values, bytes))
        });
        direct_blobs.collect()
    }
}

/// What the manifest is to say of a file that has its end, and all that is pointed to.
fn complete_file_meta(context: &TreeContext, id: FileNumber, found: &UnfinishedBlobFile) -> Option<BlobFileMeta> {
    let files = context.files.blob_files();
    let meta = BlobFile::read_meta(&files, &context.cache, id).ok()?;
    let file = BlobHandle::new(meta.clone(), files, Arc::clone(&context.cache), Arc::clone(&context.obsolete_files));
    let opened = file.file().head().ok()?;
    let section = opened.metaindex.section(id).filter(|section| !section.rewritten)?;
    let alone = meta.sections.len() == 1;
    let vouched = found.frames.iter().all(|(at, frame)| section.check_pointer(*at, *frame).is_some());
    (alone && vouched).then_some(meta)
}

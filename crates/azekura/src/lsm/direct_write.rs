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
//! Lock order: `open_file`, then one of `pointer_counts` and the lock under which the super version is replaced.
//! Readers take none of them.
//!
//! This file also copies the durable values of an unfinished file to a new one, and adopts the direct blob files of an
//! earlier process at open.

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
    /// Whether a value of this length is a direct write.
    #[inline]
    pub(crate) fn uses_direct_write(&self, len: usize) -> bool {
        len as u64 >= self.direct_blobs.threshold()
    }

    /// Writes a value to the open direct blob file. The caller releases the write with
    /// [`release_direct_write`](LsmTree::release_direct_write) unless a memtable gets the pointer.
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
        // Counted before the write, so that the file is in use from its first value on.
        self.direct_blobs.add_pointer(file.id);
        let pointer = file.append(writing, &packed).inspect_err(|_| {
            self.direct_blobs.remove_pointers(file.id, 1); // the file stays open for values
        })?;
        let end = file.written();
        writing.sync_state.record_write(end, file.id, &self.context.unsynced_blobs);
        if end >= separation.target_size || u64::from(pointer.ordinal) + 1 >= SECTION_VALUES_MAX {
            *open = None;
        }
        Ok(DirectBlobWrite { file, pointer })
    }

    /// Creates a direct blob file and adds it to the super version. The caller holds `open_file`.
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

    /// Adds files to the super version, so that readers can follow pointers into them.
    pub(crate) fn add_direct_blob_files(&self, files: impl IntoIterator<Item = Arc<DirectBlobFile>>) {
        self.current.replace(|now| SuperVersion { direct_blobs: now.direct_blobs.with_added(files), ..now.clone() });
    }

    /// Number, path and length of each direct blob file.
    pub(crate) fn direct_blob_extents(&self) -> Vec<(FileNumber, PathBuf, u64)> {
        let direct_blobs = self.current.with(|now| Arc::clone(&now.direct_blobs));
        direct_blobs.files().map(|file| (file.id, file.path(), file.written())).collect()
    }

    /// Makes the values of some direct writes durable.
    ///
    /// # Errors
    /// The error of the sync, if no other commit can have lost data; then the values must be abandoned. Else
    /// `Poisoned`.
    pub(crate) fn sync_direct_writes<'a>(&self, writes: impl IntoIterator<Item = &'a DirectBlobWrite>) -> Result<()> {
        let mut files: BTreeMap<FileNumber, (&Arc<DirectBlobFile>, Vec<&BlobPointer>)> = BTreeMap::new();
        for write in writes {
            files.entry(write.file.id).or_insert((&write.file, Vec::new())).1.push(&write.pointer);
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

    /// Closes a file for further values. The next value gets a new file.
    fn close_direct_blob_file(&self, id: FileNumber) {
        lock(&self.direct_blobs.open_file).take_if(|open| open.id == id);
    }

    /// Finishes a direct blob file durably, and returns its metadata for the edit. If a sync of the file has failed,
    /// copies its durable values to a new file instead.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`: the call can be repeated. `Poisoned` if a failed sync covered acknowledged values.
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
            // The new file belongs to `pending`, which removes it if the flush fails. A later flush creates another
            // one.
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

    /// Subtracts the pointers of these memtables from the counts, after their flush is published.
    pub(crate) fn release_flushed_pointers(&self, memtables: &[Arc<Memtable>]) {
        for (logical, count) in memtables.iter().flat_map(|memtable| memtable.blob_pointer_counts()) {
            self.release_pointers(logical, count);
        }
    }

    /// Releases a direct write whose commit failed.
    pub(crate) fn release_direct_write(&self, write: &DirectBlobWrite) {
        self.release_pointers(write.file.id, 1);
    }

    fn release_pointers(&self, logical: FileNumber, count: u64) {
        if self.direct_blobs.remove_pointers(logical, count) {
            self.drop_direct_blob_file_if_unused(logical);
        }
    }

    /// Drops a file that has no pointers and that no edit names, unless it is open for values.
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
    file.append_state.as_ref().ok_or_else(|| Error::invalid("a blob file of an earlier process is read-only"))
}

/// Copies the durable values of a file that cannot be finished to a new file.
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

/// Values to be copied of a logical file that is stored in `file`.
pub(crate) struct BlobFramesToCopy<'a> {
    pub(crate) logical: FileNumber,
    pub(crate) file: &'a BlobFile,
    /// By ascending ordinals.
    pub(crate) frames: Vec<(u32, BlockHandle)>,
}

/// Copies values to a new file with a section for each logical file. The file is durable, except for its name.
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

/// Size in bytes at which a file of copied values is finished.
const COPIED_FILE_TARGET_SIZE: u64 = 64 << 20;

/// The direct blob files of an earlier process that the records of the WAL point into.
pub(crate) struct RecoveredDirectBlobs {
    unfinished: UnfinishedBlobFiles,
}

impl RecoveredDirectBlobs {
    /// `files`: the tables of the database.
    pub(crate) fn new(
        manifest_state: &ManifestState,
        files: &DataFiles,
        cache: &Arc<BlockCache>,
    ) -> RecoveredDirectBlobs {
        RecoveredDirectBlobs {
            unfinished: UnfinishedBlobFiles::new(manifest_state, files.blob_files(), Arc::clone(cache)),
        }
    }

    /// See [`UnfinishedBlobFiles::check_commit`].
    ///
    /// # Errors
    /// Those of reading.
    pub(crate) fn check(&mut self, pointers: &[(PartitionId, SeqNo, BlobPointer)]) -> Result<Option<Error>> {
        self.unfinished.check_commit(pointers)
    }

    /// Whether the WAL points into this file.
    pub(crate) fn contains(&self, id: FileNumber) -> bool {
        self.unfinished.unfinished_files().any(|(found, _)| found == id)
    }

    /// See [`UnfinishedBlobFiles::next_file_number`].
    pub(crate) fn next_file(&self) -> u64 {
        self.unfinished.next_file_number()
    }

    /// Makes ordinary blob files of them, durably, so that the manifest can name them. Complete files are used as they
    /// are. The values of incomplete files are copied to new files, because nothing is appended to a file of an earlier
    /// process. `context` may be the context of any tree.
    ///
    /// # Errors
    /// Those of reading and writing. The manifest names no new file then, so the next open starts again.
    pub(crate) fn adopt(
        &self,
        context: &Arc<TreeContext>,
        created_ms: u64,
    ) -> Result<Vec<(PartitionId, BlobFileMeta)>> {
        let (mut taken, mut unneeded) = (Vec::new(), Vec::new());
        let mut torn: BTreeMap<PartitionId, Vec<(FileNumber, &UnfinishedBlobFile)>> = BTreeMap::new();
        for (id, found) in self.unfinished.unfinished_files() {
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
        // The incomplete files are removed once the manifest is written. An open handle would keep their space
        // allocated.
        unneeded.into_iter().for_each(|id| context.files.blob_files().close(id));
        Ok(taken)
    }

    /// The files as they are, for a read-only open.
    pub(crate) fn open_read_only(&self, context: &TreeContext) -> Vec<(PartitionId, Arc<DirectBlobFile>)> {
        let direct_blobs = self.unfinished.unfinished_files().map(|(id, found)| {
            let (values, bytes) = (found.frames.len() as u64, found.referenced_bytes());
            let handle = context.growing_blob_handle(id, None, found.file_id, found.file.size());
            (found.partition, DirectBlobFile::new_read_only(handle, values, bytes))
        });
        direct_blobs.collect()
    }
}

/// The metadata for the manifest, if the file is complete and contains every value that the WAL points to.
fn complete_file_meta(context: &TreeContext, id: FileNumber, found: &UnfinishedBlobFile) -> Option<BlobFileMeta> {
    let files = context.files.blob_files();
    let meta = BlobFile::read_meta(&files, &context.cache, id).ok()?;
    let file = BlobHandle::new(meta.clone(), files, Arc::clone(&context.cache), Arc::clone(&context.obsolete_files));
    let opened = file.file().head().ok()?;
    let section = opened.metaindex.section(id).filter(|section| !section.rewritten)?;
    let alone = meta.sections.len() == 1;
    let has_all_values = found.frames.iter().all(|(at, frame)| section.check_pointer(*at, *frame).is_some());
    (alone && has_all_values).then_some(meta)
}

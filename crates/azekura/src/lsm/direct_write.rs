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
//! Lock order: `open_file`, then one of `counted_pointers` and the lock under which the super version is replaced.
//! Readers take none of them.
//!
//! This file also copies the durable values of an unfinished file to a new one, and adopts the direct blob files of an
//! earlier process at open.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, MutexGuard};

use crate::base::Result;
use crate::base::blob_pointer::BlobPointer;
use crate::base::sync::lock;
use crate::base::version_edit::{BlobFileMeta, FileNumber, PartitionId};
use crate::blob::format::SECTION_VALUES_MAX;
use crate::blob::reader::{BlobFile, BlobReadAhead};
use crate::blob::unfinished::{UnfinishedBlobFile, UnfinishedBlobFiles};
use crate::blob::writer::DirectBlobWriter;
use crate::block::frame::CompressedBlock;
use crate::block::{BlockHandle, BlockKind};
use crate::lsm::direct_file::{DirectBlobAppender, DirectBlobFile, DirectBlobFiles, without_files};
use crate::lsm::output::PendingOutputs;
use crate::lsm::read::SuperVersion;
use crate::lsm::tree::LsmTree;
use crate::lsm::tree_context::TreeContext;
use crate::vfs::OpenMode;
use crate::vfs::open_files::DataFileKind;

/// An open direct blob file that has only stale values stays open for values up to this length in bytes.
const STALE_OPEN_FILE_LEN: u64 = 1 << 20;

impl LsmTree {
    /// Whether a value of `len` bytes is written directly now. A small one begins no file if the database has many.
    pub(crate) fn may_write_directly(&self, len: usize, synced: bool) -> bool {
        let direct = &self.direct_blobs;
        direct.writes_directly(len, synced)
            && (direct.writes_directly(len, true)
                || !self.context.unsynced_blobs.has_many_open_files()
                || lock(&direct.open_file).is_some())
    }

    /// Writes a value to the open direct blob file. The caller [releases](LsmTree::release_pointers) the pointer unless
    /// a memtable gets it.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file; `Closed` after [`discard`](crate::engine::Engine::discard).
    pub(crate) fn write_blob_directly(&self, value: &[u8]) -> Result<BlobPointer> {
        let separation = self.options().kv_separation.clone().unwrap_or_default();
        let packed = CompressedBlock::new(BlockKind::Blob, separation.compression, value);
        let mut open = lock(&self.direct_blobs.open_file);
        self.check_open()?;
        if let Some(failed) = open.take_if(|file| file.appender().is_ok_and(|appender| appender.has_failed()))
            && !self.direct_blobs.files_with_pointers().contains(&failed.id)
        {
            self.drop_direct_blob_files(&[failed]); // no release of a pointer will do it
        }
        if open.is_none() {
            *open = Some(self.create_direct_blob_file(&open)?);
        }
        let file = Arc::clone(open.as_ref().expect("it was created above"));
        // Counted before the write, so that the file is in use from its first value on.
        self.direct_blobs.add_staged_pointer(&file);
        let pointer = file.append(&packed, &self.context.unsynced_blobs).inspect_err(|_| {
            self.direct_blobs.remove_pointers(file.id, 1); // the file stays open for values
        })?;
        if file.written() >= separation.blob_file_target_size || u64::from(pointer.ordinal) + 1 >= SECTION_VALUES_MAX {
            *open = None;
        }
        Ok(pointer)
    }

    /// Creates a direct blob file and adds it to the super version. `open`: the guard of `open_file`.
    fn create_direct_blob_file(
        &self,
        open: &MutexGuard<'_, Option<Arc<DirectBlobFile>>>,
    ) -> Result<Arc<DirectBlobFile>> {
        debug_assert!(open.is_none(), "a tree has one direct blob file that is open for values");
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
        let handle = context.growing_blob_handle(id, Some(Arc::clone(&file)), file_id, writer.end_offset());
        let appender =
            DirectBlobAppender::new(Arc::clone(&context.fs), file, files.path(id), writer, &context.unsynced_blobs);
        let direct_blobs = DirectBlobFile::new(handle, 0, 0, Some(appender));
        self.add_direct_blob_files([Arc::clone(&direct_blobs)]);
        Ok(direct_blobs)
    }

    /// Adds files to the super version, so that readers can follow pointers into them.
    pub(crate) fn add_direct_blob_files(&self, files: impl IntoIterator<Item = Arc<DirectBlobFile>>) {
        self.current.replace(|now| {
            let mut direct_blobs = DirectBlobFiles::clone(&now.direct_blobs);
            direct_blobs.extend(files.into_iter().map(|file| (file.id, file)));
            SuperVersion { direct_blobs: Arc::new(direct_blobs), ..now.clone() }
        });
    }

    /// Number, path and length of each direct blob file.
    pub(crate) fn direct_blob_extents(&self) -> Vec<(FileNumber, PathBuf, u64)> {
        let direct_blobs = self.current.with(|now| Arc::clone(&now.direct_blobs));
        direct_blobs.values().map(|file| (file.id, file.path(), file.written())).collect()
    }

    /// Makes some values durable whose pointers are counted and not in the WAL.
    ///
    /// # Errors
    /// The error of the sync, if no commit can have lost data; then the values must be abandoned. Else `Poisoned`.
    pub(crate) fn sync_staged_values(&self, pointers: impl Iterator<Item = BlobPointer>) -> Result<()> {
        let mut ends: BTreeMap<FileNumber, BlobPointer> = BTreeMap::new();
        for pointer in pointers {
            let last = ends.entry(pointer.logical_file).or_insert(pointer);
            if pointer.frame_end() > last.frame_end() {
                *last = pointer;
            }
        }
        for (id, last) in ends {
            let appender = self.direct_blobs.appender_of(&last)?;
            if appender.synced() < last.frame_end() {
                let close = || self.close_direct_blob_file(id);
                appender.sync_for_commit(id, &self.context.unsynced_blobs, close)?;
            }
        }
        Ok(())
    }

    /// Closes a file for further values. The next value gets a new file.
    fn close_direct_blob_file(&self, id: FileNumber) {
        lock(&self.direct_blobs.open_file).take_if(|open| open.id == id);
    }

    /// Finishes a direct blob file durably, and adds it to `outputs`. If a sync of the file has failed, copies its
    /// durable values to a new file of `outputs` instead.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`: the call can be repeated. `Poisoned` if a failed sync covered acknowledged values.
    pub(crate) fn finish_direct_blob_file(&self, file: &DirectBlobFile, outputs: &mut PendingOutputs) -> Result<()> {
        self.close_direct_blob_file(file.id);
        let appender = file.appender()?;
        let mut state = lock(&appender.state);
        if state.finished_meta.is_none() {
            if appender.has_failed() {
                // `outputs` removes the new file if the flush fails. A later flush creates another one.
                let durable = appender.synced();
                let mut frames = state.writer.frames()?;
                frames.retain(|(_, frame)| frame.end().is_ok_and(|end| end <= durable));
                copy_blob_frames(outputs, file.id, file.handle.file(), frames)?;
                return outputs.finish();
            }
            let meta = state.writer.finish().map_err(|error| error.in_file(file.path()))?;
            appender.record_write(meta.size, file.id, &self.context.unsynced_blobs);
            appender.sync_for_commit(file.id, &self.context.unsynced_blobs, || {})?;
            self.context.unsynced_blobs.remove(file.id);
            state.finished_meta = Some(meta);
        }
        outputs.blobs.extend(state.finished_meta.clone());
        Ok(())
    }

    /// Subtracts `count` pointers from those of a file. Drops the file if it has no pointers then and no edit names it,
    /// unless it is open for values and short.
    pub(crate) fn release_pointers(&self, id: FileNumber, count: u64) {
        if !self.direct_blobs.remove_pointers(id, count) {
            return;
        }
        let mut open = lock(&self.direct_blobs.open_file);
        let is_short = |file: &DirectBlobFile| file.written() < STALE_OPEN_FILE_LEN;
        let stays_open = open.as_ref().is_some_and(|file| file.id == id && is_short(file));
        if stays_open || self.direct_blobs.files_with_pointers().contains(&id) {
            return;
        }
        open.take_if(|file| file.id == id);
        let dead = self.current.with(|now| now.direct_blobs.get(&id).map(Arc::clone));
        if let Some(dead) = dead.filter(|file| file.appender.is_some()) {
            self.drop_direct_blob_files(&[dead]);
        }
    }

    fn drop_direct_blob_files(&self, dead: &[Arc<DirectBlobFile>]) {
        self.current
            .replace(|now| SuperVersion { direct_blobs: without_files(&now.direct_blobs, dead), ..now.clone() });
        for file in dead {
            self.context.unsynced_blobs.remove(file.id);
            file.handle.mark_obsolete();
        }
    }

    /// Drops the direct blob file that is open for values if it has no pointers. The next value gets a new file.
    pub(crate) fn drop_unused_direct_blob_file(&self) {
        let mut open = lock(&self.direct_blobs.open_file);
        let counted = self.direct_blobs.files_with_pointers();
        if let Some(unused) = open.take_if(|file| !counted.contains(&file.id)) {
            self.drop_direct_blob_files(&[unused]);
        }
    }

    /// Releases all direct blob files that will never be read again: the partition was deleted, or the database has
    /// closed with empty memtables. The files become obsolete with their last readers.
    pub(crate) fn abandon_direct_blob_files(&self) {
        let mut open = lock(&self.direct_blobs.open_file);
        *open = None;
        let direct_blobs = self.current.with(|now| Arc::clone(&now.direct_blobs));
        let dead: Vec<_> = direct_blobs.values().filter(|file| file.appender.is_some()).map(Arc::clone).collect();
        self.drop_direct_blob_files(&dead);
        // Last, because the end of a refused commit needs the file until no sync of the WAL syncs it.
        self.direct_blobs.forget_files();
    }
}

/// Copies the `frames` of a logical file that is stored in `from`, by ascending ordinals, to the blob file that
/// `outputs` is writing.
///
/// # Errors
/// Those of reading and writing.
fn copy_blob_frames(
    outputs: &mut PendingOutputs,
    logical: FileNumber,
    from: &BlobFile,
    frames: impl IntoIterator<Item = (u32, BlockHandle)>,
) -> Result<()> {
    let writer = outputs.blob_writer()?;
    writer.begin_section(logical);
    let mut read_ahead = BlobReadAhead::adaptive();
    for (ordinal, frame) in frames {
        from.with_frame(frame, &mut read_ahead, |frame| writer.copy_value(ordinal, frame))?;
    }
    Ok(())
}

/// Size in bytes at which a file of copied values is finished.
const COPIED_FILE_TARGET_SIZE: u64 = 64 << 20;

/// What [`UnfinishedBlobFiles::adopt`] does with incomplete files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IncompleteFiles {
    /// Copies their values to new files, because nothing is appended to a file of an earlier process.
    Copy,
    /// Finishes them in place, because the disk is full. See [`UnfinishedBlobFile::finish_in_place`].
    FinishInPlace { wal_is_damaged: bool },
}

impl UnfinishedBlobFiles {
    /// Makes ordinary blob files of them, durably, so that the manifest can name them. `context` may be the context of
    /// any tree.
    ///
    /// A file with a footer is no exception: the sync that finished it may have failed, and have left clean pages that
    /// were never written.
    ///
    /// # Errors
    /// Those of reading and writing. The manifest names no new file then, so the next open starts again. New files
    /// are then obsolete.
    pub(crate) fn adopt(
        &self,
        context: &Arc<TreeContext>,
        created_ms: u64,
        incomplete: IncompleteFiles,
    ) -> Result<Vec<(PartitionId, BlobFileMeta)>> {
        let (mut adopted, mut unneeded) = (Vec::new(), Vec::new());
        let mut torn: BTreeMap<PartitionId, Vec<(FileNumber, &UnfinishedBlobFile)>> = BTreeMap::new();
        for (id, found) in self.unfinished_files() {
            if let IncompleteFiles::FinishInPlace { wal_is_damaged } = incomplete {
                let file = context.fs.open(&found.file.path(), OpenMode::Write)?;
                let meta = found.finish_in_place(id, file, created_ms, wal_is_damaged);
                adopted.push((found.partition, meta.map_err(|error| error.in_file(found.file.path()))?));
                context.files.blob_files().close(id); // the handle was opened for a file of another length
            } else {
                unneeded.push(id);
                torn.entry(found.partition).or_default().push((id, found));
            }
        }
        let mut outputs = PendingOutputs::new(context, created_ms);
        for (partition, files) in torn {
            for (logical, found) in files {
                outputs.finish_blob_file(|file| file.written_bytes() >= COPIED_FILE_TARGET_SIZE)?;
                copy_blob_frames(
                    &mut outputs,
                    logical,
                    &found.file,
                    found.frames.iter().map(|(at, frame)| (*at, *frame)),
                )?;
            }
            outputs.finish_blob_file(|_| true)?;
            adopted.extend(outputs.blobs.drain(..).map(|meta| (partition, meta)));
        }
        if !adopted.is_empty() {
            context.fs.sync_dir(&context.dir)?; // for the names of files that were finished in place too
        }
        outputs.keep();
        // The incomplete files are removed once the manifest is written. An open handle would keep their space
        // allocated.
        unneeded.into_iter().for_each(|id| context.files.blob_files().close(id));
        Ok(adopted)
    }

    /// The files as they are, for a read-only open.
    pub(crate) fn open_read_only(&self, context: &TreeContext) -> Vec<(PartitionId, Arc<DirectBlobFile>)> {
        let direct_blobs = self.unfinished_files().map(|(id, found)| {
            let (values, bytes) = (found.frames.len() as u64, found.referenced_bytes());
            let handle = context.growing_blob_handle(id, None, found.file_id, found.file.size());
            (found.partition, DirectBlobFile::new(handle, values, bytes, None))
        });
        direct_blobs.collect()
    }
}

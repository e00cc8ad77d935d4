//! What an earlier life has left in early files: taken over when the database is opened.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::manifest_state::ManifestState;
use crate::base::version_edit::{BlobFileMeta, FileNumber, PartitionId};
use crate::base::{Error, Result, SeqNo};
use crate::blob::reader::BlobFile;
use crate::blob::unfinished::{UnfinishedBlobFile, UnfinishedBlobFiles};
use crate::block::{BlockCache, BlockHandle};
use crate::lsm::blob::carry::{BlobFramesToCopy, copy_blob_frames};
use crate::lsm::blob::direct_file::DirectBlobFile;
use crate::lsm::blob::handle::BlobHandle;
use crate::lsm::pending_outputs::PendingOutputs;
use crate::lsm::table_handle::TreeContext;
use crate::vfs::OpenMode;
use crate::vfs::open_files::DataFiles;

/// A file with values carried over is ended once it has so many bytes of them.
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

    /// The files as they are, for one who may not write.
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

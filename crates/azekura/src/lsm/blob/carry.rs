//! Carrying values over to a new blob file, as they are stored.

use std::sync::Arc;

use crate::base::Result;
use crate::base::version_edit::{BlobFileMeta, FileNumber};
use crate::blob::reader::{BlobFile, BlobReadAhead};
use crate::blob::writer::BlobRewriteWriter;
use crate::block::BlockHandle;
use crate::lsm::pending_outputs::PendingOutputs;
use crate::vfs::open_files::DataFileKind;

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

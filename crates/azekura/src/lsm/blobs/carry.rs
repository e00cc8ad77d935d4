//! Carrying values over to a new blob file, as they are stored.

use std::sync::Arc;

use crate::base::Result;
use crate::base::edit::{BlobMeta, FileId};
use crate::blob::reader::{BlobFile, ValuesAhead};
use crate::blob::writer::RewriteWriter;
use crate::block::BlockHandle;
use crate::lsm::written::Unnamed;
use crate::vfs::files::DataKind;

/// Values of a logical file that lies in `file`.
pub(crate) struct Carried<'a> {
    pub(crate) logical: FileId,
    pub(crate) file: &'a BlobFile,
    /// By rising ordinals.
    pub(crate) frames: Vec<(u32, BlockHandle)>,
}

/// Copies values to a new file with a section for each logical file, durably but for its name.
///
/// # Errors
/// Those of reading and writing.
pub(crate) fn carry(unnamed: &mut Unnamed, from: &[Carried<'_>], created_ms: u64) -> Result<BlobMeta> {
    let new = unnamed.create(DataKind::Blob)?;
    let mut writer = RewriteWriter::create(Arc::clone(&new.file), new.file_id, created_ms);
    for Carried { logical, file, frames } in from {
        writer.begin_section(*logical);
        let mut ahead = ValuesAhead::adaptive();
        for &(ordinal, frame) in frames {
            file.with_frame(frame, &mut ahead, |frame| writer.copy(ordinal, frame))?;
        }
    }
    new.end(|id| writer.finish(id))
}

//! A blob file that is pointed to before it is finished.

use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::file_header::{FileHeader, FileKind};
use crate::base::version_edit::{BlobFileMeta, FileNumber};
use crate::base::{Error, Result};
use crate::blob::format::SECTION_VALUES_MAX;
use crate::blob::writer::BlobIndexBuilder;
use crate::block::BlockHandle;
use crate::block::frame::{BlockFrame, FRAME_HEADER_LEN};
use crate::vfs::File;

/// Writes new values, each of which stands in the file once [`append`](DirectBlobWriter::append) returns: it survives
/// the death of the process from then on, and power loss once the caller has synced the file. The same bytes come out
/// as of a [`BlobWriter`](crate::blob::writer::BlobWriter). One thread at a time.
///
/// A failed write leaves the values before it as they were, and the next one goes where it would have gone.
pub(crate) struct DirectBlobWriter {
    file: Arc<dyn File>,
    file_id: [u8; 16],
    logical: FileNumber,
    index_builder: BlobIndexBuilder,
    /// Behind the last value.
    end_offset: u64,
    /// Whether the file may be longer than what was written whole.
    has_partial_write: bool,
}

impl DirectBlobWriter {
    /// Begins the file of that number, which is empty and not written past the cache of the system. `file_id` is
    /// random and new.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file, which is then of no use.
    pub(crate) fn create(
        file: Arc<dyn File>,
        file_id: [u8; 16],
        logical: FileNumber,
        created_ms: u64,
    ) -> Result<DirectBlobWriter> {
        file.write_at(&FileHeader { kind: FileKind::Blob, file_id }.encode(), 0)?;
        let (mut index, end) = (BlobIndexBuilder::new(created_ms), FileHeader::LEN as u64);
        index.begin_section(logical, false, end);
        Ok(DirectBlobWriter { file, file_id, logical, index_builder: index, end_offset: end, has_partial_write: false })
    }

    /// Puts a value, as it is to be stored, behind those before it.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file; `Invalid` behind the last ordinal there is.
    pub(crate) fn append(&mut self, frame: &BlockFrame<'_>) -> Result<BlobPointer> {
        let ordinal = self.value_count();
        if ordinal >= SECTION_VALUES_MAX {
            return Err(Error::invalid("blob file holds as many values as it can"));
        }
        let header = frame.header(&self.file_id, self.end_offset);
        let body = self.end_offset + FRAME_HEADER_LEN as u64;
        let written =
            self.file.write_at(&header, self.end_offset).and_then(|()| self.file.write_at(frame.stored, body));
        written.inspect_err(|_| self.has_partial_write = true)?;
        let (ordinal, written) = (ordinal as u32, BlockHandle { offset: self.end_offset, len: frame.len() });
        self.index_builder.add_frame(ordinal, written);
        self.end_offset += written.len;
        // Values are at most 4 GiB - 1, so the cast loses nothing.
        let len = frame.raw_len as u32;
        Ok(BlobPointer {
            logical_file: self.logical,
            ordinal,
            frame_offset: written.offset,
            frame_len: written.len,
            value_len: len,
        })
    }

    /// Values so far.
    pub(crate) fn value_count(&self) -> u64 {
        self.index_builder.open_section().value_count
    }

    /// Where the last value ends.
    pub(crate) fn end_offset(&self) -> u64 {
        self.end_offset
    }

    /// Where each value lies.
    ///
    /// # Errors
    /// None, if what was written is what is in memory.
    pub(crate) fn frames(&self) -> Result<Vec<(u32, BlockHandle)>> {
        self.index_builder.section_frames()
    }

    /// Writes the rest, after which no value may follow; after a failure it may be tried again. The caller syncs the
    /// file and its directory.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file; its values stay readable.
    pub(crate) fn finish(&mut self) -> Result<BlobFileMeta> {
        let (tail, sections) = self.index_builder.encode_tail(&self.file_id, self.end_offset);
        let size = self.end_offset + tail.len() as u64;
        if self.has_partial_write {
            self.file.set_length(self.end_offset)?;
            self.has_partial_write = false;
        }
        self.file.write_at(&tail, self.end_offset).inspect_err(|_| self.has_partial_write = true)?;
        Ok(BlobFileMeta { number: self.logical, size, created_ms: self.index_builder.created_ms(), sections })
    }
}

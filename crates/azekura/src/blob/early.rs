//! A blob file that is pointed to before it is finished.

use std::sync::Arc;

use crate::base::blob_ref::BlobRef;
use crate::base::edit::{BlobMeta, FileId};
use crate::base::file_header::{FileHeader, FileKind};
use crate::base::{Error, Result};
use crate::blob::format::VALUES_MAX;
use crate::blob::writer::Index;
use crate::block::BlockHandle;
use crate::block::frame::{FRAME_HEADER_LEN, Frame};
use crate::vfs::File;

/// Writes new values, each of which stands in the file once [`append`](EarlyWriter::append) returns: it survives the
/// death of the process from then on, and power loss once the caller has synced the file. The same bytes come out as of
/// a [`BlobWriter`](crate::blob::writer::BlobWriter). One thread at a time.
///
/// A failed write leaves the values before it as they were, and the next one goes where it would have gone.
pub(crate) struct EarlyWriter {
    file: Arc<dyn File>,
    file_id: [u8; 16],
    logical: FileId,
    index: Index,
    /// Behind the last value.
    end: u64,
    /// Whether the file may be longer than what was written whole.
    torn: bool,
}

impl EarlyWriter {
    /// Begins the file of that number, which is empty and not written past the cache of the system. `file_id` is
    /// random and new.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file, which is then of no use.
    pub(crate) fn create(
        file: Arc<dyn File>,
        file_id: [u8; 16],
        logical: FileId,
        created_ms: u64,
    ) -> Result<EarlyWriter> {
        file.write_at(&FileHeader { kind: FileKind::Blob, file_id }.encode(), 0)?;
        let (mut index, end) = (Index::new(created_ms), FileHeader::LEN as u64);
        index.begin(logical, false, end);
        Ok(EarlyWriter { file, file_id, logical, index, end, torn: false })
    }

    /// Puts a value, as it is to be stored, behind those before it.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file; `Invalid` behind the last ordinal there is.
    pub(crate) fn append(&mut self, frame: &Frame<'_>) -> Result<BlobRef> {
        let ordinal = self.values();
        if ordinal >= VALUES_MAX {
            return Err(Error::invalid("blob file holds as many values as it can"));
        }
        let header = frame.header(&self.file_id, self.end);
        let body = self.end + FRAME_HEADER_LEN as u64;
        let written = self.file.write_at(&header, self.end).and_then(|()| self.file.write_at(frame.stored, body));
        written.inspect_err(|_| self.torn = true)?;
        let (ordinal, written) = (ordinal as u32, BlockHandle { offset: self.end, len: frame.len() });
        self.index.add(ordinal, written);
        self.end += written.len;
        // Values are at most 4 GiB - 1, so the cast loses nothing.
        let len = frame.raw_len as u32;
        Ok(BlobRef { logical: self.logical, ordinal, offset: written.offset, stored: written.len, len })
    }

    /// Values so far.
    pub(crate) fn values(&self) -> u64 {
        self.index.open_section().values
    }

    /// Where the last value ends.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Where each value lies.
    ///
    /// # Errors
    /// None, if what was written is what is in memory.
    pub(crate) fn frames(&self) -> Result<Vec<(u32, BlockHandle)>> {
        self.index.frames()
    }

    /// Writes the rest, after which no value may follow; after a failure it may be tried again. The caller syncs the
    /// file and its directory.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file; its values stay readable.
    pub(crate) fn finish(&mut self) -> Result<BlobMeta> {
        let (tail, sections) = self.index.tail(&self.file_id, self.end);
        let size = self.end + tail.len() as u64;
        if self.torn {
            self.file.set_length(self.end)?;
            self.torn = false;
        }
        self.file.write_at(&tail, self.end).inspect_err(|_| self.torn = true)?;
        Ok(BlobMeta { id: self.logical, size, created_ms: self.index.created_ms(), sections })
    }
}

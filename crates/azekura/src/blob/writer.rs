//! Writes blob files sequentially: new values, copied values, and direct writes, which are readable while the file
//! grows.

use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::compression::{Codec, CompressionType};
use crate::base::file_format::{FileFooter, FileHeader, FileKind};
use crate::base::version_edit::{BlobFileMeta, FileNumber};
use crate::base::{Error, Result};
use crate::blob::format::{
    BlobIndexPageIter, BlobMetaindex, BlobPageHandle, BlobSectionIndex, INDEX_PAGE_LEN, SECTION_VALUES_MAX,
    put_index_page_entry,
};
use crate::block::frame::{BlockFrame, FRAME_HEADER_LEN, RAW_LEN_MAX, put_frame};
use crate::block::{BlockHandle, BlockKind};
use crate::vfs::File;
use crate::vfs::buffered_writer::BufferedFileWriter;

/// Writes a file of new values, which has one section, or a file of copied values, section by section. Used by one
/// thread at a time. The file may be used only after [`BlobWriter::finish`] succeeded and the file was synced.
pub(crate) struct BlobWriter {
    id: FileNumber,
    file_writer: BufferedFileWriter,
    file_id: [u8; 16],
    index_builder: BlobIndexBuilder,
}

impl BlobWriter {
    /// Begins an empty file with that number. `file_id` is random and new.
    pub(crate) fn create(file: Arc<dyn File>, id: FileNumber, file_id: [u8; 16], created_ms: u64) -> BlobWriter {
        let header = FileHeader { kind: FileKind::Blob, file_id }.encode();
        let file_writer = BufferedFileWriter::new(file, &header);
        BlobWriter { id, file_writer, file_id, index_builder: BlobIndexBuilder::new(created_ms) }
    }

    /// Appends a new value to the section whose logical file has the number of the file.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file, which is then unusable. `Invalid` if the file has the maximum number of
    /// values.
    pub(crate) fn append(&mut self, value: &[u8], compression: CompressionType) -> Result<BlobPointer> {
        let ordinal = self.index_builder.next_ordinal()?;
        if ordinal == 0 {
            self.index_builder.begin_section(self.id, false, self.file_writer.offset());
        }
        let file_id = self.file_id;
        let frame = self
            .file_writer
            .append_with(|out, offset| put_frame(out, &file_id, offset, BlockKind::Blob, compression, value))?;
        Ok(self.index_builder.add_value(ordinal, frame, value.len()))
    }

    /// Begins a section of copied values.
    pub(crate) fn begin_section(&mut self, logical: FileNumber) {
        self.index_builder.begin_section(logical, true, self.file_writer.offset());
    }

    /// Copies a value of another file without decompressing it. Ordinals must ascend within a section. The frame gets
    /// a new header; its stored bytes are unchanged.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file.
    pub(crate) fn copy_value(&mut self, ordinal: u32, frame: &BlockFrame<'_>) -> Result<()> {
        let file_id = self.file_id;
        let copy = self.file_writer.append_with(|out, offset| frame.append_copy(out, &file_id, offset))?;
        self.index_builder.add_frame(ordinal, copy);
        Ok(())
    }

    /// Whether the file has the maximum number of new values.
    pub(crate) fn is_full(&self) -> bool {
        self.index_builder.next_ordinal().is_err()
    }

    /// Approximate length of the file in bytes if it ended here.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.file_writer.offset()
    }

    /// Writes the rest of the file. Sections without values are omitted. The caller syncs the file and its directory.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file.
    pub(crate) fn finish(mut self) -> Result<BlobFileMeta> {
        let (tail, meta) = self.index_builder.encode_tail(self.id, &self.file_id, self.file_writer.offset());
        self.file_writer.append_with(|out, _| out.extend_from_slice(&tail))?;
        let size = self.file_writer.finish()?;
        debug_assert_eq!(size, meta.size, "the metadata has the size of the file");
        Ok(meta)
    }
}

/// Collects the index of a file while its values are written.
struct BlobIndexBuilder {
    metaindex: BlobMetaindex,
    /// Pages of all sections, in order. They are written at the end, and until then use a few bytes of memory for
    /// each value.
    pages: Vec<Vec<u8>>,
    /// Last ordinal of the open section.
    last_ordinal: u32,
}

impl BlobIndexBuilder {
    fn new(created_ms: u64) -> BlobIndexBuilder {
        let metaindex = BlobMetaindex { created_ms, sections: Vec::new() };
        BlobIndexBuilder { metaindex, pages: Vec::new(), last_ordinal: 0 }
    }

    /// Begins the section of a logical file at offset `start`. Removes the previous section if it has no values.
    fn begin_section(&mut self, logical: FileNumber, rewritten: bool, start: u64) {
        let sections = &mut self.metaindex.sections;
        sections.retain(|section| section.value_count > 0);
        assert!(sections.iter().all(|section| section.logical != logical), "a logical file has one section");
        sections.push(BlobSectionIndex {
            logical,
            rewritten,
            value_count: 0,
            frame_bytes: 0,
            start_offset: start,
            pages: Vec::new(),
        });
    }

    fn open_section(&self) -> &BlobSectionIndex {
        self.metaindex.sections.last().expect("a section was begun")
    }

    /// The ordinal of the next new value.
    ///
    /// # Errors
    /// `Invalid` if the section has the maximum number of values.
    fn next_ordinal(&self) -> Result<u32> {
        match self.metaindex.sections.last().map_or(0, |section| section.value_count) {
            count if count < SECTION_VALUES_MAX => Ok(count as u32),
            _ => Err(Error::invalid("blob file has the maximum number of values")),
        }
    }

    /// Adds the frame of a new value, which follows the previous frame.
    fn add_value(&mut self, ordinal: u32, frame: BlockHandle, value_len: usize) -> BlobPointer {
        debug_assert!(!self.open_section().rewritten, "new values are not in a section of copied values");
        self.add_frame(ordinal, frame);
        BlobPointer {
            logical_file: self.open_section().logical,
            ordinal,
            frame_offset: frame.offset,
            frame_len: frame.len,
            // Values have at most 4 GiB - 1 bytes, so the cast loses nothing.
            value_len: value_len as u32,
        }
    }

    /// Adds a frame, which follows the previous frame.
    fn add_frame(&mut self, ordinal: u32, written: BlockHandle) {
        let section = self.metaindex.sections.last_mut().expect("a section was begun");
        assert!(section.value_count == 0 || ordinal > self.last_ordinal, "ordinals ascend within a section");
        debug_assert_eq!(written.offset, section.end_offset(), "a frame follows the previous one");
        debug_assert!(written.len >= FRAME_HEADER_LEN as u64, "a frame has a header");
        debug_assert!(section.value_count < SECTION_VALUES_MAX, "a section has an ordinal for each value");
        let full = self.pages.last().is_none_or(|page| page.len() >= INDEX_PAGE_LEN);
        let gap = if section.value_count == 0 || full {
            let handle = BlockHandle::default();
            section.pages.push(BlobPageHandle { first_ordinal: ordinal, offset: written.offset, handle });
            self.pages.push(Vec::new());
            0
        } else {
            ordinal - self.last_ordinal
        };
        put_index_page_entry(self.pages.last_mut().expect("a page was just added"), gap, written.len);
        section.value_count += 1;
        section.frame_bytes += written.len;
        self.last_ordinal = ordinal;
    }

    /// Encodes the part of file `id` after the last value, which ends at `offset`: pages, metaindex and footer. Also
    /// returns the description of the file for the manifest.
    fn encode_tail(&self, id: FileNumber, file_id: &[u8; 16], offset: u64) -> (Vec<u8>, BlobFileMeta) {
        let mut metaindex = self.metaindex.clone();
        metaindex.sections.retain(|section| section.value_count > 0);
        assert!(!metaindex.sections.is_empty(), "an empty blob file is never written");
        let page_count: usize = metaindex.sections.iter().map(|section| section.pages.len()).sum();
        debug_assert_eq!(page_count, self.pages.len(), "each page has a handle");
        debug_assert!(
            metaindex.sections.iter().all(|section| section.end_offset() <= offset),
            "values end at the tail"
        );
        let (mut out, codec) = (Vec::new(), CompressionType::None);
        let pages = metaindex.sections.iter_mut().flat_map(|section| &mut section.pages);
        for (page, raw) in pages.zip(&self.pages) {
            let at = offset + out.len() as u64;
            page.handle = put_frame(&mut out, file_id, at, BlockKind::BlobIndex, codec, raw);
        }
        let at = offset + out.len() as u64;
        debug_assert!(metaindex.check_layout(at).is_ok(), "sections and pages are adjacent, up to the metaindex");
        let BlockHandle { offset: at, len } =
            put_frame(&mut out, file_id, at, BlockKind::Metaindex, codec, &metaindex.encode());
        let footer = FileFooter { kind: FileKind::Blob, metaindex_offset: at, metaindex_len: len };
        let end = offset + out.len() as u64;
        debug_assert_eq!(at + len, end, "the footer follows the metaindex");
        out.extend_from_slice(&footer.encode(file_id, end));
        let meta = metaindex.describe_file(id, offset + out.len() as u64);
        (out, meta)
    }
}

/// Writes new values directly to the file. Once [`append`](DirectBlobWriter::append) has returned, the value survives
/// a crash of the process; once the caller has synced the file, it survives power loss. The file has the same bytes
/// as that of a [`BlobWriter`]. Used by one thread at a time.
///
/// A failed write leaves the previous values unchanged. The next value is written at the same offset.
pub(crate) struct DirectBlobWriter {
    file: Arc<dyn File>,
    file_id: [u8; 16],
    index_builder: BlobIndexBuilder,
    /// Whether a failed write may have left bytes after the last value.
    has_partial_write: bool,
    /// Reused buffer for a frame.
    buffer: Vec<u8>,
}

/// A value of at most this many stored bytes is copied behind its header and written in one call, which costs less than
/// a second call.
const COPIED_FRAME_MAX: usize = 64 << 10;

impl DirectBlobWriter {
    /// Begins an empty file with that number. The file must not use direct I/O. `file_id` is random and new. An
    /// unfinished file of an earlier process has its own `file_id`, and its values are then
    /// [rewritten](DirectBlobWriter::rewrite_frame).
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file, which is then unusable.
    pub(crate) fn create(
        file: Arc<dyn File>,
        file_id: [u8; 16],
        logical: FileNumber,
        created_ms: u64,
    ) -> Result<DirectBlobWriter> {
        file.write_at(&FileHeader { kind: FileKind::Blob, file_id }.encode(), 0)?;
        let mut index_builder = BlobIndexBuilder::new(created_ms);
        index_builder.begin_section(logical, false, FileHeader::LEN as u64);
        Ok(DirectBlobWriter { file, file_id, index_builder, has_partial_write: false, buffer: Vec::new() })
    }

    /// Appends a value, which `frame` contains in its stored form.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file; `Invalid` if the file has the maximum number of values.
    pub(crate) fn append(&mut self, frame: &BlockFrame<'_>) -> Result<BlobPointer> {
        let ordinal = self.index_builder.next_ordinal()?;
        let offset = self.end_offset();
        let written = if frame.stored.len() <= COPIED_FRAME_MAX {
            self.buffer.clear();
            frame.append_copy(&mut self.buffer, &self.file_id, offset);
            self.file.write_at(&self.buffer, offset)
        } else {
            let header = frame.header(&self.file_id, offset);
            let body = offset + FRAME_HEADER_LEN as u64;
            self.file.write_at(&header, offset).and_then(|()| self.file.write_at(frame.stored, body))
        };
        written.inspect_err(|_| self.has_partial_write = true)?;
        Ok(self.index_builder.add_value(ordinal, BlockHandle { offset, len: frame.len() }, frame.raw_len))
    }

    /// Reads and verifies the frame that follows the last value, and writes the same bytes to the same offset.
    ///
    /// # Errors
    /// `Corruption` if the frame is damaged. `Io` and `OutOfSpace` of the file.
    pub(crate) fn rewrite_frame(&mut self, frame: BlockHandle) -> Result<()> {
        let ordinal = self.index_builder.next_ordinal()?;
        let len = usize::try_from(frame.len).map_err(|_| Error::unsupported("value is larger than memory"))?;
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, frame.offset)?;
        BlockFrame::check(&bytes, &self.file_id, frame.offset, BlockKind::Blob)?;
        self.file.write_at(&bytes, frame.offset)?;
        self.index_builder.add_frame(ordinal, frame);
        Ok(())
    }

    /// Replaces the bytes from the last value to `end` by `count` values of zeros. These bytes were `count` other
    /// values. If there are at least two, no new value has both offset and length of an old one, so that no pointer to
    /// an old value becomes a pointer to zeros.
    ///
    /// # Errors
    /// As for [`append`](DirectBlobWriter::append).
    pub(crate) fn append_zeros_up_to(&mut self, end: u64, count: u32) -> Result<()> {
        let (min, max) = (FRAME_HEADER_LEN as u64, FRAME_HEADER_LEN as u64 + RAW_LEN_MAX);
        for later in (0..u64::from(count)).rev() {
            // Empty values, and a long one at the end.
            let len = (end - self.end_offset()).saturating_sub(later.saturating_mul(max)).max(min);
            let stored = vec![0; (len - min) as usize];
            let (kind, codec) = (BlockKind::Blob, Codec::None);
            self.append(&BlockFrame { kind, codec, raw_len: stored.len(), stored: &stored })?;
        }
        debug_assert_eq!(self.end_offset(), end, "the values take all of the bytes");
        Ok(())
    }

    /// End of the last value.
    pub(crate) fn end_offset(&self) -> u64 {
        self.index_builder.open_section().end_offset()
    }

    /// The frames of all values.
    ///
    /// # Errors
    /// `Corruption` if the pages in memory are damaged.
    pub(crate) fn frames(&self) -> Result<Vec<(u32, BlockHandle)>> {
        let section = self.index_builder.open_section();
        let pages = section.pages.iter().enumerate().zip(&self.index_builder.pages);
        pages.flat_map(|((at, page), bytes)| BlobIndexPageIter::new(bytes, page, section.page_end_offset(at))).collect()
    }

    /// Writes the rest of the file. Afterwards no value may be appended. The caller may repeat the call after an
    /// error, and syncs the file and its directory.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file. The values stay readable.
    pub(crate) fn finish(&mut self) -> Result<BlobFileMeta> {
        let (id, end) = (self.index_builder.open_section().logical, self.end_offset());
        let (tail, meta) = self.index_builder.encode_tail(id, &self.file_id, end);
        if self.has_partial_write {
            self.file.set_length(end)?;
            self.has_partial_write = false;
        }
        self.file.write_at(&tail, end).inspect_err(|_| self.has_partial_write = true)?;
        Ok(meta)
    }
}

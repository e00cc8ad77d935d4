//! Writes a blob file from front to back, also while pointers into it exist.

use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::compression::CompressionType;
use crate::base::file_format::{FileFooter, FileHeader, FileKind};
use crate::base::version_edit::{BlobFileMeta, BlobFileSection, FileNumber};
use crate::base::{Error, Result};
use crate::blob::format::{
    BlobIndexPageIter, BlobMetaindex, BlobPageHandle, BlobSectionIndex, INDEX_PAGE_LEN, SECTION_VALUES_MAX,
    put_index_page_entry,
};
use crate::block::frame::{BlockFrame, FRAME_HEADER_LEN, put_frame};
use crate::block::{BlockHandle, BlockKind};
use crate::vfs::File;
use crate::vfs::buffered_writer::BufferedFileWriter;

/// Writes new values: one section, of the file's own number. One thread at a time; nothing of it may be used before
/// [`BlobWriter::finish`] succeeded and the file was synced.
pub(crate) struct BlobWriter {
    out: BlobFileOutput,
    logical: FileNumber,
    compression: CompressionType,
}

impl BlobWriter {
    /// Begins the file of that number, which is empty. `file_id` is random and new.
    pub(crate) fn create(
        file: Arc<dyn File>,
        file_id: [u8; 16],
        logical: FileNumber,
        compression: CompressionType,
        created_ms: u64,
    ) -> BlobWriter {
        let mut out = BlobFileOutput::new(file, file_id, created_ms);
        out.begin_section(logical, false);
        BlobWriter { out, logical, compression }
    }

    /// Puts a value behind those before it.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file, which is then of no use; `Invalid` behind the last ordinal there is.
    pub(crate) fn append(&mut self, value: &[u8]) -> Result<BlobPointer> {
        let ordinal = self.value_count();
        if ordinal >= SECTION_VALUES_MAX {
            return Err(Error::invalid("blob file holds as many values as it can"));
        }
        let (ordinal, codec, file_id) = (ordinal as u32, self.compression, self.out.file_id);
        let frame = self
            .out
            .put_frame(ordinal, |out, offset| put_frame(out, &file_id, offset, BlockKind::Blob, codec, value))?;
        // Values are at most 4 GiB - 1, so the cast loses nothing.
        let len = value.len() as u32;
        Ok(BlobPointer {
            logical_file: self.logical,
            ordinal,
            frame_offset: frame.offset,
            frame_len: frame.len,
            value_len: len,
        })
    }

    /// Values so far.
    pub(crate) fn value_count(&self) -> u64 {
        self.out.index_builder.open_section().value_count
    }

    /// The file's length if it ended here, about.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.out.file_writer.offset()
    }

    /// Writes the rest. The caller syncs the file and its directory.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file.
    pub(crate) fn finish(self) -> Result<BlobFileMeta> {
        let id = self.logical;
        self.out.finish(id)
    }
}

/// Writes values of other files, section by section, as they are stored there. Otherwise as [`BlobWriter`].
pub(crate) struct BlobRewriteWriter {
    out: BlobFileOutput,
}

impl BlobRewriteWriter {
    /// Begins an empty file. `file_id` is random and new.
    pub(crate) fn create(file: Arc<dyn File>, file_id: [u8; 16], created_ms: u64) -> BlobRewriteWriter {
        BlobRewriteWriter { out: BlobFileOutput::new(file, file_id, created_ms) }
    }

    /// Values of that logical file follow; none of it came before.
    pub(crate) fn begin_section(&mut self, logical: FileNumber) {
        self.out.begin_section(logical, true);
    }

    /// Copies a value; ordinals rise within a section. The frame is made anew, its stored bytes stay as they are.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file.
    pub(crate) fn copy_value(&mut self, ordinal: u32, frame: &BlockFrame<'_>) -> Result<()> {
        let file_id = self.out.file_id;
        self.out.put_frame(ordinal, |out, offset| frame.append_copy(out, &file_id, offset)).map(drop)
    }

    /// The file's length if it ended here, about.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.out.file_writer.offset()
    }

    /// Writes the rest; sections without values are left out.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file.
    pub(crate) fn finish(self, id: FileNumber) -> Result<BlobFileMeta> {
        self.out.finish(id)
    }
}

/// The file, frame by frame.
struct BlobFileOutput {
    file_writer: BufferedFileWriter,
    file_id: [u8; 16],
    index_builder: BlobIndexBuilder,
}

impl BlobFileOutput {
    fn new(file: Arc<dyn File>, file_id: [u8; 16], created_ms: u64) -> BlobFileOutput {
        let header = FileHeader { kind: FileKind::Blob, file_id }.encode();
        BlobFileOutput {
            file_writer: BufferedFileWriter::new(file, &header),
            file_id,
            index_builder: BlobIndexBuilder::new(created_ms),
        }
    }

    fn begin_section(&mut self, logical: FileNumber, rewritten: bool) {
        self.index_builder.begin_section(logical, rewritten, self.file_writer.offset());
    }

    fn put_frame(&mut self, ordinal: u32, frame: impl FnOnce(&mut Vec<u8>, u64) -> BlockHandle) -> Result<BlockHandle> {
        let written = self.file_writer.append_with(frame)?;
        self.index_builder.add_frame(ordinal, written);
        Ok(written)
    }

    fn finish(mut self, id: FileNumber) -> Result<BlobFileMeta> {
        let (tail, sections) = self.index_builder.encode_tail(&self.file_id, self.file_writer.offset());
        self.file_writer.append_with(|out, _| out.extend_from_slice(&tail))?;
        Ok(BlobFileMeta {
            number: id,
            size: self.file_writer.finish()?,
            created_ms: self.index_builder.metaindex.created_ms,
            sections,
        })
    }
}

/// What stands behind the values of a file, while they are written.
pub(super) struct BlobIndexBuilder {
    metaindex: BlobMetaindex,
    /// Pages of all sections, in order: they are written at the end, and take some bytes for each value until then.
    pages: Vec<Vec<u8>>,
    /// The ordinal put last into the open section.
    last_ordinal: u32,
}

impl BlobIndexBuilder {
    pub(super) fn new(created_ms: u64) -> BlobIndexBuilder {
        BlobIndexBuilder {
            metaindex: BlobMetaindex { created_ms, sections: Vec::new() },
            pages: Vec::new(),
            last_ordinal: 0,
        }
    }

    pub(super) fn created_ms(&self) -> u64 {
        self.metaindex.created_ms
    }

    /// The values of that logical file begin at `start`; a section without values goes again.
    pub(super) fn begin_section(&mut self, logical: FileNumber, rewritten: bool, start: u64) {
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

    pub(super) fn open_section(&self) -> &BlobSectionIndex {
        self.metaindex.sections.last().expect("a section was begun")
    }

    /// Takes in the frame that stands behind those before it.
    pub(super) fn add_frame(&mut self, ordinal: u32, written: BlockHandle) {
        let section = self.metaindex.sections.last_mut().expect("a section was begun");
        assert!(section.value_count == 0 || ordinal > self.last_ordinal, "ordinals rise within a section");
        let full = self.pages.last().is_none_or(|page| page.len() >= INDEX_PAGE_LEN);
        let gap = if section.value_count == 0 || full {
            section.pages.push(BlobPageHandle {
                first_ordinal: ordinal,
                offset: written.offset,
                handle: BlockHandle::default(),
            });
            self.pages.push(Vec::new());
            0
        } else {
            ordinal - self.last_ordinal
        };
        put_index_page_entry(self.pages.last_mut().expect("it was just made"), gap, written.len);
        section.value_count += 1;
        section.frame_bytes += written.len;
        self.last_ordinal = ordinal;
    }

    /// All that follows on the last value, which ends at `offset`: pages, directory and footer. Also the sections, as
    /// the manifest names them.
    pub(super) fn encode_tail(&self, file_id: &[u8; 16], offset: u64) -> (Vec<u8>, Vec<BlobFileSection>) {
        let mut directory = self.metaindex.clone();
        directory.sections.retain(|section| section.value_count > 0);
        assert!(!directory.sections.is_empty(), "an empty blob file is never written");
        let (mut out, codec) = (Vec::new(), CompressionType::None);
        let pages = directory.sections.iter_mut().flat_map(|section| &mut section.pages);
        for (page, raw) in pages.zip(&self.pages) {
            let at = offset + out.len() as u64;
            page.handle = put_frame(&mut out, file_id, at, BlockKind::BlobIndex, codec, raw);
        }
        let at = offset + out.len() as u64;
        let BlockHandle { offset: at, len } =
            put_frame(&mut out, file_id, at, BlockKind::Metaindex, codec, &directory.encode());
        let footer = FileFooter { kind: FileKind::Blob, metaindex_offset: at, metaindex_len: len };
        let end = offset + out.len() as u64;
        out.extend_from_slice(&footer.encode(file_id, end));
        (out, directory.section_metas())
    }

    /// Where each value of the open section lies.
    ///
    /// # Errors
    /// None, if what was taken in is what is in memory.
    pub(super) fn section_frames(&self) -> Result<Vec<(u32, BlockHandle)>> {
        let (section, mut frames) = (self.open_section(), Vec::new());
        for ((at, page), bytes) in section.pages.iter().enumerate().zip(&self.pages) {
            let mut iter = BlobIndexPageIter::new(bytes, page, section.page_end_offset(at));
            while let Some(frame) = iter.next()? {
                frames.push(frame);
            }
        }
        Ok(frames)
    }
}

/// Writes new values, each of which stands in the file once [`append`](DirectBlobWriter::append) returns: it survives
/// the death of the process from then on, and power loss once the caller has synced the file. The same bytes come out
/// as of a [`BlobWriter`]. One thread at a time.
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

//! Writes a blob file, front to back.

use std::sync::Arc;

use crate::base::blob_ref::BlobRef;
use crate::base::compression::CompressionType;
use crate::base::edit::{BlobMeta, BlobSection, FileId};
use crate::base::file_footer::FileFooter;
use crate::base::file_header::{FileHeader, FileKind};
use crate::base::{Error, Result};
use crate::blob::format::{Directory, PAGE_LEN, Page, PageWalk, Section, VALUES_MAX, put_page_entry};
use crate::block::frame::{Frame, put_frame};
use crate::block::{BlockHandle, BlockKind};
use crate::vfs::File;
use crate::vfs::append::Appender;

/// Writes new values: one section, of the file's own number. One thread at a time; nothing of it may be used before
/// [`BlobWriter::finish`] succeeded and the file was synced.
pub(crate) struct BlobWriter {
    out: Output,
    logical: FileId,
    compression: CompressionType,
}

impl BlobWriter {
    /// Begins the file of that number, which is empty. `file_id` is random and new.
    pub(crate) fn create(
        file: Arc<dyn File>,
        file_id: [u8; 16],
        logical: FileId,
        compression: CompressionType,
        created_ms: u64,
    ) -> BlobWriter {
        let mut out = Output::new(file, file_id, created_ms);
        out.begin(logical, false);
        BlobWriter { out, logical, compression }
    }

    /// Puts a value behind those before it.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file, which is then of no use; `Invalid` behind the last ordinal there is.
    pub(crate) fn append(&mut self, value: &[u8]) -> Result<BlobRef> {
        let ordinal = self.values();
        if ordinal >= VALUES_MAX {
            return Err(Error::invalid("blob file holds as many values as it can"));
        }
        let (ordinal, codec, file_id) = (ordinal as u32, self.compression, self.out.file_id);
        let frame =
            self.out.put(ordinal, |out, offset| put_frame(out, &file_id, offset, BlockKind::Blob, codec, value))?;
        // Values are at most 4 GiB - 1, so the cast loses nothing.
        let len = value.len() as u32;
        Ok(BlobRef { logical: self.logical, ordinal, offset: frame.offset, stored: frame.len, len })
    }

    /// Values so far.
    pub(crate) fn values(&self) -> u64 {
        self.out.index.open_section().values
    }

    /// The file's length if it ended here, about.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.out.end.offset()
    }

    /// Writes the rest. The caller syncs the file and its directory.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file.
    pub(crate) fn finish(self) -> Result<BlobMeta> {
        let id = self.logical;
        self.out.finish(id)
    }
}

/// Writes values of other files, section by section, as they are stored there. Otherwise as [`BlobWriter`].
pub(crate) struct RewriteWriter {
    out: Output,
}

impl RewriteWriter {
    /// Begins an empty file. `file_id` is random and new.
    pub(crate) fn create(file: Arc<dyn File>, file_id: [u8; 16], created_ms: u64) -> RewriteWriter {
        RewriteWriter { out: Output::new(file, file_id, created_ms) }
    }

    /// Values of that logical file follow; none of it came before.
    pub(crate) fn begin_section(&mut self, logical: FileId) {
        self.out.begin(logical, true);
    }

    /// Copies a value; ordinals rise within a section. The frame is made anew, its stored bytes stay as they are.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file.
    pub(crate) fn copy(&mut self, ordinal: u32, frame: &Frame<'_>) -> Result<()> {
        let file_id = self.out.file_id;
        self.out.put(ordinal, |out, offset| frame.put_again(out, &file_id, offset)).map(drop)
    }

    /// The file's length if it ended here, about.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.out.end.offset()
    }

    /// Writes the rest; sections without values are left out.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace` of the file.
    pub(crate) fn finish(self, id: FileId) -> Result<BlobMeta> {
        self.out.finish(id)
    }
}

/// The file, frame by frame.
struct Output {
    end: Appender,
    file_id: [u8; 16],
    index: Index,
}

impl Output {
    fn new(file: Arc<dyn File>, file_id: [u8; 16], created_ms: u64) -> Output {
        let header = FileHeader { kind: FileKind::Blob, file_id }.encode();
        Output { end: Appender::new(file, &header), file_id, index: Index::new(created_ms) }
    }

    fn begin(&mut self, logical: FileId, rewritten: bool) {
        self.index.begin(logical, rewritten, self.end.offset());
    }

    fn put(&mut self, ordinal: u32, frame: impl FnOnce(&mut Vec<u8>, u64) -> BlockHandle) -> Result<BlockHandle> {
        let written = self.end.put(frame)?;
        self.index.add(ordinal, written);
        Ok(written)
    }

    fn finish(mut self, id: FileId) -> Result<BlobMeta> {
        let (tail, sections) = self.index.tail(&self.file_id, self.end.offset());
        self.end.put(|out, _| out.extend_from_slice(&tail))?;
        Ok(BlobMeta { id, size: self.end.end()?, created_ms: self.index.directory.created_ms, sections })
    }
}

/// What stands behind the values of a file, while they are written.
pub(super) struct Index {
    directory: Directory,
    /// Pages of all sections, in order: they are written at the end, and take some bytes for each value until then.
    pages: Vec<Vec<u8>>,
    /// The ordinal put last into the open section.
    last: u32,
}

impl Index {
    pub(super) fn new(created_ms: u64) -> Index {
        Index { directory: Directory { created_ms, sections: Vec::new() }, pages: Vec::new(), last: 0 }
    }

    pub(super) fn created_ms(&self) -> u64 {
        self.directory.created_ms
    }

    /// The values of that logical file begin at `start`; a section without values goes again.
    pub(super) fn begin(&mut self, logical: FileId, rewritten: bool, start: u64) {
        let sections = &mut self.directory.sections;
        sections.retain(|section| section.values > 0);
        assert!(sections.iter().all(|section| section.logical != logical), "a logical file has one section");
        sections.push(Section { logical, rewritten, values: 0, bytes: 0, start, pages: Vec::new() });
    }

    pub(super) fn open_section(&self) -> &Section {
        self.directory.sections.last().expect("a section was begun")
    }

    /// Takes in the frame that stands behind those before it.
    pub(super) fn add(&mut self, ordinal: u32, written: BlockHandle) {
        let section = self.directory.sections.last_mut().expect("a section was begun");
        assert!(section.values == 0 || ordinal > self.last, "ordinals rise within a section");
        let full = self.pages.last().is_none_or(|page| page.len() >= PAGE_LEN);
        let gap = if section.values == 0 || full {
            section.pages.push(Page { first: ordinal, offset: written.offset, handle: BlockHandle::default() });
            self.pages.push(Vec::new());
            0
        } else {
            ordinal - self.last
        };
        put_page_entry(self.pages.last_mut().expect("it was just made"), gap, written.len);
        section.values += 1;
        section.bytes += written.len;
        self.last = ordinal;
    }

    /// All that follows on the last value, which ends at `offset`: pages, directory and footer. Also the sections, as
    /// the manifest names them.
    pub(super) fn tail(&self, file_id: &[u8; 16], offset: u64) -> (Vec<u8>, Vec<BlobSection>) {
        let mut directory = self.directory.clone();
        directory.sections.retain(|section| section.values > 0);
        assert!(!directory.sections.is_empty(), "an empty blob file is never written");
        let (mut out, codec) = (Vec::new(), CompressionType::None);
        let pages = directory.sections.iter_mut().flat_map(|section| &mut section.pages);
        for (page, raw) in pages.zip(&self.pages) {
            let at = offset + out.len() as u64;
            page.handle = put_frame(&mut out, file_id, at, BlockKind::BlobIndex, codec, raw);
        }
        let at = offset + out.len() as u64;
        let BlockHandle { offset: at, len } =
            put_frame(&mut out, file_id, at, BlockKind::Directory, codec, &directory.encode());
        let footer = FileFooter { kind: FileKind::Blob, offset: at, len };
        let end = offset + out.len() as u64;
        out.extend_from_slice(&footer.encode(file_id, end));
        (out, directory.summary())
    }

    /// Where each value of the open section lies.
    ///
    /// # Errors
    /// None, if what was taken in is what is in memory.
    pub(super) fn frames(&self) -> Result<Vec<(u32, BlockHandle)>> {
        let (section, mut frames) = (self.open_section(), Vec::new());
        for ((at, page), bytes) in section.pages.iter().enumerate().zip(&self.pages) {
            let mut walk = PageWalk::new(bytes, page, section.end_of_page(at));
            while let Some(frame) = walk.next()? {
                frames.push(frame);
            }
        }
        Ok(frames)
    }
}

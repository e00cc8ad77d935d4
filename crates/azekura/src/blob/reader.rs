//! Reads values of an open blob file, verifies a whole file, and computes the referenced values.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::base::blob_pointer::{BlobPointer, BlobReferences, BlobValueId, OrdinalSet};
use crate::base::compression::decompress;
use crate::base::file_format::{FileFooter, FileHeader, FileKind};
use crate::base::mapped_memory::MappedBytes;
use crate::base::version_edit::{BlobFileMeta, FileNumber};
use crate::base::{Error, Result};
use crate::blob::format::{BlobIndexPageIter, BlobMetaindex, BlobSectionIndex};
use crate::block::cached_block::{CachedBlobIndexPage, CachedBlobValue, DecodableBlock};
use crate::block::frame::{BlockFrame, FRAME_HEADER_LEN, open_frame, open_mapped_frame, read_frame};
use crate::block::{BlockCache, BlockHandle, BlockKind};
use crate::mem::slice::Slice;
use crate::vfs::File;
use crate::vfs::open_files::{DataFile, DataFiles};
use crate::vfs::read_ahead::{ReadAhead, ReadAheadRequest};

#[cfg(test)]
thread_local! {
    /// Number of values that this thread has announced.
    pub(crate) static VALUES_ANNOUNCED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Bytes that opening reads from the end of the file in one read.
const TAIL_LEN: u64 = 4 << 10;

/// A blob file, opened on the first read. Thread safe. It holds at most the metaindex in memory.
pub(crate) struct BlobFile {
    file: DataFile,
    cache: Arc<BlockCache>,
    id: FileNumber,
    extent: BlobFileExtent,
}

/// The readable part of a file.
enum BlobFileExtent {
    /// A finished file of `size` bytes, with an index at its end.
    Finished { size: u64, opened: OnceLock<BlobFileHead> },
    /// A growing file without an index: values up to `end`, which increases. `file` is the handle of the writer, if
    /// there is a writer.
    Growing { file: Option<Arc<dyn File>>, file_id: [u8; 16], end: AtomicU64 },
}

/// Read-ahead state of a sequential caller, which may move from one file to another.
pub(crate) struct BlobReadAhead {
    read_ahead: ReadAhead,
    /// File and end of the last frame, where an adjacent frame begins.
    expected: Option<(FileNumber, u64)>,
    /// Number of values that were read alone.
    single_reads: u64,
}

impl BlobReadAhead {
    /// For any access pattern: starts read-ahead once values are adjacent.
    pub(crate) fn adaptive() -> BlobReadAhead {
        BlobReadAhead { read_ahead: ReadAhead::adaptive(), expected: None, single_reads: 0 }
    }

    /// For a caller that reads the whole file sequentially: starts read-ahead at once.
    pub(crate) fn eager() -> BlobReadAhead {
        BlobReadAhead { read_ahead: ReadAhead::eager(), expected: None, single_reads: 0 }
    }

    /// Whether the last values were adjacent, so that values are read ahead.
    pub(crate) fn reads_ahead(&self) -> bool {
        self.read_ahead.is_reading_ahead()
    }

    /// Number of values that were read alone, because the values before them are not adjacent.
    pub(crate) fn single_reads(&self) -> u64 {
        self.single_reads
    }

    /// Notes that the caller moves to the frame at `handle` of `file`, also if the value is in the cache.
    fn advance_to(&mut self, file: FileNumber, handle: BlockHandle) {
        // The buffer has bytes of the last file.
        if self.expected != Some((file, handle.offset)) {
            self.read_ahead.reset();
        }
        self.read_ahead.note_sequential_read();
        self.expected = Some((file, handle.offset.saturating_add(handle.len)));
    }
}

/// Content of the header and the end of a finished file.
pub(crate) struct BlobFileHead {
    pub(crate) file_id: [u8; 16],
    pub(crate) metaindex: BlobMetaindex,
}

impl BlobFile {
    /// A finished file with that number and `size` bytes. `files` is the cache of blob files.
    pub(crate) fn new(files: &DataFiles, cache: Arc<BlockCache>, id: FileNumber, size: u64) -> BlobFile {
        let extent = BlobFileExtent::Finished { size, opened: OnceLock::new() };
        BlobFile { file: files.data_file(id), cache, id, extent }
    }

    /// A file with that number that has no index yet. Values up to `end` are read at the offsets in their pointers,
    /// through `file` while the file is written. Otherwise as [`new`](BlobFile::new).
    pub(crate) fn growing(
        files: &DataFiles,
        cache: Arc<BlockCache>,
        id: FileNumber,
        file: Option<Arc<dyn File>>,
        file_id: [u8; 16],
        end: u64,
    ) -> BlobFile {
        let extent = BlobFileExtent::Growing { file, file_id, end: AtomicU64::new(end) };
        BlobFile { file: files.data_file(id), cache, id, extent }
    }

    /// Sets the end of the values of a growing file.
    pub(crate) fn grow_to(&self, end: u64) {
        debug_assert!(matches!(self.extent, BlobFileExtent::Growing { .. }), "a finished file does not grow");
        if let BlobFileExtent::Growing { end: known, .. } = &self.extent {
            debug_assert!(known.load(Ordering::Relaxed) <= end, "the end of a growing file does not move back");
            known.store(end, Ordering::Release);
        }
    }

    /// Length of the readable part in bytes.
    pub(crate) fn size(&self) -> u64 {
        match &self.extent {
            BlobFileExtent::Finished { size, .. } => *size,
            BlobFileExtent::Growing { end, .. } => end.load(Ordering::Acquire),
        }
    }

    /// Opens the file, unless it is open.
    ///
    /// # Errors
    /// Those of the file system.
    pub(crate) fn open_file(&self) -> Result<()> {
        self.file().map(drop)
    }

    fn file(&self) -> Result<Arc<dyn File>> {
        match &self.extent {
            BlobFileExtent::Growing { file: Some(file), .. } => Ok(Arc::clone(file)),
            BlobFileExtent::Finished { .. } | BlobFileExtent::Growing { .. } => self.file.get(),
        }
    }

    /// The bytes of a finished file, if files are mapped for reading. The caller reads the frame at `handle`.
    fn mapped_range(&self, handle: BlockHandle) -> Option<&Arc<MappedBytes>> {
        match &self.extent {
            BlobFileExtent::Finished { size, .. } => self.file.mapped_range(handle.offset, handle.len, *size),
            BlobFileExtent::Growing { .. } => None,
        }
    }

    fn file_id(&self) -> Result<&[u8; 16]> {
        match &self.extent {
            BlobFileExtent::Finished { .. } => Ok(&self.head()?.file_id),
            BlobFileExtent::Growing { file_id, .. } => Ok(file_id),
        }
    }

    /// Derives the manifest's description of a blob file from its file alone.
    ///
    /// # Errors
    /// `Corruption`, `Unsupported` or `Io` if the file cannot be opened.
    pub(crate) fn read_meta(files: &DataFiles, cache: &Arc<BlockCache>, id: FileNumber) -> Result<BlobFileMeta> {
        let size = files.get(id)?.length()?;
        let file = BlobFile::new(files, Arc::clone(cache), id, size);
        let metaindex = &file.head()?.metaindex;
        Ok(metaindex.describe_file(id, size))
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.file.path()
    }

    /// Memory use outside of the cache in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let metaindex = match &self.extent {
            BlobFileExtent::Finished { opened, .. } => opened.get().map_or(0, |opened| opened.metaindex.memory_bytes()),
            BlobFileExtent::Growing { .. } => 0,
        };
        (size_of::<BlobFile>() + metaindex) as u64
    }

    /// Adds the file to an error, and the offset if the error has none.
    #[cold]
    pub(crate) fn with_location(&self, error: Error, offset: u64) -> Error {
        error.at_offset(offset).in_file(self.path())
    }

    /// Header and metaindex, which the first call reads. Two threads may read them concurrently; one result is kept.
    ///
    /// # Errors
    /// `Corruption` if the file is not a finished blob file of that length, `Unsupported` if a newer version wrote
    /// it.
    pub(crate) fn head(&self) -> Result<&BlobFileHead> {
        let BlobFileExtent::Finished { opened: head_cell, .. } = &self.extent else {
            return Err(Error::corruption("blob file has no index yet").in_file(self.path()));
        };
        if let Some(opened) = head_cell.get() {
            return Ok(opened);
        }
        let opened = self.read_head().map_err(|error| error.in_file(self.path()))?;
        Ok(head_cell.get_or_init(|| opened))
    }

    /// Reads the header and the metaindex.
    ///
    /// # Errors
    /// As for [`head`](BlobFile::head).
    pub(crate) fn read_head(&self) -> Result<BlobFileHead> {
        let (file, size) = (self.file()?, self.size());
        let found = file.length()?;
        if found != size || found < (FileHeader::LEN + FileFooter::LEN) as u64 {
            return Err(Error::corruption(format!("blob file has {found} bytes instead of {size}")));
        }
        let mut header = [0; FileHeader::LEN];
        file.read_exact_at(&mut header, 0)?;
        let file_id = FileHeader::decode(FileKind::Blob, &header)?.file_id;
        let start = size.saturating_sub(TAIL_LEN);
        let tail = self.read_bytes(start, size - start)?;
        let footer = tail.last_chunk().expect("the file is longer than a footer");
        let at = size - FileFooter::LEN as u64;
        let footer = FileFooter::decode(FileKind::Blob, footer, &file_id, size).map_err(|e| e.at_offset(at))?;
        let frame = match footer.metaindex_offset.checked_sub(start) {
            Some(from) => tail[from as usize..(at - start) as usize].to_vec(),
            None => self.read_bytes(footer.metaindex_offset, footer.metaindex_len)?,
        };
        let metaindex = open_frame(frame.into(), &file_id, footer.metaindex_offset, BlockKind::Metaindex)
            .and_then(|body| BlobMetaindex::decode(&body, footer.metaindex_offset))
            .map_err(|error| error.at_offset(footer.metaindex_offset))?;
        Ok(BlobFileHead { file_id, metaindex })
    }

    /// Reads a range of the file, which must end within its readable part.
    fn read_bytes(&self, offset: u64, len: u64) -> Result<Vec<u8>> {
        if offset.checked_add(len).is_none_or(|end| end > self.size()) {
            return Err(Error::corruption("frame ends past the end of the file"));
        }
        let len = usize::try_from(len).map_err(|_| Error::unsupported("frame is larger than this machine's memory"))?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| Error::corruption("no memory for a frame of its declared length"))?;
        bytes.resize(len, 0);
        self.file()?.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }

    /// Reads the value of `pointer`, from the cache if it is there. Inserts a value that it read from the file into the
    /// cache. `read_ahead` belongs to a sequential caller. While values are adjacent, the following bytes are read into
    /// it.
    ///
    /// # Errors
    /// `Corruption` if the value does not exist or is damaged, `Unsupported` if a newer version wrote it, or `Io`.
    pub(crate) fn read(&self, pointer: &BlobPointer, mut read_ahead: Option<&mut BlobReadAhead>) -> Result<Slice> {
        let handle = self.find_frame(pointer).map_err(|error| self.with_location(error, pointer.frame_offset))?;
        if let Some(read_ahead) = &mut read_ahead {
            read_ahead.advance_to(self.id, handle);
        }
        let id = pointer.value_id();
        let value = match self.cache.get_value(self.id, handle.offset, id) {
            Some(value) => value,
            None => {
                // Only the header of the frame says for certain whether the value is compressed.
                let is_compressed = handle.len != FRAME_HEADER_LEN as u64 + u64::from(pointer.value_len);
                let loaded = match read_ahead {
                    Some(read_ahead) => self.load_sequential(id, handle, is_compressed, read_ahead),
                    None => self.load_value(id, handle, is_compressed),
                };
                let value = Arc::new(loaded.map_err(|error| self.with_location(error, handle.offset))?);
                self.cache.insert_value(self.id, handle.offset, &value);
                value
            }
        };
        if value.len() != pointer.value_len as usize {
            let error = Error::corruption("length of the value differs from its blob pointer");
            return Err(self.with_location(error, handle.offset));
        }
        Ok(value.to_slice(|| Arc::clone(&value)))
    }

    /// Announces that [`read`](BlobFile::read) will read the value of `pointer`, unless it is cached. Only a hint.
    /// Returns false if announced reads of the file do not [overlap](File::will_read).
    pub(crate) fn will_read(&self, pointer: &BlobPointer) -> bool {
        let announced = self.find_frame(pointer).and_then(|handle| Ok((handle, self.file()?)));
        // A failure is reported by the read.
        let Ok((handle, file)) = announced else { return true };
        if self.cache.contains(self.id, handle.offset) {
            return true;
        }
        #[cfg(test)]
        VALUES_ANNOUNCED.set(VALUES_ANNOUNCED.get() + 1);
        file.will_read(handle.offset, handle.len)
    }

    /// Whether the middle of the value of `pointer` is [in memory](File::is_in_memory). The pages at its ends may also
    /// have parts of other values.
    pub(crate) fn is_in_memory(&self, pointer: &BlobPointer) -> bool {
        let frame = self.find_frame(pointer).and_then(|handle| Ok((handle, self.file()?)));
        frame.is_ok_and(|(handle, file)| file.is_in_memory(handle.offset.saturating_add(handle.len / 2)))
    }

    /// Whether the file has the value of `pointer`, which blob GC may have left out when it rewrote the file.
    ///
    /// # Errors
    /// As [`read`](BlobFile::read).
    pub(crate) fn contains(&self, pointer: &BlobPointer) -> Result<bool> {
        let found = self.find_frame_if_kept(pointer);
        found.map_err(|error| self.with_location(error, pointer.frame_offset)).map(|frame| frame.is_some())
    }

    /// The frame of the value of `pointer`.
    fn find_frame(&self, pointer: &BlobPointer) -> Result<BlockHandle> {
        self.find_frame_if_kept(pointer)?.ok_or_else(no_such_value_error)
    }

    /// The frame of the value of `pointer`; `None` if blob GC has left the value out of a rewritten section.
    fn find_frame_if_kept(&self, pointer: &BlobPointer) -> Result<Option<BlockHandle>> {
        let pointed = BlockHandle { offset: pointer.frame_offset, len: pointer.frame_len };
        if let BlobFileExtent::Growing { .. } = &self.extent {
            let is_here = pointer.logical_file == self.id && pointer.frame_offset >= FileHeader::LEN as u64;
            return if is_here { Ok(Some(pointed)) } else { Err(no_such_value_error()) };
        }
        let opened = self.head()?;
        let section = opened.metaindex.section(pointer.logical_file);
        let section =
            section.ok_or_else(|| Error::corruption("blob file has no section of the pointer's logical file"))?;
        if !section.rewritten {
            return section.check_pointer(pointer.ordinal, pointed).ok_or_else(no_such_value_error).map(Some);
        }
        match self.find_rewritten_frame(opened, section, pointer.ordinal)? {
            Some(frame) if frame.len != pointed.len => Err(no_such_value_error()),
            frame => Ok(frame),
        }
    }

    /// The frame of an ordinal in a rewritten section. Searches the index, because the offsets in pointers do not
    /// apply.
    fn find_rewritten_frame(
        &self,
        opened: &BlobFileHead,
        section: &BlobSectionIndex,
        ordinal: u32,
    ) -> Result<Option<BlockHandle>> {
        let Some((page, end)) = section.page_for_ordinal(ordinal) else { return Ok(None) };
        let bytes = self.cached_page(opened, page.handle)?;
        for entry in BlobIndexPageIter::new(&bytes, page, end) {
            let (found, frame) = entry.map_err(|error| error.at_offset(page.handle.offset))?;
            if found >= ordinal {
                return Ok((found == ordinal).then_some(frame));
            }
        }
        Ok(None)
    }

    /// Reads a page of an index through the cache.
    fn cached_page(&self, opened: &BlobFileHead, handle: BlockHandle) -> Result<Arc<CachedBlobIndexPage>> {
        if let Some(page) = self.cache.get::<CachedBlobIndexPage>(self.id, handle.offset, BlockKind::BlobIndex, None) {
            return Ok(page);
        }
        let page = Arc::new(self.read_page(opened, handle)?);
        self.cache.insert(self.id, handle.offset, BlockKind::BlobIndex, &page, None, false);
        Ok(page)
    }

    /// Reads a page of an index without the cache.
    pub(crate) fn read_page(&self, opened: &BlobFileHead, handle: BlockHandle) -> Result<CachedBlobIndexPage> {
        let bytes = self.read_bytes(handle.offset, handle.len)?;
        let body = open_frame(bytes.into(), &opened.file_id, handle.offset, BlockKind::BlobIndex);
        body.and_then(CachedBlobIndexPage::decode_body).map_err(|error| error.at_offset(handle.offset))
    }

    /// Reads a value into bytes that the returned slices share.
    fn load_value(&self, id: BlobValueId, handle: BlockHandle, is_compressed: bool) -> Result<CachedBlobValue> {
        if handle.end()? > self.size() {
            return Err(Error::corruption("value ends past the end of the file"));
        }
        let file_id = self.file_id()?;
        let allocate = |capacity| self.cache.buffer(capacity);
        if let Some(file) = self.mapped_range(handle) {
            let contents = open_mapped_frame(file, handle, BlockKind::Blob, file_id, allocate)?;
            return Ok(CachedBlobValue::from_contents(id, contents));
        }
        let file = self.file()?;
        let read = |bytes: &mut [u8]| file.read_exact_at(bytes, handle.offset);
        let contents = read_frame(handle, BlockKind::Blob, file_id, is_compressed, allocate, read)?;
        Ok(CachedBlobValue::from_contents(id, contents))
    }

    /// The same for a sequential caller, whose read-ahead buffer may have the frame.
    fn load_sequential(
        &self,
        id: BlobValueId,
        handle: BlockHandle,
        is_compressed: bool,
        ahead: &mut BlobReadAhead,
    ) -> Result<CachedBlobValue> {
        let Some(bytes) = self.read_window(handle, ahead)? else {
            ahead.single_reads += 1;
            return self.load_value(id, handle, is_compressed);
        };
        let frame = BlockFrame::check(bytes, self.file_id()?, handle.offset, BlockKind::Blob)?;
        let contents = frame.decode(|capacity| self.cache.buffer(capacity))?;
        Ok(CachedBlobValue::from_contents(id, contents))
    }

    /// The bytes of the frame from the read-ahead buffer, after a read-ahead if reads are sequential. `None` if there
    /// is no read-ahead.
    fn read_window<'a>(&self, handle: BlockHandle, ahead: &'a mut BlobReadAhead) -> Result<Option<&'a [u8]>> {
        let size = self.size();
        if let ReadAheadRequest::Ahead(len) = ahead.read_ahead.request_for(handle.offset, handle.len)
            && handle.end()? <= size
        {
            let bytes = self.read_bytes(handle.offset, len.min(size - handle.offset))?;
            ahead.read_ahead.fill(handle.offset, bytes);
        }
        Ok(ahead.read_ahead.buffered(handle.offset, handle.len))
    }

    /// Calls `read` with the verified frame at `handle`, in its stored form. Does not use the cache.
    ///
    /// # Errors
    /// `Corruption`, `Unsupported` or `Io` if the frame cannot be read, and the errors of `read`.
    pub(crate) fn with_frame<R>(
        &self,
        handle: BlockHandle,
        ahead: &mut BlobReadAhead,
        read: impl FnOnce(&BlockFrame<'_>) -> Result<R>,
    ) -> Result<R> {
        let file_id = self.file_id()?;
        let check = |bytes: &[u8]| read(&BlockFrame::check(bytes, file_id, handle.offset, BlockKind::Blob)?);
        let in_place = || {
            ahead.advance_to(self.id, handle);
            match self.read_window(handle, ahead)? {
                Some(bytes) => check(bytes),
                None => check(&self.read_bytes(handle.offset, handle.len)?),
            }
        };
        in_place().map_err(|error| self.with_location(error, handle.offset))
    }

    /// Iterates over the index of a logical file in this file: ordinals and frames, from the page on that contains the
    /// ordinal `from` if the section does. The first ordinals may be below `from`. Does not use the cache. The caller
    /// stops at the first error: `Corruption`, `Unsupported` or `Io` if the index cannot be read.
    ///
    /// # Errors
    /// `Corruption` if this file has no section of it, and the errors of [`head`](BlobFile::head).
    pub(crate) fn section_entries(
        &self,
        logical: FileNumber,
        from: u32,
    ) -> Result<impl Iterator<Item = Result<(u32, BlockHandle)>>> {
        let section = self.head()?.metaindex.section(logical);
        let section = section.ok_or_else(|| Error::corruption("blob file has no section of that logical file"));
        let section = section.map_err(|error| error.in_file(self.path()))?;
        let first = section.pages.partition_point(|page| page.first_ordinal <= from).saturating_sub(1);
        Ok((first..section.pages.len()).flat_map(move |at| {
            let (entries, error) = match self.read_index_page(section, at) {
                Ok(entries) => (entries, None),
                Err(error) => (Vec::new(), Some(self.with_location(error, section.pages[at].handle.offset))),
            };
            entries.into_iter().map(Ok).chain(error.map(Err))
        }))
    }

    /// Reads the entries of the `at`-th index page of a section.
    fn read_index_page(&self, section: &BlobSectionIndex, at: usize) -> Result<Vec<(u32, BlockHandle)>> {
        let page = &section.pages[at];
        let bytes = self.read_page(self.head()?, page.handle)?;
        let iter = BlobIndexPageIter::new(&bytes, page, section.page_end_offset(at));
        let entries: Vec<(u32, BlockHandle)> = iter.collect::<Result<_>>()?;
        let next_first_ordinal = section.pages.get(at + 1).map(|next| next.first_ordinal);
        if let (Some((last, _)), Some(next)) = (entries.last(), next_first_ordinal)
            && *last >= next
        {
            return Err(Error::corruption("index pages of a section share ordinals"));
        }
        Ok(entries)
    }
}

fn no_such_value_error() -> Error {
    Error::corruption("blob file does not contain the value of the blob pointer")
}

impl BlobFile {
    /// Reads and verifies the whole file without the cache, and compares it with the manifest. Returns the number of
    /// values.
    ///
    /// # Errors
    /// `Corruption` with file and offset of the first violation.
    pub(crate) fn verify(&self, meta: &BlobFileMeta) -> Result<u64> {
        self.verify_sections(meta).map_err(|error| error.in_file(self.path()))
    }

    fn verify_sections(&self, meta: &BlobFileMeta) -> Result<u64> {
        let opened = self.head()?;
        // Reads header, footer and metaindex again, because the file may have changed since it was opened.
        let again = self.read_head()?;
        if (again.file_id, &again.metaindex) != (opened.file_id, &opened.metaindex) {
            return Err(Error::corruption("file was replaced after it was opened"));
        }
        let metaindex = &opened.metaindex;
        if metaindex.describe_file(self.id, self.size()) != *meta {
            return Err(Error::corruption("sections or creation time of the blob file differ from the manifest"));
        }
        let (mut read_ahead, mut raw) = (BlobReadAhead::eager(), Vec::new());
        for section in &metaindex.sections {
            let (mut values, mut last) = (0u64, None);
            for entry in self.section_entries(section.logical, 0)? {
                let (ordinal, handle) = entry?;
                if !section.rewritten && u64::from(ordinal) != values {
                    return Err(Error::corruption("an ordinal of the blob file is missing").at_offset(handle.offset));
                }
                self.with_frame(handle, &mut read_ahead, |frame| {
                    raw.clear();
                    raw.resize(frame.raw_len, 0);
                    decompress(frame.codec, frame.stored, &mut raw)
                })?;
                values += 1;
                last = Some(handle);
            }
            let ends = last.is_some_and(|handle| handle.end().is_ok_and(|end| end == section.end_offset()));
            if values != section.value_count || !ends {
                return Err(Error::corruption("values of a section differ from the metaindex"));
            }
        }
        Ok(metaindex.sections.iter().map(|section| section.value_count).sum())
    }
}

/// The referenced ordinals of logical files, merged over any number of tables.
pub(crate) type LiveBlobs = BTreeMap<FileNumber, OrdinalSet>;

/// Adds the references of one table to those logical files for which `wanted` is true.
pub(crate) fn add_references(live: &mut LiveBlobs, table: &BlobReferences, wanted: impl Fn(FileNumber) -> bool) {
    for (logical, ordinals) in table.ordinals().filter(|(logical, _)| wanted(*logical)) {
        live.entry(logical).or_default().merge(ordinals);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::blob_pointer::{BlobPointer, BlobReferencesBuilder};

    fn table_references(pointers: &[(u64, u32)]) -> BlobReferences {
        let mut builder = BlobReferencesBuilder::default();
        for &(logical, ordinal) in pointers {
            builder.add(&BlobPointer {
                logical_file: FileNumber(logical),
                ordinal,
                frame_offset: 0,
                frame_len: 30,
                value_len: 9,
            });
        }
        builder.finish().unwrap()
    }

    #[test]
    fn references_of_tables_are_merged() {
        let mut live = LiveBlobs::default();
        add_references(&mut live, &table_references(&[(1, 0), (1, 4), (2, 7)]), |_| true);
        add_references(&mut live, &table_references(&[(1, 2), (1, 1), (3, 0)]), |logical| logical.0 < 4);
        let of = |logical| live.get(&FileNumber(logical)).map(|ordinals| ordinals.iter().collect::<Vec<_>>());
        assert_eq!([of(1), of(2), of(3), of(4)], [Some(vec![0, 1, 2, 4]), Some(vec![7]), Some(vec![0]), None]);
    }
}

//! Reads values of an open blob file, verifies a whole file, and computes which values are referenced.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::base::blob_pointer::{BlobPointer, BlobReferences, OrdinalSet};
use crate::base::compression::{Codec, decompress};
use crate::base::file_format::{FileFooter, FileHeader, FileKind};
use crate::base::version_edit::{BlobFileMeta, FileNumber};
use crate::base::{Error, Result};
use crate::blob::format::{BlobIndexPageIter, BlobMetaindex, BlobSectionIndex};
use crate::block::cached_block::{Cacheable, CachedBlobIndexPage, CachedBlobValue};
use crate::block::frame::{BlockFrame, FRAME_HEADER_LEN, open_frame};
use crate::block::{BlockCache, BlockHandle, BlockKind};
use crate::mem::slice::Slice;
use crate::vfs::File;
use crate::vfs::open_files::DataFiles;
use crate::vfs::read_ahead::{ReadAhead, ReadAheadRequest};

/// What opening reads at once from the end of the file.
const TAIL_LEN: u64 = 4 << 10;
/// Of values beyond this it is asked first whether there is memory.
const CHECKED_ALLOCATION_MIN: usize = 1 << 20;

/// A blob file, opened when it is first read from. Thread safe; holds no file open by itself, and in memory no more
/// than the directory.
pub(crate) struct BlobFile {
    files: DataFiles,
    cache: Arc<BlockCache>,
    id: FileNumber,
    extent: BlobFileExtent,
}

/// How much of a file there is to read.
enum BlobFileExtent {
    /// A finished file: its length in bytes, with an index at its end.
    Finished { size: u64, opened: OnceLock<BlobFileHead> },
    /// A growing file: values up to `end`, which increases, and no index; `file` is the writer, if there is one.
    Growing { file: Option<Arc<dyn File>>, file_id: [u8; 16], end: AtomicU64 },
}

/// Read-ahead of a sequential caller beyond the last value.
pub(crate) struct BlobReadAhead {
    read_ahead: ReadAhead,
    /// Where the frame behind the last one begins.
    expected: u64,
}

impl BlobReadAhead {
    /// For a walk that may go anywhere: it reads ahead once values follow each other.
    pub(crate) fn adaptive() -> BlobReadAhead {
        BlobReadAhead { read_ahead: ReadAhead::adaptive(), expected: 0 }
    }

    /// For one that reads front to back: it reads ahead at once.
    pub(crate) fn eager() -> BlobReadAhead {
        BlobReadAhead { read_ahead: ReadAhead::eager(), expected: 0 }
    }

    /// The walk comes to the frame at `handle`, wherever it will find it.
    fn advance_to(&mut self, handle: BlockHandle) {
        if handle.offset != self.expected {
            self.read_ahead.reset();
        }
        self.read_ahead.note_sequential_read();
        self.expected = handle.offset.saturating_add(handle.len);
    }
}

/// What is known of the file once its header and its end were read.
pub(crate) struct BlobFileHead {
    pub(crate) file_id: [u8; 16],
    pub(crate) metaindex: BlobMetaindex,
}

impl BlobFile {
    /// The file of that number, which has `size` bytes. `files` are blob files.
    pub(crate) fn new(files: DataFiles, cache: Arc<BlockCache>, id: FileNumber, size: u64) -> BlobFile {
        BlobFile { files, cache, id, extent: BlobFileExtent::Finished { size, opened: OnceLock::new() } }
    }

    /// The file with that number while it has no index: values up to `end` are read at the offsets in their pointers,
    /// through `file` while it is written. Otherwise as [`new`](BlobFile::new).
    pub(crate) fn growing(
        files: DataFiles,
        cache: Arc<BlockCache>,
        id: FileNumber,
        file: Option<Arc<dyn File>>,
        file_id: [u8; 16],
        end: u64,
    ) -> BlobFile {
        BlobFile { files, cache, id, extent: BlobFileExtent::Growing { file, file_id, end: AtomicU64::new(end) } }
    }

    /// A growing file has values up to `end` now.
    pub(crate) fn grow_to(&self, end: u64) {
        if let BlobFileExtent::Growing { end: known, .. } = &self.extent {
            known.store(end, Ordering::Release);
        }
    }

    /// What there is to read, in bytes.
    pub(crate) fn size(&self) -> u64 {
        match &self.extent {
            BlobFileExtent::Finished { size, .. } => *size,
            BlobFileExtent::Growing { end, .. } => end.load(Ordering::Acquire),
        }
    }

    fn file(&self) -> Result<Arc<dyn File>> {
        match &self.extent {
            BlobFileExtent::Growing { file: Some(file), .. } => Ok(Arc::clone(file)),
            BlobFileExtent::Finished { .. } | BlobFileExtent::Growing { .. } => self.files.get(self.id),
        }
    }

    fn file_id(&self) -> Result<&[u8; 16]> {
        match &self.extent {
            BlobFileExtent::Finished { .. } => Ok(&self.head()?.file_id),
            BlobFileExtent::Growing { file_id, .. } => Ok(file_id),
        }
    }

    /// What the manifest would say of a blob file that only its file is known of.
    ///
    /// # Errors
    /// `Corruption`, `Unsupported` or `Io` if it cannot be opened.
    pub(crate) fn read_meta(files: &DataFiles, cache: &Arc<BlockCache>, id: FileNumber) -> Result<BlobFileMeta> {
        let size = files.get(id)?.length()?;
        let file = BlobFile::new(files.clone(), Arc::clone(cache), id, size);
        let directory = &file.head()?.metaindex;
        Ok(BlobFileMeta { number: id, size, created_ms: directory.created_ms, sections: directory.section_metas() })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.files.path(self.id)
    }

    /// What is held outside of the cache now, in bytes.
    pub(crate) fn memory_bytes(&self) -> u64 {
        let directory = match &self.extent {
            BlobFileExtent::Finished { opened, .. } => opened.get().map_or(0, |opened| opened.metaindex.memory_bytes()),
            BlobFileExtent::Growing { .. } => 0,
        };
        (size_of::<BlobFile>() + directory) as u64
    }

    /// Names the file, and the offset where there is none yet.
    #[cold]
    pub(crate) fn with_location(&self, error: Error, offset: u64) -> Error {
        error.at_offset(offset).in_file(self.path())
    }

    /// Header and directory. Two threads may both read them the first time; one of the two is kept.
    ///
    /// # Errors
    /// `Corruption` if it is no blob file of that length, `Unsupported` if a newer version wrote it.
    pub(crate) fn head(&self) -> Result<&BlobFileHead> {
        let BlobFileExtent::Finished { opened: kept, .. } = &self.extent else {
            return Err(Error::corruption("blob file has no index yet").in_file(self.path()));
        };
        if let Some(opened) = kept.get() {
            return Ok(opened);
        }
        let opened = self.read_head().map_err(|error| error.in_file(self.path()))?;
        Ok(kept.get_or_init(|| opened))
    }

    /// Reads header and end of the file.
    ///
    /// # Errors
    /// As for [`opened`](BlobFile::head).
    pub(crate) fn read_head(&self) -> Result<BlobFileHead> {
        let (file, size) = (self.file()?, self.size());
        let found = file.length()?;
        if found != size || found < (FileHeader::LEN + FileFooter::LEN) as u64 {
            return Err(Error::corruption(format!("blob file has {found} bytes, {size} are expected")));
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
        let directory = open_frame(frame.into(), &file_id, footer.metaindex_offset, BlockKind::Metaindex)
            .and_then(|body| BlobMetaindex::decode(&body, footer.metaindex_offset))
            .map_err(|error| error.at_offset(footer.metaindex_offset))?;
        Ok(BlobFileHead { file_id, metaindex: directory })
    }

    /// Bytes of the file, none of them past its end.
    fn read_bytes(&self, offset: u64, len: u64) -> Result<Vec<u8>> {
        if offset.checked_add(len).is_none_or(|end| end > self.size()) {
            return Err(Error::corruption("frame reaches past the end of the file"));
        }
        let len = usize::try_from(len).map_err(|_| Error::unsupported("frame is larger than this machine's memory"))?;
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(len).map_err(|_| Error::corruption("no memory for a frame of its declared length"))?;
        bytes.resize(len, 0);
        self.file()?.read_exact_at(&mut bytes, offset)?;
        Ok(bytes)
    }

    /// The value that `pointer` leads to. With `fill_cache`, what was read goes into the cache; without, a value that
    /// is there is used and nothing is put in.
    ///
    /// # Errors
    /// `Corruption` if there is no such value or it does not verify, `Unsupported` if a newer version wrote it, or
    /// `Io`.
    pub(crate) fn read(&self, pointer: &BlobPointer, fill_cache: bool) -> Result<Slice> {
        self.cached_value(pointer, fill_cache, None).map(|value| value.slice())
    }

    /// As [`read`](BlobFile::read), for a sequential caller: while values are adjacent, the bytes behind them are
    /// read ahead into `ahead`.
    ///
    /// # Errors
    /// As for [`read`](BlobFile::read).
    pub(crate) fn read_sequential(
        &self,
        pointer: &BlobPointer,
        fill_cache: bool,
        ahead: &mut BlobReadAhead,
    ) -> Result<Slice> {
        self.cached_value(pointer, fill_cache, Some(ahead)).map(|value| value.slice())
    }

    fn cached_value(
        &self,
        pointer: &BlobPointer,
        fill_cache: bool,
        mut ahead: Option<&mut BlobReadAhead>,
    ) -> Result<Arc<CachedBlobValue>> {
        let handle = self.find_frame(pointer).map_err(|error| self.with_location(error, pointer.frame_offset))?;
        if let Some(ahead) = &mut ahead {
            ahead.advance_to(handle);
        }
        let value = match self.cache.get::<CachedBlobValue>(self.id, handle.offset, BlockKind::Blob, None) {
            Some(value) => value,
            None => {
                let value = self.load_value(handle, ahead).map_err(|error| self.with_location(error, handle.offset))?;
                let value = Arc::new(value);
                if fill_cache {
                    self.cache.insert(self.id, handle.offset, BlockKind::Blob, &value, None, false);
                }
                value
            }
        };
        if value.len() != pointer.value_len as usize {
            let error = Error::corruption("value has another length than its pointer says");
            return Err(self.with_location(error, handle.offset));
        }
        Ok(value)
    }

    /// The frame of the value that `pointer` leads to.
    fn find_frame(&self, pointer: &BlobPointer) -> Result<BlockHandle> {
        let pointed = BlockHandle { offset: pointer.frame_offset, len: pointer.frame_len };
        if let BlobFileExtent::Growing { .. } = &self.extent {
            let is_here = pointer.logical_file == self.id && pointer.frame_offset >= FileHeader::LEN as u64;
            return if is_here { Ok(pointed) } else { Err(no_such_value_error()) };
        }
        let opened = self.head()?;
        let section = opened.metaindex.section(pointer.logical_file);
        let section = section.ok_or_else(|| Error::corruption("blob file has no values of the file pointed to"))?;
        let found = match section.rewritten {
            false => section.check_pointer(pointer.ordinal, pointed),
            true => {
                self.find_rewritten_frame(opened, section, pointer.ordinal)?.filter(|frame| frame.len == pointed.len)
            }
        };
        found.ok_or_else(no_such_value_error)
    }

    /// The frame of an ordinal in a section whose offsets are not those of pointers: its index tells.
    fn find_rewritten_frame(
        &self,
        opened: &BlobFileHead,
        section: &BlobSectionIndex,
        ordinal: u32,
    ) -> Result<Option<BlockHandle>> {
        let Some((page, end)) = section.page_for_ordinal(ordinal) else { return Ok(None) };
        let bytes = self.cached_page(opened, page.handle)?;
        let mut iter = BlobIndexPageIter::new(&bytes, page, end);
        while let Some((found, frame)) = iter.next().map_err(|error| error.at_offset(page.handle.offset))? {
            if found >= ordinal {
                return Ok((found == ordinal).then_some(frame));
            }
        }
        Ok(None)
    }

    /// A page of an index, by way of the cache.
    fn cached_page(&self, opened: &BlobFileHead, handle: BlockHandle) -> Result<Arc<CachedBlobIndexPage>> {
        if let Some(page) = self.cache.get::<CachedBlobIndexPage>(self.id, handle.offset, BlockKind::BlobIndex, None) {
            return Ok(page);
        }
        let page = Arc::new(self.read_page(opened, handle)?);
        self.cache.insert(self.id, handle.offset, BlockKind::BlobIndex, &page, None, false);
        Ok(page)
    }

    /// A page of an index, past the cache.
    pub(crate) fn read_page(&self, opened: &BlobFileHead, handle: BlockHandle) -> Result<CachedBlobIndexPage> {
        let bytes = self.read_bytes(handle.offset, handle.len)?;
        let body = open_frame(bytes.into(), &opened.file_id, handle.offset, BlockKind::BlobIndex);
        body.and_then(CachedBlobIndexPage::decode_body).map_err(|error| error.at_offset(handle.offset))
    }

    /// Reads a value, into the bytes that are handed out of it.
    fn load_value(&self, handle: BlockHandle, ahead: Option<&mut BlobReadAhead>) -> Result<CachedBlobValue> {
        let bytes = match ahead {
            Some(ahead) => self.read_window(handle, ahead)?,
            None => None,
        };
        let bytes = bytes.map_or_else(|| self.read_shared(handle), Ok)?;
        let frame = BlockFrame::check(&bytes, self.file_id()?, handle.offset, BlockKind::Blob)?;
        if frame.codec == Codec::None {
            return Ok(CachedBlobValue::new(bytes, FRAME_HEADER_LEN));
        }
        let mut raw = zeroed_bytes(frame.raw_len)?;
        decompress(frame.codec, frame.stored, unique_mut(&mut raw))?;
        Ok(CachedBlobValue::new(raw, 0))
    }

    /// The frame's bytes out of what was read ahead, which may read more ahead; none where it does not.
    fn read_window(&self, handle: BlockHandle, ahead: &mut BlobReadAhead) -> Result<Option<Arc<[u8]>>> {
        let size = self.size();
        if let ReadAheadRequest::Ahead(len) = ahead.read_ahead.request_for(handle.offset, handle.len)
            && handle.end()? <= size
        {
            let bytes = self.read_bytes(handle.offset, len.min(size - handle.offset))?;
            ahead.read_ahead.fill(handle.offset, bytes);
        }
        Ok(ahead.read_ahead.buffered(handle.offset, handle.len).map(Arc::from))
    }

    fn read_shared(&self, handle: BlockHandle) -> Result<Arc<[u8]>> {
        if handle.end()? > self.size() {
            return Err(Error::corruption("value reaches past the end of the file"));
        }
        let len = usize::try_from(handle.len);
        let mut bytes =
            zeroed_bytes(len.map_err(|_| Error::unsupported("value is larger than this machine's memory"))?)?;
        self.file()?.read_exact_at(unique_mut(&mut bytes), handle.offset)?;
        Ok(bytes)
    }

    /// Lets `read` see the frame at `handle`, checked and as it is stored, past the cache.
    ///
    /// # Errors
    /// `Corruption`, `Unsupported` or `Io` if it cannot be read, and those of `read`.
    pub(crate) fn with_frame<R>(
        &self,
        handle: BlockHandle,
        ahead: &mut BlobReadAhead,
        read: impl FnOnce(&BlockFrame<'_>) -> Result<R>,
    ) -> Result<R> {
        let file_id = self.file_id()?;
        let check = |bytes: &[u8]| read(&BlockFrame::check(bytes, file_id, handle.offset, BlockKind::Blob)?);
        let in_place = || {
            ahead.advance_to(handle);
            match self.read_window(handle, ahead)? {
                Some(bytes) => check(&bytes),
                None => check(&self.read_bytes(handle.offset, handle.len)?),
            }
        };
        in_place().map_err(|error| self.with_location(error, handle.offset))
    }

    /// Walks over all values of a logical file that are here.
    ///
    /// # Errors
    /// `Corruption` if there are none, and those of [`opened`](BlobFile::head).
    pub(crate) fn section_iter(&self, logical: FileNumber) -> Result<BlobSectionIter<'_>> {
        let section = self.head()?.metaindex.section(logical);
        let section = section.ok_or_else(|| Error::corruption("blob file has no values of that file"));
        let section = section.map_err(|error| error.in_file(self.path()))?;
        Ok(BlobSectionIter { file: self, section, next_page: 0, entries: Vec::new().into_iter() })
    }
}

/// A walk over the index of one section, past the cache.
pub(crate) struct BlobSectionIter<'a> {
    file: &'a BlobFile,
    section: &'a BlobSectionIndex,
    /// The page that is read next.
    next_page: usize,
    /// Of the page before, those that are left.
    entries: std::vec::IntoIter<(u32, BlockHandle)>,
}

impl BlobSectionIter<'_> {
    /// Goes on with the page that `ordinal` is on if it is anywhere: smaller ones may come first.
    pub(crate) fn seek(&mut self, ordinal: u32) {
        self.next_page = self.section.pages.partition_point(|page| page.first_ordinal <= ordinal).saturating_sub(1);
        self.entries = Vec::new().into_iter();
    }

    /// The next ordinal and its frame.
    ///
    /// # Errors
    /// `Corruption`, `Unsupported` or `Io` if the index cannot be read.
    pub(crate) fn next(&mut self) -> Result<Option<(u32, BlockHandle)>> {
        loop {
            if let Some(entry) = self.entries.next() {
                return Ok(Some(entry));
            }
            let Some(page) = self.section.pages.get(self.next_page) else { return Ok(None) };
            let entries = self
                .read_entries(self.next_page)
                .map_err(|error| self.file.with_location(error, page.handle.offset))?;
            (self.entries, self.next_page) = (entries.into_iter(), self.next_page + 1);
        }
    }

    fn read_entries(&self, at: usize) -> Result<Vec<(u32, BlockHandle)>> {
        let page = &self.section.pages[at];
        let bytes = self.file.read_page(self.file.head()?, page.handle)?;
        let mut iter = BlobIndexPageIter::new(&bytes, page, self.section.page_end_offset(at));
        let mut entries = Vec::new();
        while let Some(entry) = iter.next()? {
            entries.push(entry);
        }
        let behind = self.section.pages.get(at + 1).map(|next| next.first_ordinal);
        if let (Some((last, _)), Some(next)) = (entries.last(), behind)
            && *last >= next
        {
            return Err(Error::corruption("pages of a section share ordinals"));
        }
        Ok(entries)
    }
}

fn no_such_value_error() -> Error {
    Error::corruption("blob file has no such value as is pointed to")
}

/// Bytes without another owner.
fn unique_mut(bytes: &mut Arc<[u8]>) -> &mut [u8] {
    Arc::get_mut(bytes).expect("it was just made")
}

/// An `Arc` has no constructor that can fail: whether there is memory is asked beforehand where it may not be.
fn zeroed_bytes(len: usize) -> Result<Arc<[u8]>> {
    if len > CHECKED_ALLOCATION_MIN && Vec::<u8>::new().try_reserve_exact(len).is_err() {
        return Err(Error::corruption("no memory for a value of its declared length"));
    }
    Ok(std::iter::repeat_n(0, len).collect())
}

impl BlobFile {
    /// Reads all of the file, past the cache, and compares it with what the manifest says; gives the number of values.
    ///
    /// # Errors
    /// `Corruption` with file and offset of the first thing that is wrong.
    pub(crate) fn verify(&self, meta: &BlobFileMeta) -> Result<u64> {
        self.verify_sections(meta).map_err(|error| error.in_file(self.path()))
    }

    fn verify_sections(&self, meta: &BlobFileMeta) -> Result<u64> {
        let opened = self.head()?;
        // Header, footer and directory are read again: they may have changed since.
        let again = self.read_head()?;
        if (again.file_id, &again.metaindex) != (opened.file_id, &opened.metaindex) {
            return Err(Error::corruption("file is not the one that was opened"));
        }
        let directory = &opened.metaindex;
        if directory.section_metas() != meta.sections || directory.created_ms != meta.created_ms {
            return Err(Error::corruption("blob file has other values than the manifest says"));
        }
        let (mut ahead, mut raw) = (BlobReadAhead::eager(), Vec::new());
        for section in &directory.sections {
            let mut iter = self.section_iter(section.logical)?;
            let (mut values, mut last) = (0u64, None);
            while let Some((ordinal, handle)) = iter.next()? {
                if !section.rewritten && u64::from(ordinal) != values {
                    return Err(Error::corruption("an ordinal of the blob file is missing").at_offset(handle.offset));
                }
                self.with_frame(handle, &mut ahead, |frame| {
                    raw.clear();
                    raw.resize(frame.raw_len, 0);
                    decompress(frame.codec, frame.stored, &mut raw)
                })?;
                values += 1;
                last = Some(handle);
            }
            let ends = last.is_some_and(|handle| handle.end().is_ok_and(|end| end == section.end_offset()));
            if values != section.value_count || !ends {
                return Err(Error::corruption("section has other values than the directory says"));
            }
        }
        Ok(directory.sections.iter().map(|section| section.value_count).sum())
    }
}

/// The referenced ordinals of logical files, over any number of tables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LiveBlobs {
    files: BTreeMap<FileNumber, OrdinalSet>,
}

impl LiveBlobs {
    /// Takes in what one more table refers to.
    pub(crate) fn add(&mut self, references: &BlobReferences) {
        self.add_files(references, |_| true);
    }

    /// The same for the logical files that are `wanted`.
    pub(crate) fn add_files(&mut self, references: &BlobReferences, wanted: impl Fn(FileNumber) -> bool) {
        for (logical, ordinals) in references.ordinals().filter(|(logical, _)| wanted(*logical)) {
            self.files.entry(logical).or_default().merge(ordinals);
        }
    }

    /// In ascending order.
    pub(crate) fn files(&self) -> impl Iterator<Item = (FileNumber, &OrdinalSet)> {
        self.files.iter().map(|(&logical, ordinals)| (logical, ordinals))
    }

    /// What is referenced of a logical file, if anything is.
    pub(crate) fn ordinals_of(&self, logical: FileNumber) -> Option<&OrdinalSet> {
        self.files.get(&logical)
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
        live.add(&table_references(&[(1, 0), (1, 4), (2, 7)]));
        live.add(&table_references(&[(1, 2), (1, 1), (3, 0)]));
        let of = |logical| live.ordinals_of(FileNumber(logical)).map(|ordinals| ordinals.iter().collect::<Vec<_>>());
        assert_eq!([of(1), of(2), of(3), of(4)], [Some(vec![0, 1, 2, 4]), Some(vec![7]), Some(vec![0]), None]);
    }
}

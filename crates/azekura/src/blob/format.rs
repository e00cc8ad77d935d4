#![doc = include_str!("../../docs/format/blob.md")]

use crate::base::coding::{ByteReader, put_bytes, put_varint};
use crate::base::file_format::FileHeader;
use crate::base::version_edit::{BlobFileMeta, BlobFileSection, FileNumber};
use crate::base::{Error, Result};
use crate::block::BlockHandle;
use crate::block::frame::FRAME_HEADER_LEN;

/// Length in bytes at which a page of the index is complete.
pub(crate) const INDEX_PAGE_LEN: usize = 4 << 10;
/// Maximum number of values in a section. Ordinals are below it.
pub(crate) const SECTION_VALUES_MAX: u64 = u32::MAX as u64;
/// Bit of the tag of a field: a reader that does not know the tag may skip the field.
const FIELD_IGNORABLE: u8 = 0x80;
/// Flag of a section: its values were copied from other files.
const FLAG_REWRITTEN: u8 = 1;

const FIELD_CREATED: u8 = 1;
const FIELD_SECTION: u8 = 2;

/// The metaindex of a blob file: its sections, and the handles of their index pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlobMetaindex {
    /// Creation time in milliseconds since 1970.
    pub(crate) created_ms: u64,
    /// Sections in the order of their values in the file.
    pub(crate) sections: Vec<BlobSectionIndex>,
}

/// The values of one logical file: adjacent frames in ascending order of their ordinals.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BlobSectionIndex {
    pub(crate) logical: FileNumber,
    /// Whether the values were copied. Then ordinals may be missing, and the offsets in pointers do not apply to this
    /// file.
    pub(crate) rewritten: bool,
    pub(crate) value_count: u64,
    /// Length of all frames in bytes.
    pub(crate) frame_bytes: u64,
    /// Offset of the first frame.
    pub(crate) start_offset: u64,
    pub(crate) pages: Vec<BlobPageHandle>,
}

/// A page of the index of a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlobPageHandle {
    /// First ordinal of the page.
    pub(crate) first_ordinal: u32,
    /// Offset of the frame of that value.
    pub(crate) offset: u64,
    /// Handle of the page.
    pub(crate) handle: BlockHandle,
}

impl BlobMetaindex {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (mut out, mut payload) = (Vec::new(), Vec::new());
        put_varint(&mut payload, self.created_ms);
        out.push(FIELD_CREATED);
        put_bytes(&mut out, &payload);
        for section in &self.sections {
            payload.clear();
            section.encode(&mut payload);
            out.push(FIELD_SECTION);
            put_bytes(&mut out, &payload);
        }
        out
    }

    /// Decodes the metaindex that is stored at `offset` of its file.
    ///
    /// # Errors
    /// `Corruption` if the bytes are not a metaindex or belong to another file; `Unsupported` for an unknown field
    /// that may not be skipped.
    pub(crate) fn decode(bytes: &[u8], offset: u64) -> Result<BlobMetaindex> {
        let mut d = ByteReader::new(bytes);
        let (mut created_ms, mut sections) = (None, Vec::new());
        while !d.is_empty() {
            let tag = d.u8()?;
            let mut payload = ByteReader::new(d.bytes()?);
            match tag {
                FIELD_CREATED if created_ms.is_none() => created_ms = Some(payload.varint()?),
                FIELD_CREATED => return Err(Error::corruption("metaindex has two creation times")),
                FIELD_SECTION => sections.push(BlobSectionIndex::read(&mut payload)?),
                _ if tag & FIELD_IGNORABLE != 0 => continue,
                _ => return Err(Error::unsupported(format!("blob file field {tag} needs a newer version"))),
            }
            payload.finish()?;
        }
        let created_ms = created_ms.ok_or_else(|| Error::corruption("metaindex has no creation time"))?;
        let metaindex = BlobMetaindex { created_ms, sections };
        metaindex.check_layout(offset)?;
        Ok(metaindex)
    }

    /// Checks that the sections are adjacent from the header on, and are followed by the pages, which end at the
    /// metaindex.
    pub(crate) fn check_layout(&self, offset: u64) -> Result<()> {
        let mut at = FileHeader::LEN as u64;
        for section in &self.sections {
            if section.start_offset != at {
                return Err(Error::corruption("sections of the blob file are not adjacent"));
            }
            at = section.end_offset();
        }
        for page in self.sections.iter().flat_map(|section| &section.pages) {
            if page.handle.offset != at {
                return Err(Error::corruption("index pages of the blob file are not adjacent"));
            }
            at = page.handle.end()?;
        }
        let mut logical: Vec<FileNumber> = self.sections.iter().map(|section| section.logical).collect();
        logical.sort_unstable();
        if at != offset || logical.is_empty() || !logical.is_sorted_by(|a, b| a < b) {
            return Err(Error::corruption("metaindex does not match its blob file"));
        }
        Ok(())
    }

    /// The section of a logical file. Searches linearly, because a file has few sections.
    pub(crate) fn section(&self, logical: FileNumber) -> Option<&BlobSectionIndex> {
        self.sections.iter().find(|section| section.logical == logical)
    }

    /// The description of the file for the manifest.
    pub(crate) fn describe_file(&self, number: FileNumber, size: u64) -> BlobFileMeta {
        let sections = self.sections.iter().map(|section| BlobFileSection {
            logical_file: section.logical,
            values: section.value_count,
            bytes: section.frame_bytes,
            rewritten: section.rewritten,
        });
        BlobFileMeta { number, size, created_ms: self.created_ms, sections: sections.collect() }
    }

    /// Memory use in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        let pages: usize = self.sections.iter().map(|section| section.pages.len()).sum();
        self.sections.len() * size_of::<BlobSectionIndex>() + pages * size_of::<BlobPageHandle>()
    }
}

impl BlobSectionIndex {
    fn encode(&self, out: &mut Vec<u8>) {
        put_varint(out, self.logical.0);
        out.push(if self.rewritten { FLAG_REWRITTEN } else { 0 });
        put_varint(out, self.value_count);
        put_varint(out, self.frame_bytes);
        put_varint(out, self.start_offset);
        put_varint(out, self.pages.len() as u64);
        let (mut first, mut offset) = (0, self.start_offset);
        for page in &self.pages {
            put_varint(out, u64::from(page.first_ordinal - first));
            put_varint(out, page.offset - offset);
            page.handle.encode(out);
            (first, offset) = (page.first_ordinal, page.offset);
        }
    }

    fn read(d: &mut ByteReader<'_>) -> Result<BlobSectionIndex> {
        let logical = FileNumber(d.varint()?);
        let flags = d.u8()?;
        let (values, bytes, start) = (d.varint()?, d.varint()?, d.varint()?);
        if flags & !FLAG_REWRITTEN != 0 {
            return Err(Error::unsupported(format!("flags {flags:#x} of a section need a newer version")));
        }
        let mut section = BlobSectionIndex {
            logical,
            rewritten: flags & FLAG_REWRITTEN != 0,
            value_count: values,
            frame_bytes: bytes,
            start_offset: start,
            pages: Vec::new(),
        };
        let ends = start.checked_add(bytes).is_some();
        let count = d.varint()?;
        // Every frame has a header, and a page has at least four bytes here. So memory use is in proportion to the
        // length of the file.
        if !ends
            || values > SECTION_VALUES_MAX
            || values > bytes / FRAME_HEADER_LEN as u64
            || count > d.rest().len() as u64 / 4
        {
            return Err(Error::corruption("section declares impossible lengths"));
        }
        section.pages.reserve_exact(count as usize);
        let (mut first, mut offset) = (0u32, start);
        for at in 0..count {
            let (ordinals, bytes) = (d.varint_u32()?, d.varint()?);
            let handle = BlockHandle::read(d)?;
            let next = first.checked_add(ordinals).zip(offset.checked_add(bytes));
            let moved = at == 0 || (ordinals > 0 && bytes > 0);
            (first, offset) = next
                .filter(|(_, offset)| moved && *offset < section.end_offset())
                .ok_or_else(|| Error::corruption("index pages of a section are not in order"))?;
            section.pages.push(BlobPageHandle { first_ordinal: first, offset, handle });
        }
        let is_valid = section.pages.first().is_some_and(|page| {
            page.offset == start && (section.rewritten || page.first_ordinal == 0) && count <= values
        });
        if is_valid { Ok(section) } else { Err(Error::corruption("section has no valid first page")) }
    }

    /// End of the last frame. `read` has checked that it fits into 64 bits.
    pub(crate) fn end_offset(&self) -> u64 {
        self.start_offset + self.frame_bytes
    }

    /// The page that contains `ordinal` if the section does, and the end of the page's last frame.
    pub(crate) fn page_for_ordinal(&self, ordinal: u32) -> Option<(&BlobPageHandle, u64)> {
        let at = self.pages.partition_point(|page| page.first_ordinal <= ordinal).checked_sub(1)?;
        Some((&self.pages[at], self.page_end_offset(at)))
    }

    /// End of the last frame of the `at`-th page.
    pub(crate) fn page_end_offset(&self, at: usize) -> u64 {
        self.pages.get(at + 1).map_or(self.end_offset(), |next| next.offset)
    }

    /// Returns `pointed`, which is offset and length of a pointer, if it can be the frame of `ordinal`. For sections
    /// that were not rewritten.
    pub(crate) fn check_pointer(&self, ordinal: u32, pointed: BlockHandle) -> Option<BlockHandle> {
        let (page, end) = self.page_for_ordinal(ordinal)?;
        let inside = pointed.offset >= page.offset && pointed.end().is_ok_and(|to| to <= end);
        let starts = (ordinal == page.first_ordinal) == (pointed.offset == page.offset);
        (u64::from(ordinal) < self.value_count && inside && starts).then_some(pointed)
    }
}

/// Iterates over the entries of a page: ordinals and the handles of their frames.
pub(crate) struct BlobIndexPageIter<'a> {
    d: ByteReader<'a>,
    /// Ordinal of the last entry; before the first entry, the first ordinal of the page.
    ordinal: u32,
    offset: u64,
    end: u64,
    started: bool,
}

impl<'a> BlobIndexPageIter<'a> {
    /// Iterates over the bytes of `page`, whose last frame ends at `end`.
    pub(crate) fn new(bytes: &'a [u8], page: &BlobPageHandle, end: u64) -> BlobIndexPageIter<'a> {
        BlobIndexPageIter {
            d: ByteReader::new(bytes),
            ordinal: page.first_ordinal,
            offset: page.offset,
            end,
            started: false,
        }
    }

    fn read_next(&mut self) -> Result<Option<(u32, BlockHandle)>> {
        if self.d.is_empty() {
            return match self.started && self.offset == self.end {
                true => Ok(None),
                false => Err(Error::corruption("index page ends before the end of its frames")),
            };
        }
        let (gap, len) = (self.d.varint_u32()?, self.d.varint()?);
        let ordinal = self.ordinal.checked_add(gap).filter(|_| (gap > 0) == self.started);
        let ordinal = ordinal.ok_or_else(|| Error::corruption("ordinals of an index page are not in order"))?;
        let handle = BlockHandle { offset: self.offset, len };
        let end = handle.end()?;
        if len < FRAME_HEADER_LEN as u64 || end > self.end {
            return Err(Error::corruption("index page has an invalid frame length"));
        }
        (self.ordinal, self.offset, self.started) = (ordinal, end, true);
        Ok(Some((ordinal, handle)))
    }
}

impl Iterator for BlobIndexPageIter<'_> {
    type Item = Result<(u32, BlockHandle)>;

    /// The next entry, or `Corruption` if the page is malformed or its frames do not end at `end`. The caller stops at
    /// the first error.
    fn next(&mut self) -> Option<Result<(u32, BlockHandle)>> {
        self.read_next().transpose()
    }
}

/// Appends an entry of a page: the difference to the previous ordinal, and the length of the frame.
pub(crate) fn put_index_page_entry(out: &mut Vec<u8>, gap: u32, len: u64) {
    put_varint(out, u64::from(gap));
    put_varint(out, len);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    fn sample_metaindex() -> BlobMetaindex {
        let page = |first, offset, at| BlobPageHandle {
            first_ordinal: first,
            offset,
            handle: BlockHandle { offset: at, len: 30 },
        };
        let section = |logical, rewritten, start, bytes, pages| BlobSectionIndex {
            logical: FileNumber(logical),
            rewritten,
            value_count: 7,
            frame_bytes: bytes,
            start_offset: start,
            pages,
        };
        BlobMetaindex {
            created_ms: 1 << 40,
            sections: vec![
                section(9, false, 64, 300, vec![page(0, 64, 664), page(3, 164, 694)]),
                section(4, true, 364, 300, vec![page(5, 364, 724)]),
            ],
        }
    }

    #[test]
    fn directories_round_trip_and_no_prefix_is_one() {
        let bytes = sample_metaindex().encode();
        assert_eq!(BlobMetaindex::decode(&bytes, 754).unwrap(), sample_metaindex());
        for cut in 0..bytes.len() {
            assert!(BlobMetaindex::decode(&bytes[..cut], 754).is_err());
        }
        assert!(BlobMetaindex::decode(&bytes, 753).is_err(), "of another file");
        let mut newer = bytes.clone();
        newer.extend_from_slice(&[0x83, 1, 9]);
        assert_eq!(BlobMetaindex::decode(&newer, 754).unwrap(), sample_metaindex());
        newer.extend_from_slice(&[3, 1, 9]);
        assert_eq!(BlobMetaindex::decode(&newer, 754).unwrap_err().kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn inconsistent_metaindex_is_corruption() {
        type MetaindexChange = fn(&mut BlobMetaindex);
        let changes: [(&str, MetaindexChange); 9] = [
            ("the same logical file twice", |d| d.sections[1].logical = FileNumber(9)),
            ("a gap between sections", |d| (d.sections[1].start_offset, d.sections[1].pages[0].offset) = (365, 365)),
            ("sections overlap", |d| d.sections[0].frame_bytes += 1),
            ("more values than frames fit", |d| d.sections[0].value_count = 19),
            ("a section without a page", |d| d.sections[1].pages.clear()),
            ("a section that begins in the middle", |d| d.sections[0].pages[0].first_ordinal = 1),
            ("a page after the end", |d| d.sections[0].pages[1].offset = 365),
            ("pages that are not adjacent", |d| d.sections[1].pages[0].handle.offset += 1),
            ("nothing at all", |d| d.sections.clear()),
        ];
        for (what, change) in changes {
            let mut bad = sample_metaindex();
            change(&mut bad);
            assert_eq!(BlobMetaindex::decode(&bad.encode(), 754).unwrap_err().kind(), ErrorKind::Corruption, "{what}");
        }
    }

    #[test]
    fn pointer_outside_its_page_is_refused() {
        let metaindex = sample_metaindex();
        let section = metaindex.section(FileNumber(9)).unwrap();
        let accepted = |ordinal, offset, len| section.check_pointer(ordinal, BlockHandle { offset, len }).is_some();
        assert!(accepted(0, 64, 20) && accepted(1, 84, 80) && accepted(3, 164, 30) && accepted(6, 300, 64));
        assert!(!accepted(0, 84, 20) && !accepted(1, 64, 20), "another ordinal of the page");
        assert!(!accepted(1, 84, 81) && !accepted(3, 84, 20), "of another page");
        assert!(!accepted(6, 300, 65) && !accepted(7, 300, 20), "after the end");
        assert!(!accepted(6, 300, u64::MAX));
    }

    #[test]
    fn pages_lead_from_frame_to_frame_to_their_end() {
        let page = BlobPageHandle { first_ordinal: 10, offset: 100, handle: BlockHandle::default() };
        let mut bytes = Vec::new();
        for (gap, len) in [(0, 20), (1, 30), (5, 50)] {
            put_index_page_entry(&mut bytes, gap, len);
        }
        let iter = |bytes: &[u8], end| -> Result<Vec<(u32, u64)>> {
            let entries = BlobIndexPageIter::new(bytes, &page, end);
            entries.map(|entry| entry.map(|(ordinal, handle)| (ordinal, handle.offset))).collect()
        };
        assert_eq!(iter(&bytes, 200).unwrap(), [(10, 100), (11, 120), (16, 150)]);
        for (bytes, end) in [(&bytes[..], 199), (&bytes[..], 201), (&bytes[..4], 200), (&[], 100), (&[0, 100], 199)] {
            assert!(iter(bytes, end).is_err());
        }
        for bad in [&[1, 100][..], &[0, 50, 0, 50], &[0, 84, 1, 15, 1, 1], &[0, 0xff, 0xff, 0xff, 0xff, 0x7f]] {
            assert!(iter(bad, 200).is_err(), "{bad:?}");
        }
    }
}

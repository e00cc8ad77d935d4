#![doc = include_str!("../../../docs/format/pool_image.md")]
//!
//! The shadow of a checkpoint is a copy of its pages, written before the image so that a crash damages at most one of
//! the two.

use crate::base::checksum::{location_seed, xxh3};
use crate::base::coding::ByteReader;
use crate::base::file_format::{FileHeader, FileKind};
use crate::base::version_edit::PartitionId;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::mem::pages::PAGE;
use crate::vfs::File;

/// Length in bytes of a page of the file, equal to that of a page whose changes are tracked.
pub(crate) const PAGE_LEN: usize = PAGE as usize;

/// Number of image pages whose checksums one check page contains.
pub(crate) const PAGES_PER_GROUP: u64 = 511;

/// Offset of the checksum in a first page, and of the fields that it covers.
const CHECKSUM_AT: usize = FileHeader::LEN;
const FIELDS_AT: usize = CHECKSUM_AT + 8;

/// The position of an image page in its file, counted in pages.
pub(crate) fn file_page_of(page: u64) -> u64 {
    file_page_of_check_page(page / PAGES_PER_GROUP) + 1 + page % PAGES_PER_GROUP
}

/// The position of the check page of a group, counted in pages.
pub(crate) fn file_page_of_check_page(group: u64) -> u64 {
    1 + group * (PAGES_PER_GROUP + 1)
}

/// The image page at a position of its file; `None` for the position of a check page or of the first page.
pub(crate) fn image_page_of(place: u64) -> Option<u64> {
    let (group, n) = (place.checked_sub(1)? / (PAGES_PER_GROUP + 1), place.checked_sub(1)? % (PAGES_PER_GROUP + 1));
    n.checked_sub(1).map(|n| group * PAGES_PER_GROUP + n)
}

/// The length in bytes of the file of an image of `len` bytes; `None` if it exceeds 64 bits.
pub(crate) fn file_len(len: u64) -> Option<u64> {
    match len / PAGE {
        0 => Some(PAGE),
        pages => file_page_of(pages - 1).checked_add(1)?.checked_mul(PAGE),
    }
}

/// The checksum of a page at the position `place` of its file; never 0.
pub(crate) fn page_checksum(file_id: &[u8; 16], place: u64, bytes: &[u8]) -> u64 {
    xxh3(location_seed(file_id, place * PAGE), bytes).max(1)
}

/// Encodes a first page: the header of a kind of file and the fields, with their checksum.
fn encode_header_page(kind: FileKind, file_id: &[u8; 16], fields: &[u64]) -> Vec<u8> {
    let mut page = FileHeader { kind, file_id: *file_id }.encode().to_vec();
    page.resize(PAGE_LEN, 0);
    for (out, field) in page[FIELDS_AT..].chunks_exact_mut(8).zip(fields) {
        out.copy_from_slice(&field.to_le_bytes());
    }
    let sum = xxh3(location_seed(file_id, CHECKSUM_AT as u64), &page[FIELDS_AT..]);
    page[CHECKSUM_AT..FIELDS_AT].copy_from_slice(&sum.to_le_bytes());
    page
}

/// Decodes a first page: the id of its file, and a reader at the fields.
fn decode_header_page(kind: FileKind, page: &[u8]) -> Result<([u8; 16], ByteReader<'_>)> {
    let file_id = FileHeader::decode(kind, page)?.file_id;
    let rest = page.get(CHECKSUM_AT..PAGE_LEN).ok_or_else(|| Error::corruption("the file ends in its first page"))?;
    let mut d = ByteReader::new(rest);
    if d.u64()? != xxh3(location_seed(&file_id, CHECKSUM_AT as u64), d.rest()) {
        return Err(Error::corruption("checksum of the first page does not match").at_offset(CHECKSUM_AT as u64));
    }
    Ok((file_id, d))
}

/// The first page of the file of an image. It describes the checkpoint that the file contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImageHeader {
    pub(crate) file_id: [u8; 16],
    pub(crate) partition: PartitionId,
    /// Number of the checkpoint. Numbers rise.
    pub(crate) checkpoint_number: u64,
    pub(crate) replay_from: SeqNo,
    pub(crate) max_seqno: SeqNo,
    /// Length of the image in bytes.
    pub(crate) image_len: u64,
    /// The checksum of the checksums of all check pages.
    pub(crate) root_checksum: u64,
}

impl ImageHeader {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let ImageHeader {
            file_id,
            partition,
            checkpoint_number: number,
            replay_from,
            max_seqno: highest,
            image_len: len,
            root_checksum: root,
        } = self;
        encode_header_page(FileKind::PoolImage, file_id, &[partition.0, *number, replay_from.0, highest.0, *len, *root])
    }

    /// # Errors
    /// `Corruption` if it is not a valid first page, `Unsupported` if a newer version wrote it.
    pub(crate) fn decode(page: &[u8]) -> Result<ImageHeader> {
        let (file_id, mut d) = decode_header_page(FileKind::PoolImage, page)?;
        let (partition, number) = (PartitionId(d.u64()?), d.u64()?);
        let (replay_from, highest, len, root) = (SeqNo(d.u64()?), SeqNo(d.u64()?), d.u64()?, d.u64()?);
        let is_last = number == u64::MAX; // no number could follow it
        let has_place = len.is_multiple_of(PAGE) && file_len(len).is_some_and(|len| len <= i64::MAX as u64);
        if replay_from > SeqNo::MAX || highest > SeqNo::MAX || is_last || !has_place {
            return Err(Error::corruption("the first page has impossible values").at_offset(FIELDS_AT as u64));
        }
        Ok(ImageHeader {
            file_id,
            partition,
            checkpoint_number: number,
            replay_from,
            max_seqno: highest,
            image_len: len,
            root_checksum: root,
        })
    }
}

/// The first page of a shadow. It describes the pages that a complete shadow contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShadowHeader {
    pub(crate) file_id: [u8; 16],
    /// Number of the checkpoint.
    pub(crate) checkpoint_number: u64,
    /// Number of pages.
    pub(crate) count: u64,
    /// Checksum of the list of pages.
    pub(crate) list_checksum: u64,
    /// Length in bytes of the pool file to which the pages belong.
    pub(crate) file_len: u64,
}

impl ShadowHeader {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let ShadowHeader { file_id, checkpoint_number: number, count, list_checksum: list, file_len: len } = self;
        encode_header_page(FileKind::PoolShadow, file_id, &[*number, *count, *list, *len])
    }

    /// # Errors
    /// As for [`ImageHeader::decode`].
    pub(crate) fn decode(page: &[u8]) -> Result<ShadowHeader> {
        let (file_id, mut d) = decode_header_page(FileKind::PoolShadow, page)?;
        Ok(ShadowHeader {
            file_id,
            checkpoint_number: d.u64()?,
            count: d.u64()?,
            list_checksum: d.u64()?,
            file_len: d.u64()?,
        })
    }
}

/// Checksums from before pages were changed, by page and by group.
pub(crate) struct SavedChecksums {
    pages: Vec<(u64, u64)>,
    check_pages: Vec<(u64, u64)>,
    /// The numbers of pages and groups.
    len: (usize, usize),
    /// The checksums behind the new end of a shorter image.
    cut_pages: Vec<u64>,
    cut_check_pages: Vec<u64>,
}

impl SavedChecksums {
    /// Groups whose check page has changed, ascending.
    pub(crate) fn groups(&self) -> impl Iterator<Item = u64> {
        self.check_pages.iter().map(|(group, _)| *group)
    }
}

/// The content of a check page.
#[derive(Debug)]
pub(crate) struct CheckPage {
    /// Its own checksum, 0 if the check page was never written.
    checksum: u64,
    /// The checksums of the existing pages of its group; empty if the check page was never written.
    page_checksums: Vec<u64>,
}

impl CheckPage {
    /// The check page of a group of `count` pages.
    ///
    /// # Errors
    /// `Corruption` if its checksum does not match.
    pub(crate) fn read(file_id: &[u8; 16], group: u64, count: u64, page: &[u8]) -> Result<CheckPage> {
        let mut d = ByteReader::new(page);
        let own = d.u64()?;
        if own == 0 {
            return Ok(CheckPage { checksum: own, page_checksums: Vec::new() });
        }
        if own != page_checksum(file_id, file_page_of_check_page(group), d.rest()) {
            let at = file_page_of_check_page(group) * PAGE;
            return Err(Error::corruption("checksum of a check page does not match").at_offset(at));
        }
        let sums = (0..count).map(|_| d.u64()).collect::<Result<_>>()?;
        // The checksum of a page behind the end of the image must be 0.
        match d.rest().iter().all(|byte| *byte == 0) {
            true => Ok(CheckPage { checksum: own, page_checksums: sums }),
            false => Err(Error::corruption("a check page has checksums of more pages than the image has")),
        }
    }

    /// The checksum of page `n` of the group, 0 if that page was never written.
    pub(crate) fn page_checksum(&self, n: u64) -> u64 {
        self.page_checksums.get(n as usize).copied().unwrap_or(0)
    }
}

/// The checksums of all pages of an image in its file.
#[derive(Default)]
pub(crate) struct ImageChecksums {
    /// Checksum of each page; 0 for a page that was never written, which contains zeros.
    pages: Vec<u64>,
    /// Checksum of each check page; 0 if it was never written: then no page of its group was written.
    check_pages: Vec<u64>,
}

impl ImageChecksums {
    /// Makes space for the checksums of `pages` pages.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory.
    pub(crate) fn grow(&mut self, pages: u64) -> Result<()> {
        self.reserve(pages)?;
        let checks = pages.div_ceil(PAGES_PER_GROUP) as usize;
        self.pages.resize((pages as usize).max(self.pages.len()), 0);
        self.check_pages.resize(checks.max(self.check_pages.len()), 0);
        Ok(())
    }

    /// Allocates memory for the checksums of `pages` pages.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory.
    pub(crate) fn reserve(&mut self, pages: u64) -> Result<()> {
        let checks = pages.div_ceil(PAGES_PER_GROUP) as usize;
        let full = |_| Error::new(ErrorKind::OutOfSpace, "no memory for the checksums of an image");
        let pages = usize::try_from(pages).unwrap_or(usize::MAX);
        self.pages.try_reserve(pages.saturating_sub(self.pages.len())).map_err(full)?;
        self.check_pages.try_reserve(checks.saturating_sub(self.check_pages.len())).map_err(full)
    }

    /// Sets the number of pages to `len`, for which memory is [reserved](ImageChecksums::reserve), and the checksums of
    /// changed pages. Returns the old checksums, to be restored if the pages are not written.
    pub(crate) fn replace_pages(&mut self, changed: &[(u64, u64)], len: u64) -> SavedChecksums {
        let (mut pages, mut checks) = (Vec::with_capacity(changed.len()), Vec::new());
        let old_len = (self.pages.len(), self.check_pages.len());
        debug_assert!(changed.iter().all(|(page, _)| *page < len), "changed pages are in the image");
        debug_assert_eq!(old_len.1 as u64, (old_len.0 as u64).div_ceil(PAGES_PER_GROUP), "each group has a check page");
        let cut_pages = self.pages.split_off(old_len.0.min(len as usize));
        let groups = len.div_ceil(PAGES_PER_GROUP) as usize;
        let cut_check_pages = self.check_pages.split_off(old_len.1.min(groups));
        self.pages.resize(len as usize, 0);
        self.check_pages.resize(groups, 0);
        // Where the file had pages before it became shorter, it may have their check pages still.
        checks.extend(old_len.1 as u64..groups as u64);
        // A check page has no checksums of pages behind the end.
        let last = len / PAGES_PER_GROUP;
        if !cut_pages.is_empty() && self.check_pages.get(last as usize).is_some_and(|sum| *sum != 0) {
            checks.push(last);
        }
        for (page, sum) in changed {
            pages.push((*page, std::mem::replace(&mut self.pages[*page as usize], *sum)));
            checks.push(page / PAGES_PER_GROUP);
        }
        checks.sort_unstable();
        checks.dedup();
        SavedChecksums {
            pages,
            check_pages: checks.into_iter().map(|group| (group, self.check_pages[group as usize])).collect(),
            len: old_len,
            cut_pages,
            cut_check_pages,
        }
    }

    /// Undoes [`replace_pages`](ImageChecksums::replace_pages) and every later
    /// [`encode_check_page`](ImageChecksums::encode_check_page).
    pub(crate) fn restore(&mut self, before: &SavedChecksums) {
        before.pages.iter().for_each(|(page, sum)| self.pages[*page as usize] = *sum);
        before.check_pages.iter().for_each(|(group, sum)| self.check_pages[*group as usize] = *sum);
        self.pages.truncate(before.len.0);
        self.pages.extend(&before.cut_pages);
        self.check_pages.truncate(before.len.1);
        self.check_pages.extend(&before.cut_check_pages);
        debug_assert_eq!((self.pages.len(), self.check_pages.len()), before.len, "all checksums are restored");
    }

    /// Encodes the check page of a group from the current checksums.
    pub(crate) fn encode_check_page(&mut self, file_id: &[u8; 16], group: u64) -> Vec<u8> {
        let first = (group * PAGES_PER_GROUP) as usize;
        let sums = &self.pages[first..self.pages.len().min(first + PAGES_PER_GROUP as usize)];
        let mut page = vec![0; PAGE_LEN];
        for (out, sum) in page[8..].chunks_exact_mut(8).zip(sums) {
            out.copy_from_slice(&sum.to_le_bytes());
        }
        let sum = page_checksum(file_id, file_page_of_check_page(group), &page[8..]);
        page[..8].copy_from_slice(&sum.to_le_bytes());
        self.check_pages[group as usize] = sum;
        page
    }

    /// Sets the checksums of a group from its check page.
    pub(crate) fn load_check_page(&mut self, group: u64, page: CheckPage) {
        self.check_pages[group as usize] = page.checksum;
        let first = (group * PAGES_PER_GROUP) as usize;
        self.pages[first..][..page.page_checksums.len()].copy_from_slice(&page.page_checksums);
    }

    /// The checksum of a page, 0 if it was never written.
    pub(crate) fn page_checksum(&self, page: u64) -> u64 {
        self.pages[page as usize]
    }

    /// The checksum of all check pages' checksums, which is stored in the first page.
    pub(crate) fn root_checksum(&self, file_id: &[u8; 16]) -> u64 {
        let all: Vec<u8> = self.check_pages.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        xxh3(location_seed(file_id, PAGE), &all)
    }
}

/// Number of pages that are written or read at a time.
const PAGES_PER_BATCH: usize = 64;

/// The position of a page in its pool file, counted in pages, and its checksum there.
type ShadowEntry = (u64, u64);

/// Length of an entry in bytes.
const SHADOW_ENTRY_LEN: usize = 16;

/// The length in bytes of a shadow with this many pages.
pub(crate) fn shadow_len(pages: u64) -> u64 {
    let list = pages.saturating_mul(SHADOW_ENTRY_LEN as u64).next_multiple_of(PAGE);
    pages.saturating_add(1).saturating_mul(PAGE).saturating_add(list)
}

/// A complete shadow.
pub(crate) struct Shadow {
    pub(crate) file_id: [u8; 16],
    pub(crate) checkpoint_number: u64,
    /// Length in bytes of the pool file to which its pages belong.
    target_file_len: u64,
    entries: Vec<ShadowEntry>,
}

fn list_checksum(file_id: &[u8; 16], number: u64, list: &[u8]) -> u64 {
    xxh3(location_seed(file_id, number), list)
}

impl Shadow {
    /// Reads the shadow in `file`; `None` if it is not complete.
    ///
    /// # Errors
    /// `Io` if it cannot be read, `Unsupported` if a newer version wrote it, `OutOfSpace` if there is no memory.
    pub(crate) fn read(file: &dyn File) -> Result<Option<Shadow>> {
        let mut page = vec![0; PAGE_LEN];
        let (got, len) = (file.read_at(&mut page, 0)?, file.length()?);
        let head = match ShadowHeader::decode(&page[..got]) {
            Err(error) if error.kind() == ErrorKind::Corruption => return Ok(None),
            head => head?,
        };
        let list_at = head.count.checked_mul(PAGE).and_then(|pages| pages.checked_add(PAGE));
        let list_len = head.count.checked_mul(SHADOW_ENTRY_LEN as u64);
        let (Some(list_at), Some(list_len)) = (list_at, list_len) else { return Ok(None) };
        if list_at.checked_add(list_len).is_none_or(|end| end > len) {
            return Ok(None);
        }
        // The list is not longer than the file.
        let mut list = Vec::new();
        let byte_count = usize::try_from(list_len).ok().filter(|len| list.try_reserve_exact(*len).is_ok());
        let byte_count =
            byte_count.ok_or_else(|| Error::new(ErrorKind::OutOfSpace, "no memory for the list of a shadow"))?;
        list.resize(byte_count, 0);
        if file.read_at(&mut list, list_at)? < byte_count
            || list_checksum(&head.file_id, head.checkpoint_number, &list) != head.list_checksum
        {
            return Ok(None);
        }
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        let entries = list.chunks_exact(SHADOW_ENTRY_LEN).map(|entry| (word(&entry[..8]), word(&entry[8..]))).collect();
        let shadow = Shadow {
            file_id: head.file_id,
            checkpoint_number: head.checkpoint_number,
            target_file_len: head.file_len,
            entries,
        };
        // No file is longer than this, and no page is behind the end of the pool file.
        if shadow.target_file_len > i64::MAX as u64
            || shadow.file_pages().any(|place| place >= shadow.target_file_len / PAGE)
        {
            return Ok(None);
        }
        match shadow.for_each_batch(file, |_, _| Ok(())) {
            Ok(()) => Ok(Some(shadow)),
            Err(error) if error.kind() == ErrorKind::Corruption => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Number of pages.
    pub(crate) fn page_count(&self) -> u64 {
        self.entries.len() as u64
    }

    /// Length in bytes of the pool file to which its pages belong.
    pub(crate) fn target_file_len(&self) -> u64 {
        self.target_file_len
    }

    /// Reads and checks the pages, and calls `show` with batches of them in order.
    fn for_each_batch(&self, file: &dyn File, mut show: impl FnMut(&[ShadowEntry], &[u8]) -> Result<()>) -> Result<()> {
        let mut bytes = vec![0; PAGES_PER_BATCH * PAGE_LEN];
        for (n, batch) in self.entries.chunks(PAGES_PER_BATCH).enumerate() {
            let bytes = &mut bytes[..batch.len() * PAGE_LEN];
            let at = (1 + n * PAGES_PER_BATCH) as u64 * PAGE;
            file.read_exact_at(bytes, at)?;
            for (n, ((place, sum), page)) in batch.iter().zip(bytes.chunks_exact(PAGE_LEN)).enumerate() {
                if page_checksum(&self.file_id, *place, page) != *sum {
                    let at = at + n as u64 * PAGE;
                    return Err(Error::corruption("checksum of a page of the shadow does not match").at_offset(at));
                }
            }
            show(batch, bytes)?;
        }
        Ok(())
    }

    /// Copies every page to its position in the pool file `to`, and grows that file if necessary.
    ///
    /// # Errors
    /// Those of the files; `Corruption` if the checksum of a page does not match.
    pub(crate) fn apply(&self, file: &dyn File, to: &dyn File) -> Result<()> {
        if to.length()? < self.target_file_len {
            to.allocate(self.target_file_len)?;
        }
        self.for_each_batch(file, |batch, bytes| {
            let mut from = 0;
            while from < batch.len() {
                let mut until = from + 1;
                while until < batch.len() && batch[until].0 == batch[until - 1].0 + 1 {
                    until += 1;
                }
                to.write_at(&bytes[from * PAGE_LEN..until * PAGE_LEN], batch[from].0 * PAGE)?;
                from = until;
            }
            Ok(())
        })
    }

    /// The positions of its pages in the pool file, unordered.
    pub(crate) fn file_pages(&self) -> impl Iterator<Item = u64> {
        self.entries.iter().map(|(place, _)| *place)
    }

    /// Calls `show` with the position and the bytes of every page, unordered.
    ///
    /// # Errors
    /// As for [`apply`](Shadow::apply), and what `show` returns.
    pub(crate) fn for_each_page(&self, file: &dyn File, mut show: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        self.for_each_batch(file, |batch, bytes| {
            batch.iter().zip(bytes.chunks_exact(PAGE_LEN)).try_for_each(|((place, _), page)| show(*place, page))
        })
    }
}

/// Writes a shadow, which becomes valid in [`finish`](ShadowWriter::finish).
pub(crate) struct ShadowWriter<'a> {
    file: &'a dyn File,
    file_id: [u8; 16],
    entries: Vec<ShadowEntry>,
    /// The last pages, which are not written yet.
    pending: Vec<u8>,
}

impl<'a> ShadowWriter<'a> {
    pub(crate) fn new(file: &'a dyn File, file_id: [u8; 16]) -> ShadowWriter<'a> {
        ShadowWriter { file, file_id, entries: Vec::new(), pending: Vec::with_capacity(PAGES_PER_BATCH * PAGE_LEN) }
    }

    /// Adds a page with the position `place`. Returns its checksum.
    ///
    /// # Errors
    /// Those of the file.
    pub(crate) fn push(&mut self, place: u64, page: &[u8]) -> Result<u64> {
        let sum = page_checksum(&self.file_id, place, page);
        self.entries.push((place, sum));
        self.pending.extend_from_slice(page);
        if self.pending.len() == PAGES_PER_BATCH * PAGE_LEN {
            self.write()?;
        }
        Ok(sum)
    }

    fn write(&mut self) -> Result<()> {
        let first = self.entries.len() - self.pending.len() / PAGE_LEN;
        self.file.write_at(&self.pending, (1 + first as u64) * PAGE)?;
        self.pending.clear();
        Ok(())
    }

    /// Writes the rest, then the first page, which makes it the shadow of checkpoint `number` for a file of `len`
    /// bytes. Not synced yet.
    ///
    /// # Errors
    /// Those of the file.
    pub(crate) fn finish(mut self, number: u64, len: u64) -> Result<Shadow> {
        let mut list = Vec::with_capacity(SHADOW_ENTRY_LEN * self.entries.len());
        for (place, sum) in &self.entries {
            list.extend_from_slice(&place.to_le_bytes());
            list.extend_from_slice(&sum.to_le_bytes());
        }
        self.write()?;
        let count = self.entries.len() as u64;
        self.file.write_at(&list, (1 + count) * PAGE)?;
        let (file_id, list) = (self.file_id, list_checksum(&self.file_id, number, &list));
        self.file.write_at(
            &ShadowHeader { file_id, checkpoint_number: number, count, list_checksum: list, file_len: len }.encode(),
            0,
        )?;
        Ok(Shadow { file_id, checkpoint_number: number, target_file_len: len, entries: self.entries })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_pages_map_to_distinct_file_pages() {
        let mut places: Vec<u64> =
            (0..3 * PAGES_PER_GROUP).map(file_page_of).chain((0..3).map(file_page_of_check_page)).collect();
        places.sort_unstable();
        assert_eq!(places, (1..=3 * (PAGES_PER_GROUP + 1)).collect::<Vec<_>>());
        assert_eq!((file_len(0), file_len(PAGE), file_len(512 * PAGE)), (Some(PAGE), Some(3 * PAGE), Some(515 * PAGE)));
        assert_eq!(file_len(u64::MAX / PAGE * PAGE), None);
        assert!((0..3 * PAGES_PER_GROUP).all(|page| image_page_of(file_page_of(page)) == Some(page)));
        assert!(
            (0..3).all(|group| image_page_of(file_page_of_check_page(group)).is_none()) && image_page_of(0).is_none()
        );
    }

    #[test]
    fn damaged_header_page_is_refused() {
        let head = ImageHeader {
            file_id: [3; 16],
            partition: PartitionId(4),
            checkpoint_number: 5,
            replay_from: SeqNo(6),
            max_seqno: SeqNo(7),
            image_len: 8 * PAGE,
            root_checksum: 9,
        };
        let shadow = ShadowHeader { file_id: [3; 16], checkpoint_number: 5, count: 4, list_checksum: 3, file_len: 2 };
        let (page, other) = (head.encode(), shadow.encode());
        assert_eq!((ImageHeader::decode(&page).unwrap(), ShadowHeader::decode(&other).unwrap()), (head, shadow));
        assert!(ImageHeader::decode(&other).is_err() && ShadowHeader::decode(&page).is_err());
        for at in 0..PAGE_LEN {
            for page in [&page, &other] {
                let mut bad = page.clone();
                bad[at] ^= 1 << (at % 8);
                assert!(ImageHeader::decode(&bad).is_err() && ShadowHeader::decode(&bad).is_err(), "byte {at}");
            }
            assert!(ImageHeader::decode(&page[..at]).is_err());
        }
    }

    #[test]
    fn check_pages_round_trip_with_root_checksum() {
        let id = [7; 16];
        let mut sums = ImageChecksums::default();
        sums.grow(PAGES_PER_GROUP + 3).unwrap();
        let empty = sums.root_checksum(&id);
        let before = sums.replace_pages(&[(PAGES_PER_GROUP + 1, 77)], PAGES_PER_GROUP + 3);
        assert_eq!(before.groups().collect::<Vec<_>>(), [1]);
        let page = sums.encode_check_page(&id, 1);
        let root = sums.root_checksum(&id);
        assert_ne!(root, empty);
        sums.restore(&before);
        assert_eq!((sums.page_checksum(PAGES_PER_GROUP + 1), sums.root_checksum(&id)), (0, empty));
        let mut again = ImageChecksums::default();
        again.grow(PAGES_PER_GROUP + 3).unwrap();
        again.load_check_page(0, CheckPage::read(&id, 0, PAGES_PER_GROUP, &[0; PAGE_LEN]).unwrap());
        again.load_check_page(1, CheckPage::read(&id, 1, 3, &page).unwrap());
        assert_eq!(
            (again.page_checksum(PAGES_PER_GROUP + 1), again.page_checksum(PAGES_PER_GROUP), again.root_checksum(&id)),
            (77, 0, root)
        );
        assert!(CheckPage::read(&id, 0, PAGES_PER_GROUP, &page).is_err(), "another group's");
        assert!(CheckPage::read(&id, 1, 1, &page).is_err(), "the image has fewer pages");
    }
}

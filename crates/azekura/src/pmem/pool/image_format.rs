#![doc = include_str!("../../../docs/format/pool_image.md")]

use crate::base::checksum::{location_seed, xxh3};
use crate::base::coding::ByteReader;
use crate::base::file_format::{FileHeader, FileKind};
use crate::base::version_edit::PartitionId;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::mem::region::PAGE;

/// Pages are as long as those whose changes are remembered.
pub(crate) const PAGE_LEN: usize = PAGE as usize;

/// Pages of the image that one check page answers for.
pub(crate) const PAGES_PER_GROUP: u64 = 511;

/// Where the checksum of a first page stands, and what it is of.
const CHECKSUM_AT: usize = FileHeader::LEN;
const FIELDS_AT: usize = CHECKSUM_AT + 8;

/// Where a page of the image lies in its file, counted in pages.
pub(crate) fn file_page_of(page: u64) -> u64 {
    file_page_of_check_page(page / PAGES_PER_GROUP) + 1 + page % PAGES_PER_GROUP
}

/// Where the check page of a group lies.
pub(crate) fn file_page_of_check_page(group: u64) -> u64 {
    1 + group * (PAGES_PER_GROUP + 1)
}

/// The page of the image that lies at a place of its file; none at that of a check page, or of the first page.
pub(crate) fn image_page_of(place: u64) -> Option<u64> {
    let (group, n) = (place.checked_sub(1)? / (PAGES_PER_GROUP + 1), place.checked_sub(1)? % (PAGES_PER_GROUP + 1));
    n.checked_sub(1).map(|n| group * PAGES_PER_GROUP + n)
}

/// The length of the file of an image of `len` bytes.
pub(crate) fn file_len(len: u64) -> Option<u64> {
    match len / PAGE {
        0 => Some(PAGE),
        pages => file_page_of(pages - 1).checked_add(1)?.checked_mul(PAGE),
    }
}

/// The checksum of a page that lies at `place` in its file; never 0.
pub(crate) fn page_checksum(file_id: &[u8; 16], place: u64, bytes: &[u8]) -> u64 {
    xxh3(location_seed(file_id, place * PAGE), bytes).max(1)
}

/// Writes the header of a kind of file and the fields into a page, with the checksum of all of it.
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

/// The fields of a first page, and the id of its file.
fn decode_header_page(kind: FileKind, page: &[u8]) -> Result<([u8; 16], ByteReader<'_>)> {
    let file_id = FileHeader::decode(kind, page)?.file_id;
    let rest = page.get(CHECKSUM_AT..PAGE_LEN).ok_or_else(|| Error::corruption("the file ends in its first page"))?;
    let mut d = ByteReader::new(rest);
    if d.u64()? != xxh3(location_seed(&file_id, CHECKSUM_AT as u64), d.rest()) {
        return Err(Error::corruption("checksum of the first page does not match").at_offset(CHECKSUM_AT as u64));
    }
    Ok((file_id, d))
}

/// The first page of the file of an image: which checkpoint it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImageHeader {
    pub(crate) file_id: [u8; 16],
    pub(crate) partition: PartitionId,
    /// Of the checkpoint, rising.
    pub(crate) checkpoint_number: u64,
    pub(crate) replay_from: SeqNo,
    pub(crate) max_seqno: SeqNo,
    /// Of the image, in bytes.
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
    /// `Corruption` if it is no such page, `Unsupported` if a newer version wrote it.
    pub(crate) fn decode(page: &[u8]) -> Result<ImageHeader> {
        let (file_id, mut d) = decode_header_page(FileKind::PoolImage, page)?;
        let (partition, number) = (PartitionId(d.u64()?), d.u64()?);
        let (replay_from, highest, len, root) = (SeqNo(d.u64()?), SeqNo(d.u64()?), d.u64()?, d.u64()?);
        let is_last = number == u64::MAX; // the next one would have none
        let has_place = len.is_multiple_of(PAGE) && file_len(len).is_some_and(|len| len <= i64::MAX as u64);
        if replay_from > SeqNo::MAX || highest > SeqNo::MAX || is_last || !has_place {
            return Err(Error::corruption("the first page says what cannot be").at_offset(FIELDS_AT as u64));
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

/// The first page of a shadow: what must be in it for it to be whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShadowHeader {
    pub(crate) file_id: [u8; 16],
    /// Of the checkpoint.
    pub(crate) checkpoint_number: u64,
    /// Pages.
    pub(crate) count: u64,
    /// The checksum of their list.
    pub(crate) list_checksum: u64,
    /// Of the file that they belong to, in bytes.
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

/// Checksums before pages were changed, by page and by group.
pub(crate) struct SavedChecksums {
    pages: Vec<(u64, u64)>,
    check_pages: Vec<(u64, u64)>,
}

impl SavedChecksums {
    /// Groups that have a changed page, ascending.
    pub(crate) fn groups(&self) -> impl Iterator<Item = u64> {
        self.check_pages.iter().map(|(group, _)| *group)
    }
}

/// What a check page says.
#[derive(Debug)]
pub(crate) struct CheckPage {
    /// Its own checksum, 0 if it was never written.
    checksum: u64,
    /// The checksums of the pages of its group, as far as it has pages; `None` if it was never written.
    page_checksums: Vec<u64>,
}

impl CheckPage {
    /// The check page of a group of `count` pages.
    ///
    /// # Errors
    /// `Corruption` if it does not verify.
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
        // A page behind the end of the image was never written.
        match d.rest().iter().all(|byte| *byte == 0) {
            true => Ok(CheckPage { checksum: own, page_checksums: sums }),
            false => Err(Error::corruption("a check page knows of more pages than there are")),
        }
    }

    /// The checksum of the page with that number in the group, 0 if it was never written.
    pub(crate) fn page_checksum(&self, n: u64) -> u64 {
        self.page_checksums.get(n as usize).copied().unwrap_or(0)
    }
}

/// The checksums of all pages of an image as its file has them.
#[derive(Default)]
pub(crate) struct ImageChecksums {
    /// Of each page; 0 of one that was never written, which is full of zeros.
    pages: Vec<u64>,
    /// Of each check page; 0 of one that was never written: then none of its group was.
    check_pages: Vec<u64>,
}

impl ImageChecksums {
    /// The number of pages.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory.
    pub(crate) fn grow(&mut self, pages: u64) -> Result<()> {
        let checks = pages.div_ceil(PAGES_PER_GROUP) as usize;
        let full = |_| Error::new(ErrorKind::OutOfSpace, "no memory for the checksums of an image");
        let pages = usize::try_from(pages).unwrap_or(usize::MAX);
        self.pages.try_reserve(pages.saturating_sub(self.pages.len())).map_err(full)?;
        self.check_pages.try_reserve(checks.saturating_sub(self.check_pages.len())).map_err(full)?;
        self.pages.resize(pages.max(self.pages.len()), 0);
        self.check_pages.resize(checks.max(self.check_pages.len()), 0);
        Ok(())
    }

    /// Pages have these checksums from now on; what to put back if they don't get there.
    pub(crate) fn replace_pages(&mut self, changed: &[(u64, u64)]) -> SavedChecksums {
        let (mut pages, mut checks) = (Vec::with_capacity(changed.len()), Vec::new());
        for (page, sum) in changed {
            pages.push((*page, std::mem::replace(&mut self.pages[*page as usize], *sum)));
            checks.push(page / PAGES_PER_GROUP);
        }
        checks.sort_unstable();
        checks.dedup();
        SavedChecksums {
            pages,
            check_pages: checks.into_iter().map(|group| (group, self.check_pages[group as usize])).collect(),
        }
    }

    /// Takes back what [`set`](ImageChecksums::replace_pages) and
    /// [`encode_check_page`](ImageChecksums::encode_check_page) did since.
    pub(crate) fn restore(&mut self, before: &SavedChecksums) {
        before.pages.iter().for_each(|(page, sum)| self.pages[*page as usize] = *sum);
        before.check_pages.iter().for_each(|(group, sum)| self.check_pages[*group as usize] = *sum);
    }

    /// Makes the check page of a group anew.
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

    /// Takes over what the check page of a group says.
    pub(crate) fn load_check_page(&mut self, group: u64, page: CheckPage) {
        self.check_pages[group as usize] = page.checksum;
        let first = (group * PAGES_PER_GROUP) as usize;
        self.pages[first..][..page.page_checksums.len()].copy_from_slice(&page.page_checksums);
    }

    /// The checksum of a page, 0 if it was never written.
    pub(crate) fn page_checksum(&self, page: u64) -> u64 {
        self.pages[page as usize]
    }

    /// The checksum that a file's first page has of all this.
    pub(crate) fn root_checksum(&self, file_id: &[u8; 16]) -> u64 {
        let all: Vec<u8> = self.check_pages.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        xxh3(location_seed(file_id, PAGE), &all)
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
        let before = sums.replace_pages(&[(PAGES_PER_GROUP + 1, 77)]);
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
        assert!(CheckPage::read(&id, 1, 1, &page).is_err(), "there are not so many pages");
    }
}

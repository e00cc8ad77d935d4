#![doc = include_str!("../../../docs/format/pool_image.md")]

use crate::base::checksum::{place_seed, xxh3};
use crate::base::coding::Decoder;
use crate::base::edit::PartitionId;
use crate::base::file_header::{FileHeader, FileKind};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::mem::region::PAGE;

/// Pages are as long as those whose changes are remembered.
pub(crate) const PAGE_LEN: usize = PAGE as usize;

/// Pages of the image that one check page answers for.
pub(crate) const GROUP: u64 = 511;

/// Where the checksum of a first page stands, and what it is of.
const SUM_AT: usize = FileHeader::LEN;
const FIELDS_AT: usize = SUM_AT + 8;

/// Where a page of the image lies in its file, counted in pages.
pub(crate) fn place(page: u64) -> u64 {
    check_place(page / GROUP) + 1 + page % GROUP
}

/// Where the check page of a group lies.
pub(crate) fn check_place(group: u64) -> u64 {
    1 + group * (GROUP + 1)
}

/// The page of the image that lies at a place of its file; none at that of a check page, or of the first page.
pub(crate) fn page_at(place: u64) -> Option<u64> {
    let (group, n) = (place.checked_sub(1)? / (GROUP + 1), place.checked_sub(1)? % (GROUP + 1));
    n.checked_sub(1).map(|n| group * GROUP + n)
}

/// The length of the file of an image of `len` bytes.
pub(crate) fn file_len(len: u64) -> Option<u64> {
    match len / PAGE {
        0 => Some(PAGE),
        pages => place(pages - 1).checked_add(1)?.checked_mul(PAGE),
    }
}

/// The checksum of a page that lies at `place` in its file; never 0.
pub(crate) fn page_sum(file_id: &[u8; 16], place: u64, bytes: &[u8]) -> u64 {
    xxh3(place_seed(file_id, place * PAGE), bytes).max(1)
}

/// Writes the header of a kind of file and the fields into a page, with the checksum of all of it.
fn first_page(kind: FileKind, file_id: &[u8; 16], fields: &[u64]) -> Vec<u8> {
    let mut page = FileHeader { kind, file_id: *file_id }.encode().to_vec();
    page.resize(PAGE_LEN, 0);
    for (out, field) in page[FIELDS_AT..].chunks_exact_mut(8).zip(fields) {
        out.copy_from_slice(&field.to_le_bytes());
    }
    let sum = xxh3(place_seed(file_id, SUM_AT as u64), &page[FIELDS_AT..]);
    page[SUM_AT..FIELDS_AT].copy_from_slice(&sum.to_le_bytes());
    page
}

/// The fields of a first page, and the id of its file.
fn fields_of(kind: FileKind, page: &[u8]) -> Result<([u8; 16], Decoder<'_>)> {
    let file_id = FileHeader::decode(kind, page)?.file_id;
    let rest = page.get(SUM_AT..PAGE_LEN).ok_or_else(|| Error::corruption("the file ends in its first page"))?;
    let mut d = Decoder::new(rest);
    if d.u64()? != xxh3(place_seed(&file_id, SUM_AT as u64), d.rest()) {
        return Err(Error::corruption("checksum of the first page does not match").at_offset(SUM_AT as u64));
    }
    Ok((file_id, d))
}

/// The first page of the file of an image: which checkpoint it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) file_id: [u8; 16],
    pub(crate) partition: PartitionId,
    /// Of the checkpoint, rising.
    pub(crate) number: u64,
    pub(crate) replay_from: SeqNo,
    pub(crate) highest: SeqNo,
    /// Of the image, in bytes.
    pub(crate) len: u64,
    /// The checksum of the checksums of all check pages.
    pub(crate) root: u64,
}

impl Head {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let Head { file_id, partition, number, replay_from, highest, len, root } = self;
        first_page(FileKind::PoolImage, file_id, &[partition.0, *number, replay_from.0, highest.0, *len, *root])
    }

    /// # Errors
    /// `Corruption` if it is no such page, `Unsupported` if a newer version wrote it.
    pub(crate) fn decode(page: &[u8]) -> Result<Head> {
        let (file_id, mut d) = fields_of(FileKind::PoolImage, page)?;
        let (partition, number) = (PartitionId(d.u64()?), d.u64()?);
        let (replay_from, highest, len, root) = (SeqNo(d.u64()?), SeqNo(d.u64()?), d.u64()?, d.u64()?);
        let is_last = number == u64::MAX; // the next one would have none
        let has_place = len.is_multiple_of(PAGE) && file_len(len).is_some_and(|len| len <= i64::MAX as u64);
        if replay_from > SeqNo::MAX || highest > SeqNo::MAX || is_last || !has_place {
            return Err(Error::corruption("the first page says what cannot be").at_offset(FIELDS_AT as u64));
        }
        Ok(Head { file_id, partition, number, replay_from, highest, len, root })
    }
}

/// The first page of a shadow: what must be in it for it to be whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShadowHead {
    pub(crate) file_id: [u8; 16],
    /// Of the checkpoint.
    pub(crate) number: u64,
    /// Pages.
    pub(crate) count: u64,
    /// The checksum of their list.
    pub(crate) list: u64,
    /// Of the file that they belong to, in bytes.
    pub(crate) len: u64,
}

impl ShadowHead {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let ShadowHead { file_id, number, count, list, len } = self;
        first_page(FileKind::PoolShadow, file_id, &[*number, *count, *list, *len])
    }

    /// # Errors
    /// As for [`Head::decode`].
    pub(crate) fn decode(page: &[u8]) -> Result<ShadowHead> {
        let (file_id, mut d) = fields_of(FileKind::PoolShadow, page)?;
        Ok(ShadowHead { file_id, number: d.u64()?, count: d.u64()?, list: d.u64()?, len: d.u64()? })
    }
}

/// Checksums before pages were changed, by page and by group.
pub(crate) struct Before {
    pages: Vec<(u64, u64)>,
    checks: Vec<(u64, u64)>,
}

impl Before {
    /// Groups that have a changed page, ascending.
    pub(crate) fn groups(&self) -> impl Iterator<Item = u64> {
        self.checks.iter().map(|(group, _)| *group)
    }
}

/// What a check page says.
#[derive(Debug)]
pub(crate) struct CheckPage {
    /// Its own checksum, 0 if it was never written.
    own: u64,
    /// Those of the pages of its group, as far as there are so many; none if it was never written.
    sums: Vec<u64>,
}

impl CheckPage {
    /// The check page of a group of `count` pages.
    ///
    /// # Errors
    /// `Corruption` if it does not verify.
    pub(crate) fn read(file_id: &[u8; 16], group: u64, count: u64, page: &[u8]) -> Result<CheckPage> {
        let mut d = Decoder::new(page);
        let own = d.u64()?;
        if own == 0 {
            return Ok(CheckPage { own, sums: Vec::new() });
        }
        if own != page_sum(file_id, check_place(group), d.rest()) {
            let at = check_place(group) * PAGE;
            return Err(Error::corruption("checksum of a check page does not match").at_offset(at));
        }
        let sums = (0..count).map(|_| d.u64()).collect::<Result<_>>()?;
        // A page behind the end of the image was never written.
        match d.rest().iter().all(|byte| *byte == 0) {
            true => Ok(CheckPage { own, sums }),
            false => Err(Error::corruption("a check page knows of more pages than there are")),
        }
    }

    /// The checksum of the page with that number in the group, 0 if it was never written.
    pub(crate) fn of(&self, n: u64) -> u64 {
        self.sums.get(n as usize).copied().unwrap_or(0)
    }
}

/// The checksums of all pages of an image as its file has them.
#[derive(Default)]
pub(crate) struct Sums {
    /// Of each page; 0 of one that was never written, which is full of zeros.
    pages: Vec<u64>,
    /// Of each check page; 0 of one that was never written: then none of its group was.
    checks: Vec<u64>,
}

impl Sums {
    /// There are so many pages.
    ///
    /// # Errors
    /// `OutOfSpace` if there is no memory.
    pub(crate) fn grow(&mut self, pages: u64) -> Result<()> {
        let checks = pages.div_ceil(GROUP) as usize;
        let full = |_| Error::new(ErrorKind::OutOfSpace, "no memory for the checksums of an image");
        let pages = usize::try_from(pages).unwrap_or(usize::MAX);
        self.pages.try_reserve(pages.saturating_sub(self.pages.len())).map_err(full)?;
        self.checks.try_reserve(checks.saturating_sub(self.checks.len())).map_err(full)?;
        self.pages.resize(pages.max(self.pages.len()), 0);
        self.checks.resize(checks.max(self.checks.len()), 0);
        Ok(())
    }

    /// Pages have these checksums from now on; what to put back if they don't get there.
    pub(crate) fn set(&mut self, changed: &[(u64, u64)]) -> Before {
        let (mut pages, mut checks) = (Vec::with_capacity(changed.len()), Vec::new());
        for (page, sum) in changed {
            pages.push((*page, std::mem::replace(&mut self.pages[*page as usize], *sum)));
            checks.push(page / GROUP);
        }
        checks.sort_unstable();
        checks.dedup();
        Before { pages, checks: checks.into_iter().map(|group| (group, self.checks[group as usize])).collect() }
    }

    /// Takes back what [`set`](Sums::set) and [`check_page`](Sums::check_page) did since.
    pub(crate) fn put_back(&mut self, before: &Before) {
        before.pages.iter().for_each(|(page, sum)| self.pages[*page as usize] = *sum);
        before.checks.iter().for_each(|(group, sum)| self.checks[*group as usize] = *sum);
    }

    /// Makes the check page of a group anew.
    pub(crate) fn check_page(&mut self, file_id: &[u8; 16], group: u64) -> Vec<u8> {
        let first = (group * GROUP) as usize;
        let sums = &self.pages[first..self.pages.len().min(first + GROUP as usize)];
        let mut page = vec![0; PAGE_LEN];
        for (out, sum) in page[8..].chunks_exact_mut(8).zip(sums) {
            out.copy_from_slice(&sum.to_le_bytes());
        }
        let sum = page_sum(file_id, check_place(group), &page[8..]);
        page[..8].copy_from_slice(&sum.to_le_bytes());
        self.checks[group as usize] = sum;
        page
    }

    /// Takes over what the check page of a group says.
    pub(crate) fn take(&mut self, group: u64, page: CheckPage) {
        self.checks[group as usize] = page.own;
        let first = (group * GROUP) as usize;
        self.pages[first..][..page.sums.len()].copy_from_slice(&page.sums);
    }

    /// The checksum of a page, 0 if it was never written.
    pub(crate) fn of(&self, page: u64) -> u64 {
        self.pages[page as usize]
    }

    /// The checksum that a file's first page has of all this.
    pub(crate) fn root(&self, file_id: &[u8; 16]) -> u64 {
        let all: Vec<u8> = self.checks.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        xxh3(place_seed(file_id, PAGE), &all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_have_places_of_their_own() {
        let mut places: Vec<u64> = (0..3 * GROUP).map(place).chain((0..3).map(check_place)).collect();
        places.sort_unstable();
        assert_eq!(places, (1..=3 * (GROUP + 1)).collect::<Vec<_>>());
        assert_eq!((file_len(0), file_len(PAGE), file_len(512 * PAGE)), (Some(PAGE), Some(3 * PAGE), Some(515 * PAGE)));
        assert_eq!(file_len(u64::MAX / PAGE * PAGE), None);
        assert!((0..3 * GROUP).all(|page| page_at(place(page)) == Some(page)));
        assert!((0..3).all(|group| page_at(check_place(group)).is_none()) && page_at(0).is_none());
    }

    #[test]
    fn first_pages_are_what_was_written_or_refused() {
        let head = Head {
            file_id: [3; 16],
            partition: PartitionId(4),
            number: 5,
            replay_from: SeqNo(6),
            highest: SeqNo(7),
            len: 8 * PAGE,
            root: 9,
        };
        let shadow = ShadowHead { file_id: [3; 16], number: 5, count: 4, list: 3, len: 2 };
        let (page, other) = (head.encode(), shadow.encode());
        assert_eq!((Head::decode(&page).unwrap(), ShadowHead::decode(&other).unwrap()), (head, shadow));
        assert!(Head::decode(&other).is_err() && ShadowHead::decode(&page).is_err());
        for at in 0..PAGE_LEN {
            for page in [&page, &other] {
                let mut bad = page.clone();
                bad[at] ^= 1 << (at % 8);
                assert!(Head::decode(&bad).is_err() && ShadowHead::decode(&bad).is_err(), "byte {at}");
            }
            assert!(Head::decode(&page[..at]).is_err());
        }
    }

    #[test]
    fn check_pages_come_back_and_the_root_knows_them() {
        let id = [7; 16];
        let mut sums = Sums::default();
        sums.grow(GROUP + 3).unwrap();
        let empty = sums.root(&id);
        let before = sums.set(&[(GROUP + 1, 77)]);
        assert_eq!(before.groups().collect::<Vec<_>>(), [1]);
        let page = sums.check_page(&id, 1);
        let root = sums.root(&id);
        assert_ne!(root, empty);
        sums.put_back(&before);
        assert_eq!((sums.of(GROUP + 1), sums.root(&id)), (0, empty));
        let mut again = Sums::default();
        again.grow(GROUP + 3).unwrap();
        again.take(0, CheckPage::read(&id, 0, GROUP, &[0; PAGE_LEN]).unwrap());
        again.take(1, CheckPage::read(&id, 1, 3, &page).unwrap());
        assert_eq!((again.of(GROUP + 1), again.of(GROUP), again.root(&id)), (77, 0, root));
        assert!(CheckPage::read(&id, 0, GROUP, &page).is_err(), "another group's");
        assert!(CheckPage::read(&id, 1, 1, &page).is_err(), "there are not so many pages");
    }
}

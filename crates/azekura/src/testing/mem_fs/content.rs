//! The bytes of a file in memory: sparse pages that copies share until one of them is written (copy on write).

use std::sync::Arc;

/// Page size in bytes.
pub(crate) const PAGE: usize = 4096;

/// Maximum file length in bytes. Bounds the memory of the page table if a caller passes a wrong length.
pub(crate) const MAX_LEN: u64 = 1 << 40;

/// Pages in a chunk of the page table. A write copies one page and one chunk. The first write after a copy of the
/// whole file also copies one pointer for each chunk.
const CHUNK_PAGES: usize = 64;
const CHUNK: u64 = (PAGE * CHUNK_PAGES) as u64;

type ContentPage = [u8; PAGE];
type ContentChunk = [Option<Arc<ContentPage>>; CHUNK_PAGES];

const NO_PAGES: ContentChunk = [const { None }; CHUNK_PAGES];
const ZEROS: ContentPage = [0; PAGE];

/// Length and pages of a file. A missing page contains zeros.
#[derive(Clone, Debug, Default)]
pub(crate) struct FileContent {
    len: u64,
    chunks: Arc<Vec<Option<Arc<ContentChunk>>>>,
}

/// Splits the range of `len` bytes at `offset` at the multiples of `unit`. Calls `each` with the file offset of a
/// part and the range of the part in the bytes.
pub(crate) fn split_at_boundaries(
    offset: u64,
    len: usize,
    unit: u64,
    mut each: impl FnMut(u64, std::ops::Range<usize>),
) {
    let mut done = 0;
    while done < len {
        let at = offset + done as u64;
        let step = ((unit - at % unit) as usize).min(len - done);
        each(at, done..done + step);
        done += step;
    }
}

impl FileContent {
    pub(crate) fn length(&self) -> u64 {
        self.len
    }

    fn page(&self, index: u64) -> Option<&ContentPage> {
        let chunk = self.chunks.get((index / CHUNK_PAGES as u64) as usize)?.as_ref()?;
        chunk[(index % CHUNK_PAGES as u64) as usize].as_deref()
    }

    fn page_mut(&mut self, index: u64) -> &mut ContentPage {
        let at = (index / CHUNK_PAGES as u64) as usize;
        let chunks = Arc::make_mut(&mut self.chunks);
        if chunks.len() <= at {
            chunks.resize(at + 1, None);
        }
        let chunk = Arc::make_mut(chunks[at].get_or_insert_with(|| Arc::new(NO_PAGES)));
        let page = chunk[(index % CHUNK_PAGES as u64) as usize].get_or_insert_with(|| Arc::new(ZEROS));
        Arc::make_mut(page)
    }

    /// Fills `buf` from `offset`, up to the end of the file. Returns the number of bytes.
    pub(crate) fn read(&self, buf: &mut [u8], offset: u64) -> usize {
        let count = self.len.saturating_sub(offset).min(buf.len() as u64) as usize;
        split_at_boundaries(offset, count, PAGE as u64, |at, range| {
            let start = (at % PAGE as u64) as usize;
            let page = self.page(at / PAGE as u64).unwrap_or(&ZEROS);
            let len = range.len();
            buf[range].copy_from_slice(&page[start..start + len]);
        });
        count
    }

    /// Stores bytes in the pages without changing the length. The end must not exceed [`MAX_LEN`].
    pub(crate) fn store(&mut self, bytes: &[u8], offset: u64) {
        assert!(offset + bytes.len() as u64 <= MAX_LEN, "the caller has checked the end");
        split_at_boundaries(offset, bytes.len(), PAGE as u64, |at, range| {
            let index = at / PAGE as u64;
            // Callers often fill files with zeros in advance. Such zeros need no page.
            if self.page(index).is_none() && bytes[range.clone()] == ZEROS[..range.len()] {
                return;
            }
            let start = (at % PAGE as u64) as usize;
            self.page_mut(index)[start..start + range.len()].copy_from_slice(&bytes[range]);
        });
    }

    /// Discards all bytes from `end` on without changing the length.
    pub(crate) fn discard_from(&mut self, end: u64) {
        let kept_chunks = end.div_ceil(CHUNK) as usize;
        if self.chunks.len() > kept_chunks {
            Arc::make_mut(&mut self.chunks).truncate(kept_chunks);
        }
        let tail = (end % PAGE as u64) as usize;
        let first_page = end / PAGE as u64;
        if tail > 0 && self.page(first_page).is_some_and(|page| page[tail..] != ZEROS[tail..]) {
            self.page_mut(first_page)[tail..].fill(0);
        }
        for index in end.div_ceil(PAGE as u64)..kept_chunks as u64 * CHUNK_PAGES as u64 {
            if self.page(index).is_some() {
                let chunks = Arc::make_mut(&mut self.chunks);
                let chunk = chunks[(index / CHUNK_PAGES as u64) as usize].as_mut().expect("the page exists");
                Arc::make_mut(chunk)[(index % CHUNK_PAGES as u64) as usize] = None;
            }
        }
    }

    /// Truncates, or grows with zeros.
    pub(crate) fn set_length(&mut self, len: u64) {
        if len < self.len {
            self.discard_from(len);
        }
        self.len = len;
    }

    /// Number of allocated pages.
    #[cfg(test)]
    pub(crate) fn resident_pages(&self) -> usize {
        self.chunks.iter().flatten().map(|chunk| chunk.iter().flatten().count()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::seeded_rng::SeededRng;

    fn all(content: &FileContent) -> Vec<u8> {
        let mut buf = vec![7; content.length() as usize];
        assert_eq!(content.read(&mut buf, 0), buf.len());
        buf
    }

    #[test]
    fn agrees_with_a_plain_vector() {
        let mut rng = SeededRng::new(3);
        let (mut content, mut model) = (FileContent::default(), Vec::new());
        for round in 0..600 {
            let offset = rng.below(700_000);
            if rng.chance_in_8(2) {
                model.resize(offset, 0);
                content.set_length(offset as u64);
            } else {
                let bytes = vec![round as u8; rng.below(20_000)];
                model.resize(model.len().max(offset + bytes.len()), 0);
                model[offset..offset + bytes.len()].copy_from_slice(&bytes);
                content.store(&bytes, offset as u64);
                content.set_length(model.len() as u64);
            }
            if round % 20 == 0 {
                assert!(all(&content) == model, "round {round}");
            }
        }
    }

    #[test]
    fn copies_share_pages_until_one_writes() {
        let mut a = FileContent::default();
        a.set_length(64 << 20);
        a.store(&[1; 3 * PAGE], 10 << 20);
        let before = a.clone();
        a.store(b"x", 10 << 20);
        assert_eq!((all(&before)[10 << 20], all(&a)[10 << 20]), (1, b'x'));
        let next = (10u64 << 20) / PAGE as u64 + 1;
        assert!(std::ptr::eq(a.page(next).unwrap(), before.page(next).unwrap()), "an untouched page was copied");
    }

    #[test]
    fn zeros_and_what_is_cut_take_no_pages() {
        let mut content = FileContent::default();
        content.set_length(1 << 30);
        content.store(&vec![0; 1 << 20], 0);
        assert_eq!(content.resident_pages(), 0);
        content.store(&[1; 10 * PAGE], 100);
        assert_eq!(content.resident_pages(), 11);
        content.set_length(PAGE as u64 + 1);
        assert_eq!(content.resident_pages(), 2);
        content.set_length(3 * PAGE as u64);
        assert_eq!(&all(&content)[PAGE..PAGE + 3], &[1, 0, 0], "truncated bytes reappeared");
        content.set_length(0);
        assert_eq!(content.resident_pages(), 0);
    }

    #[test]
    fn reads_end_at_the_length() {
        let mut content = FileContent::default();
        content.store(b"hidden", 0);
        assert_eq!(content.read(&mut [0; 6], 0), 0);
        content.set_length(4);
        assert_eq!(
            (content.read(&mut [0; 6], 0), content.read(&mut [0; 6], 3), content.read(&mut [0; 6], u64::MAX)),
            (4, 1, 0)
        );
    }
}

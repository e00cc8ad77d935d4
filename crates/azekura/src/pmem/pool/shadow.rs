//! The shadow of a checkpoint: a copy of its pages, written before the image so that a crash damages at most one of
//! the two.

use crate::base::checksum::{location_seed, xxh3};
use crate::base::{Error, ErrorKind, Result};
use crate::mem::region::PAGE;
use crate::pmem::pool::image_format::{PAGE_LEN, ShadowHeader, page_checksum};
use crate::vfs::File;

/// Pages that are written or read at once.
const PAGES_PER_BATCH: usize = 64;

/// Where a page lies in the file that it belongs to, counted in pages, and its checksum there.
type ShadowEntry = (u64, u64);

/// Bytes of an entry.
const SHADOW_ENTRY_LEN: usize = 16;

/// The length in bytes of a shadow with this many pages.
pub(crate) fn shadow_len(pages: u64) -> u64 {
    let list = pages.saturating_mul(SHADOW_ENTRY_LEN as u64).next_multiple_of(PAGE);
    pages.saturating_add(1).saturating_mul(PAGE).saturating_add(list)
}

/// A whole shadow.
pub(crate) struct Shadow {
    pub(crate) file_id: [u8; 16],
    pub(crate) checkpoint_number: u64,
    /// Of the file that its pages belong to, in bytes.
    target_file_len: u64,
    entries: Vec<ShadowEntry>,
}

fn list_checksum(file_id: &[u8; 16], number: u64, list: &[u8]) -> u64 {
    xxh3(location_seed(file_id, number), list)
}

impl Shadow {
    /// The shadow in `file`; none if it is not whole.
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
        // Not more than the file is long.
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
        // No length of a file is larger, and no page lies behind the end of its file.
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

    /// Pages in it.
    pub(crate) fn page_count(&self) -> u64 {
        self.entries.len() as u64
    }

    /// The length of the file that its pages belong to, in bytes.
    pub(crate) fn target_file_len(&self) -> u64 {
        self.target_file_len
    }

    /// Reads and checks the pages, and shows them in order, some at a time.
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

    /// Writes every page where it belongs, in a file that is made long enough.
    ///
    /// # Errors
    /// Those of the files; `Corruption` if a page is not any more what was written.
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

    /// Where its pages belong, in no order.
    pub(crate) fn file_pages(&self) -> impl Iterator<Item = u64> {
        self.entries.iter().map(|(place, _)| *place)
    }

    /// Shows every page with where it belongs, in no order.
    ///
    /// # Errors
    /// As for [`apply`](Shadow::apply), and what `show` returns.
    pub(crate) fn for_each_page(&self, file: &dyn File, mut show: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        self.for_each_batch(file, |batch, bytes| {
            batch.iter().zip(bytes.chunks_exact(PAGE_LEN)).try_for_each(|((place, _), page)| show(*place, page))
        })
    }
}

/// Writes a shadow. Until [`finish`](ShadowWriter::finish) there is none.
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

    /// Adds a page that belongs to `place`; its checksum.
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

    /// Writes the rest, and what makes it the shadow of checkpoint `number` for a file of `len` bytes. Not synced yet.
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

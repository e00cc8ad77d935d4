//! Records that are copied out of their pool together.
//!
//! One record after the other, each asked for when it is needed, waits for memory at each. A loop that does nothing but
//! copy has many of them under way at once.

use std::cell::OnceCell;

use crate::base::{EntryRef, KeyRef, RecordKind, Result, SeqNo};
use crate::mem::region::Region;
use crate::pmem::record::{Record, Slot};

/// Records up to this length in bytes are copied as a whole; of longer ones the value is when somebody asks for it.
const WHOLE: u64 = 1024;
/// A batch with so many bytes takes no more records.
const FULL: usize = 16 << 10;

#[cfg(test)]
thread_local! {
    /// Values that this thread has read beside their records.
    pub(crate) static VALUES_READ: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// A record that was copied.
#[derive(Clone, Copy)]
struct Copied {
    seqno: SeqNo,
    /// Where its value stands in the pool.
    value_at: u64,
    /// Where its key begins among the bytes; the value is behind it.
    key: u32,
    key_len: u32,
    value_len: u32,
    /// The number that its slot has for the caller.
    number: u32,
    kind: RecordKind,
    has_value: bool,
}

/// Records in the order in which a walk comes to them, and the one that it stands on.
#[derive(Default)]
pub(super) struct Batch {
    records: Vec<Copied>,
    /// In use up to `len`; what is behind is what former batches left.
    bytes: Vec<u8>,
    len: usize,
    at: usize,
    /// The value of the record stood on if it was not copied and somebody asked for it.
    value: OnceCell<Vec<u8>>,
}

impl Batch {
    /// Without records.
    pub(super) fn clear(&mut self) {
        self.records.clear();
        self.value.take();
        (self.len, self.at) = (0, 0);
    }

    /// Copies the record of a slot, which is `number` to the caller, if `keep` says so of its key and number; false if
    /// there is no room for it in this batch.
    ///
    /// # Errors
    /// As [`Record::read`].
    #[inline]
    pub(super) fn take(
        &mut self,
        region: &Region,
        slot: Slot,
        number: usize,
        keep: impl FnOnce(&[u8], SeqNo) -> bool,
    ) -> Result<bool> {
        if self.len >= FULL {
            return Ok(false);
        }
        let start = self.len;
        let (record, len) = match slot.len() {
            Some(len) if len <= WHOLE && region.contains(slot.at(), len) => {
                (self.copy(region, slot, len)?, len as usize)
            }
            _ => self.copy_head(region, slot)?,
        };
        let key = start + (record.key_at - record.at) as usize;
        if keep(&self.bytes[key..][..record.key_len], record.seqno) {
            // A batch has less than `FULL` bytes before it takes a head with a key of 64 KiB at most, and a leaf with
            // versions of all its keys fewer slots than memory has bytes: 32 bits hold all of it.
            self.records.push(Copied {
                seqno: record.seqno,
                value_at: record.value_at(),
                key: key as u32,
                key_len: record.key_len as u32,
                value_len: record.value_len as u32,
                number: number as u32,
                kind: record.kind,
                has_value: key + record.key_len < start + len || record.value_len == 0,
            });
            self.len = start + len;
        }
        Ok(true)
    }

    /// Copies a whole record behind the others.
    #[inline(always)]
    fn copy(&mut self, region: &Region, slot: Slot, len: u64) -> Result<Record> {
        let end = self.len + len as usize;
        if end > self.bytes.len() {
            self.lengthen(end);
        }
        let bytes = &mut self.bytes[self.len..end];
        region.read_words(slot.at(), bytes);
        Record::of(bytes, slot)
    }

    #[cold]
    fn lengthen(&mut self, len: usize) {
        self.bytes.resize(len, 0);
    }

    /// Copies a record up to its value behind the others.
    #[cold]
    fn copy_head(&mut self, region: &Region, slot: Slot) -> Result<(Record, usize)> {
        let record = Record::read(region, slot)?;
        let len = (record.value_at() - record.at) as usize;
        self.bytes.resize(self.bytes.len().max(self.len + len), 0);
        region.read(record.at, &mut self.bytes[self.len..][..len]);
        Ok((record, len))
    }

    /// To the next record, if there is one.
    #[inline]
    pub(super) fn step(&mut self) -> bool {
        let more = self.at + 1 < self.records.len();
        if more {
            self.at += 1;
            if self.value.get().is_some() {
                self.value.take();
            }
        }
        more
    }

    pub(super) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    #[inline]
    fn key_of(&self, record: &Copied) -> &[u8] {
        &self.bytes[record.key as usize..][..record.key_len as usize]
    }

    /// The number of the record that it stands on; this and what follows only if there is one.
    #[inline]
    pub(super) fn number(&self) -> usize {
        self.records[self.at].number as usize
    }

    #[inline]
    pub(super) fn head(&self) -> (KeyRef<'_>, RecordKind) {
        let record = &self.records[self.at];
        (KeyRef::new(self.key_of(record), record.seqno), record.kind)
    }

    /// The record that it stands on.
    #[inline]
    pub(super) fn entry(&self, region: &Region) -> EntryRef<'_> {
        let record = &self.records[self.at];
        let value = match record.has_value {
            true => &self.bytes[(record.key + record.key_len) as usize..][..record.value_len as usize],
            false => self.value.get_or_init(|| {
                #[cfg(test)]
                VALUES_READ.set(VALUES_READ.get() + 1);
                let mut value = vec![0; record.value_len as usize];
                region.read(record.value_at, &mut value);
                value
            }),
        };
        EntryRef { user: self.key_of(record), seqno: record.seqno, kind: record.kind, value }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pmem::record::Head;

    /// Where a record stands, its key, its value.
    type Written = (Slot, Vec<u8>, Vec<u8>);

    /// Records with keys and values of these lengths, one behind the other.
    fn pool(lengths: &[(usize, usize)]) -> (Region, Vec<Written>) {
        let region = Region::private(1 << 20).unwrap();
        region.grow(1 << 20).unwrap();
        let mut at = 4096;
        let mut records = Vec::new();
        for (n, (key_len, value_len)) in lengths.iter().enumerate() {
            let (key, value) = (vec![n as u8; *key_len], vec![!n as u8; *value_len]);
            let entry = EntryRef { user: &key, seqno: SeqNo(n as u64 + 1), kind: RecordKind::Put, value: &value };
            let mut head = Head::new(entry).unwrap();
            let len = head.buffer_len(entry);
            region.write(at, &[head.seal(&[7; 16], at, entry), &key, &value], |_, _| ());
            records.push((Slot::new(at, len), key, value));
            at += len;
        }
        (region, records)
    }

    #[test]
    fn records_come_back_short_and_long_until_it_is_full() {
        let lengths = [(16, 100), (0, 0), (127, 127), (128, 500), (9, 5000), (60_000, 3), (3, 60_000), (16, 16)];
        let (region, records) = pool(&lengths);
        let mut batch = Batch::default();
        for _ in 0..2 {
            batch.clear();
            assert!(batch.is_empty());
            let took: Vec<bool> = records
                .iter()
                .enumerate()
                .map(|(n, (slot, ..))| batch.take(&region, *slot, 70 + n, |_, _| true).unwrap())
                .collect();
            assert_eq!(took, [true, true, true, true, true, true, false, false], "the long key fills it");
            for (n, (_, key, value)) in records[..6].iter().enumerate() {
                let entry = batch.entry(&region);
                assert_eq!((entry.user, entry.seqno, entry.value), (key.as_slice(), SeqNo(n as u64 + 1), &**value));
                assert_eq!((batch.number(), batch.head().0.user), (70 + n, key.as_slice()));
                assert_eq!(batch.step(), n < 5);
            }
        }
    }

    #[test]
    fn what_does_not_satisfy_is_not_kept() {
        let (region, records) = pool(&[(4, 4); 5]);
        let mut batch = Batch::default();
        for (n, (slot, ..)) in records.iter().enumerate() {
            assert!(batch.take(&region, *slot, n, |key, seqno| key == [n as u8; 4] && seqno.0 != 2).unwrap());
        }
        let mut numbers = vec![batch.number()];
        while batch.step() {
            numbers.push(batch.number());
        }
        assert_eq!(numbers, [0, 2, 3, 4]);
        assert!(batch.entry(&region).value == [!4; 4]);
    }

    #[test]
    fn what_is_no_record_is_an_error_and_nothing_is_taken() {
        let (region, records) = pool(&[(4, 4)]);
        let mut batch = Batch::default();
        let (slot, ..) = records[0];
        for slot in
            [Slot::new(slot.at() + 4096, 32), Slot::new(slot.at(), 4096), Slot::new(1 << 20, 32), Slot(u64::MAX)]
        {
            assert!(batch.take(&region, slot, 0, |_, _| true).is_err() && batch.is_empty());
        }
        assert!(batch.take(&region, slot, 0, |_, _| true).unwrap() && !batch.is_empty());
    }
}

//! Records that are copied out of their pool together.
//!
//! One record after the other, each asked for when it is needed, waits for memory at each. A loop that does nothing but
//! copy has many of them under way at once.

use std::cell::OnceCell;

use crate::base::{EntryRef, InternalKey, RecordKind, Result, SeqNo};
use crate::mem::region::Region;
use crate::pmem::record::{LeafSlot, PoolRecord};

/// Records up to this length in bytes are copied as a whole; of longer ones the value is when somebody asks for it.
const COPY_WHOLE_MAX: u64 = 1024;
/// A batch with so many bytes takes no more records.
const BATCH_BYTES_MAX: usize = 16 << 10;

#[cfg(test)]
thread_local! {
    /// Values that this thread has read beside their records.
    pub(crate) static VALUES_READ: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// A record that was copied.
#[derive(Clone, Copy)]
struct CopiedRecord {
    seqno: SeqNo,
    /// Where its value stands in the pool.
    value_offset: u64,
    /// Where its key begins among the bytes; the value is behind it.
    key_start: u32,
    key_len: u32,
    value_len: u32,
    /// The number that its slot has for the caller.
    slot_index: u32,
    kind: RecordKind,
    has_value: bool,
}

/// Records in the order in which a walk comes to them, and the one that it stands on.
#[derive(Default)]
pub(super) struct RecordReadBatch {
    records: Vec<CopiedRecord>,
    /// In use up to `len`; what is behind is what former batches left.
    bytes: Vec<u8>,
    len: usize,
    position: usize,
    /// The value of the record stood on if it was not copied and somebody asked for it.
    value: OnceCell<Vec<u8>>,
}

impl RecordReadBatch {
    /// Without records.
    pub(super) fn clear(&mut self) {
        self.records.clear();
        self.value.take();
        (self.len, self.position) = (0, 0);
    }

    /// Copies the record of a slot, which is `number` to the caller, if `keep` says so of its key and number; false if
    /// there is no room for it in this batch.
    ///
    /// # Errors
    /// As [`PoolRecord::read`](crate::pmem::record::PoolRecord::read).
    #[inline]
    pub(super) fn push_slot(
        &mut self,
        region: &Region,
        slot: LeafSlot,
        number: usize,
        keep: impl FnOnce(&[u8], SeqNo) -> bool,
    ) -> Result<bool> {
        if self.len >= BATCH_BYTES_MAX {
            return Ok(false);
        }
        let start = self.len;
        let (record, len) = match slot.len() {
            Some(len) if len <= COPY_WHOLE_MAX && region.contains(slot.offset(), len) => {
                (self.copy_record(region, slot, len)?, len as usize)
            }
            _ => self.copy_header_and_key(region, slot)?,
        };
        let key = start + (record.key_offset - record.offset) as usize;
        if keep(&self.bytes[key..][..record.key_len], record.seqno) {
            // A batch has less than `BATCH_BYTES_MAX` bytes before it takes a head with a key of 64 KiB at most, and a
            // leaf with versions of all its keys fewer slots than memory has bytes: 32 bits hold all of it.
            self.records.push(CopiedRecord {
                seqno: record.seqno,
                value_offset: record.value_offset(),
                key_start: key as u32,
                key_len: record.key_len as u32,
                value_len: record.value_len as u32,
                slot_index: number as u32,
                kind: record.kind,
                has_value: key + record.key_len < start + len || record.value_len == 0,
            });
            self.len = start + len;
        }
        Ok(true)
    }

    /// Copies a whole record behind the others.
    #[inline(always)]
    fn copy_record(&mut self, region: &Region, slot: LeafSlot, len: u64) -> Result<PoolRecord> {
        let end = self.len + len as usize;
        if end > self.bytes.len() {
            self.lengthen(end);
        }
        let bytes = &mut self.bytes[self.len..end];
        region.read_words(slot.offset(), bytes);
        PoolRecord::from_buffer(bytes, slot)
    }

    #[cold]
    fn lengthen(&mut self, len: usize) {
        self.bytes.resize(len, 0);
    }

    /// Copies a record up to its value behind the others.
    #[cold]
    fn copy_header_and_key(&mut self, region: &Region, slot: LeafSlot) -> Result<(PoolRecord, usize)> {
        let record = PoolRecord::read(region, slot)?;
        let len = (record.value_offset() - record.offset) as usize;
        self.bytes.resize(self.bytes.len().max(self.len + len), 0);
        region.read(record.offset, &mut self.bytes[self.len..][..len]);
        Ok((record, len))
    }

    /// To the next record, if there is one.
    #[inline]
    pub(super) fn step(&mut self) -> bool {
        let more = self.position + 1 < self.records.len();
        if more {
            self.position += 1;
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
    fn key_of(&self, record: &CopiedRecord) -> &[u8] {
        &self.bytes[record.key_start as usize..][..record.key_len as usize]
    }

    /// The number of the record that it stands on; this and what follows only if there is one.
    #[inline]
    pub(super) fn slot_index(&self) -> usize {
        self.records[self.position].slot_index as usize
    }

    #[inline]
    pub(super) fn key(&self) -> (InternalKey<'_>, RecordKind) {
        let record = &self.records[self.position];
        (InternalKey::new(self.key_of(record), record.seqno), record.kind)
    }

    /// The record that it stands on.
    #[inline]
    pub(super) fn entry(&self, region: &Region) -> EntryRef<'_> {
        let record = &self.records[self.position];
        let value = match record.has_value {
            true => &self.bytes[(record.key_start + record.key_len) as usize..][..record.value_len as usize],
            false => self.value.get_or_init(|| {
                #[cfg(test)]
                VALUES_READ.set(VALUES_READ.get() + 1);
                let mut value = vec![0; record.value_len as usize];
                region.read(record.value_offset, &mut value);
                value
            }),
        };
        EntryRef { user_key: self.key_of(record), seqno: record.seqno, kind: record.kind, value }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pmem::record::PoolRecordHeader;

    /// Where a record stands, its key, its value.
    type StoredTestRecord = (LeafSlot, Vec<u8>, Vec<u8>);

    /// Records with keys and values of these lengths, one behind the other.
    fn pool(lengths: &[(usize, usize)]) -> (Region, Vec<StoredTestRecord>) {
        let region = Region::private(1 << 20).unwrap();
        region.grow(1 << 20).unwrap();
        let mut at = 4096;
        let mut records = Vec::new();
        for (n, (key_len, value_len)) in lengths.iter().enumerate() {
            let (key, value) = (vec![n as u8; *key_len], vec![!n as u8; *value_len]);
            let entry = EntryRef { user_key: &key, seqno: SeqNo(n as u64 + 1), kind: RecordKind::Put, value: &value };
            let mut head = PoolRecordHeader::new(entry).unwrap();
            let len = head.buffer_len(entry);
            region.write(at, &[head.encode(&[7; 16], at, entry), &key, &value], |_, _| ());
            records.push((LeafSlot::new(at, len), key, value));
            at += len;
        }
        (region, records)
    }

    #[test]
    fn batch_copies_records_until_full() {
        let lengths = [(16, 100), (0, 0), (127, 127), (128, 500), (9, 5000), (60_000, 3), (3, 60_000), (16, 16)];
        let (region, records) = pool(&lengths);
        let mut batch = RecordReadBatch::default();
        for _ in 0..2 {
            batch.clear();
            assert!(batch.is_empty());
            let took: Vec<bool> = records
                .iter()
                .enumerate()
                .map(|(n, (slot, ..))| batch.push_slot(&region, *slot, 70 + n, |_, _| true).unwrap())
                .collect();
            assert_eq!(took, [true, true, true, true, true, true, false, false], "the long key fills it");
            for (n, (_, key, value)) in records[..6].iter().enumerate() {
                let entry = batch.entry(&region);
                assert_eq!((entry.user_key, entry.seqno, entry.value), (key.as_slice(), SeqNo(n as u64 + 1), &**value));
                assert_eq!((batch.slot_index(), batch.key().0.user_key), (70 + n, key.as_slice()));
                assert_eq!(batch.step(), n < 5);
            }
        }
    }

    #[test]
    fn batch_skips_records_filter_rejects() {
        let (region, records) = pool(&[(4, 4); 5]);
        let mut batch = RecordReadBatch::default();
        for (n, (slot, ..)) in records.iter().enumerate() {
            assert!(batch.push_slot(&region, *slot, n, |key, seqno| key == [n as u8; 4] && seqno.0 != 2).unwrap());
        }
        let mut numbers = vec![batch.slot_index()];
        while batch.step() {
            numbers.push(batch.slot_index());
        }
        assert_eq!(numbers, [0, 2, 3, 4]);
        assert!(batch.entry(&region).value == [!4; 4]);
    }

    #[test]
    fn bad_slot_is_error_and_leaves_batch_empty() {
        let (region, records) = pool(&[(4, 4)]);
        let mut batch = RecordReadBatch::default();
        let (slot, ..) = records[0];
        for slot in [
            LeafSlot::new(slot.offset() + 4096, 32),
            LeafSlot::new(slot.offset(), 4096),
            LeafSlot::new(1 << 20, 32),
            LeafSlot(u64::MAX),
        ] {
            assert!(batch.push_slot(&region, slot, 0, |_, _| true).is_err() && batch.is_empty());
        }
        assert!(batch.push_slot(&region, slot, 0, |_, _| true).unwrap() && !batch.is_empty());
    }
}

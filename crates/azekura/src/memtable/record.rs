//! The byte layout of a record in the arena, and the key order of the records.
//!
//! ```text
//! byte  0  u64  sequence number << 8 | kind
//!       8  u32  reference of the next older version of the key, 0 = none (set only if keys are hashed)
//!      12  u32  length of the value
//!      16  u16  length of the key
//!      18       key, value
//! ```
//! Records are never written to a file, so this layout is not a file format.

use std::cmp::Ordering;
use std::sync::Arc;

use crate::base::{EntryRef, Error, InternalKey, KeyOrder, RecordKind, SeqNo};
use crate::mem::arena::{AppendError, Arena, ArenaRef, ArenaWriter};

const HEADER_LEN: usize = 18;

/// Bytes of an arena that a record takes.
pub(in crate::memtable) fn record_len(key_len: usize, value_len: usize) -> u64 {
    (HEADER_LEN + key_len + value_len).next_multiple_of(8) as u64
}

/// Panic message for a stored reference without a record, which would be a bug.
const PUBLISHED: &str = "references are stored after their records were published";

/// A record in the arena.
#[derive(Clone, Copy)]
pub(crate) struct MemtableRecord<'a> {
    header: &'a [u8; HEADER_LEN],
    /// Key and value, followed by the other published bytes of the chunk.
    rest: &'a [u8],
}

impl<'a> MemtableRecord<'a> {
    #[inline]
    fn new(bytes: &'a [u8]) -> MemtableRecord<'a> {
        let (header, rest) = bytes.split_first_chunk().expect("a record is not shorter than its header");
        MemtableRecord { header, rest }
    }

    #[inline]
    fn tag(&self) -> u64 {
        u64::from_le_bytes(*self.header.first_chunk().expect("18 >= 8"))
    }

    #[inline]
    pub(crate) fn seqno(&self) -> SeqNo {
        SeqNo(self.tag() >> 8)
    }

    /// The next older version of the same key.
    #[inline]
    pub(crate) fn older(&self) -> Option<ArenaRef> {
        let [_, _, _, _, _, _, _, _, a, b, c, d, ..] = *self.header;
        ArenaRef::from_bits(u32::from_le_bytes([a, b, c, d]))
    }

    #[inline]
    fn value_len(&self) -> usize {
        let [.., a, b, c, d, _, _] = *self.header;
        u32::from_le_bytes([a, b, c, d]) as usize
    }

    #[inline]
    pub(crate) fn user_key(&self) -> &'a [u8] {
        let [.., a, b] = *self.header;
        &self.rest[..usize::from(u16::from_le_bytes([a, b]))]
    }

    #[inline]
    pub(crate) fn key(&self) -> InternalKey<'a> {
        InternalKey { user_key: self.user_key(), seqno: self.seqno() }
    }

    #[inline]
    pub(crate) fn entry(&self) -> EntryRef<'a> {
        let user_key = self.user_key();
        let kind = RecordKind::from_byte(self.tag() as u8).expect("a valid kind was stored");
        EntryRef { user_key, seqno: self.seqno(), kind, value: &self.rest[user_key.len()..][..self.value_len()] }
    }
}

/// All records of a memtable, and their key order.
pub(crate) struct MemtableRecords {
    arena: Arc<Arena>,
    order: KeyOrder,
    bytewise: bool,
}

impl MemtableRecords {
    pub(crate) fn new(arena: Arc<Arena>, order: KeyOrder) -> MemtableRecords {
        MemtableRecords { arena, bytewise: order.is_bytewise(), order }
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    pub(crate) fn order(&self) -> &KeyOrder {
        &self.order
    }

    /// Whether user keys are compared as bytes, so that the prefixes of two keys can decide their order.
    #[inline]
    pub(crate) fn bytewise(&self) -> bool {
        self.bytewise
    }

    /// Returns the record at `at`, a reference that an index contains.
    #[inline]
    pub(crate) fn get(&self, at: ArenaRef) -> MemtableRecord<'_> {
        MemtableRecord::new(self.arena.bytes_from(at).expect(PUBLISHED))
    }

    /// Prefetches the record of these reference bits into the processor's cache.
    #[inline]
    pub(crate) fn prefetch(&self, bits: u32) {
        if let Some(at) = ArenaRef::from_bits(bits) {
            self.arena.prefetch(at);
        }
    }

    /// Returns the record of reference bits that an index contains.
    #[inline]
    pub(crate) fn get_by_bits(&self, bits: u32) -> MemtableRecord<'_> {
        self.get(ArenaRef::from_bits(bits).expect(PUBLISHED))
    }

    /// Compares the record of `bits` with `target` in internal order.
    #[inline]
    pub(crate) fn cmp(&self, bits: u32, target: InternalKey<'_>) -> Ordering {
        let key = self.get_by_bits(bits).key();
        let key_order = if self.bytewise {
            key.user_key.cmp(target.user_key)
        } else {
            self.order.cmp(key.user_key, target.user_key)
        };
        key_order.then_with(|| target.seqno.cmp(&key.seqno))
    }

    /// Whether two user keys are equal in the key order.
    #[inline]
    pub(crate) fn keys_equal(&self, a: &[u8], b: &[u8]) -> bool {
        a == b || !self.bytewise && self.order.cmp(a, b).is_eq()
    }

    /// Appends `entry`, whose next older version is `older`, to the arena.
    ///
    /// # Errors
    /// `Full` if the arena is full; `Invalid` if the key is longer than 65535 bytes or the value is longer than
    /// 4294967295 bytes; `OutOfSpace` if there is no memory.
    #[inline]
    pub(crate) fn append(
        &self,
        writer: &mut ArenaWriter,
        entry: EntryRef<'_>,
        older: Option<ArenaRef>,
    ) -> Result<ArenaRef, AppendError> {
        let key_len =
            u16::try_from(entry.user_key.len()).map_err(|_| Error::invalid("key is longer than 65535 bytes"))?;
        let value_len =
            u32::try_from(entry.value.len()).map_err(|_| Error::invalid("value is longer than 4294967295 bytes"))?;
        debug_assert!(entry.seqno <= SeqNo::MAX, "a sequence number has 56 bits");
        debug_assert!(entry.kind != RecordKind::RangeDelete, "a range delete is not a record");
        let mut header = [0; HEADER_LEN];
        header[..8].copy_from_slice(&(entry.seqno.0 << 8 | u64::from(entry.kind.to_byte())).to_le_bytes());
        header[8..12].copy_from_slice(&older.map_or(0, ArenaRef::to_bits).to_le_bytes());
        header[12..16].copy_from_slice(&value_len.to_le_bytes());
        header[16..].copy_from_slice(&key_len.to_le_bytes());
        writer.append(&[&header, entry.user_key, entry.value])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_round_trip() {
        let (arena, mut writer) = Arena::new(Arc::default());
        let records = MemtableRecords::new(arena, KeyOrder::bytewise());
        let mut stored = Vec::new();
        for (n, kind) in [RecordKind::Put, RecordKind::Delete, RecordKind::SingleDelete].into_iter().enumerate() {
            for (user_key, value) in [(&b""[..], &b""[..]), (b"k", b""), (b"", b"v"), (&[7; 65_535], &[9; 300_000])] {
                let seqno = SeqNo(SeqNo::MAX.0 - n as u64);
                let entry = EntryRef { user_key, seqno, kind, value };
                let older = stored.last().map(|(at, _)| *at);
                let at = records.append(&mut writer, entry, older).unwrap();
                assert_eq!(records.get(at).older(), older);
                stored.push((at, entry));
            }
        }
        for (at, entry) in stored {
            assert_eq!(records.get(at).entry(), entry);
            assert_eq!(records.get_by_bits(at.to_bits()).key(), entry.key());
        }
        let long = EntryRef { user_key: &[0; 65_536], seqno: SeqNo(1), kind: RecordKind::Put, value: b"" };
        assert_eq!(
            records.append(&mut writer, long, None).unwrap_err().into_error().kind(),
            crate::base::ErrorKind::Invalid
        );
    }
}

//! One record: what is known of its key and value, in one buffer with them. See the format of pools.

use crate::base::checksum::{place_seed, xxh3, xxh3_pieces};
use crate::base::coding::Decoder;
use crate::base::key::{KEY_LEN_MAX, VALUE_LEN_MAX};
use crate::base::{EntryRef, Error, RecordKind, Result, SeqNo};
use crate::mem::region::Region;

/// Buffers of records begin at multiples of this, and their lengths are multiples of it, in bytes.
pub(crate) const STEP: u64 = 16;

/// Checksum, tag, lengths of key and value, sequence number.
const HEAD_LEN_MAX: usize = 4 + 1 + 3 + 5 + 7;
/// The bits of the tag that say how many bytes the sequence number takes; the others are those of the kind.
const WIDTH_SHIFT: u32 = 3;
const WIDTH_MASK: u8 = 0b0011_1000;

const OFFSET_BITS: u32 = 40;
/// A length that the record itself knows.
const LONG: u64 = u64::MAX >> OFFSET_BITS;

/// Offsets are below this, in bytes: 16 TiB.
pub(crate) const OFFSET_END: u64 = STEP << OFFSET_BITS;

/// Where a record stands and how long its buffer is, in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(pub(crate) u64);

impl Slot {
    /// `at` and `len` are those of a buffer: multiples of [`STEP`].
    pub(crate) fn new(at: u64, len: u64) -> Slot {
        Slot(((len / STEP).min(LONG) << OFFSET_BITS) | (at / STEP))
    }

    #[inline]
    pub(crate) fn at(self) -> u64 {
        (self.0 & (u64::MAX >> (64 - OFFSET_BITS))) * STEP
    }

    /// The length of the buffer, if it is short enough to stand here.
    #[inline]
    pub(crate) fn len(self) -> Option<u64> {
        let len = self.0 >> OFFSET_BITS;
        (len != LONG).then_some(len * STEP)
    }
}

/// The length of the buffer of a record that will come with a sequence number up to `seqno`; of a lower one it may be
/// a [`STEP`] less.
pub(crate) fn buffer_len_for(key_len: usize, value_len: usize, seqno: SeqNo) -> u64 {
    let varint = |n: usize| (usize::BITS - (n | 1).leading_zeros()).div_ceil(7) as usize;
    let head = 4 + 1 + varint(key_len) + varint(value_len) + width_of(seqno);
    ((head + key_len + value_len) as u64).next_multiple_of(STEP)
}

/// The bytes that a sequence number takes.
fn width_of(seqno: SeqNo) -> usize {
    8 - (seqno.0 | 1).leading_zeros() as usize / 8
}

/// The first bytes of a record's buffer.
pub(crate) struct Head {
    bytes: [u8; HEAD_LEN_MAX],
    len: usize,
}

impl Head {
    /// The head of `entry`, all but its checksum.
    ///
    /// # Errors
    /// `Invalid` if key or value is too long.
    pub(crate) fn new(entry: EntryRef<'_>) -> Result<Head> {
        if entry.user.len() > KEY_LEN_MAX {
            return Err(Error::invalid(format!("key is longer than {KEY_LEN_MAX} bytes")));
        }
        if entry.value.len() as u64 > VALUE_LEN_MAX {
            return Err(Error::invalid(format!("value is longer than {VALUE_LEN_MAX} bytes")));
        }
        let seqno = entry.seqno.0.to_le_bytes();
        let width = width_of(entry.seqno);
        let mut head = Head { bytes: [0; HEAD_LEN_MAX], len: 4 };
        head.push(entry.kind.to_byte() | (width as u8) << WIDTH_SHIFT);
        head.push_varint(entry.user.len() as u64);
        head.push_varint(entry.value.len() as u64);
        seqno[..width].iter().for_each(|byte| head.push(*byte));
        Ok(head)
    }

    fn push(&mut self, byte: u8) {
        self.bytes[self.len] = byte;
        self.len += 1;
    }

    fn push_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.push(value as u8);
    }

    /// The length of the buffer that the record needs.
    pub(crate) fn buffer_len(&self, entry: EntryRef<'_>) -> u64 {
        ((self.len + entry.user.len() + entry.value.len()) as u64).next_multiple_of(STEP)
    }

    /// The bytes, bound by their checksum to `at` and to key and value.
    pub(crate) fn seal(&mut self, file_id: &[u8; 16], at: u64, entry: EntryRef<'_>) -> &[u8] {
        let head = xxh3(place_seed(file_id, at), &self.bytes[4..self.len]);
        let sum = fold(xxh3(xxh3(head, entry.user), entry.value));
        self.bytes[..4].copy_from_slice(&sum.to_le_bytes());
        &self.bytes[..self.len]
    }
}

fn fold(sum: u64) -> u32 {
    (sum ^ sum >> 32) as u32
}

/// What the head of a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) at: u64,
    pub(crate) seqno: SeqNo,
    pub(crate) kind: RecordKind,
    pub(crate) key_at: u64,
    pub(crate) key_len: usize,
    pub(crate) value_len: usize,
}

impl Record {
    /// The record of a slot.
    ///
    /// # Errors
    /// `Corruption` if there is none, `Unsupported` if it is of a kind that a newer version wrote.
    #[inline]
    pub(crate) fn read(region: &Region, slot: Slot) -> Result<Record> {
        let at = slot.at();
        if !region.contains(at, slot.len().unwrap_or(STEP).max(STEP)) {
            return Err(nowhere(at));
        }
        let [first, second] = region.load_all(at);
        match Record::short(slot, first, second) {
            Some(record) => Ok(record),
            None => Record::read_long(region, slot),
        }
    }

    /// The record of a slot, whose whole buffer is `bytes`.
    ///
    /// # Errors
    /// As [`Record::read`].
    #[inline(always)]
    pub(crate) fn of(bytes: &[u8], slot: Slot) -> Result<Record> {
        let Some(([first, second], _)) = bytes.as_chunks().0.split_first_chunk() else {
            return Err(nowhere(slot.at()));
        };
        match Record::short(slot, u64::from_le_bytes(*first), u64::from_le_bytes(*second)) {
            Some(record) => Ok(record),
            None => Record::decode(bytes, slot).and_then(|record| record.in_slot(slot)),
        }
    }

    /// The record that begins with these words; none where it is not like most: then [`Record::decode`] says what it
    /// is.
    #[inline(always)]
    pub(crate) fn short(slot: Slot, first: u64, second: u64) -> Option<Record> {
        let [_, _, _, _, tag, key_len, value_len, low] = first.to_le_bytes();
        let width = u32::from(tag & WIDTH_MASK) >> WIDTH_SHIFT;
        let put = tag & !WIDTH_MASK == RecordKind::Put.to_byte();
        if (key_len | value_len) >= 0x80 || width == 0 || !put {
            return None;
        }
        let seqno = (second << 8 | u64::from(low)) & (u64::MAX >> (64 - 8 * width));
        let (key_len, value_len) = (usize::from(key_len), usize::from(value_len));
        let (at, kind) = (slot.at(), RecordKind::Put);
        let record = Record { at, seqno: SeqNo(seqno), kind, key_at: at + 7 + u64::from(width), key_len, value_len };
        (slot.len() == Some(record.buffer_len())).then_some(record)
    }

    #[cold]
    fn read_long(region: &Region, slot: Slot) -> Result<Record> {
        let at = slot.at();
        let there = (region.len() - at).min(slot.len().unwrap_or(u64::MAX)).min(HEAD_LEN_MAX as u64) as usize;
        let mut bytes = [0; HEAD_LEN_MAX];
        region.read(at, &mut bytes[..there]);
        Record::decode(&bytes[..there], slot)?.checked(region, slot)
    }

    #[cold]
    fn decode(bytes: &[u8], slot: Slot) -> Result<Record> {
        let (at, there) = (slot.at(), bytes.len().min(HEAD_LEN_MAX));
        let mut decoder = Decoder::new(&bytes[there.min(4)..there]);
        let tag = decoder.u8()?;
        let width = usize::from((tag & WIDTH_MASK) >> WIDTH_SHIFT);
        let (key_len, value_len) = (decoder.varint()?, decoder.varint_u32()?);
        let mut seqno = [0; 8];
        seqno[..width].copy_from_slice(decoder.take(width)?);
        let key_len = usize::try_from(key_len).ok().filter(|len| *len <= KEY_LEN_MAX).ok_or_else(|| nowhere(at))?;
        let value_len = usize::try_from(value_len).map_err(|_| nowhere(at))?;
        let key_at = at + (there - decoder.rest().len()) as u64;
        let kind = RecordKind::from_byte(tag & !WIDTH_MASK)?;
        if width == 0 {
            return Err(nowhere(at));
        }
        Ok(Record { at, seqno: SeqNo(u64::from_le_bytes(seqno)), kind, key_at, key_len, value_len })
    }

    fn checked(self, region: &Region, slot: Slot) -> Result<Record> {
        let len = self.buffer_len();
        // That what a slot knows to be there is in the region was looked at before anything of it was read.
        let fits = slot.len().is_some() || len / STEP >= LONG && region.contains(self.at, len);
        if fits { self.in_slot(slot) } else { Err(nowhere(self.at)) }
    }

    /// It, if it is as long as its slot says.
    fn in_slot(self, slot: Slot) -> Result<Record> {
        let fits = slot.len().is_none_or(|there| self.buffer_len() == there);
        if fits { Ok(self) } else { Err(nowhere(self.at)) }
    }

    /// The length of its buffer.
    #[inline]
    pub(crate) fn buffer_len(&self) -> u64 {
        (self.value_at() - self.at + self.value_len as u64).next_multiple_of(STEP)
    }

    #[inline]
    pub(crate) fn value_at(&self) -> u64 {
        self.key_at + self.key_len as u64
    }

    pub(crate) fn slot(&self) -> Slot {
        Slot::new(self.at, self.buffer_len())
    }

    /// Puts a copy of the key into `out`, in place of what was there.
    #[inline]
    pub(crate) fn key(&self, region: &Region, out: &mut Vec<u8>) {
        out.resize(self.key_len, 0);
        region.read(self.key_at, out);
    }

    /// Whether its bytes are those that were written.
    pub(crate) fn verifies(&self, region: &Region, file_id: &[u8; 16]) -> bool {
        let mut head = [0; HEAD_LEN_MAX];
        let head = &mut head[..(self.key_at - self.at) as usize];
        region.read(self.at, head);
        let sum = xxh3(place_seed(file_id, self.at), &head[4..]);
        let read = |from: u64| move |at: u64, out: &mut [u8]| region.read(from + at, out);
        let sum = xxh3_pieces(sum, self.key_len as u64, read(self.key_at));
        let sum = xxh3_pieces(sum, self.value_len as u64, read(self.value_at()));
        fold(sum).to_le_bytes() == head[..4]
    }
}

#[cold]
fn nowhere(at: u64) -> Error {
    Error::corruption("a slot leads to what is no record").at_offset(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    const ID: [u8; 16] = [7; 16];

    fn entry<'a>(user: &'a [u8], seqno: u64, value: &'a [u8]) -> EntryRef<'a> {
        EntryRef { user, seqno: SeqNo(seqno), kind: RecordKind::Put, value }
    }

    fn write(region: &Region, at: u64, entry: EntryRef<'_>) -> Slot {
        let mut head = Head::new(entry).unwrap();
        let slot = Slot::new(at, head.buffer_len(entry));
        region.write(at, &[head.seal(&ID, at, entry), entry.user, entry.value], |_, _| ());
        slot
    }

    #[test]
    fn records_round_trip() {
        let region = Region::private(1 << 20).unwrap();
        region.grow(1 << 20).unwrap();
        let long = vec![9; 300_000];
        for seqno in [1, 255, 256, 1 << 32, (1 << 40) - 1, 1 << 40, SeqNo::MAX.0] {
            for user in [&b""[..], b"k", &[7; 127], &[8; 128], &[9; 65_535]] {
                for value in [&b""[..], b"v", &[1; 127], &[2; 128], &long] {
                    let entry = entry(user, seqno, value);
                    let slot = write(&region, 4096, entry);
                    let record = Record::read(&region, slot).unwrap();
                    assert_eq!((record.seqno, record.kind, record.slot()), (entry.seqno, entry.kind, slot));
                    let mut key = Vec::new();
                    record.key(&region, &mut key);
                    assert_eq!(
                        (key.as_slice(), region.slice(record.value_at(), record.value_len)),
                        (user, value.into())
                    );
                    assert!(record.verifies(&region, &ID) && !record.verifies(&region, &[8; 16]));
                }
            }
        }
        let small = entry(&[1; 16], (1 << 40) - 1, &[2; 100]);
        assert_eq!(Head::new(small).unwrap().buffer_len(small), 128, "twelve bytes more than key and value");
        assert_eq!(Head::new(entry(&[0; 65_536], 1, b"")).map(|_| ()).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn slots_know_offset_and_length() {
        for (at, len) in [(16, 16), (OFFSET_END - 16, 4096), (4096, (LONG - 1) * STEP)] {
            let slot = Slot::new(at, len);
            assert_eq!((slot.at(), slot.len()), (at, Some(len)));
        }
        assert_eq!(Slot::new(32, LONG * STEP).len(), None);
        assert_eq!(Slot::new(32, 1 << 32).len(), None);
    }

    #[test]
    fn any_bytes_are_a_record_or_an_error() {
        let region = Region::private(8192).unwrap();
        region.grow(8192).unwrap();
        let slot = write(&region, 64, entry(b"some key", 77, &[3; 200]));
        for bit in 0..8 * 217 {
            let (at, mask) = (64 + bit / 64 * 8, 1 << (bit % 64));
            region.store(at, region.load(at) ^ mask);
            let read = Record::read(&region, slot);
            assert!(read.is_err() || !read.unwrap().verifies(&region, &ID), "bit {bit}");
            region.store(at, region.load(at) ^ mask);
        }
        for slot in [Slot::new(8192, 16), Slot::new(8176, 32), Slot(u64::MAX), Slot(0), Slot::new(8176, 16)] {
            assert!(Record::read(&region, slot).is_err());
        }
        region.store(8184, u64::MAX);
        region.store(8176, u64::MAX);
        assert!(Record::read(&region, Slot::new(8176, 16)).is_err());
    }
}

//! One record: a header with its checksum, lengths and sequence number, then its key and its value, in one buffer.
//! See the format of pools.

use crate::base::checksum::{location_seed, xxh3, xxh3_chunked};
use crate::base::coding::ByteReader;
use crate::base::key::{EXPIRY_LEN, KEY_LEN_MAX, VALUE_LEN_MAX, split_expiry};
use crate::base::{EntryRef, Error, RecordKind, Result, SeqNo};
use crate::mem::region::Region;

/// Buffers of records begin at multiples of this, and their lengths are multiples of it, in bytes.
pub(crate) const BUFFER_ALIGN: u64 = 16;

/// Checksum, tag, key length, value length, sequence number.
const RECORD_HEADER_LEN_MAX: usize = 4 + 1 + 3 + 5 + 7;
/// The bits of the tag that contain the width of the sequence number in bytes. The other bits contain the kind.
const SEQNO_WIDTH_SHIFT: u32 = 3;
const SEQNO_WIDTH_MASK: u8 = 0b0011_1000;

const OFFSET_BITS: u32 = 40;
/// Length field of a slot whose buffer is too long for the field: the record header contains the length.
const LEN_IN_RECORD: u64 = u64::MAX >> OFFSET_BITS;

/// All offsets are below this, in bytes: 16 TiB.
pub(crate) const OFFSET_END: u64 = BUFFER_ALIGN << OFFSET_BITS;

/// Offset of a record and length of its buffer in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeafSlot(pub(crate) u64);

impl LeafSlot {
    /// `at` and `len` are the offset and length of a buffer in bytes.
    pub(crate) fn new(at: u64, len: u64) -> LeafSlot {
        debug_assert!(at.is_multiple_of(BUFFER_ALIGN) && len.is_multiple_of(BUFFER_ALIGN), "buffers are aligned");
        debug_assert!(at < OFFSET_END, "an offset has 40 bits");
        LeafSlot(((len / BUFFER_ALIGN).min(LEN_IN_RECORD) << OFFSET_BITS) | (at / BUFFER_ALIGN))
    }

    #[inline]
    pub(crate) fn offset(self) -> u64 {
        (self.0 & (u64::MAX >> (64 - OFFSET_BITS))) * BUFFER_ALIGN
    }

    /// The length of the buffer in bytes, or `None` if it is too long for the field.
    #[inline]
    pub(crate) fn len(self) -> Option<u64> {
        let len = self.0 >> OFFSET_BITS;
        (len != LEN_IN_RECORD).then_some(len * BUFFER_ALIGN)
    }
}

/// The length in bytes of the buffer of a record whose sequence number is at most `seqno`. With a lower one the
/// record may need [`BUFFER_ALIGN`] bytes less.
pub(crate) fn buffer_len_for(key_len: usize, value_len: usize, seqno: SeqNo) -> u64 {
    let varint = |n: usize| (usize::BITS - (n | 1).leading_zeros()).div_ceil(7) as usize;
    let head = 4 + 1 + varint(key_len) + varint(value_len) + seqno_width(seqno);
    ((head + key_len + value_len) as u64).next_multiple_of(BUFFER_ALIGN)
}

/// Number of bytes that a sequence number takes.
fn seqno_width(seqno: SeqNo) -> usize {
    8 - (seqno.0 | 1).leading_zeros() as usize / 8
}

/// The encoded header of a record: the first bytes of its buffer.
pub(crate) struct PoolRecordHeader {
    /// One byte longer than a header, because a sequence number is copied as eight bytes.
    bytes: [u8; RECORD_HEADER_LEN_MAX + 1],
    len: usize,
}

impl PoolRecordHeader {
    /// The header of `entry`, without its checksum.
    ///
    /// # Errors
    /// `Invalid` if key or value is too long.
    pub(crate) fn new(entry: EntryRef<'_>) -> Result<PoolRecordHeader> {
        if entry.user_key.len() > KEY_LEN_MAX {
            return Err(Error::invalid(format!("key is longer than {KEY_LEN_MAX} bytes")));
        }
        if entry.value.len() as u64 > VALUE_LEN_MAX {
            return Err(Error::invalid(format!("value is longer than {VALUE_LEN_MAX} bytes")));
        }
        let seqno = entry.seqno.0.to_le_bytes();
        let width = seqno_width(entry.seqno);
        let mut head = PoolRecordHeader { bytes: [0; RECORD_HEADER_LEN_MAX + 1], len: 4 };
        head.push(entry.kind.to_byte() | (width as u8) << SEQNO_WIDTH_SHIFT);
        head.push_varint(entry.user_key.len() as u64);
        head.push_varint(entry.value.len() as u64);
        head.bytes[head.len..][..8].copy_from_slice(&seqno);
        head.len += width;
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

    /// The length of the buffer that the record needs, in bytes.
    pub(crate) fn buffer_len(&self, entry: EntryRef<'_>) -> u64 {
        let len = ((self.len + entry.user_key.len() + entry.value.len()) as u64).next_multiple_of(BUFFER_ALIGN);
        debug_assert_eq!(
            len,
            buffer_len_for(entry.user_key.len(), entry.value.len(), entry.seqno),
            "a reserved buffer has space for its record"
        );
        len
    }

    /// The header with its checksum, which covers key and value and is bound to `file_id` and the offset `at`.
    pub(crate) fn encode(&mut self, file_id: &[u8; 16], at: u64, entry: EntryRef<'_>) -> &[u8] {
        let head = xxh3(location_seed(file_id, at), &self.bytes[4..self.len]);
        let sum = fold(xxh3(xxh3(head, entry.user_key), entry.value));
        self.bytes[..4].copy_from_slice(&sum.to_le_bytes());
        &self.bytes[..self.len]
    }
}

fn fold(sum: u64) -> u32 {
    (sum ^ sum >> 32) as u32
}

/// The decoded header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolRecord {
    pub(crate) offset: u64,
    pub(crate) seqno: SeqNo,
    pub(crate) kind: RecordKind,
    pub(crate) key_offset: u64,
    pub(crate) key_len: usize,
    pub(crate) value_len: usize,
}

impl PoolRecord {
    /// Reads the header of the record that a slot points to.
    ///
    /// # Errors
    /// `Corruption` if there is no valid header, `Unsupported` if the kind is unknown (written by a newer version).
    #[inline]
    pub(crate) fn read(region: &Region, slot: LeafSlot) -> Result<PoolRecord> {
        let at = slot.offset();
        if !region.contains(at, slot.len().unwrap_or(BUFFER_ALIGN).max(BUFFER_ALIGN)) {
            return Err(bad_slot_error(at));
        }
        let [first, second] = region.load_array(at);
        match PoolRecord::decode_short(slot, first, second) {
            Some(record) => Ok(record),
            None => PoolRecord::read_long(region, slot),
        }
    }

    /// Reads the header of a slot's record from `bytes`, its whole buffer.
    ///
    /// # Errors
    /// As [`PoolRecord::read`].
    #[inline(always)]
    pub(crate) fn from_buffer(bytes: &[u8], slot: LeafSlot) -> Result<PoolRecord> {
        let Some(([first, second], _)) = bytes.as_chunks().0.split_first_chunk() else {
            return Err(bad_slot_error(slot.offset()));
        };
        match PoolRecord::decode_short(slot, u64::from_le_bytes(*first), u64::from_le_bytes(*second)) {
            Some(record) => Ok(record),
            None => PoolRecord::decode(bytes, slot).and_then(|record| record.check_slot_len(slot)),
        }
    }

    /// Decodes the common form of a record from its first two words: a put whose key and value are each shorter than
    /// 128 bytes. `None` for every other form and for invalid bytes; [`PoolRecord::decode`] handles these.
    #[inline(always)]
    pub(crate) fn decode_short(slot: LeafSlot, first: u64, second: u64) -> Option<PoolRecord> {
        let [_, _, _, _, tag, key_len, value_len, low] = first.to_le_bytes();
        let width = u32::from(tag & SEQNO_WIDTH_MASK) >> SEQNO_WIDTH_SHIFT;
        let put = tag & !SEQNO_WIDTH_MASK == RecordKind::Put.to_byte();
        if (key_len | value_len) >= 0x80 || width == 0 || !put {
            return None;
        }
        let seqno = (second << 8 | u64::from(low)) & (u64::MAX >> (64 - 8 * width));
        let (key_len, value_len) = (usize::from(key_len), usize::from(value_len));
        let (at, kind) = (slot.offset(), RecordKind::Put);
        let record = PoolRecord {
            offset: at,
            seqno: SeqNo(seqno),
            kind,
            key_offset: at + 7 + u64::from(width),
            key_len,
            value_len,
        };
        (slot.len() == Some(record.buffer_len())).then_some(record)
    }

    #[cold]
    fn read_long(region: &Region, slot: LeafSlot) -> Result<PoolRecord> {
        let at = slot.offset();
        let readable_len =
            (region.len() - at).min(slot.len().unwrap_or(u64::MAX)).min(RECORD_HEADER_LEN_MAX as u64) as usize;
        let mut bytes = [0; RECORD_HEADER_LEN_MAX];
        region.read(at, &mut bytes[..readable_len]);
        PoolRecord::decode(&bytes[..readable_len], slot)?.check_bounds(region, slot)
    }

    #[cold]
    fn decode(bytes: &[u8], slot: LeafSlot) -> Result<PoolRecord> {
        let (at, readable_len) = (slot.offset(), bytes.len().min(RECORD_HEADER_LEN_MAX));
        let mut decoder = ByteReader::new(&bytes[readable_len.min(4)..readable_len]);
        let tag = decoder.u8()?;
        let width = usize::from((tag & SEQNO_WIDTH_MASK) >> SEQNO_WIDTH_SHIFT);
        let (key_len, value_len) = (decoder.varint()?, decoder.varint_u32()?);
        let mut seqno = [0; 8];
        seqno[..width].copy_from_slice(decoder.take(width)?);
        let key_len =
            usize::try_from(key_len).ok().filter(|len| *len <= KEY_LEN_MAX).ok_or_else(|| bad_slot_error(at))?;
        let value_len = usize::try_from(value_len).map_err(|_| bad_slot_error(at))?;
        let key_at = at + (readable_len - decoder.rest().len()) as u64;
        let kind = RecordKind::from_byte(tag & !SEQNO_WIDTH_MASK)?;
        if width == 0 || kind.has_expiry() && value_len < EXPIRY_LEN {
            return Err(bad_slot_error(at));
        }
        Ok(PoolRecord {
            offset: at,
            seqno: SeqNo(u64::from_le_bytes(seqno)),
            kind,
            key_offset: key_at,
            key_len,
            value_len,
        })
    }

    fn check_bounds(self, region: &Region, slot: LeafSlot) -> Result<PoolRecord> {
        let len = self.buffer_len();
        // For a slot that contains the length, `read` has checked already that the buffer is in the region.
        let fits = slot.len().is_some() || len / BUFFER_ALIGN >= LEN_IN_RECORD && region.contains(self.offset, len);
        if fits { self.check_slot_len(slot) } else { Err(bad_slot_error(self.offset)) }
    }

    /// Returns the record if its length matches the length in its slot.
    fn check_slot_len(self, slot: LeafSlot) -> Result<PoolRecord> {
        let fits = slot.len().is_none_or(|there| self.buffer_len() == there);
        if fits { Ok(self) } else { Err(bad_slot_error(self.offset)) }
    }

    /// The length of the buffer in bytes.
    #[inline]
    pub(crate) fn buffer_len(&self) -> u64 {
        (self.value_offset() - self.offset + self.value_len as u64).next_multiple_of(BUFFER_ALIGN)
    }

    #[inline]
    pub(crate) fn value_offset(&self) -> u64 {
        self.key_offset + self.key_len as u64
    }

    /// The expiry time of the record; `None` if it does not expire.
    ///
    /// # Errors
    /// As [`split_expiry`].
    #[inline]
    pub(crate) fn expires_ms(&self, region: &Region) -> Result<Option<u64>> {
        if self.kind.has_expiry() { self.read_expires_ms(region).map(Some) } else { Ok(None) }
    }

    #[cold]
    fn read_expires_ms(&self, region: &Region) -> Result<u64> {
        let mut time = [0; EXPIRY_LEN];
        region.read(self.value_offset(), &mut time);
        Ok(split_expiry(self.kind, &time)?.0)
    }

    /// Offset and length of the value of a record that expires, if it has not expired at `now_ms`.
    ///
    /// # Errors
    /// As [`split_expiry`].
    #[cold]
    pub(crate) fn unexpired_value(&self, region: &Region, now_ms: u64) -> Result<Option<(u64, usize)>> {
        let expires_ms = self.read_expires_ms(region)?;
        let value = (self.value_offset() + EXPIRY_LEN as u64, self.value_len - EXPIRY_LEN);
        Ok((expires_ms > now_ms).then_some(value))
    }

    pub(crate) fn slot(&self) -> LeafSlot {
        LeafSlot::new(self.offset, self.buffer_len())
    }

    /// Replaces the content of `out` by the key.
    #[inline]
    pub(crate) fn read_key(&self, region: &Region, out: &mut Vec<u8>) {
        out.resize(self.key_len, 0);
        region.read(self.key_offset, out);
    }

    /// Whether the checksum matches the bytes of the record.
    pub(crate) fn checksum_matches(&self, region: &Region, file_id: &[u8; 16]) -> bool {
        let mut head = [0; RECORD_HEADER_LEN_MAX];
        let head = &mut head[..(self.key_offset - self.offset) as usize];
        region.read(self.offset, head);
        let sum = xxh3(location_seed(file_id, self.offset), &head[4..]);
        let read = |from: u64| move |at: u64, out: &mut [u8]| region.read(from + at, out);
        let sum = xxh3_chunked(sum, self.key_len as u64, read(self.key_offset));
        let sum = xxh3_chunked(sum, self.value_len as u64, read(self.value_offset()));
        fold(sum).to_le_bytes() == head[..4]
    }
}

#[cold]
fn bad_slot_error(at: u64) -> Error {
    Error::corruption("a slot does not point to a record").at_offset(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    const ID: [u8; 16] = [7; 16];

    fn entry<'a>(user: &'a [u8], seqno: u64, value: &'a [u8]) -> EntryRef<'a> {
        EntryRef { user_key: user, seqno: SeqNo(seqno), kind: RecordKind::Put, value }
    }

    fn write(region: &Region, at: u64, entry: EntryRef<'_>) -> LeafSlot {
        let mut head = PoolRecordHeader::new(entry).unwrap();
        let slot = LeafSlot::new(at, head.buffer_len(entry));
        region.write(at, &[head.encode(&ID, at, entry), entry.user_key, entry.value], |_, _| ());
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
                    let record = PoolRecord::read(&region, slot).unwrap();
                    assert_eq!((record.seqno, record.kind, record.slot()), (entry.seqno, entry.kind, slot));
                    let mut key = Vec::new();
                    record.read_key(&region, &mut key);
                    assert_eq!(
                        (key.as_slice(), region.slice(record.value_offset(), record.value_len)),
                        (user, value.into())
                    );
                    assert!(record.checksum_matches(&region, &ID) && !record.checksum_matches(&region, &[8; 16]));
                }
            }
        }
        let small = entry(&[1; 16], (1 << 40) - 1, &[2; 100]);
        assert_eq!(
            PoolRecordHeader::new(small).unwrap().buffer_len(small),
            128,
            "twelve bytes more than key and value"
        );
        assert_eq!(
            PoolRecordHeader::new(entry(&[0; 65_536], 1, b"")).map(|_| ()).unwrap_err().kind(),
            ErrorKind::Invalid
        );
    }

    #[test]
    fn slot_holds_offset_and_length() {
        for (at, len) in [(16, 16), (OFFSET_END - 16, 4096), (4096, (LEN_IN_RECORD - 1) * BUFFER_ALIGN)] {
            let slot = LeafSlot::new(at, len);
            assert_eq!((slot.offset(), slot.len()), (at, Some(len)));
        }
        assert_eq!(LeafSlot::new(32, LEN_IN_RECORD * BUFFER_ALIGN).len(), None);
        assert_eq!(LeafSlot::new(32, 1 << 32).len(), None);
    }

    #[test]
    fn any_bytes_are_a_record_or_an_error() {
        let region = Region::private(8192).unwrap();
        region.grow(8192).unwrap();
        let slot = write(&region, 64, entry(b"some key", 77, &[3; 200]));
        for bit in 0..8 * 217 {
            let (at, mask) = (64 + bit / 64 * 8, 1 << (bit % 64));
            region.store(at, region.load(at) ^ mask);
            let read = PoolRecord::read(&region, slot);
            assert!(read.is_err() || !read.unwrap().checksum_matches(&region, &ID), "bit {bit}");
            region.store(at, region.load(at) ^ mask);
        }
        for slot in
            [LeafSlot::new(8192, 16), LeafSlot::new(8176, 32), LeafSlot(u64::MAX), LeafSlot(0), LeafSlot::new(8176, 16)]
        {
            assert!(PoolRecord::read(&region, slot).is_err());
        }
        region.store(8184, u64::MAX);
        region.store(8176, u64::MAX);
        assert!(PoolRecord::read(&region, LeafSlot::new(8176, 16)).is_err());
    }
}

//! Sequence numbers, which order all writes of the database; record kinds and their flag bits; internal keys and
//! entries as borrowed views.

use std::cmp::Ordering;
use std::fmt;

use crate::base::comparator::KeyOrder;
use crate::base::error::{Error, Result};

/// Maximum length of a key in bytes. The empty key is valid.
pub(crate) const KEY_LEN_MAX: usize = 65_535;
/// Maximum length of a value in bytes.
pub(crate) const VALUE_LEN_MAX: u64 = u32::MAX as u64;

/// The position of one record in the history of the database, 0..2^56.
///
/// The first record has 1. 0 is the number of records that are older than every reader (a bottom compaction sets it),
/// and of an empty history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SeqNo(pub(crate) u64);

impl SeqNo {
    /// Sequence number of records that are visible to every reader.
    pub(crate) const ZERO: SeqNo = SeqNo(0);
    /// The largest number that fits the formats (56 bits). A seek with it finds the newest version of a key.
    pub(crate) const MAX: SeqNo = SeqNo((1 << 56) - 1);

    /// This number plus `n`.
    #[must_use]
    pub(crate) fn plus(self, n: u64) -> SeqNo {
        debug_assert!(self.0 + n <= SeqNo::MAX.0, "sequence numbers are used up");
        SeqNo(self.0 + n)
    }
}

impl fmt::Display for SeqNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A position in a tree: a user key and a sequence number.
///
/// Internal order: user keys ascending in the partition's [`KeyOrder`], then sequence numbers **descending**. The
/// newest version of a key is therefore first, and `(key, at)` is before every version visible at `at`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InternalKey<'a> {
    pub(crate) user_key: &'a [u8],
    pub(crate) seqno: SeqNo,
}

impl<'a> InternalKey<'a> {
    pub(crate) fn new(user: &'a [u8], seqno: SeqNo) -> InternalKey<'a> {
        InternalKey { user_key: user, seqno }
    }

    /// The position before every version of `user`.
    pub(crate) fn before_versions_of(user: &'a [u8]) -> InternalKey<'a> {
        InternalKey { user_key: user, seqno: SeqNo::MAX }
    }

    /// Compares in internal order.
    #[inline]
    pub(crate) fn cmp(&self, other: &InternalKey<'_>, order: &KeyOrder) -> Ordering {
        order.cmp(self.user_key, other.user_key).then_with(|| other.seqno.cmp(&self.seqno))
    }
}

/// The first eight bytes as a number with the same order. Missing bytes are 0.
pub(crate) fn key_prefix_u64(key: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    let len = key.len().min(8);
    bytes[..len].copy_from_slice(&key[..len]);
    u64::from_be_bytes(bytes)
}

/// One version of a key in a tree, borrowed from its block or memtable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryRef<'a> {
    pub(crate) user_key: &'a [u8],
    pub(crate) seqno: SeqNo,
    pub(crate) kind: RecordKind,
    /// Empty for tombstones.
    pub(crate) value: &'a [u8],
}

impl<'a> EntryRef<'a> {
    pub(crate) fn key(&self) -> InternalKey<'a> {
        InternalKey { user_key: self.user_key, seqno: self.seqno }
    }
}

/// The effect of a record on its key.
///
/// The byte on disk is the discriminant with two flag bits. 0x40: the value begins with its expiry time, see
/// [`split_expiry`]. 0x80: the value is a wide column; no code writes it yet. These numbers are reserved for kinds that
/// no code writes yet, in the WAL only: 16 clears a partition, 17 drops it, 18 ingests tables, 19 is the payload of a
/// sequence number gap, 20 prepares, 21 commits and 22 aborts a transaction. A reader returns `Unsupported` for them
/// and never skips them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum RecordKind {
    /// Sets the value of the key.
    Put = 1,
    /// Deletes the key.
    Delete = 2,
    /// Deletes the one older `Put` of a key that is never overwritten.
    SingleDelete = 3,
    /// Deletes the older records of a range of keys. The key and the value encode the range, a
    /// [`KeyRange`](crate::base::key_range::KeyRange). Such a record is in the WAL and in spilled tables only.
    RangeDelete = 4,
    /// Changes the value of the key: the value of the entry is an operand for the merge operator of the partition.
    /// Never in a pool.
    Merge = 5,
    /// Sets the value of the key to a value in a blob file, to which the entry's value, a
    /// [`BlobPointer`](crate::base::blob_pointer::BlobPointer), points.
    BlobPointer = 6,
    /// As `Put`, until its expiry time. Then the key does not exist.
    ExpiringPut = 1 | RecordKind::FLAG_EXPIRY,
    /// As `BlobPointer`, until its expiry time.
    ExpiringBlobPointer = 6 | RecordKind::FLAG_EXPIRY,
}

/// Length of the expiry time before a value, in bytes.
pub(crate) const EXPIRY_LEN: usize = 8;
/// The expiry time of a value that never expires. No record contains it.
pub(crate) const NEVER_MS: u64 = u64::MAX;

/// The value of an expiring record: the expiry time in milliseconds since 1970 (8 bytes, little-endian), then `value`.
pub(crate) fn put_expiry(out: &mut Vec<u8>, expires_ms: u64, value: &[u8]) {
    debug_assert!(expires_ms != NEVER_MS, "no record has the expiry time of a value that never expires");
    out.reserve(EXPIRY_LEN + value.len());
    out.extend_from_slice(&expires_ms.to_le_bytes());
    out.extend_from_slice(value);
}

/// Returns the expiry time of a record, [`NEVER_MS`] if it has none, and kind and value without it.
///
/// # Errors
/// `Corruption` if the value of an expiring record does not begin with a valid expiry time.
#[inline]
pub(crate) fn split_expiry(kind: RecordKind, value: &[u8]) -> Result<(u64, RecordKind, &[u8])> {
    if !kind.has_expiry() {
        return Ok((NEVER_MS, kind, value));
    }
    match value.split_first_chunk() {
        Some((time, value)) if *time != NEVER_MS.to_le_bytes() => {
            Ok((u64::from_le_bytes(*time), kind.without_expiry(), value))
        }
        _ => Err(Error::corruption("a value does not begin with its expiry time")),
    }
}

impl RecordKind {
    /// Flag: the value begins with its expiry time.
    const FLAG_EXPIRY: u8 = 0x40;
    /// Flag: the value is a wide column.
    const FLAG_WIDE_COLUMN: u8 = 0x80;

    /// Whether the record only removes.
    pub(crate) fn is_removal(self) -> bool {
        matches!(self, RecordKind::Delete | RecordKind::SingleDelete | RecordKind::RangeDelete)
    }

    /// The byte on disk.
    pub(crate) fn to_byte(self) -> u8 {
        self as u8
    }

    /// Decodes the byte on disk.
    ///
    /// # Errors
    /// `Unsupported` for reserved kinds and flags, `Corruption` for numbers that no version defines.
    #[inline(always)]
    pub(crate) fn from_byte(byte: u8) -> Result<RecordKind> {
        match byte {
            1 => Ok(RecordKind::Put),
            2 => Ok(RecordKind::Delete),
            3 => Ok(RecordKind::SingleDelete),
            4 => Ok(RecordKind::RangeDelete),
            5 => Ok(RecordKind::Merge),
            6 => Ok(RecordKind::BlobPointer),
            0x41 => Ok(RecordKind::ExpiringPut),
            0x46 => Ok(RecordKind::ExpiringBlobPointer),
            _ => Err(RecordKind::invalid_byte_error(byte)),
        }
    }

    #[cold]
    fn invalid_byte_error(byte: u8) -> Error {
        match byte {
            b if b & (RecordKind::FLAG_EXPIRY | RecordKind::FLAG_WIDE_COLUMN) != 0 => {
                Error::unsupported(format!("record flags {b:#04x} need a newer version"))
            }
            16..=22 => Error::unsupported(format!("record kind {byte} needs a newer version")),
            _ => Error::corruption(format!("record kind {byte} does not exist")),
        }
    }

    /// Whether the record is a tombstone.
    pub(crate) fn is_tombstone(self) -> bool {
        !self.is_value()
    }

    /// Whether a record of the WAL has a value field.
    #[inline]
    pub(crate) fn has_value_field(self) -> bool {
        self.is_value() || self == RecordKind::RangeDelete
    }

    /// Whether the key has a value after the record: set inline, in a blob file, or by a merge operator.
    #[inline]
    pub(crate) fn is_value(self) -> bool {
        matches!(self.without_expiry(), RecordKind::Put | RecordKind::BlobPointer | RecordKind::Merge)
    }

    /// Whether the record sets a value that never expires.
    #[inline]
    pub(crate) fn is_plain_value(self) -> bool {
        matches!(self, RecordKind::Put | RecordKind::BlobPointer)
    }

    /// Whether the value begins with its expiry time.
    #[inline]
    pub(crate) fn has_expiry(self) -> bool {
        self as u8 & RecordKind::FLAG_EXPIRY != 0
    }

    /// The kind of a value with an expiry time.
    pub(crate) fn with_expiry(self) -> RecordKind {
        match self {
            RecordKind::Put => RecordKind::ExpiringPut,
            RecordKind::BlobPointer => RecordKind::ExpiringBlobPointer,
            kind => kind,
        }
    }

    /// The kind of the value behind the expiry time.
    #[inline]
    pub(crate) fn without_expiry(self) -> RecordKind {
        match self {
            RecordKind::ExpiringPut => RecordKind::Put,
            RecordKind::ExpiringBlobPointer => RecordKind::BlobPointer,
            kind => kind,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    #[test]
    fn every_byte_decodes_or_fails() {
        for byte in 0..=u8::MAX {
            match RecordKind::from_byte(byte) {
                Ok(kind) => assert_eq!(kind.to_byte(), byte),
                Err(e) => assert!(matches!(e.kind(), ErrorKind::Unsupported | ErrorKind::Corruption)),
            }
        }
        assert_eq!(RecordKind::from_byte(16).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(RecordKind::from_byte(0x42).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(RecordKind::from_byte(0x81).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(RecordKind::from_byte(0).unwrap_err().kind(), ErrorKind::Corruption);
    }

    #[test]
    fn expiry_times_are_split_from_values() {
        let mut value = Vec::new();
        put_expiry(&mut value, 77, b"v");
        for kind in [RecordKind::Put, RecordKind::BlobPointer] {
            assert!(kind.with_expiry().is_value() && kind.with_expiry().has_expiry() && !kind.has_expiry());
            assert_eq!(split_expiry(kind.with_expiry(), &value).unwrap(), (77, kind, &b"v"[..]));
            assert_eq!(split_expiry(kind, &value).unwrap(), (NEVER_MS, kind, &value[..]));
            assert!(split_expiry(kind.with_expiry(), &value[..7]).is_err());
            assert!(split_expiry(kind.with_expiry(), &[0xff; 9]).is_err());
        }
        assert_eq!(RecordKind::Delete.with_expiry(), RecordKind::Delete);
    }
}

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
/// The byte on disk is the discriminant with two flag bits: 0x40, an expiry time follows; 0x80, the value is a wide
/// column. These numbers are reserved for kinds that no code writes yet: 4 deletes a range of keys; 5 is an operand
/// of a merge operator; and in the WAL only, 16 clears a partition, 17 drops it, 18 ingests tables, 19 is the payload
/// of a sequence number gap, 20 prepares, 21 commits and 22 aborts a transaction. A reader returns `Unsupported` for
/// them and never skips them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum RecordKind {
    /// Sets the value of the key.
    Put = 1,
    /// Deletes the key.
    Delete = 2,
    /// Deletes the one older `Put` of a key that is never overwritten.
    SingleDelete = 3,
    /// Sets the value of the key to a value in a blob file, to which the entry's value, a
    /// [`BlobPointer`](crate::base::blob_pointer::BlobPointer), points.
    BlobPointer = 6,
}

impl RecordKind {
    /// Flag: the record has an expiry time (u64).
    const FLAG_EXPIRY: u8 = 0x40;
    /// Flag: the value is a wide column.
    const FLAG_WIDE_COLUMN: u8 = 0x80;

    /// Whether the record only removes.
    pub(crate) fn is_removal(self) -> bool {
        matches!(self, RecordKind::Delete | RecordKind::SingleDelete)
    }

    /// The byte on disk.
    pub(crate) fn to_byte(self) -> u8 {
        self as u8
    }

    /// Decodes the byte on disk.
    ///
    /// # Errors
    /// `Unsupported` for reserved kinds and flags, `Corruption` for numbers that no version defines.
    #[inline]
    pub(crate) fn from_byte(byte: u8) -> Result<RecordKind> {
        match byte {
            1 => Ok(RecordKind::Put),
            2 => Ok(RecordKind::Delete),
            3 => Ok(RecordKind::SingleDelete),
            6 => Ok(RecordKind::BlobPointer),
            _ => Err(RecordKind::invalid_byte_error(byte)),
        }
    }

    #[cold]
    fn invalid_byte_error(byte: u8) -> Error {
        match byte {
            b if b & (RecordKind::FLAG_EXPIRY | RecordKind::FLAG_WIDE_COLUMN) != 0 => {
                Error::unsupported(format!("record flags {b:#04x} need a newer version"))
            }
            4 | 5 | 16..=22 => Error::unsupported(format!("record kind {byte} needs a newer version")),
            _ => Error::corruption(format!("record kind {byte} does not exist")),
        }
    }

    /// Whether the record is a tombstone.
    pub(crate) fn is_tombstone(self) -> bool {
        !self.is_value()
    }

    /// Whether the record sets a value, inline or in a blob file.
    #[inline]
    pub(crate) fn is_value(self) -> bool {
        matches!(self, RecordKind::Put | RecordKind::BlobPointer)
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
        assert_eq!(RecordKind::from_byte(5).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(RecordKind::from_byte(0x41).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(RecordKind::from_byte(0).unwrap_err().kind(), ErrorKind::Corruption);
    }
}

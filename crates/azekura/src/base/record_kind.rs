//! Record kinds and their flag bits, as they stand in the log and in tables.

use crate::base::error::{Error, Result};

/// What a record does to its key.
///
/// The byte on disk is the discriminant, with two flag bits above it: 0x40, an expiry time follows, and 0x80, the value
/// is a wide column. Kinds that no code writes yet have their number already: 4 deletes a range of keys, 5 is an
/// operand of a merge operator, and in the log alone 16 clears a partition, 17
/// drops it, 18 ingests tables, 19 is a watermark, 20 prepares, 21 commits and 22 aborts a transaction. Meeting one of
/// them is `Unsupported`, never skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum RecordKind {
    /// The key has this value.
    Put = 1,
    /// The key has no value, whatever is older.
    Delete = 2,
    /// Undoes the one older `Put` of the key; only for keys that are never overwritten.
    SingleDelete = 3,
    /// The key has the value in a blob file that the entry's value, a
    /// [`BlobPointer`](crate::base::blob_pointer::BlobPointer), points to.
    BlobPointer = 6,
}

impl RecordKind {
    /// Flag: the record carries an expiry time (u64).
    const FLAG_EXPIRY: u8 = 0x40;
    /// Flag: the value is a wide column.
    const FLAG_WIDE_COLUMN: u8 = 0x80;

    /// Whether it takes something away, and adds no value.
    pub(crate) fn is_removal(self) -> bool {
        matches!(self, RecordKind::Delete | RecordKind::SingleDelete)
    }

    /// The byte on disk.
    pub(crate) fn to_byte(self) -> u8 {
        self as u8
    }

    /// Reads the byte on disk.
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

    /// Whether the key has no value after this record.
    pub(crate) fn is_tombstone(self) -> bool {
        !self.is_value()
    }

    /// Whether the key has a value after this record, wherever that is.
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

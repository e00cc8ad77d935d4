//! Sequence numbers, the order of every write in the database; internal keys and entries as borrowed views.

use std::cmp::Ordering;
use std::fmt;

use crate::base::comparator::KeyOrder;
use crate::base::record_kind::RecordKind;

/// Keys are at most this long, in bytes; the empty key is legal.
pub(crate) const KEY_LEN_MAX: usize = 65_535;
/// Values are at most this long, in bytes.
pub(crate) const VALUE_LEN_MAX: u64 = u32::MAX as u64;

/// The position of one record in the history of the database, 0..2^56.
///
/// The first record ever written has 1; 0 belongs to records that are older than every reader (a bottom
/// compaction sets it) and to an empty history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SeqNo(pub(crate) u64);

impl SeqNo {
    /// Older than every record that can still be told from its neighbours.
    pub(crate) const ZERO: SeqNo = SeqNo(0);
    /// The largest that fits the formats (56 bits); seeking with it finds the newest version of a key.
    pub(crate) const MAX: SeqNo = SeqNo((1 << 56) - 1);

    /// The number `n` later.
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
/// Internal order: user keys ascending under the partition's [`KeyOrder`], then sequence numbers **descending**, so
/// that the newest version of a key comes first and `(key, at)` stands before every version visible at `at`.
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

/// One record of a tree, borrowed from where it lies.
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

//! Internal keys and entries as borrowed views.

use std::cmp::Ordering;

use crate::base::comparator::KeyOrder;
use crate::base::kind::RecordKind;
use crate::base::seqno::SeqNo;

/// Keys are at most this long, in bytes; the empty key is legal.
pub(crate) const KEY_LEN_MAX: usize = 65_535;
/// Values are at most this long, in bytes.
pub(crate) const VALUE_LEN_MAX: u64 = u32::MAX as u64;

/// A position in a tree: a user key and a sequence number.
///
/// Internal order: user keys ascending under the partition's [`KeyOrder`], then sequence numbers **descending**, so
/// that the newest version of a key comes first and `(key, at)` stands before every version visible at `at`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyRef<'a> {
    pub(crate) user: &'a [u8],
    pub(crate) seqno: SeqNo,
}

impl<'a> KeyRef<'a> {
    pub(crate) fn new(user: &'a [u8], seqno: SeqNo) -> KeyRef<'a> {
        KeyRef { user, seqno }
    }

    /// The position before every version of `user`.
    pub(crate) fn first_of(user: &'a [u8]) -> KeyRef<'a> {
        KeyRef { user, seqno: SeqNo::MAX }
    }

    /// Compares in internal order.
    #[inline]
    pub(crate) fn cmp(&self, other: &KeyRef<'_>, order: &KeyOrder) -> Ordering {
        order.cmp(self.user, other.user).then_with(|| other.seqno.cmp(&self.seqno))
    }
}

/// One record of a tree, borrowed from where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryRef<'a> {
    pub(crate) user: &'a [u8],
    pub(crate) seqno: SeqNo,
    pub(crate) kind: RecordKind,
    /// Empty for tombstones.
    pub(crate) value: &'a [u8],
}

impl<'a> EntryRef<'a> {
    pub(crate) fn key(&self) -> KeyRef<'a> {
        KeyRef { user: self.user, seqno: self.seqno }
    }
}

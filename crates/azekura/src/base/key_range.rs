//! The range of keys that a range delete removes, and its encoding in a record: see `docs/format/commit.md`.
//!
//! A range lies between two *boundaries*, positions between keys. With a custom comparator no byte string can be built
//! that follows a key directly, so a boundary names a key and its side.

use std::cmp::Ordering;
use std::ops::Bound;
use std::sync::Arc;

use crate::base::coding::{ByteReader, put_bytes, put_varint};
use crate::base::comparator::KeyOrder;
use crate::base::error::{Error, Result};
use crate::base::key::{KEY_LEN_MAX, SeqNo};

/// A position between keys. Keys that are equal in the order of the partition are on the same side of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyBoundary<K = Arc<[u8]>> {
    /// Before every key.
    Min,
    /// Directly before this key.
    Before(K),
    /// Directly after this key.
    After(K),
    /// After every key.
    Max,
}

impl<K: AsRef<[u8]>> KeyBoundary<K> {
    /// The key and its side: `Less` if the boundary is before the key.
    fn key_and_side(&self) -> Option<(&[u8], Ordering)> {
        match self {
            KeyBoundary::Min | KeyBoundary::Max => None,
            KeyBoundary::Before(key) => Some((key.as_ref(), Ordering::Less)),
            KeyBoundary::After(key) => Some((key.as_ref(), Ordering::Greater)),
        }
    }

    /// The key; empty for `Min` and `Max`.
    pub(crate) fn key(&self) -> &[u8] {
        self.key_and_side().map_or(&[], |(key, _)| key)
    }

    /// Compares the boundary with a key. Never `Equal`.
    #[inline]
    pub(crate) fn cmp_key(&self, key: &[u8], order: &KeyOrder) -> Ordering {
        match self {
            KeyBoundary::Min => Ordering::Less,
            KeyBoundary::Before(own) => order.cmp(own.as_ref(), key).then(Ordering::Less),
            KeyBoundary::After(own) => order.cmp(own.as_ref(), key).then(Ordering::Greater),
            KeyBoundary::Max => Ordering::Greater,
        }
    }

    /// Compares two boundaries.
    pub(crate) fn cmp<L: AsRef<[u8]>>(&self, other: &KeyBoundary<L>, order: &KeyOrder) -> Ordering {
        match (self.key_and_side(), other.key_and_side()) {
            (Some((a, side)), Some((b, other))) => order.cmp(a, b).then(side.cmp(&other)),
            _ => self.rank().cmp(&other.rank()),
        }
    }

    fn rank(&self) -> u8 {
        match self {
            KeyBoundary::Min => 0,
            KeyBoundary::Before(_) | KeyBoundary::After(_) => 1,
            KeyBoundary::Max => 2,
        }
    }

    /// The boundary with a key of its own.
    pub(crate) fn to_owned(&self) -> KeyBoundary {
        match self {
            KeyBoundary::Min => KeyBoundary::Min,
            KeyBoundary::Before(key) => KeyBoundary::Before(key.as_ref().into()),
            KeyBoundary::After(key) => KeyBoundary::After(key.as_ref().into()),
            KeyBoundary::Max => KeyBoundary::Max,
        }
    }
}

/// Flag: the start is after its key.
const START_EXCLUSIVE: u8 = 1;
/// Flag: the range has no start.
const START_UNBOUNDED: u8 = 2;
/// Flag: the end is after its key.
const END_INCLUSIVE: u8 = 4;
/// Flag: the range has no end.
const END_UNBOUNDED: u8 = 8;

/// A range of keys. Ranges that [`new`](KeyRange::new) made have a position between their boundaries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyRange<K = Arc<[u8]>> {
    pub(crate) start: KeyBoundary<K>,
    pub(crate) end: KeyBoundary<K>,
}

impl<K> KeyRange<K> {
    /// The range between two bounds; it may be empty.
    pub(crate) fn between(start: Bound<K>, end: Bound<K>) -> KeyRange<K> {
        KeyRange {
            start: match start {
                Bound::Unbounded => KeyBoundary::Min,
                Bound::Included(key) => KeyBoundary::Before(key),
                Bound::Excluded(key) => KeyBoundary::After(key),
            },
            end: match end {
                Bound::Unbounded => KeyBoundary::Max,
                Bound::Included(key) => KeyBoundary::After(key),
                Bound::Excluded(key) => KeyBoundary::Before(key),
            },
        }
    }

    /// The bounds of the keys in the range.
    pub(crate) fn into_bounds(self) -> (Bound<K>, Bound<K>) {
        debug_assert!(!self.starts_at_max_or_ends_at_min(), "the range has a position between its boundaries");
        let start = match self.start {
            KeyBoundary::Min | KeyBoundary::Max => Bound::Unbounded,
            KeyBoundary::Before(key) => Bound::Included(key),
            KeyBoundary::After(key) => Bound::Excluded(key),
        };
        let end = match self.end {
            KeyBoundary::Min | KeyBoundary::Max => Bound::Unbounded,
            KeyBoundary::Before(key) => Bound::Excluded(key),
            KeyBoundary::After(key) => Bound::Included(key),
        };
        (start, end)
    }

    /// Whether the range has no position in any order.
    fn starts_at_max_or_ends_at_min(&self) -> bool {
        matches!(self.start, KeyBoundary::Max) || matches!(self.end, KeyBoundary::Min)
    }
}

impl<'a> KeyRange<&'a [u8]> {
    /// The range between two bounds; `None` if no key can be in it.
    ///
    /// # Errors
    /// `Invalid` if the start is above the end, or a key is too long.
    pub(crate) fn new(
        start: Bound<&'a [u8]>,
        end: Bound<&'a [u8]>,
        order: &KeyOrder,
    ) -> Result<Option<KeyRange<&'a [u8]>>> {
        let range = KeyRange::between(start, end);
        for key in [range.start.key(), range.end.key()] {
            if key.len() > KEY_LEN_MAX {
                let len = key.len();
                return Err(Error::invalid(format!("bound has {len} bytes, at most {KEY_LEN_MAX} are allowed")));
            }
        }
        if let (Some((start, _)), Some((end, _))) = (range.start.key_and_side(), range.end.key_and_side())
            && order.cmp(start, end).is_gt()
        {
            return Err(Error::invalid("the start of the range is above its end"));
        }
        Ok((!range.is_empty(order)).then_some(range))
    }

    /// Decodes the key and the value of a record.
    ///
    /// # Errors
    /// `Corruption` if they are not the encoding of a range.
    pub(crate) fn decode(key: &'a [u8], value: &'a [u8]) -> Result<KeyRange<&'a [u8]>> {
        let (&flags, end) =
            value.split_first().ok_or_else(|| Error::corruption("the value of a range delete is empty"))?;
        let start = match flags & (START_EXCLUSIVE | START_UNBOUNDED) {
            0 => KeyBoundary::Before(key),
            START_EXCLUSIVE => KeyBoundary::After(key),
            START_UNBOUNDED if key.is_empty() => KeyBoundary::Min,
            _ => return Err(Error::corruption("the start of a range delete is malformed")),
        };
        let end = match flags & !(START_EXCLUSIVE | START_UNBOUNDED) {
            0 => KeyBoundary::Before(end),
            END_INCLUSIVE => KeyBoundary::After(end),
            END_UNBOUNDED if end.is_empty() => KeyBoundary::Max,
            _ => return Err(Error::corruption("the end of a range delete is malformed")),
        };
        if key.len() > KEY_LEN_MAX || end.key().len() > KEY_LEN_MAX {
            return Err(Error::corruption("a key of a range delete exceeds the maximum length"));
        }
        Ok(KeyRange { start, end })
    }
}

/// A start in an edit that names fragments by it: after the flags follows the key as a byte string.
impl KeyBoundary {
    pub(crate) fn encode_start(&self, out: &mut Vec<u8>) {
        debug_assert!(!matches!(self, KeyBoundary::Max), "no range starts after every key");
        out.push(match self {
            KeyBoundary::Min => START_UNBOUNDED,
            KeyBoundary::After(_) => START_EXCLUSIVE,
            KeyBoundary::Before(_) | KeyBoundary::Max => 0,
        });
        put_bytes(out, self.key());
    }

    /// # Errors
    /// `Corruption` if the bytes are not an encoded start.
    pub(crate) fn decode_start(d: &mut ByteReader<'_>) -> Result<KeyBoundary> {
        let (flags, key) = (d.u8()?, d.bytes()?);
        match flags {
            0 => Ok(KeyBoundary::Before(key.into())),
            START_EXCLUSIVE => Ok(KeyBoundary::After(key.into())),
            START_UNBOUNDED if key.is_empty() => Ok(KeyBoundary::Min),
            _ => Err(Error::corruption("the start of a range tombstone is malformed")),
        }
    }
}

impl<K: AsRef<[u8]>> KeyRange<K> {
    /// Whether a position is in both ranges.
    pub(crate) fn overlaps<L: AsRef<[u8]>>(&self, other: &KeyRange<L>, order: &KeyOrder) -> bool {
        self.start.cmp(&other.end, order).is_lt() && other.start.cmp(&self.end, order).is_lt()
    }

    /// The part that is also in `other`; it may be empty.
    pub(crate) fn intersection(self, other: KeyRange<K>, order: &KeyOrder) -> KeyRange<K> {
        KeyRange {
            start: if other.start.cmp(&self.start, order).is_gt() { other.start } else { self.start },
            end: if other.end.cmp(&self.end, order).is_lt() { other.end } else { self.end },
        }
    }

    /// Whether there is no position between the boundaries.
    pub(crate) fn is_empty(&self, order: &KeyOrder) -> bool {
        self.start.cmp(&self.end, order).is_ge()
    }

    /// Whether `key` is in the range.
    pub(crate) fn contains(&self, key: &[u8], order: &KeyOrder) -> bool {
        self.start.cmp_key(key, order).is_lt() && self.end.cmp_key(key, order).is_gt()
    }

    /// The key of the record.
    pub(crate) fn encoded_key(&self) -> &[u8] {
        self.start.key()
    }

    /// Appends the value of the record: the flags and the key of the end.
    pub(crate) fn encode_value(&self, out: &mut Vec<u8>) {
        debug_assert!(!self.starts_at_max_or_ends_at_min(), "an encoded range has a position between its boundaries");
        let start = match &self.start {
            KeyBoundary::Min => START_UNBOUNDED,
            KeyBoundary::After(_) => START_EXCLUSIVE,
            KeyBoundary::Before(_) | KeyBoundary::Max => 0,
        };
        let end = match &self.end {
            KeyBoundary::Max => END_UNBOUNDED,
            KeyBoundary::After(_) => END_INCLUSIVE,
            KeyBoundary::Before(_) | KeyBoundary::Min => 0,
        };
        out.push(start | end);
        out.extend_from_slice(self.end.key());
    }

    /// The range with keys of its own.
    pub(crate) fn to_owned(&self) -> KeyRange {
        KeyRange { start: self.start.to_owned(), end: self.end.to_owned() }
    }
}

/// A part of the key space and the range deletes over it: a fragment of a set of range tombstones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RangeTombstone {
    pub(crate) range: KeyRange,
    /// The sequence numbers of the range deletes, newest first; at least one.
    pub(crate) seqnos: Arc<[SeqNo]>,
}

impl RangeTombstone {
    /// Cuts off the part before `at`, and returns it. `at` is inside the range or its end.
    pub(crate) fn cut_before(&mut self, at: &KeyBoundary) -> RangeTombstone {
        let start = std::mem::replace(&mut self.range.start, at.clone());
        RangeTombstone { range: KeyRange { start, end: at.clone() }, seqnos: Arc::clone(&self.seqnos) }
    }

    /// Appends key and value of the range as byte strings, the number of sequence numbers, and the sequence numbers.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        debug_assert!(!self.seqnos.is_empty(), "a fragment has at least one range delete");
        debug_assert!(self.seqnos.is_sorted_by(|a, b| a > b), "the range deletes of a fragment are newest first");
        let mut value = Vec::new();
        self.range.encode_value(&mut value);
        put_bytes(out, self.range.encoded_key());
        put_bytes(out, &value);
        put_varint(out, self.seqnos.len() as u64);
        self.seqnos.iter().for_each(|seqno| put_varint(out, seqno.0));
    }

    /// # Errors
    /// `Corruption` if the bytes are not an encoded fragment.
    pub(crate) fn decode(d: &mut ByteReader<'_>) -> Result<RangeTombstone> {
        let range = KeyRange::decode(d.bytes()?, d.bytes()?)?.to_owned();
        let seqnos = (0..d.varint()?).map(|_| d.varint().map(SeqNo)).collect::<Result<Vec<SeqNo>>>()?;
        let is_valid = seqnos.is_sorted_by(|a, b| a > b) && seqnos.first().is_some_and(|&newest| newest <= SeqNo::MAX);
        if !is_valid || seqnos.contains(&SeqNo::ZERO) {
            return Err(Error::corruption("the sequence numbers of a range tombstone are malformed"));
        }
        Ok(RangeTombstone { range, seqnos: seqnos.into() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::testing::TestOrder;

    /// In ascending order.
    const BOUNDARIES: [KeyBoundary<&[u8]>; 8] = [
        KeyBoundary::Min,
        KeyBoundary::Before(b""),
        KeyBoundary::After(b""),
        KeyBoundary::Before(b"a"),
        KeyBoundary::After(b"a"),
        KeyBoundary::Before(b"b"),
        KeyBoundary::After(b"b"),
        KeyBoundary::Max,
    ];

    #[test]
    fn boundaries_are_ordered_between_keys() {
        let order = KeyOrder::bytewise();
        for (i, a) in BOUNDARIES.iter().enumerate() {
            for (j, b) in BOUNDARIES.iter().enumerate() {
                assert_eq!(a.cmp(b, &order), i.cmp(&j), "{a:?} and {b:?}");
            }
            for (j, key) in [&b""[..], b"a", b"b"].into_iter().enumerate() {
                // Key `j` is between boundaries 1 + 2j and 2 + 2j.
                assert_eq!(a.cmp_key(key, &order).is_lt(), i <= 1 + 2 * j, "{a:?} and {key:?}");
            }
        }
    }

    #[test]
    fn equal_keys_are_on_one_side() {
        let order = KeyOrder::custom(Arc::new(TestOrder::AnyCase));
        for key in [&b"a"[..], b"A"] {
            assert!(KeyBoundary::Before(b"A").cmp_key(key, &order).is_lt());
            assert!(KeyBoundary::After(b"A").cmp_key(key, &order).is_gt());
        }
        let range = KeyRange::new(Bound::Included(b"a"), Bound::Included(b"A"), &order).unwrap().unwrap();
        assert!(range.contains(b"A", &order) && range.contains(b"a", &order) && !range.contains(b"b", &order));
        assert!(KeyRange::new(Bound::Included(b"a"), Bound::Excluded(b"A"), &order).unwrap().is_none());
    }

    #[test]
    fn empty_and_reversed_ranges_are_told_apart() {
        let order = KeyOrder::bytewise();
        let new = |start, end| KeyRange::new(start, end, &order);
        for (start, end) in [
            (Bound::Included(&b"a"[..]), Bound::Excluded(&b"a"[..])),
            (Bound::Excluded(b"a"), Bound::Included(b"a")),
            (Bound::Excluded(b"a"), Bound::Excluded(b"a")),
        ] {
            assert_eq!(new(start, end).unwrap(), None);
        }
        for end in [Bound::Included(&b"a"[..]), Bound::Excluded(b"a")] {
            assert_eq!(new(Bound::Included(b"b"), end).unwrap_err().kind(), ErrorKind::Invalid);
        }
        let long = [7; KEY_LEN_MAX + 1];
        assert_eq!(new(Bound::Unbounded, Bound::Included(&long)).unwrap_err().kind(), ErrorKind::Invalid);
        assert!(new(Bound::Included(b"a"), Bound::Included(b"a")).unwrap().is_some());
        assert!(new(Bound::Unbounded, Bound::Unbounded).unwrap().is_some());
    }

    #[test]
    fn encoding_round_trips_and_refuses_other_bytes() {
        for start in &BOUNDARIES[..7] {
            for end in &BOUNDARIES[1..] {
                let range = KeyRange { start: *start, end: *end };
                let mut value = Vec::new();
                range.encode_value(&mut value);
                assert_eq!(KeyRange::decode(range.encoded_key(), &value).unwrap(), range);
            }
        }
        let long = [7; KEY_LEN_MAX + 2];
        let bad: [(&[u8], &[u8]); 7] = [
            (b"k", b""),
            (b"k", &[START_UNBOUNDED]),
            (b"", &[START_UNBOUNDED | START_EXCLUSIVE]),
            (b"k", &[END_UNBOUNDED, b'k']),
            (b"k", &[END_UNBOUNDED | END_INCLUSIVE]),
            (b"k", &[16]),
            (&long, &[0, b'z']),
        ];
        for (key, value) in bad {
            assert_eq!(KeyRange::decode(key, value).unwrap_err().kind(), ErrorKind::Corruption, "{value:?}");
        }
        let mut value = long.to_vec();
        value[0] = 0;
        assert!(KeyRange::decode(b"k", &value).is_err());
    }
}

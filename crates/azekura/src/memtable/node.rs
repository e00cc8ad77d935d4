//! The nodes of the ordered index.
//!
//! Both kinds of node store, beside the references, a sorted array of 8-byte key prefixes, so that a search reads few
//! records or none. If all keys of a node start with the same bytes, the node stores this common prefix once, and
//! each key prefix starts after it. Otherwise keys like `user:00000042` would all have the same key prefix.
//!
//! One writer changes a node between [`MemtableNodeHeader::begin_write`] and [`MemtableNodeHeader::end_write`]; in
//! between the node is open, and its version is odd. A reader that loads the same even version before and after its
//! other loads has read one state of the node. While a node is open, its key prefixes and its common prefix are
//! invalid, but
//! - the references of a leaf are sorted and complete, and at most one of them is present twice, at adjacent indexes:
//!   an insertion shifts references from the right end by one atomic store after another, and a split is the one
//!   store that shortens the node;
//! - each link of an inner node (separator and child in one word) is a link that the writer stored.

use std::cmp::Ordering as Order;

use crate::base::InternalKey;
use crate::mem::atomic::{AtomicU32, AtomicU64, Ordering, SCHEDULE_EXPLORATION, fence};
use crate::memtable::record::MemtableRecords;

/// Maximum entries of a leaf, which takes 12 cache lines. Few in schedule exploration, so that a short test splits
/// nodes.
pub(crate) const LEAF_CAP: usize = if SCHEDULE_EXPLORATION { 4 } else { 58 };
/// Maximum links of an inner node, which takes 16 cache lines.
pub(crate) const INNER_CAP: usize = if SCHEDULE_EXPLORATION { 4 } else { 60 };

/// Maximum length of a common prefix, in bytes.
const COMMON_PREFIX_LEN_MAX: usize = 48;
/// The length of a common prefix is a multiple of this, in bytes, so that an additional key seldom shortens it.
const COMMON_PREFIX_LEN_STEP: usize = 4;

/// Returns eight bytes of `user_key` from `at` on as a big-endian number, as if zeros followed the key.
///
/// For keys `a <= b` with the same first `at` bytes, the number of `a` is never larger than that of `b`. So different
/// numbers decide the order of two keys, and equal numbers do not.
#[inline]
fn word_at(user_key: &[u8], at: usize) -> u64 {
    let Some(rest) = user_key.get(at..) else { return 0 };
    if let Some(word) = rest.first_chunk() {
        return u64::from_be_bytes(*word);
    }
    let mut word = [0; 8];
    word[..rest.len()].copy_from_slice(rest);
    u64::from_be_bytes(word)
}

/// Returns the length of the prefix that `a` and `b` have in common, limited and rounded down to the length that a
/// node may store.
fn common_len(a: &[u8], b: &[u8]) -> usize {
    let same = a.iter().zip(b).take(COMMON_PREFIX_LEN_MAX).take_while(|(a, b)| a == b).count();
    same - same % COMMON_PREFIX_LEN_STEP
}

/// The properties of a node that are stored in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemtableNodeShape {
    pub(crate) count: usize,
    /// Leaf only: the index after the entry that was inserted last, at which ascending insertions continue; 0 =
    /// unknown.
    pub(crate) append_index: usize,
    /// Length of the common prefix, in bytes.
    common_prefix_len: usize,
    /// Leaf only: the number of its right sibling, plus 1; 0 = none.
    pub(crate) next: u32,
}

impl MemtableNodeShape {
    const EMPTY: MemtableNodeShape = MemtableNodeShape { count: 0, append_index: 0, common_prefix_len: 0, next: 0 };

    #[inline]
    fn from_word(word: u64) -> MemtableNodeShape {
        let [count, append_index, common_prefix_len, _, next @ ..] = word.to_le_bytes();
        MemtableNodeShape {
            count: count.into(),
            append_index: append_index.into(),
            common_prefix_len: common_prefix_len.into(),
            next: u32::from_le_bytes(next),
        }
    }

    fn to_word(self) -> u64 {
        let MemtableNodeShape { count, append_index, common_prefix_len, .. } = self;
        debug_assert!(count.max(append_index).max(common_prefix_len) < 64, "count, index and length have a byte each");
        debug_assert!(append_index <= count, "the last insertion is within the node");
        u64::from(self.next) << 32
            | (self.common_prefix_len as u64) << 16
            | (self.append_index as u64) << 8
            | self.count as u64
    }
}

/// The header of both kinds of node: one cache line.
#[repr(C, align(64))]
pub(crate) struct MemtableNodeHeader {
    /// Odd while the writer changes the node.
    version: AtomicU64,
    shape: AtomicU64,
    common_prefix: [AtomicU64; COMMON_PREFIX_LEN_MAX / 8],
}

impl MemtableNodeHeader {
    fn new(shape: MemtableNodeShape) -> MemtableNodeHeader {
        MemtableNodeHeader {
            version: AtomicU64::new(0),
            shape: AtomicU64::new(shape.to_word()),
            common_prefix: [const { AtomicU64::new(0) }; COMMON_PREFIX_LEN_MAX / 8],
        }
    }

    #[inline]
    pub(crate) fn shape(&self) -> MemtableNodeShape {
        MemtableNodeShape::from_word(self.shape.load(Ordering::Acquire))
    }

    /// Stores the shape. Release: a reader that loads the shape also reads the entries that it counts.
    fn set_shape(&self, shape: MemtableNodeShape) {
        self.shape.store(shape.to_word(), Ordering::Release);
    }

    /// Loads the version at the start of a read; odd if the node is open.
    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Whether all loads since [`MemtableNodeHeader::version`] returned `version` have read one state of the node.
    #[inline]
    pub(crate) fn validate(&self, version: u64) -> bool {
        fence(Ordering::Acquire);
        self.version.load(Ordering::Relaxed) == version
    }

    fn begin_write(&self) {
        let version = self.version.load(Ordering::Relaxed);
        debug_assert!(version.is_multiple_of(2), "one writer changes a node");
        self.version.store(version + 1, Ordering::Relaxed);
        fence(Ordering::Release);
    }

    fn end_write(&self) {
        let version = self.version.load(Ordering::Relaxed);
        debug_assert!(!version.is_multiple_of(2), "a node that is closed was open");
        self.version.store(version + 1, Ordering::Release);
    }

    /// Compares the first `prefix_len` bytes of `user_key` with the common prefix.
    #[inline]
    fn cmp_common_prefix(&self, user_key: &[u8], prefix_len: usize) -> Order {
        for (n, word) in self.common_prefix.iter().enumerate().take(prefix_len.div_ceil(8)) {
            let bytes = (prefix_len - 8 * n).min(8);
            let mask = u64::MAX << (64 - 8 * bytes);
            let order = (word_at(user_key, 8 * n) & mask).cmp(&word.load(Ordering::Relaxed));
            if order.is_ne() {
                return order;
            }
        }
        Order::Equal
    }

    /// Returns how much of the common prefix `user_key` starts with, as a length that a node may store.
    fn common_prefix_len_with(&self, user_key: &[u8], prefix_len: usize) -> usize {
        let mut stored = [0; COMMON_PREFIX_LEN_MAX];
        for (bytes, word) in stored.chunks_exact_mut(8).zip(&self.common_prefix) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_be_bytes());
        }
        common_len(&stored[..prefix_len], user_key)
    }
}

/// A leaf or an inner node: sorted references to records, with their key prefixes.
pub(crate) trait MemtableNode {
    /// The first entry that a search compares. It is 1 for an inner node, because the first link has no separator:
    /// its child contains the entries before the separator of the second link.
    const FIRST: usize;
    fn header(&self) -> &MemtableNodeHeader;
    fn prefixes(&self) -> &[AtomicU64];
    /// Returns the reference bits of entry `n`, where `FIRST <= n < count`.
    fn record(&self, n: usize) -> u32;

    /// Returns the number of entries before `target`, or, with `or_equal`, not after it. The entries before `FIRST`,
    /// which no search compares, are counted too.
    ///
    /// For a reader the result is valid only if [`MemtableNodeHeader::validate`] then returns true. For the writer it
    /// is always valid.
    #[inline]
    fn rank(&self, records: &MemtableRecords, target: InternalKey<'_>, or_equal: bool) -> usize {
        let MemtableNodeShape { count, common_prefix_len: prefix_len, .. } = self.header().shape();
        if !records.bytewise() {
            return self.rank_within(Self::FIRST, count, records, target, or_equal);
        }
        match self.header().cmp_common_prefix(target.user_key, prefix_len) {
            Order::Less => return Self::FIRST,
            Order::Greater => return count,
            Order::Equal => {}
        }
        let prefix = word_at(target.user_key, prefix_len);
        let prefixes = &self.prefixes()[..count];
        let first = Self::FIRST + rank_of(&prefixes[Self::FIRST..], |p| p < prefix);
        if first == count || prefixes[first].load(Ordering::Relaxed) != prefix {
            return first;
        }
        let end = first + rank_of(&prefixes[first..], |p| p <= prefix);
        self.rank_within(first, end, records, target, or_equal)
    }

    /// As [`MemtableNode::rank`], by comparing records only. The result must be in `low..=high`.
    fn rank_within(
        &self,
        mut low: usize,
        mut high: usize,
        records: &MemtableRecords,
        target: InternalKey<'_>,
        or_equal: bool,
    ) -> usize {
        while low < high {
            let middle = (low + high) / 2;
            let order = records.cmp(self.record(middle), target);
            if order.is_lt() || or_equal && order.is_eq() {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }

    /// Makes space at `at` for an entry with key `user_key`, in the key prefixes only. Returns the shape before the
    /// insertion, with the new length of the common prefix; the caller stores it with the new count.
    fn insert_prefix(&self, at: usize, user_key: &[u8], records: &MemtableRecords) -> MemtableNodeShape {
        let mut shape = self.header().shape();
        debug_assert!(!self.header().version().is_multiple_of(2), "the node is open");
        debug_assert!(Self::FIRST <= at && at <= shape.count, "entries of a node are adjacent");
        if !records.bytewise() {
            return shape;
        }
        if self.header().cmp_common_prefix(user_key, shape.common_prefix_len).is_ne() {
            shape.common_prefix_len = self.header().common_prefix_len_with(user_key, shape.common_prefix_len);
            self.set_common_prefix(shape, records);
        }
        let prefixes = self.prefixes();
        for n in (at..shape.count).rev() {
            prefixes[n + 1].store(prefixes[n].load(Ordering::Relaxed), Ordering::Relaxed);
        }
        prefixes[at].store(word_at(user_key, shape.common_prefix_len), Ordering::Relaxed);
        debug_assert!(
            prefixes[at.saturating_sub(1).max(Self::FIRST)..(at + 2).min(shape.count + 1)]
                .is_sorted_by_key(|prefix| prefix.load(Ordering::Relaxed)),
            "key prefixes are sorted"
        );
        shape
    }

    /// For assertions: whether the entry at `at` is between its neighbors. True for a custom order.
    fn is_sorted_around(&self, at: usize, records: &MemtableRecords) -> bool {
        let near = at.saturating_sub(1).max(Self::FIRST)..(at + 1).min(self.header().shape().count - 1);
        // Two records of damaged files may be equal.
        let is_before_next =
            |n: usize| records.cmp(self.record(n), records.get_by_bits(self.record(n + 1)).key()).is_le();
        records.order().is_custom() || near.into_iter().all(is_before_next)
    }

    /// Closes a node after an insertion at `at`. If the count is a power of two, it first tries to lengthen the common
    /// prefix, because a node that grows at its right end starts empty and is never split in the middle.
    fn finish_insertion(&self, at: usize, records: &MemtableRecords) {
        let shape = self.header().shape();
        debug_assert!(self.is_sorted_around(at, records), "entries of a node are in internal order");
        if shape.count.is_power_of_two() {
            self.header().set_shape(self.lengthen_common_prefix(shape, records));
        }
        self.header().end_write();
    }

    /// Lengthens the common prefix if the first and the last entry share it, because then all keys between them do.
    /// Returns the shape to set. The node is open for a change, or not published yet.
    fn lengthen_common_prefix(&self, mut shape: MemtableNodeShape, records: &MemtableRecords) -> MemtableNodeShape {
        if shape.count > Self::FIRST + 1 && records.bytewise() {
            let first = records.get_by_bits(self.record(Self::FIRST)).user_key();
            let last = records.get_by_bits(self.record(shape.count - 1)).user_key();
            let prefix_len = common_len(first, last);
            if prefix_len > shape.common_prefix_len {
                shape.common_prefix_len = prefix_len;
                self.set_common_prefix(shape, records);
            }
        }
        shape
    }

    /// Recomputes the common prefix and the key prefixes from the first `shape.count` entries.
    fn set_common_prefix(&self, shape: MemtableNodeShape, records: &MemtableRecords) {
        debug_assert!(
            shape.common_prefix_len.is_multiple_of(COMMON_PREFIX_LEN_STEP),
            "a common prefix has whole steps"
        );
        debug_assert!(shape.common_prefix_len <= COMMON_PREFIX_LEN_MAX, "a node has space for its common prefix");
        let first = records.get_by_bits(self.record(Self::FIRST)).user_key();
        for (n, word) in self.header().common_prefix.iter().enumerate() {
            let bytes = shape.common_prefix_len.saturating_sub(8 * n).min(8) as u32;
            let mask = u64::MAX.checked_shl(64 - 8 * bytes).unwrap_or(0);
            word.store(word_at(first, 8 * n) & mask, Ordering::Relaxed);
        }
        for (n, prefix) in self.prefixes().iter().enumerate().take(shape.count).skip(Self::FIRST) {
            prefix.store(
                word_at(records.get_by_bits(self.record(n)).user_key(), shape.common_prefix_len),
                Ordering::Relaxed,
            );
        }
    }
}

/// Returns the number of the sorted `prefixes` for which `before` is true. Branch-free, because the branches would be
/// unpredictable.
#[inline]
fn rank_of(prefixes: &[AtomicU64], before: impl Fn(u64) -> bool) -> usize {
    let (mut base, mut size) = (0, prefixes.len());
    while size > 1 {
        let half = size / 2;
        base += if before(prefixes[base + half - 1].load(Ordering::Relaxed)) { half } else { 0 };
        size -= half;
    }
    base + usize::from(size == 1 && before(prefixes[base].load(Ordering::Relaxed)))
}

/// A leaf: sorted references to records, with their key prefixes.
#[repr(C, align(64))]
pub(crate) struct MemtableLeaf {
    header: MemtableNodeHeader,
    prefixes: [AtomicU64; LEAF_CAP],
    refs: [AtomicU32; LEAF_CAP],
}

impl MemtableNode for MemtableLeaf {
    const FIRST: usize = 0;

    #[inline]
    fn header(&self) -> &MemtableNodeHeader {
        &self.header
    }

    #[inline]
    fn prefixes(&self) -> &[AtomicU64] {
        &self.prefixes
    }

    /// Acquire: a reader of the reference also reads its record.
    #[inline]
    fn record(&self, n: usize) -> u32 {
        self.refs[n].load(Ordering::Acquire)
    }
}

impl MemtableLeaf {
    pub(crate) fn new() -> MemtableLeaf {
        MemtableLeaf {
            header: MemtableNodeHeader::new(MemtableNodeShape::EMPTY),
            prefixes: [const { AtomicU64::new(0) }; LEAF_CAP],
            refs: [const { AtomicU32::new(0) }; LEAF_CAP],
        }
    }

    /// Inserts `record` with key `user_key` at index `at`.
    pub(crate) fn insert(&self, at: usize, record: u32, user_key: &[u8], records: &MemtableRecords) {
        self.header.begin_write();
        let shape = self.insert_prefix(at, user_key, records);
        self.insert_ref(at, record, shape, || ());
        self.finish_insertion(at, records);
    }

    /// Stores the reference in an open leaf of that shape. After each store the references are sorted, and at most
    /// one of them is present twice. Calls `after_each` after each store.
    #[inline]
    fn insert_ref(&self, at: usize, record: u32, shape: MemtableNodeShape, mut after_each: impl FnMut()) {
        debug_assert!(shape.count < LEAF_CAP, "a full leaf is split first");
        debug_assert!(at <= shape.count, "entries of a leaf are adjacent");
        let last = if at < shape.count { self.refs[shape.count - 1].load(Ordering::Relaxed) } else { record };
        self.refs[shape.count].store(last, Ordering::Release);
        after_each();
        self.header.set_shape(MemtableNodeShape { count: shape.count + 1, append_index: at + 1, ..shape });
        after_each();
        for n in (at + 1..shape.count).rev() {
            self.refs[n].store(self.refs[n - 1].load(Ordering::Relaxed), Ordering::Release);
            after_each();
        }
        self.refs[at].store(record, Ordering::Release);
        after_each();
    }

    /// Returns a new, unpublished right sibling with the entries from `from` on. This leaf keeps these entries until
    /// [`MemtableLeaf::truncate`].
    pub(crate) fn copy_upper(&self, from: usize, records: &MemtableRecords) -> MemtableLeaf {
        let mut shape = self.header.shape();
        let upper = MemtableLeaf::new();
        copy_words(&upper.header.common_prefix, &self.header.common_prefix);
        copy_words(&upper.prefixes, &self.prefixes[from..shape.count]);
        for (to, n) in upper.refs.iter().zip(from..shape.count) {
            to.store(self.record(n), Ordering::Relaxed);
        }
        shape.count -= from;
        shape.append_index = 0;
        shape.common_prefix_len = if shape.count == 0 { 0 } else { shape.common_prefix_len };
        let shape = upper.lengthen_common_prefix(shape, records);
        upper.header.set_shape(shape);
        upper
    }

    /// Keeps the first `count` entries. The other entries are in leaf number `next`.
    pub(crate) fn truncate(&self, count: usize, next: u32, records: &MemtableRecords) {
        debug_assert!(count <= self.header.shape().count, "a leaf keeps some of its entries");
        self.header.begin_write();
        let shape = self.lengthen_common_prefix(
            MemtableNodeShape { count, append_index: 0, next: next + 1, ..self.header.shape() },
            records,
        );
        self.header.set_shape(shape);
        self.header.end_write();
    }
}

/// An inner node: sorted separators, each with the child whose entries are not before it. The first child has no
/// separator.
#[repr(C, align(64))]
pub(crate) struct MemtableInnerNode {
    header: MemtableNodeHeader,
    prefixes: [AtomicU64; INNER_CAP],
    /// Each link is the reference of the separator's record << 32 | number of the child.
    links: [AtomicU64; INNER_CAP],
}

impl MemtableNode for MemtableInnerNode {
    const FIRST: usize = 1;

    #[inline]
    fn header(&self) -> &MemtableNodeHeader {
        &self.header
    }

    #[inline]
    fn prefixes(&self) -> &[AtomicU64] {
        &self.prefixes
    }

    #[inline]
    fn record(&self, n: usize) -> u32 {
        self.link(n).0
    }
}

impl MemtableInnerNode {
    /// Returns an unpublished inner node with one child and no separator.
    pub(crate) fn with_first_child(child: u32) -> MemtableInnerNode {
        let inner = MemtableInnerNode::empty();
        inner.links[0].store(u64::from(child), Ordering::Relaxed);
        inner.header.set_shape(MemtableNodeShape { count: 1, ..MemtableNodeShape::EMPTY });
        inner
    }

    fn empty() -> MemtableInnerNode {
        MemtableInnerNode {
            header: MemtableNodeHeader::new(MemtableNodeShape::EMPTY),
            prefixes: [const { AtomicU64::new(0) }; INNER_CAP],
            links: [const { AtomicU64::new(0) }; INNER_CAP],
        }
    }

    /// Returns the separator (meaningless for the first link) and the child of link `n`.
    #[inline]
    pub(crate) fn link(&self, n: usize) -> (u32, u32) {
        let link = self.links[n].load(Ordering::Acquire);
        ((link >> 32) as u32, link as u32)
    }

    /// Inserts a link at index `at`.
    pub(crate) fn insert(&self, at: usize, (separator, child): (u32, u32), records: &MemtableRecords) {
        debug_assert!(at >= Self::FIRST && at <= self.header.shape().count, "the first link has no separator");
        debug_assert!(self.header.shape().count < self.links.len(), "a full node is split first");
        self.header.begin_write();
        let shape = self.insert_prefix(at, records.get_by_bits(separator).user_key(), records);
        let link = u64::from(separator) << 32 | u64::from(child);
        let last = if at < shape.count { self.links[shape.count - 1].load(Ordering::Relaxed) } else { link };
        self.links[shape.count].store(last, Ordering::Release);
        self.header.set_shape(MemtableNodeShape { count: shape.count + 1, ..shape });
        for n in (at + 1..shape.count).rev() {
            self.links[n].store(self.links[n - 1].load(Ordering::Relaxed), Ordering::Release);
        }
        self.links[at].store(link, Ordering::Release);
        self.finish_insertion(at, records);
    }

    /// Returns a new, unpublished right sibling with the links from `from` on. This node keeps these
    /// links until [`MemtableInnerNode::truncate`]. The caller inserts the separator of the first of these links into
    /// the parent.
    pub(crate) fn copy_upper(&self, from: usize, records: &MemtableRecords) -> MemtableInnerNode {
        let upper = MemtableInnerNode::empty();
        let mut shape = self.header.shape();
        debug_assert!(0 < from && from < shape.count, "both nodes have a link");
        copy_words(&upper.header.common_prefix, &self.header.common_prefix);
        copy_words(&upper.links, &self.links[from..shape.count]);
        copy_words(&upper.prefixes, &self.prefixes[from..shape.count]);
        shape.count -= from;
        shape.common_prefix_len = if shape.count > 1 { shape.common_prefix_len } else { 0 };
        let shape = upper.lengthen_common_prefix(shape, records);
        upper.header.set_shape(shape);
        upper
    }

    /// Keeps the first `count` links.
    pub(crate) fn truncate(&self, count: usize, records: &MemtableRecords) {
        debug_assert!(0 < count && count <= self.header.shape().count, "a node keeps some of its links");
        self.header.begin_write();
        let shape = self.lengthen_common_prefix(MemtableNodeShape { count, ..self.header.shape() }, records);
        self.header.set_shape(shape);
        self.header.end_write();
    }
}

/// Copies the words of `from`. The target is unpublished or open.
fn copy_words(to: &[AtomicU64], from: &[AtomicU64]) {
    for (to, from) in to.iter().zip(from) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

#[cfg(test)]
impl MemtableNodeHeader {
    /// Opens a closed node, and closes an open node, without changing anything else.
    pub(crate) fn toggle_write_in_progress(&self) {
        self.version.fetch_xor(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
impl MemtableLeaf {
    /// Inserts a reference without a key prefix, and calls `after_each` after each store.
    pub(crate) fn insert_in_steps(&self, at: usize, record: u32, after_each: &mut dyn FnMut()) {
        self.header.begin_write();
        self.insert_ref(at, record, self.header.shape(), after_each);
        self.header.end_write();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::base::{EntryRef, KeyOrder, RecordKind, SeqNo};
    use crate::mem::arena::Arena;

    #[test]
    fn key_words_preserve_key_order() {
        let keys: &[&[u8]] =
            &[b"", b"\0", b"\0\0", b"a", b"a\0", b"abcdefgh", b"abcdefgh\0", b"abcdefghi", b"\xff\xff"];
        for at in 0..12 {
            for pair in keys.windows(2) {
                let same = at == 0 || pair[0].get(..at).is_some_and(|head| pair[1].get(..at) == Some(head));
                assert!(!same || word_at(pair[0], at) <= word_at(pair[1], at), "{pair:?} {at}");
            }
        }
        assert_eq!(word_at(b"abcdefghi", 1), u64::from_be_bytes(*b"bcdefghi"));
        assert_eq!(word_at(b"abc", 1), u64::from_be_bytes(*b"bc\0\0\0\0\0\0"));
    }

    #[test]
    #[cfg_attr(any(azekura_explore, miri), ignore = "nodes are small in schedule exploration")]
    fn nodes_fill_whole_cache_lines() {
        assert_eq!((size_of::<MemtableLeaf>(), size_of::<MemtableInnerNode>()), (12 * 64, 16 * 64));
    }

    /// The common prefix grows with a split and shrinks when a key does not share it. Ranks stay correct.
    #[test]
    fn rank_is_correct_for_every_common_prefix() {
        let (arena, mut writer) = Arena::new(Arc::default());
        let records = MemtableRecords::new(arena, KeyOrder::bytewise());
        let mut keys: Vec<Vec<u8>> =
            (0..40).map(|n| format!("{}{:08}", "common/".repeat(n % 2 + 2), n * 3).into_bytes()).collect();
        keys.sort();
        let leaf = MemtableLeaf::new();
        let mut insert = |leaf: &MemtableLeaf, key: &[u8]| {
            let entry = EntryRef { user_key: key, seqno: SeqNo(5), kind: RecordKind::Put, value: b"" };
            let bits = records.append(&mut writer, entry, None).unwrap().to_bits();
            leaf.insert(leaf.rank(&records, entry.key(), false), bits, key, &records);
        };
        keys.iter().rev().for_each(|key| insert(&leaf, key));
        let upper = leaf.copy_upper(25, &records);
        leaf.truncate(25, 0, &records);
        assert!(upper.header.shape().common_prefix_len >= 12 && leaf.header.shape().common_prefix_len >= 12);
        let check = |leaf: &MemtableLeaf| {
            let count = leaf.header.shape().count;
            let keys_in_leaf: Vec<_> = (0..count).map(|n| records.get_by_bits(leaf.record(n)).user_key()).collect();
            for key in keys.iter().map(Vec::as_slice).chain([&b""[..], b"common/", b"common/common/\0", b"d"]) {
                let target = InternalKey::new(key, SeqNo(5));
                assert_eq!(leaf.rank(&records, target, false), keys_in_leaf.iter().filter(|k| **k < key).count());
                assert_eq!(leaf.rank(&records, target, true), keys_in_leaf.iter().filter(|k| **k <= key).count());
            }
        };
        check(&leaf);
        check(&upper);
        insert(&upper, b"commonness");
        assert_eq!(upper.header.shape().common_prefix_len, 4);
        insert(&leaf, b"");
        assert_eq!(leaf.header.shape().common_prefix_len, 0);
        check(&leaf);
        check(&upper);
    }
}

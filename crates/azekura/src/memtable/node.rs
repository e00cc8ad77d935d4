//! The nodes of the ordered index.
//!
//! Both kinds of node have a sorted array of 8-byte key prefixes beside the references, so that a search looks at few
//! records or none. Where all keys of a node begin alike, that common beginning is kept once and the prefixes are taken
//! behind it; otherwise keys like `user:00000042` would all have the same prefix.
//!
//! One writer changes a node between [`Head::open`] and [`Head::close`]. Readers that saw the same even version before
//! and after have read one state. In a node that is open, prefixes and common beginning mean nothing, but
//! - a leaf's references are sorted and complete, with at most one of them standing there twice (side by side):
//!   inserting shifts from the right end, one atomic store after the other, and a split is the one store that shortens
//!   the node;
//! - each link of an inner node (separator and child in one word) is one that was stored as such.

use std::cmp::Ordering as Order;

use crate::base::KeyRef;
use crate::mem::atomic::{AtomicU32, AtomicU64, EXPLORED, Ordering, fence};
use crate::memtable::record::Records;

/// Entries of a leaf: 12 cache lines. Few where schedules are explored, so that a short test splits nodes.
pub(crate) const LEAF_CAP: usize = if EXPLORED { 4 } else { 58 };
/// Links of an inner node: 16 cache lines.
pub(crate) const INNER_CAP: usize = if EXPLORED { 4 } else { 60 };

/// Common beginnings are kept up to this length, in bytes.
const COMMON_MAX: usize = 48;
/// The length of common beginnings is a multiple of this, so that one more key seldom makes it shorter.
const COMMON_STEP: usize = 4;

/// Eight bytes of `user` from `at` on as a big-endian number, as if zeros followed the key.
///
/// With keys `a <= b` these numbers are never the other way round, so a difference decides, and only equality does not.
#[inline]
fn word_at(user: &[u8], at: usize) -> u64 {
    let Some(rest) = user.get(at..) else { return 0 };
    if let Some(word) = rest.first_chunk() {
        return u64::from_be_bytes(*word);
    }
    let mut word = [0; 8];
    word[..rest.len()].copy_from_slice(rest);
    u64::from_be_bytes(word)
}

/// The leading bytes that `a` and `b` have in common, as a node may keep them.
fn common_len(a: &[u8], b: &[u8]) -> usize {
    let same = a.iter().zip(b).take(COMMON_MAX).take_while(|(a, b)| a == b).count();
    same - same % COMMON_STEP
}

/// What a node says of itself in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) count: usize,
    /// Of a leaf: where the next entry goes if it follows the one that was inserted last; 0 = unknown.
    pub(crate) follows: usize,
    /// The length of the common beginning.
    skip: usize,
    /// Of a leaf: the number of its right neighbour, plus 1; 0 = none.
    pub(crate) next: u32,
}

impl Shape {
    const EMPTY: Shape = Shape { count: 0, follows: 0, skip: 0, next: 0 };

    #[inline]
    fn from_word(word: u64) -> Shape {
        let [count, follows, skip, _, next @ ..] = word.to_le_bytes();
        Shape { count: count.into(), follows: follows.into(), skip: skip.into(), next: u32::from_le_bytes(next) }
    }

    fn to_word(self) -> u64 {
        // Count, place and length all stay below 64.
        u64::from(self.next) << 32 | (self.skip as u64) << 16 | (self.follows as u64) << 8 | self.count as u64
    }
}

/// What both kinds of node begin with: one cache line.
#[repr(C, align(64))]
pub(crate) struct Head {
    /// Odd while the node is being changed.
    version: AtomicU64,
    shape: AtomicU64,
    common: [AtomicU64; COMMON_MAX / 8],
}

impl Head {
    fn new(shape: Shape) -> Head {
        Head {
            version: AtomicU64::new(0),
            shape: AtomicU64::new(shape.to_word()),
            common: [const { AtomicU64::new(0) }; COMMON_MAX / 8],
        }
    }

    #[inline]
    pub(crate) fn shape(&self) -> Shape {
        Shape::from_word(self.shape.load(Ordering::Acquire))
    }

    /// Release: whoever sees the shape sees the entries it counts.
    fn set_shape(&self, shape: Shape) {
        self.shape.store(shape.to_word(), Ordering::Release);
    }

    /// The version that a read begins with; odd if the node is open.
    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Whether what was read since [`Head::version`] gave `version` was one state.
    #[inline]
    pub(crate) fn unchanged(&self, version: u64) -> bool {
        fence(Ordering::Acquire);
        self.version.load(Ordering::Relaxed) == version
    }

    fn open(&self) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version + 1, Ordering::Relaxed);
        fence(Ordering::Release);
    }

    fn close(&self) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version + 1, Ordering::Release);
    }

    /// Compares the first `skip` bytes of `user` with the common beginning.
    #[inline]
    fn cmp_common(&self, user: &[u8], skip: usize) -> Order {
        for (n, word) in self.common.iter().enumerate().take(skip.div_ceil(8)) {
            let bytes = (skip - 8 * n).min(8);
            let mask = u64::MAX << (64 - 8 * bytes);
            let order = (word_at(user, 8 * n) & mask).cmp(&word.load(Ordering::Relaxed));
            if order.is_ne() {
                return order;
            }
        }
        Order::Equal
    }

    /// The bytes that `user` has in common with the common beginning.
    fn common_with(&self, user: &[u8], skip: usize) -> usize {
        let mut kept = [0; COMMON_MAX];
        for (bytes, word) in kept.chunks_exact_mut(8).zip(&self.common) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_be_bytes());
        }
        common_len(&kept[..skip], user)
    }
}

/// A leaf or an inner node: sorted references to records under their prefixes.
pub(crate) trait Node {
    /// The first entry that a search compares: the first link of an inner node has no separator, it is the way to
    /// whatever is before the second.
    const FIRST: usize;
    fn head(&self) -> &Head;
    fn prefixes(&self) -> &[AtomicU64];
    /// The reference bits of entry `n`, FIRST <= n < count.
    fn record(&self, n: usize) -> u32;

    /// How many entries are before `target`, or, with `or_equal`, not behind it; those that no search compares
    /// included.
    ///
    /// Only an answer if [`Head::unchanged`] says so afterwards (always for the writer).
    #[inline]
    fn rank(&self, records: &Records, target: KeyRef<'_>, or_equal: bool) -> usize {
        let Shape { count, skip, .. } = self.head().shape();
        if !records.bytewise() {
            return self.rank_within(Self::FIRST, count, records, target, or_equal);
        }
        match self.head().cmp_common(target.user, skip) {
            Order::Less => return Self::FIRST,
            Order::Greater => return count,
            Order::Equal => {}
        }
        let prefix = word_at(target.user, skip);
        let prefixes = &self.prefixes()[..count];
        let first = Self::FIRST + rank_of(&prefixes[Self::FIRST..], |p| p < prefix);
        if first == count || prefixes[first].load(Ordering::Relaxed) != prefix {
            return first;
        }
        let behind = first + rank_of(&prefixes[first..], |p| p <= prefix);
        self.rank_within(first, behind, records, target, or_equal)
    }

    /// [`Node::rank`] by comparing records alone, where it is known to lie in `low..=high`.
    fn rank_within(
        &self,
        mut low: usize,
        mut high: usize,
        records: &Records,
        target: KeyRef<'_>,
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

    /// Makes room for one more entry at `at` whose key is `user`, in the prefixes only; returns the shape of before.
    /// The node is open and not full.
    fn insert_prefix(&self, at: usize, user: &[u8], records: &Records) -> Shape {
        let mut shape = self.head().shape();
        if !records.bytewise() {
            return shape;
        }
        if self.head().cmp_common(user, shape.skip).is_ne() {
            shape.skip = self.head().common_with(user, shape.skip);
            self.set_skip(shape, records);
        }
        let prefixes = self.prefixes();
        for n in (at..shape.count).rev() {
            prefixes[n + 1].store(prefixes[n].load(Ordering::Relaxed), Ordering::Relaxed);
        }
        prefixes[at].store(word_at(user, shape.skip), Ordering::Relaxed);
        shape
    }

    /// Closes a node after an insertion. Now and then it sees whether all keys have more in common, because nodes that
    /// grow at their right end begin empty and are never split in two.
    fn finish_insertion(&self, records: &Records) {
        let shape = self.head().shape();
        if shape.count.is_power_of_two() {
            self.head().set_shape(self.lengthen_common(shape, records));
        }
        self.head().close();
    }

    /// Lengthens the common beginning if the first and the last entry allow it, because the keys between them do then.
    /// Returns the shape to set. The node is open, or nobody knows it yet.
    fn lengthen_common(&self, mut shape: Shape, records: &Records) -> Shape {
        if shape.count > Self::FIRST + 1 && records.bytewise() {
            let first = records.of_bits(self.record(Self::FIRST)).user();
            let last = records.of_bits(self.record(shape.count - 1)).user();
            let skip = common_len(first, last);
            if skip > shape.skip {
                shape.skip = skip;
                self.set_skip(shape, records);
            }
        }
        shape
    }

    /// Takes common beginning and prefixes anew from the first `shape.count` entries.
    fn set_skip(&self, shape: Shape, records: &Records) {
        let first = records.of_bits(self.record(Self::FIRST)).user();
        for (n, word) in self.head().common.iter().enumerate() {
            let bytes = shape.skip.saturating_sub(8 * n).min(8) as u32;
            let mask = u64::MAX.checked_shl(64 - 8 * bytes).unwrap_or(0);
            word.store(word_at(first, 8 * n) & mask, Ordering::Relaxed);
        }
        for (n, prefix) in self.prefixes().iter().enumerate().take(shape.count).skip(Self::FIRST) {
            prefix.store(word_at(records.of_bits(self.record(n)).user(), shape.skip), Ordering::Relaxed);
        }
    }
}

/// How many of the sorted `prefixes` are `before`; branch-free, because a processor cannot guess these branches.
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

/// Sorted references to records.
#[repr(C, align(64))]
pub(crate) struct Leaf {
    head: Head,
    prefixes: [AtomicU64; LEAF_CAP],
    refs: [AtomicU32; LEAF_CAP],
}

impl Node for Leaf {
    const FIRST: usize = 0;

    #[inline]
    fn head(&self) -> &Head {
        &self.head
    }

    #[inline]
    fn prefixes(&self) -> &[AtomicU64] {
        &self.prefixes
    }

    /// Acquire: whoever sees a reference sees its record.
    #[inline]
    fn record(&self, n: usize) -> u32 {
        self.refs[n].load(Ordering::Acquire)
    }
}

impl Leaf {
    pub(crate) fn new() -> Leaf {
        Leaf {
            head: Head::new(Shape::EMPTY),
            prefixes: [const { AtomicU64::new(0) }; LEAF_CAP],
            refs: [const { AtomicU32::new(0) }; LEAF_CAP],
        }
    }

    /// Inserts `record` with key `user` at `at`; the leaf is not full.
    pub(crate) fn insert(&self, at: usize, record: u32, user: &[u8], records: &Records) {
        self.head.open();
        let shape = self.insert_prefix(at, user, records);
        self.insert_ref(at, record, shape, || ());
        self.finish_insertion(records);
    }

    /// Stores the reference in an open leaf of that shape. In this order each store leaves sorted references of which
    /// at most one stands twice; `after_each` is called in each of these states.
    #[inline]
    fn insert_ref(&self, at: usize, record: u32, shape: Shape, mut after_each: impl FnMut()) {
        let last = if at < shape.count { self.refs[shape.count - 1].load(Ordering::Relaxed) } else { record };
        self.refs[shape.count].store(last, Ordering::Release);
        after_each();
        self.head.set_shape(Shape { count: shape.count + 1, follows: at + 1, ..shape });
        after_each();
        for n in (at + 1..shape.count).rev() {
            self.refs[n].store(self.refs[n - 1].load(Ordering::Relaxed), Ordering::Release);
            after_each();
        }
        self.refs[at].store(record, Ordering::Release);
        after_each();
    }

    /// A new right neighbour with the entries from `from` on, not yet known to anyone; this leaf keeps them until
    /// [`Leaf::shrink`].
    pub(crate) fn upper_part(&self, from: usize, records: &Records) -> Leaf {
        let mut shape = self.head.shape();
        let upper = Leaf::new();
        copy_words(&upper.head.common, &self.head.common);
        copy_words(&upper.prefixes, &self.prefixes[from..shape.count]);
        for (to, n) in upper.refs.iter().zip(from..shape.count) {
            to.store(self.record(n), Ordering::Relaxed);
        }
        shape.count -= from;
        shape.follows = 0;
        shape.skip = if shape.count == 0 { 0 } else { shape.skip };
        let shape = upper.lengthen_common(shape, records);
        upper.head.set_shape(shape);
        upper
    }

    /// Keeps the first `count` entries; the others have moved to leaf number `next`.
    pub(crate) fn shrink(&self, count: usize, next: u32, records: &Records) {
        self.head.open();
        let shape = self.lengthen_common(Shape { count, follows: 0, next: next + 1, ..self.head.shape() }, records);
        self.head.set_shape(shape);
        self.head.close();
    }
}

/// Sorted separators, each with the child whose entries are not before it; the first child has none.
#[repr(C, align(64))]
pub(crate) struct Inner {
    head: Head,
    prefixes: [AtomicU64; INNER_CAP],
    /// Reference of the separator's record << 32 | number of the child.
    links: [AtomicU64; INNER_CAP],
}

impl Node for Inner {
    const FIRST: usize = 1;

    #[inline]
    fn head(&self) -> &Head {
        &self.head
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

impl Inner {
    /// An inner node, known to nobody yet, with one child and no separator.
    pub(crate) fn over(child: u32) -> Inner {
        let inner = Inner::empty();
        inner.links[0].store(u64::from(child), Ordering::Relaxed);
        inner.head.set_shape(Shape { count: 1, ..Shape::EMPTY });
        inner
    }

    fn empty() -> Inner {
        Inner {
            head: Head::new(Shape::EMPTY),
            prefixes: [const { AtomicU64::new(0) }; INNER_CAP],
            links: [const { AtomicU64::new(0) }; INNER_CAP],
        }
    }

    /// Separator (none for the first) and child number `n`.
    #[inline]
    pub(crate) fn link(&self, n: usize) -> (u32, u32) {
        let link = self.links[n].load(Ordering::Acquire);
        ((link >> 32) as u32, link as u32)
    }

    /// Inserts a link at `at`, not as the first; the node is not full.
    pub(crate) fn insert(&self, at: usize, (separator, child): (u32, u32), records: &Records) {
        self.head.open();
        let shape = self.insert_prefix(at, records.of_bits(separator).user(), records);
        let link = u64::from(separator) << 32 | u64::from(child);
        let last = if at < shape.count { self.links[shape.count - 1].load(Ordering::Relaxed) } else { link };
        self.links[shape.count].store(last, Ordering::Release);
        self.head.set_shape(Shape { count: shape.count + 1, ..shape });
        for n in (at + 1..shape.count).rev() {
            self.links[n].store(self.links[n - 1].load(Ordering::Relaxed), Ordering::Release);
        }
        self.links[at].store(link, Ordering::Release);
        self.finish_insertion(records);
    }

    /// A new right neighbour with the links from `from` on, at least one, not yet known to anyone; this node keeps them
    /// until [`Inner::shrink`]. The separator of its first link goes to the parent.
    pub(crate) fn upper_part(&self, from: usize, records: &Records) -> Inner {
        let upper = Inner::empty();
        let mut shape = self.head.shape();
        copy_words(&upper.head.common, &self.head.common);
        copy_words(&upper.links, &self.links[from..shape.count]);
        copy_words(&upper.prefixes, &self.prefixes[from..shape.count]);
        shape.count -= from;
        shape.skip = if shape.count > 1 { shape.skip } else { 0 };
        let shape = upper.lengthen_common(shape, records);
        upper.head.set_shape(shape);
        upper
    }

    /// Keeps the first `count` links.
    pub(crate) fn shrink(&self, count: usize, records: &Records) {
        self.head.open();
        let shape = self.lengthen_common(Shape { count, ..self.head.shape() }, records);
        self.head.set_shape(shape);
        self.head.close();
    }
}

/// Copies as many words as `from` has; the target is not shared yet, or open.
fn copy_words(to: &[AtomicU64], from: &[AtomicU64]) {
    for (to, from) in to.iter().zip(from) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

#[cfg(test)]
impl Head {
    /// Makes an open node of a closed one, and the other way round.
    pub(crate) fn toggle_open(&self) {
        self.version.fetch_xor(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
impl Leaf {
    /// Inserts a reference, without a prefix, and stops after each store.
    pub(crate) fn insert_in_steps(&self, at: usize, record: u32, after_each: &mut dyn FnMut()) {
        self.head.open();
        self.insert_ref(at, record, self.head.shape(), after_each);
        self.head.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{EntryRef, KeyOrder, RecordKind, SeqNo};
    use crate::mem::arena::Arena;

    #[test]
    fn words_keep_the_order_of_keys() {
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
    #[cfg_attr(any(azekura_explore, miri), ignore = "nodes are small where schedules are explored")]
    fn nodes_fill_whole_cache_lines() {
        assert_eq!((size_of::<Leaf>(), size_of::<Inner>()), (12 * 64, 16 * 64));
    }

    /// The common beginning grows with a split and shrinks when a key does not share it; ranks are right all the time.
    #[test]
    fn ranks_are_right_whatever_the_common_beginning() {
        let (arena, mut writer) = Arena::new();
        let records = Records::new(arena, KeyOrder::bytewise());
        let mut keys: Vec<Vec<u8>> =
            (0..40).map(|n| format!("{}{:08}", "common/".repeat(n % 2 + 2), n * 3).into_bytes()).collect();
        keys.sort();
        let leaf = Leaf::new();
        let mut insert = |leaf: &Leaf, key: &[u8]| {
            let entry = EntryRef { user: key, seqno: SeqNo(5), kind: RecordKind::Put, value: b"" };
            let bits = records.append(&mut writer, entry, None).unwrap().to_bits();
            leaf.insert(leaf.rank(&records, entry.key(), false), bits, key, &records);
        };
        keys.iter().rev().for_each(|key| insert(&leaf, key));
        let upper = leaf.upper_part(25, &records);
        leaf.shrink(25, 0, &records);
        assert!(upper.head.shape().skip >= 12 && leaf.head.shape().skip >= 12);
        let check = |leaf: &Leaf| {
            let count = leaf.head.shape().count;
            let inside: Vec<_> = (0..count).map(|n| records.of_bits(leaf.record(n)).user()).collect();
            for key in keys.iter().map(Vec::as_slice).chain([&b""[..], b"common/", b"common/common/\0", b"d"]) {
                let target = KeyRef::new(key, SeqNo(5));
                assert_eq!(leaf.rank(&records, target, false), inside.iter().filter(|k| **k < key).count());
                assert_eq!(leaf.rank(&records, target, true), inside.iter().filter(|k| **k <= key).count());
            }
        };
        check(&leaf);
        check(&upper);
        insert(&upper, b"commonness");
        assert_eq!(upper.head.shape().skip, 4);
        insert(&leaf, b"");
        assert_eq!(leaf.head.shape().skip, 0);
        check(&leaf);
        check(&upper);
    }
}

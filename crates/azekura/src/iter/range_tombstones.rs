//! A set of range tombstones: disjoint fragments in key order, each with the sequence numbers of the range deletes that
//! cover it.
//!
//! The set is immutable. A change copies the chunks that it touches and the list of all chunks, so readers need no
//! lock.
//! A sequence number of a fragment is *needed* while a reader may read between it and the next newer one of the
//! fragment; sequence numbers that are not needed are dropped by each change, where it passes them.

use std::cmp::Ordering;
use std::sync::Arc;

use crate::base::key::key_prefix_u64;
use crate::base::key_range::{KeyBoundary, KeyRange, RangeTombstone};
use crate::base::{Error, KeyOrder, Result, SeqNo};

/// Maximum number of fragments in a chunk.
const CHUNK_LEN_MAX: usize = 128;
/// Number of fragments in each of the chunks that replace a longer one.
const CHUNK_LEN: usize = 96;
/// Memory of a fragment in bytes, in addition to the keys of its boundaries.
const FRAGMENT_BYTES: u64 = 96;
/// Memory of a sequence number of a fragment in bytes.
const SEQNO_BYTES: u64 = 8;
/// Number of fragments below which a set is not searched for sequence numbers that are not needed.
const PRUNE_LEN_MIN: usize = 1024;

/// Range tombstones as disjoint fragments.
#[derive(Clone, Debug, Default)]
pub(crate) struct RangeTombstones {
    chunks: Vec<Arc<Chunk>>,
    /// Only with bytewise order: the first eight bytes of the first start of each chunk.
    first_prefixes: Vec<u64>,
    len: usize,
    bytes: u64,
    largest_seqno: SeqNo,
    /// A change prunes the whole set if it has more fragments than this.
    prune_len: usize,
}

/// Adjacent fragments; at least one.
#[derive(Debug)]
struct Chunk {
    fragments: Vec<RangeTombstone>,
    /// Only with bytewise order: the first eight bytes of each start.
    prefixes: Vec<u64>,
    bytes: u64,
}

/// The keys around a key that have the same range tombstones as it.
#[derive(Clone, Debug)]
pub(crate) struct RangeTombstoneSpan {
    pub(crate) range: KeyRange,
    /// The newest tombstone over the span that the reader sees; 0 if there is none.
    pub(crate) seqno: SeqNo,
}

impl RangeTombstones {
    /// The set of these fragments, in any order.
    ///
    /// # Errors
    /// `Corruption` if fragments overlap or are empty.
    pub(crate) fn from_fragments(mut fragments: Vec<RangeTombstone>, order: &KeyOrder) -> Result<RangeTombstones> {
        fragments.sort_by(|a, b| a.range.start.cmp(&b.range.start, order));
        let overlap = |pair: &[RangeTombstone]| pair[0].range.end.cmp(&pair[1].range.start, order).is_gt();
        if fragments.iter().any(|fragment| fragment.range.is_empty(order)) || fragments.windows(2).any(overlap) {
            return Err(Error::corruption("range tombstones overlap, or the comparator contradicts itself"));
        }
        Ok(RangeTombstones::default().with_chunks_replaced(0..0, fragments, order))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of fragments.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of memory, approximately.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Maximum number of bytes that one more range delete adds to a set, if no reader needs the older ones that it
    /// covers: its boundaries split up to two fragments.
    pub(crate) fn bytes_max<K: AsRef<[u8]>>(range: &KeyRange<K>) -> u64 {
        let keys = range.start.key().len() + range.end.key().len();
        2 * (FRAGMENT_BYTES + SEQNO_BYTES + keys as u64)
    }

    /// The newest sequence number; 0 if the set is empty.
    pub(crate) fn largest_seqno(&self) -> SeqNo {
        self.largest_seqno
    }

    /// The fragments in key order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &RangeTombstone> {
        self.chunks.iter().flat_map(|chunk| &chunk.fragments)
    }

    /// The fragments in key order from one of them on: index of its chunk, and index in the chunk.
    fn iter_from(&self, (chunk, at): (usize, usize)) -> impl Iterator<Item = &RangeTombstone> {
        let chunks = self.chunks.iter().skip(chunk).enumerate();
        chunks.flat_map(move |(n, chunk)| chunk.fragments.iter().skip(if n == 0 { at } else { 0 }))
    }

    /// The position of the last fragment that starts before `key`: index of its chunk, and index in the chunk.
    fn position(&self, key: &[u8], order: &KeyOrder) -> Option<(usize, usize)> {
        let wanted = if order.is_bytewise() { key_prefix_u64(key) } else { 0 };
        let first = |at: usize| &self.chunks[at].fragments[0].range.start;
        let chunk = search(&self.first_prefixes, wanted, self.chunks.len(), |at| first(at).cmp_key(key, order).is_lt());
        let chunk = chunk.checked_sub(1)?;
        let Chunk { fragments, prefixes, .. } = &*self.chunks[chunk];
        let starts_before = |at: usize| fragments[at].range.start.cmp_key(key, order).is_lt();
        let at = search(prefixes, wanted, fragments.len(), starts_before);
        Some((chunk, at.checked_sub(1)?))
    }

    /// The sequence numbers of the range deletes that cover `key`, newest first.
    pub(crate) fn covering(&self, key: &[u8], order: &KeyOrder) -> &[SeqNo] {
        let Some((chunk, at)) = self.position(key, order) else { return &[] };
        let fragment = &self.chunks[chunk].fragments[at];
        if fragment.range.end.cmp_key(key, order).is_gt() { &fragment.seqnos } else { &[] }
    }

    /// The newest range delete over `key` that a reader at `at` sees; 0 if there is none.
    #[inline]
    pub(crate) fn covering_seqno(&self, key: &[u8], at: SeqNo, order: &KeyOrder) -> SeqNo {
        newest_visible(self.covering(key, order), at)
    }

    /// A key at a bound of a range delete above `since` that overlaps `range`.
    pub(crate) fn newer_key_in<K: AsRef<[u8]>>(
        &self,
        range: &KeyRange<K>,
        since: SeqNo,
        order: &KeyOrder,
    ) -> Option<Vec<u8>> {
        if self.largest_seqno <= since || range.is_empty(order) {
            return None;
        }
        let from = match &range.start {
            KeyBoundary::Min => None,
            start => self.position(start.key(), order),
        };
        let starts_before_end = |fragment: &&RangeTombstone| fragment.range.start.cmp(&range.end, order).is_lt();
        let mut candidates = self.iter_from(from.unwrap_or_default()).take_while(starts_before_end);
        let is_newer = |fragment: &&RangeTombstone| fragment.seqnos[0] > since && fragment.range.overlaps(range, order);
        let start = &candidates.find(is_newer)?.range.start;
        let first = if start.cmp(&range.start, order).is_gt() { start.key() } else { range.start.key() };
        Some(first.to_vec())
    }

    /// The keys around `key` that have the same range tombstones, and the newest one that a reader at `at` sees.
    pub(crate) fn span(&self, key: &[u8], at: SeqNo, order: &KeyOrder) -> RangeTombstoneSpan {
        let (range, seqnos) = self.fragment_or_gap(key, order);
        RangeTombstoneSpan { range, seqno: newest_visible(seqnos, at) }
    }

    /// The fragment that contains `key`, or the gap between two fragments, and its sequence numbers, newest first.
    pub(crate) fn fragment_or_gap(&self, key: &[u8], order: &KeyOrder) -> (KeyRange, &[SeqNo]) {
        let position = self.position(key, order);
        let last = position.map(|(chunk, at)| &self.chunks[chunk].fragments[at]);
        if let Some(fragment) = last.filter(|fragment| fragment.range.end.cmp_key(key, order).is_gt()) {
            return (fragment.range.clone(), &fragment.seqnos);
        }
        let (chunk, next) = position.map_or((0, 0), |(chunk, at)| (chunk, at + 1));
        let in_chunk = self.chunks.get(chunk).and_then(|chunk| chunk.fragments.get(next));
        let next = in_chunk.or_else(|| self.chunks.get(chunk + 1).and_then(|chunk| chunk.fragments.first()));
        let start = last.map_or(KeyBoundary::Min, |fragment| fragment.range.end.clone());
        let end = next.map_or(KeyBoundary::Max, |fragment| fragment.range.start.clone());
        let gap = KeyRange { start, end };
        debug_assert!(order.is_custom() || gap.contains(key, order), "a key without fragment is in a gap");
        (gap, &[])
    }

    /// The fragments that overlap the keys `smallest..=largest`.
    pub(crate) fn overlapping<'a>(
        &'a self,
        smallest: &'a [u8],
        largest: &'a [u8],
        order: &'a KeyOrder,
    ) -> impl Iterator<Item = &'a RangeTombstone> {
        debug_assert!(order.is_custom() || smallest <= largest, "the keys are a range");
        self.iter_from(self.position(smallest, order).unwrap_or_default())
            .skip_while(move |fragment| fragment.range.end.cmp_key(smallest, order).is_lt())
            .take_while(move |fragment| fragment.range.start.cmp_key(largest, order).is_lt())
    }

    /// Whether every key of `smallest..=largest` is in a fragment with a sequence number that `is_wanted`.
    pub(crate) fn covers(
        &self,
        smallest: &[u8],
        largest: &[u8],
        order: &KeyOrder,
        is_wanted: impl Fn(SeqNo) -> bool,
    ) -> bool {
        let mut end: Option<&KeyBoundary> = None;
        for fragment in self.overlapping(smallest, largest, order) {
            let is_adjacent = match end {
                None => fragment.range.start.cmp_key(smallest, order).is_lt(),
                Some(end) => end.cmp(&fragment.range.start, order).is_eq(),
            };
            if !is_adjacent || !fragment.seqnos.iter().any(|&seqno| is_wanted(seqno)) {
                return false;
            }
            end = Some(&fragment.range.end);
        }
        end.is_some_and(|end| end.cmp_key(largest, order).is_gt())
    }

    /// The set with one more range delete, which is newer than all others. `snapshots`: the sequence numbers that
    /// readers read at, ascending, the last visible one last.
    pub(crate) fn with_range_delete(
        &self,
        range: KeyRange,
        seqno: SeqNo,
        snapshots: &[SeqNo],
        order: &KeyOrder,
    ) -> RangeTombstones {
        debug_assert!(seqno > self.largest_seqno, "a range delete is newer than all others");
        debug_assert!(snapshots.is_sorted(), "snapshots are in ascending order");
        debug_assert!(order.is_custom() || !range.is_empty(order), "a range delete has a position");
        let added = RangeTombstone { range, seqnos: Arc::new([seqno]) };
        let first = |chunk: &Arc<Chunk>| chunk.fragments[0].range.start.clone();
        let from = self.chunks.partition_point(|chunk| first(chunk).cmp(&added.range.start, order).is_le());
        let from = from.saturating_sub(1);
        let len = self.chunks[from..].partition_point(|chunk| first(chunk).cmp(&added.range.end, order).is_lt());
        let touched = from..from + len;
        let old = self.chunks[touched.clone()].iter().flat_map(|chunk| &chunk.fragments);
        let merged = merge(old, std::iter::once(&added), snapshots, order);
        let set = self.with_chunks_replaced(touched, merged, order);
        if set.len > set.prune_len.max(PRUNE_LEN_MIN) { set.pruned(snapshots, order) } else { set }
    }

    /// The fragments of both sets, with the sequence numbers that readers at `snapshots` or later need.
    pub(crate) fn merged_with(
        &self,
        other: &RangeTombstones,
        snapshots: &[SeqNo],
        order: &KeyOrder,
    ) -> RangeTombstones {
        let merged = merge(self.iter(), other.iter(), snapshots, order);
        RangeTombstones::default().with_chunks_replaced(0..0, merged, order)
    }

    /// The set without the sequence numbers that no reader needs.
    pub(crate) fn pruned(&self, snapshots: &[SeqNo], order: &KeyOrder) -> RangeTombstones {
        let mut set = self.merged_with(&RangeTombstones::default(), snapshots, order);
        set.prune_len = 2 * set.len;
        set
    }

    /// The fragments for which `stays` is true.
    pub(crate) fn filtered(&self, stays: impl Fn(&RangeTombstone) -> bool, order: &KeyOrder) -> RangeTombstones {
        let fragments = self.iter().filter(|fragment| stays(fragment)).cloned().collect();
        RangeTombstones::default().with_chunks_replaced(0..0, fragments, order)
    }

    /// The difference to a `newer` set: the starts of the fragments that it does not have, and those that it adds.
    pub(crate) fn difference(
        &self,
        newer: &RangeTombstones,
        order: &KeyOrder,
    ) -> (Vec<KeyBoundary>, Vec<RangeTombstone>) {
        let (mut removed, mut added) = (Vec::new(), Vec::new());
        let (mut old, mut new) = (self.iter().peekable(), newer.iter().peekable());
        loop {
            let ordering = match (old.peek(), new.peek()) {
                (None, None) => return (removed, added),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some(a), Some(b)) => a.range.start.cmp(&b.range.start, order),
            };
            let a = if ordering.is_le() { old.next() } else { None };
            let b = if ordering.is_ge() { new.next() } else { None };
            if a != b {
                removed.extend(a.map(|fragment| fragment.range.start.clone()));
                added.extend(b.cloned());
            }
        }
    }

    /// The set with `fragments` instead of these chunks.
    fn with_chunks_replaced(
        &self,
        chunks: std::ops::Range<usize>,
        fragments: Vec<RangeTombstone>,
        order: &KeyOrder,
    ) -> RangeTombstones {
        let newest = fragments.iter().map(|fragment| fragment.seqnos[0]).max().unwrap_or_default();
        let mut set = RangeTombstones { largest_seqno: self.largest_seqno.max(newest), ..self.clone() };
        for chunk in &self.chunks[chunks.clone()] {
            set.len -= chunk.fragments.len();
            set.bytes -= chunk.bytes;
        }
        let chunk_len = if fragments.len() <= CHUNK_LEN_MAX { CHUNK_LEN_MAX } else { CHUNK_LEN };
        let (mut new, mut fragments) = (Vec::new(), fragments.into_iter().peekable());
        while fragments.peek().is_some() {
            let chunk = Chunk::new(fragments.by_ref().take(chunk_len).collect(), order);
            set.len += chunk.fragments.len();
            set.bytes += chunk.bytes;
            new.push(Arc::new(chunk));
        }
        let prefixes: Vec<u64> = new.iter().filter_map(|chunk| chunk.prefixes.first().copied()).collect();
        if order.is_bytewise() {
            set.first_prefixes.splice(chunks.clone(), prefixes);
        }
        set.chunks.splice(chunks, new);
        if cfg!(debug_assertions) {
            set.check_invariants(order);
        }
        set
    }

    /// Panics if the sums differ from the chunks. It looks at the chunks, not at their fragments, because a set is
    /// changed often.
    fn check_invariants(&self, order: &KeyOrder) {
        assert!(self.chunks.iter().all(|chunk| !chunk.fragments.is_empty()), "a chunk has at least one fragment");
        assert_eq!(self.len, self.chunks.iter().map(|chunk| chunk.fragments.len()).sum::<usize>());
        assert_eq!(self.bytes, self.chunks.iter().map(|chunk| chunk.bytes).sum::<u64>());
        assert_eq!(self.first_prefixes.len(), if order.is_bytewise() { self.chunks.len() } else { 0 });
        assert!(order.is_custom() || self.first_prefixes.is_sorted(), "chunks are in key order");
        assert_eq!(self.len == 0, self.chunks.is_empty(), "an empty set has no chunks");
        assert!(self.len == 0 || self.largest_seqno > SeqNo::ZERO, "a range delete has a sequence number");
    }
}

impl Chunk {
    fn new(fragments: Vec<RangeTombstone>, order: &KeyOrder) -> Chunk {
        let bytes = |fragment: &RangeTombstone| {
            let keys = fragment.range.start.key().len() + fragment.range.end.key().len();
            FRAGMENT_BYTES + keys as u64 + SEQNO_BYTES * fragment.seqnos.len() as u64
        };
        let prefixes = match order.is_bytewise() {
            true => fragments.iter().map(|fragment| key_prefix_u64(fragment.range.start.key())).collect(),
            false => Vec::new(),
        };
        debug_assert!((1..=CHUNK_LEN_MAX).contains(&fragments.len()), "a chunk is neither empty nor too long");
        debug_assert!(fragments.iter().all(|fragment| !fragment.seqnos.is_empty()), "a fragment has a range delete");
        let is_valid = |pair: &[RangeTombstone]| pair[0].range.end.cmp(&pair[1].range.start, order).is_le();
        debug_assert!(order.is_custom() || fragments.windows(2).all(is_valid), "fragments are disjoint and in order");
        debug_assert!(
            order.is_custom() || fragments.iter().all(|fragment| !fragment.range.is_empty(order)),
            "a fragment has a position"
        );
        Chunk { bytes: fragments.iter().map(bytes).sum(), fragments, prefixes }
    }
}

/// The number of elements, of `len`, that start before a key. `prefixes`: the first bytes of their starts; empty if the
/// order is not bytewise. `wanted`: the first bytes of the key.
#[inline]
fn search(prefixes: &[u64], wanted: u64, len: usize, starts_before: impl Fn(usize) -> bool) -> usize {
    debug_assert!(prefixes.is_empty() || prefixes.len() == len, "each element has a prefix, or none has");
    let (mut from, mut to) = (0, len);
    if !prefixes.is_empty() {
        from = prefixes.partition_point(|&prefix| prefix < wanted);
        to = from + prefixes[from..].partition_point(|&prefix| prefix == wanted);
    }
    while from < to {
        let middle = from + (to - from) / 2;
        if starts_before(middle) { from = middle + 1 } else { to = middle }
    }
    from
}

/// The first of `seqnos`, newest first, that a reader at `at` sees; 0 if there is none.
#[inline]
fn newest_visible(seqnos: &[SeqNo], at: SeqNo) -> SeqNo {
    seqnos.iter().copied().find(|&seqno| seqno <= at).unwrap_or(SeqNo::ZERO)
}

/// Merges two lists of disjoint fragments in key order.
fn merge<'a>(
    a: impl Iterator<Item = &'a RangeTombstone>,
    b: impl Iterator<Item = &'a RangeTombstone>,
    snapshots: &[SeqNo],
    order: &KeyOrder,
) -> Vec<RangeTombstone> {
    let mut out = FragmentList { fragments: Vec::new(), snapshots, order };
    let (mut a, mut b) = (a.cloned(), b.cloned());
    let (mut next_a, mut next_b) = (a.next(), b.next());
    loop {
        let (mut x, mut y) = match (next_a.take(), next_b.take()) {
            (Some(x), Some(y)) => (x, y),
            (x, y) => {
                x.into_iter().chain(a).chain(y).chain(b).for_each(|fragment| out.push(fragment));
                return out.fragments;
            }
        };
        if x.range.end.cmp(&y.range.start, order).is_le() {
            out.push(x);
            (next_a, next_b) = (a.next(), Some(y));
        } else if y.range.end.cmp(&x.range.start, order).is_le() {
            out.push(y);
            (next_a, next_b) = (Some(x), b.next());
        } else {
            match x.range.start.cmp(&y.range.start, order) {
                Ordering::Less => out.push(x.cut_before(&y.range.start)),
                Ordering::Greater => out.push(y.cut_before(&x.range.start)),
                Ordering::Equal => {}
            }
            let ends = x.range.end.cmp(&y.range.end, order);
            let end = if ends.is_le() { x.range.end.clone() } else { y.range.end.clone() };
            let mut seqnos: Vec<SeqNo> = x.seqnos.iter().chain(&*y.seqnos).copied().collect();
            seqnos.sort_unstable_by(|a, b| b.cmp(a));
            seqnos.dedup();
            out.push(RangeTombstone { seqnos: seqnos.into(), ..x.cut_before(&end) });
            y.range.start = end;
            next_a = if ends.is_gt() { Some(x) } else { a.next() };
            next_b = if ends.is_lt() { Some(y) } else { b.next() };
        }
    }
}

/// Fragments in key order, to which the next one is appended.
struct FragmentList<'a> {
    fragments: Vec<RangeTombstone>,
    snapshots: &'a [SeqNo],
    order: &'a KeyOrder,
}

impl FragmentList<'_> {
    /// Appends a fragment, or joins it with the last one if both are adjacent and have equal sequence numbers.
    fn push(&mut self, mut fragment: RangeTombstone) {
        let start = &fragment.range.start;
        debug_assert!(
            self.order.is_custom()
                || self.fragments.last().is_none_or(|last| last.range.end.cmp(start, self.order).is_le()),
            "fragments are appended in key order"
        );
        prune_seqnos(&mut fragment.seqnos, self.snapshots);
        if let Some(last) = self.fragments.last_mut()
            && last.seqnos == fragment.seqnos
            && last.range.end.cmp(&fragment.range.start, self.order).is_eq()
        {
            last.range.end = fragment.range.end;
            return;
        }
        self.fragments.push(fragment);
    }
}

/// Drops the sequence numbers that no reader needs: those without a snapshot between them and the next newer one.
fn prune_seqnos(seqnos: &mut Arc<[SeqNo]>, snapshots: &[SeqNo]) {
    if seqnos.len() == 1 {
        return;
    }
    debug_assert!(seqnos.is_sorted_by(|a, b| a > b), "the range deletes of a fragment are newest first");
    let mut needed: Vec<SeqNo> = Vec::with_capacity(seqnos.len());
    for &seqno in seqnos.iter() {
        let at = snapshots.partition_point(|&snapshot| snapshot < seqno);
        if needed.last().is_none_or(|&newer| snapshots.get(at).is_some_and(|&snapshot| snapshot < newer)) {
            needed.push(seqno);
        }
    }
    debug_assert_eq!(needed.first(), seqnos.first(), "the newest range delete is always needed");
    if needed.len() < seqnos.len() {
        *seqnos = needed.into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{SeededRng, TestComparator, TestOrder};

    /// A boundary of the keys `k00`..`k40`, whose first bytes are equal or not.
    fn random_boundary(rng: &mut SeededRng) -> KeyBoundary {
        let key = Arc::from(key(rng.below(40)));
        match rng.below(12) {
            0 => KeyBoundary::Min,
            1 => KeyBoundary::Max,
            n if n % 2 == 0 => KeyBoundary::Before(key),
            _ => KeyBoundary::After(key),
        }
    }

    fn key(n: u64) -> Vec<u8> {
        if n < 20 { format!("long prefix {n:02}").into_bytes() } else { vec![n as u8 + 100; 3] }
    }

    /// A set and the list of all range deletes.
    struct Oracle {
        order: KeyOrder,
        set: RangeTombstones,
        all: Vec<(KeyRange, SeqNo)>,
        snapshots: Vec<SeqNo>,
        visible: SeqNo,
    }

    impl Oracle {
        fn new(order: KeyOrder) -> Oracle {
            let (set, all, snapshots) = (RangeTombstones::default(), Vec::new(), Vec::new());
            Oracle { order, set, all, snapshots, visible: SeqNo::ZERO }
        }

        /// The snapshots and the last visible sequence number.
        fn readers(&self) -> Vec<SeqNo> {
            let mut readers = self.snapshots.clone();
            readers.push(self.visible);
            readers.sort_unstable();
            readers.dedup();
            readers
        }

        fn add(&mut self, rng: &mut SeededRng, readers: &[SeqNo]) {
            let (a, b) = (random_boundary(rng), random_boundary(rng));
            let (start, end) = if a.cmp(&b, &self.order).is_lt() { (a, b) } else { (b, a) };
            let range = KeyRange { start, end };
            let newest = self.all.last().map_or(self.visible, |(_, seqno)| *seqno);
            if !range.is_empty(&self.order) {
                let seqno = newest.plus(1 + rng.below(3));
                self.set = self.set.with_range_delete(range.clone(), seqno, readers, &self.order);
                self.all.push((range, seqno));
            }
        }

        fn expected(&self, key: &[u8], at: SeqNo) -> SeqNo {
            let covers = |(range, seqno): &&(KeyRange, SeqNo)| *seqno <= at && range.contains(key, &self.order);
            self.all.iter().filter(covers).map(|(_, seqno)| *seqno).max().unwrap_or_default()
        }

        /// Whether every reader sees the same in the set as in the list.
        fn agrees(&self, set: &RangeTombstones) -> bool {
            let last = self.all.last().map_or(self.visible, |(_, seqno)| *seqno);
            self.readers().into_iter().chain([last]).all(|at| {
                (0..40).map(key).all(|key| {
                    let expected = self.expected(&key, at);
                    let span = set.span(&key, at, &self.order);
                    let inside = span.range.contains(&key, &self.order);
                    set.covering_seqno(&key, at, &self.order) == expected && span.seqno == expected && inside
                })
            })
        }

        /// Publishes, and begins or ends a snapshot.
        fn advance(&mut self, rng: &mut SeededRng) {
            if rng.below(2) == 0 {
                self.visible = self.all.last().map_or(self.visible, |(_, seqno)| *seqno);
            }
            match rng.below(4) {
                0 => self.snapshots.push(self.visible),
                1 if !self.snapshots.is_empty() => {
                    let at = rng.below(self.snapshots.len());
                    self.snapshots.swap_remove(at);
                }
                _ => {}
            }
        }
    }

    fn orders() -> [KeyOrder; 2] {
        [KeyOrder::bytewise(), KeyOrder::custom(Arc::new(TestOrder::Reversed))]
    }

    #[test]
    fn every_reader_sees_its_range_deletes() {
        for (seed, order) in (1..60u64).flat_map(|seed| orders().map(|order| (seed, order))) {
            let (mut rng, mut oracle) = (SeededRng::new(seed), Oracle::new(order));
            for _ in 0..30 {
                let readers = oracle.readers();
                oracle.add(&mut rng, &readers);
                assert!(oracle.agrees(&oracle.set), "seed {seed}");
                oracle.advance(&mut rng);
            }
            let pruned = oracle.set.pruned(&oracle.readers(), &oracle.order);
            assert!(oracle.agrees(&pruned) && pruned.len() <= oracle.set.len());
            let fragments = oracle.set.iter().cloned().rev_vec();
            let restored = RangeTombstones::from_fragments(fragments, &oracle.order).unwrap();
            assert!(oracle.agrees(&restored));
            assert_eq!((restored.len(), restored.bytes()), (oracle.set.len(), oracle.set.bytes()));
        }
    }

    trait RevVec: Iterator {
        fn rev_vec(self) -> Vec<Self::Item>
        where
            Self: Sized,
        {
            let mut all: Vec<Self::Item> = self.collect();
            all.reverse();
            all
        }
    }
    impl<I: Iterator> RevVec for I {}

    /// Planted bug: range deletes are dropped without regard to the readers.
    #[test]
    fn oracle_finds_lost_range_deletes() {
        let found = (1..20u64).any(|seed| {
            let (mut rng, mut oracle) = (SeededRng::new(seed), Oracle::new(KeyOrder::bytewise()));
            (0..30).any(|_| {
                oracle.add(&mut rng, &[]);
                oracle.advance(&mut rng);
                !oracle.agrees(&oracle.set)
            })
        });
        assert!(found);
    }

    #[test]
    fn merged_sets_equal_one_set() {
        for (seed, order) in (1..60u64).flat_map(|seed| orders().map(|order| (seed, order))) {
            let (mut rng, mut oracle) = (SeededRng::new(seed), Oracle::new(order));
            let mut flushed = RangeTombstones::default();
            for _ in 0..6 {
                oracle.set = RangeTombstones::default(); // a new memtable
                for _ in 0..4 {
                    let readers = oracle.readers();
                    oracle.add(&mut rng, &readers);
                    oracle.advance(&mut rng);
                }
                let merged = flushed.merged_with(&oracle.set, &oracle.readers(), &oracle.order);
                assert!(oracle.agrees(&merged), "seed {seed}");
                let (removed, added) = flushed.difference(&merged, &oracle.order);
                let stays = |fragment: &RangeTombstone| !removed.contains(&fragment.range.start);
                let mut fragments: Vec<RangeTombstone> = flushed.iter().filter(|f| stays(f)).cloned().collect();
                fragments.extend(added);
                let restored = RangeTombstones::from_fragments(fragments, &oracle.order).unwrap();
                assert!(restored.iter().eq(merged.iter()));
                flushed = merged;
            }
        }
    }

    fn range(start: &[u8], end: &[u8]) -> KeyRange {
        KeyRange { start: KeyBoundary::Before(start.into()), end: KeyBoundary::Before(end.into()) }
    }

    #[test]
    fn covers_only_what_fragments_join() {
        let order = KeyOrder::bytewise();
        let add = |set: RangeTombstones, start: &str, end: &str, seqno| {
            set.with_range_delete(range(start.as_bytes(), end.as_bytes()), SeqNo(seqno), &[SeqNo(seqno - 1)], &order)
        };
        let set = add(add(add(RangeTombstones::default(), "b", "d", 5), "d", "f", 7), "g", "i", 9);
        let covers =
            |a: &str, b: &str, above: u64| set.covers(a.as_bytes(), b.as_bytes(), &order, |seqno| seqno > SeqNo(above));
        assert!(covers("b", "ee", 4) && covers("g", "h", 8) && covers("d", "d", 6));
        assert!(!covers("b", "ee", 5), "one fragment is too old");
        assert!(!covers("a", "c", 4) && !covers("e", "g", 4) && !covers("b", "f", 4), "a key is in a gap");
        let names = |a: &str, b: &str| {
            let found = set.overlapping(a.as_bytes(), b.as_bytes(), &order);
            found.map(|fragment| fragment.seqnos[0].0).collect::<Vec<_>>()
        };
        assert_eq!((names("a", "z"), names("c", "d"), names("f", "f")), (vec![5, 7, 9], vec![5, 7], vec![]));
        assert_eq!((names("h", "z"), names("i", "z"), names("a", "a")), (vec![9], vec![], vec![]));
    }

    #[test]
    fn many_fragments_stay_searchable() {
        let order = KeyOrder::bytewise();
        let number = |n: u64| format!("key {n:06}").into_bytes();
        let mut set = RangeTombstones::default();
        for n in (0..2000u64).map(|n| n * 7919 % 2000) {
            let seqno = set.largest_seqno().plus(1);
            set = set.with_range_delete(range(&number(10 * n), &number(10 * n + 5)), seqno, &[seqno], &order);
        }
        assert_eq!(set.len(), 2000);
        assert!(set.chunks.iter().all(|chunk| chunk.fragments.len() <= CHUNK_LEN_MAX));
        for n in 0..20_000 {
            assert_eq!(!set.covering(&number(n), &order).is_empty(), n % 10 < 5, "{n}");
        }
        // Two range deletes over all leave one fragment: no reader needs the others.
        for _ in 0..2 {
            let seqno = set.largest_seqno().plus(1);
            set = set.with_range_delete(range(b"", b"z"), seqno, &[SeqNo(seqno.0 - 1)], &order);
        }
        assert_eq!((set.len(), set.iter().next().unwrap().seqnos.len()), (1, 2));
    }

    /// Regression: the search for a newer range delete compared each fragment before the range, so the check of a
    /// transaction grew with the number of all range deletes.
    #[test]
    fn search_for_newer_begins_at_its_range() {
        let counting = Arc::new(TestComparator::new(TestOrder::Bytes));
        let order = KeyOrder::custom(counting.clone());
        let number = |n: u64| format!("{n:06}").into_bytes();
        let mut set = RangeTombstones::default();
        for n in 0..2_000u64 {
            set = set.with_range_delete(range(&number(10 * n), &number(10 * n + 5)), SeqNo(n + 1), &[SeqNo(n)], &order);
        }
        let mut rng = SeededRng::new(1);
        let boundary = |rng: &mut SeededRng| match (rng.below(30), Arc::<[u8]>::from(number(rng.below(21_000)))) {
            (0, _) => KeyBoundary::Min,
            (1, _) => KeyBoundary::Max,
            (n, key) if n % 2 == 0 => KeyBoundary::Before(key),
            (_, key) => KeyBoundary::After(key),
        };
        for _ in 0..1_000 {
            let (range, since) =
                (KeyRange { start: boundary(&mut rng), end: boundary(&mut rng) }, SeqNo(rng.below(2_000)));
            let is_newer = |f: &&RangeTombstone| f.seqnos[0] > since && f.range.overlaps(&range, &order);
            let expected = set.iter().find(is_newer).filter(|_| !range.is_empty(&order));
            let found = set.newer_key_in(&range, since, &order);
            assert_eq!(found.is_some(), expected.is_some(), "{range:?} since {since:?}");
            let first = |fragment: &RangeTombstone| match fragment.range.start.cmp(&range.start, &order).is_gt() {
                true => fragment.range.start.key().to_vec(),
                false => range.start.key().to_vec(),
            };
            assert_eq!(found, expected.map(first));
        }
        let before = counting.comparisons();
        assert!(set.newer_key_in(&range(&number(19_001), &number(19_002)), SeqNo(10), &order).is_some());
        assert!(set.newer_key_in(&range(&number(19_006), &number(19_009)), SeqNo(10), &order).is_none());
        let compared = counting.comparisons() - before;
        assert!(compared < 100, "{compared} comparisons");
    }

    #[test]
    fn overlapping_fragments_are_corruption() {
        let fragment =
            |start: &[u8], end: &[u8]| RangeTombstone { range: range(start, end), seqnos: Arc::new([SeqNo(1)]) };
        for bad in [vec![fragment(b"a", b"c"), fragment(b"b", b"d")], vec![fragment(b"b", b"b")]] {
            let error = RangeTombstones::from_fragments(bad, &KeyOrder::bytewise()).unwrap_err();
            assert_eq!(error.kind(), crate::base::ErrorKind::Corruption);
        }
    }
}

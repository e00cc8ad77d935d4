//! Iterators over the keys that are visible at one sequence number: the newest version of each key, without deleted
//! keys.
//!
//! Each direction has its own steps, because the versions of a key come newest first in the forward direction and
//! oldest first in the backward direction. The iterator compares every key that it passes with its bound, including
//! deleted and invisible keys. The work of a step is therefore limited by the bounds.

use std::cmp::Ordering;
use std::ops::Bound;

use crate::base::key::split_expiry;
use crate::base::key_range::KeyBoundary;
use crate::base::shared_bytes::{SHARED_LEN_MIN, SharedBytes};
use crate::base::{EntryRef, Error, ErrorKind, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::iter::dead_ranges::{DeadKeyStep, DeadKeyWalk, DeadRangesView};
use crate::iter::iter::InternalIter;
use crate::iter::merge::MergeDirection;
use crate::iter::range_filter::{seek_before, seek_behind, seek_to_versions_of};

/// After this many hidden versions of one key in a row, the iterator seeks past the rest of them.
const MAX_SEQUENTIAL_SKIPS: usize = 8;

/// Iterates over the keys that are visible at one sequence number, [`Forward`] or [`Backward`].
pub(crate) struct VisibleIter<C, D> {
    inner: C,
    order: KeyOrder,
    snapshot_seqno: SeqNo,
    state: D,
    /// No key beyond this bound is returned.
    limit: Bound<Vec<u8>>,
    /// Whether the inner iterator returns visible entries only. Then it is at the current entry, and nothing is copied.
    is_resolved: bool,
    valid: bool,
    /// Records that expire at this time or before are hidden as deleted ones are.
    now_ms: u64,
    dead_ranges: Option<DeadRangesView>,
    /// Made at the first deleted key.
    walk: Option<Box<DeadKeyWalk>>,
}

/// A direction, with the state of a [`VisibleIter`] that iterates in it.
pub(crate) trait Direction: Default {
    /// The bound at which an iteration begins. It ends at the other one.
    fn start(bounds: &(Bound<Vec<u8>>, Bound<Vec<u8>>)) -> &Bound<Vec<u8>>;

    /// The bound at which an iteration ends.
    fn end(bounds: &(Bound<Vec<u8>>, Bound<Vec<u8>>)) -> &Bound<Vec<u8>>;

    /// Compares two keys in the order in which this direction returns them.
    fn cmp(order: &KeyOrder, a: &[u8], b: &[u8]) -> Ordering;

    /// Whether an iteration that ends at `limit` returns `key`.
    #[inline]
    fn is_within(order: &KeyOrder, limit: &Bound<Vec<u8>>, key: &[u8]) -> bool {
        match limit {
            Bound::Unbounded => true,
            Bound::Included(limit) => Self::cmp(order, key, limit).is_le(),
            Bound::Excluded(limit) => Self::cmp(order, key, limit).is_lt(),
        }
    }

    /// Moves to the first visible key, in this direction, that is at or behind `start`.
    fn seek<C: InternalIter>(iter: &mut VisibleIter<C, Self>, start: Bound<&[u8]>) -> Result<()>;

    /// Moves to the next visible key in this direction.
    fn step<C: InternalIter>(iter: &mut VisibleIter<C, Self>) -> Result<()>;

    /// As [`find_visible`](VisibleIter::find_visible). Skips dead ranges and learns them; `walk` is used from the first
    /// deleted key.
    fn pass_hidden_keys<C: InternalIter>(
        iter: &mut VisibleIter<C, Self>,
        walk: &mut Option<Box<DeadKeyWalk>>,
    ) -> Result<()>;

    /// The copy of the current entry; `None` if the inner iterator is at that entry.
    #[inline]
    fn copied(&self) -> Option<&Backward> {
        None
    }
}

/// Ascending order.
#[derive(Default)]
pub(crate) struct Forward {
    /// The last key that was returned or found deleted, whose older versions are skipped. Not set after a record with
    /// sequence number 0, because no older version follows it.
    saved_key: Vec<u8>,
    has_saved_key: bool,
}

impl Direction for Forward {
    fn start(bounds: &(Bound<Vec<u8>>, Bound<Vec<u8>>)) -> &Bound<Vec<u8>> {
        &bounds.0
    }

    fn end(bounds: &(Bound<Vec<u8>>, Bound<Vec<u8>>)) -> &Bound<Vec<u8>> {
        &bounds.1
    }

    #[inline]
    fn cmp(order: &KeyOrder, a: &[u8], b: &[u8]) -> Ordering {
        order.cmp(a, b)
    }

    fn seek<C: InternalIter>(iter: &mut VisibleIter<C, Forward>, start: Bound<&[u8]>) -> Result<()> {
        iter.state.has_saved_key = false;
        iter.valid = false;
        match start {
            Bound::Unbounded => iter.inner.seek_to_first()?,
            Bound::Included(key) => iter.inner.seek(InternalKey::before_versions_of(key))?,
            Bound::Excluded(key) => {
                iter.inner.seek(InternalKey::new(key, SeqNo::ZERO))?;
                iter.state.has_saved_key = true; // the iterator may be at a record with sequence number 0
                key.clone_into(&mut iter.state.saved_key);
            }
        }
        iter.find_visible()
    }

    #[inline]
    fn step<C: InternalIter>(iter: &mut VisibleIter<C, Forward>) -> Result<()> {
        debug_assert!(iter.valid, "only a valid iterator is moved");
        iter.valid = false;
        if iter.is_resolved {
            let (order, end) = (&iter.order, &iter.limit);
            iter.valid = iter.inner.next_key()?.is_some_and(|(key, _)| Forward::is_within(order, end, key.user_key));
            return Ok(());
        }
        // Most entries are the only version of their key.
        let Some((key, kind)) = iter.inner.next_key()? else { return Ok(()) };
        if kind.is_plain_value()
            && key.seqno <= iter.snapshot_seqno
            && Forward::is_within(&iter.order, &iter.limit, key.user_key)
            && !(iter.state.has_saved_key && iter.order.keys_equal(&iter.state.saved_key, key.user_key))
        {
            iter.state.has_saved_key = key.seqno > SeqNo::ZERO;
            if iter.state.has_saved_key {
                iter.state.saved_key.clear();
                iter.state.saved_key.extend_from_slice(key.user_key);
            }
            iter.valid = true;
            return Ok(());
        }
        iter.find_visible()
    }

    fn pass_hidden_keys<C: InternalIter>(
        iter: &mut VisibleIter<C, Forward>,
        walk: &mut Option<Box<DeadKeyWalk>>,
    ) -> Result<()> {
        let VisibleIter { inner, order, snapshot_seqno: at, limit, now_ms, .. } = iter;
        let Forward { saved_key, has_saved_key } = &mut iter.state;
        let (mut skips, mut has_begun) = (0, false);
        loop {
            let head = inner.head().map(|(key, kind)| {
                let known = *has_saved_key && order.keys_equal(saved_key, key.user_key);
                (key, kind, known)
            });
            let is_within = |key: InternalKey<'_>| Forward::is_within(order, limit, key.user_key);
            let Some((key, kind, known)) = head.filter(|(key, _, known)| *known || is_within(*key)) else {
                if let Some(walk) = walk {
                    walk.finish_at_bound(limit.as_ref());
                }
                return Ok(());
            };
            if let Some(walk) = walk.as_mut().filter(|walk| walk.is_watching()) {
                walk.read(key.seqno);
                if kind.is_value() && key.seqno > *at {
                    walk.finish(KeyBoundary::Before(key.user_key.into()));
                }
            }
            if !known && key.seqno <= *at {
                *has_saved_key = key.seqno > SeqNo::ZERO;
                if *has_saved_key {
                    key.user_key.clone_into(saved_key);
                }
                iter.valid = kind.is_plain_value() || is_unexpired(inner, kind, *now_ms)?;
                if iter.valid {
                    if let Some(walk) = walk.as_mut().filter(|walk| walk.is_watching()) {
                        walk.finish(KeyBoundary::Before(key.user_key.into()));
                    }
                    return Ok(());
                }
                skips = 0;
                if let Some(dead_ranges) = &iter.dead_ranges {
                    if !std::mem::replace(&mut has_begun, true) {
                        DeadKeyWalk::begin(walk, dead_ranges, order, MergeDirection::Forward, (*at, *now_ms));
                    }
                    let step = walk.as_mut().map(|walk| walk.pass(key.user_key, kind.is_value()));
                    if let Some(DeadKeyStep::SeekPast(boundary)) = step {
                        *has_saved_key = false;
                        seek_behind(inner, &boundary, order)?;
                        continue;
                    }
                }
            }
            skips += 1;
            if known && skips > MAX_SEQUENTIAL_SKIPS {
                skips = 0;
                if key.seqno > SeqNo::ZERO {
                    inner.seek(InternalKey::new(saved_key, SeqNo::ZERO))?;
                    continue;
                }
            }
            inner.next()?;
        }
    }
}

/// Descending order. The newest visible version of a key is known only when the inner iterator reaches another key.
/// Therefore the current entry is copied, unless the inner iterator knows that it is the newest version of its key.
pub(crate) struct Backward {
    /// Whether the current entry is copied, and the inner iterator is at another key.
    is_copied: bool,
    key: Vec<u8>,
    kind: RecordKind,
    /// Empty if the value is shared.
    value: Vec<u8>,
    shared_value: Option<SharedBytes>,
}

impl Default for Backward {
    fn default() -> Backward {
        Backward { is_copied: false, key: Vec::new(), kind: RecordKind::Delete, value: Vec::new(), shared_value: None }
    }
}

impl Direction for Backward {
    fn start(bounds: &(Bound<Vec<u8>>, Bound<Vec<u8>>)) -> &Bound<Vec<u8>> {
        &bounds.1
    }

    fn end(bounds: &(Bound<Vec<u8>>, Bound<Vec<u8>>)) -> &Bound<Vec<u8>> {
        &bounds.0
    }

    #[inline]
    fn cmp(order: &KeyOrder, a: &[u8], b: &[u8]) -> Ordering {
        order.cmp(a, b).reverse()
    }

    fn seek<C: InternalIter>(iter: &mut VisibleIter<C, Backward>, start: Bound<&[u8]>) -> Result<()> {
        iter.valid = false;
        iter.state.is_copied = false;
        match start {
            Bound::Unbounded => iter.inner.seek_to_last()?,
            Bound::Excluded(key) => iter.inner.seek_before(InternalKey::before_versions_of(key))?,
            Bound::Included(key) => seek_to_versions_of(&mut iter.inner, key, &iter.order)?,
        }
        iter.find_visible()
    }

    #[inline]
    fn step<C: InternalIter>(iter: &mut VisibleIter<C, Backward>) -> Result<()> {
        debug_assert!(iter.valid, "only a valid iterator is moved");
        iter.valid = false;
        if iter.is_resolved {
            iter.inner.prev()?;
            let (order, end) = (&iter.order, &iter.limit);
            iter.valid = iter.inner.head().is_some_and(|(key, _)| Backward::is_within(order, end, key.user_key));
            return Ok(());
        }
        if !std::mem::replace(&mut iter.state.is_copied, false) {
            iter.inner.prev()?;
        }
        // Most entries are the only version of their key.
        if let Some((key, kind)) = iter.inner.newest_version()
            && kind.is_plain_value()
            && key.seqno <= iter.snapshot_seqno
            && Backward::is_within(&iter.order, &iter.limit, key.user_key)
        {
            iter.valid = true;
            return Ok(());
        }
        iter.find_visible()
    }

    /// Reads all versions of one key after another, until a key has a visible value.
    #[inline]
    fn pass_hidden_keys<C: InternalIter>(
        iter: &mut VisibleIter<C, Backward>,
        walk: &mut Option<Box<DeadKeyWalk>>,
    ) -> Result<()> {
        iter.valid = false;
        let mut has_begun = false;
        loop {
            if iter.is_resolved {
                let head = iter.inner.head();
                iter.valid = head.is_some_and(|(key, _)| Backward::is_within(&iter.order, &iter.limit, key.user_key));
                return Ok(());
            }
            let oldest = iter.inner.current();
            let mut version = oldest.filter(|entry| Backward::is_within(&iter.order, &iter.limit, entry.user_key));
            if version.is_none() {
                if let Some(walk) = walk.as_mut() {
                    walk.finish_at_bound(iter.limit.as_ref());
                }
                return Ok(());
            }
            let mut is_oldest = true;
            let (mut is_deleted, mut has_expired, mut has_newer_value) = (false, false, false);
            while let Some(entry) = version {
                if !is_oldest && !iter.order.keys_equal(entry.user_key, &iter.state.key) {
                    break;
                }
                if is_oldest || entry.seqno <= iter.snapshot_seqno {
                    iter.state.key.clear();
                    iter.state.key.extend_from_slice(entry.user_key);
                    is_oldest = false;
                }
                if let Some(walk) = walk.as_mut().filter(|walk| walk.is_watching()) {
                    walk.read(entry.seqno);
                    has_newer_value |= entry.kind.is_value() && entry.seqno > iter.snapshot_seqno;
                }
                if entry.seqno <= iter.snapshot_seqno {
                    iter.valid = entry.kind.is_plain_value() || is_unexpired(&iter.inner, entry.kind, iter.now_ms)?;
                    is_deleted = !iter.valid;
                    has_expired = is_deleted && entry.kind.is_value();
                    iter.state.kind = entry.kind;
                    iter.state.value.clear();
                    iter.state.shared_value =
                        if entry.value.len() >= SHARED_LEN_MIN { iter.inner.shared_value() } else { None };
                    if iter.state.shared_value.is_none() {
                        iter.state.value.extend_from_slice(entry.value);
                    }
                }
                iter.inner.prev()?;
                version = iter.inner.current();
            }
            if let Some(walk) = walk.as_mut().filter(|walk| walk.is_watching() && (iter.valid || has_newer_value)) {
                walk.finish(KeyBoundary::After(iter.state.key.as_slice().into()));
            }
            if iter.valid {
                iter.state.is_copied = true;
                return Ok(());
            }
            let Some(dead_ranges) = iter.dead_ranges.as_ref().filter(|_| is_deleted) else { continue };
            let (order, moment) = (&iter.order, (iter.snapshot_seqno, iter.now_ms));
            if !std::mem::replace(&mut has_begun, true) {
                DeadKeyWalk::begin(walk, dead_ranges, order, MergeDirection::Backward, moment);
            }
            let step = walk.as_mut().map(|walk| walk.pass(&iter.state.key, has_expired));
            if let Some(DeadKeyStep::SeekPast(boundary)) = step {
                seek_before(&mut iter.inner, &boundary, order)?;
            }
        }
    }

    #[inline]
    fn copied(&self) -> Option<&Backward> {
        self.is_copied.then_some(self)
    }
}

impl<C: InternalIter, D: Direction> VisibleIter<C, D> {
    pub(crate) fn new(inner: C, order: KeyOrder, at: SeqNo, limit: Bound<Vec<u8>>) -> VisibleIter<C, D> {
        let is_resolved = inner.is_visibility_resolved();
        VisibleIter {
            inner,
            order,
            snapshot_seqno: at,
            state: D::default(),
            limit,
            is_resolved,
            valid: false,
            now_ms: 0,
            dead_ranges: None,
            walk: None,
        }
    }

    /// Hides the records that have expired at `now_ms`.
    pub(crate) fn with_time(self, now_ms: u64) -> VisibleIter<C, D> {
        VisibleIter { now_ms, ..self }
    }

    /// Lets the iterator skip dead ranges, and learn them.
    pub(crate) fn with_dead_ranges(self, dead_ranges: Option<DeadRangesView>) -> VisibleIter<C, D> {
        VisibleIter { dead_ranges, ..self }
    }

    /// Moves to the first visible entry at or behind the current one.
    fn find_visible(&mut self) -> Result<()> {
        let mut walk = self.walk.take();
        debug_assert!(walk.as_ref().is_none_or(|walk| !walk.is_watching()), "a step ends the watch that it begins");
        let found = D::pass_hidden_keys(self, &mut walk);
        self.walk = walk.filter(|_| found.is_ok());
        found
    }

    #[inline]
    pub(crate) fn valid(&self) -> bool {
        self.valid
    }

    #[inline]
    fn copied(&self) -> Option<&Backward> {
        self.state.copied()
    }

    /// The current key. Reads no value.
    #[inline]
    pub(crate) fn key(&self) -> &[u8] {
        debug_assert!(self.valid, "only a valid iterator has a key");
        match self.copied() {
            Some(copied) => &copied.key,
            None => self.inner.head().map_or(&[], |(key, _)| key.user_key),
        }
    }

    /// The key whose operands could not be merged, if a step or a seek has failed with `error` for that reason.
    #[cold]
    pub(crate) fn key_of_failed_merge(&self, error: &Error) -> Option<&[u8]> {
        let (key, _) = self.inner.head().filter(|_| error.kind() == ErrorKind::MergeFailed)?;
        Some(key.user_key)
    }

    /// The current key, record kind, and value or blob pointer, as the kind says.
    #[inline]
    pub(crate) fn entry(&self) -> (&[u8], RecordKind, &[u8]) {
        debug_assert!(self.valid, "only a valid iterator has an entry");
        if let Some(Backward { key, kind, value, shared_value, .. }) = self.copied() {
            return (key, *kind, shared_value.as_deref().unwrap_or(value));
        }
        let entry = self.inner.entry();
        (entry.user_key, entry.kind, entry.value)
    }

    /// The current value, if it can be shared without a copy.
    pub(crate) fn shared_value(&self) -> Option<SharedBytes> {
        debug_assert!(self.valid, "only a valid iterator has a value");
        match self.copied() {
            Some(copied) => copied.shared_value.clone(),
            None => self.inner.shared_value(),
        }
    }
}

impl<C: InternalIter> VisibleIter<C, Forward> {
    /// Whether [`next_ref`](VisibleIter::next_ref) may be called.
    #[inline]
    pub(crate) fn has_next_ref(&self) -> bool {
        self.is_resolved && self.valid
    }

    /// Moves to the next visible key and returns its entry.
    #[inline]
    pub(crate) fn next_ref(&mut self) -> Result<Option<EntryRef<'_>>> {
        debug_assert!(self.has_next_ref(), "only a valid iterator that resolves visibility is moved by reference");
        self.valid = false;
        let (order, end) = (&self.order, &self.limit);
        let entry = self.inner.next_ref()?.filter(|entry| Forward::is_within(order, end, entry.user_key));
        self.valid = entry.is_some();
        Ok(entry)
    }
}

/// Whether the current entry of `inner`, which has this kind, is a value that has not expired at `now_ms`.
#[cold]
fn is_unexpired(inner: &impl InternalIter, kind: RecordKind, now_ms: u64) -> Result<bool> {
    Ok(kind.is_value() && split_expiry(kind, inner.entry().value)?.0 > now_ms)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::testing::seeded_rng::SeededRng;
    use crate::testing::vec_iter::VecIter;

    type Model = BTreeMap<Vec<u8>, Vec<u8>>;
    type Entry = (Vec<u8>, SeqNo, RecordKind, Vec<u8>);

    /// Every key `a`..`h` with up to 30 versions, some deleted; the model is the state at each sequence number.
    fn history() -> (Vec<Entry>, Vec<Model>) {
        let (mut entries, mut models) = (Vec::new(), vec![Model::new()]);
        let mut rng = SeededRng::new(1);
        for seqno in 1..=150u64 {
            let key = vec![b'a' + rng.below(8)];
            let mut model = models.last().unwrap().clone();
            let kind = if rng.chance_one_in(3) { RecordKind::Delete } else { RecordKind::Put };
            let kind = if kind == RecordKind::Put && seqno.is_multiple_of(2) { RecordKind::BlobPointer } else { kind };
            let value = if kind.is_value() { seqno.to_string().into_bytes() } else { Vec::new() };
            match kind.is_value() {
                true => model.insert(key.clone(), value.clone()),
                false => model.remove(&key),
            };
            entries.push((key, SeqNo(seqno), kind, value));
            models.push(model);
        }
        (entries, models)
    }

    /// The value, whose kind is that of its version.
    fn shown(kind: RecordKind, value: &[u8]) -> Vec<u8> {
        let seqno: u64 = std::str::from_utf8(value).unwrap().parse().unwrap();
        assert_eq!(kind == RecordKind::BlobPointer, seqno.is_multiple_of(2));
        value.to_vec()
    }

    fn entries_from<D: Direction>(mut iter: VisibleIter<VecIter, D>, start: Bound<&[u8]>) -> Vec<(Vec<u8>, Vec<u8>)> {
        let mut seen = Vec::new();
        D::seek(&mut iter, start).unwrap();
        while iter.valid() {
            let (key, kind, value) = iter.entry();
            assert_eq!(key, iter.key());
            seen.push((key.to_vec(), shown(kind, value)));
            D::step(&mut iter).unwrap();
        }
        seen
    }

    #[test]
    fn every_seqno_is_visible_in_both_directions() {
        let (entries, models) = history();
        let order = KeyOrder::bytewise();
        for (at, model) in models.iter().enumerate() {
            let all: Vec<_> = model.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
            for letter in b'`'..=b'i' {
                let key = [letter];
                for bound in [Bound::Unbounded, Bound::Included(&key[..]), Bound::Excluded(&key[..])] {
                    let iter = || VecIter::new(order.clone(), entries.clone());
                    let at = SeqNo(at as u64);
                    let up = VisibleIter::<_, Forward>::new(iter(), order.clone(), at, Bound::Unbounded);
                    let seen = entries_from(up, bound);
                    let above = |k: &Vec<u8>| match bound {
                        Bound::Unbounded => true,
                        Bound::Included(b) => k.as_slice() >= b,
                        Bound::Excluded(b) => k.as_slice() > b,
                    };
                    assert_eq!(seen, all.iter().filter(|(k, _)| above(k)).cloned().collect::<Vec<_>>());

                    let down = VisibleIter::<_, Backward>::new(iter(), order.clone(), at, Bound::Unbounded);
                    let seen = entries_from(down, bound);
                    let below = |k: &Vec<u8>| match bound {
                        Bound::Unbounded => true,
                        Bound::Included(b) => k.as_slice() <= b,
                        Bound::Excluded(b) => k.as_slice() < b,
                    };
                    assert_eq!(seen, all.iter().rev().filter(|(k, _)| below(k)).cloned().collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn excluded_bound_hides_record_with_seqno_zero() {
        let order = KeyOrder::bytewise();
        let entries = vec![
            (b"a".to_vec(), SeqNo::ZERO, RecordKind::Put, vec![1]),
            (b"b".to_vec(), SeqNo::ZERO, RecordKind::Put, vec![2]),
        ];
        let iter = || VecIter::new(order.clone(), entries.clone());
        let mut up = VisibleIter::<_, Forward>::new(iter(), order.clone(), SeqNo(9), Bound::Unbounded);
        Forward::seek(&mut up, Bound::Excluded(b"a")).unwrap();
        assert_eq!(up.key(), b"b");
        let mut down = VisibleIter::<_, Backward>::new(iter(), order.clone(), SeqNo(9), Bound::Unbounded);
        Backward::seek(&mut down, Bound::Included(b"a")).unwrap();
        assert_eq!(down.entry(), (&b"a"[..], RecordKind::Put, &[1][..]));
    }

    /// Counts the entries that the inner iterator returns.
    struct Counting(VecIter, usize);

    impl InternalIter for Counting {
        fn seek_to_first(&mut self) -> Result<()> {
            self.0.seek_to_first()
        }
        fn seek_to_last(&mut self) -> Result<()> {
            self.0.seek_to_last()
        }
        fn seek(&mut self, target: InternalKey<'_>) -> Result<()> {
            self.0.seek(target)
        }
        fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()> {
            self.0.seek_before(target)
        }
        fn next(&mut self) -> Result<()> {
            self.1 += 1;
            self.0.next()
        }
        fn prev(&mut self) -> Result<()> {
            self.1 += 1;
            self.0.prev()
        }
        fn valid(&self) -> bool {
            self.0.valid()
        }
        fn entry(&self) -> EntryRef<'_> {
            self.0.entry()
        }
    }

    /// After and before the bounds there are only deleted keys, keys newer than the sequence number, or many versions
    /// of one key. An iterator once passed all of them before it compared a key with its bound.
    #[test]
    fn steps_are_bounded_when_nothing_is_visible() {
        type Version = fn(u64) -> Entry;
        let key = |n: u64| n.to_be_bytes().to_vec();
        let removed: Version = |n| (n.to_be_bytes().to_vec(), SeqNo(5), RecordKind::Delete, vec![]);
        let newer: Version = |n| (n.to_be_bytes().to_vec(), SeqNo(50), RecordKind::Put, vec![]);
        let versions: Version = |n| (1_000u64.to_be_bytes().to_vec(), SeqNo(n), RecordKind::Delete, vec![]);
        for version in [removed, newer, versions] {
            let entries: Vec<Entry> = (1_000..2_000).map(version).collect();
            let inner = || Counting(VecIter::new(KeyOrder::bytewise(), entries.clone()), 0);
            for end in [Bound::Included(key(999)), Bound::Excluded(key(1_000))] {
                let mut up = VisibleIter::<_, Forward>::new(inner(), KeyOrder::bytewise(), SeqNo(9), end);
                Forward::seek(&mut up, Bound::Included(&key(5))).unwrap();
                assert!(!up.valid() && up.inner.1 <= 1, "{} steps", up.inner.1);
            }
            for start in [Bound::Included(key(2_001)), Bound::Excluded(key(2_000))] {
                let mut down = VisibleIter::<_, Backward>::new(inner(), KeyOrder::bytewise(), SeqNo(9), start);
                Backward::seek(&mut down, Bound::Included(&key(3_000))).unwrap();
                assert!(!down.valid() && down.inner.1 <= 1, "{} steps", down.inner.1);
            }
        }
    }
}

//! Hides the entries of one source that a range delete covers. Where all entries of the source in a covered span are
//! older than the range delete, the iterator seeks past the span and does not read it.

use std::ops::Bound;
use std::sync::Arc;

use crate::base::key_range::{KeyBoundary, KeyRange};
use crate::base::shared_bytes::SharedBytes;
use crate::base::{EntryRef, ErrorKind, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::iter::iter::InternalIter;
use crate::iter::range_tombstones::{RangeTombstoneSpan, RangeTombstones};

/// An iterator over one source that can skip entries by their sequence numbers.
pub(crate) trait SkippingIter: InternalIter {
    /// Moves from the current entry, which is before `boundary`, to the next entry that is behind `boundary`, or may
    /// have the sequence number `seqno` or a higher one. Returns false if that may be the current entry, and then does
    /// not move.
    fn skip_forward(&mut self, boundary: &KeyBoundary, seqno: SeqNo, order: &KeyOrder) -> Result<bool>;

    /// The same backward, from an entry behind `boundary`.
    fn skip_backward(&mut self, boundary: &KeyBoundary, seqno: SeqNo, order: &KeyOrder) -> Result<bool>;

    /// The part of the source that has the current entry, for example a table of a run.
    fn part(&self) -> usize {
        0
    }

    /// A range with the key of the current entry in which all entries of its part are older than `seqno`, if an earlier
    /// iterator has [noted](SkippingIter::note_older_range) one.
    fn older_range(&self, _seqno: SeqNo, _order: &KeyOrder) -> Option<KeyRange> {
        None
    }

    /// Tells that all entries of `part` in `range` have at most the sequence number `largest`.
    fn note_older_range(&self, _part: usize, _range: KeyRange, _largest: SeqNo) {}
}

/// An iterator notes the range of a row of covered entries that it has passed one by one, if it has at least this
/// many.
const NOTED_LEN_MIN: u64 = if cfg!(test) { 3 } else { 64 };
/// It looks for a noted range at the first of this many entries.
const LOOKUP_INTERVAL: u64 = if cfg!(test) { 2 } else { 16 };

/// A row of covered entries of one part that an iterator has passed one by one.
#[derive(Default)]
struct CoveredRow {
    part: usize,
    first: Vec<u8>,
    largest_seqno: SeqNo,
    len: u64,
}

impl CoveredRow {
    fn pass(&mut self, part: usize, key: InternalKey<'_>) {
        if self.len == 0 {
            self.part = part;
            key.user_key.clone_into(&mut self.first);
            self.largest_seqno = key.seqno;
        }
        debug_assert!(self.part == part, "a row is in one part");
        self.largest_seqno = self.largest_seqno.max(key.seqno);
        self.len += 1;
    }

    fn is_lookup_due(&self) -> bool {
        self.len.is_multiple_of(LOOKUP_INTERVAL)
    }

    /// Ends a row of a forward iterator, which has passed everything up to `end`. Entries with the first key, or with
    /// that of the end, may be newer.
    fn end_forward(&mut self, iter: &impl SkippingIter, end: Option<&[u8]>) {
        if std::mem::take(&mut self.len) >= NOTED_LEN_MIN {
            let (start, end) = (self.first.as_slice().into(), end.map(Arc::from));
            let end = end.map_or(KeyBoundary::Max, KeyBoundary::Before);
            let range = KeyRange { start: KeyBoundary::After(start), end };
            iter.note_older_range(self.part, range, self.largest_seqno);
        }
    }

    /// The same backward.
    fn end_backward(&mut self, iter: &impl SkippingIter, end: Option<&[u8]>) {
        if std::mem::take(&mut self.len) >= NOTED_LEN_MIN {
            let (start, end) = (end.map(Arc::from), self.first.as_slice().into());
            let start = start.map_or(KeyBoundary::Min, KeyBoundary::After);
            let range = KeyRange { start, end: KeyBoundary::Before(end) };
            iter.note_older_range(self.part, range, self.largest_seqno);
        }
    }
}

/// Moves to the first entry behind `boundary`.
pub(crate) fn seek_behind<I: InternalIter>(iter: &mut I, boundary: &KeyBoundary, order: &KeyOrder) -> Result<()> {
    match boundary {
        KeyBoundary::Min => iter.seek_to_first(),
        KeyBoundary::Before(key) => iter.seek(InternalKey::before_versions_of(key)),
        KeyBoundary::After(key) => {
            iter.seek(InternalKey::new(key, SeqNo::ZERO))?;
            while iter.head().is_some_and(|(at, _)| order.keys_equal(at.user_key, key)) {
                iter.next()?;
            }
            Ok(())
        }
        KeyBoundary::Max => {
            iter.seek_to_last()?;
            // The iterator of merged values may be at the newest version of the last key, in front of older ones.
            while iter.valid() {
                iter.next()?;
            }
            Ok(())
        }
    }
}

/// Moves to the last entry before `boundary`.
pub(crate) fn seek_before<I: InternalIter>(iter: &mut I, boundary: &KeyBoundary, order: &KeyOrder) -> Result<()> {
    match boundary {
        KeyBoundary::Before(key) => iter.seek_before(InternalKey::before_versions_of(key)),
        KeyBoundary::Max => iter.seek_to_last(),
        KeyBoundary::After(key) => seek_to_versions_of(iter, key, order),
        KeyBoundary::Min => {
            unless_merge_failed(iter.seek_to_first())?;
            if iter.valid() { iter.prev() } else { Ok(()) }
        }
    }
}

/// Moves to the last entry at or before all versions of `key`. The merge operator may fail for the key behind them,
/// which is not read.
pub(crate) fn seek_to_versions_of<I: InternalIter>(iter: &mut I, key: &[u8], order: &KeyOrder) -> Result<()> {
    unless_merge_failed(iter.seek(InternalKey::new(key, SeqNo::ZERO)))?;
    while iter.head().is_some_and(|(at, _)| order.keys_equal(at.user_key, key)) {
        unless_merge_failed(iter.next())?;
    }
    if iter.valid() { iter.prev() } else { iter.seek_to_last() }
}

/// The result of a move to an entry whose value is not read. After `MergeFailed` the iterator is at the newest operand
/// of the key.
fn unless_merge_failed(moved: Result<()>) -> Result<()> {
    moved.or_else(|error| if error.kind() == ErrorKind::MergeFailed { Ok(()) } else { Err(error) })
}

/// The entries of `iter` that no range delete covers.
pub(crate) fn hide_covered(
    iter: impl SkippingIter + 'static,
    tombstones: Option<RangeTombstoneReader>,
    bounds: (Bound<&Vec<u8>>, Bound<&Vec<u8>>),
) -> Box<dyn InternalIter> {
    match tombstones {
        Some(tombstones) => Box::new(RangeDeleteFilter::new(iter, tombstones, bounds)),
        None => Box::new(iter),
    }
}

/// The range tombstones that apply to a source: its own and those of newer sources.
#[derive(Clone)]
pub(crate) struct RangeTombstoneReader {
    sets: Arc<[Arc<RangeTombstones>]>,
    at: SeqNo,
    order: KeyOrder,
}

impl RangeTombstoneReader {
    /// `None` if there are no range tombstones. The reader reads at `at`.
    pub(crate) fn new(sets: Vec<Arc<RangeTombstones>>, at: SeqNo, order: KeyOrder) -> Option<RangeTombstoneReader> {
        let sets: Vec<_> = sets.into_iter().filter(|set| !set.is_empty()).collect();
        (!sets.is_empty()).then(|| RangeTombstoneReader { sets: sets.into(), at, order })
    }

    /// The keys around `key` that have the same range tombstones.
    pub(crate) fn span(&self, key: &[u8]) -> RangeTombstoneSpan {
        let mut sets = self.sets.iter();
        let first = sets.next().map(|set| set.span(key, self.at, &self.order));
        let all = KeyRange { start: KeyBoundary::Min, end: KeyBoundary::Max };
        let mut span = first.unwrap_or(RangeTombstoneSpan { range: all, seqno: SeqNo::ZERO });
        for set in sets {
            let other = set.span(key, self.at, &self.order);
            span.range = span.range.intersection(other.range, &self.order);
            span.seqno = span.seqno.max(other.seqno);
        }
        debug_assert!(self.order.is_custom() || span.range.contains(key, &self.order), "the key is in its span");
        debug_assert!(span.seqno <= self.at, "the reader sees the range delete of a span");
        span
    }
}

/// Iterates over the entries of a source that no range delete covers. It may return covered entries outside of its
/// bounds, because it does not move beyond them.
pub(crate) struct RangeDeleteFilter<C> {
    inner: C,
    tombstones: RangeTombstoneReader,
    /// The bounds of the keys that the reader requests.
    bounds: KeyRange,
    /// The span of the current entry; `None` after a seek.
    span: Option<RangeTombstoneSpan>,
    /// Empty between two calls.
    row: CoveredRow,
}

impl<C: SkippingIter> RangeDeleteFilter<C> {
    pub(crate) fn new(
        inner: C,
        tombstones: RangeTombstoneReader,
        (start, end): (Bound<&Vec<u8>>, Bound<&Vec<u8>>),
    ) -> RangeDeleteFilter<C> {
        let own = |key: &Vec<u8>| Arc::from(key.as_slice());
        let bounds = KeyRange::between(start.map(own), end.map(own));
        RangeDeleteFilter { inner, tombstones, bounds, span: None, row: CoveredRow::default() }
    }

    /// Moves forward from a covered entry to the first one that is not covered.
    fn settle_forward(&mut self) -> Result<()> {
        let RangeDeleteFilter { inner, tombstones, bounds, span, row } = self;
        let order = &tombstones.order;
        row.len = 0; // it is not, after an error
        while let Some((key, _)) = inner.head() {
            let known = span.as_ref().is_some_and(|span| span.range.end.cmp_key(key.user_key, order).is_gt());
            if !known {
                row.end_forward(inner, Some(key.user_key));
                *span = Some(tombstones.span(key.user_key));
            }
            let Some(RangeTombstoneSpan { range, seqno }) = span else { return Ok(()) };
            if key.seqno >= *seqno || bounds.end.cmp_key(key.user_key, order).is_lt() {
                row.end_forward(inner, Some(key.user_key));
                return Ok(());
            }
            let nearer = if range.end.cmp(&bounds.end, order).is_lt() { &range.end } else { &bounds.end };
            if row.len > 0 && row.part != inner.part() {
                row.end_forward(inner, None);
            }
            if row.is_lookup_due()
                && let Some(older) = inner.older_range(*seqno, order)
            {
                row.end_forward(inner, Some(key.user_key));
                let nearer = if older.end.cmp(nearer, order).is_lt() { &older.end } else { nearer };
                seek_behind(inner, nearer, order)?;
                continue;
            }
            row.pass(inner.part(), key);
            match inner.skip_forward(nearer, *seqno, order)? {
                true => row.len = 0,
                false => inner.next()?,
            }
        }
        row.end_forward(inner, None);
        Ok(())
    }

    /// Moves backward from a covered entry to the last one that is not covered.
    fn settle_backward(&mut self) -> Result<()> {
        let RangeDeleteFilter { inner, tombstones, bounds, span, row } = self;
        let order = &tombstones.order;
        row.len = 0; // it is not, after an error
        while let Some((key, _)) = inner.head() {
            let known = span.as_ref().is_some_and(|span| span.range.start.cmp_key(key.user_key, order).is_lt());
            if !known {
                row.end_backward(inner, Some(key.user_key));
                *span = Some(tombstones.span(key.user_key));
            }
            let Some(RangeTombstoneSpan { range, seqno }) = span else { return Ok(()) };
            if key.seqno >= *seqno || bounds.start.cmp_key(key.user_key, order).is_gt() {
                row.end_backward(inner, Some(key.user_key));
                return Ok(());
            }
            let nearer = if range.start.cmp(&bounds.start, order).is_gt() { &range.start } else { &bounds.start };
            if row.len > 0 && row.part != inner.part() {
                row.end_backward(inner, None);
            }
            if row.is_lookup_due()
                && let Some(older) = inner.older_range(*seqno, order)
            {
                row.end_backward(inner, Some(key.user_key));
                let nearer = if older.start.cmp(nearer, order).is_gt() { &older.start } else { nearer };
                seek_before(inner, nearer, order)?;
                continue;
            }
            row.pass(inner.part(), key);
            match inner.skip_backward(nearer, *seqno, order)? {
                true => row.len = 0,
                false => inner.prev()?,
            }
        }
        row.end_backward(inner, None);
        Ok(())
    }
}

impl<C: SkippingIter> InternalIter for RangeDeleteFilter<C> {
    fn seek_to_first(&mut self) -> Result<()> {
        self.span = None;
        self.inner.seek_to_first()?;
        self.settle_forward()
    }

    fn seek_to_last(&mut self) -> Result<()> {
        self.span = None;
        self.inner.seek_to_last()?;
        self.settle_backward()
    }

    fn seek(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.span = None;
        self.inner.seek(target)?;
        self.settle_forward()
    }

    fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.span = None;
        self.inner.seek_before(target)?;
        self.settle_backward()
    }

    fn next(&mut self) -> Result<()> {
        self.inner.next()?;
        self.settle_forward()
    }

    fn prev(&mut self) -> Result<()> {
        self.inner.prev()?;
        self.settle_backward()
    }

    fn next_key(&mut self) -> Result<Option<(InternalKey<'_>, RecordKind)>> {
        self.next()?;
        Ok(self.inner.head())
    }

    fn valid(&self) -> bool {
        self.inner.valid()
    }

    fn entry(&self) -> EntryRef<'_> {
        self.inner.entry()
    }

    fn current(&self) -> Option<EntryRef<'_>> {
        self.inner.current()
    }

    fn head(&self) -> Option<(InternalKey<'_>, RecordKind)> {
        self.inner.head()
    }

    fn shared_value(&self) -> Option<SharedBytes> {
        self.inner.shared_value()
    }
}

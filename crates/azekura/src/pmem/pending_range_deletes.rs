//! Range deletes that were applied to a pool and whose records are not removed yet.
//!
//! The group-commit leader adds a range delete when it applies it. After it has published the commit it removes the
//! covered records and clears the set, before it makes any other commit and before single changes resume. So all
//! pending range deletes belong to one group, and no record is put while the covered records are removed. Where the WAL
//! is replayed or followed, the covered records are removed although the commit may not be visible yet.
//!
//! While range deletes are pending, readers that see them hide the covered records. A reader takes its sequence number
//! first, then loads [`first`](PendingRangeDeletes::first) or the set, then searches. If it does not find a published
//! range delete here, the covered records were removed before its search.

use std::sync::Arc;

use crate::base::key_range::KeyRange;
use crate::base::{KeyOrder, SeqNo};
use crate::iter::range_tombstones::RangeTombstones;
use crate::mem::atomic::{AtomicU64, Ordering, SCHEDULE_EXPLORATION};
use crate::mem::epoch::EpochCell;

/// The value of [`PendingRangeDeletes::first`] if nothing is pending; above every sequence number.
const NO_SEQNO: SeqNo = SeqNo(u64::MAX);

/// The pending range deletes of one pool. The group-commit leader changes it, any thread reads it.
pub(crate) struct PendingRangeDeletes {
    first: AtomicU64,
    set: EpochCell<RangeTombstones>,
}

impl PendingRangeDeletes {
    pub(crate) fn new() -> PendingRangeDeletes {
        PendingRangeDeletes { first: AtomicU64::new(NO_SEQNO.0), set: EpochCell::new(Arc::default()) }
    }

    /// The lowest pending sequence number; above every sequence number if there is none.
    #[inline]
    pub(crate) fn first(&self) -> SeqNo {
        SeqNo(self.first.load(Ordering::Acquire))
    }

    /// Adds a range delete that is not visible yet. `visible` is the last visible sequence
    /// number: readers read at it or before, or later at the end of the group.
    pub(crate) fn add(&self, range: KeyRange, seqno: SeqNo, visible: SeqNo, order: &KeyOrder) {
        debug_assert!(
            SCHEDULE_EXPLORATION || self.first() == NO_SEQNO || self.first() < seqno,
            "range deletes are added in the order of their sequence numbers"
        );
        self.set.store(Arc::new(self.set.load().with_range_delete(range, seqno, &[visible], order)));
        if self.first() == NO_SEQNO {
            self.first.store(seqno.0, Ordering::Release);
        }
    }

    /// Clears the set: the covered records are removed.
    pub(crate) fn clear(&self) {
        self.first.store(NO_SEQNO.0, Ordering::Release);
        self.set.store(Arc::default());
    }

    pub(crate) fn set(&self) -> Arc<RangeTombstones> {
        self.set.load_arc()
    }

    /// The set, if a reader at `at` sees any of it. The reader searches afterwards.
    #[inline]
    pub(crate) fn set_at(&self, at: SeqNo) -> Option<Arc<RangeTombstones>> {
        if self.first() <= at { Some(self.set()) } else { None }
    }

    /// Whether the record `seqno` of `key`, found by a reader at `at`, is hidden. `first` is the lowest pending
    /// sequence number before the search. `None` if those range deletes are complete meanwhile: the record may have
    /// been found before its removal, so the reader searches again.
    #[cold]
    pub(crate) fn hides(&self, first: SeqNo, key: &[u8], seqno: SeqNo, at: SeqNo, order: &KeyOrder) -> Option<bool> {
        let set = self.set.load();
        (self.first() == first).then(|| set.covering_seqno(key, at, order) > seqno)
    }
}

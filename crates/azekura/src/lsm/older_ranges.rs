//! Ranges of keys of a table whose entries are all older than a sequence number, as scans have found.
//!
//! A table may have covered entries and a newer one: a compaction keeps covered entries that a snapshot needs. Its
//! highest sequence number then does not tell that a covered range may be skipped, so a scan passes the entries one by
//! one. It remembers the range here, and later scans seek past it. A table never changes, so nothing is forgotten
//! before the table is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::key_range::KeyRange;
use crate::base::sync::lock;
use crate::base::{KeyOrder, SeqNo};

/// Maximum number of ranges of a table. The one that was added first is replaced first.
const RANGES_MAX: usize = 8;
/// A range between longer keys, in bytes, is not remembered.
const KEY_LEN_MAX: usize = 1 << 10;

#[derive(Clone)]
struct OlderRange {
    range: KeyRange,
    /// The highest sequence number in the range.
    largest_seqno: SeqNo,
}

/// The ranges of one table. Thread safe. Keys are compared without the lock, because a comparator may scan its own
/// partition.
#[derive(Default)]
pub(crate) struct OlderRanges {
    has_ranges: AtomicBool,
    ranges: Mutex<Arc<Vec<OlderRange>>>,
}

impl OlderRanges {
    /// A range with `key` whose entries are all older than `seqno`.
    pub(crate) fn find(&self, key: &[u8], seqno: SeqNo, order: &KeyOrder) -> Option<KeyRange> {
        if !self.has_ranges.load(Ordering::Acquire) {
            return None;
        }
        let ranges = Arc::clone(&lock(&self.ranges));
        let found = ranges.iter().find(|older| older.largest_seqno < seqno && older.range.contains(key, order));
        found.map(|older| older.range.clone())
    }

    /// Remembers that all entries of `range` have at most `largest_seqno`.
    pub(crate) fn add(&self, range: KeyRange, largest_seqno: SeqNo) {
        if range.start.key().len().max(range.end.key().len()) > KEY_LEN_MAX {
            return;
        }
        let mut ranges = lock(&self.ranges);
        let replaced = usize::from(ranges.len() == RANGES_MAX);
        let mut new: Vec<OlderRange> = ranges[replaced..].to_vec();
        new.push(OlderRange { range, largest_seqno });
        debug_assert!(new.len() <= RANGES_MAX, "the ranges of a table are bounded");
        *ranges = Arc::new(new);
        self.has_ranges.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::key_range::KeyBoundary;

    #[test]
    fn ranges_are_found_by_key_and_seqno() {
        let (ranges, order) = (OlderRanges::default(), KeyOrder::bytewise());
        let between = |low: u8, high: u8| KeyRange {
            start: KeyBoundary::After([low][..].into()),
            end: KeyBoundary::Before([high][..].into()),
        };
        let finds = |key: u8, seqno| ranges.find(&[key], SeqNo(seqno), &order).is_some();
        assert!(!finds(5, 9));
        ranges.add(between(1, 9), SeqNo(7));
        assert!(finds(5, 8) && !finds(5, 7) && !finds(1, 8) && !finds(9, 8));
        ranges.add(
            KeyRange { start: KeyBoundary::Before(vec![5; KEY_LEN_MAX + 1].into()), end: KeyBoundary::Max },
            SeqNo(1),
        );
        assert!(!finds(5, 7), "a range between long keys is not remembered");
        (0..RANGES_MAX as u8).for_each(|n| ranges.add(between(10 * n + 10, 10 * n + 19), SeqNo(1)));
        assert!(!finds(5, 8) && finds(15, 8) && finds(85, 2));
    }
}

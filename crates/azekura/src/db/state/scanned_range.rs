//! The part of its bounds that an iterator of a transaction has read.

use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::KeyOrder;

/// A range of keys.
pub(crate) type OwnedRange = (Bound<Vec<u8>>, Bound<Vec<u8>>);

/// An iterator that has sought more often, or with more bytes of keys, counts as having read all of its bounds.
const PARTS_MAX: usize = 64;
const PART_BYTES_MAX: usize = 64 << 10;

/// The memory of all scanned ranges of one transaction, in bytes, and its limit. Thread safe.
#[derive(Debug)]
pub(crate) struct ScanMemory {
    bytes: AtomicU64,
    bytes_max: u64,
}

impl ScanMemory {
    pub(crate) fn new(bytes_max: u64) -> ScanMemory {
        ScanMemory { bytes: AtomicU64::new(0), bytes_max }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn is_exceeded(&self) -> bool {
        self.bytes() > self.bytes_max
    }
}

/// The keys that an iterator has read: the entries that it returned, and the gaps between them, where it found no
/// entries.
///
/// Its memory is counted. When the ranges of the transaction take more than is allowed, the next step makes this range
/// count as all of the bounds, without a list of keys.
#[derive(Debug)]
pub(crate) struct ScannedRange {
    memory: Arc<ScanMemory>,
    /// Bytes that this range has added to `memory`.
    counted: u64,
    order: KeyOrder,
    bounds: OwnedRange,
    front: ScannedEnd,
    back: ScannedEnd,
    /// What was read before the ends were moved by a seek.
    parts: Vec<OwnedRange>,
    part_bytes: usize,
    /// Whether all of the bounds count as read.
    is_whole: bool,
}

/// What one end of the iterator has read since its last seek: from its start through a key, or to the other bound.
#[derive(Debug)]
struct ScannedEnd {
    start: Bound<Vec<u8>>,
    through: Option<Vec<u8>>,
    is_exhausted: bool,
}

impl ScannedEnd {
    fn new(start: Bound<Vec<u8>>) -> ScannedEnd {
        ScannedEnd { start, through: None, is_exhausted: false }
    }

    fn key_capacity(&self) -> usize {
        bound_capacity(&self.start) + self.through.as_ref().map_or(0, Vec::capacity)
    }

    fn step(&mut self, key: Option<&[u8]>) {
        match key {
            Some(key) => {
                let through = self.through.get_or_insert_default();
                through.clear();
                through.extend_from_slice(key);
            }
            None => self.is_exhausted = true,
        }
    }
}

impl ScannedRange {
    pub(crate) fn new(memory: Arc<ScanMemory>, order: KeyOrder, bounds: OwnedRange) -> ScannedRange {
        let (front, back) = (ScannedEnd::new(bounds.0.clone()), ScannedEnd::new(bounds.1.clone()));
        let (counted, parts, part_bytes, is_whole) = (0, Vec::new(), 0, false);
        let mut range = ScannedRange { memory, counted, order, bounds, front, back, parts, part_bytes, is_whole };
        range.count_memory();
        range
    }

    /// Counts the memory that the range takes now.
    fn count_memory(&mut self) {
        let unused = (self.parts.capacity() - self.parts.len()) * size_of::<OwnedRange>();
        let ends = self.front.key_capacity() + self.back.key_capacity();
        let bounds = bound_capacity(&self.bounds.0) + bound_capacity(&self.bounds.1);
        let bytes = (size_of::<ScannedRange>() + ends + bounds + self.part_bytes + unused) as u64;
        debug_assert!(self.counted <= self.memory.bytes(), "the memory of each range is counted");
        if bytes != self.counted {
            self.memory.bytes.fetch_add(bytes, Ordering::Relaxed);
            self.memory.bytes.fetch_sub(self.counted, Ordering::Relaxed);
            self.counted = bytes;
        }
    }

    /// After a change: counts the memory, and makes all of the bounds count as read if it is too much.
    fn limit_memory(&mut self) {
        self.count_memory();
        if self.memory.is_exceeded() {
            self.become_whole();
            self.count_memory();
        }
    }

    fn become_whole(&mut self) {
        self.is_whole = true;
        (self.parts, self.part_bytes) = (Vec::new(), 0);
        (self.front, self.back) = (ScannedEnd::new(Bound::Unbounded), ScannedEnd::new(Bound::Unbounded));
    }

    /// The front returned `key`, or nothing: then everything from its start to the end of the bounds was read, by
    /// this end or the other one.
    pub(crate) fn step_front(&mut self, key: Option<&[u8]>) {
        if !self.is_whole {
            self.front.step(key);
            self.limit_memory();
        }
    }

    pub(crate) fn step_back(&mut self, key: Option<&[u8]>) {
        if !self.is_whole {
            self.back.step(key);
            self.limit_memory();
        }
    }

    /// Both ends begin anew at the bounds, because a step failed.
    pub(crate) fn restart(&mut self) {
        if self.is_whole {
            return;
        }
        for part in [self.front_part(), self.back_part()] {
            self.add_part(part);
        }
        if !self.is_whole {
            self.front = ScannedEnd::new(self.bounds.0.clone());
            self.back = ScannedEnd::new(self.bounds.1.clone());
        }
        self.count_memory();
    }

    /// The front was moved to `key`.
    pub(crate) fn seek_front(&mut self, key: &[u8]) {
        let part = self.front_part();
        self.add_part(part);
        if self.is_whole {
            return self.count_memory();
        }
        let is_inside = match &self.bounds.0 {
            Bound::Unbounded => true,
            Bound::Included(start) | Bound::Excluded(start) => self.order.cmp(key, start).is_gt(),
        };
        self.front = ScannedEnd::new(if is_inside { Bound::Included(key.to_vec()) } else { self.bounds.0.clone() });
        self.count_memory();
    }

    /// The back was moved to `key`.
    pub(crate) fn seek_back(&mut self, key: &[u8]) {
        let part = self.back_part();
        self.add_part(part);
        if self.is_whole {
            return self.count_memory();
        }
        let is_inside = match &self.bounds.1 {
            Bound::Unbounded => true,
            Bound::Included(end) | Bound::Excluded(end) => self.order.cmp(key, end).is_lt(),
        };
        self.back = ScannedEnd::new(if is_inside { Bound::Included(key.to_vec()) } else { self.bounds.1.clone() });
        self.count_memory();
    }

    fn add_part(&mut self, part: Option<OwnedRange>) {
        debug_assert!(!self.is_whole || self.parts.is_empty(), "a range that was read whole has no parts");
        let Some(part) = part.filter(|_| !self.is_whole) else { return };
        self.part_bytes += range_bytes(&part);
        self.parts.push(part);
        if self.parts.len() > PARTS_MAX || self.part_bytes > PART_BYTES_MAX {
            self.become_whole();
        }
        debug_assert_eq!(
            self.part_bytes,
            self.parts.iter().map(range_bytes).sum(),
            "the memory of the parts is counted"
        );
    }

    fn front_part(&self) -> Option<OwnedRange> {
        let end = match &self.front {
            ScannedEnd { is_exhausted: true, .. } => self.bounds.1.clone(),
            ScannedEnd { through, .. } => Bound::Included(through.clone()?),
        };
        Some((self.front.start.clone(), end))
    }

    fn back_part(&self) -> Option<OwnedRange> {
        let start = match &self.back {
            ScannedEnd { is_exhausted: true, .. } => self.bounds.0.clone(),
            ScannedEnd { through, .. } => Bound::Included(through.clone()?),
        };
        Some((start, self.back.start.clone()))
    }

    /// Returns the ranges that were read.
    pub(crate) fn ranges(&self) -> Vec<OwnedRange> {
        if self.is_whole {
            return vec![self.bounds.clone()];
        }
        self.parts.iter().cloned().chain(self.front_part()).chain(self.back_part()).collect()
    }
}

impl Drop for ScannedRange {
    fn drop(&mut self) {
        self.memory.bytes.fetch_sub(self.counted, Ordering::Relaxed);
    }
}

fn bound_capacity(bound: &Bound<Vec<u8>>) -> usize {
    match bound {
        Bound::Included(key) | Bound::Excluded(key) => key.capacity(),
        Bound::Unbounded => 0,
    }
}

/// Memory of a range in bytes.
pub(crate) fn range_bytes((start, end): &OwnedRange) -> usize {
    size_of::<OwnedRange>() + bound_capacity(start) + bound_capacity(end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::allocation_counter::allocated_bytes;

    fn show(range: &ScannedRange) -> Vec<String> {
        let name = |bound: &Bound<Vec<u8>>| match bound {
            Bound::Included(key) => format!("={}", String::from_utf8_lossy(key)),
            Bound::Excluded(key) => format!("~{}", String::from_utf8_lossy(key)),
            Bound::Unbounded => "*".to_string(),
        };
        range.ranges().iter().map(|(start, end)| format!("{} {}", name(start), name(end))).collect()
    }

    fn scanned(start: &str, end: &str) -> ScannedRange {
        let bounds = (Bound::Included(start.into()), Bound::Excluded(end.into()));
        ScannedRange::new(Arc::new(ScanMemory::new(u64::MAX)), KeyOrder::bytewise(), bounds)
    }

    #[test]
    fn only_what_was_returned_counts() {
        let mut range = scanned("b", "y");
        assert!(show(&range).is_empty());
        range.step_front(Some(b"c"));
        range.step_front(Some(b"d"));
        assert_eq!(show(&range), ["=b =d"]);
        range.step_back(Some(b"x"));
        assert_eq!(show(&range), ["=b =d", "=x ~y"]);
        range.step_front(None);
        assert_eq!(show(&range), ["=b ~y", "=x ~y"]);
    }

    #[test]
    fn seeks_begin_a_new_part() {
        let mut range = scanned("b", "y");
        range.step_front(Some(b"c"));
        range.seek_front(b"m");
        assert_eq!(show(&range), ["=b =c"]);
        range.step_front(Some(b"n"));
        range.seek_front(b"a"); // before the bounds
        range.step_front(None);
        assert_eq!(show(&range), ["=b =c", "=m =n", "=b ~y"]);
        let mut range = scanned("b", "y");
        range.seek_back(b"z"); // after the bounds
        range.step_back(Some(b"x"));
        range.seek_back(b"k");
        range.step_back(None);
        assert_eq!(show(&range), ["=x ~y", "=b =k"]);
    }

    /// Regression: a seek of one end after a failed step also moves the other end back to its bound. The iterator then
    /// no longer counted what the other end had read.
    #[test]
    fn restart_keeps_what_both_ends_read() {
        let mut range = scanned("b", "y");
        range.step_front(Some(b"c"));
        range.step_back(Some(b"m"));
        range.restart();
        range.seek_front(b"d");
        range.step_back(Some(b"x"));
        assert_eq!(show(&range), ["=b =c", "=m ~y", "=x ~y"]);
    }

    /// Regression: each iterator counted as 1 KiB, whatever keys it stored. Above the limit, iterators store no keys.
    #[test]
    fn memory_is_counted_and_limited() {
        let memory = Arc::new(ScanMemory::new(1 << 20));
        let before = allocated_bytes();
        let key = |n: usize| n.to_be_bytes().repeat(100);
        let mut ranges = Vec::with_capacity(400);
        for n in 0..400 {
            let bounds = (Bound::Included(key(n)), Bound::Unbounded);
            let mut range = ScannedRange::new(Arc::clone(&memory), KeyOrder::bytewise(), bounds);
            for step in 0..20 {
                range.seek_front(&key(n + step));
                range.step_front(Some(&key(n + step)));
                range.step_back(Some(&key(1_000 - step)));
            }
            ranges.push(range);
            let stack = ranges.capacity() * size_of::<ScannedRange>();
            let allocated = (allocated_bytes() - before) as u64 - stack as u64;
            assert!(allocated <= memory.bytes(), "{allocated} bytes are allocated, {} counted", memory.bytes());
            assert!(memory.bytes() <= 2 * allocated + 2_000 * ranges.len() as u64);
        }
        assert!(memory.bytes() < (1 << 20) + 400 * 1_500, "{} bytes", memory.bytes());
        assert!(!ranges[0].is_whole && ranges[399].is_whole);
        drop(ranges);
        assert_eq!(memory.bytes(), 0);
    }

    #[test]
    fn many_seeks_count_as_the_whole_range() {
        let mut range = scanned("b", "y");
        for _ in 0..=PARTS_MAX {
            range.seek_front(b"k");
            range.step_front(Some(b"k"));
        }
        range.seek_front(b"l");
        assert_eq!(show(&range), ["=b ~y"]);
    }
}

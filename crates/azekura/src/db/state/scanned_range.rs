//! The part of its bounds that an iterator of a transaction has read.

use std::ops::Bound;

use crate::base::KeyOrder;

/// A range of keys.
pub(crate) type OwnedRange = (Bound<Vec<u8>>, Bound<Vec<u8>>);

/// An iterator that has sought more often, or with more bytes of keys, counts as having read all of its bounds.
const PARTS_MAX: usize = 64;
const PART_BYTES_MAX: usize = 64 << 10;

/// The keys that an iterator has read: the entries that it returned, and the gaps between them, where it found no
/// entries.
#[derive(Debug)]
pub(crate) struct ScannedRange {
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
    pub(crate) fn new(order: KeyOrder, bounds: OwnedRange) -> ScannedRange {
        let (front, back) = (ScannedEnd::new(bounds.0.clone()), ScannedEnd::new(bounds.1.clone()));
        ScannedRange { order, bounds, front, back, parts: Vec::new(), part_bytes: 0, is_whole: false }
    }

    /// The front returned `key`, or nothing: then everything from its start to the end of the bounds was read, by
    /// this end or the other one.
    pub(crate) fn step_front(&mut self, key: Option<&[u8]>) {
        self.front.step(key);
    }

    pub(crate) fn step_back(&mut self, key: Option<&[u8]>) {
        self.back.step(key);
    }

    /// Both ends begin anew at the bounds, because a step failed.
    pub(crate) fn restart(&mut self) {
        for part in [self.front_part(), self.back_part()] {
            self.add_part(part);
        }
        self.front = ScannedEnd::new(self.bounds.0.clone());
        self.back = ScannedEnd::new(self.bounds.1.clone());
    }

    /// The front was moved to `key`.
    pub(crate) fn seek_front(&mut self, key: &[u8]) {
        let part = self.front_part();
        self.add_part(part);
        let is_inside = match &self.bounds.0 {
            Bound::Unbounded => true,
            Bound::Included(start) | Bound::Excluded(start) => self.order.cmp(key, start).is_gt(),
        };
        self.front = ScannedEnd::new(if is_inside { Bound::Included(key.to_vec()) } else { self.bounds.0.clone() });
    }

    /// The back was moved to `key`.
    pub(crate) fn seek_back(&mut self, key: &[u8]) {
        let part = self.back_part();
        self.add_part(part);
        let is_inside = match &self.bounds.1 {
            Bound::Unbounded => true,
            Bound::Included(end) | Bound::Excluded(end) => self.order.cmp(key, end).is_lt(),
        };
        self.back = ScannedEnd::new(if is_inside { Bound::Included(key.to_vec()) } else { self.bounds.1.clone() });
    }

    fn add_part(&mut self, part: Option<OwnedRange>) {
        let Some(part) = part.filter(|_| !self.is_whole) else { return };
        self.part_bytes += range_bytes(&part);
        self.parts.push(part);
        if self.parts.len() > PARTS_MAX || self.part_bytes > PART_BYTES_MAX {
            self.is_whole = true;
            self.parts.clear();
        }
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

/// Approximate memory of a range in bytes.
pub(crate) fn range_bytes((start, end): &OwnedRange) -> usize {
    let key_len = |bound: &Bound<Vec<u8>>| match bound {
        Bound::Included(key) | Bound::Excluded(key) => key.len(),
        Bound::Unbounded => 0,
    };
    size_of::<OwnedRange>() + key_len(start) + key_len(end)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        ScannedRange::new(KeyOrder::bytewise(), bounds)
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

    /// Regression: a seek of one end behind a failed step also moves the other end back to its bound, and what that end
    /// had read was forgotten.
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

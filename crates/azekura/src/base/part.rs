//! Bytes that somebody keeps, and parts of them that are handed on without a copy.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// A value of this length or more, in bytes, may be handed on as a [`Part`]; a smaller one is copied.
pub(crate) const LARGE: usize = 4 << 10;

/// Bytes that never change, and stay where they are for as long as they are kept.
pub(crate) trait Whole: Send + Sync {
    fn bytes(&self) -> &[u8];
}

/// A part of a whole, which it keeps.
#[derive(Clone)]
pub(crate) struct Part {
    whole: Arc<dyn Whole>,
    /// Below 4 GiB.
    start: u32,
    len: u32,
}

impl Part {
    /// None for a range that ends 4 GiB behind the start or later: those bytes have to be copied.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub(crate) fn new(whole: Arc<dyn Whole>, range: Range<usize>) -> Option<Part> {
        assert!(range.start <= range.end && range.end <= whole.bytes().len(), "a part lies within its whole");
        let (start, len) = place(&range)?;
        Some(Part { whole, start, len })
    }

    /// A part of the part.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub(crate) fn part(&self, range: Range<usize>) -> Part {
        assert!(range.start <= range.end && range.end <= self.len(), "a part lies within its whole");
        let (start, len) = (self.start + range.start as u32, range.len() as u32);
        Part { whole: Arc::clone(&self.whole), start, len }
    }
}

/// Start and length of a range, if both and the end have 32 bits.
fn place(range: &Range<usize>) -> Option<(u32, u32)> {
    u32::try_from(range.end).ok()?;
    Some((range.start as u32, range.len() as u32)) // neither is beyond the end
}

impl Deref for Part {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.whole.bytes()[self.start as usize..][..self.len as usize]
    }
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Part({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Letters(Vec<u8>);

    impl Whole for Letters {
        fn bytes(&self) -> &[u8] {
            &self.0
        }
    }

    #[test]
    fn parts_of_parts_keep_the_whole() {
        let whole = Arc::new(Letters((0..200).collect()));
        let part = Part::new(Arc::clone(&whole) as Arc<dyn Whole>, 50..150).unwrap();
        let inner = part.part(10..61);
        assert_eq!((&*part, &*inner), (&whole.0[50..150], &whole.0[60..111]));
        assert_eq!(inner.as_ptr(), whole.0[60..].as_ptr());
        assert!(part.part(100..100).is_empty());
        drop((whole, part));
        assert_eq!(inner[50], 110);
    }

    #[test]
    #[should_panic(expected = "within its whole")]
    fn a_part_of_a_part_ends_with_it() {
        let part = Part::new(Arc::new(Letters(vec![7; 100])), 10..20).unwrap();
        let _behind = part.part(5..11);
    }

    /// A value of 4 GiB - 1, which is legal, stands in its block behind its key and so ends behind 4 GiB: sharing it
    /// panicked.
    #[test]
    fn what_ends_behind_4_gib_is_no_part() {
        let most = u32::MAX as usize;
        assert_eq!(place(&(9..most)), Some((9, u32::MAX - 9)));
        assert_eq!(place(&(most..most)), Some((u32::MAX, 0)));
        assert_eq!(place(&(0..most)), Some((0, u32::MAX)));
        assert_eq!(place(&(1..most + 1)), None);
        assert_eq!(place(&(14..most + 14)), None);
    }
}

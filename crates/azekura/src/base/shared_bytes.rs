//! Bytes with an owner, and parts of them that are returned without a copy.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// A value of this length or more, in bytes, may be handed on as a [`SharedBytes`]; a smaller one is copied.
pub(crate) const SHARED_LEN_MIN: usize = 4 << 10;

/// Bytes that never change, and stay where they are for as long as they are kept.
pub(crate) trait BytesOwner: Send + Sync {
    fn bytes(&self) -> &[u8];
}

/// A part of a whole, which it keeps.
#[derive(Clone)]
pub(crate) struct SharedBytes {
    owner: Arc<dyn BytesOwner>,
    /// Below 4 GiB.
    start: u32,
    len: u32,
}

impl SharedBytes {
    /// None for a range that ends 4 GiB behind the start or later: those bytes have to be copied.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub(crate) fn new(whole: Arc<dyn BytesOwner>, range: Range<usize>) -> Option<SharedBytes> {
        assert!(range.start <= range.end && range.end <= whole.bytes().len(), "a part lies within its whole");
        let (start, len) = place(&range)?;
        Some(SharedBytes { owner: whole, start, len })
    }

    /// A part of the part.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub(crate) fn subrange(&self, range: Range<usize>) -> SharedBytes {
        assert!(range.start <= range.end && range.end <= self.len(), "a part lies within its whole");
        let (start, len) = (self.start + range.start as u32, range.len() as u32);
        SharedBytes { owner: Arc::clone(&self.owner), start, len }
    }
}

/// Start and length of a range, if both and the end have 32 bits.
fn place(range: &Range<usize>) -> Option<(u32, u32)> {
    u32::try_from(range.end).ok()?;
    Some((range.start as u32, range.len() as u32)) // neither is beyond the end
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.owner.bytes()[self.start as usize..][..self.len as usize]
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Part({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Letters(Vec<u8>);

    impl BytesOwner for Letters {
        fn bytes(&self) -> &[u8] {
            &self.0
        }
    }

    #[test]
    fn subranges_keep_their_owner() {
        let whole = Arc::new(Letters((0..200).collect()));
        let part = SharedBytes::new(Arc::clone(&whole) as Arc<dyn BytesOwner>, 50..150).unwrap();
        let inner = part.subrange(10..61);
        assert_eq!((&*part, &*inner), (&whole.0[50..150], &whole.0[60..111]));
        assert_eq!(inner.as_ptr(), whole.0[60..].as_ptr());
        assert!(part.subrange(100..100).is_empty());
        drop((whole, part));
        assert_eq!(inner[50], 110);
    }

    #[test]
    #[should_panic(expected = "within its whole")]
    fn subrange_ends_within_its_parent() {
        let part = SharedBytes::new(Arc::new(Letters(vec![7; 100])), 10..20).unwrap();
        let _behind = part.subrange(5..11);
    }

    /// A value of 4 GiB - 1, which is legal, stands in its block behind its key and so ends behind 4 GiB: sharing it
    /// panicked.
    #[test]
    fn range_that_ends_after_4_gib_is_not_shared() {
        let most = u32::MAX as usize;
        assert_eq!(place(&(9..most)), Some((9, u32::MAX - 9)));
        assert_eq!(place(&(most..most)), Some((u32::MAX, 0)));
        assert_eq!(place(&(0..most)), Some((0, u32::MAX)));
        assert_eq!(place(&(1..most + 1)), None);
        assert_eq!(place(&(14..most + 14)), None);
    }
}

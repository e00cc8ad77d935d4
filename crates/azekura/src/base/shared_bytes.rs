//! Immutable bytes with an owner, and ranges of them that are returned without a copy.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Minimum length in bytes of a value that may be returned as [`SharedBytes`]. A smaller one is copied.
pub(crate) const SHARED_LEN_MIN: usize = 4 << 10;

/// Owner of bytes that never change and never move while the owner exists.
pub(crate) trait BytesOwner: Send + Sync {
    fn bytes(&self) -> &[u8];
}

impl BytesOwner for Box<[u8]> {
    fn bytes(&self) -> &[u8] {
        self
    }
}

/// A range of bytes, with a reference to their owner.
#[derive(Clone)]
pub(crate) struct SharedBytes {
    owner: Arc<dyn BytesOwner>,
    /// Start and length, each below 4 GiB.
    start: u32,
    len: u32,
}

impl SharedBytes {
    /// Returns `None` if the range ends 4 GiB or more after the start of the bytes. Then the caller has to copy.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub(crate) fn new(whole: Arc<dyn BytesOwner>, range: Range<usize>) -> Option<SharedBytes> {
        assert!(range.start <= range.end && range.end <= whole.bytes().len(), "the range is within the bytes");
        let (start, len) = place(&range)?;
        Some(SharedBytes { owner: whole, start, len })
    }

    /// A range of this range.
    ///
    /// # Panics
    /// If the range is out of bounds.
    pub(crate) fn subrange(&self, range: Range<usize>) -> SharedBytes {
        assert!(range.start <= range.end && range.end <= self.len(), "the range is within the bytes");
        let (start, len) = (self.start + range.start as u32, range.len() as u32);
        SharedBytes { owner: Arc::clone(&self.owner), start, len }
    }
}

/// Start and length of a range, if both and the end fit 32 bits.
fn place(range: &Range<usize>) -> Option<(u32, u32)> {
    u32::try_from(range.end).ok()?;
    Some((range.start as u32, range.len() as u32)) // neither exceeds the end
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.owner.bytes()[self.start as usize..][..self.len as usize]
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({})", self.len)
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
    #[should_panic(expected = "within the bytes")]
    fn subrange_ends_within_its_parent() {
        let part = SharedBytes::new(Arc::new(Letters(vec![7; 100])), 10..20).unwrap();
        let _behind = part.subrange(5..11);
    }

    /// A value of 4 GiB - 1 bytes, which is valid, follows its key in a block and therefore ends after 4 GiB. Sharing
    /// it panicked once.
    #[test]
    fn range_that_ends_after_4_gib_is_not_shared() {
        let max_len = u32::MAX as usize;
        assert_eq!(place(&(9..max_len)), Some((9, u32::MAX - 9)));
        assert_eq!(place(&(max_len..max_len)), Some((u32::MAX, 0)));
        assert_eq!(place(&(0..max_len)), Some((0, u32::MAX)));
        // On a 32-bit system no value has such an end.
        if let (Some(one), Some(many)) = (max_len.checked_add(1), max_len.checked_add(14)) {
            assert_eq!(place(&(1..one)), None);
            assert_eq!(place(&(14..many)), None);
        }
    }
}

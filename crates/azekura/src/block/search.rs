//! Code that all block layouts share: results of a lookup, decoding of keys and numbers, and fences.
//!
//! A fence is the start of a key as a number. Loading a block computes fences for some of its keys. In byte order, a
//! search among fences compares numbers in one or two cache lines, while a search among keys reads two cache lines
//! for each key. Keys with equal fences are compared by their bytes.

use crate::base::SeqNo;

/// Result of a lookup: an entry of the block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockLookup<'a> {
    /// Whether its user key equals the target's.
    pub(crate) key_matches: bool,
    pub(crate) seqno: SeqNo,
    pub(crate) tag: u8,
    pub(crate) value: &'a [u8],
}

/// Decodes a varint of `len` bytes from the low end of `packed`.
#[inline]
pub(crate) fn unpack_varint(packed: u64, len: usize) -> u64 {
    debug_assert!((1..=8).contains(&len), "the varint is in the packed bytes");
    let x = packed & (u64::MAX >> (64 - 8 * len)) & 0x7f7f_7f7f_7f7f_7f7f;
    let x = (x & 0x007f_007f_007f_007f) | ((x & 0x7f00_7f00_7f00_7f00) >> 1);
    let x = (x & 0x0000_3fff_0000_3fff) | ((x & 0x3fff_0000_3fff_0000) >> 2);
    (x & 0x0fff_ffff) | ((x & 0x0fff_ffff_0000_0000) >> 4)
}

/// Length of the longest common prefix in bytes.
#[inline]
pub(crate) fn common_prefix(a: &[u8], b: &[u8]) -> usize {
    let len = a.len().min(b.len());
    let mut at = 0;
    while let (Some(x), Some(y)) = (a[at..len].first_chunk::<8>(), b[at..len].first_chunk::<8>()) {
        let differ = u64::from_le_bytes(*x) ^ u64::from_le_bytes(*y);
        if differ != 0 {
            return at + differ.trailing_zeros() as usize / 8;
        }
        at += 8;
    }
    at + a[at..len].iter().zip(&b[at..len]).take_while(|(x, y)| x == y).count()
}

/// Length of a fence in bytes.
pub(crate) const FENCE_LEN: usize = 8;

/// The first eight bytes as a big-endian number, so that numbers compare as the bytes do. Missing bytes count as
/// zero.
#[inline]
pub(crate) fn fence_of(bytes: &[u8]) -> u64 {
    match bytes.first_chunk::<FENCE_LEN>() {
        Some(head) => u64::from_be_bytes(*head),
        None => {
            let mut head = [0; FENCE_LEN];
            head[..bytes.len()].copy_from_slice(bytes);
            u64::from_be_bytes(head)
        }
    }
}

#[inline]
fn fence_at(fences: &[u8], i: usize) -> Option<u64> {
    let bytes = fences.get(FENCE_LEN * i..FENCE_LEN * (i + 1))?;
    bytes.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

/// Range of the fences that are equal to `wanted`, as start and end.
#[inline]
pub(crate) fn fence_range(fences: &[u8], wanted: u64) -> (usize, usize) {
    let low = fences_before(fences, |fence| fence < wanted);
    let equal = fence_at(fences, low) == Some(wanted);
    (low, if equal { fences_before(fences, |fence| fence <= wanted) } else { low })
}

/// Number of fences for which `near` is true. They precede all others.
#[inline]
fn fences_before(fences: &[u8], near: impl Fn(u64) -> bool) -> usize {
    debug_assert!(fences.len() >= FENCE_LEN, "there is at least one fence");
    let (mut base, mut size) = (0, fences.len() / FENCE_LEN);
    let is_near = |i| fence_at(fences, i).is_some_and(&near);
    while size > 1 {
        let half = size / 2;
        base = if is_near(base + half) { base + half } else { base };
        size -= half;
    }
    base + usize::from(is_near(base))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpack_varint_matches_byte_reader() {
        for shift in 0..56 {
            for value in [(1u64 << shift) - 1, 1 << shift, (1 << 56) - 1, 0x5A_5A5A_5A5A_5A5A >> (55 - shift)] {
                let mut bytes = Vec::new();
                crate::base::coding::put_varint(&mut bytes, value);
                let len = bytes.len();
                bytes.resize(8, 0xff);
                assert_eq!(unpack_varint(u64::from_le_bytes(bytes.try_into().unwrap()), len), value);
            }
        }
    }

    #[test]
    fn common_prefixes_of_every_length() {
        for len in 0..40usize {
            let a: Vec<u8> = (0..40).collect();
            let mut b = a.clone();
            assert_eq!(common_prefix(&a, &b[..len]), len);
            b[len] ^= 0x80;
            assert_eq!(common_prefix(&a, &b), len);
        }
    }
}

//! Fences: the beginnings of some of a block's keys as numbers, made when the block is loaded.
//!
//! In byte order a search among them is a few comparisons of numbers in one or two cache lines, where a search among
//! the keys would touch two lines for each. They are exact as far as they go: of keys with the same fence they say
//! nothing.

/// Bytes of one fence.
pub(crate) const FENCE_LEN: usize = 8;

/// The first eight bytes as a number in their order; what is missing counts as zero.
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

/// Of at least one fence: those before the first number are before `wanted`, those from the second on are behind.
#[inline]
pub(crate) fn fence_range(fences: &[u8], wanted: u64) -> (usize, usize) {
    let low = fences_before(fences, |fence| fence < wanted);
    let equal = fence_at(fences, low) == Some(wanted);
    (low, if equal { fences_before(fences, |fence| fence <= wanted) } else { low })
}

/// How many fences are on the near side; there is at least one fence.
#[inline]
fn fences_before(fences: &[u8], near: impl Fn(u64) -> bool) -> usize {
    let (mut base, mut size) = (0, fences.len() / FENCE_LEN);
    let is_near = |i| fence_at(fences, i).is_some_and(&near);
    while size > 1 {
        let half = size / 2;
        base = if is_near(base + half) { base + half } else { base };
        size -= half;
    }
    base + usize::from(is_near(base))
}

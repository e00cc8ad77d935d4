//! Compares many bytes at once, with the vector unit of x86-64, or with two words on other processors; both give the
//! same bits. Also prefetches memory.
#![allow(unsafe_code)]

/// Number of bytes compared at once.
pub(crate) const LANES: usize = 16;

/// Bit `i` of the result is set if the `i`-th of the first sixteen bytes equals `wanted`. If there are fewer than
/// sixteen bytes, the bits of the missing bytes are clear.
#[inline]
pub(crate) fn matches(bytes: &[u8], wanted: u8) -> u32 {
    match bytes.first_chunk::<LANES>() {
        Some(lanes) => matches_in_lanes(lanes, wanted),
        None => matches_in_few(bytes, wanted),
    }
}

/// As [`matches`](fn@matches), for the bytes of two words.
#[inline]
pub(crate) fn matches_in_pair(words: [u64; 2], wanted: u8) -> u32 {
    matches_in_lanes(&(u128::from(words[0]) | u128::from(words[1]) << 64).to_le_bytes(), wanted)
}

#[cold]
fn matches_in_few(bytes: &[u8], wanted: u8) -> u32 {
    let mut lanes = [0; LANES];
    lanes[..bytes.len()].copy_from_slice(bytes);
    matches_in_lanes(&lanes, wanted) & ((1 << bytes.len()) - 1)
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn matches_in_lanes(lanes: &[u8; LANES], wanted: u8) -> u32 {
    use std::arch::x86_64::{_mm_cmpeq_epi8, _mm_loadu_si128, _mm_movemask_epi8, _mm_set1_epi8};
    // SAFETY: SSE2 is part of the architecture. The load reads the sixteen bytes of `lanes` and needs no alignment.
    unsafe {
        let lanes = _mm_loadu_si128(lanes.as_ptr().cast());
        _mm_movemask_epi8(_mm_cmpeq_epi8(lanes, _mm_set1_epi8(wanted as i8))) as u32
    }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn matches_in_lanes(lanes: &[u8; LANES], wanted: u8) -> u32 {
    matches_in_words(lanes, wanted)
}

/// As [`matches_in_lanes`], without a vector unit.
#[cfg(any(test, not(target_arch = "x86_64")))]
#[inline]
fn matches_in_words(lanes: &[u8; LANES], wanted: u8) -> u32 {
    let wide = u128::from_le_bytes(*lanes);
    matches_in_word(wide as u64, wanted) | matches_in_word((wide >> 64) as u64, wanted) << 8
}

#[cfg(any(test, not(target_arch = "x86_64")))]
#[inline]
fn matches_in_word(word: u64, wanted: u8) -> u32 {
    const LOW_BITS: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    let differ = word ^ (u64::from(wanted) * 0x0101_0101_0101_0101);
    // No carry crosses a byte boundary: the high bit of a byte of `equal` is set exactly if the byte of `differ` is
    // zero.
    let equal = !(((differ & LOW_BITS) + LOW_BITS) | differ | LOW_BITS);
    ((equal >> 7).wrapping_mul(0x0102_0408_1020_4080) >> 56) as u32
}

/// Prefetches the cache lines of `value`; only a hint.
#[inline]
pub(crate) fn prefetch<T: ?Sized>(value: &T) {
    let start: *const u8 = std::ptr::from_ref(value).cast();
    for line in (0..size_of_val(value)).step_by(64) {
        prefetch_line(start.wrapping_add(line));
    }
}

/// Prefetches the cache line of an address, which need not be valid.
#[inline]
pub(crate) fn prefetch_line(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch never faults, whatever the address; SSE is part of the architecture.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(any(not(target_arch = "x86_64"), miri))]
    let _ = at;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::seeded_rng::SeededRng;

    #[test]
    fn both_implementations_find_every_byte() {
        let mut rng = SeededRng::new(1);
        for round in 0..40_000u32 {
            let mut lanes = [0u8; LANES];
            for lane in &mut lanes {
                // Few distinct values, so that there are many matches, including values around the high bit.
                *lane = if round % 2 == 0 { rng.below(256) as u8 } else { rng.pick(&[0, 1, 0x7f, 0x80, 0x81, 0xff]) };
            }
            let wanted = lanes[round as usize % LANES].wrapping_add(u8::from(round % 3 == 0));
            let expected = lanes.iter().enumerate().map(|(i, lane)| u32::from(*lane == wanted) << i).sum::<u32>();
            assert_eq!(matches_in_lanes(&lanes, wanted), expected);
            assert_eq!(matches_in_words(&lanes, wanted), expected);
            let words = lanes.as_chunks().0;
            let pair = [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])];
            assert_eq!(matches_in_pair(pair, wanted), expected);
            let few = round as usize % LANES;
            assert_eq!(matches(&lanes[..few], wanted), expected & ((1 << few) - 1));
        }
    }
}

//! Which bytes of a pool the leaves and records that recovery has found use.

use crate::base::{Error, ErrorKind, Result};
use crate::mem::simd::prefetch;
use crate::pmem::record::BUFFER_ALIGN;

/// One bit for each [`BUFFER_ALIGN`] bytes of a pool, set if one thread has found a leaf or a record there.
pub(crate) struct UsedSpaceBitmap {
    bits: Vec<u64>,
    bit_count: u64,
}

impl UsedSpaceBitmap {
    pub(crate) fn new(len: u64) -> Result<UsedSpaceBitmap> {
        let (steps, mut bits) = (len / BUFFER_ALIGN, Vec::new());
        let words = usize::try_from(steps.div_ceil(64)).ok();
        let words = words.filter(|words| bits.try_reserve_exact(*words).is_ok());
        let words = words.ok_or_else(|| Error::new(ErrorKind::OutOfSpace, "no memory for the map of a pool"))?;
        bits.resize(words, 0);
        Ok(UsedSpaceBitmap { bits, bit_count: steps })
    }

    /// Marks `len` bytes from `at` on as used. Returns false if any of them was marked already, or is behind the end.
    #[inline]
    pub(crate) fn mark(&mut self, at: u64, len: u64) -> bool {
        let (mut step, end) = (at / BUFFER_ALIGN, (at + len).div_ceil(BUFFER_ALIGN));
        if end > self.bit_count {
            return false;
        }
        while step < end {
            let bit = step % 64;
            let count = (64 - bit).min(end - step);
            let mask = (u64::MAX >> (64 - count)) << bit;
            let word = &mut self.bits[(step / 64) as usize];
            if *word & mask != 0 {
                return false;
            }
            *word |= mask;
            step += count;
        }
        true
    }

    /// Prefetches the bit of the range at `at`.
    #[inline]
    pub(crate) fn prefetch(&self, at: u64) {
        if let Some(word) = self.bits.get((at / BUFFER_ALIGN / 64) as usize) {
            prefetch(word);
        }
    }

    /// Adds the marks of another thread. Returns whether no range is marked in both.
    pub(crate) fn merge(&mut self, other: &UsedSpaceBitmap) -> bool {
        debug_assert_eq!(self.bit_count, other.bit_count, "both are maps of the same pool");
        let pairs = self.bits.iter_mut().zip(&other.bits);
        let both = pairs.fold(0, |both, (mine, theirs)| {
            let here = *mine & theirs;
            *mine |= theirs;
            both | here
        });
        both == 0
    }

    pub(crate) fn clear(&mut self, at: u64, len: u64) {
        for step in at / BUFFER_ALIGN..(at + len).div_ceil(BUFFER_ALIGN) {
            debug_assert!(self.bits[(step / 64) as usize] >> (step % 64) & 1 == 1, "only marked space is cleared");
            self.bits[(step / 64) as usize] &= !(1 << (step % 64));
        }
    }

    /// Calls `free` with every range that is not marked.
    pub(crate) fn for_each_free_range(&self, mut free: impl FnMut((u64, u64))) {
        let mut start = None;
        let mut step = 0;
        while step < self.bit_count {
            let (word, bit) = (self.bits[(step / 64) as usize], step % 64);
            let (is_free, rest) =
                (word >> bit & 1 == 0, if word >> bit & 1 == 0 { word >> bit } else { !(word >> bit) });
            let run = u64::from(rest.trailing_zeros()).min(64 - bit).min(self.bit_count - step);
            match (is_free, start) {
                (true, None) => start = Some(step),
                (false, Some(from)) => {
                    free((from * BUFFER_ALIGN, (step - from) * BUFFER_ALIGN));
                    start = None;
                }
                _ => {}
            }
            step += run;
        }
        if let Some(from) = start {
            free((from * BUFFER_ALIGN, (self.bit_count - from) * BUFFER_ALIGN));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marking_twice_is_detected() {
        let mut map = UsedSpaceBitmap::new(4096).unwrap();
        assert!(map.mark(0, 64) && map.mark(1008, 1040) && !map.mark(2032, 16) && !map.mark(4080, 32));
        let mut other = UsedSpaceBitmap::new(4096).unwrap();
        assert!(other.mark(64, 16) && other.mark(4080, 16));
        assert!(map.merge(&other) && !map.merge(&other));
        let mut free = Vec::new();
        map.clear(64, 16);
        map.for_each_free_range(|range| free.push(range));
        assert_eq!(free, [(64, 944), (2048, 2032)]);
    }
}

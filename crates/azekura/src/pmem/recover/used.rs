//! What of a pool belongs to something; the rest is free.

use crate::base::{Error, ErrorKind, Result};
use crate::mem::prefetch::prefetch;
use crate::pmem::record::STEP;

/// One bit for each [`STEP`] of a pool that belongs to something, as far as one thread knows.
pub(super) struct Used {
    bits: Vec<u64>,
    steps: u64,
}

impl Used {
    pub(super) fn new(len: u64) -> Result<Used> {
        let (steps, mut bits) = (len / STEP, Vec::new());
        let words = usize::try_from(steps.div_ceil(64)).ok();
        let words = words.filter(|words| bits.try_reserve_exact(*words).is_ok());
        let words = words.ok_or_else(|| Error::new(ErrorKind::OutOfSpace, "no memory for the map of a pool"))?;
        bits.resize(words, 0);
        Ok(Used { bits, steps })
    }

    /// Whether all of `len` bytes from `at` on were free; they are not any more.
    #[inline]
    pub(super) fn mark(&mut self, at: u64, len: u64) -> bool {
        let (mut step, end) = (at / STEP, (at + len).div_ceil(STEP));
        if end > self.steps {
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

    /// Asks for what is known of the place at `at`.
    #[inline]
    pub(super) fn fetch(&self, at: u64) {
        if let Some(word) = self.bits.get((at / STEP / 64) as usize) {
            prefetch(word);
        }
    }

    /// Adds what another thread has marked; whether both know of different places.
    pub(super) fn join(&mut self, other: &Used) -> bool {
        let pairs = self.bits.iter_mut().zip(&other.bits);
        let both = pairs.fold(0, |both, (mine, theirs)| {
            let here = *mine & theirs;
            *mine |= theirs;
            both | here
        });
        both == 0
    }

    pub(super) fn clear(&mut self, at: u64, len: u64) {
        for step in at / STEP..(at + len).div_ceil(STEP) {
            self.bits[(step / 64) as usize] &= !(1 << (step % 64));
        }
    }

    /// Shows `free` every range that is marked nowhere.
    pub(super) fn free_ranges(&self, mut free: impl FnMut((u64, u64))) {
        let mut start = None;
        let mut step = 0;
        while step < self.steps {
            let (word, bit) = (self.bits[(step / 64) as usize], step % 64);
            let (is_free, rest) =
                (word >> bit & 1 == 0, if word >> bit & 1 == 0 { word >> bit } else { !(word >> bit) });
            let run = u64::from(rest.trailing_zeros()).min(64 - bit).min(self.steps - step);
            match (is_free, start) {
                (true, None) => start = Some(step),
                (false, Some(from)) => {
                    free((from * STEP, (step - from) * STEP));
                    start = None;
                }
                _ => {}
            }
            step += run;
        }
        if let Some(from) = start {
            free((from * STEP, (self.steps - from) * STEP));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_marked_twice_is_found() {
        let mut map = Used::new(4096).unwrap();
        assert!(map.mark(0, 64) && map.mark(1008, 1040) && !map.mark(2032, 16) && !map.mark(4080, 32));
        let mut other = Used::new(4096).unwrap();
        assert!(other.mark(64, 16) && other.mark(4080, 16));
        assert!(map.join(&other) && !map.join(&other));
        let mut free = Vec::new();
        map.clear(64, 16);
        map.free_ranges(|range| free.push(range));
        assert_eq!(free, [(64, 944), (2048, 2032)]);
    }
}

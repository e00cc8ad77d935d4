//! A sum that many threads add to.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::sync::{Line, PARTS, own_part};

/// A sum in parts, so that threads that add to it don't take its line away from each other. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct Tally([Line<AtomicU64>; PARTS]);

impl Tally {
    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.0[own_part()].0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn sum(&self) -> u64 {
        self.0.iter().map(|part| part.0.load(Ordering::Relaxed)).sum()
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the test races threads, and in vfs none are scoped")]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_however_many_add() {
        let tally = Tally::default();
        std::thread::scope(|scope| {
            for n in 0..2 * PARTS as u64 {
                let tally = &tally;
                scope.spawn(move || (0..100).for_each(|_| tally.add(n)));
            }
        });
        assert_eq!(tally.sum(), 100 * (0..2 * PARTS as u64).sum::<u64>());
    }
}

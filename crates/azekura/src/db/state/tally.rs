//! A sum that many threads add to.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::sync::{CachePadded, STRIPE_COUNT, thread_stripe};

/// A sum in parts, so that threads that add to it don't take its line away from each other. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct ShardedCounter([CachePadded<AtomicU64>; STRIPE_COUNT]);

impl ShardedCounter {
    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.0[thread_stripe()].0.fetch_add(n, Ordering::Relaxed);
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
    fn sum_is_exact_with_concurrent_adds() {
        let tally = ShardedCounter::default();
        std::thread::scope(|scope| {
            for n in 0..2 * STRIPE_COUNT as u64 {
                let tally = &tally;
                scope.spawn(move || (0..100).for_each(|_| tally.add(n)));
            }
        });
        assert_eq!(tally.sum(), 100 * (0..2 * STRIPE_COUNT as u64).sum::<u64>());
    }
}

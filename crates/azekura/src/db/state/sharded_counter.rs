//! A counter that many threads increment.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::sync::{CachePadded, STRIPE_COUNT, thread_stripe};

/// A counter with [`STRIPE_COUNT`] stripes on separate cache lines, so that threads rarely write to the same line.
/// Thread safe.
#[derive(Debug, Default)]
pub(crate) struct ShardedCounter([CachePadded<AtomicU64>; STRIPE_COUNT]);

impl ShardedCounter {
    /// Adds `n` to the stripe of the calling thread.
    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.0[thread_stripe()].0.fetch_add(n, Ordering::Relaxed);
    }

    /// Returns the sum of all stripes. It may omit adds that run at the same time.
    pub(crate) fn sum(&self) -> u64 {
        self.0.iter().map(|stripe| stripe.0.load(Ordering::Relaxed)).sum()
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the test uses scoped threads, which `Env` does not offer")]
mod tests {
    use super::*;

    #[test]
    fn sum_is_exact_with_concurrent_adds() {
        let counter = ShardedCounter::default();
        std::thread::scope(|scope| {
            for n in 0..2 * STRIPE_COUNT as u64 {
                let counter = &counter;
                scope.spawn(move || (0..100).for_each(|_| counter.add(n)));
            }
        });
        assert_eq!(counter.sum(), 100 * (0..2 * STRIPE_COUNT as u64).sum::<u64>());
    }
}

//! How much memory may be used, and how much is.

use std::sync::atomic::{AtomicU64, Ordering};

/// A number of bytes that several owners share. Thread safe; charges are not tied to the budget, so whoever charges
/// must release the same amount.
pub(crate) struct MemoryBudget {
    limit: u64,
    used: AtomicU64,
}

impl MemoryBudget {
    /// A budget of `limit` bytes.
    pub(crate) fn new(limit: u64) -> MemoryBudget {
        MemoryBudget { limit, used: AtomicU64::new(0) }
    }

    /// Charges `bytes` if they fit under the limit.
    #[must_use]
    pub(crate) fn try_charge(&self, bytes: u64) -> bool {
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.limit);
        self.used.fetch_update(Ordering::AcqRel, Ordering::Relaxed, fits).is_ok()
    }

    /// Charges `bytes` even beyond the limit: for memory that is in use already. Returns what is used now.
    pub(crate) fn charge(&self, bytes: u64) -> u64 {
        self.used.fetch_add(bytes, Ordering::AcqRel) + bytes
    }

    /// Gives back `bytes` that were charged.
    pub(crate) fn release(&self, bytes: u64) {
        let before = self.used.fetch_sub(bytes, Ordering::AcqRel);
        assert!(before >= bytes, "more memory was released than charged");
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Acquire)
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// What can still be charged; 0 when over the limit.
    pub(crate) fn free(&self) -> u64 {
        self.limit.saturating_sub(self.used())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_up_to_the_limit_and_beyond_only_when_forced() {
        let budget = MemoryBudget::new(100);
        assert!(budget.try_charge(60) && budget.try_charge(40));
        assert!(!budget.try_charge(1) && !budget.try_charge(u64::MAX));
        assert_eq!(budget.charge(50), 150);
        assert_eq!(budget.free(), 0);
        budget.release(110);
        assert_eq!((budget.used(), budget.free(), budget.limit()), (40, 60, 100));
    }

    #[test]
    fn threads_never_pass_the_limit_together() {
        let budget = MemoryBudget::new(1000);
        let rounds = if cfg!(miri) { 50 } else { 20_000 };
        std::thread::scope(|s| {
            for n in 1..4 {
                let budget = &budget;
                s.spawn(move || {
                    for _ in 0..rounds {
                        if budget.try_charge(n * 150) {
                            assert!(budget.used() <= 1000);
                            budget.release(n * 150);
                        }
                    }
                });
            }
        });
        assert_eq!(budget.used(), 0);
    }
}

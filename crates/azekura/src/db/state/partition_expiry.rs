//! Whether the records of a partition expire, and after which time.

use std::time::Duration;

use crate::base::{Error, Result};
use crate::engine::SnapshotList;
use crate::mem::atomic::{AtomicBool, AtomicU64, Ordering};

/// The expiry state of a partition. Thread safe.
#[derive(Debug, Default)]
pub(crate) struct PartitionExpiry {
    /// Whether the partition may have records that expire. Set for good before the first of them is visible.
    is_used: AtomicBool,
    /// 0 if there is none.
    default_ttl_ms: AtomicU64,
}

impl PartitionExpiry {
    pub(crate) fn is_used(&self) -> bool {
        self.is_used.load(Ordering::SeqCst)
    }

    pub(crate) fn is_used_flag(&self) -> &AtomicBool {
        &self.is_used
    }

    pub(crate) fn note_use(&self, snapshots: &SnapshotList) {
        snapshots.note_expiry_use();
        self.is_used.store(true, Ordering::SeqCst);
    }

    /// The default time to live in milliseconds.
    #[inline]
    pub(crate) fn default_ttl_ms(&self) -> Option<u64> {
        match self.default_ttl_ms.load(Ordering::Relaxed) {
            0 => None,
            ms => Some(ms),
        }
    }

    pub(crate) fn set_default_ttl_ms(&self, ms: Option<u64>) {
        debug_assert!(ms != Some(0), "a time to live is at least 1 ms");
        self.default_ttl_ms.store(ms.unwrap_or(0), Ordering::Relaxed);
    }
}

/// Returns a time to live in milliseconds, rounded up.
///
/// # Errors
/// `Invalid` if it is 0, or 2^64 ms or more.
pub(crate) fn ttl_ms(ttl: Duration) -> Result<u64> {
    match u64::try_from(ttl.as_nanos().div_ceil(1_000_000)) {
        Ok(0) => Err(Error::invalid("a time to live of 0 is not allowed")),
        Ok(ms) => Ok(ms),
        Err(_) => Err(Error::invalid(format!("a time to live of {} s is too long", ttl.as_secs()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    #[test]
    fn times_to_live_are_rounded_up() {
        let valid = [(1, 1), (1_000_000, 1), (1_000_001, 2), (1_000_000_000, 1000)];
        for (ns, ms) in valid {
            assert_eq!(ttl_ms(Duration::from_nanos(ns)).unwrap(), ms);
        }
        assert_eq!(ttl_ms(Duration::from_millis(u64::MAX)).unwrap(), u64::MAX);
        for bad in [Duration::ZERO, Duration::from_millis(u64::MAX) + Duration::from_nanos(1), Duration::MAX] {
            assert_eq!(ttl_ms(bad).unwrap_err().kind(), ErrorKind::Invalid);
        }
    }
}

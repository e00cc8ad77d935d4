//! Whether the filter of a table is worth a read from its file.
//!
//! A filter that excludes few of the keys that are looked up costs more reads than it saves, unless it is cached: that
//! of the bottom level, if most keys exist. Lookups whose filter partition is not cached record whether the table had
//! the key. While nearly all of the last ones had it, the next ones leave the filter out and search the data.
//!
//! The records do not depend on whether the filter was read, so a change to absent keys is noticed after
//! [`ABSENT_MAX`] of them. Some lookups read the filter anyway, so that the cache can take the partitions that are
//! looked up often.

use crate::mem::atomic::{AtomicU64, Ordering};

/// Maximum number of absent keys among the last 32 lookups while the filter is left out. An absent key then costs about
/// two reads, and a filter partition one.
const ABSENT_MAX: u32 = 4;
/// One in this many lookups reads the filter although it excludes little.
const READ_INTERVAL: u64 = 64;

/// Statistics of the lookups in one table whose filter partition was not cached.
pub(crate) struct FilterUsage {
    /// Low half: a bit for each of the last 32 lookups, set if the table did not have the key. High half: the number of
    /// lookups. Concurrent updates may lose a lookup.
    recent: AtomicU64,
}

impl FilterUsage {
    pub(crate) fn new() -> FilterUsage {
        FilterUsage { recent: AtomicU64::new(u64::from(u32::MAX)) }
    }

    /// Whether the next lookup should leave the filter out rather than read it.
    pub(crate) fn leaves_out_filter(&self) -> bool {
        let recent = self.recent.load(Ordering::Relaxed);
        (recent as u32).count_ones() <= ABSENT_MAX && !(recent >> 32).is_multiple_of(READ_INTERVAL)
    }

    /// Records whether the table had the key of a lookup.
    pub(crate) fn record(&self, found: bool) {
        let recent = self.recent.load(Ordering::Relaxed);
        let (count, bits) = ((recent >> 32).wrapping_add(1), (recent as u32) << 1 | u32::from(!found));
        self.recent.store(count << 32 | u64::from(bits), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(usage: &FilterUsage, lookups: usize, found: bool) {
        (0..lookups).for_each(|_| usage.record(found));
    }

    /// Number of lookups that leave the filter out, of keys that the table has or not.
    fn left_out(usage: &FilterUsage, lookups: usize, found: bool) -> usize {
        let one = |_: &usize| {
            let leaves_out = usage.leaves_out_filter();
            usage.record(found);
            leaves_out
        };
        (0..lookups).filter(one).count()
    }

    #[test]
    fn filter_is_read_until_most_keys_were_found() {
        let usage = FilterUsage::new();
        assert_eq!(left_out(&usage, 28, true), 0);
        assert_eq!(left_out(&usage, 640, true), 630);
    }

    #[test]
    fn filter_is_read_again_after_absent_keys() {
        let usage = FilterUsage::new();
        record(&usage, 1000, true);
        assert!((4..=5).contains(&left_out(&usage, 100, false)));
        assert_eq!(left_out(&usage, 27, true), 0, "one absent key in 32 is not enough to tell");
    }

    #[test]
    fn number_of_lookups_wraps_around() {
        let usage = FilterUsage { recent: AtomicU64::new(u64::MAX << 32) };
        assert!(usage.leaves_out_filter());
        usage.record(true);
        assert_eq!(usage.recent.load(Ordering::Relaxed), 0);
    }
}

//! The size and layout of a data set.

use crate::workload::keys::{KeyOrder, Keys};
use crate::workload::values::Values;
use serde::{Deserialize, Serialize};

/// What a loaded database holds: `n` records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    /// Records; indices `0..n`.
    pub(crate) n: u64,
    /// Bytes per key.
    pub(crate) key_size: usize,
    /// Bytes of the smallest value; all have [`Shape::value_size`] if that is the same.
    pub(crate) least_value: usize,
    /// Bytes of the largest value. Sizes between are drawn log-uniformly: as many from 4 to 8 KiB as from 8 to 16.
    pub(crate) value_size: usize,
    /// How indices become keys.
    pub(crate) order: KeyOrder,
}

impl Shape {
    /// The maker of keys.
    pub(crate) fn keys(&self) -> Keys {
        Keys { size: self.key_size, order: self.order }
    }

    /// The maker of values.
    pub(crate) fn values(&self) -> Values {
        Values { least: self.least_value, most: self.value_size }
    }

    /// Bytes of the record of `index` as its writer sees it.
    pub(crate) fn record_bytes(&self, index: u64) -> u64 {
        (self.key_size + self.values().size_of(index)) as u64
    }

    /// Bytes of all records.
    pub(crate) fn total_bytes(&self) -> u64 {
        if self.least_value == self.value_size {
            return self.n * self.record_bytes(0);
        }
        (0..self.n).map(|index| self.record_bytes(index)).sum()
    }

    /// Bytes of a record, on average over very many.
    pub(crate) fn mean_record_bytes(&self) -> f64 {
        self.key_size as f64 + mean_of_sizes(self.least_value as f64, self.value_size as f64)
    }
}

/// The mean of sizes drawn log-uniformly.
pub(crate) fn mean_of_sizes(least: f64, most: f64) -> f64 {
    if most <= least { least } else { (most - least) / (most / least).ln() }
}

#[cfg(test)]
mod tests {
    use super::Shape;
    use crate::workload::keys::KeyOrder;

    #[test]
    fn totals_are_those_of_the_records() {
        let fixed = Shape { n: 10, key_size: 16, least_value: 84, value_size: 84, order: KeyOrder::Scrambled };
        assert_eq!(fixed.total_bytes(), 1000);
        assert_eq!(fixed.mean_record_bytes(), 100.0);
        let blobs = Shape { n: 20_000, least_value: 4 << 10, value_size: 1 << 20, ..fixed };
        let mean = blobs.total_bytes() as f64 / 20_000.0;
        assert!((mean / blobs.mean_record_bytes() - 1.0).abs() < 0.03, "{mean}");
        assert!((150_000.0..230_000.0).contains(&mean), "{mean}");
    }
}

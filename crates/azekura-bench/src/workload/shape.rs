//! The size and layout of a data set.

use crate::workload::keys::{KeyOrder, Keys};
use crate::workload::values::Values;
use serde::{Deserialize, Serialize};

/// What a loaded database holds: `n` records of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shape {
    /// Records; indices `0..n`.
    pub(crate) n: u64,
    /// Bytes per key.
    pub(crate) key_size: usize,
    /// Bytes per value.
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
        Values { size: self.value_size }
    }

    /// Bytes of one record as its writer sees it.
    pub(crate) fn record_bytes(&self) -> u64 {
        (self.key_size + self.value_size) as u64
    }
}

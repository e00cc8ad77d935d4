//! How large a pool may get.

use crate::base::coding::{ByteReader, put_varint};
use crate::base::{Error, Result};
use crate::pmem::record::OFFSET_END;
use crate::pmem::tree::PoolOptions;

/// Sizes that a pool may have, in bytes.
const MAX_SIZE_RANGE: std::ops::RangeInclusive<u64> = (64 << 10)..=(8 << 40);
/// The field of the stored settings that holds these.
pub(crate) const PMEM_OPTIONS_FIELD: u64 = 16;
/// The most bytes of a pool that a byte of the log can become: a record of 7 bytes in a batch takes 32, and 70 with its
/// share of a leaf that was split just before.
const POOL_BYTES_PER_WAL_BYTE: u64 = 16;
/// Steps that it may grow by.
const GROWTH_STEP_RANGE: std::ops::RangeInclusive<u64> = (4 << 10)..=(1 << 30);

/// The settings of a partition of the engine [`Pmem`](crate::EngineType::Pmem).
///
/// ```
/// use azekura::PmemOptions;
/// let small = PmemOptions::default().max_size(16 << 20).growth_step(1 << 20);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PmemOptions {
    pub(crate) max_size: u64,
    pub(crate) growth_step: u64,
}

impl Default for PmemOptions {
    fn default() -> PmemOptions {
        PmemOptions { max_size: 1 << 30, growth_step: 4 << 20 }
    }
}

impl PmemOptions {
    /// Bytes of memory, and of its file, that the data may take with all that belongs to it, 64 KiB to 8 TiB; beyond
    /// it, writes are `OutOfSpace` until something is removed. A record takes about 26 bytes more than its key and its
    /// value. The pool is created with `growth_step` bytes, or with this where that is less. Default: 1 GiB.
    ///
    /// What snapshots and iterators keep of old values counts. Entries that say where those are take memory, at most an
    /// eighth of this size and at least 1 MiB ([`PoolMetrics::kept_bytes`](crate::PoolMetrics)). Beyond that, puts and
    /// removals are `OutOfSpace` with a message that tells the age of the oldest snapshot, until it is dropped. Want of
    /// space in the pool refuses no removal.
    ///
    /// The same memory holds what a batch replaces and removes until the whole batch is visible. A batch that needs
    /// more than is free waits for other batches. One that does not fit alone is `OutOfSpace`, and nothing of it is
    /// written.
    ///
    /// A larger size than the partition was opened with, more than twice of it, takes effect when the database is
    /// opened the next time. A smaller size flushes the partition; if it holds more already, every record stays,
    /// and puts are `OutOfSpace` until so much was removed that the rest fits.
    ///
    /// The size does not hold while the database is opened: what the log has fits, however it lay in the pool
    /// before. Memory and file that a pool has got then stay with it; how much of them is in use does not exceed the
    /// size afterwards.
    #[must_use]
    pub fn max_size(mut self, bytes: u64) -> PmemOptions {
        self.max_size = bytes;
        self
    }

    /// Bytes that it grows by when it is full, 4 KiB to 1 GiB. Default: 4 MiB.
    #[must_use]
    pub fn growth_step(mut self, bytes: u64) -> PmemOptions {
        self.growth_step = bytes;
        self
    }

    pub(crate) fn check(&self) -> Result<()> {
        let range = |what: &str, value: u64, range: &std::ops::RangeInclusive<u64>| match range.contains(&value) {
            true => Ok(()),
            false => {
                let (low, high) = (range.start(), range.end());
                Err(Error::invalid(format!("{what} is {value}, out of its range {low}..={high}")))
            }
        };
        range("max_size", self.max_size, &MAX_SIZE_RANGE)?;
        range("growth_step", self.growth_step, &GROWTH_STEP_RANGE)
    }

    /// What a tree is opened with.
    pub(crate) fn pool_options(&self) -> PoolOptions {
        PoolOptions { len_max: self.max_size, grow_by: self.growth_step, ..PoolOptions::default() }
    }

    /// Whether a pool of these options may hold less than one of `other`.
    pub(crate) fn lowers_max_size(&self, other: &PmemOptions) -> bool {
        self.max_size < other.max_size
    }

    /// Addresses for a pool into which `log_bytes` of log may be replayed: for what it may hold, for what the log holds
    /// beyond that, and for a limit that is raised while the database is open.
    pub(crate) fn reserved_address_len(&self, log_bytes: u64) -> u64 {
        let replayed = log_bytes.saturating_mul(POOL_BYTES_PER_WAL_BYTE);
        self.max_size.saturating_mul(2).saturating_add(replayed).min(OFFSET_END)
    }

    /// What the stored settings of a partition say, by default if that is nothing.
    pub(crate) fn from_settings(settings: &[u8]) -> Result<PmemOptions> {
        let mut d = ByteReader::new(settings);
        while !d.is_empty() {
            let (field, value) = (d.varint()?, d.bytes()?);
            if field == PMEM_OPTIONS_FIELD {
                return PmemOptions::decode(value);
            }
        }
        Ok(PmemOptions::default())
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_varint(&mut out, self.max_size);
        put_varint(&mut out, self.growth_step);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<PmemOptions> {
        let mut d = ByteReader::new(bytes);
        let options = PmemOptions { max_size: d.varint()?, growth_step: d.varint()? };
        Ok(if options.check().is_ok() { options } else { PmemOptions::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_range_sizes_are_invalid() {
        let default = PmemOptions::default;
        assert!(default().check().is_ok());
        assert!(default().max_size(100).check().is_err());
        assert!(default().max_size(u64::MAX).check().is_err());
        assert!(default().growth_step(0).check().is_err());
    }
}

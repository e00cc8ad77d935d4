//! The options of a pmem partition.

use crate::base::Result;
use crate::base::options::{StoredOptions, options};
use crate::pmem::record::OFFSET_END;
use crate::pmem::tree::PoolOptions;

/// The field of the stored settings that contains these options.
pub(crate) const PMEM_OPTIONS_FIELD: u64 = 16;
/// Maximum number of bytes that one byte of the WAL takes in a pool: a record that takes 7 bytes in a batch takes 32
/// bytes in the pool, or 70 with its share of a leaf that was just split.
const POOL_BYTES_PER_WAL_BYTE: u64 = 16;

options! {
    /// The options of a partition of the engine [`Pmem`](crate::EngineType::Pmem).
    ///
    /// ```
    /// use azekura::{EngineType, PartitionCreateOptions, PmemOptions};
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// let small = PmemOptions::default().max_size(16 << 20).growth_step(1 << 20);
    /// let options = PartitionCreateOptions::default().engine(EngineType::Pmem(small));
    /// let sessions = db.open_partition("sessions", options)?;
    /// sessions.insert("ada", "logged in")?;
    /// assert_eq!(sessions.metrics().pool.unwrap().bytes, 1 << 20); // grows in steps, up to 16 MiB
    /// # Ok(()) }
    /// ```
    #[derive(Clone, Debug, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
    #[non_exhaustive]
    pub struct PmemOptions {
        /// Maximum number of bytes, in memory and in the pool file, for the data and all overhead, 64 KiB to 8 TiB.
        /// When it is reached, writes are `OutOfSpace` until records are removed. A record takes about 26 bytes more
        /// than its key and its value. The pool is created with `growth_step` bytes, or with `max_size` bytes if that
        /// is less. Default: 1 GiB.
        ///
        /// Old values that snapshots, and iterators over this partition, need count too: for each of them the value
        /// that a key had at that time, if it was replaced or removed since. The entries that point to these values
        /// take additional memory ([`PoolMetrics::version_bytes`](crate::PoolMetrics)): at most an eighth of this size,
        /// or 1 MiB if that is more. When this limit is reached, puts and removals are `OutOfSpace` until the oldest
        /// snapshot is dropped; the message contains its age. Lack of space in the pool does not prevent removals.
        ///
        /// The same memory is used for the records that a batch replaces and removes, until the whole batch is visible.
        /// A batch that needs more memory than is free waits for other batches. A batch that does not fit alone is
        /// `OutOfSpace`, and nothing of it is written.
        ///
        /// If the size is raised to more than twice the size with which the partition was opened, the rest takes effect
        /// when the database is next opened. Lowering the size flushes the partition. If the partition contains more
        /// already, every record is kept, and puts are `OutOfSpace` until enough was removed.
        ///
        /// The limit does not hold while the database is opened, so that all records of the WAL fit, wherever they were
        /// in the pool before. The pool keeps the memory and the file space that it gets then, but afterwards the used
        /// part does not exceed the limit.
        ///
        /// When at least half of a pool is free, a flush gives the memory and the file space of the free part at its
        /// end back, but a third of the rest stays free. A pool that is a mapped file keeps its length.
        ///
        /// ```
        /// # fn main() -> azekura::Result<()> {
        /// # let dir = tempfile::tempdir().unwrap();
        /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
        /// use azekura::{EngineType, ErrorKind, PartitionCreateOptions, PmemOptions};
        /// let pool = EngineType::Pmem(PmemOptions::default().max_size(64 << 10));
        /// let sessions = db.open_partition("sessions", PartitionCreateOptions::default().engine(pool))?;
        /// let full = (0..100u8).find_map(|n| sessions.insert([n], [n; 1_000]).err()).unwrap();
        /// assert_eq!(full.kind(), ErrorKind::OutOfSpace);
        /// sessions.remove([0])?; // removals need no space
        /// # Ok(()) }
        /// ```
        [1] max_size(bytes): u64 = 1 << 30, in 64 << 10..=8 << 40;

        /// Number of bytes by which a full pool grows, 4 KiB to 1 GiB. Default: 4 MiB.
        ///
        /// ```
        /// # fn main() -> azekura::Result<()> {
        /// # let dir = tempfile::tempdir().unwrap();
        /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
        /// # use azekura::{EngineType, PartitionCreateOptions, PmemOptions};
        /// let pool = EngineType::Pmem(PmemOptions::default().growth_step(256 << 10)); // for a small pool
        /// let sessions = db.open_partition("sessions", PartitionCreateOptions::default().engine(pool))?;
        /// assert_eq!(sessions.metrics().pool.unwrap().bytes, 256 << 10);
        /// # Ok(()) }
        /// ```
        [2] growth_step(bytes): u64 = 4 << 20, in 4 << 10..=1 << 30;
    }
}

impl PmemOptions {
    /// The options of the tree.
    pub(crate) fn pool_options(&self) -> PoolOptions {
        PoolOptions { len_max: self.max_size, grow_by: self.growth_step, ..PoolOptions::default() }
    }

    /// Whether the limit of these options is lower than that of `other`.
    pub(crate) fn lowers_max_size(&self, other: &PmemOptions) -> bool {
        self.max_size < other.max_size
    }

    /// Number of bytes of address space to reserve for a pool into which `log_bytes` of the WAL may be replayed:
    /// enough for its limit, for records of the WAL beyond the limit, and for a limit that is raised while the
    /// database is open.
    pub(crate) fn reserved_address_len(&self, log_bytes: u64) -> u64 {
        let replayed = log_bytes.saturating_mul(POOL_BYTES_PER_WAL_BYTE);
        self.max_size.saturating_mul(2).saturating_add(replayed).min(OFFSET_END)
    }

    /// Reads the options from the stored settings of a partition; the default if there are none.
    pub(crate) fn from_settings(settings: &[u8]) -> Result<PmemOptions> {
        let mut options = None;
        StoredOptions::fields(settings)?.load(PMEM_OPTIONS_FIELD, None, &mut options)?;
        Ok(options.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::options::OptionTable;

    #[test]
    fn out_of_range_sizes_are_invalid() {
        let default = PmemOptions::default;
        assert!(default().check_ranges().is_ok());
        assert!(default().max_size(100).check_ranges().is_err());
        assert!(default().max_size(u64::MAX).check_ranges().is_err());
        assert!(default().growth_step(0).check_ranges().is_err());
    }
}

//! Options for writing and reading tables.

use std::ops::RangeInclusive;

use crate::base::compression::CompressionType;
use crate::base::{Error, Result};
use crate::table::prefix::PrefixExtractor;

/// The filter of a table. With a filter, a lookup of an absent key seldom reads a block.
///
/// ```
/// use azekura::{FilterPolicy, PartitionCreateOptions};
/// let default = PartitionCreateOptions::default();
/// assert_eq!(default.clone().filter_policy(FilterPolicy::Bloom { bits_per_key: 10.0 }), default);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum FilterPolicy {
    /// No filter. Useful if nearly every lookup finds its key.
    None,
    /// A Bloom filter. With 10 bits for each key, about 1 % of absent keys pass.
    Bloom {
        /// Bits of the filter for each key, 1 to 64.
        bits_per_key: f32,
    },
}

/// How a data block finds its entries. A database can contain and read tables of every type.
///
/// `docs/decisions/0011-fingerprint-blocks-by-default.md` compares the types; `docs/format/block.md` describes their
/// layouts.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// # let db = azekura::Config::new(&path).open()?;
/// # use azekura::{DataBlockIndexType, PartitionCreateOptions, fs::{DiskFs, Fs}};
/// let options = PartitionCreateOptions::default().data_block_index_type(DataBlockIndexType::BinaryAndHash);
/// let users = db.open_partition("users", options)?;
/// users.insert("ada", "mathematician")?;
/// users.flush()?;
/// # drop(users);
/// db.close()?;
/// # let fs: std::sync::Arc<dyn Fs> = std::sync::Arc::new(DiskFs::new());
/// let report = azekura::inspect::verify(&fs, &path, &mut |_, _| {})?;
/// let table = report.files.iter().find(|file| file.kind == "table").unwrap();
/// assert_eq!(table.data_block_index_type, Some(DataBlockIndexType::BinaryAndHash));
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum DataBlockIndexType {
    /// Restart points: a key is stored without the prefix that it shares with the previous key, and some keys are
    /// stored completely for binary search. The smallest layout.
    BinarySearch,
    /// Restart points, followed by a hash index: one byte for each bucket, which maps a key to its restart interval
    /// in point lookups. A block of more than 253 intervals has no hash index. Scans and seeks use the restart
    /// points. Most effective with a restart interval of 2.
    BinaryAndHash,
    /// A slot and a fingerprint (one byte of the key's hash) for each entry. A lookup compares sixteen fingerprints
    /// at once. A seek is a binary search over all entries. Every entry can be read without the adjacent entries.
    Fingerprint,
}

impl DataBlockIndexType {
    /// The number that settings and properties store.
    pub(crate) fn to_number(self) -> u64 {
        match self {
            DataBlockIndexType::BinarySearch => 1,
            DataBlockIndexType::BinaryAndHash => 2,
            DataBlockIndexType::Fingerprint => 3,
        }
    }

    pub(crate) fn from_number(number: u64) -> Option<DataBlockIndexType> {
        match number {
            1 => Some(DataBlockIndexType::BinarySearch),
            2 => Some(DataBlockIndexType::BinaryAndHash),
            3 => Some(DataBlockIndexType::Fingerprint),
            _ => None,
        }
    }

    /// Whether lookups need a hash of the key.
    pub(crate) fn needs_key_hash(self) -> bool {
        self != DataBlockIndexType::BinarySearch
    }
}

/// Valid sizes of a data block, an index partition and a filter partition, in bytes.
const BLOCK_SIZE_RANGE: RangeInclusive<u32> = 64..=(1 << 20);

/// Valid numbers of entries for each bucket of a hash index.
const UTIL_RATIO_RANGE: RangeInclusive<f64> = 0.1..=10.0;

/// Valid numbers of bits of a Bloom filter for each key.
const BITS_PER_KEY_RANGE: RangeInclusive<f32> = 1.0..=64.0;

/// How a table is written, and how it is kept in memory when it is open.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
pub(crate) struct TableOptions {
    /// Maximum size of a data block in bytes before compression. A block is larger only if it has a single entry.
    pub(crate) block_size: u32,
    /// Number of entries for each entry that stores its complete key, at least 1.
    pub(crate) restart_interval: u8,
    /// If the order of keys allows no hash, `BinarySearch` is used instead.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) data_block_index_type: DataBlockIndexType,
    /// Entries for each bucket of a hash index.
    pub(crate) data_block_hash_table_util_ratio: f64,
    #[cfg_attr(feature = "serde", serde(skip))]
    pub(crate) compression: CompressionType,
    #[cfg_attr(feature = "serde", serde(rename = "filter_policy"))]
    pub(crate) filter: FilterPolicy,
    /// The prefixes that filters contain besides whole keys.
    pub(crate) prefix_extractor: Option<PrefixExtractor>,
    /// Target size of index and filter partitions in bytes.
    pub(crate) metadata_block_size: u32,
    /// Whether index and filter have several partitions that the cache loads and evicts separately, or one each.
    pub(crate) partition_index_and_filters: bool,
    /// Whether the cache contains the top levels and the indexes and filters that are not partitioned, or the open
    /// table holds them.
    pub(crate) cache_index_and_filter_blocks: bool,
    /// Whether the open table holds the top levels even if `cache_index_and_filter_blocks` is set.
    pub(crate) pin_top_level: bool,
    /// Whether the cache pins the index and filter partitions of tables of levels 0 and 1.
    pub(crate) pin_l0_and_l1: bool,
}

impl Default for TableOptions {
    fn default() -> TableOptions {
        TableOptions {
            block_size: 4096,
            restart_interval: 4, // measured: a get takes a fifth less time than with 16, for 1 to 2 % more space
            data_block_index_type: DataBlockIndexType::Fingerprint,
            data_block_hash_table_util_ratio: 0.75,
            compression: CompressionType::default(),
            filter: FilterPolicy::Bloom { bits_per_key: 10.0 },
            prefix_extractor: None,
            metadata_block_size: 4096,
            partition_index_and_filters: true,
            cache_index_and_filter_blocks: false,
            pin_top_level: true,
            pin_l0_and_l1: false,
        }
    }
}

impl TableOptions {
    /// # Errors
    /// `Invalid` for an option out of its range.
    pub(crate) fn validate(&self) -> Result<()> {
        fn range<T: PartialOrd + std::fmt::Display>(what: &str, value: T, range: &RangeInclusive<T>) -> Result<()> {
            match range.contains(&value) {
                true => Ok(()),
                false => {
                    let (low, high) = (range.start(), range.end());
                    Err(Error::invalid(format!("{what} is {value}, out of its range {low}..={high}")))
                }
            }
        }
        range("block_size", self.block_size, &BLOCK_SIZE_RANGE)?;
        range("metadata_block_size", self.metadata_block_size, &BLOCK_SIZE_RANGE)?;
        range("restart_interval", self.restart_interval, &(1..=255))?;
        range("data_block_hash_table_util_ratio", self.data_block_hash_table_util_ratio, &UTIL_RATIO_RANGE)?;
        if let FilterPolicy::Bloom { bits_per_key } = self.filter {
            range("filter bits_per_key", bits_per_key, &BITS_PER_KEY_RANGE)?;
        }
        self.prefix_extractor.map_or(Ok(()), |extractor| extractor.check())?;
        self.compression.check()
    }
}

/// How an open table keeps its index and filter in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TableReadOptions {
    pub(crate) cache_index_and_filter_blocks: bool,
    pub(crate) pin_top_level: bool,
    /// Whether the index and filter blocks in the cache are pinned until the table is removed, within the cache's
    /// limit for pinned blocks.
    pub(crate) pin_partitions: bool,
}

impl TableReadOptions {
    /// Encodes the options in one byte, which can be stored in an atomic.
    pub(crate) fn to_bits(self) -> u8 {
        u8::from(self.cache_index_and_filter_blocks)
            | u8::from(self.pin_top_level) << 1
            | u8::from(self.pin_partitions) << 2
    }

    pub(crate) fn from_bits(bits: u8) -> TableReadOptions {
        TableReadOptions {
            cache_index_and_filter_blocks: bits & 1 != 0,
            pin_top_level: bits & 2 != 0,
            pin_partitions: bits & 4 != 0,
        }
    }

    /// The options of a table that is on that level when it is opened.
    pub(crate) fn for_level(options: &TableOptions, level: u8) -> TableReadOptions {
        TableReadOptions {
            cache_index_and_filter_blocks: options.cache_index_and_filter_blocks,
            pin_top_level: options.pin_top_level,
            pin_partitions: options.pin_l0_and_l1 && level <= 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_options_survive_their_byte() {
        for bits in 0..8 {
            assert_eq!(TableReadOptions::from_bits(bits).to_bits(), bits);
        }
        let some = TableReadOptions { cache_index_and_filter_blocks: true, pin_top_level: false, pin_partitions: true };
        assert_eq!(TableReadOptions::from_bits(some.to_bits()), some);
    }

    #[test]
    fn options_out_of_range_are_invalid() {
        let good = TableOptions::default();
        good.validate().unwrap();
        let ratio = |ratio| TableOptions { data_block_hash_table_util_ratio: ratio, ..good.clone() };
        ratio(0.1).validate().unwrap();
        ratio(10.0).validate().unwrap();
        let bloom = |bits_per_key| TableOptions { filter: FilterPolicy::Bloom { bits_per_key }, ..good.clone() };
        for bad in [
            TableOptions { block_size: 63, ..good.clone() },
            TableOptions { metadata_block_size: (1 << 20) + 1, ..good.clone() },
            TableOptions { compression: CompressionType::Miniz(11), ..good.clone() },
            TableOptions { restart_interval: 0, ..good.clone() },
            bloom(0.0),
            bloom(0.99),
            bloom(f32::NAN),
            bloom(65.0),
            ratio(0.0),
            ratio(-0.75),
            ratio(0.099),
            ratio(10.1),
            ratio(f64::NAN),
            ratio(f64::INFINITY),
        ] {
            assert_eq!(bad.validate().unwrap_err().kind(), crate::base::ErrorKind::Invalid);
        }
    }
}

//! How tables are written and read.

use crate::base::compression::CompressionType;
use crate::base::{Error, Result};

/// The filter that a table carries, so that a lookup of a key that is not in it seldom reads a block.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum FilterPolicy {
    /// No filter: right where nearly every lookup finds its key.
    None,
    /// A bloom filter; 10 bits for each key let about 1 % of absent keys through.
    Bloom {
        /// More than 0, at most 64.
        bits_per_key: f32,
    },
}

/// How a data block leads to its entries. Tables of every kind can be read side by side.
///
/// How they compare is told in `docs/decisions/0011-fingerprint-blocks-by-default.md`; how they lie in the file, in
/// `docs/format/block.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DataBlockIndexType {
    /// Restart points: keys are stored by what they do not share with the key before, and some whole for a binary
    /// search. The smallest.
    BinarySearch,
    /// The same, and behind it a hash index: a byte for each bucket, which leads a lookup of one key to its restart
    /// interval. A block of more than 253 intervals has none. Scans and seeks use the restart points. At its best with
    /// a restart interval of 2.
    BinaryAndHash,
    /// A slot and a fingerprint, one byte of the key's hash, for each entry: a lookup compares sixteen fingerprints at
    /// once, a seek is a binary search over all entries, and every entry is reached without its neighbours.
    Fingerprint,
}

impl DataBlockIndexType {
    /// As settings and properties store it.
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

/// What a bucket of a hash index may hold, on average.
pub(crate) const UTIL_RATIO_RANGE: std::ops::RangeInclusive<f64> = 0.1..=10.0;

/// How a table is written, and how it is held when it is open.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TableOptions {
    /// Data blocks end before this, in bytes before the codec, unless one entry is larger.
    pub(crate) block_size: u32,
    /// Number of entries of a data block per entry with its whole key; 0 counts as 1.
    pub(crate) restart_interval: u8,
    /// Where the order of keys allows no hash, `BinarySearch` is written.
    pub(crate) data_block_index_type: DataBlockIndexType,
    /// Entries for each bucket of a hash index.
    pub(crate) data_block_hash_table_util_ratio: f64,
    pub(crate) compression: CompressionType,
    pub(crate) filter: FilterPolicy,
    /// Target of pieces of index and filter, in bytes.
    pub(crate) metadata_block_size: u32,
    /// Whether index and filter have pieces that come and go on their own, or one each.
    pub(crate) partition_index_and_filters: bool,
    /// Whether what is not partitioned lives in the cache or with the open table.
    pub(crate) cache_index_and_filter_blocks: bool,
    /// Whether the tops stay with the open table even so.
    pub(crate) pin_top_level: bool,
    /// Whether the cache keeps the pieces of tables of levels 0 and 1.
    pub(crate) pin_l0_and_l1: bool,
}

impl Default for TableOptions {
    fn default() -> TableOptions {
        TableOptions {
            block_size: 4096,
            restart_interval: 4, // measured: a get takes a fifth less than with 16, for 1 to 2 % of size
            data_block_index_type: DataBlockIndexType::Fingerprint,
            data_block_hash_table_util_ratio: 0.75,
            compression: CompressionType::default(),
            filter: FilterPolicy::Bloom { bits_per_key: 10.0 },
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
    /// `Invalid` for options out of their range.
    pub(crate) fn validate(&self) -> Result<()> {
        const SIZES: std::ops::RangeInclusive<u32> = 64..=(16 << 20);
        self.compression.check()?;
        for (name, size) in [("block_size", self.block_size), ("metadata_block_size", self.metadata_block_size)] {
            if !SIZES.contains(&size) {
                return Err(Error::invalid(format!("{name} {size} is out of range 64 B ..= 16 MiB")));
            }
        }
        let ratio = self.data_block_hash_table_util_ratio;
        if !UTIL_RATIO_RANGE.contains(&ratio) {
            let (low, high) = (UTIL_RATIO_RANGE.start(), UTIL_RATIO_RANGE.end());
            let what = format!("data_block_hash_table_util_ratio {ratio} is out of range {low} ..= {high}");
            return Err(Error::invalid(what));
        }
        match self.filter {
            FilterPolicy::Bloom { bits_per_key } if !(bits_per_key > 0.0 && bits_per_key <= 64.0) => {
                Err(Error::invalid(format!("{bits_per_key} bits for each key of a filter are out of range 0..=64")))
            }
            _ => Ok(()),
        }
    }
}

/// How an open table holds its index and filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TableReadOptions {
    pub(crate) cache_index_and_filter_blocks: bool,
    pub(crate) pin_top_level: bool,
    /// Whether what is in the cache stays there until the table goes, as far as the cache has room for such.
    pub(crate) pin_partitions: bool,
}

impl TableReadOptions {
    /// As one byte, which can be changed while it is read.
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

    /// For a table that is on that level when it is opened.
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
            TableOptions { metadata_block_size: (16 << 20) + 1, ..good.clone() },
            TableOptions { compression: CompressionType::Miniz(11), ..good.clone() },
            bloom(0.0),
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

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

/// How a table is written, and how it is held when it is open.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TableOptions {
    /// Data blocks end before this, in bytes before the codec, unless one entry is larger.
    pub(crate) block_size: u32,
    /// Every so many entries of a data block, one stands with its whole key; 0 counts as 1.
    pub(crate) restart_interval: u8,
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
    pub(crate) fn check(&self) -> Result<()> {
        const SIZES: std::ops::RangeInclusive<u32> = 64..=(16 << 20);
        self.compression.check()?;
        for (name, size) in [("block_size", self.block_size), ("metadata_block_size", self.metadata_block_size)] {
            if !SIZES.contains(&size) {
                return Err(Error::invalid(format!("{name} {size} is out of range 64 B ..= 16 MiB")));
            }
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
pub(crate) struct ReadOptions {
    pub(crate) cache_index_and_filter_blocks: bool,
    pub(crate) pin_top_level: bool,
    /// Whether what is in the cache stays there until the table goes, as far as the cache has room for such.
    pub(crate) pin_pieces: bool,
}

impl ReadOptions {
    /// For a table that is on that level when it is opened.
    pub(crate) fn at(options: &TableOptions, level: u8) -> ReadOptions {
        ReadOptions {
            cache_index_and_filter_blocks: options.cache_index_and_filter_blocks,
            pin_top_level: options.pin_top_level,
            pin_pieces: options.pin_l0_and_l1 && level <= 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_out_of_range_are_invalid() {
        let good = TableOptions::default();
        good.check().unwrap();
        let bloom = |bits_per_key| TableOptions { filter: FilterPolicy::Bloom { bits_per_key }, ..good.clone() };
        for bad in [
            TableOptions { block_size: 63, ..good.clone() },
            TableOptions { metadata_block_size: (16 << 20) + 1, ..good.clone() },
            TableOptions { compression: CompressionType::Miniz(11), ..good.clone() },
            bloom(0.0),
            bloom(f32::NAN),
            bloom(65.0),
        ] {
            assert_eq!(bad.check().unwrap_err().kind(), crate::base::ErrorKind::Invalid);
        }
    }
}

//! Options for writing and reading tables.

use crate::base::Result;
use crate::base::coding::ByteReader;
use crate::base::compression::CompressionType;
use crate::base::options::{OptionValue, check_range, number_options, option_struct};
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

/// The table of the options of tables, for the macro `$make`: `options!` makes [`TableOptions`] of it, and
/// `option_setters!` the methods of `PartitionCreateOptions` that set them.
macro_rules! table_options {
    ($make:ident! $($head:tt)*) => { $make! { $($head)* {
        /// Sets the size of a data block before compression in bytes, 64 to 1 MiB. Default 4 KiB.
        ///
        /// ```
        /// # fn main() -> azekura::Result<()> {
        /// # let dir = tempfile::tempdir().unwrap();
        /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
        /// # use azekura::PartitionCreateOptions;
        /// let options = PartitionCreateOptions::default().block_size(16 << 10); // for scans: fewer, larger reads
        /// assert!(db.open_partition("log", options.clone()).is_ok());
        /// assert!(db.open_partition("log", options.block_size(63)).is_err()); // out of range
        /// # Ok(()) }
        /// ```
        [1] block_size(bytes): u32 = 4096, in 64..=1 << 20;

        /// Sets the number of entries between restart points in a data block, 1 to 255. Default 4.
        ///
        /// A larger interval makes blocks smaller; a smaller one makes lookups faster. Blocks without restart points
        /// ignore it.
        ///
        /// ```
        /// # fn main() -> azekura::Result<()> {
        /// # let dir = tempfile::tempdir().unwrap();
        /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
        /// # use azekura::PartitionCreateOptions;
        /// let options = PartitionCreateOptions::default().restart_interval(16); // 1 to 2 % smaller, slower lookups
        /// assert!(db.open_partition("log", options.clone()).is_ok());
        /// assert!(db.open_partition("log", options.restart_interval(0)).is_err()); // out of range
        /// # Ok(()) }
        /// ```
        // Measured: a get takes a fifth less time than with 16, for 1 to 2 % more space.
        [2] restart_interval(entries): u8 = 4, in 1..=255;

        // If the order of keys allows no hash, `BinarySearch` is used instead.
        data_block_index_type: #[cfg_attr(feature = "serde", serde(skip))] DataBlockIndexType
            = DataBlockIndexType::Fingerprint;

        /// Sets the entries per bucket of the hash index of a [`DataBlockIndexType::BinaryAndHash`] block, 0.1 to 10.
        /// Default 0.75.
        ///
        /// A lower ratio makes the index larger and leaves fewer lookups to the binary search.
        ///
        /// ```
        /// # fn main() -> azekura::Result<()> {
        /// # let dir = tempfile::tempdir().unwrap();
        /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
        /// # use azekura::{DataBlockIndexType, PartitionCreateOptions};
        /// let hashed = PartitionCreateOptions::default().data_block_index_type(DataBlockIndexType::BinaryAndHash);
        /// let options = hashed.restart_interval(2).data_block_hash_table_util_ratio(0.5); // two buckets an entry
        /// assert!(db.open_partition("users", options.clone()).is_ok());
        /// assert!(db.open_partition("users", options.data_block_hash_table_util_ratio(0.0)).is_err()); // out of range
        /// # Ok(()) }
        /// ```
        [14] data_block_hash_table_util_ratio(ratio): f64 = 0.75, in 0.1..=10.0;

        compression: #[cfg_attr(feature = "serde", serde(skip))] CompressionType = CompressionType::default(),
            check |codec| codec.check();

        /// Sets the filter of every table. Default: Bloom filter with 10 bits per key.
        ///
        /// ```
        /// # fn main() -> azekura::Result<()> {
        /// # let dir = tempfile::tempdir().unwrap();
        /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
        /// use azekura::{FilterPolicy, PartitionCreateOptions};
        /// // 16 bits for each key: about 0.1 % instead of 1 % of the lookups of absent keys read a block.
        /// let strict = PartitionCreateOptions::default().filter_policy(FilterPolicy::Bloom { bits_per_key: 16.0 });
        /// let none = PartitionCreateOptions::default().filter_policy(FilterPolicy::None);
        /// assert!(db.open_partition("users", strict).is_ok() && db.open_partition("log", none).is_ok());
        /// # Ok(()) }
        /// ```
        [5] filter_policy(policy): FilterPolicy = FilterPolicy::Bloom { bits_per_key: 10.0 }, check check_filter;

        /// Sets the prefixes of keys that filters contain besides whole keys, so that scans of one prefix skip tables
        /// without it. Default: none. It has no effect without a filter. `Invalid` with a comparator that is not
        /// bytewise.
        ///
        /// ```
        /// # fn main() -> azekura::Result<()> {
        /// # let dir = tempfile::tempdir().unwrap();
        /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
        /// use azekura::{PartitionCreateOptions, PrefixExtractor};
        /// // Keys: 8 bytes of a user's number, then a time.
        /// let options = PartitionCreateOptions::default().prefix_extractor(PrefixExtractor::Fixed(8));
        /// let events = db.open_partition("events", options)?;
        /// events.insert([&1u64.to_be_bytes()[..], b"09:00"].concat(), "login")?;
        /// events.flush()?;
        /// assert_eq!(events.prefix(1u64.to_be_bytes()).count(), 1);
        /// assert_eq!(events.prefix(2u64.to_be_bytes()).count(), 0); // reads no data block
        /// # Ok(()) }
        /// ```
        [20] prefix_extractor(extractor: impl Into<Option<PrefixExtractor>>): Option<PrefixExtractor> = None,
            check |extractor| extractor.iter().try_for_each(PrefixExtractor::check);

        /// Sets the size of an index partition or filter partition in bytes, 64 to 1 MiB. Default 4 KiB.
        ///
        /// ```
        /// # fn main() -> azekura::Result<()> {
        /// # let dir = tempfile::tempdir().unwrap();
        /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
        /// # use azekura::PartitionCreateOptions;
        /// let options = PartitionCreateOptions::default().metadata_block_size(16 << 10); // smaller top levels
        /// assert!(db.open_partition("log", options.clone()).is_ok());
        /// assert!(db.open_partition("log", options.metadata_block_size(63)).is_err()); // out of range
        /// # Ok(()) }
        /// ```
        [3] metadata_block_size(bytes): u32 = 4096, in 64..=1 << 20;

        /// Sets whether the index and filter of a table are split into partitions that are loaded on demand. Default:
        /// yes.
        ///
        /// ```
        /// # fn main() -> azekura::Result<()> {
        /// # let dir = tempfile::tempdir().unwrap();
        /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
        /// # use azekura::PartitionCreateOptions;
        /// let options = PartitionCreateOptions::default().partition_index_and_filters(false); // one index, one filter
        /// let small = db.open_partition("small", options)?;
        /// small.insert("key", "value")?;
        /// small.flush()?;
        /// small.get("key")?;
        /// assert!(small.metrics().pinned_bytes > 0); // the open table holds both, and reads them from disk once
        /// # Ok(()) }
        /// ```
        [4 bit 0] partition_index_and_filters(yes): bool = true;

        /// Sets whether the top levels of index and filter, and an index or filter that is not partitioned, are stored
        /// in the block cache, where they can be evicted. With `false` the open table holds them. Default: no. Index
        /// and filter partitions are always stored in the cache.
        ///
        /// For an existing partition the change applies to tables that were not read since open; if the partition is
        /// opened before any read, that is all tables. The index or filter of a table that is not partitioned may
        /// exceed half of the cache. The cache does not admit such a block, so each lookup reads it from disk, unless
        /// the block is so small (at most 16 KiB) that the open table holds it.
        ///
        /// ```
        /// # fn main() -> azekura::Result<()> {
        /// # let dir = tempfile::tempdir().unwrap();
        /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
        /// # use azekura::PartitionCreateOptions;
        /// // `cache_size` then bounds the memory for the indexes and filters of all tables.
        /// let options = PartitionCreateOptions::default().cache_index_and_filter_blocks(true).pin_top_level(false);
        /// let log = db.open_partition("log", options)?;
        /// log.insert("1", "started")?;
        /// log.flush()?;
        /// log.get("1")?;
        /// assert!(db.metrics().cache.index.blocks > 0);
        /// # Ok(()) }
        /// ```
        [4 bit 1] cache_index_and_filter_blocks(yes): bool = false;

        /// Sets whether the open table holds the top levels of index and filter even with
        /// `cache_index_and_filter_blocks(true)`. Default: yes. A change applies to existing tables as for
        /// [`cache_index_and_filter_blocks`](Self::cache_index_and_filter_blocks).
        ///
        /// ```
        /// # use azekura::PartitionCreateOptions;
        /// let options = PartitionCreateOptions::default().cache_index_and_filter_blocks(true);
        /// assert_eq!(options.clone().pin_top_level(true), options); // the default
        /// assert_ne!(options.clone().pin_top_level(false), options); // the cache may evict the top levels
        /// ```
        [4 bit 2] pin_top_level(yes): bool = true;

        /// Sets whether the cache pins the index and filter partitions of tables that were written to, or opened on,
        /// levels 0 and 1, for as long as the table exists. Default: no.
        ///
        /// Pinned partitions use at most a quarter of the cache. Partitions beyond that are evicted like other blocks.
        ///
        /// ```
        /// # fn main() -> azekura::Result<()> {
        /// # let dir = tempfile::tempdir().unwrap();
        /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
        /// # use azekura::PartitionCreateOptions;
        /// let log = db.open_partition("log", PartitionCreateOptions::default().pin_l0_and_l1(true))?;
        /// log.insert("1", "started")?;
        /// log.flush()?; // writes a table of level 0
        /// log.get("1")?;
        /// assert!(db.metrics().cache.pinned > 0);
        /// # Ok(()) }
        /// ```
        [4 bit 3] pin_l0_and_l1(yes): bool = false;
    } } };
}

pub(crate) use table_options;

table_options! {
    option_struct!
    /// How a table is written, and how it is kept in memory when it is open.
    #[derive(Clone, Debug, PartialEq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
    pub(crate) struct TableOptions
}

fn check_filter(filter: &FilterPolicy) -> Result<()> {
    match *filter {
        FilterPolicy::None => Ok(()),
        FilterPolicy::Bloom { bits_per_key } => check_range("filter bits_per_key", bits_per_key, 1.0..=64.0),
    }
}

number_options! {
    // The bits of the number of bits for each key; 0 for no filter.
    FilterPolicy: |filter| match *filter {
        FilterPolicy::None => 0,
        FilterPolicy::Bloom { bits_per_key } => u64::from(bits_per_key.to_bits()),
    }, |number| match u32::try_from(number).ok()? {
        0 => Some(FilterPolicy::None),
        bits => Some(FilterPolicy::Bloom { bits_per_key: f32::from_bits(bits) }),
    };
    // 0 for `None`. An unknown number is read as `None`.
    Option<DataBlockIndexType>: |index_type| index_type.map_or(0, DataBlockIndexType::to_number),
        |number| Some(DataBlockIndexType::from_number(number));
}

/// The name. An unknown one is read as `None`.
impl OptionValue for Option<PrefixExtractor> {
    fn encode(&self) -> Option<Vec<u8>> {
        self.map(|extractor| extractor.name().into_bytes())
    }

    fn decode(d: &mut ByteReader<'_>) -> Result<Option<PrefixExtractor>> {
        Ok(PrefixExtractor::from_name(d.rest()))
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
    use crate::base::options::OptionTable;

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
        good.check_ranges().unwrap();
        let ratio = |ratio| TableOptions { data_block_hash_table_util_ratio: ratio, ..good.clone() };
        ratio(0.1).check_ranges().unwrap();
        ratio(10.0).check_ranges().unwrap();
        let bloom = |bits_per_key| TableOptions { filter_policy: FilterPolicy::Bloom { bits_per_key }, ..good.clone() };
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
            assert_eq!(bad.check_ranges().unwrap_err().kind(), crate::base::ErrorKind::Invalid);
        }
    }
}

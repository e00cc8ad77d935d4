//! Options of a partition, their ranges, and their encoding in the manifest.

use std::time::Duration;

use crate::base::coding::{ByteReader, put_bytes, put_number_field, put_varint};
use crate::base::compression::CompressionType;
use crate::base::version_edit::EngineKind;
use crate::base::{Error, KeyOrder, Result};
use crate::db::state::partition_expiry::ttl_ms;
use crate::lsm::options::{KvSeparationOptions, LeveledOptions, LsmOptions};
use crate::pmem::options::{PMEM_OPTIONS_FIELD, PmemOptions};
use crate::table::options::{DataBlockIndexType, FilterPolicy, TableOptions};
use crate::table::prefix::PrefixExtractor;
use crate::tree::partition_tree::TreeOptions;

/// Field of the stored options with the name of the prefix extractor.
const PREFIX_EXTRACTOR_FIELD: u64 = 20;
/// Field of the default time to live: seconds and nanoseconds.
const DEFAULT_TTL_FIELD: u64 = 22;

/// Selects how compaction merges tables in the background.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// use azekura::{CompactionStrategy, LeveledOptions, PartitionCreateOptions};
/// let strategy = CompactionStrategy::Leveled(LeveledOptions::default().l0_compaction_trigger(8));
/// let log = db.open_partition("log", PartitionCreateOptions::default().compaction_strategy(strategy))?;
/// log.insert("1", "started")?;
/// log.major_compact()?;
/// assert_eq!(log.metrics().levels.last().unwrap().runs, 1); // leveled: each level below 0 is one run
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum CompactionStrategy {
    /// Leveled compaction: each level below level 0 is one sorted run, by default about ten times as large as the
    /// level above it.
    Leveled(LeveledOptions),
}

impl Default for CompactionStrategy {
    fn default() -> CompactionStrategy {
        CompactionStrategy::Leveled(LeveledOptions::default())
    }
}

/// Selects the storage engine of a partition. The engine is fixed when the partition is created.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// use azekura::{EngineType, PartitionCreateOptions, PmemOptions};
/// let options = PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default()));
/// let sessions = db.open_partition("sessions", options)?;
/// assert!(sessions.metrics().pool.is_some());
/// let as_lsm = db.open_partition("sessions", PartitionCreateOptions::default());
/// assert_eq!(as_lsm.unwrap_err().kind(), azekura::ErrorKind::Invalid); // the engine is fixed
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum EngineType {
    /// A log-structured merge tree (LSM): memtables are flushed to tables, and compaction merges the tables. For any
    /// amount of data.
    #[default]
    Lsm,
    /// A B+ tree in memory, durable through the WAL and checkpoints. Reads and writes run at memory speed; the data
    /// must fit in memory.
    Pmem(PmemOptions),
}

impl EngineType {
    /// Whether a tree of `kind` has this engine.
    pub(crate) fn is_kind(&self, kind: EngineKind) -> bool {
        (*self == EngineType::Lsm) == (kind == EngineKind::Lsm)
    }

    /// Returns the stored engine kind. `memory` says whether files of the directory are mapped as memory.
    pub(crate) fn kind_in(&self, memory: bool) -> EngineKind {
        match self {
            EngineType::Lsm => EngineKind::Lsm,
            EngineType::Pmem(_) if memory => EngineKind::PmemMapped,
            EngineType::Pmem(_) => EngineKind::Pmem,
        }
    }
}

/// Options of a partition. For an existing partition they apply to data written after it is opened with them.
///
/// ```
/// use azekura::{CompressionType, PartitionCreateOptions};
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// let small_on_disk = PartitionCreateOptions::default().compression(CompressionType::Miniz(9)).block_size(16 << 10);
/// let log = db.open_partition("log", small_on_disk)?;
/// log.insert("zeros", [0; 50_000])?;
/// log.flush()?;
/// assert!(log.disk_space() < 5_000);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct PartitionCreateOptions {
    /// Its data block index type applies if the field `data_block_index_type` is `None`.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub(crate) table: TableOptions,
    pub(crate) data_block_index_type: Option<DataBlockIndexType>,
    /// `None`: the codec of the database.
    pub(crate) compression: Option<CompressionType>,
    pub(crate) compression_per_level: Vec<CompressionType>,
    pub(crate) max_memtable_size: u64,
    #[cfg_attr(feature = "serde", serde(rename = "compaction_strategy"))]
    pub(crate) strategy: CompactionStrategy,
    pub(crate) kv_separation: Option<KvSeparationOptions>,
    pub(crate) default_ttl: Option<Duration>,
    pub(crate) engine: EngineType,
}

impl Default for PartitionCreateOptions {
    fn default() -> PartitionCreateOptions {
        PartitionCreateOptions {
            table: TableOptions::default(),
            data_block_index_type: None,
            compression: None,
            compression_per_level: Vec::new(),
            max_memtable_size: 64 << 20,
            strategy: CompactionStrategy::default(),
            kv_separation: None,
            default_ttl: None,
            engine: EngineType::Lsm,
        }
    }
}

impl PartitionCreateOptions {
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
    #[must_use]
    pub fn block_size(mut self, bytes: u32) -> Self {
        self.table.block_size = bytes;
        self
    }

    /// Sets the compression codec of all levels. Default: the codec of the database.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// use azekura::{CompressionType, PartitionCreateOptions};
    /// let options = PartitionCreateOptions::default().compression(CompressionType::Miniz(9));
    /// let log = db.open_partition("log", options)?;
    /// log.insert("zeros", [0; 50_000])?;
    /// log.flush()?;
    /// assert!(log.disk_space() < 5_000);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn compression(mut self, compression: CompressionType) -> Self {
        self.compression = Some(compression);
        self
    }

    /// Sets the compression codec of each level, starting at level 0; at most 64 entries. The last entry applies to
    /// all lower levels. Default: empty, which means one codec for all levels.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// use azekura::{CompressionType, PartitionCreateOptions};
    /// // Level 0 is not compressed, level 1 uses LZ4, all lower levels use zlib.
    /// let levels = vec![CompressionType::None, CompressionType::Lz4, CompressionType::Miniz(6)];
    /// let log = db.open_partition("log", PartitionCreateOptions::default().compression_per_level(levels))?;
    /// log.insert("zeros", [0; 50_000])?;
    /// log.flush()?;
    /// assert!(log.disk_space() > 50_000);
    /// log.major_compact()?; // to the lowest level
    /// assert!(log.disk_space() < 5_000);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn compression_per_level(mut self, levels: Vec<CompressionType>) -> Self {
        self.compression_per_level = levels;
        self
    }

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
    #[must_use]
    pub fn restart_interval(mut self, entries: u8) -> Self {
        self.table.restart_interval = entries;
        self
    }

    /// Sets how a lookup finds an entry in a data block. Default: [`DataBlockIndexType::Fingerprint`], or
    /// `BinarySearch` if the comparator does not allow keys to be hashed.
    ///
    /// If the [`Comparator`](crate::Comparator) may treat keys with different bytes as equal and has no canonical
    /// form for them, any type except `BinarySearch` is `Invalid`.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// use azekura::{DataBlockIndexType, PartitionCreateOptions};
    /// let options = PartitionCreateOptions::default().data_block_index_type(DataBlockIndexType::BinarySearch);
    /// let log = db.open_partition("log", options)?; // the smallest layout
    /// log.insert("1", "started")?;
    /// log.flush()?;
    /// assert_eq!(log.get("1")?.unwrap(), "started");
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn data_block_index_type(mut self, index_type: DataBlockIndexType) -> Self {
        self.data_block_index_type = Some(index_type);
        self
    }

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
    /// let options = hashed.restart_interval(2).data_block_hash_table_util_ratio(0.5); // two buckets for each entry
    /// assert!(db.open_partition("users", options.clone()).is_ok());
    /// assert!(db.open_partition("users", options.data_block_hash_table_util_ratio(0.0)).is_err()); // out of range
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn data_block_hash_table_util_ratio(mut self, ratio: f64) -> Self {
        self.table.data_block_hash_table_util_ratio = ratio;
        self
    }

    /// Sets whether the index and filter of a table are split into partitions that are loaded on demand. Default: yes.
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
    #[must_use]
    pub fn partition_index_and_filters(mut self, yes: bool) -> Self {
        self.table.partition_index_and_filters = yes;
        self
    }

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
    #[must_use]
    pub fn metadata_block_size(mut self, bytes: u32) -> Self {
        self.table.metadata_block_size = bytes;
        self
    }

    /// Sets whether the top levels of index and filter, and an index or filter that is not partitioned, are stored in
    /// the block cache, where they can be evicted. With `false` the open table holds them. Default: no. Index and
    /// filter partitions are always stored in the cache.
    ///
    /// For an existing partition the change applies to tables that were not read since open; if the partition is
    /// opened before any read, that is all tables. The index or filter of a table that is not partitioned may exceed
    /// half of the cache. The cache does not admit such a block, so each lookup reads it from disk, unless the block is
    /// so small (at most 16 KiB) that the open table holds it.
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
    #[must_use]
    pub fn cache_index_and_filter_blocks(mut self, yes: bool) -> Self {
        self.table.cache_index_and_filter_blocks = yes;
        self
    }

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
    #[must_use]
    pub fn pin_top_level(mut self, yes: bool) -> Self {
        self.table.pin_top_level = yes;
        self
    }

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
    #[must_use]
    pub fn pin_l0_and_l1(mut self, yes: bool) -> Self {
        self.table.pin_l0_and_l1 = yes;
        self
    }

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
    #[must_use]
    pub fn filter_policy(mut self, policy: FilterPolicy) -> Self {
        self.table.filter = policy;
        self
    }

    /// Sets the prefixes of keys that filters contain besides whole keys, so that scans of one prefix skip tables
    /// without it. Default: none. It has no effect without a filter. `Invalid` with a comparator that is not bytewise.
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
    #[must_use]
    pub fn prefix_extractor(mut self, extractor: impl Into<Option<PrefixExtractor>>) -> Self {
        self.table.prefix_extractor = extractor.into();
        self
    }

    /// Sets the compaction strategy. Default: leveled.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// # let db = azekura::Config::new(&path).workers(0).open()?;
    /// use azekura::{CompactionStrategy, LeveledOptions, PartitionCreateOptions};
    /// let eager = CompactionStrategy::Leveled(LeveledOptions::default().l0_compaction_trigger(2));
    /// let log = db.open_partition("log", PartitionCreateOptions::default().compaction_strategy(eager))?;
    /// for line in ["started", "stopped"] {
    ///     log.insert("last", line)?;
    ///     log.flush()?; // a run of level 0
    /// }
    /// while db.step()? {}
    /// assert_eq!((db.metrics().compactions, log.metrics().levels[0].runs), (1, 0));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn compaction_strategy(mut self, strategy: CompactionStrategy) -> Self {
        self.strategy = strategy;
        self
    }

    /// Sets the size in bytes at which a memtable is sealed and flushed, 4 KiB to 2 GiB. Default 64 MiB.
    ///
    /// The size is that of the memory of records and indexes, of which up to 128 KiB are allocated ahead of use. So a
    /// size below 128 KiB seals a memtable after one record, as a test may want: each record makes a table.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// # let db = azekura::Config::new(&path).workers(0).open()?;
    /// # use azekura::PartitionCreateOptions;
    /// let log = db.open_partition("log", PartitionCreateOptions::default().max_memtable_size(1 << 20))?;
    /// for line in 0..7u8 {
    ///     log.insert([line], vec![line; 200_000])?;
    /// }
    /// assert_eq!(log.metrics().sealed_memtables, 1); // waits for a flush
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn max_memtable_size(mut self, bytes: u64) -> Self {
        self.max_memtable_size = bytes;
        self
    }

    /// Enables key-value separation: flushes write large values to blob files, so that compaction does not rewrite
    /// them. Default: off.
    ///
    /// A partition that was created with key-value separation and is opened without it keeps its blob files and
    /// writes no new ones.
    ///
    /// ```
    /// # use azekura::{Config, KvSeparationOptions, PartitionCreateOptions};
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = Config::new(dir.path().join("db")).open()?;
    /// let options = PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default());
    /// let pages = db.open_partition("pages", options)?;
    /// pages.insert("short", "stays in the table")?;
    /// pages.insert("long", vec![b'x'; 100_000])?;
    /// pages.flush()?;
    /// assert_eq!(pages.metrics().blob_files[0].values, 1);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn with_kv_separation(mut self, options: KvSeparationOptions) -> Self {
        self.kv_separation = Some(options);
        self
    }

    /// Sets the time to live of records that are written without one: by [`insert`](crate::Partition::insert), in
    /// batches and transactions, by `compare_and_swap` and its relatives, and by ingests. It counts from the write; see
    /// [`Partition::insert_with_ttl`](crate::Partition::insert_with_ttl) and
    /// [`Partition::ingest`](crate::Partition::ingest). Default: `None`, such records do not expire.
    /// Changing it does not change existing records. Operands of merges do not expire. Not 0, and less than 2^64 ms.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// use azekura::PartitionCreateOptions;
    /// use std::time::Duration;
    /// let options = PartitionCreateOptions::default().default_ttl(Duration::from_millis(20));
    /// let cache = db.open_partition("cache", options)?;
    /// cache.insert("page", "text")?;
    /// cache.insert_with_ttl("logo", "image", Duration::from_secs(3600))?;
    /// std::thread::sleep(Duration::from_millis(40));
    /// assert_eq!((cache.contains_key("page")?, cache.contains_key("logo")?), (false, true));
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn default_ttl(mut self, ttl: impl Into<Option<Duration>>) -> Self {
        self.default_ttl = ttl.into();
        self
    }

    /// Sets the storage engine. Default: [`EngineType::Lsm`].
    ///
    /// All other options except [`default_ttl`](Self::default_ttl) apply to the LSM engine only; a pmem partition uses
    /// [`PmemOptions`]. Opening an existing
    /// partition with another engine than it was created with is `Invalid`.
    ///
    /// ```
    /// # use azekura::{Config, EngineType, PartitionCreateOptions, PmemOptions};
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = Config::new(dir.path().join("db")).open()?;
    /// let in_memory = EngineType::Pmem(PmemOptions::default().max_size(64 << 20));
    /// let counters = db.open_partition("counters", PartitionCreateOptions::default().engine(in_memory))?;
    /// counters.insert("visits", 1u64.to_le_bytes())?;
    /// assert_eq!(counters.metrics().pool.unwrap().records, 1);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn engine(mut self, engine: EngineType) -> Self {
        self.engine = engine;
        self
    }

    /// The default time to live in milliseconds, which [`check`](Self::check) has validated.
    pub(crate) fn default_ttl_ms(&self) -> Option<u64> {
        self.default_ttl.and_then(|ttl| ttl_ms(ttl).ok())
    }

    /// Returns `Invalid` if an option is out of its range.
    pub(crate) fn check(&self) -> Result<()> {
        let range = |what: &str, value: u64, low: u64, high: u64| match (low..=high).contains(&value) {
            true => Ok(()),
            false => Err(Error::invalid(format!("{what} is {value}, out of its range {low}..={high}"))),
        };
        self.table.validate()?;
        range("max_memtable_size", self.max_memtable_size, 4 << 10, 2 << 30)?;
        range("compression_per_level", self.compression_per_level.len() as u64, 0, 64)?;
        let CompactionStrategy::Leveled(leveled) = &self.strategy;
        leveled.check()?;
        self.kv_separation.as_ref().map_or(Ok(()), KvSeparationOptions::check)?;
        self.default_ttl.map(ttl_ms).transpose()?;
        if let EngineType::Pmem(pmem) = &self.engine {
            pmem.check()?;
            if self.kv_separation.is_some() {
                return Err(Error::invalid("key-value separation requires the LSM engine; a pmem partition has none"));
            }
        }
        self.compression.iter().chain(&self.compression_per_level).try_for_each(|codec| codec.check())
    }

    /// Returns `Invalid` if the key order does not allow an option.
    pub(crate) fn check_order(&self, order: &KeyOrder) -> Result<()> {
        if self.table.prefix_extractor.is_some() && !order.is_bytewise() {
            let name = order.name();
            return Err(Error::invalid(format!(
                "prefix_extractor requires the order of bytes, not comparator {name:?}"
            )));
        }
        match self.data_block_index_type {
            Some(index_type) if index_type.needs_key_hash() && !order.can_hash_keys() => Err(Error::invalid(format!(
                "data_block_index_type {index_type:?} hashes keys, but comparator {:?} may treat keys with \
                     different bytes as equal and has no canonical form for them",
                order.name()
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the options of the tree.
    pub(crate) fn tree(&self, default_codec: CompressionType) -> TreeOptions {
        let CompactionStrategy::Leveled(leveled) = &self.strategy;
        let codec = self.compression.unwrap_or(default_codec);
        let index_type = self.data_block_index_type.unwrap_or(self.table.data_block_index_type);
        let lsm = LsmOptions {
            max_memtable_size: self.max_memtable_size,
            compaction: leveled.clone(),
            table: TableOptions { compression: codec, data_block_index_type: index_type, ..self.table.clone() },
            compression_per_level: self.compression_per_level.clone(),
            kv_separation: self.kv_separation.clone(),
        };
        let pmem = match &self.engine {
            EngineType::Pmem(options) => options.clone(),
            EngineType::Lsm => PmemOptions::default(),
        };
        TreeOptions { lsm, pmem }
    }

    /// Encodes the options for the manifest, so that a tool that opens the partition without options uses the same
    /// ones.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let CompactionStrategy::Leveled(leveled) = &self.strategy;
        let flags = u64::from(self.table.partition_index_and_filters)
            | u64::from(self.table.cache_index_and_filter_blocks) << 1
            | u64::from(self.table.pin_top_level) << 2
            | u64::from(self.table.pin_l0_and_l1) << 3;
        let filter = match self.table.filter {
            FilterPolicy::None => 0,
            FilterPolicy::Bloom { bits_per_key } => u64::from(bits_per_key.to_bits()),
        };
        let numbers = [
            (1, u64::from(self.table.block_size)),
            (2, u64::from(self.table.restart_interval)),
            (3, u64::from(self.table.metadata_block_size)),
            (4, flags),
            (5, filter),
            (6, self.max_memtable_size),
            (7, u64::from(leveled.l0_compaction_trigger)),
            (8, leveled.target_file_size),
            (9, u64::from(leveled.level_size_multiplier)),
            (12, leveled.base_level_size),
            (13, self.data_block_index_type.map_or(0, DataBlockIndexType::to_number)),
            (14, self.table.data_block_hash_table_util_ratio.to_bits()),
        ];
        let mut out = Vec::new();
        for (field, number) in numbers {
            put_number_field(&mut out, field, number);
        }
        put_varint(&mut out, 10);
        put_bytes(&mut out, &self.compression.iter().flat_map(|codec| codec.to_stored()).collect::<Vec<_>>());
        put_varint(&mut out, 11);
        let levels: Vec<u8> = self.compression_per_level.iter().flat_map(|codec| codec.to_stored()).collect();
        put_bytes(&mut out, &levels);
        if let Some(separation) = &self.kv_separation {
            let mut value = Vec::new();
            put_varint(&mut value, u64::from(separation.threshold));
            put_varint(&mut value, separation.target_size);
            value.extend_from_slice(&separation.compression.to_stored());
            put_varint(&mut value, separation.automatic_gc.map_or(0, |target| u64::from(target.to_bits())));
            put_varint(&mut out, 15);
            put_bytes(&mut out, &value);
        }
        if let Some(ttl) = self.default_ttl {
            let mut value = Vec::new();
            put_varint(&mut value, ttl.as_secs());
            put_varint(&mut value, u64::from(ttl.subsec_nanos()));
            put_varint(&mut out, DEFAULT_TTL_FIELD);
            put_bytes(&mut out, &value);
        }
        if let Some(extractor) = self.table.prefix_extractor {
            put_varint(&mut out, PREFIX_EXTRACTOR_FIELD);
            put_bytes(&mut out, extractor.name().as_bytes());
        }
        if let EngineType::Pmem(pmem) = &self.engine {
            put_varint(&mut out, PMEM_OPTIONS_FIELD);
            put_bytes(&mut out, &pmem.encode());
        }
        out
    }

    /// Decodes stored options. Ignores unknown fields. If any value is out of range, returns the defaults for all
    /// options.
    pub(crate) fn decode(bytes: &[u8]) -> Result<PartitionCreateOptions> {
        let mut options = PartitionCreateOptions::default();
        let CompactionStrategy::Leveled(mut leveled) = options.strategy.clone();
        let mut d = ByteReader::new(bytes);
        while !d.is_empty() {
            let field = d.varint()?;
            let value = d.bytes()?;
            let number = || ByteReader::new(value).varint();
            // A number above the range of its option must stay above it.
            let number32 = || number().map(|number| u32::try_from(number).unwrap_or(u32::MAX));
            match field {
                1 => options.table.block_size = number32()?,
                2 => options.table.restart_interval = number()?.try_into().unwrap_or(0),
                3 => options.table.metadata_block_size = number32()?,
                4 => {
                    let flags = number()?;
                    options.table.partition_index_and_filters = flags & 1 != 0;
                    options.table.cache_index_and_filter_blocks = flags & 2 != 0;
                    options.table.pin_top_level = flags & 4 != 0;
                    options.table.pin_l0_and_l1 = flags & 8 != 0;
                }
                5 => {
                    options.table.filter = match number32()? {
                        0 => FilterPolicy::None,
                        bits => FilterPolicy::Bloom { bits_per_key: f32::from_bits(bits) },
                    }
                }
                6 => options.max_memtable_size = number()?,
                7 => leveled.l0_compaction_trigger = number32()?,
                8 => leveled.target_file_size = number()?,
                9 => leveled.level_size_multiplier = number32()?,
                12 => leveled.base_level_size = number()?,
                13 => options.data_block_index_type = DataBlockIndexType::from_number(number()?),
                14 => options.table.data_block_hash_table_util_ratio = f64::from_bits(number()?),
                10 => options.compression = codecs(value)?.first().copied(),
                11 => options.compression_per_level = codecs(value)?,
                15 => options.kv_separation = Some(separation(value)?),
                DEFAULT_TTL_FIELD => options.default_ttl = Some(decode_ttl(value)?),
                PREFIX_EXTRACTOR_FIELD => options.table.prefix_extractor = PrefixExtractor::from_name(value),
                PMEM_OPTIONS_FIELD => options.engine = EngineType::Pmem(PmemOptions::decode(value)?),
                _ => {}
            }
        }
        options.strategy = CompactionStrategy::Leveled(leveled);
        Ok(if options.check().is_ok() { options } else { PartitionCreateOptions::default() })
    }
}

fn separation(bytes: &[u8]) -> Result<KvSeparationOptions> {
    let mut d = ByteReader::new(bytes);
    let (threshold, target_size) = (d.varint_u32()?, d.varint()?);
    let compression = codecs(d.take(2)?)?[0];
    let target = d.varint_u32()?; // 0 means no automatic blob GC, because a space amplification is at least 1
    let automatic_gc = (target != 0).then(|| f32::from_bits(target));
    Ok(KvSeparationOptions { threshold, target_size, compression, automatic_gc, ..KvSeparationOptions::default() })
}

fn decode_ttl(bytes: &[u8]) -> Result<Duration> {
    let mut d = ByteReader::new(bytes);
    let (secs, nanos) = (d.varint()?, d.varint_u32()?);
    match nanos < 1_000_000_000 {
        true => Ok(Duration::new(secs, nanos)),
        false => Err(Error::corruption("stored partition options contain an invalid time to live")),
    }
}

fn codecs(bytes: &[u8]) -> Result<Vec<CompressionType>> {
    let unknown = || Error::corruption("stored partition options contain an unknown compression codec");
    let codec = |pair: &[u8]| CompressionType::from_stored(pair.try_into().ok()?);
    bytes.chunks(2).map(|pair| codec(pair).ok_or_else(unknown)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_round_trip() {
        let options = PartitionCreateOptions::default()
            .block_size(1000)
            .compression(CompressionType::Miniz(7))
            .compression_per_level(vec![CompressionType::None, CompressionType::Lz4])
            .restart_interval(3)
            .data_block_index_type(DataBlockIndexType::BinaryAndHash)
            .data_block_hash_table_util_ratio(0.3)
            .metadata_block_size(512)
            .filter_policy(FilterPolicy::Bloom { bits_per_key: 12.5 })
            .max_memtable_size(5000)
            .partition_index_and_filters(false)
            .cache_index_and_filter_blocks(true)
            .pin_top_level(false)
            .pin_l0_and_l1(true)
            .default_ttl(Duration::new(3, 5));
        assert_eq!(PartitionCreateOptions::decode(&options.encode()).unwrap(), options);
        for gc in [None, Some(2.5)] {
            let separation = KvSeparationOptions::default()
                .separation_threshold(333)
                .blob_file_target_size(1 << 20)
                .compression(CompressionType::Miniz(3))
                .automatic_gc(gc);
            let options = options.clone().with_kv_separation(separation);
            assert_eq!(PartitionCreateOptions::decode(&options.encode()).unwrap(), options);
            assert!(options.clone().with_kv_separation(KvSeparationOptions::default()) != options);
        }
        let pool = PmemOptions::default().max_size(5 << 20).growth_step(1 << 20);
        let pool = options.clone().engine(EngineType::Pmem(pool));
        assert_eq!(PartitionCreateOptions::decode(&pool.encode()).unwrap(), pool);
        assert!(pool.with_kv_separation(KvSeparationOptions::default()).check().is_err());
        let none = PartitionCreateOptions::default().filter_policy(FilterPolicy::None);
        assert_eq!(PartitionCreateOptions::decode(&none.encode()).unwrap(), none);
    }

    #[test]
    fn options_out_of_range_are_invalid() {
        let default = PartitionCreateOptions::default;
        assert!(default().check().is_ok());
        assert!(default().block_size(63).check().is_err());
        assert!(default().restart_interval(0).check().is_err());
        assert!(default().max_memtable_size(1).check().is_err());
        assert!(default().default_ttl(Duration::ZERO).check().is_err());
        assert!(default().default_ttl(Duration::MAX).check().is_err());
        for bad in [0.0, 0.09, 10.5, -1.0, f64::NAN, f64::INFINITY] {
            assert!(default().data_block_hash_table_util_ratio(bad).check().is_err());
        }
        assert!(default().data_block_hash_table_util_ratio(0.1).check().is_ok());
        assert!(default().compression(CompressionType::Miniz(11)).check().is_err());
        assert!(default().filter_policy(FilterPolicy::Bloom { bits_per_key: f32::NAN }).check().is_err());
    }

    /// Regression: the higher bits of a stored number were dropped.
    #[test]
    fn stored_numbers_are_not_cut() {
        let mut bytes = PartitionCreateOptions::default().block_size(1000).encode();
        assert_ne!(PartitionCreateOptions::decode(&bytes).unwrap(), PartitionCreateOptions::default());
        put_number_field(&mut bytes, 1, (1 << 32) + 1000);
        assert_eq!(PartitionCreateOptions::decode(&bytes).unwrap(), PartitionCreateOptions::default());
    }
}

//! Options of a partition, their ranges, and their encoding in the manifest.

use std::time::Duration;

use crate::base::coding::ByteReader;
use crate::base::compression::CompressionType;
use crate::base::options::{
    OptionTable, OptionValue, StoredOption, StoredOptions, check_range, decode_values, encode_fields, encode_values,
    option_setters, options,
};
use crate::base::version_edit::EngineKind;
use crate::base::{Error, ErrorKind, KeyOrder, Result};
use crate::db::state::partition_expiry::ttl_ms;
use crate::lsm::options::{KvSeparationOptions, LeveledOptions, LsmOptions};
use crate::pmem::options::{PMEM_OPTIONS_FIELD, PmemOptions};
use crate::table::options::{DataBlockIndexType, FilterPolicy, TableOptions, table_options};
use crate::table::prefix::PrefixExtractor;
use crate::tree::partition_tree::TreeOptions;

/// Stored fields that follow all others, because versions that wrote the fields in the order of the code had them
/// there.
const LAST_FIELDS: [u64; 6] = [10, 11, 15, 22, 20, PMEM_OPTIONS_FIELD];

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

options! {
    /// Options of a partition. For an existing partition they apply to data written after it is opened with them.
    ///
    /// ```
    /// use azekura::{CompressionType, PartitionCreateOptions};
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// let small_on_disk = PartitionCreateOptions::default().compression(CompressionType::Miniz(9));
    /// let log = db.open_partition("log", small_on_disk.block_size(16 << 10))?;
    /// log.insert("zeros", [0; 50_000])?;
    /// log.flush()?;
    /// assert!(log.disk_space() < 5_000);
    /// # Ok(()) }
    /// ```
    #[derive(Clone, Debug, PartialEq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
    #[non_exhaustive]
    pub struct PartitionCreateOptions {
        // The options of tables have their entries in `table_options!`. Its data block index type applies if the field
        // `data_block_index_type` is `None`.
        table: #[cfg_attr(feature = "serde", serde(flatten))] TableOptions = TableOptions::default(),
            check TableOptions::check_ranges;

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
        [13] data_block_index_type(index_type: DataBlockIndexType): Option<DataBlockIndexType> = None;

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
        [10] compression(compression: CompressionType): Option<CompressionType> = None,
            check |codec| codec.iter().try_for_each(|codec| codec.check());

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
        [11] compression_per_level(levels): Vec<CompressionType> = Vec::new(),
            check |levels| check_levels(levels);

        /// Sets the size in bytes at which a memtable is sealed and flushed, 4 KiB to 2 GiB. Default 64 MiB.
        ///
        /// The size is that of the memory of records and indexes, of which up to 128 KiB are allocated ahead of use. So
        /// a size below 128 KiB seals a memtable after one record, as a test may want: each record makes a table.
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
        [6] max_memtable_size(bytes): u64 = 64 << 20, in 4 << 10..=2 << 30;

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
        compaction_strategy(strategy): CompactionStrategy = CompactionStrategy::default(),
            check |CompactionStrategy::Leveled(leveled)| leveled.check_ranges();

        // The method that sets it is `with_kv_separation`.
        [15] kv_separation: Option<KvSeparationOptions> = None,
            check |separation| separation.iter().try_for_each(KvSeparationOptions::check_ranges);

        /// Sets the time to live of records that are written without one: by [`insert`](crate::Partition::insert), in
        /// batches and transactions, by `compare_and_swap` and its relatives, and by ingests. It counts from the write;
        /// see [`Partition::insert_with_ttl`](crate::Partition::insert_with_ttl) and
        /// [`Partition::ingest`](crate::Partition::ingest). Default: `None`, such records do not expire. Changing it
        /// does not change existing records. Operands of merges do not expire. Not 0, and less than 2^64 ms.
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
        [22] default_ttl(ttl: impl Into<Option<Duration>>): Option<Duration> = None,
            check |ttl| ttl.iter().try_for_each(|ttl| ttl_ms(*ttl).map(drop));

        /// Sets the storage engine. Default: [`EngineType::Lsm`].
        ///
        /// All other options except [`default_ttl`](Self::default_ttl) apply to the LSM engine only; a pmem partition
        /// uses [`PmemOptions`]. Opening an existing partition with another engine than it was created with is
        /// `Invalid`.
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
        [PMEM_OPTIONS_FIELD] engine(engine): EngineType = EngineType::Lsm, check check_engine;
    }
}

table_options! { option_setters! impl PartitionCreateOptions (table) }

impl PartitionCreateOptions {
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

    /// The default time to live in milliseconds, which [`check`](Self::check) has validated.
    pub(crate) fn default_ttl_ms(&self) -> Option<u64> {
        self.default_ttl.and_then(|ttl| ttl_ms(ttl).ok())
    }

    /// Returns `Invalid` if an option is out of its range.
    pub(crate) fn check(&self) -> Result<()> {
        if self.kv_separation.is_some() && self.engine != EngineType::Lsm {
            return Err(Error::invalid("key-value separation requires the LSM engine; a pmem partition has none"));
        }
        self.check_ranges()
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
        let CompactionStrategy::Leveled(leveled) = &self.compaction_strategy;
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
        encode_fields(self.store_all(), &LAST_FIELDS)
    }

    fn store_all(&self) -> Vec<StoredOption> {
        let CompactionStrategy::Leveled(leveled) = &self.compaction_strategy;
        [self.table.store(), leveled.store(), self.store()].concat()
    }

    /// Decodes stored options. Ignores unknown fields. If a value of the pool or of key-value separation is out of its
    /// range, these have their defaults. If any other value is, all options have.
    ///
    /// # Errors
    /// `Corruption` for an unknown codec, and for a value that ends early or is malformed.
    pub(crate) fn decode(bytes: &[u8]) -> Result<PartitionCreateOptions> {
        let mut options = PartitionCreateOptions::default();
        match options.load_all(StoredOptions::fields(bytes)?).and_then(|()| options.check()) {
            Ok(()) => Ok(options),
            Err(error) if error.kind() == ErrorKind::Invalid => Ok(PartitionCreateOptions::default()),
            Err(error) => Err(error),
        }
    }

    fn load_all(&mut self, mut stored: StoredOptions<'_, '_>) -> Result<()> {
        let CompactionStrategy::Leveled(leveled) = &mut self.compaction_strategy;
        leveled.load(&mut stored)?;
        self.table.load(&mut stored)?;
        self.load(&mut stored)
    }
}

fn check_levels(levels: &[CompressionType]) -> Result<()> {
    check_range("compression_per_level", levels.len(), 0..=64)?;
    levels.iter().try_for_each(|codec| codec.check())
}

fn check_engine(engine: &EngineType) -> Result<()> {
    match engine {
        EngineType::Lsm => Ok(()),
        EngineType::Pmem(pmem) => pmem.check_ranges(),
    }
}

/// The options of a pool. The manifest has the engine itself as its own.
impl OptionValue for EngineType {
    fn encode(&self) -> Option<Vec<u8>> {
        match self {
            EngineType::Lsm => None,
            EngineType::Pmem(pmem) => Some(encode_values(pmem)),
        }
    }

    fn decode(d: &mut ByteReader<'_>) -> Result<EngineType> {
        decode_values(d).map(EngineType::Pmem)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::coding::{put_bytes, put_number_field, put_varint};

    /// Options that differ from their defaults, all of them.
    fn changed_options() -> [PartitionCreateOptions; 2] {
        let leveled = LeveledOptions::default().l0_compaction_trigger(9).target_file_size(5 << 20);
        let leveled = leveled.level_size_multiplier(7).base_level_size(3 << 20);
        let options = PartitionCreateOptions::default()
            .block_size(1000)
            .compression(CompressionType::Miniz(7))
            .compression_per_level(vec![CompressionType::None, CompressionType::Lz4])
            .restart_interval(3)
            .data_block_index_type(DataBlockIndexType::BinaryAndHash)
            .data_block_hash_table_util_ratio(0.3)
            .metadata_block_size(512)
            .filter_policy(FilterPolicy::Bloom { bits_per_key: 12.5 })
            .prefix_extractor(PrefixExtractor::Delimiter(b'/'))
            .max_memtable_size(5000)
            .partition_index_and_filters(false)
            .cache_index_and_filter_blocks(true)
            .pin_top_level(false)
            .pin_l0_and_l1(true)
            .compaction_strategy(CompactionStrategy::Leveled(leveled))
            .default_ttl(Duration::new(3, 5));
        let separation = KvSeparationOptions::default().separation_threshold(333).blob_file_target_size(1 << 20);
        let separation = separation.compression(CompressionType::Miniz(3)).automatic_gc(Some(2.5));
        let pool = PmemOptions::default().max_size(5 << 20).growth_step(1 << 20);
        [options.clone().with_kv_separation(separation), options.engine(EngineType::Pmem(pool))]
    }

    #[test]
    fn stored_bytes_of_options_never_change() {
        let hex = |bytes: Vec<u8>| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let shared = "0102e8070201030302800404010a05058080a08a040602882707010908048080c0020901070c048080c0010d0102\
                      0e09b3e6cc99b3e6cce93f0a0202070b0400000100";
        let (ttl, prefix) = ("16020305", "140c64656c696d697465723a3437");
        let [separated, pool] = changed_options().map(|options| hex(options.encode()));
        assert_eq!(separated, format!("{shared}0f0ccd0280804002038080808104{ttl}{prefix}"));
        assert_eq!(pool, format!("{shared}{ttl}{prefix}10078080c002808040"));
    }

    #[test]
    fn options_round_trip() {
        let [separated, pool] = changed_options();
        let without_gc = KvSeparationOptions::default().automatic_gc(None);
        let default = PartitionCreateOptions::default();
        let none = default.clone().filter_policy(FilterPolicy::None);
        for options in [separated.clone(), separated.with_kv_separation(without_gc), pool.clone(), none, default] {
            assert_eq!(PartitionCreateOptions::decode(&options.encode()).unwrap(), options);
        }
        assert!(pool.with_kv_separation(KvSeparationOptions::default()).check().is_err());
    }

    /// An entry of a table that has the number of another one, or that `changed_options` does not change, fails here.
    #[test]
    fn each_option_has_a_number_of_its_own() {
        let [separated, pool] = changed_options();
        let all = PartitionCreateOptions { engine: pool.engine.clone(), ..separated.clone() };
        let separation = KvSeparationOptions::default().store();
        for (default, changed) in [
            (PartitionCreateOptions::default().store_all(), all.store_all()),
            (separation, separated.kv_separation.unwrap().store()),
            (PmemOptions::default().store(), pool.tree(CompressionType::None).pmem.store()),
        ] {
            let mut used: Vec<(u64, Option<u32>)> = Vec::new();
            for option in changed {
                assert!(!default.contains(&option), "`changed_options` has the default of an option: {option:?}");
                let (number, bit, _) = option;
                let overlaps = |other: Option<u32>| other == bit || other.xor(bit).is_some();
                let is_used = used.iter().any(|other| other.0 == number && overlaps(other.1));
                assert!(!is_used, "two options have number {number} and bit {bit:?}");
                used.push((number, bit));
            }
            let changes = |(number, bit, _): &StoredOption| used.contains(&(*number, *bit));
            assert!(default.iter().all(changes), "`changed_options` has no value of an option");
        }
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

    #[test]
    fn options_of_other_versions_are_read() {
        let put = |out: &mut Vec<u8>, number: u64, value: &[u8]| {
            put_varint(out, number);
            put_bytes(out, value);
        };
        let base = PartitionCreateOptions::default().block_size(1000);
        let read = |changes: &[(u64, &[u8])]| {
            let mut bytes = base.encode();
            changes.iter().for_each(|(number, value)| put(&mut bytes, *number, value));
            PartitionCreateOptions::decode(&bytes)
        };
        let separated = |options: KvSeparationOptions| base.clone().with_kv_separation(options);
        let pool = |options: PmemOptions| base.clone().engine(EngineType::Pmem(options));
        let changed = KvSeparationOptions::default().separation_threshold(5);
        // Newer versions: an option, a flag, and values at the end of others.
        assert_eq!(read(&[(99, b"value")]).unwrap(), base);
        assert_eq!(read(&[(4, &[0b10101])]).unwrap(), base);
        assert_eq!(read(&[(3, &[0x80, 0x20, 7])]).unwrap(), base);
        let stored = Some(changed.clone()).encode().unwrap();
        assert_eq!(read(&[(15, &[&stored[..], &[9]].concat())]).unwrap(), separated(changed.clone()));
        // Older versions: fewer values.
        assert_eq!(read(&[(15, &stored[..1])]).unwrap(), separated(changed));
        assert_eq!(read(&[(16, &[])]).unwrap(), pool(PmemOptions::default()));
        // A value out of its range or that of its type. 2^35 is no `u32`.
        let large = [0x80, 0x80, 0x80, 0x80, 0x80, 1];
        for separation in [&[0][..], &large] {
            assert_eq!(read(&[(15, separation)]).unwrap(), separated(KvSeparationOptions::default()));
        }
        assert_eq!(read(&[(16, &[1])]).unwrap(), pool(PmemOptions::default()));
        assert_eq!(read(&[(2, &[0])]).unwrap(), PartitionCreateOptions::default());
        for unreadable in [(10, &[9, 9][..]), (11, &[0]), (15, &[5, 0x80]), (22, &[1])] {
            assert_eq!(read(&[unreadable]).unwrap_err().kind(), ErrorKind::Corruption, "{unreadable:?}");
        }
    }

    /// Regression: reading a stored option ignored the higher bits of its number.
    #[test]
    fn stored_numbers_are_not_cut() {
        let mut bytes = PartitionCreateOptions::default().block_size(1000).encode();
        assert_ne!(PartitionCreateOptions::decode(&bytes).unwrap(), PartitionCreateOptions::default());
        put_number_field(&mut bytes, 1, (1 << 32) + 1000);
        assert_eq!(PartitionCreateOptions::decode(&bytes).unwrap(), PartitionCreateOptions::default());
    }
}

//! The options of `partitions create`, and the `PartitionCreateOptions` and `PartitionComponents` that they describe.

use std::sync::Arc;

use std::time::Duration;

use azekura::{
    CompactionStrategy, CompressionType, DataBlockIndexType, EngineType, FilterPolicy, KvSeparationOptions,
    LeveledOptions, MergeOperator, PartitionComponents, PartitionCreateOptions, PmemOptions, merge_operators,
};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum, value_parser};

use crate::error::{CliError, Result};
use crate::size::size_in;

/// Longest name of a partition in bytes.
const NAME_LEN_MAX: usize = 255;

/// Longest separator of the merge operator `append` in bytes.
const SEPARATOR_LEN_MAX: usize = 64;

/// Maximum number of codecs of `--compression-per-level`.
const LEVELS_MAX: usize = 64;

/// Storage engine of a partition.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EngineArg {
    /// A log-structured merge tree, for any amount of data.
    Lsm,
    /// A B+ tree in memory, for data that fits in memory.
    Pmem,
}

/// Space amplification of automatic blob GC; `None` turns it off.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct AutomaticGcArg(Option<f32>);

/// A merge operator of azekura.
#[derive(Debug, Clone, PartialEq)]
enum MergeOperatorArg {
    U64Add,
    I64Add,
    Max,
    SetUnion,
    /// With its separator.
    Append(String),
}

impl MergeOperatorArg {
    fn operator(&self) -> Arc<dyn MergeOperator> {
        match self {
            MergeOperatorArg::U64Add => merge_operators::u64_add(),
            MergeOperatorArg::I64Add => merge_operators::i64_add(),
            MergeOperatorArg::Max => merge_operators::max(),
            MergeOperatorArg::SetUnion => merge_operators::set_union(),
            MergeOperatorArg::Append(separator) => merge_operators::append(separator),
        }
    }
}

/// Options of a new partition. An option that is not given has the default of the engine.
#[derive(Args, Debug, Clone, Default, PartialEq)]
pub(crate) struct PartitionOptionArgs {
    /// Storage engine; it cannot be changed later [default: lsm].
    #[arg(long, value_enum, value_name = "ENGINE")]
    engine: Option<EngineArg>,
    /// Merge operator: u64-add, i64-add, max, set-union, append or append:SEPARATOR; it cannot be changed later.
    #[arg(long, value_name = "OPERATOR", value_parser = merge_operator)]
    merge_operator: Option<MergeOperatorArg>,
    /// Entries that are put without a time to live expire after this number of seconds [default: never].
    #[arg(long, value_name = "SECONDS", value_parser = time_to_live)]
    default_ttl: Option<Duration>,
    #[command(flatten)]
    pool: PoolArgs,
    #[command(flatten)]
    tables: TableArgs,
    #[command(flatten)]
    compaction: CompactionArgs,
    #[command(flatten)]
    blobs: BlobArgs,
}

/// Options of the engine pmem.
#[derive(Args, Debug, Clone, Default, PartialEq)]
#[command(next_help_heading = "Options of the engine pmem")]
struct PoolArgs {
    /// Maximum size of the pool, 64 KiB to 8 TiB [default: 1GiB].
    #[arg(long, value_name = "SIZE", value_parser = size_in::<u64>(64 << 10..=8 << 40))]
    pool_max_size: Option<u64>,
    /// Number of bytes by which a full pool grows, 4 KiB to 1 GiB [default: 4MiB].
    #[arg(long, value_name = "SIZE", value_parser = size_in::<u64>(4 << 10..=1 << 30))]
    pool_growth_step: Option<u64>,
}

/// Options of tables.
#[derive(Args, Debug, Clone, Default, PartialEq)]
#[command(next_help_heading = "Options of tables (engine lsm)")]
struct TableArgs {
    /// Codec of all levels: none, lz4, or miniz:0 to miniz:10 [default: the codec of the database, lz4].
    #[arg(long, value_name = "CODEC", value_parser = codec)]
    compression: Option<CompressionType>,
    /// Codecs of the levels from level 0 on, separated by commas; the last one applies to all deeper levels.
    #[arg(long, value_name = "CODECS", value_parser = codec, value_delimiter = ',')]
    compression_per_level: Vec<CompressionType>,
    /// Size of a data block before compression, 64 B to 1 MiB [default: 4KiB].
    #[arg(long, value_name = "SIZE", value_parser = size_in::<u32>(64..=1 << 20))]
    block_size: Option<u32>,
    /// Number of entries between restart points of a data block, 1 to 255 [default: 4].
    #[arg(long, value_name = "N", value_parser = value_parser!(u8).range(1..))]
    restart_interval: Option<u8>,
    /// How a lookup finds an entry in a data block [default: fingerprint].
    #[arg(long, value_name = "TYPE", value_parser = index_types())]
    index_type: Option<DataBlockIndexType>,
    /// Entries for each bucket of the hash index of `--index-type binary-and-hash`, 0.1 to 10 [default: 0.75].
    #[arg(long, value_name = "RATIO", value_parser = util_ratio)]
    hash_table_util_ratio: Option<f64>,
    /// Bits of the Bloom filter for each key, 1 to 64, or none [default: 10].
    #[arg(long, value_name = "BITS", value_parser = filter_policy)]
    filter_bits: Option<FilterPolicy>,
    /// Whether index and filter of a table are split into partitions that are loaded on demand [default: true].
    #[arg(long, value_name = "BOOL")]
    partition_index_and_filters: Option<bool>,
    /// Size of an index partition or a filter partition, 64 B to 1 MiB [default: 4KiB].
    #[arg(long, value_name = "SIZE", value_parser = size_in::<u32>(64..=1 << 20))]
    metadata_block_size: Option<u32>,
    /// Whether the block cache holds the top levels of index and filter [default: false].
    #[arg(long, value_name = "BOOL")]
    cache_index_and_filter_blocks: Option<bool>,
    /// Whether an open table holds the top levels also with `--cache-index-and-filter-blocks true` [default: true].
    #[arg(long, value_name = "BOOL")]
    pin_top_level: Option<bool>,
    /// Whether the cache pins index and filter partitions of the tables of levels 0 and 1 [default: false].
    #[arg(long, value_name = "BOOL")]
    pin_l0_and_l1: Option<bool>,
}

/// Options of memtables and compaction.
#[derive(Args, Debug, Clone, Default, PartialEq)]
#[command(next_help_heading = "Options of memtables and compaction (engine lsm)")]
struct CompactionArgs {
    /// Size at which a memtable is flushed, 4 KiB to 2 GiB [default: 64MiB].
    #[arg(long, value_name = "SIZE", value_parser = size_in::<u64>(4 << 10..=2 << 30))]
    memtable_size: Option<u64>,
    /// Number of runs at which level 0 is compacted, 1 to 1000 [default: 4].
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=1000))]
    l0_compaction_trigger: Option<u32>,
    /// Size after which a table is finished, 4 KiB to 16 GiB [default: 64MiB].
    #[arg(long, value_name = "SIZE", value_parser = size_in::<u64>(4 << 10..=16 << 30))]
    target_file_size: Option<u64>,
    /// Ratio of the sizes of adjacent levels, 2 to 100 [default: 10].
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(2..=100))]
    level_size_multiplier: Option<u32>,
    /// Maximum size of the level into which level 0 is compacted, 4 KiB to 1 TiB [default: 256MiB].
    #[arg(long, value_name = "SIZE", value_parser = size_in::<u64>(4 << 10..=1 << 40))]
    base_level_size: Option<u64>,
}

/// Options of key-value separation.
#[derive(Args, Debug, Clone, Default, PartialEq)]
#[command(next_help_heading = "Options of key-value separation (engine lsm)")]
struct BlobArgs {
    /// Store values of at least this size in blob files; 1KiB is a good start [default: off].
    #[arg(long, value_name = "SIZE", value_parser = size_in::<u32>(1..=u32::MAX.into()))]
    kv_separation: Option<u32>,
    /// Size at which a blob file is finished, 1 KiB to 64 GiB [default: 64MiB].
    #[arg(long, value_name = "SIZE", value_parser = size_in::<u64>(1 << 10..=64 << 30), requires = "kv_separation")]
    blob_file_size: Option<u64>,
    /// Codec of values in blob files: none, lz4, or miniz:0 to miniz:10 [default: lz4].
    #[arg(long, value_name = "CODEC", value_parser = codec, requires = "kv_separation")]
    blob_compression: Option<CompressionType>,
    /// Space amplification that automatic blob GC keeps, at least 1, or off [default: 1.5].
    #[arg(long, value_name = "TARGET", value_parser = automatic_gc, requires = "kv_separation")]
    blob_gc: Option<AutomaticGcArg>,
}

/// Parses a time to live, a number of seconds.
pub(crate) fn time_to_live(text: &str) -> Result<Duration, String> {
    let ttl = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    ttl.filter(|ttl| !ttl.is_zero()).ok_or_else(|| "expected a number of seconds above 0".into())
}

/// Parses the name of a partition.
pub(crate) fn partition_name(text: &str) -> Result<String, String> {
    match text.len() {
        0 => Err("a name has at least 1 byte".into()),
        1..=NAME_LEN_MAX => Ok(text.into()),
        len => Err(format!("the name has {len} bytes; a name has at most {NAME_LEN_MAX}")),
    }
}

fn codec(text: &str) -> Result<CompressionType, String> {
    text.parse().map_err(|error: azekura::Error| error.message().to_string())
}

fn index_types() -> impl TypedValueParser<Value = DataBlockIndexType> {
    PossibleValuesParser::new(["binary-search", "binary-and-hash", "fingerprint"]).map(|name| match &*name {
        "binary-search" => DataBlockIndexType::BinarySearch,
        "binary-and-hash" => DataBlockIndexType::BinaryAndHash,
        _ => DataBlockIndexType::Fingerprint,
    })
}

fn util_ratio(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|ratio| (0.1..=10.0).contains(ratio))
        .ok_or_else(|| "expected a number from 0.1 to 10".into())
}

fn filter_policy(text: &str) -> Result<FilterPolicy, String> {
    if text == "none" {
        return Ok(FilterPolicy::None);
    }
    let bits = text.parse().ok().filter(|bits| (1.0..=64.0).contains(bits));
    bits.map(|bits_per_key| FilterPolicy::Bloom { bits_per_key })
        .ok_or_else(|| "expected a number from 1 to 64, or none".into())
}

fn automatic_gc(text: &str) -> Result<AutomaticGcArg, String> {
    if text == "off" {
        return Ok(AutomaticGcArg(None));
    }
    let target = text.parse().ok().filter(|target: &f32| *target >= 1.0 && target.is_finite());
    target.map(|target| AutomaticGcArg(Some(target))).ok_or_else(|| "expected a number of at least 1, or off".into())
}

fn merge_operator(text: &str) -> std::result::Result<MergeOperatorArg, String> {
    match text {
        "u64-add" => Ok(MergeOperatorArg::U64Add),
        "i64-add" => Ok(MergeOperatorArg::I64Add),
        "max" => Ok(MergeOperatorArg::Max),
        "set-union" => Ok(MergeOperatorArg::SetUnion),
        "append" => Ok(MergeOperatorArg::Append(String::new())),
        _ => match text.strip_prefix("append:") {
            Some(separator) if separator.len() <= SEPARATOR_LEN_MAX => {
                Ok(MergeOperatorArg::Append(separator.to_owned()))
            }
            Some(_) => Err(format!("the separator has more than {SEPARATOR_LEN_MAX} bytes")),
            None => Err("expected u64-add, i64-add, max, set-union, append or append:SEPARATOR".into()),
        },
    }
}

/// `options` changed by `set`, if there is a value.
fn with<O, T>(options: O, value: Option<T>, set: impl FnOnce(O, T) -> O) -> O {
    match value {
        Some(value) => set(options, value),
        None => options,
    }
}

impl PartitionOptionArgs {
    /// Whether no option is given.
    pub(crate) fn is_empty(&self) -> bool {
        *self == PartitionOptionArgs::default()
    }

    /// The options of the new partition.
    ///
    /// # Errors
    /// `Usage` if options of one engine are given for the other one.
    pub(crate) fn to_options(&self) -> Result<PartitionCreateOptions> {
        if self.compression_levels() > LEVELS_MAX {
            return Err(CliError::usage(format!("--compression-per-level takes at most {LEVELS_MAX} codecs")));
        }
        if self.engine == Some(EngineArg::Pmem) {
            let PartitionOptionArgs {
                engine: _,
                merge_operator: _,
                default_ttl: _,
                pool: _,
                tables,
                compaction,
                blobs,
            } = self;
            let lsm = (tables, compaction, blobs);
            if lsm != (&TableArgs::default(), &CompactionArgs::default(), &BlobArgs::default()) {
                return Err(CliError::usage(
                    "--engine pmem takes no options of tables, compaction and key-value separation, only \
                     --pool-max-size and --pool-growth-step",
                ));
            }
            return Ok(PartitionCreateOptions::default()
                .default_ttl(self.default_ttl)
                .engine(EngineType::Pmem(self.pool.to_options())));
        }
        if self.pool != PoolArgs::default() {
            return Err(CliError::usage("--pool-max-size and --pool-growth-step need --engine pmem"));
        }
        let options = self.tables.apply_to(PartitionCreateOptions::default().default_ttl(self.default_ttl));
        let options = with(options, self.compaction.memtable_size, PartitionCreateOptions::max_memtable_size);
        let strategy = CompactionStrategy::Leveled(self.compaction.to_options());
        let separation = self.blobs.to_options();
        let options = options.compaction_strategy(strategy);
        Ok(with(options, separation, PartitionCreateOptions::with_kv_separation))
    }

    /// The merge operator of the new partition.
    pub(crate) fn to_components(&self) -> PartitionComponents {
        let components = PartitionComponents::default();
        with(
            components,
            self.merge_operator.as_ref().map(MergeOperatorArg::operator),
            PartitionComponents::merge_operator,
        )
    }

    fn compression_levels(&self) -> usize {
        self.tables.compression_per_level.len()
    }
}

impl PoolArgs {
    fn to_options(&self) -> PmemOptions {
        let options = with(PmemOptions::default(), self.pool_max_size, PmemOptions::max_size);
        with(options, self.pool_growth_step, PmemOptions::growth_step)
    }
}

impl TableArgs {
    fn apply_to(&self, options: PartitionCreateOptions) -> PartitionCreateOptions {
        use PartitionCreateOptions as Options;
        let options = options.compression_per_level(self.compression_per_level.clone());
        let options = with(options, self.compression, Options::compression);
        let options = with(options, self.block_size, Options::block_size);
        let options = with(options, self.restart_interval, Options::restart_interval);
        let options = with(options, self.index_type, Options::data_block_index_type);
        let options = with(options, self.hash_table_util_ratio, Options::data_block_hash_table_util_ratio);
        let options = with(options, self.filter_bits, Options::filter_policy);
        let options = with(options, self.partition_index_and_filters, Options::partition_index_and_filters);
        let options = with(options, self.metadata_block_size, Options::metadata_block_size);
        let options = with(options, self.cache_index_and_filter_blocks, Options::cache_index_and_filter_blocks);
        let options = with(options, self.pin_top_level, Options::pin_top_level);
        with(options, self.pin_l0_and_l1, Options::pin_l0_and_l1)
    }
}

impl CompactionArgs {
    fn to_options(&self) -> LeveledOptions {
        let options = LeveledOptions::default();
        let options = with(options, self.l0_compaction_trigger, LeveledOptions::l0_compaction_trigger);
        let options = with(options, self.target_file_size, LeveledOptions::target_file_size);
        let options = with(options, self.level_size_multiplier, LeveledOptions::level_size_multiplier);
        with(options, self.base_level_size, LeveledOptions::base_level_size)
    }
}

impl BlobArgs {
    /// `None` without `--kv-separation`.
    fn to_options(&self) -> Option<KvSeparationOptions> {
        let options = KvSeparationOptions::default().separation_threshold(self.kv_separation?);
        let options = with(options, self.blob_file_size, KvSeparationOptions::blob_file_target_size);
        let options = with(options, self.blob_compression, KvSeparationOptions::compression);
        Some(with(options, self.blob_gc, |options, gc| options.automatic_gc(gc.0)))
    }
}

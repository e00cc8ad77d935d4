//! The options of `partitions create`, and the `PartitionCreateOptions` and `PartitionComponents` that they describe.

use std::sync::Arc;
use std::time::Duration;

use azekura::{
    CompactionStrategy, CompressionType, DataBlockIndexType, EngineType, FilterPolicy, KvSeparationOptions,
    LeveledOptions, MergeOperator, PartitionComponents, PartitionCreateOptions, PmemOptions, PrefixExtractor,
    merge_operators,
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
type SpaceAmplification = Option<f32>;

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

/// Defines the arguments of a table of options. An entry has the help, the flag, the name of the option in the engine,
/// its type, the parser, and the name of the value in the help.
macro_rules! option_args {
    ($(#[$meta:meta])* struct $Args:ident for $Options:ident { $(
        $(#[$attribute:meta])*
        $flag:literal $name:ident: $type:ty = $parser:expr, $value:literal;
    )* }) => {
        #[derive(Args, Debug, Clone, Default, PartialEq)]
        $(#[$meta])*
        struct $Args {
            $(
                $(#[$attribute])*
                #[arg(id = $flag, long = $flag, value_name = $value, value_parser = $parser)]
                $name: Option<$type>,
            )*
        }

        impl $Args {
            #[cfg(test)]
            const OPTIONS: &[&str] = &[$(stringify!($name)),*];

            /// Sets the options that are given.
            fn apply_to(&self, mut options: $Options) -> $Options {
                $(if let Some(value) = self.$name.clone() {
                    options = options.$name(value);
                })*
                options
            }
        }
    };
}

option_args! {
    /// Options of the engine pmem.
    #[command(next_help_heading = "Options of the engine pmem")]
    struct PoolArgs for PmemOptions {
        /// Maximum size of the pool, 64 KiB to 8 TiB [default: 1GiB].
        "pool-max-size" max_size: u64 = size_in::<u64>(64 << 10..=8 << 40), "SIZE";
        /// Number of bytes by which a full pool grows, 4 KiB to 1 GiB [default: 4MiB].
        "pool-growth-step" growth_step: u64 = size_in::<u64>(4 << 10..=1 << 30), "SIZE";
    }
}

option_args! {
    /// Options of tables and memtables.
    #[command(next_help_heading = "Options of tables (engine lsm)")]
    struct TableArgs for PartitionCreateOptions {
        /// Codec of all levels: none, lz4, or miniz:0 to miniz:10 [default: the codec of the database, lz4].
        "compression" compression: CompressionType = codec, "CODEC";
        /// Codecs of the levels from level 0 on, separated by commas; the last one applies to all deeper levels.
        #[arg(value_delimiter = ',')]
        "compression-per-level" compression_per_level: Vec<CompressionType> = codec, "CODECS";
        /// Size of a data block before compression, 64 B to 1 MiB [default: 4KiB].
        "block-size" block_size: u32 = size_in::<u32>(64..=1 << 20), "SIZE";
        /// Number of entries between restart points of a data block, 1 to 255 [default: 4].
        "restart-interval" restart_interval: u8 = value_parser!(u8).range(1..), "N";
        /// How a lookup finds an entry in a data block [default: fingerprint].
        "index-type" data_block_index_type: DataBlockIndexType = index_types(), "TYPE";
        /// Entries for each bucket of the hash index of `--index-type binary-and-hash`, 0.1 to 10 [default: 0.75].
        "hash-table-util-ratio" data_block_hash_table_util_ratio: f64 = util_ratio, "RATIO";
        /// Bits of the Bloom filter for each key, 1 to 64, or none [default: 10].
        "filter-bits" filter_policy: FilterPolicy = filter_policy, "BITS";
        /// Prefixes that filters contain besides keys: fixed:N (the first N bytes) or delimiter:C (up to the first
        /// character C, or byte 0xNN) [default: none].
        "prefix-extractor" prefix_extractor: PrefixExtractor = prefix_extractor, "PREFIX";
        /// Whether index and filter of a table are split into partitions that are loaded on demand [default: true].
        "partition-index-and-filters" partition_index_and_filters: bool = value_parser!(bool), "BOOL";
        /// Size of an index partition or a filter partition, 64 B to 1 MiB [default: 4KiB].
        "metadata-block-size" metadata_block_size: u32 = size_in::<u32>(64..=1 << 20), "SIZE";
        /// Whether the block cache holds the top levels of index and filter [default: false].
        "cache-index-and-filter-blocks" cache_index_and_filter_blocks: bool = value_parser!(bool), "BOOL";
        /// Whether an open table holds the top levels also with `--cache-index-and-filter-blocks true` [default: true].
        "pin-top-level" pin_top_level: bool = value_parser!(bool), "BOOL";
        /// Whether the cache pins index and filter partitions of the tables of levels 0 and 1 [default: false].
        "pin-l0-and-l1" pin_l0_and_l1: bool = value_parser!(bool), "BOOL";
        /// Size at which a memtable is flushed, 4 KiB to 2 GiB [default: 64MiB].
        #[arg(help_heading = COMPACTION_HEADING)]
        "memtable-size" max_memtable_size: u64 = size_in::<u64>(4 << 10..=2 << 30), "SIZE";
    }
}

const COMPACTION_HEADING: &str = "Options of memtables and compaction (engine lsm)";

option_args! {
    /// Options of compaction.
    #[command(next_help_heading = COMPACTION_HEADING)]
    struct CompactionArgs for LeveledOptions {
        /// Number of runs at which level 0 is compacted, 1 to 1000 [default: 4].
        "l0-compaction-trigger" l0_compaction_trigger: u32 = value_parser!(u32).range(1..=1000), "N";
        /// Size after which a table is finished, 4 KiB to 16 GiB [default: 64MiB].
        "target-file-size" target_file_size: u64 = size_in::<u64>(4 << 10..=16 << 30), "SIZE";
        /// Ratio of the sizes of adjacent levels, 2 to 100 [default: 10].
        "level-size-multiplier" level_size_multiplier: u32 = value_parser!(u32).range(2..=100), "N";
        /// Maximum size of the level into which level 0 is compacted, 4 KiB to 1 TiB [default: 256MiB].
        "base-level-size" base_level_size: u64 = size_in::<u64>(4 << 10..=1 << 40), "SIZE";
    }
}

option_args! {
    /// Options of key-value separation.
    #[command(next_help_heading = "Options of key-value separation (engine lsm)")]
    struct BlobArgs for KvSeparationOptions {
        /// Store values of at least this size in blob files; 1KiB is a good start [default: off].
        "kv-separation" separation_threshold: u32 = size_in::<u32>(1..=u32::MAX.into()), "SIZE";
        /// Size at which a blob file is finished, 1 KiB to 64 GiB [default: 64MiB].
        #[arg(requires = "kv-separation")]
        "blob-file-size" blob_file_target_size: u64 = size_in::<u64>(1 << 10..=64 << 30), "SIZE";
        /// Codec of values in blob files: none, lz4, or miniz:0 to miniz:10 [default: lz4].
        #[arg(requires = "kv-separation")]
        "blob-compression" compression: CompressionType = codec, "CODEC";
        /// Space amplification that automatic blob GC keeps, at least 1, or off [default: 1.5].
        #[arg(requires = "kv-separation")]
        "blob-gc" automatic_gc: SpaceAmplification = automatic_gc, "TARGET";
    }
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

fn prefix_extractor(text: &str) -> Result<PrefixExtractor, String> {
    let extractor = match text.split_once(':') {
        Some(("fixed", len)) => len.parse().ok().filter(|len| (1..=4096).contains(len)).map(PrefixExtractor::Fixed),
        Some(("delimiter", byte)) => match (byte.strip_prefix("0x"), byte.as_bytes()) {
            (Some(digits), _) => u8::from_str_radix(digits, 16).ok().map(PrefixExtractor::Delimiter),
            (None, [byte]) => Some(PrefixExtractor::Delimiter(*byte)),
            _ => None,
        },
        _ => None,
    };
    extractor.ok_or_else(|| "expected fixed:1 to fixed:4096, or delimiter: and a character or 0x00 to 0xff".into())
}

fn automatic_gc(text: &str) -> Result<SpaceAmplification, String> {
    if text == "off" {
        return Ok(None);
    }
    let target = text.parse().ok().filter(|target: &f32| *target >= 1.0 && target.is_finite());
    target.map(Some).ok_or_else(|| "expected a number of at least 1, or off".into())
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
        if self.tables.compression_per_level.as_ref().is_some_and(|levels| levels.len() > LEVELS_MAX) {
            return Err(CliError::usage(format!("--compression-per-level takes at most {LEVELS_MAX} codecs")));
        }
        let options = self.tables.apply_to(PartitionCreateOptions::default().default_ttl(self.default_ttl));
        if self.engine == Some(EngineArg::Pmem) {
            let lsm = (&self.tables, &self.compaction, &self.blobs);
            if lsm != (&TableArgs::default(), &CompactionArgs::default(), &BlobArgs::default()) {
                return Err(CliError::usage(
                    "--engine pmem takes no options of tables, compaction and key-value separation, only \
                     --pool-max-size and --pool-growth-step",
                ));
            }
            return Ok(options.engine(EngineType::Pmem(self.pool.apply_to(PmemOptions::default()))));
        }
        if self.pool != PoolArgs::default() {
            return Err(CliError::usage("--pool-max-size and --pool-growth-step need --engine pmem"));
        }
        let strategy = CompactionStrategy::Leveled(self.compaction.apply_to(LeveledOptions::default()));
        let options = options.compaction_strategy(strategy);
        Ok(match self.blobs.separation_threshold {
            Some(_) => options.with_kv_separation(self.blobs.apply_to(KvSeparationOptions::default())),
            None => options,
        })
    }

    /// The merge operator of the new partition.
    pub(crate) fn to_components(&self) -> PartitionComponents {
        let components = PartitionComponents::default();
        match &self.merge_operator {
            Some(operator) => components.merge_operator(operator.operator()),
            None => components,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::{CommandFactory, Parser};
    use serde_json::Value;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: PartitionOptionArgs,
    }

    /// Regression: no flag set the prefix extractor.
    #[test]
    fn each_option_of_the_engine_has_a_flag() {
        let options = PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default());
        let options = serde_json::to_value(options).unwrap();
        let names = |options: &Value| options.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
        let flags = |tables: &[&str]| tables.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        // `PartitionOptionArgs` has these.
        let others = ["compaction_strategy", "default_ttl", "engine", "kv_separation"];
        assert_eq!(names(&options), flags(&[TableArgs::OPTIONS, &others].concat()));
        assert_eq!(names(&options["compaction_strategy"]["leveled"]), flags(CompactionArgs::OPTIONS));
        assert_eq!(names(&options["kv_separation"]), flags(BlobArgs::OPTIONS));
        assert_eq!(names(&serde_json::to_value(PmemOptions::default()).unwrap()), flags(PoolArgs::OPTIONS));
    }

    #[test]
    fn prefix_extractors_are_parsed() {
        for (text, extractor) in [
            ("fixed:1", Some(PrefixExtractor::Fixed(1))),
            ("fixed:4096", Some(PrefixExtractor::Fixed(4096))),
            ("delimiter:/", Some(PrefixExtractor::Delimiter(b'/'))),
            ("delimiter::", Some(PrefixExtractor::Delimiter(b':'))),
            ("delimiter:0xff", Some(PrefixExtractor::Delimiter(255))),
            ("fixed:0", None),
            ("fixed:4097", None),
            ("delimiter:", None),
            ("delimiter:ab", None),
            ("delimiter:0x100", None),
            ("suffix:1", None),
        ] {
            assert_eq!(prefix_extractor(text).ok(), extractor, "{text}");
        }
    }

    #[test]
    fn help_states_the_defaults_of_the_engine() {
        let command = Line::command();
        let mut checked = 0;
        for argument in command.get_arguments() {
            let (flag, help) = (argument.get_id().as_str(), argument.get_help().unwrap().to_string());
            let Some((_, default)) = help.split_once("[default: ") else { continue };
            let needs = match flag {
                "pool-max-size" | "pool-growth-step" => "--engine=pmem",
                "blob-file-size" | "blob-compression" | "blob-gc" => "--kv-separation=1KiB",
                // Their defaults depend on the database and the comparator, or are no values.
                "engine" | "default_ttl" | "compression" | "index-type" | "prefix-extractor" | "kv-separation" => {
                    continue;
                }
                _ => "--engine=lsm",
            };
            let options = |given: &[&str]| Line::parse_from(given).options.to_options().unwrap();
            let given = format!("--{flag}={}", default.trim_end_matches([']', '.']));
            assert_eq!(options(&["create", needs, &given]), options(&["create", needs]), "{given}");
            checked += 1;
        }
        assert!(checked >= 19, "{checked}");
    }
}

//! The engines that a script runs on.

use std::time::Duration;

use azekura::testing::{MemFs, TestOrder};
use azekura::{
    CompactionStrategy, CompressionType, DataBlockIndexType, EngineType, KvSeparationOptions, LeveledOptions,
    PartitionComponents, PartitionCreateOptions, PersistenceLevel, PmemOptions, merge_operators,
};

use crate::testkit::ordered_partitions::supported_options;

/// A kind of tree with its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScriptEngine {
    Lsm(DataBlockIndexType),
    /// LSM with key-value separation.
    Separated,
    /// A pool in memory, durable through the WAL and checkpoints.
    Pool,
    /// A pool on mapped persistent memory.
    MappedPool,
}

pub(super) const ALL: [ScriptEngine; 6] = [
    ScriptEngine::Lsm(DataBlockIndexType::BinarySearch),
    ScriptEngine::Lsm(DataBlockIndexType::BinaryAndHash),
    ScriptEngine::Lsm(DataBlockIndexType::Fingerprint),
    ScriptEngine::Separated,
    ScriptEngine::Pool,
    ScriptEngine::MappedPool,
];

/// Partition options that scripts may change.
#[derive(Clone, Debug)]
pub(super) struct ScriptOptions {
    pub(super) max_memtable_size: u64,
    pub(super) leveled: LeveledOptions,
    /// `None` turns key-value separation off.
    pub(super) separation_threshold: Option<u32>,
    pub(super) direct_write_threshold: u32,
    pub(super) automatic_gc: Option<f32>,
    pub(super) default_ttl: Option<Duration>,
    pub(super) pool_max_size: u64,
    /// `append` (with a separator `+`) or `max`.
    pub(super) merge_operator: Option<String>,
    pub(super) order: TestOrder,
}

impl Default for ScriptOptions {
    fn default() -> ScriptOptions {
        let leveled = LeveledOptions::default()
            .l0_compaction_trigger(4)
            .target_file_size(4 << 10)
            .level_size_multiplier(4)
            .base_level_size(16 << 10);
        ScriptOptions {
            max_memtable_size: 1 << 20,
            leveled,
            separation_threshold: Some(50),
            direct_write_threshold: 1 << 20,
            automatic_gc: None,
            default_ttl: None,
            pool_max_size: 1 << 20,
            merge_operator: None,
            order: TestOrder::Bytes,
        }
    }
}

impl ScriptOptions {
    pub(super) fn components(&self) -> PartitionComponents {
        let mut components = PartitionComponents::default();
        if let Some(comparator) = self.order.comparator() {
            components = components.comparator(comparator);
        }
        match self.merge_operator.as_deref() {
            None => components,
            Some("append") => components.merge_operator(merge_operators::append("+")),
            Some("max") => components.merge_operator(merge_operators::max()),
            Some(other) => panic!("there is no operator {other:?}"),
        }
    }
}

impl ScriptEngine {
    /// The engines of a name; `lsm` names all data block kinds.
    pub(super) fn named(name: &str) -> Vec<ScriptEngine> {
        let found: Vec<ScriptEngine> =
            ALL.into_iter().filter(|engine| engine.name() == name || engine.kind() == name).collect();
        assert!(!found.is_empty(), "no engine has the name {name:?}");
        found
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            ScriptEngine::Lsm(DataBlockIndexType::BinarySearch) => "binary",
            ScriptEngine::Lsm(DataBlockIndexType::BinaryAndHash) => "hash",
            ScriptEngine::Lsm(_) => "fingerprint",
            ScriptEngine::Separated => "separated",
            ScriptEngine::Pool => "pool",
            ScriptEngine::MappedPool => "mapped",
        }
    }

    /// The same, without the kind of data block.
    pub(super) fn kind(self) -> &'static str {
        match self {
            ScriptEngine::Lsm(_) => "lsm",
            _ => self.name(),
        }
    }

    pub(super) fn is_pool(self) -> bool {
        matches!(self, ScriptEngine::Pool | ScriptEngine::MappedPool)
    }

    /// Sets whether the files of `fs` can be mapped as persistent memory.
    pub(super) fn prepare_fs(self, fs: &MemFs) {
        if self == ScriptEngine::MappedPool {
            fs.set_mapped_memory(PersistenceLevel::PowerLoss);
        }
    }

    pub(super) fn partition_options(self, options: &ScriptOptions) -> PartitionCreateOptions {
        supported_options(options.order, self.options_for_bytes(options))
    }

    fn options_for_bytes(self, options: &ScriptOptions) -> PartitionCreateOptions {
        if self.is_pool() {
            let sizes = PmemOptions::default().max_size(options.pool_max_size).growth_step(4 << 10);
            let common = PartitionCreateOptions::default().default_ttl(options.default_ttl);
            return common.engine(EngineType::Pmem(sizes));
        }
        let common = PartitionCreateOptions::default()
            .block_size(256)
            .compression(CompressionType::None)
            .max_memtable_size(options.max_memtable_size)
            .default_ttl(options.default_ttl)
            .compaction_strategy(CompactionStrategy::Leveled(options.leveled.clone()));
        match (self, options.separation_threshold) {
            (ScriptEngine::Lsm(kind), _) => common.data_block_index_type(kind),
            (_, None) => common,
            (_, Some(threshold)) => {
                let separation = KvSeparationOptions::default()
                    .separation_threshold(threshold)
                    .blob_file_target_size(4 << 10)
                    .compression(CompressionType::None)
                    .automatic_gc(options.automatic_gc)
                    .direct_write_threshold(options.direct_write_threshold);
                common.with_kv_separation(separation)
            }
        }
    }
}

/// The names of some engines, each after a space; `lsm` if all data block kinds are among them.
pub(super) fn group_names(engines: &[ScriptEngine]) -> String {
    let is_lsm = |engine: &&ScriptEngine| engine.kind() == "lsm";
    let has_all_kinds = engines.iter().filter(is_lsm).count() == ALL.iter().filter(is_lsm).count();
    let mut names: Vec<&str> =
        engines.iter().map(|engine| if has_all_kinds { engine.kind() } else { engine.name() }).collect();
    names.dedup();
    names.iter().map(|name| format!(" {name}")).collect()
}

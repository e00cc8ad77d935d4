//! azekura itself, through its public interface only.

use crate::engine::options::{BLOCK_BYTES, BLOOM_BITS, PARTITION};
use crate::engine::{Compression, Engine, Options, Scan, Sync};
use crate::failure::Result;
use ::azekura::{
    CompactionStrategy, CompressionType, Config, Database, EngineType, FilterPolicy, KvSeparationOptions,
    LeveledOptions, Partition, PartitionCreateOptions, PersistMode, PmemOptions, PoolMetrics,
};
use serde_json::{Map, Value, json};
use std::path::Path;

/// The smallest bound of a pool. Addresses are reserved for it, and memory taken as there is data.
const POOL_LEAST: u64 = 1 << 30;
/// Bytes of a pool for each byte of data, where its size is known: leaves and heads of records, old values, and more
/// records.
const POOL_FACTOR: u64 = 4;

struct AzekuraEngine {
    partition: Partition,
    database: Database,
    /// Of each of its partitions.
    own: PartitionCreateOptions,
}

/// Opens or creates an azekura database at `dir`.
pub(crate) fn open(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    open_with(dir, options, |own| own)
}

/// Opens or creates an azekura database whose partitions are trees in memory.
pub(crate) fn open_pool(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    let whole = Options { separate_from: None, ..options.clone() }; // pools keep values with their keys
    open_with(dir, &whole, |own| in_pool(own, options))
}

/// A partition in a pool that is large enough.
pub(crate) fn in_pool(own: PartitionCreateOptions, options: &Options) -> PartitionCreateOptions {
    let bytes = POOL_LEAST.saturating_add(options.data_bytes.saturating_mul(POOL_FACTOR));
    own.engine(EngineType::Pmem(PmemOptions::default().max_size(bytes)))
}

/// The same with options that only azekura has; for experiments.
pub(crate) fn open_with(
    dir: &Path,
    options: &Options,
    adjust: impl FnOnce(PartitionCreateOptions) -> PartitionCreateOptions,
) -> Result<Box<dyn Engine>> {
    open_on(dir, options, |own| own, adjust)
}

/// The same with settings of the database, its file system among them.
pub(crate) fn open_on(
    dir: &Path,
    options: &Options,
    configure: impl FnOnce(Config) -> Config,
    adjust: impl FnOnce(PartitionCreateOptions) -> PartitionCreateOptions,
) -> Result<Box<dyn Engine>> {
    let durability = match options.sync {
        Sync::None => PersistMode::Buffer,
        Sync::Data => PersistMode::SyncData,
        Sync::All => PersistMode::SyncAll,
    };
    let config =
        Config::new(dir).cache_size(options.cache_bytes).workers(options.workers.max(1)).durability(durability);
    let database = configure(config).open()?;
    let own = adjust(partition_options(options));
    let partition = database.open_partition(PARTITION, own.clone())?;
    Ok(Box::new(AzekuraEngine { partition, database, own }))
}

fn partition_options(options: &Options) -> PartitionCreateOptions {
    let codec = match options.compression {
        Compression::None => CompressionType::None,
        Compression::Lz4 => CompressionType::Lz4,
    };
    let mut leveled = LeveledOptions::default();
    if let Some(bytes) = options.table_bytes {
        leveled.table_size = bytes;
    }
    let own = PartitionCreateOptions::default()
        .max_memtable_size(options.memtable_bytes)
        .block_size(BLOCK_BYTES)
        .compression(codec)
        .filter_policy(FilterPolicy::Bloom { bits_per_key: BLOOM_BITS })
        .compaction_strategy(CompactionStrategy::Leveled(leveled));
    let Some(bytes) = options.separate_from else { return own };
    let threshold = u32::try_from(bytes).unwrap_or(u32::MAX);
    own.with_kv_separation(KvSeparationOptions::default().separation_threshold(threshold).compression(codec))
}

impl Engine for AzekuraEngine {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        Ok(self.partition.insert(key, value)?)
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let found = self.partition.get(key)?;
        if let Some(value) = &found {
            seen(value);
        }
        Ok(found.is_some())
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        Ok(self.partition.remove(key)?)
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        let mut batch = self.database.batch();
        for (key, value) in records {
            batch.insert(&self.partition, key, value);
        }
        Ok(batch.commit()?)
    }

    fn scan(&self, scan: Scan<'_>, limit: u64, seen: &mut dyn FnMut(&[u8], &[u8])) -> Result<u64> {
        let (mut records, backwards) = match scan {
            Scan::First => (self.partition.iter(), false),
            Scan::From(key) => (self.partition.range(key..), false),
            Scan::Last => (self.partition.iter(), true),
            Scan::Back(key) => (self.partition.range(..=key), true),
        };
        for count in 0..limit {
            let record = if backwards { records.lend_back() } else { records.lend() };
            let Some(record) = record else { return Ok(count) };
            let (key, value) = record?;
            seen(key, value);
        }
        Ok(limit)
    }

    fn flush(&self) -> Result<()> {
        Ok(self.partition.flush()?)
    }

    fn sync(&self) -> Result<()> {
        Ok(self.database.persist(PersistMode::SyncData)?)
    }

    fn busy(&self) -> Result<bool> {
        Ok(self.partition.metrics().sealed_memtables > 0) // compactions show as CPU and writes, which `settle` watches
    }

    fn tables(&self) -> Result<u64> {
        let own = self.partition.metrics();
        if own.pool.is_some() {
            return Ok(1); // one pool is all there is
        }
        Ok(own.levels.iter().map(|level| level.tables as u64).sum())
    }

    fn partition(&self, name: &str) -> Result<Box<dyn Engine>> {
        let partition = self.database.open_partition(name, self.own.clone())?;
        Ok(Box::new(AzekuraEngine { partition, database: self.database.clone(), own: self.own.clone() }))
    }

    fn stats(&self) -> Map<String, Value> {
        let metrics = self.database.metrics();
        let own = self.partition.metrics();
        let levels: Vec<Value> = own
            .levels
            .iter()
            .map(
                |level| json!({"level": level.level, "runs": level.runs, "tables": level.tables, "bytes": level.bytes}),
            )
            .collect();
        let value = json!({
            "commits": metrics.commits, "log_syncs": metrics.log_syncs, "log_bytes": metrics.log_bytes,
            "log_live_bytes": metrics.log_live_bytes, "early_bytes": metrics.early_bytes,
            "flushes": metrics.flushes, "flushed_bytes": metrics.flushed_bytes,
            "compactions": metrics.compactions, "trivial_moves": metrics.trivial_moves,
            "compaction_bytes_read": metrics.compaction_bytes_read,
            "compaction_bytes_written": metrics.compaction_bytes_written,
            "own_write_amp": metrics.write_amplification(), "stall_s": metrics.stall_ns as f64 / 1e9,
            "cache_used_bytes": metrics.cache.used, "data_hits": metrics.cache.data.hits,
            "data_misses": metrics.cache.data.misses, "index_hits": metrics.cache.index.hits,
            "index_misses": metrics.cache.index.misses, "filter_hits": metrics.cache.filter.hits,
            "filter_misses": metrics.cache.filter.misses, "held_bytes": own.pinned_bytes, "levels": levels,
        });
        match (value, own.pool) {
            (Value::Object(mut stats), Some(pool)) => {
                stats.insert("pool".into(), pool_stats(&pool));
                stats
            }
            (Value::Object(stats), None) => stats,
            _ => Map::new(),
        }
    }

    fn close(self: Box<Self>) -> Result<()> {
        let AzekuraEngine { partition, database, .. } = *self;
        drop(partition);
        Ok(database.close()?)
    }
}

fn pool_stats(pool: &PoolMetrics) -> Value {
    json!({
        "level": format!("{:?}", pool.level), "records": pool.records, "leaves": pool.leaves,
        "leaves_free": pool.leaves_free, "bytes": pool.bytes, "free_bytes": pool.free_bytes,
        "index_bytes": pool.index_bytes, "kept_bytes": pool.kept_bytes, "checkpoints": pool.checkpoints,
        "checkpoint_bytes": pool.checkpoint_bytes, "splits": pool.splits,
        "split_stored_bytes": pool.split_stored_bytes, "split_flushed_lines": pool.split_flushed_lines,
        "split_fences": pool.split_fences,
    })
}

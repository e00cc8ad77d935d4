//! azekura, through its public interface.

use crate::engine::{
    BLOOM_BITS, Change, Compression, Engine, Options, PARTITION, Records, Scan, Sync, Visit, existing, found, object,
};
use crate::error::Result;
use ::azekura::{
    CompactionStrategy, CompressionType, Config, Database, EngineType, FilterPolicy, KvSeparationOptions,
    LeveledOptions, Partition, PartitionCreateOptions, PersistMode, PmemOptions,
};
use serde_json::{Map, Value, json};
use std::path::Path;

/// The smallest maximum size of a pool. It reserves addresses; memory is allocated as data arrives.
const POOL_LEAST: u64 = 1 << 30;
/// Maximum bytes of a pool for each byte of data: leaves, record headers, old versions and inserted records.
const POOL_FACTOR: u64 = 4;

struct AzekuraEngine {
    partition: Partition,
    database: Database,
    /// The options of each partition.
    created_with: PartitionCreateOptions,
}

/// Opens or creates an azekura database with LSM partitions.
pub(crate) fn open(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    open_with(dir, options, |config| config, |partition| partition)
}

/// Opens or creates an azekura database with pmem partitions, which do not separate values.
pub(crate) fn open_pool(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    open_with(dir, &Options { separate_from: None, ..options.clone() }, |config| config, |own| in_pool(own, options))
}

/// Opens or creates an azekura database with LSM partitions whose files are mapped for reading and not compressed.
pub(crate) fn open_mapped(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    let uncompressed = Options { compression: Compression::None, ..options.clone() };
    open_with(dir, &uncompressed, |config| config.mapped_reads(true), |partition| partition)
}

/// Options of a pmem partition that is large enough for the data.
pub(crate) fn in_pool(partition: PartitionCreateOptions, options: &Options) -> PartitionCreateOptions {
    let bytes = POOL_LEAST.saturating_add(options.data_bytes.saturating_mul(POOL_FACTOR));
    partition.engine(EngineType::Pmem(PmemOptions::default().max_size(bytes)))
}

/// Opens or creates a database with options that only azekura has; for experiments.
pub(crate) fn open_with(
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
    let config = Config::new(dir).cache_size(options.cache_bytes).workers(options.workers.max(1));
    let database = configure(config.durability(durability)).open()?;
    AzekuraEngine::open(database, PARTITION, adjust(partition_options(options)))
}

fn partition_options(options: &Options) -> PartitionCreateOptions {
    let lz4 = options.compression == Compression::Lz4;
    let codec = if lz4 { CompressionType::Lz4 } else { CompressionType::None };
    let sized = |bytes| LeveledOptions::default().target_file_size(bytes);
    let leveled = options.table_bytes.map_or_else(LeveledOptions::default, sized);
    let partition = PartitionCreateOptions::default()
        .max_memtable_size(options.memtable_bytes)
        .block_size(options.block_bytes)
        .compression(codec)
        .filter_policy(FilterPolicy::Bloom { bits_per_key: BLOOM_BITS })
        .compaction_strategy(CompactionStrategy::Leveled(leveled));
    let Some(bytes) = options.separate_from else { return partition };
    let threshold = u32::try_from(bytes).unwrap_or(u32::MAX);
    partition.with_kv_separation(KvSeparationOptions::default().separation_threshold(threshold).compression(codec))
}

impl AzekuraEngine {
    fn open(database: Database, name: &str, created_with: PartitionCreateOptions) -> Result<Box<dyn Engine>> {
        let partition = database.open_partition(name, created_with.clone())?;
        partition.set_options(created_with.clone())?; // an existing partition may have other ones
        Ok(Box::new(AzekuraEngine { partition, database, created_with }))
    }
}

impl Engine for AzekuraEngine {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        Ok(self.partition.insert(key, value)?)
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        Ok(self.partition.remove(key)?)
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        let mut batch = self.database.batch();
        records.iter().for_each(|(key, value)| batch.insert(&self.partition, key, value));
        Ok(batch.commit()?)
    }

    fn transact(&self, keys: &[Vec<u8>], change: Change<'_>) -> Result<()> {
        let mut failed = Ok(());
        self.database.transact(|tx| {
            for (position, key) in keys.iter().enumerate() {
                let value = tx.get(&self.partition, key)?;
                match existing(value).and_then(|value| change(position, &value)) {
                    Ok(value) => tx.insert(&self.partition, key, value)?,
                    Err(error) => {
                        failed = Err(error);
                        return Ok(());
                    }
                }
            }
            Ok(())
        })?;
        failed
    }

    fn ingest(&self, records: Records<'_>) -> Result<()> {
        let mut ingest = self.partition.start_ingest()?;
        records(&mut |key, value| Ok(ingest.insert(key, value)?))?;
        ingest.commit()?;
        Ok(())
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        Ok(found(self.partition.get(key)?, seen))
    }

    fn scan(&self, scan: Scan<'_>, seen: Visit<'_>) -> Result<()> {
        let mut records = self.partition.range::<&[u8]>(scan.bounds());
        let mut more = true;
        while more && let Some(record) = if scan.ascends { records.next_ref() } else { records.next_back_ref() } {
            let (key, value) = record?;
            more = seen(key, value);
        }
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        Ok(self.partition.flush()?)
    }

    fn sync(&self) -> Result<()> {
        Ok(self.database.persist(PersistMode::SyncData)?)
    }

    fn busy(&self) -> Result<bool> {
        Ok(self.partition.metrics().sealed_memtables > 0) // compactions are observed by CPU time and writes
    }

    fn partition(&self, name: &str) -> Result<Box<dyn Engine>> {
        AzekuraEngine::open(self.database.clone(), name, self.created_with.clone())
    }

    fn stats(&self) -> Map<String, Value> {
        let (metrics, own) = (self.database.metrics(), self.partition.metrics());
        let levels = own.levels.iter().map(
            |level| json!({"level": level.level, "runs": level.runs, "tables": level.tables, "bytes": level.bytes}),
        );
        let mut stats = object(json!({
            "commits": metrics.commits, "log_syncs": metrics.wal_syncs, "log_bytes": metrics.wal_bytes,
            "log_live_bytes": metrics.wal_live_bytes, "early_bytes": metrics.direct_blob_bytes,
            "flushes": metrics.flushes, "flushed_bytes": metrics.flushed_bytes,
            "compactions": metrics.compactions, "trivial_moves": metrics.trivial_moves,
            "compaction_bytes_read": metrics.compaction_bytes_read,
            "compaction_bytes_written": metrics.compaction_bytes_written,
            "own_write_amp": metrics.write_amplification(), "stall_s": metrics.stall_time.as_secs_f64(),
            "cache_used_bytes": metrics.cache.used, "data_hits": metrics.cache.data.hits,
            "data_misses": metrics.cache.data.misses, "index_hits": metrics.cache.index.hits,
            "index_misses": metrics.cache.index.misses, "filter_hits": metrics.cache.filter.hits,
            "filter_misses": metrics.cache.filter.misses, "held_bytes": own.pinned_bytes,
            "levels": levels.collect::<Vec<_>>(),
        }));
        if let Some(pool) = own.pool {
            stats.extend(object(json!({"pool": {
                "level": format!("{:?}", pool.persistence), "records": pool.records, "leaves": pool.leaves,
                "leaves_free": pool.free_leaves, "bytes": pool.bytes, "free_bytes": pool.free_bytes,
                "index_bytes": pool.index_bytes, "kept_bytes": pool.version_bytes, "checkpoints": pool.checkpoints,
                "checkpoint_bytes": pool.checkpoint_bytes, "splits": pool.splits,
                "split_stored_bytes": pool.split_bytes_written, "split_flushed_lines": pool.split_flushed_lines,
                "split_fences": pool.split_fences,
            }})));
        }
        stats
    }

    fn close(self: Box<Self>) -> Result<()> {
        let AzekuraEngine { partition, database, .. } = *self;
        drop(partition);
        Ok(database.close()?)
    }
}

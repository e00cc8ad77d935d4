//! Fjall 3, and its database with optimistic transactions.

use crate::engine::{
    BLOOM_BITS, Change, Compression, Engine, Options, PARTITION, Scan, Sync, Visit, existing, found, object, visit,
};
use crate::error::Result;
use ::fjall::compaction::Leveled;
use ::fjall::config::{BlockSizePolicy, BloomConstructionPolicy, CompressionPolicy, FilterPolicy, FilterPolicyEntry};
use ::fjall::{
    CompressionType, Database, Keyspace, KeyspaceCreateOptions, KvSeparationOptions, OptimisticTxDatabase, PersistMode,
    Readable,
};
use anyhow::bail;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

struct FjallEngine {
    keyspace: Keyspace,
    database: Database,
    /// `database` as a database with transactions.
    transactional: Option<OptimisticTxDatabase>,
    options: Options,
}

/// Opens or creates a Fjall database at `dir`.
pub(crate) fn open(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    let database = Database::builder(dir)
        .cache_size(options.cache_bytes)
        .worker_threads(options.workers.max(1))
        .journal_compression(codec(options))
        .open()?;
    FjallEngine::keyspace(database, None, PARTITION, options)
}

/// Opens or creates a Fjall database at `dir` for optimistic transactions.
pub(crate) fn open_transactional(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    let database = OptimisticTxDatabase::builder(dir)
        .cache_size(options.cache_bytes)
        .worker_threads(options.workers.max(1))
        .journal_compression(codec(options))
        .open()?;
    FjallEngine::keyspace(database.inner().clone(), Some(database), PARTITION, options)
}

/// The mode that makes writes as durable as the options ask.
fn persist_mode(options: &Options) -> PersistMode {
    match options.sync {
        Sync::None => PersistMode::Buffer,
        Sync::Data => PersistMode::SyncData,
        Sync::All => PersistMode::SyncAll,
    }
}

fn codec(options: &Options) -> CompressionType {
    if options.compression == Compression::Lz4 { CompressionType::Lz4 } else { CompressionType::None }
}

fn keyspace_options(options: &Options) -> KeyspaceCreateOptions {
    let sized = |bytes| Leveled::default().with_table_target_size(bytes);
    let leveled = options.table_bytes.map_or_else(Leveled::default, sized);
    let separation = options.separate_from.map(|bytes| {
        let threshold = u32::try_from(bytes).unwrap_or(u32::MAX);
        KvSeparationOptions::default().separation_threshold(threshold).compression(codec(options))
    });
    let bloom = FilterPolicyEntry::Bloom(BloomConstructionPolicy::BitsPerKey(BLOOM_BITS));
    KeyspaceCreateOptions::default()
        .max_memtable_size(options.memtable_bytes)
        .data_block_size_policy(BlockSizePolicy::all(options.block_bytes))
        .data_block_compression_policy(CompressionPolicy::all(codec(options)))
        .index_block_compression_policy(CompressionPolicy::all(codec(options)))
        .filter_policy(FilterPolicy::all(bloom))
        .compaction_strategy(Arc::new(leveled))
        .with_kv_separation(separation)
}

impl FjallEngine {
    fn keyspace(
        database: Database,
        transactional: Option<OptimisticTxDatabase>,
        name: &str,
        options: &Options,
    ) -> Result<Box<dyn Engine>> {
        let keyspace = database.keyspace(name, || keyspace_options(options))?;
        Ok(Box::new(FjallEngine { keyspace, database, transactional, options: options.clone() }))
    }

    /// Makes all writes so far as durable as the options ask.
    fn persist(&self) -> Result<()> {
        match self.options.sync {
            Sync::None => Ok(()),
            Sync::Data | Sync::All => Ok(self.database.persist(persist_mode(&self.options))?),
        }
    }
}

impl Engine for FjallEngine {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.keyspace.insert(key, value)?;
        self.persist()
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        self.keyspace.remove(key)?;
        self.persist()
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        let mut batch = self.database.batch();
        records.iter().for_each(|(key, value)| batch.insert(&self.keyspace, key.as_slice(), value.as_slice()));
        batch.commit()?;
        self.persist()
    }

    fn transact(&self, keys: &[Vec<u8>], change: Change<'_>) -> Result<()> {
        let Some(database) = &self.transactional else {
            bail!("no transactions that read and write: use the engine `fjall-tx`")
        };
        loop {
            let mut transaction = database.write_tx()?.durability(Some(persist_mode(&self.options)));
            for (position, key) in keys.iter().enumerate() {
                let value = change(position, &existing(transaction.get(&self.keyspace, key)?)?)?;
                transaction.insert(&self.keyspace, key.as_slice(), value);
            }
            if transaction.commit()?.is_ok() {
                return Ok(());
            }
        }
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        Ok(found(self.keyspace.get(key)?, seen))
    }

    fn scan(&self, scan: Scan<'_>, seen: Visit<'_>) -> Result<()> {
        let records = self.keyspace.range::<&[u8], _>(scan.bounds()).map(::fjall::Guard::into_inner);
        if scan.ascends { visit(records, seen) } else { visit(records.rev(), seen) }
    }

    fn flush(&self) -> Result<()> {
        self.keyspace.rotate_memtable_and_wait()?;
        while self.keyspace.sealed_memtable_count() > 0 {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(self.database.persist(PersistMode::SyncData)?)
    }

    fn busy(&self) -> Result<bool> {
        let (keyspace, database) = (&self.keyspace, &self.database);
        let flushes = database.outstanding_flushes() > 0 || keyspace.sealed_memtable_count() > 0;
        Ok(flushes || database.active_compactions() > 0)
    }

    fn partition(&self, name: &str) -> Result<Box<dyn Engine>> {
        FjallEngine::keyspace(self.database.clone(), self.transactional.clone(), name, &self.options)
    }

    fn stats(&self) -> Map<String, Value> {
        object(json!({"cache_used_bytes": self.database.cache_size()}))
    }
}

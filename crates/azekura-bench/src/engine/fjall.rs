//! Fjall 3.

use crate::engine::options::{BLOCK_BYTES, BLOOM_BITS, PARTITION};
use crate::engine::{Compression, Engine, Options, Scan, Sync};
use crate::failure::Result;
use fjall::compaction::Leveled;
use fjall::config::{BlockSizePolicy, BloomConstructionPolicy, CompressionPolicy, FilterPolicy, FilterPolicyEntry};
use fjall::{CompressionType, Database, Keyspace, KeyspaceCreateOptions, KvSeparationOptions, PersistMode};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

struct FjallEngine {
    keyspace: Keyspace,
    database: Database,
    options: Options,
}

/// Opens or creates a Fjall database at `dir`.
pub(crate) fn open(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    let database = Database::builder(dir)
        .cache_size(options.cache_bytes)
        .worker_threads(options.workers.max(1))
        .journal_compression(codec(options.compression))
        .open()?;
    let keyspace = database.keyspace(PARTITION, || keyspace_options(options))?;
    Ok(Box::new(FjallEngine { keyspace, database, options: options.clone() }))
}

fn codec(compression: Compression) -> CompressionType {
    match compression {
        Compression::None => CompressionType::None,
        Compression::Lz4 => CompressionType::Lz4,
    }
}

fn keyspace_options(options: &Options) -> KeyspaceCreateOptions {
    let mut leveled = Leveled::default();
    if let Some(bytes) = options.table_bytes {
        leveled = leveled.with_table_target_size(bytes);
    }
    let apart = options.separate_from.map(|bytes| {
        let threshold = u32::try_from(bytes).unwrap_or(u32::MAX);
        KvSeparationOptions::default().separation_threshold(threshold).compression(codec(options.compression))
    });
    let bloom = FilterPolicyEntry::Bloom(BloomConstructionPolicy::BitsPerKey(BLOOM_BITS));
    KeyspaceCreateOptions::default()
        .max_memtable_size(options.memtable_bytes)
        .data_block_size_policy(BlockSizePolicy::all(BLOCK_BYTES))
        .data_block_compression_policy(CompressionPolicy::all(codec(options.compression)))
        .index_block_compression_policy(CompressionPolicy::all(codec(options.compression)))
        .filter_policy(FilterPolicy::all(bloom))
        .compaction_strategy(Arc::new(leveled))
        .with_kv_separation(apart)
}

impl FjallEngine {
    /// Makes what was written as durable as the options ask.
    fn keep_promise(&self) -> Result<()> {
        match self.options.sync {
            Sync::None => {}
            Sync::Data => self.database.persist(PersistMode::SyncData)?,
            Sync::All => self.database.persist(PersistMode::SyncAll)?,
        }
        Ok(())
    }
}

impl Engine for FjallEngine {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.keyspace.insert(key, value)?;
        self.keep_promise()
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        self.keyspace.remove(key)?;
        self.keep_promise()
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        let mut batch = self.database.batch();
        for (key, value) in records {
            batch.insert(&self.keyspace, key.as_slice(), value.as_slice());
        }
        batch.commit()?;
        self.keep_promise()
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let found = self.keyspace.get(key)?;
        if let Some(value) = &found {
            seen(value);
        }
        Ok(found.is_some())
    }

    fn scan(&self, scan: Scan<'_>, limit: u64, seen: &mut dyn FnMut(&[u8], &[u8])) -> Result<u64> {
        let mut count = 0;
        let mut show = |guard: fjall::Guard| -> Result<()> {
            let (key, value) = guard.into_inner()?;
            seen(&key, &value);
            count += 1;
            Ok(())
        };
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        match scan {
            Scan::First => self.keyspace.iter().take(limit).try_for_each(&mut show),
            Scan::From(key) => self.keyspace.range(key..).take(limit).try_for_each(&mut show),
            Scan::Last => self.keyspace.iter().rev().take(limit).try_for_each(&mut show),
            Scan::Back(key) => self.keyspace.range(..=key).rev().take(limit).try_for_each(&mut show),
        }?;
        Ok(count)
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
        Ok(self.database.active_compactions() > 0
            || self.database.outstanding_flushes() > 0
            || self.keyspace.sealed_memtable_count() > 0)
    }

    fn tables(&self) -> Result<u64> {
        Ok(self.keyspace.table_count() as u64)
    }

    fn partition(&self, name: &str) -> Result<Box<dyn Engine>> {
        let keyspace = self.database.keyspace(name, || keyspace_options(&self.options))?;
        Ok(Box::new(FjallEngine { keyspace, database: self.database.clone(), options: self.options.clone() }))
    }

    fn stats(&self) -> Map<String, Value> {
        let mut stats = Map::new();
        stats.insert("tables".into(), json!(self.keyspace.table_count()));
        stats.insert("l0_tables".into(), json!(self.keyspace.l0_table_count()));
        stats.insert("compactions".into(), json!(self.database.compactions_completed()));
        stats.insert("cache_used_bytes".into(), json!(self.database.cache_size()));
        stats
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(()) // Fjall has no close: the last handle dropped joins the workers.
    }
}

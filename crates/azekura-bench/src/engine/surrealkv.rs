//! SurrealKV 1.2, whose commits are asynchronous, on a runtime of tokio's.

use crate::engine::options::BLOCK_BYTES;
use crate::engine::{Engine, Options, Scan, Sync};
use crate::failure::Result;
use ::surrealkv::{CompactRangeOptions, Durability, LSMIterator, Mode, ReadOptions, Transaction, Tree, TreeBuilder};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use tokio::runtime::{Builder, Runtime};

/// One tree; reads and writes are transactions of their own, as they are for its users.
struct SurrealkvEngine {
    tree: Tree,
    runtime: Runtime,
    sync: Sync,
    tables: PathBuf,
}

/// Opens or creates a SurrealKV database at `dir`.
pub(crate) fn open(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    let runtime = Builder::new_multi_thread().worker_threads(options.workers.max(1)).enable_all().build()?;
    let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    // Its own filter is a bloom of 10 bits per key, and nothing is compressed.
    let mut told = ::surrealkv::Options::new()
        .with_path(dir.to_path_buf())
        .with_block_size(BLOCK_BYTES as usize)
        .with_block_cache_capacity(options.cache_bytes)
        .with_max_memtable_size(size(options.memtable_bytes))
        .without_compression();
    if let Some(bytes) = options.table_bytes {
        told = told.with_target_file_size(bytes);
    }
    if let Some(bytes) = options.separate_from {
        told = told.with_enable_vlog(true).with_vlog_value_threshold(size(bytes));
    }
    let tree = {
        let _inside = runtime.enter(); // it starts tasks when it is opened
        TreeBuilder::with_options(told).build()?
    };
    Ok(Box::new(SurrealkvEngine { tree, runtime, sync: options.sync, tables: dir.join("sstables") }))
}

impl SurrealkvEngine {
    /// One transaction that only writes, as durable as the options ask.
    fn write(&self, act: impl FnOnce(&mut Transaction) -> ::surrealkv::Result<()>) -> Result<()> {
        let mut transaction = self.tree.begin_with_mode(Mode::WriteOnly)?;
        transaction.set_durability(match self.sync {
            Sync::None => Durability::Eventual,
            Sync::Data | Sync::All => Durability::Immediate,
        });
        act(&mut transaction)?;
        Ok(self.runtime.block_on(transaction.commit())?)
    }
}

impl Engine for SurrealkvEngine {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.write(|transaction| transaction.set(key, value))
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        self.write(|transaction| transaction.delete(key))
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        self.write(|transaction| {
            records.iter().try_for_each(|(key, value)| transaction.set(key.as_slice(), value.as_slice()))
        })
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let found = self.tree.begin_with_mode(Mode::ReadOnly)?.get(key)?;
        if let Some(value) = &found {
            seen(value);
        }
        Ok(found.is_some())
    }

    fn scan(&self, scan: Scan<'_>, limit: u64, seen: &mut dyn FnMut(&[u8], &[u8])) -> Result<u64> {
        let transaction = self.tree.begin_with_mode(Mode::ReadOnly)?;
        let mut bounds = ReadOptions::new();
        match scan {
            Scan::First | Scan::Last => {}
            Scan::From(key) => bounds.set_iterate_lower_bound(Some(key.to_vec())),
            Scan::Back(key) => bounds.set_iterate_upper_bound(Some([key, &[0]].concat())), // the key behind it
        }
        let ascends = matches!(scan, Scan::First | Scan::From(_));
        let mut cursor = transaction.range_with_options(&bounds)?;
        let mut valid = limit > 0 && if ascends { cursor.seek_first()? } else { cursor.seek_last()? };
        let mut count = 0;
        while valid {
            seen(cursor.key().user_key(), &cursor.value()?);
            count += 1;
            valid = count < limit && if ascends { cursor.next()? } else { cursor.prev()? };
        }
        Ok(count)
    }

    fn flush(&self) -> Result<()> {
        // A compaction of everything down to level 0 is a flush and no compaction.
        let only_flush = CompactRangeOptions { flush_memtable: true, target_level: Some(0), ..Default::default() };
        Ok(self.tree.compact_range(None, None, &only_flush)?)
    }

    fn sync(&self) -> Result<()> {
        Ok(self.tree.flush_wal(true)?)
    }

    fn busy(&self) -> Result<bool> {
        Ok(false) // it does not say; what it does in the background shows as CPU and writes, which `settle` watches
    }

    fn tables(&self) -> Result<u64> {
        let mut tables = 0;
        for entry in std::fs::read_dir(&self.tables)? {
            tables += u64::from(entry?.path().extension().is_some_and(|extension| extension == "sst"));
        }
        Ok(tables)
    }

    fn partition(&self, _: &str) -> Result<Box<dyn Engine>> {
        Err("SurrealKV has no partitions: a database is one tree".into())
    }

    fn stats(&self) -> Map<String, Value> {
        let mut stats = Map::new();
        stats.insert("compression".into(), json!("none")); // it has Snappy and Zstd, but no LZ4
        stats.insert("tables".into(), json!(self.tables().ok()));
        stats.insert("background_errors".into(), json!(self.tree.background_error_count()));
        stats
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(self.runtime.block_on(self.tree.close())?)
    }
}

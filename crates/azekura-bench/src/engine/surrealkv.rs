//! SurrealKV 1.2, whose commits are asynchronous. Each read and each write is a transaction of its own.

use crate::engine::{Engine, Options, Scan, Sync, Visit, found};
use crate::error::Result;
use ::surrealkv::{CompactRangeOptions, Durability, LSMIterator, Mode, ReadOptions, Transaction, Tree, TreeBuilder};
use std::path::Path;
use tokio::runtime::{Builder, Runtime};

struct SurrealkvEngine {
    tree: Tree,
    runtime: Runtime,
    durability: Durability,
}

/// Opens or creates a SurrealKV database at `dir`.
pub(crate) fn open(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    let runtime = Builder::new_multi_thread().worker_threads(options.workers.max(1)).enable_all().build()?;
    let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    // Its default filter is a bloom of 10 bits per key.
    let mut settings = ::surrealkv::Options::new()
        .with_path(dir.to_path_buf())
        .with_block_size(options.block_bytes as usize)
        .with_block_cache_capacity(options.cache_bytes)
        .with_max_memtable_size(size(options.memtable_bytes))
        .without_compression();
    if let Some(bytes) = options.table_bytes {
        settings = settings.with_target_file_size(bytes);
    }
    if let Some(bytes) = options.separate_from {
        settings = settings.with_enable_vlog(true).with_vlog_value_threshold(size(bytes));
    }
    let entered = runtime.enter(); // opening starts tasks
    let tree = TreeBuilder::with_options(settings).build()?;
    drop(entered);
    let durability = if options.sync == Sync::None { Durability::Eventual } else { Durability::Immediate };
    Ok(Box::new(SurrealkvEngine { tree, runtime, durability }))
}

impl SurrealkvEngine {
    /// One transaction that only writes, as durable as the options ask.
    fn write(&self, act: impl FnOnce(&mut Transaction) -> ::surrealkv::Result<()>) -> Result<()> {
        let mut transaction = self.tree.begin_with_mode(Mode::WriteOnly)?;
        transaction.set_durability(self.durability);
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
        Ok(found(self.tree.begin_with_mode(Mode::ReadOnly)?.get(key)?, seen))
    }

    fn scan(&self, scan: Scan<'_>, seen: Visit<'_>) -> Result<()> {
        let transaction = self.tree.begin_with_mode(Mode::ReadOnly)?;
        let mut bounds = ReadOptions::new();
        match scan.ascends {
            true => bounds.set_iterate_lower_bound(scan.from.map(<[u8]>::to_vec)),
            false => bounds.set_iterate_upper_bound(scan.from.map(|key| [key, &[0]].concat())), // exclusive
        }
        let mut cursor = transaction.range_with_options(&bounds)?;
        let mut valid = if scan.ascends { cursor.seek_first()? } else { cursor.seek_last()? };
        while valid && seen(cursor.key().user_key(), &cursor.value()?) {
            valid = if scan.ascends { cursor.next()? } else { cursor.prev()? };
        }
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        // A compaction of everything down to level 0 is only a flush.
        let flush = CompactRangeOptions { flush_memtable: true, target_level: Some(0), ..Default::default() };
        Ok(self.tree.compact_range(None, None, &flush)?)
    }

    fn sync(&self) -> Result<()> {
        Ok(self.tree.flush_wal(true)?)
    }

    fn close(self: Box<Self>) -> Result<()> {
        Ok(self.runtime.block_on(self.tree.close())?)
    }
}

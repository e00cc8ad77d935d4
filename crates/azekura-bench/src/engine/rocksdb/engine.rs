//! RocksDB as an engine.

use crate::engine::options::{BLOCK_BYTES, PARTITION};
use crate::engine::rocksdb::library;
use crate::engine::rocksdb::settings::{DataBlocks, DataIndex, Settings};
use crate::engine::rocksdb::store::{FamilyId, Store};
use crate::engine::{Engine, Options, Scan};
use crate::failure::Result;
use serde_json::{Map, Value, json};
use std::ffi::CString;
use std::path::Path;
use std::sync::Arc;

/// Keys per bucket of `rocksdb-hash`: what RocksDB takes when only the hash index is asked for.
const HASH_RATIO: f64 = 0.75;
/// The levels of a database whose number of levels is the default.
const LEVELS: u32 = 7;

struct RocksdbEngine {
    family: FamilyId,
    store: Arc<Store>,
}

/// Opens or creates a RocksDB database at `dir`.
pub(crate) fn open(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    open_blocks(dir, options, false, BLOCK_BYTES)
}

/// The same, with a hash index in each data block.
pub(crate) fn open_hashed(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    open_blocks(dir, options, true, BLOCK_BYTES)
}

/// Either, with data blocks of another size; for experiments.
pub(crate) fn open_blocks(dir: &Path, options: &Options, hashed: bool, bytes: u32) -> Result<Box<dyn Engine>> {
    let c = library::c()?;
    let index = if hashed { DataIndex::Hash(HASH_RATIO) } else { DataIndex::Binary };
    let store = Store::open(c, dir, Settings::new(c, options, DataBlocks { index, bytes }))?;
    Ok(Box::new(RocksdbEngine { family: store.family(PARTITION)?, store: Arc::new(store) }))
}

/// As [`open`], with index and filters in the block cache, and nothing in the cache of the system.
pub(crate) fn open_direct(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    let c = library::c()?;
    let settings = Settings::new(c, options, DataBlocks { index: DataIndex::Binary, bytes: BLOCK_BYTES });
    settings.spare_memory();
    let store = Store::open(c, dir, settings)?;
    Ok(Box::new(RocksdbEngine { family: store.family(PARTITION)?, store: Arc::new(store) }))
}

impl Engine for RocksdbEngine {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.store.put(self.family, key, value)
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        self.store.delete(self.family, key)
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        self.store.put_batch(self.family, records)
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        self.store.get(self.family, key, seen)
    }

    fn scan(&self, scan: Scan<'_>, limit: u64, seen: &mut dyn FnMut(&[u8], &[u8])) -> Result<u64> {
        self.store.scan(self.family, scan, limit, seen)
    }

    fn flush(&self) -> Result<()> {
        self.store.flush(self.family)
    }

    fn sync(&self) -> Result<()> {
        self.store.sync_log()
    }

    fn busy(&self) -> Result<bool> {
        let signs = [
            c"rocksdb.num-running-compactions",
            c"rocksdb.num-running-flushes",
            c"rocksdb.compaction-pending",
            c"rocksdb.mem-table-flush-pending",
        ];
        Ok(signs.iter().any(|sign| self.store.number(self.family, sign).unwrap_or(0) > 0))
    }

    fn tables(&self) -> Result<u64> {
        let mut tables = 0;
        for level in 0..LEVELS {
            let property = CString::new(format!("rocksdb.num-files-at-level{level}"))?;
            let text = self.store.text(self.family, &property);
            tables += text.trim().parse::<u64>().map_err(|_| format!("{property:?} is {text:?}, not a number"))?;
        }
        Ok(tables)
    }

    fn partition(&self, name: &str) -> Result<Box<dyn Engine>> {
        Ok(Box::new(RocksdbEngine { family: self.store.family(name)?, store: Arc::clone(&self.store) }))
    }

    fn stats(&self) -> Map<String, Value> {
        let number = |property| self.store.number(self.family, property);
        let mut stats = Map::new();
        stats.insert("version".into(), json!(library::VERSION));
        stats.insert("tables".into(), json!(self.tables().ok()));
        stats.insert("cache_used_bytes".into(), json!(self.store.cache_used_bytes()));
        stats.insert("table_bytes".into(), json!(number(c"rocksdb.total-sst-files-size")));
        stats.insert("blob_bytes".into(), json!(number(c"rocksdb.total-blob-file-size")));
        stats.insert("live_blob_bytes".into(), json!(number(c"rocksdb.live-blob-file-size")));
        stats.insert("immutable_memtables".into(), json!(number(c"rocksdb.num-immutable-mem-table")));
        stats.insert("compaction_debt_bytes".into(), json!(number(c"rocksdb.estimate-pending-compaction-bytes")));
        stats.insert("background_errors".into(), json!(number(c"rocksdb.background-errors")));
        stats
    }

    fn close(self: Box<Self>) -> Result<()> {
        Arc::into_inner(self.store).map(drop).ok_or_else(|| "a partition is still in use".into())
    }
}

//! sled 0.34.

use crate::engine::api::{PARTITION, Visit, found, object, visit};
use crate::engine::{Engine, Options, Scan, Sync};
use crate::error::Result;
use ::sled::{Batch, Config, Db, Tree};
use serde_json::{Map, Value, json};
use std::path::Path;

struct SledEngine {
    tree: Tree,
    database: Db,
    sync: Sync,
}

/// Opens or creates a sled database at `dir`.
pub(crate) fn open(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    let database = Config::new().path(dir).cache_capacity(options.cache_bytes).open()?;
    Ok(Box::new(SledEngine { tree: database.open_tree(PARTITION)?, database, sync: options.sync }))
}

impl SledEngine {
    /// Makes what was written as durable as the options ask.
    fn persist(&self) -> Result<()> {
        if self.sync == Sync::None { Ok(()) } else { Ok(self.tree.flush().map(drop)?) }
    }
}

impl Engine for SledEngine {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.tree.insert(key, value)?;
        self.persist()
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        self.tree.remove(key)?;
        self.persist()
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        let mut batch = Batch::default();
        records.iter().for_each(|(key, value)| batch.insert(key.as_slice(), value.as_slice()));
        self.tree.apply_batch(batch)?;
        self.persist()
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        Ok(found(self.tree.get(key)?, seen))
    }

    fn scan(&self, scan: Scan<'_>, limit: u64, seen: Visit<'_>) -> Result<u64> {
        let records = self.tree.range::<&[u8], _>(scan.bounds());
        if scan.ascends() { visit(records, limit, seen) } else { visit(records.rev(), limit, seen) }
    }

    fn flush(&self) -> Result<()> {
        Ok(self.database.flush().map(drop)?)
    }

    fn sync(&self) -> Result<()> {
        self.flush()
    }

    fn partition(&self, name: &str) -> Result<Box<dyn Engine>> {
        let (tree, database) = (self.database.open_tree(name)?, self.database.clone());
        Ok(Box::new(SledEngine { tree, database, sync: self.sync }))
    }

    fn stats(&self) -> Map<String, Value> {
        object(json!({"compression": "none", "file_bytes": self.database.size_on_disk().ok()}))
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.flush() // sled has no close: the last handle dropped joins its flusher
    }
}

//! sled 0.34.

use crate::engine::options::PARTITION;
use crate::engine::{Engine, Options, Scan, Sync};
use crate::failure::Result;
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
    let tree = database.open_tree(PARTITION)?;
    Ok(Box::new(SledEngine { tree, database, sync: options.sync }))
}

impl SledEngine {
    /// Makes what was written as durable as the options ask.
    fn keep_promise(&self) -> Result<()> {
        if self.sync != Sync::None {
            self.tree.flush()?;
        }
        Ok(())
    }
}

impl Engine for SledEngine {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.tree.insert(key, value)?;
        self.keep_promise()
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        self.tree.remove(key)?;
        self.keep_promise()
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        let mut batch = Batch::default();
        for (key, value) in records {
            batch.insert(key.as_slice(), value.as_slice());
        }
        self.tree.apply_batch(batch)?;
        self.keep_promise()
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let found = self.tree.get(key)?;
        if let Some(value) = &found {
            seen(value);
        }
        Ok(found.is_some())
    }

    fn scan(&self, scan: Scan<'_>, limit: u64, seen: &mut dyn FnMut(&[u8], &[u8])) -> Result<u64> {
        let mut count = 0;
        let mut show = |record: ::sled::Result<(::sled::IVec, ::sled::IVec)>| -> Result<()> {
            let (key, value) = record?;
            seen(&key, &value);
            count += 1;
            Ok(())
        };
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        match scan {
            Scan::First => self.tree.iter().take(limit).try_for_each(&mut show),
            Scan::From(key) => self.tree.range(key..).take(limit).try_for_each(&mut show),
            Scan::Last => self.tree.iter().rev().take(limit).try_for_each(&mut show),
            Scan::Back(key) => self.tree.range(..=key).rev().take(limit).try_for_each(&mut show),
        }?;
        Ok(count)
    }

    fn flush(&self) -> Result<()> {
        Ok(self.database.flush().map(drop)?)
    }

    fn sync(&self) -> Result<()> {
        Ok(self.database.flush().map(drop)?)
    }

    fn busy(&self) -> Result<bool> {
        Ok(false) // it does not say; what it does in the background shows as CPU and writes, which `settle` watches
    }

    fn tables(&self) -> Result<u64> {
        Ok(1) // one log is all there is
    }

    fn partition(&self, name: &str) -> Result<Box<dyn Engine>> {
        let tree = self.database.open_tree(name)?;
        Ok(Box::new(SledEngine { tree, database: self.database.clone(), sync: self.sync }))
    }

    fn stats(&self) -> Map<String, Value> {
        let mut stats = Map::new();
        stats.insert("compression".into(), json!("none")); // of LZ4 it has none
        stats.insert("file_bytes".into(), json!(self.database.size_on_disk().ok()));
        stats
    }

    fn close(self: Box<Self>) -> Result<()> {
        self.database.flush()?;
        Ok(()) // sled has no close: the last handle dropped joins its flusher
    }
}

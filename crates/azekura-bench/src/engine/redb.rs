//! redb 4.

use crate::engine::options::PARTITION;
use crate::engine::{Engine, Options, Scan, Sync};
use crate::failure::Result;
use ::redb::{Database, Durability, ReadableDatabase, ReadableTableMetadata, Table, TableDefinition};
use serde_json::{Map, Value, json};
use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;

/// One table of one database; reads and writes are transactions of their own, as they are for its users.
struct RedbEngine {
    table: String,
    database: Arc<Database>,
    sync: Sync,
}

/// Opens or creates a redb database in `dir`.
pub(crate) fn open(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    let cache = usize::try_from(options.cache_bytes).unwrap_or(usize::MAX);
    let database = Arc::new(Database::builder().set_cache_size(cache).create(dir.join("bench.redb"))?);
    open_table(PARTITION, database, options.sync)
}

fn open_table(name: &str, database: Arc<Database>, sync: Sync) -> Result<Box<dyn Engine>> {
    if name.is_empty() {
        return Err("a table of redb needs a name".into());
    }
    let engine = RedbEngine { table: name.to_owned(), database, sync };
    engine.write(|_| Ok(()))?;
    Ok(Box::new(engine))
}

impl RedbEngine {
    fn definition(&self) -> TableDefinition<'_, &'static [u8], &'static [u8]> {
        TableDefinition::new(&self.table)
    }

    /// One write transaction on the table, as durable as the options ask.
    fn write(&self, act: impl FnOnce(&mut Table<'_, &'static [u8], &'static [u8]>) -> Result<()>) -> Result<()> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(match self.sync {
            Sync::None => Durability::None,
            Sync::Data | Sync::All => Durability::Immediate,
        })?;
        act(&mut transaction.open_table(self.definition())?)?;
        Ok(transaction.commit()?)
    }
}

impl Engine for RedbEngine {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.write(|table| Ok(table.insert(key, value).map(drop)?))
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        self.write(|table| Ok(table.remove(key).map(drop)?))
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        self.write(|table| {
            for (key, value) in records {
                table.insert(key.as_slice(), value.as_slice())?;
            }
            Ok(())
        })
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let table = self.database.begin_read()?.open_table(self.definition())?;
        let found = table.get(key)?;
        if let Some(value) = &found {
            seen(value.value());
        }
        Ok(found.is_some())
    }

    fn scan(&self, scan: Scan<'_>, limit: u64, seen: &mut dyn FnMut(&[u8], &[u8])) -> Result<u64> {
        let table = self.database.begin_read()?.open_table(self.definition())?;
        let bounds: (Bound<&[u8]>, Bound<&[u8]>) = match scan {
            Scan::First | Scan::Last => (Bound::Unbounded, Bound::Unbounded),
            Scan::From(key) => (Bound::Included(key), Bound::Unbounded),
            Scan::Back(key) => (Bound::Unbounded, Bound::Included(key)),
        };
        let mut range = table.range::<&[u8]>(bounds)?;
        let mut count = 0;
        while count < limit {
            let next = if matches!(scan, Scan::First | Scan::From(_)) { range.next() } else { range.next_back() };
            let Some(record) = next else { break };
            let (key, value) = record?;
            seen(key.value(), value.value());
            count += 1;
        }
        Ok(count)
    }

    fn flush(&self) -> Result<()> {
        self.sync() // what is in memory alone are the commits without durability
    }

    fn sync(&self) -> Result<()> {
        // A durable commit makes every commit before it durable; it may be empty.
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        Ok(transaction.commit()?)
    }

    fn busy(&self) -> Result<bool> {
        Ok(false) // there are no background threads
    }

    fn tables(&self) -> Result<u64> {
        Ok(1) // one file is all there is
    }

    fn partition(&self, name: &str) -> Result<Box<dyn Engine>> {
        open_table(name, Arc::clone(&self.database), self.sync)
    }

    fn stats(&self) -> Map<String, Value> {
        let mut stats = Map::new();
        stats.insert("compression".into(), json!("none")); // it has none
        let table = self.database.begin_read().ok().and_then(|reading| reading.open_table(self.definition()).ok());
        if let Some(own) = table.and_then(|table| table.stats().ok()) {
            stats.insert("tree_height".into(), json!(own.tree_height()));
            stats.insert("stored_bytes".into(), json!(own.stored_bytes()));
            stats.insert("metadata_bytes".into(), json!(own.metadata_bytes()));
            stats.insert("fragmented_bytes".into(), json!(own.fragmented_bytes()));
        }
        stats
    }

    fn close(self: Box<Self>) -> Result<()> {
        let database = Arc::into_inner(self.database).ok_or("a partition is still in use")?;
        Ok(database.close()?)
    }
}

//! redb 4. Each read and each write is a transaction of its own.

use crate::engine::{Engine, Options, PARTITION, Scan, Sync, Visit};
use crate::error::Result;
use ::redb::{Database, Durability, ReadableDatabase, StorageError, Table, TableDefinition};
use anyhow::Context;
use std::path::Path;
use std::sync::Arc;

struct RedbEngine {
    table: String,
    database: Arc<Database>,
    durability: Durability,
}

type Records<'t> = Table<'t, &'static [u8], &'static [u8]>;

/// Opens or creates a redb database in `dir`.
pub(crate) fn open(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    let cache = usize::try_from(options.cache_bytes).unwrap_or(usize::MAX);
    let database = Arc::new(Database::builder().set_cache_size(cache).create(dir.join("bench.redb"))?);
    let durability = if options.sync == Sync::None { Durability::None } else { Durability::Immediate };
    RedbEngine::open(PARTITION, database, durability)
}

impl RedbEngine {
    /// Creates the table if it is missing.
    fn open(name: &str, database: Arc<Database>, durability: Durability) -> Result<Box<dyn Engine>> {
        let engine = RedbEngine { table: name.to_owned(), database, durability };
        engine.write(durability, |_| Ok(()))?;
        Ok(Box::new(engine))
    }

    fn definition(&self) -> TableDefinition<'_, &'static [u8], &'static [u8]> {
        TableDefinition::new(&self.table)
    }

    /// One write transaction on the table.
    fn write(
        &self,
        durability: Durability,
        act: impl FnOnce(&mut Records<'_>) -> Result<(), StorageError>,
    ) -> Result<()> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(durability)?;
        act(&mut transaction.open_table(self.definition())?)?;
        Ok(transaction.commit()?)
    }
}

impl Engine for RedbEngine {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.write(self.durability, |table| table.insert(key, value).map(drop))
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        self.write(self.durability, |table| table.remove(key).map(drop))
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        self.write(self.durability, |table| {
            records.iter().try_for_each(|(key, value)| table.insert(key.as_slice(), value.as_slice()).map(drop))
        })
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let value = self.database.begin_read()?.open_table(self.definition())?.get(key)?;
        Ok(value.inspect(|value| seen(value.value())).is_some())
    }

    fn scan(&self, scan: Scan<'_>, seen: Visit<'_>) -> Result<()> {
        let mut range = self.database.begin_read()?.open_table(self.definition())?.range::<&[u8]>(scan.bounds())?;
        let mut more = true;
        while more && let Some(record) = if scan.ascends { range.next() } else { range.next_back() } {
            let (key, value) = record?;
            more = seen(key.value(), value.value());
        }
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        self.sync() // only commits without durability are in memory alone
    }

    fn sync(&self) -> Result<()> {
        self.write(Durability::Immediate, |_| Ok(())) // makes every commit before it durable
    }

    fn partition(&self, name: &str) -> Result<Box<dyn Engine>> {
        RedbEngine::open(name, Arc::clone(&self.database), self.durability)
    }

    fn close(self: Box<Self>) -> Result<()> {
        let database = Arc::into_inner(self.database).context("a partition is still in use")?;
        Ok(database.close()?)
    }
}

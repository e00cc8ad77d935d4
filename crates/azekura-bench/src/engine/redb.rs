//! redb 4. Each read and each write is a transaction of its own.

use crate::engine::{Engine, Options, PARTITION, Scan, Sync, Visit};
use crate::error::Result;
use ::redb::{Database, Durability, ReadableDatabase, Table, TableDefinition};
use anyhow::Context;
use std::path::Path;
use std::sync::Arc;

struct RedbEngine {
    table: String,
    database: Arc<Database>,
    durability: Durability,
}

/// Opens or creates a redb database in `dir`.
pub(crate) fn open(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    let cache = usize::try_from(options.cache_bytes).unwrap_or(usize::MAX);
    let database = Arc::new(Database::builder().set_cache_size(cache).create(dir.join("bench.redb"))?);
    let durability = if options.sync == Sync::None { Durability::None } else { Durability::Immediate };
    RedbEngine { table: PARTITION.into(), database, durability }.with_table()
}

impl RedbEngine {
    /// Creates the table if it is missing.
    fn with_table(self) -> Result<Box<dyn Engine>> {
        self.write(|_| Ok(()))?;
        Ok(Box::new(self))
    }

    fn definition(&self) -> TableDefinition<'_, &'static [u8], &'static [u8]> {
        TableDefinition::new(&self.table)
    }

    /// One write transaction on the table, as durable as the options ask.
    fn write(&self, act: impl FnOnce(&mut Table<'_, &'static [u8], &'static [u8]>) -> Result<()>) -> Result<()> {
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(self.durability)?;
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
        let all = |table: &mut Table<'_, &'static [u8], &'static [u8]>| {
            records.iter().try_for_each(|(key, value)| table.insert(key.as_slice(), value.as_slice()).map(drop))
        };
        self.write(|table| Ok(all(table)?))
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let value = self.database.begin_read()?.open_table(self.definition())?.get(key)?;
        Ok(value.inspect(|value| seen(value.value())).is_some())
    }

    fn scan(&self, scan: Scan<'_>, limit: u64, seen: Visit<'_>) -> Result<u64> {
        let mut range = self.database.begin_read()?.open_table(self.definition())?.range::<&[u8]>(scan.bounds())?;
        for count in 0..limit {
            let next = if scan.ascends() { range.next() } else { range.next_back() };
            let Some(record) = next else { return Ok(count) };
            let (key, value) = record?;
            seen(key.value(), value.value());
        }
        Ok(limit)
    }

    fn flush(&self) -> Result<()> {
        self.sync() // only commits without durability are in memory alone
    }

    fn sync(&self) -> Result<()> {
        // A durable commit makes every commit before it durable; it may be empty.
        let mut transaction = self.database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        Ok(transaction.commit()?)
    }

    fn partition(&self, name: &str) -> Result<Box<dyn Engine>> {
        RedbEngine { table: name.to_owned(), database: Arc::clone(&self.database), ..*self }.with_table()
    }

    fn close(self: Box<Self>) -> Result<()> {
        let database = Arc::into_inner(self.database).context("a partition is still in use")?;
        Ok(database.close()?)
    }
}

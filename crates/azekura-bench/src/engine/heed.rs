//! LMDB, through heed.

#![allow(unsafe_code)]

use crate::engine::options::PARTITION;
use crate::engine::{Engine, Options, Scan, Sync};
use crate::failure::{Failure, Result};
use ::heed::types::Bytes;
use ::heed::{CommitOrAbort, Database, Env, EnvFlags, EnvOpenOptions, RwTxn};
use serde_json::{Map, Value, json};
use std::ops::Bound;
use std::path::Path;
use std::time::Duration;

/// Address space for the map, and so the largest database; nothing is allocated for it.
const MAP_BYTES: usize = 64 << 30;
/// Databases of one environment, our partitions; each makes every transaction a little slower, opened or not.
const DATABASES: u32 = 128;
/// Reader slots: one for each thread that reads.
const READERS: u32 = 1100;
/// So long an environment may take to close.
const CLOSING: Duration = Duration::from_secs(30);

/// One database of one environment; reads and writes are transactions of their own, as they are for its users.
struct HeedEngine {
    database: Database<'static, Bytes, Bytes>,
    env: Env,
}

/// Opens or creates an LMDB environment in `dir`.
pub(crate) fn open(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    let mut opening = EnvOpenOptions::new();
    opening.map_size(MAP_BYTES).max_dbs(DATABASES).max_readers(READERS);
    if options.sync == Sync::None {
        // SAFETY: without syncs a power cut may damage the database, which no bench survives; the death of the process
        // does not, because the map is read-only and pages are written with `pwrite`.
        unsafe { opening.flags(EnvFlags::NO_SYNC) };
    }
    // SAFETY: the directory is the bench's own; nobody else changes the file below the map.
    let env = unsafe { opening.open(dir)? };
    open_database(PARTITION, env)
}

fn open_database(name: &str, env: Env) -> Result<Box<dyn Engine>> {
    let database = env
        .create_databases_and_commit(env.write_txn()?, |opener, transaction| {
            let made = opener.create_database::<Bytes, Bytes>(transaction, Some(name))?;
            Ok::<_, Failure>(CommitOrAbort::<_, ()>::Commit(made))
        })?
        .commit()
        .ok_or("the database was not made")?;
    Ok(Box::new(HeedEngine { database, env }))
}

impl HeedEngine {
    /// One write transaction, synced if the environment syncs.
    fn write(&self, act: impl FnOnce(&mut RwTxn<'_>) -> Result<()>) -> Result<()> {
        let mut transaction = self.env.write_txn()?;
        act(&mut transaction)?;
        Ok(transaction.commit()?)
    }
}

impl Engine for HeedEngine {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.write(|transaction| Ok(self.database.put(transaction, key, value)?))
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        self.write(|transaction| Ok(self.database.delete(transaction, key).map(drop)?))
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        self.write(|transaction| {
            for (key, value) in records {
                self.database.put(transaction, key, value)?;
            }
            Ok(())
        })
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let transaction = self.env.read_txn()?;
        let found = self.database.get(&transaction, key)?;
        if let Some(value) = found {
            seen(value);
        }
        Ok(found.is_some())
    }

    fn scan(&self, scan: Scan<'_>, limit: u64, seen: &mut dyn FnMut(&[u8], &[u8])) -> Result<u64> {
        let transaction = self.env.read_txn()?;
        let mut count = 0;
        let mut show = |record: ::heed::Result<(&[u8], &[u8])>| -> Result<()> {
            let (key, value) = record?;
            seen(key, value);
            count += 1;
            Ok(())
        };
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let (database, reading) = (&self.database, &transaction);
        let from = |key| (Bound::Included(key), Bound::Unbounded);
        let back = |key| (Bound::Unbounded, Bound::Included(key));
        match scan {
            Scan::First => database.iter(reading)?.take(limit).try_for_each(&mut show),
            Scan::From(key) => database.range(reading, &from(key))?.take(limit).try_for_each(&mut show),
            Scan::Last => database.rev_iter(reading)?.take(limit).try_for_each(&mut show),
            Scan::Back(key) => database.rev_range(reading, &back(key))?.take(limit).try_for_each(&mut show),
        }?;
        Ok(count)
    }

    fn flush(&self) -> Result<()> {
        Ok(()) // a commit leaves nothing in memory
    }

    fn sync(&self) -> Result<()> {
        Ok(self.env.force_sync()?)
    }

    fn busy(&self) -> Result<bool> {
        Ok(false) // there are no background threads
    }

    fn tables(&self) -> Result<u64> {
        Ok(1) // one file is all there is
    }

    fn partition(&self, name: &str) -> Result<Box<dyn Engine>> {
        open_database(name, self.env.clone())
    }

    fn stats(&self) -> Map<String, Value> {
        let mut stats = Map::new();
        stats.insert("compression".into(), json!("none")); // it has none
        stats.insert("file_bytes".into(), json!(self.env.real_disk_size().ok()));
        if let Some(own) = self.env.read_txn().ok().and_then(|reading| self.database.stat(&reading).ok()) {
            stats.insert("depth".into(), json!(own.depth));
            stats.insert("leaf_pages".into(), json!(own.leaf_pages));
            stats.insert("branch_pages".into(), json!(own.branch_pages));
            stats.insert("overflow_pages".into(), json!(own.overflow_pages));
        }
        stats
    }

    fn close(self: Box<Self>) -> Result<()> {
        if self.env.prepare_for_closing().wait_timeout(CLOSING) {
            return Ok(());
        }
        Err("a partition is still in use".into())
    }
}

//! LMDB, through heed. Each read and each write is a transaction of its own.

#![allow(unsafe_code)]

use crate::engine::{Change, Engine, Options, PARTITION, Records, Scan, Sync, Visit, existing, found, visit};
use crate::error::{Error, Result};
use ::heed::types::Bytes;
use ::heed::{CommitOrAbort, Database, Env, EnvFlags, EnvOpenOptions, PutFlags, RwTxn};
use anyhow::{Context, ensure};
use std::path::Path;
use std::time::Duration;

/// Address space of the map, which bounds the database; nothing is allocated for it.
const MAP_BYTES: usize = 64 << 30;
/// Named databases of one environment; each makes every transaction slower, opened or not.
const DATABASES: u32 = 128;
/// Reader slots: one for each thread that reads.
const READERS: u32 = 1100;
/// Longest time that an environment may take to close.
const CLOSING: Duration = Duration::from_secs(30);

struct HeedEngine {
    database: Database<'static, Bytes, Bytes>,
    env: Env,
}

/// Opens or creates an LMDB environment in `dir`.
pub(crate) fn open(dir: &Path, options: &Options) -> Result<Box<dyn Engine>> {
    let mut opening = EnvOpenOptions::new();
    opening.map_size(MAP_BYTES).max_dbs(DATABASES).max_readers(READERS);
    if options.sync == Sync::None {
        // SAFETY: without syncs a power cut may damage the database, after which no figures are used; the death of the
        // process does not, because the map is read-only and pages are written with `pwrite`.
        unsafe { opening.flags(EnvFlags::NO_SYNC) };
    }
    // SAFETY: the directory belongs to this run; no other process changes the file below the map.
    let env = unsafe { opening.open(dir)? };
    open_database(PARTITION, env)
}

fn open_database(name: &str, env: Env) -> Result<Box<dyn Engine>> {
    let database = env
        .create_databases_and_commit(env.write_txn()?, |opener, transaction| {
            let made = opener.create_database::<Bytes, Bytes>(transaction, Some(name))?;
            Ok::<_, Error>(CommitOrAbort::<_, ()>::Commit(made))
        })?
        .commit()
        .context("the database was not made")?;
    Ok(Box::new(HeedEngine { database, env }))
}

impl HeedEngine {
    /// One write transaction, synced if the environment syncs.
    fn write(&self, act: impl FnOnce(&mut RwTxn<'_>) -> ::heed::Result<()>) -> Result<()> {
        let mut transaction = self.env.write_txn()?;
        act(&mut transaction)?;
        Ok(transaction.commit()?)
    }
}

impl Engine for HeedEngine {
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.write(|transaction| self.database.put(transaction, key, value))
    }

    fn delete(&self, key: &[u8]) -> Result<()> {
        self.write(|transaction| self.database.delete(transaction, key).map(drop))
    }

    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()> {
        self.write(|transaction| records.iter().try_for_each(|(key, value)| self.database.put(transaction, key, value)))
    }

    fn transact(&self, keys: &[Vec<u8>], change: Change<'_>) -> Result<()> {
        let mut transaction = self.env.write_txn()?;
        for (position, key) in keys.iter().enumerate() {
            let value = change(position, existing(self.database.get(&transaction, key)?)?)?;
            self.database.put(&mut transaction, key, &value)?;
        }
        Ok(transaction.commit()?)
    }

    fn ingest(&self, records: Records<'_>) -> Result<()> {
        let mut transaction = self.env.write_txn()?;
        records(&mut |key, value| Ok(self.database.put_with_flags(&mut transaction, PutFlags::APPEND, key, value)?))?;
        Ok(transaction.commit()?)
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let transaction = self.env.read_txn()?;
        Ok(found(self.database.get(&transaction, key)?, seen))
    }

    fn scan(&self, scan: Scan<'_>, seen: Visit<'_>) -> Result<()> {
        let (transaction, bounds) = (self.env.read_txn()?, scan.bounds());
        match scan.ascends {
            true => visit(self.database.range(&transaction, &bounds)?, seen),
            false => visit(self.database.rev_range(&transaction, &bounds)?, seen),
        }
    }

    fn sync(&self) -> Result<()> {
        Ok(self.env.force_sync()?)
    }

    fn partition(&self, name: &str) -> Result<Box<dyn Engine>> {
        open_database(name, self.env.clone())
    }

    fn close(self: Box<Self>) -> Result<()> {
        let closed = self.env.prepare_for_closing().wait_timeout(CLOSING);
        ensure!(closed, "a partition is still in use");
        Ok(())
    }
}

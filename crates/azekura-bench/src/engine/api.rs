//! The trait that every engine implements, the options it is opened with, and helpers for adapters.

use crate::error::{Error, Result};
use crate::measure::device::processors;
use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::ops::Bound;

/// Bytes of a data block before compression.
pub(crate) const BLOCK_BYTES: u32 = 4096;
/// Bits per key of every bloom filter.
pub(crate) const BLOOM_BITS: f32 = 10.0;
/// The partition that workloads use.
pub(crate) const PARTITION: &str = "bench";

/// What a write must survive before it returns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Sync {
    /// The end of the process: the operating system has the write, not synced.
    #[default]
    None,
    /// Power loss: `fdatasync` before each write returns.
    Data,
    /// Power loss, with the file's metadata: `fsync` before each write returns.
    All,
}

/// Compression of the blocks of every level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Compression {
    /// No compression.
    #[default]
    None,
    /// LZ4.
    Lz4,
}

/// The options of one database, the same for every engine of a comparison.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Options {
    /// Block cache of each engine.
    #[arg(long = "cache-size", default_value = "512M", value_parser = bytes)]
    pub(crate) cache_bytes: u64,
    /// Memtable of each engine.
    #[arg(long = "memtable-size", default_value = "64M", value_parser = bytes)]
    pub(crate) memtable_bytes: u64,
    /// Bytes of a data block before compression.
    #[arg(skip = BLOCK_BYTES)]
    pub(crate) block_bytes: u32,
    /// Target bytes of one table; the engine's default when `None`.
    #[arg(skip)]
    pub(crate) table_bytes: Option<u64>,
    /// What a write must survive before it returns.
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) sync: Sync,
    /// Compression of every level.
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) compression: Compression,
    /// Background threads of each engine; as many as processors by default.
    #[arg(long, default_value_t = processors())]
    pub(crate) workers: usize,
    /// Store values of at least this size apart from the tree, in engines that can.
    #[arg(long, value_parser = bytes)]
    pub(crate) separate_from: Option<u64>,
    /// Approximate bytes of keys and values that will be stored; 0 if unknown. For engines that bound their memory.
    #[arg(skip)]
    pub(crate) data_bytes: u64,
}

/// Parses `64`, `4K`, `512MiB`, `1G`: powers of 1024.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let parsed = parse_size::Config::new().with_binary().parse_size(text);
    parsed.map_err(|error| format!("`{text}` is not a size: {error}"))
}

impl Options {
    /// Everything fits the cache, nothing is compressed, separated or synced.
    pub(crate) fn cached(memtable_bytes: u64) -> Options {
        let workers = processors();
        Options { cache_bytes: 1 << 30, memtable_bytes, workers, block_bytes: BLOCK_BYTES, ..Options::default() }
    }
}

/// Where a scan begins and its direction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scan<'a> {
    /// This key, or the next one in the direction of the scan; the first one in that direction if `None`.
    pub(crate) from: Option<&'a [u8]>,
    pub(crate) ascends: bool,
}

impl<'a> Scan<'a> {
    /// The keys that the scan may return.
    pub(crate) fn bounds(self) -> (Bound<&'a [u8]>, Bound<&'a [u8]>) {
        let from = self.from.map_or(Bound::Unbounded, Bound::Included);
        if self.ascends { (from, Bound::Unbounded) } else { (Bound::Unbounded, from) }
    }
}

/// Records of a batch where an engine has no call for sorted data.
const INGEST_BATCH: usize = 1000;

/// Passes all records on to its argument.
pub(crate) type Records<'a> = &'a mut dyn FnMut(&mut dyn FnMut(&[u8], &[u8]) -> Result<()>) -> Result<()>;

/// Returns the new value of the key at a position, from its value.
pub(crate) type Change<'a> = &'a mut dyn FnMut(usize, &[u8]) -> Result<Vec<u8>>;

/// Receives a record and returns whether the scan continues.
pub(crate) type Visit<'a> = &'a mut dyn FnMut(&[u8], &[u8]) -> bool;

/// One partition (keyspace, table, tree) of one open database.
///
/// Reads pass the bytes to a closure: an engine that can lend its memory need not copy, and an engine that copies pays
/// for it itself. All methods may be called by many threads at once.
pub(crate) trait Engine: Send + std::marker::Sync {
    /// Writes one record, as durable as [`Options::sync`] says when this returns.
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()>;

    /// Removes one record, which need not exist, as durable as a put.
    fn delete(&self, key: &[u8]) -> Result<()>;

    /// Writes records as one batch or transaction, as durable as a put.
    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()>;

    /// Changes the values of `keys`, which exist, as one serializable transaction, as durable as a put. Calls `change`
    /// again if the transaction is repeated.
    fn transact(&self, _keys: &[Vec<u8>], _change: Change<'_>) -> Result<()> {
        bail!("no transactions that read and write: the adapter of this engine has none")
    }

    /// Writes the records that `records` passes on, in ascending key order, with the engine's call for sorted data; by
    /// default in batches.
    fn ingest(&self, records: Records<'_>) -> Result<()> {
        let mut batch: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        records(&mut |key, value| {
            batch.push((key.to_vec(), value.to_vec()));
            if batch.len() == INGEST_BATCH {
                self.put_batch(&batch)?;
                batch.clear();
            }
            Ok(())
        })?;
        self.put_batch(&batch)
    }

    /// Looks one key up; passes the value on and returns whether there was one.
    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool>;

    /// Passes records on until `seen` ends the scan or there is no further record.
    fn scan(&self, scan: Scan<'_>, seen: Visit<'_>) -> Result<()>;

    /// Writes everything in memory to tables and waits for it.
    fn flush(&self) -> Result<()> {
        Ok(())
    }

    /// Syncs everything written so far.
    fn sync(&self) -> Result<()> {
        Ok(())
    }

    /// Whether the engine reports that background work is running or waiting. An engine that does not report it is
    /// observed by its CPU time and writes.
    fn busy(&self) -> Result<bool> {
        Ok(false)
    }

    /// Opens or creates another partition of the same database.
    fn partition(&self, name: &str) -> Result<Box<dyn Engine>> {
        bail!("no partitions: partition `{name}` cannot be opened, because a database is one tree")
    }

    /// Figures that only this engine reports.
    fn stats(&self) -> Map<String, Value> {
        Map::new()
    }

    /// Closes the database cleanly, by default by dropping its last handle; its other partitions must have been
    /// dropped.
    fn close(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

/// The value of a key of [`Engine::transact`].
pub(crate) fn existing<V>(value: Option<V>) -> Result<V> {
    value.context("a key of a transaction does not exist")
}

/// Passes a found value on; returns whether there was one.
pub(crate) fn found(value: Option<impl AsRef<[u8]>>, seen: &mut dyn FnMut(&[u8])) -> bool {
    value.inspect(|value| seen(value.as_ref())).is_some()
}

/// Passes the records of an iterator on until `seen` ends the scan.
pub(crate) fn visit<K: AsRef<[u8]>, V: AsRef<[u8]>, E: Into<Error>>(
    mut records: impl Iterator<Item = Result<(K, V), E>>,
    seen: Visit<'_>,
) -> Result<()> {
    let mut more = true;
    while more && let Some(record) = records.next() {
        let (key, value) = record.map_err(Into::into)?;
        more = seen(key.as_ref(), value.as_ref());
    }
    Ok(())
}

/// The members of a JSON object; none of any other value.
pub(crate) fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(object) => object,
        _ => Map::new(),
    }
}

//! The trait every engine under test answers.

use crate::failure::Result;
use serde_json::{Map, Value};

/// Where a scan begins and which way it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scan<'a> {
    /// Ascending, from the first key.
    First,
    /// Ascending, from this key or the next one above it.
    From(&'a [u8]),
    /// Descending, from the last key.
    Last,
    /// Descending, from this key or the next one below it.
    Back(&'a [u8]),
}

/// One partition (keyspace, table, tree) of one open database.
///
/// Reads hand the bytes to a closure, so that an engine that can lend its memory need not copy, and one that copies
/// pays for it itself. All methods may be called from many threads at once.
pub(crate) trait Engine: Send + Sync {
    /// Writes one record, as durable as [`super::Options::sync`] says when this returns.
    fn put(&self, key: &[u8], value: &[u8]) -> Result<()>;

    /// Removes one record, as durable as a put; there need not be one.
    fn delete(&self, key: &[u8]) -> Result<()>;

    /// Writes records, keys and values, as one batch or transaction, as durable as a put.
    fn put_batch(&self, records: &[(Vec<u8>, Vec<u8>)]) -> Result<()>;

    /// Looks one key up; shows the value, and says whether there was one.
    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool>;

    /// Shows up to `limit` records; says how many there were.
    fn scan(&self, scan: Scan<'_>, limit: u64, seen: &mut dyn FnMut(&[u8], &[u8])) -> Result<u64>;

    /// Moves everything that is in memory into tables, and waits for it.
    fn flush(&self) -> Result<()>;

    /// Syncs everything written so far.
    fn sync(&self) -> Result<()>;

    /// Whether the engine itself says that background work is under way or waiting.
    fn busy(&self) -> Result<bool>;

    /// How many tables this partition consists of.
    fn tables(&self) -> Result<u64>;

    /// Opens or creates another partition of the same database.
    fn partition(&self, name: &str) -> Result<Box<dyn Engine>>;

    /// Figures that only this engine has: syncs, cache hits, its own idea of write amplification.
    fn stats(&self) -> Map<String, Value>;

    /// Closes the database cleanly; partitions taken from it must be gone.
    fn close(self: Box<Self>) -> Result<()>;
}

//! What every engine is told, in words that mean the same to all of them.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What a write must survive before it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Sync {
    /// The death of the process: handed to the operating system, not synced.
    None,
    /// Power loss: `fdatasync` before each write returns.
    Data,
    /// Power loss, with the file's metadata: `fsync` before each write returns.
    All,
}

/// How blocks are compressed, on every level alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Compression {
    /// Not at all.
    None,
    /// LZ4.
    Lz4,
}

/// The options of one database, the same for every engine of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Options {
    /// Bytes of block cache.
    pub(crate) cache_bytes: u64,
    /// Bytes of one memtable before it is flushed.
    pub(crate) memtable_bytes: u64,
    /// Target bytes of one table; the engine's own default when `None`.
    pub(crate) table_bytes: Option<u64>,
    /// Durability of each write.
    pub(crate) sync: Sync,
    /// Compression of every level.
    pub(crate) compression: Compression,
    /// Background threads.
    pub(crate) workers: usize,
    /// Values of at least so many bytes are kept apart from the tree, by engines that can; nowhere when `None`.
    pub(crate) separate_from: Option<u64>,
    /// Bytes of the keys and values that there will be, about; 0 if nobody knows. For engines that bound their memory.
    #[serde(default)]
    pub(crate) data_bytes: u64,
}

/// Bytes of a data block before compression.
pub(crate) const BLOCK_BYTES: u32 = 4096;

/// Bits per key of every bloom filter.
pub(crate) const BLOOM_BITS: f32 = 10.0;

/// The partition the workloads run on.
pub(crate) const PARTITION: &str = "bench";

//! azekura is an embeddable key-value storage engine: one crate, one directory on disk, many partitions.
//!
//! ```
//! # fn main() -> azekura::Result<()> {
//! # let dir = tempfile::tempdir().unwrap();
//! # let path = dir.path().join("db");
//! use azekura::{Config, PartitionCreateOptions, PersistMode};
//!
//! let db = Config::new(&path).open()?;
//! let people = db.open_partition("people", PartitionCreateOptions::default())?;
//! people.insert("ada", "mathematician")?;
//!
//! let mut batch = db.batch(); // all or nothing, across partitions
//! batch.insert(&people, "grace", "admiral");
//! batch.remove(&people, "ada");
//! batch.durability(PersistMode::SyncData).commit()?;
//!
//! for pair in people.prefix("g") {
//!     let (name, what) = pair?;
//!     assert_eq!((&*name, &*what), (&b"grace"[..], &b"admiral"[..]));
//! }
//! # Ok(()) }
//! ```
//!
//! The user guide is [`guide`]; it begins with [a first program](guide::first_program).
//!
//! Where to continue: [`Config`] opens a [`Database`]; a [`Database`] has [`Partition`]s, [`Batch`]es and
//! [`Snapshot`]s; [`PersistMode`] states which failures a commit survives; [`Error`] states what to do.
//! `ARCHITECTURE.md` in the repository describes the layers, `DURABILITY.md` the guarantees, `docs/format/` the
//! files.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub use base::comparator::Comparator;
pub use base::compression::CompressionType;
pub use base::error::{Error, ErrorKind, Result};
pub use base::event::{DroppedAfterDamage, Event, Listener};
pub use base::merge_operator::{AssociativeMerge, MergeOperator};
pub use db::batch::Batch;
pub use db::blob_gc::{GarbageCollection, GarbageCollection as Gc, GcReport};
pub use db::components::PartitionComponents;
#[doc(hidden)]
#[cfg(any(test, feature = "testing"))]
pub use db::config::PlantedBug;
pub use db::config::{Config, PersistMode, Settings};
pub use db::database::Database;
pub use db::ingest::{BulkOptions, Ingest};
pub use db::iter::entry::Entry;
pub use db::iter::iterators::{Entries, Iter, Keys, Values};
pub use db::metrics::{BlockKindMetrics, CacheMetrics, Metrics, PartitionMetrics, PoolMetrics};
pub use db::options::{CompactionStrategy, EngineType, PartitionCreateOptions};
pub use db::partition::Partition;
pub use db::snapshot::Snapshot;
pub use db::transaction::transaction::{Savepoint, Transaction};
pub use db::transaction::transaction_options::{Isolation, TransactionOptions};
pub use db::transaction::untracked_reads::UntrackedReads;
pub use lsm::blob_map::BlobFileMetrics;
pub use lsm::compaction_filter::{CompactionFilter, FilterContext, FilterDecision, FilterValue};
pub use lsm::metrics::LevelMetrics;
pub use lsm::options::{KvSeparationOptions, LeveledOptions};
pub use mem::slice::Slice;
pub use pmem::options::PmemOptions;
pub use table::options::{DataBlockIndexType, FilterPolicy};
pub use table::prefix::PrefixExtractor;
pub use vfs::fs::PersistenceLevel;
pub use vfs::open_files::DirectIo;
pub use wal::RecoveryMode;

pub(crate) mod base;
pub(crate) mod blob;
pub(crate) mod block;
pub(crate) mod db;
pub(crate) mod engine;
pub mod guide;
pub mod inspect;
pub(crate) mod iter;
pub(crate) mod lsm;
pub(crate) mod manifest;
pub(crate) mod mem;
pub(crate) mod memtable;
pub(crate) mod pmem;
pub(crate) mod record_log;
pub(crate) mod table;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub(crate) mod vfs;
pub(crate) mod wal;

/// The interface to the operating system, and its implementation. A program may give a [`Config`] its own.
///
/// - [`DiskFs`](fs::DiskFs) implements [`Fs`](fs::Fs) with the file system of the operating system.
/// - [`SystemEnv`](fs::SystemEnv) implements [`Env`](fs::Env) with its clocks, random numbers and threads.
///
/// Implementations for tests are in `testing`, behind the feature of that name.
pub mod fs {
    pub use crate::base::mapped_memory::MappedMemory;
    pub use crate::vfs::disk::DiskFs;
    pub use crate::vfs::env::{Env, SystemEnv, Thread};
    pub use crate::vfs::fs::{DirEntry, File, FileLock, Fs, LockMode, Mapping, OpenMode};
    pub use crate::vfs::lock_holder::{LockHolder, lock_holders};
}

/// The merge operators of this crate: counters, appended values, the greatest value, and sets. [`Database::partition`]
/// opens a partition with one of them by its stored name.
pub mod merge_operators {
    pub use crate::base::merge_operator::{append, decode_set, encode_set, i64_add, max, set_union, u64_add};
}

/// The program of the README, compiled and run with the tests. The published package does not contain the README of the
/// workspace, and its tests run without the feature `testing`.
#[cfg(all(doctest, feature = "testing"))]
#[doc = include_str!("../../../README.md")]
pub struct Readme;

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
//! # Where to continue
//!
//! - The user guide is [`guide`]; it begins with [a first program](guide::first_program).
//! - [`Config`] opens a [`Database`]; a [`Database`] has [`Partition`]s, [`Batch`]es, [`Snapshot`]s and
//!   [`Transaction`]s; [`PersistMode`] states which failures a commit survives; [`Error::kind`] says what to do.
//! - [README], [DURABILITY.md] (each guarantee, and what is not covered), [ARCHITECTURE.md] (layers and flows),
//!   [features of comparable engines].
//!
//! # Features
//!
//! - Partitions of two engines: LSM trees for data larger than memory, and [pools](EngineType::Pmem), B+ trees in
//!   memory. One write-ahead log, one order of commits, batches and snapshots over all of them.
//! - [Transactions](Database::transact) at serializable or snapshot isolation, [conditional batches](Batch::expect),
//!   [`compare_and_swap`](Partition::compare_and_swap), [merge operators](merge_operators).
//! - Iterators in both directions that own what they read; [range deletes](Partition::remove_range);
//!   [records that expire](Partition::insert_with_ttl); [bulk loads](Partition::ingest).
//! - [Key-value separation](KvSeparationOptions) with [garbage collection](GarbageCollection); compression per level;
//!   [comparators](Comparator), [compaction filters](CompactionFilter), [prefix filters](PrefixExtractor).
//! - [Followers](Config::open_follower) in other processes, and a [change feed](Database::changes_since).
//! - [Checkpoints](Database::checkpoint), [verification](inspect::verify), [metrics](Metrics), [events](Listener), and
//!   the command `azekura` in the crate azekura-cli.
//!
//! # Limits
//!
//! | | |
//! |---|---|
//! | key | 0 to 65,535 bytes |
//! | value | 4 GiB - 1 byte with key-value separation; otherwise half of the memory budget (256 MiB by default) |
//! | batch | half of the memory budget, without values of 4 KiB or more in blob files (1 MiB if it is synced) |
//! | transaction | half of the memory budget for reads and for the memory of writes; see [`Transaction`] |
//! | name of a partition | 1 to 255 bytes of UTF-8 |
//! | pool | [`PmemOptions::max_size`], 1 GiB by default, 8 TiB at most |
//! | processes | one that writes, with any number of [followers](guide::followers), or many that read |
//!
//! Memory: [`Config::memory_budget`] (512 MiB by default) bounds the memtables, [`Config::cache_size`] (64 MiB) the
//! block cache, and `max_size` the records of each pool. No bound covers their sum. Memtables that iterators hold, top
//! levels of indexes and filters, inner nodes of pools, and buffers are not bounded; [operating](guide::operating)
//! lists all memory.
//!
//! # What is not there
//!
//! Encryption, an asynchronous interface, compaction strategies other than leveled, more than one compaction of a
//! partition at a time, a budget for all memory, and interfaces for other languages. The crate azekura-backup has
//! backups to object stores, the crates azekura-raft and azekura-node have replication.
//!
//! # Feature flags
//!
//! None is on by default.
//!
//! - `bytes`: `From<Slice> for bytes::Bytes`.
//! - `serde`: `Serialize` and `Deserialize` of options, settings and metrics.
//! - `testing`: simulated file systems with crashes and faults. For tests only, because it can plant bugs.
//!
//! # Platforms
//!
//! Rust 1.90 or newer; no C compiler. Linux on x86-64 runs all tests. Linux on aarch64, macOS, Windows and FreeBSD are
//! compiled and not tested. Mapped files and direct I/O are used on Linux only. Version 0.1.0 is the first one: see
//! [stability](guide::stability) for formats and upgrades.
//!
//! [README]: https://github.com/azekura/azekura/blob/main/README.md
//! [DURABILITY.md]: https://github.com/azekura/azekura/blob/main/DURABILITY.md
//! [ARCHITECTURE.md]: https://github.com/azekura/azekura/blob/main/ARCHITECTURE.md
//! [features of comparable engines]: https://github.com/azekura/azekura/blob/main/docs/comparison.md

#![cfg_attr(docsrs, feature(doc_cfg))]

pub use base::comparator::Comparator;
pub use base::compression::CompressionType;
pub use base::error::{Error, ErrorKind, Result};
pub use base::event::{DroppedAfterDamage, Event, Listener};
pub use base::merge_operator::{AssociativeMerge, MergeOperator};
pub use db::batch::Batch;
pub use db::blob_gc::{GarbageCollection, GarbageCollection as Gc, GcReport};
pub use db::changes::change_position::ChangePosition;
pub use db::changes::changes::Changes;
pub use db::changes::committed_batch::{Change, ChangedValue, CommittedBatch, Operation};
pub use db::components::PartitionComponents;
#[doc(hidden)]
#[cfg(any(test, feature = "testing"))]
pub use db::config::PlantedBug;
pub use db::config::{Config, PersistMode, Settings};
pub use db::database::Database;
pub use db::ingest::{BulkOptions, Ingest};
pub use db::iter::entry::Entry;
pub use db::iter::iterators::{Entries, Iter, Keys, Values};
pub use db::metrics::{BlockKindMetrics, CacheMetrics, ChangeReaderMetrics, Metrics, PartitionMetrics};
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
pub use manifest::FollowedFiles;
pub use mem::slice::Slice;
pub use pmem::options::PmemOptions;
pub use pmem::pool::metrics::PoolMetrics;
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
pub(crate) mod tree;
pub(crate) mod vfs;
pub(crate) mod wal;

/// The interface to the operating system, and its implementation. A program may give a [`Config`] its own.
///
/// - [`DiskFs`](fs::DiskFs) implements [`Fs`](fs::Fs) with the file system of the operating system.
/// - [`SystemEnv`](fs::SystemEnv) implements [`Env`](fs::Env) with its clocks, random numbers and threads.
///
/// Implementations for tests are in `testing`, behind the feature of that name.
pub mod fs {
    pub use crate::base::mapped_memory::{MappedBytes, MappedMemory};
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

//! The database: everything that spans partitions. It has one WAL, one manifest, one commit order and one snapshot
//! list.
//!
//! Invariants:
//! - A commit is appended to the WAL before it is applied to memory, is applied before it is visible, and becomes
//!   visible as a whole. A single write to a mapped pool is not appended to the WAL.
//! - The manifest state changes only by version edits that are in the manifest. An edit that makes records permanent is
//!   written only after the WAL is durable through these records.
//! - No thread holds a lock that a reader needs during a sync or a read from disk.
//! - A failed sync or a panic poisons the database: reads continue, writes fail, and no sync is retried.
//!
//! Modules, in reading order: [`database`], [`partition`], [`config`], [`options`], [`partition_options`] (of an
//! existing partition), [`components`], [`batch`], [`range_delete`], [`atomics`] (single-key operations), [`snapshot`],
//! [`iter`], [`transaction`], [`writes`] (before their commit), [`expiring_write`], [`commit`] (group commit),
//! [`inner`], [`limits`] (of memory, disk space and the WAL), [`catalog`], [`partition_state`],
//! [`partition_merge_operator`], [`state`] (parts of the database's state), [`recovery`], [`worker`], [`ingest`],
//! [`blob_gc`] (blob GC on request), [`changes`] (the change feed), [`follower`], [`catch_up`] and [`commit_reader`]
//! (beside a writer), [`checkpoint`], [`handle`] (closing, exclusive turns), [`metrics`].

pub(crate) mod atomics;
pub(crate) mod batch;
pub(crate) mod blob_gc;
pub(crate) mod catalog;
pub(crate) mod catch_up;
pub(crate) mod changes;
pub(crate) mod checkpoint;
pub(crate) mod commit;
pub(crate) mod commit_reader;
pub(crate) mod components;
pub(crate) mod config;
pub(crate) mod database;
pub(crate) mod expiring_write;
pub(crate) mod follower;
pub(crate) mod handle;
pub(crate) mod ingest;
pub(crate) mod inner;
pub(crate) mod iter;
pub(crate) mod limits;
pub(crate) mod metrics;
pub(crate) mod options;
pub(crate) mod partition;
pub(crate) mod partition_merge_operator;
pub(crate) mod partition_options;
pub(crate) mod partition_state;
pub(crate) mod range_delete;
pub(crate) mod recovery;
pub(crate) mod snapshot;
pub(crate) mod state;
pub(crate) mod transaction;
pub(crate) mod worker;
pub(crate) mod writes;

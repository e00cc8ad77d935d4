//! Floor 5: what spans partitions — one log, one manifest, one order of commits, one set of readers.
//!
//! Invariants:
//! - a commit is in the log before it is in memory, in memory before it is visible, and visible whole;
//! - the ledger changes only by edits that are in the manifest; an edit that makes records permanent is written only
//!   after the log is durable through them;
//! - nobody holds a lock that a reader needs across a sync or a read from disk;
//! - after a failed sync or a panic the database is poisoned: reads go on, writes fail, nothing is retried.
//!
//! Rooms in reading order: [`database`], [`partition`], [`config`], [`options`], [`batch`], [`commit`] (group commit),
//! [`snapshot`], [`iter`], [`inner`], [`catalog`], [`spill`], [`state`] (values), [`recovery`], [`worker`], [`blob_gc`]
//! (blob files), [`checkpoint`], [`handle`] (closing), [`metrics`].

pub(crate) mod batch;
pub(crate) mod blob_gc;
pub(crate) mod catalog;
pub(crate) mod checkpoint;
pub(crate) mod commit;
pub(crate) mod config;
pub(crate) mod database;
pub(crate) mod handle;
pub(crate) mod inner;
pub(crate) mod iter;
pub(crate) mod metrics;
pub(crate) mod options;
pub(crate) mod partition;
pub(crate) mod recovery;
pub(crate) mod snapshot;
pub(crate) mod spill;
pub(crate) mod state;
pub(crate) mod worker;

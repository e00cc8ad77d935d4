//! The LSM engine: data larger than memory, in sorted tables on levels.
//!
//! Writes go to a memtable. Sealed memtables are flushed to runs on level 0. Compactions merge runs into lower
//! levels.
//!
//! Invariants:
//! - For one key, the versions in a newer memtable, in a newer run or on a shallower level are newer.
//! - All versions of a user key in one run are in one table.
//! - A reader takes one super version and never waits. Everything in it can be read until the reader drops it.
//! - A file is durable before a version edit names it. The edit is durable before a version names the file. A file
//!   becomes obsolete only when no edit and no version names it, and only [obsolete
//!   files](crate::table::obsolete_files) are removed.
//! - A task that fails leaves the tree unchanged and can be repeated.
//!
//! Modules, lowest first: [`options`], [`task_lock`], [`blob`] (key-value separation), [`version`], [`table_handle`],
//! [`pending_outputs`], [`super_version`], [`read`], [`table_output`], [`compaction_iter`], [`blob_gc`],
//! [`compaction`], [`metrics`], [`tree`]; the operations on a tree: [`flush`], [`compact`], [`run_blob_gc`],
//! [`direct_write`], [`blob_resolver`]; and [`engine`], which `db` calls.

pub(crate) mod blob;
pub(crate) mod blob_gc;
pub(crate) mod blob_resolver;
pub(crate) mod compact;
pub(crate) mod compaction;
pub(crate) mod compaction_iter;
pub(crate) mod direct_write;
pub(crate) mod engine;
pub(crate) mod flush;
pub(crate) mod metrics;
pub(crate) mod options;
pub(crate) mod pending_outputs;
pub(crate) mod read;
pub(crate) mod run_blob_gc;
pub(crate) mod super_version;
pub(crate) mod table_handle;
pub(crate) mod table_output;
pub(crate) mod task_lock;
#[cfg(test)]
mod tests;
pub(crate) mod tree;
pub(crate) mod version;

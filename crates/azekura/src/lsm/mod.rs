//! The LSM wing: data larger than memory, in sorted tables on levels.
//!
//! Writes go to a memtable; sealed memtables are flushed to runs on level 0; compaction merges runs downwards until one
//! run holds everything.
//!
//! Invariants:
//! - for one key, everything in a newer memtable, a newer run or on a shallower level is newer;
//! - all versions of a user key in one run are in one table;
//! - readers take one super version and never wait; whatever they took stays readable until they let go;
//! - files are durable before an edit names them, the edit is durable before a version names them, and a file goes to
//!   the graveyard only when neither does any more; nothing else removes files;
//! - a task that fails leaves the tree as it was, and can be tried again.
//!
//! Rooms in reading order: [`tree`], [`options`], [`super_version`], [`version`], [`handle`], [`blobs`] (key-value
//! separation), [`read`], [`retain`], [`older`], [`written`], [`output`], [`rewrite`], [`flush`], [`compaction`],
//! [`collect`] (blob files), [`engine`], [`metrics`], [`slot`].

pub(crate) mod blobs;
pub(crate) mod collect;
pub(crate) mod compaction;
pub(crate) mod engine;
pub(crate) mod flush;
pub(crate) mod handle;
pub(crate) mod metrics;
pub(crate) mod older;
pub(crate) mod options;
pub(crate) mod output;
pub(crate) mod read;
pub(crate) mod retain;
pub(crate) mod rewrite;
pub(crate) mod slot;
pub(crate) mod super_version;
#[cfg(test)]
mod tests;
pub(crate) mod tree;
pub(crate) mod version;
pub(crate) mod written;

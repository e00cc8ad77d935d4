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
//! Rooms in reading order: [`tree`], [`options`], [`super_version`], [`version`], [`table_handle`], [`blob`] (key-value
//! separation), [`read`], [`retain`], [`older`], [`pending_outputs`], [`table_output`], [`compaction_iter`], [`flush`],
//! [`compaction`], [`blob_gc`] (blob files), [`engine`], [`metrics`], [`task_lock`].

pub(crate) mod blob;
pub(crate) mod blob_gc;
pub(crate) mod compaction;
pub(crate) mod compaction_iter;
pub(crate) mod engine;
pub(crate) mod flush;
pub(crate) mod metrics;
pub(crate) mod older;
pub(crate) mod options;
pub(crate) mod pending_outputs;
pub(crate) mod read;
pub(crate) mod retain;
pub(crate) mod super_version;
pub(crate) mod table_handle;
pub(crate) mod table_output;
pub(crate) mod task_lock;
#[cfg(test)]
mod tests;
pub(crate) mod tree;
pub(crate) mod version;

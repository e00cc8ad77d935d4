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
//! - A version contains every logical file that its tables point to, in exactly one blob file. The referenced bytes of
//!   a logical file equal the sum over the tables of the version. The edit that removes the last reference to a blob
//!   file removes the file.
//! - A tree runs one compaction or one blob GC at a time. Flushes run concurrently: they only add newer runs to level
//!   0, and new logical files.
//! - A picked compaction is a function of plain values and is always valid, whether or not it is useful.
//! - A task that fails leaves the tree unchanged and can be repeated.
//!
//! Modules, lowest first: [`options`], [`blob_map`] (handles and references of blob files), [`direct_file`] (blob files
//! that no edit names yet), [`version`], [`tree_context`], [`older_ranges`] (what scans know of tables),
//! [`table_handle`], [`output`] (the files that tasks write),
//! [`read`], [`changes`] (for the validation of transactions), [`merged_values`], [`compaction_filter`],
//! [`compaction_iter`],
//! [`direct_write`], [`blob_gc`], [`compaction_picker`], [`compaction_job`], [`tree`] (also the engine interface, which
//! `db` calls), [`metrics`]; the operations on a tree: [`multi_get`], [`flush`], [`ingest`], [`external_sort`] with its
//! [`entry_buffer`], [`compact`], [`range_delete`] (also tables in which all has expired), [`run_blob_gc`],
//! [`follow`] (in a follower).

pub(crate) mod blob_gc;
pub(crate) mod blob_map;
pub(crate) mod changes;
pub(crate) mod compact;
pub(crate) mod compaction_filter;
pub(crate) mod compaction_iter;
pub(crate) mod compaction_job;
pub(crate) mod compaction_picker;
pub(crate) mod direct_file;
pub(crate) mod direct_write;
pub(crate) mod entry_buffer;
pub(crate) mod external_sort;
pub(crate) mod flush;
pub(crate) mod follow;
pub(crate) mod ingest;
pub(crate) mod merged_values;
pub(crate) mod metrics;
pub(crate) mod multi_get;
pub(crate) mod older_ranges;
pub(crate) mod options;
pub(crate) mod output;
pub(crate) mod range_delete;
pub(crate) mod read;
pub(crate) mod run_blob_gc;
pub(crate) mod table_handle;
#[cfg(test)]
mod tests;
pub(crate) mod tree;
pub(crate) mod tree_context;
pub(crate) mod version;

//! Blob GC: copies live values out of stale blob files, so that these files can be removed.
//!
//! Blob GC changes no table and does not write to the WAL. It changes only the map from logical files to blob files,
//! by one version edit.
//!
//! Invariants:
//! - A value that a table of the current version refers to is copied, whether or not a reader can see it. Only
//!   compactions decide which values are referenced.
//! - Blob GC and compactions of a tree exclude each other, so references are only removed meanwhile. Flushes run
//!   concurrently and add new logical files only.
//! - The edit that names the new files removes the old ones, which stay on disk as long as a reader uses them.
//!
//! Modules, in reading order: [`picker`] (chooses files: a pure function), [`scan`] (measures staleness), [`job`]
//! (copies values).

pub(crate) mod job;
pub(crate) mod picker;
pub(crate) mod scan;

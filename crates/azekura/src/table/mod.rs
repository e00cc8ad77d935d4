//! Tables: immutable sorted files of entries, with two-level index and filter.
//!
//! Invariants:
//! - A table is written once, sequentially, and never changed. An empty table is never written.
//! - Opening reads the header, the footer, the metaindex, the properties, and the top levels of index and filter,
//!   mostly in two reads. Everything else is read on demand.
//! - A lookup returns verified data or an error. A filter that cannot be read counts as "may match".
//! - Reading arbitrary bytes ends, and uses memory bounded by the size of the file.
//! - Background work, or a call that changes the database, removes files. A reader never does, and no file is removed
//!   after the database is closed.
//!
//! Layout: `docs/format/table.md`. Modules, in reading order: [`options`], [`prefix`], [`format`](mod@format) (footer,
//! metaindex, properties); writing: [`index`], [`filter`], [`writer`]; reading: [`block_fetcher`], [`filter_usage`],
//! [`reader`], [`multi_get`], [`iter`], [`verify`]; removal: [`obsolete_files`].

pub(crate) mod block_fetcher;
pub(crate) mod filter;
pub(crate) mod filter_usage;
pub(crate) mod format;
pub(crate) mod index;
pub(crate) mod iter;
pub(crate) mod multi_get;
pub(crate) mod obsolete_files;
pub(crate) mod options;
pub(crate) mod prefix;
pub(crate) mod reader;
pub(crate) mod verify;
pub(crate) mod writer;

#[cfg(test)]
mod tests;

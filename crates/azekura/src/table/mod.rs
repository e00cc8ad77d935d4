//! Tables: immutable sorted files of entries, with two-level index and filter.
//!
//! Invariants:
//! - A table is written once, from front to back, and never changed. An empty one is never written.
//! - Opening reads the header and the footer only. Everything else is read on demand.
//! - A lookup returns verified data or an error. A filter that cannot be read counts as "may match".
//! - Reading ends for any bytes in the file, in memory bounded by the file's size.
//! - Files are removed by background work or by a call that changes the database, never by a reader, and never after
//!   the database is closed.
//!
//! Layout: `docs/format/table.md`. Modules, in reading order: [`options`], [`format`](mod@format) (footer, metaindex,
//! properties); writing: [`index`], [`filter`], [`writer`]; reading: [`block_fetcher`], [`reader`], [`iter`],
//! [`verify`]; removal: [`obsolete_files`].

pub(crate) mod block_fetcher;
pub(crate) mod filter;
pub(crate) mod format;
pub(crate) mod index;
pub(crate) mod iter;
pub(crate) mod obsolete_files;
pub(crate) mod options;
pub(crate) mod reader;
pub(crate) mod verify;
pub(crate) mod writer;

#[cfg(test)]
mod measure;
#[cfg(test)]
mod tests;

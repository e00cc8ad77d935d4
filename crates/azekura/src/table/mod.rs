//! Tables: immutable sorted files of entries, with index and filter on two levels.
//!
//! Invariants:
//! - a table is written once, front to back, and never changed; an empty one is never written;
//! - opening reads the header and the end, nothing else; everything else is read when it is asked for;
//! - a lookup answers from data that verified, or fails; a filter that cannot be read says "may match";
//! - whatever bytes the file has, reading ends, in memory bounded by the file's size;
//! - files are removed by who works for the database, never by a reader, and never after it is closed.
//!
//! Layout: `docs/format/table.md`. Rooms in reading order: [`options`], [`format`](mod@format), [`properties`];
//! writing: [`index`], [`filter`], [`writer`]; reading: [`block_fetcher`], [`reader`], [`iter`], [`verify`]; the end:
//! [`obsolete_files`].

pub(crate) mod block_fetcher;
pub(crate) mod filter;
pub(crate) mod format;
pub(crate) mod index;
pub(crate) mod iter;
pub(crate) mod obsolete_files;
pub(crate) mod options;
pub(crate) mod properties;
pub(crate) mod reader;
pub(crate) mod verify;
pub(crate) mod writer;

#[cfg(test)]
mod measure;
#[cfg(test)]
mod tests;

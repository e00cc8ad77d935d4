//! Blob files: large values, kept out of the tables so that compaction does not carry them.
//!
//! Invariants:
//! - a blob file is written once, front to back, and never changed; an empty one is never written;
//! - what stands in it already may be read while the rest is written, by pointers alone;
//! - a value is named by its *logical* file and its ordinal there for as long as it lives; the *physical* file that it
//!   lies in may change, and holds a section for each logical file whose values it has;
//! - a value verifies before it is handed out: its frame's checksum, its length, the section that names it;
//! - whatever bytes the file has, reading ends, in memory bounded by the file's size.
//!
//! Layout: `docs/format/blob.md`. Rooms in reading order: [`format`](mod@format) (directory, sections, pages),
//! [`writer`], [`direct_writer`] (values that are pointed to before the file is finished), [`reader`], [`verify`],
//! [`live_blobs`] (which values are referenced), [`unfinished`] (files that were never finished).

pub(crate) mod direct_writer;
pub(crate) mod format;
pub(crate) mod live_blobs;
pub(crate) mod reader;
#[cfg(test)]
mod tests;
pub(crate) mod unfinished;
pub(crate) mod verify;
pub(crate) mod writer;

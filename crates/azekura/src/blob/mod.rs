//! Blob files: large values that are stored outside of tables, so that compactions do not copy them.
//!
//! Invariants:
//! - A blob file is written once, from front to back, and never changed. An empty one is never written.
//! - Values in it can be read by pointers while the rest is written.
//! - A value is named by its *logical* file and its ordinal there, as long as it exists. The *physical* file that
//!   contains it may change; it has a section for each logical file whose values it contains.
//! - A value is verified before it is returned: the checksum of its frame, its length, and the section that names it.
//! - Reading ends for any bytes in the file, in memory bounded by the file's size.
//!
//! Layout: `docs/format/blob.md`. Modules, in reading order: [`format`](mod@format) (directory, sections, pages),
//! [`writer`] (also of direct blob writes), [`reader`] (also verification), [`unfinished`] (files that were never
//! finished).

pub(crate) mod format;
pub(crate) mod reader;
#[cfg(test)]
mod tests;
pub(crate) mod unfinished;
pub(crate) mod writer;

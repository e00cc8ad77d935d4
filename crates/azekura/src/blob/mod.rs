//! Blob files: large values that are stored outside of tables, so that compactions do not copy them.
//!
//! Invariants:
//! - A blob file is written once, sequentially, and never changed. An empty blob file is never written.
//! - Values can be read through pointers while the rest of the file is written.
//! - A value is identified by its *logical* file and its ordinal there, which never change. The *physical* file that
//!   contains the value may change. A physical file has a section for each logical file whose values it contains.
//! - A value is verified before it is returned: the checksum of its frame, its length, and the section that names it.
//! - Reading arbitrary bytes ends, and uses memory bounded by the size of the file.
//!
//! Layout: `docs/format/blob.md`. Modules, in reading order: [`format`](mod@format) (metaindex, sections, pages),
//! [`writer`] (also of direct blob writes), [`reader`] (also verification), [`unfinished`] (files that were never
//! finished).

pub(crate) mod format;
pub(crate) mod reader;
#[cfg(test)]
mod tests;
pub(crate) mod unfinished;
pub(crate) mod writer;

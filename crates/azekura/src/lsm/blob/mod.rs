//! Key-value separation: large values are stored in blob files, and tables contain pointers to them.
//!
//! A flush writes large values to blob files. Values of the direct-write threshold (1 MiB) and more are written before
//! their commit. Compactions copy the pointers. The version edit that removes the last reference to a blob file removes
//! the file.
//!
//! Invariants:
//! - A blob file is durable before an edit names it, and an edit names it no later than the first table that points
//!   into it.
//! - A version contains every logical file that its tables point to, in exactly one blob file.
//! - The referenced bytes of a logical file equal the sum over the tables of the version.
//!
//! Modules, in reading order: [`options`], [`handle`], [`map`], [`direct_file`] (blob files that no edit names yet).

pub(crate) mod direct_file;
pub(crate) mod handle;
pub(crate) mod map;
pub(crate) mod options;

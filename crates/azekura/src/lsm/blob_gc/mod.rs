//! Garbage collection of blob files: live values are copied together, and what was stale goes with the old files.
//!
//! No table is touched, and nothing is read or written by way of the log: only the map from logical files to the files
//! that hold them changes, in one edit.
//!
//! Invariants:
//! - what a table of the current version refers to is copied, whether or not anybody can see it; compaction alone
//!   decides what is referenced;
//! - collections and compactions take turns, so that references do not move meanwhile, only go; flushes go on beside,
//!   and bring new logical files only;
//! - old files go with the edit that names the new ones, and stay on disk for as long as a reader holds them.
//!
//! Rooms in reading order: [`picker`] (which files: a pure function), [`scan`] (how stale they are), [`job`] (copying),
//! [`run`] (carrying it out).

pub(crate) mod job;
pub(crate) mod picker;
pub(crate) mod run;
pub(crate) mod scan;

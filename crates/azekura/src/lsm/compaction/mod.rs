//! Compaction: merges tables into lower levels. The choice is a pure function.
//!
//! Invariants:
//! - A picked compaction is a function of plain values and is always valid, whether or not it is useful.
//! - A tree runs one compaction at a time. Flushes run concurrently and only add newer runs to level 0.
//! - A compaction may pause between two steps, and the next task resumes it.
//!
//! Modules, in reading order: [`picker`] (the shape of a tree and the compactions that it permits), [`strategy`]
//! (which one to run), [`leveled`] (size limits of levels), [`job`] (a compaction in progress).

pub(crate) mod job;
pub(crate) mod leveled;
pub(crate) mod picker;
pub(crate) mod strategy;

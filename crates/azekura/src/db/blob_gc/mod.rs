//! Blob GC on request of a caller.
//!
//! Modules, in reading order: [`report`] (stale bytes), [`calls`] (the public trait), [`drive`] (scans, plans and
//! runs blob GC until the target is reached).

pub(crate) mod calls;
pub(crate) mod drive;
pub(crate) mod report;

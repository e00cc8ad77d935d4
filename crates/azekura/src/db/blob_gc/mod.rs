//! Garbage collection of blob files as a caller asks for it.
//!
//! Rooms in reading order: [`report`] (what is stale), [`calls`] (the public trait), [`drive`] (scan, plan, act, until
//! it is reached).

pub(crate) mod calls;
pub(crate) mod drive;
pub(crate) mod report;

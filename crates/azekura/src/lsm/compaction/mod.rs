//! Merging tables downwards: choosing is pure, acting is dumb.
//!
//! Invariants:
//! - a plan is a function of plain values; what it says is always allowed, whether or not it is wise;
//! - one compaction of a tree at a time; flushes go on beside it, which only adds newer runs to level 0;
//! - a merge may pause between two steps and is taken up by the next task.
//!
//! Rooms in reading order: [`plan`] and [`picker`] (the values), [`strategy`] (what to do), [`leveled`] (how large
//! levels may be), [`job`] (a merge), [`remembered`] (from task to task), [`run`] (carrying a plan out).

pub(crate) mod job;
pub(crate) mod leveled;
pub(crate) mod picker;
pub(crate) mod plan;
pub(crate) mod remembered;
pub(crate) mod run;
pub(crate) mod strategy;

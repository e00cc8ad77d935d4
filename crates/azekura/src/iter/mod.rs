//! Iteration over entries in internal order, from one source and merged.
//!
//! Invariants:
//! - An iterator shows one point in time: an entry that is written later may or may not appear, and an entry that
//!   existed appears once.
//! - The borrow of an entry ends at the next step. Nothing is copied until the public iterator returns it.
//! - After an error the iterator is not valid; seeking again is allowed.
//!
//! Modules, in reading order: [`iter`] (the interface), [`merge`] (a k-way merge), [`visible`] (the newest version at
//! a sequence number), [`changes`] (keys that are newer than a sequence number), [`range_tombstones`] (a set of range
//! deletes), [`range_filter`] (hides the entries that they cover), [`dead_ranges`] (ranges of deleted keys that
//! scans have passed).

pub(crate) mod changes;
pub(crate) mod dead_ranges;
#[expect(clippy::module_inception, reason = "one noun, one file: the folder has the kinds of iterator")]
pub(crate) mod iter;
pub(crate) mod merge;
pub(crate) mod range_filter;
pub(crate) mod range_tombstones;
pub(crate) mod visible;

pub(crate) use iter::InternalIter;

//! Key-value separation: large values stand in blob files, and tables have pointers to them.
//!
//! Values leave the tree when a memtable is flushed, very large ones before their commit; compactions carry pointers
//! over. A blob file goes with the edit that takes its last reference away.
//!
//! Invariants:
//! - a blob file is durable before an edit names it, and an edit names it no later than the first table that points
//!   into it;
//! - a version has every logical file that its tables point to, in exactly one blob file;
//! - what is referenced of a logical file is, exactly, the sum of what the tables of the version say.
//!
//! Rooms in reading order: [`options`], [`handle`], [`map`], [`separator`] (writing), [`direct_file`] (files that no
//! edit names yet), [`unsynced`] (making them durable), [`direct_write`] (values that are written ahead of their
//! commit), [`carry`], [`left`] (what an earlier life has left), [`resolver`] (reading).

pub(crate) mod carry;
pub(crate) mod direct_file;
pub(crate) mod direct_write;
pub(crate) mod handle;
pub(crate) mod left;
pub(crate) mod map;
pub(crate) mod options;
pub(crate) mod resolver;
pub(crate) mod separator;
pub(crate) mod unsynced;

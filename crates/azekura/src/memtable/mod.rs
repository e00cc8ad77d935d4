//! Recent writes in memory: records in an arena, with an ordered index and a hash index.
//!
//! A record is stored once; both indexes contain 32-bit references to it. One thread writes at a time. Readers never
//! wait: version counters validate their reads. A reader that finds a node in the middle of a change, whose writer
//! may not be running, reads the node by a slower path that is correct at every step of the change.
//!
//! Invariants:
//! - A reference is stored in an index only after its record was published. The ordered index never removes a
//!   reference: a split moves entries only to a new right sibling, which the left leaf then points to. The hash index
//!   contains the reference of each key's newest record only.
//! - Entries are in internal order. The versions of a key are also chained from the newest to the oldest.
//! - An iterator returns every entry that was inserted before the iterator was created exactly once.
//!
//! Modules, in reading order: [`memtable`] (also its iterator), [`record`] (the bytes of a record), [`node`] (of the B+
//! tree), [`tree`] (the ordered index), [`hash_index`], [`recent_records`] (the last ones, for validation).
#![deny(unsafe_code)]

pub(crate) mod hash_index;
#[expect(clippy::module_inception, reason = "the folder is named after its main module")]
pub(crate) mod memtable;
#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests race scoped threads, which vfs does not provide")]
mod model_tests;
pub(crate) mod node;
pub(crate) mod recent_records;
pub(crate) mod record;
#[cfg(test)]
mod schedules;
pub(crate) mod tree;

pub(crate) use memtable::Memtable;

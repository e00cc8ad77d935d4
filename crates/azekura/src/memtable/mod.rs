//! What was written last, in memory: records in an arena, under an ordered index and a hash index.
//!
//! A record is stored once; both indexes hold 32-bit references to it. One writer at a time; readers never wait: what
//! they read is checked by version counters, and a reader that meets a writer in the middle of a change (which may have
//! been put to sleep there) reads the half-changed node in a slower way that is right at every step of the change.
//!
//! Invariants:
//! - a reference is stored in an index only after its record was published, and is never taken out again: there is
//!   nothing but inserting, so a node's entries only move to the right, to a node that the left one points at;
//! - entries stand in internal order; the versions of a key are chained from the newest to the oldest, too;
//! - what was inserted before a cursor was made is met exactly once on its way.
//!
//! Rooms in reading order: [`memtable`], [`memory`] (what all of them take), [`record`] (the bytes of one), [`node`]
//! (of the B+ tree), [`tree`] (the ordered index), [`hash_index`], [`iter`].
#![deny(unsafe_code)]

pub(crate) mod hash_index;
pub(crate) mod iter;
pub(crate) mod memory;
#[expect(clippy::module_inception, reason = "one noun, one file: the folder holds its parts")]
pub(crate) mod memtable;
#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests race threads, and in vfs none are scoped")]
mod model_tests;
pub(crate) mod node;
pub(crate) mod record;
#[cfg(test)]
mod schedules;
#[cfg(test)]
pub(crate) mod speed;
pub(crate) mod tree;

pub(crate) use memtable::Memtable;

//! Leaves of a persistent B+ tree as they were in 2017, to measure zero-copy splits against: the third founding
//! document's three ways to split, on an allocator and an undo journal that cost what those of its library did.
//!
//! A baseline on purpose: nothing is recovered, one thread works at a time, and the inner nodes are a `BTreeMap`, which
//! is faster than what they were.
//!
//! Rooms in reading order: [`medium`] (memory that flushes and fences make persistent), [`pool`] (allocations, and
//! transactions with an undo journal), [`text`] (strings with room for 15 characters), [`tree`] (the three leaves).

pub(crate) mod medium;
pub(crate) mod pool;
pub(crate) mod text;
pub(crate) mod tree;

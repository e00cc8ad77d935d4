//! The pmem wing: data that is read and written at memory speed, in a B+ tree whose leaves are durable.
//!
//! A pool is memory addressed by offsets. Its leaves name records; a leaf changes by one store of eight bytes, which
//! makes what was written before it count. Above the leaves everything is volatile: the way to them, the free space,
//! the versions that readers still need. It is found out anew from the chain of leaves when the pool is opened.
//!
//! Invariants:
//! - what a leaf names is durable before the leaf names it, and reused only when it is durable that no leaf does, and
//!   every reader that may be at it has left;
//! - volatile state follows the durable one; what fails has given back what it took before it changed anything;
//! - readers never wait: what they find in a leaf and may see is right as it is, and that something is missing counts
//!   only if the leaf and the way to it did not change meanwhile;
//! - writers of different leaves don't wait for each other; leaves are split and merged by one thread at a time, which
//!   alone may lock two.
//!
//! Rooms in reading order: [`record`], [`leaf`] (the format), [`persistence`] (what makes it durable), [`allocator`],
//! [`shelves`], [`inner`] (the way to the leaves), [`tree`], [`write`](mod@write), [`reserve`] (what a batch needs),
//! [`split_merge`] (split, merge), [`leaf_order`] (of a leaf's slots), [`walk`], [`versions`] (what was replaced),
//! [`crew`] (threads), [`recover`], [`pool_header`] (about numbers), [`store`] (files), [`options`], [`engine`] (what a
//! partition calls).
#![deny(unsafe_code)]

pub(crate) mod allocator;
pub(crate) mod crew;
pub(crate) mod engine;
pub(crate) mod inner;
pub(crate) mod leaf;
pub(crate) mod leaf_order;
pub(crate) mod options;
pub(crate) mod persistence;
pub(crate) mod pool_header;
pub(crate) mod record;
pub(crate) mod recover;
pub(crate) mod reserve;
pub(crate) mod shelves;
#[cfg(test)]
pub(crate) mod sim;
pub(crate) mod split_merge;
pub(crate) mod store;
#[cfg(test)]
mod tests;
pub(crate) mod tree;
pub(crate) mod versions;
pub(crate) mod walk;
pub(crate) mod write;

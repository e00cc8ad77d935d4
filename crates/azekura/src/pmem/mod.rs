//! The pmem engine: data that is read and written at memory speed, in a B+ tree with durable leaves.
//!
//! A pool is memory that is addressed by offsets. Its leaves point to records. A leaf changes by one 8-byte store,
//! which makes records that were written before it valid. Everything above the leaves is volatile: inner nodes, free
//! space, and the versions that readers still need. Opening a pool rebuilds it from the chain of leaves.
//!
//! Invariants:
//! - A record is durable before a leaf points to it. Its space is reused only after it is durable that no leaf points
//!   to it, and after every reader that may read it has unpinned.
//! - Volatile state follows durable state. An operation that fails has released its reservations before it changed
//!   anything.
//! - Readers never wait. A record that a reader finds and may see is valid. A missing key is valid only if the leaf and
//!   the path to it did not change meanwhile.
//! - Writers of different leaves do not wait for each other. Leaves are split and merged by one thread at a time, and
//!   only that thread locks two leaves.
//!
//! Modules, lowest first: [`record`], [`leaf`] (their formats, and the order of a leaf's slots), [`dirty_pages`],
//! [`persistence`] (how changes become durable), [`allocator`], [`inner`] (inner nodes), [`versions`] (replaced
//! versions), [`pending_range_deletes`], [`tree`], [`write`](mod@write) (also the reservations of a batch),
//! [`split_merge`], [`range_delete`], [`expiry`] (removes expired records), [`multi_get`],
//! [`leaf_prefetcher`], [`pool_iter`], [`changes`] (for the validation of transactions), [`pool_header`], [`options`],
//! and [`pool`] (files, recovery, and the engine that `db` calls).
#![deny(unsafe_code)]

pub(crate) mod allocator;
pub(crate) mod changes;
pub(crate) mod dirty_pages;
pub(crate) mod expiry;
pub(crate) mod inner;
pub(crate) mod leaf;
pub(crate) mod leaf_prefetcher;
pub(crate) mod multi_get;
pub(crate) mod options;
pub(crate) mod pending_range_deletes;
pub(crate) mod persistence;
pub(crate) mod pool;
pub(crate) mod pool_header;
pub(crate) mod pool_iter;
pub(crate) mod range_delete;
pub(crate) mod record;
#[cfg(test)]
pub(crate) mod sim;
pub(crate) mod split_merge;
#[cfg(test)]
mod tests;
pub(crate) mod tree;
pub(crate) mod versions;
pub(crate) mod write;

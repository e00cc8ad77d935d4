//! Memory: shared byte strings, arenas, epochs, regions.
//!
//! This folder and `vfs/mmap.rs` contain all unsafe code; everything that they export is safe to call.
//!
//! Invariants:
//! - Bytes in an arena never move and never change until the arena is dropped.
//! - A value that outlives a call holds a counted pin. An epoch is pinned only inside of one call.
//!
//! Modules, in reading order: [`slice`](mod@slice), [`atomic`] (atomics and locks), [`pages`] (memory in large
//! units), [`buffer_pool`] (buffers cut from them), [`chunk_pool`] (chunks that are used again), [`append_vec`] (grows
//! during reads), [`arena`] (byte records),
//! [`epoch`] (a pointer that readers follow without a lock), [`parent_block`] (child links to cached blocks),
//! [`simd`] (vector comparisons and prefetch), [`persist`] (flushes of cache lines),
//! [`address_reservation`] (addresses for memory that grows), [`region`] (words addressed by offsets).

pub(crate) mod address_reservation;
#[cfg(test)]
pub(crate) mod allocation_counter;
pub(crate) mod append_vec;
pub(crate) mod arena;
pub(crate) mod atomic;
pub(crate) mod buffer_pool;
pub(crate) mod chunk_pool;
pub(crate) mod epoch;
#[cfg(test)]
pub(crate) mod explorer;
pub(crate) mod pages;
pub(crate) mod parent_block;
pub(crate) mod persist;
pub(crate) mod region;
#[cfg(test)]
mod schedules;
pub(crate) mod simd;
pub(crate) mod slice;

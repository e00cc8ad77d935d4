//! Memory: byte strings that are handed out, arenas, epochs.
//!
//! Together with `vfs/mmap.rs` this is the only folder with unsafe code; everything it offers is safe to call.
//!
//! Invariants:
//! - what an arena has handed out never moves and never changes until the arena is dropped;
//! - what crosses a call holds a counted pin; an epoch is pinned only inside one call.
//!
//! Rooms in reading order: [`slice`](mod@slice), [`atomic`] (what threads meet at), [`pages`] (memory in big pieces),
//! [`buffer_pool`] (buffers cut from them), [`append_vec`] (grows beside its readers), [`arena`] (byte records),
//! [`epoch`] (a pointer that readers follow without a lock), [`parent_block`] (many of them, to what somebody else
//! keeps), [`prefetch`], [`simd`] (many bytes compared at once), [`persist`] (cache lines pushed out),
//! [`address_reservation`], [`region`] (words addressed by offsets).

pub(crate) mod address_reservation;
pub(crate) mod append_vec;
pub(crate) mod arena;
pub(crate) mod atomic;
pub(crate) mod buffer_pool;
pub(crate) mod epoch;
#[cfg(test)]
pub(crate) mod explorer;
pub(crate) mod pages;
pub(crate) mod parent_block;
pub(crate) mod persist;
pub(crate) mod prefetch;
pub(crate) mod region;
#[cfg(test)]
mod schedules;
pub(crate) mod simd;
pub(crate) mod slice;

//! Memory: byte strings that are handed out, arenas, epochs.
//!
//! Together with `vfs/mmap.rs` this is the only folder with unsafe code; everything it offers is safe to call.
//!
//! Invariants:
//! - what an arena has handed out never moves and never changes until the arena is dropped;
//! - what crosses a call holds a counted pin; an epoch is pinned only inside one call.
//!
//! Rooms in reading order: [`slice`], [`atomic`] (what threads meet at), [`pages`] (memory in big pieces), [`pool`]
//! (buffers cut from them), [`append_vec`] (grows beside its readers), [`arena`] (byte records), [`epoch`] (a pointer
//! that readers follow without a lock), [`link`] (many of them, to what somebody else keeps), [`prefetch`], [`simd`]
//! (many bytes compared at once), [`persist`] (cache lines pushed out), [`reserve`], [`region`] (words addressed by
//! offsets).

pub(crate) mod append_vec;
pub(crate) mod arena;
pub(crate) mod atomic;
pub(crate) mod epoch;
#[cfg(test)]
pub(crate) mod explorer;
pub(crate) mod link;
pub(crate) mod pages;
pub(crate) mod persist;
pub(crate) mod pool;
pub(crate) mod prefetch;
pub(crate) mod region;
pub(crate) mod reserve;
#[cfg(test)]
mod schedules;
pub(crate) mod simd;
pub(crate) mod slice;

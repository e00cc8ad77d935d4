//! Memory: byte strings that are handed out, arenas, epochs, budgets.
//!
//! Together with `vfs/mmap.rs` this is the only folder with unsafe code; everything it offers is safe to call.
//!
//! Invariants:
//! - what an arena has handed out never moves and never changes until the arena is dropped;
//! - what crosses a call holds a counted pin; an epoch is pinned only inside one call.
//!
//! Rooms in reading order: [`slice`].

pub(crate) mod slice;

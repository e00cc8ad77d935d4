//! Walking over what one point shows.
//!
//! Rooms: [`cursor`], which takes a leaf at a time; [`batch`], the records that it copied; [`ahead`], what it fetches
//! before it gets there.

mod ahead;
mod batch;
pub(crate) mod cursor;

#[cfg(test)]
pub(crate) use batch::VALUES_READ;

//! Making a pool, and opening one: a walk along the chain of leaves, that believes nothing it was not told.
//!
//! All is read and judged first; what a crash left half done is repaired then, and made durable before anybody can
//! write. A pool that is refused is as it was.
//!
//! The chain itself is followed by one thread; its leaves and their records are read and judged part by part, by
//! several threads if there is much of it. What concerns two parts, the last leaf of one and the first of the next, is
//! judged at the end. How much of a record is read depends on what is known of the pool: see [`PoolCheckLevel`].
//!
//! Rooms in reading order: [`open`], [`walk`] (along the chain), [`leaves`] (what is read of one), [`used`] (what
//! belongs to something).

mod leaves;
mod open;
mod used;
mod walk;

pub(crate) use leaves::{PoolCheckLevel, PoolRecoveryReport, verify_records};
pub(crate) use open::{create, open_with};

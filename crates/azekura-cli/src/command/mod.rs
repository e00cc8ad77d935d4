//! The commands. Each takes its arguments and an output, and answers yes or no.
//!
//! Rooms: `dispatch` (which command it is), `point` (put, get, del), `range` (scan, count), `transfer` (import,
//! export), `look` (stats, levels), `blobs`, `gc` (scan, run), `verify`, `upkeep` (compact, checkpoint), `partitions`.

mod blobs;
mod dispatch;
mod gc;
mod look;
mod partitions;
mod point;
mod range;
mod transfer;
mod upkeep;
pub(crate) mod verify;

pub(crate) use dispatch::run;

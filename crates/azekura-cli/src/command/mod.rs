//! The commands. Each gets its arguments and the output, and returns a `CommandOutcome`.
//!
//! `point` (put, get, del), `range` (scan, count), `transfer` (import, export), `stats` (stats, levels, blobs), `gc`
//! (scan, run), `verify`, `maintenance` (compact, checkpoint), `backup`, `partitions` (list, create, drop), `repair`,
//! `shell`, `demo`, `generate`.

#[cfg(feature = "backup")]
pub(crate) mod backup;
pub(crate) mod demo;
pub(crate) mod gc;
pub(crate) mod generate;
pub(crate) mod maintenance;
pub(crate) mod partitions;
pub(crate) mod point;
pub(crate) mod range;
pub(crate) mod repair;
pub(crate) mod shell;
pub(crate) mod stats;
pub(crate) mod transfer;
pub(crate) mod verify;

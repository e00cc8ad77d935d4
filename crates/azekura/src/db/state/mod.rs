//! What the database knows, as values: what the manifest keeps, who reads, what commits hold, how far writers are
//! slowed, what failed.
//!
//! Invariants:
//! - the ledger changes only by edits, and only after they are in the manifest;
//! - numbers of files, partitions and epochs are never handed out twice, across restarts too.
//!
//! Rooms in reading order: [`metadata`] (ledger and manifest), [`read_points`], [`poison`], [`throttle`],
//! [`setbacks`], [`claims`] (large values that a commit has written ahead).

pub(crate) mod claims;
pub(crate) mod metadata;
pub(crate) mod poison;
pub(crate) mod read_points;
pub(crate) mod setbacks;
pub(crate) mod throttle;

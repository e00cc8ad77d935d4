//! What the database knows, as values: what the manifest keeps, what stands behind partitions, what commits hold, how
//! far writers are slowed, what failed.
//!
//! Invariants:
//! - the ledger changes only by edits, and only after they are in the manifest;
//! - numbers of files, partitions and epochs are never handed out twice, across restarts too.
//!
//! Rooms in reading order: [`version_set`] (ledger and manifest), [`partition_tree`], [`event_queue`] (for the
//! listener), [`poison`], [`shifts`] (work that closing waits for), [`write_stall`], [`backoff`], [`tally`] (a sum),
//! [`claims`] (large values that a commit has written ahead), [`reservations`] (space that pools have set aside for
//! one), [`disk_reserve`] (space on the disk that ordinary writes cannot use).

pub(crate) mod backoff;
pub(crate) mod claims;
pub(crate) mod disk_reserve;
pub(crate) mod event_queue;
pub(crate) mod partition_tree;
pub(crate) mod poison;
pub(crate) mod reservations;
pub(crate) mod shifts;
pub(crate) mod tally;
pub(crate) mod version_set;
pub(crate) mod write_stall;

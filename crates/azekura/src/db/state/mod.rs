//! What the database knows, as values: what the manifest keeps, what stands behind partitions, what commits hold, how
//! far writers are slowed, what failed.
//!
//! Invariants:
//! - the ledger changes only by edits, and only after they are in the manifest;
//! - numbers of files, partitions and epochs are never handed out twice, across restarts too.
//!
//! Rooms in reading order: [`metadata`] (ledger and manifest), [`tree`], [`events`] (for the listener), [`poison`],
//! [`shifts`] (work that closing waits for), [`throttle`], [`setbacks`], [`tally`] (a sum), [`claims`] (large values
//! that a commit has written ahead), [`rooms`] (space that pools have set aside for one), [`reserve`] (space on the
//! disk that ordinary writes cannot use).

pub(crate) mod claims;
pub(crate) mod events;
pub(crate) mod metadata;
pub(crate) mod poison;
pub(crate) mod reserve;
pub(crate) mod rooms;
pub(crate) mod setbacks;
pub(crate) mod shifts;
pub(crate) mod tally;
pub(crate) mod throttle;
pub(crate) mod tree;

//! What the database knows, as values: the files and names of the manifest, the records of a commit, the readers.
//!
//! Invariants:
//! - the [`ledger`] changes only by edits, and only after they are in the manifest;
//! - numbers of files, partitions and epochs are never handed out twice, across restarts too.
//!
//! Rooms in reading order: [`ledger`], [`metadata`] (ledger + manifest), [`payload`] (a commit's bytes),
//! [`read_points`], [`poison`], [`throttle`].

pub(crate) mod ledger;
pub(crate) mod metadata;
pub(crate) mod payload;
pub(crate) mod poison;
pub(crate) mod read_points;
pub(crate) mod throttle;

//! Recovery: opens a database directory and returns a running database.
//!
//! Steps:
//! 1. Make the path absolute, list the directory without changing it, and take the directory lock.
//! 2. If the directory has no manifest, no data files and no foreign files, create the database. Creation is atomic,
//!    because the first manifest gets its name by a rename.
//! 3. Read the manifest into the manifest state, check the presence and the length of the files that it names, and
//!    read the pools.
//! 4. Replay the write-ahead log (WAL): apply every commit that no permanent file contains to a memtable or a pool.
//!    The whole WAL is validated before anything is written, so a failed open changes nothing. The exception are
//!    mapped pools: a replayed record changes the file of such a pool at once. If a mapped pool survives power loss,
//!    the WAL is written again and synced, as in the next step, before the replay.
//! 5. Sync the replayed segments, because they may be in the page cache only. What no watermark covers is written again
//!    before, with the same bytes, because a sync that failed earlier may have left clean pages that never reached the
//!    device. If damage was skipped, rewrite the WAL to new segments.
//! 6. Make ordinary blob files of the direct blob files that the WAL points into, on a full disk in place.
//! 7. Write a new manifest that records the end of the WAL, remove orphaned files, begin a new WAL segment, and start
//!    the workers.
//!
//! Modules, in reading order: [`open`] (the ways to open a database), [`directory_listing`], [`recovery_state`] (the
//! steps from 3 on).

pub(crate) mod directory_listing;
pub(crate) mod open;
pub(crate) mod recovery_state;

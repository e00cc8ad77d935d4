//! Parts of the state of a database: the version set, events, background work, the disk reserve.
//!
//! Invariants:
//! - The manifest state changes only by version edits that are in the manifest.
//! - Numbers of files, partitions and WAL epochs are never assigned twice, also after reopening.
//!
//! Modules, in reading order: [`version_set`] (manifest state and manifest), [`partition_expiry`], [`event_queue`]
//! (events for the listener), [`poison`] (the first fatal error), [`work_tracker`] (work that closing waits for),
//! [`background_work`] (signals of workers, and closing), [`backoff`], [`sharded_counter`], [`db_counters`],
//! [`disk_reserve`] (disk space that ordinary writes cannot use), [`list_growth`] (lists whose memory is limited),
//! [`scanned_range`] (the keys that an iterator of a transaction has read), [`change_readers`].

pub(crate) mod background_work;
pub(crate) mod backoff;
pub(crate) mod change_readers;
pub(crate) mod db_counters;
pub(crate) mod disk_reserve;
pub(crate) mod event_queue;
pub(crate) mod list_growth;
pub(crate) mod partition_expiry;
pub(crate) mod poison;
pub(crate) mod scanned_range;
pub(crate) mod sharded_counter;
pub(crate) mod version_set;
pub(crate) mod work_tracker;

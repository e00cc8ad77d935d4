//! What the engine tells a listener.

use std::path::PathBuf;

use crate::base::error::Error;

/// Something that happened in the background, told to a [`Listener`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The database was opened.
    Opened {
        /// Records of the log that were applied again.
        replayed_records: u64,
        /// What the log still held behind the place where it was found damaged.
        dropped_after_damage: Option<DroppedAfterDamage>,
        /// Files that no version names and that were removed.
        orphans_removed: u64,
    },
    /// A memtable became tables.
    Flushed {
        /// Name of the partition.
        partition: String,
        /// Tables written.
        tables: u64,
        /// Bytes written.
        bytes: u64,
    },
    /// Tables were merged, or moved a level down without being rewritten.
    Compacted {
        /// Name of the partition.
        partition: String,
        /// Level of the output.
        level: u8,
        /// Bytes read; 0 for a move.
        bytes_read: u64,
        /// Bytes written; 0 for a move.
        bytes_written: u64,
    },
    /// Live values of blob files were copied together, and the files they were in are gone.
    BlobGcCompleted {
        /// Name of the partition.
        partition: String,
        /// Blob files that are gone.
        files: u64,
        /// Bytes written.
        bytes_written: u64,
        /// Bytes of the files that are gone, less those written.
        bytes_freed: u64,
    },
    /// Background work failed. It is tried again, ever more patiently, unless the error poisons; other work goes on
    /// meanwhile. Told once for each kind of work of a partition and each kind of error or damaged file, until that
    /// work succeeds.
    BackgroundError {
        /// What failed.
        error: Error,
    },
    /// A failure of the log, of the manifest or a panic stopped all writes.
    Poisoned {
        /// The first failure.
        error: Error,
    },
    /// Number of events that were dropped here, because too many events waited for a slow listener.
    EventsDropped {
        /// Events that were dropped.
        count: u64,
    },
    /// The database was closed, and its directory may be opened again. The last event.
    Closed,
}

/// Frames of the log that verify but lie behind damage, above the last known durable position: they were written and
/// never synced, and are not applied, because what was between is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DroppedAfterDamage {
    /// The segment that holds the damage, or the blob file, where a commit's values do not verify.
    pub file: PathBuf,
    /// Where the damage starts, in bytes.
    pub offset: u64,
    /// Verified frames behind it.
    pub frames: u64,
}

/// Gets [`Event`]s, one after the other, in the order in which they happened.
///
/// A database with workers calls the listener from a thread of its own, and from `open` for [`Event::Opened`]: an event
/// may arrive after the call that caused it has returned, except for [`Event::Closed`], which has been delivered when
/// `close` returns. A database with no workers calls the listener at the end of the call that caused the event. Up to
/// 1,024 events wait for a slow listener; [`Event::EventsDropped`] stands for those beyond.
///
/// No lock of the database is held meanwhile: a listener may read, write, flush, open and delete partitions, drop the
/// last handle, or close the database. A call that cannot be served any more returns an error, such as `Poisoned` or
/// `Closed`. A listener must not wait for a thread that is closing the database, because `close` waits for the
/// listener. A listener that panics poisons the database.
pub trait Listener: Send + Sync {
    /// Called once for each event.
    fn on_event(&self, event: &Event);
}

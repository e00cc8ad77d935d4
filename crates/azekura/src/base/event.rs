//! Events of the database, and the listener that receives them.

use std::path::PathBuf;

use crate::base::error::Error;

/// A change of the database's state, delivered to a [`Listener`].
///
/// ```
/// use azekura::Event;
/// /// The line that a program logs, if any.
/// fn log_line(event: &Event) -> Option<String> {
///     match event {
///         Event::BackgroundError { error } => Some(format!("WARN background work is retried: {error}")),
///         Event::Poisoned { error } => Some(format!("ERROR all writes fail until the database is reopened: {error}")),
///         Event::Opened { dropped_after_damage: Some(dropped), .. } => {
///             Some(format!("WARN {} WAL frames were dropped: {}", dropped.frames, dropped.file.display()))
///         }
///         _ => None,
///     }
/// }
/// assert!(log_line(&Event::Poisoned { error: azekura::Error::corruption("…") }).unwrap().starts_with("ERROR"));
/// assert!(log_line(&Event::Closed).is_none());
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The database was opened for writing. An open for reading sends no such event; its result is in
    /// [`Metrics`](crate::Metrics).
    Opened {
        /// Records of the write-ahead log (WAL) that were replayed.
        replayed_records: u64,
        /// Valid frames after the position at which the WAL is damaged, which were not replayed.
        dropped_after_damage: Option<DroppedAfterDamage>,
        /// Files that no version names and that were removed.
        orphans_removed: u64,
    },
    /// A flush wrote memtables to tables.
    Flushed {
        /// Name of the partition.
        partition: String,
        /// Tables written.
        tables: u64,
        /// Bytes written.
        bytes: u64,
    },
    /// [`Partition::ingest`](crate::Partition::ingest) or [`bulk`](crate::Partition::bulk) added tables to an LSM
    /// partition.
    Ingested {
        /// Name of the partition.
        partition: String,
        /// Entries in the tables.
        entries: u64,
        /// Tables added.
        tables: u64,
        /// Bytes of the tables and of their blob files.
        bytes: u64,
    },
    /// A compaction merged tables, or moved a table to the next level without rewriting it.
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
    /// Blob GC copied the referenced values of stale blob files, and removed the files.
    BlobGcCompleted {
        /// Name of the partition.
        partition: String,
        /// Removed blob files.
        files: u64,
        /// Bytes written.
        bytes_written: u64,
        /// Bytes of the removed files, minus bytes written.
        bytes_freed: u64,
    },
    /// Background work failed. It is retried with growing delays, unless the error poisons the database; other work
    /// continues. Until the same work of the same partition succeeds, the event is sent again only if the kind of the
    /// error, or the damaged file, differs from that of the last event. A sync of the sync interval sends it each time
    /// that it fails.
    BackgroundError {
        /// The error.
        error: Error,
    },
    /// A failure of the WAL or the manifest, or a panic, stopped all writes.
    Poisoned {
        /// The first failure.
        error: Error,
    },
    /// Events were dropped at this point, because too many waited for a slow listener.
    EventsDropped {
        /// Number of dropped events.
        count: u64,
    },
    /// The database was closed, and its directory may be opened again. This is the last event.
    Closed,
}

/// Valid frames of the WAL that follow damage and are above the durable watermark. They were never synced. They are
/// not replayed, because records before them are lost.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// let db = azekura::Config::new(&path).open()?;
/// let dropped = db.metrics().dropped_after_damage;
/// let line = dropped.map(|lost| format!("{} frames lost at byte {}", lost.frames, lost.offset));
/// assert_eq!(line, None); // the WAL is not damaged
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct DroppedAfterDamage {
    /// The damaged segment, or the blob file in which values of a commit do not verify. With the feature `serde`, it is
    /// written as text; bytes that are not UTF-8 are replaced by `U+FFFD`.
    #[cfg_attr(feature = "serde", serde(serialize_with = "write_path_as_text"))]
    pub file: PathBuf,
    /// Offset of the damage in bytes.
    pub offset: u64,
    /// Number of valid frames after the damage.
    pub frames: u64,
}

/// `serde` itself refuses a path that is not UTF-8, and all metrics with it.
#[cfg(feature = "serde")]
fn write_path_as_text<S: serde::Serializer>(path: &std::path::Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

/// Receives [`Event`]s one at a time, in the order in which they occurred.
///
/// A database with workers calls the listener on a thread of its own, and from `open` for [`Event::Opened`]. An event
/// may therefore arrive after the call that caused it has returned, except [`Event::Closed`], which is delivered
/// before `close` returns. A database without workers, or open for reading only, calls the listener at the end of the
/// call that caused the event. Up to 1,024 events wait for a slow listener; [`Event::EventsDropped`] replaces further
/// ones.
///
/// No lock of the database is held during the call: a listener may read, write, flush, open and delete partitions,
/// drop the last handle, or close the database. A call that is not possible any more returns an error, such as
/// `Poisoned` or `Closed`. A listener must not wait for a thread that is closing the database, because `close` waits
/// for the listener. A listener that panics poisons the database.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// use azekura::{Config, Event, Listener};
/// use std::sync::{Arc, mpsc};
/// struct Forward(mpsc::Sender<Event>);
/// impl Listener for Forward {
///     fn on_event(&self, event: &Event) {
///         let _receiver_may_be_gone = self.0.send(event.clone()); // returns at once; another thread may take its time
///     }
/// }
/// let (sender, events) = mpsc::channel();
/// Config::new(&path).listener(Arc::new(Forward(sender))).open()?.close()?;
/// assert!(matches!(events.recv(), Ok(Event::Opened { replayed_records: 0, .. })));
/// assert!(matches!(events.recv(), Ok(Event::Closed)));
/// # Ok(()) }
/// ```
pub trait Listener: Send + Sync {
    /// Called once for each event.
    ///
    /// ```
    /// use azekura::{Event, Listener};
    /// use std::sync::atomic::{AtomicBool, Ordering};
    /// #[derive(Default)]
    /// struct Health { failed: AtomicBool }
    /// impl Listener for Health {
    ///     fn on_event(&self, event: &Event) {
    ///         self.failed.fetch_or(matches!(event, Event::Poisoned { .. }), Ordering::Relaxed);
    ///     }
    /// }
    /// let health = Health::default();
    /// health.on_event(&Event::Closed);
    /// assert!(!health.failed.load(Ordering::Relaxed));
    /// ```
    fn on_event(&self, event: &Event);
}

//! The calls.

use crate::base::{Error, Result};
use crate::db::blob_gc::drive::{run_blob_gc_and_wait, scan_blobs};
use crate::db::blob_gc::report::GcReport;
use crate::db::partition::Partition;
use crate::lsm::blob_gc::picker::BlobGcGoal;

/// Garbage collection of a [`Partition`] with key-value separation, when and as far as the caller wants it.
///
/// Values in blob files that were overwritten or removed take space until they are collected. The engine does that by
/// itself as far as [`automatic_gc`](crate::KvSeparationOptions::automatic_gc) says; these calls do it now, or further.
///
/// Every call blocks until it is done, may be made from any thread, by several at the same time, and stops neither
/// readers nor writers. Values that snapshots and iterators see stay, and are left out when a target is measured. What
/// others write or remove during a call may be left for the next one.
///
/// A call gives the bytes of blob files that it made free itself, those that it wrote again taken off. What background
/// work or another call frees meanwhile is not among them: what all of them have freed adds up to
/// [`Metrics::blob_bytes_freed`](crate::Metrics::blob_bytes_freed).
///
/// ```
/// use azekura::{Config, GarbageCollection, KvSeparationOptions, PartitionCreateOptions};
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = Config::new(dir.path().join("db")).open()?;
/// let options = PartitionCreateOptions::default()
///     .with_kv_separation(KvSeparationOptions::default().automatic_gc(None));
/// let pages = db.open_partition("pages", options)?;
/// for n in 0..10 {
///     pages.insert(format!("page {n}"), vec![b'x'; 10_000])?;
/// }
/// pages.flush()?;
/// for n in 0..6 {
///     pages.remove(format!("page {n}"))?;
/// }
///
/// let report = pages.gc_scan()?;
/// println!("{report}");
/// assert_eq!((report.total_blobs, report.stale_blobs), (10, 6));
/// assert!(report.space_amp() > 2.4);
///
/// let freed = pages.gc_with_space_amp_target(1.5)?;
/// assert!(freed > 0);
/// assert!(pages.gc_scan()?.space_amp() <= 1.5);
/// # Ok(()) }
/// ```
pub trait GarbageCollection {
    /// How stale the blob files are, exactly. Writes what is in memory to tables, and then reads keys and pointers, no
    /// values; asked again while no table has come or gone, it reads nothing. Opened for reading only, nothing is
    /// written.
    ///
    /// # Errors
    /// `Invalid` on a partition without key-value separation; those of [`Partition::flush`]; `Io` and `Corruption` from
    /// tables.
    ///
    /// ```
    /// # use azekura::{Config, GarbageCollection, KvSeparationOptions, PartitionCreateOptions};
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = Config::new(dir.path().join("db")).open()?;
    /// # let apart = KvSeparationOptions::default().automatic_gc(None);
    /// # let pages = db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(apart))?;
    /// pages.insert("page", vec![1; 5_000])?;
    /// pages.flush()?;
    /// pages.remove("page")?;
    /// let report = pages.gc_scan()?;
    /// assert_eq!((report.segment_count, report.stale_segment_count), (1, 1));
    /// println!("{report}");
    /// # Ok(()) }
    /// ```
    fn gc_scan(&self) -> Result<GcReport>;

    /// Rewrites as few bytes as it takes to bring [`GcReport::space_amp`] down to a target of at least 1; gives the
    /// bytes that became free. 1.5 to 3 is sensible: less costs more writing.
    ///
    /// # Errors
    /// `Invalid` for a target below 1 and for none; as [`gc_scan`](GarbageCollection::gc_scan); `Io` and `OutOfSpace`
    /// from writing; `Corruption` naming a blob file, where the others were collected all the same.
    ///
    /// ```
    /// # use azekura::{Config, GarbageCollection, KvSeparationOptions, PartitionCreateOptions};
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = Config::new(dir.path().join("db")).open()?;
    /// # let apart = KvSeparationOptions::default().automatic_gc(None);
    /// # let pages = db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(apart))?;
    /// pages.gc_with_space_amp_target(2.0)?; // at most two bytes for each that can be seen
    /// assert!(pages.gc_scan()?.space_amp() <= 2.0);
    /// # assert!(pages.gc_with_space_amp_target(0.9).is_err());
    /// # Ok(()) }
    /// ```
    fn gc_with_space_amp_target(&self, target: f32) -> Result<u64>;

    /// Rewrites every blob file of whose bytes at least this share is stale, 0 to 1; gives the bytes that became free.
    /// Near 1 that is cheap, because little is left to copy.
    ///
    /// # Errors
    /// `Invalid` for a threshold out of its range; as
    /// [`gc_with_space_amp_target`](GarbageCollection::gc_with_space_amp_target).
    ///
    /// ```
    /// # use azekura::{Config, GarbageCollection, KvSeparationOptions, PartitionCreateOptions};
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = Config::new(dir.path().join("db")).open()?;
    /// # let options = PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default());
    /// # let pages = db.open_partition("pages", options)?;
    /// pages.gc_with_staleness_threshold(0.7)?; // files with 70 % or more stale data
    /// # assert!(pages.gc_with_staleness_threshold(1.5).is_err());
    /// # Ok(()) }
    /// ```
    fn gc_with_staleness_threshold(&self, threshold: f32) -> Result<u64>;

    /// Removes blob files that are stale as a whole, and copies nothing; gives the bytes that became free. The other
    /// calls do that too. For data that goes in the order in which it came, a queue or a log, it is all that is needed.
    ///
    /// # Errors
    /// As [`gc_with_space_amp_target`](GarbageCollection::gc_with_space_amp_target).
    ///
    /// ```
    /// # use azekura::{Config, GarbageCollection, KvSeparationOptions, PartitionCreateOptions};
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = Config::new(dir.path().join("db")).open()?;
    /// # let options = PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default());
    /// # let queue = db.open_partition("queue", options)?;
    /// queue.insert("job 1", vec![1; 5_000])?;
    /// queue.flush()?;
    /// queue.remove("job 1")?;
    /// queue.gc_drop_stale_segments()?;
    /// assert_eq!(queue.gc_scan()?.segment_count, 0);
    /// # Ok(()) }
    /// ```
    fn gc_drop_stale_segments(&self) -> Result<u64>;

    /// Another name of [`gc_scan`](GarbageCollection::gc_scan), to be written `Gc::scan(&partition)`.
    ///
    /// # Errors
    /// The same.
    ///
    /// ```
    /// # use azekura::{Config, Gc, KvSeparationOptions, PartitionCreateOptions};
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = Config::new(dir.path().join("db")).open()?;
    /// # let apart = KvSeparationOptions::default().automatic_gc(None);
    /// # let pages = db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(apart))?;
    /// let report = Gc::scan(&pages)?;
    /// # assert_eq!(report.segment_count, 0);
    /// # Ok(()) }
    /// ```
    fn scan(&self) -> Result<GcReport> {
        self.gc_scan()
    }

    /// Another name of [`gc_with_space_amp_target`](GarbageCollection::gc_with_space_amp_target).
    ///
    /// # Errors
    /// The same.
    fn with_space_amp_target(&self, target: f32) -> Result<u64> {
        self.gc_with_space_amp_target(target)
    }

    /// Another name of [`gc_with_staleness_threshold`](GarbageCollection::gc_with_staleness_threshold).
    ///
    /// # Errors
    /// The same.
    fn with_staleness_threshold(&self, threshold: f32) -> Result<u64> {
        self.gc_with_staleness_threshold(threshold)
    }

    /// Another name of [`gc_drop_stale_segments`](GarbageCollection::gc_drop_stale_segments).
    ///
    /// # Errors
    /// The same.
    fn drop_stale_segments(&self) -> Result<u64> {
        self.gc_drop_stale_segments()
    }
}

impl GarbageCollection for Partition {
    fn gc_scan(&self) -> Result<GcReport> {
        Ok(GcReport::of(&scan_blobs(&self.handle.inner, &self.state)?.files))
    }

    fn gc_with_space_amp_target(&self, target: f32) -> Result<u64> {
        if target.is_nan() || target < 1.0 {
            return Err(Error::invalid(format!("collection towards {target}: space amplification is at least 1")));
        }
        run_blob_gc_and_wait(&self.handle.inner, &self.state, BlobGcGoal::SpaceAmp(f64::from(target)))
    }

    fn gc_with_staleness_threshold(&self, threshold: f32) -> Result<u64> {
        if !(0.0..=1.0).contains(&threshold) {
            return Err(Error::invalid(format!("staleness threshold {threshold} is out of its range 0..=1")));
        }
        run_blob_gc_and_wait(&self.handle.inner, &self.state, BlobGcGoal::Staleness(f64::from(threshold)))
    }

    fn gc_drop_stale_segments(&self) -> Result<u64> {
        run_blob_gc_and_wait(&self.handle.inner, &self.state, BlobGcGoal::NoFullyStaleFile)
    }
}

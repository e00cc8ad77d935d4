//! The public trait for blob GC.

use crate::base::{Error, Result};
use crate::db::blob_gc::drive::{run_blob_gc_and_wait, scan_blobs};
use crate::db::blob_gc::report::GcReport;
use crate::db::partition::Partition;
use crate::lsm::blob_gc::picker::BlobGcGoal;

/// Runs garbage collection (GC) of the blob files of a [`Partition`] with key-value separation on request.
///
/// Overwritten and removed values use space in blob files until blob GC reclaims it. Background work does this as far
/// as [`automatic_gc`](crate::KvSeparationOptions::automatic_gc) requires; these calls do it now, or to a stricter
/// target.
///
/// Each call blocks until it is done and stops neither readers nor writers. Several threads may call at the same
/// time. Values that snapshots and iterators can read are kept, and do not count towards a target. Values that other
/// threads write or remove during a call may remain for the next call.
///
/// A call returns the bytes of blob files that it deleted, minus the bytes that it rewrote. Bytes freed meanwhile by
/// background work or another call are not included. [`Metrics::blob_bytes_freed`](crate::Metrics::blob_bytes_freed)
/// is the sum over all of them.
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
    /// Returns exactly how much of the blob files is stale.
    ///
    /// The call flushes the memtables, then reads keys and blob pointers but no values. If no table was added or
    /// removed since the last scan, it reads nothing. A read-only database writes nothing.
    ///
    /// # Errors
    /// `Invalid` if the partition has no key-value separation. As [`Partition::flush`]. `Io` or `Corruption` from
    /// reading tables.
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

    /// Reduces [`GcReport::space_amp`] to the target, rewriting as few bytes as possible, and returns the bytes
    /// freed.
    ///
    /// The target is at least 1; 1.5 to 3 is usual, because a lower target causes more writes.
    ///
    /// # Errors
    /// `Invalid` if the target is below 1 or not a number. As [`gc_scan`](GarbageCollection::gc_scan). `Io` or
    /// `OutOfSpace` from writing. `Corruption`, naming the blob file; the other blob files were processed anyway.
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

    /// Rewrites every blob file whose stale share of bytes is at least the threshold, 0 to 1, and returns the bytes
    /// freed. A threshold near 1 is cheap, because few values remain to be copied.
    ///
    /// # Errors
    /// `Invalid` if the threshold is out of range; otherwise as
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

    /// Deletes blob files in which every value is stale, copies no value, and returns the bytes freed.
    ///
    /// The other calls do this too. It is sufficient for data that is removed in the order in which it was written,
    /// such as a queue.
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

    /// Alias of [`gc_scan`](GarbageCollection::gc_scan), for calls of the form `Gc::scan(&partition)`.
    ///
    /// # Errors
    /// The same errors.
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

    /// Alias of [`gc_with_space_amp_target`](GarbageCollection::gc_with_space_amp_target).
    ///
    /// # Errors
    /// The same errors.
    fn with_space_amp_target(&self, target: f32) -> Result<u64> {
        self.gc_with_space_amp_target(target)
    }

    /// Alias of [`gc_with_staleness_threshold`](GarbageCollection::gc_with_staleness_threshold).
    ///
    /// # Errors
    /// The same errors.
    fn with_staleness_threshold(&self, threshold: f32) -> Result<u64> {
        self.gc_with_staleness_threshold(threshold)
    }

    /// Alias of [`gc_drop_stale_segments`](GarbageCollection::gc_drop_stale_segments).
    ///
    /// # Errors
    /// The same errors.
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

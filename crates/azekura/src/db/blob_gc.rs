//! Blob GC on request: the public trait, the loop that scans and runs blob GC until the target is reached, and the
//! report of a scan.

use std::fmt;
use std::sync::Arc;

use crate::base::version_edit::FileNumber;
use crate::base::{Error, Result, SeqNo};
use crate::db::inner::DbInner;
use crate::db::partition::Partition;
use crate::db::partition_state::PartitionState;
use crate::db::worker::{flush_and_wait, remove_obsolete_files, run_lsm_task};
use crate::engine::{Task, TaskReport};
use crate::lsm::blob_gc::{BlobGarbageStats, BlobGcGoal, BlobGcStep, BlobScanResult, next_blob_gc_step};
use crate::lsm::tree::LsmTree;

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
/// # let db = Config::new(dir.path().join("db")).workers(0).open()?;
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
    /// # let db = Config::new(dir.path().join("db")).workers(0).open()?;
    /// # let separation = KvSeparationOptions::default().automatic_gc(None);
    /// # let pages = db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(separation))?;
    /// pages.insert("page", vec![1; 5_000])?;
    /// pages.flush()?;
    /// pages.remove("page")?;
    /// let report = pages.gc_scan()?;
    /// assert_eq!((report.segment_count, report.stale_segment_count), (1, 1));
    /// assert!(report.to_string().starts_with("blob files")); // a table
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
    /// # let db = Config::new(dir.path().join("db")).workers(0).open()?;
    /// # let separation = KvSeparationOptions::default().automatic_gc(None);
    /// # let pages = db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(separation))?;
    /// pages.gc_with_space_amp_target(2.0)?; // at most two bytes on disk for each byte that a new reader can read
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
    /// # let db = Config::new(dir.path().join("db")).workers(0).open()?;
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
    /// # let db = Config::new(dir.path().join("db")).workers(0).open()?;
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
    /// # let db = Config::new(dir.path().join("db")).workers(0).open()?;
    /// # let separation = KvSeparationOptions::default().automatic_gc(None);
    /// # let pages = db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(separation))?;
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
    ///
    /// ```
    /// # use azekura::{Gc, KvSeparationOptions, PartitionCreateOptions};
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).workers(0).open()?;
    /// # let separation = KvSeparationOptions::default().automatic_gc(None);
    /// # let pages = db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(separation))?;
    /// pages.insert("page", vec![1; 5_000])?;
    /// pages.flush()?;
    /// pages.insert("page", vec![2; 5_000])?;
    /// let freed = Gc::with_space_amp_target(&pages, 1.5)?;
    /// assert!(freed > 0 && Gc::scan(&pages)?.space_amp() <= 1.5);
    /// # Ok(()) }
    /// ```
    fn with_space_amp_target(&self, target: f32) -> Result<u64> {
        self.gc_with_space_amp_target(target)
    }

    /// Alias of [`gc_with_staleness_threshold`](GarbageCollection::gc_with_staleness_threshold).
    ///
    /// # Errors
    /// The same errors.
    ///
    /// ```
    /// # use azekura::{Gc, KvSeparationOptions, PartitionCreateOptions};
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).workers(0).open()?;
    /// # let separation = KvSeparationOptions::default().automatic_gc(None);
    /// # let pages = db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(separation))?;
    /// pages.insert("page", vec![1; 5_000])?;
    /// pages.flush()?;
    /// pages.remove("page")?;
    /// Gc::with_staleness_threshold(&pages, 0.7)?;
    /// assert_eq!(Gc::scan(&pages)?.stale_blobs, 0);
    /// # Ok(()) }
    /// ```
    fn with_staleness_threshold(&self, threshold: f32) -> Result<u64> {
        self.gc_with_staleness_threshold(threshold)
    }

    /// Alias of [`gc_drop_stale_segments`](GarbageCollection::gc_drop_stale_segments).
    ///
    /// # Errors
    /// The same errors.
    ///
    /// ```
    /// # use azekura::{Gc, KvSeparationOptions, PartitionCreateOptions};
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).workers(0).open()?;
    /// # let separation = KvSeparationOptions::default().automatic_gc(None);
    /// # let queue = db.open_partition("queue", PartitionCreateOptions::default().with_kv_separation(separation))?;
    /// queue.insert("job 1", vec![1; 5_000])?;
    /// queue.flush()?;
    /// queue.remove("job 1")?;
    /// assert!(Gc::drop_stale_segments(&queue)? > 0);
    /// # Ok(()) }
    /// ```
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
            return Err(Error::invalid(format!("space amplification target {target} is not a number of at least 1")));
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

/// Entries that a scan reads before it checks whether the database is closing.
const SCAN_STEP_ENTRIES: u64 = 10_000;
/// Maximum number of rounds of a call, each with a scan and one step. Two rounds suffice without concurrent writes.
/// Concurrent writes may create stale values in every round, and a call must end.
const GC_ROUNDS_MAX: usize = 6;

fn lsm_with_separation(partition: &PartitionState) -> Result<&Arc<LsmTree>> {
    match partition.tree()?.lsm().filter(|tree| tree.has_kv_separation()) {
        Some(tree) => Ok(tree),
        None => Err(Error::invalid(format!("partition {:?} has no key-value separation", partition.name))),
    }
}

/// Flushes the partition, unless the database is read-only, and returns exactly how stale its blob files are.
pub(crate) fn scan_blobs(inner: &DbInner, partition: &Arc<PartitionState>) -> Result<Arc<BlobScanResult>> {
    let _call = inner.begin_api_call();
    inner.check_outside()?;
    let tree = lsm_with_separation(partition)?;
    inner.check_open()?;
    if inner.writer.is_some() {
        flush_and_wait(inner, partition)?;
    }
    let scanned = scan_tables(inner, tree)?;
    partition.tree()?; // a scan finds nothing if the partition was deleted meanwhile
    Ok(scanned)
}

fn scan_tables(inner: &DbInner, tree: &LsmTree) -> Result<Arc<BlobScanResult>> {
    let read_only = inner.writer.is_none();
    if !read_only && let Some(scanned) = tree.cached_blob_scan(&inner.snapshots.seqnos()) {
        return Ok(scanned);
    }
    // In a writable database the caller has flushed the memtables.
    let mut scan = tree.begin_blob_scan(inner.snapshots.seqnos(), read_only);
    loop {
        let _work = inner.begin_work()?;
        if inner.catch_panics(|| scan.step(SCAN_STEP_ENTRIES))? {
            return Ok(tree.finish_blob_scan(scan));
        }
    }
}

/// Runs blob GC until the goal is reached, and returns the bytes that it freed.
pub(crate) fn run_blob_gc_and_wait(inner: &DbInner, partition: &Arc<PartitionState>, goal: BlobGcGoal) -> Result<u64> {
    let _call = inner.begin_api_call();
    inner.check_outside()?;
    let tree = lsm_with_separation(partition)?;
    inner.writer()?;
    flush_and_wait(inner, partition)?;
    let through = inner.last_visible.get();
    let mut freed = 0;
    for round in 1..=GC_ROUNDS_MAX {
        let scanned = scan_tables(inner, tree)?;
        let files: Vec<BlobGarbageStats> = match round {
            GC_ROUNDS_MAX => scanned.files.iter().map(|file| file.without_hidden()).collect(),
            _ => scanned.files.clone(),
        };
        freed += match next_blob_gc_step(&files, goal) {
            BlobGcStep::Done => break,
            BlobGcStep::CompactTables => compact_hidden(inner, partition, through, &scanned)?,
            BlobGcStep::RewriteFiles(chosen) => rewrite_files(inner, partition, chosen)?,
        };
    }
    partition.tree()?;
    remove_obsolete_files(inner);
    Ok(freed)
}

/// Compacts all records up to `through` to the bottom level, and rewrites the bottom tables that may contain hidden
/// blob pointers. Returns the freed bytes.
fn compact_hidden(
    inner: &DbInner,
    partition: &Arc<PartitionState>,
    through: SeqNo,
    scanned: &BlobScanResult,
) -> Result<u64> {
    let mut freed = 0;
    while let Some(report) = compact_step(inner, partition, |tree| tree.compact_to_bottom(through, inner))? {
        freed += report.bytes_freed;
    }
    // Tables of the bottom level may contain hidden versions that were retained for readers that have ended. The
    // compactions above have rewritten most of these tables.
    while let Some(report) =
        compact_step(inner, partition, |tree| tree.rewrite_bottom_tables(&scanned.tables_hiding_garbage, inner))?
    {
        freed += report.bytes_freed;
    }
    Ok(freed)
}

/// Runs one compaction; returns `None` if `work` found nothing to compact.
fn compact_step(
    inner: &DbInner,
    partition: &Arc<PartitionState>,
    work: impl Fn(&LsmTree) -> Result<Option<TaskReport>>,
) -> Result<Option<TaskReport>> {
    inner.writer()?;
    let mut compacted = None;
    run_lsm_task(inner, partition, Task::Compact, |tree| {
        compacted = work(tree)?;
        Ok(compacted.unwrap_or_default())
    })?;
    Ok(compacted)
}

/// Rewrites the chosen files, and returns the freed bytes. Skips damaged files, and returns the first such error after
/// all other files are rewritten.
fn rewrite_files(inner: &DbInner, partition: &Arc<PartitionState>, mut chosen: Vec<FileNumber>) -> Result<u64> {
    let (mut freed, mut failed) = (0, Ok(()));
    while !chosen.is_empty() {
        inner.writer()?;
        let tree = partition.tables()?;
        match run_lsm_task(inner, partition, Task::BlobGc, |tree| tree.run_blob_gc(&chosen, true, inner)) {
            Ok(report) => freed += report.bytes_freed,
            Err(error) => {
                let damaged = tree.damaged_blob_file(&error).filter(|file| chosen.contains(file));
                let Some(damaged) = damaged else { return Err(error) };
                chosen.retain(|file| *file != damaged);
                failed = failed.and(Err(error));
            }
        }
        let version = tree.version();
        chosen.retain(|file| version.blobs().contains(*file));
    }
    failed.map(|()| freed)
}

/// Reports how much of a partition's blob files is stale. Bytes are those of values as stored, without file headers
/// and indexes.
///
/// A value is *stale* when no reader can read it any more. It is *pinned* when only snapshots and iterators from
/// before it was overwritten or removed can read it; it becomes stale when they are dropped.
///
/// ```
/// # use azekura::{Config, GarbageCollection, KvSeparationOptions, PartitionCreateOptions};
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = Config::new(dir.path().join("db")).workers(0).open()?;
/// # let separation = KvSeparationOptions::default().automatic_gc(None);
/// # let pages = db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(separation))?;
/// pages.insert("page", vec![1; 5_000])?;
/// let before = db.snapshot();
/// pages.insert("page", vec![2; 5_000])?;
/// let report = pages.gc_scan()?;
/// assert_eq!((report.total_blobs, report.stale_blobs), (2, 0));
/// assert_eq!(report.pinned_bytes * 2, report.total_bytes);
/// drop(before);
/// assert_eq!(pages.gc_scan()?.stale_blobs, 1);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct GcReport {
    /// Number of blob files.
    pub segment_count: usize,
    /// Number of blob files in which every value is stale.
    pub stale_segment_count: usize,
    /// Bytes of stale values.
    pub stale_bytes: u64,
    /// Bytes of all values in blob files.
    pub total_bytes: u64,
    /// Bytes of pinned values; not included in `stale_bytes`.
    pub pinned_bytes: u64,
    /// Number of stale values.
    pub stale_blobs: u64,
    /// Number of values in blob files.
    pub total_blobs: u64,
}

impl GcReport {
    pub(crate) fn of(files: &[BlobGarbageStats]) -> GcReport {
        GcReport {
            segment_count: files.len(),
            stale_segment_count: files.iter().filter(|file| file.retained_bytes == 0).count(),
            stale_bytes: files.iter().map(BlobGarbageStats::stale).sum(),
            total_bytes: files.iter().map(|file| file.bytes).sum(),
            pinned_bytes: files.iter().map(BlobGarbageStats::pinned).sum(),
            stale_blobs: files.iter().map(|file| file.values.saturating_sub(file.retained_values)).sum(),
            total_blobs: files.iter().map(|file| file.values).sum(),
        }
    }

    /// Returns the space amplification: bytes of values that are not pinned per byte that a new reader can read. 1
    /// means that no value is stale; infinite if all values are stale.
    ///
    /// ```
    /// let mut report = azekura::GcReport::default();
    /// assert_eq!(report.space_amp(), 1.0); // no values
    /// (report.total_bytes, report.stale_bytes) = (3_000, 1_000);
    /// assert_eq!(report.space_amp(), 1.5); // 3,000 bytes are stored for 2,000 bytes of values
    /// ```
    pub fn space_amp(&self) -> f32 {
        let counted = self.total_bytes.saturating_sub(self.pinned_bytes);
        match counted.saturating_sub(self.stale_bytes) {
            _ if counted == 0 => 1.0,
            0 => f32::INFINITY,
            live => (counted as f64 / live as f64) as f32,
        }
    }

    /// Returns the stale share of the bytes, 0 to 1.
    ///
    /// ```
    /// let mut report = azekura::GcReport::default();
    /// assert_eq!(report.stale_ratio(), 0.0); // no values
    /// (report.total_bytes, report.stale_bytes) = (4_000, 1_000);
    /// assert_eq!(report.stale_ratio(), 0.25);
    /// ```
    pub fn stale_ratio(&self) -> f32 {
        if self.total_bytes == 0 { 0.0 } else { (self.stale_bytes as f64 / self.total_bytes as f64) as f32 }
    }
}

impl fmt::Display for GcReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = self.stale_ratio() * 100.0;
        writeln!(f, "blob files        {:>12}   {} fully stale", self.segment_count, self.stale_segment_count)?;
        writeln!(f, "values            {:>12}   {} stale", self.total_blobs, self.stale_blobs)?;
        let (total, stale) = (ByteCount(self.total_bytes).to_string(), ByteCount(self.stale_bytes));
        writeln!(f, "bytes of values   {total:>12}   {stale} stale ({percent:.1} %)")?;
        if self.pinned_bytes > 0 {
            let pinned = ByteCount(self.pinned_bytes).to_string();
            writeln!(f, "pinned            {pinned:>12}   readable by older snapshots and iterators only")?;
        }
        write!(f, "space amplification {:>10.2}", self.space_amp())
    }
}

/// Formats bytes with a binary unit.
struct ByteCount(u64);

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let (mut value, mut unit) = (self.0 as f64, 0);
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            (value, unit) = (value / 1024.0, unit + 1);
        }
        let digits = if unit == 0 { 0 } else { 1 };
        write!(f, "{value:.digits$} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::version_edit::FileNumber;

    #[test]
    fn report_sums_files_and_prints() {
        let file = |id, values, bytes, retained_values, retained_bytes, live_bytes| BlobGarbageStats {
            id: FileNumber(id),
            values,
            bytes,
            referenced_bytes: bytes,
            retained_values,
            retained_bytes,
            live_bytes,
        };
        let report = GcReport::of(&[file(1, 10, 4096, 0, 0, 0), file(2, 20, 8192, 15, 6144, 4096)]);
        assert_eq!((report.segment_count, report.stale_segment_count), (2, 1));
        assert_eq!((report.total_bytes, report.stale_bytes, report.pinned_bytes), (12288, 6144, 2048));
        assert_eq!((report.total_blobs, report.stale_blobs), (30, 15));
        assert_eq!((report.space_amp(), report.stale_ratio()), (2.5, 0.5));
        let expected = "\
blob files                   2   1 fully stale
values                      30   15 stale
bytes of values       12.0 KiB   6.0 KiB stale (50.0 %)
pinned                 2.0 KiB   readable by older snapshots and iterators only
space amplification       2.50";
        assert_eq!(report.to_string(), expected);
    }

    #[test]
    fn space_amp_is_1_when_nothing_is_stale() {
        let empty = GcReport::default();
        assert_eq!((empty.space_amp(), empty.stale_ratio()), (1.0, 0.0));
        let stale = GcReport { total_bytes: 10, stale_bytes: 10, ..GcReport::default() };
        assert_eq!((stale.space_amp(), stale.stale_ratio()), (f32::INFINITY, 1.0));
        let pinned = GcReport { total_bytes: 10, pinned_bytes: 10, ..GcReport::default() };
        assert_eq!(pinned.space_amp(), 1.0);
        assert_eq!(ByteCount(1023).to_string(), "1023 B");
        assert_eq!(ByteCount(u64::MAX).to_string(), "16777216.0 TiB");
    }
}

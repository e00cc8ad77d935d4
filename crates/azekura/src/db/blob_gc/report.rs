//! Result of a scan of the blob files.

use std::fmt;

use crate::lsm::blob_gc::picker::BlobGarbageStats;

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
/// # let db = Config::new(dir.path().join("db")).open()?;
/// # let apart = KvSeparationOptions::default().automatic_gc(None);
/// # let pages = db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(apart))?;
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
    /// assert_eq!(azekura::GcReport::default().space_amp(), 1.0, "there is nothing");
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
    /// assert_eq!(azekura::GcReport::default().stale_ratio(), 0.0, "there is nothing");
    /// ```
    pub fn stale_ratio(&self) -> f32 {
        if self.total_bytes == 0 { 0.0 } else { (self.stale_bytes as f64 / self.total_bytes as f64) as f32 }
    }
}

impl fmt::Display for GcReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = self.stale_ratio() * 100.0;
        writeln!(f, "blob files        {:>12}   {} stale as a whole", self.segment_count, self.stale_segment_count)?;
        writeln!(f, "values            {:>12}   {} stale", self.total_blobs, self.stale_blobs)?;
        let (total, stale) = (ByteCount(self.total_bytes).to_string(), ByteCount(self.stale_bytes));
        writeln!(f, "bytes of values   {total:>12}   {stale} stale ({percent:.1} %)")?;
        if self.pinned_bytes > 0 {
            let pinned = ByteCount(self.pinned_bytes).to_string();
            writeln!(f, "pinned            {pinned:>12}   seen by older snapshots and iterators only")?;
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
    fn figures_add_up_and_print() {
        let file = |id, values, bytes, kept_values, kept_bytes, live_bytes| BlobGarbageStats {
            id: FileNumber(id),
            values,
            bytes,
            referenced_bytes: bytes,
            retained_values: kept_values,
            retained_bytes: kept_bytes,
            live_bytes,
        };
        let report = GcReport::of(&[file(1, 10, 4096, 0, 0, 0), file(2, 20, 8192, 15, 6144, 4096)]);
        assert_eq!((report.segment_count, report.stale_segment_count), (2, 1));
        assert_eq!((report.total_bytes, report.stale_bytes, report.pinned_bytes), (12288, 6144, 2048));
        assert_eq!((report.total_blobs, report.stale_blobs), (30, 15));
        assert_eq!((report.space_amp(), report.stale_ratio()), (2.5, 0.5));
        let wanted = "\
blob files                   2   1 stale as a whole
values                      30   15 stale
bytes of values       12.0 KiB   6.0 KiB stale (50.0 %)
pinned                 2.0 KiB   seen by older snapshots and iterators only
space amplification       2.50";
        assert_eq!(report.to_string(), wanted);
    }

    #[test]
    fn empty_report_has_space_amp_1() {
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

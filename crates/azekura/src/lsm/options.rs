//! Options of a tree.

use crate::base::compression::CompressionType;
use crate::base::options::options;
use crate::base::{Error, Result};
use crate::table::options::{TableOptions, TableReadOptions};

/// The options of one LSM tree. A change applies to files that are written from then on, and to tables that are opened
/// from then on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LsmOptions {
    /// A memtable that holds at least this many bytes is sealed.
    pub(crate) max_memtable_size: u64,
    pub(crate) compaction: LeveledOptions,
    /// How tables are built. Its `compression` applies to levels that `compression_per_level` does not have.
    pub(crate) table: TableOptions,
    /// By level. The last one also applies to deeper levels. If empty, `table.compression` applies to all levels.
    pub(crate) compression_per_level: Vec<CompressionType>,
    /// `None`: every value is stored in a table with its key.
    pub(crate) kv_separation: Option<KvSeparationOptions>,
}

#[cfg(test)]
impl Default for LsmOptions {
    fn default() -> LsmOptions {
        LsmOptions {
            max_memtable_size: 64 << 20,
            compaction: LeveledOptions::default(),
            table: TableOptions::default(),
            compression_per_level: Vec::new(),
            kv_separation: None,
        }
    }
}

/// Flushed range tombstones may take one part in this many of the size of a memtable.
const RANGE_TOMBSTONE_SHARE: u64 = 4;
/// The least limit of the bytes of flushed range tombstones.
const RANGE_TOMBSTONE_BYTES_MIN: u64 = 64 << 10;

impl LsmOptions {
    pub(crate) fn compression_at(&self, level: u8) -> CompressionType {
        let list = &self.compression_per_level;
        list.get(usize::from(level)).or(list.last()).copied().unwrap_or(self.table.compression)
    }

    /// Bytes of flushed range tombstones in memory above which tables are compacted to drop some, and writers are
    /// slowed.
    pub(crate) fn range_tombstone_bytes_max(&self) -> u64 {
        (self.max_memtable_size / RANGE_TOMBSTONE_SHARE).max(RANGE_TOMBSTONE_BYTES_MIN)
    }

    /// The table options for `level`.
    pub(crate) fn table_options(&self, level: u8) -> TableOptions {
        TableOptions { compression: self.compression_at(level), ..self.table.clone() }
    }

    /// Values of at least this many bytes are direct blob writes, in commits that request no sync and in those that do.
    pub(crate) fn direct_write_thresholds(&self) -> [u64; 2] {
        self.kv_separation.as_ref().map_or([u64::MAX; 2], |options| {
            [options.direct_write_threshold, options.synced_direct_write_threshold]
                .map(|threshold| threshold.max(options.separation_threshold).into())
        })
    }

    /// The options with which tables on `level` are opened.
    pub(crate) fn read_options(&self, level: u8) -> TableReadOptions {
        TableReadOptions::for_level(&self.table, level)
    }
}

options! {
    /// The options of leveled compaction. Flushes add runs to level 0. Every deeper level is one sorted run, and its
    /// size target is `level_size_multiplier` times that of the level above.
    ///
    /// ```
    /// use azekura::{CompactionStrategy, LeveledOptions, PartitionCreateOptions};
    /// let small_files = LeveledOptions::default().target_file_size(8 << 20).base_level_size(32 << 20);
    /// let options = PartitionCreateOptions::default().compaction_strategy(CompactionStrategy::Leveled(small_files));
    /// assert_ne!(options, PartitionCreateOptions::default());
    /// ```
    #[derive(Clone, Debug, PartialEq, Eq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
    #[non_exhaustive]
    pub struct LeveledOptions {
        /// Sets the number of runs at which level 0 is compacted, 1 to 1,000. Default 4.
        ///
        /// ```
        /// # use azekura::LeveledOptions;
        /// let write_heavy = LeveledOptions::default().l0_compaction_trigger(8); // fewer compactions, slower reads
        /// assert_ne!(write_heavy, LeveledOptions::default().l0_compaction_trigger(4)); // 4 is the default
        /// # assert_eq!(LeveledOptions::default().l0_compaction_trigger(4), LeveledOptions::default());
        /// ```
        [7] l0_compaction_trigger(runs): u32 = 4, in 1..=1_000;

        /// Sets the size in bytes after which a table is finished, at the next new user key, 4 KiB to 16 GiB. Default
        /// 64 MiB.
        ///
        /// ```
        /// # fn main() -> azekura::Result<()> {
        /// # let dir = tempfile::tempdir().unwrap();
        /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
        /// # use azekura::{CompactionStrategy, LeveledOptions, PartitionCreateOptions};
        /// let small = LeveledOptions::default().target_file_size(4 << 10);
        /// # let small = PartitionCreateOptions::default().compaction_strategy(CompactionStrategy::Leveled(small));
        /// # let log = db.open_partition("log", small.compression(azekura::CompressionType::None))?;
        /// for line in 0..20u8 {
        ///     log.insert([line], [line; 1_000])?;
        /// }
        /// log.major_compact()?;
        /// assert!(log.metrics().levels.last().unwrap().tables >= 4);
        /// # Ok(()) }
        /// ```
        [8] target_file_size(bytes): u64 = 64 << 20, in 4 << 10..=16 << 30;

        /// Sets the ratio of the size targets of adjacent levels, 2 to 100. Default 10.
        ///
        /// ```
        /// # use azekura::LeveledOptions;
        /// let flat = LeveledOptions::default().level_size_multiplier(20); // fewer levels, larger compactions
        /// assert_ne!(flat, LeveledOptions::default().level_size_multiplier(10)); // 10 is the default
        /// # assert_eq!(LeveledOptions::default().level_size_multiplier(10), LeveledOptions::default());
        /// ```
        [9] level_size_multiplier(ratio): u32 = 10, in 2..=100;

        /// Sets the maximum size in bytes of the base level, into which level 0 is compacted, 4 KiB to 1 TiB. Until the
        /// tree has more data, the bottom level is the base level. Default 256 MiB.
        ///
        /// ```
        /// # use azekura::LeveledOptions;
        /// let small = LeveledOptions::default().base_level_size(64 << 20); // deeper levels: 640 MiB, 6.4 GiB, …
        /// assert_ne!(small, LeveledOptions::default().base_level_size(256 << 20)); // 256 MiB is the default
        /// # assert_eq!(LeveledOptions::default().base_level_size(256 << 20), LeveledOptions::default());
        /// ```
        [12] base_level_size(bytes): u64 = 256 << 20, in 4 << 10..=1 << 40;
    }
}

options! {
    /// Key-value separation: a flush writes large values to blob files, so that compactions do not copy them. Values of
    /// 4 KiB and more are written to a blob file before their commit, so that they are written once and use no memory.
    /// If their commit requests a sync, this applies to values of 1 MiB and more.
    /// Changed options apply to values that are written to blob files from then on.
    ///
    /// ```
    /// use azekura::{CompressionType, KvSeparationOptions, PartitionCreateOptions};
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// let large = KvSeparationOptions::default().separation_threshold(4 << 10).compression(CompressionType::Miniz(6));
    /// let pages = db.open_partition("pages", PartitionCreateOptions::default().with_kv_separation(large))?;
    /// pages.insert("4,000 bytes", vec![7; 4_000])?; // stays in the table
    /// pages.insert("5,000 bytes", vec![7; 5_000])?;
    /// pages.flush()?;
    /// assert_eq!(pages.metrics().blob_files[0].values, 1);
    /// # Ok(()) }
    /// ```
    #[derive(Clone, Debug, PartialEq)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
    #[non_exhaustive]
    pub struct KvSeparationOptions {
        /// Values of at least this many bytes go to blob files, 1 or more. Default 1 KiB. Values below 512 bytes cost
        /// more than they save: a pointer, a frame around each value and a separate read.
        ///
        /// ```
        /// # use azekura::KvSeparationOptions;
        /// let default = KvSeparationOptions::default();
        /// assert_eq!(default.clone().separation_threshold(1 << 10), default);
        /// ```
        [1] separation_threshold(bytes): u32 = 1 << 10, in 1..=u32::MAX;

        /// A blob file is finished at this size in bytes, 1 KiB to 64 GiB. Default 64 MiB. With smaller files blob GC
        /// copies less per freed byte, and there are more files.
        ///
        /// ```
        /// # use azekura::KvSeparationOptions;
        /// let default = KvSeparationOptions::default();
        /// assert_eq!(default.clone().blob_file_target_size(64 << 20), default);
        /// ```
        [2] blob_file_target_size(bytes): u64 = 64 << 20, in 1 << 10..=64 << 30;

        /// The codec of values in blob files, independent of the codec of tables. Default LZ4. Each value is compressed
        /// separately. Existing values keep their codec.
        ///
        /// ```
        /// # use azekura::{CompressionType, KvSeparationOptions};
        /// let pages = KvSeparationOptions::default().compression(CompressionType::Miniz(6));
        /// let pictures = KvSeparationOptions::default().compression(CompressionType::None);
        /// # assert_ne!(pages, pictures);
        /// ```
        [3] compression(compression): CompressionType = CompressionType::default(), check |codec| codec.check();

        /// The space amplification that background blob GC keeps, at least 1: bytes of blob files for each byte that is
        /// still referenced. Default 1.5; `None` turns background blob GC off.
        ///
        /// Values that no compaction has processed count as referenced. Therefore the target leaves a margin, tables
        /// that may hide many stale bytes are compacted earlier, and a memtable that may is flushed after one or two
        /// seconds without writes, or before it is full if it is much smaller than these stale bytes. The target holds
        /// at rest, as long as snapshots and iterators pin no values, and approximately during writes: writers are not
        /// slowed for it, so writes that are faster than the copying of values can exceed it for a while.
        ///
        /// ```
        /// # use azekura::KvSeparationOptions;
        /// let default = KvSeparationOptions::default();
        /// assert_eq!(default.clone().automatic_gc(Some(1.5)), default);
        /// let left_to_me = default.automatic_gc(None); // call GarbageCollection instead
        /// ```
        [4] automatic_gc(space_amp): Option<f32> = Some(1.5), check check_space_amp;

        direct_write_threshold: #[cfg_attr(feature = "serde", serde(skip))] u32 = DIRECT_WRITE_THRESHOLD;
        synced_direct_write_threshold: #[cfg_attr(feature = "serde", serde(skip))] u32 = SYNCED_DIRECT_WRITE_THRESHOLD;
    }
}

/// Values of at least this many bytes are written to a blob file before their commit, if that requests no sync. The WAL
/// and the memtable then contain only the pointer.
const DIRECT_WRITE_THRESHOLD: u32 = 4 << 10;
/// The same for commits that request a sync. They sync the blob file too, which costs more than writing a smaller value
/// twice.
const SYNCED_DIRECT_WRITE_THRESHOLD: u32 = 1 << 20;

impl KvSeparationOptions {
    /// Same as [`separation_threshold`](KvSeparationOptions::separation_threshold).
    ///
    /// ```
    /// # use azekura::KvSeparationOptions;
    /// let large = KvSeparationOptions::default().blob_file_separation_threshold(64 << 10);
    /// assert_eq!(large, KvSeparationOptions::default().separation_threshold(64 << 10));
    /// ```
    #[must_use]
    pub fn blob_file_separation_threshold(self, bytes: u32) -> Self {
        self.separation_threshold(bytes)
    }

    /// For tests: the size in bytes from which on values are direct blob writes, with and without a requested sync.
    /// Applies until the partition is opened without it.
    #[doc(hidden)]
    #[must_use]
    pub fn direct_write_threshold(mut self, bytes: u32) -> Self {
        (self.direct_write_threshold, self.synced_direct_write_threshold) = (bytes, bytes);
        self
    }
}

fn check_space_amp(target: &Option<f32>) -> Result<()> {
    match target {
        Some(target) if !(*target >= 1.0 && target.is_finite()) => {
            Err(Error::invalid(format!("automatic_gc is {target}, a space amplification is at least 1")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::options::OptionTable;

    #[test]
    fn last_given_codec_serves_deeper_levels() {
        let mut options = LsmOptions::default();
        assert_eq!(options.compression_at(3), options.table.compression);
        options.compression_per_level = vec![CompressionType::None, CompressionType::Miniz(3)];
        assert_eq!(options.compression_at(0), CompressionType::None);
        assert_eq!(options.compression_at(6), CompressionType::Miniz(3));
        assert_eq!(options.table_options(6).compression, CompressionType::Miniz(3));
    }

    #[test]
    fn options_out_of_range_are_invalid() {
        let default = KvSeparationOptions::default;
        default().separation_threshold(1).blob_file_target_size(1 << 10).automatic_gc(None).check_ranges().unwrap();
        default().blob_file_separation_threshold(u32::MAX).automatic_gc(Some(1.0)).check_ranges().unwrap();
        for bad in [
            default().separation_threshold(0),
            default().blob_file_target_size(1023),
            default().blob_file_target_size(u64::MAX),
            default().compression(CompressionType::Miniz(11)),
            default().automatic_gc(Some(0.99)),
            default().automatic_gc(Some(f32::NAN)),
            default().automatic_gc(Some(f32::INFINITY)),
        ] {
            assert_eq!(bad.check_ranges().unwrap_err().kind(), crate::base::ErrorKind::Invalid, "{bad:?}");
        }
    }
}

//! Metrics of a database, its cache and its partitions: plain structs with text tables as `Display`.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::base::SeqNo;
use crate::base::event::DroppedAfterDamage;
use crate::block::cache::{BlockCache, CacheStats};
use crate::block::frame::BlockKind;
use crate::db::inner::DbInner;
use crate::db::partition_state::PartitionState;
use crate::db::state::change_readers::ChangeReader;
use crate::engine::Engine;
use crate::lsm::blob_map::BlobFileMetrics;
use crate::lsm::metrics::LevelMetrics;
use crate::pmem::pool::metrics::PoolMetrics;
use crate::tree::partition_tree::PartitionTree;
use crate::wal::WalSegmentInfo;

/// Cache counters of one kind of block.
///
/// Each read that requests a block counts once, in a counter of its thread. The sums are exact when no read is
/// running; otherwise they may omit running reads.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).workers(0).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// fruit.insert("apple", "red")?;
/// fruit.flush()?;
/// for _ in 0..10 {
///     fruit.get("apple")?;
/// }
/// let data = db.metrics().cache.data;
/// assert_eq!((data.hits + data.misses, data.blocks), (10, 1));
/// # assert!(data.bytes > 0);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct BlockKindMetrics {
    /// Reads that found the block in the cache.
    pub hits: u64,
    /// Reads that loaded the block.
    pub misses: u64,
    /// Blocks in the cache now.
    pub blocks: u64,
    /// Bytes of these blocks.
    pub bytes: u64,
}

/// Metrics of the block cache.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).workers(0).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// # fruit.insert("apple", "red")?;
/// # fruit.flush()?;
/// # for _ in 0..10 {
/// #     fruit.get("apple")?;
/// # }
/// let cache = db.metrics().cache;
/// let kinds = [cache.data, cache.index, cache.filter, cache.blob];
/// let hits: u64 = kinds.iter().map(|kind| kind.hits).sum();
/// let reads: u64 = kinds.iter().map(|kind| kind.hits + kind.misses).sum();
/// assert!(hits as f64 / reads as f64 > 0.8); // a larger cache has a higher ratio
/// assert!(cache.used <= cache.capacity);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct CacheMetrics {
    /// Capacity in bytes.
    pub capacity: u64,
    /// Bytes in use now, including evicted blocks that a reader may still use and the table of links to values; never
    /// above `capacity`.
    pub used: u64,
    /// Bytes of blocks that are pinned until their table is removed; included in `used`.
    pub pinned: u64,
    /// Data blocks.
    pub data: BlockKindMetrics,
    /// Index partitions and top-level indexes.
    pub index: BlockKindMetrics,
    /// Filter partitions and top-level filters.
    pub filter: BlockKindMetrics,
    /// Values of blob files, and pages of their indexes.
    pub blob: BlockKindMetrics,
}

impl CacheMetrics {
    fn of(cache: &BlockCache) -> CacheMetrics {
        let CacheStats { capacity, used, pinned, kinds } = cache.stats();
        let mut metrics = CacheMetrics { capacity, used, pinned, ..CacheMetrics::default() };
        for (kind, stats) in BlockKind::CACHED.iter().zip(&kinds) {
            let sum = match kind {
                BlockKind::IndexPartition | BlockKind::TopLevelIndex => &mut metrics.index,
                BlockKind::FilterPartition | BlockKind::TopLevelFilter => &mut metrics.filter,
                BlockKind::Blob | BlockKind::BlobIndex => &mut metrics.blob,
                _ => &mut metrics.data,
            };
            sum.hits += stats.1.hits;
            sum.misses += stats.1.misses;
            sum.blocks += stats.1.blocks;
            sum.bytes += stats.1.bytes;
        }
        metrics
    }
}

/// Metrics of a reader of changes.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// let changes = db.changes_since(db.change_position()?)?.named("search index");
/// fruit.insert("apple", "red")?;
/// let reader = db.metrics().change_readers.remove(0);
/// assert_eq!((&*reader.name, reader.records_behind, reader.retained_bytes), ("search index", 1, 0));
/// # drop(changes);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct ChangeReaderMetrics {
    /// The name that the reader was given; empty by default.
    pub name: String,
    /// Records that the reader has not returned yet.
    pub records_behind: u64,
    /// Bytes of WAL segments that no partition needs, with commits that the reader has not returned yet.
    pub retained_bytes: u64,
}

impl ChangeReaderMetrics {
    fn of(reader: &ChangeReader, retained: &[WalSegmentInfo], visible: SeqNo) -> ChangeReaderMetrics {
        let through = reader.read_through();
        let unread = retained.iter().filter(|segment| segment.last_seqno > through);
        ChangeReaderMetrics {
            name: reader.name(),
            records_behind: visible.0.saturating_sub(through.0),
            retained_bytes: unread.map(|segment| segment.end_offset).sum(),
        }
    }
}

/// Metrics of a database since it was opened. Fields are counts unless the name or the text gives a unit.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).workers(0).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// fruit.insert("apple", "red")?;
/// fruit.flush()?;
/// let metrics = db.metrics();
/// assert_eq!((metrics.records, metrics.flushes, metrics.user_bytes > 0), (1, 1, true));
/// assert!(metrics.to_string().contains("write amplification")); // a table of all metrics
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Metrics {
    /// Partitions that exist now.
    pub partitions: usize,
    /// Commits, each with one or more records.
    pub commits: u64,
    /// Records in these commits.
    pub records: u64,
    /// Commits that another commit has interfered with: those that returned `Conflict`, and each repeated round of
    /// [`transact`](crate::Database::transact), of an operation on a single key, or of a merge in a pool.
    pub conflicts: u64,
    /// Exclusive turns of transactions and of repeated rounds. All other commits waited in each.
    pub exclusive_turns: u64,
    /// Bytes of commits as submitted: keys, values and a few bytes of header per record.
    pub user_bytes: u64,
    /// Bytes written to the WAL.
    pub wal_bytes: u64,
    /// Bytes, as stored, of large values written directly to blob files before their commit. The WAL contains only
    /// pointers to them.
    pub direct_blob_bytes: u64,
    /// Syncs of the WAL.
    pub wal_syncs: u64,
    /// Bytes of all WAL segments now.
    pub wal_live_bytes: u64,
    /// WAL segments now.
    pub wal_segments: usize,
    /// Bytes of WAL segments that are kept for readers of changes only.
    pub wal_retained_bytes: u64,
    /// The readers of changes, in the order in which they were created.
    pub change_readers: Vec<ChangeReaderMetrics>,
    /// Flushes.
    pub flushes: u64,
    /// Bytes of tables and blob files written by flushes, without values that were written to a blob file directly
    /// before.
    pub flushed_bytes: u64,
    /// Calls of [`Partition::ingest`](crate::Partition::ingest) and [`bulk`](crate::Partition::bulk) that added tables
    /// to an LSM partition.
    pub ingests: u64,
    /// Bytes of tables and blob files written by these calls, without temporary files.
    pub ingested_bytes: u64,
    /// Compactions that rewrote tables.
    pub compactions: u64,
    /// Compactions that only moved tables to the next level without rewriting them.
    pub trivial_moves: u64,
    /// Bytes of tables read by compactions.
    pub compaction_bytes_read: u64,
    /// Bytes of tables written by compactions.
    pub compaction_bytes_written: u64,
    /// Blob GC runs.
    pub blob_gc_runs: u64,
    /// Bytes of values read by blob GC.
    pub blob_gc_bytes_read: u64,
    /// Bytes of blob files written by blob GC.
    pub blob_gc_bytes_written: u64,
    /// Bytes reclaimed by deleting blob files, minus bytes rewritten by blob GC.
    ///
    /// Includes automatic and requested blob GC, and blob files that a compaction deleted because no table referred
    /// to them any more.
    pub blob_bytes_freed: u64,
    /// Bytes of the manifest now.
    pub manifest_bytes: u64,
    /// Bytes of all memtables now: the sum of the next three fields. [`Config::memory_budget`](crate::Config) bounds
    /// it except for the memtables that iterators hold.
    pub memtable_bytes: u64,
    /// Bytes of active memtables.
    pub active_memtable_bytes: u64,
    /// Bytes of sealed memtables, which wait for a flush.
    pub sealed_memtable_bytes: u64,
    /// Bytes of memtables that were flushed, or whose partition was deleted, and that iterators and running reads
    /// still hold.
    pub pinned_memtable_bytes: u64,
    /// Bytes of flushed memtables that are kept for the next ones. As long as there are some, they and
    /// [`memtable_bytes`](Metrics::memtable_bytes) are within the memory budget together.
    pub spare_memtable_bytes: u64,
    /// Time that writers waited in write stalls, summed over all writers.
    pub stall_time: Duration,
    /// Metrics of the block cache.
    pub cache: CacheMetrics,
    /// WAL records replayed when the database was opened.
    pub replayed_records: u64,
    /// Time that opening took.
    pub recovery_time: Duration,
    /// WAL frames after a damaged position that recovery dropped when the database was opened; `None` if it dropped
    /// none.
    pub dropped_after_damage: Option<DroppedAfterDamage>,
    /// Open snapshots and iterators, clones included.
    pub open_snapshots: usize,
    /// Records written since the oldest open snapshot was taken. The versions that they replaced or removed are kept
    /// for it.
    pub oldest_snapshot_age: u64,
    /// Whether a failure poisoned the database: writes fail, reads continue.
    pub poisoned: bool,
}

impl Metrics {
    /// Metrics of 0 in a forked child, which may wait forever for a lock.
    pub(crate) fn of(inner: &DbInner) -> Metrics {
        if inner.is_forked() {
            return Metrics::default();
        }
        let counters = &inner.counters;
        let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let partitions = inner.catalog.all();
        let mut metrics = Metrics {
            partitions: partitions.len(),
            user_bytes: counters.user_bytes.sum(),
            conflicts: load(&counters.conflicts),
            exclusive_turns: load(&counters.exclusive_turns),
            direct_blob_bytes: load(&counters.direct_blob_bytes),
            flushes: load(&counters.flushes),
            flushed_bytes: load(&counters.flushed_bytes),
            ingests: load(&counters.ingests),
            ingested_bytes: load(&counters.ingested_bytes),
            compactions: load(&counters.compactions),
            trivial_moves: load(&counters.trivial_moves),
            compaction_bytes_read: load(&counters.compaction_bytes_read),
            compaction_bytes_written: load(&counters.compaction_bytes_written),
            blob_gc_runs: load(&counters.blob_gc_runs),
            blob_gc_bytes_read: load(&counters.blob_gc_bytes_read),
            blob_gc_bytes_written: load(&counters.blob_gc_bytes_written),
            blob_bytes_freed: load(&counters.blob_bytes_freed),
            stall_time: Duration::from_nanos(inner.write_controller.stall_ns()),
            cache: CacheMetrics::of(&inner.catalog.resources().cache),
            replayed_records: inner.recovery_stats.records,
            recovery_time: Duration::from_nanos(inner.recovery_stats.elapsed_ns),
            dropped_after_damage: inner.recovery_stats.dropped_after_damage.clone(),
            open_snapshots: inner.snapshots.count(),
            oldest_snapshot_age: inner.last_visible.get().0.saturating_sub(inner.snapshots.oldest().0),
            poisoned: inner.poison.is_set(),
            wal_live_bytes: inner.recovery_stats.wal_bytes,
            wal_segments: inner.recovery_stats.wal_segments,
            manifest_bytes: inner.recovery_stats.manifest_bytes,
            ..Metrics::default()
        };
        for tree in partitions.iter().filter_map(|partition| partition.tables_if_built()) {
            let memtables = tree.metrics();
            metrics.active_memtable_bytes += memtables.memtable_bytes;
            metrics.sealed_memtable_bytes += memtables.sealed_bytes;
        }
        // The total is read last, so that memtables sealed or flushed during the loop are included.
        let in_use = metrics.active_memtable_bytes + metrics.sealed_memtable_bytes;
        metrics.memtable_bytes = inner.write_buffers.memory_usage().max(in_use);
        metrics.pinned_memtable_bytes = metrics.memtable_bytes - in_use;
        // Memtables that were flushed after the total was read are not counted twice.
        let unused = inner.settings.memory_budget.saturating_sub(metrics.memtable_bytes);
        metrics.spare_memtable_bytes = inner.write_buffers.spare_bytes().min(unused);
        if let Some(writer) = &inner.writer {
            (metrics.commits, metrics.records) = writer.committer.counts();
            let wal = writer.wal.stats();
            (metrics.wal_bytes, metrics.wal_syncs) = (wal.bytes, wal.syncs);
            metrics.wal_live_bytes = writer.wal.live_bytes();
            metrics.wal_segments = writer.wal.segments().len();
            metrics.manifest_bytes = writer.version_set.manifest_bytes();
            let retained = writer.wal.retained_segments();
            metrics.wal_retained_bytes = retained.iter().map(|segment| segment.end_offset).sum();
            let readers = writer.wal_maintenance.change_readers.all();
            metrics.change_readers = readers
                .iter()
                .map(|reader| ChangeReaderMetrics::of(reader, &retained, inner.last_visible.get()))
                .collect();
        }
        metrics
    }

    /// Returns bytes written to disk (WAL, direct blob writes, flushes, ingests, compactions, blob GC) per byte that
    /// callers wrote; 0 before the first write.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).workers(0).open()?;
    /// # let log = db.open_partition("log", Default::default())?;
    /// # assert_eq!(db.metrics().write_amplification(), 0.0);
    /// for line in 0..100u32 {
    ///     log.insert(line.to_be_bytes(), [7; 100])?;
    /// }
    /// assert!(db.metrics().write_amplification() < 1.5); // only the WAL
    /// # Ok(()) }
    /// ```
    pub fn write_amplification(&self) -> f64 {
        let background = self.compaction_bytes_written + self.blob_gc_bytes_written;
        let written = self.wal_bytes + self.direct_blob_bytes + self.flushed_bytes + self.ingested_bytes + background;
        if self.user_bytes == 0 { 0.0 } else { written as f64 / self.user_bytes as f64 }
    }
}

impl fmt::Display for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, value: String| writeln!(f, "{name:<26}{value:>18}");
        row("partitions", self.partitions.to_string())?;
        row("commits", self.commits.to_string())?;
        row("records", self.records.to_string())?;
        row("conflicts", self.conflicts.to_string())?;
        row("exclusive turns", self.exclusive_turns.to_string())?;
        row("bytes from callers", self.user_bytes.to_string())?;
        row("WAL bytes", self.wal_bytes.to_string())?;
        row("direct blob bytes", self.direct_blob_bytes.to_string())?;
        row("WAL syncs", self.wal_syncs.to_string())?;
        row("WAL live bytes", self.wal_live_bytes.to_string())?;
        row("WAL segments", self.wal_segments.to_string())?;
        row("WAL retained bytes", self.wal_retained_bytes.to_string())?;
        row("flushes", self.flushes.to_string())?;
        row("flushed bytes", self.flushed_bytes.to_string())?;
        row("ingests", self.ingests.to_string())?;
        row("ingested bytes", self.ingested_bytes.to_string())?;
        row("compactions", self.compactions.to_string())?;
        row("trivial moves", self.trivial_moves.to_string())?;
        row("compaction bytes read", self.compaction_bytes_read.to_string())?;
        row("compaction bytes written", self.compaction_bytes_written.to_string())?;
        row("blob GC runs", self.blob_gc_runs.to_string())?;
        row("blob GC bytes read", self.blob_gc_bytes_read.to_string())?;
        row("blob GC bytes written", self.blob_gc_bytes_written.to_string())?;
        row("blob bytes freed", self.blob_bytes_freed.to_string())?;
        row("write amplification", format!("{:.2}", self.write_amplification()))?;
        row("memtable bytes", self.memtable_bytes.to_string())?;
        row("sealed memtable bytes", self.sealed_memtable_bytes.to_string())?;
        row("pinned memtable bytes", self.pinned_memtable_bytes.to_string())?;
        row("spare memtable bytes", self.spare_memtable_bytes.to_string())?;
        row("manifest bytes", self.manifest_bytes.to_string())?;
        row("write stalls, ms", format!("{:.1}", self.stall_time.as_secs_f64() * 1e3))?;
        row("cache used", format!("{} of {}", self.cache.used, self.cache.capacity))?;
        let cache = &self.cache;
        let kinds = [("data", &cache.data), ("index", &cache.index), ("filter", &cache.filter), ("blob", &cache.blob)];
        for (name, kind) in kinds {
            row(&format!("cache {name} hits"), format!("{} of {}", kind.hits, kind.hits + kind.misses))?;
            row(&format!("cache {name} bytes"), kind.bytes.to_string())?;
        }
        row("replayed records", self.replayed_records.to_string())?;
        row("recovery, ms", format!("{:.1}", self.recovery_time.as_secs_f64() * 1e3))?;
        row("snapshots and iterators", self.open_snapshots.to_string())?;
        row("oldest snapshot, records", self.oldest_snapshot_age.to_string())?;
        if let Some(dropped) = &self.dropped_after_damage {
            let frames = format!("{} frames of {}", dropped.frames, dropped.file.display());
            row("dropped after damage", frames)?;
        }
        row("poisoned", self.poisoned.to_string())
    }
}

/// Metrics of one partition.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).workers(0).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// fruit.insert("apple", "red")?;
/// fruit.flush()?;
/// let metrics = fruit.metrics();
/// assert_eq!((metrics.levels.len(), metrics.levels[0].tables), (1, 1));
/// assert_eq!((metrics.disk_bytes, metrics.blob_files.len()), (metrics.levels[0].bytes, 0));
/// assert!(metrics.to_string().starts_with("partition \"fruit\"")); // a table of the levels
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct PartitionMetrics {
    /// Partition name.
    pub name: String,
    /// Levels from level 0 down to the last one that contains a table.
    pub levels: Vec<LevelMetrics>,
    /// Bytes of memtables now, including sealed ones.
    pub memtable_bytes: u64,
    /// Sealed memtables that wait for a flush.
    pub sealed_memtables: usize,
    /// Tombstones of single keys in memtables, including sealed ones. A scan passes over them. A worker flushes a
    /// memtable with 10,000 of them that nothing was written to for a second, and compactions then drop them.
    pub memtable_tombstones: u64,
    /// Bytes of tables and blob files, or of the pool, on disk.
    pub disk_bytes: u64,
    /// Bytes of memory that open tables and blob files hold outside the block cache.
    pub pinned_bytes: u64,
    /// Range tombstones: disjoint ranges of keys that range deletes have removed, and that may still cover entries of
    /// memtables or tables. Overlapping range deletes are cut at their bounds; those that cover nothing are dropped.
    pub range_tombstones: usize,
    /// Estimated bytes of tables that range tombstones cover, as of the last background work.
    pub range_deleted_bytes: u64,
    /// Whether key-value separation is on, or the partition still has blob files.
    pub has_kv_separation: bool,
    /// Blob files by ascending file number. In a blob file that direct writes are still appending to, all values
    /// count as referenced.
    pub blob_files: Vec<BlobFileMetrics>,
    /// Pool metrics, if the engine is [`Pmem`](crate::EngineType::Pmem). Of the other fields only `name` and
    /// `disk_bytes` are then set.
    pub pool: Option<PoolMetrics>,
}

impl PartitionMetrics {
    /// Metrics of 0 in a forked child, which may wait forever for a lock.
    pub(crate) fn of(state: &Arc<PartitionState>, is_forked: bool) -> PartitionMetrics {
        let mut metrics = PartitionMetrics { name: state.name.to_string(), ..PartitionMetrics::default() };
        if is_forked {
            return metrics;
        }
        if let Some(pool) = state.tree_if_built().and_then(PartitionTree::pmem) {
            metrics.pool = Some(pool.metrics());
            metrics.disk_bytes = pool.disk_bytes();
        }
        let Some(tree) = state.tables_if_built() else { return metrics };
        let lsm = tree.metrics();
        metrics.memtable_bytes = lsm.memtable_bytes + lsm.sealed_bytes;
        metrics.sealed_memtables = tree.pressure().sealed_memtables;
        metrics.memtable_tombstones = lsm.memtable_tombstones;
        metrics.pinned_bytes = lsm.pinned_bytes;
        metrics.range_tombstones = lsm.range_tombstones;
        metrics.range_deleted_bytes = lsm.range_deleted_bytes;
        metrics.has_kv_separation = tree.has_kv_separation();
        metrics.levels = lsm.levels;
        while metrics.levels.last().is_some_and(|level| level.tables == 0) {
            metrics.levels.pop();
        }
        metrics.blob_files = lsm.blob_files;
        metrics.blob_files.sort_by_key(|file| file.id);
        metrics.disk_bytes = metrics.levels.iter().map(|level| level.bytes).sum::<u64>() + metrics.blob_bytes();
        metrics
    }

    /// Returns the bytes of blob files on disk.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).workers(0).open()?;
    /// # use azekura::{KvSeparationOptions, PartitionCreateOptions};
    /// # let separated = PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default());
    /// # let photos = db.open_partition("photos", separated)?;
    /// photos.insert("sky", (0..100_000).map(|n| (n % 251) as u8).collect::<Vec<_>>())?;
    /// photos.flush()?;
    /// let metrics = photos.metrics();
    /// assert_eq!(metrics.blob_bytes() + metrics.levels[0].bytes, metrics.disk_bytes);
    /// # Ok(()) }
    /// ```
    pub fn blob_bytes(&self) -> u64 {
        self.blob_files.iter().map(|file| file.bytes).sum()
    }

    /// Returns the bytes of values in blob files that tables point to.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).workers(0).open()?;
    /// # use azekura::{CompressionType, KvSeparationOptions, PartitionCreateOptions};
    /// # let separation = KvSeparationOptions::default().compression(CompressionType::None);
    /// # let photos = db.open_partition("photos", PartitionCreateOptions::default().with_kv_separation(separation))?;
    /// photos.insert("sky", vec![7; 100_000])?;
    /// photos.flush()?;
    /// let metrics = photos.metrics();
    /// assert!(metrics.referenced_blob_bytes() >= 100_000); // not compressed
    /// assert!(metrics.referenced_blob_bytes() < metrics.blob_bytes()); // without header and index of the file
    /// # Ok(()) }
    /// ```
    pub fn referenced_blob_bytes(&self) -> u64 {
        self.blob_files.iter().map(|file| file.referenced_bytes).sum()
    }

    /// Returns the bytes of values in blob files that no table points to any more.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).workers(0).open()?;
    /// # use azekura::{CompressionType, KvSeparationOptions, PartitionCreateOptions};
    /// # let separation = KvSeparationOptions::default().automatic_gc(None).compression(CompressionType::None);
    /// # let photos = db.open_partition("photos", PartitionCreateOptions::default().with_kv_separation(separation))?;
    /// photos.insert("sky", vec![7; 100_000])?;
    /// photos.insert("moon", vec![7; 1_000_000])?;
    /// photos.flush()?;
    /// photos.remove("sky")?;
    /// photos.major_compact()?; // a value is stale once a compaction has dropped its pointer
    /// let stale = photos.metrics().stale_blob_bytes();
    /// assert!((100_000..200_000).contains(&stale));
    /// # Ok(()) }
    /// ```
    pub fn stale_blob_bytes(&self) -> u64 {
        self.blob_files.iter().map(BlobFileMetrics::stale_bytes).sum()
    }
}

impl fmt::Display for PartitionMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "partition {:?}: {} bytes on disk, {} in memory", self.name, self.disk_bytes, self.memtable_bytes)?;
        if let Some(pool) = &self.pool {
            let PoolMetrics { persistence: level, records, bytes, free_bytes, .. } = pool;
            writeln!(f, "pool: {records} records in {bytes} bytes, {free_bytes} free")?;
            writeln!(f, "without the WAL a write survives {level}")?;
            let PoolMetrics { leaves, free_leaves, checkpoints, checkpoint_bytes, .. } = pool;
            return writeln!(
                f,
                "{leaves} leaves, {free_leaves} free leaves; {checkpoints} checkpoints wrote {checkpoint_bytes} bytes"
            );
        }
        writeln!(f, "level  runs  tables         bytes       entries    tombstones")?;
        for l in &self.levels {
            write!(f, "{:>5} {:>5} {:>7} {:>13}", l.level, l.runs, l.tables, l.bytes)?;
            writeln!(f, " {:>13} {:>13}", l.entries, l.tombstones)?;
        }
        if self.memtable_tombstones > 0 {
            writeln!(f, "tombstones in memtables: {}", self.memtable_tombstones)?;
        }
        if self.range_tombstones > 0 {
            let (count, bytes) = (self.range_tombstones, self.range_deleted_bytes);
            writeln!(f, "range tombstones: {count}, covering about {bytes} bytes of tables")?;
        }
        if self.blob_files.is_empty() {
            return Ok(());
        }
        let (files, bytes) = (self.blob_files.len(), self.blob_bytes());
        let (referenced, stale) = (self.referenced_blob_bytes(), self.stale_blob_bytes());
        writeln!(f, "blob files: {files}, {bytes} bytes; values: {referenced} bytes referenced, {stale} bytes stale")
    }
}

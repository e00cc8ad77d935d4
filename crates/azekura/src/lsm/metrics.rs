//! Metrics of a tree.

use crate::lsm::blob_map::BlobFileMetrics;
use crate::lsm::tree::LsmTree;
use crate::lsm::version::HasTableMeta;

/// Metrics of one level of an LSM tree.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).workers(0).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// fruit.insert("apple", "red")?;
/// fruit.flush()?;
/// fruit.remove("apple")?;
/// fruit.flush()?;
/// let level = &fruit.metrics().levels[0];
/// assert_eq!((level.runs, level.tables, level.entries, level.tombstones), (2, 2, 2, 1));
/// assert!(level.bytes > level.raw_bytes); // a table has an index and a filter too
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct LevelMetrics {
    /// Level number; flushes write to level 0.
    pub level: u8,
    /// Sorted runs.
    pub runs: usize,
    /// Tables.
    pub tables: usize,
    /// Bytes on disk.
    pub bytes: u64,
    /// Bytes of keys and values before compression.
    pub raw_bytes: u64,
    /// Entries, tombstones included.
    pub entries: u64,
    /// Tombstones.
    pub tombstones: u64,
}

/// The state of a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LsmMetrics {
    /// From level 0 on.
    pub(crate) levels: Vec<LevelMetrics>,
    /// Bytes of the active memtable.
    pub(crate) memtable_bytes: u64,
    pub(crate) sealed_bytes: u64,
    /// Tombstones in all memtables.
    pub(crate) memtable_tombstones: u64,
    /// Bytes of memory that open tables and blob files use outside of the cache.
    pub(crate) pinned_bytes: u64,
    /// Fragments of range tombstones, in memtables and flushed.
    pub(crate) range_tombstones: usize,
    /// Estimated bytes of tables that they cover.
    pub(crate) range_deleted_bytes: u64,
    /// Also direct blob files that no edit names yet, as if every value in them were referenced.
    pub(crate) blob_files: Vec<BlobFileMetrics>,
}

impl LsmTree {
    pub(crate) fn metrics(&self) -> LsmMetrics {
        let now = self.current.get();
        let levels = now.version.levels().map(|(number, level)| LevelMetrics {
            level: number,
            runs: level.runs.len(),
            tables: level.tables as usize,
            bytes: level.bytes,
            raw_bytes: level.iter().map(|table| table.meta().raw_bytes).sum(),
            entries: level.entries,
            tombstones: level.tombstones,
        });
        let table_bytes: u64 = now.version.tables().filter_map(|(_, t)| t.opened()).map(|t| t.pinned_bytes()).sum();
        let blob_file_bytes: u64 = now.version.blobs().handles().map(|file| file.file().memory_bytes()).sum();
        let mut blob_files = now.version.blobs().stats();
        blob_files.extend(now.direct_blobs.values().map(|file| file.stats()));
        LsmMetrics {
            levels: levels.collect(),
            memtable_bytes: now.active.bytes(),
            sealed_bytes: now.sealed.iter().map(|memtable| memtable.bytes()).sum(),
            memtable_tombstones: now.sealed.iter().chain([&now.active]).map(|memtable| memtable.tombstones()).sum(),
            pinned_bytes: table_bytes + blob_file_bytes + now.version.range_tombstones().bytes(),
            range_tombstones: now.range_tombstones().iter().map(|set| set.len()).sum(),
            range_deleted_bytes: now.version.tables().map(|(_, table)| table.covered_bytes()).sum(),
            blob_files,
        }
    }
}

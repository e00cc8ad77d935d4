//! The metrics of a pool.

use crate::vfs::fs::PersistenceLevel;

/// Metrics of the pool of a pmem partition. Fields are counts unless the name or the text gives a unit.
///
/// ```
/// # use azekura::{Config, EngineType, PartitionCreateOptions};
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = Config::new(dir.path().join("db")).workers(0).open()?;
/// # let pool = PartitionCreateOptions::default().engine(EngineType::Pmem(Default::default()));
/// let counters = db.open_partition("counters", pool)?;
/// counters.insert("visits", "1")?;
/// let pool = counters.metrics().pool.expect("a pmem partition has a pool");
/// assert_eq!((pool.records, pool.leaves, pool.splits), (1, 1, 0));
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct PoolMetrics {
    /// The failures that a write survives when it returns, without the WAL.
    pub persistence: PersistenceLevel,
    /// Records stored in the pool.
    pub records: u64,
    /// Leaves that the tree uses.
    pub leaves: u64,
    /// Free leaves kept for reuse by the tree.
    pub free_leaves: u64,
    /// Bytes of the pool, used and free.
    pub bytes: u64,
    /// Free bytes of the pool, without free leaves.
    pub free_bytes: u64,
    /// Bytes of memory of the inner nodes that index the leaves.
    pub index_bytes: u64,
    /// Bytes of memory that record replaced versions for snapshots and iterators. The replaced values themselves stay
    /// in the pool.
    pub version_bytes: u64,
    /// Checkpoints since the pool was opened.
    pub checkpoints: u64,
    /// Bytes written by these checkpoints.
    pub checkpoint_bytes: u64,
    /// Leaf splits since the pool was opened.
    pub splits: u64,
    /// Bytes stored by these splits: moved slots and their metadata, never keys or values.
    pub split_bytes_written: u64,
    /// Cache lines of 64 bytes that these splits flushed, counted also on memory that needs no flush.
    pub split_flushed_lines: u64,
    /// Store fences that these splits issued.
    pub split_fences: u64,
}

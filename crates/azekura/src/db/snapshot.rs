//! One moment of the whole database.

use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use crate::base::Result;
use crate::db::handle::DbHandle;
use crate::db::iter::{DbIter, Entries, Iter, IterState, Keys, OwnedBounds, Values, own_bounds};
use crate::db::partition::{Partition, count_entries};
use crate::engine::{ReadSeqno, SnapshotGuard};
use crate::mem::slice::Slice;

/// All partitions as they were at one instant, between two commits.
///
/// Cheap to make, cheap to clone, owned, thread safe. While it lives, what it shows is kept on disk and in memory.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// # let p = db.open_partition("p", Default::default())?;
/// p.insert("k", "old")?;
/// let before = db.snapshot();
/// p.insert("k", "new")?;
/// assert_eq!(before.get(&p, "k")?.as_deref(), Some(&b"old"[..]));
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Snapshot {
    guard: SnapshotGuard,
    handle: Arc<DbHandle>,
}

impl Snapshot {
    pub(crate) fn new(handle: Arc<DbHandle>) -> Snapshot {
        Snapshot { guard: handle.inner.snapshots.register(), handle }
    }

    fn read_seqno(&self, partition: &Partition) -> Result<ReadSeqno> {
        partition.check_same_database(&self.handle)?;
        Ok(ReadSeqno::At(self.guard.seqno()))
    }

    fn db_iter(&self, partition: &Partition, bounds: OwnedBounds) -> Result<DbIter> {
        partition.check_same_database(&self.handle)?;
        partition.db_iter(bounds, self.guard.clone())
    }

    fn db_iter_all(&self, partition: &Partition) -> Result<DbIter> {
        self.db_iter(partition, (Bound::Unbounded, Bound::Unbounded))
    }

    /// The value that a key had.
    ///
    /// # Errors
    /// As [`Partition::get`]; `Invalid` for a partition of another database.
    pub fn get(&self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<Option<Slice>> {
        partition.get_at(key.as_ref(), self.read_seqno(partition)?)
    }

    /// Whether a key had a value.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    pub fn contains_key(&self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<bool> {
        Ok(self.size_of(partition, key)?.is_some())
    }

    /// Length in bytes of the value that a key had.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    pub fn size_of(&self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<Option<u32>> {
        partition.size_of_at(key.as_ref(), self.read_seqno(partition)?)
    }

    /// The values that many keys had, in the order of the keys given.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    pub fn multi_get<K: AsRef<[u8]>>(
        &self,
        partition: &Partition,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Slice>>> {
        keys.into_iter().map(|key| self.get(partition, key)).collect()
    }

    /// All pairs there were.
    pub fn iter(&self, partition: &Partition) -> Iter {
        Iter(IterState::new(self.db_iter_all(partition)))
    }

    /// The pairs there were in a range of keys.
    pub fn range<K: AsRef<[u8]>>(&self, partition: &Partition, range: impl RangeBounds<K>) -> Iter {
        Iter(IterState::new(self.db_iter(partition, own_bounds(&range))))
    }

    /// The pairs there were whose keys begin with `prefix`; see [`Partition::prefix`].
    pub fn prefix(&self, partition: &Partition, prefix: impl AsRef<[u8]>) -> Iter {
        let iter = partition
            .check_same_database(&self.handle)
            .and_then(|()| partition.prefix_iter(prefix.as_ref(), self.guard.clone()));
        Iter(IterState::new(iter))
    }

    /// All keys there were.
    pub fn keys(&self, partition: &Partition) -> Keys {
        Keys(IterState::new(self.db_iter_all(partition)))
    }

    /// All values there were.
    pub fn values(&self, partition: &Partition) -> Values {
        Values(IterState::new(self.db_iter_all(partition)))
    }

    /// All entries there were.
    pub fn entries(&self, partition: &Partition) -> Entries {
        Entries(IterState::new(self.db_iter_all(partition)))
    }

    /// The first pair there was.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    pub fn first_key_value(&self, partition: &Partition) -> Result<Option<(Slice, Slice)>> {
        self.iter(partition).next().transpose()
    }

    /// The last pair there was.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    pub fn last_key_value(&self, partition: &Partition) -> Result<Option<(Slice, Slice)>> {
        self.iter(partition).next_back().transpose()
    }

    /// Whether there was no key.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    pub fn is_empty(&self, partition: &Partition) -> Result<bool> {
        Ok(self.keys(partition).next().transpose()?.is_none())
    }

    /// The number of keys there were, counted one by one.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    pub fn len(&self, partition: &Partition) -> Result<u64> {
        count_entries(self.db_iter_all(partition)?)
    }
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Snapshot(at {})", self.guard.seqno())
    }
}

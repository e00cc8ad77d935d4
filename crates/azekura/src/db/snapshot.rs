//! Implements [`Snapshot`], a consistent read-only view of all partitions.

use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use crate::base::Result;
use crate::db::handle::DbHandle;
use crate::db::iter::{DbIter, Entries, Iter, IterState, Keys, OwnedBounds, Values, own_bounds};
use crate::db::partition::{Partition, count_entries};
use crate::engine::{ReadSeqno, SnapshotGuard};
use crate::mem::slice::Slice;

/// A consistent read-only view of all partitions at one point between two commits.
///
/// Cheap to create and to clone, without lifetimes, `Send` and `Sync`. While a snapshot exists, the versions that it
/// can read are kept in memory and on disk.
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

    /// Returns the value that the key had, or `None` if it had none.
    ///
    /// # Errors
    /// As [`Partition::get`]; `Invalid` if the partition belongs to another database.
    pub fn get(&self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<Option<Slice>> {
        partition.get_at(key.as_ref(), self.read_seqno(partition)?)
    }

    /// Calls `read` with the value that the key had and returns its result; see [`Partition::get_with`].
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    pub fn get_with<R>(
        &self,
        partition: &Partition,
        key: impl AsRef<[u8]>,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Result<Option<R>> {
        partition.get_with_at(key.as_ref(), self.read_seqno(partition)?, read)
    }

    /// Returns whether the key had a value.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    pub fn contains_key(&self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<bool> {
        Ok(self.size_of(partition, key)?.is_some())
    }

    /// Returns the length in bytes of the value that the key had.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    pub fn size_of(&self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<Option<u32>> {
        partition.size_of_at(key.as_ref(), self.read_seqno(partition)?)
    }

    /// Returns the values that many keys had, in the order of `keys`.
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

    /// Iterates over all key-value pairs of the snapshot in key order.
    pub fn iter(&self, partition: &Partition) -> Iter {
        Iter(IterState::new(self.db_iter_all(partition)))
    }

    /// Iterates over the pairs of the snapshot whose keys are in `range`.
    pub fn range<K: AsRef<[u8]>>(&self, partition: &Partition, range: impl RangeBounds<K>) -> Iter {
        Iter(IterState::new(self.db_iter(partition, own_bounds(&range))))
    }

    /// Iterates over the pairs of the snapshot whose keys begin with `prefix`; see [`Partition::prefix`].
    pub fn prefix(&self, partition: &Partition, prefix: impl AsRef<[u8]>) -> Iter {
        let iter = partition
            .check_same_database(&self.handle)
            .and_then(|()| partition.prefix_iter(prefix.as_ref(), self.guard.clone()));
        Iter(IterState::new(iter))
    }

    /// Iterates over all keys of the snapshot in order.
    pub fn keys(&self, partition: &Partition) -> Keys {
        Keys(IterState::new(self.db_iter_all(partition)))
    }

    /// Iterates over all values of the snapshot in the order of their keys.
    pub fn values(&self, partition: &Partition) -> Values {
        Values(IterState::new(self.db_iter_all(partition)))
    }

    /// Iterates over all entries of the snapshot in key order; a value is read only on request.
    pub fn entries(&self, partition: &Partition) -> Entries {
        Entries(IterState::new(self.db_iter_all(partition)))
    }

    /// Returns the pair with the lowest key, or `None` if there was no key.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    pub fn first_key_value(&self, partition: &Partition) -> Result<Option<(Slice, Slice)>> {
        self.iter(partition).next().transpose()
    }

    /// Returns the pair with the highest key, or `None` if there was no key.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    pub fn last_key_value(&self, partition: &Partition) -> Result<Option<(Slice, Slice)>> {
        self.iter(partition).next_back().transpose()
    }

    /// Returns whether the partition contained no key.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    pub fn is_empty(&self, partition: &Partition) -> Result<bool> {
        Ok(self.keys(partition).next().transpose()?.is_none())
    }

    /// Returns the exact number of keys. Reads every key: O(n).
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

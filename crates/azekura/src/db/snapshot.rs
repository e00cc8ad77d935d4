//! Implements [`Snapshot`], a consistent read-only view of all partitions.

use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use crate::base::{Error, Result};
use crate::db::handle::DbHandle;
use crate::db::iter::db_iter::{DbIter, OwnedBounds, own_bounds, prefix_bounds};
use crate::db::iter::entry::Entry;
use crate::db::iter::iterators::{Entries, Iter, IterState, Keys, Values};
use crate::db::partition::{Partition, count_entries};
use crate::engine::{ReadSeqno, SnapshotGuard};
use crate::mem::slice::Slice;

/// A consistent read-only view of all partitions at one point between two commits.
///
/// Cheap to create and to clone, without lifetimes, `Send` and `Sync`. While a snapshot exists, the versions that it
/// can read are kept in memory and on disk. Reads of a partition that is [deleted](crate::Database::delete_partition)
/// later go on through its handles.
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

    /// A snapshot of a reader that is registered.
    pub(crate) fn of_guard(guard: SnapshotGuard, handle: Arc<DbHandle>) -> Snapshot {
        Snapshot { guard, handle }
    }

    fn read_seqno(&self, partition: &Partition) -> Result<ReadSeqno> {
        partition.check_same_database(&self.handle)?;
        Ok(ReadSeqno::At(self.guard.moment()))
    }

    /// Returns `found`, which was read from the current state of the partition, or an error if a follower has replaced
    /// the state that the snapshot reads.
    fn unless_replaced<T>(&self, partition: &Partition, found: Result<T>) -> Result<T> {
        let is_replaced =
            self.handle.inner.follower.is_some() && self.guard.replaced_view(partition.state.id).is_some();
        if is_replaced { Err(Error::invalid("the state of the snapshot was replaced")) } else { found }
    }

    fn db_iter(&self, partition: &Partition, bounds: OwnedBounds) -> Result<DbIter> {
        partition.check_same_database(&self.handle)?;
        let iter = partition.db_iter(bounds.clone(), self.guard.clone());
        iter.or_else(|error| self.deleted_iter(partition, bounds, error))
    }

    /// Returns an iterator over a partition that was deleted, or whose state was replaced, after the snapshot was
    /// created; otherwise `error`.
    #[cold]
    fn deleted_iter(&self, partition: &Partition, bounds: OwnedBounds, error: Error) -> Result<DbIter> {
        let state = &partition.state;
        let (Some(tree), Some(view)) = (state.tree_if_built(), self.guard.replaced_view(state.id)) else {
            return Err(error);
        };
        let (handle, order) = (Arc::clone(&self.handle), tree.key_order().clone());
        Ok(DbIter::with_view(handle, view, order, bounds, self.guard.clone(), self.guard.moment()))
    }

    /// Returns the entry of `key` in a partition as of [`deleted_iter`](Snapshot::deleted_iter); otherwise `error`.
    #[cold]
    fn deleted_entry(&self, partition: &Partition, key: &[u8], error: Error) -> Result<Option<Entry>> {
        let bounds = (Bound::Included(key.to_vec()), Bound::Included(key.to_vec()));
        Entries(IterState::new(self.deleted_iter(partition, bounds, error))).next().transpose()
    }

    fn db_iter_all(&self, partition: &Partition) -> Result<DbIter> {
        self.db_iter(partition, (Bound::Unbounded, Bound::Unbounded))
    }

    /// Returns the value that the key had, or `None` if it had none.
    ///
    /// # Errors
    /// As [`Partition::get`]; `Invalid` if the partition belongs to another database.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "green")?;
    /// let before = db.snapshot();
    /// fruit.remove("apple")?;
    /// assert_eq!(before.get(&fruit, "apple")?.unwrap(), "green");
    /// assert!(db.snapshot().get(&fruit, "apple")?.is_none());
    /// # Ok(()) }
    /// ```
    pub fn get(&self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<Option<Slice>> {
        let found = partition.get_at(key.as_ref(), self.read_seqno(partition)?);
        self.unless_replaced(partition, found).or_else(|error| {
            let entry = self.deleted_entry(partition, key.as_ref(), error)?;
            entry.map(|entry| entry.value()).transpose()
        })
    }

    /// Calls `read` with the value that the key had and returns its result; see [`Partition::get_with`].
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let counters = db.open_partition("counters", Default::default())?;
    /// counters.insert("visits", 7u64.to_le_bytes())?;
    /// let before = db.snapshot();
    /// counters.insert("visits", 8u64.to_le_bytes())?;
    /// let visits = before.get_with(&counters, "visits", |bytes| u64::from_le_bytes(bytes.try_into().unwrap()))?;
    /// assert_eq!(visits, Some(7)); // decoded without a copy of the value
    /// # Ok(()) }
    /// ```
    pub fn get_with<R>(
        &self,
        partition: &Partition,
        key: impl AsRef<[u8]>,
        read: impl FnOnce(&[u8]) -> R,
    ) -> Result<Option<R>> {
        if self.handle.inner.follower.is_some() {
            return Ok(self.get(partition, key)?.map(|value| read(&value))); // so that it is called at most once
        }
        let mut unused_read = Some(read);
        let found = partition
            .get_with_at(key.as_ref(), self.read_seqno(partition)?, |value| unused_read.take().map(|read| read(value)));
        let found = found.or_else(|error| match unused_read.take() {
            None => Err(error),
            Some(read) => {
                let entry = self.deleted_entry(partition, key.as_ref(), error)?;
                entry.map(|entry| entry.value().map(|value| Some(read(&value)))).transpose()
            }
        })?;
        Ok(found.flatten())
    }

    /// Returns whether the key had a value.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let before = db.snapshot();
    /// fruit.insert("apple", "red")?;
    /// assert!(!before.contains_key(&fruit, "apple")?);
    /// assert!(db.snapshot().contains_key(&fruit, "apple")?);
    /// # Ok(()) }
    /// ```
    pub fn contains_key(&self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<bool> {
        Ok(self.size_of(partition, key)?.is_some())
    }

    /// Returns the length in bytes of the value that the key had.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let photos = db.open_partition("photos", Default::default())?;
    /// photos.insert("sky", vec![7; 100_000])?;
    /// let before = db.snapshot();
    /// photos.insert("sky", vec![7; 200_000])?;
    /// assert_eq!(before.size_of(&photos, "sky")?, Some(100_000));
    /// # Ok(()) }
    /// ```
    pub fn size_of(&self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<Option<u32>> {
        let found = partition.size_of_at(key.as_ref(), self.read_seqno(partition)?);
        self.unless_replaced(partition, found).or_else(|error| {
            let entry = self.deleted_entry(partition, key.as_ref(), error)?;
            Ok(entry.map(|entry| entry.size()))
        })
    }

    /// Returns the values that many keys had, in the order of `keys`.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let accounts = db.open_partition("accounts", Default::default())?;
    /// accounts.insert("ada", "90")?;
    /// let before = db.snapshot();
    /// accounts.insert("grace", "110")?;
    /// let found = before.multi_get(&accounts, ["grace", "ada"])?;
    /// assert!(found[0].is_none());
    /// assert_eq!(found[1].as_deref(), Some(&b"90"[..]));
    /// # Ok(()) }
    /// ```
    pub fn multi_get<K: AsRef<[u8]>>(
        &self,
        partition: &Partition,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Slice>>> {
        partition.check_same_database(&self.handle)?;
        let keys: Vec<K> = keys.into_iter().collect();
        let found = partition.multi_get_at(&keys, self.guard.moment());
        self.unless_replaced(partition, found).or_else(|error| match self.guard.replaced_view(partition.state.id) {
            None => Err(error),
            Some(_) => keys.iter().map(|key| self.get(partition, key)).collect(),
        })
    }

    /// Iterates over all key-value pairs of the snapshot in key order.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let stock = db.open_partition("stock", Default::default())?;
    /// # let orders = db.open_partition("orders", Default::default())?;
    /// stock.insert("apples", "42")?;
    /// let now = db.snapshot();
    /// orders.insert("order 1", "one apple")?;
    /// assert_eq!((now.iter(&stock).count(), now.iter(&orders).count()), (1, 0)); // one point in time
    /// # Ok(()) }
    /// ```
    pub fn iter(&self, partition: &Partition) -> Iter {
        Iter(IterState::new(self.db_iter_all(partition)))
    }

    /// Iterates over the pairs of the snapshot whose keys are in `range`.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("banana", "yellow")?;
    /// let before = db.snapshot();
    /// fruit.insert("cherry", "red")?;
    /// let names: Vec<_> = before.range(&fruit, "b".."d").map(|pair| pair.unwrap().0).collect();
    /// assert_eq!(names, ["banana"]);
    /// # Ok(()) }
    /// ```
    pub fn range<K: AsRef<[u8]>>(&self, partition: &Partition, range: impl RangeBounds<K>) -> Iter {
        Iter(IterState::new(self.db_iter(partition, own_bounds(&range))))
    }

    /// Iterates over the pairs of the snapshot whose keys begin with `prefix`; see [`Partition::prefix`].
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let users = db.open_partition("users", Default::default())?;
    /// users.insert("ada/name", "Ada")?;
    /// let before = db.snapshot();
    /// users.insert("ada/mail", "ada@example.org")?;
    /// assert_eq!(before.prefix(&users, "ada/").count(), 1);
    /// # Ok(()) }
    /// ```
    pub fn prefix(&self, partition: &Partition, prefix: impl AsRef<[u8]>) -> Iter {
        let order = partition.check_prefix_order();
        Iter(IterState::new(order.and_then(|()| self.db_iter(partition, prefix_bounds(prefix.as_ref())))))
    }

    /// Iterates over all keys of the snapshot in order.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let before = db.snapshot();
    /// fruit.insert("pear", "green")?;
    /// let keys = before.keys(&fruit).collect::<azekura::Result<Vec<_>>>()?;
    /// assert_eq!(keys, ["apple"]);
    /// # Ok(()) }
    /// ```
    pub fn keys(&self, partition: &Partition) -> Keys {
        Keys(IterState::new(self.db_iter_all(partition)))
    }

    /// Iterates over all values of the snapshot in the order of their keys.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "green")?;
    /// let before = db.snapshot();
    /// fruit.insert("apple", "red")?;
    /// let colours = before.values(&fruit).collect::<azekura::Result<Vec<_>>>()?;
    /// assert_eq!(colours, ["green"]);
    /// # Ok(()) }
    /// ```
    pub fn values(&self, partition: &Partition) -> Values {
        Values(IterState::new(self.db_iter_all(partition)))
    }

    /// Iterates over all entries of the snapshot in key order; a value is read only on request.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let photos = db.open_partition("photos", Default::default())?;
    /// photos.insert("sky", vec![7; 100_000])?;
    /// let before = db.snapshot();
    /// photos.remove("sky")?;
    /// let sizes: Vec<u32> = before.entries(&photos).map(|photo| photo.unwrap().size()).collect();
    /// assert_eq!(sizes, [100_000]);
    /// # Ok(()) }
    /// ```
    pub fn entries(&self, partition: &Partition) -> Entries {
        Entries(IterState::new(self.db_iter_all(partition)))
    }

    /// Returns the pair with the lowest key, or `None` if there was no key.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let queue = db.open_partition("queue", Default::default())?;
    /// queue.insert(1u64.to_be_bytes(), "job")?;
    /// let before = db.snapshot();
    /// queue.remove(1u64.to_be_bytes())?;
    /// assert_eq!(before.first_key_value(&queue)?.unwrap().1, "job");
    /// assert!(db.snapshot().first_key_value(&queue)?.is_none());
    /// # Ok(()) }
    /// ```
    pub fn first_key_value(&self, partition: &Partition) -> Result<Option<(Slice, Slice)>> {
        self.iter(partition).next().transpose()
    }

    /// Returns the pair with the highest key, or `None` if there was no key.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let log = db.open_partition("log", Default::default())?;
    /// log.insert(1u64.to_be_bytes(), "started")?;
    /// let before = db.snapshot();
    /// log.insert(2u64.to_be_bytes(), "stopped")?;
    /// assert_eq!(before.last_key_value(&log)?.unwrap().1, "started");
    /// # Ok(()) }
    /// ```
    pub fn last_key_value(&self, partition: &Partition) -> Result<Option<(Slice, Slice)>> {
        self.iter(partition).next_back().transpose()
    }

    /// Returns whether the partition contained no key.
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let before = db.snapshot();
    /// fruit.insert("apple", "red")?;
    /// assert!(before.is_empty(&fruit)? && !fruit.is_empty()?);
    /// # Ok(()) }
    /// ```
    pub fn is_empty(&self, partition: &Partition) -> Result<bool> {
        Ok(self.keys(partition).next().transpose()?.is_none())
    }

    /// Returns the exact number of keys. Reads every key: O(n).
    ///
    /// # Errors
    /// As [`get`](Snapshot::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let before = db.snapshot();
    /// fruit.insert("pear", "green")?;
    /// assert_eq!((before.len(&fruit)?, fruit.len()?), (1, 2));
    /// # Ok(()) }
    /// ```
    pub fn len(&self, partition: &Partition) -> Result<u64> {
        count_entries(self.db_iter_all(partition)?)
    }
}

impl std::fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Snapshot(at {})", self.guard.seqno())
    }
}

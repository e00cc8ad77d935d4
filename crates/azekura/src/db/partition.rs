//! Implements [`Partition`], the handle of one named map: single writes, reads, iteration and maintenance calls.

use std::fmt;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use std::time::Duration;

use crate::base::{Error, ErrorKind, RecordKind, Result};
use crate::db::handle::DbHandle;
use crate::db::inner::ValueWrite;
use crate::db::iter::db_iter::{DbIter, IterEnd, OwnedBounds, own_bounds, prefix_bounds};
use crate::db::iter::iterators::{Entries, Iter, IterState, Keys, Values};
use crate::db::metrics::PartitionMetrics;
use crate::db::partition_state::PartitionState;
use crate::db::state::partition_expiry::ttl_ms;
use crate::db::worker::{compact_and_wait, flush_and_wait};
use crate::db::writes::staged_records::StagedGuard;
use crate::db::writes::write_batch::{WriteBatch, with_payload};
use crate::engine::{EngineView, ReadMoment, ReadSeqno, SnapshotGuard};
use crate::mem::slice::Slice;
use crate::tree::partition_tree::PartitionTree;
use crate::wal::format::{WalRecord, check_key_and_value_lengths};

/// A named, ordered map of bytes to bytes in a [`Database`](crate::Database).
///
/// Clones share the partition and are cheap; the type is `Send` and `Sync`. Reads never wait for writes. Every read
/// sees whole commits only.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// let fruit = db.open_partition("fruit", Default::default())?;
/// fruit.insert("apple", "red")?;
/// fruit.insert("banana", "yellow")?;
/// assert_eq!(fruit.get("apple")?.as_deref(), Some(&b"red"[..]));
/// let keys: Vec<_> = fruit.range("b"..).map(|pair| pair.unwrap().0).collect();
/// assert_eq!(keys, ["banana"]);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Partition {
    /// The name that the partition was opened with.
    pub name: Arc<str>,
    pub(crate) state: Arc<PartitionState>,
    pub(crate) handle: Arc<DbHandle>,
}

impl Partition {
    pub(crate) fn new(state: Arc<PartitionState>, handle: Arc<DbHandle>) -> Partition {
        Partition { name: Arc::clone(&state.name), state, handle }
    }

    /// Sets the value of a key, and replaces its previous value.
    ///
    /// # Errors
    /// `Invalid` if the key has more than 65,535 bytes, the value more than 4 GiB − 1, or the value more than half
    /// the memory budget and is not written directly to a blob file, or if the database is open for reading only.
    /// `OutOfSpace`, `Io` or `Poisoned` if the write to the WAL or to the blob file fails. `OutOfSpace` if a pool is
    /// full. `Closed` if the database is closed or the partition was deleted.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "green")?;
    /// fruit.insert("apple", "red")?; // replaces the value
    /// assert_eq!(fruit.get("apple")?.unwrap(), "red");
    /// assert_eq!(fruit.insert([0; 65_536], "").unwrap_err().kind(), azekura::ErrorKind::Invalid); // key too long
    /// # Ok(()) }
    /// ```
    #[doc(alias = "put")]
    #[doc(alias = "set")]
    pub fn insert(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        let (key, value) = (key.as_ref(), value.as_ref());
        match self.state.expiry.default_ttl_ms() {
            None if self.state.stages_value(value.len(), self.handle.inner.settings.durability) => {
                self.write_value(key, value, None)
            }
            None => self.write(RecordKind::Put, key, value),
            Some(ttl_ms) => self.insert_expiring(key, value, ttl_ms),
        }
    }

    /// Sets the value of a key until `ttl` has passed. Then the key does not exist, as if it had been removed.
    ///
    /// Every read hides the record from then on. A snapshot, an iterator and a transaction read at the time of their
    /// creation, so nothing expires while they exist. Flushes, compactions and passes over pools remove the record
    /// later. The time is that of [`Env::now_ms`](crate::fs::Env::now_ms), in milliseconds. While the database is open,
    /// it does not go back: if the wall clock is set back, records expire when it has caught up. A later
    /// [`insert`](Partition::insert) without a TTL sets a value that does not expire, unless the partition has a
    /// [default TTL](crate::PartitionCreateOptions::default_ttl). The first call for a partition syncs the manifest.
    ///
    /// # Errors
    /// As [`insert`](Partition::insert). `Invalid` if `ttl` is 0, if the record would expire 2^64 ms or more after
    /// 1970, or if the value has more than 4 GiB − 9 bytes.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// use std::time::Duration;
    /// let sessions = db.open_partition("sessions", Default::default())?;
    /// sessions.insert_with_ttl("ada", "logged in", Duration::from_millis(20))?;
    /// let snapshot = db.snapshot();
    /// std::thread::sleep(Duration::from_millis(40));
    /// assert!(sessions.get("ada")?.is_none());
    /// assert!(snapshot.get(&sessions, "ada")?.is_some()); // reads at the time of its creation
    /// assert!(sessions.insert_with_ttl("ada", "logged in", Duration::ZERO).is_err());
    /// # Ok(()) }
    /// ```
    #[doc(alias = "expire")]
    pub fn insert_with_ttl(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>, ttl: Duration) -> Result<()> {
        self.insert_expiring(key.as_ref(), value.as_ref(), ttl_ms(ttl)?)
    }

    #[cold]
    pub(crate) fn insert_expiring(&self, key: &[u8], value: &[u8], ttl_ms: u64) -> Result<()> {
        check_key_and_value_lengths(key, value)?;
        let expires_ms = self.handle.inner.begin_expiring_write(&self.state, ttl_ms, value)?;
        self.write_value(key, value, Some(expires_ms))
    }

    /// Removes a key. Removing a key that has no value is not an error.
    ///
    /// # Errors
    /// As [`insert`](Partition::insert).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// fruit.remove("apple")?;
    /// fruit.remove("apple")?; // not an error
    /// assert!(fruit.get("apple")?.is_none());
    /// # Ok(()) }
    /// ```
    #[doc(alias = "delete")]
    pub fn remove(&self, key: impl AsRef<[u8]>) -> Result<()> {
        self.write(RecordKind::Delete, key.as_ref(), &[])
    }

    /// Removes a key that was inserted **exactly once** since it was last removed.
    ///
    /// This is cheaper for queues, because a compaction that reads both the insertion and the removal drops both. If
    /// the key was overwritten, an older value may become visible again. A record that has expired counts as inserted,
    /// not as removed.
    ///
    /// # Errors
    /// As [`insert`](Partition::insert).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let queue = db.open_partition("queue", Default::default())?;
    /// for job in 0..3u64 {
    ///     queue.insert(job.to_be_bytes(), "job")?; // each key is inserted exactly once
    /// }
    /// while let Some((number, _job)) = queue.first_key_value()? {
    ///     queue.remove_weak(number)?;
    /// }
    /// assert!(queue.is_empty()?);
    /// # Ok(()) }
    /// ```
    #[doc(alias = "single_delete")]
    pub fn remove_weak(&self, key: impl AsRef<[u8]>) -> Result<()> {
        self.write(RecordKind::SingleDelete, key.as_ref(), &[])
    }

    /// Commits a value that is staged or expires.
    #[cold]
    fn write_value(&self, key: &[u8], value: &[u8], expires_ms: Option<u64>) -> Result<()> {
        check_key_and_value_lengths(key, value)?;
        let inner = &self.handle.inner;
        with_payload(|payload| {
            let mut staged = StagedGuard::of(std::slice::from_ref(&self.state));
            let mode = inner.settings.durability;
            inner.put_value(payload, &mut staged, &self.state, key, &ValueWrite { value, expires_ms, mode })?;
            inner.write(&WriteBatch::new(payload, 1, &staged), mode)
        })
    }

    /// Commits a record.
    pub(crate) fn write(&self, kind: RecordKind, key: &[u8], value: &[u8]) -> Result<()> {
        check_key_and_value_lengths(key, value)?;
        let inner = &self.handle.inner;
        let staged = StagedGuard::of(std::slice::from_ref(&self.state));
        let record = WalRecord { kind, partition: self.state.id, key, value };
        inner.write(&WriteBatch::of_record(record, &staged), inner.settings.durability)
    }

    /// Returns the value of a key, or `None` if it has none.
    ///
    /// # Errors
    /// `Io` or `Corruption` if a table or blob file cannot be read. `Closed` if the database is closed or the
    /// partition was deleted.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// assert_eq!(fruit.get("apple")?.as_deref(), Some(&b"red"[..]));
    /// assert_eq!(fruit.get("pear")?, None);
    /// # Ok(()) }
    /// ```
    pub fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Slice>> {
        self.get_at(key.as_ref(), ReadSeqno::Latest)
    }

    pub(crate) fn get_at(&self, key: &[u8], at: ReadSeqno) -> Result<Option<Slice>> {
        if at == ReadSeqno::Latest && self.handle.inner.follower.is_some() {
            return self.read_registered(|at| self.read(|tree| tree.get(key, ReadSeqno::At(at))));
        }
        self.read(|tree| tree.get(key, at))
    }

    /// In a follower, which may replace the states of several partitions: calls `read` with the moment of a registered
    /// reader, so that a later read is not of an earlier moment.
    #[cold]
    fn read_registered<T>(&self, read: impl Fn(ReadMoment) -> Result<T>) -> Result<T> {
        loop {
            let snapshot = self.register_snapshot();
            let found = read(snapshot.moment());
            if self.state.is_deleted() || snapshot.replaced_view(self.state.id).is_none() {
                return found;
            }
        }
    }

    /// Calls `read` with the value of a key and returns its result, or `None` if the key has no value.
    ///
    /// Unlike [`get`](Partition::get), this copies no value of an LSM partition, except from a blob file. If the
    /// database is closed or the partition is deleted meanwhile, the call may return `Closed` although `read` was
    /// called.
    ///
    /// During the call, memory that any thread replaces is not freed, so `read` should be short and should not write to
    /// the same database. Memtables that are flushed meanwhile stay in memory beyond the
    /// [`memory_budget`](crate::Config::memory_budget) until the call ends. A full pool does not get back the space of
    /// replaced records and returns `OutOfSpace`.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// let counters = db.open_partition("counters", Default::default())?;
    /// counters.insert("visits", [0; 7])?;
    /// assert_eq!(counters.get_with("visits", |bytes| bytes.len())?, Some(7));
    /// assert_eq!(counters.get_with("unknown", |bytes| bytes.len())?, None);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`get`](Partition::get).
    pub fn get_with<R>(&self, key: impl AsRef<[u8]>, read: impl FnOnce(&[u8]) -> R) -> Result<Option<R>> {
        self.get_with_at(key.as_ref(), ReadSeqno::Latest, read)
    }

    pub(crate) fn get_with_at<R>(&self, key: &[u8], at: ReadSeqno, read: impl FnOnce(&[u8]) -> R) -> Result<Option<R>> {
        if at == ReadSeqno::Latest && self.handle.inner.follower.is_some() {
            return Ok(self.get_at(key, at)?.map(|value| read(&value))); // so that it is called at most once
        }
        self.read(|tree| tree.get_with(key, at, read))
    }

    /// Returns whether a key has a value. Does not copy the value or read a blob file.
    ///
    /// # Errors
    /// As [`get`](Partition::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "")?;
    /// assert!(fruit.contains_key("apple")?); // an empty value is a value
    /// assert!(!fruit.contains_key("pear")?);
    /// # Ok(()) }
    /// ```
    pub fn contains_key(&self, key: impl AsRef<[u8]>) -> Result<bool> {
        Ok(self.size_of(key)?.is_some())
    }

    /// Returns the length of the value of a key in bytes. Does not copy the value or read a blob file.
    ///
    /// # Errors
    /// As [`get`](Partition::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let photos = db.open_partition("photos", Default::default())?;
    /// photos.insert("sky", vec![7; 100_000])?;
    /// assert_eq!(photos.size_of("sky")?, Some(100_000));
    /// assert_eq!(photos.size_of("sea")?, None);
    /// # Ok(()) }
    /// ```
    pub fn size_of(&self, key: impl AsRef<[u8]>) -> Result<Option<u32>> {
        self.size_of_at(key.as_ref(), ReadSeqno::Latest)
    }

    pub(crate) fn size_of_at(&self, key: &[u8], at: ReadSeqno) -> Result<Option<u32>> {
        if at == ReadSeqno::Latest && self.handle.inner.follower.is_some() {
            return self.read_registered(|at| self.read(|tree| tree.size_of(key, ReadSeqno::At(at))));
        }
        self.read(|tree| tree.size_of(key, at))
    }

    /// Calls `read` on the tree and returns its result if the database and the partition are still open afterwards.
    /// The second check is needed because the tree of a deleted partition is empty, and another process may change
    /// the files of a closed database. The result is checked once, before it is moved, because moving it costs more
    /// than the checks.
    #[inline(always)]
    fn read<T>(&self, read: impl FnOnce(&PartitionTree) -> Result<Option<T>>) -> Result<Option<T>> {
        let tree = self.state.tree()?;
        self.handle.inner.check_process()?;
        let found = read(tree);
        let is_open = self.handle.inner.is_open_after_read() && (matches!(found, Ok(Some(_))) || self.state.is_open());
        if is_open { found } else { self.ended(found) }
    }

    #[cold]
    fn ended<T>(&self, found: Result<T>) -> Result<T> {
        drop(found);
        self.handle.inner.check_open()?;
        Err(self.state.closed_error())
    }

    /// Returns the values of many keys from one snapshot, in the order of `keys`.
    ///
    /// # Errors
    /// As [`get`](Partition::get); the first error ends the call.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let accounts = db.open_partition("accounts", Default::default())?;
    /// # let mut batch = db.batch();
    /// batch.insert(&accounts, "ada", "90");
    /// batch.insert(&accounts, "grace", "110");
    /// batch.commit()?;
    /// let found = accounts.multi_get(["grace", "alan", "ada"])?; // sees both writes of the batch, or none
    /// assert_eq!(found[0].as_deref(), Some(&b"110"[..]));
    /// assert!(found[1].is_none() && found[2].is_some());
    /// # Ok(()) }
    /// ```
    pub fn multi_get<K: AsRef<[u8]>>(&self, keys: impl IntoIterator<Item = K>) -> Result<Vec<Option<Slice>>> {
        let keys: Vec<K> = keys.into_iter().collect();
        if self.handle.inner.follower.is_some() {
            return self.read_registered(|at| self.multi_get_at(&keys, at));
        }
        let snapshot = self.register_snapshot();
        self.multi_get_at(&keys, snapshot.moment())
    }

    /// As [`multi_get`](Partition::multi_get), at the sequence number of a registered snapshot.
    pub(crate) fn multi_get_at<K: AsRef<[u8]>>(
        &self,
        keys: impl IntoIterator<Item = K>,
        at: ReadMoment,
    ) -> Result<Vec<Option<Slice>>> {
        let keys: Vec<K> = keys.into_iter().collect();
        let keys: Vec<&[u8]> = keys.iter().map(AsRef::as_ref).collect();
        let tree = self.state.tree()?;
        self.handle.inner.check_process()?;
        let found = tree.multi_get(&keys, at);
        let is_open = self.handle.inner.is_open_after_read() && self.state.is_open();
        if is_open { found } else { self.ended(found) }
    }

    /// Iterates over all key-value pairs in key order.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("pear", "green")?;
    /// fruit.insert("apple", "red")?;
    /// let mut pairs = fruit.iter();
    /// fruit.remove("apple")?; // after the iterator was created: it does not see this
    /// let (name, colour) = pairs.next().unwrap()?;
    /// assert_eq!((&*name, &*colour), (&b"apple"[..], &b"red"[..]));
    /// assert_eq!(pairs.rev().next().unwrap()?.0, "pear"); // from the back
    /// # Ok(()) }
    /// ```
    pub fn iter(&self) -> Iter {
        Iter(IterState::new(self.db_iter((Bound::Unbounded, Bound::Unbounded), self.register_snapshot())))
    }

    /// Iterates over the pairs whose keys are in `range`. A range whose start is above its end is empty.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let log = db.open_partition("log", Default::default())?;
    /// for second in [10u64, 20, 30, 40] {
    ///     log.insert(second.to_be_bytes(), "event")?; // big-endian: the order of bytes is the order of numbers
    /// }
    /// let events = log.range(20u64.to_be_bytes()..40u64.to_be_bytes());
    /// assert_eq!(events.count(), 2);
    /// # Ok(()) }
    /// ```
    pub fn range<K: AsRef<[u8]>>(&self, range: impl RangeBounds<K>) -> Iter {
        Iter(IterState::new(self.db_iter(own_bounds(&range), self.register_snapshot())))
    }

    /// Iterates over the pairs whose keys begin with `prefix`. If the comparator is not bytewise, the first item is
    /// an `Invalid` error.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let users = db.open_partition("users", Default::default())?;
    /// users.insert("ada/mail", "ada@example.org")?;
    /// users.insert("ada/name", "Ada")?;
    /// users.insert("adam/name", "Adam")?;
    /// let keys: Vec<_> = users.prefix("ada/").map(|pair| pair.unwrap().0).collect();
    /// assert_eq!(keys, ["ada/mail", "ada/name"]);
    /// # Ok(()) }
    /// ```
    pub fn prefix(&self, prefix: impl AsRef<[u8]>) -> Iter {
        Iter(IterState::new(self.prefix_iter(prefix.as_ref(), self.register_snapshot())))
    }

    /// Iterates over all keys in order.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("pear", "green")?;
    /// fruit.insert("apple", "red")?;
    /// let keys = fruit.keys().collect::<azekura::Result<Vec<_>>>()?; // the first error ends the collection
    /// assert_eq!(keys, ["apple", "pear"]);
    /// # Ok(()) }
    /// ```
    pub fn keys(&self) -> Keys {
        Keys(IterState::new(self.db_iter((Bound::Unbounded, Bound::Unbounded), self.register_snapshot())))
    }

    /// Iterates over all values in the order of their keys.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("pear", "green")?;
    /// fruit.insert("apple", "red")?;
    /// let colours = fruit.values().collect::<azekura::Result<Vec<_>>>()?;
    /// assert_eq!(colours, ["red", "green"]);
    /// # Ok(()) }
    /// ```
    pub fn values(&self) -> Values {
        Values(IterState::new(self.db_iter((Bound::Unbounded, Bound::Unbounded), self.register_snapshot())))
    }

    /// Iterates over all entries in key order; a value is read only on request.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let photos = db.open_partition("photos", Default::default())?;
    /// photos.insert("moon", vec![7; 10])?;
    /// photos.insert("sky", vec![7; 100_000])?;
    /// let mut large = Vec::new();
    /// for photo in photos.entries() {
    ///     let photo = photo?;
    ///     if photo.size() > 1_000 { // reads no value
    ///         large.push(photo.value()?);
    ///     }
    /// }
    /// assert_eq!((large.len(), large[0].len()), (1, 100_000));
    /// # Ok(()) }
    /// ```
    pub fn entries(&self) -> Entries {
        Entries(IterState::new(self.db_iter((Bound::Unbounded, Bound::Unbounded), self.register_snapshot())))
    }

    pub(crate) fn register_snapshot(&self) -> SnapshotGuard {
        self.handle.inner.snapshots.register_for(self.state.id, self.state.expiry.is_used_flag())
    }

    pub(crate) fn db_iter(&self, bounds: OwnedBounds, snapshot: SnapshotGuard) -> Result<DbIter> {
        self.handle.inner.check_process()?;
        let tree = self.state.tree()?;
        let mut view: Arc<dyn EngineView> = Arc::from(tree.view());
        if self.handle.inner.follower.is_some() {
            // Looked up after the view was taken, because the state may be replaced meanwhile.
            view = snapshot.replaced_view(self.state.id).unwrap_or(view);
        }
        let (handle, order, read_at) = (Arc::clone(&self.handle), tree.key_order().clone(), snapshot.moment());
        let iter = DbIter::with_view(handle, view, order, bounds, snapshot, read_at);
        self.state.tree()?; // otherwise the iterator may read a tree that was emptied by a deletion
        Ok(iter)
    }

    pub(crate) fn prefix_iter(&self, prefix: &[u8], snapshot: SnapshotGuard) -> Result<DbIter> {
        self.check_prefix_order()?;
        self.db_iter(prefix_bounds(prefix), snapshot)
    }

    /// Fails unless the keys with a common prefix are a range.
    pub(crate) fn check_prefix_order(&self) -> Result<()> {
        let tree = self.state.tree_if_built().map_or_else(|| self.state.tree(), Ok)?; // also of a deleted partition
        match tree.key_order().is_bytewise() {
            true => Ok(()),
            false => Err(Error::invalid("prefix() requires bytewise key order; use range() with this comparator")),
        }
    }

    /// Returns the pair with the lowest key, or `None` if the partition is empty.
    ///
    /// # Errors
    /// As [`get`](Partition::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let queue = db.open_partition("queue", Default::default())?;
    /// queue.insert(1u64.to_be_bytes(), "oldest job")?;
    /// queue.insert(2u64.to_be_bytes(), "newest job")?;
    /// let (number, job) = queue.first_key_value()?.unwrap();
    /// assert_eq!((&*number, &*job), (&1u64.to_be_bytes()[..], &b"oldest job"[..]));
    /// # Ok(()) }
    /// ```
    pub fn first_key_value(&self) -> Result<Option<(Slice, Slice)>> {
        self.iter().next().transpose()
    }

    /// Returns the pair with the highest key, or `None` if the partition is empty.
    ///
    /// # Errors
    /// As [`get`](Partition::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let log = db.open_partition("log", Default::default())?;
    /// let mut append = |line: &str| -> azekura::Result<u64> {
    ///     let next = match log.last_key_value()? {
    ///         Some((number, _)) => u64::from_be_bytes((&*number).try_into().unwrap()) + 1,
    ///         None => 1,
    ///     };
    ///     log.insert(next.to_be_bytes(), line).map(|()| next)
    /// };
    /// assert_eq!((append("started")?, append("stopped")?), (1, 2));
    /// # Ok(()) }
    /// ```
    pub fn last_key_value(&self) -> Result<Option<(Slice, Slice)>> {
        self.iter().next_back().transpose()
    }

    /// Returns whether the partition contains no key.
    ///
    /// # Errors
    /// As [`get`](Partition::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// assert!(fruit.is_empty()?);
    /// fruit.insert("apple", "red")?;
    /// assert!(!fruit.is_empty()?);
    /// # Ok(()) }
    /// ```
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.keys().next().transpose()?.is_none())
    }

    /// Returns the exact number of keys. Reads every key: O(n).
    ///
    /// # Errors
    /// As [`get`](Partition::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "green")?;
    /// fruit.insert("apple", "red")?;
    /// fruit.insert("pear", "green")?;
    /// assert_eq!(fruit.len()?, 2); // keys, not writes
    /// # Ok(()) }
    /// ```
    pub fn len(&self) -> Result<u64> {
        count_entries(self.db_iter((Bound::Unbounded, Bound::Unbounded), self.register_snapshot())?)
    }

    /// Returns an estimate of the number of keys, from counters: records less removals.
    ///
    /// Replaced values, expired records and keys that a range delete covers count until a compaction drops them.
    /// Until then the removal of an absent key counts as the removal of another one. Exact in a pool.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "green")?;
    /// fruit.insert("apple", "red")?;
    /// assert_eq!((fruit.approximate_len(), fruit.len()?), (2, 1)); // the replaced value counts
    /// fruit.major_compact()?;
    /// assert_eq!(fruit.approximate_len(), 1);
    /// fruit.remove("apple")?;
    /// assert_eq!(fruit.approximate_len(), 0);
    /// # Ok(()) }
    /// ```
    pub fn approximate_len(&self) -> u64 {
        self.state.tree_if_built().map_or(0, |tree| tree.approximate_len())
    }

    /// Writes the memtables to tables, and waits until the tables are permanent.
    ///
    /// # Errors
    /// `Io`, `OutOfSpace`, `Poisoned`, `Closed`. `Invalid` if the database is open for reading only. After an error the
    /// records stay in the memtables and in the WAL.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).workers(0).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// assert_eq!((fruit.metrics().levels.len(), db.metrics().flushes), (0, 0));
    /// fruit.flush()?;
    /// assert_eq!((fruit.metrics().levels[0].entries, db.metrics().flushes), (1, 1));
    /// # Ok(()) }
    /// ```
    pub fn flush(&self) -> Result<()> {
        let _call = self.handle.inner.begin_api_call();
        self.handle.inner.writer()?;
        self.handle.inner.check_outside()?;
        flush_and_wait(&self.handle.inner, &self.state)
    }

    /// Compacts all data that exists at the call into one sorted run on the lowest level, and waits for it.
    ///
    /// Versions that a snapshot or an iterator still needs are kept; a compaction after its release drops them.
    /// Concurrent writes do not delay the end of the call.
    ///
    /// # Errors
    /// As [`flush`](Partition::flush).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).workers(0).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// fruit.insert("pear", "green")?;
    /// fruit.flush()?;
    /// fruit.remove("apple")?;
    /// fruit.major_compact()?; // drops the removed value and its tombstone
    /// let bottom = fruit.metrics().levels.pop().unwrap();
    /// assert_eq!((bottom.runs, bottom.entries, bottom.tombstones), (1, 1, 0));
    /// # Ok(()) }
    /// ```
    pub fn major_compact(&self) -> Result<()> {
        self.handle.inner.writer()?;
        compact_and_wait(&self.handle.inner, &self.state)
    }

    /// Returns metrics of this partition.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let metrics = fruit.metrics();
    /// assert_eq!((metrics.name.as_str(), metrics.disk_bytes), ("fruit", 0)); // not flushed yet
    /// assert!(metrics.memtable_bytes > 0);
    /// # Ok(()) }
    /// ```
    pub fn metrics(&self) -> PartitionMetrics {
        PartitionMetrics::of(&self.state, self.handle.inner.is_forked())
    }

    /// Returns the bytes that the partition's tables and blob files (or its pool) use on disk.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).workers(0).open()?;
    /// # let photos = db.open_partition("photos", Default::default())?;
    /// photos.insert("sky", (0..100_000).map(|n| (n % 251) as u8).collect::<Vec<_>>())?;
    /// assert_eq!(photos.disk_space(), 0); // only in the WAL and in memory
    /// photos.flush()?;
    /// assert!(photos.disk_space() < 100_000); // compressed
    /// # Ok(()) }
    /// ```
    pub fn disk_space(&self) -> u64 {
        self.metrics().disk_bytes
    }

    /// Fails unless the partition belongs to the database of `handle`.
    pub(crate) fn check_same_database(&self, handle: &Arc<DbHandle>) -> Result<()> {
        if Arc::ptr_eq(&self.handle, handle) {
            return Ok(());
        }
        let message = format!("partition {:?} belongs to another database", self.name);
        Err(Error::new(ErrorKind::Invalid, message))
    }
}

/// Counts the entries that `iter` returns.
pub(crate) fn count_entries(mut iter: DbIter) -> Result<u64> {
    let mut n = 0;
    while iter.step(IterEnd::Front)? {
        n += 1;
    }
    Ok(n)
}

/// Iterates over all key-value pairs in key order.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// let fruit = db.open_partition("fruit", Default::default())?;
/// fruit.insert("apple", "red")?;
/// for pair in &fruit {
///     let (name, colour) = pair?;
///     assert_eq!((&*name, &*colour), (&b"apple"[..], &b"red"[..]));
/// }
/// # Ok(()) }
/// ```
impl IntoIterator for &Partition {
    type Item = Result<(Slice, Slice)>;
    type IntoIter = Iter;

    fn into_iter(self) -> Iter {
        self.iter()
    }
}

impl fmt::Debug for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Partition").field("name", &self.name).field("id", &self.state.id.0).finish_non_exhaustive()
    }
}

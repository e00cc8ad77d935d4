//! Implements the removal of ranges of keys: `remove_range`, `remove_prefix` and `clear`.

use std::ops::{Bound, RangeBounds};

use crate::base::key_range::KeyRange;
use crate::base::{Error, RecordKind, Result};
use crate::db::batch::Batch;
use crate::db::iter::db_iter::{OwnedBounds, own_bounds, prefix_bounds};
use crate::db::partition::Partition;
use crate::db::partition_state::PartitionState;
use crate::db::worker::{drop_covered_tables_and_wait, flush_and_wait};

impl Partition {
    /// Removes every key in `range`, by one record, however many keys there are.
    ///
    /// Reads skip removed keys and do not read them. Tables and blob files whose keys are all removed are deleted
    /// without being read, once no snapshot or iterator needs them; other tables are compacted. A pool removes the
    /// records before the call returns, and other writers wait until then. An empty range removes nothing.
    ///
    /// # Errors
    /// `Invalid` if the start of the range is above its end, or a bound has more than 65,535 bytes. Otherwise as
    /// [`insert`](Partition::insert). In a pool, `OutOfSpace` if snapshots or iterators need more of the removed
    /// records than the pool may retain.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let log = db.open_partition("log", Default::default())?;
    /// for entry in 0..100u32 {
    ///     log.insert(entry.to_be_bytes(), "text")?;
    /// }
    /// log.remove_range(..90u32.to_be_bytes())?;
    /// assert_eq!(log.len()?, 10);
    /// let reversed = log.remove_range(9u32.to_be_bytes()..8u32.to_be_bytes());
    /// assert_eq!(reversed.unwrap_err().kind(), azekura::ErrorKind::Invalid);
    /// # Ok(()) }
    /// ```
    #[doc(alias = "delete_range")]
    pub fn remove_range<K: AsRef<[u8]>>(&self, range: impl RangeBounds<K>) -> Result<()> {
        self.remove_bounds(&own_bounds(&range))
    }

    /// Removes every key that begins with `prefix`, as [`remove_range`](Partition::remove_range) does.
    ///
    /// # Errors
    /// `Invalid` if the comparator is not bytewise. Otherwise as [`remove_range`](Partition::remove_range).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let users = db.open_partition("users", Default::default())?;
    /// users.insert("ada/mail", "ada@example.org")?;
    /// users.insert("ada/name", "Ada")?;
    /// users.insert("adam/name", "Adam")?;
    /// users.remove_prefix("ada/")?;
    /// assert_eq!(users.keys().next().unwrap()?, "adam/name");
    /// # Ok(()) }
    /// ```
    pub fn remove_prefix(&self, prefix: impl AsRef<[u8]>) -> Result<()> {
        check_bytewise(&self.state)?;
        self.remove_bounds(&prefix_bounds(prefix.as_ref()))
    }

    /// Removes every key, and gives the disk space back before it returns.
    ///
    /// Flushes the partition, and deletes the tables and blob files that existed at the call. Those that a snapshot or
    /// an iterator needs are deleted after its release. A compaction whose edit could not be written is completed
    /// before. Keys that other threads insert meanwhile stay. The memory and the file of a pool become smaller, unless
    /// readers of the database run; then its next checkpoint makes them smaller. A pool in a mapped file keeps the size
    /// of its file, and its space is free for other records.
    ///
    /// # Errors
    /// As [`remove_range`](Partition::remove_range) and [`flush`](Partition::flush). If only the flush or the deletion
    /// of tables fails, the keys are removed, and background work gives the space back later.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let photos = db.open_partition("photos", Default::default())?;
    /// photos.insert("sky", (0..100_000).map(|n| (n % 251) as u8).collect::<Vec<_>>())?;
    /// photos.flush()?;
    /// assert!(photos.disk_space() > 0);
    /// photos.clear()?;
    /// assert!(photos.is_empty()? && photos.disk_space() == 0);
    /// # Ok(()) }
    /// ```
    pub fn clear(&self) -> Result<()> {
        let inner = &self.handle.inner;
        let _call = inner.begin_api_call();
        inner.check_outside()?;
        self.remove_bounds(&(Bound::Unbounded, Bound::Unbounded))?;
        flush_and_wait(inner, &self.state)?;
        drop_covered_tables_and_wait(inner, &self.state)
    }

    fn remove_bounds(&self, bounds: &OwnedBounds) -> Result<()> {
        let inner = &self.handle.inner;
        inner.writer()?;
        let Some(range) = checked_range(&self.state, bounds)? else { return Ok(()) };
        let mut value = Vec::new();
        range.encode_value(&mut value);
        self.write(RecordKind::RangeDelete, range.encoded_key(), &value)
    }
}

impl Batch {
    /// Removes every key in `range` that exists when the batch is committed, or was inserted by an earlier write of the
    /// batch; see [`Partition::remove_range`]. Later writes of the batch stay.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "green")?;
    /// let mut batch = db.batch();
    /// batch.insert(&fruit, "banana", "yellow");
    /// batch.remove_range(&fruit, "a".."c");
    /// batch.insert(&fruit, "apple", "red");
    /// batch.commit()?;
    /// assert_eq!((fruit.len()?, fruit.get("apple")?.unwrap()), (1, "red".into()));
    /// # Ok(()) }
    /// ```
    pub fn remove_range<K: AsRef<[u8]>>(&mut self, partition: &Partition, range: impl RangeBounds<K>) {
        self.push_with(|batch| batch.remove_bounds(partition, &own_bounds(&range)));
    }

    /// Removes every key that begins with `prefix`, as [`remove_range`](Batch::remove_range) does. If the comparator is
    /// not bytewise, [`commit`](Batch::commit) returns `Invalid`.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let users = db.open_partition("users", Default::default())?;
    /// # let mails = db.open_partition("mails", Default::default())?;
    /// users.insert("ada/name", "Ada")?;
    /// mails.insert("ada/1", "Hello")?;
    /// let mut batch = db.batch();
    /// batch.remove_prefix(&users, "ada/");
    /// batch.remove_prefix(&mails, "ada/");
    /// batch.commit()?;
    /// assert!(users.is_empty()? && mails.is_empty()?);
    /// # Ok(()) }
    /// ```
    pub fn remove_prefix(&mut self, partition: &Partition, prefix: impl AsRef<[u8]>) {
        self.push_with(|batch| {
            check_bytewise(&partition.state)?;
            batch.remove_bounds(partition, &prefix_bounds(prefix.as_ref()))
        });
    }

    /// Adds a range delete. After an error the batch is unchanged.
    pub(crate) fn remove_bounds(&mut self, partition: &Partition, bounds: &OwnedBounds) -> Result<()> {
        partition.check_same_database(self.handle())?;
        let Some(range) = checked_range(&partition.state, bounds)? else { return Ok(()) };
        self.write_range_delete(partition, &range)
    }
}

fn check_bytewise(partition: &PartitionState) -> Result<()> {
    match partition.tree()?.key_order().is_bytewise() {
        true => Ok(()),
        false => Err(Error::invalid("remove_prefix() requires bytewise key order; use remove_range() instead")),
    }
}

/// The range of a range delete; `None` if it is empty.
fn checked_range<'a>(partition: &PartitionState, bounds: &'a OwnedBounds) -> Result<Option<KeyRange<&'a [u8]>>> {
    let tree = partition.tree()?;
    let (start, end) = bounds;
    KeyRange::new(start.as_ref().map(Vec::as_slice), end.as_ref().map(Vec::as_slice), tree.key_order())
}

//! Implements [`Batch`], a set of writes that is committed atomically.

use std::sync::Arc;

use crate::base::{Error, RecordKind, Result};
use crate::db::catalog::PartitionState;
use crate::db::commit::{CommitPath, CommitRequest, DirectBlobWrites};
use crate::db::config::PersistMode;
use crate::db::handle::DbHandle;
use crate::db::partition::{KEPT_BUFFER_MAX, Partition};
use crate::wal::format::{WalRecord, check_key_and_value_lengths, put_record};

/// Collects writes to any partitions of one database and commits them atomically.
///
/// The writes become visible and durable together or not at all. A later write of a key replaces an earlier one.
/// Dropping a batch without [`commit`](Batch::commit) changes nothing. After a commit the batch is empty and can be
/// used again. It keeps at most 1 MiB of memory, and the database open, until it is dropped.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// let stock = db.open_partition("stock", Default::default())?;
/// let orders = db.open_partition("orders", Default::default())?;
/// let mut batch = db.batch();
/// batch.insert(&stock, "apples", "41");
/// batch.insert(&orders, "order 1", "one apple");
/// batch.commit()?;
/// assert!(stock.contains_key("apples")? && orders.contains_key("order 1")?);
/// # Ok(()) }
/// ```
#[must_use = "a batch does nothing until it is committed"]
pub struct Batch {
    handle: Arc<DbHandle>,
    payload: Vec<u8>,
    count: u32,
    partitions: Vec<Arc<PartitionState>>,
    direct_writes: DirectBlobWrites,
    durability: PersistMode,
    /// Error of the first call that failed. `commit` returns it and writes nothing.
    first_error: Option<Error>,
}

impl Batch {
    pub(crate) fn new(handle: Arc<DbHandle>) -> Batch {
        let durability = handle.inner.settings.durability;
        Batch {
            handle,
            payload: Vec::new(),
            count: 0,
            partitions: Vec::new(),
            direct_writes: DirectBlobWrites::default(),
            durability,
            first_error: None,
        }
    }

    /// Sets the value of a key.
    ///
    /// A value of at least 1 MiB in a partition with key-value separation is written to a blob file by this call and
    /// uses no memory in the batch. [`commit`](Batch::commit) returns the error if that write fails.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut batch = db.batch();
    /// batch.insert(&fruit, "apple", "green");
    /// batch.insert(&fruit, "apple", "red"); // a later write of a key replaces an earlier one
    /// batch.commit()?;
    /// assert_eq!(fruit.get("apple")?.unwrap(), "red");
    /// # Ok(()) }
    /// ```
    pub fn insert(&mut self, partition: &Partition, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) {
        self.push(partition, RecordKind::Put, key.as_ref(), value.as_ref());
    }

    /// Removes a key.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let users = db.open_partition("users", Default::default())?;
    /// users.insert("ada", "mathematician")?;
    /// let mut rename = db.batch();
    /// rename.remove(&users, "ada");
    /// rename.insert(&users, "ada lovelace", "mathematician");
    /// rename.commit()?; // no reader sees both keys or neither
    /// assert_eq!(users.keys().next().unwrap()?, "ada lovelace");
    /// # Ok(()) }
    /// ```
    pub fn remove(&mut self, partition: &Partition, key: impl AsRef<[u8]>) {
        self.push(partition, RecordKind::Delete, key.as_ref(), &[]);
    }

    /// Removes a key that was inserted exactly once since it was last removed; see [`Partition::remove_weak`].
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let queue = db.open_partition("queue", Default::default())?;
    /// # let done = db.open_partition("done", Default::default())?;
    /// queue.insert("job 1", "send a mail")?; // inserted exactly once
    /// let mut batch = db.batch();
    /// batch.remove_weak(&queue, "job 1");
    /// batch.insert(&done, "job 1", "mail sent");
    /// batch.commit()?;
    /// assert!(queue.is_empty()? && done.contains_key("job 1")?);
    /// # Ok(()) }
    /// ```
    pub fn remove_weak(&mut self, partition: &Partition, key: impl AsRef<[u8]>) {
        self.push(partition, RecordKind::SingleDelete, key.as_ref(), &[]);
    }

    fn push(&mut self, partition: &Partition, kind: RecordKind, key: &[u8], value: &[u8]) {
        if self.first_error.is_some() {
            return;
        }
        let checked =
            check_key_and_value_lengths(key, value).and_then(|()| partition.check_same_database(&self.handle));
        let written =
            checked.and_then(|()| match kind == RecordKind::Put && partition.state.uses_direct_write(value.len()) {
                true => self.write_blob(partition, key, value),
                false => self.write(partition, kind, key, value),
            });
        if let Err(error) = written {
            self.first_error = Some(error);
        }
    }

    #[cold]
    fn write_blob(&mut self, partition: &Partition, key: &[u8], value: &[u8]) -> Result<()> {
        let direct_write = self.handle.inner.write_blob_directly(&partition.state, value)?;
        let mut pointer = Vec::new();
        direct_write.pointer.encode(&mut pointer);
        self.direct_writes.add(&partition.state, direct_write);
        self.write(partition, RecordKind::BlobPointer, key, &pointer)
    }

    fn write(&mut self, partition: &Partition, kind: RecordKind, key: &[u8], value: &[u8]) -> Result<()> {
        let limit = self.handle.inner.settings.memory_budget / 2;
        let size = self.payload.len() as u64 + key.len() as u64 + value.len() as u64;
        if size > limit || self.count == u32::MAX {
            return Err(Error::invalid(format!("batch is larger than half the memory budget ({limit} bytes)")));
        }
        if self.partitions.last().is_none_or(|last| last.id != partition.state.id)
            && !self.partitions.iter().any(|known| known.id == partition.state.id)
        {
            self.partitions.push(Arc::clone(&partition.state));
        }
        put_record(&mut self.payload, &WalRecord { kind, partition: partition.state.id, key, value });
        self.count += 1;
        Ok(())
    }

    /// Sets the durability that [`commit`](Batch::commit) waits for, also for later commits of this batch. Default: the
    /// durability of the database.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let orders = db.open_partition("orders", Default::default())?;
    /// let mut batch = db.batch();
    /// batch.insert(&orders, "order 1", "one apple");
    /// let syncs = db.metrics().wal_syncs;
    /// batch.durability(azekura::PersistMode::SyncData).commit()?; // now it survives power loss
    /// assert!(db.metrics().wal_syncs > syncs);
    /// # Ok(()) }
    /// ```
    pub fn durability(&mut self, mode: PersistMode) -> &mut Batch {
        self.durability = mode;
        self
    }

    /// Discards all writes, and the error of a write that failed. The durability stays.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut batch = db.batch();
    /// batch.insert(&fruit, [0; 65_536], "the key is too long");
    /// batch.clear(); // the error too
    /// batch.insert(&fruit, "apple", "red");
    /// batch.commit()?;
    /// assert_eq!(fruit.len()?, 1);
    /// # Ok(()) }
    /// ```
    pub fn clear(&mut self) {
        self.payload.clear();
        self.payload.shrink_to(KEPT_BUFFER_MAX);
        self.count = 0;
        self.partitions.clear();
        self.direct_writes = DirectBlobWrites::default();
        self.first_error = None;
    }

    /// Returns the number of writes.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let log = db.open_partition("log", Default::default())?;
    /// let mut batch = db.batch();
    /// for line in 0..250u32 {
    ///     batch.insert(&log, line.to_be_bytes(), "text");
    ///     if batch.len() == 100 {
    ///         batch.commit()?; // the batch is empty again
    ///     }
    /// }
    /// batch.commit()?;
    /// assert_eq!((log.len()?, db.metrics().commits), (250, 3));
    /// # Ok(()) }
    /// ```
    pub fn len(&self) -> usize {
        self.count as usize
    }

    /// Returns whether the batch contains no writes.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut batch = db.batch();
    /// batch.insert(&fruit, "apple", "red");
    /// assert!(!batch.is_empty());
    /// batch.commit()?;
    /// assert!(batch.is_empty());
    /// # Ok(()) }
    /// ```
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Commits all writes atomically, with the durability of the batch. An empty batch only syncs what its durability
    /// requires.
    ///
    /// # Errors
    /// `Invalid` if a write broke a limit or its partition belongs to another database (the first such error is
    /// returned); otherwise as [`Partition::insert`]. After an error no write of the batch is visible, with one
    /// exception: if the writes succeeded and only the sync failed, all of them are visible, and the next open
    /// recovers all of them or none. The batch is empty afterwards, also after an error.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// use azekura::ErrorKind;
    /// let mut batch = db.batch();
    /// batch.insert(&fruit, "apple", "red");
    /// batch.insert(&fruit, [0; 65_536], "the key is too long");
    /// assert_eq!(batch.commit().unwrap_err().kind(), ErrorKind::Invalid);
    /// assert!(fruit.is_empty()? && batch.is_empty()); // nothing was written
    /// batch.insert(&fruit, "apple", "red");
    /// batch.commit()?;
    /// # assert_eq!(fruit.len()?, 1);
    /// # Ok(()) }
    /// ```
    pub fn commit(&mut self) -> Result<()> {
        let done = self.commit_writes();
        self.clear();
        done
    }

    fn commit_writes(&mut self) -> Result<()> {
        if let Some(error) = self.first_error.take() {
            return Err(error);
        }
        let direct_writes = std::mem::take(&mut self.direct_writes);
        let inner = &self.handle.inner;
        if self.count == 0 {
            inner.writer()?;
            return inner.persist(self.durability);
        }
        let (payload, partitions) = (&self.payload[..], &self.partitions[..]);
        let commit =
            CommitRequest { payload, count: self.count, partitions, reservations: &[], path: CommitPath::Logged };
        match direct_writes.is_empty() {
            true => inner.commit(commit, self.durability),
            false => inner.commit_with_direct_writes(commit, direct_writes, self.durability),
        }
    }
}

/// Inserts entries, each with its partition.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// let squares = db.open_partition("squares", Default::default())?;
/// let mut batch = db.batch();
/// batch.extend((0..10u32).map(|n| (&squares, n.to_be_bytes(), (n * n).to_be_bytes())));
/// batch.commit()?;
/// assert_eq!(squares.len()?, 10);
/// # Ok(()) }
/// ```
impl<'a, K: AsRef<[u8]>, V: AsRef<[u8]>> Extend<(&'a Partition, K, V)> for Batch {
    fn extend<I: IntoIterator<Item = (&'a Partition, K, V)>>(&mut self, entries: I) {
        entries.into_iter().for_each(|(partition, key, value)| self.insert(partition, key, value));
    }
}

impl std::fmt::Debug for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Batch").field("len", &self.count).field("bytes", &self.payload.len()).finish_non_exhaustive()
    }
}

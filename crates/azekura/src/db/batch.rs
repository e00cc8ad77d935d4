//! Implements [`Batch`], a set of writes that is committed atomically.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::base::key_range::KeyRange;
use crate::base::{Error, ErrorKind, RecordKind, Result};
use crate::db::config::PersistMode;
use crate::db::handle::DbHandle;
use crate::db::handle::ExclusiveTurn;
use crate::db::inner::ValueWrite;
use crate::db::partition::Partition;
use crate::db::partition_state::PartitionState;
use crate::db::state::list_growth::list_bytes;
use crate::db::state::partition_expiry::ttl_ms;
use crate::db::writes::commit_check::{CommitCheck, LOST_ROUNDS_MAX, ReadsOfPartition, conflict};
use crate::db::writes::computed_merges::ComputedMerges;
use crate::db::writes::staged_records::StagedGuard;
use crate::db::writes::write_batch::{KEPT_BUFFER_MAX, WriteBatch};
use crate::engine::ReadSeqno;
use crate::iter::range_tombstones::RangeTombstones;
use crate::mem::slice::Slice;
use crate::memtable::Memtable;
use crate::wal::format::{WalRecord, WalRecordIter, check_key_and_value_lengths};

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
    /// Number of encoded writes.
    count: u32,
    /// Maximum memory of the writes in memtables, in bytes, without the 128 KiB of each memtable.
    ordered_bytes_max: u64,
    /// Number of writes and expected values that were given, also of those that failed. Not kept in a transaction.
    operations: usize,
    /// The partitions of the writes, and what their trees have staged.
    staged: StagedGuard<'static>,
    durability: PersistMode,
    expectations: Vec<Expectation>,
    expectation_bytes: u64,
    /// Whether an operand for a pool was added since the batch was empty.
    has_operands_to_compute: bool,
    /// Error of the first operation that failed. `commit` returns it and writes nothing.
    first_error: Option<Error>,
}

/// The value that a key must have when the batch is committed; `None`: the key must be absent.
struct Expectation {
    /// The position among the operations of the batch.
    position: usize,
    partition: Partition,
    key: Slice,
    value: Option<Slice>,
}

/// A state of a batch to which it can be reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchMark {
    payload_len: usize,
    count: u32,
    ordered_bytes_max: u64,
    /// As [`counts`](crate::db::writes::staged_records::StagedRecords::counts).
    staged_counts: (usize, usize),
}

impl Batch {
    pub(crate) fn new(handle: Arc<DbHandle>) -> Batch {
        let durability = handle.inner.settings.durability;
        Batch {
            handle,
            payload: Vec::new(),
            count: 0,
            ordered_bytes_max: 0,
            operations: 0,
            staged: StagedGuard::default(),
            durability,
            expectations: Vec::new(),
            expectation_bytes: 0,
            has_operands_to_compute: false,
            first_error: None,
        }
    }

    /// Sets the value of a key.
    ///
    /// A value of at least 4 KiB in a partition with key-value separation is written to a blob file by this call and
    /// uses no memory in the batch. [`commit`](Batch::commit) returns the error if that write fails. If the
    /// [durability](Batch::durability) of the batch requests a sync, this applies to values of at least 1 MiB.
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

    /// Sets the value of a key until `ttl` has passed since this call; see [`Partition::insert_with_ttl`].
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let sessions = db.open_partition("sessions", Default::default())?;
    /// use std::time::Duration;
    /// let mut batch = db.batch();
    /// batch.insert_with_ttl(&sessions, "ada", "logged in", Duration::from_secs(3600));
    /// batch.insert(&sessions, "logins", "1"); // does not expire
    /// batch.commit()?;
    /// assert_eq!(sessions.len()?, 2);
    /// batch.insert_with_ttl(&sessions, "grace", "logged in", Duration::ZERO);
    /// assert!(batch.commit().is_err()); // nothing is logged
    /// # Ok(()) }
    /// ```
    pub fn insert_with_ttl(
        &mut self,
        partition: &Partition,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        ttl: Duration,
    ) {
        self.push_with(|batch| batch.try_push_value(partition, key.as_ref(), value.as_ref(), Some(ttl_ms(ttl)?)));
    }

    /// Sets the value of a key until a point in time, in milliseconds since 1970, as in
    /// [`Entry::expiry_ms`](crate::Entry::expiry_ms). Without one, the value does not expire, also in a partition with
    /// a [default TTL](crate::PartitionCreateOptions::default_ttl). A value whose time has come is not visible.
    ///
    /// [`commit`](Batch::commit) returns `Invalid` for a time of 2^64 − 1.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let sessions = db.open_partition("sessions", Default::default())?;
    /// # let copy = db.open_partition("copy", Default::default())?;
    /// sessions.insert_with_ttl("ada", "logged in", std::time::Duration::from_secs(3600))?;
    /// let mut batch = db.batch();
    /// for entry in sessions.entries() {
    ///     let entry = entry?;
    ///     batch.insert_with_expiry(&copy, entry.key(), entry.value()?, entry.expiry_ms());
    /// }
    /// batch.commit()?;
    /// let expiry_ms = |of: &azekura::Partition| of.entries().next().unwrap().unwrap().expiry_ms();
    /// assert_eq!(expiry_ms(&copy), expiry_ms(&sessions));
    /// # Ok(()) }
    /// ```
    pub fn insert_with_expiry(
        &mut self,
        partition: &Partition,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        expiry_ms: Option<u64>,
    ) {
        let (key, value) = (key.as_ref(), value.as_ref());
        self.push_with(|batch| {
            check_key_and_value_lengths(key, value)?;
            partition.check_same_database(&batch.handle)?;
            if let Some(expiry_ms) = expiry_ms {
                batch.handle.inner.begin_write_until(&partition.state, expiry_ms, value)?;
            }
            batch.push_expiring(partition, key, value, expiry_ms)
        });
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

    /// Makes the commit depend on the value of a key: [`commit`](Batch::commit) writes only if `key` has `value`, or
    /// for `None` is absent, and returns `Conflict` otherwise. Writes of this batch do not count.
    ///
    /// Costs one read of the key at the commit, and memory for key and value until then. See
    /// [`Database::transact`](crate::Database::transact) for decisions that depend on more than equality.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let seats = db.open_partition("seats", Default::default())?;
    /// # let bookings = db.open_partition("bookings", Default::default())?;
    /// let mut book = |name: &str| {
    ///     let mut batch = db.batch();
    ///     batch.expect(&seats, "12a", None); // the seat is free
    ///     batch.insert(&seats, "12a", name);
    ///     batch.insert(&bookings, name, "12a");
    ///     batch.commit()
    /// };
    /// book("ada")?;
    /// assert_eq!(book("grace").unwrap_err().kind(), azekura::ErrorKind::Conflict);
    /// assert!(!bookings.contains_key("grace")?);
    /// # Ok(()) }
    /// ```
    pub fn expect(&mut self, partition: &Partition, key: impl AsRef<[u8]>, value: Option<&[u8]>) {
        let (position, key) = (self.operations, key.as_ref());
        self.push_with(|batch| {
            let limit = batch.handle.inner.settings.memory_budget / 2;
            let bytes = (size_of::<Expectation>() + key.len() + value.map_or(0, <[u8]>::len)) as u64;
            check_key_and_value_lengths(key, &[])?;
            partition.check_same_database(&batch.handle)?;
            if batch.expectation_bytes + bytes > limit {
                let message = format!("expected values need more than half the memory budget ({limit})");
                return Err(Error::invalid(message));
            }
            batch.expectation_bytes += bytes;
            let (partition, key, value) = (partition.clone(), Slice::from(key), value.map(Slice::from));
            batch.expectations.push(Expectation { position, partition, key, value });
            Ok(())
        });
    }

    /// Returns the error of the first operation that failed, which [`commit`](Batch::commit) will return. Its
    /// [`batch_position`](Error::batch_position) tells which operation that was.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut batch = db.batch();
    /// batch.insert(&fruit, "apple", "red");
    /// batch.insert(&fruit, [0; 65_536], "the key is too long");
    /// batch.insert(&fruit, "pear", "green");
    /// assert_eq!(batch.error().unwrap().batch_position(), Some(1));
    /// assert!(batch.commit().is_err());
    /// # Ok(()) }
    /// ```
    pub fn error(&self) -> Option<&Error> {
        self.first_error.as_ref()
    }

    /// Returns the keys of all writes.
    pub(crate) fn keys(&self) -> Result<Vec<&[u8]>> {
        WalRecordIter::new(&self.payload).map(|record| Ok(record?.key)).collect()
    }

    fn push(&mut self, partition: &Partition, kind: RecordKind, key: &[u8], value: &[u8]) {
        self.push_with(|batch| batch.try_push(partition, kind, key, value));
    }

    /// Counts an operation, and runs it unless an earlier one failed.
    #[inline]
    pub(crate) fn push_with(&mut self, operation: impl FnOnce(&mut Batch) -> Result<()>) {
        let position = self.operations;
        self.operations += 1;
        if self.first_error.is_none()
            && let Err(error) = operation(self)
        {
            self.first_error = Some(error.at_batch_position(position));
        }
    }

    /// Changes the value of a key by the merge operator of its partition; see [`Partition::merge`]. It applies to
    /// earlier writes of the batch too.
    ///
    /// If the partition is a pool, the commit computes the value. That takes a copy of the batch, and for each write
    /// to the pool up to 100 bytes and its key, for a range delete 400 bytes and three times its bounds: at most half
    /// the memory budget beyond the copy, else [`commit`](Batch::commit) returns `Invalid`. The batch with the computed
    /// values must not exceed the limit of batches.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// use azekura::{PartitionComponents, merge_operators};
    /// let orders = db.open_partition("orders", Default::default())?;
    /// let components = PartitionComponents::default().merge_operator(merge_operators::u64_add());
    /// let sold = db.open_partition_with("sold", Default::default(), components)?;
    /// let mut batch = db.batch();
    /// batch.insert(&orders, "order 1", "3 apples");
    /// batch.merge(&sold, "apples", 3u64.to_le_bytes());
    /// batch.commit()?;
    /// assert_eq!(sold.get("apples")?.unwrap(), 3u64.to_le_bytes()[..]);
    /// # Ok(()) }
    /// ```
    pub fn merge(&mut self, partition: &Partition, key: impl AsRef<[u8]>, operand: impl AsRef<[u8]>) {
        self.push_with(|batch| batch.try_push(partition, RecordKind::Merge, key.as_ref(), operand.as_ref()));
    }

    /// Adds a write. After an error the batch is unchanged.
    pub(crate) fn try_push(&mut self, partition: &Partition, kind: RecordKind, key: &[u8], value: &[u8]) -> Result<()> {
        if kind == RecordKind::Put {
            return self.try_push_value(partition, key, value, partition.state.expiry.default_ttl_ms());
        }
        check_key_and_value_lengths(key, value)?;
        partition.check_same_database(&self.handle)?;
        if kind == RecordKind::Merge {
            partition.state.check_operand(value)?;
            self.has_operands_to_compute |= partition.state.computes_merges();
        }
        self.write(partition, kind, key, value)
    }

    /// Adds a value, which expires after `ttl_ms` milliseconds if that is given.
    pub(crate) fn try_push_value(
        &mut self,
        partition: &Partition,
        key: &[u8],
        value: &[u8],
        ttl_ms: Option<u64>,
    ) -> Result<()> {
        check_key_and_value_lengths(key, value)?;
        partition.check_same_database(&self.handle)?;
        if ttl_ms.is_none() && !self.stages_value(partition, value.len()) {
            return self.write(partition, RecordKind::Put, key, value);
        }
        let expiring = |ttl_ms| self.handle.inner.begin_expiring_write(&partition.state, ttl_ms, value);
        let expires_ms = ttl_ms.map(expiring).transpose()?;
        self.push_expiring(partition, key, value, expires_ms)
    }

    /// Adds a value that was checked, and that expires at `expires_ms` if that is given.
    fn push_expiring(
        &mut self,
        partition: &Partition,
        key: &[u8],
        value: &[u8],
        expires_ms: Option<u64>,
    ) -> Result<()> {
        let inner = &self.handle.inner;
        self.check_count()?;
        let value = ValueWrite { value, expires_ms, mode: self.durability };
        let len = inner.put_value(&mut self.payload, &mut self.staged, &partition.state, key, &value)?;
        self.count_write(partition, key, len);
        Ok(())
    }

    /// Whether a value of `len` bytes is staged when it is added.
    pub(crate) fn stages_value(&self, partition: &Partition, len: usize) -> bool {
        partition.state.stages_value(len, self.durability)
    }

    /// The encoded writes, their number, and their partitions.
    pub(crate) fn writes(&self) -> (&[u8], u32, &[Arc<PartitionState>]) {
        (&self.payload, self.count, self.staged.partitions())
    }

    /// Memory of the encoded writes in bytes, with `more` bytes more, and of the list of staged values.
    pub(crate) fn payload_bytes(&self, more: usize) -> u64 {
        list_bytes(&self.payload, more) + self.staged.list_bytes()
    }

    /// Maximum memory of the writes in memtables, in bytes, without the 128 KiB of each memtable.
    pub(crate) fn ordered_bytes_max(&self) -> u64 {
        self.ordered_bytes_max
    }

    pub(crate) fn handle(&self) -> &Arc<DbHandle> {
        &self.handle
    }

    pub(crate) fn mark(&self) -> BatchMark {
        BatchMark {
            payload_len: self.payload.len(),
            count: self.count,
            ordered_bytes_max: self.ordered_bytes_max,
            staged_counts: self.staged.counts(),
        }
    }

    /// Discards the writes that were added since `mark`.
    pub(crate) fn reset_to(&mut self, mark: BatchMark) {
        self.payload.truncate(mark.payload_len);
        self.count = mark.count;
        self.ordered_bytes_max = mark.ordered_bytes_max;
        self.staged.truncate(mark.staged_counts);
    }

    pub(crate) fn write(&mut self, partition: &Partition, kind: RecordKind, key: &[u8], value: &[u8]) -> Result<()> {
        self.check_count()?;
        let record = WalRecord { kind, partition: partition.state.id, key, value };
        self.handle.inner.put_record(&mut self.payload, &record)?;
        self.count_write(partition, key, value.len());
        Ok(())
    }

    fn check_count(&self) -> Result<()> {
        if self.count < u32::MAX { Ok(()) } else { Err(Error::invalid("a batch has at most 2^32 - 1 writes")) }
    }

    fn count_write(&mut self, partition: &Partition, key: &[u8], value_len: usize) {
        self.staged.add_partition(&partition.state);
        self.count += 1;
        self.ordered_bytes_max += Memtable::bytes_max(key.len(), value_len);
    }

    /// Adds a range delete, as [`write`](Batch::write). Ordered writes have it in a set, not among the records.
    pub(crate) fn write_range_delete(&mut self, partition: &Partition, range: &KeyRange<&[u8]>) -> Result<()> {
        let mut value = Vec::new();
        range.encode_value(&mut value);
        let ordered_bytes_max = self.ordered_bytes_max + RangeTombstones::bytes_max(range);
        self.write(partition, RecordKind::RangeDelete, range.encoded_key(), &value)?;
        self.ordered_bytes_max = ordered_bytes_max;
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

    /// Discards all operations, and the error of one that failed. The durability stays.
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
        self.ordered_bytes_max = 0;
        self.operations = 0;
        self.staged = StagedGuard::default();
        self.expectations.clear();
        self.expectation_bytes = 0;
        self.has_operands_to_compute = false;
        self.first_error = None;
    }

    /// Returns the number of operations that were given since the batch was empty: writes and
    /// [expected](Batch::expect) values, also those that failed and those behind them.
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
        self.operations
    }

    /// Returns whether no operation was given since the batch was created, committed or cleared.
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
        self.operations == 0
    }

    /// Commits all writes atomically, with the durability of the batch. An empty batch only syncs what its durability
    /// requires.
    ///
    /// # Errors
    /// `Conflict` if a key does not have its [expected](Batch::expect) value, `Invalid` if a write broke a limit or its
    /// partition belongs to another database (the first such error is returned), or if [operands](Batch::merge) for
    /// pools need too much memory; otherwise as [`Partition::insert`].
    /// If one operation caused the error, [`batch_position`](Error::batch_position) is its position.
    /// After an error no write of the batch is visible, with one
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
        /// Also clears the batch if the caller's `Fs` or `Env` panics: a second commit would write pointers to values
        /// that were released. A panic of a comparator does not unwind to here.
        struct ClearOnDrop<'a>(&'a mut Batch);
        impl Drop for ClearOnDrop<'_> {
            fn drop(&mut self) {
                self.0.clear();
            }
        }
        ClearOnDrop(self).0.commit_writes()
    }

    fn commit_writes(&mut self) -> Result<()> {
        if let Some(error) = self.first_error.take() {
            return Err(error);
        }
        match self.expectations.is_empty() {
            true => self.commit_with_check(None, None),
            false => self.commit_if_expected(),
        }
    }

    /// Commits the writes if `check` finds no conflict. The writes stay in the batch. The exclusive turn of the commit
    /// ends before the commit is synced, so that other commits do not wait for the sync.
    pub(crate) fn commit_with_check(
        &self,
        check: Option<&Arc<CommitCheck>>,
        turn: Option<ExclusiveTurn>,
    ) -> Result<()> {
        match turn {
            None => self.commit_as(check, self.durability),
            Some(turn) => self.commit_in_turn(turn, self.durability, || self.commit_as(check, PersistMode::Buffer)),
        }
    }

    /// Runs `commit`, which requests no sync, and ends `turn` before the sync of the WAL.
    fn commit_in_turn(
        &self,
        turn: ExclusiveTurn,
        durability: PersistMode,
        commit: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let inner = &self.handle.inner;
        // Large values are synced within the turn: a failure behind the commit would poison the database.
        inner.sync_staged(&self.staged, durability)?;
        let committed = commit();
        drop(turn);
        committed.and_then(|()| inner.make_durable(inner.last_visible.get(), durability))
    }

    fn commit_as(&self, check: Option<&Arc<CommitCheck>>, durability: PersistMode) -> Result<()> {
        let inner = &self.handle.inner;
        if self.count == 0 {
            inner.writer()?;
            return inner.persist(durability);
        }
        if self.has_operands_to_compute {
            return self.commit_computed_merges(check, durability);
        }
        let batch = WriteBatch { check, ..WriteBatch::new(&self.payload, self.count, &self.staged) };
        inner.write(&batch, durability)
    }

    /// Commits the writes with the values that the operands lead to. Computes them anew if another commit has
    /// changed one of their keys meanwhile. After [`LOST_ROUNDS_MAX`] rounds no other commit can.
    #[cold]
    fn commit_computed_merges(&self, check: Option<&Arc<CommitCheck>>, durability: PersistMode) -> Result<()> {
        let inner = &self.handle.inner;
        inner.writer()?;
        let is_in_turn = check.is_some_and(|check| check.is_in_turn());
        let mut lost_rounds = 0;
        loop {
            let needs_turn = !is_in_turn && lost_rounds >= LOST_ROUNDS_MAX;
            let turn = if needs_turn { Some(ExclusiveTurn::begin(&self.handle)?) } else { None };
            let snapshot = inner.snapshots.register();
            let bytes_max = inner.settings.memory_budget / 2;
            let compute =
                || ComputedMerges::compute(&self.payload, self.staged.partitions(), snapshot.moment(), bytes_max);
            let merge = catch_unwind(AssertUnwindSafe(compute))
                .unwrap_or_else(|_| Err(Error::invalid("a comparator panicked while the operands were computed")));
            let ComputedMerges { payload, count, reads, .. } = merge?;
            let merge_check = CommitCheck::new(reads, false, is_in_turn || turn.is_some(), snapshot.seqno());
            let merge_check = Arc::new(merge_check.after(check));
            inner.check_payload_len(payload.len() as u64)?;
            let batch = WriteBatch { check: Some(&merge_check), ..WriteBatch::new(&payload, count, &self.staged) };
            if let Some(turn) = turn {
                return self.commit_in_turn(turn, durability, || inner.write(&batch, PersistMode::Buffer));
            }
            match inner.write(&batch, durability) {
                Err(error) if error.kind() == ErrorKind::Conflict && !is_in_turn => {
                    if let Some(check) = check {
                        check.validate(&payload, self.staged.partitions(), inner.last_visible.get())?;
                    }
                    lost_rounds += 1;
                }
                committed => return committed,
            }
        }
    }

    /// Commits the writes if all keys have their expected values. A key that was changed and has its expected value
    /// again is no conflict. So each round compares the values at a snapshot, and commits if they have not changed
    /// since.
    #[cold]
    fn commit_if_expected(&mut self) -> Result<()> {
        self.handle.inner.writer()?;
        let mut lost_rounds = 0;
        loop {
            let turn = if lost_rounds < LOST_ROUNDS_MAX { None } else { Some(ExclusiveTurn::begin(&self.handle)?) };
            let snapshot = self.handle.inner.snapshots.register();
            let mut reads = Vec::new();
            for Expectation { position, partition, key, value } in &self.expectations {
                let found = partition.get_at(key, ReadSeqno::At(snapshot.moment()));
                if found.map_err(|error| error.at_batch_position(*position))? != *value {
                    self.handle.inner.counters.record_conflict();
                    return Err(conflict(&partition.state, key).at_batch_position(*position));
                }
                ReadsOfPartition::of(&mut reads, &partition.state).keys.push(key.clone());
            }
            let is_in_turn = turn.is_some();
            let check = Arc::new(CommitCheck::new(reads, false, is_in_turn, snapshot.seqno()));
            match self.commit_with_check(Some(&check), turn) {
                Err(error) if error.kind() == ErrorKind::Conflict && !is_in_turn => lost_rounds += 1,
                committed => return committed,
            }
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
        f.debug_struct("Batch")
            .field("len", &self.operations)
            .field("bytes", &self.payload.len())
            .finish_non_exhaustive()
    }
}

//! Implements [`Transaction`]: reads at a snapshot, own writes, and a commit that fails if a read would have another
//! result now.

use std::ops::{Bound, RangeBounds};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use crate::base::{RecordKind, Result};
use crate::db::config::PersistMode;
use crate::db::handle::DbHandle;
use crate::db::iter::db_iter::own_bounds;
use crate::db::iter::iterators::{Entries, Iter, Keys};
use crate::db::partition::Partition;
use crate::db::state::partition_expiry::ttl_ms;
use crate::db::transaction::read_set::ReadSet;
use crate::db::transaction::transaction_options::{Isolation, TransactionOptions};
use crate::db::transaction::transaction_state::TransactionState;
use crate::db::transaction::untracked_reads::UntrackedReads;
use crate::mem::slice::Slice;

/// A state of a transaction to which [`Transaction::rollback_to`] returns.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// let mut tx = db.transaction();
/// tx.insert(&fruit, "apple", "red")?;
/// let before = tx.savepoint();
/// tx.insert(&fruit, "pear", "green")?;
/// tx.rollback_to(&before)?;
/// tx.commit()?;
/// assert_eq!(fruit.len()?, 1);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Savepoint {
    transaction: Weak<Mutex<ReadSet>>,
    number: u64,
}

/// Reads and writes of any partitions of one database that are committed as a whole, unless another commit interfered.
///
/// All reads see the state when the transaction began, and the writes of the transaction. No other reader sees these
/// before the commit. [`commit`](Transaction::commit) fails with [`Conflict`](crate::ErrorKind::Conflict) if another
/// commit has changed what was read; see [`Isolation`]. Dropping a transaction without a commit changes nothing.
/// [`Database::transact`](crate::Database::transact) repeats a transaction until it succeeds.
///
/// `Send`, and without lifetimes. While it exists, the versions that it can read are kept in memory and on disk, and
/// the database stays open. Its memory is limited: the keys and bounds that it has read, and its writes, take at most
/// half the memory budget, and 128 KiB more for each partition. A write takes up to four times its size and 100 bytes,
/// and up to five times its size above 4 KiB; a range delete takes up to 150 bytes more.
/// A call that would exceed the limit returns `Invalid`, and the transaction stays as it was. Iterators that have
/// little memory left for the keys that they have read count as having read all of their bounds, which may cause more
/// conflicts.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// # let accounts = db.open_partition("accounts", Default::default())?;
/// # accounts.insert("ada", "7")?;
/// let mut tx = db.transaction();
/// let money = tx.get(&accounts, "ada")?.unwrap();
/// tx.insert(&accounts, "grace", money)?;
/// tx.remove(&accounts, "ada")?;
/// accounts.insert("ada", "9")?; // another thread
/// let error = tx.commit().unwrap_err();
/// assert_eq!(error.kind(), azekura::ErrorKind::Conflict);
/// assert_eq!(error.conflicting_key(), Some(("accounts", &b"ada"[..])));
/// # Ok(()) }
/// ```
#[must_use = "a transaction changes nothing until it is committed"]
pub struct Transaction(TransactionState);

impl Transaction {
    pub(crate) fn begin(handle: &Arc<DbHandle>, options: &TransactionOptions) -> Result<Transaction> {
        TransactionState::begin(handle, options).map(Transaction)
    }

    pub(crate) fn new(handle: &Arc<DbHandle>, isolation: Isolation) -> Transaction {
        Transaction(TransactionState::new(handle, isolation))
    }

    /// Returns the value of a key: the one that this transaction has written, or else the one when it began.
    ///
    /// # Errors
    /// As [`Partition::get`]; `Invalid` if the partition belongs to another database, or the transaction exceeds its
    /// memory limit.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut tx = db.transaction();
    /// assert!(tx.get(&fruit, "apple")?.is_none());
    /// tx.insert(&fruit, "apple", "red")?;
    /// assert_eq!(tx.get(&fruit, "apple")?.unwrap(), "red");
    /// assert!(fruit.get("apple")?.is_none()); // not committed yet
    /// # Ok(()) }
    /// ```
    pub fn get(&self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<Option<Slice>> {
        self.0.read(partition, key.as_ref(), true)
    }

    /// Returns whether a key has a value.
    ///
    /// # Errors
    /// As [`get`](Transaction::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let users = db.open_partition("users", Default::default())?;
    /// let mut tx = db.transaction();
    /// assert!(!tx.contains_key(&users, "ada")?); // the commit checks that this is still true
    /// tx.insert(&users, "ada", "mathematician")?;
    /// tx.commit()?;
    /// # assert!(users.contains_key("ada")?);
    /// # Ok(()) }
    /// ```
    pub fn contains_key(&self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<bool> {
        Ok(self.size_of(partition, key)?.is_some())
    }

    /// Returns the length of the value of a key in bytes, without reading a blob file.
    ///
    /// # Errors
    /// As [`get`](Transaction::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let photos = db.open_partition("photos", Default::default())?;
    /// let mut tx = db.transaction();
    /// tx.insert(&photos, "sky", vec![7; 100_000])?;
    /// assert_eq!(tx.size_of(&photos, "sky")?, Some(100_000));
    /// # Ok(()) }
    /// ```
    pub fn size_of(&self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<Option<u32>> {
        self.0.read_size(partition, key.as_ref(), true)
    }

    /// Returns the values of several keys, in the order of the keys.
    ///
    /// # Errors
    /// As [`get`](Transaction::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let values = db.transaction().multi_get(&fruit, ["apple", "pear"])?;
    /// assert_eq!(values, [Some("red".into()), None]);
    /// # Ok(()) }
    /// ```
    pub fn multi_get<K: AsRef<[u8]>>(
        &self,
        partition: &Partition,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Slice>>> {
        keys.into_iter().map(|key| self.0.read(partition, key.as_ref(), true)).collect()
    }

    /// Returns the pair with the lowest key.
    ///
    /// # Errors
    /// As [`get`](Transaction::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let queue = db.open_partition("queue", Default::default())?;
    /// # let done = db.open_partition("done", Default::default())?;
    /// # queue.insert("job 1", "send a mail")?;
    /// let mut tx = db.transaction();
    /// if let Some((number, job)) = tx.first_key_value(&queue)? {
    ///     tx.remove(&queue, &number)?;
    ///     tx.insert(&done, number, job)?;
    /// }
    /// tx.commit()?; // fails if another thread has taken the job, or inserted one before it
    /// assert!(queue.is_empty()? && done.contains_key("job 1")?);
    /// # Ok(()) }
    /// ```
    pub fn first_key_value(&self, partition: &Partition) -> Result<Option<(Slice, Slice)>> {
        self.iter(partition).next().transpose()
    }

    /// Returns the pair with the highest key.
    ///
    /// # Errors
    /// As [`get`](Transaction::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let log = db.open_partition("log", Default::default())?;
    /// let mut tx = db.transaction();
    /// tx.insert(&log, 1u64.to_be_bytes(), "started")?;
    /// let (number, _) = tx.last_key_value(&log)?.unwrap();
    /// assert_eq!(*number, 1u64.to_be_bytes());
    /// # Ok(()) }
    /// ```
    pub fn last_key_value(&self, partition: &Partition) -> Result<Option<(Slice, Slice)>> {
        self.iter(partition).next_back().transpose()
    }

    /// Iterates over all pairs in key order, including those that the transaction has written until now.
    ///
    /// What the iterator has returned counts as read, with the gaps between the keys. An iterator that is not read to
    /// its end therefore conflicts only with changes before its position. The iterator does not borrow the transaction,
    /// and does not see its later writes.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "green")?;
    /// let mut tx = db.transaction();
    /// for pair in tx.iter(&fruit) {
    ///     tx.insert(&fruit, pair?.0, "red")?;
    /// }
    /// tx.insert(&fruit, "pear", "green")?;
    /// let colours: Vec<_> = tx.iter(&fruit).map(|pair| pair.unwrap().1).collect();
    /// assert_eq!(colours, ["red", "green"]);
    /// # Ok(()) }
    /// ```
    pub fn iter(&self, partition: &Partition) -> Iter {
        Iter(self.0.iter_state(partition, (Bound::Unbounded, Bound::Unbounded), true))
    }

    /// Iterates over the pairs in a range of keys; see [`iter`](Transaction::iter).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let log = db.open_partition("log", Default::default())?;
    /// let mut tx = db.transaction();
    /// tx.insert(&log, [5], "line 5")?;
    /// assert_eq!(tx.range(&log, [3]..[7]).count(), 1);
    /// log.insert([8], "line 8")?; // not in the range
    /// tx.commit()?;
    /// # assert_eq!(log.len()?, 2);
    /// # Ok(()) }
    /// ```
    pub fn range<K: AsRef<[u8]>>(&self, partition: &Partition, range: impl RangeBounds<K>) -> Iter {
        Iter(self.0.iter_state(partition, own_bounds(&range), true))
    }

    /// Iterates over the pairs whose keys begin with `prefix`; see [`iter`](Transaction::iter) and
    /// [`Partition::prefix`].
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let posts = db.open_partition("posts", Default::default())?;
    /// let mut tx = db.transaction();
    /// let number = tx.prefix(&posts, "ada/").count() + 1; // no other commit gets the same number
    /// tx.insert(&posts, format!("ada/{number}"), "first post")?;
    /// tx.commit()?;
    /// assert!(posts.contains_key("ada/1")?);
    /// # Ok(()) }
    /// ```
    pub fn prefix(&self, partition: &Partition, prefix: impl AsRef<[u8]>) -> Iter {
        Iter(self.0.prefix_state(partition, prefix.as_ref(), true))
    }

    /// Iterates over all keys without reading values; see [`iter`](Transaction::iter).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut tx = db.transaction();
    /// tx.insert(&fruit, "apple", "red")?;
    /// assert_eq!(tx.keys(&fruit).next().unwrap()?, "apple");
    /// # Ok(()) }
    /// ```
    pub fn keys(&self, partition: &Partition) -> Keys {
        Keys(self.0.iter_state(partition, (Bound::Unbounded, Bound::Unbounded), true))
    }

    /// Iterates over all entries, whose values are read on request; see [`iter`](Transaction::iter).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let photos = db.open_partition("photos", Default::default())?;
    /// let mut tx = db.transaction();
    /// tx.insert(&photos, "sky", [7; 1000])?;
    /// assert_eq!(tx.entries(&photos).next().unwrap()?.size(), 1000);
    /// # Ok(()) }
    /// ```
    pub fn entries(&self, partition: &Partition) -> Entries {
        Entries(self.0.iter_state(partition, (Bound::Unbounded, Bound::Unbounded), true))
    }

    /// Returns reads that the commit does not check: they see the same state, and cause no conflicts. For values on
    /// which no write depends.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut tx = db.transaction();
    /// let estimate = tx.untracked().keys(&fruit).count();
    /// tx.insert(&fruit, "estimate", estimate.to_string())?;
    /// fruit.insert("apple", "red")?; // another thread
    /// tx.commit()?; // no conflict
    /// assert_eq!(fruit.get("estimate")?.unwrap(), "0");
    /// # Ok(()) }
    /// ```
    pub fn untracked(&self) -> UntrackedReads<'_> {
        UntrackedReads(&self.0)
    }

    /// Sets the value of a key. A value of at least 4 KiB in a partition with key-value separation is written to a blob
    /// file by this call (1 MiB, if the transaction requests a sync).
    ///
    /// # Errors
    /// `Invalid` if key or value are too long, the transaction exceeds its memory limit, or the partition belongs to
    /// another database; `Closed`; those of writing a blob file. Then the transaction is unchanged.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut tx = db.transaction();
    /// let error = tx.insert(&fruit, [0; 65_536], "the key is too long").unwrap_err();
    /// assert_eq!(error.kind(), azekura::ErrorKind::Invalid);
    /// tx.insert(&fruit, "apple", "red")?; // still usable
    /// tx.commit()?;
    /// assert_eq!(fruit.len()?, 1);
    /// # Ok(()) }
    /// ```
    pub fn insert(&mut self, partition: &Partition, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        self.0.write(partition, RecordKind::Put, key.as_ref(), value.as_ref())
    }

    /// Sets the value of a key until `ttl` has passed since this call; see [`Partition::insert_with_ttl`]. The
    /// transaction itself reads the value until its end.
    ///
    /// # Errors
    /// As [`insert`](Transaction::insert) and [`Partition::insert_with_ttl`].
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let sessions = db.open_partition("sessions", Default::default())?;
    /// use std::time::Duration;
    /// let mut tx = db.transaction();
    /// if tx.get(&sessions, "ada")?.is_none() {
    ///     tx.insert_with_ttl(&sessions, "ada", "logged in", Duration::from_secs(3600))?;
    /// }
    /// tx.commit()?;
    /// assert_eq!(sessions.get("ada")?.unwrap(), "logged in");
    /// # Ok(()) }
    /// ```
    pub fn insert_with_ttl(
        &mut self,
        partition: &Partition,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        ttl: Duration,
    ) -> Result<()> {
        self.0.write_expiring(partition, key.as_ref(), value.as_ref(), ttl_ms(ttl)?)
    }

    /// Changes the value of a key by the merge operator of its partition; see [`Partition::merge`]. The key does not
    /// count as read, so at `Serializable` isolation transactions that only merge have no conflicts. A later read of
    /// the key in this transaction counts.
    ///
    /// # Errors
    /// As [`insert`](Transaction::insert); `Invalid` if the partition has no operator, or it refuses the operand. In a
    /// pmem partition, [`commit`](Transaction::commit) returns `MergeFailed` if the operator fails.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// use azekura::{PartitionComponents, merge_operators};
    /// let components = PartitionComponents::default().merge_operator(merge_operators::u64_add());
    /// let visits = db.open_partition_with("visits", Default::default(), components)?;
    /// let (mut first, mut second) = (db.transaction(), db.transaction());
    /// first.merge(&visits, "front page", 1u64.to_le_bytes())?;
    /// second.merge(&visits, "front page", 1u64.to_le_bytes())?;
    /// first.commit()?;
    /// second.commit()?; // no conflict
    /// assert_eq!(visits.get("front page")?.unwrap(), 2u64.to_le_bytes()[..]);
    /// # Ok(()) }
    /// ```
    pub fn merge(&mut self, partition: &Partition, key: impl AsRef<[u8]>, operand: impl AsRef<[u8]>) -> Result<()> {
        self.0.write(partition, RecordKind::Merge, key.as_ref(), operand.as_ref())
    }

    /// Removes a key.
    ///
    /// # Errors
    /// As [`insert`](Transaction::insert).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let mut tx = db.transaction();
    /// tx.remove(&fruit, "apple")?;
    /// assert!(!tx.contains_key(&fruit, "apple")? && fruit.contains_key("apple")?);
    /// # Ok(()) }
    /// ```
    pub fn remove(&mut self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<()> {
        self.0.write(partition, RecordKind::Delete, key.as_ref(), &[])
    }

    /// Removes a key that was inserted exactly once since it was last removed; see [`Partition::remove_weak`].
    ///
    /// # Errors
    /// As [`insert`](Transaction::insert).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let queue = db.open_partition("queue", Default::default())?;
    /// queue.insert("job 1", "send a mail")?; // inserted exactly once
    /// let mut tx = db.transaction();
    /// tx.remove_weak(&queue, "job 1")?;
    /// tx.commit()?;
    /// assert!(queue.is_empty()?);
    /// # Ok(()) }
    /// ```
    pub fn remove_weak(&mut self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<()> {
        self.0.write(partition, RecordKind::SingleDelete, key.as_ref(), &[])
    }

    /// Removes every key in `range`, also those that another commit inserts before this one; see
    /// [`Partition::remove_range`]. At [`Isolation::Serializable`] this is a write without a read: it conflicts only if
    /// the range is read, too.
    ///
    /// # Errors
    /// As [`insert`](Transaction::insert); `Invalid` if the start is above the end.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let mut tx = db.transaction();
    /// tx.insert(&fruit, "banana", "yellow")?;
    /// tx.remove_range(&fruit, ..="banana")?;
    /// tx.insert(&fruit, "apple", "green")?;
    /// assert_eq!(tx.iter(&fruit).count(), 1);
    /// tx.commit()?;
    /// assert_eq!((fruit.len()?, fruit.get("apple")?.unwrap()), (1, "green".into()));
    /// # Ok(()) }
    /// ```
    pub fn remove_range<K: AsRef<[u8]>>(&mut self, partition: &Partition, range: impl RangeBounds<K>) -> Result<()> {
        self.0.remove_bounds(partition, &own_bounds(&range))
    }

    /// Returns the current state of the writes, for [`rollback_to`](Transaction::rollback_to).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let orders = db.open_partition("orders", Default::default())?;
    /// let mut tx = db.transaction();
    /// for order in ["apple", "", "pear"] {
    ///     let before = tx.savepoint();
    ///     tx.insert(&orders, order, "ordered")?;
    ///     if order.is_empty() {
    ///         tx.rollback_to(&before)?; // this order only
    ///     }
    /// }
    /// tx.commit()?;
    /// assert_eq!(orders.len()?, 2);
    /// # Ok(()) }
    /// ```
    pub fn savepoint(&mut self) -> Savepoint {
        let (transaction, number) = self.0.savepoint();
        Savepoint { transaction, number }
    }

    /// Discards the writes since `savepoint`, and the savepoints behind them; the savepoint stays valid. What was read
    /// since stays recorded, because the program may depend on it.
    ///
    /// # Errors
    /// `Invalid` if the savepoint belongs to another transaction, or was discarded by a rollback to an earlier one.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut tx = db.transaction();
    /// let first = tx.savepoint();
    /// tx.insert(&fruit, "apple", "red")?;
    /// let second = tx.savepoint();
    /// tx.rollback_to(&first)?;
    /// assert!(tx.get(&fruit, "apple")?.is_none());
    /// assert_eq!(tx.rollback_to(&second).unwrap_err().kind(), azekura::ErrorKind::Invalid);
    /// # Ok(()) }
    /// ```
    pub fn rollback_to(&mut self, savepoint: &Savepoint) -> Result<()> {
        self.0.rollback_to(&savepoint.transaction, savepoint.number)
    }

    /// Sets the durability that [`commit`](Transaction::commit) waits for. Default: the durability of the database.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let orders = db.open_partition("orders", Default::default())?;
    /// let mut tx = db.transaction();
    /// tx.insert(&orders, "order 1", "one apple")?;
    /// tx.durability(azekura::PersistMode::SyncData);
    /// let syncs = db.metrics().wal_syncs;
    /// tx.commit()?; // now it survives power loss
    /// assert!(db.metrics().wal_syncs > syncs);
    /// # Ok(()) }
    /// ```
    pub fn durability(&mut self, mode: PersistMode) -> &mut Transaction {
        self.0.durability(mode);
        self
    }

    /// Commits all writes atomically. A transaction without writes succeeds without a check, because all of its reads
    /// saw one state.
    ///
    /// # Errors
    /// `Conflict` if another commit changed what the transaction has read or, at [`Isolation::Snapshot`], what it
    /// writes: nothing was written, and the transaction may be repeated. Otherwise as
    /// [`Batch::commit`](crate::Batch::commit).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let (mut first, mut second) = (db.transaction(), db.transaction());
    /// for tx in [&mut first, &mut second] {
    ///     assert!(tx.get(&fruit, "apple")?.is_none());
    ///     tx.insert(&fruit, "apple", "red")?;
    /// }
    /// first.commit()?;
    /// assert_eq!(second.commit().unwrap_err().kind(), azekura::ErrorKind::Conflict);
    /// # Ok(()) }
    /// ```
    pub fn commit(self) -> Result<()> {
        self.0.commit()
    }
}

impl std::fmt::Debug for Transaction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.debug(f, "Transaction")
    }
}

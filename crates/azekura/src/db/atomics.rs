//! Atomic operations on a single key: methods of [`Partition`] that read a key and write it in one step.

use std::sync::Arc;

use crate::base::{ErrorKind, RecordKind, Result};
use crate::db::batch::Batch;
use crate::db::handle::ExclusiveTurn;
use crate::db::partition::Partition;
use crate::db::writes::commit_check::{CommitCheck, LOST_ROUNDS_MAX, ReadsOfPartition};
use crate::engine::ReadSeqno;
use crate::mem::slice::Slice;

/// What to do with a key.
enum Decision<V> {
    Leave,
    Insert(V),
    Remove,
}

impl Partition {
    /// Changes the value of a key by the [merge operator](crate::MergeOperator) of the partition, without reading it.
    ///
    /// In an LSM partition the operand is stored, and later reads and compactions compute the value: a merge costs as
    /// much as an insertion, and a read of the key reads its operands since the last flush or compaction. A pmem
    /// partition computes the value in this call, which is repeated if another commit changes the key meanwhile.
    ///
    /// # Errors
    /// `Invalid` if the partition has no operator, or the operator refuses the operand; in a pmem partition
    /// `MergeFailed` if the operator fails; otherwise as [`insert`](Partition::insert). Nothing is written then.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// use azekura::{PartitionComponents, merge_operators};
    /// let components = PartitionComponents::default().merge_operator(merge_operators::i64_add());
    /// let stock = db.open_partition_with("stock", Default::default(), components)?;
    /// stock.insert("apples", 40i64.to_le_bytes())?;
    /// stock.merge("apples", (-2i64).to_le_bytes())?;
    /// stock.merge("pears", 7i64.to_le_bytes())?; // had no value
    /// assert_eq!(stock.get("apples")?.unwrap(), 38i64.to_le_bytes()[..]);
    /// assert_eq!(stock.get("pears")?.unwrap(), 7i64.to_le_bytes()[..]);
    /// # Ok(()) }
    /// ```
    pub fn merge(&self, key: impl AsRef<[u8]>, operand: impl AsRef<[u8]>) -> Result<()> {
        let (key, operand) = (key.as_ref(), operand.as_ref());
        if self.state.computes_merges() {
            let mut batch = Batch::new(Arc::clone(&self.handle));
            batch.try_push(self, RecordKind::Merge, key, operand)?;
            return batch.commit_with_check(None, None);
        }
        self.state.check_operand(operand)?;
        self.write(RecordKind::Merge, key, operand)
    }

    /// Sets the value of a key to `new`, or removes the key for `None`, if its value is `expected`; `None` expects that
    /// the key is absent. Returns whether the value was as expected, and so was replaced.
    ///
    /// # Errors
    /// As [`insert`](Partition::insert) and [`get`](Partition::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let locks = db.open_partition("locks", Default::default())?;
    /// assert!(locks.compare_and_swap("printer", None, Some(b"ada"))?);
    /// assert!(!locks.compare_and_swap("printer", None, Some(b"grace"))?);
    /// assert!(locks.compare_and_swap("printer", Some(b"ada"), None)?); // released
    /// assert!(!locks.contains_key("printer")?);
    /// # Ok(()) }
    /// ```
    pub fn compare_and_swap(&self, key: impl AsRef<[u8]>, expected: Option<&[u8]>, new: Option<&[u8]>) -> Result<bool> {
        let mut is_expected = false;
        self.update(key.as_ref(), |current| {
            is_expected = current == expected;
            match new {
                Some(new) if is_expected => Decision::Insert(new),
                None if is_expected && current.is_some() => Decision::Remove,
                _ => Decision::Leave,
            }
        })?;
        Ok(is_expected)
    }

    /// Replaces the value of a key by the result of `update`, which gets the current value, and `None` if the key is
    /// absent. If `update` returns `None`, the key is removed. Returns the previous value.
    ///
    /// `update` may be called several times, because it is called again when another commit changed the key meanwhile.
    /// After a few calls, other commits wait until it is done; see [`Database::transact`](crate::Database::transact).
    ///
    /// # Errors
    /// As [`insert`](Partition::insert) and [`get`](Partition::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let counters = db.open_partition("counters", Default::default())?;
    /// let count = |bytes: Option<&[u8]>| bytes.map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().unwrap()));
    /// std::thread::scope(|threads| {
    ///     for _ in 0..4 {
    ///         threads.spawn(|| counters.fetch_update("visits", |n| Some((count(n) + 1).to_le_bytes())).unwrap());
    ///     }
    /// });
    /// assert_eq!(count(counters.get("visits")?.as_deref()), 4);
    /// # Ok(()) }
    /// ```
    pub fn fetch_update<V: AsRef<[u8]>>(
        &self,
        key: impl AsRef<[u8]>,
        mut update: impl FnMut(Option<&[u8]>) -> Option<V>,
    ) -> Result<Option<Slice>> {
        self.update(key.as_ref(), |current| match update(current) {
            Some(new) => Decision::Insert(new),
            None if current.is_some() => Decision::Remove,
            None => Decision::Leave,
        })
    }

    /// Inserts a key that is absent. Returns whether the key was inserted; a present key keeps its value.
    ///
    /// # Errors
    /// As [`insert`](Partition::insert) and [`get`](Partition::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let users = db.open_partition("users", Default::default())?;
    /// assert!(users.insert_if_absent("ada", "mathematician")?);
    /// assert!(!users.insert_if_absent("ada", "admiral")?);
    /// assert_eq!(users.get("ada")?.unwrap(), "mathematician");
    /// # Ok(()) }
    /// ```
    pub fn insert_if_absent(&self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<bool> {
        self.compare_and_swap(key, None, Some(value.as_ref()))
    }

    /// Removes a key and returns its value. Of several threads that take a key at the same time, one gets the value.
    ///
    /// # Errors
    /// As [`remove`](Partition::remove) and [`get`](Partition::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let jobs = db.open_partition("jobs", Default::default())?;
    /// jobs.insert("job 1", "send a mail")?;
    /// assert_eq!(jobs.take("job 1")?.unwrap(), "send a mail");
    /// assert!(jobs.take("job 1")?.is_none());
    /// # Ok(()) }
    /// ```
    pub fn take(&self, key: impl AsRef<[u8]>) -> Result<Option<Slice>> {
        self.update(key.as_ref(), |current| match current {
            Some(_) => Decision::Remove,
            None => Decision::<&[u8]>::Leave,
        })
    }

    /// Reads a key at a snapshot, carries out the decision, and returns the value that was read. Repeats this if the
    /// key was changed meanwhile. After [`LOST_ROUNDS_MAX`] rounds no other commit can change it.
    fn update<V: AsRef<[u8]>>(
        &self,
        key: &[u8],
        mut decide: impl FnMut(Option<&[u8]>) -> Decision<V>,
    ) -> Result<Option<Slice>> {
        let inner = &self.handle.inner;
        inner.writer()?;
        let mut lost_rounds = 0;
        loop {
            let turn = if lost_rounds < LOST_ROUNDS_MAX { None } else { Some(ExclusiveTurn::begin(&self.handle)?) };
            let snapshot = inner.snapshots.register();
            let current = self.get_at(key, ReadSeqno::At(snapshot.moment()))?;
            let mut batch = Batch::new(Arc::clone(&self.handle));
            match decide(current.as_deref()) {
                Decision::Leave => return Ok(current),
                Decision::Insert(value) => batch.try_push(self, RecordKind::Put, key, value.as_ref())?,
                Decision::Remove => batch.try_push(self, RecordKind::Delete, key, &[])?,
            }
            let mut reads = Vec::new();
            ReadsOfPartition::of(&mut reads, &self.state).keys.push(Slice::from(key));
            let is_in_turn = turn.is_some();
            let check = Arc::new(CommitCheck::new(reads, false, is_in_turn, snapshot.seqno()));
            match batch.commit_with_check(Some(&check), turn) {
                Err(error) if error.kind() == ErrorKind::Conflict && !is_in_turn => lost_rounds += 1,
                committed => return committed.map(|()| current),
            }
        }
    }
}

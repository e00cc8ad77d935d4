//! Implements [`UntrackedReads`], reads of a transaction that its commit does not check.

use std::fmt;
use std::ops::{Bound, RangeBounds};

use crate::base::Result;
use crate::db::iter::db_iter::own_bounds;
use crate::db::iter::iterators::{Entries, Iter, Keys};
use crate::db::partition::Partition;
use crate::db::transaction::transaction_state::TransactionState;
use crate::mem::slice::Slice;

/// Reads of a [`Transaction`](crate::Transaction) that its commit does not check; see
/// [`Transaction::untracked`](crate::Transaction::untracked).
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// let mut tx = db.transaction();
/// tx.insert(&fruit, "apple", "red")?;
/// assert_eq!(tx.untracked().get(&fruit, "apple")?.unwrap(), "red");
/// # Ok(()) }
/// ```
#[derive(Clone, Copy)]
pub struct UntrackedReads<'a>(pub(crate) &'a TransactionState);

impl UntrackedReads<'_> {
    /// As [`Transaction::get`](crate::Transaction::get), without tracking.
    ///
    /// # Errors
    /// As [`Transaction::get`](crate::Transaction::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let tx = db.transaction();
    /// assert_eq!(tx.untracked().get(&fruit, "apple")?.unwrap(), "red");
    /// # Ok(()) }
    /// ```
    pub fn get(&self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<Option<Slice>> {
        self.0.read(partition, key.as_ref(), false)
    }

    /// As [`Transaction::contains_key`](crate::Transaction::contains_key), without tracking.
    ///
    /// # Errors
    /// As [`Transaction::get`](crate::Transaction::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let tx = db.transaction();
    /// assert!(tx.untracked().contains_key(&fruit, "apple")?);
    /// # Ok(()) }
    /// ```
    pub fn contains_key(&self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<bool> {
        Ok(self.size_of(partition, key)?.is_some())
    }

    /// As [`Transaction::size_of`](crate::Transaction::size_of), without tracking.
    ///
    /// # Errors
    /// As [`Transaction::get`](crate::Transaction::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let tx = db.transaction();
    /// assert_eq!(tx.untracked().size_of(&fruit, "apple")?, Some(3));
    /// # Ok(()) }
    /// ```
    pub fn size_of(&self, partition: &Partition, key: impl AsRef<[u8]>) -> Result<Option<u32>> {
        self.0.read_size(partition, key.as_ref(), false)
    }

    /// As [`Transaction::multi_get`](crate::Transaction::multi_get), without tracking.
    ///
    /// # Errors
    /// As [`Transaction::get`](crate::Transaction::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let tx = db.transaction();
    /// assert_eq!(tx.untracked().multi_get(&fruit, ["apple", "pear"])?, [Some("red".into()), None]);
    /// # Ok(()) }
    /// ```
    pub fn multi_get<K: AsRef<[u8]>>(
        &self,
        partition: &Partition,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Slice>>> {
        keys.into_iter().map(|key| self.0.read(partition, key.as_ref(), false)).collect()
    }

    /// As [`Transaction::first_key_value`](crate::Transaction::first_key_value), without tracking.
    ///
    /// # Errors
    /// As [`Transaction::get`](crate::Transaction::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let tx = db.transaction();
    /// assert_eq!(tx.untracked().first_key_value(&fruit)?.unwrap().0, "apple");
    /// # Ok(()) }
    /// ```
    pub fn first_key_value(&self, partition: &Partition) -> Result<Option<(Slice, Slice)>> {
        self.iter(partition).next().transpose()
    }

    /// As [`Transaction::last_key_value`](crate::Transaction::last_key_value), without tracking.
    ///
    /// # Errors
    /// As [`Transaction::get`](crate::Transaction::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let tx = db.transaction();
    /// assert_eq!(tx.untracked().last_key_value(&fruit)?.unwrap().0, "apple");
    /// # Ok(()) }
    /// ```
    pub fn last_key_value(&self, partition: &Partition) -> Result<Option<(Slice, Slice)>> {
        self.iter(partition).next_back().transpose()
    }

    /// As [`Transaction::iter`](crate::Transaction::iter), without tracking.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let tx = db.transaction();
    /// assert_eq!(tx.untracked().iter(&fruit).count(), 1);
    /// # Ok(()) }
    /// ```
    pub fn iter(&self, partition: &Partition) -> Iter {
        Iter(self.0.iter_state(partition, (Bound::Unbounded, Bound::Unbounded), false))
    }

    /// As [`Transaction::range`](crate::Transaction::range), without tracking.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let tx = db.transaction();
    /// assert_eq!(tx.untracked().range(&fruit, "b"..).count(), 0);
    /// # Ok(()) }
    /// ```
    pub fn range<K: AsRef<[u8]>>(&self, partition: &Partition, range: impl RangeBounds<K>) -> Iter {
        Iter(self.0.iter_state(partition, own_bounds(&range), false))
    }

    /// As [`Transaction::prefix`](crate::Transaction::prefix), without tracking.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let tx = db.transaction();
    /// assert_eq!(tx.untracked().prefix(&fruit, "app").count(), 1);
    /// # Ok(()) }
    /// ```
    pub fn prefix(&self, partition: &Partition, prefix: impl AsRef<[u8]>) -> Iter {
        Iter(self.0.prefix_state(partition, prefix.as_ref(), false))
    }

    /// As [`Transaction::keys`](crate::Transaction::keys), without tracking.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let tx = db.transaction();
    /// assert_eq!(tx.untracked().keys(&fruit).next().unwrap()?, "apple");
    /// # Ok(()) }
    /// ```
    pub fn keys(&self, partition: &Partition) -> Keys {
        Keys(self.0.iter_state(partition, (Bound::Unbounded, Bound::Unbounded), false))
    }

    /// As [`Transaction::entries`](crate::Transaction::entries), without tracking.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let tx = db.transaction();
    /// assert_eq!(tx.untracked().entries(&fruit).next().unwrap()?.size(), 3);
    /// # Ok(()) }
    /// ```
    pub fn entries(&self, partition: &Partition) -> Entries {
        Entries(self.0.iter_state(partition, (Bound::Unbounded, Bound::Unbounded), false))
    }
}

impl fmt::Debug for UntrackedReads<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.debug(f, "UntrackedReads")
    }
}

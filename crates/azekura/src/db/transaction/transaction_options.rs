//! Options of transactions.

/// Which anomalies a [`Transaction`](crate::Transaction) excludes.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// # let doctors = db.open_partition("doctors", Default::default())?;
/// use azekura::{Isolation, TransactionOptions};
/// # let on_call = |names: [&str; 2]| names.iter().try_for_each(|name| doctors.insert(name, "on call"));
/// /// Both doctors leave at the same time, each because the other one is on call.
/// let leave = |isolation| {
///     on_call(["ada", "grace"])?;
///     let (mut a, mut b) = (
///         db.transaction_with(TransactionOptions::default().isolation(isolation))?,
///         db.transaction_with(TransactionOptions::default().isolation(isolation))?,
///     );
///     assert!(a.contains_key(&doctors, "grace")? && b.contains_key(&doctors, "ada")?);
///     a.remove(&doctors, "ada")?;
///     b.remove(&doctors, "grace")?;
///     Ok((a.commit().is_ok(), b.commit().is_ok()))
/// };
/// # let leave = |isolation| -> azekura::Result<(bool, bool)> { leave(isolation) };
/// assert_eq!(leave(Isolation::Serializable)?, (true, false));
/// assert_eq!(leave(Isolation::Snapshot)?, (true, true)); // write skew: no doctor is left
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isolation {
    /// The result is that of some serial order of all commits: a commit fails if a key, an absent key or a range that
    /// the transaction has read was changed meanwhile.
    #[default]
    Serializable,
    /// All reads see one snapshot and the transaction's own writes. A commit fails if another commit has meanwhile
    /// changed a key that it inserts, removes or merges, or a key in a range that it removes, whether it has read the
    /// key or not. Two transactions that each write what the other one has read may both commit (write skew).
    Snapshot,
}

/// Options of a [`Transaction`](crate::Transaction).
///
/// ```
/// use azekura::{Isolation, TransactionOptions};
/// let options = TransactionOptions::default().exclusive(true);
/// assert_eq!((options.isolation, options.exclusive), (Isolation::Serializable, true));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransactionOptions {
    /// Default: [`Isolation::Serializable`].
    pub isolation: Isolation,
    /// Whether other commits wait until the transaction has ended. Default: false.
    pub exclusive: bool,
}

impl TransactionOptions {
    /// Sets the isolation level.
    ///
    /// ```
    /// use azekura::{Isolation, TransactionOptions};
    /// let options = TransactionOptions::default().isolation(Isolation::Snapshot);
    /// assert_eq!(options.isolation, Isolation::Snapshot);
    /// ```
    #[must_use]
    pub fn isolation(mut self, isolation: Isolation) -> TransactionOptions {
        self.isolation = isolation;
        self
    }

    /// Sets whether all other commits, batches, single writes and transactions of the database wait from the begin to
    /// the end of this transaction. Its commit has no conflict. Reads do not wait.
    ///
    /// The transaction belongs to the thread that called it last. A write of this thread that is not part of the
    /// transaction returns `Invalid`, because it would wait for itself. A transaction that waits for a write of another
    /// thread never ends; neither does a write of the thread that began it, if another thread called it last.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// use azekura::{ErrorKind, TransactionOptions};
    /// let mut tx = db.transaction_with(TransactionOptions::default().exclusive(true))?;
    /// tx.insert(&fruit, "apple", "red")?;
    /// assert_eq!(fruit.insert("apple", "green").unwrap_err().kind(), ErrorKind::Invalid);
    /// tx.commit()?;
    /// fruit.insert("apple", "green")?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn exclusive(mut self, exclusive: bool) -> TransactionOptions {
        self.exclusive = exclusive;
        self
    }
}

//! The components of a partition: code of the user that the engine calls.

use std::fmt;
use std::sync::Arc;

use crate::base::comparator::Comparator;
use crate::base::merge_operator::{MergeOperator, is_reserved_name};
use crate::base::{Error, KeyOrder, Result};
use crate::db::options::{EngineType, PartitionCreateOptions};
use crate::lsm::compaction_filter::CompactionFilter;

/// Longest name of a component in bytes; at least 1 byte.
const NAME_LEN_MAX: usize = 255;

/// Code of the program that a partition calls. Unlike [options](PartitionCreateOptions) it is not stored. A comparator
/// and a merge operator, whose names are stored, must be given whenever the partition is opened.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// use azekura::PartitionComponents;
/// let plain = db.open_partition_with("fruit", Default::default(), PartitionComponents::default())?;
/// plain.insert("apple", "red")?;
/// assert_eq!(db.open_partition("fruit", Default::default())?.len()?, 1); // the same without components
/// # Ok(()) }
/// ```
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct PartitionComponents {
    pub(crate) comparator: Option<Arc<dyn Comparator>>,
    pub(crate) compaction_filter: Option<Arc<dyn CompactionFilter>>,
    pub(crate) merge_operator: Option<Arc<dyn MergeOperator>>,
}

impl PartitionComponents {
    /// Sets the order of the keys. Default: the order of bytes. Its name is stored with the partition, and a partition
    /// must be opened with the comparator that it was created with.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # use std::{cmp::Ordering, sync::Arc};
    /// struct NewestFirst;
    /// impl azekura::Comparator for NewestFirst {
    ///     fn name(&self) -> &str { "newest first" }
    ///     fn compare(&self, a: &[u8], b: &[u8]) -> Ordering { b.cmp(a) }
    /// }
    /// let components = azekura::PartitionComponents::default().comparator(Arc::new(NewestFirst));
    /// let log = db.open_partition_with("log", Default::default(), components)?;
    /// log.insert("1", "")?;
    /// log.insert("2", "")?;
    /// assert_eq!(log.first_key_value()?.unwrap().0, "2");
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn comparator(mut self, comparator: Arc<dyn Comparator>) -> Self {
        self.comparator = Some(comparator);
        self
    }

    /// Sets the filter that compactions ask about each record; see [`CompactionFilter`]. Default: none. It replaces the
    /// filter of an open partition. Opening without one leaves the filter of an open partition as it is.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # use azekura::{CompactionFilter, FilterContext, FilterDecision, FilterValue, PartitionComponents, Result};
    /// # use std::sync::Arc;
    /// /// Removes keys that begin with `tmp/`.
    /// struct Temporary;
    /// impl CompactionFilter for Temporary {
    ///     fn name(&self) -> &str { "temporary keys" }
    ///     fn filter(&self, _: &FilterContext<'_>, key: &[u8], _: &mut FilterValue<'_>) -> Result<FilterDecision> {
    ///         Ok(if key.starts_with(b"tmp/") { FilterDecision::Remove } else { FilterDecision::Keep })
    ///     }
    /// }
    /// let components = PartitionComponents::default().compaction_filter(Arc::new(Temporary));
    /// let files = db.open_partition_with("files", Default::default(), components)?;
    /// files.insert("tmp/1", "")?;
    /// files.major_compact()?;
    /// assert!(files.is_empty()?);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn compaction_filter(mut self, filter: Arc<dyn CompactionFilter>) -> Self {
        self.compaction_filter = Some(filter);
        self
    }

    /// Sets the merge operator, which [`merge`](crate::Partition::merge) needs; see [`MergeOperator`]. Default: none.
    /// Its name is stored with the partition. An existing partition without an operator gets this one; afterwards the
    /// partition must be opened with it.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// use azekura::{ErrorKind, PartitionComponents, merge_operators};
    /// let components = PartitionComponents::default().merge_operator(merge_operators::append(" "));
    /// let notes = db.open_partition_with("notes", Default::default(), components)?;
    /// notes.merge("ada", "mathematician")?;
    /// notes.merge("ada", "poet's daughter")?;
    /// assert_eq!(notes.get("ada")?.unwrap(), "mathematician poet's daughter");
    /// let without = db.open_partition("notes", Default::default());
    /// assert_eq!(without.unwrap_err().kind(), ErrorKind::Invalid);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn merge_operator(mut self, operator: Arc<dyn MergeOperator>) -> Self {
        self.merge_operator = Some(operator);
        self
    }

    pub(crate) fn key_order(&self) -> KeyOrder {
        self.comparator.clone().map_or_else(KeyOrder::bytewise, KeyOrder::custom)
    }

    /// # Errors
    /// `Invalid` for a name that is too long or empty, and for a component that the engine does not call.
    pub(crate) fn check(&self, options: &PartitionCreateOptions) -> Result<()> {
        let names = [
            ("comparator", self.comparator.as_ref().map(|comparator| comparator.name().len())),
            ("compaction filter", self.compaction_filter.as_ref().map(|filter| filter.name().len())),
            ("merge operator", self.merge_operator.as_ref().map(|operator| operator.name().len())),
        ];
        for (what, len) in names {
            if let Some(len) = len.filter(|len| !(1..=NAME_LEN_MAX).contains(len)) {
                return Err(Error::invalid(format!("{what} name has {len} bytes, 1..={NAME_LEN_MAX} are allowed")));
            }
        }
        if let Some(operator) = self.merge_operator.as_ref().filter(|operator| is_reserved_name(operator.name())) {
            let message = format!("merge operator name {:?} is reserved for operators of azekura", operator.name());
            return Err(Error::invalid(message));
        }
        match (&self.compaction_filter, &options.engine) {
            (Some(filter), EngineType::Pmem(_)) => Err(Error::invalid(format!(
                "compaction filter {:?} is never called by a pmem partition, which has no compactions",
                filter.name()
            ))),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for PartitionComponents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PartitionComponents")
            .field("comparator", &self.comparator.as_ref().map(|comparator| comparator.name().to_owned()))
            .field("compaction_filter", &self.compaction_filter.as_ref().map(|filter| filter.name().to_owned()))
            .field("merge_operator", &self.merge_operator.as_ref().map(|operator| operator.name().to_owned()))
            .finish()
    }
}

//! Compaction filters: code of the user that a compaction asks whether to keep a record.

use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::key::{VALUE_LEN_MAX, split_expiry};
use crate::base::{EntryRef, Error, RecordKind, Result, SeqNo};
use crate::engine::{BlobResolver, SnapshotList};
use crate::mem::slice::Slice;

/// Decides about each record that a compaction rewrites: keep it, remove it, or replace its value.
///
/// A filter is given with [`PartitionComponents`](crate::PartitionComponents) when a partition is opened. It is not
/// part of the data and is not stored: without it, records are kept.
///
/// - Only compactions call it. A flush does not, and a compaction that only moves a table to another level does not.
///   [`major_compact`](crate::Partition::major_compact) calls it at least once for every record that was written
///   before the call.
/// - For each key it sees at most the newest version that the compaction reads, and only if every registered snapshot,
///   iterator and transaction is older than that version. A newer version may exist in memory or in another table.
/// - A removal or a new value becomes visible when the compaction ends. It does not change snapshots that were taken
///   before. A snapshot that was taken while the compaction was running may see the old value first, and later not.
/// - A panic poisons the database, as a panic of a comparator does. An error fails the compaction, which is tried again
///   later.
///
/// The filter may be called from several threads. The calls that a [`Comparator`](crate::Comparator) must not make are
/// `Invalid` inside a filter too. Pmem partitions have no compactions: opening one with a filter is `Invalid`.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// use azekura::{CompactionFilter, FilterContext, FilterDecision, FilterValue, PartitionComponents, Result};
/// use std::sync::Arc;
/// /// Removes sessions that have ended: their value begins with `-`.
/// struct Ended;
/// impl CompactionFilter for Ended {
///     fn name(&self) -> &str { "ended sessions" }
///     fn filter(&self, _: &FilterContext<'_>, _: &[u8], value: &mut FilterValue<'_>) -> Result<FilterDecision> {
///         Ok(if value.read()?.starts_with(b"-") { FilterDecision::Remove } else { FilterDecision::Keep })
///     }
/// }
/// let components = PartitionComponents::default().compaction_filter(Arc::new(Ended));
/// let sessions = db.open_partition_with("sessions", Default::default(), components)?;
/// sessions.insert("ada", "-ended")?;
/// sessions.insert("grace", "active")?;
/// sessions.major_compact()?;
/// assert_eq!(sessions.keys().map(|key| key.unwrap()).collect::<Vec<_>>(), ["grace"]);
/// # Ok(()) }
/// ```
pub trait CompactionFilter: Send + Sync {
    /// A name for error messages and debug output.
    ///
    /// ```
    /// # use azekura::{CompactionFilter, FilterContext, FilterDecision, FilterValue, Result};
    /// struct KeepAll;
    /// impl CompactionFilter for KeepAll {
    ///     fn name(&self) -> &str { "keep all" }
    ///     fn filter(&self, _: &FilterContext<'_>, _: &[u8], _: &mut FilterValue<'_>) -> Result<FilterDecision> {
    ///         Ok(FilterDecision::Keep)
    ///     }
    /// }
    /// assert_eq!(KeepAll.name(), "keep all");
    /// ```
    fn name(&self) -> &str;

    /// Decides about one record.
    ///
    /// # Errors
    /// Those of [`FilterValue::read`], or any other; the compaction fails with it.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # use azekura::{CompactionFilter, FilterContext, FilterDecision, FilterValue, PartitionComponents, Result};
    /// # use std::sync::Arc;
    /// /// Shortens values at the bottom level to 3 bytes.
    /// struct Shorten;
    /// impl CompactionFilter for Shorten {
    ///     fn name(&self) -> &str { "shorten" }
    ///     fn filter(
    ///         &self, context: &FilterContext<'_>, _key: &[u8], value: &mut FilterValue<'_>,
    ///     ) -> Result<FilterDecision> {
    ///         Ok(match context.is_bottom && value.size() > 3 {
    ///             true => FilterDecision::Replace(value.read()?[..3].to_vec()),
    ///             false => FilterDecision::Keep,
    ///         })
    ///     }
    /// }
    /// let components = PartitionComponents::default().compaction_filter(Arc::new(Shorten));
    /// let notes = db.open_partition_with("notes", Default::default(), components)?;
    /// notes.insert("1", "abcdef")?;
    /// notes.major_compact()?;
    /// assert_eq!(notes.get("1")?.unwrap(), "abc");
    /// # Ok(()) }
    /// ```
    fn filter(&self, context: &FilterContext<'_>, key: &[u8], value: &mut FilterValue<'_>) -> Result<FilterDecision>;
}

/// The decision of a [`CompactionFilter`].
///
/// ```
/// use azekura::FilterDecision;
/// let decision = |value: &[u8]| if value.is_empty() { FilterDecision::Remove } else { FilterDecision::Keep };
/// assert_eq!(decision(b""), FilterDecision::Remove);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FilterDecision {
    /// The record stays as it is.
    Keep,
    /// The record is removed, as [`remove`](crate::Partition::remove) would have removed it right after it was written:
    /// older versions do not become visible again.
    Remove,
    /// The record keeps its key and its expiry time and gets this value, which goes to a blob file if it is long
    /// enough for key-value separation.
    Replace(Vec<u8>),
}

/// The place of a record that a [`CompactionFilter`] decides about.
///
/// ```
/// # use azekura::{CompactionFilter, FilterContext, FilterDecision, FilterValue, PartitionComponents, Result};
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// # use std::sync::Arc;
/// struct Check;
/// impl CompactionFilter for Check {
///     fn name(&self) -> &str { "check" }
///     fn filter(&self, context: &FilterContext<'_>, _: &[u8], _: &mut FilterValue<'_>) -> Result<FilterDecision> {
///         assert_eq!((context.partition, context.is_bottom), ("fruit", true));
///         Ok(FilterDecision::Keep)
///     }
/// }
/// let components = PartitionComponents::default().compaction_filter(Arc::new(Check));
/// let fruit = db.open_partition_with("fruit", Default::default(), components)?;
/// fruit.insert("apple", "red")?;
/// fruit.major_compact()?;
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct FilterContext<'a> {
    /// The name of the partition.
    pub partition: &'a str,
    /// The level to which the compaction writes.
    pub level: u8,
    /// Whether no table below this level can have an older version of the key.
    pub is_bottom: bool,
}

/// The value of a record that a [`CompactionFilter`] decides about. A value in a blob file is read only on request.
///
/// ```
/// # use azekura::{CompactionFilter, FilterContext, FilterDecision, FilterValue, Result};
/// struct LargeOnes;
/// impl CompactionFilter for LargeOnes {
///     fn name(&self) -> &str { "remove values of 1 MiB and more" }
///     fn filter(&self, _: &FilterContext<'_>, _: &[u8], value: &mut FilterValue<'_>) -> Result<FilterDecision> {
///         // Reads no value.
///         Ok(if value.size() >= 1 << 20 { FilterDecision::Remove } else { FilterDecision::Keep })
///     }
/// }
/// assert!(LargeOnes.name().contains("1 MiB"));
/// ```
pub struct FilterValue<'a> {
    size: u32,
    content: FilterValueContent<'a>,
}

enum FilterValueContent<'a> {
    Inline(&'a [u8]),
    /// The encoded pointer, and the reader of blob files.
    Blob(&'a [u8], &'a mut dyn BlobResolver),
    Read(Slice),
}

impl FilterValue<'_> {
    /// Returns the length of the value in bytes.
    ///
    /// ```
    /// # use azekura::FilterValue;
    /// fn is_empty(value: &FilterValue<'_>) -> bool {
    ///     value.size() == 0
    /// }
    /// # assert_eq!(size_of_val(&is_empty), 0);
    /// ```
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Returns the value if it is stored in the table, or `None` if it is in a blob file and was not read yet.
    ///
    /// ```
    /// # use azekura::FilterValue;
    /// fn begins_with_zero(value: &FilterValue<'_>) -> Option<bool> {
    ///     value.inline().map(|bytes| bytes.first() == Some(&0))
    /// }
    /// # assert_eq!(size_of_val(&begins_with_zero), 0);
    /// ```
    pub fn inline(&self) -> Option<&[u8]> {
        match &self.content {
            FilterValueContent::Inline(bytes) => Some(bytes),
            FilterValueContent::Read(value) => Some(value),
            FilterValueContent::Blob(..) => None,
        }
    }

    /// Returns the value, which is read from its blob file if necessary.
    ///
    /// # Errors
    /// `Io` or `Corruption` if the blob file cannot be read.
    ///
    /// ```
    /// # use azekura::{FilterValue, Result};
    /// fn first_byte(value: &mut FilterValue<'_>) -> Result<Option<u8>> {
    ///     Ok(value.read()?.first().copied())
    /// }
    /// # assert_eq!(size_of_val(&first_byte), 0);
    /// ```
    pub fn read(&mut self) -> Result<&[u8]> {
        if let FilterValueContent::Blob(pointer, blobs) = &mut self.content {
            let value = blobs.resolve(pointer)?;
            self.content = FilterValueContent::Read(value);
        }
        Ok(self.inline().expect("a value in a blob file was read above"))
    }
}

/// The filter of one compaction.
pub(crate) struct AppliedFilter {
    pub(crate) filter: Arc<dyn CompactionFilter>,
    pub(crate) partition: String,
    pub(crate) level: u8,
    /// The snapshots of all readers, as they are while the compaction runs.
    pub(crate) snapshots: Arc<SnapshotList>,
    pub(crate) blobs: Box<dyn BlobResolver>,
}

impl AppliedFilter {
    /// Asks the filter about a version that no snapshot of the compaction's beginning except the last one needs.
    ///
    /// # Errors
    /// Those of the filter. `Invalid` if a new value is too long, `Corruption` for a damaged pointer.
    pub(crate) fn decide(&mut self, entry: EntryRef<'_>, is_bottom: bool) -> Result<FilterDecision> {
        debug_assert!(entry.kind.is_value() && entry.kind != RecordKind::Merge, "a filter decides about values");
        if self.is_needed(entry.seqno) {
            return Ok(FilterDecision::Keep);
        }
        let (_, kind, stored) = split_expiry(entry.kind, entry.value)?;
        let mut value = match kind {
            RecordKind::BlobPointer => FilterValue {
                size: BlobPointer::decode(stored)?.value_len,
                content: FilterValueContent::Blob(stored, &mut *self.blobs),
            },
            // Values are at most 4 GiB - 1, so the cast loses nothing.
            _ => FilterValue { size: stored.len() as u32, content: FilterValueContent::Inline(stored) },
        };
        let context = FilterContext { partition: &self.partition, level: self.level, is_bottom };
        let decision = self.filter.filter(&context, entry.user_key, &mut value)?;
        match &decision {
            FilterDecision::Replace(value) if value.len() as u64 > VALUE_LEN_MAX => Err(Error::invalid(format!(
                "compaction filter {:?} returned a value of {} bytes, more than 4 GiB - 1",
                self.filter.name(),
                value.len()
            ))),
            _ => Ok(decision),
        }
    }

    /// Whether a registered reader may read a version with this sequence number.
    fn is_needed(&self, seqno: SeqNo) -> bool {
        self.snapshots.newest_registered().is_some_and(|newest| newest >= seqno)
    }
}

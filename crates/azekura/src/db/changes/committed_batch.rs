//! The commits that the change feed returns.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Bound;
use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::key::{NEVER_MS, split_expiry};
use crate::base::key_range::KeyRange;
use crate::base::version_edit::PartitionId;
use crate::base::{KeyOrder, RecordKind, Result};
use crate::db::changes::change_position::ChangePosition;
use crate::db::handle::DbHandle;
use crate::db::iter::db_iter::OwnedBounds;
use crate::db::partition_state::PartitionState;
use crate::mem::slice::Slice;
use crate::wal::format::{IngestNote, WalRecord, WalRecordIter};

/// Partitions that commits name; `None` for one that was deleted.
pub(crate) type PartitionsById = BTreeMap<PartitionId, Option<Arc<PartitionState>>>;

/// Lets the changes of one partition pass whose keys are within the bounds.
#[derive(Clone)]
pub(crate) struct ChangeFilter {
    pub(crate) partition: Arc<PartitionState>,
    pub(crate) bounds: Option<OwnedBounds>,
}

/// The changes of one commit.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// let mut changes = db.changes_since(db.change_position()?)?;
/// fruit.insert("apple", "red")?;
/// let commit = changes.next().unwrap()?;
/// assert_eq!(commit.changes().next().unwrap().partition, "fruit");
/// assert_eq!(commit.position(), changes.position());
/// # Ok(()) }
/// ```
pub struct CommittedBatch {
    pub(crate) handle: Arc<DbHandle>,
    pub(crate) position: ChangePosition,
    pub(crate) partitions: Arc<PartitionsById>,
    pub(crate) filters: Arc<Vec<ChangeFilter>>,
    /// The payload of the commit, which was checked.
    pub(crate) payload: Box<[u8]>,
}

impl CommittedBatch {
    /// The position after the commit.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut changes = db.changes_since(db.change_position()?)?;
    /// fruit.insert("apple", "red")?;
    /// assert_eq!(changes.next().unwrap()?.position(), db.change_position()?);
    /// # Ok(()) }
    /// ```
    pub fn position(&self) -> ChangePosition {
        self.position
    }

    /// The changes, in the order in which the commit makes them, at least one.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut changes = db.changes_since(db.change_position()?)?;
    /// fruit.remove_prefix("ap")?;
    /// let commit = changes.next().unwrap()?;
    /// let change = commit.changes().next().unwrap();
    /// assert!(matches!(change.operation, azekura::Operation::RemoveRange { .. }));
    /// # Ok(()) }
    /// ```
    pub fn changes(&self) -> impl Iterator<Item = Change<'_>> {
        // Every record was decoded before.
        WalRecordIter::new(&self.payload).filter_map(|record| self.change(record.ok()?).ok().flatten())
    }

    /// The change that a record makes; `None` if the filters do not let it pass, or its partition was deleted.
    fn change<'a>(&'a self, record: WalRecord<'a>) -> Result<Option<Change<'a>>> {
        let note = IngestNote::of_record(&record)?;
        let id = note.map_or(record.partition, |note| note.partition);
        let Some(Some(state)) = self.partitions.get(&id) else { return Ok(None) };
        let operation = match note {
            Some(IngestNote { first, last, .. }) => Operation::Ingest { first, last },
            None => operation_of(&self.handle, state, &record)?,
        };
        let passes = |filter: &ChangeFilter| {
            Arc::ptr_eq(&filter.partition, state) && filter.bounds.as_ref().is_none_or(|bounds| operation.is_in(bounds))
        };
        let is_wanted = self.filters.is_empty() || self.filters.iter().any(passes);
        Ok(is_wanted.then_some(Change { partition: &state.name, operation }))
    }
}

impl fmt::Debug for CommittedBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommittedBatch").field("position", &self.position).finish_non_exhaustive()
    }
}

/// One change of a commit.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// let mut changes = db.changes_since(db.change_position()?)?;
/// fruit.insert("apple", "red")?;
/// for change in changes.next().unwrap()?.changes() {
///     assert_eq!(change.partition, "fruit");
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Change<'a> {
    /// The name of the partition.
    pub partition: &'a str,
    /// What the change does.
    pub operation: Operation<'a>,
}

/// What a [`Change`] does.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// # let mut changes = db.changes_since(db.change_position()?)?;
/// use azekura::Operation;
/// fruit.insert("apple", "red")?;
/// let commit = changes.next().unwrap()?;
/// match commit.changes().next().unwrap().operation {
///     Operation::Insert { key, value, expires_ms: None } => {
///         assert_eq!((key, value.size(), value.get()?.unwrap()), (&b"apple"[..], 3, "red".into()));
///     }
///     other => panic!("{other:?}"),
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Operation<'a> {
    /// The key has a new value.
    Insert {
        /// The key.
        key: &'a [u8],
        /// The value.
        value: ChangedValue<'a>,
        /// The time from which on the key has no value, in milliseconds since 1970.
        expires_ms: Option<u64>,
    },
    /// The key has no value.
    Remove {
        /// The key.
        key: &'a [u8],
    },
    /// No key between these bounds has a value.
    RemoveRange {
        /// The lower bound.
        start: Bound<&'a [u8]>,
        /// The upper bound.
        end: Bound<&'a [u8]>,
    },
    /// The merge operator of the partition applies the operand to the value.
    Merge {
        /// The key.
        key: &'a [u8],
        /// The operand.
        operand: &'a [u8],
    },
    /// An [ingest](crate::Partition::ingest) or [bulk load](crate::Partition::bulk) has set values of keys from `first`
    /// to `last`, which are not in the WAL: read them from the partition. After a crash, the ingest may not have taken
    /// place.
    Ingest {
        /// The first key.
        first: &'a [u8],
        /// The last key.
        last: &'a [u8],
    },
}

impl Operation<'_> {
    /// Whether the change may concern a key within the bounds. The keys are ordered bytewise.
    fn is_in(&self, (start, end): &OwnedBounds) -> bool {
        let (start, end) = (start.as_ref().map(Vec::as_slice), end.as_ref().map(Vec::as_slice));
        let (wanted, order) = (KeyRange::between(start, end), KeyOrder::bytewise());
        match self {
            Operation::Insert { key, .. } | Operation::Remove { key } | Operation::Merge { key, .. } => {
                wanted.contains(key, &order)
            }
            Operation::RemoveRange { start, end } => wanted.overlaps(&KeyRange::between(*start, *end), &order),
            Operation::Ingest { first, last } => {
                wanted.overlaps(&KeyRange::between(Bound::Included(*first), Bound::Included(*last)), &order)
            }
        }
    }
}

/// What a record of `state` does.
fn operation_of<'a>(handle: &'a DbHandle, state: &'a PartitionState, record: &WalRecord<'a>) -> Result<Operation<'a>> {
    let WalRecord { key, .. } = *record;
    let (expires_ms, kind, stored) = split_expiry(record.kind, record.value)?;
    let insert = |stored| {
        let value = ChangedValue { handle, state, stored };
        Operation::Insert { key, value, expires_ms: Some(expires_ms).filter(|time| *time != NEVER_MS) }
    };
    Ok(match kind {
        RecordKind::BlobPointer | RecordKind::ExpiringBlobPointer => {
            insert(StoredValue::InBlobFile(BlobPointer::decode(stored)?))
        }
        RecordKind::Put | RecordKind::ExpiringPut => insert(StoredValue::Inline(stored)),
        RecordKind::Delete | RecordKind::SingleDelete => Operation::Remove { key },
        RecordKind::Merge => Operation::Merge { key, operand: stored },
        RecordKind::RangeDelete => {
            let (start, end) = KeyRange::decode(key, record.value)?.into_bounds();
            Operation::RemoveRange { start, end }
        }
    })
}

/// A value that a change sets. It is read when it is asked for.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// # let mut changes = db.changes_since(db.change_position()?)?;
/// fruit.insert("apple", "red")?;
/// let commit = changes.next().unwrap()?;
/// if let azekura::Operation::Insert { value, .. } = commit.changes().next().unwrap().operation {
///     assert_eq!(value.size(), 3); // without a read
///     assert_eq!(value.get()?.unwrap(), "red");
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct ChangedValue<'a> {
    handle: &'a DbHandle,
    state: &'a PartitionState,
    stored: StoredValue<'a>,
}

#[derive(Clone)]
enum StoredValue<'a> {
    Inline(&'a [u8]),
    InBlobFile(BlobPointer),
}

impl ChangedValue<'_> {
    /// Length of the value in bytes.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// # let mut changes = db.changes_since(db.change_position()?)?;
    /// fruit.insert("apple", "red")?;
    /// # let commit = changes.next().unwrap()?;
    /// # let change = commit.changes().next().unwrap();
    /// if let azekura::Operation::Insert { value, .. } = change.operation {
    ///     assert_eq!(value.size(), 3);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn size(&self) -> u64 {
        match &self.stored {
            StoredValue::Inline(value) => value.len() as u64,
            StoredValue::InBlobFile(pointer) => u64::from(pointer.value_len),
        }
    }

    /// Reads the value. `None` if it is gone: a later commit has overwritten or removed it, and blob GC has freed it.
    ///
    /// Only values that were written to a blob file directly, without the WAL, can be gone; see
    /// [`KvSeparationOptions`](crate::KvSeparationOptions).
    ///
    /// # Errors
    /// As [`Partition::get`](crate::Partition::get).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// # let mut changes = db.changes_since(db.change_position()?)?;
    /// fruit.insert("apple", "red")?;
    /// # let commit = changes.next().unwrap()?;
    /// # let change = commit.changes().next().unwrap();
    /// if let azekura::Operation::Insert { value, .. } = change.operation {
    ///     assert_eq!(value.get()?.unwrap(), "red");
    /// }
    /// # Ok(()) }
    /// ```
    pub fn get(&self) -> Result<Option<Slice>> {
        let pointer = match &self.stored {
            StoredValue::Inline(value) => return Ok(Some(Slice::from(*value))),
            StoredValue::InBlobFile(pointer) => pointer,
        };
        let mut value = self.state.tables().and_then(|tree| tree.pointed_value(pointer));
        self.handle.inner.check_read(&mut value);
        value
    }
}

impl fmt::Debug for ChangedValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChangedValue").field("size", &self.size()).finish_non_exhaustive()
    }
}

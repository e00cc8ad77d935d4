//! The entries and the metadata of one Raft group, as bytes.
//!
//! Partition `raft.log`: key `group u64 BE, index u64 BE`, value: an entry. Partition `raft.meta`: key
//! `group u64 BE, field u8`, value: the field. Groups have the same two partitions.
//!
//! No call syncs. Writes keep their order, and a sync of the database makes a prefix of them durable.

use azekura::{Database, Partition, PartitionCreateOptions, Result, Slice, Snapshot};
use std::ops::{Bound, RangeBounds};

const LOG: &str = "raft.log";
const META: &str = "raft.meta";

/// Entries are removed one by one if there are at most this many, because a memtable is flushed before a range delete
/// over many of its records: most purged entries would be written to a table, only to be removed.
const SINGLE_REMOVALS_MAX: u64 = 1 << 15;

/// What is stored about a group beside its entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    Vote = 1,
    /// The log id of the last purged entry.
    Purged = 2,
    Committed = 3,
    /// What was applied last, and the generation of the state's partitions.
    Applied = 4,
}

/// The log of a group. Clones are the same log.
#[derive(Clone, Debug)]
pub struct RaftLog {
    database: Database,
    entries: Partition,
    meta: Partition,
    group: u64,
}

impl RaftLog {
    /// Opens the log of a group, which is empty at first. The options are those of the partitions that hold the logs
    /// of all groups; they apply when the first group is created.
    ///
    /// # Errors
    /// Those of [`Database::open_partition`].
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// let database = azekura::Config::new(dir.path().join("db")).open()?;
    /// let log = azekura_raft::RaftLog::open(&database, 1, Default::default())?;
    /// log.append([(1, b"first"), (2, b"later")])?;
    /// log.truncate_from(2)?;
    /// assert_eq!(log.last()?.unwrap(), (1, azekura::Slice::from("first")));
    /// # Ok(()) }
    /// ```
    pub fn open(database: &Database, group: u64, options: PartitionCreateOptions) -> Result<RaftLog> {
        let entries = database.open_partition(LOG, options.clone())?;
        let meta = database.open_partition(META, options)?;
        Ok(RaftLog { database: database.clone(), entries, meta, group })
    }

    /// The database of the log.
    pub fn database(&self) -> &Database {
        &self.database
    }

    /// The number of the group.
    pub fn group(&self) -> u64 {
        self.group
    }

    fn key(&self, index: u64) -> [u8; 16] {
        (u128::from(self.group) << 64 | u128::from(index)).to_be_bytes()
    }

    fn meta_key(&self, field: Field) -> [u8; 9] {
        let mut key = [field as u8; 9];
        key[..8].copy_from_slice(&self.group.to_be_bytes());
        key
    }

    /// Writes entries as one commit. They can be read when the call returns.
    ///
    /// # Errors
    /// Those of [`Batch::commit`](azekura::Batch::commit); nothing was written.
    pub fn append<V: AsRef<[u8]>>(&self, entries: impl IntoIterator<Item = (u64, V)>) -> Result<()> {
        let mut batch = self.database.batch();
        for (index, entry) in entries {
            batch.insert(&self.entries, self.key(index), entry);
        }
        batch.commit()
    }

    /// The entries with indexes in a range, in ascending order.
    pub fn entries<R: RangeBounds<u64>>(&self, range: R) -> impl Iterator<Item = Result<(u64, Slice)>> + use<R> {
        let start = match range.start_bound() {
            Bound::Included(index) => Bound::Included(self.key(*index)),
            Bound::Excluded(index) => Bound::Excluded(self.key(*index)),
            Bound::Unbounded => Bound::Included(self.key(0)),
        };
        let end = match range.end_bound() {
            Bound::Included(index) => Bound::Included(self.key(*index)),
            Bound::Excluded(index) => Bound::Excluded(self.key(*index)),
            Bound::Unbounded => Bound::Included(self.key(u64::MAX)),
        };
        self.entries.range((start, end)).map(|entry| entry.map(|(key, entry)| (index_of(&key), entry)))
    }

    /// The entry with the highest index.
    ///
    /// # Errors
    /// Those of a read.
    pub fn last(&self) -> Result<Option<(u64, Slice)>> {
        let mut group = self.entries.range(self.key(0)..=self.key(u64::MAX));
        group.next_back().transpose().map(|entry| entry.map(|(key, entry)| (index_of(&key), entry)))
    }

    /// Removes the entry with this index and all later ones.
    ///
    /// # Errors
    /// Those of [`Partition::remove_range`].
    pub fn truncate_from(&self, index: u64) -> Result<()> {
        self.entries.remove_range(self.key(index)..=self.key(u64::MAX))
    }

    /// Removes the entries from `first`, before which there are none, up to `last`, and stores `purged` as the log id
    /// of the last of them, in one commit.
    pub(crate) fn purge(&self, first: u64, last: u64, purged: &[u8]) -> Result<()> {
        let mut batch = self.database.batch();
        batch.insert(&self.meta, self.meta_key(Field::Purged), purged);
        if last.saturating_sub(first) < SINGLE_REMOVALS_MAX {
            for index in first..=last {
                batch.remove(&self.entries, self.key(index));
            }
        } else {
            batch.remove_range(&self.entries, self.key(0)..=self.key(last));
        }
        batch.commit()
    }

    pub(crate) fn field(&self, field: Field) -> Result<Option<Slice>> {
        self.meta.get(self.meta_key(field))
    }

    /// A field as it was when `snapshot` was taken.
    pub(crate) fn field_in(&self, snapshot: &Snapshot, field: Field) -> Result<Option<Slice>> {
        snapshot.get(&self.meta, self.meta_key(field))
    }

    pub(crate) fn set_field(&self, field: Field, value: &[u8]) -> Result<()> {
        self.meta.insert(self.meta_key(field), value)
    }

    /// Sets a field in a batch, with whatever else is in it.
    pub(crate) fn set_field_in(&self, batch: &mut azekura::Batch, field: Field, value: &[u8]) {
        batch.insert(&self.meta, self.meta_key(field), value);
    }
}

/// The index in a key of an entry, which [`RaftLog::key`] made.
fn index_of(key: &[u8]) -> u64 {
    key.last_chunk().map_or(0, |index| u64::from_be_bytes(*index))
}

//! The replicated state: records of any number of partitions, and the commands that change them.
//!
//! One azekura partition has the records of all partitions of the node. The key of a record: length of the partition's
//! name u8, name, key. So a partition exists as long as it has records.

use azekura::{Batch, Partition, PartitionCreateOptions, Slice};
use azekura_raft::{Application, State};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Bound;
use xxhash_rust::xxh3::xxh3_128;

openraft::declare_raft_types!(pub(crate) Types: D = Command, R = Outcome, NodeId = u64, Node = openraft::BasicNode);

const RECORDS: &str = "records";
/// Maximum number of bytes of a partition's name and a key together.
pub(crate) const KEY_LEN_MAX: usize = u16::MAX as usize - 1;

/// Where a record is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecordId {
    pub(crate) partition: String,
    #[serde(with = "serde_bytes")]
    pub(crate) key: Vec<u8>,
}

impl RecordId {
    /// # Errors
    /// Why there can be no such record.
    pub(crate) fn check(&self) -> Result<(), String> {
        match (self.partition.len(), self.partition.len() + self.key.len()) {
            (0, _) => Err("a partition has a name".into()),
            (256.., _) => Err("the name of a partition has at most 255 bytes".into()),
            (_, len) if len > KEY_LEN_MAX => {
                Err(format!("the name of a partition and a key have at most {KEY_LEN_MAX} bytes"))
            }
            _ => Ok(()),
        }
    }

    fn stored_key(&self) -> Vec<u8> {
        stored_key(&self.partition, &self.key)
    }
}

fn stored_key(partition: &str, key: &[u8]) -> Vec<u8> {
    let name_len = u8::try_from(partition.len()).unwrap_or(u8::MAX);
    [&[name_len], partition.as_bytes(), key].concat()
}

/// What a record must be for a command to have an effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Condition {
    Absent,
    Present,
    Value(#[serde(with = "serde_bytes")] Vec<u8>),
    /// The record has a value with this [`tag`].
    Tag(u128),
}

impl Condition {
    fn holds(&self, value: Option<&Slice>) -> bool {
        match (self, value) {
            (Condition::Absent, value) => value.is_none(),
            (Condition::Present, value) => value.is_some(),
            (Condition::Value(expected), Some(value)) => expected[..] == value[..],
            (Condition::Tag(expected), Some(value)) => *expected == tag(value),
            (Condition::Value(_) | Condition::Tag(_), None) => false,
        }
    }
}

/// A hash of a value, by which a client says which value it has seen.
pub(crate) fn tag(value: &[u8]) -> u128 {
    xxh3_128(value)
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Change {
    Insert(RecordId, #[serde(with = "serde_bytes")] Vec<u8>),
    Remove(RecordId),
    /// Removes all records whose keys begin with the key.
    RemovePrefix(RecordId),
}

impl Change {
    pub(crate) fn record(&self) -> &RecordId {
        match self {
            Change::Insert(record, _) | Change::Remove(record) | Change::RemovePrefix(record) => record,
        }
    }
}

/// If all conditions hold, all changes happen, in their order; otherwise none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Command {
    pub(crate) conditions: Vec<(RecordId, Condition)>,
    pub(crate) changes: Vec<Change>,
}

impl Command {
    /// Bytes of keys and values, with an upper bound of what is stored beside them.
    pub(crate) fn len(&self) -> usize {
        let record_len = |record: &RecordId| record.partition.len() + record.key.len() + 32;
        let conditions = self.conditions.iter().map(|(record, condition)| match condition {
            Condition::Value(value) => record_len(record) + value.len(),
            _ => record_len(record),
        });
        let changes = self.changes.iter().map(|change| match change {
            Change::Insert(record, value) => record_len(record) + value.len(),
            Change::Remove(record) | Change::RemovePrefix(record) => record_len(record),
        });
        conditions.chain(changes).sum()
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} changes on {} conditions", self.changes.len(), self.conditions.len())
    }
}

/// What a command did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Outcome {
    #[default]
    Done,
    /// The condition on this record did not hold, and nothing was changed.
    Conflict(RecordId),
}

/// Applies commands to the records.
#[derive(Debug)]
pub(crate) struct Records;

impl Application for Records {
    type Command = Command;
    type Response = Outcome;

    fn partitions(&self) -> Vec<(String, PartitionCreateOptions)> {
        vec![(RECORDS.into(), PartitionCreateOptions::default())]
    }

    fn apply(&self, state: &State, batch: &mut Batch, command: &Command) -> azekura::Result<Outcome> {
        let records = records_of(state);
        for (record, condition) in &command.conditions {
            if !condition.holds(records.get(record.stored_key())?.as_ref()) {
                return Ok(Outcome::Conflict(record.clone()));
            }
        }
        for change in &command.changes {
            match change {
                Change::Insert(record, value) => batch.insert(records, record.stored_key(), value),
                Change::Remove(record) => batch.remove(records, record.stored_key()),
                Change::RemovePrefix(record) => batch.remove_prefix(records, record.stored_key()),
            };
        }
        Ok(Outcome::Done)
    }
}

fn records_of(state: &State) -> &Partition {
    state.partition(RECORDS).expect("`Records::partitions` names it")
}

/// The value of a record.
pub(crate) fn get(state: &State, record: &RecordId) -> azekura::Result<Option<Slice>> {
    records_of(state).get(record.stored_key())
}

/// A part of a scan.
#[derive(Debug, Default)]
pub(crate) struct Page {
    /// Keys without the name of the partition, and values, in ascending order of the keys.
    pub(crate) records: Vec<(Slice, Slice)>,
    /// Whether there are more records after these.
    pub(crate) has_more: bool,
}

/// Records of a partition whose keys begin with `prefix` and are greater than `after`: at most `limit`, and none after
/// the one with which keys and values reach `len_max` bytes.
pub(crate) fn scan(
    state: &State,
    partition: &str,
    prefix: &[u8],
    after: Option<&[u8]>,
    limit: usize,
    len_max: usize,
) -> azekura::Result<Page> {
    let stored_prefix = stored_key(partition, prefix);
    let start = match after {
        Some(after) if after >= prefix => Bound::Excluded(stored_key(partition, after)),
        _ => Bound::Included(stored_prefix.clone()),
    };
    let (mut page, mut len) = (Page::default(), 0);
    for record in records_of(state).range((start, Bound::Unbounded)) {
        let (key, value) = record?;
        if !key.starts_with(&stored_prefix) {
            break;
        }
        if page.records.len() == limit || len >= len_max {
            page.has_more = true;
            break;
        }
        len += key.len() + value.len();
        page.records.push((key.slice(1 + partition.len()..), value));
    }
    Ok(page)
}

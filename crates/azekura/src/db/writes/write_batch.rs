//! The records of a commit, on the way from the caller to the WAL and the trees.

use std::cell::RefCell;
use std::sync::Arc;

use crate::base::version_edit::PartitionId;
use crate::base::{Error, Result, SeqNo};
use crate::db::partition_state::PartitionState;
use crate::db::state::list_growth::reserve_more;
use crate::db::writes::commit_check::CommitCheck;
use crate::db::writes::staged_records::StagedRecords;
use crate::tree::partition_tree::PartitionTree;
use crate::wal::WalCommit;
use crate::wal::format::{WalRecord, WalRecordIter, put_record, record_len};

/// Largest capacity, in bytes, of an encoding buffer that a thread or a batch keeps for its next write.
pub(crate) const KEPT_BUFFER_MAX: usize = 1 << 20;

thread_local! {
    /// Reused buffer in which a single record is encoded.
    static PAYLOAD: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Calls `work` with an empty buffer of this thread for a WAL payload.
pub(crate) fn with_payload<R>(work: impl FnOnce(&mut Vec<u8>) -> R) -> R {
    // A comparator may call a write during a write, which is refused: the nested call finds an empty buffer and
    // allocates. A thread-local destructor may write after this buffer was destroyed: that write allocates too.
    let mut payload = PAYLOAD.try_with(|buffer| std::mem::take(&mut *buffer.borrow_mut())).unwrap_or_default();
    payload.clear();
    let result = work(&mut payload);
    if payload.capacity() <= KEPT_BUFFER_MAX {
        let _ends_with_its_thread = PAYLOAD.try_with(|buffer| *buffer.borrow_mut() = payload);
    }
    result
}

/// Encodes a record of `len` bytes as the last one of `payload`.
#[inline]
pub(crate) fn append_record(payload: &mut Vec<u8>, record: &WalRecord<'_>, len: u64) {
    debug_assert_eq!(len, record_len(record), "the length is that of the record");
    reserve_more(payload, len as usize);
    put_record(payload, record);
}

/// Records that are committed together.
#[derive(Clone, Copy)]
pub(crate) struct WriteBatch<'a> {
    /// The encoded records; empty if the only record is not [encoded](WriteBatch::with_payload) yet.
    pub(crate) payload: &'a [u8],
    /// Length of the encoded records in bytes.
    pub(crate) payload_len: u64,
    /// Number of records, at least 1.
    pub(crate) count: u32,
    /// The only record, if it is at hand. It need not be decoded then.
    pub(crate) record: Option<WalRecord<'a>>,
    /// All partitions in the payload, and what their trees have staged.
    pub(crate) staged: &'a StagedRecords<'a>,
    /// What must be unchanged for the batch to be written.
    pub(crate) check: Option<&'a Arc<CommitCheck>>,
}

impl<'a> WriteBatch<'a> {
    /// A batch that depends on nothing.
    pub(crate) fn new(payload: &'a [u8], count: u32, staged: &'a StagedRecords<'a>) -> WriteBatch<'a> {
        debug_assert_eq!(payload.is_empty(), count == 0, "the payload has the records");
        WriteBatch { payload, payload_len: payload.len() as u64, count, record: None, staged, check: None }
    }

    /// A batch of one record, which is encoded only if the WAL gets it.
    pub(crate) fn of_record(record: WalRecord<'a>, staged: &'a StagedRecords<'a>) -> WriteBatch<'a> {
        let payload_len = record_len(&record);
        WriteBatch { payload: &[], payload_len, count: 1, record: Some(record), staged, check: None }
    }

    /// Calls `work` with this batch, encoded.
    #[inline]
    pub(crate) fn with_payload<R>(&self, work: impl FnOnce(&WriteBatch<'_>) -> R) -> R {
        match &self.record {
            Some(record) if self.payload.is_empty() => with_payload(|payload| {
                append_record(payload, record, self.payload_len);
                work(&WriteBatch { payload, ..*self })
            }),
            _ => work(self),
        }
    }

    pub(crate) fn partitions(&self) -> &'a [Arc<PartitionState>] {
        self.staged.partitions()
    }

    /// The partition of a record.
    ///
    /// # Errors
    /// `Invalid` if the batch does not list it.
    pub(crate) fn partition(&self, id: PartitionId) -> Result<&'a Arc<PartitionState>> {
        let missing = || Error::invalid("a commit has a record of a partition that it does not list");
        self.partitions().iter().find(|partition| partition.id == id).ok_or_else(missing)
    }

    /// The only record, if there is only one.
    #[inline]
    pub(crate) fn only_record(&self) -> Result<Option<WalRecord<'a>>> {
        match (self.record, self.count) {
            (None, 1) => Some(WalRecordIter::new(self.payload).next().expect("a batch has records")).transpose(),
            (record, _) => Ok(record),
        }
    }

    /// `Closed` if a partition was deleted; for the leader, because a deletion runs between two commits.
    pub(crate) fn check_partitions(&self) -> Result<()> {
        self.partitions().iter().try_for_each(|partition| partition.tree().map(drop))
    }

    /// Whether the commit belongs to the exclusive turn.
    pub(crate) fn is_in_turn(&self) -> bool {
        self.check.is_some_and(|check| check.is_in_turn())
    }

    /// Calls `visit` with each record and its number.
    #[inline]
    pub(crate) fn try_for_each_record(&self, mut visit: impl FnMut(WalRecord<'a>, u32) -> Result<()>) -> Result<()> {
        match self.record {
            Some(record) => visit(record, 0),
            None => WalRecordIter::new(self.payload).zip(0..).try_for_each(|(record, number)| visit(record?, number)),
        }
    }

    /// Returns whether the commit contains only removals.
    pub(crate) fn only_removes(&self) -> bool {
        match &self.record {
            Some(record) => record.kind.is_removal(),
            None => WalRecordIter::new(self.payload).all(|record| record.is_ok_and(|record| record.kind.is_removal())),
        }
    }

    /// Whether the WAL must be durable before the batch is applied, because a tree that survives power loss without
    /// the WAL must not contain part of a commit.
    pub(crate) fn syncs_before_apply(&self) -> bool {
        let survives = |tree: &PartitionTree| tree.survives_power_loss();
        self.partitions().iter().any(|partition| partition.tree_if_built().is_some_and(survives))
    }

    /// Assigns the commit's sequence numbers. The batch is encoded.
    pub(crate) fn wal_commit(&self, next: &mut SeqNo) -> WalCommit<'a> {
        debug_assert!(!self.payload.is_empty(), "a batch is encoded before the WAL gets it");
        let first = *next;
        *next = first.plus(u64::from(self.count));
        WalCommit { first_seqno: first, seqno_count: self.count, payload: self.payload }
    }
}

//! Operands for pools become values before their commit, so that the write-ahead log (WAL) has no operands for pools,
//! and the group-commit leader calls no operator.

use std::sync::Arc;

use crate::base::key::split_expiry;
use crate::base::merge_operator::merge_fully;
use crate::base::{RecordKind, Result, SeqNo};
use crate::db::catalog::PartitionState;
use crate::db::commit_check::ReadsOfPartition;
use crate::db::writes::overlay::Overlay;
use crate::engine::{ReadMoment, ReadSeqno};
use crate::iter::InternalIter;
use crate::mem::slice::Slice;
use crate::memtable::Memtable;
use crate::wal::format::{WalRecord, WalRecordIter, put_record};

/// A payload whose operands for pools were replaced by values, and the keys that were read for them.
#[derive(Default)]
pub(crate) struct PoolMerge {
    pub(crate) payload: Vec<u8>,
    /// Number of records in `payload`.
    pub(crate) count: u32,
    pub(crate) reads: Vec<ReadsOfPartition>,
}

impl PoolMerge {
    /// Computes the values from the state at `at`, the moment of a registered snapshot, and from the records
    /// of `payload`. Each key gets one value, after all other records.
    ///
    /// # Errors
    /// `MergeFailed` if an operator fails; `Io` and `Corruption` from reading; `Closed`.
    pub(crate) fn compute(payload: &[u8], partitions: &[Arc<PartitionState>], at: ReadMoment) -> Result<PoolMerge> {
        let pools: Vec<&Arc<PartitionState>> =
            partitions.iter().filter(|partition| partition.pool_if_built().is_some()).collect();
        let mut merge = PoolMerge::default();
        for record in WalRecordIter::new(payload) {
            let record = record?;
            if record.kind != RecordKind::Merge || !pools.iter().any(|pool| pool.id == record.partition) {
                merge.put(&record);
            }
        }
        let mut writes = Overlay::default();
        writes.apply(payload, partitions, at.seqno)?;
        for pool in pools {
            if let Some(memtable) = writes.memtable(pool.id) {
                merge.add_values(pool, memtable, at)?;
            }
        }
        Ok(merge)
    }

    fn put(&mut self, record: &WalRecord<'_>) {
        put_record(&mut self.payload, record);
        self.count += 1;
    }

    /// Adds the value of each key whose newest write is an operand.
    fn add_values(&mut self, pool: &Arc<PartitionState>, writes: &Arc<Memtable>, at: ReadMoment) -> Result<()> {
        let tree = pool.tree()?;
        let order = tree.key_order();
        let range_deletes = writes.range_tombstones_arc();
        let mut iter = writes.iter();
        iter.seek_to_first()?;
        while let Some(newest) = iter.current() {
            let key = newest.user_key.to_vec();
            let removed = range_deletes.covering_seqno(&key, SeqNo::MAX, order);
            let mut operands = Vec::new();
            let mut base = None;
            while let Some(write) = iter.current().filter(|write| order.keys_equal(write.user_key, &key)) {
                let (_, kind, value) = split_expiry(write.kind, write.value)?;
                match kind {
                    _ if base.is_some() => {}
                    RecordKind::Merge if write.seqno > removed => operands.push(value.to_vec()),
                    RecordKind::Put if write.seqno > removed => base = Some(Some(Slice::from(value))),
                    _ => base = Some(None),
                }
                iter.next()?;
            }
            if operands.is_empty() {
                continue;
            }
            let existing = match base {
                Some(base) => base,
                None if removed > SeqNo::ZERO => None,
                None => {
                    ReadsOfPartition::of(&mut self.reads, pool).keys.push(Slice::from(&key[..]));
                    tree.get(&key, ReadSeqno::At(at))?
                }
            };
            let value = merge_fully(&**pool.merge_operator()?, &key, existing.as_deref(), &operands)?;
            self.put(&WalRecord { kind: RecordKind::Put, partition: pool.id, key: &key, value: &value });
        }
        Ok(())
    }
}

//! Operands that a tree does not keep become values before their commit, so that the group-commit leader calls no
//! operator.

use std::sync::Arc;

use crate::base::key::split_expiry;
use crate::base::key_range::KeyRange;
use crate::base::merge_operator::merge_fully;
use crate::base::{Error, KeyOrder, RecordKind, Result, SeqNo};
use crate::db::partition_state::PartitionState;
use crate::db::state::list_growth::{list_bytes, reserve_more};
use crate::db::writes::commit_check::{ReadsOfPartition, key_bytes};
use crate::db::writes::write_batch::append_record;
use crate::engine::{ReadMoment, ReadSeqno};
use crate::iter::range_tombstones::RangeTombstones;
use crate::mem::slice::Slice;
use crate::wal::format::{WalRecord, WalRecordIter, record_len};

/// A payload whose operands were replaced by values, and the keys that were read for them.
#[derive(Default)]
pub(crate) struct ComputedMerges {
    pub(crate) payload: Vec<u8>,
    /// Number of records in `payload`.
    pub(crate) count: u32,
    pub(crate) reads: Vec<ReadsOfPartition>,
    /// Memory of the keys of `reads` in bytes, without their lists.
    read_key_bytes: usize,
    /// Limit of the memory for `payload`, `reads` and the ordered writes of a partition, in bytes.
    bytes_max: u64,
}

/// A set of range deletes takes up to this many times its memory while it is changed.
const RANGE_DELETE_COPIES: u64 = 3;

/// A write of one key. The n-th write of the payload has the number n.
struct KeyWrite<'a> {
    key: &'a [u8],
    value: &'a [u8],
    number: u32,
    kind: RecordKind,
}

/// The writes of one partition.
#[derive(Default)]
struct PartitionWrites<'a> {
    /// Ordered by key, those of one key from the newest to the oldest.
    writes: Vec<KeyWrite<'a>>,
    /// Each has the number of the write as its sequence number.
    range_deletes: RangeTombstones,
}

impl<'a> PartitionWrites<'a> {
    /// Orders the writes of a partition, of which `payload` has `count`. `check_memory` gets the bytes of the range
    /// deletes.
    ///
    /// # Errors
    /// Those of `check_memory`.
    fn of(
        payload: &'a [u8],
        count: usize,
        state: &PartitionState,
        order: &KeyOrder,
        check_memory: impl Fn(u64) -> Result<()>,
    ) -> Result<PartitionWrites<'a>> {
        let mut found = PartitionWrites { writes: Vec::with_capacity(count), ..PartitionWrites::default() };
        for (record, number) in WalRecordIter::new(payload).zip(1..) {
            let WalRecord { kind, partition, key, value } = record?;
            if partition != state.id {
                continue;
            }
            if kind == RecordKind::RangeDelete {
                let (range, seqno) = (KeyRange::decode(key, value)?.to_owned(), SeqNo(u64::from(number)));
                found.range_deletes = found.range_deletes.with_range_delete(range, seqno, &[seqno], order);
                check_memory(RANGE_DELETE_COPIES * found.range_deletes.bytes())?;
            } else {
                found.writes.push(KeyWrite { key, value, number, kind });
            }
        }
        debug_assert!(found.writes.len() <= count, "memory was counted for all writes of the pool");
        found.writes.sort_unstable_by(|a, b| order.cmp(a.key, b.key).then(b.number.cmp(&a.number)));
        Ok(found)
    }
}

impl ComputedMerges {
    /// Computes the values from the state at `at`, the moment of a registered snapshot, and from the records
    /// of `payload`. Each key gets one value, after all other records. This takes at most `bytes_max` bytes of memory
    /// beyond `payload` and a copy of it.
    ///
    /// # Errors
    /// `MergeFailed` if an operator fails; `Invalid` if there is too little memory; `Io` and `Corruption` from reading;
    /// `Closed`.
    pub(crate) fn compute(
        payload: &[u8],
        partitions: &[Arc<PartitionState>],
        at: ReadMoment,
        bytes_max: u64,
    ) -> Result<ComputedMerges> {
        let mut computed: Vec<(&Arc<PartitionState>, u64)> =
            partitions.iter().filter(|partition| partition.computes_merges()).map(|partition| (partition, 0)).collect();
        let mut merge =
            ComputedMerges { bytes_max: bytes_max.saturating_add(payload.len() as u64), ..ComputedMerges::default() };
        merge.payload.reserve_exact(payload.len());
        for record in WalRecordIter::new(payload) {
            let record = record?;
            let operands = computed.iter_mut().find(|(partition, _)| partition.id == record.partition);
            match operands.filter(|_| record.kind == RecordKind::Merge) {
                Some((_, count)) => *count += 1,
                None => merge.put(&record, 0, 0)?,
            }
        }
        computed.retain(|(_, operands)| *operands > 0);
        for (partition, _) in computed {
            let is_own =
                |record: &Result<WalRecord<'_>>| record.as_ref().is_ok_and(|record| record.partition == partition.id);
            let count = WalRecordIter::new(payload).filter(is_own).count();
            let check_memory = |range_delete_bytes| merge.check_memory(0, count, range_delete_bytes);
            check_memory(0)?;
            let writes = PartitionWrites::of(payload, count, partition, partition.tree()?.key_order(), check_memory)?;
            merge.add_values(partition, &writes, at)?;
        }
        Ok(merge)
    }

    /// Fails if there is too little memory for `added` more bytes of the payload beside space for `writes` writes, of
    /// which all may be operands of one key, and range deletes of a partition of `range_delete_bytes` bytes.
    fn check_memory(&self, added: usize, writes: usize, range_delete_bytes: u64) -> Result<()> {
        let reads: u64 = self.reads.iter().map(|reads| list_bytes(&reads.keys, 1)).sum();
        let keys = writes * (size_of::<KeyWrite<'_>>() + size_of::<&[u8]>()) + self.read_key_bytes;
        let counted = list_bytes(&self.payload, added) + reads + keys as u64 + range_delete_bytes;
        if counted <= self.bytes_max {
            return Ok(());
        }
        let limit = self.bytes_max;
        Err(Error::invalid(format!(
            "the operands need more than half the memory budget beside a copy of the batch, together {limit} \
             bytes"
        )))
    }

    /// Adds a record, beside `writes` writes of a partition and range deletes of `range_delete_bytes` bytes.
    fn put(&mut self, record: &WalRecord<'_>, writes: usize, range_delete_bytes: u64) -> Result<()> {
        let len = record_len(record);
        self.check_memory(len as usize, writes, range_delete_bytes)?;
        append_record(&mut self.payload, record, len);
        self.count += 1;
        Ok(())
    }

    /// Adds the value of each key whose newest write is an operand.
    fn add_values(
        &mut self,
        partition: &Arc<PartitionState>,
        writes: &PartitionWrites<'_>,
        at: ReadMoment,
    ) -> Result<()> {
        let tree = partition.tree()?;
        let order = tree.key_order();
        for same in writes.writes.chunk_by(|a, b| order.keys_equal(a.key, b.key)) {
            let key = same[0].key;
            let removed = writes.range_deletes.covering_seqno(key, SeqNo::MAX, order);
            let mut operands = Vec::with_capacity(same.len());
            let mut base = None;
            for write in same {
                let (_, kind, value) = split_expiry(write.kind, write.value)?;
                match kind {
                    RecordKind::Merge if SeqNo(u64::from(write.number)) > removed => operands.push(value),
                    RecordKind::Put if SeqNo(u64::from(write.number)) > removed => base = Some(Some(value)),
                    _ => base = Some(None),
                }
                if base.is_some() {
                    break;
                }
            }
            if operands.is_empty() {
                continue;
            }
            let existing = match base {
                Some(base) => base.map(Slice::from),
                None if removed > SeqNo::ZERO => None,
                None => {
                    let keys = &mut ReadsOfPartition::of(&mut self.reads, partition).keys;
                    reserve_more(keys, 1);
                    keys.push(Slice::from(key));
                    self.read_key_bytes += key_bytes(key);
                    tree.get(key, ReadSeqno::At(at))?
                }
            };
            let value = merge_fully(&**partition.merge_operator.get()?, key, existing.as_deref(), &operands)?;
            let record = WalRecord { kind: RecordKind::Put, partition: partition.id, key, value: &value };
            self.put(&record, writes.writes.capacity(), writes.range_deletes.bytes())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::merge_operator::append;
    use crate::db::components::PartitionComponents;
    use crate::db::config::Config;
    use crate::db::database::Database;
    use crate::db::options::{EngineType, PartitionCreateOptions};
    use crate::db::partition::Partition;
    use crate::mem::allocation_counter::peak_bytes;
    use crate::pmem::options::PmemOptions;
    use crate::testing::{MemFs, is_in_own_process};

    fn open_pool(db: &Database) -> Partition {
        let options = PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default()));
        let components = PartitionComponents::default().merge_operator(append(","));
        db.open_partition_with("pool", options, components).unwrap()
    }

    /// Regression: if a batch had an operand for a pool, memtables ordered all its writes. That used about ten times
    /// the memory of a batch of small writes.
    #[test]
    fn memory_of_operands_is_limited() {
        if !is_in_own_process("db::writes::computed_merges::tests::memory_of_operands_is_limited") {
            return; // memory of other tests that this thread frees would count
        }
        let db = Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).open().unwrap();
        let pool = open_pool(&db);
        let plain = db.open_partition("plain", Default::default()).unwrap();
        let mut batch = db.batch();
        for n in 0..20_000u32 {
            batch.merge(&pool, n.to_be_bytes(), [7]);
            batch.insert(&plain, n.to_be_bytes(), [7; 10]);
        }
        let (payload, _, partitions) = batch.writes();
        let snapshot = db.snapshot();
        let at = crate::engine::ReadMoment::from(db.handle.inner.last_visible.get());
        let compute = |bytes_max| peak_bytes(|| ComputedMerges::compute(payload, partitions, at, bytes_max));
        let (merge, unlimited_peak) = compute(u64::MAX);
        assert_eq!(merge.unwrap().count, 40_000);
        let written = payload.len() as i64;
        assert!(unlimited_peak < 8 * written, "{unlimited_peak} bytes for a payload of {written}");
        let extra_bytes = unlimited_peak - written;
        let (merge, _) = compute(extra_bytes as u64 * 5 / 4);
        assert_eq!(merge.unwrap().count, 40_000);
        for part in [2, 4, 100] {
            let limit = extra_bytes / part;
            let (refused, peak) = compute(limit as u64);
            assert_eq!(refused.err().map(|error| error.kind()), Some(ErrorKind::Invalid));
            assert!(peak < written + limit + 1_000, "{peak} bytes at a limit of {limit}, with {written} written");
        }
        drop(snapshot);
    }

    /// Regression: a range delete of a pool counted as much memory as another write, and used up to six times as much.
    #[test]
    fn memory_of_range_deletes_is_limited() {
        if !is_in_own_process("db::writes::computed_merges::tests::memory_of_range_deletes_is_limited") {
            return; // memory of other tests that this thread frees would count
        }
        let db = Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).open().unwrap();
        let pool = open_pool(&db);
        let mut batch = db.batch();
        for n in 0..20_000u32 {
            batch.remove_range(&pool, (2 * n).to_be_bytes()..(2 * n + 1).to_be_bytes());
        }
        batch.merge(&pool, "key", [7]);
        let (payload, _, partitions) = batch.writes();
        let snapshot = db.snapshot();
        let at = crate::engine::ReadMoment::from(db.handle.inner.last_visible.get());
        let compute = |bytes_max| peak_bytes(|| ComputedMerges::compute(payload, partitions, at, bytes_max));
        let (merge, unlimited_peak) = compute(u64::MAX);
        assert_eq!(merge.unwrap().count, 20_001);
        let extra_bytes = unlimited_peak - payload.len() as i64;
        for part in [2, 4, 10] {
            let limit = extra_bytes / part;
            let (refused, peak) = compute(limit as u64);
            assert_eq!(refused.err().map(|error| error.kind()), Some(ErrorKind::Invalid), "{limit}");
            let written = payload.len() as i64;
            assert!(peak < written + limit + 10_000, "{peak} bytes at a limit of {limit}, with {written} written");
        }
        drop(snapshot);
    }

    /// Regression: a batch that was smaller than its limit was refused if it had one operand for a pool. The copy of
    /// its writes counted as memory for operands, with up to twice its length.
    #[test]
    fn one_operand_fits_with_many_writes() {
        let limit = 512 << 10;
        let db = Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).memory_budget(2 * limit).open().unwrap();
        let pool = open_pool(&db);
        let plain = db.open_partition("plain", Default::default()).unwrap();
        for bytes in [limit / 2 + 10_000, limit - 2_000] {
            let mut batch = db.batch();
            for n in 0..bytes as u32 / 1_000 {
                batch.insert(&plain, n.to_be_bytes(), [7; 1_000 - 10]);
            }
            batch.merge(&pool, "key", [7]);
            batch.commit().unwrap_or_else(|error| panic!("{bytes} bytes of {limit}: {error}"));
        }
        assert_eq!(pool.get("key").unwrap().unwrap(), [7, b',', 7]);
    }
}

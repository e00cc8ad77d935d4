//! The keys and ranges that a transaction has read.

use std::sync::{Arc, Mutex};

use crate::base::KeyOrder;
use crate::base::sync::lock;
use crate::db::partition_state::PartitionState;
use crate::db::state::list_growth::{list_bytes, reserve_more};
use crate::db::state::scanned_range::{OwnedRange, ScanMemory, ScannedRange, range_bytes};
use crate::db::writes::commit_check::{ReadsOfPartition, key_bytes};
use crate::mem::slice::Slice;

/// A sorted list of keys is made when this many keys were added.
const SORT_KEYS_MIN: usize = 64;
/// Memory of the counters and the lock beside an open range, in bytes, with its place in a list.
const OPEN_RANGE_OVERHEAD: usize = 64;

/// Tracked reads, with absent keys, in bounded memory: the transaction compares [`bytes`](ReadSet::bytes) with its
/// limit.
pub(crate) struct ReadSet {
    partitions: Vec<PartitionReads>,
    /// The memory of the open ranges.
    open_memory: Arc<ScanMemory>,
}

struct PartitionReads {
    partition: Arc<PartitionState>,
    keys: Vec<Slice>,
    key_bytes: usize,
    /// Number of keys at which duplicates are removed.
    sort_at: usize,
    /// Ranges of iterators that may still be in use. They count their memory themselves.
    open: Vec<Arc<Mutex<ScannedRange>>>,
    closed: Vec<OwnedRange>,
    /// Bytes of their keys.
    closed_bytes: usize,
}

impl ReadSet {
    /// No reads. The ranges of iterators that are in use may take `open_bytes_max` bytes.
    pub(crate) fn new(open_bytes_max: u64) -> ReadSet {
        ReadSet { partitions: Vec::new(), open_memory: Arc::new(ScanMemory::new(open_bytes_max)) }
    }

    fn partition(&mut self, partition: &Arc<PartitionState>) -> &mut PartitionReads {
        let known = self.partitions.iter().position(|reads| reads.partition.id == partition.id);
        let at = known.unwrap_or_else(|| {
            self.partitions.push(PartitionReads {
                partition: Arc::clone(partition),
                keys: Vec::new(),
                key_bytes: 0,
                sort_at: SORT_KEYS_MIN,
                open: Vec::new(),
                closed: Vec::new(),
                closed_bytes: 0,
            });
            self.partitions.len() - 1
        });
        &mut self.partitions[at]
    }

    /// Adds a key that was read, present or not.
    pub(crate) fn add_key(&mut self, partition: &Arc<PartitionState>, key: &[u8]) {
        let reads = self.partition(partition);
        if reads.keys.last().is_some_and(|last| **last == *key) {
            return;
        }
        reserve_more(&mut reads.keys, 1);
        reads.keys.push(Slice::from(key));
        reads.key_bytes += key_bytes(key);
        if reads.keys.len() >= reads.sort_at {
            reads.keys.sort_unstable();
            reads.keys.dedup();
            reads.key_bytes = reads.keys.iter().map(|key| key_bytes(key)).sum();
            reads.sort_at = (2 * reads.keys.len()).max(SORT_KEYS_MIN);
            debug_assert!(reads.keys.len() < reads.sort_at, "the next key does not sort the list again");
        }
    }

    /// Adds the range of a new iterator, which is empty until the iterator has read something.
    pub(crate) fn add_range(
        &mut self,
        partition: &Arc<PartitionState>,
        order: KeyOrder,
        bounds: OwnedRange,
    ) -> Arc<Mutex<ScannedRange>> {
        let memory = Arc::clone(&self.open_memory);
        let reads = self.partition(partition);
        for ended in reads.open.extract_if(.., |range| Arc::strong_count(range) == 1) {
            for range in lock(&ended).ranges() {
                reads.closed_bytes += range_bytes(&range) - size_of::<OwnedRange>();
                reserve_more(&mut reads.closed, 1);
                reads.closed.push(range);
            }
        }
        let range = Arc::new(Mutex::new(ScannedRange::new(memory, order, bounds)));
        reads.open.push(Arc::clone(&range));
        range
    }

    /// Memory in bytes. The lists of keys and ranges count as if they grew for the next one.
    pub(crate) fn bytes(&self) -> u64 {
        let of = |reads: &PartitionReads| {
            let keys = reads.key_bytes as u64 + list_bytes(&reads.keys, 1);
            let closed = reads.closed_bytes as u64 + list_bytes(&reads.closed, 1);
            keys + closed + (reads.open.capacity() * OPEN_RANGE_OVERHEAD) as u64
        };
        self.partitions.iter().map(of).sum::<u64>() + self.open_memory.bytes()
    }

    /// Takes everything that was read until now.
    pub(crate) fn take(&mut self) -> Vec<ReadsOfPartition> {
        let reads = std::mem::take(&mut self.partitions).into_iter().map(|reads| {
            let open = reads.open.iter().flat_map(|range| lock(range).ranges());
            let ranges = reads.closed.into_iter().chain(open).collect();
            ReadsOfPartition { partition: reads.partition, keys: reads.keys, ranges }
        });
        reads.filter(|reads| !reads.keys.is_empty() || !reads.ranges.is_empty()).collect()
    }
}

//! Writes that are not committed yet, ordered by key.

use std::sync::{Arc, Weak};

use crate::base::key_range::KeyRange;
use crate::base::version_edit::PartitionId;
use crate::base::{EntryRef, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::db::partition_state::PartitionState;
use crate::iter::InternalIter;
use crate::mem::arena::AppendError;
use crate::memtable::Memtable;
use crate::wal::format::WalRecordIter;

/// The writes of a transaction or a batch, ordered by key, in one memtable for each partition. The n-th write has the
/// sequence number of the snapshot plus n. Filled from the payload when a read needs it.
#[derive(Default)]
pub(crate) struct Overlay {
    memtables: Vec<(PartitionId, Arc<Memtable>)>,
    /// Bytes and records of the payload that the memtables contain.
    applied_bytes: usize,
    applied_count: u64,
    /// Memtables that were discarded, and that iterators may still hold.
    discarded: Vec<Weak<Memtable>>,
}

impl Overlay {
    /// Adds the writes that were made since the last call. After an error the next call begins again.
    ///
    /// # Errors
    /// `Poisoned` if a comparator panicked in an earlier call.
    pub(crate) fn apply(
        &mut self,
        payload: &[u8],
        partitions: &[Arc<PartitionState>],
        read_seqno: SeqNo,
    ) -> Result<()> {
        debug_assert!(self.applied_bytes <= payload.len(), "an overlay is cleared when writes are discarded");
        if self.applied_bytes == payload.len() {
            return Ok(());
        }
        let mut overlay = std::mem::take(self);
        self.discarded = overlay.discarded_or_held(); // stays like this after an error or a panic
        for record in WalRecordIter::new(&payload[overlay.applied_bytes..]) {
            let record = record?;
            overlay.applied_count += 1;
            let Some(partition) = partitions.iter().find(|partition| partition.id == record.partition) else {
                continue;
            };
            let seqno = read_seqno.plus(overlay.applied_count);
            let memtable = overlay.memtable_of(partition)?;
            if record.kind == RecordKind::RangeDelete {
                let range = KeyRange::decode(record.key, record.value)?.to_owned();
                // Iterators keep the set of range deletes that existed when they were made.
                memtable.insert_range_delete(range, seqno, &[seqno])?;
            } else {
                let entry = EntryRef { user_key: record.key, seqno, kind: record.kind, value: record.value };
                memtable.insert(entry).map_err(AppendError::into_error)?;
            }
        }
        overlay.applied_bytes = payload.len();
        *self = overlay;
        Ok(())
    }

    /// Discards all writes.
    pub(crate) fn clear(&mut self) {
        *self = Overlay { discarded: self.discarded_or_held(), ..Overlay::default() };
    }

    /// The memtables that remain in memory after this overlay is discarded, as far as iterators hold them.
    fn discarded_or_held(&self) -> Vec<Weak<Memtable>> {
        let discarded = self.discarded.iter().filter(|memtable| memtable.strong_count() > 0).cloned();
        discarded.chain(self.memtables.iter().map(|(_, memtable)| Arc::downgrade(memtable))).collect()
    }

    /// Bytes of memory that the writes take here, with those that were discarded and that iterators hold. Writes that
    /// will be applied count, too: all writes take at most `writes_bytes_max`, and for each partition 128 KiB more.
    pub(crate) fn bytes(&self, writes_bytes_max: u64) -> u64 {
        let discarded = self.discarded.iter().filter_map(Weak::upgrade).map(|memtable| memtable.bytes());
        let applied: u64 = self.memtables.iter().map(|(_, memtable)| memtable.bytes()).sum();
        discarded.sum::<u64>() + applied.max(writes_bytes_max)
    }

    fn memtable_of(&mut self, partition: &PartitionState) -> Result<Arc<Memtable>> {
        if let Some(known) = self.memtable(partition.id) {
            return Ok(Arc::clone(known));
        }
        let memtable = Arc::new(Memtable::new(partition.tree()?.key_order().clone(), 0));
        self.memtables.push((partition.id, Arc::clone(&memtable)));
        Ok(memtable)
    }

    /// The last write of `key` to `partition`, among those that were [applied](Overlay::apply).
    pub(crate) fn find_last_write(
        &self,
        partition: PartitionId,
        order: &KeyOrder,
        key: &[u8],
    ) -> Option<(RecordKind, Vec<u8>)> {
        let memtable = self.memtable(partition)?;
        let newest = memtable.get(key, memtable.hash_of(key), SeqNo::MAX);
        let removed = memtable.range_tombstones_arc().covering_seqno(key, SeqNo::MAX, order);
        match newest.filter(|entry| entry.seqno > removed) {
            Some(entry) => Some((entry.kind, entry.value.to_vec())),
            None => (removed > SeqNo::ZERO).then(|| (RecordKind::Delete, Vec::new())),
        }
    }

    /// Whether the writes of `key` do not depend on its value at the snapshot: not all of them are operands.
    pub(crate) fn has_base(&self, partition: PartitionId, order: &KeyOrder, key: &[u8]) -> Result<bool> {
        let Some(memtable) = self.memtable(partition) else { return Ok(false) };
        if memtable.range_tombstones_arc().covering_seqno(key, SeqNo::MAX, order) > SeqNo::ZERO {
            return Ok(true);
        }
        let mut iter = memtable.iter();
        iter.seek(InternalKey::before_versions_of(key))?;
        while let Some((_, kind)) = iter.head().filter(|(write, _)| order.keys_equal(write.user_key, key)) {
            if kind != RecordKind::Merge {
                return Ok(true);
            }
            iter.next()?;
        }
        Ok(false)
    }

    pub(crate) fn memtable(&self, partition: PartitionId) -> Option<&Arc<Memtable>> {
        self.memtables.iter().find(|(id, _)| *id == partition).map(|(_, memtable)| memtable)
    }
}

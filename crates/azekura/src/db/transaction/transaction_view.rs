//! The state that a transaction reads: a snapshot, and above it the writes of the transaction.

use std::ops::Bound;
use std::sync::Arc;

use crate::base::key_range::{KeyBoundary, KeyRange};
use crate::base::merge_operator::MergeOperator;
use crate::base::shared_bytes::SharedBytes;
use crate::base::version_edit::PartitionId;
use crate::base::{EntryRef, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{BlobResolver, EngineView, KeyBounds, ReadMoment};
use crate::iter::InternalIter;
use crate::iter::merge::MergingIter;
use crate::iter::range_filter::{RangeTombstoneReader, SkippingIter, hide_covered, seek_before, seek_behind};
use crate::iter::range_tombstones::RangeTombstones;
use crate::lsm::merged_values::MergedValuesIter;
use crate::memtable::Memtable;
use crate::wal::format::WalRecordIter;

/// The last write of `key` to `partition` in `payload`, found by reading all of it.
pub(crate) fn find_last_write<'a>(
    payload: &'a [u8],
    partition: PartitionId,
    order: &KeyOrder,
    key: &[u8],
) -> Result<Option<(RecordKind, &'a [u8])>> {
    let mut last = None;
    for record in WalRecordIter::new(payload) {
        let record = record?;
        if record.partition != partition {
            continue;
        }
        if record.kind == RecordKind::RangeDelete {
            if KeyRange::decode(record.key, record.value)?.contains(key, order) {
                last = Some((RecordKind::Delete, &[][..]));
            }
        } else if order.keys_equal(record.key, key) {
            last = Some((record.kind, record.value));
        }
    }
    Ok(last)
}

/// A view of a tree at a snapshot, under the writes of a transaction.
pub(crate) struct TransactionView {
    pub(crate) tree: Box<dyn EngineView>,
    pub(crate) order: KeyOrder,
    pub(crate) snapshot: ReadMoment,
    pub(crate) writes: Arc<Memtable>,
    pub(crate) range_deletes: Arc<RangeTombstones>,
    pub(crate) merge_operator: Option<Arc<dyn MergeOperator>>,
}

impl EngineView for TransactionView {
    fn iter(&self, at: ReadMoment, bounds: KeyBounds<'_>) -> Result<Box<dyn InternalIter>> {
        debug_assert!(at.seqno >= self.snapshot.seqno, "the writes of the transaction are newer than its snapshot");
        let tree = SnapshotIter {
            inner: self.tree.iter(self.snapshot, bounds)?,
            order: self.order.clone(),
            read_seqno: self.snapshot.seqno,
            bounds: (bounds.0.cloned(), bounds.1.cloned()),
        };
        let range_deletes =
            RangeTombstoneReader::new(vec![Arc::clone(&self.range_deletes)], at.seqno, self.order.clone());
        let mut children = vec![hide_covered(tree, range_deletes.clone(), bounds)];
        if self.writes.has_records() {
            children.push(hide_covered(self.writes.iter(), range_deletes, bounds));
        }
        let merged = Box::new(MergingIter::new(self.order.clone(), children));
        let Some(operator) = &self.merge_operator else { return Ok(merged) };
        let (order, blobs) = (self.order.clone(), self.blob_resolver());
        Ok(Box::new(MergedValuesIter::new(merged, order, Arc::clone(operator), blobs, at, bounds)))
    }

    fn blob_resolver(&self) -> Box<dyn BlobResolver> {
        self.tree.blob_resolver()
    }
}

/// Skips the entries of a tree that are newer than the snapshot, because the writes of the transaction take their
/// sequence numbers. Skips within the bounds only.
struct SnapshotIter {
    inner: Box<dyn InternalIter>,
    order: KeyOrder,
    read_seqno: SeqNo,
    bounds: (Bound<Vec<u8>>, Bound<Vec<u8>>),
}

impl SnapshotIter {
    fn skip(&mut self, forward: bool) -> Result<()> {
        while let Some((key, _)) = self.inner.head().filter(|(key, _)| key.seqno > self.read_seqno) {
            let is_beyond = match (forward, &self.bounds) {
                (true, (_, Bound::Included(end))) => self.order.cmp(key.user_key, end).is_gt(),
                (true, (_, Bound::Excluded(end))) => self.order.cmp(key.user_key, end).is_ge(),
                (false, (Bound::Included(start) | Bound::Excluded(start), _)) => {
                    self.order.cmp(key.user_key, start).is_lt()
                }
                _ => false,
            };
            if is_beyond {
                return Ok(());
            }
            if forward { self.inner.next()? } else { self.inner.prev()? }
        }
        Ok(())
    }
}

/// All entries are older than the range deletes of the transaction.
impl SkippingIter for SnapshotIter {
    fn skip_forward(&mut self, boundary: &KeyBoundary, seqno: SeqNo, order: &KeyOrder) -> Result<bool> {
        let is_older = self.read_seqno < seqno;
        if is_older {
            seek_behind(self, boundary, order)?;
        }
        Ok(is_older)
    }

    fn skip_backward(&mut self, boundary: &KeyBoundary, seqno: SeqNo, order: &KeyOrder) -> Result<bool> {
        let is_older = self.read_seqno < seqno;
        if is_older {
            seek_before(self, boundary, order)?;
        }
        Ok(is_older)
    }
}

impl InternalIter for SnapshotIter {
    fn seek_to_first(&mut self) -> Result<()> {
        self.inner.seek_to_first()?;
        self.skip(true)
    }

    fn seek_to_last(&mut self) -> Result<()> {
        self.inner.seek_to_last()?;
        self.skip(false)
    }

    fn seek(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.inner.seek(target)?;
        self.skip(true)
    }

    fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.inner.seek_before(target)?;
        self.skip(false)
    }

    fn next(&mut self) -> Result<()> {
        self.inner.next()?;
        self.skip(true)
    }

    fn prev(&mut self) -> Result<()> {
        self.inner.prev()?;
        self.skip(false)
    }

    fn valid(&self) -> bool {
        self.inner.valid()
    }

    fn entry(&self) -> EntryRef<'_> {
        self.inner.entry()
    }

    fn current(&self) -> Option<EntryRef<'_>> {
        self.inner.current()
    }

    fn head(&self) -> Option<(InternalKey<'_>, RecordKind)> {
        self.inner.head()
    }

    fn shared_value(&self) -> Option<SharedBytes> {
        self.inner.shared_value()
    }
}

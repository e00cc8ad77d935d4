//! The state that a transaction reads: a snapshot, and above it the writes of the transaction.

use std::ops::Bound;
use std::sync::Arc;

use crate::base::key_range::{KeyBoundary, KeyRange};
use crate::base::merge_operator::MergeOperator;
use crate::base::shared_bytes::SharedBytes;
use crate::base::version_edit::PartitionId;
use crate::base::{EntryRef, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::db::iter::db_iter::{EndIter, IterSource};
use crate::engine::{BlobResolver, EngineView, KeyBounds, ReadMoment};
use crate::iter::InternalIter;
use crate::iter::merge::MergingIter;
use crate::iter::range_filter::{RangeTombstoneReader, SkippingIter, hide_covered, seek_before, seek_behind};
use crate::iter::range_tombstones::RangeTombstones;
use crate::iter::visible::{Backward, Direction, Forward};
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
    /// With operands that are not merged, because a value that the transaction has written may replace them.
    pub(crate) tree: Arc<dyn EngineView>,
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
            source: IterSource {
                view: Arc::clone(&self.tree),
                order: self.order.clone(),
                bounds: (bounds.0.cloned(), bounds.1.cloned()),
                read_at: self.snapshot,
            },
            tombstones: 0,
            last_tombstone: Vec::new(),
            forward: None,
            backward: None,
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

/// After this many tombstones, an iterator looks for the next visible key of the tree and seeks to it.
const TOMBSTONES_MAX: u32 = if cfg!(test) { 3 } else { 64 };

/// Skips the entries of a tree that are newer than the snapshot, because the writes of the transaction take their
/// sequence numbers. Skips within the bounds only.
///
/// A merged iterator of a transaction cannot seek past the dead ranges of the tree, because the transaction may have
/// written keys in them. This iterator can, because it has the entries of the tree only: it leaves out the entries of
/// keys that are deleted at the snapshot, which makes no difference to a reader.
struct SnapshotIter {
    inner: Box<dyn InternalIter>,
    /// The tree at the snapshot.
    source: IterSource,
    /// Number of tombstones that steps have passed since the last seek, or search for a visible key.
    tombstones: u32,
    /// The key of the last of them, once there are [`TOMBSTONES_MAX`].
    last_tombstone: Vec<u8>,
    /// Find visible keys of the tree. Created when they are first needed.
    forward: Option<EndIter<Forward>>,
    backward: Option<EndIter<Backward>>,
}

/// The visible key of the tree nearest to `key` in this direction, which may be `key`.
fn nearest_visible<'a, D: Direction>(
    iter: &'a mut Option<EndIter<D>>,
    source: &IterSource,
    key: &[u8],
) -> Result<Option<&'a [u8]>> {
    let iter = match iter {
        Some(iter) => iter,
        None => iter.insert(source.iter()?),
    };
    D::seek(iter, Bound::Included(key))?;
    Ok(iter.valid().then(|| iter.key()))
}

impl SnapshotIter {
    /// Skips newer entries, and rows of deleted keys, after a step.
    fn skip(&mut self, forward: bool) -> Result<()> {
        loop {
            self.skip_newer(forward)?;
            if !(if forward { self.skip_deleted_forward()? } else { self.skip_deleted_backward()? }) {
                return Ok(());
            }
        }
    }

    /// If enough tombstones were passed: moves to the next visible key of the tree, or behind the bound. Returns
    /// whether it has moved.
    fn skip_deleted_forward(&mut self) -> Result<bool> {
        let SnapshotIter { inner, source, tombstones, forward, .. } = self;
        let IterSource { order, bounds, .. } = &*source;
        let Some((key, kind)) = inner.head() else { return Ok(false) };
        *tombstones += u32::from(kind.is_tombstone());
        if *tombstones < TOMBSTONES_MAX || !Forward::is_within(order, &bounds.1, key.user_key) {
            return Ok(false);
        }
        *tombstones = 0;
        match nearest_visible(forward, source, key.user_key)? {
            // Its newest entry may be passed already.
            Some(next) if order.keys_equal(next, key.user_key) => Ok(false),
            Some(next) => inner.seek(InternalKey::before_versions_of(next)).map(|()| true),
            None => {
                let end = KeyRange::between(Bound::Unbounded, bounds.1.as_ref().map(Vec::as_slice)).end.to_owned();
                seek_behind(inner, &end, order).map(|()| false)
            }
        }
    }

    /// The same backward. It moves only when it reaches another key, because entries of the last one may be in use:
    /// they come oldest first.
    fn skip_deleted_backward(&mut self) -> Result<bool> {
        let SnapshotIter { inner, source, tombstones, last_tombstone, backward, .. } = self;
        let IterSource { order, bounds, .. } = &*source;
        let Some((key, kind)) = inner.head() else { return Ok(false) };
        if *tombstones >= TOMBSTONES_MAX && !order.keys_equal(last_tombstone, key.user_key) {
            if !Backward::is_within(order, &bounds.0, key.user_key) {
                return Ok(false);
            }
            *tombstones = 0;
            match nearest_visible(backward, source, key.user_key)? {
                Some(next) if order.keys_equal(next, key.user_key) => {}
                Some(next) => return seek_before(inner, &KeyBoundary::After(next.into()), order).map(|()| true),
                None => {
                    let start = KeyRange::between(bounds.0.as_ref().map(Vec::as_slice), Bound::Unbounded).start;
                    return seek_before(inner, &start.to_owned(), order).map(|()| false);
                }
            }
        }
        if kind.is_tombstone() {
            *tombstones += 1;
            if *tombstones >= TOMBSTONES_MAX {
                key.user_key.clone_into(last_tombstone);
            }
        }
        Ok(false)
    }

    /// Skips newer entries. After a seek nothing else is skipped, because the caller may step in the other direction.
    fn skip_newer(&mut self, forward: bool) -> Result<()> {
        let IterSource { order, bounds, read_at, .. } = &self.source;
        while let Some((key, _)) = self.inner.head().filter(|(key, _)| key.seqno > read_at.seqno) {
            let is_beyond = match (forward, bounds) {
                (true, (_, Bound::Included(end))) => order.cmp(key.user_key, end).is_gt(),
                (true, (_, Bound::Excluded(end))) => order.cmp(key.user_key, end).is_ge(),
                (false, (Bound::Included(start) | Bound::Excluded(start), _)) => order.cmp(key.user_key, start).is_lt(),
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
        let is_older = self.source.read_at.seqno < seqno;
        if is_older {
            self.tombstones = 0;
            seek_behind(&mut self.inner, boundary, order)?;
            self.skip_newer(true)?;
        }
        Ok(is_older)
    }

    fn skip_backward(&mut self, boundary: &KeyBoundary, seqno: SeqNo, order: &KeyOrder) -> Result<bool> {
        let is_older = self.source.read_at.seqno < seqno;
        if is_older {
            self.tombstones = 0;
            seek_before(&mut self.inner, boundary, order)?;
            self.skip_newer(false)?;
        }
        Ok(is_older)
    }
}

impl InternalIter for SnapshotIter {
    fn seek_to_first(&mut self) -> Result<()> {
        self.tombstones = 0;
        self.inner.seek_to_first()?;
        self.skip_newer(true)
    }

    fn seek_to_last(&mut self) -> Result<()> {
        self.tombstones = 0;
        self.inner.seek_to_last()?;
        self.skip_newer(false)
    }

    fn seek(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.tombstones = 0;
        self.inner.seek(target)?;
        self.skip_newer(true)
    }

    fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.tombstones = 0;
        self.inner.seek_before(target)?;
        self.skip_newer(false)
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use crate::base::Result;
    use crate::db::config::Config;
    use crate::db::database::Database;
    use crate::db::partition::Partition;
    use crate::db::transaction::transaction::Transaction;
    use crate::mem::slice::Slice;
    use crate::testing::{MemFs, SeededRng};

    type Model = BTreeMap<u8, u64>;

    /// Removes and inserts rows of neighbouring keys.
    fn change(part: &Partition, model: &mut Model, rng: &mut SeededRng, round: u64) {
        let first = rng.below(60) as u8;
        match rng.below(12) {
            0..=5 => (first..first + rng.below(40) as u8).for_each(|key| {
                part.insert([key], [0]).unwrap(); // a deleted key has several versions
                part.remove([key]).unwrap();
                model.remove(&key);
            }),
            6..=8 => (first..first + 1 + rng.below(3) as u8).for_each(|key| {
                part.insert([key], round.to_be_bytes()).unwrap();
                model.insert(key, round);
            }),
            9 => {
                part.ingest([([first], round.to_be_bytes())]).unwrap();
                model.insert(first, round);
            }
            10 => {
                part.remove_range([first]..[first + 9]).unwrap();
                (first..first + 9).for_each(|key| _ = model.remove(&key));
            }
            _ if rng.below(3) == 0 => part.major_compact().unwrap(),
            _ => part.flush().unwrap(),
        }
    }

    fn write(tx: &mut Transaction, part: &Partition, model: &mut Model, rng: &mut SeededRng) {
        let key = rng.below(100) as u8;
        match rng.below(6) {
            0..=2 => {
                tx.insert(part, [key], 7u64.to_be_bytes()).unwrap();
                model.insert(key, 7);
            }
            3 | 4 => {
                tx.remove(part, [key]).unwrap();
                model.remove(&key);
            }
            _ => {
                tx.remove_range(part, [key]..[key + 5]).unwrap();
                (key..key + 5).for_each(|key| _ = model.remove(&key));
            }
        }
    }

    fn check(tx: &Transaction, part: &Partition, model: &Model, rng: &mut SeededRng) {
        let (low, high) = (rng.below(60) as u8, 30 + rng.below(80) as u8);
        let bounds = [low]..[high.max(low)];
        let mut wanted: Vec<(u8, u64)> = model.range(low..high.max(low)).map(|(key, value)| (*key, *value)).collect();
        let pair = |pair: Result<(Slice, Slice)>| {
            let (key, value) = pair.unwrap();
            (key[0], u64::from_be_bytes((*value).try_into().unwrap()))
        };
        let iter = || tx.range(part, bounds.clone());
        assert_eq!(iter().map(pair).collect::<Vec<_>>(), wanted);
        let all: Vec<_> = tx.iter(part).map(pair).collect();
        assert!(all.into_iter().eq(model.iter().map(|(key, value)| (*key, *value))));
        // From both ends, and with a seek.
        let (mut ends, mut front, mut back) = (iter(), Vec::new(), Vec::new());
        loop {
            let (next, out) = match rng.below(2) {
                0 => (ends.next(), &mut front),
                _ => (ends.next_back(), &mut back),
            };
            let Some(next) = next else { break };
            out.push(pair(next));
        }
        front.extend(back.into_iter().rev());
        assert_eq!(front, wanted);
        let from = low + rng.below(30) as u8;
        let mut sought = iter();
        sought.next();
        sought.seek([from]);
        assert_eq!(sought.map(pair).collect::<Vec<_>>(), wanted[wanted.partition_point(|(key, _)| *key < from)..]);
        let mut sought = iter();
        for _ in 0..rng.below(4) {
            sought.next_back();
        }
        sought.seek_back([from]);
        let before = &wanted[..wanted.partition_point(|(key, _)| *key <= from)];
        assert_eq!(sought.rev().map(pair).collect::<Vec<_>>(), before.iter().rev().copied().collect::<Vec<_>>());
        wanted.reverse();
        assert_eq!(iter().rev().map(pair).collect::<Vec<_>>(), wanted);
    }

    fn open() -> (Database, Partition) {
        let db = Config::new(Path::new("/db")).fs(std::sync::Arc::new(MemFs::new())).workers(0).open().unwrap();
        let part = db.open_partition("p", Default::default()).unwrap();
        (db, part)
    }

    /// Regression: the tombstones that were passed before a seek counted after it. The first tombstone after the seek
    /// was then taken for the oldest entry of its key, and the value behind it for a live one.
    #[test]
    fn tombstones_before_a_seek_do_not_count() {
        let (db, part) = open();
        part.insert([9], [9]).unwrap();
        for n in 1..=super::TOMBSTONES_MAX as u8 {
            part.insert([n], [n]).unwrap();
            part.remove([n]).unwrap();
        }
        let mut tx = db.transaction();
        tx.insert(&part, [8], [8]).unwrap();
        let mut iter = tx.iter(&part);
        let keys: Vec<u8> = std::iter::from_fn(|| iter.next_back()).map(|pair| pair.unwrap().0[0]).collect();
        assert_eq!(keys, [9, 8]);
        for n in 1..=super::TOMBSTONES_MAX as u8 {
            iter.seek_back([n]);
            assert!(iter.next_back().is_none(), "key {n}");
        }
    }

    /// Iterators of a transaction skip rows of keys that are deleted at its snapshot. The limits are small in unit
    /// tests.
    #[test]
    fn deleted_rows_under_own_writes_are_skipped() {
        for seed in 1..=8u64 {
            let (db, part) = open();
            let (mut rng, mut model) = (SeededRng::new(seed), Model::new());
            for round in 0..120u64 {
                change(&part, &mut model, &mut rng, round);
                let (mut tx, mut own) = (db.transaction(), model.clone());
                for _ in 0..3 {
                    write(&mut tx, &part, &mut own, &mut rng);
                    check(&tx, &part, &own, &mut rng);
                    change(&part, &mut model, &mut rng, round); // not visible to the transaction
                    check(&tx, &part, &own, &mut rng);
                }
            }
        }
    }
}

//! The internal iterator over a partition, usable from both ends.

use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::key::{NEVER_MS, split_expiry};
use crate::base::shared_bytes::{SHARED_LEN_MIN, SharedBytes};
use crate::base::{KeyOrder, RecordKind, Result};
use crate::db::handle::DbHandle;
use crate::db::inner::closed_error;
use crate::db::iter::entry::{Entry, EntryValue, UnreadBlob};
use crate::db::state::scanned_range::OwnedRange;
use crate::engine::{self, EngineView, ReadMoment, SnapshotGuard};
use crate::iter::InternalIter;
use crate::iter::visible::{BackwardVisibleIter, ForwardVisibleIter, is_after_start, is_before_end};
use crate::mem::slice::Slice;
use crate::tree::partition_tree::PartitionTree;

/// Owned bounds of an iterator.
pub(crate) type OwnedBounds = OwnedRange;

/// Copies the bounds of a key range.
pub(crate) fn own_bounds<K: AsRef<[u8]>, R: RangeBounds<K>>(range: &R) -> OwnedBounds {
    let own = |bound: Bound<&K>| bound.map(|key| key.as_ref().to_vec());
    (own(range.start_bound()), own(range.end_bound()))
}

/// Returns the bounds from `prefix` to the next byte string that does not begin with it.
pub(crate) fn prefix_bounds(prefix: &[u8]) -> OwnedBounds {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return (Bound::Included(prefix.to_vec()), Bound::Excluded(end));
        }
    }
    (Bound::Included(prefix.to_vec()), Bound::Unbounded)
}

/// Panic message of a read at an end that has no current entry.
const STEPPED: &str = "the last step of this end returned true";

/// One of the two ends of an iterator.
#[derive(Clone, Copy, Debug)]
pub(crate) enum IterEnd {
    Front,
    Back,
}

/// Whether an iterator returns more entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IterPhase {
    Running,
    /// The ends have met: the iterator returns nothing more until it seeks.
    Ended,
    /// An error has ended the iteration. A seek starts it again, with both ends at the bounds. Each call sets this
    /// phase before it moves an end, because a comparator that panics leaves the internal iterator between two entries.
    Failed,
}

type FrontIter = Option<ForwardVisibleIter<Box<dyn InternalIter>>>;
type BackIter = Option<BackwardVisibleIter<Box<dyn InternalIter>>>;

/// A double-ended iterator: a forward and a backward internal iterator over one tree view, each created at its first
/// step. Blob values are read on request.
pub(crate) struct DbIter {
    view: Arc<dyn EngineView>,
    /// Created when the first blob value is read.
    blob_resolver: Option<Box<dyn engine::BlobResolver>>,
    /// The blob value that was returned by reference last.
    last_blob_value: Slice,
    order: KeyOrder,
    bounds: OwnedBounds,
    /// Keeps the versions that the iterator reads.
    _snapshot: SnapshotGuard,
    /// Entries with higher sequence numbers are not visible.
    read_at: ReadMoment,
    pub(super) front: FrontIter,
    pub(super) back: BackIter,
    /// The last key returned by each end; set once both ends are in use.
    front_key: Option<Vec<u8>>,
    back_key: Option<Vec<u8>>,
    /// Where the next step of each end seeks to, instead of moving on from the current entry.
    front_target: Option<Bound<Vec<u8>>>,
    back_target: Option<Bound<Vec<u8>>>,
    /// Whether an end was ever sought.
    has_sought: bool,
    phase: IterPhase,
    /// Keeps the database open, so that its files remain. Must be the last field, because closing removes the
    /// obsolete tables that only this iterator held.
    handle: Arc<DbHandle>,
}

impl Drop for DbIter {
    /// In a forked child, keeps what would take locks when it is dropped, because the child may wait forever for them.
    fn drop(&mut self) {
        if self.handle.inner.is_forked() {
            std::mem::forget((self.front.take(), self.back.take(), self.blob_resolver.take()));
            std::mem::forget((Arc::clone(&self.view), std::mem::take(&mut self.last_blob_value)));
        }
    }
}

impl DbIter {
    pub(crate) fn new(
        handle: Arc<DbHandle>,
        tree: &PartitionTree,
        bounds: OwnedBounds,
        snapshot: SnapshotGuard,
    ) -> DbIter {
        let (order, read_at) = (tree.key_order().clone(), snapshot.moment());
        DbIter::with_view(handle, Arc::from(tree.view()), order, bounds, snapshot, read_at)
    }

    /// An iterator at `read_at` over a view that contains the state at `snapshot`.
    pub(crate) fn with_view(
        handle: Arc<DbHandle>,
        view: Arc<dyn EngineView>,
        order: KeyOrder,
        bounds: OwnedBounds,
        snapshot: SnapshotGuard,
        read_at: ReadMoment,
    ) -> DbIter {
        debug_assert!(read_at.seqno >= snapshot.seqno(), "the iterator sees everything that its snapshot sees");
        // An empty or reversed range has no entries; it is not an error.
        let is_empty = DbIter::is_range_empty(&order, &bounds);
        DbIter {
            view,
            blob_resolver: None,
            last_blob_value: Slice::new(),
            order,
            bounds,
            _snapshot: snapshot,
            read_at,
            front: None,
            back: None,
            front_key: None,
            back_key: None,
            front_target: None,
            back_target: None,
            has_sought: false,
            phase: if is_empty { IterPhase::Ended } else { IterPhase::Running },
            handle,
        }
    }

    /// Whether no key is within the bounds.
    fn is_range_empty(order: &KeyOrder, bounds: &OwnedBounds) -> bool {
        match (&bounds.0, &bounds.1) {
            (Bound::Included(low), Bound::Included(high)) => order.cmp(low, high).is_gt(),
            (Bound::Included(low) | Bound::Excluded(low), Bound::Included(high) | Bound::Excluded(high)) => {
                order.cmp(low, high).is_ge()
            }
            _ => false,
        }
    }

    /// Whether the last step failed, so that a seek restarts both ends.
    pub(crate) fn has_failed(&self) -> bool {
        self.phase == IterPhase::Failed
    }

    /// Sets the position of an end. The next step of that end returns the first entry at or after `key`, or for the
    /// back the last one at or before it.
    pub(crate) fn seek(&mut self, end: IterEnd, key: &[u8]) {
        if DbIter::is_range_empty(&self.order, &self.bounds) {
            return;
        }
        if std::mem::replace(&mut self.phase, IterPhase::Failed) == IterPhase::Failed {
            (self.front, self.front_key, self.front_target) = (None, None, None);
            (self.back, self.back_key, self.back_target) = (None, None, None);
        }
        let (start, stop) = &self.bounds;
        self.has_sought = true;
        match end {
            IterEnd::Front => {
                if let Some(back) = self.back.as_ref().filter(|back| back.valid() && self.back_target.is_none()) {
                    copy_key_to(&mut self.back_key, back.key());
                }
                let inside = is_after_start(&self.order, start, key);
                self.front_target = Some(if inside { Bound::Included(key.to_vec()) } else { start.clone() });
                self.front_key = None;
            }
            IterEnd::Back => {
                if let Some(front) = self.front.as_ref().filter(|front| front.valid() && self.front_target.is_none()) {
                    copy_key_to(&mut self.front_key, front.key());
                }
                let inside = is_before_end(&self.order, stop, key);
                self.back_target = Some(if inside { Bound::Included(key.to_vec()) } else { stop.clone() });
                self.back_key = None;
            }
        }
        self.phase = IterPhase::Running;
    }

    /// Moves an end to its next entry; returns false if there is none.
    pub(crate) fn step(&mut self, end: IterEnd) -> Result<bool> {
        if self.phase != IterPhase::Running {
            return Ok(false);
        }
        self.phase = IterPhase::Failed;
        let stepped = self.handle.inner.check_open().and_then(|()| match end {
            IterEnd::Front => self.step_front(),
            IterEnd::Back => self.step_back(),
        });
        // Without `check_read`, because a result that is borrowed is stored and loaded again.
        match stepped {
            Ok(true) if self.handle.inner.is_open_after_read() => {
                self.phase = IterPhase::Running;
                Ok(true)
            }
            stepped => self.end(stepped),
        }
    }

    /// Ends the iteration with the result of the last step.
    #[cold]
    fn end(&mut self, mut stepped: Result<bool>) -> Result<bool> {
        self.handle.inner.check_read(&mut stepped);
        self.phase = if stepped.is_err() { IterPhase::Failed } else { IterPhase::Ended };
        stepped
    }

    #[inline]
    fn step_front(&mut self) -> Result<bool> {
        match &mut self.front {
            Some(front) if self.back.is_none() && !self.has_sought => {
                front.next()?;
                Ok(front.valid())
            }
            _ => self.step_front_to_back(),
        }
    }

    /// Moves the front to its first entry, to its target, or to its next entry if that is before the back.
    fn step_front_to_back(&mut self) -> Result<bool> {
        if self.back_target.is_none() && self.back.as_ref().is_some_and(|back| !back.valid()) {
            return Ok(false); // the back has passed every key
        }
        if self.front.is_none() {
            // The back has recorded no key while it was the only end in use.
            if let Some(back) = self.back.as_ref().filter(|back| back.valid() && self.back_target.is_none()) {
                copy_key_to(&mut self.back_key, back.key());
            }
        }
        let front = match (&mut self.front, &self.front_target) {
            (Some(front), None) => {
                if !front.valid() {
                    return Ok(false);
                }
                front.next()?;
                front
            }
            (front, target) => {
                let (at, (start, end)) = (self.read_at, &self.bounds);
                let target = target.as_ref().unwrap_or(start);
                if let Bound::Included(key) | Bound::Excluded(key) = target
                    && !is_before_end(&self.order, end, key)
                {
                    return Ok(false); // the target remains
                }
                let front = match front {
                    Some(front) => front,
                    None => {
                        let inner = self.view.iter(at, (start.as_ref(), end.as_ref()))?;
                        let iter = ForwardVisibleIter::new(inner, self.order.clone(), at.seqno, end.clone());
                        front.insert(iter.with_time(at.now_ms).with_dead_ranges(self.view.dead_ranges()))
                    }
                };
                front.seek(target.as_ref().map(Vec::as_slice))?;
                if front.valid() {
                    self.front_target = None;
                }
                front
            }
        };
        if !front.valid() {
            return Ok(false);
        }
        if self.back.is_none() && self.back_target.is_none() {
            return Ok(true);
        }
        let key = front.key();
        let is_behind_back = self.back_target.as_ref().is_some_and(|back| !is_before_end(&self.order, back, key))
            || self.back_key.as_ref().is_some_and(|back| self.order.cmp(key, back).is_ge());
        if is_behind_back {
            self.front_target = Some(Bound::Included(key.to_vec()));
            return Ok(false);
        }
        copy_key_to(&mut self.front_key, key);
        Ok(true)
    }

    fn step_back(&mut self) -> Result<bool> {
        if self.front_target.is_none() && self.front.as_ref().is_some_and(|front| !front.valid()) {
            return Ok(false); // the front has passed every key
        }
        if self.back.is_none() {
            // The front has recorded no key while it was the only end in use.
            if let Some(front) = self.front.as_ref().filter(|front| front.valid() && self.front_target.is_none()) {
                copy_key_to(&mut self.front_key, front.key());
            }
        }
        let back = match (&mut self.back, &self.back_target) {
            (Some(back), None) => {
                if !back.valid() {
                    return Ok(false);
                }
                back.prev()?;
                back
            }
            (back, target) => {
                let (at, (start, end)) = (self.read_at, &self.bounds);
                let target = target.as_ref().unwrap_or(end);
                if let Bound::Included(key) | Bound::Excluded(key) = target
                    && !is_after_start(&self.order, start, key)
                {
                    return Ok(false); // the target remains
                }
                let back = match back {
                    Some(back) => back,
                    None => {
                        let inner = self.view.iter(at, (start.as_ref(), end.as_ref()))?;
                        let iter = BackwardVisibleIter::new(inner, self.order.clone(), at.seqno, start.clone());
                        back.insert(iter.with_time(at.now_ms).with_dead_ranges(self.view.dead_ranges()))
                    }
                };
                back.seek(target.as_ref().map(Vec::as_slice))?;
                if back.valid() {
                    self.back_target = None;
                }
                back
            }
        };
        if !back.valid() {
            return Ok(false);
        }
        if self.front.is_none() && self.front_target.is_none() {
            return Ok(true);
        }
        let key = back.key();
        let is_before_front = self.front_target.as_ref().is_some_and(|front| !is_after_start(&self.order, front, key))
            || self.front_key.as_ref().is_some_and(|front| self.order.cmp(key, front).is_le());
        if is_before_front {
            self.back_target = Some(Bound::Included(key.to_vec()));
            return Ok(false);
        }
        copy_key_to(&mut self.back_key, key);
        Ok(true)
    }

    /// Returns the key at an end by reference. This and the following methods require that the last
    /// [`step`](DbIter::step) of that end returned true.
    pub(super) fn key(&self, end: IterEnd) -> &[u8] {
        let key = match end {
            IterEnd::Front => self.front.as_ref().map(ForwardVisibleIter::key),
            IterEnd::Back => self.back.as_ref().map(BackwardVisibleIter::key),
        };
        key.expect(STEPPED)
    }

    /// Returns `own(key)` and the value at an end; reads a blob value. After an error the iterator has ended.
    #[inline]
    pub(super) fn pair<K>(&mut self, end: IterEnd, own: impl FnOnce(&[u8]) -> K) -> Result<(K, Slice)> {
        let (key, kind, bytes) = entry_at(&self.front, &self.back, end);
        if kind != RecordKind::BlobPointer {
            // Before the copy, because `bytes` are in memory of the iterator, and without `check_read`, as in `step`.
            if self.handle.inner.is_open_after_read() {
                return Ok((own(key), to_slice(&self.front, &self.back, end, bytes)));
            }
            self.phase = IterPhase::Failed;
            return Err(closed_error());
        }
        let mut value = read_blob(&mut self.blob_resolver, &self.view, bytes);
        self.handle.inner.check_read(&mut value);
        match value {
            Ok(value) => Ok((own(key), value)),
            Err(error) => {
                self.phase = IterPhase::Failed;
                Err(error)
            }
        }
    }

    /// Returns whether [`next_pair_ref`](DbIter::next_pair_ref) may be used: the back is unused, and the front
    /// resolves visibility without copying.
    #[inline]
    pub(super) fn is_forward_only(&self) -> bool {
        self.back.is_none() && !self.has_sought && self.front.as_ref().is_some_and(ForwardVisibleIter::has_next_ref)
    }

    /// Moves the front and returns its entry by reference. Requires [`is_forward_only`](DbIter::is_forward_only).
    pub(super) fn next_pair_ref(&mut self) -> Result<Option<(&[u8], &[u8])>> {
        debug_assert!(self.is_forward_only(), "the back is not in use");
        let DbIter { front: Some(front), phase, handle, .. } = self else { return Ok(None) };
        if *phase != IterPhase::Running {
            return Ok(None);
        }
        *phase = IterPhase::Failed;
        handle.inner.check_open()?;
        let mut entry = front.next_ref();
        handle.inner.check_read(&mut entry);
        let entry = entry?;
        *phase = if entry.is_some() { IterPhase::Running } else { IterPhase::Ended };
        Ok(entry.map(|entry| match entry.kind {
            RecordKind::Put => (entry.user_key, entry.value),
            kind => (entry.user_key, without_expiry(entry.user_key, kind, entry.value).2),
        }))
    }

    /// Returns key and value at an end by reference.
    pub(super) fn pair_ref(&mut self, end: IterEnd) -> Result<(&[u8], &[u8])> {
        let (key, kind, bytes) = entry_at(&self.front, &self.back, end);
        let mut blob_value = match kind {
            RecordKind::BlobPointer => read_blob(&mut self.blob_resolver, &self.view, bytes).map(Some),
            _ => Ok(None),
        };
        self.handle.inner.check_read(&mut blob_value);
        Ok(match blob_value.inspect_err(|_| self.phase = IterPhase::Failed)? {
            Some(value) => {
                self.last_blob_value = value;
                (key, &self.last_blob_value)
            }
            None => (key, bytes),
        })
    }

    /// Returns the entry at an end without reading a blob value. After an error the iterator has ended.
    pub(super) fn entry(&mut self, end: IterEnd) -> Result<Entry> {
        let mut entry = self.read_entry(end);
        self.handle.inner.check_read(&mut entry);
        entry.inspect_err(|_| self.phase = IterPhase::Failed)
    }

    fn read_entry(&self, end: IterEnd) -> Result<Entry> {
        let (key, kind, bytes) = entry_at(&self.front, &self.back, end);
        let value = match kind {
            RecordKind::BlobPointer => EntryValue::Blob(Arc::new(UnreadBlob {
                len: BlobPointer::decode(bytes)?.value_len,
                pointer: bytes.to_vec(),
                view: Arc::clone(&self.view),
                handle: Arc::clone(&self.handle),
            })),
            _ => EntryValue::Inline(to_slice(&self.front, &self.back, end, bytes)),
        };
        Ok(Entry { key: Slice::from(key), value, expiry_ms: expiry_at(&self.front, &self.back, end) })
    }
}

/// The expiry time of the entry at an end.
fn expiry_at(front: &FrontIter, back: &BackIter, end: IterEnd) -> Option<u64> {
    let (kind, value) = match end {
        IterEnd::Front => front.as_ref().map(|front| front.entry()).map(|entry| (entry.kind, entry.value)),
        IterEnd::Back => back.as_ref().map(BackwardVisibleIter::value),
    }
    .expect(STEPPED);
    // The iterator has checked the expiry time.
    split_expiry(kind, value).ok().map(|(expires_ms, ..)| expires_ms).filter(|&expires_ms| expires_ms < NEVER_MS)
}

/// Reads the blob value that `pointer` refers to.
fn read_blob(
    resolver: &mut Option<Box<dyn engine::BlobResolver>>,
    view: &Arc<dyn EngineView>,
    pointer: &[u8],
) -> Result<Slice> {
    resolver.get_or_insert_with(|| view.blob_resolver()).resolve(pointer)
}

/// Returns key, record kind, and value or blob pointer at an end, without an expiry time.
#[inline(always)]
pub(super) fn entry_at<'a>(front: &'a FrontIter, back: &'a BackIter, end: IterEnd) -> (&'a [u8], RecordKind, &'a [u8]) {
    let (key, (kind, value)) = match end {
        IterEnd::Front => {
            front.as_ref().map(|front| front.entry()).map(|entry| (entry.user_key, (entry.kind, entry.value)))
        }
        IterEnd::Back => back.as_ref().map(|back| (back.key(), back.value())),
    }
    .expect(STEPPED);
    match kind {
        RecordKind::Put => (key, kind, value),
        _ => without_expiry(key, kind, value),
    }
}

#[cold]
fn without_expiry<'a>(key: &'a [u8], kind: RecordKind, value: &'a [u8]) -> (&'a [u8], RecordKind, &'a [u8]) {
    // The iterator has checked the expiry time.
    split_expiry(kind, value).map_or((key, kind, value), |(_, kind, value)| (key, kind, value))
}

/// Returns an owned value: shares the bytes of the block if the value has at least [`SHARED_LEN_MIN`] bytes and the
/// iterator can share it, else copies it.
fn to_slice(front: &FrontIter, back: &BackIter, end: IterEnd, bytes: &[u8]) -> Slice {
    let shared = match end {
        _ if bytes.len() < SHARED_LEN_MIN => None,
        IterEnd::Front => front.as_ref().and_then(ForwardVisibleIter::shared_value),
        IterEnd::Back => back.as_ref().and_then(BackwardVisibleIter::shared_value),
    };
    // The shared bytes may begin with an expiry time.
    let value = |shared: SharedBytes| shared.subrange(shared.len() - bytes.len()..shared.len());
    shared.map_or_else(|| Slice::from(bytes), |shared| Slice::from(value(shared)))
}

fn copy_key_to(target: &mut Option<Vec<u8>>, key: &[u8]) {
    let buffer = target.get_or_insert_default();
    buffer.clear();
    buffer.extend_from_slice(key);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::config::Config;
    use crate::db::iter::iterators::{Iter, IterState};
    use crate::db::options::{EngineType, PartitionCreateOptions};
    use crate::pmem::options::PmemOptions;
    use crate::pmem::pool_iter::VALUES_READ;
    use crate::testing::MemFs;
    use crate::testing::seeded_rng::SeededRng;

    /// Regression: `keys()` of a pool read and copied each value above 1 KiB.
    #[test]
    fn keys_of_a_pool_read_no_values() {
        let fs = Arc::new(MemFs::new());
        let db = Config::new(std::path::Path::new("/db")).fs(fs).workers(0).open().unwrap();
        let options = PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default()));
        let part = db.open_partition("p", options).unwrap();
        (0..50u8).for_each(|n| part.insert([n], [n; 3000]).unwrap());
        let reads = |iter: &dyn Fn() -> usize, count: usize| {
            let before = VALUES_READ.get();
            assert_eq!(iter(), count);
            VALUES_READ.get() - before
        };
        assert_eq!(reads(&|| part.keys().count(), 50), 0);
        assert_eq!(reads(&|| part.keys().rev().count(), 50), 0);
        let both_ends = || {
            let mut keys = part.keys();
            std::iter::from_fn(|| Some((keys.next()?, keys.next_back()?))).count()
        };
        assert_eq!(reads(&both_ends, 25), 0);
        assert_eq!(reads(&|| part.len().unwrap() as usize, 50), 0);
        assert_eq!(reads(&|| part.iter().count(), 50), 50, "the counter does not count");
        assert_eq!(reads(&|| part.iter().rev().count(), 50), 50);
    }

    /// Regression: `prefix` and `range` read each value of a pool and each blob, although a caller used the keys only.
    /// Only unbounded iterators did not.
    #[test]
    fn bounded_keys_and_entries_read_no_values() {
        let fs = Arc::new(MemFs::new());
        let db = Config::new(std::path::Path::new("/db")).fs(fs).workers(0).open().unwrap();
        let separation = crate::lsm::options::KvSeparationOptions::default().separation_threshold(1_000);
        let separated = PartitionCreateOptions::default().with_kv_separation(separation);
        let pool = PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default()));
        for (name, options) in [("blobs", separated), ("pool", pool)] {
            let part = db.open_partition(name, options).unwrap();
            (0..50u8).for_each(|n| part.insert([n / 10, n], [n; 3000]).unwrap());
            part.flush().unwrap();
            let (snapshot, tx) = (db.snapshot(), db.transaction());
            let untracked = tx.untracked();
            let blob_reads = || {
                let blob = db.metrics().cache.blob;
                blob.hits + blob.misses
            };
            let prefixes: [&dyn Fn() -> Iter; 6] = [
                &|| part.prefix([2]),
                &|| part.range([2]..[3]),
                &|| snapshot.prefix(&part, [2]),
                &|| snapshot.range(&part, [2]..[3]),
                &|| tx.prefix(&part, [2]),
                &|| untracked.range(&part, [2]..[3]),
            ];
            for (at, iter) in prefixes.into_iter().enumerate() {
                let wanted: Vec<_> = (20..30u8).map(|n| Slice::from([2, n])).collect();
                let values: Vec<_> = iter().values().map(|value| value.unwrap()[0]).collect();
                assert_eq!(values, (20..30).collect::<Vec<u8>>());
                let before = (VALUES_READ.get(), blob_reads());
                assert_eq!(iter().keys().collect::<Result<Vec<_>>>().unwrap(), wanted);
                let mut descending = iter().keys().rev().collect::<Result<Vec<_>>>().unwrap();
                descending.reverse();
                assert_eq!(descending, wanted);
                let mut lent = (iter(), iter());
                for (front, back) in wanted.iter().zip(wanted.iter().rev()) {
                    assert_eq!(lent.0.next_key_ref().unwrap().unwrap(), &**front);
                    assert_eq!(lent.1.next_back_key_ref().unwrap().unwrap(), &**back);
                }
                assert!(lent.0.next_key_ref().is_none() && lent.1.next_back_key_ref().is_none());
                // An iterator of a transaction merges the values of a pool, which are in memory.
                assert!(at >= 4 || VALUES_READ.get() == before.0, "{name}");
                let sizes: Vec<_> = iter().entries().map(|entry| entry.unwrap().size()).collect();
                assert_eq!(sizes, [3000; 10]);
                assert_eq!(blob_reads(), before.1, "{name}");
                let mut mixed = iter(); // keeps its position
                assert_eq!(mixed.next_key_ref().unwrap().unwrap(), [2, 20]);
                assert_eq!(mixed.next_ref().unwrap().unwrap().0, [2, 21]);
                assert_eq!(mixed.next_back().unwrap().unwrap().0, [2, 29]);
                assert_eq!(mixed.keys().collect::<Result<Vec<_>>>().unwrap(), wanted[2..9]);
            }
        }
    }

    /// Regression: `entries()` continued after it had returned an error.
    #[test]
    fn entries_end_after_an_error_of_their_own() {
        let db = Config::new(std::path::Path::new("/db")).fs(Arc::new(MemFs::new())).workers(0).open().unwrap();
        let part = db.open_partition("p", PartitionCreateOptions::default()).unwrap();
        (0..3u8).for_each(|n| part.insert([n], [n]).unwrap());
        let mut entries = part.entries();
        let IterState::Active(iter) = &mut entries.0 else { panic!("it was created") };
        assert!(iter.step(IterEnd::Front).unwrap());
        db.close().unwrap(); // between the step and the check
        assert!(iter.entry(IterEnd::Front).is_err());
        assert!(!iter.step(IterEnd::Front).unwrap() && !iter.step(IterEnd::Back).unwrap());
        assert!(entries.next().is_none());
        entries.seek([1]);
        assert!(entries.next().unwrap().is_err() && entries.next().is_none());
    }

    fn open_lsm() -> (crate::db::database::Database, crate::db::partition::Partition) {
        let fs = Arc::new(MemFs::new());
        let db = Config::new(std::path::Path::new("/db")).fs(fs).workers(0).open().unwrap();
        let part = db.open_partition("p", PartitionCreateOptions::default()).unwrap();
        (db, part)
    }

    /// Removes and inserts rows of neighbouring keys, so that scans learn dead ranges, and compares scans in both
    /// directions at old and new snapshots with a model. The limits of dead ranges are small in unit tests.
    #[test]
    fn scans_over_dead_ranges_match_a_model() {
        for seed in 1..=6u64 {
            let (db, part) = open_lsm();
            let mut rng = SeededRng::new(seed);
            let mut random = |below| rng.below(below);
            let mut model = std::collections::BTreeMap::new();
            let mut snapshots = vec![(db.snapshot(), model.clone())];
            for round in 0..150u64 {
                let first = random(60) as u8;
                match random(12) {
                    0..=4 => (first..first + random(30) as u8).for_each(|key| {
                        part.remove([key]).unwrap();
                        model.remove(&key);
                    }),
                    5..=7 => (first..first + 1 + random(3) as u8).for_each(|key| {
                        part.insert([key], round.to_be_bytes()).unwrap();
                        model.insert(key, round);
                    }),
                    8 => {
                        let keys = first..first + 1 + random(2) as u8;
                        part.ingest(keys.clone().map(|key| ([key], round.to_be_bytes()))).unwrap();
                        keys.for_each(|key| _ = model.insert(key, round));
                    }
                    9 => {
                        part.remove_range([first]..[first + 9]).unwrap();
                        (first..first + 9).for_each(|key| _ = model.remove(&key));
                    }
                    10 if random(3) == 0 => part.major_compact().unwrap(),
                    10 => part.flush().unwrap(),
                    _ => {
                        snapshots.push((db.snapshot(), model.clone()));
                        if snapshots.len() > 3 {
                            snapshots.remove(random(3));
                        }
                    }
                }
                let latest = (db.snapshot(), model.clone());
                for (snapshot, model) in snapshots.iter().chain([&latest]) {
                    let (low, high) = (random(60) as u8, 30 + random(60) as u8);
                    let wanted: Vec<u8> = model.range(low..high.max(low)).map(|(key, _)| *key).collect();
                    let iter = || snapshot.range(&part, [low]..[high]).map(|pair| pair.unwrap().0[0]);
                    assert_eq!(iter().collect::<Vec<_>>(), wanted, "seed {seed}, round {round}");
                    let mut back: Vec<u8> = iter().rev().collect();
                    back.reverse();
                    assert_eq!(back, wanted, "backward, seed {seed}, round {round}");
                    let all = |pair: Result<(Slice, Slice)>| pair.map(|(key, value)| (key[0], value.to_vec())).unwrap();
                    let all: Vec<_> = snapshot.iter(&part).map(all).collect();
                    let wanted: Vec<_> =
                        model.iter().map(|(key, round)| (*key, round.to_be_bytes().to_vec())).collect();
                    assert_eq!(all, wanted, "seed {seed}, round {round}");
                }
            }
        }
    }

    /// The limits are small in unit tests. An ingest removes the dead ranges, so each scan passes all deleted keys.
    #[test]
    fn memtable_is_sealed_when_scans_pass_too_much() {
        let (_db, part) = open_lsm();
        for n in 0..200u8 {
            part.insert([n], [n]).unwrap();
            part.remove([n]).unwrap();
        }
        let scan = || {
            part.ingest([([255], [0])]).unwrap();
            assert!(part.iter().count() <= 2);
        };
        (0..10).for_each(|_| scan());
        (0..256u64).for_each(|_| part.insert([250], [0]).unwrap());
        assert_eq!(part.metrics().sealed_memtables, 0, "scans have passed too few keys");
        (0..60).for_each(|_| scan());
        (0..256u64).for_each(|_| part.insert([255], [0]).unwrap());
        assert_eq!(part.metrics().sealed_memtables, 1);
    }

    /// One key is visible at every time: a new one is inserted before the old one is removed. Scans that learn and use
    /// dead ranges meanwhile must find it.
    #[test]
    #[expect(clippy::disallowed_methods, reason = "threads of a test")]
    fn no_scan_skips_a_concurrent_insertion() {
        let (_db, part) = open_lsm();
        part.insert([0], [0]).unwrap();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            for backward in [false, true, false] {
                let (part, done) = (&part, &done);
                scope.spawn(move || {
                    while !done.load(std::sync::atomic::Ordering::Relaxed) {
                        let mut iter = part.iter();
                        let found = if backward { iter.next_back() } else { iter.next() };
                        if found.is_none() {
                            done.store(true, std::sync::atomic::Ordering::Relaxed);
                            panic!("a visible key was skipped");
                        }
                    }
                });
            }
            let (mut old, mut rng) = (0u8, SeededRng::new(7));
            for round in 0..20_000u64 {
                let key = match round % 200 {
                    0..100 => rng.below(256) as u8, // anywhere
                    _ => old.wrapping_add(1),       // a queue
                };
                if key != old {
                    part.insert([key], [0]).unwrap();
                    part.remove([old]).unwrap();
                    old = key;
                }
                if round % 2_000 == 1_999 {
                    part.flush().unwrap();
                }
                if done.load(std::sync::atomic::Ordering::Relaxed) {
                    break;
                }
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
    }

    #[test]
    fn prefix_bounds_end_before_next_prefix() {
        assert_eq!(prefix_bounds(b"ab"), (Bound::Included(b"ab".to_vec()), Bound::Excluded(b"ac".to_vec())));
        assert_eq!(prefix_bounds(b"a\xff"), (Bound::Included(b"a\xff".to_vec()), Bound::Excluded(b"b".to_vec())));
        assert_eq!(prefix_bounds(b"\xff\xff"), (Bound::Included(b"\xff\xff".to_vec()), Bound::Unbounded));
        assert_eq!(prefix_bounds(b""), (Bound::Included(vec![]), Bound::Unbounded));
    }
}

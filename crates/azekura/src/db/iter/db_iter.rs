//! The internal iterator over a partition, usable from both ends.

use std::collections::VecDeque;
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
use crate::iter::visible::{Backward, Direction, Forward, VisibleIter};
use crate::mem::slice::Slice;

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

/// What the ends of an iterator read.
pub(crate) struct IterSource {
    pub(crate) view: Arc<dyn EngineView>,
    pub(crate) order: KeyOrder,
    pub(crate) bounds: OwnedBounds,
    /// Entries with higher sequence numbers are not visible.
    pub(crate) read_at: ReadMoment,
}

impl IterSource {
    /// Returns an iterator within the bounds, which uses and learns the dead ranges of the tree.
    pub(crate) fn iter<D: Direction>(&self) -> Result<EndIter<D>> {
        let inner = self.view.iter(self.read_at, (self.bounds.0.as_ref(), self.bounds.1.as_ref()))?;
        let limit = D::end(&self.bounds).clone();
        let new = VisibleIter::new(inner, self.order.clone(), self.read_at.seqno, limit);
        Ok(new.with_time(self.read_at.now_ms).with_dead_ranges(self.view.dead_ranges()))
    }

    /// Whether no key is within the bounds.
    fn is_empty(&self) -> bool {
        match (&self.bounds.0, &self.bounds.1) {
            (Bound::Included(low), Bound::Included(high)) => self.order.cmp(low, high).is_gt(),
            (Bound::Included(low) | Bound::Excluded(low), Bound::Included(high) | Bound::Excluded(high)) => {
                self.order.cmp(low, high).is_ge()
            }
            _ => false,
        }
    }
}

pub(crate) type EndIter<D> = VisibleIter<Box<dyn InternalIter>, D>;

/// The state of an end that moves in the direction `D`.
struct EndState<D> {
    /// Created at the first step.
    iter: Option<EndIter<D>>,
    /// Excludes the last key that the end returned; set once both ends are in use.
    passed: Bound<Vec<u8>>,
    /// Where the next step seeks to, instead of moving on from the current entry.
    target: Option<Bound<Vec<u8>>>,
}

impl<D: Direction> EndState<D> {
    fn new() -> EndState<D> {
        EndState { iter: None, passed: Bound::Unbounded, target: None }
    }

    fn iter(&self) -> &EndIter<D> {
        self.iter.as_ref().expect("the last step of this end returned true")
    }

    /// Records the current key, because the other end is used next. An end that is the only one in use does not record
    /// its keys.
    fn record_key(&mut self) {
        if let Some(iter) = self.iter.as_ref().filter(|iter| iter.valid() && self.target.is_none()) {
            exclude(&mut self.passed, iter.key());
        }
    }

    /// Makes the next step seek to `key`, or to the bound if `key` is beyond it.
    fn seek<O: Direction>(&mut self, other: &mut EndState<O>, source: &IterSource, key: &[u8]) {
        other.record_key();
        let start = D::start(&source.bounds);
        let is_inside = O::is_within(&source.order, start, key);
        self.target = Some(if is_inside { Bound::Included(key.to_vec()) } else { start.clone() });
        self.passed = Bound::Unbounded;
    }

    /// Moves to the first entry, to the target, or to the next entry if that is before the other end.
    fn step<O: Direction>(&mut self, other: &mut EndState<O>, source: &IterSource) -> Result<bool> {
        if other.target.is_none() && other.iter.as_ref().is_some_and(|other| !other.valid()) {
            return Ok(false); // the other end has passed every key
        }
        if self.iter.is_none() {
            other.record_key();
        }
        let (iter, moved) = match (&mut self.iter, &self.target) {
            (Some(iter), None) => {
                if !iter.valid() {
                    return Ok(false);
                }
                let moved = D::step(iter);
                (iter, moved)
            }
            (iter, target) => {
                let IterSource { order, bounds, .. } = source;
                let (start, limit) = (D::start(bounds), O::start(bounds));
                let target = target.as_ref().unwrap_or(start);
                if let Bound::Included(key) | Bound::Excluded(key) = target
                    && !D::is_within(order, limit, key)
                {
                    return Ok(false); // the target remains
                }
                let iter = match iter {
                    Some(iter) => iter,
                    None => iter.insert(source.iter()?),
                };
                let moved = D::seek(iter, target.as_ref().map(Vec::as_slice));
                if iter.valid() {
                    self.target = None;
                }
                (iter, moved)
            }
        };
        let is_before = |key: &[u8]| {
            let is_within = |limit| D::is_within(&source.order, limit, key);
            other.target.as_ref().is_none_or(is_within) && is_within(&other.passed)
        };
        if let Err(error) = moved {
            // A key that is not before the other end is not read, so the merge operator may fail for it.
            let beyond = iter.key_of_failed_merge(&error).filter(|key| !is_before(key));
            self.target = Some(Bound::Included(beyond.ok_or(error)?.to_vec()));
            return Ok(false);
        }
        if !iter.valid() {
            return Ok(false);
        }
        if other.iter.is_none() && other.target.is_none() {
            return Ok(true);
        }
        if !is_before(iter.key()) {
            self.target = Some(Bound::Included(iter.key().to_vec()));
            return Ok(false);
        }
        exclude(&mut self.passed, iter.key());
        Ok(true)
    }
}

/// The ends of an iterator.
struct IterEnds {
    front: EndState<Forward>,
    back: EndState<Backward>,
    /// Whether an end was ever sought.
    has_sought: bool,
}

impl IterEnds {
    fn new() -> IterEnds {
        IterEnds { front: EndState::new(), back: EndState::new(), has_sought: false }
    }

    fn seek(&mut self, end: IterEnd, source: &IterSource, key: &[u8]) {
        self.has_sought = true;
        match end {
            IterEnd::Front => self.front.seek(&mut self.back, source, key),
            IterEnd::Back => self.back.seek(&mut self.front, source, key),
        }
    }

    #[inline]
    fn step(&mut self, end: IterEnd, source: &IterSource) -> Result<bool> {
        match (end, &mut self.front.iter, &mut self.back.iter) {
            (IterEnd::Front, Some(front), None) if !self.has_sought => {
                Forward::step(front)?;
                Ok(front.valid())
            }
            (IterEnd::Back, None, Some(back)) if !self.has_sought => {
                Backward::step(back)?;
                Ok(back.valid())
            }
            (IterEnd::Front, ..) => self.front.step(&mut self.back, source),
            (IterEnd::Back, ..) => self.back.step(&mut self.front, source),
        }
    }

    fn key(&self, end: IterEnd) -> &[u8] {
        match end {
            IterEnd::Front => self.front.iter().key(),
            IterEnd::Back => self.back.iter().key(),
        }
    }

    /// Key, record kind, and value or blob pointer at an end. The value may begin with an expiry time.
    #[inline(always)]
    fn encoded_entry(&self, end: IterEnd) -> (&[u8], RecordKind, &[u8]) {
        match end {
            IterEnd::Front => self.front.iter().entry(),
            IterEnd::Back => self.back.iter().entry(),
        }
    }

    /// Key, record kind, and value or blob pointer at an end, without an expiry time.
    #[inline(always)]
    fn entry(&self, end: IterEnd) -> (&[u8], RecordKind, &[u8]) {
        match self.encoded_entry(end) {
            entry @ (_, RecordKind::Put, _) => entry,
            (key, kind, value) => without_expiry(key, kind, value),
        }
    }

    /// The expiry time of the entry at an end.
    fn expiry(&self, end: IterEnd) -> Option<u64> {
        let (_, kind, value) = self.encoded_entry(end);
        // The iterator has checked the expiry time.
        split_expiry(kind, value).ok().map(|(expires_ms, ..)| expires_ms).filter(|&expires_ms| expires_ms < NEVER_MS)
    }

    /// Returns `bytes`, the value at an end: shares the bytes of the block if the value has at least
    /// [`SHARED_LEN_MIN`] bytes and the iterator can share it, else copies it.
    fn to_slice(&self, end: IterEnd, bytes: &[u8]) -> Slice {
        let shared = match end {
            _ if bytes.len() < SHARED_LEN_MIN => None,
            IterEnd::Front => self.front.iter().shared_value(),
            IterEnd::Back => self.back.iter().shared_value(),
        };
        // The shared bytes may begin with an expiry time.
        let value = |shared: SharedBytes| shared.subrange(shared.len() - bytes.len()..shared.len());
        shared.map_or_else(|| Slice::from(bytes), |shared| Slice::from(value(shared)))
    }
}

/// A double-ended iterator: a forward and a backward internal iterator over one tree view, each created at its first
/// step. Blob values are read on request.
pub(crate) struct DbIter {
    source: IterSource,
    blobs: BlobReader,
    /// The blob value that was returned by reference last.
    last_blob_value: Slice,
    /// Keeps the versions that the iterator reads.
    _snapshot: SnapshotGuard,
    ends: IterEnds,
    phase: IterPhase,
    /// Keeps the database open, so that its files remain. Must be the last field, because closing removes the
    /// obsolete tables that only this iterator held.
    handle: Arc<DbHandle>,
}

impl Drop for DbIter {
    /// In a forked child, keeps what would take locks when it is dropped, because the child may wait forever for them.
    fn drop(&mut self) {
        if self.handle.inner.is_forked() {
            std::mem::forget((std::mem::replace(&mut self.ends, IterEnds::new()), std::mem::take(&mut self.blobs)));
            std::mem::forget((Arc::clone(&self.source.view), std::mem::take(&mut self.last_blob_value)));
        }
    }
}

impl DbIter {
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
        let source = IterSource { view, order, bounds, read_at };
        // An empty or reversed range has no entries; it is not an error.
        let phase = if source.is_empty() { IterPhase::Ended } else { IterPhase::Running };
        DbIter {
            source,
            blobs: BlobReader::default(),
            last_blob_value: Slice::new(),
            _snapshot: snapshot,
            ends: IterEnds::new(),
            phase,
            handle,
        }
    }

    /// Whether the last step failed, so that a seek restarts both ends.
    pub(crate) fn has_failed(&self) -> bool {
        self.phase == IterPhase::Failed
    }

    /// Sets the position of an end. The next step of that end returns the first entry at or after `key`, or for the
    /// back the last one at or before it.
    pub(crate) fn seek(&mut self, end: IterEnd, key: &[u8]) {
        if self.source.is_empty() {
            return;
        }
        if std::mem::replace(&mut self.phase, IterPhase::Failed) == IterPhase::Failed {
            self.ends = IterEnds::new();
        }
        self.ends.seek(end, &self.source, key);
        self.blobs.forget_positions();
        self.phase = IterPhase::Running;
    }

    /// Moves an end to its next entry; returns false if there is none.
    pub(crate) fn step(&mut self, end: IterEnd) -> Result<bool> {
        if self.phase != IterPhase::Running {
            return Ok(false);
        }
        self.phase = IterPhase::Failed;
        let stepped = self.handle.inner.check_open().and_then(|()| self.ends.step(end, &self.source));
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

    /// Returns the key at an end by reference. This and the following methods require that the last
    /// [`step`](DbIter::step) of that end returned true.
    pub(super) fn key(&self, end: IterEnd) -> &[u8] {
        self.ends.key(end)
    }

    /// Returns `own(key)` and the value at an end; reads a blob value. After an error the iterator has ended.
    #[inline]
    pub(super) fn pair<K>(&mut self, end: IterEnd, own: impl FnOnce(&[u8]) -> K) -> Result<(K, Slice)> {
        let (key, kind, bytes) = self.ends.entry(end);
        if kind != RecordKind::BlobPointer {
            // Before the copy, because `bytes` are in memory of the iterator, and without `check_read`, as in `step`.
            if self.handle.inner.is_open_after_read() {
                return Ok((own(key), self.ends.to_slice(end, bytes)));
            }
            self.phase = IterPhase::Failed;
            return Err(closed_error());
        }
        let mut value = self.blobs.read(end, &self.source, key, bytes);
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
        let IterEnds { front, back, has_sought } = &self.ends;
        back.iter.is_none() && !has_sought && front.iter.as_ref().is_some_and(VisibleIter::has_next_ref)
    }

    /// Moves the front and returns its entry by reference. Requires [`is_forward_only`](DbIter::is_forward_only).
    pub(super) fn next_pair_ref(&mut self) -> Result<Option<(&[u8], &[u8])>> {
        debug_assert!(self.is_forward_only(), "the back is not in use");
        let DbIter { ends, phase, handle, .. } = self;
        let Some(front) = &mut ends.front.iter else { return Ok(None) };
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
        let (key, kind, bytes) = self.ends.entry(end);
        let mut blob_value = match kind {
            RecordKind::BlobPointer => self.blobs.read(end, &self.source, key, bytes).map(Some),
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
        let (key, kind, bytes) = self.ends.entry(end);
        let value = match kind {
            RecordKind::BlobPointer => EntryValue::Blob(Arc::new(UnreadBlob {
                len: BlobPointer::decode(bytes)?.value_len,
                pointer: bytes.to_vec(),
                view: Arc::clone(&self.source.view),
                handle: Arc::clone(&self.handle),
            })),
            _ => EntryValue::Inline(self.ends.to_slice(end, bytes)),
        };
        Ok(Entry { key: Slice::from(key), value, expiry_ms: self.ends.expiry(end) })
    }
}

/// Reads the blob values at the ends of an iterator.
#[derive(Default)]
struct BlobReader {
    /// Created when the first value is read.
    resolver: Option<Box<dyn engine::BlobResolver>>,
    front: Option<BlobLookahead<Forward>>,
    back: Option<BlobLookahead<Backward>>,
}

impl BlobReader {
    /// Reads the value that `pointer` refers to, at an end whose key is `key`.
    fn read(&mut self, end: IterEnd, source: &IterSource, key: &[u8], pointer: &[u8]) -> Result<Slice> {
        let resolver = self.resolver.get_or_insert_with(|| source.view.blob_resolver());
        if resolver.wants_announcements(pointer) {
            match end {
                IterEnd::Front => announce_next(&mut self.front, source, key, &mut **resolver),
                IterEnd::Back => announce_next(&mut self.back, source, key, &mut **resolver),
            }
        }
        resolver.resolve(pointer)
    }

    /// Called when an end seeks.
    fn forget_positions(&mut self) {
        (self.front, self.back) = (None, None);
    }
}

/// Announces values that an end will reach after `key`. The end reports an error when it reaches the entry that has
/// caused it.
#[cold]
fn announce_next<D: Direction>(
    lookahead: &mut Option<BlobLookahead<D>>,
    source: &IterSource,
    key: &[u8],
    resolver: &mut dyn engine::BlobResolver,
) {
    // Not put back after an error or a panic of a comparator, which leave the iterator between two entries.
    let taken = lookahead.take().map_or_else(|| BlobLookahead::after(source, key), Ok);
    *lookahead = taken.and_then(|mut taken| taken.advance(source, key, resolver).map(|()| taken)).ok();
}

/// Maximum number of announced values that an end has not reached.
const ANNOUNCED_MAX: usize = 32;
/// Maximum number of bytes of these values in their files, unless one value is larger.
const ANNOUNCED_BYTES_MAX: u64 = 2 << 20;
/// Maximum number of entries that a lookahead passes for one value of its end.
const LOOKAHEAD_STEPS_MAX: usize = 64;

/// Announces the blob values that an end reads next, so that the device reads several at the same time. The announced
/// values that the end has not reached are never more than those that it has read, so that a short iteration causes few
/// reads in vain.
struct BlobLookahead<D> {
    /// At the first entry that was not looked at.
    iter: EndIter<D>,
    /// Bytes of the values that were announced and not reached, and their sum.
    announced: VecDeque<u64>,
    announced_bytes: u64,
    /// How many values may be announced.
    announced_max: usize,
}

impl<D: Direction> BlobLookahead<D> {
    /// A lookahead of an end at `key`.
    fn after(source: &IterSource, key: &[u8]) -> Result<BlobLookahead<D>> {
        let mut iter = source.iter()?;
        D::seek(&mut iter, Bound::Excluded(key))?;
        Ok(BlobLookahead { iter, announced: VecDeque::new(), announced_bytes: 0, announced_max: 0 })
    }

    /// Announces more values. The end is at `key` and reads its value.
    fn advance(&mut self, source: &IterSource, key: &[u8], resolver: &mut dyn engine::BlobResolver) -> Result<()> {
        self.announced_max = (self.announced_max + 1).min(ANNOUNCED_MAX);
        self.announced_bytes -= self.announced.pop_front().unwrap_or(0);
        if self.iter.valid() && D::cmp(&source.order, self.iter.key(), key).is_le() {
            // The end has passed entries without reading their values.
            self.announced.clear();
            self.announced_bytes = 0;
            D::seek(&mut self.iter, Bound::Excluded(key))?;
        }
        for _ in 0..LOOKAHEAD_STEPS_MAX {
            let is_full = self.announced.len() >= self.announced_max || self.announced_bytes >= ANNOUNCED_BYTES_MAX;
            if is_full || !self.iter.valid() {
                break;
            }
            let (key, kind, value) = self.iter.entry();
            let (_, kind, pointer) = without_expiry(key, kind, value);
            if kind == RecordKind::BlobPointer {
                resolver.will_resolve(pointer);
                // The length is not checked yet.
                let bytes =
                    BlobPointer::decode(pointer).map_or(0, |pointer| pointer.frame_len.min(ANNOUNCED_BYTES_MAX));
                self.announced.push_back(bytes);
                self.announced_bytes += bytes;
            }
            D::step(&mut self.iter)?;
        }
        Ok(())
    }
}

#[cold]
fn without_expiry<'a>(key: &'a [u8], kind: RecordKind, value: &'a [u8]) -> (&'a [u8], RecordKind, &'a [u8]) {
    // The iterator has checked the expiry time.
    split_expiry(kind, value).map_or((key, kind, value), |(_, kind, value)| (key, kind, value))
}

fn exclude(target: &mut Bound<Vec<u8>>, key: &[u8]) {
    match target {
        Bound::Excluded(last) => key.clone_into(last),
        _ => *target = Bound::Excluded(key.to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blob::reader::VALUES_ANNOUNCED;
    use crate::db::config::Config;
    use crate::db::iter::iterators::{Iter, IterState};
    use crate::db::options::{EngineType, PartitionCreateOptions};
    use crate::pmem::options::PmemOptions;
    use crate::pmem::pool_iter::VALUES_READ;
    use crate::testing::seeded_rng::SeededRng;
    use crate::testing::{FaultFs, MemFs};
    use crate::vfs::Fs;

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

    /// Returns how many values `read` announces.
    fn announced(read: impl FnOnce()) -> usize {
        let before = VALUES_ANNOUNCED.get();
        read();
        VALUES_ANNOUNCED.get() - before
    }

    /// A partition with values of 5,000 bytes, which are in a blob file in the order of `keys`. The cache has no space.
    fn separated(
        fs: Arc<dyn Fs>,
        keys: impl Iterator<Item = u32>,
    ) -> (crate::db::database::Database, crate::db::partition::Partition) {
        let config = Config::new(std::path::Path::new("/db")).fs(fs).workers(0);
        let db = config.cache_size(0).open().unwrap();
        let separation = crate::lsm::options::KvSeparationOptions::default().separation_threshold(1_000);
        let options = PartitionCreateOptions::default().with_kv_separation(separation);
        let part = db.open_partition("p", options).unwrap();
        keys.for_each(|key| part.insert(key.to_be_bytes(), [key as u8; 5_000]).unwrap());
        (db, part)
    }

    #[test]
    fn scattered_values_of_a_scan_are_announced() {
        let (_db, part) = separated(Arc::new(FaultFs::new(Arc::new(MemFs::new()))), (0..200).map(|n| n * 77 % 200));
        for is_flushed in [false, true] {
            if is_flushed {
                part.flush().unwrap();
            }
            let check = |key: &[u8], value: &[u8]| assert_eq!((key[3], value.len()), (value[0], 5_000));
            let mut next = 0..200u8;
            let up = announced(|| {
                part.iter().map(|pair| pair.unwrap()).for_each(|(key, value)| {
                    check(&key, &value);
                    assert_eq!(key[3], next.next().unwrap());
                });
            });
            let mut iter = part.iter();
            let down = announced(|| {
                while let Some(pair) = iter.next_back_ref() {
                    let (key, value) = pair.unwrap();
                    check(key, value);
                }
            });
            assert!((190..200).contains(&up) && (190..200).contains(&down), "{up} {down}");
            // At most as many values in advance as were read before, and as the maximum.
            for (count, wanted) in [(4, 0), (10, 11), (30, 51), (100, 96 + ANNOUNCED_MAX - 1)] {
                let found = announced(|| assert_eq!(part.iter().take(count).filter(Result::is_ok).count(), count));
                assert_eq!(found, wanted, "{count}");
            }
            let bounded = announced(|| part.range(50u32.to_be_bytes()..60u32.to_be_bytes()).for_each(drop));
            assert!(bounded <= 6, "{bounded}, within the bounds only");
            // Values that are not read.
            assert_eq!(announced(|| part.entries().for_each(drop)), 0);
            let mut iter = part.iter();
            (0..60).for_each(|_| assert!(iter.next().unwrap().is_ok()));
            (0..100).for_each(|_| assert!(iter.next_key_ref().unwrap().is_ok()));
            let rest = announced(|| assert_eq!(iter.by_ref().count(), 40));
            assert!((30..=40).contains(&rest), "{rest}");
            iter.seek(20u32.to_be_bytes());
            let again = announced(|| (20..30u8).for_each(|n| assert_eq!(iter.next().unwrap().unwrap().0[3], n)));
            assert!((5..=20).contains(&again), "{again}");
        }
    }

    #[test]
    fn adjacent_values_are_not_announced() {
        let (_db, part) = separated(Arc::new(FaultFs::new(Arc::new(MemFs::new()))), 0..200);
        assert_eq!(announced(|| assert_eq!(part.iter().filter(Result::is_ok).count(), 200)), 0);
    }

    /// The files of `MemFs` need no device, those of `FaultFs` may need one.
    #[test]
    fn values_in_memory_are_not_announced() {
        let (_db, part) = separated(Arc::new(MemFs::new()), (0..200).map(|n| n * 77 % 200));
        assert_eq!(announced(|| assert_eq!(part.iter().filter(Result::is_ok).count(), 200)), 0);
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

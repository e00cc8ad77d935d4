//! Ranges of keys that scans have found without a visible key, so that later scans seek past them. A queue, which
//! inserts at one end and removes at the other, would otherwise pass every removed key in each scan.
//!
//! A dead range has a sequence number `from`: no reader at `from` or above sees a key in the range. Readers below
//! `from` do not use it. No visible key is skipped, for these reasons:
//!
//! 1. A scan *watches* a range before it learns it, and then reads the range from its beginning. An insertion writes
//!    to the memtable first and looks for ranges and watches second. A scan registers its watch first and reads
//!    second. Both have a fence between the two. So the scan reads the record, or the insertion finds the watch. The
//!    insertion does so before its sequence number is published.
//! 2. The scan stops at the first value that is visible, or newer than its sequence number. In the range that it has
//!    passed, the newest record of each key that it has read is a tombstone, or a range delete up to its sequence
//!    number covers it. `from` is at least each of these sequence numbers.
//! 3. An insertion of a key in a watched range shortens the range, and one in a dead range splits it, before the
//!    inserted key is visible. So a reader that has its sequence number and then finds a dead range sees no inserted
//!    key in it.
//! 4. The iterator of the scan must read the memtable that gets the insertions, and every ingested table. It does not
//!    read a memtable that is installed later, or that was empty when the iterator was made. The *generation* rises
//!    after the first record of a memtable was inserted, before the insertion looks for watches. A view takes the
//!    generation before its super version. A watch is refused if the generation has risen since. If the scan reads
//!    the old generation behind its fence, the insertion of the first record, and all later ones, find the watch. An
//!    ingest raises the generation after its tables are installed, and then removes all ranges and watches.
//! 5. A dead range with an expired key has the time of the scan, and only readers at that time or later use it.
//! 6. Flushes, compactions and deletions add no visible key.

use std::ops::Bound;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};

use crate::base::key_range::{KeyBoundary, KeyRange};
use crate::base::sync::lock;
use crate::base::{KeyOrder, SeqNo};
use crate::iter::merge::MergeDirection;

/// Maximum number of dead ranges of a tree. The least recently used one is removed first.
const RANGES_MAX: usize = 16;
/// Maximum number of scans of a tree that learn at the same time.
const WATCHES_MAX: usize = 8;
/// A range between longer keys, in bytes, is not remembered.
const KEY_LEN_MAX: usize = 1 << 10;
/// A scan learns a range when it has passed this many deleted keys in a row.
const DEAD_KEYS_MIN: u64 = if cfg!(test) { 3 } else { 16 };
/// A scan looks for a known range at the first of this many deleted keys.
const LOOKUP_INTERVAL: u64 = if cfg!(test) { 2 } else { 16 };

/// A memtable with fewer records is not sealed because of the deleted keys that scans pass. A table with fewer records
/// counts as one with this many.
pub(crate) const PASSED_RECORDS_MIN: u64 = if cfg!(test) { 256 } else { 16 << 10 };
/// A memtable is sealed, and a table with tombstones compacted, when scans have passed this many deleted keys for each
/// of its records.
const PASSED_KEYS_PER_RECORD: u64 = 8;

/// An insertion or a scan that has computed a new state tries this often to set it, while other threads change it.
const UPDATE_ATTEMPTS_MAX: usize = 64;

/// How many deleted keys scans pass before a memtable or table of this many records is sealed or compacted.
pub(crate) fn passed_keys_max(records: u64) -> u64 {
    records.max(PASSED_RECORDS_MIN).saturating_mul(PASSED_KEYS_PER_RECORD)
}

/// The dead ranges of one tree. Thread safe. Keys are compared without the lock, because a comparator may scan its own
/// partition: a thread takes the state, computes a new one, and sets it if no other thread has changed it meanwhile.
#[derive(Default)]
pub(crate) struct DeadRanges {
    /// Whether there are ranges or watches. If not, neither insertions nor scans take the lock.
    in_use: AtomicBool,
    generation: AtomicU64,
    state: Mutex<Arc<DeadRangeState>>,
    /// Number of lookups and watches until now.
    clock: AtomicU64,
    /// Number of deleted keys that scans have passed since insertions went to another memtable.
    passed_keys: AtomicU64,
}

#[derive(Clone, Default)]
struct DeadRangeState {
    /// Disjoint and ascending.
    ranges: Vec<Arc<DeadRange>>,
    watches: Vec<DeadRangeWatch>,
}

struct DeadRange {
    range: KeyRange,
    from: SeqNo,
    /// Readers with an earlier time may see a key. 0 if no key has expired.
    from_ms: u64,
    /// The number of the last lookup that found it.
    last_used: AtomicU64,
}

#[derive(Clone)]
struct DeadRangeWatch {
    id: u64,
    range: KeyRange,
    direction: MergeDirection,
}

impl DeadRanges {
    /// Tells that the values of `keys` were inserted into the memtable, but are not visible yet.
    #[inline]
    pub(crate) fn note_insertions<'k>(&self, keys: impl Iterator<Item = &'k [u8]>, order: &KeyOrder) {
        fence(Ordering::SeqCst);
        if self.in_use.load(Ordering::Relaxed) {
            keys.for_each(|key| self.exclude(key, order));
        }
    }

    /// Sets the state that `change` returns for the current one. `change` compares keys, and is called again if another
    /// thread has changed the state meanwhile; `None` changes nothing.
    fn update(&self, change: impl Fn(&DeadRangeState) -> Option<DeadRangeState>) {
        for _ in 0..UPDATE_ATTEMPTS_MAX {
            let seen = Arc::clone(&lock(&self.state));
            let Some(new) = change(&seen) else { return };
            let mut state = lock(&self.state);
            if Arc::ptr_eq(&seen, &state) {
                return self.set(&mut state, new);
            }
        }
        self.set(&mut lock(&self.state), DeadRangeState::default()); // to know nothing is correct
    }

    fn set(&self, state: &mut Arc<DeadRangeState>, new: DeadRangeState) {
        self.in_use.store(new.is_in_use(), Ordering::Relaxed);
        *state = Arc::new(new);
    }

    #[cold]
    fn exclude(&self, key: &[u8], order: &KeyOrder) {
        self.update(|state| state.without(key, order));
    }

    /// Tells that the first record was inserted into the active memtable, before
    /// [`note_insertions`](DeadRanges::note_insertions) is called for it.
    pub(crate) fn note_new_memtable(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.passed_keys.store(0, Ordering::Relaxed);
    }

    /// Number of deleted keys that scans have passed one by one since the last call of
    /// [`note_new_memtable`](DeadRanges::note_new_memtable). Short rows of deleted keys are not counted.
    pub(crate) fn passed_keys(&self) -> u64 {
        self.passed_keys.load(Ordering::Relaxed)
    }

    /// Tells that tables were ingested, which the current super version has, and whose entries are not visible yet.
    pub(crate) fn note_ingest(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.set(&mut lock(&self.state), DeadRangeState::default());
    }

    /// The dead range that contains `key`, for a reader at `at` and the time `now_ms`, and whether a key in it has
    /// expired.
    fn find(&self, key: &[u8], (at, now_ms): (SeqNo, u64), order: &KeyOrder) -> Option<(KeyRange, bool)> {
        if !self.in_use.load(Ordering::Acquire) {
            return None;
        }
        let state = Arc::clone(&lock(&self.state));
        let found = state.ranges.partition_point(|dead| dead.range.end.cmp_key(key, order).is_lt());
        let dead = state.ranges.get(found)?;
        if dead.from > at || dead.from_ms > now_ms || !dead.range.contains(key, order) {
            return None;
        }
        dead.last_used.store(self.tick(), Ordering::Relaxed);
        Some((dead.range.clone(), dead.from_ms > 0))
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Registers a watch; `None` if there are too many, or if the super version of the caller is not the current one.
    fn watch(&self, range: KeyRange, direction: MergeDirection, generation: u64) -> Option<u64> {
        let mut state = lock(&self.state);
        if state.watches.len() >= WATCHES_MAX || range.start.key().len().max(range.end.key().len()) > KEY_LEN_MAX {
            return None;
        }
        let id = self.tick();
        debug_assert!(state.watches.iter().all(|watch| watch.id != id), "each watch has a number of its own");
        let mut new = DeadRangeState::clone(&state);
        new.watches.push(DeadRangeWatch { id, range, direction });
        self.set(&mut state, new);
        drop(state);
        fence(Ordering::SeqCst);
        if self.generation.load(Ordering::SeqCst) != generation {
            self.unwatch(id, |_| None);
            return None;
        }
        Some(id)
    }

    /// Removes a watch, and adds the part of its range that `learned` returns.
    fn unwatch(&self, id: u64, learned: impl Fn(KeyRange) -> Option<(KeyRange, (SeqNo, u64), KeyOrder)>) {
        self.update(|state| {
            let at = state.watches.iter().position(|watch| watch.id == id)?;
            let mut new = state.clone();
            let watch = new.watches.remove(at);
            if let Some((range, from, order)) = learned(watch.range) {
                new.add(range, from, self.tick(), &order);
            }
            Some(new)
        });
    }
}

impl DeadRangeState {
    fn is_in_use(&self) -> bool {
        !self.ranges.is_empty() || !self.watches.is_empty()
    }

    /// Panics if the ranges or the watches are not as described.
    fn check_invariants(&self, order: &KeyOrder) {
        assert!(self.ranges.len() <= RANGES_MAX && self.watches.len() <= WATCHES_MAX, "ranges and watches are bounded");
        let key_len = |range: &KeyRange| range.start.key().len().max(range.end.key().len());
        assert!(self.ranges.iter().all(|dead| key_len(&dead.range) <= KEY_LEN_MAX), "no long key is remembered");
        if order.is_custom() {
            return;
        }
        assert!(self.ranges.iter().all(|dead| !dead.range.is_empty(order)), "a dead range has a position");
        let touch = |pair: &[Arc<DeadRange>]| pair[0].range.end.cmp(&pair[1].range.start, order).is_ge();
        assert!(!self.ranges.windows(2).any(touch), "dead ranges are in key order, and do not touch");
    }

    /// The state after the insertion of `key`; `None` if that changes nothing.
    fn without(&self, key: &[u8], order: &KeyOrder) -> Option<DeadRangeState> {
        let watched: Vec<usize> =
            (0..self.watches.len()).filter(|&at| self.watches[at].range.contains(key, order)).collect();
        let at = self.ranges.partition_point(|dead| dead.range.end.cmp_key(key, order).is_lt());
        let dead = self.ranges.get(at).filter(|dead| dead.range.contains(key, order));
        if watched.is_empty() && dead.is_none() {
            return None;
        }
        let (mut new, key) = (self.clone(), Arc::<[u8]>::from(key));
        for at in watched {
            let watch = &mut new.watches[at];
            match watch.direction {
                MergeDirection::Forward => watch.range.end = KeyBoundary::Before(Arc::clone(&key)),
                MergeDirection::Backward => watch.range.start = KeyBoundary::After(Arc::clone(&key)),
            }
        }
        if let Some(dead) = dead {
            let KeyRange { start, end } = dead.range.clone();
            new.ranges.remove(at);
            let parts = [(KeyBoundary::After(Arc::clone(&key)), end), (start, KeyBoundary::Before(key))];
            for (start, end) in parts {
                let last_used = AtomicU64::new(dead.last_used.load(Ordering::Relaxed));
                let range = KeyRange { start, end };
                new.insert(at, DeadRange { range, from: dead.from, from_ms: dead.from_ms, last_used }, order);
            }
        }
        if cfg!(debug_assertions) {
            new.check_invariants(order);
        }
        Some(new)
    }

    /// Adds a range, joined with those that overlap or touch it.
    fn add(&mut self, mut range: KeyRange, (mut from, mut from_ms): (SeqNo, u64), clock: u64, order: &KeyOrder) {
        if range.is_empty(order) {
            return;
        }
        let first = self.ranges.partition_point(|dead| dead.range.end.cmp(&range.start, order).is_lt());
        let end = self.ranges.partition_point(|dead| dead.range.start.cmp(&range.end, order).is_le());
        for dead in self.ranges.drain(first..end.max(first)) {
            if dead.range.start.cmp(&range.start, order).is_lt() {
                range.start = dead.range.start.clone();
            }
            if dead.range.end.cmp(&range.end, order).is_gt() {
                range.end = dead.range.end.clone();
            }
            (from, from_ms) = (from.max(dead.from), from_ms.max(dead.from_ms));
        }
        self.insert(first, DeadRange { range, from, from_ms, last_used: AtomicU64::new(clock) }, order);
        if cfg!(debug_assertions) {
            self.check_invariants(order);
        }
    }

    fn insert(&mut self, at: usize, dead: DeadRange, order: &KeyOrder) {
        let is_long = dead.range.start.key().len().max(dead.range.end.key().len()) > KEY_LEN_MAX;
        if is_long || dead.range.is_empty(order) {
            return;
        }
        self.ranges.insert(at, Arc::new(dead));
        if self.ranges.len() > RANGES_MAX {
            let last_used = |&at: &usize| self.ranges[at].last_used.load(Ordering::Relaxed);
            let oldest = (0..self.ranges.len()).min_by_key(last_used);
            oldest.map(|at| self.ranges.remove(at));
        }
    }
}

/// Counts the deleted keys that scans pass, for each table.
pub(crate) trait PassedKeyCounts: Send + Sync {
    /// Tells that a scan has passed `count` deleted keys one by one. The last of them is `key`.
    fn note_passed_keys(&self, key: &[u8], count: u64, order: &KeyOrder);
}

/// The dead ranges of a tree, as an iterator over one super version uses them.
#[derive(Clone)]
pub(crate) struct DeadRangesView {
    ranges: Arc<DeadRanges>,
    /// The generation before the super version was taken.
    generation: u64,
    tables: Option<Arc<dyn PassedKeyCounts>>,
}

impl DeadRangesView {
    /// The caller takes its super version afterwards.
    pub(crate) fn new(ranges: &Arc<DeadRanges>) -> DeadRangesView {
        let generation = ranges.generation.load(Ordering::SeqCst);
        DeadRangesView { ranges: Arc::clone(ranges), generation, tables: None }
    }

    /// The same, for an iterator that reads `tables`.
    pub(crate) fn with_tables(self, tables: Arc<dyn PassedKeyCounts>) -> DeadRangesView {
        DeadRangesView { tables: Some(tables), ..self }
    }
}

/// What a scan does after it has passed a deleted key.
pub(crate) enum DeadKeyStep {
    /// Moves on.
    Continue,
    /// Seeks past this boundary in its direction.
    SeekPast(KeyBoundary),
}

/// The deleted keys that one iterator passes, in one direction.
pub(crate) struct DeadKeyWalk {
    view: DeadRangesView,
    order: KeyOrder,
    direction: MergeDirection,
    at: SeqNo,
    now_ms: u64,
    /// Number of deleted keys in a row.
    dead_keys: u64,
    /// The first of them.
    first: Vec<u8>,
    /// The boundary that the scan has sought past, behind which the first of them follows.
    sought: Option<KeyBoundary>,
    /// The highest sequence number that was read under the watch, or `at`.
    from: SeqNo,
    /// The time of the scan if a key of the row has expired, else 0.
    from_ms: u64,
    watch: Option<u64>,
    can_learn: bool,
}

impl DeadKeyWalk {
    /// Begins a row of deleted keys, with the walk of the iterator or a new one.
    pub(crate) fn begin(
        walk: &mut Option<Box<DeadKeyWalk>>,
        view: &DeadRangesView,
        order: &KeyOrder,
        direction: MergeDirection,
        (at, now_ms): (SeqNo, u64),
    ) {
        let walk = walk.get_or_insert_with(|| {
            let (view, order, first) = (view.clone(), order.clone(), Vec::new());
            let (dead_keys, sought, watch, can_learn) = (0, None, None, true);
            let (from, from_ms) = (at, 0);
            Box::new(DeadKeyWalk {
                view,
                order,
                direction,
                at,
                now_ms,
                dead_keys,
                first,
                sought,
                from,
                from_ms,
                watch,
                can_learn,
            })
        });
        walk.cancel(); // counts the keys of the row before
        debug_assert!(walk.direction == direction && walk.at == at, "an iterator has one direction and one reader");
        debug_assert!(walk.watch.is_none() && walk.dead_keys == 0, "a row of deleted keys begins without a watch");
        (walk.sought, walk.from, walk.from_ms) = (None, at, 0);
    }

    /// Tells that the scan has passed `key`, which is deleted or `has_expired` for its reader.
    pub(crate) fn pass(&mut self, key: &[u8], has_expired: bool) -> DeadKeyStep {
        if has_expired {
            self.from_ms = self.now_ms;
        }
        if self.dead_keys.is_multiple_of(LOOKUP_INTERVAL) {
            let moment = (self.at, self.now_ms);
            if let Some((KeyRange { start, end }, has_expired_keys)) = self.view.ranges.find(key, moment, &self.order) {
                let past = if self.direction == MergeDirection::Forward { end } else { start };
                if self.watch.is_some() {
                    self.dead_keys += 1;
                    if has_expired_keys {
                        self.from_ms = self.now_ms;
                    }
                } else {
                    self.count_passed_keys();
                    self.sought = Some(past.clone());
                }
                return DeadKeyStep::SeekPast(past);
            }
            match (self.dead_keys, &self.view.tables) {
                (0, _) => {
                    self.first.clear();
                    self.first.extend_from_slice(key);
                }
                (_, Some(tables)) => tables.note_passed_keys(key, LOOKUP_INTERVAL, &self.order),
                (_, None) => {}
            }
        }
        self.dead_keys += 1;
        if self.dead_keys != DEAD_KEYS_MIN || !self.can_learn || self.watch.is_some() {
            return DeadKeyStep::Continue;
        }
        let first = || Arc::from(self.first.as_slice());
        let (near, range) = match self.direction {
            MergeDirection::Forward => {
                let near = self.sought.take().unwrap_or_else(|| KeyBoundary::Before(first()));
                (near.clone(), KeyRange { start: near, end: KeyBoundary::Max })
            }
            MergeDirection::Backward => {
                let near = self.sought.take().unwrap_or_else(|| KeyBoundary::After(first()));
                (near.clone(), KeyRange { start: KeyBoundary::Min, end: near })
            }
        };
        self.watch = self.view.ranges.watch(range, self.direction, self.view.generation);
        self.can_learn = self.watch.is_some();
        match self.can_learn {
            true => DeadKeyStep::SeekPast(near),
            false => DeadKeyStep::Continue,
        }
    }

    /// Whether every record must be [read](DeadKeyWalk::read).
    #[inline]
    pub(crate) fn is_watching(&self) -> bool {
        self.watch.is_some()
    }

    /// Tells the sequence number of a record under the watch.
    pub(crate) fn read(&mut self, seqno: SeqNo) {
        self.from = self.from.max(seqno);
    }

    /// Tells that the scan has passed all keys before `far`, in its direction, and found none that is visible, or
    /// newer.
    pub(crate) fn finish(&mut self, far: KeyBoundary) {
        let Some(watch) = self.watch else { return };
        debug_assert!(self.from >= self.at, "readers before the scan may see a key of the range");
        let (order, from) = (&self.order, (self.from, self.from_ms));
        self.view.ranges.unwatch(watch, |mut range| {
            match self.direction {
                MergeDirection::Forward if far.cmp(&range.end, order).is_lt() => range.end = far.clone(),
                MergeDirection::Backward if far.cmp(&range.start, order).is_gt() => range.start = far.clone(),
                _ => {}
            }
            Some((range, from, order.clone()))
        });
        self.watch = None; // after a panic of the comparator the watch is canceled
    }

    /// As [`finish`](DeadKeyWalk::finish), at the bound of the scan in its direction.
    pub(crate) fn finish_at_bound(&mut self, bound: Bound<&Vec<u8>>) {
        if self.is_watching() {
            let bound = bound.map(|key| Arc::from(key.as_slice()));
            let range = match self.direction {
                MergeDirection::Forward => KeyRange::between(Bound::Unbounded, bound),
                MergeDirection::Backward => KeyRange::between(bound, Bound::Unbounded),
            };
            self.finish(if self.direction == MergeDirection::Forward { range.end } else { range.start });
        }
    }

    /// Ends the watch without a result.
    fn cancel(&mut self) {
        self.count_passed_keys();
        if let Some(watch) = self.watch.take() {
            self.view.ranges.unwatch(watch, |_| None);
        }
    }

    fn count_passed_keys(&mut self) {
        let passed = std::mem::take(&mut self.dead_keys);
        if passed >= DEAD_KEYS_MIN {
            self.view.ranges.passed_keys.fetch_add(passed, Ordering::Relaxed);
        }
    }
}

impl Drop for DeadKeyWalk {
    fn drop(&mut self) {
        self.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(ranges: &Arc<DeadRanges>, direction: MergeDirection, at: u64, keys: &[&str], far: &str) {
        walk_at(ranges, direction, (SeqNo(at), 0), keys, far);
    }

    /// With a time above 0, all keys have expired.
    fn walk_at(ranges: &Arc<DeadRanges>, direction: MergeDirection, read_at: (SeqNo, u64), keys: &[&str], far: &str) {
        let (view, mut walk) = (DeadRangesView::new(ranges), None);
        let order = KeyOrder::bytewise();
        DeadKeyWalk::begin(&mut walk, &view, &order, direction, read_at);
        let mut walk = walk.unwrap();
        for key in keys.iter().take(DEAD_KEYS_MIN as usize).chain(keys) {
            walk.pass(key.as_bytes(), read_at.1 > 0);
        }
        match direction {
            MergeDirection::Forward => walk.finish(KeyBoundary::Before(far.as_bytes().into())),
            MergeDirection::Backward => walk.finish(KeyBoundary::After(far.as_bytes().into())),
        }
    }

    fn known(ranges: &DeadRanges) -> Vec<(String, u64)> {
        let text = |boundary: &KeyBoundary| {
            let sign = if matches!(boundary, KeyBoundary::After(_)) { "+" } else { "" };
            format!("{}{sign}", String::from_utf8_lossy(boundary.key()))
        };
        let state = lock(&ranges.state);
        let name = |range: &KeyRange| format!("{}..{}", text(&range.start), text(&range.end));
        state.ranges.iter().map(|dead| (name(&dead.range), dead.from.0)).collect()
    }

    /// The number of deleted keys up to each key that was told.
    #[derive(Default)]
    struct KeyCounts(Mutex<Vec<(Vec<u8>, u64)>>);

    impl PassedKeyCounts for KeyCounts {
        fn note_passed_keys(&self, key: &[u8], count: u64, _: &KeyOrder) {
            lock(&self.0).push((key.to_vec(), count));
        }
    }

    #[test]
    fn passed_keys_are_counted_for_tables() {
        let (ranges, counts) = (Arc::<DeadRanges>::default(), Arc::<KeyCounts>::default());
        let view = DeadRangesView::new(&ranges).with_tables(counts.clone());
        let mut walk = None;
        for keys in [&["a", "b", "c", "d", "e"][..], &["m"], &["x", "y", "z"]] {
            let moment = (SeqNo(9), 0);
            DeadKeyWalk::begin(&mut walk, &view, &KeyOrder::bytewise(), MergeDirection::Forward, moment);
            keys.iter().for_each(|key| _ = walk.as_mut().unwrap().pass(key.as_bytes(), false));
        }
        let told = |key: &str| (key.as_bytes().to_vec(), LOOKUP_INTERVAL);
        assert_eq!(*lock(&counts.0), [told("c"), told("e"), told("z")], "no row of one key is counted");
    }

    #[test]
    fn insertions_split_ranges_and_shorten_watches() {
        let (ranges, order) = (Arc::<DeadRanges>::default(), KeyOrder::bytewise());
        walk(&ranges, MergeDirection::Forward, 5, &["a", "b", "c", "d"], "f");
        assert_eq!(known(&ranges), [("a..f".to_string(), 5)]);
        for (key, at, is_dead) in [("a", 5, true), ("e", 9, true), ("f", 9, false), ("b", 4, false), ("A", 9, false)] {
            assert_eq!(ranges.find(key.as_bytes(), (SeqNo(at), 0), &order).is_some(), is_dead, "{key}");
        }
        ranges.note_insertions([&b"c"[..]].into_iter(), &order);
        ranges.note_insertions([&b"x"[..]].into_iter(), &order);
        assert_eq!(known(&ranges), [("a..c".to_string(), 5), ("c+..f".to_string(), 5)]);
        walk(&ranges, MergeDirection::Backward, 8, &["i", "h", "g", "f"], "e");
        assert_eq!(known(&ranges), [("a..c".to_string(), 5), ("c+..i+".to_string(), 8)]);

        let generation = ranges.generation.load(Ordering::SeqCst);
        let range = KeyRange { start: KeyBoundary::Before(b"p"[..].into()), end: KeyBoundary::Max };
        let watch = ranges.watch(range.clone(), MergeDirection::Forward, generation).unwrap();
        ranges.note_insertions([&b"r"[..]].into_iter(), &order);
        ranges.note_insertions([&b"q"[..]].into_iter(), &order);
        ranges.note_insertions([&b"s"[..]].into_iter(), &order);
        ranges.unwatch(watch, |range| Some((range, (SeqNo(9), 0), order.clone())));
        assert_eq!(known(&ranges)[2], ("p..q".to_string(), 9));

        ranges.note_new_memtable();
        assert!(ranges.watch(range.clone(), MergeDirection::Forward, generation).is_none(), "another memtable");
        let watch = ranges.watch(range, MergeDirection::Forward, generation + 1).unwrap();
        ranges.note_ingest();
        ranges.unwatch(watch, |range| Some((range, (SeqNo(9), 0), order.clone())));
        assert!(known(&ranges).is_empty() && !ranges.in_use.load(Ordering::Relaxed));
    }

    #[test]
    fn expired_keys_are_dead_for_later_readers() {
        let (ranges, order) = (Arc::<DeadRanges>::default(), KeyOrder::bytewise());
        walk_at(&ranges, MergeDirection::Forward, (SeqNo(5), 100), &["a", "b", "c", "d"], "f");
        let is_dead = |key: &str, now_ms| ranges.find(key.as_bytes(), (SeqNo(7), now_ms), &order).is_some();
        assert!(is_dead("b", 100) && is_dead("b", 200) && !is_dead("b", 99) && !is_dead("b", 0));
        walk(&ranges, MergeDirection::Forward, 6, &["f", "g", "h"], "i");
        assert!(is_dead("g", 100) && !is_dead("g", 99), "the joined range has both limits");
        walk(&ranges, MergeDirection::Forward, 6, &["k", "l", "m"], "n");
        assert!(is_dead("l", 0));
    }

    #[test]
    fn ranges_and_watches_are_bounded() {
        let (ranges, order) = (Arc::<DeadRanges>::default(), KeyOrder::bytewise());
        for n in 0..100u8 {
            let range =
                KeyRange { start: KeyBoundary::Before([n, 0][..].into()), end: KeyBoundary::Before([n, 9][..].into()) };
            ranges.update(|state| {
                let mut new = state.clone();
                new.add(range.clone(), (SeqNo(1), 0), 1, &order);
                Some(new)
            });
        }
        assert_eq!(lock(&ranges.state).ranges.len(), RANGES_MAX);
        let all = || KeyRange { start: KeyBoundary::Min, end: KeyBoundary::Max };
        let watches: Vec<_> = (0..20).filter_map(|_| ranges.watch(all(), MergeDirection::Forward, 0)).collect();
        assert_eq!(watches.len(), WATCHES_MAX);
        let long = KeyRange { start: KeyBoundary::Before(vec![0; KEY_LEN_MAX + 1].into()), end: KeyBoundary::Max };
        watches.into_iter().for_each(|watch| ranges.unwatch(watch, |_| None));
        assert!(ranges.watch(long, MergeDirection::Forward, 0).is_none());
    }
}

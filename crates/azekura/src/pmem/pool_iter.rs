//! Iteration over the records that are visible at one sequence number.
//!
//! The iterator reads one leaf at a time: its slots in key order, merged with the retained versions of the leaf. The
//! records are copied in batches. Until then the visible ones stay readable because the sequence number is registered
//! as a snapshot. The slots may include records that are skipped, because they are newer than the snapshot or have
//! expired. Such a record may be retired between two batches; then the leaf is read again
//! ([`PoolTree::retirements`]). The iterator continues by key, so leaves may be split and merged meanwhile.
//!
//! Memory has a high latency and serves many requests at once. So the records of a batch are copied by one loop that
//! does nothing else, and while one leaf is iterated, the records of the next leaf and the slots of the leaf after it
//! are prefetched. Prefetches are hints: it does not matter whether these leaves are still the next ones.

use std::cell::OnceCell;
use std::cmp::Ordering as Order;
use std::ops::Bound;
use std::sync::Arc;

use crate::base::{EntryRef, InternalKey, RecordKind, Result, SeqNo};
use crate::engine::{KeyBounds, ReadMoment};
use crate::iter::InternalIter;
use crate::iter::range_tombstones::RangeTombstones;
use crate::iter::visible::{Direction, Forward};
use crate::mem::atomic::{Ordering, SCHEDULE_EXPLORATION};
use crate::mem::epoch::Pin;
use crate::mem::region::Region;
use crate::pmem::inner::{LeafTarget, key_prefix_u64};
use crate::pmem::leaf::{LEAF_LEN, LeafAddr, SLOTS, set_bits};
use crate::pmem::leaf_prefetcher::{LeafPrefetcher, prefetch_slot_record};
use crate::pmem::persistence::PersistenceBackend;
use crate::pmem::record::{LeafSlot, PoolRecord};
use crate::pmem::tree::{PoolTree, TreeStep};

/// Number of entries by which records are prefetched in the first leaf of an iteration.
const PREFETCH_DISTANCE: usize = 8;
/// Number of records that are copied first in the first leaf of an iteration; each further batch there has twice as
/// many, and in later leaves a batch has all of them.
const FIRST_BATCH: usize = if SCHEDULE_EXPLORATION { 1 } else { 8 };

/// A shared key prefix shorter than this many bytes is not skipped when keys are sorted, because the 8-byte prefixes
/// of the keys then still differ after it.
const COMMON_LEN_MIN: usize = 6;

/// The part of a leaf that an iterator reads.
#[derive(Default)]
struct LeafView {
    /// The slots of the records in key order. The records may include some that are newer than the snapshot.
    slots: Vec<LeafSlot>,
    /// Bounds of the keys; `None` = unbounded. There may be keys at or behind `high`: while a leaf is split or
    /// merged, it still contains keys that belong to the next leaf.
    low: Option<Vec<u8>>,
    high: Option<Vec<u8>>,
    /// The 8-byte prefix of `high`: a key with a lower prefix is before `high`. 0 if prefixes are not comparable.
    high_prefix: u64,
    /// [`PoolTree::retirements`] before the leaf was read.
    retirements: u64,
}

/// An iterator over the newest versions at one registered sequence number, in key order. Deleted keys are skipped.
pub(crate) struct PoolIter<M: PersistenceBackend> {
    tree: Arc<PoolTree<M>>,
    /// Registered by the owner of the iterator, as long as the iterator exists.
    read_seqno: SeqNo,
    /// Records that expire at this time or before are skipped.
    now_ms: u64,
    /// Forward iteration reads no leaf behind the second bound, backward iteration none before the first.
    bounds: (Bound<Vec<u8>>, Bound<Vec<u8>>),
    view: LeafView,
    /// Whether the iterator is on an entry. The entry is in `batch`, whose slot indices are indices of `view.slots`.
    valid: bool,
    batch: RecordReadBatch,
    /// The direction in which `batch` was filled.
    direction: ScanDirection,
    /// Number of records of the view that are copied next.
    next_batch_len: usize,
    prefetcher: LeafPrefetcher,
    /// Whether the records of this leaf were not prefetched.
    is_cold: bool,
    /// Scratch space for sorting.
    records: Vec<PoolRecord>,
    sorted: Vec<(u64, u32)>,
}

impl<M: PersistenceBackend> PoolTree<M> {
    /// An iterator at `point`, a registered sequence number or moment.
    pub(crate) fn iter(self: &Arc<Self>, moment: impl Into<ReadMoment>) -> PoolIter<M> {
        let ReadMoment { seqno, now_ms } = moment.into();
        PoolIter {
            tree: Arc::clone(self),
            read_seqno: seqno,
            now_ms,
            bounds: (Bound::Unbounded, Bound::Unbounded),
            view: LeafView::default(),
            valid: false,
            batch: RecordReadBatch::default(),
            direction: ScanDirection::Forward,
            next_batch_len: FIRST_BATCH,
            prefetcher: LeafPrefetcher::default(),
            is_cold: true,
            records: Vec::new(),
            sorted: Vec::new(),
        }
    }
}

fn copy(from: Option<&[u8]>, to: &mut Option<Vec<u8>>) {
    match from {
        None => *to = None,
        Some(bytes) => {
            let to = to.get_or_insert_default();
            to.clear();
            to.extend_from_slice(bytes);
        }
    }
}

/// The direction of an iteration.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ScanDirection {
    Forward,
    Backward,
}

impl<M: PersistenceBackend> PoolIter<M> {
    /// The same iterator, limited to `bounds`: it reads no leaf beyond them.
    pub(crate) fn with_bounds(mut self, (low, high): KeyBounds<'_>) -> PoolIter<M> {
        self.bounds = (low.cloned(), high.cloned());
        self
    }

    /// Loads the leaf of `target`. The iteration continues in `direction`. The view is read while `pin` is held, or
    /// after a check that it [is current](PoolIter::is_view_current).
    fn load_leaf(&mut self, target: LeafTarget<'_>, direction: ScanDirection, pin: &Pin) -> Result<()> {
        (self.valid, self.direction, self.next_batch_len) = (false, direction, FIRST_BATCH);
        self.prefetcher.prefetch_rest(self.tree.region());
        let PoolIter { tree, view, prefetcher, is_cold, read_seqno, .. } = self;
        view.retirements = tree.retirements.load(Ordering::SeqCst);
        let hidden = tree.range_deletes.set_at(*read_seqno).filter(|_| tree.is_step_enabled(TreeStep::HideCovered));
        let (slots, mut valid, order, number, version) = loop {
            let shape = tree.structure_version.load(Ordering::Acquire);
            let found = tree.inner.find_position(target, pin);
            let leaf = tree.leaf(LeafAddr(found.leaf));
            tree.region().prefetch(leaf.offset, LEAF_LEN);
            let version = tree.leaf_orders.version(leaf.order_id);
            let changes = tree.slot_version(leaf.offset).load(Ordering::Acquire);
            let valid = leaf.commit_word().valid_slots();
            let slots = leaf.slot_words();
            let order = tree.leaf_orders.get(leaf.order_id, version);
            if tree.is_unchanged(leaf.offset, changes, shape) {
                copy(found.low, &mut view.low);
                copy(found.high, &mut view.high);
                *is_cold = !prefetcher.has_prefetched(LeafAddr(found.leaf));
                let [next, behind] = [1, 2]
                    .map(|n| found.sibling(if direction == ScanDirection::Forward { n } else { -n }).map(LeafAddr));
                prefetcher.begin(tree, next, behind);
                break (slots, valid, order, leaf.order_id, version);
            }
        };
        let has_exact_prefix = tree.key_order.is_bytewise() || view.high.is_none();
        view.high_prefix =
            if has_exact_prefix { view.high.as_deref().map_or(u64::MAX, |high| key_prefix_u64(high, 0)) } else { 0 };
        if let Some(hidden) = &hidden {
            valid = self.without_hidden(&slots, valid, hidden)?;
        }
        // The versions are read after the leaf, so that each record that was removed from the leaf earlier is found
        // here.
        if !self.tree.versions.is_empty() && self.load_retained_versions(&slots, valid, hidden.as_deref())? {
            return Ok(());
        }
        let view = &mut self.view;
        view.slots.clear();
        if let Some(order) = order {
            let is_valid = |n: &&u8| usize::from(**n) < SLOTS && valid >> **n & 1 == 1;
            view.slots.extend(order.iter().filter(is_valid).map(|n| LeafSlot(slots[usize::from(*n)])));
            debug_assert!(view.slots.len() <= valid.count_ones() as usize, "an order contains each slot once");
            if view.slots.len() == valid.count_ones() as usize {
                return Ok(());
            }
        }
        self.read_records(&slots, valid, false)?;
        self.sort();
        let PoolIter { tree, view, records, sorted, .. } = self;
        debug_assert_eq!(sorted.len(), valid.count_ones() as usize, "each valid slot is sorted");
        view.slots.clear();
        view.slots.extend(sorted.iter().map(|(_, n)| records[*n as usize].slot()));
        let numbers: [u8; SLOTS] = {
            let mut numbers = [0; SLOTS];
            set_bits(valid).zip(&mut numbers).for_each(|(n, to)| *to = n as u8);
            numbers
        };
        tree.leaf_orders.set(number, version, sorted.iter().map(|(_, n)| numbers[*n as usize]));
        Ok(())
    }

    /// The valid slots whose records no pending range delete hides. The records of the others are removed soon, and are
    /// not retained for this iterator.
    #[cold]
    fn without_hidden(&self, slots: &[u64; SLOTS], valid: u64, hidden: &RangeTombstones) -> Result<u64> {
        let (mut visible_slots, mut key) = (valid, Vec::new());
        for n in set_bits(valid) {
            let record = PoolRecord::read(self.tree.region(), LeafSlot(slots[n]))?;
            record.read_key(self.tree.region(), &mut key);
            if hidden.covering_seqno(&key, self.read_seqno, &self.tree.key_order) > record.seqno {
                visible_slots &= !(1 << n);
            }
        }
        Ok(visible_slots)
    }

    /// Reads the headers of the records of a leaf; with `visible`, only of those that the snapshot includes.
    fn read_records(&mut self, slots: &[u64; SLOTS], valid: u64, visible: bool) -> Result<()> {
        let PoolIter { tree, records, read_seqno, is_cold, .. } = self;
        set_bits(if *is_cold { valid } else { 0 })
            .for_each(|n| prefetch_slot_record(tree.region(), LeafSlot(slots[n])));
        records.clear();
        for n in set_bits(valid) {
            let record = PoolRecord::read(tree.region(), LeafSlot(slots[n]))?;
            if !visible || record.seqno <= *read_seqno {
                records.push(record);
            }
        }
        Ok(())
    }

    /// Loads the view from the leaf merged with the retained versions in its range, except for those that are `hidden`.
    /// Returns false if there are none.
    fn load_retained_versions(
        &mut self,
        slots: &[u64; SLOTS],
        valid: u64,
        hidden: Option<&RangeTombstones>,
    ) -> Result<bool> {
        let mut retained = Vec::new();
        let PoolIter { tree, view, read_seqno, bounds: (start, end), .. } = self;
        let (order, end, low, high) = (&tree.key_order, &*end, view.low.as_deref(), view.high.as_deref());
        // If a bound is inside the range of the leaf, only versions within the bound are read, because an emptied
        // leaf may have retained versions of any number of keys.
        let low = match start {
            Bound::Included(start) | Bound::Excluded(start) if low.is_none_or(|low| order.cmp(low, start).is_lt()) => {
                Some(start.as_slice())
            }
            _ => low,
        };
        let is_past = |key: &[u8]| {
            high.is_some_and(|high| order.cmp(key, high).is_ge())
                || match end {
                    Bound::Unbounded => false,
                    Bound::Included(end) => order.cmp(key, end).is_gt(),
                    Bound::Excluded(end) => order.cmp(key, end).is_ge(),
                }
        };
        tree.versions.visit_range(low, is_past, *read_seqno, |entry, slot| {
            if hidden.is_none_or(|set| set.covering_seqno(entry.user_key, *read_seqno, order) <= entry.seqno) {
                retained.push(PoolRecord::read(tree.region(), slot)?);
            }
            Ok(())
        })?;
        if retained.is_empty() {
            return Ok(false);
        }
        self.read_records(slots, valid, true)?;
        self.records.append(&mut retained);
        self.sort();
        let PoolIter { tree, view, records, sorted, .. } = self;
        // A record that was being replaced was found both in the leaf and here.
        sorted.dedup_by(|b, a| tree.cmp_keys(&records[a.1 as usize], &records[b.1 as usize]).is_eq());
        view.slots.clear();
        view.slots.extend(sorted.iter().map(|(_, n)| records[*n as usize].slot()));
        Ok(true)
    }

    /// Sorts `records` into `sorted`.
    fn sort(&mut self) {
        let PoolIter { tree, records, sorted, view, .. } = self;
        let common = match (&view.low, &view.high) {
            (Some(low), Some(high)) if tree.key_order.is_bytewise() => {
                low.iter().zip(high).take_while(|(a, b)| a == b).count()
            }
            _ => 0,
        };
        // If the leaf contains keys that belong to the next leaf, these need not share the common prefix of its
        // bounds.
        let has_foreign_keys = |records: &[PoolRecord]| match &view.high {
            Some(high) => records.iter().any(|record| tree.cmp_key(record, high).is_ge()),
            _ => false,
        };
        let common = if common < COMMON_LEN_MIN || has_foreign_keys(records) { 0 } else { common };
        tree.sort_records(records, common, sorted);
    }

    /// Copies visible records of the view from index `at` on, in the direction of the iteration, and positions the
    /// iterator on the first of them. Returns false if there is none: the view has no more records, or the rest is
    /// newer than the snapshot or belongs to the next leaf. The view is current, and stays so while `_pin` is held.
    fn fill_batch(&mut self, mut at: usize, _pin: &Pin) -> Result<bool> {
        let PoolIter { tree, read_seqno, now_ms, view, batch, prefetcher, next_batch_len, direction, is_cold, .. } =
            self;
        let region = tree.region();
        loop {
            batch.clear();
            if *next_batch_len > FIRST_BATCH {
                prefetcher.read_slots(tree);
            }
            let mut remaining = *next_batch_len;
            while remaining > 0 && at < view.slots.len() {
                if *is_cold && let Some(slot) = view.slots.get(direction.step_from(at, PREFETCH_DISTANCE)) {
                    prefetch_slot_record(region, *slot);
                }
                let is_visible = |key: &[u8], seqno| {
                    seqno <= *read_seqno && (key_prefix_u64(key, 0) < view.high_prefix || !view.is_past_high(tree, key))
                };
                if !batch.push_slot(region, view.slots[at], at, *now_ms, is_visible)? {
                    break;
                }
                at = direction.step_from(at, 1);
                remaining -= 1;
            }
            *next_batch_len = (*next_batch_len * 2).min(SLOTS);
            let ends = at >= view.slots.len();
            if !batch.is_empty() || ends {
                self.valid = !batch.is_empty();
                return Ok(self.valid);
            }
        }
    }

    /// Whether the upper bound permits `key`.
    fn is_before_end(&self, key: &[u8]) -> bool {
        Forward::is_within(&self.tree.key_order, &self.bounds.1, key)
    }

    /// Positions the iterator on the first entry from index `at` on, in this leaf or a later one.
    fn scan_forward(&mut self, mut at: usize, mut pin: Pin) -> Result<()> {
        self.valid = false;
        self.direction = ScanDirection::Forward;
        while !self.fill_batch(at, &pin)? {
            let Some(high) = self.view.high.take() else { return Ok(()) };
            // All keys of later leaves are at or behind `high`.
            if !self.is_before_end(&high) {
                return Ok(());
            }
            pin = self.repin(pin)?;
            self.load_leaf(LeafTarget::Key(&high), ScanDirection::Forward, &pin)?;
            self.next_batch_len = SLOTS;
            at = if self.view.low.as_deref() == Some(&high) {
                0
            } else {
                self.lower_bound(InternalKey::before_versions_of(&high), &pin)?
            };
        }
        Ok(())
    }

    /// Positions the iterator on the last entry before index `end`, in this leaf or an earlier one.
    fn scan_backward(&mut self, mut end: usize, mut pin: Pin) -> Result<()> {
        self.valid = false;
        self.direction = ScanDirection::Backward;
        while !self.fill_batch(end.wrapping_sub(1), &pin)? {
            let Some(low) = self.view.low.take() else { return Ok(()) };
            // All keys of earlier leaves are before `low`.
            if let Bound::Included(start) | Bound::Excluded(start) = &self.bounds.0
                && self.tree.key_order.cmp(&low, start).is_le()
            {
                return Ok(());
            }
            pin = self.repin(pin)?;
            self.load_leaf(LeafTarget::BeforeKey(&low), ScanDirection::Backward, &pin)?;
            self.next_batch_len = SLOTS;
            let all = self.view.high.as_deref() == Some(&low);
            end = if all {
                self.view.slots.len()
            } else {
                self.lower_bound(InternalKey::before_versions_of(&low), &pin)?
            };
        }
        Ok(())
    }

    /// Unpins, so that a scan over many leaves does not delay the reuse of space, and pins again.
    fn repin(&self, pin: Pin) -> Result<Pin> {
        drop(pin);
        self.tree.pin()
    }

    /// Whether all records of the view are readable: none was retired since the leaf was read. If so, they stay
    /// readable while the pin is held.
    #[inline]
    fn is_view_current(&self, _pin: &Pin) -> bool {
        self.tree.retirements.load(Ordering::SeqCst) == self.view.retirements
    }

    /// Loads the leaf of the current entry again. Returns the key of the entry.
    #[cold]
    fn reload_leaf(&mut self, direction: ScanDirection, pin: &Pin) -> Result<Vec<u8>> {
        let key = self.batch.key().0.user_key.to_vec();
        self.load_leaf(LeafTarget::Key(&key), direction, pin).map(|()| key)
    }

    #[inline]
    fn prefetch_slot(&self, at: usize) {
        if let Some(slot) = self.view.slots.get(at) {
            prefetch_slot_record(self.tree.region(), *slot);
        }
    }

    /// Number of entries of the view that are before `target`.
    fn lower_bound(&self, target: InternalKey<'_>, _pin: &Pin) -> Result<usize> {
        let PoolIter { tree, view, .. } = self;
        let slots = &view.slots;
        // The records that the first comparisons may read are prefetched together, and later all that remain.
        for part in 1..8 {
            self.prefetch_slot(slots.len() * part / 8);
        }
        let (mut low, mut high) = (0, slots.len());
        for asked in 0.. {
            if low == high {
                break;
            }
            if asked == 3 {
                (low..high).for_each(|at| self.prefetch_slot(at));
            }
            let middle = (low + high) / 2;
            let record = PoolRecord::read(tree.region(), slots[middle])?;
            let before = match tree.cmp_key(&record, target.user_key) {
                Order::Equal => record.seqno > target.seqno,
                order => order.is_lt(),
            };
            if before { low = middle + 1 } else { high = middle }
        }
        Ok(low)
    }

    /// Number of entries of the view whose keys are at or before `key`.
    fn end_of_versions(&self, key: &[u8], pin: &Pin) -> Result<usize> {
        let mut end = self.lower_bound(InternalKey::new(key, SeqNo::ZERO), pin)?;
        while let Some(slot) = self.view.slots.get(end) {
            let record = PoolRecord::read(self.tree.region(), *slot)?;
            if self.tree.cmp_key(&record, key).is_ne() {
                break;
            }
            end += 1;
        }
        Ok(end)
    }
}

impl LeafView {
    /// Whether `key` belongs to a later leaf.
    #[cold]
    fn is_past_high<M: PersistenceBackend>(&self, tree: &PoolTree<M>, key: &[u8]) -> bool {
        self.high.as_deref().is_some_and(|high| tree.key_order.cmp(key, high).is_ge())
    }
}

impl ScanDirection {
    /// The index `n` steps on from `at`. A step below 0 wraps around to an index that is out of range.
    #[inline]
    fn step_from(self, at: usize, n: usize) -> usize {
        match self {
            ScanDirection::Forward => at + n,
            ScanDirection::Backward => at.wrapping_sub(n),
        }
    }
}

impl<M: PersistenceBackend> InternalIter for PoolIter<M> {
    fn seek_to_first(&mut self) -> Result<()> {
        let pin = self.tree.pin()?;
        self.load_leaf(LeafTarget::First, ScanDirection::Forward, &pin)?;
        self.scan_forward(0, pin)
    }

    /// To the last entry within the upper bound. `seek` ends at that bound, and a caller that found no entry behind it
    /// expects the one before it here.
    fn seek_to_last(&mut self) -> Result<()> {
        let pin = self.tree.pin()?;
        let end = match self.bounds.1.clone() {
            Bound::Unbounded => {
                self.load_leaf(LeafTarget::Last, ScanDirection::Backward, &pin)?;
                self.view.slots.len()
            }
            Bound::Excluded(key) => {
                self.load_leaf(LeafTarget::Key(&key), ScanDirection::Backward, &pin)?;
                self.lower_bound(InternalKey::before_versions_of(&key), &pin)?
            }
            Bound::Included(key) => {
                self.load_leaf(LeafTarget::Key(&key), ScanDirection::Backward, &pin)?;
                self.end_of_versions(&key, &pin)?
            }
        };
        self.scan_backward(end, pin)
    }

    fn seek(&mut self, target: InternalKey<'_>) -> Result<()> {
        let pin = self.tree.pin()?;
        self.load_leaf(LeafTarget::Key(target.user_key), ScanDirection::Forward, &pin)?;
        let at = self.lower_bound(target, &pin)?;
        (at..at + PREFETCH_DISTANCE).for_each(|at| self.prefetch_slot(at));
        self.scan_forward(at, pin)
    }

    /// To the last entry before `target` within the upper bound, for the reason stated at `seek_to_last`.
    fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()> {
        if !self.is_before_end(target.user_key) {
            return self.seek_to_last();
        }
        let pin = self.tree.pin()?;
        self.load_leaf(LeafTarget::Key(target.user_key), ScanDirection::Backward, &pin)?;
        let end = self.lower_bound(target, &pin)?;
        (end.saturating_sub(PREFETCH_DISTANCE)..end).for_each(|at| self.prefetch_slot(at));
        self.scan_backward(end, pin)
    }

    #[inline]
    fn next(&mut self) -> Result<()> {
        assert!(self.valid, "an iterator moves only while it is valid");
        if self.direction == ScanDirection::Forward && self.batch.step() {
            self.prefetcher.prefetch_record(self.tree.region());
            return Ok(());
        }
        let pin = self.tree.pin()?;
        let at = match self.is_view_current(&pin) {
            true => self.batch.slot_index() + 1,
            false => {
                let key = self.reload_leaf(ScanDirection::Forward, &pin)?;
                self.end_of_versions(&key, &pin)?
            }
        };
        self.scan_forward(at, pin)
    }

    #[inline]
    fn prev(&mut self) -> Result<()> {
        assert!(self.valid, "an iterator moves only while it is valid");
        if self.direction == ScanDirection::Backward && self.batch.step() {
            self.prefetcher.prefetch_record(self.tree.region());
            return Ok(());
        }
        let pin = self.tree.pin()?;
        let end = match self.is_view_current(&pin) {
            true => self.batch.slot_index(),
            false => {
                let key = self.reload_leaf(ScanDirection::Backward, &pin)?;
                self.lower_bound(InternalKey::before_versions_of(&key), &pin)?
            }
        };
        self.scan_backward(end, pin)
    }

    #[inline]
    fn next_key(&mut self) -> Result<Option<(InternalKey<'_>, RecordKind)>> {
        self.next()?;
        Ok(self.valid.then(|| self.batch.key()))
    }

    #[inline]
    fn next_ref(&mut self) -> Result<Option<EntryRef<'_>>> {
        self.next()?;
        Ok(self.valid.then(|| self.batch.entry(self.tree.region())))
    }

    #[inline]
    fn valid(&self) -> bool {
        self.valid
    }

    #[inline]
    fn head(&self) -> Option<(InternalKey<'_>, RecordKind)> {
        self.valid.then(|| self.batch.key())
    }

    fn is_visibility_resolved(&self) -> bool {
        true
    }

    #[inline]
    fn entry(&self) -> EntryRef<'_> {
        assert!(self.valid, "only a valid iterator has an entry");
        self.batch.entry(self.tree.region())
    }
}

/// Records up to this length in bytes are copied whole; the value of a longer record is copied on demand.
const COPY_WHOLE_MAX: u64 = 1024;
/// Maximum number of bytes of a batch before its last record.
const BATCH_BYTES_MAX: usize = 16 << 10;

#[cfg(test)]
thread_local! {
    /// Number of values that this thread has read separately from their records.
    pub(crate) static VALUES_READ: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// A record that was copied into a batch.
#[derive(Clone, Copy)]
struct CopiedRecord {
    seqno: SeqNo,
    kind: RecordKind,
    /// Offset of the value in the pool.
    value_offset: u64,
    /// Start of the key in the bytes of the batch. `value_start` is that of a copied value.
    key_start: u32,
    key_len: u32,
    value_start: u32,
    value_len: u32,
    /// Index of the slot, as passed by the caller.
    slot_index: u32,
    has_value: bool,
}

/// Copied records in the order of the iteration, and the current position.
#[derive(Default)]
pub(crate) struct RecordReadBatch {
    records: Vec<CopiedRecord>,
    /// Used up to `len`. The rest contains bytes of former batches.
    bytes: Vec<u8>,
    len: usize,
    position: usize,
    /// The value of the current record if it was not copied with the batch and was read since.
    value: OnceCell<Vec<u8>>,
}

impl RecordReadBatch {
    /// Removes all records.
    pub(crate) fn clear(&mut self) {
        self.records.clear();
        self.value.take();
        (self.len, self.position) = (0, 0);
    }

    /// Copies the record of a slot, with `number` as its slot index, if `keep` accepts its key and sequence number, and
    /// it has not expired at `now_ms`. Returns false if the batch has no
    /// space for it.
    ///
    /// # Errors
    /// As [`PoolRecord::read`](crate::pmem::record::PoolRecord::read).
    #[inline]
    pub(crate) fn push_slot(
        &mut self,
        region: &Region,
        slot: LeafSlot,
        number: usize,
        now_ms: u64,
        keep: impl FnOnce(&[u8], SeqNo) -> bool,
    ) -> Result<bool> {
        debug_assert!(self.len <= self.bytes.len(), "the copied records are in the bytes of the batch");
        if self.len >= BATCH_BYTES_MAX {
            return Ok(false);
        }
        let start = self.len;
        let (record, len) = match slot.len() {
            Some(len) if len <= COPY_WHOLE_MAX && region.contains(slot.offset(), len) => {
                (self.copy_record(region, slot, len)?, len as usize)
            }
            _ => self.copy_header_and_key(region, slot)?,
        };
        let key = start + (record.key_offset - record.offset) as usize;
        if keep(&self.bytes[key..][..record.key_len], record.seqno) {
            // 32 bits are enough: the batch has less than `BATCH_BYTES_MAX` bytes before this record, whose copied
            // part has at most a header and a key of 64 KiB, or `COPY_WHOLE_MAX` bytes. The number of slots of a view
            // is limited by the memory for retained versions.
            let (value_offset, value_len) = (record.value_offset(), record.value_len);
            if record.kind != RecordKind::Put && record.unexpired_value(region, now_ms)?.is_none() {
                return Ok(true);
            }
            // A value that is not copied, or empty, has its start at the key.
            let value_start = start + (value_offset - record.offset) as usize;
            let is_copied = value_start + value_len <= start + len;
            self.records.push(CopiedRecord {
                seqno: record.seqno,
                kind: record.kind,
                value_offset,
                key_start: key as u32,
                key_len: record.key_len as u32,
                value_start: if is_copied { value_start } else { key } as u32,
                value_len: value_len as u32,
                slot_index: number as u32,
                has_value: is_copied || value_len == 0,
            });
            self.len = start + len;
        }
        Ok(true)
    }

    /// Appends a whole record to the bytes.
    #[inline(always)]
    fn copy_record(&mut self, region: &Region, slot: LeafSlot, len: u64) -> Result<PoolRecord> {
        let end = self.len + len as usize;
        if end > self.bytes.len() {
            self.lengthen(end);
        }
        let bytes = &mut self.bytes[self.len..end];
        region.read_words(slot.offset(), bytes);
        PoolRecord::from_buffer(bytes, slot)
    }

    #[cold]
    fn lengthen(&mut self, len: usize) {
        self.bytes.resize(len, 0);
    }

    /// Appends a record without its value to the bytes.
    #[cold]
    fn copy_header_and_key(&mut self, region: &Region, slot: LeafSlot) -> Result<(PoolRecord, usize)> {
        let record = PoolRecord::read(region, slot)?;
        let len = (record.value_offset() - record.offset) as usize;
        self.bytes.resize(self.bytes.len().max(self.len + len), 0);
        region.read(record.offset, &mut self.bytes[self.len..][..len]);
        Ok((record, len))
    }

    /// Steps to the next record. Returns false if there is none.
    #[inline]
    pub(crate) fn step(&mut self) -> bool {
        let more = self.position + 1 < self.records.len();
        if more {
            self.position += 1;
            if self.value.get().is_some() {
                self.value.take();
            }
        }
        more
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    #[inline]
    fn key_of(&self, record: &CopiedRecord) -> &[u8] {
        &self.bytes[record.key_start as usize..][..record.key_len as usize]
    }

    /// The slot index of the current record. The batch must not be empty, here and in the functions below.
    #[inline]
    pub(crate) fn slot_index(&self) -> usize {
        self.records[self.position].slot_index as usize
    }

    #[inline]
    pub(crate) fn key(&self) -> (InternalKey<'_>, RecordKind) {
        let record = &self.records[self.position];
        (InternalKey::new(self.key_of(record), record.seqno), record.kind)
    }

    /// The current record.
    #[inline]
    pub(crate) fn entry(&self, region: &Region) -> EntryRef<'_> {
        let record = &self.records[self.position];
        let value = match record.has_value {
            true => &self.bytes[record.value_start as usize..][..record.value_len as usize],
            false => self.value.get_or_init(|| {
                #[cfg(test)]
                VALUES_READ.set(VALUES_READ.get() + 1);
                let mut value = vec![0; record.value_len as usize];
                region.read(record.value_offset, &mut value);
                value
            }),
        };
        EntryRef { user_key: self.key_of(record), seqno: record.seqno, kind: record.kind, value }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pmem::record::PoolRecordHeader;

    /// Slot, key and value of a record.
    type StoredTestRecord = (LeafSlot, Vec<u8>, Vec<u8>);

    /// Writes adjacent records with keys and values of these lengths.
    fn pool(lengths: &[(usize, usize)]) -> (Region, Vec<StoredTestRecord>) {
        let region = Region::private(1 << 20).unwrap();
        region.grow(1 << 20).unwrap();
        let mut at = 4096;
        let mut records = Vec::new();
        for (n, (key_len, value_len)) in lengths.iter().enumerate() {
            let (key, value) = (vec![n as u8; *key_len], vec![!n as u8; *value_len]);
            let entry = EntryRef { user_key: &key, seqno: SeqNo(n as u64 + 1), kind: RecordKind::Put, value: &value };
            let mut head = PoolRecordHeader::new(entry).unwrap();
            let len = head.buffer_len(entry);
            region.write(at, &[head.encode(&[7; 16], at, entry), &key, &value], |_, _| ());
            records.push((LeafSlot::new(at, len), key, value));
            at += len;
        }
        (region, records)
    }

    #[test]
    fn batch_copies_records_until_full() {
        let lengths = [(16, 100), (0, 0), (127, 127), (128, 500), (9, 5000), (60_000, 3), (3, 60_000), (16, 16)];
        let (region, records) = pool(&lengths);
        let mut batch = RecordReadBatch::default();
        for _ in 0..2 {
            batch.clear();
            assert!(batch.is_empty());
            let took: Vec<bool> = records
                .iter()
                .enumerate()
                .map(|(n, (slot, ..))| batch.push_slot(&region, *slot, 70 + n, 0, |_, _| true).unwrap())
                .collect();
            assert_eq!(took, [true, true, true, true, true, true, false, false], "the long key fills the buffer");
            for (n, (_, key, value)) in records[..6].iter().enumerate() {
                let entry = batch.entry(&region);
                assert_eq!((entry.user_key, entry.seqno, entry.value), (key.as_slice(), SeqNo(n as u64 + 1), &**value));
                assert_eq!((batch.slot_index(), batch.key().0.user_key), (70 + n, key.as_slice()));
                assert_eq!(batch.step(), n < 5);
            }
        }
    }

    #[test]
    fn batch_skips_records_filter_rejects() {
        let (region, records) = pool(&[(4, 4); 5]);
        let mut batch = RecordReadBatch::default();
        for (n, (slot, ..)) in records.iter().enumerate() {
            assert!(batch.push_slot(&region, *slot, n, 0, |key, seqno| key == [n as u8; 4] && seqno.0 != 2).unwrap());
        }
        let mut numbers = vec![batch.slot_index()];
        while batch.step() {
            numbers.push(batch.slot_index());
        }
        assert_eq!(numbers, [0, 2, 3, 4]);
        assert!(batch.entry(&region).value == [!4; 4]);
    }

    #[test]
    fn bad_slot_is_error_and_leaves_batch_empty() {
        let (region, records) = pool(&[(4, 4)]);
        let mut batch = RecordReadBatch::default();
        let (slot, ..) = records[0];
        for slot in [
            LeafSlot::new(slot.offset() + 4096, 32),
            LeafSlot::new(slot.offset(), 4096),
            LeafSlot::new(1 << 20, 32),
            LeafSlot(u64::MAX),
        ] {
            assert!(batch.push_slot(&region, slot, 0, 0, |_, _| true).is_err() && batch.is_empty());
        }
        assert!(batch.push_slot(&region, slot, 0, 0, |_, _| true).unwrap() && !batch.is_empty());
    }
}

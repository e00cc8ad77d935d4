//! Walking over what one point shows.
//!
//! A cursor takes a leaf at a time: its slots, in the order of the keys that they lead to, with those of the versions
//! that the leaf has forgotten. What they lead to is copied in batches; until then it stays readable because the point
//! is registered, also what is newer than the point and is stepped over: whatever replaces that is newer still. It goes
//! on by key, so leaves may be split and merged meanwhile.

use std::cmp::Ordering as Order;
use std::ops::Bound;
use std::sync::Arc;

use crate::base::{EntryRef, InternalKey, RecordKind, Result, SeqNo};
use crate::engine::KeyBounds;
use crate::iter::InternalIter;
use crate::mem::atomic::Ordering;
use crate::pmem::inner::{LeafTarget, key_prefix_u64};
use crate::pmem::leaf::LeafAddr;
use crate::pmem::leaf::{LEAF_LEN, SLOTS, set_bits};
use crate::pmem::persistence::PersistenceBackend;
use crate::pmem::record::{LeafSlot, PoolRecord};
use crate::pmem::tree::PoolTree;
use crate::pmem::walk::ahead::{LeafPrefetcher, prefetch_slot_record};
use crate::pmem::walk::batch::RecordReadBatch;

/// In the leaf where a walk begins records are fetched so many entries ahead.
const PREFETCH_DISTANCE: usize = 8;
/// So many records are copied first where a walk begins, each time twice as many as before, and in the leaves that it
/// goes on to all.
const FIRST_BATCH: usize = 8;

/// A shorter beginning that all keys have leaves heads that differ behind it.
const COMMON_LEN_MIN: usize = 6;

/// What a cursor shows of a leaf.
#[derive(Default)]
struct LeafView {
    /// The records, by key; what is newer than the point may be among them.
    slots: Vec<LeafSlot>,
    /// What the keys lie between; `None` = nothing. There may be others at the end: while a leaf is split or joined,
    /// keys that belong behind it stand in it still.
    low: Option<Vec<u8>>,
    high: Option<Vec<u8>>,
    /// The head of `high`: a key with a lower one is before it. 0 where heads don't tell.
    high_prefix: u64,
}

/// A cursor over the newest versions at one registered point, in the order of keys; removed keys are not there.
pub(crate) struct PoolIter<M: PersistenceBackend> {
    tree: Arc<PoolTree<M>>,
    /// Registered by whoever has the cursor, for as long.
    read_seqno: SeqNo,
    /// A walk up goes on to no leaf behind the second bound, a walk down to none before the first.
    bounds: (Bound<Vec<u8>>, Bound<Vec<u8>>),
    view: LeafView,
    /// Whether it stands on an entry: one of the batch, whose records are numbered as in the view.
    valid: bool,
    batch: RecordReadBatch,
    /// Which way the batch goes.
    direction: ScanDirection,
    /// How many records of the view are copied next.
    next_batch_len: usize,
    prefetcher: LeafPrefetcher,
    /// Whether nobody has fetched the records of this leaf on the way to it.
    is_cold: bool,
    /// Scratch for sorting.
    records: Vec<PoolRecord>,
    sorted: Vec<(u64, u32)>,
}

impl<M: PersistenceBackend> PoolTree<M> {
    /// A cursor at a registered point.
    pub(crate) fn iter(self: &Arc<Self>, point: SeqNo) -> PoolIter<M> {
        PoolIter {
            tree: Arc::clone(self),
            read_seqno: point,
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

/// Which way a walk goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ScanDirection {
    Forward,
    Backward,
}

impl<M: PersistenceBackend> PoolIter<M> {
    /// The same, for a walk that needs no leaf beyond these bounds.
    pub(crate) fn with_bounds(mut self, (low, high): KeyBounds<'_>) -> PoolIter<M> {
        self.bounds = (low.cloned(), high.cloned());
        self
    }

    /// Takes the leaf of `goal`, on the way to one that lies behind or before it.
    fn load_leaf(&mut self, goal: LeafTarget<'_>, way: ScanDirection) -> Result<()> {
        (self.valid, self.direction, self.next_batch_len) = (false, way, FIRST_BATCH);
        self.prefetcher.prefetch_rest(self.tree.region());
        let PoolIter { tree, view, prefetcher: ahead, is_cold: cold, .. } = self;
        let pin = tree.pin()?;
        let (slots, valid, order, number, version) = loop {
            let shape = tree.structure_version.load(Ordering::Acquire);
            let found = tree.inner.find_position(goal, &pin);
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
                *cold = !ahead.has_prefetched(LeafAddr(found.leaf));
                let [next, behind] =
                    [1, 2].map(|n| found.sibling(if way == ScanDirection::Forward { n } else { -n }).map(LeafAddr));
                ahead.begin(tree, next, behind);
                break (slots, valid, order, leaf.order_id, version);
            }
        };
        let tells = tree.key_order.is_bytewise() || view.high.is_none();
        view.high_prefix =
            if tells { view.high.as_deref().map_or(u64::MAX, |high| key_prefix_u64(high, 0)) } else { 0 };
        // After the leaf was read: whatever it forgot before is found.
        if !tree.versions.is_empty() && self.load_retained_versions(&slots, valid)? {
            return Ok(());
        }
        let view = &mut self.view;
        view.slots.clear();
        if let Some(order) = order {
            let there = |n: &&u8| usize::from(**n) < SLOTS && valid >> **n & 1 == 1;
            view.slots.extend(order.iter().filter(there).map(|n| LeafSlot(slots[usize::from(*n)])));
            if view.slots.len() == valid.count_ones() as usize {
                return Ok(());
            }
        }
        self.read_records(&slots, valid, false)?;
        self.sort();
        let PoolIter { tree, view, records, sorted, .. } = self;
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

    /// Reads the heads of the records of a leaf; with `visible` only of those that the point shows.
    fn read_records(&mut self, slots: &[u64; SLOTS], valid: u64, visible: bool) -> Result<()> {
        let PoolIter { tree, records, read_seqno: point, is_cold: cold, .. } = self;
        set_bits(if *cold { valid } else { 0 }).for_each(|n| prefetch_slot_record(tree.region(), LeafSlot(slots[n])));
        records.clear();
        for n in set_bits(valid) {
            let record = PoolRecord::read(tree.region(), LeafSlot(slots[n]))?;
            if !visible || record.seqno <= *point {
                records.push(record);
            }
        }
        Ok(())
    }

    /// Takes the leaf with the versions that lie in its range: what was visible and is not in the leaf any more. False
    /// if there are none.
    fn load_retained_versions(&mut self, slots: &[u64; SLOTS], valid: u64) -> Result<bool> {
        let (mut tombstones, mut kept) = (Vec::new(), Vec::new());
        let PoolIter { tree, view, read_seqno: point, bounds: (start, end), .. } = self;
        let (order, end, low, high) = (&tree.key_order, &*end, view.low.as_deref(), view.high.as_deref());
        // Of a leaf that lies across a bound only what lies within: an emptied leaf may have versions of any number of
        // keys.
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
        tree.versions.visit_range(low, is_past, *point, |entry, slot| {
            match slot {
                Some(slot) if entry.kind == RecordKind::Put => kept.push(PoolRecord::read(tree.region(), slot)?),
                _ => tombstones.push((entry.user_key.to_vec(), entry.seqno)),
            }
            Ok(())
        })?;
        if kept.is_empty() && tombstones.is_empty() {
            return Ok(false);
        }
        self.read_records(slots, valid, true)?;
        self.records.append(&mut kept);
        self.sort();
        self.keep_newest_versions(&tombstones);
        let PoolIter { view, records, sorted, .. } = self;
        view.slots.clear();
        view.slots.extend(sorted.iter().map(|(_, n)| records[*n as usize].slot()));
        Ok(true)
    }

    /// Sorts the records that were read.
    fn sort(&mut self) {
        let PoolIter { tree, records, sorted, view, .. } = self;
        let common = match (&view.low, &view.high) {
            (Some(low), Some(high)) if tree.key_order.is_bytewise() => {
                low.iter().zip(high).take_while(|(a, b)| a == b).count()
            }
            _ => 0,
        };
        // Heads of keys that belong behind the leaf would not be comparable.
        let strangers = |records: &[PoolRecord]| match &view.high {
            Some(high) => records.iter().any(|record| tree.cmp_key(record, high).is_ge()),
            _ => false,
        };
        let common = if common < COMMON_LEN_MIN || strangers(records) { 0 } else { common };
        tree.sort_records(records, common, sorted);
    }

    /// Leaves the newest version of each key, unless it is removed.
    fn keep_newest_versions(&mut self, tombstones: &[(Vec<u8>, SeqNo)]) {
        let PoolIter { tree, records, sorted, .. } = self;
        sorted.dedup_by(|b, a| tree.cmp_keys(&records[a.1 as usize], &records[b.1 as usize]).is_eq());
        for (key, seqno) in tombstones {
            let found = sorted.binary_search_by(|(_, n)| tree.cmp_key(&records[*n as usize], key));
            if let Ok(at) = found
                && records[sorted[at].1 as usize].seqno < *seqno
            {
                sorted.remove(at);
            }
        }
    }

    /// Copies records of the view from number `at` on, and stands on the first one that the point shows; false if all
    /// of them are behind the end of the view, the point does not show them, or they belong to the leaf behind.
    fn fill_batch(&mut self, mut at: usize) -> Result<bool> {
        let PoolIter {
            tree,
            read_seqno: point,
            view,
            batch,
            prefetcher: ahead,
            next_batch_len: want,
            direction: way,
            is_cold: cold,
            ..
        } = self;
        let (region, _pin) = (tree.region(), tree.pin()?);
        loop {
            batch.clear();
            if *want > FIRST_BATCH {
                ahead.read_slots(tree);
            }
            let mut left = *want;
            while left > 0 && at < view.slots.len() {
                if *cold && let Some(slot) = view.slots.get(way.step_from(at, PREFETCH_DISTANCE)) {
                    prefetch_slot_record(region, *slot);
                }
                let shown = |key: &[u8], seqno| {
                    seqno <= *point && (key_prefix_u64(key, 0) < view.high_prefix || !view.is_past_high(tree, key))
                };
                if !batch.push_slot(region, view.slots[at], at, shown)? {
                    break;
                }
                at = way.step_from(at, 1);
                left -= 1;
            }
            *want = (*want * 2).min(SLOTS);
            let ends = at >= view.slots.len();
            if !batch.is_empty() || ends {
                self.valid = !batch.is_empty();
                return Ok(self.valid);
            }
        }
    }

    /// Stands on the first entry from `at` on, in this leaf or behind it.
    fn scan_forward(&mut self, mut at: usize) -> Result<()> {
        self.valid = false;
        self.direction = ScanDirection::Forward;
        while !self.fill_batch(at)? {
            let Some(high) = self.view.high.take() else { return Ok(()) };
            // All keys of the leaves behind are at `high` or behind it.
            let ends = match &self.bounds.1 {
                Bound::Unbounded => false,
                Bound::Included(end) => self.tree.key_order.cmp(&high, end).is_gt(),
                Bound::Excluded(end) => self.tree.key_order.cmp(&high, end).is_ge(),
            };
            if ends {
                return Ok(());
            }
            self.load_leaf(LeafTarget::Key(&high), ScanDirection::Forward)?;
            self.next_batch_len = SLOTS;
            at = if self.view.low.as_deref() == Some(&high) {
                0
            } else {
                self.lower_bound(InternalKey::before_versions_of(&high))?
            };
        }
        Ok(())
    }

    /// Stands on the last entry before `end`, in this leaf or before it.
    fn scan_backward(&mut self, mut end: usize) -> Result<()> {
        self.valid = false;
        self.direction = ScanDirection::Backward;
        while !self.fill_batch(end.wrapping_sub(1))? {
            let Some(low) = self.view.low.take() else { return Ok(()) };
            // All keys of the leaves before are before `low`.
            if let Bound::Included(start) | Bound::Excluded(start) = &self.bounds.0
                && self.tree.key_order.cmp(&low, start).is_le()
            {
                return Ok(());
            }
            self.load_leaf(LeafTarget::BeforeKey(&low), ScanDirection::Backward)?;
            self.next_batch_len = SLOTS;
            let all = self.view.high.as_deref() == Some(&low);
            end = if all { self.view.slots.len() } else { self.lower_bound(InternalKey::before_versions_of(&low))? };
        }
        Ok(())
    }

    #[inline]
    fn prefetch_slot(&self, at: usize) {
        if let Some(slot) = self.view.slots.get(at) {
            prefetch_slot_record(self.tree.region(), *slot);
        }
    }

    /// How many entries of the view are before `target`.
    fn lower_bound(&self, target: InternalKey<'_>) -> Result<usize> {
        let PoolIter { tree, view, .. } = self;
        let (slots, _pin) = (&view.slots, tree.pin()?);
        // What the first questions are about, and then what is left, is fetched together.
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
}

impl LeafView {
    /// Whether `key` belongs to a leaf behind this one.
    #[cold]
    fn is_past_high<M: PersistenceBackend>(&self, tree: &PoolTree<M>, key: &[u8]) -> bool {
        self.high.as_deref().is_some_and(|high| tree.key_order.cmp(key, high).is_ge())
    }
}

impl ScanDirection {
    /// The number `n` steps on from `at`; one that nothing has where it would be below 0.
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
        self.load_leaf(LeafTarget::First, ScanDirection::Forward)?;
        self.scan_forward(0)
    }

    fn seek_to_last(&mut self) -> Result<()> {
        self.load_leaf(LeafTarget::Last, ScanDirection::Backward)?;
        self.scan_backward(self.view.slots.len())
    }

    fn seek(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.load_leaf(LeafTarget::Key(target.user_key), ScanDirection::Forward)?;
        let at = self.lower_bound(target)?;
        (at..at + PREFETCH_DISTANCE).for_each(|at| self.prefetch_slot(at));
        self.scan_forward(at)
    }

    fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()> {
        self.load_leaf(LeafTarget::Key(target.user_key), ScanDirection::Backward)?;
        let end = self.lower_bound(target)?;
        (end.saturating_sub(PREFETCH_DISTANCE)..end).for_each(|at| self.prefetch_slot(at));
        self.scan_backward(end)
    }

    #[inline]
    fn next(&mut self) -> Result<()> {
        assert!(self.valid, "a cursor steps only where it is valid");
        if self.direction == ScanDirection::Forward && self.batch.step() {
            self.prefetcher.prefetch_record(self.tree.region());
            return Ok(());
        }
        self.scan_forward(self.batch.slot_index() + 1)
    }

    #[inline]
    fn prev(&mut self) -> Result<()> {
        assert!(self.valid, "a cursor steps only where it is valid");
        if self.direction == ScanDirection::Backward && self.batch.step() {
            self.prefetcher.prefetch_record(self.tree.region());
            return Ok(());
        }
        self.scan_backward(self.batch.slot_index())
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
        assert!(self.valid, "only a valid cursor stands on an entry");
        self.batch.entry(self.tree.region())
    }
}

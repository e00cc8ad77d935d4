//! Walking over what one point shows.
//!
//! A cursor takes a leaf at a time: its slots, in the order of the keys that they lead to, with those of the versions
//! that the leaf has forgotten. What they lead to is copied in batches; until then it stays readable because the point
//! is registered, also what is newer than the point and is stepped over: whatever replaces that is newer still. It goes
//! on by key, so leaves may be split and merged meanwhile.

use std::cmp::Ordering as Order;
use std::ops::Bound;
use std::sync::Arc;

use crate::base::{EntryRef, KeyRef, RecordKind, Result, SeqNo};
use crate::cursor::Cursor;
use crate::engine::KeyBounds;
use crate::mem::atomic::Ordering;
use crate::pmem::inner::{Goal, head_of};
use crate::pmem::leaf::Spot;
use crate::pmem::leaf::{LEAF_LEN, SLOTS, bits};
use crate::pmem::medium::Medium;
use crate::pmem::record::{Record, Slot};
use crate::pmem::tree::Tree;
use crate::pmem::walk::ahead::{Ahead, fetch};
use crate::pmem::walk::batch::Batch;

/// In the leaf where a walk begins records are fetched so many entries ahead.
const AHEAD: usize = 8;
/// So many records are copied first where a walk begins, each time twice as many as before, and in the leaves that it
/// goes on to all.
const FIRST_BATCH: usize = 8;

/// A shorter beginning that all keys have leaves heads that differ behind it.
const COMMON_MIN: usize = 6;

/// What a cursor shows of a leaf.
#[derive(Default)]
struct View {
    /// The records, by key; what is newer than the point may be among them.
    slots: Vec<Slot>,
    /// What the keys lie between; `None` = nothing. There may be others at the end: while a leaf is split or joined,
    /// keys that belong behind it stand in it still.
    low: Option<Vec<u8>>,
    high: Option<Vec<u8>>,
    /// The head of `high`: a key with a lower one is before it. 0 where heads don't tell.
    high_head: u64,
}

/// A cursor over the newest versions at one registered point, in the order of keys; removed keys are not there.
pub(crate) struct TreeCursor<M: Medium> {
    tree: Arc<Tree<M>>,
    /// Registered by whoever has the cursor, for as long.
    point: SeqNo,
    /// A walk up goes on to no leaf behind the second bound, a walk down to none before the first.
    bounds: (Bound<Vec<u8>>, Bound<Vec<u8>>),
    view: View,
    /// Whether it stands on an entry: one of the batch, whose records are numbered as in the view.
    valid: bool,
    batch: Batch,
    /// Which way the batch goes.
    way: Way,
    /// How many records of the view are copied next.
    want: usize,
    ahead: Ahead,
    /// Whether nobody has fetched the records of this leaf on the way to it.
    cold: bool,
    /// Scratch for sorting.
    records: Vec<Record>,
    sorted: Vec<(u64, u32)>,
}

impl<M: Medium> Tree<M> {
    /// A cursor at a registered point.
    pub(crate) fn cursor(self: &Arc<Self>, point: SeqNo) -> TreeCursor<M> {
        TreeCursor {
            tree: Arc::clone(self),
            point,
            bounds: (Bound::Unbounded, Bound::Unbounded),
            view: View::default(),
            valid: false,
            batch: Batch::default(),
            way: Way::Up,
            want: FIRST_BATCH,
            ahead: Ahead::default(),
            cold: true,
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
enum Way {
    Up,
    Down,
}

impl<M: Medium> TreeCursor<M> {
    /// The same, for a walk that needs no leaf beyond these bounds.
    pub(crate) fn within(mut self, (low, high): KeyBounds<'_>) -> TreeCursor<M> {
        self.bounds = (low.cloned(), high.cloned());
        self
    }

    /// Takes the leaf of `goal`, on the way to one that lies behind or before it.
    fn fill(&mut self, goal: Goal<'_>, way: Way) -> Result<()> {
        (self.valid, self.way, self.want) = (false, way, FIRST_BATCH);
        self.ahead.fetch_all(self.tree.region());
        let TreeCursor { tree, view, ahead, cold, .. } = self;
        let pin = tree.pin()?;
        let (slots, valid, order, number, version) = loop {
            let shape = tree.shape.load(Ordering::Acquire);
            let found = tree.inner.find(goal, &pin);
            let leaf = tree.leaf(Spot(found.leaf));
            tree.region().prefetch(leaf.at, LEAF_LEN);
            let version = tree.orders.version(leaf.order);
            let changes = tree.changes(leaf.at).load(Ordering::Acquire);
            let valid = leaf.commit().valid();
            let slots = leaf.slots();
            let order = tree.orders.get(leaf.order, version);
            if tree.unchanged(leaf.at, changes, shape) {
                copy(found.low, &mut view.low);
                copy(found.high, &mut view.high);
                *cold = !ahead.has(Spot(found.leaf));
                let [next, behind] = [1, 2].map(|n| found.beside(if way == Way::Up { n } else { -n }).map(Spot));
                ahead.begin(tree, next, behind);
                break (slots, valid, order, leaf.order, version);
            }
        };
        let tells = tree.order.is_bytewise() || view.high.is_none();
        view.high_head = if tells { view.high.as_deref().map_or(u64::MAX, |high| head_of(high, 0)) } else { 0 };
        // After the leaf was read: whatever it forgot before is found.
        if !tree.versions.is_empty() && self.with_versions(&slots, valid)? {
            return Ok(());
        }
        let view = &mut self.view;
        view.slots.clear();
        if let Some(order) = order {
            let there = |n: &&u8| usize::from(**n) < SLOTS && valid >> **n & 1 == 1;
            view.slots.extend(order.iter().filter(there).map(|n| Slot(slots[usize::from(*n)])));
            if view.slots.len() == valid.count_ones() as usize {
                return Ok(());
            }
        }
        self.read(&slots, valid, false)?;
        self.sort();
        let TreeCursor { tree, view, records, sorted, .. } = self;
        view.slots.clear();
        view.slots.extend(sorted.iter().map(|(_, n)| records[*n as usize].slot()));
        let numbers: [u8; SLOTS] = {
            let mut numbers = [0; SLOTS];
            bits(valid).zip(&mut numbers).for_each(|(n, to)| *to = n as u8);
            numbers
        };
        tree.orders.set(number, version, sorted.iter().map(|(_, n)| numbers[*n as usize]));
        Ok(())
    }

    /// Reads the heads of the records of a leaf; with `visible` only of those that the point shows.
    fn read(&mut self, slots: &[u64; SLOTS], valid: u64, visible: bool) -> Result<()> {
        let TreeCursor { tree, records, point, cold, .. } = self;
        bits(if *cold { valid } else { 0 }).for_each(|n| fetch(tree.region(), Slot(slots[n])));
        records.clear();
        for n in bits(valid) {
            let record = Record::read(tree.region(), Slot(slots[n]))?;
            if !visible || record.seqno <= *point {
                records.push(record);
            }
        }
        Ok(())
    }

    /// Takes the leaf with the versions that lie in its range: what was visible and is not in the leaf any more. False
    /// if there are none.
    fn with_versions(&mut self, slots: &[u64; SLOTS], valid: u64) -> Result<bool> {
        let (mut tombstones, mut kept) = (Vec::new(), Vec::new());
        let TreeCursor { tree, view, point, bounds: (start, end), .. } = self;
        let (order, end, low, high) = (&tree.order, &*end, view.low.as_deref(), view.high.as_deref());
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
        tree.versions.within(low, is_past, *point, |entry, slot| {
            match slot {
                Some(slot) if entry.kind == RecordKind::Put => kept.push(Record::read(tree.region(), slot)?),
                _ => tombstones.push((entry.user.to_vec(), entry.seqno)),
            }
            Ok(())
        })?;
        if kept.is_empty() && tombstones.is_empty() {
            return Ok(false);
        }
        self.read(slots, valid, true)?;
        self.records.append(&mut kept);
        self.sort();
        self.newest(&tombstones);
        let TreeCursor { view, records, sorted, .. } = self;
        view.slots.clear();
        view.slots.extend(sorted.iter().map(|(_, n)| records[*n as usize].slot()));
        Ok(true)
    }

    /// Sorts the records that were read.
    fn sort(&mut self) {
        let TreeCursor { tree, records, sorted, view, .. } = self;
        let common = match (&view.low, &view.high) {
            (Some(low), Some(high)) if tree.order.is_bytewise() => {
                low.iter().zip(high).take_while(|(a, b)| a == b).count()
            }
            _ => 0,
        };
        // Heads of keys that belong behind the leaf would not be comparable.
        let strangers = |records: &[Record]| match &view.high {
            Some(high) => records.iter().any(|record| tree.cmp_key(record, high).is_ge()),
            _ => false,
        };
        let common = if common < COMMON_MIN || strangers(records) { 0 } else { common };
        tree.sorted(records, common, sorted);
    }

    /// Leaves the newest version of each key, unless it is removed.
    fn newest(&mut self, tombstones: &[(Vec<u8>, SeqNo)]) {
        let TreeCursor { tree, records, sorted, .. } = self;
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
    fn stand(&mut self, mut at: usize) -> Result<bool> {
        let TreeCursor { tree, point, view, batch, ahead, want, way, cold, .. } = self;
        let (region, _pin) = (tree.region(), tree.pin()?);
        loop {
            batch.clear();
            if *want > FIRST_BATCH {
                ahead.look(tree);
            }
            let mut left = *want;
            while left > 0 && at < view.slots.len() {
                if *cold && let Some(slot) = view.slots.get(way.on(at, AHEAD)) {
                    fetch(region, *slot);
                }
                let shown = |key: &[u8], seqno| {
                    seqno <= *point && (head_of(key, 0) < view.high_head || !view.is_behind(tree, key))
                };
                if !batch.take(region, view.slots[at], at, shown)? {
                    break;
                }
                at = way.on(at, 1);
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
    fn up_from(&mut self, mut at: usize) -> Result<()> {
        self.valid = false;
        self.way = Way::Up;
        while !self.stand(at)? {
            let Some(high) = self.view.high.take() else { return Ok(()) };
            // All keys of the leaves behind are at `high` or behind it.
            let ends = match &self.bounds.1 {
                Bound::Unbounded => false,
                Bound::Included(end) => self.tree.order.cmp(&high, end).is_gt(),
                Bound::Excluded(end) => self.tree.order.cmp(&high, end).is_ge(),
            };
            if ends {
                return Ok(());
            }
            self.fill(Goal::At(&high), Way::Up)?;
            self.want = SLOTS;
            at = if self.view.low.as_deref() == Some(&high) { 0 } else { self.rank(KeyRef::first_of(&high))? };
        }
        Ok(())
    }

    /// Stands on the last entry before `end`, in this leaf or before it.
    fn down_from(&mut self, mut end: usize) -> Result<()> {
        self.valid = false;
        self.way = Way::Down;
        while !self.stand(end.wrapping_sub(1))? {
            let Some(low) = self.view.low.take() else { return Ok(()) };
            // All keys of the leaves before are before `low`.
            if let Bound::Included(start) | Bound::Excluded(start) = &self.bounds.0
                && self.tree.order.cmp(&low, start).is_le()
            {
                return Ok(());
            }
            self.fill(Goal::Before(&low), Way::Down)?;
            self.want = SLOTS;
            let all = self.view.high.as_deref() == Some(&low);
            end = if all { self.view.slots.len() } else { self.rank(KeyRef::first_of(&low))? };
        }
        Ok(())
    }

    #[inline]
    fn fetch(&self, at: usize) {
        if let Some(slot) = self.view.slots.get(at) {
            fetch(self.tree.region(), *slot);
        }
    }

    /// How many entries of the view are before `target`.
    fn rank(&self, target: KeyRef<'_>) -> Result<usize> {
        let TreeCursor { tree, view, .. } = self;
        let (slots, _pin) = (&view.slots, tree.pin()?);
        // What the first questions are about, and then what is left, is fetched together.
        for part in 1..8 {
            self.fetch(slots.len() * part / 8);
        }
        let (mut low, mut high) = (0, slots.len());
        for asked in 0.. {
            if low == high {
                break;
            }
            if asked == 3 {
                (low..high).for_each(|at| self.fetch(at));
            }
            let middle = (low + high) / 2;
            let record = Record::read(tree.region(), slots[middle])?;
            let before = match tree.cmp_key(&record, target.user) {
                Order::Equal => record.seqno > target.seqno,
                order => order.is_lt(),
            };
            if before { low = middle + 1 } else { high = middle }
        }
        Ok(low)
    }
}

impl View {
    /// Whether `key` belongs to a leaf behind this one.
    #[cold]
    fn is_behind<M: Medium>(&self, tree: &Tree<M>, key: &[u8]) -> bool {
        self.high.as_deref().is_some_and(|high| tree.order.cmp(key, high).is_ge())
    }
}

impl Way {
    /// The number `n` steps on from `at`; one that nothing has where it would be below 0.
    #[inline]
    fn on(self, at: usize, n: usize) -> usize {
        match self {
            Way::Up => at + n,
            Way::Down => at.wrapping_sub(n),
        }
    }
}

impl<M: Medium> Cursor for TreeCursor<M> {
    fn seek_to_first(&mut self) -> Result<()> {
        self.fill(Goal::First, Way::Up)?;
        self.up_from(0)
    }

    fn seek_to_last(&mut self) -> Result<()> {
        self.fill(Goal::Last, Way::Down)?;
        self.down_from(self.view.slots.len())
    }

    fn seek(&mut self, target: KeyRef<'_>) -> Result<()> {
        self.fill(Goal::At(target.user), Way::Up)?;
        let at = self.rank(target)?;
        (at..at + AHEAD).for_each(|at| self.fetch(at));
        self.up_from(at)
    }

    fn seek_before(&mut self, target: KeyRef<'_>) -> Result<()> {
        self.fill(Goal::At(target.user), Way::Down)?;
        let end = self.rank(target)?;
        (end.saturating_sub(AHEAD)..end).for_each(|at| self.fetch(at));
        self.down_from(end)
    }

    #[inline]
    fn next(&mut self) -> Result<()> {
        assert!(self.valid, "a cursor steps only where it is valid");
        if self.way == Way::Up && self.batch.step() {
            self.ahead.fetch(self.tree.region());
            return Ok(());
        }
        self.up_from(self.batch.number() + 1)
    }

    #[inline]
    fn prev(&mut self) -> Result<()> {
        assert!(self.valid, "a cursor steps only where it is valid");
        if self.way == Way::Down && self.batch.step() {
            self.ahead.fetch(self.tree.region());
            return Ok(());
        }
        self.down_from(self.batch.number())
    }

    #[inline]
    fn forward(&mut self) -> Result<Option<(KeyRef<'_>, RecordKind)>> {
        self.next()?;
        Ok(self.valid.then(|| self.batch.head()))
    }

    #[inline]
    fn lend(&mut self) -> Result<Option<EntryRef<'_>>> {
        self.next()?;
        Ok(self.valid.then(|| self.batch.entry(self.tree.region())))
    }

    #[inline]
    fn valid(&self) -> bool {
        self.valid
    }

    #[inline]
    fn head(&self) -> Option<(KeyRef<'_>, RecordKind)> {
        self.valid.then(|| self.batch.head())
    }

    fn shows_one_point(&self) -> bool {
        true
    }

    #[inline]
    fn entry(&self) -> EntryRef<'_> {
        assert!(self.valid, "only a valid cursor stands on an entry");
        self.batch.entry(self.tree.region())
    }
}

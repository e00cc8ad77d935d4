//! Walking over what one point shows.
//!
//! A cursor takes a leaf at a time: its slots, in the order of the keys that they lead to, with those of the versions
//! that the leaf has forgotten. What it stands on is read when it gets there; until then it stays readable because the
//! point is registered, also what is newer than the point and is stepped over: whatever replaces that is newer still.
//! It goes on by key, so leaves may be split and merged meanwhile.
//!
//! Memory is slow to answer and can be asked many questions at once. So while one leaf is walked over, the records of
//! the one behind it are fetched, a few at each step.

use std::cmp::Ordering as Order;
use std::sync::Arc;

use crate::base::{EntryRef, KeyRef, RecordKind, Result, SeqNo};
use crate::cursor::Cursor;
use crate::mem::atomic::Ordering;
use crate::mem::epoch::Pin;
use crate::mem::region::Region;
use crate::pmem::inner::{Goal, head_of};
use crate::pmem::leaf::Spot;
use crate::pmem::leaf::{LEAF_LEN, SLOTS, bits};
use crate::pmem::medium::Medium;
use crate::pmem::record::{Copied, Record, Slot};
use crate::pmem::tree::Tree;

/// So many bytes of a record are fetched into the cache before it is stood on.
const FETCHED: u64 = 256;
/// In the leaf where a walk begins records are fetched so many entries ahead.
const AHEAD: usize = 8;
/// At this step into a leaf the slots of the next one have arrived; from then on so many of its records are fetched at
/// each. Later in the leaf where a walk begins: it may be a short one.
const NEXT_FROM: usize = 4;
const NEXT_FROM_COLD: usize = 12;
const NEXT_PACE: usize = 2;

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

/// The leaf that a walk comes to next, as far as is known.
#[derive(Default)]
struct Next {
    spot: Option<Spot>,
    /// After so many steps in the leaf before it its slots are looked at; 0 if they were.
    steps: usize,
    slots: Vec<u64>,
    fetched: usize,
}

/// A cursor over the newest versions at one registered point, in the order of keys; removed keys are not there.
pub(crate) struct TreeCursor<M: Medium> {
    tree: Arc<Tree<M>>,
    /// Registered by whoever has the cursor, for as long.
    point: SeqNo,
    view: View,
    /// Index in the view; `None` = not valid.
    at: Option<usize>,
    /// The entry it stands on.
    here: Copied,
    next: Next,
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
            view: View::default(),
            at: None,
            here: Copied::new(),
            next: Next::default(),
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
    /// Takes the leaf of `goal`, on the way to one that lies behind or before it.
    fn fill(&mut self, goal: Goal<'_>, way: Way) -> Result<()> {
        self.at = None;
        let TreeCursor { tree, view, next, cold, .. } = self;
        let pin = Pin::new();
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
                let (before, behind) = found.beside;
                *cold = next.spot != Some(Spot(found.leaf));
                let from = if *cold { NEXT_FROM_COLD } else { NEXT_FROM };
                next.begin(from, tree, if way == Way::Up { behind } else { before });
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
        for n in bits(if *cold { valid } else { 0 }) {
            let slot = Slot(slots[n]);
            tree.region().prefetch(slot.at(), slot.len().unwrap_or(FETCHED).min(FETCHED / 2));
        }
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
        let TreeCursor { tree, view, point, .. } = self;
        tree.versions.within(view.low.as_deref(), view.high.as_deref(), *point, |entry, slot| {
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

    /// Stands on entry `at` of the view, if there is one and it is like most.
    #[inline]
    fn stand_short(&mut self, at: usize) -> bool {
        let TreeCursor { tree, view, here, point, .. } = self;
        let Some(slot) = view.slots.get(at) else { return false };
        if !here.take_short(tree.region(), *slot, *point, view.high_head) {
            return false;
        }
        self.at = Some(at);
        self.next.step(&self.tree);
        true
    }

    /// Stands on entry `at` of the view; false if the point does not show it, or it belongs to the leaf behind.
    fn stand(&mut self, at: usize) -> Result<bool> {
        let TreeCursor { tree, view, here, .. } = self;
        here.take(tree.region(), view.slots[at])?;
        if here.record.seqno > self.point {
            return Ok(false);
        }
        if head_of(here.key(), 0) >= view.high_head && view.is_behind(tree, here.key()) {
            return Ok(false);
        }
        self.at = Some(at);
        Ok(true)
    }

    #[inline]
    fn fetch(&self, at: Option<usize>) {
        if let Some(slot) = at.and_then(|at| self.view.slots.get(at)) {
            fetch(self.tree.region(), *slot);
        }
    }

    /// Stands on the first entry from `at` on, in this leaf or behind it.
    fn up_from(&mut self, mut at: usize) -> Result<()> {
        self.at = None;
        loop {
            while at < self.view.slots.len() {
                self.next.step(&self.tree);
                if self.stand(at)? {
                    return Ok(());
                }
                at += 1;
            }
            let Some(high) = self.view.high.take() else { return Ok(()) };
            self.fill(Goal::At(&high), Way::Up)?;
            at = if self.view.low.as_deref() == Some(&high) { 0 } else { self.rank(KeyRef::first_of(&high))? };
        }
    }

    /// Stands on the last entry before `end`, in this leaf or before it.
    fn down_from(&mut self, mut end: usize) -> Result<()> {
        self.at = None;
        loop {
            while let Some(at) = end.checked_sub(1) {
                self.next.step(&self.tree);
                if self.stand(at)? {
                    return Ok(());
                }
                end = at;
            }
            let Some(low) = self.view.low.take() else { return Ok(()) };
            self.fill(Goal::Before(&low), Way::Down)?;
            let all = self.view.high.as_deref() == Some(&low);
            end = if all { self.view.slots.len() } else { self.rank(KeyRef::first_of(&low))? };
        }
    }

    /// How many entries of the view are before `target`.
    fn rank(&self, target: KeyRef<'_>) -> Result<usize> {
        let TreeCursor { tree, view, .. } = self;
        let slots = &view.slots;
        // What the first questions are about, and then what is left, is fetched together.
        for part in 1..8 {
            self.fetch(Some(slots.len() * part / 8));
        }
        let (mut low, mut high) = (0, slots.len());
        for asked in 0.. {
            if low == high {
                break;
            }
            if asked == 3 {
                (low..high).for_each(|at| self.fetch(Some(at)));
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

impl Next {
    /// Fetches the leaf that comes next, if it is known.
    fn begin<M: Medium>(&mut self, steps: usize, tree: &Tree<M>, leaf: Option<u64>) {
        (self.spot, self.steps, self.fetched) = (leaf.map(Spot), steps, 0);
        self.slots.clear();
        if let Some(spot) = self.spot {
            tree.region().prefetch(spot.leaf(), LEAF_LEN);
            tree.orders.prefetch(spot.number());
        }
    }

    /// Fetches some records of the leaf that comes next. Whether it is one still does not matter: all this is hints.
    #[inline]
    fn step<M: Medium>(&mut self, tree: &Tree<M>) {
        if self.steps > 0 {
            self.steps -= 1;
            if self.steps == 0 {
                self.look(tree);
            }
        }
        if let Some((now, _)) = self.slots.get(self.fetched..).and_then(<[u64]>::split_first_chunk::<NEXT_PACE>) {
            now.iter().for_each(|slot| fetch(tree.region(), Slot(*slot)));
            self.fetched += NEXT_PACE;
        }
    }

    /// Learns which records there are in the leaf that comes next.
    fn look<M: Medium>(&mut self, tree: &Tree<M>) {
        if let Some(spot) = self.spot {
            let leaf = tree.leaf(spot);
            let slots = leaf.slots();
            self.slots.extend(bits(leaf.commit().valid()).map(|n| slots[n]));
            // Whole groups: the last record once more will do no harm.
            let more = self.slots.len().next_multiple_of(NEXT_PACE) - self.slots.len();
            self.slots.extend(self.slots.last().copied().into_iter().cycle().take(more));
        }
    }
}

#[inline]
fn fetch(region: &Region, slot: Slot) {
    region.prefetch(slot.at(), slot.len().unwrap_or(FETCHED).min(FETCHED));
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
        (at..at + AHEAD).for_each(|at| self.fetch(Some(at)));
        self.up_from(at)
    }

    fn seek_before(&mut self, target: KeyRef<'_>) -> Result<()> {
        self.fill(Goal::At(target.user), Way::Down)?;
        let end = self.rank(target)?;
        (end.saturating_sub(AHEAD)..end).for_each(|at| self.fetch(Some(at)));
        self.down_from(end)
    }

    #[inline]
    fn next(&mut self) -> Result<()> {
        let at = self.at.expect("a cursor steps only where it is valid") + 1;
        if self.cold {
            self.fetch(Some(at + AHEAD));
        }
        if self.stand_short(at) { Ok(()) } else { self.up_from(at) }
    }

    #[inline]
    fn prev(&mut self) -> Result<()> {
        let at = self.at.expect("a cursor steps only where it is valid");
        if self.cold {
            self.fetch(at.checked_sub(AHEAD));
        }
        if self.stand_short(at.wrapping_sub(1)) { Ok(()) } else { self.down_from(at) }
    }

    #[inline]
    fn forward(&mut self) -> Result<Option<(KeyRef<'_>, RecordKind)>> {
        self.next()?;
        let Record { seqno, kind, .. } = self.here.record;
        Ok(self.at.map(|_| (KeyRef::new(self.here.key(), seqno), kind)))
    }

    #[inline]
    fn valid(&self) -> bool {
        self.at.is_some()
    }

    #[inline]
    fn entry(&self) -> EntryRef<'_> {
        assert!(self.at.is_some(), "only a valid cursor stands on an entry");
        let Record { seqno, kind, .. } = self.here.record;
        EntryRef { user: self.here.key(), seqno, kind, value: self.here.value(self.tree.region()) }
    }
}

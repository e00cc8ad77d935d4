//! Walking over what one point shows.
//!
//! A cursor takes a leaf at a time: the records that are visible at its point, sorted, with the versions that the leaf
//! has forgotten. They stay readable because the point is registered. It goes on by key, so leaves may be split and
//! merged meanwhile.

use std::cmp::Ordering as Order;
use std::sync::Arc;

use crate::base::{EntryRef, KeyRef, RecordKind, Result, SeqNo};
use crate::cursor::Cursor;
use crate::mem::atomic::Ordering;
use crate::mem::epoch::Pin;
use crate::pmem::inner::Goal;
use crate::pmem::leaf::{LEAF_LEN, bits};
use crate::pmem::medium::Medium;
use crate::pmem::record::{Record, Slot};
use crate::pmem::tree::Tree;

/// Of each record of a leaf so many bytes are fetched into the cache together; of larger ones more, when the cursor is
/// so many entries before it.
const FETCHED: u64 = 128;
const AHEAD: usize = 4;
const FETCHED_AHEAD: u64 = 4096;

/// A shorter beginning that all keys have leaves heads that differ behind it.
const COMMON_MIN: usize = 6;

/// A cursor over the newest versions at one registered point, in the order of keys; removed keys are not there.
pub(crate) struct TreeCursor<M: Medium> {
    tree: Arc<Tree<M>>,
    /// Registered by whoever has the cursor, for as long.
    point: SeqNo,
    slots: Vec<Slot>,
    records: Vec<Record>,
    /// Records in their order, by number.
    sorted: Vec<(u64, u32)>,
    /// What the keys of the leaf lie between; `None` = nothing.
    low: Option<Vec<u8>>,
    high: Option<Vec<u8>>,
    /// Index in `sorted`; `None` = not valid.
    at: Option<usize>,
    key: Vec<u8>,
    value: Vec<u8>,
}

impl<M: Medium> Tree<M> {
    /// A cursor at a registered point.
    pub(crate) fn cursor(self: &Arc<Self>, point: SeqNo) -> TreeCursor<M> {
        TreeCursor {
            tree: Arc::clone(self),
            point,
            slots: Vec::new(),
            records: Vec::new(),
            sorted: Vec::new(),
            low: None,
            high: None,
            at: None,
            key: Vec::new(),
            value: Vec::new(),
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

impl<M: Medium> TreeCursor<M> {
    /// Takes the leaf of `goal`.
    fn fill(&mut self, goal: Goal<'_>) -> Result<()> {
        let tree = Arc::clone(&self.tree);
        let pin = Pin::new();
        loop {
            let shape = tree.shape.load(Ordering::Acquire);
            let found = tree.inner.find(goal, &pin);
            tree.region().prefetch(found.leaf, LEAF_LEN);
            let leaf = tree.leaf(found.leaf);
            let changes = tree.changes(leaf.at).load(Ordering::Acquire);
            let commit = leaf.commit();
            self.slots.clear();
            self.slots.extend(bits(commit.valid()).map(|n| leaf.slot(n)));
            if tree.unchanged(leaf.at, changes, shape) {
                copy(found.low, &mut self.low);
                copy(found.high, &mut self.high);
                break;
            }
        }
        for slot in &self.slots {
            tree.region().prefetch(slot.at(), slot.len().unwrap_or(FETCHED).min(FETCHED));
        }
        self.records.clear();
        for slot in &self.slots {
            let record = Record::read(tree.region(), *slot)?;
            if record.seqno <= self.point {
                self.records.push(record);
            }
        }
        let tombstones = self.add_versions()?;
        self.sort(&tombstones);
        Ok(())
    }

    /// Adds what was visible and is not in the leaf any more; the removals among it. After the leaf was read: whatever
    /// it forgot before is found.
    fn add_versions(&mut self) -> Result<Vec<(Vec<u8>, SeqNo)>> {
        let mut tombstones = Vec::new();
        let TreeCursor { tree, records, .. } = self;
        tree.versions.within(self.low.as_deref(), self.high.as_deref(), self.point, |entry, slot| {
            match slot {
                Some(slot) if entry.kind == RecordKind::Put => records.push(Record::read(tree.region(), slot)?),
                _ => tombstones.push((entry.user.to_vec(), entry.seqno)),
            }
            Ok(())
        })?;
        Ok(tombstones)
    }

    /// Sorts what was collected, and leaves the newest version of each key, unless it is removed.
    fn sort(&mut self, tombstones: &[(Vec<u8>, SeqNo)]) {
        let TreeCursor { tree, records, sorted, .. } = self;
        let common = match (&self.low, &self.high) {
            (Some(low), Some(high)) if tree.order.is_bytewise() => {
                low.iter().zip(high).take_while(|(a, b)| a == b).count()
            }
            _ => 0,
        };
        // While a leaf is split or joined, keys that belong behind it stand in it still: heads would not be comparable.
        let strangers = |records: &[Record]| match &self.high {
            Some(high) => records.iter().any(|record| tree.cmp_key(record, high).is_ge()),
            _ => false,
        };
        let common = if common < COMMON_MIN || strangers(records) { 0 } else { common };
        tree.sorted(records, common, sorted);
        if let Some(high) = &self.high {
            while let Some((_, last)) = sorted.last()
                && tree.cmp_key(&records[*last as usize], high).is_ge()
            {
                sorted.pop();
            }
        }
        if !tree.versions.is_empty() || !tombstones.is_empty() {
            sorted.dedup_by(|b, a| tree.cmp_keys(&records[a.1 as usize], &records[b.1 as usize]).is_eq());
        }
        for (key, seqno) in tombstones {
            let found = sorted.binary_search_by(|(_, n)| tree.cmp_key(&records[*n as usize], key));
            if let Ok(at) = found
                && records[sorted[at].1 as usize].seqno < *seqno
            {
                sorted.remove(at);
            }
        }
    }

    fn record(&self, at: usize) -> &Record {
        &self.records[self.sorted[at].1 as usize]
    }

    /// Stands on entry `at`: copies it out.
    #[inline]
    fn stand(&mut self, at: usize) {
        let TreeCursor { tree, records, sorted, key, value, .. } = self;
        let record = &records[sorted[at].1 as usize];
        record.key(tree.region(), key);
        value.resize(record.value_len, 0);
        tree.region().read(record.value_at(), value);
        self.at = Some(at);
    }

    #[inline]
    fn fetch(&self, at: usize) {
        if let Some((_, n)) = self.sorted.get(at) {
            let record = &self.records[*n as usize];
            let len = record.buffer_len();
            if len > FETCHED {
                self.tree.region().prefetch(record.at, len.min(FETCHED_AHEAD));
            }
        }
    }

    /// Stands on the first entry from `at` on, in this leaf or behind it.
    fn forward_from(&mut self, at: usize) -> Result<()> {
        if at < self.sorted.len() {
            (at..at + AHEAD).for_each(|at| self.fetch(at));
            self.stand(at);
            return Ok(());
        }
        self.at = None;
        while let Some(high) = self.high.take() {
            self.fill(Goal::At(&high))?;
            let at = self.rank(|tree, record| tree.cmp_key(record, &high).is_lt());
            if at < self.sorted.len() {
                (at..at + AHEAD).for_each(|at| self.fetch(at));
                self.stand(at);
                break;
            }
        }
        Ok(())
    }

    /// Stands on the last entry before `end`, in this leaf or before it.
    fn backward_from(&mut self, end: usize) -> Result<()> {
        if let Some(at) = end.checked_sub(1) {
            self.stand(at);
            return Ok(());
        }
        self.at = None;
        while let Some(low) = self.low.take() {
            self.fill(Goal::Before(&low))?;
            let end = self.rank(|tree, record| tree.cmp_key(record, &low).is_lt());
            if let Some(at) = end.checked_sub(1) {
                self.stand(at);
                break;
            }
        }
        Ok(())
    }

    fn rank(&self, before: impl Fn(&Tree<M>, &Record) -> bool) -> usize {
        self.sorted.partition_point(|(_, n)| before(&self.tree, &self.records[*n as usize]))
    }

    /// How many entries of the leaf are before `target`.
    fn rank_of(&self, target: KeyRef<'_>) -> usize {
        self.rank(|tree, record| match tree.cmp_key(record, target.user) {
            Order::Equal => record.seqno > target.seqno,
            order => order.is_lt(),
        })
    }
}

impl<M: Medium> Cursor for TreeCursor<M> {
    fn seek_to_first(&mut self) -> Result<()> {
        self.at = None;
        self.fill(Goal::First)?;
        self.forward_from(0)
    }

    fn seek_to_last(&mut self) -> Result<()> {
        self.at = None;
        self.fill(Goal::Last)?;
        self.backward_from(self.sorted.len())
    }

    fn seek(&mut self, target: KeyRef<'_>) -> Result<()> {
        self.at = None;
        self.fill(Goal::At(target.user))?;
        self.forward_from(self.rank_of(target))
    }

    fn seek_before(&mut self, target: KeyRef<'_>) -> Result<()> {
        self.at = None;
        self.fill(Goal::At(target.user))?;
        self.backward_from(self.rank_of(target))
    }

    #[inline]
    fn next(&mut self) -> Result<()> {
        let at = self.at.expect("a cursor steps only where it is valid") + 1;
        if at < self.sorted.len() {
            self.fetch(at + AHEAD - 1);
            self.stand(at);
            return Ok(());
        }
        self.forward_from(at)
    }

    #[inline]
    fn prev(&mut self) -> Result<()> {
        let at = self.at.expect("a cursor steps only where it is valid");
        if let Some(ahead) = at.checked_sub(AHEAD) {
            self.fetch(ahead);
        }
        self.backward_from(at)
    }

    #[inline]
    fn valid(&self) -> bool {
        self.at.is_some()
    }

    #[inline]
    fn entry(&self) -> EntryRef<'_> {
        let record = self.record(self.at.expect("only a valid cursor stands on an entry"));
        EntryRef { user: &self.key, seqno: record.seqno, kind: record.kind, value: &self.value }
    }
}

//! Splitting full leaves, and joining sparse ones. No key and no value is written: slots move.

use crate::base::{Error, Result};
use crate::mem::atomic::Ordering;
use crate::mem::epoch::Pin;
use crate::pmem::inner::Goal;
use crate::pmem::leaf::Spot;
use crate::pmem::leaf::{Commit, Leaf, SLOTS, VALID, bits};
use crate::pmem::medium::{Counting, Medium, Site};
use crate::pmem::record::{Record, Slot};
use crate::pmem::space::Space;
use crate::pmem::tree::{HEAD, Tree};
use crate::pmem::versions::poisoned;

/// Leaves that are looked at, and freed, by one call of [`Tree::pack`] at most.
const PACK_VISITS: usize = 512;
const PACK_GOAL: usize = 32;

/// A leaf that is not linked yet. Dropped, it is free again.
struct Spare<'a, M: Medium> {
    tree: &'a Tree<M>,
    spot: Spot,
    used: bool,
}

impl<M: Medium> Drop for Spare<'_, M> {
    fn drop(&mut self) {
        if !self.used
            && let Ok(mut space) = self.tree.space()
        {
            space.give_back_leaf(self.spot.leaf());
            self.tree.orders.give_back(self.spot.number());
        }
    }
}

/// The valid slots of a leaf: number, word and fingerprint of each, and what it leads to.
struct Contents {
    slots: Vec<(usize, Slot, u8)>,
    records: Vec<Record>,
}

impl<M: Medium> Tree<M> {
    /// Splits the leaf of `key`, if it is full still, with one that is taken by `take`. Where `key` comes behind all
    /// others of the tree, the leaf stays full and gets an empty one behind it.
    ///
    /// # Errors
    /// Those of `take`; then nothing was changed.
    pub(crate) fn make_room(&self, key: &[u8], take: impl FnOnce(&mut Space, &M) -> Result<u64>) -> Result<()> {
        let at = take(&mut *self.space_after_promises()?, &self.medium)?;
        let spot = self.orders.spot(at);
        let mut spare = Spare { tree: self, spot, used: false };
        let _structure = self.lock_structure()?;
        let leaf = self.leaf(Spot(self.inner.leaf(Goal::At(key), &Pin::new())));
        let _locked = self.lock_both(leaf.at, at)?;
        let commit = leaf.commit();
        if commit.count() + 1 < self.slots {
            return Ok(());
        }
        let next = self.next_of(leaf)?;
        let contents = self.contents(leaf, commit)?;
        let mut sorted = Vec::new();
        self.sorted(&contents.records, 0, &mut sorted);
        let last = &contents.records[sorted[sorted.len() - 1].1 as usize];
        let at_the_end = next == 0 && self.cmp_key(last, key).is_lt();
        let keep = if at_the_end { sorted.len() } else { sorted.len().div_ceil(2) };
        let moved: Vec<usize> = sorted[keep..].iter().map(|(_, n)| *n as usize).collect();
        let mut first = key.to_vec();
        if let Some(n) = moved.first() {
            contents.records[*n].key(self.region(), &mut first);
        }
        let mut before = Vec::new();
        contents.records[sorted[keep - 1].1 as usize].key(self.region(), &mut before);

        let medium = Counting::new(&self.medium);
        self.fill_new(&medium, spot, &contents, &moved, next);
        self.inner.insert(self.separator(&before, &first), spot.0);
        self.reshaped();
        self.open(leaf);
        let next = (leaf.next_at(), self.seal.next_word(leaf.at, at));
        if moved.is_empty() {
            medium.publish(next.0, next.1);
        } else {
            let left = moved.iter().fold(commit, |commit, n| {
                let (n, slot, print) = contents.slots[*n];
                commit.flipped(n, self.seal.of_slot(leaf.at, n, print, slot))
            });
            medium.publish_both(next, (leaf.at, left.0), Site::SplitLink);
        }
        medium.flush(leaf.at, 16, Site::SplitCommit);
        medium.fence(Site::SplitDone);
        spare.used = true;
        self.splits.add(medium.so_far());
        self.leaves.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Writes a leaf that nobody knows of yet: the slots `moved` of `contents`, and what comes behind it.
    fn fill_new(&self, medium: &Counting<'_, M>, spot: Spot, contents: &Contents, moved: &[usize], next: u64) {
        let (leaf, at) = (self.leaf(spot), spot.leaf());
        let mut commit = Commit::empty(self.seal, at);
        let mut prints = [0; SLOTS];
        for (n, from) in moved.iter().enumerate() {
            let (_, slot, print) = contents.slots[*from];
            medium.store(leaf.slot_at(n), slot.0);
            prints[n] = print;
            commit = commit.flipped(n, self.seal.of_slot(at, n, print, slot));
        }
        for (n, bytes) in prints.chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
            medium.store(leaf.print_at(8 * n), word);
        }
        medium.store(leaf.next_at(), self.seal.next_word(at, next));
        medium.publish(at, commit.0);
        medium.flush(at, leaf.slot_at(moved.len()) - at, Site::SplitLeaf);
        medium.fence(Site::SplitReady);
    }

    /// A key behind `before` and not behind `first`, as short as the order allows.
    pub(crate) fn separator<'k>(&self, before: &[u8], first: &'k [u8]) -> &'k [u8] {
        if !self.order.is_bytewise() {
            return first;
        }
        let common = before.iter().zip(first).take_while(|(a, b)| a == b).count();
        &first[..(common + 1).min(first.len())]
    }

    fn next_of(&self, leaf: Leaf<'_>) -> Result<u64> {
        let lost = || Error::corruption("check of the next leaf does not match").at_offset(leaf.next_at());
        leaf.next(self.seal).ok_or_else(lost)
    }

    /// What is in a leaf whose lock is held.
    fn contents(&self, leaf: Leaf<'_>, commit: Commit) -> Result<Contents> {
        let (mut slots, mut records) = (Vec::with_capacity(SLOTS), Vec::with_capacity(SLOTS));
        slots.extend(bits(commit.valid()).map(|n| (n, leaf.slot(n), leaf.print(n))));
        for (_, slot, _) in &slots {
            self.region().prefetch(slot.at(), 64);
        }
        for (_, slot, _) in &slots {
            records.push(Record::read(self.region(), *slot)?);
        }
        Ok(Contents { slots, records })
    }

    /// Unlinks the leaf of `key` if it is empty, or joins it with a neighbour if both are sparse.
    pub(crate) fn make_dense(&self, key: &[u8]) -> Result<()> {
        let _structure = self.structure.lock().map_err(poisoned)?;
        let pin = Pin::new();
        let found = self.inner.find(Goal::At(key), &pin);
        let (low, high) = (found.low.map(<[u8]>::to_vec), found.high.map(<[u8]>::to_vec));
        let leaf = Spot(found.leaf);
        let (left, right) = self.inner.neighbours(key, &pin);
        let (left, right) = (left.map(Spot), right.map(Spot));
        drop(pin);
        let count = self.leaf(leaf).commit().count();
        if let (0, Some(low)) = (count, &low) {
            let before = Spot(self.inner.leaf(Goal::Before(low), &Pin::new()));
            return self.unlink(before, leaf, key);
        }
        if count > self.slots / 4 {
            return Ok(());
        }
        // Not so many that they would soon be split again.
        let most = self.slots * 5 / 8;
        match (left, right, high) {
            (Some(left), _, _) if self.fit_into(left, leaf, most) => self.join(left, leaf, key, most).map(drop),
            (_, Some(right), Some(high)) if self.fit_into(leaf, right, most) => {
                self.join(leaf, right, &high, most).map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Makes sparse leaves denser, because the pool has no space: fills them from the leaves behind them, and goes on
    /// where the last call ended. Looks at [`PACK_VISITS`] of them at most. Returns the number of leaves that it freed.
    ///
    /// # Errors
    /// `Corruption` if the pool is not what was written.
    pub(crate) fn pack(&self) -> Result<usize> {
        let mut packing = self.packing.lock().map_err(poisoned)?;
        let (records, leaves) = (self.len(), self.leaves.load(Ordering::Acquire));
        // Of all together: where new leaves are full, old ones may be sparse.
        let dense = leaves * (self.slots as u64 - 1) * 15 / 16;
        let state = (records, leaves, self.space()?.has_packing_leaf());
        if packing.state != state {
            (packing.state, packing.barren) = (state, 0);
        }
        if records > dense {
            return Ok(0);
        }
        let (mut freed, mut visited) = (0, 0);
        while visited < PACK_VISITS && freed < PACK_GOAL && packing.barren <= leaves {
            visited += 1;
            // While readers hold the leaf that the last shift freed, leaves are left sparse. When it is back, the state
            // differs from this one, and packing begins anew.
            packing.state.2 &= self.space()?.has_packing_leaf();
            let (gained, next) = self.pack_at(packing.next.as_deref())?;
            packing.next = next;
            packing.barren = if gained { 0 } else { packing.barren + 1 };
            freed += usize::from(gained);
        }
        Ok(freed)
    }

    /// Joins the leaf of `key`, or the first leaf, with the one behind it, or fills it from there. Returns whether a
    /// leaf was freed, and a key of the leaf to go on with, none behind the last one.
    fn pack_at(&self, key: Option<&[u8]>) -> Result<(bool, Option<Vec<u8>>)> {
        let _structure = self.lock_structure()?;
        let pin = Pin::new();
        let found = self.inner.find(key.map_or(Goal::First, Goal::At), &pin);
        let (left, right) = (Spot(found.leaf), found.beside(1).map(Spot));
        let high = found.high.map(<[u8]>::to_vec);
        drop(pin);
        let (Some(right), Some(high)) = (right, &high) else { return Ok((false, high)) };
        let full = self.slots - 1;
        if self.fit_into(left, right, full) {
            let joined = self.join(left, right, high, full)?;
            return Ok((joined, if joined { key.map(<[u8]>::to_vec) } else { Some(high.clone()) }));
        }
        let few = self.leaf(left).commit().count() + self.slots / 8 < full;
        let moved = if few { self.shift(left, right, high, full)? } else { None };
        Ok((false, moved.or_else(|| Some(high.clone()))))
    }

    /// Whether two leaves together have no more than so many records.
    fn fit_into(&self, left: Spot, right: Spot, most: usize) -> bool {
        self.leaf(left).commit().count() + self.leaf(right).commit().count() <= most
    }

    /// Takes `leaf`, where `key` would be, out of the chain if it is empty still.
    fn unlink(&self, before: Spot, leaf: Spot, key: &[u8]) -> Result<()> {
        let locked = self.lock_both(before.leaf(), leaf.leaf())?;
        let (before, leaf) = (self.leaf(before), self.leaf(leaf));
        if leaf.commit().count() != 0 || leaf.at == HEAD || self.next_of(before)? != leaf.at {
            return Ok(());
        }
        let next = self.next_of(leaf)?;
        self.medium.publish(before.next_at(), self.seal.next_word(before.at, next));
        self.medium.flush(before.next_at(), 8, Site::UnlinkCommit);
        self.medium.fence(Site::UnlinkDone);
        self.forget_leaf(leaf, key)?;
        drop(locked);
        Ok(())
    }

    /// Moves what is in `right` to `left`, the leaf before it on the same node; `key` is one that belongs to `right`.
    /// False if they do not fit any more.
    fn join(&self, left: Spot, right: Spot, key: &[u8], most: usize) -> Result<bool> {
        let locked = self.lock_both(left.leaf(), right.leaf())?;
        if self.next_of(self.leaf(left))? != right.leaf() || !self.fit_into(left, right, most) {
            return Ok(false);
        }
        let (left, right) = (self.leaf(left), self.leaf(right));
        let next = self.next_of(right)?;
        self.append(left, bits(right.commit().valid()).map(|n| (right.slot(n), right.print(n))), next);
        self.forget_leaf(right, key)?;
        drop(locked);
        Ok(true)
    }

    /// Moves the first records of `right` to `left`, the leaf before it on the same node, which has `target` then, and
    /// the others to a new leaf in the place of `right`. Returns what separates the two, none if that cannot be done
    /// now. `high` is what separated `left` and `right`.
    fn shift(&self, left: Spot, right: Spot, high: &[u8], target: usize) -> Result<Option<Vec<u8>>> {
        let Some(at) = self.space()?.take_packing_leaf() else { return Ok(None) };
        let mut spare = Spare { tree: self, spot: self.orders.spot(at), used: false };
        let locked = self.lock_both(left.leaf(), right.leaf())?;
        let (left, right) = (self.leaf(left), self.leaf(right));
        let contents = self.contents(right, right.commit())?;
        let count = target.saturating_sub(left.commit().count());
        if self.next_of(left)? != right.at || count == 0 || count >= contents.slots.len() {
            return Ok(None);
        }
        let mut sorted = Vec::new();
        self.sorted(&contents.records, 0, &mut sorted);
        let order: Vec<usize> = sorted.iter().map(|(_, n)| *n as usize).collect();
        let (moved, rest) = order.split_at(count);
        let (mut before, mut first) = (Vec::new(), Vec::new());
        contents.records[moved[count - 1]].key(self.region(), &mut before);
        contents.records[rest[0]].key(self.region(), &mut first);
        let separator = self.separator(&before, &first).to_vec();

        self.fill_new(&Counting::new(&self.medium), spare.spot, &contents, rest, self.next_of(right)?);
        let slots = moved.iter().map(|n| (contents.slots[*n].1, contents.slots[*n].2));
        // From here on the leaf is in the chain, also if the comparator panics below.
        spare.used = true;
        self.append(left, slots, at);
        self.inner.replace(high, &separator, spare.spot.0);
        self.reshaped();
        self.orders.give_back(right.order);
        self.space()?.retire_leaf(right.at);
        drop(locked);
        #[cfg(test)]
        self.shifts.fetch_add(1, Ordering::Relaxed);
        Ok(Some(separator))
    }

    /// Adds slots, with their fingerprints, to the leaf `left`, whose lock is held, and makes `next` the one behind it.
    fn append(&self, left: Leaf<'_>, slots: impl Iterator<Item = (Slot, u8)>, next: u64) {
        let mut commit = left.commit();
        self.open(left);
        let free: Vec<usize> = bits(!commit.valid() & VALID).collect();
        let mut prints = [0; SLOTS / 8];
        for ((slot, print), to) in slots.zip(free) {
            self.medium.store(left.slot_at(to), slot.0);
            self.medium.flush(left.slot_at(to), 8, Site::MergeSlots);
            self.medium.store(left.print_at(to), left.print_word(to, print));
            prints[to / 8] = left.print_at(to);
            commit = commit.flipped(to, self.seal.of_slot(left.at, to, print, slot));
        }
        for at in prints.into_iter().filter(|at| *at != 0) {
            self.medium.flush_words(at, 8, Site::MergeHeader);
        }
        self.medium.fence(Site::MergeReady);
        let next = (left.next_at(), self.seal.next_word(left.at, next));
        self.medium.publish_both((left.at, commit.0), next, Site::MergeJoin);
        self.medium.flush(left.at, 16, Site::MergeCommit);
        self.medium.fence(Site::MergeDone);
    }

    /// Lets nobody come to `leaf`, where `key` belonged, any more; it is free when those who are there have left.
    fn forget_leaf(&self, leaf: Leaf<'_>, key: &[u8]) -> Result<()> {
        self.inner.remove(key);
        self.reshaped();
        self.leaves.fetch_sub(1, Ordering::Release);
        self.orders.give_back(leaf.order);
        self.space()?.retire_leaf(leaf.at);
        Ok(())
    }
}

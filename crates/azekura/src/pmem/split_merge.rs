//! Splits full leaves and merges sparse ones. Both move slots only; no key and no value is written.

use crate::base::{Error, Result};
use crate::mem::atomic::Ordering;
use crate::mem::epoch::Pin;
use crate::pmem::allocator::Allocator;
use crate::pmem::inner::LeafTarget;
use crate::pmem::leaf::LeafAddr;
use crate::pmem::leaf::{LeafCommitWord, PoolLeaf, SLOTS, VALID_SLOTS_MASK, set_bits};
use crate::pmem::persistence::{CountingBackend, PersistSite, PersistenceBackend};
use crate::pmem::record::{LeafSlot, PoolRecord};
use crate::pmem::tree::{HEAD_LEAF_OFFSET, PoolTree, StructureGuard};
use crate::pmem::versions::poisoned;

/// Maximum number of leaves that one call of [`PoolTree::merge_sparse_leaves`] visits, and frees.
const MERGE_VISITS_MAX: usize = 512;
const MERGE_FREED_MAX: usize = 32;

/// A leaf that is not linked into the chain yet. Frees the leaf when dropped.
struct UnlinkedLeaf<'a, M: PersistenceBackend> {
    tree: &'a PoolTree<M>,
    addr: LeafAddr,
    is_linked: bool,
}

impl<M: PersistenceBackend> Drop for UnlinkedLeaf<'_, M> {
    fn drop(&mut self) {
        if !self.is_linked
            && let Ok(mut space) = self.tree.lock_allocator()
        {
            space.free_leaf(self.addr.offset());
            self.tree.leaf_orders.free_id(self.addr.order_id());
        }
    }
}

/// The valid slots of a leaf (index, word and fingerprint of each) and the records that they point to.
pub(crate) struct LeafContents {
    pub(crate) slots: Vec<(usize, LeafSlot, u8)>,
    pub(crate) records: Vec<PoolRecord>,
}

impl<M: PersistenceBackend> PoolTree<M> {
    /// Splits the leaf of `key`, if it is still full, into itself and a leaf that `take` allocates. If `key` is
    /// behind all other keys of the tree, the leaf stays full and gets an empty successor.
    ///
    /// # Errors
    /// Those of `take`, `Closed`, and `Corruption`; then nothing was changed.
    pub(crate) fn split_leaf(&self, key: &[u8], take: impl FnOnce(&mut Allocator, &M) -> Result<u64>) -> Result<()> {
        let at = take(&mut *self.allocator_after_releases()?, &self.backend)?;
        let addr = self.leaf_orders.new_leaf_addr(at);
        let mut spare = UnlinkedLeaf { tree: self, addr, is_linked: false };
        let structure = self.lock_structure()?;
        let leaf = self.leaf(LeafAddr(self.inner.find_leaf(LeafTarget::Key(key), &Pin::new())));
        let _locked = self.lock_two_leaves(&structure, leaf.offset, at)?;
        let commit = leaf.commit_word();
        if commit.count() + 1 < self.slots_per_leaf {
            return Ok(());
        }
        let next = self.next_leaf_of(leaf)?;
        let contents = self.read_leaf(leaf, commit)?;
        let mut sorted = Vec::new();
        self.sort_records(&contents.records, 0, &mut sorted);
        let last = &contents.records[sorted[sorted.len() - 1].1 as usize];
        let at_the_end = next == 0 && self.cmp_key(last, key).is_lt();
        let keep = if at_the_end { sorted.len() } else { sorted.len().div_ceil(2) };
        debug_assert!(keep > 0, "the leaf keeps a record");
        let moved: Vec<usize> = sorted[keep..].iter().map(|(_, n)| *n as usize).collect();
        let mut first = key.to_vec();
        if let Some(n) = moved.first() {
            contents.records[*n].read_key(self.region(), &mut first);
        }
        let mut before = Vec::new();
        contents.records[sorted[keep - 1].1 as usize].read_key(self.region(), &mut before);

        let backend = CountingBackend::new(&self.backend);
        self.write_new_leaf(&backend, addr, &contents, &moved, next);
        self.inner.insert(self.separator(&before, &first), addr.0);
        self.bump_structure_version();
        self.begin_slot_write(leaf);
        let next = (leaf.next_offset(), self.check_seed.next_word(leaf.offset, at));
        if moved.is_empty() {
            backend.publish(next.0, next.1);
        } else {
            let remaining = moved.iter().fold(commit, |commit, n| {
                let (n, slot, fingerprint) = contents.slots[*n];
                commit.flipped(n, self.check_seed.slot_check(leaf.offset, n, fingerprint, slot))
            });
            backend.publish_both(next, (leaf.offset, remaining.0), PersistSite::SplitLink);
        }
        backend.flush(leaf.offset, 16, PersistSite::SplitCommit);
        backend.fence(PersistSite::SplitDone);
        spare.is_linked = true;
        self.split_stats.add(backend.counts());
        self.leaf_count.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Writes an unpublished leaf: the slots `moved` of `contents`, and the pointer to its successor.
    fn write_new_leaf(
        &self,
        backend: &CountingBackend<'_, M>,
        addr: LeafAddr,
        contents: &LeafContents,
        moved: &[usize],
        next: u64,
    ) {
        let (leaf, at) = (self.leaf(addr), addr.offset());
        let mut commit = LeafCommitWord::empty(self.check_seed, at);
        let mut fingerprints = [0; SLOTS];
        debug_assert!(moved.len() < SLOTS, "one slot of a leaf stays free");
        for (n, from) in moved.iter().enumerate() {
            let (_, slot, fingerprint) = contents.slots[*from];
            backend.store(leaf.slot_offset(n), slot.0);
            fingerprints[n] = fingerprint;
            commit = commit.flipped(n, self.check_seed.slot_check(at, n, fingerprint, slot));
        }
        for (n, bytes) in fingerprints.chunks_exact(8).enumerate() {
            let word = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
            backend.store(leaf.fingerprint_offset(8 * n), word);
        }
        backend.store(leaf.next_offset(), self.check_seed.next_word(at, next));
        backend.publish(at, commit.0);
        backend.flush(at, leaf.slot_offset(moved.len()) - at, PersistSite::SplitLeaf);
        backend.fence(PersistSite::SplitReady);
    }

    /// The shortest key that is behind `before` and not behind `first`; `first` itself if the key order is not
    /// bytewise.
    pub(crate) fn separator<'k>(&self, before: &[u8], first: &'k [u8]) -> &'k [u8] {
        if !self.key_order.is_bytewise() {
            return first;
        }
        let common = before.iter().zip(first).take_while(|(a, b)| a == b).count();
        &first[..(common + 1).min(first.len())]
    }

    pub(crate) fn next_leaf_of(&self, leaf: PoolLeaf<'_>) -> Result<u64> {
        let lost = || Error::corruption("check of the next leaf does not match").at_offset(leaf.next_offset());
        leaf.next_leaf(self.check_seed).ok_or_else(lost)
    }

    /// Reads the valid slots of a leaf and their records, while the leaf is locked.
    pub(crate) fn read_leaf(&self, leaf: PoolLeaf<'_>, commit: LeafCommitWord) -> Result<LeafContents> {
        let (mut slots, mut records) = (Vec::with_capacity(SLOTS), Vec::with_capacity(SLOTS));
        slots.extend(leaf.valid_slots(commit));
        for (_, slot, _) in &slots {
            self.region().prefetch(slot.offset(), 1);
        }
        for (_, slot, _) in &slots {
            records.push(PoolRecord::read(self.region(), *slot)?);
        }
        Ok(LeafContents { slots, records })
    }

    /// Unlinks the leaf of `key` if it is empty, or merges it with an adjacent leaf if both are sparse.
    pub(crate) fn merge_or_unlink_leaf(&self, key: &[u8]) -> Result<()> {
        let structure = self.structure_lock.lock().map_err(poisoned)?;
        let pin = Pin::new();
        let found = self.inner.find_position(LeafTarget::Key(key), &pin);
        let (low, high) = (found.low.map(<[u8]>::to_vec), found.high.map(<[u8]>::to_vec));
        let leaf = LeafAddr(found.leaf);
        let (left, right) = self.inner.neighbours(key, &pin);
        let (left, right) = (left.map(LeafAddr), right.map(LeafAddr));
        drop(pin);
        let count = self.leaf(leaf).commit_word().count();
        if let (0, Some(low)) = (count, &low) {
            let before = LeafAddr(self.inner.find_leaf(LeafTarget::BeforeKey(low), &Pin::new()));
            return self.unlink(&structure, before, leaf, key);
        }
        if count > self.slots_per_leaf / 4 {
            return Ok(());
        }
        // A merged leaf keeps free slots, so that it is not split again soon.
        let records_max = self.slots_per_leaf * 5 / 8;
        match (left, right, high) {
            (Some(left), _, _) if self.fit_in_one_leaf(left, leaf, records_max) => {
                self.merge_leaves(&structure, left, leaf, key, records_max).map(drop)
            }
            (_, Some(right), Some(high)) if self.fit_in_one_leaf(leaf, right, records_max) => {
                self.merge_leaves(&structure, leaf, right, &high, records_max).map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Packs sparse leaves because the pool is out of space: fills them from the leaves behind them, and continues
    /// where the last call ended. Visits at most [`MERGE_VISITS_MAX`] leaves. Returns the number of leaves that it
    /// freed.
    ///
    /// # Errors
    /// `Corruption` if the bytes of the pool are not valid, `Closed` after [`stop_writes`](PoolTree::stop_writes).
    pub(crate) fn merge_sparse_leaves(&self) -> Result<usize> {
        let mut packing = self.merge_progress.lock().map_err(poisoned)?;
        let (records, leaves) = (self.len(), self.leaf_count.load(Ordering::Acquire));
        // The limit is for the average of all leaves, because old leaves may be sparse where new ones are full.
        let dense = leaves * (self.slots_per_leaf as u64 - 1) * 15 / 16;
        let state = (records, leaves, self.lock_allocator()?.has_merge_leaf());
        if packing.state != state {
            (packing.state, packing.visited_without_gain) = (state, 0);
        }
        if records > dense {
            return Ok(0);
        }
        let (mut freed, mut visited) = (0, 0);
        while visited < MERGE_VISITS_MAX && freed < MERGE_FREED_MAX && packing.visited_without_gain <= leaves {
            visited += 1;
            // While readers hold the leaf that the last shift freed, leaves stay sparse. Once that leaf is free
            // again, the state differs from this one, and packing begins anew.
            packing.state.2 &= self.lock_allocator()?.has_merge_leaf();
            let (gained, next) = self.merge_sparse_leaf(packing.next_key.as_deref())?;
            packing.next_key = next;
            packing.visited_without_gain = if gained { 0 } else { packing.visited_without_gain + 1 };
            freed += usize::from(gained);
        }
        Ok(freed)
    }

    /// Merges the leaf of `key`, or the first leaf, with the leaf behind it, or fills it from that leaf. Returns
    /// whether a leaf was freed, and a key of the leaf to continue with, or `None` after the last leaf.
    fn merge_sparse_leaf(&self, key: Option<&[u8]>) -> Result<(bool, Option<Vec<u8>>)> {
        let structure = self.lock_structure()?;
        let pin = Pin::new();
        let found = self.inner.find_position(key.map_or(LeafTarget::First, LeafTarget::Key), &pin);
        let (left, right) = (LeafAddr(found.leaf), found.sibling(1).map(LeafAddr));
        let high = found.high.map(<[u8]>::to_vec);
        drop(pin);
        let (Some(right), Some(high)) = (right, &high) else { return Ok((false, high)) };
        let full = self.slots_per_leaf - 1;
        if self.fit_in_one_leaf(left, right, full) {
            let joined = self.merge_leaves(&structure, left, right, high, full)?;
            return Ok((joined, if joined { key.map(<[u8]>::to_vec) } else { Some(high.clone()) }));
        }
        let is_sparse = self.leaf(left).commit_word().count() + self.slots_per_leaf / 8 < full;
        let moved = if is_sparse { self.shift_records(&structure, left, right, high, full)? } else { None };
        Ok((false, moved.or_else(|| Some(high.clone()))))
    }

    /// Whether two leaves together have at most `records_max` records.
    fn fit_in_one_leaf(&self, left: LeafAddr, right: LeafAddr, records_max: usize) -> bool {
        self.leaf(left).commit_word().count() + self.leaf(right).commit_word().count() <= records_max
    }

    /// Removes `leaf`, the leaf of `key`, from the chain if it is still empty.
    fn unlink(&self, structure: &StructureGuard<'_>, before: LeafAddr, leaf: LeafAddr, key: &[u8]) -> Result<()> {
        let locked = self.lock_two_leaves(structure, before.offset(), leaf.offset())?;
        let (before, leaf) = (self.leaf(before), self.leaf(leaf));
        if leaf.commit_word().count() != 0
            || leaf.offset == HEAD_LEAF_OFFSET
            || self.next_leaf_of(before)? != leaf.offset
        {
            return Ok(());
        }
        let next = self.next_leaf_of(leaf)?;
        self.backend.publish(before.next_offset(), self.check_seed.next_word(before.offset, next));
        self.backend.flush(before.next_offset(), 8, PersistSite::UnlinkCommit);
        self.backend.fence(PersistSite::UnlinkDone);
        self.retire_leaf(leaf, key)?;
        drop(locked);
        Ok(())
    }

    /// Moves the slots of `right` to `left`, the leaf before it with the same parent node. `key` belongs to `right`.
    /// Returns false if the slots do not fit any more.
    fn merge_leaves(
        &self,
        structure: &StructureGuard<'_>,
        left: LeafAddr,
        right: LeafAddr,
        key: &[u8],
        records_max: usize,
    ) -> Result<bool> {
        debug_assert!(records_max < self.slots_per_leaf, "one slot of a leaf stays free");
        let locked = self.lock_two_leaves(structure, left.offset(), right.offset())?;
        if self.next_leaf_of(self.leaf(left))? != right.offset() || !self.fit_in_one_leaf(left, right, records_max) {
            return Ok(false);
        }
        let (left, right) = (self.leaf(left), self.leaf(right));
        let next = self.next_leaf_of(right)?;
        self.append(
            left,
            right.valid_slots(right.commit_word()).map(|(_, slot, fingerprint)| (slot, fingerprint)),
            next,
        );
        self.retire_leaf(right, key)?;
        drop(locked);
        Ok(true)
    }

    /// Moves the first records of `right` to `left`, the leaf before it with the same parent node, until `left` has
    /// `target` records, and the others to a new leaf that replaces `right`. `high` is the separator between `left`
    /// and `right`. Returns the new separator, or `None` if the shift is not possible now.
    fn shift_records(
        &self,
        structure: &StructureGuard<'_>,
        left: LeafAddr,
        right: LeafAddr,
        high: &[u8],
        target: usize,
    ) -> Result<Option<Vec<u8>>> {
        let Some(at) = self.lock_allocator()?.take_merge_leaf() else { return Ok(None) };
        let mut spare = UnlinkedLeaf { tree: self, addr: self.leaf_orders.new_leaf_addr(at), is_linked: false };
        let locked = self.lock_two_leaves(structure, left.offset(), right.offset())?;
        let (left, right) = (self.leaf(left), self.leaf(right));
        let contents = self.read_leaf(right, right.commit_word())?;
        let count = target.saturating_sub(left.commit_word().count());
        if self.next_leaf_of(left)? != right.offset || count == 0 || count >= contents.slots.len() {
            return Ok(None);
        }
        let mut sorted = Vec::new();
        self.sort_records(&contents.records, 0, &mut sorted);
        let order: Vec<usize> = sorted.iter().map(|(_, n)| *n as usize).collect();
        let (moved, rest) = order.split_at(count);
        let (mut before, mut first) = (Vec::new(), Vec::new());
        contents.records[moved[count - 1]].read_key(self.region(), &mut before);
        contents.records[rest[0]].read_key(self.region(), &mut first);
        let separator = self.separator(&before, &first).to_vec();

        self.write_new_leaf(
            &CountingBackend::new(&self.backend),
            spare.addr,
            &contents,
            rest,
            self.next_leaf_of(right)?,
        );
        let slots = moved.iter().map(|n| (contents.slots[*n].1, contents.slots[*n].2));
        // From here on the leaf is linked into the chain, even if the comparator panics below.
        spare.is_linked = true;
        self.append(left, slots, at);
        self.inner.replace(high, &separator, spare.addr.0);
        self.bump_structure_version();
        self.leaf_orders.free_id(right.order_id);
        self.lock_allocator()?.retire_leaf(right.offset);
        drop(locked);
        #[cfg(test)]
        self.shifts.fetch_add(1, Ordering::Relaxed);
        Ok(Some(separator))
    }

    /// Adds slots, with their fingerprints, to the leaf `left`, and makes `next` its successor.
    fn append(&self, left: PoolLeaf<'_>, slots: impl Iterator<Item = (LeafSlot, u8)>, next: u64) {
        let mut commit = left.commit_word();
        self.begin_slot_write(left);
        let free: Vec<usize> = set_bits(!commit.valid_slots() & VALID_SLOTS_MASK).collect();
        let mut fingerprints = [0; SLOTS / 8];
        for ((slot, fingerprint), to) in slots.zip(free) {
            self.backend.store(left.slot_offset(to), slot.0);
            self.backend.flush(left.slot_offset(to), 8, PersistSite::MergeSlots);
            self.backend.store(left.fingerprint_offset(to), left.fingerprint_word(to, fingerprint));
            fingerprints[to / 8] = left.fingerprint_offset(to);
            commit = commit.flipped(to, self.check_seed.slot_check(left.offset, to, fingerprint, slot));
        }
        debug_assert!(commit.count() < SLOTS, "one slot of a leaf stays free");
        for at in fingerprints.into_iter().filter(|at| *at != 0) {
            self.backend.flush_words(at, 8, PersistSite::MergeHeader);
        }
        self.backend.fence(PersistSite::MergeReady);
        let next = (left.next_offset(), self.check_seed.next_word(left.offset, next));
        self.backend.publish_both((left.offset, commit.0), next, PersistSite::MergeLink);
        self.backend.flush(left.offset, 16, PersistSite::MergeCommit);
        self.backend.fence(PersistSite::MergeDone);
    }

    /// Makes `leaf`, to which `key` belonged, unreachable. Its space is free once its current readers have unpinned.
    fn retire_leaf(&self, leaf: PoolLeaf<'_>, key: &[u8]) -> Result<()> {
        self.inner.remove(key);
        self.bump_structure_version();
        let leaves = self.leaf_count.fetch_sub(1, Ordering::Release);
        debug_assert!(leaves > 1, "the first leaf of a pool stays");
        self.leaf_orders.free_id(leaf.order_id);
        self.lock_allocator()?.retire_leaf(leaf.offset);
        Ok(())
    }
}

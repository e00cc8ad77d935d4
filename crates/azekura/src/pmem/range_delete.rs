//! Range deletes of a pool: hiding the covered records from readers that see the range delete, then removing them.
//!
//! The leaves below one node of the lowest level are changed together. A leaf whose every record is covered is
//! unlinked: one store passes it and the leaves beside it in the chain, whatever number of records they have. From
//! other leaves one store of the commit word removes the covered records. The first leaf of a pool is never unlinked.
//!
//! Leaves inside of a range are not read record by record if no reader needs a covered record and no record can be
//! newer than the range delete. Otherwise each record is read: it stays if it is newer, and is retained for older
//! readers. The memory for these is reserved before the commit is logged, mostly without reading a record.

use crate::base::key::KEY_LEN_MAX;
use crate::base::key_range::{KeyBoundary, KeyRange, RangeTombstone};
use crate::base::{EntryRef, Error, RecordKind, Result, SeqNo};
use crate::mem::atomic::Ordering;
use crate::mem::epoch::Pin;
use crate::pmem::allocator::PoolRange;
use crate::pmem::inner::{LeafPosition, LeafTarget};
use crate::pmem::leaf::{LeafAddr, PoolLeaf, set_bits};
use crate::pmem::persistence::{PersistSite, PersistenceBackend};
use crate::pmem::record::PoolRecord;
use crate::pmem::tree::{HEAD_LEAF_OFFSET, PoolTree};
use crate::pmem::versions::{RetainedVersions, poisoned};

/// What the removal of covered records has freed.
#[derive(Default)]
struct FreedSpace {
    records: Vec<PoolRange>,
    leaves: Vec<LeafAddr>,
}

/// The slots of a leaf that a range delete covers, as bits, and whether these are all valid slots.
struct CoveredSlots {
    slots: u64,
    is_whole_leaf: bool,
}

/// The range of the keys of a leaf.
fn range_of<'p>(leaf: &LeafPosition<'p>) -> KeyRange<&'p [u8]> {
    KeyRange {
        start: leaf.low.map_or(KeyBoundary::Min, KeyBoundary::Before),
        end: leaf.high.map_or(KeyBoundary::Max, KeyBoundary::Before),
    }
}

/// The leaf with the first keys of `range`.
fn first_leaf_of<K: AsRef<[u8]>>(range: &KeyRange<K>) -> LeafTarget<'_> {
    match &range.start {
        KeyBoundary::Before(key) | KeyBoundary::After(key) => LeafTarget::Key(key.as_ref()),
        KeyBoundary::Min | KeyBoundary::Max => LeafTarget::First,
    }
}

impl<M: PersistenceBackend> PoolTree<M> {
    /// Hides the records that a range delete covers from readers that will see it, until
    /// [`remove_covered`](PoolTree::remove_covered) removes them.
    ///
    /// # Errors
    /// `Corruption` if the entry is not a range in the order of the pool.
    #[cold]
    pub(crate) fn add_range_delete(&self, entry: EntryRef<'_>) -> Result<()> {
        let range = KeyRange::decode(entry.user_key, entry.value)?.to_owned();
        if range.is_empty(&self.key_order) {
            return Err(Error::corruption("the start of a range delete is not before its end"));
        }
        self.range_deletes.add(range, entry.seqno, self.versions.readers().visible(), &self.key_order);
        Ok(())
    }

    /// Removes the records that the pending range deletes cover. Retains those that readers may need, and all if the
    /// range delete is not visible yet. The caller prevents changes of records until this returns. `last_logged` is the
    /// last sequence number that was applied from the WAL.
    ///
    /// # Errors
    /// `Corruption` if the bytes of the pool are not valid, `OutOfSpace` if there is no memory to retain versions. The
    /// range deletes stay pending, so reads are right, and a replay of the WAL repeats them.
    #[cold]
    pub(crate) fn remove_covered(&self, last_logged: SeqNo) -> Result<()> {
        let set = self.range_deletes.set();
        let Some(last) = set.iter().map(|fragment| fragment.seqnos[0]).max() else { return Ok(()) };
        self.forget_versions()?;
        // Without older readers and older versions, no covered record is retained. No record is newer, unless one was
        // applied after the range delete: by the same group, or before a crash.
        let is_unneeded = !self.replaying.load(Ordering::Acquire)
            && last <= self.versions.readers().oldest()
            && self.versions.is_empty();
        if is_unneeded {
            self.versions.raise_dropped_through(last);
        }
        for fragment in set.iter() {
            let is_unread = is_unneeded && fragment.seqnos[0] == last_logged;
            let mut next = self.remove_in_node(fragment, first_leaf_of(&fragment.range), is_unread)?;
            while let Some(key) = next {
                next = self.remove_in_node(fragment, LeafTarget::Key(&key), is_unread)?;
            }
        }
        self.range_deletes.clear();
        Ok(())
    }

    /// Removes the covered records of the leaf `target` and of the leaves behind it that have the same parent node.
    /// Returns the first key behind these, if the range continues there.
    fn remove_in_node(
        &self,
        fragment: &RangeTombstone,
        target: LeafTarget<'_>,
        is_unread: bool,
    ) -> Result<Option<Vec<u8>>> {
        let structure = self.structure_lock.lock().map_err(poisoned)?;
        let locked = self.lock_all_leaves(&structure)?;
        let pin = Pin::new();
        let order = &self.key_order;
        let mut leaves = self.inner.find_positions_from(target, &pin);
        let continues = |leaf: &LeafPosition<'_>| range_of(leaf).end.cmp(&fragment.range.end, order).is_lt();
        let next = leaves.last().filter(|leaf| continues(leaf)).and_then(|leaf| leaf.high).map(<[u8]>::to_vec);
        leaves.retain(|leaf| range_of(leaf).overlaps(&fragment.range, order));
        let (mut freed, mut sparse) = (FreedSpace::default(), Vec::new());
        // What may fail comes first. Then the removal is repeated as a whole.
        let covered = leaves.iter().map(|position| {
            let leaf = self.leaf(LeafAddr(position.leaf));
            self.covered_slots(leaf, position, fragment, is_unread, &mut freed)
        });
        let covered: Vec<CoveredSlots> = covered.collect::<Result<_>>()?;
        // The last leaf that stays, and the last one behind it that does not.
        let mut before = leaves.first().and_then(|leaf| self.leaf_before(leaf, &pin));
        let mut passed = None;
        for (position, covered) in leaves.iter().zip(covered) {
            let leaf = self.leaf(LeafAddr(position.leaf));
            if covered.is_whole_leaf && leaf.offset != HEAD_LEAF_OFFSET {
                self.add_to_record_count(leaf.offset, -i64::from(covered.slots.count_ones()));
                freed.leaves.push(LeafAddr(position.leaf));
                passed = Some(leaf);
                continue;
            }
            self.pass_leaves(before, passed.take())?;
            before = Some(leaf);
            if let Some(first) = set_bits(covered.slots).next()
                && self.remove_slots(leaf, covered.slots)
            {
                let mut key = Vec::new();
                PoolRecord::read(self.region(), leaf.slot(first))?.read_key(self.region(), &mut key);
                sparse.push(key);
            }
        }
        self.pass_leaves(before, passed)?;
        if let Some(first) = leaves.first().filter(|_| !freed.leaves.is_empty()) {
            let target = first.low.map_or(LeafTarget::First, LeafTarget::Key);
            self.inner.remove_siblings(target, |leaf| freed.leaves.contains(&LeafAddr(leaf)));
            self.bump_structure_version();
            let leaves = self.leaf_count.fetch_sub(freed.leaves.len() as u64, Ordering::Release);
            debug_assert!(leaves > freed.leaves.len() as u64, "the first leaf of a pool stays");
        }
        drop(leaves);
        drop(pin);
        drop(locked);
        freed.leaves.iter().for_each(|leaf| self.leaf_orders.free_id(leaf.order_id()));
        let offsets = freed.leaves.iter().map(|leaf| leaf.offset()).collect();
        self.count_retirement();
        self.lock_allocator()?.retire_all(freed.records, offsets);
        drop(structure);
        sparse.iter().try_for_each(|key| self.merge_or_unlink_leaf(key))?;
        Ok(next)
    }

    /// The leaf before `position` in the chain.
    fn leaf_before(&self, position: &LeafPosition<'_>, pin: &Pin) -> Option<PoolLeaf<'_>> {
        let before = position.sibling(-1);
        let before = before.or_else(|| Some(self.inner.find_leaf(LeafTarget::BeforeKey(position.low?), pin)));
        before.map(|leaf| self.leaf(LeafAddr(leaf)))
    }

    /// Removes the leaves behind `before` up to `last` from the chain.
    fn pass_leaves(&self, before: Option<PoolLeaf<'_>>, last: Option<PoolLeaf<'_>>) -> Result<()> {
        let Some(last) = last else { return Ok(()) };
        let before = before.ok_or_else(|| Error::corruption("the first leaf of a pool is not where it belongs"))?;
        let next = self.next_leaf_of(last)?;
        self.backend.publish(before.next_offset(), self.check_seed.next_word(before.offset, next));
        self.backend.flush(before.next_offset(), 8, PersistSite::UnlinkCommit);
        self.backend.fence(PersistSite::UnlinkDone);
        Ok(())
    }

    /// The slots of `leaf` that `fragment` covers. Retains their records for older readers, or adds their space to
    /// `freed`. With `is_unread`, a leaf inside of the range is not read beyond its slots.
    fn covered_slots(
        &self,
        leaf: PoolLeaf<'_>,
        position: &LeafPosition<'_>,
        fragment: &RangeTombstone,
        is_unread: bool,
        freed: &mut FreedSpace,
    ) -> Result<CoveredSlots> {
        let (order, seqno, keys) = (&self.key_order, fragment.seqnos[0], range_of(position));
        let is_inside =
            fragment.range.start.cmp(&keys.start, order).is_le() && fragment.range.end.cmp(&keys.end, order).is_ge();
        let commit = leaf.commit_word();
        if is_unread && is_inside {
            for n in set_bits(commit.valid_slots()) {
                let slot = leaf.slot(n);
                let len = match slot.len() {
                    Some(len) => len,
                    None => PoolRecord::read(self.region(), slot)?.buffer_len(),
                };
                freed.records.push((slot.offset(), len));
            }
            return Ok(CoveredSlots { slots: commit.valid_slots(), is_whole_leaf: true });
        }
        let (contents, mut key, mut slots) = (self.read_leaf(leaf, commit)?, Vec::new(), 0);
        for ((n, ..), record) in contents.slots.iter().zip(&contents.records) {
            record.read_key(self.region(), &mut key);
            if record.seqno < seqno && (is_inside || fragment.range.contains(&key, order)) {
                slots |= 1 << n;
                if !self.retain_version(&key, record, seqno)? {
                    freed.records.push((record.offset, record.buffer_len()));
                }
            }
        }
        Ok(CoveredSlots { slots, is_whole_leaf: slots == commit.valid_slots() })
    }

    /// Removes slots from a leaf. Returns whether the leaf is sparse now.
    fn remove_slots(&self, leaf: PoolLeaf<'_>, slots: u64) -> bool {
        debug_assert_eq!(slots & !leaf.commit_word().valid_slots(), 0, "only valid slots are removed");
        let slot_check = |n| self.check_seed.slot_check(leaf.offset, n, leaf.fingerprint(n), leaf.slot(n));
        let remaining = set_bits(slots).fold(leaf.commit_word(), |commit, n| commit.flipped(n, slot_check(n)));
        self.backend.publish(leaf.offset, remaining.0);
        self.backend.flush(leaf.offset, 8, PersistSite::RemoveCommit);
        self.backend.fence(PersistSite::RemoveDone);
        self.add_to_record_count(leaf.offset, -i64::from(slots.count_ones()));
        remaining.count() <= self.slots_per_leaf / 4
    }

    /// Maximum number of bytes of memory for the versions that the range deletes of a batch retain, as of the current
    /// records. They are reserved although there may be no reader yet, because one may begin before the batch is
    /// visible. Records that the batch itself puts are not retained when its range deletes remove them, because no
    /// reader sees a part of a batch.
    ///
    /// Unless `exact`, no record is read: its key counts as if it took the whole buffer, of which the leaf has the
    /// length. 0 if the exact number is more than is allowed and there is no reader.
    #[cold]
    pub(crate) fn range_delete_version_bytes(&self, records: &[(u32, EntryRef<'_>)], exact: bool) -> Result<u64> {
        let may_stop = !exact || self.versions.readers().count() == 0;
        let is_too_much = |total: u64| may_stop && total > self.versions.memory_max();
        let mut total = 0;
        for (_, record) in records.iter().filter(|(_, record)| record.kind == RecordKind::RangeDelete) {
            let range = &KeyRange::decode(record.user_key, record.value)?;
            let mut next = self.version_bytes_of_leaf(range, first_leaf_of(range), exact, &mut total)?;
            while let Some(key) = next.filter(|_| !is_too_much(total)) {
                next = self.version_bytes_of_leaf(range, LeafTarget::Key(&key), exact, &mut total)?;
            }
        }
        Ok(if exact && is_too_much(total) { 0 } else { total })
    }

    /// Adds the memory for the records of one leaf to `total`. Returns the first key behind the leaf, if the range
    /// continues there.
    fn version_bytes_of_leaf(
        &self,
        range: &KeyRange<&[u8]>,
        target: LeafTarget<'_>,
        exact: bool,
        total: &mut u64,
    ) -> Result<Option<Vec<u8>>> {
        let pin = self.pin()?;
        let position = self.inner.find_position(target, &pin);
        let leaf = self.leaf(LeafAddr(position.leaf));
        let slots: Vec<_> = set_bits(leaf.commit_word().valid_slots()).map(|n| leaf.slot(n)).collect();
        if exact {
            slots.iter().for_each(|slot| self.prefetch_record(*slot));
        }
        for slot in slots {
            let key_len = match slot.len().filter(|_| !exact) {
                Some(buffer_len) => KEY_LEN_MAX.min(buffer_len as usize),
                None => PoolRecord::read(self.region(), slot)?.key_len,
            };
            *total += RetainedVersions::bytes_max(key_len);
        }
        let continues = range_of(&position).end.cmp(&range.end, &self.key_order).is_lt();
        Ok(position.high.filter(|_| continues).map(<[u8]>::to_vec))
    }
}

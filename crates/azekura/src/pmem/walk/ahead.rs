//! What a walk will come to, fetched while it is not there yet.
//!
//! Memory is slow to answer and can be asked many questions at once. So while one leaf is walked over the records of
//! the next one are fetched, and the leaf behind that one, so that its slots are known when its records are to be
//! fetched. Whether these leaves still come next does not matter: all this is hints.

use crate::mem::region::Region;
use crate::pmem::leaf::{LEAF_LEN, LeafAddr, set_bits};
use crate::pmem::persistence::PersistenceBackend;
use crate::pmem::record::LeafSlot;
use crate::pmem::tree::PoolTree;

/// So many bytes of a record are fetched at most.
const PREFETCH_LEN_MAX: u64 = 256;

/// The leaves that a walk comes to next, as far as is known.
#[derive(Default)]
pub(super) struct LeafPrefetcher {
    next_leaf: Option<LeafAddr>,
    leaf_after_next: Option<LeafAddr>,
    /// Slots of `next`, once they were looked at.
    slots: Vec<u64>,
    slots_known: bool,
    prefetched: usize,
}

impl LeafPrefetcher {
    /// Whether records of this leaf were fetched.
    pub(super) fn has_prefetched(&self, leaf: LeafAddr) -> bool {
        self.next_leaf == Some(leaf) && self.slots_known
    }

    /// From now on these leaves come next.
    pub(super) fn begin<M: PersistenceBackend>(
        &mut self,
        tree: &PoolTree<M>,
        next: Option<LeafAddr>,
        behind: Option<LeafAddr>,
    ) {
        let is_there = next.is_some() && self.leaf_after_next == next;
        (self.next_leaf, self.leaf_after_next, self.slots_known, self.prefetched) = (next, behind, false, 0);
        self.slots.clear();
        let new = [next.filter(|_| !is_there), behind];
        for addr in new.into_iter().flatten() {
            tree.region().prefetch(addr.offset(), LEAF_LEN);
            tree.leaf_orders.prefetch(addr.order_id());
        }
        if is_there {
            self.read_slots(tree);
        }
    }

    /// Learns which records there are in the next leaf, if that is not known. It should be in the cache by now.
    pub(super) fn read_slots<M: PersistenceBackend>(&mut self, tree: &PoolTree<M>) {
        if let Some(addr) = self.next_leaf.filter(|_| !self.slots_known) {
            let leaf = tree.leaf(addr);
            let slots = leaf.slot_words();
            self.slots.extend(set_bits(leaf.commit_word().valid_slots()).map(|n| slots[n]));
            self.slots_known = true;
        }
    }

    /// Fetches one record of the next leaf.
    #[inline]
    pub(super) fn prefetch_record(&mut self, region: &Region) {
        if let Some(slot) = self.slots.get(self.prefetched) {
            prefetch_slot_record(region, LeafSlot(*slot));
            self.prefetched += 1;
        }
    }

    /// Fetches what is left of its records.
    pub(super) fn prefetch_rest(&mut self, region: &Region) {
        self.slots[self.prefetched..].iter().for_each(|slot| prefetch_slot_record(region, LeafSlot(*slot)));
        self.prefetched = self.slots.len();
    }
}

/// Fetches a record.
#[inline]
pub(super) fn prefetch_slot_record(region: &Region, slot: LeafSlot) {
    region.prefetch(slot.offset(), slot.len().unwrap_or(PREFETCH_LEN_MAX).min(PREFETCH_LEN_MAX));
}

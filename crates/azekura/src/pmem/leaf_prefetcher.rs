//! Prefetches the leaves that an iteration reads next, and their records.

use crate::mem::region::Region;
use crate::pmem::leaf::{LEAF_LEN, LeafAddr, set_bits};
use crate::pmem::persistence::PersistenceBackend;
use crate::pmem::record::LeafSlot;
use crate::pmem::tree::PoolTree;

/// Maximum number of bytes of a record that are prefetched.
const PREFETCH_LEN_MAX: u64 = 256;

/// The next two leaves of an iteration, as far as they are known.
#[derive(Default)]
pub(crate) struct LeafPrefetcher {
    next_leaf: Option<LeafAddr>,
    leaf_after_next: Option<LeafAddr>,
    /// Valid slots of `next_leaf`, once `slots_known` is set. The first `prefetched` of them are prefetched.
    slots: Vec<u64>,
    slots_known: bool,
    prefetched: usize,
}

impl LeafPrefetcher {
    /// Whether records of this leaf were prefetched.
    pub(crate) fn has_prefetched(&self, leaf: LeafAddr) -> bool {
        self.next_leaf == Some(leaf) && self.slots_known
    }

    /// Sets the leaves that come next, and prefetches them.
    pub(crate) fn begin<M: PersistenceBackend>(
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

    /// Reads the slots of the next leaf, if they are not known. By now that leaf should be in the processor's cache.
    pub(crate) fn read_slots<M: PersistenceBackend>(&mut self, tree: &PoolTree<M>) {
        if let Some(addr) = self.next_leaf.filter(|_| !self.slots_known) {
            let leaf = tree.leaf(addr);
            let slots = leaf.slot_words();
            self.slots.extend(set_bits(leaf.commit_word().valid_slots()).map(|n| slots[n]));
            self.slots_known = true;
        }
    }

    /// Prefetches one record of the next leaf.
    #[inline]
    pub(crate) fn prefetch_record(&mut self, region: &Region) {
        if let Some(slot) = self.slots.get(self.prefetched) {
            prefetch_slot_record(region, LeafSlot(*slot));
            self.prefetched += 1;
        }
    }

    /// Prefetches the remaining records of the next leaf.
    pub(crate) fn prefetch_rest(&mut self, region: &Region) {
        debug_assert!(self.prefetched <= self.slots.len(), "no more than all records are prefetched");
        self.slots[self.prefetched..].iter().for_each(|slot| prefetch_slot_record(region, LeafSlot(*slot)));
        self.prefetched = self.slots.len();
    }
}

/// Prefetches a record.
#[inline]
pub(crate) fn prefetch_slot_record(region: &Region, slot: LeafSlot) {
    region.prefetch(slot.offset(), slot.len().unwrap_or(PREFETCH_LEN_MAX).min(PREFETCH_LEN_MAX));
}

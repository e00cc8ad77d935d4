//! What a walk will come to, fetched while it is not there yet.
//!
//! Memory is slow to answer and can be asked many questions at once. So while one leaf is walked over the records of
//! the next one are fetched, and the leaf behind that one, so that its slots are known when its records are to be
//! fetched. Whether these leaves still come next does not matter: all this is hints.

use crate::mem::region::Region;
use crate::pmem::leaf::{LEAF_LEN, Spot, bits};
use crate::pmem::medium::Medium;
use crate::pmem::record::Slot;
use crate::pmem::tree::Tree;

/// So many bytes of a record are fetched at most.
const FETCHED: u64 = 256;

/// The leaves that a walk comes to next, as far as is known.
#[derive(Default)]
pub(super) struct Ahead {
    next: Option<Spot>,
    behind: Option<Spot>,
    /// Slots of `next`, once they were looked at.
    slots: Vec<u64>,
    looked: bool,
    fetched: usize,
}

impl Ahead {
    /// Whether records of this leaf were fetched.
    pub(super) fn has(&self, leaf: Spot) -> bool {
        self.next == Some(leaf) && self.looked
    }

    /// From now on these leaves come next.
    pub(super) fn begin<M: Medium>(&mut self, tree: &Tree<M>, next: Option<Spot>, behind: Option<Spot>) {
        let is_there = next.is_some() && self.behind == next;
        (self.next, self.behind, self.looked, self.fetched) = (next, behind, false, 0);
        self.slots.clear();
        let new = [next.filter(|_| !is_there), behind];
        for spot in new.into_iter().flatten() {
            tree.region().prefetch(spot.leaf(), LEAF_LEN);
            tree.orders.prefetch(spot.number());
        }
        if is_there {
            self.look(tree);
        }
    }

    /// Learns which records there are in the next leaf, if that is not known. It should be in the cache by now.
    pub(super) fn look<M: Medium>(&mut self, tree: &Tree<M>) {
        if let Some(spot) = self.next.filter(|_| !self.looked) {
            let leaf = tree.leaf(spot);
            let slots = leaf.slots();
            self.slots.extend(bits(leaf.commit().valid()).map(|n| slots[n]));
            self.looked = true;
        }
    }

    /// Fetches one record of the next leaf.
    #[inline]
    pub(super) fn fetch(&mut self, region: &Region) {
        if let Some(slot) = self.slots.get(self.fetched) {
            fetch(region, Slot(*slot));
            self.fetched += 1;
        }
    }

    /// Fetches what is left of its records.
    pub(super) fn fetch_all(&mut self, region: &Region) {
        self.slots[self.fetched..].iter().for_each(|slot| fetch(region, Slot(*slot)));
        self.fetched = self.slots.len();
    }
}

/// Fetches a record.
#[inline]
pub(super) fn fetch(region: &Region, slot: Slot) {
    region.prefetch(slot.at(), slot.len().unwrap_or(FETCHED).min(FETCHED));
}

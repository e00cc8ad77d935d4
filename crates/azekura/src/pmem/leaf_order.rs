//! The orders of leaves, in memory: a leaf's slots stand in none, and to sort them at every visit takes longer than the
//! visit.
//!
//! Each leaf has a number here, and under it a line: a version, which writers raise before they overwrite a slot, and
//! the numbers of its slots in key order, with the version of the leaf that they were read from. An iterator that
//! finds no order for the version that it read sorts the leaf, and stores the order for others. While the version is
//! unchanged, slots are only removed from a leaf, except the slot that a put fills: an iterator that finds all valid
//! slots in an order of its version has their order. No thread waits for another.
//!
//! 64 bytes for each leaf that there was at one time; leaves beyond the bound of numbers have no order.

use crate::mem::atomic::{Mutex, Ordering, PoisonError, fence};
use crate::mem::region::{PAGE, Region};
use crate::pmem::leaf::{LEAF_LEN, LeafAddr, SLOTS};

/// The bytes of one order.
const ORDER_ENTRY_LEN: u64 = 64;
const ENTRY_VERSION_AT: u64 = 8;
const ENTRY_SLOTS_AT: u64 = 16;
/// Minimum number of bytes by which the orders grow at a time.
const GROW_BY: u64 = 4 * PAGE;

/// The tag of an order that is being written; no version gets here. The others are versions of leaves, 0 is none's.
const VERSION_BUSY: u64 = u64::MAX;
/// What stands in place of a slot behind the last one.
const NO_SLOT: u8 = u8::MAX;

/// The number of leaves that have no order.
const NO_ORDER_ID: u32 = 0;
const ORDER_ID_MAX: u64 = (1 << 26) - 1;

/// Numbers that no leaf has.
struct FreeOrderIds {
    ids: Vec<u32>,
    /// The last that a leaf ever had.
    last: u32,
}

/// The orders of one pool's leaves. Thread safe.
pub(crate) struct LeafOrderCache {
    /// `None` if the address space is too small.
    region: Option<Region>,
    /// How many there may be.
    id_max: u32,
    free_ids: Mutex<FreeOrderIds>,
}

impl LeafOrderCache {
    /// For a pool of up to `len_max` bytes.
    pub(crate) fn new(len_max: u64) -> LeafOrderCache {
        let most = (len_max / LEAF_LEN).min(ORDER_ID_MAX);
        let free = Mutex::new(FreeOrderIds { ids: Vec::new(), last: NO_ORDER_ID });
        LeafOrderCache { region: Region::private(most * ORDER_ENTRY_LEN).ok(), id_max: most as u32, free_ids: free }
    }

    /// A number for an unpublished leaf.
    pub(crate) fn allocate_id(&self) -> u32 {
        let Some(region) = &self.region else { return NO_ORDER_ID };
        let mut free = self.free_ids.lock().unwrap_or_else(PoisonError::into_inner);
        let number = match free.ids.pop() {
            Some(number) => number,
            None if free.last >= self.id_max => return NO_ORDER_ID,
            None => {
                let end = u64::from(free.last + 1) * ORDER_ENTRY_LEN;
                let whole = (u64::from(self.id_max) * ORDER_ENTRY_LEN).next_multiple_of(PAGE);
                // More at a time where there are many: each step is a call of the system.
                let more = GROW_BY.max(region.len() / 4 / PAGE * PAGE);
                if end > region.len() && region.grow((region.len() + more).min(whole)).is_err() {
                    return NO_ORDER_ID;
                }
                free.last += 1;
                free.last
            }
        };
        // A thread that still writes the order of the previous leaf with that number writes one of an old version.
        self.bump_version(number);
        number
    }

    /// A leaf that has a number from now on.
    pub(crate) fn new_leaf_addr(&self, leaf: u64) -> LeafAddr {
        LeafAddr::new(leaf, self.allocate_id())
    }

    /// Releases the number of an unreachable leaf.
    pub(crate) fn free_id(&self, number: u32) {
        if number != NO_ORDER_ID {
            self.free_ids.lock().unwrap_or_else(PoisonError::into_inner).ids.push(number);
        }
    }

    #[inline]
    fn entry(&self, number: u32) -> Option<(&Region, u64)> {
        let region = self.region.as_ref()?;
        (number != NO_ORDER_ID).then(|| (region, u64::from(number - 1) * ORDER_ENTRY_LEN))
    }

    /// Says that slots of the leaf, which the caller has to himself, are about to be written over; a fence has to
    /// follow.
    #[inline]
    pub(crate) fn bump_version(&self, number: u32) {
        if let Some((region, at)) = self.entry(number) {
            region.store(at, region.load(at) + 1);
        }
    }

    /// The version of a leaf that is about to be read.
    #[inline]
    pub(crate) fn version(&self, number: u32) -> u64 {
        self.entry(number).map_or(0, |(region, at)| region.load(at))
    }

    /// The order of a leaf of this version: numbers of slots by their keys, all that were valid once it was there.
    #[inline]
    pub(crate) fn get(&self, number: u32, version: u64) -> Option<[u8; SLOTS]> {
        let (region, at) = self.entry(number)?;
        if region.load(at + ENTRY_VERSION_AT) != version {
            return None;
        }
        let mut slots = [NO_SLOT; SLOTS];
        region.read(at + ENTRY_SLOTS_AT, &mut slots);
        fence(Ordering::Acquire);
        // Tags only rise, but for while one is written.
        (region.load(at + ENTRY_VERSION_AT) == version).then_some(slots)
    }

    /// Leaves the order of a leaf of this version for others.
    pub(crate) fn set(&self, number: u32, version: u64, order: impl Iterator<Item = u8>) {
        let Some((region, at)) = self.entry(number) else { return };
        let tag = region.load(at + ENTRY_VERSION_AT);
        if tag >= version || !region.exchange(at + ENTRY_VERSION_AT, tag, VERSION_BUSY) {
            return;
        }
        fence(Ordering::Release);
        let mut slots = [NO_SLOT; SLOTS];
        for (to, slot) in slots.iter_mut().zip(order) {
            *to = slot;
        }
        region.write(at + ENTRY_SLOTS_AT, &[&slots], |_, _| ());
        region.store(at + ENTRY_VERSION_AT, version);
    }

    /// Fetches the line of a leaf's order.
    #[inline]
    pub(crate) fn prefetch(&self, number: u32) {
        if let Some((region, at)) = self.entry(number) {
            region.prefetch(at, ORDER_ENTRY_LEN);
        }
    }

    /// The bytes that they take.
    pub(crate) fn bytes(&self) -> u64 {
        self.region.as_ref().map_or(0, Region::len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pmem::record::OFFSET_END;

    #[test]
    fn leaf_addr_holds_offset_and_order_id() {
        for leaf in [4096, OFFSET_END - 448, 64] {
            for number in [NO_ORDER_ID, 1, 63, 64, 77 << 6, ORDER_ID_MAX as u32] {
                let addr = LeafAddr::new(leaf, number);
                assert_eq!((addr.offset(), addr.order_id()), (leaf, number));
            }
            assert_eq!(LeafAddr::new(leaf, NO_ORDER_ID), LeafAddr(leaf));
        }
    }

    #[test]
    fn order_is_stale_when_version_changes() {
        let orders = LeafOrderCache::new(1 << 20);
        let (a, b) = (orders.allocate_id(), orders.allocate_id());
        let version = orders.version(a);
        assert!(version > 0 && orders.get(a, version).is_none());
        orders.set(a, version, [3, 1, 2].into_iter());
        let order = orders.get(a, version).unwrap();
        assert!(order[..3] == [3, 1, 2] && order[3..].iter().all(|n| *n == NO_SLOT));
        assert!(orders.get(b, orders.version(b)).is_none());
        orders.set(a, version, [1].into_iter());
        assert_eq!(orders.get(a, version).unwrap(), order, "the first one stays");
        orders.bump_version(a);
        assert!(orders.get(a, orders.version(a)).is_none());
        orders.set(a, version + 1, [1].into_iter());
        orders.set(a, version, [3, 1, 2].into_iter());
        assert_eq!(orders.get(a, version + 1).unwrap()[..2], [1, NO_SLOT], "an old one comes too late");
        assert!(orders.get(a, version).is_none());
        orders.free_id(a);
        assert_eq!(orders.allocate_id(), a);
        orders.set(a, version + 1, [2].into_iter());
        assert!(orders.get(a, orders.version(a)).is_none(), "what was left there was another leaf's");
    }

    #[test]
    fn order_ids_are_bounded_by_pool_size() {
        let orders = LeafOrderCache::new(100 * LEAF_LEN);
        let numbers: Vec<u32> = (0..100).map(|_| orders.allocate_id()).collect();
        assert!(numbers.iter().all(|number| *number != NO_ORDER_ID) && orders.bytes() == 2 * PAGE);
        assert_eq!(orders.allocate_id(), NO_ORDER_ID);
        orders.bump_version(NO_ORDER_ID);
        orders.set(NO_ORDER_ID, 1, [1].into_iter());
        orders.free_id(NO_ORDER_ID);
        assert!(
            orders.get(NO_ORDER_ID, 0).is_none()
                && orders.get(NO_ORDER_ID, 1).is_none()
                && orders.version(NO_ORDER_ID) == 0
        );
        orders.prefetch(NO_ORDER_ID);
        orders.prefetch(numbers[99]);
        orders.free_id(numbers[7]);
        assert_eq!((orders.allocate_id(), orders.allocate_id()), (8, NO_ORDER_ID));
    }
}

//! The orders of leaves, in memory: a leaf's slots stand in none, and to sort them at every visit takes longer than the
//! visit.
//!
//! Each leaf has a number here, and under it a line: a version, which writers raise before they write a slot over, and
//! the numbers of its slots by their keys, with the version of the leaf that they were read from. Whoever walks over a
//! leaf and finds no order of the version that he read sorts it, and leaves the order for others. While the version is
//! the same slots are only ever taken away from a leaf, but for the one that a put fills: who finds all valid slots of
//! his in an order of his version knows their order. Nobody waits for anybody.
//!
//! 64 bytes for each leaf that there was at one time; leaves beyond the bound of numbers have no order.

use crate::mem::atomic::{Mutex, Ordering, PoisonError, fence};
use crate::mem::region::{PAGE, Region};
use crate::pmem::leaf::{LEAF_LEN, SLOTS, Spot};

/// The bytes of one order.
const LINE: u64 = 64;
const TAG_AT: u64 = 8;
const SLOTS_AT: u64 = 16;
/// Orders come into being so many bytes at a time, or more.
const GROW_BY: u64 = 4 * PAGE;

/// The tag of an order that is being written; no version gets here. The others are versions of leaves, 0 is none's.
const BUSY: u64 = u64::MAX;
/// What stands in place of a slot behind the last one.
const END: u8 = u8::MAX;

/// The number of leaves that have no order.
const NONE: u32 = 0;
const NUMBER_MAX: u64 = (1 << 26) - 1;

/// Numbers that no leaf has.
struct Free {
    numbers: Vec<u32>,
    /// The last that a leaf ever had.
    last: u32,
}

/// The orders of one pool's leaves. Thread safe.
pub(crate) struct Orders {
    /// None if there are not so many addresses.
    region: Option<Region>,
    /// How many there may be.
    most: u32,
    free: Mutex<Free>,
}

impl Orders {
    /// For a pool of up to `len_max` bytes.
    pub(crate) fn new(len_max: u64) -> Orders {
        let most = (len_max / LEAF_LEN).min(NUMBER_MAX);
        let free = Mutex::new(Free { numbers: Vec::new(), last: NONE });
        Orders { region: Region::private(most * LINE).ok(), most: most as u32, free }
    }

    /// A number for a leaf that nobody knows of yet.
    pub(crate) fn take(&self) -> u32 {
        let Some(region) = &self.region else { return NONE };
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let number = match free.numbers.pop() {
            Some(number) => number,
            None if free.last >= self.most => return NONE,
            None => {
                let end = u64::from(free.last + 1) * LINE;
                let whole = (u64::from(self.most) * LINE).next_multiple_of(PAGE);
                // More at a time where there are many: each step is a call of the system.
                let more = GROW_BY.max(region.len() / 4 / PAGE * PAGE);
                if end > region.len() && region.grow((region.len() + more).min(whole)).is_err() {
                    return NONE;
                }
                free.last += 1;
                free.last
            }
        };
        // Who still writes the order of the leaf that had the number before writes that of an old version.
        self.raise(number);
        number
    }

    /// A leaf that has a number from now on.
    pub(crate) fn spot(&self, leaf: u64) -> Spot {
        Spot::new(leaf, self.take())
    }

    /// Takes the number of a leaf back that nobody can come by any more.
    pub(crate) fn give_back(&self, number: u32) {
        if number != NONE {
            self.free.lock().unwrap_or_else(PoisonError::into_inner).numbers.push(number);
        }
    }

    #[inline]
    fn line(&self, number: u32) -> Option<(&Region, u64)> {
        let region = self.region.as_ref()?;
        (number != NONE).then(|| (region, u64::from(number - 1) * LINE))
    }

    /// Says that slots of the leaf, which the caller has to himself, are about to be written over; a fence has to
    /// follow.
    #[inline]
    pub(crate) fn raise(&self, number: u32) {
        if let Some((region, at)) = self.line(number) {
            region.store(at, region.load(at) + 1);
        }
    }

    /// The version of a leaf that is about to be read.
    #[inline]
    pub(crate) fn version(&self, number: u32) -> u64 {
        self.line(number).map_or(0, |(region, at)| region.load(at))
    }

    /// The order of a leaf of this version: numbers of slots by their keys, all that were valid once it was there.
    #[inline]
    pub(crate) fn get(&self, number: u32, version: u64) -> Option<[u8; SLOTS]> {
        let (region, at) = self.line(number)?;
        if region.load(at + TAG_AT) != version {
            return None;
        }
        let mut slots = [END; SLOTS];
        region.read(at + SLOTS_AT, &mut slots);
        fence(Ordering::Acquire);
        // Tags only rise, but for while one is written.
        (region.load(at + TAG_AT) == version).then_some(slots)
    }

    /// Leaves the order of a leaf of this version for others.
    pub(crate) fn set(&self, number: u32, version: u64, order: impl Iterator<Item = u8>) {
        let Some((region, at)) = self.line(number) else { return };
        let tag = region.load(at + TAG_AT);
        if tag >= version || !region.exchange(at + TAG_AT, tag, BUSY) {
            return;
        }
        fence(Ordering::Release);
        let mut slots = [END; SLOTS];
        for (to, slot) in slots.iter_mut().zip(order) {
            *to = slot;
        }
        region.write(at + SLOTS_AT, &[&slots], |_, _| ());
        region.store(at + TAG_AT, version);
    }

    /// Fetches the line of a leaf's order.
    #[inline]
    pub(crate) fn prefetch(&self, number: u32) {
        if let Some((region, at)) = self.line(number) {
            region.prefetch(at, LINE);
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
    fn spots_know_leaf_and_number() {
        for leaf in [4096, OFFSET_END - 448, 64] {
            for number in [NONE, 1, 63, 64, 77 << 6, NUMBER_MAX as u32] {
                let spot = Spot::new(leaf, number);
                assert_eq!((spot.leaf(), spot.number()), (leaf, number));
            }
            assert_eq!(Spot::new(leaf, NONE), Spot(leaf));
        }
    }

    #[test]
    fn an_order_counts_for_the_version_that_it_was_made_of() {
        let orders = Orders::new(1 << 20);
        let (a, b) = (orders.take(), orders.take());
        let version = orders.version(a);
        assert!(version > 0 && orders.get(a, version).is_none());
        orders.set(a, version, [3, 1, 2].into_iter());
        let order = orders.get(a, version).unwrap();
        assert!(order[..3] == [3, 1, 2] && order[3..].iter().all(|n| *n == END));
        assert!(orders.get(b, orders.version(b)).is_none());
        orders.set(a, version, [1].into_iter());
        assert_eq!(orders.get(a, version).unwrap(), order, "the first one stays");
        orders.raise(a);
        assert!(orders.get(a, orders.version(a)).is_none());
        orders.set(a, version + 1, [1].into_iter());
        orders.set(a, version, [3, 1, 2].into_iter());
        assert_eq!(orders.get(a, version + 1).unwrap()[..2], [1, END], "an old one comes too late");
        assert!(orders.get(a, version).is_none());
        orders.give_back(a);
        assert_eq!(orders.take(), a);
        orders.set(a, version + 1, [2].into_iter());
        assert!(orders.get(a, orders.version(a)).is_none(), "what was left there was another leaf's");
    }

    #[test]
    fn there_are_as_many_as_leaves_fit_and_no_more() {
        let orders = Orders::new(100 * LEAF_LEN);
        let numbers: Vec<u32> = (0..100).map(|_| orders.take()).collect();
        assert!(numbers.iter().all(|number| *number != NONE) && orders.bytes() == 2 * PAGE);
        assert_eq!(orders.take(), NONE);
        orders.raise(NONE);
        orders.set(NONE, 1, [1].into_iter());
        orders.give_back(NONE);
        assert!(orders.get(NONE, 0).is_none() && orders.get(NONE, 1).is_none() && orders.version(NONE) == 0);
        orders.prefetch(NONE);
        orders.prefetch(numbers[99]);
        orders.give_back(numbers[7]);
        assert_eq!((orders.take(), orders.take()), (8, NONE));
    }
}

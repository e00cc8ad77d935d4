#![doc = include_str!("../../docs/format/pmem.md")]

use crate::mem::atomic::{Mutex, Ordering, fence, lock};
use crate::mem::pages::PAGE;
use crate::mem::region::Region;
use crate::mem::simd::{LANES, matches_in_pair};
use crate::pmem::record::{BUFFER_ALIGN, LeafSlot, OFFSET_END};

/// Number of slots of a leaf. One of them always stays free, so that a record can be replaced in a full leaf.
pub(crate) const SLOTS: usize = 48;
/// Length of a leaf in bytes: one header line of 64 bytes, then the slots.
pub(crate) const LEAF_LEN: u64 = SLOTS_AT + 8 * SLOTS as u64;
/// Leaves begin at multiples of this, in bytes.
pub(crate) const LEAF_ALIGN: u64 = 64;

const NEXT_AT: u64 = 8;
const FINGERPRINTS_AT: u64 = 16;
const SLOTS_AT: u64 = 64;
/// Bits of a [`LeafAddr`] that contain the offset, a multiple of 64 below 2^44. The other bits contain the order id.
const ADDR_OFFSET_BITS: u32 = OFFSET_END.trailing_zeros();
const ADDR_OFFSET_MASK: u64 = OFFSET_END - LEAF_ALIGN;

/// Offset and order id of a leaf in one word. An offset alone is the address of a leaf without an order id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeafAddr(pub(crate) u64);

impl LeafAddr {
    #[inline]
    pub(crate) fn new(leaf: u64, number: u32) -> LeafAddr {
        debug_assert_eq!(leaf & ADDR_OFFSET_MASK, leaf, "leaves are aligned and below the highest offset");
        let number = u64::from(number);
        debug_assert!(number <= ORDER_ID_MAX, "an order id has 26 bits");
        LeafAddr(leaf | (number % LEAF_ALIGN) | ((number / LEAF_ALIGN) << ADDR_OFFSET_BITS))
    }

    #[inline]
    pub(crate) fn offset(self) -> u64 {
        self.0 & ADDR_OFFSET_MASK
    }

    #[inline]
    pub(crate) fn order_id(self) -> u32 {
        ((self.0 >> ADDR_OFFSET_BITS) * LEAF_ALIGN + self.0 % LEAF_ALIGN) as u32
    }
}

/// The bits of the commit word that mark the valid slots.
pub(crate) const VALID_SLOTS_MASK: u64 = (1 << SLOTS) - 1;
const NEXT_BITS: u32 = 40;

/// The seed of the checks in a pool's leaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeafCheckSeed(pub(crate) u64);

impl LeafCheckSeed {
    #[inline]
    fn mix(self, a: u64, b: u64) -> u64 {
        let x = (a ^ self.0).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let x = (x ^ x >> 32 ^ b).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        x ^ x >> 32
    }

    /// The share of slot `n` in the check of the leaf at `leaf`, 16 bits.
    #[inline]
    pub(crate) fn slot_check(self, leaf: u64, n: usize, fingerprint: u8, slot: LeafSlot) -> u64 {
        debug_assert!(n < SLOTS, "a leaf has few slots");
        self.mix(slot.0, leaf ^ (n as u64) << 48 ^ u64::from(fingerprint) << 56) >> 48
    }

    /// The check of a leaf without a valid slot.
    #[inline]
    fn empty_leaf_check(self, leaf: u64) -> u64 {
        self.mix(leaf, 1) >> 48
    }

    /// The word that contains the offset of the next leaf, 0 = none, with its check.
    #[inline]
    pub(crate) fn next_word(self, leaf: u64, next: u64) -> u64 {
        (self.mix(leaf, next | 2) >> NEXT_BITS << NEXT_BITS) | (next / BUFFER_ALIGN)
    }
}

/// The commit word: which slots are valid, and a check over them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeafCommitWord(pub(crate) u64);

impl LeafCommitWord {
    /// The commit word of a leaf without a valid slot.
    pub(crate) fn empty(seal: LeafCheckSeed, leaf: u64) -> LeafCommitWord {
        LeafCommitWord(seal.empty_leaf_check(leaf) << SLOTS)
    }

    /// The valid slots: bit `n` is set if slot `n` is valid.
    #[inline]
    pub(crate) fn valid_slots(self) -> u64 {
        self.0 & VALID_SLOTS_MASK
    }

    #[inline]
    pub(crate) fn count(self) -> usize {
        self.valid_slots().count_ones() as usize
    }

    /// The lowest free slot.
    #[inline]
    pub(crate) fn first_free_slot(self) -> Option<usize> {
        let free = !self.0 & VALID_SLOTS_MASK;
        (free != 0).then(|| free.trailing_zeros() as usize)
    }

    /// This word with the validity of slot `n` inverted; `share` is the share of that slot in the check.
    #[inline]
    #[must_use]
    pub(crate) fn flipped(self, n: usize, share: u64) -> LeafCommitWord {
        debug_assert!(n < SLOTS && share >> (64 - SLOTS) == 0, "a bit of a slot, and its share of the check");
        LeafCommitWord(self.0 ^ 1 << n ^ share << SLOTS)
    }
}

/// Iterates over the indices of the bits that are set.
pub(crate) fn set_bits(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let n = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(n)
    })
}

/// A leaf in a region. Other threads may change the words that it reads at any time.
#[derive(Clone, Copy)]
pub(crate) struct PoolLeaf<'a> {
    pub(crate) region: &'a Region,
    pub(crate) offset: u64,
    /// Id of the leaf's cached order.
    pub(crate) order_id: u32,
}

impl<'a> PoolLeaf<'a> {
    #[inline]
    pub(crate) fn new(region: &'a Region, at: u64) -> PoolLeaf<'a> {
        PoolLeaf::from_addr(region, LeafAddr(at))
    }

    #[inline]
    pub(crate) fn from_addr(region: &'a Region, addr: LeafAddr) -> PoolLeaf<'a> {
        PoolLeaf { region, offset: addr.offset(), order_id: addr.order_id() }
    }

    #[inline]
    pub(crate) fn commit_word(self) -> LeafCommitWord {
        LeafCommitWord(self.region.load_seqcst(self.offset))
    }

    pub(crate) fn next_offset(self) -> u64 {
        self.offset + NEXT_AT
    }

    /// The offset of the next leaf, 0 = none; `None` if its check does not match.
    pub(crate) fn next_leaf(self, seal: LeafCheckSeed) -> Option<u64> {
        let word = self.region.load(self.next_offset());
        let next = (word & (u64::MAX >> (64 - NEXT_BITS))) * BUFFER_ALIGN;
        (seal.next_word(self.offset, next) == word).then_some(next)
    }

    #[inline]
    pub(crate) fn slot_offset(self, n: usize) -> u64 {
        debug_assert!(n <= SLOTS, "at most the end of the leaf");
        self.offset + SLOTS_AT + 8 * n as u64
    }

    #[inline]
    pub(crate) fn slot(self, n: usize) -> LeafSlot {
        LeafSlot(self.region.load(self.slot_offset(n)))
    }

    /// The words of all slots.
    #[inline]
    pub(crate) fn slot_words(self) -> [u64; SLOTS] {
        self.region.load_array(self.offset + SLOTS_AT)
    }

    /// The offset of the word that contains the fingerprint of slot `n`.
    pub(crate) fn fingerprint_offset(self, n: usize) -> u64 {
        debug_assert!(n < SLOTS, "a fingerprint of a slot");
        self.offset + FINGERPRINTS_AT + n as u64 / 8 * 8
    }

    pub(crate) fn fingerprint(self, n: usize) -> u8 {
        self.region.load(self.fingerprint_offset(n)).to_le_bytes()[n % 8]
    }

    /// The words of the fingerprints of all slots.
    #[inline]
    fn fingerprint_words(self) -> [u64; SLOTS / 8] {
        self.region.load_array(self.offset + FINGERPRINTS_AT)
    }

    /// Each valid slot: its index, its word, and its fingerprint. No other thread changes the leaf meanwhile.
    #[inline]
    pub(crate) fn valid_slots(self, commit: LeafCommitWord) -> impl Iterator<Item = (usize, LeafSlot, u8)> {
        let (words, fingerprints) = (self.slot_words(), self.fingerprint_words());
        set_bits(commit.valid_slots()).map(move |n| (n, LeafSlot(words[n]), fingerprints[n / 8].to_le_bytes()[n % 8]))
    }

    /// The word with the fingerprint of slot `n`, changed to contain `fingerprint` for that slot.
    pub(crate) fn fingerprint_word(self, n: usize, fingerprint: u8) -> u64 {
        let mut bytes = self.region.load(self.fingerprint_offset(n)).to_le_bytes();
        bytes[n % 8] = fingerprint;
        u64::from_le_bytes(bytes)
    }

    /// The slots that are valid in `commit` and have this `fingerprint`, as bits.
    #[inline]
    pub(crate) fn match_fingerprint(self, commit: LeafCommitWord, fingerprint: u8) -> u64 {
        let words = self.fingerprint_words();
        let pairs = words.as_chunks().0.iter().enumerate();
        let found =
            pairs.fold(0, |found, (n, pair)| found | u64::from(matches_in_pair(*pair, fingerprint)) << (LANES * n));
        found & commit.valid_slots()
    }

    /// Whether the check of `commit` matches the slots that it marks as valid.
    pub(crate) fn check_matches(self, seal: LeafCheckSeed, commit: LeafCommitWord) -> bool {
        let shares =
            self.valid_slots(commit).map(|(n, slot, fingerprint)| seal.slot_check(self.offset, n, fingerprint, slot));
        shares.fold(seal.empty_leaf_check(self.offset), |sum, share| sum ^ share) == commit.0 >> SLOTS
    }
}

/// Length of one entry in bytes.
const ORDER_ENTRY_LEN: u64 = 64;
const ENTRY_VERSION_AT: u64 = 8;
const ENTRY_SLOTS_AT: u64 = 16;
/// Minimum number of bytes by which the cache grows at a time.
const GROW_BY: u64 = 4 * PAGE;

/// The tag of an order that is being written. Versions never reach this value. Any other tag is the version of a
/// leaf; 0 is the version of no leaf.
const VERSION_BUSY: u64 = u64::MAX;
/// Fills the array of slot indices after the last one.
const NO_SLOT: u8 = u8::MAX;

/// The order id of leaves without a cached order.
const NO_ORDER_ID: u32 = 0;
const ORDER_ID_MAX: u64 = (1 << 26) - 1;

/// Order ids that no leaf uses.
struct FreeOrderIds {
    ids: Vec<u32>,
    /// The highest id that was ever assigned.
    last: u32,
}

/// The cached slot orders of one pool's leaves, in memory: sorting the slots of a leaf at every visit takes longer than
/// the visit. Thread safe; no thread waits for another.
///
/// The order id of a leaf selects a cache line. It contains a version, which writers raise before they overwrite a
/// slot, and the indices of the leaf's slots in key order, tagged with the version of the leaf from which they were
/// read. An iterator that finds no order for the version that it read sorts the leaf and stores the order for later
/// iterators. While the version is unchanged, slots are only removed from a leaf, except that a put may fill one slot.
/// So an iterator that finds every valid slot in an order of its version has the right order.
///
/// The cache takes 64 bytes for each leaf, for the highest number of leaves that existed at one time. A leaf without an
/// order id has no cached order.
pub(crate) struct LeafOrderCache {
    /// `None` if there is not enough address space.
    region: Option<Region>,
    /// The highest order id.
    id_max: u32,
    free_ids: Mutex<FreeOrderIds>,
}

impl LeafOrderCache {
    /// A cache for a pool of up to `len_max` bytes.
    pub(crate) fn new(len_max: u64) -> LeafOrderCache {
        let leaves_max = (len_max / LEAF_LEN).min(ORDER_ID_MAX);
        let free = Mutex::new(FreeOrderIds { ids: Vec::new(), last: NO_ORDER_ID });
        LeafOrderCache {
            region: Region::private(leaves_max * ORDER_ENTRY_LEN).ok(),
            id_max: leaves_max as u32,
            free_ids: free,
        }
    }

    /// Assigns an order id to an unpublished leaf.
    pub(crate) fn allocate_id(&self) -> u32 {
        let Some(region) = &self.region else { return NO_ORDER_ID };
        let mut free = lock(&self.free_ids);
        let number = match free.ids.pop() {
            Some(number) => number,
            None if free.last >= self.id_max => return NO_ORDER_ID,
            None => {
                let end = u64::from(free.last + 1) * ORDER_ENTRY_LEN;
                let whole = (u64::from(self.id_max) * ORDER_ENTRY_LEN).next_multiple_of(PAGE);
                // A large cache grows by more bytes at a time, because each step is a system call.
                let more = GROW_BY.max(region.len() / 4 / PAGE * PAGE);
                if end > region.len() && region.grow((region.len() + more).min(whole)).is_err() {
                    return NO_ORDER_ID;
                }
                free.last += 1;
                free.last
            }
        };
        debug_assert!(
            number != NO_ORDER_ID && number <= free.last,
            "an id that was assigned before or is assigned now"
        );
        // A thread that still writes the order of the previous leaf with this id tags it with an older version.
        self.bump_version(number);
        number
    }

    /// The address of a leaf with a newly assigned order id.
    pub(crate) fn new_leaf_addr(&self, leaf: u64) -> LeafAddr {
        LeafAddr::new(leaf, self.allocate_id())
    }

    /// Frees the order id of an unreachable leaf.
    pub(crate) fn free_id(&self, number: u32) {
        if number != NO_ORDER_ID {
            let mut free = lock(&self.free_ids);
            debug_assert!(number <= free.last, "only an assigned id is freed");
            debug_assert!(free.ids.len() < free.last as usize, "an id is freed once");
            free.ids.push(number);
        }
    }

    #[inline]
    fn entry(&self, number: u32) -> Option<(&Region, u64)> {
        let region = self.region.as_ref()?;
        (number != NO_ORDER_ID).then(|| (region, u64::from(number - 1) * ORDER_ENTRY_LEN))
    }

    /// Raises the version of a leaf whose slots the caller overwrites next. The caller has exclusive write access to
    /// the leaf, and issues a fence after this call.
    #[inline]
    pub(crate) fn bump_version(&self, number: u32) {
        if let Some((region, at)) = self.entry(number) {
            region.store(at, region.load(at) + 1);
        }
    }

    /// The version of a leaf, loaded before the leaf is read.
    #[inline]
    pub(crate) fn version(&self, number: u32) -> u64 {
        self.entry(number).map_or(0, |(region, at)| region.load(at))
    }

    /// The cached order of a leaf for this version: slot indices in key order, padded with `NO_SLOT`. It contains
    /// every slot that was valid when the order was made; the caller checks that it contains every slot that is valid
    /// now.
    #[inline]
    pub(crate) fn get(&self, number: u32, version: u64) -> Option<[u8; SLOTS]> {
        let (region, at) = self.entry(number)?;
        if region.load(at + ENTRY_VERSION_AT) != version {
            return None;
        }
        let mut slots = [NO_SLOT; SLOTS];
        region.read(at + ENTRY_SLOTS_AT, &mut slots);
        fence(Ordering::Acquire);
        // Tags only rise, except while an order is being written.
        (region.load(at + ENTRY_VERSION_AT) == version).then_some(slots)
    }

    /// Stores the order of a leaf for this version, unless an order of the same or a later version is stored or being
    /// written.
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
        debug_assert!(
            slots
                .iter()
                .take_while(|slot| **slot != NO_SLOT)
                .try_fold(0u64, |seen, slot| (seen >> slot & 1 == 0).then_some(seen | 1 << slot))
                .is_some(),
            "an order contains each slot once"
        );
        debug_assert!(version != VERSION_BUSY, "versions never reach the tag of an order that is being written");
        region.write(at + ENTRY_SLOTS_AT, &[&slots], |_, _| ());
        region.store(at + ENTRY_VERSION_AT, version);
    }

    /// Prefetches the cache line of a leaf's order.
    #[inline]
    pub(crate) fn prefetch(&self, number: u32) {
        if let Some((region, at)) = self.entry(number) {
            region.prefetch(at, ORDER_ENTRY_LEN);
        }
    }

    /// Number of bytes that the cache takes.
    pub(crate) fn bytes(&self) -> u64 {
        self.region.as_ref().map_or(0, Region::len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pmem::record::OFFSET_END;

    const CHECK_SEED: LeafCheckSeed = LeafCheckSeed(0x1234_5678_9ABC_DEF1);

    #[test]
    fn flipped_bit_in_leaf_is_detected() {
        assert_eq!(LEAF_LEN, 448);
        let region = Region::private(8192).unwrap();
        region.grow(8192).unwrap();
        let leaf = PoolLeaf::new(&region, 4096);
        let mut commit = LeafCommitWord::empty(CHECK_SEED, leaf.offset);
        for n in (0..SLOTS).step_by(3) {
            let (slot, fingerprint) = (LeafSlot::new(16 * n as u64, 64), n as u8 * 5);
            region.store(leaf.slot_offset(n), slot.0);
            region.store(leaf.fingerprint_offset(n), leaf.fingerprint_word(n, fingerprint));
            commit = commit.flipped(n, CHECK_SEED.slot_check(leaf.offset, n, fingerprint, slot));
        }
        region.store_seqcst(leaf.offset, commit.0);
        region.store(leaf.next_offset(), CHECK_SEED.next_word(leaf.offset, 4544));
        assert_eq!((leaf.commit_word(), commit.count(), leaf.next_leaf(CHECK_SEED)), (commit, 16, Some(4544)));
        assert!(leaf.check_matches(CHECK_SEED, commit));
        let mut missed = 0;
        for bit in 0..8 * LEAF_LEN {
            let at = leaf.offset + bit / 64 * 8;
            region.store(at, region.load(at) ^ 1 << (bit % 64));
            let (byte, found) = (
                bit / 8,
                !leaf.check_matches(CHECK_SEED, leaf.commit_word()) || leaf.next_leaf(CHECK_SEED) != Some(4544),
            );
            let counts = match byte {
                16..64 => (byte - 16) % 3 == 0,
                64.. => (byte - 64) / 8 % 3 == 0,
                _ => true,
            };
            missed += u64::from(counts && !found);
            assert!(counts || !found, "bit {bit}");
            region.store(at, region.load(at) ^ 1 << (bit % 64));
        }
        assert_eq!(missed, 0, "a checksum misses one of 65,536 changes, but none of these");
        assert!(
            PoolLeaf::new(&region, 0).next_leaf(CHECK_SEED).is_none()
                && !PoolLeaf::new(&region, 0).check_matches(CHECK_SEED, LeafCommitWord(0))
        );
    }

    #[test]
    fn commit_words_count_and_find_free_slots() {
        let empty = LeafCommitWord::empty(CHECK_SEED, 64);
        assert_eq!((empty.count(), empty.first_free_slot()), (0, Some(0)));
        let three = (0..3).fold(empty, |commit, n| commit.flipped(n, 77));
        assert_eq!((three.count(), three.first_free_slot()), (3, Some(3)));
        assert_eq!(three.flipped(1, 77).first_free_slot(), Some(1));
        assert_eq!(LeafCommitWord(VALID_SLOTS_MASK).first_free_slot(), None);
        assert_eq!(set_bits(0b1010_0001).collect::<Vec<_>>(), [0, 5, 7]);
    }

    #[test]
    fn match_fingerprint_finds_all_slots() {
        let region = Region::private(8192).unwrap();
        region.grow(8192).unwrap();
        let leaf = PoolLeaf::new(&region, 64);
        for n in 0..SLOTS {
            region.store(leaf.fingerprint_offset(n), leaf.fingerprint_word(n, (n % 7) as u8));
        }
        let expected: u64 = (0..SLOTS).filter(|n| n % 7 == 3).map(|n| 1 << n).sum();
        assert_eq!(leaf.match_fingerprint(LeafCommitWord(VALID_SLOTS_MASK), 3), expected);
        assert_eq!(leaf.match_fingerprint(LeafCommitWord(1 << 3 | 1 << 4), 3), 1 << 3);
        assert_eq!(leaf.match_fingerprint(LeafCommitWord(VALID_SLOTS_MASK), 9), 0);
    }

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
        assert_eq!(orders.get(a, version).unwrap(), order, "the first order is kept");
        orders.bump_version(a);
        assert!(orders.get(a, orders.version(a)).is_none());
        orders.set(a, version + 1, [1].into_iter());
        orders.set(a, version, [3, 1, 2].into_iter());
        assert_eq!(orders.get(a, version + 1).unwrap()[..2], [1, NO_SLOT], "older versions replace nothing");
        assert!(orders.get(a, version).is_none());
        orders.free_id(a);
        assert_eq!(orders.allocate_id(), a);
        orders.set(a, version + 1, [2].into_iter());
        assert!(orders.get(a, orders.version(a)).is_none(), "the cached order belonged to another leaf");
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

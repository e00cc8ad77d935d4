#![doc = include_str!("../../docs/format/pmem.md")]

use crate::mem::region::Region;
use crate::mem::simd::{LANES, matches_in_pair};
use crate::pmem::record::{BUFFER_ALIGN, LeafSlot, OFFSET_END};

/// Slots of a leaf. One of them always stays free, so that a record can be replaced in a full leaf.
pub(crate) const SLOTS: usize = 48;
/// The length of a leaf in bytes: one line of header, then the slots.
pub(crate) const LEAF_LEN: u64 = SLOTS_AT + 8 * SLOTS as u64;
/// Leaves begin at multiples of this.
pub(crate) const LEAF_ALIGN: u64 = 64;

const NEXT_AT: u64 = 8;
const FINGERPRINTS_AT: u64 = 16;
const SLOTS_AT: u64 = 64;
/// Leaves begin at multiples of 64 below 2^44: these bits say where. The number has the others.
const ADDR_OFFSET_BITS: u32 = OFFSET_END.trailing_zeros();
const ADDR_OFFSET_MASK: u64 = OFFSET_END - LEAF_ALIGN;

/// Where a leaf stands and the number of its order, in one word; an offset alone is that of a leaf without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeafAddr(pub(crate) u64);

impl LeafAddr {
    #[inline]
    pub(crate) fn new(leaf: u64, number: u32) -> LeafAddr {
        let number = u64::from(number);
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

/// The bits of the commit word that say which slots are valid.
pub(crate) const VALID_SLOTS_MASK: u64 = (1 << SLOTS) - 1;
const NEXT_BITS: u32 = 40;

/// What the checks of a pool's leaves are mixed with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeafCheckSeed(pub(crate) u64);

impl LeafCheckSeed {
    #[inline]
    fn mix(self, a: u64, b: u64) -> u64 {
        let x = (a ^ self.0).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let x = (x ^ x >> 32 ^ b).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        x ^ x >> 32
    }

    /// The share that slot `n` of the leaf at `leaf` has in its check, 16 bits.
    #[inline]
    pub(crate) fn slot_check(self, leaf: u64, n: usize, fingerprint: u8, slot: LeafSlot) -> u64 {
        self.mix(slot.0, leaf ^ (n as u64) << 48 ^ u64::from(fingerprint) << 56) >> 48
    }

    /// The check of a leaf without a valid slot.
    #[inline]
    fn empty_leaf_check(self, leaf: u64) -> u64 {
        self.mix(leaf, 1) >> 48
    }

    /// The word for the next leaf, 0 = none, with its check.
    #[inline]
    pub(crate) fn next_word(self, leaf: u64, next: u64) -> u64 {
        (self.mix(leaf, next | 2) >> NEXT_BITS << NEXT_BITS) | (next / BUFFER_ALIGN)
    }
}

/// The commit word: which slots are valid, and a check over them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeafCommitWord(pub(crate) u64);

impl LeafCommitWord {
    /// That of a leaf without a valid slot.
    pub(crate) fn empty(seal: LeafCheckSeed, leaf: u64) -> LeafCommitWord {
        LeafCommitWord(seal.empty_leaf_check(leaf) << SLOTS)
    }

    /// Bit `n` is set where slot `n` is valid.
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

    /// With slot `n` the other way round, whose share in the check is `share`.
    #[inline]
    #[must_use]
    pub(crate) fn flipped(self, n: usize, share: u64) -> LeafCommitWord {
        LeafCommitWord(self.0 ^ 1 << n ^ share << SLOTS)
    }
}

/// Walks over the numbers of the bits that are set.
pub(crate) fn set_bits(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let n = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(n)
    })
}

/// A leaf in a region. Reads words that may change at any time.
#[derive(Clone, Copy)]
pub(crate) struct PoolLeaf<'a> {
    pub(crate) region: &'a Region,
    pub(crate) offset: u64,
    /// The number of its order.
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

    /// The next leaf, 0 = none; `None` if its check does not match.
    pub(crate) fn next_leaf(self, seal: LeafCheckSeed) -> Option<u64> {
        let word = self.region.load(self.next_offset());
        let next = (word & (u64::MAX >> (64 - NEXT_BITS))) * BUFFER_ALIGN;
        (seal.next_word(self.offset, next) == word).then_some(next)
    }

    #[inline]
    pub(crate) fn slot_offset(self, n: usize) -> u64 {
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

    /// Where the word with the fingerprint of slot `n` stands.
    pub(crate) fn fingerprint_offset(self, n: usize) -> u64 {
        self.offset + FINGERPRINTS_AT + n as u64 / 8 * 8
    }

    pub(crate) fn fingerprint(self, n: usize) -> u8 {
        self.region.load(self.fingerprint_offset(n)).to_le_bytes()[n % 8]
    }

    /// The word with the fingerprint of slot `n` when that is `print`.
    pub(crate) fn fingerprint_word(self, n: usize, fingerprint: u8) -> u64 {
        let mut bytes = self.region.load(self.fingerprint_offset(n)).to_le_bytes();
        bytes[n % 8] = fingerprint;
        u64::from_le_bytes(bytes)
    }

    /// The valid slots of `commit` whose fingerprint is `print`, as bits.
    #[inline]
    pub(crate) fn match_fingerprint(self, commit: LeafCommitWord, fingerprint: u8) -> u64 {
        let words: [u64; SLOTS / 8] = self.region.load_array(self.offset + FINGERPRINTS_AT);
        let pairs = words.as_chunks().0.iter().enumerate();
        let found =
            pairs.fold(0, |found, (n, pair)| found | u64::from(matches_in_pair(*pair, fingerprint)) << (LANES * n));
        found & commit.valid_slots()
    }

    /// Whether the check of `commit` is that of the slots that it says are valid.
    pub(crate) fn check_matches(self, seal: LeafCheckSeed, commit: LeafCommitWord) -> bool {
        let shares =
            set_bits(commit.valid_slots()).map(|n| seal.slot_check(self.offset, n, self.fingerprint(n), self.slot(n)));
        shares.fold(seal.empty_leaf_check(self.offset), |sum, share| sum ^ share) == commit.0 >> SLOTS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(missed, 0, "one in 65536 may be missed, none of these is");
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
}

#![doc = include_str!("../../docs/format/pmem.md")]

use crate::mem::region::Region;
use crate::mem::simd::{LANES, matches_in_pair};
use crate::pmem::record::{OFFSET_END, STEP, Slot};

/// Slots of a leaf. One of them always stays free, so that a record can be replaced in a full leaf.
pub(crate) const SLOTS: usize = 48;
/// The length of a leaf in bytes: one line of header, then the slots.
pub(crate) const LEAF_LEN: u64 = SLOTS_AT + 8 * SLOTS as u64;
/// Leaves begin at multiples of this.
pub(crate) const LEAF_ALIGN: u64 = 64;

const NEXT_AT: u64 = 8;
const PRINTS_AT: u64 = 16;
const SLOTS_AT: u64 = 64;
/// Leaves begin at multiples of 64 below 2^44: these bits say where. The number has the others.
const LEAF_BITS: u32 = OFFSET_END.trailing_zeros();
const LEAF: u64 = OFFSET_END - LEAF_ALIGN;

/// Where a leaf stands and the number of its order, in one word; an offset alone is that of a leaf without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spot(pub(crate) u64);

impl Spot {
    #[inline]
    pub(crate) fn new(leaf: u64, number: u32) -> Spot {
        let number = u64::from(number);
        Spot(leaf | (number % LEAF_ALIGN) | ((number / LEAF_ALIGN) << LEAF_BITS))
    }

    #[inline]
    pub(crate) fn leaf(self) -> u64 {
        self.0 & LEAF
    }

    #[inline]
    pub(crate) fn number(self) -> u32 {
        ((self.0 >> LEAF_BITS) * LEAF_ALIGN + self.0 % LEAF_ALIGN) as u32
    }
}

/// The bits of the commit word that say which slots are valid.
pub(crate) const VALID: u64 = (1 << SLOTS) - 1;
const NEXT_BITS: u32 = 40;

/// What the checks of a pool's leaves are mixed with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seal(pub(crate) u64);

impl Seal {
    #[inline]
    fn mix(self, a: u64, b: u64) -> u64 {
        let x = (a ^ self.0).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let x = (x ^ x >> 32 ^ b).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        x ^ x >> 32
    }

    /// The share that slot `n` of the leaf at `leaf` has in its check, 16 bits.
    #[inline]
    pub(crate) fn of_slot(self, leaf: u64, n: usize, print: u8, slot: Slot) -> u64 {
        self.mix(slot.0, leaf ^ (n as u64) << 48 ^ u64::from(print) << 56) >> 48
    }

    /// The check of a leaf without a valid slot.
    #[inline]
    fn of_empty(self, leaf: u64) -> u64 {
        self.mix(leaf, 1) >> 48
    }

    /// The word for the next leaf, 0 = none, with its check.
    #[inline]
    pub(crate) fn next_word(self, leaf: u64, next: u64) -> u64 {
        (self.mix(leaf, next | 2) >> NEXT_BITS << NEXT_BITS) | (next / STEP)
    }
}

/// The commit word: which slots are valid, and a check over them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Commit(pub(crate) u64);

impl Commit {
    /// That of a leaf without a valid slot.
    pub(crate) fn empty(seal: Seal, leaf: u64) -> Commit {
        Commit(seal.of_empty(leaf) << SLOTS)
    }

    /// Bit `n` is set where slot `n` is valid.
    #[inline]
    pub(crate) fn valid(self) -> u64 {
        self.0 & VALID
    }

    #[inline]
    pub(crate) fn count(self) -> usize {
        self.valid().count_ones() as usize
    }

    /// The lowest free slot.
    #[inline]
    pub(crate) fn free(self) -> Option<usize> {
        let free = !self.0 & VALID;
        (free != 0).then(|| free.trailing_zeros() as usize)
    }

    /// With slot `n` the other way round, whose share in the check is `share`.
    #[inline]
    #[must_use]
    pub(crate) fn flipped(self, n: usize, share: u64) -> Commit {
        Commit(self.0 ^ 1 << n ^ share << SLOTS)
    }
}

/// Walks over the numbers of the bits that are set.
pub(crate) fn bits(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let n = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(n)
    })
}

/// A leaf in a region. Reads words that may change at any time.
#[derive(Clone, Copy)]
pub(crate) struct Leaf<'a> {
    pub(crate) region: &'a Region,
    pub(crate) at: u64,
    /// The number of its order.
    pub(crate) order: u32,
}

impl<'a> Leaf<'a> {
    #[inline]
    pub(crate) fn new(region: &'a Region, at: u64) -> Leaf<'a> {
        Leaf::at(region, Spot(at))
    }

    #[inline]
    pub(crate) fn at(region: &'a Region, spot: Spot) -> Leaf<'a> {
        Leaf { region, at: spot.leaf(), order: spot.number() }
    }

    #[inline]
    pub(crate) fn commit(self) -> Commit {
        Commit(self.region.look(self.at))
    }

    pub(crate) fn next_at(self) -> u64 {
        self.at + NEXT_AT
    }

    /// The next leaf, 0 = none; `None` if its check does not match.
    pub(crate) fn next(self, seal: Seal) -> Option<u64> {
        let word = self.region.load(self.next_at());
        let next = (word & (u64::MAX >> (64 - NEXT_BITS))) * STEP;
        (seal.next_word(self.at, next) == word).then_some(next)
    }

    #[inline]
    pub(crate) fn slot_at(self, n: usize) -> u64 {
        self.at + SLOTS_AT + 8 * n as u64
    }

    #[inline]
    pub(crate) fn slot(self, n: usize) -> Slot {
        Slot(self.region.load(self.slot_at(n)))
    }

    /// The words of all slots.
    #[inline]
    pub(crate) fn slots(self) -> [u64; SLOTS] {
        self.region.load_all(self.at + SLOTS_AT)
    }

    /// Where the word with the fingerprint of slot `n` stands.
    pub(crate) fn print_at(self, n: usize) -> u64 {
        self.at + PRINTS_AT + n as u64 / 8 * 8
    }

    pub(crate) fn print(self, n: usize) -> u8 {
        self.region.load(self.print_at(n)).to_le_bytes()[n % 8]
    }

    /// The word with the fingerprint of slot `n` when that is `print`.
    pub(crate) fn print_word(self, n: usize, print: u8) -> u64 {
        let mut bytes = self.region.load(self.print_at(n)).to_le_bytes();
        bytes[n % 8] = print;
        u64::from_le_bytes(bytes)
    }

    /// The valid slots of `commit` whose fingerprint is `print`, as bits.
    #[inline]
    pub(crate) fn alike(self, commit: Commit, print: u8) -> u64 {
        let words: [u64; SLOTS / 8] = self.region.load_all(self.at + PRINTS_AT);
        let pairs = words.as_chunks().0.iter().enumerate();
        let found = pairs.fold(0, |found, (n, pair)| found | u64::from(matches_in_pair(*pair, print)) << (LANES * n));
        found & commit.valid()
    }

    /// Whether the check of `commit` is that of the slots that it says are valid.
    pub(crate) fn verifies(self, seal: Seal, commit: Commit) -> bool {
        let shares = bits(commit.valid()).map(|n| seal.of_slot(self.at, n, self.print(n), self.slot(n)));
        shares.fold(seal.of_empty(self.at), |sum, share| sum ^ share) == commit.0 >> SLOTS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEAL: Seal = Seal(0x1234_5678_9ABC_DEF1);

    #[test]
    fn every_flipped_bit_of_what_counts_is_found() {
        assert_eq!(LEAF_LEN, 448);
        let region = Region::private(8192).unwrap();
        region.grow(8192).unwrap();
        let leaf = Leaf::new(&region, 4096);
        let mut commit = Commit::empty(SEAL, leaf.at);
        for n in (0..SLOTS).step_by(3) {
            let (slot, print) = (Slot::new(16 * n as u64, 64), n as u8 * 5);
            region.store(leaf.slot_at(n), slot.0);
            region.store(leaf.print_at(n), leaf.print_word(n, print));
            commit = commit.flipped(n, SEAL.of_slot(leaf.at, n, print, slot));
        }
        region.publish(leaf.at, commit.0);
        region.store(leaf.next_at(), SEAL.next_word(leaf.at, 4544));
        assert_eq!((leaf.commit(), commit.count(), leaf.next(SEAL)), (commit, 16, Some(4544)));
        assert!(leaf.verifies(SEAL, commit));
        let mut missed = 0;
        for bit in 0..8 * LEAF_LEN {
            let at = leaf.at + bit / 64 * 8;
            region.store(at, region.load(at) ^ 1 << (bit % 64));
            let (byte, found) = (bit / 8, !leaf.verifies(SEAL, leaf.commit()) || leaf.next(SEAL) != Some(4544));
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
        assert!(Leaf::new(&region, 0).next(SEAL).is_none() && !Leaf::new(&region, 0).verifies(SEAL, Commit(0)));
    }

    #[test]
    fn commit_words_count_and_find_free_slots() {
        let empty = Commit::empty(SEAL, 64);
        assert_eq!((empty.count(), empty.free()), (0, Some(0)));
        let three = (0..3).fold(empty, |commit, n| commit.flipped(n, 77));
        assert_eq!((three.count(), three.free()), (3, Some(3)));
        assert_eq!(three.flipped(1, 77).free(), Some(1));
        assert_eq!(Commit(VALID).free(), None);
        assert_eq!(bits(0b1010_0001).collect::<Vec<_>>(), [0, 5, 7]);
    }

    #[test]
    fn fingerprints_are_compared_together() {
        let region = Region::private(8192).unwrap();
        region.grow(8192).unwrap();
        let leaf = Leaf::new(&region, 64);
        for n in 0..SLOTS {
            region.store(leaf.print_at(n), leaf.print_word(n, (n % 7) as u8));
        }
        let expected: u64 = (0..SLOTS).filter(|n| n % 7 == 3).map(|n| 1 << n).sum();
        assert_eq!(leaf.alike(Commit(VALID), 3), expected);
        assert_eq!(leaf.alike(Commit(1 << 3 | 1 << 4), 3), 1 << 3);
        assert_eq!(leaf.alike(Commit(VALID), 9), 0);
    }
}

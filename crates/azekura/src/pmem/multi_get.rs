//! Reads of several keys of a pool at one sequence number, in stages: path to the leaf, fingerprints, slots, records.
//! Each stage prefetches what the next one reads, for all keys of a group.

use crate::base::Result;
use crate::engine::ReadMoment;
use crate::mem::epoch::Pin;
use crate::mem::slice::Slice;
use crate::pmem::leaf::set_bits;
use crate::pmem::persistence::PersistenceBackend;
use crate::pmem::tree::{LeafGuess, PoolTree};

/// Number of keys that are looked up together. More would evict what was prefetched for the first of them.
const GROUP_LEN: usize = 16;

impl<M: PersistenceBackend> PoolTree<M> {
    /// The values of `keys` as of `at`, the moment of a registered snapshot or iterator, in the order of
    /// `keys`.
    ///
    /// # Errors
    /// As [`get_at`](PoolTree::get_at).
    pub(crate) fn get_many_at(&self, keys: &[&[u8]], at: ReadMoment) -> Result<Vec<Option<Slice>>> {
        let mut values = Vec::with_capacity(keys.len());
        for keys in keys.chunks(GROUP_LEN) {
            let pin = self.pin()?;
            let guesses: Vec<LeafGuess> = keys.iter().map(|key| self.guess_leaf(key, &pin)).collect();
            self.prefetch_records(&guesses, &pin);
            for (key, guess) in keys.iter().zip(guesses) {
                values.push(self.get_guessed(key, guess, at, &pin)?);
            }
        }
        Ok(values)
    }

    /// Prefetches the slots, and then the records, with the fingerprints of the keys. The leaves may change meanwhile:
    /// then other records are prefetched, which does no harm.
    fn prefetch_records(&self, guesses: &[LeafGuess], _pin: &Pin) {
        let first_match = |guess: &LeafGuess| {
            let leaf = self.leaf(guess.leaf);
            let slot = set_bits(leaf.match_fingerprint(leaf.commit_word(), guess.fingerprint)).next();
            slot.map(|slot| (leaf, slot))
        };
        for (leaf, slot) in guesses.iter().filter_map(first_match) {
            self.region().prefetch(leaf.slot_offset(slot), 8);
        }
        for (leaf, slot) in guesses.iter().filter_map(first_match) {
            self.prefetch_record(leaf.slot(slot));
        }
    }
}

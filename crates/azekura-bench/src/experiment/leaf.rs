//! A persistent B+ tree with leaves of 2017, the baseline of zero-copy splits: three ways to split a leaf, as in the
//! third founding document.
//!
//! A baseline on purpose: nothing is recovered, one thread works at a time, and the inner nodes are a `BTreeMap`, which
//! is faster than what they were. Strings end with a zero byte. A leaf is a row of cells of 32 bytes: 16 for up to 15
//! characters or a header, 16 for a pointer to a buffer with longer ones.

use crate::error::Result;
use crate::experiment::leaf_pool::{LeafPool, StoreCounts};
use std::collections::BTreeMap;
use std::ops::Bound;

/// Slots of a leaf.
const SLOTS: usize = 48;
/// Of a pointer to the next leaf.
const NEXT_LEN: usize = 16;
const CELL_LEN: usize = 32;
/// Characters that need no buffer.
const INLINE_MAX: usize = 15;
/// Where a cell has its pointer.
const POINTER: usize = 16;

/// The layout of a leaf and its way to split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeafKind {
    /// Rows of hashes, keys and values; strings are copied.
    NaiveCopy,
    /// The same; strings with a buffer are exchanged, short ones are copied.
    CopyOrSwap,
    /// One row of cells, which are exchanged: hash, both lengths, and a buffer with key and value.
    Slots,
}

impl LeafKind {
    /// Where the row of cells begins: after the hashes, if they have a row of their own.
    fn first_cell(self) -> usize {
        if self == LeafKind::Slots { 0 } else { SLOTS }
    }

    /// Cells of a slot: one, or one for the key and one for the value.
    fn cells(self) -> usize {
        if self == LeafKind::Slots { 1 } else { 2 }
    }

    /// The offset of the pointer to the next leaf.
    fn next(self) -> usize {
        self.first_cell() + self.cells() * SLOTS * CELL_LEN
    }

    /// The address of the `row`-th cell of a slot.
    fn cell(self, leaf: usize, row: usize, slot: usize) -> usize {
        leaf + self.first_cell() + (row * SLOTS + slot) * CELL_LEN
    }
}

/// The volatile part of a leaf: copies of its keys, as in pmemkv.
struct LeafKeys {
    /// Address of the leaf in the pool.
    at: usize,
    hashes: [u8; SLOTS],
    keys: Vec<Option<Vec<u8>>>,
}

impl LeafKeys {
    fn new(at: usize) -> LeafKeys {
        LeafKeys { at, hashes: [0; SLOTS], keys: vec![None; SLOTS] }
    }

    fn slot_of(&self, key: &[u8], hash: u8) -> Option<usize> {
        (0..SLOTS).find(|slot| self.hashes[*slot] == hash && self.keys[*slot].as_deref() == Some(key))
    }

    fn free_slot(&self) -> Option<usize> {
        self.hashes.iter().position(|hash| *hash == 0)
    }
}

/// One tree. Keys and values have no zero byte.
pub(crate) struct LeafTree {
    pub(crate) pool: LeafPool,
    kind: LeafKind,
    /// The leaves by the lowest key of each; that of the first leaf is empty.
    leaves: BTreeMap<Vec<u8>, LeafKeys>,
    pub(crate) splits: u64,
    /// Costs of the splits, including the lines that the commit flushes for them.
    pub(crate) in_splits: StoreCounts,
}

/// One byte, never 0: that is a free slot.
fn hash(key: &[u8]) -> u8 {
    let mixed = key.iter().fold(key.len() as u32, |sum, byte| (sum ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    ((mixed ^ (mixed >> 15)) as u8).max(1)
}

impl LeafTree {
    /// An empty tree; an error if the pool is too small for a leaf.
    pub(crate) fn new(mut pool: LeafPool, kind: LeafKind) -> Result<LeafTree> {
        pool.begin();
        let first = LeafKeys::new(pool.allocate(kind.next() + NEXT_LEN)?);
        pool.commit();
        let leaves = BTreeMap::from([(Vec::new(), first)]);
        Ok(LeafTree { pool, kind, leaves, splits: 0, in_splits: StoreCounts::default() })
    }

    /// Puts or replaces. An error if the pool is full; the tree is unusable then.
    pub(crate) fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let hash = hash(key);
        let (low, leaf) = self.leaf_of(key);
        let (mut low, mut slot) = (low.to_vec(), leaf.slot_of(key, hash).or_else(|| leaf.free_slot()));
        self.pool.begin();
        if slot.is_none() {
            let (before, due) = (self.pool.counts, self.pool.lines_at_commit());
            low = self.split(&low, key)?;
            self.splits += 1;
            let mut done = self.pool.counts - before;
            done.lines += self.pool.lines_at_commit() - due;
            self.in_splits += done;
            slot = self.leaves[&low].free_slot();
        }
        self.fill(&low, slot.expect("half of the slots are free after a split"), hash, key, value)?;
        self.pool.commit();
        Ok(())
    }

    /// The value, found as `put` finds its slot.
    pub(crate) fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        let leaf = self.leaf_of(key).1;
        let slot = leaf.slot_of(key, hash(key))?;
        let cell = self.kind.cell(leaf.at, self.kind.cells() - 1, slot);
        Some(match self.kind {
            LeafKind::Slots => characters(&self.pool, buffer(&self.pool, cell)? + key.len() + 1),
            _ => text_get(&self.pool, cell),
        })
    }

    fn leaf_of(&self, key: &[u8]) -> (&[u8], &LeafKeys) {
        let found = self.leaves.range::<[u8], _>((Bound::Unbounded, Bound::Included(key))).next_back();
        found.map(|(low, leaf)| (low.as_slice(), leaf)).expect("the first leaf has all that is low")
    }

    fn fill(&mut self, low: &[u8], slot: usize, hash: u8, key: &[u8], value: &[u8]) -> Result<()> {
        let leaf = self.leaves.get_mut(low).expect("it was just found");
        let (pool, cell) = (&mut self.pool, |row| self.kind.cell(leaf.at, row, slot));
        if self.kind == LeafKind::Slots {
            let lengths = [key.len(), value.len()].map(|len| (len as u32).to_le_bytes()).concat();
            cell_set(pool, cell(0), &[&[hash, 0, 0, 0], &lengths[..]].concat(), &[key, &[0], value].concat())?;
        } else {
            if leaf.hashes[slot] == 0 {
                text_set(pool, cell(0), key)?;
            }
            text_set(pool, cell(1), value)?;
            set_hash(pool, leaf.at, slot, hash);
        }
        (leaf.hashes[slot], leaf.keys[slot]) = (hash, Some(key.to_vec()));
        Ok(())
    }

    /// Splits the leaf with the lowest key `low` and returns the lowest key of the half to which `key` belongs. The
    /// split key is the middle one of all keys and the new one; larger keys move to the same slots of the new leaf.
    fn split(&mut self, low: &[u8], key: &[u8]) -> Result<Vec<u8>> {
        let new = self.pool.allocate(self.kind.next() + NEXT_LEN)?;
        let leaf = self.leaves.get_mut(low).expect("it was just found");
        let mut keys: Vec<&[u8]> = leaf.keys.iter().flatten().map(Vec::as_slice).chain([key]).collect();
        keys.sort_unstable();
        let (split_key, first_above) = (keys[SLOTS / 2].to_vec(), keys[SLOTS / 2 + 1].to_vec());
        let mut moved = LeafKeys::new(new);
        for slot in (0..SLOTS).rev() {
            if leaf.keys[slot].as_ref().is_some_and(|key| *key > split_key) {
                relocate(&mut self.pool, self.kind, leaf.at, new, slot, leaf.hashes[slot])?;
                moved.hashes[slot] = std::mem::take(&mut leaf.hashes[slot]);
                moved.keys[slot] = leaf.keys[slot].take();
            }
        }
        // The list contains the new leaf before the old one, whatever the order of their keys.
        self.pool.store(new + self.kind.next(), &(leaf.at as u64).to_le_bytes());
        let goes_up = *key > *split_key;
        self.leaves.insert(first_above.clone(), moved);
        Ok(if goes_up { first_above } else { low.to_vec() })
    }
}

/// Eight hashes share one entry of the journal.
fn set_hash(pool: &mut LeafPool, leaf: usize, slot: usize, hash: u8) {
    pool.snapshot(leaf + slot / 8 * 8, 8);
    pool.store(leaf + slot, &[hash]);
}

/// Moves a slot to the same place of another leaf.
fn relocate(pool: &mut LeafPool, kind: LeafKind, from: usize, to: usize, slot: usize, hash: u8) -> Result<()> {
    for row in 0..kind.cells() {
        let (old, new) = (kind.cell(from, row, slot), kind.cell(to, row, slot));
        if kind != LeafKind::NaiveCopy && buffer(pool, old).is_some() {
            swap(pool, old, new);
            continue;
        }
        let characters = text_get(pool, old);
        text_set(pool, new, &characters)?;
        // A short string that is marked unused by its hash may stay.
        if kind == LeafKind::NaiveCopy {
            text_set(pool, old, b"")?;
        }
    }
    if kind != LeafKind::Slots {
        set_hash(pool, to, slot, hash);
        set_hash(pool, from, slot, 0);
    }
    Ok(())
}

/// The buffer of a cell; `None` if its characters are inside the leaf.
fn buffer(pool: &LeafPool, cell: usize) -> Option<usize> {
    Some(pool.u64(cell + POINTER) as usize).filter(|buffer| *buffer != 0)
}

/// The characters from an address up to a zero byte.
fn characters(pool: &LeafPool, from: usize) -> Vec<u8> {
    (from..).map(|at| pool.bytes(at, 1)[0]).take_while(|byte| *byte != 0).collect()
}

fn text_get(pool: &LeafPool, cell: usize) -> Vec<u8> {
    characters(pool, buffer(pool, cell).unwrap_or(cell))
}

/// Changes a string, which has no zero byte.
fn text_set(pool: &mut LeafPool, cell: usize, characters: &[u8]) -> Result<()> {
    if characters.len() <= INLINE_MAX {
        cell_set(pool, cell, characters, b"")
    } else {
        cell_set(pool, cell, b"", characters)
    }
}

/// Changes a cell: the bytes in the leaf, and those in a new buffer, if there are any. An error if the pool is full.
fn cell_set(pool: &mut LeafPool, cell: usize, inside: &[u8], outside: &[u8]) -> Result<()> {
    pool.snapshot(cell, CELL_LEN);
    let before = buffer(pool, cell);
    let mut bytes = [0; CELL_LEN];
    bytes[..inside.len()].copy_from_slice(inside);
    if !outside.is_empty() {
        // Allocated memory is all zeros, so the string ends with a zero byte.
        let buffer = pool.allocate(outside.len() + 1)?;
        pool.store(buffer, outside);
        bytes[POINTER..POINTER + 8].copy_from_slice(&(buffer as u64).to_le_bytes());
    }
    pool.store(cell, &bytes);
    before.into_iter().for_each(|buffer| pool.release(buffer));
    Ok(())
}

/// Exchanges two cells.
fn swap(pool: &mut LeafPool, one: usize, other: usize) {
    pool.snapshot(one, CELL_LEN);
    pool.snapshot(other, CELL_LEN);
    let (first, second) = (pool.bytes(one, CELL_LEN).to_vec(), pool.bytes(other, CELL_LEN).to_vec());
    pool.store(one, &second);
    pool.store(other, &first);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::leaf_pool::LeafPool;

    const ALL: [LeafKind; 3] = [LeafKind::NaiveCopy, LeafKind::CopyOrSwap, LeafKind::Slots];

    fn scratch(len: usize) -> (tempfile::TempDir, LeafPool) {
        let dir = tempfile::tempdir().unwrap();
        let pool = LeafPool::create(&dir.path().join("pool"), len).unwrap();
        (dir, pool)
    }

    fn records(n: u64, key_len: usize, value_len: usize) -> Vec<(Vec<u8>, Vec<u8>)> {
        (0..n)
            .map(|i| {
                let key = format!("{:0key_len$}", i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % 1_000_000);
                (key.into_bytes(), vec![b'a' + (i % 26) as u8; value_len])
            })
            .collect()
    }

    #[test]
    fn every_leaf_has_all_records_in_any_order() {
        for leaves in ALL {
            for (key_len, value_len) in [(6, 4), (20, 15), (20, 100)] {
                let (_dir, pool) = scratch(16 << 20);
                let mut tree = LeafTree::new(pool, leaves).unwrap();
                let mut model = BTreeMap::new();
                let records = records(3000, key_len, value_len);
                for (i, (key, value)) in records.iter().chain(records.iter().step_by(3)).enumerate() {
                    let value = [value.as_slice(), i.to_string().as_bytes()].concat();
                    tree.put(key, &value).unwrap();
                    model.insert(key.clone(), value);
                }
                assert!(tree.splits > 50);
                for (key, value) in &model {
                    assert_eq!(tree.get(key).as_ref(), Some(value), "{leaves:?}");
                }
                assert_eq!(tree.get(b"nothing"), None);
            }
        }
    }

    /// The table of the reference, section 1.6: fences of a split of 24 slots of 20 + 800 bytes in the middle of a
    /// leaf.
    #[test]
    fn a_split_costs_what_the_reference_counts() {
        for (leaves, fences) in [(LeafKind::NaiveCopy, 54), (LeafKind::CopyOrSwap, 54), (LeafKind::Slots, 24)] {
            let (_dir, pool) = scratch(16 << 20);
            let mut tree = LeafTree::new(pool, leaves).unwrap();
            // Every other slot moves, whatever eight of them share an entry for their hashes.
            for i in (1..=48u32).map(|i| i * 29 % 49).chain([0]) {
                tree.put(format!("{i:020}").as_bytes(), &[b'v'; 800]).unwrap();
            }
            let (splits, counts) = (tree.splits, tree.in_splits);
            assert_eq!((splits, counts.fences), (1, fences), "{leaves:?}");
            let payload = 24 * (20 + 800);
            assert_eq!(counts.stored > payload, leaves == LeafKind::NaiveCopy, "{leaves:?}: {counts:?}");
        }
    }

    /// 26.2 records to a leaf, 1143 and 955 bytes each: section 1.7.
    #[test]
    fn ascending_keys_use_the_space_of_the_reference() {
        for (leaves, bytes) in [(LeafKind::CopyOrSwap, 1143.0), (LeafKind::Slots, 955.0)] {
            let (_dir, pool) = scratch(16 << 20);
            let mut tree = LeafTree::new(pool, leaves).unwrap();
            let n = 10_000u32;
            (0..n).for_each(|i| tree.put(format!("{i:020}").as_bytes(), &[b'v'; 800]).unwrap());
            let each = tree.pool.bytes_taken() as f64 / f64::from(n);
            assert!((each / bytes - 1.0).abs() < 0.06, "{leaves:?}: {each} bytes a record");
        }
    }

    #[test]
    fn strings_of_every_length_round_trip_and_swap() {
        let (_dir, mut pool) = scratch(4 << 20);
        pool.begin();
        let (one, other) = (pool.allocate(CELL_LEN).unwrap(), pool.allocate(CELL_LEN).unwrap());
        pool.commit();
        for len in 0..70 {
            let characters = vec![b'a' + len as u8 % 26; len];
            pool.begin();
            text_set(&mut pool, one, &characters).unwrap();
            text_set(&mut pool, other, b"the other one, of some length").unwrap();
            swap(&mut pool, one, other);
            pool.commit();
            assert_eq!(text_get(&pool, other), characters);
            assert_eq!(text_get(&pool, one), b"the other one, of some length");
            assert_eq!(buffer(&pool, other).is_none(), len <= 15);
        }
        pool.begin();
        text_set(&mut pool, other, b"").unwrap();
        pool.commit();
        assert!(buffer(&pool, other).is_none() && text_get(&pool, other).is_empty());
        assert!(pool.bytes_taken() < 2000, "buffers are used again");
    }
}

//! One shard of the cache: what it holds, and in which order it lets go.
//!
//! Two queues, in the shape of S3-FIFO. A new block waits on probation; if it is asked for again before its turn it
//! moves to the main queue, a CLOCK, else it goes, and leaves a ghost: should it come back soon, it enters the main
//! queue at once. A scan, which asks once for each block, runs through the probation queue and leaves the main queue as
//! it was.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use crate::base::edit::FileId;
use crate::block::{Block, BlockKind, FilterBlock};

/// What the cache holds.
#[derive(Clone, Debug)]
pub(crate) enum Cached {
    Entries(Arc<Block>),
    Filter(Arc<FilterBlock>),
}

impl Cached {
    /// Memory held, in bytes.
    fn memory(&self) -> usize {
        match self {
            Cached::Entries(block) => block.memory(),
            Cached::Filter(filter) => filter.memory(),
        }
    }

    /// What keeping it costs the budget, in bytes: its memory, and its share of map, queues and allocator.
    pub(crate) fn charge(&self) -> u64 {
        const SHARE: usize = 160;
        (self.memory() + SHARE) as u64
    }
}

/// File and offset of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey {
    pub(crate) file: FileId,
    pub(crate) offset: u64,
}

impl CacheKey {
    /// Spreads file and offset over 64 bits; both are ours, so no seed is needed.
    #[inline]
    pub(crate) fn hash(&self) -> u64 {
        let mixed = (self.offset ^ self.file.0.rotate_left(40)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ (mixed >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
    }
}

/// Gives the map the hash that a [`CacheKey`] makes itself.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("keys of the cache are hashed as one number");
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

/// A key that hashes to what it carries.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Hashed(CacheKey);

impl std::hash::Hash for Hashed {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash());
    }
}

struct Entry {
    item: Cached,
    charge: u64,
    kind: BlockKind,
    /// Hits since the hand last came by, at most [`HITS_MAX`].
    hits: u8,
    main: bool,
}

const HITS_MAX: u8 = 3;

/// Counters of one kind of block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KindStats {
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    /// Held now.
    pub(crate) blocks: u64,
    /// Charged now.
    pub(crate) bytes: u64,
    pub(crate) evicted: u64,
}

/// The place of a kind in the counters.
fn place(kind: BlockKind) -> usize {
    match kind {
        BlockKind::Index => 1,
        BlockKind::IndexTop => 2,
        BlockKind::Filter => 3,
        BlockKind::FilterTop => 4,
        _ => 0, // data blocks of every layout; nothing else is cached
    }
}

/// One shard; the cache wraps it in a mutex and accounts for its bytes.
#[derive(Default)]
pub(crate) struct Shard {
    map: HashMap<Hashed, Entry, BuildHasherDefault<KeyHasher>>,
    probation: VecDeque<CacheKey>,
    main: VecDeque<CacheKey>,
    probation_bytes: u64,
    main_bytes: u64,
    ghosts: VecDeque<u64>,
    ghost_set: HashSet<u64, BuildHasherDefault<KeyHasher>>,
    stats: [KindStats; BlockKind::CACHED.len()],
}

impl Shard {
    #[inline]
    pub(crate) fn get(&mut self, key: CacheKey, kind: BlockKind) -> Option<Cached> {
        let stats = &mut self.stats[place(kind)];
        match self.map.get_mut(&Hashed(key)) {
            Some(entry) => {
                stats.hits += 1;
                if entry.hits < HITS_MAX {
                    entry.hits += 1;
                }
                Some(entry.item.clone())
            }
            None => {
                stats.misses += 1;
                None
            }
        }
    }

    /// Takes in a block, unless it holds one of that key already; says whether it did.
    pub(crate) fn insert(&mut self, key: CacheKey, kind: BlockKind, item: Cached, charge: u64) -> bool {
        if self.map.contains_key(&Hashed(key)) {
            return false;
        }
        let main = self.ghost_set.remove(&key.hash());
        self.map.insert(Hashed(key), Entry { item, charge, kind, hits: 0, main });
        self.push(key, charge, main);
        let stats = &mut self.stats[place(kind)];
        stats.blocks += 1;
        stats.bytes += charge;
        true
    }

    fn push(&mut self, key: CacheKey, charge: u64, main: bool) {
        if main {
            self.main.push_back(key);
            self.main_bytes += charge;
        } else {
            self.probation.push_back(key);
            self.probation_bytes += charge;
        }
    }

    /// Lets one block go, if it holds more than `low` bytes, and returns it with what it was charged, so that it can be
    /// dropped outside of the lock.
    pub(crate) fn evict(&mut self, low: u64) -> Option<(Cached, u64)> {
        if self.probation_bytes + self.main_bytes <= low {
            return None;
        }
        // Every turn takes a hit from a block, moves one from probation to main, or ends the loop.
        loop {
            let from_probation =
                self.main.is_empty() || self.probation_bytes * 10 > self.probation_bytes + self.main_bytes;
            let key = if from_probation { self.probation.pop_front() } else { self.main.pop_front() }?;
            let entry = self.map.get_mut(&Hashed(key)).expect("every key in a queue is in the map");
            let charge = entry.charge;
            if entry.main {
                self.main_bytes -= charge;
            } else {
                self.probation_bytes -= charge;
            }
            if entry.hits > 0 {
                entry.hits = if entry.main { entry.hits - 1 } else { 0 };
                entry.main = true;
                self.push(key, charge, true);
                continue;
            }
            if from_probation {
                self.remember(key.hash());
            }
            let entry = self.map.remove(&Hashed(key)).expect("found above");
            self.forget_bytes(&entry);
            self.stats[place(entry.kind)].evicted += 1;
            return Some((entry.item, charge));
        }
    }

    /// Keeps as many ghosts as there are blocks.
    fn remember(&mut self, hash: u64) {
        if self.ghost_set.insert(hash) {
            self.ghosts.push_back(hash);
        }
        while self.ghosts.len() > self.map.len().max(16) {
            if let Some(oldest) = self.ghosts.pop_front() {
                self.ghost_set.remove(&oldest);
            }
        }
    }

    fn forget_bytes(&mut self, entry: &Entry) {
        let stats = &mut self.stats[place(entry.kind)];
        stats.blocks -= 1;
        stats.bytes -= entry.charge;
    }

    /// Lets all blocks of a file go and returns what they were charged.
    pub(crate) fn remove_file(&mut self, file: FileId) -> u64 {
        let gone: Vec<Entry> = self.map.extract_if(|key, _| key.0.file == file).map(|(_, entry)| entry).collect();
        if gone.is_empty() {
            return 0;
        }
        self.probation.retain(|key| key.file != file);
        self.main.retain(|key| key.file != file);
        for entry in &gone {
            self.forget_bytes(entry);
            if entry.main {
                self.main_bytes -= entry.charge;
            } else {
                self.probation_bytes -= entry.charge;
            }
        }
        gone.iter().map(|entry| entry.charge).sum()
    }

    pub(crate) fn stats(&self, kind: BlockKind) -> KindStats {
        self.stats[place(kind)]
    }

    /// Panics if the queues, the map and the sums have drifted apart.
    #[cfg(test)]
    pub(crate) fn check(&self) -> u64 {
        let sum = |main: bool| self.map.values().filter(|e| e.main == main).map(|e| e.charge).sum::<u64>();
        assert_eq!((sum(false), sum(true)), (self.probation_bytes, self.main_bytes));
        assert_eq!(self.map.len(), self.probation.len() + self.main.len());
        assert!(self.ghosts.len() <= self.map.len().max(16) + 1 || self.ghost_set.len() <= self.ghosts.len());
        assert_eq!(self.stats.iter().map(|s| s.bytes).sum::<u64>(), self.probation_bytes + self.main_bytes);
        self.probation_bytes + self.main_bytes
    }
}

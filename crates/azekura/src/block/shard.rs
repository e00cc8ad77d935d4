//! One shard of the cache: what it holds, and in which order it lets go.
//!
//! Links are set and taken away here, under the shard's lock: a link leads to a block only while the block is in the
//! map.
//!
//! Two queues, in the shape of S3-FIFO. A new block waits on probation; if it is asked for again before its turn it
//! moves to the main queue, a CLOCK, else it goes, and leaves a ghost: should it come back soon, it enters the main
//! queue at once. A scan, which asks once for each block, runs through the probation queue and leaves the main queue as
//! it was. Pinned blocks are in no queue.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use crate::base::version_edit::FileNumber;
use crate::block::BlockKind;
use crate::block::cached_block::{Cacheable, CachedBlock, MemoryCharge, ParentSlot};
use crate::mem::parent_block::{CacheHandle, RetiredBlock};

/// File and offset of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey {
    pub(crate) file: FileNumber,
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
struct HashedCacheKey(CacheKey);

impl std::hash::Hash for HashedCacheKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash());
    }
}

struct CacheEntry {
    block: CachedBlock,
    charge: u64,
    kind: BlockKind,
    /// Hits by way of the map since the hand last came by, at most [`HITS_MAX`]; the link's mark is one more.
    hits: u8,
    queue: CacheQueue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CacheQueue {
    Probation,
    Main,
    /// In none: it only goes with its file.
    Pinned,
}

const HITS_MAX: u8 = 3;

/// Counters of one kind of block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockKindStats {
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    /// Held now.
    pub(crate) blocks: u64,
    /// Charged now.
    pub(crate) bytes: u64,
    pub(crate) evicted: u64,
}

/// A block that was read and shall enter the cache.
pub(crate) struct CacheInsertion<T> {
    pub(crate) kind: BlockKind,
    pub(crate) block: Arc<T>,
    pub(crate) charge: u64,
    pub(crate) parent_slot: Option<ParentSlot<T>>,
    pub(crate) pinned: bool,
}

/// The place of a kind in the counters.
pub(crate) fn kind_index(kind: BlockKind) -> usize {
    match kind {
        BlockKind::IndexPartition => 1,
        BlockKind::TopLevelIndex => 2,
        BlockKind::FilterPartition => 3,
        BlockKind::TopLevelFilter => 4,
        BlockKind::Blob => 5,
        BlockKind::BlobIndex => 6,
        _ => 0, // data blocks of every layout; nothing else is cached
    }
}

/// One shard; the cache wraps it in a mutex and accounts for its bytes.
#[derive(Default)]
pub(crate) struct CacheShard {
    map: HashMap<HashedCacheKey, CacheEntry, BuildHasherDefault<KeyHasher>>,
    probation: VecDeque<CacheKey>,
    main: VecDeque<CacheKey>,
    probation_bytes: u64,
    main_bytes: u64,
    pinned_bytes: u64,
    ghosts: VecDeque<u64>,
    ghost_set: HashSet<u64, BuildHasherDefault<KeyHasher>>,
    stats: [BlockKindStats; BlockKind::CACHED.len()],
}

/// What a shard let go of; to be dropped outside of its lock.
#[derive(Default)]
pub(crate) struct EvictedBlocks {
    pub(crate) blocks: Vec<RetiredBlock>,
    pub(crate) total_bytes: u64,
    /// As many of these were pinned.
    pub(crate) pinned_bytes: u64,
}

impl CacheShard {
    /// What stands at `key`, counted as a hit or a miss; from now on the link `home` leads there.
    pub(crate) fn get<T: Cacheable>(
        &mut self,
        key: CacheKey,
        kind: BlockKind,
        home: Option<ParentSlot<T>>,
    ) -> Option<Arc<T>> {
        let stats = &mut self.stats[kind_index(kind)];
        let entry = self.map.get_mut(&HashedCacheKey(key));
        let Some((handle, hits)) = entry.and_then(|entry| Some((T::cache_handle(&mut entry.block)?, &mut entry.hits)))
        else {
            stats.misses += 1;
            return None;
        };
        stats.hits += 1;
        *hits = HITS_MAX.min(*hits + 1);
        if let Some((parent, at)) = home {
            handle.link(parent, at);
        }
        Some(Arc::clone(handle.value()))
    }

    /// Takes in a block, unless it holds one of that key already; says whether it did. The receipt is for `charge`
    /// bytes.
    pub(crate) fn insert<T: Cacheable>(
        &mut self,
        key: CacheKey,
        new: CacheInsertion<T>,
        receipt: MemoryCharge,
    ) -> bool {
        let CacheInsertion { kind, block, charge, parent_slot: home, pinned } = new;
        if self.map.contains_key(&HashedCacheKey(key)) {
            return false;
        }
        let queue = match self.ghost_set.remove(&key.hash()) {
            _ if pinned => CacheQueue::Pinned,
            true => CacheQueue::Main,
            false => CacheQueue::Probation,
        };
        let mut handle = CacheHandle::new(block, receipt);
        if let Some((parent, at)) = home {
            handle.link(parent, at);
        }
        self.map
            .insert(HashedCacheKey(key), CacheEntry { block: T::into_cached(handle), charge, kind, hits: 0, queue });
        self.push(key, charge, queue);
        let stats = &mut self.stats[kind_index(kind)];
        stats.blocks += 1;
        stats.bytes += charge;
        true
    }

    fn push(&mut self, key: CacheKey, charge: u64, queue: CacheQueue) {
        *self.bytes_of(queue) += charge;
        match queue {
            CacheQueue::Probation => self.probation.push_back(key),
            CacheQueue::Main => self.main.push_back(key),
            CacheQueue::Pinned => {}
        }
    }

    fn bytes_of(&mut self, queue: CacheQueue) -> &mut u64 {
        match queue {
            CacheQueue::Probation => &mut self.probation_bytes,
            CacheQueue::Main => &mut self.main_bytes,
            CacheQueue::Pinned => &mut self.pinned_bytes,
        }
    }

    /// Lets one block go, if the queues hold more than `low` bytes.
    pub(crate) fn evict(&mut self, low: u64) -> Option<(RetiredBlock, u64)> {
        if self.probation_bytes + self.main_bytes <= low {
            return None;
        }
        // Every turn removes a hit from a block, moves one from probation to main, or ends the loop. Readers may set
        // marks meanwhile, but the number of turns is bounded: after it, every block has been visited until its hits
        // were used up.
        let mut turns = (usize::from(HITS_MAX) + 2) * self.map.len();
        loop {
            let from_probation =
                self.main.is_empty() || self.probation_bytes * 10 > self.probation_bytes + self.main_bytes;
            let key = if from_probation { self.probation.pop_front() } else { self.main.pop_front() }?;
            let entry = self.map.get_mut(&HashedCacheKey(key)).expect("every key in a queue is in the map");
            let (charge, queue) = (entry.charge, entry.queue);
            let hits = entry.hits + u8::from(entry.block.take_referenced());
            turns = turns.saturating_sub(1);
            let spared = hits > 0 && turns > 0;
            if spared {
                entry.hits = if queue == CacheQueue::Main { hits - 1 } else { 0 };
                entry.queue = CacheQueue::Main;
            }
            *self.bytes_of(queue) -= charge;
            if spared {
                self.push(key, charge, CacheQueue::Main);
                continue;
            }
            if from_probation {
                self.add_ghost(key.hash());
            }
            let entry = self.map.remove(&HashedCacheKey(key)).expect("found above");
            self.subtract_stats(&entry);
            self.stats[kind_index(entry.kind)].evicted += 1;
            return Some((entry.block.retire(), charge));
        }
    }

    /// Keeps as many ghosts as there are blocks.
    fn add_ghost(&mut self, hash: u64) {
        if self.ghost_set.insert(hash) {
            self.ghosts.push_back(hash);
        }
        while self.ghosts.len() > self.map.len().max(16) {
            if let Some(oldest) = self.ghosts.pop_front() {
                self.ghost_set.remove(&oldest);
            }
        }
    }

    fn subtract_stats(&mut self, entry: &CacheEntry) {
        let stats = &mut self.stats[kind_index(entry.kind)];
        stats.blocks -= 1;
        stats.bytes -= entry.charge;
    }

    /// Lets all blocks of a file go.
    pub(crate) fn remove_file(&mut self, file: FileNumber) -> EvictedBlocks {
        let gone: Vec<CacheEntry> = self.map.extract_if(|key, _| key.0.file == file).map(|(_, entry)| entry).collect();
        let mut let_go = EvictedBlocks::default();
        if gone.is_empty() {
            return let_go;
        }
        self.probation.retain(|key| key.file != file);
        self.main.retain(|key| key.file != file);
        for entry in gone {
            self.subtract_stats(&entry);
            *self.bytes_of(entry.queue) -= entry.charge;
            let_go.total_bytes += entry.charge;
            let_go.pinned_bytes += if entry.queue == CacheQueue::Pinned { entry.charge } else { 0 };
            let_go.blocks.push(entry.block.retire());
        }
        let_go
    }

    pub(crate) fn stats(&self, kind: BlockKind) -> BlockKindStats {
        self.stats[kind_index(kind)]
    }

    /// Panics if the queues, the map and the sums have drifted apart; returns all bytes, and those of pinned blocks.
    #[cfg(test)]
    pub(crate) fn check(&self) -> (u64, u64) {
        let sum = |queue| self.map.values().filter(|e| e.queue == queue).map(|e| e.charge).sum::<u64>();
        let sums = [CacheQueue::Probation, CacheQueue::Main, CacheQueue::Pinned].map(sum);
        assert_eq!(sums, [self.probation_bytes, self.main_bytes, self.pinned_bytes]);
        let queued = self.map.values().filter(|e| e.queue != CacheQueue::Pinned).count();
        assert_eq!(queued, self.probation.len() + self.main.len());
        assert!(self.ghosts.len() <= self.map.len().max(16) + 1 || self.ghost_set.len() <= self.ghosts.len());
        let all = sums.iter().sum::<u64>();
        assert_eq!(self.stats.iter().map(|s| s.bytes).sum::<u64>(), all);
        (all, self.pinned_bytes)
    }
}

impl Drop for CacheShard {
    /// All at once: each by itself would raise the epoch.
    fn drop(&mut self) {
        RetiredBlock::drop_all(self.map.drain().map(|(_, entry)| entry.block.retire()).collect());
    }
}

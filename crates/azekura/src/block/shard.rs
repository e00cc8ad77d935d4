//! One shard of the cache: its map of blocks, and the order of their eviction. Each block is owned by a cache handle
//! that clears the child link to the block.
//!
//! The shard sets and clears child links under its lock: a link points to a block only while the block is in the map.
//!
//! Eviction uses two queues, as in S3-FIFO. A new block enters the probation queue. If it is requested again before
//! it reaches the front, it moves to the main queue. Otherwise it is evicted, and its hash becomes a ghost. A block
//! that is inserted while its hash is a ghost enters the main queue directly. A scan requests each block once, so it
//! passes through the probation queue and leaves the main queue unchanged. Pinned blocks are in no queue.
//!
//! The main queue is a generalized CLOCK: the eviction increments the counter of a block that was used since its last
//! visit, decrements that of another block, and evicts a block whose counter is 0. A block that is used between most
//! visits survives a few visits without a use, so blocks of the same age are kept in the order of their frequency. The
//! kind of a block does not matter: see `docs/decisions/0032-the-cache-keeps-what-is-used-often.md`.
//!
//! Evicted blocks are collected in a bag of the shard, and freed through the epochs when the bag is full.

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
    /// Spreads file and offset over 64 bits. The database chooses both, so no seed is needed.
    #[inline]
    pub(crate) fn hash(&self) -> u64 {
        let mixed = (self.offset ^ self.file.0.rotate_left(40)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ (mixed >> 32)).wrapping_mul(0xD6E8_FEB8_6659_FD93)
    }
}

/// A hasher for the map that returns the hash that [`CacheKey::hash`] computes.
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

/// A key whose `Hash` is [`CacheKey::hash`].
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
    /// Counter of uses, at most [`HITS_MAX`]. A hit through the map increments it, and so does the eviction if a reader
    /// followed the link since the last visit. A visit of a block that no reader has marked decrements it.
    hits: u8,
    queue: CacheQueue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CacheQueue {
    Probation,
    Main,
    /// In no queue: the block is removed only with its file.
    Pinned,
}

const HITS_MAX: u8 = 3;
/// The probation queue has one part in this many of the bytes in the queues. New blocks are seldom requested again, so
/// a short queue leaves more memory to the main queue.
const PROBATION_DIVISOR: u64 = 20;
/// Maximum number of blocks in the bag of a shard.
const BAG_BLOCKS_MAX: usize = 32;
/// In builds with debug assertions, each change of a shard with at most this many blocks checks all of them.
const CHECKED_BLOCKS_MAX: usize = 16;

/// Counters of one kind of block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockKindStats {
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    /// Number of blocks in the cache.
    pub(crate) blocks: u64,
    /// Memory charge of these blocks in bytes.
    pub(crate) bytes: u64,
    pub(crate) evicted: u64,
}

/// A block that was read and is to be inserted into the cache.
pub(crate) struct CacheInsertion<T> {
    pub(crate) kind: BlockKind,
    pub(crate) block: Arc<T>,
    pub(crate) charge: u64,
    pub(crate) parent_slot: Option<ParentSlot<T>>,
    pub(crate) pinned: bool,
}

/// Index of a kind in the counters.
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

/// One shard. The cache wraps it in a mutex and accounts for its bytes.
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
    bag: EvictionBag,
}

/// Evicted blocks of a shard that wait for others, so that the lock of the epochs is taken once for all of them. No
/// link points to them.
#[derive(Default)]
pub(crate) struct EvictionBag {
    blocks: Vec<RetiredBlock<MemoryCharge>>,
    /// Memory charge of the blocks in bytes.
    bytes: u64,
}

/// An eviction.
pub(crate) struct Evicted {
    /// Memory charge of the evicted block in bytes.
    pub(crate) bytes: u64,
    /// The bag, if the block has filled it. The caller drops it outside of the lock of the shard.
    pub(crate) bag: Vec<RetiredBlock<MemoryCharge>>,
}

/// Blocks that were removed from a shard. The caller drops them outside of its lock.
#[derive(Default)]
pub(crate) struct EvictedBlocks {
    pub(crate) blocks: Vec<RetiredBlock<MemoryCharge>>,
    pub(crate) total_bytes: u64,
    /// The part of `total_bytes` that was pinned.
    pub(crate) pinned_bytes: u64,
}

impl CacheShard {
    /// Returns the block of `key` and counts a hit or a miss. After a hit the link `parent_slot` points to the block.
    pub(crate) fn get<T: Cacheable>(
        &mut self,
        key: CacheKey,
        kind: BlockKind,
        parent_slot: Option<ParentSlot<T>>,
    ) -> Option<Arc<T>> {
        let stats = &mut self.stats[kind_index(kind)];
        let entry = self.map.get_mut(&HashedCacheKey(key));
        let Some((handle, hits)) = entry.and_then(|entry| Some((T::cache_handle(&mut entry.block)?, &mut entry.hits)))
        else {
            stats.misses += 1;
            return None;
        };
        stats.hits += 1;
        debug_assert!(*hits <= HITS_MAX, "the hits of a block are bounded");
        *hits = HITS_MAX.min(*hits + 1);
        if let Some((parent, at)) = parent_slot {
            handle.link(parent, at);
        }
        Some(Arc::clone(handle.value()))
    }

    /// Whether the shard has the block of `key`. Counts nothing.
    pub(crate) fn contains(&self, key: CacheKey) -> bool {
        self.map.contains_key(&HashedCacheKey(key))
    }

    /// Inserts a block unless the shard has one with this key. Returns whether it did. `memory_charge` is for
    /// `charge` bytes.
    pub(crate) fn insert<T: Cacheable>(
        &mut self,
        key: CacheKey,
        new: CacheInsertion<T>,
        memory_charge: MemoryCharge,
    ) -> bool {
        let CacheInsertion { kind, block, charge, parent_slot, pinned } = new;
        if self.map.contains_key(&HashedCacheKey(key)) {
            return false;
        }
        let queue = match self.ghost_set.remove(&key.hash()) {
            _ if pinned => CacheQueue::Pinned,
            true => CacheQueue::Main,
            false => CacheQueue::Probation,
        };
        let mut handle = CacheHandle::new(block, memory_charge);
        if let Some((parent, at)) = parent_slot {
            handle.link(parent, at);
        }
        self.map
            .insert(HashedCacheKey(key), CacheEntry { block: T::into_cached(handle), charge, kind, hits: 0, queue });
        self.push(key, charge, queue);
        let stats = &mut self.stats[kind_index(kind)];
        stats.blocks += 1;
        stats.bytes += charge;
        if cfg!(debug_assertions) {
            self.check_invariants();
        }
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

    /// Evicts one block if the queues contain more than `low` bytes. Afterwards the bag has at most `bag_bytes_max`
    /// bytes.
    pub(crate) fn evict(&mut self, low: u64, bag_bytes_max: u64) -> Option<Evicted> {
        if self.probation_bytes + self.main_bytes <= low {
            return None;
        }
        // Every turn clears the mark of a block, decrements its counter, moves a block from probation to main, or ends
        // the loop. Readers may mark links concurrently, but the number of turns is bounded: the bound lets every block
        // be visited until its counter is 0.
        let mut turns = (usize::from(HITS_MAX) + 2) * self.map.len();
        loop {
            let from_probation = self.main.is_empty()
                || self.probation_bytes * PROBATION_DIVISOR > self.probation_bytes + self.main_bytes;
            let key = if from_probation { self.probation.pop_front() } else { self.main.pop_front() }?;
            let entry = self.map.get_mut(&HashedCacheKey(key)).expect("every key in a queue is in the map");
            let (charge, queue) = (entry.charge, entry.queue);
            debug_assert_eq!(queue == CacheQueue::Probation, from_probation, "a block is in the queue that it names");
            debug_assert!(queue != CacheQueue::Pinned, "a pinned block is in no queue");
            let is_marked = entry.block.take_referenced();
            turns = turns.saturating_sub(1);
            let is_kept = (is_marked || entry.hits > 0) && turns > 0;
            if is_kept {
                entry.hits = match queue {
                    CacheQueue::Main if is_marked => HITS_MAX.min(entry.hits + 1),
                    CacheQueue::Main => entry.hits - 1,
                    _ => 0,
                };
                entry.queue = CacheQueue::Main;
            }
            *self.bytes_of(queue) -= charge;
            if is_kept {
                self.push(key, charge, CacheQueue::Main);
                continue;
            }
            if from_probation {
                self.add_ghost(key.hash());
            }
            let entry = self.map.remove(&HashedCacheKey(key)).expect("found above");
            self.subtract_stats(&entry);
            self.stats[kind_index(entry.kind)].evicted += 1;
            if cfg!(debug_assertions) {
                self.check_invariants();
            }
            let bag = self.bag.add(entry.block.retire(), charge, bag_bytes_max);
            return Some(Evicted { bytes: charge, bag });
        }
    }

    /// Number of blocks in the bag, and their memory charge in bytes.
    #[cfg(test)]
    pub(crate) fn bag_len(&self) -> (usize, u64) {
        (self.bag.blocks.len(), self.bag.bytes)
    }

    /// Empties the bag. The caller drops the blocks outside of the lock of the shard.
    pub(crate) fn take_bag(&mut self) -> Vec<RetiredBlock<MemoryCharge>> {
        std::mem::take(&mut self.bag).blocks
    }

    /// Adds a ghost. A shard keeps at most as many ghosts as it has blocks, or 16 if it has fewer blocks.
    fn add_ghost(&mut self, hash: u64) {
        if self.ghost_set.insert(hash) {
            self.ghosts.push_back(hash);
        }
        while self.ghosts.len() > self.map.len().max(16) {
            if let Some(oldest) = self.ghosts.pop_front() {
                self.ghost_set.remove(&oldest);
            }
        }
        debug_assert!(self.ghosts.len() <= self.map.len().max(16), "ghosts are bounded by the blocks");
    }
    fn subtract_stats(&mut self, entry: &CacheEntry) {
        let stats = &mut self.stats[kind_index(entry.kind)];
        stats.blocks -= 1;
        stats.bytes -= entry.charge;
    }

    /// Removes all blocks of a file, and empties the bag.
    pub(crate) fn remove_file(&mut self, file: FileNumber) -> EvictedBlocks {
        let removed: Vec<CacheEntry> =
            self.map.extract_if(|key, _| key.0.file == file).map(|(_, entry)| entry).collect();
        let mut evicted = EvictedBlocks { blocks: self.take_bag(), ..EvictedBlocks::default() };
        if removed.is_empty() {
            return evicted;
        }
        self.probation.retain(|key| key.file != file);
        self.main.retain(|key| key.file != file);
        for entry in removed {
            self.subtract_stats(&entry);
            *self.bytes_of(entry.queue) -= entry.charge;
            evicted.total_bytes += entry.charge;
            evicted.pinned_bytes += if entry.queue == CacheQueue::Pinned { entry.charge } else { 0 };
            evicted.blocks.push(entry.block.retire());
        }
        if cfg!(debug_assertions) {
            self.check_invariants();
        }
        evicted
    }

    pub(crate) fn stats(&self, kind: BlockKind) -> BlockKindStats {
        self.stats[kind_index(kind)]
    }

    /// Panics if the sums contradict each other, and in a shard with few blocks, if they contradict the blocks. Called
    /// after each change.
    fn check_invariants(&self) {
        let queued = self.probation.len() + self.main.len();
        assert!(queued <= self.map.len(), "every key in a queue is in the map");
        assert!(self.pinned_bytes > 0 || queued == self.map.len(), "a block that is not pinned is in a queue");
        assert_eq!(self.stats.iter().map(|kind| kind.blocks).sum::<u64>(), self.map.len() as u64);
        let bytes = self.probation_bytes + self.main_bytes + self.pinned_bytes;
        assert_eq!(self.stats.iter().map(|kind| kind.bytes).sum::<u64>(), bytes);
        assert!(self.ghost_set.len() <= self.ghosts.len(), "every ghost is in the queue of ghosts");
        if self.map.len() <= CHECKED_BLOCKS_MAX {
            self.check_blocks();
        }
    }

    /// Panics if the queues, the map and the sums are inconsistent. Returns the bytes of all blocks and of the pinned
    /// blocks.
    pub(crate) fn check_blocks(&self) -> (u64, u64) {
        for (keys, queue) in [(&self.probation, CacheQueue::Probation), (&self.main, CacheQueue::Main)] {
            let is_here = |key: &CacheKey| self.map.get(&HashedCacheKey(*key)).is_some_and(|e| e.queue == queue);
            assert!(keys.iter().all(is_here), "a queue has the blocks that name it");
        }
        for kind in BlockKind::CACHED {
            let blocks = self.map.values().filter(|e| kind_index(e.kind) == kind_index(kind));
            let (count, bytes) = blocks.fold((0, 0), |(count, bytes), e| (count + 1, bytes + e.charge));
            assert_eq!((self.stats(kind).blocks, self.stats(kind).bytes), (count, bytes), "the counters of {kind:?}");
        }
        let sum = |queue| self.map.values().filter(|e| e.queue == queue).map(|e| e.charge).sum::<u64>();
        let sums = [CacheQueue::Probation, CacheQueue::Main, CacheQueue::Pinned].map(sum);
        assert_eq!(sums, [self.probation_bytes, self.main_bytes, self.pinned_bytes]);
        let queued = self.map.values().filter(|e| e.queue != CacheQueue::Pinned).count();
        assert_eq!(queued, self.probation.len() + self.main.len());
        assert!(self.ghost_set.len() <= self.ghosts.len());
        let all = sums.iter().sum::<u64>();
        assert_eq!(self.stats.iter().map(|s| s.bytes).sum::<u64>(), all);
        (all, self.pinned_bytes)
    }
}

impl EvictionBag {
    /// Adds a block. Returns all blocks if they are more than the bag may have.
    fn add(
        &mut self,
        block: RetiredBlock<MemoryCharge>,
        bytes: u64,
        bytes_max: u64,
    ) -> Vec<RetiredBlock<MemoryCharge>> {
        self.bytes += bytes;
        self.blocks.push(block);
        if self.blocks.len() < BAG_BLOCKS_MAX && self.bytes <= bytes_max {
            return Vec::new();
        }
        self.bytes = 0;
        let next = if self.blocks.len() < BAG_BLOCKS_MAX { Vec::new() } else { Vec::with_capacity(BAG_BLOCKS_MAX) };
        std::mem::replace(&mut self.blocks, next)
    }
}

impl Drop for CacheShard {
    /// Drops all blocks in one batch, because each drop by itself would advance the epoch.
    fn drop(&mut self) {
        let mut all = self.take_bag();
        all.extend(self.map.drain().map(|(_, entry)| entry.block.retire()));
        RetiredBlock::drop_all(all);
    }
}

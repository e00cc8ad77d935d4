//! The block cache: one budget for the data, index and filter blocks of all tables, and for the values of blob files.

use std::sync::{Arc, OnceLock};

use crate::base::blob_pointer::BlobValueId;
use crate::base::version_edit::FileNumber;
use crate::block::BlockKind;
use crate::block::cached_block::{Cacheable, CachedBlobValue, MemoryCharge, ParentSlot, add_within_limit};
use crate::block::shard::{BlockKindStats, CacheInsertion, CacheKey, CacheShard, Evicted, kind_index};
use crate::mem::atomic::{
    AtomicBool, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError, subtract_counted,
};
use crate::mem::buffer_pool::{Buffer, BufferPool};
use crate::mem::epoch::Pin;
use crate::mem::parent_block::{ParentBlock, PinnedRef, RetiredBlock};

/// Maximum number of shards.
const SHARDS_MAX: u64 = 64;
/// Minimum share of a shard in bytes. A shard first evicts its own blocks above half of its share, so the share must
/// have space for a whole filter among other blocks. Only misses take the lock of a shard, so a small cache needs few
/// shards.
const SHARD_BYTES_MIN: u64 = 4 << 20;
/// This fraction of the capacity is reserved for evicted blocks that are not freed yet, because readers may still use
/// them, and for memory that the pool keeps for the next blocks.
const UNFREED_DIVISOR: u64 = 16;
/// Pinned blocks use at most this fraction of the capacity.
const PINNED_DIVISOR: u64 = 4;
/// Minimum capacity in bytes for pooled buffers: four huge pages. A smaller cache uses the allocator, because the
/// unused part of a huge page would be too large a part of it.
const POOLED_MIN: u64 = 8 << 20;
/// Cost of a block in bytes besides its memory: its share of the map, the queues and the allocator.
const ENTRY_OVERHEAD: u64 = 192;
/// The cache has one link to a value for this many bytes of its capacity, rounded to a power of two: the links take
/// less than half a percent of the capacity.
const BYTES_PER_VALUE_LINK: u64 = 2 << 10;
/// Maximum number of links to values: 32 MiB of links.
const VALUE_LINKS_MAX: u64 = 4 << 20;
/// Number of threads that count hits on a cache line of their own. Further threads share one more line.
const COUNTER_STRIPES: usize = 64;

/// Cache of blocks by file and offset. Thread safe.
///
/// A reader that finds a child link in a parent block follows it and only counts the hit here, in its own stripe. A
/// reader without a link looks the block up by file and offset, under a lock, and sets the link. A value of a blob file
/// has no parent block: the hash of its id chooses its link, which another value with the same hash may take over.
///
/// All shards share one budget, so that a large block fits in any shard. The cache rejects a data block of more than
/// an eighth of the capacity, and an index or filter block of more than half. Every block has a memory charge from
/// before it is inserted until it is freed, and it is freed when no reader can use it any more. The sum of the
/// charges never exceeds the capacity. A sixteenth of the capacity is reserved for the spare buffers of the pool (up to
/// half of this), for evicted blocks in the bags of the shards (a quarter), and for evicted blocks that are not freed
/// yet; while these use more, new blocks are rejected. An evicted block that an iterator still holds is not
/// counted.
pub(crate) struct BlockCache {
    capacity: u64,
    /// Bytes of the blocks in the shards.
    resident_bytes: AtomicU64,
    /// Bytes of the pinned blocks; part of `resident_bytes`.
    pinned: AtomicU64,
    /// Sum of the memory charges in bytes: resident blocks, and evicted blocks that are not freed yet.
    charged: Arc<AtomicU64>,
    /// Whether a block was evicted since the cache was created.
    has_evicted: AtomicBool,
    /// The shard that evicts next.
    eviction_hand: AtomicUsize,
    /// Maximum number of bytes in the bag of evicted blocks of a shard: all bags together have a quarter of the bytes
    /// that are reserved for evicted blocks.
    bag_bytes_max: u64,
    shards: Box<[PaddedShard]>,
    /// Pool that allocates the bytes of blocks.
    pool: Arc<BufferPool>,
    /// The links to values of blob files, and their charge. Created for the first value, unless the cache has no space
    /// for them.
    value_links: OnceLock<ValueLinks>,
    /// Hits through links. A pinned thread owns the stripe with the slot index of its pin; the last stripe is shared.
    link_hits: Box<[LinkHitCounters]>,
}

/// Aligned so that adjacent shards do not share cache lines, on which threads would contend.
#[repr(align(128))]
#[derive(Default)]
struct PaddedShard(Mutex<CacheShard>);

/// The links to values, a power of two of them. The charge is dropped after the links.
type ValueLinks = (Arc<ParentBlock<CachedBlobValue, ()>>, MemoryCharge);

/// Counters of one thread, by kind of block.
#[repr(align(128))]
#[derive(Default)]
struct LinkHitCounters([AtomicU64; BlockKind::CACHED.len()]);

/// Counters of the cache, by kind of block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CacheStats {
    pub(crate) capacity: u64,
    /// Sum of the memory charges in bytes: cached blocks, and evicted blocks that are not freed yet.
    pub(crate) used: u64,
    /// Bytes of the pinned blocks; part of `used`.
    pub(crate) pinned: u64,
    /// In the order of [`BlockKind::CACHED`].
    pub(crate) kinds: Vec<(&'static str, BlockKindStats)>,
}

impl BlockCache {
    /// Creates a cache of at most `capacity` bytes. With 0 it stays empty.
    pub(crate) fn new(capacity: u64) -> BlockCache {
        let shards = (capacity / SHARD_BYTES_MIN).clamp(1, SHARDS_MAX).next_power_of_two();
        BlockCache {
            capacity,
            resident_bytes: AtomicU64::new(0),
            pinned: AtomicU64::new(0),
            charged: Arc::default(),
            has_evicted: AtomicBool::new(false),
            eviction_hand: AtomicUsize::new(0),
            bag_bytes_max: capacity / UNFREED_DIVISOR / 4 / shards,
            shards: (0..shards).map(|_| PaddedShard::default()).collect(),
            pool: BufferPool::new(if capacity < POOLED_MIN { 0 } else { capacity }),
            value_links: OnceLock::new(),
            link_hits: (0..=COUNTER_STRIPES).map(|_| LinkHitCounters::default()).collect(),
        }
    }

    /// Returns an empty buffer for a block that may enter the cache; `None` if memory is exhausted.
    pub(crate) fn buffer(&self, capacity: usize) -> Option<Buffer> {
        self.pool.buffer(capacity)
    }

    #[inline]
    fn shard(&self, key: &CacheKey) -> MutexGuard<'_, CacheShard> {
        lock(&self.shards[(key.hash() >> 20) as usize & (self.shards.len() - 1)])
    }

    /// Capacity in bytes.
    #[cfg(test)]
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Number of lookups by file and offset.
    #[cfg(test)]
    pub(crate) fn lookup_count(&self) -> u64 {
        let kinds = BlockKind::CACHED.map(|kind| {
            self.shards.iter().map(|shard| lock(shard).stats(kind)).map(|stats| stats.hits + stats.misses).sum::<u64>()
        });
        kinds.iter().sum()
    }

    /// Sum of the memory charges in bytes.
    pub(crate) fn used(&self) -> u64 {
        self.charged.load(Ordering::Relaxed)
    }

    /// Whether a block was evicted since the cache was created: a new block then displaces another one.
    pub(crate) fn has_evicted(&self) -> bool {
        self.has_evicted.load(Ordering::Relaxed)
    }

    /// Whether the cache accepts a block of that many bytes. An index or filter block serves every lookup in its
    /// table, so it may be larger than a data block.
    pub(crate) fn admits(&self, kind: BlockKind, bytes: u64) -> bool {
        bytes <= self.capacity / if kind.is_metadata() { 2 } else { 8 }
    }

    /// Counts a hit through a link.
    #[inline]
    pub(crate) fn count_link_hit(&self, kind: BlockKind, pin: &Pin) {
        let own = pin.slot_index();
        if own < COUNTER_STRIPES {
            // No other thread writes this stripe while the pin is set, so no count is lost.
            let counter = &self.link_hits[own].0[kind_index(kind)];
            counter.store(counter.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        } else {
            self.link_hits[COUNTER_STRIPES].0[kind_index(kind)].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the block at `offset` of `file` if it is cached, and counts a hit or a miss of `kind`. After a hit the
    /// link `parent_slot` points to the block until the block is evicted.
    pub(crate) fn get<T: Cacheable>(
        &self,
        file: FileNumber,
        offset: u64,
        kind: BlockKind,
        parent_slot: Option<ParentSlot<T>>,
    ) -> Option<Arc<T>> {
        let key = CacheKey { file, offset };
        self.shard(&key).get(key, kind, parent_slot)
    }

    /// Returns the value at `offset` of `file` if it is cached, and counts a hit or a miss. After a hit
    /// [`linked_value`](BlockCache::linked_value) finds it.
    pub(crate) fn get_value(&self, file: FileNumber, offset: u64, id: BlobValueId) -> Option<Arc<CachedBlobValue>> {
        self.get(file, offset, BlockKind::Blob, self.value_slot(id))
    }

    /// Inserts a value that was read from `offset` of `file`, as [`insert`](BlockCache::insert) does.
    pub(crate) fn insert_value(&self, file: FileNumber, offset: u64, value: &Arc<CachedBlobValue>) {
        if self.value_links.get().is_none()
            && let Some(links) = self.new_value_links()
        {
            let _another_thread_was_first = self.value_links.set(links);
        }
        self.insert(file, offset, BlockKind::Blob, value, self.value_slot(value.id()), false);
    }

    /// Returns the value of a pointer if a link points to it, valid as long as `pin`, and counts a hit. A cached value
    /// may have no link. A value of another length than the pointer's is not returned: a read through the file reports
    /// it.
    #[inline]
    pub(crate) fn linked_value<'p>(
        &self,
        id: BlobValueId,
        len: u32,
        pin: &'p Pin,
    ) -> Option<PinnedRef<'p, CachedBlobValue>> {
        let (links, _) = self.value_links.get()?;
        let value = links.child(value_link_index(id, links.link_count()), pin)?;
        if value.id() != id || value.len() != len as usize {
            return None;
        }
        self.count_link_hit(BlockKind::Blob, pin);
        Some(value)
    }

    fn value_slot(&self, id: BlobValueId) -> Option<ParentSlot<CachedBlobValue>> {
        let (links, _) = self.value_links.get()?;
        Some((Arc::downgrade(links) as _, value_link_index(id, links.link_count())))
    }

    fn new_value_links(&self) -> Option<ValueLinks> {
        let count = (self.capacity / BYTES_PER_VALUE_LINK).min(VALUE_LINKS_MAX).checked_ilog2()?;
        let count = 1usize << count;
        let bytes = (count * size_of::<usize>()) as u64;
        let charge = MemoryCharge::try_new(&self.charged, bytes, self.capacity - self.pool.spare_bytes_max())?;
        Some((Arc::new(ParentBlock::new((), count)), charge))
    }

    /// Whether the block at `offset` of `file` is cached. Counts neither a hit nor a miss.
    pub(crate) fn contains(&self, file: FileNumber, offset: u64) -> bool {
        let key = CacheKey { file, offset };
        self.shard(&key).contains(key)
    }

    /// Inserts a block that was read from `offset` of `file`, and evicts others if necessary. A block that is too
    /// large is not inserted. A block with `pin` stays until its file is removed, if the limit of pinned bytes allows
    /// it.
    pub(crate) fn insert<T: Cacheable>(
        &self,
        file: FileNumber,
        offset: u64,
        kind: BlockKind,
        block: &Arc<T>,
        parent_slot: Option<ParentSlot<T>>,
        pin: bool,
    ) {
        let charge = block.bytes_held() + ENTRY_OVERHEAD;
        let key = CacheKey { file, offset };
        if !self.admits(kind, charge) {
            return;
        }
        let Some(memory_charge) = self.reserve(&key, charge) else { return };
        let pinned = pin && add_within_limit(&self.pinned, charge, self.capacity / PINNED_DIVISOR);
        let new = CacheInsertion { kind, block: Arc::clone(block), charge, parent_slot, pinned };
        if !self.shard(&key).insert(key, new, memory_charge) {
            subtract_counted(&self.resident_bytes, charge);
            subtract_counted(&self.pinned, if pinned { charge } else { 0 });
        }
        if cfg!(debug_assertions) {
            self.check_invariants();
        }
    }

    /// Panics if a sum exceeds its limit. The limits hold at any time, also while other threads change the sums.
    fn check_invariants(&self) {
        let (resident, pinned) = (self.resident_bytes.load(Ordering::Relaxed), self.pinned.load(Ordering::Relaxed));
        assert!(self.used() <= self.capacity, "the charges stay within the capacity");
        assert!(resident <= self.capacity - self.capacity / UNFREED_DIVISOR, "resident blocks leave the slack free");
        assert!(pinned <= self.capacity / PINNED_DIVISOR, "pinned blocks leave space for others");
    }

    /// Evicts blocks until `charge` bytes are free, and reserves them. `None` if other threads took the freed bytes,
    /// or if evicted blocks that are not freed yet use too much.
    ///
    /// The shard of `key` evicts first, so that each shard keeps its share. If that shard has less than half of its
    /// share, the other shards evict in turn.
    fn reserve(&self, key: &CacheKey, charge: u64) -> Option<MemoryCharge> {
        let slack = self.capacity / UNFREED_DIVISOR;
        let spare = self.pool.spare_bytes_max();
        debug_assert!(spare <= slack / 2, "the rest is for evicted blocks");
        if self.used().saturating_sub(self.resident_bytes.load(Ordering::Relaxed)) > slack - spare {
            return None; // evicting more would not help
        }
        let low = self.capacity / self.shards.len() as u64 / 2;
        let mut full_bags = Vec::new();
        let mut empty_shards = 0;
        let mut reserved = add_within_limit(&self.resident_bytes, charge, self.capacity - slack);
        while !reserved && empty_shards < self.shards.len() {
            let bag_bytes_max = self.bag_bytes_max;
            // The lock is released after each call: a thread holds at most one.
            let own = self.shard(key).evict(low, bag_bytes_max);
            let evicted = own.or_else(|| {
                let victim = self.eviction_hand.fetch_add(1, Ordering::Relaxed) & (self.shards.len() - 1);
                lock(&self.shards[victim]).evict(0, bag_bytes_max)
            });
            match evicted {
                Some(Evicted { bytes, bag }) => {
                    subtract_counted(&self.resident_bytes, bytes);
                    self.has_evicted.store(true, Ordering::Relaxed);
                    if !bag.is_empty() {
                        full_bags.push(bag);
                    }
                    empty_shards = 0;
                }
                None => empty_shards += 1,
            }
            reserved = add_within_limit(&self.resident_bytes, charge, self.capacity - slack);
        }
        full_bags.into_iter().for_each(RetiredBlock::drop_all);
        if !reserved {
            return None;
        }
        let memory_charge = MemoryCharge::try_new(&self.charged, charge, self.capacity - spare);
        if memory_charge.is_none() {
            subtract_counted(&self.resident_bytes, charge);
        }
        memory_charge
    }

    /// Removes all blocks of a file that is to be deleted.
    pub(crate) fn remove_file(&self, file: FileNumber) {
        let mut retired = Vec::new();
        for shard in &self.shards {
            let removed = lock(shard).remove_file(file);
            subtract_counted(&self.resident_bytes, removed.total_bytes);
            subtract_counted(&self.pinned, removed.pinned_bytes);
            retired.extend(removed.blocks);
        }
        RetiredBlock::drop_all(retired);
    }

    /// Sums the counters of all shards and threads, which are read at different times. No hit is lost or counted
    /// twice.
    pub(crate) fn stats(&self) -> CacheStats {
        let names = ["data", "index", "top-level index", "filter", "top-level filter", "blob", "blob index"];
        let mut kinds: Vec<(&'static str, BlockKindStats)> = names.map(|name| (name, BlockKindStats::default())).into();
        for shard in &self.shards {
            let shard = lock(shard);
            for (kind, (_, sum)) in BlockKind::CACHED.into_iter().zip(&mut kinds) {
                let stats = shard.stats(kind);
                sum.hits += stats.hits;
                sum.misses += stats.misses;
                sum.blocks += stats.blocks;
                sum.bytes += stats.bytes;
                sum.evicted += stats.evicted;
            }
        }
        for stripe in &self.link_hits {
            kinds.iter_mut().zip(&stripe.0).for_each(|((_, sum), hits)| sum.hits += hits.load(Ordering::Relaxed));
        }
        CacheStats { capacity: self.capacity, used: self.used(), pinned: self.pinned.load(Ordering::Relaxed), kinds }
    }
}

/// Index of the link of a value among `count` links, a power of two.
#[inline]
fn value_link_index(id: BlobValueId, count: usize) -> usize {
    let key = CacheKey { file: id.logical_file, offset: u64::from(id.ordinal) };
    (key.hash() >> 20) as usize & (count - 1)
}

/// Ignores the poison flag, because a panic under the lock means a broken invariant, which the shard's own assertions
/// detect again.
fn lock(shard: &PaddedShard) -> MutexGuard<'_, CacheShard> {
    shard.0.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for BlockCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BlockCache({} of {} bytes)", self.used(), self.capacity)
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests need scoped threads, which vfs does not offer")]
mod tests {
    use super::*;
    use crate::base::{InternalKey, SeqNo};
    use crate::block::cached_block::IndexPartitionBlock;
    use crate::block::frame::BlockContents;
    use crate::block::{Block, RestartBlockBuilder};
    use crate::mem::epoch::tests::wait_until;
    use crate::mem::parent_block::ParentBlock;
    use crate::testing::is_in_own_process;
    use crate::testing::seeded_rng::SeededRng;

    type Directory = ParentBlock<Block, ()>;

    /// Waits until every evicted block is freed, also those in the bags.
    fn wait_until_freed(cache: &BlockCache) {
        cache.shards.iter().for_each(|shard| RetiredBlock::drop_all(lock(shard).take_bag()));
        wait_until(|| cache.used() == resident_bytes(cache));
    }

    /// A block whose bytes `file`, `offset` and `len` determine.
    fn block(file: u64, offset: u64, len: usize) -> Arc<Block> {
        let mut builder = RestartBlockBuilder::new(1);
        builder.add(InternalKey::new(&key(file, offset), SeqNo(len as u64)), 1, &value(file, offset, len));
        let bytes = builder.finish().to_vec().into_boxed_slice().into_vec();
        Arc::new(Block::decode(BlockContents::new(BlockKind::Data, bytes)).unwrap())
    }

    fn key(file: u64, offset: u64) -> Vec<u8> {
        [file.to_le_bytes(), offset.to_le_bytes()].concat()
    }

    fn value(file: u64, offset: u64, len: usize) -> Vec<u8> {
        let seed = (file << 32 | offset).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (0..len).map(|i| (seed >> (i % 8 * 8)) as u8).collect()
    }

    /// Checks every byte of the block.
    fn verify(block: &Block, file: u64, offset: u64) {
        let Block::Restart(block) = block else { panic!("it was built with restarts") };
        let entry = block.parse_restart(0).unwrap();
        assert_eq!(entry.rest, key(file, offset));
        assert_eq!(entry.value, value(file, offset, entry.seqno.0 as usize));
    }

    fn put(cache: &BlockCache, file: u64, offset: u64, len: usize) {
        cache.insert(FileNumber(file), offset, BlockKind::Data, &block(file, offset, len), None, false);
    }

    fn contains(cache: &BlockCache, file: u64, offset: u64) -> bool {
        cache.get::<Block>(FileNumber(file), offset, BlockKind::Data, None).is_some()
    }

    fn parent_slot(parent: &Arc<Directory>, at: usize) -> Option<ParentSlot<Block>> {
        Some((Arc::downgrade(parent) as _, at))
    }

    fn resident_bytes(cache: &BlockCache) -> u64 {
        cache.resident_bytes.load(Ordering::SeqCst)
    }

    fn check(cache: &BlockCache) {
        let sums: Vec<(u64, u64)> = cache.shards.iter().map(|shard| lock(shard).check_blocks()).collect();
        let (all, pinned) = sums.iter().fold((0, 0), |(all, pinned), sum| (all + sum.0, pinned + sum.1));
        assert_eq!((all, pinned), (resident_bytes(cache), cache.pinned.load(Ordering::SeqCst)));
        assert!(all <= cache.used() && cache.used() <= cache.capacity());
    }

    #[test]
    fn blocks_are_cached_counted_and_removed_by_file() {
        let cache = BlockCache::new(1 << 20);
        assert!(!contains(&cache, 1, 64));
        for offset in 0..50 {
            put(&cache, 1 + offset % 2, offset, 100);
        }
        let index = block(3, 0, 100);
        cache.insert(FileNumber(3), 0, BlockKind::IndexPartition, &index, None, false);
        cache.insert(FileNumber(3), 0, BlockKind::IndexPartition, &index, None, false);
        assert!((0..50).all(|offset| contains(&cache, 1 + offset % 2, offset)));
        wait_until_freed(&cache);
        check(&cache);
        let stats = cache.stats();
        let (_, data) = stats.kinds[0];
        let (_, index) = stats.kinds[1];
        assert_eq!((data.hits, data.misses, data.blocks), (50, 1, 50));
        assert_eq!((index.blocks, data.bytes + index.bytes), (1, stats.used));
        cache.remove_file(FileNumber(1));
        check(&cache);
        assert!((0..50).all(|offset| contains(&cache, 1 + offset % 2, offset) == (offset % 2 == 1)));
        cache.remove_file(FileNumber(2));
        cache.remove_file(FileNumber(3));
        assert_eq!(resident_bytes(&cache), 0);
        wait_until(|| cache.used() == 0);
    }

    #[test]
    fn large_blocks_and_zero_capacity_bypass_cache() {
        let cache = BlockCache::new(80_000);
        put(&cache, 1, 0, 10_001);
        assert!(!contains(&cache, 1, 0));
        put(&cache, 1, 0, 9_000);
        assert!(contains(&cache, 1, 0));
        let none = BlockCache::new(0);
        put(&none, 1, 0, 0);
        assert!(!contains(&none, 1, 0));
    }

    /// Too many shards would give each shard of a 16 MiB cache a share without space for a filter of 3 MB, and every
    /// other block in that shard would evict the filter.
    #[test]
    fn large_filter_stays_cached_while_in_use() {
        let cache = BlockCache::new(16 << 20);
        let used = |file| cache.get::<Block>(FileNumber(file), 0, BlockKind::FilterPartition, None).is_some();
        let filters = [1, 2].map(|file| block(file, 0, 3_000_000));
        let mut read = 0;
        for round in 0..4000u64 {
            for (file, filter) in [1, 2].into_iter().zip(&filters) {
                if !used(file) {
                    cache.insert(FileNumber(file), 0, BlockKind::FilterPartition, filter, None, false);
                    read += 1;
                }
            }
            put(&cache, 3 + round % 5, round, 4000);
        }
        check(&cache);
        assert!(read <= 6, "two filters were read {read} times");
        assert!(!cache.admits(BlockKind::Data, 3_000_000) && !cache.admits(BlockKind::FilterPartition, (8 << 20) + 1));
    }

    #[test]
    fn block_of_another_type_is_a_miss() {
        let cache = BlockCache::new(1 << 20);
        put(&cache, 1, 0, 10);
        assert!(cache.get::<IndexPartitionBlock>(FileNumber(1), 0, BlockKind::IndexPartition, None).is_none());
        assert!(contains(&cache, 1, 0));
    }

    #[test]
    fn scan_does_not_evict_hot_blocks() {
        for by_links in [false, true] {
            let cache = BlockCache::new(400_000);
            let parent: Arc<Directory> = Arc::new(ParentBlock::new((), 100));
            for _ in 0..3 {
                for offset in 0..100 {
                    if by_links && parent.child(offset, &Pin::new()).is_some() {
                        continue;
                    }
                    if !contains(&cache, 1, offset as u64) {
                        let new = block(1, offset as u64, 1000);
                        let slot = parent_slot(&parent, offset).filter(|_| by_links);
                        cache.insert(FileNumber(1), offset as u64, BlockKind::Data, &new, slot, false);
                    }
                }
            }
            for offset in 0..5000 {
                put(&cache, 2, offset, 1000);
            }
            check(&cache);
            let cached = (0..100).filter(|offset| contains(&cache, 1, *offset)).count();
            assert!(cached >= 90, "{cached} of 100, links: {by_links}");
        }
    }

    /// Blocks that pass through the main queue, each requested twice. The cache has space for about 300 blocks.
    fn churn(cache: &BlockCache, offsets: std::ops::Range<u64>) {
        for offset in offsets {
            wait_until_freed(cache); // otherwise the cache rejects blocks while other tests hold evicted ones
            put(cache, 2, offset, 1000);
            assert!(contains(cache, 2, offset));
        }
    }

    /// Blocks that were used between several visits of the eviction survive visits without a use, but not forever.
    #[test]
    fn often_used_blocks_outlive_unused_visits() {
        let cache = BlockCache::new(400_000);
        let parent: Arc<Directory> = Arc::new(ParentBlock::new((), 100));
        churn(&cache, 0..400);
        for at in 0..100 {
            wait_until_freed(&cache);
            let new = block(1, at as u64, 1000);
            cache.insert(FileNumber(1), at as u64, BlockKind::Data, &new, parent_slot(&parent, at), false);
            assert!(parent.child(at, &Pin::new()).is_some());
        }
        let used = || (0..100).filter(|at| parent.child(*at, &Pin::new()).is_some()).count();
        for round in 0..40 {
            assert_eq!(used(), 100, "round {round}");
            churn(&cache, 400 + round * 30..430 + round * 30);
        }
        let unused = || (0..100).filter(|at| parent.peek(*at, &Pin::new()).is_some()).count();
        churn(&cache, 1600..2100);
        assert_eq!(unused(), 100, "after two or three visits");
        churn(&cache, 2100..3600);
        assert_eq!(unused(), 0, "after many visits");
        check(&cache);
    }

    /// Blocks that are requested one after another, again and again, enter the main queue by their ghosts, also if the
    /// blocks before them were used more often. With fewer ghosts than blocks they were never cached.
    #[test]
    fn repeated_scan_that_fits_is_cached() {
        let cache = BlockCache::new(400_000);
        for _ in 0..4 {
            churn(&cache, 0..250);
        }
        let scan = || {
            let missing = |offset: &u64| {
                wait_until_freed(&cache);
                let is_cached = contains(&cache, 1, *offset);
                if !is_cached {
                    put(&cache, 1, *offset, 1000);
                }
                !is_cached
            };
            (0..200).filter(missing).count()
        };
        let misses: Vec<usize> = (0..6).map(|_| scan()).collect();
        assert!(misses[5] < 20, "misses of each scan: {misses:?}");
    }

    #[test]
    fn links_reach_cached_blocks_and_count_hits() {
        let cache = BlockCache::new(1 << 20);
        let parent: Arc<Directory> = Arc::new(ParentBlock::new((), 2));
        let pin = Pin::new();
        put(&cache, 1, 10, 50);
        assert!(parent.child(0, &pin).is_none());
        assert!(cache.get(FileNumber(1), 10, BlockKind::Data, parent_slot(&parent, 0)).is_some());
        cache.insert(FileNumber(2), 20, BlockKind::Data, &block(2, 20, 60), parent_slot(&parent, 1), false);
        let found = [0, 1].map(|at| parent.child(at, &pin).unwrap());
        cache.count_link_hit(BlockKind::Data, &pin);
        cache.count_link_hit(BlockKind::Data, &pin);
        let (_, data) = cache.stats().kinds[0];
        assert_eq!((data.hits, data.misses), (3, 0));
        cache.remove_file(FileNumber(1));
        assert!(parent.child(0, &pin).is_none() && parent.child(1, &pin).is_some());
        assert!(cache.used() > resident_bytes(&cache), "a block is charged while a reader may use it");
        verify(&found[0], 1, 10);
        drop(cache);
        assert!(parent.child(1, &pin).is_none());
        verify(&found[1], 2, 20);
    }

    #[test]
    fn retired_blocks_count_towards_the_budget() {
        let cache = BlockCache::new(100_000);
        let pin = Pin::new();
        for offset in 0..500 {
            put(&cache, 1, offset, 1000);
            check(&cache);
        }
        assert!(cache.used() > 90_000, "the slack is used");
        let counted = cache.used();
        put(&cache, 2, 0, 10_000);
        assert!(
            !contains(&cache, 2, 0) && cache.used() == counted,
            "rejected, because nothing is freed while this thread is pinned"
        );
        drop(pin);
        wait_until_freed(&cache);
        wait_until(|| {
            put(&cache, 2, 0, 10_000);
            contains(&cache, 2, 0)
        });
        check(&cache);
    }

    #[test]
    fn pinned_blocks_are_bounded_and_end_with_file() {
        let cache = BlockCache::new(400_000);
        for offset in 0..200 {
            cache.insert(FileNumber(1), offset, BlockKind::IndexPartition, &block(1, offset, 1000), None, true);
        }
        check(&cache);
        let pinned = cache.stats().pinned;
        assert!((90_000..=100_000).contains(&pinned), "{pinned}");
        for offset in 0..2000 {
            // Waits until evicted blocks are freed, because the cache rejects blocks while readers of other tests
            // hold many of them.
            wait_until_freed(&cache);
            put(&cache, 2, offset, 1000);
        }
        check(&cache);
        let cached = (0..200).filter(|offset| contains(&cache, 1, *offset)).count();
        assert!((70..=90).contains(&cached), "{cached}");
        cache.remove_file(FileNumber(1));
        check(&cache);
        assert_eq!(cache.stats().pinned, 0);
    }

    /// Parent blocks are replaced, blocks evicted and files removed concurrently. The test checks every byte that it
    /// reads.
    #[test]
    fn budget_holds_under_concurrent_load() {
        const LINKS: u64 = 128;
        let cache = BlockCache::new(300_000);
        let parents: [Mutex<Arc<Directory>>; 5] =
            std::array::from_fn(|_| Mutex::new(Arc::new(ParentBlock::new((), 128))));
        let followed = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (cache, parents, followed) = (&cache, &parents, &followed);
                scope.spawn(move || {
                    let mut rng = SeededRng::new(thread);
                    let mut blocks = Vec::new();
                    for round in 0..20_000u64 {
                        let x = rng.next_u64();
                        let (file, offset) = (x % 5, x >> 8 & (LINKS - 1));
                        let parent = {
                            let mut parent = parents[file as usize].lock().unwrap();
                            if x >> 40 & 127 == 0 {
                                *parent = Arc::new(ParentBlock::new((), LINKS as usize));
                            }
                            Arc::clone(&parent)
                        };
                        let pin = Pin::new();
                        if let Some(block) = parent.child(offset as usize, &pin) {
                            verify(&block, file, offset);
                            cache.count_link_hit(BlockKind::Data, &pin);
                            followed.fetch_add(1, Ordering::Relaxed);
                            if x >> 50 & 63 == 0 {
                                blocks.push((block.to_arc(), file, offset));
                            }
                        } else {
                            let slot = parent_slot(&parent, offset as usize);
                            match cache.get::<Block>(FileNumber(file), offset, BlockKind::Data, slot.clone()) {
                                Some(block) => verify(&block, file, offset),
                                None => {
                                    let new = block(file, offset, (x >> 20) as usize % 9_000);
                                    cache.insert(
                                        FileNumber(file),
                                        offset,
                                        BlockKind::Data,
                                        &new,
                                        slot,
                                        x >> 30 & 7 == 0,
                                    );
                                }
                            }
                        }
                        drop(pin);
                        if round % 1000 == 0 {
                            cache.remove_file(FileNumber(file));
                        }
                        if blocks.len() > 20 {
                            blocks.drain(..).for_each(|(block, file, offset)| verify(&block, file, offset));
                        }
                        assert!(cache.used() <= cache.capacity());
                    }
                });
            }
        });
        check(&cache);
        wait_until_freed(&cache);
        assert!(resident_bytes(&cache) > 100_000, "the cache is used");
        let (_, data) = cache.stats().kinds[0];
        assert_eq!(data.hits + data.misses, 80_000, "every read was counted once");
        assert!(followed.load(Ordering::Relaxed) > 1000, "links are followed");
    }

    fn value_id(n: u64) -> BlobValueId {
        BlobValueId { logical_file: FileNumber(n), ordinal: n as u32 }
    }

    /// The id of another value with the same link as value `n`, in a cache that has created its links.
    fn id_with_same_link(cache: &BlockCache, n: u64) -> BlobValueId {
        let (links, _) = cache.value_links.get().unwrap();
        let index = |id| value_link_index(id, links.link_count());
        (n + 1..).map(value_id).find(|id| index(*id) == index(value_id(n))).unwrap()
    }

    const VALUE_LEN: u32 = 1000;

    /// A value whose bytes its id determines.
    fn blob_value(id: BlobValueId) -> Arc<CachedBlobValue> {
        let mut bytes = Buffer::from(&b"header"[..]);
        bytes.extend_from_slice(&value(id.logical_file.0, id.ordinal.into(), VALUE_LEN as usize));
        Arc::new(CachedBlobValue::new(id, bytes, 6))
    }

    /// Reads a value as a blob file does, from the offset that is its file number. Returns whether a link led to it.
    fn read_value(cache: &BlockCache, id: BlobValueId) -> bool {
        let verify = |found: &CachedBlobValue| {
            assert_eq!(**found, value(id.logical_file.0, id.ordinal.into(), VALUE_LEN as usize))
        };
        let pin = Pin::new();
        if let Some(found) = cache.linked_value(id, VALUE_LEN, &pin) {
            verify(&found);
            return true;
        }
        drop(pin);
        match cache.get_value(FileNumber(9), id.logical_file.0, id) {
            Some(found) => verify(&found),
            None => cache.insert_value(FileNumber(9), id.logical_file.0, &blob_value(id)),
        }
        false
    }

    #[test]
    fn link_leads_to_its_own_value_only() {
        let cache = BlockCache::new(1 << 20);
        assert!(cache.linked_value(value_id(1), VALUE_LEN, &Pin::new()).is_none());
        assert!(!read_value(&cache, value_id(1)) && read_value(&cache, value_id(1)));
        let other = id_with_same_link(&cache, 1);
        assert!(!read_value(&cache, other), "the link leads to value 1");
        assert!(read_value(&cache, other) && !read_value(&cache, value_id(1)), "the other value took the link over");
        assert!(read_value(&cache, value_id(1)), "and a lookup returns it");
        assert!(
            cache.linked_value(value_id(1), VALUE_LEN + 1, &Pin::new()).is_none(),
            "the pointer has another length"
        );
        cache.remove_file(FileNumber(9));
        assert!(cache.linked_value(value_id(1), VALUE_LEN, &Pin::new()).is_none());
        assert!(cache.linked_value(other, VALUE_LEN, &Pin::new()).is_none());
        let (_, blobs) = cache.stats().kinds[kind_index(BlockKind::Blob)];
        assert_eq!((blobs.hits, blobs.misses, blobs.blocks), (4, 2, 0), "each read was counted once");
    }

    /// While the first value was read, evicted blocks that were not freed yet took all of the budget. The cache never
    /// had links then.
    #[test]
    fn links_are_created_when_the_budget_allows_it() {
        let cache = BlockCache::new(1 << 20);
        let pin = Pin::new();
        (0..3000).for_each(|offset| put(&cache, 1, offset, 1000));
        read_value(&cache, value_id(1));
        drop(pin);
        wait_until_freed(&cache);
        cache.remove_file(FileNumber(1));
        wait_until_freed(&cache);
        read_value(&cache, value_id(1));
        assert!(read_value(&cache, value_id(1)), "the value has a link");
    }

    /// A value of arbitrary bytes in a buffer of the cache.
    fn pooled_value(cache: &BlockCache, n: u64, len: usize) -> Arc<CachedBlobValue> {
        let mut bytes = cache.buffer(len).unwrap();
        bytes.extend_for_overwrite(len);
        Arc::new(CachedBlobValue::new(value_id(n), bytes, 0))
    }

    /// A few small values stay in every slab, and large values follow. They once took as much memory again.
    #[test]
    fn large_values_use_what_small_ones_leave() {
        // Readers of other tests would delay the reuse of slabs, so that more buffers come from the allocator.
        if !is_in_own_process("block::cache::tests::large_values_use_what_small_ones_leave") {
            return;
        }
        const CAPACITY: u64 = 64 << 20;
        let cache = BlockCache::new(CAPACITY);
        let (mut n, mut hot) = (0, Vec::new());
        let read = |hot: &[u64]| hot.iter().for_each(|n| _ = cache.get_value(FileNumber(1), *n, value_id(*n)));
        while cache.pool.mapped() < CAPACITY - (4 << 20) && n < 40_000 {
            cache.insert_value(FileNumber(1), n, &pooled_value(&cache, n, 4000));
            if n % 480 == 0 {
                hot.push(n);
            }
            if n % 200 == 0 {
                read(&hot);
            }
            n += 1;
        }
        let mut large = Vec::new();
        for n in 100_000..101_500 {
            let mut bytes = cache.buffer(100_000).unwrap();
            bytes.extend_for_overwrite(100_000);
            let in_slab = bytes.is_in_slab();
            let value = Arc::new(CachedBlobValue::new(value_id(n), bytes, 0));
            cache.insert_value(FileNumber(2), n, &value);
            large.push((Arc::downgrade(&value), in_slab));
            if n % 10 == 0 {
                read(&hot);
            }
        }
        cache.shards.iter().for_each(|shard| RetiredBlock::drop_all(lock(shard).take_bag()));
        wait_until(|| {
            let outside = large.iter().filter(|(value, in_slab)| !in_slab && value.strong_count() > 0).count();
            cache.pool.mapped() + outside as u64 * 100_000 <= CAPACITY + CAPACITY / 4
        });
    }

    #[test]
    fn short_slices_do_not_keep_slabs() {
        let cache = BlockCache::new(64 << 20);
        let mut slices = Vec::new();
        for n in 0..60_000 {
            let value = pooled_value(&cache, n, 300);
            cache.insert_value(FileNumber(1), n, &value);
            if n % 4000 == 0 {
                slices.push(value.to_slice(|| Arc::clone(&value)));
            }
        }
        let pool = Arc::clone(&cache.pool);
        drop(cache);
        wait_until(|| pool.mapped() <= 2 << 20);
        assert_eq!(slices.len(), 15);
    }

    #[test]
    fn links_of_values_count_towards_the_budget() {
        let cache = BlockCache::new(1 << 20);
        read_value(&cache, value_id(1));
        let links = (1 << 20) / BYTES_PER_VALUE_LINK * size_of::<usize>() as u64;
        assert_eq!(cache.used(), resident_bytes(&cache) + links);
        (0..2000).for_each(|n| _ = read_value(&cache, value_id(n)));
        check(&cache);
        let tiny = BlockCache::new(BYTES_PER_VALUE_LINK - 1);
        read_value(&tiny, value_id(1));
        assert!(!read_value(&tiny, value_id(1)) && tiny.used() == 0, "no links and no value");
    }

    #[test]
    fn evicted_blocks_are_retired_in_bags() {
        let cache = BlockCache::new(16 << 20);
        let slack = cache.capacity / UNFREED_DIVISOR;
        let mut most = 0;
        for offset in 0..12_000 {
            put(&cache, 1, offset, 2000);
            let waiting =
                cache.shards.iter().map(|shard| lock(shard).bag_len()).fold((0, 0), |sum, (blocks, bytes)| {
                    assert!(blocks < 32 && bytes <= cache.bag_bytes_max);
                    (sum.0 + blocks, sum.1 + bytes)
                });
            assert!(waiting.1 <= slack / 4, "{waiting:?}");
            most = most.max(waiting.0);
        }
        assert!(most > 60, "at most {most} blocks waited in the bags of four shards");
        check(&cache);
        cache.remove_file(FileNumber(1));
        wait_until(|| cache.used() == 0);
    }

    /// Runs under every schedule that the explorer generates: see `mem/explorer.rs`.
    mod schedules {
        use super::*;
        use crate::mem::explorer::{explore, spawn};

        const LEN: usize = 64;

        /// Space for seven and a half blocks, including the reserve for evicted blocks.
        fn small() -> Arc<BlockCache> {
            let charge = block(0, 0, LEN).bytes_held() + ENTRY_OVERHEAD;
            Arc::new(BlockCache::new(charge * 8))
        }

        /// Reads as a table reader does: through the link, else from the map, else it inserts the block.
        fn read(cache: &BlockCache, parent: &Arc<Directory>, file: u64, at: usize, pinned: bool) {
            let pin = Pin::new();
            if let Some(found) = parent.child(at, &pin) {
                verify(&found, file, at as u64);
                cache.count_link_hit(BlockKind::Data, &pin);
                return;
            }
            let slot = parent_slot(parent, at);
            match cache.get::<Block>(FileNumber(file), at as u64, BlockKind::Data, slot.clone()) {
                Some(found) => verify(&found, file, at as u64),
                None => {
                    let new = block(file, at as u64, LEN);
                    cache.insert(FileNumber(file), at as u64, BlockKind::Data, &new, slot, pinned);
                }
            }
            assert!(cache.used() <= cache.capacity(), "above the budget");
        }

        /// The work of a thread that reads these blocks of file 1. It pins the block `pinned`.
        fn reader<const N: usize>(
            cache: &Arc<BlockCache>,
            parent: &Arc<Directory>,
            blocks: [usize; N],
            pinned: Option<usize>,
        ) -> impl FnOnce() + Send + use<N> {
            let (cache, parent) = (Arc::clone(cache), Arc::clone(parent));
            move || blocks.into_iter().for_each(|at| read(&cache, &parent, 1, at, Some(at) == pinned))
        }

        /// Checks the final state after all readers have ended: the sums are right, no block waits to be freed, every
        /// read was counted once, and each link points to a block in the map.
        fn settle(cache: &BlockCache, parent: &Arc<Directory>, file: u64, reads: u64) {
            check(cache);
            wait_until_freed(cache);
            let (_, data) = cache.stats().kinds[0];
            assert_eq!(data.hits + data.misses, reads, "reads were lost or counted twice");
            let pin = Pin::new();
            for at in 0..16 {
                let followed = parent.peek(at, &pin);
                followed.iter().for_each(|block| verify(block, file, at as u64));
                assert!(
                    followed.is_none() || contains(cache, file, at as u64),
                    "a link to a block that the map does not contain"
                );
            }
        }

        #[test]
        fn budget_and_counters_hold_during_eviction() {
            explore(|| {
                let (cache, parent) = (small(), Arc::new(ParentBlock::new((), 16)));
                (0..6).for_each(|at| read(&cache, &parent, 1, at, false));
                let readers =
                    [[6, 7, 0], [7, 8, 6], [1, 6, 7]].map(|blocks| spawn(reader(&cache, &parent, blocks, None)));
                readers.into_iter().for_each(|reader| reader.join().unwrap());
                settle(&cache, &parent, 1, 6 + 9);
            });
        }

        #[test]
        fn remove_file_is_safe_during_reads_and_pins() {
            explore(|| {
                let (cache, parent) = (small(), Arc::new(ParentBlock::new((), 16)));
                (0..3).for_each(|at| read(&cache, &parent, 1, at, at == 0));
                let readers = [[0, 3], [3, 2]].map(|blocks| spawn(reader(&cache, &parent, blocks, Some(3))));
                cache.remove_file(FileNumber(1));
                readers.into_iter().for_each(|reader| reader.join().unwrap());
                settle(&cache, &parent, 1, 3 + 4);
                cache.remove_file(FileNumber(1));
                check(&cache);
                assert_eq!((resident_bytes(&cache), cache.stats().pinned), (0, 0));
                wait_until(|| cache.used() == 0);
            });
        }

        /// An index partition is loaded again while readers still use the old one. A block has at most one link: that
        /// of the parent block that requested it last.
        #[test]
        fn block_moves_between_index_partitions() {
            explore(|| {
                let (cache, old, new) =
                    (small(), Arc::new(ParentBlock::new((), 16)), Arc::new(ParentBlock::new((), 16)));
                (0..7).for_each(|at| read(&cache, &old, 1, at, false));
                let stale = spawn(reader(&cache, &old, [0, 7], None));
                let fresh = spawn(reader(&cache, &new, [0, 1, 0], None));
                drop(old);
                stale.join().unwrap();
                fresh.join().unwrap();
                settle(&cache, &new, 1, 7 + 5);
            });
        }

        /// Two values share a link. Readers of one move it while the other is read, evicted and removed.
        #[test]
        fn values_with_one_link_are_never_confused() {
            explore(|| {
                let charge = blob_value(value_id(1)).bytes_held() + ENTRY_OVERHEAD;
                let cache = Arc::new(BlockCache::new(charge * 8));
                assert!(!read_value(&cache, value_id(1)));
                let ids = [value_id(1), id_with_same_link(&cache, 1), value_id(2)];
                let readers = [[0, 1], [1, 0]].map(|order| {
                    let cache = Arc::clone(&cache);
                    spawn(move || order.into_iter().for_each(|at| _ = read_value(&cache, ids[at])))
                });
                read_value(&cache, ids[2]);
                cache.remove_file(FileNumber(9));
                readers.into_iter().for_each(|reader| reader.join().unwrap());
                check(&cache);
                ids.iter().for_each(|id| _ = read_value(&cache, *id));
            });
        }

        /// A bag has two blocks, so half of the evictions hand over the block that an earlier one has unlinked, while
        /// readers may still use both.
        #[test]
        fn bags_are_handed_over_during_reads() {
            explore(|| {
                let (mut cache, parent) = (small(), Arc::new(ParentBlock::new((), 16)));
                let charge = block(0, 0, LEN).bytes_held() + ENTRY_OVERHEAD;
                let own = Arc::get_mut(&mut cache).unwrap();
                *own = BlockCache::new(charge * 96);
                assert!((charge..2 * charge).contains(&own.bag_bytes_max));
                (0..2).for_each(|at| read(&cache, &parent, 1, at, false));
                (0..88).for_each(|at| put(&cache, 2, at, LEN));
                let readers =
                    [[0, 2, 3], [1, 3, 4], [4, 2, 0]].map(|blocks| spawn(reader(&cache, &parent, blocks, None)));
                readers.into_iter().for_each(|reader| reader.join().unwrap());
                settle(&cache, &parent, 1, 2 + 9);
            });
        }

        /// The cache is dropped with its database while a reader still holds a pin.
        #[test]
        fn cache_may_drop_while_blocks_are_read() {
            explore(|| {
                let (cache, parent) = (small(), Arc::new(ParentBlock::new((), 16)));
                (0..2).for_each(|at| read(&cache, &parent, 1, at, false));
                let charged = Arc::clone(&cache.charged);
                let reader = spawn({
                    let parent = Arc::clone(&parent);
                    move || {
                        let pin = Pin::new();
                        if let Some(found) = parent.child(0, &pin) {
                            verify(&found, 1, 0);
                            assert!(charged.load(Ordering::Relaxed) > 0, "freed while a reader is pinned");
                            verify(&found, 1, 0);
                        }
                        drop(pin);
                        charged
                    }
                });
                drop(cache);
                let charged = reader.join().unwrap();
                wait_until(|| charged.load(Ordering::Relaxed) == 0);
            });
        }
    }
}

//! The block cache: one budget for the data, index and filter blocks of all tables.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::base::edit::FileId;
use crate::block::BlockKind;
use crate::block::shard::{CacheKey, Cached, KindStats, Shard};

/// At most; a shard should hold about a hundred blocks or its queues say little.
const SHARDS_MAX: u64 = 64;
const SHARD_BYTES_MIN: u64 = 512 << 10;

/// Holds blocks by file and offset. Thread safe.
///
/// The budget is one for all shards, so that a large block fits whatever its shard; a block of more than an eighth of
/// it is not taken. Space is reserved before a block enters: the sum of charges is never above the capacity. Blocks
/// that a reader still holds after they were evicted are not counted.
pub(crate) struct BlockCache {
    capacity: u64,
    used: AtomicU64,
    /// The shard that has to let go next.
    hand: AtomicUsize,
    shards: Box<[Padded]>,
}

/// On cache lines of its own, or threads would contend for their neighbours' locks.
#[repr(align(128))]
#[derive(Default)]
struct Padded(Mutex<Shard>);

/// Counters of the cache, by kind of block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CacheStats {
    pub(crate) capacity: u64,
    pub(crate) used: u64,
    /// In the order of [`BlockKind::CACHED`].
    pub(crate) kinds: Vec<(&'static str, KindStats)>,
}

impl BlockCache {
    /// A cache that holds at most `capacity` bytes; 0 holds nothing.
    pub(crate) fn new(capacity: u64) -> BlockCache {
        let shards = (capacity / SHARD_BYTES_MIN).clamp(1, SHARDS_MAX).next_power_of_two();
        let shards = (0..shards).map(|_| Padded::default()).collect();
        BlockCache { capacity, used: AtomicU64::new(0), hand: AtomicUsize::new(0), shards }
    }

    #[inline]
    fn shard(&self, key: &CacheKey) -> MutexGuard<'_, Shard> {
        lock(&self.shards[(key.hash() >> 20) as usize & (self.shards.len() - 1)])
    }

    /// In bytes.
    #[cfg(test)]
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Charged now, in bytes.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Whether something of that many bytes would be taken in.
    pub(crate) fn takes(&self, bytes: u64) -> bool {
        bytes <= self.capacity / 8
    }

    /// What stands at `offset` of `file`, if it is held; counted as a hit or a miss of `kind`.
    #[inline]
    pub(crate) fn get(&self, file: FileId, offset: u64, kind: BlockKind) -> Option<Cached> {
        let key = CacheKey { file, offset };
        self.shard(&key).get(key, kind)
    }

    /// Takes in what was read from `offset` of `file`, letting go of others; too large a block is left out.
    pub(crate) fn insert(&self, file: FileId, offset: u64, kind: BlockKind, item: Cached) {
        let charge = item.charge();
        let key = CacheKey { file, offset };
        if !self.takes(charge) || !self.reserve(&key, charge) {
            return;
        }
        if !self.shard(&key).insert(key, kind, item, charge) {
            self.used.fetch_sub(charge, Ordering::Relaxed);
        }
    }

    /// Makes room for `charge` bytes and takes it; false if others took the room as fast as it was made.
    ///
    /// The shard of `key` pays, so that each keeps its share, unless it is much below it: then the others do in turn.
    fn reserve(&self, key: &CacheKey, charge: u64) -> bool {
        let low = self.capacity / self.shards.len() as u64 / 2;
        let mut empty_shards = 0;
        while empty_shards < self.shards.len() {
            let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                used.checked_add(charge).filter(|sum| *sum <= self.capacity)
            });
            if taken.is_ok() {
                return true;
            }
            let own = self.shard(key).evict(low); // its lock ends here: a thread holds one at a time
            let evicted = own.or_else(|| {
                let victim = self.hand.fetch_add(1, Ordering::Relaxed) & (self.shards.len() - 1);
                lock(&self.shards[victim]).evict(0)
            });
            match evicted {
                Some((_, freed)) => {
                    self.used.fetch_sub(freed, Ordering::Relaxed);
                    empty_shards = 0;
                }
                None => empty_shards += 1,
            }
        }
        false
    }

    /// Lets go of all blocks of a file that is to be removed.
    pub(crate) fn remove_file(&self, file: FileId) {
        for shard in &self.shards {
            let freed = lock(shard).remove_file(file);
            self.used.fetch_sub(freed, Ordering::Relaxed);
        }
    }

    /// A sum over all shards, each at its own moment.
    pub(crate) fn stats(&self) -> CacheStats {
        let names = ["data", "index", "index top", "filter", "filter top"];
        let mut kinds: Vec<(&'static str, KindStats)> = names.map(|name| (name, KindStats::default())).into();
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
        CacheStats { capacity: self.capacity, used: self.used(), kinds }
    }
}

/// A panic below the lock can only be a broken invariant of the shard, which its own assertions find again.
fn lock(shard: &Padded) -> MutexGuard<'_, Shard> {
    shard.0.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for BlockCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BlockCache({} of {} bytes)", self.used(), self.capacity)
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests race threads, and in vfs none are scoped")]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::base::{KeyRef, SeqNo};
    use crate::block::frame::Body;
    use crate::block::{Block, BlockBuilder};

    fn item(len: usize) -> Cached {
        let mut builder = BlockBuilder::new(1);
        builder.add(KeyRef::new(b"k", SeqNo(1)), 1, &vec![0; len]);
        let bytes = builder.finish().to_vec().into_boxed_slice().into_vec();
        Cached::Entries(Arc::new(Block::decode(Body::new(BlockKind::Data, bytes)).unwrap()))
    }

    fn holds(cache: &BlockCache, file: u64, offset: u64) -> bool {
        cache.get(FileId(file), offset, BlockKind::Data).is_some()
    }

    fn check(cache: &BlockCache) {
        let sum: u64 = cache.shards.iter().map(|shard| lock(shard).check()).sum();
        assert_eq!(sum, cache.used());
        assert!(sum <= cache.capacity());
    }

    #[test]
    fn holds_what_it_was_given_counts_and_forgets_a_file() {
        let cache = BlockCache::new(1 << 20);
        assert!(!holds(&cache, 1, 64));
        for offset in 0..50 {
            cache.insert(FileId(1 + offset % 2), offset, BlockKind::Data, item(100));
        }
        cache.insert(FileId(3), 0, BlockKind::Index, item(100));
        cache.insert(FileId(3), 0, BlockKind::Index, item(100));
        assert!((0..50).all(|offset| holds(&cache, 1 + offset % 2, offset)));
        check(&cache);
        let stats = cache.stats();
        let (_, data) = stats.kinds[0];
        let (_, index) = stats.kinds[1];
        assert_eq!((data.hits, data.misses, data.blocks), (50, 1, 50));
        assert_eq!((index.blocks, data.bytes + index.bytes), (1, stats.used));
        cache.remove_file(FileId(1));
        check(&cache);
        assert!((0..50).all(|offset| holds(&cache, 1 + offset % 2, offset) == (offset % 2 == 1)));
        cache.remove_file(FileId(2));
        cache.remove_file(FileId(3));
        assert_eq!(cache.used(), 0);
    }

    #[test]
    fn large_blocks_go_past_it_and_nothing_fits_into_nothing() {
        let cache = BlockCache::new(80_000);
        cache.insert(FileId(1), 0, BlockKind::Data, item(10_001));
        assert!(!holds(&cache, 1, 0));
        cache.insert(FileId(1), 0, BlockKind::Data, item(9_000));
        assert!(holds(&cache, 1, 0));
        let none = BlockCache::new(0);
        none.insert(FileId(1), 0, BlockKind::Data, item(0));
        assert!(!holds(&none, 1, 0));
    }

    #[test]
    fn a_scan_does_not_flush_what_is_used() {
        let cache = BlockCache::new(400_000);
        for _ in 0..3 {
            for offset in 0..100 {
                if !holds(&cache, 1, offset) {
                    cache.insert(FileId(1), offset, BlockKind::Data, item(1000));
                }
            }
        }
        for offset in 0..5000 {
            cache.insert(FileId(2), offset, BlockKind::Data, item(1000));
        }
        check(&cache);
        let kept = (0..100).filter(|offset| holds(&cache, 1, *offset)).count();
        assert!(kept >= 90, "{kept} of 100");
    }

    #[test]
    fn stays_in_its_budget_under_stress() {
        let cache = Arc::new(BlockCache::new(300_000));
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let cache = Arc::clone(&cache);
                scope.spawn(move || {
                    let mut x = 0x1234_5678 + thread;
                    for round in 0..4000u64 {
                        x ^= x << 13;
                        x ^= x >> 7;
                        x ^= x << 17;
                        let (file, offset) = (FileId(x % 5), x >> 8 & 127);
                        match cache.get(file, offset, BlockKind::Data) {
                            Some(Cached::Entries(block)) => assert_eq!(block.count(), 1),
                            Some(Cached::Filter(_)) => panic!("none was put in"),
                            None => cache.insert(file, offset, BlockKind::Data, item((x >> 20) as usize % 40_000)),
                        }
                        if round % 500 == 0 {
                            cache.remove_file(file);
                        }
                        assert!(cache.used() <= cache.capacity());
                    }
                });
            }
        });
        check(&cache);
        assert!(cache.used() > 100_000, "it is made use of");
    }
}

//! Chunks of flushed memtables, which the next memtables of the database use again.
//!
//! The system clears a huge page when it is touched first, which costs a writer of large values more than everything
//! else that an insertion does. A chunk that is used again has its pages.
//!
//! The spare chunks and the memory in use together never exceed the budget of the pool: adding either removes spare
//! chunks above [`ChunkPool::limit`]. So memory in use is never refused for the sake of spare chunks.

use std::sync::Arc;

use crate::mem::atomic::{AtomicU64, Mutex, MutexGuard, Ordering, lock, subtract_counted};
use crate::mem::pages::{HUGE_PAGE, PageAllocation};

/// The spare chunks take at most the budget divided by this: two full memtables with default options.
const BUDGET_DIVISOR: u64 = 4;

/// Spare chunks of [`HUGE_PAGE`] bytes, and the count of the memory in use. Thread safe.
#[derive(Default)]
pub(crate) struct ChunkPool {
    /// Maximum bytes of the spare chunks and of the memory in use together, as long as there are spare chunks.
    budget: AtomicU64,
    in_use: AtomicU64,
    /// Bytes of `spare`. A thread that changes `spare` stores it before it reads `in_use`. A thread that adds to
    /// `in_use` reads it afterwards. So at least one of the two threads finds that the sum is too large.
    spare_bytes: AtomicU64,
    spare: Mutex<Vec<PageAllocation>>,
    /// Number of chunks that were taken.
    taken: AtomicU64,
}

impl ChunkPool {
    /// Returns an empty pool. A pool with a budget of 0 keeps no chunks.
    pub(crate) fn new(budget: u64) -> Arc<ChunkPool> {
        Arc::new(ChunkPool { budget: AtomicU64::new(budget), ..ChunkPool::default() })
    }

    /// Bytes in use, without spare chunks.
    #[inline]
    pub(crate) fn in_use(&self) -> u64 {
        self.in_use.load(Ordering::Relaxed)
    }

    /// Bytes of the spare chunks.
    #[inline]
    pub(crate) fn spare_bytes(&self) -> u64 {
        self.spare_bytes.load(Ordering::Relaxed)
    }

    /// Number of spare chunks that were taken so far. While it does not change, the chunks are not needed.
    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Counts bytes as used, and frees the spare chunks that exceed the budget now.
    #[inline]
    pub(crate) fn add_in_use(&self, bytes: u64) {
        self.in_use.fetch_add(bytes, Ordering::SeqCst);
        if self.spare_bytes.load(Ordering::SeqCst) > self.limit() {
            self.free_excess();
        }
    }

    /// Counts bytes as no longer used. The caller has added them before.
    pub(crate) fn subtract_in_use(&self, bytes: u64) {
        subtract_counted(&self.in_use, bytes);
    }

    /// Frees the spare chunks.
    pub(crate) fn free_spare_chunks(&self) {
        let mut spare = lock(&self.spare);
        let excess = std::mem::take(&mut *spare);
        self.spare_bytes.store(0, Ordering::SeqCst);
        drop(spare);
        drop(excess); // after the lock is released, because it unmaps memory
    }

    /// Frees the spare chunks. From now on none is kept.
    pub(crate) fn close(&self) {
        self.budget.store(0, Ordering::SeqCst);
        self.free_spare_chunks();
    }

    /// Takes a spare chunk.
    pub(in crate::mem) fn take(&self) -> Option<PageAllocation> {
        if self.spare_bytes() == 0 {
            return None;
        }
        let mut spare = lock(&self.spare);
        let chunk = spare.pop()?;
        self.spare_bytes.store(bytes_of(spare.len()), Ordering::SeqCst);
        self.taken.fetch_add(1, Ordering::Relaxed);
        Some(chunk)
    }

    /// Keeps a chunk of [`HUGE_PAGE`] bytes for [`ChunkPool::take`], or frees it if the pool may not have more.
    pub(in crate::mem) fn put(&self, chunk: PageAllocation) {
        debug_assert_eq!(chunk.len(), HUGE_PAGE, "all chunks of the pool have the same length");
        if self.limit() < HUGE_PAGE as u64 {
            return drop(chunk);
        }
        let mut spare = lock(&self.spare);
        spare.push(chunk);
        self.free_excess_of(spare);
    }

    /// Maximum bytes of the spare chunks now.
    #[inline]
    fn limit(&self) -> u64 {
        let budget = self.budget.load(Ordering::SeqCst);
        (budget / BUDGET_DIVISOR).min(budget.saturating_sub(self.in_use.load(Ordering::SeqCst)))
    }

    #[cold]
    fn free_excess(&self) {
        self.free_excess_of(lock(&self.spare));
    }

    fn free_excess_of(&self, mut spare: MutexGuard<'_, Vec<PageAllocation>>) {
        self.spare_bytes.store(bytes_of(spare.len()), Ordering::SeqCst);
        let kept = spare.len().min(usize::try_from(self.limit() / HUGE_PAGE as u64).unwrap_or(usize::MAX));
        let excess = spare.split_off(kept);
        self.spare_bytes.store(bytes_of(kept), Ordering::SeqCst);
        drop(spare);
        drop(excess); // after the lock is released, because it unmaps memory
    }
}

impl std::fmt::Debug for ChunkPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ChunkPool({} bytes in use, {} spare)", self.in_use(), self.spare_bytes())
    }
}

fn bytes_of(chunks: usize) -> u64 {
    (chunks * HUGE_PAGE) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: u64 = HUGE_PAGE as u64;

    fn chunk() -> PageAllocation {
        PageAllocation::new(HUGE_PAGE).unwrap()
    }

    #[test]
    fn spare_chunks_stay_in_the_budget() {
        let pool = ChunkPool::new(16 * CHUNK);
        (0..6).for_each(|_| pool.put(chunk()));
        assert_eq!(pool.spare_bytes(), 4 * CHUNK, "a quarter of the budget");
        pool.add_in_use(12 * CHUNK);
        assert_eq!(pool.spare_bytes(), 4 * CHUNK);
        pool.add_in_use(CHUNK + 1);
        assert_eq!(pool.spare_bytes(), 2 * CHUNK, "memory in use comes first");
        pool.add_in_use(10 * CHUNK);
        assert_eq!((pool.spare_bytes(), pool.taken()), (0, 0));
        assert!(pool.take().is_none());
        pool.put(chunk());
        assert_eq!(pool.spare_bytes(), 0, "the budget is used up");
        pool.subtract_in_use(23 * CHUNK + 1);
        (0..2).for_each(|_| pool.put(chunk()));
        assert!(pool.take().is_some());
        assert_eq!((pool.spare_bytes(), pool.taken(), pool.in_use()), (CHUNK, 1, 0));
        pool.close();
        pool.put(chunk());
        assert_eq!(pool.spare_bytes(), 0, "a closed pool keeps none");
    }

    #[test]
    fn taken_chunk_is_the_one_that_was_put() {
        let pool = ChunkPool::new(16 * CHUNK);
        let chunk = chunk();
        let start = chunk.start();
        pool.put(chunk);
        let again = pool.take().unwrap();
        assert_eq!((again.start(), again.len(), pool.spare_bytes()), (start, HUGE_PAGE, 0));
        pool.put(again);
        pool.free_spare_chunks();
        assert!(pool.take().is_none());
        pool.put(PageAllocation::new(HUGE_PAGE).unwrap());
        assert_eq!(pool.spare_bytes(), CHUNK, "the pool is open");
    }
}

#[cfg(test)]
mod schedules {
    use super::*;
    use crate::mem::explorer::{explore, spawn};

    const CHUNK: u64 = HUGE_PAGE as u64;

    /// A thread gives chunks back while others use more memory and take chunks. Whichever thread is last frees what
    /// exceeds the budget.
    #[test]
    fn spare_chunks_stay_in_the_budget() {
        explore(|| {
            let pool = ChunkPool::new(8 * CHUNK);
            let in_thread = |work: fn(&ChunkPool)| {
                let pool = Arc::clone(&pool);
                spawn(move || work(&pool))
            };
            let giver = in_thread(|pool| (0..2).for_each(|_| pool.put(PageAllocation::new(HUGE_PAGE).unwrap())));
            let taker = in_thread(|pool| drop(pool.take()));
            pool.add_in_use(6 * CHUNK);
            pool.add_in_use(CHUNK);
            giver.join().unwrap();
            taker.join().unwrap();
            assert_eq!(pool.spare_bytes(), bytes_of(lock(&pool.spare).len()));
            assert!(pool.in_use() + pool.spare_bytes() <= 8 * CHUNK, "{pool:?}");
        });
    }
}

//! Runs of free space that threads have for themselves.

use crate::base::Result;
use crate::base::sync::{CachePadded, STRIPE_COUNT, thread_stripe};
use crate::mem::atomic::{Mutex, MutexGuard, PoisonError};
use crate::pmem::allocator::{Allocator, PoolRange};
use crate::pmem::persistence::PersistenceBackend;

/// Longer buffers are not cut from shelves.
const CACHED_LEN_MAX: u64 = 1024;

/// Runs that threads cut small buffers from without asking for the space of the pool, so that they don't wait for each
/// other. Thread safe. A shelf may be locked first, and then the space; never the other way round.
#[derive(Default)]
pub(crate) struct ThreadCaches([ThreadCache; STRIPE_COUNT]);

type ThreadCache = CachePadded<Mutex<PoolRange>>;

fn lock_cache(shelf: &ThreadCache) -> MutexGuard<'_, PoolRange> {
    shelf.0.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ThreadCaches {
    /// Takes a buffer of `len` bytes from the shelf of this thread, or from `space`.
    ///
    /// # Errors
    /// As [`Allocator::allocate`]; there may be space on shelves.
    pub(crate) fn allocate<'s, M: PersistenceBackend>(
        &self,
        backend: &M,
        len: u64,
        space: impl FnOnce() -> Result<MutexGuard<'s, Allocator>>,
    ) -> Result<u64> {
        if len > CACHED_LEN_MAX {
            return space()?.allocate(backend, len);
        }
        let mut shelf = lock_cache(&self.0[thread_stripe()]);
        if shelf.1 >= len {
            let at = shelf.0;
            *shelf = (at + len, shelf.1 - len);
            return Ok(at);
        }
        space()?.allocate_or_refill_cache(backend, len, &mut shelf)
    }

    /// Takes all runs away.
    pub(crate) fn drain(&self) -> Vec<PoolRange> {
        let runs = self.0.iter().map(|shelf| std::mem::take(&mut *lock_cache(shelf)));
        runs.filter(|(_, len)| *len > 0).collect()
    }

    /// What is on them, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(|shelf| lock_cache(shelf).1).sum()
    }
}

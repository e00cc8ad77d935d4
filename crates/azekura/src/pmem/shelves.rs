//! Runs of free space that threads have for themselves.

use crate::base::Result;
use crate::base::sync::{Line, PARTS, own_part};
use crate::mem::atomic::{Mutex, MutexGuard, PoisonError};
use crate::pmem::medium::Medium;
use crate::pmem::space::{Range, Space};

/// Longer buffers are not cut from shelves.
const SHELVED_MAX: u64 = 1024;

/// Runs that threads cut small buffers from without asking for the space of the pool, so that they don't wait for each
/// other. Thread safe. A shelf may be locked first, and then the space; never the other way round.
#[derive(Default)]
pub(crate) struct Shelves([Shelf; PARTS]);

type Shelf = Line<Mutex<Range>>;

fn lock(shelf: &Shelf) -> MutexGuard<'_, Range> {
    shelf.0.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shelves {
    /// Takes a buffer of `len` bytes from the shelf of this thread, or from `space`.
    ///
    /// # Errors
    /// As [`Space::take`]; there may be space on shelves.
    pub(crate) fn take<'s, M: Medium>(
        &self,
        medium: &M,
        len: u64,
        space: impl FnOnce() -> Result<MutexGuard<'s, Space>>,
    ) -> Result<u64> {
        if len > SHELVED_MAX {
            return space()?.take(medium, len);
        }
        let mut shelf = lock(&self.0[own_part()]);
        if shelf.1 >= len {
            let at = shelf.0;
            *shelf = (at + len, shelf.1 - len);
            return Ok(at);
        }
        space()?.take_or_shelve(medium, len, &mut shelf)
    }

    /// Takes all runs away.
    pub(crate) fn clear(&self) -> Vec<Range> {
        let runs = self.0.iter().map(|shelf| std::mem::take(&mut *lock(shelf)));
        runs.filter(|(_, len)| *len > 0).collect()
    }

    /// What is on them, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.iter().map(|shelf| lock(shelf).1).sum()
    }
}

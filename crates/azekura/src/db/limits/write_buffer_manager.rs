//! Memory of the memtables of all partitions: compares it with the memory budget, and seals the largest memtables when
//! the active ones take more than half of it. The other half is for memtables that are being flushed. Memtables are
//! sealed too when they point to more bytes of blob files than the WAL may have, because recovery copies these.

use std::cmp::Reverse;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::sync::try_lock;
use crate::db::catalog::Catalog;
use crate::db::config::Settings;
use crate::db::partition_state::PartitionState;
use crate::memtable::memtable::MemtableMemory;

/// The memory budget does not cause a memtable of fewer bytes than this to be sealed.
const BUDGET_SEAL_BYTES_MIN: u64 = 64 << 10;

/// Compares the memory of memtables with the memory budget. Thread safe.
pub(crate) struct WriteBufferManager {
    memory: Arc<MemtableMemory>,
    budget: u64,
    /// Maximum size of the WAL in bytes.
    max_wal_size: u64,
    /// Held by the thread that seals memtables to keep the budget.
    seal_lock: Mutex<()>,
    /// While the active memtables take at most this many bytes, no memtable is large enough to be sealed for the
    /// budget.
    min_active_bytes_to_seal: AtomicU64,
}

impl WriteBufferManager {
    pub(crate) fn new(memory: Arc<MemtableMemory>, settings: &Settings) -> WriteBufferManager {
        WriteBufferManager {
            memory,
            budget: settings.memory_budget,
            max_wal_size: settings.max_wal_size,
            seal_lock: Mutex::new(()),
            min_active_bytes_to_seal: AtomicU64::new(0),
        }
    }

    /// Bytes of all memtables, including those that only iterators hold.
    pub(crate) fn memory_usage(&self) -> u64 {
        self.memory.total()
    }

    /// Whether [`seal_largest`](Self::seal_largest) may have to seal memtables.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.memory_is_full() || self.blobs_are_full()
    }

    /// Whether active memtables point to more bytes of blob files than the WAL may have.
    #[inline]
    fn blobs_are_full(&self) -> bool {
        self.memory.active_blobs() > self.max_wal_size
    }

    /// Whether active memtables take more than half of the memory budget, and one of them may be large enough to be
    /// sealed.
    #[inline]
    fn memory_is_full(&self) -> bool {
        let limit = (self.budget / 2).max(self.min_active_bytes_to_seal.load(Ordering::Relaxed));
        self.memory.active() > limit
    }

    /// Seals the largest memtables with `seal` until the active memtables take at most half of the memory budget.
    /// Memtables below [`BUDGET_SEAL_BYTES_MIN`] are not sealed, so that a database with very many partitions does not
    /// write tiny tables. If the active memtables point to too many bytes of blob files, the one that points to most is
    /// sealed. Does nothing if another thread does the same.
    pub(crate) fn seal_largest(&self, catalog: &Catalog, seal: impl Fn(&PartitionState)) {
        let Some(_one) = try_lock(&self.seal_lock) else { return };
        if self.blobs_are_full() {
            let blobs =
                |partition: &PartitionState| partition.tree_if_built().map_or(0, |tree| tree.active_blob_bytes());
            if let Some(largest) = catalog.all().iter().max_by_key(|partition| blobs(partition)) {
                seal(largest);
            }
        }
        if !self.memory_is_full() {
            return;
        }
        let active = |partition: &PartitionState| partition.tree_if_built().map_or(0, |tree| tree.active_bytes());
        let mut large: Vec<_> = catalog.all().into_iter().map(|state| (active(&state), state)).collect();
        large.retain(|(bytes, _)| *bytes >= BUDGET_SEAL_BYTES_MIN);
        large.sort_unstable_by_key(|(bytes, _)| Reverse(*bytes));
        // Each memtable at most once, so that the loop ends even if sealing does not reduce the active bytes.
        for (_, partition) in large {
            if !self.memory_is_full() {
                return;
            }
            seal(&partition);
            self.min_active_bytes_to_seal.store(0, Ordering::Relaxed);
        }
        if self.memory_is_full() {
            // No memtable is large enough until the active memtables have grown.
            self.min_active_bytes_to_seal.store(self.memory.active() + BUDGET_SEAL_BYTES_MIN, Ordering::Relaxed);
        }
    }

    /// Called when the memtables have changed: a flush may have freed memory, so an active memtable may be worth
    /// sealing sooner.
    pub(crate) fn note_change(&self) {
        self.min_active_bytes_to_seal.fetch_min(self.memory.active() + BUDGET_SEAL_BYTES_MIN, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::db::config::Config;
    use crate::testing::MemFs;

    #[test]
    fn small_memtables_are_not_sealed_for_the_budget() {
        const BUDGET: u64 = 1 << 20;
        let db = Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).open().unwrap();
        let inner = &db.handle.inner; // its own budget is larger
        let settings = Settings { memory_budget: BUDGET, ..inner.settings.clone() };
        let buffers = WriteBufferManager::new(Arc::clone(&inner.catalog.resources().memtable_memory), &settings);
        let sealed = Cell::new(0);
        let seal = |_: &PartitionState| sealed.set(sealed.get() + 1);
        let mut partitions = 0..;
        let mut write = |len| {
            let part = db.open_partition(&format!("p{}", partitions.next().unwrap()), Default::default()).unwrap();
            part.insert("k", vec![7; len]).unwrap();
        };
        while !buffers.memory_is_full() {
            write(20 << 10);
        }
        buffers.seal_largest(&inner.catalog, seal);
        assert_eq!((sealed.get(), buffers.memory_is_full()), (0, false), "no memtable is large enough");
        write(100 << 10);
        assert!(buffers.memory_is_full());
        buffers.seal_largest(&inner.catalog, seal);
        assert_eq!(sealed.get(), 1, "the large memtable");
        buffers.note_change();
        assert!(!buffers.memory_is_full(), "`seal` has sealed nothing, so nothing larger is left");
    }
}

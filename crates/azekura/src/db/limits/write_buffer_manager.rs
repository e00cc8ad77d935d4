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

/// How long spare chunks of memtables are kept in a database that needs none: 1 second.
const SPARE_CHUNKS_KEPT_NS: u64 = 1_000_000_000;

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

    /// Bytes of flushed memtables that the next ones use again. As long as there are some, they and
    /// [`memory_usage`](Self::memory_usage) are within the memory budget together.
    pub(crate) fn spare_bytes(&self) -> u64 {
        self.memory.chunks().spare_bytes()
    }

    /// Frees the spare bytes if no memtable has taken some for [`SPARE_CHUNKS_KEPT_NS`]. `last`: the number of chunks
    /// taken and the time in nanoseconds when that number was new, which the caller keeps.
    pub(crate) fn free_unneeded_spare_bytes(&self, last: &mut (u64, u64), now_ns: u64) {
        let chunks = self.memory.chunks();
        if chunks.spare_bytes() == 0 || chunks.taken() != last.0 {
            *last = (chunks.taken(), now_ns);
        } else if now_ns.saturating_sub(last.1) >= SPARE_CHUNKS_KEPT_NS {
            chunks.free_spare_chunks();
        }
    }

    /// Frees the spare bytes. From now on none are kept.
    pub(crate) fn close(&self) {
        self.memory.chunks().close();
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
    use crate::base::{Error, ErrorKind};
    use crate::db::config::Config;
    use crate::mem::epoch::tests::wait_until;
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

    /// A poisoned database, which stays open for reads, once kept the chunks, because its workers find no task.
    #[test]
    fn poisoned_database_frees_its_spare_chunks() {
        let db = Config::new("/db").fs(Arc::new(MemFs::new())).workers(1).memory_budget(64 << 20).open().unwrap();
        let part = db.open_partition("p", Default::default()).unwrap();
        (0..60u8).for_each(|n| part.insert([n], vec![7; 200 << 10]).unwrap());
        part.flush().unwrap();
        let inner = &db.handle.inner;
        let _error = inner.poison.set(Error::new(ErrorKind::Poisoned, "a sync failed"));
        wait_until(|| inner.write_buffers.spare_bytes() == 0);
    }

    #[test]
    fn spare_chunks_are_reused_and_given_back() {
        const BUDGET: u64 = 64 << 20;
        let config = || Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).memory_budget(BUDGET);
        let db = config().open().unwrap();
        let part = db.open_partition("p", Default::default()).unwrap();
        let fill = |megabytes: u8| {
            (0..megabytes).for_each(|n| part.insert([n], vec![7; 200 << 10]).unwrap());
            (0..megabytes).for_each(|n| part.insert([n, n], vec![7; 200 << 10]).unwrap());
        };
        fill(50);
        assert_eq!(db.metrics().spare_memtable_bytes, 0, "nothing was flushed");
        part.flush().unwrap();
        let spare = db.metrics().spare_memtable_bytes;
        assert!((8 << 20..=BUDGET / 4).contains(&spare), "{spare}");
        fill(20);
        let metrics = db.metrics();
        assert!(metrics.spare_memtable_bytes < spare, "the next memtable uses the chunks");
        assert!(metrics.spare_memtable_bytes + metrics.memtable_bytes <= BUDGET);
        part.flush().unwrap();
        let (buffers, mut last) = (&db.handle.inner.write_buffers, (0, 0));
        buffers.free_unneeded_spare_bytes(&mut last, 5);
        buffers.free_unneeded_spare_bytes(&mut last, 4 + SPARE_CHUNKS_KEPT_NS);
        assert!(buffers.spare_bytes() > 0, "chunks were needed less than a second ago");
        buffers.free_unneeded_spare_bytes(&mut last, 5 + SPARE_CHUNKS_KEPT_NS);
        assert_eq!(buffers.spare_bytes(), 0);
        fill(20);
        let (inner, iter) = (Arc::clone(&db.handle.inner), part.iter());
        db.close().unwrap();
        drop(iter);
        assert_eq!(inner.write_buffers.spare_bytes(), 0, "a closed database keeps none");
    }
}

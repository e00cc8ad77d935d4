//! Disk space of a database that is open for writing: keeps the disk reserve filled, and gives the space that is freed
//! on a full disk to the work that needs it.
//!
//! The [disk reserve](DiskReserve) is space that ordinary writes cannot use. It grows with the write-ahead log (WAL)
//! and the pools. While it is short, only removals are accepted. Work that failed because the disk is full frees space
//! and is run once more, while no other work that needs much space runs.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard};

use crate::base::sync::{CachePadded, read, try_read, write};
use crate::base::{Error, ErrorKind, Result};
use crate::db::catalog::Catalog;
use crate::db::commit::is_out_of_space;
use crate::db::state::disk_reserve::{DiskReserve, ReserveUse};
use crate::db::state::version_set::VersionSet;
use crate::db::state::work_tracker::is_at_work;
use crate::wal::Wal;

/// The size of the reserve is checked after this many bytes of WAL and pool changes.
const RESERVE_CHECK_BYTES: u64 = 1 << 20;

/// Keeps the disk reserve filled, and shares the space of a full disk. Thread safe.
pub(crate) struct SpaceManager {
    reserve: Arc<DiskReserve>,
    wal: Arc<Wal>,
    version_set: Arc<VersionSet>,
    catalog: Arc<Catalog>,
    /// Bytes appended to the WAL or changed in pools since the size of the reserve was last checked. On a cache line of
    /// its own, because each logged commit adds to it, and reads the fields beside it.
    bytes_since_reserve_check: CachePadded<AtomicU64>,
    /// Work that may need much space holds this lock shared. Work that failed because the disk is full holds it
    /// exclusively for its second attempt, so that no other work takes the space that is freed for it. Locked after
    /// work has begun.
    disk_space_lock: RwLock<()>,
    /// Number of flushes and version edits that wait for `disk_space_lock`. Compactions yield to them, because a
    /// compaction may take minutes.
    flushes_waiting: AtomicUsize,
}

impl SpaceManager {
    pub(crate) fn new(
        reserve: Arc<DiskReserve>,
        wal: &Arc<Wal>,
        version_set: &Arc<VersionSet>,
        catalog: &Arc<Catalog>,
    ) -> SpaceManager {
        SpaceManager {
            reserve,
            wal: Arc::clone(wal),
            version_set: Arc::clone(version_set),
            catalog: Arc::clone(catalog),
            bytes_since_reserve_check: CachePadded(AtomicU64::new(0)),
            disk_space_lock: RwLock::new(()),
            flushes_waiting: AtomicUsize::new(0),
        }
    }

    /// Whether the reserve is smaller than wanted, because the disk is full or was full.
    #[inline]
    pub(crate) fn reserve_is_short(&self) -> bool {
        self.reserve.is_short()
    }

    /// Admits a write that is no removal.
    ///
    /// # Errors
    /// `OutOfSpace` while the reserve is short and cannot be filled.
    pub(crate) fn check_disk_reserve(&self) -> Result<()> {
        if !self.reserve_is_short() || self.fill_reserve() {
            return Ok(());
        }
        let message = "the disk is full: until there is space for the disk reserve, only removals are accepted";
        Err(Error::new(ErrorKind::OutOfSpace, message).in_file(self.reserve.path()))
    }

    /// Counts bytes that a commit appended to the WAL or changed in pools. After every [`RESERVE_CHECK_BYTES`], grows
    /// the reserve to the size that the WAL and the pools require.
    pub(crate) fn grow_reserve_with_wal(&self, bytes: u64) {
        let bytes = bytes.min(RESERVE_CHECK_BYTES);
        if self.bytes_since_reserve_check.0.fetch_add(bytes, Ordering::Relaxed) + bytes >= RESERVE_CHECK_BYTES {
            self.bytes_since_reserve_check.0.store(0, Ordering::Relaxed);
            self.fill_reserve();
        }
    }

    /// Grows the reserve to its wanted size, if necessary by removing spare WAL segments; false if it stays short.
    /// Does nothing and returns false while other work runs exclusively with space that the reserve has released,
    /// because the reserve would take this space back.
    pub(crate) fn fill_reserve(&self) -> bool {
        let may_fill = try_read(&self.disk_space_lock);
        may_fill.is_some() && self.fill_reserve_now()
    }

    fn fill_reserve_now(&self) -> bool {
        let was_short = self.reserve.is_short();
        let checkpoint_bytes = self.catalog.checkpoint_bytes();
        let wanted = self.reserve.wanted(self.wal.live_bytes(), checkpoint_bytes, self.version_set.manifest_bytes());
        let full = self.reserve.fill(wanted) || self.wal.remove_spare_files() && self.reserve.fill(wanted);
        if full && was_short {
            self.catalog.resources().work_available.notify_all();
        }
        full
    }

    /// Fills the reserve, then shrinks it to the wanted size of a cleanly closed database.
    pub(crate) fn shrink_reserve(&self) {
        self.fill_reserve();
        self.reserve.shrink(self.version_set.manifest_bytes());
    }

    /// Held by work that writes files and must not take space that is released for other work.
    pub(crate) fn share_disk_space(&self) -> RwLockReadGuard<'_, ()> {
        debug_assert!(is_at_work(), "work begins before it waits for disk space");
        read(&self.disk_space_lock)
    }

    /// Runs work that will free space when it is complete. If the disk is full, frees space by removing obsolete
    /// files and spare segments and by releasing a part of the disk reserve, and runs the work once more.
    /// The caller has begun work, or closes the database.
    pub(crate) fn with_reserve<T>(&self, need: ReserveUse, mut work: impl FnMut() -> Result<T>) -> Result<T> {
        let shared = self.wait_for_space(need, || read(&self.disk_space_lock));
        let result = work();
        drop(shared);
        if !is_out_of_space(&result) {
            return result;
        }
        let _alone = self.wait_for_space(need, || write(&self.disk_space_lock));
        let obsolete_files = &self.catalog.resources().obsolete_files;
        let had_obsolete = !obsolete_files.is_empty();
        obsolete_files.remove_all();
        let freed = self.wal.remove_spare_files() | self.reserve.release_for(need) | had_obsolete;
        let result = if freed { work() } else { result };
        if is_out_of_space(&result) {
            obsolete_files.remove_all(); // the unfinished outputs of the work
        }
        self.fill_reserve_now();
        result
    }

    /// Counts a flush while it waits.
    fn wait_for_space<T>(&self, need: ReserveUse, wait: impl FnOnce() -> T) -> T {
        let flushes = usize::from(need == ReserveUse::Flush);
        self.flushes_waiting.fetch_add(flushes, Ordering::Relaxed);
        let space = wait();
        let before = self.flushes_waiting.fetch_sub(flushes, Ordering::Relaxed);
        debug_assert!(before >= flushes, "a flush counts itself before it waits");
        space
    }

    /// Number of flushes that wait for other work.
    pub(crate) fn flushes_waiting(&self) -> usize {
        self.flushes_waiting.load(Ordering::Relaxed)
    }
}

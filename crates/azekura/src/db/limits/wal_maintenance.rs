//! Maintenance of the write-ahead log (WAL): which segments are retired and when, and the syncs of the sync interval.
//!
//! A segment is retired when all of its records are in synced files that a synced manifest names. Which partitions have
//! such records is known to the catalog. A flush, and a spill of buffered records, make the oldest segment retirable.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::base::sync::lock;
use crate::base::version_edit::VersionEdit;
use crate::base::{ErrorKind, Result, SeqNo};
use crate::db::catalog::Catalog;
use crate::db::config::Settings;
use crate::db::state::backoff::Backoff;
use crate::db::state::change_readers::ChangeReaders;
use crate::db::state::disk_reserve::DiskReserve;
use crate::db::state::poison::DbPoison;
use crate::db::state::version_set::VersionSet;
use crate::wal::{Wal, WalRetention};

/// On a full disk, a WAL of more bytes than this is too large: it is flushed, because its segments can then be
/// removed.
const FULL_DISK_WAL_BYTES: u64 = 256 << 10;

/// Retires segments of the WAL, and syncs it at the sync interval. Thread safe.
pub(crate) struct WalMaintenance {
    wal: Arc<Wal>,
    version_set: Arc<VersionSet>,
    catalog: Arc<Catalog>,
    poison: Arc<DbPoison>,
    reserve: Arc<DiskReserve>,
    max_wal_size: u64,
    wal_retention: Duration,
    max_retained_wal_size: u64,
    /// The readers of changes, for which segments without needed records are kept.
    pub(crate) change_readers: ChangeReaders,
    sync_interval: Option<Duration>,
    /// Backoff of WAL and manifest maintenance.
    pub(crate) backoff: Backoff,
    /// While above zero, WAL segments are not retired, because a checkpoint copies them. Retiring holds the lock, so
    /// that a checkpoint begins before or after it.
    running_checkpoints: Mutex<usize>,
    /// Time of the last sync by [`sync_if_due`](Self::sync_if_due), in nanoseconds of the monotonic clock.
    last_interval_sync_ns: AtomicU64,
    /// Number of trees that were visited to retire segments.
    #[cfg(test)]
    trees_visited: AtomicU64,
}

/// Prevents the retirement of segments until dropped.
pub(crate) struct WalRetirementPause<'a>(&'a WalMaintenance);

impl Drop for WalRetirementPause<'_> {
    fn drop(&mut self) {
        let mut running = lock(&self.0.running_checkpoints);
        debug_assert!(*running > 0, "each pause ends once");
        *running -= 1;
    }
}

impl WalMaintenance {
    pub(crate) fn new(
        settings: &Settings,
        catalog: &Arc<Catalog>,
        wal: &Arc<Wal>,
        version_set: &Arc<VersionSet>,
        poison: &Arc<DbPoison>,
        reserve: &Arc<DiskReserve>,
    ) -> WalMaintenance {
        WalMaintenance {
            wal: Arc::clone(wal),
            version_set: Arc::clone(version_set),
            catalog: Arc::clone(catalog),
            poison: Arc::clone(poison),
            reserve: Arc::clone(reserve),
            max_wal_size: settings.max_wal_size,
            wal_retention: settings.wal_retention,
            max_retained_wal_size: settings.max_retained_wal_size,
            change_readers: ChangeReaders::default(),
            sync_interval: settings.sync_interval,
            backoff: Backoff::default(),
            running_checkpoints: Mutex::new(0),
            last_interval_sync_ns: AtomicU64::new(0),
            #[cfg(test)]
            trees_visited: AtomicU64::new(0),
        }
    }

    /// Whether the WAL has more bytes than `max_wal_size`, or, while the reserve is short, than
    /// [`FULL_DISK_WAL_BYTES`].
    pub(crate) fn wal_is_too_large(&self) -> bool {
        let live = self.wal.live_bytes();
        live > self.max_wal_size || live > FULL_DISK_WAL_BYTES && self.reserve.is_short()
    }

    /// The last sequence number in the oldest segment of a WAL that is too large. `None` if the WAL is not too large,
    /// if a checkpoint copies the WAL, or if the WAL has a single segment and the disk is not full.
    pub(crate) fn oldest_pinned_seqno(&self) -> Option<SeqNo> {
        if !self.wal_is_too_large() {
            return None;
        }
        let segments = self.wal.segments();
        // On a full disk the only segment can be retired too, as soon as it is flushed.
        let is_full = self.reserve.is_short();
        if segments.len() < 2 && !is_full || self.is_paused() {
            return None;
        }
        segments.first().map(|segment| segment.last_seqno)
    }

    /// Retires no segment until the guard is dropped, because a checkpoint copies the segments.
    pub(crate) fn pause_retirement(&self) -> WalRetirementPause<'_> {
        *lock(&self.running_checkpoints) += 1;
        WalRetirementPause(self)
    }

    /// Whether a checkpoint copies the segments.
    pub(crate) fn is_paused(&self) -> bool {
        *lock(&self.running_checkpoints) > 0
    }

    /// Whether the trees have all records of the WAL in files.
    pub(crate) fn all_is_flushed(&self) -> bool {
        self.catalog.all().iter().all(|partition| partition.first_unflushed().is_none())
    }

    /// Which segments without needed records are kept now: none while the reserve is short of disk space.
    fn retention(&self) -> WalRetention {
        let now = self.catalog.resources().env.monotonic_ns();
        let age = u64::try_from(self.wal_retention.as_nanos()).unwrap_or(u64::MAX);
        WalRetention {
            max_bytes: if self.reserve.is_short() { 0 } else { self.max_retained_wal_size },
            needed_after_ns: (age > 0).then(|| now.saturating_sub(age)),
            read_through: self.change_readers.read_through(),
        }
    }

    /// Retires segments whose records all trees have flushed and no reader of changes needs, and recycles their files;
    /// false if there were none. Does nothing while a checkpoint runs.
    pub(crate) fn retire_segments(&self) -> Result<bool> {
        let checkpoints = lock(&self.running_checkpoints);
        if *checkpoints > 0 {
            return Ok(false);
        }
        // Records above this sequence number may be in the WAL and not yet in a memtable. So read it before the trees.
        let mut through = self.catalog.resources().last_visible.get();
        let partitions = self.catalog.all();
        #[cfg(test)]
        self.trees_visited.fetch_add(partitions.len() as u64, Ordering::Relaxed);
        for partition in partitions {
            if let Some(first) = partition.first_unflushed() {
                through = through.min(SeqNo(first.0.saturating_sub(1)));
            }
        }
        let epochs = self.wal.retire(through, || self.retention())?;
        debug_assert!(epochs.is_sorted_by(|a, b| a < b), "segments are retired from the oldest on");
        // The manifest must state this, because a partition without records to flush writes no edit. Recovery would
        // otherwise need the WAL from the last flush of that partition on.
        let flushed = self.version_set.all_flushed(through.min(self.wal.durable()));
        if epochs.is_empty() {
            return match self.poison.poison_on_failure(self.version_set.log_and_apply(flushed.as_slice())) {
                // If the disk is full, the edit of the next flush records the same.
                Err(error) if error.kind() != ErrorKind::OutOfSpace => Err(error),
                _ => Ok(false),
            };
        }
        let retired = epochs.iter().map(|epoch| VersionEdit::WalSegmentRemoved { epoch: *epoch });
        let edits: Vec<VersionEdit> = retired.chain(flushed).collect();
        self.poison.poison_on_failure(self.version_set.log_and_apply_durably(&edits))?;
        self.wal.recycle(&epochs).map(|()| true)
    }

    /// Syncs the WAL through the last visible commit.
    pub(crate) fn sync_all_visible(&self) -> Result<()> {
        self.poison.check()?;
        self.poison.poison_on_failure(self.wal.sync(self.catalog.resources().last_visible.get(), false))
    }

    /// Without worker threads: syncs the WAL if the sync interval has passed and a visible commit is not durable.
    /// Returns whether it did.
    pub(crate) fn sync_if_due(&self) -> Result<bool> {
        let Some(interval) = self.sync_interval else { return Ok(false) };
        let resources = self.catalog.resources();
        let now = resources.env.monotonic_ns();
        let elapsed = Duration::from_nanos(now.saturating_sub(self.last_interval_sync_ns.load(Ordering::Relaxed)));
        let is_durable = || self.wal.durable() >= resources.last_visible.get().min(self.wal.appended());
        if elapsed < interval || is_durable() {
            return Ok(false);
        }
        self.last_interval_sync_ns.store(now, Ordering::Relaxed);
        self.sync_all_visible().map(|()| true)
    }

    /// Number of trees that were visited to retire segments.
    #[cfg(test)]
    pub(crate) fn trees_visited(&self) -> u64 {
        self.trees_visited.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::config::Config;
    use crate::testing::{MemFs, TestEnv};

    fn config() -> Config {
        Config::new("/db").fs(Arc::new(MemFs::new())).workers(0)
    }

    #[test]
    fn no_segment_is_retired_during_a_checkpoint() {
        let db = config().open().unwrap();
        let part = db.open_partition("p", Default::default()).unwrap();
        let writer = db.handle.inner.writer().unwrap();
        let maintenance = &writer.wal_maintenance;
        part.insert("k", "v").unwrap();
        writer.wal.seal().unwrap();
        assert!(!maintenance.all_is_flushed() && !maintenance.retire_segments().unwrap());
        let pause = maintenance.pause_retirement();
        part.flush().unwrap();
        assert!(maintenance.all_is_flushed() && maintenance.is_paused());
        assert!(!maintenance.retire_segments().unwrap());
        drop(pause);
        assert!(maintenance.retire_segments().unwrap());
        assert!(!maintenance.retire_segments().unwrap(), "the active segment");
    }

    #[test]
    fn wal_is_synced_once_per_interval() {
        let env = TestEnv::new(1);
        let interval = Duration::from_secs(1);
        let db = config().env(Arc::new(env.clone())).sync_interval(Some(interval)).open().unwrap();
        let part = db.open_partition("p", Default::default()).unwrap();
        let maintenance = &db.handle.inner.writer().unwrap().wal_maintenance;
        env.advance(interval);
        assert!(!maintenance.sync_if_due().unwrap(), "nothing to sync");
        part.insert("k", "v").unwrap();
        assert!(maintenance.sync_if_due().unwrap());
        part.insert("k", "v").unwrap();
        assert!(!maintenance.sync_if_due().unwrap(), "too early");
        env.advance(interval);
        assert!(maintenance.sync_if_due().unwrap());
        assert!(!maintenance.sync_if_due().unwrap());
    }
}

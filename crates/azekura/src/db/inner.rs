//! State of an open database that all of its handles share ([`DbInner`]): the write path up to group commit, write
//! stalls, and the use of the disk reserve.

use std::cmp::Reverse;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard};

use crate::base::blob_pointer::BlobPointer;
use crate::base::event::{DroppedAfterDamage, Event};
use crate::base::key::put_expiry;
use crate::base::merge_operator::MergeOperator;
use crate::base::sync::{WakeSignal, lock, read, try_lock, try_read, write};
use crate::base::version_edit::VersionEdit;
use crate::base::{Error, ErrorKind, RecordKind, Result, SeqNo};
use crate::db::catalog::Catalog;
use crate::db::commit::{CommitOutcome, Committer, WriteBatch, is_out_of_space};
use crate::db::config::{PersistMode, PlantedBug, Settings};
use crate::db::partition_state::PartitionState;
use crate::db::staged_records::{StagedGuard, StagedRecords};
use crate::db::state::backoff::Backoff;
use crate::db::state::disk_reserve::{DiskReserve, ReserveUse};
use crate::db::state::event_queue::DbPoison;
use crate::db::state::list_growth::reserve_more;
use crate::db::state::sharded_counter::ShardedCounter;
use crate::db::state::version_set::VersionSet;
use crate::db::state::work_tracker::{WorkGuard, WorkTracker, WriteMark, is_at_work};
use crate::db::state::write_stall::{
    AccruedDelay, WorstPressure, WriteStallLimits, delay_ns_per_kib, must_stop_writes,
};
use crate::engine::{EngineHost, LastVisibleSeqno, SnapshotList, Staged};
use crate::memtable::memtable::MemtableMemory;
use crate::table::obsolete_files::ObsoleteFiles;
use crate::vfs::open_files::DataFileKind;
use crate::vfs::{Env, FileLock, Fs};
use crate::wal::Wal;
use crate::wal::format::{WalRecord, put_record, record_len};

/// The memory budget does not cause a memtable of fewer bytes than this to be sealed.
const BUDGET_SEAL_BYTES_MIN: u64 = 64 << 10;

/// The parts of a database that only a database opened for writing has.
pub(crate) struct DbWriter {
    pub(crate) version_set: Arc<VersionSet>,
    pub(crate) wal: Arc<Wal>,
    pub(crate) committer: Committer,
    pub(crate) reserve: Arc<DiskReserve>,
}

/// Result of recovery, for metrics.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecoveryStats {
    pub(crate) records: u64,
    pub(crate) elapsed_ns: u64,
    pub(crate) dropped_after_damage: Option<DroppedAfterDamage>,
    /// Bytes of the live segments of the write-ahead log (WAL) that recovery read. `manifest_bytes` is the same for
    /// the manifest.
    pub(crate) wal_bytes: u64,
    pub(crate) wal_segments: usize,
    pub(crate) manifest_bytes: u64,
    /// The settings in the manifest, if it has any.
    pub(crate) stored_settings: Option<Settings>,
}

/// Counters since the database was opened.
#[derive(Debug, Default)]
pub(crate) struct DbCounters {
    pub(crate) user_bytes: ShardedCounter,
    pub(crate) direct_blob_bytes: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) flushed_bytes: AtomicU64,
    pub(crate) ingests: AtomicU64,
    pub(crate) ingested_bytes: AtomicU64,
    pub(crate) compactions: AtomicU64,
    pub(crate) trivial_moves: AtomicU64,
    pub(crate) compaction_bytes_read: AtomicU64,
    pub(crate) compaction_bytes_written: AtomicU64,
    pub(crate) blob_gc_runs: AtomicU64,
    pub(crate) blob_gc_bytes_read: AtomicU64,
    pub(crate) blob_gc_bytes_written: AtomicU64,
    pub(crate) blob_bytes_freed: AtomicU64,
    pub(crate) stall_ns: AtomicU64,
}

/// State of an open database that is independent of any single handle. Thread safe.
pub(crate) struct DbInner {
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) env: Arc<dyn Env>,
    pub(crate) dir: PathBuf,
    pub(crate) settings: Settings,
    pub(crate) catalog: Catalog,
    pub(crate) last_visible: LastVisibleSeqno,
    pub(crate) snapshots: Arc<SnapshotList>,
    /// `None` when opened read-only.
    pub(crate) writer: Option<DbWriter>,
    pub(crate) poison: Arc<DbPoison>,
    pub(crate) counters: DbCounters,
    pub(crate) recovery_stats: RecoveryStats,
    /// Notified when there may be a new task.
    pub(crate) work_available: Arc<WakeSignal>,
    /// Notified when a task has ended.
    pub(crate) task_done: WakeSignal,
    pub(crate) closing: AtomicBool,
    /// Closing flushes all partitions. The workers rest, because each looks for tasks in all partitions.
    pub(crate) is_flushing_to_close: AtomicBool,
    /// Notified when the database begins to close.
    pub(crate) close_requested: WakeSignal,
    /// Running work that changes files of the directory, in all threads. Closing waits for it.
    active_work: WorkTracker,
    /// Held while a partition is created or deleted, so that these operations do not overlap.
    pub(crate) partition_ddl_lock: Mutex<()>,
    /// While above zero, WAL segments are not recycled, because a checkpoint copies them. Recycling holds the lock,
    /// so that a checkpoint begins before or after it.
    pub(crate) running_checkpoints: Mutex<usize>,
    /// Whether sealed memtables wait for a flush. With a single worker, a compaction yields to flushes, and to a WAL
    /// that is too large.
    pub(crate) flush_waiting: AtomicBool,
    /// Held by the thread that seals memtables to keep the memory budget.
    seal_lock: Mutex<()>,
    /// While the active memtables take at most this many bytes, no memtable is large enough to be sealed for the
    /// budget.
    min_active_bytes_to_seal: AtomicU64,
    worst_pressure: Mutex<WorstPressure>,
    delay_ns_per_kib: AtomicU64,
    accrued_delay: AccruedDelay,
    writes_stopped: AtomicBool,
    /// The last failure of a flush, until one succeeds.
    pub(crate) flush_error: Mutex<Option<Error>>,
    /// Backoff of WAL and manifest maintenance.
    pub(crate) wal_backoff: Backoff,
    /// Bytes appended to the WAL or changed in pools since the size of the reserve was last checked.
    wal_bytes_since_reserve_check: AtomicU64,
    /// Work that may need much space holds this lock shared. Work that failed because the disk is full holds it
    /// exclusively for its second attempt, so that no other work takes the space that is freed for it. Locked after
    /// work has begun in `active_work`.
    disk_space_lock: RwLock<()>,
    /// Number of flushes that wait for `disk_space_lock`. Compactions yield to them, because a compaction may take
    /// minutes.
    flushes_held: AtomicUsize,
    /// Closes the database if its last handle was dropped inside work. A worker calls it as soon as the worker is
    /// outside work.
    pub(crate) left_to_close: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// Time of the last WAL sync that `worker::step` made for the sync interval, in nanoseconds of the monotonic
    /// clock.
    pub(crate) last_interval_sync_ns: AtomicU64,
    pub(crate) dir_lock: Mutex<Option<Box<dyn FileLock>>>,
}

/// The size of the reserve is checked after this many bytes of WAL and pool changes.
const RESERVE_CHECK_BYTES: u64 = 1 << 20;
/// Bytes that a record of a prepared commit or a single change is assumed to change in addition to its own: one page
/// of a pool.
const POOL_PAGE: u64 = 4096;

/// On a full disk, a WAL of more bytes than this is too large: it is flushed, because its segments can then be
/// removed.
const FULL_DISK_WAL_BYTES: u64 = 256 << 10;

/// An ingest is delayed as a commit of this size, because it adds at most one run to level 0.
const INGEST_DELAY_BYTES: u64 = 1 << 20;

/// Guard of a call of the public interface, made by [`DbInner::begin_api_call`].
pub(crate) struct ApiCallGuard<'a>(&'a DbInner);

impl Drop for ApiCallGuard<'_> {
    fn drop(&mut self) {
        // Inside work, the listener could not close the database. The call that runs the work delivers the events.
        // In a forked child, the lock on the events may never be released.
        if !std::thread::panicking() && !is_at_work() && !self.0.is_forked() {
            let poison = &self.0.poison;
            poison.record_delivery(poison.events().deliver_at_call_end());
        }
    }
}

/// Arguments of [`DbInner::new`].
pub(crate) struct DbInnerArgs {
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) env: Arc<dyn Env>,
    pub(crate) dir: PathBuf,
    pub(crate) settings: Settings,
    pub(crate) catalog: Catalog,
    pub(crate) last_visible: LastVisibleSeqno,
    pub(crate) writer: Option<DbWriter>,
    pub(crate) poison: Arc<DbPoison>,
    pub(crate) recovery_stats: RecoveryStats,
    pub(crate) dir_lock: Option<Box<dyn FileLock>>,
}

impl DbInner {
    pub(crate) fn new(parts: DbInnerArgs) -> DbInner {
        DbInner {
            snapshots: Arc::clone(&parts.catalog.resources().snapshots),
            fs: parts.fs,
            env: parts.env,
            dir: parts.dir,
            settings: parts.settings,
            work_available: Arc::clone(&parts.catalog.resources().work_available),
            catalog: parts.catalog,
            last_visible: parts.last_visible,
            writer: parts.writer,
            poison: parts.poison,
            counters: DbCounters::default(),
            recovery_stats: parts.recovery_stats,
            task_done: WakeSignal::default(),
            closing: AtomicBool::new(false),
            is_flushing_to_close: AtomicBool::new(false),
            close_requested: WakeSignal::default(),
            active_work: WorkTracker::default(),
            partition_ddl_lock: Mutex::new(()),
            running_checkpoints: Mutex::new(0),
            flush_waiting: AtomicBool::new(false),
            seal_lock: Mutex::new(()),
            min_active_bytes_to_seal: AtomicU64::new(0),
            worst_pressure: Mutex::default(),
            delay_ns_per_kib: AtomicU64::new(0),
            accrued_delay: AccruedDelay::default(),
            writes_stopped: AtomicBool::new(false),
            flush_error: Mutex::new(None),
            wal_backoff: Backoff::default(),
            wal_bytes_since_reserve_check: AtomicU64::new(0),
            disk_space_lock: RwLock::new(()),
            flushes_held: AtomicUsize::new(0),
            left_to_close: Mutex::new(None),
            last_interval_sync_ns: AtomicU64::new(0),
            dir_lock: Mutex::new(parts.dir_lock),
        }
    }

    /// The parts that only a database opened for writing has.
    ///
    /// # Errors
    /// `Closed` after close and in a forked child, `Invalid` if opened read-only, `Poisoned`.
    pub(crate) fn writer(&self) -> Result<&DbWriter> {
        self.check_process()?; // first, because a forked child may wait forever for a lock
        self.poison.check()?;
        self.check_open()?;
        self.writer.as_ref().ok_or_else(|| Error::invalid("the database is open for reading only"))
    }

    /// As [`SnapshotList::is_forked`].
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        self.snapshots.is_forked()
    }

    /// Fails with `Closed` in a forked child.
    #[inline]
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.is_forked() { Err(forked_error()) } else { Ok(()) }
    }

    /// Fails with `Closed` once the database closes.
    #[inline]
    pub(crate) fn check_open(&self) -> Result<()> {
        match self.closing.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(closed_error()),
        }
    }

    /// Replaces the result of a read by `Closed` if the database has closed meanwhile, because another process may
    /// change the files of a closed database. Called after the read. Takes a reference, because moving the result
    /// costs more than this check.
    #[inline]
    pub(crate) fn check_read<T>(&self, read: &mut Result<T>) {
        if !self.is_open_after_read() {
            *read = Err(closed_error());
        }
    }

    /// Whether the database was open during all reads that ended before this call.
    #[inline]
    pub(crate) fn is_open_after_read(&self) -> bool {
        // The fence orders the data of the read before `closing`: if the read found a change made after the close,
        // then this load finds `closing` set.
        fence(Ordering::Acquire);
        !self.closing.load(Ordering::Relaxed)
    }

    /// Begins work that changes files. No event is delivered before the work has ended, because the listener may drop
    /// the last handle.
    ///
    /// # Errors
    /// `Closed` once the database closes, and in a forked child.
    pub(crate) fn begin_work(&self) -> Result<WorkGuard<'_>> {
        self.check_process()?;
        self.active_work.begin().ok_or_else(|| Error::new(ErrorKind::Closed, "the database is closed"))
    }

    /// Begins work that changes no files but may call a comparator. `None` once the database has stopped work.
    pub(crate) fn enter(&self) -> Option<WorkGuard<'_>> {
        self.active_work.begin()
    }

    /// For calls that may wait for locks, until work has ended or until other writes have ended. Fails with `Closed` in
    /// a forked child, where a lock may never be released, and with `Invalid` inside work and writes.
    pub(crate) fn check_outside(&self) -> Result<()> {
        self.check_process()?;
        check_not_called_back()
    }

    /// Signals background threads and waiting writers to stop, and does not wait for them.
    pub(crate) fn begin_closing(&self) {
        self.closing.store(true, Ordering::Release);
        self.work_available.notify_all();
        self.task_done.notify_all();
        self.close_requested.notify_all();
    }

    /// Prevents new work, and returns when all running work has ended.
    pub(crate) fn stop_work(&self) {
        self.begin_closing();
        self.active_work.stop_and_wait();
    }

    /// The obsolete files. A thread that removes them must have begun work.
    pub(crate) fn obsolete_files(&self) -> &ObsoleteFiles {
        &self.catalog.resources().obsolete_files
    }

    /// Encodes a value as the last record of `payload`. A large one is staged in `staged`, and the record has the
    /// pointer. Returns the length of the encoded value.
    ///
    /// # Errors
    /// `Invalid` if the payload would be too large; those of [`stage`](DbInner::stage). Nothing is added.
    pub(crate) fn put_value(
        &self,
        payload: &mut Vec<u8>,
        staged: &mut StagedGuard<'_>,
        partition: &Arc<PartitionState>,
        key: &[u8],
        value: &[u8],
        expires_ms: Option<u64>,
    ) -> Result<usize> {
        let id = partition.id;
        let counts = staged.counts();
        // The options may change meanwhile; the tree alone decides whether it stages the value.
        let pointer = match partition.stages_value(value.len()) {
            true => self.stage(partition, staged, value)?,
            false => None,
        };
        let mut encoded = Vec::new();
        if let Some(expires_ms) = expires_ms {
            put_expiry(&mut encoded, expires_ms, if pointer.is_none() { value } else { &[] });
        }
        let kind = match (pointer, expires_ms) {
            (None, None) => {
                self.put_record(payload, &WalRecord { kind: RecordKind::Put, partition: id, key, value })?;
                return Ok(value.len());
            }
            (None, Some(_)) => RecordKind::ExpiringPut,
            (Some(_), None) => RecordKind::BlobPointer,
            (Some(_), Some(_)) => RecordKind::ExpiringBlobPointer,
        };
        if let Some(pointer) = pointer {
            pointer.encode(&mut encoded);
        }
        let put = self.put_record(payload, &WalRecord { kind, partition: id, key, value: &encoded });
        put.inspect_err(|_| staged.truncate(counts)).map(|()| encoded.len())
    }

    /// Encodes a record as the last one of `payload`.
    ///
    /// # Errors
    /// `Invalid` if the payload would exceed half the memory budget.
    #[inline]
    pub(crate) fn put_record(&self, payload: &mut Vec<u8>, record: &WalRecord<'_>) -> Result<()> {
        let len = record_len(record);
        self.check_payload_len(payload.len() as u64 + len)?;
        reserve_more(payload, len as usize);
        put_record(payload, record);
        Ok(())
    }

    /// # Errors
    /// `Invalid` if a payload of this length exceeds half the memory budget.
    #[inline]
    pub(crate) fn check_payload_len(&self, len: u64) -> Result<()> {
        let limit = self.settings.memory_budget / 2;
        if len <= limit { Ok(()) } else { Err(too_large_error(len, limit)) }
    }

    /// Stages a large value of `partition`, and adds it to `staged`. Returns the pointer, or `None` if the tree stages
    /// nothing; then the value belongs into the record.
    ///
    /// # Errors
    /// As [`write`](DbInner::write). A failure leaves at most stale bytes in a blob file.
    #[cold]
    fn stage(
        &self,
        partition: &Arc<PartitionState>,
        staged: &mut StagedGuard<'_>,
        value: &[u8],
    ) -> Result<Option<BlobPointer>> {
        let _call = self.begin_api_call();
        self.writer()?;
        check_not_called_back()?;
        let tree = partition.tree()?;
        self.check_disk_reserve()?;
        self.delay_write(value.len() as u64)?;
        let _work = self.begin_work()?;
        let pointer = tree.stage(value)?.blob();
        if let Some(pointer) = pointer {
            staged.add(partition, Staged::Blob(pointer));
            self.counters.direct_blob_bytes.fetch_add(pointer.frame_len, Ordering::Relaxed);
        }
        Ok(pointer)
    }

    /// Admits an ingest: delays the caller as a writer of [`INGEST_DELAY_BYTES`].
    ///
    /// # Errors
    /// As [`writer`](DbInner::writer); `OutOfSpace` if the disk is full.
    pub(crate) fn admit_ingest(&self) -> Result<&DbWriter> {
        let writer = self.writer()?;
        self.check_disk_reserve()?;
        self.delay_write(INGEST_DELAY_BYTES)?;
        Ok(writer)
    }

    /// Held by work that writes files and must not take space that is released for other work.
    pub(crate) fn share_disk_space(&self) -> RwLockReadGuard<'_, ()> {
        read(&self.disk_space_lock)
    }

    /// Writes a batch, and returns when it is as durable as `mode` requires.
    ///
    /// # Errors
    /// Those of [`Partition::insert`](crate::Partition::insert) and of the check of the batch.
    pub(crate) fn write(&self, batch: &WriteBatch<'_>, mode: PersistMode) -> Result<()> {
        let written = self.write_visibly(batch, mode).and_then(|wal_end| self.make_durable(wal_end, mode));
        written.inspect_err(|_| drop(self.begin_api_call()))
    }

    /// Makes staged values durable before their commit, so that a failure affects this commit only. The sync of the
    /// WAL syncs those of commits that requested no sync. Does nothing for `Buffer`.
    pub(crate) fn sync_staged(&self, staged: &StagedRecords<'_>, mode: PersistMode) -> Result<()> {
        self.writer()?;
        match staged.is_empty()
            || mode == PersistMode::Buffer
            || self.settings.has_planted_bug(PlantedBug::WalSyncBeforeBlobs)
        {
            true => Ok(()),
            false => self.poison.poison_on_failure(staged.sync()),
        }
    }

    /// Commits a batch. Returns the sequence number through which the WAL must be synced to make it durable.
    fn write_visibly(&self, batch: &WriteBatch<'_>, mode: PersistMode) -> Result<SeqNo> {
        let writer = self.writer()?;
        let _write = begin_write()?;
        let len = batch.payload.len() as u64;
        debug_assert!(self.check_payload_len(len).is_ok(), "the length is checked when records are added");
        batch.check_partitions()?;
        if writer.reserve.is_short() && !batch.only_removes() {
            self.check_disk_reserve()?;
        }
        self.delay_write(len)?;
        if let Some(check) = batch.check {
            // Most of the validation, so that the leader reads only what has changed since.
            check.validate(batch.payload, batch.partitions(), self.last_visible.get())?;
        }
        let committed = match batch.staged.is_empty() {
            true => writer.committer.commit(batch),
            false => self.commit_staged(writer, batch, mode),
        };
        let CommitOutcome { wal_end, sealed, changed_pages, .. } = committed?;
        self.counters.user_bytes.add(len + batch.staged.value_bytes());
        if wal_end > SeqNo::ZERO {
            self.grow_reserve_with_wal(len.saturating_add(changed_pages.saturating_mul(POOL_PAGE)));
        }
        if sealed || self.memory_is_full() {
            self.seal_largest();
            self.update_write_stalls();
            self.work_available.notify_all();
        }
        Ok(wal_end)
    }

    /// Commits a batch with staged values.
    #[cold]
    fn commit_staged(&self, writer: &DbWriter, batch: &WriteBatch<'_>, mode: PersistMode) -> Result<CommitOutcome> {
        self.sync_staged(batch.staged, mode)?;
        // As late as possible, because a failed sync of the file poisons the database from now on.
        let mut begun = self.poison.poison_on_failure(batch.staged.begin_commit())?;
        let committed = writer.committer.commit(batch);
        match committed.is_ok() || self.poison.is_set() {
            true => batch.staged.mark_applied(),
            false => begun.refuse(),
        }
        committed
    }

    /// Fails with `OutOfSpace` while the disk reserve is short and cannot be filled. Then only removals are accepted.
    fn check_disk_reserve(&self) -> Result<()> {
        let Some(writer) = self.writer.as_ref().filter(|writer| writer.reserve.is_short()) else { return Ok(()) };
        if self.fill_reserve() {
            return Ok(());
        }
        let message = "the disk is full: until there is space for the disk reserve, only removals are accepted";
        Err(Error::new(ErrorKind::OutOfSpace, message).in_file(writer.reserve.path()))
    }

    /// Counts bytes that a commit appended to the WAL or changed in pools. After every [`RESERVE_CHECK_BYTES`], grows
    /// the reserve to the size that the WAL and the pools require.
    fn grow_reserve_with_wal(&self, bytes: u64) {
        let bytes = bytes.min(RESERVE_CHECK_BYTES);
        if self.wal_bytes_since_reserve_check.fetch_add(bytes, Ordering::Relaxed) + bytes >= RESERVE_CHECK_BYTES {
            self.wal_bytes_since_reserve_check.store(0, Ordering::Relaxed);
            self.fill_reserve();
        }
    }

    /// Grows the disk reserve to its wanted size, if necessary by removing spare WAL segments; false if it stays
    /// short. Does nothing and returns false while other work runs exclusively with space that the reserve has
    /// released, because the reserve would take this space back.
    pub(crate) fn fill_reserve(&self) -> bool {
        let may_fill = try_read(&self.disk_space_lock);
        may_fill.is_some() && self.fill_reserve_now()
    }

    /// Counts `more` trees that were visited after a task; returns the number of all visits.
    #[cfg(test)]
    pub(crate) fn count_tree_visits(&self, more: usize) -> u64 {
        let mut pressures = lock(&self.worst_pressure);
        pressures.trees_visited += more as u64;
        pressures.trees_visited
    }

    /// Number of flushes that wait for another task.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn flushes_waiting_for_space(&self) -> usize {
        self.flushes_held.load(Ordering::Relaxed)
    }

    fn wait_for_space<T>(&self, need: ReserveUse, wait: impl FnOnce() -> T) -> T {
        let flushes = usize::from(need == ReserveUse::Flush);
        self.flushes_held.fetch_add(flushes, Ordering::Relaxed);
        let space = wait();
        self.flushes_held.fetch_sub(flushes, Ordering::Relaxed);
        space
    }

    fn fill_reserve_now(&self) -> bool {
        let Some(writer) = &self.writer else { return true };
        let was_short = writer.reserve.is_short();
        let checkpoint_bytes = self.catalog.checkpoint_bytes();
        let wanted =
            writer.reserve.wanted(writer.wal.live_bytes(), checkpoint_bytes, writer.version_set.manifest_bytes());
        let full = writer.reserve.fill(wanted) || writer.wal.remove_spare_files() && writer.reserve.fill(wanted);
        if full && was_short {
            self.work_available.notify_all();
        }
        full
    }

    /// Runs work that will free space when it is complete. If the disk is full, frees space by removing obsolete
    /// files and spare segments and by releasing a part of the disk reserve, and runs the work once more. The caller
    /// has [begun work](DbInner::begin_work).
    pub(crate) fn with_reserve<T>(&self, need: ReserveUse, mut work: impl FnMut() -> Result<T>) -> Result<T> {
        let shared = self.wait_for_space(need, || read(&self.disk_space_lock));
        let result = work();
        drop(shared);
        let (Some(writer), true) = (&self.writer, is_out_of_space(&result)) else { return result };
        let _alone = self.wait_for_space(need, || write(&self.disk_space_lock));
        let had_obsolete = !self.obsolete_files().is_empty();
        self.obsolete_files().remove_all();
        let made = writer.wal.remove_spare_files() | writer.reserve.release_for(need) | had_obsolete;
        let result = if made { work() } else { result };
        if is_out_of_space(&result) {
            self.obsolete_files().remove_all(); // the unfinished outputs of the work
        }
        self.fill_reserve_now();
        result
    }

    pub(crate) fn memtable_memory(&self) -> &MemtableMemory {
        &self.catalog.resources().memtable_memory
    }

    /// Whether active memtables take more than half of the memory budget. The other half is for memtables that are
    /// being flushed.
    #[inline]
    fn memory_is_full(&self) -> bool {
        let limit = (self.settings.memory_budget / 2).max(self.min_active_bytes_to_seal.load(Ordering::Relaxed));
        self.memtable_memory().active() > limit
    }

    /// Seals the largest memtables until the active memtables take at most half of the memory budget. Memtables below
    /// [`BUDGET_SEAL_BYTES_MIN`] are not sealed, so that a database with very many partitions does not write tiny
    /// tables.
    pub(crate) fn seal_largest(&self) {
        let Some(_one) = try_lock(&self.seal_lock) else { return };
        if !self.memory_is_full() {
            return;
        }
        let active = |partition: &PartitionState| partition.tree_if_built().map_or(0, |tree| tree.active_bytes());
        let mut large: Vec<_> = self.catalog.all().into_iter().map(|state| (active(&state), state)).collect();
        large.retain(|(bytes, _)| *bytes >= BUDGET_SEAL_BYTES_MIN);
        large.sort_unstable_by_key(|(bytes, _)| Reverse(*bytes));
        // Each memtable at most once, so that the loop ends even if sealing does not reduce the active bytes.
        for (_, partition) in large {
            if !self.memory_is_full() {
                return;
            }
            self.seal(&partition);
            self.min_active_bytes_to_seal.store(0, Ordering::Relaxed);
        }
        if self.memory_is_full() {
            // No memtable is large enough until the active memtables have grown.
            self.min_active_bytes_to_seal
                .store(self.memtable_memory().active() + BUDGET_SEAL_BYTES_MIN, Ordering::Relaxed);
        }
    }

    /// Seals the active memtable of a partition.
    pub(crate) fn seal(&self, partition: &PartitionState) {
        if let Some(tree) = partition.tree_if_built() {
            tree.seal();
            self.update_write_stalls_after([partition]);
        }
    }

    pub(crate) fn make_durable(&self, last: SeqNo, mode: PersistMode) -> Result<()> {
        if mode != PersistMode::Buffer && last > SeqNo::ZERO {
            let wal = &self.writer.as_ref().ok_or_else(|| Error::invalid("the database is open for reading only"))?.wal;
            self.poison.poison_on_failure(wal.sync(last, mode == PersistMode::SyncAll))?;
        }
        Ok(())
    }

    /// Makes every commit that is visible now durable, together with all version edits. Does nothing for `Buffer`.
    pub(crate) fn persist(&self, mode: PersistMode) -> Result<()> {
        let _call = self.begin_api_call();
        let writer = self.writer()?;
        if mode == PersistMode::Buffer {
            return Ok(());
        }
        self.poison.poison_on_failure(writer.wal.sync(self.last_visible.get(), mode == PersistMode::SyncAll))?;
        self.poison.poison_on_failure(writer.version_set.sync())
    }

    /// Delays the writer in proportion to the debt. If writes are stopped, waits until a flush has freed memory.
    fn delay_write(&self, bytes: u64) -> Result<()> {
        let rate = self.delay_ns_per_kib.load(Ordering::Relaxed);
        if rate > 0 {
            let sleep = self.accrued_delay.add(rate * (bytes + 64) / 1024);
            if sleep > 0 {
                self.env.sleep(std::time::Duration::from_nanos(sleep));
                self.counters.stall_ns.fetch_add(sleep, Ordering::Relaxed);
            }
        }
        if self.writes_stopped.load(Ordering::Relaxed) && self.settings.workers > 0 {
            self.wait_for_memory()?;
        }
        Ok(())
    }

    #[cold]
    fn wait_for_memory(&self) -> Result<()> {
        let start = self.env.monotonic_ns();
        loop {
            let seen = self.task_done.generation();
            self.update_write_stalls();
            if !self.writes_stopped.load(Ordering::Relaxed) {
                break;
            }
            self.writer()?;
            if let Some(error) = lock(&self.flush_error).clone() {
                return Err(error);
            }
            self.work_available.notify_all();
            self.task_done.wait_past(seen, 100);
        }
        self.counters.stall_ns.fetch_add(self.env.monotonic_ns().saturating_sub(start), Ordering::Relaxed);
        Ok(())
    }

    /// Computes the write delay, and whether writes must stop, from the pressure of all trees.
    pub(crate) fn update_write_stalls(&self) {
        self.update_write_stalls_after(self.catalog.all().iter().map(|partition| &**partition));
    }

    /// As [`update_write_stalls`](Self::update_write_stalls), when only these partitions have changed.
    pub(crate) fn update_write_stalls_after<'a>(&self, changed: impl IntoIterator<Item = &'a PartitionState>) {
        let limits = WriteStallLimits { memory_stop: self.settings.memory_budget, ..WriteStallLimits::default() };
        let mut pressures = lock(&self.worst_pressure);
        for partition in changed {
            // Read and stored under the lock, so that the last update has the last state. A deletion calls this too.
            let tree = partition.tree_if_built().filter(|_| !partition.is_deleted());
            pressures.set(partition.id, tree.map(|tree| tree.pressure()));
        }
        let worst = pressures.worst();
        self.flush_waiting.store(worst.sealed_memtables > 0, Ordering::Relaxed);
        // Flushes may have freed memory, so an active memtable may be worth sealing sooner.
        self.min_active_bytes_to_seal
            .fetch_min(self.memtable_memory().active() + BUDGET_SEAL_BYTES_MIN, Ordering::Relaxed);
        self.delay_ns_per_kib.store(delay_ns_per_kib(&worst, &limits), Ordering::Relaxed);
        self.writes_stopped.store(must_stop_writes(&worst, self.memtable_memory().total(), &limits), Ordering::Relaxed);
        drop(pressures);
    }

    /// Whether the WAL has more bytes than `max_wal_size`, or, while the reserve is short, than
    /// [`FULL_DISK_WAL_BYTES`].
    pub(crate) fn wal_is_too_large(&self) -> bool {
        self.writer.as_ref().is_some_and(|writer| {
            let live = writer.wal.live_bytes();
            live > self.settings.max_wal_size || live > FULL_DISK_WAL_BYTES && writer.reserve.is_short()
        })
    }

    /// Queues an event for the listener.
    pub(crate) fn emit(&self, event: &Event) {
        self.poison.emit(event);
    }

    /// Begins a call of the public interface. If no thread delivers events, the guard delivers the events of the call
    /// when it is dropped. Declare it before locks and work guards, so that it is dropped after them.
    pub(crate) fn begin_api_call(&self) -> ApiCallGuard<'_> {
        ApiCallGuard(self)
    }

    /// The partition with this name, if it exists. `None` in a forked child.
    pub(crate) fn partition(&self, name: &str) -> Option<Arc<PartitionState>> {
        if self.is_forked() { None } else { self.catalog.get(name) }
    }

    fn writer_unless_poisoned(&self) -> Result<&DbWriter> {
        self.poison.check()?;
        self.writer.as_ref().ok_or_else(|| Error::invalid("the database is open for reading only"))
    }

    /// Stores the name of the operator of a partition that had none, before the first operand. Every sync of the WAL
    /// makes the edit durable too.
    pub(crate) fn store_merge_operator(&self, state: &PartitionState, operator: &Arc<dyn MergeOperator>) -> Result<()> {
        let edits = [VersionEdit::MergeOperator { partition: state.id, name: operator.name().to_owned() }];
        let version_set = &self.writer()?.version_set;
        self.poison.poison_on_failure(self.with_reserve(ReserveUse::Flush, || version_set.log_and_apply(&edits)))?;
        state.set_merge_operator(operator);
        Ok(())
    }
}

impl EngineHost for DbInner {
    fn sync_wal_through(&self, through: SeqNo) -> Result<()> {
        let wal = &self.writer_unless_poisoned()?.wal;
        if self.settings.has_planted_bug(PlantedBug::FlushBeforeWalSync) {
            return Ok(());
        }
        self.poison.poison_on_failure(wal.sync(through, false))
    }

    fn wal_end(&self) -> SeqNo {
        self.writer.as_ref().map_or(SeqNo::ZERO, |writer| writer.wal.appended())
    }

    fn wal_synced_through(&self) -> SeqNo {
        self.writer.as_ref().map_or(SeqNo::ZERO, |writer| writer.wal.durable())
    }

    fn commit_edits(&self, edits: &[VersionEdit]) -> Result<()> {
        let version_set = &self.writer_unless_poisoned()?.version_set;
        let obsolete = version_set.spilled_tables_dropped_by(edits);
        self.poison.poison_on_failure(version_set.log_and_apply_durably(edits))?;
        obsolete.into_iter().for_each(|table| self.obsolete_files().push(DataFileKind::Table, table));
        Ok(())
    }

    fn snapshot_seqnos(&self) -> Vec<SeqNo> {
        self.snapshots.seqnos()
    }

    fn now_ms(&self) -> u64 {
        self.env.now_ms()
    }

    fn should_yield(&self) -> bool {
        let gives_way = || self.flush_waiting.load(Ordering::Relaxed) || self.wal_is_too_large();
        let is_held = self.flushes_held.load(Ordering::Relaxed) > 0;
        self.closing.load(Ordering::Relaxed) || is_held || self.settings.workers == 1 && gives_way()
    }
}

/// Fails with `Invalid` if a comparator makes the call inside work or a write, on any database. The call could wait for
/// the comparator, or for a thread that waits for the comparator.
fn check_not_called_back() -> Result<()> {
    let message = "a comparator made a call that waits for writes or background work, which wait for the comparator: \
                   make this call outside of the comparator";
    if is_at_work() { Err(Error::invalid(message)) } else { Ok(()) }
}

/// Marks the thread as inside a write, unless it [was called back](check_not_called_back).
#[inline]
fn begin_write() -> Result<WriteMark> {
    check_not_called_back()?;
    Ok(WriteMark::new())
}

#[cold]
fn too_large_error(len: u64, limit: u64) -> Error {
    Error::invalid(format!("the write has {len} bytes, more than half the memory budget ({limit})"))
}

#[cold]
fn forked_error() -> Error {
    let message = "the database was opened by the process that this one was forked from: open it here after it is \
                   closed there";
    Error::new(ErrorKind::Closed, message)
}

#[cold]
pub(crate) fn closed_error() -> Error {
    Error::new(ErrorKind::Closed, "the database is closed")
}

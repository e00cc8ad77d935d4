//! What all handles of a database share.

use std::cmp::Reverse;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, RwLock};

use crate::base::event::{DroppedAfterDamage, Event};
use crate::base::sync::{WakeSignal, lock, read, write};
use crate::base::version_edit::VersionEdit;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::db::catalog::{Catalog, PartitionState};
use crate::db::commit::{CommitOutcome, CommitRequest, Committer, is_out_of_space};
use crate::db::config::{PersistMode, PlantedBug, Settings};
use crate::db::reservations::{DirectBlobWrites, PoolReservations};
use crate::db::state::backoff::Backoff;
use crate::db::state::disk_reserve::{DiskReserve, ReserveUse};
use crate::db::state::event_queue::DbPoison;
use crate::db::state::shifts::{WorkGuard, WorkTracker, is_at_work};
use crate::db::state::tally::ShardedCounter;
use crate::db::state::version_set::VersionSet;
use crate::db::state::write_stall::{AccruedDelay, WriteStallLimits, delay_ns_per_kib, must_stop_writes};
use crate::engine::{Engine, EngineHost, LastVisibleSeqno, Pressure, SnapshotList};
use crate::lsm::blob::direct_file::DirectBlobWrite;
use crate::memtable::memtable::MemtableMemory;
use crate::pmem::pool::PmemEngine;
use crate::table::obsolete_files::ObsoleteFiles;
use crate::vfs::fs::PersistenceLevel;
use crate::vfs::open_files::DataFileKind;
use crate::vfs::{Env, FileLock, Fs};
use crate::wal::Wal;
use crate::wal::batch_codec::{WalRecord, WalRecordIter, record_len};

/// Bytes below which a memtable is not sealed because of the budget.
const BUDGET_SEAL_BYTES_MIN: u64 = 64 << 10;

/// The half of a database that only one with the right to write has.
pub(crate) struct DbWriter {
    pub(crate) version_set: Arc<VersionSet>,
    pub(crate) wal: Arc<Wal>,
    pub(crate) committer: Committer,
    pub(crate) reserve: Arc<DiskReserve>,
}

/// What recovery found, for metrics.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecoveryStats {
    pub(crate) records: u64,
    pub(crate) elapsed_ns: u64,
    pub(crate) dropped_after_damage: Option<DroppedAfterDamage>,
    /// Bytes of the live log and of the manifest as they were read.
    pub(crate) wal_bytes: u64,
    pub(crate) wal_segments: usize,
    pub(crate) manifest_bytes: u64,
}

/// Counters since the database was opened.
#[derive(Debug, Default)]
pub(crate) struct DbCounters {
    pub(crate) user_bytes: ShardedCounter,
    pub(crate) direct_blob_bytes: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) flushed_bytes: AtomicU64,
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

/// The heart of a database: everything that outlives any single handle. Thread safe.
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
    /// Work may have appeared.
    pub(crate) work_available: Arc<WakeSignal>,
    /// A task has ended.
    pub(crate) task_done: WakeSignal,
    pub(crate) closing: AtomicBool,
    /// The process that opened it.
    opened_by_process: u64,
    /// Rung when the database begins to close.
    pub(crate) close_requested: WakeSignal,
    /// Work that changes files of the directory, in whatever thread; closing waits for all of it.
    active_work: WorkTracker,
    /// Creating and deleting partitions, one at a time.
    pub(crate) partition_ddl_lock: Mutex<()>,
    /// While above zero, WAL segments are not recycled, because a checkpoint copies them. Recycling holds the lock,
    /// so that a checkpoint begins before or after it.
    pub(crate) running_checkpoints: Mutex<usize>,
    /// Whether flushes wait; with a single worker a compaction gives way to them, and to a log that is too large.
    pub(crate) flush_waiting: AtomicBool,
    /// Held by the thread that seals memtables because of the budget.
    seal_lock: Mutex<()>,
    /// While active memtables take no more than this, looking for one to seal is in vain.
    min_active_bytes_to_seal: AtomicU64,
    delay_ns_per_kib: AtomicU64,
    accrued_delay: AccruedDelay,
    writes_stopped: AtomicBool,
    /// The last failure of a flush, until one succeeds.
    pub(crate) flush_error: Mutex<Option<Error>>,
    /// Failures of work on log and manifest that no partition has asked for.
    pub(crate) wal_backoff: Backoff,
    /// Bytes written to the log, or changed in pools, since the reserve was looked at.
    wal_bytes_since_reserve_check: AtomicU64,
    /// Work that may need much space holds it shared; work that has failed because the disk is full takes it alone for
    /// another attempt, so that nothing else takes the space that is made for it. Taken inside of `active_work`.
    disk_space_lock: RwLock<()>,
    /// Flushes that wait for `space`: merges give way to them, because a merge may take minutes.
    flushes_held: AtomicUsize,
    /// Closes the database, if the last handle was dropped inside of work: a worker calls it as soon as it is outside
    /// of work.
    pub(crate) left_to_close: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// When the log was last synced by hand because of the sync interval.
    pub(crate) last_interval_sync_ns: AtomicU64,
    pub(crate) dir_lock: Mutex<Option<Box<dyn FileLock>>>,
}

/// The reserve is adjusted to the WAL in steps of this many bytes.
const RESERVE_CHECK_BYTES: u64 = 1 << 20;
/// A record that goes into a pool is taken to change a page more than its own bytes.
const POOL_PAGE: u64 = 4096;

/// On a full disk, a log of more bytes than this is flushed, because that gives space back.
const FULL_DISK_WAL_BYTES: u64 = 256 << 10;

/// A call of the public interface.
pub(crate) struct ApiCallGuard<'a>(&'a DbInner);

impl Drop for ApiCallGuard<'_> {
    fn drop(&mut self) {
        // Inside of work the listener could not close: the call that does the work delivers.
        if !std::thread::panicking() && !is_at_work() {
            let poison = &self.0.poison;
            poison.record_delivery(poison.events().deliver_at_call_end());
        }
    }
}

/// What [`DbInner`] is made from.
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
        let process = parts.env.process_token();
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
            opened_by_process: process,
            close_requested: WakeSignal::default(),
            active_work: WorkTracker::default(),
            partition_ddl_lock: Mutex::new(()),
            running_checkpoints: Mutex::new(0),
            flush_waiting: AtomicBool::new(false),
            seal_lock: Mutex::new(()),
            min_active_bytes_to_seal: AtomicU64::new(0),
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

    /// The writing half.
    ///
    /// # Errors
    /// `Closed` after close and in a forked child, `Invalid` if opened read-only, `Poisoned`.
    pub(crate) fn writer(&self) -> Result<&DbWriter> {
        self.check_process()?; // first: a forked child may wait for ever for a lock
        self.poison.check()?;
        self.check_open()?;
        self.writer.as_ref().ok_or_else(|| Error::invalid("the database is open for reading only"))
    }

    /// Whether this process is a child that was forked while the database was open: files and lock are its parent's.
    pub(crate) fn is_forked(&self) -> bool {
        self.env.process_token() != self.opened_by_process
    }

    /// Fails in a forked child.
    pub(crate) fn check_process(&self) -> Result<()> {
        let message = "the database was opened by the process that this one was forked from: open it here after it is \
                       closed there";
        if self.is_forked() { Err(Error::new(ErrorKind::Closed, message)) } else { Ok(()) }
    }

    /// Fails once the database is closed.
    #[inline]
    pub(crate) fn check_open(&self) -> Result<()> {
        match self.closing.load(Ordering::Relaxed) {
            false => Ok(()),
            true => Err(closed_error()),
        }
    }

    /// To be called behind a read with its result, which counts only if the database is open still: another process may
    /// change the files of a closed one. The result stays where it is, because moving it costs more than this check.
    #[inline]
    pub(crate) fn check_read<T>(&self, read: &mut Result<T>) {
        if !self.is_open_after_read() {
            *read = Err(closed_error());
        }
    }

    /// Whether what was read before this call was read of an open database.
    #[inline]
    pub(crate) fn is_open_after_read(&self) -> bool {
        // What the read found of a later change was stored after `closing` was.
        fence(Ordering::Acquire);
        !self.closing.load(Ordering::Relaxed)
    }

    /// Begins work that changes files. No event is delivered before it has ended, because the listener may drop the
    /// last handle.
    ///
    /// # Errors
    /// `Closed` once the database closes, and in a forked child.
    pub(crate) fn begin_work(&self) -> Result<WorkGuard<'_>> {
        self.check_process()?;
        self.active_work.begin().ok_or_else(|| Error::new(ErrorKind::Closed, "the database is closed"))
    }

    /// Counts work that changes no file, and calls a comparator.
    pub(crate) fn enter(&self) -> Option<WorkGuard<'_>> {
        self.active_work.begin()
    }

    /// Fails inside of work on any database, for a call that may wait until work has ended.
    pub(crate) fn check_outside(&self) -> Result<()> {
        let message = "a comparator called what waits for background work, which waits for the comparator: make this \
                       call outside of the comparator";
        if is_at_work() { Err(Error::invalid(message)) } else { Ok(()) }
    }

    /// Makes threads and writers stop, without waiting for them.
    pub(crate) fn begin_closing(&self) {
        self.closing.store(true, Ordering::Release);
        self.work_available.notify_all();
        self.task_done.notify_all();
        self.close_requested.notify_all();
    }

    /// Lets no more work begin, and returns when all that is under way has ended.
    pub(crate) fn stop_work(&self) {
        self.begin_closing();
        self.active_work.stop_and_wait();
    }

    /// Obsolete files; a thread that empties the list is counted as work in progress.
    pub(crate) fn obsolete_files(&self) -> &ObsoleteFiles {
        &self.catalog.resources().obsolete_files
    }

    /// Writes a large value of a partition with key-value separation to a blob file, ahead of the commit that will hold
    /// the pointer.
    ///
    /// # Errors
    /// As [`commit`](DbInner::commit); nothing but stale bytes is left then.
    #[cold]
    pub(crate) fn write_blob_directly(&self, partition: &PartitionState, value: &[u8]) -> Result<DirectBlobWrite> {
        let _call = self.begin_api_call();
        self.writer()?;
        let tree = partition.lsm()?;
        self.check_disk_reserve()?;
        self.delay_write(value.len() as u64)?;
        let _shift = self.begin_work()?;
        let claim = tree.write_blob_directly(value)?;
        self.counters.direct_blob_bytes.fetch_add(claim.pointer.frame_len, Ordering::Relaxed);
        Ok(claim)
    }

    /// Makes a single change of `partition`, a pool, and returns when it is as durable as `mode` asks. The log gets the
    /// `payload`, if there is one.
    pub(crate) fn commit_single(
        &self,
        partition: &PartitionState,
        pool: &dyn PmemEngine,
        record: &WalRecord<'_>,
        payload: Option<&[u8]>,
        mode: PersistMode,
    ) -> Result<()> {
        let change = || {
            let writer = self.writer()?;
            partition.tree()?;
            let len = record_len(record);
            self.check_size(len)?;
            if !record.kind.is_removal() {
                self.check_disk_reserve()?;
            }
            self.delay_write(len)?;
            let seqno = self.poison.poison_on_failure(writer.committer.commit_single(pool, record, payload))?;
            self.counters.user_bytes.add(len);
            if payload.is_none() {
                return Ok(());
            }
            self.grow_reserve_with_wal(len + POOL_PAGE);
            self.make_durable(seqno, mode)
        };
        change().inspect_err(|_| drop(self.begin_api_call()))
    }

    /// Writes a commit and returns when it is as durable as `mode` asks.
    pub(crate) fn commit(&self, commit: CommitRequest<'_>, mode: PersistMode) -> Result<()> {
        if let [partition] = commit.partitions
            && let Some(pool) = partition.pool_if_built()
            && commit.count == 1
        {
            let record = WalRecordIter::new(commit.payload).next().expect("a commit has records")?;
            let logged = pool.persistence_level() == PersistenceLevel::WalOnly;
            return self.commit_single(partition, &**pool, &record, logged.then_some(commit.payload), mode);
        }
        let written = self.write(commit, 0).and_then(|last| self.make_durable(last, mode));
        written.inspect_err(|_| drop(self.begin_api_call()))
    }

    /// The same for one that has written values `ahead`, which are given up if it fails.
    #[cold]
    pub(crate) fn commit_with_direct_writes(
        &self,
        commit: CommitRequest<'_>,
        ahead: DirectBlobWrites,
        mode: PersistMode,
    ) -> Result<()> {
        let _call = self.begin_api_call();
        self.writer()?;
        if mode != PersistMode::Buffer && self.settings.planted_bug != Some(PlantedBug::WalSyncBeforeBlobs) {
            // Here, so that a failure concerns this commit only. Direct blob writes of other commits are synced by
            // the sync of the WAL.
            self.poison.poison_on_failure(ahead.sync())?;
        }
        let written = self.write(commit, ahead.bytes());
        if written.is_ok() || self.poison.is_set() {
            ahead.mark_applied();
        }
        self.make_durable(written?, mode)
    }

    /// Commits a batch with `bytes` of direct blob writes; returns the sequence number through which the WAL has to
    /// be synced for it.
    fn write(&self, commit: CommitRequest<'_>, bytes: u64) -> Result<SeqNo> {
        let writer = self.writer()?;
        self.check_size(commit.payload.len() as u64)?;
        let mut in_pools = false;
        for partition in commit.partitions {
            in_pools |= partition.tree()?.pmem().is_some();
        }
        if writer.reserve.is_short() && !commit.only_removes() {
            self.check_disk_reserve()?;
        }
        self.delay_write(commit.payload.len() as u64)?;
        let CommitOutcome { last, sealed } = match in_pools {
            true => self.commit_to_pools(writer, commit)?,
            false => self.poison.poison_on_failure(writer.committer.commit(commit))?,
        };
        self.counters.user_bytes.add(commit.payload.len() as u64 + bytes);
        let dirtied = if in_pools { u64::from(commit.count) * POOL_PAGE } else { 0 };
        self.grow_reserve_with_wal(commit.payload.len() as u64 + dirtied);
        if sealed || self.memory_is_full() {
            self.seal_largest();
            self.update_write_stalls();
            self.work_available.notify_all();
        }
        Ok(last)
    }

    /// Fails while the disk reserve is short and cannot be filled: then only removals are accepted.
    fn check_disk_reserve(&self) -> Result<()> {
        let Some(writer) = self.writer.as_ref().filter(|writer| writer.reserve.is_short()) else { return Ok(()) };
        if self.fill_reserve() {
            return Ok(());
        }
        let message = "the disk is full: until there is space for the disk reserve, only removals are accepted";
        Err(Error::new(ErrorKind::OutOfSpace, message).in_file(writer.reserve.path()))
    }

    /// Lets the reserve grow with the WAL and the changed pages of pools, after a commit has added this many bytes.
    fn grow_reserve_with_wal(&self, bytes: u64) {
        if self.wal_bytes_since_reserve_check.fetch_add(bytes, Ordering::Relaxed) + bytes >= RESERVE_CHECK_BYTES {
            self.wal_bytes_since_reserve_check.store(0, Ordering::Relaxed);
            self.fill_reserve();
        }
    }

    /// Gives the disk reserve what it wants, for which spare segments are given up; false if it stays short. Does
    /// nothing while work uses space that the reserve has released, because a writer would take that space back.
    pub(crate) fn fill_reserve(&self) -> bool {
        let may_fill = self.disk_space_lock.try_read();
        may_fill.is_ok() && self.fill_reserve_now()
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
        let pool_bytes = self.catalog.pool_checkpoint_bytes();
        let wanted = writer.reserve.wanted(writer.wal.live_bytes(), pool_bytes, writer.version_set.manifest_bytes());
        let full = writer.reserve.fill(wanted) || writer.wal.remove_spare_files() && writer.reserve.fill(wanted);
        if full && was_short {
            self.work_available.notify_all();
        }
        full
    }

    /// Runs work that gives space back in the end. If the disk is full it is run again with space from obsolete files,
    /// spare segments and the disk reserve. The caller has [begun work](DbInner::begin_work).
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
            self.obsolete_files().remove_all(); // what it has left unfinished
        }
        self.fill_reserve_now();
        result
    }

    pub(crate) fn memtable_memory(&self) -> &MemtableMemory {
        &self.catalog.resources().memtable_memory
    }

    /// Whether active memtables take more than half of the budget: the other half is for those that are being flushed.
    #[inline]
    fn memory_is_full(&self) -> bool {
        let limit = (self.settings.memory_budget / 2).max(self.min_active_bytes_to_seal.load(Ordering::Relaxed));
        self.memtable_memory().active() > limit
    }

    /// Seals the largest memtables until the active ones take at most half of the budget. Those below
    /// [`BUDGET_SEAL_BYTES_MIN`] stay, so that tables do not become tiny where there are very many partitions.
    pub(crate) fn seal_largest(&self) {
        let Ok(_one) = self.seal_lock.try_lock() else { return };
        if !self.memory_is_full() {
            return;
        }
        let trees = self.catalog.all().into_iter().filter_map(|p| p.lsm_if_built().cloned());
        let mut large: Vec<_> = trees.map(|tree| (tree.active_bytes(), tree)).collect();
        large.retain(|(bytes, _)| *bytes >= BUDGET_SEAL_BYTES_MIN);
        large.sort_unstable_by_key(|(bytes, _)| Reverse(*bytes));
        // Each of them at most once: the loop ends also where sealing one gives no memory back.
        for (_, tree) in large {
            if !self.memory_is_full() {
                return;
            }
            tree.seal();
            self.min_active_bytes_to_seal.store(0, Ordering::Relaxed);
        }
        if self.memory_is_full() {
            // There is nothing to be found before they have grown.
            self.min_active_bytes_to_seal
                .store(self.memtable_memory().active() + BUDGET_SEAL_BYTES_MIN, Ordering::Relaxed);
        }
    }

    fn check_size(&self, size: u64) -> Result<()> {
        let limit = self.settings.memory_budget / 2;
        if size <= limit {
            return Ok(());
        }
        Err(Error::invalid(format!("commit has {size} bytes, more than half the memory budget ({limit})")))
    }

    /// Sets aside what the pools of a commit will need before the log has it: nothing can fail in between.
    fn commit_to_pools(&self, writer: &DbWriter, commit: CommitRequest<'_>) -> Result<CommitOutcome> {
        let rooms = PoolReservations::reserve(&commit)?;
        let path = rooms.commit_path(&commit);
        let committed = self.poison.poison_on_failure(writer.committer.commit(CommitRequest {
            reservations: rooms.all(),
            path,
            ..commit
        }));
        if committed.is_ok() || self.poison.is_set() {
            rooms.mark_applied();
        }
        committed
    }

    fn make_durable(&self, last: SeqNo, mode: PersistMode) -> Result<()> {
        if mode != PersistMode::Buffer && last > SeqNo::ZERO {
            let wal = &self.writer.as_ref().ok_or_else(|| Error::invalid("the database is open for reading only"))?.wal;
            self.poison.poison_on_failure(wal.sync(last, mode == PersistMode::SyncAll))?;
        }
        Ok(())
    }

    /// Makes every commit that is visible now durable.
    pub(crate) fn persist(&self, mode: PersistMode) -> Result<()> {
        let _call = self.begin_api_call();
        let writer = self.writer()?;
        if mode == PersistMode::Buffer {
            return Ok(());
        }
        self.poison.poison_on_failure(writer.wal.sync(self.last_visible.get(), mode == PersistMode::SyncAll))?;
        self.poison.poison_on_failure(writer.version_set.sync())
    }

    /// Holds the writer up in proportion to the debt, or until a flush makes room.
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
        self.counters.stall_ns.fetch_add(self.env.monotonic_ns() - start, Ordering::Relaxed);
        Ok(())
    }

    /// Looks at all trees and sets how much writers are slowed.
    pub(crate) fn update_write_stalls(&self) {
        let limits = WriteStallLimits { memory_stop: self.settings.memory_budget, ..WriteStallLimits::default() };
        let mut worst = Pressure::default();
        for partition in self.catalog.all() {
            let Some(tree) = partition.tree_if_built() else { continue };
            let pressure = tree.pressure();
            worst.sealed_memtables = worst.sealed_memtables.max(pressure.sealed_memtables);
            worst.l0_runs = worst.l0_runs.max(pressure.l0_runs);
            worst.compaction_debt = worst.compaction_debt.max(pressure.compaction_debt);
        }
        self.flush_waiting.store(worst.sealed_memtables > 0, Ordering::Relaxed);
        // Memtables that were flushed meanwhile give the others their share of the budget back.
        self.min_active_bytes_to_seal
            .fetch_min(self.memtable_memory().active() + BUDGET_SEAL_BYTES_MIN, Ordering::Relaxed);
        self.delay_ns_per_kib.store(delay_ns_per_kib(&worst, &limits), Ordering::Relaxed);
        self.writes_stopped.store(must_stop_writes(&worst, self.memtable_memory().total(), &limits), Ordering::Relaxed);
    }

    /// Whether the log holds more than it should.
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

    /// Begins a call of the public interface. At its end the listener gets the events that it has caused, if no thread
    /// delivers them: what is returned comes before locks and work in the order of declarations, so it is dropped last.
    pub(crate) fn begin_api_call(&self) -> ApiCallGuard<'_> {
        ApiCallGuard(self)
    }

    /// The partition of a handle, if it still exists.
    pub(crate) fn partition(&self, name: &str) -> Option<Arc<PartitionState>> {
        self.catalog.get(name)
    }

    fn writer_unless_poisoned(&self) -> Result<&DbWriter> {
        self.poison.check()?;
        self.writer.as_ref().ok_or_else(|| Error::invalid("the database is open for reading only"))
    }
}

impl EngineHost for DbInner {
    fn sync_wal_through(&self, through: SeqNo) -> Result<()> {
        let wal = &self.writer_unless_poisoned()?.wal;
        if self.settings.planted_bug == Some(PlantedBug::FlushBeforeWalSync) {
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
        let obsolete = version_set.spilled_tables_flushed_by(edits);
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

#[cold]
fn closed_error() -> Error {
    Error::new(ErrorKind::Closed, "the database is closed")
}

//! What all handles of a database share.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, RwLock};

use crate::base::edit::Edit;
use crate::base::event::{DroppedAfterDamage, Event};
use crate::base::sync::{Bell, lock, read, write};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::db::catalog::{Catalog, PartitionState};
use crate::db::commit::{Commit, Committed, Committer, is_full};
use crate::db::config::{PersistMode, PlantedBug, Settings};
use crate::db::state::claims::Claims;
use crate::db::state::metadata::Metadata;
use crate::db::state::poison::Poison;
use crate::db::state::reserve::{Need, Reserve};
use crate::db::state::rooms::Rooms;
use crate::db::state::setbacks::Setback;
use crate::db::state::shifts::{Shift, Shifts, is_at_work};
use crate::db::state::tally::Tally;
use crate::db::state::throttle::{DelayOwed, Limits, delay_ns_per_kib, must_wait};
use crate::engine::{Engine, Host, Pressure, ReadPoints, Visible};
use crate::lsm::blobs::early::Claim;
use crate::memtable::memory::MemtableMemory;
use crate::pmem::engine::PmemTree;
use crate::table::graveyard::Graveyard;
use crate::vfs::files::DataKind;
use crate::vfs::fs::PersistenceLevel;
use crate::vfs::{Env, FileLock, Fs};
use crate::wal::Wal;
use crate::wal::payload::{Record, Records, record_len};

/// Bytes below which a memtable is not sealed because of the budget.
const SEALED_MIN: u64 = 64 << 10;

/// The half of a database that only one with the right to write has.
pub(crate) struct Writer {
    pub(crate) metadata: Arc<Metadata>,
    pub(crate) wal: Arc<Wal>,
    pub(crate) committer: Committer,
    pub(crate) reserve: Arc<Reserve>,
}

/// What recovery found, for metrics.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recovered {
    pub(crate) records: u64,
    pub(crate) ns: u64,
    pub(crate) dropped: Option<DroppedAfterDamage>,
    /// Bytes of the live log and of the manifest as they were read.
    pub(crate) log_bytes: u64,
    pub(crate) log_segments: usize,
    pub(crate) manifest_bytes: u64,
}

/// Counters since the database was opened.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) user_bytes: Tally,
    pub(crate) early_bytes: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) flushed_bytes: AtomicU64,
    pub(crate) compactions: AtomicU64,
    pub(crate) trivial_moves: AtomicU64,
    pub(crate) compaction_bytes_read: AtomicU64,
    pub(crate) compaction_bytes_written: AtomicU64,
    pub(crate) collections: AtomicU64,
    pub(crate) collection_bytes_read: AtomicU64,
    pub(crate) collection_bytes_written: AtomicU64,
    pub(crate) blob_bytes_freed: AtomicU64,
    pub(crate) stall_ns: AtomicU64,
}

/// The heart of a database: everything that outlives any single handle. Thread safe.
pub(crate) struct Shared {
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) env: Arc<dyn Env>,
    pub(crate) dir: PathBuf,
    pub(crate) settings: Settings,
    pub(crate) catalog: Catalog,
    pub(crate) visible: Visible,
    pub(crate) read_points: Arc<ReadPoints>,
    /// `None` when opened read-only.
    pub(crate) writer: Option<Writer>,
    pub(crate) poison: Arc<Poison>,
    pub(crate) counters: Counters,
    pub(crate) recovered: Recovered,
    /// Work may have appeared.
    pub(crate) work: Arc<Bell>,
    /// A task has ended.
    pub(crate) done: Bell,
    pub(crate) closing: AtomicBool,
    /// The process that opened it.
    process: u64,
    /// Rung when the database begins to close.
    pub(crate) ending: Bell,
    /// Work that changes files of the directory, in whatever thread; closing waits for all of it.
    at_work: Shifts,
    /// Creating and deleting partitions, one at a time.
    pub(crate) naming: Mutex<()>,
    /// While above zero, log segments are not recycled: a checkpoint is copying them. Whoever retires holds the lock,
    /// so that a checkpoint begins before or after it.
    pub(crate) checkpoints: Mutex<usize>,
    /// Whether flushes wait; with a single worker a compaction gives way to them, and to a log that is too large.
    pub(crate) flush_waiting: AtomicBool,
    /// Held by the thread that seals memtables because of the budget.
    sealing: Mutex<()>,
    /// While active memtables take no more than this, looking for one to seal is in vain.
    sealed_in_vain: AtomicU64,
    delay_ns_per_kib: AtomicU64,
    delay_owed: DelayOwed,
    must_wait: AtomicBool,
    /// The last failure of a flush, until one succeeds.
    pub(crate) flush_error: Mutex<Option<Error>>,
    /// Failures of work on log and manifest that no partition has asked for.
    pub(crate) log_setback: Setback,
    /// Bytes written to the log, or changed in pools, since the reserve was looked at.
    unreserved: AtomicU64,
    /// Work that may need much space holds it shared; work that has failed because the disk is full takes it alone for
    /// another attempt, so that nothing else takes the space that is made for it. Taken inside of `at_work`.
    space: RwLock<()>,
    /// Flushes that wait for `space`: merges give way to them, because a merge may take minutes.
    flushes_held: AtomicUsize,
    /// Closes the database, if the last handle was dropped inside of work: a worker calls it as soon as it is outside
    /// of work.
    pub(crate) left_to_close: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// When the log was last synced by hand because of the sync interval.
    pub(crate) synced_ns: AtomicU64,
    pub(crate) lock: Mutex<Option<Box<dyn FileLock>>>,
}

/// The reserve follows the log in steps of so many bytes.
const RESERVE_STEP: u64 = 1 << 20;
/// A record that goes into a pool is taken to change a page more than its own bytes.
const POOL_PAGE: u64 = 4096;

/// On a full disk, a log of more bytes than this is flushed, because that gives space back.
const FULL_DISK_LOG: u64 = 256 << 10;

/// A call of the public interface.
pub(crate) struct Call<'a>(&'a Shared);

impl Drop for Call<'_> {
    fn drop(&mut self) {
        // Inside of work the listener could not close: the call that does the work delivers.
        if !std::thread::panicking() && !is_at_work() {
            let poison = &self.0.poison;
            poison.heard(poison.events().end_of_call());
        }
    }
}

/// What [`Shared`] is made from.
pub(crate) struct Parts {
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) env: Arc<dyn Env>,
    pub(crate) dir: PathBuf,
    pub(crate) settings: Settings,
    pub(crate) catalog: Catalog,
    pub(crate) visible: Visible,
    pub(crate) writer: Option<Writer>,
    pub(crate) poison: Arc<Poison>,
    pub(crate) recovered: Recovered,
    pub(crate) lock: Option<Box<dyn FileLock>>,
}

impl Shared {
    pub(crate) fn new(parts: Parts) -> Shared {
        let process = parts.env.process();
        Shared {
            read_points: Arc::clone(&parts.catalog.parts().points),
            fs: parts.fs,
            env: parts.env,
            dir: parts.dir,
            settings: parts.settings,
            work: Arc::clone(&parts.catalog.parts().work),
            catalog: parts.catalog,
            visible: parts.visible,
            writer: parts.writer,
            poison: parts.poison,
            counters: Counters::default(),
            recovered: parts.recovered,
            done: Bell::default(),
            closing: AtomicBool::new(false),
            process,
            ending: Bell::default(),
            at_work: Shifts::default(),
            naming: Mutex::new(()),
            checkpoints: Mutex::new(0),
            flush_waiting: AtomicBool::new(false),
            sealing: Mutex::new(()),
            sealed_in_vain: AtomicU64::new(0),
            delay_ns_per_kib: AtomicU64::new(0),
            delay_owed: DelayOwed::default(),
            must_wait: AtomicBool::new(false),
            flush_error: Mutex::new(None),
            log_setback: Setback::default(),
            unreserved: AtomicU64::new(0),
            space: RwLock::new(()),
            flushes_held: AtomicUsize::new(0),
            left_to_close: Mutex::new(None),
            synced_ns: AtomicU64::new(0),
            lock: Mutex::new(parts.lock),
        }
    }

    /// The writing half.
    ///
    /// # Errors
    /// `Closed` after close and in a forked child, `Invalid` if opened read-only, `Poisoned`.
    pub(crate) fn writer(&self) -> Result<&Writer> {
        self.check_process()?; // first: a forked child may wait for ever for a lock
        self.poison.check()?;
        self.check_open()?;
        self.writer.as_ref().ok_or_else(|| Error::invalid("the database is open for reading only"))
    }

    /// Whether this process is a child that was forked while the database was open: files and lock are its parent's.
    pub(crate) fn is_forked(&self) -> bool {
        self.env.process() != self.process
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
    pub(crate) fn begin_work(&self) -> Result<Shift<'_>> {
        self.check_process()?;
        self.at_work.begin().ok_or_else(|| Error::new(ErrorKind::Closed, "the database is closed"))
    }

    /// Counts work that changes no file, and calls a comparator.
    pub(crate) fn enter(&self) -> Option<Shift<'_>> {
        self.at_work.begin()
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
        self.work.ring();
        self.done.ring();
        self.ending.ring();
    }

    /// Lets no more work begin, and returns when all that is under way has ended.
    pub(crate) fn end_work(&self) {
        self.begin_closing();
        self.at_work.end();
    }

    /// Tables that nobody needs any more; whoever empties it has begun work.
    pub(crate) fn graveyard(&self) -> &Graveyard {
        &self.catalog.parts().graveyard
    }

    /// Writes a large value of a partition with key-value separation to a blob file, ahead of the commit that will hold
    /// the pointer.
    ///
    /// # Errors
    /// As [`commit`](Shared::commit); nothing but stale bytes is left then.
    #[cold]
    pub(crate) fn put_early(&self, partition: &PartitionState, value: &[u8]) -> Result<Claim> {
        let _call = self.begin_call();
        self.writer()?;
        let tree = partition.lsm()?;
        self.check_space()?;
        self.pace(value.len() as u64)?;
        let _shift = self.begin_work()?;
        let claim = tree.put_early(value)?;
        self.counters.early_bytes.fetch_add(claim.pointer.stored, Ordering::Relaxed);
        Ok(claim)
    }

    /// Makes a single change of `partition`, a pool, and returns when it is as durable as `mode` asks. The log gets the
    /// `payload`, if there is one.
    pub(crate) fn change(
        &self,
        partition: &PartitionState,
        pool: &dyn PmemTree,
        record: &Record<'_>,
        payload: Option<&[u8]>,
        mode: PersistMode,
    ) -> Result<()> {
        let change = || {
            let writer = self.writer()?;
            partition.tree()?;
            let len = record_len(record);
            self.check_size(len)?;
            if !record.kind.is_removal() {
                self.check_space()?;
            }
            self.pace(len)?;
            let seqno = self.poison.watch(writer.committer.change(pool, record, payload))?;
            self.counters.user_bytes.add(len);
            if payload.is_none() {
                return Ok(());
            }
            self.follow_log(len + POOL_PAGE);
            self.make_durable(seqno, mode)
        };
        change().inspect_err(|_| drop(self.begin_call()))
    }

    /// Writes a commit and returns when it is as durable as `mode` asks.
    pub(crate) fn commit(&self, commit: Commit<'_>, mode: PersistMode) -> Result<()> {
        if let [partition] = commit.partitions
            && let Some(pool) = partition.pool_if_built()
            && commit.count == 1
        {
            let record = Records::new(commit.payload).next().expect("a commit has records")?;
            let logged = pool.level() == PersistenceLevel::Logged;
            return self.change(partition, &**pool, &record, logged.then_some(commit.payload), mode);
        }
        let written = self.write(commit, 0).and_then(|last| self.make_durable(last, mode));
        written.inspect_err(|_| drop(self.begin_call()))
    }

    /// The same for one that has written values `ahead`, which are given up if it fails.
    #[cold]
    pub(crate) fn commit_ahead(&self, commit: Commit<'_>, ahead: Claims, mode: PersistMode) -> Result<()> {
        let _call = self.begin_call();
        self.writer()?;
        if mode != PersistMode::Buffer && self.settings.planted_bug != Some(PlantedBug::LogSyncBeforeValues) {
            // Here, so that a failure concerns this commit alone. What nobody waits for, the log syncs before itself.
            self.poison.watch(ahead.sync())?;
        }
        let written = self.write(commit, ahead.bytes());
        if written.is_ok() || self.poison.is_set() {
            ahead.settle();
        }
        self.make_durable(written?, mode)
    }

    /// Writes a commit, beside which so many `bytes` were written ahead; gives the sequence number through which the
    /// log has to be synced for it.
    fn write(&self, commit: Commit<'_>, bytes: u64) -> Result<SeqNo> {
        let writer = self.writer()?;
        self.check_size(commit.payload.len() as u64)?;
        let mut in_pools = false;
        for partition in commit.partitions {
            in_pools |= partition.tree()?.pmem().is_some();
        }
        if writer.reserve.is_short() && !commit.only_removes() {
            self.check_space()?;
        }
        self.pace(commit.payload.len() as u64)?;
        let Committed { last, sealed } = match in_pools {
            true => self.commit_to_pools(writer, commit)?,
            false => self.poison.watch(writer.committer.commit(commit))?,
        };
        self.counters.user_bytes.add(commit.payload.len() as u64 + bytes);
        let dirtied = if in_pools { u64::from(commit.count) * POOL_PAGE } else { 0 };
        self.follow_log(commit.payload.len() as u64 + dirtied);
        if sealed || self.memory_is_full() {
            self.seal_largest();
            self.refresh_pressure();
            self.work.ring();
        }
        Ok(last)
    }

    /// Fails while the disk reserve is short and cannot be filled: then only removals are accepted.
    fn check_space(&self) -> Result<()> {
        let Some(writer) = self.writer.as_ref().filter(|writer| writer.reserve.is_short()) else { return Ok(()) };
        if self.fill_reserve() {
            return Ok(());
        }
        let message = "the disk is full: until there is space for the disk reserve, only removals are accepted";
        Err(Error::new(ErrorKind::OutOfSpace, message).in_file(writer.reserve.path()))
    }

    /// Lets the reserve grow with the log and the changed pages of pools, to which a commit has just added so many
    /// bytes.
    fn follow_log(&self, bytes: u64) {
        if self.unreserved.fetch_add(bytes, Ordering::Relaxed) + bytes >= RESERVE_STEP {
            self.unreserved.store(0, Ordering::Relaxed);
            self.fill_reserve();
        }
    }

    /// Gives the disk reserve what it wants, for which spare segments are given up; false if it stays short. Does
    /// nothing while work uses space that the reserve has released, because a writer would take that space back.
    pub(crate) fn fill_reserve(&self) -> bool {
        let may_fill = self.space.try_read();
        may_fill.is_ok() && self.fill_reserve_now()
    }

    fn wait_for_space<T>(&self, need: Need, wait: impl FnOnce() -> T) -> T {
        let flushes = usize::from(need == Need::Flush);
        self.flushes_held.fetch_add(flushes, Ordering::Relaxed);
        let space = wait();
        self.flushes_held.fetch_sub(flushes, Ordering::Relaxed);
        space
    }

    fn fill_reserve_now(&self) -> bool {
        let Some(writer) = &self.writer else { return true };
        let was_short = writer.reserve.is_short();
        let partitions = self.catalog.all();
        let pools = partitions.iter().filter_map(|partition| partition.pool_if_built());
        let pool_bytes = pools.fold(0, |bytes: u64, pool| bytes.saturating_add(pool.checkpoint_bytes()));
        let wanted = writer.reserve.wanted(writer.wal.live_bytes(), pool_bytes, writer.metadata.manifest_bytes());
        let full = writer.reserve.fill(wanted) || writer.wal.drop_spares() && writer.reserve.fill(wanted);
        if full && was_short {
            self.work.ring();
        }
        full
    }

    /// Runs work that gives space back in the end. If the disk is full it is run again with space from obsolete files,
    /// spare segments and the disk reserve. The caller has [begun work](Shared::begin_work).
    pub(crate) fn with_reserve<T>(&self, need: Need, mut work: impl FnMut() -> Result<T>) -> Result<T> {
        let shared = self.wait_for_space(need, || read(&self.space));
        let result = work();
        drop(shared);
        let (Some(writer), true) = (&self.writer, is_full(&result)) else { return result };
        let _alone = self.wait_for_space(need, || write(&self.space));
        let had_obsolete = !self.graveyard().is_empty();
        self.graveyard().remove_all();
        let made = writer.wal.drop_spares() | writer.reserve.release_for(need) | had_obsolete;
        let result = if made { work() } else { result };
        if is_full(&result) {
            self.graveyard().remove_all(); // what it has left unfinished
        }
        self.fill_reserve_now();
        result
    }

    pub(crate) fn memory(&self) -> &MemtableMemory {
        &self.catalog.parts().memory
    }

    /// Whether active memtables take more than half of the budget: the other half is for those that are being flushed.
    #[inline]
    fn memory_is_full(&self) -> bool {
        let limit = (self.settings.memory_budget / 2).max(self.sealed_in_vain.load(Ordering::Relaxed));
        self.memory().active() > limit
    }

    /// Seals the largest memtables until the active ones take at most half of the budget. Those below
    /// [`SEALED_MIN`] stay, so that tables do not become tiny where there are very many partitions.
    pub(crate) fn seal_largest(&self) {
        let Ok(_one) = self.sealing.try_lock() else { return };
        if !self.memory_is_full() {
            return;
        }
        let trees = self.catalog.all().into_iter().filter_map(|p| p.lsm_if_built().cloned());
        let mut large: Vec<_> = trees.map(|tree| (tree.active_bytes(), tree)).collect();
        large.retain(|(bytes, _)| *bytes >= SEALED_MIN);
        large.sort_unstable_by_key(|(bytes, _)| Reverse(*bytes));
        // Each of them at most once: the loop ends also where sealing one gives no memory back.
        for (_, tree) in large {
            if !self.memory_is_full() {
                return;
            }
            tree.seal();
            self.sealed_in_vain.store(0, Ordering::Relaxed);
        }
        if self.memory_is_full() {
            // There is nothing to be found before they have grown.
            self.sealed_in_vain.store(self.memory().active() + SEALED_MIN, Ordering::Relaxed);
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
    fn commit_to_pools(&self, writer: &Writer, commit: Commit<'_>) -> Result<Committed> {
        let rooms = Rooms::reserve(&commit)?;
        let path = rooms.path(&commit);
        let committed = self.poison.watch(writer.committer.commit(Commit { rooms: rooms.all(), path, ..commit }));
        if committed.is_ok() || self.poison.is_set() {
            rooms.settle();
        }
        committed
    }

    fn make_durable(&self, last: SeqNo, mode: PersistMode) -> Result<()> {
        if mode != PersistMode::Buffer && last > SeqNo::ZERO {
            let wal = &self.writer.as_ref().ok_or_else(|| Error::invalid("the database is open for reading only"))?.wal;
            self.poison.watch(wal.sync(last, mode == PersistMode::SyncAll))?;
        }
        Ok(())
    }

    /// Makes every commit that is visible now durable.
    pub(crate) fn persist(&self, mode: PersistMode) -> Result<()> {
        let _call = self.begin_call();
        let writer = self.writer()?;
        if mode == PersistMode::Buffer {
            return Ok(());
        }
        self.poison.watch(writer.wal.sync(self.visible.get(), mode == PersistMode::SyncAll))?;
        self.poison.watch(writer.metadata.sync())
    }

    /// Holds the writer up in proportion to the debt, or until a flush makes room.
    fn pace(&self, bytes: u64) -> Result<()> {
        let rate = self.delay_ns_per_kib.load(Ordering::Relaxed);
        if rate > 0 {
            let sleep = self.delay_owed.add(rate * (bytes + 64) / 1024);
            if sleep > 0 {
                self.env.sleep(std::time::Duration::from_nanos(sleep));
                self.counters.stall_ns.fetch_add(sleep, Ordering::Relaxed);
            }
        }
        if self.must_wait.load(Ordering::Relaxed) && self.settings.workers > 0 {
            self.wait_for_room()?;
        }
        Ok(())
    }

    #[cold]
    fn wait_for_room(&self) -> Result<()> {
        let start = self.env.monotonic_ns();
        loop {
            let seen = self.done.count();
            self.refresh_pressure();
            if !self.must_wait.load(Ordering::Relaxed) {
                break;
            }
            self.writer()?;
            if let Some(error) = lock(&self.flush_error).clone() {
                return Err(error);
            }
            self.work.ring();
            self.done.wait(seen, 100);
        }
        self.counters.stall_ns.fetch_add(self.env.monotonic_ns() - start, Ordering::Relaxed);
        Ok(())
    }

    /// Looks at all trees and sets how much writers are slowed.
    pub(crate) fn refresh_pressure(&self) {
        let limits = Limits { memory_wait: self.settings.memory_budget, ..Limits::default() };
        let mut worst = Pressure::default();
        for partition in self.catalog.all() {
            let Some(tree) = partition.tree_if_built() else { continue };
            let pressure = tree.pressure();
            worst.sealed = worst.sealed.max(pressure.sealed);
            worst.young_runs = worst.young_runs.max(pressure.young_runs);
            worst.compaction_debt = worst.compaction_debt.max(pressure.compaction_debt);
        }
        self.flush_waiting.store(worst.sealed > 0, Ordering::Relaxed);
        // Memtables that were flushed meanwhile give the others their share of the budget back.
        self.sealed_in_vain.fetch_min(self.memory().active() + SEALED_MIN, Ordering::Relaxed);
        self.delay_ns_per_kib.store(delay_ns_per_kib(&worst, &limits), Ordering::Relaxed);
        self.must_wait.store(must_wait(&worst, self.memory().total(), &limits), Ordering::Relaxed);
    }

    /// Whether the log holds more than it should.
    pub(crate) fn log_is_too_large(&self) -> bool {
        self.writer.as_ref().is_some_and(|writer| {
            let live = writer.wal.live_bytes();
            live > self.settings.max_log_size || live > FULL_DISK_LOG && writer.reserve.is_short()
        })
    }

    /// Queues an event for the listener.
    pub(crate) fn tell(&self, event: &Event) {
        self.poison.tell(event);
    }

    /// Begins a call of the public interface. At its end the listener gets the events that it has caused, if no thread
    /// delivers them: what is returned comes before locks and work in the order of declarations, so it is dropped last.
    pub(crate) fn begin_call(&self) -> Call<'_> {
        Call(self)
    }

    /// The partition of a handle, if it still exists.
    pub(crate) fn partition(&self, name: &str) -> Option<Arc<PartitionState>> {
        self.catalog.get(name)
    }

    fn host_writer(&self) -> Result<&Writer> {
        self.poison.check()?;
        self.writer.as_ref().ok_or_else(|| Error::invalid("the database is open for reading only"))
    }
}

impl Host for Shared {
    fn make_log_durable(&self, through: SeqNo) -> Result<()> {
        let wal = &self.host_writer()?.wal;
        if self.settings.planted_bug == Some(PlantedBug::FlushBeforeLogSync) {
            return Ok(());
        }
        self.poison.watch(wal.sync(through, false))
    }

    fn log_end(&self) -> SeqNo {
        self.writer.as_ref().map_or(SeqNo::ZERO, |writer| writer.wal.appended())
    }

    fn log_durable(&self) -> SeqNo {
        self.writer.as_ref().map_or(SeqNo::ZERO, |writer| writer.wal.durable())
    }

    fn commit_edits(&self, edits: &[Edit]) -> Result<()> {
        let metadata = &self.host_writer()?.metadata;
        let flushed = edits.iter().find_map(|edit| match edit {
            Edit::Flushed { partition, .. } => Some(*partition),
            _ => None,
        });
        let spilled = || flushed.map_or_else(BTreeSet::new, |partition| metadata.spilled(partition));
        let before = spilled();
        self.poison.watch(metadata.commit(edits))?;
        if !before.is_empty() {
            let after = spilled();
            before.difference(&after).for_each(|table| self.graveyard().push(DataKind::Table, *table));
        }
        Ok(())
    }

    fn read_points(&self) -> Vec<SeqNo> {
        self.read_points.list()
    }

    fn now_ms(&self) -> u64 {
        self.env.now_ms()
    }

    fn should_yield(&self) -> bool {
        let gives_way = || self.flush_waiting.load(Ordering::Relaxed) || self.log_is_too_large();
        let is_held = self.flushes_held.load(Ordering::Relaxed) > 0;
        self.closing.load(Ordering::Relaxed) || is_held || self.settings.workers == 1 && gives_way()
    }
}

#[cold]
fn closed_error() -> Error {
    Error::new(ErrorKind::Closed, "the database is closed")
}

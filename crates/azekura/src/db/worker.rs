//! Background work: what is most urgent, and the threads that do it.
//!
//! Order of urgency: flushes (those that hold the oldest segment of a log that is larger than it should be, then the
//! most memory first), then that log (sync and retire segments), then obsolete files (removing them gives space back),
//! then compactions (the most young runs, then the most debt), then collections of blob files, then the log and the
//! manifest. [`step`] does exactly one piece by hand; a worker is a thread that does one after the other for ever.
//!
//! The sync interval has a thread of its own, because a piece of work may take minutes. So has the listener, because it
//! may wait for workers.
//!
//! Work that fails waits for itself (`setbacks`): until it is tried again, all other work is done as if there was none
//! of it.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::base::edit::{Edit, PartitionId, TableMeta};
use crate::base::event::Event;
use crate::base::sync::lock;
use crate::base::{Error, ErrorKind, KeyOrder, Result, SeqNo};
use crate::db::catalog::PartitionState;
use crate::db::shared::Shared;
use crate::db::spill;
use crate::db::state::reserve::Need;
use crate::db::state::setbacks::Setback;
use crate::engine::{Engine, Host, Pressure, Task, TaskReport};
use crate::lsm::tree::LsmTree;
use crate::vfs::env::Thread;

/// A memtable that has stood unchanged for so long is at rest.
const RESTING_NS: u64 = 1_000_000_000;

/// A task that a tree wants done, with what decides its turn.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Wish {
    task: Task,
    /// Its records hold the oldest segment of a log that is too large.
    holds_log: bool,
    pressure: Pressure,
}

/// Which wish comes first: pure.
fn most_urgent(wishes: &[Wish]) -> Option<usize> {
    let rank = |wish: &Wish| match wish.task {
        Task::Flush if wish.holds_log => (3, wish.pressure.sealed_bytes, 0),
        Task::Flush => (2, wish.pressure.sealed_bytes, 0),
        Task::Compact => (1, wish.pressure.young_runs as u64, wish.pressure.compaction_debt),
        Task::Collect => (0, 0, 0),
    };
    (0..wishes.len()).max_by_key(|&i| rank(&wishes[i]))
}

/// What a caller of [`step`] is willing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Duty {
    All,
    /// Leaves compactions and the removal of files to others, so that a flush never waits behind them.
    FlushesOnly,
}

/// What to do with work that has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Patience {
    /// It is left alone until its pause is over.
    Waits,
    /// It is tried again.
    Ended,
}

/// A kind of work that fails by itself.
enum Work {
    Task(Arc<PartitionState>, Task),
    /// Log and manifest.
    Log,
    /// Choosing what to do.
    Choice,
}

/// Work that failed, and how.
struct Failed {
    work: Work,
    error: Error,
}

impl Failed {
    fn choosing(error: Error) -> Failed {
        Failed { work: Work::Choice, error }
    }

    /// Where it is noted.
    fn setback<'a>(&'a self, shared: &'a Shared) -> Option<&'a Setback> {
        match &self.work {
            Work::Task(partition, task) => Some(partition.setbacks.of(*task)),
            Work::Log => Some(&shared.log_setback),
            Work::Choice => None,
        }
    }
}

/// Does one piece of background work; false if there was none. What has failed before is left for last.
///
/// # Errors
/// Those of the work; it stays to be done.
pub(crate) fn step(shared: &Shared) -> Result<bool> {
    let _call = shared.begin_call();
    shared.check_outside()?;
    if shared.settings.workers == 0 && sync_if_due(shared)? {
        return Ok(true);
    }
    let first = attempt(shared, Duty::All, Patience::Waits);
    let done = first.and_then(|done| Ok(done || attempt(shared, Duty::All, Patience::Ended)?));
    done.map_err(|failed| failed.error)
}

/// Does one piece of background work; false if there was none that may be done now.
fn attempt(shared: &Shared, duty: Duty, patience: Patience) -> Result<bool, Failed> {
    shared.poison.check().map_err(Failed::choosing)?;
    shared.seal_largest(); // after recovery, too
    let oldest = seal_holders(shared);
    let now = shared.env.monotonic_ns();
    let mut wishes = Vec::new();
    let mut partitions = Vec::new();
    for partition in shared.catalog.all() {
        let Some(tree) = partition.tree_if_built() else { continue };
        let waiting = partition.setbacks.waiting(now).filter(|_| patience == Patience::Waits);
        let held: Vec<Task> = waiting.map(|(task, _)| task).collect();
        let task = guarded(shared, || Ok(tree.next_task(false, &held))).map_err(Failed::choosing)?;
        let Some(task) = task else { continue };
        if task != Task::Flush && duty == Duty::FlushesOnly {
            continue;
        }
        let holds_log = oldest.is_some_and(|oldest| partition.first_unflushed().is_some_and(|first| first <= oldest));
        wishes.push(Wish { task, holds_log, pressure: tree.pressure() });
        partitions.push(Arc::clone(&partition));
    }
    let flushes = wishes.iter().any(|wish| wish.task == Task::Flush);
    let may_tend = patience == Patience::Ended || shared.log_setback.wait_ns(now).is_none();
    // Before compactions: there may always be one.
    if !flushes && may_tend && shared.log_is_too_large() && tend_log_noting(shared)? {
        return Ok(true);
    }
    if !flushes && duty == Duty::All && remove_tables(shared).map_err(Failed::choosing)? {
        return Ok(true);
    }
    if let Some(first) = most_urgent(&wishes) {
        let task = wishes[first].task;
        run_one(shared, &partitions[first], task, false)?;
        return Ok(true);
    }
    if may_tend { tend_log_noting(shared) } else { Ok(false) }
}

fn tend_log_noting(shared: &Shared) -> Result<bool, Failed> {
    let tended = tend_log(shared);
    note(shared, &shared.log_setback, tended.as_ref().map(|_| true));
    tended.map_err(|error| Failed { work: Work::Log, error })
}

/// Notes whether work has failed, was done, or neither.
fn note(shared: &Shared, setback: &Setback, done: Result<bool, &Error>) {
    match done {
        Ok(true) => setback.mended(),
        Ok(false) => {}
        Err(error) => setback.failed(error, shared.env.monotonic_ns()),
    }
}

/// Runs one task of a tree and accounts for it.
pub(crate) fn run_task(shared: &Shared, partition: &Arc<PartitionState>, task: Task, forced: bool) -> Result<()> {
    run_one(shared, partition, task, forced).map_err(|failed| failed.error)
}

fn run_one(shared: &Shared, partition: &Arc<PartitionState>, task: Task, forced: bool) -> Result<(), Failed> {
    let Some(tree) = partition.tree_if_built() else { return Ok(()) };
    carry_out(shared, partition, task, || tree.run(task, forced, shared)).map(drop)
}

/// Does `work` on a tree of tables, which is a task of that kind, accounts for it, and notes whether it failed.
pub(crate) fn conduct(
    shared: &Shared,
    partition: &Arc<PartitionState>,
    task: Task,
    mut work: impl FnMut(&LsmTree) -> Result<TaskReport>,
) -> Result<TaskReport> {
    let Some(tree) = partition.lsm_if_built() else { return Ok(TaskReport::default()) };
    carry_out(shared, partition, task, || work(tree)).map_err(|failed| failed.error)
}

fn carry_out(
    shared: &Shared,
    partition: &Arc<PartitionState>,
    task: Task,
    mut work: impl FnMut() -> Result<TaskReport>,
) -> Result<TaskReport, Failed> {
    let need = if task == Task::Flush { Need::Flush } else { Need::Merge };
    let result = shared.begin_work().and_then(|_shift| {
        let result = shared.with_reserve(need, || shared.poison.watch(guarded(shared, &mut work)));
        // What it put an end to. After a failure too: perhaps it was space that was missing.
        if task != Task::Flush || result.is_err() {
            shared.graveyard().remove_some();
        }
        result
    });
    // A task that ended because its partition was deleted, or the database closes, has not failed: no writer of another
    // partition gets its error. The edit that drops a partition comes before the mark that it is deleted.
    let poisoned = matches!(&result, Err(error) if error.kind() == ErrorKind::Poisoned);
    let is_closed = matches!(&result, Err(error) if error.kind() == ErrorKind::Closed);
    let deleted = result.is_err() && !poisoned && partition.is_deleted();
    let ended = deleted || is_closed;
    if task == Task::Flush && !ended {
        *lock(&shared.flush_error) = result.as_ref().err().cloned();
    }
    shared.refresh_pressure();
    if !ended {
        // One that yields may fail yet, for the same reason as the last time.
        let done = result.as_ref().map(|report| task == Task::Flush || !report.is_idle());
        note(shared, partition.setbacks.of(task), done);
    }
    shared.done.ring();
    let report = match result {
        Err(_) if deleted => return Ok(TaskReport::default()),
        other => other.map_err(|error| Failed { work: Work::Task(Arc::clone(partition), task), error })?,
    };
    account(shared, partition, task, report);
    if task == Task::Flush {
        let retired = shared.begin_work().and_then(|_shift| shared.with_reserve(Need::Flush, || give_back_log(shared)));
        note(shared, &shared.log_setback, retired.as_ref().map(|_| false));
        retired.map_err(|error| Failed { work: Work::Log, error })?;
    }
    Ok(report)
}

fn account(shared: &Shared, partition: &PartitionState, task: Task, report: TaskReport) {
    let (name, counters) = (partition.name.to_string(), &shared.counters);
    match task {
        Task::Flush => {
            counters.flushes.fetch_add(1, Ordering::Relaxed);
            counters.flushed_bytes.fetch_add(report.bytes_written, Ordering::Relaxed);
            shared.tell(&Event::Flushed { partition: name, tables: report.tables, bytes: report.bytes_written });
        }
        Task::Compact | Task::Collect if report.is_idle() => {}
        Task::Compact => {
            let moved = report.bytes_read == 0 && report.bytes_written == 0;
            let counter = if moved { &counters.trivial_moves } else { &counters.compactions };
            counter.fetch_add(1, Ordering::Relaxed);
            counters.compaction_bytes_read.fetch_add(report.bytes_read, Ordering::Relaxed);
            counters.compaction_bytes_written.fetch_add(report.bytes_written, Ordering::Relaxed);
            counters.blob_bytes_freed.fetch_add(report.bytes_freed, Ordering::Relaxed);
            shared.tell(&Event::Compacted {
                partition: name,
                level: report.level,
                bytes_read: report.bytes_read,
                bytes_written: report.bytes_written,
            });
        }
        Task::Collect => {
            counters.collections.fetch_add(1, Ordering::Relaxed);
            counters.collection_bytes_read.fetch_add(report.bytes_read, Ordering::Relaxed);
            counters.collection_bytes_written.fetch_add(report.bytes_written, Ordering::Relaxed);
            counters.blob_bytes_freed.fetch_add(report.bytes_freed, Ordering::Relaxed);
            shared.tell(&Event::Collected {
                partition: name,
                files: report.tables,
                bytes_written: report.bytes_written,
                bytes_freed: report.bytes_freed,
            });
        }
    }
}

/// Runs what may call a comparator; a panic in it ends all writing.
pub(crate) fn guarded<T>(shared: &Shared, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let _inside = shared.enter();
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|_| Err(shared.poison.set(Error::new(ErrorKind::Poisoned, "background work panicked"))))
}

/// Removes the files of some tables that nobody needs any more; false if there were none.
fn remove_tables(shared: &Shared) -> Result<bool> {
    if shared.graveyard().is_empty() {
        return Ok(false);
    }
    let _shift = shared.begin_work()?;
    Ok(shared.graveyard().remove_some())
}

/// Removes the files of all tables that nobody needs any more; a database that closes does it itself.
pub(crate) fn remove_all_tables(shared: &Shared) {
    if !shared.graveyard().is_empty()
        && let Ok(_shift) = shared.begin_work()
    {
        shared.graveyard().remove_all();
    }
}

/// Gives back log segments that no tree needs any more; false if there were none.
pub(crate) fn retire_log(shared: &Shared) -> Result<bool> {
    let Some(writer) = &shared.writer else { return Ok(false) };
    let checkpoints = lock(&shared.checkpoints);
    if *checkpoints > 0 {
        return Ok(false);
    }
    // Records above this may be between the log and their memtable: take it before asking the trees.
    let visible = shared.visible.get();
    let mut through = visible;
    for partition in shared.catalog.all() {
        if let Some(first) = partition.first_unflushed() {
            through = through.min(SeqNo(first.0.saturating_sub(1)));
        }
    }
    let epochs = writer.wal.retire(through)?;
    // A partition that has nothing to flush writes no edit itself, and would make the log needed for ever.
    let flushed = writer.metadata.all_flushed(through.min(writer.wal.durable()));
    if epochs.is_empty() {
        return match shared.poison.watch(writer.metadata.append(flushed.as_slice())) {
            // The next flush says it.
            Err(error) if error.kind() != ErrorKind::OutOfSpace => Err(error),
            _ => Ok(false),
        };
    }
    let retired = epochs.iter().map(|epoch| Edit::SegmentRetired { epoch: *epoch });
    let edits: Vec<Edit> = retired.chain(flushed).collect();
    shared.poison.watch(writer.metadata.commit(&edits))?;
    writer.wal.recycle(&epochs).map(|()| true)
}

/// Gives back log segments; where records of partitions without their comparator hold a log that is too large, spills
/// them first. False if nothing was given back. Runs inside of [`Shared::with_reserve`].
fn give_back_log(shared: &Shared) -> Result<bool> {
    Ok(retire_log(shared)? || spill_holders(shared)? && retire_log(shared)?)
}

/// If the log is too large, spills the records that hold its oldest segment and wait for a comparator; false if there
/// were none.
fn spill_holders(shared: &Shared) -> Result<bool> {
    let (Some(oldest), Some(writer)) = (oldest_held(shared), &shared.writer) else { return Ok(false) };
    // No comparator is given and no partition deleted meanwhile. Tried again soon if that is going on now.
    let Ok(_names) = shared.naming.try_lock() else { return Ok(false) };
    let mut spilled = false;
    for partition in shared.catalog.all() {
        let pending = partition.pending();
        let (Some(first), Some(last)) = (pending.first(), pending.last()) else { continue };
        if first.seqno > oldest {
            continue;
        }
        let (last, parts) = (last.seqno, shared.catalog.parts());
        let context = parts.context(KeyOrder::bytewise(), partition.id, &partition.name);
        let (tables, unnamed) = spill::write(context, parts.codec, &pending, shared.env.now_ms())?;
        shared.make_log_durable(last)?;
        let edit = |table: &TableMeta| Edit::TableSpilled { partition: partition.id, table: table.clone() };
        let written = writer.metadata.append(&tables.iter().map(edit).collect::<Vec<Edit>>());
        // After any other failure the manifest may name them.
        if !written.as_ref().is_err_and(|error| error.kind() == ErrorKind::OutOfSpace) {
            unnamed.keep();
        }
        shared.poison.watch(written)?;
        partition.note_spilled(tables);
        spilled = true;
    }
    Ok(spilled)
}

/// The last sequence number in the oldest segment of a log that is too large, if that segment could be retired.
fn oldest_held(shared: &Shared) -> Option<SeqNo> {
    let writer = shared.writer.as_ref().filter(|_| shared.log_is_too_large())?;
    let segments = writer.wal.segments();
    // On a full disk the only segment goes too, as soon as it is flushed. None goes while a checkpoint copies the log.
    let full = writer.reserve.is_short();
    if segments.len() < 2 && !full || *lock(&shared.checkpoints) > 0 {
        return None;
    }
    segments.first().map(|segment| segment.last)
}

/// Work on the log and the manifest that nothing else triggers. What cannot fail comes before what can.
fn tend_log(shared: &Shared) -> Result<bool> {
    let Some(writer) = &shared.writer else { return Ok(false) };
    let _shift = shared.begin_work()?;
    let full = writer.reserve.is_short() && !shared.fill_reserve();
    if shared.poison.watch(writer.wal.sync_sealed(!full))? {
        return Ok(true);
    }
    if shared.log_is_too_large() {
        if shared.with_reserve(Need::Flush, || give_back_log(shared))? {
            return Ok(true);
        }
        let flushed = || shared.catalog.all().iter().all(|partition| partition.first_unflushed().is_none());
        if full && *lock(&shared.checkpoints) == 0 && flushed() {
            // All of the log is in tables: another segment gives this one free.
            shared.with_reserve(Need::Flush, || shared.poison.watch(writer.wal.seal()))?;
            shared.with_reserve(Need::Flush, || retire_log(shared))?;
            return Ok(shared.fill_reserve());
        }
    }
    if shared.log_setback.is_failing() {
        retire_log(shared)?;
    }
    shared.poison.watch(writer.metadata.rewrite_if_grown())
}

/// If the log is too large, seals the memtables that hold its oldest segment, and gives the last sequence number in
/// there: flushes of records up to it come first.
fn seal_holders(shared: &Shared) -> Option<SeqNo> {
    let oldest = oldest_held(shared)?;
    for partition in shared.catalog.all() {
        if let Some(tree) = partition.tree_if_built()
            && tree.first_unflushed().is_some_and(|first| first <= oldest)
            && tree.pressure().sealed == 0
        {
            tree.seal();
        }
    }
    Some(oldest)
}

/// The threads of a database.
#[derive(Default)]
pub(crate) struct Threads {
    /// Those that work, and the one that keeps the sync interval.
    pub(crate) workers: Vec<Box<dyn Thread>>,
    /// The one that calls the listener.
    pub(crate) listener: Option<Box<dyn Thread>>,
}

/// Starts the background threads: none where there are no workers.
pub(crate) fn start(shared: &Arc<Shared>) -> Result<Threads> {
    let mut threads = Threads::default();
    let Err(error) = start_all(shared, &mut threads) else { return Ok(threads) };
    shared.begin_closing();
    threads.workers.into_iter().for_each(|thread| _ = thread.join());
    Err(error)
}

fn start_all(shared: &Arc<Shared>, threads: &mut Threads) -> Result<()> {
    let workers = shared.settings.workers;
    let spawn = |name: &str, body: Box<dyn FnOnce(&Shared) + Send>| {
        let shared = Arc::clone(shared);
        shared.env.clone().spawn(name, Box::new(move || body(&shared)))
    };
    for i in 0..workers {
        let duty = if i > 0 && i + 1 == workers { Duty::FlushesOnly } else { Duty::All };
        threads.workers.push(spawn(&format!("azekura-{i}"), Box::new(move |shared| run(shared, duty, i == 0)))?);
    }
    if let (Some(ms), 1..) = (shared.settings.sync_interval_ms, workers) {
        threads.workers.push(spawn("azekura-sync", Box::new(move |shared| keep_interval(shared, ms)))?);
    }
    // The last one: nothing that fails to start comes behind it.
    if workers > 0 && shared.poison.events().are_heard() {
        let deliver = |shared: &Shared| shared.poison.events().run(|| shared.poison.heard(false));
        threads.listener = Some(spawn("azekura-events", Box::new(deliver))?);
        shared.poison.events().expect_thread();
    }
    Ok(())
}

/// Syncs the log every so many milliseconds until the database closes or is poisoned. Nothing but a sync is done here,
/// so that no other work delays it.
fn keep_interval(shared: &Shared, ms: u64) {
    let mut pause = ms;
    while !shared.poison.is_set() {
        let seen = shared.ending.count();
        if shared.closing.load(Ordering::Acquire) {
            return;
        }
        shared.ending.wait(seen, pause);
        if shared.closing.load(Ordering::Acquire) {
            return;
        }
        let start = shared.env.monotonic_ns();
        if let Err(error) = guarded(shared, || sync_all_visible(shared))
            && error.kind() != ErrorKind::Poisoned
        {
            shared.tell(&Event::BackgroundError { error });
        }
        let took = shared.env.monotonic_ns().saturating_sub(start) / 1_000_000;
        pause = ms.saturating_sub(took).max(1);
    }
}

/// The same by hand: syncs the log if the interval is over and there is something to sync.
fn sync_if_due(shared: &Shared) -> Result<bool> {
    let (Some(ms), Some(writer)) = (shared.settings.sync_interval_ms, &shared.writer) else { return Ok(false) };
    let now = shared.env.monotonic_ns();
    let is_over = now.saturating_sub(shared.synced_ns.load(Ordering::Relaxed)) >= ms.saturating_mul(1_000_000);
    if !is_over || writer.wal.durable() >= shared.visible.get().min(writer.wal.appended()) {
        return Ok(false);
    }
    shared.synced_ns.store(now, Ordering::Relaxed);
    sync_all_visible(shared).map(|()| true)
}

/// The life of a worker. The first one also looks for memtables at rest.
fn run(shared: &Shared, duty: Duty, is_first: bool) {
    let mut resting = HashMap::new();
    while !shared.closing.load(Ordering::Acquire) {
        let seen = shared.work.count();
        let close = lock(&shared.left_to_close).take();
        if let Some(close) = close {
            return close();
        }
        match catch_unwind(AssertUnwindSafe(|| attempt(shared, duty, Patience::Waits))) {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) if is_first && seal_resting(shared, &mut resting) => {}
            Ok(Ok(false)) => {
                let pause = shortest_wait(shared).map(|ns| ns.div_ceil(1_000_000).clamp(1, 1_000));
                shared.work.wait(seen, pause.unwrap_or(1_000));
            }
            Ok(Err(failed)) => take_note(shared, &failed, seen),
            Err(_) => drop(shared.poison.set(Error::new(ErrorKind::Poisoned, "a worker panicked"))),
        }
    }
}

/// Tells of work that has failed, unless that is known, and lets others go on; if nothing can be done, it waits for a
/// ring after `seen`.
fn take_note(shared: &Shared, failed: &Failed, seen: u64) {
    shared.done.ring();
    let setback = failed.setback(shared);
    let known = matches!(failed.error.kind(), ErrorKind::Poisoned | ErrorKind::Closed);
    if !known && setback.is_none_or(|setback| setback.is_news(&failed.error)) {
        shared.tell(&Event::BackgroundError { error: failed.error.clone() });
    }
    if setback.is_none() || shared.poison.is_set() {
        shared.work.wait(seen, 1_000);
    }
}

/// How long the first piece of work that failed still has to wait.
fn shortest_wait(shared: &Shared) -> Option<u64> {
    let now = shared.env.monotonic_ns();
    let partitions = shared.catalog.all();
    let tasks = partitions.iter().flat_map(|partition| partition.setbacks.waiting(now)).map(|(_, ns)| ns);
    tasks.chain(shared.log_setback.wait_ns(now)).min()
}

/// Seals memtables that may hide much of what blob files hold and have stood unchanged for a while: without that,
/// nobody would find out for as long as nobody writes. `resting` has what was seen last, and when that was new.
fn seal_resting(shared: &Shared, resting: &mut HashMap<PartitionId, (SeqNo, u64)>) -> bool {
    if shared.writer.is_none() {
        return false;
    }
    let now = shared.env.monotonic_ns();
    let mut sealed = false;
    let mut seen = HashMap::new();
    for partition in shared.catalog.all() {
        let Some(tree) = partition.lsm_if_built() else { continue };
        let Some(last) = tree.hiding_in_memory() else { continue };
        match resting.get(&partition.id) {
            Some(&(before, since)) if before == last && now.saturating_sub(since) >= RESTING_NS => {
                tree.seal();
                sealed = true;
            }
            Some(&(before, since)) if before == last => drop(seen.insert(partition.id, (before, since))),
            _ => drop(seen.insert(partition.id, (last, now))),
        }
    }
    *resting = seen;
    sealed
}

fn sync_all_visible(shared: &Shared) -> Result<()> {
    let Some(writer) = &shared.writer else { return Ok(()) };
    shared.poison.check()?;
    shared.poison.watch(writer.wal.sync(shared.visible.get(), false))
}

/// Flushes everything that `partition` holds in memory now, and waits for it. Delivers no events, because a caller may
/// hold locks.
///
/// # Errors
/// `Closed` if the partition is deleted meanwhile.
pub(crate) fn flush_and_wait(shared: &Shared, partition: &Arc<PartitionState>) -> Result<()> {
    let target = shared.visible.get();
    let tree = partition.tree()?;
    tree.seal();
    loop {
        let seen = shared.done.count();
        partition.tree()?;
        if tree.first_unflushed().is_none_or(|first| first > target) {
            break;
        }
        shared.poison.check()?;
        match guarded(shared, || Ok(tree.next_task(false, &[])))? {
            Some(Task::Flush) => run_task(shared, partition, Task::Flush, false)?,
            _ => shared.done.wait(seen, 20), // a worker is at it
        }
    }
    remove_all_tables(shared);
    Ok(())
}

/// Merges what a partition holds now into one run at the bottom, and waits for it. What others write meanwhile may come
/// along and does not keep it from ending.
///
/// # Errors
/// `Closed` if the partition is deleted meanwhile.
pub(crate) fn compact_and_wait(shared: &Shared, partition: &Arc<PartitionState>) -> Result<()> {
    let _call = shared.begin_call();
    shared.check_outside()?;
    let through = shared.visible.get();
    flush_and_wait(shared, partition)?;
    let tree = partition.tree()?;
    if let Some(tree) = partition.lsm_if_built() {
        merge_while(shared, partition, |tree| tree.push_to_bottom(through, shared))?;
        // Each of them once: what is written instead of it is as clean as it can be.
        let unclean = guarded(shared, || tree.unclean_at_bottom(&shared.read_points.list()))?;
        merge_while(shared, partition, |tree| tree.rewrite_at_bottom(&unclean, shared))?;
        remove_all_tables(shared);
        return Ok(());
    }
    loop {
        shared.writer()?;
        // Forced, it also says what others are doing, and running that waits for them: `None` is the end.
        match guarded(shared, || Ok(tree.next_task(true, &[])))? {
            Some(task) => run_task(shared, partition, task, true)?,
            None => break,
        }
    }
    partition.tree()?;
    remove_all_tables(shared);
    Ok(())
}

/// Has a tree of tables merge until `merge` finds nothing more to do.
fn merge_while(
    shared: &Shared,
    partition: &Arc<PartitionState>,
    merge: impl Fn(&LsmTree) -> Result<Option<TaskReport>>,
) -> Result<()> {
    let mut more = true;
    while more {
        shared.writer()?;
        more = false;
        conduct(shared, partition, Task::Compact, |tree| {
            let report = merge(tree)?;
            more = report.is_some();
            Ok(report.unwrap_or_default())
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flushes_come_first_and_the_worst_tree_of_each_kind() {
        let wish = |task, sealed_bytes, young_runs, compaction_debt| Wish {
            task,
            holds_log: false,
            pressure: Pressure { sealed_bytes, sealed: 1, compaction_debt, young_runs },
        };
        let compact = wish(Task::Compact, 0, 9, 1);
        assert_eq!(most_urgent(&[]), None);
        assert_eq!(most_urgent(&[compact, wish(Task::Flush, 1, 0, 0), wish(Task::Flush, 5, 0, 0)]), Some(2));
        let holder = Wish { holds_log: true, ..wish(Task::Flush, 1, 0, 0) };
        assert_eq!(most_urgent(&[wish(Task::Flush, 5, 0, 0), holder, compact]), Some(1));
        assert_eq!(most_urgent(&[wish(Task::Compact, 0, 9, 0), compact, wish(Task::Compact, 0, 3, 99)]), Some(1));
    }
}

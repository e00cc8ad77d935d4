//! Background work: what is most urgent, and the threads that do it.
//!
//! Order of urgency: flushes (the most memory first), then files that nobody needs (removing them gives space back),
//! then compactions (the most young runs, then the most debt), then collections of blob files, then the log (retire
//! segments, flush the partition that holds the log back, periodic sync). [`step`] does exactly one piece by hand; a
//! worker is a thread that does one after the other for ever.
//!
//! Work that fails waits for itself (`setbacks`): until it is tried again, all other work is done as if there was none
//! of it.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::base::edit::{Edit, PartitionId};
use crate::base::event::Event;
use crate::base::sync::lock;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::db::catalog::PartitionState;
use crate::db::shared::Shared;
use crate::db::state::setbacks::Setback;
use crate::engine::{Engine, Pressure, Task, TaskReport};
use crate::lsm::tree::LsmTree;
use crate::vfs::env::Thread;

/// A memtable that has stood unchanged for so long is at rest.
const RESTING_NS: u64 = 1_000_000_000;

/// On a full disk, a log of more bytes than this is flushed, because that gives space back.
const FULL_DISK_LOG: u64 = 256 << 10;

/// A task that a tree wants done, with what decides its turn.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Wish {
    task: Task,
    pressure: Pressure,
}

/// Which wish comes first: pure.
fn most_urgent(wishes: &[Wish]) -> Option<usize> {
    let rank = |wish: &Wish| match wish.task {
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
    let first = attempt(shared, Duty::All, Patience::Waits);
    let done = first.and_then(|done| Ok(done || attempt(shared, Duty::All, Patience::Ended)?));
    done.map_err(|failed| failed.error)
}

/// Does one piece of background work; false if there was none that may be done now.
fn attempt(shared: &Shared, duty: Duty, patience: Patience) -> Result<bool, Failed> {
    shared.poison.check().map_err(Failed::choosing)?;
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
        wishes.push(Wish { task, pressure: tree.pressure() });
        partitions.push(Arc::clone(&partition));
    }
    let flushes = wishes.iter().filter(|wish| wish.task == Task::Flush).count();
    shared.flush_waiting.store(flushes > 0, Ordering::Relaxed);
    if flushes == 0 && duty == Duty::All && remove_tables(shared).map_err(Failed::choosing)? {
        return Ok(true);
    }
    if let Some(first) = most_urgent(&wishes) {
        let task = wishes[first].task;
        run_one(shared, &partitions[first], task, false)?;
        return Ok(true);
    }
    if patience == Patience::Waits && shared.log_setback.wait_ns(now).is_some() {
        return Ok(false);
    }
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
    let result = shared.begin_work().and_then(|_shift| {
        let result = shared.with_reserve(|| shared.poison.watch(guarded(shared, &mut work)));
        // What it put an end to. After a failure too: perhaps it was space that was missing.
        if task != Task::Flush || result.is_err() {
            shared.graveyard().remove_some();
        }
        result
    });
    if task == Task::Flush {
        *lock(&shared.flush_error) = result.as_ref().err().cloned();
    }
    shared.refresh_pressure();
    let ended = matches!(&result, Err(error) if partition.is_deleted() && error.kind() == ErrorKind::Closed);
    if !ended {
        // One that yields may fail yet, for the same reason as the last time.
        let done = result.as_ref().map(|report| task == Task::Flush || !report.is_idle());
        note(shared, partition.setbacks.of(task), done);
    }
    shared.done.ring();
    let report = match result {
        Err(_) if ended => return Ok(TaskReport::default()),
        other => other.map_err(|error| Failed { work: Work::Task(Arc::clone(partition), task), error })?,
    };
    account(shared, partition, task, report);
    if task == Task::Flush {
        let retired = shared.begin_work().and_then(|_shift| shared.with_reserve(|| retire_log(shared)));
        note(shared, &shared.log_setback, retired.as_ref().map(|()| false));
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

/// Gives back log segments that no tree needs any more.
pub(crate) fn retire_log(shared: &Shared) -> Result<()> {
    let Some(writer) = &shared.writer else { return Ok(()) };
    let checkpoints = lock(&shared.checkpoints);
    if *checkpoints > 0 {
        return Ok(());
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
    if epochs.is_empty() {
        return Ok(());
    }
    let edits: Vec<Edit> = epochs.iter().map(|epoch| Edit::SegmentRetired { epoch: *epoch }).collect();
    shared.poison.watch(writer.metadata.commit(&edits))?;
    writer.wal.recycle(&epochs)
}

/// Work on the log and the manifest that nothing else triggers; retiring segments too if that has failed. What cannot
/// fail comes before what can.
fn tend_log(shared: &Shared) -> Result<bool> {
    let Some(writer) = &shared.writer else { return Ok(false) };
    let _shift = shared.begin_work()?;
    let full = writer.reserve.is_short() && !shared.fill_reserve();
    if shared.poison.watch(writer.wal.sync_sealed(!full))? {
        return Ok(true);
    }
    let live_bytes = writer.wal.live_bytes();
    if live_bytes > shared.settings.max_log_size || full && live_bytes > FULL_DISK_LOG {
        let oldest = shared.catalog.all().into_iter().filter_map(|p| p.first_unflushed().map(|first| (first, p)));
        if let Some((_, partition)) = oldest.min_by_key(|(first, _)| *first)
            && let Some(tree) = partition.tree_if_built()
            && tree.pressure().sealed == 0
        {
            tree.seal();
            return Ok(true);
        }
        if full && shared.catalog.all().iter().all(|partition| partition.first_unflushed().is_none()) {
            // All of the log is in tables: another segment gives this one free.
            shared.with_reserve(|| shared.poison.watch(writer.wal.seal()))?;
            shared.with_reserve(|| retire_log(shared))?;
            return Ok(shared.fill_reserve());
        }
    }
    if shared.log_setback.is_failing() {
        retire_log(shared)?;
    }
    shared.poison.watch(writer.metadata.rewrite_if_grown())
}

/// Starts the background threads.
pub(crate) fn start(shared: &Arc<Shared>) -> Result<Vec<Box<dyn Thread>>> {
    let mut threads = Vec::new();
    for i in 0..shared.settings.workers {
        let duty = if i > 0 && i + 1 == shared.settings.workers { Duty::FlushesOnly } else { Duty::All };
        let worker = Arc::clone(shared);
        let name = format!("azekura-{i}");
        match shared.env.spawn(&name, Box::new(move || run(&worker, duty, i == 0))) {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                shared.closing.store(true, Ordering::Release);
                shared.work.ring();
                for thread in threads {
                    thread.join();
                }
                return Err(error);
            }
        }
    }
    Ok(threads)
}

/// The life of a worker. The first one also keeps the sync interval.
fn run(shared: &Shared, duty: Duty, keeps_interval: bool) {
    let interval_ns = shared.settings.sync_interval_ms.filter(|_| keeps_interval).map(|ms| ms * 1_000_000);
    let mut synced_at = shared.env.monotonic_ns();
    let mut resting = HashMap::new();
    while !shared.closing.load(Ordering::Acquire) {
        let seen = shared.work.count();
        if let Some(interval) = interval_ns
            && shared.env.monotonic_ns().saturating_sub(synced_at) >= interval
        {
            synced_at = shared.env.monotonic_ns();
            if let Err(error) = sync_all_visible(shared) {
                shared.tell(&Event::BackgroundError { error });
            }
        }
        match catch_unwind(AssertUnwindSafe(|| attempt(shared, duty, Patience::Waits))) {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) if keeps_interval && seal_resting(shared, &mut resting) => {}
            Ok(Ok(false)) => {
                let ms = |ns: u64| ns.div_ceil(1_000_000).clamp(1, 1_000);
                let pause = interval_ns.into_iter().chain(shortest_wait(shared)).map(ms).min();
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

/// Flushes everything that `partition` holds in memory now, and waits for it.
pub(crate) fn flush_and_wait(shared: &Shared, partition: &Arc<PartitionState>) -> Result<()> {
    let target = shared.visible.get();
    let tree = partition.tree()?;
    tree.seal();
    loop {
        let seen = shared.done.count();
        // Of a partition that was deleted meanwhile nothing is flushed any more.
        if partition.is_deleted() || tree.first_unflushed().is_none_or(|first| first > target) {
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
pub(crate) fn compact_and_wait(shared: &Shared, partition: &Arc<PartitionState>) -> Result<()> {
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
            pressure: Pressure { sealed_bytes, sealed: 1, compaction_debt, young_runs },
        };
        let compact = wish(Task::Compact, 0, 9, 1);
        assert_eq!(most_urgent(&[]), None);
        assert_eq!(most_urgent(&[compact, wish(Task::Flush, 1, 0, 0), wish(Task::Flush, 5, 0, 0)]), Some(2));
        assert_eq!(most_urgent(&[wish(Task::Compact, 0, 9, 0), compact, wish(Task::Compact, 0, 3, 99)]), Some(1));
    }
}

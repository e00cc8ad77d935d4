//! Background work: chooses the most urgent task, and runs the background threads.
//!
//! Order of urgency:
//! 1. populating the mapping of the write-ahead log (WAL), because it is short and writers need it soon;
//! 2. flushes: first those whose records hold the oldest segment of a WAL that is too large, then those with the most
//!    sealed bytes;
//! 3. WAL maintenance (sync and retire segments), if the WAL is too large;
//! 4. removal of obsolete files, because it frees disk space;
//! 5. compactions: most L0 runs first, then most debt;
//! 6. blob GC;
//! 7. other WAL and manifest maintenance.
//!
//! [`step`] runs exactly one task in the calling thread. A worker thread runs tasks in a loop until the database
//! closes.
//!
//! The sync interval has a thread of its own, because a task may take minutes. The listener has one too, because a
//! listener may wait for a worker.
//!
//! Each kind of task of each partition has its own backoff (`backoffs`). While a failed task waits for its next
//! attempt, the workers run all other tasks.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::base::event::Event;
use crate::base::sync::try_lock;
use crate::base::version_edit::{PartitionEdit, PartitionId, TableMeta, VersionEdit};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::db::inner::{DbInner, DbWriter};
use crate::db::partition_state::PartitionState;
use crate::db::state::background_work::WorkerStep;
use crate::db::state::backoff::Backoff;
use crate::db::state::disk_reserve::ReserveUse;
use crate::db::state::work_tracker::is_at_work;
use crate::engine::{EngineHost, Pressure, Task, TaskReport};
use crate::lsm::tree::LsmTree;
use crate::tree::partition_tree::PartitionTree;
use crate::vfs::env::Thread;

/// How long a memtable must be unchanged before a worker considers it idle: 1 second.
const IDLE_MEMTABLE_NS: u64 = 1_000_000_000;

/// A task that a tree requests, with the values that decide its priority.
#[derive(Clone, Copy, Debug, PartialEq)]
struct TaskCandidate {
    task: Task,
    /// Whether records of the partition hold the oldest segment of a WAL that is too large.
    holds_oldest_wal: bool,
    pressure: Pressure,
}

/// Returns the index of the most urgent candidate. Pure.
fn most_urgent(candidates: &[TaskCandidate]) -> Option<usize> {
    let rank = |candidate: &TaskCandidate| match candidate.task {
        Task::Flush if candidate.holds_oldest_wal => (3, candidate.pressure.sealed_bytes, 0),
        Task::Flush => (2, candidate.pressure.sealed_bytes, 0),
        Task::Compact => (1, candidate.pressure.l0_runs as u64, candidate.pressure.compaction_debt),
        Task::BlobGc => (0, 0, 0),
    };
    (0..candidates.len()).max_by_key(|&i| rank(&candidates[i]))
}

/// The kinds of task that a worker may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkerRole {
    All,
    /// Does not run compactions or blob GC and does not remove obsolete files, so that a flush never waits for them.
    FlushesOnly,
}

/// Whether the thread that runs a task looks for the next one afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AfterTask {
    /// It runs the next task of any kind itself.
    Continues,
    /// A worker must run the next task.
    WakesWorkers,
}

/// Whether failed work is tried before its backoff has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RetryPolicy {
    /// Skips failed work until its backoff has ended.
    AfterBackoff,
    /// Ignores the backoff.
    Now,
}

/// Kinds of work that fail independently of each other.
enum WorkKind {
    Task(Arc<PartitionState>, Task),
    /// Maintenance of the WAL and the manifest.
    WalAndManifest,
    /// The choice of the next task.
    Scheduling,
}

/// Failed work and its error.
struct FailedWork {
    work: WorkKind,
    error: Error,
}

impl FailedWork {
    fn scheduling(error: Error) -> FailedWork {
        FailedWork { work: WorkKind::Scheduling, error }
    }

    /// The backoff that records the failure.
    fn backoff<'a>(&'a self, inner: &'a DbInner) -> Option<&'a Backoff> {
        match &self.work {
            WorkKind::Task(partition, task) => Some(partition.backoffs.for_task(*task)),
            WorkKind::WalAndManifest => inner.writer.as_ref().map(|writer| &writer.wal_maintenance.backoff),
            WorkKind::Scheduling => None,
        }
    }
}

/// Runs one background task; returns false if there was none. Work whose backoff has not ended is tried only if
/// there is no other work.
///
/// # Errors
/// Those of the work, which remains to be done.
pub(crate) fn step(inner: &DbInner) -> Result<bool> {
    let _call = inner.begin_api_call();
    inner.check_outside()?;
    if inner.settings.workers == 0 && inner.writer()?.wal_maintenance.sync_if_due()? {
        return Ok(true);
    }
    let run_next = |retry| run_next_task(inner, WorkerRole::All, retry, AfterTask::WakesWorkers);
    let first = run_next(RetryPolicy::AfterBackoff);
    let done = first.and_then(|done| Ok(done || run_next(RetryPolicy::Now)?));
    done.map_err(|failed| failed.error)
}

/// Runs one background task; returns false if there was none that `role` and `retry` allow.
fn run_next_task(inner: &DbInner, role: WorkerRole, retry: RetryPolicy, after: AfterTask) -> Result<bool, FailedWork> {
    inner.poison.check().map_err(FailedWork::scheduling)?;
    let Some(writer) = &inner.writer else { return Ok(false) };
    if writer.wal.populate_is_requested() {
        let _work = inner.begin_work().map_err(FailedWork::scheduling)?;
        if writer.wal.populate_ahead() {
            return Ok(true);
        }
    }
    inner.seal_largest(); // recovery may have filled the memory budget
    let oldest = seal_oldest_wal_holders(inner, writer);
    let now = inner.env.monotonic_ns();
    let mut candidates = Vec::new();
    let mut partitions = Vec::new();
    for partition in inner.catalog.all() {
        let Some(tree) = partition.tree_if_built() else { continue };
        let waiting = partition.backoffs.delayed_tasks(now).filter(|_| retry == RetryPolicy::AfterBackoff);
        let excluded: Vec<Task> = waiting.map(|(task, _)| task).collect();
        let task = inner.catch_panics(|| Ok(tree.next_task(false, &excluded))).map_err(FailedWork::scheduling)?;
        let Some(task) = task else { continue };
        debug_assert!(!excluded.contains(&task), "a tree does not request a task whose backoff has not ended");
        if task != Task::Flush && role == WorkerRole::FlushesOnly {
            continue;
        }
        let holds_oldest_wal =
            oldest.is_some_and(|oldest| partition.first_unflushed().is_some_and(|first| first <= oldest));
        candidates.push(TaskCandidate { task, holds_oldest_wal, pressure: tree.pressure() });
        partitions.push(Arc::clone(&partition));
    }
    let flushes = candidates.iter().any(|candidate| candidate.task == Task::Flush);
    let may_maintain_wal = retry == RetryPolicy::Now || writer.wal_maintenance.backoff.remaining_ns(now).is_none();
    // Before compactions, because there may always be another compaction to run.
    if !flushes
        && may_maintain_wal
        && writer.wal_maintenance.wal_is_too_large()
        && maintain_wal_with_backoff(inner, writer)?
    {
        return Ok(true);
    }
    if !flushes && role == WorkerRole::All && remove_some_obsolete_files(inner).map_err(FailedWork::scheduling)? {
        return Ok(true);
    }
    if let Some(first) = most_urgent(&candidates) {
        let task = candidates[first].task;
        debug_assert!(role == WorkerRole::All || task == Task::Flush, "a worker for flushes runs only flushes");
        debug_assert!(!flushes || task == Task::Flush, "flushes come first");
        if after == AfterTask::Continues && candidates.len() > 1 {
            inner.background.wake_workers(); // other workers can start the other tasks
        }
        run_task_kind(inner, &partitions[first], task, false, after)?;
        return Ok(true);
    }
    if may_maintain_wal { maintain_wal_with_backoff(inner, writer) } else { Ok(false) }
}

fn maintain_wal_with_backoff(inner: &DbInner, writer: &DbWriter) -> Result<bool, FailedWork> {
    let maintained = maintain_wal(inner, writer);
    update_backoff(inner, &writer.wal_maintenance.backoff, maintained.as_ref().map(|_| true));
    maintained.map_err(|error| FailedWork { work: WorkKind::WalAndManifest, error })
}

/// Updates the backoff: a failure extends it, `Ok(true)` (work was done) resets it, `Ok(false)` leaves it unchanged.
fn update_backoff(inner: &DbInner, backoff: &Backoff, done: Result<bool, &Error>) {
    match done {
        Ok(true) => backoff.reset(),
        Ok(false) => {}
        Err(error) => backoff.record_failure(error, inner.env.monotonic_ns()),
    }
}

/// Runs one task of a tree, and updates counters, events and the backoff of the task.
pub(crate) fn run_task(inner: &DbInner, partition: &Arc<PartitionState>, task: Task, forced: bool) -> Result<()> {
    run_task_kind(inner, partition, task, forced, AfterTask::WakesWorkers).map_err(|failed| failed.error)
}

fn run_task_kind(
    inner: &DbInner,
    partition: &Arc<PartitionState>,
    task: Task,
    forced: bool,
    after: AfterTask,
) -> Result<(), FailedWork> {
    let Some(tree) = partition.tree_if_built() else { return Ok(()) };
    run_accounted(inner, partition, task, after, || tree.run(task, forced, inner)).map(drop)
}

/// Runs `work` on an LSM tree as a task of kind `task`. Updates counters, events and the backoff as [`run_task`]
/// does.
pub(crate) fn run_lsm_task(
    inner: &DbInner,
    partition: &Arc<PartitionState>,
    task: Task,
    mut work: impl FnMut(&LsmTree) -> Result<TaskReport>,
) -> Result<TaskReport> {
    let Some(tree) = partition.tables_if_built() else { return Ok(TaskReport::default()) };
    run_accounted(inner, partition, task, AfterTask::WakesWorkers, || work(tree)).map_err(|failed| failed.error)
}

fn run_accounted(
    inner: &DbInner,
    partition: &Arc<PartitionState>,
    task: Task,
    after: AfterTask,
    mut work: impl FnMut() -> Result<TaskReport>,
) -> Result<TaskReport, FailedWork> {
    let need = if task == Task::Flush { ReserveUse::Flush } else { ReserveUse::Compaction };
    let result = inner.begin_work().and_then(|_work| {
        let result = inner.with_reserve(need, || inner.poison.poison_on_failure(inner.catch_panics(&mut work)));
        if let Ok(report) = &result {
            record_task(inner, partition, task, *report);
        }
        // Removes files that the task made obsolete. After a failure too, because the disk may be full.
        if task != Task::Flush || result.is_err() {
            inner.obsolete_files().remove_batch();
        }
        result
    });
    // A task that ended because its partition was deleted or the database closes has not failed. Writers of other
    // partitions must not get its error. The version edit that drops a partition is written before the partition is
    // marked as deleted; in between, an edit of a task fails with `Closed`.
    let poisoned = matches!(&result, Err(error) if error.kind() == ErrorKind::Poisoned);
    let is_closed = matches!(&result, Err(error) if error.kind() == ErrorKind::Closed);
    let deleted = result.is_err() && !poisoned && partition.is_deleted();
    let ended = deleted || is_closed;
    if task == Task::Flush && !ended {
        inner.write_controller.record_flush(result.as_ref().map(drop));
    }
    inner.write_controller.update([&**partition]);
    if !ended {
        // A task that yielded without progress does not reset its backoff, because it may still fail for the same
        // reason.
        let done = result.as_ref().map(|report| task == Task::Flush || !report.is_idle());
        update_backoff(inner, partition.backoffs.for_task(task), done);
    }
    inner.background.notify_task_end();
    let report = match result {
        Err(_) if deleted => return Ok(TaskReport::default()),
        other => other.map_err(|error| FailedWork { work: WorkKind::Task(Arc::clone(partition), task), error })?,
    };
    // The task may have made another one necessary, which this thread may not run. A worker may have found no task
    // before.
    let next = |tree: &PartitionTree| inner.catch_panics(|| Ok(tree.next_task(false, &[])));
    if after == AfterTask::WakesWorkers && partition.tree_if_built().is_some_and(|tree| !matches!(next(tree), Ok(None)))
    {
        inner.background.wake_workers();
    }
    // Closing retires the WAL when all is flushed.
    let retires_later = inner.background.is_flushing_to_close() && !inner.wal_is_too_large();
    if task == Task::Flush
        && !retires_later
        && let Some(writer) = &inner.writer
    {
        let retire = || inner.with_reserve(ReserveUse::Flush, || retire_or_spill(inner, writer));
        let retired = inner.begin_work().and_then(|_work| retire());
        update_backoff(inner, &writer.wal_maintenance.backoff, retired.as_ref().map(|_| false));
        retired.map_err(|error| FailedWork { work: WorkKind::WalAndManifest, error })?;
    }
    Ok(report)
}

/// Counts a task that has run, and reports it to the listener. Called inside the work, so that the event precedes
/// `Closed`.
pub(crate) fn record_task(inner: &DbInner, partition: &PartitionState, task: Task, report: TaskReport) {
    debug_assert!(is_at_work(), "the database does not close before the event is queued");
    inner.counters.record_task(task, &report);
    let name = partition.name.to_string();
    inner.emit(&match task {
        Task::Flush => Event::Flushed { partition: name, tables: report.tables, bytes: report.bytes_written },
        Task::Compact | Task::BlobGc if report.is_idle() => return,
        Task::Compact => Event::Compacted {
            partition: name,
            level: report.level,
            bytes_read: report.bytes_read,
            bytes_written: report.bytes_written,
        },
        Task::BlobGc => Event::BlobGcCompleted {
            partition: name,
            files: report.tables,
            bytes_written: report.bytes_written,
            bytes_freed: report.bytes_freed,
        },
    });
}

/// Removes one batch of obsolete tables and blob files; false if there were none.
fn remove_some_obsolete_files(inner: &DbInner) -> Result<bool> {
    if inner.obsolete_files().is_empty() {
        return Ok(false);
    }
    let _work = inner.begin_work()?;
    Ok(inner.obsolete_files().remove_batch())
}

/// Removes all obsolete tables and blob files. Closing the database calls it too.
pub(crate) fn remove_obsolete_files(inner: &DbInner) {
    if !inner.obsolete_files().is_empty()
        && let Ok(_work) = inner.begin_work()
    {
        inner.obsolete_files().remove_all();
    }
}

/// Retires WAL segments. If there are none and the WAL is too large, spills the records of partitions whose
/// comparator is missing, and tries again. False if no segment was retired. Called inside [`DbInner::with_reserve`].
fn retire_or_spill(inner: &DbInner, writer: &DbWriter) -> Result<bool> {
    let wal = &writer.wal_maintenance;
    Ok(wal.retire_segments()? || spill_oldest_wal_holders(inner, writer)? && wal.retire_segments()?)
}

/// If the WAL is too large, spills the buffered records that hold its oldest segment until a comparator is given;
/// false if there were none.
fn spill_oldest_wal_holders(inner: &DbInner, writer: &DbWriter) -> Result<bool> {
    let Some(oldest) = writer.wal_maintenance.oldest_pinned_seqno() else { return Ok(false) };
    // The lock keeps partitions from being deleted and comparators from being given meanwhile. If it is held, a later
    // call tries again.
    let Some(_names) = try_lock(&inner.partition_ddl_lock) else { return Ok(false) };
    let mut is_written = false;
    for partition in inner.catalog.all() {
        let pending = partition.pending();
        let (Some(first), Some(last)) = (pending.first(), pending.last()) else { continue };
        debug_assert!(pending.is_sorted_by_key(|record| record.seqno), "buffered records are in the order of the WAL");
        if first.seqno > oldest {
            continue;
        }
        let mut outputs = partition.write_pending(&pending, inner.catalog.resources())?;
        debug_assert_eq!(
            outputs.tables.iter().map(|table| table.largest_seqno).max(),
            Some(last.seqno),
            "the tables contain the newest buffered record"
        );
        debug_assert_eq!(
            outputs.tables.iter().map(|table| table.entries).sum::<u64>(),
            pending.len() as u64,
            "the tables contain all buffered records"
        );
        inner.sync_wal_through(last.seqno)?;
        let edit = |table: &TableMeta| PartitionEdit::TableSpilled { table: table.clone() }.of(partition.id);
        let written = writer.version_set.log_and_apply(&outputs.tables.iter().map(edit).collect::<Vec<VersionEdit>>());
        // The manifest may name the tables after `Poisoned`, so they must not be removed.
        if !written.as_ref().is_err_and(|error| error.kind() != ErrorKind::Poisoned) {
            outputs.keep();
        }
        inner.poison.poison_on_failure(written)?;
        partition.note_written(std::mem::take(&mut outputs.tables));
        is_written = true;
    }
    Ok(is_written)
}

/// WAL and manifest maintenance that no flush triggers. Returns whether anything was done.
fn maintain_wal(inner: &DbInner, writer: &DbWriter) -> Result<bool> {
    let wal = &writer.wal_maintenance;
    let _work = inner.begin_work()?;
    let full = writer.space.reserve_is_short() && !writer.space.fill_reserve();
    if inner.poison.poison_on_failure(writer.wal.sync_sealed(!full))? {
        return Ok(true);
    }
    if full && !writer.wal.retained_segments().is_empty() && !wal.is_paused() {
        return inner.with_reserve(ReserveUse::Flush, || wal.retire_segments());
    }
    if wal.wal_is_too_large() {
        if inner.with_reserve(ReserveUse::Flush, || retire_or_spill(inner, writer))? {
            return Ok(true);
        }
        if full && !wal.is_paused() && wal.all_is_flushed() {
            // All records of the WAL are flushed: beginning another segment makes this one retirable.
            inner.with_reserve(ReserveUse::Flush, || inner.poison.poison_on_failure(writer.wal.seal()))?;
            inner.with_reserve(ReserveUse::Flush, || wal.retire_segments())?;
            return Ok(writer.space.fill_reserve());
        }
    }
    if wal.backoff.is_failing() {
        wal.retire_segments()?;
    }
    inner.poison.poison_on_failure(writer.version_set.rewrite_if_grown())
}

/// If the WAL is too large, seals the active memtables that hold its oldest segment. Returns the last sequence number
/// in that segment: flushes of records up to it are the most urgent.
fn seal_oldest_wal_holders(inner: &DbInner, writer: &DbWriter) -> Option<SeqNo> {
    let oldest = writer.wal_maintenance.oldest_pinned_seqno()?;
    for partition in inner.catalog.all() {
        if let Some(tree) = partition.tree_if_built()
            && tree.first_unflushed().is_some_and(|first| first <= oldest)
            && tree.pressure().sealed_memtables == 0
        {
            inner.seal(&partition);
        }
    }
    Some(oldest)
}

/// The background threads of a database.
#[derive(Default)]
pub(crate) struct BackgroundThreads {
    /// Worker threads, and the thread that syncs the WAL at the sync interval.
    pub(crate) workers: Vec<Box<dyn Thread>>,
    /// The thread that calls the listener.
    pub(crate) listener: Option<Box<dyn Thread>>,
}

/// Starts the background threads. Starts none if `workers` is 0.
///
/// # Errors
/// Those of starting a thread; the worker threads that were already started are joined.
pub(crate) fn start(inner: &Arc<DbInner>) -> Result<BackgroundThreads> {
    let mut threads = BackgroundThreads::default();
    let Err(error) = spawn_threads(inner, &mut threads) else { return Ok(threads) };
    inner.background.begin_closing();
    threads.workers.into_iter().for_each(|thread| _ = thread.join());
    Err(error)
}

fn spawn_threads(inner: &Arc<DbInner>, threads: &mut BackgroundThreads) -> Result<()> {
    debug_assert!(threads.workers.is_empty() && threads.listener.is_none(), "the threads are started once");
    let workers = inner.settings.workers;
    let spawn = |name: &str, body: Box<dyn FnOnce(&DbInner) + Send>| {
        let inner = Arc::clone(inner);
        inner.env.clone().spawn(name, Box::new(move || body(&inner)))
    };
    for i in 0..workers {
        let role = if i > 0 && i + 1 == workers { WorkerRole::FlushesOnly } else { WorkerRole::All };
        threads.workers.push(spawn(&format!("azekura-{i}"), Box::new(move |inner| worker_loop(inner, role, i == 0)))?);
    }
    if let (Some(interval), 1..) = (inner.settings.sync_interval, workers) {
        threads.workers.push(spawn("azekura-sync", Box::new(move |inner| sync_periodically(inner, interval)))?);
    }
    // Started last, because `start` joins only `workers` if a later thread cannot be started.
    if workers > 0 && inner.poison.events().has_listener() {
        let deliver = |inner: &DbInner| inner.poison.events().run(|| inner.poison.record_delivery(false));
        threads.listener = Some(spawn("azekura-events", Box::new(deliver))?);
        inner.poison.events().use_delivery_thread();
    }
    Ok(())
}

/// Syncs the WAL at this interval until the database closes or is poisoned. The thread does nothing
/// else, so that no other work delays a sync.
fn sync_periodically(inner: &DbInner, interval: Duration) {
    let Some(writer) = &inner.writer else { return };
    let ms = interval.as_millis() as u64; // at most 2^40
    let mut pause = ms;
    while !inner.poison.is_set() {
        if inner.background.wait_for_closing(pause) {
            return;
        }
        let start = inner.env.monotonic_ns();
        if let Err(error) = inner.catch_panics(|| writer.wal_maintenance.sync_all_visible())
            && error.kind() != ErrorKind::Poisoned
        {
            inner.emit(&Event::BackgroundError { error });
        }
        let took = inner.env.monotonic_ns().saturating_sub(start) / 1_000_000;
        pause = ms.saturating_sub(took).max(1);
        debug_assert!(pause <= ms.max(1), "the pause is not longer than the interval");
    }
}

/// The loop of a worker thread. The first worker also seals idle memtables, and frees memory that no memtable needs.
fn worker_loop(inner: &DbInner, role: WorkerRole, is_first: bool) {
    let (mut last_changes, mut last_chunk_use) = (HashMap::new(), (0, 0));
    loop {
        if is_first {
            inner.write_buffers.free_unneeded_spare_bytes(&mut last_chunk_use, inner.env.monotonic_ns());
        }
        let seen = match inner.background.next_worker_step() {
            WorkerStep::FindTask { seen } => seen,
            WorkerStep::Close(close) => return close(),
            WorkerStep::End => return,
        };
        // A worker for flushes does not run the compaction that a flush has made necessary.
        let after = if role == WorkerRole::All { AfterTask::Continues } else { AfterTask::WakesWorkers };
        match catch_unwind(AssertUnwindSafe(|| run_next_task(inner, role, RetryPolicy::AfterBackoff, after))) {
            Ok(Ok(true)) => {}
            Ok(Ok(false)) if is_first && seal_idle_memtables(inner, &mut last_changes) => {}
            Ok(Ok(false)) => {
                let retry_ms = next_retry_ns(inner).map(|ns| ns.div_ceil(1_000_000).max(1));
                inner.background.wait_for_work(seen, retry_ms);
            }
            Ok(Err(failed)) => report_failure(inner, &failed, seen),
            Err(_) => drop(inner.poison.set(Error::new(ErrorKind::Poisoned, "a worker panicked"))),
        }
    }
}

/// Reports failed work to the listener, unless the same failure was reported before, and wakes the threads that wait
/// for a task. If the work has no backoff or the database is poisoned, waits up to 1 second for a signal after
/// `seen`, so that the worker does not loop.
fn report_failure(inner: &DbInner, failed: &FailedWork, seen: u64) {
    inner.background.notify_task_end();
    let backoff = failed.backoff(inner);
    let known = matches!(failed.error.kind(), ErrorKind::Poisoned | ErrorKind::Closed);
    if !known && backoff.is_none_or(|backoff| backoff.should_report(&failed.error)) {
        inner.emit(&Event::BackgroundError { error: failed.error.clone() });
    }
    if backoff.is_none() || inner.poison.is_set() {
        inner.background.wait_for_work(seen, None);
    }
}

/// Nanoseconds until the first failed task may be tried again; `None` if no task has to wait.
fn next_retry_ns(inner: &DbInner) -> Option<u64> {
    let now = inner.env.monotonic_ns();
    let partitions = inner.catalog.all();
    let tasks = partitions.iter().flat_map(|partition| partition.backoffs.delayed_tasks(now)).map(|(_, ns)| ns);
    let wal = inner.writer.as_ref().and_then(|writer| writer.wal_maintenance.backoff.remaining_ns(now));
    tasks.chain(wal).min()
}

/// Seals idle memtables with many tombstones, which slow scans until a compaction drops them, and those that may hide
/// many stale blob values, because their staleness is unknown until they are flushed. `last_changes` maps a partition
/// to the last observed state of its memtable and the time of the last change, in nanoseconds. Returns whether a
/// memtable was sealed.
fn seal_idle_memtables(inner: &DbInner, last_changes: &mut HashMap<PartitionId, (SeqNo, u64)>) -> bool {
    if inner.writer.is_none() {
        return false;
    }
    let now = inner.env.monotonic_ns();
    let mut sealed = false;
    let mut seen = HashMap::new();
    for partition in inner.catalog.all() {
        let Some(tree) = partition.tables_if_built() else { continue };
        let Some(last) = tree.memtable_hiding_seqno() else { continue };
        match last_changes.get(&partition.id) {
            Some(&(before, since)) if before == last && now.saturating_sub(since) >= IDLE_MEMTABLE_NS => {
                inner.seal(&partition);
                sealed = true;
            }
            Some(&(before, since)) if before == last => drop(seen.insert(partition.id, (before, since))),
            _ => drop(seen.insert(partition.id, (last, now))),
        }
    }
    *last_changes = seen;
    sealed
}

/// Flushes all records that are visible in `partition` now, and waits for the flush. Delivers no events, because a
/// caller may hold locks.
///
/// # Errors
/// `Closed` if the partition is deleted meanwhile; `Poisoned`; those of the flush.
pub(crate) fn flush_and_wait(inner: &DbInner, partition: &Arc<PartitionState>) -> Result<()> {
    let target = inner.last_visible.get();
    let tree = partition.tree()?;
    tree.seal();
    loop {
        let seen = inner.background.task_end_generation();
        partition.tree()?;
        if tree.first_unflushed().is_none_or(|first| first > target) {
            break;
        }
        inner.poison.check()?;
        match inner.catch_panics(|| Ok(tree.next_task(false, &[])))? {
            Some(Task::Flush) => run_task(inner, partition, Task::Flush, false)?,
            _ => inner.background.wait_for_task_end(seen, 20), // a worker runs the flush
        }
    }
    remove_obsolete_files(inner);
    Ok(())
}

/// Compacts all records that are visible in `partition` now into one run at the bottom level, and waits for it. Later
/// writes may be compacted too, but do not delay the end. For a pool: runs the tasks that the pool requests.
///
/// # Errors
/// `Closed` if the partition is deleted meanwhile.
pub(crate) fn compact_and_wait(inner: &DbInner, partition: &Arc<PartitionState>) -> Result<()> {
    let _call = inner.begin_api_call();
    inner.check_outside()?;
    let through = inner.last_visible.get();
    flush_and_wait(inner, partition)?;
    let tree = partition.tree()?;
    if let Some(tree) = partition.tables_if_built() {
        let first_filtered = tree.first_filtered_table();
        compact_until_done(inner, partition, |tree| tree.compact_to_bottom(through, inner))?;
        // Each table once, because its replacement cannot be cleaned further.
        let unclean = inner.catch_panics(|| tree.bottom_tables_to_clean(&inner.snapshots.seqnos(), first_filtered))?;
        compact_until_done(inner, partition, |tree| tree.rewrite_bottom_tables(&unclean, inner))?;
        remove_obsolete_files(inner);
        return Ok(());
    }
    loop {
        inner.writer()?;
        // With `forced`, `next_task` also returns tasks that other threads run, and running such a task waits for it.
        // `None` means that no task is left.
        match inner.catch_panics(|| Ok(tree.next_task(true, &[])))? {
            Some(task) => run_task(inner, partition, task, true)?,
            None => break,
        }
    }
    partition.tree()?;
    remove_obsolete_files(inner);
    Ok(())
}

/// Removes the tables of an LSM partition whose every entry a range delete covers, and their files.
///
/// # Errors
/// `Closed` if the partition is deleted meanwhile.
pub(crate) fn drop_covered_tables_and_wait(inner: &DbInner, partition: &Arc<PartitionState>) -> Result<()> {
    if partition.tree()?.lsm().is_some() {
        // An edit may name its tables, so it must be installed before its inputs are removed.
        compact_until_done(inner, partition, |tree| tree.finish_kept_compaction(inner))?;
        compact_until_done(inner, partition, |tree| tree.drop_whole_tables(true, inner))?;
        remove_obsolete_files(inner);
    }
    Ok(())
}

/// Runs compactions of an LSM tree until `merge` finds none to run.
fn compact_until_done(
    inner: &DbInner,
    partition: &Arc<PartitionState>,
    merge: impl Fn(&LsmTree) -> Result<Option<TaskReport>>,
) -> Result<()> {
    let mut more = true;
    while more {
        inner.writer()?;
        more = false;
        run_lsm_task(inner, partition, Task::Compact, |tree| {
            let report = merge(tree)?;
            more = report.is_some();
            Ok(report.unwrap_or_default())
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::base::sync::lock;
    use crate::db::config::Config;
    use crate::manifest::Manifest;
    use crate::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, TestEnv};
    use crate::vfs::Fs;

    fn config() -> Config {
        Config::new(std::path::Path::new("/db")).fs(Arc::new(MemFs::new())).workers(0)
    }

    /// Regression: the manifest stated a smallest key above the first key of a table. A compaction of the table wrote
    /// one that overlapped another table of its level, and the next open failed.
    #[test]
    fn outputs_over_other_tables_are_refused() {
        let (fs, dir): (Arc<dyn Fs>, _) = (Arc::new(MemFs::new()), Path::new("/db"));
        let open = || {
            let db = Config::new(dir).fs(Arc::clone(&fs)).workers(0).open().unwrap();
            db.open_partition("p", Default::default()).unwrap()
        };
        let part = open();
        ["c", "m", "z"].iter().for_each(|key| part.insert(key, "v").unwrap());
        part.major_compact().unwrap();
        drop(part);
        let mut edits = Manifest::load(Arc::clone(&fs), dir).unwrap().edits;
        for edit in &mut edits {
            if let VersionEdit::Partition { edit: PartitionEdit::TableAdded { table, .. }, .. } = edit {
                table.smallest_key.0 = b"m".to_vec();
            }
        }
        drop(Manifest::create(Arc::clone(&fs), dir, [9; 16], &edits).unwrap());
        let part = open();
        ["b", "d"].iter().for_each(|key| part.insert(key, "v").unwrap());
        part.major_compact().unwrap();
        part.insert("x", "v").unwrap();
        assert_eq!(part.major_compact().unwrap_err().kind(), ErrorKind::Corruption);
        drop(part);
        assert_eq!(open().get("b").unwrap().unwrap(), "v");
    }

    /// Regression: a flush that a caller waits for runs in the thread of the caller. It did not tell the workers that
    /// the tree needs a compaction. They noticed when the next memtable was sealed, and only an idle worker did. A
    /// program that flushed after each write had 500 runs on level 0, and its writes were delayed.
    #[test]
    fn flush_wakes_workers_for_a_compaction() {
        let db = config().open().unwrap();
        let part = db.open_partition("p", Default::default()).unwrap();
        let inner = &part.handle.inner;
        let needs_compaction = || {
            let state = inner.partition("p").unwrap();
            state.tree().unwrap().next_task(false, &[]) == Some(Task::Compact)
        };
        let mut last_wakes = 0;
        for n in 0..100u8 {
            part.insert("k", [n]).unwrap();
            let before = inner.background.work_generation();
            part.flush().unwrap();
            let wakes = inner.background.work_generation() - before;
            if needs_compaction() {
                assert!(wakes > last_wakes, "nothing told the workers: {wakes} wakes");
                return;
            }
            last_wakes = wakes;
        }
        panic!("level 0 has 100 runs");
    }

    /// Regression: a worker whose task made another task necessary woke all workers, although it runs that task itself.
    #[test]
    fn worker_that_continues_wakes_no_others() {
        let db = config().open().unwrap();
        let part = db.open_partition("p", Default::default()).unwrap();
        let inner = &part.handle.inner;
        let tree = part.state.tree().unwrap();
        let wakes = |after| {
            for n in 0..100u8 {
                part.insert("k", [n]).unwrap();
                tree.seal();
                let before = inner.background.work_generation();
                run_task_kind(inner, &part.state, Task::Flush, false, after).map_err(|failed| failed.error).unwrap();
                if tree.next_task(false, &[]) == Some(Task::Compact) {
                    let woken = inner.background.work_generation() > before;
                    while step(inner).unwrap() {}
                    return woken;
                }
            }
            panic!("level 0 has 100 runs");
        };
        assert!(!wakes(AfterTask::Continues));
        assert!(wakes(AfterTask::WakesWorkers));
    }

    /// Regression: the write delay did not count a memtable that was sealed because it was idle, or because it pinned
    /// the WAL.
    #[test]
    fn sealed_memtables_count_for_write_stalls() {
        let db = config().open().unwrap();
        let part = db.open_partition("p", Default::default()).unwrap();
        let inner = &part.handle.inner;
        part.insert("k", "v").unwrap();
        inner.seal(&part.state);
        assert!(inner.write_controller.flush_waiting());
        part.flush().unwrap();
        assert!(!inner.write_controller.flush_waiting());
    }

    /// Regression: a compaction was paused, and its edit could not be written, because the disk was full. `clear`
    /// returned and removed no table.
    #[test]
    fn clear_completes_a_paused_compaction() {
        let faults = FaultFs::new(Arc::new(MemFs::new()));
        let db = config().fs(Arc::new(faults.clone())).disk_reserve(0).open().unwrap();
        let part = db.open_partition("p", Default::default()).unwrap();
        let tree = part.state.tables().unwrap();
        for _ in 0..6 {
            (0..50u8).for_each(|n| part.insert([n], [n; 100]).unwrap());
            part.flush().unwrap();
        }
        assert!(db.step().unwrap(), "moves the oldest table");
        let full = Fault::Error(std::io::ErrorKind::StorageFull);
        faults.inject(FaultPlan::new(OpKind::Write, 1, full).in_path("MANIFEST").forever());
        assert_eq!(db.step().unwrap_err().kind(), ErrorKind::OutOfSpace);
        assert!(lock(&tree.compaction_state).paused_compaction.is_some());
        faults.clear_faults();
        part.clear().unwrap();
        assert_eq!(part.disk_space(), 0);
        assert!(lock(&tree.compaction_state).paused_compaction.is_none());
    }

    /// Regression: without writes, a memtable of tombstones was not flushed. Reading the first key took half a second
    /// after a million removals. No metric showed the tombstones, and `approximate_len` counted each as a key.
    #[test]
    fn idle_memtable_of_tombstones_is_compacted() {
        let env = TestEnv::new(1);
        let db = config().env(Arc::new(env.clone())).open().unwrap();
        let part = db.open_partition("p", Default::default()).unwrap();
        let keys = || (0..20_000u32).map(u32::to_be_bytes);
        keys().for_each(|key| part.insert(key, "").unwrap());
        part.insert([255], "").unwrap();
        part.flush().unwrap();
        let (inner, mut last_changes) = (&part.handle.inner, HashMap::new());
        let mut is_sealed_later = || {
            let at_once = seal_idle_memtables(inner, &mut last_changes);
            env.advance(Duration::from_nanos(IDLE_MEMTABLE_NS));
            assert!(!at_once);
            seal_idle_memtables(inner, &mut last_changes)
        };
        keys().take(9_999).for_each(|key| part.remove(key).unwrap());
        assert!(!is_sealed_later(), "too few tombstones");
        keys().skip(9_999).for_each(|key| part.remove_weak(key).unwrap());
        let counts = || {
            let metrics = part.metrics();
            let in_tables: u64 = metrics.levels.iter().map(|level| level.tombstones).sum();
            (metrics.memtable_tombstones, in_tables, part.approximate_len())
        };
        assert_eq!(counts(), (20_000, 0, 1));
        assert!(is_sealed_later());
        assert_eq!(counts(), (20_000, 0, 1), "in a sealed memtable");
        while step(inner).unwrap() {}
        assert_eq!(counts(), (0, 0, 1));
        assert!(!is_sealed_later());
        part.remove([255]).unwrap();
        part.flush().unwrap();
        assert_eq!(part.approximate_len(), 0, "a tombstone in a table");
    }

    /// Scans that pass rows of tombstones, more rows than dead ranges are remembered, cause a compaction of the table,
    /// although less than half of it are tombstones. Scans of its other keys do not.
    #[test]
    fn table_that_delays_scans_is_compacted() {
        let db = config().open().unwrap();
        let part = db.open_partition("p", Default::default()).unwrap();
        let key = |row: u32, n: u32| [row.to_be_bytes(), n.to_be_bytes()].concat();
        let keys = |rows: std::ops::Range<u32>| rows.flat_map(|row| (0..25).map(move |n| key(row, n)));
        keys(0..80).for_each(|key| part.insert(key, "").unwrap());
        part.major_compact().unwrap();
        (0..40).for_each(|row| (0..20).for_each(|n| part.remove(key(row, n)).unwrap()));
        keys(80..120).for_each(|key| part.insert(key, "").unwrap());
        part.flush().unwrap();
        part.insert(key(120, 0), "").unwrap(); // the tree is not idle
        let inner = &part.handle.inner;
        let wakeups = || inner.background.work_generation();
        let tombstones = || part.metrics().levels.iter().map(|level| level.tombstones).sum::<u64>();
        while db.step().unwrap() {}
        assert_eq!(tombstones(), 800, "of 1,800 entries");
        (0..30).for_each(|_| assert_eq!(part.range(key(40, 0)..).count(), 80 * 25 + 1));
        assert!(!db.step().unwrap());
        let before = wakeups();
        (0..30).for_each(|_| assert_eq!(part.range(..key(40, 0)).count(), 40 * 5));
        assert!(wakeups() > before, "a worker is woken");
        while db.step().unwrap() {}
        assert_eq!(tombstones(), 0);
        assert_eq!(part.iter().count(), 40 * 5 + 80 * 25 + 1);
    }

    /// Regression: after each flush, closing visited the trees of all partitions several times.
    #[test]
    fn closing_visits_each_tree_a_few_times() {
        const PARTITIONS: u64 = 64;
        for workers in [0, 3] {
            let db = config().workers(workers).open().unwrap();
            for n in 0..PARTITIONS {
                db.open_partition(&format!("p{n}"), Default::default()).unwrap().insert("k", "v").unwrap();
            }
            let inner = Arc::clone(&db.handle.inner);
            let retirement = &inner.writer.as_ref().unwrap().wal_maintenance;
            let count = || inner.write_controller.trees_visited() + retirement.trees_visited();
            let before = count();
            db.close().unwrap();
            let visits = count() - before;
            assert!((PARTITIONS..=4 * PARTITIONS).contains(&visits), "{visits} visits of {PARTITIONS} trees");
        }
    }

    #[test]
    fn flush_first_then_most_urgent_of_each_task() {
        let candidate = |task, sealed_bytes, young_runs, compaction_debt| TaskCandidate {
            task,
            holds_oldest_wal: false,
            pressure: Pressure { sealed_bytes, compaction_debt, l0_runs: young_runs, ..Pressure::default() },
        };
        let compact = candidate(Task::Compact, 0, 9, 1);
        assert_eq!(most_urgent(&[]), None);
        assert_eq!(most_urgent(&[compact, candidate(Task::Flush, 1, 0, 0), candidate(Task::Flush, 5, 0, 0)]), Some(2));
        let holder = TaskCandidate { holds_oldest_wal: true, ..candidate(Task::Flush, 1, 0, 0) };
        assert_eq!(most_urgent(&[candidate(Task::Flush, 5, 0, 0), holder, compact]), Some(1));
        assert_eq!(
            most_urgent(&[candidate(Task::Compact, 0, 9, 0), compact, candidate(Task::Compact, 0, 3, 99)]),
            Some(1)
        );
    }
}

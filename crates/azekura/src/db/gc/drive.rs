//! Scan, plan, act, until it is reached.

use std::sync::Arc;

use crate::base::edit::FileId;
use crate::base::{Error, Result, SeqNo};
use crate::db::catalog::PartitionState;
use crate::db::shared::Shared;
use crate::db::worker::{conduct, flush_and_wait, guarded, remove_all_tables};
use crate::engine::{Task, TaskReport};
use crate::lsm::collect::plan::{FileFigures, Goal, Step, next_step};
use crate::lsm::collect::scan::Scanned;
use crate::lsm::tree::LsmTree;

/// Entries between two looks at whether the database closes.
const SCAN_STEP: u64 = 10_000;
/// Without other writers two suffice; with them there is always something new, and a call must end.
const ROUNDS: usize = 6;

fn separated(partition: &PartitionState) -> Result<&Arc<LsmTree>> {
    match partition.tree()?.lsm().filter(|tree| tree.is_separated()) {
        Some(tree) => Ok(tree),
        None => Err(Error::invalid(format!("partition {:?} has no key-value separation", partition.name))),
    }
}

/// How stale the blob files of a partition are.
pub(crate) fn scan(shared: &Shared, partition: &Arc<PartitionState>) -> Result<Arc<Scanned>> {
    let _call = shared.begin_call();
    shared.check_outside()?;
    let tree = separated(partition)?;
    shared.check_open()?;
    if shared.writer.is_some() {
        flush_and_wait(shared, partition)?;
    }
    let scanned = scan_now(shared, tree)?;
    partition.tree()?; // of one that was deleted meanwhile nothing was left to scan
    Ok(scanned)
}

fn scan_now(shared: &Shared, tree: &LsmTree) -> Result<Arc<Scanned>> {
    let read_only = shared.writer.is_none();
    if !read_only && let Some(scanned) = tree.scanned(&shared.read_points.list()) {
        return Ok(scanned);
    }
    // What is in memory can be flushed only by one who writes, who has done it.
    let mut scan = tree.begin_scan(shared.read_points.list(), read_only);
    loop {
        let _shift = shared.begin_work()?;
        if guarded(shared, || scan.step(SCAN_STEP))? {
            return Ok(tree.end_scan(scan));
        }
    }
}

/// Collects until the goal is reached; gives the bytes that this made free.
pub(crate) fn collect_and_wait(shared: &Shared, partition: &Arc<PartitionState>, goal: Goal) -> Result<u64> {
    let _call = shared.begin_call();
    shared.check_outside()?;
    let tree = separated(partition)?;
    shared.writer()?;
    flush_and_wait(shared, partition)?;
    let through = shared.visible.get();
    let mut freed = 0;
    for round in 1..=ROUNDS {
        let scanned = scan_now(shared, tree)?;
        let files: Vec<FileFigures> = match round {
            ROUNDS => scanned.files.iter().map(|file| file.without_hidden()).collect(),
            _ => scanned.files.clone(),
        };
        freed += match next_step(&files, goal) {
            Step::Done => break,
            Step::Reveal => reveal(shared, partition, through, &scanned)?,
            Step::Rewrite(chosen) => rewrite(shared, partition, chosen)?,
        };
    }
    partition.tree()?;
    remove_all_tables(shared);
    Ok(freed)
}

/// Merges tables until none of the records up to `through` is hidden in one by another.
fn reveal(shared: &Shared, partition: &Arc<PartitionState>, through: SeqNo, scanned: &Scanned) -> Result<u64> {
    let mut freed = 0;
    while let Some(report) = compact(shared, partition, |tree| tree.push_to_bottom(through, shared))? {
        freed += report.bytes_freed;
    }
    // What lay at the bottom before and was kept for readers that are gone; most of it was merged just now.
    while let Some(report) = compact(shared, partition, |tree| tree.rewrite_at_bottom(&scanned.hiding, shared))? {
        freed += report.bytes_freed;
    }
    Ok(freed)
}

fn compact(
    shared: &Shared,
    partition: &Arc<PartitionState>,
    work: impl Fn(&LsmTree) -> Result<Option<TaskReport>>,
) -> Result<Option<TaskReport>> {
    shared.writer()?;
    let mut done = None;
    conduct(shared, partition, Task::Compact, |tree| {
        done = work(tree)?;
        Ok(done.unwrap_or_default())
    })?;
    Ok(done)
}

/// Collects all these files; one that is damaged fails it in the end, and the others are collected all the same.
fn rewrite(shared: &Shared, partition: &Arc<PartitionState>, mut chosen: Vec<FileId>) -> Result<u64> {
    let (mut freed, mut failed) = (0, Ok(()));
    while !chosen.is_empty() {
        shared.writer()?;
        let tree = partition.lsm()?;
        match conduct(shared, partition, Task::Collect, |tree| tree.collect(&chosen, true, shared)) {
            Ok(report) => freed += report.bytes_freed,
            Err(error) => {
                let damaged = tree.damaged_blob_file(&error).filter(|file| chosen.contains(file));
                let Some(damaged) = damaged else { return Err(error) };
                chosen.retain(|file| *file != damaged);
                failed = failed.and(Err(error));
            }
        }
        let version = tree.version();
        chosen.retain(|file| version.blobs().has(*file));
    }
    failed.map(|()| freed)
}

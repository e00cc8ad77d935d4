//! Scan, plan, act, until it is reached.

use std::sync::Arc;

use crate::base::version_edit::FileNumber;
use crate::base::{Error, Result, SeqNo};
use crate::db::catalog::PartitionState;
use crate::db::inner::DbInner;
use crate::db::worker::{catch_panics, flush_and_wait, remove_obsolete_files, run_lsm_task};
use crate::engine::{Task, TaskReport};
use crate::lsm::blob_gc::picker::{BlobGarbageStats, BlobGcGoal, BlobGcStep, next_blob_gc_step};
use crate::lsm::blob_gc::scan::BlobScanResult;
use crate::lsm::tree::LsmTree;

/// Entries between two looks at whether the database closes.
const SCAN_STEP_ENTRIES: u64 = 10_000;
/// Without other writers two suffice; with them there is always something new, and a call must end.
const GC_ROUNDS_MAX: usize = 6;

fn lsm_with_separation(partition: &PartitionState) -> Result<&Arc<LsmTree>> {
    match partition.tree()?.lsm().filter(|tree| tree.has_kv_separation()) {
        Some(tree) => Ok(tree),
        None => Err(Error::invalid(format!("partition {:?} has no key-value separation", partition.name))),
    }
}

/// How stale the blob files of a partition are.
pub(crate) fn scan_blobs(inner: &DbInner, partition: &Arc<PartitionState>) -> Result<Arc<BlobScanResult>> {
    let _call = inner.begin_api_call();
    inner.check_outside()?;
    let tree = lsm_with_separation(partition)?;
    inner.check_open()?;
    if inner.writer.is_some() {
        flush_and_wait(inner, partition)?;
    }
    let scanned = scan_tables(inner, tree)?;
    partition.tree()?; // of one that was deleted meanwhile nothing was left to scan
    Ok(scanned)
}

fn scan_tables(inner: &DbInner, tree: &LsmTree) -> Result<Arc<BlobScanResult>> {
    let read_only = inner.writer.is_none();
    if !read_only && let Some(scanned) = tree.cached_blob_scan(&inner.snapshots.seqnos()) {
        return Ok(scanned);
    }
    // What is in memory can be flushed only by one who writes, who has done it.
    let mut scan = tree.begin_blob_scan(inner.snapshots.seqnos(), read_only);
    loop {
        let _work = inner.begin_work()?;
        if catch_panics(inner, || scan.step(SCAN_STEP_ENTRIES))? {
            return Ok(tree.finish_blob_scan(scan));
        }
    }
}

/// Collects until the goal is reached; gives the bytes that this made free.
pub(crate) fn run_blob_gc_and_wait(inner: &DbInner, partition: &Arc<PartitionState>, goal: BlobGcGoal) -> Result<u64> {
    let _call = inner.begin_api_call();
    inner.check_outside()?;
    let tree = lsm_with_separation(partition)?;
    inner.writer()?;
    flush_and_wait(inner, partition)?;
    let through = inner.last_visible.get();
    let mut freed = 0;
    for round in 1..=GC_ROUNDS_MAX {
        let scanned = scan_tables(inner, tree)?;
        let files: Vec<BlobGarbageStats> = match round {
            GC_ROUNDS_MAX => scanned.files.iter().map(|file| file.without_hidden()).collect(),
            _ => scanned.files.clone(),
        };
        freed += match next_blob_gc_step(&files, goal) {
            BlobGcStep::Done => break,
            BlobGcStep::CompactTables => compact_hidden(inner, partition, through, &scanned)?,
            BlobGcStep::RewriteFiles(chosen) => rewrite_files(inner, partition, chosen)?,
        };
    }
    partition.tree()?;
    remove_obsolete_files(inner);
    Ok(freed)
}

/// Merges tables until none of the records up to `through` is hidden in one by another.
fn compact_hidden(
    inner: &DbInner,
    partition: &Arc<PartitionState>,
    through: SeqNo,
    scanned: &BlobScanResult,
) -> Result<u64> {
    let mut freed = 0;
    while let Some(report) = compact_step(inner, partition, |tree| tree.compact_to_bottom(through, inner))? {
        freed += report.bytes_freed;
    }
    // What lay at the bottom before and was kept for readers that are gone; most of it was merged just now.
    while let Some(report) =
        compact_step(inner, partition, |tree| tree.rewrite_bottom_tables(&scanned.tables_hiding_garbage, inner))?
    {
        freed += report.bytes_freed;
    }
    Ok(freed)
}

fn compact_step(
    inner: &DbInner,
    partition: &Arc<PartitionState>,
    work: impl Fn(&LsmTree) -> Result<Option<TaskReport>>,
) -> Result<Option<TaskReport>> {
    inner.writer()?;
    let mut done = None;
    run_lsm_task(inner, partition, Task::Compact, |tree| {
        done = work(tree)?;
        Ok(done.unwrap_or_default())
    })?;
    Ok(done)
}

/// Collects all these files; one that is damaged fails it in the end, and the others are collected all the same.
fn rewrite_files(inner: &DbInner, partition: &Arc<PartitionState>, mut chosen: Vec<FileNumber>) -> Result<u64> {
    let (mut freed, mut failed) = (0, Ok(()));
    while !chosen.is_empty() {
        inner.writer()?;
        let tree = partition.lsm()?;
        match run_lsm_task(inner, partition, Task::BlobGc, |tree| tree.run_blob_gc(&chosen, true, inner)) {
            Ok(report) => freed += report.bytes_freed,
            Err(error) => {
                let damaged = tree.damaged_blob_file(&error).filter(|file| chosen.contains(file));
                let Some(damaged) = damaged else { return Err(error) };
                chosen.retain(|file| *file != damaged);
                failed = failed.and(Err(error));
            }
        }
        let version = tree.version();
        chosen.retain(|file| version.blobs().contains(*file));
    }
    failed.map(|()| freed)
}

//! A compaction in progress, and the state that is kept between tasks.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use crate::base::version_edit::{FileNumber, TableMeta};
use crate::base::{Result, SeqNo};
use crate::iter::InternalIter;
use crate::iter::merge::MergingIter;
use crate::lsm::blob_gc::job::BlobGcJob;
use crate::lsm::compaction::picker::{CompactPointers, PickedCompaction};
use crate::lsm::compaction_iter::{CompactionIter, OlderRuns, VersionDropRules};
use crate::lsm::options::LsmOptions;
use crate::lsm::pending_outputs::PendingOutputs;
use crate::lsm::read::RunIter;
use crate::lsm::table_handle::{TableHandle, TreeContext};
use crate::lsm::table_output::{FinishedOutputs, OutputOptions, TableOutputWriter};
use crate::lsm::version::{HasTableMeta, SortedRun, Version};

/// Does what a [`PickedCompaction`] that is no move says, a step at a time; it may lie paused between two steps while
/// flushes add to level 0. Dropped unfinished, it leaves no file behind.
pub(crate) struct CompactionJob {
    pub(crate) picked: PickedCompaction,
    /// The oldest read point it knows.
    pub(crate) oldest_snapshot: SeqNo,
    pub(crate) bytes_read: u64,
    state: CompactionJobState,
}

enum CompactionJobState {
    Merging(Box<CompactionIter>),
    /// `PendingOutputs` until an edit may name the tables.
    Finished(Vec<TableMeta>, Option<PendingOutputs>),
}

impl CompactionJob {
    /// `points`: what readers saw when the plan was made, ascending.
    pub(crate) fn new(
        context: &Arc<TreeContext>,
        options: &LsmOptions,
        version: &Version<TableHandle>,
        plan: PickedCompaction,
        snapshots: Vec<SeqNo>,
        created_ms: u64,
    ) -> CompactionJob {
        let chosen: HashSet<FileNumber> =
            plan.start_level_inputs.iter().chain(&plan.output_level_inputs).copied().collect();
        let order = &context.order;
        let mut bytes_read = 0;
        let mut children: Vec<Box<dyn InternalIter>> = Vec::new();
        let levels = if plan.start_level == plan.output_level {
            vec![plan.output_level]
        } else {
            vec![plan.start_level, plan.output_level]
        };
        for run in levels.iter().flat_map(|&level| &version.level(level).runs) {
            let inputs = run.tables().iter().filter(|table| chosen.contains(&table.meta().number)).map(Arc::clone);
            let inputs: Vec<Arc<TableHandle>> = inputs.collect();
            bytes_read += inputs.iter().map(|table| table.meta().size).sum::<u64>();
            if !inputs.is_empty() {
                children.push(Box::new(RunIter::new(Arc::new(SortedRun::new(inputs, order)), context, false)));
            }
        }
        let stay = version.level(plan.output_level).iter().filter(|table| !chosen.contains(&table.meta().number));
        let output = OutputOptions {
            table: options.table_options(plan.output_level),
            target_file_size: options.compaction.target_file_size,
            created_ms,
            separation: None, // what stood in a table when it was flushed stays there
            output_level_boundaries: stay.map(|table| table.meta().smallest_key.0.clone()).collect(),
        };
        let cursor = MergingIter::new(order.clone(), children);
        let retain = VersionDropRules::new(snapshots);
        let oldest_point = retain.oldest_snapshot();
        let older = OlderRuns::new(order.clone(), version.runs_below(plan.output_level));
        let output = TableOutputWriter::new(Arc::clone(context), output);
        let rewrite = CompactionIter::new(cursor, order.clone(), retain, older, true, output);
        CompactionJob {
            picked: plan,
            oldest_snapshot: oldest_point,
            bytes_read,
            state: CompactionJobState::Merging(Box::new(rewrite)),
        }
    }

    /// Goes on for about `budget` bytes; true when all tables are written and durable. After a failure it must be
    /// dropped.
    pub(crate) fn step(&mut self, budget: u64) -> Result<bool> {
        let CompactionJobState::Merging(rewrite) = &mut self.state else { return Ok(true) };
        if !rewrite.step(budget)? {
            return Ok(false);
        }
        let CompactionJobState::Merging(rewrite) =
            std::mem::replace(&mut self.state, CompactionJobState::Finished(Vec::new(), None))
        else {
            unreachable!("it was merging a moment ago");
        };
        let FinishedOutputs { tables, pending, .. } = rewrite.finish()?;
        self.state = CompactionJobState::Finished(tables, Some(pending));
        Ok(true)
    }

    /// What it has written, once [`step`](CompactionJob::step) has said true. An edit may name it from now on, so it
    /// stays.
    pub(crate) fn take_outputs(&mut self) -> &[TableMeta] {
        let CompactionJobState::Finished(tables, pending) = &mut self.state else { return &[] };
        if let Some(pending) = pending.take() {
            pending.release();
        }
        tables
    }
}

/// What compaction remembers from task to task.
pub(crate) struct CompactionState {
    pub(crate) compact_pointers: CompactPointers,
    /// The oldest snapshot when a task last read it; the maximum number if none has.
    pub(crate) oldest_snapshot: SeqNo,
    /// A merge that yielded.
    pub(crate) paused_compaction: Option<CompactionJob>,
    /// A collection of blob files that yielded.
    pub(crate) paused_blob_gc: Option<BlobGcJob>,
    /// Blob files that collection by itself leaves alone until the database is opened again: they could not be read.
    pub(crate) damaged_blob_files: BTreeSet<FileNumber>,
}

impl Default for CompactionState {
    fn default() -> CompactionState {
        CompactionState {
            compact_pointers: CompactPointers::default(),
            oldest_snapshot: SeqNo::MAX,
            paused_compaction: None,
            paused_blob_gc: None,
            damaged_blob_files: BTreeSet::new(),
        }
    }
}

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

/// Runs a [`PickedCompaction`] that is not a trivial move, one step at a time. It may pause between two steps while
/// flushes add runs to level 0. An unfinished job that is dropped leaves no file.
pub(crate) struct CompactionJob {
    pub(crate) picked: PickedCompaction,
    /// The oldest snapshot when the job was created; 0 if there was none.
    pub(crate) oldest_snapshot: SeqNo,
    pub(crate) bytes_read: u64,
    state: CompactionJobState,
}

enum CompactionJobState {
    Merging(Box<CompactionIter>),
    /// The `PendingOutputs` are taken once an edit may name the tables.
    Finished(Vec<TableMeta>, Option<PendingOutputs>),
}

impl CompactionJob {
    /// `snapshots`: those of all readers when the compaction was picked, ascending.
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
            separation: None, // values that are stored in tables stay there
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

    /// Continues for about `budget` bytes; true when all tables are written and durable. A job that has failed must be
    /// dropped.
    pub(crate) fn step(&mut self, budget: u64) -> Result<bool> {
        let CompactionJobState::Merging(rewrite) = &mut self.state else { return Ok(true) };
        if !rewrite.step(budget)? {
            return Ok(false);
        }
        let CompactionJobState::Merging(rewrite) =
            std::mem::replace(&mut self.state, CompactionJobState::Finished(Vec::new(), None))
        else {
            unreachable!("the state was checked above");
        };
        let FinishedOutputs { tables, pending, .. } = rewrite.finish()?;
        self.state = CompactionJobState::Finished(tables, Some(pending));
        Ok(true)
    }

    /// The written tables, after [`step`](CompactionJob::step) has returned true. They are kept from now on, because an
    /// edit may name them.
    pub(crate) fn take_outputs(&mut self) -> &[TableMeta] {
        let CompactionJobState::Finished(tables, pending) = &mut self.state else { return &[] };
        if let Some(pending) = pending.take() {
            pending.release();
        }
        tables
    }
}

/// The state that compaction and blob GC keep between tasks.
pub(crate) struct CompactionState {
    pub(crate) compact_pointers: CompactPointers,
    /// The oldest snapshot when a task last read it; the maximum number if none has.
    pub(crate) oldest_snapshot: SeqNo,
    /// A compaction that has yielded.
    pub(crate) paused_compaction: Option<CompactionJob>,
    /// A blob GC that has yielded.
    pub(crate) paused_blob_gc: Option<BlobGcJob>,
    /// Blob files that could not be read. Background blob GC ignores them until the database is reopened.
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

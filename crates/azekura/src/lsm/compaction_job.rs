//! Runs a picked compaction, and what a tree keeps between two tasks.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use crate::base::version_edit::FileNumber;
use crate::base::{Result, SeqNo};
use crate::iter::InternalIter;
use crate::lsm::blob_gc::BlobGcJob;
use crate::lsm::compaction_filter::AppliedFilter;
use crate::lsm::compaction_iter::{AppliedMergeOperator, CompactionIter};
use crate::lsm::compaction_picker::{CompactPointers, PickedCompaction};
use crate::lsm::options::LsmOptions;
use crate::lsm::output::{OutputOptions, PendingOutputs, TableOutputWriter};
use crate::lsm::read::RunIter;
use crate::lsm::table_handle::TableHandle;
use crate::lsm::tree_context::TreeContext;
use crate::lsm::version::{HasTableMeta, SortedRun, Version};
use crate::table::format::{JobOrigin, TableOrigin};

/// Runs a [`PickedCompaction`] that is not a trivial move, one step at a time. It may pause between two steps while
/// flushes add runs to level 0. A job that is dropped before an edit may name its tables leaves no file.
pub(crate) struct CompactionJob {
    pub(crate) picked: PickedCompaction,
    /// The oldest snapshot when the job was created; 0 if there was none.
    pub(crate) oldest_snapshot: SeqNo,
    pub(crate) bytes_read: u64,
    /// `None` once all tables are written and durable.
    iter: Option<CompactionIter>,
    output: TableOutputWriter,
}

impl CompactionJob {
    /// `snapshots`: those of all readers when the compaction was picked, ascending. The version has every record up to
    /// `flushed_through`.
    pub(crate) fn new(
        context: &Arc<TreeContext>,
        options: &LsmOptions,
        (version, flushed_through): (&Version<TableHandle>, SeqNo),
        picked: PickedCompaction,
        snapshots: Vec<SeqNo>,
        (filter, merge): (Option<AppliedFilter>, Option<AppliedMergeOperator>),
        created_ms: u64,
    ) -> CompactionJob {
        debug_assert!(!picked.trivial_move, "a trivial move rewrites no table");
        debug_assert!(snapshots.is_sorted(), "snapshots are in ascending order");
        let chosen: HashSet<FileNumber> =
            picked.start_level_inputs.iter().chain(&picked.output_level_inputs).copied().collect();
        let mut bytes_read = 0;
        let mut inputs: Vec<Box<dyn InternalIter>> = Vec::new();
        let mut levels = vec![picked.start_level, picked.output_level];
        levels.dedup();
        for run in levels.iter().flat_map(|&level| &version.level(level).runs) {
            let tables = run.tables().iter().filter(|table| chosen.contains(&table.meta().number)).map(Arc::clone);
            let tables: Vec<Arc<TableHandle>> = tables.collect();
            bytes_read += tables.iter().map(|table| table.meta().size).sum::<u64>();
            if !tables.is_empty() {
                inputs.push(Box::new(RunIter::new(Arc::new(SortedRun::new(tables, &context.order)), context, false)));
            }
        }
        let stay = version.level(picked.output_level).iter().filter(|table| !chosen.contains(&table.meta().number));
        let output = OutputOptions {
            table: options.table_options(picked.output_level),
            target_file_size: options.compaction.target_file_size,
            separation: None, // values that are stored in tables stay there
            new_value_separation: options.kv_separation.clone(),
            output_level_boundaries: stay.map(|table| table.meta().smallest_key.0.clone()).collect(),
        };
        let oldest_snapshot = snapshots.first().copied().unwrap_or(SeqNo::ZERO);
        let older_runs = version.runs_below(picked.output_level);
        let range_tombstones = Arc::clone(version.range_tombstones());
        let mut outputs = PendingOutputs::new(context, created_ms);
        // The set has every range delete up to its newest one.
        outputs.range_deletes_applied_through = range_tombstones.largest_seqno().min(oldest_snapshot);
        let inputs_replaced: BTreeSet<FileNumber> = chosen.into_iter().collect();
        outputs.origin = TableOrigin::Compaction(JobOrigin::new(flushed_through, inputs_replaced));
        CompactionJob {
            picked,
            oldest_snapshot,
            bytes_read,
            iter: Some(
                CompactionIter::new(&context.order, inputs, snapshots, older_runs, range_tombstones, true)
                    .with_components(filter, merge)
                    .with_expiry(context.snapshots.expiry_limits()),
            ),
            output: TableOutputWriter::new(outputs, output),
        }
    }

    /// Continues for about `budget` bytes; true when all tables are written and durable. A job that has failed must be
    /// dropped.
    pub(crate) fn step(&mut self, budget: u64) -> Result<bool> {
        let Some(iter) = &mut self.iter else { return Ok(true) };
        if !iter.step(budget, &mut self.output)? {
            return Ok(false);
        }
        let read = iter.entries_read();
        self.iter = None;
        self.output.outputs.finish()?;
        if cfg!(debug_assertions) {
            read.check_written(&self.output.outputs);
        }
        Ok(true)
    }

    pub(crate) fn outputs(&mut self) -> &mut PendingOutputs {
        &mut self.output.outputs
    }

    /// Makes its tables obsolete.
    pub(crate) fn discard(self) {
        self.output.outputs.discard();
    }
}

/// The state that compaction and blob GC keep between tasks.
#[derive(Default)]
pub(crate) struct CompactionState {
    pub(crate) compact_pointers: CompactPointers,
    /// The oldest snapshot when a task last read it. If `None`, every tombstone may be droppable.
    pub(crate) oldest_snapshot: Option<SeqNo>,
    /// A compaction that has yielded.
    pub(crate) paused_compaction: Option<CompactionJob>,
    /// A blob GC that has yielded.
    pub(crate) paused_blob_gc: Option<BlobGcJob>,
    /// Blob files that could not be read. Background blob GC ignores them until the database is reopened.
    pub(crate) damaged_blob_files: BTreeSet<FileNumber>,
}

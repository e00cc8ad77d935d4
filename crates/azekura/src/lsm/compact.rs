//! Runs compactions on a tree.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use crate::base::sync::lock;
use crate::base::version_edit::{FileNumber, PartitionEdit, TableMeta};
use crate::base::{Error, Result, SeqNo};
use crate::engine::{EngineHost, TaskReport};
use crate::lsm::compaction_filter::{AppliedFilter, CompactionFilter};
use crate::lsm::compaction_iter::AppliedMergeOperator;
use crate::lsm::compaction_job::CompactionJob;
use crate::lsm::compaction_picker::{CompactionPicker, PickedCompaction};
use crate::lsm::range_delete::tables_to_estimate;
use crate::lsm::read::{ReadAheadBlobResolver, SuperVersion};
use crate::lsm::table_handle::TableHandle;
use crate::lsm::tree::{LsmTree, TaskLockGuard};
use crate::lsm::version::{BOTTOM_LEVEL, HasTableMeta, VersionChange};

/// Number of bytes after which a compaction checks whether it should yield. Tests compact less data.
const STEP_BYTES: u64 = if cfg!(test) { 8 << 10 } else { 1 << 20 };

impl LsmTree {
    /// Runs one compaction, or a part of one if the host wants it to yield. With `forced`, it waits while another one
    /// runs.
    pub(crate) fn compact(&self, forced: bool, host: &dyn EngineHost) -> Result<TaskReport> {
        if let Some(report) = self.drop_whole_tables(forced, host)? {
            return Ok(report);
        }
        self.estimate_covered_bytes();
        Ok(self.compact_with(forced, host, |picker| picker.pick_compaction(forced))?.unwrap_or_default())
    }

    /// Runs the compaction that `choose` returns, or resumes a paused one. `None` if there is nothing to do, or if
    /// another compaction runs and `wait` is false.
    pub(crate) fn compact_with(
        &self,
        wait: bool,
        host: &dyn EngineHost,
        choose: impl FnOnce(&CompactionPicker<'_, TableHandle>) -> Option<PickedCompaction>,
    ) -> Result<Option<TaskReport>> {
        let Some(occupied) = self.compaction_lock.acquire(wait) else { return Ok(None) };
        self.check_open()?;
        let paused = lock(&self.compaction_state).paused_compaction.take();
        let mut job = match paused {
            Some(job) => job,
            None => {
                let snapshots = host.snapshot_seqnos();
                let now = self.current.get();
                let oldest_snapshot = snapshots.first().copied().unwrap_or(SeqNo::ZERO);
                let Some(plan) = self.with_picker(&now, oldest_snapshot, choose) else { return Ok(None) };
                if plan.trivial_move {
                    return self.run_trivial_move(&now, &plan, &occupied, host).map(Some);
                }
                let (options, merge) = (self.options(), self.applied_merge_operator(&now));
                let components = (self.applied_filter(&now, plan.output_level), merge);
                let version = (&*now.version, now.flushed_through);
                CompactionJob::new(&self.context, &options, version, plan, snapshots, components, host.now_ms())
            }
        };
        while !job.step(STEP_BYTES)? {
            self.check_open()?;
            if host.should_yield() {
                let report = TaskReport { level: job.picked.output_level, ..TaskReport::default() };
                self.pause_compaction(job, &occupied);
                return Ok(Some(report));
            }
        }
        self.install_compaction(job, &occupied, host).map(Some)
    }

    /// Keeps a compaction for the next task. `held`: the guard of `compaction_lock`.
    fn pause_compaction(&self, job: CompactionJob, held: &TaskLockGuard<'_>) {
        debug_assert!(held.holds(&self.compaction_lock), "a compaction that is paused was running");
        let before = lock(&self.compaction_state).paused_compaction.replace(job);
        debug_assert!(before.is_none(), "a tree has one paused compaction");
    }

    /// Resumes a paused compaction whose edit could not be committed, because an edit may name its tables. `None` if
    /// there is none.
    ///
    /// # Errors
    /// Those of a compaction.
    pub(crate) fn finish_kept_compaction(&self, host: &dyn EngineHost) -> Result<Option<TaskReport>> {
        let is_kept = |job: &mut CompactionJob| job.outputs().is_kept();
        let has_kept = lock(&self.compaction_state).paused_compaction.as_mut().is_some_and(is_kept);
        if has_kept { self.compact_with(true, host, |_| None) } else { Ok(None) }
    }

    /// Sets the filter of compactions that begin from now on.
    pub(crate) fn set_compaction_filter(&self, filter: Arc<dyn CompactionFilter>) {
        *lock(&self.compaction_filter) = Some(filter);
    }

    fn applied_filter(&self, now: &SuperVersion, level: u8) -> Option<AppliedFilter> {
        let filter = Arc::clone(lock(&self.compaction_filter).as_ref()?);
        Some(AppliedFilter {
            filter,
            partition: self.context.name.clone(),
            level,
            snapshots: Arc::clone(&self.context.snapshots),
            blobs: Box::new(ReadAheadBlobResolver::new(now)),
        })
    }

    pub(crate) fn applied_merge_operator(&self, now: &SuperVersion) -> Option<AppliedMergeOperator> {
        let operator = Arc::clone(self.merge_operator.get()?);
        Some(AppliedMergeOperator { operator, blobs: Box::new(ReadAheadBlobResolver::new(now)) })
    }

    /// Prepares for a compaction of all tables. If there is a compaction filter, waits for the running compaction and
    /// discards a paused one, which may have begun without the filter, and returns a number: the filter was not asked
    /// about the tables below it. Otherwise returns 0.
    pub(crate) fn first_filtered_table(&self) -> FileNumber {
        if lock(&self.compaction_filter).is_none() {
            return FileNumber(0);
        }
        let _no_compaction_runs = self.compaction_lock.lock();
        let paused = lock(&self.compaction_state).paused_compaction.take();
        paused.into_iter().for_each(CompactionJob::discard);
        self.context.new_file_id()
    }

    /// Whether a compaction task has work.
    pub(crate) fn needs_compaction(&self, forced: bool) -> bool {
        let (is_paused, known) = {
            let state = lock(&self.compaction_state);
            (state.paused_compaction.is_some(), state.oldest_snapshot)
        };
        // Snapshots may have ended since.
        let oldest_snapshot = known.map_or(SeqNo::MAX, |known| known.max(self.context.snapshots.oldest()));
        let now = self.current.get();
        let wanted = is_paused
            || self.has_droppable_tables(&now)
            || tables_to_estimate(&now.version, &self.context.order).next().is_some()
            || self.with_picker(&now, oldest_snapshot, |picker| picker.pick_compaction(forced).is_some());
        if forced && !wanted {
            // Snapshots may be released until the next call. Check the tables again then whose tombstones could not be
            // dropped now.
            lock(&self.compaction_state).oldest_snapshot = None;
        }
        wanted
    }

    /// Tables of the bottom level from which a rewrite can drop tombstones or superseded versions, and all that are
    /// below `first_filtered`. Opens all tables that may have entries to drop, because their properties are needed.
    ///
    /// # Errors
    /// Those of opening tables.
    pub(crate) fn bottom_tables_to_clean(
        &self,
        snapshots: &[SeqNo],
        first_filtered: FileNumber,
    ) -> Result<BTreeSet<FileNumber>> {
        let now = self.current.get();
        for table in now.version.level(BOTTOM_LEVEL).iter().filter(|table| table.meta().largest_seqno > SeqNo::ZERO) {
            table.table()?;
        }
        let oldest_snapshot = snapshots.first().copied().unwrap_or(SeqNo::ZERO);
        let mut tables = self.with_picker(&now, oldest_snapshot, |picker| picker.bottom_tables_to_clean());
        let bottom = now.version.level(BOTTOM_LEVEL).iter().map(|table| table.meta().number);
        tables.extend(bottom.filter(|number| *number < first_filtered));
        Ok(tables)
    }

    /// Calls `choose` with the state of the tree, and remembers the oldest snapshot.
    fn with_picker<R>(
        &self,
        now: &SuperVersion,
        oldest_snapshot: SeqNo,
        choose: impl FnOnce(&CompactionPicker<'_, TableHandle>) -> R,
    ) -> R {
        let options = self.options();
        let expiry_limits = self.expiry_limits_of(&now.version);
        let mut state = lock(&self.compaction_state);
        state.oldest_snapshot = Some(oldest_snapshot);
        choose(&CompactionPicker {
            version: &now.version,
            order: &self.context.order,
            options: &options,
            compact_pointers: &state.compact_pointers,
            oldest_snapshot,
            expiry_limits: &expiry_limits,
            idle: now.active.is_empty() && now.sealed.is_empty(),
        })
    }

    /// Moves tables to another level without rewriting them. `held`: the guard of `compaction_lock`.
    fn run_trivial_move(
        &self,
        now: &SuperVersion,
        plan: &PickedCompaction,
        held: &TaskLockGuard<'_>,
        host: &dyn EngineHost,
    ) -> Result<TaskReport> {
        debug_assert!(held.holds(&self.compaction_lock), "no other compaction runs");
        debug_assert!(plan.trivial_move, "a compaction that rewrites tables is a job");
        let level = plan.output_level;
        let moved = plan.start_level_inputs.iter();
        self.commit_edits(moved.map(|&table| PartitionEdit::TableMoved { table, level }), host)?;
        let tables = tables_with_ids(now, plan.start_level, &plan.start_level_inputs);
        debug_assert_eq!(tables.len(), plan.start_level_inputs.len(), "the version has the tables to be moved");
        self.set_compact_pointer(plan, &tables);
        self.apply_change(VersionChange {
            removed: plan.start_level_inputs.iter().copied().collect(),
            added: tables.into_iter().map(|table| (level, table)).collect(),
            ..VersionChange::default()
        });
        Ok(TaskReport { level, tables: plan.start_level_inputs.len() as u64, ..TaskReport::default() })
    }

    /// Replaces the inputs of a compaction by its outputs. If the edit cannot be committed, the compaction is kept,
    /// because it is unknown whether the manifest names its tables. `held`: the guard of `compaction_lock`.
    fn install_compaction(
        &self,
        mut job: CompactionJob,
        held: &TaskLockGuard<'_>,
        host: &dyn EngineHost,
    ) -> Result<TaskReport> {
        let (plan, bytes_read) = (job.picked.clone(), job.bytes_read);
        let level = plan.output_level;
        let inputs: HashSet<FileNumber> =
            plan.start_level_inputs.iter().chain(&plan.output_level_inputs).copied().collect();
        let tables = job.outputs().tables.clone();
        // Taken before the version: a pointer that is not counted any more is in the tables of the version.
        let counted = self.direct_blobs.files_with_pointers();
        let now = self.current.get();
        let upper = tables_with_ids(&now, plan.start_level, &plan.start_level_inputs);
        let obsolete = [&upper[..], &tables_with_ids(&now, plan.output_level, &plan.output_level_inputs)].concat();
        debug_assert_eq!(
            obsolete.len(),
            inputs.len(),
            "the version has the inputs, because only flushes ran meanwhile"
        );
        let input_bytes: u64 = obsolete.iter().map(|table| table.meta().size).sum();
        debug_assert_eq!(bytes_read, input_bytes, "a compaction reads its inputs");
        self.check_outputs(&now, level, &tables, &inputs)?;
        // A flush does not refer to an existing file without counted pointers, so a file without references now has
        // none later.
        let lost = obsolete.iter().flat_map(|table| &table.meta().blob_usage);
        let new_files: Vec<FileNumber> = job.outputs().blobs.iter().map(|file| file.number).collect();
        let gained = tables.iter().flat_map(|table| &table.blob_usage);
        let gained = gained.filter(|usage| !new_files.contains(&usage.logical_file));
        let dead = now.version.blobs().unreferenced(&counted, gained, lost);
        let removed = inputs.iter().map(|&table| PartitionEdit::TableRemoved { table });
        let dropped = dead.iter().map(|file| PartitionEdit::BlobFileRemoved { file: file.meta().number });
        let turn = self.version_change_lock.lock();
        let range_tombstones = self.range_tombstones_after_compaction(&obsolete, &tables, &turn);
        let changed = range_tombstones.as_deref().map(|set| self.range_tombstones_edit(set, &turn));
        if let Err(error) =
            self.commit_edits(removed.chain(job.outputs().edits(level)).chain(dropped).chain(changed), host)
        {
            self.pause_compaction(job, held);
            return Err(error);
        }
        let bytes_written = tables.iter().map(|table| table.size).sum();
        let bytes_freed = dead.iter().map(|file| file.meta().size).sum();
        let report = TaskReport { level, tables: tables.len() as u64, bytes_read, bytes_written, bytes_freed };
        self.set_compact_pointer(&plan, &upper);
        obsolete.iter().for_each(|table| table.mark_obsolete());
        dead.iter().for_each(|file| file.mark_obsolete());
        let read = self.options().read_options(level);
        let handle = |meta| TableHandle::new(meta, Some(job.oldest_snapshot), Arc::clone(&self.context), read);
        let blobs_removed = dead.iter().map(|file| file.meta().number).collect();
        let added: Vec<_> = tables.into_iter().map(|meta| (level, handle(meta))).collect();
        for (_, table) in
            added.iter().filter(|(level, table)| *level == BOTTOM_LEVEL && table.meta().largest_seqno > SeqNo::ZERO)
        {
            // Open the table, because its properties state which superseded versions it has. If that fails, a later
            // read opens it.
            drop(table.table());
        }
        let blobs = std::mem::take(&mut job.outputs().blobs);
        let blobs_added = blobs.into_iter().map(|meta| self.context.blob_handle(meta)).collect();
        self.apply_change(VersionChange {
            removed: inputs,
            added,
            blobs_added,
            blobs_removed,
            range_tombstones,
            ..VersionChange::default()
        });
        Ok(report) // the obsolete tables are dropped here, without a lock
    }

    /// Checks that the outputs overlap no table that stays on their level.
    ///
    /// # Errors
    /// `Corruption` if an input has keys outside of the range that the manifest states, or the comparator contradicts
    /// itself. The next open would refuse the outputs.
    fn check_outputs(
        &self,
        now: &SuperVersion,
        level: u8,
        outputs: &[TableMeta],
        inputs: &HashSet<FileNumber>,
    ) -> Result<()> {
        let Some(run) = now.version.run(level) else { return Ok(()) };
        for output in outputs {
            let overlapping = &run.tables()[run.overlapping_tables(output, &self.context.order)];
            if let Some(other) = overlapping.iter().find(|table| !inputs.contains(&table.meta().number)) {
                let message = format!(
                    "a compaction into level {level} has keys of table {}, which is no input",
                    other.meta().number.0
                );
                return Err(Error::corruption(message));
            }
        }
        Ok(())
    }

    fn set_compact_pointer(&self, plan: &PickedCompaction, upper: &[Arc<TableHandle>]) {
        debug_assert!(
            self.context.order.is_custom()
                || plan.start_level == 0
                || upper.is_sorted_by(|a, b| a.meta().largest_key.0 < b.meta().smallest_key.0),
            "the tables of a level below level 0 are in key order"
        );
        if let Some(last) = upper.last().filter(|_| plan.start_level > 0 && plan.start_level != plan.output_level) {
            lock(&self.compaction_state).compact_pointers[usize::from(plan.start_level)] =
                Some(last.meta().largest_key.0.clone());
        }
    }
}

/// The tables of `level` with these numbers.
fn tables_with_ids(now: &SuperVersion, level: u8, ids: &[FileNumber]) -> Vec<Arc<TableHandle>> {
    now.version.level(level).iter().filter(|table| ids.contains(&table.meta().number)).map(Arc::clone).collect()
}

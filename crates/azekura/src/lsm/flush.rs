//! Flush: writes sealed memtables to a run on level 0.
//!
//! If the commit of the edit fails, it is unknown whether the manifest contains it. Then the files must stay, and a
//! retry of the flush commits the same edit. (A host whose manifest may contain a failed edit refuses all later ones.)

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::base::sync::lock;
use crate::base::version_edit::{FileNumber, PartitionEdit};
use crate::base::{Result, SeqNo};
use crate::engine::{EngineHost, TaskReport};
use crate::iter::InternalIter;
use crate::iter::range_tombstones::RangeTombstones;
use crate::lsm::blob_map::BlobHandle;
use crate::lsm::compaction_iter::CompactionIter;
use crate::lsm::direct_file::{DirectBlobFile, without_files};
use crate::lsm::output::{OutputOptions, PendingOutputs, TableOutputWriter, UncommittedFlush};
use crate::lsm::read::SuperVersion;
use crate::lsm::table_handle::TableHandle;
use crate::lsm::tree::{LsmTree, TaskLockGuard};
use crate::lsm::version::VersionChange;
use crate::memtable::Memtable;
use crate::table::format::{JobOrigin, TableOrigin};

impl LsmTree {
    /// Writes all sealed memtables as one run. `wait`: whether to wait while another flush runs.
    pub(crate) fn flush(&self, wait: bool, host: &dyn EngineHost) -> Result<TaskReport> {
        let Some(occupied) = self.flush_lock.acquire(wait) else { return Ok(TaskReport::default()) };
        self.flush_exclusively(&occupied, host)
    }

    /// Writes all sealed memtables as one run. `held`: the guard of the flush lock.
    pub(crate) fn flush_exclusively(&self, held: &TaskLockGuard<'_>, host: &dyn EngineHost) -> Result<TaskReport> {
        debug_assert!(held.holds(&self.flush_lock), "the guard is that of the flush lock");
        self.check_open()?;
        let uncommitted = lock(&self.uncommitted_flush).take();
        let Some(mut written) =
            uncommitted.map_or_else(|| self.write_sealed_memtables(host), |written| Ok(Some(written)))?
        else {
            return Ok(TaskReport::default());
        };
        let turn = self.version_change_lock.lock();
        let range_tombstones = self.range_tombstones_after_flush(&written, &turn);
        if let Err(error) = self.commit_flush(&mut written, range_tombstones.as_deref(), &turn, host) {
            // Files that an edit may name are kept, and so is the flush.
            if written.outputs.is_kept() {
                let before = lock(&self.uncommitted_flush).replace(written);
                debug_assert!(before.is_none(), "a tree has one uncommitted flush");
            }
            return Err(error);
        }
        let bytes_written = written.bytes_written;
        let tables = written.outputs.tables.len() as u64;
        let report = TaskReport { level: 0, tables, bytes_written, ..TaskReport::default() };
        self.install_flush(written, range_tombstones);
        Ok(report)
    }

    /// `range_tombstones`: the new set, if it changes.
    fn commit_flush(
        &self,
        written: &mut UncommittedFlush,
        range_tombstones: Option<&RangeTombstones>,
        turn: &TaskLockGuard<'_>,
        host: &dyn EngineHost,
    ) -> Result<()> {
        // Through the end of the memtables, not of the output, because a dropped tombstone is a record that becomes
        // permanent too.
        host.sync_wal_through(written.through)?;
        let through = self.max_flushed_seqno(written, host);
        let flushed = PartitionEdit::Flushed { through };
        let changed = range_tombstones.map(|set| self.range_tombstones_edit(set, turn));
        self.commit_edits(written.outputs.edits(0).chain(changed).chain([flushed]), host)
    }

    /// The sequence number up to which every record of the partition is in tables once `written` is installed, and up
    /// to which the WAL is durable. It may be above the last record of the partition. The higher it is, the less of a
    /// damaged WAL is needed.
    fn max_flushed_seqno(&self, written: &UncommittedFlush, host: &dyn EngineHost) -> SeqNo {
        // Taken before the memtables, so that every visible record that is not in tables is in one of them.
        let visible = host.snapshot_seqnos().last().copied().unwrap_or_default();
        let first = self.current.with(|now| {
            let is_written = |memtable: &Arc<Memtable>| written.sealed.iter().any(|other| Arc::ptr_eq(memtable, other));
            let others = now.sealed.iter().filter(|memtable| !is_written(memtable)).chain([&now.active]);
            others.filter(|memtable| !memtable.is_empty()).map(|memtable| memtable.smallest_seqno()).min()
        });
        // The number is 0 while the first record of a memtable is being inserted.
        debug_assert!(
            first.is_none_or(|first| first == SeqNo::ZERO || first > written.through),
            "the memtables that stay are newer than those of the flush"
        );
        let complete = first.map_or(visible, |first| visible.min(SeqNo(first.0.saturating_sub(1))));
        written.through.max(complete.min(host.wal_synced_through()))
    }

    fn write_sealed_memtables(&self, host: &dyn EngineHost) -> Result<Option<UncommittedFlush>> {
        let before = self.current.get();
        let Some(through) = before.sealed.iter().map(|memtable| memtable.largest_seqno()).max() else {
            return Ok(None);
        };
        debug_assert!(through > before.flushed_through, "sealed memtables are newer than the tables");
        let snapshots = host.snapshot_seqnos();
        debug_assert!(snapshots.is_sorted(), "snapshots are in ascending order");
        let empty = RangeTombstones::default();
        let range_tombstones =
            before.sealed.iter().filter(|memtable| memtable.has_range_deletes()).fold(empty, |merged, memtable| {
                merged.merged_with(&memtable.range_tombstones_arc(), &snapshots, &self.context.order)
            });
        let mut outputs = PendingOutputs::new(&self.context, host.now_ms());
        outputs.origin = TableOrigin::Flush(JobOrigin::new(through, []));
        let mut outputs = self.write_tables(&before, &snapshots, &range_tombstones, outputs)?;
        let bytes_written = outputs.finished_bytes();
        // Direct blob files that no flushed table refers to are left as they are. The others are finished. Their
        // acknowledged values are made durable with the WAL first, because a failure of that sync poisons the WAL for
        // all commits.
        let uses: BTreeSet<FileNumber> =
            outputs.tables.iter().flat_map(|table| &table.blob_usage).map(|uses| uses.logical_file).collect();
        let finished_direct_blobs = self
            .current
            .with(|now| uses.iter().filter_map(|id| now.direct_blobs.get(id)).map(Arc::clone).collect::<Vec<_>>());
        if !finished_direct_blobs.is_empty() {
            host.sync_wal_through(through)?;
        }
        for file in &finished_direct_blobs {
            self.finish_direct_blob_file(file, &mut outputs)?;
        }
        Ok(Some(UncommittedFlush {
            sealed: before.sealed,
            through,
            outputs,
            bytes_written,
            range_tombstones,
            snapshots,
            finished_direct_blobs,
        }))
    }

    /// Writes the sealed memtables of `before` to the tables of `outputs`. `range_tombstones`: those of these
    /// memtables; older ones cover no entry of them.
    fn write_tables(
        &self,
        before: &SuperVersion,
        snapshots: &[SeqNo],
        range_tombstones: &RangeTombstones,
        mut outputs: PendingOutputs,
    ) -> Result<PendingOutputs> {
        let options = self.options();
        let output = OutputOptions {
            table: options.table_options(0),
            target_file_size: options.compaction.target_file_size,
            output_level_boundaries: Vec::new(),
            separation: options.kv_separation.clone(),
            new_value_separation: options.kv_separation.clone(),
        };
        let oldest_snapshot = snapshots.first().copied().unwrap_or_default();
        outputs.range_deletes_applied_through = range_tombstones.largest_seqno().min(oldest_snapshot);
        let mut output = TableOutputWriter::new(outputs, output);
        let inputs = before.sealed.iter().map(|memtable| Box::new(memtable.iter()) as Box<dyn InternalIter>).collect();
        let older_runs = before.version.runs().map(Arc::clone).collect();
        let (order, range_tombstones) = (&self.context.order, Arc::new(range_tombstones.clone()));
        let merge = self.applied_merge_operator(before);
        let mut iter = CompactionIter::new(order, inputs, snapshots.to_vec(), older_runs, range_tombstones, false)
            .with_components(None, merge)
            .with_expiry(self.context.snapshots.expiry_limits());
        while !iter.step(u64::MAX, &mut output)? {}
        output.outputs.finish()?;
        if cfg!(debug_assertions) {
            iter.entries_read().check_written(&output.outputs);
        }
        Ok(output.outputs)
    }

    fn install_flush(&self, mut written: UncommittedFlush, range_tombstones: Option<Arc<RangeTombstones>>) {
        let read = self.options().read_options(0);
        let handle = |meta| TableHandle::new(meta, None, Arc::clone(&self.context), read);
        let flushed = std::mem::take(&mut written.outputs.tables).into_iter().map(handle).collect();
        let blobs = std::mem::take(&mut written.outputs.blobs);
        let added: Vec<Arc<BlobHandle>> = blobs.into_iter().map(|meta| self.context.blob_handle(meta)).collect();
        // A direct blob file whose values were copied to another file is not needed any more.
        let is_named = |direct_blobs: &DirectBlobFile| added.iter().any(|file| file.meta().number == direct_blobs.id);
        written
            .finished_direct_blobs
            .iter()
            .filter(|direct_blobs| !is_named(direct_blobs))
            .for_each(|direct_blobs| direct_blobs.handle.mark_obsolete());
        self.current.replace(|now| {
            debug_assert!(
                now.sealed.len() >= written.sealed.len()
                    && now.sealed.iter().rev().zip(written.sealed.iter().rev()).all(|(a, b)| Arc::ptr_eq(a, b)),
                "a flush replaces the oldest memtables"
            );
            let change = VersionChange { flushed, blobs_added: added, range_tombstones, ..VersionChange::default() };
            let stays = |memtable: &&Arc<Memtable>| !written.sealed.iter().any(|other| Arc::ptr_eq(memtable, other));
            SuperVersion {
                active: Arc::clone(&now.active),
                sealed: now.sealed.iter().filter(stays).map(Arc::clone).collect(),
                version: Arc::new(now.version.with_changes(change, &self.context.order)),
                direct_blobs: without_files(&now.direct_blobs, &written.finished_direct_blobs),
                flushed_through: now.flushed_through.max(written.through),
                has_older_range_deletes: false,
            }
        });
        // Released after the version is installed: if a pointer is not counted any more, the version has its reference.
        for (logical, count) in written.sealed.iter().flat_map(|memtable| memtable.blob_pointer_counts()) {
            self.release_pointers(logical, count);
        }
        self.drop_unused_direct_blob_file();
    }
}

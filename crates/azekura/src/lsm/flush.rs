//! Flush: writes sealed memtables to a run on level 0.
//!
//! If the commit of the edit fails, it is unknown whether the manifest contains it. Then the files must stay, and a
//! retry of the flush commits the same edit. (A host whose manifest may contain a failed edit refuses all later ones.)

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::base::version_edit::{FileNumber, VersionEdit};
use crate::base::{Result, SeqNo};
use crate::engine::{EngineHost, TaskReport};
use crate::iter::InternalIter;
use crate::iter::merge::MergingIter;
use crate::lsm::blob::direct_file::DirectBlobFile;
use crate::lsm::blob::handle::BlobHandle;
use crate::lsm::compaction_iter::{CompactionIter, OlderRuns, VersionDropRules};
use crate::lsm::metrics::LsmCounters;
use crate::lsm::options::LsmOptions;
use crate::lsm::pending_outputs::UncommittedFlush;
use crate::lsm::super_version::SuperVersion;
use crate::lsm::table_handle::TableHandle;
use crate::lsm::table_output::{FinishedOutputs, OutputOptions, TableOutputWriter};
use crate::lsm::task_lock::lock;
use crate::lsm::tree::LsmTree;
use crate::lsm::version::VersionChange;
use crate::memtable::Memtable;

impl LsmTree {
    /// Writes all sealed memtables as one run. `wait`: whether to wait while another flush runs.
    pub(crate) fn flush(&self, wait: bool, host: &dyn EngineHost) -> Result<TaskReport> {
        let Some(_occupied) = self.flush_lock.acquire(wait) else { return Ok(TaskReport::default()) };
        self.check_open()?;
        let uncommitted = lock(&self.uncommitted_flush).take();
        let Some(mut written) =
            uncommitted.map_or_else(|| self.write_sealed_memtables(host), |written| Ok(Some(written)))?
        else {
            return Ok(TaskReport::default());
        };
        if let Err(error) = self.commit_flush(&mut written, host) {
            // Files that an edit may name are kept, and so is the flush.
            if written.pending.is_none() {
                *lock(&self.uncommitted_flush) = Some(written);
            }
            return Err(error);
        }
        let bytes_written = written.blob_bytes + written.tables.iter().map(|table| table.size).sum::<u64>();
        let report =
            TaskReport { level: 0, tables: written.tables.len() as u64, bytes_written, ..TaskReport::default() };
        self.install_flush(written);
        LsmCounters::add(&self.counters.flushes, 1);
        LsmCounters::add(&self.counters.flushed_bytes, bytes_written);
        Ok(report)
    }

    fn commit_flush(&self, written: &mut UncommittedFlush, host: &dyn EngineHost) -> Result<()> {
        // Through the end of the memtables, not of the output, because a dropped tombstone is a record that becomes
        // permanent too.
        host.sync_wal_through(written.through)?;
        let partition = self.context.partition;
        let tables = written.tables.iter();
        let added = tables.map(|table| VersionEdit::TableAdded { partition, level: 0, table: table.clone() });
        let blobs = written.blobs.iter().map(|file| VersionEdit::BlobFileAdded { partition, file: file.clone() });
        let edits: Vec<VersionEdit> = blobs
            .chain(added)
            .chain([VersionEdit::Flushed { partition, through: self.max_flushed_seqno(written, host) }])
            .collect();
        self.check_open()?;
        if let Some(pending) = written.pending.take() {
            pending.release();
        }
        host.commit_edits(&edits)
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
        let complete = first.map_or(visible, |first| visible.min(SeqNo(first.0.saturating_sub(1))));
        written.through.max(complete.min(host.wal_synced_through()))
    }

    fn write_sealed_memtables(&self, host: &dyn EngineHost) -> Result<Option<UncommittedFlush>> {
        let before = self.current.get();
        let Some(through) = before.sealed.iter().map(|memtable| memtable.largest_seqno()).max() else {
            return Ok(None);
        };
        let mut rewrite = self.flush_iter(&before, &self.options(), host);
        while !rewrite.step(u64::MAX)? {}
        let FinishedOutputs { tables, mut blobs, mut pending } = rewrite.finish()?;
        let blob_bytes = blobs.iter().map(|file| file.size).sum();
        // Direct blob files that no flushed table refers to are left as they are. The others are finished. Their
        // acknowledged values are made durable with the WAL first, because a failure of that sync poisons the WAL for
        // all commits.
        let uses: BTreeSet<FileNumber> =
            tables.iter().flat_map(|table| &table.blob_usage).map(|uses| uses.logical_file).collect();
        let ended = self.current.with(|now| now.direct_blobs.select(&uses));
        if !ended.is_empty() {
            host.sync_wal_through(through)?;
            for file in &ended {
                blobs.push(self.finish_direct_blob_file(file, &mut pending, host.now_ms())?);
            }
        }
        let (sealed, pending) = (before.sealed, Some(pending));
        Ok(Some(UncommittedFlush { sealed, through, tables, blobs, blob_bytes, finished_direct_blobs: ended, pending }))
    }

    fn flush_iter(&self, before: &SuperVersion, options: &LsmOptions, host: &dyn EngineHost) -> CompactionIter {
        let context = &self.context;
        let children =
            before.sealed.iter().map(|memtable| Box::new(memtable.iter()) as Box<dyn InternalIter>).collect();
        let cursor = MergingIter::new(context.order.clone(), children);
        let retain = VersionDropRules::new(host.snapshot_seqnos());
        let older = OlderRuns::new(context.order.clone(), before.version.runs().map(Arc::clone).collect());
        let plan = OutputOptions {
            table: options.table_options(0),
            target_file_size: options.compaction.target_file_size,
            created_ms: host.now_ms(),
            output_level_boundaries: Vec::new(),
            separation: options.kv_separation.clone(),
        };
        CompactionIter::new(
            cursor,
            context.order.clone(),
            retain,
            older,
            false,
            TableOutputWriter::new(Arc::clone(context), plan),
        )
    }

    fn install_flush(&self, written: UncommittedFlush) {
        let read = self.options().read_options(0);
        let handle = |meta| TableHandle::new(meta, None, Arc::clone(&self.context), read);
        let flushed = written.tables.into_iter().map(handle).collect();
        let added: Vec<Arc<BlobHandle>> =
            written.blobs.into_iter().map(|meta| self.context.blob_handle(meta)).collect();
        // A direct blob file whose values were copied to another file is not needed any more.
        let is_named = |direct_blobs: &DirectBlobFile| added.iter().any(|file| file.meta().number == direct_blobs.id);
        written
            .finished_direct_blobs
            .iter()
            .filter(|direct_blobs| !is_named(direct_blobs))
            .for_each(|direct_blobs| direct_blobs.mark_obsolete());
        self.current.replace(|now| {
            let change = VersionChange { flushed, blobs_added: added, ..VersionChange::default() };
            let stays = |memtable: &&Arc<Memtable>| !written.sealed.iter().any(|other| Arc::ptr_eq(memtable, other));
            SuperVersion {
                active: Arc::clone(&now.active),
                sealed: now.sealed.iter().filter(stays).map(Arc::clone).collect(),
                version: Arc::new(now.version.with_changes(change, &self.context.order)),
                direct_blobs: now.direct_blobs.with_removed(&written.finished_direct_blobs),
                flushed_through: now.flushed_through.max(written.through),
            }
        });
        // Released after the version is installed: if a pointer is not counted any more, the version has its reference.
        self.release_flushed_pointers(&written.sealed);
    }
}

//! From sealed memtables to a run on level 0.
//!
//! When committing the edit fails, nobody knows whether it is in the manifest: then its files must stay, and the same
//! edit is committed when the flush is tried again. (A host whose manifest may hold a failed edit refuses all later
//! ones.)

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::base::edit::{Edit, FileId};
use crate::base::{Result, SeqNo};
use crate::cursor::Cursor;
use crate::cursor::merge::MergeCursor;
use crate::engine::{Host, TaskReport};
use crate::lsm::blobs::early::EarlyFile;
use crate::lsm::blobs::handle::BlobHandle;
use crate::lsm::handle::TableHandle;
use crate::lsm::metrics::Counters;
use crate::lsm::older::Older;
use crate::lsm::options::LsmOptions;
use crate::lsm::output::{Finished, Output, OutputPlan};
use crate::lsm::retain::Retain;
use crate::lsm::rewrite::Rewrite;
use crate::lsm::slot::lock;
use crate::lsm::super_version::SuperVersion;
use crate::lsm::tree::LsmTree;
use crate::lsm::version::Change;
use crate::lsm::written::Written;
use crate::memtable::Memtable;

impl LsmTree {
    /// Writes all memtables that are sealed now as one run. `wait` says what to do while another flush runs.
    pub(crate) fn flush(&self, wait: bool, host: &dyn Host) -> Result<TaskReport> {
        let Some(_occupied) = self.flushing.occupy(wait) else { return Ok(TaskReport::default()) };
        self.check_open()?;
        let uncommitted = lock(&self.uncommitted_flush).take();
        let Some(mut written) = uncommitted.map_or_else(|| self.write_sealed(host), |written| Ok(Some(written)))?
        else {
            return Ok(TaskReport::default());
        };
        if let Err(error) = self.commit_flush(&mut written, host) {
            // Files that an edit may name stay, and so does the edit.
            if written.unnamed.is_none() {
                *lock(&self.uncommitted_flush) = Some(written);
            }
            return Err(error);
        }
        let bytes_written = written.blob_bytes + written.tables.iter().map(|table| table.size).sum::<u64>();
        let report =
            TaskReport { level: 0, tables: written.tables.len() as u64, bytes_written, ..TaskReport::default() };
        self.publish_flush(written);
        Counters::add(&self.counters.flushes, 1);
        Counters::add(&self.counters.flushed_bytes, bytes_written);
        Ok(report)
    }

    fn commit_flush(&self, written: &mut Written, host: &dyn Host) -> Result<()> {
        // Through the end of the memtables, not of the output: a dropped tombstone is a record that becomes permanent
        // too.
        host.make_log_durable(written.through)?;
        let partition = self.context.partition;
        let tables = written.tables.iter();
        let added = tables.map(|table| Edit::TableAdded { partition, level: 0, table: table.clone() });
        let blobs = written.blobs.iter().map(|file| Edit::BlobFileAdded { partition, file: file.clone() });
        let edits: Vec<Edit> = blobs
            .chain(added)
            .chain([Edit::Flushed { partition, through: self.complete_through(written, host) }])
            .collect();
        self.check_open()?;
        if let Some(unnamed) = written.unnamed.take() {
            unnamed.keep();
        }
        host.commit_edits(&edits)
    }

    /// Every record of the partition up to here is in tables once `written` is, and the log is durable up to here: this
    /// may be beyond the last record of the partition. The further it is, the less of a damaged log is needed.
    fn complete_through(&self, written: &Written, host: &dyn Host) -> SeqNo {
        // Before the memtables: what is visible is in one.
        let visible = host.read_points().last().copied().unwrap_or_default();
        let first = self.current.with(|now| {
            let is_written = |memtable: &Arc<Memtable>| written.sealed.iter().any(|other| Arc::ptr_eq(memtable, other));
            let others = now.sealed.iter().filter(|memtable| !is_written(memtable)).chain([&now.active]);
            others.filter(|memtable| !memtable.is_empty()).map(|memtable| memtable.lowest_seqno()).min()
        });
        let complete = first.map_or(visible, |first| visible.min(SeqNo(first.0.saturating_sub(1))));
        written.through.max(complete.min(host.log_durable()))
    }

    fn write_sealed(&self, host: &dyn Host) -> Result<Option<Written>> {
        let before = self.current.get();
        let Some(through) = before.sealed.iter().map(|memtable| memtable.highest_seqno()).max() else {
            return Ok(None);
        };
        let mut rewrite = self.rewrite_of(&before, &self.options(), host);
        while !rewrite.step(u64::MAX)? {}
        let Finished { tables, mut blobs, mut unnamed } = rewrite.finish()?;
        let blob_bytes = blobs.iter().map(|file| file.size).sum();
        // Early files that only memory points into, or nothing any more, are left as they are. The others end: what of
        // them is acknowledged is made durable with the log first, where a failure says so to everybody.
        let uses: BTreeSet<FileId> = tables.iter().flat_map(|table| &table.blobs).map(|uses| uses.logical).collect();
        let ended = self.current.with(|now| now.early.among(&uses));
        if !ended.is_empty() {
            host.make_log_durable(through)?;
            for file in &ended {
                blobs.push(self.end_early(file, &mut unnamed, host.now_ms())?);
            }
        }
        let (sealed, unnamed) = (before.sealed, Some(unnamed));
        Ok(Some(Written { sealed, through, tables, blobs, blob_bytes, ended, unnamed }))
    }

    fn rewrite_of(&self, before: &SuperVersion, options: &LsmOptions, host: &dyn Host) -> Rewrite {
        let context = &self.context;
        let children = before.sealed.iter().map(|memtable| Box::new(memtable.cursor()) as Box<dyn Cursor>).collect();
        let cursor = MergeCursor::new(context.order.clone(), children);
        let retain = Retain::new(host.read_points());
        let older = Older::new(context.order.clone(), before.version.runs().map(Arc::clone).collect());
        let plan = OutputPlan {
            options: options.table_at(0),
            table_size: options.compaction.table_size,
            created_ms: host.now_ms(),
            neighbours: Vec::new(),
            separation: options.kv_separation.clone(),
        };
        Rewrite::new(cursor, context.order.clone(), retain, older, false, Output::new(Arc::clone(context), plan))
    }

    fn publish_flush(&self, written: Written) {
        let read = self.options().read_options(0);
        let handle = |meta| TableHandle::new(meta, None, Arc::clone(&self.context), read);
        let flushed = written.tables.into_iter().map(handle).collect();
        let added: Vec<Arc<BlobHandle>> =
            written.blobs.into_iter().map(|meta| self.context.blob_handle(meta)).collect();
        // One whose values were carried over to another file is of no use any more.
        let is_named = |early: &EarlyFile| added.iter().any(|file| file.meta().id == early.id);
        written.ended.iter().filter(|early| !is_named(early)).for_each(|early| early.doom());
        self.current.replace(|now| {
            let change = Change { flushed, blobs_added: added, ..Change::default() };
            let stays = |memtable: &&Arc<Memtable>| !written.sealed.iter().any(|other| Arc::ptr_eq(memtable, other));
            SuperVersion {
                active: Arc::clone(&now.active),
                sealed: now.sealed.iter().filter(stays).map(Arc::clone).collect(),
                version: Arc::new(now.version.with(change, &self.context.order)),
                early: now.early.without(&written.ended),
                flushed: now.flushed.max(written.through),
            }
        });
        // Only now: who finds a file not counted finds its references in the version.
        self.flushed_pointers(&written.sealed);
    }
}

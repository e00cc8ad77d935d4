//! Carrying a collection out.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::base::edit::{Edit, FileId};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::engine::{Host, TaskReport};
use crate::lsm::blobs::map::BlobMap;
use crate::lsm::collect::job::Collection;
use crate::lsm::collect::plan::{FileFigures, Goal, Step, next_step};
use crate::lsm::collect::scan::{Scan, Scanned, moments};
use crate::lsm::compaction::strategy;
use crate::lsm::metrics::Counters;
use crate::lsm::slot::lock;
use crate::lsm::super_version::SuperVersion;
use crate::lsm::tree::LsmTree;
use crate::lsm::version::Change;

/// A collection looks up after this many bytes whether it should yield; tests have less to copy.
const STEP_BYTES: u64 = if cfg!(test) { 1 << 10 } else { 4 << 20 };

/// A collection that nobody asked for goes on to this part of the target, so that the next bit of staleness does not
/// exceed it again.
const BELOW_TARGET: f64 = 0.93;

impl LsmTree {
    /// Whether values stand apart, or stood when they were flushed.
    pub(crate) fn is_separated(&self) -> bool {
        self.options().kv_separation.is_some() || self.version().blobs().handles().next().is_some()
    }

    /// How stale blob files are, if that is known of this moment.
    pub(crate) fn scanned(&self, points: &[SeqNo]) -> Option<Arc<Scanned>> {
        let counted = self.early.counted();
        let version = self.version();
        let points = moments(points.to_vec(), &version);
        lock(&self.scanned).as_ref().and_then(|remembered| remembered.of(&version, &points, &counted))
    }

    /// A scan of the tables as they are, or of all that is there.
    pub(crate) fn begin_scan(&self, points: Vec<SeqNo>, memory: bool) -> Scan {
        let counted = self.early.counted();
        Scan::new(&self.context, &self.current.get(), points, memory, counted)
    }

    /// What a scan of the tables has found; it is remembered.
    pub(crate) fn end_scan(&self, scan: Scan) -> Arc<Scanned> {
        let (scanned, remembered) = scan.finish();
        let old = lock(&self.scanned).replace(remembered);
        drop(old); // without the lock
        scanned
    }

    /// Merges a part of what the tree has above the bottom, as far as it holds records up to `through`; `None` if there
    /// is no such thing.
    pub(crate) fn push_to_bottom(&self, through: SeqNo, host: &dyn Host) -> Result<Option<TaskReport>> {
        self.compact_by(true, host, |view| strategy::push_to_bottom(view, through))
    }

    /// Rewrites some of these tables of the bottom; `None` if none of them is there.
    pub(crate) fn rewrite_at_bottom(&self, tables: &BTreeSet<FileId>, host: &dyn Host) -> Result<Option<TaskReport>> {
        self.compact_by(true, host, |view| strategy::rewrite_at_bottom(view, tables))
    }

    /// Collects some of these files, or goes on with a collection that has yielded. Of `chosen`, those that are still
    /// there afterwards have to wait for the next call.
    pub(crate) fn collect(&self, chosen: &[FileId], wait: bool, host: &dyn Host) -> Result<TaskReport> {
        let Some(_occupied) = self.compacting.occupy(wait) else { return Ok(TaskReport::default()) };
        self.check_open()?;
        let counted = self.early.counted();
        let now = self.current.get();
        let paused = lock(&self.remembered).collecting.take();
        let job = match paused {
            Some(job) if job.applies_to(now.version.blobs()) => Some(job),
            other => {
                // A later edit has taken its files away: then its own is not in the manifest.
                other.into_iter().for_each(Collection::give_up);
                let options = self.options().kv_separation.clone().unwrap_or_default();
                let is_free = |file: &FileId| {
                    let handle = now.version.blobs().handles().find(|handle| handle.meta().id == *file);
                    handle.is_some_and(|handle| !BlobMap::is_counted(handle, &counted))
                };
                let chosen: Vec<FileId> = chosen.iter().copied().filter(is_free).collect();
                Collection::new(&self.context, &now.version, &chosen, options.target_size, host.now_ms())?
            }
        };
        let Some(mut job) = job else { return Ok(TaskReport::default()) };
        while !job.step(STEP_BYTES)? {
            self.check_open()?;
            if host.should_yield() {
                lock(&self.remembered).collecting = Some(job);
                return Ok(TaskReport::default());
            }
        }
        self.complete_collection(job, host)
    }

    /// Collects what the options want collected, as far as it is known to be stale. A file that turns out to be damaged
    /// is left alone from then on, so that the others can be collected.
    pub(crate) fn collect_by_itself(&self, wait: bool, host: &dyn Host) -> Result<TaskReport> {
        let chosen = self.automatic_choice();
        self.collect(&chosen, wait, host).inspect_err(|error| {
            let damaged = self.damaged_blob_file(error);
            lock(&self.remembered).damaged.extend(damaged);
        })
    }

    /// The blob file that an error says is damaged, if it does.
    pub(crate) fn damaged_blob_file(&self, error: &Error) -> Option<FileId> {
        let path = error.file().filter(|_| error.kind() == ErrorKind::Corruption)?;
        let version = self.version();
        let mut files = version.blobs().handles().map(|file| file.meta().id);
        files.find(|&file| self.context.files.blobs().path(file) == path)
    }

    /// Whether a collection that nobody asked for would find something to do.
    pub(crate) fn wants_collection(&self) -> bool {
        if lock(&self.remembered).collecting.is_some() {
            return true;
        }
        !self.automatic_choice().is_empty()
    }

    fn automatic_target(&self) -> Option<f32> {
        self.options().kv_separation.as_ref().and_then(|apart| apart.automatic_gc)
    }

    /// The last record of the memtable, if that may hide more values of blob files than automatic collection allows.
    pub(crate) fn hiding_in_memory(&self) -> Option<SeqNo> {
        let target = self.automatic_target()?;
        self.current.with(|now| {
            let totals = now.version.blobs().totals();
            let hides = !now.active.is_empty()
                && totals.bytes > 0
                && totals.exceed(target, now.version.referenced_by(now.active.len()));
            hides.then(|| now.active.highest_seqno())
        })
    }

    /// Whether a memtable of so many entries may hide so much that it should not wait until it is full.
    pub(crate) fn hides_too_much(&self, entries: u64) -> bool {
        let Some(target) = self.automatic_target() else { return false };
        self.current.with(|now| {
            let totals = now.version.blobs().totals();
            let hidden = now.version.referenced_by(entries);
            hidden >= totals.worth_showing()
                && totals.exceed(target, hidden + now.version.may_hide().iter().sum::<u64>())
        })
    }

    /// The files that have to go so that what is known to be stale stays within the target, with room for what may be
    /// hidden, in memory too, as far as that is not more than half of what the target allows. Files that memory points
    /// into, and damaged ones, stay.
    fn automatic_choice(&self) -> Vec<FileId> {
        let Some(target) = self.automatic_target() else { return Vec::new() };
        // Before the version: a file that is not counted any more is in its tables.
        let counted = self.early.counted();
        let now = self.current.get();
        let (blobs, totals) = (now.version.blobs(), now.version.blobs().totals());
        let in_memory: u64 = now.sealed.iter().chain([&now.active]).map(|memtable| memtable.len()).sum();
        let hidden = now.version.may_hide().iter().sum::<u64>() + now.version.referenced_by(in_memory);
        let hidden = hidden.min(totals.may_hide_within(target));
        if totals.bytes <= totals.referenced || !totals.exceed(target, hidden) {
            return Vec::new();
        }
        let damaged = lock(&self.remembered).damaged.clone();
        let figures = blobs.handles().zip(blobs.uses()).map(|(handle, uses)| {
            let figures = FileFigures::of_use(&uses);
            let stays = BlobMap::is_counted(handle, &counted) || damaged.contains(&figures.id);
            if stays { figures.as_if_live() } else { figures }
        });
        let files: Vec<FileFigures> = figures.collect();
        let allowed = f64::from(target) * (1.0 - hidden as f64 / totals.referenced.max(1) as f64);
        let allowed = (allowed * BELOW_TARGET).max(1.0);
        match next_step(&files, Goal::SpaceAmp(allowed)) {
            Step::Rewrite(chosen) => chosen,
            Step::Done | Step::Reveal => Vec::new(),
        }
    }

    /// Puts new files in the place of old ones. If the edit cannot be committed, the collection stays as it is: whether
    /// the manifest names its files is not known then.
    fn complete_collection(&self, mut job: Collection, host: &dyn Host) -> Result<TaskReport> {
        if let Err(error) = self.check_open() {
            lock(&self.remembered).collecting = Some(job); // `discard` removes its files
            return Err(error);
        }
        let partition = self.context.partition;
        let files = job.name_output().to_vec();
        let added = files.iter().map(|file| Edit::BlobFileAdded { partition, file: file.clone() });
        let removed = job.files().iter().map(|file| Edit::BlobFileRemoved { partition, file: file.meta().id });
        if let Err(error) = host.commit_edits(&added.chain(removed).collect::<Vec<Edit>>()) {
            lock(&self.remembered).collecting = Some(job);
            return Err(error);
        }
        let bytes_written: u64 = files.iter().map(|file| file.size).sum();
        let old: u64 = job.files().iter().map(|file| file.meta().size).sum();
        job.files().iter().for_each(|file| file.doom());
        let blobs_removed: Vec<FileId> = job.files().iter().map(|file| file.meta().id).collect();
        let report = TaskReport {
            level: 0,
            tables: blobs_removed.len() as u64,
            bytes_read: job.bytes_read,
            bytes_written,
            bytes_freed: old.saturating_sub(bytes_written),
        };
        let blobs_added = files.into_iter().map(|meta| self.context.blob_handle(meta)).collect();
        self.current.replace(|now| {
            let change = Change { blobs_added, blobs_removed, ..Change::default() };
            SuperVersion { version: Arc::new(now.version.with(change, &self.context.order)), ..now.clone() }
        });
        Counters::add(&self.counters.collections, 1);
        Ok(report)
    }
}

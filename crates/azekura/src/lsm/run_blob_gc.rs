//! Runs blob GC on a tree.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::base::sync::lock;
use crate::base::version_edit::{FileNumber, PartitionEdit};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::engine::{EngineHost, TaskReport};
use crate::lsm::blob_gc::{
    BlobGarbageStats, BlobGcGoal, BlobGcJob, BlobGcStep, BlobScan, BlobScanResult, clamp_to_last_record,
    next_blob_gc_step,
};
use crate::lsm::blob_map::{BlobMap, BlobTotals};
use crate::lsm::read::SuperVersion;
use crate::lsm::tree::{LsmTree, TaskLockGuard};
use crate::lsm::version::VersionChange;
use crate::memtable::Memtable;
use std::sync::atomic::Ordering;

/// Number of bytes after which a blob GC checks whether it should yield. Tests copy less data.
const STEP_BYTES: u64 = if cfg!(test) { 1 << 10 } else { 4 << 20 };

/// Background blob GC continues to this part of the target, so that the next stale bytes do not exceed the target
/// again.
const AUTOMATIC_TARGET_FACTOR: f64 = 0.93;

/// An idle memtable with this many tombstones is flushed, so that a compaction can drop them. A scan passes over about
/// 3,000 tombstones in a millisecond.
const IDLE_TOMBSTONES_MIN: u64 = 10_000;

/// A memtable that hides less than this part of the size of a full memtable is not flushed early.
const EARLY_FLUSH_SHARE: u64 = 8;
/// A memtable is flushed early only if it may hide this many times its own bytes: it has pointers or tombstones.
const EARLY_FLUSH_GAIN: u64 = 8;

impl SuperVersion {
    /// Sums of the frame bytes of all blob files. Values that memtables point to count as referenced.
    fn blob_totals(&self) -> BlobTotals {
        let unflushed: u64 = self.direct_blobs.values().map(|file| file.stats().value_bytes).sum();
        let BlobTotals { bytes, referenced } = self.version.blobs().totals();
        BlobTotals { bytes: bytes + unflushed, referenced: referenced + unflushed }
    }

    /// Bytes of blob files that these memtables may hide: those that they know to be superseded, and an average value
    /// in tables for each of their keys. Values of failed commits are hidden too.
    fn bytes_hidden_by<'a>(&self, memtables: impl IntoIterator<Item = &'a Arc<Memtable>>) -> u64 {
        let hidden_by = |memtable: &Arc<Memtable>| {
            let (superseded, bytes) = memtable.superseded();
            bytes.saturating_add(self.version.estimated_blob_bytes(memtable.len().saturating_sub(superseded)))
        };
        let uncommitted = self.direct_blobs.values().map(|file| file.uncommitted_bytes());
        memtables.into_iter().map(hidden_by).chain(uncommitted).fold(0, u64::saturating_add)
    }
}

impl LsmTree {
    /// Whether the tree has values in blob files, or will write such values.
    pub(crate) fn has_kv_separation(&self) -> bool {
        self.options().kv_separation.is_some() || self.version().blobs().handles().next().is_some()
    }

    /// The last scan of blob files, if it is valid for the current version.
    pub(crate) fn cached_blob_scan(&self, snapshots: &[SeqNo]) -> Option<Arc<BlobScanResult>> {
        let counted = self.direct_blobs.files_with_pointers();
        let version = self.version();
        let snapshots = clamp_to_last_record(snapshots.to_vec(), &version);
        let now_ms = self.context.snapshots.now_ms();
        let cached = lock(&self.cached_scan);
        cached.as_ref().and_then(|cached| cached.get_if_valid(&version, &snapshots, &counted, now_ms))
    }

    /// Begins a scan of the tables, and of the memtables if `memory`.
    pub(crate) fn begin_blob_scan(&self, snapshots: Vec<SeqNo>, memory: bool) -> BlobScan {
        let counted = self.direct_blobs.files_with_pointers();
        BlobScan::new(&self.context, &self.current.get(), snapshots, memory, counted)
    }

    /// Ends a scan of the tables, and caches its result.
    pub(crate) fn finish_blob_scan(&self, scan: BlobScan) -> Arc<BlobScanResult> {
        let (scanned, remembered) = scan.finish();
        let old = lock(&self.cached_scan).replace(remembered);
        drop(old); // without the lock
        scanned
    }

    /// Compacts a part of the records up to `through` that are above the bottom; `None` if there are none.
    pub(crate) fn compact_to_bottom(&self, through: SeqNo, host: &dyn EngineHost) -> Result<Option<TaskReport>> {
        self.compact_with(true, host, |picker| picker.pick_to_bottom(through))
    }

    /// Rewrites some of these tables of the bottom level; `None` if it has none of them.
    pub(crate) fn rewrite_bottom_tables(
        &self,
        tables: &BTreeSet<FileNumber>,
        host: &dyn EngineHost,
    ) -> Result<Option<TaskReport>> {
        self.compact_with(true, host, |picker| picker.pick_bottom_rewrite(tables))
    }

    /// Runs a blob GC on some of the `chosen` files, or resumes a paused one. The caller calls it again for the files
    /// that still exist afterwards.
    pub(crate) fn run_blob_gc(&self, chosen: &[FileNumber], wait: bool, host: &dyn EngineHost) -> Result<TaskReport> {
        let Some(occupied) = self.compaction_lock.acquire(wait) else { return Ok(TaskReport::default()) };
        self.check_open()?;
        let counted = self.direct_blobs.files_with_pointers();
        let now = self.current.get();
        let paused = lock(&self.compaction_state).paused_blob_gc.take();
        let job = match paused {
            Some(job) if job.inputs_exist(now.version.blobs()) => Some(job),
            other => {
                // A later edit has removed its files, so its own edit is not in the manifest.
                other.into_iter().for_each(|job| job.outputs.discard());
                let options = self.options().kv_separation.clone().unwrap_or_default();
                let is_free = |file: &FileNumber| {
                    let handle = now.version.blobs().handles().find(|handle| handle.meta().number == *file);
                    handle.is_some_and(|handle| !BlobMap::has_memory_pointers(handle, &counted))
                };
                let chosen: Vec<FileNumber> = chosen.iter().copied().filter(is_free).collect();
                BlobGcJob::new(&self.context, &now.version, &chosen, options.blob_file_target_size, host.now_ms())?
            }
        };
        let Some(mut job) = job else { return Ok(TaskReport::default()) };
        while !job.step(STEP_BYTES)? {
            self.check_open()?;
            if host.should_yield() {
                self.pause_blob_gc(job, &occupied);
                return Ok(TaskReport::default());
            }
        }
        self.install_blob_gc(job, &occupied, host)
    }

    /// Keeps a blob GC for the next task. `held`: the guard of `compaction_lock`.
    fn pause_blob_gc(&self, job: BlobGcJob, held: &TaskLockGuard<'_>) {
        debug_assert!(held.holds(&self.compaction_lock), "a blob GC that is paused was running");
        let before = lock(&self.compaction_state).paused_blob_gc.replace(job);
        debug_assert!(before.is_none(), "a tree has one paused blob GC");
    }

    /// Runs blob GC as the options require, as far as staleness is known. A file that is damaged is ignored from then
    /// on, so that blob GC of the others continues.
    pub(crate) fn run_automatic_blob_gc(&self, wait: bool, host: &dyn EngineHost) -> Result<TaskReport> {
        let chosen = self.pick_automatic_blob_gc();
        self.run_blob_gc(&chosen, wait, host).inspect_err(|error| {
            let damaged = self.damaged_blob_file(error);
            lock(&self.compaction_state).damaged_blob_files.extend(damaged);
        })
    }

    /// The blob file that `error` reports as damaged, if it does.
    pub(crate) fn damaged_blob_file(&self, error: &Error) -> Option<FileNumber> {
        let path = error.file().filter(|_| error.kind() == ErrorKind::Corruption)?;
        let version = self.version();
        let mut files = version.blobs().handles().map(|file| file.meta().number);
        files.find(|&file| self.context.files.blob_files().path(file) == path)
    }

    /// Whether background blob GC has work.
    pub(crate) fn needs_blob_gc(&self) -> bool {
        if lock(&self.compaction_state).paused_blob_gc.is_some() {
            return true;
        }
        !self.pick_automatic_blob_gc().is_empty()
    }

    fn automatic_target(&self) -> Option<f32> {
        self.options().kv_separation.as_ref().and_then(|separation| separation.automatic_gc)
    }

    /// The last record of the active memtable, if the memtable has many tombstones, or may hide more bytes of blob
    /// files than the target of background blob GC allows.
    pub(crate) fn memtable_hiding_seqno(&self) -> Option<SeqNo> {
        let target = self.automatic_target();
        self.current.with(|now| {
            let totals = now.blob_totals();
            let hides = now.active.tombstones() >= IDLE_TOMBSTONES_MIN
                || target.is_some_and(|target| {
                    !now.active.is_empty()
                        && totals.bytes > 0
                        && totals.exceed_space_amp(target, now.bytes_hidden_by([&now.active]))
                });
            hides.then(|| now.active.largest_seqno())
        })
    }

    /// Whether a memtable should be flushed before it is full because it may hide stale bytes of blob files: more than
    /// the target allows, and far more than the flush writes.
    pub(crate) fn hides_too_much(&self, memtable: &Arc<Memtable>) -> bool {
        let Some(target) = self.automatic_target() else { return false };
        let memtable_share = self.max_memtable_size.load(Ordering::Relaxed) / EARLY_FLUSH_SHARE;
        self.current.with(|now| {
            let (totals, hidden) = (now.blob_totals(), now.bytes_hidden_by([memtable]));
            // The flush of a sealed memtable may show enough stale bytes.
            now.sealed.is_empty()
                && hidden >= totals.min_hidden_bytes_to_compact().max(memtable_share)
                && hidden / EARLY_FLUSH_GAIN >= memtable.bytes()
                && totals
                    .exceed_space_amp(target, hidden + now.version.max_hidden_bytes_per_level().iter().sum::<u64>())
        })
    }

    /// The files to rewrite so that the bytes that are known to be stale stay within the target. A part of the target,
    /// at most one half, is left for bytes that tables and memtables may hide. Files that memtables point into, and
    /// damaged files, are not picked.
    fn pick_automatic_blob_gc(&self) -> Vec<FileNumber> {
        let Some(target) = self.automatic_target() else { return Vec::new() };
        // Taken before the version: a pointer that is not counted any more is in the tables of the version.
        let counted = self.direct_blobs.files_with_pointers();
        let now = self.current.get();
        let (blobs, totals) = (now.version.blobs(), now.version.blobs().totals());
        let in_memory = now.bytes_hidden_by(now.sealed.iter().chain([&now.active]));
        let hidden = now.version.max_hidden_bytes_per_level().iter().sum::<u64>().saturating_add(in_memory);
        let hidden = hidden.min(totals.hidden_bytes_allowance(target));
        if totals.bytes <= totals.referenced || !totals.exceed_space_amp(target, hidden) {
            return Vec::new();
        }
        let damaged = lock(&self.compaction_state).damaged_blob_files.clone();
        let figures = blobs.handles_with_stats().map(|(handle, uses)| {
            let figures = BlobGarbageStats::from_file_stats(&uses);
            let stays = BlobMap::has_memory_pointers(handle, &counted) || damaged.contains(&figures.id);
            if stays { figures.assume_all_live() } else { figures }
        });
        let files: Vec<BlobGarbageStats> = figures.collect();
        let allowed = f64::from(target) * (1.0 - hidden as f64 / totals.referenced.max(1) as f64);
        let allowed = (allowed * AUTOMATIC_TARGET_FACTOR).max(1.0);
        match next_blob_gc_step(&files, BlobGcGoal::SpaceAmp(allowed)) {
            BlobGcStep::RewriteFiles(chosen) => chosen,
            BlobGcStep::Done | BlobGcStep::CompactTables => Vec::new(),
        }
    }

    /// Replaces the input files of a blob GC by its output files. If the edit cannot be committed, the job is kept,
    /// because it is unknown whether the manifest names its files. `held`: the guard of `compaction_lock`.
    fn install_blob_gc(
        &self,
        mut job: BlobGcJob,
        held: &TaskLockGuard<'_>,
        host: &dyn EngineHost,
    ) -> Result<TaskReport> {
        debug_assert!(job.inputs_exist(self.version().blobs()), "no other task has removed an input file");
        let blobs_removed: Vec<FileNumber> = job.inputs.iter().map(|file| file.meta().number).collect();
        let removed = blobs_removed.iter().map(|&file| PartitionEdit::BlobFileRemoved { file });
        if let Err(error) = self.commit_edits(job.outputs.edits(0).chain(removed), host) {
            self.pause_blob_gc(job, held);
            return Err(error);
        }
        let bytes_written = job.outputs.finished_bytes();
        let old: u64 = job.inputs.iter().map(|file| file.meta().size).sum();
        job.inputs.iter().for_each(|file| file.mark_obsolete());
        let report = TaskReport {
            level: 0,
            tables: blobs_removed.len() as u64,
            bytes_read: job.bytes_read,
            bytes_written,
            bytes_freed: old.saturating_sub(bytes_written),
        };
        let blobs = std::mem::take(&mut job.outputs.blobs);
        let blobs_added = blobs.into_iter().map(|meta| self.context.blob_handle(meta)).collect();
        self.apply_change(VersionChange { blobs_added, blobs_removed, ..VersionChange::default() });
        Ok(report)
    }
}

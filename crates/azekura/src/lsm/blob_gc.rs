//! Blob GC: copies live values out of stale blob files, so that these files can be removed.
//!
//! Blob GC changes no table and does not write to the WAL. It changes only the map from logical files to blob files, by
//! one version edit. [`next_blob_gc_step`] picks the files, a pure function of plain values; [`BlobGcJob`] copies their
//! values; [`BlobScan`] measures how stale the files are.
//!
//! Invariants:
//! - A value that a table of the current version refers to is copied, whether or not a reader can see it. Only
//!   compactions decide which values are referenced.
//! - The edit that names the new files removes the old ones, which stay on disk as long as a reader uses them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

use crate::base::blob_pointer::BlobPointer;
use crate::base::key::{NEVER_MS, split_expiry};
use crate::base::version_edit::FileNumber;
use crate::base::{Error, KeyOrder, RecordKind, Result, SeqNo};
use crate::blob::reader::{BlobReadAhead, LiveBlobs, add_references};
use crate::engine::ExpiryLimits;
use crate::iter::InternalIter;
use crate::iter::merge::MergingIter;
use crate::iter::range_tombstones::RangeTombstones;
use crate::lsm::blob_map::{BlobFileMetrics, BlobHandle, BlobMap};
use crate::lsm::compaction_iter::{CoveringRangeDeletes, DropDecision, VersionDropRules};
use crate::lsm::direct_file::DirectBlobFile;
use crate::lsm::output::PendingOutputs;
use crate::lsm::read::SuperVersion;
use crate::lsm::table_handle::TableHandle;
use crate::lsm::tree_context::TreeContext;
use crate::lsm::version::{BOTTOM_LEVEL, HasTableMeta, Version};

/// How stale a blob file is. Bytes are those of frames. Each count is a part of the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlobGarbageStats {
    pub(crate) id: FileNumber,
    /// Number of values.
    pub(crate) values: u64,
    pub(crate) bytes: u64,
    /// Bytes that tables refer to, which blob GC would copy.
    pub(crate) referenced_bytes: u64,
    /// The visible ones of these: the references that tables would have after compacting all of them.
    pub(crate) retained_values: u64,
    pub(crate) retained_bytes: u64,
    /// The bytes of these that a new reader can see. Older readers pin the others.
    pub(crate) live_bytes: u64,
}

impl BlobGarbageStats {
    /// Bytes that blob GC of this file would free.
    fn reclaimable(&self) -> u64 {
        self.bytes.saturating_sub(self.referenced_bytes)
    }

    /// Bytes that tables refer to and no reader can see.
    fn hidden(&self) -> u64 {
        self.referenced_bytes.saturating_sub(self.retained_bytes)
    }

    /// Bytes that no reader can see.
    pub(crate) fn stale(&self) -> u64 {
        self.bytes.saturating_sub(self.retained_bytes)
    }

    pub(crate) fn pinned(&self) -> u64 {
        self.retained_bytes.saturating_sub(self.live_bytes)
    }

    /// As if every value that tables refer to were visible to all readers.
    pub(crate) fn from_file_stats(uses: &BlobFileMetrics) -> BlobGarbageStats {
        let referenced = uses.referenced_bytes;
        BlobGarbageStats {
            id: FileNumber(uses.id),
            values: uses.values,
            bytes: uses.value_bytes,
            referenced_bytes: referenced,
            retained_values: uses.referenced_values,
            retained_bytes: referenced,
            live_bytes: referenced,
        }
    }

    /// These figures, but with all values of the file live. For a file whose exact figures are unknown: blob GC then
    /// expects to free nothing of it.
    pub(crate) fn assume_all_live(self) -> BlobGarbageStats {
        let (values, bytes) = (self.values, self.bytes);
        BlobGarbageStats {
            referenced_bytes: bytes,
            retained_values: values,
            retained_bytes: bytes,
            live_bytes: bytes,
            ..self
        }
    }

    /// These figures, for a blob GC that cannot remove references from invisible versions first.
    pub(crate) fn without_hidden(self) -> BlobGarbageStats {
        BlobGarbageStats { retained_bytes: self.referenced_bytes, ..self }
    }
}

/// The goal of a blob GC.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum BlobGcGoal {
    /// Maximum ratio of bytes, without pinned ones, to live bytes; at least 1.
    SpaceAmp(f64),
    /// No file has this share of stale bytes or more; 0 to 1.
    Staleness(f64),
    /// No file consists of stale values only.
    NoFullyStaleFile,
}

/// The next step of a blob GC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BlobGcStep {
    /// The goal is reached.
    Done,
    /// Tables refer to invisible values, and have to be compacted first.
    CompactTables,
    /// Copies the referenced values of these files and removes the files.
    RewriteFiles(Vec<FileNumber>),
}

pub(crate) fn next_blob_gc_step(files: &[BlobGarbageStats], goal: BlobGcGoal) -> BlobGcStep {
    match goal {
        BlobGcGoal::SpaceAmp(target) => {
            debug_assert!(target >= 1.0, "files have at least their live bytes");
            files_for_space_amp(files, target)
        }
        BlobGcGoal::Staleness(threshold) => {
            debug_assert!((0.0..=1.0).contains(&threshold), "stale bytes are a part of a file");
            let share = |file: &BlobGarbageStats| file.stale() as f64 / file.bytes as f64;
            files_matching(files, |file| file.stale() > 0 && share(file) >= threshold)
        }
        BlobGcGoal::NoFullyStaleFile => files_matching(files, |file| file.retained_bytes == 0),
    }
}

/// Picks every file that is `wanted`.
fn files_matching(files: &[BlobGarbageStats], wanted: impl Fn(&BlobGarbageStats) -> bool) -> BlobGcStep {
    let chosen: Vec<&BlobGarbageStats> = files.iter().filter(|file| wanted(file)).collect();
    if chosen.is_empty() {
        return BlobGcStep::Done;
    }
    match chosen.iter().any(|file| file.hidden() > 0) {
        true => BlobGcStep::CompactTables,
        false => BlobGcStep::RewriteFiles(chosen.iter().map(|file| file.id).collect()),
    }
}

fn files_for_space_amp(files: &[BlobGarbageStats], target: f64) -> BlobGcStep {
    let sum = |of: fn(&BlobGarbageStats) -> u64| files.iter().map(of).sum::<u64>();
    let (total, pinned, live) = (sum(|file| file.bytes), sum(BlobGarbageStats::pinned), sum(|file| file.live_bytes));
    // Without live bytes no byte is allowed. An infinite target times 0 would not be a number.
    let allowed = if live == 0 { 0 } else { (target * live as f64) as u64 };
    let wanted = (total - pinned).saturating_sub(allowed);
    if wanted == 0 {
        return BlobGcStep::Done;
    }
    let known = sum(BlobGarbageStats::reclaimable);
    if known < wanted && sum(BlobGarbageStats::hidden) > 0 {
        return BlobGcStep::CompactTables;
    }
    match cheapest_files(files, wanted) {
        chosen if chosen.is_empty() => BlobGcStep::Done,
        chosen => BlobGcStep::RewriteFiles(chosen),
    }
}

/// Files that free `wanted` bytes, or all that free any: the files that free the most per copied byte, without those
/// that are not needed for the goal.
fn cheapest_files(files: &[BlobGarbageStats], wanted: u64) -> Vec<FileNumber> {
    let mut stale: Vec<&BlobGarbageStats> = files.iter().filter(|file| file.reclaimable() > 0).collect();
    let share = |file: &BlobGarbageStats| (u128::from(file.reclaimable()) << 64) / u128::from(file.bytes);
    stale.sort_by_key(|file| (std::cmp::Reverse(share(file)), file.id));
    let mut freed = 0;
    let enough = stale.iter().position(|file| {
        freed += file.reclaimable();
        freed >= wanted
    });
    stale.truncate(enough.map_or(stale.len(), |last| last + 1));
    stale.sort_by_key(|file| (std::cmp::Reverse(file.referenced_bytes), file.id));
    stale.retain(|file| {
        let dispensable = freed - file.reclaimable() >= wanted;
        freed -= if dispensable { file.reclaimable() } else { 0 };
        !dispensable
    });
    debug_assert!(enough.is_none() || freed >= wanted, "the files free the wanted bytes");
    debug_assert_eq!(freed, stale.iter().map(|file| file.reclaimable()).sum(), "the sum is that of the files");
    let mut chosen: Vec<FileNumber> = stale.iter().map(|file| file.id).collect();
    chosen.sort_unstable();
    debug_assert!(chosen.is_sorted_by(|a, b| a < b), "a file is chosen once");
    chosen
}

/// Copies the referenced values of some blob files, one step at a time. It may pause between two steps while flushes
/// and compactions run. These only remove references to its input files. If they remove an input file, the job is of no
/// use any more. A job that is dropped before an edit may name its files leaves none.
pub(crate) struct BlobGcJob {
    /// The files to be removed. Their values are read here.
    pub(crate) inputs: Vec<Arc<BlobHandle>>,
    live: LiveBlobs,
    /// The sections still to be copied, the current one first.
    sections: std::iter::Peekable<std::vec::IntoIter<BlobGcSection>>,
    /// Number of copied values of the current section, and the next ordinal; `None` before the section is begun.
    position: Option<(u64, u32)>,
    read_ahead: BlobReadAhead,
    target_size: u64,
    pub(crate) outputs: PendingOutputs,
    pub(crate) bytes_read: u64,
}

/// A logical file to be copied.
struct BlobGcSection {
    logical: FileNumber,
    handle: Arc<BlobHandle>,
    /// Bytes of the frames to be copied.
    bytes: u64,
}

impl BlobGcJob {
    /// Takes as many of the `chosen` files as fill one file of `target_size`, at least one; `None` if none of them
    /// exists. Reads the blob references of the tables.
    ///
    /// # Errors
    /// Those of reading tables.
    pub(crate) fn new(
        context: &Arc<TreeContext>,
        version: &Version<TableHandle>,
        chosen: &[FileNumber],
        target_size: u64,
        created_ms: u64,
    ) -> Result<Option<BlobGcJob>> {
        let (files, sections) = select_inputs(version.blobs(), chosen, target_size);
        if files.is_empty() {
            return Ok(None);
        }
        let logical: BTreeSet<FileNumber> = sections.iter().map(|section| section.logical).collect();
        let mut live = LiveBlobs::default();
        for (_, table) in version.tables() {
            if table.meta().blob_usage.iter().any(|uses| logical.contains(&uses.logical_file)) {
                add_references(&mut live, &table.table()?.blob_references()?, |file| logical.contains(&file));
            }
        }
        Ok(Some(BlobGcJob {
            inputs: files,
            live,
            sections: sections.into_iter().peekable(),
            position: None,
            read_ahead: BlobReadAhead::adaptive(),
            target_size,
            outputs: PendingOutputs::new(context, created_ms),
            bytes_read: 0,
        }))
    }

    /// Whether the version still has all input files.
    pub(crate) fn inputs_exist(&self, blobs: &BlobMap) -> bool {
        self.inputs.iter().all(|file| blobs.contains(file.meta().number))
    }

    /// Continues for about `budget` bytes; true when all files are written and durable. A job that has failed must be
    /// dropped.
    ///
    /// # Errors
    /// Those of reading and writing; `Corruption` if the blob file lacks a referenced value.
    pub(crate) fn step(&mut self, budget: u64) -> Result<bool> {
        debug_assert!(budget > 0, "a step makes progress");
        let mut remaining = budget;
        while let Some(section) = self.sections.peek() {
            if remaining == 0 {
                return Ok(false);
            }
            let (logical, handle, bytes) = (section.logical, Arc::clone(&section.handle), section.bytes);
            if self.position.is_none() {
                self.begin_section(logical, bytes)?;
            }
            let read = self.copy_section(logical, &handle, remaining)?;
            remaining = remaining.saturating_sub(read);
            self.bytes_read += read;
        }
        self.outputs.finish()?;
        Ok(true)
    }

    /// Begins the section of a logical file, in a new file if the current one would become too large: a logical file is
    /// always in a single blob file.
    fn begin_section(&mut self, logical: FileNumber, bytes: u64) -> Result<()> {
        debug_assert!(self.position.is_none() && bytes > 0, "a section with values begins after the previous one");
        self.outputs.finish_blob_file(|file| file.written_bytes().saturating_add(bytes) > self.target_size)?;
        self.outputs.blob_writer()?.begin_section(logical);
        self.position = Some((0, 0));
        Ok(())
    }

    /// Copies values of the current section, and returns the bytes of the frames. At its end, the next section becomes
    /// the current one.
    fn copy_section(&mut self, logical: FileNumber, handle: &BlobHandle, budget: u64) -> Result<u64> {
        let (mut copied, mut next) = self.position.expect("the section was begun");
        let writer = self.outputs.blob_writer()?;
        let live = self.live.get(&logical);
        let file = handle.file();
        let mut passed = 0;
        for entry in file.section_entries(logical, next)? {
            let (ordinal, frame) = entry?;
            if ordinal < next || live.is_none_or(|live| !live.contains(ordinal)) {
                continue;
            }
            if passed >= budget {
                self.position = Some((copied, ordinal));
                return Ok(passed);
            }
            file.with_frame(frame, &mut self.read_ahead, |frame| writer.copy_value(ordinal, frame))?;
            copied += 1;
            next = ordinal.saturating_add(1);
            passed += frame.len;
        }
        if copied != live.map_or(0, |live| live.count()) {
            let error = Error::corruption("tables point to values that the blob file does not have");
            return Err(error.in_file(file.path()));
        }
        self.position = None;
        self.sections.next();
        Ok(passed)
    }
}

/// Selects the input files of one blob GC, and the sections to copy.
fn select_inputs(
    blobs: &BlobMap,
    chosen: &[FileNumber],
    target_size: u64,
) -> (Vec<Arc<BlobHandle>>, Vec<BlobGcSection>) {
    let (mut files, mut copied, mut bytes) = (Vec::new(), Vec::new(), 0u64);
    for handle in blobs.handles().filter(|handle| chosen.contains(&handle.meta().number)) {
        let sections =
            handle.meta().sections.iter().map(|section| (section.logical_file, blobs.referenced(section.logical_file)));
        let wanted: Vec<(FileNumber, u64)> = sections.filter(|(_, bytes)| *bytes > 0).collect();
        let more: u64 = wanted.iter().map(|(_, bytes)| bytes).sum();
        if !files.is_empty() && bytes.saturating_add(more) > target_size {
            continue;
        }
        bytes = bytes.saturating_add(more);
        files.push(Arc::clone(handle));
        copied.extend(wanted.iter().map(|&(logical, bytes)| BlobGcSection {
            logical,
            handle: Arc::clone(handle),
            bytes,
        }));
    }
    (files, copied)
}

/// Result of a scan.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlobScanResult {
    /// By file number.
    pub(crate) files: Vec<BlobGarbageStats>,
    /// Tables of the bottom level that may have invisible pointers.
    pub(crate) tables_hiding_garbage: BTreeSet<FileNumber>,
}

/// The last scan, while it is valid.
pub(crate) struct CachedBlobScan {
    version: Weak<Version<TableHandle>>,
    snapshots: Vec<SeqNo>,
    files_with_pointers: BTreeSet<FileNumber>,
    next_expiry_ms: u64,
    result: Arc<BlobScanResult>,
}

impl CachedBlobScan {
    /// The result, if the scan was of this version and these snapshots, and no record has expired since.
    pub(crate) fn get_if_valid(
        &self,
        version: &Arc<Version<TableHandle>>,
        snapshots: &[SeqNo],
        counted: &BTreeSet<FileNumber>,
        now_ms: u64,
    ) -> Option<Arc<BlobScanResult>> {
        // The `Weak` keeps the allocation, so no other version can have this address.
        let same = std::ptr::eq(self.version.as_ptr(), Arc::as_ptr(version)) && self.snapshots == snapshots;
        let same = same && now_ms < self.next_expiry_ms;
        (same && self.files_with_pointers == *counted).then(|| Arc::clone(&self.result))
    }
}

/// Replaces snapshots above the last record by its sequence number, because they see the same records of the tables. So
/// a result stays valid while records are written to memtables.
pub(crate) fn clamp_to_last_record(mut snapshots: Vec<SeqNo>, version: &Version<TableHandle>) -> Vec<SeqNo> {
    let last = version.tables().map(|(_, table)| table.meta().largest_seqno).max().unwrap_or(SeqNo::ZERO);
    let last = last.max(version.range_tombstones().largest_seqno());
    debug_assert!(snapshots.is_sorted(), "snapshots are in ascending order");
    snapshots.iter_mut().for_each(|point| *point = (*point).min(last));
    snapshots.dedup();
    snapshots
}

/// A scan in progress. It can pause after any entry, and holds the tables that it reads.
pub(crate) struct BlobScan {
    input: MergingIter,
    version: Arc<Version<TableHandle>>,
    range_deletes: CoveringRangeDeletes,
    snapshots: Vec<SeqNo>,
    order: KeyOrder,
    /// The drop rules with all snapshots, and with the newest one alone.
    all_readers_rules: VersionDropRules,
    new_readers_rules: VersionDropRules,
    expiry_limits: ExpiryLimits,
    /// The lowest expiry time of a record that has not expired for all readers.
    next_expiry_ms: u64,
    started: bool,
    key: Option<Vec<u8>>,
    /// By logical file, only the visible values.
    reachable: BTreeMap<FileNumber, BlobGarbageStats>,
    tables_hiding_garbage: BTreeSet<FileNumber>,
    /// The direct blob files, if memtables are scanned.
    direct_blobs: Vec<Arc<DirectBlobFile>>,
    /// The logical files that memtables may point into, if memtables are not scanned.
    files_with_pointers: BTreeSet<FileNumber>,
}

impl BlobScan {
    /// Scans the tables of `now`, and its memtables if `memory`. `snapshots`: those of all readers.
    /// `counted` was taken before `now`.
    pub(crate) fn new(
        context: &TreeContext,
        now: &SuperVersion,
        snapshots: Vec<SeqNo>,
        memory: bool,
        counted: BTreeSet<FileNumber>,
    ) -> BlobScan {
        debug_assert!(!snapshots.is_empty(), "the last visible sequence number is a snapshot");
        let version = Arc::clone(&now.version);
        let sets = now.range_tombstones().into_iter().rev().take(if memory { usize::MAX } else { 1 });
        let empty = RangeTombstones::default();
        let range_tombstones = sets.fold(empty, |merged, set| merged.merged_with(&set, &snapshots, &context.order));
        let snapshots = if memory { snapshots } else { clamp_to_last_record(snapshots, &version) };
        BlobScan {
            input: MergingIter::new(context.order.clone(), now.iterators(context, memory, false)),
            version,
            range_deletes: CoveringRangeDeletes::new(Arc::new(range_tombstones), context.order.clone()),
            order: context.order.clone(),
            all_readers_rules: VersionDropRules::new(snapshots.clone()),
            new_readers_rules: VersionDropRules::new(snapshots.last().map(|&point| vec![point]).unwrap_or_default()),
            snapshots,
            expiry_limits: context.snapshots.expiry_limits(),
            next_expiry_ms: NEVER_MS,
            started: false,
            key: None,
            reachable: BTreeMap::new(),
            tables_hiding_garbage: BTreeSet::new(),
            direct_blobs: now.direct_blobs.values().filter(|_| memory).map(Arc::clone).collect(),
            files_with_pointers: if memory { BTreeSet::new() } else { counted },
        }
    }

    /// Continues for about `budget` entries; true at the end.
    ///
    /// # Errors
    /// Those of reading tables; `Corruption` for a malformed blob pointer.
    pub(crate) fn step(&mut self, budget: u64) -> Result<bool> {
        if !self.started {
            self.input.seek_to_first()?;
            self.started = true;
        }
        for _ in 0..budget {
            if !self.input.valid() {
                return Ok(true);
            }
            self.visit_entry()?;
            self.input.next()?;
        }
        Ok(!self.input.valid())
    }

    fn visit_entry(&mut self) -> Result<()> {
        let entry = self.input.entry();
        if self.key.as_ref().is_none_or(|key| self.order.cmp(key, entry.user_key).is_ne()) {
            for retain in [&mut self.all_readers_rules, &mut self.new_readers_rules] {
                retain.finish_key(true).for_each(drop);
            }
            let key = self.key.get_or_insert_default();
            key.clear();
            key.extend_from_slice(entry.user_key);
            self.range_deletes.move_to(entry.user_key);
        }
        let covering = self.range_deletes.seqnos();
        let (expires_ms, ..) = split_expiry(entry.kind, entry.value)?;
        let limit_ms = if entry.kind.has_expiry() { self.expiry_limits.limit_ms(entry.seqno) } else { 0 };
        if expires_ms > limit_ms {
            self.next_expiry_ms = self.next_expiry_ms.min(expires_ms);
        }
        let keeps = |retain: &mut VersionDropRules, limit_ms: u64| {
            let kind = if expires_ms <= limit_ms { RecordKind::Delete } else { entry.kind };
            let keeps = !retain.is_range_deleted(entry.seqno, covering)
                && retain.decide(entry.seqno, kind) == DropDecision::Keep;
            if keeps {
                retain.take_deferred().for_each(drop);
            }
            keeps
        };
        let kept = keeps(&mut self.all_readers_rules, limit_ms);
        let live = keeps(&mut self.new_readers_rules, self.expiry_limits.now_ms);
        let Some(pointer) = BlobPointer::of_record(entry.kind, entry.value)? else { return Ok(()) };
        if kept {
            let seen = self.reachable.entry(pointer.logical_file).or_default();
            seen.retained_values += 1;
            seen.retained_bytes += pointer.frame_len;
            seen.live_bytes += if live { pointer.frame_len } else { 0 };
        } else if let Some(table) = self.version.run(BOTTOM_LEVEL).and_then(|run| run.find(entry.user_key, &self.order))
            && table.meta().blob_usage.iter().any(|uses| uses.logical_file == pointer.logical_file)
        {
            self.tables_hiding_garbage.insert(table.meta().number);
        }
        Ok(())
    }

    /// The result, also in the form that is cached.
    pub(crate) fn finish(self) -> (Arc<BlobScanResult>, CachedBlobScan) {
        debug_assert!(self.started && !self.input.valid(), "the scan has read every entry");
        let blobs = self.version.blobs();
        let figures = |uses: &BlobFileMetrics, logical: &mut dyn Iterator<Item = FileNumber>| {
            let mut figures = BlobGarbageStats {
                retained_values: 0,
                retained_bytes: 0,
                live_bytes: 0,
                ..BlobGarbageStats::from_file_stats(uses)
            };
            for seen in logical.filter_map(|logical| self.reachable.get(&logical)) {
                figures.retained_values += seen.retained_values;
                figures.retained_bytes += seen.retained_bytes;
                figures.live_bytes += seen.live_bytes;
            }
            figures
        };
        let files = blobs.handles_with_stats().map(|(handle, uses)| {
            let figures = figures(&uses, &mut handle.meta().sections.iter().map(|section| section.logical_file));
            if BlobMap::has_memory_pointers(handle, &self.files_with_pointers) {
                figures.assume_all_live()
            } else {
                figures
            }
        });
        let direct_blobs = self.direct_blobs.iter().map(|file| figures(&file.stats(), &mut std::iter::once(file.id)));
        let files = files.chain(direct_blobs).collect();
        let scanned = Arc::new(BlobScanResult { files, tables_hiding_garbage: self.tables_hiding_garbage });
        let next_expiry_ms = self.next_expiry_ms;
        let (version, snapshots, counted) = (Arc::downgrade(&self.version), self.snapshots, self.files_with_pointers);
        (
            Arc::clone(&scanned),
            CachedBlobScan { version, snapshots, files_with_pointers: counted, next_expiry_ms, result: scanned },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes, referenced bytes, retained bytes, live bytes.
    fn file(id: u64, bytes: u64, referenced: u64, retained: u64, live: u64) -> BlobGarbageStats {
        let (values, kept_values) = (bytes / 10, retained / 10);
        let id = FileNumber(id);
        BlobGarbageStats {
            id,
            values,
            bytes,
            referenced_bytes: referenced,
            retained_values: kept_values,
            retained_bytes: retained,
            live_bytes: live,
        }
    }

    fn known(id: u64, bytes: u64, live: u64) -> BlobGarbageStats {
        file(id, bytes, live, live, live)
    }

    fn rewrite(ids: &[u64]) -> BlobGcStep {
        BlobGcStep::RewriteFiles(ids.iter().map(|&id| FileNumber(id)).collect())
    }

    #[test]
    fn picks_fewest_stalest_files() {
        let files = [known(1, 100, 90), known(2, 100, 20), known(3, 100, 50), known(4, 100, 100)];
        for (target, step) in [
            (2.0, BlobGcStep::Done),
            (1.54, BlobGcStep::Done),
            (1.5, rewrite(&[2])),
            (1.25, rewrite(&[2])),
            (1.2, rewrite(&[2, 3])),
            (1.0, rewrite(&[1, 2, 3])),
            (f64::INFINITY, BlobGcStep::Done),
        ] {
            assert_eq!(next_blob_gc_step(&files, BlobGcGoal::SpaceAmp(target)), step, "{target}");
        }
        // The second file alone frees enough, and the first one is only slightly staler.
        let files = [known(1, 10, 1), known(2, 1000, 200), known(3, 1000, 1000)];
        assert_eq!(
            next_blob_gc_step(&files, BlobGcGoal::SpaceAmp(1.0 + 9.0 / 1201.0)),
            rewrite(&[2]),
            "both are needed by a byte"
        );
        assert_eq!(
            next_blob_gc_step(&[known(1, 10, 1), known(2, 1000, 800)], BlobGcGoal::SpaceAmp(1.02)),
            rewrite(&[2])
        );
    }

    #[test]
    fn pinned_bytes_do_not_count_as_stale() {
        let files = [file(1, 100, 80, 80, 20), known(2, 100, 100)];
        assert_eq!(next_blob_gc_step(&files, BlobGcGoal::SpaceAmp(1.17)), BlobGcStep::Done, "140 of 120");
        assert_eq!(next_blob_gc_step(&files, BlobGcGoal::SpaceAmp(1.16)), rewrite(&[1]));
        let pinned = [file(1, 100, 100, 100, 0)];
        assert_eq!(next_blob_gc_step(&pinned, BlobGcGoal::SpaceAmp(1.0)), BlobGcStep::Done);
        assert_eq!(next_blob_gc_step(&pinned, BlobGcGoal::Staleness(0.5)), BlobGcStep::Done);
        assert_eq!(next_blob_gc_step(&pinned, BlobGcGoal::NoFullyStaleFile), BlobGcStep::Done);
    }

    #[test]
    fn compacts_only_when_hidden_bytes_block_goal() {
        let files = [known(1, 100, 10), file(2, 100, 100, 50, 50)];
        assert_eq!(
            next_blob_gc_step(&files, BlobGcGoal::SpaceAmp(2.0)),
            rewrite(&[1]),
            "the first file alone is enough"
        );
        assert_eq!(next_blob_gc_step(&files, BlobGcGoal::SpaceAmp(1.5)), BlobGcStep::CompactTables);
        assert_eq!(next_blob_gc_step(&files, BlobGcGoal::Staleness(0.8)), rewrite(&[1]));
        assert_eq!(next_blob_gc_step(&files, BlobGcGoal::Staleness(0.5)), BlobGcStep::CompactTables);
        assert_eq!(next_blob_gc_step(&files, BlobGcGoal::NoFullyStaleFile), BlobGcStep::Done);
        assert_eq!(
            next_blob_gc_step(&[file(1, 100, 100, 0, 0)], BlobGcGoal::NoFullyStaleFile),
            BlobGcStep::CompactTables
        );
        assert_eq!(next_blob_gc_step(&[file(1, 100, 0, 0, 0)], BlobGcGoal::NoFullyStaleFile), rewrite(&[1]));
        let without_hidden = files.map(BlobGarbageStats::without_hidden);
        assert_eq!(next_blob_gc_step(&without_hidden, BlobGcGoal::Staleness(0.5)), rewrite(&[1]));
    }

    #[test]
    fn thresholds_hold_at_their_ends() {
        let files = [known(1, 100, 0), known(2, 100, 30), known(3, 100, 100)];
        assert_eq!(next_blob_gc_step(&files, BlobGcGoal::Staleness(f64::from(0.7f32))), rewrite(&[1, 2]));
        assert_eq!(next_blob_gc_step(&files, BlobGcGoal::Staleness(1.0)), rewrite(&[1]));
        assert_eq!(
            next_blob_gc_step(&files, BlobGcGoal::Staleness(0.0)),
            rewrite(&[1, 2]),
            "the third file frees nothing"
        );
        assert_eq!(next_blob_gc_step(&[], BlobGcGoal::Staleness(0.0)), BlobGcStep::Done);
        assert_eq!(next_blob_gc_step(&[], BlobGcGoal::SpaceAmp(1.0)), BlobGcStep::Done);
        assert_eq!(
            next_blob_gc_step(&[known(1, 100, 0)], BlobGcGoal::SpaceAmp(50.0)),
            rewrite(&[1]),
            "nothing is live"
        );
    }
}

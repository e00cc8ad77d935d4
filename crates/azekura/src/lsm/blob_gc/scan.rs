//! Measures exactly how stale blob files are: a merge of all tables that writes nothing.
//!
//! The scan reads keys and pointers, but no values. A value that a compaction would drop is stale although tables still
//! refer to it. A value that a compaction would keep only for older readers is pinned by them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

use crate::base::blob_pointer::BlobPointer;
use crate::base::version_edit::FileNumber;
use crate::base::{KeyOrder, RecordKind, Result, SeqNo};
use crate::iter::InternalIter;
use crate::iter::merge::MergingIter;
use crate::lsm::blob::direct_file::DirectBlobFile;
use crate::lsm::blob::map::{BlobFileStats, BlobMap};
use crate::lsm::blob_gc::picker::BlobGarbageStats;
use crate::lsm::compaction_iter::{DropDecision, VersionDropRules};
use crate::lsm::read::RunIter;
use crate::lsm::super_version::SuperVersion;
use crate::lsm::table_handle::{TableHandle, TreeContext};
use crate::lsm::version::{BOTTOM_LEVEL, HasTableMeta, Version};

/// Result of a scan.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlobScanResult {
    /// By file number.
    pub(crate) files: Vec<BlobGarbageStats>,
    /// Tables of the bottom level that may have invisible pointers.
    pub(crate) tables_hiding_garbage: BTreeSet<FileNumber>,
}

/// The last scan, while it is valid.
#[derive(Clone, Debug)]
pub(crate) struct CachedBlobScan {
    version: Weak<Version<TableHandle>>,
    snapshots: Vec<SeqNo>,
    files_with_pointers: BTreeSet<FileNumber>,
    result: Arc<BlobScanResult>,
}

impl CachedBlobScan {
    /// The result, if the scan was of this version and these snapshots.
    pub(crate) fn get_if_valid(
        &self,
        version: &Arc<Version<TableHandle>>,
        snapshots: &[SeqNo],
        counted: &BTreeSet<FileNumber>,
    ) -> Option<Arc<BlobScanResult>> {
        // The `Weak` keeps the allocation, so no other version can have this address.
        let same = std::ptr::eq(self.version.as_ptr(), Arc::as_ptr(version)) && self.snapshots == snapshots;
        (same && self.files_with_pointers == *counted).then(|| Arc::clone(&self.result))
    }
}

/// Replaces snapshots above the last record by its sequence number, because they see the same records of the tables. So
/// a result stays valid while records are written to memtables.
pub(crate) fn clamp_to_last_record(mut snapshots: Vec<SeqNo>, version: &Version<TableHandle>) -> Vec<SeqNo> {
    let last = version.tables().map(|(_, table)| table.meta().largest_seqno).max().unwrap_or(SeqNo::ZERO);
    snapshots.iter_mut().for_each(|point| *point = (*point).min(last));
    snapshots.dedup();
    snapshots
}

/// The visible values of a logical file.
#[derive(Clone, Copy, Debug, Default)]
struct ReachableBlobs {
    retained_values: u64,
    retained_bytes: u64,
    live_bytes: u64,
}

/// A scan in progress. It can pause after any entry, and holds the tables that it reads.
pub(crate) struct BlobScan {
    input: MergingIter,
    version: Arc<Version<TableHandle>>,
    snapshots: Vec<SeqNo>,
    order: KeyOrder,
    /// The drop rules with all snapshots, and with the newest one alone.
    all_readers_rules: VersionDropRules,
    new_readers_rules: VersionDropRules,
    started: bool,
    key: Option<Vec<u8>>,
    reachable: BTreeMap<FileNumber, ReachableBlobs>,
    tables_hiding_garbage: BTreeSet<FileNumber>,
    /// The direct blob files, if memtables are scanned.
    direct_blobs: Vec<Arc<DirectBlobFile>>,
    /// The logical files that memtables may point into, if memtables are not scanned.
    files_with_pointers: BTreeSet<FileNumber>,
}

impl BlobScan {
    /// Scans the tables of `now`, and its memtables if `memory`. `snapshots`: those of all readers, at least one.
    /// `counted` was taken before `now`.
    pub(crate) fn new(
        context: &TreeContext,
        now: &SuperVersion,
        snapshots: Vec<SeqNo>,
        memory: bool,
        counted: BTreeSet<FileNumber>,
    ) -> BlobScan {
        let version = Arc::clone(&now.version);
        let snapshots = if memory { snapshots } else { clamp_to_last_record(snapshots, &version) };
        let mut children: Vec<Box<dyn InternalIter>> = Vec::new();
        let memtables = std::iter::once(&now.active).chain(now.sealed.iter()).filter(|_| memory);
        children.extend(memtables.map(|memtable| Box::new(memtable.iter()) as Box<dyn InternalIter>));
        for run in version.runs() {
            children.push(Box::new(RunIter::new(Arc::clone(run), context, false)));
        }
        BlobScan {
            input: MergingIter::new(context.order.clone(), children),
            version,
            order: context.order.clone(),
            all_readers_rules: VersionDropRules::new(snapshots.clone()),
            new_readers_rules: VersionDropRules::new(snapshots.last().map(|&point| vec![point]).unwrap_or_default()),
            snapshots,
            started: false,
            key: None,
            reachable: BTreeMap::new(),
            tables_hiding_garbage: BTreeSet::new(),
            direct_blobs: now.direct_blobs.files().filter(|_| memory).map(Arc::clone).collect(),
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
        }
        let keeps = |retain: &mut VersionDropRules| {
            let keeps = retain.decide(entry.seqno, entry.kind) == DropDecision::Keep;
            if keeps {
                retain.take_deferred().for_each(drop);
            }
            keeps
        };
        let (kept, live) = (keeps(&mut self.all_readers_rules), keeps(&mut self.new_readers_rules));
        if entry.kind != RecordKind::BlobPointer {
            return Ok(());
        }
        let pointer = BlobPointer::decode(entry.value)?;
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

    /// The result, after [`step`](BlobScan::step) has returned true, also in the form that is cached.
    pub(crate) fn finish(self) -> (Arc<BlobScanResult>, CachedBlobScan) {
        let blobs = self.version.blobs();
        let figures = |uses: &BlobFileStats, logical: &mut dyn Iterator<Item = FileNumber>| {
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
        let files = blobs.handles().zip(blobs.stats()).map(|(handle, uses)| {
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
        let (version, snapshots, counted) = (Arc::downgrade(&self.version), self.snapshots, self.files_with_pointers);
        (Arc::clone(&scanned), CachedBlobScan { version, snapshots, files_with_pointers: counted, result: scanned })
    }
}

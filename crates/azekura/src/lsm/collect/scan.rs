//! How stale blob files are, exactly: a merge of all tables that writes nothing.
//!
//! Keys and pointers are read, no value is. What a merge would drop is stale although tables still refer to it; what it
//! would keep only for older readers is pinned by them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};

use crate::base::blob_ref::BlobRef;
use crate::base::edit::FileId;
use crate::base::{KeyOrder, RecordKind, Result, SeqNo};
use crate::cursor::Cursor;
use crate::cursor::merge::MergeCursor;
use crate::lsm::blobs::early::EarlyFile;
use crate::lsm::blobs::map::{BlobFileUse, BlobMap};
use crate::lsm::collect::plan::FileFigures;
use crate::lsm::handle::{TableHandle, TreeContext};
use crate::lsm::read::RunCursor;
use crate::lsm::retain::{Fate, Retain};
use crate::lsm::super_version::SuperVersion;
use crate::lsm::version::{BOTTOM, Described, Version};

/// What a scan has found.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scanned {
    /// By the numbers of the files.
    pub(crate) files: Vec<FileFigures>,
    /// Tables of the bottom level that may hold pointers nobody can see.
    pub(crate) hiding: BTreeSet<FileId>,
}

/// The last scan, for as long as it holds.
#[derive(Clone, Debug)]
pub(crate) struct Remembered {
    version: Weak<Version<TableHandle>>,
    points: Vec<SeqNo>,
    counted: BTreeSet<FileId>,
    scanned: Arc<Scanned>,
}

impl Remembered {
    /// What was found, if it was found in this version, for these readers.
    pub(crate) fn of(
        &self,
        version: &Arc<Version<TableHandle>>,
        points: &[SeqNo],
        counted: &BTreeSet<FileId>,
    ) -> Option<Arc<Scanned>> {
        // The weak count keeps the place in memory, so no other version can be there.
        let same = std::ptr::eq(self.version.as_ptr(), Arc::as_ptr(version)) && self.points == points;
        (same && self.counted == *counted).then(|| Arc::clone(&self.scanned))
    }
}

/// Points behind the last record are the same moment: so what was found holds on while others write.
pub(crate) fn moments(mut points: Vec<SeqNo>, version: &Version<TableHandle>) -> Vec<SeqNo> {
    let last = version.tables().map(|(_, table)| table.meta().highest).max().unwrap_or(SeqNo::ZERO);
    points.iter_mut().for_each(|point| *point = (*point).min(last));
    points.dedup();
    points
}

/// What may be seen of a logical file.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    kept: u64,
    kept_bytes: u64,
    live_bytes: u64,
}

/// A scan under way; it can stop after any entry, and keeps the tables that it walks.
pub(crate) struct Scan {
    cursor: MergeCursor,
    version: Arc<Version<TableHandle>>,
    points: Vec<SeqNo>,
    order: KeyOrder,
    /// For all readers, and for new ones alone.
    all: Retain,
    newest: Retain,
    started: bool,
    key: Option<Vec<u8>>,
    seen: BTreeMap<FileId, Seen>,
    hiding: BTreeSet<FileId>,
    /// Early files that memory points into, if that is scanned.
    early: Vec<Arc<EarlyFile>>,
    /// Logical files that memory points into, if that is not.
    counted: BTreeSet<FileId>,
}

impl Scan {
    /// Of the tables of `now`, and of its memtables if `memory` says so. `points` are those that readers have, at least
    /// one; `counted` was taken before `now`.
    pub(crate) fn new(
        context: &TreeContext,
        now: &SuperVersion,
        points: Vec<SeqNo>,
        memory: bool,
        counted: BTreeSet<FileId>,
    ) -> Scan {
        let version = Arc::clone(&now.version);
        let points = if memory { points } else { moments(points, &version) };
        let mut children: Vec<Box<dyn Cursor>> = Vec::new();
        let memtables = std::iter::once(&now.active).chain(now.sealed.iter()).filter(|_| memory);
        children.extend(memtables.map(|memtable| Box::new(memtable.cursor()) as Box<dyn Cursor>));
        for run in version.runs() {
            children.push(Box::new(RunCursor::new(Arc::clone(run), context, false)));
        }
        Scan {
            cursor: MergeCursor::new(context.order.clone(), children),
            version,
            order: context.order.clone(),
            all: Retain::new(points.clone()),
            newest: Retain::new(points.last().map(|&point| vec![point]).unwrap_or_default()),
            points,
            started: false,
            key: None,
            seen: BTreeMap::new(),
            hiding: BTreeSet::new(),
            early: now.early.files().filter(|_| memory).map(Arc::clone).collect(),
            counted: if memory { BTreeSet::new() } else { counted },
        }
    }

    /// Goes on for about `budget` entries; true at the end.
    ///
    /// # Errors
    /// Those of reading tables; `Corruption` for an entry that is no pointer and should be.
    pub(crate) fn step(&mut self, budget: u64) -> Result<bool> {
        if !self.started {
            self.cursor.seek_to_first()?;
            self.started = true;
        }
        for _ in 0..budget {
            if !self.cursor.valid() {
                return Ok(true);
            }
            self.take()?;
            self.cursor.next()?;
        }
        Ok(!self.cursor.valid())
    }

    fn take(&mut self) -> Result<()> {
        let entry = self.cursor.entry();
        if self.key.as_ref().is_none_or(|key| self.order.cmp(key, entry.user).is_ne()) {
            for retain in [&mut self.all, &mut self.newest] {
                retain.end_key(true).for_each(drop);
            }
            let key = self.key.get_or_insert_default();
            key.clear();
            key.extend_from_slice(entry.user);
        }
        let keeps = |retain: &mut Retain| {
            let keeps = retain.next(entry.seqno, entry.kind) == Fate::Keep;
            if keeps {
                retain.release().for_each(drop);
            }
            keeps
        };
        let (kept, live) = (keeps(&mut self.all), keeps(&mut self.newest));
        if entry.kind != RecordKind::BlobPointer {
            return Ok(());
        }
        let pointer = BlobRef::decode(entry.value)?;
        if kept {
            let seen = self.seen.entry(pointer.logical).or_default();
            seen.kept += 1;
            seen.kept_bytes += pointer.stored;
            seen.live_bytes += if live { pointer.stored } else { 0 };
        } else if let Some(table) = self.version.run(BOTTOM).and_then(|run| run.find(entry.user, &self.order))
            && table.meta().blobs.iter().any(|uses| uses.logical == pointer.logical)
        {
            self.hiding.insert(table.meta().id);
        }
        Ok(())
    }

    /// What it has found, once [`step`](Scan::step) has said true; also to be remembered.
    pub(crate) fn finish(self) -> (Arc<Scanned>, Remembered) {
        let blobs = self.version.blobs();
        let figures = |uses: &BlobFileUse, logical: &mut dyn Iterator<Item = FileId>| {
            let mut figures = FileFigures { kept_values: 0, kept_bytes: 0, live_bytes: 0, ..FileFigures::of_use(uses) };
            for seen in logical.filter_map(|logical| self.seen.get(&logical)) {
                figures.kept_values += seen.kept;
                figures.kept_bytes += seen.kept_bytes;
                figures.live_bytes += seen.live_bytes;
            }
            figures
        };
        let files = blobs.handles().zip(blobs.uses()).map(|(handle, uses)| {
            let figures = figures(&uses, &mut handle.meta().sections.iter().map(|section| section.logical));
            if BlobMap::is_counted(handle, &self.counted) { figures.as_if_live() } else { figures }
        });
        let early = self.early.iter().map(|file| figures(&file.uses(), &mut std::iter::once(file.id)));
        let files = files.chain(early).collect();
        let scanned = Arc::new(Scanned { files, hiding: self.hiding });
        let (version, points, counted) = (Arc::downgrade(&self.version), self.points, self.counted);
        (Arc::clone(&scanned), Remembered { version, points, counted, scanned })
    }
}

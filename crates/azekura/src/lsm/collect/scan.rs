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
    scanned: Arc<Scanned>,
}

impl Remembered {
    /// What was found, if it was found in this version, for these readers.
    pub(crate) fn of(&self, version: &Arc<Version<TableHandle>>, points: &[SeqNo]) -> Option<Arc<Scanned>> {
        // The weak count keeps the place in memory, so no other version can be there.
        let same = std::ptr::eq(self.version.as_ptr(), Arc::as_ptr(version)) && self.points == points;
        same.then(|| Arc::clone(&self.scanned))
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
}

impl Scan {
    /// Of the tables of `now`, and of its memtables if `memory` says so. `points` are those that readers have, at least
    /// one.
    pub(crate) fn new(context: &TreeContext, now: &SuperVersion, points: Vec<SeqNo>, memory: bool) -> Scan {
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
        let files = blobs.handles().zip(blobs.uses()).map(|(handle, uses)| {
            let (id, values, bytes) = (uses.id, uses.values, uses.bytes);
            let (mut kept_values, mut kept_bytes, mut live_bytes) = (0, 0, 0);
            for section in &handle.meta().sections {
                let seen = self.seen.get(&section.logical).copied().unwrap_or_default();
                kept_values += seen.kept;
                kept_bytes += seen.kept_bytes;
                live_bytes += seen.live_bytes;
            }
            let referenced_bytes = uses.referenced_bytes;
            FileFigures { id, values, bytes, referenced_bytes, kept_values, kept_bytes, live_bytes }
        });
        let scanned = Arc::new(Scanned { files: files.collect(), hiding: self.hiding });
        let (version, points) = (Arc::downgrade(&self.version), self.points);
        (Arc::clone(&scanned), Remembered { version, points, scanned })
    }
}

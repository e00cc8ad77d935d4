//! Reads of a tree: the super version that a reader takes without a lock, lookups, iterators, and the values of blob
//! pointers.

use std::sync::{Arc, Mutex};

use crate::base::blob_pointer::BlobPointer;
use crate::base::shared_bytes::SharedBytes;
use crate::base::sync::lock;
use crate::base::version_edit::FileNumber;
use crate::base::{EntryRef, Error, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::blob::reader::BlobReadAhead;
use crate::engine::{BlobResolver, ReadSeqno};
use crate::iter::InternalIter;
use crate::iter::merge::MergingIter;
use crate::lsm::blob_map::{BlobHandle, BlobMap};
use crate::lsm::direct_file::DirectBlobFiles;
use crate::lsm::table_handle::{TableHandle, TreeContext};
use crate::lsm::version::{HasTableMeta, SortedRun, Version};
use crate::mem::epoch::{EpochCell, Pin};
use crate::mem::slice::Slice;
use crate::memtable::Memtable;
use crate::table::block_fetcher::BlockValue;
use crate::table::iter::TableIter;
use crate::table::reader::PointLookup;

/// The memtables and the tables of a tree. A flush replaces its memtables by its tables in one step, so that every
/// record is found.
#[derive(Clone)]
pub(crate) struct SuperVersion {
    pub(crate) active: Arc<Memtable>,
    /// Newest first; none of them is empty.
    pub(crate) sealed: Arc<[Arc<Memtable>]>,
    pub(crate) version: Arc<Version<TableHandle>>,
    /// Blob files that memtables may point into and `version` does not have.
    pub(crate) direct_blobs: Arc<DirectBlobFiles>,
    /// Every record up to here is in the tables of `version`.
    pub(crate) flushed_through: SeqNo,
}

impl SuperVersion {
    /// The blob file that has the values of a logical file.
    pub(crate) fn blob_file(&self, logical: FileNumber) -> Option<&Arc<BlobHandle>> {
        find_blob_file(self.version.blobs(), &self.direct_blobs, logical)
    }
}

/// The current super version. Thread safe: readers never wait, and threads that replace it exclude each other.
pub(crate) struct SuperVersionCell {
    cell: EpochCell<SuperVersion>,
    replace_lock: Mutex<()>,
}

impl SuperVersionCell {
    pub(crate) fn new(first: SuperVersion) -> SuperVersionCell {
        SuperVersionCell { cell: EpochCell::new(Arc::new(first)), replace_lock: Mutex::new(()) }
    }

    /// Calls `read` with the current super version. The caller clones the parts that it needs later.
    pub(crate) fn with<R>(&self, read: impl FnOnce(&SuperVersion) -> R) -> R {
        read(&self.cell.load())
    }

    /// The same with the epoch pin, which keeps the super version and all blocks that child links point to.
    #[inline]
    pub(crate) fn with_pin<R>(&self, read: impl FnOnce(&SuperVersion, &Pin) -> R) -> R {
        let guard = self.cell.load();
        read(&guard, guard.pin())
    }

    /// Returns a copy that the caller may keep.
    pub(crate) fn get(&self) -> SuperVersion {
        self.with(SuperVersion::clone)
    }

    /// Replaces the current super version by `next(current)`. `next` must be fast, because it runs under the lock that
    /// sealing a memtable takes.
    pub(crate) fn replace(&self, next: impl FnOnce(&SuperVersion) -> SuperVersion) {
        let _turn = lock(&self.replace_lock);
        let next = self.with(next);
        #[cfg(any(test, feature = "testing"))]
        let old = Arc::downgrade(&self.cell.load_arc());
        self.cell.store(Arc::new(next));
        #[cfg(any(test, feature = "testing"))]
        wait_until_dropped(&old);
    }
}

/// In builds for tests: waits for the readers of a replaced super version, for a bounded time. Otherwise a test that
/// expects a file to be removed could fail because a thread of another test is pinned and does not run.
#[cfg(any(test, feature = "testing"))]
fn wait_until_dropped(old: &std::sync::Weak<SuperVersion>) {
    const YIELDS_MAX: usize = 100;
    for _ in 0..YIELDS_MAX {
        if old.strong_count() == 0 {
            return;
        }
        crate::mem::atomic::yield_now();
    }
}

impl SuperVersion {
    /// Finds the version of `key` that is visible at `at`, and passes its value or blob pointer to `read`, in place.
    /// Searches memtables and then runs, each from the newest. The first version found is the newest one.
    ///
    /// The caller has taken `self` before this resolves `Latest`, so that `self` contains every visible record.
    pub(crate) fn find<R>(
        &self,
        context: &TreeContext,
        key: &[u8],
        at: ReadSeqno,
        pin: &Pin,
        read: impl FnOnce(RecordKind, BlockValue<'_>) -> R,
    ) -> Result<Option<R>> {
        let at = match at {
            ReadSeqno::Latest => context.last_visible.get(),
            ReadSeqno::At(seqno) => seqno,
        };
        let lookup = PointLookup::new(key, at, &context.order, context.hash_seed);
        for memtable in std::iter::once(&self.active).chain(self.sealed.iter()) {
            if let Some(entry) = memtable.get(key, lookup.hash, at) {
                return Ok(entry.kind.is_value().then(|| read(entry.kind, BlockValue::unpinned(entry.value))));
            }
        }
        find_in_tables(&self.version, &context.order, &lookup, pin, read)
    }

    /// An iterator over all entries of this super version. It holds the tables. Entries that a memtable gets later are
    /// above every sequence number that was chosen before.
    pub(crate) fn iter(&self, context: &TreeContext) -> Box<dyn InternalIter> {
        let mut children = self.iterators(context, true, true);
        match children.len() {
            1 => children.remove(0),
            _ => Box::new(MergingIter::new(context.order.clone(), children)),
        }
    }

    /// Iterators over the runs, and over the memtables if `memory`.
    pub(crate) fn iterators(
        &self,
        context: &TreeContext,
        memory: bool,
        fill_cache: bool,
    ) -> Vec<Box<dyn InternalIter>> {
        let memtables = std::iter::once(&self.active).chain(self.sealed.iter());
        let memtables = memtables.filter(|memtable| memory && !memtable.is_empty());
        let memtables = memtables.map(|memtable| Box::new(memtable.iter()) as Box<dyn InternalIter>);
        let runs = self.version.runs().map(|run| RunIter::new(Arc::clone(run), context, fill_cache));
        memtables.chain(runs.map(|run| Box::new(run) as Box<dyn InternalIter>)).collect()
    }
}

fn find_in_tables<R>(
    version: &Version<TableHandle>,
    order: &KeyOrder,
    lookup: &PointLookup<'_>,
    pin: &Pin,
    read: impl FnOnce(RecordKind, BlockValue<'_>) -> R,
) -> Result<Option<R>> {
    let mut read = Some(read); // used once, in the table that has the key
    for run in version.runs() {
        let Some(table) = run.find(lookup.key, order) else { continue };
        if table.meta().smallest_seqno > lookup.snapshot_seqno {
            continue;
        }
        let found = table.table()?.get_with(lookup, pin, |_, kind, value| {
            let read = read.take().filter(|_| kind.is_value());
            read.map(|read| read(kind, value))
        })?;
        if let Some(value) = found {
            return Ok(value);
        }
    }
    Ok(None)
}

/// Iterates over the tables of a run and opens each of them when it is reached. Holds the run, and so its files.
pub(crate) struct RunIter {
    // Declared before `run`, so that the open table is dropped before the handles that make files obsolete.
    table_iter: Option<TableIter>,
    table_index: usize,
    run: Arc<SortedRun<TableHandle>>,
    order: KeyOrder,
    fill_cache: bool,
}

impl RunIter {
    pub(crate) fn new(run: Arc<SortedRun<TableHandle>>, context: &TreeContext, fill_cache: bool) -> RunIter {
        RunIter { table_iter: None, table_index: 0, run, order: context.order.clone(), fill_cache }
    }

    /// Opens the table at index `at`, unless it is open; `None` if there is no such table.
    fn open(&mut self, at: usize) -> Result<Option<&mut TableIter>> {
        let Some(handle) = self.run.tables().get(at) else {
            self.table_iter = None;
            return Ok(None);
        };
        if self.table_iter.is_none() || self.table_index != at {
            self.table_iter = None;
            self.table_iter = Some(handle.table()?.iter(self.fill_cache));
            self.table_index = at;
        }
        Ok(self.table_iter.as_mut())
    }

    /// Moves from the end of a table to the next entry in another table: after it, or before it if not `forward`.
    fn settle(&mut self, forward: bool) -> Result<()> {
        while self.table_iter.as_ref().is_some_and(|inner| !inner.valid()) {
            let next = if forward { self.table_index + 1 } else { self.table_index.wrapping_sub(1) };
            if let Some(inner) = self.open(next)? {
                if forward { inner.seek_to_first()? } else { inner.seek_to_last()? }
            }
        }
        Ok(())
    }

    /// Runs `step` on the table at index `at`, if there is such a table, and [settles](RunIter::settle). The iterator
    /// is not valid after an error.
    fn step_in_table(
        &mut self,
        at: usize,
        forward: bool,
        step: impl FnOnce(&mut TableIter) -> Result<()>,
    ) -> Result<()> {
        let stepped = match self.open(at) {
            Ok(Some(inner)) => step(inner).and_then(|()| self.settle(forward)),
            opened => opened.map(drop),
        };
        stepped.inspect_err(|_| self.table_iter = None)
    }
}

fn internal_key<'a>((user_key, seqno): &'a (Vec<u8>, SeqNo)) -> InternalKey<'a> {
    InternalKey::new(user_key, *seqno)
}

impl InternalIter for RunIter {
    fn seek_to_first(&mut self) -> Result<()> {
        self.step_in_table(0, true, TableIter::seek_to_first)
    }

    fn seek_to_last(&mut self) -> Result<()> {
        self.step_in_table(self.run.tables().len().wrapping_sub(1), false, TableIter::seek_to_last)
    }

    fn seek(&mut self, target: InternalKey<'_>) -> Result<()> {
        let ends_before = |t: &Arc<TableHandle>| internal_key(&t.meta().largest_key).cmp(&target, &self.order).is_lt();
        let at = self.run.tables().partition_point(ends_before);
        self.step_in_table(at, true, |inner| inner.seek(target))
    }

    fn seek_before(&mut self, target: InternalKey<'_>) -> Result<()> {
        let begins_before =
            |t: &Arc<TableHandle>| internal_key(&t.meta().smallest_key).cmp(&target, &self.order).is_lt();
        let behind = self.run.tables().partition_point(begins_before);
        self.step_in_table(behind.wrapping_sub(1), false, |inner| inner.seek_before(target))
    }

    #[inline]
    fn next(&mut self) -> Result<()> {
        let Some(inner) = &mut self.table_iter else { return Ok(()) };
        match inner.next() {
            Ok(()) if inner.valid() => Ok(()),
            moved => moved.and_then(|()| self.settle(true)).inspect_err(|_| self.table_iter = None),
        }
    }

    fn next_key(&mut self) -> Result<Option<(InternalKey<'_>, RecordKind)>> {
        self.next()?;
        Ok(self.table_iter.as_ref().and_then(TableIter::key_and_kind))
    }

    fn prev(&mut self) -> Result<()> {
        let Some(inner) = &mut self.table_iter else { return Ok(()) };
        let moved = inner.prev();
        moved.and_then(|()| self.settle(false)).inspect_err(|_| self.table_iter = None)
    }

    fn valid(&self) -> bool {
        self.table_iter.as_ref().is_some_and(|inner| inner.valid())
    }

    fn entry(&self) -> EntryRef<'_> {
        self.table_iter.as_ref().expect("the iterator is valid").entry()
    }

    fn current(&self) -> Option<EntryRef<'_>> {
        self.table_iter.as_ref().and_then(TableIter::current)
    }

    fn shared_value(&self) -> Option<SharedBytes> {
        self.table_iter.as_ref().and_then(TableIter::shared_value)
    }
}

/// Maximum number of blob files in which an iterator reads ahead at a time.
const READ_AHEAD_FILES_MAX: usize = 4;

/// The error for a pointer to a file that neither the version nor the direct blob files have.
pub(crate) fn missing_blob_file_error(pointer: &BlobPointer) -> Error {
    Error::corruption(format!("value is in blob file {}, which the partition does not have", pointer.logical_file.0))
}

/// Resolves pointers of an iterator. Reads ahead in a blob file if successive values follow each other in it.
pub(crate) struct ReadAheadBlobResolver {
    /// The files read last, most recent first.
    read_ahead: Vec<(FileNumber, BlobReadAhead)>,
    blobs: Arc<BlobMap>,
    direct_blobs: Arc<DirectBlobFiles>,
}

impl ReadAheadBlobResolver {
    /// Uses the blob files of `now`, which contain every value that is visible at `now`.
    pub(crate) fn new(now: &SuperVersion) -> ReadAheadBlobResolver {
        let (blobs, direct_blobs) = (Arc::clone(now.version.blobs()), Arc::clone(&now.direct_blobs));
        ReadAheadBlobResolver { read_ahead: Vec::new(), blobs, direct_blobs }
    }
}

impl BlobResolver for ReadAheadBlobResolver {
    fn resolve(&mut self, pointer: &[u8]) -> Result<Slice> {
        let pointer = BlobPointer::decode(pointer)?;
        let file = find_blob_file(&self.blobs, &self.direct_blobs, pointer.logical_file);
        let handle = file.ok_or_else(|| missing_blob_file_error(&pointer))?;
        let id = handle.meta().number;
        let at = self.read_ahead.iter().position(|(file, _)| *file == id);
        let recent = match at {
            Some(at) => self.read_ahead.remove(at),
            None => (id, BlobReadAhead::adaptive()),
        };
        self.read_ahead.insert(0, recent);
        self.read_ahead.truncate(READ_AHEAD_FILES_MAX);
        handle.file().read(&pointer, Some(&mut self.read_ahead[0].1))
    }
}

fn find_blob_file<'a>(
    blobs: &'a BlobMap,
    direct_blobs: &'a DirectBlobFiles,
    logical: FileNumber,
) -> Option<&'a Arc<BlobHandle>> {
    blobs.handle(logical).or_else(|| direct_blobs.get(&logical).map(|file| &file.handle))
}

//! Reads of a tree: the super version that a reader takes without a lock, lookups, iterators, and the values of blob
//! pointers.

use std::ops::Bound;
use std::sync::{Arc, Mutex};

use crate::base::blob_pointer::BlobPointer;
use crate::base::key::{EXPIRY_LEN, split_expiry};
use crate::base::key_range::{KeyBoundary, KeyRange};
use crate::base::shared_bytes::SharedBytes;
use crate::base::sync::lock;
use crate::base::version_edit::FileNumber;
use crate::base::{EntryRef, Error, InternalKey, KeyOrder, RecordKind, Result, SeqNo};
use crate::blob::reader::{BlobFile, BlobReadAhead};
use crate::engine::{BlobResolver, KeyBounds, ReadSeqno};
use crate::iter::InternalIter;
use crate::iter::merge::MergingIter;
use crate::iter::range_filter::{RangeTombstoneReader, SkippingIter, hide_covered, seek_before, seek_behind};
use crate::iter::range_tombstones::RangeTombstones;
use crate::lsm::blob_map::{BlobHandle, BlobMap};
use crate::lsm::direct_file::DirectBlobFiles;
use crate::lsm::table_handle::TableHandle;
use crate::lsm::tree_context::TreeContext;
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
    /// Whether `sealed` or `version` have range deletes, so that a lookup need not ask each of them. The
    /// [`SuperVersionCell`] sets it.
    pub(crate) has_older_range_deletes: bool,
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
    pub(crate) fn new(mut first: SuperVersion) -> SuperVersionCell {
        first.has_older_range_deletes = first.find_older_range_deletes();
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
        let mut next = self.with(next);
        next.has_older_range_deletes = next.find_older_range_deletes();
        if cfg!(debug_assertions) {
            self.with(|before| next.check_invariants(before));
        }
        #[cfg(any(test, feature = "testing"))]
        let old = Arc::downgrade(&self.cell.load_arc());
        self.cell.store(Arc::new(next));
        #[cfg(any(test, feature = "testing"))]
        wait_until_dropped(&old);
    }
}

/// In builds for tests: waits for the calls that may read a replaced super version. Otherwise a test that expects a
/// file to be removed could fail because a thread of another test is pinned and does not run. Gives up when only
/// iterators hold the super version, or after some time, because a call may wait for the calling thread.
#[cfg(any(test, feature = "testing"))]
fn wait_until_dropped(old: &std::sync::Weak<SuperVersion>) {
    use crate::vfs::env::{Env, SystemEnv};
    const WAIT_NS_MAX: u64 = 5_000_000_000;
    let (env, replaced) = (SystemEnv::new(), crate::mem::epoch::RetireEpoch::advance());
    let start_ns = env.monotonic_ns();
    while old.strong_count() > 0 && env.monotonic_ns() - start_ns < WAIT_NS_MAX {
        let is_unread = replaced.others_unpinned();
        drop(Pin::new()); // frees it if it is unread
        if is_unread {
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
        let read_at = at;
        let at = match at {
            ReadSeqno::Latest => context.last_visible.get(),
            ReadSeqno::At(moment) => moment.seqno,
        };
        if self.has_range_deletes() {
            return self.find_among_range_deletes(context, key, read_at, pin, read);
        }
        let lookup = PointLookup::new(key, at, &context.order, context.hash_seed);
        for memtable in std::iter::once(&self.active).chain(self.sealed.iter()) {
            if let Some(entry) = memtable.get(key, lookup.hash, at) {
                return read_unexpired(context, read_at, entry.kind, BlockValue::unpinned(entry.value), read);
            }
        }
        find_in_tables(&self.version, context, &lookup, (SeqNo::ZERO, read_at), pin, read)
    }

    /// Whether there are range deletes. A caller that has read the visible sequence number finds those up to it.
    #[inline]
    pub(crate) fn has_range_deletes(&self) -> bool {
        self.has_older_range_deletes || self.active.has_range_deletes()
    }

    /// Panics if the memtables are not in the order of their records, or if this does not follow `before`.
    fn check_invariants(&self, before: &SuperVersion) {
        assert!(self.sealed.iter().all(|memtable| !memtable.is_empty()), "no sealed memtable is empty");
        let is_newer = |pair: &[Arc<Memtable>]| pair[0].smallest_seqno() > pair[1].largest_seqno();
        assert!(self.sealed.windows(2).all(is_newer), "sealed memtables are newest first");
        // The number is 0 before the first record of the active memtable, and while that is being inserted.
        let first = self.active.smallest_seqno();
        let is_newer = first > self.largest_sealed_seqno();
        assert!(first == SeqNo::ZERO || is_newer, "the active memtable is newer than the sealed ones");
        assert!(self.flushed_through >= before.flushed_through, "flushed records stay in tables");
        let is_unfinished = |file: &FileNumber| !self.version.blobs().contains(*file);
        assert!(self.direct_blobs.keys().all(is_unfinished), "the version does not have a direct blob file");
    }

    /// The highest sequence number in a memtable; 0 if all are empty.
    pub(crate) fn largest_memtable_seqno(&self) -> SeqNo {
        self.largest_sealed_seqno().max(self.active.largest_seqno())
    }

    /// Sealed memtables are newest first.
    fn largest_sealed_seqno(&self) -> SeqNo {
        self.sealed.first().map_or(SeqNo::ZERO, |newest| newest.largest_seqno())
    }

    fn find_older_range_deletes(&self) -> bool {
        !self.version.range_tombstones().is_empty() || self.sealed.iter().any(|memtable| memtable.has_range_deletes())
    }

    /// As [`find`](SuperVersion::find). A source is not searched if a range delete over `key` is newer than all of it.
    #[inline(never)]
    fn find_among_range_deletes<R>(
        &self,
        context: &TreeContext,
        key: &[u8],
        at: ReadSeqno,
        pin: &Pin,
        read: impl FnOnce(RecordKind, BlockValue<'_>) -> R,
    ) -> Result<Option<R>> {
        let read_at = at;
        let (at, active) = match at {
            ReadSeqno::At(at) => (at.seqno, self.active.range_tombstones(pin)),
            // The set has every range delete up to the first number, and all that a reader at the second one needs.
            ReadSeqno::Latest => loop {
                let at = context.last_visible.get();
                let active = self.active.range_tombstones(pin);
                if context.last_visible.get() == at {
                    break (at, active);
                }
            },
        };
        let (order, lookup) = (&context.order, PointLookup::new(key, at, &context.order, context.hash_seed));
        let mut removed = active.covering_seqno(key, at, order);
        for (n, memtable) in std::iter::once(&self.active).chain(self.sealed.iter()).enumerate() {
            if n > 0 && memtable.has_range_deletes() {
                removed = removed.max(memtable.range_tombstones(pin).covering_seqno(key, at, order));
            }
            if memtable.largest_record_seqno() < removed {
                continue;
            }
            if let Some(entry) = memtable.get(key, lookup.hash, at) {
                return match entry.seqno >= removed {
                    true => read_unexpired(context, read_at, entry.kind, BlockValue::unpinned(entry.value), read),
                    false => Ok(None),
                };
            }
        }
        removed = removed.max(self.version.range_tombstones().covering_seqno(key, at, order));
        find_in_tables(&self.version, context, &lookup, (removed, read_at), pin, read)
    }

    /// The range tombstones of the memtables, from the newest, and of the version.
    pub(crate) fn range_tombstones(&self) -> Vec<Arc<RangeTombstones>> {
        let memtables = std::iter::once(&self.active).chain(self.sealed.iter());
        let sets = memtables.map(|memtable| memtable.range_tombstones_arc());
        sets.chain([Arc::clone(self.version.range_tombstones())]).collect()
    }

    /// An iterator over the entries of this super version that no range delete up to `at` covers, expired ones
    /// included. It holds the tables.
    /// Entries that a memtable gets later are above every sequence number that was chosen before. `at` is registered.
    /// With `uses_prefix_filters` it may leave out entries beyond the bounds.
    pub(crate) fn iter(
        &self,
        context: &TreeContext,
        at: SeqNo,
        bounds: KeyBounds<'_>,
        uses_prefix_filters: bool,
    ) -> Box<dyn InternalIter> {
        let mut children = match (self.has_range_deletes(), uses_prefix_filters) {
            (true, _) => self.filtered_iterators(context, at, bounds, uses_prefix_filters),
            (false, true) => self.iterators_within(context, bounds),
            (false, false) => self.iterators(context, true, true),
        };
        match children.len() {
            1 => children.remove(0),
            _ => Box::new(MergingIter::new(context.order.clone(), children)),
        }
    }

    /// As [`iterators`](SuperVersion::iterators) of a reader of the entries within the bounds: leaves out tables whose
    /// prefix filters show that they have none.
    fn iterators_within(&self, context: &TreeContext, bounds: KeyBounds<'_>) -> Vec<Box<dyn InternalIter>> {
        let (lower, upper) = (bounds.0.map(Vec::as_slice), bounds.1.map(Vec::as_slice));
        let memtables = std::iter::once(&self.active).chain(self.sealed.iter());
        let memtables = memtables.filter(|memtable| memtable.has_records());
        let memtables = memtables.map(|memtable| Box::new(memtable.iter()) as Box<dyn InternalIter>);
        let runs = self.version.runs().filter_map(|run| tables_to_read(run, context, lower, upper));
        let runs = runs.map(|run| Box::new(RunIter::new(run, context, true)) as Box<dyn InternalIter>);
        memtables.chain(runs).collect()
    }

    /// Iterators over memtables and runs, without the entries that range deletes up to `at` cover.
    fn filtered_iterators(
        &self,
        context: &TreeContext,
        at: SeqNo,
        bounds: KeyBounds<'_>,
        uses_prefix_filters: bool,
    ) -> Vec<Box<dyn InternalIter>> {
        let sets = self.range_tombstones();
        // The range deletes of a memtable are newer than all older memtables and tables.
        let tombstones =
            |sets: &[Arc<RangeTombstones>]| RangeTombstoneReader::new(sets.to_vec(), at, context.order.clone());
        let mut children: Vec<Box<dyn InternalIter>> = Vec::new();
        for (n, memtable) in std::iter::once(&self.active).chain(self.sealed.iter()).enumerate() {
            if memtable.has_records() {
                children.push(hide_covered(memtable.iter(), tombstones(&sets[..=n]), bounds));
            }
        }
        let tombstones = tombstones(&sets);
        let (lower, upper) = (bounds.0.map(Vec::as_slice), bounds.1.map(Vec::as_slice));
        for run in self.version.runs() {
            let run = match uses_prefix_filters {
                true => tables_to_read(run, context, lower, upper),
                false => Some(Arc::clone(run)),
            };
            if let Some(run) = run {
                children.push(hide_covered(RunIter::new(run, context, true), tombstones.clone(), bounds));
            }
        }
        children
    }

    /// Iterators over the runs, and over the memtables if `memory`. Range deletes are not applied.
    pub(crate) fn iterators(
        &self,
        context: &TreeContext,
        memory: bool,
        fill_cache: bool,
    ) -> Vec<Box<dyn InternalIter>> {
        let memtables = std::iter::once(&self.active).chain(self.sealed.iter());
        let memtables = memtables.filter(|memtable| memory && memtable.has_records());
        let memtables = memtables.map(|memtable| Box::new(memtable.iter()) as Box<dyn InternalIter>);
        let runs = self.version.runs().map(|run| RunIter::new(Arc::clone(run), context, fill_cache));
        memtables.chain(runs.map(|run| Box::new(run) as Box<dyn InternalIter>)).collect()
    }
}

/// Passes the value of the newest visible record to `read`, unless the record is a tombstone or has expired.
#[inline(always)]
fn read_unexpired<R>(
    context: &TreeContext,
    at: ReadSeqno,
    kind: RecordKind,
    value: BlockValue<'_>,
    read: impl FnOnce(RecordKind, BlockValue<'_>) -> R,
) -> Result<Option<R>> {
    let (kind, value) = match kind {
        RecordKind::Put | RecordKind::BlobPointer => (kind, value),
        _ => match unexpired_value(context, at, kind, value)? {
            Some(value) => value,
            None => return Ok(None),
        },
    };
    Ok(Some(read(kind, value)))
}

/// Kind and value without the expiry time; `None` if the record is a tombstone or has expired.
#[cold]
pub(crate) fn unexpired_value<'a>(
    context: &TreeContext,
    at: ReadSeqno,
    kind: RecordKind,
    value: BlockValue<'a>,
) -> Result<Option<(RecordKind, BlockValue<'a>)>> {
    if !kind.has_expiry() {
        return Ok(kind.is_value().then_some((kind, value)));
    }
    let (expires_ms, plain_kind, _) = split_expiry(kind, &value)?;
    let now_ms = match at {
        ReadSeqno::Latest => context.snapshots.now_ms(),
        ReadSeqno::At(moment) => moment.now_ms,
    };
    Ok((expires_ms > now_ms).then(|| (plain_kind, value.without_prefix(EXPIRY_LEN))))
}

/// `removed`: the newest range delete over the key that the reader sees; 0 if there is none.
#[inline(always)]
fn find_in_tables<R>(
    version: &Version<TableHandle>,
    context: &TreeContext,
    lookup: &PointLookup<'_>,
    (removed, read_at): (SeqNo, ReadSeqno),
    pin: &Pin,
    read: impl FnOnce(RecordKind, BlockValue<'_>) -> R,
) -> Result<Option<R>> {
    let mut read = Some(read); // used once, in the table that has the key
    for run in version.runs() {
        let Some(table) = run.find(lookup.key, &context.order) else { continue };
        if table.meta().smallest_seqno > lookup.snapshot_seqno || table.meta().largest_seqno < removed {
            continue;
        }
        let found = table.table()?.get_with(lookup, pin, |seqno, kind, value| match read.take() {
            Some(read) if seqno >= removed => read_unexpired(context, read_at, kind, value, read),
            _ => Ok(None),
        })?;
        if let Some(value) = found {
            return value;
        }
    }
    Ok(None)
}

/// The part of a run that may have keys within the bounds; `None` if no table may.
fn tables_to_read(
    run: &Arc<SortedRun<TableHandle>>,
    context: &TreeContext,
    lower: Bound<&[u8]>,
    upper: Bound<&[u8]>,
) -> Option<Arc<SortedRun<TableHandle>>> {
    let within = run.tables_within(lower, upper, &context.order);
    if within.len() > FILTERED_TABLES_MAX {
        return Some(Arc::clone(run));
    }
    let tables = &run.tables()[within];
    // The error of a table that cannot be opened is reported when the table is read.
    let may_contain =
        |table: &&Arc<TableHandle>| table.table().map_or(true, |table| table.may_contain_range(lower, upper));
    let wanted: Vec<Arc<TableHandle>> = tables.iter().filter(may_contain).map(Arc::clone).collect();
    match wanted.len() {
        0 => None,
        len if len == tables.len() => Some(Arc::clone(run)),
        _ => Some(Arc::new(SortedRun::new(wanted, &context.order))),
    }
}

/// Maximum number of tables of one run whose prefix filters are checked.
const FILTERED_TABLES_MAX: usize = 4;

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
        debug_assert!(
            self.table_iter.is_none() || self.table_index < self.run.tables().len(),
            "the open table is in the run"
        );
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

impl SkippingIter for RunIter {
    fn skip_forward(&mut self, boundary: &KeyBoundary, seqno: SeqNo, order: &KeyOrder) -> Result<bool> {
        debug_assert!(
            order.is_custom() || self.current().is_some_and(|entry| boundary.cmp_key(entry.user_key, order).is_gt()),
            "the current entry is before the boundary"
        );
        let tables = &self.run.tables()[self.table_index..];
        let ends_the_skip = |table: &Arc<TableHandle>| {
            table.meta().largest_seqno >= seqno || boundary.cmp_key(&table.meta().largest_key.0, order).is_lt()
        };
        match tables.iter().position(ends_the_skip) {
            Some(0) if tables[0].meta().largest_seqno >= seqno => Ok(false),
            Some(n) if tables[n].meta().largest_seqno >= seqno => {
                self.step_in_table(self.table_index + n, true, TableIter::seek_to_first).map(|()| true)
            }
            _ => seek_behind(self, boundary, order).map(|()| true),
        }
    }

    fn skip_backward(&mut self, boundary: &KeyBoundary, seqno: SeqNo, order: &KeyOrder) -> Result<bool> {
        debug_assert!(
            order.is_custom() || self.current().is_some_and(|entry| boundary.cmp_key(entry.user_key, order).is_lt()),
            "the current entry is behind the boundary"
        );
        let tables = &self.run.tables()[..=self.table_index];
        let ends_the_skip = |table: &Arc<TableHandle>| {
            table.meta().largest_seqno >= seqno || boundary.cmp_key(&table.meta().smallest_key.0, order).is_gt()
        };
        match tables.iter().rposition(ends_the_skip) {
            Some(n) if tables[n].meta().largest_seqno >= seqno => match n == self.table_index {
                true => Ok(false),
                false => self.step_in_table(n, false, TableIter::seek_to_last).map(|()| true),
            },
            _ => seek_before(self, boundary, order).map(|()| true),
        }
    }

    fn part(&self) -> usize {
        self.table_index
    }

    fn older_range(&self, seqno: SeqNo, order: &KeyOrder) -> Option<KeyRange> {
        let table = self.run.tables().get(self.table_index)?;
        table.older_ranges().find(self.current()?.user_key, seqno, order)
    }

    fn note_older_range(&self, part: usize, range: KeyRange, largest: SeqNo) {
        let Some(table) = self.run.tables().get(part) else { return };
        // The tables beside this one may have newer entries, also with its first and its last key.
        let inside = KeyRange {
            start: KeyBoundary::After(Arc::from(table.meta().smallest_key.0.as_slice())),
            end: KeyBoundary::Before(Arc::from(table.meta().largest_key.0.as_slice())),
        };
        let range = range.intersection(inside, &self.order);
        if !range.is_empty(&self.order) {
            table.older_ranges().add(range, largest);
        }
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

    #[inline]
    fn prev(&mut self) -> Result<()> {
        let Some(inner) = &mut self.table_iter else { return Ok(()) };
        match inner.prev() {
            Ok(()) if inner.valid() => Ok(()),
            moved => moved.and_then(|()| self.settle(false)).inspect_err(|_| self.table_iter = None),
        }
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

    /// No user key is in two tables of a run.
    fn newest_version(&self) -> Option<(InternalKey<'_>, RecordKind)> {
        self.table_iter.as_ref().and_then(TableIter::newest_version)
    }

    fn shared_value(&self) -> Option<SharedBytes> {
        self.table_iter.as_ref().and_then(TableIter::shared_value)
    }
}

/// Maximum number of blob files in which an iterator reads ahead at a time.
const READ_AHEAD_FILES_MAX: usize = 4;
/// Number of values in a row that are read alone before a caller should announce the next ones. More than those that
/// are read before adjacent values are read ahead.
const SINGLE_READS_MIN: u64 = 4;
/// Number of values after which one is looked at again, whether it is in memory without a read of the device.
const MEMORY_CHECK_INTERVAL: u64 = 8;

/// The error for a pointer to a file that neither the version nor the direct blob files have.
pub(crate) fn missing_blob_file_error(pointer: &BlobPointer) -> Error {
    Error::corruption(format!("value is in blob file {}, which the partition does not have", pointer.logical_file.0))
}

/// Resolves pointers of an iterator. Reads ahead in a blob file if successive values follow each other in it. Otherwise
/// wants that the caller announces the next values.
pub(crate) struct ReadAheadBlobResolver {
    /// Number of values in a row that were read alone. Those of the cache do not count.
    single_reads: u64,
    /// Whether announced reads overlap.
    can_announce: bool,
    /// Whether values are announced, because the last one that was looked at is not in memory.
    announces: bool,
    /// The value of `single_reads` at which a value is looked at, while none are announced.
    next_check: u64,
    /// Number of values that were announced.
    announced: u64,
    /// The files read last, most recent first.
    read_ahead: Vec<(FileNumber, BlobReadAhead)>,
    blobs: Arc<BlobMap>,
    direct_blobs: Arc<DirectBlobFiles>,
}

impl ReadAheadBlobResolver {
    /// Uses the blob files of `now`, which contain every value that is visible at `now`.
    pub(crate) fn new(now: &SuperVersion) -> ReadAheadBlobResolver {
        let (blobs, direct_blobs) = (Arc::clone(now.version.blobs()), Arc::clone(&now.direct_blobs));
        ReadAheadBlobResolver {
            single_reads: 0,
            can_announce: true,
            announces: false,
            next_check: 0,
            announced: 0,
            read_ahead: Vec::new(),
            blobs,
            direct_blobs,
        }
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
        let read_ahead = &mut self.read_ahead[0].1;
        let before = read_ahead.single_reads();
        let value = handle.file().read(&pointer, Some(&mut *read_ahead));
        match read_ahead.single_reads() > before {
            true => self.single_reads += 1,
            false if read_ahead.reads_ahead() => (self.single_reads, self.next_check, self.announces) = (0, 0, false),
            false => {}
        }
        value
    }

    fn wants_announcements(&mut self, pointer: &[u8]) -> bool {
        if !self.can_announce || self.single_reads < SINGLE_READS_MIN {
            return false;
        }
        if !self.announces && self.single_reads >= self.next_check {
            self.next_check = self.single_reads + MEMORY_CHECK_INTERVAL;
            let found = find_unread_value(&self.blobs, &self.direct_blobs, pointer);
            self.announces = found.is_some_and(|(pointer, file)| !file.is_in_memory(&pointer));
        }
        self.announces
    }

    fn will_resolve(&mut self, pointer: &[u8]) {
        let found = find_unread_value(&self.blobs, &self.direct_blobs, pointer);
        let Some((pointer, file)) = found else { return };
        self.announced += 1;
        if self.announced.is_multiple_of(MEMORY_CHECK_INTERVAL) && file.is_in_memory(&pointer) {
            self.announces = false;
            return;
        }
        self.can_announce &= file.will_read(&pointer);
    }
}

/// The file of a value that is not read yet. An error is reported when it is read.
fn find_unread_value<'a>(
    blobs: &'a BlobMap,
    direct_blobs: &'a DirectBlobFiles,
    pointer: &[u8],
) -> Option<(BlobPointer, &'a BlobFile)> {
    let pointer = BlobPointer::decode(pointer).ok()?;
    Some((pointer, find_blob_file(blobs, direct_blobs, pointer.logical_file)?.file()))
}

fn find_blob_file<'a>(
    blobs: &'a BlobMap,
    direct_blobs: &'a DirectBlobFiles,
    logical: FileNumber,
) -> Option<&'a Arc<BlobHandle>> {
    blobs.handle(logical).or_else(|| direct_blobs.get(&logical).map(|file| &file.handle))
}

//! The LSM tree: the state that readers, writers and tasks share, and the engine interface: the calls of a partition
//! and the choice of the next task.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::base::blob_pointer::BlobPointer;
use crate::base::key_range::RangeTombstone;
use crate::base::merge_operator::MergeOperator;
use crate::base::sync::lock;
use crate::base::version_edit::{BlobFileMeta, FileNumber, PartitionEdit, TableMeta};
use crate::base::{EntryRef, Error, ErrorKind, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{
    BlobResolver, Engine, EngineHost, EngineView, FULL_MEMTABLE, KeyBounds, Pressure, ReadMoment, ReadSeqno, Staged,
    Task, TaskReport,
};
use crate::iter::InternalIter;
use crate::iter::dead_ranges::{DeadRanges, DeadRangesView, PASSED_RECORDS_MIN, passed_keys_max};

use crate::lsm::blob_gc::{BlobGcJob, CachedBlobScan};
use crate::lsm::blob_map::BlobHandle;
use crate::lsm::compaction_filter::CompactionFilter;
use crate::lsm::compaction_job::{CompactionJob, CompactionState};
use crate::lsm::compaction_picker::compaction_debt;
use crate::lsm::direct_file::{DirectBlobFiles, DirectBlobTracker};
use crate::lsm::merged_values::MergedValuesIter;
use crate::lsm::options::LsmOptions;
use crate::lsm::output::UncommittedFlush;
use crate::lsm::read::{ReadAheadBlobResolver, SuperVersion, SuperVersionCell, missing_blob_file_error};
use crate::lsm::table_handle::TableHandle;
use crate::lsm::tree_context::TreeContext;
use crate::lsm::version::{Version, VersionChange};
use crate::mem::arena::AppendError;
use crate::mem::slice::Slice;
use crate::memtable::Memtable;
use crate::table::block_fetcher::BlockValue;
use crate::vfs::open_files::{DataFileKind, DataFiles};

/// Number of entries between two checks whether a memtable hides too many stale bytes.
const HIDDEN_CHECK_INTERVAL: u64 = 256;

/// A tree of one active memtable, sealed memtables, and tables on levels.
///
/// Thread safe. Readers never wait. Lock order: `active_memtable`, then the lock under which `current` is replaced. A
/// thread holds none of these, nor `compaction_state` or `options`, while it reads, writes or syncs a file.
pub(crate) struct LsmTree {
    pub(crate) context: Arc<TreeContext>,
    options: Mutex<Arc<LsmOptions>>,
    pub(crate) max_memtable_size: AtomicU64,
    /// Whether the options have a prefix extractor.
    uses_prefix_filters: AtomicBool,
    /// The active memtable of `current`. A thread that inserts or seals holds the lock, so that no entry is inserted
    /// into a sealed memtable.
    pub(crate) active_memtable: Mutex<Arc<Memtable>>,
    pub(crate) current: SuperVersionCell,
    pub(crate) dead_ranges: Arc<DeadRanges>,
    pub(crate) flush_lock: TaskLock,
    pub(crate) compaction_lock: TaskLock,
    /// Held by a flush or a compaction while it commits its edits and installs its version, because the edits contain
    /// the difference between the range tombstones of two versions.
    pub(crate) version_change_lock: TaskLock,
    pub(crate) compaction_state: Mutex<CompactionState>,
    pub(crate) compaction_filter: Mutex<Option<Arc<dyn CompactionFilter>>>,
    /// Not set while the tree has operands and the operator was not given yet; then the tree has no readers.
    pub(crate) merge_operator: OnceLock<Arc<dyn MergeOperator>>,
    /// A flush whose files are written and whose edit could not be committed.
    pub(crate) uncommitted_flush: Mutex<Option<UncommittedFlush>>,
    pub(crate) direct_blobs: DirectBlobTracker,
    pub(crate) cached_scan: Mutex<Option<CachedBlobScan>>,
    discarded: AtomicBool,
}

/// A lock that one task at a time holds. Thread safe.
///
/// It is not a plain mutex, because [`is_held`](TaskLock::is_held) must not take the lock: a task that tries to take it
/// at this moment would find it held and would not run.
#[derive(Debug, Default)]
pub(crate) struct TaskLock {
    held: Mutex<bool>,
    released: Condvar,
}

/// Holds a [`TaskLock`] until it is dropped, also by a panic.
#[derive(Debug)]
pub(crate) struct TaskLockGuard<'a>(&'a TaskLock);

impl TaskLockGuard<'_> {
    /// For assertions: whether this guard holds `lock`.
    pub(crate) fn holds(&self, lock: &TaskLock) -> bool {
        std::ptr::eq(self.0, lock)
    }
}

impl TaskLock {
    pub(crate) fn is_held(&self) -> bool {
        *lock(&self.held)
    }

    /// Takes the lock. Waits while another task holds it.
    pub(crate) fn lock(&self) -> TaskLockGuard<'_> {
        let held = self.released.wait_while(lock(&self.held), |held| *held);
        *held.unwrap_or_else(PoisonError::into_inner) = true;
        TaskLockGuard(self)
    }

    /// Takes the lock. If another task holds it, waits for it, or returns `None` if `wait` is false.
    pub(crate) fn acquire(&self, wait: bool) -> Option<TaskLockGuard<'_>> {
        match wait {
            true => Some(self.lock()),
            false => (!std::mem::replace(&mut *lock(&self.held), true)).then(|| TaskLockGuard(self)),
        }
    }
}

impl Drop for TaskLockGuard<'_> {
    fn drop(&mut self) {
        let mut held = lock(&self.0.held);
        debug_assert!(*held, "a guard holds its lock");
        *held = false;
        drop(held);
        self.0.released.notify_one();
    }
}

/// Checks that every table and blob file exists and is complete. `listing`: the files of the directory with their
/// lengths.
///
/// # Errors
/// `Corruption` naming a file that is missing or has another length.
pub(crate) fn check_files<'a>(
    tables: impl Iterator<Item = &'a TableMeta>,
    blobs: impl Iterator<Item = &'a BlobFileMeta>,
    listing: &HashMap<(DataFileKind, FileNumber), u64>,
    files: &DataFiles,
) -> Result<()> {
    let tables = tables.map(|meta| (DataFileKind::Table, meta.number, meta.size));
    for (kind, id, wanted) in tables.chain(blobs.map(|meta| (DataFileKind::Blob, meta.number, meta.size))) {
        let (name, path) = match kind {
            DataFileKind::Table => ("table", files.path(id)),
            DataFileKind::Blob => ("blob file", files.blob_files().path(id)),
        };
        let problem = match listing.get(&(kind, id)) {
            Some(&size) if size == wanted => continue,
            Some(&size) => format!("{name} has {size} bytes, the manifest says {wanted}: restore it from a copy"),
            None => format!("{name} is missing: restore it from a copy"),
        };
        return Err(Error::corruption(problem).in_file(path));
    }
    Ok(())
}

impl LsmTree {
    /// Restores the tree that the manifest lists, or creates an empty one: the tables on their levels, the blob files,
    /// and the last sequence number in the tables. The caller has checked the files with [`check_files`]. They are
    /// opened on first use.
    ///
    /// # Errors
    /// `Corruption` if the tables of the manifest contradict each other, or point to values that no blob file has.
    pub(crate) fn restore(
        context: TreeContext,
        options: LsmOptions,
        tables: Vec<(u8, TableMeta)>,
        blobs: Vec<BlobFileMeta>,
        range_tombstones: Vec<RangeTombstone>,
        flushed: SeqNo,
    ) -> Result<LsmTree> {
        let context = Arc::new(context);
        let handle =
            |(level, meta)| (level, TableHandle::new(meta, None, Arc::clone(&context), options.read_options(level)));
        let version = Version::restore(tables.into_iter().map(handle).collect(), &context.order)?;
        let version = version.restore_range_tombstones(range_tombstones, &context.order)?;
        let version = version.restore_blobs(blobs.into_iter().map(|meta| context.blob_handle(meta)).collect())?;
        let active = context.new_memtable();
        let (sealed, version) = (Arc::default(), Arc::new(version));
        Ok(LsmTree {
            max_memtable_size: AtomicU64::new(options.max_memtable_size),
            uses_prefix_filters: AtomicBool::new(options.table.prefix_extractor.is_some()),
            direct_blobs: DirectBlobTracker::new(options.direct_write_thresholds()),
            options: Mutex::new(Arc::new(options)),
            active_memtable: Mutex::new(Arc::clone(&active)),
            current: SuperVersionCell::new(SuperVersion {
                active,
                sealed,
                version,
                direct_blobs: Arc::default(),
                flushed_through: flushed,
                has_older_range_deletes: false,
            }),
            dead_ranges: Arc::default(),
            flush_lock: TaskLock::default(),
            compaction_lock: TaskLock::default(),
            version_change_lock: TaskLock::default(),
            compaction_state: Mutex::default(),
            compaction_filter: Mutex::default(),
            merge_operator: OnceLock::new(),
            uncommitted_flush: Mutex::default(),
            cached_scan: Mutex::default(),
            discarded: AtomicBool::new(false),
            context,
        })
    }

    pub(crate) fn options(&self) -> Arc<LsmOptions> {
        Arc::clone(&lock(&self.options))
    }

    /// Changes the options. They apply to files that are written from now on, and to tables that are not open yet. A
    /// running flush or compaction may still add tables with the old options.
    pub(crate) fn set_options(&self, options: LsmOptions) {
        self.max_memtable_size.store(options.max_memtable_size, Ordering::Relaxed);
        self.uses_prefix_filters.store(options.table.prefix_extractor.is_some(), Ordering::Relaxed);
        self.direct_blobs.set_thresholds(options.direct_write_thresholds());
        let options = Arc::new(options);
        *lock(&self.options) = Arc::clone(&options);
        self.version().tables().for_each(|(level, table)| table.set_options(options.read_options(level)));
    }

    /// The current version. While the caller holds it, none of its files is removed.
    pub(crate) fn version(&self) -> Arc<Version<TableHandle>> {
        self.current.with(|now| Arc::clone(&now.version))
    }

    /// Takes the paused tasks.
    pub(crate) fn take_paused(&self) -> (Option<CompactionJob>, Option<BlobGcJob>) {
        let mut remembered = lock(&self.compaction_state);
        (remembered.paused_compaction.take(), remembered.paused_blob_gc.take())
    }

    pub(crate) fn is_discarded(&self) -> bool {
        self.discarded.load(Ordering::SeqCst)
    }

    /// # Errors
    /// `Closed` after [`discard`](Engine::discard).
    pub(crate) fn check_open(&self) -> Result<()> {
        match self.is_discarded() {
            true => Err(Error::new(ErrorKind::Closed, format!("partition {} was deleted", self.context.name))),
            false => Ok(()),
        }
    }

    /// Adds blob files that the manifest names now, and that only memtables point into.
    pub(crate) fn add_blob_files(&self, files: Vec<BlobFileMeta>) {
        let blobs_added = files.into_iter().map(|meta| self.context.blob_handle(meta)).collect();
        self.apply_change(VersionChange { blobs_added, ..VersionChange::default() });
    }

    /// Commits the edits of a task, unless the partition was deleted.
    pub(crate) fn commit_edits(&self, edits: impl Iterator<Item = PartitionEdit>, host: &dyn EngineHost) -> Result<()> {
        self.check_open()?;
        host.commit_edits(&edits.map(|edit| edit.of(self.context.partition)).collect::<Vec<_>>())
    }

    /// Installs the version after `change`.
    pub(crate) fn apply_change(&self, change: VersionChange<TableHandle>) {
        self.current.replace(|now| SuperVersion {
            version: Arc::new(now.version.with_changes(change, &self.context.order)),
            ..now.clone()
        });
    }

    /// Adds a record to the active memtable. True if this sealed a memtable.
    ///
    /// # Errors
    /// As [`Memtable::insert`].
    #[inline]
    pub(crate) fn insert(&self, entry: EntryRef<'_>) -> Result<bool> {
        if entry.kind == RecordKind::RangeDelete {
            return self.insert_range_delete(entry);
        }
        let mut active = lock(&self.active_memtable);
        let mut sealed = false;
        if let Err(error) = active.insert(entry) {
            self.seal_full(&mut active, error)?;
            active.insert(entry).map_err(AppendError::into_error)?;
            sealed = true;
        }
        self.note_inserted(&active, std::slice::from_ref(&entry));
        Ok(self.seal_if_due(&mut active) || sealed)
    }

    /// Adds records as [`insert`](Self::insert) does one after another, but takes the locks once for all of them, if
    /// possible. A thread that seals the memtable meanwhile waits for all of them.
    ///
    /// # Errors
    /// As [`Memtable::insert`]. The records before the failed one were added.
    pub(crate) fn insert_run(&self, mut entries: &[EntryRef<'_>]) -> Result<bool> {
        let mut sealed = false;
        while let Some(first) = entries.first() {
            let run_len = entries.iter().take_while(|entry| entry.kind != RecordKind::RangeDelete).count();
            if run_len == 0 {
                sealed |= self.insert_range_delete(*first)?;
                entries = &entries[1..];
                continue;
            }
            let mut active = lock(&self.active_memtable);
            let (added, inserted) = active.insert_run(&entries[..run_len], || self.may_be_due(&active));
            let (new, rest) = entries.split_at(added);
            self.note_inserted(&active, new);
            sealed |= match inserted {
                Ok(()) => self.seal_if_due(&mut active),
                Err(error) => self.seal_full(&mut active, error).map(|()| true)?,
            };
            entries = rest;
        }
        Ok(sealed)
    }

    /// Tells the dead ranges that `entries` are the last records that were inserted into the active memtable.
    #[inline]
    fn note_inserted(&self, active: &Memtable, entries: &[EntryRef<'_>]) {
        if !entries.is_empty() && active.len() == entries.len() as u64 {
            self.dead_ranges.note_new_memtable();
        }
        let mut values = entries.iter().filter(|entry| entry.kind.is_value()).map(|entry| entry.user_key).peekable();
        if values.peek().is_some() {
            self.dead_ranges.note_insertions(values, &self.context.order);
        }
    }

    /// Seals the active memtable if it is due after an insertion. True if it was.
    #[inline]
    fn seal_if_due(&self, active: &mut MutexGuard<'_, Arc<Memtable>>) -> bool {
        let is_due = self.is_due(active);
        if is_due {
            self.seal_active(active);
        }
        is_due
    }

    /// Seals the active memtable after an insertion into it failed with `error`, if it is full and an empty memtable
    /// may have space for the record.
    ///
    /// # Errors
    /// `error` if the memtable is empty or not full.
    #[cold]
    fn seal_full(&self, active: &mut MutexGuard<'_, Arc<Memtable>>, error: AppendError) -> Result<()> {
        if !matches!(error, AppendError::Full) || active.is_empty() {
            return Err(error.into_error());
        }
        self.seal_active(active);
        Ok(())
    }

    /// Whether the active memtable must be sealed, after an insertion.
    #[inline]
    fn is_due(&self, active: &Arc<Memtable>) -> bool {
        self.may_be_due(active)
            && (active.bytes_to_flush() >= self.max_memtable_size.load(Ordering::Relaxed)
                || self.hides_too_much(active)
                || self.scans_pass_too_much(active.len()))
    }

    /// Whether [`is_due`](Self::is_due) may return true. Takes no lock.
    #[inline]
    fn may_be_due(&self, active: &Memtable) -> bool {
        active.len().is_multiple_of(HIDDEN_CHECK_INTERVAL)
            || active.bytes_to_flush() >= self.max_memtable_size.load(Ordering::Relaxed)
    }

    /// Whether a memtable of this many records should be flushed because scans pass too many deleted keys. The flush
    /// drops those that no snapshot needs.
    fn scans_pass_too_much(&self, records: u64) -> bool {
        records >= PASSED_RECORDS_MIN && self.dead_ranges.passed_keys() >= passed_keys_max(records)
    }

    /// Replaces the active memtable by an empty one, unless it is empty already. `active`: the guard of
    /// `active_memtable`.
    pub(crate) fn seal_active(&self, active: &mut MutexGuard<'_, Arc<Memtable>>) {
        if active.is_empty() {
            return;
        }
        let next = self.context.new_memtable();
        active.seal();
        self.current.replace(|now| {
            debug_assert!(Arc::ptr_eq(&now.active, active), "the locked memtable is that of the super version");
            let sealed = std::iter::once(&**active).chain(now.sealed.iter()).map(Arc::clone).collect();
            SuperVersion { active: Arc::clone(&next), sealed, ..now.clone() }
        });
        **active = next;
    }
}

/// Load of a sealed memtable, however small: reads search each one.
const SEALED_LOAD_MIN: u64 = FULL_MEMTABLE / 8;
/// A view of the tree. It holds the memtables and the tables of one super version.
#[derive(Clone)]
struct LsmView {
    super_version: SuperVersion,
    context: Arc<TreeContext>,
    uses_prefix_filters: bool,
    dead_ranges: DeadRangesView,
    merge_operator: Option<Arc<dyn MergeOperator>>,
}

impl EngineView for LsmView {
    fn dead_ranges(&self) -> Option<DeadRangesView> {
        Some(self.dead_ranges.clone().with_tables(self.super_version.version.clone()))
    }

    fn iter(&self, at: ReadMoment, bounds: KeyBounds<'_>) -> Result<Box<dyn InternalIter>> {
        let iter = self.super_version.iter(&self.context, at.seqno, bounds, self.uses_prefix_filters);
        let Some(operator) = &self.merge_operator else { return Ok(iter) };
        let (order, blobs) = (self.context.order.clone(), self.blob_resolver());
        Ok(Box::new(MergedValuesIter::new(iter, order, Arc::clone(operator), blobs, at, bounds)))
    }

    fn unmerged(&self) -> Option<Arc<dyn EngineView>> {
        self.merge_operator.as_ref()?;
        Some(Arc::new(LsmView { merge_operator: None, ..self.clone() }))
    }

    fn blob_resolver(&self) -> Box<dyn BlobResolver> {
        Box::new(ReadAheadBlobResolver::new(&self.super_version))
    }
}

/// The result of a lookup.
enum LookupValue<R> {
    Inline(R),
    /// A cached value of a blob file. It is read without the epoch pin, as one that is not cached.
    Cached(Slice),
    /// In this blob file. The handle keeps the file open.
    InBlobFile(BlobPointer, Arc<BlobHandle>),
    /// In a blob file that was created after the super version was taken.
    UnknownBlobFile(BlobPointer, Arc<DirectBlobFiles>),
    /// An operand of the merge operator.
    Operand,
}

impl LsmTree {
    /// Calls `read` with the value of `key` at `at`, in place if it is not in a blob file. The epoch is pinned during
    /// the call.
    pub(crate) fn get_with<R>(&self, key: &[u8], at: ReadSeqno, read: impl FnOnce(&[u8]) -> R) -> Result<Option<R>> {
        let read = Cell::new(Some(read)); // one of the two closures calls it, once
        let call = |value: &[u8]| read.take().map(|read| read(value));
        Ok(self.lookup(key, at, |value| call(&value), |value| call(&value))?.flatten())
    }

    /// Finds the value of `key` at `at`, and passes it to `inline`, in place, or to `from_blob`.
    #[inline(always)]
    fn lookup<R>(
        &self,
        key: &[u8],
        at: ReadSeqno,
        inline: impl Fn(BlockValue<'_>) -> R,
        from_blob: impl FnOnce(Slice) -> R,
    ) -> Result<Option<R>> {
        loop {
            let found = self.current.with_pin(|now, pin| {
                let read = |kind: RecordKind, value: BlockValue<'_>| match kind {
                    RecordKind::BlobPointer => {
                        let pointer = BlobPointer::decode(&value)?;
                        if let Some(value) = self.context.cache.linked_value(pointer.value_id(), pointer.value_len, pin)
                        {
                            return Ok(LookupValue::Cached(value.to_slice(|| value.to_arc())));
                        }
                        Ok(match now.blob_file(pointer.logical_file) {
                            Some(handle) => LookupValue::InBlobFile(pointer, Arc::clone(handle)),
                            None => LookupValue::UnknownBlobFile(pointer, Arc::clone(&now.direct_blobs)),
                        })
                    }
                    RecordKind::Merge => Ok(LookupValue::Operand),
                    _ => Ok(LookupValue::Inline(inline(value))),
                };
                now.find(&self.context, key, at, pin, read)
            })?;
            match found.transpose()? {
                None => return Ok(None),
                Some(LookupValue::Inline(value)) => return Ok(Some(value)),
                Some(LookupValue::Cached(value)) => return Ok(Some(from_blob(value))),
                // Without the epoch pin, because a file read would delay the freeing of all memory that waits for the
                // epoch.
                Some(LookupValue::InBlobFile(pointer, handle)) => {
                    return handle.file().read(&pointer, None).map(|value| Some(from_blob(value)));
                }
                // The file was created and the record was published after the super version was taken and before `at`
                // was resolved. The next super version has the file.
                Some(LookupValue::UnknownBlobFile(pointer, direct_blobs)) => {
                    if self.current.with(|now| Arc::ptr_eq(&now.direct_blobs, &direct_blobs)) {
                        return Err(missing_blob_file_error(&pointer));
                    }
                }
                Some(LookupValue::Operand) => {
                    return Ok(self.merged_value(key, at)?.map(|value| from_blob(Slice::from(value))));
                }
            }
        }
    }

    /// The value of a blob pointer in the WAL; `None` if blob GC has removed it, because no record needs it any more.
    ///
    /// # Errors
    /// As a get.
    pub(crate) fn pointed_value(&self, pointer: &BlobPointer) -> Result<Option<Slice>> {
        let Some(handle) = self.current.with(|now| now.blob_file(pointer.logical_file).cloned()) else {
            return Ok(None);
        };
        if !handle.file().contains(pointer)? {
            return Ok(None);
        }
        handle.file().read(pointer, None).map(Some)
    }

    /// The value of `key` at `at`, whose newest version is an operand.
    #[cold]
    pub(crate) fn merged_value(&self, key: &[u8], at: ReadSeqno) -> Result<Option<Vec<u8>>> {
        let missing = || Error::invalid(format!("the merge operator of partition {:?} is missing", self.context.name));
        let operator = self.merge_operator.get().ok_or_else(missing)?;
        // Registered before the super version is taken.
        let (snapshot, at) = match at {
            ReadSeqno::At(at) => (None, at),
            ReadSeqno::Latest => {
                let snapshot = self.context.snapshots.register();
                let at = snapshot.moment();
                (Some(snapshot), at)
            }
        };
        let value = self.current.get().find_merged(&self.context, &**operator, key, at);
        drop(snapshot);
        value
    }
}

impl Engine for LsmTree {
    fn key_order(&self) -> &KeyOrder {
        &self.context.order
    }

    fn stage(&self, value: &[u8], synced: bool) -> Result<Staged> {
        match self.may_write_directly(value.len(), synced) {
            true => self.write_blob_directly(value).map(Staged::Blob),
            false => Ok(Staged::Nothing),
        }
    }

    fn sync_staged(&self, staged: &mut dyn Iterator<Item = Staged>) -> Result<()> {
        self.sync_staged_values(staged.filter_map(Staged::blob))
    }

    fn begin_commit(&self, staged: Staged) -> Result<()> {
        staged
            .blob()
            .map_or(Ok(()), |pointer| self.direct_blobs.appender_of(&pointer)?.begin_commit(pointer.frame_end()))
    }

    fn end_commit(&self, staged: Staged, may_be_in_wal: bool) {
        // Without a file, all pointers into it are in tables, or the tree is closed.
        if let Some(pointer) = staged.blob()
            && let Ok(appender) = self.direct_blobs.appender_of(&pointer)
        {
            appender.end_commit(pointer.frame_end(), may_be_in_wal);
        }
    }

    fn release(&self, staged: Staged, is_applied: bool) {
        // A forked child may wait forever for a lock.
        if let (Some(pointer), false) = (staged.blob(), is_applied || self.context.snapshots.is_forked()) {
            self.direct_blobs.note_uncommitted(&pointer);
            self.release_pointers(pointer.logical_file, 1);
        }
    }

    fn apply(&self, entry: EntryRef<'_>, _staged: Staged) -> Result<bool> {
        self.insert(entry)
    }

    fn get(&self, key: &[u8], at: ReadSeqno) -> Result<Option<Slice>> {
        self.lookup(key, at, |value| value.to_slice(), |value| value)
    }

    fn multi_get(&self, keys: &[&[u8]], at: ReadMoment) -> Result<Vec<Option<Slice>>> {
        self.get_many(keys, at)
    }

    fn size_of(&self, key: &[u8], at: ReadSeqno) -> Result<Option<u32>> {
        let read = |kind: RecordKind, value: BlockValue<'_>| match kind {
            RecordKind::BlobPointer => BlobPointer::decode(&value).map(|pointer| Some(pointer.value_len)),
            RecordKind::Merge => Ok(None),
            // Values are at most 4 GiB - 1, so the cast loses nothing.
            _ => Ok(Some(value.len() as u32)),
        };
        match self.current.with_pin(|now, pin| now.find(&self.context, key, at, pin, read))?.transpose()? {
            Some(None) => Ok(self.merged_value(key, at)?.map(|value| value.len() as u32)),
            found => Ok(found.flatten()),
        }
    }

    fn changed_since(&self, key: &[u8], since: SeqNo) -> Result<bool> {
        self.current.with_pin(|now, pin| now.changed_since(&self.context, key, since, pin))
    }

    fn range_changed_since(&self, bounds: KeyBounds<'_>, since: SeqNo) -> Result<Option<Vec<u8>>> {
        self.current.get().range_changed_since(&self.context, bounds, since)
    }

    fn view(&self) -> Box<dyn EngineView> {
        let uses_prefix_filters = self.uses_prefix_filters.load(Ordering::Relaxed);
        let dead_ranges = DeadRangesView::new(&self.dead_ranges);
        let (super_version, context) = (self.current.get(), Arc::clone(&self.context));
        let merge_operator = self.merge_operator.get().cloned();
        Box::new(LsmView { super_version, context, uses_prefix_filters, dead_ranges, merge_operator })
    }

    /// Number of entries in tables and memtables, where each tombstone cancels itself and an entry that is not newer.
    /// Every version of an overwritten key counts.
    fn approximate_len(&self) -> u64 {
        let now = self.current.get();
        let levels = now.version.levels().rev().map(|(_, level)| (level.entries, level.tombstones));
        let memtables = now.sealed.iter().rev().chain([&now.active]);
        let oldest_first = levels.chain(memtables.map(|memtable| (memtable.len(), memtable.tombstones())));
        oldest_first.fold(0, |live: u64, (entries, tombstones)| (live + entries).saturating_sub(2 * tombstones))
    }

    /// Inserts a record of the WAL at open.
    ///
    /// # Errors
    /// `Corruption` if the record is not newer than those before it, because a spilled table is damaged. Otherwise as
    /// [`insert`](LsmTree::insert).
    fn replay(&self, entry: EntryRef<'_>) -> Result<()> {
        if entry.seqno <= self.current.with(SuperVersion::largest_memtable_seqno) {
            return Err(Error::corruption("a replayed record is older than the one before it"));
        }
        if let Some(pointer) = BlobPointer::of_record(entry.kind, entry.value)? {
            self.direct_blobs.add_pointer(pointer.logical_file);
        }
        self.insert(entry).map(drop)
    }

    fn flushed_through(&self) -> SeqNo {
        self.current.with(|now| now.flushed_through)
    }

    fn first_unflushed(&self) -> Option<SeqNo> {
        self.current.with(|now| {
            let oldest = now.sealed.last().unwrap_or(&now.active);
            (!oldest.is_empty()).then(|| oldest.smallest_seqno())
        })
    }

    fn seal(&self) {
        self.seal_active(&mut lock(&self.active_memtable));
    }

    /// Bytes of the active memtable.
    fn active_bytes(&self) -> u64 {
        self.current.with(|now| now.active.bytes())
    }

    fn active_blob_bytes(&self) -> u64 {
        self.current.with(|now| now.active.referenced_blob_bytes())
    }

    /// If not `forced`, only tasks that can start now. If `forced`, also tasks that another thread is running:
    /// [`run`](Engine::run) waits for it, so that no work is left when this returns `None`. Call [`seal`](Engine::seal)
    /// first to include the active memtable.
    fn next_task(&self, forced: bool, held: &[Task]) -> Option<Task> {
        if self.is_discarded() {
            return None;
        }
        let may = |task| !held.contains(&task);
        if may(Task::Flush) && self.current.with(|now| !now.sealed.is_empty()) && (forced || !self.flush_lock.is_held())
        {
            return Some(Task::Flush);
        }
        if self.compaction_lock.is_held() {
            return (forced && may(Task::Compact)).then_some(Task::Compact);
        }
        if may(Task::Compact) && self.needs_compaction(forced) {
            return Some(Task::Compact);
        }
        (!forced && may(Task::BlobGc) && self.needs_blob_gc()).then_some(Task::BlobGc)
    }

    fn run(&self, task: Task, forced: bool, host: &dyn EngineHost) -> Result<TaskReport> {
        match task {
            Task::Flush => self.flush(forced, host),
            Task::Compact => self.compact(forced, host),
            Task::BlobGc => self.run_automatic_blob_gc(forced, host),
        }
    }

    fn pressure(&self) -> Pressure {
        let options = self.options();
        let load = |memtable: &Memtable| {
            let load = u128::from(memtable.bytes_to_flush()) * u128::from(FULL_MEMTABLE);
            let load = load / u128::from(options.max_memtable_size.max(1));
            load.clamp(SEALED_LOAD_MIN.into(), FULL_MEMTABLE.into()) as u64
        };
        self.current.with(|now| Pressure {
            sealed_bytes: now.sealed.iter().map(|memtable| memtable.bytes()).sum(),
            sealed_memtables: now.sealed.len(),
            sealed_load: now.sealed.iter().map(|memtable| load(memtable)).sum(),
            compaction_debt: compaction_debt(&now.version, &options),
            l0_runs: now.version.level(0).runs.len(),
        })
    }

    fn stop_writes(&self) {
        drop(self.take_paused());
        if self.first_unflushed().is_none() {
            self.abandon_direct_blob_files();
        }
    }

    /// Ends the tree of a deleted partition, after the edit that drops the partition. Waits until running tasks stop.
    /// The files of the tree become obsolete when no reader needs them. Later tasks fail with `Closed`.
    fn discard(&self) {
        self.discarded.store(true, Ordering::SeqCst);
        let _flushing = self.flush_lock.lock();
        let _compacting = self.compaction_lock.lock();
        let (paused, paused_blob_gc) = self.take_paused();
        paused.into_iter().for_each(CompactionJob::discard);
        paused_blob_gc.into_iter().for_each(|job| job.outputs.discard());
        let flush = lock(&self.uncommitted_flush).take();
        flush.into_iter().for_each(|flush| flush.outputs.discard());
        let version = self.version();
        version.tables().for_each(|(_, table)| table.mark_obsolete());
        version.blobs().handles().for_each(|file| file.mark_obsolete());
        self.abandon_direct_blob_files();
        *lock(&self.cached_scan) = None;
        // Frees the memory too, except for the parts that iterators hold. A reader that finds no entry checks whether
        // the partition was deleted.
        let mut active = lock(&self.active_memtable);
        let empty = self.context.new_memtable();
        std::mem::replace(&mut *active, Arc::clone(&empty)).seal();
        self.current.replace(|now| SuperVersion {
            active: empty,
            sealed: Arc::default(),
            version: Arc::new(Version::empty()),
            ..now.clone()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time() {
        let task_lock = TaskLock::default();
        let guard = task_lock.acquire(false).unwrap();
        assert!(task_lock.is_held());
        assert!(task_lock.acquire(false).is_none());
        drop(guard);
        drop(task_lock.lock());
        assert!(!task_lock.is_held());
    }
}

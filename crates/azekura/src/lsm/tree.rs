//! The LSM tree: the state that readers, writers and tasks share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::blob_pointer::BlobPointer;
use crate::base::version_edit::{BlobFileMeta, FileNumber, TableMeta};
use crate::base::{EntryRef, Error, ErrorKind, KeyOrder, RecordKind, Result, SeqNo};
use crate::lsm::blob::direct_file::DirectBlobTracker;
use crate::lsm::blob_gc::job::BlobGcJob;
use crate::lsm::blob_gc::scan;
use crate::lsm::compaction::job::{CompactionJob, CompactionState};
use crate::lsm::metrics::{LsmCounters, LsmLevelMetrics, LsmMetrics};
use crate::lsm::options::LsmOptions;
use crate::lsm::pending_outputs::UncommittedFlush;
use crate::lsm::super_version::{SuperVersion, SuperVersionCell};
use crate::lsm::table_handle::{TableHandle, TreeContext};
use crate::lsm::task_lock::{TaskLock, lock};
use crate::lsm::version::{HasTableMeta, Version, VersionChange};
use crate::memtable::Memtable;
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
    max_memtable_size: AtomicU64,
    /// The active memtable of `current`. A thread that inserts or seals holds the lock, so that no entry is inserted
    /// into a sealed memtable.
    active_memtable: Mutex<Arc<Memtable>>,
    pub(crate) current: SuperVersionCell,
    pub(crate) flush_lock: TaskLock,
    pub(crate) compaction_lock: TaskLock,
    pub(crate) compaction_state: Mutex<CompactionState>,
    /// A flush whose files are written and whose edit could not be committed.
    pub(crate) uncommitted_flush: Mutex<Option<UncommittedFlush>>,
    pub(crate) direct_blobs: DirectBlobTracker,
    pub(crate) counters: LsmCounters,
    pub(crate) cached_scan: Mutex<Option<scan::CachedBlobScan>>,
    discarded: AtomicBool,
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
        flushed: SeqNo,
    ) -> Result<LsmTree> {
        let context = Arc::new(context);
        let handle =
            |(level, meta)| (level, TableHandle::new(meta, None, Arc::clone(&context), options.read_options(level)));
        let version = Version::restore(tables.into_iter().map(handle).collect(), &context.order)?;
        let version = version.restore_blobs(blobs.into_iter().map(|meta| context.blob_handle(meta)).collect())?;
        let active = context.new_memtable();
        let (sealed, version) = (Arc::default(), Arc::new(version));
        Ok(LsmTree {
            max_memtable_size: AtomicU64::new(options.max_memtable_size),
            direct_blobs: DirectBlobTracker::new(options.direct_write_threshold()),
            options: Mutex::new(Arc::new(options)),
            active_memtable: Mutex::new(Arc::clone(&active)),
            current: SuperVersionCell::new(SuperVersion {
                active,
                sealed,
                version,
                direct_blobs: Arc::default(),
                flushed_through: flushed,
            }),
            flush_lock: TaskLock::default(),
            compaction_lock: TaskLock::default(),
            compaction_state: Mutex::default(),
            uncommitted_flush: Mutex::default(),
            counters: LsmCounters::default(),
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
        self.direct_blobs.set_threshold(options.direct_write_threshold());
        let options = Arc::new(options);
        *lock(&self.options) = Arc::clone(&options);
        self.version().tables().for_each(|(level, table)| table.set_options(options.read_options(level)));
    }

    pub(crate) fn key_order(&self) -> &KeyOrder {
        &self.context.order
    }

    /// Number of entries in tables and memtables. In tables, each tombstone cancels one other entry. Every version of
    /// an overwritten key counts.
    pub(crate) fn approximate_len(&self) -> u64 {
        let now = self.current.get();
        let tables: u64 =
            now.version.levels().map(|(_, level)| level.entries.saturating_sub(2 * level.tombstones)).sum();
        tables + now.active.len() + now.sealed.iter().map(|memtable| memtable.len()).sum::<u64>()
    }

    /// The current version. While the caller holds it, none of its files is removed.
    pub(crate) fn version(&self) -> Arc<Version<TableHandle>> {
        self.current.with(|now| Arc::clone(&now.version))
    }

    /// Drops paused tasks. Called when the database has closed and no task runs any more.
    pub(crate) fn abandon_paused(&self) {
        let paused = self.take_paused();
        drop(paused); // without the lock
    }

    fn take_paused(&self) -> (Option<CompactionJob>, Option<BlobGcJob>) {
        let mut remembered = lock(&self.compaction_state);
        (remembered.paused_compaction.take(), remembered.paused_blob_gc.take())
    }

    /// Ends the tree of a deleted partition, after the edit that drops the partition. Waits until running tasks stop.
    /// The files of the tree become obsolete when no reader needs them. Later tasks fail with `Closed`.
    pub(crate) fn discard(&self) {
        self.discarded.store(true, Ordering::SeqCst);
        let _flushing = self.flush_lock.acquire(true);
        let _compacting = self.compaction_lock.acquire(true);
        let (paused, paused_blob_gc) = self.take_paused();
        paused_blob_gc.into_iter().for_each(BlobGcJob::abandon);
        let mut unwanted = paused.map_or_else(Vec::new, |mut job| job.take_outputs().to_vec());
        let obsolete_files = &self.context.obsolete_files;
        if let Some(written) = lock(&self.uncommitted_flush).take() {
            unwanted.extend(written.tables);
            written.blobs.iter().for_each(|file| obsolete_files.push(DataFileKind::Blob, file.number));
        }
        unwanted.iter().for_each(|table| obsolete_files.push(DataFileKind::Table, table.number));
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

    /// Bytes of the active memtable.
    pub(crate) fn active_bytes(&self) -> u64 {
        self.current.with(|now| now.active.bytes())
    }

    pub(crate) fn is_discarded(&self) -> bool {
        self.discarded.load(Ordering::SeqCst)
    }

    /// # Errors
    /// `Closed` after [`discard`](LsmTree::discard).
    pub(crate) fn check_open(&self) -> Result<()> {
        match self.is_discarded() {
            true => Err(Error::new(ErrorKind::Closed, format!("partition {} was deleted", self.context.name))),
            false => Ok(()),
        }
    }

    pub(crate) fn metrics(&self) -> LsmMetrics {
        let now = self.current.get();
        let levels = now.version.levels().map(|(_, level)| LsmLevelMetrics {
            runs: level.runs.len() as u64,
            raw_bytes: level.iter().map(|table| table.meta().raw_bytes).sum(),
            tables: level.tables,
            bytes: level.bytes,
            entries: level.entries,
            tombstones: level.tombstones,
        });
        let tables_bytes: u64 = now.version.tables().filter_map(|(_, t)| t.opened()).map(|t| t.pinned_bytes()).sum();
        let mut metrics = LsmMetrics {
            levels: levels.collect(),
            memtable_bytes: now.active.bytes(),
            memtable_entries: now.active.len(),
            sealed_bytes: now.sealed.iter().map(|memtable| memtable.bytes()).sum(),
            sealed_memtables: now.sealed.len() as u64,
            pinned_bytes: tables_bytes
                + now.version.blobs().handles().map(|file| file.file().memory_bytes()).sum::<u64>(),
            blob_files: now.version.blobs().stats(),
            direct_blob_files: now.direct_blobs.files().map(|file| file.stats()).collect(),
            ..LsmMetrics::default()
        };
        self.counters.copy_to(&mut metrics);
        metrics
    }

    /// Inserts a record of the WAL at open.
    ///
    /// # Errors
    /// As [`insert`](LsmTree::insert).
    pub(crate) fn replay(&self, entry: EntryRef<'_>) -> Result<()> {
        if entry.kind == RecordKind::BlobPointer {
            self.direct_blobs.add_pointer(BlobPointer::decode(entry.value)?.logical_file);
        }
        self.insert(entry).map(drop)
    }

    /// Adds blob files that the manifest names now, and that only memtables point into.
    pub(crate) fn add_blob_files(&self, files: Vec<BlobFileMeta>) {
        let blobs_added: Vec<_> = files.into_iter().map(|meta| self.context.blob_handle(meta)).collect();
        self.current.replace(|now| {
            let change = VersionChange { blobs_added: blobs_added.clone(), ..VersionChange::default() };
            SuperVersion { version: Arc::new(now.version.with_changes(change, &self.context.order)), ..now.clone() }
        });
    }

    /// Adds a record to the active memtable. True if this sealed a memtable.
    ///
    /// # Errors
    /// As [`Memtable::insert`].
    #[inline]
    pub(crate) fn insert(&self, entry: EntryRef<'_>) -> Result<bool> {
        let mut active = lock(&self.active_memtable);
        let mut sealed = false;
        if let Err(error) = active.insert(entry) {
            // The memtable may be full, and an empty one has space.
            if error.kind() != ErrorKind::Invalid || active.is_empty() {
                return Err(error);
            }
            self.seal_active(&mut active);
            active.insert(entry)?;
            sealed = true;
        }
        // Bytes in blob files that the memtable points to count too. Otherwise one key that is overwritten again and
        // again with large values would fill the disk while its memtable stays small.
        let bytes = active.bytes().saturating_add(active.referenced_blob_bytes());
        let check_hidden = active.len().is_multiple_of(HIDDEN_CHECK_INTERVAL);
        if bytes >= self.max_memtable_size.load(Ordering::Relaxed)
            || (check_hidden && self.memtable_hides_too_much(active.len()))
        {
            self.seal_active(&mut active);
            sealed = true;
        }
        Ok(sealed)
    }

    /// Seals the active memtable unless it is empty.
    pub(crate) fn seal_memtable(&self) {
        self.seal_active(&mut lock(&self.active_memtable));
    }

    /// Replaces the active memtable by an empty one, unless it is empty already. The caller holds `active_memtable`.
    fn seal_active(&self, active: &mut Arc<Memtable>) {
        if active.is_empty() {
            return;
        }
        let next = self.context.new_memtable();
        active.seal();
        self.current.replace(|now| {
            let sealed = std::iter::once(&*active).chain(now.sealed.iter()).map(Arc::clone).collect();
            SuperVersion { active: Arc::clone(&next), sealed, ..now.clone() }
        });
        *active = next;
    }
}

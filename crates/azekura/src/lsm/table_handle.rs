//! A table as the versions of a tree refer to it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::base::version_edit::{BlobFileMeta, FileNumber, PartitionId, TableMeta};
use crate::base::{KeyOrder, Result, SeqNo};
use crate::blob::reader::BlobFile;
use crate::block::BlockCache;
use crate::engine::{LastVisibleSeqno, SnapshotList};
use crate::lsm::blob_map::BlobHandle;
use crate::lsm::direct_file::UnsyncedBlobFiles;
use crate::lsm::version::{HasTableMeta, SupersededVersions};
use crate::memtable::Memtable;
use crate::memtable::memtable::MemtableMemory;
use crate::table::obsolete_files::ObsoleteFiles;
use crate::table::options::TableReadOptions;
use crate::table::reader::TableReader;
use crate::vfs::open_files::{DataFileKind, DataFiles};
use crate::vfs::{Env, File, Fs};

/// The parts of the database that a tree uses, and the identity of its partition.
#[derive(Clone)]
pub(crate) struct TreeContext {
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) dir: PathBuf,
    pub(crate) files: Arc<DataFiles>,
    pub(crate) cache: Arc<BlockCache>,
    pub(crate) obsolete_files: Arc<ObsoleteFiles>,
    pub(crate) env: Arc<dyn Env>,
    /// The next free file number of the database.
    pub(crate) next_file_id: Arc<AtomicU64>,
    /// Direct blob files of the database. A sync of the WAL syncs them first.
    pub(crate) unsynced_blobs: Arc<UnsyncedBlobFiles>,
    pub(crate) last_visible: LastVisibleSeqno,
    /// The snapshots of all readers of the database.
    pub(crate) snapshots: Arc<SnapshotList>,
    /// Counts the memory of all memtables of the database.
    pub(crate) memtable_memory: Arc<MemtableMemory>,
    pub(crate) hash_seed: u64,
    pub(crate) order: KeyOrder,
    pub(crate) partition: PartitionId,
    pub(crate) name: String,
}

impl TreeContext {
    pub(crate) fn new_file_id(&self) -> FileNumber {
        FileNumber(self.next_file_id.fetch_add(1, Ordering::Relaxed))
    }

    /// An empty memtable.
    pub(crate) fn new_memtable(&self) -> Arc<Memtable> {
        Arc::new(Memtable::with_memory_tracker(Arc::clone(&self.memtable_memory), self.order.clone(), self.hash_seed))
    }

    /// A handle of a blob file that is read through `file` while it is written. It is readable up to `end`, which
    /// increases.
    pub(crate) fn growing_blob_handle(
        &self,
        id: FileNumber,
        file: Option<Arc<dyn File>>,
        file_id: [u8; 16],
        end: u64,
    ) -> Arc<BlobHandle> {
        let files = self.files.blob_files();
        let meta = BlobFileMeta { number: id, size: 0, created_ms: 0, sections: Vec::new() };
        let file = BlobFile::growing(files.clone(), Arc::clone(&self.cache), id, file, file_id, end);
        BlobHandle::new(meta, file, files, Arc::clone(&self.obsolete_files))
    }

    pub(crate) fn blob_handle(&self, meta: BlobFileMeta) -> Arc<BlobHandle> {
        let files = self.files.blob_files();
        let file = BlobFile::new(files.clone(), Arc::clone(&self.cache), meta.number, meta.size);
        BlobHandle::new(meta, file, files, Arc::clone(&self.obsolete_files))
    }
}

/// A table that is opened on first use. When the last holder drops an obsolete table, its file may be removed; the
/// holder, which may be any reader, does not remove it. Thread safe.
pub(crate) struct TableHandle {
    meta: TableMeta,
    oldest_snapshot_when_written: Option<SeqNo>,
    context: Arc<TreeContext>,
    /// Encoded [`TableReadOptions`] for when the table is opened.
    options: AtomicU8,
    table: OnceLock<Arc<TableReader>>,
    /// An estimate of the bytes that range deletes cover, and the newest range delete at the estimate.
    covered_bytes: AtomicU64,
    covered_as_of: AtomicU64,
    obsolete: AtomicBool,
}

impl TableHandle {
    /// See [`HasTableMeta::oldest_snapshot_when_written`] for that argument.
    pub(crate) fn new(
        meta: TableMeta,
        oldest_snapshot_when_written: Option<SeqNo>,
        context: Arc<TreeContext>,
        options: TableReadOptions,
    ) -> Arc<TableHandle> {
        let (table, obsolete) = (OnceLock::new(), AtomicBool::new(false));
        let (covered_bytes, covered_as_of) = (AtomicU64::new(0), AtomicU64::new(0));
        let options = AtomicU8::new(options.to_bits());
        context.files.add_live_bytes(meta.size);
        Arc::new(TableHandle {
            meta,
            oldest_snapshot_when_written,
            context,
            options,
            table,
            covered_bytes,
            covered_as_of,
            obsolete,
        })
    }

    /// Returns the open table, and opens it on first use. If two threads open it at the same time, one of the two
    /// results is kept.
    ///
    /// # Errors
    /// Those of [`TableReader::open`]; the next call tries again.
    pub(crate) fn table(&self) -> Result<&Arc<TableReader>> {
        if let Some(table) = self.table.get() {
            return Ok(table);
        }
        let context = &self.context;
        let (files, cache) = (Arc::clone(&context.files), Arc::clone(&context.cache));
        let options = TableReadOptions::from_bits(self.options.load(Ordering::Relaxed));
        let table = TableReader::open(files, cache, &self.meta, context.order.clone(), context.hash_seed, options)?;
        Ok(self.table.get_or_init(|| Arc::new(table)))
    }

    /// Takes effect when the table is opened. An open table does not change.
    pub(crate) fn set_options(&self, options: TableReadOptions) {
        self.options.store(options.to_bits(), Ordering::Relaxed);
    }

    /// The table, if it is open.
    pub(crate) fn opened(&self) -> Option<&Arc<TableReader>> {
        self.table.get()
    }

    /// Sets the estimate of the bytes that range deletes up to `as_of` cover.
    pub(crate) fn set_covered_bytes(&self, bytes: u64, as_of: SeqNo) {
        self.covered_bytes.store(bytes, Ordering::Relaxed);
        self.covered_as_of.store(as_of.0, Ordering::Release);
    }

    /// Whether the bytes that range deletes up to `newest` cover were estimated.
    pub(crate) fn has_covered_bytes(&self, newest: SeqNo) -> bool {
        self.covered_as_of.load(Ordering::Acquire) >= newest.0
    }

    /// No manifest names the table any more: dropping the last handle makes its file obsolete.
    pub(crate) fn mark_obsolete(&self) {
        self.obsolete.store(true, Ordering::Release);
    }
}

impl HasTableMeta for TableHandle {
    fn meta(&self) -> &TableMeta {
        &self.meta
    }

    /// Known only while the table is open.
    fn superseded(&self) -> SupersededVersions {
        let properties = self.opened().map(|table| table.properties());
        properties.map_or_else(SupersededVersions::default, |properties| SupersededVersions {
            count: properties.superseded_entries,
            lowest_newer_seqno: properties.smallest_superseding_seqno,
        })
    }

    fn covered_bytes(&self) -> u64 {
        self.covered_bytes.load(Ordering::Relaxed)
    }

    fn oldest_snapshot_when_written(&self) -> Option<SeqNo> {
        self.oldest_snapshot_when_written
    }
}

impl Drop for TableHandle {
    fn drop(&mut self) {
        self.context.files.remove_live_bytes(self.meta.size);
        if *self.obsolete.get_mut() {
            self.table.take();
            self.context.obsolete_files.push(DataFileKind::Table, self.meta.number);
        }
    }
}

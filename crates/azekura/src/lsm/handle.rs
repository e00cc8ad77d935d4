//! A table as the versions of a tree hold it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::base::edit::{BlobMeta, FileId, PartitionId, TableMeta};
use crate::base::{KeyOrder, Result, SeqNo};
use crate::blob::reader::BlobFile;
use crate::block::BlockCache;
use crate::engine::{ReadPoints, Visible};
use crate::lsm::blobs::handle::BlobHandle;
use crate::lsm::blobs::unsynced::Unsynced;
use crate::lsm::version::{Described, Superseded};
use crate::memtable::Memtable;
use crate::memtable::memory::MemtableMemory;
use crate::table::graveyard::Graveyard;
use crate::table::options::ReadOptions;
use crate::table::reader::Table;
use crate::vfs::files::{DataFiles, DataKind};
use crate::vfs::{Env, File, Fs};

/// What a tree shares with the rest of the database.
#[derive(Clone)]
pub(crate) struct TreeContext {
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) dir: PathBuf,
    pub(crate) files: Arc<DataFiles>,
    pub(crate) cache: Arc<BlockCache>,
    pub(crate) graveyard: Arc<Graveyard>,
    pub(crate) env: Arc<dyn Env>,
    /// The next free file number of the database.
    pub(crate) next_file_id: Arc<AtomicU64>,
    /// Early files of the database that the next sync of the log syncs first.
    pub(crate) unsynced: Arc<Unsynced>,
    pub(crate) visible: Visible,
    /// Of all readers of the database.
    pub(crate) points: Arc<ReadPoints>,
    /// What the memtables of the database take.
    pub(crate) memory: Arc<MemtableMemory>,
    pub(crate) hash_seed: u64,
    pub(crate) order: KeyOrder,
    pub(crate) partition: PartitionId,
    pub(crate) name: String,
}

impl TreeContext {
    pub(crate) fn new_file_id(&self) -> FileId {
        FileId(self.next_file_id.fetch_add(1, Ordering::Relaxed))
    }

    /// An empty memtable.
    pub(crate) fn new_memtable(&self) -> Arc<Memtable> {
        Arc::new(Memtable::charged_to(Arc::clone(&self.memory), self.order.clone(), self.hash_seed))
    }

    /// A blob file that is read up to `end`, which moves on, through `file` while somebody writes to that.
    pub(crate) fn growing_handle(
        &self,
        id: FileId,
        file: Option<Arc<dyn File>>,
        file_id: [u8; 16],
        end: u64,
    ) -> Arc<BlobHandle> {
        let files = self.files.blobs();
        let meta = BlobMeta { id, size: 0, created_ms: 0, sections: Vec::new() };
        let file = BlobFile::growing(files.clone(), Arc::clone(&self.cache), id, file, file_id, end);
        BlobHandle::of(meta, file, files, Arc::clone(&self.graveyard))
    }

    pub(crate) fn blob_handle(&self, meta: BlobMeta) -> Arc<BlobHandle> {
        BlobHandle::new(meta, self.files.blobs(), Arc::clone(&self.cache), Arc::clone(&self.graveyard))
    }
}

/// A table that is opened when first used. When the last holder lets go of a doomed one, its file may be removed; the
/// holder, who may be any reader, does not do that itself. Thread safe.
pub(crate) struct TableHandle {
    meta: TableMeta,
    settled_at: Option<SeqNo>,
    context: Arc<TreeContext>,
    /// [`ReadOptions`] for when it is opened.
    options: AtomicU8,
    table: OnceLock<Arc<Table>>,
    doomed: AtomicBool,
}

impl TableHandle {
    /// `settled_at`: see [`Described::settled_at`].
    pub(crate) fn new(
        meta: TableMeta,
        settled_at: Option<SeqNo>,
        context: Arc<TreeContext>,
        options: ReadOptions,
    ) -> Arc<TableHandle> {
        let (table, doomed) = (OnceLock::new(), AtomicBool::new(false));
        let options = AtomicU8::new(options.to_bits());
        context.files.hold(meta.size);
        Arc::new(TableHandle { meta, settled_at, context, options, table, doomed })
    }

    /// The open table. Two threads may both open it the first time; one of the two is kept.
    ///
    /// # Errors
    /// Those of [`Table::open`]; the next call tries again.
    pub(crate) fn table(&self) -> Result<&Arc<Table>> {
        if let Some(table) = self.table.get() {
            return Ok(table);
        }
        let context = &self.context;
        let (files, cache) = (Arc::clone(&context.files), Arc::clone(&context.cache));
        let options = ReadOptions::from_bits(self.options.load(Ordering::Relaxed));
        let table = Table::open(files, cache, &self.meta, context.order.clone(), context.hash_seed, options)?;
        Ok(self.table.get_or_init(|| Arc::new(table)))
    }

    /// Takes effect when the table is opened; one that was used already stays as it is.
    pub(crate) fn set_options(&self, options: ReadOptions) {
        self.options.store(options.to_bits(), Ordering::Relaxed);
    }

    /// The open table, if it has been used.
    pub(crate) fn opened(&self) -> Option<&Arc<Table>> {
        self.table.get()
    }

    /// No manifest names the table any more: the last holder gives it to the graveyard.
    pub(crate) fn doom(&self) {
        self.doomed.store(true, Ordering::Release);
    }
}

impl Described for TableHandle {
    fn meta(&self) -> &TableMeta {
        &self.meta
    }

    /// Known once the table is open.
    fn superseded(&self) -> Superseded {
        let properties = self.opened().map(|table| table.properties());
        properties.map_or_else(Superseded::default, |properties| Superseded {
            versions: properties.superseded,
            from: properties.superseded_from,
        })
    }

    fn settled_at(&self) -> Option<SeqNo> {
        self.settled_at
    }
}

impl Drop for TableHandle {
    fn drop(&mut self) {
        self.context.files.let_go(self.meta.size);
        if *self.doomed.get_mut() {
            self.table.take();
            self.context.graveyard.push(DataKind::Table, self.meta.id);
        }
    }
}

impl std::fmt::Debug for TableHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "table {} of {}", self.meta.id.0, self.context.name)
    }
}

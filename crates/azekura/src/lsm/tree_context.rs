//! What a tree shares with the other trees of the database.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::KeyOrder;
use crate::base::compression::CompressionType;
use crate::base::manifest_state::ManifestState;
use crate::base::sync::WakeSignal;
use crate::base::version_edit::{BlobFileMeta, FileNumber, PartitionId};
use crate::blob::reader::BlobFile;
use crate::block::BlockCache;
use crate::engine::{LastVisibleSeqno, SnapshotList};
use crate::lsm::blob_map::BlobHandle;
use crate::lsm::direct_file::UnsyncedBlobFiles;
use crate::memtable::Memtable;
use crate::memtable::memtable::MemtableMemory;
use crate::table::obsolete_files::ObsoleteFiles;
use crate::vfs::open_files::DataFiles;
use crate::vfs::{Env, File, Fs};

/// Resources that all trees of a database share.
pub(crate) struct TreeResources {
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) env: Arc<dyn Env>,
    pub(crate) dir: PathBuf,
    pub(crate) files: Arc<DataFiles>,
    pub(crate) cache: Arc<BlockCache>,
    pub(crate) obsolete_files: Arc<ObsoleteFiles>,
    /// Notified when there may be a new task.
    pub(crate) work_available: Arc<WakeSignal>,
    pub(crate) hash_seed: u64,
    /// The next free file number of the database.
    pub(crate) next_file_id: Arc<AtomicU64>,
    pub(crate) last_visible: LastVisibleSeqno,
    /// The snapshots of all readers of the database.
    pub(crate) snapshots: Arc<SnapshotList>,
    pub(crate) read_only: bool,
    pub(crate) default_codec: CompressionType,
    /// Direct blob files of the database. A sync of the WAL syncs them first.
    pub(crate) unsynced_blobs: Arc<UnsyncedBlobFiles>,
    /// Bytes of the write-ahead log (WAL) when the database was opened, plus the WAL bytes of spilled records.
    pub(crate) wal_bytes: u64,
    /// Counts the memory of all memtables of the database.
    pub(crate) memtable_memory: Arc<MemtableMemory>,
}

impl TreeResources {
    /// In a follower: no new file gets a number that the manifest has.
    pub(crate) fn note_file_numbers(&self, state: &ManifestState) {
        self.next_file_id.fetch_max(state.next_file_number, Ordering::Relaxed);
    }
}

/// What a tree shares with the other trees, and the identity of its partition. Dereferences to the resources.
#[derive(Clone)]
pub(crate) struct TreeContext {
    resources: Arc<TreeResources>,
    pub(crate) order: KeyOrder,
    pub(crate) partition: PartitionId,
    pub(crate) name: String,
}

impl Deref for TreeContext {
    type Target = TreeResources;

    #[inline]
    fn deref(&self) -> &TreeResources {
        &self.resources
    }
}

impl TreeContext {
    pub(crate) fn new(
        resources: &Arc<TreeResources>,
        order: KeyOrder,
        partition: PartitionId,
        name: &str,
    ) -> TreeContext {
        TreeContext { resources: Arc::clone(resources), order, partition, name: name.to_owned() }
    }

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
        let file = BlobFile::growing(&files, Arc::clone(&self.cache), id, file, file_id, end);
        BlobHandle::new(meta, file, files, Arc::clone(&self.obsolete_files))
    }

    pub(crate) fn blob_handle(&self, meta: BlobFileMeta) -> Arc<BlobHandle> {
        let files = self.files.blob_files();
        let file = BlobFile::new(&files, Arc::clone(&self.cache), meta.number, meta.size);
        BlobHandle::new(meta, file, files, Arc::clone(&self.obsolete_files))
    }
}

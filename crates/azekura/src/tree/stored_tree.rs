//! The files of a tree before the tree is built.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::manifest_state::PartitionManifestState;
use crate::base::version_edit::{EngineKind, FileNumber, PartitionId, PartitionMeta};
use crate::base::{Error, KeyOrder, Result, SeqNo};
use crate::lsm::direct_file::DirectBlobFile;
use crate::lsm::follow::{grow_direct_file, open_direct_file};
use crate::lsm::tree::{LsmTree, check_files};
use crate::lsm::tree_context::{TreeContext, TreeResources};
use crate::pmem::pool::{self, ImageStore, ManifestPoolInfo, PoolLocation, StoredPool};
use crate::table::obsolete_files::ObsoleteFiles;
use crate::tree::partition_tree::{PartitionTree, TreeOptions};
use crate::tree::spilled_records::{self, PendingRecord};
use crate::vfs::open_files::{DataFileKind, DataFiles};

/// What the files of a tree contained when they were read.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FilesAtOpen {
    /// The file id of a pool, if it has a file.
    pub(crate) file_id: Option<[u8; 16]>,
    /// Records up to this sequence number are in permanent files, so the WAL is not needed for them.
    pub(crate) permanent: SeqNo,
    /// A pool had every record up to this sequence number, and perhaps records up to `highest`.
    applied: SeqNo,
    /// The highest sequence number that a pool may contain. Zero for an LSM tree.
    pub(crate) highest: SeqNo,
    is_mapped: bool,
    /// Whether a record is durable as soon as it is replayed into the tree.
    pub(crate) survives_power_loss: bool,
}

impl FilesAtOpen {
    /// What the manifest does not imply about the WAL: the records up to the first sequence number are not needed from
    /// it, and it was durable up to the second. `has_unlogged` says that trees of the database use sequence numbers
    /// without the WAL; then the image of a pool may contain such a number, and does not prove how far the WAL was
    /// durable.
    pub(crate) fn wal_needs(&self, kind: EngineKind, has_unlogged: bool) -> (SeqNo, SeqNo) {
        let proven = match kind {
            EngineKind::Pmem if !has_unlogged => self.highest,
            _ if self.is_mapped => self.applied,
            _ => SeqNo::ZERO,
        };
        (self.applied, proven)
    }

    /// Removes spilled tables whose records are all in the pool. For an LSM tree the edit of a flush removes them.
    pub(crate) fn forget_applied(&self, manifest: &mut PartitionManifestState) {
        manifest.spilled.retain(|_, table| table.largest_seqno > self.applied);
    }
}

/// The files of a tree that is not built, because its comparator is missing or because it was read just now.
pub(crate) struct StoredTree {
    kind: EngineKind,
    /// State of the partition in the manifest.
    manifest: PartitionManifestState,
    /// Whether the manifest does not have the partition yet.
    is_new: bool,
    /// `None` for an LSM tree.
    pool: Option<StoredPool>,
    /// Direct blob files that records of the WAL may point into, if the database is open read-only.
    direct_blobs: Vec<Arc<DirectBlobFile>>,
}

impl StoredTree {
    /// Reads the files of a new partition.
    ///
    /// # Errors
    /// `OutOfSpace` if there is not enough memory, and those of the files.
    pub(crate) fn of_new(resources: &TreeResources, meta: &PartitionMeta, options: &TreeOptions) -> Result<StoredTree> {
        StoredTree::read(resources, PartitionManifestState::new(meta.clone()), true, options)
    }

    /// Checks the files that the manifest lists, and reads those of a pool. `files`: the files of the directory with
    /// their lengths.
    ///
    /// # Errors
    /// `Corruption` if files are missing, damaged or not those of the manifest; `OutOfSpace` if there is not enough
    /// memory.
    pub(crate) fn of_manifest(
        resources: &TreeResources,
        manifest: PartitionManifestState,
        files: &HashMap<(DataFileKind, FileNumber), u64>,
        options: &TreeOptions,
    ) -> Result<StoredTree> {
        let tree = StoredTree::read(resources, manifest, false, options)?;
        check_files(tree.manifest.all_tables(), tree.manifest.blob_files.values(), files, &resources.files)?;
        Ok(tree)
    }

    fn read(
        resources: &TreeResources,
        manifest: PartitionManifestState,
        is_new: bool,
        options: &TreeOptions,
    ) -> Result<StoredTree> {
        let kind = engine_kind(&manifest.meta)?;
        let known = ManifestPoolInfo {
            created_mapped: kind == EngineKind::PmemMapped,
            flushed_through: manifest.flushed_seqno,
            file_id: manifest.pool_file_id,
        };
        let pool = match kind {
            EngineKind::Lsm => None,
            EngineKind::Pmem | EngineKind::PmemMapped => {
                Some(StoredPool::read(pool_location(resources, &manifest.meta), &known, &options.pmem)?)
            }
        };
        Ok(StoredTree { kind, manifest, is_new, pool, direct_blobs: Vec::new() })
    }

    pub(crate) fn kind(&self) -> EngineKind {
        self.kind
    }

    /// What the files contain.
    pub(crate) fn files_at_open(&self) -> FilesAtOpen {
        let in_tables = self.manifest.permanent();
        let Some(pool) = &self.pool else { return FilesAtOpen { permanent: in_tables, ..FilesAtOpen::default() } };
        let (applied, highest) = pool.seqnos_at_open();
        debug_assert!(applied <= highest, "a pool has every record up to {applied:?}, and none above {highest:?}");
        FilesAtOpen {
            file_id: pool.file_id(),
            permanent: in_tables.max(applied),
            applied,
            highest,
            is_mapped: pool.is_mapped(),
            survives_power_loss: pool.survives_power_loss(),
        }
    }

    /// The state of the partition in the manifest.
    pub(crate) fn manifest(&mut self) -> &mut PartitionManifestState {
        &mut self.manifest
    }

    /// Adds a direct blob file that records of the WAL point into, and that a read-only open cannot finish.
    pub(crate) fn add_unfinished_blobs(&mut self, file: Arc<DirectBlobFile>) {
        self.direct_blobs.retain(|known| known.id != file.id);
        self.direct_blobs.push(file);
    }

    /// Records up to this sequence number are in tables.
    pub(crate) fn permanent(&self) -> SeqNo {
        self.manifest.permanent()
    }

    /// In a follower: as [`LsmTree::follow_pointer`], for a record that waits until the tree is built.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn follow_pointer(
        &mut self,
        context: &TreeContext,
        pointer: &BlobPointer,
        is_checked: bool,
    ) -> Result<bool> {
        let id = pointer.logical_file;
        if self.kind != EngineKind::Lsm || self.manifest.has_logical_blob_file(id) {
            return Ok(true);
        }
        if let Some(known) = self.direct_blobs.iter().find(|file| file.id == id) {
            return grow_direct_file(known, pointer, is_checked);
        }
        let Some(direct) = open_direct_file(context, id, pointer.frame_end())? else { return Ok(false) };
        let is_readable = grow_direct_file(&direct, pointer, is_checked)?;
        self.direct_blobs.extend(is_readable.then_some(direct));
        Ok(is_readable)
    }

    /// In a follower: takes over a newer state of the manifest, and keeps the direct blob files that it does not have
    /// and that `pointed` contains. Closes the files that are not needed any more. `files` is the cache of tables.
    pub(crate) fn follow(&mut self, newer: &PartitionManifestState, pointed: &BTreeSet<FileNumber>, files: &DataFiles) {
        let before = std::mem::replace(&mut self.manifest, newer.clone());
        let tables: BTreeSet<FileNumber> = newer.all_tables().map(|table| table.number).collect();
        let unneeded = before.all_tables().filter(|table| !tables.contains(&table.number));
        unneeded.for_each(|table| files.close(table.number));
        let is_needed =
            |file: &mut Arc<DirectBlobFile>| pointed.contains(&file.id) && !newer.has_logical_blob_file(file.id);
        let direct = self.direct_blobs.extract_if(.., |file| !is_needed(file)).map(|file| file.id);
        let blobs = before.blob_files.into_keys().chain(direct);
        blobs.filter(|file| !newer.blob_files.contains_key(file)).for_each(|file| files.blob_files().close(file));
    }

    /// In a follower: reads the files of a pool again, for a newer state of the manifest.
    ///
    /// # Errors
    /// Those of [`of_manifest`](StoredTree::of_manifest).
    pub(crate) fn read_again(
        resources: &TreeResources,
        newer: &PartitionManifestState,
        options: &TreeOptions,
    ) -> Result<StoredTree> {
        StoredTree::read(resources, newer.clone(), false, options)
    }

    /// In a follower: takes over the image of a pool that was [read again](StoredTree::read_again).
    pub(crate) fn replace_pool(&mut self, newer: StoredTree) {
        self.pool = newer.pool;
    }

    /// Bytes of memory of the image of a pool.
    pub(crate) fn image_bytes(&self) -> u64 {
        self.pool.as_ref().map_or(0, StoredPool::image_bytes)
    }

    /// Copies the files that are no tables or blob files; false if a failed [`build`](StoredTree::build) has them.
    /// Nothing changes them meanwhile.
    pub(crate) fn copy_to(&self, dir: &Path) -> Result<bool> {
        match (&self.pool, self.kind) {
            (Some(pool), _) => pool.copy_to(dir).map(|()| true),
            (None, kind) => Ok(kind == EngineKind::Lsm),
        }
    }

    /// Removes the files of a deleted partition.
    pub(crate) fn remove(self, obsolete_files: &ObsoleteFiles) {
        self.manifest.all_tables().for_each(|table| obsolete_files.push(DataFileKind::Table, table.number));
        self.manifest.blob_files.keys().for_each(|file| obsolete_files.push(DataFileKind::Blob, *file));
        if let Some(pool) = self.pool {
            pool.remove_files();
        }
    }

    /// Builds the tree, and replays the spilled records and `pending` into it. The files go to the tree, unless the
    /// spilled records cannot be read. `has_readers`: readers of earlier moments may be registered, as in a follower. A
    /// pool then keeps the versions that they need.
    ///
    /// # Errors
    /// `Corruption` if the files contradict each other or the order of the keys; `OutOfSpace` if there is not enough
    /// memory; those of reading the files.
    pub(crate) fn build(
        &mut self,
        resources: &Arc<TreeResources>,
        order: KeyOrder,
        options: &TreeOptions,
        pending: &[PendingRecord],
        has_readers: bool,
    ) -> Result<PartitionTree> {
        let manifest = &self.manifest;
        let context = |order| TreeContext::new(resources, order, manifest.meta.id, &manifest.meta.name);
        let bytewise = context(KeyOrder::bytewise());
        let spilled = spilled_records::read(&bytewise, manifest.spilled.values(), manifest.flushed_seqno)?;
        let tree = match self.pool.take() {
            Some(pool) => PartitionTree::Pmem(pool.open(order, &options.pmem, self.is_new)?),
            None => {
                let context = context(order);
                let manifest = &mut self.manifest;
                let tree = LsmTree::restore(
                    context,
                    options.lsm.clone(),
                    std::mem::take(&mut manifest.tables).into_values().collect(),
                    std::mem::take(&mut manifest.blob_files).into_values().collect(),
                    std::mem::take(&mut manifest.range_tombstones).into_values().collect(),
                    manifest.flushed_seqno,
                )?;
                tree.add_direct_blob_files(std::mem::take(&mut self.direct_blobs));
                PartitionTree::Lsm(Arc::new(tree))
            }
        };
        if has_readers {
            tree.prepare_to_follow()?;
            tree.end_replay()?;
        }
        let through = tree.flushed_through();
        for record in spilled.iter().chain(pending).filter(|record| record.seqno > through) {
            tree.replay(record.entry())?;
        }
        Ok(tree)
    }
}

/// The kind of the tree of a partition.
///
/// # Errors
/// `Unsupported` if a newer version has written the partition.
pub(crate) fn engine_kind(meta: &PartitionMeta) -> Result<EngineKind> {
    EngineKind::from_number(meta.engine).ok_or_else(|| {
        let (name, engine) = (&meta.name, meta.engine);
        Error::unsupported(format!("partition {name:?} uses engine {engine} of a newer azekura"))
    })
}

/// Copies the files of a tree that another process writes, except tables and blob files.
///
/// # Errors
/// `Conflict` if they were written meanwhile; those of the files.
pub(crate) fn copy_beside_writer(resources: &TreeResources, meta: &PartitionMeta, dir: &Path) -> Result<()> {
    match engine_kind(meta)? {
        EngineKind::Lsm => Ok(()),
        EngineKind::Pmem | EngineKind::PmemMapped => {
            ImageStore::copy_beside_writer(&resources.fs, &resources.dir, meta.id, dir)
        }
    }
}

/// The partition to which a file called `name` belongs, if it is no table or blob file.
pub(crate) fn partition_of_file(name: &str) -> Option<PartitionId> {
    pool::parse_pool_file_name(name).map(|(partition, _)| partition)
}

pub(crate) fn pool_location(resources: &TreeResources, meta: &PartitionMeta) -> PoolLocation {
    PoolLocation {
        fs: Arc::clone(&resources.fs),
        env: Arc::clone(&resources.env),
        dir: resources.dir.clone(),
        partition: meta.id,
        name: meta.name.clone(),
        visible: resources.last_visible.clone(),
        snapshots: Arc::clone(&resources.snapshots),
        read_only: resources.read_only,
        wal_bytes: resources.wal_bytes,
    }
}

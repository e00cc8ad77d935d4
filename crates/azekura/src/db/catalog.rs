//! Catalog of partitions: maps names to partitions, and builds their trees. No other module builds trees.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};

use crate::base::comparator::BYTEWISE_NAME;
use crate::base::compression::CompressionType;
use crate::base::manifest_state::PartitionManifestState;
use crate::base::merge_operator::{self, MergeOperator, shipped_operator};
use crate::base::sync::{WakeSignal, lock, read, write};
use crate::base::version_edit::{BlobFileMeta, EngineKind, FileNumber, PartitionId, PartitionMeta, TableMeta};
use crate::base::{EntryRef, Error, ErrorKind, KeyOrder, Result, SeqNo};
use crate::block::cache::BlockCache;
use crate::db::components::PartitionComponents;
use crate::db::options::{EngineType, PartitionCreateOptions};
use crate::db::spill::{self, PendingRecord};
use crate::db::state::backoff::TaskBackoffs;
use crate::db::state::partition_expiry::PartitionExpiry;
use crate::db::state::partition_tree::PartitionTree;
use crate::engine::{LastVisibleSeqno, SingleCommit, SnapshotList};
use crate::lsm::direct_file::{DirectBlobFile, UnsyncedBlobFiles};
use crate::lsm::table_handle::TreeContext;
use crate::lsm::tree::{LsmTree, check_files};
use crate::memtable::memtable::MemtableMemory;
use crate::pmem::pool::{ManifestPoolInfo, PmemEngine, PoolLocation, StoredPool};
use crate::table::obsolete_files::ObsoleteFiles;
use crate::vfs::open_files::{DataFileKind, DataFiles};
use crate::vfs::{Env, Fs};

/// Resources that all trees of a database share.
#[derive(Clone)]
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
    pub(crate) next_file_id: Arc<AtomicU64>,
    pub(crate) last_visible: LastVisibleSeqno,
    pub(crate) snapshots: Arc<SnapshotList>,
    pub(crate) read_only: bool,
    pub(crate) default_codec: CompressionType,
    pub(crate) unsynced_blobs: Arc<UnsyncedBlobFiles>,
    /// Bytes of the write-ahead log (WAL) when the database was opened, plus the WAL bytes of spilled records.
    pub(crate) wal_bytes: u64,
    pub(crate) memtable_memory: Arc<MemtableMemory>,
}

impl TreeResources {
    /// The context of one tree.
    pub(crate) fn context(&self, order: KeyOrder, partition: PartitionId, name: &str) -> TreeContext {
        TreeContext {
            fs: Arc::clone(&self.fs),
            env: Arc::clone(&self.env),
            dir: self.dir.clone(),
            files: Arc::clone(&self.files),
            cache: Arc::clone(&self.cache),
            obsolete_files: Arc::clone(&self.obsolete_files),
            hash_seed: self.hash_seed,
            order,
            partition,
            name: name.to_owned(),
            next_file_id: Arc::clone(&self.next_file_id),
            unsynced_blobs: Arc::clone(&self.unsynced_blobs),
            last_visible: self.last_visible.clone(),
            snapshots: Arc::clone(&self.snapshots),
            memtable_memory: Arc::clone(&self.memtable_memory),
        }
    }
}

/// Whether a tree is built before or after the WAL is replayed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReplayPhase {
    /// Built before: the records of the WAL are replayed into the tree afterwards.
    Before,
    /// Built after: the replay has buffered the records of the WAL, and building the tree applies them.
    After,
}

/// Neither deleted nor closed.
const OPEN: u8 = 0;
/// Deleted by [`Database::delete_partition`](crate::Database::delete_partition).
const DELETED: u8 = 1;
/// Handles of a closed database return `Closed`.
const CLOSED: u8 = 2;

/// What the files of a pool contained when they were read. Kept beside the tree, because while the tree is being
/// built neither `stored_pool` nor `tree` has the pool.
#[derive(Clone, Copy)]
struct PoolAtOpen {
    file_id: Option<[u8; 16]>,
    /// The files had every record up to this sequence number, and perhaps records up to `highest`.
    applied: SeqNo,
    highest: SeqNo,
    is_mapped: bool,
    survives_power_loss: bool,
}

impl PoolAtOpen {
    fn new(pool: &StoredPool) -> PoolAtOpen {
        let (applied, highest) = pool.seqnos_at_open();
        PoolAtOpen {
            file_id: pool.file_id(),
            applied,
            highest,
            is_mapped: pool.is_mapped(),
            survives_power_loss: pool.survives_power_loss(),
        }
    }
}

/// State of a partition that all its handles share.
pub(crate) struct PartitionState {
    pub(crate) id: PartitionId,
    pub(crate) name: Arc<str>,
    /// Backoff of failed background tasks.
    pub(crate) backoffs: TaskBackoffs,
    comparator: String,
    /// The name of the merge operator in the manifest, once there is one.
    stored_merge_operator: OnceLock<String>,
    /// The merge operator, once it is known. Its name is the stored one.
    merge_operator: OnceLock<Arc<dyn MergeOperator>>,
    engine: EngineKind,
    tree: OnceLock<PartitionTree>,
    /// One of [`OPEN`], [`DELETED`], [`CLOSED`].
    status: AtomicU8,
    pub(crate) expiry: PartitionExpiry,
    /// The encoded options, as stored in the manifest.
    settings: Mutex<Vec<u8>>,
    /// Records of the WAL for a partition whose comparator was not given yet, by ascending sequence number. Not
    /// larger than the WAL. Empty once the records are [spilled](PartitionState::note_spilled) or the tree is built: a
    /// build removes them after it has set `tree`, so a thread that finds none here finds them in the tree.
    buffered_records: Mutex<Arc<Vec<PendingRecord>>>,
    /// Records up to this sequence number are in permanent files, so the WAL is not needed for them. Set by the first
    /// record of a replay.
    permanent_at_open: OnceLock<SeqNo>,
    /// Direct blob files that `buffered_records` may point into, if the database is open read-only.
    direct_blobs: Mutex<Vec<Arc<DirectBlobFile>>>,
    /// State of the partition in the manifest when the database was opened; taken when the tree is built, and locked
    /// until it is set. `stored_pool` holds the files of a pool in the same way, but is not locked meanwhile.
    stored_partition: Mutex<Option<PartitionManifestState>>,
    stored_pool: Mutex<Option<StoredPool>>,
    /// What the files of a pool contained at open. `None` for an LSM partition.
    pool_at_open: Option<PoolAtOpen>,
    /// The error of a failed build of the tree. The build has consumed its inputs, so it cannot be tried again.
    build_error: Mutex<Option<Error>>,
}

impl PartitionState {
    /// Returns the tree.
    ///
    /// # Errors
    /// `Closed` if the partition was deleted or the database closed, `Invalid` if its comparator was not given
    /// yet.
    #[inline]
    pub(crate) fn tree(&self) -> Result<&PartitionTree> {
        if !self.is_open() {
            return Err(self.closed_error());
        }
        self.tree.get().ok_or_else(|| self.missing_comparator_error())
    }

    /// Returns the merge operator.
    ///
    /// # Errors
    /// `Invalid` if the partition has none, or if it was not given yet.
    pub(crate) fn merge_operator(&self) -> Result<&Arc<dyn MergeOperator>> {
        self.merge_operator.get().ok_or_else(|| self.missing_merge_operator_error(self.stored_merge_operator.get()))
    }

    /// Returns the merge operator, if it is known.
    pub(crate) fn merge_operator_if_known(&self) -> Option<&Arc<dyn MergeOperator>> {
        self.merge_operator.get()
    }

    #[cold]
    fn missing_merge_operator_error(&self, stored: Option<&String>) -> Error {
        Error::invalid(match stored {
            Some(stored) => format!(
                "partition {:?} has the merge operator {stored:?}: open it with open_partition_with and this operator",
                self.name
            ),
            None => format!("partition {:?} has no merge operator: open it with one", self.name),
        })
    }

    /// Checks that the operator of the partition, if it has one, is known.
    ///
    /// # Errors
    /// `Invalid` if it was not given yet.
    pub(crate) fn check_merge_operator_is_known(&self) -> Result<()> {
        if self.stored_merge_operator.get().is_some() { self.merge_operator().map(drop) } else { Ok(()) }
    }

    /// Checks an operand before it is written.
    ///
    /// # Errors
    /// `Invalid` if there is no operator or it refuses the operand; `Closed`.
    pub(crate) fn check_operand(&self, operand: &[u8]) -> Result<()> {
        self.tree()?;
        merge_operator::check_operand(&**self.merge_operator()?, operand)
    }

    /// Returns the operator of `components` if its name must be stored first.
    ///
    /// # Errors
    /// `Invalid` if the partition has an operator, and `components` have none or another one.
    pub(crate) fn new_merge_operator<'a>(
        &self,
        components: &'a PartitionComponents,
    ) -> Result<Option<&'a Arc<dyn MergeOperator>>> {
        let given = components.merge_operator.as_ref();
        match (self.stored_merge_operator.get(), given) {
            (None, given) => Ok(given),
            (Some(stored), Some(given)) if stored == given.name() => Ok(None),
            (Some(stored), Some(given)) => Err(Error::invalid(format!(
                "partition {:?} has the merge operator {stored:?} and cannot be opened with {:?}",
                self.name,
                given.name()
            ))),
            (stored, None) => Err(self.missing_merge_operator_error(stored)),
        }
    }

    /// Sets the operator, whose name is in the manifest. Keeps one that was set before.
    pub(crate) fn set_merge_operator(&self, operator: &Arc<dyn MergeOperator>) {
        self.stored_merge_operator.get_or_init(|| operator.name().to_owned());
        let operator = self.merge_operator.get_or_init(|| Arc::clone(operator));
        if let Some(tree) = self.lsm_if_built() {
            tree.merge_operator.get_or_init(|| Arc::clone(operator));
        }
    }

    /// Gives the tree the components that it can do without.
    pub(crate) fn set_components(&self, components: &PartitionComponents) {
        if let (Some(tree), Some(filter)) = (self.lsm_if_built(), &components.compaction_filter) {
            tree.set_compaction_filter(Arc::clone(filter));
        }
    }

    /// Whether the partition is neither deleted nor closed.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.status.load(Ordering::Relaxed) == OPEN
    }

    /// Returns the tree of an LSM partition.
    ///
    /// # Errors
    /// As [`tree`](PartitionState::tree); `Invalid` for a pool.
    pub(crate) fn lsm(&self) -> Result<&Arc<LsmTree>> {
        let other =
            || Error::invalid(format!("partition {:?} has no tables: its engine is {:?}", self.name, self.engine));
        self.tree()?.lsm().ok_or_else(other)
    }

    /// The tree, if it has been built. Also for a deleted or closed partition.
    pub(crate) fn tree_if_built(&self) -> Option<&PartitionTree> {
        self.tree.get()
    }

    /// As [`tree_if_built`](Self::tree_if_built), for an LSM partition; `None` for a pool.
    pub(crate) fn lsm_if_built(&self) -> Option<&Arc<LsmTree>> {
        self.tree.get().and_then(PartitionTree::lsm)
    }

    /// As [`tree_if_built`](Self::tree_if_built), for a pool; `None` for an LSM partition.
    #[inline]
    pub(crate) fn pool_if_built(&self) -> Option<&Arc<dyn PmemEngine>> {
        self.tree.get().and_then(PartitionTree::pmem)
    }

    /// How a single record is committed.
    #[inline]
    pub(crate) fn single_commit(&self) -> SingleCommit {
        self.tree.get().map_or(SingleCommit::InGroup, PartitionTree::single_commit)
    }

    /// Whether a value of `len` bytes is written to a blob file before its commit.
    #[inline]
    pub(crate) fn uses_direct_write(&self, len: usize) -> bool {
        self.lsm_if_built().is_some_and(|tree| tree.uses_direct_write(len))
    }

    #[cold]
    pub(crate) fn closed_error(&self) -> Error {
        match self.is_deleted() {
            true => Error::new(ErrorKind::Closed, format!("partition {:?} was deleted", self.name)),
            false => Error::new(ErrorKind::Closed, "the database is closed"),
        }
    }

    #[cold]
    fn missing_comparator_error(&self) -> Error {
        Error::invalid(format!(
            "partition {:?} was created with the comparator {:?}: open it with open_partition_with_comparator",
            self.name, self.comparator
        ))
    }

    pub(crate) fn mark_deleted(&self) {
        self.status.store(DELETED, Ordering::Release);
    }

    /// Called before the directory lock is released, because another process may change the files afterwards. A
    /// deleted partition stays deleted.
    pub(crate) fn mark_closed(&self) {
        let _deleted_stays = self.status.compare_exchange(OPEN, CLOSED, Ordering::AcqRel, Ordering::Relaxed);
    }

    pub(crate) fn is_deleted(&self) -> bool {
        self.status.load(Ordering::Acquire) == DELETED
    }

    /// Whether the manifest stores these encoded options.
    pub(crate) fn has_settings(&self, settings: &[u8]) -> bool {
        *lock(&self.settings) == settings
    }

    /// Records the encoded options that the manifest now stores.
    pub(crate) fn note_settings(&self, settings: Vec<u8>) {
        *lock(&self.settings) = settings;
    }

    /// The options that the manifest stores.
    pub(crate) fn stored_options(&self) -> Result<PartitionCreateOptions> {
        PartitionCreateOptions::decode(&lock(&self.settings))
    }

    /// Checks that `options` are for the engine of the partition.
    pub(crate) fn check_engine(&self, options: &PartitionCreateOptions) -> Result<()> {
        if (options.engine == EngineType::Lsm) == (self.engine == EngineKind::Lsm) {
            return Ok(());
        }
        let wanted = options.engine.kind_in(false);
        Err(Error::invalid(format!(
            "partition {:?} was created with the engine {:?} and cannot have {wanted:?}",
            self.name, self.engine
        )))
    }

    /// Whether `options` lower the size limit of a pool below the stored one. The WAL was written under the stored
    /// limit, so it must not be replayed under the lower one.
    pub(crate) fn lowers_max_size(&self, options: &PartitionCreateOptions) -> Result<bool> {
        Ok(self.pool_if_built().is_some() && options.pmem().lowers_max_size(&self.stored_options()?.pmem()))
    }

    /// The lowest sequence number of the partition whose record is only in the WAL. Does not wait for a tree that is
    /// being built.
    pub(crate) fn first_unflushed(&self) -> Option<SeqNo> {
        // The buffer is read first, because a build sets the tree before it empties the buffer.
        let buffered = lock(&self.buffered_records).first().map(|record| record.seqno);
        buffered.or_else(|| self.tree.get()?.first_unflushed())
    }

    /// The records of the WAL that wait for the comparator. Empty once the tree is built or the records are spilled.
    pub(crate) fn pending(&self) -> Arc<Vec<PendingRecord>> {
        Arc::clone(&lock(&self.buffered_records))
    }

    /// Records that the manifest names tables with all buffered records. The caller prevents the tree from being
    /// built meanwhile.
    pub(crate) fn note_spilled(&self, tables: Vec<TableMeta>) {
        if let Some(stored) = &mut *lock(&self.stored_partition) {
            stored.spilled.extend(tables.into_iter().map(|table| (table.number, table)));
        }
        *lock(&self.buffered_records) = Arc::default();
    }

    /// Removes spilled tables whose records are all in the pool, both from this partition and from `manifest_state`,
    /// from which the manifest is rewritten. For an LSM partition the edit of a flush removes them.
    pub(crate) fn forget_applied(&self, manifest_state: &mut PartitionManifestState) {
        let Some(pool) = &self.pool_at_open else { return };
        manifest_state.spilled.retain(|_, table| table.largest_seqno > pool.applied);
        if let Some(stored) = &mut *lock(&self.stored_partition) {
            stored.spilled.clone_from(&manifest_state.spilled);
        }
    }

    /// Adds a blob file that recovery made of a direct blob file. Only records of the WAL point into it.
    pub(crate) fn add_blob_file(&self, file: BlobFileMeta) {
        // Locked first, so that no tree is being built.
        let mut stored = lock(&self.stored_partition);
        match (self.lsm_if_built(), &mut *stored) {
            (Some(tree), _) => tree.add_blob_files(vec![file]),
            (None, Some(stored)) => drop(stored.blob_files.insert(file.number, file)),
            (None, None) => {}
        }
    }

    /// Adds a direct blob file that the WAL points into, and that a read-only open cannot finish.
    pub(crate) fn add_direct_blob_file(&self, file: Arc<DirectBlobFile>) {
        let _no_build = lock(&self.stored_partition);
        match self.lsm_if_built() {
            Some(tree) => tree.add_direct_blob_files([file]),
            None => lock(&self.direct_blobs).push(file),
        }
    }

    /// Ends the replay: all records of the WAL have been applied.
    pub(crate) fn end_replay(&self) -> Result<()> {
        self.tree.get().map_or(Ok(()), |tree| tree.end_replay())
    }

    /// Whether a record is durable as soon as it is replayed into this partition.
    pub(crate) fn survives_power_loss(&self) -> bool {
        self.pool_at_open.is_some_and(|pool| pool.survives_power_loss)
    }

    /// Copies the files of a pool that was not built because its comparator is missing. Nothing changes these files
    /// meanwhile.
    pub(crate) fn copy_unbuilt_pool(&self, dir: &Path) -> Result<()> {
        lock(&self.stored_pool).as_ref().map_or(Ok(()), |pool| pool.copy_to(dir))
    }

    /// File id of a pool, read from its files at open. `None` for an LSM partition.
    pub(crate) fn pool_file_id(&self) -> Option<[u8; 16]> {
        self.pool_at_open?.file_id
    }

    /// The highest sequence number that the files of a pool may have contained at open.
    pub(crate) fn highest_in_pool(&self) -> SeqNo {
        self.pool_at_open.map_or(SeqNo::ZERO, |pool| pool.highest)
    }

    /// Requirements on the WAL that follow from the permanent files, before anything is replayed. Records up to the
    /// first sequence number are not needed from the WAL. The WAL was durable up to the second. `pools_skip_log` says
    /// that mapped pools of the database use sequence numbers without the WAL; then the image of another pool may
    /// contain such a number, and does not prove how far the WAL was durable.
    pub(crate) fn wal_needs(&self, stored: &PartitionManifestState, pools_skip_log: bool) -> (SeqNo, SeqNo) {
        let (permanent, durable) = (stored.permanent(), stored.durable_seqno());
        let Some(pool) = &self.pool_at_open else { return (permanent, durable) };
        let proven = match self.engine {
            EngineKind::Pmem if !pools_skip_log => pool.highest,
            _ if pool.is_mapped => pool.applied,
            _ => SeqNo::ZERO,
        };
        (permanent.max(pool.applied), durable.max(proven))
    }

    /// The highest sequence number in a pool whose changes may be missing in the WAL; zero for other partitions.
    pub(crate) fn highest_unlogged_seqno(&self) -> SeqNo {
        if self.engine == EngineKind::PmemMapped { self.highest_in_pool() } else { SeqNo::ZERO }
    }

    /// Applies a record of the WAL, or buffers it if the tree is not built. Returns false if permanent files contain
    /// the record already.
    pub(crate) fn replay(&self, entry: EntryRef<'_>) -> Result<bool> {
        if let Some(tree) = self.tree.get() {
            if entry.seqno <= tree.flushed_through() {
                return Ok(false);
            }
            tree.replay(entry)?;
            return Ok(true);
        }
        let permanent = *self.permanent_at_open.get_or_init(|| {
            let stored = lock(&self.stored_partition);
            let permanent = stored.as_ref().map_or(SeqNo::ZERO, PartitionManifestState::permanent);
            permanent.max(self.pool_at_open.map_or(SeqNo::ZERO, |pool| pool.applied))
        });
        if entry.seqno <= permanent {
            return Ok(false);
        }
        Arc::make_mut(&mut *lock(&self.buffered_records)).push(PendingRecord::new(entry));
        Ok(true)
    }
}

/// All partitions of a database. Thread safe.
pub(crate) struct Catalog {
    resources: TreeResources,
    by_name: RwLock<BTreeMap<Arc<str>, Arc<PartitionState>>>,
}

impl Catalog {
    pub(crate) fn new(parts: TreeResources) -> Catalog {
        Catalog { resources: parts, by_name: RwLock::default() }
    }

    pub(crate) fn resources(&self) -> &TreeResources {
        &self.resources
    }

    pub(crate) fn get(&self, name: &str) -> Option<Arc<PartitionState>> {
        read(&self.by_name).get(name).cloned()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        read(&self.by_name).keys().map(|name| name.to_string()).collect()
    }

    /// All partitions, ordered by name.
    pub(crate) fn all(&self) -> Vec<Arc<PartitionState>> {
        read(&self.by_name).values().cloned().collect()
    }

    /// Bytes of disk space that the next checkpoints of all pools need in addition to their files.
    pub(crate) fn pool_checkpoint_bytes(&self) -> u64 {
        let partitions = self.all();
        let trees = partitions.iter().filter_map(|partition| partition.tree_if_built());
        trees.fold(0, |bytes, tree| bytes.saturating_add(tree.checkpoint_bytes()))
    }

    pub(crate) fn remove(&self, name: &str) {
        write(&self.by_name).remove(name);
    }

    /// Discards a deleted partition. Its files are removed now, or when the last reader releases them. The next open
    /// removes files whose removal failed.
    pub(crate) fn discard(&self, state: &PartitionState) {
        if let Some(tree) = state.tree.get() {
            tree.discard();
        }
        // Without a tree, the files of the partition are listed only in the catalog.
        if let Some(stored) = lock(&state.stored_partition).take() {
            let obsolete_files = &self.resources.obsolete_files;
            stored.all_tables().for_each(|table| obsolete_files.push(DataFileKind::Table, table.number));
            stored.blob_files.keys().for_each(|file| obsolete_files.push(DataFileKind::Blob, *file));
        }
        if let Some(pool) = lock(&state.stored_pool).take() {
            pool.remove_files();
        }
        *lock(&state.buffered_records) = Arc::default();
    }

    /// Adds a partition of the manifest and checks its files. A partition with a custom comparator has no tree until
    /// the comparator is given.
    pub(crate) fn restore_partition(
        &self,
        stored: PartitionManifestState,
        files: &HashMap<(DataFileKind, FileNumber), u64>,
    ) -> Result<Arc<PartitionState>> {
        let meta = stored.meta.clone();
        let engine = engine_of(&meta)?;
        let options = PartitionCreateOptions::decode(&meta.settings)?;
        let known = ManifestPoolInfo {
            flushed_through: stored.flushed_seqno,
            file_id: stored.pool_file_id,
            ..ManifestPoolInfo::default()
        };
        let pool = self.read_pool(&meta, engine, known, &options)?;
        check_files(stored.all_tables(), stored.blob_files.values(), files, &self.resources.files)?;
        let bytewise = meta.comparator == BYTEWISE_NAME;
        let uses_expiry = stored.uses_expiry;
        let state = new_state(&meta, engine, Some(stored), pool);
        state.expiry.set_default_ttl_ms(options.default_ttl_ms());
        if uses_expiry {
            state.expiry.note_use(&self.resources.snapshots);
        }
        self.insert(&state);
        if bytewise {
            self.build_tree(&state, KeyOrder::bytewise(), &options, ReplayPhase::Before)?;
        }
        Ok(state)
    }

    /// Creates a new partition, which is not visible until it is [inserted](Catalog::insert).
    pub(crate) fn create_tree(
        &self,
        meta: &PartitionMeta,
        order: KeyOrder,
        options: &PartitionCreateOptions,
    ) -> Result<Arc<PartitionState>> {
        let engine = engine_of(meta)?;
        let pool = self.read_pool(meta, engine, ManifestPoolInfo::default(), options)?;
        let state = new_state(meta, engine, None, pool);
        state.expiry.set_default_ttl_ms(options.default_ttl_ms());
        self.build_tree(&state, order, options, ReplayPhase::After)?;
        Ok(state)
    }

    /// Reads the files of a pool; `None` for an LSM partition.
    fn read_pool(
        &self,
        meta: &PartitionMeta,
        engine: EngineKind,
        known: ManifestPoolInfo,
        options: &PartitionCreateOptions,
    ) -> Result<Option<StoredPool>> {
        if engine == EngineKind::Lsm {
            return Ok(None);
        }
        let known = ManifestPoolInfo { created_mapped: engine == EngineKind::PmemMapped, ..known };
        StoredPool::read(self.pool_location(meta), &known, &options.pmem()).map(Some)
    }

    pub(crate) fn pool_location(&self, meta: &PartitionMeta) -> PoolLocation {
        let parts = &self.resources;
        PoolLocation {
            fs: Arc::clone(&parts.fs),
            env: Arc::clone(&parts.env),
            dir: parts.dir.clone(),
            partition: meta.id,
            name: meta.name.clone(),
            visible: parts.last_visible.clone(),
            snapshots: Arc::clone(&parts.snapshots),
            read_only: parts.read_only,
            wal_bytes: parts.wal_bytes,
        }
    }

    /// Adds a partition to the catalog.
    pub(crate) fn insert(&self, state: &Arc<PartitionState>) {
        write(&self.by_name).insert(Arc::clone(&state.name), Arc::clone(state));
    }

    /// Prepares an existing partition for a caller. Builds its tree, if the tree was waiting for the comparator.
    ///
    /// # Errors
    /// `Invalid` if the comparator or the engine of `options` is not the one the partition was created with, or if
    /// `options` do not fit the comparator.
    pub(crate) fn open(
        &self,
        state: &Arc<PartitionState>,
        components: &PartitionComponents,
        options: &PartitionCreateOptions,
    ) -> Result<()> {
        let new_operator = state.new_merge_operator(components)?;
        let order = components.key_order();
        if order.name() != state.comparator {
            return Err(Error::invalid(format!(
                "partition {:?} was created with the comparator {:?} and cannot be opened with {:?}",
                state.name,
                state.comparator,
                order.name()
            )));
        }
        state.check_engine(options)?;
        options.check_order(&order)?;
        if state.tree.get().is_none() {
            self.build_tree(state, order, &state.stored_options()?, ReplayPhase::After)?;
        }
        state.set_components(components);
        if let (None, Some(operator)) = (new_operator, &components.merge_operator) {
            state.set_merge_operator(operator);
        }
        Ok(())
    }

    /// Applies options to new data, and does not store them.
    pub(crate) fn set_options(&self, state: &PartitionState, options: &PartitionCreateOptions) -> Result<()> {
        match state.tree()? {
            PartitionTree::Lsm(tree) => tree.set_options(options.lsm(self.resources.default_codec)),
            PartitionTree::Pmem(pool) => pool.set_options(&options.pmem())?,
        }
        state.expiry.set_default_ttl_ms(options.default_ttl_ms());
        Ok(())
    }

    fn build_tree(
        &self,
        state: &PartitionState,
        order: KeyOrder,
        options: &PartitionCreateOptions,
        log: ReplayPhase,
    ) -> Result<()> {
        let mut stored = lock(&state.stored_partition);
        if state.tree.get().is_some() {
            return Ok(()); // another caller has built the tree
        }
        if let Some(error) = &*lock(&state.build_error) {
            return Err(error.clone());
        }
        // If the build fails or panics, a later call must not build an empty tree from the inputs that remain.
        let again = format!("partition {:?} could not be opened before: open the database anew", state.name);
        *lock(&state.build_error) = Some(Error::new(ErrorKind::Closed, again));
        // Not locked, because a comparator may take long, and a thread that retires WAL segments reads the buffer.
        let pending = state.pending();
        let built = self.make_tree(state, stored.take(), &pending, order, options).and_then(|tree| {
            // Before the tree is set, because other threads can use the tree afterwards.
            if log == ReplayPhase::After {
                tree.end_replay()?;
            }
            Ok(tree)
        });
        match built {
            Ok(tree) => {
                let set = state.tree.set(tree);
                debug_assert!(set.is_ok(), "the lock on `stored` lets one builder in");
                *lock(&state.buffered_records) = Arc::default();
                *lock(&state.build_error) = None;
                Ok(())
            }
            Err(error) => {
                *lock(&state.build_error) = Some(error.clone());
                Err(error)
            }
        }
    }

    fn make_tree(
        &self,
        state: &PartitionState,
        stored: Option<PartitionManifestState>,
        pending: &[PendingRecord],
        order: KeyOrder,
        options: &PartitionCreateOptions,
    ) -> Result<PartitionTree> {
        let is_new = stored.is_none();
        let spilled = match &stored {
            Some(stored) => {
                let context = self.resources.context(KeyOrder::bytewise(), state.id, &state.name);
                spill::read(&context, stored.spilled.values(), stored.flushed_seqno)?
            }
            None => Vec::new(),
        };
        let tree = match (state.engine, lock(&state.stored_pool).take()) {
            (EngineKind::Lsm, _) => PartitionTree::Lsm(self.build_lsm(state, stored, order, options)?),
            (_, Some(pool)) => PartitionTree::Pmem(pool.open(order, &options.pmem(), is_new)?),
            (_, None) => return Err(Error::new(ErrorKind::Closed, "the pool was opened before, and failed")),
        };
        let through = tree.flushed_through();
        for record in spilled.iter().chain(pending).filter(|record| record.seqno > through) {
            tree.replay(record.entry())?;
        }
        Ok(tree)
    }

    fn build_lsm(
        &self,
        state: &PartitionState,
        stored: Option<PartitionManifestState>,
        order: KeyOrder,
        options: &PartitionCreateOptions,
    ) -> Result<Arc<LsmTree>> {
        let parts = &self.resources;
        let context = parts.context(order, state.id, &state.name);
        let (tables, blobs, range_tombstones, flushed) = match stored {
            Some(manifest_state) => (
                manifest_state.tables.into_values().collect(),
                manifest_state.blob_files.into_values().collect(),
                manifest_state.range_tombstones.into_values().collect(),
                manifest_state.flushed_seqno,
            ),
            None => (Vec::new(), Vec::new(), Vec::new(), SeqNo::ZERO),
        };
        let tree =
            LsmTree::restore(context, options.lsm(parts.default_codec), tables, blobs, range_tombstones, flushed)?;
        tree.add_direct_blob_files(lock(&state.direct_blobs).drain(..));
        if let Some(operator) = state.merge_operator.get() {
            tree.merge_operator.get_or_init(|| Arc::clone(operator));
        }
        Ok(Arc::new(tree))
    }
}

fn new_state(
    meta: &PartitionMeta,
    engine: EngineKind,
    stored: Option<PartitionManifestState>,
    pool: Option<StoredPool>,
) -> Arc<PartitionState> {
    let merge_operator = stored.as_ref().and_then(|stored| stored.merge_operator.clone());
    let shipped = merge_operator.as_deref().and_then(shipped_operator);
    Arc::new(PartitionState {
        stored_merge_operator: merge_operator.map_or_else(OnceLock::new, OnceLock::from),
        merge_operator: shipped.map_or_else(OnceLock::new, OnceLock::from),
        id: meta.id,
        name: Arc::from(meta.name.as_str()),
        backoffs: TaskBackoffs::default(),
        comparator: meta.comparator.clone(),
        engine,
        tree: OnceLock::new(),
        status: AtomicU8::new(OPEN),
        expiry: PartitionExpiry::default(),
        settings: Mutex::new(meta.settings.clone()),
        buffered_records: Mutex::default(),
        permanent_at_open: OnceLock::new(),
        direct_blobs: Mutex::default(),
        stored_partition: Mutex::new(stored),
        pool_at_open: pool.as_ref().map(PoolAtOpen::new),
        stored_pool: Mutex::new(pool),
        build_error: Mutex::default(),
    })
}

fn engine_of(meta: &PartitionMeta) -> Result<EngineKind> {
    EngineKind::from_number(meta.engine).ok_or_else(|| {
        let (name, engine) = (&meta.name, meta.engine);
        Error::unsupported(format!("partition {name:?} uses engine {engine} of a newer azekura"))
    })
}

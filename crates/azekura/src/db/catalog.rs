//! Names and the trees behind them: the one place that builds trees.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};

use crate::base::comparator::{BYTEWISE_NAME, Comparator};
use crate::base::compression::CompressionType;
use crate::base::manifest_state::PartitionManifestState;
use crate::base::sync::{WakeSignal, lock, read, write};
use crate::base::version_edit::{BlobFileMeta, EngineKind, FileNumber, PartitionId, PartitionMeta, TableMeta};
use crate::base::{EntryRef, Error, ErrorKind, KeyOrder, Result, SeqNo};
use crate::block::cache::BlockCache;
use crate::db::options::{EngineType, PartitionCreateOptions};
use crate::db::spill::{self, PendingRecord};
use crate::db::state::backoff::TaskBackoffs;
use crate::db::state::partition_tree::PartitionTree;
use crate::engine::{Engine, LastVisibleSeqno, SnapshotList};
use crate::lsm::blob::direct_file::{DirectBlobFile, UnsyncedBlobFiles};
use crate::lsm::table_handle::TreeContext;
use crate::lsm::tree::{LsmTree, check_files};
use crate::memtable::memtable::MemtableMemory;
use crate::pmem::pool::{ManifestPoolInfo, PmemEngine, PoolLocation, StoredPool};
use crate::table::obsolete_files::ObsoleteFiles;
use crate::vfs::fs::PersistenceLevel;
use crate::vfs::open_files::{DataFileKind, DataFiles};
use crate::vfs::{Env, Fs};

/// What every tree of a database is built from.
#[derive(Clone)]
pub(crate) struct TreeResources {
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) env: Arc<dyn Env>,
    pub(crate) dir: PathBuf,
    pub(crate) files: Arc<DataFiles>,
    pub(crate) cache: Arc<BlockCache>,
    pub(crate) obsolete_files: Arc<ObsoleteFiles>,
    /// Rung when work may have appeared.
    pub(crate) work_available: Arc<WakeSignal>,
    pub(crate) hash_seed: u64,
    pub(crate) next_file_id: Arc<AtomicU64>,
    pub(crate) last_visible: LastVisibleSeqno,
    pub(crate) snapshots: Arc<SnapshotList>,
    pub(crate) read_only: bool,
    pub(crate) default_codec: CompressionType,
    pub(crate) unsynced_blobs: Arc<UnsyncedBlobFiles>,
    /// Bytes of log that there were when the database was opened.
    pub(crate) wal_bytes: u64,
    pub(crate) memtable_memory: Arc<MemtableMemory>,
}

impl TreeResources {
    /// What a tree of that partition shares with the rest.
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

/// Where the records are that only the log has, when a tree is built.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReplayPhase {
    /// They are replayed into the tree afterwards.
    Before,
    /// They were replayed before, and wait for the tree.
    After,
}

/// In use.
const OPEN: u8 = 0;
/// Deleted by [`Database::delete_partition`](crate::Database::delete_partition).
const DELETED: u8 = 1;
/// The database was closed.
const CLOSED: u8 = 2;

/// A partition as the database holds it, shared by all its handles.
pub(crate) struct PartitionState {
    pub(crate) id: PartitionId,
    pub(crate) name: Arc<str>,
    /// Background work that failed.
    pub(crate) backoffs: TaskBackoffs,
    comparator: String,
    engine: EngineKind,
    tree: OnceLock<PartitionTree>,
    /// One of [`OPEN`], [`DELETED`], [`CLOSED`].
    status: AtomicU8,
    /// The options as the manifest has them.
    settings: Mutex<Vec<u8>>,
    /// Records of the log for a partition whose comparator is not here yet, by rising sequence numbers; bounded by the
    /// log, and empty once they are [spilled](PartitionState::note_spilled).
    buffered_records: Mutex<Arc<Vec<PendingRecord>>>,
    /// The log is not needed for records up to here; set by the first record of a replay.
    permanent_at_open: OnceLock<SeqNo>,
    /// Files that those may point into, where nothing can be written.
    direct_blobs: Mutex<Vec<Arc<DirectBlobFile>>>,
    /// What the manifest said when the database was opened, and the files of a pool; taken when the tree is built.
    stored_partition: Mutex<Option<PartitionManifestState>>,
    stored_pool: Mutex<Option<StoredPool>>,
    /// That its files had when they were read, if it is a pool.
    pub(crate) pool_file_id: Option<[u8; 16]>,
    /// Why the tree could not be built: what it is built from is used up then.
    build_error: Mutex<Option<Error>>,
}

impl PartitionState {
    /// The tree.
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

    /// Neither deleted nor closed.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.status.load(Ordering::Relaxed) == OPEN
    }

    /// The tree, where it must be made of tables.
    ///
    /// # Errors
    /// As [`tree`](PartitionState::tree); `Invalid` for a pool.
    pub(crate) fn lsm(&self) -> Result<&Arc<LsmTree>> {
        let other =
            || Error::invalid(format!("partition {:?} has no tables: its engine is {:?}", self.name, self.engine));
        self.tree()?.lsm().ok_or_else(other)
    }

    /// The tree, if it has been built, also of a deleted partition.
    pub(crate) fn tree_if_built(&self) -> Option<&PartitionTree> {
        self.tree.get()
    }

    /// The same, if it is made of tables.
    pub(crate) fn lsm_if_built(&self) -> Option<&Arc<LsmTree>> {
        self.tree.get().and_then(PartitionTree::lsm)
    }

    /// The same, if it is a pool.
    #[inline]
    pub(crate) fn pool_if_built(&self) -> Option<&Arc<dyn PmemEngine>> {
        self.tree.get().and_then(PartitionTree::pmem)
    }

    /// Whether a value of that length is written ahead of its commit.
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

    /// The directory is given free: what its files hold from now on is another's.
    pub(crate) fn mark_closed(&self) {
        let _deleted_stays = self.status.compare_exchange(OPEN, CLOSED, Ordering::AcqRel, Ordering::Relaxed);
    }

    pub(crate) fn is_deleted(&self) -> bool {
        self.status.load(Ordering::Acquire) == DELETED
    }

    /// Whether the manifest has these options.
    pub(crate) fn has_settings(&self, settings: &[u8]) -> bool {
        *lock(&self.settings) == settings
    }

    /// Notes the options that the manifest has from now on.
    pub(crate) fn note_settings(&self, settings: Vec<u8>) {
        *lock(&self.settings) = settings;
    }

    /// The options as the manifest has them.
    pub(crate) fn stored_options(&self) -> Result<PartitionCreateOptions> {
        PartitionCreateOptions::decode(&lock(&self.settings))
    }

    /// Whether `options` are of a smaller pool than what is stored: the log was written under the larger size,
    /// and is not left to be replayed under the smaller one.
    pub(crate) fn lowers_max_size(&self, options: &PartitionCreateOptions) -> Result<bool> {
        Ok(self.pool_if_built().is_some() && options.pmem().lowers_max_size(&self.stored_options()?.pmem()))
    }

    /// The lowest sequence number that only the log holds.
    pub(crate) fn first_unflushed(&self) -> Option<SeqNo> {
        match self.tree.get() {
            Some(tree) => tree.first_unflushed(),
            None => lock(&self.buffered_records).first().map(|record| record.seqno),
        }
    }

    /// The records of the log that wait for the comparator; empty once the tree is there, or they are spilled.
    pub(crate) fn pending(&self) -> Arc<Vec<PendingRecord>> {
        Arc::clone(&lock(&self.buffered_records))
    }

    /// The manifest names tables with all pending records now. The caller keeps the tree from being built meanwhile.
    pub(crate) fn note_spilled(&self, tables: Vec<TableMeta>) {
        if let Some(stored) = &mut *lock(&self.stored_partition) {
            stored.spilled.extend(tables.into_iter().map(|table| (table.number, table)));
        }
        *lock(&self.buffered_records) = Arc::default();
    }

    /// Forgets spilled tables that a pool does not need any more, here and in what the manifest is to say: the pool
    /// holds their records. Those of a tree of tables go with the edit of the flush.
    pub(crate) fn forget_applied(&self, manifest_state: &mut PartitionManifestState) {
        let Some((applied, _)) = self.pool_at_open() else { return };
        manifest_state.spilled.retain(|_, table| table.largest_seqno > applied);
        if let Some(stored) = &mut *lock(&self.stored_partition) {
            stored.spilled.clone_from(&manifest_state.spilled);
        }
    }

    /// Takes in a blob file of the manifest that only records of the log point into.
    pub(crate) fn add_blob_file(&self, file: BlobFileMeta) {
        match (self.lsm_if_built(), &mut *lock(&self.stored_partition)) {
            (Some(tree), _) => tree.add_blob_files(vec![file]),
            (None, Some(stored)) => drop(stored.blob_files.insert(file.number, file)),
            (None, None) => {}
        }
    }

    /// Records a direct blob file that cannot be finished here, because the WAL points into it.
    pub(crate) fn add_direct_blob_file(&self, file: Arc<DirectBlobFile>) {
        match self.lsm_if_built() {
            Some(tree) => tree.add_direct_blob_files([file]),
            None => lock(&self.direct_blobs).push(file),
        }
    }

    /// All of the log was taken again.
    pub(crate) fn end_replay(&self) -> Result<()> {
        let Some(pool) = self.tree.get().and_then(PartitionTree::pmem) else { return Ok(()) };
        pool.end_replay()
    }

    /// Whether what is replayed into it is durable at once.
    pub(crate) fn survives_power_loss(&self) -> bool {
        let built = self
            .tree
            .get()
            .and_then(PartitionTree::pmem)
            .map(|pool| pool.persistence_level() == PersistenceLevel::PowerLoss);
        built.unwrap_or_else(|| lock(&self.stored_pool).as_ref().is_some_and(StoredPool::survives_power_loss))
    }

    /// Copies the files of a pool whose order of keys is not known, in which nothing changes.
    pub(crate) fn copy_unbuilt_pool(&self, dir: &Path) -> Result<()> {
        lock(&self.stored_pool).as_ref().map_or(Ok(()), |pool| pool.copy_to(dir))
    }

    /// What the files of a pool held when it was opened: all through the first number, perhaps more, through the
    /// second.
    fn pool_at_open(&self) -> Option<(SeqNo, SeqNo)> {
        let stored = lock(&self.stored_pool).as_ref().map(StoredPool::seqnos_at_open);
        stored.or_else(|| self.tree.get()?.pmem().map(|pool| (pool.flushed_through(), pool.max_seqno_at_open())))
    }

    /// The highest sequence number that a pool may hold.
    pub(crate) fn highest_in_pool(&self) -> SeqNo {
        self.pool_at_open().unwrap_or_default().1
    }

    /// Whether it is a pool whose file is used as memory.
    fn is_mapped_pool(&self) -> bool {
        let built = self
            .tree
            .get()
            .and_then(PartitionTree::pmem)
            .map(|pool| pool.persistence_level() > PersistenceLevel::WalOnly);
        built.unwrap_or_else(|| lock(&self.stored_pool).as_ref().is_some_and(StoredPool::is_mapped))
    }

    /// What its permanent files say of the log, before anything is replayed: nothing through the first number is
    /// needed of it, and it was durable through the second. Numbers that pools have used without the log may stand in
    /// the images of others, if `pools_skip_log`.
    pub(crate) fn wal_needs(&self, stored: &PartitionManifestState, pools_skip_log: bool) -> (SeqNo, SeqNo) {
        let (permanent, durable) = (stored.permanent(), stored.durable_seqno());
        let Some((applied, highest)) = self.pool_at_open() else { return (permanent, durable) };
        let proven = match self.engine {
            EngineKind::Pmem if !pools_skip_log => highest,
            _ if self.is_mapped_pool() => applied,
            _ => SeqNo::ZERO,
        };
        (permanent.max(applied), durable.max(proven))
    }

    /// The highest sequence number that a pool may hold that has changes which the log does not have.
    pub(crate) fn highest_unlogged_seqno(&self) -> SeqNo {
        if self.engine == EngineKind::PmemMapped { self.highest_in_pool() } else { SeqNo::ZERO }
    }

    /// Takes a record of the log again; what the tables have already is skipped.
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
            permanent.max(self.pool_at_open().unwrap_or_default().0)
        });
        if entry.seqno <= permanent {
            return Ok(false);
        }
        Arc::make_mut(&mut *lock(&self.buffered_records)).push(PendingRecord::new(entry));
        Ok(true)
    }
}

/// All partitions. Thread safe.
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

    /// All partitions, in the order of their names.
    pub(crate) fn all(&self) -> Vec<Arc<PartitionState>> {
        read(&self.by_name).values().cloned().collect()
    }

    /// Bytes that the next checkpoints of all pools take beyond what their files have.
    pub(crate) fn pool_checkpoint_bytes(&self) -> u64 {
        let partitions = self.all();
        let pools = partitions.iter().filter_map(|partition| partition.pool_if_built());
        pools.fold(0, |bytes, pool| bytes.saturating_add(pool.checkpoint_bytes()))
    }

    pub(crate) fn remove(&self, name: &str) {
        write(&self.by_name).remove(name);
    }

    /// Ends a partition that was deleted: its files are removed, or go with the last readers that hold them. What
    /// cannot be removed is found by the next open.
    pub(crate) fn discard(&self, state: &PartitionState) {
        if let Some(tree) = state.tree.get() {
            tree.discard();
            if let Some(pool) = tree.pmem() {
                pool.remove_files();
            }
        }
        // Where there is no tree nothing but the catalog knows the files.
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

    /// Takes in a partition of the manifest; one with a user's comparator stays without its tree until that is given.
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
        let state = new_state(&meta, engine, Some(stored), pool);
        self.insert(&state);
        if bytewise {
            self.build_tree(&state, KeyOrder::bytewise(), &options, ReplayPhase::Before)?;
        }
        Ok(state)
    }

    /// Creates a new partition, which is invisible until it is [inserted](Catalog::insert).
    pub(crate) fn create_tree(
        &self,
        meta: &PartitionMeta,
        order: KeyOrder,
        options: &PartitionCreateOptions,
    ) -> Result<Arc<PartitionState>> {
        let engine = engine_of(meta)?;
        let pool = self.read_pool(meta, engine, ManifestPoolInfo::default(), options)?;
        let state = new_state(meta, engine, None, pool);
        self.build_tree(&state, order, options, ReplayPhase::After)?;
        Ok(state)
    }

    /// The files of a partition, if it is a pool.
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

    /// Takes in a partition.
    pub(crate) fn insert(&self, state: &Arc<PartitionState>) {
        write(&self.by_name).insert(Arc::clone(&state.name), Arc::clone(state));
    }

    /// Prepares an existing partition for a caller: builds its tree if the comparator comes only now.
    ///
    /// # Errors
    /// `Invalid` if the comparator is not the one the partition was created with, or if `options` do not fit it.
    pub(crate) fn open(
        &self,
        state: &Arc<PartitionState>,
        comparator: Option<Arc<dyn Comparator>>,
        options: &PartitionCreateOptions,
    ) -> Result<()> {
        let order = comparator.map_or_else(KeyOrder::bytewise, KeyOrder::custom);
        if order.name() != state.comparator {
            return Err(Error::invalid(format!(
                "partition {:?} was created with the comparator {:?} and cannot be opened with {:?}",
                state.name,
                state.comparator,
                order.name()
            )));
        }
        if (options.engine == EngineType::Lsm) != (state.engine == EngineKind::Lsm) {
            let wanted = options.engine.kind_in(false);
            return Err(Error::invalid(format!(
                "partition {:?} was created with the engine {:?} and cannot be opened with {wanted:?}",
                state.name, state.engine
            )));
        }
        options.check_order(&order)?;
        if state.tree.get().is_none() {
            // As the stored options say, which its records in the log were written under; new ones are for new data.
            self.build_tree(state, order, &state.stored_options()?, ReplayPhase::After)?;
        }
        Ok(())
    }

    /// Puts options in force for new data, without storing them.
    pub(crate) fn set_options(&self, state: &PartitionState, options: &PartitionCreateOptions) -> Result<()> {
        match state.tree()? {
            PartitionTree::Lsm(tree) => tree.set_options(options.lsm(self.resources.default_codec)),
            PartitionTree::Pmem(pool) => pool.set_options(&options.pmem())?,
        }
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
            return Ok(()); // another caller was faster
        }
        if let Some(error) = &*lock(&state.build_error) {
            return Err(error.clone());
        }
        // If the build fails half way, or panics, no empty tree takes the place.
        let again = format!("partition {:?} could not be opened before: open the database anew", state.name);
        *lock(&state.build_error) = Some(Error::new(ErrorKind::Closed, again));
        // Held until the tree is there: a reader of pending records finds either the records or the tree.
        let mut pending = lock(&state.buffered_records);
        let built = self.make_tree(state, stored.take(), &pending, order, options).and_then(|tree| {
            // Before another thread can see the tree.
            if let Some(pool) = tree.pmem().filter(|_| log == ReplayPhase::After) {
                pool.end_replay()?;
            }
            Ok(tree)
        });
        match built {
            Ok(tree) => {
                let set = state.tree.set(tree);
                debug_assert!(set.is_ok(), "the lock on `stored` lets one builder in");
                *pending = Arc::default();
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
        let (tables, blobs, flushed) = match stored {
            Some(manifest_state) => (
                manifest_state.tables.into_values().collect(),
                manifest_state.blob_files.into_values().collect(),
                manifest_state.flushed_seqno,
            ),
            None => (Vec::new(), Vec::new(), SeqNo::ZERO),
        };
        let tree = LsmTree::restore(context, options.lsm(parts.default_codec), tables, blobs, flushed)?;
        tree.add_direct_blob_files(lock(&state.direct_blobs).drain(..));
        Ok(Arc::new(tree))
    }
}

fn new_state(
    meta: &PartitionMeta,
    engine: EngineKind,
    stored: Option<PartitionManifestState>,
    pool: Option<StoredPool>,
) -> Arc<PartitionState> {
    Arc::new(PartitionState {
        id: meta.id,
        name: Arc::from(meta.name.as_str()),
        backoffs: TaskBackoffs::default(),
        comparator: meta.comparator.clone(),
        engine,
        tree: OnceLock::new(),
        status: AtomicU8::new(OPEN),
        settings: Mutex::new(meta.settings.clone()),
        buffered_records: Mutex::default(),
        permanent_at_open: OnceLock::new(),
        direct_blobs: Mutex::default(),
        stored_partition: Mutex::new(stored),
        pool_file_id: pool.as_ref().and_then(StoredPool::file_id),
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

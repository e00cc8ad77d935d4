//! A partition: its tree, and what belongs to the partition whether the tree is built or not.

use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use crate::base::blob_pointer::BlobPointer;
use crate::base::manifest_state::PartitionManifestState;
use crate::base::merge_operator::MergeOperator;
use crate::base::sync::lock;
use crate::base::version_edit::{BlobFileMeta, EngineKind, FileNumber, PartitionId, PartitionMeta, TableMeta};
use crate::base::{EntryRef, Error, ErrorKind, KeyOrder, Result, SeqNo};
use crate::db::components::PartitionComponents;
use crate::db::config::PersistMode;
use crate::db::options::{EngineType, PartitionCreateOptions};
use crate::db::partition_merge_operator::PartitionMergeOperator;
use crate::db::state::backoff::TaskBackoffs;
use crate::db::state::partition_expiry::PartitionExpiry;
use crate::engine::{BlobResolver, Engine, EngineView, KeyBounds, ReadMoment, SingleCommit};
use crate::iter::InternalIter;
use crate::lsm::direct_file::DirectBlobFile;
use crate::lsm::follow::open_direct_file;
use crate::lsm::output::PendingOutputs;
use crate::lsm::tree::LsmTree;
use crate::lsm::tree_context::{TreeContext, TreeResources};
use crate::mem::slice::Slice;
use crate::pmem::options::PmemOptions;
use crate::table::obsolete_files::ObsoleteFiles;
use crate::tree::partition_tree::{PartitionTree, TreeOptions};
use crate::tree::spilled_records::{self, PendingRecord};
use crate::tree::stored_tree::{FilesAtOpen, StoredTree};

/// Whether a tree is built before or after the WAL is replayed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplayPhase {
    /// Built before: the records of the WAL are replayed into the tree afterwards.
    Before,
    /// Built after: the replay has buffered the records of the WAL, and building the tree applies them.
    After,
    /// As `After`, in a follower, where readers of earlier moments may be registered.
    AfterWithReaders,
}

/// Neither deleted nor closed.
const OPEN: u8 = 0;
/// Deleted by [`Database::delete_partition`](crate::Database::delete_partition).
const DELETED: u8 = 1;
/// Handles of a closed database return `Closed`.
const CLOSED: u8 = 2;

/// Bytes of buffered records of a pool that is not built, below which a follower does not read its image again.
const BUFFERED_POOL_BYTES: u64 = 8 << 20;

/// State of a partition that all its handles share.
pub(crate) struct PartitionState {
    pub(crate) id: PartitionId,
    pub(crate) name: Arc<str>,
    /// Backoff of failed background tasks.
    pub(crate) backoffs: TaskBackoffs,
    comparator: String,
    pub(crate) merge_operator: PartitionMergeOperator,
    kind: EngineKind,
    /// The tree, or the error of its build; not set while the tree is not built. A failed build is not repeated.
    tree: OnceLock<Result<PartitionTree>>,
    /// One of [`OPEN`], [`DELETED`], [`CLOSED`].
    status: AtomicU8,
    pub(crate) expiry: PartitionExpiry,
    /// The encoded options, as stored in the manifest.
    settings: Mutex<Vec<u8>>,
    pub(crate) files_at_open: FilesAtOpen,
    /// What the tree is built from, and after a failed build, what it has left. Locked until `tree` is set.
    stored_tree: Mutex<Option<StoredTree>>,
    /// Records of the WAL for a partition whose comparator was not given yet, by ascending sequence number. Not
    /// larger than the WAL. Empty once the records are [spilled](PartitionState::note_written) or the tree is built: a
    /// build removes them after it has set `tree`, so a thread that finds none here finds them in the tree.
    buffered_records: Mutex<Arc<Vec<PendingRecord>>>,
}

/// A state that was replaced before the comparator was given, so that nothing can read it any more.
struct UnbuiltView {
    partition: Arc<str>,
}

impl UnbuiltView {
    fn error(&self) -> Error {
        let name = &self.partition;
        Error::invalid(format!("partition {name:?} was opened after the writer had replaced the state of the snapshot"))
    }
}

impl EngineView for UnbuiltView {
    fn iter(&self, _at: ReadMoment, _bounds: KeyBounds<'_>) -> Result<Box<dyn InternalIter>> {
        Err(self.error())
    }

    fn blob_resolver(&self) -> Box<dyn BlobResolver> {
        Box::new(UnbuiltView { partition: Arc::clone(&self.partition) })
    }
}

impl BlobResolver for UnbuiltView {
    fn resolve(&mut self, _pointer: &[u8]) -> Result<Slice> {
        Err(self.error())
    }
}

impl PartitionState {
    /// A partition whose tree is not built. `merge_operator`: the name of its merge operator in the manifest.
    pub(crate) fn new(meta: &PartitionMeta, merge_operator: Option<String>, stored_tree: StoredTree) -> PartitionState {
        let name: Arc<str> = Arc::from(meta.name.as_str());
        PartitionState {
            merge_operator: PartitionMergeOperator::new(Arc::clone(&name), merge_operator),
            id: meta.id,
            name,
            backoffs: TaskBackoffs::default(),
            comparator: meta.comparator.clone(),
            kind: stored_tree.kind(),
            tree: OnceLock::new(),
            status: AtomicU8::new(OPEN),
            expiry: PartitionExpiry::default(),
            settings: Mutex::new(meta.settings.clone()),
            files_at_open: stored_tree.files_at_open(),
            stored_tree: Mutex::new(Some(stored_tree)),
            buffered_records: Mutex::default(),
        }
    }

    /// Returns the tree.
    ///
    /// # Errors
    /// `Closed` if the partition was deleted or the database closed, `Invalid` if its comparator was not given
    /// yet. The error of the build, if the tree could not be built.
    #[inline]
    pub(crate) fn tree(&self) -> Result<&PartitionTree> {
        if !self.is_open() {
            return Err(self.closed_error());
        }
        match self.tree.get() {
            Some(Ok(tree)) => Ok(tree),
            unbuilt => Err(self.unbuilt_error(unbuilt)),
        }
    }

    /// Checks an operand before it is written.
    ///
    /// # Errors
    /// `Invalid` if there is no operator or it refuses the operand; `Closed`.
    pub(crate) fn check_operand(&self, operand: &[u8]) -> Result<()> {
        self.tree()?;
        self.merge_operator.check_operand(operand)
    }

    /// Sets the operator, whose name is in the manifest. Keeps one that was set before.
    pub(crate) fn set_merge_operator(&self, operator: &Arc<dyn MergeOperator>) {
        let operator = self.merge_operator.set(operator);
        if let Some(tree) = self.tree_if_built() {
            tree.set_merge_operator(operator);
        }
    }

    /// Takes over the name of the operator, which another process has stored in the manifest.
    pub(crate) fn note_merge_operator(&self, name: &str) {
        self.merge_operator.note_stored(name);
        if let (Some(tree), Some(operator)) = (self.tree_if_built(), self.merge_operator.if_known()) {
            tree.set_merge_operator(operator);
        }
    }

    /// In a follower: reads the image of a pool that is not built again, if the writer has flushed as many bytes of
    /// buffered records as the last image has in total, and at least [`BUFFERED_POOL_BYTES`]. So the memory for flushed
    /// records is bounded by that of the pool, and the bytes that are read by those that are written. `None` otherwise,
    /// or if the image has records after `end`.
    ///
    /// # Errors
    /// Those of the files.
    pub(crate) fn read_pool_again(
        &self,
        newer: &PartitionManifestState,
        resources: &TreeResources,
        end: SeqNo,
    ) -> Result<Option<StoredTree>> {
        let stored = lock(&self.stored_tree);
        let Some(before) = stored.as_ref().filter(|_| self.kind == EngineKind::Pmem && self.tree.get().is_none())
        else {
            return Ok(None);
        };
        let buffered = lock(&self.buffered_records);
        let unneeded = buffered.iter().take_while(|record| record.seqno <= newer.flushed_seqno);
        if unneeded.map(PendingRecord::bytes).sum::<u64>() < before.image_bytes().max(BUFFERED_POOL_BYTES) {
            return Ok(None);
        }
        drop(buffered);
        let options = self.stored_options()?.tree(resources.default_codec);
        let again = StoredTree::read_again(resources, newer, &options)?;
        Ok(Some(again).filter(|again| again.files_at_open().highest <= end))
    }

    /// In a follower: takes over the files of a tree that is not built. `again`: the pool, if it was [read
    /// again](Self::read_pool_again).
    pub(crate) fn follow_unbuilt(
        &self,
        newer: &PartitionManifestState,
        again: Option<StoredTree>,
        resources: &TreeResources,
    ) {
        if let Some(stored) = &mut *lock(&self.stored_tree) {
            // The image of a pool stays as it was read.
            let permanent = match (self.kind, &again) {
                (EngineKind::Lsm, _) => newer.permanent(),
                (_, Some(again)) => again.files_at_open().permanent.min(newer.flushed_seqno),
                (_, None) => SeqNo::ZERO,
            };
            let mut buffered = lock(&self.buffered_records);
            if permanent > SeqNo::ZERO {
                Arc::make_mut(&mut *buffered).retain(|record| record.seqno > permanent);
            }
            again.into_iter().for_each(|again| stored.replace_pool(again));
            let pointers = buffered.iter().filter_map(|record| {
                let entry = record.entry();
                BlobPointer::of_record(entry.kind, entry.value).ok().flatten()
            });
            stored.follow(newer, &pointers.map(|pointer| pointer.logical_file).collect(), &resources.files);
        }
    }

    /// In a follower: what readers of the present state read once [`follow_unbuilt`](Self::follow_unbuilt) has replaced
    /// it. `None` if nothing replaces it: the tree is built, or it is a pool that was not `read_again`, whose records
    /// are all buffered.
    pub(crate) fn unbuilt_view(&self, read_again: bool) -> Option<Arc<dyn EngineView>> {
        let is_replaced = (self.kind == EngineKind::Lsm || read_again) && self.tree.get().is_none();
        is_replaced.then(|| Arc::new(UnbuiltView { partition: Arc::clone(&self.name) }) as _)
    }

    /// In a follower: opens the tables and blob files of a state of the manifest, unless the tree is built. They stay
    /// open until the tree that is built from them, or a newer state, does not have them.
    ///
    /// # Errors
    /// Those of the files.
    pub(crate) fn open_unbuilt_files(&self, stored: &PartitionManifestState, resources: &TreeResources) -> Result<()> {
        if self.tree.get().is_some() {
            return Ok(());
        }
        stored.all_tables().try_for_each(|table| resources.files.get(table.number).map(drop))?;
        let blobs = resources.files.blob_files();
        stored.blob_files.keys().try_for_each(|file| blobs.get(*file).map(drop))
    }

    /// In a follower: makes the value of a pointer of the WAL readable, also if the tree is not built. False if there
    /// is no such value. `is_checked`: reads the value.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn follow_pointer(
        &self,
        resources: &Arc<TreeResources>,
        seqno: SeqNo,
        pointer: &BlobPointer,
        is_checked: bool,
    ) -> Result<bool> {
        let mut stored = lock(&self.stored_tree);
        match (self.tree_if_built(), &mut *stored) {
            (Some(PartitionTree::Lsm(tree)), _) if seqno > tree.flushed_through() => {
                tree.follow_pointer(pointer, is_checked)
            }
            (None, Some(stored)) if seqno > stored.permanent() => {
                let context = TreeContext::new(resources, KeyOrder::bytewise(), self.id, &self.name);
                stored.follow_pointer(&context, pointer, is_checked)
            }
            _ => Ok(true),
        }
    }

    /// In a follower: makes a direct blob file of the writer readable up to `end`. False if it is gone.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn follow_direct_file(&self, resources: &Arc<TreeResources>, id: FileNumber, end: u64) -> Result<bool> {
        let context = TreeContext::new(resources, KeyOrder::bytewise(), self.id, &self.name);
        let opened = open_direct_file(&context, id, end)?;
        let is_there = opened.is_some();
        opened.into_iter().for_each(|file| self.add_unfinished_blobs(file));
        Ok(is_there)
    }

    /// In a follower that has read the WAL up to `last`: checks that [`replace_pending`](Self::replace_pending) can be
    /// called.
    ///
    /// # Errors
    /// `Stale` if records after `last` are only in the image of a pool.
    pub(crate) fn check_pending(&self, read: &PartitionState, last: SeqNo) -> Result<()> {
        let is_built = lock(&self.stored_tree).is_none();
        if is_built || self.kind == EngineKind::Lsm || read.files_at_open.permanent <= last {
            return Ok(());
        }
        let message = format!("changes of pool {:?}, whose comparator is not known yet, were missed", self.name);
        Err(Error::stale(message))
    }

    /// In a follower that has read the WAL up to `last`: takes over the records that `read` buffers, if this tree is
    /// not built.
    pub(crate) fn replace_pending(&self, read: &PartitionState, last: SeqNo) {
        if lock(&self.stored_tree).is_none() {
            return;
        }
        let mut buffered = lock(&self.buffered_records);
        if self.kind == EngineKind::Lsm {
            *buffered = read.pending();
            return;
        }
        let newer = read.pending();
        let newer = newer.iter().filter(|record| record.seqno > last).cloned();
        let buffered = Arc::make_mut(&mut *buffered);
        buffered.retain(|record| record.seqno <= last); // a commit may have been added in part
        buffered.extend(newer);
    }

    /// Gives the tree the components that it can do without.
    pub(crate) fn set_components(&self, components: &PartitionComponents) {
        if let (Some(tree), Some(filter)) = (self.tables_if_built(), &components.compaction_filter) {
            tree.set_compaction_filter(Arc::clone(filter));
        }
    }

    /// Whether the partition is neither deleted nor closed.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.status.load(Ordering::Relaxed) == OPEN
    }

    /// Returns the tree of a partition with tables.
    ///
    /// # Errors
    /// As [`tree`](PartitionState::tree); `Invalid` if the partition has no tables.
    pub(crate) fn tables(&self) -> Result<&Arc<LsmTree>> {
        let other =
            || Error::invalid(format!("partition {:?} has no tables: its engine is {:?}", self.name, self.kind));
        self.tree()?.lsm().ok_or_else(other)
    }

    /// The tree, if it has been built. Also for a deleted or closed partition.
    #[inline]
    pub(crate) fn tree_if_built(&self) -> Option<&PartitionTree> {
        self.tree.get()?.as_ref().ok()
    }

    /// As [`tree_if_built`](Self::tree_if_built), if it has tables.
    pub(crate) fn tables_if_built(&self) -> Option<&Arc<LsmTree>> {
        self.tree_if_built().and_then(PartitionTree::lsm)
    }

    /// How a single record is committed.
    #[inline]
    pub(crate) fn single_commit(&self) -> SingleCommit {
        self.tree_if_built().map_or(SingleCommit::InGroup, PartitionTree::single_commit)
    }

    /// Whether a value of `len` bytes is staged before its commit, which is as durable as `mode`.
    #[inline]
    pub(crate) fn stages_value(&self, len: usize, mode: PersistMode) -> bool {
        self.tree_if_built().is_some_and(|tree| tree.stages_value(len, mode != PersistMode::Buffer))
    }

    /// Whether the tree is built and keeps no operands of merges.
    #[inline]
    pub(crate) fn computes_merges(&self) -> bool {
        self.tree_if_built().is_some_and(|tree| !tree.keeps_operands())
    }

    #[cold]
    pub(crate) fn closed_error(&self) -> Error {
        match self.is_deleted() {
            true => Error::new(ErrorKind::Closed, format!("partition {:?} was deleted", self.name)),
            false => Error::new(ErrorKind::Closed, "the database is closed"),
        }
    }

    #[cold]
    fn unbuilt_error(&self, tree: Option<&Result<PartitionTree>>) -> Error {
        match tree {
            Some(Err(error)) => error.clone(),
            _ => Error::invalid(format!(
                "partition {:?} was created with the comparator {:?}: open it with open_partition_with_comparator",
                self.name, self.comparator
            )),
        }
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

    /// The options that the manifest stores. Their engine is that of the partition, also if they are out of range or
    /// do not contain it.
    pub(crate) fn stored_options(&self) -> Result<PartitionCreateOptions> {
        let stored = PartitionCreateOptions::decode(&lock(&self.settings))?;
        Ok(match (stored.engine.is_kind(self.kind), self.kind) {
            (true, _) => stored,
            (false, EngineKind::Lsm) => stored.engine(EngineType::Lsm),
            (false, _) => PartitionCreateOptions { kv_separation: None, ..stored }
                .engine(EngineType::Pmem(PmemOptions::default())),
        })
    }

    /// Checks that the partition was created with the order of keys `order`.
    pub(crate) fn check_comparator(&self, order: &KeyOrder) -> Result<()> {
        if order.name() == self.comparator {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "partition {:?} was created with the comparator {:?} and cannot be opened with {:?}",
            self.name,
            self.comparator,
            order.name()
        )))
    }

    /// Checks that `options` are for the engine of the partition.
    pub(crate) fn check_engine(&self, options: &PartitionCreateOptions) -> Result<()> {
        if options.engine.is_kind(self.kind) {
            return Ok(());
        }
        let wanted = options.engine.kind_in(false);
        Err(Error::invalid(format!(
            "partition {:?} was created with the engine {:?} and cannot have {wanted:?}",
            self.name, self.kind
        )))
    }

    /// The lowest sequence number of the partition whose record is only in the WAL. Does not wait for a tree that is
    /// being built.
    pub(crate) fn first_unflushed(&self) -> Option<SeqNo> {
        // The buffer is read first, because a build sets the tree before it empties the buffer.
        let buffered = lock(&self.buffered_records).first().map(|record| record.seqno);
        buffered.or_else(|| self.tree_if_built()?.first_unflushed())
    }

    /// The records of the WAL that wait for the comparator. Empty once the tree is built or the records are spilled.
    pub(crate) fn pending(&self) -> Arc<Vec<PendingRecord>> {
        Arc::clone(&lock(&self.buffered_records))
    }

    /// Writes the `pending` records to tables. They become obsolete when the result is dropped without a release.
    ///
    /// # Errors
    /// `Io` and `OutOfSpace`.
    pub(crate) fn write_pending(
        &self,
        pending: &[PendingRecord],
        resources: &Arc<TreeResources>,
    ) -> Result<PendingOutputs> {
        let context = TreeContext::new(resources, KeyOrder::bytewise(), self.id, &self.name);
        spilled_records::write(context, resources.default_codec, pending, resources.env.now_ms())
    }

    /// Records that the manifest names tables with all buffered records. The caller prevents the tree from being
    /// built meanwhile.
    pub(crate) fn note_written(&self, tables: Vec<TableMeta>) {
        if let Some(stored) = &mut *lock(&self.stored_tree) {
            stored.manifest().spilled.extend(tables.into_iter().map(|table| (table.number, table)));
        }
        *lock(&self.buffered_records) = Arc::default();
    }

    /// Removes spilled tables whose records are all in the tree, both from this partition and from `manifest_state`,
    /// from which the manifest is rewritten.
    pub(crate) fn forget_applied(&self, manifest_state: &mut PartitionManifestState) {
        self.files_at_open.forget_applied(manifest_state);
        if let Some(stored) = &mut *lock(&self.stored_tree) {
            self.files_at_open.forget_applied(stored.manifest());
        }
    }

    /// Adds a blob file that recovery made of an unfinished one. Only records of the WAL point into it.
    pub(crate) fn add_blob_file(&self, file: BlobFileMeta) {
        // Locked first, so that no tree is being built.
        let mut stored = lock(&self.stored_tree);
        match (self.tree_if_built(), &mut *stored) {
            (Some(tree), _) => tree.add_blob_file(file),
            (None, Some(stored)) => drop(stored.manifest().blob_files.insert(file.number, file)),
            (None, None) => {}
        }
    }

    /// Adds an unfinished blob file that the WAL points into, and that a read-only open cannot finish.
    pub(crate) fn add_unfinished_blobs(&self, file: Arc<DirectBlobFile>) {
        let mut stored = lock(&self.stored_tree);
        match (self.tree_if_built(), &mut *stored) {
            (Some(tree), _) => tree.add_unfinished_blobs(file),
            (None, Some(stored)) => stored.add_unfinished_blobs(file),
            (None, None) => {}
        }
    }

    /// Ends the replay: all records of the WAL have been applied.
    pub(crate) fn end_replay(&self) -> Result<()> {
        self.tree_if_built().map_or(Ok(()), |tree| tree.end_replay())
    }

    /// Copies the files of a tree that is not built, except tables and blob files. Nothing changes these files
    /// meanwhile.
    ///
    /// # Errors
    /// Those of the files; the error of the build if it has failed and has taken the files.
    pub(crate) fn copy_unbuilt(&self, dir: &Path) -> Result<()> {
        let stored = lock(&self.stored_tree);
        let is_copied = stored.as_ref().map_or(Ok(false), |stored| stored.copy_to(dir))?;
        match self.tree.get() {
            Some(Err(error)) if !is_copied => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Requirements on the WAL that follow from the permanent files, before anything is replayed. Records up to the
    /// first sequence number are not needed from the WAL. The WAL was durable up to the second. For `has_unlogged` see
    /// [`FilesAtOpen::wal_needs`].
    pub(crate) fn wal_needs(&self, stored: &PartitionManifestState, has_unlogged: bool) -> (SeqNo, SeqNo) {
        let (applied, proven) = self.files_at_open.wal_needs(self.kind, has_unlogged);
        (stored.permanent().max(applied), stored.durable_seqno().max(proven))
    }

    /// Whether changes of the tree may be missing in the WAL.
    pub(crate) fn may_skip_wal(&self) -> bool {
        self.kind.may_skip_wal()
    }

    /// The highest sequence number in a tree whose changes may be missing in the WAL; zero for other partitions.
    pub(crate) fn highest_unlogged_seqno(&self) -> SeqNo {
        if self.kind.may_skip_wal() { self.files_at_open.highest } else { SeqNo::ZERO }
    }

    /// Applies a record of the WAL, or buffers it if the tree is not built. Returns false if permanent files contain
    /// the record already.
    pub(crate) fn replay(&self, entry: EntryRef<'_>) -> Result<bool> {
        if let Some(tree) = self.tree_if_built() {
            if entry.seqno <= tree.flushed_through() {
                return Ok(false);
            }
            tree.replay(entry)?;
            return Ok(true);
        }
        if entry.seqno <= self.files_at_open.permanent {
            return Ok(false);
        }
        Arc::make_mut(&mut *lock(&self.buffered_records)).push(PendingRecord::new(entry));
        Ok(true)
    }

    /// Builds the tree, unless it is built.
    ///
    /// # Errors
    /// Those of [`StoredTree::build`]. After an error or a panic the tree is never built.
    pub(crate) fn build_tree(
        &self,
        resources: &Arc<TreeResources>,
        order: KeyOrder,
        options: &TreeOptions,
        phase: ReplayPhase,
    ) -> Result<()> {
        let mut stored = lock(&self.stored_tree);
        if let Some(built) = self.tree.get() {
            return built.as_ref().map(drop).map_err(Error::clone); // another caller has built it
        }
        let Some(mut stored_tree) = stored.take() else {
            let message = format!("partition {:?} could not be opened before: open the database anew", self.name);
            return Err(Error::new(ErrorKind::Closed, message));
        };
        // Not locked, because a comparator may take long, and a thread that retires WAL segments reads the buffer.
        let pending = self.pending();
        let has_readers = phase == ReplayPhase::AfterWithReaders;
        let built = stored_tree.build(resources, order, options, &pending, has_readers).and_then(|tree| {
            // Before the tree is set, because other threads can use the tree afterwards.
            if let Some(operator) = self.merge_operator.if_known() {
                tree.set_merge_operator(operator);
            }
            if phase == ReplayPhase::After {
                tree.end_replay()?;
            }
            Ok(tree)
        });
        let result = built.as_ref().map(drop).map_err(Error::clone);
        let set = self.tree.set(built);
        debug_assert!(set.is_ok(), "the lock on `stored_tree` lets one builder in");
        match result {
            Ok(()) => *lock(&self.buffered_records) = Arc::default(),
            Err(_) => *stored = Some(stored_tree),
        }
        result
    }

    /// Discards a deleted partition. Its files are removed now, or when the last reader releases them.
    /// The next open removes those of a tree that could not be built.
    pub(crate) fn discard(&self, obsolete_files: &ObsoleteFiles) {
        debug_assert!(self.is_deleted(), "only a deleted partition is discarded");
        if let Some(tree) = self.tree_if_built() {
            tree.discard();
        }
        // The files of a tree that is not built.
        if let Some(stored) = lock(&self.stored_tree).take() {
            stored.remove(obsolete_files);
        }
        *lock(&self.buffered_records) = Arc::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::components::PartitionComponents;
    use crate::db::config::Config;
    use crate::db::partition::Partition;
    use crate::testing::{MemFs, TestOrder};

    /// Regression: a follower buffered every record of a pool whose comparator it was not given, also those that the
    /// writer had flushed.
    #[test]
    fn buffer_of_an_unbuilt_pool_is_bounded() {
        let machine = MemFs::new();
        let config = || Config::new("/db").fs(Arc::new(machine.clone())).workers(0);
        let writer = config().open().unwrap();
        let pool = EngineType::Pmem(PmemOptions::default().max_size(64 << 20));
        let options = || PartitionCreateOptions::default().engine(pool.clone());
        let components = || PartitionComponents::default().comparator(TestOrder::Reversed.comparator().unwrap());
        let p = writer.open_partition_with("p", options(), components()).unwrap();
        let follower = config().open_follower().unwrap();
        let state = follower.handle.inner.partition("p").unwrap();
        let (oldest, mut largest) = (follower.snapshot(), 0);
        for round in 0..60u8 {
            p.insert([round % 4], vec![round; 512 << 10]).unwrap();
            p.remove([round % 3 + 10]).unwrap();
            p.insert([round % 5 + 10], "small").unwrap();
            p.flush().unwrap();
            follower.catch_up().unwrap();
            largest = largest.max(state.pending().iter().map(PendingRecord::bytes).sum());
        }
        assert!(largest > BUFFERED_POOL_BYTES / 2 && largest < BUFFERED_POOL_BYTES * 3 / 2, "{largest} bytes");
        p.insert([3], "not flushed").unwrap();
        let before = follower.snapshot();
        follower.catch_up().unwrap();
        let followed = follower.open_partition_with("p", options(), components()).unwrap();
        let pairs = |part: &Partition| part.iter().collect::<Result<Vec<_>>>().unwrap();
        assert_eq!(pairs(&followed), pairs(&p));
        assert_eq!(oldest.get(&followed, [3]).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(before.get(&followed, [3]).unwrap().unwrap(), vec![59; 512 << 10]);
        assert_eq!(before.len(&followed).unwrap(), p.len().unwrap());
    }
}

//! The manifest state in memory and the manifest file, which change together.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::manifest_state::ManifestState;
use crate::base::sync::{WakeSignal, lock};
use crate::base::version_edit::{
    FileNumber, PartitionEdit, PartitionId, PartitionMeta, TableMeta, VersionEdit, WalEpoch,
};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::db::state::disk_reserve::DiskReserve;
use crate::lsm::direct_file::UnsyncedBlobFiles;
use crate::manifest::Manifest;
use crate::vfs::Env;
use crate::wal::WalCallbacks;

/// The manifest is rewritten when it has at least this many times the bytes that it had after the last rewrite, and at
/// least [`REWRITE_MIN_BYTES`].
const REWRITE_GROWTH: u64 = 4;
/// Minimum size in bytes of a manifest that is rewritten.
const REWRITE_MIN_BYTES: u64 = 1 << 20;

/// The durable metadata of a database. Thread safe. Version edits are applied in the order in which they are in the
/// manifest.
pub(crate) struct VersionSet {
    manifest: Manifest,
    state: Mutex<ManifestState>,
    next_file_id: Arc<AtomicU64>,
    next_partition_id: AtomicU64,
    next_epoch: AtomicU32,
    size_at_last_rewrite: AtomicU64,
    env: Arc<dyn Env>,
    reserve: Arc<DiskReserve>,
    unsynced_blobs: Arc<UnsyncedBlobFiles>,
    /// Notified when the write-ahead log (WAL) starts a segment, because the WAL may now exceed its maximum size.
    work_available: Arc<WakeSignal>,
}

impl VersionSet {
    /// Creates the version set of a manifest that contains exactly `manifest_state`. The trees share `next_file_id`,
    /// and add their unsynced direct blob files to `unsynced_blobs`.
    pub(crate) fn new(
        manifest: Manifest,
        manifest_state: ManifestState,
        next_file_id: Arc<AtomicU64>,
        env: Arc<dyn Env>,
        reserve: Arc<DiskReserve>,
        unsynced_blobs: Arc<UnsyncedBlobFiles>,
        work_available: Arc<WakeSignal>,
    ) -> VersionSet {
        debug_assert!(
            next_file_id.load(Ordering::Relaxed) >= manifest_state.next_file_number,
            "no file gets a number that the manifest has"
        );
        VersionSet {
            reserve,
            unsynced_blobs,
            work_available,
            size_at_last_rewrite: AtomicU64::new(manifest.size()),
            next_file_id,
            next_partition_id: AtomicU64::new(manifest_state.next_partition_id),
            next_epoch: AtomicU32::new(manifest_state.next_wal_epoch),
            manifest,
            state: Mutex::new(manifest_state),
            env,
        }
    }

    /// Writes the edits of a new partition with a new partition id, as [`log_and_apply`](VersionSet::log_and_apply)
    /// does.
    ///
    /// First calls `prepare` with the id. `prepare` runs every step that can fail, and returns the file id of the pool
    /// if its files exist. It may sync files, because no lock is held. The id counts as used only once the edits are
    /// written or the creation fails. Otherwise a manifest that is rewritten during `prepare` would record the id as
    /// used, and replay would treat the partition as deleted. So a caller creates one partition at a time.
    pub(crate) fn create_partition<T>(
        &self,
        mut meta: PartitionMeta,
        merge_operator: Option<&str>,
        prepare: impl FnOnce(&PartitionMeta) -> Result<(T, Option<[u8; 16]>)>,
    ) -> Result<T> {
        let partition = PartitionId(self.next_partition_id.load(Ordering::Relaxed));
        meta.id = partition;
        let prepared = prepare(&meta);
        let mut manifest_state = lock(&self.state);
        debug_assert_eq!(self.next_partition_id(), partition, "one partition at a time is created");
        self.next_partition_id.store(partition.0 + 1, Ordering::Relaxed);
        let (prepared, file_id) = prepared?;
        let mut edits = vec![VersionEdit::PartitionCreated(meta)];
        edits.extend(file_id.map(|file_id| PartitionEdit::PoolFileId { file_id }.of(partition)));
        edits.extend(merge_operator.map(|name| PartitionEdit::MergeOperator { name: name.to_owned() }.of(partition)));
        // One batch: if the manifest contained only the first edit, the partition would exist again after its deletion.
        self.append_and_apply(&mut manifest_state, &edits)?;
        Ok(prepared)
    }

    /// Returns the id that the next partition will have, unless an edit records that it is used up. The caller prevents
    /// the creation of partitions meanwhile.
    pub(crate) fn next_partition_id(&self) -> PartitionId {
        PartitionId(self.next_partition_id.load(Ordering::Relaxed))
    }

    /// Writes a batch of edits to the operating system and applies it. The next sync of the manifest or of the WAL
    /// makes it durable.
    ///
    /// # Errors
    /// `Closed` if the partition of an edit was dropped meanwhile, and those of the manifest. After any error but
    /// `Poisoned` nothing is written or applied, so the call may be repeated.
    pub(crate) fn log_and_apply(&self, edits: &[VersionEdit]) -> Result<()> {
        self.log_and_apply_locked(&mut lock(&self.state), edits)
    }

    fn log_and_apply_locked(&self, manifest_state: &mut ManifestState, edits: &[VersionEdit]) -> Result<()> {
        for edit in edits {
            if let VersionEdit::Partition { id, .. } = edit
                && !manifest_state.partitions.contains_key(id)
            {
                return Err(Error::new(ErrorKind::Closed, format!("partition {} was deleted", id.0)));
            }
        }
        self.append_and_apply(manifest_state, edits)
    }

    fn append_and_apply(&self, manifest_state: &mut ManifestState, edits: &[VersionEdit]) -> Result<()> {
        manifest_state.check_all(edits)?;
        if cfg!(debug_assertions) {
            self.check_edits(manifest_state, edits);
        }
        self.manifest.append(edits)?;
        // The manifest has edits that the state refuses, so the two differ from now on.
        let applied = edits.iter().try_for_each(|edit| manifest_state.apply(edit));
        debug_assert!(applied.is_ok(), "edits that were checked can be applied");
        if cfg!(debug_assertions) {
            manifest_state.check_invariants(edits.iter().filter_map(|edit| match edit {
                VersionEdit::Partition { id, .. } => Some(*id),
                _ => None,
            }));
        }
        self.next_partition_id.fetch_max(manifest_state.next_partition_id, Ordering::Relaxed);
        applied.map_err(|error| error.with_kind(ErrorKind::Poisoned))
    }

    /// Panics if edits that are written next name numbers that were not assigned, or WAL segments that are not listed.
    fn check_edits(&self, manifest_state: &ManifestState, edits: &[VersionEdit]) {
        let is_assigned = |file: FileNumber| file.0 < self.next_file_id.load(Ordering::Relaxed);
        for edit in edits {
            match edit {
                VersionEdit::Partition { edit, .. } => {
                    assert!(edit.added_file().is_none_or(is_assigned), "a table or blob file has an assigned number");
                    if let PartitionEdit::TableAdded { table, .. } | PartitionEdit::TableSpilled { table } = edit {
                        assert!(table.smallest_seqno <= table.largest_seqno, "a table has a range of sequence numbers");
                    }
                }
                VersionEdit::WalSegmentAdded { epoch, file } => {
                    assert!(is_assigned(*file), "a WAL segment has an assigned file number");
                    assert!(epoch.0 < self.next_epoch.load(Ordering::Relaxed), "a WAL segment has an assigned epoch");
                    let last = manifest_state.wal_segments.last_key_value();
                    assert!(last.is_none_or(|(last, _)| last < epoch), "WAL segments are added in the order of epochs");
                }
                VersionEdit::WalSegmentRemoved { epoch } => {
                    assert!(manifest_state.wal_segments.contains_key(epoch), "a removed WAL segment is listed");
                }
                VersionEdit::AllFlushed { through } => {
                    assert!(*through > manifest_state.all_flushed, "flushed sequence numbers rise");
                }
                _ => {}
            }
        }
    }

    /// Writes a batch of edits and syncs the manifest.
    ///
    /// # Errors
    /// As [`log_and_apply`](VersionSet::log_and_apply): a sync of edits that were applied succeeds or poisons.
    pub(crate) fn log_and_apply_durably(&self, edits: &[VersionEdit]) -> Result<()> {
        self.log_and_apply(edits)?;
        self.manifest.sync()
    }

    /// Makes all written edits durable.
    pub(crate) fn sync(&self) -> Result<()> {
        self.manifest.sync()
    }

    /// Returns the edit that records that all partitions have flushed through `through`, or `None` if the manifest
    /// state implies it already, for example by the flush edits of all partitions.
    pub(crate) fn all_flushed(&self, through: SeqNo) -> Option<VersionEdit> {
        (through > lock(&self.state).flushed_by_all()).then_some(VersionEdit::AllFlushed { through })
    }

    /// Returns the spilled tables that `edits` make obsolete: those whose records a flush has written to other files,
    /// and those of a dropped partition.
    pub(crate) fn spilled_tables_dropped_by(&self, edits: &[VersionEdit]) -> Vec<FileNumber> {
        let manifest_state = lock(&self.state);
        let mut obsolete = Vec::new();
        for edit in edits {
            let VersionEdit::Partition { id, edit } = edit else { continue };
            let through = match edit {
                PartitionEdit::Flushed { through } => *through,
                PartitionEdit::Dropped => SeqNo::MAX,
                _ => continue,
            };
            let Some(partition) = manifest_state.partitions.get(id) else { continue };
            let is_flushed = |table: &&TableMeta| table.largest_seqno <= through;
            obsolete.extend(partition.spilled.values().filter(is_flushed).map(|table| table.number));
        }
        obsolete
    }

    /// Returns a copy of the current manifest state. Its next numbers are above all assigned numbers.
    pub(crate) fn manifest_state(&self) -> ManifestState {
        let mut copy = lock(&self.state).clone();
        self.raise_next_ids(&mut copy);
        copy
    }

    /// Raises the next numbers above all assigned numbers, because a number may be in use (by a table that is being
    /// written) before an edit contains it.
    fn raise_next_ids(&self, manifest_state: &mut ManifestState) {
        manifest_state.next_file_number =
            self.next_file_id.load(Ordering::Relaxed).max(manifest_state.next_file_number);
        manifest_state.next_partition_id =
            self.next_partition_id.load(Ordering::Relaxed).max(manifest_state.next_partition_id);
        manifest_state.next_wal_epoch = self.next_epoch.load(Ordering::Relaxed).max(manifest_state.next_wal_epoch);
    }

    /// Rewrites the manifest if it has grown past the limit; returns whether it was rewritten.
    pub(crate) fn rewrite_if_grown(&self) -> Result<bool> {
        let limit = (self.size_at_last_rewrite.load(Ordering::Relaxed) * REWRITE_GROWTH).max(REWRITE_MIN_BYTES);
        if self.manifest.size() < limit {
            return Ok(false);
        }
        self.rewrite(&mut lock(&self.state)).map(|()| true)
    }

    fn rewrite(&self, manifest_state: &mut ManifestState) -> Result<()> {
        let mut file_id = [0; 16];
        self.env.random(&mut file_id);
        self.raise_next_ids(manifest_state);
        let edits = manifest_state.edits();
        debug_assert!(
            ManifestState::replay(&edits).is_ok_and(|replayed| replayed == *manifest_state),
            "the edits of a rewritten manifest build the same state"
        );
        self.manifest.rewrite(file_id, &edits)?;
        self.size_at_last_rewrite.store(self.manifest.size(), Ordering::Relaxed);
        Ok(())
    }

    /// Reads the manifest state, under its lock.
    pub(crate) fn with_state<T>(&self, read: impl FnOnce(&ManifestState) -> T) -> T {
        read(&lock(&self.state))
    }

    /// Returns the size of the manifest in bytes.
    pub(crate) fn manifest_bytes(&self) -> u64 {
        self.manifest.size()
    }
}

impl WalCallbacks for VersionSet {
    fn allocate_segment(&self) -> Result<(WalEpoch, FileNumber)> {
        // `next_epoch` stays below `u32::MAX`, so that every call after the last epoch fails too.
        let next = |epoch: u32| epoch.checked_add(1).filter(|next| *next < u32::MAX);
        let epoch = self.next_epoch.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        let used_up = |_| Error::new(ErrorKind::Unsupported, "the database has used up its WAL epochs");
        let epoch = epoch.map_err(used_up)?;
        Ok((WalEpoch(epoch), FileNumber(self.next_file_id.fetch_add(1, Ordering::Relaxed))))
    }

    fn add_segment_to_manifest(&self, epoch: WalEpoch, file: FileNumber) -> Result<()> {
        self.log_and_apply(&[VersionEdit::WalSegmentAdded { epoch, file }])?;
        self.work_available.notify_all();
        Ok(())
    }

    fn end_wal_in_manifest(&self, epoch: WalEpoch, seqno: SeqNo) -> Result<()> {
        let mut manifest_state = lock(&self.state);
        if manifest_state.wal_end.is_some_and(|(ended, _)| ended >= epoch) {
            return Ok(());
        }
        let mut ended = manifest_state.clone();
        ended.set_wal_end(epoch, seqno);
        let written = match self.rewrite(&mut ended) {
            Err(error)
                if error.kind() == ErrorKind::OutOfSpace && self.reserve.release_for_manifest(self.manifest.size()) =>
            {
                self.rewrite(&mut ended)
            }
            written => written,
        };
        // After an error a later call repeats it, also if the new manifest is in use.
        written?;
        *manifest_state = ended;
        Ok(())
    }

    fn sync_dependencies(&self) -> Result<()> {
        self.sync()?;
        self.unsynced_blobs.sync_all()
    }

    fn request_populate(&self) {
        self.work_available.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::testing::{MemFs, TestEnv};
    use crate::vfs::Fs;

    fn version_set_of(fs: &MemFs, next_partition_id: u64, edits: &[VersionEdit]) -> VersionSet {
        let fs: Arc<dyn Fs> = Arc::new(fs.clone());
        let mut manifest_state = ManifestState { next_partition_id, ..ManifestState::default() };
        edits.iter().for_each(|edit| manifest_state.apply(edit).unwrap());
        let manifest = Manifest::create(Arc::clone(&fs), Path::new("/"), [1; 16], edits).unwrap();
        let reserve = Arc::new(DiskReserve::open_existing(fs, Path::new("/"), 0, 0, 0, 0).unwrap());
        let (env, unsynced, work) = (Arc::new(TestEnv::new(1)), Arc::default(), Arc::default());
        VersionSet::new(manifest, manifest_state, Arc::default(), env, reserve, unsynced, work)
    }

    /// A thread that comes late must not replace the end of a later segment.
    #[test]
    fn an_end_of_the_wal_is_recorded_once() {
        let fs = MemFs::new();
        let version_set = version_set_of(&fs, 1, &[]);
        let identity = || Manifest::identity(&fs, Path::new("/")).unwrap();
        let (first, later) = ((WalEpoch(5), SeqNo(10)), (WalEpoch(6), SeqNo(20)));
        version_set.end_wal_in_manifest(first.0, first.1).unwrap();
        version_set.end_wal_in_manifest(later.0, later.1).unwrap();
        let before = identity();
        for (epoch, seqno) in [first, later] {
            version_set.end_wal_in_manifest(epoch, seqno).unwrap();
        }
        assert_eq!(identity(), before);
        let stored = Manifest::load(Arc::new(fs.clone()), Path::new("/")).unwrap();
        let ends = ManifestState::replay(&stored.edits).unwrap().wal_ends().collect::<Vec<_>>();
        assert_eq!(ends, [first, later].map(|(epoch, seqno)| (epoch, Some(seqno))));
    }

    /// Regression: creating a pool syncs the directory. The manifest state was locked during that sync, and a writer
    /// that started a WAL segment waited for it.
    #[test]
    fn segment_starts_while_pool_is_created() {
        let version_set = version_set_of(&MemFs::new(), 1, &[]);
        let meta = PartitionMeta {
            id: PartitionId(0),
            engine: 0,
            name: "p".to_owned(),
            comparator: "c".to_owned(),
            settings: Vec::new(),
        };
        let prepare = |meta: &PartitionMeta| {
            let (epoch, file) = version_set.allocate_segment()?;
            version_set.add_segment_to_manifest(epoch, file)?;
            assert_eq!(
                version_set.manifest_state().next_partition_id,
                meta.id.0,
                "a rewritten manifest would record the id as used"
            );
            Ok((meta.id, None))
        };
        assert_eq!(version_set.create_partition(meta.clone(), None, prepare).unwrap(), PartitionId(1));
        let failed = version_set.create_partition(meta.clone(), None, |_| Err::<((), _), _>(Error::invalid("")));
        assert!(failed.is_err());
        let third = version_set.create_partition(meta, None, |meta| Ok((meta.id, None))).unwrap();
        assert_eq!(third, PartitionId(3), "files of the failed creation may have the id 2");
        let manifest_state = version_set.manifest_state();
        assert_eq!(
            (manifest_state.partitions.len(), manifest_state.wal_segments.len(), manifest_state.next_partition_id),
            (2, 1, 4)
        );
    }

    /// Regression: each edit of a batch was checked against the state before the batch. Two edits that contradict each
    /// other were written, and the next open refused the manifest.
    #[test]
    fn contradicting_edits_of_a_batch_are_refused() {
        let id = PartitionId(1);
        let meta =
            PartitionMeta { id, engine: 0, name: "p".to_owned(), comparator: "c".to_owned(), settings: Vec::new() };
        let name = |name: &str| PartitionEdit::MergeOperator { name: name.to_owned() }.of(id);
        let dropped = PartitionEdit::Dropped.of(id);
        let batches = [
            vec![name("a"), name("b")],
            vec![dropped.clone(), name("a")],
            vec![dropped.clone(), dropped],
            vec![name("a"), PartitionEdit::TableRemoved { table: FileNumber(1) }.of(id)],
        ];
        let version_set = version_set_of(&MemFs::new(), 9, &[VersionEdit::PartitionCreated(meta)]);
        let (bytes, state) = (version_set.manifest_bytes(), version_set.manifest_state());
        for batch in batches {
            assert_eq!(version_set.log_and_apply(&batch).unwrap_err().kind(), ErrorKind::Corruption, "{batch:?}");
            assert_eq!((version_set.manifest_bytes(), version_set.manifest_state()), (bytes, state.clone()));
        }
        version_set.log_and_apply(&[name("a")]).unwrap();
    }

    /// Regression: an ingest allocated its partition id before its edits. A manifest that was rewritten in between
    /// recorded the id as used. If it then lost the edits, recovery did not detect the loss.
    #[test]
    fn rewritten_manifest_has_no_unwritten_id() {
        let version_set = version_set_of(&MemFs::new(), 9, &[]);
        let marker = version_set.next_partition_id();
        let grow = VersionEdit::DatabaseSettings { settings: vec![7; 600_000] };
        version_set.log_and_apply(&[grow.clone(), grow]).unwrap();
        assert!(version_set.rewrite_if_grown().unwrap());
        assert_eq!(version_set.manifest_state().next_partition_id, marker.0);
        let (file, partition, epoch) = (FileNumber(0), PartitionId(marker.0 + 1), WalEpoch(0));
        version_set.log_and_apply(&[VersionEdit::NextNumbers { file, partition, epoch }]).unwrap();
        assert_eq!(version_set.next_partition_id(), partition);
    }
}

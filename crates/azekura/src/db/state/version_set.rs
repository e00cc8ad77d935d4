//! The ledger and the manifest that keeps it, as one.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::manifest_state::ManifestState;
use crate::base::sync::{WakeSignal, lock};
use crate::base::version_edit::{FileNumber, PartitionId, PartitionMeta, TableMeta, VersionEdit, WalEpoch};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::lsm::blob::direct_file::UnsyncedBlobFiles;
use crate::manifest::Manifest;
use crate::vfs::Env;
use crate::wal::WalCallbacks;

/// The manifest is written anew when it has grown to this many times what it was when last written, and beyond
/// [`REWRITE_MIN_BYTES`].
const REWRITE_GROWTH: u64 = 4;
const REWRITE_MIN_BYTES: u64 = 1 << 20;

/// All metadata that survives. Thread safe; edits take effect in the order in which the manifest has them.
pub(crate) struct VersionSet {
    manifest: Manifest,
    state: Mutex<ManifestState>,
    next_file_id: Arc<AtomicU64>,
    next_partition_id: AtomicU64,
    next_epoch: AtomicU32,
    size_at_last_rewrite: AtomicU64,
    env: Arc<dyn Env>,
    unsynced_blobs: Arc<UnsyncedBlobFiles>,
    /// Rung when the log begins a segment: it may be larger than it should be.
    work_available: Arc<WakeSignal>,
}

impl VersionSet {
    /// Starts from a manifest that holds exactly `ledger`; the trees take fresh file numbers from `next_file_id` too,
    /// and leave early files among the `unsynced`.
    pub(crate) fn new(
        manifest: Manifest,
        manifest_state: ManifestState,
        next_file: Arc<AtomicU64>,
        env: Arc<dyn Env>,
        unsynced: Arc<UnsyncedBlobFiles>,
        work: Arc<WakeSignal>,
    ) -> VersionSet {
        VersionSet {
            unsynced_blobs: unsynced,
            work_available: work,
            size_at_last_rewrite: AtomicU64::new(manifest.size()),
            next_file_id: next_file,
            next_partition_id: AtomicU64::new(manifest_state.next_partition_id),
            next_epoch: AtomicU32::new(manifest_state.next_wal_epoch),
            manifest,
            state: Mutex::new(manifest_state),
            env,
        }
    }

    /// Notes a new partition, like [`append`](VersionSet::log_and_apply), under a number of its own. Before that,
    /// `prepare` does all that can fail, and says which file id the pool has, if its files are there. It may sync: no
    /// lock is held. The number counts as used only with the edit, or if that fails: a manifest written anew in between
    /// would say that it was used, and replay would take the partition for a deleted one.
    ///
    /// The caller creates one partition at a time.
    pub(crate) fn create_partition<T>(
        &self,
        mut meta: PartitionMeta,
        prepare: impl FnOnce(&PartitionMeta) -> Result<(T, Option<[u8; 16]>)>,
    ) -> Result<T> {
        let partition = PartitionId(self.next_partition_id.load(Ordering::Relaxed));
        meta.id = partition;
        let prepared = prepare(&meta);
        let mut manifest_state = lock(&self.state);
        self.next_partition_id.store(partition.0 + 1, Ordering::Relaxed);
        let (prepared, file_id) = prepared?;
        let mut edits = vec![VersionEdit::PartitionCreated(meta)];
        edits.extend(file_id.map(|file_id| VersionEdit::PoolFileId { partition, file_id }));
        // One batch: a partition of which the manifest has only the first edit would come back after its deletion.
        let mut after = manifest_state.clone();
        for edit in &edits {
            after.check(edit)?;
            after.apply(edit)?;
        }
        self.manifest.append(&edits)?;
        *manifest_state = after;
        Ok(prepared)
    }

    /// Writes a batch of edits to the operating system; a later sync of the manifest or of the log makes it durable.
    ///
    /// # Errors
    /// `Closed` if an edit speaks of a partition that was dropped meanwhile; then nothing is written.
    pub(crate) fn log_and_apply(&self, edits: &[VersionEdit]) -> Result<()> {
        self.log_and_apply_locked(&mut lock(&self.state), edits)
    }

    fn log_and_apply_locked(&self, manifest_state: &mut ManifestState, edits: &[VersionEdit]) -> Result<()> {
        for edit in edits {
            if let Some(partition) = partition_of(edit)
                && !manifest_state.partitions.contains_key(&partition)
            {
                return Err(Error::new(ErrorKind::Closed, format!("partition {} was deleted", partition.0)));
            }
            manifest_state.check(edit)?;
        }
        self.manifest.append(edits)?;
        edits.iter().try_for_each(|edit| manifest_state.apply(edit))
    }

    /// Writes a batch of edits durably.
    pub(crate) fn log_and_apply_durably(&self, edits: &[VersionEdit]) -> Result<()> {
        self.log_and_apply(edits)?;
        self.manifest.sync()
    }

    /// Makes every edit so far durable.
    pub(crate) fn sync(&self) -> Result<()> {
        self.manifest.sync()
    }

    /// The edit that says that all partitions have flushed through `through`, if the manifest does not say so yet:
    /// where every partition flushes, their own edits say it.
    pub(crate) fn all_flushed(&self, through: SeqNo) -> Option<VersionEdit> {
        (through > lock(&self.state).flushed_by_all()).then_some(VersionEdit::AllFlushed { through })
    }

    /// The spilled tables that the edits make obsolete, because a flush covers all of their records.
    pub(crate) fn spilled_tables_flushed_by(&self, edits: &[VersionEdit]) -> Vec<FileNumber> {
        let manifest_state = lock(&self.state);
        let mut obsolete = Vec::new();
        for edit in edits {
            if let VersionEdit::Flushed { partition, through } = edit
                && let Some(known) = manifest_state.partitions.get(partition)
            {
                let is_flushed = |table: &&TableMeta| table.largest_seqno <= *through;
                obsolete.extend(known.spilled.values().filter(is_flushed).map(|table| table.number));
            }
        }
        obsolete
    }

    /// A copy of the ledger as it is now.
    pub(crate) fn manifest_state(&self) -> ManifestState {
        let mut copy = lock(&self.state).clone();
        self.raise_next_ids(&mut copy);
        copy
    }

    /// Numbers may be in use (a table being written) that no edit names yet.
    fn raise_next_ids(&self, manifest_state: &mut ManifestState) {
        manifest_state.next_file_number =
            self.next_file_id.load(Ordering::Relaxed).max(manifest_state.next_file_number);
        manifest_state.next_partition_id =
            self.next_partition_id.load(Ordering::Relaxed).max(manifest_state.next_partition_id);
        manifest_state.next_wal_epoch = self.next_epoch.load(Ordering::Relaxed).max(manifest_state.next_wal_epoch);
    }

    /// Writes the manifest anew if it has grown much beyond what it holds.
    pub(crate) fn rewrite_if_grown(&self) -> Result<bool> {
        let limit = (self.size_at_last_rewrite.load(Ordering::Relaxed) * REWRITE_GROWTH).max(REWRITE_MIN_BYTES);
        if self.manifest.size() < limit {
            return Ok(false);
        }
        let mut file_id = [0; 16];
        self.env.random(&mut file_id);
        let mut manifest_state = lock(&self.state);
        self.raise_next_ids(&mut manifest_state);
        self.manifest.rewrite(file_id, &manifest_state.edits())?;
        self.size_at_last_rewrite.store(self.manifest.size(), Ordering::Relaxed);
        Ok(true)
    }

    /// Of the manifest, in bytes.
    pub(crate) fn manifest_bytes(&self) -> u64 {
        self.manifest.size()
    }
}

impl WalCallbacks for VersionSet {
    fn allocate_segment(&self) -> Result<(WalEpoch, FileNumber)> {
        // The last one is never given out, so that a second call fails like the first.
        let next = |epoch: u32| epoch.checked_add(1).filter(|next| *next < u32::MAX);
        let epoch = self.next_epoch.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        let used_up = |_| Error::new(ErrorKind::Unsupported, "the database has used up its log epochs");
        let epoch = epoch.map_err(used_up)?;
        Ok((WalEpoch(epoch), FileNumber(self.next_file_id.fetch_add(1, Ordering::Relaxed))))
    }

    fn add_segment_to_manifest(&self, epoch: WalEpoch, file: FileNumber) -> Result<()> {
        self.log_and_apply(&[VersionEdit::WalSegmentAdded { epoch, file }])?;
        self.work_available.notify_all();
        Ok(())
    }

    fn sync_dependencies(&self) -> Result<()> {
        self.sync()?;
        self.unsynced_blobs.sync_all()
    }
}

/// The partition that must still exist for the edit to make sense.
fn partition_of(edit: &VersionEdit) -> Option<PartitionId> {
    match edit {
        VersionEdit::PartitionDropped { partition }
        | VersionEdit::PartitionSettings { partition, .. }
        | VersionEdit::TableAdded { partition, .. }
        | VersionEdit::TableRemoved { partition, .. }
        | VersionEdit::TableMoved { partition, .. }
        | VersionEdit::BlobFileAdded { partition, .. }
        | VersionEdit::BlobFileRemoved { partition, .. }
        | VersionEdit::Flushed { partition, .. }
        | VersionEdit::TableSpilled { partition, .. }
        | VersionEdit::PoolFileId { partition, .. } => Some(*partition),
        VersionEdit::PartitionCreated(_)
        | VersionEdit::Database { .. }
        | VersionEdit::NextNumbers { .. }
        | VersionEdit::WalSegmentAdded { .. }
        | VersionEdit::WalSegmentRemoved { .. }
        | VersionEdit::AllFlushed { .. }
        | VersionEdit::WalEnd { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::vfs::env::TestEnv;
    use crate::vfs::mem::MemFs;

    /// Creating a pool syncs the directory. The lock on the ledger was held meanwhile: a writer whose log began a
    /// segment waited for that sync.
    #[test]
    fn a_segment_begins_while_a_pool_is_created() {
        let manifest = Manifest::create(Arc::new(MemFs::new()), Path::new("/"), [1; 16], &[]).unwrap();
        let manifest_state = ManifestState { next_partition_id: 1, ..ManifestState::default() };
        let (env, unsynced, work) = (Arc::new(TestEnv::new(1)), Arc::default(), Arc::default());
        let version_set = VersionSet::new(manifest, manifest_state, Arc::default(), env, unsynced, work);
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
                "a manifest written anew would say it was used"
            );
            Ok((meta.id, None))
        };
        assert_eq!(version_set.create_partition(meta.clone(), prepare).unwrap(), PartitionId(1));
        let failed = version_set.create_partition(meta.clone(), |_| Err::<((), _), _>(Error::invalid("")));
        assert!(failed.is_err());
        let third = version_set.create_partition(meta, |meta| Ok((meta.id, None))).unwrap();
        assert_eq!(third, PartitionId(3), "files of a creation that failed may have number 2");
        let manifest_state = version_set.manifest_state();
        assert_eq!(
            (manifest_state.partitions.len(), manifest_state.wal_segments.len(), manifest_state.next_partition_id),
            (2, 1, 4)
        );
    }
}

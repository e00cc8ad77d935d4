//! The ledger and the manifest that keeps it, as one.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::base::edit::{Edit, Epoch, FileId, PartitionId, PartitionMeta};
use crate::base::ledger::Ledger;
use crate::base::sync::{Bell, lock};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::lsm::blobs::unsynced::Unsynced;
use crate::manifest::Manifest;
use crate::vfs::Env;
use crate::wal::WalHost;

/// The manifest is written anew when it has grown to this many times what it was when last written, and beyond
/// [`REWRITE_MIN_BYTES`].
const REWRITE_GROWTH: u64 = 4;
const REWRITE_MIN_BYTES: u64 = 1 << 20;

/// All metadata that survives. Thread safe; edits take effect in the order in which the manifest has them.
pub(crate) struct Metadata {
    manifest: Manifest,
    ledger: Mutex<Ledger>,
    next_file: Arc<AtomicU64>,
    next_partition: AtomicU64,
    next_epoch: AtomicU32,
    rewritten_bytes: AtomicU64,
    env: Arc<dyn Env>,
    unsynced: Arc<Unsynced>,
    /// Rung when the log begins a segment: it may be larger than it should be.
    work: Arc<Bell>,
}

impl Metadata {
    /// Starts from a manifest that holds exactly `ledger`; the trees take fresh file numbers from `next_file` too, and
    /// leave early files among the `unsynced`.
    pub(crate) fn new(
        manifest: Manifest,
        ledger: Ledger,
        next_file: Arc<AtomicU64>,
        env: Arc<dyn Env>,
        unsynced: Arc<Unsynced>,
        work: Arc<Bell>,
    ) -> Metadata {
        Metadata {
            unsynced,
            work,
            rewritten_bytes: AtomicU64::new(manifest.size()),
            next_file,
            next_partition: AtomicU64::new(ledger.next_partition),
            next_epoch: AtomicU32::new(ledger.next_epoch),
            manifest,
            ledger: Mutex::new(ledger),
            env,
        }
    }

    /// Notes a new partition, like [`append`](Metadata::append), under a number of its own. Before that, `prepare` does
    /// all that can fail, and says which file id the pool has, if its files are there. It may sync: no lock is held.
    /// The number counts as used only with the edit, or if that fails: a manifest written anew in between would say
    /// that it was used, and replay would take the partition for a deleted one.
    ///
    /// The caller creates one partition at a time.
    pub(crate) fn create_partition<T>(
        &self,
        mut meta: PartitionMeta,
        prepare: impl FnOnce(&PartitionMeta) -> Result<(T, Option<[u8; 16]>)>,
    ) -> Result<T> {
        let partition = PartitionId(self.next_partition.load(Ordering::Relaxed));
        meta.id = partition;
        let prepared = prepare(&meta);
        let mut ledger = lock(&self.ledger);
        self.next_partition.store(partition.0 + 1, Ordering::Relaxed);
        let (prepared, file_id) = prepared?;
        let mut edits = vec![Edit::PartitionCreated(meta)];
        edits.extend(file_id.map(|file_id| Edit::PoolFileId { partition, file_id }));
        // One batch: a partition of which the manifest has only the first edit would come back after its deletion.
        let mut after = ledger.clone();
        for edit in &edits {
            after.check(edit)?;
            after.apply(edit)?;
        }
        self.manifest.append(&edits)?;
        *ledger = after;
        Ok(prepared)
    }

    /// Writes a batch of edits to the operating system; a later sync of the manifest or of the log makes it durable.
    ///
    /// # Errors
    /// `Closed` if an edit speaks of a partition that was dropped meanwhile; then nothing is written.
    pub(crate) fn append(&self, edits: &[Edit]) -> Result<()> {
        self.append_to(&mut lock(&self.ledger), edits)
    }

    fn append_to(&self, ledger: &mut Ledger, edits: &[Edit]) -> Result<()> {
        for edit in edits {
            if let Some(partition) = partition_of(edit)
                && !ledger.partitions.contains_key(&partition)
            {
                return Err(Error::new(ErrorKind::Closed, format!("partition {} was deleted", partition.0)));
            }
            ledger.check(edit)?;
        }
        self.manifest.append(edits)?;
        edits.iter().try_for_each(|edit| ledger.apply(edit))
    }

    /// Writes a batch of edits durably.
    pub(crate) fn commit(&self, edits: &[Edit]) -> Result<()> {
        self.append(edits)?;
        self.manifest.sync()
    }

    /// Makes every edit so far durable.
    pub(crate) fn sync(&self) -> Result<()> {
        self.manifest.sync()
    }

    /// The edit that says that all partitions have flushed through `through`, if the manifest does not say so yet:
    /// where every partition flushes, their own edits say it.
    pub(crate) fn all_flushed(&self, through: SeqNo) -> Option<Edit> {
        (through > lock(&self.ledger).flushed_by_all()).then_some(Edit::AllFlushed { through })
    }

    /// The spilled tables of a partition.
    pub(crate) fn spilled(&self, partition: PartitionId) -> BTreeSet<FileId> {
        let ledger = lock(&self.ledger);
        ledger.partitions.get(&partition).map_or_else(BTreeSet::new, |known| known.spilled.keys().copied().collect())
    }

    /// A copy of the ledger as it is now.
    pub(crate) fn ledger(&self) -> Ledger {
        let mut copy = lock(&self.ledger).clone();
        self.raise_numbers(&mut copy);
        copy
    }

    /// Numbers may be in use (a table being written) that no edit names yet.
    fn raise_numbers(&self, ledger: &mut Ledger) {
        ledger.next_file = self.next_file.load(Ordering::Relaxed).max(ledger.next_file);
        ledger.next_partition = self.next_partition.load(Ordering::Relaxed).max(ledger.next_partition);
        ledger.next_epoch = self.next_epoch.load(Ordering::Relaxed).max(ledger.next_epoch);
    }

    /// Writes the manifest anew if it has grown much beyond what it holds.
    pub(crate) fn rewrite_if_grown(&self) -> Result<bool> {
        let limit = (self.rewritten_bytes.load(Ordering::Relaxed) * REWRITE_GROWTH).max(REWRITE_MIN_BYTES);
        if self.manifest.size() < limit {
            return Ok(false);
        }
        let mut file_id = [0; 16];
        self.env.random(&mut file_id);
        let mut ledger = lock(&self.ledger);
        self.raise_numbers(&mut ledger);
        self.manifest.rewrite(file_id, &ledger.edits())?;
        self.rewritten_bytes.store(self.manifest.size(), Ordering::Relaxed);
        Ok(true)
    }

    /// Of the manifest, in bytes.
    pub(crate) fn manifest_bytes(&self) -> u64 {
        self.manifest.size()
    }
}

impl WalHost for Metadata {
    fn new_segment(&self) -> Result<(Epoch, FileId)> {
        // The last one is never given out, so that a second call fails like the first.
        let next = |epoch: u32| epoch.checked_add(1).filter(|next| *next < u32::MAX);
        let epoch = self.next_epoch.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        let used_up = |_| Error::new(ErrorKind::Unsupported, "the database has used up its log epochs");
        let epoch = epoch.map_err(used_up)?;
        Ok((Epoch(epoch), FileId(self.next_file.fetch_add(1, Ordering::Relaxed))))
    }

    fn segment_added(&self, epoch: Epoch, file: FileId) -> Result<()> {
        self.append(&[Edit::SegmentAdded { epoch, file }])?;
        self.work.ring();
        Ok(())
    }

    fn before_sync(&self) -> Result<()> {
        self.sync()?;
        self.unsynced.sync_all()
    }
}

/// The partition that must still exist for the edit to make sense.
fn partition_of(edit: &Edit) -> Option<PartitionId> {
    match edit {
        Edit::PartitionDropped { partition }
        | Edit::PartitionSettings { partition, .. }
        | Edit::TableAdded { partition, .. }
        | Edit::TableRemoved { partition, .. }
        | Edit::TableMoved { partition, .. }
        | Edit::BlobFileAdded { partition, .. }
        | Edit::BlobFileRemoved { partition, .. }
        | Edit::Flushed { partition, .. }
        | Edit::TableSpilled { partition, .. }
        | Edit::PoolFileId { partition, .. } => Some(*partition),
        Edit::PartitionCreated(_)
        | Edit::Database { .. }
        | Edit::NextIds { .. }
        | Edit::SegmentAdded { .. }
        | Edit::SegmentRetired { .. }
        | Edit::AllFlushed { .. }
        | Edit::LogEnd { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use crate::vfs::env::TestEnv;
    use crate::vfs::mem::MemFs;

    /// Creating a pool syncs the directory. The lock on the ledger was held meanwhile: a writer whose log began a
    /// segment waited for that sync.
    #[test]
    fn a_segment_begins_while_a_pool_is_created() {
        let manifest = Manifest::create(Arc::new(MemFs::new()), Path::new("/"), [1; 16], &[]).unwrap();
        let ledger = Ledger { next_partition: 1, ..Ledger::default() };
        let (env, unsynced, work) = (Arc::new(TestEnv::new(1)), Arc::default(), Arc::default());
        let metadata = Metadata::new(manifest, ledger, Arc::default(), env, unsynced, work);
        let meta = PartitionMeta {
            id: PartitionId(0),
            engine: 0,
            name: "p".to_owned(),
            comparator: "c".to_owned(),
            settings: Vec::new(),
        };
        let prepare = |meta: &PartitionMeta| {
            let (epoch, file) = metadata.new_segment()?;
            metadata.segment_added(epoch, file)?;
            assert_eq!(metadata.ledger().next_partition, meta.id.0, "a manifest written anew would say it was used");
            Ok((meta.id, None))
        };
        assert_eq!(metadata.create_partition(meta.clone(), prepare).unwrap(), PartitionId(1));
        let failed = metadata.create_partition(meta.clone(), |_| Err::<((), _), _>(Error::invalid("")));
        assert!(failed.is_err());
        let third = metadata.create_partition(meta, |meta| Ok((meta.id, None))).unwrap();
        assert_eq!(third, PartitionId(3), "files of a creation that failed may have number 2");
        let ledger = metadata.ledger();
        assert_eq!((ledger.partitions.len(), ledger.segments.len(), ledger.next_partition), (2, 1, 4));
    }
}

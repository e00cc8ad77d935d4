//! Applies the commits that a follower reads from the write-ahead log (WAL); see [`catch_up`](crate::db::catch_up).

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::base::blob_pointer::BlobPointer;
use crate::base::manifest_state::ManifestState;
use crate::base::version_edit::PartitionId;
use crate::base::{EntryRef, Error, ErrorKind, RecordKind, Result, SeqNo};
use crate::db::inner::DbInner;
use crate::db::partition_state::PartitionState;
use crate::db::recovery::recovery_state::unknown_to_manifest;
use crate::engine::Staged;
use crate::tree::partition_tree::PartitionTree;
use crate::wal::WalCommit;
use crate::wal::format::{IngestNote, SEQNO_GAP_PAYLOAD, WalRecordIter, check_payload};

/// Why reading of the WAL has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WalStop {
    /// At its present end, or at the limit of one call.
    End,
    /// Before a commit, with its last sequence number, that names what the manifest does not know yet, or that points
    /// to a value that is not there.
    BeforeUnknown(SeqNo),
    /// Before a segment of an open that the manifest may not record yet.
    BeforeOpen,
}

/// Applies commits of the WAL.
pub(crate) struct CommitReader<'a> {
    pub(crate) inner: &'a DbInner,
    pub(crate) partitions: &'a BTreeMap<PartitionId, Arc<PartitionState>>,
    /// The manifest state that was read last, and the one that readers use.
    pub(crate) known: &'a ManifestState,
    pub(crate) installed: &'a ManifestState,
    pub(crate) held_from: &'a mut Option<SeqNo>,
    pub(crate) waits_for_install: &'a mut bool,
    pub(crate) torn: &'a mut Option<SeqNo>,
    pub(crate) note: &'a mut Option<(PartitionId, SeqNo)>,
    /// Set if the last commit was not applied, and will be read again.
    pub(crate) stop: Option<WalStop>,
    /// Whether the commits may be from before a power loss, which may have taken the values that they point to.
    pub(crate) checks_values: bool,
    /// Set by [`PlantedBug::FollowerTearsCommits`].
    pub(crate) tears_commits: bool,
}

impl CommitReader<'_> {
    /// Applies a commit, and makes it visible unless it is held.
    pub(crate) fn apply(&mut self, commit: &WalCommit<'_>) -> Result<()> {
        check_payload(commit.payload, commit.seqno_count)?;
        debug_assert!(commit.payload != SEQNO_GAP_PAYLOAD, "the reader passes gaps");
        let (mut pools_with_range_deletes, resources) = (Vec::new(), self.inner.catalog.resources());
        let (mut note, mut needs_install) = (None, false);
        let mut seqno = commit.first_seqno;
        let last = SeqNo(seqno.0 + u64::from(commit.seqno_count) - 1);
        let before_unknown = WalStop::BeforeUnknown(last);
        for record in WalRecordIter::new(commit.payload) {
            let record = record?;
            if unknown_to_manifest(self.known, &record).is_some() {
                return Err(self.stop(before_unknown)); // the edit precedes the record
            }
            needs_install |= unknown_to_manifest(self.installed, &record).is_some();
            if let Some(of_ingest) = IngestNote::of_record(&record)? {
                note = Some((of_ingest.partition, seqno));
            }
            if let Some(partition) = self.partitions.get(&record.partition) {
                if let (RecordKind::RangeDelete, Some(PartitionTree::Pmem(pool))) =
                    (record.kind, partition.tree_if_built())
                {
                    pools_with_range_deletes.push(Arc::clone(pool));
                }
                if let Some(pointer) = BlobPointer::of_record(record.kind, record.value)?
                    && !partition.follow_pointer(resources, seqno, &pointer, self.checks_values)?
                {
                    if !self.is_replaced(record.partition, seqno, &pointer) {
                        return Err(self.stop(before_unknown));
                    }
                    needs_install = true;
                }
            }
            seqno = seqno.plus(1);
        }
        if note.is_some() {
            self.held_from.get_or_insert(commit.first_seqno);
        }
        *self.waits_for_install |= needs_install;
        let is_held = self.held_from.is_some() || *self.waits_for_install;
        *self.torn = Some(last);
        let mut seqno = commit.first_seqno;
        for record in WalRecordIter::new(commit.payload) {
            let record = record?;
            let is_left_out = seqno == last && self.tears_commits;
            if let Some(partition) = self.partitions.get(&record.partition).filter(|_| !is_left_out) {
                let entry = EntryRef { user_key: record.key, seqno, kind: record.kind, value: record.value };
                self.apply_record(partition, entry)?;
            }
            seqno = seqno.plus(1);
        }
        if !is_held {
            self.inner.last_visible.publish(last.max(self.inner.last_visible.get()));
        }
        // Also if they are held: until they are visible, the pools retain what they remove. The next commit may put a
        // covered key again.
        pools_with_range_deletes.iter().try_for_each(|pool| pool.complete_range_deletes())?;
        // The ingest before this commit was installed or has failed. It is held until a manifest says which.
        (*self.note, *self.torn) = (note, None);
        Ok(())
    }

    /// Whether the manifest that was read last has the value in another file, or has dropped it.
    fn is_replaced(&self, partition: PartitionId, seqno: SeqNo, pointer: &BlobPointer) -> bool {
        let stored = self.known.partitions.get(&partition);
        stored.is_none_or(|stored| seqno <= stored.permanent() || stored.has_logical_blob_file(pointer.logical_file))
    }

    fn stop(&mut self, stop: WalStop) -> Error {
        self.stop = Some(stop);
        Error::new(ErrorKind::Conflict, "the commit waits for another manifest")
    }

    fn apply_record(&mut self, partition: &PartitionState, entry: EntryRef<'_>) -> Result<()> {
        if entry.kind.has_expiry() {
            partition.expiry.note_use(&self.inner.snapshots);
        }
        match partition.tree_if_built() {
            None => partition.replay(entry).map(drop),
            Some(tree) if entry.seqno <= tree.flushed_through() => Ok(()),
            Some(tree) => tree.apply(entry, Staged::Nothing).map(drop),
        }
    }
}

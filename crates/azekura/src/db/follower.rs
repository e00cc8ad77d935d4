//! What a follower knows of the database that it follows; see [`catch_up`](crate::db::catch_up).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::base::manifest_state::ManifestState;
use crate::base::sync::lock;
use crate::base::version_edit::{PartitionId, WalEpoch};
use crate::base::{Error, Result, SeqNo};
use crate::db::config::Config;
use crate::db::partition_state::PartitionState;
use crate::db::state::change_readers::ChangeReaders;
use crate::manifest::{Manifest, ManifestIdentity};
use crate::tree::partition_tree::PartitionTree;
use crate::wal::options::WalReplayReport;
use crate::wal::tail::{WalTail, lost_error};

/// What a follower knows of the database that it follows. Thread safe.
pub(crate) struct Follower {
    pub(crate) config: Config,
    pub(crate) progress: Mutex<Progress>,
    installed: Mutex<InstalledManifest>,
    /// The WAL is known to be durable up to this sequence number.
    pub(crate) durable: AtomicU64,
    /// Epochs below this one were read, or the manifest that was read last has recorded them.
    known_epochs: AtomicU32,
    /// Readers of changes. They hold no segments of the WAL, which belongs to the writer.
    pub(crate) change_readers: ChangeReaders,
}

/// The manifest state that was installed last, with the recorded ends of the WAL of the one that was read last.
#[derive(Clone)]
pub(crate) struct InstalledManifest {
    pub(crate) state: Arc<ManifestState>,
    /// The file that had these ends. An open of the writer creates another one.
    pub(crate) file_id: [u8; 16],
}

/// How far a follower has read.
pub(crate) struct Progress {
    pub(crate) identity: ManifestIdentity,
    /// The manifest state that was read last, unless it is installed.
    pub(crate) next: Option<Arc<ManifestState>>,
    /// The partitions of all manifest states that were read. Those of `next` may not be in the catalog yet.
    pub(crate) partitions: BTreeMap<PartitionId, Arc<PartitionState>>,
    pub(crate) tail: WalTail,
    /// The first commit that is held until a manifest that is read from now on is installed.
    pub(crate) held_from: Option<SeqNo>,
    /// Whether commits are held until the manifest that was read is installed.
    pub(crate) waits_for_install: bool,
    /// Set while pools may have some of the records up to this sequence number that are not visible, and not all of
    /// them. Then the database is read again.
    pub(crate) torn: Option<SeqNo>,
    /// The note of an ingest, if it is the last commit that was read.
    pub(crate) note: Option<(PartitionId, SeqNo)>,
    /// The epoch of the segment that was read last, or the highest one of any segment when the database was read. The
    /// manifest that was read last records the open that has begun it.
    pub(crate) epoch: WalEpoch,
    /// The highest epoch when the follower was opened. A writer that opens the database later begins higher ones.
    pub(crate) epoch_at_open: WalEpoch,
}

impl Follower {
    /// Follows a database of which the WAL was read as the report says.
    ///
    /// # Errors
    /// Those of the WAL.
    pub(crate) fn new(
        config: Config,
        manifest_state: ManifestState,
        identity: ManifestIdentity,
        partitions: BTreeMap<PartitionId, Arc<PartitionState>>,
        report: &WalReplayReport,
    ) -> Result<Follower> {
        let (epoch, wal_seqno) = report.wal_end();
        partitions.values().try_for_each(|partition| prepare_tree(partition))?;
        let file_id = identity.0;
        let progress = Progress {
            identity,
            next: None,
            partitions,
            tail: new_tail(&config, &manifest_state, wal_seqno),
            held_from: None,
            waits_for_install: false,
            torn: None,
            note: None,
            epoch,
            epoch_at_open: epoch,
        };
        let follower = Follower {
            config,
            durable: AtomicU64::new(last_named_seqno(&manifest_state).0),
            known_epochs: AtomicU32::new(manifest_state.next_wal_epoch),
            progress: Mutex::new(progress),
            installed: Mutex::new(InstalledManifest { state: Arc::new(manifest_state), file_id }),
            change_readers: ChangeReaders::default(),
        };
        if let Some(last) = report.segments.last() {
            follower.note_epoch(last.epoch);
        }
        Ok(follower)
    }

    /// The sequence number up to which the WAL is known to be durable.
    pub(crate) fn durable(&self) -> SeqNo {
        SeqNo(self.durable.load(Ordering::Relaxed))
    }

    /// Notes what a manifest names, and what the frames state that were read.
    pub(crate) fn note_durable(&self, named: SeqNo, tail: &WalTail) {
        self.durable.fetch_max(named.max(tail.durable()).0, Ordering::Relaxed);
    }

    /// Epochs below this one are those of the WAL that was read.
    pub(crate) fn known_epochs(&self) -> WalEpoch {
        WalEpoch(self.known_epochs.load(Ordering::Relaxed))
    }

    /// Notes the epoch of a segment that is read.
    pub(crate) fn note_epoch(&self, epoch: WalEpoch) {
        self.known_epochs.fetch_max(epoch.0.saturating_add(1), Ordering::Relaxed);
    }

    /// Takes over the recorded ends of the WAL from a newer manifest, before commits of a later open are visible: their
    /// positions get its epoch.
    pub(crate) fn take_over_ends(&self, known: &ManifestState, file_id: [u8; 16]) {
        let mut installed = lock(&self.installed);
        if known.position_epoch() != installed.state.position_epoch() {
            let mut state = ManifestState::clone(&installed.state);
            (state.wal_end, state.earlier_wal_ends) = (known.wal_end, known.earlier_wal_ends.clone());
            installed.state = Arc::new(state);
        }
        installed.file_id = file_id;
    }

    pub(crate) fn install(&self, state: &Arc<ManifestState>, file_id: [u8; 16]) {
        *lock(&self.installed) = InstalledManifest { state: Arc::clone(state), file_id };
    }

    pub(crate) fn installed(&self) -> InstalledManifest {
        lock(&self.installed).clone()
    }

    /// The manifest state that was installed last.
    pub(crate) fn manifest_state(&self) -> Arc<ManifestState> {
        self.installed().state
    }

    /// Checks that the directory has the commits up to `last` which were visible with this manifest: a later open of
    /// the writer may have lost them, and may have written others with the same numbers.
    ///
    /// # Errors
    /// `Stale` if it has lost them; `Invalid` if the directory has another database; those of the manifest.
    pub(crate) fn check_kept(&self, installed: &InstalledManifest, last: SeqNo) -> Result<()> {
        let Some(now) = Manifest::load_if_replaced(&self.config.fs, &self.config.path, installed.file_id)? else {
            return Ok(());
        };
        self.check_same_database(&now)?;
        check_not_lost(&now, installed.state.position_epoch(), last)
    }

    /// # Errors
    /// `Invalid` if a manifest is of another database.
    pub(crate) fn check_same_database(&self, state: &ManifestState) -> Result<()> {
        let installed = self.manifest_state();
        if (state.id, state.instance) != (installed.id, installed.instance) {
            return Err(Error::invalid("the directory has another database now").in_file(&self.config.path));
        }
        Ok(())
    }
}

pub(crate) fn new_tail(config: &Config, manifest_state: &ManifestState, after: SeqNo) -> WalTail {
    let mut tail = WalTail::following(
        Arc::clone(&config.fs),
        &config.path,
        manifest_state.id,
        after,
        WalEpoch(manifest_state.next_wal_epoch),
    );
    // If this fails, the first read finds out, and reads the database again.
    let _located = tail.locate();
    tail
}

/// Checks that no recovery has ended the WAL before `last`, which was written up to `epoch`.
///
/// # Errors
/// `Stale` if one has.
pub(crate) fn check_not_lost(state: &ManifestState, epoch: WalEpoch, last: SeqNo) -> Result<()> {
    match state.end_of_epoch(epoch)?.filter(|end| *end < last) {
        Some(end) => Err(lost_error(end, last)),
        None => Ok(()),
    }
}

/// Prepares the tree of a partition for records of a live WAL.
pub(crate) fn prepare_tree(partition: &PartitionState) -> Result<()> {
    partition.tree_if_built().map_or(Ok(()), PartitionTree::prepare_to_follow)
}

/// The highest sequence number that a manifest has made permanent or has recorded.
pub(crate) fn last_named_seqno(state: &ManifestState) -> SeqNo {
    let partitions = state.partitions.values().map(|stored| stored.permanent().max(stored.durable_seqno()));
    let end = state.wal_end.map_or(SeqNo::ZERO, |(_, seqno)| seqno);
    partitions.chain([state.all_flushed, end]).max().unwrap_or_default()
}

/// Whether a manifest was written after the ingest of a note had been installed or had failed. Until then, no manifest
/// names the sequence number of the note or a higher one.
pub(crate) fn has_ended_ingest(state: &ManifestState, partition: PartitionId, note: SeqNo) -> bool {
    let is_deleted = partition.0 < state.next_partition_id && !state.partitions.contains_key(&partition);
    is_deleted || last_named_seqno(state) >= note
}

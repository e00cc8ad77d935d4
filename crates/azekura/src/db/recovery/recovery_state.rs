//! What is known of a database between the read of its manifest and its first write.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::base::event::Event;
use crate::base::manifest_state::ManifestState;
use crate::base::sync::WakeSignal;
use crate::base::version_edit::{FileNumber, PartitionId, PartitionMeta, VersionEdit, WalEpoch};
use crate::base::{EntryRef, Error, ErrorKind, KeyOrder, RecordKind, Result, SeqNo};
use crate::blob::unfinished::UnfinishedBlobFiles;
use crate::block::cache::BlockCache;
use crate::db::catalog::Catalog;
use crate::db::config::{Config, PlantedBug, Settings};
use crate::db::follower::{Follower, has_ended_ingest};
use crate::db::handle::DbHandle;
use crate::db::inner::{DbInner, DbWriter, RecoveryStats};
use crate::db::partition_state::PartitionState;
use crate::db::recovery::directory_listing::DirectoryListing;
use crate::db::state::disk_reserve::DiskReserve;
use crate::db::state::poison::DbPoison;
use crate::db::state::version_set::VersionSet;
use crate::db::worker;
use crate::engine::{LastVisibleSeqno, SnapshotList};
use crate::lsm::direct_write::IncompleteFiles;
use crate::lsm::tree_context::{TreeContext, TreeResources};
use crate::manifest::{MANIFEST_NAME, Manifest, ManifestIdentity};
use crate::memtable::memtable::MemtableMemory;
use crate::table::obsolete_files::ObsoleteFiles;
use crate::tree::spilled_records;
use crate::tree::stored_tree::engine_kind;
use crate::vfs::expiry_clock::ExpiryClock;
use crate::vfs::open_files::{DataFileKind, DataFiles, FileAccess, HandleLimitFs, max_cached_handles};
use crate::vfs::{File, FileLock, OpenMode};
use crate::wal::format::{
    SEGMENT_HEADER_LEN, SEQNO_GAP_PAYLOAD, WalRecord, WalRecordIter, blob_pointers, check_payload, ingest_note,
    segment_path,
};
use crate::wal::options::WalSegmentInfo;
use crate::wal::reader::{removable_segments, unfinished_rewrites};
use crate::wal::segment::{WAL_PAGE_SIZE, write_again};
use crate::wal::writer::SKIPPED_EPOCHS_MAX;
use crate::wal::{self, PartitionSeqno, RecoveryMode, Wal, WalCommit, WalOptions, WalReplayOptions, WalReplayReport};

/// Addresses in bytes that a pool of a follower gets for records that it reads from the WAL after it was opened.
const FOLLOWED_POOL_BYTES: u64 = 256 << 20;

/// How a database is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpenedAs {
    Writer,
    Reader,
    Follower,
}

/// # Errors
/// `Unsupported` for a partition whose changes are not all in the WAL.
pub(crate) fn check_followable(meta: &PartitionMeta) -> Result<()> {
    if engine_kind(meta)?.may_skip_wal() {
        let name = &meta.name;
        let message = format!("partition {name:?} is a pool in mapped memory, whose changes no follower can read");
        return Err(Error::unsupported(message));
    }
    Ok(())
}

/// What the manifest lacks for a record of the WAL. The edit precedes the record, so if the commit was synced, the
/// manifest has lost its end.
pub(crate) fn unknown_to_manifest(state: &ManifestState, record: &WalRecord<'_>) -> Option<&'static str> {
    if record.partition.0 >= state.next_partition_id {
        return Some(
            "a synced commit names a partition that the manifest does not know: the manifest has lost its end",
        );
    }
    let partition = || state.partitions.get(&record.partition);
    let lacks_operator = record.kind == RecordKind::Merge && partition()?.merge_operator.is_none();
    lacks_operator.then_some(
        "a synced commit has an operand for a partition without a merge operator: the manifest has lost its end",
    )
}

/// A database that was read and to which nothing was written yet.
pub(crate) struct RecoveryState {
    pub(crate) manifest_state: ManifestState,
    listing: DirectoryListing,
    catalog: Arc<Catalog>,
    pub(crate) resources: Arc<TreeResources>,
    pub(crate) by_id: HashMap<PartitionId, Arc<PartitionState>>,
    /// Unfinished direct blob files that the WAL points into.
    pub(crate) unfinished_blobs: UnfinishedBlobFiles,
    /// Whether the recovery mode skips damage.
    is_salvage: bool,
    /// First sequence numbers of skipped commits: these point to lost values, or name partitions that the manifest
    /// does not contain.
    skipped_commits: HashSet<SeqNo>,
    /// The note of an ingest, if it was the last commit, unless the manifest was written after the end of its ingest.
    pub(crate) open_note: Option<SeqNo>,
    /// Whether a commit follows such a note. Its ingest has ended then, and a newer manifest may have the tables.
    pub(crate) is_note_followed: bool,
    records: u64,
    /// Size of the manifest file that was read.
    manifest_bytes: u64,
}

/// Writes the segments again of which some may not be durable, unless the WAL is rewritten anyway.
fn write_unsynced_again(config: &Config, report: &WalReplayReport) -> Result<()> {
    let is_affected = |segment: &&WalSegmentInfo| !report.has_gaps && segment.may_be_unsynced(report.durable_through);
    report.segments.iter().filter(is_affected).try_for_each(|segment| {
        let file = config.fs.open(&segment_path(&config.path, segment.file), OpenMode::Write)?;
        write_again_if_space(&*file, segment.end_offset)
    })
}

/// As [`write_again`]. The database must open on a full disk, where this fails on file systems that do not overwrite in
/// place.
fn write_again_if_space(file: &dyn File, end: u64) -> Result<()> {
    match write_again(file, end) {
        Err(error) if error.kind() == ErrorKind::OutOfSpace => Ok(()),
        written => written,
    }
}

impl RecoveryState {
    pub(crate) fn read(
        config: &Config,
        listing: DirectoryListing,
        limited: Option<&HandleLimitFs>,
        opened_as: OpenedAs,
    ) -> Result<RecoveryState> {
        let (read_only, is_follower) = (opened_as != OpenedAs::Writer, opened_as == OpenedAs::Follower);
        let (fs, dir) = (&config.fs, &config.path);
        let loaded = Manifest::load(Arc::clone(fs), dir)?;
        let mut manifest_state =
            ManifestState::replay(&loaded.edits).map_err(|e| e.in_file(dir.join(MANIFEST_NAME)))?;
        let mut listing = listing;
        listing.forget_unowned_files(&manifest_state);
        let mut next_file = manifest_state.next_file_number;
        for id in listing.data.keys().map(|(_, id)| id).chain(listing.segments.keys()) {
            next_file = next_file.max(id.0 + 1); // no edit may name this file yet
        }
        let Settings { direct_io, mapped_reads, .. } = config.settings;
        let access = FileAccess::new(direct_io, mapped_reads, || config.env.memory_limit());
        let max_open = match is_follower {
            // A follower never closes a file that it needs, because the writer may have removed it.
            true => usize::MAX,
            false => max_cached_handles(config.settings.max_open_files, config.env.available_file_handles()),
        };
        let files = Arc::new(DataFiles::tables(Arc::clone(fs), dir, max_open, access));
        limited.inspect(|limited| limited.close_when_exhausted(&files));
        let cache = Arc::new(BlockCache::new(config.settings.cache_size));
        let work = Arc::new(WakeSignal::default());
        let visible = LastVisibleSeqno::default();
        let spilled_bytes = spilled_records::wal_bytes(&manifest_state);
        // Pools of a follower get addresses for what it will read later.
        let followed_bytes = if is_follower { FOLLOWED_POOL_BYTES } else { 0 };
        let obsolete_files = if is_follower { ObsoleteFiles::of_follower } else { ObsoleteFiles::new };
        let resources = Arc::new(TreeResources {
            snapshots: SnapshotList::with_clock(visible.clone(), ExpiryClock::new(Arc::clone(&config.env))),
            last_visible: visible,
            read_only,
            fs: Arc::clone(fs),
            env: Arc::clone(&config.env),
            dir: dir.clone(),
            obsolete_files: Arc::new(obsolete_files(Arc::clone(&files), Arc::clone(&cache), Arc::clone(&work))),
            files,
            cache,
            work_available: work,
            hash_seed: manifest_state.hash_seed,
            next_file_id: Arc::new(AtomicU64::new(next_file)),
            default_codec: config.settings.compression,
            unsynced_blobs: Arc::default(),
            wal_bytes: listing.segments.values().sum::<u64>().saturating_add(spilled_bytes + followed_bytes),
            memtable_memory: Arc::new(MemtableMemory::new(config.settings.memory_budget)),
        });
        let catalog = Arc::new(Catalog::new(Arc::clone(&resources)));
        let mut by_id = HashMap::new();
        for (id, stored) in &mut manifest_state.partitions {
            if is_follower {
                check_followable(&stored.meta)?;
            }
            let partition = catalog.restore_partition(stored.clone(), &listing.data)?;
            partition.forget_applied(stored);
            by_id.insert(*id, partition);
        }
        debug_assert!(next_file >= manifest_state.next_file_number, "no new file gets a number that the manifest has");
        let is_salvage = config.settings.recovery_mode == RecoveryMode::Salvage;
        let unfinished_blobs =
            UnfinishedBlobFiles::new(&manifest_state, resources.files.blob_files(), Arc::clone(&resources.cache));
        let (skipped_commits, manifest_bytes) = (HashSet::new(), loaded.bytes);
        Ok(RecoveryState {
            manifest_state,
            listing,
            catalog,
            resources,
            by_id,
            unfinished_blobs,
            is_salvage,
            skipped_commits,
            open_note: None,
            is_note_followed: false,
            manifest_bytes,
            records: 0,
        })
    }

    /// Opens the tables and blob files of all trees.
    pub(crate) fn open_files(&self) -> Result<()> {
        self.by_id
            .values()
            .filter_map(|partition| partition.tables_if_built())
            .try_for_each(|tree| tree.open_files())?;
        let stored =
            self.manifest_state.partitions.iter().filter_map(|(id, stored)| Some((self.by_id.get(id)?, stored)));
        stored.into_iter().try_for_each(|(partition, stored)| partition.open_unbuilt_files(stored, &self.resources))
    }

    /// Makes manifest and WAL durable before the replay if a tree is durable without the WAL. Otherwise power loss
    /// could leave a part of a commit in the tree and nothing of it in the WAL. A sync alone is not enough, as in
    /// [`make_wal_durable`](Self::make_wal_durable), so the WAL is read once before the replay.
    pub(crate) fn sync_before_replay(&self, config: &Config) -> Result<()> {
        if !self.by_id.values().any(|partition| partition.files_at_open.survives_power_loss) {
            return Ok(());
        }
        let (fs, dir, id) = (&config.fs, &config.path, self.manifest_state.id);
        let report = wal::replay(Arc::clone(fs), dir, id, self.replay_options(config), &mut |_| Ok(None))?;
        write_unsynced_again(config, &report)?;
        let manifest = fs.open(&dir.join(MANIFEST_NAME), OpenMode::Write)?;
        write_again_if_space(&*manifest, manifest.length()?)?;
        manifest.sync_data()?;
        let mut segments = self.listing.segments.keys().map(|id| segment_path(dir, *id));
        segments.try_for_each(|path| fs.open(&path, OpenMode::Write)?.sync_data())
    }

    /// Replays the WAL into the trees. Writes nothing to disk except to mapped pools.
    pub(crate) fn replay(&mut self, config: &Config) -> Result<WalReplayReport> {
        let options = self.replay_options(config);
        let manifest = config.path.join(MANIFEST_NAME);
        let (fs, id) = (Arc::clone(&config.fs), self.manifest_state.id);
        let mut report =
            wal::replay(fs, &config.path, id, options, &mut |commit| self.replay_commit(&commit, &manifest))?;
        report.has_gaps |= !self.skipped_commits.is_empty();
        self.by_id.values().try_for_each(|partition| partition.end_replay())?;
        self.resources.next_file_id.fetch_max(self.unfinished_blobs.next_file_number(), Ordering::Relaxed);
        Ok(report)
    }

    /// Replay options that follow from the manifest and from the files of the partitions.
    pub(crate) fn replay_options(&self, config: &Config) -> WalReplayOptions {
        let has_unlogged = self.by_id.values().any(|partition| partition.may_skip_wal());
        debug_assert_eq!(self.by_id.len(), self.manifest_state.partitions.len(), "all partitions are restored");
        let (mut held_in_pools, mut flushed_through) = (PartitionSeqno::default(), SeqNo::MAX);
        let mut durable_through = PartitionSeqno { seqno: self.manifest_state.all_flushed, partition: String::new() };
        for (id, stored) in &self.manifest_state.partitions {
            let Some(partition) = self.by_id.get(id) else { continue };
            let (needs_nothing, proven) = partition.wal_needs(stored, has_unlogged);
            flushed_through = flushed_through.min(needs_nothing);
            for (mark, seqno) in
                [(&mut durable_through, proven), (&mut held_in_pools, partition.highest_unlogged_seqno())]
            {
                if seqno > mark.seqno {
                    *mark = PartitionSeqno { seqno, partition: format!("partition {:?}", stored.meta.name) };
                }
            }
        }
        WalReplayOptions {
            mode: config.settings.recovery_mode,
            listed_segments: self.manifest_state.wal_segments.iter().map(|(epoch, file)| (*epoch, *file)).collect(),
            wal_end: self.manifest_state.wal_end,
            flushed_through: flushed_through.max(self.manifest_state.all_flushed).min(durable_through.seqno),
            durable_through,
            held_in_pools,
            file_number_limit: self.manifest_state.file_number_limit(),
            retains_segments: !config.settings.wal_retention.is_zero(),
        }
    }

    /// Applies one commit of the WAL to the trees. The whole commit is checked before any of its records is applied.
    ///
    /// Returns an error as a reason if the WAL must end before this commit: the commit names a partition that the
    /// manifest does not contain, or points to a value that is lost. Unless a file is damaged, such a commit was
    /// never synced. In salvage mode, such a commit is skipped instead.
    fn replay_commit(&mut self, commit: &WalCommit<'_>, manifest: &Path) -> Result<Option<Error>> {
        check_payload(commit.payload, commit.seqno_count)?;
        if commit.payload == SEQNO_GAP_PAYLOAD {
            return Ok(None);
        }
        for record in WalRecordIter::new(commit.payload) {
            if let Some(message) = unknown_to_manifest(&self.manifest_state, &record?) {
                if self.is_salvage {
                    // The partition id will be used again, so the WAL is rewritten without this commit.
                    self.skipped_commits.insert(commit.first_seqno);
                    return Ok(None);
                }
                return Ok(Some(Error::corruption(message).in_file(manifest)));
            }
        }
        if let Some(reason) = self.unfinished_blobs.check_commit(&blob_pointers(commit)?)? {
            if !self.is_salvage {
                return Ok(Some(reason));
            }
            self.skipped_commits.insert(commit.first_seqno);
            return Ok(None);
        }
        let mut seqno = commit.first_seqno;
        for record in WalRecordIter::new(commit.payload) {
            let record = record?;
            if let Some(partition) = self.by_id.get(&record.partition) {
                let entry = EntryRef { user_key: record.key, seqno, kind: record.kind, value: record.value };
                self.records += u64::from(partition.replay(entry)?);
            }
            seqno = seqno.plus(1);
        }
        debug_assert_eq!(
            seqno.0 - commit.first_seqno.0,
            u64::from(commit.seqno_count),
            "each record of a commit has a sequence number"
        );
        self.is_note_followed |= self.open_note.is_some();
        let first = commit.first_seqno;
        let note = ingest_note(commit)?;
        let is_open = note.is_some_and(|partition| !has_ended_ingest(&self.manifest_state, partition, first));
        self.open_note = is_open.then_some(first);
        if self.open_note.is_none() {
            // There are no readers yet, so the pools need not retain replaced versions.
            self.resources.last_visible.publish(SeqNo(seqno.0 - 1));
        }
        Ok(None)
    }

    /// The last sequence number in use. Pools may have used higher ones than the WAL contains.
    pub(crate) fn last_seqno(&self, report: &WalReplayReport) -> SeqNo {
        report.last_seqno.max(self.last_in_trees())
    }

    /// The highest sequence number that the files of pools had.
    pub(crate) fn last_in_trees(&self) -> SeqNo {
        self.by_id.values().map(|partition| partition.files_at_open.highest).max().unwrap_or_default()
    }

    /// Makes the replayed WAL durable: writes the part again that may not be, and syncs it. If the replay found gaps,
    /// rewrites the WAL without them, so that every later replay reads it to its end.
    fn make_wal_durable(
        &self,
        config: &Config,
        report: WalReplayReport,
        next_epoch: &Arc<AtomicU32>,
    ) -> Result<WalReplayReport> {
        let (fs, dir) = (&config.fs, &config.path);
        // Before a rewrite too, because the new manifest states that the whole WAL is durable.
        write_unsynced_again(config, &report)?;
        for segment in &report.segments {
            fs.open(&segment_path(dir, segment.file), OpenMode::Write)?.sync_data()?;
        }
        if report.has_gaps {
            let rewrite = wal::WalRewriteOptions {
                options: self.replay_options(config),
                wal: wal_options(config),
                next_epoch: Arc::clone(next_epoch),
                next_file: Arc::clone(&self.resources.next_file_id),
            };
            let was_applied = |first: SeqNo| !self.skipped_commits.contains(&first);
            return wal::rewrite_wal(fs, dir, &config.env, self.manifest_state.id, rewrite, report, &was_applied);
        }
        Ok(report)
    }

    /// As [`make_wal_durable`](Self::make_wal_durable). On a full disk, frees unneeded segments and the disk reserve,
    /// and tries once more.
    fn make_wal_durable_when_full(
        &self,
        config: &Config,
        mut report: WalReplayReport,
        reserve: &DiskReserve,
    ) -> Result<WalReplayReport> {
        let next_epoch = Arc::new(AtomicU32::new(self.manifest_state.next_wal_epoch));
        match self.make_wal_durable(config, report.clone(), &next_epoch) {
            Err(error) if error.kind() == ErrorKind::OutOfSpace => {
                match self.remove_unneeded_segments(config, &mut report) | reserve.release_all() {
                    true => self.make_wal_durable(config, report, &next_epoch),
                    false => Err(error),
                }
            }
            durable => durable,
        }
    }

    /// Removes spare segments that no recovery mode can use; false if there were none. Other spare files are kept
    /// until the new manifest is written, because they may be part of the WAL if the old manifest is damaged.
    fn remove_unneeded_segments(&self, config: &Config, report: &mut WalReplayReport) -> bool {
        let (fs, dir) = (&*config.fs, &config.path);
        let files = removable_segments(fs, dir, self.manifest_state.id, &self.replay_options(config));
        let before = report.spare_files.len();
        for file in files.unwrap_or_default() {
            if report.spare_files.contains(&file) && fs.remove_file(&segment_path(dir, file)).is_ok() {
                report.spare_files.retain(|spare| *spare != file);
            }
        }
        report.spare_files.len() < before
    }

    /// Removes the segments of rewrites that were interrupted, durably: the manifest that is written next records
    /// their epochs, and a reader of changes could take them for segments of the WAL.
    fn remove_unfinished_rewrites(&self, config: &Config, report: &mut WalReplayReport) -> Result<()> {
        let (fs, dir) = (&*config.fs, &config.path);
        if report.has_unlinked {
            for file in unfinished_rewrites(fs, dir, self.manifest_state.id, &self.replay_options(config))? {
                // The segments that this open has written are not spare files.
                if report.spare_files.contains(&file) {
                    fs.remove_file(&segment_path(dir, file))?;
                    report.spare_files.retain(|spare| *spare != file);
                }
            }
        }
        // Also if there are none: an open that was killed may have removed them. If power loss restored them after the
        // manifest was replaced, they could follow the end of the WAL that it records.
        fs.sync_dir(dir)
    }

    /// A context of no partition.
    fn context(&self) -> TreeContext {
        TreeContext::new(&self.resources, KeyOrder::bytewise(), PartitionId(0), "")
    }

    /// Makes ordinary blob files of the unfinished direct blob files, and adds them to their partitions and to the
    /// manifest state. The caller then writes the manifest.
    fn adopt_unfinished_blobs(&mut self, now_ms: u64, incomplete: IncompleteFiles) -> Result<()> {
        let context = Arc::new(self.context());
        for (id, file) in self.unfinished_blobs.adopt(&context, now_ms, incomplete)? {
            if let (Some(manifest_state), Some(partition)) =
                (self.manifest_state.partitions.get_mut(&id), self.by_id.get(&id))
            {
                debug_assert!(
                    file.number.0 < self.resources.next_file_id.load(Ordering::Relaxed),
                    "no new file gets the number of an adopted one"
                );
                let known = manifest_state.blob_files.insert(file.number, file.clone());
                debug_assert!(known.is_none(), "a direct blob file is adopted once");
                partition.add_blob_file(file);
            }
        }
        Ok(())
    }

    /// As [`adopt_unfinished_blobs`](Self::adopt_unfinished_blobs). On a full disk, finishes the files in place.
    fn adopt_unfinished_blobs_when_full(&mut self, now_ms: u64, space: &mut SpaceReclaimer<'_>) -> Result<()> {
        let mut incomplete = IncompleteFiles::Copy;
        while let Err(error) = self.adopt_unfinished_blobs(now_ms, incomplete) {
            let is_final = incomplete != IncompleteFiles::Copy || error.kind() != ErrorKind::OutOfSpace;
            // After damage, other space is freed first, because another recovery mode may need dropped values.
            if is_final || space.damaged {
                match space.reclaim(self, error) {
                    Err(error) if is_final || error.kind() != ErrorKind::OutOfSpace => return Err(error),
                    Err(_) => {}
                    Ok(()) => continue,
                }
            }
            self.resources.obsolete_files.remove_all(); // the partial copies
            incomplete = IncompleteFiles::FinishInPlace { wal_is_damaged: space.damaged };
        }
        Ok(())
    }

    pub(crate) fn finish_read_only(
        self,
        config: Config,
        report: &WalReplayReport,
        lock: Box<dyn FileLock>,
        start: u64,
    ) -> Result<Arc<DbHandle>> {
        self.resources.last_visible.publish(self.last_seqno(report));
        self.add_unfinished_blobs();
        let inner = self.into_inner(config, None, report, Some(lock), start, None);
        inner.poison.record_delivery(inner.poison.events().start_delivery());
        Ok(DbHandle::new(Arc::new(inner), worker::BackgroundThreads::default()))
    }

    fn add_unfinished_blobs(&self) {
        for (id, file) in self.unfinished_blobs.open_read_only(&self.context()) {
            if let Some(partition) = self.by_id.get(&id) {
                partition.add_unfinished_blobs(file);
            }
        }
    }

    pub(crate) fn finish_follower(
        self,
        config: Config,
        report: &WalReplayReport,
        identity: ManifestIdentity,
        start: u64,
    ) -> Result<Arc<DbHandle>> {
        let last = self.last_seqno(report);
        self.resources.last_visible.publish(last);
        self.add_unfinished_blobs();
        let partitions = self.by_id.iter().map(|(id, state)| (*id, Arc::clone(state))).collect();
        let follower = Follower::new(config.clone(), self.manifest_state.clone(), identity, partitions, report)?;
        follower.durable.fetch_max(report.durable_through.0, Ordering::Relaxed);
        let mut inner = self.into_inner(config, None, report, None, start, None);
        inner.follower = Some(Box::new(follower));
        inner.poison.record_delivery(inner.poison.events().start_delivery());
        Ok(DbHandle::new(Arc::new(inner), worker::BackgroundThreads::default()))
    }

    pub(crate) fn finish(
        mut self,
        config: Config,
        report: WalReplayReport,
        lock: Box<dyn FileLock>,
        start: u64,
    ) -> Result<Arc<DbHandle>> {
        let (fs, dir) = (&config.fs, &config.path);
        let last = self.last_seqno(&report);
        self.check_id_limits(last, &report).map_err(|error| error.in_file(dir))?;
        let log_bytes = report.segments.iter().map(|segment| segment.end_offset).sum();
        let (max, manifest_bytes) = (config.settings.disk_reserve, self.manifest_bytes);
        let checkpoint_bytes = self.catalog.checkpoint_bytes();
        let reserve =
            DiskReserve::open_existing(Arc::clone(fs), dir, max, log_bytes, checkpoint_bytes, manifest_bytes)?;
        let reserve = Arc::new(reserve);
        // In the other modes, a gap has no commit that the database does not have in tables or pools.
        let (has_lost_commits, highest_epoch) = (report.has_gaps && self.is_salvage, report.wal_end().0);
        let damaged = report.has_gaps || report.dropped_after_damage.is_some();
        let mut report = self.make_wal_durable_when_full(&config, report, &reserve)?;
        match self.remove_unfinished_rewrites(&config, &mut report) {
            Err(error) if error.kind() == ErrorKind::OutOfSpace && reserve.release_all() => {
                self.remove_unfinished_rewrites(&config, &mut report)?;
            }
            removed => removed?,
        }
        debug_assert!(!report.has_gaps, "a WAL with gaps is rewritten");
        let mut space = SpaceReclaimer { config: &config, report: &report, reserve: &reserve, damaged, stage: 0 };
        self.adopt_unfinished_blobs_when_full(config.env.now_ms(), &mut space)?;
        self.manifest_state.next_file_number = self.resources.next_file_id.load(Ordering::Relaxed);
        let (ended, end) = report.wal_end();
        // Above the positions of the last open, whose segments power loss may have removed.
        let positions = match has_lost_commits {
            true => self.manifest_state.forget_positions(highest_epoch),
            false => self.manifest_state.position_epoch(),
        };
        let ended = WalEpoch(ended.0.max(positions.0.saturating_add(1)));
        debug_assert!(end <= last, "the last sequence number is at or above the end of the WAL");
        debug_assert!(report.segments.iter().all(|segment| segment.epoch <= ended), "the WAL ends with its last epoch");
        self.manifest_state.next_wal_epoch = self.manifest_state.next_wal_epoch.max(ended.0.saturating_add(1));
        self.manifest_state.set_wal_end(ended, end);
        self.manifest_state.settings = config.settings.encode();
        self.record_file_ids();
        let mut file_id = [0; 16];
        config.env.random(&mut file_id);
        let manifest = self.create_manifest(file_id, &mut space)?;
        let retained = if space.is_full() { Vec::new() } else { report.retained.clone() };
        let kept = WalReplayReport { retained, ..report.clone() };
        let version_set = self.version_set(&config, manifest, &reserve);
        let orphans = self.remove_orphans(&config, &kept);
        let wal = Wal::start(
            Arc::clone(fs),
            dir,
            Arc::clone(&config.env),
            self.manifest_state.id,
            wal_options(&config),
            version_set.clone(),
            &kept,
            end.plus(1),
        )?;
        self.start_first_segment(&wal, &version_set, &mut space)?;
        debug_assert_eq!(wal.appended(), end, "the WAL continues where the replay ended");
        self.resources.last_visible.publish(last);
        let poison = Arc::new(DbPoison::new(config.listener.clone()));
        let writer = DbWriter::new(&config.settings, &self.catalog, Arc::new(wal), version_set, &poison, reserve);
        let inner = Arc::new(self.into_inner(config, Some(writer), &report, Some(lock), start, Some(poison)));
        inner.writer.iter().for_each(|writer| _ = writer.space.fill_reserve());
        inner.emit(&Event::Opened {
            replayed_records: inner.recovery_stats.records,
            dropped_after_damage: inner.recovery_stats.dropped_after_damage.clone(),
            orphans_removed: orphans,
        });
        let threads = worker::start(&inner)?;
        inner.poison.record_delivery(inner.poison.events().start_delivery());
        inner.write_controller.update_all(&inner.catalog);
        Ok(DbHandle::new(inner, threads))
    }

    /// Writes the new manifest. On a full disk, it lists no segment that is kept for readers of changes only.
    fn create_manifest(&mut self, file_id: [u8; 16], space: &mut SpaceReclaimer<'_>) -> Result<Manifest> {
        loop {
            let retained = space.report.retained.iter().filter(|_| !space.is_full());
            self.manifest_state.wal_segments =
                retained.chain(&space.report.segments).map(|segment| (segment.epoch, segment.file)).collect();
            let edits = self.manifest_state.edits();
            if cfg!(debug_assertions) {
                self.manifest_state.check_invariants(self.manifest_state.partitions.keys().copied());
            }
            debug_assert!(
                ManifestState::replay(&edits).map_or(true, |replayed| replayed == self.manifest_state),
                "the edits of the new manifest build the same state"
            );
            match Manifest::create(Arc::clone(&space.config.fs), &space.config.path, file_id, &edits) {
                Ok(manifest) => return Ok(manifest),
                Err(error) => space.reclaim(self, error)?,
            }
        }
    }

    /// Starts the first segment of the WAL. On a full disk, recycles the segments that are kept for readers of changes
    /// only before it frees other space.
    fn start_first_segment(&self, wal: &Wal, version_set: &VersionSet, space: &mut SpaceReclaimer<'_>) -> Result<()> {
        let mut started = wal.start_first_segment();
        if started.as_ref().is_err_and(|error| error.kind() == ErrorKind::OutOfSpace)
            && !wal.retained_segments().is_empty()
        {
            let epochs = wal.retire_retained();
            let edits: Vec<_> = epochs.iter().map(|epoch| VersionEdit::WalSegmentRemoved { epoch: *epoch }).collect();
            space.retry_when_full(self, || version_set.log_and_apply_durably(&edits))?;
            let _next_open_finds_them = wal.recycle(&epochs);
            started = wal.start_first_segment();
        }
        match started {
            Ok(()) => Ok(()),
            Err(error) => {
                space.reclaim(self, error)?;
                space.retry_when_full(self, || wal.start_first_segment())
            }
        }
    }

    /// Fails if the sequence numbers are used up, or if an epoch in the WAL is too high to be from this database.
    fn check_id_limits(&self, last: SeqNo, report: &WalReplayReport) -> Result<()> {
        if last >= SeqNo::MAX {
            return Err(Error::unsupported("the database has used up its sequence numbers: open it for reading only"));
        }
        let highest = report.wal_end().0;
        if highest.0 > self.manifest_state.next_wal_epoch.saturating_add(SKIPPED_EPOCHS_MAX) {
            let message = format!("a log segment has epoch {}, far beyond what the manifest knows", highest.0);
            return Err(Error::corruption(message));
        }
        Ok(())
    }

    /// Records the file ids of pools in the manifest state, because older versions did not write them to the
    /// manifest.
    fn record_file_ids(&mut self) {
        for (id, state) in &self.by_id {
            if let (Some(stored), Some(file_id)) =
                (self.manifest_state.partitions.get_mut(id), state.files_at_open.file_id)
            {
                stored.pool_file_id = Some(file_id);
            }
        }
    }

    fn version_set(&self, config: &Config, manifest: Manifest, reserve: &Arc<DiskReserve>) -> Arc<VersionSet> {
        let unsynced = match config.settings.has_planted_bug(PlantedBug::WalSyncBeforeBlobs) {
            true => Arc::default(),
            false => Arc::clone(&self.resources.unsynced_blobs),
        };
        let (manifest_state, next_file) = (self.manifest_state.clone(), Arc::clone(&self.resources.next_file_id));
        Arc::new(VersionSet::new(
            manifest,
            manifest_state,
            next_file,
            Arc::clone(&config.env),
            Arc::clone(reserve),
            unsynced,
            Arc::clone(&self.resources.work_available),
        ))
    }

    /// Removes tables and blob files that the manifest state does not name, segments that are neither live nor spare,
    /// and pools of partitions that do not exist. Returns the number of removed files. A failure is not fatal,
    /// because the next open finds the file again.
    fn remove_orphans(&self, config: &Config, report: &WalReplayReport) -> u64 {
        let wal_files: HashSet<FileNumber> =
            report.listed_segments().map(|s| s.file).chain(report.spare_files.iter().copied()).collect();
        let tree_files =
            self.listing.tree_files.iter().filter(|(id, _)| !self.manifest_state.partitions.contains_key(id));
        let segments = self.listing.segments.keys().filter(|id| !wal_files.contains(id));
        debug_assert!(
            self.manifest_state.wal_segments.values().all(|file| wal_files.contains(file)),
            "a listed WAL segment is not removed"
        );
        let paths = self
            .unreferenced_data_files()
            .map(|(kind, id)| self.data_path(kind, id))
            .chain(segments.map(|id| segment_path(&config.path, *id)))
            .chain(tree_files.map(|(_, path)| path.clone()));
        paths.filter(|path| config.fs.remove_file(path).is_ok()).count() as u64
    }

    /// Tables and blob files in the directory that the manifest state does not name.
    fn unreferenced_data_files(&self) -> impl Iterator<Item = (DataFileKind, FileNumber)> {
        let partitions = || self.manifest_state.partitions.values();
        let tables = partitions().flat_map(|p| p.all_tables().map(|table| (DataFileKind::Table, table.number)));
        let blobs = partitions().flat_map(|p| p.blob_files.keys().map(|id| (DataFileKind::Blob, *id)));
        let named: HashSet<(DataFileKind, FileNumber)> = tables.chain(blobs).collect();
        self.listing.data.keys().copied().filter(move |file| !named.contains(file))
    }

    fn data_path(&self, kind: DataFileKind, id: FileNumber) -> PathBuf {
        match kind {
            DataFileKind::Table => self.resources.files.path(id),
            DataFileKind::Blob => self.resources.files.blob_files().path(id),
        }
    }

    fn into_inner(
        self,
        config: Config,
        writer: Option<DbWriter>,
        report: &WalReplayReport,
        lock: Option<Box<dyn FileLock>>,
        start: u64,
        poison: Option<Arc<DbPoison>>,
    ) -> DbInner {
        let stats = RecoveryStats {
            records: self.records,
            elapsed_ns: config.env.monotonic_ns().saturating_sub(start),
            dropped_after_damage: report.dropped_after_damage.clone(),
            wal_bytes: report.segments.iter().map(|segment| segment.end_offset).sum(),
            wal_segments: report.segments.len(),
            manifest_bytes: self.manifest_bytes,
            stored_settings: Some(&self.manifest_state.settings)
                .filter(|stored| !stored.is_empty())
                .and_then(|stored| Settings::decode(stored).ok()),
        };
        let poison = poison.unwrap_or_else(|| Arc::new(DbPoison::new(config.listener.clone())));
        DbInner::new(config, self.catalog, writer, poison, stats, lock)
    }
}

/// Frees disk space while a database is opened on a full disk.
struct SpaceReclaimer<'a> {
    config: &'a Config,
    report: &'a WalReplayReport,
    reserve: &'a DiskReserve,
    /// Whether damage was skipped. Then another open needs the old WAL unchanged until the new manifest has its name.
    damaged: bool,
    stage: u32,
}

impl SpaceReclaimer<'_> {
    /// Whether something was freed.
    fn is_full(&self) -> bool {
        self.stage > 0
    }

    /// Runs `work`. While it fails because the disk is full, frees space and runs it again. One reclaimer frees space
    /// at most twice in total.
    fn retry_when_full<T>(&mut self, state: &RecoveryState, mut work: impl FnMut() -> Result<T>) -> Result<T> {
        loop {
            match work() {
                Ok(done) => return Ok(done),
                Err(error) => self.reclaim(state, error)?,
            }
        }
    }

    /// Frees space so that the work that failed with `error` can be tried again. First removes unfinished files and
    /// the unused ends of segments; if they free nothing, or in a later call, releases the disk reserve.
    ///
    /// # Errors
    /// Returns `error` if it is not `OutOfSpace` or if no space is left to free.
    fn reclaim(&mut self, state: &RecoveryState, error: Error) -> Result<()> {
        debug_assert!(self.stage <= 2, "there are two ways to free space");
        while error.kind() == ErrorKind::OutOfSpace && self.stage < 2 {
            self.stage += 1;
            let freed = match self.stage {
                1 => {
                    state.resources.obsolete_files.remove_all(); // the files of the failed attempt
                    self.remove_unfinished(state)? | self.trim_segments()
                }
                _ => self.reserve.release_all(),
            };
            if freed {
                return Ok(());
            }
        }
        Err(error)
    }

    /// Removes tables and blob files that flushes, compactions and blob GC have not finished; false if there were
    /// none. Syncs the old manifest first, because the new one is not written yet. Keeps blob files that the WAL
    /// points into.
    fn remove_unfinished(&self, state: &RecoveryState) -> Result<bool> {
        let (fs, dir) = (&self.config.fs, &self.config.path);
        fs.open(&dir.join(MANIFEST_NAME), OpenMode::Write)?.sync_data()?;
        fs.sync_dir(dir)?;
        let unfinished = state
            .unreferenced_data_files()
            .filter(|(kind, id)| *kind == DataFileKind::Table || !state.unfinished_blobs.contains(*id));
        Ok(unfinished.filter(|(kind, id)| fs.remove_file(&state.data_path(*kind, *id)).is_ok()).count() > 0)
    }

    /// Truncates replayed segments after their last record, and spare segments after their header, both to whole
    /// pages, and retained segments after their header, without which the old manifest would be damaged. False if
    /// nothing was truncated, or if damage was skipped.
    fn trim_segments(&self) -> bool {
        if self.damaged {
            return false;
        }
        let ends = self.report.segments.iter().map(|segment| (segment.file, segment.end_offset));
        let spares = self.report.spare_files.iter().map(|file| (*file, SEGMENT_HEADER_LEN as u64));
        let ends = ends.chain(spares).map(|(file, end)| (file, end.next_multiple_of(WAL_PAGE_SIZE)));
        let retained = self.report.retained.iter().map(|segment| (segment.file, SEGMENT_HEADER_LEN as u64));
        let trim = |(file, end): (FileNumber, u64)| {
            let file = self.config.fs.open(&segment_path(&self.config.path, file), OpenMode::Write)?;
            let len = file.length()?;
            if len > end { file.set_length(end).map(|()| true) } else { Ok(false) }
        };
        let trimmed: Vec<bool> = ends.chain(retained).map(|one| trim(one).unwrap_or(false)).collect();
        trimmed.contains(&true)
    }
}

fn wal_options(config: &Config) -> WalOptions {
    let settings = &config.settings;
    let (segment_size, mapped, populates_ahead) =
        (settings.wal_segment_size, settings.mapped_wal, settings.workers > 0);
    WalOptions { segment_size, mapped, populates_ahead, marks: true }
}

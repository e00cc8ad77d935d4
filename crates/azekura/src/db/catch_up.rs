//! A follower: a database that another process writes, open for reading beside the writer.
//!
//! [`Database::catch_up`] reads what the writer has done since the last call, in this order:
//! 1. The manifest, if it has changed. The tables that it names contain only commits that the WAL had before.
//! 2. The WAL, to its present end. Each commit goes to the memtables and pools that readers use, and becomes visible
//!    as a whole.
//! 3. When all commits are visible that the manifest may [need](FollowerTask::required), its tables and blob files are
//!    opened and installed, and the memtables lose what the tables contain. This changes nothing that a reader at the
//!    end of the WAL sees; readers of earlier moments keep the state that was replaced.
//!
//! Some commits are complete only together with a manifest that is read after them: an ingest, whose records are in
//! tables only. From such a commit on, commits are *held*: they become visible when the manifest that was read after
//! them is installed. An open, a reload and a checkpoint, which read the manifest once, end the WAL
//! [before](has_ended_ingest) such a commit. A commit that points into a blob file that has been replaced is read again
//! with the manifest that names the new file. If there is no newer manifest, power loss has taken the value: the WAL
//! ends before this commit, as it does for the recovery, which is still to come.
//!
//! If the WAL that comes next is gone, because the follower was too slow, or the writer has closed the database, the
//! whole database is read [again](read_again).
//!
//! Invariants:
//! - The visible state is that after a whole commit of the WAL, over all partitions.
//! - The installed manifest records the opens of the writer that have made the visible commits, so that their positions
//!   have the epochs of these opens.
//! - Every file of an installed state is open, so the writer may remove it.
//! - Nothing in the directory is created, changed, locked or removed.

use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use crate::base::event::Event;
use crate::base::manifest_state::{ManifestState, PartitionManifestState};
use crate::base::sync::lock;
use crate::base::version_edit::{PartitionId, WalEpoch};
use crate::base::{EntryRef, Error, ErrorKind, KeyOrder, RecordKind, Result, SeqNo};
use crate::db::changes::change_position::ChangePosition;
use crate::db::commit_reader::{CommitReader, WalStop};
use crate::db::config::{Config, PlantedBug};
use crate::db::database::Database;
use crate::db::follower::{
    Follower, Progress, check_not_lost, has_ended_ingest, last_named_seqno, new_tail, prepare_tree,
};
use crate::db::handle::DbHandle;
use crate::db::inner::DbInner;
use crate::db::partition_state::{PartitionState, ReplayPhase};
use crate::db::recovery::directory_listing::data_files;
use crate::db::recovery::open::{is_changed_meanwhile, open_follower, read_again};
use crate::db::recovery::recovery_state::check_followable;
use crate::db::state::background_work::WorkerStep;
use crate::engine::{Engine, EngineView, ExpiryLimits, ReadMoment, Staged, Task};
use crate::iter::InternalIter;
use crate::lsm::follow::NewerState;
use crate::lsm::tree::LsmTree;
use crate::manifest::{FollowedFiles, Manifest, ManifestIdentity};
use crate::tree::partition_tree::PartitionTree;

/// How often one call reads the manifest, before it leaves the rest to the next call.
const MANIFEST_READS_MAX: u32 = 8;
/// Bytes of commits that one call reads before it installs what the manifest names, which frees memory. No limit if the
/// manifest deletes partitions.
const READ_LEN_MAX: usize = 64 << 20;
/// How often the whole database is read again before an error of its files is reported.
const RELOADS_MAX: u32 = 20;

/// How long the thread of a poisoned follower waits at least, before it looks whether the database closes.
const POISONED_WAIT_MS: u64 = 1_000;

impl Config {
    /// Opens an existing database for reading while another process may write to it.
    ///
    /// The handle reads the state after one whole commit, over all partitions. [`catch_up`](Database::catch_up) moves
    /// it on, or a thread does at the [interval](Config::follow_interval). Snapshots and iterators keep the state they
    /// were created at. Takes no lock, writes nothing, and needs read permission only. The database may also have no
    /// writer, one that has crashed, or one that opens it later.
    ///
    /// All tables and blob files are kept open, so that the writer may remove them. The records that the writer has not
    /// flushed are in memory, in addition to those of one call of `catch_up`, or of several while files of the writer
    /// cannot be opened.
    ///
    /// # Errors
    /// As [`open_read_only`](Config::open_read_only), but not `Locked`. `Unsupported` if a pool is mapped memory, on a
    /// file system in memory or on persistent memory. `Io` if there are more tables and blob files than the process may
    /// open. `Conflict` if the writer replaces files faster than they can be opened.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use azekura::Config;
    /// let writer = Config::new(&path).open()?.open_partition("fruit", Default::default())?;
    /// writer.insert("apple", "red")?;
    /// let follower = Config::new(&path).open_follower()?; // also in another process
    /// let fruit = follower.partition("fruit")?;
    /// assert_eq!(fruit.get("apple")?.unwrap(), "red");
    /// writer.insert("pear", "green")?;
    /// assert!(fruit.get("pear")?.is_none());
    /// follower.catch_up()?;
    /// assert_eq!(fruit.get("pear")?.unwrap(), "green");
    /// # Ok(()) }
    /// ```
    pub fn open_follower(self) -> Result<Database> {
        let handle = open_follower(self)?;
        start_thread(&handle)?;
        Ok(Database { handle })
    }
}

impl Database {
    /// Reads what the writer has committed since the last call, in a [follower](Config::open_follower).
    ///
    /// Returns the position after the last commit that is visible now. It may be before the last commit of the writer,
    /// which goes on writing. If this fails, what was visible stays visible, and a later call may succeed.
    ///
    /// # Errors
    /// `Invalid` if the database is no follower. `Stale` if a recovery of the writer has lost commits that are visible
    /// here or has skipped damage, if a commit was read that the writer could not finish because the disk was full, if
    /// there were more than 64 opens with commits since the last call, of which the manifest does not tell all ends (a
    /// commit that has failed after readers could see it counts as an open), or if the follower was too slow and has
    /// missed changes of a pool whose comparator was not given yet: open the follower again. `Unsupported` if the
    /// writer has created a pool in mapped memory. `Corruption` if a file is damaged. `Io`, `Closed`.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use azekura::Config;
    /// let writer = Config::new(&path).open()?;
    /// let follower = Config::new(&path).open_follower()?;
    /// writer.open_partition("fruit", Default::default())?.insert("apple", "red")?;
    /// assert_eq!(follower.catch_up()?, writer.change_position()?);
    /// assert_eq!(follower.partition("fruit")?.get("apple")?.unwrap(), "red");
    /// # Ok(()) }
    /// ```
    pub fn catch_up(&self) -> Result<ChangePosition> {
        catch_up(&self.handle.inner)?;
        self.change_position()
    }

    /// Returns the tables and blob files of a [follower](Config::open_follower), for
    /// [`inspect::verify_follower`](crate::inspect::verify_follower).
    ///
    /// # Errors
    /// `Invalid` if the database is no follower. `Closed`.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// let db = azekura::Config::new(&path).open()?;
    /// assert!(db.followed_files().is_err());
    /// let follower = azekura::Config::new(&path).open_follower()?;
    /// let report = azekura::inspect::verify_follower(&follower.followed_files()?, &mut |_, _| {})?;
    /// assert!(report.is_clean());
    /// # Ok(()) }
    /// ```
    pub fn followed_files(&self) -> Result<FollowedFiles> {
        let inner = &self.handle.inner;
        inner.check_process()?;
        inner.check_open()?;
        let no_follower = || Error::invalid("the database is no follower: open it with open_follower");
        let manifest_state = inner.follower.as_ref().ok_or_else(no_follower)?.manifest_state();
        let files = Arc::clone(&inner.catalog.resources().files);
        Ok(FollowedFiles { manifest_state, files, fs: Arc::clone(&inner.fs), dir: inner.dir.clone() })
    }
}

/// Starts the thread of a follower, if it has an interval.
fn start_thread(handle: &DbHandle) -> Result<()> {
    let inner = &handle.inner;
    if let Some(interval) = inner.follower.as_ref().and_then(|follower| follower.config.follow_interval) {
        let follower = Arc::clone(inner);
        let body = Box::new(move || catch_up_periodically(&follower, interval));
        handle.add_thread(inner.env.spawn("azekura-follow", body)?);
    }
    Ok(())
}

/// Catches up at this interval, from the begin of a call to that of the next, until the database closes, but not once
/// it is poisoned. A quarter of the interval is always a pause. The listener hears of an error once, until it ends.
fn catch_up_periodically(inner: &DbInner, interval: Duration) {
    let ms = u64::try_from(interval.as_millis()).unwrap_or(u64::MAX).clamp(1, 1 << 40);
    let (mut has_failed, mut pause) = (false, ms);
    loop {
        let wait = if inner.poison.is_set() { ms.max(POISONED_WAIT_MS) } else { pause };
        match inner.background.next_follower_step(wait) {
            WorkerStep::Close(close) => return close(),
            WorkerStep::End => return,
            WorkerStep::FindTask { .. } if inner.poison.is_set() => continue,
            WorkerStep::FindTask { .. } => {}
        }
        let begin = inner.env.monotonic_ns();
        let failed = catch_up(inner).err().filter(|error| error.kind() != ErrorKind::Closed);
        if let Some(error) = failed.clone().filter(|_| !has_failed) {
            inner.emit(&Event::BackgroundError { error });
        }
        has_failed = failed.is_some();
        let took_ms = inner.env.monotonic_ns().saturating_sub(begin) / 1_000_000;
        pause = ms.saturating_sub(took_ms).max(ms / 4).max(1);
    }
}

/// Reads what the writer has committed since the last call, and makes it visible.
///
/// # Errors
/// `Invalid` if the database is no follower; `Stale` if it has lost commits that were visible here; `Unsupported` for a
/// pool in mapped memory; `Closed`; those of the files.
fn catch_up(inner: &DbInner) -> Result<()> {
    let _call = inner.begin_api_call();
    let no_follower = || Error::invalid("the database is no follower: open it with open_follower");
    let follower = inner.follower.as_ref().ok_or_else(no_follower)?;
    inner.check_outside()?;
    inner.poison.check()?;
    let _work = inner.begin_work()?;
    // While this lock is held, no tree is built.
    let _ddl_guard = lock(&inner.partition_ddl_lock);
    let mut progress = lock(&follower.progress);
    let done = inner.catch_panics(|| FollowerTask { inner, follower, progress: &mut progress }.run());
    inner.obsolete_files().remove_all();
    done
}

/// A partition with a newer state of the manifest.
struct ChangedPartition<'a> {
    partition: Arc<PartitionState>,
    stored: &'a PartitionManifestState,
    /// The partition as it was read again. It has the memtables, or the records that wait for the comparator.
    read: Option<Arc<PartitionState>>,
}

/// One call of [`Database::catch_up`].
struct FollowerTask<'a> {
    inner: &'a DbInner,
    follower: &'a Follower,
    progress: &'a mut Progress,
}

impl FollowerTask<'_> {
    fn run(&mut self) -> Result<()> {
        let advanced = if self.progress.torn.is_some() { self.reload() } else { self.advance() };
        match advanced {
            Err(error) if error.kind() == ErrorKind::Stale && self.has_bug(PlantedBug::FollowerMissesRecycling) => {}
            // A file that was damaged or removed, or the next part of the WAL is gone.
            Err(error) if error.kind() == ErrorKind::Stale || is_changed_meanwhile(&error) => self.reload()?,
            advanced => advanced?,
        }
        self.drop_versions()
    }

    fn has_bug(&self, bug: PlantedBug) -> bool {
        self.follower.config.settings.has_planted_bug(bug)
    }

    fn advance(&mut self) -> Result<()> {
        let mut missing: Option<(ManifestIdentity, Error)> = None;
        for _ in 0..MANIFEST_READS_MAX {
            match self.try_advance() {
                Ok(true) => return Ok(()),
                Ok(false) => missing = None,
                // The writer has removed files that the manifest names, so there is a newer one.
                Err(error) if error.is_missing_file() => {
                    self.progress.identity = ManifestIdentity::default();
                    let identity = self.identity()?;
                    if missing.as_ref().is_some_and(|(before, _)| *before == identity) {
                        return Err(error);
                    }
                    missing = Some((identity, error));
                }
                Err(error) => return Err(error),
            }
        }
        missing.map_or(Ok(()), |(_, error)| Err(error))
    }

    fn identity(&self) -> Result<ManifestIdentity> {
        let Config { fs, path, .. } = &self.follower.config;
        Manifest::identity(&**fs, path)
    }

    /// True if the end of the WAL was reached, with a manifest that has not changed since.
    fn try_advance(&mut self) -> Result<bool> {
        self.read_manifest()?;
        let mut stop = self.read_wal()?;
        if let WalStop::BeforeUnknown(last) = stop
            && self.is_current()?
        {
            if last <= self.follower.durable() {
                let message = "the log has a synced commit of which the manifest or a blob file has lost a part";
                return Err(Error::corruption(message).in_file(&self.follower.config.path));
            }
            stop = WalStop::End;
        }
        let is_installed = self.install(stop)?;
        Ok(is_installed && stop == WalStop::End && self.progress.held_from.is_none() && self.is_current()?)
    }

    /// Whether the manifest that was read last has not changed. Then the open that has written it has written all
    /// commits that were read before.
    fn is_current(&self) -> Result<bool> {
        Ok(self.identity()? == self.progress.identity)
    }

    /// Reads the manifest, if it has changed, and the files of new partitions.
    fn read_manifest(&mut self) -> Result<()> {
        let Config { fs, path, .. } = &self.follower.config;
        // Whichever open has begun this segment has recorded the end of the WAL in the manifest before.
        let entered = self.progress.tail.epoch();
        let identity = self.identity()?;
        if identity != self.progress.identity {
            let loaded = Manifest::load(Arc::clone(fs), path)?;
            let state = ManifestState::replay(&loaded.edits)?;
            self.check_history(&state)?;
            for (id, stored) in &state.partitions {
                check_followable(&stored.meta)?;
                if !self.progress.partitions.contains_key(id) {
                    let partition = self.read_partition(&state, stored)?;
                    self.progress.partitions.insert(*id, partition);
                }
            }
            // The length was read before the edits, so an edit that was added meanwhile is noticed next time.
            self.progress.identity = identity;
            self.progress.next = Some(Arc::new(state));
        }
        self.progress.epoch = entered.unwrap_or(self.progress.epoch);
        self.release_held();
        Ok(())
    }

    /// The log has to be visible up to here before the manifest that was read last is installed: its tables contain
    /// these commits, or the pools that were read for it, perhaps later.
    fn required(&self) -> SeqNo {
        let installed = self.follower.manifest_state();
        let Some(next) = &self.progress.next else { return last_named_seqno(&installed) };
        let new = self.progress.partitions.iter().filter(|(id, _)| !installed.partitions.contains_key(id));
        new.map(|(_, pool)| pool.files_at_open.highest).fold(last_named_seqno(next), SeqNo::max)
    }

    /// Whether the manifest that was read last lacks partitions that readers see. The edit of a deletion names no
    /// commit: all commits that the log had when the manifest was read have to be visible before it is installed.
    fn deletes_partitions(&self) -> bool {
        let (next, installed) = (&self.progress.next, self.follower.manifest_state());
        let is_deleted = |id| next.as_ref().is_some_and(|next| !next.partitions.contains_key(id));
        next.is_some() && installed.partitions.keys().any(is_deleted)
    }

    /// The manifest state that was read last.
    fn known(&self) -> Arc<ManifestState> {
        self.progress.next.clone().unwrap_or_else(|| self.follower.manifest_state())
    }

    /// The commits that are held wait for the manifest that was read just now, unless it may have been read before the
    /// tables of an ingest were installed.
    fn release_held(&mut self) {
        let known = self.known();
        let progress = &mut *self.progress;
        if let Some((partition, seqno)) = progress.note {
            if !has_ended_ingest(&known, partition, seqno) {
                // Those before the ingest do not wait for it.
                if progress.held_from.is_some_and(|first| first < seqno) {
                    progress.held_from = Some(seqno);
                    progress.waits_for_install = true;
                }
                return;
            }
            progress.note = None;
        }
        progress.waits_for_install |= progress.held_from.take().is_some();
    }

    /// Checks that a manifest is of this database, and that no commits were read that a recovery has lost since, or
    /// that have failed since on a full disk.
    fn check_history(&self, state: &ManifestState) -> Result<()> {
        self.follower.check_same_database(state)?;
        let (last, visible) = (self.progress.tail.last_seqno(), self.inner.last_visible.get());
        // A later open may use the epochs of segments again that power loss has removed, but not those of positions.
        check_not_lost(state, self.progress.epoch, last)?;
        check_not_lost(state, self.follower.manifest_state().position_epoch(), last.min(visible))
    }

    /// Reads a partition that is not known yet.
    fn read_partition(&self, state: &ManifestState, stored: &PartitionManifestState) -> Result<Arc<PartitionState>> {
        let catalog = &self.inner.catalog;
        catalog.resources().note_file_numbers(state);
        let files = data_files(&self.follower.config)?;
        let partition = catalog.read_partition(stored.clone(), &files)?;
        if let Some(tree) = partition.tables_if_built() {
            tree.open_files()?;
        }
        partition.open_unbuilt_files(stored, catalog.resources())?;
        partition.end_replay()?;
        prepare_tree(&partition)?;
        Ok(partition)
    }

    /// Applies the next commits of the WAL.
    fn read_wal(&mut self) -> Result<WalStop> {
        let known = self.known();
        self.follower.take_over_ends(&known, self.progress.identity.0);
        let installed = self.follower.manifest_state();
        let (required, tears_commits) = (self.required(), self.has_bug(PlantedBug::FollowerTearsCommits));
        let len_max = if self.deletes_partitions() { usize::MAX } else { READ_LEN_MAX };
        let mut len = 0;
        self.progress.tail.note_known_epochs(WalEpoch(known.next_wal_epoch));
        loop {
            self.progress.tail.locate()?;
            let found = self.progress.tail.epoch();
            let epoch = found.unwrap_or(self.progress.epoch);
            // An open creates a manifest before it begins a segment, and so does the commit behind one that has failed.
            if epoch > self.progress.epoch && self.identity()?.0 != self.progress.identity.0 {
                return Ok(WalStop::BeforeOpen);
            }
            let progress = &mut *self.progress;
            progress.epoch = epoch;
            if let Some(found) = found {
                self.follower.note_epoch(found);
            }
            let mut reader = CommitReader {
                inner: self.inner,
                partitions: &progress.partitions,
                known: &known,
                installed: &installed,
                held_from: &mut progress.held_from,
                waits_for_install: &mut progress.waits_for_install,
                torn: &mut progress.torn,
                note: &mut progress.note,
                stop: None,
                checks_values: epoch <= progress.epoch_at_open,
                tears_commits,
            };
            let recorded_end = |epoch| known.end_of_segment(epoch);
            let read = progress.tail.read_segment(SeqNo::MAX, &recorded_end, &mut |commit| {
                reader.inner.check_open()?; // `close` waits for this call
                reader.apply(&commit)?;
                len += commit.payload.len();
                let last = SeqNo(commit.first_seqno.0 + u64::from(commit.seqno_count) - 1);
                Ok(len < len_max || last < required)
            });
            let stop = reader.stop;
            self.follower.note_durable(required, &progress.tail);
            match stop {
                Some(stop) => return Ok(stop),
                None if !read? => return Ok(WalStop::End),
                None => {}
            }
        }
    }

    /// Installs the manifest that was read, and makes the commits visible that were read and do not wait for a newer
    /// one. False if commits wait that it names, or that may precede a deletion in it.
    fn install(&mut self, stop: WalStop) -> Result<bool> {
        let progress = &mut *self.progress;
        let end = progress.held_from.map_or(progress.tail.last_seqno(), |first| SeqNo(first.0 - 1));
        let Some(next) = progress.next.clone() else {
            self.inner.last_visible.publish(end.max(self.inner.last_visible.get())); // gaps too
            progress.waits_for_install = false;
            return Ok(true);
        };
        let held_from = progress.held_from;
        // The manifest lacks the ingest that the last commit announces, so the ingest does not precede it. A killed
        // writer may never end the ingest.
        let last = progress.tail.last_seqno();
        let only_ingest_is_held = held_from == Some(last) && progress.note.is_some_and(|(_, seqno)| seqno == last);
        let is_at_end = stop == WalStop::End && (held_from.is_none() || only_ingest_is_held);
        if end < self.required() || (!is_at_end && self.deletes_partitions()) {
            return match (stop, held_from) {
                (WalStop::End, None) => Err(Error::stale("the log does not contain commits that the manifest names")),
                _ => Ok(false),
            };
        }
        let installed = self.follower.manifest_state();
        let changed = |id: &PartitionId, stored: &PartitionManifestState| installed.partitions.get(id) != Some(stored);
        let mut states = Vec::new();
        for (id, stored) in next.partitions.iter().filter(|(id, stored)| changed(id, stored)) {
            states.push(ChangedPartition { partition: Arc::clone(&self.progress.partitions[id]), stored, read: None });
        }
        self.replace(&next, self.progress.identity.0, states, end)?;
        self.progress.next = None;
        self.progress.waits_for_install = false;
        Ok(true)
    }

    /// Installs `next` of the manifest `file_id`, and publishes `end`.
    fn replace(
        &mut self,
        next: &Arc<ManifestState>,
        file_id: [u8; 16],
        states: Vec<ChangedPartition<'_>>,
        end: SeqNo,
    ) -> Result<()> {
        let forgets_snapshots = self.has_bug(PlantedBug::FollowerForgetsSnapshots);
        let (inner, progress) = (self.inner, &mut *self.progress);
        inner.catalog.resources().note_file_numbers(next);
        let mut newer: Vec<(Arc<LsmTree>, NewerState)> = Vec::new();
        let mut views: Vec<(PartitionId, Arc<dyn EngineView>)> = Vec::new();
        let mut pools = Vec::new();
        for ChangedPartition { partition, stored, read } in &states {
            inner.catalog.follow(partition, stored)?;
            if let Some(tree) = partition.tables_if_built() {
                tree.limit_memtables();
                let memtables = read.as_ref().and_then(|read| read.tables_if_built());
                newer.push((Arc::clone(tree), tree.open_newer(stored, memtables.map(|tree| &**tree))?));
                views.push((partition.id, Arc::from(tree.view())));
            }
            // After an error the next call tries again: the pool does not need it.
            let again = partition.read_pool_again(stored, inner.catalog.resources(), end).unwrap_or_default();
            views.extend(partition.unbuilt_view(again.is_some()).map(|view| (partition.id, view)));
            pools.push(again);
            partition.open_unbuilt_files(stored, inner.catalog.resources())?;
        }
        // Nothing fails from here on.
        let (resources, last) = (inner.catalog.resources(), progress.tail.last_seqno());
        for (ChangedPartition { partition, stored, read }, again) in states.iter().zip(pools) {
            read.iter().for_each(|read| partition.replace_pending(read, last));
            partition.follow_unbuilt(stored, again, resources);
        }
        let mut deleted = Vec::new();
        progress.partitions.retain(|id, partition| {
            let stays = next.partitions.contains_key(id);
            deleted.extend((!stays).then(|| Arc::clone(partition)));
            stays
        });
        let trees = deleted.iter().filter_map(|gone| Some((gone.id, Arc::from(gone.tree_if_built()?.view()))));
        views.extend(trees);
        if forgets_snapshots {
            views.clear();
        }
        // Before its commits are visible.
        self.follower.install(next, file_id);
        inner.snapshots.replace_states(end.max(inner.last_visible.get()), views, || {
            newer.into_iter().for_each(|(tree, state)| tree.install_newer(state));
            for gone in &deleted {
                gone.mark_deleted();
                inner.catalog.remove(&gone.name);
            }
            progress.partitions.values().for_each(|partition| inner.catalog.insert(partition));
        });
        deleted.iter().for_each(|gone| gone.discard(inner.obsolete_files()));
        Ok(())
    }

    /// Reads the whole database again. Repeats this only if the result may be another one: if the writer has changed
    /// the manifest, or if parts were read at different times.
    fn reload(&mut self) -> Result<()> {
        for attempt in 1.. {
            let before = self.identity().ok();
            match self.try_reload() {
                Err(error) if attempt < RELOADS_MAX && is_changed_meanwhile(&error) => {
                    if error.kind() != ErrorKind::Conflict && self.identity().ok() == before {
                        return Err(error);
                    }
                }
                reloaded => return reloaded,
            }
            self.inner.check_open()?;
        }
        Ok(())
    }

    fn try_reload(&mut self) -> Result<()> {
        let config = &self.follower.config;
        let mut small = config.clone();
        small.settings.cache_size = 1 << 20;
        let again = read_again(&small, &|| self.inner.check_open())?;
        self.check_history(&again.manifest_state)?;
        // Not before the records that an attempt has applied in part, either.
        let least = self.inner.last_visible.get().max(self.progress.torn.unwrap_or_default());
        if again.last_seqno < least {
            let message =
                format!("the database ends at sequence number {} now, before what was read", again.last_seqno);
            return Err(Error::stale(message));
        }
        let mut states = Vec::new();
        for (id, stored) in &again.manifest_state.partitions {
            let Some(read) = again.partitions.get(id) else { continue };
            let known = match self.progress.partitions.get(id) {
                Some(known) => Arc::clone(known),
                None => {
                    let partition = self.read_partition(&again.manifest_state, stored)?;
                    // The image of a pool is read a second time here. A newer one may lack keys that `again` has.
                    if partition.files_at_open.highest > again.last_seqno {
                        return Err(Error::new(ErrorKind::Conflict, "a new pool was written while it was read"));
                    }
                    self.progress.partitions.insert(*id, Arc::clone(&partition));
                    partition
                }
            };
            known.check_pending(read, self.progress.tail.last_seqno())?;
            if let Some(tree) = known.tree_if_built() {
                // The comparator of the partition is known here only.
                let options = read.stored_options()?.tree(again.resources.default_codec);
                read.build_tree(&again.resources, tree.key_order().clone(), &options, ReplayPhase::After)?;
            }
            for (_, file, end) in again.direct_blobs.iter().filter(|(partition, ..)| partition == id) {
                if !known.follow_direct_file(self.inner.catalog.resources(), *file, *end)? {
                    return Err(Error::new(ErrorKind::Conflict, "a blob file was removed while it was read"));
                }
            }
            states.push(ChangedPartition { partition: known, stored, read: Some(Arc::clone(read)) });
        }
        for ChangedPartition { partition, read, .. } in &states {
            let read = read.as_ref().and_then(|read| read.tree_if_built());
            if let (Some(PartitionTree::Pmem(tree)), Some(PartitionTree::Pmem(read))) =
                (partition.tree_if_built(), read)
            {
                let (applied, end) = (self.applied_to_pools(), again.last_seqno);
                if end < applied {
                    return Err(Error::stale("a pool has commits behind the end of the database"));
                }
                // Until the new state is installed, pools have records that the log would bring again.
                self.progress.torn = Some(end);
                tree.complete_range_deletes()?; // an attempt may have failed before it has
                copy_changes(&**read, &**tree, (applied, end), &self.inner.snapshots.expiry_limits())?;
            }
        }
        self.replace(&again.manifest_state, again.identity.0, states, again.last_seqno)?;
        let progress = &mut *self.progress;
        progress.tail = new_tail(config, &again.manifest_state, again.wal_seqno);
        (progress.identity, progress.next) = (again.identity, None);
        (progress.held_from, progress.waits_for_install, progress.note) = (None, false, None);
        progress.torn = None;
        progress.epoch = again.wal_epoch;
        Ok(())
    }

    /// Pools have every commit up to here. They may have a part of a later one.
    fn applied_to_pools(&self) -> SeqNo {
        let last = self.progress.tail.last_seqno();
        // A note changes no pool, and reading the database again ends before it until the ingest has ended.
        let is_note = self.progress.note.is_some_and(|(_, seqno)| seqno == last);
        SeqNo(last.0 - u64::from(is_note)).max(self.inner.last_visible.get())
    }

    /// Frees the replaced versions of pools that no reader needs, and removes expired records: the WAL does not tell
    /// when the writer removes them.
    fn drop_versions(&self) -> Result<()> {
        for partition in self.progress.partitions.values() {
            if let Some(PartitionTree::Pmem(tree)) = partition.tree_if_built() {
                while tree.next_task(false, &[Task::Flush]) == Some(Task::Compact)
                    && !self.inner.background.is_closing()
                {
                    tree.run(Task::Compact, false, self.inner)?;
                }
            }
        }
        Ok(())
    }
}

/// Changes the records of the pool `to` to those of the pool `from`, which is the same pool at `end`, a later moment.
/// `to` has all changes up to `applied`, and may have some later ones.
///
/// # Errors
/// `Stale` if `to` has a change of another history; those of the pools.
fn copy_changes(
    from: &dyn Engine,
    to: &dyn Engine,
    (applied, end): (SeqNo, SeqNo),
    expiry_limits: &ExpiryLimits,
) -> Result<()> {
    let (order, at) = (to.key_order(), ReadMoment::from(SeqNo::MAX));
    let unbounded = (Bound::Unbounded, Bound::Unbounded);
    let (mut new, mut old) = (from.view().iter(at, unbounded)?, to.view().iter(at, unbounded)?);
    new.seek_to_first()?;
    old.seek_to_first()?;
    let failed_since = || Error::stale("a pool has a change of a commit that was read and has failed since");
    // Collected first, because the iterators read the pool that is changed.
    let mut changes: Vec<(Vec<u8>, SeqNo, RecordKind, Vec<u8>)> = Vec::new();
    loop {
        let (is_new, is_old) = match (new.current(), old.current()) {
            (None, None) => break,
            (Some(_), None) => (true, false),
            (None, Some(_)) => (false, true),
            (Some(new), Some(old)) => {
                let order = order.cmp(new.user_key, old.user_key);
                (order.is_le(), order.is_ge())
            }
        };
        let newest = new.current().filter(|_| is_new);
        let before = old.current().filter(|_| is_old);
        // One that has expired may be gone without a commit.
        let lives = |entry: &EntryRef<'_>| Ok(!entry.kind.is_tombstone() && !expiry_limits.is_expired(entry)?);
        let is_lost = match (&newest, &before) {
            // `to` has removed it, and has retained it for readers before the commit that has removed it.
            (Some(newest), None) => newest.seqno <= applied && lives(newest)?,
            // The commit that has removed it would be a later one. What has expired may be gone without one, also if
            // a snapshot needs it, because the writer does not know the snapshots of a follower.
            (None, Some(before)) => {
                before.seqno >= end && !before.kind.is_tombstone() && !expiry_limits.is_expired_now(before)?
            }
            _ => false,
        };
        if is_lost {
            return Err(failed_since());
        }
        match (newest, before) {
            (Some(newest), Some(before)) if newest.seqno == before.seqno => {
                if (newest.kind, newest.value) != (before.kind, before.value) {
                    return Err(failed_since());
                }
            }
            // A later state of the same history has no older record of a key, except of one that was removed.
            (Some(newest), Some(before)) if newest.seqno < before.seqno && !before.kind.is_tombstone() => {
                return Err(failed_since());
            }
            (Some(EntryRef { user_key, seqno, kind, value }), _) => {
                changes.push((user_key.to_vec(), seqno, kind, value.to_vec()));
            }
            (None, Some(before)) if !before.kind.is_tombstone() => {
                changes.push((before.user_key.to_vec(), end, RecordKind::Delete, Vec::new()));
            }
            (None, _) => {}
        }
        for iter in [is_new.then_some(&mut new), is_old.then_some(&mut old)].into_iter().flatten() {
            next_user_key(iter, order)?;
        }
    }
    drop((new, old));
    for (key, seqno, kind, value) in &changes {
        to.apply(EntryRef { user_key: key, seqno: *seqno, kind: *kind, value }, Staged::Nothing)?;
    }
    Ok(())
}

/// Moves to the first entry of the next key.
fn next_user_key(iter: &mut Box<dyn InternalIter>, order: &KeyOrder) -> Result<()> {
    let key = iter.entry().user_key.to_vec();
    while iter.current().is_some_and(|entry| order.cmp(entry.user_key, &key).is_eq()) {
        iter.next()?;
    }
    Ok(())
}

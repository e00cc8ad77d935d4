//! State of an open database that all of its handles share ([`DbInner`]), and the write path up to group commit.
//!
//! The parts of the state have their fields and locks for themselves: [`BackgroundWork`], [`WriteBufferManager`],
//! [`WriteController`], and, if the database is open for writing ([`DbWriter`]), [`Committer`], [`SpaceManager`] and
//! [`WalMaintenance`].

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use crate::base::blob_pointer::BlobPointer;
use crate::base::event::{DroppedAfterDamage, Event};
use crate::base::key::put_expiry;
use crate::base::merge_operator::MergeOperator;
use crate::base::sync::lock;
use crate::base::version_edit::{PartitionEdit, VersionEdit};
use crate::base::{Error, ErrorKind, RecordKind, Result, SeqNo};
use crate::db::catalog::Catalog;
use crate::db::commit::{CommitOutcome, Committer};
use crate::db::config::{Config, PersistMode, PlantedBug, Settings};
use crate::db::follower::Follower;
use crate::db::limits::space_manager::SpaceManager;
use crate::db::limits::wal_maintenance::WalMaintenance;
use crate::db::limits::write_buffer_manager::WriteBufferManager;
use crate::db::limits::write_controller::WriteController;
use crate::db::partition_state::PartitionState;
use crate::db::state::background_work::BackgroundWork;
use crate::db::state::db_counters::DbCounters;
use crate::db::state::disk_reserve::{DiskReserve, ReserveUse};
use crate::db::state::poison::DbPoison;
use crate::db::state::version_set::VersionSet;
use crate::db::state::work_tracker::{WorkGuard, WriteMark, is_at_work};
use crate::db::writes::staged_records::{StagedGuard, StagedRecords};
use crate::db::writes::write_batch::{WriteBatch, append_record};
use crate::engine::{EngineHost, LastVisibleSeqno, SnapshotList, Staged};
use crate::table::obsolete_files::ObsoleteFiles;
use crate::vfs::open_files::DataFileKind;
use crate::vfs::{Env, FileLock, Fs};
use crate::wal::Wal;
use crate::wal::format::{WalRecord, record_len};

/// The parts of a database that only a database opened for writing has.
pub(crate) struct DbWriter {
    pub(crate) version_set: Arc<VersionSet>,
    pub(crate) wal: Arc<Wal>,
    pub(crate) committer: Committer,
    pub(crate) space: SpaceManager,
    pub(crate) wal_maintenance: WalMaintenance,
}

impl DbWriter {
    /// Creates the writer of a recovered database, whose last sequence number is visible.
    pub(crate) fn new(
        settings: &Settings,
        catalog: &Arc<Catalog>,
        wal: Arc<Wal>,
        version_set: Arc<VersionSet>,
        poison: &Arc<DbPoison>,
        reserve: Arc<DiskReserve>,
    ) -> DbWriter {
        let visible = catalog.resources().last_visible.clone();
        DbWriter {
            committer: Committer::new(Arc::clone(&wal), visible, Arc::clone(poison), Arc::clone(&reserve)),
            wal_maintenance: WalMaintenance::new(settings, catalog, &wal, &version_set, poison, &reserve),
            space: SpaceManager::new(reserve, &wal, &version_set, catalog),
            version_set,
            wal,
        }
    }
}

/// Result of recovery, for metrics.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecoveryStats {
    pub(crate) records: u64,
    pub(crate) elapsed_ns: u64,
    pub(crate) dropped_after_damage: Option<DroppedAfterDamage>,
    /// Bytes of the live segments of the write-ahead log (WAL) that recovery read. `manifest_bytes` is the same for
    /// the manifest.
    pub(crate) wal_bytes: u64,
    pub(crate) wal_segments: usize,
    pub(crate) manifest_bytes: u64,
    /// The settings in the manifest, if it has any.
    pub(crate) stored_settings: Option<Settings>,
}

/// State of an open database that is independent of any single handle. Thread safe.
pub(crate) struct DbInner {
    pub(crate) fs: Arc<dyn Fs>,
    pub(crate) env: Arc<dyn Env>,
    pub(crate) dir: PathBuf,
    pub(crate) settings: Settings,
    pub(crate) catalog: Arc<Catalog>,
    pub(crate) last_visible: LastVisibleSeqno,
    pub(crate) snapshots: Arc<SnapshotList>,
    /// `None` when opened read-only.
    pub(crate) writer: Option<DbWriter>,
    /// Set in a follower.
    pub(crate) follower: Option<Box<Follower>>,
    pub(crate) poison: Arc<DbPoison>,
    pub(crate) counters: DbCounters,
    pub(crate) recovery_stats: RecoveryStats,
    pub(crate) background: BackgroundWork,
    /// Held while a partition is created or deleted, so that these operations do not overlap.
    pub(crate) partition_ddl_lock: Mutex<()>,
    pub(crate) write_buffers: Arc<WriteBufferManager>,
    pub(crate) write_controller: WriteController,
    dir_lock: Mutex<Option<Box<dyn FileLock>>>,
}

/// Bytes that a record of a prepared commit or a single change is assumed to change in addition to its own: one page
/// of a pool.
const POOL_PAGE: u64 = 4096;

/// An ingest is delayed as a commit of this size, because it adds at most one run to level 0.
const INGEST_DELAY_BYTES: u64 = 1 << 20;

/// A value that is written to a partition.
pub(crate) struct ValueWrite<'a> {
    pub(crate) value: &'a [u8],
    /// The expiry time, if the value expires.
    pub(crate) expires_ms: Option<u64>,
    /// How durable the commit will be.
    pub(crate) mode: PersistMode,
}

/// Guard of a call of the public interface, made by [`DbInner::begin_api_call`].
pub(crate) struct ApiCallGuard<'a>(&'a DbInner);

impl Drop for ApiCallGuard<'_> {
    fn drop(&mut self) {
        // Inside work, the listener could not close the database. The call that runs the work delivers the events.
        // In a forked child, the lock on the events may never be released.
        if !std::thread::panicking() && !is_at_work() && !self.0.is_forked() {
            let poison = &self.0.poison;
            poison.record_delivery(poison.events().deliver_at_call_end());
        }
    }
}

impl DbInner {
    /// Creates the state of a recovered database, which holds the lock of its directory, unless it is a follower.
    pub(crate) fn new(
        config: Config,
        catalog: Arc<Catalog>,
        writer: Option<DbWriter>,
        poison: Arc<DbPoison>,
        recovery_stats: RecoveryStats,
        dir_lock: Option<Box<dyn FileLock>>,
    ) -> DbInner {
        let resources = catalog.resources();
        debug_assert_eq!(resources.read_only, writer.is_none());
        let memory = Arc::clone(&resources.memtable_memory);
        let write_buffers = Arc::new(WriteBufferManager::new(memory, &config.settings));
        let write_controller =
            WriteController::new(Arc::clone(&config.env), Arc::clone(&write_buffers), &config.settings);
        DbInner {
            fs: config.fs,
            env: config.env,
            dir: config.path,
            settings: config.settings,
            last_visible: resources.last_visible.clone(),
            snapshots: Arc::clone(&resources.snapshots),
            background: BackgroundWork::new(Arc::clone(&resources.work_available)),
            catalog,
            writer,
            poison,
            counters: DbCounters::default(),
            recovery_stats,
            partition_ddl_lock: Mutex::new(()),
            write_buffers,
            write_controller,
            follower: None,
            dir_lock: Mutex::new(dir_lock),
        }
    }

    /// The parts that only a database opened for writing has.
    ///
    /// # Errors
    /// `Closed` after close and in a forked child, `Invalid` if opened read-only, `Poisoned`.
    pub(crate) fn writer(&self) -> Result<&DbWriter> {
        self.check_process()?; // first, because a forked child may wait forever for a lock
        self.poison.check()?;
        self.check_open()?;
        self.writer.as_ref().ok_or_else(|| Error::invalid("the database is open for reading only"))
    }

    /// As [`SnapshotList::is_forked`].
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        self.snapshots.is_forked()
    }

    /// Fails with `Closed` in a forked child.
    #[inline]
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.is_forked() { Err(forked_error()) } else { Ok(()) }
    }

    /// Fails with `Closed` once the database closes.
    #[inline]
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.background.is_closing() { Err(closed_error()) } else { Ok(()) }
    }

    /// Replaces the result of a read by `Closed` if the database has closed meanwhile, because another process may
    /// change the files of a closed database. Called after the read. Takes a reference, because moving the result
    /// costs more than this check.
    #[inline]
    pub(crate) fn check_read<T>(&self, read: &mut Result<T>) {
        if !self.is_open_after_read() {
            *read = Err(closed_error());
        }
    }

    /// As [`BackgroundWork::is_open_after_read`].
    #[inline]
    pub(crate) fn is_open_after_read(&self) -> bool {
        self.background.is_open_after_read()
    }

    /// Releases the directory, at the end of closing. Another process may change its files from now on.
    pub(crate) fn release_dir_lock(&self) {
        debug_assert!(self.background.begin().is_none(), "all work has ended");
        debug_assert!(self.catalog.all().iter().all(|partition| !partition.is_open()), "handles return `Closed`");
        *lock(&self.dir_lock) = None;
    }

    /// Begins work that changes files. No event is delivered before the work has ended, because the listener may drop
    /// the last handle.
    ///
    /// # Errors
    /// `Closed` once the database closes, and in a forked child.
    pub(crate) fn begin_work(&self) -> Result<WorkGuard<'_>> {
        self.check_process()?;
        self.background.begin().ok_or_else(closed_error)
    }

    /// Runs code that may call a comparator. A panic in it poisons the database.
    pub(crate) fn catch_panics<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let _work = self.background.begin(); // `None` once the database has stopped work
        self.poison.catch_panics("a comparator or a task panicked", work)
    }

    /// For calls that may wait for locks, until work has ended or until other writes have ended. Fails with `Closed` in
    /// a forked child, where a lock may never be released, and with `Invalid` inside work and writes.
    pub(crate) fn check_outside(&self) -> Result<()> {
        self.check_process()?;
        check_not_called_back()
    }

    /// The obsolete files. A thread that removes them must have begun work.
    pub(crate) fn obsolete_files(&self) -> &ObsoleteFiles {
        &self.catalog.resources().obsolete_files
    }

    /// Encodes a value that may be large or expires as the last record of `payload`. A large one is staged in `staged`,
    /// and the record has the pointer. Returns the length of the encoded value.
    ///
    /// # Errors
    /// `Invalid` if the payload would be too large; those of [`stage`](DbInner::stage). Nothing is added.
    #[cold]
    pub(crate) fn put_value(
        &self,
        payload: &mut Vec<u8>,
        staged: &mut StagedGuard<'_>,
        partition: &Arc<PartitionState>,
        key: &[u8],
        &ValueWrite { value, expires_ms, mode }: &ValueWrite<'_>,
    ) -> Result<usize> {
        let id = partition.id;
        let counts = staged.counts();
        self.check_payload_len(payload.len() as u64 + staged.list_bytes())?;
        // The options may change meanwhile; the tree alone decides whether it stages the value.
        let pointer = match partition.stages_value(value.len(), mode) {
            true => self.stage(partition, staged, value, mode)?,
            false => None,
        };
        let mut encoded = Vec::new();
        if let Some(expires_ms) = expires_ms {
            put_expiry(&mut encoded, expires_ms, if pointer.is_none() { value } else { &[] });
        }
        let kind = match (pointer, expires_ms) {
            (None, None) => {
                self.put_record(payload, &WalRecord { kind: RecordKind::Put, partition: id, key, value })?;
                return Ok(value.len());
            }
            (None, Some(_)) => RecordKind::ExpiringPut,
            (Some(_), None) => RecordKind::BlobPointer,
            (Some(_), Some(_)) => RecordKind::ExpiringBlobPointer,
        };
        if let Some(pointer) = pointer {
            pointer.encode(&mut encoded);
        }
        let put = self.put_record(payload, &WalRecord { kind, partition: id, key, value: &encoded });
        put.inspect_err(|_| staged.truncate(counts)).map(|()| encoded.len())
    }

    /// Encodes a record as the last one of `payload`.
    ///
    /// # Errors
    /// `Invalid` if the payload would exceed half the memory budget.
    #[inline]
    pub(crate) fn put_record(&self, payload: &mut Vec<u8>, record: &WalRecord<'_>) -> Result<()> {
        let len = record_len(record);
        self.check_payload_len(payload.len() as u64 + len)?;
        append_record(payload, record, len);
        Ok(())
    }

    /// # Errors
    /// `Invalid` if a payload of this length exceeds half the memory budget.
    #[inline]
    pub(crate) fn check_payload_len(&self, len: u64) -> Result<()> {
        let limit = self.settings.memory_budget / 2;
        if len <= limit { Ok(()) } else { Err(too_large_error(len, limit)) }
    }

    /// Stages a large value of `partition`, and adds it to `staged`. Returns the pointer, or `None` if the tree stages
    /// nothing; then the value belongs into the record.
    ///
    /// # Errors
    /// As [`write`](DbInner::write). A failure leaves at most stale bytes in a blob file.
    #[cold]
    fn stage(
        &self,
        partition: &Arc<PartitionState>,
        staged: &mut StagedGuard<'_>,
        value: &[u8],
        mode: PersistMode,
    ) -> Result<Option<BlobPointer>> {
        let _call = self.begin_api_call();
        let writer = self.writer()?;
        check_not_called_back()?;
        let tree = partition.tree()?;
        writer.space.check_disk_reserve()?;
        self.delay_write(value.len() as u64)?;
        let _work = self.begin_work()?;
        let pointer = tree.stage(value, mode != PersistMode::Buffer)?.blob();
        if let Some(pointer) = pointer {
            staged.add(partition, Staged::Blob(pointer));
            self.counters.direct_blob_bytes.fetch_add(pointer.frame_len, Ordering::Relaxed);
        }
        Ok(pointer)
    }

    /// Admits an ingest: delays the caller as a writer of [`INGEST_DELAY_BYTES`].
    ///
    /// # Errors
    /// As [`writer`](DbInner::writer); `OutOfSpace` if the disk is full.
    pub(crate) fn admit_ingest(&self) -> Result<&DbWriter> {
        let writer = self.writer()?;
        writer.space.check_disk_reserve()?;
        self.delay_write(INGEST_DELAY_BYTES)?;
        Ok(writer)
    }

    /// Writes a batch, and returns when it is as durable as `mode` requires.
    ///
    /// # Errors
    /// Those of [`Partition::insert`](crate::Partition::insert) and of the check of the batch.
    pub(crate) fn write(&self, batch: &WriteBatch<'_>, mode: PersistMode) -> Result<()> {
        let written = self.write_visibly(batch, mode).and_then(|wal_end| self.make_durable(wal_end, mode));
        written.inspect_err(|error| {
            if error.kind() == ErrorKind::Conflict {
                self.counters.record_conflict();
            }
            drop(self.begin_api_call());
        })
    }

    /// Makes staged values durable before their commit, so that a failure affects this commit only. The sync of the
    /// WAL syncs those of commits that requested no sync. Does nothing for `Buffer`.
    pub(crate) fn sync_staged(&self, staged: &StagedRecords<'_>, mode: PersistMode) -> Result<()> {
        self.writer()?;
        match staged.is_empty()
            || mode == PersistMode::Buffer
            || self.settings.has_planted_bug(PlantedBug::WalSyncBeforeBlobs)
        {
            true => Ok(()),
            false => self.poison.poison_on_failure(staged.sync()),
        }
    }

    /// Commits a batch. Returns the sequence number through which the WAL must be synced to make it durable.
    fn write_visibly(&self, batch: &WriteBatch<'_>, mode: PersistMode) -> Result<SeqNo> {
        let writer = self.writer()?;
        let _write = begin_write()?;
        let len = batch.payload_len;
        self.check_payload_len(len)?;
        batch.check_partitions()?;
        if writer.space.reserve_is_short() && !batch.only_removes() {
            writer.space.check_disk_reserve()?;
        }
        self.delay_write(len)?;
        if let Some(check) = batch.check {
            // Most of the validation, so that the leader reads only what has changed since.
            check.validate(batch.payload, batch.partitions(), self.last_visible.get())?;
        }
        let committed = match batch.staged.is_empty() {
            true => writer.committer.commit(batch),
            false => self.commit_staged(writer, batch, mode),
        };
        let CommitOutcome { wal_end, sealed, changed_pages, .. } = committed?;
        self.counters.user_bytes.add(len + batch.staged.value_bytes());
        if wal_end > SeqNo::ZERO {
            writer.space.grow_reserve_with_wal(len.saturating_add(changed_pages.saturating_mul(POOL_PAGE)));
        }
        if sealed || self.write_buffers.is_full() {
            self.seal_largest();
            self.write_controller.update_all(&self.catalog);
            self.background.wake_workers();
        }
        Ok(wal_end)
    }

    /// Commits a batch with staged values.
    #[cold]
    fn commit_staged(&self, writer: &DbWriter, batch: &WriteBatch<'_>, mode: PersistMode) -> Result<CommitOutcome> {
        self.sync_staged(batch.staged, mode)?;
        // As late as possible, because a failed sync of the file poisons the database from now on.
        let mut begun = self.poison.poison_on_failure(batch.staged.begin_commit())?;
        let committed = writer.committer.commit(batch);
        match committed.is_ok() || self.poison.is_set() {
            true => batch.staged.mark_applied(),
            false => begun.refuse(),
        }
        committed
    }

    /// As [`SpaceManager::with_reserve`], if the database is open for writing. The caller has
    /// [begun work](DbInner::begin_work), or closes the database.
    pub(crate) fn with_reserve<T>(&self, need: ReserveUse, mut work: impl FnMut() -> Result<T>) -> Result<T> {
        debug_assert!(is_at_work() || self.background.is_closing(), "work begins before it waits for disk space");
        match &self.writer {
            Some(writer) => writer.space.with_reserve(need, work),
            None => work(),
        }
    }

    /// Seals the largest memtables if the active ones take more than half of the memory budget, or point to too many
    /// bytes of blob files.
    pub(crate) fn seal_largest(&self) {
        self.write_buffers.seal_largest(&self.catalog, |partition| self.seal(partition));
    }

    /// Seals the active memtable of a partition.
    pub(crate) fn seal(&self, partition: &PartitionState) {
        if let Some(tree) = partition.tree_if_built() {
            tree.seal();
            self.write_controller.update([partition]);
        }
    }

    pub(crate) fn make_durable(&self, last: SeqNo, mode: PersistMode) -> Result<()> {
        if mode != PersistMode::Buffer && last > SeqNo::ZERO {
            let wal = &self.writer.as_ref().ok_or_else(|| Error::invalid("the database is open for reading only"))?.wal;
            self.poison.poison_on_failure(wal.sync(last, mode == PersistMode::SyncAll))?;
        }
        Ok(())
    }

    /// Makes every commit that is visible now durable, together with all version edits. Does nothing for `Buffer`.
    pub(crate) fn persist(&self, mode: PersistMode) -> Result<()> {
        let _call = self.begin_api_call();
        let writer = self.writer()?;
        if mode == PersistMode::Buffer {
            return Ok(());
        }
        self.poison.poison_on_failure(writer.wal.sync(self.last_visible.get(), mode == PersistMode::SyncAll))?;
        self.poison.poison_on_failure(writer.version_set.sync())
    }

    /// Delays the writer in proportion to the debt. If writes are stopped, waits until a flush has freed memory.
    fn delay_write(&self, bytes: u64) -> Result<()> {
        self.write_controller.delay_write(bytes);
        match self.write_controller.must_wait() {
            true => self.write_controller.wait_for_memory(&self.catalog, &self.background, || self.writer().map(drop)),
            false => Ok(()),
        }
    }

    /// As [`WalMaintenance::wal_is_too_large`]; false if the database is read-only.
    pub(crate) fn wal_is_too_large(&self) -> bool {
        self.writer.as_ref().is_some_and(|writer| writer.wal_maintenance.wal_is_too_large())
    }

    /// Queues an event for the listener.
    pub(crate) fn emit(&self, event: &Event) {
        self.poison.emit(event);
    }

    /// Begins a call of the public interface. If no thread delivers events, the guard delivers the events of the call
    /// when it is dropped. Declare it before locks and work guards, so that it is dropped after them.
    pub(crate) fn begin_api_call(&self) -> ApiCallGuard<'_> {
        ApiCallGuard(self)
    }

    /// The partition with this name, if it exists. `None` in a forked child.
    pub(crate) fn partition(&self, name: &str) -> Option<Arc<PartitionState>> {
        if self.is_forked() { None } else { self.catalog.get(name) }
    }

    fn writer_unless_poisoned(&self) -> Result<&DbWriter> {
        self.poison.check()?;
        self.writer.as_ref().ok_or_else(|| Error::invalid("the database is open for reading only"))
    }

    /// Stores the name of the operator of a partition that had none, before the first operand. Every sync of the WAL
    /// makes the edit durable too.
    pub(crate) fn store_merge_operator(&self, state: &PartitionState, operator: &Arc<dyn MergeOperator>) -> Result<()> {
        let edits = [PartitionEdit::MergeOperator { name: operator.name().to_owned() }.of(state.id)];
        let version_set = &self.writer()?.version_set;
        self.poison.poison_on_failure(self.with_reserve(ReserveUse::Flush, || version_set.log_and_apply(&edits)))?;
        state.set_merge_operator(operator);
        Ok(())
    }
}

impl EngineHost for DbInner {
    fn sync_wal_through(&self, through: SeqNo) -> Result<()> {
        let wal = &self.writer_unless_poisoned()?.wal;
        if self.settings.has_planted_bug(PlantedBug::FlushBeforeWalSync) {
            return Ok(());
        }
        self.poison.poison_on_failure(wal.sync(through, false))
    }

    fn wal_end(&self) -> SeqNo {
        self.writer.as_ref().map_or(SeqNo::ZERO, |writer| writer.wal.appended())
    }

    fn wal_synced_through(&self) -> SeqNo {
        self.writer.as_ref().map_or(SeqNo::ZERO, |writer| writer.wal.durable())
    }

    fn commit_edits(&self, edits: &[VersionEdit]) -> Result<()> {
        let version_set = &self.writer_unless_poisoned()?.version_set;
        let obsolete = version_set.spilled_tables_dropped_by(edits);
        self.poison.poison_on_failure(version_set.log_and_apply_durably(edits))?;
        obsolete.into_iter().for_each(|table| self.obsolete_files().push(DataFileKind::Table, table));
        Ok(())
    }

    fn snapshot_seqnos(&self) -> Vec<SeqNo> {
        self.snapshots.seqnos()
    }

    fn now_ms(&self) -> u64 {
        self.env.now_ms()
    }

    fn should_yield(&self) -> bool {
        // A single worker would not run a flush, or work on the WAL, before the end of the task.
        let gives_way = || self.write_controller.flush_waiting() || self.wal_is_too_large();
        let is_held = self.writer.as_ref().is_some_and(|writer| writer.space.flushes_waiting() > 0);
        self.background.is_closing() || is_held || self.settings.workers == 1 && gives_way()
    }
}

/// Fails with `Invalid` if a comparator makes the call inside work or a write, on any database. The call could wait for
/// the comparator, or for a thread that waits for the comparator.
fn check_not_called_back() -> Result<()> {
    let message = "a comparator made a call that waits for writes or background work, which wait for the comparator: \
                   make this call outside of the comparator";
    if is_at_work() { Err(Error::invalid(message)) } else { Ok(()) }
}

/// Marks the thread as inside a write, unless it [was called back](check_not_called_back).
#[inline]
fn begin_write() -> Result<WriteMark> {
    check_not_called_back()?;
    Ok(WriteMark::new())
}

#[cold]
fn too_large_error(len: u64, limit: u64) -> Error {
    Error::invalid(format!("the write has {len} bytes, more than half the memory budget ({limit})"))
}

#[cold]
fn forked_error() -> Error {
    let message = "the database was opened by the process that this one was forked from: open it here after it is \
                   closed there";
    Error::new(ErrorKind::Closed, message)
}

#[cold]
pub(crate) fn closed_error() -> Error {
    Error::new(ErrorKind::Closed, "the database is closed")
}

//! The handle of a database.

use std::path::Path;
use std::sync::{Arc, MutexGuard};

use crate::base::comparator::Comparator;
use crate::base::sync::lock;
use crate::base::version_edit::{EngineKind, PartitionId, PartitionMeta, VersionEdit};
use crate::base::{Error, ErrorKind, KeyOrder, Result};
use crate::db::batch::Batch;
use crate::db::catalog::PartitionState;
use crate::db::checkpoint;
use crate::db::config::{Config, PersistMode};
use crate::db::handle::DbHandle;
use crate::db::metrics::Metrics;
use crate::db::options::PartitionCreateOptions;
use crate::db::partition::Partition;
use crate::db::recovery;
use crate::db::snapshot::Snapshot;
use crate::db::state::disk_reserve::ReserveUse;
use crate::db::worker;
use crate::pmem::engine::uses_mapped_pools;

/// Partition names are 1..=255 bytes of UTF-8; they never become paths.
const NAME_LEN_MAX: usize = 255;
/// Names of comparators likewise.
const COMPARATOR_NAME_LEN_MAX: usize = 255;

/// One directory, one log, many [`Partition`]s.
///
/// Cheap to clone; thread safe. Dropping the last handle (databases, partitions, snapshots) closes it cleanly.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// let db = azekura::Config::new(dir.path().join("db")).open()?;
/// let p = db.open_partition("default", Default::default())?;
/// p.insert("key", "value")?;
/// db.persist(azekura::PersistMode::SyncData)?; // now it survives power loss, too
/// db.close()?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Database {
    handle: Arc<DbHandle>,
}

impl Config {
    /// Opens the database, creating it if the directory is missing or empty.
    ///
    /// # Errors
    /// `Locked` if another handle has it open; `Invalid` for a directory that holds something else or a setting out of
    /// range; `Corruption` for a file that is missing, truncated or damaged; `Unsupported` for a newer format;
    /// `Io`, `OutOfSpace`. A failed open changes nothing.
    pub fn open(self) -> Result<Database> {
        Ok(Database { handle: recovery::open(self)? })
    }

    /// Opens an existing database for reading, beside other readers: the log is replayed into memory, nothing is
    /// written, no thread is started. It shows the state at the time of opening.
    ///
    /// # Errors
    /// As [`open`](Config::open); `Locked` beside a writer, `Invalid` if there is no database.
    pub fn open_read_only(self) -> Result<Database> {
        Ok(Database { handle: recovery::open_read_only(self)? })
    }
}

impl Database {
    /// The partition of that name, created with `options` if there is none. On an existing one the options apply to
    /// data written from now on, and those of how index and filters are held also to tables that were not read yet.
    ///
    /// Creating is atomic and as durable as the database's default mode says; every later sync of the log covers it.
    ///
    /// # Errors
    /// `Invalid` for a name or an option out of range, or if the partition was created with a comparator; errors of
    /// writing.
    pub fn open_partition(&self, name: &str, options: PartitionCreateOptions) -> Result<Partition> {
        self.open_or_create(name, &options, None)
    }

    /// An existing partition with the options that are stored with it.
    ///
    /// # Errors
    /// `Invalid` if there is none of that name, or if its keys are ordered by a comparator that was not given yet.
    pub fn partition(&self, name: &str) -> Result<Partition> {
        let missing = || Error::invalid(format!("partition {name:?} does not exist"));
        let state = self.handle.inner.partition(name).ok_or_else(missing)?;
        state.tree()?;
        Ok(Partition::new(state, Arc::clone(&self.handle)))
    }

    /// The same for a partition whose keys are ordered by `comparator`, which must have the name it was created with.
    ///
    /// # Errors
    /// As [`open_partition`](Database::open_partition); `Invalid`, naming both, for another comparator.
    pub fn open_partition_with_comparator(
        &self,
        name: &str,
        options: PartitionCreateOptions,
        comparator: Arc<dyn Comparator>,
    ) -> Result<Partition> {
        let len = comparator.name().len();
        if !(1..=COMPARATOR_NAME_LEN_MAX).contains(&len) {
            return Err(Error::invalid(format!("comparator name has {len} bytes, 1..=255 are allowed")));
        }
        self.open_or_create(name, &options, Some(comparator))
    }

    fn open_or_create(
        &self,
        name: &str,
        options: &PartitionCreateOptions,
        comparator: Option<Arc<dyn Comparator>>,
    ) -> Result<Partition> {
        if !(1..=NAME_LEN_MAX).contains(&name.len()) {
            let message = format!("partition name has {} bytes, 1..={NAME_LEN_MAX} are allowed", name.len());
            return Err(Error::invalid(message));
        }
        options.check()?;
        let inner = &self.handle.inner;
        let _call = inner.begin_api_call();
        inner.check_outside()?;
        let _one_at_a_time = lock(&inner.partition_ddl_lock);
        if let Some(state) = inner.partition(name) {
            let work = inner.begin_work()?;
            inner.catalog.open(&state, comparator, options)?;
            drop(work);
            if let Err(error) = self.replace_options(&state, options) {
                let before = state.stored_options();
                let _ended = before.and_then(|before| inner.catalog.set_options(&state, &before));
                return Err(error);
            }
            return Ok(Partition::new(state, Arc::clone(&self.handle)));
        }
        let _work = inner.begin_work()?;
        let writer = inner.writer().map_err(|error| match error.kind() {
            ErrorKind::Invalid => Error::invalid(format!("partition {name:?} does not exist")),
            _ => error,
        })?;
        let order = comparator.map_or_else(KeyOrder::bytewise, KeyOrder::custom);
        options.check_order(&order)?;
        let engine = options.engine.kind_in(uses_mapped_pools(&*inner.fs, &inner.dir));
        let meta = PartitionMeta {
            id: PartitionId(0), // until it is created
            engine: engine as u8,
            name: name.to_owned(),
            comparator: order.name().to_owned(),
            settings: options.encode(),
        };
        // What a pool that is memory gets is durable by itself: there must be no moment at which the manifest has the
        // partition and not its file, or a commit and not the partition.
        let is_memory = engine == EngineKind::PmemMapped;
        if is_memory {
            inner.catalog.pool_location(&meta).create_file(&options.pmem())?;
        }
        // All that can fail comes before the edit: a partition that the manifest has, and that cannot be opened, would
        // keep the database from opening.
        let prepare = |meta: &PartitionMeta| {
            let home = is_memory.then(|| inner.catalog.pool_location(meta));
            home.as_ref().map_or(Ok(()), |home| home.publish_file())?;
            let state = inner.catalog.create_tree(meta, order, options);
            let state = state.inspect_err(|_| home.iter().for_each(|home| home.remove_published_file()))?;
            let file_id = state.pool_file_id;
            Ok((state, file_id))
        };
        let state = inner.poison.poison_on_failure(writer.version_set.create_partition(meta, prepare))?;
        if inner.settings.durability != PersistMode::Buffer || is_memory {
            let synced = inner.poison.poison_on_failure(writer.version_set.sync());
            synced.map_err(|error| self.undo_creation(&state, error))?;
        }
        inner.catalog.insert(&state);
        Ok(Partition::new(state, Arc::clone(&self.handle)))
    }

    /// Drops a partition whose creation the manifest has and could not be made durable because of `error`, which the
    /// caller gets. Writing ends if that fails too. The next open removes the files of a pool: as long as its creation
    /// may be durable and its end is not, the database does not open without them.
    fn undo_creation(&self, state: &PartitionState, error: Error) -> Error {
        let inner = &self.handle.inner;
        let drop_it = [VersionEdit::PartitionDropped { partition: state.id }];
        let dropped = inner.writer().and_then(|writer| {
            let version_set = &writer.version_set;
            inner.with_reserve(ReserveUse::Flush, || version_set.log_and_apply(&drop_it))
        });
        match dropped {
            Ok(()) => error,
            Err(second) => inner.poison.set(second),
        }
    }

    /// Puts options of an existing partition in force and stores them. After a failure the old ones are stored, and
    /// the caller puts them in force again.
    fn replace_options(&self, state: &Arc<PartitionState>, options: &PartitionCreateOptions) -> Result<()> {
        let inner = &self.handle.inner;
        let settings = options.encode();
        let is_stored = state.has_settings(&settings);
        let work = inner.begin_work()?;
        inner.catalog.set_options(state, options)?;
        if inner.writer.is_none() || is_stored {
            return Ok(());
        }
        // A flush begins work of its own.
        drop(work);
        if state.lowers_max_size(options)? {
            worker::flush_and_wait(inner, state)?;
        }
        let _work = inner.begin_work()?;
        let edits = [VersionEdit::PartitionSettings { partition: state.id, settings: settings.clone() }];
        let version_set = &inner.writer()?.version_set;
        inner.poison.poison_on_failure(inner.with_reserve(ReserveUse::Flush, || version_set.log_and_apply(&edits)))?;
        state.note_settings(settings);
        Ok(())
    }

    /// Deletes a partition and everything in it, durably. Its other handles return `Closed` from now on;
    /// iterators that are under way go on.
    ///
    /// # Errors
    /// `Invalid` for a partition of another database, `Closed` if it was deleted already; errors of writing.
    pub fn delete_partition(&self, partition: Partition) -> Result<()> {
        partition.check_same_database(&self.handle)?;
        let inner = &self.handle.inner;
        let _call = inner.begin_api_call();
        inner.check_outside()?;
        let one_at_a_time = lock(&inner.partition_ddl_lock);
        partition.state.tree()?;
        self.delete(&partition.state, one_at_a_time)
    }

    /// Deletes the partition of that name, as [`delete_partition`](Database::delete_partition) does. It need not be
    /// open: one whose comparator the program no longer has is deleted like others.
    ///
    /// # Errors
    /// `Invalid` if there is none of that name; errors of writing.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// let old = db.open_partition("old", Default::default())?;
    /// db.delete_partition_by_name("old")?;
    /// assert!(!db.partition_exists("old"));
    /// assert_eq!(old.get("key").unwrap_err().kind(), azekura::ErrorKind::Closed);
    /// # Ok(()) }
    /// ```
    pub fn delete_partition_by_name(&self, name: &str) -> Result<()> {
        let inner = &self.handle.inner;
        let _call = inner.begin_api_call();
        inner.check_outside()?;
        let one_at_a_time = lock(&inner.partition_ddl_lock);
        let missing = || Error::invalid(format!("partition {name:?} does not exist"));
        let state = inner.partition(name).ok_or_else(missing)?;
        self.delete(&state, one_at_a_time)
    }

    fn delete(&self, state: &PartitionState, one_at_a_time: MutexGuard<'_, ()>) -> Result<()> {
        let inner = &self.handle.inner;
        let _work = inner.begin_work()?;
        let writer = inner.writer()?;
        let edits = [VersionEdit::PartitionDropped { partition: state.id }];
        // Between two commits, so that no commit is half in a partition that is gone; and behind the sync of all
        // commits before, because the edit may survive power loss as soon as it is written. Most of that sync is done
        // first.
        inner.poison.poison_on_failure(writer.wal.sync(inner.last_visible.get(), false))?;
        let delete = || {
            writer.wal.sync(inner.last_visible.get(), false)?;
            writer.version_set.log_and_apply(&edits)?;
            state.mark_deleted();
            inner.catalog.remove(&state.name);
            Ok(())
        };
        let written = inner.with_reserve(ReserveUse::Flush, || writer.committer.run_exclusively(delete));
        inner.poison.poison_on_failure(written)?;
        // No writer of another partition waits for its flushes any more, or gets their errors.
        *lock(&inner.flush_error) = None;
        inner.task_done.notify_all();
        inner.poison.poison_on_failure(writer.version_set.sync())?;
        inner.catalog.discard(state);
        inner.update_write_stalls();
        drop(one_at_a_time); // others may create and delete while files are removed
        inner.obsolete_files().remove_all();
        inner.work_available.notify_all();
        Ok(())
    }

    /// The names of all partitions, sorted.
    pub fn list_partitions(&self) -> Vec<String> {
        self.handle.inner.catalog.names()
    }

    /// Whether there is a partition of that name.
    pub fn partition_exists(&self, name: &str) -> bool {
        self.handle.inner.partition(name).is_some()
    }

    /// An empty batch.
    pub fn batch(&self) -> Batch {
        Batch::new(Arc::clone(&self.handle))
    }

    /// This moment, across all partitions.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::new(Arc::clone(&self.handle))
    }

    /// Makes every commit that has returned as durable as `mode` says.
    ///
    /// # Errors
    /// `Poisoned` if the sync fails: writing ends, reading goes on; close, look at the device, open again.
    pub fn persist(&self, mode: PersistMode) -> Result<()> {
        self.handle.inner.persist(mode)
    }

    /// Figures about the database since it was opened.
    pub fn metrics(&self) -> Metrics {
        Metrics::of(&self.handle.inner)
    }

    /// Bytes of all files on disk: tables, blob files, log, manifest.
    pub fn disk_space(&self) -> u64 {
        let inner = &self.handle.inner;
        inner.fs.read_dir(&inner.dir).map_or(0, |entries| entries.iter().map(|entry| entry.len).sum())
    }

    /// Writes a copy of the database as it is between two commits to the new directory `path`; it can be opened at
    /// once. Tables and blob files are shared by hard links where the file system allows, so that it is quick and
    /// small. Missing parents of `path` are created.
    ///
    /// The copy is built beside `path`, in a directory `azekura-checkpoint-<16 hexadecimal digits>.tmp`. If the process
    /// dies meanwhile, that directory is left, and you can remove it. No other file or directory is removed or
    /// replaced.
    ///
    /// # Errors
    /// `Invalid` if anything is at `path`, an empty directory too; errors of writing. A failure leaves nothing at
    /// `path`, with one exception: the copy was finished, its name could not be made durable, and the file system
    /// refused to take the name back. Then the whole copy is there. If the system dies after a name could not be made
    /// durable, the whole copy may be there or nothing.
    pub fn checkpoint(&self, path: impl AsRef<Path>) -> Result<()> {
        checkpoint::checkpoint(&self.handle.inner, path.as_ref())
    }

    /// Flushes everything, stops the workers and gives the directory free; other handles return `Closed` from now
    /// on. While another handle is closing, this returns at once: only the first call says when the directory is free.
    ///
    /// Files that nobody needs any more are gone then, but for those that an iterator, or a read that is under way in
    /// this process, be it in another database, still holds: the next open removes them.
    ///
    /// # Errors
    /// Those of flushing; the directory is given free all the same, and the log has what was acknowledged.
    pub fn close(self) -> Result<()> {
        self.handle.close()
    }

    /// Does exactly one piece of background work in the calling thread; false if there was none. With
    /// [`workers(0)`](Config::workers) this is the only way it gets done. What has failed before is tried again once
    /// there is nothing else.
    ///
    /// # Errors
    /// Those of the work, which stays to be done.
    pub fn step(&self) -> Result<bool> {
        self.handle.inner.writer()?;
        worker::step(&self.handle.inner)
    }

    /// The directory, as an absolute path: a relative one begins at the working directory at the time of opening.
    pub fn path(&self) -> &Path {
        &self.handle.inner.dir
    }
}

impl std::fmt::Debug for Database {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Database").field("path", &self.handle.inner.dir).finish_non_exhaustive()
    }
}

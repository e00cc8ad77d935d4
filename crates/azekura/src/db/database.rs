//! Implements [`Database`], the handle of an open database: opening, partitions, durability calls and closing.

use std::path::Path;
use std::sync::{Arc, MutexGuard};

use crate::base::comparator::Comparator;
use crate::base::sync::lock;
use crate::base::version_edit::{PartitionEdit, PartitionId, PartitionMeta};
use crate::base::{Error, ErrorKind, Result};
use crate::db::batch::Batch;
use crate::db::checkpoint;
use crate::db::components::PartitionComponents;
use crate::db::config::{Config, PersistMode, Settings};
use crate::db::handle::DbHandle;
use crate::db::metrics::Metrics;
use crate::db::options::PartitionCreateOptions;
use crate::db::partition::Partition;
use crate::db::partition_state::{PartitionState, ReplayPhase};
use crate::db::recovery::open;
use crate::db::snapshot::Snapshot;
use crate::db::state::disk_reserve::ReserveUse;
use crate::db::transaction::transaction::Transaction;
use crate::db::transaction::transaction_options::{Isolation, TransactionOptions};
use crate::db::worker;
use crate::db::writes::commit_check::LOST_ROUNDS_MAX;
use crate::tree::new_tree::{self, NewTree};
use crate::vfs::open_files::DataFileKind;

/// Longest partition name in bytes. Names are UTF-8 of at least 1 byte and are never used as paths.
const NAME_LEN_MAX: usize = 255;

/// An open database: one directory with one write-ahead log (WAL) and many [`Partition`]s.
///
/// Clones share the database and are cheap; the type is `Send` and `Sync`. Dropping the last handle (database,
/// partition, snapshot, iterator, entry, batch or transaction) closes the database cleanly.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// let db = azekura::Config::new(dir.path().join("db")).open()?;
/// let p = db.open_partition("default", Default::default())?;
/// p.insert("key", "value")?;
/// db.persist(azekura::PersistMode::SyncData)?; // the write now survives power loss
/// db.close()?;
/// assert_eq!(p.get("key").unwrap_err().kind(), azekura::ErrorKind::Closed);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Database {
    pub(crate) handle: Arc<DbHandle>,
}

impl Config {
    /// Opens the database, and creates it if the directory is missing or empty.
    ///
    /// # Errors
    /// `Locked` if the database is open elsewhere, in this process or another, which the message names where the
    /// operating system tells; see [`wait_for_lock`](Config::wait_for_lock). `Invalid` if the directory contains
    /// other files or a setting is out of range. `Corruption` if a file is missing, truncated or damaged.
    /// `Unsupported` if the format is newer. `Io`, `OutOfSpace`. A failed open changes nothing.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use azekura::{Config, ErrorKind};
    /// let db = Config::new(&path).open()?; // creates the directory
    /// let again = Config::new(&path).open(); // a database is open for writing only once
    /// assert_eq!(again.unwrap_err().kind(), ErrorKind::Locked);
    /// # Ok(()) }
    /// ```
    pub fn open(self) -> Result<Database> {
        Ok(Database { handle: open::open(self)? })
    }

    /// Opens an existing database for reading only; other readers may have it open too.
    ///
    /// The WAL is replayed into memory, nothing is written, and no thread is started. The handle reads the state at
    /// the time of opening.
    ///
    /// # Errors
    /// As [`open`](Config::open); `Locked` while a writer has the database open, `NotFound` if there is no database.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use azekura::{Config, ErrorKind};
    /// # let db = Config::new(&path).open()?;
    /// # db.open_partition("fruit", Default::default())?.insert("apple", "red")?;
    /// # db.close()?;
    /// let reader = Config::new(&path).open_read_only()?;
    /// let second = Config::new(&path).open_read_only()?; // several readers at a time
    /// let fruit = reader.partition("fruit")?;
    /// assert_eq!(fruit.get("apple")?.unwrap(), "red");
    /// assert_eq!(fruit.insert("pear", "green").unwrap_err().kind(), ErrorKind::Invalid);
    /// # Ok(()) }
    /// ```
    pub fn open_read_only(self) -> Result<Database> {
        Ok(Database { handle: open::open_read_only(self)? })
    }
}

impl Database {
    /// Opens the partition `name`, and creates it with `options` if it does not exist.
    ///
    /// The name has 1 to 255 bytes of UTF-8. An existing partition keeps the options that are stored with it;
    /// [`Partition::set_options`] changes them. Its engine must be that of `options`, and it must have neither a
    /// comparator nor a merge operator; [`open_partition_with`](Database::open_partition_with) takes these. The rest of
    /// `options` has no effect then.
    ///
    /// Creation is atomic, and as durable as the default durability of the database. Every later sync of the WAL
    /// makes it durable too.
    ///
    /// # Errors
    /// `Invalid` if the name or an option is out of range, if the partition was created with another engine or
    /// with a comparator, or if it has a merge operator. `Io`, `OutOfSpace`, `Poisoned` from writing. `Closed`.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// use azekura::{CompressionType, PartitionCreateOptions};
    /// let options = PartitionCreateOptions::default().compression(CompressionType::Miniz(6));
    /// let log = db.open_partition("log", options.clone())?; // created
    /// log.insert("1", "started")?;
    /// let same = db.open_partition("log", Default::default())?; // exists, and keeps its options
    /// assert_eq!(same.get("1")?.unwrap(), "started");
    /// assert_eq!(same.options(), options);
    /// # Ok(()) }
    /// ```
    pub fn open_partition(&self, name: &str, options: PartitionCreateOptions) -> Result<Partition> {
        self.open_partition_with(name, options, PartitionComponents::default())
    }

    /// Opens an existing partition with the options that are stored with it.
    ///
    /// # Errors
    /// `NotFound` if the partition does not exist; `Invalid` if its comparator, or a merge operator other than those of
    /// [`merge_operators`](crate::merge_operators), was not given since the database was opened. The error of an
    /// earlier call that could not read its files.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # db.open_partition("fruit", Default::default())?.insert("apple", "red")?;
    /// let fruit = db.partition("fruit")?; // with its stored options
    /// assert_eq!(fruit.get("apple")?.unwrap(), "red");
    /// assert_eq!(db.partition("frut").unwrap_err().kind(), azekura::ErrorKind::NotFound);
    /// # Ok(()) }
    /// ```
    pub fn partition(&self, name: &str) -> Result<Partition> {
        self.handle.inner.check_process()?;
        let missing = || Error::new(ErrorKind::NotFound, format!("partition {name:?} does not exist"));
        let state = self.handle.inner.partition(name).ok_or_else(missing)?;
        state.tree()?;
        state.merge_operator.check_is_known()?;
        Ok(Partition::new(state, Arc::clone(&self.handle)))
    }

    /// Opens or creates a partition as [`open_partition`](Database::open_partition) does, with keys ordered by
    /// `comparator`.
    ///
    /// The comparator's name has 1 to 255 bytes. For an existing partition it must be the name that the partition was
    /// created with.
    ///
    /// # Errors
    /// As [`open_partition`](Database::open_partition); `Invalid` if the comparator's name differs from the stored
    /// one (the message contains both).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # use std::{cmp::Ordering, sync::Arc};
    /// struct NewestFirst;
    /// impl azekura::Comparator for NewestFirst {
    ///     fn name(&self) -> &str { "newest first" }
    ///     fn compare(&self, a: &[u8], b: &[u8]) -> Ordering { b.cmp(a) }
    ///     fn can_keys_with_different_byte_contents_be_equal(&self) -> bool { false }
    /// }
    /// let log = db.open_partition_with_comparator("log", Default::default(), Arc::new(NewestFirst))?;
    /// for second in [10u64, 30, 20] {
    ///     log.insert(second.to_be_bytes(), "event")?;
    /// }
    /// assert_eq!(log.keys().next().unwrap()?, 30u64.to_be_bytes());
    /// # Ok(()) }
    /// ```
    pub fn open_partition_with_comparator(
        &self,
        name: &str,
        options: PartitionCreateOptions,
        comparator: Arc<dyn Comparator>,
    ) -> Result<Partition> {
        self.open_partition_with(name, options, PartitionComponents::default().comparator(comparator))
    }

    /// Opens or creates a partition as [`open_partition`](Database::open_partition) does, with code of the program that
    /// it calls.
    ///
    /// # Errors
    /// As [`open_partition`](Database::open_partition) and
    /// [`open_partition_with_comparator`](Database::open_partition_with_comparator); `Invalid` for a component whose
    /// name has not 1 to 255 bytes, for a compaction filter of a pmem partition, and if the merge operator is not the
    /// one that the partition has.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// use azekura::{CompactionFilter, FilterContext, FilterDecision, FilterValue, PartitionComponents, Result};
    /// use std::sync::Arc;
    /// struct DropEmpty;
    /// impl CompactionFilter for DropEmpty {
    ///     fn name(&self) -> &str { "drop empty values" }
    ///     fn filter(&self, _: &FilterContext<'_>, _: &[u8], value: &mut FilterValue<'_>) -> Result<FilterDecision> {
    ///         Ok(if value.size() == 0 { FilterDecision::Remove } else { FilterDecision::Keep })
    ///     }
    /// }
    /// let components = PartitionComponents::default().compaction_filter(Arc::new(DropEmpty));
    /// let log = db.open_partition_with("log", Default::default(), components)?;
    /// log.insert("1", "")?;
    /// log.insert("2", "stopped")?;
    /// log.major_compact()?;
    /// assert_eq!(log.len()?, 1);
    /// # Ok(()) }
    /// ```
    pub fn open_partition_with(
        &self,
        name: &str,
        options: PartitionCreateOptions,
        components: PartitionComponents,
    ) -> Result<Partition> {
        components.check(&options)?;
        self.open_or_create(name, &options, &components)
    }

    fn open_or_create(
        &self,
        name: &str,
        options: &PartitionCreateOptions,
        components: &PartitionComponents,
    ) -> Result<Partition> {
        if !(1..=NAME_LEN_MAX).contains(&name.len()) {
            let message = format!("partition name has {} bytes, 1..={NAME_LEN_MAX} are allowed", name.len());
            return Err(Error::invalid(message));
        }
        options.check()?;
        let inner = &self.handle.inner;
        let _call = inner.begin_api_call();
        inner.check_outside()?;
        let ddl_guard = lock(&inner.partition_ddl_lock);
        if let Some(state) = inner.partition(name) {
            self.open_existing(&state, options, components, &ddl_guard)?;
            return Ok(Partition::new(state, Arc::clone(&self.handle)));
        }
        let _work = inner.begin_work()?;
        let writer = inner.writer().map_err(|error| match error.kind() {
            ErrorKind::Invalid => Error::new(ErrorKind::NotFound, format!("partition {name:?} does not exist")),
            _ => error,
        })?;
        let order = components.key_order();
        options.check_order(&order)?;
        let resources = inner.catalog.resources();
        let engine = options.engine.kind_in(new_tree::maps_pools(resources));
        let meta = PartitionMeta {
            id: PartitionId(0), // `create_partition` sets the id
            engine: engine as u8,
            name: name.to_owned(),
            comparator: order.name().to_owned(),
            settings: options.encode(),
        };
        // If the tree has a file of its own, it must be durable before the manifest names the partition.
        let mut new_tree = NewTree::create(resources, &meta, &options.tree(resources.default_codec))?;
        // Every step that can fail runs before the edit, because a partition that is in the manifest but cannot be
        // opened would prevent the database from opening.
        let prepare = |meta: &PartitionMeta| {
            new_tree.publish(resources, meta)?;
            let state = inner.catalog.create_tree(meta, order, options).inspect_err(|_| new_tree.remove_published())?;
            let file_id = state.files_at_open.file_id;
            Ok((state, file_id))
        };
        let operator = components.merge_operator.as_ref();
        let operator_name = operator.map(|operator| operator.name());
        let created = writer.version_set.create_partition(meta, operator_name, prepare);
        if let Err(error) = &created {
            new_tree.remove_created();
            // A poisoned manifest may contain the edit; then the partition needs its file.
            if error.kind() != ErrorKind::Poisoned {
                new_tree.remove_published();
            }
        }
        let state = inner.poison.poison_on_failure(created)?;
        if inner.settings.durability != PersistMode::Buffer || new_tree.precedes_commits() {
            inner.poison.poison_on_failure(writer.version_set.sync())?;
        }
        state.set_components(components);
        operator.into_iter().for_each(|operator| state.set_merge_operator(operator));
        inner.catalog.insert(&state);
        Ok(Partition::new(state, Arc::clone(&self.handle)))
    }

    /// Opens a partition that exists with its stored options, and gives it components.
    fn open_existing(
        &self,
        state: &Arc<PartitionState>,
        options: &PartitionCreateOptions,
        components: &PartitionComponents,
        _ddl_guard: &MutexGuard<'_, ()>,
    ) -> Result<()> {
        let inner = &self.handle.inner;
        let _work = inner.begin_work()?;
        let new_operator = state.merge_operator.new_one(components)?;
        if new_operator.is_some() {
            inner.writer()?;
        }
        let phase = match &inner.follower {
            Some(_) => ReplayPhase::AfterWithReaders,
            None => ReplayPhase::After,
        };
        inner.catch_panics(|| inner.catalog.open(state, components, options, phase))?;
        inner.write_controller.update([&**state]); // the tree may have been built now
        new_operator.map_or(Ok(()), |operator| inner.store_merge_operator(state, operator))
    }

    /// Deletes a partition and its data durably.
    ///
    /// Its other handles return `Closed` from now on. Iterators and snapshots that were created before continue, and
    /// keep its data in memory and on disk until they are dropped. Transactions that were begun before return `Closed`.
    ///
    /// # Errors
    /// `Invalid` if the partition belongs to another database. `Closed` if it was deleted already. `Io`,
    /// `OutOfSpace`, `Poisoned` from writing.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// let old = db.open_partition("old", Default::default())?;
    /// let other_handle = old.clone();
    /// db.delete_partition(old)?;
    /// assert!(db.list_partitions().is_empty());
    /// assert_eq!(other_handle.get("key").unwrap_err().kind(), azekura::ErrorKind::Closed);
    /// # Ok(()) }
    /// ```
    pub fn delete_partition(&self, partition: Partition) -> Result<()> {
        partition.check_same_database(&self.handle)?;
        let inner = &self.handle.inner;
        let _call = inner.begin_api_call();
        inner.check_outside()?;
        let ddl_guard = lock(&inner.partition_ddl_lock);
        partition.state.tree()?;
        self.delete(&partition.state, ddl_guard)
    }

    /// Deletes the partition `name`, as [`delete_partition`](Database::delete_partition) does.
    ///
    /// The partition need not be open: a partition whose comparator is no longer available can be deleted too.
    ///
    /// # Errors
    /// `NotFound` if the partition does not exist. `Closed`. `Io`, `OutOfSpace`, `Poisoned` from writing.
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
        let ddl_guard = lock(&inner.partition_ddl_lock);
        let missing = || Error::new(ErrorKind::NotFound, format!("partition {name:?} does not exist"));
        let state = inner.partition(name).ok_or_else(missing)?;
        self.delete(&state, ddl_guard)
    }

    fn delete(&self, state: &PartitionState, ddl_guard: MutexGuard<'_, ()>) -> Result<()> {
        let inner = &self.handle.inner;
        let _work = inner.begin_work()?;
        let writer = inner.writer()?;
        let edits = [PartitionEdit::Dropped.of(state.id)];
        // The edit is written between two commits, so that a commit precedes the deletion as a whole or finds the
        // partition deleted. It is written after a sync of all earlier commits, because it may survive power loss as
        // soon as it is written. This first sync does most of that work while other threads may commit.
        inner.poison.poison_on_failure(writer.wal.sync(inner.last_visible.get(), false))?;
        let obsolete = writer.version_set.spilled_tables_dropped_by(&edits);
        let delete = || {
            writer.wal.sync(inner.last_visible.get(), false)?;
            writer.version_set.log_and_apply(&edits)?;
            if let Some(tree) = state.tree_if_built() {
                inner.snapshots.keep_deleted(state.id, Arc::from(tree.view()));
            }
            state.mark_deleted();
            inner.catalog.remove(&state.name);
            Ok(())
        };
        let written = inner.with_reserve(ReserveUse::Flush, || writer.committer.run_exclusively(delete));
        inner.poison.poison_on_failure(written)?;
        // Writers of other partitions no longer wait for flushes of this partition, so its flush error is cleared.
        inner.write_controller.clear_flush_error();
        inner.background.notify_task_end();
        inner.poison.poison_on_failure(writer.version_set.sync())?;
        state.discard(inner.obsolete_files());
        obsolete.into_iter().for_each(|table| inner.obsolete_files().push(DataFileKind::Table, table));
        inner.write_controller.update([state]);
        drop(ddl_guard); // other threads may create and delete partitions meanwhile
        inner.obsolete_files().remove_all();
        inner.background.wake_workers();
        Ok(())
    }

    /// Returns the names of all partitions, sorted.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// db.open_partition("users", Default::default())?;
    /// db.open_partition("orders", Default::default())?;
    /// assert_eq!(db.list_partitions(), ["orders", "users"]);
    /// # Ok(()) }
    /// ```
    pub fn list_partitions(&self) -> Vec<String> {
        let inner = &self.handle.inner;
        if inner.is_forked() { Vec::new() } else { inner.catalog.names() }
    }

    /// Returns the names of all partitions, sorted, each with its id.
    ///
    /// An id is used once. So in a list that is equal to an earlier one, no partition was deleted and created again
    /// under its name.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// db.open_partition("users", Default::default())?;
    /// let before = db.partition_ids();
    /// db.delete_partition_by_name("users")?;
    /// db.open_partition("users", Default::default())?;
    /// assert_eq!(db.list_partitions(), ["users"]);
    /// assert_ne!(db.partition_ids(), before);
    /// # Ok(()) }
    /// ```
    pub fn partition_ids(&self) -> Vec<(String, u64)> {
        let inner = &self.handle.inner;
        let partitions = if inner.is_forked() { Vec::new() } else { inner.catalog.all() };
        partitions.iter().map(|state| (state.name.to_string(), state.id.0)).collect()
    }

    /// Returns whether the partition `name` exists.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// assert!(!db.partition_exists("users"));
    /// db.open_partition("users", Default::default())?;
    /// assert!(db.partition_exists("users"));
    /// # Ok(()) }
    /// ```
    pub fn partition_exists(&self, name: &str) -> bool {
        self.handle.inner.partition(name).is_some()
    }

    /// Creates an empty batch.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let accounts = db.open_partition("accounts", Default::default())?;
    /// let mut transfer = db.batch();
    /// transfer.insert(&accounts, "ada", "90");
    /// transfer.insert(&accounts, "grace", "110");
    /// assert!(accounts.is_empty()?); // no reader sees a part of the batch
    /// transfer.commit()?;
    /// assert_eq!(accounts.len()?, 2);
    /// # Ok(()) }
    /// ```
    pub fn batch(&self) -> Batch {
        Batch::new(Arc::clone(&self.handle))
    }

    /// Creates a snapshot of all partitions at the newest visible commit.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let stock = db.open_partition("stock", Default::default())?;
    /// # let orders = db.open_partition("orders", Default::default())?;
    /// let before = db.snapshot();
    /// stock.insert("apples", "41")?;
    /// orders.insert("order 1", "one apple")?;
    /// assert!(before.is_empty(&stock)? && before.is_empty(&orders)?); // one point in time of all partitions
    /// # Ok(()) }
    /// ```
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::new(Arc::clone(&self.handle))
    }

    /// Begins a transaction at [`Isolation::Serializable`](crate::Isolation::Serializable). It reads the state of now.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut tx = db.transaction();
    /// tx.insert(&fruit, "apple", "red")?;
    /// assert!(fruit.is_empty()?);
    /// tx.commit()?;
    /// assert_eq!(fruit.get("apple")?.unwrap(), "red");
    /// # Ok(()) }
    /// ```
    pub fn transaction(&self) -> Transaction {
        Transaction::new(&self.handle, Isolation::default())
    }

    /// Begins a transaction with `options`. If it is exclusive, waits for the end of other exclusive transactions.
    ///
    /// # Errors
    /// For an exclusive transaction `Invalid` if this thread has another one or the database is open for reading only,
    /// `Poisoned` and `Closed`. None for any other.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// use azekura::{Isolation, TransactionOptions};
    /// let snapshot = TransactionOptions::default().isolation(Isolation::Snapshot);
    /// let (mut first, mut second) = (db.transaction_with(snapshot.clone())?, db.transaction_with(snapshot)?);
    /// first.insert(&fruit, "apple", "red")?;
    /// second.insert(&fruit, "apple", "green")?;
    /// first.commit()?;
    /// assert_eq!(second.commit().unwrap_err().kind(), azekura::ErrorKind::Conflict); // the first committer wins
    /// # Ok(()) }
    /// ```
    pub fn transaction_with(&self, options: TransactionOptions) -> Result<Transaction> {
        Transaction::begin(&self.handle, &options)
    }

    /// Runs `work` in a transaction and commits it; repeats this as long as another commit interferes. Returns the
    /// result of the last call of `work`.
    ///
    /// `work` may be called several times, so its effects outside of the transaction must be repeatable. An error of
    /// `work` other than `Conflict` ends the call, and nothing is written. After three lost rounds the transaction is
    /// [exclusive](crate::TransactionOptions::exclusive), so it succeeds; all other commits of the database wait while
    /// `work` runs. Until then a round that is lost costs what its reads cost.
    ///
    /// # Errors
    /// Those of `work` and of [`Transaction::commit`], except `Conflict`.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let accounts = db.open_partition("accounts", Default::default())?;
    /// # accounts.insert("ada", "9")?;
    /// # accounts.insert("grace", "1")?;
    /// use azekura::{Error, Transaction};
    /// let balance = |tx: &Transaction, name: &str| -> azekura::Result<u64> {
    ///     let bytes = tx.get(&accounts, name)?.ok_or_else(|| Error::invalid("no such account"))?;
    ///     Ok(std::str::from_utf8(&bytes).unwrap().parse().unwrap())
    /// };
    /// let transfer = |from: &str, to: &str, amount: u64| {
    ///     db.transact(|tx| {
    ///         let left = balance(tx, from)?.checked_sub(amount).ok_or_else(|| Error::invalid("too little money"))?;
    ///         let sum = balance(tx, to)? + amount;
    ///         tx.insert(&accounts, from, left.to_string())?;
    ///         tx.insert(&accounts, to, sum.to_string())
    ///     })
    /// };
    /// transfer("ada", "grace", 5)?;
    /// assert_eq!(transfer("ada", "grace", 5).unwrap_err().message(), "too little money");
    /// assert_eq!(accounts.get("grace")?.unwrap(), "6");
    /// # Ok(()) }
    /// ```
    pub fn transact<R>(&self, work: impl FnMut(&mut Transaction) -> Result<R>) -> Result<R> {
        self.transact_with(TransactionOptions::default(), work)
    }

    /// As [`transact`](Database::transact), with options: at [`Isolation::Snapshot`](crate::Isolation::Snapshot) other
    /// commits interfere only if they change what the transaction writes, and an
    /// [exclusive](crate::TransactionOptions::exclusive) transaction has no lost rounds. `work` may set the
    /// [durability](Transaction::durability).
    ///
    /// # Errors
    /// As [`transact`](Database::transact), and those of [`transaction_with`](Database::transaction_with).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let visits = db.open_partition("visits", Default::default())?;
    /// # for n in 0..10u32 {
    /// #     visits.insert(n.to_be_bytes(), "page")?;
    /// # }
    /// use azekura::{Isolation, PersistMode, TransactionOptions};
    /// let options = TransactionOptions::default().isolation(Isolation::Snapshot);
    /// let mut rounds = 0;
    /// let counted = db.transact_with(options, |tx| {
    ///     rounds += 1;
    ///     let count = tx.keys(&visits).count();
    ///     visits.insert(count.to_be_bytes(), "page")?; // another thread changes only what is read
    ///     tx.insert(&visits, "count", count.to_string())?;
    ///     tx.durability(PersistMode::SyncData);
    ///     Ok(count)
    /// })?;
    /// assert_eq!((rounds, counted), (1, 10));
    /// # Ok(()) }
    /// ```
    pub fn transact_with<R>(
        &self,
        options: TransactionOptions,
        mut work: impl FnMut(&mut Transaction) -> Result<R>,
    ) -> Result<R> {
        let mut lost_rounds = 0;
        loop {
            let exclusive = options.exclusive || lost_rounds >= LOST_ROUNDS_MAX;
            let mut tx = self.transaction_with(options.clone().exclusive(exclusive))?;
            match work(&mut tx).and_then(|result| tx.commit().map(|()| result)) {
                Err(error) if error.kind() == ErrorKind::Conflict && !exclusive => lost_rounds += 1,
                done => return done,
            }
        }
    }

    /// Makes every commit that has returned durable to the level `mode`. [`PersistMode::Buffer`] changes nothing,
    /// because every commit has this level.
    ///
    /// # Errors
    /// `Poisoned` if this sync or an earlier one failed: later writes fail, reads continue. Close the database, check
    /// the device and open it again. `Invalid` if the database is open for reading only. `Closed`.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let log = db.open_partition("log", Default::default())?;
    /// use azekura::PersistMode;
    /// for line in 0..10u32 {
    ///     log.insert(line.to_be_bytes(), "text")?; // survives a crash of the process only
    /// }
    /// let syncs = db.metrics().wal_syncs;
    /// db.persist(PersistMode::SyncData)?; // one sync: all ten lines survive power loss
    /// assert!(db.metrics().wal_syncs > syncs);
    /// # Ok(()) }
    /// ```
    pub fn persist(&self, mode: PersistMode) -> Result<()> {
        self.handle.inner.persist(mode)
    }

    /// Returns the settings with which this handle was opened.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// let db = azekura::Config::new(&path).workers(1).open()?;
    /// assert_eq!((db.settings().workers, db.settings().max_open_files), (1, 512)); // 512 is a default
    /// # Ok(()) }
    /// ```
    pub fn settings(&self) -> &Settings {
        &self.handle.inner.settings
    }

    /// Returns the settings with which the database was last opened for writing, in this process or another one;
    /// `None` if an older version of azekura wrote the manifest.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// use azekura::Config;
    /// Config::new(&path).workers(4).open()?.close()?;
    /// let reader = Config::new(&path).open_read_only()?;
    /// assert_eq!(reader.stored_settings().map(|settings| settings.workers), Some(4));
    /// # Ok(()) }
    /// ```
    pub fn stored_settings(&self) -> Option<Settings> {
        self.handle.inner.recovery_stats.stored_settings.clone()
    }

    /// Returns metrics of the database since it was opened.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// let metrics = db.metrics();
    /// assert_eq!((metrics.commits, metrics.records), (1, 1));
    /// assert!(!metrics.poisoned);
    /// # Ok(()) }
    /// ```
    pub fn metrics(&self) -> Metrics {
        Metrics::of(&self.handle.inner)
    }

    /// Returns the total length in bytes of all files in the database directory: tables, blob files, pools, WAL and
    /// manifest. Returns 0 if the directory cannot be read.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let photos = db.open_partition("photos", Default::default())?;
    /// let before = db.disk_space();
    /// photos.insert("sky", vec![7; 100_000])?;
    /// photos.flush()?;
    /// assert!(photos.disk_space() > 0);
    /// assert!(db.disk_space() > photos.disk_space()); // the WAL, the manifest and the disk reserve count too
    /// # assert!(before > 0);
    /// # Ok(()) }
    /// ```
    pub fn disk_space(&self) -> u64 {
        let inner = &self.handle.inner;
        inner.fs.read_dir(&inner.dir).map_or(0, |entries| entries.iter().map(|entry| entry.len).sum())
    }

    /// Writes a copy of the database, as of one point between two commits, to the new directory `path`.
    ///
    /// The copy can be opened at once. Tables and blob files are hard-linked where the file system allows it, which
    /// is fast and uses little space; elsewhere they are copied. Missing parents of `path` are created.
    ///
    /// The copy is built in the parent of `path`, in a directory `azekura-checkpoint-<16 hexadecimal digits>.tmp`. If
    /// the process crashes during the call, that directory remains, and you can remove it. No other file or directory
    /// is removed or replaced.
    ///
    /// # Errors
    /// `Invalid` if `path` exists, even as an empty directory, or if the database is open for reading only. `Conflict`
    /// if compactions removed tables faster than the call could link or copy them; try again. `Io`, `OutOfSpace` from
    /// writing. `Poisoned`, `Closed`. After a failure nothing exists at `path`, with one exception: if the copy was
    /// complete, its name could not be made durable, and the file system did not allow the name to be removed, then
    /// the complete copy is there. If the system crashes after the name could not be made durable, `path` holds the
    /// complete copy or does not exist.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// # let copy = dir.path().join("copy");
    /// fruit.insert("apple", "red")?;
    /// db.checkpoint(&copy)?;
    /// fruit.remove("apple")?; // not in the copy
    ///
    /// let copy = azekura::Config::new(&copy).open()?;
    /// assert_eq!(copy.partition("fruit")?.get("apple")?.unwrap(), "red");
    /// # Ok(()) }
    /// ```
    pub fn checkpoint(&self, path: impl AsRef<Path>) -> Result<()> {
        checkpoint::checkpoint(&self.handle.inner, path.as_ref())
    }

    /// Flushes all memtables, stops the workers and releases the lock on the directory. Other handles return `Closed`
    /// from now on.
    ///
    /// If another call is closing the database, this call returns at once: only the return of the first call means
    /// that the directory is released.
    ///
    /// Obsolete files are removed before the call returns. Exception: a file that an iterator or a running read of
    /// this process still uses, even through another database, is removed by the next open.
    ///
    /// # Errors
    /// `Io`, `OutOfSpace`, `Poisoned` from flushing. The directory is released also after an error, and the WAL
    /// contains every acknowledged commit.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// # use azekura::{Config, ErrorKind};
    /// let db = Config::new(&path).open()?;
    /// let fruit = db.open_partition("fruit", Default::default())?;
    /// db.close()?;
    /// assert_eq!(fruit.get("apple").unwrap_err().kind(), ErrorKind::Closed);
    /// let db = Config::new(&path).open()?; // the directory is free
    /// # Ok(()) }
    /// ```
    pub fn close(self) -> Result<()> {
        self.handle.close()
    }

    /// Runs one background task in the calling thread; returns false if there was none.
    ///
    /// With [`workers(0)`](Config::workers) background work runs only in this call. Tasks that failed are retried
    /// once there are no other tasks.
    ///
    /// # Errors
    /// The error of the task; a later call runs the task again. `Invalid` if the database is open for reading only.
    /// `Poisoned`, `Closed`.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// # use azekura::{Config, PartitionCreateOptions};
    /// let db = Config::new(&path).workers(0).open()?;
    /// let small = PartitionCreateOptions::default().max_memtable_size(4 << 10);
    /// let log = db.open_partition("log", small)?;
    /// log.insert("1", [0; 5_000])?; // more than the memtable may hold
    /// assert_eq!(log.disk_space(), 0); // no thread flushes it
    /// while db.step()? {}
    /// assert!(log.disk_space() > 0);
    /// # Ok(()) }
    /// ```
    pub fn step(&self) -> Result<bool> {
        self.handle.inner.writer()?;
        worker::step(&self.handle.inner)
    }

    /// Returns the absolute path of the directory. A relative path is resolved against the working directory at open.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("db");
    /// let db = azekura::Config::new(&path).open()?;
    /// assert!(db.path().is_absolute());
    /// assert!(db.path().join("MANIFEST").exists());
    /// # Ok(()) }
    /// ```
    pub fn path(&self) -> &Path {
        &self.handle.inner.dir
    }
}

impl std::fmt::Debug for Database {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Database").field("path", &self.handle.inner.dir).finish_non_exhaustive()
    }
}

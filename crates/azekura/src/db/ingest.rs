//! Implements [`Partition::ingest`] and [`Partition::bulk`]: bulk writes that do not pass the write-ahead log (WAL).
//!
//! The calls copy the entries of the caller to a buffer, and write the buffer to tables as one piece of work. The
//! caller's iterator runs outside of work and without a lock, so it may use the database. When all tables are durable,
//! one edit adds them to the partition, between two commits and with one sequence number. Other commits wait for that
//! edit: for a sync of the WAL and a sync of the manifest.
//!
//! A pool has no tables: there, the entries are one batch.

use std::fmt;
use std::sync::Arc;

use crate::base::event::Event;
use crate::base::sync::lock;
use crate::base::{Error, KeyOrder, RecordKind, Result};
use crate::db::batch::Batch;
use crate::db::config::PersistMode;
use crate::db::inner::{DbInner, DbWriter};
use crate::db::partition::Partition;
use crate::db::partition_state::PartitionState;
use crate::db::worker::{flush_and_wait, record_task, remove_obsolete_files};
use crate::engine::{EngineHost, Task, TaskReport};
use crate::lsm::entry_buffer::EntryBuffer;
use crate::lsm::external_sort::{ExternalSorter, SortedEntries};
use crate::lsm::ingest::{IngestOutputs, IngestWriter};
use crate::lsm::tree::LsmTree;
use crate::wal::format::{IngestMarker, IngestNote, check_key_and_value_lengths};

/// Bytes of entries that are copied before they are written.
const CHUNK_BYTES: usize = 256 << 10;
/// How often the memtables are flushed while commits go on, before they are flushed while commits wait.
const FLUSH_ATTEMPTS: usize = 3;
/// Default memory of [`Partition::bulk`], unless a quarter of the memory budget is less.
const BULK_MEMORY: usize = 64 << 20;
/// Smallest memory of [`Partition::bulk`].
const BULK_MEMORY_MIN: usize = 64 << 10;

/// Options of [`Partition::bulk_with_options`].
///
/// ```
/// let options = azekura::BulkOptions::default().memory(256 << 20);
/// assert_ne!(options, azekura::BulkOptions::default());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BulkOptions {
    memory: Option<usize>,
}

impl BulkOptions {
    /// Sets the bytes of memory that entries use until they are sorted, at least 64 KiB. Larger input is sorted in
    /// temporary files, which take about as much disk space as the input. Default: 64 MiB, or a quarter of the memory
    /// budget if that is less.
    ///
    /// The bound applies to each call, in addition to the memory budget. An entry that is larger than the bound is
    /// held alone. Merging the temporary files uses up to 8 MiB.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let squares = db.open_partition("squares", Default::default())?;
    /// let options = azekura::BulkOptions::default().memory(1 << 20);
    /// let entries = (0..1_000u32).rev().map(|n| Ok((n.to_be_bytes(), (n * n).to_be_bytes())));
    /// squares.bulk_with_options::<_, _, azekura::Error>(entries, &options)?;
    /// assert_eq!(squares.len()?, 1_000);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn memory(mut self, bytes: usize) -> BulkOptions {
        self.memory = Some(bytes);
        self
    }
}

impl Partition {
    /// Writes entries in ascending key order, each key once, as one atomic commit. Returns their number.
    ///
    /// This is the fastest way to load data, because the entries are written to tables directly, without the
    /// write-ahead log (WAL) and memtables. The partition may have data already, also in the same key range: the
    /// entries replace the values of existing keys. Memory use does not depend on the number of entries.
    ///
    /// When the call returns, all entries are visible and as durable as with
    /// [`PersistMode::SyncAll`](crate::PersistMode), together with all commits before them. Until then none is
    /// visible, and after an error or a crash there is either none or all of them. Snapshots and iterators that exist
    /// already never see them. At the end, other commits wait for two syncs of small writes. If memtables have keys
    /// in the range of the entries, they are flushed first. Without entries, the commits before the call are synced.
    ///
    /// A [default time to live](crate::PartitionCreateOptions::default_ttl) counts from the beginning of the call or of
    /// the [`Ingest`], and in a pool from the call that adds the entry.
    ///
    /// `entries` may use the database while it is iterated. A pool takes the entries as a batch: all of them together
    /// may have at most half the memory budget.
    ///
    /// # Errors
    /// `Invalid`, which names the position of the entry, for a key that is not above the previous one, or a key or
    /// value above the limits of [`insert`](Partition::insert); in a pool, for more than half the memory budget.
    /// `OutOfSpace` and `Io` if the files cannot be written, `Closed` if the partition was deleted or the database
    /// closed meanwhile, `Poisoned`. After all of them the partition is unchanged, with two exceptions: after
    /// `Poisoned`, reads may see the entries, and the next open finds none of them or all; after `Io` because of too
    /// many open files, the entries may exist already.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// let squares = db.open_partition("squares", Default::default())?;
    /// squares.ingest((0..1_000u32).map(|n| (n.to_be_bytes(), (n * n).to_be_bytes())))?;
    /// assert_eq!(squares.get(30u32.to_be_bytes())?.unwrap(), 900u32.to_be_bytes()[..]);
    /// let unsorted = squares.ingest([("b", "1"), ("a", "2")]);
    /// assert_eq!(unsorted.unwrap_err().kind(), azekura::ErrorKind::Invalid);
    /// assert_eq!(squares.len()?, 1_000); // unchanged
    /// # Ok(()) }
    /// ```
    #[doc(alias = "bulk_load")]
    pub fn ingest<K: AsRef<[u8]>, V: AsRef<[u8]>>(&self, entries: impl IntoIterator<Item = (K, V)>) -> Result<u64> {
        self.try_ingest(entries.into_iter().map(Ok::<_, Error>))
    }

    /// As [`ingest`](Partition::ingest), for a source of entries that may fail. The first error ends the call, and
    /// nothing is written.
    ///
    /// # Errors
    /// The first error of `entries`, and those of [`ingest`](Partition::ingest).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let copy = db.open_partition("copy", Default::default())?;
    /// # let words = db.open_partition("words", Default::default())?;
    /// # words.insert("apple", "red")?;
    /// copy.try_ingest(words.iter())?; // copies a partition
    /// assert_eq!(copy.get("apple")?.unwrap(), "red");
    /// let lines = ["a=1", "broken"].map(|line| line.split_once('=').ok_or("a line has no equals sign"));
    /// let failed = copy.try_ingest::<_, _, Box<dyn std::error::Error>>(lines.map(|line| line.map_err(Into::into)));
    /// assert!(failed.is_err() && copy.len()? == 1);
    /// # Ok(()) }
    /// ```
    pub fn try_ingest<K: AsRef<[u8]>, V: AsRef<[u8]>, E: From<Error>>(
        &self,
        entries: impl IntoIterator<Item = std::result::Result<(K, V), E>>,
    ) -> std::result::Result<u64, E> {
        let mut ingest = self.start_ingest()?;
        for entry in entries {
            let (key, value) = entry?;
            ingest.insert(key, value)?;
        }
        Ok(ingest.commit()?)
    }

    /// Begins an [`Ingest`], which takes the entries one at a time.
    ///
    /// # Errors
    /// As [`ingest`](Partition::ingest).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut ingest = fruit.start_ingest()?;
    /// ingest.insert("apple", "red")?;
    /// drop(ingest); // without a commit, nothing is written
    /// assert!(fruit.is_empty()?);
    /// # Ok(()) }
    /// ```
    pub fn start_ingest(&self) -> Result<Ingest<'_>> {
        Ingest::begin(self)
    }

    /// As [`ingest`](Partition::ingest), for entries in any order. Of entries with the same key, the last one counts.
    /// Returns the number of different keys.
    ///
    /// Input that exceeds the memory of [`BulkOptions`] is sorted in temporary files in the directory of the database.
    ///
    /// # Errors
    /// As [`ingest`](Partition::ingest), except that the order of the keys does not matter.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// let fruit = db.open_partition("fruit", Default::default())?;
    /// let keys = fruit.bulk([("pear", "green"), ("apple", "green"), ("apple", "red")])?;
    /// assert_eq!((keys, fruit.get("apple")?.unwrap()), (2, "red".into()));
    /// # Ok(()) }
    /// ```
    pub fn bulk<K: AsRef<[u8]>, V: AsRef<[u8]>>(&self, entries: impl IntoIterator<Item = (K, V)>) -> Result<u64> {
        self.bulk_with_options(entries.into_iter().map(Ok::<_, Error>), &BulkOptions::default())
    }

    /// As [`bulk`](Partition::bulk), with options, and for a source of entries that may fail.
    ///
    /// # Errors
    /// The first error of `entries`, those of [`bulk`](Partition::bulk), and `Invalid` for options out of their range.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// # let by_colour = db.open_partition("by colour", Default::default())?;
    /// fruit.ingest([("apple", "red"), ("pear", "green")])?;
    /// let swapped = fruit.iter().map(|entry| entry.map(|(name, colour)| (colour, name)));
    /// by_colour.bulk_with_options(swapped, &azekura::BulkOptions::default().memory(1 << 20))?;
    /// assert_eq!(by_colour.first_key_value()?.unwrap().1, "pear");
    /// # Ok(()) }
    /// ```
    pub fn bulk_with_options<K: AsRef<[u8]>, V: AsRef<[u8]>, E: From<Error>>(
        &self,
        entries: impl IntoIterator<Item = std::result::Result<(K, V), E>>,
        options: &BulkOptions,
    ) -> std::result::Result<u64, E> {
        let _call = self.handle.inner.begin_api_call();
        let mut session = BulkSession::begin(self, options)?;
        for entry in entries {
            let (key, value) = entry?;
            session.add(key.as_ref(), value.as_ref())?;
        }
        Ok(session.commit()?)
    }
}

/// Checks the lengths of the entry at `position`.
fn check_entry(position: u64, key: &[u8], value: &[u8]) -> Result<()> {
    check_key_and_value_lengths(key, value)
        .map_err(|error| Error::invalid(format!("entry {position} of the input: {}", error.message())))
}

/// Where the entries of a call go.
enum IngestTarget<'a> {
    Tables(Box<TableTarget<'a>>),
    /// The batch for a pool.
    Batch(Batch),
}

/// Writes entries to the tables of an LSM partition. Removes the files when it is dropped before the commit.
struct TableTarget<'a> {
    inner: &'a DbInner,
    partition: &'a Arc<PartitionState>,
    tree: &'a LsmTree,
    /// The expiry time of the entries, if the partition has a default time to live.
    expires_ms: Option<u64>,
    /// `None` before the first entry and after the last.
    writer: Option<IngestWriter>,
}

/// Takes entries in ascending key order one at a time, as [`Partition::ingest`] takes an iterator. Made by
/// [`Partition::start_ingest`].
///
/// It borrows each key and value for one call only, so a program can reuse its buffers. Dropping it without
/// [`commit`](Ingest::commit) changes nothing.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// let squares = db.open_partition("squares", Default::default())?;
/// let mut ingest = squares.start_ingest()?;
/// for n in 0..1_000u32 {
///     ingest.insert(n.to_be_bytes(), (n * n).to_be_bytes())?;
/// }
/// assert!(squares.is_empty()?);
/// assert_eq!(ingest.commit()?, 1_000);
/// assert_eq!(squares.len()?, 1_000);
/// # Ok(()) }
/// ```
#[must_use = "an ingest does nothing until it is committed"]
pub struct Ingest<'a> {
    partition: &'a Partition,
    order: KeyOrder,
    target: IngestTarget<'a>,
    buffer: EntryBuffer,
    last_key: Vec<u8>,
    entries: u64,
    user_bytes: u64,
    /// An entry was refused or could not be written, so nothing is committed.
    has_failed: bool,
}

impl<'a> Ingest<'a> {
    fn begin(partition: &'a Partition) -> Result<Ingest<'a>> {
        Ok(Ingest {
            partition,
            order: partition.state.tree()?.key_order().clone(),
            target: IngestTarget::begin(partition)?,
            buffer: EntryBuffer::default(),
            last_key: Vec::new(),
            entries: 0,
            user_bytes: 0,
            has_failed: false,
        })
    }

    /// Adds an entry. After an error or a panic of the comparator, [`commit`](Ingest::commit) fails.
    ///
    /// # Errors
    /// As [`Partition::ingest`].
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut ingest = fruit.start_ingest()?;
    /// ingest.insert("pear", "green")?;
    /// assert!(ingest.insert("apple", "red").is_err()); // not in order
    /// assert!(ingest.commit().is_err() && fruit.is_empty()?);
    /// # Ok(()) }
    /// ```
    #[inline]
    pub fn insert(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Result<()> {
        let (key, value) = (key.as_ref(), value.as_ref());
        // Stays set after an error, and after a panic of the comparator that the caller catches.
        let had_failed = std::mem::replace(&mut self.has_failed, true);
        self.add(key, value)?;
        self.has_failed = had_failed;
        Ok(())
    }

    #[inline]
    fn add(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let position = self.entries;
        check_entry(position, key, value)?;
        if position > 0 && self.order.cmp(&self.last_key, key).is_ge() {
            return Err(Error::invalid(format!(
                "entry {position} of the input: its key is not above that of the entry before, as ingest requires"
            )));
        }
        self.entries += 1;
        self.user_bytes += (key.len() + value.len()) as u64;
        self.last_key.clear();
        self.last_key.extend_from_slice(key);
        match &mut self.target {
            // Not `insert`, whose errors have a position in the batch, of which the caller does not know.
            IngestTarget::Batch(batch) => batch.try_push(self.partition, RecordKind::Put, key, value),
            IngestTarget::Tables(target) => {
                self.buffer.push(key, value);
                if self.buffer.memory() < CHUNK_BYTES {
                    return Ok(());
                }
                let written = target.write_buffer(&self.buffer);
                self.buffer.clear(2 * CHUNK_BYTES);
                written
            }
        }
    }

    /// Commits all entries atomically, and returns their number.
    ///
    /// # Errors
    /// As [`Partition::ingest`]; `Invalid` if an entry was refused.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut ingest = fruit.start_ingest()?;
    /// ingest.insert("apple", "red")?;
    /// ingest.commit()?;
    /// assert_eq!(fruit.get("apple")?.unwrap(), "red");
    /// # Ok(()) }
    /// ```
    pub fn commit(self) -> Result<u64> {
        if self.has_failed {
            return Err(Error::invalid("an entry of the ingest was refused, so nothing is committed"));
        }
        let _call = self.partition.handle.inner.begin_api_call();
        self.partition.handle.inner.check_outside()?;
        self.partition.state.tree()?;
        let (buffer, entries) = (self.buffer, self.entries);
        match self.target {
            IngestTarget::Batch(batch) => commit_batch(batch)?,
            IngestTarget::Tables(mut target) => {
                target.write_buffer(&buffer)?;
                target.commit(entries, self.user_bytes)?;
            }
        }
        Ok(entries)
    }
}

impl fmt::Debug for Ingest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ingest").field("entries", &self.entries).finish_non_exhaustive()
    }
}

/// A call with entries in any order.
struct BulkSession<'a> {
    partition: &'a Partition,
    /// For an LSM partition. Dropped before `target`, which removes its files.
    sorter: Option<ExternalSorter>,
    target: IngestTarget<'a>,
    position: u64,
    user_bytes: u64,
}

impl<'a> BulkSession<'a> {
    fn begin(partition: &'a Partition, options: &BulkOptions) -> Result<BulkSession<'a>> {
        let inner = &partition.handle.inner;
        let budget = usize::try_from(inner.settings.memory_budget / 4).unwrap_or(usize::MAX);
        let memory = options.memory.unwrap_or(BULK_MEMORY.min(budget).max(BULK_MEMORY_MIN));
        if memory < BULK_MEMORY_MIN {
            return Err(Error::invalid(format!(
                "bulk memory is {memory} bytes, it must be at least {BULK_MEMORY_MIN}"
            )));
        }
        let target = IngestTarget::begin(partition)?;
        let sorter = match &target {
            IngestTarget::Tables(target) => Some(ExternalSorter::new(target.tree, memory, inner.now_ms())),
            IngestTarget::Batch(_) => None,
        };
        Ok(BulkSession { partition, target, sorter, position: 0, user_bytes: 0 })
    }

    #[inline]
    fn add(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        check_entry(self.position, key, value)?;
        self.position += 1;
        self.user_bytes += (key.len() + value.len()) as u64;
        match (&mut self.target, &mut self.sorter) {
            (IngestTarget::Batch(batch), _) => batch.try_push(self.partition, RecordKind::Put, key, value),
            (IngestTarget::Tables(target), Some(sorter)) => {
                if sorter.must_write_before(key, value) {
                    target.work(|| sorter.write_run())?;
                }
                sorter.push(key, value);
                Ok(())
            }
            (IngestTarget::Tables(_), None) => Err(Error::invalid("the entries have no sorter")),
        }
    }

    fn commit(self) -> Result<u64> {
        match (self.target, self.sorter) {
            (IngestTarget::Tables(mut target), Some(sorter)) => {
                let sorted = target.work(|| sorter.finish())?;
                let entries = target.write_sorted(sorted)?;
                target.commit(entries, self.user_bytes)?;
                Ok(entries)
            }
            (IngestTarget::Batch(batch), _) => {
                let keys = distinct_keys(&batch, self.partition.state.tree()?.key_order())?;
                commit_batch(batch)?;
                Ok(keys)
            }
            (IngestTarget::Tables(_), None) => Ok(0),
        }
    }
}

fn distinct_keys(batch: &Batch, order: &KeyOrder) -> Result<u64> {
    let mut keys = batch.keys()?;
    keys.sort_unstable_by(|a, b| order.cmp(a, b));
    keys.dedup_by(|a, b| order.cmp(a, b).is_eq());
    Ok(keys.len() as u64)
}

fn commit_batch(mut batch: Batch) -> Result<()> {
    batch.durability(PersistMode::SyncAll).commit()
}

impl<'a> IngestTarget<'a> {
    fn begin(partition: &'a Partition) -> Result<IngestTarget<'a>> {
        let inner = &partition.handle.inner;
        inner.check_outside()?;
        inner.admit_ingest()?;
        Ok(match partition.state.tree()?.lsm() {
            Some(tree) => {
                let ttl_ms = partition.state.expiry.default_ttl_ms();
                let expires_ms = ttl_ms.map(|ttl_ms| inner.begin_expiring_write(&partition.state, ttl_ms, &[]));
                let (expires_ms, partition) = (expires_ms.transpose()?, &partition.state);
                IngestTarget::Tables(Box::new(TableTarget { inner, partition, tree, expires_ms, writer: None }))
            }
            None => IngestTarget::Batch(Batch::new(Arc::clone(&partition.handle))),
        })
    }
}

impl TableTarget<'_> {
    /// Runs `write` as work, while the database and the partition are open.
    fn work<T>(&self, write: impl FnOnce() -> Result<T>) -> Result<T> {
        let inner = self.inner;
        inner.check_outside()?;
        let _work = inner.begin_work()?;
        let writer = inner.writer()?;
        self.partition.tree()?;
        let _space = writer.space.share_disk_space();
        inner.catch_panics(write)
    }

    /// Writes entries in key order to the tables.
    fn write_buffer(&mut self, entries: &EntryBuffer) -> Result<()> {
        let Some((first_key, _)) = entries.get(0) else { return Ok(()) };
        let mut writer = self.writer.take();
        let written = self.work(|| {
            let begin = || self.tree.begin_ingest(first_key, self.inner.now_ms(), self.expires_ms);
            let writer = writer.get_or_insert_with(begin);
            entries.iter().try_for_each(|(key, value)| writer.add(key, value))
        });
        self.writer = writer;
        written
    }

    /// Writes all entries to tables, in pieces of about [`CHUNK_BYTES`]. Returns their number.
    fn write_sorted(&mut self, mut sorted: SortedEntries) -> Result<u64> {
        let (inner, mut entries) = (self.inner, 0);
        loop {
            let mut writer = self.writer.take();
            let written = self.work(|| {
                let mut left = CHUNK_BYTES;
                sorted.write_while(|key, value| {
                    let begin = || self.tree.begin_ingest(key, inner.now_ms(), self.expires_ms);
                    writer.get_or_insert_with(begin).add(key, value)?;
                    entries += 1;
                    left = left.saturating_sub(EntryBuffer::entry_memory(key, value));
                    Ok(left > 0)
                })
            });
            self.writer = writer;
            if written? {
                return Ok(entries);
            }
        }
    }

    /// Finishes the tables and adds them to the partition.
    fn commit(&mut self, entries: u64, user_bytes: u64) -> Result<()> {
        self.inner.check_outside()?;
        let Some(writer) = self.writer.take() else {
            self.partition.tree()?;
            return self.inner.persist(PersistMode::SyncAll); // no entries: the commits before them
        };
        let outputs = self.work(|| writer.finish())?;
        self.install(outputs, |report| {
            self.inner.counters.record_ingest(user_bytes, report);
            self.inner.emit(&Event::Ingested {
                partition: self.partition.name.to_string(),
                entries,
                tables: report.tables,
                bytes: report.bytes_written,
            });
        })?;
        self.inner.background.wake_workers();
        Ok(())
    }

    /// Adds the tables to the partition, between two commits. Before, flushes memtables with keys in their range. If
    /// other threads go on writing such keys, the last flush runs while commits wait. Calls `record` inside the work
    /// that added them, so that the event precedes `Closed`.
    fn install(&self, outputs: IngestOutputs, record: impl Fn(&TaskReport)) -> Result<()> {
        let inner = self.inner;
        let writer = inner.writer()?;
        let mut outputs = Some(outputs);
        let mut flushes = 0;
        loop {
            writer.committer.wait_for_turn_end()?;
            if let Some(outputs) = &outputs
                && flushes < FLUSH_ATTEMPTS
                && inner.catch_panics(|| self.tree.memtables_overlap(outputs))?
            {
                flushes += 1;
                flush_and_wait(inner, self.partition)?;
            }
            // The sync while commits wait is then a short one.
            inner.sync_wal_through(inner.last_visible.get())?;
            if self.try_install(writer, &mut outputs, flushes == FLUSH_ATTEMPTS, &record)? {
                return Ok(());
            }
        }
    }

    /// False if an exclusive turn is running, or memtables have keys in the range of the tables and `flush` is false.
    fn try_install(
        &self,
        writer: &DbWriter,
        outputs: &mut Option<IngestOutputs>,
        flush: bool,
        record: &impl Fn(&TaskReport),
    ) -> Result<bool> {
        let (inner, tree) = (self.inner, self.tree);
        let Some(first_table) = outputs.as_ref().map(IngestOutputs::first_table) else { return Ok(false) };
        // Until the edits are written, no partition is created, and `marker` counts as unused. Otherwise a manifest
        // that ends before the edits could record it as used. Nor is one deleted. Locked before the tree.
        let _no_creation = lock(&inner.partition_ddl_lock);
        self.partition.tree()?;
        let marker = IngestMarker { partition: writer.version_set.next_partition_id(), first_table };
        let mut note = Vec::new();
        if let Some((first, last)) = outputs.as_ref().and_then(IngestOutputs::key_range) {
            IngestNote { partition: self.partition.id, first, last }.put(&mut note);
        }
        let _work = inner.begin_work()?;
        let locks = tree.lock_for_ingest();
        let mut flushed = TaskReport::default();
        let prepare = || {
            let Some(tables) = outputs.as_ref() else { return Ok(None) };
            if tree.memtables_overlap(tables)? {
                if !flush {
                    return Ok(None);
                }
                flushed = tree.flush_for_ingest(&locks, inner)?;
            }
            Ok(outputs.take())
        };
        let install = |tables, seqno| tree.install_ingest(tables, seqno, marker.partition, &locks, inner);
        let installed = inner.catch_panics(|| writer.committer.install_exclusively(&note, marker, prepare, install));
        drop(locks);
        if !flushed.is_idle() {
            record_task(inner, self.partition, Task::Flush, flushed);
        }
        inner.write_controller.update([&**self.partition]);
        inner.background.notify_task_end();
        let installed = inner.poison.poison_on_failure(installed)?;
        Ok(installed.inspect(record).is_some())
    }
}

impl Drop for TableTarget<'_> {
    fn drop(&mut self) {
        if self.inner.is_forked() {
            return std::mem::forget(self.writer.take()); // the files and their locks belong to the parent
        }
        self.writer = None;
        remove_obsolete_files(self.inner);
    }
}

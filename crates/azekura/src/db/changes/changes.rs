//! The change feed: [`Changes`] returns the commits of a database in order, from the write-ahead log (WAL).
//!
//! Invariants:
//! - Commits are returned whole, each once, in the order of their sequence numbers. A commit that cannot be returned is
//!   an error, and no later one is returned.
//! - A commit is returned only when it is visible, so that a read behind it finds at least its state.
//! - A position is valid only in the history that it was made in: not in another database, and not if a recovery has
//!   ended the WAL before it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::base::manifest_state::ManifestState;
use crate::base::version_edit::{PartitionId, WalEpoch};
use crate::base::{Error, Result, SeqNo};
use crate::db::changes::change_position::ChangePosition;
use crate::db::changes::committed_batch::{ChangeFilter, CommittedBatch, PartitionsById};
use crate::db::config::PlantedBug;
use crate::db::database::Database;
use crate::db::follower::{Follower, InstalledManifest, check_not_lost};
use crate::db::handle::DbHandle;
use crate::db::inner::{DbInner, DbWriter};
use crate::db::iter::db_iter::{OwnedBounds, prefix_bounds};
use crate::db::partition::Partition;
use crate::db::partition_state::PartitionState;
use crate::db::state::change_readers::{ChangeReader, ChangeReaders};
use crate::wal::format::{IngestNote, WalRecordIter, check_payload};
use crate::wal::tail::{WalTail, recycled_error};

/// Bytes of memory for commits that [`Changes`] reads at a time. The last commit may exceed it.
const READ_LEN: usize = 1 << 20;
/// Bytes of memory for a commit beside its payload: its place in the queue, which may be half empty, and an allocation.
const COMMIT_OVERHEAD: usize = 2 * size_of::<CommittedBatch>() + 32;
/// Commits in memory share a map of the partitions that they name while it has at most this many.
const SHARED_PARTITIONS_MAX: usize = 32;
/// The shortest and the longest pause of [`Changes::wait`] between two looks.
const WAIT_PAUSE_MIN: Duration = Duration::from_micros(200);
const WAIT_PAUSE_MAX: Duration = Duration::from_millis(10);

impl Database {
    /// Returns the position after the last visible commit.
    ///
    /// # Errors
    /// `Invalid` if the database is open for reading only; `Closed`.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// let now = db.change_position()?;
    /// assert!(db.changes_since(now)?.next().is_none());
    /// # Ok(()) }
    /// ```
    pub fn change_position(&self) -> Result<ChangePosition> {
        let inner = &self.handle.inner;
        let source = change_source(&self.handle)?;
        // Before the epoch, so that no end of the WAL of this epoch is recorded before it.
        let seqno = source.end(inner);
        Ok(ChangePosition {
            instance: source.with_state(|state| state.instance),
            epoch: source.position_epoch(),
            seqno,
        })
    }

    /// Returns the position up to which visible commits are known to survive power loss, as far as they are in the WAL.
    ///
    /// # Errors
    /// Those of [`change_position`](Database::change_position).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).sync_interval(None).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// fruit.insert("apple", "red")?;
    /// assert!(db.durable_position()? < db.change_position()?);
    /// db.persist(azekura::PersistMode::SyncData)?;
    /// assert_eq!(db.durable_position()?, db.change_position()?);
    /// # Ok(()) }
    /// ```
    pub fn durable_position(&self) -> Result<ChangePosition> {
        let position = self.change_position()?;
        let durable = change_source(&self.handle)?.durable();
        Ok(ChangePosition { seqno: position.seqno.min(durable), ..position })
    }

    /// Returns the commits after `position`, over all partitions, in order.
    ///
    /// The result reads the WAL. Segments of the WAL that no partition needs are kept for it, within
    /// [`max_retained_wal_size`](crate::Config::max_retained_wal_size); [`wal_retention`](crate::Config::wal_retention)
    /// keeps them for readers that come later. If a commit is gone, the result is `Stale`: nothing is left out.
    ///
    /// Not among the changes are the creation and the deletion of partitions, the changes of partitions that were
    /// deleted since, records that a compaction filter drops, and the end of records that expire, which is in
    /// [`Operation::Insert`](crate::Operation::Insert).
    ///
    /// # Errors
    /// `Stale` if the WAL does not contain the next commit any more, if commits before `position` were lost by a
    /// recovery or have failed on a full disk, or if there were more than 64 opens with commits since, so that this is
    /// not known (a commit that has failed after readers could see it counts as an open). `Invalid` if the position is
    /// from another database or from the future, or if the database is open for reading only. `Closed`.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// use azekura::Operation;
    /// let fruit = db.open_partition("fruit", Default::default())?;
    /// let start = db.change_position()?;
    /// let mut batch = db.batch();
    /// batch.insert(&fruit, "apple", "red");
    /// batch.remove(&fruit, "pear");
    /// batch.commit()?;
    ///
    /// let mut changes = db.changes_since(start)?;
    /// let commit = changes.next().unwrap()?;
    /// let mut seen = Vec::new();
    /// for change in commit.changes() {
    ///     match change.operation {
    ///         Operation::Insert { key, value, .. } => seen.push((key.to_vec(), value.get()?)),
    ///         Operation::Remove { key } => seen.push((key.to_vec(), None)),
    ///         _ => {}
    ///     }
    /// }
    /// assert_eq!(seen, [(b"apple".to_vec(), Some("red".into())), (b"pear".to_vec(), None)]);
    /// assert!(changes.next().is_none()); // until the next commit
    /// assert_eq!(changes.position(), db.change_position()?);
    /// # Ok(()) }
    /// ```
    pub fn changes_since(&self, position: ChangePosition) -> Result<Changes> {
        let inner = &self.handle.inner;
        let source = change_source(&self.handle)?;
        if position.instance != source.with_state(|state| state.instance) {
            return Err(Error::invalid("the position of changes is from another database"));
        }
        let check_not_lost = || source.with_state(|state| check_not_lost(state, position.epoch, position.seqno));
        check_not_lost()?;
        // Registered before the WAL is read, so that the next commit is not recycled meanwhile.
        let reader = source.readers().register(position.seqno);
        if position.seqno > inner.last_visible.get() || position.epoch > source.position_epoch() {
            return Err(Error::invalid("the position of changes is from the future"));
        }
        if let ChangeSource::Own(writer) = &source
            && writer.wal.has_retired_after(position.seqno)
        {
            return Err(recycled_error(position.seqno));
        }
        let found_in = source.position_epoch();
        let mut tail = tail_after(inner, &source, position);
        source.check_kept(position.seqno)?;
        tail.locate()?;
        // An end may have been recorded meanwhile, before a segment that uses numbers of failed commits again.
        check_not_lost()?;
        Ok(Changes {
            handle: Arc::clone(&self.handle),
            reader,
            tail,
            position,
            partitions: PartitionsById::new(),
            named_by_last: Arc::default(),
            filters: Arc::default(),
            is_durable_only: false,
            found_in,
            batches: VecDeque::new(),
        })
    }
}

/// The WAL that changes are read from.
enum ChangeSource<'a> {
    /// The WAL of this database.
    Own(&'a DbWriter),
    /// The WAL of the writer that this database follows, with the manifest that was installed last, and a visible
    /// sequence number that was read before: the manifest records the opens that have written the commits up to it.
    Followed(&'a Follower, InstalledManifest, SeqNo),
}

impl ChangeSource<'_> {
    fn with_state<T>(&self, read: impl FnOnce(&ManifestState) -> T) -> T {
        match self {
            ChangeSource::Own(writer) => writer.version_set.with_state(read),
            ChangeSource::Followed(_, installed, _) => read(&installed.state),
        }
    }

    fn position_epoch(&self) -> WalEpoch {
        self.with_state(ManifestState::position_epoch)
    }

    /// See [`WalTail::note_known_epochs`].
    fn known_epochs(&self) -> WalEpoch {
        let of_manifest = self.with_state(|state| WalEpoch(state.next_wal_epoch));
        match self {
            ChangeSource::Own(_) => of_manifest,
            ChangeSource::Followed(follower, ..) => of_manifest.max(follower.known_epochs()),
        }
    }

    /// Checks that commits up to `last` that were read just now are those that the database shows, and not others with
    /// the same numbers, which a writer that a follower has not caught up with has written after a loss.
    ///
    /// # Errors
    /// `Stale` if they may be others; those of the manifest.
    fn check_kept(&self, last: SeqNo) -> Result<()> {
        match self {
            ChangeSource::Own(_) => Ok(()),
            ChangeSource::Followed(follower, installed, _) => follower.check_kept(installed, last),
        }
    }

    fn readers(&self) -> &ChangeReaders {
        match self {
            ChangeSource::Own(writer) => &writer.wal_maintenance.change_readers,
            ChangeSource::Followed(follower, ..) => &follower.change_readers,
        }
    }

    /// The last visible sequence number of the WAL.
    fn end(&self, inner: &DbInner) -> SeqNo {
        match self {
            // A visible commit of a pool may be without the WAL.
            ChangeSource::Own(writer) => inner.last_visible.get().min(writer.wal.appended()),
            ChangeSource::Followed(.., visible) => *visible,
        }
    }

    /// The sequence number up to which the WAL is durable, as far as it is known.
    fn durable(&self) -> SeqNo {
        match self {
            ChangeSource::Own(writer) => writer.wal.durable(),
            ChangeSource::Followed(follower, ..) => follower.durable(),
        }
    }
}

fn change_source(handle: &DbHandle) -> Result<ChangeSource<'_>> {
    handle.inner.check_process()?;
    handle.inner.check_open()?;
    if let Some(follower) = &handle.inner.follower {
        let visible = handle.inner.snapshots.visible_and_installed();
        return Ok(ChangeSource::Followed(follower, follower.installed(), visible));
    }
    let read_only = || Error::invalid("the database is open for reading only: open it with open_follower");
    handle.inner.writer.as_ref().map(ChangeSource::Own).ok_or_else(read_only)
}

/// A reader of the commits after `position`.
fn tail_after(inner: &DbInner, source: &ChangeSource<'_>, position: ChangePosition) -> WalTail {
    let (id, known_epochs) = (source.with_state(|state| state.id), source.known_epochs());
    let mut tail = WalTail::new(Arc::clone(&inner.fs), &inner.dir, id, position.seqno, known_epochs);
    tail.ignores_recycling = inner.settings.has_planted_bug(PlantedBug::UnnoticedRecycling);
    tail
}

/// The commits of a database after a position, in order; see [`Database::changes_since`].
///
/// The iterator ends at the last visible commit, and returns further ones when it is called again. It holds at most
/// about 1 MiB and one commit in memory, and keeps the database open.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let db = azekura::Config::new(dir.path().join("db")).open()?;
/// # let fruit = db.open_partition("fruit", Default::default())?;
/// let mut changes = db.changes_since(db.change_position()?)?;
/// fruit.insert("apple", "red")?;
/// fruit.insert("pear", "green")?;
/// assert_eq!(changes.by_ref().count(), 2);
/// fruit.remove("apple")?;
/// assert_eq!(changes.by_ref().count(), 1);
/// # Ok(()) }
/// ```
pub struct Changes {
    handle: Arc<DbHandle>,
    reader: Arc<ChangeReader>,
    tail: WalTail,
    /// The position after the last commit that was returned or that no filter lets pass.
    position: ChangePosition,
    /// Every partition that a commit named so far; `None` if it was deleted.
    partitions: PartitionsById,
    /// Those that the last commits name.
    named_by_last: Arc<PartitionsById>,
    filters: Arc<Vec<ChangeFilter>>,
    is_durable_only: bool,
    /// The epoch of positions when the place in the WAL was found.
    found_in: WalEpoch,
    /// Commits that were read.
    batches: VecDeque<CommittedBatch>,
}

impl Changes {
    /// Names the reader in [`Metrics::change_readers`](crate::Metrics::change_readers).
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// let changes = db.changes_since(db.change_position()?)?.named("search index");
    /// assert_eq!(db.metrics().change_readers[0].name, "search index");
    /// # drop(changes);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn named(self, name: &str) -> Changes {
        self.reader.set_name(name);
        self
    }

    /// Returns the changes of this partition, and of those that other calls name, instead of all.
    ///
    /// # Errors
    /// `Invalid` if the partition belongs to another database.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let part = |name| db.open_partition(name, Default::default());
    /// # let (fruit, log) = (part("fruit")?, part("log")?);
    /// let changes = db.changes_since(db.change_position()?)?.partition(&fruit)?;
    /// log.insert("1", "started")?;
    /// fruit.insert("apple", "red")?;
    /// assert_eq!(changes.count(), 1);
    /// # Ok(()) }
    /// ```
    pub fn partition(self, partition: &Partition) -> Result<Changes> {
        self.filter(partition, None)
    }

    /// Returns the changes of keys of this partition that begin with `prefix`, and those that other calls name, instead
    /// of all.
    ///
    /// # Errors
    /// `Invalid` if the partition belongs to another database, or has a comparator that is not bytewise.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let changes = db.changes_since(db.change_position()?)?.prefix(&fruit, "ap")?;
    /// fruit.insert("pear", "green")?;
    /// fruit.insert("apple", "red")?;
    /// assert_eq!(changes.count(), 1);
    /// # Ok(()) }
    /// ```
    pub fn prefix(self, partition: &Partition, prefix: impl AsRef<[u8]>) -> Result<Changes> {
        if !partition.state.tree()?.key_order().is_bytewise() {
            return Err(Error::invalid(format!("the keys of partition {:?} have no order by bytes", partition.name)));
        }
        self.filter(partition, Some(prefix_bounds(prefix.as_ref())))
    }

    fn filter(mut self, partition: &Partition, bounds: Option<OwnedBounds>) -> Result<Changes> {
        partition.check_same_database(&self.handle)?;
        Arc::make_mut(&mut self.filters).push(ChangeFilter { partition: Arc::clone(&partition.state), bounds });
        // The commits that were read without this filter are read again.
        self.rewind()?;
        Ok(self)
    }

    /// Returns only commits that survive power loss.
    ///
    /// Without this, a commit can be returned that power loss then removes; the position behind it is `Stale`
    /// afterwards.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut changes = db.changes_since(db.change_position()?)?.durable_only()?;
    /// fruit.insert("apple", "red")?;
    /// assert!(changes.next().is_none());
    /// db.persist(azekura::PersistMode::SyncData)?;
    /// assert!(changes.next().is_some());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Those of [`Database::changes_since`].
    pub fn durable_only(mut self) -> Result<Changes> {
        self.is_durable_only = true;
        self.rewind()?;
        Ok(self)
    }

    /// The position after the last commit that was returned, or behind it if the filters pass no later one.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// let mut changes = db.changes_since(db.change_position()?)?;
    /// fruit.insert("apple", "red")?;
    /// fruit.insert("pear", "green")?;
    /// changes.next().unwrap()?;
    /// let mut rest = db.changes_since(changes.position())?; // by another reader, at another time
    /// assert_eq!(rest.next().unwrap()?.position(), db.change_position()?);
    /// # Ok(()) }
    /// ```
    pub fn position(&self) -> ChangePosition {
        self.position
    }

    /// Waits until there may be another commit, for at most `longest`. Returns false if there is none. Looks at
    /// intervals of up to 10 ms.
    ///
    /// # Errors
    /// `Closed` if the database closes meanwhile. `Poisoned` after the last commit if a failure has ended all writes,
    /// also if only durable commits are read and that one is not durable.
    ///
    /// ```
    /// # fn main() -> azekura::Result<()> {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let db = azekura::Config::new(dir.path().join("db")).open()?;
    /// # let fruit = db.open_partition("fruit", Default::default())?;
    /// # use std::time::Duration;
    /// let mut changes = db.changes_since(db.change_position()?)?;
    /// let writer = std::thread::spawn(move || fruit.insert("apple", "red"));
    /// while !changes.wait(Duration::from_secs(1))? {}
    /// assert!(changes.next().is_some());
    /// # writer.join().unwrap()?;
    /// # Ok(()) }
    /// ```
    pub fn wait(&self, longest: Duration) -> Result<bool> {
        let (mut waited, mut pause) = (Duration::ZERO, WAIT_PAUSE_MIN);
        loop {
            let source = change_source(&self.handle)?;
            // Before the look, so that commits from before the failure are returned.
            let poisoned = self.handle.inner.poison.check();
            if !self.batches.is_empty() || self.limit(&source) > self.tail.last_seqno() {
                return Ok(true);
            }
            poisoned?;
            let rest = longest.saturating_sub(waited);
            if rest.is_zero() {
                return Ok(false);
            }
            self.handle.inner.env.sleep(pause.min(rest));
            waited += pause.min(rest);
            pause = (pause * 2).min(WAIT_PAUSE_MAX);
        }
    }

    /// The last sequence number that may be returned now.
    fn limit(&self, source: &ChangeSource<'_>) -> SeqNo {
        let end = source.end(&self.handle.inner);
        let is_limited =
            self.is_durable_only && !self.handle.inner.settings.has_planted_bug(PlantedBug::ChangesBeyondDurable);
        if is_limited { end.min(source.durable()) } else { end }
    }

    /// Goes back to the position.
    fn rewind(&mut self) -> Result<()> {
        self.batches.clear();
        let source = change_source(&self.handle)?;
        self.found_in = source.position_epoch();
        self.tail = tail_after(&self.handle.inner, &source, self.position);
        Ok(())
    }

    /// Reads the next commits. Advances the position if no filter lets them pass.
    fn fill(&mut self) -> Result<()> {
        let handle = Arc::clone(&self.handle);
        let source = change_source(&handle)?;
        let limit = self.limit(&source);
        // Behind the limit: a pool that is created later has no change up to it.
        self.check_all_is_logged()?;
        let (instance, epoch) = (self.position.instance, source.position_epoch());
        let has_more = self.tail.last_seqno() < limit;
        self.tail.note_known_epochs(source.known_epochs());
        let (mut bytes, mut is_complete) = (0, true);
        let (partitions, named) = (&mut self.partitions, &mut self.named_by_last);
        let (filters, batches) = (&self.filters, &mut self.batches);
        // A later open may have abandoned the rest of a segment that was found before. If its end is not known any
        // more, the place has to be found again.
        let is_found_since = self.found_in == epoch;
        let recorded_end = |of| {
            source.with_state(|state| if is_found_since { state.end_of_segment(of) } else { state.end_of_epoch(of) })
        };
        let mut read = self.tail.read(limit, &recorded_end, &mut |commit| {
            check_payload(commit.payload, commit.seqno_count)?;
            bytes += commit.payload.len() + COMMIT_OVERHEAD;
            if named.len() > SHARED_PARTITIONS_MAX {
                *named = Arc::default();
            }
            for record in WalRecordIter::new(commit.payload) {
                let record = record?;
                let id = IngestNote::of_record(&record)?.map_or(record.partition, |note| note.partition);
                if !named.contains_key(&id) {
                    Arc::make_mut(named).insert(id, find_partition(&handle, partitions, id));
                }
            }
            let seqno = SeqNo(commit.first_seqno.0 + u64::from(commit.seqno_count) - 1);
            let batch = CommittedBatch {
                handle: Arc::clone(&handle),
                position: ChangePosition { instance, epoch, seqno },
                partitions: Arc::clone(named),
                filters: Arc::clone(filters),
                payload: commit.payload.into(),
            };
            if batch.changes().next().is_some() {
                batches.push_back(batch);
            }
            is_complete = bytes < READ_LEN;
            Ok(is_complete)
        });
        if read.is_ok() && is_complete && self.tail.last_seqno() < limit {
            let last = self.tail.last_seqno();
            let message = || format!("the log lacks commits between {last} and {limit}");
            read = Err(match source {
                _ if self.tail.epoch().is_none() => recycled_error(last),
                // The follower shows commits that have failed since, unless the next one is known to be durable.
                ChangeSource::Followed(..) if last >= source.durable() => Error::stale(message()),
                _ => Error::corruption(message()).in_file(&handle.inner.dir),
            });
        }
        if has_more && let Err(error) = source.check_kept(limit) {
            self.rewind()?;
            return Err(error);
        }
        handle.inner.check_read(&mut read);
        read?;
        // A position within a gap is read from before the gap on.
        if self.batches.is_empty() && self.tail.last_seqno() > self.position.seqno {
            self.advance(ChangePosition { instance, epoch, seqno: self.tail.last_seqno() });
        }
        Ok(())
    }

    fn advance(&mut self, position: ChangePosition) {
        debug_assert!(position.seqno >= self.position.seqno, "positions rise");
        self.position = position;
        self.reader.note_read(position.seqno);
    }

    /// # Errors
    /// `Unsupported` if changes of a partition that the filters let pass may be missing in the WAL.
    fn check_all_is_logged(&self) -> Result<()> {
        let is_wanted = |state: &Arc<PartitionState>| {
            self.filters.is_empty() || self.filters.iter().any(|filter| Arc::ptr_eq(&filter.partition, state))
        };
        let partitions = self.handle.inner.catalog.all();
        let mut wanted = partitions.iter().filter(|state| is_wanted(state));
        // A pool whose tree is not built yet may have such changes from before the database was opened.
        let may_skip =
            |state: &Arc<PartitionState>| state.tree_if_built().map_or(state.may_skip_wal(), |tree| !tree.needs_wal());
        match wanted.find(|state| may_skip(state)) {
            None => Ok(()),
            Some(state) => Err(Error::unsupported(format!(
                "partition {:?} is a pool that writes without the log: name the partitions to read",
                state.name
            ))),
        }
    }
}

impl Iterator for Changes {
    type Item = Result<CommittedBatch>;

    fn next(&mut self) -> Option<Result<CommittedBatch>> {
        loop {
            if let Some(batch) = self.batches.pop_front() {
                self.advance(batch.position);
                return Some(Ok(batch));
            }
            let before = self.tail.last_seqno();
            // A commit before the error is returned first. Then the error occurs again.
            if let Err(error) = self.fill()
                && self.batches.is_empty()
            {
                return Some(Err(error));
            }
            if self.batches.is_empty() && self.tail.last_seqno() == before {
                return None;
            }
        }
    }
}

impl fmt::Debug for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Changes").field("position", &self.position).finish_non_exhaustive()
    }
}

/// The partition `id`, which is visible in the catalog before its first commit. Looks it up once.
fn find_partition(handle: &DbHandle, partitions: &mut PartitionsById, id: PartitionId) -> Option<Arc<PartitionState>> {
    let find = || handle.inner.catalog.all().into_iter().find(|state| state.id == id);
    partitions.entry(id).or_insert_with(find).clone()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::db::config::Config;
    use crate::testing::MemFs;

    /// Regression: only payloads were counted, so that readers held ten times as much memory for small commits.
    #[test]
    fn small_commits_are_held_in_bounded_memory() {
        let db = Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).open().unwrap();
        let p = db.open_partition("p", Default::default()).unwrap();
        let start = db.change_position().unwrap();
        for n in 0..20_000u32 {
            p.insert([n as u8], "").unwrap();
        }
        let mut changes = db.changes_since(start).unwrap();
        changes.fill().unwrap();
        let held = changes.batches.capacity() * size_of::<CommittedBatch>();
        assert!(held <= READ_LEN && changes.batches.len() > 1_000, "{held} bytes for {}", changes.batches.len());
        assert_eq!(changes.count(), 20_000);
    }

    /// Regression: a reader that began between the retirement of a segment and its recycling had `Stale` later,
    /// although its first commits were there when it began.
    #[test]
    fn retired_commits_are_stale_at_once() {
        let db = Config::new("/db").fs(Arc::new(MemFs::new())).workers(0).wal_segment_size(64 << 10).open().unwrap();
        let p = db.open_partition("p", Default::default()).unwrap();
        let start = db.change_position().unwrap();
        (0..40u8).for_each(|n| p.insert([n], [n; 4000]).unwrap());
        let wal = &db.handle.inner.writer.as_ref().unwrap().wal;
        let through = wal.segments()[0].last_seqno;
        wal.sync(db.handle.inner.last_visible.get(), true).unwrap();
        assert_eq!(db.changes_since(start).unwrap().count(), 40);
        assert_eq!(wal.retire(through, Default::default).unwrap().len(), 1);
        assert_eq!(db.changes_since(start).unwrap_err().kind(), ErrorKind::Stale);
        let behind = ChangePosition { seqno: through, ..start };
        assert_eq!(db.changes_since(behind).unwrap().count() as u64, 40 - (through.0 - start.seqno.0));
    }
}

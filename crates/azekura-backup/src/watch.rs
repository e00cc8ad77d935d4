//! Ships the log of a database as it grows.

use azekura::{ChangePosition, Changes, Database, ErrorKind};

use crate::create::{CreateOptions, CreateReport, catch_up, catch_up_to, recorded_end};
use crate::error::{BackupError, Result};
use crate::layout::{hex, log_object};
use crate::log::{Until, chain, read_headers};
use crate::log_object::{LogObject, LogWriter, decode};
use crate::progress::Progress;
use crate::store::BackupStore;

/// Bytes of commits in one log object. The last commit may exceed it.
const OBJECT_LEN: usize = 8 << 20;

/// Ships the changes of a database; see [`BackupStore::watch`].
pub struct Watcher<'a> {
    store: &'a BackupStore,
    db: &'a Database,
    options: CreateOptions,
    database: String,
    /// Where the next log object begins, with the partitions there. `None`: a backup is needed first.
    shipped: Option<Shipped>,
    /// Why a backup is needed.
    reason: String,
}

/// What is stored, and the feed behind it.
struct Shipped {
    end: StoredEnd,
    /// The epoch of the database before it was compared with the store.
    epoch: u32,
    changes: Changes,
    /// Whether the feed may be beyond what is stored.
    is_ahead: bool,
}

/// Where the log in the store ends.
#[derive(Clone, PartialEq, Eq)]
struct StoredEnd {
    /// Commits up to this sequence number are stored.
    after: u64,
    /// A position at or before it.
    position: ChangePosition,
    partitions: Vec<(String, u64)>,
}

/// What a call of [`Watcher::step`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WatchStep {
    /// There was nothing to ship.
    Idle,
    /// Stored commits as one log object.
    Shipped {
        /// Number of commits.
        commits: usize,
        /// Bytes of the object.
        bytes: u64,
        /// The last sequence number.
        sequence: u64,
    },
    /// Another process has shipped the same commits before.
    ShippedByOther {
        /// The last sequence number.
        sequence: u64,
    },
    /// Made a backup, because the log could not go on.
    BackedUp {
        /// Why.
        reason: String,
        /// The backup.
        report: Box<CreateReport>,
    },
}

impl BackupStore {
    /// Follows the database: each [`step`](Watcher::step) of the result stores what was committed since the last.
    ///
    /// Goes on where an earlier call, also of another process, has ended, if the database still has its log from there
    /// on ([`Config::wal_retention`](azekura::Config::wal_retention) keeps it). Otherwise, and if a recovery may have
    /// lost the end of the newest backup, the first step makes a backup.
    ///
    /// # Errors
    /// `OtherDatabase`; `OtherHistory` if the store has commits that the database does not have; `Invalid` if the store
    /// overwrites objects that must not exist.
    pub fn watch<'a>(&'a self, db: &'a Database, options: CreateOptions) -> Result<Watcher<'a>> {
        let database = hex(&db.change_position()?.database_id());
        let mut watcher = Watcher { store: self, db, options, database, shipped: None, reason: String::new() };
        self.block_on(async {
            self.existing_or_new(&watcher.database).await?;
            self.check_create_only().await
        })?;
        watcher.begin()?;
        Ok(watcher)
    }
}

impl Watcher<'_> {
    /// Where the log behind the newest backup ends, with the partitions at that time. Otherwise why a backup is needed.
    async fn stored_end(&self) -> Result<Result<StoredEnd, &'static str>> {
        // Before the manifests, because `prune` removes the manifest of a backup before the log that continues it.
        let headers = read_headers(self.store, &self.database).await?;
        let manifests = self.store.manifests(&self.database).await?;
        let Some((object, backup)) = manifests.iter().rev().find(|(_, manifest)| manifest.is_durable) else {
            return Ok(Err("the store has no backup that a log can continue"));
        };
        let log = match chain(&headers, backup, &manifests, Until::End) {
            Err(BackupError::Gap { .. }) => return Ok(Err("the log in the store has a gap")),
            Err(BackupError::WrongContent { .. }) => return Ok(Err("a log object in the store is damaged")),
            log => log?.objects,
        };
        let Some(last) = log.last() else {
            let partitions = backup.partitions.iter().map(|of| (of.name.clone(), of.id)).collect();
            return Ok(Ok(StoredEnd { after: backup.sequence, position: backup.position(object)?, partitions }));
        };
        match decode(last, &self.store.get(last).await?) {
            Err(BackupError::WrongContent { .. }) => Ok(Err("a log object in the store is damaged")),
            decoded => Ok(Ok(StoredEnd::of(decoded?))),
        }
    }

    /// Continues what the store has, or notes why a backup is needed.
    fn begin(&mut self) -> Result<()> {
        let epoch = self.db.change_position()?.epoch();
        match (self.store.block_on(self.stored_end())?, &mut self.shipped) {
            (Ok(end), Some(shipped)) if shipped.is_at(&end) => {
                shipped.epoch = epoch;
                Ok(())
            }
            (Ok(end), _) => self.go_on(end, epoch),
            (Err(reason), _) => {
                (self.shipped, self.reason) = (None, reason.into());
                Ok(())
            }
        }
    }

    /// Continues the log at a position, or notes why a backup is needed. `epoch`: that of the database before it was
    /// compared with the store. After an error, nothing has changed.
    fn go_on(&mut self, end: StoredEnd, epoch: u32) -> Result<()> {
        // Up to the end, so that a follower sees whether a later open has lost it.
        catch_up_to(self.db, end.after, end.position.epoch())?;
        // A later open may have lost commits between the position and the end. Within one epoch none is lost.
        let is_later = self.db.change_position()?.epoch() > end.position.epoch();
        let is_unknown = end.position.sequence_number() < end.after && is_later;
        let reason = if is_unknown && recorded_end(self.db, end.position.epoch())? < Some(end.after) {
            "the database was opened again after the backup, and may have lost its end"
        } else {
            match self.db.changes_since(end.position).and_then(Changes::durable_only) {
                Ok(changes) => {
                    let changes = changes.named("backup");
                    self.shipped = Some(Shipped { end, epoch, changes, is_ahead: false });
                    return Ok(());
                }
                Err(error) if error.kind() != ErrorKind::Stale => return Err(feed_error(error)),
                Err(_) => "the database does not have the log from there on any more",
            }
        };
        (self.shipped, self.reason) = (None, reason.into());
        Ok(())
    }

    /// Compares with the store again if the database was opened since: that may have lost what other processes have
    /// stored. Opens the feed again if it may be beyond what is stored.
    fn refresh(&mut self) -> Result<()> {
        let epoch = self.db.change_position()?.epoch();
        match &self.shipped {
            // The writer of a follower was opened again.
            Some(shipped) if shipped.epoch != epoch => self.begin(),
            Some(shipped) if shipped.is_ahead => self.go_on(shipped.end.clone(), epoch),
            _ => Ok(()),
        }
    }

    /// Stores what was committed since the last step and survives power loss: up to 8 MiB, or one commit. A program
    /// calls this until it is `Idle`, and then again after some seconds, which are the most that it can lose.
    ///
    /// Makes a backup instead if a change cannot be in a log object: partitions were created or deleted, tables were
    /// ingested, a commit has more than 1 GiB, a large value was replaced before it was shipped, or the database has
    /// recycled its log. Until that backup is stored, this call does not return, and no commit is shipped: for that
    /// long, more can be lost.
    ///
    /// # Errors
    /// Those of [`BackupError`]. The next call tries the same again.
    pub fn step(&mut self, progress: &mut dyn FnMut(&Progress<'_>) -> bool) -> Result<WatchStep> {
        self.refresh()?;
        if self.shipped.is_none() {
            return self.back_up(progress);
        }
        match self.ship() {
            Ok(Ok(step)) => Ok(step),
            Ok(Err(reason)) => {
                self.reason = reason;
                // The feed is beyond what is stored, so only a backup can continue it, also if this one fails.
                self.shipped = None;
                self.back_up(progress)
            }
            Err(error) => {
                self.shipped.iter_mut().for_each(|shipped| shipped.is_ahead = true);
                self.refresh()?;
                Err(error)
            }
        }
    }

    /// Ships one log object. Returns why that is not possible, if so.
    fn ship(&mut self) -> Result<Result<WatchStep, String>> {
        let Some(shipped) = &mut self.shipped else { return Ok(Err(std::mem::take(&mut self.reason))) };
        let mut writer = LogWriter::new();
        while writer.bytes() < OBJECT_LEN {
            let Some(commit) = shipped.changes.next() else { break };
            let commit = match commit {
                Err(error) if error.kind() == ErrorKind::Stale => return Ok(Err(error.message().to_owned())),
                Err(error) => return Err(feed_error(error)),
                Ok(commit) if commit.position().sequence_number() <= shipped.end.after => continue,
                Ok(commit) => commit,
            };
            if let Err(reason) = writer.add(&commit, &shipped.end.partitions)? {
                return Ok(Err(reason));
            }
        }
        // Taken after the last commit was read, so that none was made later.
        let time_ms = (self.store.clock)();
        // Asked after the feed, which leaves out the changes of partitions that were deleted.
        if self.db.partition_ids() != shipped.end.partitions {
            return Ok(Err("partitions were created or deleted".into()));
        }
        let after = shipped.end.after;
        let (Some(bytes), Some(to)) = (writer.finish(after, time_ms, &shipped.end.partitions), writer.end()) else {
            catch_up(self.db)?; // a follower that cannot follow any more has no new commits
            return Ok(Ok(WatchStep::Idle));
        };
        // As in `refresh`, if the follower has noticed it meanwhile.
        if self.db.change_position()?.epoch() != shipped.epoch {
            shipped.is_ahead = true;
            self.begin()?;
            return self.ship();
        }
        let (object, len) = (log_object(after), bytes.len() as u64);
        if self.store.block_on(self.store.put_new(&object, bytes.into()))? {
            let (commits, sequence) = (writer.commits(), to.sequence_number());
            (shipped.end.after, shipped.end.position) = (sequence, to);
            return Ok(Ok(WatchStep::Shipped { commits, bytes: len, sequence }));
        }
        let other = self.store.block_on(self.store.get(&object))?;
        let log = match decode(&object, &other) {
            Err(BackupError::WrongContent { .. }) => return Ok(Err("a log object in the store is damaged".into())),
            log => log?,
        };
        if log.header.database() != self.database {
            let found = self.database.clone();
            return Err(BackupError::OtherDatabase { stored: log.header.database(), found });
        }
        let (sequence, epoch) = (log.header.end(), shipped.epoch);
        self.go_on(StoredEnd::of(log), epoch)?;
        Ok(Ok(WatchStep::ShippedByOther { sequence }))
    }

    /// Makes a backup, and continues behind it.
    fn back_up(&mut self, progress: &mut dyn FnMut(&Progress<'_>) -> bool) -> Result<WatchStep> {
        // The feed is opened before the checkpoint, so that the database keeps the log from there on. The commits that
        // are in the backup too are skipped.
        let position = self.db.change_position()?;
        let changes = self.db.changes_since(position).and_then(Changes::durable_only).map_err(feed_error)?;
        // The error of partitions that write without the log comes with the first read.
        if let Some(Err(error)) = self.db.changes_since(position).map_err(feed_error)?.next() {
            return Err(feed_error(error));
        }
        let (report, partitions) = self.store.create_with_partitions(self.db, &self.options, true, progress)?;
        let end = StoredEnd { after: report.backup.sequence, position, partitions };
        let changes = changes.named("backup");
        self.shipped = Some(Shipped { end, epoch: position.epoch(), changes, is_ahead: false });
        let reason = std::mem::take(&mut self.reason);
        Ok(WatchStep::BackedUp { reason, report: Box::new(report) })
    }

    /// The last sequence number that is stored as log; `None` before the first backup.
    pub fn shipped_sequence(&self) -> Option<u64> {
        self.shipped.as_ref().map(|shipped| shipped.end.after)
    }
}

impl Shipped {
    /// Whether the feed continues this end, and its next read fails if a later open has lost the end.
    fn is_at(&self, end: &StoredEnd) -> bool {
        !self.is_ahead && self.end == *end && end.position.sequence_number() == end.after
    }
}

impl StoredEnd {
    fn of(log: LogObject) -> StoredEnd {
        StoredEnd { after: log.header.end(), position: log.header.to, partitions: log.partitions }
    }
}

impl std::fmt::Debug for Watcher<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watcher").field("shipped", &self.shipped_sequence()).finish_non_exhaustive()
    }
}

/// The meaning of an error of the feed at a position that the store has.
fn feed_error(error: azekura::Error) -> BackupError {
    match error.kind() {
        ErrorKind::Unsupported => BackupError::NoFeed(error),
        ErrorKind::Invalid => BackupError::OtherHistory { message: error.message().to_owned() },
        _ => error.into(),
    }
}

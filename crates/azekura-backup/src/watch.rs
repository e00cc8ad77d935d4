//! Ships the log of a database as it grows.

use azekura::{ChangePosition, Changes, Database, ErrorKind};

use crate::create::{CreateOptions, CreateReport, catch_up, catch_up_to};
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

/// What is stored.
struct Shipped {
    /// Commits up to this sequence number are stored.
    after: u64,
    /// A position at or before it.
    position: ChangePosition,
    /// The feed after the position.
    changes: Changes,
    partitions: Vec<(String, u64)>,
}

/// The last stored sequence number, a position at or before it, and the partitions.
type StoredEnd = (u64, ChangePosition, Vec<(String, u64)>);

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
        match self.block_on(watcher.stored_end())? {
            Err(reason) => watcher.reason = reason.into(),
            Ok((after, position, partitions)) => watcher.go_on(after, position, partitions)?,
        }
        Ok(watcher)
    }
}

impl Watcher<'_> {
    /// Where the log behind the newest backup ends, with the partitions at that time. Otherwise why a backup is needed.
    async fn stored_end(&self) -> Result<Result<StoredEnd, &'static str>> {
        // Before the manifests, because `prune` removes the manifest of a backup before the log that continues it.
        let headers = read_headers(self.store, &self.database).await?;
        let manifests = self.store.manifests().await?;
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
            return Ok(Ok((backup.sequence, backup.position(object)?, partitions)));
        };
        match decode(last, &self.store.get(last).await?) {
            Err(BackupError::WrongContent { .. }) => Ok(Err("a log object in the store is damaged")),
            decoded => Ok(Ok(decoded.map(|log| (log.header.end(), log.header.to, log.partitions))?)),
        }
    }

    /// Continues the log at a position, or notes why a backup is needed.
    fn go_on(&mut self, after: u64, position: ChangePosition, partitions: Vec<(String, u64)>) -> Result<()> {
        self.shipped = None;
        catch_up_to(self.db, position.sequence_number(), position.epoch())?;
        // A later open may have lost commits between the position and `after`. Within one epoch none is lost.
        if position.sequence_number() < after && self.db.change_position()?.epoch() > position.epoch() {
            self.reason = "the database was opened again after the backup, during which it was written to".into();
            return Ok(());
        }
        match self.db.changes_since(position).and_then(Changes::durable_only) {
            Ok(changes) => {
                self.shipped = Some(Shipped { after, position, changes: changes.named("backup"), partitions });
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::Stale => {
                self.reason = "the database does not have the log from there on any more".into();
                Ok(())
            }
            Err(error) => Err(feed_error(error)),
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
        let Some(shipped) = &mut self.shipped else { return self.back_up(progress) };
        let (after, position, partitions) = (shipped.after, shipped.position, shipped.partitions.clone());
        let step = self.ship();
        match step {
            Ok(Ok(step)) => Ok(step),
            Ok(Err(reason)) => {
                self.reason = reason;
                // The feed is beyond what is stored, so only a backup can continue it, also if this one fails.
                self.shipped = None;
                self.back_up(progress)
            }
            Err(error) => {
                // The feed may be beyond what is stored.
                let old = self.shipped.take();
                let renewed = self.go_on(after, position, partitions);
                drop(old);
                renewed?;
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
                Ok(commit) if commit.position().sequence_number() <= shipped.after => continue,
                Ok(commit) => commit,
            };
            if let Err(reason) = writer.add(&commit, &shipped.partitions)? {
                return Ok(Err(reason));
            }
        }
        // Taken after the last commit was read, so that none was made later.
        let time_ms = (self.store.clock)();
        // Asked after the feed, which leaves out the changes of partitions that were deleted.
        if self.db.partition_ids() != shipped.partitions {
            return Ok(Err("partitions were created or deleted".into()));
        }
        let after = shipped.after;
        let (Some(bytes), Some(to)) = (writer.finish(after, time_ms, &shipped.partitions), writer.end()) else {
            catch_up(self.db)?; // a follower that cannot follow any more has no new commits
            return Ok(Ok(WatchStep::Idle));
        };
        let (object, len) = (log_object(after), bytes.len() as u64);
        if self.store.block_on(self.store.put_new(&object, bytes.into()))? {
            let (commits, sequence) = (writer.commits(), to.sequence_number());
            (shipped.after, shipped.position) = (sequence, to);
            return Ok(Ok(WatchStep::Shipped { commits, bytes: len, sequence }));
        }
        let other = self.store.block_on(self.store.get(&object))?;
        let LogObject { header, partitions, .. } = match decode(&object, &other) {
            Err(BackupError::WrongContent { .. }) => return Ok(Err("a log object in the store is damaged".into())),
            log => log?,
        };
        if header.database() != self.database {
            let found = self.database.clone();
            return Err(BackupError::OtherDatabase { stored: header.database(), found });
        }
        self.go_on(header.end(), header.to, partitions)?;
        Ok(Ok(WatchStep::ShippedByOther { sequence: header.end() }))
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
        let after = report.backup.sequence;
        self.shipped = Some(Shipped { after, position, changes: changes.named("backup"), partitions });
        let reason = std::mem::take(&mut self.reason);
        Ok(WatchStep::BackedUp { reason, report: Box::new(report) })
    }

    /// The last sequence number that is stored as log; `None` before the first backup.
    pub fn shipped_sequence(&self) -> Option<u64> {
        self.shipped.as_ref().map(|shipped| shipped.after)
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

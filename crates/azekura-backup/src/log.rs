//! The shipped log as a chain: which objects continue a backup up to a time, and which backup a restore begins with.

use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::ObjectMeta;

use crate::error::{BackupError, Result};
use crate::history::{History, sort_backups};
use crate::layout::{BackupManifest, LOG};
use crate::log_object::{HEADER_LEN, LogHeader, decode_header};
use crate::store::BackupStore;

/// Number of headers that are read at a time.
const HEADERS_AT_A_TIME: usize = 16;

/// How far a restore goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Until {
    /// The last commit in the store.
    #[default]
    End,
    /// The last commit that was shipped at or before this time, in milliseconds since 1970.
    TimeMs(u64),
    /// The last commit whose sequence number is not above this one.
    Sequence(u64),
}

impl Until {
    /// Whether a backup is not beyond it.
    pub(crate) fn admits_backup(self, manifest: &BackupManifest) -> bool {
        match self {
            Until::End => true,
            Until::TimeMs(time) => manifest.time_ms <= time,
            Until::Sequence(sequence) => manifest.sequence <= sequence,
        }
    }

    /// Whether commits of a log object may be needed.
    pub(crate) fn admits_log(self, header: &LogHeader) -> bool {
        match self {
            Until::End => true,
            Until::TimeMs(time) => header.time_ms <= time,
            Until::Sequence(sequence) => header.after < sequence,
        }
    }

    /// Whether it is known by the name of a log object that its commits are beyond.
    fn excludes_log(self, after: u64) -> bool {
        matches!(self, Until::Sequence(last) if after >= last)
    }

    /// Whether a commit is not beyond it; its object is admitted.
    pub(crate) fn admits_commit(self, sequence: u64) -> bool {
        !matches!(self, Until::Sequence(last) if sequence > last)
    }
}

/// The sequence number in the name of a log object; `None` if it is not the name of one.
pub(crate) fn number_in_name(object: &str) -> Option<u64> {
    let number = object.strip_prefix(LOG)?.strip_prefix('/')?.strip_suffix(".log")?;
    (number.len() == 20).then(|| number.parse().ok())?
}

/// A log object in the store.
pub(crate) struct StoredLog {
    pub(crate) object: String,
    /// The number in its name.
    pub(crate) after: u64,
    /// The error of a damaged header.
    pub(crate) header: Result<LogHeader>,
}

/// All log objects of the database, in the order of their names.
pub(crate) async fn read_headers(store: &BackupStore, database: &str) -> Result<Vec<StoredLog>> {
    read_listed(store, &store.list_folder(LOG).await?, database).await
}

/// Those of the listed objects that are log objects of the database.
pub(crate) async fn read_listed(
    store: &BackupStore,
    listed: &[(String, ObjectMeta)],
    database: &str,
) -> Result<Vec<StoredLog>> {
    let numbered = listed.iter().filter_map(|(name, meta)| Some((number_in_name(name)?, name.clone(), meta.size)));
    let read = stream::iter(numbered).map(async |(after, object, size)| {
        let header = if size < HEADER_LEN as u64 {
            // Of an empty object, no range can be read.
            Err(BackupError::wrong(&object, "it is shorter than the header of a log object"))
        } else {
            store.get_start(&object, HEADER_LEN as u64).await.and_then(|bytes| decode_header(&object, &bytes))
        };
        let header = header.and_then(|header| match header.after == after {
            true => Ok(header),
            false => Err(BackupError::wrong(&object, "its header is that of another log object")),
        });
        match header {
            // Removed by `prune` after it was listed.
            Err(BackupError::Missing { .. }) => Ok(None),
            Ok(header) if header.database() != database => {
                Err(BackupError::OtherDatabase { stored: header.database(), found: database.to_owned() })
            }
            header @ (Ok(_) | Err(BackupError::WrongContent { .. })) => Ok(Some(StoredLog { object, after, header })),
            Err(error) => Err(error),
        }
    });
    let logs: Vec<_> = read.buffered(HEADERS_AT_A_TIME).try_collect().await?;
    Ok(logs.into_iter().flatten().collect())
}

impl StoredLog {
    /// Whether the commits are all in a state with the commits up to `sequence`. If the header is damaged, whether
    /// another object begins behind it.
    pub(crate) fn is_before(&self, sequence: u64, logs: &[StoredLog]) -> bool {
        match &self.header {
            Ok(header) => header.end() <= sequence,
            Err(_) => logs.iter().any(|of| of.header.is_ok() && self.after < of.after && of.after <= sequence),
        }
    }
}

/// The headers that are not damaged, of objects within the limit.
fn headers_within(logs: &[StoredLog], until: Until) -> impl Iterator<Item = &LogHeader> {
    logs.iter().flat_map(|log| &log.header).filter(move |header| until.admits_log(header))
}

/// The log objects that no restore of the `kept` backups needs.
pub(crate) fn unneeded_logs<'l>(
    logs: &'l [StoredLog],
    kept: &[&BackupManifest],
) -> impl Iterator<Item = &'l StoredLog> {
    let oldest = kept.iter().map(|of| of.sequence).min().unwrap_or(0);
    let replaces = |of: &LogHeader| kept.iter().any(|backup| is_replaced_by(backup, of));
    logs.iter().filter(move |log| log.is_before(oldest, logs) && !log.header.as_ref().is_ok_and(replaces))
}

/// The log objects that continue a backup.
pub(crate) struct Chain {
    /// In order.
    pub(crate) objects: Vec<String>,
    /// The last sequence number of the backup and of these.
    pub(crate) end: u64,
    /// The epoch of the last of them.
    epoch: u32,
}

/// The log objects that continue a backup. `manifests`: those of the store.
///
/// # Errors
/// `Gap` if there is a later object within the limit that does not continue them, or of which it is not known whether
/// a recovery has lost it; `WrongContent` if one may be damaged.
pub(crate) fn chain(
    logs: &[StoredLog],
    backup: &BackupManifest,
    manifests: &[(String, BackupManifest)],
    until: Until,
) -> Result<Chain> {
    chain_in(logs, backup, &Histories::of(manifests, until), until)
}

fn chain_in(logs: &[StoredLog], backup: &BackupManifest, histories: &Histories, until: Until) -> Result<Chain> {
    let found = LaterLogs::of(logs, backup, histories, until)?;
    let chain = found.chain(backup, &histories.all, until)?;
    found.check_end(chain.end, until)?;
    Ok(chain)
}

/// What the backups of a store tell: those within a limit, and all.
struct Histories {
    within: History,
    all: History,
}

impl Histories {
    fn of(manifests: &[(String, BackupManifest)], until: Until) -> Histories {
        let all = || manifests.iter().map(|(_, of)| of);
        Histories { within: History::of(all().filter(|of| until.admits_backup(of))), all: History::of(all()) }
    }
}

/// The log objects behind a backup, without those that a recovery has lost.
#[derive(Default)]
struct LaterLogs<'l> {
    /// Objects within the limit.
    within: Vec<(&'l str, &'l LogHeader)>,
    /// Objects within the limit before whose end a later object begins: another writer was behind, or a recovery has
    /// lost the end.
    unclear: Vec<&'l LogHeader>,
    /// Objects beyond the limit.
    beyond: Vec<&'l LogHeader>,
    damaged: Vec<(&'l StoredLog, &'l BackupError)>,
}

impl<'l> LaterLogs<'l> {
    fn of(
        logs: &'l [StoredLog],
        backup: &BackupManifest,
        Histories { within: history, all }: &Histories,
        until: Until,
    ) -> Result<LaterLogs<'l>> {
        let is_lost = history.has_lost(backup.epoch(), backup.sequence);
        let headers = headers_within(logs, until).map(|header| (header.epoch(), header.after));
        let later_logs = history.of_later_logs(headers);
        let mut found = LaterLogs::default();
        for log in logs.iter().filter(|log| !log.is_before(backup.sequence, logs)) {
            match &log.header {
                Err(_) if until.excludes_log(log.after) => {}
                Err(error) => found.damaged.push((log, error)),
                Ok(of) if history.has_lost(of.epoch(), of.end()) => {}
                Ok(of) if !until.admits_log(of) => found.beyond.push(of),
                Ok(of) if is_lost && of.epoch() > backup.epoch() => {
                    return Err(BackupError::Gap { after: backup.sequence, before: of.end() });
                }
                Ok(of) if later_logs.has_lost(of.epoch(), of.end()) && !all.has_kept(of.epoch(), of.end()) => {
                    found.unclear.push(of);
                }
                Ok(of) => found.within.push((&log.object, of)),
            }
        }
        Ok(found)
    }

    /// The objects that follow each other, as far as they go.
    fn chain(&self, backup: &BackupManifest, all: &History, until: Until) -> Result<Chain> {
        let (mut epoch, mut end) = (backup.epoch(), backup.sequence);
        let mut objects = Vec::new();
        loop {
            // A backup or an object beyond the limit may show that a later open has lost what the chain has so far.
            let may_follow = |of: &LogHeader| {
                let tells = |at: &&LogHeader| epoch < at.epoch() && at.epoch() <= of.epoch() && at.after < end;
                let may_be_lost = !all.has_kept(epoch, end) && self.beyond.iter().any(tells);
                // The caller leaves out a backup that is not durable if any object follows.
                !backup.is_durable || !(may_be_lost || all.has_lost_before(epoch, end, of.epoch()))
            };
            // Two writers may have shipped objects that overlap.
            let next = self.within.iter().filter(|(_, of)| of.continues(end));
            let Some((object, of)) = next.max_by_key(|(_, of)| (may_follow(of), of.end())) else { break };
            if !may_follow(of) {
                if all.has_lost(epoch, end) || until.excludes_log(end) {
                    break;
                }
                return Err(BackupError::Gap { after: end, before: of.end() });
            }
            objects.push((*object).to_owned());
            (epoch, end) = (of.epoch(), of.end());
        }
        Ok(Chain { objects, end, epoch })
    }

    /// # Errors
    /// Those of [`chain`] if the restore may need an object that the chain with this end does not have.
    fn check_end(&self, end: u64, until: Until) -> Result<()> {
        // While the clock was set back, objects behind one that is behind the limit got earlier times. One that begins
        // before the end is of another writer, which may have shipped the same commits later.
        let is_behind_limit = |after: u64, epoch: u32| {
            let precedes = |at: &&LogHeader| at.after == end && at.end() <= after && at.epoch() <= epoch;
            after > end && self.beyond.iter().any(precedes)
        };
        if let Some((log, error)) = self.damaged.iter().find(|(log, _)| !is_behind_limit(log.after, u32::MAX)) {
            return Err(BackupError::wrong(&log.object, error.to_string()));
        }
        let is_missed = |of: &LogHeader| of.after > end && !is_behind_limit(of.after, of.epoch());
        if let Some((_, later)) = self.within.iter().find(|(_, of)| is_missed(of)) {
            return Err(BackupError::Gap { after: end, before: later.after });
        }
        match self.unclear.iter().map(|of| of.end()).max() {
            Some(before) if before > end && !until.excludes_log(end) => Err(BackupError::Gap { after: end, before }),
            _ => Ok(()),
        }
    }
}

/// The backup that a restore begins with, and the log objects that it applies: the newest, or if that cannot be
/// continued and there is a later log, the newest that can. `manifests`: those of the store. `wanted`: the id of the
/// only backup that comes into question.
///
/// # Errors
/// Those of [`chain`]; `Gap` if a backup is left out, and the log does not reach the end of what may be kept of it.
pub(crate) fn choose<'m>(
    logs: &[StoredLog],
    manifests: &'m [(String, BackupManifest)],
    wanted: Option<&str>,
    until: Until,
) -> Result<Option<(&'m BackupManifest, Vec<String>)>> {
    let mut within: Vec<_> = manifests.iter().filter(|(_, of)| until.admits_backup(of)).collect();
    sort_backups(&mut within);
    let histories = Histories::of(manifests, until);
    // The last epoch that the log shows within the limit.
    let begun = headers_within(logs, until).map(LogHeader::epoch).max();
    let mut left_out: Vec<&BackupManifest> = Vec::new();
    for (_, backup) in within.iter().rev().filter(|(_, of)| wanted.is_none_or(|id| of.id == id)) {
        let log = chain_in(logs, backup, &histories, until)?;
        let is_replaced = || is_replaced_by_log(logs, backup, &histories.all, until);
        if backup.is_durable || (log.objects.is_empty() && !is_replaced()) {
            let epoch = log.epoch.max(begun.unwrap_or(0));
            let kept = |of: &&BackupManifest| {
                let end = histories.within.kept_before(of.epoch(), of.sequence, u32::MAX);
                histories.all.kept_before(of.epoch(), end, epoch)
            };
            return match left_out.iter().map(kept).max() {
                Some(before) if log.end < before => Err(BackupError::Gap { after: log.end, before }),
                _ => Ok(Some((backup, log.objects))),
            };
        }
        left_out.push(backup);
    }
    Ok(None)
}

/// Whether the log has shown, in a later epoch, the sequence numbers of a backup that was not durable. Up to the
/// epoch in which a later backup has its commits, the log is only behind.
fn is_replaced_by_log(logs: &[StoredLog], backup: &BackupManifest, all: &History, until: Until) -> bool {
    let kept = all.kept_until(backup.epoch(), backup.sequence);
    headers_within(logs, until).any(|of| of.epoch() > kept && is_replaced_by(backup, of))
}

fn is_replaced_by(backup: &BackupManifest, of: &LogHeader) -> bool {
    !backup.is_durable && of.epoch() > backup.epoch() && of.end() <= backup.sequence
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log_object::test_position;

    fn backup(id: &str, sequence: u64, epoch: u32, time_ms: u64, is_durable: bool) -> (String, BackupManifest) {
        let mut manifest = BackupManifest::new(id.into(), String::new());
        (manifest.sequence, manifest.time_ms, manifest.is_durable) = (sequence, time_ms, is_durable);
        manifest.position = test_position(epoch, sequence).to_string();
        (id.to_owned(), manifest)
    }

    fn log(after: u64, epoch: u32, end: u64, time_ms: u64) -> StoredLog {
        let header = Ok(LogHeader::for_test(after, epoch, end, time_ms));
        StoredLog { object: after.to_string(), after, header }
    }

    /// Regression: a later backup told that the backup that was left out was lost before the limit, and a restore to
    /// a time was a `Gap`. If only its end was lost, a restore lacked the rest of it.
    #[test]
    fn later_backup_tells_what_was_lost() {
        let mut logs = [log(40, 1, 45, 50), log(45, 21, 48, 120), log(48, 21, 60, 130)];
        let mut manifests = vec![backup("d", 40, 1, 10, true), backup("lost", 50, 1, 100, false)];
        let until = Until::TimeMs(125);
        assert!(matches!(choose(&logs, &manifests, None, until), Err(BackupError::Gap { after: 48, before: 50 })));
        let (id, mut later) = backup("n", 60, 21, 1000, true);
        later.wal_ends = vec![(20, Some(45))];
        manifests.push((id, later));
        let (chosen, objects) = choose(&logs, &manifests, None, until).unwrap().unwrap();
        assert_eq!((&chosen.id[..], &objects[..]), ("d", &["40".to_owned(), "45".to_owned()][..]));
        // A part of it was kept that the log within the limit does not have.
        manifests[2].1.wal_ends = vec![(20, Some(48))];
        [logs[1], logs[2]] = [log(45, 21, 47, 120), log(47, 21, 60, 130)];
        assert!(matches!(choose(&logs, &manifests, None, until), Err(BackupError::Gap { after: 47, before: 48 })));
    }

    /// Regression: a restore to a time ended early without a word. Two watchers had shipped the same commits, the
    /// object of one was missing, and the later one of the other was taken for a sign that the clock was set back.
    #[test]
    fn object_behind_the_limit_excuses_none_that_it_overlaps() {
        let manifests = [backup("d", 3, 11, 1110, true)];
        let logs = [log(2, 11, 5, 1180), log(3, 11, 12, 1350), log(5, 11, 6, 1200), log(6, 11, 8, 1270)];
        let until = Until::TimeMs(1279);
        assert_eq!(choose(&logs, &manifests, None, until).unwrap().unwrap().1.len(), 3);
        assert!(matches!(choose(&logs[1..], &manifests, None, until), Err(BackupError::Gap { after: 3, before: 5 })));
        // The later one has no more than the missing one.
        let manifests = [backup("d", 4, 11, 1110, true)];
        let logs = [log(4, 11, 5, 1280), log(3, 11, 5, 1360), log(5, 11, 6, 1310)];
        let until = Until::TimeMs(1351);
        assert_eq!(choose(&logs, &manifests, None, until).unwrap().unwrap().1.len(), 2);
        assert!(matches!(choose(&logs[1..], &manifests, None, until), Err(BackupError::Gap { after: 4, before: 5 })));
        // The clock was set back.
        let logs = [log(4, 11, 5, 1360), log(5, 11, 6, 1310)];
        assert_eq!(choose(&logs, &manifests, None, until).unwrap().unwrap().1.len(), 0);
    }

    /// Regression: `prune` deleted the log that showed that a backup was lost at a time, and a restore to that time
    /// used the backup.
    #[test]
    fn log_that_replaces_a_kept_backup_is_needed() {
        let mut manifests = [backup("lost", 50, 1, 100, false), backup("n", 60, 21, 1000, true)];
        manifests[1].1.wal_ends = vec![(20, Some(45))];
        let logs = [log(40, 1, 45, 90), log(45, 21, 48, 120), log(48, 21, 60, 130)];
        let until = Until::TimeMs(125);
        assert!(choose(&logs, &manifests, None, until).unwrap().is_none());
        let kept: Vec<_> = manifests.iter().map(|(_, of)| of).collect();
        let unneeded: Vec<_> = unneeded_logs(&logs, &kept).map(|of| &*of.object).collect();
        assert_eq!(unneeded, ["40"]);
        assert!(choose(&logs[1..], &manifests, None, until).unwrap().is_none());
        assert_eq!(unneeded_logs(&logs, &kept[1..]).count(), 3);
    }

    /// Regression: a restore to a time was a `Gap`, although a later backup had the commits of a backup that was not
    /// durable. A watcher that shipped the commits before its end after the next open counted as a loss of the end.
    #[test]
    fn log_that_is_behind_replaces_no_kept_backup() {
        let mut manifests = vec![backup("d", 16, 91, 100, true), backup("kept", 25, 131, 200, false)];
        let mut logs = vec![log(16, 91, 20, 110), log(20, 141, 22, 210)];
        let until = Until::TimeMs(250);
        assert!(matches!(choose(&logs, &manifests, None, until), Err(BackupError::Gap { after: 22, before: 25 })));
        let (id, mut later) = backup("n", 29, 141, 300, false);
        later.wal_ends = vec![(131, Some(26))];
        manifests.push((id, later));
        let (chosen, objects) = choose(&logs, &manifests, None, until).unwrap().unwrap();
        assert_eq!((&chosen.id[..], objects.len()), ("kept", 0));
        // The later backup is not durable either, and the next open has lost the end of both.
        manifests[2].1.sequence = 25;
        manifests[2].1.wal_ends = vec![(81, Some(12))];
        assert_eq!(choose(&logs, &manifests, None, until).unwrap().unwrap().0.id, "kept");
        logs.push(log(22, 151, 25, 320));
        let (chosen, objects) = choose(&logs, &manifests, None, Until::TimeMs(350)).unwrap().unwrap();
        assert_eq!((&chosen.id[..], objects.len()), ("d", 3));
    }

    /// Regression: a restore to a time was a `Gap`, although a later backup told that the commits beyond its end were
    /// lost before an epoch of the log. The restore began with a backup that the log of this epoch did not continue.
    #[test]
    fn log_before_the_chosen_backup_tells_the_epoch() {
        let mut manifests = vec![backup("kept", 4, 1, 100, false), backup("lost", 6, 11, 200, false)];
        manifests.push(backup("n", 11, 41, 400, true));
        manifests[1].1.wal_ends = vec![(1, Some(4))];
        manifests[2].1.wal_ends = vec![(21, Some(4)), (31, Some(10))];
        let logs = [log(2, 31, 3, 300)];
        let (chosen, objects) = choose(&logs, &manifests, None, Until::TimeMs(300)).unwrap().unwrap();
        assert_eq!((&chosen.id[..], objects.len()), ("kept", 0));
        // The epoch of the log may be before the loss.
        manifests[2].1.wal_ends = vec![(31, Some(4))];
        let chosen = choose(&logs, &manifests, None, Until::TimeMs(300));
        assert!(matches!(chosen, Err(BackupError::Gap { after: 4, before: 6 })));
    }
}

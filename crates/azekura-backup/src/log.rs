//! The shipped log as a chain: which objects continue a backup up to a time.

use futures_util::{StreamExt, TryStreamExt, stream};

use crate::error::{BackupError, Result};
use crate::history::History;
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
    fn admits_log(self, header: &LogHeader) -> bool {
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
    after: u64,
    /// The error of a damaged header.
    pub(crate) header: Result<LogHeader>,
}

/// All log objects of the database, in the order of their names.
pub(crate) async fn read_headers(store: &BackupStore, database: &str) -> Result<Vec<StoredLog>> {
    let listed = store.list_folder(LOG).await?;
    let numbered = listed.into_iter().filter_map(|(object, meta)| Some((number_in_name(&object)?, object, meta.size)));
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

/// The log objects that continue a backup, in order. `manifests`: the backups within the limit, this one among them.
/// `all`: those of the store.
///
/// # Errors
/// `Gap` if there is a later object within the limit that does not continue them, or of which it is not known whether
/// a recovery has lost it; `WrongContent` if one may be damaged.
pub(crate) fn chain(
    logs: &[StoredLog],
    backup: &BackupManifest,
    manifests: &[(String, BackupManifest)],
    all: &History,
    until: Until,
) -> Result<Vec<String>> {
    let history = History::of(manifests.iter().map(|(_, of)| of));
    let is_lost = history.has_lost(backup.epoch(), backup.sequence);
    let headers = logs.iter().flat_map(|log| &log.header).filter(|header| until.admits_log(header));
    let later_logs = history.of_later_logs(headers.map(|header| (header.epoch(), header.after)));
    // The epoch of the first object beyond the limit. While the clock was set back, later objects of this epoch got
    // earlier times. Those of earlier epochs may follow by name: the commits that a recovery has lost.
    let mut stop = u32::MAX;
    let mut newest = backup.epoch();
    let (mut admitted, mut unclear) = (Vec::new(), Vec::new());
    for log in logs {
        match &log.header {
            _ if log.is_before(backup.sequence, logs) => {}
            Ok(of) if of.epoch() >= stop || history.has_lost(of.epoch(), of.end()) => {}
            Ok(of) if is_lost && of.epoch() > backup.epoch() && until.admits_log(of) => {
                return Err(BackupError::Gap { after: backup.sequence, before: of.end() });
            }
            // A later object begins before its end: another writer was behind, or a recovery has lost the end.
            Ok(of)
                if until.admits_log(of)
                    && later_logs.has_lost(of.epoch(), of.end())
                    && !all.has_kept(of.epoch(), of.end()) =>
            {
                unclear.push(of);
            }
            Ok(of) if until.admits_log(of) => {
                newest = newest.max(of.epoch());
                admitted.push((&log.object, of));
            }
            Ok(of) => stop = of.epoch(),
            // Beyond the limit, unless commits that a recovery has lost follow.
            Err(_) if stop <= newest || until.excludes_log(log.after) => {}
            Err(error) => return Err(BackupError::wrong(&log.object, error.to_string())),
        }
    }
    let mut end = backup.sequence;
    let mut objects = Vec::new();
    loop {
        // Two writers may have shipped objects that overlap.
        let continues = |header: &LogHeader| header.after <= end && header.end() > end;
        let next = admitted.iter().filter(|(_, header)| continues(header)).max_by_key(|(_, header)| header.end());
        let Some((object, header)) = next else { break };
        objects.push((*object).clone());
        end = header.end();
    }
    if let Some((_, later)) = admitted.iter().find(|(_, header)| header.after > end) {
        return Err(BackupError::Gap { after: end, before: later.after });
    }
    match unclear.iter().map(|header| header.end()).max() {
        Some(before) if before > end && until.admits_commit(end + 1) => Err(BackupError::Gap { after: end, before }),
        _ => Ok(objects),
    }
}

/// Whether the log has shown, in a later epoch, the sequence numbers of a backup that was not durable.
pub(crate) fn is_replaced_by_log(logs: &[StoredLog], backup: &BackupManifest, until: Until) -> bool {
    let replaces = |of: &LogHeader| of.epoch() > backup.epoch() && of.end() <= backup.sequence;
    !backup.is_durable && logs.iter().flat_map(|of| &of.header).any(|of| until.admits_log(of) && replaces(of))
}

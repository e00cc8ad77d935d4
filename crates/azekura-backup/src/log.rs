//! The shipped log as a chain: which objects continue a backup up to a time.

use crate::error::{BackupError, Result};
use crate::history::History;
use crate::layout::{BackupManifest, LOG};
use crate::log_object::{HEADER_LEN, LogHeader, decode_header};
use crate::store::BackupStore;

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

/// Names and headers of all log objects of the database, in the order of their names.
pub(crate) async fn read_headers(store: &BackupStore, database: &str) -> Result<Vec<(String, LogHeader)>> {
    let mut headers = Vec::new();
    for (object, meta) in store.list_folder(LOG).await? {
        let Some(number) = number_in_name(&object) else { continue };
        let bytes = match store.get_start(&object, (HEADER_LEN as u64).min(meta.size)).await {
            Ok(bytes) => bytes,
            // Removed by `prune` after it was listed.
            Err(BackupError::Missing { .. }) => continue,
            Err(error) => return Err(error),
        };
        let header = decode_header(&object, &bytes)?;
        if header.after != number {
            return Err(BackupError::wrong(object, "its header is that of another log object"));
        }
        if header.database() != database {
            return Err(BackupError::OtherDatabase { stored: header.database(), found: database.to_owned() });
        }
        headers.push((object, header));
    }
    Ok(headers)
}

/// The log objects that continue a backup, in order. `manifests`: the backups within the limit, this one among them.
///
/// # Errors
/// `Gap` if there is a later object within the limit that does not continue them.
pub(crate) fn chain(
    headers: &[(String, LogHeader)],
    backup: &BackupManifest,
    manifests: &[(String, BackupManifest)],
    until: Until,
) -> Result<Vec<String>> {
    let history = History::of(manifests);
    let is_later = |of: &LogHeader| of.end() > backup.sequence && !history.has_lost(of.epoch(), of.end());
    let later = headers.iter().filter(|(_, header)| is_later(header));
    // While the clock was set back, later objects got earlier times.
    let admitted: Vec<_> = later.take_while(|(_, header)| until.admits_log(header)).collect();
    let mut end = backup.sequence;
    let mut objects = Vec::new();
    loop {
        // Two writers may have shipped objects that overlap.
        let continues = |header: &LogHeader| header.after <= end && header.end() > end;
        let next = admitted.iter().filter(|(_, header)| continues(header)).max_by_key(|(_, header)| header.end());
        let Some((object, header)) = next else { break };
        objects.push(object.clone());
        end = header.end();
    }
    match admitted.iter().find(|(_, header)| header.after > end) {
        Some((_, later)) => Err(BackupError::Gap { after: end, before: later.after }),
        None => Ok(objects),
    }
}

/// Whether the log has shown, in a later epoch, the sequence numbers of a backup that was not durable.
pub(crate) fn is_replaced_by_log(headers: &[(String, LogHeader)], backup: &BackupManifest, until: Until) -> bool {
    let replaces = |of: &LogHeader| of.epoch() > backup.epoch() && of.end() <= backup.sequence;
    !backup.is_durable && headers.iter().any(|(_, header)| until.admits_log(header) && replaces(header))
}

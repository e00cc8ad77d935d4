//! Which stored commits a recovery of the database has lost. Later commits have their sequence numbers.

use crate::layout::BackupManifest;

/// Epochs in which the database was stored, with sequence numbers up to which it had commits then, and at which it may
/// have ended.
pub(crate) struct History(Vec<(u32, u64)>);

impl History {
    /// The epochs of backups, with their last sequence numbers.
    pub(crate) fn of(manifests: &[(String, BackupManifest)]) -> History {
        History(manifests.iter().map(|(_, manifest)| (manifest.epoch(), manifest.sequence)).collect())
    }

    /// Adds the epochs of log objects, with the sequence numbers before them. So the loss is known if the backup from
    /// after the recovery is gone.
    pub(crate) fn note_logs(&mut self, logs: impl Iterator<Item = (u32, u64)>) {
        self.0.extend(logs);
    }

    /// Whether commits up to `end`, which were stored in `epoch`, were lost: in a later epoch, the database ended
    /// before.
    pub(crate) fn has_lost(&self, epoch: u32, end: u64) -> bool {
        self.0.iter().any(|(later, sequence)| *later > epoch && *sequence < end)
    }
}

/// Sorts backups by their sequence numbers. Those with lost commits come first.
pub(crate) fn sort_backups(manifests: &mut [(String, BackupManifest)]) {
    let history = History::of(manifests);
    manifests.sort_by_cached_key(|(_, of)| (!history.has_lost(of.epoch(), of.sequence), of.sequence, of.id.clone()));
}

//! Which stored commits a recovery of the database has lost. Later commits have their sequence numbers.

use crate::layout::BackupManifest;

/// The epochs of backups, with their last sequence numbers.
pub(crate) struct History(Vec<(u32, u64)>);

impl History {
    pub(crate) fn of(manifests: &[(String, BackupManifest)]) -> History {
        History(manifests.iter().map(|(_, manifest)| (manifest.epoch(), manifest.sequence)).collect())
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

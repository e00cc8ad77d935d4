//! What the log asks of the database around it.

use crate::base::Result;
use crate::base::version_edit::{FileNumber, WalEpoch};

/// Answers the log's questions. Called from appending, syncing and background threads,
/// [`WalCallbacks::add_segment_to_manifest`] and [`WalCallbacks::allocate_segment`] with the log's append lock held: an
/// answer must not call back into the log.
pub(crate) trait WalCallbacks: Send + Sync {
    /// Fresh numbers, never given before: the epoch is at least 1 and rises from call to call.
    fn allocate_segment(&self) -> Result<(WalEpoch, FileNumber)>;

    /// Notes in the manifest, without syncing it, that a segment begins. On an error nothing is noted.
    fn add_segment_to_manifest(&self, epoch: WalEpoch, file: FileNumber) -> Result<()>;

    /// Syncs what the commits so far need beside the log, and is not synced yet: the manifest, and blob files that they
    /// point into.
    fn sync_dependencies(&self) -> Result<()>;
}

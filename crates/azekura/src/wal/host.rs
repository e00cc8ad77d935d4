//! What the log asks of the database around it.

use crate::base::Result;
use crate::base::edit::{Epoch, FileId};

/// Answers the log's questions. Called from appending, syncing and background threads, [`WalHost::segment_added`] and
/// [`WalHost::new_segment`] with the log's append lock held: an answer must not call back into the log.
pub(crate) trait WalHost: Send + Sync {
    /// Fresh numbers, never given before: the epoch is at least 1 and rises from call to call.
    fn new_segment(&self) -> Result<(Epoch, FileId)>;

    /// Notes in the manifest, without syncing it, that a segment begins. On an error nothing is noted.
    fn segment_added(&self, epoch: Epoch, file: FileId) -> Result<()>;

    /// Syncs what the commits so far need beside the log, and is not synced yet: the manifest, and blob files that they
    /// point into.
    fn before_sync(&self) -> Result<()>;
}

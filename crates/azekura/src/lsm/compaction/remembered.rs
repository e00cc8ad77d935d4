//! What outlives a task of compaction.

use crate::base::SeqNo;
use crate::lsm::collect::job::Collection;
use crate::lsm::compaction::job::Job;
use crate::lsm::compaction::view::Positions;

/// What compaction remembers from task to task.
pub(crate) struct Remembered {
    pub(crate) positions: Positions,
    /// The oldest read point when a task last asked; the largest number there is while nobody has.
    pub(crate) oldest_point: SeqNo,
    /// A merge that yielded.
    pub(crate) paused: Option<Job>,
    /// A collection of blob files that yielded.
    pub(crate) collecting: Option<Collection>,
}

impl Default for Remembered {
    fn default() -> Remembered {
        Remembered { positions: Positions::default(), oldest_point: SeqNo::MAX, paused: None, collecting: None }
    }
}

//! What outlives a task of compaction.

use std::collections::BTreeSet;

use crate::base::SeqNo;
use crate::base::edit::FileId;
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
    /// Blob files that collection by itself leaves alone until the database is opened again: they could not be read.
    pub(crate) damaged: BTreeSet<FileId>,
}

impl Default for Remembered {
    fn default() -> Remembered {
        Remembered {
            positions: Positions::default(),
            oldest_point: SeqNo::MAX,
            paused: None,
            collecting: None,
            damaged: BTreeSet::new(),
        }
    }
}

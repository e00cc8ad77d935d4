//! What outlives a task of compaction.

use std::collections::BTreeSet;

use crate::base::SeqNo;
use crate::base::version_edit::FileNumber;
use crate::lsm::blob_gc::job::BlobGcJob;
use crate::lsm::compaction::job::CompactionJob;
use crate::lsm::compaction::picker::CompactPointers;

/// What compaction remembers from task to task.
pub(crate) struct CompactionState {
    pub(crate) compact_pointers: CompactPointers,
    /// The oldest read point when a task last asked; the largest number there is while nobody has.
    pub(crate) oldest_snapshot: SeqNo,
    /// A merge that yielded.
    pub(crate) paused_compaction: Option<CompactionJob>,
    /// A collection of blob files that yielded.
    pub(crate) paused_blob_gc: Option<BlobGcJob>,
    /// Blob files that collection by itself leaves alone until the database is opened again: they could not be read.
    pub(crate) damaged_blob_files: BTreeSet<FileNumber>,
}

impl Default for CompactionState {
    fn default() -> CompactionState {
        CompactionState {
            compact_pointers: CompactPointers::default(),
            oldest_snapshot: SeqNo::MAX,
            paused_compaction: None,
            paused_blob_gc: None,
            damaged_blob_files: BTreeSet::new(),
        }
    }
}

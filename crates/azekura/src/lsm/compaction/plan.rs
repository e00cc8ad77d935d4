//! One compaction: which tables, from where to where, and why.

use crate::base::version_edit::FileNumber;

/// Why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CompactionReason {
    /// Too many runs on level 0.
    L0Runs,
    /// A level has outgrown its target.
    LevelSize,
    /// Nobody writes, and a few runs fewer are cheap.
    IdleL0,
    /// More than half of a table are tombstones.
    Tombstones,
    /// A quarter of a table are superseded versions that a reader needed when it was written, and none needs now.
    Superseded,
    /// `major_compact`.
    Forced,
    /// Pointers that nobody can see keep values in blob files.
    HiddenBlobs,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PickedCompaction {
    pub(crate) reason: CompactionReason,
    pub(crate) start_level: u8,
    pub(crate) output_level: u8,
    /// Tables of `from`.
    pub(crate) start_level_inputs: Vec<FileNumber>,
    /// Tables of `to` that overlap them; none if `from` is `to`.
    pub(crate) output_level_inputs: Vec<FileNumber>,
    /// Only the level changes, no table is rewritten.
    pub(crate) trivial_move: bool,
}

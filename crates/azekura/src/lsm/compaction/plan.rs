//! One compaction: which tables, from where to where, and why.

use crate::base::edit::FileId;

/// Why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// Too many runs on level 0.
    YoungRuns,
    /// A level has outgrown its target.
    Size,
    /// Nobody writes, and a few runs fewer are cheap.
    Rest,
    /// More than half of a table are tombstones.
    Tombstones,
    /// A quarter of a table are superseded versions that a reader needed when it was written, and none needs now.
    Superseded,
    /// `major_compact`.
    Forced,
    /// Pointers that nobody can see keep values in blob files.
    Collection,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) reason: Reason,
    pub(crate) from: u8,
    pub(crate) to: u8,
    /// Tables of `from`.
    pub(crate) upper: Vec<FileId>,
    /// Tables of `to` that overlap them; none if `from` is `to`.
    pub(crate) lower: Vec<FileId>,
    /// Only the level changes, no table is rewritten.
    pub(crate) moves: bool,
}

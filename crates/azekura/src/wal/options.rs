//! The words that the log and its caller share.

use crate::base::SeqNo;
use crate::base::edit::{Epoch, FileId};
use crate::base::event::DroppedAfterDamage;

/// How a log is written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WalOptions {
    /// Bytes after which a new segment is begun, rounded up to 4 KiB. A larger group of commits gets a larger segment.
    pub(crate) segment_size: u64,
    /// Whether to append by storing into a mapping where the file system makes that safe.
    pub(crate) mapped: bool,
}

impl Default for WalOptions {
    fn default() -> WalOptions {
        WalOptions { segment_size: 64 << 20, mapped: true }
    }
}

/// One commit as the log holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogCommit<'a> {
    pub(crate) first: SeqNo,
    /// Sequence numbers it takes, at least 1.
    pub(crate) count: u32,
    pub(crate) payload: &'a [u8],
}

/// A segment as others see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentInfo {
    pub(crate) epoch: Epoch,
    pub(crate) file: FileId,
    /// The first sequence number it holds, or would.
    pub(crate) first: SeqNo,
    /// The last it holds; `first` − 1 if it holds none.
    pub(crate) last: SeqNo,
    /// Bytes used, header included.
    pub(crate) end: u64,
}

/// What was written since the log was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WalStats {
    /// Bytes of frames.
    pub(crate) bytes: u64,
    pub(crate) commits: u64,
    /// Syncs that callers waited for or a worker ran, not files synced.
    pub(crate) syncs: u64,
}

/// What opening does when the log is found damaged below the point up to which it was known to be durable.
///
/// A torn tail, which power loss leaves above that point, is no damage: every mode ends the log there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecoveryMode {
    /// Opening fails with `Corruption` that names file and offset. Nothing is changed.
    #[default]
    Strict,
    /// The log ends at the first damage, whatever was durable behind it: a consistent, older state.
    PointInTime,
    /// Damage is skipped and every whole commit that still verifies is applied, in order: as much as possible, but
    /// later commits may be there without earlier ones.
    Salvage,
}

/// What a replay needs to know.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReplayOptions {
    pub(crate) mode: RecoveryMode,
    /// The segments that the manifest lists.
    pub(crate) live: Vec<(Epoch, FileId)>,
    /// Where the last open or clean close found the log to end.
    pub(crate) log_end: Option<(Epoch, SeqNo)>,
    /// Records up to here are known to be in tables.
    pub(crate) from: SeqNo,
}

/// What a replay found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReplayReport {
    /// The last sequence number that counts; never below `from`.
    pub(crate) last: SeqNo,
    /// The segment where the log ends; the next one names it as its predecessor.
    pub(crate) last_epoch: Epoch,
    /// The highest epoch in the header of any segment file, dead ones included; the next must be above it.
    pub(crate) highest_epoch: Epoch,
    /// All live segments, oldest first, with those that link to them although the manifest does not list them.
    pub(crate) segments: Vec<SegmentInfo>,
    /// Other segment files, free to be written over.
    pub(crate) spares: Vec<FileId>,
    /// Commits applied.
    pub(crate) commits: u64,
    pub(crate) dropped_after_damage: Option<DroppedAfterDamage>,
}

//! Types that the WAL and its caller share, and the callbacks into the database.

use crate::base::event::DroppedAfterDamage;
use crate::base::version_edit::{FileNumber, WalEpoch};
use crate::base::{Result, SeqNo};

/// How a log is written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WalOptions {
    /// Bytes after which a new segment is begun, rounded up to 4 KiB. A larger group of commits gets a larger segment.
    pub(crate) segment_size: u64,
    /// Whether to append by storing into a mapping where the file system makes that safe.
    pub(crate) mapped: bool,
    /// Whether frames say how far the log is durable.
    pub(crate) marks: bool,
}

impl Default for WalOptions {
    fn default() -> WalOptions {
        WalOptions { segment_size: 64 << 20, mapped: true, marks: true }
    }
}

/// One commit as the log holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WalCommit<'a> {
    pub(crate) first_seqno: SeqNo,
    /// Sequence numbers it takes, at least 1.
    pub(crate) seqno_count: u32,
    pub(crate) payload: &'a [u8],
}

/// A segment as others see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WalSegmentInfo {
    pub(crate) epoch: WalEpoch,
    pub(crate) file: FileNumber,
    /// The first sequence number it holds, or would.
    pub(crate) first_seqno: SeqNo,
    /// The last it holds; `first` − 1 if it holds none.
    pub(crate) last_seqno: SeqNo,
    /// Bytes used, header included.
    pub(crate) end_offset: u64,
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
/// A torn tail, which power loss leaves above that point, is no damage: every mode ends the log there. Neither does any
/// mode refuse damage in a part of the log that every partition has flushed beyond, if what can be read behind the
/// damage goes on with what is needed.
///
/// Whatever is committed and synced after an open that succeeded is there in every later open, in every mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RecoveryMode {
    /// Opening fails with `Corruption` that names file and offset. Nothing is changed.
    #[default]
    Strict,
    /// The log ends at the first damage, whatever was durable behind it: a consistent, older state, one moment of all
    /// partitions. Opening fails with `Corruption` that names a partition if that partition already holds later
    /// commits outside of the log, because then that moment cannot be restored.
    PointInTime,
    /// Damage is skipped and every whole commit that still verifies is applied, in order: as much as possible. Later
    /// commits may be there without earlier ones, and a partition that was flushed later than others keeps what it
    /// flushed: the state may be no single moment of the database. No commit of the log is applied by half: one that
    /// names a partition which the manifest has lost is left out.
    Salvage,
}

/// A sequence number, and the partition that it is known from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PartitionSeqno {
    pub(crate) seqno: SeqNo,
    /// A description of the partition; empty if the number is known from elsewhere.
    pub(crate) partition: String,
}

/// What a replay needs to know.
#[derive(Clone, Debug, Default)]
pub(crate) struct WalReplayOptions {
    pub(crate) mode: RecoveryMode,
    /// The segments that the manifest lists.
    pub(crate) listed_segments: Vec<(WalEpoch, FileNumber)>,
    /// Where the last open or clean close found the log to end.
    pub(crate) wal_end: Option<(WalEpoch, SeqNo)>,
    /// No partition needs a record of the log up to here: all of them are in permanent files.
    pub(crate) flushed_through: SeqNo,
    /// The log was durable up to here, because a permanent file holds something that is written only after that.
    pub(crate) durable_through: PartitionSeqno,
    /// Pools that are memory may hold commits of the log up to here, durable or not.
    pub(crate) held_in_pools: PartitionSeqno,
    /// Segment files with this number or a higher one were not made by this database; 0 if all were.
    pub(crate) file_number_limit: u64,
}

/// What a replay found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WalReplayReport {
    /// The last sequence number that counts; never below `from` and what is known to be durable.
    pub(crate) last_seqno: SeqNo,
    /// The segment where the log ends; the next one names it as its predecessor.
    pub(crate) last_epoch: WalEpoch,
    /// The highest epoch in the header of any segment file, dead ones included, or in the manifest; the next must be
    /// above it.
    pub(crate) highest_epoch: WalEpoch,
    /// The segments that a later replay needs, oldest first, with those that link to them although the manifest does
    /// not list them.
    pub(crate) segments: Vec<WalSegmentInfo>,
    /// Other segment files, free to be written over.
    pub(crate) spare_files: Vec<FileNumber>,
    /// Commits applied.
    pub(crate) commits: u64,
    pub(crate) dropped_after_damage: Option<DroppedAfterDamage>,
    /// Damage was passed over, or a commit is missing in between: a later replay would stop there, so the log has to be
    /// [rewritten](crate::wal::rewrite_wal()).
    pub(crate) has_gaps: bool,
    /// No partition needs anything up to here.
    pub(crate) flushed_through: SeqNo,
}

impl WalReplayReport {
    /// What the manifest has to note, so that a later replay ends where this one did: whatever has an epoch up to this
    /// one and is not listed is not a part of the log.
    pub(crate) fn wal_end(&self) -> (WalEpoch, SeqNo) {
        (self.highest_epoch.max(self.last_epoch), self.last_seqno)
    }
}

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

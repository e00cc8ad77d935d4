//! Types that the write-ahead log (WAL) and its caller share, and the callbacks into the database.

use crate::base::event::DroppedAfterDamage;
use crate::base::version_edit::{FileNumber, WalEpoch};
use crate::base::{Result, SeqNo};

/// Options for writing the WAL.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WalOptions {
    /// Size in bytes at which a new segment is begun, rounded up to 4 KiB. A larger group of commits gets a larger
    /// segment.
    pub(crate) segment_size: u64,
    /// Whether to append through a memory mapping, if the file system makes this safe.
    pub(crate) mapped: bool,
    /// Whether workers populate the mapping, when [`WalCallbacks::request_populate`] asks for it.
    pub(crate) populates_ahead: bool,
    /// Whether frames contain watermarks: the last sequence number that was durable when the frame was written.
    pub(crate) marks: bool,
}

impl Default for WalOptions {
    fn default() -> WalOptions {
        WalOptions { segment_size: 64 << 20, mapped: true, populates_ahead: false, marks: true }
    }
}

/// One commit as stored in the WAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WalCommit<'a> {
    pub(crate) first_seqno: SeqNo,
    /// Number of sequence numbers that the commit uses, at least 1.
    pub(crate) seqno_count: u32,
    pub(crate) payload: &'a [u8],
}

/// Which segments without needed records are kept for readers of changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WalRetention {
    /// Maximum number of bytes of such segments.
    pub(crate) max_bytes: u64,
    /// Every segment that a partition needed after this time, in nanoseconds of the monotonic clock, is kept.
    pub(crate) needed_after_ns: Option<u64>,
    /// Every segment with a commit after this sequence number is kept, because a reader has read up to it.
    pub(crate) read_through: Option<SeqNo>,
}

impl WalRetention {
    /// How many of `segments`, from the oldest on, are not kept. Each has the time until which it was needed. A pure
    /// function.
    pub(crate) fn surplus(&self, segments: &[(WalSegmentInfo, u64)]) -> usize {
        let mut bytes: u64 = 0;
        let is_kept = |(info, needed_until_ns): &&(WalSegmentInfo, u64)| {
            bytes = bytes.saturating_add(info.end_offset);
            let is_young = self.needed_after_ns.is_some_and(|after| *needed_until_ns >= after);
            let is_unread = self.read_through.is_some_and(|through| info.last_seqno > through);
            bytes <= self.max_bytes && (is_young || is_unread)
        };
        segments.len() - segments.iter().rev().take_while(is_kept).count()
    }
}

/// Summary of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WalSegmentInfo {
    pub(crate) epoch: WalEpoch,
    pub(crate) file: FileNumber,
    /// The first sequence number of the segment. If the segment is empty, the sequence number that its first commit
    /// will have.
    pub(crate) first_seqno: SeqNo,
    /// The last sequence number; `first_seqno` - 1 if the segment is empty.
    pub(crate) last_seqno: SeqNo,
    /// Length of the used part of the file in bytes, including the header.
    pub(crate) end_offset: u64,
}

impl WalSegmentInfo {
    /// Whether some of the segment may not be durable if the WAL is durable through `durable`. That of an empty segment
    /// may be the header.
    pub(crate) fn may_be_unsynced(&self, durable: SeqNo) -> bool {
        self.last_seqno > durable || self.last_seqno < self.first_seqno
    }
}

/// Counters since the WAL was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WalStats {
    /// Bytes of frames.
    pub(crate) bytes: u64,
    pub(crate) commits: u64,
    /// Syncs that callers requested or a worker ran. Counts group syncs, not synced files.
    pub(crate) syncs: u64,
}

/// What opening does if the write-ahead log (WAL) is damaged below the last sequence number that is known to be
/// durable.
///
/// A torn tail, which power loss leaves above that sequence number, is not damage: every mode ends the WAL there. No
/// mode refuses damage in a part of the WAL that no partition needs because all have flushed it, provided that the
/// readable part after the damage starts no later than the first needed record.
///
/// After a successful open, every later commit that is synced is present in every later open, in every mode.
///
/// ```
/// # fn main() -> azekura::Result<()> {
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("db");
/// use azekura::{Config, ErrorKind, RecoveryMode};
/// # let db = Config::new(&path).durability(azekura::PersistMode::SyncData).wal_segment_size(64 << 10).open()?;
/// # let log = db.open_partition("log", Default::default())?;
/// # for line in 0..10u8 {
/// #     log.insert([line], [b'A' + line; 100])?;
/// # }
/// # let crashed = dir.path().join("crashed");
/// # std::fs::create_dir(&crashed).unwrap();
/// # for name in ["MANIFEST", "000001.wal"] {
/// #     std::fs::copy(path.join(name), crashed.join(name)).unwrap();
/// # }
/// # let path = crashed;
/// # let mut wal = std::fs::read(path.join("000001.wal")).unwrap();
/// # let at = wal.windows(4).position(|window| window == b"FFFF").unwrap();
/// # wal[at] ^= 1;
/// # std::fs::write(path.join("000001.wal"), wal).unwrap();
/// // The database crashed after ten synced commits, and the device has damaged the sixth one.
/// assert_eq!(Config::new(&path).open().unwrap_err().kind(), ErrorKind::Corruption);
/// let db = Config::new(&path).recovery_mode(RecoveryMode::PointInTime).open()?;
/// assert_eq!(db.partition("log")?.len()?, 5); // the commits before the damage
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum RecoveryMode {
    /// Opening fails with `Corruption` that names the file and the offset. Nothing is changed.
    #[default]
    Strict,
    /// The WAL ends at the first damage, even if later commits were durable. The result is an older, consistent state:
    /// one point in time of all partitions. Opening fails with `Corruption` that names a partition if that partition
    /// already contains later commits outside of the WAL, because then this point in time cannot be restored.
    PointInTime,
    /// Damage is skipped, and every complete commit that still verifies is applied, in order. Later commits may be
    /// present without earlier ones, and a partition that was flushed later than others keeps its flushed records. So
    /// the result may mix several points in time. A commit is applied completely or not at all: a commit that names a
    /// partition which the manifest has lost is left out.
    Salvage,
}

/// A sequence number, and the partition that proves it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PartitionSeqno {
    pub(crate) seqno: SeqNo,
    /// Description of the partition for error messages; empty if another source proves the sequence number.
    pub(crate) partition: String,
}

/// Inputs of a replay.
#[derive(Clone, Debug, Default)]
pub(crate) struct WalReplayOptions {
    pub(crate) mode: RecoveryMode,
    /// The segments that the manifest lists.
    pub(crate) listed_segments: Vec<(WalEpoch, FileNumber)>,
    /// The end of the WAL that the last open or clean close recorded: no valid record in a segment up to this epoch has
    /// a higher sequence number.
    pub(crate) wal_end: Option<(WalEpoch, SeqNo)>,
    /// No partition needs a WAL record up to here, because all of them are in permanent files.
    pub(crate) flushed_through: SeqNo,
    /// The WAL was durable up to here, because a permanent file contains data that is written only after this sync.
    pub(crate) durable_through: PartitionSeqno,
    /// Mapped pools may contain commits of the WAL up to here, whether or not these commits are durable in the WAL.
    pub(crate) held_in_pools: PartitionSeqno,
    /// Segment files with this number or a higher one were not created by this database. 0 if there is no limit.
    pub(crate) file_number_limit: u64,
    /// Whether listed segments that no partition needs are kept for readers of changes.
    pub(crate) retains_segments: bool,
}

/// Result of a replay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WalReplayReport {
    /// The last valid sequence number. Never below `flushed_through` and `durable_through` of the options.
    pub(crate) last_seqno: SeqNo,
    /// Epoch of the last segment of the WAL. The next segment names it as its predecessor.
    pub(crate) last_epoch: WalEpoch,
    /// The highest epoch in the manifest or in the header of any segment file, including obsolete files. The next
    /// segment must have a higher one.
    pub(crate) highest_epoch: WalEpoch,
    /// The segments that a later replay needs, oldest first, including linked segments that the manifest does not list.
    pub(crate) segments: Vec<WalSegmentInfo>,
    /// The listed segments before `segments` that are kept for readers of changes, oldest first. Each one is linked to
    /// the next.
    pub(crate) retained: Vec<WalSegmentInfo>,
    /// Other valid segment files. They may be overwritten.
    pub(crate) spare_files: Vec<FileNumber>,
    /// Whether some of the spare files follow no segment of the WAL, as those of an interrupted rewrite.
    pub(crate) has_unlinked: bool,
    /// Number of applied commits.
    pub(crate) commits: u64,
    pub(crate) dropped_after_damage: Option<DroppedAfterDamage>,
    /// Replay skipped damage, or commits between applied commits are missing. A later replay would stop there, so the
    /// WAL must be [rewritten](crate::wal::rewrite_wal()).
    pub(crate) has_gaps: bool,
    /// No partition needs a record up to here.
    pub(crate) flushed_through: SeqNo,
    /// The manifest, a permanent file or a frame states that the WAL is durable up to here.
    pub(crate) durable_through: SeqNo,
}

impl WalReplayReport {
    /// The segments that the manifest must list, oldest first.
    pub(crate) fn listed_segments(&self) -> impl Iterator<Item = &WalSegmentInfo> {
        self.retained.iter().chain(&self.segments)
    }

    /// The end of the WAL that the manifest must record, so that a later replay ends where this one did: a segment up
    /// to this epoch that is not listed is not part of the WAL.
    pub(crate) fn wal_end(&self) -> (WalEpoch, SeqNo) {
        (self.highest_epoch.max(self.last_epoch), self.last_seqno)
    }
}

/// Callbacks of the WAL into the database. Appending, syncing and background threads call them. The WAL holds its
/// writer lock during [`WalCallbacks::add_segment_to_manifest`], [`WalCallbacks::allocate_segment`] and
/// [`WalCallbacks::request_populate`], so a callback must not call back into the WAL.
pub(crate) trait WalCallbacks: Send + Sync {
    /// Returns an epoch and a file number that were never returned before. The epoch is at least 1 and increases with
    /// every call.
    fn allocate_segment(&self) -> Result<(WalEpoch, FileNumber)>;

    /// Appends an edit to the manifest that lists a new segment; does not sync the manifest. On an error the manifest
    /// is unchanged.
    fn add_segment_to_manifest(&self, epoch: WalEpoch, file: FileNumber) -> Result<()>;

    /// Replaces the manifest, durably, by one that records that the WAL up to `epoch` ends at `seqno`, unless it does.
    /// Readers notice this as they notice another open: commits behind the end that they have returned have failed.
    fn end_wal_in_manifest(&self, epoch: WalEpoch, seqno: SeqNo) -> Result<()>;

    /// Syncs the unsynced files that the commits so far depend on: the manifest, and the blob files that these commits
    /// point into.
    fn sync_dependencies(&self) -> Result<()>;

    /// Asks a worker to call [`Wal::populate_ahead`](crate::wal::Wal::populate_ahead). If none does, appending threads
    /// populate the mapping themselves.
    fn request_populate(&self) {}
}

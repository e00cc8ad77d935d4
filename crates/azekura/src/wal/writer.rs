//! The log itself: what its callers share, and how it is started.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::base::sync::lock;
use crate::base::version_edit::{FileNumber, WalEpoch};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::record_log::poison::LogPoison;
use crate::record_log::writer::RecordLogWriter;
use crate::vfs::{Env, File, Fs, OpenMode};
use crate::wal::callbacks::WalCallbacks;
use crate::wal::format::{SEGMENT_HEADER_LEN, WalSegmentHeader, segment_path};
use crate::wal::options::{WalOptions, WalReplayReport, WalSegmentInfo, WalStats};
use crate::wal::segment::{ActiveWalSegment, WAL_PAGE_SIZE, create_spare_segment, random_file_id};
use crate::wal::sync_state::SyncState;

/// More epochs than this cannot have been used without the manifest knowing.
pub(crate) const SKIPPED_EPOCHS_MAX: u32 = 1 << 16;

/// A write-ahead log that is open for appending. Thread safe.
///
/// Locks, in the order in which they may be taken together: `sync`, then `log`. Neither is held during a sync.
pub(crate) struct Wal {
    pub(super) fs: Arc<dyn Fs>,
    pub(super) dir: PathBuf,
    pub(super) env: Arc<dyn Env>,
    pub(super) host: Arc<dyn WalCallbacks>,
    database_id: [u8; 16],
    pub(super) segment_size: u64,
    use_mmap: bool,
    pub(super) marks: bool,
    pub(super) writer_state: Mutex<WalWriterState>,
    pub(super) sync: Mutex<SyncState>,
    /// Told when a sync ended.
    pub(super) sync_done: Condvar,
    pub(super) appended: AtomicU64,
    pub(super) durable: AtomicU64,
    pub(super) syncs: AtomicU64,
    pub(super) poison: LogPoison,
}

/// What appending changes.
pub(super) struct WalWriterState {
    /// `None` only until the first segment is begun.
    pub(super) active: Option<ActiveWalSegment>,
    /// The sequence number of the next commit.
    pub(super) next_seqno: SeqNo,
    /// The highest watermark that a frame of the active segment carries.
    pub(super) watermark_written: SeqNo,
    pub(super) frame_writer: RecordLogWriter,
    /// Oldest first.
    pub(super) sealed: Vec<SealedWalSegment>,
    /// Sealed ones that hold nothing needed, until the manifest says so.
    pub(super) retired: Vec<WalSegmentInfo>,
    pub(super) spare_files: Vec<FileNumber>,
    /// A segment that the manifest lists already, but whose header could not be written yet.
    listed_without_header: Option<(WalEpoch, FileNumber)>,
    /// The epoch that the next segment follows.
    previous_epoch: WalEpoch,
    /// No segment's header has a higher epoch.
    highest_epoch: WalEpoch,
    /// Segments begun since the start.
    pub(super) segments_started: u64,
    /// Nothing is written any more: the files may be another process's.
    pub(super) writes_stopped: bool,
    pub(super) bytes: u64,
    pub(super) commits: u64,
}

/// A segment that is no longer written to.
pub(super) struct SealedWalSegment {
    pub(super) info: WalSegmentInfo,
    /// Open while it is not synced.
    pub(super) unsynced_file: Option<Arc<dyn File>>,
}

impl WalWriterState {
    /// The segment being written.
    pub(super) fn active(&mut self) -> &mut ActiveWalSegment {
        self.active.as_mut().expect("the log begins a segment when it is started")
    }

    /// The last sequence number appended.
    pub(super) fn last_seqno(&self) -> SeqNo {
        SeqNo(self.next_seqno.0 - 1)
    }
}

impl Wal {
    /// A log that goes on behind what was replayed, all of which must be synced, with `next`, which is above
    /// `replayed.last`. [`Wal::start_first_segment`] must follow before anything is appended.
    ///
    /// # Errors
    /// `Io`; the log is not started.
    #[expect(clippy::too_many_arguments, reason = "called in one place, and each is another kind of thing")]
    pub(crate) fn start(
        fs: Arc<dyn Fs>,
        dir: &Path,
        env: Arc<dyn Env>,
        database_id: [u8; 16],
        options: WalOptions,
        host: Arc<dyn WalCallbacks>,
        replayed: &WalReplayReport,
        next: SeqNo,
    ) -> Result<Wal> {
        if !replayed.spare_files.is_empty() {
            // What only the memory of the system holds, header or name, must not be listed: a killed process left both
            // so.
            for spare in &replayed.spare_files {
                fs.open(&segment_path(dir, *spare), OpenMode::Write)?.sync_data()?;
            }
            fs.sync_dir(dir)?;
        }
        let maps = options.mapped && fs.overwrites_in_place(dir);
        let sealed =
            replayed.segments.iter().map(|info| SealedWalSegment { info: *info, unsynced_file: None }).collect();
        let log = WalWriterState {
            active: None,
            next_seqno: SeqNo(next.0.max(1)),
            watermark_written: SeqNo::ZERO,
            frame_writer: RecordLogWriter::new(),
            sealed,
            retired: Vec::new(),
            spare_files: replayed.spare_files.clone(),
            listed_without_header: None,
            previous_epoch: replayed.last_epoch,
            highest_epoch: replayed.highest_epoch.max(replayed.last_epoch),
            segments_started: 0,
            writes_stopped: false,
            bytes: 0,
            commits: 0,
        };
        let last = log.last_seqno();
        let wal = Wal {
            fs,
            dir: dir.to_path_buf(),
            env,
            host,
            database_id,
            segment_size: options.segment_size.max(WAL_PAGE_SIZE).next_multiple_of(WAL_PAGE_SIZE),
            use_mmap: maps,
            marks: options.marks,
            writer_state: Mutex::new(log),
            sync: Mutex::new(SyncState::new(last)),
            sync_done: Condvar::new(),
            appended: AtomicU64::new(last.0),
            durable: AtomicU64::new(last.0),
            syncs: AtomicU64::new(0),
            poison: LogPoison::default(),
        };
        Ok(wal)
    }

    /// Begins the first segment.
    ///
    /// # Errors
    /// `OutOfSpace` and `Io`: it can be tried again.
    pub(crate) fn start_first_segment(&self) -> Result<()> {
        self.start_segment(&mut self.lock_writer(), 0)
    }

    pub(super) fn lock_writer(&self) -> MutexGuard<'_, WalWriterState> {
        lock(&self.writer_state)
    }

    /// Begins a segment with room for `need` bytes and seals the one before it.
    ///
    /// # Errors
    /// `OutOfSpace` and `Io`: everything is as before. `Poisoned` if the header may be half written, because then a
    /// segment is listed of which nobody knows what it holds.
    pub(super) fn start_segment(&self, log: &mut WalWriterState, need: u64) -> Result<()> {
        let mut segment = match log.listed_without_header {
            Some(numbers) => self.open_spare_segment(numbers, need)?,
            None => self.add_segment(log, need)?,
        };
        let epoch = segment.epoch;
        let header = WalSegmentHeader {
            file_id: random_file_id(&*self.env),
            database_id: self.database_id,
            epoch,
            previous_epoch: log.previous_epoch,
            first_seqno: log.next_seqno,
        };
        let usual = need + SEGMENT_HEADER_LEN as u64 <= self.segment_size;
        if let Err(error) = segment.write_header(&header, self.use_mmap && usual) {
            // As long as the old header is there, the segment counts as absent, and can be begun later.
            let is_as_before = error.kind() == ErrorKind::OutOfSpace && segment.has_stale_header();
            return Err(if is_as_before { error } else { self.poison.set(error) });
        }
        log.listed_without_header = None;
        self.seal_active(log);
        (log.previous_epoch, log.highest_epoch, log.watermark_written) = (epoch, epoch, SeqNo::ZERO);
        log.segments_started += 1;
        log.active = Some(segment);
        Ok(())
    }

    fn open_spare_segment(&self, numbers: (WalEpoch, FileNumber), need: u64) -> Result<ActiveWalSegment> {
        ActiveWalSegment::open(&*self.fs, &self.dir, numbers, self.segment_size, need)
    }

    /// Chooses a spare file, made now if there is none, and has the manifest note that a segment begins in it.
    fn add_segment(&self, log: &mut WalWriterState, need: u64) -> Result<ActiveWalSegment> {
        let (epoch, fresh) = self.allocate_segment_above(log.highest_epoch)?;
        let file = match log.spare_files.pop() {
            Some(spare) => spare,
            None => self.create_spare_file(fresh).map(|()| fresh)?,
        };
        let segment = self.open_spare_segment((epoch, file), need);
        let listed = segment.and_then(|segment| self.host.add_segment_to_manifest(epoch, file).map(|()| segment));
        match &listed {
            Ok(_) => log.listed_without_header = Some((epoch, file)),
            Err(e) if e.kind() == ErrorKind::OutOfSpace || e.is_too_many_open_files() => log.spare_files.push(file),
            // Not offered again; the next open of the database finds it.
            Err(_) => {}
        }
        listed
    }

    /// Fresh numbers, with an epoch above `highest`: power loss may have taken the manifest's note of one that a file's
    /// header still has.
    fn allocate_segment_above(&self, highest: WalEpoch) -> Result<(WalEpoch, FileNumber)> {
        for _ in 0..SKIPPED_EPOCHS_MAX {
            let numbers = self.host.allocate_segment()?;
            if numbers.0 > highest {
                return Ok(numbers);
            }
        }
        Err(Error::corruption(format!("a log segment has epoch {}, far beyond what the manifest knows", highest.0)))
    }

    fn seal_active(&self, log: &mut WalWriterState) {
        let last = log.last_seqno();
        let Some(old) = log.active.take() else { return };
        let info = old.segment_info(last);
        // Whatever follows the last synced commit can only be a watermark, which is never synced for its own sake.
        let synced = info.first_seqno <= last && self.durable() >= last;
        log.sealed.push(SealedWalSegment { info, unsynced_file: (!synced).then_some(old.handle) });
    }

    pub(super) fn create_spare_file(&self, file: FileNumber) -> Result<()> {
        create_spare_segment(&*self.fs, &self.dir, file, self.database_id, &*self.env)
    }

    /// The last sequence number appended.
    #[inline]
    pub(crate) fn appended(&self) -> SeqNo {
        SeqNo(self.appended.load(Ordering::Acquire))
    }

    /// Everything up to here survives power loss.
    #[inline]
    pub(crate) fn durable(&self) -> SeqNo {
        SeqNo(self.durable.load(Ordering::Acquire))
    }

    /// Bytes in live segments that a replay would have to read.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.segments().iter().map(|segment| segment.end_offset).sum()
    }

    /// The live segments, oldest first, the one being written last.
    pub(crate) fn segments(&self) -> Vec<WalSegmentInfo> {
        let log = self.lock_writer();
        let active = log.active.as_ref().map(|active| active.segment_info(log.last_seqno()));
        log.sealed.iter().map(|sealed| sealed.info).chain(active).collect()
    }

    pub(crate) fn stats(&self) -> WalStats {
        let log = self.lock_writer();
        WalStats { bytes: log.bytes, commits: log.commits, syncs: self.syncs.load(Ordering::Relaxed) }
    }
}

impl std::fmt::Debug for Wal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (appended, durable) = (self.appended(), self.durable());
        f.debug_struct("Wal").field("appended", &appended).field("durable", &durable).finish_non_exhaustive()
    }
}

//! The log itself: what its callers share, and how it is started.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::base::edit::{Epoch, FileId};
use crate::base::sync::lock;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::record::poison::Poison;
use crate::record::writer::FrameWriter;
use crate::vfs::{Env, File, Fs, OpenMode};
use crate::wal::company::SyncState;
use crate::wal::format::{HEADER_LEN, SegmentHeader, segment_path};
use crate::wal::host::WalHost;
use crate::wal::options::{ReplayReport, SegmentInfo, WalOptions, WalStats};
use crate::wal::segment::{ActiveSegment, PAGE, create_spare, fresh_id};

/// More epochs than this cannot have been used without the manifest knowing.
pub(crate) const EPOCHS_SKIPPED_MAX: u32 = 1 << 16;

/// A write-ahead log that is open for appending. Thread safe.
///
/// Locks, in the order in which they may be taken together: `sync`, then `log`. Neither is held during a sync.
pub(crate) struct Wal {
    pub(super) fs: Arc<dyn Fs>,
    pub(super) dir: PathBuf,
    pub(super) env: Arc<dyn Env>,
    pub(super) host: Arc<dyn WalHost>,
    database_id: [u8; 16],
    pub(super) segment_size: u64,
    maps: bool,
    pub(super) marks: bool,
    pub(super) log: Mutex<Log>,
    pub(super) sync: Mutex<SyncState>,
    /// Told when a sync ended.
    pub(super) synced: Condvar,
    pub(super) appended: AtomicU64,
    pub(super) durable: AtomicU64,
    pub(super) syncs: AtomicU64,
    pub(super) poison: Poison,
}

/// What appending changes.
pub(super) struct Log {
    /// `None` only until the first segment is begun.
    pub(super) active: Option<ActiveSegment>,
    /// The sequence number of the next commit.
    pub(super) next: SeqNo,
    /// The highest watermark that a frame of the active segment carries.
    pub(super) marked: SeqNo,
    pub(super) writer: FrameWriter,
    /// Oldest first.
    pub(super) sealed: Vec<SealedSegment>,
    /// Sealed ones that hold nothing needed, until the manifest says so.
    pub(super) retired: Vec<SegmentInfo>,
    pub(super) spares: Vec<FileId>,
    /// A segment that the manifest lists already, but whose header could not be written yet.
    listed: Option<(Epoch, FileId)>,
    /// The epoch that the next segment follows.
    previous: Epoch,
    /// No segment's header has a higher epoch.
    highest: Epoch,
    /// Segments begun since the start.
    pub(super) begun: u64,
    /// Nothing is written any more: the files may be another process's.
    pub(super) ended: bool,
    pub(super) bytes: u64,
    pub(super) commits: u64,
}

/// A segment that is no longer written to.
pub(super) struct SealedSegment {
    pub(super) info: SegmentInfo,
    /// Open while it is not synced.
    pub(super) unsynced: Option<Arc<dyn File>>,
}

impl Log {
    /// The segment being written.
    pub(super) fn active(&mut self) -> &mut ActiveSegment {
        self.active.as_mut().expect("the log begins a segment when it is started")
    }

    /// The last sequence number appended.
    pub(super) fn last(&self) -> SeqNo {
        SeqNo(self.next.0 - 1)
    }
}

impl Wal {
    /// A log that goes on behind what was replayed, all of which must be synced, with `next`, which is above
    /// `replayed.last`. [`Wal::begin_first`] must follow before anything is appended.
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
        host: Arc<dyn WalHost>,
        replayed: &ReplayReport,
        next: SeqNo,
    ) -> Result<Wal> {
        if !replayed.spares.is_empty() {
            // What only the memory of the system holds, header or name, must not be listed: a killed process left both
            // so.
            for spare in &replayed.spares {
                fs.open(&segment_path(dir, *spare), OpenMode::Write)?.sync_data()?;
            }
            fs.sync_dir(dir)?;
        }
        let maps = options.mapped && fs.overwrites_in_place(dir);
        let sealed = replayed.segments.iter().map(|info| SealedSegment { info: *info, unsynced: None }).collect();
        let log = Log {
            active: None,
            next: SeqNo(next.0.max(1)),
            marked: SeqNo::ZERO,
            writer: FrameWriter::new(),
            sealed,
            retired: Vec::new(),
            spares: replayed.spares.clone(),
            listed: None,
            previous: replayed.last_epoch,
            highest: replayed.highest_epoch.max(replayed.last_epoch),
            begun: 0,
            ended: false,
            bytes: 0,
            commits: 0,
        };
        let last = log.last();
        let wal = Wal {
            fs,
            dir: dir.to_path_buf(),
            env,
            host,
            database_id,
            segment_size: options.segment_size.max(PAGE).next_multiple_of(PAGE),
            maps,
            marks: options.marks,
            log: Mutex::new(log),
            sync: Mutex::new(SyncState::new(last)),
            synced: Condvar::new(),
            appended: AtomicU64::new(last.0),
            durable: AtomicU64::new(last.0),
            syncs: AtomicU64::new(0),
            poison: Poison::default(),
        };
        Ok(wal)
    }

    /// Begins the first segment.
    ///
    /// # Errors
    /// `OutOfSpace` and `Io`: it can be tried again.
    pub(crate) fn begin_first(&self) -> Result<()> {
        self.begin(&mut self.log(), 0)
    }

    pub(super) fn log(&self) -> MutexGuard<'_, Log> {
        lock(&self.log)
    }

    /// Begins a segment with room for `need` bytes and seals the one before it.
    ///
    /// # Errors
    /// `OutOfSpace` and `Io`: everything is as before. `Poisoned` if the header may be half written, because then a
    /// segment is listed of which nobody knows what it holds.
    pub(super) fn begin(&self, log: &mut Log, need: u64) -> Result<()> {
        let mut segment = match log.listed {
            Some(numbers) => self.open_segment(numbers, need)?,
            None => self.list_segment(log, need)?,
        };
        let epoch = segment.epoch;
        let header = SegmentHeader {
            file_id: fresh_id(&*self.env),
            database_id: self.database_id,
            epoch,
            previous: log.previous,
            first: log.next,
        };
        let usual = need + HEADER_LEN as u64 <= self.segment_size;
        if let Err(error) = segment.write_header(&header, self.maps && usual) {
            // As long as the old header is there, the segment counts as absent, and can be begun later.
            let is_as_before = error.kind() == ErrorKind::OutOfSpace && segment.is_spare();
            return Err(if is_as_before { error } else { self.poison.set(error) });
        }
        log.listed = None;
        self.seal_active(log);
        (log.previous, log.highest, log.marked) = (epoch, epoch, SeqNo::ZERO);
        log.begun += 1;
        log.active = Some(segment);
        Ok(())
    }

    fn open_segment(&self, numbers: (Epoch, FileId), need: u64) -> Result<ActiveSegment> {
        ActiveSegment::open(&*self.fs, &self.dir, numbers, self.segment_size, need)
    }

    /// Chooses a spare file, made now if there is none, and has the manifest note that a segment begins in it.
    fn list_segment(&self, log: &mut Log, need: u64) -> Result<ActiveSegment> {
        let (epoch, fresh) = self.new_numbers(log.highest)?;
        let file = match log.spares.pop() {
            Some(spare) => spare,
            None => self.create_spare(fresh).map(|()| fresh)?,
        };
        let segment = self.open_segment((epoch, file), need);
        let listed = segment.and_then(|segment| self.host.segment_added(epoch, file).map(|()| segment));
        match &listed {
            Ok(_) => log.listed = Some((epoch, file)),
            Err(e) if e.kind() == ErrorKind::OutOfSpace || e.is_too_many_open_files() => log.spares.push(file),
            // Not offered again; the next open of the database finds it.
            Err(_) => {}
        }
        listed
    }

    /// Fresh numbers, with an epoch above `highest`: power loss may have taken the manifest's note of one that a file's
    /// header still has.
    fn new_numbers(&self, highest: Epoch) -> Result<(Epoch, FileId)> {
        for _ in 0..EPOCHS_SKIPPED_MAX {
            let numbers = self.host.new_segment()?;
            if numbers.0 > highest {
                return Ok(numbers);
            }
        }
        Err(Error::corruption(format!("a log segment has epoch {}, far beyond what the manifest knows", highest.0)))
    }

    fn seal_active(&self, log: &mut Log) {
        let last = log.last();
        let Some(old) = log.active.take() else { return };
        let info = old.info(last);
        // Whatever follows the last synced commit can only be a watermark, which is never synced for its own sake.
        let synced = info.first <= last && self.durable() >= last;
        log.sealed.push(SealedSegment { info, unsynced: (!synced).then_some(old.handle) });
    }

    pub(super) fn create_spare(&self, file: FileId) -> Result<()> {
        create_spare(&*self.fs, &self.dir, file, self.database_id, &*self.env)
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
        self.segments().iter().map(|segment| segment.end).sum()
    }

    /// The live segments, oldest first, the one being written last.
    pub(crate) fn segments(&self) -> Vec<SegmentInfo> {
        let log = self.log();
        let active = log.active.as_ref().map(|active| active.info(log.last()));
        log.sealed.iter().map(|sealed| sealed.info).chain(active).collect()
    }

    pub(crate) fn stats(&self) -> WalStats {
        let log = self.log();
        WalStats { bytes: log.bytes, commits: log.commits, syncs: self.syncs.load(Ordering::Relaxed) }
    }
}

impl std::fmt::Debug for Wal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (appended, durable) = (self.appended(), self.durable());
        f.debug_struct("Wal").field("appended", &appended).field("durable", &durable).finish_non_exhaustive()
    }
}

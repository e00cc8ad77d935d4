//! The segment that is being written: its allocated space, its mapping, its header.

use std::path::Path;
use std::sync::Arc;

use crate::base::version_edit::{FileNumber, WalEpoch};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::record_log::frame::{self, LogFileIdentity};
use crate::record_log::reader::{LogReadResult, LogSource, RecordLogReader, SeqnoOrder};
use crate::vfs::{Env, File, Fs, Mapping, OpenMode};
use crate::wal::format::{SEGMENT_HEADER_LEN, SEQNO_GAP_PAYLOAD, WalSegmentHeader, segment_path};
use crate::wal::options::WalSegmentInfo;

/// The first step by which a segment file is allocated, in bytes. Each later step is twice as large as the one before.
const ALLOCATION_STEP_MIN: u64 = 64 << 10;
/// Maximum step, in bytes.
const ALLOCATION_STEP_MAX: u64 = 4 << 20;
/// Step by which a mapping is made resident, in bytes.
const POPULATE_STEP: u64 = 256 << 10;
/// A worker makes at most this many bytes behind the last frame resident. They are dirty pages of the page cache.
const POPULATE_AHEAD_MAX: u64 = 4 << 20;
/// A group of at least this many bytes is written with [`File::write_at`] where the mapping is not resident, because
/// one call of the system costs less than making its pages resident.
const UNMAPPED_GROUP_LEN_MIN: u64 = 32 << 10;
/// Sizes of segments are multiples of this, in bytes.
pub(crate) const WAL_PAGE_SIZE: u64 = 4096;

/// Creates a file that can become a segment: allocates the first step, writes a header with epoch 0, and makes the
/// content and the name durable.
pub(crate) fn create_spare_segment(
    fs: &dyn Fs,
    dir: &Path,
    file: FileNumber,
    database_id: [u8; 16],
    env: &dyn Env,
) -> Result<()> {
    let path = segment_path(dir, file);
    let handle = fs.open(&path, OpenMode::Create)?;
    let fill = || {
        handle.allocate(ALLOCATION_STEP_MIN)?;
        let header = WalSegmentHeader {
            file_id: random_file_id(env),
            database_id,
            epoch: WalEpoch(0),
            previous_epoch: WalEpoch(0),
            first_seqno: SeqNo::ZERO,
        };
        handle.write_at(&header.encode(), 0)?;
        handle.sync_data()?;
        fs.sync_dir(dir)
    };
    // On a full disk, an incomplete file would use the space that the next attempt needs. If its removal fails too, the
    // next open finds it and uses it as a spare file.
    fill().inspect_err(|_| drop(fs.remove_file(&path)))
}

pub(crate) fn random_file_id(env: &dyn Env) -> [u8; 16] {
    let mut id = [0; 16];
    env.random(&mut id);
    id
}

/// Number of bytes that [`write_again`] reads and writes at a time.
const WRITE_AGAIN_LEN: u64 = 256 << 10;

/// Writes the bytes of a segment up to `end` again, so that the next sync covers them: after a failed sync of an
/// earlier process, the system may count pages as clean that it has not written.
///
/// # Errors
/// `Io` and `OutOfSpace`; the bytes are unchanged.
pub(crate) fn write_again(file: &dyn File, end: u64) -> Result<()> {
    let (mut bytes, mut at) = (Vec::new(), 0);
    while at < end {
        bytes.resize(WRITE_AGAIN_LEN.min(end - at) as usize, 0);
        file.read_exact_at(&mut bytes, at)?;
        file.write_at(&bytes, at)?;
        at += bytes.len() as u64;
    }
    Ok(())
}

/// The segment that frames are appended to. Not thread safe.
#[derive(Debug)]
pub(crate) struct ActiveWalSegment {
    pub(crate) epoch: WalEpoch,
    pub(crate) file: FileNumber,
    pub(crate) handle: Arc<dyn File>,
    pub(crate) identity: LogFileIdentity,
    pub(crate) first_seqno: SeqNo,
    /// File offset of the next frame.
    pub(crate) end_offset: u64,
    /// Whether the header is durable.
    pub(crate) header_synced: bool,
    /// Whether a reader may have returned commits behind the end, whose write has failed.
    pub(crate) failed_commit_was_readable: bool,
    capacity: u64,
    allocated_len: u64,
    allocation_step: u64,
    /// A worker that populates holds the mapping too, so it is not unmapped meanwhile.
    mapping: Option<Arc<dyn Mapping>>,
    populated_len: u64,
    /// Whether workers populate the mapping ahead of the end.
    populates_ahead: bool,
    ahead: PopulateAhead,
    /// [`ActiveWalSegment::attend_to_mapping`] is called for frames that end behind this offset.
    attention_offset: u64,
}

/// State of populating the mapping of a segment ahead of its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PopulateAhead {
    Idle,
    /// A worker was asked to populate.
    Requested,
    /// A worker populates.
    Running,
}

/// A part of a mapping that a worker populates, without the lock of the WAL.
#[derive(Debug)]
pub(crate) struct PopulateStep {
    epoch: WalEpoch,
    mapping: Arc<dyn Mapping>,
    offset: u64,
    len: u64,
}

impl PopulateStep {
    /// # Errors
    /// Those of [`Mapping::populate`]. The file may have become shorter meanwhile.
    pub(crate) fn run(&self) -> Result<()> {
        self.mapping.populate(self.offset, self.len)
    }
}

impl ActiveWalSegment {
    /// Opens a spare file for a segment of at least `size` bytes, and allocates space for `need` bytes of frames. Does
    /// not write: [`ActiveWalSegment::write_header`] begins the incarnation of the segment.
    ///
    /// # Errors
    /// `OutOfSpace` and `Io`. The length of the spare file may have changed; its content is not needed.
    pub(crate) fn open(
        fs: &dyn Fs,
        dir: &Path,
        numbers: (WalEpoch, FileNumber),
        size: u64,
        need: u64,
    ) -> Result<ActiveWalSegment> {
        let (epoch, file) = numbers;
        debug_assert!(epoch > WalEpoch(0), "only a spare file has epoch 0");
        let handle = fs.open(&segment_path(dir, file), OpenMode::Write)?;
        let size = size.max(SEGMENT_HEADER_LEN as u64 + need).next_multiple_of(WAL_PAGE_SIZE);
        let length = handle.length()?.min(size);
        let fits = SEGMENT_HEADER_LEN as u64 + need;
        let mut segment = ActiveWalSegment {
            epoch,
            file,
            handle,
            identity: LogFileIdentity { file_id: [0; 16], epoch: epoch.0 },
            first_seqno: SeqNo::ZERO,
            end_offset: SEGMENT_HEADER_LEN as u64,
            header_synced: false,
            failed_commit_was_readable: false,
            capacity: size,
            allocated_len: 0,
            allocation_step: ALLOCATION_STEP_MIN,
            mapping: None,
            populated_len: 0,
            populates_ahead: false,
            ahead: PopulateAhead::Idle,
            attention_offset: u64::MAX,
        };
        // The length alone does not prove that space is allocated.
        if let Err(error) = segment.allocate(length) {
            if error.kind() != ErrorKind::OutOfSpace || length <= fits.max(ALLOCATION_STEP_MIN) {
                return Err(error);
            }
            // The old content after the header is not needed, and a shorter file may fit on the disk.
            segment.handle.set_length(fits.max(ALLOCATION_STEP_MIN).next_multiple_of(WAL_PAGE_SIZE))?;
        }
        segment.reserve_space(need)?;
        Ok(segment)
    }

    /// Whether the file still has the header of an earlier incarnation.
    pub(crate) fn has_stale_header(&self) -> bool {
        let mut bytes = [0; SEGMENT_HEADER_LEN];
        let read = self.handle.read_exact_at(&mut bytes, 0).and_then(|()| WalSegmentHeader::decode(&bytes));
        read.is_ok_and(|header| header.epoch < self.epoch)
    }

    /// Writes the header, which begins this incarnation of the file. Maps the file if `map` is true; then workers
    /// populate the mapping if `populates_ahead` is true.
    pub(crate) fn write_header(&mut self, header: &WalSegmentHeader, map: bool, populates_ahead: bool) -> Result<()> {
        debug_assert_eq!(header.epoch, self.epoch, "the header is that of this segment");
        debug_assert!(header.previous_epoch < header.epoch, "a segment follows an older one");
        debug_assert!(header.first_seqno > SeqNo::ZERO, "a segment has a first sequence number");
        debug_assert_eq!(self.end_offset, SEGMENT_HEADER_LEN as u64, "the header is written before the first frame");
        self.handle.write_at(&header.encode(), 0)?;
        self.identity = header.identity();
        self.first_seqno = header.first_seqno;
        if map {
            // The mapping is an optimization. Without it, frames are written with `write_at`.
            self.mapping = self.handle.map(self.capacity).ok().flatten().map(Arc::from);
            self.populates_ahead = populates_ahead;
            self.update_attention();
        }
        Ok(())
    }

    /// Closes the segment after a failed write of frames if the disk is full. The segment then accepts no more frames,
    /// and no replay reaches the bytes after its end, because the next segment begins with the same sequence number.
    ///
    /// Returns `error` if the segment is closed. This requires that a replay cannot take the failed write for a commit:
    /// there is no complete frame at the end, or the header of that frame was overwritten with zeros.
    ///
    /// # Errors
    /// `error`, if a replay could take the failed write for a commit, or if `error` is not `OutOfSpace`.
    pub(crate) fn close_after_failed_write(&mut self, error: Error) -> Result<Error> {
        if error.kind() != ErrorKind::OutOfSpace {
            return Err(error);
        }
        if !self.has_no_frame_at_end() {
            self.failed_commit_was_readable = self.has_commit_at_end().unwrap_or(true);
            if self.handle.write_at(&[0; frame::HEADER_LEN], self.end_offset).is_err() {
                return Err(error);
            }
        }
        self.capacity = self.end_offset;
        Ok(error)
    }

    fn has_no_frame_at_end(&self) -> bool {
        self.reader_at_end().and_then(|mut reader| reader.next()).is_ok_and(|item| item == LogReadResult::End)
    }

    /// Whether one of the complete records at the end is a commit. A reader that has passed gaps has read nothing that
    /// has failed.
    fn has_commit_at_end(&self) -> Result<bool> {
        let mut reader = self.reader_at_end()?;
        loop {
            match reader.next()? {
                LogReadResult::End => return Ok(false),
                LogReadResult::Record(_) if reader.payload()? != SEQNO_GAP_PAYLOAD => return Ok(true),
                LogReadResult::Record(_) | LogReadResult::Watermark(_) => {}
            }
        }
    }

    fn reader_at_end(&self) -> Result<RecordLogReader<'_>> {
        let source = LogSource::File(&*self.handle);
        RecordLogReader::new(source, self.identity, self.end_offset, SeqNo::ZERO, SeqnoOrder::Rising)
    }

    /// Bytes of frames that the segment can still accept.
    #[inline]
    pub(crate) fn remaining_bytes(&self) -> u64 {
        self.capacity - self.end_offset
    }

    /// Allocates space, so that `len` bytes can be written at the end.
    ///
    /// # Errors
    /// `OutOfSpace` and `Io`; nothing was written.
    #[inline]
    pub(crate) fn reserve_space(&mut self, len: u64) -> Result<()> {
        debug_assert!(len <= self.remaining_bytes(), "the segment has space for the frames");
        let end = self.end_offset + len;
        if end > self.allocated_len {
            self.grow(end)?;
        }
        debug_assert!(end <= self.allocated_len, "space is allocated up to the end of the frames");
        if end > self.attention_offset && len < UNMAPPED_GROUP_LEN_MIN {
            self.attend_to_mapping(end);
        }
        Ok(())
    }

    /// Makes the mapping resident up to `end`, and asks a worker to continue if little is resident behind `end`.
    #[cold]
    fn attend_to_mapping(&mut self, end: u64) {
        self.populate(end);
        let target = self.populate_target(end);
        if self.ahead == PopulateAhead::Idle && self.populates_ahead && self.populated_len < target {
            // If the space cannot be allocated now, the append that needs it tries again and fails.
            self.populates_ahead = self.allocated_len >= target || self.grow(target).is_ok();
            if self.mapping.is_some() && self.populates_ahead {
                self.ahead = PopulateAhead::Requested;
            }
        }
        self.update_attention();
    }

    /// The offset up to which a worker populates if the frames end at `end`: at most as many bytes ahead as the segment
    /// has, so that a database with few commits does not write pages that it does not need.
    fn populate_target(&self, end: u64) -> u64 {
        (end + end.min(POPULATE_AHEAD_MAX)).next_multiple_of(WAL_PAGE_SIZE).min(self.capacity)
    }

    fn update_attention(&mut self) {
        self.attention_offset = match self.mapping {
            None => u64::MAX,
            Some(_) if self.ahead == PopulateAhead::Idle && self.populates_ahead => {
                // Half of the bytes ahead are used: a third of all, or half of the maximum.
                (self.populated_len / 3 * 2).max(self.populated_len.saturating_sub(POPULATE_AHEAD_MAX / 2))
            }
            Some(_) => self.populated_len,
        };
    }

    /// The offset from which the mapping is not resident. Frames before the end are not stored again, and those that
    /// were written without the mapping need not be resident.
    fn first_unpopulated_offset(&self) -> u64 {
        self.populated_len.max(self.end_offset / WAL_PAGE_SIZE * WAL_PAGE_SIZE)
    }

    /// Whether a worker should call [`ActiveWalSegment::begin_populate`].
    #[inline]
    pub(crate) fn requests_populate(&self) -> bool {
        self.ahead == PopulateAhead::Requested
    }

    /// The first step of a worker that was asked to populate; `None` if none was asked or the mapping was dropped.
    pub(crate) fn begin_populate(&mut self) -> Option<PopulateStep> {
        if self.ahead != PopulateAhead::Requested {
            return None;
        }
        self.ahead = PopulateAhead::Running;
        self.next_populate_step()
    }

    /// Records the result of a step, and returns the next one. The segment may be another one than that of the step,
    /// and the mapping may have been dropped.
    pub(crate) fn end_populate_step(&mut self, step: &PopulateStep, result: Result<()>) -> Option<PopulateStep> {
        if step.epoch != self.epoch || self.mapping.is_none() {
            return None;
        }
        debug_assert_eq!(self.ahead, PopulateAhead::Running, "one worker at a time populates a mapping");
        debug_assert!(step.offset <= self.first_unpopulated_offset(), "a step leaves no gap");
        match result {
            Ok(()) => self.populated_len = self.populated_len.max(step.offset + step.len),
            Err(_) => self.mapping = None,
        }
        self.next_populate_step()
    }

    fn next_populate_step(&mut self) -> Option<PopulateStep> {
        let target = self.populate_target(self.end_offset).min(self.allocated_len);
        let offset = self.first_unpopulated_offset();
        let step = self.mapping.as_ref().filter(|_| offset < target).map(|mapping| PopulateStep {
            epoch: self.epoch,
            mapping: Arc::clone(mapping),
            offset,
            len: POPULATE_STEP.min(target - offset),
        });
        if step.is_none() {
            self.ahead = PopulateAhead::Idle;
        }
        self.update_attention();
        step
    }

    /// Takes the mapping of a segment that accepts no more frames, so that it is unmapped without the lock of the WAL.
    pub(crate) fn take_mapping(&mut self) -> Option<Arc<dyn Mapping>> {
        self.attention_offset = u64::MAX;
        self.mapping.take()
    }

    #[cold]
    fn grow(&mut self, end: u64) -> Result<()> {
        let mut target = self.allocated_len;
        while target < end {
            target = (target + self.allocation_step).min(self.capacity.max(end));
            self.allocation_step = (self.allocation_step * 2).min(ALLOCATION_STEP_MAX);
        }
        match self.allocate(target) {
            // There may be enough space for the bytes that are needed now.
            Err(error) if error.kind() == ErrorKind::OutOfSpace => self.allocate(end.next_multiple_of(WAL_PAGE_SIZE)),
            done => done,
        }
    }

    fn allocate(&mut self, len: u64) -> Result<()> {
        if len > self.allocated_len {
            self.handle.allocate(len)?;
            self.allocated_len = len;
        }
        Ok(())
    }

    /// Makes the mapping resident up to `end` or beyond. If that fails, this segment continues without a mapping.
    fn populate(&mut self, end: u64) {
        debug_assert!(self.allocated_len <= self.capacity, "the mapping covers the allocated space");
        while let Some(mapping) = self.mapping.as_ref().filter(|_| self.populated_len < end) {
            let offset = self.first_unpopulated_offset();
            let len = POPULATE_STEP.min(self.allocated_len - offset);
            debug_assert!(len > 0, "allocated space is made resident");
            match mapping.populate(offset, len) {
                Ok(()) => self.populated_len = offset + len,
                Err(_) => self.mapping = None,
            }
        }
    }

    /// Releases the allocated space after the last frame. Later appends allocate space again.
    ///
    /// # Errors
    /// `Io`; the frames are unchanged.
    pub(crate) fn release_unused_space(&mut self) -> Result<()> {
        // The mapping is dropped first, because a store after the end of the file would raise a signal.
        (self.mapping, self.populated_len, self.ahead) = (None, 0, PopulateAhead::Idle);
        self.update_attention();
        let len = self.end_offset.next_multiple_of(WAL_PAGE_SIZE);
        if len < self.allocated_len {
            self.handle.set_length(len)?;
            self.allocated_len = len;
        }
        Ok(())
    }

    /// Writes bytes for which space was reserved.
    #[inline]
    pub(crate) fn write(&self, bytes: &[u8], offset: u64) -> Result<()> {
        let end = offset + bytes.len() as u64;
        debug_assert!(offset >= self.end_offset, "frames are appended behind the last one");
        debug_assert!(end <= self.allocated_len, "space was reserved for the frames");
        match &self.mapping {
            Some(mapping) if end <= self.populated_len => {
                mapping.write_at(bytes, offset);
                Ok(())
            }
            _ => self.handle.write_at(bytes, offset),
        }
    }

    pub(crate) fn segment_info(&self, last: SeqNo) -> WalSegmentInfo {
        debug_assert!(self.end_offset <= self.allocated_len, "frames are in allocated space");
        WalSegmentInfo {
            epoch: self.epoch,
            file: self.file,
            first_seqno: self.first_seqno,
            last_seqno: last,
            end_offset: self.end_offset,
        }
    }
}

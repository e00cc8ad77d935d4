//! The segment that is being written: its space, its mapping, its header.

use std::path::Path;
use std::sync::Arc;

use crate::base::edit::{Epoch, FileId};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::record::frame::{self, Place};
use crate::record::scan::{Item, Order, RecordReader};
use crate::record::window::Source;
use crate::vfs::{Env, File, Fs, Mapping, OpenMode};
use crate::wal::format::{HEADER_LEN, SegmentHeader, segment_path};
use crate::wal::options::SegmentInfo;

/// Files grow by steps that double from here…
const STEP_MIN: u64 = 64 << 10;
/// …to here, in bytes.
const STEP_MAX: u64 = 4 << 20;
/// A mapping is made resident in steps of this, in bytes.
const POPULATE_STEP: u64 = 256 << 10;
/// Sizes of segments are multiples of this, in bytes.
pub(crate) const PAGE: u64 = 4096;

/// Makes a file that can become a segment: space for the first step, a header that belongs to no epoch, contents and
/// name durable.
pub(crate) fn create_spare(fs: &dyn Fs, dir: &Path, file: FileId, database_id: [u8; 16], env: &dyn Env) -> Result<()> {
    let path = segment_path(dir, file);
    let handle = fs.open(&path, OpenMode::Create)?;
    let fill = || {
        handle.allocate(STEP_MIN)?;
        let header = SegmentHeader {
            file_id: fresh_id(env),
            database_id,
            epoch: Epoch(0),
            previous: Epoch(0),
            first: SeqNo::ZERO,
        };
        handle.write_at(&header.encode(), 0)?;
        handle.sync_data()?;
        fs.sync_dir(dir)
    };
    // On a full disk a half-made file would take the space that the next attempt needs. If removing it fails too, the
    // next open finds it and counts it as a spare.
    fill().inspect_err(|_| drop(fs.remove_file(&path)))
}

pub(crate) fn fresh_id(env: &dyn Env) -> [u8; 16] {
    let mut id = [0; 16];
    env.random(&mut id);
    id
}

/// A segment that frames are written to. Not thread safe.
#[derive(Debug)]
pub(crate) struct ActiveSegment {
    pub(crate) epoch: Epoch,
    pub(crate) file: FileId,
    pub(crate) handle: Arc<dyn File>,
    pub(crate) place: Place,
    pub(crate) first: SeqNo,
    /// Where the next frame goes.
    pub(crate) end: u64,
    /// Whether the header survives power loss.
    pub(crate) header_synced: bool,
    size: u64,
    allocated: u64,
    step: u64,
    mapping: Option<Box<dyn Mapping>>,
    populated: u64,
}

impl ActiveSegment {
    /// Opens a spare to become a segment of at least `size` bytes that has room for `need` bytes of frames now. Nothing
    /// is written yet: [`ActiveSegment::write_header`] begins its life.
    ///
    /// # Errors
    /// `OutOfSpace` and `Io`, with nothing changed that matters.
    pub(crate) fn open(
        fs: &dyn Fs,
        dir: &Path,
        numbers: (Epoch, FileId),
        size: u64,
        need: u64,
    ) -> Result<ActiveSegment> {
        let (epoch, file) = numbers;
        let handle = fs.open(&segment_path(dir, file), OpenMode::Write)?;
        let size = size.max(HEADER_LEN as u64 + need).next_multiple_of(PAGE);
        let length = handle.length()?.min(size);
        let fits = HEADER_LEN as u64 + need;
        let mut segment = ActiveSegment {
            epoch,
            file,
            handle,
            place: Place { file_id: [0; 16], epoch: epoch.0 },
            first: SeqNo::ZERO,
            end: HEADER_LEN as u64,
            header_synced: false,
            size,
            allocated: 0,
            step: STEP_MIN,
            mapping: None,
            populated: 0,
        };
        // A length alone does not prove that there is space behind it.
        if let Err(error) = segment.allocate(length) {
            if error.kind() != ErrorKind::OutOfSpace || length <= fits.max(STEP_MIN) {
                return Err(error);
            }
            // Behind the header nothing of it is needed, and less may do.
            segment.handle.set_length(fits.max(STEP_MIN).next_multiple_of(PAGE))?;
        }
        segment.reserve(need)?;
        Ok(segment)
    }

    /// Whether the file still has the header of an older life.
    pub(crate) fn is_spare(&self) -> bool {
        let mut bytes = [0; HEADER_LEN];
        let read = self.handle.read_exact_at(&mut bytes, 0).and_then(|()| SegmentHeader::decode(&bytes));
        read.is_ok_and(|header| header.epoch < self.epoch)
    }

    /// Writes the header, which begins this life of the file; the file is mapped if `map`.
    pub(crate) fn write_header(&mut self, header: &SegmentHeader, map: bool) -> Result<()> {
        self.handle.write_at(&header.encode(), 0)?;
        self.place = header.place();
        self.first = header.first;
        if map {
            // A mapping is only quicker: without one, frames are written the other way.
            self.mapping = self.handle.map(self.size).ok().flatten();
        }
        Ok(())
    }

    /// What to do after frames could not be written: the disk was full if `error` says so, and then the segment takes
    /// no more, unless a frame of the failed write is whole in it; what else of it lies behind the end no replay will
    /// reach, since the next segment begins with the same sequence number. Fails where a replay could take the failed
    /// write for a commit.
    pub(crate) fn give_up(&mut self, error: Error) -> Result<Error> {
        let killed = || self.handle.write_at(&[0; frame::HEADER_LEN], self.end).is_ok();
        if error.kind() == ErrorKind::OutOfSpace && (self.holds_nothing_at_end() || killed()) {
            self.size = self.end;
            return Ok(error);
        }
        Err(error)
    }

    fn holds_nothing_at_end(&self) -> bool {
        let before = SeqNo::ZERO;
        RecordReader::new(Source::File(&*self.handle), self.place, self.end, before, Order::Rising)
            .and_then(|mut reader| reader.next())
            .is_ok_and(|item| item == Item::Stop)
    }

    /// Bytes of frames that it can still take.
    #[inline]
    pub(crate) fn room(&self) -> u64 {
        self.size - self.end
    }

    /// Makes sure that `len` bytes can be written at the end without needing space.
    ///
    /// # Errors
    /// `OutOfSpace` and `Io`; nothing was written.
    #[inline]
    pub(crate) fn reserve(&mut self, len: u64) -> Result<()> {
        let end = self.end + len;
        if end > self.allocated {
            self.grow(end)?;
        }
        if self.mapping.is_some() && end > self.populated {
            self.populate(end);
        }
        Ok(())
    }

    #[cold]
    fn grow(&mut self, end: u64) -> Result<()> {
        let mut target = self.allocated;
        while target < end {
            target = (target + self.step).min(self.size.max(end));
            self.step = (self.step * 2).min(STEP_MAX);
        }
        match self.allocate(target) {
            // There may be space for what is needed now.
            Err(error) if error.kind() == ErrorKind::OutOfSpace => self.allocate(end.next_multiple_of(PAGE)),
            done => done,
        }
    }

    fn allocate(&mut self, len: u64) -> Result<()> {
        if len > self.allocated {
            self.handle.allocate(len)?;
            self.allocated = len;
        }
        Ok(())
    }

    /// Makes the mapping resident ahead of `end`; where that fails, this segment goes on without a mapping.
    #[cold]
    fn populate(&mut self, end: u64) {
        while let Some(mapping) = self.mapping.as_ref().filter(|_| self.populated < end) {
            let len = POPULATE_STEP.min(self.allocated - self.populated);
            match mapping.populate(self.populated, len) {
                Ok(()) => self.populated += len,
                Err(_) => self.mapping = None,
            }
        }
    }

    /// Gives back the space behind what was written; it is allocated again when more is written.
    ///
    /// # Errors
    /// `Io`, with nothing changed that matters.
    pub(crate) fn trim(&mut self) -> Result<()> {
        // A mapping must not be stored into behind the end of its file.
        (self.mapping, self.populated) = (None, 0);
        let len = self.end.next_multiple_of(PAGE);
        if len < self.allocated {
            self.handle.set_length(len)?;
            self.allocated = len;
        }
        Ok(())
    }

    /// Writes bytes that were reserved.
    #[inline]
    pub(crate) fn write(&self, bytes: &[u8], offset: u64) -> Result<()> {
        match &self.mapping {
            Some(mapping) => {
                mapping.write_at(bytes, offset);
                Ok(())
            }
            None => self.handle.write_at(bytes, offset),
        }
    }

    pub(crate) fn info(&self, last: SeqNo) -> SegmentInfo {
        SegmentInfo { epoch: self.epoch, file: self.file, first: self.first, last, end: self.end }
    }
}

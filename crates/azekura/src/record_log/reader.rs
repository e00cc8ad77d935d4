//! Reads records in order with bounded memory, and searches for valid frames after damage.

use crate::base::coding::ByteReader;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::record_log::frame::{
    self, ALIGN, HEADER_LEN, LogFileIdentity, LogFrameHeader, LogFrameKind, padded_frame_len,
};
use crate::vfs::File;

/// Which sequence number may follow the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SeqnoOrder {
    /// The next number only.
    Consecutive,
    /// Any higher number.
    Rising,
}

/// Result of [`RecordLogReader::next`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LogReadResult {
    /// A whole record. [`RecordLogReader::payload`] returns its bytes.
    Record(LogRecordHeader),
    /// A watermark: the log is durable through this sequence number.
    Watermark(SeqNo),
    /// No further record: the end of the log, or damage at [`RecordLogReader::position`].
    End,
}

/// A record without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogRecordHeader {
    pub(crate) first_seqno: SeqNo,
    pub(crate) count: u32,
    /// The sequence number through which the log was durable when the record was written.
    pub(crate) durable_seqno: SeqNo,
}

impl LogRecordHeader {
    /// The last sequence number of the record.
    pub(crate) fn last(&self) -> SeqNo {
        SeqNo(self.first_seqno.0 + u64::from(self.count) - 1)
    }
}

/// Valid frames after a position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DamageScan {
    /// Number of valid frames.
    pub(crate) frames: u64,
    /// The highest durable sequence number in any of them.
    pub(crate) durable_seqno: SeqNo,
    /// Whether there may be more: a search was given up.
    pub(crate) is_partial: bool,
}

impl DamageScan {
    pub(crate) fn merge(self, other: DamageScan) -> DamageScan {
        DamageScan {
            frames: self.frames + other.frames,
            durable_seqno: self.durable_seqno.max(other.durable_seqno),
            is_partial: self.is_partial || other.is_partial,
        }
    }
}

/// Position of the payload of the current record.
#[derive(Clone, Copy, Debug)]
enum PayloadLocation {
    InFile { offset: u64, len: usize },
    Assembled { skip: usize },
}

/// Reads the records of one file. Uses memory for one window, one frame, and the record that is assembled from
/// fragments, which is never longer than the part of the file that was read.
#[derive(Debug)]
pub(crate) struct RecordLogReader<'a> {
    window: LogReadWindow<'a>,
    identity: LogFileIdentity,
    order: SeqnoOrder,
    /// Offset at which the next frame is expected.
    at: u64,
    /// End of the last whole record or watermark.
    end: u64,
    last: SeqNo,
    assembled: Vec<u8>,
    payload: PayloadLocation,
    /// Bytes that the search may still hash. Limits the time for a file that was made to look like frames everywhere.
    scan_budget: u64,
}

/// Maximum number of bytes that the search hashes, in addition to a multiple of the file's length.
const SEARCH_BASE: u64 = 256 << 20;
const SEARCH_FACTOR: u64 = 16;

impl<'a> RecordLogReader<'a> {
    /// Reads from the offset `at`. `last` is the sequence number before the first record.
    pub(crate) fn new(
        source: LogSource<'a>,
        place: LogFileIdentity,
        at: u64,
        last: SeqNo,
        order: SeqnoOrder,
    ) -> Result<RecordLogReader<'a>> {
        debug_assert!(at.is_multiple_of(ALIGN), "frames are aligned");
        let window = LogReadWindow::new(source)?;
        let budget = window.source_len().saturating_mul(SEARCH_FACTOR).saturating_add(SEARCH_BASE);
        let payload = PayloadLocation::Assembled { skip: 0 };
        Ok(RecordLogReader {
            window,
            identity: place,
            order,
            at,
            end: at,
            last,
            assembled: Vec::new(),
            payload,
            scan_budget: budget,
        })
    }

    /// Reads little at first, because the log may end soon.
    pub(crate) fn expect_end(mut self) -> RecordLogReader<'a> {
        self.window.read_len = FIRST_READ_LEN;
        self
    }

    /// Offset at which the next frame is expected; after [`LogReadResult::End`], the offset at which reading stopped.
    pub(crate) fn position(&self) -> u64 {
        self.at
    }

    /// End of the last whole record or watermark in bytes, with its padding if the file contains it.
    pub(crate) fn end(&self) -> u64 {
        self.end.min(self.window.source_len())
    }

    /// The last sequence number that was read.
    pub(crate) fn last(&self) -> SeqNo {
        self.last
    }

    /// Reads the next record or watermark.
    ///
    /// # Errors
    /// `Unsupported` for frames of a newer version, and errors of reading the file.
    pub(crate) fn next(&mut self) -> Result<LogReadResult> {
        let Some(head) = self.frame_at(self.at)? else { return Ok(LogReadResult::End) };
        let behind = self.at + padded_frame_len(head.len);
        match head.kind {
            LogFrameKind::Middle | LogFrameKind::Last => Ok(LogReadResult::End),
            LogFrameKind::Watermark => {
                let fits = head.seqno == self.last || self.order == SeqnoOrder::Rising;
                let Some(durable) = self.watermark(&head)?.filter(|_| fits) else { return Ok(LogReadResult::End) };
                (self.at, self.end) = (behind, behind);
                Ok(LogReadResult::Watermark(durable))
            }
            LogFrameKind::Full => {
                let Some((record, prefix)) = self.record_head(&head)? else { return Ok(LogReadResult::End) };
                let offset = self.at + (HEADER_LEN + prefix) as u64;
                self.payload = PayloadLocation::InFile { offset, len: head.len - prefix };
                Ok(self.complete(record, behind))
            }
            LogFrameKind::First => self.assemble(&head),
        }
    }

    fn complete(&mut self, record: LogRecordHeader, end: u64) -> LogReadResult {
        debug_assert!(record.first_seqno > self.last, "sequence numbers rise");
        debug_assert!(end > self.at && end.is_multiple_of(ALIGN), "a record ends where the next frame may begin");
        (self.at, self.end, self.last) = (end, end, record.last());
        LogReadResult::Record(record)
    }

    /// Assembles the record whose first fragment is at the position.
    fn assemble(&mut self, first: &LogFrameHeader) -> Result<LogReadResult> {
        let Some((record, prefix)) = self.record_head(first)? else { return Ok(LogReadResult::End) };
        self.assembled = Vec::new();
        self.append_fragment(first)?;
        self.at += padded_frame_len(first.len);
        while let Some(head) = self.frame_at(self.at)? {
            if head.seqno != record.first_seqno || !matches!(head.kind, LogFrameKind::Middle | LogFrameKind::Last) {
                break;
            }
            self.append_fragment(&head)?;
            let end = self.at + padded_frame_len(head.len);
            if head.kind == LogFrameKind::Last {
                self.payload = PayloadLocation::Assembled { skip: prefix };
                return Ok(self.complete(record, end));
            }
            self.at = end;
        }
        Ok(LogReadResult::End)
    }

    /// Appends the payload of the frame at the position to the assembled record.
    fn append_fragment(&mut self, head: &LogFrameHeader) -> Result<()> {
        let at = self.at;
        self.assembled
            .try_reserve(head.len)
            .map_err(|_| Error::new(ErrorKind::Io, "no memory for a record as large as this").at_offset(at))?;
        let bytes = expect_bytes(self.window.bytes(at + HEADER_LEN as u64, head.len)?)?;
        self.assembled.extend_from_slice(bytes);
        Ok(())
    }

    /// The payload of the record that [`RecordLogReader::next`] returned last.
    pub(crate) fn payload(&mut self) -> Result<&[u8]> {
        match self.payload {
            PayloadLocation::InFile { offset, len } => expect_bytes(self.window.bytes(offset, len)?),
            PayloadLocation::Assembled { skip } => Ok(&self.assembled[skip..]),
        }
    }

    /// The valid frame at `at`, if there is one.
    fn frame_at(&mut self, at: u64) -> Result<Option<LogFrameHeader>> {
        let Some(head) = self.window.bytes(at, HEADER_LEN)? else { return Ok(None) };
        let len = LogFrameHeader::unverified_len(head).unwrap_or(0);
        let place = self.identity;
        let Some(bytes) = self.window.bytes(at, HEADER_LEN + len)? else { return Ok(None) };
        Ok(frame::decode(&place, at, bytes)?.map(|(head, _)| head))
    }

    /// Decodes the record header in the first frame at the position. Returns the header and its length; `None` if
    /// this cannot be the next record.
    fn record_head(&mut self, head: &LogFrameHeader) -> Result<Option<(LogRecordHeader, usize)>> {
        let bytes = expect_bytes(self.window.bytes(self.at + HEADER_LEN as u64, head.len)?)?;
        let follows = match self.order {
            SeqnoOrder::Consecutive => head.seqno.0 == self.last.0 + 1,
            SeqnoOrder::Rising => head.seqno > self.last,
        };
        Ok(record_head(head, bytes).filter(|_| follows))
    }

    fn watermark(&mut self, head: &LogFrameHeader) -> Result<Option<SeqNo>> {
        let bytes = expect_bytes(self.window.bytes(self.at + HEADER_LEN as u64, head.len)?)?;
        Ok(watermark(head, bytes))
    }

    /// Finds the next valid frame at `from` or after it.
    ///
    /// # Errors
    /// `Corruption` if too many places look like frames.
    fn find_frame(&mut self, from: u64) -> Result<Option<(u64, LogFrameHeader)>> {
        debug_assert!(from.is_multiple_of(ALIGN), "frames are aligned");
        let mut at = from;
        while let Some(bytes) = self.window.at_least(at, HEADER_LEN)? {
            let epoch = self.identity.epoch;
            let places = (bytes.len() - HEADER_LEN) / ALIGN as usize + 1;
            let candidate =
                (0..places).map(|i| i * ALIGN as usize).find(|i| LogFrameHeader::may_be_header(&bytes[*i..], epoch));
            let Some(skip) = candidate else {
                at += (places * ALIGN as usize) as u64;
                continue;
            };
            let claimed = LogFrameHeader::unverified_len(&bytes[skip..]).unwrap_or(0) as u64;
            at += skip as u64;
            if at + HEADER_LEN as u64 + claimed <= self.window.source_len() {
                self.scan_budget = self.scan_budget.checked_sub(claimed + HEADER_LEN as u64).ok_or_else(|| {
                    Error::corruption("too many places after the damage look like frames: the search was given up")
                        .at_offset(at)
                })?;
                if let Some(head) = self.frame_at(at)? {
                    return Ok(Some((at, head)));
                }
            }
            at += ALIGN;
        }
        Ok(None)
    }

    /// Counts the valid frames after the position, and returns the highest durable sequence number that they state.
    /// No record can be read afterwards.
    ///
    /// # Errors
    /// `Corruption` if too many places look like frames.
    pub(crate) fn scan_after_damage(&mut self) -> Result<DamageScan> {
        let mut behind = DamageScan::default();
        let mut from = self.at;
        while let Some((at, head)) = self.find_frame(from)? {
            let bytes = expect_bytes(self.window.bytes(at + HEADER_LEN as u64, head.len)?)?;
            let durable = match head.kind {
                LogFrameKind::Full | LogFrameKind::First => {
                    record_head(&head, bytes).map(|(record, _)| record.durable_seqno)
                }
                LogFrameKind::Watermark => watermark(&head, bytes),
                LogFrameKind::Middle | LogFrameKind::Last => None,
            };
            behind.frames += 1;
            behind.durable_seqno = behind.durable_seqno.max(durable.unwrap_or_default());
            from = at + padded_frame_len(head.len);
        }
        Ok(behind)
    }

    /// Continues after damage, at the next valid frame that states the sequence number before it, if no number above
    /// `through` is missing. Otherwise returns false and changes nothing.
    ///
    /// # Errors
    /// `Corruption` if too many places look like frames.
    pub(crate) fn resume_after_damage(&mut self, through: SeqNo) -> Result<bool> {
        let mut from = self.at;
        while let Some((at, head)) = self.find_frame(from)? {
            match preceding_seqno(&head) {
                Some(last) if last < self.last || last > through => return Ok(false),
                // The frame at which reading has stopped, with a payload that is no record.
                Some(last) if (at, last) == (self.at, self.last) => from = at + padded_frame_len(head.len),
                Some(last) => {
                    debug_assert!(at >= self.at && last >= self.last, "damage is skipped forward");
                    (self.at, self.last) = (at, last);
                    return Ok(true);
                }
                None => from = at + padded_frame_len(head.len),
            }
        }
        Ok(false)
    }

    /// Moves past the frame or the damage at which reading stopped, to the next valid frame. Returns false if there
    /// is none.
    ///
    /// # Errors
    /// `Corruption` if too many places look like frames.
    pub(crate) fn skip_damage(&mut self, stopped_at_frame: u64) -> Result<bool> {
        let found = self.find_frame(self.at.max(stopped_at_frame + ALIGN))?;
        if let Some((at, _)) = found {
            debug_assert!(at > stopped_at_frame, "the frame at which reading stopped is not read again");
            self.at = at;
        }
        Ok(found.is_some())
    }
}

/// The last sequence number before a valid frame, if the frame states it.
fn preceding_seqno(head: &LogFrameHeader) -> Option<SeqNo> {
    match head.kind {
        LogFrameKind::Full | LogFrameKind::First => head.seqno.0.checked_sub(1).map(SeqNo),
        LogFrameKind::Watermark => Some(head.seqno),
        LogFrameKind::Middle | LogFrameKind::Last => None,
    }
}

fn record_head(head: &LogFrameHeader, payload: &[u8]) -> Option<(LogRecordHeader, usize)> {
    let mut d = ByteReader::new(payload);
    let (delta, count) = (d.varint().ok()?, d.varint_u32().ok()?);
    let durable = SeqNo(head.seqno.0.checked_sub(1)?.checked_sub(delta)?);
    let fits = count > 0 && head.seqno.0 + u64::from(count) - 1 <= SeqNo::MAX.0;
    fits.then_some((
        LogRecordHeader { first_seqno: head.seqno, count, durable_seqno: durable },
        payload.len() - d.rest().len(),
    ))
}

fn watermark(head: &LogFrameHeader, payload: &[u8]) -> Option<SeqNo> {
    let delta = ByteReader::new(payload).varint().ok()?;
    head.seqno.0.checked_sub(delta).map(SeqNo)
}

/// Bytes within a verified frame can only be missing if the file became shorter during the read.
fn expect_bytes(bytes: Option<&[u8]>) -> Result<&[u8]> {
    bytes.ok_or_else(|| Error::corruption("file became shorter while it was read"))
}

/// Bytes that are read at once.
const WINDOW_LEN: u64 = 1 << 20;
/// Bytes of the first read of a log that may end soon.
const FIRST_READ_LEN: u64 = 16 << 10;

/// Source of the bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LogSource<'a> {
    File(&'a dyn File),
    Bytes(&'a [u8]),
}

/// A buffered part of a file: one MiB, or a single larger read.
#[derive(Debug)]
pub(crate) struct LogReadWindow<'a> {
    source: LogSource<'a>,
    len: u64,
    buffer: Vec<u8>,
    start: u64,
    /// Bytes of the next read, unless more are needed. Doubles with each read, up to [`WINDOW_LEN`].
    read_len: u64,
}

impl<'a> LogReadWindow<'a> {
    /// A window on the whole source, whose length is read now.
    pub(crate) fn new(source: LogSource<'a>) -> Result<LogReadWindow<'a>> {
        let len = match source {
            LogSource::File(file) => file.length()?,
            LogSource::Bytes(bytes) => bytes.len() as u64,
        };
        Ok(LogReadWindow { source, len, buffer: Vec::new(), start: 0, read_len: WINDOW_LEN })
    }

    /// Length of the source, in bytes.
    pub(crate) fn source_len(&self) -> u64 {
        self.len
    }

    /// The `len` bytes at `offset`; `None` if the source is shorter.
    #[inline]
    pub(crate) fn bytes(&mut self, offset: u64, len: usize) -> Result<Option<&[u8]>> {
        Ok(self.at_least(offset, len)?.map(|bytes| &bytes[..len]))
    }

    /// The `len` bytes at `offset` and the rest of the window after them; `None` if the source is shorter.
    #[inline]
    pub(crate) fn at_least(&mut self, offset: u64, len: usize) -> Result<Option<&[u8]>> {
        if offset > self.len || self.len - offset < len as u64 {
            return Ok(None);
        }
        if let LogSource::Bytes(bytes) = self.source {
            return Ok(Some(&bytes[offset as usize..]));
        }
        let window = self.start..self.start + self.buffer.len() as u64;
        if offset < window.start || offset + len as u64 > window.end {
            self.move_to(offset, len as u64)?;
        }
        debug_assert!(offset >= self.start, "the window begins at or before the bytes");
        debug_assert!(self.buffer.len() as u64 - (offset - self.start) >= len as u64, "the window has all bytes");
        Ok(Some(&self.buffer[(offset - self.start) as usize..]))
    }

    #[cold]
    fn move_to(&mut self, offset: u64, len: u64) -> Result<()> {
        let LogSource::File(file) = self.source else { return Ok(()) };
        let want = len.max(self.read_len).min(self.len - offset) as usize;
        self.read_len = (self.read_len * 2).min(WINDOW_LEN);
        self.buffer.clear();
        if self.buffer.capacity() as u64 > 2 * WINDOW_LEN && (want as u64) <= WINDOW_LEN {
            self.buffer = Vec::new();
        }
        let no_memory =
            |_| Error::new(ErrorKind::Io, format!("no memory for a frame of {want} bytes")).at_offset(offset);
        self.buffer.try_reserve_exact(want).map_err(no_memory)?;
        self.buffer.resize(want, 0);
        self.start = offset;
        let read = file.read_exact_at(&mut self.buffer, offset);
        if read.is_err() {
            self.buffer.clear();
        }
        read
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use super::*;
    use crate::record_log::writer::{LogRecord, RecordLogWriter};
    use crate::testing::MemFs;
    use crate::testing::seeded_rng::SeededRng;
    use crate::vfs::{File, Fs, OpenMode};

    const PLACE: LogFileIdentity = LogFileIdentity { file_id: [4; 16], epoch: 2 };

    type Owned = (u64, u32, Vec<u8>);

    fn written(frame_max: usize, records: &[Owned]) -> Vec<u8> {
        let mut writer = RecordLogWriter::with_frame_max(frame_max);
        writer.reset(0);
        let mut out = Vec::new();
        let mut sink = |bytes: &[u8], _: u64| {
            out.extend_from_slice(bytes);
            Ok(())
        };
        for (i, (first, count, payload)) in records.iter().enumerate() {
            let durable = SeqNo(first / 2);
            writer
                .add_record(
                    &PLACE,
                    &LogRecord { first_seqno: SeqNo(*first), count: *count, durable_seqno: durable, payload },
                    &mut sink,
                )
                .unwrap();
            if i % 3 == 2 {
                let last = SeqNo(first + u64::from(*count) - 1);
                writer.add_watermark(&PLACE, last, durable, &mut sink).unwrap();
            }
        }
        writer.flush(&mut sink).unwrap();
        out
    }

    fn random_records(rng: &mut SeededRng, n: usize, longest: usize) -> Vec<Owned> {
        let mut first = 1;
        let mut record = |_| {
            let count = 1 + rng.below(3) as u32;
            let payload = (0..rng.below(longest)).map(|_| rng.next_u64() as u8).collect();
            first += u64::from(count);
            (first - u64::from(count), count, payload)
        };
        (0..n).map(&mut record).collect()
    }

    fn reader(source: LogSource<'_>, order: SeqnoOrder) -> RecordLogReader<'_> {
        RecordLogReader::new(source, PLACE, 0, SeqNo::ZERO, order).unwrap()
    }

    /// A frame that verifies, with a payload that is no watermark, was found at the same place again and again, so that
    /// an open did not end.
    #[test]
    fn frame_without_a_record_is_passed() {
        let mut bytes = written(1 << 10, &[(1, 1, b"a".to_vec())]);
        bytes.resize(bytes.len().next_multiple_of(ALIGN as usize), 0);
        let head = LogFrameHeader { kind: LogFrameKind::Watermark, len: 0, epoch: PLACE.epoch, seqno: SeqNo(1) };
        let mut frame = head.encode();
        let sum = frame::checksum(&PLACE, bytes.len() as u64, &frame[8..]);
        frame[..8].copy_from_slice(&sum.to_le_bytes());
        bytes.extend_from_slice(&frame);
        let mut reader = reader(LogSource::Bytes(&bytes), SeqnoOrder::Consecutive);
        assert_eq!(read_all(&mut reader).len(), 1);
        assert!(!reader.resume_after_damage(SeqNo(1)).unwrap());
    }

    fn read_all(reader: &mut RecordLogReader<'_>) -> Vec<Owned> {
        let mut out = Vec::new();
        loop {
            match reader.next().unwrap() {
                LogReadResult::Record(record) => {
                    out.push((record.first_seqno.0, record.count, reader.payload().unwrap().to_vec()))
                }
                LogReadResult::Watermark(durable) => assert!(durable <= reader.last()),
                LogReadResult::End => return out,
            }
        }
    }

    #[test]
    fn records_round_trip_from_memory_and_file() {
        let mut rng = SeededRng::with_stream(1, 2);
        for frame_max in [16, 17, 100, 4096] {
            let records = random_records(&mut rng, 60, 500);
            let bytes = written(frame_max, &records);
            let mut from_memory = reader(LogSource::Bytes(&bytes), SeqnoOrder::Consecutive);
            assert_eq!(read_all(&mut from_memory), records);
            assert_eq!(from_memory.end(), bytes.len() as u64);
            let fs = MemFs::new();
            let file: Arc<dyn File> = fs.open(Path::new("/f"), OpenMode::Create).unwrap();
            file.write_at(&bytes, 0).unwrap();
            assert_eq!(read_all(&mut reader(LogSource::File(&*file), SeqnoOrder::Consecutive)), records);
        }
    }

    #[test]
    fn large_frames_and_fragments_round_trip() {
        let big = vec![5; (2 << 20) + 3];
        let huge = vec![6; crate::record_log::frame::PAYLOAD_MAX + 100];
        let records = vec![(1, 1, b"a".to_vec()), (2, 1, big), (3, 2, huge), (5, 1, b"z".to_vec())];
        let bytes = written(usize::MAX, &records);
        let fs = MemFs::new();
        let file: Arc<dyn File> = fs.open(Path::new("/f"), OpenMode::Create).unwrap();
        file.write_at(&bytes, 0).unwrap();
        assert!(read_all(&mut reader(LogSource::File(&*file), SeqnoOrder::Consecutive)) == records);
    }

    #[test]
    fn damage_ends_reading_and_scan_counts_frames() {
        let mut rng = SeededRng::with_stream(5, 5);
        let records = random_records(&mut rng, 30, 80);
        let bytes = written(40, &records);
        for at in (0..bytes.len()).step_by(3) {
            let mut bad = bytes.clone();
            bad[at] ^= 0x20;
            let mut damaged = reader(LogSource::Bytes(&bad), SeqnoOrder::Consecutive);
            let read = read_all(&mut damaged);
            assert!(records.starts_with(&read));
            let behind = damaged.scan_after_damage().unwrap();
            let next = records.get(read.len() + 1).map_or(u64::MAX, |(first, ..)| *first);
            // The record after the damaged one states how far the log was durable when it was written.
            assert!(read.len() + 1 >= records.len() || behind.frames > 0 && behind.durable_seqno.0 >= next / 2, "{at}");
            let mut salvage = reader(LogSource::Bytes(&bad), SeqnoOrder::Rising);
            let mut salvaged = Vec::new();
            loop {
                let from = salvage.position();
                salvaged.extend(read_all(&mut salvage));
                if !salvage.skip_damage(from.max(salvage.position())).unwrap() {
                    break;
                }
            }
            assert!(salvaged.len() + 1 >= records.len() && salvaged.iter().all(|record| records.contains(record)));
        }
    }

    #[test]
    fn random_bytes_contain_no_records() {
        let mut rng = SeededRng::with_stream(8, 8);
        for _ in 0..300 {
            let mut bytes: Vec<u8> = (0..rng.below(4000)).map(|_| rng.next_u64() as u8).collect();
            for head in bytes.chunks_exact_mut(24) {
                head[11] = 0;
                head[12..16].copy_from_slice(&2u32.to_le_bytes());
                head[23] = 1 + rng.below(5) as u8;
            }
            let mut random = reader(LogSource::Bytes(&bytes), SeqnoOrder::Consecutive);
            assert_eq!(
                (random.next().unwrap(), random.scan_after_damage().unwrap()),
                (LogReadResult::End, DamageScan::default())
            );
        }
    }

    #[test]
    fn scan_fails_when_budget_is_exhausted() {
        let mut bytes = vec![0; 24 << 20];
        for head in bytes.chunks_exact_mut(24) {
            head[8..11].copy_from_slice(&[0xff; 3]);
            head[12..16].copy_from_slice(&2u32.to_le_bytes());
            head[23] = 1;
        }
        let error = reader(LogSource::Bytes(&bytes), SeqnoOrder::Consecutive).scan_after_damage().unwrap_err();
        assert_eq!(error.kind(), crate::base::ErrorKind::Corruption);
    }
}

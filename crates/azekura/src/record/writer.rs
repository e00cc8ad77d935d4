//! Turns records into frames and hands them on in large pieces.

use crate::base::checksum::{place_seed, xxh3_two};
use crate::base::coding::varint_len;
use crate::base::{Result, SeqNo};
use crate::record::frame::{ALIGN, FrameHead, FrameKind, HEADER_LEN, PAYLOAD_MAX, Place, checksum, stored_len};

/// What is gathered before it is handed on, in bytes; with one frame more at most.
const BUFFER_LEN: usize = 1 << 20;
/// Payloads from this length on are handed on where they lie instead of being copied, in bytes.
const DIRECT_FROM: usize = 128 << 10;
/// A prefix is two varints, of 56 and of 32 bits.
const PREFIX_LEN_MAX: usize = 13;

/// Takes bytes and the offset in the file where they belong.
pub(crate) type Sink<'a> = dyn FnMut(&[u8], u64) -> Result<()> + 'a;

/// A record to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record<'a> {
    pub(crate) first: SeqNo,
    /// Sequence numbers it takes, from `first` on; at least 1.
    pub(crate) count: u32,
    /// Up to where the log is known to be durable, below `first`.
    pub(crate) durable: SeqNo,
    pub(crate) payload: &'a [u8],
}

impl Record<'_> {
    fn delta(&self) -> u64 {
        (self.first.0 - 1).saturating_sub(self.durable.0)
    }

    #[inline]
    fn prefix_len(&self) -> usize {
        varint_len(self.delta()) + varint_len(u64::from(self.count))
    }

    #[inline]
    fn prefix(&self) -> ([u8; PREFIX_LEN_MAX], usize) {
        let mut out = [0; PREFIX_LEN_MAX];
        let mut len = put_varint_at(&mut out, 0, self.delta());
        len = put_varint_at(&mut out, len, u64::from(self.count));
        (out, len)
    }
}

#[inline]
fn put_varint_at(out: &mut [u8; PREFIX_LEN_MAX], mut at: usize, mut value: u64) -> usize {
    while value >= 0x80 {
        out[at] = value as u8 | 0x80;
        value >>= 7;
        at += 1;
    }
    out[at] = value as u8;
    at + 1
}

/// Writes frames through a sink that takes bytes and their offset in the file. Not thread safe.
///
/// After a sink failed, [`FrameWriter::begin`] starts over.
#[derive(Debug)]
pub(crate) struct FrameWriter {
    buffer: Vec<u8>,
    /// Where the first byte of `buffer` belongs in the file.
    start: u64,
    /// The longest payload of a frame, in bytes.
    frame_max: usize,
}

impl FrameWriter {
    pub(crate) fn new() -> FrameWriter {
        FrameWriter { buffer: Vec::new(), start: 0, frame_max: PAYLOAD_MAX }
    }

    /// Cuts records into frames with payloads of at most `frame_max` bytes (at least 16).
    #[cfg(test)]
    pub(crate) fn with_frame_max(frame_max: usize) -> FrameWriter {
        FrameWriter { frame_max: frame_max.clamp(16, PAYLOAD_MAX), ..FrameWriter::new() }
    }

    /// Bytes that `record` takes in the file.
    #[inline]
    pub(crate) fn stored_len(&self, record: &Record<'_>) -> u64 {
        let len = record.prefix_len() + record.payload.len();
        if len <= self.frame_max {
            return stored_len(len);
        }
        let whole = len / self.frame_max;
        let rest = len % self.frame_max;
        let whole_len = whole as u64 * stored_len(self.frame_max);
        if rest > 0 { whole_len + stored_len(rest) } else { whole_len }
    }

    /// Forgets what was gathered; the next frame goes to `at`.
    #[inline]
    pub(crate) fn begin(&mut self, at: u64) {
        debug_assert!(at.is_multiple_of(ALIGN));
        self.buffer.clear();
        self.start = at;
    }

    /// Where the next frame will stand.
    #[inline]
    pub(crate) fn position(&self) -> u64 {
        self.start + self.buffer.len() as u64
    }

    /// Adds a record.
    ///
    /// # Errors
    /// What the sink fails with.
    #[inline]
    pub(crate) fn put(&mut self, place: &Place, record: &Record<'_>, sink: &mut Sink<'_>) -> Result<()> {
        let (prefix, prefix_len) = record.prefix();
        let prefix = &prefix[..prefix_len];
        if prefix_len + record.payload.len() <= self.frame_max {
            return self.put_frame(place, FrameKind::Full, record.first, (prefix, record.payload), sink);
        }
        self.put_fragments(place, record, prefix, sink)
    }

    #[cold]
    fn put_fragments(&mut self, place: &Place, record: &Record<'_>, prefix: &[u8], sink: &mut Sink<'_>) -> Result<()> {
        let (head, mut rest) = record.payload.split_at(self.frame_max - prefix.len());
        self.put_frame(place, FrameKind::First, record.first, (prefix, head), sink)?;
        loop {
            let (piece, more) = rest.split_at(rest.len().min(self.frame_max));
            let kind = if more.is_empty() { FrameKind::Last } else { FrameKind::Middle };
            self.put_frame(place, kind, record.first, (&[], piece), sink)?;
            rest = more;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    /// Adds a frame that says that everything up to `durable` is durable, `last` being the newest record.
    ///
    /// # Errors
    /// What the sink fails with.
    pub(crate) fn put_watermark(
        &mut self,
        place: &Place,
        last: SeqNo,
        durable: SeqNo,
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        let mut out = [0; PREFIX_LEN_MAX];
        let len = put_varint_at(&mut out, 0, last.0.saturating_sub(durable.0));
        self.put_frame(place, FrameKind::Watermark, last, (&out[..len], &[]), sink)
    }

    /// The longest that [`FrameWriter::put_watermark`] takes, in bytes.
    pub(crate) fn watermark_len_max() -> u64 {
        stored_len(PREFIX_LEN_MAX)
    }

    #[inline]
    fn put_frame(
        &mut self,
        place: &Place,
        kind: FrameKind,
        seqno: SeqNo,
        (prefix, payload): (&[u8], &[u8]),
        sink: &mut Sink<'_>,
    ) -> Result<()> {
        let (offset, at) = (self.position(), self.buffer.len());
        let len = prefix.len() + payload.len();
        let head = FrameHead { kind, len, epoch: place.epoch, seqno };
        self.buffer.extend_from_slice(&head.encode());
        self.buffer.extend_from_slice(prefix);
        let padding = stored_len(len) as usize - HEADER_LEN - len;
        if payload.len() < DIRECT_FROM {
            self.buffer.extend_from_slice(payload);
            let sum = checksum(place, offset, &self.buffer[at + 8..]);
            self.buffer[at..at + 8].copy_from_slice(&sum.to_le_bytes());
        } else {
            let sum = xxh3_two(place_seed(&place.file_id, offset), &self.buffer[at + 8..], payload);
            self.buffer[at..at + 8].copy_from_slice(&sum.to_le_bytes());
            self.flush(sink)?;
            sink(payload, self.start)?;
            self.start += payload.len() as u64;
        }
        self.buffer.extend_from_slice(&[0; ALIGN as usize][..padding]);
        if self.buffer.len() >= BUFFER_LEN { self.flush(sink) } else { Ok(()) }
    }

    /// Hands on what was gathered.
    ///
    /// # Errors
    /// What the sink fails with.
    #[inline]
    pub(crate) fn flush(&mut self, sink: &mut Sink<'_>) -> Result<()> {
        if !self.buffer.is_empty() {
            sink(&self.buffer, self.start)?;
            self.start += self.buffer.len() as u64;
            self.buffer.clear();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::{Error, ErrorKind};

    const PLACE: Place = Place { file_id: [3; 16], epoch: 8 };

    fn record(payload: &[u8]) -> Record<'_> {
        Record { first: SeqNo(1000), count: 70_000, durable: SeqNo(300), payload }
    }

    /// Writes at 64 and gives the file.
    fn written(writer: &mut FrameWriter, payloads: &[&[u8]]) -> (Vec<u8>, usize) {
        let (mut file, mut writes) = (vec![0; 64], 0);
        writer.begin(64);
        let mut sink = |bytes: &[u8], offset: u64| {
            assert_eq!(offset, file.len() as u64, "pieces follow each other");
            file.extend_from_slice(bytes);
            writes += 1;
            Ok(())
        };
        for payload in payloads {
            let (before, len) = (writer.position(), writer.stored_len(&record(payload)));
            writer.put(&PLACE, &record(payload), &mut sink).unwrap();
            assert_eq!(writer.position() - before, len);
        }
        writer.flush(&mut sink).unwrap();
        assert_eq!(writer.position(), file.len() as u64);
        (file, writes)
    }

    #[test]
    fn lengths_are_foretold_and_small_records_are_one_write() {
        let payloads: Vec<Vec<u8>> = (0..40).map(|len| vec![9; len]).collect();
        let views: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
        let (file, writes) = written(&mut FrameWriter::new(), &views);
        assert_eq!((writes, file.len() % 8), (1, 0));
        for frame_max in 16..40 {
            written(&mut FrameWriter::with_frame_max(frame_max), &views);
        }
    }

    #[test]
    fn payloads_handed_on_where_they_lie_make_the_same_bytes() {
        let payload: Vec<u8> = (0..DIRECT_FROM + 11).map(|i| i as u8).collect();
        let (direct, writes) = written(&mut FrameWriter::new(), &[b"x", &payload, b"y"]);
        assert_eq!(writes, 3);
        let at = 64 + 32;
        let (head, stored) = crate::record::frame::decode(&PLACE, at, &direct[at as usize..]).unwrap().unwrap();
        assert_eq!(head.kind, FrameKind::Full);
        assert!(stored.ends_with(&payload));
    }

    #[test]
    fn the_buffer_stays_within_its_bound() {
        let mut writer = FrameWriter::new();
        let payload = vec![1; DIRECT_FROM - 1];
        written(&mut writer, &vec![payload.as_slice(); 40]);
        assert!(writer.buffer.capacity() <= 4 * BUFFER_LEN);
    }

    #[test]
    fn a_failed_sink_is_told_and_the_writer_can_begin_again() {
        let mut writer = FrameWriter::new();
        writer.begin(64);
        writer.put(&PLACE, &record(b"lost"), &mut |_, _| Ok(())).unwrap();
        let failed = writer.flush(&mut |_, _| Err(Error::new(ErrorKind::Io, "no")));
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::Io);
        assert_eq!(written(&mut writer, &[b"kept"]).0, written(&mut FrameWriter::new(), &[b"kept"]).0);
    }
}

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
        let whole = len / self.frame_max;
        let rest = len % self.frame_max;
        let whole_len = whole as u64 * stored_len(self.frame_max);
        if rest > 0 || whole == 0 { whole_len + stored_len(rest) } else { whole_len }
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

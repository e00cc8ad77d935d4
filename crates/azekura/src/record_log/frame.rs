#![doc = include_str!("../../docs/format/record.md")]

use crate::base::checksum::{location_seed, xxh3};
use crate::base::coding::ByteReader;
use crate::base::{Error, Result, SeqNo};

/// Bytes of a frame before its payload.
pub(crate) const HEADER_LEN: usize = 24;
/// Frames start at multiples of this many bytes.
pub(crate) const ALIGN: u64 = 8;
/// Maximum length of a frame's payload in bytes.
pub(crate) const PAYLOAD_MAX: usize = (1 << 24) - 1;

const SUM_LEN: usize = 8;

/// Which part of a record a frame contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum LogFrameKind {
    /// A whole record.
    Full = 1,
    /// The first of several frames of a record.
    First = 2,
    /// A frame between the first and the last.
    Middle = 3,
    /// The last of several frames; the record exists if it verifies.
    Last = 4,
    /// No record: only states how far the log is durable.
    Watermark = 5,
}

impl LogFrameKind {
    fn from_byte(byte: u8) -> Option<LogFrameKind> {
        Some(match byte {
            1 => LogFrameKind::Full,
            2 => LogFrameKind::First,
            3 => LogFrameKind::Middle,
            4 => LogFrameKind::Last,
            5 => LogFrameKind::Watermark,
            _ => return None,
        })
    }
}

/// The identity to which checksums are bound, in addition to the offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogFileIdentity {
    /// The random id in the header of the file.
    pub(crate) file_id: [u8; 16],
    /// The epoch of the segment; 0 in the manifest.
    pub(crate) epoch: u32,
}

/// Header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogFrameHeader {
    pub(crate) kind: LogFrameKind,
    /// Length of the payload in bytes.
    pub(crate) len: usize,
    pub(crate) epoch: u32,
    /// First sequence number of the frame's record; the newest sequence number in a watermark.
    pub(crate) seqno: SeqNo,
}

/// Length of a frame with its padding.
#[inline]
pub(crate) fn padded_frame_len(payload: usize) -> u64 {
    (HEADER_LEN as u64 + payload as u64).next_multiple_of(ALIGN)
}

impl LogFrameHeader {
    /// Encodes the header, with zeros in place of the checksum.
    #[inline]
    pub(crate) fn encode(&self) -> [u8; HEADER_LEN] {
        debug_assert!(self.len <= PAYLOAD_MAX, "the length has three bytes");
        debug_assert!(self.seqno <= SeqNo::MAX, "the highest byte of the sequence number is free for the kind");
        let mut out = [0; HEADER_LEN];
        out[8..12].copy_from_slice(&(self.len as u32).to_le_bytes());
        out[12..16].copy_from_slice(&self.epoch.to_le_bytes());
        out[16..24].copy_from_slice(&(self.seqno.0 | (self.kind as u64) << 56).to_le_bytes());
        out
    }

    /// Whether `head` may be the start of a frame of `epoch`. Cheap. May return true for other bytes, but
    /// never false for a frame.
    #[inline]
    pub(crate) fn may_be_header(head: &[u8], epoch: u32) -> bool {
        debug_assert!(head.len() >= HEADER_LEN, "a whole header");
        head[11] == 0 && (1..=5).contains(&head[23]) && head[12..16] == epoch.to_le_bytes()
    }

    /// The payload length in the header at the start of `bytes`, without verification.
    pub(crate) fn unverified_len(bytes: &[u8]) -> Option<usize> {
        let word = bytes.get(8..11)?;
        Some(usize::from(word[0]) | usize::from(word[1]) << 8 | usize::from(word[2]) << 16)
    }
}

/// Checksum of a frame at `offset`, over all bytes after the checksum.
#[inline]
pub(crate) fn checksum(place: &LogFileIdentity, offset: u64, behind_sum: &[u8]) -> u64 {
    xxh3(location_seed(&place.file_id, offset), behind_sum)
}

/// Decodes the frame at the start of `bytes`, which are at `offset` in the file. Returns `None` if no frame verifies
/// there.
///
/// # Errors
/// `Unsupported` if the frame verifies and its kind or its encoding is unknown to this build.
pub(crate) fn decode<'a>(
    place: &LogFileIdentity,
    offset: u64,
    bytes: &'a [u8],
) -> Result<Option<(LogFrameHeader, &'a [u8])>> {
    let Some(len) = LogFrameHeader::unverified_len(bytes) else { return Ok(None) };
    let Some(frame) = bytes.get(..HEADER_LEN + len) else { return Ok(None) };
    let mut d = ByteReader::new(frame);
    let (sum, stored, epoch, word) = (d.u64()?, d.u32()?, d.u32()?, d.u64()?);
    if epoch != place.epoch || sum != checksum(place, offset, &frame[SUM_LEN..]) {
        return Ok(None);
    }
    let (how, kind) = (stored >> 24, (word >> 56) as u8);
    match LogFrameKind::from_byte(kind) {
        Some(kind) if how == 0 => {
            let seqno = SeqNo(word & SeqNo::MAX.0);
            Ok(Some((LogFrameHeader { kind, len, epoch, seqno }, &frame[HEADER_LEN..])))
        }
        _ => Err(Error::unsupported(format!("frame of kind {kind}, stored as {how:#04x}, needs a newer version"))
            .at_offset(offset)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;

    const PLACE: LogFileIdentity = LogFileIdentity { file_id: [7; 16], epoch: 3 };

    fn frame(kind: u8, how: u32, payload: &[u8], offset: u64) -> Vec<u8> {
        let head = LogFrameHeader { kind: LogFrameKind::Full, len: payload.len(), epoch: 3, seqno: SeqNo(99) };
        let mut out = head.encode().to_vec();
        out[23] = kind;
        out[11] = how as u8;
        out.extend_from_slice(payload);
        let sum = checksum(&PLACE, offset, &out[8..]);
        out[..8].copy_from_slice(&sum.to_le_bytes());
        out
    }

    #[test]
    fn round_trips_and_no_flipped_bit_verifies() {
        let good = frame(1, 0, b"hello", 512);
        let (head, payload) = decode(&PLACE, 512, &good).unwrap().unwrap();
        assert_eq!((head.kind, head.seqno, payload), (LogFrameKind::Full, SeqNo(99), &b"hello"[..]));
        assert!(LogFrameHeader::may_be_header(&good, 3) && !LogFrameHeader::may_be_header(&good, 4));
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(&PLACE, 512, &bad).unwrap(), None, "bit {bit}");
        }
        for cut in 0..good.len() {
            assert_eq!(decode(&PLACE, 512, &good[..cut]).unwrap(), None);
        }
    }

    #[test]
    fn frames_do_not_verify_elsewhere() {
        let good = frame(1, 0, b"hello", 512);
        assert_eq!(decode(&PLACE, 520, &good).unwrap(), None);
        assert_eq!(decode(&LogFileIdentity { epoch: 4, ..PLACE }, 512, &good).unwrap(), None);
        assert_eq!(decode(&LogFileIdentity { file_id: [8; 16], ..PLACE }, 512, &good).unwrap(), None);
    }

    #[test]
    fn frame_of_newer_version_is_unsupported() {
        for bytes in [frame(6, 0, b"x", 0), frame(1, 0x10, b"x", 0), frame(0, 0, b"", 0)] {
            assert_eq!(decode(&PLACE, 0, &bytes).unwrap_err().kind(), ErrorKind::Unsupported);
        }
    }
}

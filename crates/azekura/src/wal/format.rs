#![doc = include_str!("../../docs/format/wal.md")]

use std::path::{Path, PathBuf};

use crate::base::checksum::{place_seed, xxh3};
use crate::base::coding::Decoder;
use crate::base::edit::{Epoch, FileId};
use crate::base::file_header::{FileHeader, FileKind};
use crate::base::{Error, Result, SeqNo};
use crate::record::frame::Place;
use crate::record::scan::{Behind, Item, Order, RecordReader};
use crate::record::window::Source;

/// The header takes one sector, which the device writes whole or not at all; frames start behind it. In bytes.
pub(crate) const HEADER_LEN: usize = 512;

const FIELDS_AT: usize = FileHeader::LEN;
const SUM_AT: usize = FIELDS_AT + 32;

/// The start of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentHeader {
    /// Random, new with every life of the file.
    pub(crate) file_id: [u8; 16],
    pub(crate) database_id: [u8; 16],
    /// 0 in a spare file that was never a segment.
    pub(crate) epoch: Epoch,
    /// The segment that this one follows; 0 if there was none.
    pub(crate) previous: Epoch,
    /// The first sequence number it holds, or would.
    pub(crate) first: SeqNo,
}

impl SegmentHeader {
    pub(crate) fn encode(&self) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        let header = FileHeader { kind: FileKind::Wal, file_id: self.file_id };
        out[..FIELDS_AT].copy_from_slice(&header.encode());
        out[64..80].copy_from_slice(&self.database_id);
        out[80..84].copy_from_slice(&self.epoch.0.to_le_bytes());
        out[84..88].copy_from_slice(&self.previous.0.to_le_bytes());
        out[88..96].copy_from_slice(&self.first.0.to_le_bytes());
        let sum = xxh3(place_seed(&self.file_id, FIELDS_AT as u64), &out[FIELDS_AT..SUM_AT]);
        out[SUM_AT..SUM_AT + 8].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Reads the header at the front of `bytes`.
    ///
    /// # Errors
    /// `Corruption` if it does not verify, `Unsupported` if a newer version wrote it.
    pub(crate) fn decode(bytes: &[u8]) -> Result<SegmentHeader> {
        let file_id = FileHeader::decode(FileKind::Wal, bytes)?.file_id;
        let Some(block) = bytes.get(..HEADER_LEN) else {
            return Err(Error::corruption("segment is shorter than its header").at_offset(0));
        };
        let mut d = Decoder::new(&block[FIELDS_AT..]);
        let header = SegmentHeader {
            file_id,
            database_id: d.bytes16()?,
            epoch: Epoch(d.u32()?),
            previous: Epoch(d.u32()?),
            first: SeqNo(d.u64()?),
        };
        let at = FIELDS_AT as u64;
        if d.u64()? != xxh3(place_seed(&file_id, at), &block[FIELDS_AT..SUM_AT]) {
            return Err(Error::corruption("checksum of the segment header does not match").at_offset(at));
        }
        let sensible = header.first <= SeqNo::MAX && (header.epoch.0 == 0 || header.first > SeqNo::ZERO);
        if !sensible || (header.epoch.0 != 0 && header.previous >= header.epoch) {
            return Err(Error::corruption("segment header makes no sense").at_offset(at));
        }
        Ok(header)
    }

    /// What the checksums of the frames are bound to.
    pub(crate) fn place(&self) -> Place {
        Place { file_id: self.file_id, epoch: self.epoch.0 }
    }

    /// A reader of the segment's records.
    pub(crate) fn reader<'a>(&self, source: Source<'a>, order: Order) -> Result<RecordReader<'a>> {
        let before = SeqNo(self.first.0.saturating_sub(1));
        RecordReader::new(source, self.place(), HEADER_LEN as u64, before, order)
    }
}

/// The path of a segment's file.
pub(crate) fn segment_path(dir: &Path, file: FileId) -> PathBuf {
    dir.join(segment_name(file))
}

fn segment_name(file: FileId) -> String {
    format!("{:06}.wal", file.0)
}

/// The id of the segment file that is called `name`, if one is.
pub(crate) fn parse_name(name: &str) -> Option<FileId> {
    let id = FileId(name.strip_suffix(".wal")?.parse().ok()?);
    (segment_name(id) == name).then_some(id)
}

/// What the bytes of one segment hold, taken by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentScan {
    pub(crate) header: SegmentHeader,
    pub(crate) commits: u64,
    /// The last sequence number; the one before `header.first` if there are no commits.
    pub(crate) last: SeqNo,
    /// The highest watermark in front of `end`.
    pub(crate) durable: SeqNo,
    /// End of the last frame in sequence, in bytes.
    pub(crate) end: u64,
    /// What verifies behind the place where the sequence stops.
    pub(crate) behind: Behind,
}

/// Reads a whole segment from memory, for inspection and fuzzing.
///
/// # Errors
/// `Corruption` if the header does not verify, `Unsupported` if a newer version wrote it.
pub(crate) fn scan_bytes(bytes: &[u8]) -> Result<SegmentScan> {
    let header = SegmentHeader::decode(bytes)?;
    let mut reader = header.reader(Source::Bytes(bytes), Order::Consecutive)?;
    let (mut commits, mut durable) = (0, SeqNo::ZERO);
    loop {
        match reader.next()? {
            Item::Record(record) => {
                durable = durable.max(record.durable);
                commits += 1;
                reader.payload()?;
            }
            Item::Watermark(mark) => durable = durable.max(mark),
            Item::Stop => break,
        }
    }
    let (last, end) = (reader.last(), reader.end());
    Ok(SegmentScan { header, commits, last, durable, end, behind: reader.search()? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::record::writer::{FrameWriter, Record};
    use crate::vfs::dice::Dice;

    fn header() -> SegmentHeader {
        let (epoch, previous) = (Epoch(9), Epoch(7));
        SegmentHeader { file_id: [5; 16], database_id: [6; 16], epoch, previous, first: SeqNo(100) }
    }

    #[test]
    fn no_flipped_bit_of_the_header_passes() {
        let good = header().encode();
        assert_eq!(SegmentHeader::decode(&good).unwrap(), header());
        for bit in 0..104 * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(SegmentHeader::decode(&bad).unwrap_err().kind(), ErrorKind::Corruption, "bit {bit}");
        }
        for len in 0..HEADER_LEN {
            assert!(SegmentHeader::decode(&good[..len]).is_err());
        }
        let senseless = SegmentHeader { previous: Epoch(9), ..header() };
        assert!(SegmentHeader::decode(&senseless.encode()).is_err());
    }

    #[test]
    fn names_are_canonical() {
        assert_eq!(parse_name("000012.wal"), Some(FileId(12)));
        assert_eq!(parse_name("1234567.wal"), Some(FileId(1_234_567)));
        for name in ["12.wal", "+00012.wal", "0001234567.wal", "000012.sst", ".wal", "99999999999999999999999.wal"] {
            assert_eq!(parse_name(name), None, "{name}");
        }
    }

    #[test]
    fn a_scan_tells_what_a_segment_holds_and_survives_random_bytes() {
        let mut bytes = header().encode().to_vec();
        let mut writer = FrameWriter::new();
        writer.begin(512);
        let mut sink = |piece: &[u8], _: u64| {
            bytes.extend_from_slice(piece);
            Ok(())
        };
        for first in [100, 103] {
            let record = Record { first: SeqNo(first), count: 3, durable: SeqNo(99), payload: b"payload" };
            writer.put(&header().place(), &record, &mut sink).unwrap();
        }
        writer.put_watermark(&header().place(), SeqNo(105), SeqNo(102), &mut sink).unwrap();
        writer.flush(&mut sink).unwrap();
        let scan = scan_bytes(&bytes).unwrap();
        assert_eq!((scan.commits, scan.last, scan.durable, scan.end), (2, SeqNo(105), SeqNo(102), bytes.len() as u64));
        assert_eq!(scan.behind, Behind::default());

        let mut dice = Dice::new(4, 4);
        for _ in 0..3000 {
            let mut bad = bytes.clone();
            for _ in 0..1 + dice.below(4) {
                let at = dice.below(bad.len());
                bad[at] = dice.throw() as u8;
            }
            bad.truncate(bad.len() - dice.below(60));
            if let Ok(scan) = scan_bytes(&bad) {
                assert!(scan.commits <= 2 && scan.end <= bad.len() as u64);
            }
            let random: Vec<u8> = (0..dice.below(700)).map(|_| dice.throw() as u8).collect();
            assert!(scan_bytes(&random).is_err());
        }
    }
}

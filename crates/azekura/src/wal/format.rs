#![doc = include_str!("../../docs/format/wal.md")]
#![doc = include_str!("../../docs/format/commit.md")]

use std::path::{Path, PathBuf};

use crate::base::blob_pointer::BlobPointer;
use crate::base::checksum::{location_seed, xxh3};
use crate::base::coding::{ByteReader, put_bytes, put_varint, varint_len};
use crate::base::file_format::{FileHeader, FileKind};
use crate::base::key::{KEY_LEN_MAX, VALUE_LEN_MAX, split_expiry};
use crate::base::key_range::KeyRange;
use crate::base::version_edit::{FileNumber, PartitionId, WalEpoch};
use crate::base::{Error, RecordKind, Result, SeqNo};
use crate::record_log::frame::LogFileIdentity;
use crate::record_log::reader::{DamageScan, LogReadResult, LogSource, RecordLogReader, SeqnoOrder};
use crate::vfs::File;
use crate::wal::options::WalCommit;

/// Length of a segment header in bytes: one sector, which the device writes completely or not at all. Frames start
/// after the header.
pub(crate) const SEGMENT_HEADER_LEN: usize = 512;

const SEGMENT_FIELDS_OFFSET: usize = FileHeader::LEN;
const SEGMENT_CHECKSUM_OFFSET: usize = SEGMENT_FIELDS_OFFSET + 32;

/// The header of a segment file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WalSegmentHeader {
    /// Random, and new for each incarnation of the file.
    pub(crate) file_id: [u8; 16],
    pub(crate) database_id: [u8; 16],
    /// 0 in a spare file that was never a segment.
    pub(crate) epoch: WalEpoch,
    /// Epoch of the segment that this one follows; 0 if there is none.
    pub(crate) previous_epoch: WalEpoch,
    /// The first sequence number of the segment. If the segment is empty, the sequence number that its first commit
    /// will have.
    pub(crate) first_seqno: SeqNo,
}

impl WalSegmentHeader {
    pub(crate) fn encode(&self) -> [u8; SEGMENT_HEADER_LEN] {
        let mut out = [0; SEGMENT_HEADER_LEN];
        let header = FileHeader { kind: FileKind::Wal, file_id: self.file_id };
        out[..SEGMENT_FIELDS_OFFSET].copy_from_slice(&header.encode());
        out[64..80].copy_from_slice(&self.database_id);
        out[80..84].copy_from_slice(&self.epoch.0.to_le_bytes());
        out[84..88].copy_from_slice(&self.previous_epoch.0.to_le_bytes());
        out[88..96].copy_from_slice(&self.first_seqno.0.to_le_bytes());
        let sum = xxh3(
            location_seed(&self.file_id, SEGMENT_FIELDS_OFFSET as u64),
            &out[SEGMENT_FIELDS_OFFSET..SEGMENT_CHECKSUM_OFFSET],
        );
        out[SEGMENT_CHECKSUM_OFFSET..SEGMENT_CHECKSUM_OFFSET + 8].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Reads the header at the front of `bytes`.
    ///
    /// # Errors
    /// `Corruption` if it does not verify, `Unsupported` if a newer version wrote it.
    pub(crate) fn decode(bytes: &[u8]) -> Result<WalSegmentHeader> {
        let file_id = FileHeader::decode(FileKind::Wal, bytes)?.file_id;
        let Some(block) = bytes.get(..SEGMENT_HEADER_LEN) else {
            return Err(Error::corruption("segment is shorter than its header").at_offset(0));
        };
        let mut d = ByteReader::new(&block[SEGMENT_FIELDS_OFFSET..]);
        let header = WalSegmentHeader {
            file_id,
            database_id: d.bytes16()?,
            epoch: WalEpoch(d.u32()?),
            previous_epoch: WalEpoch(d.u32()?),
            first_seqno: SeqNo(d.u64()?),
        };
        let at = SEGMENT_FIELDS_OFFSET as u64;
        if d.u64()? != xxh3(location_seed(&file_id, at), &block[SEGMENT_FIELDS_OFFSET..SEGMENT_CHECKSUM_OFFSET]) {
            return Err(Error::corruption("checksum of the segment header does not match").at_offset(at));
        }
        let is_valid = header.first_seqno <= SeqNo::MAX && (header.epoch.0 == 0 || header.first_seqno > SeqNo::ZERO);
        if !is_valid || (header.epoch.0 != 0 && header.previous_epoch >= header.epoch) {
            return Err(Error::corruption("segment header has an invalid epoch or sequence number").at_offset(at));
        }
        Ok(header)
    }

    /// The identity that the checksums of the segment's frames include.
    pub(crate) fn identity(&self) -> LogFileIdentity {
        LogFileIdentity { file_id: self.file_id, epoch: self.epoch.0 }
    }

    /// Returns a reader of the segment's records.
    pub(crate) fn reader<'a>(&self, source: LogSource<'a>, order: SeqnoOrder) -> Result<RecordLogReader<'a>> {
        let before = SeqNo(self.first_seqno.0.saturating_sub(1));
        RecordLogReader::new(source, self.identity(), SEGMENT_HEADER_LEN as u64, before, order)
    }
}

/// The path of a segment's file.
pub(crate) fn segment_path(dir: &Path, file: FileNumber) -> PathBuf {
    dir.join(segment_name(file))
}

pub(crate) fn segment_name(file: FileNumber) -> String {
    format!("{:06}.wal", file.0)
}

/// The file number of a segment file name. `None` if `name` is not the canonical name of a segment file.
pub(crate) fn parse_segment_name(name: &str) -> Option<FileNumber> {
    let id = FileNumber(name.strip_suffix(".wal")?.parse().ok()?);
    (segment_name(id) == name).then_some(id)
}

/// Content of one segment, without regard to the rest of the WAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WalSegmentScan {
    pub(crate) header: WalSegmentHeader,
    pub(crate) commits: u64,
    /// The last sequence number; `header.first_seqno` - 1 if there are no commits.
    pub(crate) last_seqno: SeqNo,
    /// The highest watermark before `end_offset`.
    pub(crate) durable_seqno: SeqNo,
    /// File offset of the end of the last frame in sequence.
    pub(crate) end_offset: u64,
    /// The valid frames after the point where the sequence stops.
    pub(crate) damage_scan: DamageScan,
}

/// Reads a whole segment from memory, for inspection and fuzzing.
///
/// # Errors
/// `Corruption` if the header does not verify, `Unsupported` if a newer version wrote it.
pub(crate) fn scan_segment_bytes(bytes: &[u8]) -> Result<WalSegmentScan> {
    let header = WalSegmentHeader::decode(bytes)?;
    let mut reader = header.reader(LogSource::Bytes(bytes), SeqnoOrder::Consecutive)?;
    let (mut commits, mut durable) = (0, SeqNo::ZERO);
    loop {
        match reader.next()? {
            LogReadResult::Record(record) => {
                durable = durable.max(record.durable_seqno);
                commits += 1;
                reader.payload()?;
            }
            LogReadResult::Watermark(mark) => durable = durable.max(mark),
            LogReadResult::End => break,
        }
    }
    let (last, end) = (reader.last(), reader.end());
    Ok(WalSegmentScan {
        header,
        commits,
        last_seqno: last,
        durable_seqno: durable,
        end_offset: end,
        damage_scan: reader.scan_after_damage()?,
    })
}

/// Calls `visit` with each commit of a segment that can be read, also behind damage, but not with gaps. Returns false
/// if there are commits behind damage.
///
/// # Errors
/// `Io`; `Unsupported` for frames of a newer version; `Corruption` if too many places look like frames.
pub(crate) fn visit_commits(
    header: &WalSegmentHeader,
    file: &dyn File,
    visit: &mut dyn FnMut(WalCommit<'_>),
) -> Result<bool> {
    let mut reader = header.reader(LogSource::File(file), SeqnoOrder::Rising)?;
    let mut is_undamaged = true;
    loop {
        let at = reader.position();
        match reader.next()? {
            LogReadResult::Record(record) => {
                let payload = reader.payload()?;
                if payload != SEQNO_GAP_PAYLOAD {
                    visit(WalCommit { first_seqno: record.first_seqno, seqno_count: record.count, payload });
                }
            }
            LogReadResult::Watermark(_) => {}
            LogReadResult::End if reader.skip_damage(at)? => is_undamaged = false,
            LogReadResult::End => return Ok(is_undamaged),
        }
    }
}

/// The last sequence number of the records of a segment, gaps among them, that follow each other from its start.
///
/// # Errors
/// `Io`; `Unsupported` for frames of a newer version.
pub(crate) fn whole_through(header: &WalSegmentHeader, file: &dyn File) -> Result<SeqNo> {
    let mut reader = header.reader(LogSource::File(file), SeqnoOrder::Consecutive)?;
    while reader.next()? != LogReadResult::End {}
    Ok(reader.last())
}

/// One record of a commit, borrowed from the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WalRecord<'a> {
    pub(crate) kind: RecordKind,
    pub(crate) partition: PartitionId,
    pub(crate) key: &'a [u8],
    /// The value, the encoded blob pointer to it, or the end of a range delete. The value of a record that expires
    /// begins with its expiry time.
    pub(crate) value: &'a [u8],
}

/// Payload of a gap frame: a frame for sequence numbers that the write-ahead log (WAL) does not contain, because pools
/// used them without it. Its one byte is a record kind that no commit contains.
pub(crate) const SEQNO_GAP_PAYLOAD: &[u8] = &[19];

/// The gap frames that advance a WAL with the next sequence number `from` to `next`.
pub(crate) fn seqno_gap_commits<'a>(mut from: SeqNo, next: SeqNo) -> impl Iterator<Item = WalCommit<'a>> {
    debug_assert!(from > SeqNo::ZERO, "sequence numbers begin at 1");
    std::iter::from_fn(move || {
        let count = u32::try_from(next.0.saturating_sub(from.0)).unwrap_or(u32::MAX);
        let first = from;
        from = first.plus(u64::from(count));
        (count > 0).then_some(WalCommit { first_seqno: first, seqno_count: count, payload: SEQNO_GAP_PAYLOAD })
    })
}

/// Checks the lengths of a key and a value. Callers check them before they write anything.
///
/// # Errors
/// `Invalid` for a key or a value that is too long.
pub(crate) fn check_key_and_value_lengths(key: &[u8], value: &[u8]) -> Result<()> {
    if key.len() > KEY_LEN_MAX {
        return Err(Error::invalid(format!("key has {} bytes, at most {KEY_LEN_MAX} are allowed", key.len())));
    }
    if value.len() as u64 > VALUE_LEN_MAX {
        return Err(Error::invalid(format!("value has {} bytes, at most {VALUE_LEN_MAX} are allowed", value.len())));
    }
    Ok(())
}

/// The commit that follows an ingest in the WAL, at the next sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IngestMarker {
    /// An id that no partition has.
    pub(crate) partition: PartitionId,
    /// The number of the first table of the ingest.
    pub(crate) first_table: FileNumber,
}

impl IngestMarker {
    /// Appends the only record of the commit.
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        let key = self.first_table.0.to_le_bytes();
        put_record(out, &WalRecord { kind: RecordKind::Delete, partition: self.partition, key: &key, value: &[] });
    }

    /// The marker that a payload may be. A remove of a key of eight bytes looks the same, apart from its partition.
    pub(crate) fn of_payload(payload: &[u8]) -> Option<IngestMarker> {
        let mut records = WalRecordIter::new(payload);
        let record = records.next()?.ok().filter(|record| record.kind == RecordKind::Delete)?;
        let first_table = FileNumber(u64::from_le_bytes(record.key.try_into().ok()?));
        records.next().is_none().then_some(IngestMarker { partition: record.partition, first_table })
    }
}

/// The partition id of notes. No partition has it, so that recovery skips a note like a record of a deleted partition.
const NOTE_PARTITION: PartitionId = PartitionId(0);

/// A note to readers of changes, with the sequence number of an ingest: its entries are not in the WAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IngestNote<'a> {
    pub(crate) partition: PartitionId,
    /// The first and the last key of the entries.
    pub(crate) first: &'a [u8],
    pub(crate) last: &'a [u8],
}

impl<'a> IngestNote<'a> {
    /// Appends the only record of the commit.
    pub(crate) fn put(&self, out: &mut Vec<u8>) {
        let mut value = Vec::new();
        put_varint(&mut value, self.partition.0);
        value.extend_from_slice(self.last);
        let partition = NOTE_PARTITION;
        put_record(out, &WalRecord { kind: RecordKind::Put, partition, key: self.first, value: &value });
    }

    /// The note that a record is.
    ///
    /// # Errors
    /// `Corruption` if it is a malformed note.
    pub(crate) fn of_record(record: &WalRecord<'a>) -> Result<Option<IngestNote<'a>>> {
        if record.partition != NOTE_PARTITION {
            return Ok(None);
        }
        let mut d = ByteReader::new(record.value);
        let partition = PartitionId(d.varint()?);
        Ok(Some(IngestNote { partition, first: record.key, last: d.rest() }))
    }
}

/// The partition of the ingest whose note a commit is.
///
/// # Errors
/// `Corruption` if it is a malformed note.
pub(crate) fn ingest_note(commit: &WalCommit<'_>) -> Result<Option<PartitionId>> {
    let Some(record) = WalRecordIter::new(commit.payload).next().transpose()? else { return Ok(None) };
    Ok(IngestNote::of_record(&record)?.map(|note| note.partition))
}

/// Appends a record.
pub(crate) fn put_record(out: &mut Vec<u8>, record: &WalRecord<'_>) {
    debug_assert!(record.key.len() <= KEY_LEN_MAX, "lengths are checked before a record is written");
    debug_assert!(record.kind.has_value_field() || record.value.is_empty(), "a record without a value field");
    out.push(record.kind.to_byte());
    put_varint(out, record.partition.0);
    put_bytes(out, record.key);
    if record.kind.has_value_field() {
        put_bytes(out, record.value);
    }
}

/// Encoded length of a record in bytes.
pub(crate) fn record_len(record: &WalRecord<'_>) -> u64 {
    let bytes = |bytes: &[u8]| varint_len(bytes.len() as u64) + bytes.len();
    let value = if record.kind.has_value_field() { bytes(record.value) } else { 0 };
    (1 + varint_len(record.partition.0) + bytes(record.key) + value) as u64
}

/// Reads the records of a payload; ends after the first error.
pub(crate) struct WalRecordIter<'a> {
    decoder: ByteReader<'a>,
}

impl<'a> WalRecordIter<'a> {
    pub(crate) fn new(payload: &'a [u8]) -> WalRecordIter<'a> {
        WalRecordIter { decoder: ByteReader::new(payload) }
    }

    fn decode_next(&mut self) -> Result<WalRecord<'a>> {
        let kind = RecordKind::from_byte(self.decoder.u8()?)?;
        let partition = PartitionId(self.decoder.varint()?);
        let key = self.decoder.bytes()?;
        let value = if kind.has_value_field() { self.decoder.bytes()? } else { &[] };
        match kind {
            RecordKind::BlobPointer | RecordKind::ExpiringBlobPointer => {
                BlobPointer::of_record(kind, value).map(|_| ())?;
            }
            RecordKind::RangeDelete => KeyRange::decode(key, value).map(|_| ())?,
            RecordKind::ExpiringPut => split_expiry(kind, value).map(|_| ())?,
            RecordKind::Put | RecordKind::Delete | RecordKind::SingleDelete | RecordKind::Merge => {}
        }
        if key.len() > KEY_LEN_MAX {
            return Err(Error::corruption("key in the log exceeds the maximum length"));
        }
        Ok(WalRecord { kind, partition, key, value })
    }
}

impl<'a> Iterator for WalRecordIter<'a> {
    type Item = Result<WalRecord<'a>>;

    fn next(&mut self) -> Option<Result<WalRecord<'a>>> {
        if self.decoder.is_empty() {
            return None;
        }
        let record = self.decode_next();
        if record.is_err() {
            self.decoder = ByteReader::new(&[]);
        }
        Some(record)
    }
}

/// The blob pointers of a commit, with their partitions and sequence numbers.
///
/// # Errors
/// `Corruption` if the payload is malformed.
pub(crate) fn blob_pointers(commit: &WalCommit<'_>) -> Result<Vec<(PartitionId, SeqNo, BlobPointer)>> {
    let mut pointers = Vec::new();
    if commit.payload == SEQNO_GAP_PAYLOAD {
        return Ok(pointers);
    }
    for (at, record) in (0..).zip(WalRecordIter::new(commit.payload)) {
        let record = record?;
        if let Some(pointer) = BlobPointer::of_record(record.kind, record.value)? {
            pointers.push((record.partition, commit.first_seqno.plus(at), pointer));
        }
    }
    Ok(pointers)
}

/// Checks that a payload contains exactly `count` well-formed records, or is a gap payload.
pub(crate) fn check_payload(payload: &[u8], count: u32) -> Result<()> {
    if payload == SEQNO_GAP_PAYLOAD {
        return Ok(());
    }
    let mut found = 0u64;
    for record in WalRecordIter::new(payload) {
        record?;
        found += 1;
    }
    if found == u64::from(count) {
        return Ok(());
    }
    Err(Error::corruption(format!("commit has {found} records, its frame says {count}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::version_edit::FileNumber;
    use crate::record_log::writer::{LogRecord, RecordLogWriter};
    use crate::testing::seeded_rng::SeededRng;

    fn header() -> WalSegmentHeader {
        let (epoch, previous) = (WalEpoch(9), WalEpoch(7));
        WalSegmentHeader {
            file_id: [5; 16],
            database_id: [6; 16],
            epoch,
            previous_epoch: previous,
            first_seqno: SeqNo(100),
        }
    }

    #[test]
    fn ingest_notes_are_no_other_record() {
        for (first, last) in [(&b""[..], &b""[..]), (b"a", b"b"), (b"", b"zz")] {
            let note = IngestNote { partition: PartitionId(300), first, last };
            let mut payload = Vec::new();
            note.put(&mut payload);
            check_payload(&payload, 1).unwrap();
            let record = WalRecordIter::new(&payload).next().unwrap().unwrap();
            assert_eq!(IngestNote::of_record(&record).unwrap(), Some(note));
            assert_eq!(IngestMarker::of_payload(&payload), None);
            let other = WalRecord { partition: PartitionId(1), ..record };
            assert_eq!(IngestNote::of_record(&other).unwrap(), None);
            let malformed = WalRecord { value: &[0x80], ..record };
            assert_eq!(IngestNote::of_record(&malformed).unwrap_err().kind(), ErrorKind::Corruption);
        }
    }

    #[test]
    fn header_with_flipped_bit_is_corruption() {
        let good = header().encode();
        assert_eq!(WalSegmentHeader::decode(&good).unwrap(), header());
        for bit in 0..104 * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(WalSegmentHeader::decode(&bad).unwrap_err().kind(), ErrorKind::Corruption, "bit {bit}");
        }
        for len in 0..SEGMENT_HEADER_LEN {
            assert!(WalSegmentHeader::decode(&good[..len]).is_err());
        }
        let senseless = WalSegmentHeader { previous_epoch: WalEpoch(9), ..header() };
        assert!(WalSegmentHeader::decode(&senseless.encode()).is_err());
    }

    #[test]
    fn names_are_canonical() {
        assert_eq!(parse_segment_name("000012.wal"), Some(FileNumber(12)));
        assert_eq!(parse_segment_name("1234567.wal"), Some(FileNumber(1_234_567)));
        for name in ["12.wal", "+00012.wal", "0001234567.wal", "000012.sst", ".wal", "99999999999999999999999.wal"] {
            assert_eq!(parse_segment_name(name), None, "{name}");
        }
    }

    #[test]
    fn scan_reports_contents_and_rejects_corruption() {
        let mut bytes = header().encode().to_vec();
        let mut writer = RecordLogWriter::new();
        writer.reset(512);
        let mut sink = |piece: &[u8], _: u64| {
            bytes.extend_from_slice(piece);
            Ok(())
        };
        for first in [100, 103] {
            let record =
                LogRecord { first_seqno: SeqNo(first), count: 3, durable_seqno: SeqNo(99), payload: b"payload" };
            writer.add_record(&header().identity(), &record, &mut sink).unwrap();
        }
        writer.add_watermark(&header().identity(), SeqNo(105), SeqNo(102), &mut sink).unwrap();
        writer.flush(&mut sink).unwrap();
        let scan = scan_segment_bytes(&bytes).unwrap();
        assert_eq!(
            (scan.commits, scan.last_seqno, scan.durable_seqno, scan.end_offset),
            (2, SeqNo(105), SeqNo(102), bytes.len() as u64)
        );
        assert_eq!(scan.damage_scan, DamageScan::default());

        let mut rng = SeededRng::with_stream(4, 4);
        for _ in 0..3000 {
            let mut bad = bytes.clone();
            for _ in 0..1 + rng.below(4) {
                let at = rng.below(bad.len());
                bad[at] = rng.next_u64() as u8;
            }
            bad.truncate(bad.len() - rng.below(60));
            if let Ok(scan) = scan_segment_bytes(&bad) {
                assert!(scan.commits <= 2 && scan.end_offset <= bad.len() as u64);
            }
            let random: Vec<u8> = (0..rng.below(700)).map(|_| rng.next_u64() as u8).collect();
            assert!(scan_segment_bytes(&random).is_err());
        }
    }

    #[test]
    fn seqno_gap_takes_fewest_frames() {
        let gaps = |from, next| {
            seqno_gap_commits(SeqNo(from), SeqNo(next)).map(|f| (f.first_seqno.0, f.seqno_count)).collect::<Vec<_>>()
        };
        assert_eq!(gaps(5, 5), []);
        assert_eq!(gaps(5, 6), [(5, 1)]);
        let far = 3 + 2 * u64::from(u32::MAX) + 7;
        assert_eq!(gaps(3, far), [(3, u32::MAX), (2 + (1 << 32), u32::MAX), (1 + (2 << 32), 7)]);
        check_payload(SEQNO_GAP_PAYLOAD, 7).unwrap();
        assert!(
            WalRecordIter::new(SEQNO_GAP_PAYLOAD).next().is_some_and(|record| record.is_err()),
            "a gap payload is not a record"
        );
    }

    #[test]
    fn records_round_trip_and_cuts_are_found() {
        let mut pointer = Vec::new();
        BlobPointer {
            logical_file: FileNumber(300),
            ordinal: 7,
            frame_offset: 64,
            frame_len: 1 << 20,
            value_len: 1 << 21,
        }
        .encode(&mut pointer);
        let records = [
            WalRecord { kind: RecordKind::Put, partition: PartitionId(0), key: b"", value: b"" },
            WalRecord { kind: RecordKind::Delete, partition: PartitionId(300), key: b"k", value: b"" },
            WalRecord { kind: RecordKind::Put, partition: PartitionId(1), key: &[7; 300], value: &[8; 1000] },
            WalRecord { kind: RecordKind::SingleDelete, partition: PartitionId(1), key: b"x", value: b"" },
            WalRecord { kind: RecordKind::BlobPointer, partition: PartitionId(9), key: b"p", value: &pointer },
            WalRecord { kind: RecordKind::RangeDelete, partition: PartitionId(9), key: b"p", value: b"\x04q" },
        ];
        let mut payload = Vec::new();
        let mut ends = vec![0];
        for record in &records {
            put_record(&mut payload, record);
            assert_eq!(payload.len() as u64, ends[ends.len() - 1] as u64 + record_len(record));
            ends.push(payload.len());
        }
        let back: Vec<_> = WalRecordIter::new(&payload).collect::<Result<_>>().unwrap();
        assert_eq!(back, records);
        check_payload(&payload, 6).unwrap();
        assert!(check_payload(&payload, 5).is_err());
        for cut in (0..payload.len()).filter(|cut| !ends.contains(cut)) {
            assert!(WalRecordIter::new(&payload[..cut]).any(|r| r.is_err()));
        }
    }

    #[test]
    fn malformed_blob_pointer_is_corruption() {
        for value in [&b""[..], &[1, 2, 3], &[1, 2, 3, 4, 5, 6], &[0xff; 50]] {
            let mut payload = Vec::new();
            put_record(
                &mut payload,
                &WalRecord { kind: RecordKind::BlobPointer, partition: PartitionId(1), key: b"k", value },
            );
            assert_eq!(check_payload(&payload, 1).unwrap_err().kind(), ErrorKind::Corruption);
        }
    }

    #[test]
    fn malformed_range_delete_is_corruption() {
        for value in [&b""[..], &[16], &[2], &[8, 1]] {
            let mut payload = Vec::new();
            put_record(
                &mut payload,
                &WalRecord { kind: RecordKind::RangeDelete, partition: PartitionId(1), key: b"k", value },
            );
            assert_eq!(check_payload(&payload, 1).unwrap_err().kind(), ErrorKind::Corruption);
        }
    }

    #[test]
    fn limits() {
        check_key_and_value_lengths(&[0; KEY_LEN_MAX], b"").unwrap();
        assert!(check_key_and_value_lengths(&[0; KEY_LEN_MAX + 1], b"").is_err());
    }
}

#![doc = include_str!("../../docs/format/commit.md")]

use crate::base::blob_pointer::BlobPointer;
use crate::base::coding::{ByteReader, put_bytes, put_varint, varint_len};
use crate::base::key::{KEY_LEN_MAX, VALUE_LEN_MAX};
use crate::base::version_edit::PartitionId;
use crate::base::{Error, RecordKind, Result, SeqNo};
use crate::wal::options::WalCommit;

/// One record of a commit, borrowed from the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WalRecord<'a> {
    pub(crate) kind: RecordKind,
    pub(crate) partition: PartitionId,
    pub(crate) key: &'a [u8],
    /// The value, or the encoded blob pointer to it.
    pub(crate) value: &'a [u8],
}

/// Payload of a gap frame: a frame for sequence numbers that the write-ahead log (WAL) does not contain, because pools
/// used them without it. Its one byte is a record kind that no commit contains.
pub(crate) const SEQNO_GAP_PAYLOAD: &[u8] = &[19];

/// The gap frames that advance a WAL with the next sequence number `from` to `next`.
pub(crate) fn seqno_gap_commits<'a>(mut from: SeqNo, next: SeqNo) -> impl Iterator<Item = WalCommit<'a>> {
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

/// Appends a record.
pub(crate) fn put_record(out: &mut Vec<u8>, record: &WalRecord<'_>) {
    out.push(record.kind.to_byte());
    put_varint(out, record.partition.0);
    put_bytes(out, record.key);
    if record.kind.is_value() {
        put_bytes(out, record.value);
    }
}

/// Encoded length of a record in bytes.
pub(crate) fn record_len(record: &WalRecord<'_>) -> u64 {
    let bytes = |bytes: &[u8]| varint_len(bytes.len() as u64) + bytes.len();
    let value = if record.kind.is_value() { bytes(record.value) } else { 0 };
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
        let value = if kind.is_value() { self.decoder.bytes()? } else { &[] };
        if kind == RecordKind::BlobPointer {
            BlobPointer::decode(value)?;
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
        if record.kind == RecordKind::BlobPointer {
            pointers.push((record.partition, commit.first_seqno.plus(at), BlobPointer::decode(record.value)?));
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
        check_payload(&payload, 5).unwrap();
        assert!(check_payload(&payload, 4).is_err());
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
    fn limits() {
        check_key_and_value_lengths(&[0; KEY_LEN_MAX], b"").unwrap();
        assert!(check_key_and_value_lengths(&[0; KEY_LEN_MAX + 1], b"").is_err());
    }
}

#![doc = include_str!("../docs/format/log_object.md")]

use std::ops::Bound;

use azekura::{ChangePosition, CommittedBatch, Operation};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::error::{BackupError, Result};
use crate::layout::hex;

const MAGIC: &[u8; 8] = b"AZEKBLG\n";
const VERSION: u16 = 1;
/// Length of the header in bytes.
pub(crate) const HEADER_LEN: usize = 104;

const INSERT: u8 = 1;
const INSERT_EXPIRING: u8 = 2;
const REMOVE: u8 = 3;
const REMOVE_RANGE: u8 = 4;
const MERGE: u8 = 5;

/// The header of a log object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogHeader {
    /// The last sequence number before the commits.
    pub(crate) after: u64,
    /// The position after the last commit.
    pub(crate) to: ChangePosition,
    /// When the commits were read, in milliseconds since 1970.
    pub(crate) time_ms: u64,
    commits: u32,
    payload_len: u64,
    checksum: u64,
}

impl LogHeader {
    pub(crate) fn database(&self) -> String {
        hex(&self.to.database_id())
    }

    pub(crate) fn end(&self) -> u64 {
        self.to.sequence_number()
    }

    /// The epoch of the database when the commits were read.
    pub(crate) fn epoch(&self) -> u32 {
        self.to.epoch()
    }

    /// Whether it has the next commit after this sequence number.
    pub(crate) fn continues(&self, sequence: u64) -> bool {
        self.after <= sequence && self.end() > sequence
    }
}

/// A change of a stored commit. Partitions are numbered in the order of the table of the object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LoggedOperation {
    Insert { key: Vec<u8>, value: Vec<u8>, expires_ms: Option<u64> },
    Remove { key: Vec<u8> },
    RemoveRange { start: Bound<Vec<u8>>, end: Bound<Vec<u8>> },
    Merge { key: Vec<u8>, operand: Vec<u8> },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoggedCommit {
    /// The last sequence number of the commit.
    pub(crate) sequence: u64,
    pub(crate) operations: Vec<(usize, LoggedOperation)>,
}

/// A log object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogObject {
    pub(crate) header: LogHeader,
    /// All partitions of the database, with their ids.
    pub(crate) partitions: Vec<(String, u64)>,
    pub(crate) commits: Vec<LoggedCommit>,
}

/// Bytes of a commit that a log object can have. They are in memory several times.
const COMMIT_LEN_MAX: u64 = 1 << 30;

/// Builds a log object.
#[derive(Debug)]
pub(crate) struct LogWriter {
    commits: Vec<Vec<u8>>,
    bytes: usize,
    to: Option<ChangePosition>,
    commit_len_max: u64,
}

impl LogWriter {
    pub(crate) fn new() -> LogWriter {
        LogWriter { commits: Vec::new(), bytes: 0, to: None, commit_len_max: COMMIT_LEN_MAX }
    }

    /// Bytes of the commits so far.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn commits(&self) -> usize {
        self.commits.len()
    }

    /// The position after the last commit.
    pub(crate) fn end(&self) -> Option<ChangePosition> {
        self.to
    }

    /// Adds a commit. Returns what cannot be expressed, if anything.
    pub(crate) fn add(&mut self, commit: &CommittedBatch, partitions: &[(String, u64)]) -> Result<Result<(), String>> {
        let mut frame = commit.position().sequence_number().to_le_bytes().to_vec();
        frame.extend([0; 4]);
        let mut count = 0u32;
        for change in commit.changes() {
            let number = partitions.binary_search_by(|(name, _)| (**name).cmp(change.partition));
            let Ok(number) = number else {
                return Ok(Err(format!("partition {:?} was created", change.partition)));
            };
            let value_len = if let Operation::Insert { value, .. } = &change.operation { value.size() } else { 0 };
            if frame.len() as u64 + value_len > self.commit_len_max {
                return Ok(Err(format!("a commit has more than {} bytes", self.commit_len_max)));
            }
            if let Err(reason) = encode(&mut frame, number, &change.operation)? {
                return Ok(Err(format!("partition {:?}: {reason}", change.partition)));
            }
            count += 1;
        }
        frame[8..12].copy_from_slice(&count.to_le_bytes());
        self.bytes += frame.len();
        self.commits.push(frame);
        self.to = Some(commit.position());
        Ok(Ok(()))
    }

    /// The bytes of the object; `None` if there is no commit.
    pub(crate) fn finish(&self, after: u64, time_ms: u64, partitions: &[(String, u64)]) -> Option<Vec<u8>> {
        let to = self.to?;
        let mut table = (partitions.len() as u32).to_le_bytes().to_vec();
        for (name, id) in partitions {
            table.extend(id.to_le_bytes());
            put_bytes(&mut table, name.as_bytes());
        }
        let frames = || std::iter::once(&table).chain(&self.commits);
        let payload_len: u64 = frames().map(|frame| frame.len() as u64 + 12).sum();
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        out.extend((HEADER_LEN as u16).to_le_bytes());
        out.extend((self.commits.len() as u32).to_le_bytes());
        out.extend(to.database_id());
        out.extend(after.to_le_bytes());
        out.extend(to.sequence_number().to_le_bytes());
        out.extend(time_ms.to_le_bytes());
        out.extend(payload_len.to_le_bytes());
        out.extend(to.to_bytes());
        let checksum = xxh3_64(&out);
        out.extend(checksum.to_le_bytes());
        for (i, frame) in frames().enumerate() {
            out.extend((frame.len() as u32).to_le_bytes());
            out.extend(frame_checksum(checksum, i, frame).to_le_bytes());
            out.extend(frame);
        }
        Some(out)
    }
}

/// The checksum of a frame, which depends on the object and on the place in it.
fn frame_checksum(header: u64, number: usize, frame: &[u8]) -> u64 {
    xxh3_64_with_seed(frame, header.wrapping_add(number as u64))
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u32).to_le_bytes());
    out.extend(bytes);
}

fn put_bound(out: &mut Vec<u8>, bound: &Bound<&[u8]>) {
    let (tag, key): (u8, &[u8]) = match bound {
        Bound::Unbounded => (0, &[]),
        Bound::Included(key) => (1, key),
        Bound::Excluded(key) => (2, key),
    };
    out.push(tag);
    put_bytes(out, key);
}

/// Appends a change. Returns the reason if the log cannot express it.
fn encode(out: &mut Vec<u8>, partition: usize, operation: &Operation<'_>) -> Result<Result<(), &'static str>> {
    let mut begin = |kind: u8| {
        out.push(kind);
        out.extend((partition as u32).to_le_bytes());
    };
    match operation {
        Operation::Insert { key, value, expires_ms } => {
            let Some(value) = value.get()? else { return Ok(Err("a value is gone, because a later one replaces it")) };
            begin(if expires_ms.is_some() { INSERT_EXPIRING } else { INSERT });
            out.extend(expires_ms.iter().flat_map(|time| time.to_le_bytes()));
            put_bytes(out, key);
            put_bytes(out, &value);
        }
        Operation::Remove { key } => {
            begin(REMOVE);
            put_bytes(out, key);
        }
        Operation::RemoveRange { start, end } => {
            begin(REMOVE_RANGE);
            put_bound(out, start);
            put_bound(out, end);
        }
        Operation::Merge { key, operand } => {
            begin(MERGE);
            put_bytes(out, key);
            put_bytes(out, operand);
        }
        Operation::Ingest { .. } => return Ok(Err("tables were ingested")),
        _ => return Ok(Err("a change is of a kind that the log cannot contain")),
    }
    Ok(Ok(()))
}

/// Reads the header of a log object.
///
/// # Errors
/// `WrongContent`, `NewerVersion`.
pub(crate) fn decode_header(object: &str, bytes: &[u8]) -> Result<LogHeader> {
    let wrong = |message: &str| BackupError::wrong(object, message);
    let mut d = Reader(bytes);
    let short = || wrong("it is shorter than the header of a log object");
    if d.take(8).ok_or_else(short)? != MAGIC {
        return Err(wrong("it is no log object"));
    }
    let version = d.u16().ok_or_else(short)?;
    if version > VERSION {
        return Err(BackupError::NewerVersion { object: object.into(), version: version.into() });
    }
    let header = bytes.get(..HEADER_LEN).ok_or_else(short)?;
    let checksum = u64::from_le_bytes(header[HEADER_LEN - 8..].try_into().unwrap_or_default());
    if xxh3_64(&header[..HEADER_LEN - 8]) != checksum {
        return Err(wrong("the checksum of its header does not match"));
    }
    let read = || {
        let header_len = d.u16()?;
        let commits = d.u32()?;
        let database = d.take(16)?;
        let (after, end, time_ms, payload_len) = (d.u64()?, d.u64()?, d.u64()?, d.u64()?);
        let to = ChangePosition::from_bytes(d.take(32)?).ok()?;
        let is_valid = usize::from(header_len) == HEADER_LEN
            && to.database_id() == *database
            && to.sequence_number() == end
            && after < end
            && commits > 0;
        is_valid.then_some(LogHeader { after, to, time_ms, commits, payload_len, checksum })
    };
    let mut read = read;
    read().ok_or_else(|| wrong("its header contradicts itself"))
}

/// Reads and checks a whole log object.
///
/// # Errors
/// `WrongContent`, `NewerVersion`.
pub(crate) fn decode(object: &str, bytes: &[u8]) -> Result<LogObject> {
    let header = decode_header(object, bytes)?;
    let payload = &bytes[HEADER_LEN..];
    let wrong = |message: &str| BackupError::wrong(object, message);
    if payload.len() as u64 != header.payload_len {
        return Err(wrong("it does not have the length in its header"));
    }
    let mut d = Reader(payload);
    let mut number = 0;
    let mut next_frame = || {
        let (len, checksum) = (d.u32()?, d.u64()?);
        let frame = d.take(len as usize)?;
        let is_valid = frame_checksum(header.checksum, number, frame) == checksum;
        number += 1;
        is_valid.then_some((frame, d.0.is_empty()))
    };
    let damaged = || wrong("a frame of it is damaged");
    let (table, mut is_end) = next_frame().ok_or_else(damaged)?;
    let partitions = decode_table(table).ok_or_else(damaged)?;
    let mut commits = Vec::new();
    let mut before = header.after;
    while !is_end {
        let frame;
        (frame, is_end) = next_frame().ok_or_else(damaged)?;
        let commit = decode_commit(frame, partitions.len()).ok_or_else(damaged)?;
        if commit.sequence <= before {
            return Err(wrong("its commits are not in order"));
        }
        before = commit.sequence;
        commits.push(commit);
    }
    if commits.len() as u64 != u64::from(header.commits) || before != header.end() {
        return Err(wrong("it does not have the commits in its header"));
    }
    Ok(LogObject { header, partitions, commits })
}

fn decode_table(frame: &[u8]) -> Option<Vec<(String, u64)>> {
    let mut d = Reader(frame);
    let count = d.u32()?;
    let mut partitions: Vec<(String, u64)> = Vec::new();
    for _ in 0..count {
        let (id, name) = (d.u64()?, d.bytes()?);
        partitions.push((String::from_utf8(name).ok()?, id));
    }
    let is_sorted = partitions.windows(2).all(|two| two[0].0 < two[1].0);
    (d.0.is_empty() && is_sorted).then_some(partitions)
}

fn decode_commit(frame: &[u8], partitions: usize) -> Option<LoggedCommit> {
    let mut d = Reader(frame);
    let (sequence, count) = (d.u64()?, d.u32()?);
    let mut operations = Vec::new();
    for _ in 0..count {
        let (kind, partition) = (d.take(1)?[0], d.u32()? as usize);
        let operation = match kind {
            INSERT => LoggedOperation::Insert { key: d.bytes()?, value: d.bytes()?, expires_ms: None },
            INSERT_EXPIRING => {
                let expires_ms = Some(d.u64()?);
                LoggedOperation::Insert { key: d.bytes()?, value: d.bytes()?, expires_ms }
            }
            REMOVE => LoggedOperation::Remove { key: d.bytes()? },
            REMOVE_RANGE => LoggedOperation::RemoveRange { start: d.bound()?, end: d.bound()? },
            MERGE => LoggedOperation::Merge { key: d.bytes()?, operand: d.bytes()? },
            _ => return None,
        };
        if partition >= partitions {
            return None;
        }
        operations.push((partition, operation));
    }
    d.0.is_empty().then_some(LoggedCommit { sequence, operations })
}

/// Reads little-endian numbers and byte strings; `None` beyond the end.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    fn u16(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes(self.take(2)?.try_into().ok()?))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn bytes(&mut self) -> Option<Vec<u8>> {
        let len = self.u32()?;
        Some(self.take(len as usize)?.to_vec())
    }

    fn bound(&mut self) -> Option<Bound<Vec<u8>>> {
        let (tag, key) = (self.take(1)?[0], self.bytes()?);
        match tag {
            0 => key.is_empty().then_some(Bound::Unbounded),
            1 => Some(Bound::Included(key)),
            2 => Some(Bound::Excluded(key)),
            _ => None,
        }
    }
}

/// A position of a database with id 0.
#[cfg(test)]
pub(crate) fn test_position(epoch: u32, sequence: u64) -> ChangePosition {
    let mut out = [0; 32];
    out[16..20].copy_from_slice(&epoch.to_le_bytes());
    out[20..28].copy_from_slice(&sequence.to_le_bytes());
    let checksum = xxh3_64(&out[..28]);
    out[28..].copy_from_slice(&checksum.to_le_bytes()[..4]);
    ChangePosition::from_bytes(&out).unwrap()
}

#[cfg(test)]
impl LogHeader {
    pub(crate) fn for_test(after: u64, epoch: u32, end: u64, time_ms: u64) -> LogHeader {
        LogHeader { after, to: test_position(epoch, end), time_ms, commits: 1, payload_len: 0, checksum: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: the lengths of larger commits did not fit into the 32 bits that they have.
    #[test]
    fn large_commits_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let db = azekura::Config::new(dir.path()).workers(0).open().unwrap();
        let p = db.open_partition("p", Default::default()).unwrap();
        let mut changes = db.changes_since(db.change_position().unwrap()).unwrap();
        let mut batch = db.batch();
        (0..4u8).for_each(|key| batch.insert(&p, [key], [0; 300]));
        batch.commit().unwrap();
        let commit = changes.next().unwrap().unwrap();
        let add = |commit_len_max| {
            let mut writer = LogWriter { commit_len_max, ..LogWriter::new() };
            writer.add(&commit, &db.partition_ids()).unwrap()
        };
        assert_eq!((add(1300), add(1000)), (Ok(()), Err("a commit has more than 1000 bytes".into())));
    }
}

//! Reads the commits of a write-ahead log (WAL) that a thread or another process goes on writing.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::version_edit::WalEpoch;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::record_log::reader::{LogReadResult, LogSource, RecordLogReader, SeqnoOrder};
use crate::vfs::{File, Fs};
use crate::wal::format::{SEGMENT_HEADER_LEN, SEQNO_GAP_PAYLOAD, WalSegmentHeader, parse_segment_name};
use crate::wal::options::WalCommit;
use crate::wal::reader::{WalSegmentFile, find_segment_file};

/// How often the reader looks for a segment before it is gone. The writer may begin segments during a look, which may
/// then find neither the old one nor the new one.
const SUCCESSOR_ATTEMPTS: usize = 3;

/// A position in a live WAL. Reads only; holds no segment, so that the writer may recycle the segment that is read.
///
/// Invariants:
/// - Every commit up to `last_seqno` was returned, each once, in order.
/// - A commit is returned only if all of its bytes verify with the file id of the segment, so neither a commit that is
///   being written nor one of an earlier incarnation of the file is returned.
pub(crate) struct WalTail {
    fs: Arc<dyn Fs>,
    dir: PathBuf,
    database_id: [u8; 16],
    /// The segment that is read. `None` until the first one is found.
    segment: Option<TailSegment>,
    /// The last sequence number that was passed.
    last_seqno: SeqNo,
    /// The WAL is durable up to here, as far as the frames that were read state it.
    durable: SeqNo,
    /// Whether the WAL may end before `last_seqno` when reading begins, because the segments with the records up to it
    /// are gone and no later one was begun.
    may_be_ahead: bool,
    /// The manifest has recorded epochs below this one.
    known_epochs: WalEpoch,
    /// A planted bug: a commit that was recycled is passed over. Always false without the feature `testing`.
    pub(crate) ignores_recycling: bool,
}

/// A segment, and how far it was read.
struct TailSegment {
    file: WalSegmentFile,
    handle: Arc<dyn File>,
    /// Offset of the next frame.
    offset: u64,
    /// The last sequence number that is valid in the segment, if a later segment states it: a recovery may have
    /// abandoned later commits.
    bound: Option<SeqNo>,
}

/// The last sequence number that is valid in segments of an epoch, if a recovery has recorded it.
pub(crate) type RecordedEnd<'a> = dyn Fn(WalEpoch) -> Result<Option<SeqNo>> + 'a;

/// Receives a commit. Returns false to stop behind it.
type VisitCommit<'a> = dyn FnMut(WalCommit<'_>) -> Result<bool> + 'a;

/// Why reading of a segment stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SegmentEnd {
    /// At the limit of the caller, or before a commit that crosses it.
    Limit,
    /// Before a gap that crosses the limit.
    InGap,
    /// Behind a commit after which the caller has stopped.
    Stopped,
    /// Where no frame verifies that follows the last one.
    NoFrame,
}

impl WalTail {
    /// A reader that returns the commits after `after`, which is the last sequence number of a commit. `known_epochs`:
    /// see [`note_known_epochs`](WalTail::note_known_epochs). Reads nothing yet.
    pub(crate) fn new(
        fs: Arc<dyn Fs>,
        dir: &Path,
        database_id: [u8; 16],
        after: SeqNo,
        known_epochs: WalEpoch,
    ) -> WalTail {
        WalTail {
            fs,
            dir: dir.to_path_buf(),
            database_id,
            segment: None,
            last_seqno: after,
            durable: SeqNo::ZERO,
            may_be_ahead: false,
            known_epochs,
            ignores_recycling: false,
        }
    }

    /// As [`new`](WalTail::new), for a reader that has the records up to `after` from elsewhere, so that the WAL may
    /// not contain them any more.
    pub(crate) fn following(
        fs: Arc<dyn Fs>,
        dir: &Path,
        database_id: [u8; 16],
        after: SeqNo,
        known_epochs: WalEpoch,
    ) -> WalTail {
        WalTail { may_be_ahead: true, ..WalTail::new(fs, dir, database_id, after, known_epochs) }
    }

    /// Notes that the manifest has recorded the epochs below `end`. Segments that follow none of these are not read: a
    /// recovery that skips damage writes the WAL anew before it records that.
    pub(crate) fn note_known_epochs(&mut self, end: WalEpoch) {
        self.known_epochs = self.known_epochs.max(end);
    }

    /// The last sequence number that was passed.
    pub(crate) fn last_seqno(&self) -> SeqNo {
        self.last_seqno
    }

    /// The epoch of the segment that is read, if it is found.
    pub(crate) fn epoch(&self) -> Option<WalEpoch> {
        self.segment.as_ref().map(|segment| segment.file.header.epoch)
    }

    /// The sequence number up to which the frames that were read state that the WAL is durable.
    pub(crate) fn durable(&self) -> SeqNo {
        self.durable
    }

    /// Finds the segment that contains the next commit, or will contain it, unless it is found.
    ///
    /// # Errors
    /// `Stale` if the commit was recycled; `Io`.
    pub(crate) fn locate(&mut self) -> Result<()> {
        for attempt in 1.. {
            if self.segment.is_some() {
                break;
            }
            // The writer may begin segments while they are listed.
            match self.find_start() {
                Err(error) if error.kind() == ErrorKind::Stale && attempt < SUCCESSOR_ATTEMPTS => {}
                found => {
                    self.segment = found?;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Passes the next commits to `visit`, in order, until it returns false, or up to the sequence number `limit`, or
    /// to the present end of the WAL. Gaps are passed silently: their numbers belong to no commit of the WAL.
    ///
    /// # Errors
    /// `Stale` if the next commits were recycled, or if a recovery has ended the WAL before `last_seqno`. `Corruption`
    /// if a later segment shows that the next commits were written and they do not verify. `Io` and the errors of
    /// `recorded_end` and `visit`, after which the commit is read again.
    pub(crate) fn read(
        &mut self,
        limit: SeqNo,
        recorded_end: &RecordedEnd<'_>,
        visit: &mut VisitCommit<'_>,
    ) -> Result<()> {
        while self.read_segment(limit, recorded_end, visit)? {}
        Ok(())
    }

    /// As [`read`](WalTail::read), to the end of one segment. Returns whether there is more to read.
    ///
    /// # Errors
    /// Those of [`read`](WalTail::read).
    pub(crate) fn read_segment(
        &mut self,
        limit: SeqNo,
        recorded_end: &RecordedEnd<'_>,
        visit: &mut VisitCommit<'_>,
    ) -> Result<bool> {
        if self.last_seqno >= limit {
            return Ok(false);
        }
        self.locate()?;
        let Some(segment) = &mut self.segment else { return Ok(false) };
        // The segment that a recovery has begun states it too, but may be recycled.
        if let Some(end) = recorded_end(segment.file.header.epoch)? {
            if end < self.last_seqno {
                return Err(lost_error(end, self.last_seqno));
            }
            segment.bound = Some(segment.bound.map_or(end, |bound| bound.min(end)));
        }
        let end = segment.bound.map_or(limit, |bound| bound.min(limit));
        let mut passed = Passed { offset: &mut segment.offset, last: &mut self.last_seqno, durable: &mut self.durable };
        let read = read_segment(&segment.file, &*segment.handle, &mut passed, end, visit);
        let stop = read.map_err(|error| error.in_file(&segment.file.path))?;
        let is_at_limit = self.last_seqno >= limit || (stop != SegmentEnd::NoFrame && end == limit);
        if is_at_limit || stop == SegmentEnd::Stopped { Ok(false) } else { self.enter_next_segment(recorded_end) }
    }

    /// Moves to the segment that continues the current one. False at the end of the WAL.
    fn enter_next_segment(&mut self, recorded_end: &RecordedEnd<'_>) -> Result<bool> {
        let Some(TailSegment { file: current, handle, offset, bound }) = &self.segment else { return Ok(false) };
        // A segment behind the bound is abandoned. The one that a recovery has begun in its place is recycled.
        let continues = |next: &&WalSegmentFile| bound.is_none_or(|bound| next.header.first_seqno <= bound.plus(1));
        for _ in 0..SUCCESSOR_ATTEMPTS {
            let segments = self.segments()?;
            let Some(next) = successor(&segments, current).filter(continues) else {
                // Without a successor this is the end, if the file is still this segment, and no later one was begun: a
                // spare file keeps its content until it is used again.
                if is_newest(current, &segments, recorded_end)? && self.is_unchanged(current)? {
                    return Ok(false);
                }
                continue;
            };
            let before = SeqNo(next.header.first_seqno.0 - 1);
            if before < self.last_seqno {
                let message = format!("the log ends at sequence number {before}, before that of the position");
                return Err(Error::stale(message).in_file(&current.path));
            }
            if before == self.last_seqno {
                let Some(next) = self.start_of(next, &segments)? else { continue };
                self.segment = Some(next);
                return Ok(true);
            }
            // The rest of the current segment may have been written after it was read. It is complete now.
            let (mut end, mut last, mut durable) = (*offset, self.last_seqno, SeqNo::ZERO);
            let mut passed = Passed { offset: &mut end, last: &mut last, durable: &mut durable };
            read_segment(current, &**handle, &mut passed, before, &mut |_| Ok(true))?;
            if last > self.last_seqno {
                return Ok(true); // there is more to read in the current one
            }
            if self.is_unchanged(current)? {
                let message = format!("log segment lacks the commits up to sequence number {before}");
                return Err(Error::corruption(message).in_file(&current.path).at_offset(*offset));
            }
            break;
        }
        if self.ignores_recycling {
            self.segment = self.find_start()?;
            return Ok(true);
        }
        // Segments without commits, of opens that made none, may have been removed in between.
        let (epoch, next) = (current.header.epoch, self.last_seqno.plus(1));
        let continues = |of: &TailSegment| of.file.header.epoch > epoch && of.file.header.first_seqno == next;
        self.segment = Some(self.find_start()?.filter(continues).ok_or_else(|| recycled_error(self.last_seqno))?);
        Ok(true)
    }

    /// Whether the file of the segment still exists and has the same header.
    fn is_unchanged(&self, segment: &WalSegmentFile) -> Result<bool> {
        match find_segment_file(&*self.fs, &self.dir, segment.file, self.database_id) {
            Ok(Ok(now)) => Ok(now.header == segment.header),
            Ok(Err(_)) => Ok(false), // the next incarnation begins
            Err(error) if error.is_missing_file() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The segment that contains the next commit, or will contain it. `None` if the WAL has no segment.
    ///
    /// # Errors
    /// `Stale` if the commit was recycled.
    fn find_start(&mut self) -> Result<Option<TailSegment>> {
        let segments = self.segments()?;
        let Some(mut found) = segments.last() else { return Ok(None) };
        // From the newest segment back, along the links.
        while found.header.first_seqno.0 > self.last_seqno.0 + 1 {
            let WalSegmentHeader { previous_epoch, first_seqno: behind, .. } = found.header;
            let is_linked =
                |one: &&WalSegmentFile| one.header.epoch == previous_epoch && one.header.first_seqno <= behind;
            match segments.iter().find(is_linked) {
                Some(previous) => found = previous,
                None if self.ignores_recycling => self.last_seqno = SeqNo(behind.0 - 1),
                None => return Err(recycled_error(self.last_seqno)),
            }
        }
        let mut start = self.start_of(found, &segments)?.ok_or_else(|| recycled_error(self.last_seqno))?;
        // The commits of the segment that were passed already.
        let mut last = SeqNo(found.header.first_seqno.0 - 1);
        let mut passed = Passed { offset: &mut start.offset, last: &mut last, durable: &mut self.durable };
        let end = read_segment(&start.file, &*start.handle, &mut passed, self.last_seqno, &mut |_| Ok(true))?;
        if last < self.last_seqno && end == SegmentEnd::InGap {
            // No commit of the WAL has the numbers up to `last_seqno`, so reading begins with the gap.
            self.last_seqno = last;
        } else if last < self.last_seqno && self.may_be_ahead {
            return Ok(None);
        } else if last < self.last_seqno {
            let message = format!("sequence number {} is not in the log, which ends at {last}", self.last_seqno);
            return Err(Error::stale(message));
        }
        Ok(Some(start))
    }

    /// Opens `file`, which is one of `segments`, before its first commit. `None` if it was recycled meanwhile.
    fn start_of(&self, file: &WalSegmentFile, segments: &[WalSegmentFile]) -> Result<Option<TailSegment>> {
        let handle = match file.open(&*self.fs) {
            Err(error) if error.is_missing_file() => return Ok(None),
            opened => opened?,
        };
        if !file.is_in(&*handle)? {
            return Ok(None);
        }
        let bound = successor(segments, file).map(|next| SeqNo(next.header.first_seqno.0 - 1));
        Ok(Some(TailSegment { file: file.clone(), handle, offset: SEGMENT_HEADER_LEN as u64, bound }))
    }

    /// The segments of the WAL whose headers verify, by ascending epochs.
    fn segments(&self) -> Result<Vec<WalSegmentFile>> {
        let mut segments = Vec::new();
        for entry in self.fs.read_dir(&self.dir)? {
            let Some(file) = parse_segment_name(&entry.name).filter(|_| entry.is_file) else { continue };
            match find_segment_file(&*self.fs, &self.dir, file, self.database_id) {
                Ok(Ok(segment)) if segment.header.epoch > WalEpoch(0) => segments.push(segment),
                // A spare file, or a header that is being written.
                Ok(_) => {}
                Err(error) if error.is_missing_file() => {} // it was removed meanwhile
                Err(error) => return Err(error),
            }
        }
        segments.sort_by_key(|segment| segment.header.epoch);
        let known =
            self.known_epochs.max(self.epoch().map_or(WalEpoch(0), |epoch| WalEpoch(epoch.0.saturating_add(1))));
        let mut of_wal: Vec<WalSegmentFile> = Vec::new();
        for segment in segments {
            let before = segment.header.previous_epoch;
            if before < known || of_wal.iter().any(|one| one.header.epoch == before) {
                of_wal.push(segment);
            }
        }
        Ok(of_wal)
    }
}

/// The segment that follows `current`. If several do, recoveries have abandoned all but the newest.
fn successor<'a>(segments: &'a [WalSegmentFile], current: &WalSegmentFile) -> Option<&'a WalSegmentFile> {
    let is_successor = |one: &&WalSegmentFile| one.header.previous_epoch == current.header.epoch;
    segments.iter().rev().find(is_successor)
}

/// Whether no later segment has commits of the WAL. Those behind a recorded end are abandoned.
///
/// # Errors
/// Those of `recorded_end`.
fn is_newest(current: &WalSegmentFile, segments: &[WalSegmentFile], recorded_end: &RecordedEnd<'_>) -> Result<bool> {
    for WalSegmentHeader { epoch, first_seqno, .. } in segments.iter().map(|segment| &segment.header) {
        if *epoch > current.header.epoch && recorded_end(*epoch)?.is_none_or(|end| *first_seqno <= end) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// How far a segment was read.
struct Passed<'a> {
    offset: &'a mut u64,
    last: &'a mut SeqNo,
    durable: &'a mut SeqNo,
}

/// Passes the commits from the offset on to `visit`, and advances `passed` behind each.
fn read_segment(
    segment: &WalSegmentFile,
    file: &dyn File,
    Passed { offset, last, durable }: &mut Passed<'_>,
    limit: SeqNo,
    visit: &mut VisitCommit<'_>,
) -> Result<SegmentEnd> {
    let source = LogSource::File(file);
    let order = SeqnoOrder::Consecutive;
    let mut reader = RecordLogReader::new(source, segment.header.identity(), **offset, **last, order)?.expect_end();
    while **last < limit {
        match reader.next()? {
            LogReadResult::Watermark(through) => **durable = through.max(**durable),
            LogReadResult::End => return Ok(SegmentEnd::NoFrame),
            LogReadResult::Record(record) if record.last() > limit => {
                let is_gap = reader.payload()? == SEQNO_GAP_PAYLOAD;
                return Ok(if is_gap { SegmentEnd::InGap } else { SegmentEnd::Limit });
            }
            LogReadResult::Record(record) => {
                debug_assert_eq!(record.first_seqno.0, last.0 + 1, "no commit is passed over");
                **durable = record.durable_seqno.max(**durable);
                let end = record.last();
                let payload = reader.payload()?;
                let commit = WalCommit { first_seqno: record.first_seqno, seqno_count: record.count, payload };
                let goes_on = payload == SEQNO_GAP_PAYLOAD || visit(commit)?;
                (**offset, **last) = (reader.position(), end);
                if !goes_on {
                    return Ok(SegmentEnd::Stopped);
                }
                continue;
            }
        }
        **offset = reader.position();
    }
    Ok(SegmentEnd::Limit)
}

#[cold]
pub(crate) fn lost_error(end: SeqNo, last: SeqNo) -> Error {
    Error::stale(format!(
        "the log ends at sequence number {end}, before {last}: later commits were lost or have failed"
    ))
}

#[cold]
pub(crate) fn recycled_error(last: SeqNo) -> Error {
    let message = format!("the log does not contain the commits after sequence number {last} any more");
    Error::stale(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::version_edit::FileNumber;
    use crate::testing::wal::wal_fixture::{DATABASE, WalFixture, dir, flip_byte, wal_options};
    use crate::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind};
    use crate::vfs::OpenMode;
    use crate::wal::options::RecoveryMode;
    use crate::wal::{WalRetention, format::segment_path};

    fn fixture() -> WalFixture {
        WalFixture::open(Arc::new(MemFs::new()), wal_options(4096, true), 1).unwrap()
    }

    fn tail(fixture: &WalFixture, after: u64) -> WalTail {
        WalTail::new(Arc::clone(&fixture.fs), dir(), DATABASE, SeqNo(after), WalEpoch(u32::MAX))
    }

    /// Reads to the end, and returns the first sequence numbers of the commits.
    fn read(tail: &mut WalTail) -> Result<Vec<u64>> {
        let mut firsts = Vec::new();
        tail.read(SeqNo::MAX, &|_| Ok(None), &mut |commit| {
            firsts.push(commit.first_seqno.0);
            Ok(true)
        })?;
        Ok(firsts)
    }

    #[test]
    fn commits_follow_each_other() {
        let fixture = fixture();
        let mut tail = tail(&fixture, 0);
        assert_eq!(read(&mut tail).unwrap(), []);
        let mut wanted = Vec::new();
        for n in 0..60 {
            wanted.push(fixture.append(1 + n % 3, &vec![n as u8; 700]).unwrap().0);
            if n % 7 == 0 {
                assert_eq!(read(&mut tail).unwrap(), wanted, "also from the segments that were begun since");
                wanted.clear();
            }
            if n % 5 == 0 {
                fixture.sync(); // a watermark follows
            }
        }
        assert_eq!(read(&mut tail).unwrap(), wanted);
        assert_eq!(tail.last_seqno(), fixture.wal.appended());
    }

    #[test]
    fn reading_stops_where_it_is_told() {
        let fixture = fixture();
        for n in 0..9u8 {
            fixture.append(2, &[n; 900]).unwrap();
        }
        let mut tail = tail(&fixture, 4);
        let mut firsts = Vec::new();
        let mut visit = |commit: WalCommit<'_>| {
            firsts.push(commit.first_seqno.0);
            Ok(firsts.len() < 2)
        };
        tail.read(SeqNo(99), &|_| Ok(None), &mut visit).unwrap();
        tail.read(SeqNo(12), &|_| Ok(None), &mut visit).unwrap();
        tail.read(SeqNo(12), &|_| Ok(None), &mut visit).unwrap();
        tail.read(SeqNo(13), &|_| Ok(None), &mut visit).unwrap(); // within a commit
        assert_eq!((&firsts[..], tail.last_seqno()), (&[5, 7, 9, 11][..], SeqNo(12)));
        let failed = tail.read(SeqNo(99), &|_| Ok(None), &mut |_| Err(Error::invalid("refused")));
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(read(&mut tail).unwrap(), [13, 15, 17], "a commit that was refused is read again");
    }

    /// A follower has read further than the files go that a closed database leaves. It goes on with the next open.
    #[test]
    fn reader_ahead_of_the_log_waits() {
        let fixture = fixture();
        fixture.append(2, b"a").unwrap();
        assert_eq!(read(&mut tail(&fixture, 5)).unwrap_err().kind(), ErrorKind::Stale);
        let mut ahead = WalTail::following(Arc::clone(&fixture.fs), dir(), DATABASE, SeqNo(5), WalEpoch(u32::MAX));
        assert_eq!(read(&mut ahead).unwrap(), []);
        fixture.append(3, SEQNO_GAP_PAYLOAD).unwrap();
        fixture.append(1, b"b").unwrap();
        fixture.sync();
        fixture.append(1, b"c").unwrap();
        assert_eq!(read(&mut ahead).unwrap(), [6, 7]);
        assert_eq!(ahead.durable(), SeqNo(6));
    }

    #[test]
    fn reading_begins_within_a_gap() {
        let fixture = fixture();
        fixture.append(1, b"a").unwrap();
        fixture.append(5, SEQNO_GAP_PAYLOAD).unwrap();
        fixture.append(2, b"b").unwrap();
        for after in 1..=6 {
            assert_eq!(read(&mut tail(&fixture, after)).unwrap(), [7], "after {after}");
        }
        assert_eq!(read(&mut tail(&fixture, 7)).unwrap_err().kind(), ErrorKind::Stale, "within a commit");
    }

    /// Whether a reader is told that commits are gone, for every number of commits that it has read before the segments
    /// were recycled, and begun again or not. Regression: a reader of a segment whose file had become a spare file took
    /// its end for that of the WAL.
    #[test]
    fn recycled_commits_are_stale() {
        let (mut stale, mut read_on) = (0, 0);
        // Without further commits, up to two files keep their content as spare files.
        for (commits_read, end) in (0..24).flat_map(|commits_read| [(commits_read, 24), (commits_read, 32)]) {
            let fixture = fixture();
            let mut behind = tail(&fixture, 0);
            let append = |n: u64| fixture.append(1, &[n as u8; 900]).unwrap().0;
            let first: Vec<u64> = (0..commits_read).map(append).collect();
            assert_eq!(read(&mut behind).unwrap(), first);
            let rest: Vec<u64> = (commits_read..24).map(append).collect();
            fixture.sync();
            assert!(fixture.retire(SeqNo(20)).unwrap() > 0);
            let again: Vec<u64> = (24..end).map(append).collect(); // in recycled files
            match read(&mut behind) {
                Ok(found) => {
                    assert_eq!(found, [rest, again].concat(), "all that follow");
                    read_on += 1;
                }
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
                    assert!(commits_read < 20, "what is not retired is there");
                    stale += 1;
                }
            }
        }
        assert!(stale > 0 && read_on > 6, "{stale} {read_on}");
    }

    /// Segments A0, A and B1, of which a recovery has abandoned B1 and perhaps the last commit of A: that with the
    /// sequence number `refused`, or a torn one. Returns a reader that has read to the end of A.
    fn abandoned_segment(fs: &Arc<dyn Fs>, refused: Option<u64>) -> (WalFixture, WalTail) {
        let open = |seed, refuse_at| {
            let options = wal_options(4096, false);
            WalFixture::open_with_mode(Arc::clone(fs), options, seed, RecoveryMode::Strict, refuse_at).unwrap()
        };
        let fixture = open(1, u64::MAX);
        (1..=4u8).for_each(|n| _ = fixture.append(1, &[n; 900]).unwrap());
        // Spare files with higher numbers than the next one, as after some recycling.
        for file in [30, 20].map(FileNumber) {
            fixture.wal.create_spare_file(file).unwrap();
            fixture.wal.lock_writer().spare_files.push(file);
        }
        (5..=8u8).for_each(|n| _ = fixture.append(1, &[n; 900]).unwrap());
        let (path, end) = (fixture.segment_path_at(1), fixture.wal.segments()[1].end_offset);
        drop(fixture);
        if refused.is_none() {
            flip_byte(fs, &path, end - 800);
        }
        let fixture = open(2, refused.unwrap_or(u64::MAX));
        let mut reader = tail(&fixture, 0);
        reader.read(SeqNo(fixture.replayed.len() as u64), &|_| Ok(None), &mut |_| Ok(true)).unwrap();
        fixture.sync();
        assert!(fixture.retire(SeqNo(3)).unwrap() > 0);
        while fixture.wal.segments().len() < 3 {
            fixture.append(1, &[100; 900]).unwrap();
        }
        fixture.sync();
        assert!(fixture.retire(fixture.wal.durable()).unwrap() > 0);
        (fixture, reader)
    }

    /// Regression: an abandoned segment outlives the one that a recovery has begun in its place. A reader of the one
    /// before them listed the directory without end, or took the abandoned commit for damage.
    #[test]
    fn abandoned_segment_is_not_the_next() {
        for refused in [Some(6), None] {
            let faulty = FaultFs::new(Arc::new(MemFs::new()));
            let (_fixture, mut reader) = abandoned_segment(&(Arc::new(faulty.clone()) as _), refused);
            faulty.inject(FaultPlan::new(OpKind::ReadDir, 100, Fault::Error(std::io::ErrorKind::Other)));
            assert_eq!(read(&mut reader).unwrap_err().kind(), ErrorKind::Stale, "refused: {refused:?}");
        }
    }

    /// Regression: a reader returned commits that a recovery had abandoned, because the segment that had replaced
    /// theirs was recycled.
    #[test]
    fn recorded_end_outlives_segments() {
        let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
        let open = |seed, refuse_at| {
            let options = wal_options(4096, false);
            WalFixture::open_with_mode(Arc::clone(&fs), options, seed, RecoveryMode::Strict, refuse_at).unwrap()
        };
        let fixture = open(1, u64::MAX);
        (1..=5u8).for_each(|n| _ = fixture.append(1, &[n; 900]).unwrap());
        let abandoned = fixture.wal.segments()[1].first_seqno;
        let last_epoch = fixture.wal.segments().last().unwrap().epoch;
        fixture.wal.sync_sealed(true).unwrap();
        drop(fixture);
        let fixture = open(2, abandoned.0);
        let end = SeqNo(abandoned.0 - 1);
        let mut reader = tail(&fixture, 0);
        reader.read(end, &|_| Ok(None), &mut |_| Ok(true)).unwrap();
        while fixture.wal.segments().len() < 4 {
            fixture.append(1, &[100; 900]).unwrap();
        }
        fixture.sync();
        assert!(fixture.retire(fixture.wal.durable()).unwrap() > 0);
        let mut returned = 0;
        let recorded_end = |epoch| Ok((epoch <= last_epoch).then_some(end));
        let read = reader.read(SeqNo::MAX, &recorded_end, &mut |_| {
            returned += 1;
            Ok(true)
        });
        assert_eq!((read.unwrap_err().kind(), returned), (ErrorKind::Stale, 0));
    }

    #[test]
    fn retained_segments_are_read() {
        let fixture = fixture();
        (0..40u8).for_each(|n| _ = fixture.append(1, &[n; 900]).unwrap());
        fixture.sync();
        let retained = |read_through, max_bytes| {
            let retention = WalRetention { max_bytes, needed_after_ns: None, read_through };
            fixture.retire_unless_retained(SeqNo(36), || retention).unwrap();
            fixture.wal.retained_segments().first().map(|oldest| oldest.first_seqno)
        };
        assert_eq!(retained(Some(SeqNo(0)), u64::MAX), Some(SeqNo(1)));
        assert_eq!(read(&mut tail(&fixture, 0)).unwrap().len(), 40);
        let oldest = retained(Some(SeqNo(10)), u64::MAX).unwrap();
        assert!((2..=11).contains(&oldest.0), "the segment with the next commit is kept");
        assert_eq!(read(&mut tail(&fixture, 10)).unwrap().len(), 30);
        let oldest = retained(Some(SeqNo(10)), 2 * 4096).unwrap();
        assert!(oldest > SeqNo(20), "{oldest:?}");
        assert_eq!(read(&mut tail(&fixture, 10)).unwrap_err().kind(), ErrorKind::Stale);
        assert_eq!(retained(None, u64::MAX), None);
    }

    /// A commit that does not verify is an error, also if later ones do.
    #[test]
    fn damage_is_no_end() {
        let fixture = fixture();
        (0..12u8).for_each(|n| _ = fixture.append(1, &[n; 900]).unwrap());
        let segments = fixture.wal.segments();
        let file = fixture.fs.open(&segment_path(dir(), segments[1].file), OpenMode::Write).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 700).unwrap();
        file.write_at(&[byte[0] ^ 1], 700).unwrap();
        let error = read(&mut tail(&fixture, 0)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corruption, "{error}");
        assert_eq!(error.file().unwrap(), segment_path(dir(), segments[1].file));
    }
}

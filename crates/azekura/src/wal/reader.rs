//! Replay: finds the segments of the write-ahead log (WAL), reads their commits in order, and decides where the WAL
//! ends and whether its end is a torn tail or damage. Salvage returns every complete commit that verifies, also across
//! gaps.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::iter;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::base::event::DroppedAfterDamage;
use crate::base::version_edit::{FileNumber, WalEpoch};
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::record_log::reader::{DamageScan, LogReadResult, LogSource, RecordLogReader, SeqnoOrder};
use crate::vfs::{File, Fs, OpenMode};
use crate::wal::format::{SEGMENT_HEADER_LEN, WalSegmentHeader, parse_segment_name, segment_path};
use crate::wal::options::{PartitionSeqno, RecoveryMode, WalCommit, WalReplayOptions, WalReplayReport, WalSegmentInfo};

/// Applies one commit. Returns `Some(error)` if the WAL must end before this commit; replay reports `error` if the
/// commit was durable.
pub(crate) type ApplyCommit<'a> = dyn FnMut(WalCommit<'_>) -> Result<Option<Error>> + 'a;

/// The state of a replay.
pub(crate) struct WalReader<'a> {
    pub(crate) segments: &'a WalSegmentSet,
    pub(crate) options: &'a WalReplayOptions,
    fs: &'a dyn Fs,
    dir: &'a Path,
    apply: &'a mut ApplyCommit<'a>,
    /// The WAL was durable up to here.
    durable_seqno: SeqNo,
    /// Permanent files may contain records up to here, so a point in time before it cannot be restored.
    permanent_seqno: SeqNo,
    segments_read: BTreeMap<WalEpoch, WalSegmentInfo>,
    /// The result so far, without the lists of files. No partition needs a record up to its `flushed_through`: all of
    /// them are in permanent files, or were when their segment was retired.
    report: WalReplayReport,
}

/// The point at which replay stopped: before a commit that cannot be read, or that `apply` refused.
struct WalReadEnd {
    path: PathBuf,
    offset: u64,
    /// The valid frames after this point.
    damage_scan: DamageScan,
    /// The error with which `apply` refused the commit.
    refusal_reason: Option<Error>,
}

impl<'a> WalReader<'a> {
    pub(crate) fn new(
        segments: &'a WalSegmentSet,
        options: &'a WalReplayOptions,
        fs: &'a dyn Fs,
        dir: &'a Path,
        apply: &'a mut ApplyCommit<'_>,
    ) -> WalReader<'a> {
        let (last_epoch, end) = options.wal_end.unwrap_or_default();
        let retired = retired_through(segments, options);
        let unneeded = retired.max(options.flushed_through);
        let permanent = options.durable_through.seqno.max(unneeded);
        let report = WalReplayReport {
            last_seqno: unneeded,
            last_epoch,
            flushed_through: unneeded,
            durable_through: permanent.max(end),
            ..WalReplayReport::default()
        };
        WalReader {
            segments,
            options,
            fs,
            dir,
            apply,
            durable_seqno: permanent.max(end),
            permanent_seqno: permanent,
            segments_read: BTreeMap::new(),
            report,
        }
    }

    /// The newest segment that starts at or before the first needed record. Older segments need not be read.
    pub(crate) fn first_needed_segment(&self) -> Option<&'a WalSegmentFile> {
        let begins_early =
            |segment: &&WalSegmentFile| segment.header.first_seqno.0 <= self.report.flushed_through.0 + 1;
        self.segments.segments.values().rev().find(begins_early)
    }

    fn is_strict(&self) -> bool {
        self.options.mode == RecoveryMode::Strict
    }

    /// Reads segments as long as the next one is linked.
    pub(crate) fn read_linked_segments(&mut self) -> Result<()> {
        let mut next = self.first_needed_segment();
        // The oldest listed segment after the first needed one that cannot be read.
        let mut unreadable = self.segments.unreadable.iter();
        let lost = unreadable.find(|(epoch, _)| next.is_none_or(|start| **epoch > start.header.epoch));
        if let Some((_, error)) = lost.filter(|_| self.is_strict()) {
            return Err(error.clone());
        }
        if let Some(first) = next {
            self.report.last_seqno = SeqNo(first.header.first_seqno.0 - 1);
        }
        let mut end = None;
        while let Some(segment) = next {
            self.report.last_epoch = segment.header.epoch;
            let bound = self.segment_seqno_bound(segment)?;
            end = self.read_segment(segment, bound).map_err(|e| e.in_file(&segment.path))?;
            next = if end.is_none() { self.next_linked_segment() } else { None };
        }
        self.decide_end(end, lost.is_some())
    }

    /// The segment that continues at the next sequence number. At the recorded end of the WAL, this may be a segment
    /// that follows the recorded epoch. The segments up to that epoch contain nothing valid then, and a later replay
    /// with another recorded end could not link the two, so the WAL must be rewritten.
    fn next_linked_segment(&mut self) -> Option<&'a WalSegmentFile> {
        let next = |epoch| {
            self.segments
                .successor(epoch)
                .filter(|segment| segment.header.first_seqno.0 == self.report.last_seqno.0 + 1)
        };
        let noted = self
            .options
            .wal_end
            .filter(|(ended, end)| *end == self.report.last_seqno && *ended > self.report.last_epoch);
        let linked = next(self.report.last_epoch);
        if linked.is_some() {
            return linked;
        }
        let behind_end = next(noted?.0);
        self.report.has_gaps |= behind_end.is_some();
        behind_end
    }

    /// The last valid sequence number in segments up to `epoch`, if an earlier recovery or a clean close recorded it.
    pub(crate) fn recorded_end(&self, epoch: WalEpoch) -> Option<SeqNo> {
        self.options.wal_end.filter(|(end, _)| *end >= epoch).map(|(_, seqno)| seqno)
    }

    /// The last valid sequence number in `segment`, if the next segment or the recorded end of the WAL states it.
    fn segment_seqno_bound(&self, segment: &WalSegmentFile) -> Result<Option<SeqNo>> {
        let epoch = segment.header.epoch;
        let bound = self.segments.last_seqno_before_successor(epoch).into_iter().chain(self.recorded_end(epoch)).min();
        match bound {
            Some(bound) if bound < self.report.last_seqno => {
                let message = format!("segment begins after sequence number {bound}, at which it should end");
                Err(Error::corruption(message).in_file(&segment.path).at_offset(0))
            }
            bound => Ok(bound),
        }
    }

    /// Applies the commits of a segment in order. `None` if it was read to its last sequence number, which the next
    /// segment or the recorded end of the WAL states.
    fn read_segment(&mut self, segment: &WalSegmentFile, bound: Option<SeqNo>) -> Result<Option<WalReadEnd>> {
        let file = segment.open(self.fs)?;
        let mut reader = segment.reader(&*file, SeqnoOrder::Consecutive)?;
        self.record_progress(segment, SEGMENT_HEADER_LEN as u64);
        while bound != Some(self.report.last_seqno) {
            let at = reader.position();
            let stop = match reader.next()? {
                LogReadResult::Watermark(durable) => {
                    self.note_durable(durable);
                    None
                }
                LogReadResult::Record(record) if bound.is_none_or(|bound| record.last() <= bound) => {
                    self.note_durable(record.durable_seqno);
                    let refused = self.apply_commit(record.first_seqno, record.count, &mut reader)?;
                    refused.map(|reason| (at, Some(reason)))
                }
                LogReadResult::Record(_) => Some((at, None)),
                LogReadResult::End => {
                    let at = reader.position();
                    let resumed = self.resume_after_damage(segment, &mut reader, bound)?;
                    (!resumed).then_some((at, None))
                }
            };
            if let Some((offset, refusal_reason)) = stop {
                let damage_scan = self.scan_after_damage(&mut reader)?;
                segment.check_unchanged(&*file)?;
                return Ok(Some(WalReadEnd { path: segment.path.clone(), offset, damage_scan, refusal_reason }));
            }
            self.record_progress(segment, reader.end());
        }
        Ok(None)
    }

    /// Skips damage in a part of the WAL that is not needed, if the first valid record after the damage is not after
    /// the first needed record. Just before that record, power loss may have torn a watermark, which is not damage.
    fn resume_after_damage(
        &mut self,
        segment: &WalSegmentFile,
        reader: &mut RecordLogReader<'_>,
        bound: Option<SeqNo>,
    ) -> Result<bool> {
        let through = bound.map_or(self.report.flushed_through, |bound| bound.min(self.report.flushed_through));
        if self.report.last_seqno > through {
            return Ok(false);
        }
        match reader.resume_after_damage(through) {
            Ok(true) if !self.may_be_durable_after_last(segment)? => Ok(false),
            Ok(true) => {
                (self.report.last_seqno, self.report.has_gaps) = (reader.last(), true);
                Ok(true)
            }
            // The search has given up.
            Err(error) if error.kind() != ErrorKind::Io && !self.is_strict() => Ok(false),
            stopped => stopped,
        }
    }

    /// Applies the record that the reader has just returned. Returns the error if `apply` refuses it.
    pub(crate) fn apply_commit(
        &mut self,
        first: SeqNo,
        count: u32,
        reader: &mut RecordLogReader<'_>,
    ) -> Result<Option<Error>> {
        debug_assert!(first > self.report.last_seqno, "commits are applied in the order of their sequence numbers");
        let payload = reader.payload()?;
        let refused = (self.apply)(WalCommit { first_seqno: first, seqno_count: count, payload })?;
        if refused.is_none() {
            self.report.commits += 1;
            self.report.last_seqno = reader.last();
        }
        Ok(refused)
    }

    /// Records what a frame states about the durable part of the WAL.
    fn note_durable(&mut self, durable: SeqNo) {
        self.report.durable_through = self.report.durable_through.max(durable);
    }

    /// Records how far a segment was read.
    pub(crate) fn record_progress(&mut self, segment: &WalSegmentFile, end: u64) {
        let WalSegmentHeader { epoch, first_seqno, .. } = segment.header;
        let (file, last_seqno) = (segment.file, self.report.last_seqno);
        debug_assert!(
            self.segments_read.last_key_value().is_none_or(|(last, info)| *last < epoch || info.end_offset <= end),
            "segments are read in the order of their epochs, each from its start"
        );
        self.segments_read.insert(epoch, WalSegmentInfo { epoch, file, first_seqno, last_seqno, end_offset: end });
    }

    fn scan_after_damage(&self, reader: &mut RecordLogReader<'_>) -> Result<DamageScan> {
        match reader.scan_after_damage() {
            // The scan has given up. Strict mode alone must know what was durable.
            Err(error) if error.kind() != ErrorKind::Io && !self.is_strict() => {
                Ok(DamageScan { is_partial: true, ..DamageScan::default() })
            }
            found => found,
        }
    }

    /// Whether records of `segment` after `last_seqno` may have been durable.
    fn may_be_durable_after_last(&self, segment: &WalSegmentFile) -> Result<bool> {
        let (epoch, last) = (segment.header.epoch, self.report.last_seqno);
        let is_later_lost = self.segments.unreadable.keys().any(|lost| *lost > epoch);
        if is_later_lost || self.durable_seqno > last || self.segments.has_two_successors(epoch) {
            return Ok(true);
        }
        let later = self.segments.segments_after(epoch).chain(&self.segments.unlinked);
        for segment in iter::once(segment).chain(later) {
            let behind = self.scan_segment(segment)?;
            if behind.is_partial || behind.durable_seqno > last {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn scan_segment(&self, segment: &WalSegmentFile) -> Result<DamageScan> {
        let file = segment.open(self.fs)?;
        let mut reader = segment.reader(&*file, SeqnoOrder::Consecutive)?;
        let scan = self.scan_after_damage(&mut reader).map_err(|e| e.in_file(&segment.path))?;
        segment.check_unchanged(&*file).map(|()| scan)
    }

    /// Decides whether the WAL may end after `last_seqno`, where the next commit cannot be read.
    fn decide_end(&mut self, end: Option<WalReadEnd>, lost_segment: bool) -> Result<()> {
        let stopped = end.is_some();
        let WalReadEnd { mut path, offset, damage_scan: mut behind, refusal_reason: reason } =
            end.unwrap_or_else(|| self.end_without_stop());
        for segment in
            self.segments.segments_after(self.report.last_epoch).filter(|segment| !self.is_abandoned(segment))
        {
            behind = behind.merge(self.scan_segment(segment)?);
        }
        for segment in &self.segments.unlinked {
            // A segment of an interrupted rewrite states no higher durable sequence number than the records that can be
            // read again.
            let DamageScan { durable_seqno: durable, is_partial, .. } = self.scan_segment(segment)?;
            behind.is_partial |= is_partial;
            if durable > behind.durable_seqno.max(self.durable_seqno).max(self.report.last_seqno) {
                (behind.durable_seqno, path) = (durable, segment.path.clone());
            }
        }
        let durable = behind.durable_seqno.max(self.durable_seqno);
        let is_damaged = lost_segment
            || durable > self.report.last_seqno
            || (stopped && self.segments.has_two_successors(self.report.last_epoch));
        if behind.frames > 0 {
            // Report the place of the damage if `reason` names it, and not the place of the commit that refers to it.
            let place = reason.as_ref().and_then(|reason| Some((reason.file()?, reason.offset()?)));
            let (file, offset) = place.unwrap_or((&path, offset));
            self.report.dropped_after_damage =
                Some(DroppedAfterDamage { file: file.to_path_buf(), offset, frames: behind.frames });
        }
        // If all records are in permanent files, none of the WAL is needed.
        let all_flushed = self.report.flushed_through >= self.durable_seqno;
        let end =
            if all_flushed { self.report.last_seqno.max(self.report.flushed_through) } else { self.report.last_seqno };
        let is_torn = !is_damaged && !behind.is_partial;
        let is_one_point_in_time = end >= self.permanent_seqno && (is_torn || self.options.held_in_pools.seqno <= end);
        match self.options.mode {
            RecoveryMode::Strict if is_damaged => Err(reason.unwrap_or_else(|| {
                self.damage_error(durable, is_one_point_in_time.then_some(end)).in_file(path).at_offset(offset)
            })),
            RecoveryMode::PointInTime if !is_one_point_in_time => {
                Err(self.damage_error(durable, None).in_file(path).at_offset(offset))
            }
            _ => {
                self.skip_to(end);
                Ok(())
            }
        }
    }

    /// Ends the WAL at `end` if that is beyond the last record read. The sequence numbers in between form a gap.
    fn skip_to(&mut self, end: SeqNo) {
        if end > self.report.last_seqno {
            (self.report.last_seqno, self.report.has_gaps) = (end, true);
        }
    }

    /// The end of the WAL if no commit stopped the replay: before the first listed segment that is not linked.
    fn end_without_stop(&self) -> WalReadEnd {
        let listed = self.options.listed_segments.iter().filter(|(epoch, _)| *epoch > self.report.last_epoch).min();
        let listed =
            listed.or(self.options.listed_segments.iter().max()).map(|(_, file)| segment_path(self.dir, *file));
        let path = listed.unwrap_or_else(|| self.dir.to_path_buf());
        let last = self.segments.segments.get(&self.report.last_epoch).filter(|last| last.path == path);
        let offset = last.and_then(|last| self.segments_read.get(&last.header.epoch)).map_or(0, |info| info.end_offset);
        WalReadEnd { path, offset, damage_scan: DamageScan::default(), refusal_reason: None }
    }

    /// Whether the segment was abandoned by an earlier recovery: it follows the recorded end of the WAL, but does not
    /// start with the next sequence number.
    fn is_abandoned(&self, segment: &WalSegmentFile) -> bool {
        let (ended, end) = self.options.wal_end.unwrap_or_default();
        let mut root = &segment.header;
        while let Some(before) = self.segments.segments.get(&root.previous_epoch).filter(|s| s.header.epoch > ended) {
            root = &before.header;
        }
        segment.header.epoch > ended && root.previous_epoch <= ended && root.first_seqno.0 != end.0 + 1
    }

    /// The error for a damaged WAL, with advice. `end` is the sequence number at which [`RecoveryMode::PointInTime`]
    /// would end the WAL.
    fn damage_error(&self, durable: SeqNo, end: Option<SeqNo>) -> Error {
        let expected = self.report.last_seqno.0 + 1;
        let mut message =
            format!("log is damaged: sequence number {expected} cannot be read, though all up to {durable} was synced");
        let is_ahead = |mark: &&PartitionSeqno| mark.seqno > self.report.last_seqno && !mark.partition.is_empty();
        if let Some(mark) = [&self.options.durable_through, &self.options.held_in_pools].into_iter().find(is_ahead) {
            message +=
                &format!("; {} may already contain records up to sequence number {}", mark.partition, mark.seqno);
        }
        message += &match end {
            Some(end) => format!(": RecoveryMode::PointInTime goes back to sequence number {end}"),
            None => ", so the point in time before the damage cannot be restored: open a checkpoint".into(),
        };
        message += ", RecoveryMode::Salvage keeps every commit that can be read";
        Error::corruption(message)
    }

    pub(crate) fn into_report(self) -> WalReplayReport {
        let segments: Vec<WalSegmentInfo> = self.segments_read.values().copied().collect();
        let retained = self.retained_segments(&segments);
        let is_used = |file: &FileNumber| segments.iter().chain(&retained).any(|info| info.file == *file);
        let spare_files = self.segments.valid_files.iter().copied().filter(|file| !is_used(file)).collect();
        let highest_epoch = self.segments.highest_epoch.max(self.report.last_epoch);
        let last_epoch = if segments.is_empty() { highest_epoch } else { self.report.last_epoch };
        debug_assert!(last_epoch <= highest_epoch, "the next segment gets an epoch above all others");
        let has_unlinked = !self.segments.unlinked.is_empty();
        WalReplayReport { last_epoch, highest_epoch, segments, retained, spare_files, has_unlinked, ..self.report }
    }

    /// The listed segments from which links lead to the first one of `segments`, oldest first. None if the WAL will be
    /// rewritten, because then no link leads to its first segment.
    fn retained_segments(&self, segments: &[WalSegmentInfo]) -> Vec<WalSegmentInfo> {
        let mut retained = VecDeque::new();
        let mut next = segments.first().filter(|_| self.options.retains_segments && !self.report.has_gaps);
        let mut next = next.take().and_then(|first| self.segments.segments.get(&first.epoch));
        while let Some(segment) = next {
            let WalSegmentHeader { previous_epoch, first_seqno: behind, .. } = segment.header;
            let is_listed = |one: &&WalSegmentFile| self.options.listed_segments.contains(&(previous_epoch, one.file));
            next = self.segments.segments.get(&previous_epoch).filter(is_listed);
            next = next.filter(|one| one.header.first_seqno <= behind);
            let Some(one) = next else { break };
            let end_offset = one.len;
            if end_offset <= SEGMENT_HEADER_LEN as u64 {
                break; // an open on a full disk has truncated it
            }
            retained.push_front(WalSegmentInfo {
                epoch: previous_epoch,
                file: one.file,
                first_seqno: one.header.first_seqno,
                last_seqno: SeqNo(behind.0 - 1),
                end_offset,
            });
        }
        retained.into()
    }
}

/// The last sequence number of the retired segments. The manifest drops a segment only when none of its records is
/// needed.
fn retired_through(segments: &WalSegmentSet, options: &WalReplayOptions) -> SeqNo {
    let (ended, end) = options.wal_end.unwrap_or_default();
    let Some(oldest) = options.listed_segments.iter().map(|(epoch, _)| *epoch).min() else { return end };
    match segments.segments.get(&oldest) {
        Some(segment) if oldest <= ended => SeqNo(segment.header.first_seqno.0 - 1),
        // Another segment was between the recorded end and this one; it was retired.
        Some(segment) if segment.header.previous_epoch > ended => end.max(SeqNo(segment.header.first_seqno.0 - 1)),
        // A clean close records the end of the WAL after it has begun a segment, whose header may not be durable. The
        // earlier segments are retired.
        None if oldest == ended && !segments.unreadable.contains_key(&oldest) => end,
        _ if oldest <= ended => SeqNo::ZERO,
        _ => end,
    }
}

/// A segment file with a valid header. It is not open: there may be more retained segments than a process may open.
#[derive(Clone, Debug)]
pub(crate) struct WalSegmentFile {
    pub(crate) file: FileNumber,
    pub(crate) path: PathBuf,
    /// Length in bytes when the header was read.
    len: u64,
    pub(crate) header: WalSegmentHeader,
}

impl WalSegmentFile {
    pub(crate) fn open(&self, fs: &dyn Fs) -> Result<Arc<dyn File>> {
        fs.open(&self.path, OpenMode::Read)
    }

    /// Checks that an open file still has this segment.
    ///
    /// # Errors
    /// `Conflict` if it was recycled meanwhile.
    fn check_unchanged(&self, file: &dyn File) -> Result<()> {
        if self.is_in(file)? {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Conflict, "the segment was recycled while it was read").in_file(&self.path))
    }

    /// Whether an open file still has this segment.
    pub(crate) fn is_in(&self, file: &dyn File) -> Result<bool> {
        let mut bytes = [0; SEGMENT_HEADER_LEN];
        let len = file.read_at(&mut bytes, 0)?;
        Ok(WalSegmentHeader::decode(&bytes[..len]).is_ok_and(|header| header == self.header))
    }

    /// Whether the segment, which follows none of the WAL, can be read and has no watermark.
    pub(crate) fn is_of_rewrite(&self, fs: &dyn Fs) -> bool {
        let scan = |file: &dyn File| self.reader(file, SeqnoOrder::Consecutive)?.scan_after_damage();
        self.open(fs).and_then(|file| scan(&*file)).is_ok_and(|scan| scan.durable_seqno == SeqNo::ZERO)
    }

    fn reader<'f>(&self, file: &'f dyn File, order: SeqnoOrder) -> Result<RecordLogReader<'f>> {
        self.header.reader(LogSource::File(file), order)
    }
}

/// The segment files of the directory.
#[derive(Debug, Default)]
pub(crate) struct WalSegmentSet {
    /// The listed segments, and the unlisted ones that follow them and were begun after the manifest recorded the end
    /// of the WAL, by epoch. Each one is linked to the segment before it, or damage follows.
    pub(crate) segments: BTreeMap<WalEpoch, WalSegmentFile>,
    /// Listed segments whose file is missing or has an invalid header, by epoch.
    pub(crate) unreadable: BTreeMap<WalEpoch, Error>,
    /// Segments above the recorded end of the WAL that are neither listed nor linked. An interrupted open left them, or
    /// the manifest has lost its last edits.
    pub(crate) unlinked: Vec<WalSegmentFile>,
    /// Every file with a valid header. Incomplete files of a crash are excluded: if such a file were listed again and
    /// then lost its new header, it would look damaged.
    pub(crate) valid_files: Vec<FileNumber>,
    /// The highest epoch in any header or in the manifest.
    pub(crate) highest_epoch: WalEpoch,
}

/// Reads the headers of all segment files.
///
/// # Errors
/// `Corruption` naming the file if two have the same epoch, or if one belongs to another database; `Unsupported` if a
/// newer version wrote one.
pub(crate) fn find_segments(
    fs: &dyn Fs,
    dir: &Path,
    database_id: [u8; 16],
    options: &WalReplayOptions,
) -> Result<WalSegmentSet> {
    let mut segments = WalSegmentSet::default();
    let mut found: BTreeMap<FileNumber, Result<WalSegmentFile>> = BTreeMap::new();
    for entry in fs.read_dir(dir)? {
        let is_ours =
            |file: &FileNumber| entry.is_file && (options.file_number_limit == 0 || file.0 < options.file_number_limit);
        if let Some(file) = parse_segment_name(&entry.name).filter(is_ours) {
            found.insert(file, find_segment_file(fs, dir, file, database_id)?);
        }
    }
    check_epochs(&found)?;
    segments.valid_files = found.iter().filter(|(_, segment)| segment.is_ok()).map(|(file, _)| *file).collect();
    let (ended, _) = options.wal_end.unwrap_or_default();
    let listed_epochs = options.listed_segments.iter().map(|(epoch, _)| *epoch);
    let epochs = found.values().flatten().map(|segment| segment.header.epoch).chain(listed_epochs).chain([ended]);
    segments.highest_epoch = epochs.max().unwrap_or_default();
    let mut known: BTreeSet<WalEpoch> =
        options.listed_segments.iter().map(|(epoch, _)| *epoch).chain([ended]).collect();
    for (epoch, file) in &options.listed_segments {
        match resolve_listed_segment(found.remove(file), *epoch, *file, dir) {
            Ok(Some(segment)) => drop(segments.segments.insert(*epoch, segment)),
            Ok(None) => {} // the segment was never synced
            Err(e) => drop(segments.unreadable.insert(*epoch, e)),
        }
    }
    // An unlisted segment is valid only if it was begun after the manifest recorded the end of the WAL. All other
    // unlisted segments are obsolete, or were left by an interrupted open.
    let mut unlisted: Vec<WalSegmentFile> = found.into_values().flatten().filter(|s| s.header.epoch > ended).collect();
    unlisted.sort_by_key(|segment| segment.header.epoch);
    for segment in unlisted {
        if known.contains(&segment.header.previous_epoch) {
            known.insert(segment.header.epoch);
            segments.segments.insert(segment.header.epoch, segment);
        } else {
            segments.unlinked.push(segment);
        }
    }
    Ok(segments)
}

/// Segment files that are not part of the WAL and that no recovery mode can use: segments from before the recorded end
/// of the WAL, and those of [`unfinished_rewrites`].
///
/// # Errors
/// As [`find_segments`].
pub(crate) fn removable_segments(
    fs: &dyn Fs,
    dir: &Path,
    database_id: [u8; 16],
    options: &WalReplayOptions,
) -> Result<Vec<FileNumber>> {
    let segments = find_segments(fs, dir, database_id, options)?;
    let mut used: Vec<FileNumber> = options.listed_segments.iter().map(|(_, file)| *file).collect();
    used.extend(segments.segments.values().map(|segment| segment.file));
    used.extend(segments.unlinked.iter().filter(|s| !s.is_of_rewrite(fs)).map(|segment| segment.file));
    Ok(segments.valid_files.into_iter().filter(|file| !used.contains(file)).collect())
}

/// Segment files of rewrites that were interrupted: they follow no segment of the WAL and have no watermark. Others
/// that follow none may contain synced commits whose manifest entry was lost.
///
/// # Errors
/// As [`find_segments`].
pub(crate) fn unfinished_rewrites(
    fs: &dyn Fs,
    dir: &Path,
    database_id: [u8; 16],
    options: &WalReplayOptions,
) -> Result<Vec<FileNumber>> {
    let unlinked = find_segments(fs, dir, database_id, options)?.unlinked;
    Ok(unlinked.into_iter().filter(|segment| segment.is_of_rewrite(fs)).map(|segment| segment.file).collect())
}

/// Reads the header of a segment file. The outer error is from the file system, the inner one from the header.
pub(crate) fn find_segment_file(
    fs: &dyn Fs,
    dir: &Path,
    file: FileNumber,
    database_id: [u8; 16],
) -> Result<Result<WalSegmentFile>> {
    let path = segment_path(dir, file);
    let handle = fs.open(&path, OpenMode::Read)?;
    let mut bytes = [0; SEGMENT_HEADER_LEN];
    let len = handle.read_at(&mut bytes, 0)?;
    match WalSegmentHeader::decode(&bytes[..len]) {
        Ok(header) if header.database_id != database_id => {
            Err(Error::corruption("segment belongs to another database").in_file(&path))
        }
        Ok(header) => Ok(Ok(WalSegmentFile { file, path, len: handle.length()?, header })),
        Err(e) if e.kind() == ErrorKind::Corruption => Ok(Err(e.in_file(&path))),
        Err(e) => Err(e.in_file(&path)),
    }
}

fn check_epochs(found: &BTreeMap<FileNumber, Result<WalSegmentFile>>) -> Result<()> {
    let mut seen: BTreeMap<WalEpoch, &WalSegmentFile> = BTreeMap::new();
    for segment in found.values().flatten().filter(|segment| segment.header.epoch != WalEpoch(0)) {
        if let Some(other) = seen.insert(segment.header.epoch, segment) {
            let (epoch, other) = (segment.header.epoch.0, other.path.display());
            let message = format!("segment has epoch {epoch}, and so has {other}: one of them is a copy");
            return Err(Error::corruption(message).in_file(&segment.path));
        }
    }
    Ok(())
}

/// Resolves a segment that the manifest lists. `None` if the segment was never synced and power loss left the old
/// content of the file.
fn resolve_listed_segment(
    found: Option<Result<WalSegmentFile>>,
    epoch: WalEpoch,
    file: FileNumber,
    dir: &Path,
) -> Result<Option<WalSegmentFile>> {
    let path = segment_path(dir, file);
    let Some(segment) = found else {
        return Err(Error::corruption("log segment is missing").in_file(path));
    };
    let segment = segment?;
    match segment.header.epoch {
        found if found == epoch => Ok(Some(segment)),
        found if found < epoch => Ok(None),
        found => {
            let message = format!("segment should have epoch {} and has {}", epoch.0, found.0);
            Err(Error::corruption(message).in_file(path))
        }
    }
}

impl WalSegmentSet {
    /// The segment that follows `epoch`. If several segments name `epoch` as their predecessor, the newest of them.
    pub(crate) fn successor(&self, epoch: WalEpoch) -> Option<&WalSegmentFile> {
        self.segments_after(epoch).rev().find(|segment| segment.header.previous_epoch == epoch)
    }

    /// Segments with a higher epoch, ascending.
    pub(crate) fn segments_after(&self, epoch: WalEpoch) -> impl DoubleEndedIterator<Item = &WalSegmentFile> {
        self.segments.range(WalEpoch(epoch.0.saturating_add(1))..).map(|(_, segment)| segment)
    }

    /// Whether `epoch` has a successor that itself has a successor. The second one is begun only after `epoch` is
    /// synced.
    pub(crate) fn has_two_successors(&self, epoch: WalEpoch) -> bool {
        self.segments_after(epoch).any(|a| a.header.previous_epoch == epoch && self.successor(a.header.epoch).is_some())
    }

    /// The last sequence number that `epoch` may contain, because its successor starts after it.
    pub(crate) fn last_seqno_before_successor(&self, epoch: WalEpoch) -> Option<SeqNo> {
        self.successor(epoch).map(|segment| SeqNo(segment.header.first_seqno.0 - 1))
    }
}

/// Applies every valid commit of all segments from [`WalReader::first_needed_segment`] on.
pub(crate) fn salvage_segments(wal_reader: &mut WalReader<'_>) -> Result<()> {
    let segments = wal_reader.segments;
    let start = wal_reader.first_needed_segment();
    wal_reader.report.last_seqno =
        start.map_or(wal_reader.report.last_seqno, |segment| SeqNo(segment.header.first_seqno.0 - 1));
    let oldest = start.map_or(WalEpoch(0), |segment| segment.header.epoch);
    let mut before = None;
    for segment in segments.segments.range(oldest..).map(|(_, segment)| segment) {
        let epoch = segment.header.epoch;
        // Records that an earlier recovery abandoned are not valid either: a later segment starts before them.
        let later = segments.segments_after(epoch).map(|later| SeqNo(later.header.first_seqno.0 - 1));
        let bound = later.chain(wal_reader.recorded_end(epoch)).min();
        wal_reader.report.has_gaps |= before.is_some_and(|before| before != segment.header.previous_epoch);
        let go_on =
            salvage_segment(wal_reader, segment, bound.unwrap_or(SeqNo::MAX)).map_err(|e| e.in_file(&segment.path))?;
        wal_reader.report.last_epoch = epoch;
        before = Some(epoch);
        if !go_on {
            break;
        }
    }
    wal_reader.skip_to(wal_reader.durable_seqno); // sequence numbers in permanent files are not assigned again
    Ok(())
}

/// Applies the valid commits of a segment up to `bound`. Returns false if the WAL ends here.
fn salvage_segment(wal_reader: &mut WalReader<'_>, segment: &WalSegmentFile, bound: SeqNo) -> Result<bool> {
    let file = segment.open(wal_reader.fs)?;
    let mut reader = segment.reader(&*file, SeqnoOrder::Rising)?;
    let mut skipped = false;
    loop {
        wal_reader.record_progress(segment, reader.end());
        let at = reader.position();
        match reader.next()? {
            LogReadResult::Watermark(durable) => wal_reader.note_durable(durable),
            LogReadResult::Record(record) => {
                wal_reader.note_durable(record.durable_seqno);
                let counts = record.first_seqno > wal_reader.report.last_seqno && record.last() <= bound;
                wal_reader.report.has_gaps |=
                    counts && (skipped || record.first_seqno.0 != wal_reader.report.last_seqno.0 + 1);
                if counts && wal_reader.apply_commit(record.first_seqno, record.count, &mut reader)?.is_some() {
                    return Ok(false);
                }
            }
            LogReadResult::End => {
                if !reader.skip_damage(at)? {
                    return Ok(true);
                }
                skipped = true;
            }
        }
    }
}

/// Reads the WAL in order and passes each commit to `apply`. Writes nothing. Uses memory for 2 MiB, one frame (at most
/// 16 MiB) and one commit.
///
/// # Errors
/// `Corruption` with the file and the offset for damage that the mode refuses, and for damage after which
/// [`RecoveryMode::PointInTime`] cannot restore one point in time of all partitions; `Unsupported` if a newer version
/// wrote a part of the WAL; the errors of `apply`.
pub(crate) fn replay(
    fs: Arc<dyn Fs>,
    dir: &Path,
    database_id: [u8; 16],
    options: WalReplayOptions,
    apply: &mut ApplyCommit<'_>,
) -> Result<WalReplayReport> {
    let segments = find_segments(&*fs, dir, database_id, &options)?;
    let mut reader = WalReader::new(&segments, &options, &*fs, dir, apply);
    if options.mode == RecoveryMode::Salvage {
        salvage_segments(&mut reader)?
    } else {
        reader.read_linked_segments()?
    }
    let report = reader.into_report();
    let permanent = options.flushed_through.max(options.durable_through.seqno);
    debug_assert!(report.last_seqno >= permanent, "the WAL does not end before what permanent files contain");
    Ok(report)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::base::version_edit::WalEpoch;
    use crate::base::{ErrorKind, SeqNo};
    use crate::testing::seeded_rng::SeededRng;
    use crate::testing::wal::wal_fixture::{
        DATABASE, OwnedWalCommit, WalFixture, dir, file_bytes, flip_byte, load_manifest_state, overwrite,
        random_length, random_payload, replay_from, replay_with_mode, wal_options, wal_with_flushed_damage,
    };
    use crate::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, Survival};
    use crate::vfs::OpenMode;

    fn mem_fs() -> (MemFs, Arc<dyn Fs>) {
        let fs = MemFs::new();
        (fs.clone(), Arc::new(fs))
    }

    fn open_wal(fs: &Arc<dyn Fs>, size: u64) -> WalFixture {
        WalFixture::open(Arc::clone(fs), wal_options(size, false), 1).unwrap()
    }

    #[test]
    fn random_commits_come_back_over_several_opens() {
        for (seed, mapped) in [(1, false), (2, true), (3, false), (4, true)] {
            let (_, fs) = mem_fs();
            let mut rng = SeededRng::new(seed);
            let mut wrote: Vec<OwnedWalCommit> = Vec::new();
            for generation in 0..5 {
                let fixture = WalFixture::open(Arc::clone(&fs), wal_options(4096, mapped), generation).unwrap();
                assert_eq!(fixture.replayed, wrote);
                for _ in 0..rng.below(60) {
                    let len = random_length(&mut rng);
                    wrote.push(fixture.append(1 + rng.below(5) as u32, &random_payload(&mut rng, len)).unwrap());
                    match rng.below(9) {
                        0 => fixture.sync(),
                        1 => fixture.wal.seal().unwrap(),
                        2 => drop(fixture.wal.sync_sealed(true).unwrap()),
                        _ => {}
                    }
                }
                let segments = fixture.wal.segments();
                assert!(segments.windows(2).all(|pair| pair[0].last_seqno.0 + 1 == pair[1].first_seqno.0));
                assert_eq!(replay_with_mode(&fs, RecoveryMode::Strict).unwrap().1.segments.len(), segments.len());
            }
            assert_eq!(replay_with_mode(&fs, RecoveryMode::Salvage).unwrap().0, wrote);
            assert_eq!(replay_with_mode(&fs, RecoveryMode::PointInTime).unwrap().0, wrote);
        }
    }

    /// Checks the result of reading a damaged WAL: a prefix of `wrote`, or an error that names a file.
    fn expect_prefix_or_error(
        what: &str,
        result: Result<(Vec<OwnedWalCommit>, WalReplayReport)>,
        wrote: &[OwnedWalCommit],
    ) -> Option<usize> {
        match result {
            Ok((commits, report)) => {
                assert!(wrote.starts_with(&commits), "{what}: not a prefix");
                let end = commits.last().map_or(0, |(first, count, _)| first + u64::from(*count) - 1);
                assert_eq!(report.last_seqno, SeqNo(end), "{what}");
                Some(commits.len())
            }
            Err(e) => {
                assert!(matches!(e.kind(), ErrorKind::Corruption | ErrorKind::Unsupported), "{what}: {e}");
                assert!(e.file().is_some(), "{what}: {e} names no file");
                None
            }
        }
    }

    /// Ten commits over two segments. All but the last three are synced, with a watermark frame after the sync.
    fn small_wal(fs: &Arc<dyn Fs>) -> (WalFixture, Vec<OwnedWalCommit>) {
        let fixture = open_wal(fs, 4096);
        let mut rng = SeededRng::with_stream(9, 9);
        let mut wrote = Vec::new();
        for i in 0..10 {
            wrote.push(fixture.append(1 + i % 3, &random_payload(&mut rng, 30 + 7 * i as usize)).unwrap());
            if i == 3 {
                fixture.wal.seal().unwrap();
            }
            if i == 6 {
                fixture.sync();
            }
        }
        (fixture, wrote)
    }

    #[test]
    fn flipped_byte_never_loses_synced_commits() {
        let (mem, fs) = mem_fs();
        let (fixture, wrote) = small_wal(&fs);
        let (durable, segments) = (fixture.wal.durable().0, fixture.wal.segments());
        let synced = wrote.iter().filter(|(first, ..)| *first <= durable).count();
        assert_eq!((synced, segments.len()), (7, 2));
        let (mut dropped, mut corrupt) = (0, 0);
        for (at, info) in segments.iter().enumerate() {
            for offset in 0..info.end_offset + 16 {
                let copy: Arc<dyn Fs> = Arc::new(mem.fork());
                flip_byte(&copy, &fixture.segment_path_at(at), offset);
                let what = format!("segment {at} byte {offset}");
                let strict = replay_with_mode(&copy, RecoveryMode::Strict);
                let report = strict.as_ref().ok().map(|(_, report)| report.clone());
                match expect_prefix_or_error(&what, strict, &wrote) {
                    Some(n) => assert!(n >= synced, "{what}: synced commits are lost"),
                    None => corrupt += 1,
                }
                if let Some(found) = report.and_then(|report| report.dropped_after_damage) {
                    assert!(found.frames > 0 && found.file == fixture.segment_path_at(at) && found.offset <= offset);
                    dropped += 1;
                }
                let point = replay_with_mode(&copy, RecoveryMode::PointInTime);
                expect_prefix_or_error(&what, point, &wrote).or_else(|| (offset < 512).then_some(0)).expect(&what);
                let salvaged =
                    replay_with_mode(&copy, RecoveryMode::Salvage).map(|(commits, _)| commits).unwrap_or_default();
                assert!(salvaged.iter().all(|commit| wrote.contains(commit)), "{what}: a wrong payload");
                assert!(offset < 512 || salvaged.len() + 1 >= wrote.len(), "{what}: salvage lost more than one");
            }
        }
        assert!(corrupt > 400 && dropped > 50, "{corrupt} {dropped}");
    }

    #[test]
    fn truncated_segment_gives_prefix_or_error() {
        let (mem, fs) = mem_fs();
        let (fixture, wrote) = small_wal(&fs);
        for (at, info) in fixture.wal.segments().iter().enumerate() {
            for len in 0..info.end_offset {
                let copy: Arc<dyn Fs> = Arc::new(mem.fork());
                copy.open(&fixture.segment_path_at(at), OpenMode::Write).unwrap().set_length(len).unwrap();
                let read = expect_prefix_or_error(
                    &format!("segment {at} cut at {len}"),
                    replay_with_mode(&copy, RecoveryMode::Strict),
                    &wrote,
                );
                assert!(at == 1 || read.is_none_or(|n| n == wrote.len()), "the first segment was synced");
            }
        }
    }

    #[test]
    fn lost_page_below_watermark_is_corruption() {
        let (mem, fs) = mem_fs();
        let fixture = open_wal(&fs, 1 << 20);
        let mut rng = SeededRng::with_stream(1, 1);
        let wrote: Vec<OwnedWalCommit> =
            (0..100).map(|_| fixture.append(1, &random_payload(&mut rng, 300)).unwrap()).collect();
        fixture.sync();
        overwrite(&fs, &fixture.segment_path_at(0), 8192, &[0; 4096]);
        let error = replay_with_mode(&fs, RecoveryMode::Strict).unwrap_err();
        assert_eq!((error.kind(), error.file()), (ErrorKind::Corruption, Some(fixture.segment_path_at(0).as_path())));
        assert!((7800..8192).contains(&error.offset().unwrap()));
        let (point, report) = replay_with_mode(&fs, RecoveryMode::PointInTime).unwrap();
        assert!(wrote.starts_with(&point) && point.len() > 20 && point.len() < 30);
        assert!(report.dropped_after_damage.unwrap().frames > 50);
        let (salvaged, _) = replay_with_mode(&fs, RecoveryMode::Salvage).unwrap();
        assert!(salvaged.len() > 80 && salvaged.iter().all(|commit| wrote.contains(commit)));
        assert!(salvaged.is_sorted());
        drop(mem);
    }

    /// Power loss tore the watermark behind the last flushed record, and left the unsynced commit after it. The WAL was
    /// rewritten as if commits were lost, so that readers of changes were told that theirs were.
    #[test]
    fn torn_watermark_is_not_a_gap() {
        for is_durable in [false, true] {
            let (_, fs) = mem_fs();
            let fixture = open_wal(&fs, 8192);
            let mut wrote = vec![fixture.append(1, &[1; 60]).unwrap()];
            let torn = fixture.wal.segments()[0].end_offset;
            fixture.sync();
            assert!(fixture.wal.segments()[0].end_offset > torn, "a watermark was written");
            wrote.push(fixture.append(1, &[2; 60]).unwrap());
            if is_durable {
                fixture.sync();
            }
            flip_byte(&fs, &fixture.segment_path_at(0), torn + 20);
            let (read, report) = replay_from(&fs, RecoveryMode::Strict, SeqNo(1), u64::MAX).unwrap();
            let end = if is_durable { 2 } else { 1 };
            assert_eq!((&read[..], report.last_seqno), (&wrote[..end], SeqNo(end as u64)));
            assert_eq!(report.has_gaps, is_durable);
        }
    }

    /// Regression: in a recovery to a point in time, one I/O error of the search for the end of damage ended the log at
    /// the damage. Later opens, without errors, lacked the synced commits behind it.
    #[test]
    fn one_failed_call_ends_no_log() {
        for mode in [RecoveryMode::Strict, RecoveryMode::PointInTime, RecoveryMode::Salvage] {
            let faulty = FaultFs::new(Arc::new(MemFs::new()));
            let fs: Arc<dyn Fs> = Arc::new(faulty.clone());
            wal_with_flushed_damage(&fs);
            let whole = replay_from(&fs, mode, SeqNo(3), u64::MAX).unwrap();
            assert_eq!(whole.1.last_seqno, SeqNo(5));
            for op in [OpKind::Open, OpKind::Read, OpKind::Length, OpKind::ReadDir] {
                let mut failed = 0;
                for nth in 1.. {
                    faulty.clear_faults();
                    let before = faulty.fault_count();
                    faulty.inject(FaultPlan::new(op, nth, Fault::Error(std::io::ErrorKind::Other)));
                    let read = replay_from(&fs, mode, SeqNo(3), u64::MAX);
                    if faulty.fault_count() == before {
                        break;
                    }
                    let same = read.as_ref().is_ok_and(|read| *read == whole);
                    let is_io = read.is_err_and(|error| error.kind() == ErrorKind::Io);
                    assert!(same || is_io, "{mode:?}, {op:?} {nth}");
                    failed += u64::from(is_io);
                }
                assert!(failed > 0, "{mode:?}, {op:?}");
            }
        }
    }

    /// Regression: a follower that was opened lacked synced commits. Their segment was recycled between the look at its
    /// header and the read.
    #[test]
    fn segment_recycled_before_the_read_is_no_end() {
        let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
        let fixture = WalFixture::open(Arc::clone(&fs), wal_options(4096, false), 1).unwrap();
        let append = || fixture.append(1, &[1; 3000]).unwrap();
        (0..2).for_each(|_| _ = append()); // one in each segment
        fixture.sync();
        let known = load_manifest_state(&fs).unwrap();
        let options = WalReplayOptions {
            listed_segments: known.listed_segments.into_iter().collect(),
            wal_end: known.wal_end,
            ..WalReplayOptions::default()
        };
        let segments = find_segments(&*fs, dir(), DATABASE, &options).unwrap();
        let last = fixture.wal.segments()[1];
        let is_recycled = (0..200).any(|_| {
            append();
            fixture.sync();
            fixture.retire(fixture.wal.durable()).unwrap();
            let newest = *fixture.wal.segments().last().unwrap();
            newest.file == last.file && newest.epoch > last.epoch
        });
        assert!(is_recycled);
        let mut apply = |_: WalCommit<'_>| Ok(None);
        let read = WalReader::new(&segments, &options, &*fs, dir(), &mut apply).read_linked_segments();
        assert_eq!(read.unwrap_err().kind(), ErrorKind::Conflict);
    }

    /// Regression: the search behind damage gave up, because a value looks like the headers of many frames, and the
    /// damage counted as a torn tail. A recovery to a point in time opened a mapped pool that has the later commits.
    #[test]
    fn search_given_up_may_have_missed_commits() {
        let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
        let fixture = WalFixture::open(Arc::clone(&fs), wal_options(64 << 20, false), 1).unwrap();
        let mut like_frames = vec![7; 8 << 10];
        for head in like_frames[6..].chunks_exact_mut(24) {
            head[8..12].copy_from_slice(&[0xff, 0xff, 0xef, 0]);
            head[12..16].copy_from_slice(&1u32.to_le_bytes());
            head[23] = 1;
        }
        fixture.append(1, &like_frames).unwrap();
        fixture.append(1, b"two").unwrap();
        fixture.sync();
        let path = fixture.segment_path_at(0);
        fs.open(&path, OpenMode::Write).unwrap().allocate(64 << 20).unwrap();
        drop(fixture);
        flip_byte(&fs, &path, SEGMENT_HEADER_LEN as u64 + 1);
        let known = load_manifest_state(&fs).unwrap();
        for (seqno, is_refused) in [(0, false), (2, true)] {
            let options = WalReplayOptions {
                mode: RecoveryMode::PointInTime,
                listed_segments: known.listed_segments.clone().into_iter().collect(),
                wal_end: known.wal_end,
                held_in_pools: PartitionSeqno { seqno: SeqNo(seqno), partition: "pool".into() },
                ..WalReplayOptions::default()
            };
            let read = replay(Arc::clone(&fs), dir(), DATABASE, options, &mut |_| Ok(None));
            let error = read.err().map(|error| error.kind());
            assert_eq!(error, is_refused.then_some(ErrorKind::Corruption), "the pool has {seqno}");
        }
    }

    #[test]
    fn damage_before_last_two_segments_is_corruption() {
        let (_, fs) = mem_fs();
        let fixture = open_wal(&fs, 4096);
        for _ in 0..3 {
            fixture.append(1, &[7; 500]).unwrap();
            fixture.wal.seal().unwrap();
        }
        // Erase the records of the later segments and keep their headers.
        for segment in 1..3 {
            let path = fixture.segment_path_at(segment);
            let len = file_bytes(&fs, &path).len();
            overwrite(&fs, &path, 512, &vec![0; len - 512]);
        }
        let end = fixture.wal.segments()[0].end_offset;
        flip_byte(&fs, &fixture.segment_path_at(0), end - 20);
        assert_eq!(
            replay_with_mode(&fs, RecoveryMode::Strict).unwrap_err().file(),
            Some(fixture.segment_path_at(0).as_path())
        );
    }

    #[test]
    fn torn_tails_of_several_opens_are_not_damage() {
        let (_, fs) = mem_fs();
        let mut commits_expected: Vec<OwnedWalCommit> = Vec::new();
        for generation in 0..6 {
            let fixture = open_wal(&fs, 8192);
            assert_eq!(fixture.replayed, commits_expected, "generation {generation}");
            for i in 0..4 {
                commits_expected.push(fixture.append(2, &[generation; 90]).unwrap());
                if i == 1 {
                    fixture.sync();
                }
            }
            // The fifth commit is torn, and the sixth one after it is complete.
            let start = fixture.wal.segments().last().unwrap().end_offset;
            fixture.append(1, &[1; 50]).unwrap();
            fixture.append(1, &[2; 50]).unwrap();
            let segment = fixture.wal.segments().len() - 1;
            flip_byte(&fs, &fixture.segment_path_at(segment), start + 30);
        }
        let (commits, report) = replay_with_mode(&fs, RecoveryMode::Strict).unwrap();
        assert_eq!(commits, commits_expected);
        assert_eq!(report.dropped_after_damage.unwrap().frames, 1);
        assert_eq!(
            replay_with_mode(&fs, RecoveryMode::Salvage).unwrap().0[..commits_expected.len()],
            commits_expected,
            "salvage ends at the recorded end too"
        );
    }

    #[test]
    fn wal_ended_by_caller_stays_ended() {
        let (_, fs) = mem_fs();
        let fixture = open_wal(&fs, 8192);
        let mut commits_expected: Vec<OwnedWalCommit> = (0..8).map(|i| fixture.append(1, &[i; 60]).unwrap()).collect();
        commits_expected.truncate(5);
        for generation in 0..3 {
            // The first open refuses commit 6; later ones must not find it again.
            let refuse_at = if generation == 0 { 6 } else { u64::MAX };
            let fixture = WalFixture::open_with_mode(
                Arc::clone(&fs),
                wal_options(8192, false),
                generation,
                RecoveryMode::Strict,
                refuse_at,
            );
            let fixture = fixture.unwrap();
            assert_eq!(fixture.replayed, commits_expected, "generation {generation}");
            commits_expected.push(fixture.append(1, &[99; 70]).unwrap());
            commits_expected.push(fixture.append(1, &[98; 70]).unwrap());
        }
    }

    #[test]
    fn refused_synced_commit_is_manifest_corruption() {
        let (_, fs) = mem_fs();
        let fixture = open_wal(&fs, 8192);
        for i in 0..8 {
            fixture.append(1, &[i; 60]).unwrap();
        }
        fixture.sync();
        let error = replay_from(&fs, RecoveryMode::Strict, SeqNo::ZERO, 6).unwrap_err();
        assert_eq!((error.kind(), error.file()), (ErrorKind::Corruption, Some(dir().join("MANIFEST").as_path())));
    }

    /// An open that skipped damage recorded an end of the WAL after an empty segment, and the file of that segment was
    /// removed. The WAL looked damaged. A later replay with another recorded end cannot link the two parts, so the WAL
    /// must be rewritten.
    #[test]
    fn noted_end_leads_to_the_segment_behind() {
        let (_, fs) = mem_fs();
        let fixture = open_wal(&fs, 8192);
        let mut wrote: Vec<OwnedWalCommit> = (0..3).map(|i| fixture.append(1, &[i; 60]).unwrap()).collect();
        fixture.sync();
        fixture.wal.seal().unwrap();
        let empty = fixture.wal.segments()[1];
        let path = fixture.segment_path_at(1);
        drop(fixture);
        let fixture = open_wal(&fs, 8192);
        wrote.extend((3..6).map(|i| fixture.append(1, &[i; 60]).unwrap()));
        fixture.sync();
        fs.remove_file(&path).unwrap();
        let mut known = load_manifest_state(&fs).unwrap();
        known.listed_segments.remove(&empty.epoch);
        for mode in [RecoveryMode::Strict, RecoveryMode::PointInTime] {
            let (live, log_end) = (known.listed_segments.clone().into_iter().collect(), Some((empty.epoch, SeqNo(3))));
            let options =
                WalReplayOptions { mode, listed_segments: live, wal_end: log_end, ..WalReplayOptions::default() };
            let mut read = Vec::new();
            let report = replay(Arc::clone(&fs), dir(), DATABASE, options, &mut |commit| {
                read.push((commit.first_seqno.0, commit.seqno_count, commit.payload.to_vec()));
                Ok(None)
            });
            let report = report.unwrap_or_else(|e| panic!("{mode:?}: {e}"));
            assert_eq!((&read, report.last_seqno), (&wrote, SeqNo(6)), "{mode:?}");
            assert!(report.has_gaps, "{mode:?}: a later replay could not link the two");
        }
    }

    /// A clean close retires all segments except one that it has just begun. Power loss removed the header of that
    /// segment, and no other record said that the segments before the recorded end were retired. The WAL looked
    /// damaged.
    #[test]
    fn retired_log_is_whole_without_a_header() {
        let (_, fs) = mem_fs();
        let fixture = open_wal(&fs, 8192);
        (0..3).for_each(|i| drop(fixture.append(1, &[i; 60]).unwrap()));
        fixture.sync();
        let old = fixture.wal.segments()[0].file;
        fixture.wal.seal().unwrap();
        assert_eq!(fixture.retire(SeqNo(3)).unwrap(), 1);
        let epoch = fixture.wal.segments()[0].epoch;
        fs.remove_file(&fixture.segment_path_at(0)).unwrap();
        // The file of the new segment still has the header of its previous incarnation.
        let (live, log_end) = (vec![(epoch, old)], Some((epoch, SeqNo(3))));
        let options = WalReplayOptions { listed_segments: live, wal_end: log_end, ..WalReplayOptions::default() };
        let report = replay(Arc::clone(&fs), dir(), DATABASE, options, &mut |_| panic!("nothing is replayed")).unwrap();
        assert_eq!((report.last_seqno, report.has_gaps), (SeqNo(3), false));
    }

    #[test]
    fn point_in_time_recovery_lasts() {
        let (_, fs) = mem_fs();
        let (fixture, wrote) = small_wal(&fs);
        flip_byte(&fs, &fixture.segment_path_at(0), 700);
        drop(fixture);
        assert!(WalFixture::open(Arc::clone(&fs), wal_options(4096, false), 5).is_err());
        let fixture = WalFixture::open_with_mode(
            Arc::clone(&fs),
            wal_options(4096, false),
            5,
            RecoveryMode::PointInTime,
            u64::MAX,
        )
        .unwrap();
        let mut commits_expected = fixture.replayed.clone();
        assert!(wrote.starts_with(&commits_expected) && commits_expected.len() < 4);
        commits_expected.push(fixture.append(1, b"afterwards").unwrap());
        fixture.sync();
        drop(fixture);
        for generation in 0..3 {
            let fixture = WalFixture::open(Arc::clone(&fs), wal_options(4096, false), generation).unwrap();
            assert_eq!(fixture.replayed, commits_expected);
            commits_expected.push(fixture.append(1, b"more").unwrap());
        }
    }

    #[test]
    fn error_names_missing_or_foreign_segment() {
        let (mem, fs) = mem_fs();
        let (fixture, _) = small_wal(&fs);
        let kind_and_file = |fs: &Arc<dyn Fs>| {
            let error = replay_with_mode(fs, RecoveryMode::Strict).unwrap_err();
            (error.kind(), error.file().map(PathBuf::from))
        };
        for at in 0..2 {
            let copy: Arc<dyn Fs> = Arc::new(mem.fork());
            copy.remove_file(&fixture.segment_path_at(at)).unwrap();
            assert_eq!(kind_and_file(&copy), (ErrorKind::Corruption, Some(fixture.segment_path_at(at))), "missing");
        }
        let copy: Arc<dyn Fs> = Arc::new(mem.fork());
        copy.hard_link(&fixture.segment_path_at(1), &dir().join("000777.wal")).unwrap();
        let error = replay_with_mode(&copy, RecoveryMode::Strict).unwrap_err();
        assert!(error.message().contains("epoch") && error.message().contains(".wal"), "{error}");

        let live = load_manifest_state(&fs).unwrap().listed_segments.into_iter().collect();
        let options = WalReplayOptions { listed_segments: live, ..WalReplayOptions::default() };
        let error = replay(Arc::clone(&fs), dir(), [1; 16], options, &mut |_| Ok(None)).unwrap_err();
        assert!(error.message().contains("another database") && error.file().is_some());

        let mut head = file_bytes(&fs, &fixture.segment_path_at(0))[..64].to_vec();
        head[8] = 9;
        let sum = crate::base::checksum::xxh3(0, &head[..56]);
        head[56..].copy_from_slice(&sum.to_le_bytes());
        overwrite(&fs, &fixture.segment_path_at(0), 0, &head);
        assert_eq!(kind_and_file(&fs), (ErrorKind::Unsupported, Some(fixture.segment_path_at(0))));
    }

    #[test]
    fn unknown_files_are_ignored_and_never_recycled() {
        let (_, fs) = mem_fs();
        let (fixture, wrote) = small_wal(&fs);
        for name in ["7.wal", "x.wal", "0000001.wal", "000900.wal"] {
            create_file_with(&fs, name, &[0xaa; 600]);
        }
        let (commits, report) = replay_with_mode(&fs, RecoveryMode::Strict).unwrap();
        assert_eq!(commits, wrote);
        assert_eq!(report.spare_files, []);
        assert_eq!(report.segments, fixture.wal.segments());
    }

    fn create_file_with(fs: &Arc<dyn Fs>, name: &str, bytes: &[u8]) {
        fs.open(&dir().join(name), OpenMode::Create).unwrap().write_at(bytes, 0).unwrap();
    }

    #[test]
    fn flushed_records_are_replayed_up_to_wal_end() {
        let (_, fs) = mem_fs();
        let (_mini, wrote) = small_wal(&fs);
        let (commits, report) = replay_from(&fs, RecoveryMode::Strict, SeqNo(4), u64::MAX).unwrap();
        assert_eq!((commits, report.commits), (wrote, 10));
        let (none, report) = replay_from(&mem_fs().1, RecoveryMode::Strict, SeqNo(40), u64::MAX).unwrap();
        assert_eq!((none.len(), report.last_seqno, report.last_epoch), (0, SeqNo(40), WalEpoch(0)));
    }

    /// Runs a random history, applies many kinds of power loss at its end, and checks each result.
    fn crash_and_replay(seed: u64, mapped: bool) {
        let mem = MemFs::new();
        let fs: Arc<dyn Fs> = Arc::new(mem.clone());
        let mut rng = SeededRng::with_stream(seed, 77);
        let mut commits_expected: Vec<OwnedWalCommit> = Vec::new();
        let mut retired = SeqNo::ZERO;
        for generation in 0..4 {
            let fixture = WalFixture::open(Arc::clone(&fs), wal_options(4096, mapped), seed * 10 + generation).unwrap();
            let base = fixture.replayed.first().map_or(0, |(first, ..)| first - 1);
            let expect: Vec<OwnedWalCommit> =
                commits_expected.iter().filter(|(first, ..)| *first > base).cloned().collect();
            if !fixture.replayed.is_empty() {
                assert_eq!(fixture.replayed, expect, "seed {seed} generation {generation}");
            }
            let mut durable = fixture.wal.durable();
            for _ in 0..rng.below(50) {
                let len = random_length(&mut rng);
                commits_expected.push(fixture.append(1 + rng.below(3) as u32, &random_payload(&mut rng, len)).unwrap());
                match rng.below(8) {
                    0 => fixture.sync(),
                    1 => drop(fixture.wal.sync_sealed(true).unwrap()),
                    2 => {
                        retired = fixture.wal.durable();
                        fixture.retire(retired).unwrap();
                    }
                    _ => {}
                }
                durable = fixture.wal.durable();
            }
            for (way, survival) in
                [Survival::Random, Survival::Nothing, Survival::DataOnly, Survival::MetadataOnly, Survival::Everything]
                    .into_iter()
                    .cycle()
                    .take(12)
                    .enumerate()
            {
                let crashed = mem.fork();
                crashed.crash(survival, seed ^ (way as u64) << 20);
                let fs: Arc<dyn Fs> = Arc::new(crashed);
                check_after_crash(
                    &fs,
                    &commits_expected,
                    durable,
                    retired,
                    &format!("seed {seed} {survival:?} way {way}"),
                );
            }
            drop(fixture);
            mem.crash(Survival::Random, seed + generation);
            let (found, report) = replay_with_mode(&fs, RecoveryMode::Strict).unwrap();
            let end = found.last().map_or(report.last_seqno.0, |(first, count, _)| first + u64::from(*count) - 1);
            commits_expected.retain(|(first, ..)| *first <= end);
        }
    }

    fn check_after_crash(fs: &Arc<dyn Fs>, wrote: &[OwnedWalCommit], durable: SeqNo, retired: SeqNo, what: &str) {
        let (found, report) = replay_with_mode(fs, RecoveryMode::Strict).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(report.last_seqno >= durable, "{what}: {} was durable, {} was replayed", durable, report.last_seqno);
        if let Some((first, ..)) = found.first() {
            assert!(*first <= retired.0 + 1, "{what}: commits are missing at the start");
            let start = wrote.iter().position(|commit| commit.0 == *first).unwrap();
            assert!(wrote[start..].starts_with(&found), "{what}: not a prefix");
        }
        // The database opens, accepts writes, and opens again.
        let fixture =
            WalFixture::open(Arc::clone(fs), wal_options(4096, false), 3).unwrap_or_else(|e| panic!("{what}: {e}"));
        let new = fixture.append(1, b"after the crash").unwrap();
        fixture.sync();
        drop(fixture);
        let again =
            WalFixture::open(Arc::clone(fs), wal_options(4096, false), 4).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(again.replayed.last(), Some(&new), "{what}");
    }

    #[test]
    fn power_loss_leaves_prefix_with_all_durable() {
        for seed in 0..24 {
            crash_and_replay(seed, seed % 2 == 0);
        }
    }

    #[test]
    fn power_loss_at_every_operation() {
        let run = |mem: &MemFs| -> (Vec<OwnedWalCommit>, SeqNo, SeqNo) {
            let fs: Arc<dyn Fs> = Arc::new(mem.clone());
            let (mut wrote, mut durable, mut retired) = (Vec::new(), SeqNo::ZERO, SeqNo::ZERO);
            let Ok(fixture) = WalFixture::open(fs, wal_options(4096, false), 1) else {
                return (wrote, durable, retired);
            };
            for i in 0..30u8 {
                let first = fixture.wal.appended().plus(1).0;
                wrote.push((first, 1, vec![i; 500]));
                if fixture.append(1, &[i; 500]).is_err() {
                    break;
                }
                let done = match i % 5 {
                    1 => fixture.wal.sync(fixture.wal.appended(), i % 2 == 0),
                    3 => fixture.wal.sync_sealed(true).map(drop),
                    4 => {
                        retired = fixture.wal.durable();
                        fixture.retire(retired).map(drop)
                    }
                    _ => Ok(()),
                };
                durable = fixture.wal.durable();
                if done.is_err() {
                    break;
                }
            }
            (wrote, durable, retired)
        };
        let whole = MemFs::new();
        run(&whole);
        let ops = whole.op_count();
        assert!(ops > 60, "{ops}");
        for op in 0..ops {
            let mem = MemFs::new();
            mem.freeze_after(Some(op));
            let (wrote, durable, retired) = run(&mem);
            for (seed, survival) in
                [Survival::Nothing, Survival::Everything, Survival::Random, Survival::Random].into_iter().enumerate()
            {
                let crashed = mem.fork();
                crashed.crash(survival, op * 7 + seed as u64);
                let fs: Arc<dyn Fs> = Arc::new(crashed);
                check_after_crash(&fs, &wrote, durable, retired, &format!("operation {op} {survival:?} {seed}"));
            }
        }
    }
}

//! Which commits count, where the log ends, and whether that is a torn tail or damage.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::base::event::DroppedAfterDamage;
use crate::base::version_edit::{FileNumber, WalEpoch};
use crate::base::{Error, Result, SeqNo};
use crate::record_log::read_window::LogSource;
use crate::record_log::reader::{DamageScan, LogReadResult, RecordLogReader, SeqnoOrder};
use crate::wal::format::{SEGMENT_HEADER_LEN, segment_path};
use crate::wal::options::{PartitionSeqno, RecoveryMode, WalCommit, WalReplayOptions, WalReplayReport, WalSegmentInfo};
use crate::wal::segment_set::{WalSegmentFile, WalSegmentSet};

/// Takes one commit, or gives the reason why the log ends in front of it: what is wrong if it was durable.
pub(crate) type ApplyCommit<'a> = dyn FnMut(WalCommit<'_>) -> Result<Option<Error>> + 'a;

/// A reading of the log under way.
pub(crate) struct WalReader<'a> {
    pub(crate) segments: &'a WalSegmentSet,
    pub(crate) options: &'a WalReplayOptions,
    dir: &'a Path,
    apply: &'a mut ApplyCommit<'a>,
    /// The last sequence number that counts so far.
    pub(crate) last_seqno: SeqNo,
    pub(crate) last_epoch: WalEpoch,
    /// No partition needs anything up to here: all of it is in permanent files, or was when its segment was retired.
    pub(crate) flushed_through: SeqNo,
    /// The log was durable up to here.
    durable_seqno: SeqNo,
    pub(crate) has_gaps: bool,
    segments_read: BTreeMap<WalEpoch, WalSegmentInfo>,
    commits: u64,
    dropped_after_damage: Option<DroppedAfterDamage>,
}

/// How the reading of a segment ended.
enum SegmentReadOutcome {
    /// At the sequence number where the next segment, or an earlier recovery, says it does.
    ReachedBound,
    /// Where no further commit could be read, or `apply` does not take it for a reason.
    StoppedBefore { offset: u64, behind: DamageScan, reason: Option<Error> },
}

/// Where reading the log ended.
struct WalReadEnd {
    path: PathBuf,
    offset: u64,
    damage_scan: DamageScan,
    /// Why `apply` does not take the commit there.
    refusal_reason: Option<Error>,
}

impl<'a> WalReader<'a> {
    pub(crate) fn new(
        segments: &'a WalSegmentSet,
        options: &'a WalReplayOptions,
        dir: &'a Path,
        apply: &'a mut ApplyCommit<'_>,
    ) -> WalReader<'a> {
        let (last_epoch, end) = options.wal_end.unwrap_or_default();
        let retired = retired_through(segments, options);
        let unneeded = retired.max(options.flushed_through);
        let durable = options.durable_through.seqno.max(end).max(unneeded);
        WalReader {
            segments,
            options,
            dir,
            apply,
            last_seqno: unneeded,
            last_epoch,
            flushed_through: unneeded,
            durable_seqno: durable,
            has_gaps: false,
            segments_read: BTreeMap::new(),
            commits: 0,
            dropped_after_damage: None,
        }
    }

    /// The newest segment that begins early enough for everything that is needed. What is before it need not be read.
    pub(crate) fn first_needed_segment(&self) -> Option<&'a WalSegmentFile> {
        let begins_early = |segment: &&WalSegmentFile| segment.header.first_seqno.0 <= self.flushed_through.0 + 1;
        self.segments.segments.values().rev().find(begins_early)
    }

    fn is_strict(&self) -> bool {
        self.options.mode == RecoveryMode::Strict
    }

    /// Reads segment after segment for as long as they are linked.
    pub(crate) fn read_linked_segments(&mut self) -> Result<()> {
        let mut next = self.first_needed_segment();
        let lost = self.first_unreadable_after(next).map(|(_, error)| error.clone());
        match lost {
            Some(error) if self.is_strict() => return Err(error),
            _ => {}
        }
        if let Some(first) = next {
            self.last_seqno = SeqNo(first.header.first_seqno.0 - 1);
        }
        let mut end = None;
        while let Some(segment) = next {
            self.last_epoch = segment.header.epoch;
            let bound = self.segment_seqno_bound(segment)?;
            next = match self.read_segment(segment, bound).map_err(|e| e.in_file(&segment.path))? {
                SegmentReadOutcome::ReachedBound => self.next_linked_segment(),
                SegmentReadOutcome::StoppedBefore { offset, behind, reason } => {
                    end = Some(WalReadEnd {
                        path: segment.path.clone(),
                        offset,
                        damage_scan: behind,
                        refusal_reason: reason,
                    });
                    None
                }
            };
        }
        self.decide_end(end, lost.is_some())
    }

    /// The oldest listed segment behind `start` that cannot be read.
    fn first_unreadable_after(&self, start: Option<&WalSegmentFile>) -> Option<(&WalEpoch, &Error)> {
        self.segments.unreadable.iter().find(|(epoch, _)| start.is_none_or(|start| **epoch > start.header.epoch))
    }

    /// The segment that goes on where the log has come to. At a noted end that is one that follows on the noted epoch:
    /// segments up to that epoch, of which nothing counts, may stand in between. No later replay that knows another end
    /// could link the two, so the log has to be written anew.
    fn next_linked_segment(&mut self) -> Option<&'a WalSegmentFile> {
        let next = |epoch| {
            self.segments.successor(epoch).filter(|segment| segment.header.first_seqno.0 == self.last_seqno.0 + 1)
        };
        let noted = self.options.wal_end.filter(|(ended, end)| *end == self.last_seqno && *ended > self.last_epoch);
        let linked = next(self.last_epoch);
        if linked.is_some() {
            return linked;
        }
        let behind_end = next(noted?.0);
        self.has_gaps |= behind_end.is_some();
        behind_end
    }

    /// The last sequence number that counts in segments up to `epoch`, if an earlier recovery or a clean close noted
    /// it.
    pub(crate) fn recorded_end(&self, epoch: WalEpoch) -> Option<SeqNo> {
        self.options.wal_end.filter(|(end, _)| *end >= epoch).map(|(_, seqno)| seqno)
    }

    /// The last sequence number that counts in `segment`, if that is agreed.
    fn segment_seqno_bound(&self, segment: &WalSegmentFile) -> Result<Option<SeqNo>> {
        let epoch = segment.header.epoch;
        let bound = self.segments.last_seqno_before_successor(epoch).into_iter().chain(self.recorded_end(epoch)).min();
        match bound {
            Some(bound) if bound < self.last_seqno => {
                let message = format!("segment begins behind sequence number {bound}, where it should have ended");
                Err(Error::corruption(message).in_file(&segment.path).at_offset(0))
            }
            bound => Ok(bound),
        }
    }

    /// Applies the commits of a segment in order.
    fn read_segment(&mut self, segment: &WalSegmentFile, bound: Option<SeqNo>) -> Result<SegmentReadOutcome> {
        let mut reader = segment.header.reader(LogSource::File(&*segment.handle), SeqnoOrder::Consecutive)?;
        let ending = loop {
            if bound == Some(self.last_seqno) {
                break SegmentReadOutcome::ReachedBound;
            }
            let at = reader.position();
            let reason = match reader.next()? {
                LogReadResult::Watermark(_) => None,
                LogReadResult::Record(record) if bound.is_none_or(|bound| record.last() <= bound) => {
                    let refused = self.apply_commit(record.first_seqno, record.count, &mut reader)?;
                    if refused.is_some() { Some((at, refused)) } else { None }
                }
                LogReadResult::Record(_) => Some((at, None)),
                LogReadResult::End if self.resume_after_damage(&mut reader, bound)? => None,
                LogReadResult::End => Some((reader.position(), None)),
            };
            if let Some((offset, reason)) = reason {
                break SegmentReadOutcome::StoppedBefore {
                    offset,
                    behind: self.scan_after_damage(&mut reader)?,
                    reason,
                };
            }
            self.record_progress(segment, reader.end());
        };
        self.segments_read.entry(segment.header.epoch).or_insert(segment_info(
            segment,
            self.last_seqno,
            SEGMENT_HEADER_LEN as u64,
        ));
        Ok(ending)
    }

    /// Goes on behind damage to what nobody needs, if the first record that verifies behind it comes no later than the
    /// first that is needed.
    fn resume_after_damage(&mut self, reader: &mut RecordLogReader<'_>, bound: Option<SeqNo>) -> Result<bool> {
        let through = bound.map_or(self.flushed_through, |bound| bound.min(self.flushed_through));
        if self.last_seqno > through {
            return Ok(false);
        }
        match reader.resume_after_damage(through) {
            Ok(resumed) => {
                if resumed {
                    (self.last_seqno, self.has_gaps) = (reader.last(), true);
                }
                Ok(resumed)
            }
            Err(_) if !self.is_strict() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Applies the record that the reader stands behind, unless there is a reason not to.
    pub(crate) fn apply_commit(
        &mut self,
        first: SeqNo,
        count: u32,
        reader: &mut RecordLogReader<'_>,
    ) -> Result<Option<Error>> {
        let payload = reader.payload()?;
        let refused = (self.apply)(WalCommit { first_seqno: first, seqno_count: count, payload })?;
        if refused.is_none() {
            self.commits += 1;
            self.last_seqno = reader.last();
        }
        Ok(refused)
    }

    /// Notes how far a segment was read.
    pub(crate) fn record_progress(&mut self, segment: &WalSegmentFile, end: u64) {
        self.segments_read.insert(segment.header.epoch, segment_info(segment, self.last_seqno, end));
    }

    fn scan_after_damage(&self, reader: &mut RecordLogReader<'_>) -> Result<DamageScan> {
        match reader.scan_after_damage() {
            // Given up: only a strict reading needs to know.
            Err(_) if !self.is_strict() => Ok(DamageScan::default()),
            found => found,
        }
    }

    /// Decides whether the log may end here, where the commit behind `last` cannot be read.
    fn decide_end(&mut self, end: Option<WalReadEnd>, lost_segment: bool) -> Result<()> {
        let stopped = end.is_some();
        let WalReadEnd { mut path, offset, damage_scan: mut behind, refusal_reason: reason } =
            end.unwrap_or_else(|| self.end_without_stop());
        for segment in self.segments.segments_after(self.last_epoch).filter(|segment| !self.is_abandoned(segment)) {
            let mut reader = segment.header.reader(LogSource::File(&*segment.handle), SeqnoOrder::Consecutive)?;
            behind = behind.merge(self.scan_after_damage(&mut reader).map_err(|e| e.in_file(&segment.path))?);
        }
        for segment in &self.segments.unlinked {
            // A rewrite that was cut short says no more than what can be read again.
            let mut reader = segment.header.reader(LogSource::File(&*segment.handle), SeqnoOrder::Consecutive)?;
            let durable = self.scan_after_damage(&mut reader).map_err(|e| e.in_file(&segment.path))?.durable_seqno;
            if durable > behind.durable_seqno.max(self.durable_seqno).max(self.last_seqno) {
                (behind.durable_seqno, path) = (durable, segment.path.clone());
            }
        }
        let durable = behind.durable_seqno.max(self.durable_seqno);
        let is_damaged =
            lost_segment || durable > self.last_seqno || (stopped && self.segments.has_two_successors(self.last_epoch));
        if behind.frames > 0 {
            // Where the damage is, if that can be said, and not where the log speaks of it.
            let place = reason.as_ref().and_then(|reason| Some((reason.file()?, reason.offset()?)));
            let (file, offset) = place.unwrap_or((&path, offset));
            self.dropped_after_damage =
                Some(DroppedAfterDamage { file: file.to_path_buf(), offset, frames: behind.frames });
        }
        // With everything in permanent files nothing is needed of the log.
        let end = if self.flushed_through >= self.durable_seqno {
            self.last_seqno.max(self.flushed_through)
        } else {
            self.last_seqno
        };
        let is_one_moment = end >= self.durable_seqno && (!is_damaged || self.options.held_in_pools.seqno <= end);
        match self.options.mode {
            RecoveryMode::Strict if is_damaged => Err(reason.unwrap_or_else(|| {
                self.damage_error(durable, is_one_moment.then_some(end)).in_file(path).at_offset(offset)
            })),
            RecoveryMode::PointInTime if !is_one_moment => {
                Err(self.damage_error(durable, None).in_file(path).at_offset(offset))
            }
            _ => {
                self.skip_to(end);
                Ok(())
            }
        }
    }

    /// Ends the log behind `end`, up to where nothing is in it if that is beyond what was read.
    fn skip_to(&mut self, end: SeqNo) {
        if end > self.last_seqno {
            (self.last_seqno, self.has_gaps) = (end, true);
        }
    }

    /// Ends a salvage: numbers that permanent files have used are not used again.
    pub(crate) fn finish_salvage(&mut self) {
        self.skip_to(self.durable_seqno);
    }

    /// Where the log ends, if no commit stopped it: in front of the first listed segment that is not linked.
    fn end_without_stop(&self) -> WalReadEnd {
        let listed = self.options.listed_segments.iter().filter(|(epoch, _)| *epoch > self.last_epoch).min();
        let listed =
            listed.or(self.options.listed_segments.iter().max()).map(|(_, file)| segment_path(self.dir, *file));
        let path = listed.unwrap_or_else(|| self.dir.to_path_buf());
        let last = self.segments.segments.get(&self.last_epoch).filter(|last| last.path == path);
        let offset = last.and_then(|last| self.segments_read.get(&last.header.epoch)).map_or(0, |info| info.end_offset);
        WalReadEnd { path, offset, damage_scan: DamageScan::default(), refusal_reason: None }
    }

    /// Whether the segment is of what an earlier recovery left behind: it follows on the end that was noted, but not
    /// with the number that comes next.
    fn is_abandoned(&self, segment: &WalSegmentFile) -> bool {
        let (ended, end) = self.options.wal_end.unwrap_or_default();
        let mut root = &segment.header;
        while let Some(before) = self.segments.segments.get(&root.previous_epoch).filter(|s| s.header.epoch > ended) {
            root = &before.header;
        }
        segment.header.epoch > ended && root.previous_epoch <= ended && root.first_seqno.0 != end.0 + 1
    }

    /// What is wrong, and what can be done; `end` is where [`RecoveryMode::PointInTime`] would end the log.
    fn damage_error(&self, durable: SeqNo, end: Option<SeqNo>) -> Error {
        let expected = self.last_seqno.0 + 1;
        let mut message =
            format!("log is damaged: sequence number {expected} cannot be read, though all up to {durable} was synced");
        let ahead = |mark: &&PartitionSeqno| mark.seqno > self.last_seqno && !mark.partition.is_empty();
        if let Some(mark) = [&self.options.durable_through, &self.options.held_in_pools].into_iter().find(ahead) {
            message += &format!("; {} may already hold what comes up to {}", mark.partition, mark.seqno);
        }
        message += &match end {
            Some(end) => format!(": RecoveryMode::PointInTime goes back to sequence number {end}"),
            None => ", so the moment before the damage cannot be restored: open a checkpoint".into(),
        };
        message += ", RecoveryMode::Salvage keeps every commit that can be read";
        Error::corruption(message)
    }

    pub(crate) fn into_report(self) -> WalReplayReport {
        let segments: Vec<WalSegmentInfo> = self.segments_read.into_values().collect();
        let is_used = |file: &FileNumber| segments.iter().any(|info| info.file == *file);
        let spares = self.segments.valid_files.iter().copied().filter(|file| !is_used(file)).collect();
        let highest_epoch = self.segments.highest_epoch.max(self.last_epoch);
        WalReplayReport {
            last_seqno: self.last_seqno,
            last_epoch: if segments.is_empty() { highest_epoch } else { self.last_epoch },
            highest_epoch,
            segments,
            spare_files: spares,
            commits: self.commits,
            dropped_after_damage: self.dropped_after_damage,
            has_gaps: self.has_gaps,
            flushed_through: self.flushed_through,
        }
    }
}

/// The last sequence number of what was retired: the manifest lets go of a segment only when nothing in it is needed.
fn retired_through(segments: &WalSegmentSet, options: &WalReplayOptions) -> SeqNo {
    let (ended, end) = options.wal_end.unwrap_or_default();
    let Some(oldest) = options.listed_segments.iter().map(|(epoch, _)| *epoch).min() else { return end };
    match segments.segments.get(&oldest) {
        Some(segment) if oldest <= ended => SeqNo(segment.header.first_seqno.0 - 1),
        // Not the first one behind the noted end: those before it were retired.
        Some(segment) if segment.header.previous_epoch > ended => end.max(SeqNo(segment.header.first_seqno.0 - 1)),
        // A clean close notes the end of the log after it has begun a segment, whose header may not be durable. What
        // was before is retired.
        None if oldest == ended && !segments.unreadable.contains_key(&oldest) => end,
        _ if oldest <= ended => SeqNo::ZERO,
        _ => end,
    }
}

fn segment_info(segment: &WalSegmentFile, last: SeqNo, end: u64) -> WalSegmentInfo {
    WalSegmentInfo {
        epoch: segment.header.epoch,
        file: segment.file,
        first_seqno: segment.header.first_seqno,
        last_seqno: last,
        end_offset: end,
    }
}

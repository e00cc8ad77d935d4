//! Which commits count, where the log ends, and whether that is a torn tail or damage.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::base::edit::{Epoch, FileId};
use crate::base::event::DroppedAfterDamage;
use crate::base::{Error, Result, SeqNo};
use crate::record::scan::{Behind, Item, Order, RecordReader};
use crate::record::window::Source;
use crate::wal::format::{HEADER_LEN, segment_path};
use crate::wal::options::{LogCommit, Mark, RecoveryMode, ReplayOptions, ReplayReport, SegmentInfo};
use crate::wal::survey::{Segment, Survey};

/// Takes one commit, or gives the reason why the log ends in front of it: what is wrong if it was durable.
pub(crate) type Apply<'a> = dyn FnMut(LogCommit<'_>) -> Result<Option<Error>> + 'a;

/// A reading of the log under way.
pub(crate) struct Walk<'a> {
    pub(crate) survey: &'a Survey,
    pub(crate) options: &'a ReplayOptions,
    dir: &'a Path,
    apply: &'a mut Apply<'a>,
    /// The last sequence number that counts so far.
    pub(crate) last: SeqNo,
    pub(crate) last_epoch: Epoch,
    /// No partition needs anything up to here: all of it is in permanent files, or was when its segment was retired.
    pub(crate) unneeded: SeqNo,
    /// The log was durable up to here.
    durable: SeqNo,
    pub(crate) has_holes: bool,
    visited: BTreeMap<Epoch, SegmentInfo>,
    commits: u64,
    dropped: Option<DroppedAfterDamage>,
}

/// How the reading of a segment ended.
enum Ending {
    /// At the sequence number where the next segment, or an earlier recovery, says it does.
    Agreed,
    /// Where no further commit could be read, or `apply` does not take it for a reason.
    Stopped { offset: u64, behind: Behind, reason: Option<Error> },
}

/// Where reading the log ended.
struct End {
    path: PathBuf,
    offset: u64,
    behind: Behind,
    /// Why `apply` does not take the commit there.
    reason: Option<Error>,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(
        survey: &'a Survey,
        options: &'a ReplayOptions,
        dir: &'a Path,
        apply: &'a mut Apply<'_>,
    ) -> Walk<'a> {
        let (last_epoch, end) = options.log_end.unwrap_or_default();
        let retired = retired(survey, options);
        let unneeded = retired.max(options.from);
        let durable = options.durable.seqno.max(end).max(unneeded);
        Walk {
            survey,
            options,
            dir,
            apply,
            last: unneeded,
            last_epoch,
            unneeded,
            durable,
            has_holes: false,
            visited: BTreeMap::new(),
            commits: 0,
            dropped: None,
        }
    }

    /// The newest segment that begins early enough for everything that is needed. What is before it need not be read.
    pub(crate) fn start(&self) -> Option<&'a Segment> {
        let begins_early = |segment: &&Segment| segment.header.first.0 <= self.unneeded.0 + 1;
        self.survey.segments.values().rev().find(begins_early)
    }

    fn is_strict(&self) -> bool {
        self.options.mode == RecoveryMode::Strict
    }

    /// Reads segment after segment for as long as they are linked.
    pub(crate) fn chain(&mut self) -> Result<()> {
        let mut next = self.start();
        let lost = self.unreadable(next).map(|(_, error)| error.clone());
        match lost {
            Some(error) if self.is_strict() => return Err(error),
            _ => {}
        }
        if let Some(first) = next {
            self.last = SeqNo(first.header.first.0 - 1);
        }
        let mut end = None;
        while let Some(segment) = next {
            self.last_epoch = segment.header.epoch;
            let bound = self.bound(segment)?;
            next = match self.read(segment, bound).map_err(|e| e.in_file(&segment.path))? {
                Ending::Agreed => self.linked(),
                Ending::Stopped { offset, behind, reason } => {
                    end = Some(End { path: segment.path.clone(), offset, behind, reason });
                    None
                }
            };
        }
        self.conclude(end, lost.is_some())
    }

    /// The oldest listed segment behind `start` that cannot be read.
    fn unreadable(&self, start: Option<&Segment>) -> Option<(&Epoch, &Error)> {
        self.survey.unreadable.iter().find(|(epoch, _)| start.is_none_or(|start| **epoch > start.header.epoch))
    }

    /// The segment that goes on where the log has come to. At a noted end that is one that follows on the noted epoch:
    /// segments up to that epoch, of which nothing counts, may stand in between. No later replay that knows another end
    /// could link the two, so the log has to be written anew.
    fn linked(&mut self) -> Option<&'a Segment> {
        let next = |epoch| self.survey.successor(epoch).filter(|segment| segment.header.first.0 == self.last.0 + 1);
        let noted = self.options.log_end.filter(|(ended, end)| *end == self.last && *ended > self.last_epoch);
        let linked = next(self.last_epoch);
        if linked.is_some() {
            return linked;
        }
        let behind_end = next(noted?.0);
        self.has_holes |= behind_end.is_some();
        behind_end
    }

    /// The last sequence number that counts in segments up to `epoch`, if an earlier recovery or a clean close noted
    /// it.
    pub(crate) fn noted_end(&self, epoch: Epoch) -> Option<SeqNo> {
        self.options.log_end.filter(|(end, _)| *end >= epoch).map(|(_, seqno)| seqno)
    }

    /// The last sequence number that counts in `segment`, if that is agreed.
    fn bound(&self, segment: &Segment) -> Result<Option<SeqNo>> {
        let epoch = segment.header.epoch;
        let bound = self.survey.bound(epoch).into_iter().chain(self.noted_end(epoch)).min();
        match bound {
            Some(bound) if bound < self.last => {
                let message = format!("segment begins behind sequence number {bound}, where it should have ended");
                Err(Error::corruption(message).in_file(&segment.path).at_offset(0))
            }
            bound => Ok(bound),
        }
    }

    /// Applies the commits of a segment in order.
    fn read(&mut self, segment: &Segment, bound: Option<SeqNo>) -> Result<Ending> {
        let mut reader = segment.header.reader(Source::File(&*segment.handle), Order::Consecutive)?;
        let ending = loop {
            if bound == Some(self.last) {
                break Ending::Agreed;
            }
            let at = reader.position();
            let reason = match reader.next()? {
                Item::Watermark(_) => None,
                Item::Record(record) if bound.is_none_or(|bound| record.last() <= bound) => {
                    let refused = self.apply(record.first, record.count, &mut reader)?;
                    if refused.is_some() { Some((at, refused)) } else { None }
                }
                Item::Record(_) => Some((at, None)),
                Item::Stop if self.resume(&mut reader, bound)? => None,
                Item::Stop => Some((reader.position(), None)),
            };
            if let Some((offset, reason)) = reason {
                break Ending::Stopped { offset, behind: self.search(&mut reader)?, reason };
            }
            self.visit(segment, reader.end());
        };
        self.visited.entry(segment.header.epoch).or_insert(info(segment, self.last, HEADER_LEN as u64));
        Ok(ending)
    }

    /// Goes on behind damage to what nobody needs, if the first record that verifies behind it comes no later than the
    /// first that is needed.
    fn resume(&mut self, reader: &mut RecordReader<'_>, bound: Option<SeqNo>) -> Result<bool> {
        let through = bound.map_or(self.unneeded, |bound| bound.min(self.unneeded));
        if self.last > through {
            return Ok(false);
        }
        match reader.resume(through) {
            Ok(resumed) => {
                if resumed {
                    (self.last, self.has_holes) = (reader.last(), true);
                }
                Ok(resumed)
            }
            Err(_) if !self.is_strict() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Applies the record that the reader stands behind, unless there is a reason not to.
    pub(crate) fn apply(&mut self, first: SeqNo, count: u32, reader: &mut RecordReader<'_>) -> Result<Option<Error>> {
        let payload = reader.payload()?;
        let refused = (self.apply)(LogCommit { first, count, payload })?;
        if refused.is_none() {
            self.commits += 1;
            self.last = reader.last();
        }
        Ok(refused)
    }

    /// Notes how far a segment was read.
    pub(crate) fn visit(&mut self, segment: &Segment, end: u64) {
        self.visited.insert(segment.header.epoch, info(segment, self.last, end));
    }

    fn search(&self, reader: &mut RecordReader<'_>) -> Result<Behind> {
        match reader.search() {
            // Given up: only a strict reading needs to know.
            Err(_) if !self.is_strict() => Ok(Behind::default()),
            found => found,
        }
    }

    /// Decides whether the log may end here, where the commit behind `last` cannot be read.
    fn conclude(&mut self, end: Option<End>, lost_segment: bool) -> Result<()> {
        let stopped = end.is_some();
        let End { mut path, offset, mut behind, reason } = end.unwrap_or_else(|| self.end());
        for segment in self.survey.after(self.last_epoch).filter(|segment| !self.is_left_over(segment)) {
            let mut reader = segment.header.reader(Source::File(&*segment.handle), Order::Consecutive)?;
            behind = behind.join(self.search(&mut reader).map_err(|e| e.in_file(&segment.path))?);
        }
        for segment in &self.survey.loose {
            // A rewrite that was cut short says no more than what can be read again.
            let mut reader = segment.header.reader(Source::File(&*segment.handle), Order::Consecutive)?;
            let durable = self.search(&mut reader).map_err(|e| e.in_file(&segment.path))?.durable;
            if durable > behind.durable.max(self.durable).max(self.last) {
                (behind.durable, path) = (durable, segment.path.clone());
            }
        }
        let durable = behind.durable.max(self.durable);
        let is_damaged = lost_segment || durable > self.last || (stopped && self.survey.two_follow(self.last_epoch));
        if behind.frames > 0 {
            // Where the damage is, if that can be said, and not where the log speaks of it.
            let place = reason.as_ref().and_then(|reason| Some((reason.file()?, reason.offset()?)));
            let (file, offset) = place.unwrap_or((&path, offset));
            self.dropped = Some(DroppedAfterDamage { file: file.to_path_buf(), offset, frames: behind.frames });
        }
        // With everything in permanent files nothing is needed of the log.
        let end = if self.unneeded >= self.durable { self.last.max(self.unneeded) } else { self.last };
        let is_one_moment = end >= self.durable && (!is_damaged || self.options.held.seqno <= end);
        match self.options.mode {
            RecoveryMode::Strict if is_damaged => Err(reason.unwrap_or_else(|| {
                self.refusal(durable, is_one_moment.then_some(end)).in_file(path).at_offset(offset)
            })),
            RecoveryMode::PointInTime if !is_one_moment => {
                Err(self.refusal(durable, None).in_file(path).at_offset(offset))
            }
            _ => {
                self.end_at(end);
                Ok(())
            }
        }
    }

    /// Ends the log behind `end`, up to where nothing is in it if that is beyond what was read.
    fn end_at(&mut self, end: SeqNo) {
        if end > self.last {
            (self.last, self.has_holes) = (end, true);
        }
    }

    /// Ends a salvage: numbers that permanent files have used are not used again.
    pub(crate) fn conclude_salvage(&mut self) {
        self.end_at(self.durable);
    }

    /// Where the log ends, if no commit stopped it: in front of the first listed segment that is not linked.
    fn end(&self) -> End {
        let listed = self.options.live.iter().filter(|(epoch, _)| *epoch > self.last_epoch).min();
        let listed = listed.or(self.options.live.iter().max()).map(|(_, file)| segment_path(self.dir, *file));
        let path = listed.unwrap_or_else(|| self.dir.to_path_buf());
        let last = self.survey.segments.get(&self.last_epoch).filter(|last| last.path == path);
        let offset = last.and_then(|last| self.visited.get(&last.header.epoch)).map_or(0, |info| info.end);
        End { path, offset, behind: Behind::default(), reason: None }
    }

    /// Whether the segment is of what an earlier recovery left behind: it follows on the end that was noted, but not
    /// with the number that comes next.
    fn is_left_over(&self, segment: &Segment) -> bool {
        let (ended, end) = self.options.log_end.unwrap_or_default();
        let mut root = &segment.header;
        while let Some(before) = self.survey.segments.get(&root.previous).filter(|s| s.header.epoch > ended) {
            root = &before.header;
        }
        segment.header.epoch > ended && root.previous <= ended && root.first.0 != end.0 + 1
    }

    /// What is wrong, and what can be done; `end` is where [`RecoveryMode::PointInTime`] would end the log.
    fn refusal(&self, durable: SeqNo, end: Option<SeqNo>) -> Error {
        let expected = self.last.0 + 1;
        let mut message =
            format!("log is damaged: sequence number {expected} cannot be read, though all up to {durable} was synced");
        let ahead = |mark: &&Mark| mark.seqno > self.last && !mark.partition.is_empty();
        if let Some(mark) = [&self.options.durable, &self.options.held].into_iter().find(ahead) {
            message += &format!("; {} may already hold what comes up to {}", mark.partition, mark.seqno);
        }
        message += &match end {
            Some(end) => format!(": RecoveryMode::PointInTime goes back to sequence number {end}"),
            None => ", so the moment before the damage cannot be restored: open a checkpoint".into(),
        };
        message += ", RecoveryMode::Salvage keeps every commit that can be read";
        Error::corruption(message)
    }

    /// Segment files that are no part of the log, and that no other reading of it may find a use for: those from before
    /// the noted end, and what an unfinished rewrite has left. Nothing in the latter says that the log was durable; an
    /// unlinked segment that says so may hold synced commits of which the manifest has lost the entry.
    fn removable(&self) -> Vec<FileId> {
        let is_leftover = |segment: &Segment| {
            let reader = segment.header.reader(Source::File(&*segment.handle), Order::Consecutive);
            let search = reader.and_then(|mut reader| reader.search());
            search.is_ok_and(|behind| behind.durable == SeqNo::ZERO)
        };
        let mut kept: Vec<FileId> = self.options.live.iter().map(|(_, file)| *file).collect();
        kept.extend(self.survey.segments.values().map(|segment| segment.file));
        kept.extend(self.survey.loose.iter().filter(|s| !is_leftover(s)).map(|segment| segment.file));
        self.survey.whole.iter().copied().filter(|file| !kept.contains(file)).collect()
    }

    pub(crate) fn report(self) -> ReplayReport {
        let removable = self.removable();
        let segments: Vec<SegmentInfo> = self.visited.into_values().collect();
        let is_used = |file: &FileId| segments.iter().any(|info| info.file == *file);
        let spares = self.survey.whole.iter().copied().filter(|file| !is_used(file)).collect();
        let highest_epoch = self.survey.highest.max(self.last_epoch);
        ReplayReport {
            last: self.last,
            last_epoch: if segments.is_empty() { highest_epoch } else { self.last_epoch },
            highest_epoch,
            segments,
            spares,
            removable,
            commits: self.commits,
            dropped_after_damage: self.dropped,
            has_holes: self.has_holes,
            unneeded: self.unneeded,
        }
    }
}

/// The last sequence number of what was retired: the manifest lets go of a segment only when nothing in it is needed.
fn retired(survey: &Survey, options: &ReplayOptions) -> SeqNo {
    let (ended, end) = options.log_end.unwrap_or_default();
    let Some(oldest) = options.live.iter().map(|(epoch, _)| *epoch).min() else { return end };
    match survey.segments.get(&oldest) {
        Some(segment) if oldest <= ended => SeqNo(segment.header.first.0 - 1),
        // Not the first one behind the noted end: those before it were retired.
        Some(segment) if segment.header.previous > ended => end.max(SeqNo(segment.header.first.0 - 1)),
        // A clean close notes the end of the log after it has begun a segment, whose header may not be durable. What
        // was before is retired.
        None if oldest == ended && !survey.unreadable.contains_key(&oldest) => end,
        _ if oldest <= ended => SeqNo::ZERO,
        _ => end,
    }
}

fn info(segment: &Segment, last: SeqNo, end: u64) -> SegmentInfo {
    SegmentInfo { epoch: segment.header.epoch, file: segment.file, first: segment.header.first, last, end }
}

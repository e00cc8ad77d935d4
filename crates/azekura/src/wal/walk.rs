//! Which commits count, where the log ends, and whether that is a torn tail or damage.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::base::edit::{Epoch, FileId};
use crate::base::event::DroppedAfterDamage;
use crate::base::{Error, ErrorKind, Result, SeqNo};
use crate::record::scan::{Behind, Item, Order, RecordReader};
use crate::record::window::Source;
use crate::wal::format::{HEADER_LEN, segment_path};
use crate::wal::options::{LogCommit, RecoveryMode, ReplayOptions, ReplayReport, SegmentInfo};
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
    visited: BTreeMap<Epoch, SegmentInfo>,
    commits: u64,
    dropped: Option<DroppedAfterDamage>,
}

/// How the reading of a segment ended.
enum Ending {
    /// At the sequence number where the next segment, or an earlier recovery, says it does.
    Agreed,
    /// `apply` does not take the commit at `offset`.
    Refused { offset: u64, behind: Behind, reason: Error },
    /// Where no further commit could be read.
    Stopped { offset: u64, behind: Behind },
}

impl<'a> Walk<'a> {
    pub(crate) fn new(
        survey: &'a Survey,
        options: &'a ReplayOptions,
        dir: &'a Path,
        apply: &'a mut Apply<'_>,
    ) -> Walk<'a> {
        let (last_epoch, end) = options.log_end.unwrap_or_default();
        let last = end.max(options.from);
        let visited = BTreeMap::new();
        Walk { survey, options, dir, apply, last, last_epoch, visited, commits: 0, dropped: None }
    }

    /// The oldest segment that the manifest lists.
    pub(crate) fn first_listed(&self) -> Option<&'a Segment> {
        self.options
            .live
            .iter()
            .map(|(epoch, _)| *epoch)
            .filter_map(|epoch| self.survey.segments.get(&epoch))
            .min_by_key(|segment| segment.header.epoch)
    }

    fn is_strict(&self) -> bool {
        self.options.mode == RecoveryMode::Strict
    }

    /// Reads segment after segment for as long as they are linked.
    pub(crate) fn chain(&mut self) -> Result<()> {
        let mut next = match self.start() {
            Some(first) if self.begins_late(first) => return self.hole(first),
            Some(first) => {
                self.last = SeqNo(first.header.first.0 - 1);
                Some(first)
            }
            None => self.linked(),
        };
        if next.is_none() {
            return self.end_without_segment();
        }
        while let Some(segment) = next {
            self.last_epoch = segment.header.epoch;
            let bound = self.bound(segment)?;
            next = match self.read(segment, bound).map_err(|e| e.in_file(&segment.path))? {
                Ending::Agreed => self.linked(),
                Ending::Refused { offset, behind, reason } => {
                    self.judge_refused(&segment.path, offset, behind, reason)?;
                    None
                }
                Ending::Stopped { offset, behind } => {
                    self.judge(&segment.path, offset, behind)?;
                    None
                }
            };
        }
        Ok(())
    }

    /// The oldest listed segment, unless it follows on one that power loss left without its header: then the log ended
    /// in front of both.
    fn start(&self) -> Option<&'a Segment> {
        let first = self.first_listed()?;
        let is_cut_off = self.survey.absent.iter().any(|(epoch, _)| *epoch <= first.header.previous);
        (!is_cut_off).then_some(first)
    }

    /// Whether records are missing in front of the oldest segment. What lies before it was retired, and the manifest
    /// would not have let go of what is needed; only for the first segment behind a known end can more be said.
    fn begins_late(&self, first: &Segment) -> bool {
        self.options
            .log_end
            .is_some_and(|(epoch, end)| first.header.previous == epoch && first.header.first.0 > end.0 + 1)
    }

    /// The segment that goes on where the log has come to.
    fn linked(&self) -> Option<&'a Segment> {
        self.survey.successor(self.last_epoch).filter(|segment| segment.header.first.0 == self.last.0 + 1)
    }

    fn hole(&mut self, first: &Segment) -> Result<()> {
        let (found, needed) = (first.header.first, self.last.0 + 1);
        let message = format!("log begins with sequence number {found}, where {needed} should come next");
        let error = Error::corruption(message).in_file(&first.path).at_offset(0);
        if self.is_strict() { Err(error) } else { Ok(()) }
    }

    /// No listed segment has a header of its own life, and none follows on the end that the manifest knows: nothing was
    /// synced since. Segments that say otherwise are damage.
    fn end_without_segment(&mut self) -> Result<()> {
        let listed = self.options.live.first().map(|(_, file)| segment_path(self.dir, *file));
        let later = self.survey.after(self.last_epoch).next().map(|segment| segment.path.clone());
        match listed.or(later) {
            Some(path) => self.judge(&path, 0, Behind::default()),
            None => Ok(()),
        }
    }

    /// The last sequence number that counts in `segment`, if that is agreed.
    fn bound(&self, segment: &Segment) -> Result<Option<SeqNo>> {
        let epoch = segment.header.epoch;
        let known = self.options.log_end.filter(|(end, _)| *end == epoch).map(|(_, seqno)| seqno);
        let bound = self.survey.bound(epoch).into_iter().chain(known).min();
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
            match reader.next()? {
                Item::Watermark(_) => {}
                Item::Record(record) if bound.is_none_or(|bound| record.last() <= bound) => {
                    if let Some(reason) = self.apply(record.first, record.count, &mut reader)? {
                        break Ending::Refused { offset: at, behind: self.search(&mut reader)?, reason };
                    }
                }
                Item::Record(_) => break Ending::Stopped { offset: at, behind: self.search(&mut reader)? },
                Item::Stop => {
                    let offset = reader.position();
                    break Ending::Stopped { offset, behind: self.search(&mut reader)? };
                }
            }
            self.visit(segment, reader.end());
        };
        self.visited.entry(segment.header.epoch).or_insert(info(segment, self.last, HEADER_LEN as u64));
        Ok(ending)
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

    /// Decides whether the log ends here, where the commit behind `last` cannot be read, or is damaged.
    fn judge(&mut self, path: &Path, offset: u64, mut behind: Behind) -> Result<()> {
        for segment in self.survey.after(self.last_epoch) {
            let mut reader = segment.header.reader(Source::File(&*segment.handle), Order::Consecutive)?;
            behind = behind.join(self.search(&mut reader).map_err(|e| e.in_file(&segment.path))?);
        }
        let expected = self.last.0 + 1;
        let known = self.options.log_end.map_or(SeqNo::ZERO, |(_, end)| end).max(self.options.from);
        let durable = behind.durable.max(known);
        let was_synced = durable.0 >= expected || self.survey.two_follow(self.last_epoch);
        if was_synced && self.is_strict() {
            let message = format!(
                "log is damaged: sequence number {expected} cannot be read, though all up to {durable} was synced"
            );
            return Err(Error::corruption(message).in_file(path).at_offset(offset));
        }
        if behind.frames > 0 {
            self.dropped = Some(DroppedAfterDamage { file: PathBuf::from(path), offset, frames: behind.frames });
        }
        Ok(())
    }

    /// The log ends in front of a commit that names what is not there. A sync of the log syncs that first, so such a
    /// commit was never synced; if it was, something else has been lost.
    fn judge_refused(&mut self, path: &Path, offset: u64, behind: Behind, reason: Error) -> Result<()> {
        let judged = self.judge(path, offset, behind);
        // Where the damage is, if that can be said, and not where the log speaks of it.
        if let (Some(dropped), Some(file), Some(offset)) = (&mut self.dropped, reason.file(), reason.offset()) {
            (dropped.file, dropped.offset) = (file.to_path_buf(), offset);
        }
        judged.map_err(|error| match error.kind() {
            ErrorKind::Corruption => reason,
            _ => error,
        })
    }

    pub(crate) fn report(self) -> ReplayReport {
        let mut segments = self.visited;
        let dead = self.survey.segments.values().map(|segment| (segment.header.epoch, segment.file));
        let dead = dead.filter(|dead| self.options.live.contains(dead)).chain(self.survey.absent.iter().copied());
        let dead: Vec<(Epoch, FileId)> = dead.filter(|(epoch, _)| !segments.contains_key(epoch)).collect();
        for (epoch, file) in dead {
            // Nothing in it counts; it goes when its neighbours go.
            let before = segments.range(..epoch).next_back().map(|(_, info)| info.last);
            let behind = segments.values().next().map(|info| SeqNo(info.first.0 - 1));
            let last = before.or(behind).unwrap_or(self.last);
            if self.survey.whole.contains(&file) {
                let first = SeqNo(last.0 + 1);
                segments.insert(epoch, SegmentInfo { epoch, file, first, last, end: HEADER_LEN as u64 });
            }
        }
        let segments: Vec<SegmentInfo> = segments.into_values().collect();
        let is_used = |file: &FileId| segments.iter().any(|info| info.file == *file);
        let spares = self.survey.whole.iter().copied().filter(|file| !is_used(file)).collect();
        ReplayReport {
            last: self.last.max(self.options.from),
            last_epoch: self.last_epoch,
            highest_epoch: self.survey.highest,
            segments,
            spares,
            commits: self.commits,
            dropped_after_damage: self.dropped,
        }
    }
}

fn info(segment: &Segment, last: SeqNo, end: u64) -> SegmentInfo {
    SegmentInfo { epoch: segment.header.epoch, file: segment.file, first: segment.header.first, last, end }
}

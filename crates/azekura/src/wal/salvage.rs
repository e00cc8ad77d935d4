//! Replay of last resort: every whole commit that verifies, in order, whatever is missing between them.

use crate::base::{Result, SeqNo};
use crate::record::scan::{Item, Order};
use crate::record::window::Source;
use crate::wal::survey::Segment;
use crate::wal::walk::Walk;

/// Applies what verifies of all segments from the oldest listed one on.
pub(crate) fn salvage(walk: &mut Walk<'_>) -> Result<()> {
    let oldest = walk.first_listed().map_or(walk.last_epoch, |segment| segment.header.epoch);
    walk.last = walk.first_listed().map_or(walk.last, |segment| SeqNo(segment.header.first.0 - 1));
    let survey = walk.survey;
    for segment in survey.segments.range(oldest..).map(|(_, segment)| segment) {
        // What an earlier recovery left behind counts neither: a later segment starts in front of it.
        let bound = survey.after(segment.header.epoch).map(|later| SeqNo(later.header.first.0 - 1)).min();
        let go_on = read(walk, segment, bound.unwrap_or(SeqNo::MAX)).map_err(|e| e.in_file(&segment.path))?;
        walk.last_epoch = segment.header.epoch;
        if !go_on {
            break;
        }
    }
    Ok(())
}

/// False if the log is to end here.
fn read(walk: &mut Walk<'_>, segment: &Segment, bound: SeqNo) -> Result<bool> {
    let mut reader = segment.header.reader(Source::File(&*segment.handle), Order::Rising)?;
    loop {
        walk.visit(segment, reader.end());
        let at = reader.position();
        match reader.next()? {
            Item::Watermark(_) => {}
            Item::Record(record) => {
                let counts = record.first > walk.last && record.last() <= bound;
                if counts && walk.apply(record.first, record.count, &mut reader)?.is_some() {
                    return Ok(false);
                }
            }
            Item::Stop => {
                if !reader.skip(at)? {
                    return Ok(true);
                }
            }
        }
    }
}

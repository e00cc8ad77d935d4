//! Replay of last resort: every whole commit that verifies, in order, whatever is missing between them.

use crate::base::edit::Epoch;
use crate::base::{Result, SeqNo};
use crate::record::scan::{Item, Order};
use crate::record::window::Source;
use crate::wal::survey::Segment;
use crate::wal::walk::Walk;

/// Applies what verifies of all segments from the first that may hold what is needed.
pub(crate) fn salvage(walk: &mut Walk<'_>) -> Result<()> {
    let survey = walk.survey;
    let start = walk.start();
    walk.last = start.map_or(walk.last, |segment| SeqNo(segment.header.first.0 - 1));
    let oldest = start.map_or(Epoch(0), |segment| segment.header.epoch);
    let mut before = None;
    for segment in survey.segments.range(oldest..).map(|(_, segment)| segment) {
        let epoch = segment.header.epoch;
        // What an earlier recovery left behind counts neither: a later segment starts in front of it.
        let later = survey.after(epoch).map(|later| SeqNo(later.header.first.0 - 1));
        let bound = later.chain(walk.noted_end(epoch)).min();
        walk.has_holes |= before.is_some_and(|before| before != segment.header.previous);
        let go_on = read(walk, segment, bound.unwrap_or(SeqNo::MAX)).map_err(|e| e.in_file(&segment.path))?;
        walk.last_epoch = epoch;
        before = Some(epoch);
        if !go_on {
            break;
        }
    }
    walk.conclude_salvage();
    Ok(())
}

/// False if the log is to end here.
fn read(walk: &mut Walk<'_>, segment: &Segment, bound: SeqNo) -> Result<bool> {
    let mut reader = segment.header.reader(Source::File(&*segment.handle), Order::Rising)?;
    let mut skipped = false;
    loop {
        walk.visit(segment, reader.end());
        let at = reader.position();
        match reader.next()? {
            Item::Watermark(_) => {}
            Item::Record(record) => {
                let counts = record.first > walk.last && record.last() <= bound;
                walk.has_holes |= counts && (skipped || record.first.0 != walk.last.0 + 1);
                if counts && walk.apply(record.first, record.count, &mut reader)?.is_some() {
                    return Ok(false);
                }
            }
            Item::Stop => {
                if !reader.skip(at)? {
                    return Ok(true);
                }
                skipped = true;
            }
        }
    }
}

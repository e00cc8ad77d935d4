//! Replay of last resort: every whole commit that verifies, in order, whatever is missing between them.

use crate::base::version_edit::WalEpoch;
use crate::base::{Result, SeqNo};
use crate::record_log::read_window::LogSource;
use crate::record_log::reader::{LogReadResult, SeqnoOrder};
use crate::wal::reader::WalReader;
use crate::wal::segment_set::WalSegmentFile;

/// Applies what verifies of all segments from the first that may hold what is needed.
pub(crate) fn salvage_segments(wal_reader: &mut WalReader<'_>) -> Result<()> {
    let survey = wal_reader.segments;
    let start = wal_reader.first_needed_segment();
    wal_reader.last_seqno = start.map_or(wal_reader.last_seqno, |segment| SeqNo(segment.header.first_seqno.0 - 1));
    let oldest = start.map_or(WalEpoch(0), |segment| segment.header.epoch);
    let mut before = None;
    for segment in survey.segments.range(oldest..).map(|(_, segment)| segment) {
        let epoch = segment.header.epoch;
        // What an earlier recovery left behind counts neither: a later segment starts in front of it.
        let later = survey.segments_after(epoch).map(|later| SeqNo(later.header.first_seqno.0 - 1));
        let bound = later.chain(wal_reader.recorded_end(epoch)).min();
        wal_reader.has_gaps |= before.is_some_and(|before| before != segment.header.previous_epoch);
        let go_on =
            salvage_segment(wal_reader, segment, bound.unwrap_or(SeqNo::MAX)).map_err(|e| e.in_file(&segment.path))?;
        wal_reader.last_epoch = epoch;
        before = Some(epoch);
        if !go_on {
            break;
        }
    }
    wal_reader.finish_salvage();
    Ok(())
}

/// False if the log is to end here.
fn salvage_segment(wal_reader: &mut WalReader<'_>, segment: &WalSegmentFile, bound: SeqNo) -> Result<bool> {
    let mut reader = segment.header.reader(LogSource::File(&*segment.handle), SeqnoOrder::Rising)?;
    let mut skipped = false;
    loop {
        wal_reader.record_progress(segment, reader.end());
        let at = reader.position();
        match reader.next()? {
            LogReadResult::Watermark(_) => {}
            LogReadResult::Record(record) => {
                let counts = record.first_seqno > wal_reader.last_seqno && record.last() <= bound;
                wal_reader.has_gaps |= counts && (skipped || record.first_seqno.0 != wal_reader.last_seqno.0 + 1);
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

//! Checked scans: every record must be a known one, in order, with its value.

use crate::engine::{Engine, Scan};
use crate::error::{Result, wrong};
use crate::measure::meter::Meter;
use crate::workload::Shape;
use crate::workload::data::FIRST_GENERATION;

/// Records of a full scan that share one reading of the clock.
const BUNDLE: u64 = 1000;
/// Records after which a full scan starts again at its position, so that a time limit can end it.
const SEGMENT: u64 = 100_000;

/// Checks the records of one scan after the other.
pub(crate) struct ScanCheck {
    shape: Shape,
    reverse: bool,
    pub(crate) last: Vec<u8>,
    /// Records seen.
    pub(crate) count: u64,
    error: Option<String>,
}

impl ScanCheck {
    pub(crate) fn new(shape: Shape, reverse: bool) -> ScanCheck {
        ScanCheck { shape, reverse, last: Vec::with_capacity(shape.key_size), count: 0, error: None }
    }

    fn see(&mut self, key: &[u8], value: &[u8]) {
        let generation = self.shape.index_of(key).and_then(|index| self.shape.check(index, value));
        if generation != Some(FIRST_GENERATION) {
            self.error
                .get_or_insert_with(|| format!("a scan returned a wrong record after {} correct ones", self.count));
        }
        let last = self.last.as_slice();
        if self.count > 0 && (if self.reverse { key >= last } else { key <= last }) {
            self.error.get_or_insert_with(|| format!("a scan left the key order after {} records", self.count));
        }
        self.last.clear();
        self.last.extend_from_slice(key);
        self.count += 1;
    }

    fn verdict(&mut self) -> Result<()> {
        self.error.take().map_or(Ok(()), |message| Err(wrong(message)))
    }

    /// Scans up to `limit` records from `from`, which must exist and come first.
    pub(crate) fn some(&mut self, engine: &dyn Engine, from: &[u8], limit: u64) -> Result<()> {
        (self.count, self.error) = (0, None);
        let scan = if self.reverse { Scan::Back(from) } else { Scan::From(from) };
        let mut first_is_right = true;
        engine.scan(scan, limit, &mut |key, value| {
            first_is_right &= self.count > 0 || key == from;
            self.see(key, value);
        })?;
        if self.count == 0 || !first_is_right {
            return Err(wrong("a scan did not begin at the record that was asked for"));
        }
        self.verdict()
    }

    /// Scans all `n` records once, or until the meter is over.
    pub(crate) fn all(&mut self, engine: &dyn Engine, n: u64, meter: &mut Meter<'_>) -> Result<()> {
        (self.count, self.error) = (0, None);
        let total = n.min(meter.left());
        while self.count < total && !meter.over() {
            self.segment(engine, SEGMENT.min(total - self.count), meter)?;
        }
        Ok(())
    }

    /// Scans the next `count` records, the first ones if none was seen yet.
    fn segment(&mut self, engine: &dyn Engine, count: u64, meter: &mut Meter<'_>) -> Result<()> {
        let (before, last) = (self.count, self.last.clone());
        let resumes = before > 0;
        let from = match (resumes, self.reverse) {
            (false, false) => Scan::First,
            (false, true) => Scan::Last,
            (true, false) => Scan::From(&last),
            (true, true) => Scan::Back(&last),
        };
        let (mut known, mut right) = (resumes, true); // a resumed scan begins with the last record seen
        engine.scan(from, count + u64::from(resumes), &mut |key, value| {
            if std::mem::take(&mut known) {
                right = key == last;
                return;
            }
            self.see(key, value);
            if self.count.is_multiple_of(BUNDLE) {
                meter.done(BUNDLE);
            }
        })?;
        meter.done(self.count % BUNDLE);
        self.verdict()?;
        let got = self.count - before;
        if got != count || known || !right {
            return Err(wrong(format!("a scan returned {got} records instead of {count} after {before}")));
        }
        Ok(())
    }
}

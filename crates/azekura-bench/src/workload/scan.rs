//! Workloads that scan: readseq, readreverse, seekrandom and the scans of 10 and 100, both ways. Every record is
//! checked.

use crate::engine::{Engine, Scan};
use crate::failure::{Result, wrong};
use crate::machine::meter::Meter;
use crate::workload::fill::FIRST_GENERATION;
use crate::workload::rng::Rng;
use crate::workload::shape::Shape;
use crate::workload::workload::{Share, Work};

/// Records of a full scan that share one reading of the clock.
const BUNDLE: u64 = 1000;

/// Records of a full scan behind which the scan begins anew where it was, so that a time limit can end it: a multiple
/// of [`BUNDLE`].
const SEGMENT: u64 = 100_000;

/// Checks records of a scan one after the other: known keys in order, right values.
pub(crate) struct ScanCheck {
    shape: Shape,
    reverse: bool,
    last: Vec<u8>,
    /// Records seen.
    pub(crate) count: u64,
    wrong: Option<String>,
}

impl ScanCheck {
    /// A check for scans of `shape`, ascending or (`reverse`) descending.
    pub(crate) fn new(shape: Shape, reverse: bool) -> ScanCheck {
        ScanCheck { shape, reverse, last: Vec::with_capacity(shape.key_size), count: 0, wrong: None }
    }

    /// Begins another scan.
    pub(crate) fn restart(&mut self) {
        self.count = 0;
        self.last.clear();
    }

    /// Looks at the next record.
    pub(crate) fn see(&mut self, key: &[u8], value: &[u8]) {
        let right = self.shape.keys().index_of(key).and_then(|index| self.shape.values().check(index, value));
        if right != Some(FIRST_GENERATION) {
            self.wrong.get_or_insert_with(|| format!("a scan gave a wrong record behind {} good ones", self.count));
        }
        let last = self.last.as_slice();
        if self.count > 0 && (if self.reverse { key >= last } else { key <= last }) {
            self.wrong.get_or_insert_with(|| format!("a scan turned back behind {} records", self.count));
        }
        self.last.clear();
        self.last.extend_from_slice(key);
        self.count += 1;
    }

    /// What was wrong, if anything was.
    pub(crate) fn verdict(&mut self) -> Result<()> {
        self.wrong.take().map_or(Ok(()), |words| Err(wrong(words)))
    }
}

/// Scans of everything, in key order or against it.
pub(crate) struct ScanAll {
    shape: Shape,
    check: ScanCheck,
}

impl ScanAll {
    /// The share of one thread: it scans everything.
    pub(crate) fn new(share: &Share, reverse: bool) -> ScanAll {
        ScanAll { shape: share.shape, check: ScanCheck::new(share.shape, reverse) }
    }

    /// Shows the next `count` records, the first ones if none was seen yet, to the check.
    fn segment(&mut self, engine: &dyn Engine, count: u64, meter: &mut Meter<'_>) -> Result<()> {
        let last = self.check.last.clone();
        let resumes = self.check.count > 0;
        let from = match (resumes, self.check.reverse) {
            (false, false) => Scan::First,
            (false, true) => Scan::Last,
            (true, false) => Scan::From(&last),
            (true, true) => Scan::Back(&last),
        };
        let check = &mut self.check;
        let before = check.count;
        let mut known = resumes; // where it resumes, the first record is the last one seen
        let mut right = true;
        engine.scan(from, count + u64::from(resumes), &mut |key, value| {
            if known {
                known = false;
                right = key == last;
                return;
            }
            check.see(key, value);
            if check.count.is_multiple_of(BUNDLE) {
                meter.done(BUNDLE);
            }
        })?;
        meter.done(self.check.count % BUNDLE);
        self.check.verdict()?;
        let got = self.check.count - before;
        if got != count || known || !right {
            return Err(wrong(format!("a scan gave {got} records instead of {count} behind {before}")));
        }
        Ok(())
    }
}

impl Work for ScanAll {
    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        self.check.restart();
        let total = self.shape.n.min(meter.left());
        while self.check.count < total && !meter.over() {
            self.segment(engine, SEGMENT.min(total - self.check.count), meter)?;
        }
        Ok(())
    }
}

/// Seeks to a record and reads it and what follows it.
pub(crate) struct ScanSome {
    shape: Shape,
    rng: Rng,
    count: u64,
    key: Vec<u8>,
    /// The last key that a scan can reach: only there may it end early.
    end: Vec<u8>,
    check: ScanCheck,
}

impl ScanSome {
    /// The share of one thread: scans of `count` records.
    pub(crate) fn new(share: &Share, count: u64, reverse: bool) -> ScanSome {
        let (shape, keys) = (share.shape, share.shape.keys());
        let mut end = Vec::new();
        let mut key = Vec::new();
        for index in 0..shape.n {
            keys.write(index, &mut key);
            if end.is_empty() || (if reverse { key < end } else { key > end }) {
                end.clone_from(&key);
            }
        }
        let check = ScanCheck::new(shape, reverse);
        ScanSome { shape, rng: Rng::new(share.seed), count: count.max(1), key, end, check }
    }
}

impl Work for ScanSome {
    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        let index = self.rng.below(self.shape.n);
        self.shape.keys().write(index, &mut self.key);
        scan_checked(engine, &self.key, self.count, &mut self.check)?;
        if self.check.count != self.count && (self.check.count > self.count || self.check.last != self.end) {
            return Err(wrong(format!("a scan of {} gave {} records", self.count, self.check.count)));
        }
        meter.done(1);
        Ok(())
    }
}

/// Scans up to `limit` records from `from`, which must exist and come first, in the direction of `check`.
pub(crate) fn scan_checked(engine: &dyn Engine, from: &[u8], limit: u64, check: &mut ScanCheck) -> Result<()> {
    check.restart();
    let mut first_is_right = true;
    let scan = if check.reverse { Scan::Back(from) } else { Scan::From(from) };
    engine.scan(scan, limit, &mut |key, value| {
        if check.count == 0 {
            first_is_right = key == from;
        }
        check.see(key, value);
    })?;
    if check.count == 0 || !first_is_right {
        return Err(wrong("a scan did not begin at the record it was asked for"));
    }
    check.verdict()
}

//! Workloads that only read: readrandom, readmissing, readseq, seekrandom. Every value is checked to the last byte.

use crate::engine::{Engine, Scan};
use crate::failure::{Result, wrong};
use crate::machine::meter::Meter;
use crate::workload::fill::FIRST_GENERATION;
use crate::workload::rng::Rng;
use crate::workload::shape::Shape;
use crate::workload::workload::{Share, Work};

/// Far above every index that is ever written.
const MISSING: u64 = 1 << 48;

/// Records of a full scan that share one reading of the clock.
const SCAN_BUNDLE: u64 = 1000;

/// Gets `index` and gives its generation; it must be there.
pub(crate) fn get_checked(engine: &dyn Engine, shape: &Shape, index: u64, key: &mut Vec<u8>) -> Result<u64> {
    shape.keys().write(index, key);
    let mut generation = None;
    let found = engine.get(key, &mut |value| generation = shape.values().check(index, value))?;
    match generation {
        Some(generation) => Ok(generation),
        None if found => Err(wrong(format!("record {index} came back with a wrong value"))),
        None => Err(wrong(format!("record {index} was not found"))),
    }
}

/// Checks records of a scan one after the other: known keys in ascending order, right values.
pub(crate) struct ScanCheck {
    shape: Shape,
    last: Vec<u8>,
    /// Records seen.
    pub(crate) count: u64,
    wrong: Option<String>,
}

impl ScanCheck {
    /// A check for a scan of `shape` that begins at `from`, which must exist.
    pub(crate) fn new(shape: Shape) -> ScanCheck {
        ScanCheck { shape, last: Vec::with_capacity(shape.key_size), count: 0, wrong: None }
    }

    /// Begins another scan; the first record must not be below `from`.
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
        if self.count > 0 && key <= self.last.as_slice() {
            self.wrong.get_or_insert_with(|| format!("a scan went backwards behind {} records", self.count));
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

/// Point reads of keys that exist, or of keys that do not.
pub(crate) struct ReadRandom {
    shape: Shape,
    rng: Rng,
    present: bool,
    key: Vec<u8>,
}

impl ReadRandom {
    /// The share of one thread.
    pub(crate) fn new(share: &Share, present: bool) -> ReadRandom {
        ReadRandom { shape: share.shape, rng: Rng::new(share.seed), present, key: Vec::new() }
    }
}

impl Work for ReadRandom {
    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        let index = self.rng.below(self.shape.n);
        if self.present {
            let generation = get_checked(engine, &self.shape, index, &mut self.key)?;
            if generation != FIRST_GENERATION {
                return Err(wrong(format!("record {index} has generation {generation}, which was never written")));
            }
        } else {
            self.shape.keys().write(MISSING + index, &mut self.key);
            if engine.get(&self.key, &mut |_| {})? {
                return Err(wrong("a key that was never written was found"));
            }
        }
        meter.done(1);
        Ok(())
    }
}

/// Full scans in key order.
pub(crate) struct ReadSeq {
    shape: Shape,
    check: ScanCheck,
}

impl ReadSeq {
    /// The share of one thread: it scans everything.
    pub(crate) fn new(share: &Share) -> ReadSeq {
        ReadSeq { shape: share.shape, check: ScanCheck::new(share.shape) }
    }
}

impl Work for ReadSeq {
    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        self.check.restart();
        let check = &mut self.check;
        let limit = self.shape.n.min(meter.left());
        let count = engine.scan(Scan::First, limit, &mut |key, value| {
            check.see(key, value);
            if check.count.is_multiple_of(SCAN_BUNDLE) {
                meter.done(SCAN_BUNDLE);
            }
        })?;
        meter.done(count % SCAN_BUNDLE);
        if count != limit {
            return Err(wrong(format!("a scan gave {count} records instead of {limit}")));
        }
        self.check.verdict()
    }
}

/// Seeks to a record and reads what follows.
pub(crate) struct SeekRandom {
    shape: Shape,
    rng: Rng,
    nexts: u64,
    key: Vec<u8>,
    check: ScanCheck,
}

impl SeekRandom {
    /// The share of one thread.
    pub(crate) fn new(share: &Share) -> SeekRandom {
        let check = ScanCheck::new(share.shape);
        SeekRandom { shape: share.shape, rng: Rng::new(share.seed), nexts: share.seek_nexts, key: Vec::new(), check }
    }
}

impl Work for SeekRandom {
    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        let index = self.rng.below(self.shape.n);
        self.shape.keys().write(index, &mut self.key);
        scan_checked(engine, &self.key, self.nexts.max(1), &mut self.check)?;
        meter.done(1);
        Ok(())
    }
}

/// Scans up to `limit` records from `from`, which must exist and come first.
pub(crate) fn scan_checked(engine: &dyn Engine, from: &[u8], limit: u64, check: &mut ScanCheck) -> Result<()> {
    check.restart();
    let mut first_is_right = true;
    engine.scan(Scan::From(from), limit, &mut |key, value| {
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

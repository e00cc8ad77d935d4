//! YCSB A to F.
//!
//! A thread updates and inserts only indices of its own class ([`Class`]), so the expected generation of every record
//! is known exactly to its writer and within one to everybody else. D reads the latest records of the thread's own
//! class.

use crate::engine::Engine;
use crate::failure::{Result, wrong};
use crate::machine::meter::Meter;
use crate::workload::fill::{Class, FIRST_GENERATION, Record};
use crate::workload::generations::Generations;
use crate::workload::read::get_checked;
use crate::workload::rng::Rng;
use crate::workload::scan::{ScanCheck, scan_checked};
use crate::workload::shape::Shape;
use crate::workload::workload::{Share, Work};
use crate::workload::zipf::{THETA, Zipf};
use std::sync::Arc;

/// Longest scan of workload E.
const LONGEST_SCAN: u64 = 100;

/// Workloads A, B, C and F: zipfian reads and updates.
pub(crate) struct ReadUpdate {
    shape: Shape,
    class: Class,
    rng: Rng,
    zipf: Zipf,
    reads_percent: u64,
    reads_before_writing: bool,
    generations: Arc<Generations>,
    updated: bool,
    record: Record,
}

impl ReadUpdate {
    /// The share of one thread: `reads_percent` reads, the rest updates (F reads before it writes).
    pub(crate) fn new(share: Share, reads_percent: u64, reads_before_writing: bool) -> ReadUpdate {
        ReadUpdate {
            shape: share.shape,
            class: Class::of(&share),
            rng: Rng::new(share.seed),
            zipf: Zipf::new(share.shape.n, THETA),
            reads_percent,
            reads_before_writing,
            updated: reads_percent < 100,
            generations: share.generations,
            record: Record::default(),
        }
    }

    /// Reads `index`; its generation must be one that was acknowledged before, or is being written now.
    fn read(&mut self, engine: &dyn Engine, index: u64) -> Result<u64> {
        let oldest = self.acknowledged(index);
        let generation = get_checked(engine, &self.shape, index, &mut self.record.key)?;
        let newest = self.acknowledged(index) + u64::from(self.updated);
        if generation < oldest || generation > newest {
            return Err(wrong(format!("record {index} has generation {generation}, not {oldest} to {newest}")));
        }
        Ok(generation)
    }

    fn acknowledged(&self, index: u64) -> u64 {
        if self.updated { self.generations.acknowledged(index) } else { FIRST_GENERATION }
    }

    fn update(&mut self, engine: &dyn Engine, index: u64, meter: &mut Meter<'_>) -> Result<()> {
        let before = self.generations.acknowledged(index);
        if self.reads_before_writing && self.read(engine, index)? != before {
            return Err(wrong(format!("record {index} changed under its only writer")));
        }
        self.record.put(engine, &self.shape, index, before + 1, meter)?;
        self.generations.acknowledge(index, before + 1);
        Ok(())
    }
}

impl Work for ReadUpdate {
    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        let index = self.zipf.scrambled(&mut self.rng);
        if self.rng.below(100) < self.reads_percent {
            self.read(engine, index)?;
        } else {
            self.update(engine, self.class.nearest(index), meter)?;
        }
        meter.done(1);
        Ok(())
    }
}

/// Workload D: reads of what was inserted lately, and inserts.
pub(crate) struct ReadLatest {
    shape: Shape,
    class: Class,
    rng: Rng,
    zipf: Zipf,
    /// Records of the thread's class, loaded and inserted.
    count: u64,
    record: Record,
}

impl ReadLatest {
    /// The share of one thread.
    pub(crate) fn new(share: Share) -> ReadLatest {
        let class = Class::of(&share);
        ReadLatest {
            shape: share.shape,
            class,
            rng: Rng::new(share.seed),
            zipf: Zipf::new(class.loaded(), THETA),
            count: class.loaded(),
            record: Record::default(),
        }
    }
}

impl Work for ReadLatest {
    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        if self.rng.below(100) < 95 {
            let index = self.class.nth(self.count - 1 - self.zipf.rank(&mut self.rng));
            get_checked(engine, &self.shape, index, &mut self.record.key)?;
        } else {
            let index = self.class.nth(self.count);
            self.record.put(engine, &self.shape, index, FIRST_GENERATION, meter)?;
            self.count += 1;
            meter.inserted(self.shape.record_bytes(index));
        }
        meter.done(1);
        Ok(())
    }
}

/// Workload E: short scans, and inserts.
pub(crate) struct ShortScans {
    shape: Shape,
    class: Class,
    rng: Rng,
    zipf: Zipf,
    count: u64,
    record: Record,
    check: ScanCheck,
}

impl ShortScans {
    /// The share of one thread.
    pub(crate) fn new(share: Share) -> ShortScans {
        let class = Class::of(&share);
        ShortScans {
            shape: share.shape,
            class,
            rng: Rng::new(share.seed),
            zipf: Zipf::new(share.shape.n, THETA),
            count: class.loaded(),
            record: Record::default(),
            check: ScanCheck::new(share.shape, false),
        }
    }
}

impl Work for ShortScans {
    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        if self.rng.below(100) < 95 {
            let index = self.zipf.scrambled(&mut self.rng);
            let length = 1 + self.rng.below(LONGEST_SCAN);
            self.shape.keys().write(index, &mut self.record.key);
            scan_checked(engine, &self.record.key, length, &mut self.check)?;
        } else {
            let index = self.class.nth(self.count);
            self.record.put(engine, &self.shape, index, FIRST_GENERATION, meter)?;
            self.count += 1;
            meter.inserted(self.shape.record_bytes(index));
        }
        meter.done(1);
        Ok(())
    }
}

//! Workloads of point reads: readrandom, readzipf, readmissing, blobread. Every value is checked to the last byte.

use crate::engine::Engine;
use crate::failure::{Result, wrong};
use crate::machine::meter::Meter;
use crate::workload::fill::FIRST_GENERATION;
use crate::workload::rng::Rng;
use crate::workload::shape::Shape;
use crate::workload::workload::{Share, Work};
use crate::workload::zipf::Zipf;

/// Far above every index that is ever written.
const MISSING: u64 = 1 << 48;

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

/// Which keys are read.
pub(crate) enum Choice {
    /// Those that exist, each as often as any other.
    Uniform,
    /// Those that exist, some very often.
    Zipf(Zipf),
    /// Some that do not exist.
    Missing,
}

/// Point reads.
pub(crate) struct ReadRandom {
    shape: Shape,
    rng: Rng,
    choice: Choice,
    key: Vec<u8>,
}

impl ReadRandom {
    /// The share of one thread.
    pub(crate) fn new(share: &Share, choice: Choice) -> ReadRandom {
        ReadRandom { shape: share.shape, rng: Rng::new(share.seed), choice, key: Vec::new() }
    }
}

impl Work for ReadRandom {
    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        let index = match &self.choice {
            Choice::Zipf(zipf) => zipf.scrambled(&mut self.rng),
            Choice::Uniform | Choice::Missing => self.rng.below(self.shape.n),
        };
        if !matches!(self.choice, Choice::Missing) {
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

//! Puts and gets, half and half, over many partitions of one database.

use crate::engine::Engine;
use crate::failure::{Result, wrong};
use crate::machine::meter::Meter;
use crate::workload::fill::{Class, FIRST_GENERATION, Record};
use crate::workload::read::get_checked;
use crate::workload::rng::{Rng, mix};
use crate::workload::shape::Shape;
use crate::workload::workload::{Partitions, Share, Work};

/// Spreads records over partitions otherwise than over the key space.
const SPREAD: u64 = 0xbb67_ae85_84ca_a73b;

/// One thread's records, in all partitions.
pub(crate) struct Spread {
    shape: Shape,
    class: Class,
    rng: Rng,
    partitions: Partitions,
    count: u64,
    record: Record,
}

impl Spread {
    /// The share of one thread; it has at least one partition.
    pub(crate) fn new(share: Share) -> Spread {
        Spread {
            shape: share.shape,
            class: Class::of(&share),
            rng: Rng::new(share.seed),
            partitions: share.partitions,
            count: 0,
            record: Record::default(),
        }
    }

    fn place(&self, index: u64) -> usize {
        (mix(index ^ SPREAD) % self.partitions.len() as u64) as usize
    }

    fn read(&mut self, index: u64) -> Result<()> {
        let partition = self.partitions[self.place(index)].as_ref();
        let generation = get_checked(partition, &self.shape, index, &mut self.record.key)?;
        if generation != FIRST_GENERATION {
            return Err(wrong(format!("record {index} has generation {generation}, which was never written")));
        }
        Ok(())
    }
}

impl Work for Spread {
    fn step(&mut self, _: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        if self.count == 0 || self.rng.below(2) == 0 {
            let index = self.class.nth(self.count);
            let partition = self.partitions[self.place(index)].as_ref();
            self.record.put(partition, &self.shape, index, FIRST_GENERATION, meter)?;
            meter.inserted(self.shape.record_bytes(index));
            self.count += 1;
        } else {
            let index = self.class.nth(self.rng.below(self.count));
            self.read(index)?;
        }
        meter.done(1);
        Ok(())
    }

    fn verify(&mut self, _: &dyn Engine, most: u64) -> Result<()> {
        for _ in 0..self.count.min(most) {
            let index = self.class.nth(self.rng.below(self.count));
            self.read(index)?;
            let other = (self.place(index) + 1) % self.partitions.len();
            if self.partitions[other].get(&self.record.key, &mut |_| {})? {
                return Err(wrong(format!("record {index} is in a partition it was not written to")));
            }
        }
        Ok(())
    }
}

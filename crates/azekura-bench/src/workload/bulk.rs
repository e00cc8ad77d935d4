//! Bulk load: ascending keys in batches, and a sync at the end that counts.

use crate::engine::Engine;
use crate::failure::Result;
use crate::machine::meter::Meter;
use crate::workload::fill::{self, BATCH_RECORDS, Batch, FIRST_GENERATION};
use crate::workload::shape::Shape;
use crate::workload::workload::{Share, Work};

/// One thread's stretch of the data set.
pub(crate) struct BulkLoad {
    shape: Shape,
    seed: u64,
    first: u64,
    next: u64,
    batch: Batch,
}

impl BulkLoad {
    /// The share of one thread.
    pub(crate) fn new(share: &Share) -> BulkLoad {
        let first = share.stretch();
        BulkLoad { shape: share.shape, seed: share.seed, first, next: first, batch: Batch::default() }
    }
}

impl Work for BulkLoad {
    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        let count = BATCH_RECORDS.min(meter.left());
        let indices = self.next..self.next + count;
        let end = self.batch.put(engine, &self.shape, indices.clone(), FIRST_GENERATION)?;
        for index in indices.start..end {
            let bytes = self.shape.record_bytes(index);
            meter.wrote(bytes);
            meter.inserted(bytes);
        }
        meter.done(end - self.next);
        self.next = end;
        Ok(())
    }

    fn finish(&mut self, engine: &dyn Engine) -> Result<()> {
        engine.sync()
    }

    fn verify(&mut self, engine: &dyn Engine, most: u64) -> Result<()> {
        let (first, count) = (self.first, self.next - self.first);
        fill::verify(engine, &self.shape, self.seed, count, most, |i| first + i)
    }
}

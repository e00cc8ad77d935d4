//! The delete-heavy workload: first-in-first-out queues of steady depth.
//!
//! Each thread has a queue of its own in the one database: it appends ten records behind the last, then scans for the
//! first ten and deletes them. A scan begins where the queue began, not where it was left: everything consumed lies
//! before it as tombstones, until the engine drops them.

use crate::engine::{Engine, Scan};
use crate::failure::{Result, wrong};
use crate::machine::meter::Meter;
use crate::workload::fill::{FIRST_GENERATION, Record};
use crate::workload::shape::Shape;
use crate::workload::workload::{Share, Work};
use std::time::Instant;

/// Records appended, and consumed, in one go.
const BATCH: u64 = 10;

/// Bits of an index that count within one queue.
const QUEUE_BITS: u32 = 40;

/// One thread's queue.
pub(crate) struct Queue {
    shape: Shape,
    /// Index of its first record ever.
    start: u64,
    depth: u64,
    consumed: u64,
    produced: u64,
    record: Record,
}

impl Queue {
    /// The share of one thread: an equal part of the depth.
    pub(crate) fn new(share: &Share) -> Queue {
        let depth = (share.depth / share.threads).max(BATCH);
        let start = share.thread << QUEUE_BITS;
        Queue { shape: share.shape, start, depth, consumed: 0, produced: 0, record: Record::default() }
    }

    /// The first `count` records: they must be the oldest that were not deleted. Gives their keys.
    fn first(&mut self, engine: &dyn Engine, count: u64) -> Result<Vec<Vec<u8>>> {
        self.shape.keys().write(self.start, &mut self.record.key);
        let mut next = self.start + self.consumed;
        let mut keys = Vec::with_capacity(count as usize);
        let mut bad = false;
        engine.scan(Scan::From(&self.record.key), count, &mut |key, value| {
            let right = self.shape.keys().index_of(key) == Some(next)
                && self.shape.values().check(next, value) == Some(FIRST_GENERATION);
            bad |= !right;
            next += 1;
            keys.push(key.to_vec());
        })?;
        if bad || keys.len() as u64 != count {
            let place = self.consumed;
            return Err(wrong(format!("the head of a queue is not what it must be behind {place} items")));
        }
        Ok(keys)
    }
}

impl Work for Queue {
    fn prepare(&mut self, engine: &dyn Engine) -> Result<u64> {
        let (from, to) = (self.start, self.start + self.depth);
        self.produced = self.depth;
        crate::workload::fill::load(engine, &self.shape, from..to)?;
        Ok((from..to).map(|index| self.shape.record_bytes(index)).sum())
    }

    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        let count = BATCH.min(meter.left());
        for _ in 0..count {
            let index = self.start + self.produced;
            self.record.put(engine, &self.shape, index, FIRST_GENERATION, meter)?;
            meter.inserted(self.shape.record_bytes(index));
            self.produced += 1;
        }
        let begun = Instant::now();
        for key in self.first(engine, count)? {
            engine.delete(&key)?;
            meter.removed(self.shape.record_bytes(self.start + self.consumed));
            self.consumed += 1;
        }
        meter.part(begun.elapsed());
        meter.done(count);
        Ok(())
    }

    fn verify(&mut self, engine: &dyn Engine, most: u64) -> Result<()> {
        self.first(engine, (self.produced - self.consumed).min(most.max(BATCH)))?;
        // Deletes that were lost would show before the first record, a lost record as a gap.
        for index in [self.consumed.checked_sub(1), self.consumed.checked_sub(BATCH)].into_iter().flatten() {
            self.shape.keys().write(self.start + index, &mut self.record.key);
            if engine.get(&self.record.key, &mut |_| {})? {
                return Err(wrong(format!("item {index} of a queue is there although it was deleted")));
            }
        }
        Ok(())
    }
}

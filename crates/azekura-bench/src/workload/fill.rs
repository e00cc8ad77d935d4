//! Workloads that only write: fillseq, fillrandom, fillsync, blobload, overwrite, bloboverwrite; and how databases are
//! loaded, in batches.

use crate::engine::Engine;
use crate::failure::{Result, wrong};
use crate::machine::meter::Meter;
use crate::workload::generations::Generations;
use crate::workload::read::get_checked;
use crate::workload::rng::Rng;
use crate::workload::shape::Shape;
use crate::workload::workload::{Share, Work};
use std::ops::Range;
use std::sync::Arc;

/// Generation of a record when it is first written.
pub(crate) const FIRST_GENERATION: u64 = 1;

/// Buffers to build a record in, reused from one operation to the next.
#[derive(Debug, Default)]
pub(crate) struct Record {
    pub(crate) key: Vec<u8>,
    pub(crate) value: Vec<u8>,
}

impl Record {
    /// Builds and writes one record, and tells the meter its bytes.
    pub(crate) fn put(
        &mut self,
        engine: &dyn Engine,
        shape: &Shape,
        index: u64,
        generation: u64,
        meter: &mut Meter<'_>,
    ) -> Result<()> {
        shape.keys().write(index, &mut self.key);
        shape.values().write(index, generation, &mut self.value);
        engine.put(&self.key, &self.value)?;
        meter.wrote((self.key.len() + self.value.len()) as u64);
        Ok(())
    }
}

/// Most records of one batch.
pub(crate) const BATCH_RECORDS: u64 = 1000;
/// Bytes behind which a batch ends early, so that blobs do not make it huge.
const BATCH_BYTES: u64 = 4 << 20;

/// Buffers to build a batch in, reused from one to the next.
#[derive(Debug, Default)]
pub(crate) struct Batch(Vec<(Vec<u8>, Vec<u8>)>);

impl Batch {
    /// Writes the records of `indices` as one batch, or as many of them as it may hold; gives the first index left out.
    pub(crate) fn put(
        &mut self,
        engine: &dyn Engine,
        shape: &Shape,
        indices: Range<u64>,
        generation: u64,
    ) -> Result<u64> {
        let (mut count, mut bytes) = (0, 0);
        let mut next = indices.start;
        while next < indices.end && bytes < BATCH_BYTES {
            if count == self.0.len() {
                self.0.push((Vec::new(), Vec::new()));
            }
            let (key, value) = &mut self.0[count];
            shape.keys().write(next, key);
            shape.values().write(next, generation, value);
            bytes += (key.len() + value.len()) as u64;
            count += 1;
            next += 1;
        }
        engine.put_batch(&self.0[..count])?;
        Ok(next)
    }
}

/// Writes records in batches, unmeasured: a transaction for each would take some engines minutes.
pub(crate) fn load(engine: &dyn Engine, shape: &Shape, indices: Range<u64>) -> Result<()> {
    let mut batch = Batch::default();
    let mut next = indices.start;
    while next < indices.end {
        next = batch.put(engine, shape, next..indices.end.min(next + BATCH_RECORDS), FIRST_GENERATION)?;
    }
    Ok(())
}

/// Reads back up to `most` of `count` records that were written once; `nth` gives their indices.
pub(crate) fn verify(
    engine: &dyn Engine,
    shape: &Shape,
    seed: u64,
    count: u64,
    most: u64,
    nth: impl Fn(u64) -> u64,
) -> Result<()> {
    let mut rng = Rng::new(seed ^ 0xfeed);
    let mut key = Vec::new();
    for i in 0..count.min(most) {
        // All of a few; of many, the last and some others.
        let which = if count <= most || i == 0 { count - 1 - i } else { rng.below(count) };
        let (index, expected) = (nth(which), FIRST_GENERATION);
        let found = get_checked(engine, shape, index, &mut key)?;
        if found != expected {
            return Err(wrong(format!("record {index} has generation {found} at the end, not {expected}")));
        }
    }
    Ok(())
}

/// Writes each of the thread's indices once.
pub(crate) struct Fill {
    shape: Shape,
    seed: u64,
    first: u64,
    stride: u64,
    written: u64,
    record: Record,
}

impl Fill {
    /// The indices of one thread: a stretch of its own when keys ascend, every `threads`-th index otherwise.
    pub(crate) fn new(share: &Share, ascending: bool) -> Fill {
        let (first, stride) = if ascending { (share.stretch(), 1) } else { (share.thread, share.threads) };
        Fill { shape: share.shape, seed: share.seed, first, stride, written: 0, record: Record::default() }
    }
}

impl Work for Fill {
    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        let index = self.first + self.written * self.stride;
        self.record.put(engine, &self.shape, index, FIRST_GENERATION, meter)?;
        self.written += 1;
        meter.inserted(self.shape.record_bytes(index));
        meter.done(1);
        Ok(())
    }

    fn verify(&mut self, engine: &dyn Engine, most: u64) -> Result<()> {
        let (first, stride) = (self.first, self.stride);
        verify(engine, &self.shape, self.seed, self.written, most, |i| first + i * stride)
    }
}

/// Writes the next generation of random records of the thread's own class.
pub(crate) struct Overwrite {
    shape: Shape,
    class: Class,
    rng: Rng,
    generations: Arc<Generations>,
    record: Record,
}

impl Overwrite {
    /// The share of one thread.
    pub(crate) fn new(share: Share) -> Overwrite {
        Overwrite {
            shape: share.shape,
            class: Class::of(&share),
            rng: Rng::new(share.seed),
            generations: share.generations,
            record: Record::default(),
        }
    }
}

impl Work for Overwrite {
    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        let index = self.class.nearest(self.rng.below(self.shape.n));
        let generation = self.generations.acknowledged(index) + 1;
        self.record.put(engine, &self.shape, index, generation, meter)?;
        self.generations.acknowledge(index, generation);
        meter.done(1);
        Ok(())
    }
}

/// The indices one thread may write: those with its number as remainder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Class {
    n: u64,
    thread: u64,
    threads: u64,
}

impl Class {
    /// The class of a share; `n` must be at least the number of threads.
    pub(crate) fn of(share: &Share) -> Class {
        Class { n: share.shape.n, thread: share.thread, threads: share.threads }
    }

    /// An index of the class next to `index`, inside the data set.
    pub(crate) fn nearest(&self, index: u64) -> u64 {
        let own = index - index % self.threads + self.thread;
        if own < self.n { own } else { own - self.threads }
    }

    /// The `i`-th index of the class, which may lie behind the loaded records.
    pub(crate) fn nth(&self, i: u64) -> u64 {
        i * self.threads + self.thread
    }

    /// How many loaded records are in the class.
    pub(crate) fn loaded(&self) -> u64 {
        (self.n + self.threads - 1 - self.thread) / self.threads
    }
}

#[cfg(test)]
mod tests {
    use super::Class;

    #[test]
    fn classes_share_the_indices_out() {
        for (n, threads) in [(10, 1), (10, 3), (11, 4), (4, 4)] {
            let classes: Vec<Class> = (0..threads).map(|thread| Class { n, thread, threads }).collect();
            let mut all: Vec<u64> = classes.iter().flat_map(|c| (0..c.loaded()).map(|i| c.nth(i))).collect();
            all.sort_unstable();
            assert_eq!(all, (0..n).collect::<Vec<_>>());
            for class in &classes {
                for index in 0..n {
                    let own = class.nearest(index);
                    assert!(own < n && own % threads == class.thread, "{own} for {index} in {class:?}");
                }
            }
        }
    }
}

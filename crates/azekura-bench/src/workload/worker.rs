//! One thread's share of a workload.
//!
//! A thread updates and inserts only indices of its own residue class, so its expected generations are exact, and those
//! of other threads are known within one. A queue is a separate range of keys for each thread; a scan of its head
//! begins where the queue began, so all deleted records precede the first live one.

use crate::engine::{Engine, Scan};
use crate::error::{Result, wrong};
use crate::measure::meter::Meter;
use crate::workload::data::{BatchBuffer, FIRST_GENERATION, MISSING, Zipfian, below, load, mix, rng};
use crate::workload::spec::{Pick, Step};
use crate::workload::{Shape, Workload};
use anyhow::ensure;
use rand::rngs::SmallRng;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Records that a queue appends, and consumes, in one step.
const QUEUE_STEP: u64 = 10;
/// Bits of an index that count within one queue.
const QUEUE_BITS: u32 = 40;
/// Longest sleep of a paced writer, so that it ends with the readers.
const LONGEST_SLEEP: Duration = Duration::from_millis(20);
/// Makes the choice of a partition independent of the key.
const SPREAD: u64 = 0xbb67_ae85_84ca_a73b;
/// Records of a full scan that share one reading of the clock.
const BUNDLE: u64 = 1000;
/// Records after which a full scan starts again at its position, so that a time limit can end it.
const SEGMENT: u64 = 100_000;

/// The newest acknowledged generation of each record; each index is written by one thread only.
#[derive(Debug, Default)]
pub(crate) struct Generations(Vec<AtomicU32>);

impl Generations {
    pub(crate) fn new(n: u64) -> Generations {
        Generations((0..n).map(|_| AtomicU32::new(FIRST_GENERATION as u32)).collect())
    }

    /// The newest acknowledged generation of `index`; the first one for records that are never updated.
    fn of(&self, index: u64) -> u64 {
        self.0.get(index as usize).map_or(FIRST_GENERATION, |own| u64::from(own.load(Ordering::Acquire)))
    }

    fn acknowledge(&self, index: u64, generation: u64) {
        self.0[index as usize].store(u32::try_from(generation).unwrap_or(u32::MAX), Ordering::Release);
    }
}

/// The part of a measurement that one thread carries out.
#[derive(Clone)]
pub(crate) struct Share {
    pub(crate) shape: Shape,
    /// This thread's number, from 0.
    pub(crate) thread: u64,
    pub(crate) threads: u64,
    pub(crate) seed: u64,
    /// Records of all queues together.
    pub(crate) depth: u64,
    /// Empty for workloads that update nothing.
    pub(crate) generations: Arc<Generations>,
    /// Further partitions of the open database.
    pub(crate) partitions: Arc<Vec<Box<dyn Engine>>>,
}

impl Share {
    /// The `i`-th index of this thread. Sequential indices form a range, so that each thread writes in key order.
    fn nth(&self, i: u64) -> u64 {
        let (each, rest) = (self.shape.n / self.threads, self.shape.n % self.threads);
        let range_start = each * self.thread + self.thread.min(rest);
        if self.shape.sequential { range_start + i } else { i * self.threads + self.thread }
    }

    /// Loaded records of this thread.
    fn loaded(&self) -> u64 {
        (self.shape.n + self.threads - 1 - self.thread) / self.threads
    }

    /// An index of this thread near `index`, inside the data set.
    fn nearest(&self, index: u64) -> u64 {
        let own = index - index % self.threads + self.thread;
        if own < self.shape.n { own } else { own - self.threads }
    }
}

/// Limits a writer to a rate. A writer that was delayed catches up.
struct Pace {
    per_s: u64,
    begun: Option<Instant>,
    written: u64,
}

/// One thread at work.
pub(crate) struct Worker {
    workload: Workload,
    share: Share,
    rng: SmallRng,
    zipf: Option<Zipfian>,
    pace: Option<Pace>,
    /// Records of this thread that exist, loaded or inserted.
    count: u64,
    /// Records that were removed from its queue.
    consumed: u64,
    key: Vec<u8>,
    value: Vec<u8>,
    batch: BatchBuffer,
    check: ScanCheck,
    /// The last key in scan order: only there may a scan of fixed length end early.
    end: Vec<u8>,
}

impl Worker {
    pub(crate) fn new(workload: Workload, share: Share) -> Worker {
        let count = if workload.loads { share.loaded() } else { 0 };
        let zipf = match workload.pick {
            Pick::Uniform | Pick::Inserted => None,
            Pick::Zipfian => Some(Zipfian::new(share.shape.n)),
            Pick::Latest => Some(Zipfian::new(count)),
        };
        let key = |index| {
            let mut key = Vec::new();
            share.shape.key(index, &mut key);
            key
        };
        let keys = (0..if workload.steps.contains_key(&Step::Scan) { share.shape.n } else { 0 }).map(key);
        let end = if workload.reverse { keys.min() } else { keys.max() }.unwrap_or_default();
        let check = ScanCheck::new(share.shape, workload.reverse);
        let (rng, batch, value) = (rng(share.seed), BatchBuffer::default(), Vec::new());
        Worker { workload, share, rng, zipf, pace: None, count, consumed: 0, key: Vec::new(), value, batch, check, end }
    }

    /// The same worker, which writes `per_s` records a second; as many as it can if that is 0.
    pub(crate) fn paced(self, per_s: u64) -> Worker {
        Worker { pace: Some(Pace { per_s, begun: None, written: 0 }), ..self }
    }

    /// Runs before the clock starts; returns the bytes that it added to the data set.
    pub(crate) fn prepare(&mut self, engine: &dyn Engine) -> Result<u64> {
        if !self.workload.steps.contains_key(&Step::Queue) {
            return Ok(0);
        }
        self.count = (self.share.depth / self.share.threads).max(QUEUE_STEP);
        let indices = self.queued(0)..self.queued(self.count);
        load(engine, &self.share.shape, indices.clone())?;
        Ok(indices.map(|index| self.share.shape.record_bytes(index)).sum())
    }

    fn choose_step(&mut self) -> Step {
        if self.workload.pick == Pick::Inserted && self.count == 0 {
            return Step::Insert; // there is nothing to read
        }
        let mut drawn = if self.workload.steps.len() == 1 { 0 } else { below(&mut self.rng, 100) };
        for (step, percent) in &self.workload.steps {
            if drawn < *percent {
                return *step;
            }
            drawn -= percent;
        }
        Step::Read
    }

    /// Carries out the next step and counts it.
    pub(crate) fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        match self.choose_step() {
            Step::Insert => {
                self.put(engine, self.share.nth(self.count), FIRST_GENERATION, true, meter)?;
                self.count += 1;
            }
            Step::Batch => return self.insert_batch(engine, meter),
            Step::Update => return self.update(engine, meter),
            Step::Read => {
                let index = self.pick();
                self.read(engine, index)?;
            }
            Step::Missing => {
                self.share.shape.key(MISSING + below(&mut self.rng, self.share.shape.n), &mut self.key);
                if engine.get(&self.key, &mut |_| {})? {
                    return Err(wrong("a key that was never written was found"));
                }
            }
            Step::ReadModifyWrite => {
                let picked = self.pick();
                let index = self.share.nearest(picked);
                let before = self.share.generations.of(index);
                let unchanged = self.read(engine, index)? == before;
                ensure!(unchanged, wrong(format!("record {index} changed, although only this thread writes it")));
                self.put(engine, index, before + 1, false, meter)?;
                self.share.generations.acknowledge(index, before + 1);
            }
            Step::Scan => self.scan(engine)?,
            Step::ScanAll => return self.check.all(engine, self.share.shape.n, meter),
            Step::Queue => return self.queue(engine, meter),
        }
        meter.done(1);
        Ok(())
    }

    /// Runs after the last step, before the clock stops.
    pub(crate) fn finish(&mut self, engine: &dyn Engine) -> Result<()> {
        if self.workload.steps.contains_key(&Step::Batch) { engine.sync() } else { Ok(()) }
    }

    /// Reads back about `most` records, uncounted, after the engine has settled: each must have the generation that was
    /// acknowledged last.
    pub(crate) fn verify(&mut self, engine: &dyn Engine, most: u64) -> Result<()> {
        if self.workload.steps.contains_key(&Step::Queue) {
            return self.verify_queue(engine, most);
        }
        let written = if self.workload.loads { self.share.shape.n } else { self.count };
        for i in 0..if self.workload.writes() { written.min(most) } else { 0 } {
            // All of a few; of many the last one and random ones.
            let i = if written <= most || i == 0 { written - 1 - i } else { below(&mut self.rng, written) };
            let index = if self.workload.loads { i } else { self.share.nth(i) };
            let expected = self.share.generations.of(index);
            let generation = self.read(engine, index)?;
            ensure!(
                generation == expected,
                wrong(format!("record {index} has generation {generation} at the end, not {expected}"))
            );
            let partitions = &self.share.partitions;
            let other = partitions.get((self.partition_of(index) + 1) % partitions.len().max(1));
            if other.map_or(Ok(false), |other| other.get(&self.key, &mut |_| {}))? {
                return Err(wrong(format!("record {index} is in a partition to which it was not written")));
            }
        }
        Ok(())
    }

    fn pick(&mut self) -> u64 {
        let Worker { share, rng, zipf, .. } = self;
        match (self.workload.pick, zipf) {
            (Pick::Latest, Some(zipf)) => share.nth(self.count - 1 - zipf.rank(rng)),
            (_, Some(zipf)) => zipf.index(rng),
            (Pick::Inserted, None) => share.nth(below(rng, self.count)),
            (_, None) => below(rng, share.shape.n),
        }
    }

    fn partition_of(&self, index: u64) -> usize {
        (mix(index ^ SPREAD) % self.share.partitions.len().max(1) as u64) as usize
    }

    /// Reads a record. Its generation must be acknowledged, or be the one that its writer writes now.
    fn read(&mut self, engine: &dyn Engine, index: u64) -> Result<u64> {
        let share = &self.share;
        let engine = share.partitions.get(self.partition_of(index)).map_or(engine, Box::as_ref);
        let oldest = share.generations.of(index);
        let generation = share.shape.get(engine, index, &mut self.key)?;
        let newest = share.generations.of(index) + u64::from(!share.generations.0.is_empty());
        let known = (oldest..=newest).contains(&generation);
        ensure!(known, wrong(format!("record {index} has generation {generation}, not {oldest} to {newest}")));
        Ok(generation)
    }

    /// Writes a record; `new` if the data set grows by it.
    fn put(
        &mut self,
        engine: &dyn Engine,
        index: u64,
        generation: u64,
        new: bool,
        meter: &mut Meter<'_>,
    ) -> Result<()> {
        let share = &self.share;
        let engine = share.partitions.get(self.partition_of(index)).map_or(engine, Box::as_ref);
        share.shape.key(index, &mut self.key);
        share.shape.value(index, generation, &mut self.value);
        engine.put(&self.key, &self.value)?;
        meter.wrote((self.key.len() + self.value.len()) as u64, new);
        Ok(())
    }

    fn insert_batch(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        let indices = (self.count..self.count + meter.left()).map(|i| self.share.nth(i));
        let written = self.batch.put(engine, &self.share.shape, indices)?;
        for i in self.count..self.count + written {
            meter.wrote(self.share.shape.record_bytes(self.share.nth(i)), true);
        }
        self.count += written;
        meter.done(written);
        Ok(())
    }

    fn update(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        if let Some(pace) = self.pace.as_mut().filter(|pace| pace.per_s > 0) {
            let due = Duration::from_secs_f64(pace.written as f64 / pace.per_s as f64);
            let early = due.saturating_sub(pace.begun.get_or_insert_with(Instant::now).elapsed());
            if !early.is_zero() {
                sleep(early.min(LONGEST_SLEEP));
                return Ok(());
            }
            pace.written += 1;
            meter.begin();
        }
        let picked = self.pick();
        let index = self.share.nearest(picked);
        let generation = self.share.generations.of(index) + 1;
        self.put(engine, index, generation, false, meter)?;
        self.share.generations.acknowledge(index, generation);
        meter.done(1);
        Ok(())
    }

    fn scan(&mut self, engine: &dyn Engine) -> Result<()> {
        let index = self.pick();
        let drawn = self.workload.scan_at_most.map(|most| 1 + below(&mut self.rng, most));
        let length = drawn.or(self.workload.scan_length).unwrap_or(1);
        self.share.shape.key(index, &mut self.key);
        self.check.some(engine, &self.key, length)?;
        let count = self.check.count;
        let may_end_early = drawn.is_some() || self.check.last == self.end;
        let right = count == length || (count < length && may_end_early);
        ensure!(right, wrong(format!("a scan of {length} records returned {count}")));
        Ok(())
    }

    /// Index of the `i`-th record ever of this thread's queue.
    fn queued(&self, i: u64) -> u64 {
        (self.share.thread << QUEUE_BITS) + i
    }

    fn queue(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        let count = QUEUE_STEP.min(meter.left());
        for _ in 0..count {
            self.put(engine, self.queued(self.count), FIRST_GENERATION, true, meter)?;
            self.count += 1;
        }
        let begun = Instant::now();
        for key in self.head_of_queue(engine, count)? {
            engine.delete(&key)?;
            meter.tally.live_bytes -= self.share.shape.record_bytes(self.queued(self.consumed)) as i64;
            self.consumed += 1;
        }
        meter.consumed(begun.elapsed());
        meter.done(count);
        Ok(())
    }

    /// Scans the first `count` records, which must be the oldest that were not deleted; returns their keys.
    fn head_of_queue(&mut self, engine: &dyn Engine, count: u64) -> Result<Vec<Vec<u8>>> {
        let (shape, mut next) = (self.share.shape, self.queued(self.consumed));
        shape.key(self.queued(0), &mut self.key);
        let (mut keys, mut right) = (Vec::with_capacity(count as usize), true);
        engine.scan(Scan::From(&self.key), count, &mut |key, value| {
            right &= shape.index_of(key) == Some(next) && shape.check(next, value) == Some(FIRST_GENERATION);
            next += 1;
            keys.push(key.to_vec());
        })?;
        right &= keys.len() as u64 == count;
        ensure!(right, wrong(format!("the head of a queue is wrong after {} items", self.consumed)));
        Ok(keys)
    }

    /// A lost delete shows before the first record, a lost record as a gap.
    fn verify_queue(&mut self, engine: &dyn Engine, most: u64) -> Result<()> {
        self.head_of_queue(engine, (self.count - self.consumed).min(most.max(QUEUE_STEP)))?;
        for back in [1, QUEUE_STEP].into_iter().filter(|back| *back <= self.consumed) {
            let index = self.queued(self.consumed - back);
            let found = self.share.shape.find(engine, index, &mut self.key)?;
            ensure!(found.is_none(), wrong(format!("record {index} of a queue exists although it was deleted")));
        }
        Ok(())
    }
}

/// Checks the records of one scan after the other.
struct ScanCheck {
    shape: Shape,
    reverse: bool,
    last: Vec<u8>,
    /// Records seen.
    count: u64,
    error: Option<String>,
}

impl ScanCheck {
    fn new(shape: Shape, reverse: bool) -> ScanCheck {
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
    fn some(&mut self, engine: &dyn Engine, from: &[u8], limit: u64) -> Result<()> {
        (self.count, self.error) = (0, None);
        let scan = if self.reverse { Scan::Back(from) } else { Scan::From(from) };
        let mut first_is_right = true;
        engine.scan(scan, limit, &mut |key, value| {
            first_is_right &= self.count > 0 || key == from;
            self.see(key, value);
        })?;
        let begins = self.count > 0 && first_is_right;
        ensure!(begins, wrong("a scan did not begin at the record that was asked for"));
        self.verdict()
    }

    /// Scans all `n` records once, or until the meter is over.
    fn all(&mut self, engine: &dyn Engine, n: u64, meter: &mut Meter<'_>) -> Result<()> {
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
        right &= got == count && !known;
        ensure!(right, wrong(format!("a scan returned {got} records instead of {count} after {before}")));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Generations, Share};
    use crate::workload::Shape;
    use crate::workload::data::SMALL_RECORDS;
    use std::sync::Arc;

    #[test]
    fn threads_partition_the_indices() {
        for sequential in [false, true] {
            for (n, threads) in [(10, 1), (10, 3), (11, 4), (4, 4)] {
                let share = |thread| Share {
                    shape: Shape { n, sequential, ..SMALL_RECORDS },
                    thread,
                    threads,
                    seed: 0,
                    depth: 0,
                    generations: Arc::default(),
                    partitions: Arc::default(),
                };
                let shares: Vec<Share> = (0..threads).map(share).collect();
                let mut all: Vec<u64> = shares.iter().flat_map(|s| (0..s.loaded()).map(|i| s.nth(i))).collect();
                all.sort_unstable();
                assert_eq!(all, (0..n).collect::<Vec<_>>());
                for (share, index) in shares.iter().flat_map(|share| (0..n).map(move |index| (share, index))) {
                    let own = share.nearest(index);
                    assert!(own < n && own % threads == share.thread, "{own} for {index}");
                }
            }
        }
    }

    #[test]
    fn generations_are_kept_for_each_index() {
        let generations = Generations::new(3);
        generations.acknowledge(1, 5);
        assert_eq!([0, 1, 2, 9].map(|index| generations.of(index)), [1, 5, 1, 1]);
    }
}

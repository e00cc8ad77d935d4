//! One thread of a workload.
//!
//! A thread updates and inserts only indices of its own residue class, so its expected generations are exact, and those
//! of other threads are known within one. A queue is a separate range of keys for each thread; a scan of its head
//! begins where the queue began, so all deleted records precede the first live one.

use crate::engine::{Engine, Scan};
use crate::error::{Result, wrong};
use crate::measure::meter::{Meter, OpStats};
use crate::workload::data::{BatchBuffer, FIRST_GENERATION, MISSING, Zipfian, below, load, mix, rng};
use crate::workload::spec::{Pick, Step};
use crate::workload::{Shape, Workload};
use anyhow::ensure;
use rand::rngs::SmallRng;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Records that a queue appends, and consumes, in one step.
const QUEUE_STEP: u64 = 10;
/// Records of an ingest between two looks at the time limit.
const INGEST_STEP: u64 = 1_000;
/// Records that a transaction reads and writes.
const TRANSACTION_RECORDS: usize = 4;
/// Bits of an index that count within one queue.
const QUEUE_BITS: u32 = 40;
/// Longest sleep of a paced writer, so that it ends with the readers.
const LONGEST_SLEEP: Duration = Duration::from_millis(20);
/// Seed of the hash that chooses a partition, so that the choice is independent of the key.
const PARTITION_SEED: u64 = 0xbb67_ae85_84ca_a73b;
/// Records of a full scan that share one reading of the clock.
const BUNDLE: u64 = 1000;

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

/// The state that the threads of a measurement have in common.
pub(crate) struct SharedState<'a> {
    pub(crate) shape: Shape,
    /// Records of all queues together.
    pub(crate) depth: u64,
    pub(crate) engine: &'a dyn Engine,
    /// Further partitions of the open database.
    pub(crate) partitions: Vec<Box<dyn Engine>>,
    /// Empty for workloads that update nothing.
    pub(crate) generations: Generations,
}

/// The part of the records that one thread writes.
#[derive(Clone, Copy)]
pub(crate) struct ThreadRecords {
    pub(crate) shape: Shape,
    /// This thread's number, from 0.
    pub(crate) thread: u64,
    pub(crate) threads: u64,
}

impl ThreadRecords {
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

/// One thread at work.
pub(crate) struct Worker<'a> {
    workload: Workload,
    shared: &'a SharedState<'a>,
    records: ThreadRecords,
    rng: SmallRng,
    zipf: Option<Zipfian>,
    /// Time between updates; none for as many as possible.
    interval: Option<Duration>,
    /// When the next update is due. A writer that was delayed catches up.
    due: Option<Instant>,
    /// Records of this thread that exist, loaded or inserted.
    count: u64,
    /// Records that were removed from its queue.
    consumed: u64,
    key: Vec<u8>,
    value: Vec<u8>,
    batch: BatchBuffer,
    /// The last record in scan order: only there may a scan of fixed length end early.
    end: Option<u64>,
}

impl<'a> Worker<'a> {
    pub(crate) fn new(
        workload: &Workload,
        shared: &'a SharedState<'a>,
        records: ThreadRecords,
        seed: u64,
    ) -> Worker<'a> {
        let (shape, workload) = (shared.shape, workload.clone());
        let count = if workload.loads { records.loaded() } else { 0 };
        let zipf = match workload.pick {
            Pick::Uniform | Pick::Inserted => None,
            Pick::Zipfian => Some(Zipfian::new(shape.n)),
            Pick::Latest => Some(Zipfian::new(count)),
        };
        let position = |index: &u64| if workload.reverse { !shape.number(*index) } else { shape.number(*index) };
        let scanned = if workload.has(&[Step::Scan]) { shape.n } else { 0 };
        Worker {
            rng: rng(seed.wrapping_mul(1 << 20).wrapping_add(records.thread)),
            end: (0..scanned).max_by_key(position),
            batch: BatchBuffer::default(),
            interval: None,
            due: None,
            consumed: 0,
            key: Vec::new(),
            value: Vec::new(),
            workload,
            shared,
            records,
            zipf,
            count,
        }
    }

    /// The same worker, which updates `per_s` records a second; as many as it can if that is 0.
    pub(crate) fn paced(self, per_s: u64) -> Worker<'a> {
        Worker { interval: (per_s > 0).then(|| Duration::from_secs_f64(1.0 / per_s as f64)), ..self }
    }

    /// Runs before the clock starts; returns the bytes that it added to the data set.
    pub(crate) fn prepare(&mut self) -> Result<u64> {
        if !self.workload.has(&[Step::Queue]) {
            return Ok(0);
        }
        self.count = (self.shared.depth / self.records.threads).max(QUEUE_STEP);
        let indices = self.queued(0)..self.queued(self.count);
        load(self.shared.engine, &self.shared.shape, indices.clone())?;
        Ok(indices.map(|index| self.shared.shape.record_bytes(index)).sum())
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
    fn step(&mut self, meter: &mut Meter<'_>) -> Result<()> {
        match self.choose_step() {
            Step::Insert => {
                self.put(self.records.nth(self.count), FIRST_GENERATION, true, meter)?;
                self.count += 1;
            }
            Step::Batch => return self.insert_batch(meter),
            Step::Ingest => return self.ingest(meter),
            Step::Update if self.is_early(meter) => return Ok(()),
            Step::Update => self.update(false, meter)?,
            Step::Read => {
                let index = self.pick();
                self.read(index)?;
            }
            Step::Missing => {
                let shape = self.shared.shape;
                shape.key(MISSING + below(&mut self.rng, shape.n), &mut self.key);
                let found = self.shared.engine.get(&self.key, &mut |_| {})?;
                ensure!(!found, wrong("a key that was never written was found"));
            }
            Step::ReadModifyWrite => self.update(true, meter)?,
            Step::Transact => self.transact(meter)?,
            Step::Scan => self.scan()?,
            Step::ScanAll => return self.scan_all(meter),
            Step::Queue => return self.queue(meter),
        }
        meter.done(1);
        Ok(())
    }

    /// Carries out steps until the meter is over.
    pub(crate) fn work(&mut self, mut meter: Meter<'_>) -> Result<OpStats> {
        while !meter.over() {
            self.step(&mut meter)?;
        }
        if self.workload.has(&[Step::Batch, Step::Ingest]) {
            self.shared.engine.sync()?;
        }
        Ok(meter.op_stats)
    }

    /// Reads back about `max_records`, uncounted, after the engine has settled: each must have the generation that was
    /// acknowledged last.
    pub(crate) fn verify(&mut self, max_records: u64) -> Result<()> {
        if self.workload.has(&[Step::Queue]) {
            return self.verify_queue(max_records);
        }
        let SharedState { shape, partitions, generations, .. } = self.shared;
        let written = if self.workload.loads { shape.n } else { self.count };
        for i in 0..if self.workload.writes() { written.min(max_records) } else { 0 } {
            // All of a few; of many the last one and random ones.
            let i = if written <= max_records || i == 0 { written - 1 - i } else { below(&mut self.rng, written) };
            let index = if self.workload.loads { i } else { self.records.nth(i) };
            let (expected, generation) = (generations.of(index), self.read(index)?);
            ensure!(
                generation == expected,
                wrong(format!("record {index} has generation {generation} at the end, not {expected}"))
            );
            let other = partitions.get((self.partition_of(index) + 1) % partitions.len().max(1));
            let misplaced = other.map_or(Ok(false), |other| other.get(&self.key, &mut |_| {}))?;
            ensure!(!misplaced, wrong(format!("record {index} is in a partition to which it was not written")));
        }
        Ok(())
    }

    fn pick(&mut self) -> u64 {
        let Worker { records, rng, zipf, .. } = self;
        match (self.workload.pick, zipf) {
            (Pick::Latest, Some(zipf)) => records.nth(self.count - 1 - zipf.rank(rng)),
            (_, Some(zipf)) => zipf.index(rng),
            (Pick::Inserted, None) => records.nth(below(rng, self.count)),
            (_, None) => below(rng, records.shape.n),
        }
    }

    fn partition_of(&self, index: u64) -> usize {
        (mix(index ^ PARTITION_SEED) % self.shared.partitions.len().max(1) as u64) as usize
    }

    /// The partition that holds `index`.
    fn tree(&self, index: u64) -> &'a dyn Engine {
        self.shared.partitions.get(self.partition_of(index)).map_or(self.shared.engine, Box::as_ref)
    }

    /// Reads a record. Its generation must be acknowledged, or be the one that its writer writes now.
    fn read(&mut self, index: u64) -> Result<u64> {
        let SharedState { shape, generations, .. } = self.shared;
        let oldest = generations.of(index);
        let generation = shape.get(self.tree(index), index, &mut self.key)?;
        let newest = generations.of(index) + u64::from(!generations.0.is_empty());
        let known = (oldest..=newest).contains(&generation);
        ensure!(known, wrong(format!("record {index} has generation {generation}, not {oldest} to {newest}")));
        Ok(generation)
    }

    /// Writes a record; `new` if the data set grows by it.
    fn put(&mut self, index: u64, generation: u64, new: bool, meter: &mut Meter<'_>) -> Result<()> {
        self.shared.shape.key(index, &mut self.key);
        self.shared.shape.value(index, generation, &mut self.value);
        self.tree(index).put(&self.key, &self.value)?;
        meter.wrote((self.key.len() + self.value.len()) as u64, new);
        Ok(())
    }

    fn insert_batch(&mut self, meter: &mut Meter<'_>) -> Result<()> {
        let indices = (self.count..self.count + meter.remaining()).map(|i| self.records.nth(i));
        let (written, bytes) = self.batch.put(self.shared.engine, &self.shared.shape, indices)?;
        meter.wrote(bytes, true);
        self.count += written;
        meter.done(written);
        Ok(())
    }

    fn ingest(&mut self, meter: &mut Meter<'_>) -> Result<()> {
        let (SharedState { shape, engine, .. }, records, mut next) = (self.shared, self.records, self.count);
        let (key, value) = (&mut self.key, &mut self.value);
        engine.ingest(&mut |write| {
            while !meter.over() {
                let (end, mut bytes) = (next + meter.remaining().min(INGEST_STEP), 0);
                for index in (next..end).map(|i| records.nth(i)) {
                    shape.key(index, key);
                    shape.value(index, FIRST_GENERATION, value);
                    bytes += (key.len() + value.len()) as u64;
                    write(key, value)?;
                }
                meter.wrote(bytes, true);
                meter.done(end - next);
                next = end;
            }
            Ok(())
        })?;
        self.count = next;
        Ok(())
    }

    /// Whether the next update is not due yet; sleeps until then, but not for long.
    fn is_early(&mut self, meter: &mut Meter<'_>) -> bool {
        let Some(interval) = self.interval else { return false };
        let due = *self.due.get_or_insert_with(Instant::now);
        let early = due.saturating_duration_since(Instant::now());
        if early.is_zero() {
            self.due = Some(due + interval);
            meter.begin();
        }
        sleep(early.min(LONGEST_SLEEP));
        !early.is_zero()
    }

    /// Writes the next generation of a record, which it reads before if `reads`.
    fn update(&mut self, reads: bool, meter: &mut Meter<'_>) -> Result<()> {
        let picked = self.pick();
        let index = self.records.nearest(picked);
        let before = self.shared.generations.of(index);
        let unchanged = !reads || self.read(index)? == before;
        ensure!(unchanged, wrong(format!("record {index} changed, although only this thread writes it")));
        self.put(index, before + 1, false, meter)?;
        self.shared.generations.acknowledge(index, before + 1);
        Ok(())
    }

    /// Reads records and writes their next generations, as one transaction.
    fn transact(&mut self, meter: &mut Meter<'_>) -> Result<()> {
        let SharedState { shape, engine, generations, .. } = self.shared;
        let mut indices: Vec<u64> = (0..TRANSACTION_RECORDS).map(|_| self.pick()).collect();
        indices.iter_mut().for_each(|index| *index = self.records.nearest(*index));
        indices.sort_unstable();
        indices.dedup();
        let mut keys = vec![Vec::new(); indices.len()];
        indices.iter().zip(&mut keys).for_each(|(index, key)| shape.key(*index, key));
        engine.transact(&keys, &mut |position, value| {
            let (index, mut new) = (indices[position], Vec::new());
            let before = generations.of(index);
            ensure!(
                shape.check(index, value) == Some(before),
                wrong(format!("record {index} is wrong in a transaction"))
            );
            shape.value(index, before + 1, &mut new);
            Ok(new)
        })?;
        for index in indices {
            meter.wrote(shape.record_bytes(index), false);
            generations.acknowledge(index, generations.of(index) + 1);
        }
        Ok(())
    }

    fn scan(&mut self) -> Result<()> {
        let index = self.pick();
        let drawn = self.workload.max_scan_length.map(|max_length| 1 + below(&mut self.rng, max_length));
        let length = drawn.or(self.workload.scan_length).unwrap_or(1);
        self.shared.shape.key(index, &mut self.key);
        let scan = Scan { from: Some(&self.key), ascends: !self.workload.reverse };
        let Scanned { count, first, last } = self.check_scan(scan, length, |_| true)?;
        let right =
            first == Some(index) && (count == length || (count < length && (drawn.is_some() || last == self.end)));
        ensure!(right, wrong(format!("a scan of {length} records from {index} returned {count} from {first:?}")));
        Ok(())
    }

    /// Scans all records once, or until the meter is over.
    fn scan_all(&mut self, meter: &mut Meter<'_>) -> Result<()> {
        let total = self.shared.shape.n.min(meter.remaining());
        let scan = Scan { from: None, ascends: !self.workload.reverse };
        let count = self
            .check_scan(scan, total, |count| {
                meter.done(if count.is_multiple_of(BUNDLE) { BUNDLE } else { 0 });
                !meter.over()
            })?
            .count;
        ensure!(count == total || meter.over(), wrong(format!("a scan of {total} records returned {count}")));
        meter.done(count % BUNDLE);
        Ok(())
    }

    /// Index of the `i`-th record ever of this thread's queue.
    fn queued(&self, i: u64) -> u64 {
        (self.records.thread << QUEUE_BITS) + i
    }

    fn queue(&mut self, meter: &mut Meter<'_>) -> Result<()> {
        let count = QUEUE_STEP.min(meter.remaining());
        for _ in 0..count {
            self.put(self.queued(self.count), FIRST_GENERATION, true, meter)?;
            self.count += 1;
        }
        let begun = Instant::now();
        self.check_head_of_queue(count)?;
        for _ in 0..count {
            let index = self.queued(self.consumed);
            self.shared.shape.key(index, &mut self.key);
            self.shared.engine.delete(&self.key)?;
            meter.op_stats.live_bytes -= self.shared.shape.record_bytes(index) as i64;
            self.consumed += 1;
        }
        meter.consumed(begun.elapsed());
        meter.done(count);
        Ok(())
    }

    /// Scans the first `count` records, which must be the oldest that were not deleted.
    fn check_head_of_queue(&mut self, count: u64) -> Result<()> {
        self.shared.shape.key(self.queued(0), &mut self.key);
        let seen = self.check_scan(Scan { from: Some(&self.key), ascends: true }, count, |_| true)?;
        let first = self.queued(self.consumed);
        // Indices ascend, so none is missing between the first and the last one.
        let right = seen == Scanned { count, first: Some(first), last: Some(first + count - 1) };
        ensure!(right, wrong(format!("the head of a queue is wrong after {} items", self.consumed)));
        Ok(())
    }

    /// A lost delete shows before the first record, a lost record as a gap.
    fn verify_queue(&mut self, max_records: u64) -> Result<()> {
        self.check_head_of_queue((self.count - self.consumed).min(max_records.max(QUEUE_STEP)))?;
        for back in [1, QUEUE_STEP].into_iter().filter(|back| *back <= self.consumed) {
            let index = self.queued(self.consumed - back);
            let found = self.shared.shape.find(self.shared.engine, index, &mut self.key)?;
            ensure!(found.is_none(), wrong(format!("record {index} of a queue exists although it was deleted")));
        }
        Ok(())
    }
    /// Scans up to `limit` records while `continues` of their number. Each must be right and in key order.
    fn check_scan(&self, scan: Scan<'_>, limit: u64, mut continues: impl FnMut(u64) -> bool) -> Result<Scanned> {
        let (shape, mut seen, mut right) = (self.shared.shape, Scanned::default(), true);
        let order = if scan.ascends { std::cmp::Ordering::Greater } else { std::cmp::Ordering::Less };
        self.shared.engine.scan(scan, &mut |key, value| {
            let index = shape.index_of(key);
            let generation = index.and_then(|index| shape.check(index, value));
            let pair = index.zip(seen.last);
            let in_order = pair.is_none_or(|(index, last)| shape.number(index).cmp(&shape.number(last)) == order);
            right = in_order && generation == Some(FIRST_GENERATION);
            seen = Scanned { count: seen.count + 1, first: seen.first.or(index), last: index };
            right && continues(seen.count) && seen.count < limit
        })?;
        ensure!(right, wrong(format!("record {} of a scan is changed or misplaced", seen.count)));
        Ok(seen)
    }
}

/// The number of records of a scan and the indices of its first and its last one.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Scanned {
    count: u64,
    first: Option<u64>,
    last: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::{Generations, ThreadRecords};
    use crate::workload::Shape;
    use crate::workload::data::SMALL_RECORDS;

    #[test]
    fn threads_partition_the_indices() {
        for sequential in [false, true] {
            for (n, threads) in [(10, 1), (10, 3), (11, 4), (4, 4)] {
                let shape = Shape { n, sequential, ..SMALL_RECORDS };
                let records_of = |thread| ThreadRecords { shape, thread, threads };
                let threads_records: Vec<_> = (0..threads).map(records_of).collect();
                let mut all: Vec<u64> =
                    threads_records.iter().flat_map(|records| (0..records.loaded()).map(|i| records.nth(i))).collect();
                all.sort_unstable();
                assert_eq!(all, (0..n).collect::<Vec<_>>());
                for (records, index) in threads_records.iter().flat_map(|records| (0..n).map(move |i| (records, i))) {
                    let own = records.nearest(index);
                    assert!(own < n && own % threads == records.thread, "{own} for {index}");
                }
            }
        }
    }

    #[test]
    fn generations_are_stored_by_index() {
        let generations = Generations::new(3);
        generations.acknowledge(1, 5);
        assert_eq!([0, 1, 2, 9].map(|index| generations.of(index)), [1, 5, 1, 1]);
    }
}

//! Reads while somebody writes: readers are counted, one writer overwrites beside them at a fixed rate.

use crate::engine::Engine;
use crate::failure::{Result, wrong};
use crate::machine::meter::Meter;
use crate::workload::fill::Overwrite;
use crate::workload::generations::Generations;
use crate::workload::read::get_checked;
use crate::workload::rng::Rng;
use crate::workload::shape::Shape;
use crate::workload::workload::{Share, Work};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The writer never sleeps for longer, so that it ends with the readers.
const LONGEST_SLEEP: Duration = Duration::from_millis(20);

/// A reader of random records that change meanwhile.
pub(crate) struct Reader {
    shape: Shape,
    rng: Rng,
    generations: Arc<Generations>,
    key: Vec<u8>,
}

impl Reader {
    /// The share of one thread.
    pub(crate) fn new(share: Share) -> Reader {
        Reader { shape: share.shape, rng: Rng::new(share.seed), generations: share.generations, key: Vec::new() }
    }
}

impl Work for Reader {
    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        let index = self.rng.below(self.shape.n);
        let oldest = self.generations.acknowledged(index);
        let generation = get_checked(engine, &self.shape, index, &mut self.key)?;
        let newest = self.generations.acknowledged(index) + 1; // it may just be being written
        if generation < oldest || generation > newest {
            return Err(wrong(format!("record {index} has generation {generation}, not {oldest} to {newest}")));
        }
        meter.done(1);
        Ok(())
    }
}

/// The one writer. When the engine was late, it catches up.
pub(crate) struct Writer {
    overwrite: Overwrite,
    /// Records per second; 0 for as many as possible.
    rate: u64,
    begun: Option<Instant>,
    written: u64,
}

impl Writer {
    /// A writer of all records of the data set.
    pub(crate) fn new(share: Share) -> Writer {
        let rate = share.write_rate;
        let share = Share { thread: 0, threads: 1, ..share };
        Writer { overwrite: Overwrite::new(share), rate, begun: None, written: 0 }
    }
}

impl Work for Writer {
    fn step(&mut self, engine: &dyn Engine, meter: &mut Meter<'_>) -> Result<()> {
        let now = Instant::now();
        let begun = *self.begun.get_or_insert(now);
        if self.rate > 0 {
            let due = begun + Duration::from_secs_f64(self.written as f64 / self.rate as f64);
            if let Some(early) = due.checked_duration_since(now).filter(|early| !early.is_zero()) {
                sleep(early.min(LONGEST_SLEEP));
                return Ok(());
            }
        }
        meter.begin();
        self.overwrite.step(engine, meter)?;
        self.written += 1;
        Ok(())
    }
}

//! Loads a database so that its tree has a known shape: that of one in use, and the same each time.

use crate::engine::Engine;
use crate::failure::Result;
use crate::machine::settle::settle;
use crate::workload::Shape;
use crate::workload::fill::{BATCH_RECORDS, FIRST_GENERATION};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Which records a step of loading writes is told by their index modulo this.
const RESIDUES: u64 = 20;
/// So many young runs are merged into the tree, by both engines' defaults.
const RUNS_MERGED: u64 = 4;
const BOTTOM: &[u64] = &[1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 16, 17, 18, 19];
const LEVEL_ABOVE: &[u64] = &[5, 15];
const YOUNG: &[u64] = &[0];
const YOUNGEST: &[u64] = &[10];
/// So long a merge may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Writes all records but those of the young runs: a full bottom, and a level of a tenth of it above. Each is written
/// in ascending order, so that next to nothing has to be rewritten, and lies all over the key space.
pub(crate) fn sink(engine: &dyn Engine, shape: &Shape) -> Result<()> {
    for (residues, flushes) in [(BOTTOM, 16), (LEVEL_ABOVE, RUNS_MERGED)] {
        for part in 0..flushes {
            let (from, to) = (part * shape.n / flushes, (part + 1) * shape.n / flushes);
            put_all(engine, shape, of(residues, from..to))?;
            engine.flush()?;
            if (part + 1) % RUNS_MERGED == 0 {
                merge_young(engine, shape)?; // or how many runs are left would depend on who is faster
            }
        }
    }
    settle(&[engine], Duration::from_secs(1))?;
    Ok(())
}

/// Writes the records that are left as two young runs, half of the number that would be merged while others write. An
/// engine that merges them because nobody writes must be kept from it.
pub(crate) fn add_young(engine: &dyn Engine, shape: &Shape) -> Result<()> {
    for residues in [YOUNG, YOUNGEST] {
        put_all(engine, shape, of(residues, 0..shape.n))?;
        engine.flush()?;
    }
    Ok(())
}

fn of(residues: &[u64], indices: Range<u64>) -> impl Iterator<Item = u64> {
    indices.filter(|index| residues.contains(&(index % RESIDUES)))
}

/// Waits until the young runs are merged. Where too few were left for a merge, the same records are written once more
/// in runs of their own. A peer that does not tell its runs is left as it came to rest.
fn merge_young(engine: &dyn Engine, shape: &Shape) -> Result<()> {
    let start = Instant::now();
    loop {
        settle(&[engine], Duration::from_millis(200))?;
        match engine.stats().get("levels").and_then(|levels| levels[0]["runs"].as_u64()) {
            None | Some(0) => return Ok(()),
            Some(runs) if start.elapsed() > PATIENCE => return Err(format!("{runs} runs are not merged").into()),
            Some(_) => {
                put_all(engine, shape, [1, shape.n - 1].into_iter())?;
                engine.flush()?;
            }
        }
    }
}

fn put_all(engine: &dyn Engine, shape: &Shape, indices: impl Iterator<Item = u64>) -> Result<()> {
    let mut batch = Vec::new();
    for index in indices {
        let (mut key, mut value) = (Vec::new(), Vec::new());
        shape.keys().write(index, &mut key);
        shape.values().write(index, FIRST_GENERATION, &mut value);
        batch.push((key, value));
        if batch.len() as u64 == BATCH_RECORDS {
            engine.put_batch(&batch)?;
            batch.clear();
        }
    }
    engine.put_batch(&batch)
}

#[cfg(test)]
mod tests {
    use super::{add_young, sink};
    use crate::engine::azekura::open_on;
    use crate::engine::memory::{Lie, Memory};
    use crate::engine::{Engine, Scan};
    use crate::experiment::reads::cached_options;
    use crate::workload::Shape;
    use crate::workload::keys::KeyOrder;
    use azekura::{CompactionStrategy, LeveledOptions};

    fn shape(n: u64) -> Shape {
        Shape { n, key_size: 8, least_value: 8, value_size: 8, order: KeyOrder::Sequential }
    }

    #[test]
    fn every_record_is_written_whatever_their_number() {
        for n in [20, 999, 20_001] {
            let memory = Memory::new(Lie::None);
            sink(&memory, &shape(n)).unwrap();
            add_young(&memory, &shape(n)).unwrap();
            assert_eq!(memory.scan(Scan::First, u64::MAX, &mut |_, _| ()).unwrap(), n);
        }
    }

    #[test]
    fn a_tree_has_two_young_runs_above_a_level_and_the_bottom() {
        let leveled = LeveledOptions { table_size: 140 << 10, base_size: 560 << 10, ..LeveledOptions::default() };
        let dir = tempfile::tempdir().unwrap();
        let options = cached_options(4 << 20);
        let adjust = |own: azekura::PartitionCreateOptions| {
            own.compaction_strategy(CompactionStrategy::Leveled(leveled.clone()))
        };
        let shape = shape(125_000);
        let engine = open_on(dir.path(), &options, |config| config, adjust).unwrap();
        sink(engine.as_ref(), &shape).unwrap();
        engine.close().unwrap();
        let engine = open_on(dir.path(), &options, |config| config.workers(0), adjust).unwrap();
        add_young(engine.as_ref(), &shape).unwrap();
        let stats = engine.stats();
        let runs: Vec<u64> = stats["levels"].as_array().unwrap().iter().filter_map(|l| l["runs"].as_u64()).collect();
        assert_eq!((runs[0], runs.iter().sum::<u64>()), (2, 4), "{stats:?}");
        assert_eq!(engine.scan(Scan::First, u64::MAX, &mut |_, _| ()).unwrap(), 125_000);
    }
}

//! Loads a database so that its tree has a known shape: that of a tree in use, and the same each time.

use crate::engine::Engine;
use crate::engine::registry::settle;
use crate::error::Result;
use crate::workload::Shape;
use crate::workload::data::BatchBuffer;
use std::time::{Duration, Instant};

/// The index modulo this decides in which step of loading a record is written.
const RESIDUES: u64 = 20;
/// Runs of level 0 that are merged, by the defaults of both engines.
const RUNS_MERGED: u64 = 4;
const BOTTOM: &[u64] = &[1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 16, 17, 18, 19];
const LEVEL_ABOVE: &[u64] = &[5, 15];
const LEVEL_0: [&[u64]; 2] = [&[0], &[10]];
/// Longest time that a merge may take.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Writes all records except those of level 0: a full bottom level and a level of a tenth of it above. Each is written
/// in ascending order, so that little is rewritten, and spread over the key space.
pub(crate) fn load_lower_levels(engine: &dyn Engine, shape: &Shape) -> Result<()> {
    for (residues, flushes) in [(BOTTOM, 16), (LEVEL_ABOVE, RUNS_MERGED)] {
        for part in 0..flushes {
            let indices = part * shape.n / flushes..(part + 1) * shape.n / flushes;
            put_all(engine, shape, indices.filter(|index| residues.contains(&(index % RESIDUES))))?;
            engine.flush()?;
            if (part + 1) % RUNS_MERGED == 0 {
                merge_level_0(engine, shape)?; // otherwise the number of runs depends on timing
            }
        }
    }
    settle(&[engine], Duration::from_secs(1)).map(|_| ())
}

/// Writes the remaining records as two runs of level 0, half of the number that is merged. An engine that merges them
/// when it is idle must be prevented from that.
pub(crate) fn load_level_0(engine: &dyn Engine, shape: &Shape) -> Result<()> {
    for residues in LEVEL_0 {
        put_all(engine, shape, (0..shape.n).filter(|index| residues.contains(&(index % RESIDUES))))?;
        engine.flush()?;
    }
    Ok(())
}

/// Waits until the runs of level 0 are merged. If they are too few for a merge, two records are written once more in
/// runs of their own. A peer that does not report its runs is left as it settled.
fn merge_level_0(engine: &dyn Engine, shape: &Shape) -> Result<()> {
    let start = Instant::now();
    loop {
        settle(&[engine], Duration::from_millis(200))?;
        match engine.stats().get("levels").and_then(|levels| levels[0]["runs"].as_u64()) {
            None | Some(0) => return Ok(()),
            Some(runs) if start.elapsed() > SETTLE_TIMEOUT => return Err(format!("{runs} runs are not merged").into()),
            Some(_) => {
                put_all(engine, shape, [1, shape.n - 1].into_iter())?;
                engine.flush()?;
            }
        }
    }
}

fn put_all(engine: &dyn Engine, shape: &Shape, indices: impl Iterator<Item = u64>) -> Result<()> {
    let (mut batch, mut indices) = (BatchBuffer::default(), indices.peekable());
    while indices.peek().is_some() {
        batch.put(engine, shape, indices.by_ref())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{load_level_0, load_lower_levels};
    use crate::engine::azekura::open_with;
    use crate::engine::memory::{Lie, Memory};
    use crate::engine::{Engine, Options, Scan};
    use crate::workload::Shape;
    use azekura::{CompactionStrategy, LeveledOptions};

    fn shape(n: u64) -> Shape {
        Shape { n, key_size: 8, least_value: 8, value_size: 8, sequential: true }
    }

    #[test]
    fn every_record_is_written() {
        for n in [20, 999, 20_001] {
            let memory = Memory::new(Lie::None);
            load_lower_levels(&memory, &shape(n)).unwrap();
            load_level_0(&memory, &shape(n)).unwrap();
            assert_eq!(memory.scan(Scan::First, u64::MAX, &mut |_, _| ()).unwrap(), n);
        }
    }

    #[test]
    fn tree_has_two_runs_above_two_levels() {
        let leveled =
            LeveledOptions { target_file_size: 140 << 10, base_level_size: 560 << 10, ..LeveledOptions::default() };
        let (dir, shape) = (tempfile::tempdir().unwrap(), shape(125_000));
        let open = |workers: Option<usize>| {
            let strategy = CompactionStrategy::Leveled(leveled.clone());
            let configure = |config: azekura::Config| workers.map_or(config.clone(), |workers| config.workers(workers));
            open_with(dir.path(), &Options::cached(4 << 20), configure, |own| own.compaction_strategy(strategy))
                .unwrap()
        };
        let engine = open(None);
        load_lower_levels(engine.as_ref(), &shape).unwrap();
        engine.close().unwrap();
        let engine = open(Some(0));
        load_level_0(engine.as_ref(), &shape).unwrap();
        let stats = engine.stats();
        let runs: Vec<u64> = stats["levels"].as_array().unwrap().iter().filter_map(|l| l["runs"].as_u64()).collect();
        assert_eq!((runs[0], runs.iter().sum::<u64>()), (2, 4), "{stats:?}");
        assert_eq!(engine.scan(Scan::First, u64::MAX, &mut |_, _| ()).unwrap(), 125_000);
    }
}

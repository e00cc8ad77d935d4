//! What a lookup costs inside of a data block: in blocks that were loaded by themselves, so that nothing of what leads
//! to a block is measured with it.
//!
//! Every record is looked for in its block, in random order, as a get does that has come there: the key's hash is made,
//! as the filter needed it, and the block is in memory, though seldom in a processor's cache. No lookup begins before
//! the one before has its answer, because gets do not overlap either. What the loop itself costs is taken off: the same
//! loop, up to the block and not into it.

use crate::experiment::instructions::Instructions;
use crate::failure::{Result, wrong};
use crate::machine::process::thread_cpu_s;
use crate::task::opening::SMALL_RECORDS;
use crate::workload::rng::Rng;
use azekura::fs::{DiskFs, Fs};
use azekura::inspect::{DataBlocks, Place};
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::Arc;

/// How it is measured, for whoever reads the figures.
pub(crate) const HOW: &str = "CPU time of the thread in lookups of present keys inside of the loaded data blocks \
     alone, random order, each after the answer of the one before, less the same loop that stops before the block; not \
     in it: memtable, filter, index, cache, the key's hash, the copy of the value";
/// Of the records every so many is looked for before the clock runs; every lookup under the clock is checked as well.
const CHECK_EVERY: usize = 8;
/// Lookups between two looks at the clock.
const BUNDLE: u64 = 2048;
const KEY_LEN: usize = SMALL_RECORDS.key_size;

/// A key and where it is.
struct Pick {
    place: Place,
    key: [u8; KEY_LEN],
}

/// Looks for the `n` records of the database in `dir`, which nobody has open, for `seconds` of CPU.
pub(crate) fn time(dir: &Path, n: u64, seconds: f64) -> Result<Map<String, Value>> {
    let fs: Arc<dyn Fs> = Arc::new(DiskFs::new());
    let mut picks = Vec::new();
    let mut foreign = 0;
    let blocks = DataBlocks::read(&fs, dir, &mut |place, key| match key.try_into() {
        Ok(key) => picks.push(Pick { place, key }),
        Err(_) => foreign += 1,
    })?;
    if picks.is_empty() || picks.len() as u64 != n || foreign > 0 {
        return Err(wrong(format!("blocks have {} records and {foreign} others, not {n}", picks.len())));
    }
    shuffle(&mut picks);
    let find = |pick: &Pick| blocks.find(pick.place, &pick.key);
    for pick in picks.iter().step_by(CHECK_EVERY) {
        if find(pick)? != Some(SMALL_RECORDS.value_size) {
            return Err(wrong("a block does not find a record of its own"));
        }
    }
    let mut counter = Instructions::new();
    let (own, own_count) =
        counter.of(|| walk(&picks, seconds / 4.0, KEY_LEN, |pick| blocks.reach(pick.place, &pick.key)));
    let (all, count) = counter.of(|| walk(&picks, seconds, SMALL_RECORDS.value_size, find));
    let (own, all) = (own?, all?);
    let each = |count: Option<u64>, cost: &Cost| count.map(|count| count as f64 / cost.asked as f64);
    let instructions = each(count, &all).zip(each(own_count, &own)).map(|(all, own)| all - own);
    let answer = json!({
        "seeks": all.asked,
        "seek_cpu_ns": all.ns() - own.ns(),
        "seek_loop_ns": own.ns(),
        "seek_instructions": instructions,
        "blocks": blocks.count(),
    });
    match answer {
        Value::Object(answer) => Ok(answer),
        _ => Ok(Map::new()),
    }
}

fn shuffle<T>(all: &mut [T]) {
    let mut rng = Rng::new(11);
    for i in (1..all.len()).rev() {
        all.swap(i, rng.below(i as u64 + 1) as usize);
    }
}

/// What asking cost.
#[derive(Clone, Copy, Debug)]
struct Cost {
    asked: u64,
    cpu_s: f64,
}

impl Cost {
    fn ns(&self) -> f64 {
        self.cpu_s * 1e9 / self.asked as f64
    }
}

/// Asks for pick after pick, over and over, for `seconds` of CPU. Every answer must be `expected`.
fn walk<T>(
    picks: &[T],
    seconds: f64,
    expected: usize,
    mut ask: impl FnMut(&T) -> azekura::Result<Option<usize>>,
) -> Result<Cost> {
    let start = thread_cpu_s();
    let (mut at, mut asked) = (0usize, 0);
    loop {
        let mut difference = 0;
        for _ in 0..BUNDLE {
            difference |= ask(&picks[at])?.unwrap_or(usize::MAX) ^ expected;
            // What is asked next depends on this answer, as far as the processor knows.
            at = at.wrapping_add(1).wrapping_add(difference);
            if at >= picks.len() {
                at = 0;
            }
        }
        if difference != 0 {
            return Err(wrong("a lookup in a block gave another value than before"));
        }
        asked += BUNDLE;
        let cpu_s = thread_cpu_s() - start;
        if cpu_s >= seconds {
            return Ok(Cost { asked, cpu_s });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{BUNDLE, shuffle, time, walk};
    use crate::engine::registry;
    use crate::experiment::reads::{cached_options, load};

    #[test]
    fn records_are_looked_for_in_blocks_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        load(registry::open("azekura", &path, &cached_options(1 << 20)).unwrap(), &path, 3000).unwrap();
        let answer = time(&path, 3000, 0.01).unwrap();
        assert!(answer["blocks"].as_u64().unwrap() > 50, "{answer:?}");
        assert!(answer["seeks"].as_u64().unwrap() >= BUNDLE, "{answer:?}");
        assert!(answer["seek_loop_ns"].as_f64().unwrap() > 0.0, "{answer:?}");
        assert!(answer["seek_cpu_ns"].as_f64().unwrap() > 0.0, "{answer:?}");
        assert!(time(&path, 3001, 0.01).is_err(), "one record is missing");
    }

    #[test]
    fn all_are_asked_for_in_turn_and_a_wrong_answer_is_an_error() {
        let mut asked = [0u64; 7];
        let cost = walk(&[0, 1, 2, 3, 4, 5, 6], 0.0, 40, |i: &usize| {
            asked[*i] += 1;
            Ok(Some(40))
        });
        assert_eq!(cost.unwrap().asked, BUNDLE);
        assert_eq!(asked.iter().sum::<u64>(), BUNDLE);
        assert!(asked.iter().all(|n| n.abs_diff(BUNDLE / 7) <= 1), "{asked:?}");
        for lie in [Some(41), Some(0), None] {
            assert!(walk(&[0, 1], 0.0, 40, |i| Ok(if *i == 1 { lie } else { Some(40) })).is_err(), "{lie:?}");
        }
    }

    #[test]
    fn shuffling_loses_nothing_and_leaves_no_order() {
        let mut all: Vec<u32> = (0..1000).collect();
        shuffle(&mut all);
        let rises = all.windows(2).filter(|pair| pair[0] < pair[1]).count();
        assert!((400..600).contains(&rises), "{rises}");
        all.sort_unstable();
        assert!(all.into_iter().eq(0..1000));
    }
}

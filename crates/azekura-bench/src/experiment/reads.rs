//! Times point reads of a database of small records, and lookups inside its data blocks alone.

use crate::engine::registry::settle;
use crate::engine::{Engine, object};
use crate::error::{Result, wrong};
use crate::measure::disk;
use crate::measure::process::{Usage, repeat, repeat_on, thread_cpu_s};
use crate::workload::data::{FIRST_GENERATION, MISSING, SMALL_RECORDS, below, load, rng, shuffle};
use anyhow::ensure;
use azekura::fs::{DiskFs, Fs};
use azekura::inspect::{DataBlockPosition, DataBlocks};
use serde_json::{Map, Value, json};
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Reads, and lookups, between two readings of the clock.
const BUNDLES: (u64, u64) = (256, 2048);
/// The place of a record in the data blocks, and its key.
type BlockPick = (DataBlockPosition, [u8; SMALL_RECORDS.key_size]);
/// One lookup of this many is checked before the measurement; each one is checked during it.
const CHECK_EVERY: usize = 8;

/// Fills a new database, settles it, and returns its size.
pub(crate) fn fill(engine: Box<dyn Engine>, dir: &Path, n: u64) -> Result<Map<String, Value>> {
    let start = Instant::now();
    load(engine.as_ref(), &SMALL_RECORDS, 0..n)?;
    let settled = settle(&[engine.as_ref()], start.elapsed())?;
    engine.sync()?;
    engine.close()?;
    Ok(object(json!({"disk_bytes": disk::allocated_bytes(dir), "settled": settled.reached})))
}

/// Reads for `seconds`, after reading every record once: records that exist (`present`), or keys between them. Each
/// read must have the right answer; every 64th value is compared to the last byte. The cost of the loop is subtracted.
pub(crate) fn time(engine: &dyn Engine, n: u64, present: bool, seconds: f64) -> Result<Map<String, Value>> {
    let mut key = Vec::new();
    for index in 0..n {
        read(engine, index, index, &mut key, true)?;
    }
    let (mut choices, mut chosen) = (rng(7), rng(7));
    let own = repeat(seconds / 4.0, BUNDLES.0, |_| {
        SMALL_RECORDS.key(below(&mut choices, n), &mut key);
        black_box(&key);
        Ok(())
    })?;
    let before = Usage::now();
    let first = if present { 0 } else { MISSING };
    let all = repeat(seconds, BUNDLES.0, |i| read(engine, first + below(&mut chosen, n), i, &mut key, present))?;
    let cpu_s = (Usage::now() - before).cpu_s;
    let instructions = all.instructions_each().zip(own.instructions_each()).map(|(all, own)| all - own);
    Ok(object(json!({
        "gets": all.count, "gets_per_s": all.per_s(), "ns": all.ns() - own.ns(),
        "cpu_ns": cpu_s * 1e9 / all.count as f64 - own.ns(), "harness_ns": own.ns(),
        "instructions": instructions, "harness_instructions": own.instructions_each(),
    })))
}

fn read(engine: &dyn Engine, index: u64, i: u64, key: &mut Vec<u8>, present: bool) -> Result<()> {
    SMALL_RECORDS.key(index, key);
    let mut right = true;
    let found = engine.get(key, &mut |value| {
        right = value.len() == SMALL_RECORDS.value_size;
        right &= !i.is_multiple_of(64) || SMALL_RECORDS.check(index, value) == Some(FIRST_GENERATION);
        black_box(value);
    })?;
    if found == present && right { Ok(()) } else { Err(wrong(format!("record {index}: found {found}, right {right}"))) }
}

/// Looks for each of the `n` records of a closed database inside its data blocks, for `seconds` of CPU. No lookup
/// begins before the previous one has its answer, because gets do not overlap either.
pub(crate) fn time_blocks(dir: &Path, n: u64, seconds: f64) -> Result<Map<String, Value>> {
    let fs: Arc<dyn Fs> = Arc::new(DiskFs::new());
    let (mut picks, mut foreign): (Vec<BlockPick>, u64) = (Vec::new(), 0);
    let blocks = DataBlocks::read(&fs, dir, &mut |place, key| match key.try_into() {
        Ok(key) => picks.push((place, key)),
        Err(_) => foreign += 1,
    })?;
    let complete = !picks.is_empty() && picks.len() as u64 == n && foreign == 0;
    ensure!(complete, wrong(format!("blocks have {} records and {foreign} others, not {n}", picks.len())));
    shuffle(&mut picks, 11);
    let find = |(place, key): &BlockPick| blocks.find(*place, key);
    for pick in picks.iter().step_by(CHECK_EVERY) {
        ensure!(find(pick)? == Some(SMALL_RECORDS.value_size), wrong("a block does not find one of its records"));
    }
    let walk = |seconds, expected: usize, ask: &dyn Fn(&BlockPick) -> azekura::Result<Option<usize>>| {
        let (mut at, mut differences) = (0usize, 0);
        let timed = repeat_on(thread_cpu_s, seconds, BUNDLES.1, |_| {
            let difference = ask(&picks[at])?.unwrap_or(usize::MAX) ^ expected;
            differences |= difference;
            // As far as the processor knows, the next lookup depends on this answer; so nothing branches on it.
            at = at.wrapping_add(1).wrapping_add(difference);
            at = if at >= picks.len() { 0 } else { at };
            Ok(())
        })?;
        ensure!(differences == 0, wrong("a lookup in a block returned another value than before"));
        Ok(timed)
    };
    let own = walk(seconds / 4.0, SMALL_RECORDS.key_size, &|(place, key)| blocks.lookup_overhead(*place, key))?;
    let all = walk(seconds, SMALL_RECORDS.value_size, &find)?;
    let instructions = all.instructions_each().zip(own.instructions_each()).map(|(all, own)| all - own);
    Ok(object(json!({
        "seeks": all.count, "seek_cpu_ns": all.ns() - own.ns(), "seek_loop_ns": own.ns(),
        "seek_instructions": instructions, "blocks": blocks.count(),
    })))
}

#[cfg(test)]
mod tests {
    use super::{fill, time, time_blocks};
    use crate::engine::memory::{Lie, Memory};
    use crate::engine::{Options, registry};
    use crate::workload::data::{SMALL_RECORDS, load};

    #[test]
    fn reads_and_lookups_are_timed_and_checked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("db");
        let open = || registry::open("azekura", &path, &Options::cached(1 << 20)).unwrap();
        let loaded = fill(open(), dir.path(), 3000).unwrap();
        assert!(loaded["disk_bytes"].as_u64().unwrap() > 3000 * 100, "{loaded:?}");
        for present in [true, false] {
            let answer = time(open().as_ref(), 3000, present, 0.01).unwrap();
            assert!(answer["gets"].as_u64().unwrap() >= 256 && answer["harness_ns"].as_f64().unwrap() > 0.0);
        }
        let answer = time_blocks(&path, 3000, 0.01).unwrap();
        assert!(answer["blocks"].as_u64().unwrap() > 50 && answer["seeks"].as_u64().unwrap() >= 2048, "{answer:?}");
        assert!(answer["seek_cpu_ns"].as_f64().unwrap() > 0.0, "{answer:?}");
        assert!(time_blocks(&path, 3001, 0.01).is_err(), "one record is missing");
    }

    #[test]
    fn faults_are_detected() {
        for (lie, present) in [(Lie::Forgets, true), (Lie::Flips, true), (Lie::FindsAll, false)] {
            let memory = Memory::new(lie);
            load(&memory, &SMALL_RECORDS, 0..500).unwrap();
            assert!(time(&memory, 500, present, 0.01).is_err(), "{lie:?}");
        }
    }
}

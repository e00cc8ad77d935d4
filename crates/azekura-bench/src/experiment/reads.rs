//! Loads a database of small records, and times point reads of one.

use crate::engine::{Compression, Engine, Options, Sync};
use crate::experiment::instructions::Instructions;
use crate::failure::Result;
use crate::machine::disk;
use crate::machine::process::Usage;
use crate::machine::settle::settle;
use crate::task::opening::SMALL_RECORDS;
use crate::workload::fill::FIRST_GENERATION;
use crate::workload::rng::Rng;
use serde_json::{Map, Value, json};
use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

/// Records of one batch while loading.
const BATCH: u64 = 1000;
/// Reads between two looks at the clock.
const BUNDLE: u64 = 256;
/// Indices from here on are never written.
const MISSING: u64 = 1 << 48;

/// Which key is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// Any of the records, uniformly.
    Present,
    /// None of them, but from between them.
    Missing,
    /// One and the same.
    Same,
}

/// Options under which everything is cached and nothing compressed.
pub(crate) fn cached_options(memtable_bytes: u64) -> Options {
    Options {
        cache_bytes: 1 << 30,
        memtable_bytes,
        table_bytes: None,
        sync: Sync::None,
        compression: Compression::None,
        workers: std::thread::available_parallelism().map_or(1, |n| n.get()),
        separate_from: None,
        data_bytes: 0,
    }
}

/// Writes `n` records in batches, in scrambled order.
pub(crate) fn fill(engine: &dyn Engine, n: u64) -> Result<()> {
    let mut batch = Vec::new();
    for index in 0..n {
        let (mut key, mut value) = (Vec::new(), Vec::new());
        SMALL_RECORDS.keys().write(index, &mut key);
        SMALL_RECORDS.values().write(index, FIRST_GENERATION, &mut value);
        batch.push((key, value));
        if batch.len() as u64 == BATCH || index + 1 == n {
            engine.put_batch(&batch)?;
            batch.clear();
        }
    }
    Ok(())
}

/// Fills a new database and brings it to rest; answers with its size.
pub(crate) fn load(engine: Box<dyn Engine>, dir: &Path, n: u64) -> Result<Map<String, Value>> {
    let start = Instant::now();
    fill(engine.as_ref(), n)?;
    let settled = settle(&[engine.as_ref()], start.elapsed())?;
    engine.sync()?;
    engine.close()?;
    Ok(object(json!({"disk_bytes": disk::usage(dir).allocated, "settled": settled.reached})))
}

/// Reads for `seconds`, after reading every record once. Each read must find what it should; every 64th value is
/// compared to the last byte.
pub(crate) fn time(engine: &dyn Engine, n: u64, choice: Choice, seconds: f64) -> Result<Map<String, Value>> {
    let mut key = Vec::new();
    for index in 0..n {
        read(engine, index, index, &mut key, true)?;
    }
    let mut counter = Instructions::new();
    let (harness, harness_instructions) = counter.of(|| {
        bundles(seconds / 4.0, n, choice, |index, _| {
            SMALL_RECORDS.keys().write(index, &mut key);
            black_box(&key);
            Ok(())
        })
    });
    let harness = harness?;
    let before = Usage::now();
    let (timed, instructions) = counter
        .of(|| bundles(seconds, n, choice, |index, i| read(engine, index, i, &mut key, choice != Choice::Missing)));
    let timed = timed?;
    let cpu = (Usage::now() - before).cpu_s;
    let per = |count: Option<u64>, gets: u64| count.map(|count| count as f64 / gets as f64);
    let own = per(harness_instructions, harness.gets);
    Ok(object(json!({
        "gets": timed.gets,
        "gets_per_s": timed.gets as f64 / timed.seconds,
        "ns": timed.ns() - harness.ns(),
        "cpu_ns": cpu * 1e9 / timed.gets as f64 - harness.ns(),
        "harness_ns": harness.ns(),
        "instructions": per(instructions, timed.gets).zip(own).map(|(all, own)| all - own),
        "harness_instructions": own,
    })))
}

fn read(engine: &dyn Engine, index: u64, i: u64, key: &mut Vec<u8>, present: bool) -> Result<()> {
    SMALL_RECORDS.keys().write(index, key);
    let mut right = true;
    let found = engine.get(key, &mut |value| {
        right = value.len() == SMALL_RECORDS.value_size;
        if i.is_multiple_of(64) {
            right &= SMALL_RECORDS.values().check(index, value) == Some(FIRST_GENERATION);
        }
        black_box(value);
    })?;
    if found != present || !right {
        return Err(crate::failure::wrong(format!("record {index}: found {found}, right {right}")));
    }
    Ok(())
}

struct Timed {
    gets: u64,
    seconds: f64,
}

impl Timed {
    fn ns(&self) -> f64 {
        self.seconds * 1e9 / self.gets as f64
    }
}

/// Repeats `act` with chosen indices for a while.
fn bundles(seconds: f64, n: u64, choice: Choice, mut act: impl FnMut(u64, u64) -> Result<()>) -> Result<Timed> {
    let mut rng = Rng::new(7);
    let start = Instant::now();
    let deadline = start + Duration::try_from_secs_f64(seconds)?;
    let mut gets = 0;
    while gets == 0 || Instant::now() < deadline {
        for _ in 0..BUNDLE {
            let index = rng.below(n);
            let index = match choice {
                Choice::Present => index,
                Choice::Missing => MISSING + index,
                Choice::Same => n / 2,
            };
            act(index, gets)?;
            gets += 1;
        }
    }
    Ok(Timed { gets, seconds: start.elapsed().as_secs_f64() })
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(object) => object,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::{Choice, cached_options, load, time};
    use crate::engine::memory::{Lie, Memory};
    use crate::engine::registry;

    #[test]
    fn reads_are_timed_and_checked() {
        let dir = tempfile::tempdir().unwrap();
        let options = cached_options(1 << 20);
        let open = || registry::open("azekura", &dir.path().join("db"), &options).unwrap();
        let loaded = load(open(), dir.path(), 3000).unwrap();
        assert!(loaded["disk_bytes"].as_u64().unwrap() > 3000 * 100, "{loaded:?}");
        for choice in [Choice::Present, Choice::Missing, Choice::Same] {
            let answer = time(open().as_ref(), 3000, choice, 0.01).unwrap();
            assert!(answer["gets"].as_u64().unwrap() >= 256 && answer["harness_ns"].as_f64().unwrap() > 0.0);
        }
    }

    #[test]
    fn lies_are_noticed() {
        for (lie, choice) in
            [(Lie::Forgets, Choice::Present), (Lie::Flips, Choice::Present), (Lie::FindsAll, Choice::Missing)]
        {
            let memory = Memory::new(lie);
            super::fill(&memory, 500).unwrap();
            assert!(time(&memory, 500, choice, 0.01).is_err(), "{lie:?}");
        }
    }
}

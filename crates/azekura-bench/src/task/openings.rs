//! Opens a database after a clean close, or after its process was killed; in child processes.

use crate::engine::registry::{self, Settled};
use crate::engine::{Engine, api::object};
use crate::error::{Result, wrong};
use crate::measure::clock::millis;
use crate::measure::disk;
use crate::measure::meter::{Meter, Progress};
use crate::measure::process::{Usage, memory_bytes};
use crate::task::measure::{Facts, evict};
use crate::task::plan::{Plan, Task};
use crate::workload::Shape;
use crate::workload::data::FIRST_GENERATION;
use rustix::process::{Signal, getpid, kill_process};
use serde_json::{Value, json};
use std::io::Write;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

fn open(task: &Task) -> Result<Box<dyn Engine>> {
    registry::open(&task.engine, &task.dir, &task.options)
}

/// Writes the records of `plan` in order, prints how many, and kills this process: nothing is flushed or closed.
pub(crate) fn write_and_die(task: &Task, plan: &Plan) -> Result<Value> {
    let engine = open(task)?;
    let deadline = plan.settings.seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds));
    let end = (0..plan.ops.min(plan.shape.n)).take_while(|_| deadline.is_none_or(|deadline| Instant::now() < deadline));
    let written = put(engine.as_ref(), &plan.shape, end)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", json!({"written": written}))?;
    out.flush()?;
    kill_process(getpid(), Signal::KILL)?;
    Err("a process survived its own kill".into())
}

/// Puts records one by one; returns how many.
fn put(engine: &dyn Engine, shape: &Shape, indices: impl Iterator<Item = u64>) -> Result<u64> {
    let (mut key, mut value, mut count) = (Vec::new(), Vec::new(), 0);
    for index in indices {
        shape.key(index, &mut key);
        shape.value(index, FIRST_GENERATION, &mut value);
        engine.put(&key, &value)?;
        count += 1;
    }
    Ok(count)
}

/// Looks for `written` records. Returns how many are lost, how many of those precede a found record, and the bytes of
/// those that were found.
fn find_written(engine: &dyn Engine, shape: &Shape, written: u64) -> Result<(u64, u64, u64)> {
    let (mut lost, mut holes, mut bytes, mut key) = (0, 0, 0, Vec::new());
    for index in 0..written {
        match shape.find(engine, index, &mut key)? {
            None => lost += 1,
            Some(FIRST_GENERATION) => (holes, bytes) = (lost, bytes + shape.record_bytes(index)),
            Some(other) => return Err(wrong(format!("record {index} has generation {other}"))),
        }
    }
    Ok((lost, holes, bytes))
}

/// Opens the database and reads one record: one operation. `written`: records that were written before a kill, each of
/// which is looked for; otherwise the database was closed cleanly.
pub(crate) fn open_and_get(task: &Task, plan: &Plan, written: Option<u64>) -> Result<Value> {
    evict(task, plan)?;
    let (progress, never, before) = (Progress::default(), AtomicBool::new(false), Usage::now());
    let mut meter = Meter::start(&progress, 1, None, &never);
    let start = Instant::now();
    let engine = open(task)?;
    let open_ms = millis(start);
    let then = Instant::now();
    let first = if written.is_some() { 0 } else { plan.settings.seed % plan.shape.n };
    let found = plan.shape.find(engine.as_ref(), first, &mut Vec::new())?;
    let first_get_ms = millis(then);
    meter.done(1);
    if found.is_none() && written.is_none() {
        return Err(wrong(format!("record {first} was not found")));
    }
    let mut facts = Facts { used: Usage::now() - before, ..Facts::default() };
    (facts.outcome.seconds, facts.outcome.tally) = (start.elapsed().as_secs_f64(), meter.tally);
    let mut losses = json!({});
    facts.loaded_bytes = match written {
        None => plan.shape.total_bytes(),
        Some(written) => {
            let (lost, holes, bytes) = find_written(engine.as_ref(), &plan.shape, written)?;
            losses = json!({"written_records": written, "lost_records": lost, "lost_holes": holes});
            bytes
        }
    };
    facts.peak_rss_bytes = memory_bytes("VmHWM");
    facts.outcome.anonymous_rss_bytes = memory_bytes("RssAnon");
    (facts.stats, facts.settled) = (engine.stats(), Settled { seconds: 0.0, reached: true });
    let start = Instant::now();
    engine.close()?;
    facts.extra = object(json!({"open_ms": open_ms, "first_get_ms": first_get_ms, "close_ms": millis(start)}));
    facts.extra.extend(object(losses));
    facts.disk_bytes = disk::allocated_bytes(&task.dir);
    Ok(facts.figures(&task.engine, plan, None))
}

#[cfg(test)]
mod tests {
    use super::{find_written, open_and_get, put};
    use crate::engine::memory::{Lie, Memory};
    use crate::engine::registry;
    use crate::error::{ErrorKind, KnownError};
    use crate::task::measure::tests::{sample_plan, sample_task};
    use crate::task::plan::Task;
    use crate::workload::Shape;
    use crate::workload::data::load;

    #[test]
    fn lost_records_and_holes_are_counted() {
        let shape = Shape { n: 1000, ..sample_plan("recovery").shape };
        let filled = |lie| {
            let engine = Memory::new(lie);
            assert_eq!(put(&engine, &shape, 0..1000).unwrap(), 1000);
            engine
        };
        let all = shape.total_bytes();
        assert_eq!(find_written(&filled(Lie::None), &shape, 1000).unwrap(), (0, 0, all));
        // As if 30 more had been acknowledged: an end is lost.
        assert_eq!(find_written(&filled(Lie::None), &shape, 1030).unwrap(), (30, 0, all));
        let (lost, holes, _) = find_written(&filled(Lie::Forgets), &shape, 1000).unwrap();
        assert!(lost > 0 && holes > 0, "{lost} {holes}");
        let error = find_written(&filled(Lie::Flips), &shape, 1000).unwrap_err();
        assert_eq!(KnownError::of(&error).kind, ErrorKind::Wrong);
    }

    #[test]
    fn openings_have_figures() {
        let (dir, plan) = (tempfile::tempdir().unwrap(), sample_plan("open"));
        let task = Task { dir: dir.path().join("db"), ..sample_task("azekura", &plan) };
        let engine = registry::open("azekura", &task.dir, &task.options).unwrap();
        load(engine.as_ref(), &plan.shape, 0..plan.shape.n).unwrap();
        engine.close().unwrap();
        let opened = open_and_get(&task, &plan, None).unwrap();
        assert!(opened["open_ms"].as_f64().unwrap() > 0.0 && opened["ops"] == 1, "{opened}");
        let recovered = open_and_get(&task, &plan, Some(plan.shape.n + 5)).unwrap();
        let figures = ["lost_records", "lost_holes", "written_records"].map(|name| recovered[name].as_u64().unwrap());
        assert_eq!(figures, [5, 0, plan.shape.n + 5]);
        assert!(recovered["space_amp"].as_f64().unwrap() > 0.0);
    }
}

//! Opens a database behind a kill, or behind a clean end; in child processes of their own.

use crate::engine::{Engine, registry};
use crate::failure::{Failure, Kind, Result, Told};
use crate::machine::disk;
use crate::machine::meter::{Meter, Progress, Tally};
use crate::machine::process::{self, Usage};
use crate::machine::settle::Settled;
use crate::report::measurement::{Facts, Measurement};
use crate::task::measure::evict;
use crate::task::opening::millis;
use crate::task::task::{Plan, Task};
use crate::workload::Shape;
use crate::workload::fill::{FIRST_GENERATION, Record};
use crate::workload::read::get_checked;
use rustix::process::{Signal, getpid, kill_process};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::time::{Duration, Instant};

/// Writes the records of `plan` in order, says how many, and is killed at once: nothing is flushed or closed.
pub(crate) fn write_and_die(task: &Task, plan: &Plan) -> Result<Value> {
    let engine = registry::open(&task.engine, &task.dir, &task.options)?;
    let written = write(engine.as_ref(), plan)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", json!({"written": written}))?;
    out.flush()?;
    kill_process(getpid(), Signal::KILL)?;
    Err("a process outlived its own kill".into())
}

/// Writes records until all are written or the time is up; gives how many.
fn write(engine: &dyn Engine, plan: &Plan) -> Result<u64> {
    let progress = Progress::default();
    let deadline = plan.seconds.map(|seconds| Instant::now() + Duration::from_secs_f64(seconds));
    let mut meter = Meter::start(&progress, plan.ops.min(plan.shape.n), deadline);
    let mut record = Record::default();
    let mut index = 0;
    while !meter.over() {
        record.put(engine, &plan.shape, index, FIRST_GENERATION, &mut meter)?;
        meter.done(1);
        index += 1;
    }
    Ok(index)
}

/// What became of records that were written one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Found {
    /// Records that are not there.
    lost: u64,
    /// Those of them behind which a later one is there: more than a lost end.
    holes: u64,
    /// Bytes of those that are there.
    bytes: u64,
}

/// Looks for each of `written` records.
fn look(engine: &dyn Engine, shape: &Shape, written: u64) -> Result<Found> {
    let mut key = Vec::new();
    let mut found = Found::default();
    for index in 0..written {
        if is_there(engine, shape, index, &mut key)? {
            found.holes = found.lost;
            found.bytes += shape.record_bytes(index);
        } else {
            found.lost += 1;
        }
    }
    Ok(found)
}

/// Whether a record is there; if it is, it must be right.
fn is_there(engine: &dyn Engine, shape: &Shape, index: u64, key: &mut Vec<u8>) -> Result<bool> {
    shape.keys().write(index, key);
    let mut generation = None;
    if !engine.get(key, &mut |value| generation = shape.values().check(index, value))? {
        return Ok(false);
    }
    let bad = || -> Failure {
        let error = format!("record {index} came back with a wrong value");
        Box::new(Told { kind: Kind::Wrong, error })
    };
    if generation == Some(FIRST_GENERATION) { Ok(true) } else { Err(bad()) }
}

/// Opens a database whose writer was killed behind `written` records, and looks for each of them.
pub(crate) fn recover(task: &Task, plan: &Plan, written: u64) -> Result<Measurement> {
    evict(task, plan)?;
    let opened = Opened::now(task, |engine| is_there(engine, &plan.shape, 0, &mut Vec::new()).map(|_| ()))?;
    let found = look(opened.engine.as_ref(), &plan.shape, written)?;
    let extra = json!({
        "written_records": written, "lost_records": found.lost, "lost_holes": found.holes,
    });
    opened.finish(task, plan, found.bytes, extra)
}

/// Opens a database that was closed cleanly, gets one record, and closes it.
pub(crate) fn open(task: &Task, plan: &Plan) -> Result<Measurement> {
    evict(task, plan)?;
    let index = plan.seed % plan.shape.n;
    let opened = Opened::now(task, |engine| get_checked(engine, &plan.shape, index, &mut Vec::new()).map(|_| ()))?;
    opened.finish(task, plan, plan.shape.total_bytes(), json!({}))
}

/// A database just opened, and what that took.
struct Opened {
    engine: Box<dyn Engine>,
    open_ms: f64,
    first_get_ms: f64,
    tally: Tally,
    seconds: f64,
    used: Usage,
}

impl Opened {
    /// Opens it and gets the first record.
    fn now(task: &Task, first_get: impl FnOnce(&dyn Engine) -> Result<()>) -> Result<Opened> {
        let before = Usage::now();
        let progress = Progress::default();
        let mut meter = Meter::start(&progress, 1, None);
        let start = Instant::now();
        let engine = registry::open(&task.engine, &task.dir, &task.options)?;
        let open_ms = millis(start);
        let then = Instant::now();
        first_get(engine.as_ref())?;
        let first_get_ms = millis(then);
        meter.done(1);
        let seconds = start.elapsed().as_secs_f64();
        let used = Usage::now() - before;
        Ok(Opened { engine, open_ms, first_get_ms, tally: meter.tally, seconds, used })
    }

    /// Closes it and gives the figures: the one operation is the opening with the first get.
    fn finish(self, task: &Task, plan: &Plan, live_bytes: u64, more: Value) -> Result<Measurement> {
        let (peak_rss_bytes, anonymous) = (process::peak_rss_bytes(), process::anonymous_rss_bytes());
        let stats = self.engine.stats();
        let start = Instant::now();
        self.engine.close()?;
        let close_ms = millis(start);
        let mut extra = Map::new();
        for (name, ms) in [("open_ms", self.open_ms), ("first_get_ms", self.first_get_ms), ("close_ms", close_ms)] {
            extra.insert(name.into(), json!(ms));
        }
        if let Value::Object(more) = more {
            extra.extend(more);
        }
        let facts = Facts {
            seconds: self.seconds,
            tally: self.tally,
            intervals: Vec::new(),
            series: Vec::new(),
            loaded_bytes: live_bytes,
            user_bytes_beside: 0,
            extra,
            used: self.used,
            used_settling: Usage::default(),
            settled: Settled { seconds: 0.0, reached: true },
            disk_bytes: disk::usage(&task.dir).allocated,
            peak_rss_bytes,
            anonymous_rss_bytes: anonymous,
            stats,
        };
        Ok(Measurement::new(task, plan, facts))
    }
}

#[cfg(test)]
mod tests {
    use super::{Found, look, open, recover, write};
    use crate::engine::memory::{Lie, Memory};
    use crate::engine::registry;
    use crate::failure::{Kind, Told};
    use crate::report::measurement::tests::sample_task;
    use crate::task::task::Task;
    use crate::workload::fill;

    #[test]
    fn what_is_lost_is_counted_and_holes_are_told_from_a_lost_end() {
        let (_, mut plan) = sample_task("memory", 1);
        plan.shape.n = 1000;
        plan.ops = 1000;
        let right = Memory::new(Lie::None);
        assert_eq!(write(&right, &plan).unwrap(), 1000);
        let all = plan.shape.total_bytes();
        assert_eq!(look(&right, &plan.shape, 1000).unwrap(), Found { lost: 0, holes: 0, bytes: all });
        // As if 30 more had been acknowledged: an end is lost.
        assert_eq!(look(&right, &plan.shape, 1030).unwrap(), Found { lost: 30, holes: 0, bytes: all });
        let forgetful = Memory::new(Lie::Forgets);
        write(&forgetful, &plan).unwrap();
        let found = look(&forgetful, &plan.shape, 1000).unwrap();
        assert!(found.lost > 0 && found.holes > 0, "{found:?}");
        let flips = Memory::new(Lie::Flips);
        write(&flips, &plan).unwrap();
        assert_eq!(Told::of(&look(&flips, &plan.shape, 1000).unwrap_err()).kind, Kind::Wrong);
    }

    #[test]
    fn openings_have_figures() {
        let dir = tempfile::tempdir().unwrap();
        let (task, plan) = sample_task("azekura", 1);
        let options = crate::engine::Options { cache_bytes: 1 << 20, memtable_bytes: 1 << 20, ..task.options.clone() };
        let task = Task { dir: dir.path().join("db"), options, ..task };
        let engine = registry::open("azekura", &task.dir, &task.options).unwrap();
        fill::load(engine.as_ref(), &plan.shape, 0..plan.shape.n).unwrap();
        engine.close().unwrap();
        let opened = open(&task, &plan).unwrap();
        assert!(opened.extra["open_ms"].as_f64().unwrap() > 0.0 && opened.ops == 1, "{opened:?}");
        let recovered = recover(&task, &plan, plan.shape.n + 5).unwrap();
        let figure = |name: &str| recovered.extra[name].as_u64().unwrap();
        assert_eq!((figure("lost_records"), figure("lost_holes"), figure("written_records")), (5, 0, plan.shape.n + 5));
        assert!(recovered.space_amp > 0.0);
    }
}

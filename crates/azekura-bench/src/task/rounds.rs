//! The parent's plan: which child runs when. Engines take turns, A B A B, so that drift of the machine hits them alike.

use crate::cli::Engines;
use crate::engine::{Options, Sync, registry};
use crate::failure::{Kind, Result, Told, refused};
use crate::machine::disk::{self, Scratch};
use crate::report::measurement::Measurement;
use crate::task::child::Limits;
use crate::task::task::{Job, Plan, Task};
use crate::workload::{Shape, Workload};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What a child of `open` or `partitions` may take: building thousands of tables takes some engines minutes.
const LONGEST_OPENING: Duration = Duration::from_secs(3600);

/// A comparison: some workloads, some engines, some rounds.
#[derive(Clone, Debug)]
pub(crate) struct Comparison {
    /// Workloads, in this order.
    pub(crate) workloads: Vec<Workload>,
    /// Engines by name, in this order.
    pub(crate) engines: Vec<String>,
    /// Rounds.
    pub(crate) rounds: u32,
    /// Counts of threads: one comparison for each.
    pub(crate) threads: Vec<u64>,
    /// How every engine is opened.
    pub(crate) options: Options,
    /// The data set of workloads of blobs; that of the others is in `plan`.
    pub(crate) blobs: Shape,
    /// The plan of each measurement but for workload, key order, operations, threads and round.
    pub(crate) plan: Plan,
    /// Operations, where the workload's own number is not wanted.
    pub(crate) ops: Option<u64>,
    /// Uncounted operations before reads, where half the operations is not wanted.
    pub(crate) warm_ops: Option<u64>,
    /// How long a child process may take, where 20 times what others took is not wanted.
    pub(crate) limit: Option<Duration>,
    /// From then on no measurement is begun: those that are left are missing from the answer.
    pub(crate) deadline: Option<Instant>,
}

/// The loaded databases of a run, and how long children took so far. Comparisons that share it share them, if they are
/// made in the same [`Scratch`].
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    bases: BTreeMap<String, std::result::Result<PathBuf, Told>>,
    limits: Limits,
}

impl Loaded {
    /// Removes every loaded database.
    pub(crate) fn clear(&mut self) {
        for base in std::mem::take(&mut self.bases).into_values().flatten() {
            let _ = std::fs::remove_dir_all(base); // it goes with the scratch directory at the latest
        }
    }
}

impl Comparison {
    /// Runs it all; gives the measurements in the order they were made. What an engine cannot do, or does not do in
    /// time, is a measurement with an error; the others go on.
    pub(crate) fn run(&self, scratch: &Scratch) -> Result<Vec<Measurement>> {
        let mut loaded = Loaded::default();
        let measurements = self.run_on(scratch, &mut loaded);
        if !scratch.keeps() {
            loaded.clear();
        }
        measurements
    }

    /// The same, on databases that are loaded already where there are some.
    pub(crate) fn run_on(&self, scratch: &Scratch, loaded: &mut Loaded) -> Result<Vec<Measurement>> {
        let mut measurements: Vec<Measurement> = Vec::new();
        for &workload in &self.workloads {
            // What hung or was refused once is not tried again in the rounds that follow.
            let mut given_up: BTreeMap<(u64, &str), Told> = BTreeMap::new();
            for round in 1..=self.rounds {
                for &threads in self.threads.iter().take(if workload.alone() { 1 } else { usize::MAX }) {
                    for engine in &self.engines {
                        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                            return Ok(measurements);
                        }
                        let plan = self.plan_of(workload, threads, round);
                        let outcome = match given_up.get(&(threads, engine.as_str())) {
                            Some(told) => Err(told.clone()),
                            None => {
                                eprintln!("{engine}: {} round {round} of {}", workload.name(), self.rounds);
                                self.measure(scratch, engine, &plan, loaded).map_err(|failure| Told::of(&failure))
                            }
                        };
                        measurements.push(outcome.unwrap_or_else(|told| {
                            eprintln!("{engine}: {}: {told}", workload.name());
                            if matches!(told.kind, Kind::TimedOut | Kind::Refused) {
                                given_up.insert((threads, engine), told.clone());
                            }
                            Measurement::failed(engine, &plan, &told)
                        }));
                    }
                }
            }
        }
        Ok(measurements)
    }

    /// The data set of the first workload: the harness's cost is told for its records.
    pub(crate) fn first_shape(&self) -> Shape {
        let blobs = self.workloads.first().is_some_and(|workload| workload.blobs());
        if blobs { self.blobs } else { self.plan.shape }
    }

    /// What was asked, for people who read the results.
    pub(crate) fn settings(&self) -> Value {
        let sizes = |shape: &Shape| json!([shape.least_value, shape.value_size]);
        let plan = &self.plan;
        json!({
            "options": self.options, "key_size": plan.shape.key_size, "value_size": plan.shape.value_size,
            "value_sizes": sizes(&plan.shape), "blob_sizes": sizes(&self.blobs), "blobs": self.blobs.n,
            "seconds": plan.seconds, "write_rate": plan.write_rate, "depth": plan.depth, "cold": plan.cold,
        })
    }

    /// One measurement, on a directory that is gone afterwards unless it is the loaded database itself.
    fn measure(&self, scratch: &Scratch, engine: &str, plan: &Plan, loaded: &mut Loaded) -> Result<Measurement> {
        registry::check(engine).map_err(|failure| refused(failure.to_string()))?;
        let workload = plan.workload;
        let data_bytes = (plan.shape.n as f64 * plan.shape.mean_record_bytes()) as u64;
        let options = Options { data_bytes, ..workload.options(&self.options) };
        let base =
            if workload.loads() { Some(self.base(scratch, engine, &plan.shape, &options, loaded)?) } else { None };
        let dir = directory(scratch, engine, workload, base)?;
        let task = |job| Task { engine: engine.to_owned(), dir: dir.clone(), options: options.clone(), job };
        let work = format!("{} x{}", workload.name(), plan.threads);
        let limit = loaded.limits.of(&work, self.limit);
        let start = Instant::now();
        let answer = match workload {
            Workload::Recovery => task(Job::WriteAndDie(plan.clone())).in_child(limit).and_then(|said| {
                let written = said["written"].as_u64().ok_or("a child did not say how much it wrote")?;
                task(Job::Recover(plan.clone(), written)).in_child(limit)
            }),
            Workload::Open => task(Job::Open(plan.clone())).in_child(limit),
            _ => task(Job::Measure(plan.clone())).in_child(limit),
        };
        if workload.writes() {
            disk::remove(&dir)?;
        }
        let measurement = serde_json::from_value(answer?)?;
        loaded.limits.saw(&work, start.elapsed().as_secs_f64());
        Ok(measurement)
    }

    fn plan_of(&self, workload: Workload, threads: u64, round: u32) -> Plan {
        let data = if workload.blobs() { self.blobs } else { self.plan.shape };
        let shape = Shape { order: workload.key_order(), ..data };
        let most = if workload.fills() { shape.n } else { u64::MAX }; // a fill ends with the data set
        let ops = self.ops.unwrap_or_else(|| workload.default_ops(shape.n)).min(most);
        // Where a time limit ends an endless measurement, the warm-up still has an end.
        let warm_ops = self.warm_ops.unwrap_or(ops.min(workload.default_ops(shape.n)) / 2);
        let seed = self.plan.seed + u64::from(round);
        Plan { workload, shape, ops, warm_ops, threads, round, seed, ..self.plan.clone() }
    }

    /// The engine's loaded database, made when it is first needed. Cache, durability and workers leave no trace in it.
    fn base(
        &self,
        scratch: &Scratch,
        engine: &str,
        shape: &Shape,
        options: &Options,
        loaded: &mut Loaded,
    ) -> Result<PathBuf> {
        let lasting = Options { cache_bytes: 0, sync: Sync::None, workers: 0, ..options.clone() };
        let key = format!("{engine} {shape:?} {lasting:?}");
        if let Some(known) = loaded.bases.get(&key) {
            return Ok(known.clone()?);
        }
        let dir = scratch.fresh(&format!("{engine}-base-{}", loaded.bases.len()))?;
        let outcome = self.load(engine, &dir, shape, options, &mut loaded.limits).map(|()| dir.clone());
        let outcome = outcome.map_err(|failure| {
            let told = Told::of(&failure);
            Told { error: format!("loading: {}", told.error), ..told }
        });
        if outcome.is_err() {
            disk::remove(&dir)?;
        }
        loaded.bases.insert(key, outcome.clone());
        Ok(outcome?)
    }

    fn load(&self, engine: &str, dir: &Path, shape: &Shape, options: &Options, limits: &mut Limits) -> Result<()> {
        let work = format!("load {shape:?}");
        let start = Instant::now();
        let (dir, options) = (dir.to_path_buf(), options.clone());
        let task = Task { engine: engine.to_owned(), dir, options, job: Job::Load(*shape) };
        let answer = task.in_child(limits.of(&work, self.limit))?;
        limits.saw(&work, start.elapsed().as_secs_f64());
        eprintln!("{engine}: loaded {} records in {:.1} s", shape.n, answer["seconds"].as_f64().unwrap_or(0.0));
        if answer["settled"] != Value::Bool(true) {
            eprintln!("{engine}: did not settle; its reads run beside background work");
        }
        Ok(())
    }
}

/// Whether a run ends well: only if azekura has figures for everything and lost nothing that its promise covers, and
/// nobody gave a wrong answer.
pub(crate) fn verdict(measurements: &[Measurement]) -> Result<()> {
    // What a kill takes from others is shown beside what they promise; azekura promises to lose nothing.
    let lost = |m: &Measurement| m.extra.get("lost_records").and_then(Value::as_u64).filter(|&lost| lost > 0);
    for m in measurements.iter().filter(|m| registry::is_ours(&m.engine)) {
        if let Some(lost) = lost(m) {
            return Err(format!("{}: {}: {lost} acknowledged records are lost", m.engine, m.workload).into());
        }
    }
    let bad =
        |m: &&Measurement| m.error.is_some() && (registry::is_ours(&m.engine) || m.error_kind == Some(Kind::Wrong));
    match measurements.iter().find(bad) {
        Some(m) => Err(format!("{}: {}: {}", m.engine, m.workload, m.error.as_deref().unwrap_or("failed")).into()),
        None => Ok(()),
    }
}

/// Where a measurement runs: on the loaded database itself if it only reads, on a copy if it writes, else on nothing.
fn directory(scratch: &Scratch, engine: &str, workload: Workload, base: Option<PathBuf>) -> Result<PathBuf> {
    match base {
        Some(base) if !workload.writes() => Ok(base),
        Some(base) => {
            let dir = scratch.fresh(&format!("{engine}-work"))?;
            disk::copy_tree(&base, &dir)?;
            Ok(dir)
        }
        None => scratch.fresh(&format!("{engine}-work")),
    }
}

/// For each round and engine, interleaved: the first job on a new database (only in the first round, unless `anew`),
/// then the second on the same; gives both answers merged.
pub(crate) fn opening(
    scratch: &Scratch,
    engines: &Engines,
    options: &Options,
    (first, second): (&Job, &Job),
    anew: bool,
) -> Result<Vec<(String, Value)>> {
    let mut firsts: BTreeMap<&str, Value> = BTreeMap::new();
    let names = engines.names();
    let mut answers = Vec::new();
    let limit = engines.limit().unwrap_or(LONGEST_OPENING);
    for round in 1..=engines.rounds {
        for engine in &names {
            let name = format!("{engine}-opening");
            let ask = |dir: PathBuf, job: &Job| {
                Task { engine: engine.clone(), dir, options: options.clone(), job: job.clone() }
                    .in_child(limit)
                    .map_err(|failure| format!("{engine}: {failure}"))
            };
            if anew || !firsts.contains_key(engine.as_str()) {
                firsts.insert(engine, ask(scratch.fresh(&name)?, first)?);
            }
            let mut merged = firsts.get(engine.as_str()).cloned().unwrap_or_default();
            if let (Value::Object(merged), Value::Object(answer)) =
                (&mut merged, ask(scratch.path().join(&name), second)?)
            {
                merged.extend(answer);
            }
            eprintln!("{engine}: round {round} of {}: {merged}", engines.rounds);
            answers.push((engine.clone(), merged));
        }
    }
    Ok(answers)
}

#[cfg(test)]
mod tests {
    use super::verdict;
    use crate::failure::{Kind, Told};
    use crate::report::measurement::Measurement;
    use crate::report::measurement::tests::{sample, sample_task};

    fn failed(engine: &str, kind: Kind) -> Measurement {
        Measurement::failed(engine, &sample_task(engine, 1).1, &Told { kind, error: "why".into() })
    }

    #[test]
    fn only_our_failures_and_wrong_answers_spoil_a_run() {
        let good = sample("azekura", 1, 1.0);
        assert!(verdict(std::slice::from_ref(&good)).is_ok());
        for (row, ends_well) in [
            (failed("fjall", Kind::TimedOut), true),
            (failed("fjall", Kind::Refused), true),
            (failed("fjall", Kind::Failed), true),
            (failed("fjall", Kind::Wrong), false),
            (failed("azekura", Kind::TimedOut), false),
            (failed("azekura", Kind::Failed), false),
            (failed("azekura-pmem", Kind::TimedOut), false),
        ] {
            assert_eq!(verdict(&[good.clone(), row.clone()]).is_ok(), ends_well, "{row:?}");
        }
        for (engine, lost, ends_well) in
            [("azekura", 0, true), ("azekura", 1, false), ("azekura-pmem", 1, false), ("fjall", 1, true)]
        {
            let mut row = sample(engine, 1, 1.0);
            row.extra.insert("lost_records".into(), lost.into());
            assert_eq!(verdict(&[row]).is_ok(), ends_well, "{engine} lost {lost}");
        }
    }
}

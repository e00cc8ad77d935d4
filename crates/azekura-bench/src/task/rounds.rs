//! The parent's plan: which child runs when. Engines take turns, A B A B, so that drift of the machine hits them alike.

use crate::cli::Engines;
use crate::engine::Options;
use crate::failure::Result;
use crate::machine::disk::{self, Scratch};
use crate::report::measurement::Measurement;
use crate::task::task::{Job, Plan, Task};
use crate::workload::{Shape, Workload};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// A comparison: some workloads, some engines, some rounds.
#[derive(Clone, Debug)]
pub(crate) struct Comparison {
    /// Workloads, in this order.
    pub(crate) workloads: Vec<Workload>,
    /// Engines by name, in this order.
    pub(crate) engines: Vec<String>,
    /// Rounds.
    pub(crate) rounds: u32,
    /// How every engine is opened.
    pub(crate) options: Options,
    /// The plan of each measurement but for workload, key order, operations and round.
    pub(crate) plan: Plan,
    /// Operations, where the workload's own number is not wanted.
    pub(crate) ops: Option<u64>,
    /// Uncounted operations before reads, where half the operations is not wanted.
    pub(crate) warm_ops: Option<u64>,
}

impl Comparison {
    /// Runs it all; gives the measurements in the order they were made.
    pub(crate) fn run(&self, scratch: &Scratch) -> Result<Vec<Measurement>> {
        let mut loaded = BTreeSet::new();
        let mut measurements = Vec::new();
        for &workload in &self.workloads {
            for round in 1..=self.rounds {
                for engine in &self.engines {
                    let plan = self.plan_of(workload, round);
                    let base = self.base(scratch, engine, &plan.shape, workload, &mut loaded)?;
                    let dir = directory(scratch, engine, workload, base)?;
                    let task = self.task(engine, dir, Job::Measure(plan));
                    eprintln!("{engine}: {} round {round} of {}", workload.name(), self.rounds);
                    measurements.push(serde_json::from_value(task.in_child()?)?);
                    if workload.writes() {
                        std::fs::remove_dir_all(&task.dir)?;
                    }
                }
            }
        }
        Ok(measurements)
    }

    fn plan_of(&self, workload: Workload, round: u32) -> Plan {
        let shape = Shape { order: workload.key_order(), ..self.plan.shape };
        let most = if workload.loads() { u64::MAX } else { shape.n }; // a fill ends with the data set
        let ops = self.ops.unwrap_or_else(|| workload.default_ops(shape.n)).min(most);
        let warm_ops = self.warm_ops.unwrap_or(ops / 2);
        Plan { workload, shape, ops, warm_ops, round, seed: self.plan.seed + u64::from(round), ..self.plan.clone() }
    }

    fn task(&self, engine: &str, dir: PathBuf, job: Job) -> Task {
        Task { engine: engine.to_owned(), dir, options: self.options.clone(), job }
    }

    /// The engine's loaded database, made when it is first needed; `None` for workloads that start with an empty one.
    fn base(
        &self,
        scratch: &Scratch,
        engine: &str,
        shape: &Shape,
        workload: Workload,
        loaded: &mut BTreeSet<String>,
    ) -> Result<Option<PathBuf>> {
        if !workload.loads() {
            return Ok(None);
        }
        let name = format!("{engine}-base");
        if loaded.insert(engine.to_owned()) {
            let dir = scratch.fresh(&name)?;
            let answer = self.task(engine, dir, Job::Load(*shape)).in_child()?;
            eprintln!("{engine}: loaded {} records in {:.1} s", shape.n, answer["seconds"].as_f64().unwrap_or(0.0));
            if answer["settled"] != Value::Bool(true) {
                eprintln!("{engine}: did not settle; its reads run beside background work");
            }
        }
        Ok(Some(scratch.path().join(name)))
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
    for round in 1..=engines.rounds {
        for engine in &names {
            let name = format!("{engine}-opening");
            let ask = |dir: PathBuf, job: &Job| {
                Task { engine: engine.clone(), dir, options: options.clone(), job: job.clone() }.in_child()
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

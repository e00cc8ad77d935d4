//! The parent's schedule: which child runs when. Engines take turns, A B A B, so that drift of the machine affects all
//! of them alike.

use crate::engine::{Options, Sync, registry};
use crate::error::{ErrorKind, KnownError, Result, error_of};
use crate::measure::disk::{self, Scratch};
use crate::task::child::{self, Limits};
use crate::task::measure::{Facts, load_and_settle, measure};
use crate::task::openings;
use crate::task::plan::{Job, Plan, Task};
use crate::workload::{Shape, Workload};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Carries out a task; called in the child process.
pub(crate) fn perform(task: &Task) -> Result<Value> {
    match &task.job {
        Job::Load(shape) => load_and_settle(task, shape),
        Job::Measure(plan) => measure(task, plan),
        Job::WriteAndDie(plan) => openings::write_and_die(task, plan),
        Job::Recover(plan, written) => openings::open_and_get(task, plan, Some(*written)),
        Job::Open(plan) => openings::open_and_get(task, plan, None),
        Job::BuildTables(count) => openings::build_tables(task, *count),
        Job::OpenTables => openings::open_tables(task),
        Job::CreatePartitions(count) => openings::partitions(task, *count, true),
        Job::OpenPartitions(count) => openings::partitions(task, *count, false),
    }
}

/// Has a child process carry out a task within `limit`.
pub(crate) fn ask(task: &Task, limit: Duration) -> Result<Value> {
    let dies = matches!(task.job, Job::WriteAndDie(_));
    child::ask(&["child", &serde_json::to_string(task)?], dies, limit)
}

/// Workloads, engines and rounds that are compared.
#[derive(Clone, Debug)]
pub(crate) struct Comparison {
    pub(crate) workloads: Vec<Workload>,
    pub(crate) engines: Vec<String>,
    pub(crate) rounds: u32,
    /// Numbers of threads: one comparison for each.
    pub(crate) threads: Vec<u64>,
    pub(crate) options: Options,
    /// The data set of workloads of blobs; that of the others is in `plan`.
    pub(crate) blobs: Shape,
    /// The plan of each measurement except workload, key order, operations, threads and round.
    pub(crate) plan: Plan,
    /// Operations; those of the workload when `None`.
    pub(crate) ops: Option<u64>,
    /// Uncounted operations before reads; half the operations when `None`.
    pub(crate) warm_ops: Option<u64>,
    /// Time limit of a child process; by the times of other engines when `None`.
    pub(crate) limit: Option<Duration>,
    /// No measurement begins after this; those that remain are missing in the result.
    pub(crate) deadline: Option<Instant>,
}

/// The loaded databases of a run and the times that children took. Comparisons in one [`Scratch`] may share it.
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    bases: BTreeMap<String, Result<PathBuf, KnownError>>,
    limits: Limits,
}

impl Loaded {
    /// Removes every loaded database.
    pub(crate) fn clear(&mut self) {
        for base in std::mem::take(&mut self.bases).into_values().flatten() {
            let _ = disk::remove(&base); // it goes with the scratch directory at the latest
        }
    }
}

impl Comparison {
    /// Runs everything and returns the figures in the order they were measured. An engine that cannot do something, or
    /// not in time, gets a row with an error; the others go on.
    pub(crate) fn run(&self, scratch: &Scratch, loaded: &mut Loaded) -> Result<Vec<Value>> {
        let mut rows = Vec::new();
        for &workload in &self.workloads {
            let threads = if workload.single_threaded { &self.threads[..1] } else { &self.threads };
            // What timed out or was refused is not tried again in later rounds.
            let mut given_up: BTreeMap<(u64, &str), KnownError> = BTreeMap::new();
            let turns = (1..=self.rounds).flat_map(|round| threads.iter().map(move |threads| (round, *threads)));
            for ((round, threads), engine) in turns.flat_map(|turn| self.engines.iter().map(move |one| (turn, one))) {
                if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    return Ok(rows);
                }
                let plan = self.plan_of(workload, threads, round);
                let key = (threads, engine.as_str());
                let known = given_up.get(&key).cloned();
                let row = known
                    .map_or_else(|| self.measure(scratch, engine, &plan, loaded), |known| Err(Box::new(known).into()));
                rows.push(row.unwrap_or_else(|error| {
                    let known = KnownError::of(&error);
                    eprintln!("{engine}: {}: {known}", workload.name);
                    if matches!(known.kind, ErrorKind::TimedOut | ErrorKind::Refused) {
                        given_up.insert(key, known.clone());
                    }
                    Facts::default().figures(engine, &plan, Some(&known))
                }));
            }
        }
        Ok(rows)
    }

    /// The data set of the first workload.
    pub(crate) fn first_shape(&self) -> Shape {
        if self.workloads.first().is_some_and(|workload| workload.blobs) { self.blobs } else { self.plan.shape }
    }

    /// The settings as they are printed with each row.
    pub(crate) fn settings(&self) -> Value {
        let Plan { shape, seconds, write_rate, depth, cold, .. } = &self.plan;
        json!({
            "options": self.options, "key_size": shape.key_size, "value_size": shape.value_size,
            "value_sizes": [shape.least_value, shape.value_size],
            "blob_sizes": [self.blobs.least_value, self.blobs.value_size], "blobs": self.blobs.n,
            "seconds": seconds, "write_rate": write_rate, "depth": depth, "cold": cold,
        })
    }

    fn plan_of(&self, workload: Workload, threads: u64, round: u32) -> Plan {
        let data = if workload.blobs { self.blobs } else { self.plan.shape };
        let shape = Shape { sequential: workload.sequential, ..data };
        let most = if workload.fills() { shape.n } else { u64::MAX };
        let ops = self.ops.unwrap_or_else(|| workload.default_ops(shape.n)).min(most);
        // A measurement that a time limit ends may have no last operation, but its warm-up has.
        let warm_ops = self.warm_ops.unwrap_or(ops.min(workload.default_ops(shape.n)) / 2);
        let seed = self.plan.seed + u64::from(round);
        Plan { workload, shape, ops, warm_ops, threads, round, seed, ..self.plan.clone() }
    }

    /// One measurement: on the loaded database itself if the workload only reads, on a copy of it or an empty directory
    /// otherwise.
    fn measure(&self, scratch: &Scratch, engine: &str, plan: &Plan, loaded: &mut Loaded) -> Result<Value> {
        let workload = plan.workload;
        eprintln!("{engine}: {} round {} of {}", workload.name, plan.round, self.rounds);
        registry::check(engine).map_err(|error| error_of(ErrorKind::Refused, error.to_string()))?;
        let data_bytes = (plan.shape.n as f64 * plan.shape.mean_record_bytes()) as u64;
        let options = Options { data_bytes, ..workload.options(&self.options) };
        let mut dir = scratch.path.join(format!("{engine}-work"));
        if workload.loads {
            let base = self.base(scratch, engine, &plan.shape, &options, loaded)?;
            if workload.writes() {
                disk::copy_tree(&base, &scratch.fresh(&format!("{engine}-work"))?)?;
            } else {
                dir = base;
            }
        } else {
            disk::remove(&dir)?;
        }
        let task = |job| Task { engine: engine.to_owned(), dir: dir.clone(), options: options.clone(), job };
        let work = format!("{} x{}", workload.name, plan.threads);
        let limit = loaded.limits.of(&work, self.limit);
        let start = Instant::now();
        let row = match workload.name.as_str() {
            "recovery" => ask(&task(Job::WriteAndDie(plan.clone())), limit).and_then(|answer| {
                let written = answer["written"].as_u64().ok_or("a child did not report how much it wrote")?;
                ask(&task(Job::Recover(plan.clone(), written)), limit)
            }),
            "open" => ask(&task(Job::Open(plan.clone())), limit),
            _ => ask(&task(Job::Measure(plan.clone())), limit),
        };
        if workload.writes() {
            disk::remove(&dir)?;
        }
        let row = row?;
        loaded.limits.note(&work, start.elapsed().as_secs_f64());
        Ok(row)
    }

    /// The engine's loaded database, made when it is first needed. Cache size, durability and workers do not affect it.
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
        let outcome = self.load(engine, &dir, shape, options, &mut loaded.limits);
        let outcome = outcome.map(|()| dir.clone()).map_err(|error| {
            let known = KnownError::of(&error);
            KnownError { error: format!("loading: {}", known.error), ..known }
        });
        if outcome.is_err() {
            disk::remove(&dir)?;
        }
        loaded.bases.insert(key, outcome.clone());
        Ok(outcome?)
    }

    fn load(&self, engine: &str, dir: &Path, shape: &Shape, options: &Options, limits: &mut Limits) -> Result<()> {
        let (work, start) = (format!("load {shape:?}"), Instant::now());
        let (dir, options) = (dir.to_path_buf(), options.clone());
        let task = Task { engine: engine.to_owned(), dir, options, job: Job::Load(*shape) };
        let answer = ask(&task, limits.of(&work, self.limit))?;
        limits.note(&work, start.elapsed().as_secs_f64());
        eprintln!("{engine}: loaded {} records in {:.1} s", shape.n, answer["seconds"].as_f64().unwrap_or(0.0));
        if answer["settled"] != true {
            eprintln!("{engine}: did not settle; it is read while background work runs");
        }
        Ok(())
    }
}

/// Returns an error if azekura has no figures for something or lost a record that its guarantee covers, or if any
/// engine gave a wrong answer.
pub(crate) fn verdict(rows: &[Value]) -> Result<()> {
    for row in rows {
        let (engine, workload) =
            (row["engine"].as_str().unwrap_or_default(), row["workload"].as_str().unwrap_or_default());
        let ours = registry::is_ours(engine);
        if let Some(lost) = row["lost_records"].as_u64().filter(|&lost| ours && lost > 0) {
            return Err(format!("{engine}: {workload}: {lost} acknowledged records are lost").into());
        }
        if let Some(error) = row["error"].as_str().filter(|_| ours || row["error_kind"] == json!(ErrorKind::Wrong)) {
            return Err(format!("{engine}: {workload}: {error}").into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::verdict;
    use crate::error::ErrorKind;
    use crate::task::measure::tests::{failed, sample};

    #[test]
    fn only_own_failures_and_wrong_answers_fail_a_run() {
        let good = sample("azekura", 1, 1.0);
        assert!(verdict(std::slice::from_ref(&good)).is_ok());
        for (row, ends_well) in [
            (failed("fjall", ErrorKind::TimedOut), true),
            (failed("fjall", ErrorKind::Refused), true),
            (failed("fjall", ErrorKind::Failed), true),
            (failed("fjall", ErrorKind::Wrong), false),
            (failed("azekura", ErrorKind::TimedOut), false),
            (failed("azekura", ErrorKind::Failed), false),
            (failed("azekura-pmem", ErrorKind::TimedOut), false),
        ] {
            assert_eq!(verdict(&[good.clone(), row.clone()]).is_ok(), ends_well, "{row:?}");
        }
        for (engine, lost, ends_well) in
            [("azekura", 0, true), ("azekura", 1, false), ("azekura-pmem", 1, false), ("fjall", 1, true)]
        {
            let mut row = sample(engine, 1, 1.0);
            row["lost_records"] = lost.into();
            assert_eq!(verdict(&[row]).is_ok(), ends_well, "{engine} lost {lost}");
        }
    }
}

//! Random operations under random options, compared with a `BTreeMap`: on disk and in memory, with one and several
//! threads.
//!
//! `AZEKURA_SEED` runs one seed only; `AZEKURA_MODEL_RUNS` is the number of runs in memory.
//!
//! Modules, in reading order: `partition_model` (the model), `run` (a database and its model), `writes`, `reads`,
//! `iterators` (from both ends), `threads`, `bounds` (of WAL and memory).

mod bounds;
mod iterators;
mod partition_model;
mod reads;
mod run;
mod threads;
mod writes;

use crate::testkit::rng::test_seeds;
use crate::testkit::test_dir::TestDir;
use crate::testkit::{FailureReport, env_u64};
use run::{ModelCounters, ModelRun};

type ModelOp = fn(&mut ModelRun);

/// Maximum number of open files in every second run.
const OPEN_FILE_LIMIT: usize = 48;

/// Every operation with its weight.
const WEIGHTED_OPS: &[(&str, u64, ModelOp)] = &[
    ("insert", 300, ModelRun::insert),
    ("remove", 60, ModelRun::remove),
    ("remove_weak", 40, ModelRun::remove_weakly),
    ("batch", 80, ModelRun::batch),
    ("get", 120, ModelRun::get),
    ("multi_get", 30, ModelRun::multi_get),
    ("range", 60, ModelRun::range),
    ("prefix", 30, ModelRun::prefix),
    ("stroll", 15, ModelRun::open_long_lived_iter),
    ("stroll_on", 30, ModelRun::advance_long_lived_iter),
    ("snapshot", 15, ModelRun::take_snapshot),
    ("check_snapshot", 15, ModelRun::check_snapshot),
    ("flush", 15, ModelRun::flush),
    ("compact", 5, ModelRun::major_compact),
    ("work", 60, ModelRun::run_background_step),
    ("persist", 10, ModelRun::persist),
    ("partitions", 15, ModelRun::change_partitions),
    ("check_all", 4, ModelRun::check_all_partitions),
    ("reopen", 5, ModelRun::reopen),
    ("kill", 5, ModelRun::kill),
    ("checkpoint", 3, ModelRun::checkpoint),
];

fn run_model(test: &'static str, place: TestDir, seed: u64, ops: usize) -> ModelCounters {
    let replay = FailureReport::new(test, seed);
    let mut subject = ModelRun::new(place, seed);
    let total: u64 = WEIGHTED_OPS.iter().map(|(_, weight, _)| weight).sum();
    for i in 0..ops {
        let mut at = subject.rng.below(total);
        let chosen = WEIGHTED_OPS.iter().find(|(_, weight, _)| match at.checked_sub(*weight) {
            Some(rest) => {
                at = rest;
                false
            }
            None => true,
        });
        let (name, _, op) = chosen.expect("the weights add up");
        replay.set_progress(format!("operation {i}: {name}"));
        op(&mut subject);
        *subject.counters.ops.entry(name).or_default() += 1;
    }
    replay.set_progress("the end");
    subject.check_all_partitions();
    subject.reopen();
    subject.record_metrics();
    std::mem::take(&mut subject.counters)
}

#[test]
fn random_operations_in_memory() {
    let mut tally = ModelCounters::default();
    let seeds = test_seeds(env_u64("AZEKURA_MODEL_RUNS", 16));
    for seed in &seeds {
        let place = if seed % 2 == 0 { TestDir::in_memory() } else { TestDir::with_open_file_limit(OPEN_FILE_LIMIT) };
        tally.add(&run_model("model::random_operations_in_memory", place, *seed, 1_500));
    }
    println!("{} runs: {tally:?}", seeds.len());
    if seeds.len() > 10 {
        assert!(tally.ops.len() == WEIGHTED_OPS.len(), "an operation was never drawn: {tally:?}");
        let reached = [tally.flushes, tally.compactions, tally.trivial_moves, tally.replayed];
        assert!(reached.iter().all(|count| *count >= 10) && tally.levels >= 3, "the options are too tame: {tally:?}");
    }
}

#[test]
fn random_operations_on_disk() {
    let mut tally = ModelCounters::default();
    for seed in test_seeds(4) {
        tally.add(&run_model("model::random_operations_on_disk", TestDir::on_disk(), seed, 700));
    }
    println!("{tally:?}");
}

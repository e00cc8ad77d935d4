//! Random operations under random options, compared with a `BTreeMap`: on disk and in memory, with one and several
//! threads.
//!
//! `AZEKURA_SEED` runs one seed only; `AZEKURA_MODEL_RUNS` is the number of runs in memory. A failing run is reduced to
//! few operations.
//!
//! Modules, in reading order: `partition_model` (the model), `run` (a database and its model), `writes`, `reads`,
//! `transactions` (and conditional writes), `iterators` (from both ends), `followers`, `feed` (the change feed),
//! `threads`, `bounds` (of WAL and memory).

mod bounds;
mod feed;
mod followers;
mod iterators;
mod partition_model;
mod reads;
mod run;
mod threads;
mod transactions;
mod writes;

use std::cell::RefCell;

use crate::testkit::env_u64;
use crate::testkit::property::{RandomOp, check_property, random_ops};
use crate::testkit::seeds::test_seeds;
use crate::testkit::test_dir::TestDir;
use azekura::testing::SeededRng;
use run::{ModelCounters, ModelRun};

type ModelOp = fn(&mut ModelRun);

/// Maximum number of open files in every second run.
const OPEN_FILE_LIMIT: usize = 48;

/// Every operation with its weight.
const WEIGHTED_OPS: &[(&str, u32, ModelOp)] = &[
    ("insert", 300, ModelRun::insert),
    ("insert_with_ttl", 60, ModelRun::insert_with_ttl),
    ("clock", 15, ModelRun::move_clock),
    ("remove", 60, ModelRun::remove),
    ("remove_weak", 40, ModelRun::remove_weakly),
    ("remove_range", 25, ModelRun::remove_range),
    ("remove_prefix", 5, ModelRun::remove_prefix),
    ("clear", 2, ModelRun::clear),
    ("merge", 120, ModelRun::merge),
    ("batch", 80, ModelRun::batch),
    ("transact", 30, ModelRun::transact),
    ("update", 40, ModelRun::update),
    ("conditional_batch", 25, ModelRun::conditional_batch),
    ("ingest", 25, ModelRun::ingest),
    ("bulk", 15, ModelRun::bulk),
    ("get", 120, ModelRun::get),
    ("multi_get", 30, ModelRun::multi_get),
    ("range", 60, ModelRun::range),
    ("prefix", 30, ModelRun::prefix),
    ("open_iter", 15, ModelRun::open_long_lived_iter),
    ("advance_iter", 30, ModelRun::advance_long_lived_iter),
    ("snapshot", 15, ModelRun::take_snapshot),
    ("check_snapshot", 15, ModelRun::check_snapshot),
    ("follow", 15, ModelRun::follow),
    ("check_follower", 8, ModelRun::check_follower),
    ("read_changes", 20, ModelRun::read_changes),
    ("flush", 15, ModelRun::flush),
    ("compact", 5, ModelRun::major_compact),
    ("gc", 12, ModelRun::collect_blob_garbage),
    ("work", 60, ModelRun::run_background_step),
    ("persist", 10, ModelRun::persist),
    ("partitions", 15, ModelRun::change_partitions),
    ("check_all", 4, ModelRun::check_all_partitions),
    ("reopen", 5, ModelRun::reopen),
    ("kill", 5, ModelRun::kill),
    ("checkpoint", 3, ModelRun::checkpoint),
];

/// Runs the operations on a new database and its model.
fn run_model(test_dir: TestDir, seed: u64, ops: &[RandomOp]) -> ModelCounters {
    let mut run = ModelRun::new(test_dir, seed);
    for op in ops {
        let (name, _, body) = WEIGHTED_OPS.iter().find(|(name, ..)| *name == op.name).expect("it is in the list");
        run.rng = SeededRng::new(op.seed);
        body(&mut run);
        *run.counters.ops.entry(name).or_default() += 1;
    }
    run.check_all_partitions();
    run.reopen();
    run.record_metrics();
    std::mem::take(&mut run.counters)
}

/// Runs about `mean` random operations for each seed, and returns how often each operation was run.
fn check_model(test: &str, seeds: &[u64], mean: usize, test_dir: impl Fn(u64) -> TestDir) -> ModelCounters {
    let weights: Vec<(&str, u32)> = WEIGHTED_OPS.iter().map(|(name, weight, _)| (*name, *weight)).collect();
    let counters = RefCell::new(ModelCounters::default());
    for seed in seeds {
        check_property(test, *seed, &random_ops(&weights, mean), |ops| {
            let counts = run_model(test_dir(*seed), *seed, &ops);
            counters.borrow_mut().add(&counts);
        });
    }
    counters.into_inner()
}

#[test]
fn random_operations_in_memory() {
    let seeds = test_seeds(env_u64("AZEKURA_MODEL_RUNS", 16));
    let counters = check_model("model::random_operations_in_memory", &seeds, 1_500, |seed| match seed % 2 {
        0 => TestDir::in_memory(),
        _ => TestDir::with_open_file_limit(OPEN_FILE_LIMIT),
    });
    println!("{} runs: {counters:?}", seeds.len());
    if seeds.len() > 10 {
        assert!(counters.ops.len() == WEIGHTED_OPS.len(), "an operation was never drawn: {counters:?}");
        let reached = [counters.flushes, counters.compactions, counters.trivial_moves, counters.replayed];
        let is_enough = reached.iter().all(|count| *count >= 10) && counters.levels >= 3;
        let is_enough = is_enough && counters.read_commits > 1_000 && counters.stale_reads > 0;
        assert!(is_enough, "the options reach too little: {counters:?}");
    }
}

#[test]
fn random_operations_on_disk() {
    let counters = check_model("model::random_operations_on_disk", &test_seeds(4), 700, |_| TestDir::on_disk());
    println!("{counters:?}");
}

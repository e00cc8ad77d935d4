//! Random operations under random options, against a `BTreeMap`: on the disk and in memory, alone and with threads.
//!
//! `AZEKURA_SEED` runs one seed only; `AZEKURA_MODEL_RUNS` says how many there are in memory.
//!
//! Rooms in reading order: `book` (the model), `subject` (a database beside its model), `writes`, `reads`, `walks`
//! (from both ends), `threads`, `bounds` (of log and memory).

mod book;
mod bounds;
mod reads;
mod subject;
mod threads;
mod walks;
mod writes;

use crate::world::dice::seeds;
use crate::world::disk::Place;
use crate::world::{Replay, number};
use subject::{Subject, Tally};

type Op = fn(&mut Subject);

/// Files that may be open at a time in every other run.
const FEW_FILES: usize = 48;

/// Every operation with its weight.
const OPS: &[(&str, u64, Op)] = &[
    ("insert", 300, Subject::insert),
    ("remove", 60, Subject::remove),
    ("remove_weak", 40, Subject::remove_weakly),
    ("batch", 80, Subject::batch),
    ("get", 120, Subject::get),
    ("multi_get", 30, Subject::multi_get),
    ("range", 60, Subject::range),
    ("prefix", 30, Subject::prefix),
    ("stroll", 15, Subject::stroll),
    ("stroll_on", 30, Subject::stroll_on),
    ("snapshot", 15, Subject::take_snapshot),
    ("check_snapshot", 15, Subject::check_snapshot),
    ("flush", 15, Subject::flush),
    ("compact", 5, Subject::compact),
    ("work", 60, Subject::work),
    ("persist", 10, Subject::persist),
    ("partitions", 15, Subject::partitions),
    ("check_all", 4, Subject::check_all),
    ("reopen", 5, Subject::reopen),
    ("kill", 5, Subject::kill),
    ("checkpoint", 3, Subject::checkpoint),
];

fn run(test: &'static str, place: Place, seed: u64, ops: usize) -> Tally {
    let replay = Replay::new(test, seed);
    let mut subject = Subject::new(place, seed);
    let total: u64 = OPS.iter().map(|(_, weight, _)| weight).sum();
    for i in 0..ops {
        let mut at = subject.dice.below(total);
        let chosen = OPS.iter().find(|(_, weight, _)| match at.checked_sub(*weight) {
            Some(rest) => {
                at = rest;
                false
            }
            None => true,
        });
        let (name, _, op) = chosen.expect("the weights add up");
        replay.at(format!("operation {i}: {name}"));
        op(&mut subject);
        *subject.tally.ops.entry(name).or_default() += 1;
    }
    replay.at("the end");
    subject.check_all();
    subject.reopen();
    subject.note_metrics();
    std::mem::take(&mut subject.tally)
}

#[test]
fn random_operations_in_memory() {
    let mut tally = Tally::default();
    let seeds = seeds(number("AZEKURA_MODEL_RUNS", 16));
    for seed in &seeds {
        let place = if seed % 2 == 0 { Place::memory() } else { Place::with_few_files(FEW_FILES) };
        tally.add(&run("model::random_operations_in_memory", place, *seed, 1_500));
    }
    println!("{} runs: {tally:?}", seeds.len());
    if seeds.len() > 10 {
        assert!(tally.ops.len() == OPS.len(), "an operation was never drawn: {tally:?}");
        let reached = [tally.flushes, tally.compactions, tally.moves, tally.replayed];
        assert!(reached.iter().all(|count| *count >= 10) && tally.levels >= 3, "the options are too tame: {tally:?}");
    }
}

#[test]
fn random_operations_on_disk() {
    let mut tally = Tally::default();
    for seed in seeds(4) {
        tally.add(&run("model::random_operations_on_disk", Place::disk(), seed, 700));
    }
    println!("{tally:?}");
}

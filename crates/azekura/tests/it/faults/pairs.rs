//! A second fault after the first.
//!
//! The first fault leads to a state that only error handling produces. The second fault finds steps that the error
//! handling left incomplete.

use azekura::testing::{Fault, FaultPlan, OpKind, SeededRng, TestOrder};
use std::io::ErrorKind;

use super::run::{FaultPhase, FaultRunConfig, PHASES};
use super::sweep::run_with_faults;
use crate::testkit::env_u64;
use crate::testkit::seeds::test_seeds;

type FaultPair = (FaultRunConfig, Vec<(FaultPhase, FaultPlan)>);

/// A random run with two faults: the second one occurs later in the same phase, or in a later phase.
fn random_pair(seed: u64) -> FaultPair {
    let mut rng = SeededRng::new(seed ^ 0xFA17);
    let mut style = FaultRunConfig::new(0, rng.chance_one_in(2));
    style.blob_file_size = rng.pick(&[8 << 10, 64 << 10, 1 << 20]);
    style.commits_per_sync = rng.pick(&[1, 1, 2, 3]);
    style.pool = rng.chance_one_in(3);
    style.order = rng.pick(&TestOrder::ALL);
    let first = rng.below(PHASES.len() - 1);
    let second = (first + rng.below(3)).min(PHASES.len() - 1);
    let mut fault = || {
        let op = rng.pick(&[
            OpKind::Sync,
            OpKind::Sync,
            OpKind::Sync,
            OpKind::Write,
            OpKind::Write,
            OpKind::Create,
            OpKind::SyncDir,
            OpKind::Rename,
            OpKind::Read,
            OpKind::Allocate,
            OpKind::RemoveFile,
            OpKind::Any,
        ]);
        let what = match op {
            OpKind::Write | OpKind::Read | OpKind::Allocate if rng.chance_one_in(3) => Fault::Short,
            OpKind::Write | OpKind::Create | OpKind::Allocate if rng.chance_one_in(2) => {
                Fault::Error(ErrorKind::StorageFull)
            }
            _ => Fault::Error(ErrorKind::Other),
        };
        let reach = 1 << rng.below(6);
        let plan = FaultPlan::new(op, 1 + rng.below(reach), what);
        match op {
            OpKind::Sync | OpKind::Write | OpKind::Create | OpKind::Read | OpKind::Any => {
                plan.in_path(rng.pick(&[".blob", ".blob", ".sst", ".wal", "MANIFEST", ".pool", ""]))
            }
            _ => plan,
        }
    };
    let plans = vec![(PHASES[first], fault()), (PHASES[second], fault().after_faults(1))];
    (style, plans)
}

/// Runs each pair; `name` describes it.
fn check_fault_pairs(pairs: impl Iterator<Item = (String, FaultPair)>) {
    let (mut runs, mut both, mut wrong) = (0, 0, Vec::new());
    for (name, (style, plans)) in pairs {
        runs += 1;
        match run_with_faults(style, plans) {
            Ok(struck) => both += usize::from(struck > 1),
            Err(what) => wrong.push(format!("{name}: {what}")),
        }
    }
    println!("{runs} runs with two faults, {both} reached both, {} violations", wrong.len());
    let shown: Vec<&String> = wrong.iter().take(12).collect();
    assert!(wrong.is_empty(), "{} of {runs} runs violated a rule: {shown:#?}", wrong.len());
    assert!(both * 4 > runs, "too few runs reached the second fault");
}

#[test]
fn nothing_is_lost_when_two_calls_fail() {
    let seeds = test_seeds(env_u64("AZEKURA_FAULT_PAIRS", 100));
    check_fault_pairs(seeds.into_iter().map(|seed| (format!("AZEKURA_SEED={seed}"), random_pair(seed))));
}

/// A sync of a direct blob write fails, so its blob file cannot be finished and a flush carries its durable values
/// over. Then any call on a blob file fails, up to and including that flush. The second fault found this defect: the
/// next flush named the file that the failed flush had created and removed.
#[test]
fn nothing_is_lost_when_carrying_values_fails() {
    let broken = Fault::Error(ErrorKind::Other);
    let stride = env_u64("AZEKURA_FAULT_STRIDE", 19);
    let syncs = (3..=33).step_by(3 * stride as usize).chain([15, 33]);
    check_fault_pairs(syncs.flat_map(|sync| (20..=60).map(move |call| (sync, call))).map(|(sync, call)| {
        let style = FaultRunConfig { blob_file_size: 1 << 20, commits_per_sync: 1, ..FaultRunConfig::new(0, true) };
        let sync = FaultPlan::new(OpKind::Sync, sync, broken).in_path(".blob");
        let call = FaultPlan::new(OpKind::Any, call, broken).in_path(".blob").after_faults(1);
        ("enumerated".to_owned(), (style, vec![(FaultPhase::Write, sync), (FaultPhase::Flush, call)]))
    }));
}

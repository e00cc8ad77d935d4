//! Every call of every kind fails in turn.

use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind};

use super::run::{FaultPhase, FaultRun, FaultRunConfig, PHASES, put_foreign_file};
use crate::testkit::env_u64;
use crate::testkit::watchdog::run_with_timeout;

const KINDS: [OpKind; 19] = [
    OpKind::Open,
    OpKind::Create,
    OpKind::CreateDir,
    OpKind::ReadDir,
    OpKind::Exists,
    OpKind::Rename,
    OpKind::RemoveFile,
    OpKind::RemoveDir,
    OpKind::HardLink,
    OpKind::SyncDir,
    OpKind::Lock,
    OpKind::Read,
    OpKind::Write,
    OpKind::Length,
    OpKind::SetLength,
    OpKind::Allocate,
    OpKind::Sync,
    OpKind::Map,
    OpKind::Populate,
];

/// A failing device, a full device, a short write, and a process without free file handles.
fn faults_for_op(op: OpKind) -> Vec<Fault> {
    let mut faults = vec![Fault::Error(ErrorKind::Other)];
    if matches!(op, OpKind::Write | OpKind::Allocate | OpKind::Create | OpKind::SetLength | OpKind::Populate) {
        faults.push(Fault::Error(ErrorKind::StorageFull));
    }
    if matches!(op, OpKind::Read | OpKind::Write | OpKind::Allocate | OpKind::Populate) {
        faults.push(Fault::Short);
    }
    faults
}

fn fault_machine() -> (MemFs, FaultFs) {
    let machine = MemFs::new();
    put_foreign_file(&machine);
    let fs = FaultFs::new(Arc::new(machine.clone()));
    (machine, fs)
}

/// Number of calls of each kind in a run without faults.
fn count_calls(style: FaultRunConfig) -> Vec<(OpKind, u64)> {
    let (machine, fs) = fault_machine();
    let mut life = FaultRun::new(Arc::new(fs.clone()), style);
    PHASES.iter().for_each(|phase| life.run_phase(*phase));
    assert!(life.errors.is_empty(), "without a fault: {:?}", life.errors);
    let calls = KINDS.iter().map(|op| (*op, fs.count(*op))).collect();
    life.check_after_repair(&machine);
    calls
}

/// A run with these faults, each armed at the start of its phase. Returns the number of faults that struck, or the
/// violated rule.
pub(super) fn run_with_faults(style: FaultRunConfig, plans: Vec<(FaultPhase, FaultPlan)>) -> Result<u64, String> {
    let what = format!("{style:?} {plans:?}");
    let result = catch_unwind(AssertUnwindSafe(|| {
        run_with_timeout(&what, move || {
            let (machine, fs) = fault_machine();
            let mut life = FaultRun::new(Arc::new(fs.clone()), style);
            for phase in PHASES {
                let armed = plans.iter().filter(|(begins, _)| *begins == phase);
                armed.for_each(|(_, plan)| fs.inject(plan.clone()));
                life.run_phase(phase);
            }
            life.check_errors();
            let struck = fs.fault_count();
            fs.clear_faults();
            life.check_after_repair(&machine);
            struck
        })
    }));
    result.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or(panic.downcast_ref::<&str>().map(ToString::to_string));
        format!("{what}: {}", text.unwrap_or_default())
    })
}

fn fail_each_call(style: FaultRunConfig, stride: u64) {
    let (mut runs, mut struck, mut sites) = (0, 0, 0);
    let mut wrong = Vec::new();
    for (op, count) in count_calls(style) {
        sites += count;
        for fault in faults_for_op(op) {
            // The first calls of each kind are the rarest ones; later calls repeat.
            let mut nth = 1;
            while nth <= count {
                for forever in [false, true] {
                    let plan = FaultPlan::new(op, nth, fault);
                    runs += 1;
                    match run_with_faults(
                        style,
                        vec![(FaultPhase::Create, if forever { plan.forever() } else { plan })],
                    ) {
                        Ok(count) => struck += u64::from(count > 0),
                        Err(what) => wrong.push(what),
                    }
                }
                nth += if nth < 8 { 1 } else { stride.max(nth / 12) };
            }
        }
    }
    println!("{style:?}: {sites} calls, {runs} runs with a fault, {struck} reached it, {} violations", wrong.len());
    let shown: Vec<&String> = wrong.iter().take(12).collect();
    assert!(wrong.is_empty(), "{} of {runs} runs violated a rule: {shown:#?}", wrong.len());
}

#[test]
fn every_call_may_fail() {
    let stride = env_u64("AZEKURA_FAULT_STRIDE", 19);
    fail_each_call(FaultRunConfig::new(0, false), stride);
    fail_each_call(FaultRunConfig::new(0, true), stride);
}

#[test]
fn every_call_may_fail_with_workers() {
    fail_each_call(FaultRunConfig::new(2, true), env_u64("AZEKURA_FAULT_STRIDE", 19) * 5);
}

/// Events are delivered inside of calls that fail; the listener flushes, writes and opens there.
#[test]
fn every_call_may_fail_with_a_listener() {
    let stride = env_u64("AZEKURA_FAULT_STRIDE", 19) * 10;
    fail_each_call(FaultRunConfig { acts: true, ..FaultRunConfig::new(0, false) }, stride);
}

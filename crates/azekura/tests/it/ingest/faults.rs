//! Every file-system call fails in turn during ingests and bulk loads: each of them is there as a whole or not at all.

use std::io::ErrorKind as IoErrorKind;
use std::path::Path;
use std::sync::Arc;

use azekura::fs::Fs;
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, TestEnv};
use azekura::{BulkOptions, Config, Database, Error, ErrorKind, KvSeparationOptions, Partition, Result};

use super::{DIR, assert_clean, data_files, key, small_tables};
use crate::testkit::env_u64;

const KINDS: [OpKind; 8] = [
    OpKind::Create,
    OpKind::Open,
    OpKind::SyncDir,
    OpKind::Read,
    OpKind::Write,
    OpKind::SetLength,
    OpKind::Allocate,
    OpKind::Sync,
];
const KEYS: u32 = 400;

fn config(fs: Arc<dyn Fs>) -> Config {
    Config::new(DIR).fs(fs).env(Arc::new(TestEnv::new(1))).workers(0).mapped_wal(false).wal_segment_size(64 << 10)
}

fn open(db: &Database) -> Result<Partition> {
    let apart = KvSeparationOptions::default().separation_threshold(300).blob_file_target_size(16 << 10);
    db.open_partition("p", small_tables().with_kv_separation(apart))
}

/// The value of key `n` in a round; some go to blob files.
fn value(n: u32, round: u32) -> Vec<u8> {
    vec![round as u8; if n.is_multiple_of(20) { 700 } else { 100 }]
}

fn load(part: &Partition, round: u32) -> Result<u64> {
    let sorted = (0..KEYS).map(|n| (key(n), value(n, round)));
    match round % 2 {
        1 => part.ingest(sorted),
        _ => part.bulk_with_options(sorted.rev().map(Ok::<_, Error>), &BulkOptions::default().memory(64 << 10)),
    }
}

/// Runs the rounds, and returns the last one that was acknowledged, and all errors.
fn run_rounds(db: &Database, part: &Partition) -> (u32, Vec<ErrorKind>) {
    let (mut acknowledged, mut uncertain, mut errors) = (0, 0, Vec::new());
    for round in 1..=4u32 {
        let inserted = part.insert(key(KEYS + round), "beside").and_then(|()| part.insert(key(3), [round as u8]));
        match load(part, round).map_err(|error| error.kind()) {
            Ok(_) => (acknowledged, uncertain) = (round, round),
            Err(kind) => {
                // An ingest that returned this error has changed nothing.
                uncertain = if kind == ErrorKind::OutOfSpace { uncertain } else { round };
                errors.push(kind);
            }
        }
        match part.get(key(7)) {
            Ok(found) => {
                let found = found.map_or(0, |value| u32::from(value[0]));
                assert!((acknowledged..=uncertain).contains(&found), "{found} of {round}: {acknowledged}, {errors:?}");
            }
            Err(error) => errors.push(error.kind()),
        }
        let work = [inserted, part.flush(), db.step().map(drop)];
        errors.extend(work.into_iter().filter_map(Result::err).map(|error| error.kind()));
    }
    (acknowledged, errors)
}

/// Returns how many faults struck, and the number of calls of each kind.
fn run_with_fault(plan: Option<FaultPlan>) -> (u64, Vec<(OpKind, u64)>) {
    let machine = MemFs::new();
    let fs = FaultFs::new(Arc::new(machine.clone()));
    let db = config(Arc::new(fs.clone())).open().unwrap();
    let part = open(&db).unwrap();
    let before: Vec<u64> = KINDS.iter().map(|op| fs.count(*op)).collect();
    let plans: Vec<FaultPlan> = plan.clone().into_iter().collect();
    plans.into_iter().for_each(|plan| fs.inject(plan));
    let (acknowledged, errors) = run_rounds(&db, &part);
    let struck = fs.fault_count();
    let calls = KINDS.iter().zip(before).map(|(op, before)| (*op, fs.count(*op) - before)).collect();
    fs.clear_faults();
    drop((part, db));
    let db = config(Arc::new(machine.clone())).open().unwrap();
    let part = open(&db).unwrap();
    let round_of = |n| part.get(key(n)).unwrap().map_or(0, |value| u32::from(value[0]));
    let rounds: Vec<u32> = (0..KEYS).filter(|n| *n != 3).map(round_of).collect();
    let whole = rounds.iter().all(|round| *round == rounds[0]);
    assert!(whole && rounds[0] >= acknowledged, "{plan:?}: {acknowledged} of {rounds:?}, {errors:?}");
    assert!(round_of(3) >= acknowledged, "{plan:?}: a write before the ingest hides it");
    assert!(errors.is_empty() || struck > 0, "without a fault: {errors:?}");
    drop(part);
    db.close().unwrap();
    assert_clean(&machine);
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    let (tables, blobs) = (azekura::inspect::tables(&fs, Path::new(DIR)), azekura::inspect::blobs(&fs, Path::new(DIR)));
    assert_eq!(
        data_files(&machine),
        tables.unwrap().len() + blobs.unwrap().len(),
        "{plan:?}: there are unneeded files"
    );
    (struck, calls)
}

#[test]
fn every_call_of_an_ingest_may_fail() {
    let stride = env_u64("AZEKURA_FAULT_STRIDE", 9);
    let (_, calls) = run_with_fault(None);
    let (mut runs, mut struck) = (0, 0);
    for (op, count) in calls {
        let mut nth = 1;
        while nth <= count {
            for fault in [Fault::Error(IoErrorKind::Other), Fault::Error(IoErrorKind::StorageFull)] {
                for forever in [false, true] {
                    let plan = FaultPlan::new(op, nth, fault);
                    let plan = if forever { plan.forever() } else { plan };
                    runs += 1;
                    struck += u64::from(run_with_fault(Some(plan)).0 > 0);
                }
            }
            nth += if nth < 6 { 1 } else { stride.max(nth / 12) };
        }
    }
    println!("{runs} runs, a fault struck in {struck}");
    assert!(struck * 10 >= runs * 9);
}

//! Every limit gives its typed error before anything is logged, and sizes within the limits work.
//!
//! Modules, in reading order: `sizes` (keys, values, batches), `names` (of partitions, and options), `handles`
//! (lifetimes of handles, iterators and snapshots), `comparators` (comparators that do not match), `panics` (user
//! code that panics), `closures` (closures that read values).

mod closures;
mod comparators;
mod handles;
mod names;
mod panics;
mod sizes;

use std::path::Path;
use std::sync::Arc;

use azekura::fs::Fs;
use azekura::testing::{MemFs, TestEnv};
use azekura::{Config, Database, Error, ErrorKind, Partition, Result};

/// A database without worker threads.
fn config(machine: &MemFs) -> Config {
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    Config::new(Path::new("/db")).fs(fs).env(Arc::new(TestEnv::new(machine.op_count()))).workers(0)
}

fn open(machine: &MemFs) -> Database {
    config(machine).open().unwrap()
}

fn open_partition(db: &Database, name: &str) -> Partition {
    db.open_partition(name, Default::default()).unwrap()
}

fn expect_error<T>(result: Result<T>) -> Error {
    result.err().expect("an error")
}

fn error_kind<T>(result: Result<T>) -> ErrorKind {
    expect_error(result).kind()
}

/// Runs calls that must all be refused as `Invalid`, and checks that none of them reached the WAL.
fn assert_all_invalid(db: &Database, calls: &mut [(&str, &mut dyn FnMut() -> Result<()>)]) {
    let written = |db: &Database| {
        let metrics = db.metrics();
        (metrics.commits, metrics.records, metrics.wal_bytes, metrics.user_bytes)
    };
    let before = written(db);
    for (what, call) in calls {
        assert_eq!(error_kind(call()), ErrorKind::Invalid, "{what}");
        assert_eq!(written(db), before, "{what} wrote to the WAL");
    }
}

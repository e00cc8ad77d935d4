//! Partitions whose comparator is given late, panics, or calls the database.

use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use azekura::fs::{Fs, SystemEnv};
use azekura::testing::{MemFs, Survival, TestComparator, TestOrder};
use azekura::{Config, EngineType, Partition, PartitionCreateOptions, PersistMode, PmemOptions};

use super::open_partition;
use crate::testkit::watchdog::run_with_timeout;

fn config(machine: &MemFs) -> Config {
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    Config::new(Path::new("/db")).fs(fs).env(Arc::new(SystemEnv::new())).workers(0).wal_segment_size(64 << 10)
}

/// The machine after the process was killed.
fn killed(machine: &MemFs) -> MemFs {
    let after = machine.fork();
    after.crash(Survival::Everything, 0);
    after
}

fn lsm_and_pool() -> [PartitionCreateOptions; 2] {
    let pool = EngineType::Pmem(PmemOptions::default().max_size(4 << 20));
    [PartitionCreateOptions::default(), PartitionCreateOptions::default().engine(pool)]
}

/// A thread that retired WAL segments asked a partition for its first record that is only in the WAL. Meanwhile the
/// partition got its comparator: it had no tree yet, and the thread waited for the lock on its buffered records. When
/// the tree was complete, the buffer was empty, so the partition counted as flushed. The next kill lost its synced
/// records.
#[test]
fn late_records_stay_when_the_wal_is_retired() {
    for options in lsm_and_pool() {
        run_with_timeout("opening during a flush", || open_during_flush(options));
    }
}

fn open_during_flush(options: PartitionCreateOptions) {
    let machine = MemFs::new();
    let comparator = Arc::new(TestComparator::new(TestOrder::Reversed));
    let db = config(&machine).open().unwrap();
    let late = db.open_partition_with_comparator("late", options.clone(), comparator.clone()).unwrap();
    (0..100u8).for_each(|n| late.insert([n], [n; 8]).unwrap());
    db.persist(PersistMode::SyncAll).unwrap();
    let machine = killed(&machine);

    let db = config(&machine).open().unwrap();
    let other = open_partition(&db, "other");
    (0..400u32).for_each(|n| other.insert(n.to_be_bytes(), [7; 1_000]).unwrap());
    let ((done, ended), flushing) = (channel(), Arc::new(Mutex::new(None)));
    let started = Arc::clone(&flushing);
    comparator.call_once(move || {
        // The flush ends with a retirement of WAL segments.
        let flush = std::thread::spawn(move || other.flush().inspect(|()| done.send(()).unwrap_or_default()));
        *started.lock().unwrap() = Some(flush);
        // With the defect the flush waits for the end of this call.
        let _ = ended.recv_timeout(Duration::from_secs(1));
    });
    let late = db.open_partition_with_comparator("late", options.clone(), comparator.clone()).unwrap();
    flushing.lock().unwrap().take().expect("keys are compared").join().unwrap().unwrap();
    assert_eq!(late.len().unwrap(), 100);
    db.persist(PersistMode::SyncAll).unwrap();

    let db = config(&killed(&machine)).open().unwrap();
    let late: Partition = db.open_partition_with_comparator("late", options, comparator).unwrap();
    assert_eq!(late.len().unwrap(), 100, "synced records are lost");
}

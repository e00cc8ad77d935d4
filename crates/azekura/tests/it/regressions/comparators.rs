//! Partitions whose comparator is given late, panics, or calls the database.

use std::cmp::Ordering;
use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use azekura::fs::{Fs, SystemEnv};
use azekura::testing::{MemFs, Survival};
use azekura::{Comparator, Config, EngineType, Partition, PartitionCreateOptions, PersistMode, PmemOptions};

use super::open_partition;
use crate::testkit::watchdog::run_with_timeout;

type Call = Box<dyn FnOnce() + Send>;

/// Descending order. The first comparison after [`CallingComparator::call_once`] makes a call.
#[derive(Default)]
pub(super) struct CallingComparator {
    call: Mutex<Option<Call>>,
}

impl CallingComparator {
    pub(super) fn call_once(&self, call: impl FnOnce() + Send + 'static) {
        *self.call.lock().unwrap() = Some(Box::new(call));
    }
}

impl Comparator for CallingComparator {
    fn name(&self) -> &str {
        "calling"
    }

    fn compare(&self, a: &[u8], b: &[u8]) -> Ordering {
        let call = self.call.lock().unwrap().take();
        call.into_iter().for_each(|call| call());
        b.cmp(a)
    }

    fn can_keys_with_different_byte_contents_be_equal(&self) -> bool {
        false
    }
}

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

/// A thread that retired WAL segments asked a partition for its first record that is only in the WAL. While the
/// comparator was being given, the partition had no tree yet, and the thread waited for the buffered records. When the
/// tree was complete, they were gone, so the partition counted as flushed: the next kill lost its synced records.
#[test]
fn late_records_stay_when_the_wal_is_retired() {
    for options in lsm_and_pool() {
        run_with_timeout("opening beside a flush", || open_beside_a_flush(options));
    }
}

fn open_beside_a_flush(options: PartitionCreateOptions) {
    let machine = MemFs::new();
    let comparator = Arc::new(CallingComparator::default());
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

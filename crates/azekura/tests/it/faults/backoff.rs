//! Work that fails repeatedly delays only itself: flushes, compactions and the WAL of other partitions continue.
//!
//! Earlier, a damaged blob file made automatic blob GC fail at every attempt, and no worker flushed for the WAL any
//! more: it grew without bound although no partition needed its records.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use azekura::fs::{Fs, OpenMode};
use azekura::testing::{MemFs, TestEnv};
use azekura::{
    CompressionType, Config, Database, Error, ErrorKind, Event, GarbageCollection, KvSeparationOptions, Listener,
    Partition, PartitionCreateOptions,
};

use crate::testkit::watchdog::wait_until;

const DIR: &str = "/db";
const MAX_WAL_SIZE: u64 = 256 << 10;

#[derive(Default)]
struct ErrorListener(Mutex<Vec<Error>>);

impl Listener for ErrorListener {
    fn on_event(&self, event: &Event) {
        if let Event::BackgroundError { error } = event {
            self.0.lock().unwrap().push(error.clone());
        }
    }
}

fn config(fs: &Arc<dyn Fs>) -> Config {
    Config::new(DIR).fs(Arc::clone(fs)).wal_segment_size(64 << 10).max_wal_size(MAX_WAL_SIZE)
}

fn open_without_workers(fs: &Arc<dyn Fs>) -> Database {
    config(fs).workers(0).env(Arc::new(TestEnv::new(1))).open().unwrap()
}

/// Damages the middle third of every n-th file of that kind; returns the names.
fn damage_files(fs: &dyn Fs, ending: &str, every: usize) -> BTreeSet<String> {
    let mut files = fs.read_dir(Path::new(DIR)).unwrap();
    files.retain(|entry| entry.name.ends_with(ending));
    files.sort_by(|a, b| a.name.cmp(&b.name));
    for entry in files.iter().step_by(every) {
        let file = fs.open(&Path::new(DIR).join(&entry.name), OpenMode::Write).unwrap();
        let third = entry.len / 3;
        let mut bytes = vec![0; third as usize];
        file.read_exact_at(&mut bytes, third).unwrap();
        bytes.iter_mut().for_each(|byte| *byte ^= 0x55);
        file.write_at(&bytes, third).unwrap();
    }
    files.into_iter().step_by(every).map(|entry| entry.name).collect()
}

/// A partition with automatic blob GC whose blob files are half stale, with known staleness; some of the files are
/// damaged, and their names are returned too.
fn with_damaged_blob_files() -> (Arc<dyn Fs>, BTreeSet<String>) {
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    let db = open_without_workers(&fs);
    let apart = KvSeparationOptions::default().compression(CompressionType::None).blob_file_target_size(16 << 10);
    let options = |gc| PartitionCreateOptions::default().with_kv_separation(apart.clone().automatic_gc(gc));
    let stale_part = db.open_partition("stale_part", options(None)).unwrap();
    for round in 0..2u8 {
        (round..100).step_by(1 + usize::from(round)).for_each(|n| stale_part.insert([n], [round; 2_000]).unwrap());
        stale_part.flush().unwrap();
    }
    stale_part.major_compact().unwrap();
    assert!(stale_part.metrics().stale_blob_bytes() > 90_000, "{}", stale_part.metrics());
    stale_part.set_options(options(Some(1.0))).unwrap();
    drop(stale_part);
    db.close().unwrap();
    // The first files are half stale; the files of the second round are not.
    let damaged = damage_files(&*fs, ".blob", 5);
    (fs, damaged)
}

/// A partition with more L0 tables than its compaction trigger, all of them damaged.
fn with_damaged_tables() -> Arc<dyn Fs> {
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    let db = open_without_workers(&fs);
    let stale_part = db.open_partition("stale_part", PartitionCreateOptions::default()).unwrap();
    for round in 0..12u8 {
        (0..100u8).for_each(|n| stale_part.insert([n, n ^ round], [round; 100]).unwrap());
        stale_part.flush().unwrap();
    }
    drop(stale_part);
    db.close().unwrap();
    damage_files(&*fs, ".sst", 1);
    fs
}

/// Two partitions: one needs the start of the WAL, the other is written to.
fn open_two_partitions(db: &Database) -> (Partition, Partition) {
    let quiet = db.open_partition("quiet", PartitionCreateOptions::default()).unwrap();
    quiet.insert("first", "of the log").unwrap();
    (quiet, db.open_partition("busy", PartitionCreateOptions::default().max_memtable_size(64 << 10)).unwrap())
}

fn write(busy: &Partition, round: u8) {
    (0..200u8).for_each(|n| busy.insert([n], [round; 1_000]).unwrap());
}

/// Work that must have completed although other work fails.
fn is_maintained(db: &Database, quiet: &Partition, busy: &Partition) -> bool {
    let runs = |part: &Partition| part.metrics().levels.first().map_or(0, |level| level.runs);
    let flushed = quiet.metrics().levels.iter().any(|level| level.tables > 0) && busy.metrics().sealed_memtables == 0;
    flushed && runs(busy) < 8 && db.metrics().compactions > 0 && db.metrics().wal_live_bytes <= MAX_WAL_SIZE
}

/// The files that the errors name.
fn files_named_by(errors: &[Error]) -> Vec<String> {
    let name = |error: &Error| error.file().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
    errors.iter().map(name).collect()
}

#[test]
fn step_runs_failing_work_last() {
    let fs = with_damaged_tables();
    let db = open_without_workers(&fs);
    let (quiet, busy) = open_two_partitions(&db);
    for round in 0..10 {
        write(&busy, round);
        let mut failed_in_row = 0;
        while failed_in_row < 3 {
            match db.step() {
                Ok(true) => failed_in_row = 0,
                Ok(false) => panic!("the damage was repaired"),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Corruption, "{error}");
                    failed_in_row += 1;
                }
            }
        }
    }
    assert!(is_maintained(&db, &quiet, &busy), "{}\n{}\n{}", db.metrics(), quiet.metrics(), busy.metrics());
}

#[test]
fn blob_gc_continues_when_one_file_is_damaged() {
    let stale = |part: &Partition| -> BTreeSet<String> {
        let files = part.metrics().blob_files.into_iter().filter(|file| file.stale_bytes() > 0);
        files.map(|file| format!("{:06}.blob", file.id)).collect()
    };
    for by_call in [false, true] {
        let (fs, damaged) = with_damaged_blob_files();
        let db = open_without_workers(&fs);
        let stale_part = db.partition("stale_part").unwrap();
        let (before, mut errors) = (stale(&stale_part), Vec::new());
        let damaged_stale: BTreeSet<String> = before.intersection(&damaged).cloned().collect();
        assert!(before.len() > damaged_stale.len() && damaged_stale.len() > 1, "{before:?}, {damaged:?}");
        if by_call {
            errors.push(stale_part.gc_with_staleness_threshold(0.1).unwrap_err());
            assert!(damaged_stale.contains(&files_named_by(&errors)[0]), "{errors:?}");
        } else {
            loop {
                match db.step() {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => errors.push(error),
                }
            }
            assert_eq!(files_named_by(&errors).into_iter().collect::<BTreeSet<_>>(), damaged_stale);
            assert_eq!(errors.len(), damaged_stale.len(), "each is tried once");
        }
        assert!(errors.iter().all(|error| error.kind() == ErrorKind::Corruption), "{errors:?}");
        assert_eq!(stale(&stale_part), damaged_stale, "blob GC rewrote all other files");
        assert!(db.metrics().blob_bytes_freed > 0);
    }
}

#[test]
fn workers_report_failure_once_and_continue() {
    let blobs = || {
        let (fs, damaged) = with_damaged_blob_files();
        (fs, Some(damaged))
    };
    for ((fs, damaged), workers) in [(blobs(), 1), (blobs(), 2), ((with_damaged_tables(), None), 1)] {
        let recorder = Arc::new(ErrorListener::default());
        let listener: Arc<dyn Listener> = Arc::<ErrorListener>::clone(&recorder);
        let db = config(&fs).workers(workers).listener(listener).open().unwrap();
        let (quiet, busy) = open_two_partitions(&db);
        (0..10).for_each(|round| write(&busy, round));
        wait_until("the failure is reported and all other work done", || {
            is_maintained(&db, &quiet, &busy) && !recorder.0.lock().unwrap().is_empty()
        });
        // The work is retried meanwhile, without an event.
        std::thread::sleep(Duration::from_millis(400));
        let told = recorder.0.lock().unwrap().clone();
        assert!(told.iter().all(|error| error.kind() == ErrorKind::Corruption), "{told:?}");
        let files = files_named_by(&told);
        let each_once = files.iter().collect::<BTreeSet<_>>().len() == files.len();
        match damaged {
            Some(damaged) => assert!(each_once && files.iter().all(|file| damaged.contains(file)), "{told:?}"),
            None => assert_eq!(files.len(), 1, "{told:?}"),
        }
        drop((quiet, busy));
        db.close().unwrap();
    }
}

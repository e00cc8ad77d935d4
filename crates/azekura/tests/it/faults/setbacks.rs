//! Work that fails again and again waits for itself: flushes, compactions and the log of all others go on.
//!
//! Before, a damaged blob file made automatic collection fail for ever, and no worker came to the log any more: it grew
//! without end although nobody needed it.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use azekura::fs::{Fs, MemFs, OpenMode, TestEnv};
use azekura::{
    CompressionType, Config, Database, Error, ErrorKind, Event, KvSeparationOptions, Listener, Partition,
    PartitionCreateOptions,
};

const DIR: &str = "/db";
const MAX_LOG: u64 = 256 << 10;

#[derive(Default)]
struct Ears(Mutex<Vec<Error>>);

impl Listener for Ears {
    fn on_event(&self, event: &Event) {
        if let Event::BackgroundError { error } = event {
            self.0.lock().unwrap().push(error.clone());
        }
    }
}

fn config(fs: &Arc<dyn Fs>) -> Config {
    Config::new(DIR).fs(Arc::clone(fs)).log_segment_size(64 << 10).max_log_size(MAX_LOG)
}

fn by_hand(fs: &Arc<dyn Fs>) -> Database {
    config(fs).workers(0).env(Arc::new(TestEnv::new(1))).open().unwrap()
}

/// Damages the middle third of every file of that kind.
fn damage(fs: &dyn Fs, ending: &str) {
    for entry in fs.read_dir(Path::new(DIR)).unwrap().iter().filter(|entry| entry.name.ends_with(ending)) {
        let file = fs.open(&Path::new(DIR).join(&entry.name), OpenMode::Write).unwrap();
        let third = entry.len / 3;
        let mut bytes = vec![0; third as usize];
        file.read_exact_at(&mut bytes, third).unwrap();
        bytes.iter_mut().for_each(|byte| *byte ^= 0x55);
        file.write_at(&bytes, third).unwrap();
    }
}

/// A partition whose blob files are half stale, known to be so, and damaged; opened it would collect them by itself.
fn with_damaged_blob_files() -> Arc<dyn Fs> {
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    let db = by_hand(&fs);
    let apart = |gc| KvSeparationOptions::default().compression(CompressionType::None).automatic_gc(gc);
    let options = |gc| PartitionCreateOptions::default().with_kv_separation(apart(gc));
    let worn = db.open_partition("worn", options(None)).unwrap();
    for round in 0..2u8 {
        (round..100).step_by(1 + usize::from(round)).for_each(|n| worn.insert([n], [round; 2_000]).unwrap());
        worn.flush().unwrap();
    }
    worn.major_compact().unwrap();
    assert_eq!(worn.metrics().stale_blob_bytes() / 1_000, 100);
    db.open_partition("worn", options(Some(1.1))).unwrap();
    drop(worn);
    db.close().unwrap();
    damage(&*fs, ".blob");
    fs
}

/// A partition with more young tables than it wants, all of them damaged.
fn with_damaged_tables() -> Arc<dyn Fs> {
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    let db = by_hand(&fs);
    let worn = db.open_partition("worn", PartitionCreateOptions::default()).unwrap();
    for round in 0..12u8 {
        (0..100u8).for_each(|n| worn.insert([n, n ^ round], [round; 100]).unwrap());
        worn.flush().unwrap();
    }
    drop(worn);
    db.close().unwrap();
    damage(&*fs, ".sst");
    fs
}

/// One that holds the start of the log, and one that is busy.
fn neighbours(db: &Database) -> (Partition, Partition) {
    let quiet = db.open_partition("quiet", PartitionCreateOptions::default()).unwrap();
    quiet.insert("first", "of the log").unwrap();
    (quiet, db.open_partition("busy", PartitionCreateOptions::default().max_memtable_size(64 << 10)).unwrap())
}

fn write(busy: &Partition, round: u8) {
    (0..200u8).for_each(|n| busy.insert([n], [round; 1_000]).unwrap());
}

/// What must have happened although others fail.
fn is_tended(db: &Database, quiet: &Partition, busy: &Partition) -> bool {
    let runs = |part: &Partition| part.metrics().levels.first().map_or(0, |level| level.runs);
    let flushed = quiet.metrics().levels.iter().any(|level| level.tables > 0) && busy.metrics().sealed_memtables == 0;
    flushed && runs(busy) < 8 && db.metrics().compactions > 0 && db.metrics().log_live_bytes <= MAX_LOG
}

#[test]
fn by_hand_what_fails_comes_last() {
    for fs in [with_damaged_blob_files(), with_damaged_tables()] {
        let db = by_hand(&fs);
        let (quiet, busy) = neighbours(&db);
        let mut failures = 0;
        for round in 0..10 {
            write(&busy, round);
            let mut failed_in_row = 0;
            while failed_in_row < 3 {
                match db.step() {
                    Ok(true) => failed_in_row = 0,
                    Ok(false) => panic!("the damage was mended"),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Corruption, "{error}");
                        (failed_in_row, failures) = (failed_in_row + 1, failures + 1);
                    }
                }
            }
        }
        assert!(is_tended(&db, &quiet, &busy), "{}\n{}\n{}", db.metrics(), quiet.metrics(), busy.metrics());
        assert!(failures >= 30);
    }
}

#[test]
fn workers_go_on_beside_what_fails_and_tell_of_it_once() {
    for (fs, workers) in [(with_damaged_blob_files(), 1), (with_damaged_blob_files(), 2), (with_damaged_tables(), 1)] {
        let ears = Arc::new(Ears::default());
        let listener: Arc<dyn Listener> = Arc::<Ears>::clone(&ears);
        let db = config(&fs).workers(workers).listener(listener).open().unwrap();
        let (quiet, busy) = neighbours(&db);
        (0..10).for_each(|round| write(&busy, round));
        let start = Instant::now();
        while !is_tended(&db, &quiet, &busy) {
            let told = ears.0.lock().unwrap().clone();
            assert!(start.elapsed().as_secs() < 120, "{told:?}\n{}\n{}", db.metrics(), busy.metrics());
            std::thread::sleep(Duration::from_millis(10));
        }
        // It is tried again meanwhile, and nobody hears of it.
        std::thread::sleep(Duration::from_millis(400));
        let told = ears.0.lock().unwrap().clone();
        assert_eq!(told.iter().map(Error::kind).collect::<Vec<_>>(), [ErrorKind::Corruption], "{told:?}");
        drop((quiet, busy));
        db.close().unwrap();
    }
}

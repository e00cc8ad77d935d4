//! Blob GC, through the public interface.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use azekura::fs::Fs;
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, SeededRng, TestEnv};
use azekura::{
    CompressionType, Config, Database, Entry, ErrorKind, Gc, GcReport, Iter, KvSeparationOptions, Partition,
    PartitionCreateOptions, Result, Snapshot,
};

use crate::testkit::property::{check_property, random_seeds};
use crate::testkit::seeds::test_seeds;
use crate::testkit::watchdog::wait_until;

const DIR: &str = "/db";

type Pairs = BTreeMap<Vec<u8>, Vec<u8>>;

fn config(fs: &Arc<dyn Fs>) -> Config {
    Config::new(DIR).fs(Arc::clone(fs)).env(Arc::new(TestEnv::new(1))).workers(0).wal_segment_size(64 << 10)
}

fn separated_options() -> PartitionCreateOptions {
    let separation = KvSeparationOptions::default().separation_threshold(500).blob_file_target_size(16 << 10);
    let options = PartitionCreateOptions::default();
    options.with_kv_separation(separation.compression(CompressionType::None).automatic_gc(None))
}

fn value(n: u32, round: u32) -> Vec<u8> {
    (0..1000).map(|i| (n * 31 + round * 7 + i) as u8).collect()
}

fn insert_round(part: &Partition, keys: impl Iterator<Item = u32>, round: u32) {
    keys.for_each(|n| part.insert(format!("key {n:03}"), value(n, round)).unwrap());
}

fn blob_files(fs: &dyn Fs) -> usize {
    fs.read_dir(Path::new(DIR)).unwrap().iter().filter(|entry| entry.name.ends_with(".blob")).count()
}

/// 100 values of 1,000 bytes in several files, flushed.
fn open_filled(fs: &Arc<dyn Fs>) -> (Database, Partition) {
    let db = config(fs).open().unwrap();
    let part = db.open_partition("p", separated_options()).unwrap();
    insert_round(&part, 0..100, 0);
    part.flush().unwrap();
    (db, part)
}

#[test]
fn a_scan_reads_no_value_and_is_remembered() {
    let faults = FaultFs::new(Arc::new(MemFs::new()));
    let fs: Arc<dyn Fs> = Arc::new(faults.clone());
    let (_db, part) = open_filled(&fs);
    insert_round(&part, 0..50, 1);
    part.flush().unwrap();
    faults.inject(FaultPlan::new(OpKind::Read, 1, Fault::Error(std::io::ErrorKind::Other)).in_path(".blob").forever());
    let report = part.gc_scan().unwrap();
    assert_eq!(report.stale_blobs, 50);
    let before = faults.count(OpKind::Read);
    assert_eq!(part.gc_scan().unwrap(), report);
    assert_eq!(faults.count(OpKind::Read), before);
}

#[test]
fn invalid_gc_targets_are_refused() {
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    let (db, part) = open_filled(&fs);
    let plain = db.open_partition("plain", PartitionCreateOptions::default()).unwrap();
    plain.insert("a", "b").unwrap();
    let results = [
        plain.gc_scan().map(|_| 0),
        plain.gc_with_space_amp_target(2.0),
        plain.gc_with_staleness_threshold(0.5),
        plain.gc_drop_stale_segments(),
        part.gc_with_space_amp_target(f32::NAN),
        part.gc_with_space_amp_target(0.999),
        part.gc_with_space_amp_target(f32::NEG_INFINITY),
        part.gc_with_staleness_threshold(f32::NAN),
        part.gc_with_staleness_threshold(-0.1),
        part.gc_with_staleness_threshold(1.1),
    ];
    for (at, result) in results.into_iter().enumerate() {
        assert_eq!(result.unwrap_err().kind(), ErrorKind::Invalid, "call {at}");
    }
    assert_eq!(part.gc_with_space_amp_target(f32::INFINITY).unwrap(), 0);
    drop(plain);
    db.close().unwrap();
    assert_eq!(part.gc_scan().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(part.gc_with_space_amp_target(1.0).unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn at_rest_stale_values_go_by_themselves() {
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    let db = Config::new(DIR).fs(Arc::clone(&fs)).workers(2).wal_segment_size(256 << 10).open().unwrap();
    let separation = KvSeparationOptions::default().separation_threshold(500).blob_file_target_size(16 << 10);
    let options = PartitionCreateOptions::default().with_kv_separation(separation.compression(CompressionType::None));
    let part = db.open_partition("p", options).unwrap();
    insert_round(&part, 0..100, 0);
    part.flush().unwrap();
    insert_round(&part, (0..100).filter(|n| n % 5 != 0), 1);
    wait_until("half of all bytes are stale and remain", || {
        let metrics = part.metrics();
        let amp = |m: &azekura::PartitionMetrics| m.blob_bytes() as f64 / m.referenced_blob_bytes() as f64;
        db.metrics().flushes >= 2 && metrics.referenced_blob_bytes() < 110_000 && amp(&metrics) < 1.6
    });
    let report = part.gc_scan().unwrap();
    assert!(report.space_amp() <= 1.5 && report.total_blobs >= 100, "{report}");
    (0..100)
        .for_each(|n| assert_eq!(part.get(format!("key {n:03}")).unwrap().unwrap(), value(n, u32::from(n % 5 != 0))));
    (0..100).for_each(|n| part.remove(format!("key {n:03}")).unwrap());
    wait_until("all blob files are removed", || blob_files(&*fs) == 0);
    assert!(db.metrics().blob_gc_runs > 0 || part.metrics().blob_files.is_empty());
}

/// The content of the database, and the live snapshots.
struct BlobGcModel {
    current: Pairs,
    snapshots: Vec<(Snapshot, Pairs)>,
    iters: Vec<(Iter, Pairs)>,
    entries: Vec<(Entry, Vec<u8>)>,
}

impl BlobGcModel {
    fn check(&self, part: &Partition, rng: &mut SeededRng) {
        let shown: Vec<_> = part.iter().map(|pair| pair.unwrap()).collect();
        assert!(shown.iter().map(|(k, v)| (&**k, &**v)).eq(self.current.iter().map(|(k, v)| (&**k, &**v))));
        for (snapshot, then) in &self.snapshots {
            for (key, value) in then {
                assert_eq!(snapshot.get(part, key).unwrap().as_deref(), Some(&**value));
            }
            assert_eq!(snapshot.len(part).unwrap(), then.len() as u64);
        }
        if !self.entries.is_empty() {
            let (entry, value) = &self.entries[rng.below(self.entries.len())];
            assert_eq!(entry.value().unwrap(), value);
        }
    }

    fn drop_random_views(&mut self, rng: &mut SeededRng) {
        match rng.below(3) {
            0 if !self.snapshots.is_empty() => drop(self.snapshots.swap_remove(rng.below(self.snapshots.len()))),
            1 if !self.iters.is_empty() => {
                let (iter, then) = self.iters.swap_remove(rng.below(self.iters.len()));
                let shown: Vec<_> = iter.map(|pair| pair.unwrap()).collect();
                assert!(shown.iter().map(|(k, v)| (&**k, &**v)).eq(then.iter().map(|(k, v)| (&**k, &**v))));
            }
            _ => drop(self.entries.pop()),
        }
    }
}

/// Runs blob GC in one of the ways, and checks that its target is met.
fn run_random_gc(part: &Partition, rng: &mut SeededRng) {
    match rng.below(4) {
        0 => {
            let target = rng.pick(&[1.0, 1.1, 1.5, 2.0, 4.0]);
            part.gc_with_space_amp_target(target).unwrap();
            let report = part.gc_scan().unwrap();
            assert!(report.space_amp() <= target, "{report}, wanted {target}");
        }
        1 => {
            let threshold = rng.pick(&[0.0, 0.1, 0.3, 0.5, 1.0]);
            part.gc_with_staleness_threshold(threshold).unwrap();
            let report = part.gc_scan().unwrap();
            // No file is at or above the target, so the sum is not.
            assert!(report.stale_bytes == 0 || report.stale_ratio() < threshold, "{report}, wanted {threshold}");
        }
        2 => {
            part.gc_drop_stale_segments().unwrap();
            assert_eq!(part.gc_scan().unwrap().stale_segment_count, 0);
        }
        _ => {
            let report = part.gc_scan().unwrap();
            assert!(report.stale_bytes + report.pinned_bytes <= report.total_bytes && !report.to_string().is_empty());
        }
    }
}

fn random_step(db: &Database, part: &Partition, model: &mut BlobGcModel, rng: &mut SeededRng) {
    let key = format!("key {:02}", rng.below(40)).into_bytes();
    match rng.below(40) {
        0..=17 => {
            let len = rng.pick(&[0, 10, 499, 500, 501, 2000, 9000]);
            let value = rng.random_bytes(len);
            part.insert(&key, &value).unwrap();
            model.current.insert(key, value);
        }
        18..=23 => {
            part.remove(&key).unwrap();
            model.current.remove(&key);
        }
        24..=26 => part.flush().unwrap(),
        27 => part.major_compact().unwrap(),
        28 | 29 => drop(db.step().unwrap()),
        30 if model.snapshots.len() < 3 => model.snapshots.push((db.snapshot(), model.current.clone())),
        31 if model.iters.len() < 3 => {
            let mut iter = part.iter();
            let mut then = model.current.clone();
            if let Some(first) = iter.next() {
                then.remove(&*first.unwrap().0).unwrap();
            }
            model.iters.push((iter, then));
        }
        32 if model.entries.len() < 5 => {
            let entry = part.entries().next().map(Result::unwrap);
            let first = model.current.values().next().cloned();
            model.entries.extend(entry.zip(first));
        }
        30..=34 => model.drop_random_views(rng),
        _ => run_random_gc(part, rng),
    }
}

/// Random steps, each of `lists` in a newly opened database with other options.
fn check_random_gc(seed: u64, lists: &[Vec<u64>]) {
    let mut rng = SeededRng::new(seed);
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    let mut current = BTreeMap::new();
    for steps in lists {
        let separation = KvSeparationOptions::default()
            .separation_threshold(rng.pick(&[1, 100, 500]))
            .blob_file_target_size(rng.pick(&[1 << 10, 16 << 10, 1 << 20]))
            .compression(rng.pick(&[CompressionType::None, CompressionType::Lz4]))
            .automatic_gc(rng.pick(&[None, Some(1.0), Some(1.5)]));
        let db = config(&fs).open().unwrap();
        let options = PartitionCreateOptions::default().with_kv_separation(separation);
        let part = db.open_partition("p", Default::default()).unwrap();
        part.set_options(options).unwrap();
        let mut model = BlobGcModel { current, snapshots: Vec::new(), iters: Vec::new(), entries: Vec::new() };
        for (at, step) in steps.iter().enumerate() {
            let mut rng = SeededRng::new(*step);
            random_step(&db, &part, &mut model, &mut rng);
            if at % 25 == 0 {
                model.check(&part, &mut rng);
            }
        }
        model.check(&part, &mut rng);
        run_random_gc(&part, &mut rng);
        current = model.current; // the database is dropped right after blob GC
    }
    let db = config(&fs).open().unwrap();
    let part = db.partition("p").unwrap();
    let mut model = BlobGcModel { current, snapshots: Vec::new(), iters: Vec::new(), entries: Vec::new() };
    model.check(&part, &mut rng);
    part.gc_with_space_amp_target(1.0).unwrap();
    model.check(&part, &mut rng);
    let keys: Vec<Vec<u8>> = std::mem::take(&mut model.current).into_keys().collect();
    keys.iter().for_each(|key| part.remove(key).unwrap());
    part.gc_with_space_amp_target(3.0).unwrap();
    assert_eq!(part.gc_scan().unwrap(), GcReport::default(), "seed {seed}: no blob file remains");
}

#[test]
fn random_gc_keeps_every_snapshot_unchanged() {
    let lists = [random_seeds(256), random_seeds(256), random_seeds(256)];
    for seed in test_seeds(6) {
        check_property("random_gc_keeps_every_snapshot_unchanged", seed, &lists, |lists| check_random_gc(seed, &lists));
    }
}

#[test]
fn gc_on_full_disk_fails_without_damage() {
    let mut failures = 0;
    for op in [OpKind::Write, OpKind::Sync, OpKind::Create] {
        for nth in 1..12 {
            let machine = MemFs::new();
            let faults = FaultFs::new(Arc::new(machine.clone()));
            let fs: Arc<dyn Fs> = Arc::new(faults.clone());
            let (db, part) = open_filled(&fs);
            insert_round(&part, (0..100).filter(|n| n % 2 == 0), 1);
            part.major_compact().unwrap();
            let full = Fault::Error(std::io::ErrorKind::StorageFull);
            faults.inject(FaultPlan::new(op, nth, full).in_path(".blob").forever());
            let failed = part.gc_with_space_amp_target(1.0);
            if faults.fault_count() == 0 {
                failed.unwrap();
                continue;
            }
            failures += 1;
            assert_eq!(failed.unwrap_err().kind(), ErrorKind::OutOfSpace);
            faults.clear_faults();
            // A reader of another test may keep an obsolete file a little longer.
            let only_named = || {
                part.flush().unwrap();
                blob_files(&machine) == part.metrics().blob_files.len()
            };
            wait_until("files of the interrupted blob GC remain", only_named);
            let check = |part: &Partition| {
                (0..100).for_each(|n| {
                    let wanted = value(n, u32::from(n % 2 == 0));
                    assert_eq!(part.get(format!("key {n:03}")).unwrap().unwrap(), wanted);
                });
            };
            check(&part);
            part.gc_with_space_amp_target(1.0).unwrap();
            check(&part);
            assert_eq!(part.gc_scan().unwrap().total_blobs, 100);
            wait_until("files that blob GC replaced remain", only_named);
            drop((part, db));
            check(&config(&fs).open().unwrap().partition("p").unwrap());
        }
    }
    assert!(failures > 10, "{failures}");
}

#[test]
fn gc_runs_during_writes_and_checkpoints() {
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    let config = || Config::new(DIR).fs(Arc::clone(&fs)).workers(2).wal_segment_size(256 << 10);
    let db = config().open().unwrap();
    let part = db.open_partition("p", separated_options()).unwrap();
    insert_round(&part, 0..100, 0);
    let (ended, fs_of_copy) = (AtomicBool::new(false), Arc::clone(&fs));
    let check = |part: &Partition, snapshot: Option<&Snapshot>, n: u32| {
        let key = format!("key {n:03}");
        let found = snapshot.map_or_else(|| part.get(&key), |snapshot| snapshot.get(part, &key)).unwrap().unwrap();
        assert!((0..40).any(|round| found == value(n, round)), "key {n}");
    };
    std::thread::scope(|scope| {
        let (db, part, ended, check) = (&db, &part, &ended, &check);
        let writer = scope.spawn(move || {
            for round in 1..40 {
                insert_round(part, (0..100).filter(|n| (n + round) % 3 != 0), round);
                if round % 3 == 0 {
                    part.flush().unwrap();
                }
            }
            ended.store(true, Ordering::SeqCst);
        });
        for target in [1.0, 1.3] {
            scope.spawn(move || {
                let mut calls = 0;
                while !ended.load(Ordering::SeqCst) || calls < 3 {
                    part.gc_with_space_amp_target(target).unwrap();
                    part.gc_with_staleness_threshold(0.5).unwrap();
                    calls += 1;
                }
            });
        }
        scope.spawn(move || {
            let mut rng = SeededRng::new(5);
            while !ended.load(Ordering::SeqCst) {
                let snapshot = db.snapshot();
                (0..50).for_each(|_| check(part, Some(&snapshot), rng.below(100) as u32));
                assert_eq!(part.iter().map(Result::unwrap).count(), 100);
            }
        });
        scope.spawn(move || {
            for copy in 0..3 {
                let path = format!("/copy {copy}");
                match db.checkpoint(&path) {
                    Err(error) if error.kind() == ErrorKind::Conflict => continue,
                    other => other.unwrap(),
                }
                let copy = Config::new(&path).fs(Arc::clone(&fs_of_copy)).workers(0).open().unwrap();
                let part = copy.partition("p").unwrap();
                (0..100).for_each(|n| check(&part, None, n));
            }
        });
        writer.join().unwrap();
    });
    part.gc_with_space_amp_target(1.0).unwrap();
    let report = part.gc_scan().unwrap();
    assert_eq!((report.total_blobs, report.stale_blobs), (100, 0));
    drop(part);
    db.close().unwrap();
    let db = config().open().unwrap();
    let part = db.partition("p").unwrap();
    (0..100).for_each(|n| check(&part, None, n));
    assert_eq!(part.gc_scan().unwrap(), report);
}

//! Range deletes: the work of scans over covered entries, files that are deleted unread, and what other threads see of
//! `clear`, `remove_prefix` and ingests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use azekura::fs::{Fs, SystemEnv};
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, TestEnv};
use azekura::{
    CompactionStrategy, Config, Database, EngineType, KvSeparationOptions, LeveledOptions, Partition,
    PartitionCreateOptions, PmemOptions,
};

use crate::testkit::ordered_partitions::open_counting;

fn config(machine: &MemFs) -> Config {
    Config::new("/db").fs(Arc::new(machine.clone())).env(Arc::new(TestEnv::new(1))).workers(0)
}

fn key(n: u32) -> [u8; 4] {
    n.to_be_bytes()
}

/// Regression: a compaction keeps covered entries that a snapshot needs, in tables that may have newer entries, too.
/// Each scan over the covered range passed all of them.
#[test]
fn covered_entries_of_a_snapshot_are_passed_once() {
    const KEYS: u32 = 20_000;
    let db = config(&MemFs::new()).open().unwrap();
    let options = PartitionCreateOptions::default().block_size(1 << 10);
    let (part, counting) = open_counting(&db, "p", options);
    part.ingest((0..KEYS).map(|n| (key(n), [n as u8; 20]))).unwrap();
    let snapshot = db.snapshot();
    part.remove_range(key(1)..key(KEYS - 1)).unwrap();
    [0, KEYS - 1].iter().for_each(|n| part.insert(key(*n), "new").unwrap());
    part.major_compact().unwrap();
    assert_eq!(part.metrics().levels.iter().map(|level| level.entries).sum::<u64>(), u64::from(KEYS) + 2);
    let first = || part.range(key(1)..).next().unwrap().unwrap().0;
    let last = || part.range(..key(KEYS - 1)).next_back().unwrap().unwrap().0;
    for (direction, scan, found) in
        [("forward", &first as &dyn Fn() -> azekura::Slice, key(KEYS - 1)), ("backward", &last, key(0))]
    {
        for round in 0..3 {
            let before = counting.comparisons();
            assert_eq!(scan(), found);
            let compared = counting.comparisons() - before;
            assert!(round == 0 || compared < 1_000, "{direction}, scan {round}: {compared} comparisons");
        }
    }
    assert_eq!(part.iter().count(), 2);
    assert_eq!(snapshot.iter(&part).count(), KEYS as usize);
    let middle = snapshot.range(&part, key(100)..key(200)).map(|pair| pair.unwrap().1[0]);
    assert!(middle.eq(100..200), "the snapshot sees what it saw");
    part.insert(key(300), "later").unwrap();
    assert_eq!(part.range(key(1)..).next().unwrap().unwrap().0, key(300));
    part.major_compact().unwrap();
    assert_eq!(part.range(key(1)..).map(|pair| pair.unwrap().0).collect::<Vec<_>>(), [key(300), key(KEYS - 1)]);
}

/// Regression: what a scan remembered of one table was applied to the tables behind it, whose newer entries the next
/// scan then skipped.
#[test]
fn newer_entries_of_other_tables_are_found() {
    const KEYS: u32 = 3_000;
    let db = config(&MemFs::new()).open().unwrap();
    let levels = LeveledOptions::default().target_file_size(8 << 10);
    let options = PartitionCreateOptions::default().block_size(1 << 10);
    let options = options.compaction_strategy(CompactionStrategy::Leveled(levels));
    let part = db.open_partition("p", options).unwrap();
    part.ingest((0..KEYS).map(|n| (key(n), [n as u8; 20]))).unwrap();
    part.major_compact().unwrap();
    let snapshot = db.snapshot();
    part.remove_range(key(0)..key(KEYS)).unwrap();
    let newer: Vec<_> = (0..KEYS).filter(|n| n % 311 == 10).map(key).collect();
    newer.iter().for_each(|key| part.insert(key, "new").unwrap());
    part.major_compact().unwrap();
    assert!(part.metrics().levels.iter().any(|level| level.tables >= 4), "{:?}", part.metrics().levels);
    for round in 0..3 {
        let found: Vec<_> = part.iter().map(|pair| pair.unwrap().0).collect();
        assert_eq!(found, newer, "forward, scan {round}");
        let found: Vec<_> = part.iter().rev().map(|pair| pair.unwrap().0).collect();
        assert!(found.iter().eq(newer.iter().rev()), "backward, scan {round}: {found:?}");
    }
    assert_eq!(snapshot.iter(&part).count(), KEYS as usize);
}

/// Tables and blob files whose every entry is covered are deleted without being read: by `clear`, by background work,
/// and with their partition. Before the calls return, no file is left.
#[test]
fn covered_files_are_deleted_unread() {
    let machine = MemFs::new();
    let faults = FaultFs::new(Arc::new(machine.clone()));
    let open =
        || Config::new("/db").fs(Arc::new(faults.clone())).env(Arc::new(TestEnv::new(1))).workers(0).open().unwrap();
    let separated = KvSeparationOptions::default().separation_threshold(200).blob_file_target_size(16 << 10);
    let small = LeveledOptions::default().target_file_size(8 << 10);
    let options = PartitionCreateOptions::default().with_kv_separation(separated);
    let options = options.compaction_strategy(CompactionStrategy::Leveled(small));
    let files = || machine.read_dir("/db".as_ref()).unwrap().into_iter().map(|file| file.name);
    let data_files = || files().filter(|name| name.ends_with(".sst") || name.ends_with(".blob")).count();
    type Removal = (&'static str, fn(&Database, Partition));
    let removals: [Removal; 3] = [
        ("clear", |_, part| part.clear().unwrap()),
        ("delete_partition", |db, part| db.delete_partition(part).unwrap()),
        ("remove_range", |db, part| {
            part.remove_range(key(0)..).unwrap();
            part.flush().unwrap();
            while db.step().unwrap() {}
        }),
    ];
    for (what, remove) in removals {
        let db = open();
        let part = db.open_partition(what, options.clone()).unwrap();
        for round in 0..2u8 {
            (0..1_000).for_each(|n| part.insert(key(n), vec![round; if n % 10 == 0 { 500 } else { 100 }]).unwrap());
            part.flush().unwrap();
        }
        assert!(data_files() > 4, "{what}");
        drop(part);
        db.close().unwrap();
        let db = open(); // no table is open
        for kind in [".sst", ".blob"] {
            let broken = FaultPlan::new(OpKind::Read, 1, Fault::Error(std::io::ErrorKind::Other));
            faults.inject(broken.in_path(kind).forever());
        }
        let before = faults.fault_count();
        remove(&db, db.partition(what).unwrap());
        assert_eq!((data_files(), faults.fault_count() - before), (0, 0), "{what}: files, and reads of them");
        faults.clear_faults();
        db.close().unwrap();
    }
}

/// Regression: a record that several range deletes cover counted for each. A program that removed a prefix and inserted
/// ten keys again, over and over, flushed a memtable every 29 times.
#[test]
fn repeated_removals_seal_few_memtables() {
    let db = config(&MemFs::new()).open().unwrap();
    let part = db.open_partition("p", PartitionCreateOptions::default()).unwrap();
    for _ in 0..1_000u32 {
        part.remove_prefix("p").unwrap();
        (0..10u8).for_each(|n| part.insert([b'p', n], "v").unwrap());
        while db.step().unwrap() {}
    }
    let flushes = db.metrics().flushes;
    assert!((1..=2).contains(&flushes), "{flushes} flushes of about 4,096 records");
    assert_eq!(part.len().unwrap(), 10);
    // A single one that covers many records seals the memtable that has them.
    part.flush().unwrap();
    (0..5_000).for_each(|n| part.insert(key(n), "v").unwrap());
    let before = db.metrics().sealed_memtable_bytes;
    part.remove_range(key(0)..key(4_999)).unwrap();
    assert!(before == 0 && db.metrics().sealed_memtable_bytes > 0);
}

fn both_kinds(db: &Database) -> [Partition; 2] {
    let leveled = LeveledOptions::default().target_file_size(8 << 10).l0_compaction_trigger(4);
    let tables = PartitionCreateOptions::default().compaction_strategy(CompactionStrategy::Leveled(leveled));
    let pool = EngineType::Pmem(PmemOptions::default().max_size(64 << 20));
    [
        db.open_partition("tables", tables.max_memtable_size(32 << 10)).unwrap(),
        db.open_partition("pool", PartitionCreateOptions::default().engine(pool)).unwrap(),
    ]
}

/// Threads load and remove the keys of one group each, and clear the partition, at the same time. A snapshot sees all
/// keys of a group from one load, or none.
#[test]
fn loads_and_removals_of_threads_are_atomic() {
    const GROUPS: u32 = 3;
    const KEYS: u32 = 60;
    const ROUNDS: u32 = 30;
    let machine = MemFs::new();
    let env = Arc::new(SystemEnv::new());
    let db = Config::new("/db").fs(Arc::new(machine.clone())).env(env.clone()).workers(2).open().unwrap();
    let in_group = |group: u32, n: u32| [key(group), key(n)].concat();
    for part in both_kinds(&db) {
        let (done, part) = (AtomicBool::new(false), &part);
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..GROUPS)
                .map(|group| {
                    scope.spawn(move || {
                        for round in 1..=ROUNDS {
                            let entries = (0..KEYS).map(|n| (in_group(group, n), key(round)));
                            match (round + group) % 3 {
                                0 => part.bulk(entries.rev()).unwrap(),
                                _ => part.ingest(entries).unwrap(),
                            };
                            match (round + group) % 4 {
                                0 => part.remove_prefix(key(group)).unwrap(),
                                1 if group == 0 => part.clear().unwrap(),
                                2 if group == 1 => part.remove_range(in_group(0, 0)..in_group(1, 0)).unwrap(),
                                _ => {}
                            }
                        }
                    })
                })
                .collect();
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let snapshot = db.snapshot();
                    for group in 0..GROUPS {
                        let loads: Vec<_> =
                            (0..KEYS).map(|n| snapshot.get(part, in_group(group, n)).unwrap()).collect();
                        assert!(loads.iter().all(|load| *load == loads[0]), "a part of group {group}: {loads:?}");
                        let scanned = snapshot.prefix(part, key(group)).map(|pair| pair.unwrap().1);
                        assert!(scanned.map(Some).eq(loads.into_iter().filter(Option::is_some)), "group {group}");
                    }
                }
            });
            let finished: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
            done.store(true, Ordering::Relaxed);
            finished.into_iter().for_each(|writer| writer.unwrap());
        });
        // The last load of a group is there as a whole, or was removed by a later call.
        for group in 0..GROUPS {
            let count = part.prefix(key(group)).count();
            assert!(count == 0 || count == KEYS as usize, "{count} keys of group {group}");
        }
    }
    let before: Vec<Vec<_>> = both_kinds(&db).map(|part| part.iter().map(Result::unwrap).collect()).into();
    db.close().unwrap();
    let db = config(&machine).open().unwrap();
    let after: Vec<Vec<_>> = both_kinds(&db).map(|part| part.iter().map(Result::unwrap).collect()).into();
    assert!(before == after);
    db.close().unwrap();
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    let report = azekura::inspect::verify(&fs, "/db".as_ref(), &mut |_, _| {}).unwrap();
    assert!(report.is_clean(), "{report:?}");
}

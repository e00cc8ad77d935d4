//! Tables, blob files, compaction and iteration.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use azekura::fs::Fs;
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, TestComparator, TestEnv, TestOrder};
use azekura::{
    CompactionStrategy, CompressionType, Config, Database, EngineType, ErrorKind, Event, GarbageCollection,
    KvSeparationOptions, LeveledOptions, Listener, Partition, PartitionCreateOptions, PersistMode, PmemOptions, Result,
};

use super::{open, open_partition};

/// The sync of the first direct blob file failed, so a flush copied its durable values to a new file. The same flush
/// failed at the second direct blob file and removed the new file. The tree remembered the new file as the finished
/// form of the first one. The next flush named it in the manifest, and the database did not open any more.
#[test]
fn a_retried_flush_names_no_removed_blob_file() {
    let machine = MemFs::new();
    let fs = FaultFs::new(Arc::new(machine.clone()));
    let db = Config::new(Path::new("/db")).fs(Arc::new(fs.clone())).env(Arc::new(TestEnv::new(1))).workers(0);
    let db = db.wal_segment_size(64 << 10).open().unwrap();
    let separation = KvSeparationOptions::default()
        .separation_threshold(100)
        .blob_file_target_size(1 << 20)
        .direct_write_threshold(500)
        .automatic_gc(None)
        .compression(CompressionType::None);
    let p = db.open_partition("p", PartitionCreateOptions::default().with_kv_separation(separation)).unwrap();
    let put = |key: &str, byte: u8| {
        let mut batch = db.batch();
        batch.durability(PersistMode::SyncData);
        batch.insert(&p, key, vec![byte; 1_000]);
        batch.commit()
    };
    put("a", 1).unwrap();
    fs.inject(FaultPlan::new(OpKind::Sync, 1, Fault::Error(io::ErrorKind::Other)).in_path(".blob"));
    assert!(put("b", 2).is_err());
    fs.clear_faults();
    put("c", 3).unwrap();
    let names = machine.read_dir(Path::new("/db")).unwrap().into_iter().map(|entry| entry.name);
    let second = names.filter(|name| name.ends_with(".blob")).max().unwrap();
    fs.inject(FaultPlan::new(OpKind::Write, 1, Fault::Error(io::ErrorKind::Other)).in_path(second));
    assert!(p.flush().is_err());
    fs.clear_faults();
    p.flush().unwrap();
    while db.step().unwrap() {}
    drop((p, db));
    let db = open(&machine, "/db", 2);
    let p = open_partition(&db, "p");
    assert_eq!(p.get("a").unwrap().unwrap(), [1; 1_000]);
    assert_eq!(p.get("b").unwrap(), None);
    assert_eq!(p.get("c").unwrap().unwrap(), [3; 1_000]);
}

/// The writer of a table compared its first key with the empty key, which was never inserted. A comparator that panics
/// for keys of other lengths than eight bytes poisoned the database at the first flush.
#[test]
fn a_comparator_is_given_only_known_keys() {
    for order in [TestOrder::ChecksummedReversed, TestOrder::ChecksummedNumbers, TestOrder::ChecksummedNumbersHashed] {
        let db = open(&MemFs::new(), "/db", 1);
        let comparator = order.comparator().unwrap();
        let p = db.open_partition_with_comparator("p", Default::default(), comparator).unwrap();
        let key = |n: u32| order.valid_key(&n.to_be_bytes());
        (0..500).for_each(|n| p.insert(key(n), "v").unwrap());
        p.flush().unwrap();
        (0..500).step_by(3).for_each(|n| p.remove(key(n)).unwrap());
        p.major_compact().unwrap();
        assert!(p.get(key(1)).unwrap().is_some() && p.get(key(1_000)).unwrap().is_none());
        assert_eq!(p.range(key(2)..).count() + p.range(..key(2)).count(), 333);
    }
}

/// Comparisons of reads that end within bounds without a visible key.
fn comparisons_of_empty_reads(p: &Partition, order: &TestComparator) -> u64 {
    let key = |n: u32| n.to_be_bytes();
    let before = order.comparisons();
    for range in [key(0)..key(20), key(1_500)..key(1_502), key(4_000)..key(5_000)] {
        assert!(p.range(range.clone()).next().is_none());
        assert!(p.range(range.clone()).next_back().is_none());
        assert!(p.range(range).next_ref().is_none());
    }
    order.comparisons() - before
}

/// A read of a bounded range passed all removed keys outside of its bounds, in both directions. A queue with priorities
/// in one partition read its first job slower with every finished job.
#[test]
fn a_range_passes_no_removed_keys_beyond_its_end() {
    let pool = EngineType::Pmem(PmemOptions::default());
    for options in [PartitionCreateOptions::default(), PartitionCreateOptions::default().engine(pool)] {
        let (db, order) = (open(&MemFs::new(), "/db", 1), Arc::new(TestComparator::new(TestOrder::Bytes)));
        let p = db.open_partition_with_comparator("p", options, order.clone()).unwrap();
        let keys = || (1_000..3_000u32).map(u32::to_be_bytes);
        keys().for_each(|key| p.insert(key, "v").unwrap());
        let snapshot = db.snapshot();
        keys().for_each(|key| p.remove(key).unwrap());
        let check = |place: &str| {
            let cost = comparisons_of_empty_reads(&p, &order);
            assert!(cost < 1_500, "{place}: {cost} comparisons for 9 reads of nothing among 2,000 removed keys");
        };
        check("in memory");
        p.flush().unwrap();
        check("on level 0");
        p.major_compact().unwrap();
        check("at the bottom");
        assert_eq!(snapshot.range(&p, 1_500u32.to_be_bytes()..1_600u32.to_be_bytes()).count(), 100);
        drop(snapshot);
        check("without the snapshot");
    }
}

/// Values were overwritten under a snapshot and compacted. After the snapshot was dropped, they stayed in their table,
/// because it had no tombstones and was on the bottom level. Now a compaction rewrites such a table once, also after
/// reopening. Background compaction does if it can drop much of the table.
#[test]
fn superseded_values_go_after_their_snapshot() {
    let separation = KvSeparationOptions::default().separation_threshold(500).automatic_gc(None);
    let options = PartitionCreateOptions::default().compression(CompressionType::None);
    for options in [options.clone(), options.with_kv_separation(separation)] {
        for way in ["compaction", "background", "reopen"] {
            let machine = MemFs::new();
            let mut db = open(&machine, "/db", 1);
            let mut p = db.open_partition("p", options.clone()).unwrap();
            (0..200u32).for_each(|n| p.insert(n.to_be_bytes(), [7; 1_000]).unwrap());
            let snapshot = db.snapshot();
            (0..200u32).for_each(|n| p.insert(n.to_be_bytes(), "tiny").unwrap());
            p.major_compact().unwrap();
            assert_eq!(snapshot.get(&p, 5u32.to_be_bytes()).unwrap().unwrap(), [7; 1_000]);
            let rewrites = db.metrics().compactions;
            p.major_compact().unwrap();
            while db.step().unwrap() {}
            assert_eq!(db.metrics().compactions, rewrites, "the snapshot needs all versions");
            drop(snapshot);
            match way {
                "background" => while db.step().unwrap() {},
                "reopen" => {
                    drop(p);
                    db.close().unwrap();
                    db = open(&machine, "/db", 2);
                    p = open_partition(&db, "p");
                    p.major_compact().unwrap();
                }
                _ => p.major_compact().unwrap(),
            }
            assert!(p.metrics().disk_bytes < 20_000, "{way}: {} bytes", p.metrics().disk_bytes);
            let rewrites = db.metrics().compactions;
            p.major_compact().unwrap();
            while db.step().unwrap() {}
            assert_eq!(db.metrics().compactions, rewrites, "{way}: a compaction that drops nothing");
        }
    }
}

/// Writes and flushes after each compaction.
#[derive(Default)]
struct WriteOnCompactionListener {
    part: OnceLock<Partition>,
    compactions: AtomicUsize,
}

impl Listener for WriteOnCompactionListener {
    fn on_event(&self, event: &Event) {
        let (Event::Compacted { .. }, Some(p)) = (event, self.part.get()) else { return };
        let turn = self.compactions.fetch_add(1, Relaxed);
        if turn < 1_000 {
            (0..50u32).for_each(|n| p.insert((n * 97).to_be_bytes(), turn.to_string()).unwrap());
            p.remove(7u32.to_be_bytes()).unwrap();
            p.flush().unwrap();
        }
    }
}

/// `major_compact` continued until it found no table above the bottom level. It did not return while another thread
/// wrote. In this test, new records arrive after each of its compactions.
#[test]
fn a_major_compaction_ends_while_others_write() {
    let busy = Arc::new(WriteOnCompactionListener::default());
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    let db = Config::new(Path::new("/db")).fs(fs).env(Arc::new(TestEnv::new(1))).workers(0);
    let db = db.listener(Arc::clone(&busy) as Arc<dyn Listener>).open().unwrap();
    let p = open_partition(&db, "p");
    (0..5_000u32).for_each(|n| p.insert(n.to_be_bytes(), [7; 100]).unwrap());
    p.flush().unwrap();
    (0..5_000u32).step_by(3).for_each(|n| p.remove(n.to_be_bytes()).unwrap());
    busy.part.set(p.clone()).unwrap();
    p.major_compact().unwrap();
    let turns = busy.compactions.load(Relaxed);
    assert!((1..100).contains(&turns), "{turns} merges");
}

/// A version edit stores the options of a partition. If the edit failed, the new options were in effect all the same,
/// and a second call with the same options did not store them. A reopened database had the old options.
#[test]
fn options_stay_when_they_cannot_be_stored() {
    let faults = FaultFs::new(Arc::new(MemFs::new()));
    let on = || Config::new("/db").fs(Arc::new(faults.clone())).env(Arc::new(TestEnv::new(1))).workers(0);
    let db = on().open().unwrap();
    let p = open_partition(&db, "p");
    let write = |p: &Partition| (0..20u8).for_each(|n| p.insert([n], [n; 1_000]).unwrap());
    let small = || PartitionCreateOptions::default().max_memtable_size(4 << 10);
    let full = Fault::Error(io::ErrorKind::StorageFull);
    faults.inject(FaultPlan::new(OpKind::Write, 1, full).in_path("MANIFEST").forever());
    assert_eq!(p.set_options(small()).unwrap_err().kind(), ErrorKind::OutOfSpace);
    faults.clear_faults();
    write(&p);
    assert_eq!(p.metrics().sealed_memtables, 0, "the options of a failed call are in effect");
    p.set_options(small()).unwrap();
    write(&p);
    assert!(p.metrics().sealed_memtables > 0);
    drop(p);
    db.close().unwrap();
    let p = on().open().unwrap().partition("p").unwrap();
    write(&p);
    assert!(p.metrics().sealed_memtables > 0, "the options were not stored");
}

/// A lower `max_size` takes effect before the checkpoint that must precede it. If that checkpoint failed, the lower
/// limit stayed in effect.
#[test]
fn a_pool_keeps_its_size_when_lowering_fails() {
    let faults = FaultFs::new(Arc::new(MemFs::new()));
    let config = Config::new("/db").fs(Arc::new(faults.clone())).env(Arc::new(TestEnv::new(1)));
    let db = config.workers(0).open().unwrap();
    let sized = |max| {
        let options = PmemOptions::default().max_size(max).growth_step(64 << 10);
        PartitionCreateOptions::default().engine(EngineType::Pmem(options))
    };
    let p = db.open_partition("p", sized(4 << 20)).unwrap();
    let write = |from: u8| (from..from + 100).try_for_each(|n| p.insert([n], [n; 5_000]));
    write(0).unwrap();
    faults.inject(FaultPlan::new(OpKind::Write, 1, Fault::Error(io::ErrorKind::StorageFull)).forever());
    assert_eq!(p.set_options(sized(128 << 10)).unwrap_err().kind(), ErrorKind::OutOfSpace);
    faults.clear_faults();
    write(100).expect("the limit of a failed call is in effect");
    p.set_options(sized(128 << 10)).unwrap();
    assert_eq!(write(0).unwrap_err().kind(), ErrorKind::OutOfSpace, "the limit has no effect");
}

/// A database whose manifest was rewritten while the directory could not be opened, so that the name of the manifest is
/// not durable. Its partition `p` has 12 tables and 12 blob files before `prepare`, and the WAL is durable.
fn open_after_failed_rewrite(prepare: impl FnOnce(&Partition)) -> (MemFs, FaultFs, Database, Partition) {
    let machine = MemFs::new();
    let faults = FaultFs::new(Arc::new(machine.clone()));
    let config = Config::new("/db").fs(Arc::new(faults.clone())).env(Arc::new(TestEnv::new(1)));
    let db = config.workers(0).durability(PersistMode::SyncData).open().unwrap();
    let leveled = LeveledOptions::default().l0_compaction_trigger(1_000);
    let separation = KvSeparationOptions::default().separation_threshold(100).automatic_gc(None);
    let options = PartitionCreateOptions::default().compaction_strategy(CompactionStrategy::Leveled(leveled));
    let p = db.open_partition("p", options.with_kv_separation(separation)).unwrap();
    // The manifest has the first and the last key of each table.
    for n in 0..12u8 {
        p.insert(vec![n; 65_000], [n; 200]).unwrap();
        p.flush().unwrap();
    }
    prepare(&p);
    fail_next_sync_of_directory(&faults, 1);
    let stepped = (0..10).map(|_| db.step()).find(Result::is_err);
    assert_eq!(stepped.expect("the manifest is not rewritten").unwrap_err().kind(), ErrorKind::Io);
    (machine, faults, db, p)
}

fn fail_next_sync_of_directory(faults: &FaultFs, nth: u64) {
    faults.inject(FaultPlan::new(OpKind::SyncDir, nth, Fault::TooManyOpenFiles));
}

type PartitionCall = fn(&Partition) -> Result<()>;

/// The name of a rewritten manifest was not durable. A flush, a compaction or blob GC could not make it durable,
/// because no directory could be opened. The edits of the task were applied before that error. So each retry of the
/// task failed: it added a table twice, or removed a table that the manifest did not have.
#[test]
fn tasks_succeed_after_a_manifest_had_no_name() {
    let tasks: [(&str, PartitionCall); 3] = [
        ("flush", |p| p.flush()),
        ("compaction", |p| p.major_compact()),
        ("blob GC", |p| p.gc_with_space_amp_target(1.0).map(drop)),
    ];
    for (task, run) in tasks {
        for nth in 1..=3 {
            let (machine, faults, db, p) = open_after_failed_rewrite(|p| {
                p.insert("key", "value").unwrap();
                if task != "flush" {
                    (0..4u8).for_each(|n| p.insert(vec![n; 65_000], "small").unwrap());
                    p.flush().unwrap();
                }
                if task == "blob GC" {
                    p.major_compact().unwrap();
                }
            });
            fail_next_sync_of_directory(&faults, nth);
            let first = run(&p);
            faults.clear_faults();
            assert!(first.is_ok() || first.is_err_and(|error| error.kind() == ErrorKind::Io), "{task} {nth}");
            run(&p).unwrap_or_else(|error| panic!("{task} {nth}: {error}"));
            assert!(!db.metrics().poisoned);
            assert_eq!(p.get("key").unwrap().unwrap(), "value");
            drop(p);
            db.close().unwrap();
            let db = open(&machine, "/db", 2);
            assert_eq!(db.partition("p").unwrap().len().unwrap(), 13, "{task} {nth}");
        }
    }
}

/// The name of a rewritten manifest could not be synced, because no directory could be opened. The next creation of a
/// partition failed after its edit: the manifest had the partition, and the database did not.
#[test]
fn failed_creation_leaves_no_partition() {
    let (machine, faults, db, _p) = open_after_failed_rewrite(|_| {});
    fail_next_sync_of_directory(&faults, 1);
    assert_eq!(db.open_partition("new", Default::default()).unwrap_err().kind(), ErrorKind::Io);
    faults.clear_faults();
    assert!(!db.partition_exists("new") && !db.metrics().poisoned);
    let after = open(&machine.fork(), "/db", 2);
    assert_eq!(after.list_partitions(), ["p"], "the manifest has a partition that could not be created");
    // The name can be used again.
    open_partition(&db, "new").insert("k", "v").unwrap();
    db.delete_partition_by_name("new").unwrap();
    db.close().unwrap();
    assert_eq!(open(&machine, "/db", 3).list_partitions(), ["p"]);
}

/// The L0 tables of a deleted partition slowed writers until the next flush or compaction.
#[test]
fn a_deleted_partition_slows_no_writer() {
    let db = open(&MemFs::new(), "/db", 1);
    let (deleted_partition, live) = (open_partition(&db, "gone"), open_partition(&db, "live"));
    for n in 0..40u8 {
        deleted_partition.insert([n], "v").unwrap();
        deleted_partition.flush().unwrap();
    }
    let stall_of = |key: &str| {
        let before = db.metrics().stall_time;
        live.insert(key, vec![1; 100_000]).unwrap();
        db.metrics().stall_time - before
    };
    assert!(!stall_of("before").is_zero(), "L0 tables do not delay writers");
    db.delete_partition(deleted_partition).unwrap();
    assert!(stall_of("after").is_zero());
}

//! Repaired defects, each shown by the shortest program.
//!
//! Modules: `golden` (databases written by older versions), and by part of the engine `wal_damage`, `pool_files`,
//! `pool_space`, `tables`, `background`, `comparators`, `commits`, `paths`, `disk_full`.

mod background;
mod commits;
mod comparators;
mod disk_full;
mod golden;
mod paths;
mod pool_files;
mod pool_space;
mod tables;
mod wal_damage;

use std::path::Path;
use std::sync::Arc;

use azekura::fs::Fs;
use azekura::testing::{MemFs, Survival, TestComparator, TestEnv, TestOrder};
use azekura::{Config, Database, KvSeparationOptions, Partition, PartitionCreateOptions, PersistMode};

use crate::testkit::watchdog::wait_until;

/// A database without worker threads, on a machine that can lose power.
fn open(machine: &MemFs, dir: &str, salt: u64) -> Database {
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    Config::new(Path::new(dir)).fs(fs).env(Arc::new(TestEnv::new(salt))).workers(0).open().unwrap()
}

fn open_partition(db: &Database, name: &str) -> Partition {
    db.open_partition(name, Default::default()).unwrap()
}

/// The machine after a power failure that loses all unsynced data.
fn after_power_loss(machine: &MemFs) -> MemFs {
    let after = machine.fork();
    after.crash(Survival::Nothing, 0);
    after
}

/// The monotonic clock of an `Env` of a program may be wrong and go back: in builds with overflow checks the open
/// panicked, and a write that had waited for memory did. In other builds the metrics were absurd.
#[test]
fn env_clock_that_goes_back_is_harmless() {
    let (machine, env) = (MemFs::new(), TestEnv::new(1));
    env.run_backwards();
    let ttl = std::time::Duration::from_secs(1);
    for workers in [0, 2] {
        let config = Config::new("/db").fs(Arc::new(machine.clone())).env(Arc::new(env.clone())).workers(workers);
        let db = config.memory_budget(1 << 20).sync_interval(Some(ttl / 1000)).open().unwrap();
        let p = db.open_partition("p", PartitionCreateOptions::default().max_memtable_size(64 << 10)).unwrap();
        for n in 0..1_000u32 {
            p.insert(n.to_be_bytes(), [7; 4_000]).unwrap();
            if workers == 0 {
                while db.step().unwrap() {}
            }
        }
        p.insert_with_ttl("k", "v", ttl).unwrap();
        p.major_compact().unwrap();
        db.persist(PersistMode::SyncAll).unwrap();
        let metrics = db.metrics();
        // The sleeps of other threads advance the clock; a difference below zero would be 584 years.
        let absurd = std::time::Duration::from_secs(1 << 30);
        assert!(metrics.stall_time.max(metrics.recovery_time) < absurd, "{metrics}");
        assert_eq!(p.len().unwrap(), 1_001);
        db.close().unwrap();
        let reader = Config::new("/db").fs(Arc::new(machine.clone())).env(Arc::new(env.clone())).open_read_only();
        assert_eq!(reader.unwrap().metrics().recovery_time.as_nanos(), 0);
    }
}

#[test]
fn empty_partition_does_not_pin_wal_segments() {
    let machine = MemFs::new();
    for life in 0..4 {
        let db = open(&machine, "/db", life);
        assert_eq!(db.metrics().replayed_records, 0, "in life {life}");
        open_partition(&db, "empty");
        let full = open_partition(&db, "full");
        assert_eq!(full.len().unwrap(), life);
        full.insert(life.to_string(), "v").unwrap();
        db.close().unwrap();
    }
}

#[test]
fn created_parent_directories_are_durable() {
    let machine = MemFs::new();
    let db = open(&machine, "/new/too/db", 1);
    let p = open_partition(&db, "p");
    p.insert("k", "v").unwrap();
    db.persist(PersistMode::SyncAll).unwrap();
    let db = open(&after_power_loss(&machine), "/new/too/db", 2);
    assert_eq!(open_partition(&db, "p").get("k").unwrap().as_deref(), Some(&b"v"[..]));
}

#[test]
fn database_at_relative_path_is_durable() {
    let machine = MemFs::new();
    let db = open(&machine, "db", 1);
    let p = open_partition(&db, "p");
    p.insert("k", "v").unwrap();
    db.persist(PersistMode::SyncAll).unwrap();
    let db = open(&after_power_loss(&machine), "db", 2);
    assert_eq!(open_partition(&db, "p").get("k").unwrap().as_deref(), Some(&b"v"[..]));
}

#[test]
fn partition_deletion_follows_earlier_commits() {
    let machine = MemFs::new();
    let db = open(&machine, "/db", 1);
    let (old, new) = (open_partition(&db, "old"), open_partition(&db, "new"));
    old.insert("k", "v").unwrap();
    db.persist(PersistMode::SyncData).unwrap();
    let mut moving = db.batch();
    moving.remove(&old, "k");
    moving.insert(&new, "k", "v");
    moving.commit().unwrap();
    db.delete_partition(old).unwrap();
    let db = open(&after_power_loss(&machine), "/db", 2);
    assert!(!db.partition_exists("old"), "a deletion is durable when it returns");
    let moved = open_partition(&db, "new").get("k").unwrap();
    assert_eq!(moved.as_deref(), Some(&b"v"[..]), "the deletion survived, the commit before it is lost");
}

/// A machine that stopped after this number of operations of opening the database.
fn machine_stopped_after(machine: &MemFs, ops: u64, salt: u64) -> MemFs {
    let stopped = machine.fork();
    stopped.freeze_after(Some(ops));
    let fs: Arc<dyn Fs> = Arc::new(stopped.clone());
    drop(Config::new("/db").fs(fs).env(Arc::new(TestEnv::new(salt))).workers(0).open());
    stopped
}

#[test]
fn a_half_made_segment_is_not_used_as_it_is() {
    let header_lost = |machine: &MemFs| {
        let file = machine.open(Path::new("/db/000001.wal"), azekura::fs::OpenMode::Read);
        file.is_ok_and(|file| {
            file.read_exact_at(&mut [0; 8], 0).is_err() || crate::testkit::test_dir::file_bytes(&*file)[0] == 0
        })
    };
    let machines =
        (0..60).map(|ops| machine_stopped_after(&MemFs::new(), ops, 1)).inspect(|m| m.crash(Survival::MetadataOnly, 0));
    let half = machines.into_iter().find(header_lost).expect("a segment is made at the first open");
    for ops in 0..60 {
        let again = machine_stopped_after(&half, ops, 2);
        for seed in 0..20 {
            let after = again.fork();
            after.crash(Survival::Random, seed);
            let fs: Arc<dyn Fs> = Arc::new(after);
            let opened = Config::new("/db").fs(fs).env(Arc::new(TestEnv::new(3))).workers(0).open();
            assert!(opened.is_ok(), "second stop after {ops} operations, seed {seed}: {:?}", opened.err());
        }
    }
}

#[test]
fn iter_continues_when_partition_is_deleted() {
    let machine = MemFs::new();
    let db = open(&machine, "/db", 1);
    let p = open_partition(&db, "p");
    (0..9).for_each(|n| p.insert(n.to_string(), "v").unwrap());
    p.flush().unwrap();
    (9..20).for_each(|n| p.insert(n.to_string(), "v").unwrap());
    let (fresh, mut begun) = (p.iter(), p.iter());
    begun.next().unwrap().unwrap();
    db.delete_partition(p).unwrap();
    while db.step().unwrap() {}
    assert_eq!(fresh.map(Result::unwrap).collect::<Vec<_>>().len(), 20, "an iterator that had not moved yet");
    assert_eq!(begun.rev().map(Result::unwrap).collect::<Vec<_>>().len(), 19, "an iterator that had moved at one end");
}

#[test]
fn truncated_manifest_keeps_synced_commits() {
    let machine = MemFs::new();
    let db = open(&machine, "/db", 1);
    open_partition(&db, "p").insert("k", "v").unwrap();
    db.persist(PersistMode::SyncAll).unwrap();
    let cut = machine.fork();
    let fs: Arc<dyn Fs> = Arc::new(cut);
    let manifest = fs.open(Path::new("/db/MANIFEST"), azekura::fs::OpenMode::Write).unwrap();
    for len in (1..manifest.length().unwrap()).rev() {
        manifest.set_length(len).unwrap();
        match Config::new("/db").fs(Arc::clone(&fs)).env(Arc::new(TestEnv::new(2))).workers(0).open_read_only() {
            Err(error) => assert_eq!(error.kind(), azekura::ErrorKind::Corruption, "{error}"),
            Ok(db) => {
                assert!(db.partition_exists("p"), "cut to {len}: the partition is missing without an error");
                assert!(open_partition(&db, "p").contains_key("k").unwrap(), "cut to {len}");
            }
        }
    }
}

#[test]
fn weak_remove_does_not_expose_deleted_value() {
    let machine = MemFs::new();
    let db = open(&machine, "/db", 1);
    let p = open_partition(&db, "p");
    p.insert("k", "first").unwrap();
    p.major_compact().unwrap();
    p.remove("k").unwrap();
    // Inserted exactly once since it was last removed.
    p.insert("k", "second").unwrap();
    p.flush().unwrap();
    p.remove_weak("k").unwrap();
    p.flush().unwrap();
    assert_eq!(p.get("k").unwrap(), None);
    p.major_compact().unwrap();
    assert_eq!(p.get("k").unwrap(), None, "the first value is visible again");
}

#[test]
fn unrecorded_retired_segment_stays_linked() {
    use azekura::testing::{Fault, FaultFs, FaultPlan, OpKind};
    for nth in 1..8 {
        let machine = MemFs::new();
        let faulty = FaultFs::new(Arc::new(machine.clone()));
        let config = |fs: Arc<dyn Fs>| Config::new("/db").fs(fs).workers(0).wal_segment_size(64 << 10);
        let db = config(Arc::new(faulty.clone())).open().unwrap();
        let p = open_partition(&db, "p");
        let fill = |round: u8| (0..9).for_each(|n: u8| p.insert([round, n], [round; 10_000]).unwrap());
        fill(0);
        db.persist(PersistMode::SyncData).unwrap();
        let full = Fault::Error(std::io::ErrorKind::StorageFull);
        faulty.inject(FaultPlan::new(OpKind::Write, nth, full).in_path("MANIFEST"));
        drop(p.flush());
        faulty.clear_faults();
        for round in 1..5 {
            fill(round);
            db.persist(PersistMode::SyncData).unwrap();
            p.flush().unwrap();
        }
        p.insert("last", "v").unwrap();
        db.persist(PersistMode::SyncData).unwrap();
        let killed = machine.fork();
        drop((p, db));
        let db = config(Arc::new(killed)).open().unwrap_or_else(|e| panic!("write {nth}: {e}"));
        assert_eq!(open_partition(&db, "p").len().unwrap(), 46, "write {nth}");
    }
}

#[test]
fn obsolete_tables_are_removed_soon() {
    let machine = MemFs::new();
    let db = open(&machine, "/db", 1);
    let p = open_partition(&db, "p");
    for round in 0..6u8 {
        (0..20u8).for_each(|n| p.insert([n], [round; 100]).unwrap());
        p.flush().unwrap();
        if round % 3 == 2 {
            p.major_compact().unwrap();
        }
        run_until_no_obsolete_tables(&machine, &db, std::slice::from_ref(&p));
    }
}

/// The names of the tables in the directory.
fn table_files(machine: &MemFs, dir: &Path) -> Vec<String> {
    let names = machine.read_dir(dir).unwrap().into_iter().map(|entry| entry.name);
    names.filter(|name| name.ends_with(".sst")).collect()
}

/// Works until all tables in the directory belong to a partition: a concurrent reader may delay the removal of one.
pub(crate) fn run_until_no_obsolete_tables(machine: &MemFs, db: &Database, partitions: &[Partition]) {
    wait_until("all tables in the directory belong to a partition", || {
        while db.step().unwrap() {}
        let named: usize = partitions.iter().flat_map(|p| p.metrics().levels).map(|level| level.tables).sum();
        partitions.iter().for_each(|p| drop(p.get("k").unwrap()));
        table_files(machine, db.path()).len() == named
    });
}

/// A partition of several tables with the same keys, and no pending work.
fn open_with_overlapping_tables(db: &Database, rounds: u8) -> Partition {
    let p = open_partition(db, "p");
    for round in 0..rounds {
        (0..20u8).for_each(|n| p.insert([n], [round; 100]).unwrap());
        p.flush().unwrap();
    }
    p
}

#[test]
fn a_reader_of_another_database_removes_no_files() {
    let (machine, other) = (MemFs::new(), MemFs::new());
    let (db, away) = (open(&machine, "/db", 1), open(&other, "/away", 2));
    let p = open_with_overlapping_tables(&db, 3);
    let busy = Arc::new(TestComparator::minimal(TestOrder::Bytes));
    let read = away.open_partition_with_comparator("read", Default::default(), busy.clone()).unwrap();
    read.insert("a", "v").unwrap();
    let (compacted, after) = (p.clone(), machine.clone());
    busy.call_once(move || {
        compacted.major_compact().unwrap();
        assert_eq!(table_files(&after, Path::new("/db")).len(), 4, "the reader delays the removal");
    });
    assert_eq!(read.get("a").unwrap().as_deref(), Some(&b"v"[..]));
    assert!(!busy.cancel_call(), "the read called the comparator");
    assert_eq!(table_files(&machine, Path::new("/db")).len(), 4, "a reader of another database removed files");
    run_until_no_obsolete_tables(&machine, &db, std::slice::from_ref(&p));
    assert_eq!(table_files(&machine, Path::new("/db")).len(), 1);
}

/// While another database of the process was reading, closing did not remove a blob file that belonged to no partition.
#[test]
fn file_pinned_at_close_is_removed_by_next_open() {
    let (machine, other) = (MemFs::new(), MemFs::new());
    let (db, away) = (open(&machine, "/db", 1), open(&other, "/away", 2));
    let separation = KvSeparationOptions::default().separation_threshold(50);
    let p = db.open_partition("p", PartitionCreateOptions::default().with_kv_separation(separation)).unwrap();
    for round in 0..3u8 {
        p.insert("k", [round; 100]).unwrap();
        p.flush().unwrap();
    }
    let files = {
        let machine = machine.clone();
        move || {
            let names = machine.read_dir(Path::new("/db")).unwrap().into_iter().map(|entry| entry.name);
            let blobs = names.filter(|name| name.ends_with(".blob")).count();
            (table_files(&machine, Path::new("/db")).len(), blobs)
        }
    };
    assert_eq!(files(), (3, 3));
    let busy = Arc::new(TestComparator::minimal(TestOrder::Bytes));
    let read = away.open_partition_with_comparator("read", Default::default(), busy.clone()).unwrap();
    read.insert("a", "v").unwrap();
    let closed = files.clone();
    busy.call_once(move || {
        p.major_compact().unwrap();
        drop(p);
        db.close().unwrap();
        assert_eq!(closed(), (4, 3), "the reader delays the removal");
    });
    assert_eq!(read.get("a").unwrap().as_deref(), Some(&b"v"[..]));
    assert!(!busy.cancel_call(), "the read called the comparator");
    assert_eq!(files(), (4, 3), "files were removed after the lock was released");
    let db = open(&machine, "/db", 3);
    assert_eq!(files(), (1, 1), "opening removes files without an owner");
    assert_eq!(open_partition(&db, "p").get("k").unwrap().as_deref(), Some(&[2; 100][..]));
    db.close().unwrap();
    assert_eq!(files(), (1, 1));
}

#[test]
fn iter_dropped_after_close_removes_no_files() {
    for deleted in [false, true] {
        let machine = MemFs::new();
        let db = open(&machine, "/db", 1);
        let p = open_with_overlapping_tables(&db, 3);
        let mut iter = p.iter();
        iter.next().unwrap().unwrap();
        match deleted {
            true => db.delete_partition(p).unwrap(),
            false => {
                p.major_compact().unwrap();
                drop(p);
            }
        }
        while db.step().unwrap() {}
        db.close().unwrap();
        let files_at_close = table_files(&machine, Path::new("/db"));
        assert_eq!(
            files_at_close.len(),
            if deleted { 3 } else { 4 },
            "the iterator needs the tables: {files_at_close:?}"
        );
        drop(iter);
        assert_eq!(
            table_files(&machine, Path::new("/db")),
            files_at_close,
            "files were removed after the lock was released"
        );
        let db = open(&machine, "/db", 2);
        assert_eq!(table_files(&machine, Path::new("/db")).len(), usize::from(!deleted), "the next open finds them");
        assert_eq!(open_partition(&db, "p").len().unwrap(), if deleted { 0 } else { 20 });
    }
}

#[test]
fn last_handle_removes_its_obsolete_tables() {
    let tables_after_close = || {
        let machine = MemFs::new();
        let db = open(&machine, "/db", 1);
        let p = open_with_overlapping_tables(&db, 3);
        let mut iter = p.iter();
        iter.next().unwrap().unwrap();
        p.major_compact().unwrap();
        while db.step().unwrap() {}
        drop((db, p));
        assert_eq!(table_files(&machine, Path::new("/db")).len(), 4);
        drop(iter); // this closes the database
        table_files(&machine, Path::new("/db")).len()
    };
    // A reader of another test may use the files a moment longer; then the next open removes them.
    wait_until("closing removes the replaced tables", || tables_after_close() == 1);
}

#[test]
fn idle_worker_removes_table_released_by_reader() {
    let machine = MemFs::new();
    let fs: Arc<dyn Fs> = Arc::new(machine.clone());
    let db = Config::new("/db").fs(fs).workers(2).open().unwrap();
    let p = open_with_overlapping_tables(&db, 3);
    let mut iter = p.iter();
    iter.next().unwrap().unwrap();
    p.major_compact().unwrap();
    drop(iter);
    wait_until("the worker removes the replaced tables", || {
        drop(p.get([1]).unwrap());
        table_files(&machine, Path::new("/db")).len() == 1
    });
}

/// Tables kept the options of the time when the database was opened: a program that changed to cached index and
/// filter partitions still had them pinned until it was restarted.
#[test]
fn open_options_decide_index_and_filter_pinning() {
    let machine = MemFs::new();
    let options = |cached| {
        PartitionCreateOptions::default().partition_index_and_filters(false).cache_index_and_filter_blocks(cached)
    };
    let mut pinned_bytes = Vec::new();
    for (life, cached) in [false, true, true, false].into_iter().enumerate() {
        let db = open(&machine, "/db", life as u64);
        let p = db.open_partition("p", Default::default()).unwrap();
        p.set_options(options(cached)).unwrap();
        if life == 0 {
            (0..20_000).for_each(|i| p.insert(format!("key {i:05}"), "value").unwrap());
            p.flush().unwrap();
        }
        assert_eq!(p.get("key 00777").unwrap().as_deref(), Some(&b"value"[..]));
        pinned_bytes.push(p.metrics().pinned_bytes);
        db.close().unwrap();
    }
    assert!(
        pinned_bytes[0] > pinned_bytes[1] + 20_000
            && pinned_bytes[1] == pinned_bytes[2]
            && pinned_bytes[3] == pinned_bytes[0],
        "{pinned_bytes:?}"
    );
}

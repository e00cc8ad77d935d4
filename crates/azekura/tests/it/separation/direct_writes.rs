//! Direct blob writes: large values are written to a blob file before their commit.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use azekura::fs::{Fs, OpenMode};
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, Survival, TestComparator, TestEnv, TestOrder};
use azekura::{
    CompressionType, Config, Database, EngineType, ErrorKind, KvSeparationOptions, MergeOperator, Partition,
    PartitionComponents, PartitionCreateOptions, PersistMode, PmemOptions, RecoveryMode, TransactionOptions, inspect,
};

use super::{DIR, blob_files, config, value};
use crate::testkit::test_dir::dir_contents;
use crate::testkit::watchdog::wait_until;

const EIO: Fault = Fault::Error(io::ErrorKind::Other);
const ENOSPC: Fault = Fault::Error(io::ErrorKind::StorageFull);

/// Values of 500 bytes and more are large.
fn direct_write_options(target_size: u64) -> PartitionCreateOptions {
    let separation = KvSeparationOptions::default().separation_threshold(100).blob_file_target_size(target_size);
    let separation = separation.compression(CompressionType::None).automatic_gc(None);
    PartitionCreateOptions::default().with_kv_separation(separation.direct_write_threshold(500))
}

fn open(fs: &Arc<dyn Fs>) -> (Database, Partition) {
    let db = config(Arc::clone(fs)).open().unwrap();
    let part = db.open_partition("p", Default::default()).unwrap();
    part.set_options(direct_write_options(16 << 10)).unwrap(); // the threshold of direct writes is not stored
    (db, part)
}

fn new_machine() -> (MemFs, Arc<dyn Fs>) {
    let machine = MemFs::new();
    (machine.clone(), Arc::new(machine))
}

fn new_faulty_machine() -> (FaultFs, Arc<dyn Fs>) {
    let faults = FaultFs::new(Arc::new(MemFs::new()));
    (faults.clone(), Arc::new(faults))
}

fn key(n: u32) -> String {
    format!("key {n:03}")
}

fn insert_round(part: &Partition, n: u32, round: u32) {
    part.insert(key(n), value(n, round, 1000)).unwrap();
}

fn insert_round_synced(db: &Database, part: &Partition, n: u32, round: u32) -> azekura::Result<()> {
    let mut batch = db.batch();
    batch.durability(PersistMode::SyncData);
    batch.insert(part, key(n), value(n, round, 1000));
    batch.commit()
}

/// Checks that the first `count` keys have their values of `round`, and that there are no other keys.
fn check_keys(part: &Partition, count: u32, round: u32) {
    assert_eq!(part.len().unwrap(), u64::from(count));
    for (n, pair) in (0..).zip(part.iter()) {
        let (found, shown) = pair.unwrap();
        assert_eq!((found, shown), (key(n).into(), value(n, round, 1000).into()));
        assert_eq!(part.get(key(n)).unwrap().unwrap(), value(n, round, 1000));
        assert_eq!(part.size_of(key(n)).unwrap(), Some(1000));
    }
}

/// The machine as a killed process leaves it.
fn after_kill(machine: &MemFs) -> (MemFs, Arc<dyn Fs>) {
    after_crash(machine, Survival::Everything, 0)
}

fn after_crash(machine: &MemFs, survival: Survival, seed: u64) -> (MemFs, Arc<dyn Fs>) {
    let copy = machine.fork();
    copy.crash(survival, seed);
    (copy.clone(), Arc::new(copy))
}

/// No file is damaged, and every blob file has an owner.
fn assert_clean(fs: &Arc<dyn Fs>) {
    assert_eq!(orphaned_blob_files(fs), 0);
}

/// Runs background work until every blob file has an owner. A thread of another test may be pinned in an epoch, which
/// keeps removed files a little longer.
fn step_until_clean(db: &Database, fs: &Arc<dyn Fs>) {
    wait_until("every blob file has an owner", || {
        db.step().unwrap();
        orphaned_blob_files(fs) == 0
    });
}

/// No file is damaged; this number of blob files has no owner.
fn orphaned_blob_files(fs: &Arc<dyn Fs>) -> usize {
    let report = inspect::verify(fs, Path::new(DIR), &mut |_, _| {}).unwrap();
    assert!(report.is_clean(), "{report:#?}");
    let is_blob = |path: &Path| path.extension().is_some_and(|extension| extension == "blob");
    report.files.iter().filter(|file| file.kind == "left over" && is_blob(&file.path)).count()
}

#[test]
fn direct_write_stores_pointer_in_wal_and_memory() {
    let (_, fs) = new_machine();
    let (db, part) = open(&fs);
    let before = db.metrics();
    (0..50).for_each(|n| insert_round(&part, n, 0));
    let metrics = db.metrics();
    assert!((50_000..51_000).contains(&metrics.direct_blob_bytes), "{}", metrics.direct_blob_bytes);
    assert!(metrics.wal_bytes - before.wal_bytes < 50 * 100, "{}", metrics.wal_bytes);
    assert!(metrics.user_bytes >= 50_000 && metrics.write_amplification() < 1.1);
    let files = part.metrics().blob_files;
    assert_eq!(files.iter().map(|file| file.values).sum::<u64>(), 50, "four files, of which one takes values");
    assert!(part.disk_space() > 50_000);
    check_keys(&part, 50, 0);
    assert_clean(&fs);
    let snapshot = db.snapshot();
    (0..50).for_each(|n| insert_round(&part, n, 1));
    check_keys(&part, 50, 1);
    part.flush().unwrap();
    check_keys(&part, 50, 1);
    assert!(db.metrics().flushed_bytes < 10_000, "a flush rewrites no direct value");
    assert!((0..50).all(|n| snapshot.get(&part, key(n)).unwrap().unwrap() == value(n, 0, 1000)));
    drop(snapshot);
    part.major_compact().unwrap();
    check_keys(&part, 50, 1);
    step_until_clean(&db, &fs);
    drop(part);
    db.close().unwrap();
    let (db, part) = open(&fs);
    assert_eq!(db.metrics().replayed_records, 0);
    check_keys(&part, 50, 1);
}

#[test]
fn direct_blob_file_is_adopted_after_kill() {
    let (machine, fs) = new_machine();
    let (db, part) = open(&fs);
    for n in 0..60 {
        insert_round(&part, n, 0);
        if n % 20 == 7 {
            part.flush().unwrap();
        }
        // Twice in a row: the second open reads the files that the first one wrote.
        let (copy, fs) = after_kill(&machine);
        assert_clean(&fs);
        for life in 0..2 {
            let reading = config(Arc::clone(&fs)).open_read_only().unwrap();
            let before = dir_contents(&*fs, Path::new(DIR));
            check_keys(&reading.partition("p").unwrap(), n + 1, 0);
            drop(reading);
            assert_eq!(dir_contents(&*fs, Path::new(DIR)), before, "reading changes nothing");
            let (db, part) = open(&fs);
            check_keys(&part, n + 1, 0);
            assert_clean(&fs);
            if life == 1 {
                insert_round(&part, n + 1, 0);
                part.major_compact().unwrap();
                check_keys(&part, n + 2, 0);
                drop(part);
                db.close().unwrap();
                assert_clean(&fs);
            } else {
                drop(after_kill(&copy)); // the handles from before the kill stay open
                copy.crash(Survival::Everything, 1);
            }
        }
    }
    drop((db, part));
}

#[test]
fn power_loss_leaves_prefix_with_direct_blobs() {
    let (machine, fs) = new_machine();
    let (db, part) = open(&fs);
    let mut synced = 0;
    for n in 0..40 {
        match n % 9 {
            3 => insert_round_synced(&db, &part, n, 0).unwrap(),
            6 => {
                insert_round(&part, n, 0);
                db.persist(PersistMode::SyncData).unwrap();
            }
            8 => {
                insert_round(&part, n, 0);
                part.flush().unwrap();
            }
            _ => insert_round(&part, n, 0),
        }
        if matches!(n % 9, 3 | 6 | 8) {
            synced = n + 1;
        }
        for seed in 0..6 {
            let survival = if seed == 0 { Survival::Nothing } else { Survival::Random };
            let (_, fs) = after_crash(&machine, survival, seed);
            let (_db, part) = open(&fs);
            let count = part.len().unwrap() as u32;
            assert!((synced..=n + 1).contains(&count), "{count} of {synced}..={n}");
            check_keys(&part, count, 0);
            assert_clean(&fs);
        }
    }
}

#[test]
fn batch_with_direct_blobs_is_atomic() {
    let (machine, fs) = new_machine();
    let (db, part) = open(&fs);
    let other = db.open_partition("q", direct_write_options(4 << 10)).unwrap();
    for mode in [PersistMode::Buffer, PersistMode::SyncAll] {
        let mut batch = db.batch();
        batch.durability(mode);
        for n in 0..20 {
            batch.insert(&part, key(n), value(n, 0, 1000));
            batch.insert(&other, key(n), value(n, 0, 1000));
            batch.insert(&other, format!("small {n}"), "inline");
            batch.remove(&other, format!("small {n}"));
        }
        let (_, before) = after_kill(&machine);
        assert!(orphaned_blob_files(&before) > 0, "a blob file has no owner before its first commit");
        batch.commit().unwrap();
        let (_, after) = after_kill(&machine);
        for fs in [&fs, &after] {
            let (_db, part) = if Arc::ptr_eq(fs, &after) { open(fs) } else { (db.clone(), part.clone()) };
            check_keys(&part, 20, 0);
            check_keys(&_db.partition("q").unwrap(), 20, 0);
        }
    }
    let files = blob_files(&*fs);
    let mut batch = db.batch();
    (0..100).for_each(|n| batch.insert(&part, key(n), value(n, 7, 1000)));
    assert!(blob_files(&*fs) > files + 3);
    // Between the values and the frame of the WAL.
    let (_, dead) = after_kill(&machine);
    let (_db, part_after) = open(&dead);
    check_keys(&part_after, 20, 0);
    assert_clean(&dead);
    drop(batch);
    part.flush().unwrap();
    other.flush().unwrap();
    check_keys(&part, 20, 0);
    drop((part, other));
    db.close().unwrap();
    assert_clean(&fs);
}

#[test]
fn a_batch_larger_than_memory_is_no_matter() {
    let (_, fs) = new_machine();
    let db = config(Arc::clone(&fs)).memory_budget(1 << 20).open().unwrap();
    let part = db.open_partition("p", direct_write_options(64 << 10)).unwrap();
    let mut batch = db.batch();
    (0..40).for_each(|n| batch.insert(&part, key(n), value(n, 0, 50_000)));
    batch.commit().unwrap();
    part.insert("alone", value(1, 1, 600_000)).unwrap();
    assert!((0..40).all(|n| part.get(key(n)).unwrap().unwrap() == value(n, 0, 50_000)));
    assert_eq!(part.get("alone").unwrap().unwrap(), value(1, 1, 600_000));
}

#[test]
fn write_succeeds_after_disk_full_direct_write() {
    let (faults, fs) = new_faulty_machine();
    let (db, part) = open(&fs);
    insert_round(&part, 0, 0);
    // A long value is written in two calls.
    for (nth, len) in [(1, 700), (1, 70_000), (2, 70_000)] {
        faults.inject(FaultPlan::new(OpKind::Write, nth, ENOSPC).in_path(".blob"));
        assert_eq!(part.insert("lost", value(9, 9, len)).unwrap_err().kind(), ErrorKind::OutOfSpace);
        let mut batch = db.batch();
        faults.inject(FaultPlan::new(OpKind::Write, nth, Fault::Short).in_path(".blob"));
        batch.insert(&part, "small", "lost too");
        batch.insert(&part, "lost", value(9, 9, len));
        assert!(batch.commit().is_err());
    }
    (1..20).for_each(|n| insert_round(&part, n, 0));
    faults.inject(FaultPlan::new(OpKind::Create, 1, ENOSPC).in_path(".blob"));
    let full = (20..60).find(|n| part.insert(key(*n), value(*n, 0, 1000)).is_err()).unwrap();
    (full..60).for_each(|n| insert_round(&part, n, 0));
    check_keys(&part, 60, 0);
    // The WAL is full: the written values are abandoned.
    faults.inject(FaultPlan::new(OpKind::Write, 1, ENOSPC).in_path(".wal").forever());
    faults.inject(FaultPlan::new(OpKind::Allocate, 1, ENOSPC).in_path(".wal").forever());
    let failed = (0..60).filter(|n| part.insert(key(*n), value(*n, 0, 1000)).is_err()).count();
    assert!(failed > 0 || db.metrics().wal_segments > 0);
    faults.clear_faults();
    check_keys(&part, 60, 0);
    assert!(!db.metrics().poisoned);
    drop(part);
    db.close().unwrap();
    let (_db, part) = open(&fs);
    check_keys(&part, 60, 0);
    assert_clean(&fs);
}

#[test]
fn failed_blob_sync_fails_commit_or_poisons() {
    let (faults, fs) = new_faulty_machine();
    let (db, part) = open(&fs);
    insert_round_synced(&db, &part, 0, 0).unwrap();
    faults.inject(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(".blob"));
    assert_eq!(insert_round_synced(&db, &part, 1, 0).unwrap_err().kind(), ErrorKind::Io);
    assert!(!db.metrics().poisoned && part.get(key(1)).unwrap().is_none(), "no other write is affected");
    (1..5).for_each(|n| insert_round_synced(&db, &part, n, 0).unwrap());
    part.flush().unwrap();
    check_keys(&part, 5, 0);
    // This commit was acknowledged as durable, and the WAL must not claim so without it.
    insert_round(&part, 5, 0);
    faults.inject(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(".blob"));
    assert!(db.persist(PersistMode::SyncData).is_err());
    assert!(db.metrics().poisoned);
    assert_eq!(part.insert("k", "v").unwrap_err().kind(), ErrorKind::Poisoned);
    assert_eq!(part.insert("k", value(1, 1, 1000)).unwrap_err().kind(), ErrorKind::Poisoned);
    check_keys(&part, 6, 0);
    faults.clear_faults();
    drop((db, part));
    let (_db, part) = open(&fs);
    check_keys(&part, 6, 0);
    assert_clean(&fs);
}

/// A large value of an exclusive transaction was synced behind its commit, so that a failure poisoned the database.
#[test]
fn failed_blob_sync_in_a_turn_fails_the_commit() {
    let (faults, fs) = new_faulty_machine();
    let (db, part) = open(&fs);
    let commit = |n: u32| {
        let mut tx = db.transaction_with(TransactionOptions::default().exclusive(true))?;
        tx.insert(&part, key(n), value(n, 0, 1000))?;
        tx.durability(PersistMode::SyncData);
        tx.commit()
    };
    commit(0).unwrap();
    faults.inject(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(".blob"));
    assert_eq!(commit(1).unwrap_err().kind(), ErrorKind::Io);
    assert!(!db.metrics().poisoned && part.get(key(1)).unwrap().is_none());
    (1..3).for_each(|n| commit(n).unwrap());
    db.persist(PersistMode::SyncAll).unwrap();
    check_keys(&part, 3, 0);
}

/// A failed sync poisoned the database if the file had unsynced values of another batch, although that batch was
/// dropped or not committed yet.
#[test]
fn failed_blob_sync_spares_what_is_not_committed() {
    let (faults, fs) = new_faulty_machine();
    let (db, part) = open(&fs);
    insert_round_synced(&db, &part, 0, 0).unwrap();
    let batch_of = |n: u32, mode| {
        let mut batch = db.batch();
        batch.durability(mode);
        batch.insert(&part, key(n), value(n, 0, 1000));
        batch
    };
    for mode in [PersistMode::Buffer, PersistMode::SyncData] {
        drop(batch_of(9, mode));
        let mut pending = batch_of(8, mode);
        faults.inject(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(".blob"));
        assert_eq!(insert_round_synced(&db, &part, 1, 0).unwrap_err().kind(), ErrorKind::Io);
        assert!(!db.metrics().poisoned, "no commit has lost a value");
        assert_eq!(pending.commit().unwrap_err().kind(), ErrorKind::Io, "{mode:?}: its value may be lost");
        assert!(!db.metrics().poisoned);
    }
    // The same, if a sync of the WAL meets them.
    let mut pending = batch_of(7, PersistMode::Buffer);
    faults.inject(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(".blob"));
    db.persist(PersistMode::SyncAll).unwrap();
    assert_eq!(pending.commit().unwrap_err().kind(), ErrorKind::Io);
    (1..5).for_each(|n| insert_round_synced(&db, &part, n, 0).unwrap());
    part.flush().unwrap();
    check_keys(&part, 5, 0);
    drop((pending, part));
    db.close().unwrap();
    let (_db, part) = open(&fs);
    check_keys(&part, 5, 0);
    assert_clean(&fs);
}

/// A commit that was refused behind the checks for lost values counted as one that the WAL points to: by a full pool, a
/// conflict, a deleted partition or a full disk. A later failed sync of the file poisoned the database.
#[test]
fn failed_blob_sync_spares_refused_commits() {
    let (faults, fs) = new_faulty_machine();
    let db = config(Arc::clone(&fs)).mapped_wal(false).open().unwrap();
    let part = db.open_partition("p", direct_write_options(16 << 10)).unwrap();
    let pool = PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default().max_size(1 << 20)));
    let pool = db.open_partition("pool", pool).unwrap();
    insert_round_synced(&db, &part, 0, 0).unwrap();
    let batch_of = |pool_len: usize| {
        let mut batch = db.batch();
        batch.insert(&part, key(90), value(90, 0, 1000));
        batch.insert(&pool, "x", vec![0; pool_len]);
        batch
    };
    let conflict = || {
        let mut tx = db.transaction();
        assert!(tx.get(&part, key(91)).unwrap().is_none());
        tx.insert(&part, key(90), value(90, 0, 1000)).unwrap();
        part.insert(key(91), "short").unwrap();
        part.remove(key(91)).unwrap();
        tx.commit()
    };
    let full_disk = || {
        let mut batch = batch_of(1);
        faults.inject(FaultPlan::new(OpKind::Write, 1, ENOSPC).in_path(".wal"));
        batch.commit()
    };
    let full_pool = || batch_of(2 << 20).commit();
    let commits: [&dyn Fn() -> azekura::Result<()>; 3] = [&full_pool, &conflict, &full_disk];
    let cases =
        [("full pool", ErrorKind::OutOfSpace), ("conflict", ErrorKind::Conflict), ("full disk", ErrorKind::OutOfSpace)];
    for (n, ((kind, expected), commit)) in (1..).zip(cases.into_iter().zip(commits)) {
        let refused = commit();
        assert_eq!(refused.unwrap_err().kind(), expected, "{kind}");
        faults.inject(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(".blob"));
        assert_eq!(insert_round_synced(&db, &part, 1, 0).unwrap_err().kind(), ErrorKind::Io, "{kind}");
        assert!(!db.metrics().poisoned, "{kind}");
        insert_round_synced(&db, &part, n, 0).unwrap();
    }
    check_keys(&part, 4, 0);
}

/// The sync of a finished file failed, and with it the flush. The page cache had the whole file, and the next open
/// named it in the manifest as it was. The system may count pages as clean that it could not write, and report success
/// at the next sync. Power loss then left a file without its end, and no open succeeded.
#[test]
fn file_of_a_failed_flush_is_written_again() {
    let (machine, _) = new_machine();
    let faults = FaultFs::new(Arc::new(machine.clone()));
    let fs: Arc<dyn Fs> = Arc::new(faults.clone());
    let (db, part) = open(&fs);
    (0..3).for_each(|n| insert_round(&part, n, 0));
    db.persist(PersistMode::SyncData).unwrap();
    faults.inject(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(".blob").forever());
    assert!(part.flush().is_err());
    machine.lose_unsynced_writes(".blob");
    let (killed, fs) = after_kill(&machine);
    let (db_after, part_after) = open(&fs);
    check_keys(&part_after, 3, 0);
    let (_, fs) = after_crash(&killed, Survival::Nothing, 0);
    let (_db, part) = open(&fs);
    check_keys(&part, 3, 0);
    assert_clean(&fs);
    drop((db, db_after));
}

/// The sync of a later value in the file failed, and with it a batch whose value was durable.
#[test]
fn durable_value_outlives_a_later_failed_sync() {
    let (faults, fs) = new_faulty_machine();
    let (db, part) = open(&fs);
    let mut pending = db.batch();
    pending.durability(PersistMode::SyncData);
    pending.insert(&part, key(1), value(1, 0, 1000));
    insert_round_synced(&db, &part, 0, 0).unwrap();
    faults.inject(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(".blob"));
    assert_eq!(insert_round_synced(&db, &part, 2, 0).unwrap_err().kind(), ErrorKind::Io);
    pending.commit().unwrap();
    check_keys(&part, 2, 0);
}

/// The sync of a file without pointers failed, and the next value got a new file. Nothing removed the old one before
/// the database was closed.
#[test]
fn failed_file_without_pointers_is_removed() {
    let (faults, fs) = new_faulty_machine();
    let (db, part) = open(&fs);
    for n in 0..3 {
        let mut batch = db.batch();
        batch.insert(&part, key(n), value(n, 0, 1000));
        drop(batch);
        faults.inject(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(".blob"));
        db.persist(PersistMode::SyncAll).unwrap();
    }
    insert_round(&part, 0, 0);
    wait_until("one blob file remains", || {
        db.step().unwrap();
        blob_files(&*fs) == 1
    });
    check_keys(&part, 1, 0);
}

#[test]
fn checkpoints_have_them_and_go_their_own_way() {
    let (_, fs) = new_machine();
    let (db, part) = open(&fs);
    for n in 0..40 {
        insert_round(&part, n, 0);
        if n == 20 {
            part.flush().unwrap();
        }
        if n % 13 == 5 {
            let path = format!("/copy {n}");
            db.checkpoint(&path).unwrap();
            insert_round(&part, n, 0);
            let copy = Config::new(&path).fs(Arc::clone(&fs)).env(Arc::new(TestEnv::new(2))).workers(0).open().unwrap();
            let copied = copy.partition("p").unwrap();
            check_keys(&copied, n + 1, 0);
            (0..n).for_each(|n| copied.remove(key(n)).unwrap());
            copied.major_compact().unwrap();
            assert_eq!(copied.get(key(n)).unwrap().unwrap(), value(n, 0, 1000));
            check_keys(&part, n + 1, 0);
        }
    }
    check_keys(&part, 40, 0);
    assert_clean(&fs);
}

/// The path and the bytes of the direct blob file of a machine.
fn blob_file_contents(machine: &MemFs) -> BTreeMap<String, Vec<u8>> {
    dir_contents(machine, Path::new(DIR)).into_iter().filter(|(name, _)| name.ends_with(".blob")).collect()
}

#[test]
fn flipped_direct_blob_byte_loses_nothing_synced() {
    let (machine, fs) = new_machine();
    let db = config(Arc::clone(&fs)).open().unwrap();
    let part = db.open_partition("p", direct_write_options(16 << 10)).unwrap();
    let small = |n: u32| value(n, 0, 510);
    (0..3).for_each(|n| part.insert(key(n), small(n)).unwrap());
    db.persist(PersistMode::SyncData).unwrap();
    (3..6).for_each(|n| part.insert(key(n), small(n)).unwrap());
    let (machine, _) = after_kill(&machine);
    let files = blob_file_contents(&machine);
    let (name, bytes) = files.first_key_value().unwrap();
    assert_eq!((files.len(), bytes.len()), (1, 64 + 6 * (16 + 510)));
    let (mut corrupt, mut ended) = (0, 0);
    for at in (0..bytes.len()).filter(|at| at % 7 == 0 || at % 526 < 90) {
        let copy = machine.fork();
        let fs: Arc<dyn Fs> = Arc::new(copy.clone());
        let path = Path::new(DIR).join(name);
        copy.open(&path, OpenMode::Write).unwrap().write_at(&[!bytes[at]], at as u64).unwrap();
        let before = dir_contents(&copy, Path::new(DIR));
        match config(Arc::clone(&fs)).open() {
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::Corruption | ErrorKind::Unsupported), "{error}");
                assert_eq!(error.file(), Some(path.as_path()), "{error}");
                assert!(at < 64 + 3 * 526, "{at}: the WAL ends above its synced part: {error}");
                assert_eq!(dir_contents(&copy, Path::new(DIR)), before, "a failed open changes nothing");
                let report = inspect::verify(&fs, Path::new(DIR), &mut |_, _| {}).unwrap();
                assert!(!report.is_clean());
                corrupt += 1;
                let damaged = at.saturating_sub(64) / 526;
                let db = config(Arc::clone(&fs)).recovery_mode(RecoveryMode::PointInTime).open().unwrap();
                let count = if at < 64 { 0 } else { damaged };
                assert_eq!(db.partition("p").unwrap().len().unwrap(), count as u64);
            }
            Ok(db) => {
                assert!(at >= 64 + 3 * 526, "{at}: the damaged value was synced");
                let part = db.partition("p").unwrap();
                let count = (at - 64) / 526;
                assert_eq!(part.len().unwrap(), count as u64, "{at}");
                assert!((0..count as u32).all(|n| part.get(key(n)).unwrap().unwrap() == small(n)));
                ended += 1;
            }
        }
        let salvaged = machine.fork();
        salvaged.open(&path, OpenMode::Write).unwrap().write_at(&[!bytes[at]], at as u64).unwrap();
        if at >= 64 {
            let db = config(Arc::new(salvaged)).recovery_mode(RecoveryMode::Salvage).open().unwrap();
            let part = db.partition("p").unwrap();
            assert_eq!(part.len().unwrap(), 5, "{at}: all commits but one are recovered");
        }
    }
    assert!(corrupt > 300 && ended > 300, "{corrupt} {ended}");
}

#[test]
fn missing_direct_blob_file_is_named_or_ends_wal() {
    let (machine, fs) = new_machine();
    let (db, part) = open(&fs);
    (0..3).for_each(|n| insert_round(&part, n, 0));
    let (unsynced, _) = after_kill(&machine);
    db.persist(PersistMode::SyncData).unwrap();
    let (synced, _) = after_kill(&machine);
    let (name, bytes) = blob_file_contents(&synced).pop_first().unwrap();
    let path = Path::new(DIR).join(name);
    for len in (0..bytes.len() as u64).step_by(37) {
        for (machine, is_synced) in [(&unsynced, false), (&synced, true)] {
            let copy = machine.fork();
            match len {
                0 => copy.remove_file(&path).unwrap(),
                len => copy.open(&path, OpenMode::Write).unwrap().set_length(len).unwrap(),
            }
            let fs: Arc<dyn Fs> = Arc::new(copy);
            match config(Arc::clone(&fs)).open() {
                Err(error) => assert!(is_synced && error.file() == Some(&path), "{error}"),
                Ok(db) => {
                    assert!(!is_synced);
                    check_keys(
                        &db.open_partition("p", direct_write_options(1 << 10)).unwrap(),
                        len.saturating_sub(64) as u32 / 1016,
                        0,
                    );
                    assert_clean(&fs);
                }
            }
        }
    }
}

#[test]
fn options_may_change_with_direct_blobs_in_wal() {
    let plain = PartitionCreateOptions::default;
    let higher = || plain().with_kv_separation(KvSeparationOptions::default().separation_threshold(1 << 20));
    for options in [plain(), higher(), direct_write_options(1 << 10)] {
        let (machine, fs) = new_machine();
        let (_db, part) = open(&fs);
        (0..30).for_each(|n| insert_round(&part, n, 0));
        for reopened in [true, false] {
            let (_, fs) = after_kill(&machine);
            let db = config(Arc::clone(&fs)).open().unwrap();
            if reopened {
                check_keys(&db.partition("p").unwrap(), 30, 0);
            }
            let part = db.open_partition("p", Default::default()).unwrap();
            part.set_options(options.clone()).unwrap();
            insert_round(&part, 30, 0);
            check_keys(&part, 31, 0);
            part.flush().unwrap();
            check_keys(&part, 31, 0);
            part.major_compact().unwrap();
            check_keys(&part, 31, 0);
            drop(part);
            db.close().unwrap();
            assert_clean(&fs);
        }
    }
}

#[test]
fn deleting_partition_removes_direct_blob_files() {
    let (machine, fs) = new_machine();
    let (db, part) = open(&fs);
    let other = db.open_partition("q", direct_write_options(1 << 10)).unwrap();
    (0..20).for_each(|n| insert_round(&part, n, 0));
    (0..20).for_each(|n| insert_round(&other, n, 0));
    let mut batch = db.batch();
    batch.insert(&other, "k", value(1, 1, 1000));
    db.delete_partition(other).unwrap();
    assert_eq!(batch.commit().unwrap_err().kind(), ErrorKind::Closed);
    check_keys(&part, 20, 0);
    let (_, killed) = after_kill(&machine);
    let (_db, after) = open(&killed);
    check_keys(&after, 20, 0);
    assert_clean(&killed);
    part.flush().unwrap();
    step_until_clean(&db, &fs);
    drop(part);
    db.close().unwrap();
    assert_clean(&fs);
}

#[test]
fn late_comparator_partition_keeps_direct_blobs() {
    let (machine, fs) = new_machine();
    let db = config(Arc::clone(&fs)).open().unwrap();
    let open = |db: &Database| {
        let options = direct_write_options(4 << 10);
        let options = options.data_block_index_type(azekura::DataBlockIndexType::BinarySearch);
        db.open_partition_with_comparator("p", options, Arc::new(TestComparator::minimal(TestOrder::Reversed))).unwrap()
    };
    let part = open(&db);
    (0..20).for_each(|n| insert_round(&part, n, 0));
    let shown = |part: &Partition| {
        let found: Vec<_> = part.iter().map(Result::unwrap).collect();
        assert_eq!(found.len(), 20);
        assert!(found.iter().zip((0..20).rev()).all(|((k, v), n)| *k == key(n) && *v == value(n, 0, 1000)));
    };
    shown(&part);
    let (copy, killed) = after_kill(&machine);
    shown(&open(&config(Arc::clone(&killed)).open_read_only().unwrap()));
    // Opened without key-value separation, closed, and opened with it.
    config(Arc::clone(&killed)).open().unwrap().close().unwrap();
    assert_clean(&killed);
    let db = config(Arc::clone(&killed)).open().unwrap();
    let part = open(&db);
    shown(&part);
    part.major_compact().unwrap();
    shown(&part);
    drop((part, copy));
    db.close().unwrap();
    assert_clean(&killed);
}

#[test]
fn writers_at_once_lose_nothing_where_some_fail() {
    let (faults, fs) = new_faulty_machine();
    let env = Arc::new(azekura::fs::SystemEnv::new());
    let db = Config::new(DIR).fs(Arc::clone(&fs)).env(env).workers(2).open().unwrap();
    let part = db.open_partition("p", direct_write_options(8 << 10).max_memtable_size(64 << 10)).unwrap();
    let acknowledged: Vec<BTreeMap<u32, u32>> = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4u32)
            .map(|writer| {
                let (part, db, faults) = (&part, &db, &faults);
                scope.spawn(move || {
                    let mut acknowledged = BTreeMap::new();
                    for round in 0..150 {
                        let n = writer * 100 + round % 20;
                        if round % 11 == 3 {
                            faults.inject(FaultPlan::new(OpKind::Write, 2, ENOSPC).in_path(".blob"));
                        }
                        let done = match round % 5 {
                            0 => insert_round_synced(db, part, n, round),
                            1 => {
                                let mut batch = db.batch();
                                batch.insert(part, key(n), value(n, round, 1000));
                                drop(batch);
                                continue;
                            }
                            _ => part.insert(key(n), value(n, round, 1000)),
                        };
                        if done.is_ok() {
                            acknowledged.insert(n, round);
                        }
                        let found = part.get(key(n)).unwrap();
                        assert_eq!(found, acknowledged.get(&n).map(|round| value(n, *round, 1000).into()));
                    }
                    acknowledged
                })
            })
            .collect();
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    faults.clear_faults();
    let check = |part: &Partition| {
        for (n, round) in acknowledged.iter().flatten() {
            assert_eq!(part.get(key(*n)).unwrap().unwrap(), value(*n, *round, 1000));
        }
        assert_eq!(part.len().unwrap() as usize, acknowledged.iter().map(BTreeMap::len).sum::<usize>());
    };
    check(&part);
    assert!(!db.metrics().poisoned);
    drop(part);
    db.close().unwrap();
    assert_clean(&fs);
    let (_db, part) = open(&fs);
    check(&part);
}

#[test]
fn durability_decides_what_is_written_directly() {
    for (mode, default) in [(PersistMode::Buffer, 4 << 10), (PersistMode::SyncData, 1 << 20)] {
        let (_, fs) = new_machine();
        let db = config(Arc::clone(&fs)).durability(mode).open().unwrap();
        let separation = |threshold| KvSeparationOptions::default().separation_threshold(threshold);
        let directly = |part: &Partition, len: usize, write: &dyn Fn(&str, &[u8])| {
            let (key, value, before) = (format!("{len}"), value(1, 1, len), db.metrics().direct_blob_bytes);
            write(&key, &value);
            assert_eq!(part.get(&key).unwrap().unwrap(), value);
            db.metrics().direct_blob_bytes > before
        };
        for (name, threshold) in [("small", 1 << 10), ("large", 2 << 20)] {
            let options = PartitionCreateOptions::default().with_kv_separation(separation(threshold));
            let part = db.open_partition(name, options).unwrap();
            let insert = |key: &str, value: &[u8]| part.insert(key, value).unwrap();
            let first = default.max(threshold as usize);
            let lens = [first - 1, first];
            assert_eq!(lens.map(|len| directly(&part, len, &insert)), [false, true], "{mode:?} {name}");
            let in_batch = |key: &str, value: &[u8]| {
                let mut batch = db.batch();
                batch.insert(&part, key, value);
                batch.commit().unwrap();
            };
            assert_eq!(lens.map(|len| directly(&part, len, &in_batch)), [false, true], "{mode:?} {name}, batch");
            let ttl = Duration::from_secs(9);
            let expiring = |key: &str, value: &[u8]| part.insert_with_ttl(key, value, ttl).unwrap();
            assert_eq!(lens.map(|len| directly(&part, len, &expiring)), [false, true], "{mode:?} {name}, TTL");
            let in_transaction = |key: &str, value: &[u8]| {
                let mut tx = db.transaction();
                tx.insert(&part, key, value).unwrap();
                tx.commit().unwrap();
            };
            assert_eq!(lens.map(|len| directly(&part, len, &in_transaction)), [false, true], "{mode:?} {name}, tx");
        }
        let plain = db.open_partition("no separation", PartitionCreateOptions::default()).unwrap();
        assert!(!directly(&plain, 3 << 20, &|key, value| plain.insert(key, value).unwrap()));
    }
}

/// The durability of a batch counts, not that of the database: when a value is added.
#[test]
fn the_batch_decides_about_direct_writes() {
    let (machine, fs) = new_machine();
    let db = config(Arc::clone(&fs)).open().unwrap();
    let options = PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default());
    let part = db.open_partition("p", options).unwrap();
    let mut batch = db.batch();
    batch.durability(PersistMode::SyncData).insert(&part, "synced", value(1, 1, 8 << 10));
    assert_eq!(db.metrics().direct_blob_bytes, 0);
    batch.durability(PersistMode::Buffer).insert(&part, "unsynced", value(1, 1, 8 << 10));
    assert!(db.metrics().direct_blob_bytes > 0);
    batch.durability(PersistMode::SyncData).commit().unwrap(); // syncs the blob file too
    let (_, fs) = after_crash(&machine, Survival::Nothing, 1);
    let (_db, recovered) = open(&fs);
    assert_eq!(recovered.len().unwrap(), 2);
}

/// On disk, with the least memory that the options allow.
#[test]
fn value_of_512_mib_is_stored_and_read() {
    let temporary = tempfile::tempdir().unwrap();
    let dir = temporary.path().join("db");
    let config = || Config::new(&dir).cache_size(1 << 20).memory_budget(64 << 20);
    let options = PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default());
    let huge: Vec<u8> = (0..512usize << 20).map(|i| (i >> 12) as u8 ^ i as u8).collect();
    let db = config().open().unwrap();
    let part = db.open_partition("p", options.clone()).unwrap();
    part.insert("huge", &huge).unwrap();
    assert!(part.get("huge").unwrap().unwrap()[..] == huge[..]);
    drop(part);
    db.close().unwrap();
    let db = config().open().unwrap();
    let part = db.open_partition("p", options).unwrap();
    assert!(part.get("huge").unwrap().unwrap()[..] == huge[..]);
}

/// The acknowledged commits of a short run until the machine stops, and those that are durable.
#[derive(Default)]
struct AckedCommits {
    acknowledged: u32,
    durable: u32,
}

/// The `k`-th commit: a new key, an overwritten key, and a small value.
fn commit(db: &Database, part: &Partition, k: u32, mode: PersistMode) -> azekura::Result<()> {
    let mut batch = db.batch();
    batch.durability(mode);
    batch.insert(part, key(k), value(k, 0, if k % 3 == 1 { 200 } else { 700 }));
    batch.insert(part, format!("over {}", k % 3), value(k, 1, 900));
    batch.insert(part, "small", k.to_le_bytes());
    batch.commit()
}

fn run_until_crash(fs: &Arc<dyn Fs>, reported: &mut AckedCommits) -> azekura::Result<()> {
    let open = || {
        let db = config(Arc::clone(fs)).mapped_wal(false).open()?;
        let part = db.open_partition("p", direct_write_options(2 << 10))?;
        azekura::Result::Ok((db, part))
    };
    let (mut db, mut part) = open()?;
    for k in 0..14 {
        let mode = if k % 4 == 1 { PersistMode::SyncData } else { PersistMode::Buffer };
        commit(&db, &part, k, mode)?;
        reported.acknowledged = k + 1;
        match k {
            3 | 8 => part.flush()?,
            6 => db.persist(PersistMode::SyncAll)?,
            10 => drop(azekura::Gc::gc_with_space_amp_target(&part, 1.0)?),
            11 => {
                drop(part);
                db.close()?;
                (db, part) = open()?;
            }
            12 => part.major_compact()?,
            _ if mode == PersistMode::Buffer => continue,
            _ => {}
        }
        reported.durable = k + 1;
    }
    Ok(())
}

/// Checks that the partition has a prefix of the commits, with `min` to `max` of them.
fn check_prefix(part: &Partition, min: u32, max: u32) {
    let small = part.get("small").unwrap();
    let count = small.map_or(0, |small| u32::from_le_bytes(small[..].try_into().unwrap()) + 1);
    assert!((min..=max).contains(&count), "{count} of {min}..={max}");
    for k in 0..max {
        let wanted = (k < count).then(|| value(k, 0, if k % 3 == 1 { 200 } else { 700 }));
        assert_eq!(part.get(key(k)).unwrap().map(|found| found.to_vec()), wanted);
    }
    for over in 0..3 {
        let wanted = (0..count).rev().find(|k| k % 3 == over).map(|k| value(k, 1, 900));
        assert_eq!(part.get(format!("over {over}")).unwrap().map(|found| found.to_vec()), wanted);
    }
}

#[test]
fn crash_at_any_op_orphans_no_direct_blob_file() {
    for ops in 0.. {
        let (machine, fs) = new_machine();
        machine.freeze_after(Some(ops));
        let mut reported = AckedCommits::default();
        let ended = run_until_crash(&fs, &mut reported);
        assert!(ended.is_ok() || machine.is_frozen(), "{ended:?}");
        for (salt, survival) in [
            (0, Survival::Nothing),
            (1, Survival::Random),
            (2, Survival::Random),
            (3, Survival::Random),
            (4, Survival::Everything),
        ] {
            let copy = machine.fork();
            copy.freeze_after(None);
            copy.crash(survival, ops * 5 + salt);
            let fs: Arc<dyn Fs> = Arc::new(copy);
            let (_db, part) = open(&fs);
            let least = if survival == Survival::Everything { reported.acknowledged } else { reported.durable };
            check_prefix(&part, least, reported.acknowledged + 1);
            assert_clean(&fs);
        }
        if !machine.is_frozen() {
            assert!(ops > 100, "{ops} operations are too few");
            return;
        }
    }
}

/// Between two looks at the threshold, a write lost its value: the record in the WAL was one that no open could replay.
#[test]
fn threshold_may_change_during_a_write() {
    let (_, fs) = new_machine();
    let (db, part) = open(&fs);
    let inline = KvSeparationOptions::default().direct_write_threshold(u32::MAX);
    let inline = PartitionCreateOptions::default().with_kv_separation(inline);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                part.set_options(inline.clone()).unwrap();
                part.set_options(direct_write_options(1 << 20)).unwrap();
            }
        });
        for n in 0..2_000 {
            insert_round(&part, n % 8, n);
            if n % 3 == 0 {
                part.insert_with_ttl("expires", value(0, n, 1_000), Duration::from_secs(3_600)).unwrap();
            }
            assert_eq!(part.get(key(n % 8)).unwrap().unwrap(), value(n % 8, n, 1_000));
        }
        is_done.store(true, Ordering::Relaxed);
    });
    drop(part);
    db.close().unwrap();
    let (_db, part) = open(&fs);
    for n in 1_992..2_000 {
        assert_eq!(part.get(key(n % 8)).unwrap().unwrap(), value(n % 8, n, 1_000));
    }
    assert_eq!(part.get("expires").unwrap().unwrap(), value(0, 1_998, 1_000));
}

/// Replaces the value of a key of a pool during the first merges of the key, so that they must be repeated.
struct Disturber {
    rounds: AtomicU32,
    pool: OnceLock<Partition>,
}

impl MergeOperator for Disturber {
    fn name(&self) -> &str {
        "disturber"
    }

    fn full_merge(&self, _: &[u8], _: Option<&[u8]>, _: &[&[u8]]) -> azekura::Result<Vec<u8>> {
        let round = self.rounds.fetch_add(1, Ordering::SeqCst);
        if round < 3 {
            let pool = self.pool.get().unwrap();
            std::thread::scope(|scope| scope.spawn(|| pool.insert("key", [round as u8]).unwrap()).join().unwrap());
        }
        Ok(b"merged".to_vec())
    }
}

/// A batch that repeats the merges of a pool commits in an exclusive turn in the end. Its large values were not synced
/// before the WAL had their pointers, so a failed sync of the blob file poisoned the database.
#[test]
fn failed_sync_in_a_turn_fails_one_commit() {
    let (faults, fs) = new_faulty_machine();
    let (db, large) = open(&fs);
    let operator = Arc::new(Disturber { rounds: AtomicU32::new(0), pool: OnceLock::new() });
    let options = PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default().max_size(4 << 20)));
    let components = PartitionComponents::default().merge_operator(Arc::clone(&operator) as Arc<dyn MergeOperator>);
    let pool = db.open_partition_with("pool", options, components).unwrap();
    assert!(operator.pool.set(pool.clone()).is_ok());
    let mut batch = db.batch();
    batch.durability(PersistMode::SyncData);
    batch.insert(&large, "value", [7; 4_000]);
    batch.merge(&pool, "key", "operand");
    faults.inject(FaultPlan::new(OpKind::Sync, 1, EIO).in_path(".blob"));
    assert_eq!(batch.commit().unwrap_err().kind(), ErrorKind::Io);
    assert_eq!((operator.rounds.load(Ordering::SeqCst), faults.fault_count()), (4, 1));
    assert!(!db.metrics().poisoned);
    assert_eq!(large.get("value").unwrap(), None);
    large.insert("value", [8; 4_000]).unwrap();
    db.persist(PersistMode::SyncData).unwrap();
}

/// Each partition has a direct blob file of its own, which has a file handle and is synced with the WAL. With many
/// partitions, values that fit into the WAL go there.
#[test]
fn partitions_share_a_bound_on_direct_blob_files() {
    const PARTITIONS: u32 = 40;
    const FILES_MAX: usize = 32;
    let (machine, fs) = new_machine();
    let db = config(Arc::clone(&fs)).open().unwrap();
    let options = || PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default());
    let parts: Vec<Partition> =
        (0..PARTITIONS).map(|n| db.open_partition(&format!("p{n}"), options()).unwrap()).collect();
    let insert = |n: u32, len| {
        let before = db.metrics().direct_blob_bytes;
        parts[n as usize].insert(key(len as u32), value(n, 1, len)).unwrap();
        db.metrics().direct_blob_bytes > before
    };
    let direct: Vec<u32> = (0..PARTITIONS).filter(|n| insert(*n, 5_000)).collect();
    assert_eq!(direct, (0..FILES_MAX as u32).collect::<Vec<_>>());
    assert_eq!(blob_files(&*fs), FILES_MAX);
    assert!(insert(0, 6_000), "this partition has an open file");
    assert!(!insert(PARTITIONS - 1, 6_000));
    assert!(insert(PARTITIONS - 1, 2 << 20), "a value of more than 1 MiB");
    parts[..2].iter().for_each(|part| part.flush().unwrap());
    wait_until("the files are finished", || insert(PARTITIONS - 2, 7_000));
    let check = |parts: &[Partition]| {
        for (n, part) in (0..).zip(parts) {
            assert_eq!(part.get(key(5_000)).unwrap().unwrap(), value(n, 1, 5_000));
        }
    };
    check(&parts);
    db.persist(PersistMode::SyncData).unwrap();
    let (_, fs) = after_crash(&machine, Survival::Nothing, 1);
    let recovered = config(fs).open().unwrap();
    let names = (0..PARTITIONS).map(|n| recovered.partition(&format!("p{n}")).unwrap());
    check(&names.collect::<Vec<_>>());
}

/// Opening reads and copies the values of unfinished direct blob files. They count as the WAL does: partitions are
/// flushed before more than `max_wal_size` has to be recovered.
#[test]
fn max_wal_size_bounds_unflushed_values() {
    const MAX_WAL_SIZE: u64 = 1 << 20;
    let (_, fs) = new_machine();
    let settings = Config::new(DIR).fs(fs).workers(0).wal_segment_size(256 << 10).max_wal_size(MAX_WAL_SIZE);
    let db = settings.open().unwrap();
    let separation = KvSeparationOptions::default().compression(CompressionType::None);
    let options = PartitionCreateOptions::default().with_kv_separation(separation);
    let parts = ["a", "b", "c"].map(|name| db.open_partition(name, options.clone()).unwrap());
    let mut sealed = 0;
    for n in 0..600 {
        let part = &parts[n as usize % 3];
        part.insert(key(n), value(n, 1, 10_000)).unwrap();
        sealed += parts.iter().map(|part| part.metrics().sealed_memtables).sum::<usize>();
        while db.step().unwrap() {}
        let unfinished: u64 = db.metrics().direct_blob_bytes
            - parts.iter().flat_map(|part| part.metrics().blob_files).map(|file| file.value_bytes).sum::<u64>();
        assert!(unfinished <= MAX_WAL_SIZE + 10_100, "{unfinished} bytes would be recovered");
    }
    assert!((5..20).contains(&sealed), "{sealed} memtables were sealed for 6 MB of values");
    (0..600).for_each(|n| assert_eq!(parts[n as usize % 3].get(key(n)).unwrap().unwrap(), value(n, 1, 10_000)));
}

const FULL_DISK_VALUE_LEN: usize = 8 << 10;

/// Inserts values of 8 KiB until the disk is full, or up to this number. Some values are in no commit. Returns the
/// number of values.
fn insert_until_disk_is_full(db: &Database, part: &Partition, max: u32) -> u32 {
    for n in 0..max {
        let mut dropped = db.batch();
        (0..n % 16 / 4).for_each(|k| dropped.insert(part, "dropped", value(k, n, FULL_DISK_VALUE_LEN / 2)));
        drop(dropped);
        match part.insert(key(n), value(n, 0, FULL_DISK_VALUE_LEN)) {
            Err(error) if error.kind() == ErrorKind::OutOfSpace => return n,
            done => done.unwrap(),
        }
    }
    max
}

/// Opens the database, whose disk may be full, with the options that it has.
fn open_on_full_disk(fs: &Arc<dyn Fs>) -> azekura::Result<(Database, Partition)> {
    let db = config(Arc::clone(fs)).mapped_wal(false).open()?;
    let part = db.open_partition("p", Default::default())?;
    Ok((db, part))
}

fn create_for_full_disk(fs: &Arc<dyn Fs>, target_size: u64) -> (Database, Partition) {
    let db = config(Arc::clone(fs)).mapped_wal(false).open().unwrap();
    let separation = KvSeparationOptions::default().blob_file_target_size(target_size);
    let separation = separation.compression(CompressionType::None).automatic_gc(None);
    let options = PartitionCreateOptions::default().with_kv_separation(separation);
    let part = db.open_partition("p", options).unwrap();
    (db, part)
}

fn check_full_disk_values(part: &Partition, range: std::ops::Range<u32>) {
    assert_eq!(part.len().unwrap(), u64::from(range.end - range.start));
    for n in range {
        assert_eq!(part.get(key(n)).unwrap().unwrap(), value(n, 0, FULL_DISK_VALUE_LEN), "{n}");
    }
}

fn blob_file_names(machine: &MemFs) -> Vec<String> {
    blob_file_contents(machine).into_keys().collect()
}

/// Regression: recovery copied the values of unfinished direct blob files before it removed these files. On a full
/// disk, every open failed.
#[test]
fn database_opens_on_a_disk_full_of_direct_blobs() {
    let (machine, fs) = new_machine();
    machine.set_capacity(Some(24 << 20));
    let (db, part) = create_for_full_disk(&fs, 4 << 20);
    let count = insert_until_disk_is_full(&db, &part, u32::MAX);
    assert!(count > 1_500, "{count}");
    let (machine, fs) = after_kill(&machine);
    drop((db, part));
    machine.set_capacity(Some(machine.used_space()));
    let before = blob_file_names(&machine);
    let (db, part) = open_on_full_disk(&fs).unwrap();
    assert_eq!(blob_file_names(&machine), before, "no file was copied");
    check_full_disk_values(&part, 0..count);
    assert_clean(&fs);
    assert_eq!(part.insert("k", "v").unwrap_err().kind(), ErrorKind::OutOfSpace);
    (0..100).for_each(|n| part.remove(key(n)).unwrap());
    check_full_disk_values(&part, 100..count);
    // Once more before anything is flushed, and after power loss.
    db.persist(PersistMode::SyncData).unwrap();
    for survival in [Survival::Everything, Survival::Nothing, Survival::Random] {
        let (machine, fs) = after_crash(&machine, survival, 1);
        machine.set_capacity(Some(machine.used_space().max(24 << 20)));
        let (_db, part) = open_on_full_disk(&fs).unwrap();
        check_full_disk_values(&part, 100..count);
        assert_clean(&fs);
    }
    machine.set_capacity(None);
    (0..100).for_each(|n| part.insert(key(n), value(n, 0, FULL_DISK_VALUE_LEN)).unwrap());
    part.flush().unwrap();
    part.major_compact().unwrap();
    check_full_disk_values(&part, 0..count);
    let (_, fs) = after_kill(&machine);
    let (_db, part) = open_on_full_disk(&fs).unwrap();
    check_full_disk_values(&part, 0..count);
    assert_clean(&fs);
}

#[test]
fn crash_while_direct_blobs_finish_in_place() {
    const VALUES: u32 = 20;
    const SYNCED: u32 = 11;
    let (machine, fs) = new_machine();
    let (db, part) = create_for_full_disk(&fs, 100 << 10);
    assert_eq!(insert_until_disk_is_full(&db, &part, SYNCED), SYNCED);
    db.persist(PersistMode::SyncData).unwrap();
    for n in SYNCED..VALUES {
        part.insert(key(n), value(n, 0, FULL_DISK_VALUE_LEN)).unwrap();
    }
    let mut batch = db.batch();
    (0..3).for_each(|n| batch.insert(&part, key(n), value(n, 9, FULL_DISK_VALUE_LEN)));
    let (killed, _) = after_kill(&machine);
    drop(batch);
    killed.set_capacity(Some(killed.used_space()));
    for ops in 0.. {
        let machine = killed.fork();
        machine.freeze_after(Some(ops));
        let opened = open_on_full_disk(&(Arc::new(machine.clone()) as Arc<dyn Fs>));
        assert!(opened.is_ok() || machine.is_frozen(), "{ops}: {:?}", opened.err());
        let is_open = opened.is_ok();
        for (salt, survival) in [
            (0, Survival::Everything),
            (1, Survival::Nothing),
            (2, Survival::Random),
            (3, Survival::Random),
            (4, Survival::DataOnly),
            (5, Survival::MetadataOnly),
        ] {
            let copy = machine.fork();
            copy.freeze_after(None);
            copy.crash(survival, ops * 6 + salt);
            // Lost truncations and removals take space again, which a disk would not have given to other files.
            copy.set_capacity(Some(copy.used_space().max(killed.used_space())));
            let fs: Arc<dyn Fs> = Arc::new(copy);
            let (_db, part) = open_on_full_disk(&fs).unwrap_or_else(|e| panic!("{ops} {survival:?}: {e}"));
            let count = part.len().unwrap() as u32;
            let least = if is_open || survival == Survival::Everything { VALUES } else { SYNCED };
            assert!((least..=VALUES).contains(&count), "{ops} {survival:?}: {count} of {least}");
            check_full_disk_values(&part, 0..count);
            assert_clean(&fs);
        }
        if !machine.is_frozen() {
            assert!(ops > 40, "{ops} operations are too few");
            return;
        }
    }
}

/// A damaged value of a commit that was not synced ends the WAL. What the replay dropped may take no other space.
#[test]
fn damaged_direct_blob_ends_wal_on_a_full_disk() {
    const VALUES: u32 = 400;
    const LOST: u32 = 391;
    let (machine, fs) = new_machine();
    let (db, part) = create_for_full_disk(&fs, 64 << 20);
    assert_eq!(insert_until_disk_is_full(&db, &part, VALUES), VALUES);
    let (machine, fs) = after_kill(&machine);
    drop((db, part));
    let (name, bytes) = blob_file_contents(&machine).pop_first().unwrap();
    let wanted = value(LOST, 0, FULL_DISK_VALUE_LEN);
    let at = (bytes.len() - 40 * FULL_DISK_VALUE_LEN..).find(|at| bytes[*at..].starts_with(&wanted)).unwrap() + 100;
    machine.open(&Path::new(DIR).join(&name), OpenMode::Write).unwrap().write_at(&[!bytes[at]], at as u64).unwrap();
    machine.set_capacity(Some(machine.used_space()));
    let (_db, part) = open_on_full_disk(&fs).unwrap();
    check_full_disk_values(&part, 0..LOST);
    assert_eq!(blob_file_names(&machine), [name], "no file was copied");
    assert_clean(&fs);
    (0..100).for_each(|n| part.remove(key(n)).unwrap());
    let (_, fs) = after_kill(&machine);
    let (_db, part) = open_on_full_disk(&fs).unwrap();
    check_full_disk_values(&part, 100..LOST);
}

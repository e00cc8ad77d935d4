//! Defects that were found by reading the source, each shown by the shortest program.

use std::io;
use std::path::Path;
use std::sync::Arc;

use azekura::fs::Fs;
use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, Survival, TestComparator, TestEnv, TestOrder};
use azekura::{
    Config, Database, ErrorKind, KvSeparationOptions, Partition, PartitionCreateOptions, PersistMode, PersistenceLevel,
};

use super::memory::persistent_memory_fs;
use super::{DIR, config, open_pool, pool_options};

/// Orders keys backward or, under the same name, forward.
fn open_backward(db: &Database, honest: bool) -> azekura::Result<Partition> {
    let order = if honest { TestOrder::Reversed } else { TestOrder::Bytes };
    let comparator = Arc::new(TestComparator::minimal(order).named("backward"));
    db.open_partition_with_comparator("pool", pool_options(4 << 20), comparator)
}

/// Replayed records must not reset the highest sequence number that a pool has used without the WAL, when the WAL
/// cannot be ended.
#[test]
fn a_close_that_fails_does_not_take_numbers_back() {
    let fs = persistent_memory_fs();
    let db = config(&fs).open().unwrap();
    let part = open_pool(&db, "pool");
    let mut batch = db.batch();
    batch.insert(&part, "a", "1");
    batch.insert(&part, "b", "1");
    batch.commit().unwrap();
    (0..900u32).for_each(|n| part.insert(n.to_be_bytes(), "old").unwrap());
    fs.crash(Survival::Everything, 0);
    let db = config(&fs).open().unwrap();
    drop(open_pool(&db, "pool"));
    fs.freeze_after(Some(0));
    assert!(db.close().is_err());
    fs.crash(Survival::Everything, 1);
    let part = open_pool(&config(&fs).open().unwrap(), "pool");
    assert_eq!(part.len().unwrap(), 902);
    (0..900u32).for_each(|n| part.insert(n.to_be_bytes(), "new").unwrap());
    assert!((0..900u32).all(|n| part.get(n.to_be_bytes()).unwrap().unwrap() == "new"));
}

#[test]
fn removed_key_stays_removed_on_late_comparator() {
    let fs = persistent_memory_fs();
    let db = config(&fs).open().unwrap();
    let part = open_backward(&db, true).unwrap();
    let mut batch = db.batch();
    batch.insert(&part, "gone", "1");
    batch.insert(&part, "there", "1");
    batch.commit().unwrap();
    part.remove("gone").unwrap();
    part.insert("alone", "1").unwrap();
    fs.crash(Survival::Everything, 0);
    let db = config(&fs).open().unwrap();
    let part = open_backward(&db, true).unwrap();
    let keys: Vec<_> = part.keys().map(Result::unwrap).collect();
    assert_eq!(keys, ["there", "alone"]);
    part.insert("there", "2").unwrap();
    assert_eq!(part.get("there").unwrap().unwrap(), "2");
}

/// A pool whose tree could not be built is not replaced by another tree.
#[test]
fn pool_with_wrong_comparator_is_refused_intact() {
    for fs in [MemFs::new(), persistent_memory_fs()] {
        let db = config(&fs).open().unwrap();
        let part = open_backward(&db, true).unwrap();
        (0..200u32).for_each(|n| part.insert(n.to_be_bytes(), [1; 50]).unwrap());
        part.flush().unwrap();
        part.insert("in the log", "1").unwrap();
        drop(part);
        fs.crash(Survival::Everything, 0);
        let db = config(&fs).open().unwrap();
        assert_eq!(open_backward(&db, false).unwrap_err().kind(), ErrorKind::Corruption);
        assert!(open_backward(&db, true).is_err() && db.partition("pool").is_err());
        db.open_partition("other", Default::default()).unwrap().insert("k", "v").unwrap();
        db.close().unwrap();
        let db = config(&fs).open().unwrap();
        assert_eq!(open_backward(&db, true).unwrap().len().unwrap(), 201);
    }
}

/// An image and a mapped pool in one database: sequence numbers that only the mapped pool used do not end the WAL.
#[test]
fn flushed_seqno_never_exceeds_wal_end() {
    let fs = MemFs::new();
    let db = config(&fs).open().unwrap();
    open_pool(&db, "image").insert("k", "0").unwrap();
    db.close().unwrap();
    fs.set_mapped_memory(PersistenceLevel::PowerLoss);
    for life in 0..4u32 {
        let db = config(&fs).open().unwrap();
        let (image, memory) = (open_pool(&db, "image"), open_pool(&db, "memory"));
        assert_eq!(image.metrics().pool.unwrap().persistence, PersistenceLevel::WalOnly);
        assert_eq!(memory.len().unwrap(), u64::from(life) * 500);
        image.insert("k", life.to_le_bytes()).unwrap();
        (0..500).for_each(|n: u32| memory.insert([life.to_be_bytes(), n.to_be_bytes()].concat(), "v").unwrap());
        image.flush().unwrap();
        assert_eq!(image.get("k").unwrap().unwrap(), life.to_le_bytes());
        fs.crash(Survival::Everything, u64::from(life));
        // Opened, lost at once, and opened again.
        let again = fs.fork();
        drop(config(&again).open().unwrap());
        again.crash(Survival::Everything, 0);
        drop(config(&again).open().unwrap());
    }
}

/// The WAL has a batch and was not synced: opening must not make half of it durable in a mapped pool.
#[test]
fn replay_does_not_tear_a_batch() {
    let fs = persistent_memory_fs();
    let faulty = FaultFs::new(Arc::new(fs.clone()));
    let db = config(&fs).fs(Arc::new(faulty.clone())).open().unwrap();
    let (part, tree) = (open_pool(&db, "pool"), db.open_partition("tree", Default::default()).unwrap());
    let mut batch = db.batch();
    batch.insert(&part, "k", "1");
    batch.insert(&tree, "k", "1");
    faulty.inject(FaultPlan::new(OpKind::Sync, 1, Fault::Error(std::io::ErrorKind::Other)).in_path(".wal").forever());
    assert!(batch.commit().is_err());
    let mut whole = 0;
    for ops in 0.. {
        let again = fs.fork();
        again.freeze_after(Some(ops));
        let opened = config(&again).open().is_ok();
        again.crash(Survival::Nothing, ops);
        let db = config(&again).open().unwrap_or_else(|error| panic!("after {ops} operations: {error}"));
        let has_record = |name: &str| db.partition(name).is_ok_and(|part| part.get("k").unwrap().is_some());
        assert_eq!(has_record("pool"), has_record("tree"), "after {ops} operations");
        whole += u64::from(has_record("pool"));
        if opened {
            break;
        }
    }
    assert!(whole > 0);
}

/// A mapped pool that has become an image is in a checkpoint, also before its own first checkpoint.
#[test]
fn checkpoint_contains_mapped_pool() {
    let fs = persistent_memory_fs();
    let db = config(&fs).open().unwrap();
    open_pool(&db, "pool").insert("k", "v").unwrap();
    db.close().unwrap();
    fs.set_mapped_memory(PersistenceLevel::WalOnly);
    let db = config(&fs).open().unwrap();
    open_pool(&db, "pool").insert("l", "w").unwrap();
    db.persist(PersistMode::SyncData).unwrap();
    db.checkpoint("/copy").unwrap();
    let copy = Config::new("/copy").fs(Arc::new(fs.clone())).open().unwrap();
    assert_eq!(copy.partition("pool").unwrap().len().unwrap(), 2);
}

/// Regression: a mapped pool could not be created, because too many files were open. Its file remained in the directory
/// until the next open. After a first fix, it still remained if the manifest had no space for the new partition: only
/// the temporary name was removed, and the file already had its final name.
#[test]
fn refused_mapped_pool_leaves_no_file() {
    let plans = [
        (OpKind::Length, Fault::TooManyOpenFiles, ".shadow"),
        (OpKind::Sync, Fault::TooManyOpenFiles, ".shadow"),
        (OpKind::SyncDir, Fault::TooManyOpenFiles, DIR),
        (OpKind::Rename, Fault::TooManyOpenFiles, ""),
        (OpKind::Write, Fault::Error(io::ErrorKind::StorageFull), "MANIFEST"),
    ];
    for (kind, fault, path) in plans {
        let machine = persistent_memory_fs();
        let faults = FaultFs::new(Arc::new(machine.clone()));
        let db = config(&machine).fs(Arc::new(faults.clone())).open().unwrap();
        faults.inject(FaultPlan::new(kind, 1, fault).in_path(path));
        assert!(db.open_partition("pool", pool_options(4 << 20)).is_err(), "{kind:?}");
        let files = machine.read_dir(Path::new(DIR)).unwrap();
        let pool_files: Vec<_> =
            files.iter().filter(|file| file.name.starts_with('p')).map(|file| &file.name).collect();
        assert!(pool_files.is_empty(), "{kind:?}: {pool_files:?}");
        faults.clear_faults();
        open_pool(&db, "pool").insert("k", "v").unwrap();
    }
}

/// A batch with a pool that survives power loss is synced before it is applied. If too many files were open for that
/// sync, the batch was refused but stayed in the WAL: single changes took its sequence numbers, and the next open
/// applied the half of it that they had not overwritten.
#[test]
fn unsynced_batch_is_whole_or_absent() {
    let machine = persistent_memory_fs();
    let faults = FaultFs::new(Arc::new(machine.clone()));
    let db = config(&machine).fs(Arc::new(faults.clone())).open().unwrap();
    let pool = open_pool(&db, "pool");
    let separated = PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default());
    let lsm = db.open_partition("lsm", separated).unwrap();
    pool.insert("a", "before").unwrap();
    lsm.insert("large", vec![1; 2 << 20]).unwrap(); // a blob file whose directory is not synced
    faults.inject(FaultPlan::new(OpKind::SyncDir, 1, Fault::TooManyOpenFiles));
    let mut batch = db.batch();
    batch.insert(&pool, "a", "batch");
    batch.insert(&pool, "b", "batch");
    assert!(batch.commit().is_err());
    assert_eq!(faults.fault_count(), 1);
    faults.clear_faults();
    assert!(pool.insert("a", "single").is_err(), "the sequence numbers of the batch are used twice");
    let killed = machine.fork();
    let db = config(&killed).open().unwrap();
    let pool = open_pool(&db, "pool");
    let (a, b) = (pool.get("a").unwrap().unwrap(), pool.get("b").unwrap());
    assert_eq!(a == "batch", b.is_some_and(|b| b == "batch"), "a is {a:?}");
}

/// A sync of the WAL failed, and the system counts pages as clean that it could not write. The next open synced them
/// again without effect, and replayed a batch into a pool that survives power loss before it wrote them again. Power
/// loss between the two left half of the batch.
#[test]
fn wal_of_a_failed_sync_precedes_the_pool() {
    let machine = persistent_memory_fs();
    let faults = FaultFs::new(Arc::new(machine.clone()));
    let open = |fs: Arc<dyn Fs>| {
        let db = Config::new(DIR).fs(fs).env(Arc::new(TestEnv::new(1))).workers(0).mapped_wal(false).open()?;
        let parts = [db.open_partition("pool", pool_options(4 << 20))?, db.open_partition("lsm", Default::default())?];
        Ok::<_, azekura::Error>((db, parts))
    };
    let (db, parts) = open(Arc::new(faults.clone())).unwrap();
    parts.iter().for_each(|part| part.insert("a", "synced").unwrap());
    db.persist(PersistMode::SyncAll).unwrap();
    faults.inject(FaultPlan::new(OpKind::Sync, 1, Fault::Error(io::ErrorKind::Other)).in_path(".wal"));
    let mut batch = db.batch();
    parts.iter().for_each(|part| batch.insert(part, "b", "batch"));
    assert_eq!(batch.commit().unwrap_err().kind(), ErrorKind::Poisoned);
    machine.lose_unsynced_writes(".wal");
    let mut found = [0; 2];
    for ops in 0.. {
        let crashed = machine.fork();
        crashed.freeze_after(Some(ops));
        drop(open(Arc::new(crashed.clone())));
        let is_complete = !crashed.is_frozen();
        crashed.crash(Survival::Nothing, ops);
        crashed.set_mapped_memory(PersistenceLevel::PowerLoss);
        let (_db, parts) = open(Arc::new(crashed)).unwrap();
        let has_batch = parts.each_ref().map(|part| part.contains_key("b").unwrap());
        assert_eq!(has_batch[0], has_batch[1], "after {ops} operations of the open");
        found[usize::from(has_batch[0])] += 1;
        if is_complete {
            break;
        }
    }
    assert!(found[0] > 0 && found[1] > 0, "{found:?}");
}

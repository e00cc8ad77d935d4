//! Tables, blob files, compaction and iteration.

use std::io;
use std::path::Path;
use std::sync::Arc;

use azekura::fs::{Fault, FaultFs, FaultPlan, Fs, MemFs, OpKind, TestEnv};
use azekura::{CompressionType, Config, KvSeparationOptions, PartitionCreateOptions, PersistMode};

use super::{open, part};
use crate::world::order::Order;

/// A sync of the first direct blob file failed, so a flush carried its durable values over to a new file. The same flush
/// failed at the second direct blob file and removed the new file, which was remembered as the finished form of the
/// first one: the next flush named it in the manifest, and the database did not open any more.
#[test]
fn a_retried_flush_names_no_removed_blob_file() {
    let machine = MemFs::new();
    let fs = FaultFs::new(Arc::new(machine.clone()));
    let db = Config::new(Path::new("/db")).fs(Arc::new(fs.clone())).env(Arc::new(TestEnv::new(1))).workers(0);
    let db = db.log_segment_size(64 << 10).open().unwrap();
    let apart = KvSeparationOptions::default()
        .separation_threshold(100)
        .blob_file_target_size(1 << 20)
        .early_from(500)
        .automatic_gc(None)
        .compression(CompressionType::None);
    let p = db.open_partition("p", PartitionCreateOptions::default().with_kv_separation(apart)).unwrap();
    let put = |key: &str, byte: u8| {
        let mut batch = db.batch().durability(PersistMode::SyncData);
        batch.insert(&p, key, vec![byte; 1_000]);
        batch.commit()
    };
    put("a", 1).unwrap();
    fs.fail(FaultPlan::new(OpKind::Sync, 1, Fault::Error(io::ErrorKind::Other)).in_path(".blob"));
    assert!(put("b", 2).is_err());
    fs.repair();
    put("c", 3).unwrap();
    let names = machine.read_dir(Path::new("/db")).unwrap().into_iter().map(|entry| entry.name);
    let second = names.filter(|name| name.ends_with(".blob")).max().unwrap();
    fs.fail(FaultPlan::new(OpKind::Write, 1, Fault::Error(io::ErrorKind::StorageFull)).in_path(second));
    assert!(p.flush().is_err());
    fs.repair();
    p.flush().unwrap();
    while db.step().unwrap() {}
    drop((p, db));
    let db = open(&machine, "/db", 2);
    let p = part(&db, "p");
    assert_eq!(p.get("a").unwrap().unwrap(), [1; 1_000]);
    assert_eq!(p.get("b").unwrap(), None);
    assert_eq!(p.get("c").unwrap().unwrap(), [3; 1_000]);
}

/// A table's writer compared its first key with the empty key, which was not inserted: a comparator of keys of eight
/// bytes, which panics at any other length, poisoned the database at the first flush.
#[test]
fn a_comparator_is_given_only_known_keys() {
    for order in [Order::Sealed, Order::Fixed, Order::FixedHashed] {
        let db = open(&MemFs::new(), "/db", 1);
        let comparator = order.comparator().unwrap();
        let p = db.open_partition_with_comparator("p", Default::default(), comparator).unwrap();
        let key = |n: u32| order.seal(&n.to_be_bytes());
        (0..500).for_each(|n| p.insert(key(n), "v").unwrap());
        p.flush().unwrap();
        (0..500).step_by(3).for_each(|n| p.remove(key(n)).unwrap());
        p.major_compact().unwrap();
        assert!(p.get(key(1)).unwrap().is_some() && p.get(key(1_000)).unwrap().is_none());
        assert_eq!(p.range(key(2)..).count() + p.range(..key(2)).count(), 333);
    }
}

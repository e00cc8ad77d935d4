//! Partitions that are pools: behaviour shared with LSM partitions, and behaviour of pools only.
//!
//! Modules: `memory` (files that are used as memory), `sizes` (keys, values and pools at their limits), `space` (full
//! pools), `full_pool_crashes` (full pools that are killed), `concurrency` (several writers), `recovery` (bugs).

mod concurrency;
mod full_pool_crashes;
mod memory;
mod recovery;
mod sizes;
mod space;

use std::path::Path;
use std::sync::Arc;

use azekura::fs::Fs;
use azekura::testing::{FaultFs, MemFs, Survival, TestEnv, wait_for_readers};
use azekura::{
    Config, Database, EngineType, ErrorKind, GarbageCollection, KvSeparationOptions, Partition, PartitionCreateOptions,
    PersistMode, PersistenceLevel, PmemOptions,
};

pub(crate) const DIR: &str = "/db";

pub(crate) fn config(fs: &MemFs) -> Config {
    Config::new(DIR).fs(Arc::new(fs.clone())).env(Arc::new(TestEnv::new(1))).workers(0)
}

/// A pool of at most `max_size` bytes.
pub(crate) fn pool_options(max_size: u64) -> PartitionCreateOptions {
    let sizes = PmemOptions::default().max_size(max_size).growth_step(4 << 10);
    PartitionCreateOptions::default().engine(EngineType::Pmem(sizes))
}

/// Whether the pool has no space for the record, also when the readers of other tests have unpinned: threads of this
/// process share the epochs that delay the reuse of removed space. An attempt may free a leaf by a merge, which only
/// the next attempt can use, so there are several.
pub(crate) fn is_refused(part: &Partition, key: &[u8], value: &[u8]) -> bool {
    (0..8).all(|_| match part.insert(key, value) {
        Ok(()) => false,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::OutOfSpace);
            wait_for_readers();
            true
        }
    })
}

pub(crate) fn open_pool(db: &Database, name: &str) -> Partition {
    db.open_partition(name, pool_options(4 << 20)).unwrap()
}

#[test]
fn engine_is_fixed_and_unsupported_calls_fail() {
    let fs = MemFs::new();
    let db = config(&fs).open().unwrap();
    let part = open_pool(&db, "pool");
    let other = db.open_partition("pool", Default::default()).unwrap_err();
    assert!(other.kind() == ErrorKind::Invalid && other.to_string().contains("Pmem"), "{other}");
    db.open_partition("tree", Default::default()).unwrap();
    assert_eq!(db.open_partition("tree", pool_options(1 << 20)).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(part.gc_scan().unwrap_err().kind(), ErrorKind::Invalid);
    let both = pool_options(1 << 20).with_kv_separation(KvSeparationOptions::default());
    assert_eq!(db.open_partition("both", both).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(db.open_partition("tiny", pool_options(1)).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(part.metrics().pool.unwrap().persistence, PersistenceLevel::WalOnly);
    part.insert("large", vec![7; 100_000]).unwrap();
    assert_eq!(part.get("large").unwrap().unwrap().len(), 100_000);
    part.major_compact().unwrap();
    assert_eq!(part.metrics().pool.unwrap().checkpoints, 1);
    assert!(part.disk_space() >= 100_000);
}

/// Regression: each pool had two open files, which no limit counted. A process with the usual limits could not open, or
/// not flush, a few hundred pools.
#[test]
fn pools_keep_no_files_open() {
    let machine = MemFs::new();
    let open = || {
        let fs = FaultFs::new(Arc::new(machine.clone()));
        let config = Config::new(DIR).fs(Arc::new(fs.clone())).env(Arc::new(TestEnv::new(1))).workers(0);
        (config.open().unwrap(), fs)
    };
    let (db, fs) = open();
    let before = fs.open_count();
    for round in 0..2 {
        for n in 0..30 {
            fs.limit_open(Some(before + 3));
            let part = db.open_partition(&format!("p{n}"), pool_options(64 << 10)).unwrap();
            part.insert("k", [round]).unwrap();
            part.flush().unwrap();
        }
        assert_eq!(fs.open_count(), before);
    }
    db.checkpoint("/copy").unwrap();
    db.close().unwrap();
    let (db, fs) = open();
    assert!(fs.open_count() <= before, "{} files are open, {before} before", fs.open_count());
    assert_eq!(db.partition("p7").unwrap().get("k").unwrap().unwrap(), [1]);
}

/// The cost of a checkpoint follows the number of changes, and the checkpoint frees the WAL.
#[test]
fn checkpoint_writes_only_changed_pages() {
    let fs = MemFs::new();
    let db = config(&fs).wal_segment_size(64 << 10).max_wal_size(1 << 20).open().unwrap();
    let part = open_pool(&db, "pool");
    (0..8_000u32).for_each(|n| part.insert(n.to_be_bytes(), [1; 100]).unwrap());
    part.flush().unwrap();
    let all = part.metrics().pool.unwrap().checkpoint_bytes;
    assert!(all > 2 * 800_000, "{all}");
    part.insert(5u32.to_be_bytes(), [2; 100]).unwrap();
    part.flush().unwrap();
    let one = part.metrics().pool.unwrap().checkpoint_bytes - all;
    assert!(one < 100_000, "{one}");
    for round in 0..40u32 {
        wait_for_readers(); // the versions that the last round has replaced are free then
        (0..1_000u32).for_each(|n| part.insert((n * 7).to_be_bytes(), [round as u8; 100]).unwrap());
        while db.step().unwrap() {}
    }
    assert!(db.metrics().wal_live_bytes < 2 << 20, "{}", db.metrics().wal_live_bytes);
    assert!(part.metrics().pool.unwrap().checkpoints > 3);
    fs.crash(Survival::Everything, 0);
    let db = config(&fs).open().unwrap();
    assert_eq!(open_pool(&db, "pool").len().unwrap(), 8_000);
    assert_eq!(db.metrics().replayed_records, db.metrics().replayed_records.min(20_000));
}

#[test]
fn a_deleted_pool_leaves_nothing() {
    let fs = MemFs::new();
    let db = config(&fs).open().unwrap();
    let part = open_pool(&db, "pool");
    part.insert("k", "v").unwrap();
    part.flush().unwrap();
    let mut iter = part.iter();
    let there = |fs: &MemFs| fs.read_dir(Path::new(DIR)).unwrap().iter().any(|entry| entry.name.ends_with(".pool"));
    assert!(there(&fs));
    let other = part.clone();
    db.delete_partition(part).unwrap();
    assert!(!there(&fs));
    assert_eq!(iter.next().unwrap().unwrap().1, "v");
    assert_eq!(other.insert("k", "v").unwrap_err().kind(), ErrorKind::Closed);
    let again = open_pool(&db, "pool");
    assert!(again.is_empty().unwrap());
    again.insert("k", "w").unwrap();
    db.persist(PersistMode::SyncData).unwrap();
    drop((iter, other, again, db));
    assert_eq!(open_pool(&config(&fs).open().unwrap(), "pool").get("k").unwrap().unwrap(), "w");
}

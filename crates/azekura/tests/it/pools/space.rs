//! Full pools: they can be read, and written again after removals.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use azekura::fs::Fs;
use azekura::testing::{MemFs, TestEnv, is_in_own_process, wait_for_readers};
use azekura::{ErrorKind, Partition, PersistMode, PersistenceLevel};

use super::{DIR, config, is_refused, open_pool, pool_options};
use crate::testkit::watchdog::wait_until;

fn key(n: u32) -> [u8; 4] {
    n.wrapping_mul(0x9E37_79B9).to_be_bytes()
}

/// Regression: while any snapshot or iterator existed, the pool retained every replaced value, even if that reader
/// could not read the pool. After some rounds of writes the pool was full.
#[test]
fn readers_keep_one_value_of_each_key() {
    let fs = MemFs::new();
    let db = config(&fs).open().unwrap();
    let part = db.open_partition("pool", pool_options(1 << 20)).unwrap();
    let other = db.open_partition("other", pool_options(1 << 20)).unwrap();
    let write = |part: &Partition, round: u8| {
        (0..64u32).for_each(|n| assert!(!is_refused(part, &key(n), &[round; 1000]), "round {round}, key {n}"));
    };
    write(&part, 0);
    write(&other, 0);
    let (snapshot, mut iter, mut elsewhere) = (db.snapshot(), part.iter(), other.iter());
    let mut seen = vec![iter.next().unwrap().unwrap()];
    assert!(elsewhere.next().is_some());
    (1..100).for_each(|round| write(&part, round));
    let pool = part.metrics().pool.unwrap();
    assert!(pool.bytes - pool.free_bytes < 400_000, "{pool:?}");
    seen.extend(iter.map(Result::unwrap));
    assert_eq!(seen.len(), 64);
    assert!(seen.iter().all(|(_, value)| *value == [0; 1000]));
    assert!((0..64).all(|n| snapshot.get(&part, key(n)).unwrap().unwrap() == [0; 1000]));
    // The iterator of the other pool keeps nothing here: a snapshot is not needed for a full pool.
    drop(snapshot);
    (100..200).for_each(|round| write(&part, round));
    let entries: Vec<_> = (0..64u32).map(|n| part.get(key(n)).unwrap().unwrap()).collect();
    assert!(entries.iter().all(|value| *value == [199; 1000]));
    assert_eq!(elsewhere.count(), 63);
}

/// Regression: the pool did not reuse the space of expired records while readers existed at one sequence number, even
/// if each of them had begun after the expiry. With overlapping readers, a full pool accepted no write.
#[test]
fn overlapping_readers_keep_no_expired_space() {
    let (fs, env) = (MemFs::new(), TestEnv::new(1));
    let db = config(&fs).env(Arc::new(env.clone())).open().unwrap();
    let part = db.open_partition("pool", pool_options(1 << 20)).unwrap();
    let ttl = Duration::from_secs(1);
    let is_full = |n: u32| {
        (0..8).all(|_| {
            part.insert_with_ttl(key(n), [7; 1_000], ttl).is_err_and(|_| {
                wait_for_readers();
                true
            })
        })
    };
    let full = (0..).find(|n| is_full(*n)).unwrap();
    let mut reader = part.iter();
    env.advance(2 * ttl);
    assert!(full > 500 && is_refused(&part, &key(full), &[8; 1_000]), "the reader sees all records");
    for n in 0..full / 2 {
        let next = part.iter();
        drop(std::mem::replace(&mut reader, next));
        assert!(!is_refused(&part, &key(full + n), &[8; 1_000]), "record {n}");
    }
}

/// Regression: the memory and the file of a pool never became smaller, not even after all records were removed and the
/// database was opened again.
#[test]
fn emptied_pool_shrinks_at_the_checkpoint() {
    let fs = MemFs::new();
    let sizes = |part: &Partition| (part.metrics().pool.unwrap().bytes, part.disk_space());
    let mut db = config(&fs).open().unwrap();
    for round in 0..3u8 {
        let part = db.open_partition("pool", pool_options(8 << 20)).unwrap();
        part.insert([0], [round; 3_000]).unwrap();
        (0..1_000).for_each(|n| part.insert(key(n), [round; 2_000]).unwrap());
        part.flush().unwrap();
        assert!(sizes(&part).0 > 2_000_000 && sizes(&part).1 > 2_000_000, "{:?}", sizes(&part));
        match round {
            0 => (0..1_000).for_each(|n| part.remove(key(n)).unwrap()),
            1 => part.remove_range([0, 0, 0, 0].as_slice()..).unwrap(),
            _ => part.clear().unwrap(),
        }
        let is_small = |part: &Partition| sizes(part).0 < 200_000 && sizes(part).1 < 400_000;
        // Retired space is free when readers of other tests in this process have unpinned. A removal needs no space.
        wait_until("the pool is small", || {
            part.remove("no key").unwrap();
            part.flush().unwrap();
            is_small(&part)
        });
        drop(part);
        db.close().unwrap();
        db = config(&fs).open().unwrap();
        let part = db.partition("pool").unwrap();
        assert!(is_small(&part), "{:?}", sizes(&part));
        assert_eq!(part.get([0]).unwrap().is_some_and(|value| value == [round; 3_000]), round < 2);
        assert_eq!(part.iter().count(), usize::from(round < 2));
    }
}

/// `clear` gives the memory and the file space of a pool in memory back before it returns. A mapped pool keeps its
/// file, in which the next records find space, until the partition is deleted.
#[test]
fn clear_gives_space_back_at_once() {
    if !is_in_own_process("pools::space::clear_gives_space_back_at_once") {
        return;
    }
    for level in [PersistenceLevel::WalOnly, PersistenceLevel::ProcessCrash] {
        let fs = MemFs::new();
        fs.set_mapped_memory(level);
        let db = config(&fs).open().unwrap();
        let part = db.open_partition("pool", pool_options(8 << 20)).unwrap();
        let sizes = || (part.metrics().pool.unwrap().bytes, part.disk_space());
        let fill = || (0..1_000).for_each(|n| part.insert(key(n), [7; 2_000]).unwrap());
        fill();
        part.flush().unwrap();
        let full = sizes();
        assert!(full.0 > 2_000_000 && full.1 > 2_000_000, "{full:?}");
        part.clear().unwrap();
        match level {
            PersistenceLevel::WalOnly => assert!(sizes().0 < 100_000 && sizes().1 < 200_000, "{:?}", sizes()),
            _ => assert_eq!(sizes(), full),
        }
        fill();
        part.flush().unwrap();
        assert!(sizes().0 <= full.0 + full.0 / 50, "{:?} after {full:?}", sizes());
        db.delete_partition(part).unwrap();
        let files = fs.read_dir(Path::new(DIR)).unwrap();
        assert!(files.iter().all(|file| !file.name.contains(".pool")), "{files:?}");
    }
}

#[test]
fn full_pool_accepts_writes_after_removals() {
    if !is_in_own_process("pools::space::full_pool_accepts_writes_after_removals") {
        return;
    }
    let fs = MemFs::new();
    let db = config(&fs).open().unwrap();
    let part = db.open_partition("pool", pool_options(1 << 20)).unwrap();
    let full = |from: u32| (from..).find(|n| is_refused(&part, &key(*n), &[7; 100])).unwrap();
    let count = full(0);
    assert!((6_500..8_000).contains(&count), "{count} records of 104 bytes in 1 MiB");
    assert_eq!(part.insert(key(count), [7; 100]).unwrap_err().kind(), ErrorKind::OutOfSpace);
    // A batch that does not fit changes nothing, in no partition.
    let other = open_pool(&db, "other");
    let mut batch = db.batch();
    batch.insert(&other, "k", "v");
    (0..100).for_each(|n| batch.insert(&part, key(count + n), [7; 100]));
    assert_eq!(batch.commit().unwrap_err().kind(), ErrorKind::OutOfSpace);
    assert!(other.is_empty().unwrap() && part.len().unwrap() == u64::from(count));
    assert!((0..count).all(|n| part.get(key(n)).unwrap().unwrap() == [7; 100]));
    (0..count / 2).for_each(|n| part.remove(key(n)).unwrap());
    let more = full(count) - count;
    assert!(more > count / 3, "{more} fit into the place of {}", count / 2);
    assert!(part.metrics().pool.unwrap().bytes <= 1 << 20);
    part.flush().unwrap();
    db.close().unwrap();
    let db = config(&fs).open().unwrap();
    let part = db.open_partition("pool", pool_options(1 << 20)).unwrap();
    assert_eq!(part.len().unwrap(), u64::from(count - count / 2 + more));
    assert_eq!(part.insert(key(u32::MAX), [7; 2_000]).unwrap_err().kind(), ErrorKind::OutOfSpace);
    // A higher limit takes effect at once.
    part.set_options(pool_options(2 << 20)).unwrap();
    part.insert(key(u32::MAX), [7; 2_000]).unwrap();
}

/// Records that are removed at the end of a full WAL exist again during replay, so replay needs more space than the
/// limit.
#[test]
fn wal_larger_than_pool_is_replayed() {
    if !is_in_own_process("pools::space::wal_larger_than_pool_is_replayed") {
        return;
    }
    let fs = MemFs::new();
    let db = config(&fs).open().unwrap();
    let part = db.open_partition("pool", pool_options(1 << 20)).unwrap();
    let count = (0..).find(|n| part.insert(key(*n), [7; 100]).is_err()).unwrap();
    for round in 1..4u32 {
        (0..count).for_each(|n| part.remove(key((round - 1) * 100_000 + n)).unwrap());
        assert!((0..count - 100).all(|n| !is_refused(&part, &key(round * 100_000 + n), &[7; 100])));
        if round == 2 {
            part.flush().unwrap();
        }
    }
    db.persist(PersistMode::SyncData).unwrap();
    let crashed = fs.fork();
    let db = config(&crashed).open().unwrap();
    assert_eq!(db.partition("pool").unwrap().len().unwrap(), u64::from(count - 100));
}

#[test]
fn snapshot_pinning_full_pool_is_reported() {
    let fs = MemFs::new();
    let db = config(&fs).open().unwrap();
    let part = db.open_partition("pool", pool_options(1 << 20)).unwrap();
    // More than half of the pool, so that it has no space for the old and the new values.
    let keys = || (0..5_000).map(key);
    keys().for_each(|key| part.insert(key, [0; 100]).unwrap());
    let snapshot = db.snapshot();
    let refused = keys().find_map(|key| part.insert(key, [1; 100]).err()).unwrap();
    assert_eq!(refused.kind(), ErrorKind::OutOfSpace);
    assert!(keys().all(|key| snapshot.get(&part, key).unwrap().unwrap() == [0; 100]));
    assert!(part.metrics().pool.unwrap().version_bytes > 0);
    drop(snapshot);
    assert!(keys().all(|key| !is_refused(&part, &key, &[9; 100])));
    assert!(keys().all(|key| part.get(key).unwrap().unwrap() == [9; 100]));
}

//! `multi_get`: the values of many keys from one sequence number, with and without a cache.

use std::sync::Arc;

use azekura::fs::Fs;
use azekura::testing::{MemFs, TestEnv};
use azekura::{
    Config, Database, DirectIo, EngineType, ErrorKind, FilterPolicy, KvSeparationOptions, LeveledOptions, Partition,
    PartitionCreateOptions, PmemOptions,
};

use crate::testkit::test_dir::{TestDir, read_file, write_file};

const KEYS: u32 = 3_000;

fn key(n: u32) -> Vec<u8> {
    // Not in the order of writes.
    format!("key {:05}", n * 7_919 % 10_007).into_bytes()
}

/// Each third value is long.
fn value(n: u32, round: u32) -> Vec<u8> {
    vec![(n + round) as u8; if n.is_multiple_of(3) { 400 } else { 10 }]
}

fn config(place: &TestDir, cache: u64) -> Config {
    let config = Config::new(&place.dir).fs(Arc::clone(&place.fs)).env(Arc::new(TestEnv::new(5)));
    config.workers(0).cache_size(cache).direct_io(DirectIo::Always)
}

fn small_tables() -> PartitionCreateOptions {
    let leveled = LeveledOptions::default().target_file_size(16 << 10).l0_compaction_trigger(1_000);
    let separation = KvSeparationOptions::default().separation_threshold(300).automatic_gc(None);
    PartitionCreateOptions::default()
        .block_size(512)
        .metadata_block_size(256)
        .compaction_strategy(azekura::CompactionStrategy::Leveled(leveled))
        .with_kv_separation(separation)
}

/// Three runs and a memtable. Of the keys 0..KEYS, every fifth is removed in the last flush, every seventh is in the
/// memtable, and every eleventh is removed there.
fn fill(partition: &Partition) {
    for round in 0..3 {
        for n in (0..KEYS).filter(|n| n % (round + 1) == 0) {
            partition.insert(key(n), value(n, round)).unwrap();
        }
        if round == 2 {
            (0..KEYS).step_by(5).for_each(|n| partition.remove(key(n)).unwrap());
        }
        partition.flush().unwrap();
    }
    (0..KEYS).step_by(7).for_each(|n| partition.insert(key(n), value(n, 7)).unwrap());
    (0..KEYS).step_by(11).for_each(|n| partition.remove(key(n)).unwrap());
}

fn expected(n: u32) -> Option<Vec<u8>> {
    if n >= KEYS || n.is_multiple_of(11) {
        return None;
    }
    if n.is_multiple_of(7) {
        return Some(value(n, 7));
    }
    let round = (0..3).rev().find(|round| n.is_multiple_of(round + 1)).unwrap();
    (!n.is_multiple_of(5)).then(|| value(n, round))
}

/// Asks for every key, absent keys and duplicates, in calls of several lengths.
fn check(partition: &Partition, what: &str) {
    let wanted: Vec<u32> = (0..KEYS + 500).map(|n| n * 1_009 % (KEYS + 400)).collect();
    let mut rest = &wanted[..];
    for len in [0, 1, 2, 31, 32, 33, 127, 128, 129, 500, usize::MAX] {
        let (now, later) = rest.split_at(len.min(rest.len()));
        rest = later;
        let got = partition.multi_get(now.iter().map(|n| key(*n))).unwrap();
        assert_eq!(got.len(), now.len());
        for (n, got) in now.iter().zip(got) {
            assert!(got.as_deref() == expected(*n).as_deref(), "{what}: {n} in a call of {}", now.len());
        }
    }
}

#[test]
fn finds_newest_versions_with_any_cache() {
    for on_disk in [false, true] {
        let place = if on_disk { TestDir::on_disk() } else { TestDir::in_memory() };
        let filters = [FilterPolicy::None, FilterPolicy::Bloom { bits_per_key: 10.0 }];
        for (at, filter) in filters.into_iter().enumerate() {
            let db = config(&place, 8 << 20).open().unwrap();
            fill(&db.open_partition(&format!("{at}"), small_tables().filter_policy(filter)).unwrap());
        }
        for cache in [0, 16 << 10, 8 << 20] {
            let db = config(&place, cache).open().unwrap();
            for name in ["0", "1"] {
                let partition = db.partition(name).unwrap();
                check(&partition, "first");
                check(&partition, "second");
            }
        }
    }
}

#[test]
fn pool_returns_values_in_input_order() {
    let place = TestDir::in_memory();
    let db = config(&place, 0).open().unwrap();
    let options = PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default()));
    let pool = db.open_partition("pool", options).unwrap();
    fill(&pool);
    check(&pool, "pool");
}

#[test]
fn snapshot_reads_all_keys_at_one_seqno() {
    let place = TestDir::in_memory();
    let db = config(&place, 16 << 10).open().unwrap();
    for (name, engine) in [("lsm", EngineType::Lsm), ("pool", EngineType::Pmem(PmemOptions::default()))] {
        let partition = db.open_partition(name, PartitionCreateOptions::default().engine(engine)).unwrap();
        let keys: Vec<Vec<u8>> = (0..200).map(key).collect();
        keys.iter().for_each(|key| partition.insert(key, "old").unwrap());
        let before = db.snapshot();
        keys.iter().for_each(|key| partition.insert(key, "new").unwrap());
        partition.flush().unwrap();
        partition.major_compact().unwrap();
        assert!(before.multi_get(&partition, &keys).unwrap().iter().all(|value| value.as_deref() == Some(b"old")));
        assert!(partition.multi_get(&keys).unwrap().iter().all(|value| value.as_deref() == Some(b"new")));
    }
}

#[test]
fn damaged_block_is_an_error_of_its_keys_only() {
    let place = TestDir::in_memory();
    let db: Database = config(&place, 0).open().unwrap();
    let partition = db.open_partition("p", PartitionCreateOptions::default().block_size(512)).unwrap();
    (0..KEYS).for_each(|n| partition.insert(key(n), value(n, 0)).unwrap());
    partition.flush().unwrap();
    drop((partition, db));
    let memory: &MemFs = place.mem_fs.as_ref().unwrap();
    let names = memory.read_dir(&place.dir).unwrap().into_iter().map(|entry| entry.name);
    let table = place.dir.join(names.filter(|name| name.ends_with(".sst")).max().unwrap());
    let mut bytes = read_file(memory, &table);
    bytes[700] ^= 1; // in the first data blocks
    write_file(memory, &table, &bytes);
    let db = config(&place, 0).open().unwrap();
    let partition = db.partition("p").unwrap();
    let mut sorted: Vec<Vec<u8>> = (0..KEYS).map(key).collect();
    sorted.sort();
    let error = partition.multi_get(&sorted[..200]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corruption);
    assert!(error.file().is_some(), "{error}");
    assert!(partition.multi_get(&sorted[200..]).unwrap().iter().all(Option::is_some));
}

//! Every engine of the build through every call of the trait, on a directory of its own.

use crate::engine::map::MapEngine;
use crate::engine::{Compression, Engine, Options, Scan, Sync, registry};
use std::collections::BTreeMap;
use std::path::Path;

const RECORDS: u32 = 3000;

fn options(sync: Sync, compression: Compression, separate_from: Option<u64>) -> Options {
    Options {
        cache_bytes: 8 << 20,
        memtable_bytes: 1 << 20,
        block_bytes: 4096,
        table_bytes: None,
        sync,
        compression,
        workers: 2,
        separate_from,
        data_bytes: 0,
    }
}

/// What an engine must hold.
type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn key(i: u32) -> Vec<u8> {
    format!("key{i:08}").into_bytes()
}

fn value(i: u32, generation: u32) -> Vec<u8> {
    let mut value = vec![b'v'; 20 + (i as usize * 37) % 1500];
    value[..4].copy_from_slice(&i.to_be_bytes());
    value[4..8].copy_from_slice(&generation.to_be_bytes());
    value
}

fn get(engine: &dyn Engine, key: &[u8]) -> Option<Vec<u8>> {
    let mut value = None;
    let found = engine.get(key, &mut |bytes| value = Some(bytes.to_vec())).unwrap();
    assert_eq!(found, value.is_some());
    value
}

fn scan(engine: &dyn Engine, scan: Scan<'_>, limit: usize) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut records = Vec::new();
    let collect = &mut |k: &[u8], v: &[u8]| {
        assert!(records.len() < limit, "a scan continued after its end");
        records.push((k.to_vec(), v.to_vec()));
        records.len() < limit
    };
    engine.scan(scan, collect).unwrap();
    records
}

/// Gets, and scans both ways from the ends, from keys that are there and from keys that are not.
fn compare(engine: &dyn Engine, model: &Model, name: &str) {
    for i in (0..RECORDS + 10).step_by(7) {
        assert_eq!(get(engine, &key(i)).as_ref(), model.get(&key(i)), "{name}: {i}");
    }
    let pairs = |records: Vec<(&Vec<u8>, &Vec<u8>)>| -> Vec<(Vec<u8>, Vec<u8>)> {
        records.into_iter().map(|(k, v)| (k.clone(), v.clone())).collect()
    };
    assert!(
        scan(engine, Scan { from: None, ascends: true }, usize::MAX) == pairs(model.iter().collect()),
        "{name}: everything, up"
    );
    assert!(
        scan(engine, Scan { from: None, ascends: false }, usize::MAX) == pairs(model.iter().rev().collect()),
        "{name}: everything, down"
    );
    let starts = [b"a".to_vec(), key(0), key(10), key(11), b"key00000011x".to_vec(), key(RECORDS - 1), b"z".to_vec()];
    for start in &starts {
        for limit in [1, 10, 1000] {
            let up = pairs(model.range(start.clone()..).take(limit).collect());
            let down = pairs(model.range(..=start.clone()).rev().take(limit).collect());
            assert!(
                scan(engine, Scan { from: Some(start), ascends: true }, limit) == up,
                "{name}: {limit} up from {start:?}"
            );
            assert!(
                scan(engine, Scan { from: Some(start), ascends: false }, limit) == down,
                "{name}: {limit} down from {start:?}"
            );
        }
    }
}

/// Puts, overwrites, deletes and batches, on engine and model alike.
fn change(engine: &dyn Engine, model: &mut Model) {
    for i in (0..RECORDS).rev() {
        engine.put(&key(i), &value(i, 1)).unwrap();
        model.insert(key(i), value(i, 1));
    }
    engine.flush().unwrap();
    for i in (0..RECORDS).step_by(3) {
        engine.put(&key(i), &value(i, 2)).unwrap();
        model.insert(key(i), value(i, 2));
    }
    for i in (0..RECORDS + 5).step_by(11) {
        engine.delete(&key(i)).unwrap();
        model.remove(&key(i));
    }
    let batch: Vec<_> = (RECORDS / 2..RECORDS / 2 + 100).map(|i| (key(i), value(i, 3))).collect();
    engine.put_batch(&batch).unwrap();
    model.extend(batch);
}

fn try_out(name: &str, dir: &Path, options: &Options) {
    let mut model = Model::new();
    let engine = registry::open(name, dir, options).unwrap();
    assert!(
        scan(engine.as_ref(), Scan { from: None, ascends: true }, 1).is_empty()
            && scan(engine.as_ref(), Scan { from: None, ascends: false }, 1).is_empty()
    );
    change(engine.as_ref(), &mut model);
    compare(engine.as_ref(), &model, name);
    engine.flush().unwrap();
    engine.sync().unwrap();
    compare(engine.as_ref(), &model, name);
    engine.busy().unwrap();
    engine.stats();
    engine.put(&key(1), &value(1, 9)).unwrap(); // after the last sync, made durable by the clean close
    model.insert(key(1), value(1, 9));
    engine.close().unwrap();

    let engine = registry::open(name, dir, options).unwrap();
    compare(engine.as_ref(), &model, name);
    engine.close().unwrap();
}

/// Another partition has records of its own, and is found again by its name.
fn try_partition(name: &str, dir: &Path, options: &Options) {
    let engine = registry::open(name, dir, options).unwrap();
    let other = match engine.partition("other") {
        Ok(other) => other,
        Err(error) => return assert!(error.to_string().contains("no partitions"), "{name}: {error}"),
    };
    engine.put(b"a", b"first").unwrap();
    other.put(b"a", b"second").unwrap();
    other.put(b"b", b"third").unwrap();
    assert_eq!(get(engine.as_ref(), b"a").unwrap(), b"first", "{name}");
    assert_eq!(get(engine.as_ref(), b"b"), None, "{name}");
    other.flush().unwrap();
    engine.sync().unwrap();
    drop(other);
    engine.close().unwrap();

    let engine = registry::open(name, dir, options).unwrap();
    let other = engine.partition("other").unwrap();
    let again = engine.partition("other").unwrap();
    assert_eq!(get(other.as_ref(), b"a").unwrap(), b"second", "{name}");
    assert_eq!(get(again.as_ref(), b"b").unwrap(), b"third", "{name}");
    assert_eq!(scan(engine.as_ref(), Scan { from: None, ascends: true }, 9).len(), 1, "{name}");
    drop((other, again));
    engine.close().unwrap();
}

/// Two threads change the same two keys: no change is lost, and both keys always have the same value.
fn try_transactions(name: &str, dir: &Path, options: &Options) {
    let engine = registry::open(name, dir, options).unwrap();
    let keys = [key(0), key(1)];
    engine.put_batch(&[(key(0), vec![0]), (key(1), vec![0])]).unwrap();
    if let Err(error) = engine.transact(&keys, &mut |_, value| Ok(value.to_vec())) {
        return assert!(error.to_string().contains("no transactions"), "{name}: {error}");
    }
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..20 {
                    let mut values = [0; 2];
                    let add_one = &mut |position: usize, value: &[u8]| {
                        values[position] = value[0];
                        Ok(vec![value[0] + 1])
                    };
                    engine.transact(&keys, add_one).unwrap();
                    assert_eq!(values[0], values[1], "{name}");
                }
            });
        }
    });
    assert_eq!(keys.map(|key| get(engine.as_ref(), &key).unwrap()), [[40], [40]], "{name}");
    engine.transact(&[key(2)], &mut |_, value| Ok(value.to_vec())).unwrap_err();
    engine.close().unwrap();
}

/// Many threads write and read through one handle, each write synced.
fn try_threads(name: &str, dir: &Path, options: &Options) {
    let engine = registry::open(name, dir, options).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let engine = engine.as_ref();
            scope.spawn(move || {
                for i in 0..5 {
                    let key = key(thread * 100 + i);
                    engine.put(&key, &value(i, thread)).unwrap();
                    assert_eq!(get(engine, &key), Some(value(i, thread)));
                }
            });
        }
    });
    assert_eq!(scan(engine.as_ref(), Scan { from: None, ascends: true }, 100).len(), 20, "{name}");
    engine.close().unwrap();
}

fn engines() -> Vec<&'static str> {
    let mut engines = registry::names();
    if engines.contains(&"rocksdb") {
        engines.push("rocksdb-hash");
    }
    if engines.contains(&"fjall") {
        engines.push("fjall-tx");
    }
    engines
}

#[test]
fn every_engine_keeps_what_it_is_given() {
    for name in engines() {
        let dir = tempfile::tempdir().unwrap();
        try_out(name, &dir.path().join("a/missing"), &options(Sync::None, Compression::None, None));
    }
}

#[test]
fn a_map_keeps_what_it_is_given() {
    let (map, mut model) = (MapEngine::default(), Model::new());
    change(&map, &mut model);
    compare(&map, &model, "map");
}

#[test]
fn every_engine_compresses_and_separates_values() {
    for name in engines() {
        let dir = tempfile::tempdir().unwrap();
        try_out(name, &dir.path().join("a/missing"), &options(Sync::None, Compression::Lz4, Some(512)));
    }
}

#[test]
fn every_engine_has_or_refuses_partitions() {
    for name in engines() {
        let dir = tempfile::tempdir().unwrap();
        try_partition(name, dir.path(), &options(Sync::None, Compression::None, None));
    }
}

#[test]
fn transactions_are_atomic_and_isolated() {
    for name in engines() {
        let dir = tempfile::tempdir().unwrap();
        try_transactions(name, dir.path(), &options(Sync::None, Compression::None, None));
    }
}

#[test]
fn every_engine_is_shared_by_threads_and_syncs() {
    for name in engines() {
        for sync in [Sync::Data, Sync::All] {
            let dir = tempfile::tempdir().unwrap();
            try_threads(name, dir.path(), &options(sync, Compression::None, None));
        }
    }
}

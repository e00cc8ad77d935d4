//! Operations on a pool, as an image and as a mapped file, relative to the same operations on a `BTreeMap`.
//!
//! A new pool is a mapped file on a file system in memory; its puts are not appended to the WAL.
//! `cargo bench -p azekura --bench pools`; scans: see `scans.rs`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use azekura::{Config, Database, EngineType, Partition, PartitionCreateOptions, PmemOptions, Slice};
use divan::{Bencher, black_box};
use tempfile::TempDir;

const RECORDS: u64 = 200_000;
const KINDS: [&str; 2] = ["image", "mapped"];

fn main() {
    divan::main();
}

/// An open database with one pool, removed when dropped.
struct Pool {
    partition: Partition,
    _database: Database,
    _dir: TempDir,
}

fn key(index: u64) -> [u8; 16] {
    let mut key = [b'0'; 16];
    key[..8].copy_from_slice(&index.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    key
}

/// The next key of a fixed pseudo-random order; `first` moves it out of the written range.
fn next_key(state: &mut u64, first: u64) -> [u8; 16] {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    key(first + (*state >> 33) % RECORDS)
}

/// Creates a pool with that number of records.
fn load(kind: &str, records: u64) -> Pool {
    let dir = if kind == "mapped" { TempDir::new_in("/dev/shm") } else { TempDir::new() };
    let dir = dir.expect("a temporary directory");
    let database = Config::new(dir.path()).open().expect("an empty directory opens");
    let options = PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default().max_size(8 << 30)));
    let partition = database.open_partition("bench", options).expect("it is new");
    (0..records).for_each(|index| partition.insert(key(index), [7; 100]).expect("the disk has room"));
    Pool { partition, _database: database, _dir: dir }
}

fn load_map() -> BTreeMap<[u8; 16], Box<[u8]>> {
    (0..RECORDS).map(|index| (key(index), Box::from([7; 100]))).collect()
}

#[divan::bench(args = KINDS)]
fn get(bencher: Bencher<'_, '_>, kind: &str) {
    let pool = load(kind, RECORDS);
    let mut state = 1;
    bencher.bench_local(|| black_box(pool.partition.get(next_key(&mut state, 0)).expect("reads work")));
}

#[divan::bench]
fn get_from_btree_map(bencher: Bencher<'_, '_>) {
    let map = load_map();
    let mut state = 1;
    bencher.bench_local(|| black_box(map.get(&next_key(&mut state, 0)).map(|value| Slice::from(&**value))));
}

#[divan::bench(args = KINDS)]
fn get_missing(bencher: Bencher<'_, '_>, kind: &str) {
    let pool = load(kind, RECORDS);
    let mut state = 1;
    bencher.bench_local(|| black_box(pool.partition.get(next_key(&mut state, 1 << 48)).expect("reads work")));
}

#[divan::bench]
fn get_missing_from_btree_map(bencher: Bencher<'_, '_>) {
    let map = load_map();
    let mut state = 1;
    bencher.bench_local(|| black_box(map.contains_key(&next_key(&mut state, 1 << 48))));
}

/// Puts of new keys. With two threads, each puts every second key.
#[divan::bench(args = KINDS, threads = [1, 2], sample_count = 20, sample_size = 5_000)]
fn put(bencher: Bencher<'_, '_>, kind: &str) {
    let pool = load(kind, 0);
    let index = AtomicU64::new(0);
    bencher.bench(|| {
        let index = index.fetch_add(1, Ordering::Relaxed);
        pool.partition.insert(key(index), black_box([7; 100])).expect("the disk has room");
    });
}

#[divan::bench(sample_count = 20, sample_size = 5_000)]
fn put_into_btree_map(bencher: Bencher<'_, '_>) {
    let mut map = BTreeMap::<[u8; 16], Box<[u8]>>::new();
    let mut index = 0;
    bencher.bench_local(|| {
        index += 1;
        map.insert(key(index), Box::from(black_box([7; 100])))
    });
}

/// Puts of existing keys.
#[divan::bench(args = KINDS, sample_count = 20, sample_size = 5_000)]
fn replace(bencher: Bencher<'_, '_>, kind: &str) {
    let pool = load(kind, RECORDS);
    let mut state = 1;
    bencher.bench_local(|| {
        pool.partition.insert(next_key(&mut state, 0), black_box([8; 100])).expect("the disk has room");
    });
}

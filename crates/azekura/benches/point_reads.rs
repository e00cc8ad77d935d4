//! Point reads from the cache, by what answers them: filters alone, one cached record, any cached record, the memtable;
//! and the same with restart intervals of 16, 4 and 1.
//!
//! `cargo bench -p azekura --bench point_reads`

use azekura::{Config, DataBlockIndexType, Database, Partition, PartitionCreateOptions};
use divan::{Bencher, black_box};
use tempfile::TempDir;

const RECORDS: u64 = 200_000;

fn main() {
    divan::main();
}

/// An open database of [`RECORDS`] records, removed when dropped.
struct Loaded {
    partition: Partition,
    _database: Database,
    _dir: TempDir,
}

/// The key of a record: spread over the key space, so that neighbours in time are not neighbours in order.
fn key(index: u64) -> [u8; 16] {
    let mut key = [b'0'; 16];
    key[..8].copy_from_slice(&index.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    key
}

fn load(options: PartitionCreateOptions, flush: bool) -> Loaded {
    let dir = TempDir::new().expect("a temporary directory");
    let database = Config::new(dir.path()).cache_size(1 << 30).open().expect("an empty directory opens");
    let partition = database.open_partition("bench", options.max_memtable_size(256 << 20)).expect("it is new");
    for index in 0..RECORDS {
        partition.insert(key(index), [index as u8; 100]).expect("the disk has room");
    }
    if flush {
        partition.flush().expect("the disk has room");
    }
    let loaded = Loaded { partition, _database: database, _dir: dir };
    (0..RECORDS).for_each(|index| _ = loaded.partition.get(key(index)).expect("it was written"));
    loaded
}

/// Gets keys in a fixed pseudo-random order; `first` moves them out of the written range.
fn get(bencher: Bencher<'_, '_>, loaded: &Loaded, first: u64) {
    let mut state = 1u64;
    bencher.bench_local(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        black_box(loaded.partition.get(key(first + (state >> 33) % RECORDS)).expect("reads work"))
    });
}

#[divan::bench]
fn present(bencher: Bencher<'_, '_>) {
    get(bencher, &load(PartitionCreateOptions::default(), true), 0);
}

#[divan::bench]
fn missing(bencher: Bencher<'_, '_>) {
    get(bencher, &load(PartitionCreateOptions::default(), true), 1 << 48);
}

#[divan::bench]
fn same(bencher: Bencher<'_, '_>) {
    let loaded = load(PartitionCreateOptions::default(), true);
    bencher.bench_local(|| black_box(loaded.partition.get(key(RECORDS / 2)).expect("reads work")));
}

#[divan::bench]
fn memtable(bencher: Bencher<'_, '_>) {
    get(bencher, &load(PartitionCreateOptions::default(), false), 0);
}

#[divan::bench]
fn memtable_missing(bencher: Bencher<'_, '_>) {
    get(bencher, &load(PartitionCreateOptions::default(), false), 1 << 48);
}

/// A shorter restart interval costs space and saves comparisons.
#[divan::bench(args = [16, 4, 1])]
fn restart_interval(bencher: Bencher<'_, '_>, interval: u8) {
    let options = PartitionCreateOptions::default().data_block_index_type(DataBlockIndexType::BinarySearch);
    get(bencher, &load(options.restart_interval(interval), true), 0);
}

#[divan::bench(args = ["binary_search", "binary_and_hash", "fingerprint"])]
fn data_block_index(bencher: Bencher<'_, '_>, layout: &str) {
    let index_type = match layout {
        "binary_search" => DataBlockIndexType::BinarySearch,
        "binary_and_hash" => DataBlockIndexType::BinaryAndHash,
        _ => DataBlockIndexType::Fingerprint,
    };
    get(bencher, &load(PartitionCreateOptions::default().data_block_index_type(index_type), true), 0);
}

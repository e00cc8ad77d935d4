//! Point reads from the cache, by what answers them: filters alone, one cached record, any cached record, the memtable;
//! by the type of data blocks, with and without a filter; and in data blocks alone. Also point reads whose block is
//! mostly not in the cache.
//!
//! `cargo bench -p azekura --bench point_reads`

use std::sync::Arc;

use azekura::fs::{DiskFs, Fs};
use azekura::inspect::{DataBlockPosition, DataBlocks};
use azekura::{
    Config, DataBlockIndexType, Database, FilterPolicy, KvSeparationOptions, Partition, PartitionCreateOptions,
};
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
    dir: TempDir,
}

/// The key of a record: spread over the key space, so that neighbours in time are not neighbours in order.
fn key(index: u64) -> [u8; 16] {
    let mut key = [b'0'; 16];
    key[..8].copy_from_slice(&index.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    key
}

fn load(options: PartitionCreateOptions, flush: bool) -> Loaded {
    load_records(options, RECORDS, flush)
}

fn load_records(options: PartitionCreateOptions, records: u64, flush: bool) -> Loaded {
    let dir = TempDir::new().expect("a temporary directory");
    let database = Config::new(dir.path()).cache_size(1 << 30).open().expect("an empty directory opens");
    let partition = database.open_partition("bench", options.max_memtable_size(256 << 20)).expect("it is new");
    for index in 0..records {
        partition.insert(key(index), [index as u8; 100]).expect("the disk has room");
    }
    if flush {
        partition.flush().expect("the disk has room");
    }
    let loaded = Loaded { partition, _database: database, dir };
    (0..records).for_each(|index| _ = loaded.partition.get(key(index)).expect("it was written"));
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

/// As `present`, without a copy of the value.
#[divan::bench]
fn present_lent(bencher: Bencher<'_, '_>) {
    let loaded = load(PartitionCreateOptions::default(), true);
    let mut state = 1u64;
    bencher.bench_local(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let key = key((state >> 33) % RECORDS);
        black_box(loaded.partition.get_with(key, |value| value[0]).expect("reads work"))
    });
}

/// A block that is mostly not in the cache, but in the page cache. Half of each value does not compress.
#[divan::bench(args = ["lz4", "none"])]
fn cold(bencher: Bencher<'_, '_>, compression: &str) {
    let dir = TempDir::new().expect("a temporary directory");
    let database = Config::new(dir.path()).cache_size(8 << 20).workers(0).open().expect("an empty directory opens");
    let options = PartitionCreateOptions::default().max_memtable_size(256 << 20);
    let options = options.compression(compression.parse().expect("the name of a codec"));
    let partition = database.open_partition("bench", options).expect("it is new");
    let mut state = 1u64;
    for index in 0..RECORDS {
        let mut value = [0; 100];
        value[..50].chunks_mut(8).for_each(|bytes| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            bytes.copy_from_slice(&(state ^ (state >> 29)).to_le_bytes()[..bytes.len()]);
        });
        partition.insert(key(index), value).expect("the disk has room");
    }
    partition.flush().expect("the disk has room");
    let loaded = Loaded { partition, _database: database, dir };
    get(bencher, &loaded, 0);
}

#[divan::bench]
fn missing(bencher: Bencher<'_, '_>) {
    get(bencher, &load(PartitionCreateOptions::default(), true), 1 << 48);
}

/// Number of records of [`many_keys`]: more than the second-level cache of the processor holds.
const MANY_RECORDS: u64 = 1_000_000;

/// Sets of random keys of [`MANY_RECORDS`], by single gets and by one `multi_get`. Compare the variants of one length.
#[divan::bench(args = ["get 32", "multi_get 32", "get 128", "multi_get 128"])]
fn many_keys(bencher: Bencher<'_, '_>, variant: &str) {
    let (call, len) = variant.split_once(' ').expect("a call and a number of keys");
    let len: u64 = len.parse().expect("a number of keys");
    let loaded = load_records(PartitionCreateOptions::default(), MANY_RECORDS, true);
    let mut state = 1u64;
    let keys = move || -> Vec<[u8; 16]> {
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            key((state >> 33) % MANY_RECORDS)
        };
        (0..len).map(|_| next()).collect()
    };
    let partition = &loaded.partition;
    bencher.with_inputs(keys).bench_local_values(|keys| match call {
        "get" => keys.iter().map(|key| partition.get(key).expect("reads work")).collect::<Vec<_>>(),
        _ => partition.multi_get(keys).expect("reads work"),
    });
}

/// Values of 4 KiB in blob files and in tables: from the cache and, with a cache for an eighth of them, mostly from
/// files.
#[divan::bench(args = ["cached separated", "cached inline", "uncached separated", "uncached inline"])]
fn large_values(bencher: Bencher<'_, '_>, variant: &str) {
    const VALUES: u64 = 20_000;
    let dir = TempDir::new().expect("a temporary directory");
    let cache_size = if variant.starts_with("cached") { 1 << 30 } else { VALUES * 4096 / 8 };
    let database = Config::new(dir.path()).cache_size(cache_size).open().expect("an empty directory opens");
    let options = match variant.ends_with("separated") {
        true => PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default()),
        false => PartitionCreateOptions::default(),
    };
    let partition = database.open_partition("bench", options).expect("it is new");
    for index in 0..VALUES {
        let value: Vec<u8> =
            (0..512u64).flat_map(|word| (index + word).wrapping_mul(0x9e37_79b9).to_be_bytes()).collect();
        partition.insert(key(index), &value).expect("the disk has room");
    }
    partition.flush().expect("the disk has room");
    (0..VALUES).for_each(|index| _ = partition.get(key(index)).expect("it was written"));
    let mut state = 1u64;
    bencher.bench_local(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        black_box(partition.get(key((state >> 33) % VALUES)).expect("reads work"))
    });
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

const INDEX_TYPES: [&str; 3] = ["binary_search", "binary_and_hash", "fingerprint"];

fn index_type(name: &str) -> DataBlockIndexType {
    match name {
        "binary_search" => DataBlockIndexType::BinarySearch,
        "binary_and_hash" => DataBlockIndexType::BinaryAndHash,
        _ => DataBlockIndexType::Fingerprint,
    }
}

#[divan::bench(args = INDEX_TYPES)]
fn data_block_index(bencher: Bencher<'_, '_>, name: &str) {
    let options = PartitionCreateOptions::default().data_block_index_type(index_type(name));
    get(bencher, &load(options, true), 0);
}

/// Missing keys without a filter, so that a data block answers.
#[divan::bench(args = INDEX_TYPES)]
fn data_block_index_missing(bencher: Bencher<'_, '_>, name: &str) {
    let options = PartitionCreateOptions::default().data_block_index_type(index_type(name));
    get(bencher, &load(options.filter_policy(FilterPolicy::None), true), 1 << 48);
}

/// Index and filters that are pinned by the open table.
#[divan::bench(args = INDEX_TYPES)]
fn pinned_index_and_filters(bencher: Bencher<'_, '_>, name: &str) {
    let options = PartitionCreateOptions::default().data_block_index_type(index_type(name));
    get(bencher, &load(options.partition_index_and_filters(false).cache_index_and_filter_blocks(false), true), 0);
}

/// A present key in its data block, without memtable, filter, index and cache. Block sizes of 4 KiB and 16 KiB.
#[divan::bench(args = INDEX_TYPES, consts = [4096, 16384])]
fn in_data_block<const BLOCK_SIZE: u32>(bencher: Bencher<'_, '_>, name: &str) {
    let options = PartitionCreateOptions::default().data_block_index_type(index_type(name)).block_size(BLOCK_SIZE);
    let loaded = load(options, true);
    let fs: Arc<dyn Fs> = Arc::new(DiskFs::new());
    let mut entries: Vec<(DataBlockPosition, Vec<u8>)> = Vec::new();
    let blocks = DataBlocks::read(&fs, loaded.dir.path(), &mut |position, key| entries.push((position, key.to_vec())))
        .expect("the files are complete");
    let mut state = 1u64;
    bencher.bench_local(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (position, key) = &entries[(state >> 33) as usize % entries.len()];
        black_box(blocks.find(*position, key).expect("reads work"))
    });
}

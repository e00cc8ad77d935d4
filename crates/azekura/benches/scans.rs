//! Scans of 100,000 records and short range reads: in the memtable, in tables of each type of data block, and in a
//! pool. Scans of absent prefixes, with and without prefix filters. A queue, early and late.
//!
//! `cargo bench -p azekura --bench scans`

use azekura::{
    CompactionStrategy, Config, DataBlockIndexType, Database, EngineType, LeveledOptions, Partition,
    PartitionCreateOptions, PmemOptions, PrefixExtractor,
};
use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use tempfile::TempDir;

const RECORDS: u64 = 100_000;
/// The places of the records.
const PLACES: [&str; 5] = ["memtable", "binary_search", "binary_and_hash", "fingerprint", "pool"];

fn main() {
    divan::main();
}

/// An open database of [`RECORDS`] records, removed when dropped.
struct Loaded {
    partition: Partition,
    _database: Database,
    _dir: TempDir,
}

fn key(index: u64) -> [u8; 16] {
    let mut key = [b'0'; 16];
    key[..8].copy_from_slice(&index.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    key
}

fn load(place: &str) -> Loaded {
    let options = PartitionCreateOptions::default().max_memtable_size(256 << 20);
    let options = match place {
        "binary_search" => options.data_block_index_type(DataBlockIndexType::BinarySearch),
        "binary_and_hash" => options.data_block_index_type(DataBlockIndexType::BinaryAndHash),
        "fingerprint" => options.data_block_index_type(DataBlockIndexType::Fingerprint),
        "pool" => options.engine(EngineType::Pmem(PmemOptions::default())),
        _ => options,
    };
    let dir = TempDir::new().expect("a temporary directory");
    let database = Config::new(dir.path()).cache_size(1 << 30).open().expect("an empty directory opens");
    let partition = database.open_partition("bench", options).expect("it is new");
    for index in 0..RECORDS {
        partition.insert(key(index), [index as u8; 100]).expect("the disk has room");
    }
    if place != "memtable" {
        partition.flush().expect("the disk has room");
    }
    assert_eq!(partition.iter().count() as u64, RECORDS);
    Loaded { partition, _database: database, _dir: dir }
}

/// Number of runs of [`absent_prefix`] on level 0.
const RUNS: u64 = 8;

/// Scans of a prefix that no key has, with and without prefix filters, over 8 runs.
#[divan::bench(args = [false, true])]
fn absent_prefix(bencher: Bencher<'_, '_>, has_filters: bool) {
    let leveled = LeveledOptions::default().l0_compaction_trigger(1_000);
    let mut options = PartitionCreateOptions::default().compaction_strategy(CompactionStrategy::Leveled(leveled));
    if has_filters {
        options = options.prefix_extractor(PrefixExtractor::Fixed(8));
    }
    let dir = TempDir::new().expect("a temporary directory");
    let database = Config::new(dir.path()).workers(0).cache_size(1 << 30).open().expect("an empty directory opens");
    let partition = database.open_partition("bench", options).expect("it is new");
    for run in 0..RUNS {
        for index in (run..RECORDS).step_by(RUNS as usize) {
            partition.insert(key(index), [index as u8; 100]).expect("the disk has room");
        }
        partition.flush().expect("the disk has room");
    }
    let mut index = RECORDS;
    bencher.bench_local(|| {
        index += 1;
        black_box(partition.prefix(&key(index)[..8]).next().is_none())
    });
}

/// Queues in one memtable that is never full, in memtables that are flushed, and in a pool, with the number of rounds
/// before the measurement.
const QUEUES: [(&str, u64); 6] = [
    ("one_memtable", 10_000),
    ("one_memtable", 1_000_000),
    ("flushed", 10_000),
    ("flushed", 1_000_000),
    ("pool", 10_000),
    ("pool", 1_000_000),
];

/// A round of a queue: an insertion at the tail, a scan for the first key, and its removal.
#[divan::bench(args = QUEUES, sample_count = 100, sample_size = 100)]
fn queue_round(bencher: Bencher<'_, '_>, queue: (&str, u64)) {
    const DEPTH: u64 = 100;
    let (place, earlier) = queue;
    let dir = TempDir::new().expect("a temporary directory");
    let database = Config::new(dir.path()).open().expect("an empty directory opens");
    let options = PartitionCreateOptions::default();
    let options = match place {
        "pool" => options.engine(EngineType::Pmem(PmemOptions::default())),
        "flushed" => options,
        _ => options.max_memtable_size(1 << 30),
    };
    let partition = database.open_partition("queue", options).expect("it is new");
    let mut tail = 0u64;
    let mut insert = || {
        tail += 1;
        partition.insert(tail.to_be_bytes(), [tail as u8; 100]).expect("the disk has room");
    };
    (0..DEPTH).for_each(|_| insert());
    let mut round = || {
        insert();
        let (first, _) = partition.first_key_value().expect("reads work").expect("the queue is not empty");
        partition.remove(&first).expect("the disk has room");
    };
    (0..earlier).for_each(|_| round());
    bencher.bench_local(round);
}

#[divan::bench(args = PLACES, sample_count = 20, sample_size = 1)]
fn forward(bencher: Bencher<'_, '_>, place: &str) {
    let loaded = load(place);
    bencher.counter(ItemsCount::new(RECORDS)).bench_local(|| {
        let mut iter = loaded.partition.iter();
        while let Some(record) = iter.next_ref() {
            black_box(record.expect("reads work"));
        }
    });
}

#[divan::bench(args = PLACES, sample_count = 20, sample_size = 1)]
fn backward(bencher: Bencher<'_, '_>, place: &str) {
    let loaded = load(place);
    bencher.counter(ItemsCount::new(RECORDS)).bench_local(|| {
        let mut iter = loaded.partition.iter();
        while let Some(record) = iter.next_back_ref() {
            black_box(record.expect("reads work"));
        }
    });
}

/// A scan whose records outlive the iterator.
#[divan::bench(args = PLACES, sample_count = 20, sample_size = 1)]
fn forward_owned(bencher: Bencher<'_, '_>, place: &str) {
    let loaded = load(place);
    bencher.counter(ItemsCount::new(RECORDS)).bench_local(|| {
        loaded.partition.iter().for_each(|record| _ = black_box(record.expect("reads work")));
    });
}

/// A new iterator, a seek to an existing key, and ten records.
#[divan::bench(args = PLACES, sample_count = 50, sample_size = 1_000)]
fn seek_and_10_records(bencher: Bencher<'_, '_>, place: &str) {
    let loaded = load(place);
    let mut state = 1u64;
    bencher.bench_local(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut iter = loaded.partition.range(key((state >> 33) % RECORDS)..);
        for _ in 0..10 {
            black_box(iter.next_ref().transpose().expect("reads work"));
        }
    });
}

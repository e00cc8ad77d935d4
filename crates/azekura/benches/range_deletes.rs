//! Reads beside range deletes: gets with 100,000 overlapping or disjoint ones and without any, in memory, flushed,
//! compacted and in a pool; scans over a range that was removed.
//!
//! `cargo bench -p azekura --bench range_deletes`

use azekura::{Config, Database, EngineType, Partition, PartitionCreateOptions, PmemOptions};
use divan::{Bencher, black_box};
use tempfile::TempDir;

const RECORDS: u64 = 200_000;
const RANGE_DELETES: u64 = 100_000;

fn main() {
    divan::main();
}

/// Where the records and the range deletes are, and what the range deletes cover: nothing (`disjoint`, one between two
/// records), or older versions of the records (`overlapping`).
const PLACES: [&str; 11] = [
    "memory",
    "memory_disjoint",
    "memory_overlapping",
    "tables",
    "tables_disjoint",
    "tables_overlapping",
    "compacted",
    "compacted_disjoint",
    "compacted_overlapping",
    "pool",
    "pool_overlapping",
];

/// A database that is removed when dropped.
struct Loaded {
    partition: Partition,
    _database: Database,
    _dir: TempDir,
}

fn key(index: u64) -> [u8; 8] {
    index.to_be_bytes()
}

/// Writes [`RECORDS`] records with even keys.
fn write_records(partition: &Partition) {
    (0..RECORDS).for_each(|index| partition.insert(key(2 * index), [index as u8; 100]).expect("the disk has room"));
}

fn load(place: &str) -> Loaded {
    let dir = TempDir::new().expect("a temporary directory");
    let database = Config::new(dir.path()).cache_size(1 << 30).open().expect("an empty directory opens");
    let options = PartitionCreateOptions::default().max_memtable_size(256 << 20);
    let options = match place.starts_with("pool") {
        true => options.engine(EngineType::Pmem(PmemOptions::default())),
        false => options,
    };
    let partition = database.open_partition("bench", options).expect("it is new");
    let flush = || {
        if !place.starts_with("memory") && !place.starts_with("pool") {
            partition.flush().expect("the disk has room")
        }
        if place.starts_with("compacted") {
            partition.major_compact().expect("the disk has room")
        }
    };
    write_records(&partition);
    flush();
    for n in 0..RANGE_DELETES {
        let odd = 2 * (n * 7_919 % RANGE_DELETES) + 1;
        if place.ends_with("disjoint") {
            partition.remove_range(key(odd)..key(odd + 1)).expect("the disk has room");
        } else if place.ends_with("overlapping") {
            partition.remove_range(key(odd)..key(odd + RECORDS)).expect("the disk has room");
        }
    }
    if place.ends_with("overlapping") {
        write_records(&partition);
    }
    flush();
    (0..RECORDS).for_each(|index| _ = partition.get(key(2 * index)).expect("reads work").expect("it was written"));
    Loaded { partition, _database: database, _dir: dir }
}

#[divan::bench(args = PLACES)]
fn get(bencher: Bencher<'_, '_>, place: &str) {
    let loaded = load(place);
    let mut state = 1u64;
    bencher.bench_local(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        black_box(loaded.partition.get(key(2 * ((state >> 33) % RECORDS))).expect("reads work"))
    });
}

/// The first key behind a range of [`RECORDS`] records that one range delete removed.
#[divan::bench(args = ["memory", "tables", "compacted", "pool"])]
fn scan_over_removed(bencher: Bencher<'_, '_>, place: &str) {
    let loaded = load(place);
    loaded.partition.remove_range(..key(2 * RECORDS - 2)).expect("the disk has room");
    bencher.bench_local(|| black_box(loaded.partition.first_key_value().expect("reads work")));
}

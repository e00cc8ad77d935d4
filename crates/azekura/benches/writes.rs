//! Puts into LSM and pmem partitions without syncs: one record by the order of keys, batches of 100, and a flush.
//!
//! `cargo bench -p azekura --bench writes`

use azekura::{Config, Database, EngineType, Partition, PartitionCreateOptions, PmemOptions};
use divan::{Bencher, black_box};
use tempfile::TempDir;

fn main() {
    divan::main();
}

fn options(engine: &str) -> PartitionCreateOptions {
    let options = PartitionCreateOptions::default();
    if engine == "pmem" { options.engine(EngineType::Pmem(PmemOptions::default().max_size(8 << 30))) } else { options }
}

/// A database with one empty partition.
fn open(engine: &str) -> (TempDir, Database, Partition) {
    let dir = TempDir::new().expect("a temporary directory");
    let database = Config::new(dir.path()).open().expect("an empty directory opens");
    let partition = database.open_partition("bench", options(engine)).expect("it is new");
    (dir, database, partition)
}

fn key(index: u64) -> [u8; 16] {
    let mut key = [b'0'; 16];
    key[..8].copy_from_slice(&index.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    key
}

#[divan::bench(args = ["lsm", "pmem"], sample_count = 20, sample_size = 10_000)]
fn put(bencher: Bencher<'_, '_>, engine: &str) {
    let (_dir, _database, partition) = open(engine);
    let mut index = 0;
    bencher.bench_local(|| {
        index += 1;
        partition.insert(key(index), black_box([7; 100])).expect("the disk has room");
    });
}

/// Batches of 100 records: the engine, whether the keys ascend, and the length of the values in bytes.
#[divan::bench(
    args = [("lsm", false, 100), ("pmem", false, 100), ("lsm", true, 800), ("pmem", true, 800)],
    sample_count = 20,
    sample_size = 200
)]
fn put_batch_of_100(bencher: Bencher<'_, '_>, (engine, ascending, value_len): (&str, bool, usize)) {
    let (_dir, database, partition) = open(engine);
    let value = [7; 800];
    let mut index = 0;
    bencher.bench_local(|| {
        let mut batch = database.batch();
        for _ in 0..100 {
            index += 1;
            let value = &value[..value_len];
            if ascending {
                batch.insert(&partition, format!("{index:020}"), value);
            } else {
                batch.insert(&partition, key(index), value);
            }
        }
        batch.commit().expect("the disk has room");
    });
}

/// Puts of ascending decimal keys.
#[divan::bench(args = ["lsm", "pmem"], sample_count = 20, sample_size = 10_000)]
fn put_ascending(bencher: Bencher<'_, '_>, engine: &str) {
    let (_dir, _database, partition) = open(engine);
    let mut index = 0;
    bencher.bench_local(|| {
        index += 1;
        partition.insert(format!("{index:016}"), black_box([7; 100])).expect("the disk has room");
    });
}

/// Writes the tables of 20,000 new records, or the checkpoint of a pool.
#[divan::bench(args = ["lsm", "pmem"], sample_count = 20, sample_size = 1)]
fn flush_of_20000(bencher: Bencher<'_, '_>, engine: &str) {
    let (_dir, _database, partition) = open(engine);
    let mut index = 0;
    let put_20000 = || {
        for _ in 0..20_000 {
            index += 1;
            partition.insert(key(index), [7; 100]).expect("the disk has room");
        }
    };
    bencher.with_inputs(put_20000).bench_local_values(|()| partition.flush().expect("the disk has room"));
}

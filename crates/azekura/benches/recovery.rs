//! Opening a database of 100,000 records: after a clean close, and with all records in the WAL.
//!
//! `cargo bench -p azekura --bench recovery`

use std::path::Path;

use azekura::{Config, Database, EngineType, Partition, PartitionCreateOptions, PmemOptions};
use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use tempfile::TempDir;

const RECORDS: u64 = 100_000;

fn main() {
    divan::main();
}

fn key(index: u64) -> [u8; 16] {
    let mut key = [b'0'; 16];
    key[..8].copy_from_slice(&index.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    key
}

fn open(dir: &Path, engine: &str) -> (Database, Partition) {
    let options = PartitionCreateOptions::default().max_memtable_size(256 << 20);
    let options = if engine == "lsm" { options } else { options.engine(EngineType::Pmem(PmemOptions::default())) };
    let database = Config::new(dir).open().expect("the files are complete");
    let partition = database.open_partition("bench", options).expect("the options are the same");
    (database, partition)
}

fn load(dir: &Path, engine: &str) -> (Database, Partition) {
    let (database, partition) = open(dir, engine);
    (0..RECORDS).for_each(|index| partition.insert(key(index), [7; 100]).expect("the disk has room"));
    (database, partition)
}

/// The pool is an image, or a mapped file in memory. Each iteration opens the database and closes it.
#[divan::bench(args = ["lsm", "pool_image", "mapped_pool"], sample_count = 20, sample_size = 1)]
fn open_after_clean_close(bencher: Bencher<'_, '_>, engine: &str) {
    let dir = if engine == "mapped_pool" { TempDir::new_in("/dev/shm") } else { TempDir::new() };
    let dir = dir.expect("a temporary directory");
    let (database, partition) = load(dir.path(), engine);
    drop(partition);
    database.close().expect("it closes");
    bencher.counter(ItemsCount::new(RECORDS)).bench_local(|| black_box(open(dir.path(), engine)));
}

/// A checkpoint of the database has the records in its WAL. Opening it read-only replays them and writes nothing.
#[divan::bench(args = ["lsm", "pool_image"], sample_count = 20, sample_size = 1)]
fn replay(bencher: Bencher<'_, '_>, engine: &str) {
    let dir = TempDir::new().expect("a temporary directory");
    let (database, _partition) = load(&dir.path().join("database"), engine);
    let checkpoint = dir.path().join("checkpoint");
    database.checkpoint(&checkpoint).expect("the disk has room");
    let open = || Config::new(&checkpoint).open_read_only().expect("the files are complete");
    assert!(open().metrics().replayed_records > 0, "the WAL of the checkpoint has records");
    bencher.counter(ItemsCount::new(RECORDS)).bench_local(|| black_box(open()));
}

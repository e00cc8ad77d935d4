//! Four records written as a batch, as a transaction that only writes, and as a transaction that reads them first, by
//! one thread without syncs.
//!
//! `cargo bench -p azekura --bench transactions`

use azekura::{Config, Database, EngineType, Partition, PartitionCreateOptions, PmemOptions};
use divan::{Bencher, black_box};
use tempfile::TempDir;

const RECORDS: u64 = 100_000;
const WRITES: u64 = 4;

fn main() {
    divan::main();
}

/// A database that is removed when dropped.
struct Loaded {
    partition: Partition,
    database: Database,
    _dir: TempDir,
}

fn load(kind: &str) -> Loaded {
    let dir = TempDir::new().expect("a temporary directory");
    let database = Config::new(dir.path()).open().expect("an empty directory opens");
    let options = match kind {
        "pool" => PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default())),
        _ => PartitionCreateOptions::default(),
    };
    let partition = database.open_partition("bench", options).expect("it is new");
    (0..RECORDS).for_each(|index| partition.insert(index.to_be_bytes(), [1; 100]).expect("the disk has room"));
    Loaded { partition, database, _dir: dir }
}

/// The keys of the next commit.
fn keys(state: &mut u64) -> impl Iterator<Item = [u8; 8]> {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let first = *state >> 33;
    (0..WRITES).map(move |n| ((first + n * 7_919) % RECORDS).to_be_bytes())
}

#[divan::bench(args = ["lsm", "pool"])]
fn batch(bencher: Bencher<'_, '_>, kind: &str) {
    let (loaded, mut state) = (load(kind), 1);
    bencher.bench_local(|| {
        let mut batch = loaded.database.batch();
        keys(&mut state).for_each(|key| batch.insert(&loaded.partition, key, [2; 100]));
        batch.commit().expect("the disk has room");
    });
}

#[divan::bench(args = ["lsm", "pool"])]
fn write_only_transaction(bencher: Bencher<'_, '_>, kind: &str) {
    let (loaded, mut state) = (load(kind), 1);
    bencher.bench_local(|| {
        let mut tx = loaded.database.transaction();
        keys(&mut state).for_each(|key| tx.insert(&loaded.partition, key, [2; 100]).expect("it is small"));
        tx.commit().expect("there is no conflict");
    });
}

#[divan::bench(args = ["lsm", "pool"])]
fn batch_after_gets(bencher: Bencher<'_, '_>, kind: &str) {
    let (loaded, mut state) = (load(kind), 1);
    bencher.bench_local(|| {
        let mut batch = loaded.database.batch();
        for key in keys(&mut state) {
            black_box(loaded.partition.get(key).expect("reads work"));
            batch.insert(&loaded.partition, key, [2; 100]);
        }
        batch.commit().expect("the disk has room");
    });
}

#[divan::bench(args = ["lsm", "pool"])]
fn transaction_after_gets(bencher: Bencher<'_, '_>, kind: &str) {
    let (loaded, mut state) = (load(kind), 1);
    bencher.bench_local(|| {
        let mut tx = loaded.database.transaction();
        for key in keys(&mut state) {
            black_box(tx.get(&loaded.partition, key).expect("reads work"));
            tx.insert(&loaded.partition, key, [2; 100]).expect("it is small");
        }
        tx.commit().expect("there is no conflict");
    });
}

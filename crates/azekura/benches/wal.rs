//! Commits with mapped segments of the WAL and with `write(2)`: unsynced, in batches, and synced.
//!
//! Segments of 8 MiB are recycled within a measurement. Replay: see `recovery.rs`.
//!
//! `cargo bench -p azekura --bench wal`

use std::sync::atomic::{AtomicU64, Ordering};

use azekura::{Config, Database, Partition, PartitionCreateOptions, PersistMode};
use divan::{Bencher, black_box};
use tempfile::TempDir;

fn main() {
    divan::main();
}

/// A database whose memtables are small, so that segments of the WAL are recycled. Removed when dropped.
struct Opened {
    partition: Partition,
    database: Database,
    _dir: TempDir,
}

fn open(mapped: bool) -> Opened {
    let dir = TempDir::new().expect("a temporary directory");
    let config = Config::new(dir.path()).wal_segment_size(8 << 20).mapped_wal(mapped);
    let database = config.open().expect("an empty directory opens");
    let options = PartitionCreateOptions::default().max_memtable_size(8 << 20);
    let partition = database.open_partition("bench", options).expect("it is new");
    Opened { partition, database, _dir: dir }
}

/// Ascending keys, because inserting them into the memtable takes the least time.
fn key(index: u64) -> [u8; 16] {
    let mut key = [b'0'; 16];
    key[..8].copy_from_slice(&index.to_be_bytes());
    key
}

#[divan::bench(args = [true, false], sample_count = 20, sample_size = 10_000)]
fn put_mapped(bencher: Bencher<'_, '_>, mapped: bool) {
    let opened = open(mapped);
    let mut index = 0;
    bencher.bench_local(|| {
        index += 1;
        opened.partition.insert(key(index), black_box([7; 100])).expect("the disk has room");
    });
}

#[divan::bench(args = [true, false], sample_count = 20, sample_size = 500)]
fn put_batch_of_20_mapped(bencher: Bencher<'_, '_>, mapped: bool) {
    let opened = open(mapped);
    let mut index = 0;
    bencher.bench_local(|| {
        let mut batch = opened.database.batch();
        for _ in 0..20 {
            index += 1;
            batch.insert(&opened.partition, key(index), [7; 100]);
        }
        batch.commit().expect("the disk has room");
    });
}

/// One sync after 1,000 unsynced commits.
#[divan::bench(args = [true, false], sample_count = 20, sample_size = 1)]
fn put_1000_and_sync_mapped(bencher: Bencher<'_, '_>, mapped: bool) {
    let opened = open(mapped);
    let mut index = 0;
    bencher.bench_local(|| {
        for _ in 0..1_000 {
            index += 1;
            opened.partition.insert(key(index), [7; 100]).expect("the disk has room");
        }
        opened.database.persist(PersistMode::SyncData).expect("the disk works");
    });
}

/// Each commit requests a sync. Concurrent commits share syncs by group commit.
#[divan::bench(threads = [1, 4], sample_count = 20, sample_size = 10)]
fn synced_put(bencher: Bencher<'_, '_>) {
    let opened = open(true);
    let index = AtomicU64::new(0);
    bencher.bench(|| {
        let mut batch = opened.database.batch();
        batch.durability(PersistMode::SyncData);
        batch.insert(&opened.partition, key(index.fetch_add(1, Ordering::Relaxed)), [7; 100]);
        batch.commit().expect("the disk works");
    });
}

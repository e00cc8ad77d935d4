//! How long lookups and scans take from a warm cache; run by hand, in release.

use std::hint::black_box;
use std::sync::Arc;

use crate::base::compression::CompressionType;
use crate::base::{KeyOrder, RecordKind, SeqNo};
use crate::cursor::Cursor;
use crate::table::options::TableOptions;
use crate::table::reader::{Lookup, Table};
use crate::table::tests::{Random, Row, World};
use crate::vfs::Env;
use crate::vfs::env::SystemEnv;

const ENTRIES: u64 = 500_000;
const SEED: u64 = 99;

fn key(i: u64) -> [u8; 16] {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&i.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes());
    key[8..].copy_from_slice(&i.to_be_bytes());
    key
}

fn rows() -> Vec<Row> {
    let mut random = Random(5);
    let mut rows: Vec<Row> = (0..ENTRIES)
        .map(|i| Row {
            user: key(i).to_vec(),
            seqno: SeqNo(1_000_000 + i),
            kind: RecordKind::Put,
            value: (0..100).map(|j| if j < 50 { random.below(256) as u8 } else { 0 }).collect(),
        })
        .collect();
    rows.sort_by(|a, b| a.user.cmp(&b.user));
    rows
}

fn per_op(n: u64, mut op: impl FnMut()) -> f64 {
    let env = SystemEnv::new();
    let start = env.monotonic_ns();
    op();
    (env.monotonic_ns() - start) as f64 / n as f64
}

/// Nanoseconds for each get: the mean over all, and the tenth percentile of batches, which other load hardly moves.
fn gets(table: &Arc<Table>, n: u64, absent: bool) -> (f64, f64) {
    const BATCH: u64 = 500;
    let order = KeyOrder::bytewise();
    let mut random = Random(17);
    let mut batches: Vec<f64> = (0..n / BATCH)
        .map(|_| {
            per_op(BATCH, || {
                for _ in 0..BATCH {
                    let mut key = key(random.below(ENTRIES));
                    key[15] ^= u8::from(absent);
                    key[8] ^= u8::from(absent);
                    let found = table.get(&Lookup::new(&key, SeqNo::MAX, &order, SEED)).unwrap();
                    assert_eq!(found.is_some(), !absent);
                    black_box(found);
                }
            })
        })
        .collect();
    batches.sort_by(f64::total_cmp);
    (batches.iter().sum::<f64>() / batches.len() as f64, batches[batches.len() / 10])
}

/// For an instruction counter that collects only in here.
#[inline(never)]
fn counted_gets(table: &Arc<Table>, n: u64) {
    let order = KeyOrder::bytewise();
    let mut random = Random(29);
    for _ in 0..n {
        let key = key(random.below(ENTRIES));
        black_box(table.get(&Lookup::new(&key, SeqNo::MAX, &order, SEED)).unwrap());
    }
}

#[test]
#[ignore = "for an instruction counter, in release"]
fn counted_cached_gets() {
    let rows = rows();
    let options = TableOptions { compression: CompressionType::None, ..TableOptions::default() };
    let table = World::new(&rows, &options, &KeyOrder::bytewise()).open_with(256 << 20, SEED).unwrap();
    gets(&table, 4 * ENTRIES, false);
    counted_gets(&table, 100_000);
}

#[test]
#[ignore = "takes seconds and says something only in release"]
fn cached_reads() {
    let rows = rows();
    let seek_targets: Vec<[u8; 16]> = (0..200_000).map(|i| key(i * 7 % ENTRIES)).collect();
    for (name, partition, restart_interval, compression) in [
        ("partitioned", true, 16, CompressionType::Lz4),
        ("partitioned, restart 8", true, 8, CompressionType::Lz4),
        ("partitioned, restart 4", true, 4, CompressionType::Lz4),
        ("partitioned, restart 1", true, 1, CompressionType::Lz4),
        ("held", false, 16, CompressionType::Lz4),
        ("held, restart 1", false, 1, CompressionType::None),
    ] {
        let options = TableOptions {
            partition_index_and_filters: partition,
            restart_interval,
            compression,
            ..TableOptions::default()
        };
        let mut world = None;
        let write = per_op(ENTRIES, || world = Some(World::new(&rows, &options, &KeyOrder::bytewise())));
        let world = world.expect("just built");
        let table = world.open_with(256 << 20, SEED).unwrap();
        let cold = gets(&table, ENTRIES, false);
        gets(&table, 2 * ENTRIES, false);
        let hit = gets(&table, 4 * ENTRIES, false);
        let miss = gets(&table, 4 * ENTRIES, true);
        let mut cursor = table.cursor(true);
        let scan = per_op(ENTRIES, || {
            cursor.seek_to_first().unwrap();
            while cursor.valid() {
                black_box(cursor.entry());
                cursor.next().unwrap();
            }
        });
        let back = per_op(ENTRIES, || {
            cursor.seek_to_last().unwrap();
            while cursor.valid() {
                black_box(cursor.entry());
                cursor.prev().unwrap();
            }
        });
        let seek = per_op(seek_targets.len() as u64, || {
            for key in &seek_targets {
                cursor.seek(crate::base::KeyRef::first_of(key)).unwrap();
                black_box(cursor.entry());
            }
        });
        println!(
            "{name}: write {write:.0}, cold get {cold:.0?}, get {hit:.0?}, absent {miss:.0?}, scan {scan:.0}, \
             back {back:.0}, seek {seek:.0} ns each; {} KiB, {} pinned bytes",
            world.meta.size >> 10,
            table.pinned_bytes()
        );
    }
}

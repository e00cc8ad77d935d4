//! How long lookups and scans take from a warm cache, and what the layouts of data blocks cost; run by hand, in
//! release.

use std::hint::black_box;
use std::sync::Arc;

use crate::base::compression::CompressionType;
use crate::base::{KeyOrder, KeyRef, RecordKind, SeqNo};
use crate::block::frame::Body;
use crate::block::{Block, BlockBuilder, BlockCursor, DataBuilder, SlotBuilder};
use crate::cursor::Cursor;
use crate::table::options::{DataBlockIndexType, TableOptions};
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

fn rows(n: u64) -> Vec<Row> {
    let mut random = Random(5);
    let mut rows: Vec<Row> = (0..n)
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
    let rows = rows(ENTRIES);
    let options = TableOptions { compression: CompressionType::None, ..TableOptions::default() };
    let table = World::new(&rows, &options, &KeyOrder::bytewise()).open_with(256 << 20, SEED).unwrap();
    gets(&table, 4 * ENTRIES, false);
    counted_gets(&table, 100_000);
}

#[test]
#[ignore = "takes seconds and says something only in release"]
fn cached_reads() {
    let rows = rows(ENTRIES);
    let seek_targets: Vec<[u8; 16]> = (0..200_000).map(|i| key(i * 7 % ENTRIES)).collect();
    for (name, partition, data_block_index_type, restart_interval, compression) in [
        ("search, restart 16", true, DataBlockIndexType::BinarySearch, 16, CompressionType::Lz4),
        ("search, restart 4", true, DataBlockIndexType::BinarySearch, 4, CompressionType::Lz4),
        ("hash, restart 4", true, DataBlockIndexType::BinaryAndHash, 4, CompressionType::Lz4),
        ("fingerprint", true, DataBlockIndexType::Fingerprint, 4, CompressionType::Lz4),
        ("search, held", false, DataBlockIndexType::BinarySearch, 16, CompressionType::Lz4),
        ("fingerprint, held", false, DataBlockIndexType::Fingerprint, 4, CompressionType::None),
    ] {
        let options = TableOptions {
            partition_index_and_filters: partition,
            data_block_index_type,
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
                cursor.seek(KeyRef::first_of(key)).unwrap();
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

/// The blocks of one layout, outside of any table, and the keys in each.
struct Blocks {
    blocks: Vec<(Arc<Block>, usize, usize)>,
    bytes: usize,
    memory: usize,
}

fn blocks(rows: &[Row], block_size: usize, mut builder: DataBuilder) -> Blocks {
    let order = KeyOrder::bytewise();
    let mut built = Blocks { blocks: Vec::new(), bytes: 0, memory: 0 };
    let mut first = 0;
    for (i, row) in rows.iter().enumerate() {
        let key = KeyRef::new(&row.user, row.seqno);
        builder.add(key, Lookup::new(&row.user, SeqNo::MAX, &order, SEED).hash, row.kind.to_byte(), &row.value);
        let last = i + 1 == rows.len();
        if last || builder.len_with(KeyRef::new(&rows[i + 1].user, rows[i + 1].seqno), 100) > block_size {
            let (kind, raw) = builder.finish();
            built.bytes += raw.len();
            let block = Arc::new(Block::decode(Body::new(kind, raw.to_vec())).unwrap());
            built.memory += block.memory();
            built.blocks.push((block, first, i + 1));
            first = i + 1;
            builder.clear();
        }
    }
    built
}

/// What one operation does again and again; under an instruction counter each has a line of its own.
mod ops {
    use super::*;

    #[inline(never)]
    pub(super) fn op_hit(block: &Block, user: &[u8], hash: Option<u64>) {
        let found = block.find(KeyRef::first_of(user), hash, &KeyOrder::bytewise()).unwrap();
        assert!(black_box(found).is_some_and(|found| found.same_key));
    }

    #[inline(never)]
    pub(super) fn op_miss(block: &Block, user: &[u8], hash: Option<u64>) {
        let found = block.find(KeyRef::first_of(user), hash, &KeyOrder::bytewise()).unwrap();
        assert!(!black_box(found).is_some_and(|found| found.same_key));
    }

    #[inline(never)]
    pub(super) fn op_seek(cursor: &mut BlockCursor, user: &[u8]) {
        cursor.seek(KeyRef::first_of(user), &KeyOrder::bytewise()).unwrap();
        black_box(cursor.valid());
    }

    #[inline(never)]
    pub(super) fn op_scan(cursor: &mut BlockCursor) -> u64 {
        let mut entries = 0;
        cursor.seek_to_first().unwrap();
        while cursor.valid() {
            black_box((cursor.key(), cursor.value()));
            entries += 1;
            cursor.next().unwrap();
        }
        entries
    }

    #[inline(never)]
    pub(super) fn op_back(cursor: &mut BlockCursor) -> u64 {
        let mut entries = 0;
        cursor.seek_to_last().unwrap();
        while cursor.valid() {
            black_box((cursor.key(), cursor.value()));
            entries += 1;
            cursor.prev().unwrap();
        }
        entries
    }
}

/// A block, and a key that it has and one that it has not, with their hashes.
struct Pick {
    block: usize,
    present: [u8; 16],
    present_hash: Option<u64>,
    absent: [u8; 16],
    absent_hash: Option<u64>,
}

fn picks(rows: &[Row], built: &Blocks) -> Vec<Pick> {
    let order = KeyOrder::bytewise();
    let hash = |key: &[u8]| Lookup::new(key, SeqNo::MAX, &order, SEED).hash;
    let mut random = Random(3);
    let mut pick = || {
        let block = random.below(built.blocks.len() as u64) as usize;
        let (_, from, to) = &built.blocks[block];
        let row = from + random.below((to - from) as u64) as usize;
        let present: [u8; 16] = rows[row].user.as_slice().try_into().unwrap();
        let mut absent = present;
        absent[15] ^= 1;
        Pick { block, present, present_hash: hash(&present), absent, absent_hash: hash(&absent) }
    };
    (0..rows.len()).map(|_| pick()).collect()
}

/// Measures one layout against the bytes of another.
fn layout(name: &str, rows: &[Row], built: &Blocks, base: &Blocks) {
    let picks = picks(rows, built);
    let n = rows.len() as u64;
    let block = |pick: &Pick| &built.blocks[pick.block].0;
    let hit = per_op(n, || picks.iter().for_each(|p| ops::op_hit(block(p), &p.present, p.present_hash)));
    let miss = per_op(n, || picks.iter().for_each(|p| ops::op_miss(block(p), &p.absent, p.absent_hash)));
    let mut cursor = BlockCursor::new(Arc::clone(&built.blocks[0].0));
    let seek = per_op(n, || {
        for pick in &picks {
            cursor.set_block(Arc::clone(block(pick)));
            ops::op_seek(&mut cursor, &pick.present);
        }
    });
    let mut walk = |op: fn(&mut BlockCursor) -> u64| {
        per_op(n, || {
            let entries = built.blocks.iter().map(|(block, ..)| {
                cursor.set_block(Arc::clone(block));
                op(&mut cursor)
            });
            assert_eq!(entries.sum::<u64>(), n);
        })
    };
    let (scan, back) = (walk(ops::op_scan), walk(ops::op_back));
    println!(
        "{name}: space {:.4} of restart 16, memory {:.4}; hit {hit:.0}, miss {miss:.0}, seek {seek:.0}, scan \
         {scan:.1}, back {back:.1} ns",
        built.bytes as f64 / base.bytes as f64,
        built.memory as f64 / base.memory as f64,
    );
}

#[test]
#[ignore = "takes seconds and says something only in release"]
fn block_layouts() {
    let rows = rows(500_000);
    for block_size in [4096, 16 << 10] {
        let base = blocks(&rows, block_size, layouts()[0].1());
        for (name, make) in layouts() {
            layout(&format!("{name}, {block_size} bytes"), &rows, &blocks(&rows, block_size, make()), &base);
        }
    }
}

const COUNTED: u64 = 20_000;

fn counted(number: usize, block_size: usize) {
    let rows = rows(COUNTED);
    let (name, make) = layouts()[number];
    let built = blocks(&rows, block_size, make());
    layout(name, &rows, &built, &built);
}

/// One layout and size each, to count instructions: `valgrind --tool=callgrind TEST-BINARY --ignored
/// counts::fingerprint_4k`, then the inclusive counts of the functions `op_…`, each for [`COUNTED`] calls or entries.
mod counts {
    macro_rules! counts {
        ($($test:ident: $number:literal, $size:literal;)*) => {$(
            #[test]
            #[ignore = "says something only under an instruction counter"]
            fn $test() {
                super::counted($number, $size);
            }
        )*};
    }

    counts! {
        search_16_4k: 0, 4096;
        search_16_16k: 0, 16384;
        search_4_4k: 1, 4096;
        search_4_16k: 1, 16384;
        hash_4_4k: 4, 4096;
        hash_4_16k: 4, 16384;
        hash_2_4k: 5, 4096;
        hash_2_16k: 5, 16384;
        hash_1_4k: 6, 4096;
        hash_1_16k: 6, 16384;
        fingerprint_4k: 7, 4096;
        fingerprint_16k: 7, 16384;
    }
}

type Make = fn() -> DataBuilder;

fn layouts() -> [(&'static str, Make); 8] {
    [
        ("search-16", || DataBuilder::Restarts(BlockBuilder::new(16))),
        ("search-4", || DataBuilder::Restarts(BlockBuilder::new(4))),
        ("hash-16", || DataBuilder::Restarts(BlockBuilder::with_hash_index(16, 0.75))),
        ("hash-8", || DataBuilder::Restarts(BlockBuilder::with_hash_index(8, 0.75))),
        ("hash-4", || DataBuilder::Restarts(BlockBuilder::with_hash_index(4, 0.75))),
        ("hash-2", || DataBuilder::Restarts(BlockBuilder::with_hash_index(2, 0.75))),
        ("hash-1", || DataBuilder::Restarts(BlockBuilder::with_hash_index(1, 0.75))),
        ("fingerprint", || DataBuilder::Slots(SlotBuilder::new())),
    ]
}

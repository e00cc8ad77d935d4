//! How long lookups and scans take from a warm cache, and what the layouts of data blocks cost; run by hand, in
//! release.

use std::hint::black_box;
use std::sync::Arc;

use crate::base::compression::CompressionType;
use crate::base::{InternalKey, KeyOrder, RecordKind, SeqNo};
use crate::block::frame::BlockContents;
use crate::block::{Block, BlockIter, DataBlockBuilder, FingerprintBlockBuilder, RestartBlockBuilder};
use crate::iter::InternalIter;
use crate::table::options::{DataBlockIndexType, TableOptions};
use crate::table::reader::{PointLookup, TableReader};
use crate::table::tests::{TableFixture, TableRow, XorShiftRng};
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

fn random_rows(n: u64) -> Vec<TableRow> {
    let mut random = XorShiftRng(5);
    let mut rows: Vec<TableRow> = (0..n)
        .map(|i| TableRow {
            user: key(i).to_vec(),
            seqno: SeqNo(1_000_000 + i),
            kind: RecordKind::Put,
            value: (0..100).map(|j| if j < 50 { random.below(256) as u8 } else { 0 }).collect(),
        })
        .collect();
    rows.sort_by(|a, b| a.user.cmp(&b.user));
    rows
}

fn time_per_op(n: u64, mut op: impl FnMut()) -> f64 {
    let env = SystemEnv::new();
    let start = env.monotonic_ns();
    op();
    (env.monotonic_ns() - start) as f64 / n as f64
}

/// Nanoseconds for each get: the mean over all, and the tenth percentile of batches, which other load hardly moves.
fn time_gets(table: &Arc<TableReader>, n: u64, absent: bool) -> (f64, f64) {
    const BATCH: u64 = 500;
    let order = KeyOrder::bytewise();
    let mut random = XorShiftRng(17);
    let mut batches: Vec<f64> = (0..n / BATCH)
        .map(|_| {
            time_per_op(BATCH, || {
                for _ in 0..BATCH {
                    let mut key = key(random.below(ENTRIES));
                    key[15] ^= u8::from(absent);
                    key[8] ^= u8::from(absent);
                    let found = table.get(&PointLookup::new(&key, SeqNo::MAX, &order, SEED)).unwrap();
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
fn count_get_instructions(table: &Arc<TableReader>, n: u64) {
    let order = KeyOrder::bytewise();
    let mut random = XorShiftRng(29);
    for _ in 0..n {
        let key = key(random.below(ENTRIES));
        black_box(table.get(&PointLookup::new(&key, SeqNo::MAX, &order, SEED)).unwrap());
    }
}

#[test]
#[ignore = "for an instruction counter, in release"]
fn counted_cached_gets() {
    let rows = random_rows(ENTRIES);
    let options = TableOptions { compression: CompressionType::None, ..TableOptions::default() };
    let table = TableFixture::new(&rows, &options, &KeyOrder::bytewise()).open_with_cache(256 << 20, SEED).unwrap();
    time_gets(&table, 4 * ENTRIES, false);
    count_get_instructions(&table, 100_000);
}

#[test]
#[ignore = "takes seconds and says something only in release"]
fn cached_reads() {
    let rows = random_rows(ENTRIES);
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
        let write = time_per_op(ENTRIES, || world = Some(TableFixture::new(&rows, &options, &KeyOrder::bytewise())));
        let world = world.expect("just built");
        let table = world.open_with_cache(256 << 20, SEED).unwrap();
        let cold = time_gets(&table, ENTRIES, false);
        time_gets(&table, 2 * ENTRIES, false);
        let hit = time_gets(&table, 4 * ENTRIES, false);
        let miss = time_gets(&table, 4 * ENTRIES, true);
        let mut cursor = table.iter(true);
        let scan = time_per_op(ENTRIES, || {
            cursor.seek_to_first().unwrap();
            while cursor.valid() {
                black_box(cursor.entry());
                cursor.next().unwrap();
            }
        });
        let back = time_per_op(ENTRIES, || {
            cursor.seek_to_last().unwrap();
            while cursor.valid() {
                black_box(cursor.entry());
                cursor.prev().unwrap();
            }
        });
        let seek = time_per_op(seek_targets.len() as u64, || {
            for key in &seek_targets {
                cursor.seek(InternalKey::before_versions_of(key)).unwrap();
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
struct LayoutBlocks {
    blocks: Vec<(Arc<Block>, usize, usize)>,
    bytes: usize,
    memory: usize,
}

fn build_layout_blocks(rows: &[TableRow], block_size: usize, mut builder: DataBlockBuilder) -> LayoutBlocks {
    let order = KeyOrder::bytewise();
    let mut built = LayoutBlocks { blocks: Vec::new(), bytes: 0, memory: 0 };
    let mut first = 0;
    for (i, row) in rows.iter().enumerate() {
        let key = InternalKey::new(&row.user, row.seqno);
        builder.add(key, PointLookup::new(&row.user, SeqNo::MAX, &order, SEED).hash, row.kind.to_byte(), &row.value);
        let last = i + 1 == rows.len();
        if last || builder.len_with(InternalKey::new(&rows[i + 1].user, rows[i + 1].seqno), 100) > block_size {
            let (kind, raw) = builder.finish();
            built.bytes += raw.len();
            let block = Arc::new(Block::decode(BlockContents::new(kind, raw.to_vec())).unwrap());
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
        let found = block.lookup(InternalKey::before_versions_of(user), hash, &KeyOrder::bytewise()).unwrap();
        assert!(black_box(found).is_some_and(|found| found.key_matches));
    }

    #[inline(never)]
    pub(super) fn op_miss(block: &Block, user: &[u8], hash: Option<u64>) {
        let found = block.lookup(InternalKey::before_versions_of(user), hash, &KeyOrder::bytewise()).unwrap();
        assert!(!black_box(found).is_some_and(|found| found.key_matches));
    }

    #[inline(never)]
    pub(super) fn op_seek(cursor: &mut BlockIter, user: &[u8]) {
        cursor.seek(InternalKey::before_versions_of(user), &KeyOrder::bytewise()).unwrap();
        black_box(cursor.valid());
    }

    #[inline(never)]
    pub(super) fn op_scan(cursor: &mut BlockIter) -> u64 {
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
    pub(super) fn op_back(cursor: &mut BlockIter) -> u64 {
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
struct LayoutSample {
    block: usize,
    present: [u8; 16],
    present_hash: Option<u64>,
    absent: [u8; 16],
    absent_hash: Option<u64>,
}

fn sample_keys(rows: &[TableRow], built: &LayoutBlocks) -> Vec<LayoutSample> {
    let order = KeyOrder::bytewise();
    let hash = |key: &[u8]| PointLookup::new(key, SeqNo::MAX, &order, SEED).hash;
    let mut random = XorShiftRng(3);
    let mut pick = || {
        let block = random.below(built.blocks.len() as u64) as usize;
        let (_, from, to) = &built.blocks[block];
        let row = from + random.below((to - from) as u64) as usize;
        let present: [u8; 16] = rows[row].user.as_slice().try_into().unwrap();
        let mut absent = present;
        absent[15] ^= 1;
        LayoutSample { block, present, present_hash: hash(&present), absent, absent_hash: hash(&absent) }
    };
    (0..rows.len()).map(|_| pick()).collect()
}

/// Measures one layout against the bytes of another.
fn measure_layout(name: &str, rows: &[TableRow], built: &LayoutBlocks, base: &LayoutBlocks) {
    let picks = sample_keys(rows, built);
    let n = rows.len() as u64;
    let block = |pick: &LayoutSample| &built.blocks[pick.block].0;
    let hit = time_per_op(n, || picks.iter().for_each(|p| ops::op_hit(block(p), &p.present, p.present_hash)));
    let miss = time_per_op(n, || picks.iter().for_each(|p| ops::op_miss(block(p), &p.absent, p.absent_hash)));
    let mut cursor = BlockIter::new(Arc::clone(&built.blocks[0].0));
    let seek = time_per_op(n, || {
        for pick in &picks {
            cursor.set_block(Arc::clone(block(pick)));
            ops::op_seek(&mut cursor, &pick.present);
        }
    });
    let mut walk = |op: fn(&mut BlockIter) -> u64| {
        time_per_op(n, || {
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
    let rows = random_rows(500_000);
    for block_size in [4096, 16 << 10] {
        let base = build_layout_blocks(&rows, block_size, layouts()[0].1());
        for (name, make) in layouts() {
            measure_layout(
                &format!("{name}, {block_size} bytes"),
                &rows,
                &build_layout_blocks(&rows, block_size, make()),
                &base,
            );
        }
    }
}

const COUNTED_ENTRIES: u64 = 20_000;

fn measure_layout_at(number: usize, block_size: usize) {
    let rows = random_rows(COUNTED_ENTRIES);
    let (name, make) = layouts()[number];
    let built = build_layout_blocks(&rows, block_size, make());
    measure_layout(name, &rows, &built, &built);
}

/// One layout and size each, to count instructions: `valgrind --tool=callgrind TEST-BINARY --ignored
/// counts::fingerprint_4k`, then the inclusive counts of the functions `op_…`, each for [`COUNTED`] calls or entries.
mod counts {
    macro_rules! counts {
        ($($test:ident: $number:literal, $size:literal;)*) => {$(
            #[test]
            #[ignore = "says something only under an instruction counter"]
            fn $test() {
                super::measure_layout_at($number, $size);
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

type MakeDataBuilder = fn() -> DataBlockBuilder;

fn layouts() -> [(&'static str, MakeDataBuilder); 8] {
    [
        ("search-16", || DataBlockBuilder::Restart(RestartBlockBuilder::new(16))),
        ("search-4", || DataBlockBuilder::Restart(RestartBlockBuilder::new(4))),
        ("hash-16", || DataBlockBuilder::Restart(RestartBlockBuilder::with_hash_index(16, 0.75))),
        ("hash-8", || DataBlockBuilder::Restart(RestartBlockBuilder::with_hash_index(8, 0.75))),
        ("hash-4", || DataBlockBuilder::Restart(RestartBlockBuilder::with_hash_index(4, 0.75))),
        ("hash-2", || DataBlockBuilder::Restart(RestartBlockBuilder::with_hash_index(2, 0.75))),
        ("hash-1", || DataBlockBuilder::Restart(RestartBlockBuilder::with_hash_index(1, 0.75))),
        ("fingerprint", || DataBlockBuilder::Fingerprint(FingerprintBlockBuilder::new())),
    ]
}

//! Access to the data blocks of a database for measurements.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use azekura::fs::Fs;
use azekura::inspect::{DataBlockPosition, DataBlocks};
use azekura::testing::{MemFs, TestEnv, TestOrder};
use azekura::{Config, DataBlockIndexType, Database, ErrorKind, PartitionCreateOptions};

const DIR: &str = "/db";
const TYPES: [DataBlockIndexType; 3] =
    [DataBlockIndexType::BinarySearch, DataBlockIndexType::BinaryAndHash, DataBlockIndexType::Fingerprint];

fn open(fs: &Arc<dyn Fs>) -> Database {
    Config::new(DIR).fs(Arc::clone(fs)).env(Arc::new(TestEnv::new(3))).workers(0).open().unwrap()
}

fn key(n: usize) -> Vec<u8> {
    format!("key {n:04}").into_bytes()
}

/// The key of the record with that number.
fn value_len(n: usize) -> usize {
    n % 90
}

#[test]
fn lookup_finds_exactly_the_records_of_a_block() {
    for index_type in TYPES {
        let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
        let db = open(&fs);
        // Two partitions, the second with two tables.
        for (name, from, to) in [("a", 0, 300), ("b", 300, 500), ("b", 500, 800)] {
            let options = PartitionCreateOptions::default().block_size(512).data_block_index_type(index_type);
            let partition = db.open_partition(name, options).unwrap();
            (from..to).for_each(|n| partition.insert(key(n), vec![7; value_len(n)]).unwrap());
            partition.flush().unwrap();
        }
        drop(db);
        let mut entries: Vec<(DataBlockPosition, Vec<u8>)> = Vec::new();
        let blocks =
            DataBlocks::read(&fs, Path::new(DIR), &mut |place, key| entries.push((place, key.to_vec()))).unwrap();
        assert!(blocks.count() > 30, "{index_type:?}: {} blocks", blocks.count());
        let found: BTreeSet<&[u8]> = entries.iter().map(|(_, key)| key.as_slice()).collect();
        assert_eq!((found.len(), entries.len()), (800, 800), "{index_type:?}");
        for (i, (place, key)) in entries.iter().enumerate() {
            let n: usize = std::str::from_utf8(&key[4..]).unwrap().parse().unwrap();
            assert_eq!(blocks.find(*place, key).unwrap(), Some(value_len(n)), "{index_type:?}: record {n}");
            assert_eq!(blocks.lookup_overhead(*place, key).unwrap(), Some(key.len()));
            // This key is far away in key order, so it is in another block.
            let (elsewhere, _) = entries[(i + 400) % 800];
            assert_eq!(blocks.find(elsewhere, key).unwrap(), None, "{index_type:?}: record {n} in another block");
        }
        let none = DataBlocks::read(&fs, Path::new("/nowhere"), &mut |_, _| {});
        assert!(none.is_err());
    }
}

#[test]
fn data_blocks_of_a_custom_order_are_refused() {
    let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
    let db = open(&fs);
    let partition = db
        .open_partition_with_comparator("r", PartitionCreateOptions::default(), Arc::new(TestOrder::Reversed))
        .unwrap();
    partition.insert("a", "1").unwrap();
    partition.flush().unwrap();
    drop((partition, db));
    let error = DataBlocks::read(&fs, Path::new(DIR), &mut |_, _| {})
        .err()
        .expect("blocks without a lookup method are refused");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("reversed"), "{error}");
}

/// A value that fills its block alone is returned without a copy and outlives the cached block. A value that shares
/// its block is copied and pins no block.
#[test]
fn large_value_is_shared_small_value_is_copied() {
    for index in TYPES {
        let fs: Arc<dyn Fs> = Arc::new(MemFs::new());
        let db = Config::new(DIR).fs(fs).env(Arc::new(TestEnv::new(3))).cache_size(1 << 20).workers(0).open().unwrap();
        let options = PartitionCreateOptions::default().data_block_index_type(index).block_size(64 << 10);
        let part = db.open_partition("p", options).unwrap();
        let value = |n: usize, len: usize| (0..len).map(|i| (i * 7 + n) as u8).collect::<Vec<u8>>();
        (0..100).for_each(|n| part.insert(format!("large {n:03}"), value(n, 40_000)).unwrap());
        (0..100).for_each(|n| part.insert(format!("small {n:03}"), value(n, 5_000)).unwrap());
        let fresh = part.get("large 000").unwrap().unwrap();
        assert_ne!(fresh.as_ptr(), part.get("large 000").unwrap().unwrap().as_ptr(), "values of memtables are copied");
        part.major_compact().unwrap();

        let large = part.get("large 001").unwrap().unwrap();
        let small = part.get("small 001").unwrap().unwrap();
        assert_eq!(large.as_ptr(), part.get("large 001").unwrap().unwrap().as_ptr(), "{index:?}");
        assert_ne!(small.as_ptr(), part.get("small 001").unwrap().unwrap().as_ptr(), "{index:?}");
        let walked = |mut iter: azekura::Iter| iter.next().unwrap().unwrap().1;
        assert_eq!(walked(part.prefix("large 001")).as_ptr(), large.as_ptr());
        let back = part.prefix("large 001").next_back().unwrap().unwrap().1;
        assert_eq!(back.as_ptr(), large.as_ptr());
        assert_eq!(part.entries().nth(1).unwrap().unwrap().value().unwrap().as_ptr(), large.as_ptr());
        assert_eq!(part.multi_get(["large 001"]).unwrap()[0].as_ref().unwrap().as_ptr(), large.as_ptr());

        // Four times the cache's capacity: every block is evicted, and the returned values do not change.
        let slices: Vec<_> = (0..100).map(|n| part.get(format!("large {n:03}")).unwrap().unwrap()).collect();
        assert!(db.metrics().cache.data.bytes <= 1 << 20);
        let middle = large.slice(10_000..30_000);
        drop((large, part, db));
        for (n, slice) in slices.iter().enumerate() {
            assert_eq!(*slice, value(n, 40_000), "{index:?}");
        }
        assert_eq!(middle, value(1, 40_000)[10_000..30_000]);
    }
}

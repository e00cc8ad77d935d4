//! Prefix filters: scans find the same entries with and without them, and read less.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use azekura::testing::{SeededRng, TestEnv, TestOrder};
use azekura::{
    CompactionStrategy, Config, DataBlockIndexType, Database, ErrorKind, FilterPolicy, Iter, LeveledOptions, Partition,
    PartitionCreateOptions, PrefixExtractor,
};

use crate::testkit::seeds::test_seeds;
use crate::testkit::test_dir::TestDir;

fn options(extractor: Option<PrefixExtractor>) -> PartitionCreateOptions {
    let leveled = LeveledOptions::default().l0_compaction_trigger(1_000).target_file_size(8 << 10);
    let options = PartitionCreateOptions::default()
        .block_size(128)
        .metadata_block_size(64) // about 50 keys in a filter partition
        .max_memtable_size(16 << 20)
        .compaction_strategy(CompactionStrategy::Leveled(leveled));
    match extractor {
        Some(extractor) => options.prefix_extractor(extractor),
        None => options,
    }
}

fn database(place: &TestDir) -> Database {
    let config = Config::new(&place.dir).fs(Arc::clone(&place.fs)).env(Arc::new(TestEnv::new(8)));
    config.workers(0).cache_size(8 << 20).open().unwrap()
}

/// Number of data blocks that were requested.
fn data_requests(db: &Database) -> u64 {
    let data = db.metrics().cache.data;
    data.hits + data.misses
}

/// Users `0001`, `0003` and so on, each with `count` entries.
fn fill(partition: &Partition, count: u32) {
    for user in (1..400).step_by(2) {
        (0..count).for_each(|n| partition.insert(format!("{user:04}/{n:03}"), "x").unwrap());
    }
}

#[test]
fn absent_prefix_reads_no_data_block() {
    for extractor in [PrefixExtractor::Fixed(5), PrefixExtractor::Delimiter(b'/')] {
        for (count, partitioned) in [(1, true), (1, false), (60, true)] {
            let place = TestDir::in_memory();
            let db = database(&place);
            let strict = options(Some(extractor)).filter_policy(FilterPolicy::Bloom { bits_per_key: 20.0 });
            let partition = db.open_partition("p", strict.partition_index_and_filters(partitioned)).unwrap();
            fill(&partition, count);
            partition.flush().unwrap();
            partition.major_compact().unwrap();
            let before = data_requests(&db);
            for user in (2..400).step_by(2) {
                assert_eq!(partition.prefix(format!("{user:04}/")).count(), 0);
                assert_eq!(partition.prefix(format!("{user:04}/0")).rev().count(), 0);
                assert_eq!(partition.range(format!("{user:04}/1")..=format!("{user:04}/2")).count(), 0);
            }
            let read = data_requests(&db) - before;
            assert!(read < 40, "{extractor:?} {count}: {read} data blocks in 597 scans"); // false positives
            for user in (1..400).step_by(2) {
                assert_eq!(partition.prefix(format!("{user:04}/")).count(), count as usize, "{extractor:?}: {user}");
                assert_eq!(partition.prefix(format!("{user:04}/")).rev().count(), count as usize);
            }
            assert_eq!(partition.prefix("00").count(), 50 * count as usize, "shorter than the extractor's prefix");
        }
    }
}

#[test]
fn without_extractor_data_blocks_are_read() {
    let place = TestDir::in_memory();
    let db = database(&place);
    let partition = db.open_partition("p", options(None)).unwrap();
    fill(&partition, 1);
    partition.flush().unwrap();
    partition.major_compact().unwrap();
    let before = data_requests(&db);
    (2..400).step_by(2).for_each(|user| assert_eq!(partition.prefix(format!("{user:04}/")).count(), 0));
    assert!(data_requests(&db) - before >= 150);
}

#[test]
fn comparator_that_is_not_bytewise_is_invalid() {
    let place = TestDir::in_memory();
    let db = database(&place);
    let zero = options(Some(PrefixExtractor::Fixed(0)));
    assert_eq!(db.open_partition("p", zero).unwrap_err().kind(), ErrorKind::Invalid);
    for order in TestOrder::ALL {
        let options = options(Some(PrefixExtractor::Fixed(2))).data_block_index_type(DataBlockIndexType::BinarySearch);
        let name = format!("{order:?}");
        let opened = match order.comparator() {
            Some(comparator) => db.open_partition_with_comparator(&name, options, comparator),
            None => db.open_partition(&name, options),
        };
        match order {
            TestOrder::Bytes => assert!(opened.is_ok()),
            _ => assert_eq!(opened.unwrap_err().kind(), ErrorKind::Invalid, "{order:?}"),
        }
    }
}

#[test]
fn options_with_extractor_are_stored() {
    let place = TestDir::in_memory();
    let db = database(&place);
    let extractors = [("a", PrefixExtractor::Fixed(4096)), ("b", PrefixExtractor::Delimiter(0xff))];
    for (name, extractor) in extractors {
        db.open_partition(name, options(Some(extractor))).unwrap();
    }
    drop(db);
    let db = database(&place);
    for (name, extractor) in extractors {
        assert_eq!(db.partition(name).unwrap().options(), options(Some(extractor)));
    }
}

/// A key of a few bytes, some of them at the ends of their range.
fn random_key(rng: &mut SeededRng) -> Vec<u8> {
    (0..rng.below(5)).map(|_| rng.pick(&[0, b'/', b'a', b'b', 0xfe, 0xff])).collect()
}

fn random_bound(rng: &mut SeededRng) -> Bound<Vec<u8>> {
    let key = random_key(rng);
    match rng.below(5) {
        0 => Bound::Unbounded,
        1 | 2 => Bound::Excluded(key),
        _ => Bound::Included(key),
    }
}

fn is_within(key: &[u8], bounds: &(Bound<Vec<u8>>, Bound<Vec<u8>>)) -> bool {
    let above = match &bounds.0 {
        Bound::Included(low) => key >= &low[..],
        Bound::Excluded(low) => key > &low[..],
        Bound::Unbounded => true,
    };
    let below = match &bounds.1 {
        Bound::Included(high) => key <= &high[..],
        Bound::Excluded(high) => key < &high[..],
        Bound::Unbounded => true,
    };
    above && below
}

fn keys(found: Iter) -> Vec<Vec<u8>> {
    found.map(|pair| pair.unwrap().0.to_vec()).collect()
}

fn check_random_scan(partition: &Partition, model: &BTreeMap<Vec<u8>, u8>, rng: &mut SeededRng) {
    let bounds = (random_bound(rng), random_bound(rng));
    let expected: Vec<Vec<u8>> = model.keys().filter(|key| is_within(key, &bounds)).cloned().collect();
    assert!(keys(partition.range(bounds.clone())) == expected, "{bounds:?}");
    let prefix = random_key(rng);
    let expected: Vec<Vec<u8>> = model.keys().filter(|key| key.starts_with(&prefix)).cloned().collect();
    assert!(keys(partition.prefix(&prefix)) == expected, "prefix {prefix:?}");
    let backward = partition.prefix(&prefix).rev().map(|pair| pair.unwrap().0.to_vec());
    assert!(backward.eq(expected.into_iter().rev()), "prefix {prefix:?} from the back");
}

/// Tables written with different extractors and without, in any mixture.
#[test]
fn random_scans_agree_with_a_map() {
    const EXTRACTORS: [Option<PrefixExtractor>; 5] = [
        None,
        Some(PrefixExtractor::Fixed(1)),
        Some(PrefixExtractor::Fixed(2)),
        Some(PrefixExtractor::Fixed(3)),
        Some(PrefixExtractor::Delimiter(b'/')),
    ];
    for seed in test_seeds(10) {
        let place = TestDir::in_memory();
        let mut rng = SeededRng::new(seed);
        let db = database(&place);
        let mut model = BTreeMap::new();
        for round in 0..12 {
            let partition = db.open_partition("p", Default::default()).unwrap();
            partition.set_options(options(rng.pick(&EXTRACTORS))).unwrap();
            for _ in 0..rng.below(60) {
                let key = random_key(&mut rng);
                if rng.chance_one_in(5) {
                    partition.remove(&key).unwrap();
                    model.remove(&key);
                } else {
                    partition.insert(&key, [round]).unwrap();
                    model.insert(key, round);
                }
            }
            match rng.below(5) {
                0 => partition.major_compact().unwrap(),
                1 => {}
                _ => partition.flush().unwrap(),
            }
            (0..150).for_each(|_| check_random_scan(&partition, &model, &mut rng));
        }
    }
}

//! Iterators that are advanced from both ends, by copying and by borrowing calls in turns, during writes.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use azekura::testing::{Fault, FaultFs, FaultPlan, MemFs, OpKind, SeededRng, TestEnv, TestOrder};
use azekura::{Config, ErrorKind, Iter, KvSeparationOptions, Partition, PartitionCreateOptions};

use crate::pools::{config, open_pool, pool_options};
use crate::testkit::Map;
use crate::testkit::ordered_partitions::open_ordered;
use crate::testkit::property::{check_property, random_seeds};
use crate::testkit::seeds::test_seeds;

/// The call that returns the next pair.
const ACCESS_MODES: u64 = 4;

type IterPair = (Vec<u8>, Vec<u8>);

/// One step; from the back if `back`.
fn step_iter(iter: &mut Iter, mode: u64) -> (Option<IterPair>, bool) {
    let owned =
        |pair: azekura::Result<(&[u8], &[u8])>| pair.map(|(key, value)| (key.to_vec(), value.to_vec())).unwrap();
    let copied = |pair: azekura::Result<(azekura::Slice, azekura::Slice)>| {
        let (key, value) = pair.unwrap();
        (key.to_vec(), value.to_vec())
    };
    match mode {
        0 => (iter.next().map(copied), false),
        1 => (iter.next_ref().map(owned), false),
        2 => (iter.next_back().map(copied), true),
        _ => (iter.next_back_ref().map(owned), true),
    }
}

fn random_key(rng: &mut SeededRng) -> Vec<u8> {
    match rng.below(3) {
        0 => rng.below(400u64).to_be_bytes().to_vec(),
        1 => format!("key {:03}", rng.below(400)).into_bytes(),
        _ => vec![b'x'; rng.below(200)],
    }
}

/// Puts a value of any length, or removes one, in all partitions.
fn random_write(rng: &mut SeededRng, partitions: &[&Partition], model: &mut Map) {
    let key = random_key(rng);
    if rng.chance_one_in(4) {
        partitions.iter().for_each(|part| part.remove(&key).unwrap());
        model.remove(&key);
        return;
    }
    let len = rng.pick(&[0, 7, 30, 31, 100, 127, 128, 300, 1000, 1100, 5000]);
    let value = rng.random_bytes(len);
    partitions.iter().for_each(|part| part.insert(&key, &value).unwrap());
    model.insert(key, value);
}

fn random_bound(rng: &mut SeededRng) -> Bound<Vec<u8>> {
    match rng.below(4) {
        0 => Bound::Excluded(random_key(rng)),
        1 => Bound::Included(random_key(rng)),
        _ => Bound::Unbounded,
    }
}

/// The pairs of a map within the bounds; none if the bounds are reversed.
fn expected_pairs(model: &Map, bounds: &(Bound<Vec<u8>>, Bound<Vec<u8>>)) -> Vec<IterPair> {
    let model: &BTreeMap<Vec<u8>, Vec<u8>> = model;
    let above = |key: &Vec<u8>| match &bounds.0 {
        Bound::Unbounded => true,
        Bound::Included(low) => key >= low,
        Bound::Excluded(low) => key > low,
    };
    let below = |key: &Vec<u8>| match &bounds.1 {
        Bound::Unbounded => true,
        Bound::Included(high) => key <= high,
        Bound::Excluded(high) => key < high,
    };
    model.iter().filter(|(key, _)| above(key) && below(key)).map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// One iterator over each of three partitions with the same content, from open to end.
fn check_iters(rng: &mut SeededRng, partitions: &[&Partition; 3], model: &mut Map) {
    if rng.chance_one_in(10) {
        partitions.iter().for_each(|part| part.flush().unwrap());
    }
    let bounds = (random_bound(rng), random_bound(rng));
    let pairs = expected_pairs(model, &bounds);
    // The iterators still have the pairs from `front` up to `back`.
    let (mut front, mut back) = (0, pairs.len());
    // From no seeks to one at almost every step.
    let steps_per_seek = rng.pick(&[None, Some(3), Some(30), Some(1_000)]);
    let mut is_at_end = false;
    // All mixtures: from long runs of one kind of call to a change at each step.
    let steps_per_mode = rng.pick(&[1, 4, 40, 200]);
    let mut mode = rng.below(ACCESS_MODES);
    let mut iters = partitions.map(|part| part.range::<Vec<u8>>(bounds.clone()));
    loop {
        if steps_per_seek.is_some_and(|steps| rng.chance_one_in(if is_at_end { 2 } else { steps })) {
            let key = random_key(rng);
            if rng.chance_one_in(2) {
                iters.iter_mut().for_each(|iter| iter.seek(&key));
                front = pairs.partition_point(|(other, _)| *other < key);
            } else {
                iters.iter_mut().for_each(|iter| iter.seek_back(&key));
                back = pairs.partition_point(|(other, _)| *other <= key);
            }
        }
        let found = iters.each_mut().map(|iter| step_iter(iter, mode));
        let expected = match found[0].1 {
            _ if front >= back => None,
            true => {
                back -= 1;
                pairs.get(back).cloned()
            }
            false => {
                front += 1;
                pairs.get(front - 1).cloned()
            }
        };
        for (found, _) in &found {
            assert_eq!(*found, expected, "mode {mode} within {bounds:?}");
        }
        is_at_end = expected.is_none();
        if is_at_end && (steps_per_seek.is_none() || rng.chance_one_in(6)) {
            break;
        }
        if rng.chance_one_in(10) {
            random_write(rng, partitions, model);
        }
        if is_at_end || rng.chance_one_in(steps_per_mode) {
            mode = rng.below(ACCESS_MODES);
        }
    }
    for mode in 0..ACCESS_MODES {
        assert!(iters.iter_mut().all(|iter| step_iter(iter, mode).0.is_none()), "it has ended");
    }
}

#[test]
fn iter_yields_each_pair_once_from_both_ends() {
    for seed in test_seeds(6) {
        let case = (random_seeds(400), random_seeds(32));
        check_property("iter_yields_each_pair_once_from_both_ends", seed, &case, |(writes, rounds)| {
            let fs = MemFs::new();
            let db = config(&fs).open().unwrap();
            let separation = PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default());
            let pool = open_pool(&db, "pool");
            let table = db.open_partition("table", Default::default()).unwrap();
            let separated = db.open_partition("separated", separation).unwrap();
            let partitions = [&pool, &table, &separated];
            let mut model = Map::new();
            writes.iter().for_each(|seed| random_write(&mut SeededRng::new(*seed), &partitions, &mut model));
            rounds.iter().for_each(|seed| check_iters(&mut SeededRng::new(*seed), &partitions, &mut model));
        });
    }
}

/// A read error ends an iterator; a seek starts it again.
#[test]
fn iter_continues_by_seek_after_read_error() {
    let fs = FaultFs::new(Arc::new(MemFs::new()));
    let config = Config::new("/db").fs(Arc::new(fs.clone())).env(Arc::new(TestEnv::new(1))).workers(0).cache_size(0);
    let db = config.open().unwrap();
    let part = db.open_partition("p", PartitionCreateOptions::default().block_size(128)).unwrap();
    (0..100u8).for_each(|n| part.insert([n], [n; 40]).unwrap());
    part.flush().unwrap();
    let mut iter = part.iter();
    assert_eq!(iter.next().unwrap().unwrap().0, [0]);
    assert_eq!(iter.next_back().unwrap().unwrap().0, [99]);
    let broken = FaultPlan::new(OpKind::Read, 1, Fault::Error(std::io::ErrorKind::Other));
    fs.inject(broken.in_path(".sst").forever());
    let error = iter.by_ref().find_map(Result::err).expect("blocks are read during the iteration");
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(iter.next().is_none() && iter.next_back().is_none(), "the error has ended the iterator");
    iter.seek([50]);
    assert_eq!(iter.next().unwrap().unwrap_err().kind(), ErrorKind::Io);
    fs.clear_faults();
    assert!(iter.next().is_none(), "only a seek starts it again");
    iter.seek([50]);
    assert_eq!(iter.next_back().unwrap().unwrap().0, [99], "the back is at its bound again");
    let keys: Vec<u8> = iter.map(|pair| pair.unwrap().0[0]).collect();
    assert_eq!(keys, (50..99).collect::<Vec<u8>>());
}

/// Regression: after a seek, an iterator whose creation failed returned no entry and no error.
#[test]
fn failed_iter_repeats_its_error_after_a_seek() {
    let db = config(&MemFs::new()).open().unwrap();
    let part = open_ordered(TestOrder::Reversed, &db, "p", Default::default(), None).unwrap();
    part.insert("a", "1").unwrap();
    let mut iter = part.prefix("a"); // requires bytewise order
    for round in 0..3 {
        assert_eq!(iter.next().unwrap().unwrap_err().kind(), ErrorKind::Invalid, "round {round}");
        assert!(iter.next().is_none() && iter.next_back().is_none() && iter.next_ref().is_none());
        if round == 1 { iter.seek_back("a") } else { iter.seek("a") }
    }
    assert_eq!(iter.next_back_ref().unwrap().unwrap_err().kind(), ErrorKind::Invalid);
}

/// Seeks to keys that exist and that do not, in every key order, in both directions.
#[test]
fn seeks_follow_every_key_order() {
    for order in TestOrder::ALL {
        let fs = MemFs::new();
        let db = config(&fs).open().unwrap();
        let pool = open_ordered(order, &db, "pool", pool_options(4 << 20), None).unwrap();
        let table = open_ordered(order, &db, "table", Default::default(), None).unwrap();
        let mut rng = SeededRng::new(7);
        let mut random_key = || order.valid_key(&rng.random_bytes(2));
        let mut model = BTreeMap::new();
        for n in 0..400u32 {
            let key = random_key();
            for part in [&pool, &table] {
                part.insert(&key, n.to_be_bytes()).unwrap();
            }
            model.insert(order.canonical(&key), n.to_be_bytes());
            if n == 300 {
                table.flush().unwrap();
            }
        }
        let mut iters = [pool.values(), table.values()];
        for _ in 0..300 {
            let target = random_key();
            let canonical = order.canonical(&target);
            for values in &mut iters {
                values.seek(&target);
                values.seek_back(&target);
                let at_target = values.next().map(|value| value.unwrap().to_vec());
                assert_eq!(at_target, model.get(&canonical).map(|value| value.to_vec()), "{order:?}");
            }
        }
        drop(iters);
        let mut iters = [pool.values(), table.values()];
        for _ in 0..300 {
            let target = random_key();
            let canonical = order.canonical(&target);
            for values in &mut iters {
                values.seek(&target);
                let found = values.next().map(|value| value.unwrap().to_vec());
                let expected = model.range(canonical.clone()..).next().map(|(_, value)| value.to_vec());
                assert_eq!(found, expected, "{order:?}, at or after {target:?}");
            }
        }
        let mut iters = [pool.values(), table.values()];
        for _ in 0..300 {
            let target = random_key();
            let canonical = order.canonical(&target);
            for values in &mut iters {
                values.seek_back(&target);
                let found = values.next_back().map(|value| value.unwrap().to_vec());
                let expected = model.range(..=canonical.clone()).next_back().map(|(_, value)| value.to_vec());
                assert_eq!(found, expected, "{order:?}, at or before {target:?}");
            }
        }
    }
}

//! Iterators that are advanced from both ends, by copying and by borrowing calls in turns, during writes.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use azekura::fs::MemFs;
use azekura::{Iter, KvSeparationOptions, Partition, PartitionCreateOptions};

use crate::pools::{config, open_pool};
use crate::testkit::{FailureReport, Map, SeededRng};

/// The call that returns the next pair.
const ACCESS_MODES: u64 = 4;

type IterPair = (Vec<u8>, Vec<u8>);

/// One step; from the back if `back`.
fn step_iter(walk: &mut Iter, asked: u64) -> (Option<IterPair>, bool) {
    let owned =
        |pair: azekura::Result<(&[u8], &[u8])>| pair.map(|(key, value)| (key.to_vec(), value.to_vec())).unwrap();
    let copied = |pair: azekura::Result<(azekura::Slice, azekura::Slice)>| {
        let (key, value) = pair.unwrap();
        (key.to_vec(), value.to_vec())
    };
    match asked {
        0 => (walk.next().map(copied), false),
        1 => (walk.next_ref().map(owned), false),
        2 => (walk.next_back().map(copied), true),
        _ => (walk.next_back_ref().map(owned), true),
    }
}

fn random_key(dice: &mut SeededRng) -> Vec<u8> {
    match dice.below(3) {
        0 => dice.below(400).to_be_bytes().to_vec(),
        1 => format!("key {:03}", dice.below(400)).into_bytes(),
        _ => vec![b'x'; dice.index(200)],
    }
}

/// Puts a value of any length, or removes one, in all partitions.
fn random_write(dice: &mut SeededRng, parts: &[&Partition], model: &mut Map) {
    let key = random_key(dice);
    if dice.chance_one_in(4) {
        parts.iter().for_each(|part| part.remove(&key).unwrap());
        model.remove(&key);
        return;
    }
    let len = dice.pick(&[0, 7, 30, 31, 100, 127, 128, 300, 1000, 1100, 5000]);
    let value = dice.random_bytes(len);
    parts.iter().for_each(|part| part.insert(&key, &value).unwrap());
    model.insert(key, value);
}

fn random_bound(dice: &mut SeededRng) -> Bound<Vec<u8>> {
    match dice.below(4) {
        0 => Bound::Excluded(random_key(dice)),
        1 => Bound::Included(random_key(dice)),
        _ => Bound::Unbounded,
    }
}

/// The pairs of a map within the bounds; none if the bounds are reversed.
fn expected_pairs(model: &Map, bounds: &(Bound<Vec<u8>>, Bound<Vec<u8>>)) -> VecDeque<IterPair> {
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

#[test]
fn iter_yields_each_pair_once_from_both_ends() {
    for seed in 1..=6 {
        let (mut dice, replay) = (SeededRng::new(seed), FailureReport::new("walks", seed));
        let fs = MemFs::new();
        let db = config(&fs).open().unwrap();
        let apart = PartitionCreateOptions::default().with_kv_separation(KvSeparationOptions::default());
        let (pool, table, apart) = (
            open_pool(&db, "pool"),
            db.open_partition("table", Default::default()).unwrap(),
            db.open_partition("apart", apart).unwrap(),
        );
        let parts = [&pool, &table, &apart];
        let mut model = Map::new();
        (0..400).for_each(|_| random_write(&mut dice, &parts, &mut model));
        for round in 0..30 {
            replay.set_progress(round);
            if dice.chance_one_in(10) {
                parts.iter().for_each(|part| part.flush().unwrap());
            }
            let bounds = (random_bound(&mut dice), random_bound(&mut dice));
            let all = expected_pairs(&model, &bounds);
            // All mixtures: from long runs of one kind of call to a change at each step.
            let (turns, mut how) = (dice.pick(&[1, 4, 40, 200]), dice.below(ACCESS_MODES));
            let mut walks = parts.map(|part| part.range::<Vec<u8>>(bounds.clone()));
            let mut left = all.clone();
            loop {
                let found = walks.each_mut().map(|walk| step_iter(walk, how));
                let expected = if found[0].1 { left.pop_back() } else { left.pop_front() };
                for (found, _) in &found {
                    assert_eq!(*found, expected, "asked {how} within {bounds:?}");
                }
                if expected.is_none() {
                    break;
                }
                if dice.chance_one_in(10) {
                    random_write(&mut dice, &parts, &mut model);
                }
                if dice.chance_one_in(turns) {
                    how = dice.below(ACCESS_MODES);
                }
            }
            for how in 0..ACCESS_MODES {
                assert!(walks.iter_mut().all(|walk| step_iter(walk, how).0.is_none()), "it has ended");
            }
        }
    }
}

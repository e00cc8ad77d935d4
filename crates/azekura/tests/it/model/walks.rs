//! Walks that are taken from both ends, by copies and by loans in turns, while others write.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use azekura::fs::MemFs;
use azekura::{Iter, KvSeparationOptions, Partition, PartitionCreateOptions};

use crate::pools::{config, open_pool};
use crate::world::{Dice, Map, Replay};

/// How a pair is asked for.
const ASKED: u64 = 4;

type Pair = (Vec<u8>, Vec<u8>);

/// One step; from the back if `back`.
fn step(walk: &mut Iter, asked: u64) -> (Option<Pair>, bool) {
    let owned =
        |pair: azekura::Result<(&[u8], &[u8])>| pair.map(|(key, value)| (key.to_vec(), value.to_vec())).unwrap();
    let copied = |pair: azekura::Result<(azekura::Slice, azekura::Slice)>| {
        let (key, value) = pair.unwrap();
        (key.to_vec(), value.to_vec())
    };
    match asked {
        0 => (walk.next().map(copied), false),
        1 => (walk.lend().map(owned), false),
        2 => (walk.next_back().map(copied), true),
        _ => (walk.lend_back().map(owned), true),
    }
}

fn key(dice: &mut Dice) -> Vec<u8> {
    match dice.below(3) {
        0 => dice.below(400).to_be_bytes().to_vec(),
        1 => format!("key {:03}", dice.below(400)).into_bytes(),
        _ => vec![b'x'; dice.index(200)],
    }
}

/// Puts a value of any length, or takes one away, in all partitions.
fn write(dice: &mut Dice, parts: &[&Partition], model: &mut Map) {
    let key = key(dice);
    if dice.one_in(4) {
        parts.iter().for_each(|part| part.remove(&key).unwrap());
        model.remove(&key);
        return;
    }
    let len = dice.pick(&[0, 7, 30, 31, 100, 127, 128, 300, 1000, 1100, 5000]);
    let value = dice.noise(len);
    parts.iter().for_each(|part| part.insert(&key, &value).unwrap());
    model.insert(key, value);
}

fn bound(dice: &mut Dice) -> Bound<Vec<u8>> {
    match dice.below(4) {
        0 => Bound::Excluded(key(dice)),
        1 => Bound::Included(key(dice)),
        _ => Bound::Unbounded,
    }
}

/// What a map shows within the bounds; nothing where they are reversed.
fn shown(model: &Map, bounds: &(Bound<Vec<u8>>, Bound<Vec<u8>>)) -> VecDeque<Pair> {
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
fn both_ends_give_each_pair_once_however_they_are_asked() {
    for seed in 1..=6 {
        let (mut dice, replay) = (Dice::new(seed), Replay::new("walks", seed));
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
        (0..400).for_each(|_| write(&mut dice, &parts, &mut model));
        for round in 0..30 {
            replay.at(round);
            if dice.one_in(10) {
                parts.iter().for_each(|part| part.flush().unwrap());
            }
            let bounds = (bound(&mut dice), bound(&mut dice));
            let all = shown(&model, &bounds);
            // In every mixture: from long runs of one kind to a change at each step.
            let (turns, mut how) = (dice.pick(&[1, 4, 40, 200]), dice.below(ASKED));
            let mut walks = parts.map(|part| part.range::<Vec<u8>>(bounds.clone()));
            let mut left = all.clone();
            loop {
                let found = walks.each_mut().map(|walk| step(walk, how));
                let expected = if found[0].1 { left.pop_back() } else { left.pop_front() };
                for (found, _) in &found {
                    assert_eq!(*found, expected, "asked {how} within {bounds:?}");
                }
                if expected.is_none() {
                    break;
                }
                if dice.one_in(10) {
                    write(&mut dice, &parts, &mut model);
                }
                if dice.one_in(turns) {
                    how = dice.below(ASKED);
                }
            }
            for how in 0..ASKED {
                assert!(walks.iter_mut().all(|walk| step(walk, how).0.is_none()), "it has ended");
            }
        }
    }
}

//! Writers who take their numbers beside each other, under every schedule that the explorer can think of.
//!
//! Each change notes its number when it gets it. So whoever reads at a point knows what he must see there: all changes
//! up to it, in the order of their numbers, and nothing else.
//!
//! The scenarios at the end leave out one of the things that writers rely on, and must be found out.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::model::{options, world};
use super::world::World;
use crate::base::{Error, Result, SeqNo};
use crate::cursor::Cursor;
use crate::engine::Numbers;
use crate::mem::atomic::{Mutex, yield_now};
use crate::mem::explorer::{explore, spawn};
use crate::mem::region::PAGE;
use crate::pmem::medium::Image;

/// What may be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// A change is visible as soon as it is made, whatever is under way before it.
    Ahead,
    /// A number is taken before the leaf is locked.
    Early,
    /// Who closes the gate does not wait for those who are inside.
    Impatient,
}

/// A key with the value that it got, or none: it was removed.
type Made = (u64, u8, Option<u8>);

struct Shared {
    world: World<Image>,
    numbers: Numbers,
    made: Mutex<Vec<Made>>,
    fault: Fault,
}

/// Longer than what a slice holds itself, and tells the change.
fn value(change: u8) -> Vec<u8> {
    vec![change; 40]
}

impl Shared {
    /// Key 10 and key 20 are there.
    fn new(fault: Fault) -> Arc<Shared> {
        let world = world(&options(16 * PAGE, 4));
        let numbers = Numbers::new(world.visible.clone());
        let shared = Shared { world, numbers, made: Mutex::new(Vec::new()), fault };
        assert!(shared.put(10, 1) && shared.put(20, 2));
        Arc::new(shared)
    }

    fn note(&self, seqno: SeqNo, key: u8, change: Option<u8>) {
        self.made.lock().unwrap().push((seqno.0, key, change));
    }

    /// Makes a change, which is visible when this returns; false if the gate is closed.
    fn make(&self, key: u8, change: Option<u8>) -> bool {
        let (tree, mut taken, mut early) = (&self.world.tree, None, None);
        if self.fault == Fault::Early {
            early = self.numbers.take();
        }
        let mut turn = || {
            taken = if self.fault == Fault::Early { early } else { self.numbers.take() };
            taken.into_iter().for_each(|seqno| self.note(seqno, key, change));
            Ok(taken)
        };
        let made = match change {
            Some(change) => tree.put_in_turn(&[key], &value(change), &mut turn),
            None => tree.remove_in_turn(&[key], &mut turn),
        };
        assert_eq!(made.unwrap(), taken.is_some());
        let Some(seqno) = taken else { return false };
        if self.fault == Fault::Ahead {
            self.world.visible.publish(seqno);
        } else {
            self.numbers.finish(seqno);
            assert!(self.numbers.wait(seqno));
        }
        assert!(self.world.visible.get() >= seqno);
        true
    }

    fn put(&self, key: u8, change: u8) -> bool {
        self.make(key, Some(change))
    }

    /// Makes changes that are visible together, or none.
    fn batch(&self, puts: &[(u8, u8)]) {
        match self.fault {
            Fault::Impatient => {}
            _ => self.numbers.close(),
        }
        let mut seqno = self.world.visible.get();
        for (key, change) in puts {
            seqno = seqno.plus(1);
            self.note(seqno, *key, Some(*change));
            self.world.tree.put(&[*key], seqno, &value(*change)).unwrap();
        }
        self.world.visible.publish(seqno);
        self.numbers.open(true);
    }

    /// What there is at a point.
    fn at(&self, point: SeqNo) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let mut made: Vec<Made> = self.made.lock().unwrap().iter().filter(|made| made.0 <= point.0).copied().collect();
        made.sort_unstable();
        assert!((1..=point.0).eq(made.iter().map(|made| made.0)), "a number is nobody's, or two have it: {made:?}");
        let mut there = BTreeMap::new();
        for (_, key, change) in made {
            match change {
                Some(change) => drop(there.insert(vec![key], value(change))),
                None => drop(there.remove(&[key][..])),
            }
        }
        there
    }

    /// One point shows what was made up to it, each time it is looked at, and to who asks for each key.
    fn walk(&self) {
        let pin = self.world.points.register();
        let there = self.at(pin.at());
        let mut cursor = self.world.tree.cursor(pin.at());
        for _ in 0..2 {
            let mut found = BTreeMap::new();
            cursor.seek_to_first().unwrap();
            while let Some(entry) = cursor.peek() {
                found.insert(entry.user.to_vec(), entry.value.to_vec());
                cursor.next().unwrap();
            }
            assert_eq!(found, there, "at {:?}", pin.at());
        }
        for (key, value) in &there {
            let got = self.world.tree.get_at(key, pin.at()).unwrap();
            assert_eq!(got.as_deref(), Some(value.as_slice()));
        }
    }

    /// When all changes are made and nobody reads any more.
    fn ends_well(&self, changes: u64) {
        self.numbers.close();
        assert_eq!(self.world.visible.get(), SeqNo(changes));
        self.walk();
        self.world.is_sound();
        // That has given up all versions: now the leaves alone say what there is.
        self.walk();
    }
}

type Part = fn(&Shared);

/// Runs the parts beside each other, the last one here; so many changes have been made then.
fn race(shared: &Arc<Shared>, parts: &[Part], changes: u64) {
    let (last, others) = parts.split_last().expect("somebody does something");
    let others = others.iter().copied().map(|part| {
        let shared = Arc::clone(shared);
        spawn(move || part(&shared))
    });
    let others: Vec<_> = others.collect();
    last(shared);
    others.into_iter().for_each(|thread| thread.join().unwrap());
    shared.ends_well(changes);
}

const WALK: Part = |shared| (0..2).for_each(|_| shared.walk());

fn of_one_key(fault: Fault) {
    let parts: [Part; 3] = [
        WALK,
        |shared| assert!(shared.put(20, 3) && shared.make(20, None)),
        |shared| assert!(shared.put(20, 4) && shared.put(20, 5)),
    ];
    race(&Shared::new(fault), &parts, 6);
}

#[test]
fn two_writers_of_one_key() {
    explore(|| of_one_key(Fault::None));
}

fn of_different_keys(fault: Fault) {
    let parts: [Part; 3] = [
        WALK,
        |shared| assert!(shared.put(15, 3) && shared.put(10, 4)),
        // Splits the leaf.
        |shared| assert!(shared.put(25, 5) && shared.put(30, 6)),
    ];
    race(&Shared::new(fault), &parts, 6);
}

#[test]
fn two_writers_of_different_keys_beside_a_reader() {
    explore(|| of_different_keys(Fault::None));
}

/// More are done than there are places for before one that is not.
#[test]
fn three_writers_with_more_numbers_than_places() {
    explore(|| {
        let parts: [Part; 3] = [
            |shared| assert!(shared.put(10, 3) && shared.put(20, 4)),
            |shared| assert!(shared.put(20, 5) && shared.put(10, 6)),
            |shared| assert!(shared.put(30, 7) && shared.put(30, 8)),
        ];
        race(&Shared::new(Fault::None), &parts, 8);
    });
}

fn beside_batches(fault: Fault) {
    let parts: [Part; 3] = [
        WALK,
        |shared| shared.batch(&[(10, 3), (20, 4)]),
        |shared| {
            for (key, change) in [(20, 5), (10, 6)] {
                while !shared.put(key, change) {
                    yield_now();
                }
            }
        },
    ];
    race(&Shared::new(fault), &parts, 6);
}

#[test]
fn a_batch_beside_single_changes() {
    explore(|| beside_batches(Fault::None));
}

fn beside_closing(fault: Fault) {
    let shared = Shared::new(fault);
    let writers = [30, 20].map(|key| {
        let shared = Arc::clone(&shared);
        spawn(move || u64::from(shared.put(key, key)) + u64::from(shared.put(key, key + 1)))
    });
    if fault != Fault::Impatient {
        shared.numbers.close();
    }
    // What is visible now is the last there is.
    let (last, made) = (shared.world.visible.get(), shared.made.lock().unwrap().len() as u64);
    assert_eq!(last.0, made);
    let puts: u64 = writers.into_iter().map(|writer| writer.join().unwrap()).sum();
    assert_eq!((shared.world.visible.get(), puts + 2), (last, made));
    shared.walk();
}

#[test]
fn closing_beside_single_changes() {
    explore(|| beside_closing(Fault::None));
}

/// A change fails when it has its number: whoever comes behind it ends, and what is before it is seen.
#[test]
fn nobody_waits_for_a_number_that_is_lost() {
    explore(|| {
        let shared = Shared::new(Fault::None);
        let loses = {
            let shared = Arc::clone(&shared);
            spawn(move || {
                let Some(lost) = shared.numbers.take() else { panic!("the gate is open") };
                shared.numbers.lose(lost);
                lost
            })
        };
        let others = [30, 20].map(|key| {
            let shared = Arc::clone(&shared);
            spawn(move || {
                let mut taken = None;
                let take = || -> Result<_> {
                    taken = shared.numbers.take();
                    Ok(taken)
                };
                let made = shared.world.tree.put_in_turn(&[key], &value(key), take);
                assert_eq!(made.unwrap(), taken.is_some());
                taken.into_iter().for_each(|seqno| shared.numbers.finish(seqno));
                taken.map(|seqno| (seqno, shared.numbers.wait(seqno)))
            })
        });
        let lost = loses.join().unwrap();
        for (seqno, seen) in others.into_iter().filter_map(|other| other.join().unwrap()) {
            assert_eq!(seen, seqno < lost);
        }
        shared.numbers.close();
        shared.numbers.open(true);
        assert_eq!((shared.world.visible.get().plus(1), shared.numbers.take()), (lost, None));
    });
}

/// What fails before it has a number leaves no trace, and takes none.
#[test]
fn what_is_refused_takes_no_number() {
    explore(|| {
        let shared = Shared::new(Fault::None);
        let other = {
            let shared = Arc::clone(&shared);
            spawn(move || assert!(shared.put(30, 3)))
        };
        let refuse = || Err(Error::invalid("refused"));
        assert!(shared.world.tree.put_in_turn(&[20], &value(9), refuse).is_err());
        assert!(shared.world.tree.remove_in_turn(&[10], refuse).is_err());
        assert!(shared.world.tree.put_in_turn(&[40], &[0; 1 << 17], || panic!("there is no space")).is_err());
        other.join().unwrap();
        shared.ends_well(3);
    });
}

#[cfg(azekura_explore)]
mod left_out {
    use super::*;

    #[test]
    #[should_panic]
    fn nothing_is_visible_before_what_came_before_it() {
        explore(|| of_different_keys(Fault::Ahead));
    }

    #[test]
    #[should_panic]
    fn the_number_of_a_change_is_taken_with_its_leaf_locked() {
        explore(|| of_one_key(Fault::Early));
    }

    #[test]
    #[should_panic]
    fn a_batch_waits_for_those_who_have_numbers() {
        explore(|| beside_batches(Fault::Impatient));
    }

    #[test]
    #[should_panic]
    fn closing_waits_for_those_who_have_numbers() {
        explore(|| beside_closing(Fault::Impatient));
    }
}

//! The tree's readers beside its writers, under every schedule that the explorer can think of.
//!
//! Leaves of three records, two locks for all of them, and buffers that are reused as soon as they may be: a few
//! changes split, join and unlink leaves, and write slots and records over. What each change leaves is known
//! beforehand, so a reader can say of whatever it finds whether there was a moment for it.
//!
//! The scenarios at the end leave out one of the steps that readers or writers rely on, and must be found out.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::model::{options, world};
use super::world::World;
use crate::base::SeqNo;
use crate::cursor::Cursor;
use crate::mem::atomic::Mutex;
use crate::mem::explorer::{explore, spawn};
use crate::mem::region::PAGE;
use crate::pmem::medium::Image;
use crate::pmem::tree::Step;

/// A change: of this key, which is put or removed.
#[derive(Clone, Copy)]
enum Change {
    Put(u8),
    Remove(u8),
}
use Change::{Put, Remove};

/// A tree, and all changes that are ever made to it: that at `n` has the sequence number `n + 1`.
struct Shared {
    world: World<Image>,
    changes: &'static [Change],
    done: Mutex<Vec<u64>>,
}

/// Longer than what a slice holds itself, and tells the change.
fn value(key: u8, seqno: u64) -> Vec<u8> {
    [key, seqno as u8].repeat(20)
}

impl Shared {
    /// The first `before` changes are made.
    fn new(changes: &'static [Change], before: usize, without: Option<Step>) -> Arc<Shared> {
        let world = world(&options(16 * PAGE, 4));
        let shared = Shared { world, changes, done: Mutex::new(Vec::new()) };
        (1..=before as u64).for_each(|seqno| shared.make(seqno));
        shared.world.tree.leave_out(without);
        Arc::new(shared)
    }

    /// Makes the change of `seqno`. It is visible when all before it are made, too.
    fn make(&self, seqno: u64) {
        match self.changes[seqno as usize - 1] {
            Put(key) => self.world.tree.put(&[key], SeqNo(seqno), &value(key, seqno)).unwrap(),
            Remove(key) => assert!(self.world.tree.remove(&[key], SeqNo(seqno)).unwrap(), "{key} was not there"),
        }
        let mut done = self.done.lock().unwrap();
        done.push(seqno);
        while done.contains(&(self.visible() + 1)) {
            self.world.visible.publish(SeqNo(self.visible() + 1));
        }
    }

    fn visible(&self) -> u64 {
        self.world.visible.get().0
    }

    /// What there is at a point: of each key, which change put it.
    fn at(&self, point: u64) -> BTreeMap<u8, u64> {
        let mut there = BTreeMap::new();
        for (change, seqno) in self.changes[..point as usize].iter().zip(1..) {
            match change {
                Put(key) => drop(there.insert(*key, seqno)),
                Remove(key) => drop(there.remove(key)),
            }
        }
        there
    }

    fn get(&self, key: u8) {
        let from = self.visible();
        let found = self.world.tree.get(&[key]).unwrap();
        let to = self.visible();
        let right = |point| found.as_deref() == self.at(point).get(&key).map(|seqno| value(key, *seqno)).as_deref();
        assert!((from..=to).any(right), "key {key} was {found:?} at no moment from {from} to {to}");
    }

    /// One point shows the same forward and backward, and to who asks for each key.
    fn walk(&self) {
        let pin = self.world.points.register();
        let point = pin.at();
        let there: Vec<_> = self.at(point.0).into_iter().map(|(key, seqno)| (vec![key], value(key, seqno))).collect();
        let mut cursor = self.world.tree.cursor(point);
        let (mut up, mut down) = (Vec::new(), Vec::new());
        cursor.seek_to_first().unwrap();
        while let Some(entry) = cursor.peek() {
            up.push((entry.user.to_vec(), entry.value.to_vec()));
            cursor.next().unwrap();
        }
        assert_eq!(up, there, "going up at {:?}", point);
        cursor.seek_to_last().unwrap();
        while let Some(entry) = cursor.peek() {
            down.push((entry.user.to_vec(), entry.value.to_vec()));
            cursor.prev().unwrap();
        }
        down.reverse();
        assert_eq!(down, there, "going down at {:?}", point);
        for (key, value) in there {
            assert_eq!(self.world.tree.get_at(&key, point).unwrap().as_deref(), Some(value.as_slice()));
        }
    }

    /// When all changes are made and nobody reads any more.
    fn ends_well(&self) {
        assert_eq!(self.visible(), self.changes.len() as u64);
        self.walk();
        self.world.is_sound();
        // That has given up all versions: now the leaves alone say what there is.
        self.walk();
    }
}

type Reader = fn(&Shared);

const GET_20: Reader = |shared| (0..4).for_each(|_| shared.get(20));

/// Readers beside writers, each of which makes the changes of the numbers that are its own.
fn race(shared: &Arc<Shared>, readers: &'static [Reader], writers: &'static [&'static [u64]]) {
    let (first, others) = writers.split_first().expect("somebody writes");
    let read = readers.iter().map(|read| {
        let shared = Arc::clone(shared);
        spawn(move || read(&shared))
    });
    let read: Vec<_> = read.collect();
    let write = others.iter().map(|own| {
        let shared = Arc::clone(shared);
        spawn(move || own.iter().for_each(|seqno| shared.make(*seqno)))
    });
    let write: Vec<_> = write.collect();
    first.iter().for_each(|seqno| shared.make(*seqno));
    read.into_iter().chain(write).for_each(|thread| thread.join().unwrap());
    shared.ends_well();
}

/// The leaf is split twice, with the key that is looked for on either side.
const SPLITS: &[Change] = &[Put(10), Put(20), Put(30), Put(15), Put(25), Put(12)];

#[test]
fn readers_beside_a_writer_who_splits() {
    explore(|| {
        let shared = Shared::new(SPLITS, 3, None);
        race(
            &shared,
            &[|shared| [30, 10, 15].into_iter().for_each(|key| shared.get(key)), Shared::walk],
            &[&[4, 5, 6]],
        );
    });
}

/// A record is replaced, and the slot that it had is written over by another key, which is removed again.
const REPLACES: &[Change] = &[Put(10), Put(20), Put(20), Put(15), Remove(15), Put(20), Put(10)];

#[test]
fn readers_beside_a_writer_who_replaces() {
    explore(|| {
        let shared = Shared::new(REPLACES, 2, None);
        const GET: Reader = |shared| [20, 15, 20].into_iter().for_each(|key| shared.get(key));
        race(&shared, &[GET, Shared::walk], &[&[3, 4, 5, 6, 7]]);
    });
}

/// A record is replaced; another key takes its slot, then, when no version is needed any more, its space.
const REUSES: &[Change] = &[
    Put(20),
    Put(20),
    Put(15),
    Put(15),
    Put(15),
    Put(20),
    Put(15),
    Put(15),
    Put(15),
    Put(15),
    Put(20),
    Put(15),
    Put(15),
];

#[test]
fn a_reader_beside_a_writer_who_reuses_space() {
    explore(|| {
        let shared = Shared::new(REUSES, 1, None);
        race(&shared, &[GET_20, Shared::walk], &[&[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]);
    });
}

/// Two keys change places: what order their slots have is the other way round.
const TURNS: &[Change] = &[Put(10), Put(20), Put(20), Put(10), Put(20)];

#[test]
fn walks_beside_a_writer_who_turns_an_order_round() {
    explore(|| {
        let shared = Shared::new(TURNS, 2, None);
        race(&shared, &[Shared::walk, Shared::walk], &[&[3, 4, 5]]);
    });
}

/// Three leaves; two of them are joined, the one that is left is unlinked, and what is free then is used again.
const JOINS: &[Change] = &[
    Put(10),
    Put(20),
    Put(30),
    Put(40),
    Put(50),
    Put(60),
    Put(70),
    Remove(40),
    Remove(50),
    Remove(60),
    Remove(70),
    Put(45),
    Put(35),
];

#[test]
fn readers_beside_a_writer_who_joins_and_unlinks() {
    explore(|| {
        let shared = Shared::new(JOINS, 7, None);
        const GET: Reader = |shared| [60, 70, 10].into_iter().for_each(|key| shared.get(key));
        race(&shared, &[GET, Shared::walk], &[&[8, 9, 10, 11, 12, 13]]);
    });
}

/// One writer takes away what makes two leaves one, the other writes to them.
const BOTH: &[Change] = &[
    Put(10),
    Put(20),
    Put(30),
    Put(40),
    Remove(10),
    Put(45),
    Remove(20),
    Remove(45),
    Put(12),
    Put(55),
    Remove(30),
    Put(41),
];

#[test]
fn two_writers_with_keys_of_their_own() {
    explore(|| {
        let shared = Shared::new(BOTH, 4, None);
        race(&shared, &[Shared::walk], &[&[5, 7, 9, 11], &[6, 8, 10, 12]]);
    });
}

/// What is read was there, also when nobody may see anything else: two who split the same leaf.
#[test]
fn two_writers_who_split_the_same_leaf() {
    explore(|| {
        let shared = Shared::new(SPLITS, 3, None);
        race(&shared, &[|shared| [30, 25].into_iter().for_each(|key| shared.get(key))], &[&[4, 6], &[5]]);
    });
}

/// What the scenarios are named for happens in them. (The explorer has no use for one thread.)
#[cfg(not(azekura_explore))]
#[test]
fn leaves_are_split_and_joined() {
    for (changes, splits, joins) in [(SPLITS, 2, 0), (JOINS, 2, 2), (BOTH, 1, 1)] {
        let shared = Shared::new(changes, 0, None);
        let mut leaves = vec![1];
        for seqno in 1..=changes.len() as u64 {
            shared.make(seqno);
            leaves.push(shared.world.tree.usage().unwrap().1);
        }
        let more = leaves.windows(2).filter(|pair| pair[0] < pair[1]).count();
        let fewer = leaves.windows(2).filter(|pair| pair[0] > pair[1]).count();
        assert!(more >= splits && fewer >= joins, "{leaves:?}");
    }
}

#[cfg(azekura_explore)]
mod left_out {
    use super::*;

    #[test]
    #[should_panic]
    fn that_keys_have_another_leaf_is_said_before_they_go() {
        explore(|| {
            let shared = Shared::new(SPLITS, 3, Some(Step::Shape));
            race(&shared, &[|shared| (0..8).for_each(|_| shared.get(30))], &[&[4, 5, 6]]);
        });
    }

    #[test]
    #[should_panic]
    fn a_writer_who_waited_for_a_leaf_looks_whether_it_is_one_still() {
        explore(|| {
            let shared = Shared::new(BOTH, 4, Some(Step::Shape));
            race(&shared, &[], &[&[5, 7, 9, 11], &[6, 8, 10, 12]]);
        });
    }

    #[test]
    #[should_panic]
    fn an_order_is_that_of_one_version_of_a_leaf() {
        explore(|| {
            let shared = Shared::new(TURNS, 2, Some(Step::Order));
            race(&shared, &[Shared::walk], &[&[3, 4, 5]]);
        });
    }

    #[test]
    #[should_panic]
    fn space_is_not_reused_under_readers() {
        explore(|| {
            let shared = Shared::new(REUSES, 1, Some(Step::Limbo));
            race(
                &shared,
                &[GET_20, |shared| (0..12).for_each(|_| shared.get(20))],
                &[&[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]],
            );
        });
    }

    #[test]
    #[should_panic]
    fn what_a_point_shows_is_kept_before_the_leaf_forgets_it() {
        explore(|| {
            let shared = Shared::new(REPLACES, 2, Some(Step::Versions));
            race(&shared, &[Shared::walk], &[&[3, 4, 5, 6, 7]]);
        });
    }
}

//! A database and its model, side by side.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use azekura::fs::TestEnv;
use azekura::{Config, Database, Iter, Partition, Snapshot};

use super::book::{Book, Pair};
use crate::world::disk::Place;
use crate::world::order::Order;
use crate::world::{Dice, Shape};

/// The partitions of a run and the orders of their keys.
pub(super) const PARTITIONS: [(&str, Order); 9] = [
    ("one", Order::Bytes),
    ("two/..\u{0}", Order::Bytes),
    ("three \u{2713}", Order::Bytes),
    ("reversed", Order::Reversed),
    ("any case", Order::AnyCase),
    ("any case, hashed", Order::AnyCaseHashed),
    ("sealed", Order::Sealed),
    ("fixed", Order::Fixed),
    ("fixed, hashed", Order::FixedHashed),
];

/// How often each thing was done, and what the engine did meanwhile: a generator that never reaches a path proves
/// nothing about it.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) ops: BTreeMap<&'static str, u64>,
    pub(super) flushes: u64,
    pub(super) compactions: u64,
    pub(super) moves: u64,
    pub(super) levels: usize,
    pub(super) replayed: u64,
}

impl Tally {
    pub(super) fn add(&mut self, other: &Tally) {
        other.ops.iter().for_each(|(op, count)| *self.ops.entry(op).or_default() += count);
        self.flushes += other.flushes;
        self.compactions += other.compactions;
        self.moves += other.moves;
        self.levels = self.levels.max(other.levels);
        self.replayed += other.replayed;
    }
}

/// A partition that is open, with its model.
#[derive(Clone)]
pub(super) struct Half {
    pub(super) part: Partition,
    pub(super) book: Book,
}

/// A snapshot with what it should show.
pub(super) struct Moment {
    pub(super) snapshot: Snapshot,
    pub(super) halves: BTreeMap<&'static str, Half>,
}

/// An iterator that is used now and then, with what it has still to give.
pub(super) struct Stroll {
    pub(super) iter: Iter,
    pub(super) rest: VecDeque<Pair>,
    pub(super) of: &'static str,
}

pub(super) struct Subject {
    pub(super) place: Place,
    pub(super) shape: Shape,
    pub(super) env: TestEnv,
    pub(super) db: Option<Database>,
    pub(super) halves: BTreeMap<&'static str, Half>,
    pub(super) moments: Vec<Moment>,
    pub(super) strolls: Vec<Stroll>,
    pub(super) dice: Dice,
    pub(super) tally: Tally,
    pub(super) copies: u64,
}

impl Subject {
    pub(super) fn new(place: Place, seed: u64) -> Subject {
        let mut subject = Subject {
            place,
            shape: Shape::new(seed),
            env: TestEnv::new(seed),
            db: None,
            halves: BTreeMap::new(),
            moments: Vec::new(),
            strolls: Vec::new(),
            dice: Dice::new(seed ^ 0x0DE1),
            tally: Tally::default(),
            copies: 0,
        };
        subject.db = Some(subject.config().open().unwrap());
        subject.open_part(0);
        subject.open_part(3);
        subject.open_part(6 + (seed % 3) as usize);
        subject
    }

    pub(super) fn config(&self) -> Config {
        self.shape.config(&self.place.dir, Arc::clone(&self.place.fs), &self.env)
    }

    pub(super) fn db(&self) -> &Database {
        self.db.as_ref().expect("it is open between two operations")
    }

    /// Opens or creates one of [`PARTITIONS`].
    pub(super) fn open_part(&mut self, index: usize) {
        let (name, order) = PARTITIONS[index];
        let part = open_in(self.db(), &self.shape, name, order);
        self.halves.entry(name).or_insert_with(|| Half { part, book: Book::new(order) });
    }

    /// One of the open partitions.
    pub(super) fn some_name(&mut self) -> &'static str {
        let names: Vec<&'static str> = self.halves.keys().copied().collect();
        self.dice.pick(&names)
    }

    /// A key: few letters so that keys meet, and now and then a strange one.
    pub(super) fn key(&mut self, name: &str) -> Vec<u8> {
        const LETTERS: &[u8] = b"aAbBz\0\xff";
        let bytes = match self.dice.below(16) {
            0 => Vec::new(),
            1..=5 => (0..1 + self.dice.below(5)).map(|_| self.dice.pick(LETTERS)).collect(),
            6 if self.dice.one_in(8) => {
                let len = self.dice.pick(&[300, 5_000, 65_535]);
                vec![self.dice.pick(LETTERS); len]
            }
            _ => format!("key {:03}", self.dice.below(250)).into_bytes(),
        };
        self.halves[name].book.order.seal(&bytes)
    }

    pub(super) fn value(&mut self) -> Vec<u8> {
        let len = match self.dice.below(64) {
            0 => 33_000 + self.dice.below(60_000),
            1..=4 => 1_000 + self.dice.below(3_000),
            5..=8 => 0,
            _ => self.dice.below(120),
        };
        let compressible = self.dice.one_in(2);
        if compressible { vec![b'v'; len as usize] } else { self.dice.noise(len as usize) }
    }

    /// Takes the engine's own figures before a close.
    pub(super) fn note_metrics(&mut self) {
        let metrics = self.db().metrics();
        let levels = self.halves.values().map(|half| half.part.metrics().levels.len()).max().unwrap_or(0);
        self.tally.flushes += metrics.flushes;
        self.tally.compactions += metrics.compactions;
        self.tally.moves += metrics.trivial_moves;
        self.tally.levels = self.tally.levels.max(levels);
    }
}

/// Opens a partition with its comparator.
pub(super) fn open_in(db: &Database, shape: &Shape, name: &str, order: Order) -> Partition {
    let options = order.allows(shape.partition(name));
    match order.comparator() {
        None => db.open_partition(name, options).unwrap(),
        Some(comparator) => db.open_partition_with_comparator(name, options, comparator).unwrap(),
    }
}

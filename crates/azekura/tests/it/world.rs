//! What the proofs stand on: chance from a seed, options at random, and a model that is so plain that it is right.
//!
//! Rooms in reading order: `dice`, `order` (comparators and what they mean to a `BTreeMap`), `shape` (options at
//! random), `history` (what was acknowledged, and which states a crash may leave), `reading` (a whole database as plain
//! maps), `disk` (a directory's bytes), `watchdog`.

pub(crate) mod dice;
pub(crate) mod disk;
pub(crate) mod history;
pub(crate) mod order;
pub(crate) mod reading;
pub(crate) mod shape;
pub(crate) mod watchdog;

pub(crate) use dice::{Dice, Replay, number};
pub(crate) use history::{Event, History, Map, State, Write};
pub(crate) use shape::Shape;

//! What the proofs stand on: chance from a seed, options at random, and a model that is so plain that it is right.
//!
//! Rooms in reading order: `dice`, `order` (comparators and what they mean to a `BTreeMap`), `shape` (options at
//! random), `history` (what was acknowledged, and which states a crash may leave), `reading` (a whole database as plain
//! maps), `disk` (a directory's bytes), `watchdog`.

pub(crate) mod comparators;
pub(crate) mod history;
pub(crate) mod random_options;
pub(crate) mod read_database;
pub(crate) mod rng;
pub(crate) mod test_dir;
pub(crate) mod watchdog;

pub(crate) use history::{HistoryEvent, HistoryWrite, Map, State, WriteHistory};
pub(crate) use random_options::RandomOptions;
pub(crate) use rng::{FailureReport, SeededRng, env_u64};

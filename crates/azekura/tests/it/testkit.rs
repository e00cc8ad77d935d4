//! Fixtures and checks that several tests use.
//!
//! Modules, in reading order: `seeds` (of random tests), `property` (random tests by `proptest`),
//! `ordered_partitions` (with comparators), `random_options`, `atomic_writes` (batches, transactions and conditional
//! writes), `history` (acknowledged writes, and the states that a crash may leave), `read_database` (a whole
//! database as plain maps), `test_dir` (the bytes of a directory), `watchdog` (time limits).

pub(crate) mod atomic_writes;
pub(crate) mod history;
pub(crate) mod ordered_partitions;
pub(crate) mod property;
pub(crate) mod random_options;
pub(crate) mod read_database;
pub(crate) mod seeds;
pub(crate) mod test_dir;
pub(crate) mod watchdog;

pub(crate) use history::{HistoryEvent, HistoryWrite, Map, State, WriteHistory};
pub(crate) use random_options::RandomOptions;
pub(crate) use seeds::{FailureReport, env_u64};

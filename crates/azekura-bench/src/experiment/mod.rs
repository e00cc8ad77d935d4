//! Questions with two or more variants, answered by ratios that were measured A B A B in one run.
//!
//! Invariants: every variant of every round runs in a process of its own; an answer is one JSON object with named
//! ratios, their ranges over rounds, every round, the conditions, and `baseline_vs_peer`, so that a slow baseline
//! flatters nobody. A new experiment is one file and one line in [`registry`].
//!
//! Rooms: [`experiment`] the trait; [`registry`] the list; [`run`] the command; [`rounds`] interleaving and arithmetic;
//! [`reads`] point reads of one database, timed; [`lookups`] the same inside of data blocks alone; [`instructions`]
//! counted by the processor; [`fs`] file systems that are watched; [`tree`] a database loaded so that its tree has a
//! known shape. Then the experiments: [`restart_interval`], [`cache_hit`], [`hash_index`], [`partitioned`], those of
//! [`blobs`] and of [`pmem`].

pub(crate) mod blobs;
pub(crate) mod cache_hit;
#[allow(clippy::module_inception)]
pub(crate) mod experiment;
pub(crate) mod fs;
pub(crate) mod hash_index;
pub(crate) mod instructions;
pub(crate) mod lookups;
pub(crate) mod partitioned;
pub(crate) mod pmem;
pub(crate) mod reads;
pub(crate) mod registry;
pub(crate) mod restart_interval;
pub(crate) mod rounds;
pub(crate) mod run;
pub(crate) mod tree;

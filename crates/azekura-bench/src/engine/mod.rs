//! The engines under test, one file each behind one trait.
//!
//! Options that mean the same are given the same value to every engine. A peer that is not compiled in is named in the
//! error with the feature that adds it.
//!
//! [`api`] the trait, its options and helpers; [`registry`] names and the wait for background work; then one adapter
//! for each engine: [`azekura`], `fjall`, `heed`, `redb`, `rocksdb`, `surrealkv`, and [`map`] for experiments.
//! `memory` is a faulty engine for tests of the bench; `smoke` calls every method of every engine of the build.

pub(crate) mod api;
pub(crate) mod azekura;
#[cfg(feature = "fjall")]
pub(crate) mod fjall;
#[cfg(feature = "heed")]
pub(crate) mod heed;
pub(crate) mod map;
#[cfg(test)]
pub(crate) mod memory;
#[cfg(feature = "redb")]
pub(crate) mod redb;
pub(crate) mod registry;
#[cfg(feature = "rocksdb")]
pub(crate) mod rocksdb;
#[cfg(test)]
mod smoke;
#[cfg(feature = "surrealkv")]
pub(crate) mod surrealkv;

pub(crate) use api::{Compression, Engine, Options, Scan, Sync};

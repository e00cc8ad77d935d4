//! The engines under test, one file each behind one trait.
//!
//! [`api`] the trait, the options that every engine is opened with, and helpers for adapters; [`registry`] names and
//! the wait for background work; then one adapter for each engine: [`azekura`], `fjall`, `heed`, `redb`, `rocksdb`,
//! `surrealkv`, and [`map`] for experiments. Options that mean the same have the same value in every engine.
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

pub(crate) use api::{
    BLOOM_BITS, Change, Compression, Engine, Options, PARTITION, Records, Scan, Sync, Visit, bytes, existing, found,
    object, visit,
};

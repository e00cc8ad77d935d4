//! The engines under test, each in a file of its own behind one small trait.
//!
//! Invariants: a peer is reached through [`Engine`] only, so every engine pays the same price for the harness; options
//! that mean the same thing are given the same value ([`Options`]); an engine that is not compiled in is named in the
//! error with the feature that brings it.
//!
//! Rooms: [`engine`] the trait; [`options`] what every engine is told; [`registry`] names to engines; then one file per
//! engine: [`azekura`], `fjall`, `heed`, `redb`, `rocksdb`, `sled`, `surrealkv`, for experiments alone [`map`], and for
//! tests of the harness `memory`; `smoke` puts every engine of the build through every call.

pub(crate) mod azekura;
#[allow(clippy::module_inception)]
pub(crate) mod engine;
#[cfg(feature = "fjall")]
pub(crate) mod fjall;
#[cfg(feature = "heed")]
pub(crate) mod heed;
pub(crate) mod map;
#[cfg(test)]
pub(crate) mod memory;
pub(crate) mod options;
#[cfg(feature = "redb")]
pub(crate) mod redb;
pub(crate) mod registry;
#[cfg(feature = "rocksdb")]
pub(crate) mod rocksdb;
#[cfg(feature = "sled")]
pub(crate) mod sled;
#[cfg(test)]
mod smoke;
#[cfg(feature = "surrealkv")]
pub(crate) mod surrealkv;

pub(crate) use engine::{Engine, Scan};
pub(crate) use options::{Compression, Options, Sync};

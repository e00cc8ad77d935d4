//! What is done to an engine: keys, values, choices of keys, and the workloads made of them.
//!
//! Invariants: a record is a pure function of (index, generation), so every read can be checked against nothing but the
//! index; every choice comes from a seeded generator, so two engines are asked the same questions in the same order;
//! each thread writes only keys of its own residue class, so the newest generation of a key is always known.
//!
//! Rooms: [`rng`] and [`zipf`] choose; [`keys`] and [`values`] make bytes; [`generations`] remembers what was
//! acknowledged; [`shape`] the size of a data set; [`workload`] the list of workloads and what each needs; then the
//! workloads by theme: [`fill`], [`bulk`], [`read`], [`scan`], [`ycsb`], [`beside`] (reads while somebody writes),
//! [`queue`], [`spread`] (over partitions).

pub(crate) mod beside;
pub(crate) mod bulk;
pub(crate) mod fill;
pub(crate) mod generations;
pub(crate) mod keys;
pub(crate) mod queue;
pub(crate) mod read;
pub(crate) mod rng;
pub(crate) mod scan;
pub(crate) mod shape;
pub(crate) mod spread;
pub(crate) mod values;
#[allow(clippy::module_inception)]
pub(crate) mod workload;
pub(crate) mod ycsb;
pub(crate) mod zipf;

pub(crate) use shape::Shape;
pub(crate) use workload::{Work, Workload};

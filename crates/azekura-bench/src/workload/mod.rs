//! The work that engines carry out: records, choices of keys, and workloads.
//!
//! A record is a pure function of (index, generation), so each read is checked against the index alone. Choices come
//! from a seeded generator, so two engines get the same questions in the same order. Each thread writes only keys of
//! its own residue class, so the newest generation of a key is always known.
//!
//! [`data`] makes records and draws indices; [`spec`] reads the list of workloads, `workloads.json`; [`worker`]
//! runs one thread of a workload and checks every answer.

pub(crate) mod data;
pub(crate) mod spec;
pub(crate) mod worker;

pub(crate) use data::Shape;
pub(crate) use spec::Workload;

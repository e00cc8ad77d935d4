//! Tests of the tree as a whole.
//!
//! Rooms in reading order: [`harness`] (a tree, a host that watches the rules, and a model), [`model`] (the tests),
//! [`blobs`] (those of key-value separation), [`collect`] (those of its garbage collection).

mod blobs;
mod collect;
pub(super) mod harness;
mod model;

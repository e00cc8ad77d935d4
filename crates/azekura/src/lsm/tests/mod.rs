//! Tests of the tree as a whole.
//!
//! Rooms in reading order: [`harness`] (a tree, a host that watches the rules, and a model), [`model`] (the tests),
//! [`blobs`] (those of key-value separation), [`collect`] (those of its garbage collection),
//! [`early`] (those of values that are written ahead of their commit).

mod blob_gc;
mod blobs;
mod direct_write;
pub(crate) mod harness;
mod model;

//! Tests of the tree as a whole.
//!
//! Rooms in reading order: [`harness`] (a tree, a host that watches the rules, and a model), [`model`] (the tests),
//! [`blobs`] (those of key-value separation).

mod blobs;
mod harness;
mod model;

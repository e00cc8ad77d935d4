//! Tests of the tree as a whole.
//!
//! Rooms in reading order: [`harness`] (a tree, a host that watches the rules, and a model), [`model`] (the tests).

mod harness;
mod model;

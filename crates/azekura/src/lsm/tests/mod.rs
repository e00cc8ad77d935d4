//! Tests of the tree as a whole.
//!
//! Modules, in reading order: [`harness`] (a tree, a host that checks its rules, and a model), [`model`] (the tree
//! without blob files), [`blobs`] (key-value separation), [`blob_gc`] (blob GC), [`direct_write`] (direct blob writes).

mod blob_gc;
mod blobs;
mod compaction_iter_script;
mod direct_write;
pub(crate) mod harness;
mod model;
mod picker_script;

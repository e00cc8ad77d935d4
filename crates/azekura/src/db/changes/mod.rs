//! The change feed.
//!
//! Modules, in reading order: [`changes`] (the reader), [`change_position`], [`committed_batch`].

pub(crate) mod change_position;
#[expect(clippy::module_inception, reason = "one noun, one file: the folder holds its parts")]
pub(crate) mod changes;
pub(crate) mod committed_batch;

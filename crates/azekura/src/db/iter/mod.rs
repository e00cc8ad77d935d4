//! Iterators over a partition.
//!
//! Modules, in reading order: [`iterators`] (the public ones), [`db_iter`] (the internal one below them), [`entry`]
//! (with a value on request).

pub(crate) mod db_iter;
pub(crate) mod entry;
pub(crate) mod iterators;

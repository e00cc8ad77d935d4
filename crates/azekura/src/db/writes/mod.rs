//! Writes before their commit.
//!
//! Modules, in reading order: [`overlay`] (ordered by key, for reads), [`computed_merges`] (operands that a tree does
//! not keep become values), [`expiring_write`] (expiry times).

pub(crate) mod computed_merges;
pub(crate) mod expiring_write;
pub(crate) mod overlay;

//! Writes before their commit.
//!
//! Modules, in reading order: [`overlay`] (ordered by key, for reads), [`pool_merge`] (operands for pools become
//! values), [`expiring_write`] (expiry times).

pub(crate) mod expiring_write;
pub(crate) mod overlay;
pub(crate) mod pool_merge;

//! Writes before their commit.
//!
//! Modules, in reading order: [`write_batch`] (the records of a commit), [`staged_records`] (what trees hold for
//! them), [`commit_check`] (validation), [`overlay`] (ordered by key, for reads), [`computed_merges`] (operands that a
//! tree does not keep become values).

pub(crate) mod commit_check;
pub(crate) mod computed_merges;
pub(crate) mod overlay;
pub(crate) mod staged_records;
pub(crate) mod write_batch;

//! The tree of a partition, an LSM tree or a pool: what its files contain at open, how it is built from them, and how
//! it is called.
//!
//! Invariant: a tree is built once, from the files and from all records of the WAL that no file contains.
//!
//! Modules, in reading order: [`partition_tree`], [`stored_tree`] (the files of a tree that is not built), [`new_tree`]
//! (the file of a partition that is being created), [`spilled_records`] (of a partition without a comparator).

pub(crate) mod new_tree;
pub(crate) mod partition_tree;
pub(crate) mod spilled_records;
pub(crate) mod stored_tree;

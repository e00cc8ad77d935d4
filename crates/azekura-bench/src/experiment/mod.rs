//! Questions with two or more variants, answered by ratios that were measured A B A B in one run.
//!
//! Every variant of every round runs in a process of its own. An answer is one JSON object with named ratios, their
//! ranges over rounds, every round, the conditions, and `baseline_vs_peer`, so that a slow baseline is visible.
//!
//! `experiments.json` lists them. [`rounds`] reads it, interleaves variants and computes ratios; [`reads`] point reads
//! of a database and of its data blocks alone; [`watch_fs`] file systems that count; [`pages`] HTML pages; [`leaf`] and
//! [`leaf_pool`] the baseline of 2017; then the experiments, whose functions are in [`list`]: [`hash_index`],
//! [`partitioned`], [`blob_load`], [`blob_gc`], [`zero_copy_split`], [`memory_speed`].

pub(crate) mod blob_gc;
pub(crate) mod blob_load;
pub(crate) mod hash_index;
pub(crate) mod leaf;
pub(crate) mod leaf_pool;
pub(crate) mod list;
pub(crate) mod memory_speed;
pub(crate) mod pages;
pub(crate) mod partitioned;
pub(crate) mod reads;
pub(crate) mod rounds;
pub(crate) mod watch_fs;
pub(crate) mod zero_copy_split;

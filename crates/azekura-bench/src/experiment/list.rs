//! The list of experiments.

use crate::error::Result;
use crate::experiment::rounds::Context;
use crate::experiment::{blob_gc, blob_load, hash_index, memory_speed, partitioned, zero_copy_split};
use serde_json::{Map, Value};

type RunFn = fn(&Context<'_>) -> Result<Map<String, Value>>;
type VariantFn = fn(Value) -> Result<Map<String, Value>>;

/// One question.
pub(crate) struct Question {
    /// Its name on the command line.
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// Answers it, in the parent process, which opens no database.
    pub(crate) run: RunFn,
    /// Carries out one variant once, in a child process.
    pub(crate) variant: VariantFn,
}

/// All of them.
pub(crate) const EXPERIMENTS: [Question; 6] = [
    question(
        "hash-index",
        "cached point reads, CPU inside data blocks, and space with a hash index or fingerprints in data blocks",
        (hash_index::run, hash_index::variant),
    ),
    question(
        "partitioned",
        "whole or partitioned index and filters that exceed the cache, on a simulated disk and the real device",
        (partitioned::run, partitioned::variant),
    ),
    question(
        "blob-load",
        "HTML pages loaded and read, separated from the tree or not, by codec and beside peers",
        (blob_load::run, blob_load::variant),
    ),
    question(
        "blob-gc",
        "space and write amplification of a history of page versions, by how stale values are collected",
        (blob_gc::run, blob_gc::variant),
    ),
    question(
        "zero-copy-split",
        "time and space of puts into leaves that split by moving slots, against leaves that copy or swap strings",
        (zero_copy_split::run, zero_copy_split::variant),
    ),
    question(
        "memory-speed",
        "puts, gets, scans and opening of a pool in memory and of one with a log, beside LMDB, redb and BTreeMap",
        (memory_speed::run, memory_speed::variant),
    ),
];

const fn question(name: &'static str, about: &'static str, (run, variant): (RunFn, VariantFn)) -> Question {
    Question { name, about, run, variant }
}

//! The list of experiments.

use crate::error::Result;
use crate::experiment::rounds::Context;
use crate::experiment::{blob_gc, blob_load, hash_index, memory_speed, partitioned, zero_copy_split};
use serde_json::{Map, Value};

/// One question.
pub(crate) struct Question {
    /// Its name on the command line.
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// Answers it, in the parent process, which opens no database.
    pub(crate) run: fn(&Context<'_>) -> Result<Map<String, Value>>,
    /// Carries out one variant once, in a child process.
    pub(crate) variant: fn(Value) -> Result<Map<String, Value>>,
}

/// All of them.
pub(crate) const EXPERIMENTS: [Question; 6] = [
    Question {
        name: "hash-index",
        about: "cached point reads, CPU inside of data blocks, and space with a hash index or fingerprints in them",
        run: hash_index::run,
        variant: hash_index::variant,
    },
    Question {
        name: "partitioned",
        about: "index and filters whole or in pieces, when they do not fit the cache; a simulated disk \
                and the real device",
        run: partitioned::run,
        variant: partitioned::variant,
    },
    Question {
        name: "blob-load",
        about: "HTML pages loaded and read, apart from the tree or in it, by codec and beside peers",
        run: blob_load::run,
        variant: blob_load::variant,
    },
    Question {
        name: "blob-gc",
        about: "versions of HTML pages that come and go: space and writing by how stale values are collected",
        run: blob_gc::run,
        variant: blob_gc::variant,
    },
    Question {
        name: "zero-copy-split",
        about: "puts into a tree whose leaves split by moving slots, against leaves that copy or swap strings: time \
                and space",
        run: zero_copy_split::run,
        variant: zero_copy_split::variant,
    },
    Question {
        name: "memory-speed",
        about: "puts, gets, scans and opening of a pool in memory and of one with a log, beside LMDB, redb \
                and BTreeMap",
        run: memory_speed::run,
        variant: memory_speed::variant,
    },
];

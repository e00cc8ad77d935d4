//! The functions of the experiments that `experiments.json` lists.

use crate::error::Result;
use crate::experiment::rounds::Context;
use crate::experiment::{blob_gc, blob_load, hash_index, memory_speed, partitioned, zero_copy_split};
use anyhow::bail;
use serde_json::{Map, Value};

/// Answers a question, in the parent process, which opens no database.
pub(crate) type Run = fn(&Context<'_>) -> Result<Map<String, Value>>;
/// Carries out one variant once, in a child process.
pub(crate) type Variant = fn(Value) -> Result<Map<String, Value>>;

/// The two functions of an experiment of the list.
pub(crate) fn functions(name: &str) -> Result<(Run, Variant)> {
    Ok(match name {
        "hash-index" => (hash_index::run, hash_index::variant),
        "partitioned" => (partitioned::run, partitioned::variant),
        "blob-load" => (blob_load::run, blob_load::variant),
        "blob-gc" => (blob_gc::run, blob_gc::variant),
        "zero-copy-split" => (zero_copy_split::run, zero_copy_split::variant),
        "memory-speed" => (memory_speed::run, memory_speed::variant),
        _ => bail!("no functions for `{name}`"),
    })
}

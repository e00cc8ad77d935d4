//! What records are put into: a tree of one of 2017's leaves, a pool of ours, or a peer.

use crate::engine::{Engine, Options, azekura, registry};
use crate::experiment::fs::persistent::persistent;
use crate::experiment::pmem::records::Records;
use crate::experiment::reads::cached_options;
use crate::failure::Result;
use crate::leaf::medium::Medium;
use crate::leaf::pool::Pool;
use crate::leaf::tree::{LeafTree, Leaves};
use crate::machine::disk;
use ::azekura::Config;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Beside every record a pool of 2017 has room for so many bytes.
const BESIDE: u64 = 600;
const MEMTABLE_BYTES: u64 = 64 << 20;

/// An empty tree that is filled, looked into, and asked.
pub(super) trait Subject {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()>;

    /// Shows the value; says whether there was one.
    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool>;

    /// `taken_bytes`, and what is known of splits: `splits`, and what they did as `split_…`.
    fn end(self: Box<Self>) -> Result<Map<String, Value>>;
}

/// A tree of these leaves, in a new file of that directory.
pub(super) fn of_leaves(leaves: Leaves, dir: &Path, records: &Records) -> Result<Box<dyn Subject>> {
    std::fs::create_dir_all(dir)?;
    let len = (records.bytes() + records.n * BESIDE + (64 << 20)).next_multiple_of(1 << 20);
    let pool = Pool::new(Medium::create(&dir.join("pool"), usize::try_from(len)?)?);
    Ok(Box::new(LeafTree::new(pool, leaves)?))
}

impl Subject for LeafTree {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        LeafTree::put(self, key, value)
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        let value = LeafTree::get(self, key);
        if let Some(value) = &value {
            seen(value);
        }
        Ok(value.is_some())
    }

    fn end(self: Box<Self>) -> Result<Map<String, Value>> {
        let (splits, counts) = self.splits();
        let all = self.pool().counts();
        Ok(object(json!({
            "taken_bytes": self.pool().bytes_taken(), "flushed_by": self.pool().flushes_by(), "splits": splits,
            "split_stored_bytes": counts.stored, "split_flushed_lines": counts.lines, "split_fences": counts.fences,
            "stored_bytes": all.stored, "flushed_lines": all.lines, "fences": all.fences,
        })))
    }
}

/// A pool of ours in that directory, on memory taken for persistent or as it is.
pub(super) fn of_pool(dir: &Path, records: &Records, flushed: bool) -> Result<Box<dyn Subject>> {
    let options = Options { data_bytes: records.bytes(), ..cached_options(MEMTABLE_BYTES) };
    let on = |config: Config| if flushed { config.fs(Arc::new(persistent())) } else { config };
    std::fs::create_dir_all(dir)?;
    let engine = azekura::open_on(dir, &options, on, |own| azekura::in_pool(own, &options))?;
    let level = engine.stats()["pool"]["level"].clone();
    if flushed && level != "Power" {
        return Err(format!("a pool that should flush and fence is of the level {level}").into());
    }
    Ok(Box::new(OfEngine { engine, dir: dir.to_path_buf() }))
}

/// A peer's database in that directory; what survives the end of the process is enough.
pub(super) fn of_peer(name: &str, dir: &Path) -> Result<Box<dyn Subject>> {
    let engine = registry::open(name, dir, &cached_options(MEMTABLE_BYTES))?;
    Ok(Box::new(OfEngine { engine, dir: dir.to_path_buf() }))
}

struct OfEngine {
    engine: Box<dyn Engine>,
    dir: PathBuf,
}

impl Subject for OfEngine {
    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        self.engine.put(key, value)
    }

    fn get(&self, key: &[u8], seen: &mut dyn FnMut(&[u8])) -> Result<bool> {
        self.engine.get(key, seen)
    }

    fn end(self: Box<Self>) -> Result<Map<String, Value>> {
        let mut answer = self.engine.stats();
        self.engine.close()?;
        let mut taken = disk::usage(&self.dir).allocated;
        if let Some(Value::Object(pool)) = answer.remove("pool") {
            let bytes = |field: &str| pool.get(field).and_then(Value::as_u64).unwrap_or(0);
            taken = bytes("bytes") - bytes("free_bytes");
            answer = pool;
        }
        answer.insert("taken_bytes".into(), json!(taken));
        Ok(answer)
    }
}

pub(super) fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(object) => object,
        _ => Map::new(),
    }
}

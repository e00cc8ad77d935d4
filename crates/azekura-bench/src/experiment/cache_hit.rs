//! `cache-hit`: what a get costs when nothing is read from files, part by part as far as the public interface shows.
//!
//! `missing` is answered by filters alone, `same` by caches that hold everything it touches, `present` by those that
//! do not, `memtable` before any table is asked, `memtable_miss` by a memtable that has not got the key, with no table
//! behind it. `block` is the lookup inside of the data block by itself. The harness' own cost is taken off.
//!
//! What is left between them: `filter` is a missing key's get without what a memtable takes for it, `index_and_cache` a
//! present key's without those two and the block: finding the block in the index, reaching it, copying the value.

use crate::engine::registry;
use crate::experiment::experiment::{Context, Experiment};
use crate::experiment::lookups;
use crate::experiment::reads::{self, Choice, cached_options};
use crate::experiment::rounds::{Variant, interleave};
use crate::failure::Result;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::PathBuf;

const OURS: &str = "azekura";
const PEER: &str = "rocksdb";
const MEMTABLE_BYTES: u64 = 16 << 20;
/// Large enough for every record of `memtable`.
const LARGE_MEMTABLE_BYTES: u64 = 256 << 20;

/// See the module.
pub(crate) struct CacheHit;

/// The parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Part {
    /// Loads the database; not timed.
    Load,
    Missing,
    Present,
    Same,
    Memtable,
    #[serde(rename = "memtable_miss")]
    MemtableMiss,
    Block,
}

/// What a child is asked to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Task {
    engine: String,
    dir: PathBuf,
    part: Part,
    n: u64,
    seconds: f64,
}

const PARTS: [(Part, &str); 6] = [
    (Part::Missing, "missing"),
    (Part::Present, "present"),
    (Part::Same, "same"),
    (Part::Memtable, "memtable"),
    (Part::MemtableMiss, "memtable_miss"),
    (Part::Block, "block"),
];

impl Part {
    /// Whether its records are in memory alone.
    fn in_memory(self) -> bool {
        matches!(self, Part::Memtable | Part::MemtableMiss)
    }
}

impl Experiment for CacheHit {
    fn name(&self) -> &'static str {
        "cache-hit"
    }

    fn about(&self) -> &'static str {
        "nanoseconds and instructions of a get from the cache, by parts"
    }

    fn run(&self, context: &Context<'_>) -> Result<Map<String, Value>> {
        let (n, seconds, rounds) = context.size((200_000, 0.5, 3), (2_000_000, 3.0, 5));
        let mut variants = Vec::new();
        for engine in [OURS, PEER].into_iter().filter(|engine| registry::check(engine).is_ok()) {
            let dir = context.fresh(engine)?;
            let task = Task { engine: engine.to_owned(), dir, part: Part::Load, n, seconds };
            context.child(&json!(task))?;
            for (part, name) in PARTS.into_iter().filter(|(part, _)| engine == OURS || *part != Part::Block) {
                // Records in memory alone need a database of their own in each round, and fewer of them.
                let (dir, n) = match part.in_memory() {
                    true => (context.fresh(&format!("{engine}-{name}"))?, n.min(500_000)),
                    false => (task.dir.clone(), n),
                };
                let task = Task { dir, part, n, ..task.clone() };
                variants.push(Variant { name: format!("{engine}-{name}"), task: json!(task) });
            }
        }
        let all = interleave(context, &variants, rounds)?;
        let mut answer = Map::new();
        for variant in &variants {
            for field in ["ns", "instructions"] {
                let name = format!("{}_{field}", variant.name.trim_start_matches("azekura-").replace('-', "_"));
                answer.insert(name, json!(all.median(&variant.name, field)));
            }
        }
        let ours = |part: &str| format!("{OURS}-{part}");
        let ns = |part: &str| all.median(&ours(part), "ns");
        if let (Some(missing), Some(memtable), Some(present), Some(block)) =
            (ns("missing"), ns("memtable_miss"), ns("present"), ns("block"))
        {
            answer.insert("filter_ns".into(), json!(missing - memtable));
            answer.insert("index_and_cache_ns".into(), json!(present - missing - block));
        }
        for part in ["missing", "same", "memtable", "memtable_miss", "block"] {
            all.put_ratio(&mut answer, &format!("{part}_to_present"), "ns", &ours(part), &ours("present"));
        }
        for (_, part) in PARTS.into_iter().filter(|(part, _)| *part != Part::Block) {
            let peer = format!("{PEER}-{part}");
            all.put_ratio(&mut answer, &format!("{part}_vs_peer"), "ns", &ours(part), &peer);
        }
        all.put_ratio(&mut answer, "baseline_vs_peer", "ns", &ours("present"), &format!("{PEER}-present"));
        answer.insert("rounds".into(), all.json());
        Ok(answer)
    }

    fn variant(&self, task: &Value) -> Result<Map<String, Value>> {
        let task: Task = serde_json::from_value(task.clone())?;
        let choice = match task.part {
            Part::Load => {
                let engine = registry::open(&task.engine, &task.dir, &cached_options(MEMTABLE_BYTES))?;
                return reads::load(engine, &task.dir, task.n);
            }
            Part::Block => {
                let mut answer = lookups::time(&task.dir, task.n, task.seconds)?;
                for (given, name) in [("seeks", "gets"), ("seek_cpu_ns", "ns"), ("seek_instructions", "instructions")] {
                    let figure = answer.remove(given).unwrap_or_default();
                    answer.insert(name.into(), figure);
                }
                return Ok(answer);
            }
            Part::Missing | Part::MemtableMiss => Choice::Missing,
            Part::Same => Choice::Same,
            Part::Present | Part::Memtable => Choice::Present,
        };
        if !task.part.in_memory() {
            let engine = registry::open(&task.engine, &task.dir, &cached_options(MEMTABLE_BYTES))?;
            let answer = reads::time(engine.as_ref(), task.n, choice, task.seconds)?;
            engine.close()?;
            return Ok(answer);
        }
        if task.dir.exists() {
            std::fs::remove_dir_all(&task.dir)?;
        }
        let engine = registry::open(&task.engine, &task.dir, &cached_options(LARGE_MEMTABLE_BYTES))?;
        reads::fill(engine.as_ref(), task.n)?;
        let answer = reads::time(engine.as_ref(), task.n, choice, task.seconds)?;
        let tables = engine.tables()?;
        engine.close()?;
        if tables > 0 {
            return Err(format!("{tables} tables were written while records should be in memory alone").into());
        }
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::{CacheHit, PARTS, Part, Task};
    use crate::experiment::experiment::Experiment;
    use serde_json::json;

    #[test]
    fn every_part_is_timed() {
        let dir = tempfile::tempdir().unwrap();
        let task = |part: Part| Task {
            engine: "azekura".into(),
            dir: dir.path().join(if part.in_memory() { "memtable" } else { "tables" }),
            part,
            n: 2000,
            seconds: 0.01,
        };
        CacheHit.variant(&json!(task(Part::Load))).unwrap();
        for (part, name) in PARTS {
            let answer = CacheHit.variant(&json!(task(part))).unwrap();
            assert!(answer["gets"].as_u64().unwrap() > 0, "{name}: {answer:?}");
        }
    }
}

//! `zero-copy-split`: the cost of a tree whose leaves split without copying, compared with leaves that copy or swap
//! strings.
//!
//! Every tree uses a file in memory that is treated as persistent: every persistent store is flushed and fenced by
//! the processor's own instructions, in pools as in the trees of 2017. `…_slots` in the name of a ratio: not a pool
//! but the document's own leaf, on the allocator and the journal of its time. Seconds are those of all puts; keys are
//! made before. Space is the size of all allocations; that of a pool includes its leaves and its header. Records are
//! those of the third founding document: decimal keys, values of letters; no byte is zero.

use crate::engine::azekura::{in_pool, open_with};
use crate::engine::{Engine, Options, object, registry};
use crate::error::{Result, wrong};
use crate::experiment::leaf::{LeafKind, LeafTree};
use crate::experiment::leaf_pool::LeafPool;
use crate::experiment::rounds::{Context, Question, Rounds};
use crate::experiment::watch_fs::WatchFs;
use crate::measure::disk;
use crate::measure::process::Usage;
use crate::workload::data::shuffle;
use anyhow::ensure;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// The baseline.
const BASE: &str = "copy_or_swap";
const OURS: &str = "ours";
/// A pool without flushes and fences: it survives the end of the process.
const UNFLUSHED: &str = "unflushed";
/// The peer on the same memory.
const PEER: &str = "heed";
/// Sizes of keys and values; the document's come first.
const SIZES: [(usize, usize); 3] = [(20, 800), (20, 15), (10, 4)];
/// Orders of the puts as suffixes of fields; the document's own order has none.
const ORDERS: [&str; 3] = ["", "_random", "_descending"];
/// Values begin at this many different offsets of the same text.
const PERIOD: usize = 251;
/// Points of the curve of one case.
const POINTS: u64 = 50;
/// One record of this many is read back.
const STEP: usize = 37;
/// Bytes of a pool of 2017 for each record, in addition to the record itself.
const RECORD_OVERHEAD: u64 = 600;
const MEMTABLE_BYTES: u64 = 64 << 20;
/// Figures for each split, and the sums that they are the means of.
const PER_SPLIT: [(&str, &str); 3] = [
    ("bytes_moved_per_split", "split_stored_bytes"),
    ("flushed_lines_per_split", "split_flushed_lines"),
    ("fences_per_split", "split_fences"),
];
/// Figures of the document for a bound of the list.
const DOCUMENT: [(&str, Option<f64>); 4] = [
    ("time_ratio_20_800", Some(0.63)),
    ("storage_ratio_20_800", Some(0.80)),
    ("storage_ratio_20_15", Some(1.35)),
    ("storage_ratio_10_4", None),
];

/// One kind of tree, filled with `n` records of one size in one order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SplitCase {
    kind: String,
    n: u64,
    key_len: usize,
    value_len: usize,
    /// One of [`ORDERS`].
    order: String,
}

impl SplitCase {
    /// The records, as suffix of fields.
    fn records(&self) -> String {
        format!("{}_{}{}", self.key_len, self.value_len, self.order)
    }

    fn name(&self) -> String {
        format!("{}_{}", self.kind, self.records())
    }

    fn bytes(&self) -> u64 {
        self.n * (self.key_len + self.value_len) as u64
    }

    /// All keys in the order of the puts, in one buffer: decimal numbers of `key_len` digits.
    fn keys(&self) -> Vec<u8> {
        let mut ranks: Vec<u64> = (0..self.n).collect();
        match self.order.as_str() {
            "_random" => shuffle(&mut ranks, self.n),
            "_descending" => ranks.reverse(),
            _ => {}
        }
        ranks.into_iter().flat_map(|rank| format!("{rank:0len$}", len = self.key_len).into_bytes()).collect()
    }

    /// The text that [`SplitCase::value`] takes values from.
    fn text(&self) -> Vec<u8> {
        (0..PERIOD + self.value_len).map(|at| (at % PERIOD) as u8 + 1).collect()
    }

    /// The value of the `i`-th key.
    fn value<'t>(&self, text: &'t [u8], i: usize) -> &'t [u8] {
        &text[i % PERIOD..][..self.value_len]
    }
}

/// All cases; cases of the same records are adjacent.
fn cases(n: u64) -> Vec<SplitCase> {
    let mut cases = Vec::new();
    for (key_len, value_len) in SIZES {
        for order in ORDERS {
            let mut kinds = vec![BASE, "naive_copy", "slots", OURS];
            if (key_len, value_len, order) == (SIZES[0].0, SIZES[0].1, ORDERS[0]) {
                kinds.push(UNFLUSHED);
                kinds.extend(registry::check(PEER).is_ok().then_some(PEER));
            }
            let case = |kind: &str| SplitCase { kind: kind.into(), n, key_len, value_len, order: order.into() };
            cases.extend(kinds.into_iter().map(case));
        }
    }
    cases
}

pub(crate) fn run(context: &Context<'_>) -> Result<Map<String, Value>> {
    let n = context.size(50_000, 1_000_000);
    let (memory, cases) = (disk::scratch(context.memory_dir)?, cases(n));
    let task = |case: &SplitCase| (case.name(), json!((case, memory.path().join(case.name()))));
    let mut all = context.interleave(&cases.iter().map(task).collect::<Vec<_>>(), 3)?;
    // The records for which the document has figures.
    let of_document: Vec<_> = cases.iter().filter(|case| case.records() == "20_800").map(task).collect();
    all.extend(context.interleave(&of_document, 2)?);
    let mut answer = object(json!({"records": n, "rounds": all.json()}));
    put(&mut answer, &all)?;
    Ok(answer)
}

pub(crate) fn variant(task: Value) -> Result<Map<String, Value>> {
    let (case, dir): (SplitCase, PathBuf) = serde_json::from_value(task)?;
    disk::remove(&dir)?;
    let answer = fill(Filled::create(&case, &dir)?, &dir, &case)?;
    disk::remove(&dir)?;
    Ok(answer)
}

/// A tree of 2017, or an engine: a pool or a peer.
enum Filled {
    Leaves(Box<LeafTree>),
    Engine(Box<dyn Engine>),
}

impl Filled {
    fn create(case: &SplitCase, dir: &Path) -> Result<Filled> {
        std::fs::create_dir_all(dir)?;
        let options = Options { data_bytes: case.bytes(), ..Options::cached(MEMTABLE_BYTES) };
        let leaves = match case.kind.as_str() {
            PEER => return Ok(Filled::Engine(registry::open(PEER, dir, &options)?)),
            OURS | UNFLUSHED => {
                let fs = Arc::new(WatchFs::on_disk(true, case.kind == OURS));
                let pool = open_with(dir, &options, |config| config.fs(fs), |own| in_pool(own, &options))?;
                let level = pool.stats()["pool"]["level"].clone();
                let flushes = level == "PowerLoss" || case.kind == UNFLUSHED;
                ensure!(flushes, "a pool that should flush and fence is of the level {level}");
                return Ok(Filled::Engine(pool));
            }
            "slots" => LeafKind::Slots,
            "naive_copy" => LeafKind::NaiveCopy,
            _ => LeafKind::CopyOrSwap,
        };
        let len = (case.bytes() + case.n * RECORD_OVERHEAD + (64 << 20)).next_multiple_of(1 << 20);
        let pool = LeafPool::create(&dir.join("pool"), usize::try_from(len)?)?;
        Ok(Filled::Leaves(Box::new(LeafTree::new(pool, leaves)?)))
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        match self {
            Filled::Leaves(tree) => tree.put(key, value),
            Filled::Engine(engine) => engine.put(key, value),
        }
    }

    fn has(&self, key: &[u8], expected: &[u8]) -> Result<bool> {
        let mut right = false;
        match self {
            Filled::Leaves(tree) => right = tree.get(key).as_deref() == Some(expected),
            Filled::Engine(engine) => _ = engine.get(key, &mut |value| right = value == expected)?,
        }
        Ok(right)
    }

    /// `taken_bytes` and, where they are known, `splits` and their summed costs.
    fn end(self, dir: &Path) -> Result<Map<String, Value>> {
        let engine = match self {
            Filled::Engine(engine) => engine,
            Filled::Leaves(tree) => {
                let (splits, counts, all) = (tree.splits, tree.in_splits, tree.pool.counts);
                return Ok(object(json!({
                    "taken_bytes": tree.pool.bytes_taken(), "flushed_by": tree.pool.flushes_by(), "splits": splits,
                    "split_stored_bytes": counts.stored, "split_flushed_lines": counts.lines,
                    "split_fences": counts.fences, "stored_bytes": all.stored, "flushed_lines": all.lines,
                    "fences": all.fences,
                })));
            }
        };
        let mut answer = engine.stats();
        engine.close()?;
        let mut used_bytes = disk::allocated_bytes(dir);
        if let Some(pool) = answer.remove("pool") {
            let bytes = |field: &str| pool[field].as_u64().unwrap_or(0);
            used_bytes = bytes("bytes") - bytes("free_bytes");
            answer = object(pool);
        }
        answer.insert("taken_bytes".into(), json!(used_bytes));
        Ok(answer)
    }
}

/// Puts all records, reads some of them back, and returns the figures.
fn fill(mut filled: Filled, dir: &Path, case: &SplitCase) -> Result<Map<String, Value>> {
    let (keys, text) = (case.keys(), case.text());
    let every = (case.n / POINTS).max(1) as usize;
    let mut course = Vec::new();
    let (before, start) = (Usage::now(), Instant::now());
    for (i, key) in keys.chunks(case.key_len).enumerate() {
        if i % every == 0 {
            course.push((i, start.elapsed().as_secs_f64()));
        }
        filled.put(key, case.value(&text, i))?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let cpu_s = (Usage::now() - before).cpu_s;
    course.push((case.n as usize, seconds));
    for (i, key) in keys.chunks(case.key_len).enumerate().step_by(STEP) {
        ensure!(filled.has(key, case.value(&text, i))?, wrong(format!("record {i} is missing or wrong")));
    }
    let n = case.n as f64;
    let mut answer = object(json!({
        "seconds": seconds, "put_us": seconds * 1e6 / n, "cpu_us": cpu_s * 1e6 / n, "user_bytes": case.bytes(),
        "course": course,
    }));
    answer.extend(filled.end(dir)?);
    let number = |field: &str| answer.get(field).and_then(Value::as_f64);
    let mut each = object(json!({"bytes_per_record": number("taken_bytes").map(|bytes| bytes / n)}));
    if let Some(splits) = number("splits").filter(|splits| *splits > 0.0) {
        each.extend(PER_SPLIT.map(|(field, of)| (field.to_owned(), json!(number(of).map(|sum| sum / splits)))));
    }
    answer.extend(each);
    Ok(answer)
}

/// Ratios to copy-or-swap and all figures; next to each target, the figure of the document and that of its leaf.
fn put(answer: &mut Map<String, Value>, all: &Rounds) -> Result<()> {
    Question::named("zero-copy-split")?.put_figures(all, answer);
    for (field, document) in DOCUMENT {
        let slots = answer.get(&format!("{field}_slots")).cloned();
        let target = json!({"document": document, "its_own_slots": slots});
        answer.entry("targets").or_insert(Value::Null)[field] = target;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{BASE, ORDERS, OURS, PEER, SplitCase, cases, put, variant};
    use crate::engine::object;
    use crate::experiment::rounds::{Question, Rounds};
    use serde_json::{Map, Value, json};
    use std::collections::BTreeSet;

    #[test]
    fn every_case_is_filled_and_counted() {
        let dir = tempfile::tempdir().unwrap();
        let names: BTreeSet<String> = cases(2000).iter().map(SplitCase::name).collect();
        assert_eq!(names.len(), cases(2000).len());
        for case in cases(2000) {
            let dir = dir.path().join(case.name());
            let answer = variant(json!((&case, &dir))).unwrap();
            let number = |field: &str| answer.get(field).and_then(Value::as_f64).unwrap_or(f64::NAN);
            let user = (case.key_len + case.value_len) as f64;
            assert!(number("bytes_per_record") > user && number("put_us") > 0.0, "{}: {answer:?}", case.name());
            assert!(!dir.exists());
            assert_eq!(number("splits") > 0.0, case.kind != PEER, "{}: {answer:?}", case.name());
        }
    }

    #[test]
    fn splits_move_what_the_document_says() {
        let dir = tempfile::tempdir().unwrap();
        let per_split = |name: &str, field: &str| {
            let case = cases(3000).into_iter().find(|case| case.name() == name).unwrap();
            variant(json!((case, dir.path().join(name)))).unwrap()[field].as_f64().unwrap()
        };
        let moved = ["naive_copy_20_800", "copy_or_swap_20_800", "slots_20_800"]
            .map(|name| per_split(name, "bytes_moved_per_split"));
        assert!(moved.is_sorted_by(|a, b| a > b) && moved[0] > 23.0 * 820.0 && moved[2] < 23.0 * 200.0, "{moved:?}");
        let kinds = ["copy_or_swap", "slots", "ours"].map(|kind| format!("{kind}_20_800_random"));
        let fences = kinds.each_ref().map(|name| per_split(name, "fences_per_split"));
        assert!(fences.is_sorted_by(|a, b| a > b) && fences[2] <= 3.0, "{fences:?}");
    }

    #[test]
    fn answer_follows_from_rounds() {
        let case = |(kind, key_len, value_len): (&str, _, _)| SplitCase {
            kind: kind.into(),
            n: 100,
            key_len,
            value_len,
            order: String::new(),
        };
        let cases = [
            (BASE, 20, 800),
            ("naive_copy", 20, 800),
            ("slots", 20, 800),
            (OURS, 20, 800),
            (BASE, 20, 15),
            (OURS, 20, 15),
        ]
        .map(case);
        let mut all = Rounds::default();
        for (case, figure) in cases.iter().zip([4.0, 8.0, 3.0, 2.0, 1.0, 1.5]) {
            let round = json!({
                "seconds": figure, "put_us": figure, "bytes_per_record": 100.0 * figure, "splits": 10,
                "fences_per_split": 5.5, "course": [[0, 0.0], [50, figure / 2.0], [100, figure]],
            });
            all.add(&case.name(), object(round));
        }
        let mut answer = Map::new();
        put(&mut answer, &all).unwrap();
        Question::named("zero-copy-split").unwrap().put_targets(&mut answer);
        for (field, expected) in [
            ("time_ratio_20_800", json!(0.5)),
            ("time_ratio_20_800_slots", json!(0.75)),
            ("time_ratio_20_800_vs_naive_copy", json!(0.25)),
            ("storage_ratio_20_15", json!(1.5)),
            ("storage_ratio_20_15_slots", Value::Null),
            ("fences_per_split_slots_20_800", json!(5.5)),
        ] {
            assert_eq!(answer.get(field), Some(&expected), "{field}");
        }
        let target = &answer["targets"]["time_ratio_20_800"];
        assert_eq!(*target, json!({"document": 0.63, "its_own_slots": 0.75, "at_most": 0.63, "is": 0.5, "met": true}));
    }

    fn records(key_len: usize, value_len: usize, order: &str) -> SplitCase {
        SplitCase { kind: OURS.into(), n: 1000, key_len, value_len, order: order.into() }
    }

    #[test]
    fn every_order_has_the_same_keys_once() {
        for (key_len, value_len) in [(20, 800), (10, 4), (24, 15)] {
            let keys = |order| {
                records(key_len, value_len, order).keys().chunks(key_len).map(<[u8]>::to_vec).collect::<Vec<_>>()
            };
            let sequential = keys("");
            assert!(sequential.len() == 1000 && sequential.is_sorted_by(|a, b| a < b));
            for order in ORDERS {
                let mut all = keys(order);
                assert!(all.iter().all(|key| key.len() == key_len && !key.contains(&0)));
                let rises = all.windows(2).filter(|pair| pair[0] < pair[1]).count();
                match order {
                    "" => assert_eq!(rises, 999),
                    "_random" => assert!((400..600).contains(&rises), "{rises}"),
                    _ => assert_eq!(rises, 0),
                }
                all.sort();
                assert!(all == sequential, "{order:?}");
            }
            assert_eq!(records(key_len, value_len, "").bytes(), 1000 * (key_len + value_len) as u64);
        }
    }

    #[test]
    fn values_have_their_length_and_are_told_apart() {
        let records = records(20, 15, "_random");
        let text = records.text();
        let value = |i| records.value(&text, i);
        assert!((0..251).all(|i| value(i).len() == 15 && !value(i).contains(&0)));
        assert!(value(7) == value(258) && value(7) != value(8));
    }
}

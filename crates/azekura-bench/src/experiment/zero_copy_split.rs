//! `zero-copy-split`: the cost of a tree whose leaves split without copying, beside leaves that copy or swap strings.
//!
//! Every tree uses a file in memory that is treated as persistent: every persistent store is flushed and fenced by
//! the processor's own instructions, in pools as in the trees of 2017. `…_slots` in the name of a ratio: not a pool but
//! the document's own leaf, on the allocator and the journal of its time. Seconds are those of all puts; keys are made
//! before. Space is the size of all allocations; that of a pool includes its leaves and its header.

use crate::engine::api::object;
use crate::engine::azekura::{in_pool, open_with};
use crate::engine::{Engine, Options, registry};
use crate::error::{Result, wrong};
use crate::experiment::leaf::{LeafKind, LeafTree};
use crate::experiment::leaf_pool::LeafPool;
use crate::experiment::records::{ORDERS, Order, Records};
use crate::experiment::rounds::{Context, Rounds, csv};
use crate::experiment::watch_fs::WatchFs;
use crate::measure::disk;
use crate::measure::process::Usage;
use crate::report::chart::{Series, lines};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// The peer on the same memory.
const PEER: &str = "heed";
/// Sizes of keys and values; the document's come first.
const SIZES: [(usize, usize); 3] = [(20, 800), (20, 15), (10, 4)];
/// Points of the curve of one case.
const POINTS: u64 = 50;
/// One record of this many is read back.
const STEP: usize = 37;
/// Bytes of a pool of 2017 for each record, beside the record itself.
const BESIDE: u64 = 600;
const MEMTABLE_BYTES: u64 = 64 << 20;
/// Figures for each split, and the sums that they are the means of.
const PER_SPLIT: [(&str, &str); 3] = [
    ("bytes_moved_per_split", "split_stored_bytes"),
    ("flushed_lines_per_split", "split_flushed_lines"),
    ("fences_per_split", "split_fences"),
];
/// Figures of each case in the answer.
const FIGURES: [&str; 6] = ["put_us", "bytes_per_record", "splits", PER_SPLIT[0].0, PER_SPLIT[1].0, PER_SPLIT[2].0];
/// Figures of the document, and the bound for a pool.
const DOCUMENT: [(&str, Option<f64>, f64); 4] = [
    ("time_ratio_20_800", Some(0.63), 0.63),
    ("storage_ratio_20_800", Some(0.80), 0.80),
    ("storage_ratio_20_15", Some(1.35), 1.0),
    ("storage_ratio_10_4", None, 1.0),
];

/// The kind of tree that is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum TreeKind {
    CopyOrSwap,
    NaiveCopy,
    Slots,
    Ours,
    /// A pool without flushes and fences: it survives the end of the process.
    Unflushed,
    Peer,
}

impl TreeKind {
    fn name(self) -> &'static str {
        match self {
            TreeKind::CopyOrSwap => "copy_or_swap",
            TreeKind::NaiveCopy => "naive_copy",
            TreeKind::Slots => "slots",
            TreeKind::Ours => "ours",
            TreeKind::Unflushed => "unflushed",
            TreeKind::Peer => PEER,
        }
    }
}

/// One kind of tree, filled with records of one size in one order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SplitCase {
    kind: TreeKind,
    key_len: usize,
    value_len: usize,
    order: Order,
}

impl SplitCase {
    /// The records, as suffix of fields.
    fn records(&self) -> String {
        format!("{}_{}{}", self.key_len, self.value_len, self.order.suffix())
    }

    fn name(&self) -> String {
        format!("{}_{}", self.kind.name(), self.records())
    }

    /// Whether the document has a figure for it.
    fn is_the_documents(&self) -> bool {
        (self.key_len, self.value_len) == SIZES[0] && self.order == Order::Sequential
    }
}

/// All cases; cases of the same records are adjacent.
fn cases() -> Vec<SplitCase> {
    let mut cases = Vec::new();
    for (key_len, value_len) in SIZES {
        for order in ORDERS {
            let case = |kind| SplitCase { kind, key_len, value_len, order };
            cases.extend([TreeKind::CopyOrSwap, TreeKind::NaiveCopy, TreeKind::Slots, TreeKind::Ours].map(case));
            if case(TreeKind::Ours).is_the_documents() {
                cases.push(case(TreeKind::Unflushed));
                cases.extend(registry::check(PEER).is_ok().then_some(case(TreeKind::Peer)));
            }
        }
    }
    cases
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct SplitTask {
    case: SplitCase,
    n: u64,
    dir: PathBuf,
}

pub(crate) fn run(context: &Context<'_>) -> Result<Map<String, Value>> {
    let (n, rounds, more) = context.size((50_000, 3, 2), (1_000_000, 3, 2));
    let (memory, cases) = (context.memory()?, cases());
    let task = |case: &SplitCase| -> Result<(String, Value)> {
        Ok((case.name(), json!(SplitTask { case: *case, n, dir: memory.fresh(&case.name())? })))
    };
    let variants = cases.iter().map(task).collect::<Result<Vec<_>>>()?;
    let of_document = cases.iter().filter(|case| case.is_the_documents()).map(task).collect::<Result<Vec<_>>>()?;
    let mut all = context.interleave(&variants, rounds)?;
    all.extend(context.interleave(&of_document, more)?);
    let mut answer = object(json!({"records": n}));
    put(&mut answer, &all, &cases);
    disk::write(context.out, "zero-copy-split.csv", &csv(&rows(&all, &cases)))?;
    if let Some(chart) = chart(&all, &cases) {
        disk::write(context.out, "zero-copy-split.svg", &chart)?;
    }
    answer.insert("rounds".into(), all.json());
    Ok(answer)
}

pub(crate) fn variant(task: Value) -> Result<Map<String, Value>> {
    let SplitTask { case, n, dir } = serde_json::from_value(task)?;
    let SplitCase { kind, key_len, value_len, order } = case;
    let records = Records { n, key_len, value_len, order };
    disk::remove(&dir)?;
    let filled = Filled::create(kind, &dir, &records)?;
    let answer = fill(filled, &dir, &records)?;
    disk::remove(&dir)?;
    Ok(answer)
}

/// A tree of 2017, or an engine: a pool or a peer.
enum Filled {
    Leaves(Box<LeafTree>),
    Engine(Box<dyn Engine>),
}

impl Filled {
    fn create(kind: TreeKind, dir: &Path, records: &Records) -> Result<Filled> {
        std::fs::create_dir_all(dir)?;
        let leaves = match kind {
            TreeKind::CopyOrSwap => LeafKind::CopyOrSwap,
            TreeKind::NaiveCopy => LeafKind::NaiveCopy,
            TreeKind::Slots => LeafKind::Slots,
            TreeKind::Peer => return Ok(Filled::Engine(registry::open(PEER, dir, &Options::cached(MEMTABLE_BYTES))?)),
            TreeKind::Ours | TreeKind::Unflushed => {
                let options = Options { data_bytes: records.bytes(), ..Options::cached(MEMTABLE_BYTES) };
                let fs = WatchFs::on_disk(true, kind == TreeKind::Ours);
                let configure =
                    |config: azekura::Config| if kind == TreeKind::Ours { config.fs(Arc::new(fs)) } else { config };
                let engine = open_with(dir, &options, configure, |own| in_pool(own, &options))?;
                let level = engine.stats()["pool"]["level"].clone();
                if kind == TreeKind::Ours && level != "PowerLoss" {
                    return Err(format!("a pool that should flush and fence is of the level {level}").into());
                }
                return Ok(Filled::Engine(engine));
            }
        };
        let len = (records.bytes() + records.n * BESIDE + (64 << 20)).next_multiple_of(1 << 20);
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
                let ((splits, counts), all) = (tree.splits(), tree.pool().counts);
                return Ok(object(json!({
                    "taken_bytes": tree.pool().bytes_taken(), "flushed_by": tree.pool().flushes_by(), "splits": splits,
                    "split_stored_bytes": counts.stored, "split_flushed_lines": counts.lines,
                    "split_fences": counts.fences, "stored_bytes": all.stored, "flushed_lines": all.lines,
                    "fences": all.fences,
                })));
            }
        };
        let mut answer = engine.stats();
        engine.close()?;
        let mut taken = disk::allocated_bytes(dir);
        if let Some(pool) = answer.remove("pool") {
            let bytes = |field: &str| pool[field].as_u64().unwrap_or(0);
            taken = bytes("bytes") - bytes("free_bytes");
            answer = object(pool);
        }
        answer.insert("taken_bytes".into(), json!(taken));
        Ok(answer)
    }
}

/// Puts all records, reads some of them back, and returns the figures.
fn fill(mut filled: Filled, dir: &Path, records: &Records) -> Result<Map<String, Value>> {
    let (keys, text) = (records.keys(), records.text());
    let every = (records.n / POINTS).max(1) as usize;
    let mut course = Vec::new();
    let (before, start) = (Usage::now(), Instant::now());
    for (i, key) in keys.chunks(records.key_len).enumerate() {
        if i % every == 0 {
            course.push((i, start.elapsed().as_secs_f64()));
        }
        filled.put(key, records.value(&text, i))?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let cpu_s = (Usage::now() - before).cpu_s;
    course.push((records.n as usize, seconds));
    for (i, key) in keys.chunks(records.key_len).enumerate().step_by(STEP) {
        if !filled.has(key, records.value(&text, i))? {
            return Err(wrong(format!("record {i} is missing or wrong")));
        }
    }
    let n = records.n as f64;
    let mut answer = object(json!({
        "seconds": seconds, "put_us": seconds * 1e6 / n, "cpu_us": cpu_s * 1e6 / n, "user_bytes": records.bytes(),
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

/// Ratios to copy-or-swap, targets, then all figures.
fn put(answer: &mut Map<String, Value>, all: &Rounds, cases: &[SplitCase]) {
    let variant = |kind: TreeKind, records: &str| format!("{}_{records}", kind.name());
    let mut seen: Vec<String> = cases.iter().map(SplitCase::records).collect();
    seen.dedup();
    for (ratio, field) in [("time_ratio", "seconds"), ("storage_ratio", "bytes_per_record")] {
        for records in &seen {
            let (ours, base) = (variant(TreeKind::Ours, records), variant(TreeKind::CopyOrSwap, records));
            let (slots, naive) = (variant(TreeKind::Slots, records), variant(TreeKind::NaiveCopy, records));
            all.put(answer, &format!("{ratio}_{records}"), field, &ours, &base);
            all.put(answer, &format!("{ratio}_{records}_slots"), field, &slots, &base);
            all.put(answer, &format!("{ratio}_{records}_vs_naive_copy"), field, &ours, &naive);
        }
    }
    let [unflushed, base, peer] =
        [TreeKind::Unflushed, TreeKind::CopyOrSwap, TreeKind::Peer].map(|kind| variant(kind, "20_800"));
    all.put(answer, "time_ratio_20_800_unflushed", "seconds", &unflushed, &base);
    all.put(answer, "baseline_vs_peer", "seconds", &base, &peer);
    let targets = DOCUMENT.map(|(field, document, wanted)| {
        let is = answer.get(field).and_then(Value::as_f64);
        let (slots, met) = (answer.get(&format!("{field}_slots")), is.map(|is| is <= wanted));
        let target = json!({"document": document, "its_own_slots": slots, "at_most": wanted, "is": is, "met": met});
        (field.to_owned(), target)
    });
    answer.insert("targets".into(), Value::Object(targets.into_iter().collect()));
    for (field, case) in FIGURES.iter().flat_map(|field| cases.iter().map(move |case| (field, case))) {
        if let Some(figure) = all.median(&case.name(), field) {
            answer.insert(format!("{field}_{}", case.name()), json!(figure));
        }
    }
}

/// A row for each case.
fn rows(all: &Rounds, cases: &[SplitCase]) -> Vec<Map<String, Value>> {
    let row = |case: &SplitCase| {
        let SplitCase { kind, key_len, value_len, order } = case;
        let mut row = object(json!({
            "leaves": kind.name(), "key_bytes": key_len, "value_bytes": value_len, "order": order,
        }));
        row.extend(FIGURES.map(|field| (field.to_owned(), json!(all.median(&case.name(), field)))));
        row
    };
    cases.iter().map(row).collect()
}

/// Seconds over records of the document's own workload, in its first round.
fn chart(all: &Rounds, cases: &[SplitCase]) -> Option<String> {
    let rounds = all.json();
    let series = cases.iter().filter(|case| case.is_the_documents()).map(|case| {
        let course = rounds[case.name()][0]["course"].as_array().into_iter().flatten();
        let points = course.filter_map(|point| Some((point[1].as_f64()?, point[0].as_f64()?)));
        Series { name: case.kind.name().replace('_', " "), points: points.collect() }
    });
    lines("records of 20 + 800 bytes put in ascending order", "seconds", &series.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::{SplitCase, SplitTask, TreeKind, cases, chart, csv, put, rows, variant};
    use crate::engine::api::object;
    use crate::experiment::records::Order;
    use crate::experiment::rounds::Rounds;
    use serde_json::{Map, Value, json};
    use std::collections::BTreeSet;

    #[test]
    fn every_case_is_filled_and_counted() {
        let dir = tempfile::tempdir().unwrap();
        let names: BTreeSet<String> = cases().iter().map(SplitCase::name).collect();
        assert_eq!(names.len(), cases().len());
        for case in cases() {
            let task = SplitTask { case, n: 2000, dir: dir.path().join(case.name()) };
            let answer = variant(json!(task)).unwrap();
            let number = |field: &str| answer.get(field).and_then(Value::as_f64).unwrap_or(f64::NAN);
            let user = (case.key_len + case.value_len) as f64;
            assert!(number("bytes_per_record") > user && number("put_us") > 0.0, "{}: {answer:?}", case.name());
            assert!(!task.dir.exists());
            assert_eq!(number("splits") > 0.0, case.kind != TreeKind::Peer, "{}: {answer:?}", case.name());
        }
    }

    #[test]
    fn splits_move_what_the_document_says() {
        let dir = tempfile::tempdir().unwrap();
        let per_split = |name: &str, field: &str| {
            let case = cases().into_iter().find(|case| case.name() == name).unwrap();
            let task = SplitTask { case, n: 3000, dir: dir.path().join(name) };
            variant(json!(task)).unwrap()[field].as_f64().unwrap()
        };
        let moved = ["naive_copy_20_800", "copy_or_swap_20_800", "slots_20_800"]
            .map(|name| per_split(name, "bytes_moved_per_split"));
        assert!(moved.is_sorted_by(|a, b| a > b) && moved[0] > 23.0 * 820.0 && moved[2] < 23.0 * 200.0, "{moved:?}");
        let kinds = ["copy_or_swap", "slots", "ours"].map(|kind| format!("{kind}_20_800_random"));
        let fences = kinds.each_ref().map(|name| per_split(name, "fences_per_split"));
        assert!(fences.is_sorted_by(|a, b| a > b) && fences[2] <= 3.0, "{fences:?}");
    }

    #[test]
    fn answer_table_and_chart_follow_from_rounds() {
        let case = |(kind, key_len, value_len)| SplitCase { kind, key_len, value_len, order: Order::Sequential };
        let cases = [
            (TreeKind::CopyOrSwap, 20, 800),
            (TreeKind::NaiveCopy, 20, 800),
            (TreeKind::Slots, 20, 800),
            (TreeKind::Ours, 20, 800),
            (TreeKind::CopyOrSwap, 20, 15),
            (TreeKind::Ours, 20, 15),
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
        put(&mut answer, &all, &cases);
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
        let table = csv(&rows(&all, &cases));
        let first: Vec<&str> = table.lines().nth(1).unwrap().split(',').collect();
        assert_eq!(first, ["copy_or_swap", "20", "800", "sequential", "4.0", "400.0", "10.0", "", "", "5.5"]);
        assert!(chart(&all, &cases).unwrap().contains("copy or swap"));
        assert!(chart(&Rounds::default(), &cases).is_none());
    }
}

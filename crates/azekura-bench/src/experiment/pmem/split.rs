//! `zero-copy-split`: what a tree costs whose leaves split without copying, beside leaves that copy or swap strings.
//!
//! Every tree stands on a file in memory, and every store that has to be persistent is flushed and fenced by the
//! processor's own instructions, in ours as in those of 2017: the memory is taken for persistent. `…_slots` in the name
//! of a ratio: not our tree but the document's own, on the allocator and the journal of its time, so that nothing
//! differs from the baseline but leaves and splits. Seconds are those of all puts; keys are made beforehand. Space is
//! what allocations take, ours with its leaves and its header.

use crate::engine::registry;
use crate::experiment::experiment::{Context, Experiment};
use crate::experiment::pmem::records::{ORDERS, Order, Records};
use crate::experiment::pmem::split_answer;
use crate::experiment::pmem::subject::{Subject, object, of_leaves, of_peer, of_pool};
use crate::experiment::rounds::{Rounds, Variant, interleave};
use crate::failure::{Result, wrong};
use crate::leaf::tree::Leaves;
use crate::machine::disk;
use crate::machine::process::Usage;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::time::Instant;

/// The peer that does the same on the same memory.
pub(super) const PEER: &str = "heed";
/// Sizes of keys and values, the document's first.
pub(super) const SIZES: [(usize, usize); 3] = [(20, 800), (20, 15), (10, 4)];
/// Points of a course.
const POINTS: u64 = 50;
/// Every so many records are read back.
const STEP: usize = 37;

/// See the module.
pub(crate) struct ZeroCopySplit;

/// What is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Kind {
    CopyOrSwap,
    NaiveCopy,
    Slots,
    Ours,
    /// Ours, without flushes and fences: it survives the end of the process, which memory does by itself.
    Unflushed,
    Peer,
}

impl Kind {
    /// As fields name it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::CopyOrSwap => "copy_or_swap",
            Kind::NaiveCopy => "naive_copy",
            Kind::Slots => "slots",
            Kind::Ours => "ours",
            Kind::Unflushed => "unflushed",
            Kind::Peer => PEER,
        }
    }
}

/// One kind, filled with records of one size in one order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Case {
    pub(super) kind: Kind,
    pub(super) key_len: usize,
    pub(super) value_len: usize,
    pub(super) order: Order,
}

impl Case {
    /// The records, as names of fields end.
    pub(super) fn records(&self) -> String {
        format!("{}_{}{}", self.key_len, self.value_len, self.order.suffix())
    }

    pub(super) fn name(&self) -> String {
        format!("{}_{}", self.kind.name(), self.records())
    }

    /// Whether the document has a figure of its time.
    pub(super) fn is_the_documents(&self) -> bool {
        (self.key_len, self.value_len) == SIZES[0] && self.order == Order::Sequential
    }
}

/// All of them, those of the same records next to each other.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (key_len, value_len) in SIZES {
        for order in ORDERS {
            let case = |kind| Case { kind, key_len, value_len, order };
            cases.extend([Kind::CopyOrSwap, Kind::NaiveCopy, Kind::Slots, Kind::Ours].map(case));
            if case(Kind::Ours).is_the_documents() {
                cases.push(case(Kind::Unflushed));
                cases.extend(registry::check(PEER).is_ok().then_some(case(Kind::Peer)));
            }
        }
    }
    cases
}

/// What a child is asked to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Task {
    case: Case,
    n: u64,
    dir: PathBuf,
}

impl Experiment for ZeroCopySplit {
    fn name(&self) -> &'static str {
        "zero-copy-split"
    }

    fn about(&self) -> &'static str {
        "puts into a tree whose leaves split by moving slots, against leaves that copy or swap strings: time and space"
    }

    fn run(&self, context: &Context<'_>) -> Result<Map<String, Value>> {
        let (n, rounds, more) = context.size((50_000, 3, 2), (1_000_000, 3, 2));
        let memory = context.memory()?;
        let mut variants = Vec::new();
        for case in cases() {
            let task = Task { case, n, dir: memory.fresh(&case.name())? };
            variants.push((case, Variant { name: case.name(), task: json!(task) }));
        }
        let of_document = |(case, _): &&(Case, Variant)| case.is_the_documents();
        let documents: Vec<Variant> = variants.iter().filter(of_document).map(|(_, variant)| variant.clone()).collect();
        let mut all = Rounds::default();
        all.extend(interleave(context, &variants.into_iter().map(|(_, variant)| variant).collect::<Vec<_>>(), rounds)?);
        all.extend(interleave(context, &documents, more)?);
        let mut answer = Map::new();
        answer.insert("records".into(), json!(n));
        split_answer::put(&mut answer, &all, &cases());
        context.write("zero-copy-split.csv", &split_answer::csv(&all, &cases()))?;
        if let Some(chart) = split_answer::chart(&all, &cases()) {
            context.write("zero-copy-split.svg", &chart)?;
        }
        answer.insert("rounds".into(), all.json());
        Ok(answer)
    }

    fn variant(&self, task: &Value) -> Result<Map<String, Value>> {
        let task: Task = serde_json::from_value(task.clone())?;
        let Case { kind, key_len, value_len, order } = task.case;
        let records = Records { n: task.n, key_len, value_len, order };
        disk::remove(&task.dir)?;
        let subject = match kind {
            Kind::CopyOrSwap => of_leaves(Leaves::CopyOrSwap, &task.dir, &records),
            Kind::NaiveCopy => of_leaves(Leaves::NaiveCopy, &task.dir, &records),
            Kind::Slots => of_leaves(Leaves::Slots, &task.dir, &records),
            Kind::Ours => of_pool(&task.dir, &records, true),
            Kind::Unflushed => of_pool(&task.dir, &records, false),
            Kind::Peer => of_peer(PEER, &task.dir),
        }?;
        let answer = fill(subject, &records)?;
        disk::remove(&task.dir)?;
        Ok(answer)
    }
}

/// Puts all records, reads some of them back, and says what that took.
fn fill(mut subject: Box<dyn Subject>, records: &Records) -> Result<Map<String, Value>> {
    let (keys, values) = (records.keys(), records.values());
    let every = (records.n / POINTS).max(1) as usize;
    let mut course = Vec::new();
    let (before, start) = (Usage::now(), Instant::now());
    for (i, key) in keys.iter().enumerate() {
        if i % every == 0 {
            course.push((i, start.elapsed().as_secs_f64()));
        }
        subject.put(key, values.of(i))?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let cpu_s = (Usage::now() - before).cpu_s;
    course.push((records.n as usize, seconds));
    for (i, key) in keys.iter().enumerate().step_by(STEP) {
        let mut right = false;
        let found = subject.get(key, &mut |value| right = value == values.of(i))?;
        if !found || !right {
            return Err(wrong(format!("record {i}: found {found}, right {right}")));
        }
    }
    let n = records.n as f64;
    let mut answer = object(json!({
        "seconds": seconds, "put_us": seconds * 1e6 / n, "cpu_us": cpu_s * 1e6 / n, "user_bytes": records.bytes(),
        "course": course,
    }));
    answer.extend(subject.end()?);
    let number = |field: &str| answer.get(field).and_then(Value::as_f64);
    let mut each = Map::new();
    each.insert("bytes_per_record".into(), json!(number("taken_bytes").map(|bytes| bytes / n)));
    if let Some(splits) = number("splits").filter(|splits| *splits > 0.0) {
        for (field, of) in split_answer::PER_SPLIT {
            each.insert(field.into(), json!(number(of).map(|sum| sum / splits)));
        }
    }
    answer.extend(each);
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::{Case, Kind, Task, ZeroCopySplit, cases};
    use crate::experiment::experiment::Experiment;
    use serde_json::{Value, json};

    #[test]
    fn every_case_is_filled_read_back_and_counted() {
        let dir = tempfile::tempdir().unwrap();
        let mut names = Vec::new();
        for case in cases() {
            let task = Task { case, n: 2000, dir: dir.path().join(case.name()) };
            let answer = ZeroCopySplit.variant(&json!(task)).unwrap();
            let number = |field: &str| answer.get(field).and_then(Value::as_f64).unwrap_or(f64::NAN);
            let user = (case.key_len + case.value_len) as f64;
            assert!(number("bytes_per_record") > user && number("put_us") > 0.0, "{}: {answer:?}", case.name());
            assert!(!task.dir.exists());
            assert_eq!(number("splits") > 0.0, case.kind != Kind::Peer, "{}: {answer:?}", case.name());
            names.push(case.name());
        }
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn what_moves_in_a_split_of_each_kind_is_what_the_document_says() {
        let dir = tempfile::tempdir().unwrap();
        let per_split = |case: Case, field: &str| {
            let task = Task { case, n: 3000, dir: dir.path().join(case.name()) };
            ZeroCopySplit.variant(&json!(task)).unwrap()[field].as_f64().unwrap()
        };
        let of = |name: &str| cases().into_iter().find(|case| case.name() == name).unwrap();
        let moved = ["naive_copy_20_800", "copy_or_swap_20_800", "slots_20_800"]
            .map(|name| per_split(of(name), "bytes_moved_per_split"));
        assert!(moved.is_sorted_by(|a, b| a > b) && moved[0] > 23.0 * 820.0 && moved[2] < 23.0 * 200.0, "{moved:?}");
        let kinds = ["copy_or_swap", "slots", "ours"].map(|kind| format!("{kind}_20_800_random"));
        let fences = kinds.each_ref().map(|name| per_split(of(name), "fences_per_split"));
        assert!(fences.is_sorted_by(|a, b| a > b) && fences[2] <= 3.0, "{fences:?}");
        let moved = kinds.each_ref().map(|name| per_split(of(name), "bytes_moved_per_split"));
        assert!(moved.is_sorted_by(|a, b| a > b) && moved[2] < 400.0, "{moved:?}");
    }
}

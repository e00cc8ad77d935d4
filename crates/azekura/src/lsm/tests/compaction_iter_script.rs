//! The script of the compaction iterator, `testdata/scripts/compaction_iter.txt`: versions of keys and the snapshots of
//! readers, and the versions that a compaction keeps.
//!
//! - `snapshots SEQNO…`: begins a case. Those of all readers, the last visible sequence number last.
//! - `run KEY VERSION…`: an input with versions of a key; `and KEY VERSION…`: more of the same input. A version is
//!   `SEQNO:KIND` or `SEQNO:KIND=VALUE`, with the kinds `put`, `blob`, `del`, `single`, `merge` and
//!   `ttl=VALUE@EXPIRES_MS`. `x*9` is a value of nine `x`.
//! - `range-del FIRST-END@SEQNO`, in the order of sequence numbers; `older FIRST-LAST`: a table below the output level.
//! - `operator append` and `operator fails`; `filter`: removes values that begin with `-` and cuts others after three
//!   bytes; `now MS`.
//! - `compact`: shows what is kept if no table is older (`bottom`), and if an older one may have every key (`above`);
//!   if the case has an `older` table, with that one. `flush`: the same for level 0.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::base::blob_pointer::BlobPointer;
use crate::base::key::{put_expiry, split_expiry};
use crate::base::key_range::{KeyBoundary, KeyRange};
use crate::base::merge_operator::{MergeOperator, append};
use crate::base::version_edit::FileNumber;
use crate::base::{EntryRef, Error, KeyOrder, RecordKind, Result, SeqNo};
use crate::engine::{BlobResolver, ExpiryLimits};
use crate::iter::InternalIter;
use crate::iter::range_tombstones::RangeTombstones;
use crate::lsm::compaction_filter::{AppliedFilter, CompactionFilter, FilterContext, FilterDecision, FilterValue};
use crate::lsm::compaction_iter::{AppliedMergeOperator, CompactionIter};
use crate::lsm::options::LsmOptions;
use crate::lsm::output::{OutputOptions, PendingOutputs, TableOutputWriter};
use crate::lsm::read::RunIter;
use crate::lsm::table_handle::TableHandle;
use crate::lsm::tests::harness::LsmFixture;
use crate::lsm::version::SortedRun;
use crate::lsm::version::tests::table;
use crate::mem::slice::Slice;
use crate::testing::script::check_component_script;
use crate::testing::vec_iter::VecIter;

type OwnedEntry = (Vec<u8>, SeqNo, RecordKind, Vec<u8>);

/// The value of a pointer is `blob` and its ordinal, the sequence number of its entry.
struct NumberedBlobs;

impl BlobResolver for NumberedBlobs {
    fn resolve(&mut self, pointer: &[u8]) -> Result<Slice> {
        Ok(format!("blob{}", BlobPointer::decode(pointer)?.ordinal).into_bytes().into())
    }
}

struct FailingOperator;

impl MergeOperator for FailingOperator {
    fn name(&self) -> &str {
        "fails"
    }

    fn full_merge(&self, _: &[u8], _: Option<&[u8]>, _: &[&[u8]]) -> Result<Vec<u8>> {
        Err(Error::invalid("the operator fails"))
    }
}

struct CuttingFilter;

impl CompactionFilter for CuttingFilter {
    fn name(&self) -> &str {
        "cuts"
    }

    fn filter(&self, _: &FilterContext<'_>, _: &[u8], value: &mut FilterValue<'_>) -> Result<FilterDecision> {
        Ok(match value.read()? {
            [b'-', ..] => FilterDecision::Remove,
            [start @ .., _] if start.len() >= 3 => FilterDecision::Replace(start[..3].to_vec()),
            _ => FilterDecision::Keep,
        })
    }
}

struct CompactionIterScript {
    fixture: LsmFixture,
    snapshots: Vec<SeqNo>,
    runs: Vec<Vec<OwnedEntry>>,
    range_tombstones: RangeTombstones,
    older: Vec<(String, String)>,
    operator: Option<Arc<dyn MergeOperator>>,
    has_filter: bool,
    now_ms: u64,
}

impl CompactionIterScript {
    fn new(snapshots: Vec<SeqNo>) -> CompactionIterScript {
        CompactionIterScript {
            fixture: LsmFixture::new(KeyOrder::bytewise(), LsmOptions::default(), 1),
            snapshots,
            runs: Vec::new(),
            range_tombstones: RangeTombstones::default(),
            older: Vec::new(),
            operator: None,
            has_filter: false,
            now_ms: 0,
        }
    }

    fn run_command(&mut self, command: &str, words: &[&str], output: &mut String) {
        let range = |word: &str| word.split_once('-').map(|(a, b)| (a.to_owned(), b.to_owned())).expect("FIRST-LAST");
        match command {
            "snapshots" => *self = CompactionIterScript::new(words.iter().map(|word| parse_seqno(word)).collect()),
            "run" => self.runs.push(parse_versions(words)),
            "and" => self.runs.last_mut().expect("a run is above").extend(parse_versions(words)),
            "range-del" => {
                let (keys, seqno) = words[0].split_once('@').expect("FIRST-END@SEQNO");
                let [start, end] =
                    <[String; 2]>::from(range(keys)).map(|key| KeyBoundary::Before(key.as_bytes().into()));
                let (set, order) = (&self.range_tombstones, &self.fixture.order);
                let range = KeyRange { start, end };
                self.range_tombstones = set.with_range_delete(range, parse_seqno(seqno), &self.snapshots, order);
            }
            "older" => self.older.push(range(words[0])),
            "operator" => {
                let failing: Arc<dyn MergeOperator> = Arc::new(FailingOperator);
                self.operator = Some(if words[0] == "append" { append("+") } else { failing });
            }
            "filter" => self.has_filter = true,
            "now" => self.now_ms = words[0].parse().expect("MS"),
            "compact" | "flush" => {
                let all = [("bottom", vec![]), ("above", vec![("".into(), "~".into())])];
                let one = [("above the older table", self.older.clone())];
                let cases = if self.older.is_empty() { &all[..] } else { &one[..] };
                for (what, older) in cases {
                    let entries = self.compact(older, command == "compact").expect("the compaction succeeds");
                    writeln!(output, "{what}: {entries}").unwrap();
                }
            }
            other => panic!("there is no command {other:?}"),
        }
    }

    fn compact(&self, older: &[(String, String)], zero_seqnos: bool) -> Result<String> {
        let (context, order) = (&self.fixture.tree.context, &self.fixture.order);
        let read = self.fixture.options.read_options(6);
        context.next_file_id.fetch_max(10_000, Ordering::Relaxed);
        let older = older.iter().enumerate().map(|(at, (first, last))| {
            let meta = (*table(9_000 + at as u64, first, last)).clone();
            TableHandle::new(meta, None, Arc::clone(context), read)
        });
        let older: Vec<_> = older.collect();
        let older_runs = if older.is_empty() { Vec::new() } else { vec![Arc::new(SortedRun::new(older, order))] };
        let inputs =
            self.runs.iter().map(|run| Box::new(VecIter::new(order.clone(), run.clone())) as Box<dyn InternalIter>);
        let filter = self.has_filter.then(|| AppliedFilter {
            filter: Arc::new(CuttingFilter),
            partition: "p".into(),
            level: 6,
            snapshots: Arc::clone(&context.snapshots),
            blobs: Box::new(NumberedBlobs),
        });
        let merge = self
            .operator
            .as_ref()
            .map(|operator| AppliedMergeOperator { operator: Arc::clone(operator), blobs: Box::new(NumberedBlobs) });
        let tombstones = Arc::new(self.range_tombstones.clone());
        let mut expiry = ExpiryLimits::default();
        expiry.now_ms = self.now_ms;
        let mut iter =
            CompactionIter::new(order, inputs.collect(), self.snapshots.clone(), older_runs, tombstones, zero_seqnos)
                .with_components(filter, merge)
                .with_expiry(expiry);
        let options = OutputOptions {
            table: self.fixture.options.table_options(6),
            target_file_size: u64::MAX,
            separation: None,
            new_value_separation: None,
            output_level_boundaries: Vec::new(),
        };
        let mut output = TableOutputWriter::new(PendingOutputs::new(context, 0), options);
        // It pauses after each entry.
        while !iter.step(1, &mut output)? {}
        output.outputs.finish()?;
        let tables =
            output.outputs.tables.iter().map(|meta| TableHandle::new(meta.clone(), None, Arc::clone(context), read));
        let mut entries = RunIter::new(Arc::new(SortedRun::new(tables.collect(), order)), context, false);
        let (mut text, mut last_key) = (String::new(), None);
        entries.seek_to_first()?;
        while entries.valid() {
            let entry = entries.entry();
            if last_key.as_deref() != Some(entry.user_key) {
                let separator = if last_key.is_some() { "| " } else { "" };
                write!(text, "{separator}{} ", entry.user_key.escape_ascii()).unwrap();
                last_key = Some(entry.user_key.to_vec());
            }
            write!(text, "{} ", show_version(entry)?).unwrap();
            entries.next()?;
        }
        Ok(if text.is_empty() { "nothing".into() } else { text.trim_end().into() })
    }
}

fn parse_seqno(word: &str) -> SeqNo {
    SeqNo(word.parse().unwrap_or_else(|_| panic!("{word:?} is no sequence number")))
}

/// A key and its versions.
fn parse_versions(words: &[&str]) -> Vec<OwnedEntry> {
    let (key, versions) = words.split_first().expect("KEY VERSION…");
    let parse = |word: &&str| {
        let (seqno, rest) = word.split_once(':').unwrap_or_else(|| panic!("{word:?} is not SEQNO:KIND"));
        let (kind, text) = rest.split_once('=').unwrap_or((rest, ""));
        let (seqno, mut value) = (parse_seqno(seqno), parse_value(text));
        let kind = match kind {
            "put" => RecordKind::Put,
            "del" => RecordKind::Delete,
            "single" => RecordKind::SingleDelete,
            "merge" => RecordKind::Merge,
            "blob" => {
                let (logical_file, ordinal) = (FileNumber(1), seqno.0 as u32);
                let frame_offset = 64 * seqno.0;
                BlobPointer { logical_file, ordinal, frame_offset, frame_len: 20, value_len: 5 }.encode(&mut value);
                RecordKind::BlobPointer
            }
            "ttl" => {
                let (text, expires_ms) = text.split_once('@').expect("ttl=VALUE@EXPIRES_MS");
                value.clear();
                put_expiry(&mut value, expires_ms.parse().expect("EXPIRES_MS"), text.as_bytes());
                RecordKind::ExpiringPut
            }
            other => panic!("there is no kind {other:?}"),
        };
        (key.as_bytes().to_vec(), seqno, kind, value)
    };
    versions.iter().map(parse).collect()
}

fn parse_value(text: &str) -> Vec<u8> {
    match text.split_once('*') {
        Some((unit, count)) => unit.repeat(count.parse().expect("a count")).into_bytes(),
        None => text.as_bytes().to_vec(),
    }
}

fn show_version(entry: EntryRef<'_>) -> Result<String> {
    let (expires_ms, kind, value) = split_expiry(entry.kind, entry.value)?;
    let kind = match kind {
        RecordKind::Put if entry.kind.has_expiry() => "ttl",
        RecordKind::Put => "put",
        RecordKind::BlobPointer => return Ok(format!("{}:blob", entry.seqno)),
        RecordKind::Delete => "del",
        RecordKind::SingleDelete => "single",
        RecordKind::Merge => "merge",
        other => panic!("no compaction writes {other:?}"),
    };
    let mut text = format!("{}:{kind}", entry.seqno);
    match value {
        [] => {}
        [unit, rest @ ..] if rest.len() > 20 && rest.iter().all(|byte| byte == unit) => {
            write!(text, "={}*{}", char::from(*unit), value.len()).unwrap();
        }
        _ => write!(text, "={}", value.escape_ascii()).unwrap(),
    }
    if entry.kind.has_expiry() {
        write!(text, "@{expires_ms}").unwrap();
    }
    Ok(text)
}

#[test]
fn compaction_iter_script() {
    let mut script = CompactionIterScript::new(Vec::new());
    check_component_script("compaction_iter", |command, words, output| script.run_command(command, words, output));
}

//! The script of the compaction picker, `testdata/scripts/compaction_picker.txt`: the levels of a tree, and the picked
//! compactions.
//!
//! - `tree OPTION=VALUE…`: an empty tree; with `l0-trigger`, `table-size`, `base-level`, `multiplier`, `codecs`
//!   (`none` or `lz4`, by level), `gc` (the target of background blob GC).
//! - `blob FILE=BYTES…`: blob files.
//! - `L0 TABLE…`: a run of level 0, newest first; `L1 TABLE…` to `L6 TABLE…`. A table is `NUMBER:FIRST-LAST`,
//!   then any of `,size=` (100), `,entries=` (10), `,dels=` (tombstones), `,seqnos=LOW-HIGH` (10 times the number),
//!   `,expire=COUNT@LOW-HIGH`, `,blobs=FILE:BYTES`, `,superseded=COUNT@SEQNO`, `,covered=BYTES`, `,delays-scans=yes`,
//!   `,written-at=SEQNO`, `,applied=SEQNO`. `NUMBER..END:PREFIX` stands for small tables in order.
//! - `del FIRST-END@SEQNO`: a flushed range delete.
//! - `pick [forced] [idle] [now=MS] [oldest=SEQNO] [after=LEVEL:KEY]`; `run`, with the same words: carries out what is
//!   picked until nothing is; `to-bottom SEQNO`; `drain SEQNO FIRST-LAST`: carries that out while flushes add tables;
//!   `rewrite NUMBER…`, `cleanable`, `targets`, `debt`.

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering as Memory};

use crate::base::compression::CompressionType;
use crate::base::key_range::{KeyBoundary, KeyRange};
use crate::base::version_edit::{BlobFileMeta, BlobFileSection, ExpiryTimes, FileNumber, TableBlobUsage, TableMeta};
use crate::base::{KeyOrder, SeqNo};
use crate::engine::ExpiryLimits;
use crate::iter::range_tombstones::RangeTombstones;
use crate::lsm::compaction_picker::{
    CompactPointers, CompactionPicker, CompactionReason, PickedCompaction, compaction_debt, level_targets,
};
use crate::lsm::options::{KvSeparationOptions, LsmOptions};
use crate::lsm::tests::harness::LsmFixture;
use crate::lsm::version::tests::table_at;
use crate::lsm::version::{BOTTOM_LEVEL, HasTableMeta, SupersededVersions, Version, VersionChange};
use crate::testing::FnComparator;
use crate::testing::script::check_component_script;

/// Compactions until a tree must be in order.
const MAX_COMPACTIONS: usize = 100;

#[derive(Clone)]
struct ScriptTable {
    meta: TableMeta,
    superseded: SupersededVersions,
    covered_bytes: u64,
    delays_scans: bool,
    written_at: Option<SeqNo>,
}

impl HasTableMeta for ScriptTable {
    fn meta(&self) -> &TableMeta {
        &self.meta
    }

    fn superseded(&self) -> SupersededVersions {
        self.superseded
    }

    fn covered_bytes(&self) -> u64 {
        self.covered_bytes
    }

    fn delays_scans(&self) -> bool {
        self.delays_scans
    }

    fn oldest_snapshot_when_written(&self) -> Option<SeqNo> {
        self.written_at
    }
}

impl ScriptTable {
    fn parse(text: &str) -> ScriptTable {
        let mut fields = text.split(',');
        let (number, keys) = fields.next().and_then(|table| table.split_once(':')).expect("a table is NUMBER:KEYS");
        let number: u64 = parse_number(number);
        let (first, last) = keys.split_once('-').unwrap_or((keys, keys));
        let mut meta = (*table_at(number, first, last, (number * 10, number * 10 + 9))).clone();
        let (mut superseded, mut covered_bytes, mut written_at) = (SupersededVersions::default(), 0, None);
        let mut delays_scans = false;
        for field in fields {
            let (name, value) = field.split_once('=').expect("a field has a value");
            match name {
                "size" => meta.size = parse_number(value),
                "entries" => meta.entries = parse_number(value),
                "dels" => meta.tombstones = parse_number(value),
                "seqnos" => {
                    let (low, high) = parse_pair(value, '-');
                    (meta.smallest_seqno, meta.largest_seqno) = (SeqNo(low), SeqNo(high));
                }
                "expire" => {
                    let (entries, times) = value.split_once('@').expect("COUNT@LOW-HIGH");
                    let (lowest_ms, highest_ms) = parse_pair(times, '-');
                    meta.expiry = ExpiryTimes { entries: parse_number(entries), lowest_ms, highest_ms };
                }
                "blobs" => {
                    let (file, bytes) = parse_pair(value, ':');
                    meta.blob_usage = vec![TableBlobUsage { logical_file: FileNumber(file), count: 1, bytes }];
                }
                "superseded" => {
                    let (count, seqno) = parse_pair(value, '@');
                    superseded = SupersededVersions { count, lowest_newer_seqno: SeqNo(seqno) };
                }
                "covered" => covered_bytes = parse_number(value),
                "delays-scans" => delays_scans = value == "yes",
                "written-at" => written_at = Some(SeqNo(parse_number(value))),
                "applied" => meta.range_deletes_applied_through = SeqNo(parse_number(value)),
                other => panic!("a table has no {other:?}"),
            }
        }
        ScriptTable { meta, superseded, covered_bytes, delays_scans, written_at }
    }

    fn show(&self) -> String {
        let meta = &self.meta;
        let (first, last) = (meta.smallest_key.0.escape_ascii(), meta.largest_key.0.escape_ascii());
        let dels = if meta.tombstones > 0 { format!(",dels={}", meta.tombstones) } else { String::new() };
        format!("{}:{first}-{last},size={}{dels}", meta.number.0, meta.size)
    }
}

fn parse_number<N: std::str::FromStr>(word: &str) -> N {
    word.parse().unwrap_or_else(|_| panic!("{word:?} is no number"))
}

fn parse_pair(word: &str, separator: char) -> (u64, u64) {
    let (one, other) = word.split_once(separator).unwrap_or_else(|| panic!("{word:?} has no {separator:?}"));
    (parse_number(one), parse_number(other))
}

/// The circumstances of a pick.
#[derive(Default)]
struct PickCircumstances {
    forced: bool,
    idle: bool,
    oldest: Option<SeqNo>,
    expiry: ExpiryLimits,
    pointers: CompactPointers,
}

impl PickCircumstances {
    fn parse(words: &[&str]) -> PickCircumstances {
        let mut found = PickCircumstances::default();
        for word in words {
            match word.split_once('=').unwrap_or((word, "")) {
                ("forced", _) => found.forced = true,
                ("idle", _) => found.idle = true,
                ("now", ms) => found.expiry.now_ms = parse_number(ms),
                ("oldest", seqno) => found.oldest = Some(SeqNo(parse_number(seqno))),
                ("after", place) => {
                    let (level, key) = place.split_once(':').expect("LEVEL:KEY");
                    found.pointers[parse_number::<usize>(level)] = Some(key.into());
                }
                _ => panic!("{word:?} is unknown"),
            }
        }
        found
    }
}

struct PickerScript {
    fixture: LsmFixture,
    order: KeyOrder,
    options: LsmOptions,
    /// Newest first.
    l0: Vec<Vec<ScriptTable>>,
    deep: Vec<(u8, ScriptTable)>,
    range_tombstones: RangeTombstones,
    blobs: Vec<(u64, u64)>,
    next_number: u64,
}

impl PickerScript {
    fn new() -> PickerScript {
        PickerScript {
            fixture: LsmFixture::new(KeyOrder::bytewise(), LsmOptions::default(), 1),
            order: KeyOrder::bytewise(),
            options: LsmOptions::default(),
            l0: Vec::new(),
            deep: Vec::new(),
            range_tombstones: RangeTombstones::default(),
            blobs: Vec::new(),
            next_number: 200,
        }
    }

    fn run_command(&mut self, command: &str, words: &[&str], output: &mut String) {
        match command {
            "tree" => *self = PickerScript::new().with_options(words),
            "blob" => self.blobs.extend(words.iter().map(|word| parse_pair(word, '='))),
            "del" => {
                let (keys, seqno) = words[0].split_once('@').expect("FIRST-END@SEQNO");
                let (first, end) = keys.split_once('-').expect("FIRST-END");
                let start = KeyBoundary::Before(first.as_bytes().into());
                let range = KeyRange { start, end: KeyBoundary::Before(end.as_bytes().into()) };
                let seqno = SeqNo(parse_number(seqno));
                self.range_tombstones =
                    self.range_tombstones.with_range_delete(range, seqno, &[SeqNo(seqno.0 - 1)], &self.order);
            }
            "pick" => {
                let at = PickCircumstances::parse(words);
                let picked = self.pick(&at, |picker| picker.pick_compaction(at.forced));
                writeln!(output, "{}", show_pick(picked.as_ref())).unwrap();
            }
            "run" => {
                let at = PickCircumstances::parse(words);
                self.run(&at, output, |picker| picker.pick_compaction(at.forced), |_| {});
            }
            "to-bottom" => {
                let through = SeqNo(parse_number(words[0]));
                let picked = self.pick(&PickCircumstances::default(), |picker| picker.pick_to_bottom(through));
                writeln!(output, "{}", show_pick(picked.as_ref())).unwrap();
            }
            "drain" => {
                let through = SeqNo(parse_number(words[0]));
                let flush = |script: &mut PickerScript| {
                    script.next_number += 1;
                    script.l0.insert(0, vec![ScriptTable::parse(&format!("{}:{}", script.next_number, words[1]))]);
                };
                self.run(&PickCircumstances::default(), output, |picker| picker.pick_to_bottom(through), flush);
            }
            "rewrite" => {
                let wanted: BTreeSet<FileNumber> = words.iter().map(|word| FileNumber(parse_number(word))).collect();
                let picked = self.pick(&PickCircumstances::default(), |picker| picker.pick_bottom_rewrite(&wanted));
                writeln!(output, "{}", show_pick(picked.as_ref())).unwrap();
            }
            "cleanable" => {
                let at = PickCircumstances::parse(words);
                let found = self.pick(&at, |picker| Some(picker.bottom_tables_to_clean())).unwrap();
                writeln!(output, "{:?}", found.iter().map(|number| number.0).collect::<Vec<_>>()).unwrap();
            }
            "targets" => {
                let targets = level_targets(&self.version(), &self.options.compaction);
                writeln!(output, "base level {}: {:?}", targets.base_level, targets.bytes).unwrap();
            }
            "debt" => writeln!(output, "{} bytes", compaction_debt(&self.version(), &self.options)).unwrap(),
            level => self.add_tables(parse_number(level.strip_prefix('L').expect("a command")), words),
        }
    }

    fn with_options(mut self, words: &[&str]) -> PickerScript {
        let options = &mut self.options.compaction;
        (options.l0_compaction_trigger, options.target_file_size, options.base_level_size) = (2, 100, 400);
        for word in words {
            let (name, value) = word.split_once('=').expect("an option has a value");
            match name {
                "l0-trigger" => self.options.compaction.l0_compaction_trigger = parse_number(value),
                "table-size" => self.options.compaction.target_file_size = parse_number(value),
                "base-level" => self.options.compaction.base_level_size = parse_number(value),
                "multiplier" => self.options.compaction.level_size_multiplier = parse_number(value),
                "gc" => {
                    let target = (value != "none").then(|| parse_number(value));
                    self.options.kv_separation = Some(KvSeparationOptions::default().automatic_gc(target));
                }
                "codecs" => {
                    let codec = |name| if name == "none" { CompressionType::None } else { CompressionType::Lz4 };
                    self.options.compression_per_level = value.split(',').map(codec).collect();
                }
                other => panic!("there is no option {other:?}"),
            }
        }
        self
    }

    fn add_tables(&mut self, level: u8, words: &[&str]) {
        let mut tables = Vec::new();
        for word in words {
            match word.split_once("..") {
                None => tables.push(ScriptTable::parse(word)),
                Some((first, rest)) => {
                    let (end, prefix) = rest.split_once(':').expect("NUMBER..END:PREFIX");
                    let numbers = parse_number::<u64>(first)..parse_number(end);
                    let texts = numbers.enumerate().map(|(at, number)| format!("{number}:{prefix}{at:02}"));
                    tables.extend(texts.map(|text| ScriptTable::parse(&text)));
                }
            }
        }
        match level {
            0 => self.l0.push(tables),
            _ => self.deep.extend(tables.into_iter().map(|table| (level, table))),
        }
    }

    fn version(&self) -> Version<ScriptTable> {
        let handle = |&(file, bytes): &(u64, u64)| {
            let number = FileNumber(file);
            let sections = vec![BlobFileSection { logical_file: number, values: 10, bytes, rewritten: false }];
            let meta = BlobFileMeta { number, size: bytes + 100, created_ms: 0, sections };
            self.fixture.tree.context.blob_handle(meta)
        };
        let blobs_added = self.blobs.iter().map(handle).collect();
        let added = self.deep.iter().map(|(level, table)| (*level, Arc::new(table.clone()))).collect();
        let range_tombstones = Some(Arc::new(self.range_tombstones.clone()));
        let change = VersionChange { added, blobs_added, range_tombstones, ..VersionChange::default() };
        let deep = Version::empty().with_changes(change, &self.order);
        self.l0.iter().rev().fold(deep, |version, run| {
            let flushed = run.iter().cloned().map(Arc::new).collect();
            version.with_changes(VersionChange { flushed, ..VersionChange::default() }, &self.order)
        })
    }

    fn pick<R>(
        &self,
        at: &PickCircumstances,
        choose: impl Fn(&CompactionPicker<'_, ScriptTable>) -> Option<R>,
    ) -> Option<R> {
        choose(&CompactionPicker {
            version: &self.version(),
            order: &self.order,
            options: &self.options,
            compact_pointers: &at.pointers,
            oldest_snapshot: at.oldest.unwrap_or(SeqNo::MAX),
            expiry_limits: &at.expiry,
            idle: at.idle,
        })
    }

    /// Carries out compactions until none is picked, and shows them and the levels at the end. `between` is called
    /// after each of them.
    fn run(
        &mut self,
        at: &PickCircumstances,
        output: &mut String,
        choose: impl Fn(&CompactionPicker<'_, ScriptTable>) -> Option<PickedCompaction>,
        between: impl Fn(&mut PickerScript),
    ) {
        for _ in 0..MAX_COMPACTIONS {
            let Some(picked) = self.pick(at, &choose) else { return self.show_levels(output) };
            writeln!(output, "{}", show_pick(Some(&picked))).unwrap();
            self.apply(&picked, at);
            between(self);
        }
        panic!("the compactions do not end");
    }

    fn apply(&mut self, picked: &PickedCompaction, at: &PickCircumstances) {
        let inputs: HashSet<FileNumber> =
            picked.start_level_inputs.iter().chain(&picked.output_level_inputs).copied().collect();
        let mut input_tables: Vec<ScriptTable> =
            self.l0.iter().flatten().chain(self.deep.iter().map(|(_, t)| t)).cloned().collect();
        input_tables.retain(|table| inputs.contains(&table.meta.number));
        self.l0.iter_mut().for_each(|run| run.retain(|table| !inputs.contains(&table.meta.number)));
        self.l0.retain(|run| !run.is_empty());
        self.deep.retain(|(_, table)| !inputs.contains(&table.meta.number));
        if !picked.trivial_move {
            input_tables = self.merged(input_tables, picked.output_level, at.oldest.unwrap_or(SeqNo::MAX));
        }
        self.deep.extend(input_tables.into_iter().map(|table| (picked.output_level, table)));
    }

    /// One table for each group of inputs that overlap.
    fn merged(&mut self, mut inputs: Vec<ScriptTable>, level: u8, oldest: SeqNo) -> Vec<ScriptTable> {
        inputs.sort_by(|a, b| a.meta.smallest_key.0.cmp(&b.meta.smallest_key.0));
        let mut merged: Vec<ScriptTable> = Vec::new();
        for mut table in inputs {
            (table.superseded, table.covered_bytes, table.written_at) =
                (SupersededVersions::default(), 0, Some(oldest));
            table.meta.range_deletes_applied_through = self.range_tombstones.largest_seqno().min(oldest);
            let overlapped = merged.last_mut().filter(|last| last.meta.largest_key.0 >= table.meta.smallest_key.0);
            match overlapped.map(|last| &mut last.meta) {
                Some(last) => {
                    last.largest_key = last.largest_key.clone().max(table.meta.largest_key);
                    last.smallest_seqno = last.smallest_seqno.min(table.meta.smallest_seqno);
                    last.largest_seqno = last.largest_seqno.max(table.meta.largest_seqno);
                    last.size += table.meta.size;
                    last.entries += table.meta.entries;
                    last.tombstones += table.meta.tombstones;
                    last.expiry.add_all(&table.meta.expiry);
                }
                None => {
                    self.next_number += 1;
                    table.meta.number = FileNumber(self.next_number);
                    merged.push(table);
                }
            }
        }
        if level == BOTTOM_LEVEL {
            merged.iter_mut().for_each(|table| table.meta.tombstones = 0);
        }
        merged
    }

    fn show_levels(&self, output: &mut String) {
        for run in &self.l0 {
            let tables: Vec<String> = run.iter().map(ScriptTable::show).collect();
            writeln!(output, "  L0 {}", tables.join(" ")).unwrap();
        }
        let mut levels: HashMap<u8, Vec<&ScriptTable>> = HashMap::new();
        self.deep.iter().for_each(|(level, table)| levels.entry(*level).or_default().push(table));
        for level in 1..=BOTTOM_LEVEL {
            let Some(mut tables) = levels.remove(&level) else { continue };
            tables.sort_by(|a, b| a.meta.smallest_key.0.cmp(&b.meta.smallest_key.0));
            let texts: Vec<String> = tables.into_iter().map(ScriptTable::show).collect();
            writeln!(output, "  L{level} {}", texts.join(" ")).unwrap();
        }
    }
}

fn show_pick(picked: Option<&PickedCompaction>) -> String {
    let Some(picked) = picked else { return "nothing".into() };
    let numbers = |inputs: &[FileNumber]| match inputs {
        [first, .., last] if inputs.len() > 9 => format!("{}..{}, {} tables", first.0, last.0, inputs.len()),
        _ => inputs.iter().map(|number| number.0.to_string()).collect::<Vec<_>>().join(" "),
    };
    let (from, to) = (picked.start_level, picked.output_level);
    let upper = format!("L{from}[{}]", numbers(&picked.start_level_inputs));
    let job = match (picked.trivial_move, from == to) {
        (true, _) => format!("move {upper} to L{to}"),
        (false, true) => format!("rewrite {upper}"),
        (false, false) => format!("merge {upper} into L{to}[{}]", numbers(&picked.output_level_inputs)),
    };
    format!("{:?}: {job}", picked.reason)
}

#[test]
fn picker_script() {
    let mut script = PickerScript::new();
    check_component_script("compaction_picker", |command, words, output| script.run_command(command, words, output));
}

/// Regression: an assertion about the sizes of inputs failed if a comparator contradicted itself.
#[test]
fn a_contradiction_fails_no_assertion() {
    let mut script = PickerScript::new();
    script.add_tables(5, &["1:a-c", "2:e-g"]);
    script.add_tables(6, &["3:a-c"]);
    let (version, at) = (script.version(), PickCircumstances::default());
    // After some comparisons, no table overlaps another one.
    for right in 0..20 {
        let calls = AtomicU64::new(0);
        let order = KeyOrder::custom(Arc::new(FnComparator(move |a: &[u8], b: &[u8]| {
            if calls.fetch_add(1, Memory::Relaxed) < right { a.cmp(b) } else { Ordering::Greater }
        })));
        let picker = CompactionPicker {
            version: &version,
            order: &order,
            options: &script.options,
            compact_pointers: &at.pointers,
            oldest_snapshot: SeqNo::MAX,
            expiry_limits: &at.expiry,
            idle: at.idle,
        };
        let picked = picker.pick_from_level(CompactionReason::LevelSize, 5, 6, 0, 1, true);
        assert_eq!((picked.start_level, picked.output_level), (5, 6));
    }
}

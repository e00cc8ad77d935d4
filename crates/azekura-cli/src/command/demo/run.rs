//! The steps of the demo, their checks, and the report.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use azekura::{Database, GarbageCollection, Partition};
use serde_json::{Map, Value, json};

use super::check::{ContentDigest, compare_acknowledged, scan};
use super::input::{CountedItems, InputFiles};
use super::writer::{self, AckRecord, WriterProcess, acknowledged_bytes};
use crate::args::DemoArgs;
use crate::command::{stats, verify};
use crate::display::{bytes, count, duration, plural};
use crate::error::{CliError, CommandOutcome, Result};
use crate::output::CommandOutput;
use crate::temporary_directory::TemporaryDirectory;
use crate::{encoding, interrupt};

/// Number of memtables that a small input fills, by generated versions of its files.
const MEMTABLES: u64 = 5;

/// The snapshot check makes at most this number of changes, to values of at most this size.
const CHANGES_MAX: usize = 3000;
const CHANGED_VALUE_BYTES_MAX: u64 = 64 << 10;

/// Target of blob GC: bytes of blob files for each live byte.
const SPACE_AMP: f32 = 1.1;

/// Runs the demo; successful if all checks passed.
pub(crate) fn run(args: &DemoArgs, db_arg: Option<&Path>, output: &mut CommandOutput) -> Result<CommandOutcome> {
    interrupt::catch()?;
    let start = Instant::now();
    let share = |percent: u32| start + Duration::from_secs(args.seconds) * percent / 100;
    let temporary = TemporaryDirectory::create()?;
    let db_path = match db_arg {
        Some(path) => new_directory(path)?,
        None => temporary.path().join("db"),
    };
    let input = list_input(args, temporary.path(), share(16))?;
    let mut demo = DemoRun { output, input, db_path, acks: Vec::new(), checks: Vec::new(), fields: Map::new() };

    let files = plural(demo.input.files(), "file");
    demo.print(format!("{files}, {}, below {}", bytes(demo.input.bytes), demo.input.root.display()))?;
    demo.write_and_kill(&temporary.path().join("files"), args.memtable_bytes, share(30))?;
    let opening = Instant::now();
    let (db, partition) = writer::open(&demo.db_path, args.memtable_bytes)?;
    demo.check_recovery(&db, &partition, opening.elapsed())?;
    demo.write_rest(&partition, share(50))?;
    let content = demo.read_everything(&partition)?;
    demo.check_snapshot(&db, &partition, content)?;
    demo.run_blob_gc(&partition, content)?;
    demo.print_metrics(&db, &partition)?;
    drop(partition);
    db.close()?;
    demo.verify()?;
    demo.finish(db_arg, start.elapsed())
}

/// Returns `path` if it does not exist or is an empty directory.
fn new_directory(path: &Path) -> Result<PathBuf> {
    let new = match fs::read_dir(path) {
        Ok(mut names) => names.next().is_none(),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    };
    if new { Ok(path.to_path_buf()) } else { Err(CliError::input(path, "the demo needs a new or empty directory")) }
}

fn list_input(args: &DemoArgs, temporary: &Path, until: Instant) -> Result<InputFiles> {
    let dir = args.dir.clone().unwrap_or_else(|| PathBuf::from("."));
    let root = fs::canonicalize(&dir).map_err(|e| CliError::os("read the directory", &dir, e))?;
    if !root.is_dir() {
        return Err(CliError::input(dir, "not a directory"));
    }
    let mut input = InputFiles::list(&root, args.dir.is_none(), until)?;
    if input.files() == 0 {
        input = InputFiles::generate(&temporary.join("generated"), until)?;
    }
    input.repeat_for(MEMTABLES * args.memtable_bytes);
    Ok(input)
}

/// One check of the database: its statement, and whether the statement is true.
struct CheckResult {
    statement: &'static str,
    passed: bool,
    detail: String,
}

struct DemoRun<'a> {
    output: &'a mut CommandOutput,
    input: InputFiles,
    db_path: PathBuf,
    /// The n-th element is the acknowledgement of the n-th put.
    acks: Vec<Option<AckRecord>>,
    checks: Vec<CheckResult>,
    /// Figures for JSON.
    fields: Map<String, Value>,
}

impl DemoRun<'_> {
    fn write_and_kill(&mut self, list: &Path, memtable_bytes: u64, until: Instant) -> Result<()> {
        let half = self.input.bytes.max(MEMTABLES * memtable_bytes) / 2;
        let writer = WriterProcess::start(&self.input, list, &self.db_path, memtable_bytes)?;
        let id = writer.id();
        let (acks, killed) = writer.receive_and_kill(&self.input, &self.db_path, half, until)?;
        self.acks = acks;
        let tables = plural(writer::count_tables(&self.db_path), "table");
        let detail = format!("process {id}, after {}, with {tables} on disk", self.acknowledged());
        self.check("the writer process was killed with SIGKILL while it had the database open", killed, detail)
    }

    fn check_recovery(&mut self, db: &Database, partition: &Partition, took: Duration) -> Result<()> {
        let stored = self.acks.iter().flatten().count() as u64;
        let result = compare_acknowledged(partition, &self.input, &self.acks, false)?;
        let entries = partition.len()?;
        // The writer may have stored one more value than it could acknowledge.
        let passed = result.wrong.count == 0 && (stored..=stored + 1).contains(&entries);
        let replayed = db.metrics().replayed_records;
        let recovery = format!("recovery in {}, {} replayed", duration(took), plural(replayed, "record"));
        let good = format!("{} acknowledged, {} found; {recovery}", count(stored), count(entries));
        self.fields.insert("acknowledged_before_the_kill".into(), json!(stored));
        self.fields.insert("recovery_ms".into(), json!(took.as_secs_f64() * 1e3));
        self.check("every acknowledged write survived", passed, first_or(&result.wrong, good))
    }

    fn write_rest(&mut self, partition: &Partition, until: Instant) -> Result<()> {
        for put in self.acks.len() as u64..self.input.puts() {
            interrupt::check()?;
            if Instant::now() >= until {
                self.input.cut_short.push("the time for writing has ended; use --seconds for more time".into());
                break;
            }
            self.acks.push(writer::store(partition, &self.input, put)?);
        }
        let files = self.input.files().min(self.acks.len() as u64);
        for put in (0..files).filter(|put| self.acks[*put as usize].is_none()) {
            let error = self.input.content(put).err();
            self.input.skipped.add(error.unwrap_or("a file was unreadable when it was stored".into()));
        }
        let versions = self.acks.len() as u64 - files;
        self.fields.insert("files".into(), json!(files));
        self.fields.insert("generated_versions".into(), json!(versions));
        let versions = plural(versions, "generated version");
        self.print(format!("  {} in all, of {} and {versions}", self.acknowledged(), plural(files, "file")))
    }

    fn read_everything(&mut self, partition: &Partition) -> Result<ContentDigest> {
        let result = compare_acknowledged(partition, &self.input, &self.acks, true)?;
        let good = format!("{} compared", plural(result.expected.entries, "value"));
        let passed = result.wrong.count == 0;
        self.check("every file reads back byte for byte", passed, first_or(&result.wrong, good))?;
        self.print_items("Changed since they were stored", "changed_while_we_looked", &result.changed)?;

        let (found, unsorted) = scan(partition.range::<&[u8]>(..))?;
        let passed = found == result.expected && unsorted.is_none();
        let expected = count(result.expected.entries);
        let good = format!("{}, {}; {expected} expected", plural(found.entries, "entry"), bytes(found.bytes));
        let detail =
            unsorted.map_or(good, |key| format!("{} is not greater than the key before it", encoding::escaped(&key)));
        self.fields.insert("entries".into(), json!(found.entries));
        self.fields.insert("bytes".into(), json!(found.bytes));
        self.check("a range scan returns all entries in order", passed, detail)?;
        Ok(found)
    }

    /// Removes, overwrites and inserts entries under a snapshot, and then restores the old state from it.
    fn check_snapshot(&mut self, db: &Database, partition: &Partition, before: ContentDigest) -> Result<()> {
        const NEW_VALUE: &[u8] = b"changed";
        let snapshot = db.snapshot();
        let small = |ack: &Option<AckRecord>| ack.is_some_and(|ack| ack.len <= CHANGED_VALUE_BYTES_MAX);
        let puts = (0..).zip(&self.acks).filter(|(_, ack)| small(ack)).map(|(put, _)| put).step_by(3);
        let change = |(n, put)| match n % 3 {
            0 => (self.input.key(put), None),
            1 => (self.input.key(put), Some(NEW_VALUE)),
            _ => ([&self.input.key(put)[..], b"/new"].concat(), Some(NEW_VALUE)),
        };
        let changes: Vec<_> = puts.take(CHANGES_MAX).enumerate().map(change).collect();
        for (key, value) in &changes {
            interrupt::check()?;
            value.map_or_else(|| partition.remove(key), |value| partition.insert(key, value))?;
        }
        partition.flush()?;
        let seen = scan(snapshot.iter(partition))?.0;
        let mut wrong = CountedItems::default();
        for (key, value) in &changes {
            if partition.get(key)?.as_deref() != *value {
                wrong.add(format!("{}: the partition does not have the change", encoding::escaped(key)));
            }
            match snapshot.get(partition, key)? {
                Some(old) => partition.insert(key, old)?,
                None => partition.remove(key)?,
            }
        }
        if seen != before {
            wrong.add("the snapshot does not return the old state".into());
        }
        if scan(partition.iter())?.0 != before {
            wrong.add("the entries restored from the snapshot differ from the old state".into());
        }
        let changed = plural(changes.len() as u64, "key");
        let good = format!("{changed} changed; the snapshot returned all {} unchanged", plural(seen.entries, "entry"));
        self.check("a snapshot returns the old state after changes", wrong.count == 0, first_or(&wrong, good))
    }

    fn run_blob_gc(&mut self, partition: &Partition, content: ContentDigest) -> Result<()> {
        let before = partition.gc_scan()?.space_amp();
        let freed = partition.gc_with_space_amp_target(SPACE_AMP)?;
        let after = partition.gc_scan()?.space_amp();
        let same = scan(partition.iter())?.0 == content;
        let good = format!("{} freed; space amplification {before:.2} before, {after:.2} after", bytes(freed));
        let detail = if same { good } else { "the content differs after blob GC".into() };
        let fields = json!({ "freed_bytes": freed, "space_amp_before": before, "space_amp_after": after });
        self.fields.insert("blob_gc".into(), fields);
        self.check("blob GC reaches its target and keeps every value", same && after <= SPACE_AMP, detail)
    }

    fn verify(&mut self) -> Result<()> {
        let report = verify::verify_files(&self.db_path, self.output.json())?;
        let problems = verify::problem_lines(&report);
        let types = verify::index_types(&report);
        let tables = types
            .iter()
            .map(|(name, tables)| format!(" {} with data blocks of type {name}.", plural(*tables, "table")));
        let good = verify::summary_line(&report) + &tables.collect::<String>();
        self.fields.insert("data_block_index_types".into(), json!(types));
        let detail = if problems.is_empty() { good } else { problems.join("; ") };
        self.check("every byte of the database passes its checks", problems.is_empty(), detail)
    }

    /// Prints the levels, and the metrics since recovery of flushes, compactions, blob GC and cache hits.
    fn print_metrics(&mut self, db: &Database, partition: &Partition) -> Result<()> {
        const SHOWN: [&str; 6] = ["flushes", "compact", "blob GC", "write am", "cache hi", "recovery"];
        let metrics = db.metrics();
        let of_partition = partition.metrics();
        for mut object in [stats::partition_json(&of_partition), stats::metrics_json(&metrics)] {
            self.fields.append(object.as_object_mut().expect("both are objects"));
        }
        let disk = db.disk_space();
        self.fields.insert("disk_bytes".into(), json!(disk));
        if !self.output.json() {
            let mut rows = stats::metrics_rows(&metrics, disk);
            rows.retain(|row| SHOWN.iter().any(|start| row.name.starts_with(start)));
            self.output.line(stats::metrics_table(&rows))?;
            stats::print_partition(&of_partition, self.output)?;
        }
        Ok(())
    }

    fn finish(mut self, db_arg: Option<&Path>, took: Duration) -> Result<CommandOutcome> {
        let passed = self.checks.iter().all(|check| check.passed);
        let skipped = std::mem::take(&mut self.input.skipped);
        self.print_items("Skipped", "left_out", &skipped)?;
        let mut lines: Vec<_> = self.input.cut_short.iter().map(|reason| format!("Note: {reason}.")).collect();
        lines.extend(db_arg.map(|path| format!("The database is kept: azekura levels --db {}", path.display())));
        let verdict = if passed { "All checks passed" } else { "NOT all checks passed" };
        lines.push(format!("{verdict}, in {}.", duration(took)));
        self.print(lines.join("\n"))?;
        if self.output.json() {
            let check = |c: &CheckResult| json!({ "claim": c.statement, "held": c.passed, "detail": c.detail });
            self.fields.insert("checks".into(), self.checks.iter().map(check).collect());
            self.fields.insert("held".into(), json!(passed));
            self.fields.insert("cut_short".into(), json!(self.input.cut_short));
            self.fields.insert("seconds".into(), json!(took.as_secs_f64()));
            self.output.line(Value::Object(self.fields))?;
        }
        Ok(CommandOutcome::success_if(passed))
    }

    /// Example: "1,234 acknowledged puts (5.6 MiB)".
    fn acknowledged(&self) -> String {
        let puts = plural(self.acks.iter().flatten().count() as u64, "acknowledged put");
        format!("{puts} ({})", bytes(acknowledged_bytes(&self.acks)))
    }

    /// Records a check and prints it at once.
    fn check(&mut self, statement: &'static str, passed: bool, detail: String) -> Result<()> {
        self.print(format!("{} {statement}\n    {detail}", if passed { "✓" } else { "✗" }))?;
        self.checks.push(CheckResult { statement, passed, detail });
        Ok(())
    }

    /// Records items for JSON under `field`, and prints the first ten of them, if any.
    fn print_items(&mut self, title: &str, field: &str, items: &CountedItems) -> Result<()> {
        self.fields.insert(field.into(), json!({ "count": items.count, "first": items.first }));
        if items.count > 0 {
            self.print(format!("{title}: {}\n  {}", plural(items.count, "file"), items.first.join("\n  ")))?;
        }
        Ok(())
    }

    fn print(&mut self, line: String) -> Result<()> {
        if self.output.json() {
            return Ok(());
        }
        self.output.line(line)?;
        self.output.finish()
    }
}

/// "3 wrong, the first is a/b: missing", or `good` if `wrong` is empty.
fn first_or(wrong: &CountedItems, good: String) -> String {
    wrong.first.first().map_or(good, |first| format!("{} wrong, the first is {first}", wrong.count))
}

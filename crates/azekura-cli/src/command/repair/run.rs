//! The command `repair`: opens the damaged database, copies every partition, and reports what is lost.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use azekura::fs::{DiskFs, Fs};
use azekura::inspect::{self, TableReport, VerifyReport};
use azekura::{Config, Database, Error, RecoveryMode};
use serde_json::{Value, json};

use crate::args::RepairArgs;
use crate::command::repair::padded_fs::PaddedFs;
use crate::command::repair::salvage::{self, PartitionLosses};
use crate::command::transfer::{EntryLoader, LoadMode};
use crate::command::{stats, verify};
use crate::error::{CliError, CommandOutcome, Result, engine_error_json};
use crate::output::CommandOutput;
use crate::progress::ProgressReporter;
use crate::{display, encoding, open};

/// Result of copying one partition.
struct PartitionReport {
    name: String,
    entries: u64,
    bytes: u64,
    /// Why nothing of the partition was copied.
    unreadable: Option<String>,
    losses: PartitionLosses,
}

/// Copies what is intact of the database at `args.path` to a new database.
pub(crate) fn repair(args: &RepairArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let source = args.path.as_deref().unwrap_or(db);
    open::check_directory(source)?;
    check_target(source, &args.out)?;
    let json = output.json();
    let verified = verify::verify_files(source, json)?;
    let fs: Arc<dyn Fs> = Arc::new(DiskFs::new());
    let tables = match inspect::tables(&fs, source) {
        Ok(tables) => tables,
        Err(error) => return Err(without_manifest(&fs, &verified, &error)),
    };
    let database = open_damaged(source, &fs, &tables).map_err(|error| not_opened(&error))?;
    let mut names = database.list_partitions();
    names.sort();
    let mut loader =
        EntryLoader::new(&args.out, "default", LoadMode::Store, ProgressReporter::spinner(json, "Repairing"));
    let mut reports = Vec::new();
    for name in names {
        reports.push(copy_partition(&database, name, &tables, &mut loader)?);
    }
    let mut stored = CommandOutcome::Success;
    if reports.iter().any(|report| report.unreadable.is_none()) {
        stored = loader.finish()?.print_skipped(args.errors.all_errors, json);
    } else {
        open::open_or_create(&args.out)?.close()?;
    }
    let printed = print(args, &verified, &reports, output)?;
    Ok(if stored == CommandOutcome::Success { printed } else { stored })
}

/// Fails unless `out` can become a new database.
fn check_target(source: &Path, out: &Path) -> Result<()> {
    let is_free = match out.read_dir() {
        Ok(mut entries) => entries.next().is_none(),
        Err(_) => !out.exists() && !out.is_symlink(),
    };
    match is_free {
        false => Err(CliError::input(out, "the target of a repair must be new or an empty directory")),
        true if out.starts_with(source) => Err(CliError::input(out, "the target must not be in the damaged database")),
        true => Ok(()),
    }
}

/// Opens the database read-only. Shows files that are too short, too long or missing as if they had the length that
/// the manifest states.
fn open_damaged(source: &Path, fs: &Arc<dyn Fs>, tables: &[TableReport]) -> azekura::Result<Database> {
    let mut lengths: BTreeMap<String, u64> = BTreeMap::new();
    lengths.extend(tables.iter().map(|table| (format!("{:06}.sst", table.id), table.bytes)));
    lengths.extend(inspect::blobs(fs, source)?.iter().map(|file| (format!("{:06}.blob", file.id), file.bytes)));
    lengths.retain(|name, length| source.join(name).metadata().map_or(true, |data| data.len() != *length));
    let config = Config::new(source).recovery_mode(RecoveryMode::Salvage);
    if lengths.is_empty() {
        return config.open_read_only();
    }
    config.fs(Arc::new(PaddedFs { inner: DiskFs::new(), lengths })).open_read_only()
}

fn copy_partition(
    database: &Database,
    name: String,
    tables: &[TableReport],
    loader: &mut EntryLoader<'_>,
) -> Result<PartitionReport> {
    let (entries, bytes) = (loader.report.entries, loader.report.bytes);
    let (losses, unreadable) = match database.partition(&name) {
        Err(error) => (PartitionLosses::default(), Some(error.to_string())),
        Ok(partition) => {
            loader.begin_partition(&name, partition.options())?;
            let largest = tables.iter().filter(|table| table.partition == name).map(|table| &*table.largest).max();
            let losses = salvage::salvage(&partition, largest.unwrap_or_default(), |key, value| {
                loader.progress.add(1);
                loader.put(key, value, || encoding::escaped(key))
            })?;
            (losses, None)
        }
    };
    let (entries, bytes) = (loader.report.entries - entries, loader.report.bytes - bytes);
    Ok(PartitionReport { name, entries, bytes, unreadable, losses })
}

/// The error for a database whose manifest cannot be read.
fn without_manifest(fs: &Arc<dyn Fs>, verified: &VerifyReport, error: &Error) -> CliError {
    let (mut tables, mut entries) = (0, 0);
    for file in &verified.files {
        if let Ok(report) = inspect::verify_file(fs, &file.path)
            && report.kind == "table"
            && report.problem.is_none()
        {
            tables += 1;
            entries += report.entries;
        }
    }
    let intact = format!("{} with {}", display::plural(tables, "table"), display::plural(entries, "entry"));
    CliError::damaged(
        error,
        format!(
            "the manifest cannot be read ({}), and only it states which files form which partition: nothing was \
             recovered. Intact without it: {intact}. Put a MANIFEST from a copy of this directory in its place, or \
             restore a checkpoint",
            error.message()
        ),
    )
}

/// The error for a database that cannot be opened even in salvage mode.
fn not_opened(error: &Error) -> CliError {
    let message = error.message();
    CliError::damaged(error, format!("the database cannot be opened ({message}), so nothing was recovered"))
}

fn print(
    args: &RepairArgs,
    verified: &VerifyReport,
    reports: &[PartitionReport],
    output: &mut CommandOutput,
) -> Result<CommandOutcome> {
    let problems = verify::problem_lines(verified);
    let is_whole = |report: &PartitionReport| {
        report.unreadable.is_none() && report.losses.ranges.is_empty() && report.losses.values.is_empty()
    };
    let outcome = CommandOutcome::success_if(problems.is_empty() && reports.iter().all(is_whole));
    if output.json() {
        let partitions: Vec<Value> = reports.iter().map(report_json).collect();
        output.line(json!({
            "out": args.out.to_string_lossy(),
            "partitions": partitions,
            "damaged_files": verify::damaged_json(verified),
            "dropped_after_damage": verified.dropped_after_damage.as_ref().map(stats::dropped_json),
        }))?;
        return Ok(outcome);
    }
    for report in reports {
        let (entries, bytes) = (display::plural(report.entries, "entry"), display::bytes(report.bytes));
        output.line(format!("{}: {entries}, {bytes} recovered", report.name))?;
        output.error_lines(&loss_lines(report), args.errors.all_errors)?;
    }
    output.line(format!("{} damaged.", display::plural(problems.len() as u64, "file")))?;
    output.error_lines(&problems, args.errors.all_errors)?;
    output.line(format!("The recovered entries are in {}.", args.out.display()))?;
    if problems.iter().any(|problem| problem.contains(".wal")) {
        output.line("The log is damaged: commits may be missing, and some entries may be older than others.")?;
    }
    Ok(outcome)
}

/// One line for each loss of a partition.
fn loss_lines(report: &PartitionReport) -> Vec<String> {
    let unreadable = report.unreadable.iter().map(|why| format!("not recovered: {why}"));
    let ranges = report.losses.ranges.iter().map(|range| {
        let key = |key: &Option<Vec<u8>>, otherwise: &str| {
            key.as_ref().map_or(otherwise.into(), |key| encoding::escaped(&key[..key.len().min(100)]))
        };
        let (after, before) = (key(&range.after, "the start"), key(&range.before, "the end"));
        format!("lost: all keys after {after} and before {before}: {}", range.error)
    });
    let values =
        report.losses.values.iter().map(|(key, error)| {
            format!("lost: the value of {}: {error}", encoding::escaped(&key[..key.len().min(100)]))
        });
    unreadable.chain(ranges).chain(values).collect()
}

fn report_json(report: &PartitionReport) -> Value {
    let hex = |key: &Vec<u8>| encoding::to_hex(key);
    let ranges: Vec<Value> = (report.losses.ranges.iter())
        .map(|range| {
            let (after, before) = (range.after.as_ref().map(hex), range.before.as_ref().map(hex));
            json!({ "after_hex": after, "before_hex": before, "problem": engine_error_json(&range.error) })
        })
        .collect();
    let values: Vec<Value> = (report.losses.values.iter())
        .map(|(key, error)| json!({ "key_hex": hex(key), "problem": engine_error_json(error) }))
        .collect();
    json!({
        "name": report.name,
        "entries": report.entries,
        "bytes": report.bytes,
        "unreadable": report.unreadable,
        "lost_ranges": ranges,
        "lost_values": values,
    })
}

//! The command `repair`: opens the damaged database, copies every partition, and reports what is lost.

use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use azekura::fs::{DiskFs, Fs};
use azekura::inspect::{self, TableReport, VerifyReport};
use azekura::{Error, ErrorKind, Partition};
use serde_json::{Value, json};

use crate::args::RepairArgs;
use crate::command::repair::damaged_database::DamagedDatabase;
use crate::command::repair::salvage::{self, LostRange, PartitionLosses};
use crate::command::transfer::{EntryLoader, LoadMode, LoadedExpiry};
use crate::command::verify;
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

/// What a repair has recovered and lost.
struct RepairReport {
    reports: Vec<PartitionReport>,
    /// Tables that are newer than the manifest.
    unnamed: Vec<String>,
    /// Files that could not be used; `None` unless the manifest had to be rebuilt.
    left_out: Option<Vec<(PathBuf, Error)>>,
    /// What the rebuilt manifest does not know for certain: files, and a sentence about each.
    notes: Vec<(PathBuf, String)>,
}

/// Copies what is intact of the database at `args.path` to a new database.
pub(crate) fn repair(args: &RepairArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let source = args.path.as_deref().unwrap_or(db);
    open::check_directory(source)?;
    check_target(source, &args.out)?;
    let json = output.json();
    let verified = verify::verify_files(source, json)?;
    let fs: Arc<dyn Fs> = Arc::new(DiskFs::new());
    let (rebuilt, tables) = match inspect::tables(&fs, source) {
        Ok(tables) => (None, tables),
        Err(error) if !may_rebuild(&error) => return Err(not_opened(&error)),
        Err(_) => (Some(inspect::rebuilt_manifest(&fs, source).map_err(|error| not_opened(&error))?), Vec::new()),
    };
    let notes = rebuilt.as_ref().map_or_else(Vec::new, |rebuilt| rebuilt.notes.clone());
    let (manifest, left_out) = rebuilt.map(|rebuilt| (rebuilt.bytes, rebuilt.left_out)).unzip();
    let damaged = DamagedDatabase::open(source, &fs, manifest).map_err(|error| not_opened(&error))?;
    let mut names = damaged.database.list_partitions();
    names.sort();
    let unnamed = if damaged.is_rebuilt { Vec::new() } else { newer_than_manifest(&verified, &tables) };
    let mut loader =
        EntryLoader::new(&args.out, "default", LoadMode::Store, ProgressReporter::spinner(json, "Repairing"));
    let mut reports = Vec::new();
    for name in names {
        let copied = copy_partition(&damaged, name, args.older_versions, &mut loader);
        let stored = |error: CliError| {
            error.with_note(&format!("{} recovered before it", display::plural(loader.report.entries, "entry")))
        };
        reports.push(copied.map_err(stored)?);
    }
    for pool in damaged.pools.iter().filter(|pool| !pool.has_wal_records) {
        let (name, unreadable) = (pool.partition.clone(), Some(pool.error.to_string()));
        reports.push(PartitionReport { name, entries: 0, bytes: 0, unreadable, losses: PartitionLosses::default() });
    }
    reports.sort_by(|a, b| a.name.cmp(&b.name));
    let mut stored = CommandOutcome::Success;
    if reports.iter().any(|report| report.unreadable.is_none()) {
        stored = loader.finish()?.print_skipped(args.errors.all_errors, json);
    } else {
        drop(loader);
        open::open_or_create(&args.out)?.close()?;
    }
    let printed = print(args, &verified, &RepairReport { reports, unnamed, left_out, notes }, output)?;
    Ok(if stored == CommandOutcome::Success { printed } else { stored })
}

/// Names of the tables whose file numbers are above those of all tables of the manifest. Either a flush or a compaction
/// had not finished, or the manifest has lost its end.
fn newer_than_manifest(verified: &VerifyReport, tables: &[TableReport]) -> Vec<String> {
    let highest = tables.iter().map(|table| table.id).max().unwrap_or(0);
    let names = verified.files.iter().filter(|file| file.kind == "left over" && file.bytes > 0);
    let names = names.filter_map(|file| file.path.file_name()?.to_str());
    let is_newer =
        |name: &&str| name.strip_suffix(".sst").and_then(|id| id.parse::<u64>().ok()).is_some_and(|id| id > highest);
    names.filter(is_newer).map(String::from).collect()
}

/// Fails unless `out` can become a new database outside of `source`, whatever names and links the paths have.
fn check_target(source: &Path, out: &Path) -> Result<()> {
    let is_free = match out.read_dir() {
        Ok(mut entries) => entries.next().is_none(),
        Err(_) => !out.exists() && !out.is_symlink(),
    };
    if !is_free {
        return Err(CliError::input(out, "the target of a repair must be new or an empty directory"));
    }
    let resolve = |path: &Path| path.canonicalize().map_err(|e| CliError::os("read the directory", path, e));
    let out_path = std::path::absolute(out).map_err(|e| CliError::os("read the directory", out, e))?;
    let existing = out_path.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/"));
    let missing = out_path.strip_prefix(existing).unwrap_or(&out_path);
    if missing.components().any(|part| part == Component::ParentDir) {
        return Err(CliError::input(out, "the target has \"..\" behind a directory that does not exist"));
    }
    match resolve(existing)?.starts_with(resolve(source)?) {
        true => Err(CliError::input(out, "the target must not be in the damaged database")),
        false => Ok(()),
    }
}

/// Copies a partition. A partition that cannot be created, or whose pool is full, does not end the repair.
fn copy_partition(
    damaged: &DamagedDatabase,
    name: String,
    older_versions: bool,
    loader: &mut EntryLoader<'_>,
) -> Result<PartitionReport> {
    let (entries, bytes) = (loader.report.entries, loader.report.bytes);
    let pool = damaged.pools.iter().find(|pool| pool.partition == name);
    let mut losses = PartitionLosses::default();
    let mut unreadable = None;
    match damaged.database.partition(&name) {
        Err(error) => unreadable = Some(error.to_string()),
        Ok(partition) => match loader.begin_partition(&name, partition.options()) {
            Err(error) => {
                loader.give_up_partition();
                unreadable = Some(format!("the partition cannot be created: {error}"));
            }
            Ok(()) => {
                let copied = copy_entries(damaged, &partition, older_versions, loader, &mut losses);
                if let Err(error) = copied.and_then(|()| loader.commit()) {
                    if !error.is_pool_full() {
                        return Err(error);
                    }
                    loader.give_up_partition();
                    losses.unstored = Some(error.to_string());
                }
                if let Some(pool) = pool {
                    losses.ranges.push(LostRange::whole(pool.error.clone(), loader.report.entries - entries));
                }
            }
        },
    }
    let (entries, bytes) = (loader.report.entries - entries, loader.report.bytes - bytes);
    Ok(PartitionReport { name, entries, bytes, unreadable, losses })
}

/// Copies the entries of a partition. First scans it around its damage. Then looks up each key in the lost ranges that
/// the other tables, or the log, hold: a lookup ends at the newest version of the key, so it fails only if that may be
/// in a damaged block.
fn copy_entries(
    damaged: &DamagedDatabase,
    partition: &Partition,
    older_versions: bool,
    loader: &mut EntryLoader<'_>,
    losses: &mut PartitionLosses,
) -> Result<()> {
    let mut put = |key: &[u8], value: &[u8], expiry_ms: Option<u64>| {
        loader.progress.add(1);
        loader.put_expiring(key, value, LoadedExpiry::At(expiry_ms), || encoding::escaped(&key[..key.len().min(100)]))
    };
    salvage::salvage(partition, |error| damaged.last_damaged_key(error), losses, &mut put)?;
    if !losses.ranges.is_empty()
        && !damaged.is_rebuilt
        && let Ok(others) = damaged.without_tables_of(losses.ranges.iter().map(|range| &range.error))
        && let Ok(others) = others.partition(&partition.name)
    {
        salvage::look_up_in_lost_ranges(partition, &others, older_versions, losses, &mut put)?;
    }
    Ok(())
}

/// Whether a rebuilt manifest can help: not if this version cannot read the manifest, or the system refuses it.
fn may_rebuild(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<std::io::Error>());
    error.kind() != ErrorKind::Unsupported && source.is_none_or(|source| source.kind() == std::io::ErrorKind::NotFound)
}

/// The error for a database that cannot be opened even in salvage mode.
fn not_opened(error: &Error) -> CliError {
    let message = error.message();
    CliError::damaged(error, format!("the database cannot be opened ({message}), so nothing was recovered"))
}

fn print(
    args: &RepairArgs,
    verified: &VerifyReport,
    repair: &RepairReport,
    output: &mut CommandOutput,
) -> Result<CommandOutcome> {
    let RepairReport { reports, unnamed, left_out, notes } = repair;
    let mut problems = verify::problem_lines(verified);
    let left_out_files = left_out.iter().flatten();
    problems.extend(left_out_files.clone().map(|(path, error)| format!("{}: not used: {error}", path.display())));
    let is_whole = |report: &PartitionReport| {
        let PartitionLosses { ranges, values, unstored, has_expiring: _ } = &report.losses;
        report.unreadable.is_none() && ranges.is_empty() && values.is_empty() && unstored.is_none()
    };
    let is_complete = problems.is_empty() && unnamed.is_empty() && reports.iter().all(is_whole);
    let outcome = CommandOutcome::success_if(is_complete);
    if output.json() {
        let partitions: Vec<Value> = reports.iter().map(report_json).collect();
        let mut damaged_files = verify::damaged_json(verified);
        damaged_files.extend(
            left_out_files
                .map(|(path, error)| json!({ "file": path.to_string_lossy(), "problem": engine_error_json(error) })),
        );
        output.line(json!({
            "out": args.out.to_string_lossy(),
            "partitions": partitions,
            "damaged_files": damaged_files,
            "manifest_rebuilt": left_out.is_some(),
            "manifest_notes": notes_json(notes),
            "tables_newer_than_manifest": unnamed,
            "dropped_after_damage": verified.dropped_after_damage,
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
    if left_out.is_some() {
        output.line(
            "The manifest was rebuilt from the tables, the pools and the log: partitions may have default options or \
             names of their files, and removed keys and older values may be there.",
        )?;
        let notes: Vec<String> = notes.iter().map(|(file, note)| format!("{}: {note}", file.display())).collect();
        output.error_lines(&notes, args.errors.all_errors)?;
    }
    if !unnamed.is_empty() {
        let (tables, names) = (display::plural(unnamed.len() as u64, "table"), unnamed.join(", "));
        output.line(format!(
            "{tables} newer than the manifest: {names}. If the manifest has lost its end, their entries are missing, \
             and some entries may be older."
        ))?;
    }
    if problems.iter().any(|problem| problem.contains(".wal")) {
        output.line("The log is damaged: commits may be missing, and some entries may be older than others.")?;
    }
    Ok(outcome)
}

fn notes_json(notes: &[(PathBuf, String)]) -> Vec<Value> {
    notes.iter().map(|(file, note)| json!({ "file": file.to_string_lossy(), "note": note })).collect()
}

/// One line for each loss of a partition.
fn loss_lines(report: &PartitionReport) -> Vec<String> {
    let unreadable = report.unreadable.iter().map(|why| format!("not recovered: {why}"));
    let unstored = report.losses.unstored.iter().map(|why| format!("the other entries are not recovered: {why}"));
    let ranges = report.losses.ranges.iter().map(|range| {
        let key = |key: &Option<Vec<u8>>, otherwise: &str| {
            key.as_ref().map_or(otherwise.into(), |key| encoding::escaped(&key[..key.len().min(100)]))
        };
        let (after, before) = (key(&range.after, "the start"), key(&range.before, "the end"));
        let except = match range.recovered {
            0 => String::new(),
            count => format!(", except {} whose newest version is elsewhere", display::plural(count, "key")),
        };
        format!("lost: all keys after {after} and before {before}{except}: {}", range.error)
    });
    let older = report.losses.ranges.iter().flat_map(|range| &range.older).map(|key| {
        let key = encoding::escaped(&key[..key.len().min(100)]);
        format!("older version of {key}: a newer one, or its removal, may be lost")
    });
    let expiry = report.losses.ranges.iter().flat_map(|range| &range.unknown_expiry).map(|key| {
        let key = encoding::escaped(&key[..key.len().min(100)]);
        format!("expiry time of {key}: it may be that of an older version, or missing")
    });
    let values =
        report.losses.values.iter().map(|(key, error)| {
            format!("lost: the value of {}: {error}", encoding::escaped(&key[..key.len().min(100)]))
        });
    unreadable.chain(unstored).chain(ranges).chain(older).chain(expiry).chain(values).collect()
}

fn report_json(report: &PartitionReport) -> Value {
    let hex = |key: &Vec<u8>| encoding::to_hex(key);
    let ranges: Vec<Value> = (report.losses.ranges.iter())
        .map(|range| {
            let (after, before) = (range.after.as_ref().map(hex), range.before.as_ref().map(hex));
            let (recovered, problem) = (range.recovered, engine_error_json(&range.error));
            let older: Vec<_> = range.older.iter().map(hex).collect();
            let unknown_expiry: Vec<_> = range.unknown_expiry.iter().map(hex).collect();
            json!({ "after_hex": after, "before_hex": before, "recovered": recovered, "older_versions_hex": older,
                "unknown_expiry_hex": unknown_expiry, "problem": problem })
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
        "unstored": report.losses.unstored,
        "lost_ranges": ranges,
        "lost_values": values,
    })
}

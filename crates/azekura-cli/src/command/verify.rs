//! `verify`: reads and checks every byte of every file. Beside a process that writes, those of the tables and blob
//! files, which do not change.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use azekura::ErrorKind;
use azekura::fs::{DiskFs, Fs, LockMode};
use azekura::inspect::{self, FileReport, VerifyReport};
use serde_json::{Value, json};

use crate::args::ErrorListArgs;
use crate::error::{CliError, CommandOutcome, Result, engine_error_json, print_notice};
use crate::output::CommandOutput;
use crate::progress::ProgressReporter;
use crate::{display, open};

/// Verifies a database and prints the damage.
pub(crate) fn verify(args: ErrorListArgs, path: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let json = output.json();
    let report = match verify_files(path, json) {
        Err(locked) if locked.is_locked() => verify_beside_writer(path, locked, json)?,
        report => report?,
    };
    let problems = problem_lines(&report);
    let sound = CommandOutcome::success_if(problems.is_empty());
    if output.json() {
        let files: Vec<Value> = report.files.iter().map(file_json).collect();
        let dropped = &report.dropped_after_damage;
        output.line(json!({ "sound": problems.is_empty(), "files": files, "dropped_after_damage": dropped }))?;
        return Ok(sound);
    }
    output.line(summary_line(&report))?;
    for (index_type, tables) in index_types(&report) {
        output.line(format!("{} with data blocks of type {index_type}.", display::plural(tables, "table")))?;
    }
    output.error_lines(&problems, args.all_errors)?;
    output.line(match problems.is_empty() {
        true => "No damage found.",
        false => {
            "Damage found: restore the files above from a checkpoint or a backup, or copy what is intact with \
                  `repair`."
        }
    })?;
    Ok(sound)
}

/// One line for each damaged file and for WAL frames that recovery would drop.
pub(crate) fn problem_lines(report: &VerifyReport) -> Vec<String> {
    let mut lines: Vec<String> = report.files.iter().filter_map(problem_line).collect();
    if let Some(dropped) = &report.dropped_after_damage {
        lines.push(format!(
            "{}: damaged at byte {}; {} after it were never synced, and recovery drops them",
            dropped.file.display(),
            dropped.offset,
            display::plural(dropped.frames, "commit frame")
        ));
    }
    lines
}

/// The reports of all damaged files.
pub(crate) fn damaged_json(report: &VerifyReport) -> Vec<Value> {
    report.files.iter().filter(|file| file.problem.is_some()).map(file_json).collect()
}

/// Reads every file of the database at `path`. Takes the shared lock, so no process writes to it.
pub(crate) fn verify_files(path: &Path, json: bool) -> Result<VerifyReport> {
    open::check_directory(path)?;
    let fs: Arc<dyn Fs> = Arc::new(DiskFs::new());
    // A file that changes during the check would look damaged. A directory without a database gets no lock file.
    let is_database = ["LOCK", "MANIFEST"].iter().any(|name| path.join(name).exists());
    let _lock = if is_database { Some(fs.lock_dir(path, LockMode::Shared)?) } else { None };
    let progress = ProgressReporter::bytes(json, 0, "Checking");
    Ok(inspect::verify(&fs, path, &mut |done, total| progress.set(done, total))?)
}

/// Verifies the tables and blob files of a database that another process writes. `locked`: the error of
/// [`verify_files`].
fn verify_beside_writer(path: &Path, locked: CliError, json: bool) -> Result<VerifyReport> {
    let db = open::open_beside(path, locked, json)?;
    let text =
        "azekura: tables and blob files are checked; of the manifest, the log and pools only what opening reads.";
    print_notice(json, json!({ "kind": "tables_and_blob_files_only" }), text);
    let progress = ProgressReporter::bytes(json, 0, "Checking");
    let report = inspect::verify_follower(&db.followed_files()?, &mut |done, total| progress.set(done, total))?;
    drop(progress);
    open::print_lag(&db, json);
    Ok(report)
}

pub(crate) fn summary_line(report: &VerifyReport) -> String {
    let bytes = report.files.iter().map(|file| file.bytes).sum();
    let entries = report.files.iter().map(|file| file.entries).sum();
    format!(
        "{}, {}, {} read and checked.",
        display::plural(report.files.len() as u64, "file"),
        display::bytes(bytes),
        display::plural(entries, "entry")
    )
}

/// Number of tables with each type of data block.
pub(crate) fn index_types(report: &VerifyReport) -> BTreeMap<String, u64> {
    let mut tables = BTreeMap::new();
    for index_type in report.files.iter().filter_map(|file| file.data_block_index_type) {
        *tables.entry(format!("{index_type:?}")).or_default() += 1;
    }
    tables
}

/// Example: "000007.sst (table, 2.0 MiB): damaged: checksum does not match, at byte 4096".
fn problem_line(file: &FileReport) -> Option<String> {
    let error = file.problem.as_ref()?;
    let position = error.offset().map(|offset| format!(", at byte {offset}")).unwrap_or_default();
    let kind = if error.kind() == ErrorKind::Corruption { "damaged".into() } else { error.kind().to_string() };
    let size = display::bytes(file.bytes);
    Some(format!("{} ({}, {size}): {kind}: {}{position}", file.path.display(), file.kind, error.message()))
}

fn file_json(file: &FileReport) -> Value {
    json!({
        "file": file.path.to_string_lossy(),
        "kind": file.kind,
        "bytes": file.bytes,
        "entries": file.entries,
        "data_block_index_type": file.data_block_index_type.map(|index_type| format!("{index_type:?}")),
        "problem": file.problem.as_ref().map(engine_error_json),
    })
}

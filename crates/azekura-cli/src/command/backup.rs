//! `backup`: create, list, verify, restore, prune, watch.

use std::cell::RefCell;
use std::path::Path;
use std::time::{Duration, Instant};

use azekura_backup::{
    BackupError, BackupInfo, BackupStore, CreateOptions, CreateReport, Progress, PruneOptions, RestoreOptions, Stage,
    Until, VerifyOptions, WatchStep,
};
use serde_json::{Value, json};

use crate::backup_args::{
    BackupAction, BackupArgs, BackupCreateArgs, BackupPruneArgs, BackupRestoreArgs, BackupVerifyArgs, BackupWatchArgs,
    StoreArgs, format_time,
};
use crate::display;
use crate::error::{CliError, CommandOutcome, Result};
use crate::interrupt;
use crate::open;
use crate::output::CommandOutput;
use crate::progress::ProgressReporter;

/// How long `watch` sleeps between two looks for Ctrl-C.
const NAP: Duration = Duration::from_millis(100);

/// Runs a subcommand.
pub(crate) fn run(args: BackupArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    // The second Ctrl-C ends a call that waits for the store.
    interrupt::catch_first()?;
    match args.action {
        BackupAction::Create(args) => create(&args, db, output),
        BackupAction::List(args) => list(&args, output),
        BackupAction::Verify(args) => verify(args, output),
        BackupAction::Restore(args) => restore(args, output),
        BackupAction::Prune(args) => prune(&args, output),
        BackupAction::Watch(args) => watch(&args, db, output),
    }
}

fn open_store(args: &StoreArgs) -> Result<BackupStore> {
    let variables =
        std::env::vars_os().filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)));
    let options = variables.filter(|(name, _)| is_store_option(name));
    Ok(BackupStore::open(&args.store, options)?.rate_limit(args.rate_limit))
}

/// Whether an environment variable is an option of a cloud store. Options have short names too, such as TOKEN or
/// ENDPOINT, which belong to other programs.
fn is_store_option(name: &str) -> bool {
    ["AWS_", "AZURE_", "GOOGLE_"].iter().any(|cloud| name.starts_with(cloud))
}

/// Shows a bar for each stage of a call. The call ends after Ctrl-C.
struct Bars {
    json: bool,
    bar: RefCell<Option<(Stage, ProgressReporter)>>,
}

impl Bars {
    fn new(output: &CommandOutput) -> Bars {
        Bars { json: output.json(), bar: RefCell::default() }
    }

    fn show(&self, progress: &Progress<'_>) -> bool {
        let mut bar = self.bar.borrow_mut();
        if bar.as_ref().is_none_or(|(stage, _)| *stage != progress.stage) {
            let reporter = match progress.stage {
                Stage::Reading => ProgressReporter::bytes(self.json, progress.total, "Reading"),
                Stage::Uploading => ProgressReporter::bytes(self.json, progress.total, "Uploading"),
                Stage::Downloading => ProgressReporter::bytes(self.json, progress.total, "Downloading"),
                _ => ProgressReporter::entries(self.json, progress.total, "Applying"),
            };
            *bar = Some((progress.stage, reporter));
        }
        if let Some((_, reporter)) = &*bar {
            reporter.set(progress.done, progress.total);
            reporter.message(progress.object.to_owned());
        }
        interrupt::check().is_ok()
    }
}

fn create_options(scratch: Option<&Path>) -> CreateOptions {
    scratch.map_or_else(CreateOptions::default, |scratch| CreateOptions::default().scratch(scratch))
}

fn create(args: &BackupCreateArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let store = open_store(&args.store)?;
    let db = open::open_to_back_up(db, output.json())?;
    let bars = Bars::new(output);
    let report = store.create(&db, &create_options(args.scratch.as_deref()), &mut |progress| bars.show(progress));
    drop(bars);
    db.close()?;
    let report = report?;
    output.json_or_text(created_json(&report), created_text(&report))?;
    Ok(CommandOutcome::Success)
}

fn backup_json(backup: &BackupInfo) -> Value {
    json!({
        "id": backup.id, "time": format_time(backup.time_ms), "sequence": backup.sequence, "files": backup.files,
        "bytes": backup.bytes, "partitions": backup.partitions, "durable": backup.is_durable,
    })
}

fn created_json(report: &CreateReport) -> Value {
    let mut object = backup_json(&report.backup);
    object["uploaded_objects"] = report.uploaded_objects.into();
    object["uploaded_bytes"] = report.uploaded_bytes.into();
    object["reused_bytes"] = report.reused_bytes.into();
    object
}

fn created_text(report: &CreateReport) -> String {
    let backup = &report.backup;
    format!(
        "{} with {}, {}; {} uploaded, {} were stored before",
        backup.id,
        display::plural(backup.partitions.len() as u64, "partition"),
        display::bytes(backup.bytes),
        display::bytes(report.uploaded_bytes),
        display::bytes(report.reused_bytes),
    )
}

fn list(args: &StoreArgs, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let backups = open_store(args)?.list()?;
    if output.json() {
        output.line(json!({ "backups": backups.iter().map(backup_json).collect::<Vec<_>>() }))?;
        return Ok(CommandOutcome::Success);
    }
    for backup in &backups {
        let partitions = display::plural(backup.partitions.len() as u64, "partition");
        let (time, bytes) = (format_time(backup.time_ms), display::bytes(backup.bytes));
        output.line(format_args!("{}  {time}  {bytes:>10}  {partitions}", backup.id))?;
    }
    output.line(display::plural(backups.len() as u64, "backup"))?;
    Ok(CommandOutcome::Success)
}

fn verify(args: BackupVerifyArgs, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let store = open_store(&args.store)?;
    let mut options = VerifyOptions::default().quick(args.quick);
    if let Some(id) = args.backup {
        options = options.backup(id);
    }
    let bars = Bars::new(output);
    let report = store.verify(&options, &mut |progress| bars.show(progress))?;
    drop(bars);
    let problem = |error: &BackupError| json!({ "kind": error.kind(), "message": error.to_string() });
    let problems: Vec<Value> = report.problems.iter().map(problem).collect();
    let lines: Vec<String> = report.problems.iter().map(ToString::to_string).collect();
    let summary = format!(
        "{}, {} with {}, {}: {}",
        display::plural(report.backups as u64, "backup"),
        display::plural(report.objects as u64, "object"),
        display::bytes(report.bytes),
        display::plural(report.log_objects as u64, "log object"),
        if lines.is_empty() { "no damage found".into() } else { display::plural(lines.len() as u64, "problem") },
    );
    let json = json!({
        "sound": problems.is_empty(), "backups": report.backups, "objects": report.objects, "bytes": report.bytes,
        "log_objects": report.log_objects, "problems": problems,
    });
    output.json_or_text(json, summary)?;
    if !output.json() {
        output.error_lines(&lines, true)?;
    }
    Ok(CommandOutcome::success_if(lines.is_empty()))
}

fn restore(args: BackupRestoreArgs, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let store = open_store(&args.store)?;
    let mut options = RestoreOptions::default();
    if let Some(id) = args.backup {
        options = options.backup(id);
    }
    if let Some(time) = args.until {
        options = options.until(Until::TimeMs(time));
    }
    let bars = Bars::new(output);
    let report = store.restore(&args.target, &options, &mut |progress| bars.show(progress))?;
    drop(bars);
    let target = args.target.display();
    let json = json!({
        "target": target.to_string(), "backup": report.backup.id, "sequence": report.sequence,
        "applied_commits": report.applied_commits, "downloaded_bytes": report.downloaded_bytes,
    });
    let commits = display::plural(report.applied_commits as u64, "commit");
    output.json_or_text(json, format_args!("{target}: backup {} and {commits} of the log", report.backup.id))?;
    Ok(CommandOutcome::Success)
}

fn prune(args: &BackupPruneArgs, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let keep = usize::try_from(args.keep).unwrap_or(usize::MAX);
    let report = open_store(&args.store)?.prune(&PruneOptions::keep(keep).dry_run(args.dry_run))?;
    let json = json!({
        "removed_backups": report.removed_backups, "deleted_objects": report.deleted_objects,
        "deleted_bytes": report.deleted_bytes, "dry_run": args.dry_run,
    });
    let text = format!(
        "{} removed, {} with {} deleted{}",
        display::plural(report.removed_backups.len() as u64, "backup"),
        display::plural(report.deleted_objects as u64, "object"),
        display::bytes(report.deleted_bytes),
        if args.dry_run { " (dry run)" } else { "" },
    );
    output.json_or_text(json, text)?;
    Ok(CommandOutcome::Success)
}

fn watch(args: &BackupWatchArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let store = open_store(&args.store)?;
    let db = open::open_to_back_up(db, output.json())?;
    {
        let mut watcher = store.watch(&db, create_options(args.scratch.as_deref()))?;
        loop {
            let bars = Bars::new(output);
            let step = watcher.step(&mut |progress| bars.show(progress));
            drop(bars);
            // Ctrl-C is the way to end this command.
            if interrupt::check().is_err() {
                break;
            }
            match step? {
                WatchStep::Idle if args.once => break,
                WatchStep::Idle => {
                    let start = Instant::now();
                    while start.elapsed() < args.every && interrupt::check().is_ok() {
                        std::thread::sleep(NAP.min(args.every));
                    }
                }
                step => print_step(&step, output)?,
            }
        }
    }
    db.close()?;
    Ok(CommandOutcome::Success)
}

fn print_step(step: &WatchStep, output: &mut CommandOutput) -> Result<()> {
    let (json, text) = match step {
        WatchStep::Shipped { commits, bytes, sequence } => (
            json!({ "shipped": { "commits": commits, "bytes": bytes, "sequence": sequence } }),
            format!("{}, {} up to {sequence}", display::plural(*commits as u64, "commit"), display::bytes(*bytes)),
        ),
        WatchStep::ShippedByOther { sequence } => (
            json!({ "shipped_by_other": { "sequence": sequence } }),
            format!("another process has stored the log up to {sequence}"),
        ),
        WatchStep::BackedUp { reason, report } => {
            let mut backup = created_json(report);
            backup["reason"] = reason.as_str().into();
            (json!({ "backup": backup }), format!("{}: {reason}", created_text(report)))
        }
        _ => return Ok(()),
    };
    output.json_or_text(json, text)?;
    // The lines of a command that runs for days are read while it does.
    output.finish()
}

impl From<BackupError> for CliError {
    fn from(error: BackupError) -> CliError {
        match error {
            BackupError::Database(error) => error.into(),
            BackupError::Interrupted => CliError::interrupted(),
            error => CliError::backup(error.kind(), error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a variable TOKEN or SKIP_SIGNATURE of another program changed how the store was accessed.
    #[test]
    fn other_variables_are_no_store_options() {
        let given = ["AWS_REGION", "AZURE_STORAGE_SAS_KEY", "GOOGLE_SERVICE_ACCOUNT"];
        let others =
            ["TOKEN", "ENDPOINT", "REGION", "PROXY_URL", "SKIP_SIGNATURE", "ALLOW_INVALID_CERTIFICATES", "BUCKET"];
        assert!(given.iter().all(|name| is_store_option(name)));
        assert!(!others.iter().any(|name| is_store_option(name)));
    }
}

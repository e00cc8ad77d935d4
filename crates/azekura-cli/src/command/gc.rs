//! `gc`: staleness of blob files, and blob GC.

use std::path::Path;
use std::time::Instant;

use azekura::{Database, GarbageCollection, GcReport, Partition};
use serde_json::{Value, json};

use crate::args::{GcAction, GcArgs, GcGoalArgs, GcPartitionArgs};
use crate::display::{self, bytes};
use crate::error::{CliError, CommandOutcome, Result};
use crate::open;
use crate::output::CommandOutput;
use crate::progress::ProgressReporter;

/// Target of `gc run` without a goal: bytes of blob files for each live byte.
const DEFAULT_SPACE_AMP: f32 = 1.5;

/// Runs the subcommand.
pub(crate) fn run(args: &GcArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    match &args.action {
        GcAction::Scan { partitions } => scan(partitions, db, output),
        GcAction::Run { partitions, goal } => run_gc(partitions, goal, db, output),
    }
}

fn scan(args: &GcPartitionArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let opened = open::open_to_read(db, output.json())?;
    let mut reports = Vec::new();
    for partition in partitions_with_separation(&opened.db, args)? {
        let progress = ProgressReporter::spinner(output.json(), "Scanning");
        progress.message(partition.name.to_string());
        reports.push((partition.name.to_string(), partition.gc_scan()?));
    }
    let to_json = |(name, report): &(String, GcReport)| {
        let mut object = report_json(report);
        object["name"] = json!(name);
        object
    };
    output.partitions(&reports, to_json, |(name, report), output| {
        output.line(format!("{name}:"))?;
        report.to_string().lines().try_for_each(|line| output.line(format!("  {line}")))
    })?;
    opened.print_lag(output.json());
    report_if_none(reports.is_empty(), output)
}

fn run_gc(args: &GcPartitionArgs, goal: &GcGoalArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let db = open::open_existing(db)?;
    let mut results = Vec::new();
    for partition in partitions_with_separation(&db, args)? {
        let progress = ProgressReporter::spinner(output.json(), "Blob GC");
        progress.message(partition.name.to_string());
        results.push(run_gc_on(&partition, goal)?);
    }
    db.close()?;
    let none = results.is_empty();
    let (objects, lines): (Vec<Value>, Vec<String>) = results.into_iter().unzip();
    if output.json() {
        output.line(json!({ "partitions": objects }))?;
    } else {
        lines.iter().try_for_each(|line| output.line(line))?;
    }
    report_if_none(none, output)
}

/// Runs blob GC in one partition. Returns the result as JSON and as text.
fn run_gc_on(partition: &Partition, goal: &GcGoalArgs) -> Result<(Value, String)> {
    let file_bytes_before = partition.metrics().blob_bytes();
    let before = partition.gc_scan()?;
    let start = Instant::now();
    let freed = match (goal.space_amp, goal.staleness, goal.drop_stale) {
        (_, _, true) => partition.gc_drop_stale_segments()?,
        (_, Some(share), _) => partition.gc_with_staleness_threshold(share)?,
        (target, None, false) => partition.gc_with_space_amp_target(target.unwrap_or(DEFAULT_SPACE_AMP))?,
    };
    let took = start.elapsed();
    let after = partition.gc_scan()?;
    let file_bytes_after = partition.metrics().blob_bytes();
    let object = json!({
        "name": *partition.name,
        "freed_bytes": freed,
        "seconds": took.as_secs_f64(),
        "file_bytes_before": file_bytes_before,
        "file_bytes_after": file_bytes_after,
        "before": report_json(&before),
        "after": report_json(&after),
    });
    let line = format!(
        "{}: {} freed in {}; blob files {} before, {} now; space amplification {:.2} before, {:.2} now",
        partition.name,
        bytes(freed),
        display::duration(took),
        bytes(file_bytes_before),
        bytes(file_bytes_after),
        before.space_amp(),
        after.space_amp()
    );
    Ok((object, line))
}

/// The named partitions, which must have key-value separation, or all partitions that have it.
fn partitions_with_separation(db: &Database, args: &GcPartitionArgs) -> Result<Vec<Partition>> {
    if args.partitions.is_empty() {
        let mut partitions = open::all_partitions(db)?;
        partitions.retain(|partition| partition.metrics().has_kv_separation);
        return Ok(partitions);
    }
    args.partitions.iter().map(|name| partition_with_separation(db, name)).collect()
}

fn partition_with_separation(db: &Database, name: &str) -> Result<Partition> {
    let partition = open::existing_partition(db, name)?;
    if partition.metrics().has_kv_separation {
        return Ok(partition);
    }
    let message = format!(
        "partition \"{name}\" has no key-value separation, so it has no blob files; `azekura compact` drops stale \
         entries from its tables, and a program that opens it with `with_kv_separation` stores large values in blob \
         files from then on"
    );
    Err(CliError::input(db.path(), message))
}

fn report_if_none(none: bool, output: &mut CommandOutput) -> Result<CommandOutcome> {
    if none && !output.json() {
        output.line("No partition has key-value separation, so there are no blob files.")?;
    }
    Ok(CommandOutcome::Success)
}

/// The report as JSON. `space_amp` is `null` if all values are stale, because the ratio is infinite then.
fn report_json(report: &GcReport) -> Value {
    let mut object = json!(report);
    object["stale_ratio"] = json!(report.stale_ratio());
    object["space_amp"] = json!(report.space_amp());
    object
}

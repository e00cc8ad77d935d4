//! `gc`: how stale blob files are, and collecting them.

use std::time::Instant;

use azekura::{Database, ErrorKind, GarbageCollection, GcReport, Partition};
use serde_json::{Value, json};

use crate::args::{GcAction, GcArgs, GoalArgs, SeparatedArgs};
use crate::command::look;
use crate::display::{self, bytes};
use crate::failure::{Answer, Failure, Result, complain};
use crate::open;
use crate::output::Output;
use crate::progress::Progress;

/// What is collected towards if nothing is said.
const SPACE_AMP: f32 = 1.5;

/// Does what was asked for.
pub(crate) fn run(args: &GcArgs, output: &mut Output) -> Result<Answer> {
    match &args.action {
        GcAction::Scan { which } => scan(which, output),
        GcAction::Run { which, goal } => collect(which, goal, output),
    }
}

fn scan(which: &SeparatedArgs, output: &mut Output) -> Result<Answer> {
    let db = open::to_read(&which.db.path)?;
    let mut reports = Vec::new();
    for partition in separated(&db, which)? {
        let progress = Progress::spinner(output.json(), "Scanning");
        progress.message(partition.name.to_string());
        reports.push((partition.name.to_string(), partition.gc_scan()?));
    }
    let as_json = |(name, report): &(String, GcReport)| with_name(name, report_json(report));
    look::show(&reports, output, as_json, |(name, report), output| {
        output.line(format!("{name}:"))?;
        report.to_string().lines().try_for_each(|line| output.line(format!("  {line}")))
    })?;
    say_if_none(reports.is_empty(), output)
}

/// What collecting did to a partition.
struct Collected {
    name: String,
    before: GcReport,
    after: GcReport,
    file_bytes_before: u64,
    file_bytes_after: u64,
    freed: u64,
    took: std::time::Duration,
}

fn collect(which: &SeparatedArgs, goal: &GoalArgs, output: &mut Output) -> Result<Answer> {
    let db = open::to_change(&which.db.path)?;
    let mut all = Vec::new();
    for partition in separated(&db, which)? {
        let progress = Progress::spinner(output.json(), "Collecting");
        progress.message(partition.name.to_string());
        all.push(collect_one(&partition, goal)?);
    }
    db.close()?;
    if output.json() {
        let partitions: Vec<Value> = all.iter().map(collected_json).collect();
        output.line(json!({ "partitions": partitions }))?;
    } else {
        all.iter().try_for_each(|it| output.line(told(it)))?;
    }
    say_if_none(all.is_empty(), output)
}

fn told(it: &Collected) -> String {
    format!(
        "{}: {} freed in {}; blob files {} before, {} now; space amplification {:.2} before, {:.2} now",
        it.name,
        bytes(it.freed),
        display::duration(it.took),
        bytes(it.file_bytes_before),
        bytes(it.file_bytes_after),
        it.before.space_amp(),
        it.after.space_amp()
    )
}

fn collect_one(partition: &Partition, goal: &GoalArgs) -> Result<Collected> {
    let file_bytes_before = partition.metrics().blob_bytes();
    let before = partition.gc_scan()?;
    let start = Instant::now();
    let freed = match (goal.space_amp, goal.staleness, goal.drop_stale) {
        (_, _, true) => partition.gc_drop_stale_segments()?,
        (_, Some(share), _) => partition.gc_with_staleness_threshold(share)?,
        (target, None, false) => partition.gc_with_space_amp_target(target.unwrap_or(SPACE_AMP))?,
    };
    let took = start.elapsed();
    Ok(Collected {
        name: partition.name.to_string(),
        before,
        after: partition.gc_scan()?,
        file_bytes_before,
        file_bytes_after: partition.metrics().blob_bytes(),
        freed,
        took,
    })
}

/// The partitions that were named, which must have key-value separation, or all that have it.
fn separated(db: &Database, which: &SeparatedArgs) -> Result<Vec<Partition>> {
    if !which.partitions.is_empty() {
        return which.partitions.iter().map(|name| named(db, name)).collect();
    }
    let mut found = Vec::new();
    for name in db.list_partitions() {
        match open::existing(db, &name) {
            Ok(partition) if partition.metrics().separated => found.push(partition),
            Ok(_) => {}
            // Its keys have an order that only its program knows; the others can be looked at all the same.
            Err(Failure::Engine(error)) if error.kind() == ErrorKind::Invalid => {
                complain(format_args!("azekura: left out: {}.", error.message()));
            }
            Err(failure) => return Err(failure),
        }
    }
    Ok(found)
}

fn named(db: &Database, name: &str) -> Result<Partition> {
    let partition = open::existing(db, name)?;
    if partition.metrics().separated {
        return Ok(partition);
    }
    let message = format!(
        "partition \"{name}\" has no key-value separation, so it has no blob files; `azekura compact` rids its tables \
         of what is stale, and a program that opens it with `with_kv_separation` keeps large values apart from then on"
    );
    Err(Failure::Input { file: db.path().to_path_buf(), message })
}

fn say_if_none(none: bool, output: &mut Output) -> Result<Answer> {
    if none && !output.json() {
        output.line("No partition has key-value separation, so there is nothing to collect.")?;
    }
    Ok(Answer::Yes)
}

fn with_name(name: &str, mut object: Value) -> Value {
    object["name"] = json!(name);
    object
}

/// Space amplification without an end, where all is stale, is `null`.
fn report_json(report: &GcReport) -> Value {
    json!({
        "segment_count": report.segment_count,
        "stale_segment_count": report.stale_segment_count,
        "total_bytes": report.total_bytes,
        "stale_bytes": report.stale_bytes,
        "pinned_bytes": report.pinned_bytes,
        "total_blobs": report.total_blobs,
        "stale_blobs": report.stale_blobs,
        "stale_ratio": report.stale_ratio(),
        "space_amp": report.space_amp(),
    })
}

fn collected_json(it: &Collected) -> Value {
    json!({
        "name": it.name,
        "freed_bytes": it.freed,
        "seconds": it.took.as_secs_f64(),
        "file_bytes_before": it.file_bytes_before,
        "file_bytes_after": it.file_bytes_after,
        "before": report_json(&it.before),
        "after": report_json(&it.after),
    })
}

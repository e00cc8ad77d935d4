//! `compact` and `checkpoint`.

use std::path::Path;

use azekura::{Config, Database};
use serde::Serialize;
use serde_json::json;

use crate::args::{CheckpointArgs, PartitionFilter};
use crate::display;
use crate::error::{CommandOutcome, Result};
use crate::open;
use crate::output::CommandOutput;
use crate::progress::ProgressReporter;

/// Merges the tables of one partition or of all.
pub(crate) fn compact(args: &PartitionFilter, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let db = open::open_existing(db)?;
    let rows = compact_in(&db, args, output.json())?;
    db.close()?;
    print_compacted(&rows, output)?;
    Ok(CommandOutcome::Success)
}

/// A compacted partition.
#[derive(Debug, Serialize)]
pub(crate) struct CompactedPartition {
    name: String,
    bytes_before: u64,
    bytes_after: u64,
}

/// Merges the tables of one partition or of all, in an open database.
pub(crate) fn compact_in(db: &Database, args: &PartitionFilter, json: bool) -> Result<Vec<CompactedPartition>> {
    let mut compacted = Vec::new();
    for partition in open::partitions(db, args.partition.as_deref())? {
        let name = partition.name.to_string();
        let progress = ProgressReporter::spinner(json, "Compacting");
        progress.message(name.clone());
        partition.flush()?;
        let bytes_before = partition.disk_space();
        partition.major_compact()?;
        compacted.push(CompactedPartition { name, bytes_before, bytes_after: partition.disk_space() });
    }
    Ok(compacted)
}

/// Prints the sizes before and after a compaction.
pub(crate) fn print_compacted(compacted: &[CompactedPartition], output: &mut CommandOutput) -> Result<()> {
    if output.json() {
        return output.line(json!({ "partitions": compacted }));
    }
    compacted.iter().try_for_each(|of| {
        let (before, after) = (display::bytes(of.bytes_before), display::bytes(of.bytes_after));
        output.line(format!("{}: {before} before, {after} now", of.name))
    })
}

/// Copies the whole database, and opens the copy to check it.
pub(crate) fn checkpoint(args: &CheckpointArgs, db: &Path, output: &mut CommandOutput) -> Result<CommandOutcome> {
    let db = open::open_existing(db)?;
    {
        let progress = ProgressReporter::spinner(output.json(), "Copying");
        progress.message(args.target.display().to_string());
        db.checkpoint(&args.target)?;
    }
    db.close()?;
    let copy = Config::new(&args.target).open_read_only()?;
    let (bytes, partitions) = (copy.disk_space(), copy.list_partitions().len());
    output.json_or_text(
        json!({ "target": args.target.to_string_lossy(), "bytes": bytes, "partitions": partitions }),
        format_args!(
            "{} with {}, {}",
            args.target.display(),
            display::plural(partitions as u64, "partition"),
            display::bytes(bytes)
        ),
    )?;
    Ok(CommandOutcome::Success)
}

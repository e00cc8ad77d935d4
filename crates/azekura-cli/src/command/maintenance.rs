//! `compact` and `checkpoint`.

use std::path::Path;

use azekura::Config;
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
    let mut rows = Vec::new();
    let names = args.partition.clone().map_or_else(|| db.list_partitions(), |name| vec![name]);
    let partitions: Vec<_> = names.iter().map(|name| open::existing_partition(&db, name)).collect::<Result<_>>()?;
    for partition in partitions {
        let progress = ProgressReporter::spinner(output.json(), "Compacting");
        progress.message(partition.name.to_string());
        partition.flush()?;
        let before = partition.disk_space();
        partition.major_compact()?;
        rows.push((partition.name.to_string(), before, partition.disk_space()));
    }
    db.close()?;
    if output.json() {
        let row = |(name, before, after)| json!({ "name": name, "bytes_before": before, "bytes_after": after });
        output.line(json!({ "partitions": rows.into_iter().map(row).collect::<Vec<_>>() }))?;
    } else {
        for (name, before, after) in rows {
            output.line(format!("{name}: {} before, {} now", display::bytes(before), display::bytes(after)))?;
        }
    }
    Ok(CommandOutcome::Success)
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

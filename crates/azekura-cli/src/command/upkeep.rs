//! `compact` and `checkpoint`.

use azekura::{Config, Database};
use serde_json::json;

use crate::args::{CheckpointArgs, CompactArgs};
use crate::display;
use crate::failure::{Answer, Result};
use crate::open;
use crate::output::Output;
use crate::progress::Progress;

/// Merges the tables of one partition or of all.
pub(crate) fn compact(args: &CompactArgs, output: &mut Output) -> Result<Answer> {
    let db = open::to_change(&args.db.path)?;
    let mut rows = Vec::new();
    for partition in open::named_or_all(&db, args.partition.as_deref())? {
        let progress = Progress::spinner(output.json(), "Compacting");
        progress.message(partition.name.to_string());
        partition.flush()?;
        let before = partition.disk_space();
        partition.major_compact()?;
        rows.push((partition.name.to_string(), before, partition.disk_space()));
    }
    db.close()?;
    if output.json() {
        let partitions: Vec<_> = rows
            .iter()
            .map(|(name, before, after)| json!({ "name": name, "bytes_before": before, "bytes_after": after }))
            .collect();
        output.line(json!({ "partitions": partitions }))?;
    } else {
        for (name, before, after) in rows {
            output.line(format!("{name}: {} before, {} now", display::bytes(before), display::bytes(after)))?;
        }
    }
    Ok(Answer::Yes)
}

/// Copies the whole database, and opens the copy to see that it is one.
pub(crate) fn checkpoint(args: &CheckpointArgs, output: &mut Output) -> Result<Answer> {
    let db = open::to_change(&args.db.path)?;
    {
        let progress = Progress::spinner(output.json(), "Copying");
        progress.message(args.target.display().to_string());
        db.checkpoint(&args.target)?;
    }
    db.close()?;
    let copy: Database = Config::new(&args.target).open_read_only()?;
    let (bytes, partitions) = (copy.disk_space(), copy.list_partitions().len());
    if output.json() {
        output.line(json!({ "target": args.target.to_string_lossy(), "bytes": bytes, "partitions": partitions }))?;
    } else {
        output.line(format!(
            "{} with {}, {}",
            args.target.display(),
            display::plural(partitions as u64, "partition"),
            display::bytes(bytes)
        ))?;
    }
    Ok(Answer::Yes)
}

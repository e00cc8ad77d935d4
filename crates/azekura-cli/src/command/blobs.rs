//! `blobs`: the blob files, and how stale each is.

use azekura::{BlobFileMetrics, PartitionMetrics};
use serde_json::{Value, json};

use crate::args::LookArgs;
use crate::command::look;
use crate::display::{self, bytes, count, plural};
use crate::failure::{Answer, Result};
use crate::output::Output;

/// Characters of a bar for a file that is stale as a whole.
const BAR: usize = 20;

/// The blob files of each partition, the stalest first.
pub(crate) fn blobs(args: &LookArgs, output: &mut Output) -> Result<Answer> {
    let (_db, mut partitions) = look::look(args)?;
    if args.partition.is_none() {
        partitions.retain(|partition| partition.separated);
    }
    partitions.iter_mut().for_each(|partition| sort(&mut partition.blob_files));
    look::show(&partitions, output, partition_json, draw)?;
    if output.json() {
        return Ok(Answer::Yes);
    }
    output.line(
        match (partitions.iter().any(|partition| partition.stale_blob_bytes() > 0), partitions.is_empty()) {
            (_, true) => "No partition has key-value separation, so there are no blob files.",
            (true, _) => {
                "`azekura gc run` collects what is stale; `azekura gc scan` also sees what no compaction has met."
            }
            (false, _) => "What no compaction has met counts as referenced; `azekura gc scan` is exact.",
        },
    )?;
    Ok(Answer::Yes)
}

/// By the share that is stale, then by number.
fn sort(files: &mut [BlobFileMetrics]) {
    let share = |file: &BlobFileMetrics| (u128::from(file.stale_bytes()) << 64) / u128::from(file.value_bytes.max(1));
    files.sort_by_key(|file| (std::cmp::Reverse(share(file)), file.id));
}

fn name(file: &BlobFileMetrics) -> String {
    format!("{:06}.blob", file.id)
}

/// "12.5 %".
fn percent(stale: u64, of: u64) -> String {
    format!("{:.1} %", stale as f64 * 100.0 / of.max(1) as f64)
}

fn draw(partition: &PartitionMetrics, output: &mut Output) -> Result<()> {
    let files = &partition.blob_files;
    if files.is_empty() {
        let why = if partition.separated { "nothing is in them yet" } else { "it has no key-value separation" };
        return output.line(format!("{}: no blob files, {why}", partition.name));
    }
    let values: u64 = files.iter().map(|file| file.values).sum();
    let value_bytes: u64 = files.iter().map(|file| file.value_bytes).sum();
    let stale = partition.stale_blob_bytes();
    output.line(format!(
        "{}: {} of {}, {}; of {} of values {} referenced, {} stale ({})",
        partition.name,
        plural(files.len() as u64, "blob file"),
        bytes(partition.blob_bytes()),
        plural(values, "value"),
        bytes(value_bytes),
        bytes(partition.referenced_blob_bytes()),
        bytes(stale),
        percent(stale, value_bytes)
    ))?;
    let head = ["file", "bytes", "values", "referenced", "stale", "staleness"];
    let mut table = display::plain_table(&head, 1..5);
    for file in files {
        table.add_row([
            name(file),
            bytes(file.bytes),
            count(file.values),
            bytes(file.referenced_bytes),
            percent(file.stale_bytes(), file.value_bytes),
            display::bar(file.stale_bytes(), file.value_bytes, BAR),
        ]);
    }
    output.line(table)
}

fn partition_json(partition: &PartitionMetrics) -> Value {
    let files: Vec<Value> = partition.blob_files.iter().map(file_json).collect();
    json!({
        "name": partition.name,
        "separated": partition.separated,
        "files": files,
        "bytes": partition.blob_bytes(),
        "referenced_bytes": partition.referenced_blob_bytes(),
        "stale_bytes": partition.stale_blob_bytes(),
    })
}

fn file_json(file: &BlobFileMetrics) -> Value {
    json!({
        "file": name(file),
        "bytes": file.bytes,
        "values": file.values,
        "value_bytes": file.value_bytes,
        "referenced_values": file.referenced_values,
        "referenced_bytes": file.referenced_bytes,
        "stale_bytes": file.stale_bytes(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_nothing_are_nothing() {
        assert_eq!(percent(0, 0), "0.0 %");
        assert_eq!(percent(1, 8), "12.5 %");
        assert_eq!(percent(7, 7), "100.0 %");
    }
}

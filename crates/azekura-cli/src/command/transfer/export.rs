//! `export`: out of a partition.

use std::path::Path;

use crate::args::{ExportArgs, Format};
use crate::command::transfer::{to_dir, to_lines};
use crate::failure::{Answer, Result};
use crate::open;
use crate::output::Output;

/// Writes a partition out.
pub(crate) fn export(args: &ExportArgs, output: &mut Output) -> Result<Answer> {
    let lines = args.target == Path::new("-")
        || args.target.extension().is_some_and(|e| ["jsonl", "ndjson", "json"].iter().any(|known| e == *known));
    let by_name = if lines { Format::Jsonl } else { Format::Dir };
    let (_db, partition) = open::map_to_read(&args.map)?;
    match args.format.unwrap_or(by_name) {
        Format::Dir => to_dir::export(&partition, &args.target, output.json())?.tell("written", output),
        Format::Jsonl if args.target == Path::new("-") => to_lines::export_to_output(&partition, output),
        Format::Jsonl => to_lines::export_to_file(&partition, &args.target, output.json())?.tell("written", output),
    }
}
